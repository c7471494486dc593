/* newcomers.c: see newcomers.h. An IPv6 host counts as its /64: it has all addresses in there. */
#include "core/newcomers.h"
#include "list.h"

#include <netinet/in.h>
#include <stddef.h>
#include <string.h>
#include <sys/resource.h>

#include "proto/auth.h"

#define SOURCES 256 /* two addresses may share a place; which two depends on the salt */

uint32_t kvx_connections_max(uint64_t wanted, uint32_t share) {
    struct rlimit limit = {.rlim_cur = RLIM_INFINITY};
    (void)getrlimit(RLIMIT_NOFILE, &limit);
    uint64_t most = limit.rlim_cur == RLIM_INFINITY ? UINT32_MAX : limit.rlim_cur / share;
    most = wanted < most ? wanted : most;
    return most > UINT32_MAX ? UINT32_MAX : (uint32_t)most;
}

void kvx_newcomers_init(kvx_newcomers *line) {
    const uint32_t most = kvx_connections_max(KVX_NEWCOMERS_MAX, 8);
    *line = (kvx_newcomers){.max = most < KVX_NEWCOMERS_MIN ? KVX_NEWCOMERS_MIN : most};
    kvx_random(&line->salt, sizeof line->salt);
}

static uint64_t newcomers_prefix_of(const struct sockaddr_storage *address) {
    uint64_t prefix = 0;
    if (address->ss_family == AF_INET) {
        prefix = ((const struct sockaddr_in *)address)->sin_addr.s_addr;
    } else if (address->ss_family == AF_INET6) {
        const struct in6_addr *v6 = &((const struct sockaddr_in6 *)address)->sin6_addr;
        if (IN6_IS_ADDR_V4MAPPED(v6)) {
            memcpy(&prefix, &v6->s6_addr[12], 4);
        } else {
            memcpy(&prefix, v6->s6_addr, sizeof prefix);
        }
    }
    return prefix;
}

static uint32_t newcomers_source_of(const kvx_newcomers *line, const struct sockaddr_storage *address) {
    uint64_t mixed = ((address == NULL ? 0 : newcomers_prefix_of(address)) ^ line->salt) * 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ mixed >> 29 ^ line->salt) * 0xbf58476d1ce4e5b9u;
    return (uint32_t)(mixed >> 40) % SOURCES;
}

void kvx_newcomers_add(kvx_newcomers *line, kvx_newcomer *one, const struct sockaddr_storage *address) {
    *one = (kvx_newcomer){.previous = line->last, .source = newcomers_source_of(line, address), .waits = true};
    KVX_QUEUE_APPEND(line->first, line->last, one, next);
    line->count++;
}

void kvx_newcomers_remove(kvx_newcomers *line, kvx_newcomer *one) {
    if (!one->waits) {
        return;
    }
    one->waits = false;
    *(one->previous != NULL ? &one->previous->next : &line->first) = one->next;
    *(one->next != NULL ? &one->next->previous : &line->last) = one->previous;
    line->count--;
}

kvx_newcomer *kvx_newcomers_oldest(const kvx_newcomers *line) {
    uint32_t counts[SOURCES] = {0};
    uint32_t most = 0;
    for (const kvx_newcomer *one = line->first; one != NULL; one = one->next) {
        most = ++counts[one->source] > most ? counts[one->source] : most;
    }
    kvx_newcomer *one = line->first;
    while (one != NULL && counts[one->source] < most) {
        one = one->next;
    }
    return one;
}

kvx_newcomer *kvx_newcomers_surplus(const kvx_newcomers *line) {
    return line->count < line->max ? NULL : kvx_newcomers_oldest(line);
}

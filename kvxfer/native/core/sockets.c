/* sockets.c: see sockets.h. */
#define _GNU_SOURCE
#include "core/sockets.h"
#include "core/forks.h"
#include "transport.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

#define PAUSE_MS    100
#define TIMEOUT_MAX 60000 /* then it asks the clock again */

/* -- addresses ---------------------------------------------------------------------------------------------------- */

static bool sockets_parse_port(const char *text, uint16_t *port_p) {
    char *end;
    if (*text < '0' || *text > '9') {
        return false;
    }
    unsigned long port = strtoul(text, &end, 10);
    if (*end != '\0' || port > 65535) {
        return false;
    }
    *port_p = (uint16_t)port;
    return true;
}

bool kvx_address_parse_host(const char *host, uint16_t port, struct sockaddr_storage *address_p, socklen_t *length_p) {
    struct sockaddr_in *v4 = (struct sockaddr_in *)address_p;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)address_p;
    memset(address_p, 0, sizeof *address_p);
    if (inet_pton(AF_INET, host, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons(port);
        *length_p = sizeof *v4;
        return true;
    }
    if (inet_pton(AF_INET6, host, &v6->sin6_addr) == 1) {
        v6->sin6_family = AF_INET6;
        v6->sin6_port = htons(port);
        *length_p = sizeof *v6;
        return true;
    }
    return false;
}

int kvx_address_parse(const char *text, struct sockaddr_storage *address_p, socklen_t *length_p) {
    char host[KVX_ENDPOINT_MAX];
    const char *colon = strrchr(text, ':');
    uint16_t port;
    if (colon == NULL || !sockets_parse_port(colon + 1, &port) || port == 0) {
        return KVX_E_INVALID;
    }
    size_t length = (size_t)(colon - text);
    bool bracketed = length > 2 && text[0] == '[' && text[length - 1] == ']';
    if (bracketed) {
        text++;
        length -= 2;
    }
    if (length >= sizeof host || (memchr(text, ':', length) != NULL) != bracketed) {
        return KVX_E_INVALID;
    }
    memcpy(host, text, length);
    host[length] = '\0';
    return kvx_address_parse_host(host, port, address_p, length_p) ? KVX_OK : KVX_E_INVALID;
}

void kvx_address_format(const struct sockaddr_storage *address, char *text, size_t size) {
    char host[INET6_ADDRSTRLEN];
    if (address->ss_family == AF_INET6) {
        const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)address;
        inet_ntop(AF_INET6, &v6->sin6_addr, host, sizeof host);
        snprintf(text, size, "[%s]:%u", host, ntohs(v6->sin6_port));
    } else {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)address;
        inet_ntop(AF_INET, &v4->sin_addr, host, sizeof host);
        snprintf(text, size, "%s:%u", host, ntohs(v4->sin_port));
    }
}

uint32_t kvx_address_port(const struct sockaddr_storage *address) {
    return address->ss_family == AF_INET6 ? ntohs(((const struct sockaddr_in6 *)address)->sin6_port)
                                          : ntohs(((const struct sockaddr_in *)address)->sin_port);
}

bool kvx_address_same_host(const struct sockaddr_storage *a, const struct sockaddr_storage *b) {
    if (a->ss_family != b->ss_family) {
        return false;
    }
    if (a->ss_family == AF_INET6) {
        return memcmp(&((const struct sockaddr_in6 *)a)->sin6_addr, &((const struct sockaddr_in6 *)b)->sin6_addr, 16) ==
               0;
    }
    return ((const struct sockaddr_in *)a)->sin_addr.s_addr == ((const struct sockaddr_in *)b)->sin_addr.s_addr;
}

/* -- sockets ------------------------------------------------------------------------------------------------------ */

int kvx_socket_error(int fd) {
    int error = 0;
    socklen_t length = sizeof error;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) {
        return errno;
    }
    return error;
}

bool kvx_socket_to_itself(int fd) {
    struct sockaddr_storage local, remote;
    socklen_t local_length = sizeof local, remote_length = sizeof remote;
    memset(&local, 0, sizeof local);
    memset(&remote, 0, sizeof remote);
    return getsockname(fd, (struct sockaddr *)&local, &local_length) == 0 &&
           getpeername(fd, (struct sockaddr *)&remote, &remote_length) == 0 && local_length == remote_length &&
           memcmp(&local, &remote, local_length) == 0;
}

static bool sockets_listener_arm(kvx_listener *listener, int how, bool on) {
    struct epoll_event event = {.events = on ? (uint32_t)EPOLLIN : 0, .data.ptr = listener};
    return epoll_ctl(listener->epoll_fd, how, listener->fd, &event) == 0;
}

bool kvx_listener_watch(kvx_listener *listener, int epoll_fd) {
    listener->epoll_fd = epoll_fd;
    return sockets_listener_arm(listener, EPOLL_CTL_ADD, true);
}

int kvx_listener_accept(const kvx_listener *listener, struct sockaddr_storage *from_p) {
    for (;;) {
        socklen_t length = sizeof *from_p;
        int fd = kvx_owned(accept4(listener->fd, (struct sockaddr *)from_p, from_p == NULL ? NULL : &length,
                                   SOCK_NONBLOCK | SOCK_CLOEXEC));
        if (fd >= 0 || (errno != EINTR && errno != ECONNABORTED && errno != EPROTO)) {
            return fd;
        }
    }
}

void kvx_listener_pause(kvx_listener *listener, bool somebody_left) {
    (void)sockets_listener_arm(listener, EPOLL_CTL_MOD, false);
    listener->retry_ms = kvx_now_ms() + (somebody_left ? PAUSE_MS / 10 : PAUSE_MS);
}

void kvx_listener_resume(kvx_listener *listener) {
    if (listener->retry_ms != 0 && kvx_now_ms() >= listener->retry_ms) {
        listener->retry_ms = 0;
        (void)sockets_listener_arm(listener, EPOLL_CTL_MOD, true);
    }
}

int kvx_timeout_ms(uint64_t until_ms, uint64_t or_until_ms, int timeout_ms) {
    if (until_ms == 0 || (or_until_ms != 0 && or_until_ms < until_ms)) {
        until_ms = or_until_ms;
    }
    if (until_ms == 0) {
        return timeout_ms;
    }
    uint64_t now_ms = kvx_now_ms();
    int left = until_ms <= now_ms ? 0 : until_ms - now_ms > TIMEOUT_MAX ? TIMEOUT_MAX : (int)(until_ms - now_ms);
    return timeout_ms < 0 || left < timeout_ms ? left : timeout_ms;
}

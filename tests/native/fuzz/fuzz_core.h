/* fuzz_core.h: below a real transport, in place of the engine: one grant at a time, in the middle of guarded memory.
 *
 * What a transport promises its core is checked here: an access that was begun is ended, quiet is reported once and
 * only when nothing is under way, nobody detaches more than was attached. Included by one file of a program. */
#ifndef KVX_FUZZ_CORE_H
#define KVX_FUZZ_CORE_H

#include "core/device_memory.h"
#include "fuzz.h"
#include "transport.h"

#define GUARD 4096
#ifndef LENGTH
#define LENGTH 8192
#endif

/* -- a core with one grant -------------------------------------------------------------------------------------- */

static uint8_t *memory; /* guard, grant, guard; each a heap block of its own would hide nothing more */
static kvx_region region;
static kvx_grant grant;
static int accesses, attachments, quiet, notify_room;
static kvx_transport_counters counters;
static kvx_engine_config config;
static int wake_fd, more_wake_fds[2]; /* of progress threads */
static uint64_t clock_ms = 1000;      /* stands still, unless a program moves it: no deadline ever comes */

kvx_grant_link *kvx_grant_link_of(kvx_grant *one, uint32_t slot) {
    static kvx_grant_link link; /* only one grant at a time, and one transport */
    (void)one, (void)slot;
    return &link;
}

int kvx_access_begin(kvx_core *core, uint64_t id, uint64_t generation, kvx_access *access) {
    (void)core;
    if (id != grant.id) {
        return KVX_E_UNKNOWN;
    }
    if (generation != region.generation) {
        return KVX_E_STALE;
    }
    if (grant.revoked) {
        return KVX_E_REVOKED;
    }
    accesses++;
    *access = (kvx_access){.grant = &grant, .base = memory + GUARD, .length = LENGTH};
    return KVX_OK;
}
int kvx_access_allow(const kvx_access *access, uint32_t rights) {
    return (access->grant->access & rights) == rights ? KVX_OK : KVX_E_ACCESS;
}
int kvx_access_claim(const kvx_access *access, uint64_t length) {
    return length <= access->length ? KVX_OK : KVX_E_RANGE;
}
int kvx_access_range(kvx_access *access, uint64_t offset, uint64_t length) {
    return offset <= access->length && length <= access->length - offset ? KVX_OK : KVX_E_RANGE;
}
void kvx_access_end(kvx_core *core, kvx_access *access) {
    (void)core;
    FUZZ_CHECK(accesses > 0 && access->grant == &grant);
    access->grant = NULL;
    accesses--;
}
void kvx_grant_attach(kvx_core *core, uint64_t id) {
    (void)core;
    attachments += id == grant.id;
}
void kvx_grant_detach(kvx_core *core, uint64_t id, bool lost) {
    (void)core;
    (void)lost;
    FUZZ_CHECK(id != grant.id || attachments > 0);
    attachments -= id == grant.id;
}
int kvx_notify_post(kvx_core *core, uint32_t slot, uint64_t id, uint64_t tag, uint64_t value) {
    (void)core, (void)slot, (void)id, (void)tag, (void)value;
    return notify_room > 0 ? notify_room--, KVX_OK : KVX_AGAIN;
}
void kvx_grant_quiet(kvx_core *core, uint32_t slot, kvx_grant *which) {
    (void)core, (void)slot;
    FUZZ_CHECK(which == &grant && !quiet && accesses == 0);
    quiet = 1;
}
uint64_t kvx_now_ms(void) {
    return clock_ms;
}
void kvx_core_threads_set(kvx_core *core, uint32_t slot, uint32_t threads) {
    (void)core, (void)slot, (void)threads;
}
int kvx_core_wake_fd(kvx_core *core, uint32_t slot, uint32_t thread) {
    (void)core, (void)slot;
    return thread == 0 ? wake_fd : more_wake_fds[thread - 1];
}
#ifndef FUZZ_OWNS
int kvx_core_owner_set(kvx_core *core, uint32_t slot, void (*turn)(void *transport), void *transport) {
    (void)core, (void)slot, (void)turn, (void)transport;
    return wake_fd; /* for diallers only */
}
bool kvx_op_in_submit(const kvx_op *op) {
    (void)op;
    return false;
}
#endif
kvx_transport_counters *kvx_core_counters(kvx_core *core, uint32_t slot) {
    (void)core, (void)slot;
    return &counters;
}
#ifndef FUZZ_DIALS /* an owner never dials */
void kvx_op_complete(kvx_op *op, int status, uint64_t bytes, int sys_errno, int segment) {
    (void)op, (void)status, (void)bytes, (void)sys_errno, (void)segment;
    abort();
}
void kvx_connect_done(kvx_peer *peer, int status, int sys_errno) {
    (void)peer, (void)status, (void)sys_errno;
    abort();
}
void kvx_import_done(kvx_import *import, int status, int sys_errno) {
    (void)import, (void)status, (void)sys_errno;
    abort();
}
void kvx_peer_lost(kvx_peer *peer, int status) {
    (void)peer, (void)status;
    abort();
}
void kvx_peer_closed(kvx_peer *peer) {
    (void)peer;
    abort();
}
#endif

#endif

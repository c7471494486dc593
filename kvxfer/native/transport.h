/* transport.h: the contract between the core and a transport.
 *
 * A transport is one table of ten functions, one file, one global symbol (`kvx_transport_<name>`). It moves bytes and
 * nothing else: the core owns ids, tables, pins, keys, threads and the completion ring; a transport queues and
 * finishes. All ten slots are required (kvx_core refuses a table with a hole or with another ABI number); what a
 * transport cannot do it says in `query`.
 *
 * Threads. The core makes every thread. Each transport says in `open` how many progress threads it wants
 * (kvx_core_threads_set, default 1); the core loops each of them over `progress`. mem_import, peer_connect, peer_close,
 * submit and mem_release(grant) are called from the engine's owner thread (submit also by the fault transport, from a
 * progress thread); mem_register from any thread; mem_release(region, NULL) from the copy pool. None of them may block,
 * sleep, or copy more than config->inline_bytes_max. The core never holds its own lock while it calls a slot, so a slot
 * may call any core function; core functions never call a slot back, so a transport may hold its own locks while it
 * calls them (lock order: transport, then core).
 *
 * Objects (kvx_region, kvx_grant, kvx_import, kvx_peer, kvx_op) belong to the core. A transport may keep a pointer from
 * the slot that introduced it until the call that ends it (named beside each slot), and may use the `transport_data`
 * field of imports, peers and ops freely.
 */
#ifndef KVX_TRANSPORT_H
#define KVX_TRANSPORT_H

#include <stdatomic.h>
#include <stdbool.h>

#include "api.h"
#include "core/blocks.h"

typedef struct kvx_core kvx_core;
typedef struct kvx_op kvx_op;

/* Memory registered with this engine. Lives until mem_release(region, NULL) returned on every transport. */
typedef struct kvx_region {
    uint64_t id;
    uint64_t generation;
    uint8_t *base;
    uint64_t length;
    int memfd;      /* -1: not shareable by fd */
    uint32_t flags; /* KVX_REGION_* */
    uint32_t kind;  /* KVX_MEM_* */
    int32_t device; /* -1: none */
    /* Of KVX_MEM_HBM and KVX_MEM_PINNED: the block around it, which a vendor library registers once for all regions in
     * it. A transport learns of a new one when mem_register shows an arena_id that it does not know, and forgets it
     * with the last region that it holds of it: the memory is given back to the driver after that. An arena_id is never
     * used again and differs between engine starts, so it also tells old addresses from new ones. 0: none. */
    uint64_t arena_id;
    uint8_t *arena_base;
    uint64_t arena_length;
    kvx_mem_why *why; /* during mem_register: where a transport that refuses may say more; otherwise NULL */
} kvx_region;

/* The right of peers to reach a part of a region. */
typedef struct kvx_grant {
    uint64_t id;
    kvx_region *region;
    uint64_t offset; /* of the grant within the region */
    uint64_t length;
    uint32_t access;    /* KVX_READ | KVX_WRITE */
    kvx_blocks *blocks; /* what of it may be reached; NULL = all */
    uint8_t key[KVX_KEY_BYTES];
    _Atomic bool revoked; /* set by the core before mem_release; look at it between chunks */
} kvx_grant;

/* A place of each transport's own in a grant, from mem_release(grant) to kvx_grant_quiet: taking back may not fail for
 * want of memory. */
typedef struct kvx_grant_link {
    kvx_grant *next;
    uint32_t threads_left;
} kvx_grant_link;

/* A connection that we opened to another engine. Lives until kvx_peer_closed: every peer that peer_connect took gets
 * exactly one peer_close(peer, NULL), also after connect_done with an error (then the core closes it by itself), also
 * when lost (then its owner does, later). Only the engine's close ends a peer without that. */
typedef struct kvx_peer {
    uint64_t id;
    uint64_t token; /* of the pending connect */
    char endpoint[KVX_ENDPOINT_MAX];
    bool encrypted; /* the application gave the secret of the peer's engine */
    uint8_t secret[KVX_SECRET_BYTES];
    uint8_t engine_id[KVX_ID_BYTES]; /* who answered, by its own word; set before connect_done, zeros when not known */
    void *transport_data;
} kvx_peer;

/* A remote grant that we may use. */
typedef struct kvx_import {
    uint64_t id;
    uint64_t token; /* of the pending import */
    kvx_peer *peer;
    kvx_remote remote;
    uint8_t *mapping;     /* set by a transport that maps, before kvx_import_done */
    int32_t device;       /* with it, of memory of a device: ours, whose kernels may use it; -1 from the start */
    _Atomic bool revoked; /* set by the transport when the owner takes it back */
    void *transport_data;
} kvx_import;

/* One accepted kvx_submit. The segments were checked against both the local region and import->remote.length. */
struct kvx_op {
    uint64_t token;
    uint32_t kind;      /* KVX_OP_PUT | KVX_OP_GET */
    uint32_t flags;     /* KVX_OP_* */
    uint32_t rank;      /* how urgent it is, see turns.h */
    kvx_region *region; /* pinned until kvx_op_complete; NULL when count == 0 */
    kvx_import *import;
    kvx_segment *segments; /* adjacent ones merged; owned by the core until kvx_op_complete */
    uint32_t count;
    uint64_t bytes; /* sum of lengths */
    uint64_t tag, value;
    _Atomic bool cancelled; /* look at it between chunks */
    _Atomic uint64_t moved; /* add to it as bytes move: kvx_op_moved. Only the transport knows before the end */
    bool corrupt; /* test seam, set by the fault transport: flip one bit of the first byte that this op delivers */
    int injected; /* test seam, likewise: the status that the op ends with when all went well */
    /* test seam, likewise: called first by kvx_op_complete; true = the op is not over, whoever set it goes on with it
     */
    bool (*seam)(kvx_op *op, int status, uint64_t bytes, int sys_errno, int segment);
    void *seam_data;
    void *transport_data;
};

/* The owner's view of one access in progress, between kvx_access_begin and kvx_access_end. */
typedef struct kvx_access {
    kvx_grant *grant; /* stays valid until kvx_access_end */
    uint8_t *base;    /* of the grant */
    uint64_t length;
    kvx_blocks_cursor cursor; /* kvx_access_range's own */
} kvx_access;

typedef struct kvx_transport_ops {
    /* 0. KVX_ABI_VERSION of the header this file was compiled with. */
    uint32_t abi_version;
    const char *name;

    /* 1. Start: listen, allocate. `slot` names the transport in core calls. On failure frees everything and writes a
     *    sentence into `why`. Runs once, before any thread exists. */
    int (*open)(kvx_core *core, uint32_t slot, const kvx_engine_config *config, void **transport_p, char *why,
                size_t why_size);

    /* 2. Stop. All progress threads of this transport are gone by now. Completes every live op (KVX_E_CLOSED), then
     * frees everything. No core call after the return. */
    void (*close)(void *transport);

    /* 3. Describe: capabilities, limits, endpoint. Constant after open. */
    void (*query)(void *transport, kvx_transport_info *info_p);

    /* 4. A region appeared. KVX_OK, or an error that makes the registration fail (the core rolls back). */
    int (*mem_register)(void *transport, kvx_region *region);

    /* 5. Memory is taken back.
     *    grant != NULL: the grant is revoked (the flag is set, kvx_access_begin refuses it already). End every use of
     *      it by peers. KVX_OK: no peer can move a byte through it any more. KVX_PENDING: kvx_grant_quiet follows,
     * exactly once, from any thread, as soon as that is true; never because time passed. grant == NULL: every grant of
     * `region` is quiet, forget the region. Returns KVX_OK. */
    int (*mem_release)(void *transport, kvx_region *region, kvx_grant *grant);

    /* 6. Make a remote grant usable; KVX_PENDING and then kvx_import_done exactly once (never called from within the
     * slot). An error means that nothing was taken. The import lives until peer_close(peer, import), which also follows
     *    import_done with an error, or until peer_close(peer, NULL) ends them all. */
    int (*mem_import)(void *transport, kvx_import *import);

    /* 7. Connect to peer->endpoint. KVX_PENDING and then kvx_connect_done exactly once (within config->connect_ms,
     * never from within the slot), or an error and nothing was taken. */
    int (*peer_connect)(void *transport, kvx_peer *peer);

    /* 8. Two uses.
     *    import == NULL: close the peer: complete all its ops (KVX_E_PEER_LOST or as they ended), drop its imports,
     * then kvx_peer_closed exactly once. A pending connect or import of it that is not answered by then is answered by
     *      the core (KVX_E_PEER_LOST). Also called for a peer that was lost; then kvx_peer_closed still follows.
     *    import != NULL: the core lets go of this import (no op of it is live): unmap, forget. Returns KVX_OK. */
    int (*peer_close)(void *transport, kvx_peer *peer, kvx_import *import);

    /* 9. Take the whole op or nothing. KVX_PENDING: accepted, kvx_op_complete follows exactly once, or has been called
     *    from within (inline completion). KVX_AGAIN: full, nothing taken. Error: nothing taken. Ops of one import with
     *    KVX_OP_NOTIFY are told to the owner after the bytes of that op, and in the order of submission when each was
     *    submitted after the completion of the one before. */
    int (*submit)(void *transport, kvx_op *op);

    /* 10. Do what can be done; wait at most timeout_ms (-1 = until kvx_core_wake or work) in progress thread `thread`
     *    (0-based). Returns how many steps it did. KVX_ENGINE_MANUAL calls it with timeout_ms = 0 from kvx_engine_step.
     */
    int (*progress)(void *transport, uint32_t thread, int timeout_ms);
} kvx_transport_ops;

/* -- what the core offers to transports (core/) ---------------------------------------------------------------- */

/* In `open`: how many progress threads this transport wants (0 = none, default 1). */
void kvx_core_threads_set(kvx_core *core, uint32_t slot, uint32_t threads);
/* A fd that becomes readable when kvx_core_wake is called for (slot, thread): put it in your epoll set. The
 * transport drains it (read 8 bytes). */
int kvx_core_wake_fd(kvx_core *core, uint32_t slot, uint32_t thread);
void kvx_core_wake(kvx_core *core, uint32_t slot, uint32_t thread);
/* In `open`: the owner thread may do work of this transport itself and save a wake-up. It calls `turn` at the beginning
 * of each kvx_engine_drain; what has to call it there goes into the returned epoll set (level-triggered; only whether
 * anything is ready matters, so `data` is free), which then is kvx_engine_fd. `turn` may neither block nor move more
 * than config->inline_bytes_max says of a submit. -1: no descriptor left. */
int kvx_core_owner_set(kvx_core *core, uint32_t slot, void (*turn)(void *transport), void *transport);
/* Is this the owner thread, inside the kvx_submit of that op? Then completing it now completes it inline. */
bool kvx_op_in_submit(const kvx_op *op);
const kvx_engine_config *kvx_core_config(const kvx_core *core);
/* Before a transport takes import->mapping away: nobody new gets to see it. */
void kvx_mapping_hide(kvx_import *import);
/* The mapping of an import (by its id; the import itself may be gone) goes: munmap; or, while the application looks at
 * it, zeros in its place, so that a late look does not end the process. The addresses go with the last look. */
void kvx_view_drop(kvx_core *core, uint64_t import, void *base, uint64_t length);
kvx_transport_counters *kvx_core_counters(kvx_core *core, uint32_t slot);
uint64_t kvx_now_ms(void); /* CLOCK_MONOTONIC */

/* Copy pool: runs job->run(job) on one of config->copy_threads threads; within a rank (turns.h) first in first out. */
typedef struct kvx_job {
    void (*run)(struct kvx_job *job);
    struct kvx_job *next;
    uint32_t rank; /* 0, what comes first, unless it moves the bytes of an operation */
} kvx_job;
void kvx_core_job_post(kvx_core *core, kvx_job *job);
bool kvx_core_job_yields(kvx_core *core, uint32_t rank); /* does a job of a lower rank wait? */
void kvx_core_yield(kvx_core *core); /* on a copy thread, with no lock held, now and then: see core/yields.h */

/* Completions. Each is exactly once per object; a second call aborts the process (KVX_ASSERT). Do not touch an op after
 * kvx_op_complete or a peer (and its imports) after kvx_peer_closed: they are gone. `segment` is the index in
 * op->segments, or -1. */
void kvx_op_complete(kvx_op *op, int status, uint64_t bytes, int sys_errno, int segment);
void kvx_connect_done(kvx_peer *peer, int status, int sys_errno);
void kvx_import_done(kvx_import *import, int status, int sys_errno);
void kvx_peer_lost(kvx_peer *peer,
                   int status); /* call after all its ops were completed; at most once, after connect_done(OK) */
void kvx_peer_closed(kvx_peer *peer);
void kvx_grant_quiet(kvx_core *core, uint32_t slot, kvx_grant *grant);
kvx_grant_link *kvx_grant_link_of(kvx_grant *grant, uint32_t slot);

/* Owner side. `authenticate` is done by the transport with the key that kvx_access_begin reveals; call
 * kvx_access_end on every path. Refuses with KVX_E_UNKNOWN, KVX_E_STALE, KVX_E_REVOKED. Access rights are checked by
 * kvx_access_allow after the key was verified, so that the error does not tell a stranger anything. */
int kvx_access_begin(kvx_core *core, uint64_t grant, uint64_t generation, kvx_access *access_p);
/* The same for transports that reach memory of devices (kvx_move of core/device_memory.h); the plain one refuses such a
 * grant with KVX_E_UNSUPPORTED, since its caller would touch the bytes. */
int kvx_access_begin_any(kvx_core *core, uint64_t grant, uint64_t generation, kvx_access *access_p);
int kvx_access_allow(const kvx_access *access, uint32_t rights);
/* May these bytes be reached? Overflow-safe; KVX_OK or KVX_E_RANGE. */
int kvx_access_range(kvx_access *access, uint64_t offset, uint64_t length);
/* Is the grant as long as a descriptor claims? */
int kvx_access_claim(const kvx_access *access, uint64_t length);
void kvx_access_end(kvx_core *core, kvx_access *access);

/* Owner side: a notification for Python. KVX_AGAIN: the queue is full; do not read further from that peer, and try
 * again after the next kvx_core_wake (the core wakes every thread when there is room again). */
int kvx_notify_post(kvx_core *core, uint32_t slot, uint64_t grant, uint64_t tag, uint64_t value);

/* Owner side: an incoming connection used / stopped using a grant. `lost` = the connection ended without saying
 * goodbye. A connection attaches each grant once and detaches it when it ends. When the last attachment goes and any
 * was lost, Python gets KVX_EV_GRANT_LOST. Unknown ids are ignored. */
void kvx_grant_attach(kvx_core *core, uint64_t grant);
void kvx_grant_detach(kvx_core *core, uint64_t grant, bool lost);

/* Relaxed add to a row of counters. The core counts what it sees itself: put_ops get_ops put_bytes get_bytes segments
 * inline_ops failed_ops cancelled_ops notifies_sent notifies_received peers_connected peers_lost. All other fields are
 * the transport's. */
static inline void kvx_op_moved(kvx_op *op, uint64_t bytes) {
    atomic_fetch_add_explicit(&op->moved, bytes, memory_order_relaxed);
}

#define KVX_COUNT(row, field, n) __atomic_fetch_add(&(row)->field, (uint64_t)(n), __ATOMIC_RELAXED)

/* Checked in every build: a broken promise about memory or tokens must not go on. */
#define KVX_ASSERT(condition)                                                                                          \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            kvx_panic(#condition, __FILE__, __LINE__);                                                                 \
    } while (0)
_Noreturn void kvx_panic(const char *condition, const char *file, int line);

extern const kvx_transport_ops kvx_transport_loop;
extern const kvx_transport_ops kvx_transport_shm;
extern const kvx_transport_ops kvx_transport_tcp;
extern const kvx_transport_ops kvx_transport_hixl;
/* The decorator: opens `inner` inside itself and forwards every slot. */
int kvx_transport_fault_wrap(const kvx_transport_ops *inner, kvx_transport_ops *wrapped_p);
/* "tcp" or "fault+tcp"; KVX_E_NO_TRANSPORT when this build has none of that name. */
int kvx_transport_find(const char *name, kvx_transport_ops *ops_p);

#endif

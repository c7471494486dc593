/* core.h: private to the core (core.c memory.c grants.c peers.c submit.c). Transports see transport.h only.
 *
 * Every object of transport.h is the first member of a box that holds what the core needs around it, so a pointer
 * converts with a cast. One mutex guards all tables, boxes and the ring. It is never held while a slot is called, and
 * functions that transports call never call a slot: what has to follow (let go of an import, close a failed peer) is
 * put on a list that the owner thread works off in kvx_engine_drain; giving memory back is a job for the copy pool,
 * since unmapping gigabytes takes long. */
#ifndef KVX_CORE_H
#define KVX_CORE_H

#include <pthread.h>

#include "proto/auth.h"
#include "core/ring.h"
#include "core/table.h"
#include "core/yields.h"
#include "transport.h"
#include "turns.h"

#define KVX_THREADS_MAX    64          /* progress threads of one transport, and copy threads */
#define KVX_SEGMENTS_SMALL 4           /* segments that a submit keeps without malloc */
#define KVX_HOLD           0x80000000u /* in grant_box.not_quiet: the revoker still calls slots */
#define KVX_REFERENCES_MAX 65536u

typedef struct kvx_slot {
    kvx_transport_ops ops;
    void *transport;
    kvx_transport_info info;
    bool manual; /* stepped by hand */
    uint32_t threads;
    uint32_t started;
    int wake_fds[KVX_THREADS_MAX];
    void (*owner_turn)(void *); /* with owner_transport, at the beginning of each drain; NULL: none */
    void *owner_transport;
    pthread_t ids[KVX_THREADS_MAX];
} kvx_slot;

typedef struct grant_box {
    kvx_grant grant;
    uint64_t token;     /* of the pending revoke */
    uint32_t not_quiet; /* bit per slot that has not reported yet, and KVX_HOLD */
    uint32_t accesses;  /* between kvx_access_begin and _end */
    int64_t attached;
    bool any_lost;                     /* an attachment was lost since the last GRANT_LOST */
    bool lost_queued;                  /* a GRANT_LOST waits in the ring */
    struct grant_box *call_next;       /* of those whose mem_release(grant) is still to be called */
    struct grant_box *previous, *next; /* of the region */
    kvx_grant_link links[];            /* one per slot */
} grant_box;

enum region_state { REGION_REGISTERING, REGION_LIVE, REGION_RELEASING };

typedef struct region_box {
    kvx_region region;
    kvx_core *core;
    enum region_state state;
    uint32_t references;
    uint32_t pins; /* live ops */
    grant_box *grants;
    uint64_t token;         /* of the pending release */
    uint64_t mapped_length; /* 0: the memory is the caller's */
    bool viewed;            /* see kvx_mem_viewed; once releasing it only goes off */
    int32_t numa_node;
    struct kvx_arena *arena; /* of an accelerator's memory, see device_memory.h */
    bool carved;             /* a part of an arena that the CPU reaches */
    kvx_job job;             /* gives the memory back */
} region_box;

struct import_box;

typedef struct peer_box {
    kvx_peer peer;
    kvx_core *core;
    uint32_t slot;
    bool connected;
    bool lost;
    bool down_told; /* PEER_DOWN is (or was) in the ring */
    bool closing;
    uint64_t close_token;
    uint32_t ops;
    struct import_box *imports;
    struct peer_box *deferred_next;
} peer_box;

enum import_state { IMPORT_PENDING, IMPORT_READY, IMPORT_FAILED };

typedef struct import_box {
    kvx_import import;
    enum import_state state;
    bool released;
    bool deferred;
    uint32_t ops;
    struct import_box *previous, *next; /* of the peer */
    struct import_box *deferred_next;
} import_box;

/* A mapping that Python looks at. Gone from its transport (and from the import), it is zeros at the same addresses
 * until the last look. */
typedef struct view_box {
    void *base;
    uint64_t length;
    bool dropping, zeros, over;
} view_box;

typedef struct op_box {
    kvx_op op;
    kvx_core *core;
    uint32_t slot;
    bool live;
    kvx_segment small[KVX_SEGMENTS_SMALL];
    uint32_t small_first[KVX_SEGMENTS_SMALL];
    uint32_t *first; /* caller's index of each merged segment */
    struct op_box *next;
} op_box;

typedef struct kvx_unavailable {
    char name[KVX_NAME_MAX];
    char why[512];
} kvx_unavailable;

struct kvx_core {
    pthread_mutex_t lock;
    kvx_engine_config config;
    char *strings; /* the config's strings */
    bool closing;  /* no new work */
    bool stopped;  /* transports are closed */
    _Atomic bool stop_threads;

    kvx_slot slots[KVX_TRANSPORTS_MAX];
    uint32_t slot_count;
    kvx_unavailable unavailable[KVX_TRANSPORTS_MAX];
    uint32_t unavailable_count;

    kvx_ring ring;
    int owner_set;    /* epoll: the ring's fd and what transports have put in; -1: only the ring's fd is watched */
    uint64_t next_id; /* of objects and tokens alike */
    uint64_t generation_base;
    kvx_table regions, grants, peers, imports, ops;
    kvx_table views;          /* by import: mappings that Python looks at; they outlive the import */
    struct kvx_arena *arenas; /* under the lock of device_memory.c */
    uint32_t transfers;       /* live tokens and undrained completions of transfers */
    uint32_t notifies;        /* undrained */
    bool notify_starved;
    op_box *free_first, *free_last; /* oldest first: a completed box is reused as late as possible */
    grant_box *grants_to_call;
    import_box *deferred_imports;
    peer_box *deferred_peers;

    kvx_counters *counters;

    pthread_mutex_t pool_lock;
    pthread_cond_t pool_wake;
    struct {
        kvx_job *first, *last;
    } pool[KVX_RANKS];
    _Atomic uint32_t pool_waiting; /* a bit for each rank with jobs; changed under pool_lock */
    kvx_turns pool_turns;
    bool pool_stop;
    uint32_t pool_threads;
    pthread_t pool_ids[KVX_THREADS_MAX];
};

struct kvx_engine {
    kvx_core core;
};

static inline void kvx_lock(kvx_core *core) {
    pthread_mutex_lock(&core->lock);
}

static inline void kvx_unlock(kvx_core *core) {
    pthread_mutex_unlock(&core->lock);
}

static inline void kvx_unlock_signal(kvx_core *core, bool signal) {
    pthread_mutex_unlock(&core->lock);
    if (signal) {
        kvx_ring_signal(&core->ring);
    }
}

#define KVX_GAUGE(core, field, value) __atomic_store_n(&(core)->counters->field, (uint64_t)(value), __ATOMIC_RELAXED)

void kvx_wake_slot(kvx_core *core, uint32_t slot); /* every thread of it */

/* core.c */
int kvx_pool_start(kvx_core *core);
void kvx_pool_stop(kvx_core *core); /* runs what is queued, then joins */

/* counters.c */
int kvx_counters_open(kvx_core *core, char *why, size_t why_size);
void kvx_counters_close(kvx_core *core);

/* memory.c; all with the lock held unless said otherwise */
region_box *kvx_region_find(kvx_core *core, uint64_t region); /* live ones only */
void kvx_region_maybe_forget(region_box *box);                /* no grants left and releasing: start the job */
void kvx_memory_sweep(kvx_core *core);                        /* after stop, without the lock: unmap and free all */

/* grants.c */
void kvx_grants_call_slots(kvx_core *core); /* without the lock: mem_release for every grant just marked */
void kvx_grant_mark_revoked(kvx_core *core, grant_box *box);
bool kvx_grants_sweep(kvx_core *core); /* after stop: every pending revoke ends; true = signal */
void kvx_grant_lost_drained(kvx_core *core, uint64_t grant);

/* peers.c */
void kvx_deferred_run(kvx_core *core);                       /* owner thread, without the lock */
bool kvx_import_maybe_drop(kvx_core *core, import_box *box); /* true = signal */
void kvx_views_forget(kvx_core *core); /* at the end: what Python still looks at stays where it is */
bool kvx_peers_sweep(kvx_core *core);  /* after stop: pending tokens end, boxes are freed */

/* submit.c */
void kvx_ops_cancel_all(kvx_core *core);
void kvx_ops_free(kvx_core *core);

#endif

/* transport_fault.c: a decorator that makes another transport misbehave on purpose, the same way each time.
 *
 * Every slot is forwarded; only `submit`, and the registration of memory, may do something else first. What happens to
 * which operation is planned by fault_plan.h, where the words of a spec are explained; here it is done. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "test/fault_plan.h"
#include "transport.h"

#define INNER_MAX 4
#define RETRY_MS  1

typedef struct fault_op {
    kvx_op *op;
    uint64_t due_ms; /* UINT64_MAX: it hangs */
    bool deaf;       /* to its cancel */
    struct fault_op *next;
    /* Of one that moves in pieces: what it was, and how far it is. It lives as long as the op. */
    struct fault_transport *fault;
    kvx_segment *segments; /* NULL: it moves at once */
    uint32_t count, at;
    uint64_t bytes, offset, moved;
    uint32_t flags;
    bool ended; /* its peer is being closed: no further piece */
    kvx_segment piece;
    struct fault_op *pieced_next, **pieced_at;
} fault_op;

typedef struct fault_transport {
    const kvx_transport_ops *inner;
    void *transport;
    kvx_core *core;
    uint32_t slot;
    kvx_fault_plan plan; /* under the lock, but for what never changes */
    _Atomic uint64_t registered;
    pthread_mutex_t lock; /* also held while a waiting op is handed on, so that its peer is not closed meanwhile */
    fault_op *waiting;    /* by the time that they are due */
    /* Taken last, also under locks of the inner transport, by whoever ends a piece. */
    pthread_mutex_t pieces_lock;
    fault_op *pieced;   /* every op that moves in pieces */
    fault_op *returned; /* those whose piece has moved, on their way back to `waiting` */
} fault_transport;

/* -- waiting operations; with the lock held ----------------------------------------------------------------------- */

static void fault_wait_insert(fault_transport *fault, fault_op *waiting) {
    fault_op **at = &fault->waiting;
    while (*at != NULL && (*at)->due_ms <= waiting->due_ms) {
        at = &(*at)->next;
    }
    waiting->next = *at;
    *at = waiting;
}

/* Takes out the cancelled ones, those of `peer`, or all. */
static fault_op *fault_wait_remove(fault_transport *fault, bool all, const kvx_peer *peer) {
    fault_op *taken = NULL;
    for (fault_op **at = &fault->waiting; *at != NULL;) {
        fault_op *waiting = *at;
        bool cancelled = !waiting->deaf && atomic_load_explicit(&waiting->op->cancelled, memory_order_relaxed);
        if (all || (peer != NULL ? waiting->op->import->peer == peer : cancelled)) {
            *at = waiting->next;
            waiting->next = taken;
            taken = waiting;
        } else {
            at = &waiting->next;
        }
    }
    return taken;
}

/* -- pieces ----------------------------------------------------------------------------------------------------- */

static void fault_pieces_link(fault_transport *fault, fault_op *mine) {
    pthread_mutex_lock(&fault->pieces_lock);
    mine->pieced_next = fault->pieced;
    mine->pieced_at = &fault->pieced;
    if (fault->pieced != NULL) {
        fault->pieced->pieced_at = &mine->pieced_next;
    }
    fault->pieced = mine;
    pthread_mutex_unlock(&fault->pieces_lock);
}

/* With pieces_lock held. */
static void fault_pieces_unlink(fault_op *mine) {
    *mine->pieced_at = mine->pieced_next;
    if (mine->pieced_next != NULL) {
        mine->pieced_next->pieced_at = mine->pieced_at;
    }
}

/* The op is what it was before it was cut. */
static void fault_pieces_restore(fault_op *mine) {
    kvx_op *op = mine->op;
    op->segments = mine->segments;
    op->count = mine->count;
    op->bytes = mine->bytes;
    op->flags = mine->flags;
    op->seam = NULL;
}

/* Is called by kvx_op_complete at the end of each piece, from whatever thread. */
static bool fault_piece_ended(kvx_op *op, int status, uint64_t bytes, int sys_errno, int segment) {
    fault_op *mine = op->seam_data;
    fault_transport *fault = mine->fault;
    mine->moved += bytes;
    op->corrupt = false;
    pthread_mutex_lock(&fault->pieces_lock);
    bool more = status == KVX_OK && mine->moved < mine->bytes;
    if (more && !mine->ended) {
        mine->next = fault->returned;
        fault->returned = mine;
        kvx_core_wake(fault->core, fault->slot, 0);
        pthread_mutex_unlock(&fault->pieces_lock);
        return true;
    }
    fault_pieces_unlink(mine);
    pthread_mutex_unlock(&fault->pieces_lock);
    fault_pieces_restore(mine);
    kvx_op_complete(op, more ? KVX_E_PEER_LOST : status, mine->moved, sys_errno, segment < 0 ? -1 : (int)mine->at);
    free(mine);
    return true;
}

/* Makes the op the next piece of itself. */
static void fault_piece_begin(fault_transport *fault, fault_op *mine) {
    kvx_op *op = mine->op;
    const kvx_segment *whole = &mine->segments[mine->at];
    if (mine->offset == whole->length) {
        whole = &mine->segments[++mine->at];
        mine->offset = 0;
    }
    uint64_t left = whole->length - mine->offset;
    uint64_t length = left < fault->plan.chunk_bytes ? left : fault->plan.chunk_bytes;
    mine->piece = (kvx_segment){.local_offset = whole->local_offset + mine->offset,
                                .remote_offset = whole->remote_offset + mine->offset,
                                .length = length};
    mine->offset += length;
    op->segments = &mine->piece;
    op->count = 1;
    op->bytes = length;
    bool last = mine->moved + length == mine->bytes;
    op->flags = last ? mine->flags : mine->flags & ~(uint32_t)KVX_OP_NOTIFY;
    op->seam_data = mine;
    op->seam = fault_piece_ended;
}

/* The inner transport did not take the piece. */
static void fault_piece_undo(fault_op *mine) {
    mine->offset -= mine->piece.length;
    fault_pieces_restore(mine);
}

/* Those that come back wait for their next turn; with the lock held. */
static void fault_pieces_collect(fault_transport *fault) {
    pthread_mutex_lock(&fault->pieces_lock);
    fault_op *back = fault->returned;
    fault->returned = NULL;
    pthread_mutex_unlock(&fault->pieces_lock);
    while (back != NULL) {
        fault_op *next = back->next;
        back->due_ms = kvx_now_ms() + fault->plan.chunk_ms;
        fault_wait_insert(fault, back);
        back = next;
    }
}

/* Ends an op that waits. Whoever called keeps `waiting` and frees it. */
static void fault_op_complete(fault_op *waiting, int status) {
    if (waiting->segments != NULL) {
        pthread_mutex_lock(&waiting->fault->pieces_lock);
        fault_pieces_unlink(waiting);
        pthread_mutex_unlock(&waiting->fault->pieces_lock);
        fault_pieces_restore(waiting);
    }
    kvx_op_complete(waiting->op, status, waiting->moved, 0, -1);
}

static void fault_complete_all(fault_op *list, int status) {
    while (list != NULL) {
        fault_op *next = list->next;
        fault_op_complete(list, status);
        free(list);
        list = next;
    }
}

/* -- handing on ------------------------------------------------------------------------------------------------- */

/* One that is due; with the lock held. False: it has to wait a little more. */
static bool fault_forward(fault_transport *fault, fault_op *due) {
    bool pieces = due->segments != NULL;
    if (due->deaf) {
        due->deaf = false;
        atomic_store(&due->op->cancelled, false);
    }
    if (pieces) {
        fault_piece_begin(fault, due);
    }
    /* From here on a piece may have ended, and `due` with it. */
    int status = fault->inner->submit(fault->transport, due->op);
    if (status == KVX_OK || status == KVX_PENDING) {
        if (!pieces) {
            free(due);
        }
        return true;
    }
    if (pieces) {
        fault_piece_undo(due);
    }
    if (status == KVX_AGAIN) {
        due->due_ms = kvx_now_ms() + RETRY_MS;
        fault_wait_insert(fault, due);
        return false;
    }
    fault_op_complete(due, status);
    free(due);
    return true;
}

/* Hands on what is due. */
static int fault_wait_run(fault_transport *fault) {
    int steps = 0;
    pthread_mutex_lock(&fault->lock);
    fault_pieces_collect(fault);
    fault_op *cancelled = fault_wait_remove(fault, false, NULL);
    while (fault->waiting != NULL && fault->waiting->due_ms <= kvx_now_ms()) {
        fault_op *due = fault->waiting;
        fault->waiting = due->next;
        steps += fault_forward(fault, due);
    }
    pthread_mutex_unlock(&fault->lock);
    fault_complete_all(cancelled, KVX_E_CANCELLED);
    return steps;
}

/* -- slots ------------------------------------------------------------------------------------------------------ */

/* The first part of the op, under a mark that the core puts into its completion. */
static void fault_shorten(kvx_op *op, uint64_t share) {
    uint64_t keep = op->bytes ? share % op->bytes : 0, kept = 0;
    uint32_t count = 0;
    while (count < op->count && kept < keep) {
        uint64_t left = keep - kept;
        if (op->segments[count].length > left) {
            op->segments[count].length = left;
        }
        kept += op->segments[count++].length;
    }
    op->count = count;
    op->bytes = kept;
    op->flags &= ~(uint32_t)KVX_OP_NOTIFY;
    op->injected = KVX_E_INJECTED;
}

static int fault_wait_for(fault_transport *fault, kvx_op *op, uint64_t due_ms, bool deaf) {
    fault_op *waiting = malloc(sizeof(*waiting));
    if (waiting == NULL) {
        return KVX_E_NOMEM;
    }
    *waiting = (fault_op){.op = op, .due_ms = due_ms, .deaf = deaf, .fault = fault};
    if (fault->plan.chunk_bytes != 0 && op->bytes != 0) {
        waiting->segments = op->segments;
        waiting->count = op->count;
        waiting->bytes = op->bytes;
        waiting->flags = op->flags;
        fault_pieces_link(fault, waiting);
    }
    pthread_mutex_lock(&fault->lock);
    fault_wait_insert(fault, waiting);
    pthread_mutex_unlock(&fault->lock);
    kvx_core_wake(fault->core, fault->slot, 0); /* it may be sleeping for longer */
    return KVX_PENDING;
}

static int fault_submit(void *transport, kvx_op *op) {
    fault_transport *fault = transport;
    uint64_t delay_ms, share;
    pthread_mutex_lock(&fault->lock);
    kvx_fate fate = kvx_fault_fate(&fault->plan, &delay_ms, &share);
    pthread_mutex_unlock(&fault->lock);
    if (fate == KVX_FATE_SHORT) {
        fault_shorten(op, share);
        fate = op->bytes == 0 ? KVX_FATE_FAIL : KVX_FATE_PASS;
    }
    if (fate == KVX_FATE_FAIL) {
        kvx_op_complete(op, KVX_E_INJECTED, 0, 0, -1);
        return KVX_PENDING;
    }
    if (fate == KVX_FATE_REFUSE) {
        return KVX_E_INJECTED;
    }
    if (fate == KVX_FATE_HANG) {
        return fault_wait_for(fault, op, UINT64_MAX, false);
    }
    op->corrupt = fate == KVX_FATE_FLIP;
    if (fate == KVX_FATE_STUCK) {
        return fault_wait_for(fault, op, kvx_now_ms() + fault->plan.stuck_ms, true);
    }
    if (delay_ms != 0 || (fault->plan.chunk_bytes != 0 && op->bytes != 0)) {
        return fault_wait_for(fault, op, kvx_now_ms() + delay_ms + fault->plan.chunk_ms, false);
    }
    return fault->inner->submit(fault->transport, op);
}

static int fault_progress(void *transport, uint32_t thread, int timeout_ms) {
    fault_transport *fault = transport;
    if (thread != 0) {
        return fault->inner->progress(fault->transport, thread, timeout_ms);
    }
    int steps = fault_wait_run(fault);
    pthread_mutex_lock(&fault->lock);
    uint64_t due_ms = fault->waiting != NULL ? fault->waiting->due_ms : UINT64_MAX;
    pthread_mutex_unlock(&fault->lock);
    if (due_ms != UINT64_MAX && timeout_ms != 0) {
        uint64_t now_ms = kvx_now_ms();
        int left = due_ms <= now_ms
                       ? 0
                       : (int)(due_ms - now_ms < KVX_FAULT_DELAY_MS_MAX ? due_ms - now_ms : KVX_FAULT_DELAY_MS_MAX);
        timeout_ms = timeout_ms < 0 || left < timeout_ms ? left : timeout_ms;
    }
    return steps + fault->inner->progress(fault->transport, 0, steps != 0 ? 0 : timeout_ms);
}

static int fault_peer_close(void *transport, kvx_peer *peer, kvx_import *import) {
    fault_transport *fault = transport;
    if (import != NULL) {
        return fault->inner->peer_close(fault->transport, peer, import);
    }
    pthread_mutex_lock(&fault->lock);
    pthread_mutex_lock(&fault->pieces_lock);
    for (fault_op *at = fault->pieced; at != NULL; at = at->pieced_next) {
        at->ended |= at->op->import->peer == peer;
    }
    pthread_mutex_unlock(&fault->pieces_lock);
    fault_pieces_collect(fault);
    fault_op *ours = fault_wait_remove(fault, false, peer);
    for (fault_op *at = ours; at != NULL; at = at->next) {
        fault_op_complete(at, KVX_E_PEER_LOST);
    }
    int status = fault->inner->peer_close(fault->transport, peer, NULL);
    pthread_mutex_unlock(&fault->lock);
    while (ours != NULL) {
        fault_op *next = ours->next;
        free(ours);
        ours = next;
    }
    return status;
}

static int fault_open(const kvx_transport_ops *inner, kvx_core *core, uint32_t slot, const kvx_engine_config *config,
                      void **transport_p, char *why, size_t why_size) {
    fault_transport *fault = calloc(1, sizeof(*fault));
    if (fault == NULL) {
        snprintf(why, why_size, "fault: out of memory");
        return KVX_E_NOMEM;
    }
    fault->inner = inner;
    fault->core = core;
    fault->slot = slot;
    int status = kvx_fault_plan_take(&fault->plan, config->fault_spec, why, why_size);
    if (status == KVX_OK) {
        status = inner->open(core, slot, config, &fault->transport, why, why_size);
    }
    if (status != KVX_OK) {
        free(fault);
        return status;
    }
    pthread_mutex_init(&fault->lock, NULL);
    pthread_mutex_init(&fault->pieces_lock, NULL);
    *transport_p = fault;
    return KVX_OK;
}

static void fault_close(void *transport) {
    fault_transport *fault = transport;
    for (fault_op *at = fault->pieced; at != NULL; at = at->pieced_next) {
        at->ended = true;
    }
    fault_pieces_collect(fault);
    fault_complete_all(fault_wait_remove(fault, true, NULL), KVX_E_CLOSED);
    fault->inner->close(fault->transport);
    pthread_mutex_destroy(&fault->pieces_lock);
    pthread_mutex_destroy(&fault->lock);
    free(fault);
}

static void fault_query(void *transport, kvx_transport_info *info_p) {
    fault_transport *fault = transport;
    fault->inner->query(fault->transport, info_p);
    info_p->region_bytes_max = fault->plan.region_max != 0 ? fault->plan.region_max : info_p->region_bytes_max;
    info_p->alignment = fault->plan.align != 0 ? fault->plan.align : info_p->alignment;
}

static int fault_mem_register(void *transport, kvx_region *region) {
    fault_transport *fault = transport;
    if (fault->plan.register_ms != 0) { /* blocks, as a driver would */
        struct timespec pause = {.tv_sec = (time_t)(fault->plan.register_ms / 1000),
                                 .tv_nsec = (long)(fault->plan.register_ms % 1000) * 1000000};
        nanosleep(&pause, NULL);
    }
    if (atomic_fetch_add(&fault->registered, 1) + 1 == fault->plan.register_fail) {
        return KVX_E_NOMEM;
    }
    return fault->inner->mem_register(fault->transport, region);
}

static int fault_mem_release(void *transport, kvx_region *region, kvx_grant *grant) {
    fault_transport *fault = transport;
    return fault->inner->mem_release(fault->transport, region, grant);
}

static int fault_mem_import(void *transport, kvx_import *import) {
    fault_transport *fault = transport;
    return fault->inner->mem_import(fault->transport, import);
}

static int fault_peer_connect(void *transport, kvx_peer *peer) {
    fault_transport *fault = transport;
    return fault->inner->peer_connect(fault->transport, peer);
}

/* -- wrapping ----------------------------------------------------------------------------------------------------- */

/* `open` is told everything but which transport is inside: one of it for each that can be. */
static const kvx_transport_ops *_Atomic wrapped[INNER_MAX];

#define OPEN_OF(n)                                                                                                     \
    static int fault_open_##n(kvx_core *core, uint32_t slot, const kvx_engine_config *config, void **transport_p,      \
                              char *why, size_t why_size) {                                                            \
        return fault_open(atomic_load(&wrapped[n]), core, slot, config, transport_p, why, why_size);                   \
    }
OPEN_OF(0)
OPEN_OF(1)
OPEN_OF(2)
OPEN_OF(3)

int kvx_transport_fault_wrap(const kvx_transport_ops *inner, kvx_transport_ops *wrapped_p) {
    static int (*const opens[INNER_MAX])(kvx_core *, uint32_t, const kvx_engine_config *, void **, char *,
                                         size_t) = {fault_open_0, fault_open_1, fault_open_2, fault_open_3};
    for (int i = 0; i < INNER_MAX; i++) {
        const kvx_transport_ops *nobody = NULL;
        if (atomic_load(&wrapped[i]) == inner || atomic_compare_exchange_strong(&wrapped[i], &nobody, inner) ||
            nobody == inner) {
            *wrapped_p = (kvx_transport_ops){
                .abi_version = inner->abi_version,
                .name = "fault",
                .open = opens[i],
                .close = fault_close,
                .query = fault_query,
                .mem_register = fault_mem_register,
                .mem_release = fault_mem_release,
                .mem_import = fault_mem_import,
                .peer_connect = fault_peer_connect,
                .peer_close = fault_peer_close,
                .submit = fault_submit,
                .progress = fault_progress,
            };
            return KVX_OK;
        }
    }
    return KVX_E_LIMIT;
}

/* submit.c: the hot path. One lock to look up, pin and number the operation, one to complete it.
 *
 * A transport that completes an operation within its submit slot does so on this thread while `submitting` points at
 * it; the completion is then handed to the caller directly and never enters the ring. */
#include "core/core.h"
#include "list.h"

#include <stdlib.h>
#include <string.h>

static __thread struct {
    kvx_op *op;
    kvx_event *event; /* filled when the op completed inline */
    bool done;
} submitting;

static op_box *submit_box_take(kvx_core *core) {
    op_box *box = core->free_first;
    if (box == NULL) {
        return calloc(1, sizeof(*box));
    }
    core->free_first = box->next;
    if (core->free_first == NULL) {
        core->free_last = NULL;
    }
    return box;
}

/* With the lock held. Oldest first out: a late second completion of a box hits one that is not live. */
static void submit_box_put(kvx_core *core, op_box *box) {
    if (box->op.segments != box->small) {
        free(box->op.segments);
        free(box->first);
    }
    box->op.segments = NULL;
    box->first = NULL;
    box->next = NULL;
    KVX_QUEUE_APPEND(core->free_first, core->free_last, box, next);
}

/* Looks everything up and makes the operation live; with the lock held. */
static int submit_box_begin(kvx_core *core, const kvx_submit_args *args, op_box **box_p) {
    if (core->closing) {
        return KVX_E_CLOSED;
    }
    import_box *import = kvx_table_get(&core->imports, args->import);
    if (import == NULL || import->state != IMPORT_READY) {
        return KVX_E_NO_IMPORT;
    }
    peer_box *peer = (peer_box *)import->import.peer;
    if (peer->closing || peer->lost) {
        return KVX_E_PEER_LOST;
    }
    if (atomic_load_explicit(&import->import.revoked, memory_order_relaxed)) {
        return KVX_E_REVOKED;
    }
    region_box *region = NULL;
    if (args->count != 0) {
        region = kvx_region_find(core, args->region);
        if (region == NULL) {
            return KVX_E_NO_REGION;
        }
        bool reached = core->slots[peer->slot].info.local_memory >> KVX_MEM_HBM & 1;
        if ((region->region.flags & KVX_REGION_DEVICE) && !reached) {
            return KVX_E_UNSUPPORTED; /* the transport would touch what only the device can */
        }
        if (args->kind == KVX_OP_GET && (region->region.flags & KVX_REGION_READ_ONLY)) {
            return KVX_E_READ_ONLY;
        }
        uint32_t needed = args->kind == KVX_OP_PUT ? KVX_WRITE : KVX_READ;
        if ((import->import.remote.access & needed) == 0) {
            return KVX_E_ACCESS;
        }
    }
    if (core->transfers >= core->config.inflight_max) {
        return KVX_AGAIN;
    }
    if (!kvx_ring_reserve(&core->ring, 1)) {
        return KVX_E_NOMEM;
    }
    op_box *box = submit_box_take(core);
    if (box == NULL) {
        kvx_ring_unreserve(&core->ring, 1);
        return KVX_E_NOMEM;
    }
    box->core = core;
    box->slot = peer->slot;
    box->live = true;
    box->op = (kvx_op){
        .token = core->next_id++,
        .kind = args->kind,
        .flags = args->flags,
        .region = region ? &region->region : NULL,
        .import = &import->import,
        .segments = box->small,
        .tag = args->flags & KVX_OP_NOTIFY ? args->tag : 0,
        .value = args->flags & KVX_OP_NOTIFY ? args->value : 0,
    };
    box->first = box->small_first;
    if (region != NULL) {
        region->pins++;
    }
    import->ops++;
    peer->ops++;
    core->transfers++;
    kvx_table_put(&core->ops, box->op.token, box); /* room for inflight_max was made at open */
    KVX_GAUGE(core, inflight, core->ops.count);
    *box_p = box;
    return KVX_OK;
}

/* The op is no longer live; with the lock held. True = signal. */
static bool submit_box_end(kvx_core *core, op_box *box) {
    import_box *import = (import_box *)box->op.import;
    peer_box *peer = (peer_box *)import->import.peer;
    op_box *found = kvx_table_remove(&core->ops, box->op.token);
    KVX_ASSERT(box->live && found == box); /* exactly once */
    box->live = false;
    if (box->op.region != NULL) {
        ((region_box *)box->op.region)->pins--;
    }
    import->ops--;
    peer->ops--;
    KVX_GAUGE(core, inflight, core->ops.count);
    bool signal = import->released && kvx_import_maybe_drop(core, import);
    submit_box_put(core, box);
    return signal;
}

/* Checks every segment against both sides and merges neighbours; one pass. */
static int submit_segments_take(op_box *box, const kvx_segment *segments, uint32_t count, uint32_t *bad_p) {
    kvx_op *op = &box->op;
    uint64_t local_length = op->region ? op->region->length : 0;
    uint64_t remote_length = op->import->remote.length;
    uint64_t bytes = 0;
    uint32_t kept = 0;
    if (count > KVX_SEGMENTS_SMALL) {
        kvx_segment *wide = malloc((size_t)count * sizeof(*wide));
        uint32_t *first = malloc((size_t)count * sizeof(*first));
        if (wide == NULL || first == NULL) {
            free(wide);
            free(first);
            return KVX_E_NOMEM;
        }
        op->segments = wide;
        box->first = first;
    }
    kvx_segment last = {0};
    for (uint32_t i = 0; i < count; i++) {
        const kvx_segment s = segments[i];
        *bad_p = i;
        if (s.length == 0) {
            return KVX_E_LENGTH;
        }
        if (s.local_offset > local_length || s.length > local_length - s.local_offset) {
            return KVX_E_LOCAL_RANGE;
        }
        if (s.remote_offset > remote_length || s.length > remote_length - s.remote_offset) {
            return KVX_E_RANGE;
        }
        if (__builtin_add_overflow(bytes, s.length, &bytes)) {
            return KVX_E_LENGTH;
        }
        if (i != 0 && s.local_offset == last.local_offset + last.length &&
            s.remote_offset == last.remote_offset + last.length) {
            last.length += s.length;
            op->segments[kept - 1].length = last.length;
        } else {
            last = s;
            op->segments[kept] = s;
            box->first[kept++] = i;
        }
    }
    op->count = kept;
    op->bytes = bytes;
    op->rank = kvx_rank(op->flags & KVX_OP_CRITICAL, op->flags & KVX_OP_BULK, bytes);
    return KVX_OK;
}

static int submit_args_check(kvx_core *core, const kvx_submit_args *args, const kvx_segment *segments) {
    if (args->kind != KVX_OP_PUT && args->kind != KVX_OP_GET) {
        return KVX_E_INVALID;
    }
    const uint32_t priority = KVX_OP_CRITICAL | KVX_OP_BULK;
    if ((args->flags & ~(KVX_OP_NOTIFY | KVX_OP_CHECK | priority)) != 0 || (args->flags & priority) == priority) {
        return KVX_E_INVALID;
    }
    if (args->count == 0 ? !(args->flags & KVX_OP_NOTIFY) : segments == NULL) {
        return KVX_E_INVALID;
    }
    return args->count > core->config.segments_max ? KVX_E_LIMIT : KVX_OK;
}

/* Nothing was taken by the transport. */
static int submit_undo(kvx_core *core, op_box *box, int status) {
    kvx_lock(core);
    core->transfers--;
    kvx_ring_unreserve(&core->ring, 1);
    bool signal = submit_box_end(core, box);
    kvx_unlock_signal(core, signal);
    return status;
}

int kvx_submit(kvx_engine *engine, const kvx_submit_args *args, const kvx_segment *segments, uint64_t *token_p,
               int *inline_p, kvx_event *event_p) {
    kvx_core *core = &engine->core;
    int status = submit_args_check(core, args, segments);
    if (status != KVX_OK) {
        return status;
    }
    op_box *box = NULL;
    kvx_lock(core);
    status = submit_box_begin(core, args, &box);
    kvx_unlock(core);
    if (status != KVX_OK) {
        return status;
    }
    uint32_t bad = 0;
    status = submit_segments_take(box, segments, args->count, &bad);
    if (status != KVX_OK) {
        event_p->segment = (int32_t)bad;
        return submit_undo(core, box, status);
    }
    kvx_slot *slot = &core->slots[box->slot];
    uint64_t token = box->op.token;
    submitting.op = &box->op;
    submitting.event = event_p;
    submitting.done = false;
    status = slot->ops.submit(slot->transport, &box->op);
    submitting.op = NULL;
    if (status != KVX_PENDING && status != KVX_OK) {
        KVX_ASSERT(!submitting.done);
        return submit_undo(core, box, status);
    }
    *token_p = token;
    *inline_p = submitting.done;
    return KVX_OK;
}

bool kvx_op_in_submit(const kvx_op *op) {
    return submitting.op == op;
}

static void submit_count_op(kvx_core *core, const op_box *box, int status, uint64_t bytes, bool inlined) {
    kvx_transport_counters *row = &core->counters->row[box->slot];
    const kvx_op *op = &box->op;
    if (op->kind == KVX_OP_PUT) {
        KVX_COUNT(row, put_ops, 1);
        KVX_COUNT(row, put_bytes, bytes);
    } else {
        KVX_COUNT(row, get_ops, 1);
        KVX_COUNT(row, get_bytes, bytes);
    }
    KVX_COUNT(row, segments, op->count);
    if (inlined) {
        KVX_COUNT(row, inline_ops, 1);
    }
    if (status == KVX_E_CANCELLED || status == KVX_E_CLOSED) {
        KVX_COUNT(row, cancelled_ops, 1);
    } else if (status != KVX_OK) {
        KVX_COUNT(row, failed_ops, 1);
    } else if (op->flags & KVX_OP_NOTIFY) {
        KVX_COUNT(row, notifies_sent, 1);
    }
}

void kvx_op_complete(kvx_op *op, int status, uint64_t bytes, int sys_errno, int segment) {
    if (op->seam != NULL && op->seam(op, status, bytes, sys_errno, segment)) {
        return;
    }
    op_box *box = (op_box *)op;
    kvx_core *core = box->core;
    bool inlined = submitting.op == op;
    bool signal = false;
    KVX_ASSERT(bytes <= op->bytes && segment < (int)op->count);
    kvx_event event = {
        .kind = KVX_EV_TRANSFER,
        .status = status == KVX_OK ? op->injected : status,
        .token = op->token,
        .id = op->import->id,
        .tag = op->tag,
        .value = op->value,
        .bytes = bytes,
        .sys_errno = sys_errno,
        .segment = segment < 0 ? -1 : (int32_t)box->first[segment],
    };
    kvx_lock(core);
    if (event.status == KVX_E_CANCELLED && core->closing) {
        event.status = KVX_E_CLOSED;
    }
    submit_count_op(core, box, event.status, bytes, inlined);
    if (inlined) {
        KVX_ASSERT(!submitting.done);
        submitting.done = true;
        *submitting.event = event;
        core->transfers--;
        kvx_ring_unreserve(&core->ring, 1);
    } else {
        signal = kvx_ring_push(&core->ring, &event);
    }
    signal |= submit_box_end(core, box);
    kvx_unlock_signal(core, signal);
}

int kvx_cancel(kvx_engine *engine, uint64_t token) {
    kvx_core *core = &engine->core;
    kvx_lock(core);
    op_box *box = kvx_table_get(&core->ops, token);
    int status = core->closing ? KVX_E_CLOSED : token == 0 || token >= core->next_id ? KVX_E_INVALID : KVX_OK;
    uint32_t slot = 0;
    if (box != NULL) {
        atomic_store(&box->op.cancelled, true);
        slot = box->slot;
    }
    kvx_unlock(core);
    if (box != NULL && status == KVX_OK) {
        kvx_wake_slot(core, slot);
    }
    return status;
}

uint64_t kvx_progress(kvx_engine *engine, uint64_t token) {
    kvx_core *core = &engine->core;
    kvx_lock(core);
    const op_box *box = kvx_table_get(&core->ops, token);
    uint64_t moved = box != NULL ? atomic_load_explicit(&box->op.moved, memory_order_relaxed) : 0;
    kvx_unlock(core);
    return moved;
}

void kvx_ops_cancel_all(kvx_core *core) {
    for (uint32_t i = 0; i < core->ops.capacity; i++) {
        if (core->ops.keys[i] != 0) {
            atomic_store(&((op_box *)core->ops.values[i])->op.cancelled, true);
        }
    }
}

void kvx_ops_free(kvx_core *core) {
    while (core->free_first != NULL) {
        op_box *box = core->free_first;
        core->free_first = box->next;
        free(box);
    }
}

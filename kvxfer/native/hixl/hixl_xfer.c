/* hixl_xfer.c: ops as batches of descriptors, on the thread of the device whose memory is ours.
 *
 * Each link serves its ops in turns of one batch, up to a window of bytes, so that a small op does not wait for a large
 * one and a cancel has only so much to wait for. There is no completion to sleep on: while something is under way the
 * thread asks for the oldest batches when hixl_backoff.h expects them to be done.
 *
 * An op that is to end (cancelled, taken back, its peer gone) submits no more and waits for what is under way; when
 * that takes too long, or a batch failed, its link is disconnected, and the op ends when the disconnect has returned.
 */
#define _GNU_SOURCE
#include "hixl/hixl.h"
#include "list.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define TIMER_SLACK_NS 10000

/* -- ends ---------------------------------------------------------------------------------------------------------- */

void kvx_hixl_xfer_complete(hixl_xfer *xfer, int status) {
    hixl_peer *peer = xfer->peer;
    hixl_transport *hixl = peer->hixl;
    int raw = status == xfer->status ? (int)xfer->raw : 0;
    kvx_op_complete(xfer->op, status, xfer->bytes, raw, status == KVX_OK ? -1 : xfer->segment_failed);
    free(xfer);
    pthread_mutex_lock(&hixl->lock);
    peer->ops--;
    if (peer->ops == 0 && (peer->lost || peer->closing)) {
        kvx_hixl_todo(peer);
    }
    pthread_mutex_unlock(&hixl->lock);
}

/* With the lock held. KVX_OK: it is not to end. */
static int hixl_xfer_end_reason(const hixl_xfer *xfer) {
    const hixl_peer *peer = xfer->peer;
    return xfer->import->shut != KVX_OK        ? xfer->import->shut
           : peer->lost || peer->closing       ? KVX_E_PEER_LOST
           : atomic_load(&xfer->op->cancelled) ? KVX_E_CANCELLED
                                               : KVX_OK;
}

/* No byte of it moves any more. */
static void hixl_xfer_finish(hixl_xfer *xfer) {
    hixl_peer *peer = xfer->peer;
    hixl_transport *hixl = peer->hixl;
    kvx_hixl_queue_remove(xfer);
    pthread_mutex_lock(&hixl->lock);
    if (xfer->status == KVX_E_LINK && hixl_xfer_end_reason(xfer) != KVX_OK) {
        xfer->raw = 0;
        xfer->status = hixl_xfer_end_reason(xfer); /* the link was given up for its sake, or with its peer */
    }
    if (xfer->status == KVX_OK && xfer->op->flags & KVX_OP_NOTIFY && (peer->lost || peer->closing)) {
        xfer->status = KVX_E_PEER_LOST;
    }
    kvx_hixl_import_leave(xfer->import);
    bool tells = xfer->status == KVX_OK && xfer->op->flags & KVX_OP_NOTIFY;
    if (tells) {
        kvx_hixl_notify(xfer);
    }
    pthread_mutex_unlock(&hixl->lock);
    if (!tells) {
        kvx_hixl_xfer_complete(xfer, xfer->status);
    }
}

static void hixl_xfer_fail(hixl_xfer *xfer, int status, int segment) {
    if (xfer->status == KVX_OK) {
        xfer->status = status;
        xfer->segment_failed = segment;
        bool vendors = status == KVX_E_LINK || status == KVX_E_DEVICE || status == KVX_E_TIMEOUT;
        xfer->raw = vendors && xfer->link != NULL ? xfer->link->raw : 0;
    }
}

/* What the library says of a link, said of an op: "not connected" and "no such request" mean that the link broke. */
static int hixl_xfer_op_status(int status) {
    return status == KVX_E_PEER_LOST || status < KVX_E_CANCELLED ? KVX_E_LINK : status;
}

/* Something about it changed: what now? */
static void hixl_xfer_update(hixl_xfer *xfer) {
    if (xfer->status != KVX_OK) {
        xfer->left = 0;
        kvx_hixl_run_remove(xfer->link, xfer);
    }
    if (xfer->left == 0 && xfer->live == 0 && !xfer->in_doubt) {
        hixl_xfer_finish(xfer);
    }
}

void kvx_hixl_xfer_refuse(hixl_link *link, int status) {
    for (hixl_xfer *xfer = link->first, *next; xfer != NULL; xfer = next) {
        next = xfer->next;
        if (xfer->live == 0 && !xfer->in_doubt) {
            hixl_xfer_fail(xfer, status, -1);
            xfer->raw = xfer->status == status ? link->raw : xfer->raw;
            hixl_xfer_update(xfer);
        }
    }
}

/* -- batches ------------------------------------------------------------------------------------------------------- */

static void hixl_xfer_batch_push(hixl_link *link, hixl_batch *batch) {
    batch->next = NULL;
    KVX_QUEUE_APPEND(link->batch_first, link->batch_last, batch, next);
    link->live++;
    link->live_bytes += batch->bytes;
    link->device->batches++;
    batch->xfer->live++;
}

/* It is not under way any more. `before` is the one before it, or NULL. */
static void hixl_xfer_batch_end(hixl_link *link, hixl_batch *batch, hixl_batch *before, int status, bool certain) {
    hixl_xfer *xfer = batch->xfer;
    if (before != NULL) {
        before->next = batch->next;
    } else {
        link->batch_first = batch->next;
    }
    if (link->batch_last == batch) {
        link->batch_last = before;
    }
    link->live--;
    link->live_bytes -= batch->bytes;
    link->device->batches--;
    link->device->moved = true;
    xfer->live--;
    if (status == KVX_OK) {
        xfer->bytes += batch->bytes;
        kvx_op_moved(xfer->op, batch->bytes);
    } else {
        hixl_xfer_fail(xfer, hixl_xfer_op_status(status), (int)batch->segment);
        xfer->in_doubt |= !certain;
    }
    free(batch);
}

void kvx_hixl_xfer_settle(hixl_link *link) {
    const kvx_ascend_api *api = link->device->hixl->api;
    while (link->batch_first != NULL) {
        hixl_batch *batch = link->batch_first;
        int status = KVX_E_LINK;
        if (link->route == HIXL_BY_NETWORK) { /* also frees the library's end of it */
            status = api->poll(link->device->engine, batch->request, NULL) == KVX_OK ? KVX_OK : KVX_E_LINK;
        }
        hixl_xfer_batch_end(link, batch, NULL, status, true);
    }
    for (hixl_xfer *xfer = link->first, *next; xfer != NULL; xfer = next) {
        next = xfer->next;
        xfer->in_doubt = false;
        hixl_xfer_update(xfer);
    }
}

/* True: the link is no good any more. */
static bool hixl_xfer_poll_network(hixl_link *link) {
    const kvx_ascend_api *api = link->device->hixl->api;
    hixl_batch *before = NULL;
    bool broken = false;
    uint32_t asked = 0;
    for (hixl_batch *batch = link->batch_first, *next; batch != NULL && asked < HIXL_HEAD_POLLS; batch = next) {
        next = batch->next;
        uint32_t raw = 0;
        int status = api->poll(link->device->engine, batch->request, &raw);
        if (status == KVX_PENDING) {
            before = batch;
            asked++;
            continue;
        }
        link->raw = raw;
        hixl_xfer *xfer = batch->xfer;
        hixl_xfer_batch_end(link, batch, before, status, false);
        if (status == KVX_OK) {
            kvx_hixl_machine_good(&link->machine);
        } else {
            broken = true;
        }
        hixl_xfer_update(xfer);
    }
    return broken;
}

static bool hixl_xfer_poll_copies(hixl_link *link) {
    hixl_device *device = link->device;
    if (link->live == 0) {
        return false;
    }
    uint32_t raw = 0;
    int status = device->hixl->api->stream_poll(device->index, link->stream, &raw);
    if (status == KVX_PENDING) {
        return false;
    }
    link->raw = raw;
    while (link->batch_first != NULL) {
        hixl_xfer *xfer = link->batch_first->xfer;
        hixl_xfer_batch_end(link, link->batch_first, NULL, status, false);
        hixl_xfer_update(xfer);
    }
    if (status == KVX_OK) {
        kvx_hixl_machine_good(&link->machine);
    }
    return status != KVX_OK;
}

/* -- submitting ------------------------------------------------------------------------------------------------------
 */

typedef struct cut {
    uint32_t count, segment;
    uint64_t bytes, offset;
} cut;

/* The next descriptors of the op, from its cursor on: into device->ops as local and remote addresses. */
static cut hixl_xfer_cut_batch(const hixl_xfer *xfer, uint64_t remote) {
    const kvx_op *op = xfer->op;
    kvx_ascend_op *ops = xfer->device->ops;
    const uint64_t local = (uint64_t)(uintptr_t)op->region->base;
    cut made = {.segment = xfer->segment, .offset = xfer->offset};
    while (made.count < HIXL_BATCH_OPS && made.bytes < HIXL_BATCH_BYTES && made.segment < op->count) {
        const kvx_segment *at = &op->segments[made.segment];
        uint64_t left = at->length - made.offset, room = HIXL_BATCH_BYTES - made.bytes;
        uint64_t length = left < room ? left : room;
        ops[made.count++] = (kvx_ascend_op){.local = local + at->local_offset + made.offset,
                                            .remote = remote + at->remote_offset + made.offset,
                                            .length = length};
        made.bytes += length;
        made.offset += length;
        if (length == left) {
            made.segment++;
            made.offset = 0;
        }
    }
    return made;
}

static int hixl_xfer_submit_copies(hixl_link *link, bool put, uint32_t count, uint32_t *raw_p) {
    hixl_device *device = link->device;
    for (uint32_t i = 0; i < count; i++) {
        void *local = (void *)(uintptr_t)device->ops[i].local, *remote = (void *)(uintptr_t)device->ops[i].remote;
        device->copies[i] = (kvx_ascend_copy){
            .target = put ? remote : local, .source = put ? local : remote, .length = device->ops[i].length};
    }
    return device->hixl->api->copy_batch(device->index, link->stream, device->copies, count, raw_p);
}

/* KVX_OK, KVX_AGAIN, or the xfer failed with it; *broken_p: and the link with it. */
static int hixl_xfer_submit_batch(hixl_link *link, hixl_xfer *xfer, bool *broken_p) {
    hixl_device *device = link->device;
    const kvx_ascend_api *api = device->hixl->api;
    uint64_t remote = xfer->import->location.address;
    uint32_t raw = 0;
    if (link->route == HIXL_BY_COPY) {
        int status = kvx_hixl_link_map(link, &xfer->import->location, &remote);
        if (status != KVX_OK) {
            return status;
        }
    }
    hixl_batch *batch = malloc(sizeof *batch);
    if (batch == NULL) {
        return KVX_E_NOMEM;
    }
    bool put = xfer->op->kind == KVX_OP_PUT;
    cut made = hixl_xfer_cut_batch(xfer, remote);
    *batch = (hixl_batch){.xfer = xfer, .bytes = made.bytes, .segment = xfer->segment};
    int status = link->route == HIXL_BY_COPY
                     ? hixl_xfer_submit_copies(link, put, made.count, &raw)
                     : api->submit(device->engine, link->remote, put, device->ops, made.count, &batch->request, &raw);
    if (status != KVX_OK) {
        free(batch);
        bool harmless = status == KVX_AGAIN || (link->route == HIXL_BY_NETWORK && status < KVX_E_CANCELLED);
        *broken_p = !harmless;
        link->raw = raw;
        xfer->in_doubt |= !harmless;
        return status;
    }
    xfer->segment = made.segment;
    xfer->offset = made.offset;
    xfer->left -= made.bytes;
    hixl_xfer_batch_push(link, batch);
    device->moved = true;
    KVX_COUNT(device->hixl->counters, frames, 1);
    return KVX_OK;
}

/* Is there memory in this op that was registered after the connection was made? Those do not know it. */
static bool hixl_xfer_needs_reconnect(const hixl_link *link, const hixl_xfer *xfer) {
    if (link->route != HIXL_BY_NETWORK) {
        return false;
    }
    hixl_transport *hixl = link->device->hixl;
    pthread_mutex_lock(&hixl->lock);
    const hixl_arena *arena = kvx_hixl_arena_of(link->device, xfer->op->region);
    bool unknown = arena == NULL || arena->version > link->local_version;
    pthread_mutex_unlock(&hixl->lock);
    return unknown || xfer->import->location.version > link->remote_version;
}

static void hixl_xfer_submit_some(hixl_link *link, uint64_t now_ms) {
    hixl_device *device = link->device;
    bool broken = false;
    bool full = link->route == HIXL_BY_COPY && link->live != 0; /* a stream tells only when all of it is done */
    while (link->machine.state == HIXL_UP && link->run_waiting != 0 && !full && !broken &&
           link->live_bytes < link->window && device->batches < HIXL_BATCHES_MAX && now_ms >= link->again_ms) {
        hixl_xfer *xfer = kvx_hixl_run_next(link);
        bool cancelled = atomic_load_explicit(&xfer->op->cancelled, memory_order_relaxed);
        if (cancelled ||
            xfer->import->location.epoch != link->epoch) { /* its addresses are of a process that is gone */
            hixl_xfer_fail(xfer, cancelled ? KVX_E_CANCELLED : KVX_E_PEER_LOST, -1);
            hixl_xfer_update(xfer);
            continue;
        }
        if (hixl_xfer_needs_reconnect(link, xfer)) {
            if (link->live == 0) {
                kvx_hixl_link_fail(link, now_ms, false);
            }
            break;
        }
        (void)kvx_hixl_run_pop(link);
        int status = hixl_xfer_submit_batch(link, xfer, &broken);
        if (status == KVX_AGAIN) {
            kvx_hixl_run_push_front(link, xfer);
            link->again_ms = now_ms + HIXL_AGAIN_MS;
            break;
        }
        if (status != KVX_OK) {
            hixl_xfer_fail(xfer, broken ? hixl_xfer_op_status(status) : status, (int)xfer->segment);
        } else if (xfer->left > 0) {
            kvx_hixl_run_push(link, xfer);
        }
        hixl_xfer_update(xfer);
    }
    if (broken) {
        kvx_hixl_link_fail(link, now_ms, true);
    }
}

/* -- those that are to end -------------------------------------------------------------------------------------------
 */

static void hixl_xfer_drop_cancelled(hixl_link *link, uint64_t now_ms) {
    hixl_transport *hixl = link->device->hixl;
    bool overdue = false, lost = false;
    link->grace_ms = 0;
    for (hixl_xfer *xfer = link->first, *next; xfer != NULL; xfer = next) {
        next = xfer->next;
        pthread_mutex_lock(&hixl->lock);
        int why = hixl_xfer_end_reason(xfer);
        bool peer_lost = xfer->peer->lost;
        pthread_mutex_unlock(&hixl->lock);
        if (why == KVX_OK) {
            continue;
        }
        if (xfer->left > 0) { /* otherwise it may still end well */
            hixl_xfer_fail(xfer, why, -1);
        }
        if (xfer->live == 0 || xfer->in_doubt) {
            hixl_xfer_update(xfer);
            continue;
        }
        xfer->left = 0;
        kvx_hixl_run_remove(link, xfer);
        if (xfer->grace_ms == 0) {
            xfer->grace_ms = now_ms + hixl->config->cancel_ms;
        }
        if (now_ms >= xfer->grace_ms || peer_lost) {
            hixl_xfer_fail(xfer, why, -1);
            overdue = true;
            lost |= peer_lost;
        } else if (link->grace_ms == 0 || xfer->grace_ms < link->grace_ms) {
            link->grace_ms = xfer->grace_ms;
        }
    }
    if (overdue) {
        kvx_hixl_link_fail(link, now_ms, lost);
    }
}

/* -- the device's thread ---------------------------------------------------------------------------------------------
 */

static void hixl_xfer_inbox_drain(hixl_device *device) {
    hixl_transport *hixl = device->hixl;
    pthread_mutex_lock(&hixl->lock);
    hixl_xfer *xfer = device->inbox_first;
    device->inbox_first = device->inbox_last = NULL;
    pthread_mutex_unlock(&hixl->lock);
    while (xfer != NULL) {
        hixl_xfer *next = xfer->next;
        hixl_link *link = NULL;
        int status = kvx_hixl_link_for(device, xfer->import, &link);
        if (status == KVX_OK) {
            kvx_hixl_queue_push(link, xfer);
        } else {
            hixl_xfer_fail(xfer, status, -1);
            hixl_xfer_finish(xfer);
        }
        xfer = next;
    }
}

/* What nobody uses is disconnected, and forgotten when it is down. */
static void hixl_xfer_retire_links(hixl_device *device, uint64_t now_ms) {
    hixl_transport *hixl = device->hixl;
    for (hixl_link *link = device->links, *next; link != NULL; link = next) {
        next = link->next;
        pthread_mutex_lock(&hixl->lock);
        bool unused = link->users == 0;
        bool over = kvx_hixl_link_over(link);
        pthread_mutex_unlock(&hixl->lock);
        if (over) {
            kvx_hixl_link_free(link);
        } else if (unused && link->first == NULL) {
            kvx_hixl_link_fail(link, now_ms, false);
        }
    }
}

static uint64_t hixl_xfer_clock_ns(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static uint64_t hixl_xfer_now_ns(void) {
    return hixl_xfer_clock_ns(CLOCK_MONOTONIC);
}

/* From one return from waiting to the next: when nothing was done but to look and to sleep, that is what looks cost. */
static void hixl_xfer_account_poll(hixl_device *device, bool woken) {
    uint64_t cpu_ns = hixl_xfer_clock_ns(CLOCK_THREAD_CPUTIME_ID);
    if (device->only_looks && !woken) {
        kvx_hixl_budget_cost(&device->budget, cpu_ns - device->cpu_ns);
    }
    device->cpu_ns = cpu_ns;
    device->only_looks = !woken && device->batches != 0;
}

static void hixl_xfer_progress_link(hixl_link *link, uint64_t now_ms, bool look) {
    uint32_t live = link->live;
    bool completed = false;
    kvx_hixl_link_turn(link, now_ms);
    if (link->machine.state == HIXL_UP) {
        bool waited = link->live != 0;
        bool broken = link->route == HIXL_BY_COPY ? hixl_xfer_poll_copies(link) : hixl_xfer_poll_network(link);
        if (waited && link->live == 0 && link->run_waiting != 0 && link->window < HIXL_WINDOW_MAX) {
            link->window *= 2;
        }
        completed = link->live < live;
        if (broken) {
            kvx_hixl_link_fail(link, now_ms, true);
        }
    }
    if (look || (link->grace_ms != 0 && now_ms >= link->grace_ms)) {
        hixl_xfer_drop_cancelled(link, now_ms);
    }
    if (link->run_waiting != 0) {
        kvx_hixl_link_want(link, now_ms);
        hixl_xfer_submit_some(link, now_ms);
        if (link->run_waiting != 0) { /* it may have been made anew for this */
            kvx_hixl_link_want(link, now_ms);
        }
    }
    if (link->machine.state == HIXL_UP) {
        kvx_hixl_backoff_polled(&link->backoff, hixl_xfer_now_ns(), completed, link->live_bytes);
    } else {
        kvx_hixl_backoff_forget(&link->backoff);
    }
}

static uint64_t hixl_xfer_earlier(uint64_t a, uint64_t b) {
    return a == 0 || (b != 0 && b < a) ? b : a;
}

/* When to look again without having been woken, in milliseconds; 0 = never. */
static uint64_t hixl_xfer_next_due(const hixl_device *device) {
    uint64_t at_ms = 0;
    for (const hixl_link *link = device->links; link != NULL; link = link->next) {
        at_ms = hixl_xfer_earlier(at_ms, kvx_hixl_machine_due(&link->machine, link->run_waiting != 0));
        at_ms = hixl_xfer_earlier(at_ms, link->grace_ms);
        if (link->run_waiting != 0 && link->machine.state == HIXL_UP) {
            at_ms = hixl_xfer_earlier(at_ms, link->again_ms);
        }
    }
    return at_ms;
}

/* How long until the library is asked again; 0 = nothing is under way. */
static uint64_t hixl_xfer_backoff_ns(const hixl_device *device) {
    uint64_t least_ns = 0;
    for (const hixl_link *link = device->links; link != NULL && device->batches != 0; link = link->next) {
        if (link->live != 0 && link->machine.state == HIXL_UP) {
            least_ns = hixl_xfer_earlier(least_ns, kvx_hixl_backoff_next(&link->backoff));
        }
    }
    return least_ns;
}

static bool hixl_xfer_wait_for(hixl_device *device, int timeout_ms) {
    struct pollfd ready = {.fd = device->wake_fd, .events = POLLIN};
    uint64_t at_ms = hixl_xfer_next_due(device), now_ms = at_ms != 0 ? kvx_now_ms() : 0;
    uint64_t left_ns = at_ms <= now_ms ? 0 : (at_ms - now_ms) * 1000000;
    bool bounded = at_ms != 0;
    uint64_t pace_ns = kvx_hixl_budget_pause(&device->budget, hixl_xfer_backoff_ns(device));
    if (pace_ns != 0) {
        left_ns = !bounded || pace_ns < left_ns ? pace_ns : left_ns;
        bounded = true;
    }
    if (timeout_ms >= 0 && (!bounded || (uint64_t)timeout_ms * 1000000 < left_ns)) {
        left_ns = (uint64_t)timeout_ms * 1000000;
        bounded = true;
    }
    struct timespec left = {.tv_sec = (time_t)(left_ns / 1000000000), .tv_nsec = (long)(left_ns % 1000000000)};
    if (ppoll(&ready, 1, bounded ? &left : NULL, NULL) <= 0) {
        return false;
    }
    uint64_t value;
    (void)!read(device->wake_fd, &value, sizeof value);
    return true;
}

int kvx_hixl_device_progress(hixl_device *device, int timeout_ms) {
    bool woken = hixl_xfer_wait_for(device, timeout_ms);
    if (!device->thread_ready) {
        device->thread_ready = true;
        (void)prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS);
    }
    hixl_xfer_account_poll(device, woken);
    device->moved = false;
    uint64_t now_ms = kvx_now_ms();
    if (woken) {
        hixl_xfer_inbox_drain(device);
        kvx_hixl_calls_returned(device, now_ms);
        kvx_hixl_views_turn(device);
        hixl_xfer_retire_links(device, now_ms);
    }
    for (hixl_link *link = device->links; link != NULL; link = link->next) {
        hixl_xfer_progress_link(link, now_ms, woken);
    }
    device->only_looks &= !device->moved;
    kvx_hixl_budget_polled(&device->budget, hixl_xfer_now_ns(), device->batches != 0);
    return device->moved;
}

/* -- slots ------------------------------------------------------------------------------------------------------------
 */

int kvx_hixl_submit(void *transport, kvx_op *op) {
    hixl_transport *hixl = transport;
    hixl_import *import = op->import->transport_data;
    hixl_peer *peer = import->peer;
    hixl_device *device = op->count == 0 ? NULL : kvx_hixl_device_of(hixl, op->region);
    if (op->flags & KVX_OP_CHECK) {
        return KVX_E_UNSUPPORTED; /* nobody could read the bytes on the way */
    }
    if (op->count != 0 && device == NULL) {
        return op->region->kind == KVX_MEM_DRAM ? KVX_E_HOST_MEMORY : KVX_E_NO_DEVICE;
    }
    hixl_xfer *xfer = calloc(1, sizeof *xfer);
    if (xfer == NULL) {
        return KVX_E_NOMEM;
    }
    *xfer = (hixl_xfer){
        .op = op, .device = device, .peer = peer, .import = import, .left = op->bytes, .segment_failed = -1};
    pthread_mutex_lock(&hixl->lock);
    int status = peer->lost || peer->closing                          ? KVX_E_PEER_LOST
                 : import->shut != KVX_OK                             ? import->shut
                 : !kvx_table_reserve(&peer->awaiting, peer->ops + 1) ? KVX_E_NOMEM
                                                                      : KVX_PENDING;
    if (status == KVX_PENDING) {
        peer->ops++;
        if (device == NULL) {
            kvx_hixl_notify(xfer);
        } else {
            import->users++;
            bool first = device->inbox_first == NULL;
            if (first) {
                device->inbox_first = xfer;
            } else {
                device->inbox_last->next = xfer;
            }
            device->inbox_last = xfer;
            if (first) {
                kvx_core_wake(hixl->core, hixl->slot, (uint32_t)device->index + 1);
            }
        }
    }
    pthread_mutex_unlock(&hixl->lock);
    if (status != KVX_PENDING) {
        free(xfer);
    }
    return status;
}

/* The progress threads are gone, and the links are down or hopeless. */
void kvx_hixl_xfers_close(hixl_device *device) {
    hixl_xfer_inbox_drain(device);
    for (hixl_link *link = device->links; link != NULL; link = link->next) {
        while (link->batch_first != NULL) {
            hixl_xfer_batch_end(link, link->batch_first, NULL, KVX_E_LINK, true);
        }
        while (link->first != NULL) {
            hixl_xfer *xfer = link->first;
            xfer->in_doubt = false;
            xfer->status = KVX_E_CLOSED;
            KVX_ASSERT(xfer->live == 0); /* otherwise this would never end */
            hixl_xfer_update(xfer);
            KVX_ASSERT(link->first != xfer);
        }
    }
    while (device->links != NULL) {
        kvx_hixl_link_free(device->links);
    }
    kvx_hixl_views_close(device);
}

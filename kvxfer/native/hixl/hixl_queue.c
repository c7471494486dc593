/* hixl_queue.c: the transfers of a link, and among them those that have something to submit, a line per rank (turns.h):
 * the first of the rank whose turn it is is served next. On the device's thread. */
#include "hixl/hixl.h"
#include "list.h"

#include <stddef.h>

void kvx_hixl_run_push(hixl_link *link, hixl_xfer *xfer) {
    if (xfer->running) {
        return;
    }
    xfer->running = true;
    uint32_t rank = xfer->op->rank;
    xfer->run_next = NULL;
    KVX_QUEUE_APPEND(link->run[rank].first, link->run[rank].last, xfer, run_next);
    link->run_waiting |= 1u << rank;
}

void kvx_hixl_run_push_front(hixl_link *link, hixl_xfer *xfer) {
    uint32_t rank = xfer->op->rank;
    xfer->running = true;
    xfer->run_next = link->run[rank].first;
    link->run[rank].first = xfer;
    if (link->run[rank].last == NULL) {
        link->run[rank].last = xfer;
    }
    link->run_waiting |= 1u << rank;
}

hixl_xfer *kvx_hixl_run_next(const hixl_link *link) {
    return link->run_waiting == 0 ? NULL : link->run[kvx_turns_peek(&link->turns, link->run_waiting)].first;
}

hixl_xfer *kvx_hixl_run_pop(hixl_link *link) {
    if (link->run_waiting == 0) {
        return NULL;
    }
    hixl_xfer *xfer = link->run[kvx_turns_take(&link->turns, link->run_waiting)].first;
    kvx_hixl_run_remove(link, xfer);
    return xfer;
}

void kvx_hixl_run_remove(hixl_link *link, hixl_xfer *xfer) {
    if (!xfer->running) {
        return;
    }
    uint32_t rank = xfer->op->rank;
    hixl_xfer *before = NULL;
    for (hixl_xfer *at = link->run[rank].first; at != xfer; at = at->run_next) {
        before = at;
    }
    if (before != NULL) {
        before->run_next = xfer->run_next;
    } else {
        link->run[rank].first = xfer->run_next;
    }
    if (link->run[rank].last == xfer) {
        link->run[rank].last = before;
    }
    if (link->run[rank].first == NULL) {
        link->run_waiting &= ~(1u << rank);
    }
    xfer->running = false;
}

void kvx_hixl_queue_push(hixl_link *link, hixl_xfer *xfer) {
    xfer->link = link;
    KVX_LIST_PUSH(link->first, xfer);
    kvx_hixl_run_push(link, xfer);
}

void kvx_hixl_queue_remove(hixl_xfer *xfer) {
    hixl_link *link = xfer->link;
    if (link == NULL) {
        return;
    }
    kvx_hixl_run_remove(link, xfer);
    KVX_LIST_REMOVE(link->first, xfer);
}

/* hixl_queue.c: the transfers of a link, and among them the line of those that have something to submit: the first is
 * served next. On the device's thread. */
#include "hixl/hixl.h"

#include <stddef.h>

void kvx_hixl_run_push(hixl_link *link, hixl_xfer *xfer) {
    if (xfer->running) {
        return;
    }
    xfer->running = true;
    xfer->run_next = NULL;
    if (link->run_last != NULL) {
        link->run_last->run_next = xfer;
    } else {
        link->run_first = xfer;
    }
    link->run_last = xfer;
}

void kvx_hixl_run_push_front(hixl_link *link, hixl_xfer *xfer) {
    xfer->running = true;
    xfer->run_next = link->run_first;
    link->run_first = xfer;
    if (link->run_last == NULL) {
        link->run_last = xfer;
    }
}

hixl_xfer *kvx_hixl_run_pop(hixl_link *link) {
    hixl_xfer *xfer = link->run_first;
    if (xfer != NULL) {
        link->run_first = xfer->run_next;
        if (link->run_first == NULL) {
            link->run_last = NULL;
        }
        xfer->running = false;
    }
    return xfer;
}

void kvx_hixl_run_remove(hixl_link *link, hixl_xfer *xfer) {
    if (!xfer->running) {
        return;
    }
    hixl_xfer *before = NULL;
    for (hixl_xfer *at = link->run_first; at != xfer; at = at->run_next) {
        before = at;
    }
    if (before != NULL) {
        before->run_next = xfer->run_next;
    } else {
        link->run_first = xfer->run_next;
    }
    if (link->run_last == xfer) {
        link->run_last = before;
    }
    xfer->running = false;
}

void kvx_hixl_queue_push(hixl_link *link, hixl_xfer *xfer) {
    xfer->link = link;
    xfer->previous = NULL;
    xfer->next = link->first;
    if (xfer->next != NULL) {
        xfer->next->previous = xfer;
    }
    link->first = xfer;
    kvx_hixl_run_push(link, xfer);
}

void kvx_hixl_queue_remove(hixl_xfer *xfer) {
    hixl_link *link = xfer->link;
    if (link == NULL) {
        return;
    }
    kvx_hixl_run_remove(link, xfer);
    if (xfer->previous != NULL) {
        xfer->previous->next = xfer->next;
    } else {
        link->first = xfer->next;
    }
    if (xfer->next != NULL) {
        xfer->next->previous = xfer->previous;
    }
}

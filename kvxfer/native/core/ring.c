/* ring.c: see ring.h.
 *
 * The fd is written once per batch: the push that finds `signalled` unset. A drain first empties the fd, then clears
 * `signalled` under the lock, then pops; whatever is pushed later finds the flag unset and writes again. The other
 * order loses wake-ups. A late write after a drain costs one empty wake-up, never a lost one. */
#include "core/ring.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "transport.h"

int kvx_ring_open(kvx_ring *ring, uint64_t places) {
    memset(ring, 0, sizeof(*ring));
    ring->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (ring->fd < 0) {
        return errno == EMFILE || errno == ENFILE ? KVX_E_FDS : KVX_E_SYSTEM;
    }
    return kvx_ring_reserve(ring, places) ? KVX_OK : KVX_E_NOMEM;
}

void kvx_ring_close(kvx_ring *ring) {
    if (ring->fd >= 0) {
        close(ring->fd);
    }
    free(ring->events);
    memset(ring, 0, sizeof(*ring));
    ring->fd = -1;
}

bool kvx_ring_reserve(kvx_ring *ring, uint64_t places) {
    if (ring->reserved + places > ring->capacity) {
        uint64_t capacity = ring->capacity ? ring->capacity : 64;
        while (capacity < ring->reserved + places) {
            capacity *= 2;
        }
        kvx_event *events = malloc(capacity * sizeof(kvx_event));
        if (events == NULL) {
            return false;
        }
        for (uint64_t at = ring->head; at != ring->tail; at++) {
            events[at & (capacity - 1)] = ring->events[at & (ring->capacity - 1)];
        }
        free(ring->events);
        ring->events = events;
        ring->capacity = capacity;
    }
    ring->reserved += places;
    return true;
}

void kvx_ring_unreserve(kvx_ring *ring, uint64_t places) {
    KVX_ASSERT(ring->reserved - (ring->tail - ring->head) >= places);
    ring->reserved -= places;
}

bool kvx_ring_kick(kvx_ring *ring) {
    bool signal = !ring->signalled;
    ring->signalled = true;
    if (signal) {
        atomic_fetch_add_explicit(&ring->call, 1, memory_order_relaxed);
    }
    return signal;
}

void kvx_ring_drain(kvx_ring *ring) {
    ring->signalled = true;
    uint32_t call = atomic_load_explicit(&ring->call, memory_order_relaxed);
    atomic_store_explicit(&ring->call, call + (call & 1), memory_order_relaxed);
}

bool kvx_ring_push(kvx_ring *ring, const kvx_event *event) {
    KVX_ASSERT(ring->tail - ring->head < ring->reserved);
    ring->events[ring->tail++ & (ring->capacity - 1)] = *event;
    return kvx_ring_kick(ring);
}

bool kvx_ring_pop(kvx_ring *ring, kvx_event *event_p) {
    if (ring->head == ring->tail) {
        return false;
    }
    *event_p = ring->events[ring->head++ & (ring->capacity - 1)];
    if (ring->head == ring->tail) { /* begin again: what was never needed at once stays untouched, the rest in cache */
        ring->head = ring->tail = 0;
    }
    ring->reserved--;
    return true;
}

void kvx_ring_signal(kvx_ring *ring) {
    uint64_t one = 1;
    ssize_t written = write(ring->fd, &one, sizeof(one));
    (void)written; /* EAGAIN: the counter is full, so the fd is readable anyway */
}

void kvx_ring_clear(kvx_ring *ring) {
    uint64_t count;
    ssize_t got = read(ring->fd, &count, sizeof(count));
    (void)got; /* EAGAIN: nothing to clear */
}

/* ring.h: the one queue of events for Python, and its eventfd.
 *
 * Whoever may cause an event reserves its place first, when refusing is still possible; a push therefore never
 * fails and the ring never overflows. All functions but kvx_ring_signal are called with the core's lock held. */
#ifndef KVX_RING_H
#define KVX_RING_H

#include <stdatomic.h>
#include <stdbool.h>

#include "api.h"

typedef struct kvx_ring {
    kvx_event *events;
    uint64_t capacity;   /* a power of two, >= reserved */
    uint64_t head, tail; /* tail - head <= reserved; both 0 when it is empty */
    uint64_t reserved;   /* places promised, filled ones included */
    bool signalled;      /* nobody has to write to the fd: it was written since the last drain began */
    int fd;
    _Atomic uint32_t call; /* odd from when the fd is to be written until a drain begins; read without the lock */
} kvx_ring;

int kvx_ring_open(kvx_ring *ring, uint64_t places); /* reserves `places` at once; returns a status */
void kvx_ring_close(kvx_ring *ring);
bool kvx_ring_reserve(kvx_ring *ring, uint64_t places); /* false = out of memory */
void kvx_ring_unreserve(kvx_ring *ring, uint64_t places);
bool kvx_ring_push(kvx_ring *ring, const kvx_event *event); /* true: call kvx_ring_signal after unlocking */
bool kvx_ring_kick(kvx_ring *ring);                         /* the same without an event */
bool kvx_ring_pop(kvx_ring *ring, kvx_event *event_p);      /* gives the place back too */
void kvx_ring_signal(kvx_ring *ring);
void kvx_ring_drain(kvx_ring *ring); /* a drain begins: what is pushed from here on is popped by it */
void kvx_ring_clear(kvx_ring *ring); /* without the lock: empty the fd */

#endif

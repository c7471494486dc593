/* yields.h: does a copy thread leave its core to the owner thread? Pure.
 *
 * Where as many threads copy without a pause as there are cores, the owner thread that was just told of a completion
 * waits for a core. The kernel's scheduler looks again only at its next tick, after up to 4 ms, where a short operation
 * takes 0.1 ms. So a copy thread gives way between two chunks while the owner thread is called and has not come. Only
 * so often for one call: an owner that is busy with something else comes no sooner, and who yields stands behind
 * whatever else runs on that core. */
#ifndef KVX_YIELDS_H
#define KVX_YIELDS_H

#include <stdbool.h>
#include <stdint.h>

#define KVX_YIELDS_MAX 4

typedef struct kvx_yields { /* of one copy thread */
    uint32_t call;          /* for which it yielded last */
    uint32_t count;         /* how often for that one */
} kvx_yields;

/* `call` as in kvx_ring. */
static inline bool kvx_yields_now(const kvx_yields *yields, uint32_t call) {
    return (call & 1) && (yields->call != call || yields->count < KVX_YIELDS_MAX);
}

/* It does so now. */
static inline void kvx_yields_note(kvx_yields *yields, uint32_t call) {
    yields->count = yields->call == call ? yields->count + 1 : 1;
    yields->call = call;
}

#endif

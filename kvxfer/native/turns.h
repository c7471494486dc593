/* turns.h: whose turn it is among operations of different urgency. Pure; the caller holds whatever guards it.
 *
 * An operation has a rank from its priority and its size: critical before normal before bulk, and within each the short
 * ones first, so that one of a megabyte never stands behind one of half a gigabyte. The lowest rank that waits is
 * served; a rank that was passed over KVX_PASSES times in a row has the next turn, so that nothing starves. */
#ifndef KVX_TURNS_H
#define KVX_TURNS_H

#include <stdbool.h>
#include <stdint.h>

#define KVX_RANKS       6
#define KVX_PASSES      8
#define KVX_SHORT_BYTES (UINT64_C(4) << 20) /* an operation of at most so many bytes is short */

typedef struct kvx_turns {
    uint8_t passed[KVX_RANKS]; /* how often in a row a more urgent rank was served while this one waited */
} kvx_turns;

static inline uint32_t kvx_rank(bool critical, bool bulk, uint64_t bytes) {
    return (critical ? 0u : bulk ? 4u : 2u) + (bytes > KVX_SHORT_BYTES);
}

/* The rank whose turn it is; `waiting` has a bit for each rank in which somebody waits, and is not 0. */
static inline uint32_t kvx_turns_peek(const kvx_turns *turns, uint32_t waiting) {
    uint32_t first = (uint32_t)__builtin_ctz(waiting);
    for (uint32_t rank = KVX_RANKS - 1; rank > first; rank--) {
        if ((waiting >> rank & 1) && turns->passed[rank] >= KVX_PASSES) {
            return rank;
        }
    }
    return first;
}

/* The same, and it has its turn now. */
static inline uint32_t kvx_turns_take(kvx_turns *turns, uint32_t waiting) {
    uint32_t taken = kvx_turns_peek(turns, waiting);
    turns->passed[taken] = 0;
    for (uint32_t rank = taken + 1; rank < KVX_RANKS; rank++) {
        if (waiting >> rank & 1) {
            turns->passed[rank] = turns->passed[rank] < KVX_PASSES ? turns->passed[rank] + 1 : KVX_PASSES;
        }
    }
    return taken;
}

#endif

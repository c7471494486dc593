/* fault_plan.h: which operation misbehaves how, decided by a spec: a comma-separated list of
 *
 *   seed=N          where the dice begin (default 1)
 *   delay_ms=A..B   an operation is handed on after so long (or delay_ms=A)
 *   fail_after=N    N operations go through, all later ones fail with KVX_E_INJECTED
 *   fail_rate=P     an operation fails with KVX_E_INJECTED, and no byte of it moves
 *   hang_rate=P     an operation does nothing until it is cancelled or its peer is closed
 *   flip_rate=P     one bit of the first byte delivered is wrong (a checked operation notices)
 *   short_rate=P    only a part moves, nobody is notified, and the operation ends with KVX_E_INJECTED
 *   fail_op=K       like fail_rate, for the Kth operation (from 1) alone; K+K+...: for each of these
 *   hang_op=K       like hang_rate, for the Kth operation alone
 *   refuse_op=K     the Kth operation is not even taken: its submit fails with KVX_E_INJECTED
 *   stuck_ms=N      an operation does nothing for so long, deaf to its cancel, and then moves its bytes all the same
 *   stuck_ops=N     that happens to the first N operations only
 *   chunk_bytes=N   an operation moves in pieces of so many bytes (at most), never in the caller's thread
 *   chunk_ms=N      the pause before each piece
 *   register_fail=K the Kth registration of memory (from 1) fails for want of memory
 *   register_ms=N   a registration of memory takes so long
 *   region_max=N    no region may be longer
 *   align=N         every region begins at a multiple of this power of two
 *
 * P is from 0 to 1 in decimal digits. One throw decides each rate, in this order; the first that hits is what happens.
 *
 * What happens to the nth operation follows from the seed and n alone, never from the clock or the operating system's
 * randomness. */
#ifndef KVX_FAULT_PLAN_H
#define KVX_FAULT_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVX_FAULT_DELAY_MS_MAX UINT64_C(600000)
#define KVX_FAULT_OPS_MAX      8

typedef enum kvx_fate {
    KVX_FATE_PASS,
    KVX_FATE_FAIL,
    KVX_FATE_HANG,
    KVX_FATE_FLIP,
    KVX_FATE_SHORT,
    KVX_FATE_REFUSE,
    KVX_FATE_STUCK
} kvx_fate;

typedef struct kvx_fault_plan {
    uint64_t state; /* of the dice */
    uint64_t taken; /* operations so far */
    uint64_t delay_min_ms, delay_max_ms;
    bool limited;
    uint64_t fail_after;
    uint64_t fail_rate, hang_rate, flip_rate, short_rate; /* in billionths */
    uint64_t fail_ops[KVX_FAULT_OPS_MAX];                 /* 0: none */
    uint64_t hang_op, refuse_op;                          /* likewise */
    uint64_t stuck_ms, stuck_ops, chunk_bytes, chunk_ms;
    uint64_t register_fail, register_ms, region_max, align;
} kvx_fault_plan;

/* Reads a spec into a plan of zeros. KVX_OK, or KVX_E_INVALID with the reason in `why`. */
int kvx_fault_plan_take(kvx_fault_plan *plan, const char *spec, char *why, size_t why_size);
/* The fate of the next operation, its delay, and a random number for how much of it moves when it is cut short. Throws
 * the plan's dice: one caller at a time. */
kvx_fate kvx_fault_fate(kvx_fault_plan *plan, uint64_t *delay_ms_p, uint64_t *share_p);

#endif

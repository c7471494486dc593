/* hixl_pace.h: when to ask the library again. Pure: no clock, no thread, no vendor.
 *
 * There is no completion to sleep on, and each look costs a wake-up. So a link remembers how long it usually takes,
 * with so much under way, until something is done, and the thread sleeps towards that moment:
 *   - nothing is known: a look every 1/32 of what has passed, 0.2 to 2 ms;
 *   - it is late: every 1/8 of the time by which it is, likewise;
 *   - something is known: half of what is left, at most a quarter of the whole;
 *   - it was right three times: to just before the end, at most 5 ms or an eighth of the whole.
 * The bounds are what an end that comes earlier than usual may wait to be noticed. */
#ifndef KVX_HIXL_PACE_H
#define KVX_HIXL_PACE_H

#include <stdbool.h>
#include <stdint.h>

#define HIXL_PACE_FIRST_NS  50000   /* the first look at what has just begun */
#define HIXL_PACE_SHORT_NS  200000  /* around the expected end: a completion is seen this late, plus a wake-up */
#define HIXL_PACE_LONG_NS   2000000 /* for what is overdue */
#define HIXL_PACE_BLIND_NS  5000000 /* one sleep towards an end that is well known */
#define HIXL_PACE_MARGIN_NS 1000000 /* how much earlier than usual is usual, at most */
#define HIXL_PACE_CLASSES   40
#define HIXL_PACE_SURE_HITS 3

typedef struct hixl_pace {
    uint64_t begun_ns;                    /* of the wait for the next completion; 0 = nothing is under way */
    uint64_t looked_ns;                   /* last */
    uint32_t size;                        /* of what is under way, as a class */
    uint64_t usual_ns[HIXL_PACE_CLASSES]; /* until the next completion; 0 = not known */
    uint8_t hits[HIXL_PACE_CLASSES];      /* how often in a row that was right */
} hixl_pace;

/* After each look: something completed or not, and so much is under way now. */
void hixl_pace_looked(hixl_pace *pace, uint64_t now_ns, bool completed, uint64_t live_bytes);
/* The link was taken down or something failed: what was measured is no measure. */
void hixl_pace_forget(hixl_pace *pace);
/* Nanoseconds from the last look to the next one; 0 = nothing is under way. */
uint64_t hixl_pace_next(const hixl_pace *pace);

#endif

/* hixl_backoff.h: when to ask the library again. Pure: no clock, no thread, no vendor.
 *
 * There is no completion to sleep on, and each look costs a wake-up. So a link remembers how long it takes, with so
 * many bytes under way, until something is done, and by how much that differs; the thread sleeps towards that moment:
 *   - nothing is known: a look every 1/32 of what has passed, 0.2 to 2 ms;
 *   - something is known: half of what is left, at most a quarter of the whole;
 *   - it was right three times: up to a window around the end, at most 5 ms or an eighth of the whole at a time; a look
 *     every 0.2 ms within the window, which is as wide as the end was off lately, at most 4 % to each side;
 *   - it is later than that: ever more seldom, 0.2 to 2 ms.
 * A device has a budget besides: looks may cost 1.5 % of a core while something is under way. What is not spent is kept
 * for the next window, up to a bound; when nothing is left, a look comes no sooner than it is earned. */
#ifndef KVX_HIXL_BACKOFF_H
#define KVX_HIXL_BACKOFF_H

#include <stdbool.h>
#include <stdint.h>

#define HIXL_BACKOFF_FIRST_NS  50000   /* the first look at what has just begun */
#define HIXL_BACKOFF_SHORT_NS  200000  /* around the expected end: a completion is seen this late, plus a wake-up */
#define HIXL_BACKOFF_LONG_NS   2000000 /* for what is overdue */
#define HIXL_BACKOFF_BLIND_NS  5000000 /* one sleep towards an end that is well known */
#define HIXL_BACKOFF_CLASSES   40
#define HIXL_BACKOFF_SURE_HITS 3
#define HIXL_BACKOFF_WINDOW    25 /* the window is at most 1/25 of the whole to each side, and half a short look */

#define HIXL_BUDGET_PER_MILLE 15
#define HIXL_BUDGET_MAX_NS    6000000 /* of processor time that is kept: some 300 looks, a window of 60 ms */
#define HIXL_BUDGET_START_NS  400000
#define HIXL_COST_NS          20000 /* of a look, until one was measured */
#define HIXL_COST_MAX_NS      200000

typedef struct hixl_backoff_known {
    uint64_t took_ns; /* until the next completion; 0 = not known */
    uint64_t bytes;   /* with so much under way */
    uint64_t off_ns;  /* by how much that was wrong, lately */
    uint8_t hits;     /* how often in a row it was right */
} hixl_backoff_known;

typedef struct hixl_backoff {
    uint64_t begun_ns;  /* of the wait for the next completion; 0 = nothing is under way */
    uint64_t polled_ns; /* last */
    uint64_t bytes;     /* under way */
    hixl_backoff_known known[HIXL_BACKOFF_CLASSES];
} hixl_backoff;

/* After each look: something completed or not, and so much is under way now. */
void kvx_hixl_backoff_polled(hixl_backoff *backoff, uint64_t now_ns, bool completed, uint64_t live_bytes);
/* The link was taken down or something failed: what was measured is no measure. */
void kvx_hixl_backoff_forget(hixl_backoff *backoff);
/* Nanoseconds from the last look to the next one; 0 = nothing is under way. */
uint64_t kvx_hixl_backoff_next(const hixl_backoff *backoff);

/* Of a device's thread, for all its links. */
typedef struct hixl_budget {
    uint64_t polled_ns; /* 0 = nothing is under way */
    int64_t credit_ns;
    uint64_t cost_ns; /* of a look */
    bool begun;
} hixl_budget;

/* After each look; `waits`: something is under way. */
void kvx_hixl_budget_polled(hixl_budget *budget, uint64_t now_ns, bool waits);
/* A look took so much processor time, the wake-up included. */
void kvx_hixl_budget_cost(hixl_budget *budget, uint64_t spent_ns);
/* The pause that the links want, made longer until it can be paid for. */
uint64_t kvx_hixl_budget_pause(const hixl_budget *budget, uint64_t wanted_ns);

#endif

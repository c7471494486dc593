/* hixl_backoff.c: see hixl_backoff.h. */
#include "hixl/hixl_backoff.h"

#include <stddef.h>

static uint64_t hixl_backoff_clamp(uint64_t value, uint64_t least, uint64_t most) {
    return value < least ? least : value > most ? most : value;
}

static uint64_t hixl_backoff_distance(uint64_t a, uint64_t b) {
    return a > b ? a - b : b - a;
}

static uint32_t hixl_backoff_size_class(uint64_t bytes) {
    uint32_t size = bytes == 0 ? 0 : 63 - (uint32_t)__builtin_clzll(bytes);
    return size < HIXL_BACKOFF_CLASSES ? size : HIXL_BACKOFF_CLASSES - 1;
}

/* -- how long it will take --------------------------------------------------------------------------------------------
 */

static uint64_t hixl_backoff_scaled(uint64_t value, uint64_t times, uint64_t by) {
    unsigned __int128 product = (unsigned __int128)value * times / (by == 0 ? 1 : by);
    return product > UINT64_MAX ? UINT64_MAX : (uint64_t)product;
}

/* The nearest that is known of less; NULL = nothing is. */
static const hixl_backoff_known *hixl_backoff_known_below(const hixl_backoff *backoff, uint32_t size) {
    while (size > 0) {
        if (backoff->known[--size].took_ns != 0) {
            return &backoff->known[size];
        }
    }
    return NULL;
}

/* What is known of about so many bytes, moved along the line through it and what is known of less: time for the bytes,
 * and time that every transfer takes. With one point alone all of it is time for the bytes. 0 = not known. */
static uint64_t hixl_backoff_estimate(const hixl_backoff *backoff) {
    const hixl_backoff_known *here = &backoff->known[hixl_backoff_size_class(backoff->bytes)],
                             *less = hixl_backoff_known_below(backoff, hixl_backoff_size_class(backoff->bytes));
    if (here->took_ns == 0) {
        return less == NULL ? 0 : less->took_ns; /* more takes no less */
    }
    uint64_t more = hixl_backoff_distance(backoff->bytes, here->bytes);
    uint64_t step = hixl_backoff_scaled(here->took_ns, more, here->bytes);
    if (less != NULL && less->bytes < here->bytes) {
        uint64_t longer = here->took_ns > less->took_ns ? here->took_ns - less->took_ns : 0;
        step = hixl_backoff_scaled(longer, more, here->bytes - less->bytes);
    }
    uint64_t whole = backoff->bytes >= here->bytes ? here->took_ns + step
                     : step < here->took_ns        ? here->took_ns - step
                                                   : 0;
    return whole == 0 ? 1 : whole;
}

/* It ended between the last two looks. */
static void hixl_backoff_record(hixl_backoff *backoff, uint64_t now_ns) {
    hixl_backoff_known *known = &backoff->known[hixl_backoff_size_class(backoff->bytes)];
    uint64_t whole = hixl_backoff_estimate(backoff);
    uint64_t took = (now_ns - backoff->polled_ns) / 2 + (backoff->polled_ns - backoff->begun_ns);
    took = took == 0 ? 1 : took;
    uint64_t off = hixl_backoff_distance(took, whole);
    bool fresh = known->took_ns == 0 || took < whole / 2;
    bool right = !fresh && off <= whole / 8 + HIXL_BACKOFF_SHORT_NS;
    known->hits = !right ? 0 : known->hits < HIXL_BACKOFF_SURE_HITS ? known->hits + 1 : known->hits;
    known->off_ns = fresh ? 0 : known->off_ns - known->off_ns / 4 + off / 4;
    known->took_ns = fresh ? took : whole - whole / 4 + took / 4;
    known->bytes = backoff->bytes;
}

/* -- looks ------------------------------------------------------------------------------------------------------------
 */

void kvx_hixl_backoff_polled(hixl_backoff *backoff, uint64_t now_ns, bool completed, uint64_t live_bytes) {
    if (completed && backoff->begun_ns != 0) {
        hixl_backoff_record(backoff, now_ns);
    }
    if (live_bytes == 0) {
        backoff->begun_ns = 0;
    } else if (completed || backoff->begun_ns == 0) {
        backoff->begun_ns = now_ns;
    }
    backoff->bytes = live_bytes;
    backoff->polled_ns = now_ns;
}

void kvx_hixl_backoff_forget(hixl_backoff *backoff) {
    backoff->begun_ns = 0;
}

uint64_t kvx_hixl_backoff_next(const hixl_backoff *backoff) {
    if (backoff->begun_ns == 0) {
        return 0;
    }
    const hixl_backoff_known *known = &backoff->known[hixl_backoff_size_class(backoff->bytes)];
    uint64_t passed = backoff->polled_ns - backoff->begun_ns, whole = hixl_backoff_estimate(backoff);
    uint64_t least = hixl_backoff_clamp(passed / 2, HIXL_BACKOFF_FIRST_NS, HIXL_BACKOFF_SHORT_NS);
    if (whole == 0 || (known->took_ns == 0 && passed >= whole)) {
        return hixl_backoff_clamp(passed / 32, least, HIXL_BACKOFF_LONG_NS);
    }
    uint64_t window = HIXL_BACKOFF_SHORT_NS / 2 + hixl_backoff_clamp(4 * known->off_ns, 0, whole / HIXL_BACKOFF_WINDOW);
    uint64_t left = whole > passed ? whole - passed : 0;
    if (passed >= whole && passed - whole > window) {
        return hixl_backoff_clamp((passed - whole - window) / 8, least, HIXL_BACKOFF_LONG_NS);
    }
    if (left <= window) {
        return least;
    }
    if (known->hits < HIXL_BACKOFF_SURE_HITS) {
        return hixl_backoff_clamp(left / 2 < whole / 4 ? left / 2 : whole / 4, least, left > least ? left : least);
    }
    uint64_t blind = whole / 8 > HIXL_BACKOFF_BLIND_NS ? whole / 8 : HIXL_BACKOFF_BLIND_NS;
    return hixl_backoff_clamp(left - window, least, blind);
}

/* -- what looks may cost ----------------------------------------------------------------------------------------------
 */

static uint64_t hixl_backoff_budget_cost(const hixl_budget *budget) {
    return budget->cost_ns == 0 ? HIXL_COST_NS : budget->cost_ns;
}

void kvx_hixl_budget_polled(hixl_budget *budget, uint64_t now_ns, bool waits) {
    if (!budget->begun) {
        budget->begun = true;
        budget->credit_ns = HIXL_BUDGET_START_NS;
    }
    if (budget->polled_ns != 0) {
        uint64_t earned =
            hixl_backoff_clamp(now_ns - budget->polled_ns, 0, UINT64_C(1) << 40) * HIXL_BUDGET_PER_MILLE / 1000;
        int64_t credit = budget->credit_ns + (int64_t)earned - (int64_t)hixl_backoff_budget_cost(budget);
        int64_t least = -(int64_t)hixl_backoff_budget_cost(
            budget); /* wake-ups that nobody asked for here do not starve the looks */
        budget->credit_ns = credit > HIXL_BUDGET_MAX_NS ? HIXL_BUDGET_MAX_NS : credit < least ? least : credit;
    }
    budget->polled_ns = waits ? now_ns : 0;
}

void kvx_hixl_budget_cost(hixl_budget *budget, uint64_t spent_ns) {
    uint64_t spent = hixl_backoff_clamp(spent_ns, 1000, HIXL_COST_MAX_NS);
    budget->cost_ns = budget->cost_ns == 0 ? spent : budget->cost_ns - budget->cost_ns / 8 + spent / 8;
}

uint64_t kvx_hixl_budget_pause(const hixl_budget *budget, uint64_t wanted_ns) {
    int64_t missing = (int64_t)hixl_backoff_budget_cost(budget) - budget->credit_ns;
    if (wanted_ns == 0 || missing <= 0) {
        return wanted_ns;
    }
    uint64_t earned_ns = (uint64_t)missing * 1000 / HIXL_BUDGET_PER_MILLE;
    return wanted_ns > earned_ns ? wanted_ns : earned_ns;
}

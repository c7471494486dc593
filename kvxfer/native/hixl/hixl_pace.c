/* hixl_pace.c: see hixl_pace.h. */
#include "hixl/hixl_pace.h"

#include <stddef.h>

static uint64_t hixl_pace_clamp(uint64_t value, uint64_t least, uint64_t most) {
    return value < least ? least : value > most ? most : value;
}

static uint64_t hixl_pace_distance(uint64_t a, uint64_t b) {
    return a > b ? a - b : b - a;
}

static uint32_t hixl_pace_size_class(uint64_t bytes) {
    uint32_t size = bytes == 0 ? 0 : 63 - (uint32_t)__builtin_clzll(bytes);
    return size < HIXL_PACE_CLASSES ? size : HIXL_PACE_CLASSES - 1;
}

/* -- how long it will take --------------------------------------------------------------------------------------------
 */

static uint64_t hixl_pace_scaled(uint64_t value, uint64_t times, uint64_t by) {
    unsigned __int128 product = (unsigned __int128)value * times / (by == 0 ? 1 : by);
    return product > UINT64_MAX ? UINT64_MAX : (uint64_t)product;
}

/* The nearest that is known of less; NULL = nothing is. */
static const hixl_pace_known *hixl_pace_known_below(const hixl_pace *pace, uint32_t size) {
    while (size > 0) {
        if (pace->known[--size].took_ns != 0) {
            return &pace->known[size];
        }
    }
    return NULL;
}

/* What is known of about so many bytes, moved along the line through it and what is known of less: time for the bytes,
 * and time that every transfer takes. With one point alone all of it is time for the bytes. 0 = not known. */
static uint64_t hixl_pace_estimate(const hixl_pace *pace) {
    const hixl_pace_known *here = &pace->known[hixl_pace_size_class(pace->bytes)],
                          *less = hixl_pace_known_below(pace, hixl_pace_size_class(pace->bytes));
    if (here->took_ns == 0) {
        return less == NULL ? 0 : less->took_ns; /* more takes no less */
    }
    uint64_t more = hixl_pace_distance(pace->bytes, here->bytes);
    uint64_t step = hixl_pace_scaled(here->took_ns, more, here->bytes);
    if (less != NULL && less->bytes < here->bytes) {
        uint64_t longer = here->took_ns > less->took_ns ? here->took_ns - less->took_ns : 0;
        step = hixl_pace_scaled(longer, more, here->bytes - less->bytes);
    }
    uint64_t whole = pace->bytes >= here->bytes ? here->took_ns + step
                     : step < here->took_ns     ? here->took_ns - step
                                                : 0;
    return whole == 0 ? 1 : whole;
}

/* It ended between the last two looks. */
static void hixl_pace_record(hixl_pace *pace, uint64_t now_ns) {
    hixl_pace_known *known = &pace->known[hixl_pace_size_class(pace->bytes)];
    uint64_t whole = hixl_pace_estimate(pace);
    uint64_t took = (now_ns - pace->looked_ns) / 2 + (pace->looked_ns - pace->begun_ns);
    took = took == 0 ? 1 : took;
    uint64_t off = hixl_pace_distance(took, whole);
    bool fresh = known->took_ns == 0 || took < whole / 2;
    bool right = !fresh && off <= whole / 8 + HIXL_PACE_SHORT_NS;
    known->hits = !right ? 0 : known->hits < HIXL_PACE_SURE_HITS ? known->hits + 1 : known->hits;
    known->off_ns = fresh ? 0 : known->off_ns - known->off_ns / 4 + off / 4;
    known->took_ns = fresh ? took : whole - whole / 4 + took / 4;
    known->bytes = pace->bytes;
}

/* -- looks ------------------------------------------------------------------------------------------------------------
 */

void kvx_hixl_pace_looked(hixl_pace *pace, uint64_t now_ns, bool completed, uint64_t live_bytes) {
    if (completed && pace->begun_ns != 0) {
        hixl_pace_record(pace, now_ns);
    }
    if (live_bytes == 0) {
        pace->begun_ns = 0;
    } else if (completed || pace->begun_ns == 0) {
        pace->begun_ns = now_ns;
    }
    pace->bytes = live_bytes;
    pace->looked_ns = now_ns;
}

void kvx_hixl_pace_forget(hixl_pace *pace) {
    pace->begun_ns = 0;
}

uint64_t kvx_hixl_pace_next(const hixl_pace *pace) {
    if (pace->begun_ns == 0) {
        return 0;
    }
    const hixl_pace_known *known = &pace->known[hixl_pace_size_class(pace->bytes)];
    uint64_t passed = pace->looked_ns - pace->begun_ns, whole = hixl_pace_estimate(pace);
    uint64_t least = hixl_pace_clamp(passed / 2, HIXL_PACE_FIRST_NS, HIXL_PACE_SHORT_NS);
    if (whole == 0 || (known->took_ns == 0 && passed >= whole)) {
        return hixl_pace_clamp(passed / 32, least, HIXL_PACE_LONG_NS);
    }
    uint64_t window = HIXL_PACE_SHORT_NS / 2 + hixl_pace_clamp(4 * known->off_ns, 0, whole / HIXL_PACE_WINDOW);
    uint64_t left = whole > passed ? whole - passed : 0;
    if (passed >= whole && passed - whole > window) {
        return hixl_pace_clamp((passed - whole - window) / 8, least, HIXL_PACE_LONG_NS);
    }
    if (left <= window) {
        return least;
    }
    if (known->hits < HIXL_PACE_SURE_HITS) {
        return hixl_pace_clamp(left / 2 < whole / 4 ? left / 2 : whole / 4, least, left > least ? left : least);
    }
    uint64_t blind = whole / 8 > HIXL_PACE_BLIND_NS ? whole / 8 : HIXL_PACE_BLIND_NS;
    return hixl_pace_clamp(left - window, least, blind);
}

/* -- what looks may cost ----------------------------------------------------------------------------------------------
 */

static uint64_t hixl_pace_budget_cost(const hixl_budget *budget) {
    return budget->cost_ns == 0 ? HIXL_COST_NS : budget->cost_ns;
}

void kvx_hixl_budget_looked(hixl_budget *budget, uint64_t now_ns, bool waits) {
    if (!budget->begun) {
        budget->begun = true;
        budget->credit_ns = HIXL_BUDGET_START_NS;
    }
    if (budget->looked_ns != 0) {
        uint64_t earned =
            hixl_pace_clamp(now_ns - budget->looked_ns, 0, UINT64_C(1) << 40) * HIXL_BUDGET_PER_MILLE / 1000;
        int64_t credit = budget->credit_ns + (int64_t)earned - (int64_t)hixl_pace_budget_cost(budget);
        int64_t least =
            -(int64_t)hixl_pace_budget_cost(budget); /* wake-ups that nobody asked for here do not starve the looks */
        budget->credit_ns = credit > HIXL_BUDGET_MAX_NS ? HIXL_BUDGET_MAX_NS : credit < least ? least : credit;
    }
    budget->looked_ns = waits ? now_ns : 0;
}

void kvx_hixl_budget_cost(hixl_budget *budget, uint64_t spent_ns) {
    uint64_t spent = hixl_pace_clamp(spent_ns, 1000, HIXL_COST_MAX_NS);
    budget->cost_ns = budget->cost_ns == 0 ? spent : budget->cost_ns - budget->cost_ns / 8 + spent / 8;
}

uint64_t kvx_hixl_budget_pause(const hixl_budget *budget, uint64_t wanted_ns) {
    int64_t missing = (int64_t)hixl_pace_budget_cost(budget) - budget->credit_ns;
    if (wanted_ns == 0 || missing <= 0) {
        return wanted_ns;
    }
    uint64_t earned_ns = (uint64_t)missing * 1000 / HIXL_BUDGET_PER_MILLE;
    return wanted_ns > earned_ns ? wanted_ns : earned_ns;
}

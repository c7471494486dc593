/* hixl_pace.c: see hixl_pace.h. */
#include "hixl_pace.h"

static uint32_t size_class(uint64_t bytes) {
    uint32_t size = bytes == 0 ? 0 : 63 - (uint32_t)__builtin_clzll(bytes);
    return size < HIXL_PACE_CLASSES ? size : HIXL_PACE_CLASSES - 1;
}

static uint64_t within(uint64_t value, uint64_t least, uint64_t most) {
    return value < least ? least : value > most ? most : value;
}

/* It ended between the last two looks. */
static void learn(hixl_pace *pace, uint64_t now_ns) {
    uint64_t *usual = &pace->usual_ns[pace->size];
    uint8_t *hits = &pace->hits[pace->size];
    uint64_t took = (now_ns - pace->looked_ns) / 2 + (pace->looked_ns - pace->begun_ns);
    took = took == 0 ? 1 : took;
    uint64_t off = took > *usual ? took - *usual : *usual - took;
    bool right = *usual != 0 && off <= *usual / 8 + HIXL_PACE_SHORT_NS;
    *hits = !right ? 0 : *hits < HIXL_PACE_SURE_HITS ? *hits + 1 : *hits;
    *usual = *usual == 0 || took < *usual / 2 ? took : *usual - *usual / 4 + took / 4;
}

/* What is not known is taken from less, which takes no longer; 0 = not even that. */
static uint64_t usual(const hixl_pace *pace) {
    uint64_t found = 0;
    for (uint32_t size = pace->size + 1; size > 0 && found == 0; size--) {
        found = pace->usual_ns[size - 1];
    }
    return found;
}

void hixl_pace_looked(hixl_pace *pace, uint64_t now_ns, bool completed, uint64_t live_bytes) {
    if (completed && pace->begun_ns != 0) {
        learn(pace, now_ns);
    }
    if (live_bytes == 0) {
        pace->begun_ns = 0;
    } else if (completed || pace->begun_ns == 0) {
        pace->begun_ns = now_ns;
    }
    pace->size = size_class(live_bytes);
    pace->looked_ns = now_ns;
}

void hixl_pace_forget(hixl_pace *pace) {
    pace->begun_ns = 0;
}

uint64_t hixl_pace_next(const hixl_pace *pace) {
    if (pace->begun_ns == 0) {
        return 0;
    }
    uint64_t passed = pace->looked_ns - pace->begun_ns, whole = usual(pace);
    uint64_t least = within(passed / 2, HIXL_PACE_FIRST_NS, HIXL_PACE_SHORT_NS);
    if (whole <= passed) {
        uint64_t step = pace->usual_ns[pace->size] == 0 ? passed / 32 : (passed - whole) / 8;
        return within(step, least, HIXL_PACE_LONG_NS);
    }
    uint64_t left = whole - passed, margin = HIXL_PACE_SHORT_NS / 2 + within(whole / 64, 0, HIXL_PACE_MARGIN_NS);
    if (pace->hits[pace->size] < HIXL_PACE_SURE_HITS) {
        uint64_t quarter = whole / 4;
        return within(left / 2 < quarter ? left / 2 : quarter, least, left > least ? left : least);
    }
    uint64_t blind = whole / 8 > HIXL_PACE_BLIND_NS ? whole / 8 : HIXL_PACE_BLIND_NS;
    return within(left > margin ? left - margin : 0, least, blind);
}

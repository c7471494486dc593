/* fault_plan.c: from the text of a fault spec to what happens to the nth operation. */
#include "test/fault_plan.h"

#include <stdio.h>
#include <string.h>

#include "api.h"

#define RATE_ONE UINT64_C(1000000000)

/* -- the spec --------------------------------------------------------------------------------------------------- */

static bool fault_plan_parse_number(const char *text, const char **end_p, uint64_t *value_p) {
    uint64_t value = 0;
    const char *at = text;
    for (; *at >= '0' && *at <= '9'; at++) {
        if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, (uint64_t)(*at - '0'), &value)) {
            return false;
        }
    }
    *end_p = at;
    *value_p = value;
    return at != text;
}

/* "1", "0.25": without the C library, whose decimal point depends on the locale. */
static bool fault_plan_parse_rate(const char *text, uint64_t *rate_p) {
    const char *at;
    uint64_t value;
    if (!fault_plan_parse_number(text, &at, &value) || value > 1) {
        return false;
    }
    value *= RATE_ONE;
    if (*at == '.') {
        uint64_t part = RATE_ONE / 10;
        for (at++; *at >= '0' && *at <= '9'; at++, part /= 10) {
            value += part * (uint64_t)(*at - '0');
        }
    }
    *rate_p = value;
    return *at == '\0' && value <= RATE_ONE;
}

static bool fault_plan_parse_delay(kvx_fault_plan *plan, const char *text) {
    const char *at;
    if (!fault_plan_parse_number(text, &at, &plan->delay_min_ms)) {
        return false;
    }
    plan->delay_max_ms = plan->delay_min_ms;
    if (strncmp(at, "..", 2) == 0 && !fault_plan_parse_number(at + 2, &at, &plan->delay_max_ms)) {
        return false;
    }
    return *at == '\0' && plan->delay_min_ms <= plan->delay_max_ms && plan->delay_max_ms <= KVX_FAULT_DELAY_MS_MAX;
}

/* "5", "5+77" */
static bool fault_plan_parse_numbers(const char *text, uint64_t numbers[KVX_FAULT_OPS_MAX]) {
    for (int i = 0; i < KVX_FAULT_OPS_MAX; i++) {
        const char *end;
        if (!fault_plan_parse_number(text, &end, &numbers[i])) {
            return false;
        }
        if (*end != '+') {
            return *end == '\0';
        }
        text = end + 1;
    }
    return false;
}

static bool fault_plan_is_fail_op(const kvx_fault_plan *plan) {
    for (int i = 0; i < KVX_FAULT_OPS_MAX; i++) {
        if (plan->fail_ops[i] == plan->taken) {
            return true;
        }
    }
    return false;
}

static bool fault_plan_parse_setting(kvx_fault_plan *plan, const char *name, const char *value) {
    const char *end;
    if (strcmp(name, "seed") == 0) {
        return fault_plan_parse_number(value, &end, &plan->state) && *end == '\0';
    }
    if (strcmp(name, "delay_ms") == 0) {
        return fault_plan_parse_delay(plan, value);
    }
    if (strcmp(name, "fail_after") == 0) {
        plan->limited = true;
        return fault_plan_parse_number(value, &end, &plan->fail_after) && *end == '\0';
    }
    const struct {
        const char *name;
        uint64_t *number;
    } numbers[] = {{"hang_op", &plan->hang_op},
                   {"refuse_op", &plan->refuse_op},
                   {"stuck_ms", &plan->stuck_ms},
                   {"stuck_ops", &plan->stuck_ops},
                   {"chunk_ms", &plan->chunk_ms},
                   {"chunk_bytes", &plan->chunk_bytes},
                   {"register_fail", &plan->register_fail},
                   {"register_ms", &plan->register_ms},
                   {"region_max", &plan->region_max},
                   {"align", &plan->align}};
    if (strcmp(name, "fail_op") == 0) {
        return fault_plan_parse_numbers(value, plan->fail_ops);
    }
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        if (strcmp(name, numbers[i].name) == 0) {
            return fault_plan_parse_number(value, &end, numbers[i].number) && *end == '\0';
        }
    }
    const struct {
        const char *name;
        uint64_t *rate;
    } rates[] = {{"fail_rate", &plan->fail_rate},
                 {"hang_rate", &plan->hang_rate},
                 {"flip_rate", &plan->flip_rate},
                 {"short_rate", &plan->short_rate}};
    for (size_t i = 0; i < sizeof(rates) / sizeof(rates[0]); i++) {
        if (strcmp(name, rates[i].name) == 0) {
            return fault_plan_parse_rate(value, rates[i].rate);
        }
    }
    return false;
}

int kvx_fault_plan_take(kvx_fault_plan *plan, const char *spec, char *why, size_t why_size) {
    plan->state = 1;
    plan->stuck_ops = UINT64_MAX;
    while (*spec != '\0') {
        char item[64];
        size_t length = strcspn(spec, ",");
        char *equals = NULL;
        if (length < sizeof(item)) {
            memcpy(item, spec, length);
            item[length] = '\0';
            equals = strchr(item, '=');
        }
        if (equals != NULL) {
            *equals = '\0';
        }
        if (equals == NULL || !fault_plan_parse_setting(plan, item, equals + 1)) {
            snprintf(why, why_size,
                     "fault_spec: cannot understand '%.*s' (known: seed=N delay_ms=A..B fail_after=N fail_rate=P "
                     "hang_rate=P flip_rate=P short_rate=P fail_op=K hang_op=K refuse_op=K stuck_ms=N stuck_ops=N "
                     "chunk_bytes=N chunk_ms=N register_fail=K register_ms=N region_max=N align=N, P from 0 to 1)",
                     length < 60 ? (int)length : 60, spec);
            return KVX_E_INVALID;
        }
        spec += length;
        spec += *spec == ',';
    }
    return KVX_OK;
}

/* -- dice ------------------------------------------------------------------------------------------------------- */

static uint64_t fault_plan_random(kvx_fault_plan *plan) { /* splitmix64 */
    uint64_t z = (plan->state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* The same number of throws for every operation: what happens to one does not shift what happens to the next. */
kvx_fate kvx_fault_fate(kvx_fault_plan *plan, uint64_t *delay_ms_p, uint64_t *share_p) {
    uint64_t thrown[4];
    for (int i = 0; i < 4; i++) {
        thrown[i] = fault_plan_random(plan) % RATE_ONE;
    }
    *delay_ms_p = plan->delay_min_ms + fault_plan_random(plan) % (plan->delay_max_ms - plan->delay_min_ms + 1);
    *share_p = fault_plan_random(plan);
    plan->taken++;
    if (plan->taken == plan->refuse_op) {
        return KVX_FATE_REFUSE;
    }
    if (fault_plan_is_fail_op(plan)) {
        return KVX_FATE_FAIL;
    }
    if (plan->taken == plan->hang_op) {
        return KVX_FATE_HANG;
    }
    if (plan->stuck_ms != 0 && plan->taken <= plan->stuck_ops) {
        return KVX_FATE_STUCK;
    }
    if ((plan->limited && plan->taken > plan->fail_after) || thrown[0] < plan->fail_rate) {
        return KVX_FATE_FAIL;
    }
    return thrown[1] < plan->hang_rate    ? KVX_FATE_HANG
           : thrown[2] < plan->flip_rate  ? KVX_FATE_FLIP
           : thrown[3] < plan->short_rate ? KVX_FATE_SHORT
                                          : KVX_FATE_PASS;
}

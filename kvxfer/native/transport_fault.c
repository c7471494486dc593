/* transport_fault.c: a decorator that makes another transport misbehave on purpose, the same way each time.
 *
 * Every slot is forwarded; only `submit` may do something else first. What happens to the nth operation follows from
 * the seed and n alone, never from the clock or the operating system's randomness. The spec is a comma-separated list:
 *
 *   seed=N          where the dice begin (default 1)
 *   delay_ms=A..B   an operation is handed on after so long (or delay_ms=A)
 *   fail_after=N    N operations go through, all later ones fail with KVX_E_INJECTED
 *   fail_rate=P     an operation fails with KVX_E_INJECTED, and no byte of it moves
 *   hang_rate=P     an operation does nothing until it is cancelled or its peer is closed
 *   flip_rate=P     one bit of the first byte delivered is wrong (a checked operation notices)
 *   short_rate=P    only a part moves, nobody is notified, and the operation ends with KVX_E_INJECTED
 *
 * P is from 0 to 1 in decimal digits. One throw decides each rate, in this order; the first that hits is what happens.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "transport.h"

#define INNER_MAX    4
#define RATE_ONE     UINT64_C(1000000000)
#define DELAY_MS_MAX UINT64_C(600000)
#define RETRY_MS     1

enum fate { FATE_PASS, FATE_FAIL, FATE_HANG, FATE_FLIP, FATE_SHORT };

typedef struct fault_op {
    kvx_op *op;
    uint64_t due_ms; /* UINT64_MAX: it hangs */
    struct fault_op *next;
} fault_op;

typedef struct fault_transport {
    const kvx_transport_ops *inner;
    void *transport;
    kvx_core *core;
    uint32_t slot;
    uint64_t state; /* of the dice */
    uint64_t delay_min_ms, delay_max_ms;
    bool limited;
    uint64_t fail_after;
    uint64_t fail_rate, hang_rate, flip_rate, short_rate; /* of RATE_ONE */
    uint64_t taken;
    pthread_mutex_t lock; /* also held while a waiting op is handed on, so that its peer is not closed meanwhile */
    fault_op *waiting;    /* by the time that they are due */
} fault_transport;

/* -- the spec --------------------------------------------------------------------------------------------------- */

static bool whole_number(const char *text, const char **end_p, uint64_t *value_p) {
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
static bool rate(const char *text, uint64_t *rate_p) {
    const char *at;
    uint64_t value;
    if (!whole_number(text, &at, &value) || value > 1) {
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

static bool delay(fault_transport *fault, const char *text) {
    const char *at;
    if (!whole_number(text, &at, &fault->delay_min_ms)) {
        return false;
    }
    fault->delay_max_ms = fault->delay_min_ms;
    if (strncmp(at, "..", 2) == 0 && !whole_number(at + 2, &at, &fault->delay_max_ms)) {
        return false;
    }
    return *at == '\0' && fault->delay_min_ms <= fault->delay_max_ms && fault->delay_max_ms <= DELAY_MS_MAX;
}

static bool setting(fault_transport *fault, const char *name, const char *value) {
    const char *end;
    if (strcmp(name, "seed") == 0) {
        return whole_number(value, &end, &fault->state) && *end == '\0';
    }
    if (strcmp(name, "delay_ms") == 0) {
        return delay(fault, value);
    }
    if (strcmp(name, "fail_after") == 0) {
        fault->limited = true;
        return whole_number(value, &end, &fault->fail_after) && *end == '\0';
    }
    const struct {
        const char *name;
        uint64_t *rate;
    } rates[] = {{"fail_rate", &fault->fail_rate},
                 {"hang_rate", &fault->hang_rate},
                 {"flip_rate", &fault->flip_rate},
                 {"short_rate", &fault->short_rate}};
    for (size_t i = 0; i < sizeof(rates) / sizeof(rates[0]); i++) {
        if (strcmp(name, rates[i].name) == 0) {
            return rate(value, rates[i].rate);
        }
    }
    return false;
}

static int spec_take(fault_transport *fault, const char *spec, char *why, size_t why_size) {
    fault->state = 1;
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
        if (equals == NULL || !setting(fault, item, equals + 1)) {
            snprintf(why, why_size,
                     "fault_spec: cannot understand '%.*s' (known: seed=N delay_ms=A..B fail_after=N fail_rate=P "
                     "hang_rate=P flip_rate=P short_rate=P, P from 0 to 1)",
                     length < 60 ? (int)length : 60, spec);
            return KVX_E_INVALID;
        }
        spec += length;
        spec += *spec == ',';
    }
    return KVX_OK;
}

/* -- dice; with the lock held ----------------------------------------------------------------------------------- */

static uint64_t dice(fault_transport *fault) { /* splitmix64 */
    uint64_t z = (fault->state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* The same number of throws for every operation: what happens to one does not shift what happens to the next. */
static enum fate fate_of(fault_transport *fault, uint64_t *delay_ms_p, uint64_t *share_p) {
    uint64_t thrown[4];
    for (int i = 0; i < 4; i++) {
        thrown[i] = dice(fault) % RATE_ONE;
    }
    *delay_ms_p = fault->delay_min_ms + dice(fault) % (fault->delay_max_ms - fault->delay_min_ms + 1);
    *share_p = dice(fault);
    fault->taken++;
    if ((fault->limited && fault->taken > fault->fail_after) || thrown[0] < fault->fail_rate) {
        return FATE_FAIL;
    }
    return thrown[1] < fault->hang_rate    ? FATE_HANG
           : thrown[2] < fault->flip_rate  ? FATE_FLIP
           : thrown[3] < fault->short_rate ? FATE_SHORT
                                           : FATE_PASS;
}

/* -- waiting operations; with the lock held ----------------------------------------------------------------------- */

static void wait_insert(fault_transport *fault, fault_op *waiting) {
    fault_op **at = &fault->waiting;
    while (*at != NULL && (*at)->due_ms <= waiting->due_ms) {
        at = &(*at)->next;
    }
    waiting->next = *at;
    *at = waiting;
}

/* Takes out the cancelled ones, those of `peer`, or all. */
static fault_op *wait_remove(fault_transport *fault, bool all, const kvx_peer *peer) {
    fault_op *taken = NULL;
    for (fault_op **at = &fault->waiting; *at != NULL;) {
        fault_op *waiting = *at;
        bool cancelled = atomic_load_explicit(&waiting->op->cancelled, memory_order_relaxed);
        if (all || (peer != NULL ? waiting->op->import->peer == peer : cancelled)) {
            *at = waiting->next;
            waiting->next = taken;
            taken = waiting;
        } else {
            at = &waiting->next;
        }
    }
    return taken;
}

static void complete_all(fault_op *list, int status) {
    while (list != NULL) {
        fault_op *next = list->next;
        kvx_op_complete(list->op, status, 0, 0, -1);
        free(list);
        list = next;
    }
}

/* Hands on what is due. */
static int wait_run(fault_transport *fault) {
    int steps = 0;
    pthread_mutex_lock(&fault->lock);
    fault_op *cancelled = wait_remove(fault, false, NULL);
    while (fault->waiting != NULL && fault->waiting->due_ms <= kvx_now_ms()) {
        fault_op *due = fault->waiting;
        fault->waiting = due->next;
        int status = fault->inner->submit(fault->transport, due->op);
        if (status == KVX_AGAIN) {
            due->due_ms = kvx_now_ms() + RETRY_MS;
            wait_insert(fault, due);
            continue;
        }
        if (status != KVX_OK && status != KVX_PENDING) {
            kvx_op_complete(due->op, status, 0, 0, -1);
        }
        free(due);
        steps++;
    }
    pthread_mutex_unlock(&fault->lock);
    complete_all(cancelled, KVX_E_CANCELLED);
    return steps;
}

/* -- slots ------------------------------------------------------------------------------------------------------ */

/* The first part of the op, under a mark that the core puts into its completion. */
static void shorten(kvx_op *op, uint64_t share) {
    uint64_t keep = op->bytes ? share % op->bytes : 0, kept = 0;
    uint32_t count = 0;
    while (count < op->count && kept < keep) {
        uint64_t left = keep - kept;
        if (op->segments[count].length > left) {
            op->segments[count].length = left;
        }
        kept += op->segments[count++].length;
    }
    op->count = count;
    op->bytes = kept;
    op->flags &= ~(uint32_t)KVX_OP_NOTIFY;
    op->injected = KVX_E_INJECTED;
}

static int wait_for(fault_transport *fault, kvx_op *op, uint64_t due_ms) {
    fault_op *waiting = malloc(sizeof(*waiting));
    if (waiting == NULL) {
        return KVX_E_NOMEM;
    }
    *waiting = (fault_op){.op = op, .due_ms = due_ms};
    pthread_mutex_lock(&fault->lock);
    wait_insert(fault, waiting);
    pthread_mutex_unlock(&fault->lock);
    kvx_core_wake(fault->core, fault->slot, 0); /* it may be sleeping for longer */
    return KVX_PENDING;
}

static int fault_submit(void *transport, kvx_op *op) {
    fault_transport *fault = transport;
    uint64_t delay_ms, share;
    pthread_mutex_lock(&fault->lock);
    enum fate fate = fate_of(fault, &delay_ms, &share);
    pthread_mutex_unlock(&fault->lock);
    if (fate == FATE_SHORT) {
        shorten(op, share);
        fate = op->bytes == 0 ? FATE_FAIL : FATE_PASS;
    }
    if (fate == FATE_FAIL) {
        kvx_op_complete(op, KVX_E_INJECTED, 0, 0, -1);
        return KVX_PENDING;
    }
    if (fate == FATE_HANG) {
        return wait_for(fault, op, UINT64_MAX);
    }
    op->corrupt = fate == FATE_FLIP;
    if (delay_ms != 0) {
        return wait_for(fault, op, kvx_now_ms() + delay_ms);
    }
    return fault->inner->submit(fault->transport, op);
}

static int fault_progress(void *transport, uint32_t thread, int timeout_ms) {
    fault_transport *fault = transport;
    if (thread != 0) {
        return fault->inner->progress(fault->transport, thread, timeout_ms);
    }
    int steps = wait_run(fault);
    pthread_mutex_lock(&fault->lock);
    uint64_t due_ms = fault->waiting != NULL ? fault->waiting->due_ms : UINT64_MAX;
    pthread_mutex_unlock(&fault->lock);
    if (due_ms != UINT64_MAX && timeout_ms != 0) {
        uint64_t now_ms = kvx_now_ms();
        int left = due_ms <= now_ms ? 0 : (int)(due_ms - now_ms < DELAY_MS_MAX ? due_ms - now_ms : DELAY_MS_MAX);
        timeout_ms = timeout_ms < 0 || left < timeout_ms ? left : timeout_ms;
    }
    return steps + fault->inner->progress(fault->transport, 0, steps != 0 ? 0 : timeout_ms);
}

static int fault_peer_close(void *transport, kvx_peer *peer, kvx_import *import) {
    fault_transport *fault = transport;
    if (import != NULL) {
        return fault->inner->peer_close(fault->transport, peer, import);
    }
    pthread_mutex_lock(&fault->lock);
    fault_op *ours = wait_remove(fault, false, peer);
    for (fault_op *at = ours; at != NULL; at = at->next) {
        kvx_op_complete(at->op, KVX_E_PEER_LOST, 0, 0, -1);
    }
    int status = fault->inner->peer_close(fault->transport, peer, NULL);
    pthread_mutex_unlock(&fault->lock);
    while (ours != NULL) {
        fault_op *next = ours->next;
        free(ours);
        ours = next;
    }
    return status;
}

static int fault_open(const kvx_transport_ops *inner, kvx_core *core, uint32_t slot, const kvx_engine_config *config,
                      void **transport_p, char *why, size_t why_size) {
    fault_transport *fault = calloc(1, sizeof(*fault));
    if (fault == NULL) {
        snprintf(why, why_size, "fault: out of memory");
        return KVX_E_NOMEM;
    }
    fault->inner = inner;
    fault->core = core;
    fault->slot = slot;
    int status = spec_take(fault, config->fault_spec, why, why_size);
    if (status == KVX_OK) {
        status = inner->open(core, slot, config, &fault->transport, why, why_size);
    }
    if (status != KVX_OK) {
        free(fault);
        return status;
    }
    pthread_mutex_init(&fault->lock, NULL);
    *transport_p = fault;
    return KVX_OK;
}

static void fault_close(void *transport) {
    fault_transport *fault = transport;
    complete_all(wait_remove(fault, true, NULL), KVX_E_CLOSED);
    fault->inner->close(fault->transport);
    pthread_mutex_destroy(&fault->lock);
    free(fault);
}

static void fault_query(void *transport, kvx_transport_info *info_p) {
    fault_transport *fault = transport;
    fault->inner->query(fault->transport, info_p);
}

static int fault_mem_register(void *transport, kvx_region *region) {
    fault_transport *fault = transport;
    return fault->inner->mem_register(fault->transport, region);
}

static int fault_mem_release(void *transport, kvx_region *region, kvx_grant *grant) {
    fault_transport *fault = transport;
    return fault->inner->mem_release(fault->transport, region, grant);
}

static int fault_mem_import(void *transport, kvx_import *import) {
    fault_transport *fault = transport;
    return fault->inner->mem_import(fault->transport, import);
}

static int fault_peer_connect(void *transport, kvx_peer *peer) {
    fault_transport *fault = transport;
    return fault->inner->peer_connect(fault->transport, peer);
}

/* -- wrapping ----------------------------------------------------------------------------------------------------- */

/* `open` is told everything but which transport is inside: one of it for each that can be. */
static const kvx_transport_ops *_Atomic wrapped[INNER_MAX];

#define OPEN_OF(n)                                                                                                     \
    static int fault_open_##n(kvx_core *core, uint32_t slot, const kvx_engine_config *config, void **transport_p,      \
                              char *why, size_t why_size) {                                                            \
        return fault_open(atomic_load(&wrapped[n]), core, slot, config, transport_p, why, why_size);                   \
    }
OPEN_OF(0)
OPEN_OF(1)
OPEN_OF(2)
OPEN_OF(3)

int kvx_transport_fault_wrap(const kvx_transport_ops *inner, kvx_transport_ops *wrapped_p) {
    static int (*const opens[INNER_MAX])(kvx_core *, uint32_t, const kvx_engine_config *, void **, char *,
                                         size_t) = {fault_open_0, fault_open_1, fault_open_2, fault_open_3};
    for (int i = 0; i < INNER_MAX; i++) {
        const kvx_transport_ops *nobody = NULL;
        if (atomic_load(&wrapped[i]) == inner || atomic_compare_exchange_strong(&wrapped[i], &nobody, inner) ||
            nobody == inner) {
            *wrapped_p = (kvx_transport_ops){
                .abi_version = inner->abi_version,
                .name = "fault",
                .open = opens[i],
                .close = fault_close,
                .query = fault_query,
                .mem_register = fault_mem_register,
                .mem_release = fault_mem_release,
                .mem_import = fault_mem_import,
                .peer_connect = fault_peer_connect,
                .peer_close = fault_peer_close,
                .submit = fault_submit,
                .progress = fault_progress,
            };
            return KVX_OK;
        }
    }
    return KVX_E_LIMIT;
}

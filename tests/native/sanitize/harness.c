/* harness.c: see harness.h. */
#include "harness.h"

#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PLACE_BLOCK      4096
#define PLACE_BLOCKS_MAX 1024

uint64_t harness_seed = 1;

void harness_fail(const char *file, int line, const char *format, ...) {
    va_list arguments;
    fprintf(stderr, "%s:%d: seed %llu: ", file, line, (unsigned long long)harness_seed);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\n");
    fflush(NULL);
    abort();
}

uint64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

uint64_t dice(uint64_t sides) { /* splitmix64 */
    static uint64_t state;
    static bool seeded;
    if (!seeded) {
        state = harness_seed;
        seeded = true;
    }
    uint64_t z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return (z ^ (z >> 31)) % sides;
}

static kvx_engine_config config_of(const char *transport, const char *socket_dir) {
    kvx_engine_config config = {
        .abi_version = KVX_ABI_VERSION,
        .transports = transport,
        .socket_dir = socket_dir,
        .tcp_bind = "127.0.0.1",
        .hixl_bind = "127.0.0.1",
        .tcp_congestion = "",
        .fault_spec = "",
        .counters_path = "",
        .copy_threads = 2,
        .tcp_threads = 2,
        .tcp_streams = 2,
        .inflight_max = 48,
        .notify_max = 1024,
        .regions_max = 64,
        .grants_max = 256,
        .peers_max = 16,
        .accepted_max = 64,
        .segments_max = 1024,
        .inline_bytes_max = 4096,
        .nt_bytes_min = 1 << 18,
        .chunk_bytes = 1 << 16,
        .frame_bytes = dice(2) ? 1 << 20 : 1 << 16, /* the larger ones of puts are lent to the kernel */
        .hbm_arena_bytes = UINT64_C(2) << 20,
        .pinned_arena_bytes = UINT64_C(2) << 20,
        .connect_ms = 5000,
        .handshake_ms = 2000,
        .cancel_ms = 2000,
        .spin_us = (uint32_t)dice(2) * 30,
    };
    for (size_t i = 0; i < sizeof(config.engine_id); i++) {
        config.engine_id[i] = (uint8_t)(dice(255) + 1);
    }
    return config;
}

const uint8_t *side_secret(const side *s) {
    return s->caps & KVX_CAP_ENCRYPTED ? s->secret : NULL;
}

void side_open(side *s, const char *name, const char *given, const char *socket_dir) {
    char transport[KVX_NAME_MAX];
    memset(s, 0, sizeof(*s));
    snprintf(s->name, sizeof(s->name), "%s", name);
    snprintf(transport, sizeof(transport), "%.*s", (int)strcspn(given, "@"), given);
    kvx_engine_config config = config_of(transport, socket_dir);
    config.flags = strcmp(given + strlen(transport), "@encrypted") == 0 ? KVX_ENGINE_ENCRYPT : 0;
    const char *base = strncmp(transport, "fault+", 6) == 0 ? transport + 6 : transport;
    char why[512] = "", faults[200];
    snprintf(faults, sizeof(faults),
             "seed=%u,delay_ms=0..3,fail_rate=0.03,hang_rate=0.01,flip_rate=0.03,short_rate=0.03,chunk_bytes=30000",
             (unsigned)dice(1u << 30));
    s->faulty = base != transport;
    s->card = strcmp(base, "hixl") != 0 ? -1 : strcmp(name, "a") == 0 ? 0 : 1;
    config.flags = s->card >= 0 && dice(2) == 0 ? KVX_ENGINE_NO_IPC : 0; /* by the library, or by copies */
    config.fault_spec = s->faulty ? faults : "";
    int status = kvx_engine_open(&config, &s->engine, why, sizeof(why));
    if (status != KVX_OK) {
        harness_fail(__FILE__, __LINE__, "%s: open: %s: %s", name, kvx_status_name(status), why);
    }
    kvx_transport_info info;
    for (uint32_t i = 0; i < KVX_TRANSPORTS_MAX && kvx_transport_query(s->engine, i, &info) == KVX_OK; i++) {
        if (strcmp(info.name, transport) == 0 || strcmp(info.name, base) == 0) {
            s->transport = i;
            s->caps = info.caps;
            snprintf(s->endpoint, sizeof(s->endpoint), "%s", info.endpoint);
            memcpy(s->secret, info.secret, sizeof(s->secret));
            return;
        }
    }
    harness_fail(__FILE__, __LINE__, "%s: no transport %s", name, transport);
}

/* -- ledger -------------------------------------------------------------------------------------------------------- */

static token_slot *slot_find(side *s, uint64_t token) { /* tokens grow by little, so this hashes well */
    token_slot *slot = &s->slots[token % TOKENS_MAX];
    return slot->token == token ? slot : NULL;
}

void side_track(side *s, uint64_t token) {
    token_slot *slot = &s->slots[token % TOKENS_MAX];
    CHECK(token != 0 && slot->token != token);
    CHECK(slot->token == 0 || slot->completed);
    *slot = (token_slot){.token = token, .lane = -1};
    s->live++;
}

int side_lane(const side *s) {
    int start = (int)dice(LANES);
    for (int i = 0; i < LANES; i++) {
        if (!s->lane_busy[(start + i) % LANES]) {
            return (start + i) % LANES;
        }
    }
    return -1;
}

void side_track_lane(side *s, uint64_t token, int lane) {
    side_track(s, token);
    s->slots[token % TOKENS_MAX].lane = lane;
    s->lane_busy[lane] = true;
}

static void take_completion(side *s, const kvx_event *event) {
    token_slot *slot = slot_find(s, event->token);
    if (slot == NULL) {
        harness_fail(__FILE__, __LINE__, "%s: an event of kind %u for a token that is not live", s->name, event->kind);
    }
    if (slot->completed) {
        harness_fail(__FILE__, __LINE__, "%s: a token completed twice", s->name);
    }
    slot->completed = true;
    slot->event = *event;
    if (slot->lane >= 0) {
        s->lane_busy[slot->lane] = false;
    }
    s->live--;
    s->completed++;
    s->cancelled += event->status == KVX_E_CANCELLED;
    s->failed += event->status != KVX_OK && event->status != KVX_E_CANCELLED;
}

static void take_event(side *s, const kvx_event *event) {
    switch (event->kind) {
    case KVX_EV_NOTIFY:
        CHECK(event->token == 0);
        s->notified++;
        s->notified_last = event->value;
        break;
    case KVX_EV_PEER_DOWN:
        CHECK(event->token == 0);
        s->peers_down++;
        break;
    case KVX_EV_GRANT_LOST:
        CHECK(event->token == 0);
        s->grants_lost++;
        break;
    default:
        CHECK(event->token != 0);
        take_completion(s, event);
    }
}

static void drain(side *s) {
    kvx_event events[64];
    uint32_t count;
    do {
        count = kvx_engine_drain(s->engine, events, 64);
        CHECK(count <= 64);
        for (uint32_t i = 0; i < count; i++) {
            take_event(s, &events[i]);
        }
    } while (count == 64);
}

void side_pump(side *const *sides, size_t count, int timeout_ms) {
    struct pollfd fds[8];
    CHECK(count <= 8);
    for (size_t i = 0; i < count; i++) {
        fds[i] = (struct pollfd){.fd = kvx_engine_fd(sides[i]->engine), .events = POLLIN};
    }
    if (poll(fds, (nfds_t)count, timeout_ms) <= 0) {
        return;
    }
    for (size_t i = 0; i < count; i++) {
        if (fds[i].revents != 0) {
            drain(sides[i]);
        }
    }
}

bool side_forget_completed(side *s, uint64_t token, kvx_event *event_p) {
    token_slot *slot = slot_find(s, token);
    CHECK(slot != NULL);
    if (!slot->completed) {
        return false;
    }
    *event_p = slot->event;
    slot->token = 0;
    return true;
}

kvx_event side_wait(side *const *sides, size_t count, side *s, uint64_t token) {
    uint64_t deadline = now_ms() + DEADLINE_MS;
    kvx_event event;
    while (!side_forget_completed(s, token, &event)) {
        if (now_ms() > deadline) {
            harness_fail(__FILE__, __LINE__, "%s: a token did not complete within %d ms", s->name, DEADLINE_MS);
        }
        side_pump(sides, count, 100);
    }
    return event;
}

static void cancel_all(side *s) {
    for (size_t i = 0; i < TOKENS_MAX; i++) {
        if (s->slots[i].token != 0 && !s->slots[i].completed) {
            kvx_cancel(s->engine, s->slots[i].token);
        }
    }
}

void side_settle(side *const *sides, size_t count) {
    uint64_t deadline = now_ms() + DEADLINE_MS, patience = now_ms() + 100;
    for (size_t i = 0; i < count; i++) {
        while (sides[i]->live != 0) {
            if (now_ms() > deadline) {
                harness_fail(__FILE__, __LINE__, "%s: %llu tokens did not complete", sides[i]->name,
                             (unsigned long long)sides[i]->live);
            }
            if (sides[i]->faulty && now_ms() > patience) {
                cancel_all(sides[i]);
                patience = now_ms() + 100;
            }
            side_pump(sides, count, 100);
        }
        memset(sides[i]->slots, 0, sizeof(sides[i]->slots));
    }
}

void side_close(side *s) {
    kvx_engine_stop(s->engine);
    drain(s);
    CHECK(s->live == 0); /* stopping completed everything */
    uint64_t completed = s->completed;
    drain(s);
    CHECK(s->completed == completed);
    kvx_engine_close(s->engine);
    s->engine = NULL;
}

/* -- memory -------------------------------------------------------------------------------------------------------- */

static void place_new(side *s, place *p, uint64_t length, uint32_t kind) {
    const kvx_alloc_args args = {.length = length, .kind = kind, .device = s->card, .numa_node = -1};
    *p = (place){.engine = s->engine};
    CHECK_STATUS(KVX_OK, kvx_mem_alloc(s->engine, &args, &p->region, NULL));
}

void place_alloc(side *s, place *p, uint64_t length) {
    place_new(s, p, length, s->card >= 0 ? KVX_MEM_HBM : KVX_MEM_DRAM);
}

void place_register(side *s, place *p, uint64_t length) {
    if (s->card >= 0 || getenv("HARNESS_ALLOCATES") != NULL) { /* nobody here reaches memory that is not the engine's */
        place_new(s, p, length, s->card >= 0 ? KVX_MEM_PINNED : KVX_MEM_DRAM);
        return;
    }
    *p = (place){.engine = s->engine, .allocated = malloc(length)};
    CHECK(p->allocated != NULL);
    memset(p->allocated, 0, length);
    const kvx_register_args args = {
        .address = (uint64_t)(uintptr_t)p->allocated, .length = length, .kind = KVX_MEM_DRAM, .device = -1};
    CHECK_STATUS(KVX_OK, kvx_mem_register(s->engine, &args, &p->region, NULL));
}

/* All of the place, every other time block by block. */
void place_grant(side *s, place *p, uint32_t access) {
    static uint32_t granted;
    uint64_t length = p->region.length, blocks[PLACE_BLOCKS_MAX];
    if (granted++ % 2 == 0 || length % PLACE_BLOCK != 0 || length / PLACE_BLOCK > PLACE_BLOCKS_MAX) {
        CHECK_STATUS(KVX_OK, kvx_grant_create(s->engine, p->region.id, 0, length, access, &p->grant));
        return;
    }
    uint32_t count = (uint32_t)(length / PLACE_BLOCK);
    for (uint32_t i = 0; i < count; i++) {
        blocks[i] = i;
    }
    kvx_part parts[2] = {{.stride = PLACE_BLOCK, .length = 100},
                         {.base = 100, .stride = PLACE_BLOCK, .length = PLACE_BLOCK - 100}};
    CHECK_STATUS(KVX_OK, kvx_grant_create_blocks(s->engine, p->region.id, 0, length, access, parts, 2, blocks, count,
                                                 &p->grant));
}

uint8_t *place_bytes(const place *p) {
    return (uint8_t *)(uintptr_t)p->region.address;
}

kvx_remote place_remote(const place *p) {
    kvx_remote remote = {
        .grant = p->grant.id,
        .generation = p->grant.generation,
        .length = p->grant.length,
        .access = p->grant.access,
    };
    memcpy(remote.key, p->grant.key, sizeof(remote.key));
    return remote;
}

void place_free(side *s, place *p, side *const *sides, size_t count) {
    uint64_t token = 0;
    uint64_t deadline = now_ms() + DEADLINE_MS;
    int status;
    while ((status = kvx_mem_release(s->engine, p->region.id, &token)) == KVX_E_BUSY && now_ms() < deadline) {
        side_pump(sides, count, 10);
    }
    CHECK_STATUS(KVX_OK, status);
    side_track(s, token);
    CHECK(side_wait(sides, count, s, token).status == KVX_OK);
    free(p->allocated);
    *p = (place){0};
}

void place_forget(place *p) {
    free(p->allocated);
    *p = (place){0};
}

__attribute__((no_sanitize("thread"))) void pattern_fill(uint8_t *bytes, uint64_t length, uint64_t seed) {
    volatile uint8_t *target = bytes; /* volatile: must not become a call of memset, which is instrumented */
    for (uint64_t i = 0; i < length; i++) {
        target[i] = (uint8_t)(seed + i * 7 + (i >> 8));
    }
}

__attribute__((no_sanitize("thread"))) bool pattern_holds_at(const uint8_t *bytes, uint64_t offset, uint64_t length,
                                                             uint64_t seed) {
    const volatile uint8_t *source = bytes;
    for (uint64_t i = offset; i < offset + length; i++) {
        if (source[i] != (uint8_t)(seed + i * 7 + (i >> 8))) {
            return false;
        }
    }
    return true;
}

bool pattern_holds(const uint8_t *bytes, uint64_t length, uint64_t seed) {
    return pattern_holds_at(bytes, 0, length, seed);
}

void place_fill(const place *p, uint64_t length, uint64_t seed) {
    if (!(p->region.flags & KVX_REGION_DEVICE)) {
        pattern_fill(place_bytes(p), length, seed);
        return;
    }
    uint8_t *bytes = malloc(length);
    CHECK(bytes != NULL);
    pattern_fill(bytes, length, seed);
    CHECK_STATUS(KVX_OK, kvx_mem_copy(p->engine, p->region.id, 0, bytes, length, 1, NULL));
    free(bytes);
}

bool place_holds(const place *p, uint64_t length, uint64_t seed) {
    if (!(p->region.flags & KVX_REGION_DEVICE)) {
        return pattern_holds(place_bytes(p), length, seed);
    }
    uint8_t *bytes = malloc(length);
    CHECK(bytes != NULL);
    CHECK_STATUS(KVX_OK, kvx_mem_copy(p->engine, p->region.id, 0, bytes, length, 0, NULL));
    bool holds = pattern_holds(bytes, length, seed);
    free(bytes);
    return holds;
}

/* scenarios.c: what two engines of one process do to each other: every kind of transfer, storms of everything at once,
 * and one of them closing in the middle. With `loop` both are the same engine. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

#define MIB          (1ull << 20)
#define PLACES       4
#define STORM_LENGTH (4 * MIB) /* of each place */

/* The two sides of a scenario and the connection from `a` to `b`. */
typedef struct pair {
    side a, other;
    side *b;
    side *both[2];
    size_t count;
    uint64_t peer;
} pair;

static void connect_pair(pair *p) {
    uint64_t token = 0;
    CHECK_STATUS(KVX_OK,
                 kvx_peer_connect(p->a.engine, p->a.transport, p->b->endpoint, side_secret(p->b), &p->peer, &token));
    side_track(&p->a, token);
    kvx_event event = side_wait(p->both, p->count, &p->a, token);
    CHECK_STATUS(KVX_OK, event.status);
    CHECK(event.id == p->peer);
}

static void open_pair(pair *p, const char *transport, const char *dir) {
    side_open(&p->a, "a", transport, dir);
    p->both[0] = &p->a;
    if (strstr(transport, "loop") != NULL) {
        p->b = &p->a;
        p->count = 1;
    } else {
        side_open(&p->other, "b", transport, dir);
        p->b = p->both[1] = &p->other;
        p->count = 2;
    }
    connect_pair(p);
}

static void close_pair(pair *p) {
    if (p->b != &p->a) {
        side_close(p->b);
    }
    side_close(&p->a);
}

static uint64_t import_place(pair *p, const place *there) {
    kvx_remote remote = place_remote(there);
    uint64_t import = 0, token = 0;
    CHECK_STATUS(KVX_OK, kvx_mem_import(p->a.engine, p->peer, &remote, &import, &token));
    side_track(&p->a, token);
    CHECK_STATUS(KVX_OK, side_wait(p->both, p->count, &p->a, token).status);
    return import;
}

/* Submits; the token to wait for, or 0 when it was refused or completed inline (then *status_p says how). */
static uint64_t submit(pair *p, const kvx_submit_args *args, const kvx_segment *segments, int lane, int *status_p) {
    uint64_t token = 0;
    int inlined = 0;
    kvx_event event;
    int status = kvx_submit(p->a.engine, args, segments, &token, &inlined, &event);
    *status_p = status;
    if (status != KVX_OK) {
        return 0;
    }
    if (inlined) {
        CHECK(event.token == token);
        *status_p = event.status;
        return 0;
    }
    side_track_lane(&p->a, token, lane);
    return token;
}

static void run(pair *p, const kvx_submit_args *args, const kvx_segment *segments) {
    int status = KVX_OK;
    uint64_t token = submit(p, args, segments, side_lane(&p->a), &status);
    if (token != 0) {
        status = side_wait(p->both, p->count, &p->a, token).status;
    }
    CHECK_STATUS(KVX_OK, status);
}

static void await_notify(pair *p, uint64_t wanted) {
    uint64_t deadline = now_ms() + DEADLINE_MS;
    while (p->b->notified < wanted) {
        CHECK(now_ms() < deadline);
        side_pump(p->both, p->count, 100);
    }
}

static void exchange(pair *p, const place *here, const place *there, uint64_t import, uint64_t length, uint32_t flags) {
    kvx_submit_args args = {.kind = KVX_OP_PUT, .region = here->region.id, .import = import, .count = 2};
    uint64_t half = length / 2, seed = dice(256);
    const kvx_segment segments[2] = {{0, half, length - half}, {length - half, 0, half}};
    args.flags = KVX_OP_NOTIFY | flags;
    args.value = p->b->notified + 1;
    place_fill(here, length, seed);
    run(p, &args, half != 0 ? segments : (kvx_segment[]){{0, 0, length}, {0, 0, length}});
    await_notify(p, args.value);
    CHECK(p->b->notified_last == args.value);
    args.kind = KVX_OP_GET;
    args.flags = flags;
    place_fill(here, length, seed + 1);
    run(p, &args, half != 0 ? segments : (kvx_segment[]){{0, 0, length}, {0, 0, length}});
    CHECK(place_holds(here, length, seed));
    (void)there;
}

void scenario_roundtrip(const char *transport, const char *dir) {
    static pair p;
    static const uint64_t lengths[] = {1, 2, 100, 4096, 4097, 65536, 300001, MIB + 3, 4 * MIB};
    open_pair(&p, transport, dir);
    place here, there;
    for (int kind = 0; kind < 2; kind++) {
        if (kind == 0) {
            place_alloc(&p.a, &here, 4 * MIB);
            place_alloc(p.b, &there, 4 * MIB);
        } else { /* memory of our own: mapped by nobody */
            place_register(&p.a, &here, 4 * MIB);
            place_register(p.b, &there, 4 * MIB);
        }
        place_grant(p.b, &there, KVX_READ | KVX_WRITE);
        uint64_t import = import_place(&p, &there);
        for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
            exchange(&p, &here, &there, import, lengths[i], 0);
            if (p.a.caps & KVX_CAP_CHECK) {
                exchange(&p, &here, &there, import, lengths[i], KVX_OP_CHECK);
            }
        }
        CHECK_STATUS(KVX_OK, kvx_import_release(p.a.engine, import));
        place_free(p.b, &there, p.both, p.count);
        place_free(&p.a, &here, p.both, p.count);
    }
    close_pair(&p);
}

/* -- storm --------------------------------------------------------------------------------------------------------- */

typedef struct storm {
    pair p;
    place here[PLACES], there[PLACES];
    uint64_t imports[PLACES]; /* 0 = none */
    uint64_t tokens[128];     /* some, to cancel */
    uint64_t recent;
    uint64_t taken, refused;
} storm;

static void storm_submit(storm *s) {
    size_t to = dice(PLACES);
    kvx_segment segments[16];
    kvx_submit_args args = {.kind = dice(2) ? KVX_OP_PUT : KVX_OP_GET, .import = s->imports[to]};
    const place *from = &s->here[dice(PLACES)];
    int lane = side_lane(&s->p.a), status = KVX_OK;
    if (args.import == 0 || lane < 0) {
        return;
    }
    args.count = (uint32_t)dice(9);
    args.flags = dice(3) == 0 || args.count == 0 ? KVX_OP_NOTIFY : 0;
    if ((s->p.a.caps & KVX_CAP_CHECK) && dice(4) == 0 && args.count != 0) {
        args.flags |= KVX_OP_CHECK;
    }
    args.region = args.count == 0 ? 0 : from->region.id;
    for (uint32_t i = 0; i < args.count; i++) {
        uint64_t part = STORM_LENGTH / LANES / args.count, begin = STORM_LENGTH / LANES * (uint64_t)lane + i * part;
        uint64_t length = 1 + dice(dice(8) == 0 ? part : 2000);
        segments[i] = (kvx_segment){begin + dice(part - length + 1), begin + dice(part - length + 1), length};
    }
    uint64_t token = submit(&s->p, &args, segments, lane, &status);
    s->taken += status == KVX_OK;
    s->refused += status == KVX_AGAIN;
    if (token != 0) {
        s->tokens[dice(128)] = s->recent = token;
    }
}

static void storm_cancel(storm *s) {
    uint64_t token = dice(2) ? s->recent : s->tokens[dice(128)];
    if (token != 0) {
        CHECK_STATUS(KVX_OK, kvx_cancel(s->p.a.engine, token)); /* also when it completed long ago */
    }
}

static void storm_revoke(storm *s, size_t index) {
    uint64_t token = 0;
    CHECK_STATUS(KVX_OK, kvx_grant_revoke(s->p.b->engine, s->there[index].grant.id, &token));
    side_track(s->p.b, token);
    side_wait(s->p.both, s->p.count, s->p.b, token);
    /* Nobody may write there now: what is in it must stay, whatever is still on its way. */
    uint64_t length = s->there[index].region.length;
    place_fill(&s->there[index], length, index);
    for (int i = 0; i < 20; i++) {
        storm_submit(s);
    }
    side_pump(s->p.both, s->p.count, 1);
    CHECK(place_holds(&s->there[index], length, index));
    if (s->imports[index] != 0) {
        CHECK_STATUS(KVX_OK, kvx_import_release(s->p.a.engine, s->imports[index]));
    }
    place_grant(s->p.b, &s->there[index], KVX_READ | KVX_WRITE);
    s->imports[index] = import_place(&s->p, &s->there[index]);
}

static void storm_replace(storm *s, size_t index) { /* memory goes away while others are busy */
    place_free(s->p.b, &s->there[index], s->p.both, s->p.count);
    if (s->imports[index] != 0) {
        CHECK_STATUS(KVX_OK, kvx_import_release(s->p.a.engine, s->imports[index]));
    }
    (dice(2) ? place_alloc : place_register)(s->p.b, &s->there[index], STORM_LENGTH);
    place_grant(s->p.b, &s->there[index], KVX_READ | KVX_WRITE);
    s->imports[index] = import_place(&s->p, &s->there[index]);
}

static void storm_reconnect(storm *s) {
    uint64_t token = 0;
    CHECK_STATUS(KVX_OK, kvx_peer_close(s->p.a.engine, s->p.peer, &token));
    side_track(&s->p.a, token);
    side_wait(s->p.both, s->p.count, &s->p.a, token);
    connect_pair(&s->p);
    for (size_t i = 0; i < PLACES; i++) {
        s->imports[i] = import_place(&s->p, &s->there[i]);
    }
}

static void storm_begin(storm *s, const char *transport, const char *dir) {
    memset(s, 0, sizeof(*s));
    open_pair(&s->p, transport, dir);
    for (size_t i = 0; i < PLACES; i++) {
        (i % 2 ? place_alloc : place_register)(&s->p.a, &s->here[i], STORM_LENGTH);
        (i % 2 ? place_alloc : place_register)(s->p.b, &s->there[i], STORM_LENGTH);
        place_grant(s->p.b, &s->there[i], KVX_READ | KVX_WRITE);
        s->imports[i] = import_place(&s->p, &s->there[i]);
    }
}

void scenario_storm(const char *transport, const char *dir, int rounds) {
    static storm s;
    storm_begin(&s, transport, dir);
    for (int round = 0; round < rounds; round++) {
        switch (dice(64)) {
        case 0:
            storm_revoke(&s, dice(PLACES));
            break;
        case 1:
            storm_replace(&s, dice(PLACES));
            break;
        case 2:
            storm_reconnect(&s);
            break;
        case 3:
            side_settle(s.p.both, s.p.count);
            memset(s.tokens, 0, sizeof(s.tokens));
            s.recent = 0;
            break;
        case 4 ... 15:
            storm_cancel(&s);
            break;
        case 16 ... 23:
            side_pump(s.p.both, s.p.count, 0);
            break;
        default:
            storm_submit(&s);
        }
        if (s.p.a.live > 40 && dice(4) == 0) {
            side_pump(s.p.both, s.p.count, 1);
        }
    }
    side_settle(s.p.both, s.p.count);
    CHECK(s.taken > 0);
    printf("storm %s: %llu taken, %llu refused, %llu cancelled, %llu failed\n", transport, (unsigned long long)s.taken,
           (unsigned long long)s.refused, (unsigned long long)s.p.a.cancelled, (unsigned long long)s.p.a.failed);
    close_pair(&s.p);
    for (size_t i = 0; i < PLACES; i++) {
        place_forget(&s.here[i]);
        place_forget(&s.there[i]);
    }
}

/* Closing with transfers in flight: first the initiator, then the owner. */
void scenario_close(const char *transport, const char *dir, int rounds) {
    static storm s;
    for (int round = 0; round < rounds; round++) {
        storm_begin(&s, transport, dir);
        uint64_t submits = 10 + dice(100);
        for (uint64_t i = 0; i < submits; i++) {
            storm_submit(&s);
        }
        bool owner_first = s.p.b != &s.p.a && round % 2 == 1;
        if (owner_first) {
            side_close(s.p.b);
            s.p.count = 1;
            side_settle(s.p.both, s.p.count); /* the initiator learns of it and nothing hangs */
            side_close(&s.p.a);
        } else {
            side_close(&s.p.a);
            if (s.p.b != &s.p.a) {
                side_close(s.p.b);
            }
        }
        for (size_t i = 0; i < PLACES; i++) {
            place_forget(&s.here[i]);
            place_forget(&s.there[i]);
        }
    }
}

/* -- ends that nobody planned ----------------------------------------------------------------------------------------
 */

static void busy(storm *s) {
    for (uint64_t i = 20 + dice(60); i > 0; i--) {
        storm_submit(s);
    }
}

/* All grants at once, with transfers through each of them. */
static void revoke_all(storm *s) {
    uint64_t tokens[PLACES];
    for (size_t i = 0; i < PLACES; i++) {
        CHECK_STATUS(KVX_OK, kvx_grant_revoke(s->p.b->engine, s->there[i].grant.id, &tokens[i]));
        side_track(s->p.b, tokens[i]);
        storm_submit(s);
    }
    for (size_t i = 0; i < PLACES; i++) {
        side_wait(s->p.both, s->p.count, s->p.b, tokens[i]);
        place_fill(&s->there[i], STORM_LENGTH, i);
    }
    side_settle(s->p.both, s->p.count);
    for (size_t i = 0; i < PLACES; i++) {
        CHECK(place_holds(&s->there[i], STORM_LENGTH, i));
        if (s->imports[i] != 0) {
            CHECK_STATUS(KVX_OK, kvx_import_release(s->p.a.engine, s->imports[i]));
        }
        place_grant(s->p.b, &s->there[i], KVX_READ | KVX_WRITE);
        s->imports[i] = import_place(&s->p, &s->there[i]);
    }
}

/* A child that inherits everything and ends by itself changes nothing for its parent. */
static void fork_now(storm *s) {
    busy(s);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        _exit(7);
    }
    busy(s);
    side_settle(s->p.both, s->p.count);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7);
}

static void *close_one(void *engine) {
    kvx_engine_close(engine);
    return NULL;
}

/* As a garbage collector does it: no stop, no drain, whatever is live; here or on another thread, in either order. */
static void drop_all(storm *s) {
    kvx_engine *engines[2] = {s->p.a.engine, s->p.count == 2 ? s->p.b->engine : NULL};
    size_t first = dice(2);
    busy(s);
    for (size_t i = 0; i < 2; i++) {
        kvx_engine *engine = engines[(first + i) % 2];
        pthread_t thread;
        if (engine != NULL && dice(2) == 0) {
            close_one(engine);
        } else if (engine != NULL) {
            CHECK(pthread_create(&thread, NULL, close_one, engine) == 0);
            CHECK(pthread_join(thread, NULL) == 0);
        }
    }
    for (size_t i = 0; i < PLACES; i++) {
        place_forget(&s->here[i]);
        place_forget(&s->there[i]);
    }
}

void scenario_ends(const char *transport, const char *dir, int rounds) {
    static storm s;
    for (int round = 0; round < rounds; round++) {
        storm_begin(&s, transport, dir);
        busy(&s);
        for (int i = 0; i < 4; i++) {
            revoke_all(&s);
            busy(&s);
        }
        fork_now(&s);
        drop_all(&s);
    }
}

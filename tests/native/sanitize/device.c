/* device.c: memory of simulated cards under many threads. Workers allocate, look, write, read and compare, while the
 * owner releases what they made; in the end an engine stops under them. Needs the simulated libraries, see run.py. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"

#define WORKERS   4
#define MADE_MAX  48 /* with what the workers hold, less than an engine may have */
#define BYTES_MAX (UINT64_C(3) << 20)

typedef struct made {
    uint64_t region;
    uint64_t address; /* of a view that is still open when the region goes, 0 = none */
} made;

typedef struct works {
    side *s;
    pthread_mutex_t lock;
    pthread_cond_t room;
    made made[MADE_MAX];
    int count, running, rounds;
    bool stopping; /* the engine may close under the workers */
} works;

typedef struct worker {
    works *all;
    uint64_t state;
} worker;

static uint64_t next(worker *w, uint64_t sides) { /* xorshift64: each worker has its own */
    w->state ^= w->state << 13;
    w->state ^= w->state >> 7;
    w->state ^= w->state << 17;
    return w->state % sides;
}

static bool gone(const works *all, int status) {
    return all->stopping && (status == KVX_E_CLOSED || status == KVX_E_NO_REGION);
}

static void hand_over(works *all, made one) {
    pthread_mutex_lock(&all->lock);
    while (all->count == MADE_MAX) {
        pthread_cond_wait(&all->room, &all->lock);
    }
    all->made[all->count++] = one;
    pthread_mutex_unlock(&all->lock);
}

/* False: the engine has stopped. */
static bool one_round(worker *w, uint8_t *ours, uint8_t *theirs) {
    works *all = w->all;
    kvx_engine *engine = all->s->engine;
    kvx_region_info region;
    const uint64_t lengths[] = {1, 700, 70000, UINT64_C(2) << 20, BYTES_MAX};
    const bool hbm = next(w, 2) == 0;
    const kvx_alloc_args args = {.length = lengths[next(w, 5)],
                                 .kind = hbm ? KVX_MEM_HBM : KVX_MEM_PINNED,
                                 .device = (int32_t)next(w, 2),
                                 .numa_node = -1,
                                 .flags = hbm ? KVX_ALLOC_SPILL : 0};
    int status = kvx_mem_alloc(engine, &args, &region, NULL);
    if (gone(all, status)) {
        return false;
    }
    CHECK_STATUS(KVX_OK, status);
    pattern_fill(ours, args.length, region.id);
    status = kvx_mem_copy(engine, region.id, 0, ours, args.length, 1, NULL);
    if (status == KVX_OK) {
        status = kvx_mem_copy(engine, region.id, 0, theirs, args.length, 0, NULL);
    }
    if (gone(all, status)) {
        return false;
    }
    CHECK_STATUS(KVX_OK, status);
    CHECK(memcmp(ours, theirs, args.length) == 0);
    made one = {.region = region.id};
    uint64_t mapped;
    if (!(region.flags & KVX_REGION_DEVICE) && next(w, 2) == 0) {
        CHECK_STATUS(KVX_OK, kvx_mem_viewed(engine, region.id, 1, &mapped));
        one.address = region.address;
    }
    kvx_device_info info;
    kvx_mem_why why;
    CHECK_STATUS(KVX_OK, kvx_device_query(engine, args.device, &info, &why));
    hand_over(all, one);
    return true;
}

static void *work(void *argument) {
    worker *w = argument;
    uint8_t *ours = malloc(BYTES_MAX), *theirs = malloc(BYTES_MAX);
    CHECK(ours != NULL && theirs != NULL);
    for (int i = 0; i < w->all->rounds && one_round(w, ours, theirs); i++) {
    }
    free(ours);
    free(theirs);
    pthread_mutex_lock(&w->all->lock);
    w->all->running--;
    pthread_mutex_unlock(&w->all->lock);
    return NULL;
}

/* Its region has gone, or goes right now. */
static void view_end(side *s, made one) {
    uint64_t mapped;
    if (one.address != 0 && kvx_mem_viewed(s->engine, one.region, 0, &mapped) != KVX_OK) {
        kvx_mem_unview(one.address);
    }
}

/* Releases what is there; returns how many workers still run. */
static int take_back(works *all) {
    side *s = all->s;
    pthread_mutex_lock(&all->lock);
    bool some = all->count > 0;
    made one = some ? all->made[--all->count] : (made){0};
    int running = all->running;
    pthread_cond_signal(&all->room);
    pthread_mutex_unlock(&all->lock);
    if (!some) {
        side_pump(&s, 1, 1);
        return running;
    }
    uint64_t token;
    CHECK_STATUS(KVX_OK, kvx_mem_release(s->engine, one.region, &token));
    side_track(s, token);
    if (dice(4) != 0) { /* the view goes while the region does, sooner or later */
        uint64_t spins = dice(60000);
        for (volatile uint64_t i = 0; i < spins; i++) {
        }
        view_end(s, one);
        one.address = 0;
    }
    CHECK(side_wait(&s, 1, s, token).status == KVX_OK);
    view_end(s, one);
    return running + 1;
}

static void run(const char *dir, int rounds, bool stop) {
    static side s;
    static works all;
    pthread_t threads[WORKERS];
    worker workers[WORKERS];
    side_open(&s, "cards", "loop", dir);
    all = (works){.s = &s, .running = WORKERS, .rounds = rounds, .stopping = stop};
    pthread_mutex_init(&all.lock, NULL);
    pthread_cond_init(&all.room, NULL);
    for (int i = 0; i < WORKERS; i++) {
        workers[i] = (worker){.all = &all, .state = 1 + dice(UINT32_MAX)};
        CHECK(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
    }
    if (stop) {
        for (int i = 0; i < rounds && take_back(&all) > 0; i++) {
        }
        kvx_engine_stop(s.engine);
        pthread_mutex_lock(&all.lock);
        all.count = 0; /* whoever waits for room goes on, and hears of it */
        pthread_cond_broadcast(&all.room);
        pthread_mutex_unlock(&all.lock);
    } else {
        while (take_back(&all) > 0) {
        }
    }
    for (int i = 0; i < WORKERS; i++) {
        pthread_join(threads[i], NULL);
    }
    if (!stop) {
        while (all.count > 0) {
            take_back(&all);
        }
        const kvx_counters *counters = kvx_engine_counters(s.engine);
        CHECK(counters->arena_bytes == 0 && counters->device_bytes == 0 && counters->spilled_bytes == 0);
    }
    side_close(&s);
    pthread_mutex_destroy(&all.lock);
    pthread_cond_destroy(&all.room);
}

void scenario_device(const char *transport, const char *dir, int rounds) {
    (void)transport;
    run(dir, rounds, false);
    run(dir, rounds, true);
}

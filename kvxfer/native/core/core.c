/* core.c: opening and closing an engine, its threads, its copy pool and its event queue.
 *
 * Closing has one order: refuse new work, end the progress threads, let the copy pool finish what is queued (every op
 * carries the cancelled flag by then), close the transports, which complete what is left. Only then may memory go. */
#define _GNU_SOURCE
#include "core/core.h"
#include "core/vault.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

void kvx_panic(const char *condition, const char *file, int line) {
    fprintf(stderr, "kvxfer: broken invariant: %s (%s:%d)\n", condition, file, line);
    abort();
}

uint64_t kvx_now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

__attribute__((format(printf, 3, 4))) static int core_set_error(char *why, size_t why_size, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    if (why != NULL && why_size != 0) {
        vsnprintf(why, why_size, format, arguments);
    }
    va_end(arguments);
    return KVX_E_INVALID;
}

/* -- threads -------------------------------------------------------------------------------------------- */

typedef struct thread_start {
    kvx_core *core;
    uint32_t slot;
    uint32_t thread;
} thread_start;

static void *core_progress_main(void *argument) {
    thread_start start = *(thread_start *)argument;
    free(argument);
    kvx_slot *slot = &start.core->slots[start.slot];
    while (!atomic_load(&start.core->stop_threads)) {
        slot->ops.progress(slot->transport, start.thread, -1);
    }
    return NULL;
}

/* Signals belong to the host process's own threads. */
static int core_thread_create(pthread_t *id, void *(*run)(void *), void *argument, const char *name) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int result = pthread_create(id, NULL, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (result == 0) {
        pthread_setname_np(*id, name);
    }
    return result;
}

static int core_threads_start(kvx_core *core, uint32_t index) {
    kvx_slot *slot = &core->slots[index];
    for (uint32_t i = 0; i < slot->threads && !slot->manual; i++) {
        thread_start *start = malloc(sizeof(*start));
        if (start == NULL) {
            return ENOMEM;
        }
        *start = (thread_start){.core = core, .slot = index, .thread = i};
        char name[16];
        snprintf(name, sizeof(name), "kvx-%.5s-%u", slot->info.name, i % 1000);
        int result = core_thread_create(&slot->ids[i], core_progress_main, start, name);
        if (result != 0) {
            free(start);
            return result;
        }
        slot->started++;
        __atomic_fetch_add(&core->counters->threads, 1, __ATOMIC_RELAXED);
    }
    return 0;
}

static void core_threads_join(kvx_core *core) {
    atomic_store(&core->stop_threads, true);
    for (uint32_t s = 0; s < core->slot_count; s++) {
        kvx_wake_slot(core, s);
    }
    for (uint32_t s = 0; s < core->slot_count; s++) {
        for (; core->slots[s].started != 0; core->slots[s].started--) {
            pthread_t id = core->slots[s].ids[core->slots[s].started - 1];
            struct timespec until;
            for (;;) {
                clock_gettime(CLOCK_REALTIME, &until);
                until.tv_nsec += 50 * 1000000;
                until.tv_sec += until.tv_nsec / 1000000000;
                until.tv_nsec %= 1000000000;
                if (pthread_timedjoin_np(id, NULL, &until) != ETIMEDOUT) {
                    break;
                }
                kvx_wake_slot(core, s); /* its first wake-up may have been swallowed by work in progress */
            }
        }
    }
}

/* With pool_lock held. */
static kvx_job *core_pool_take(kvx_core *core) {
    uint32_t waiting = atomic_load_explicit(&core->pool_waiting, memory_order_relaxed);
    if (waiting == 0) {
        return NULL;
    }
    uint32_t rank = kvx_turns_take(&core->pool_turns, waiting);
    kvx_job *job = core->pool[rank].first;
    core->pool[rank].first = job->next;
    if (job->next == NULL) {
        core->pool[rank].last = NULL;
        atomic_store_explicit(&core->pool_waiting, waiting & ~(1u << rank), memory_order_relaxed);
    }
    return job;
}

/* Of the calling copy thread. */
static _Thread_local kvx_yields core_yields;

void kvx_core_yield(kvx_core *core) {
    uint32_t call = atomic_load_explicit(&core->ring.call, memory_order_relaxed);
    if (kvx_yields_now(&core_yields, call)) {
        kvx_yields_note(&core_yields, call);
        sched_yield();
    }
}

static void *core_pool_main(void *argument) {
    kvx_core *core = argument;
    pthread_mutex_lock(&core->pool_lock);
    for (;;) {
        kvx_job *job = core_pool_take(core);
        if (job != NULL) {
            pthread_mutex_unlock(&core->pool_lock);
            job->run(job);
            kvx_core_yield(core);
            pthread_mutex_lock(&core->pool_lock);
        } else if (core->pool_stop) {
            break;
        } else {
            pthread_cond_wait(&core->pool_wake, &core->pool_lock);
        }
    }
    pthread_mutex_unlock(&core->pool_lock);
    return NULL;
}

void kvx_core_job_post(kvx_core *core, kvx_job *job) {
    job->next = NULL;
    pthread_mutex_lock(&core->pool_lock);
    KVX_ASSERT(!core->stopped);
    KVX_ASSERT(job->rank < KVX_RANKS);
    if (core->pool[job->rank].last != NULL) {
        core->pool[job->rank].last->next = job;
    } else {
        core->pool[job->rank].first = job;
        atomic_fetch_or_explicit(&core->pool_waiting, 1u << job->rank, memory_order_relaxed);
    }
    core->pool[job->rank].last = job;
    pthread_mutex_unlock(&core->pool_lock);
    pthread_cond_signal(&core->pool_wake);
}

bool kvx_core_job_yields(kvx_core *core, uint32_t rank) {
    return (atomic_load_explicit(&core->pool_waiting, memory_order_relaxed) & ((1u << rank) - 1)) != 0;
}

int kvx_pool_start(kvx_core *core) {
    uint32_t wanted = core->config.copy_threads ? core->config.copy_threads : 1; /* releases need one too */
    for (; core->pool_threads < wanted; core->pool_threads++) {
        int result = core_thread_create(&core->pool_ids[core->pool_threads], core_pool_main, core, "kvx-copy");
        if (result != 0) {
            return result;
        }
        __atomic_fetch_add(&core->counters->threads, 1, __ATOMIC_RELAXED);
    }
    return 0;
}

void kvx_pool_stop(kvx_core *core) {
    pthread_mutex_lock(&core->pool_lock);
    core->pool_stop = true;
    pthread_mutex_unlock(&core->pool_lock);
    pthread_cond_broadcast(&core->pool_wake);
    for (; core->pool_threads != 0; core->pool_threads--) {
        pthread_join(core->pool_ids[core->pool_threads - 1], NULL);
    }
}

/* -- what transports see ---------------------------------------------------------------------------------- */

void kvx_core_threads_set(kvx_core *core, uint32_t slot, uint32_t threads) {
    KVX_ASSERT(slot < KVX_TRANSPORTS_MAX && threads <= KVX_THREADS_MAX);
    core->slots[slot].threads = threads;
}

int kvx_core_wake_fd(kvx_core *core, uint32_t slot, uint32_t thread) {
    KVX_ASSERT(slot < KVX_TRANSPORTS_MAX && thread < KVX_THREADS_MAX);
    int *fd = &core->slots[slot].wake_fds[thread];
    if (*fd < 0) {
        *fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC); /* only in `open`, so no other thread looks */
    }
    return *fd;
}

void kvx_core_wake(kvx_core *core, uint32_t slot, uint32_t thread) {
    int fd = core->slots[slot].wake_fds[thread];
    if (fd >= 0) {
        uint64_t one = 1;
        ssize_t written = write(fd, &one, sizeof(one));
        (void)written; /* EAGAIN: it is readable already */
    }
}

void kvx_wake_slot(kvx_core *core, uint32_t slot) {
    for (uint32_t i = 0; i < core->slots[slot].threads; i++) {
        kvx_core_wake(core, slot, i);
    }
}

int kvx_core_owner_set(kvx_core *core, uint32_t slot, void (*turn)(void *transport), void *transport) {
    KVX_ASSERT(slot < KVX_TRANSPORTS_MAX);
    if (core->owner_set < 0) {
        core->owner_set = epoll_create1(EPOLL_CLOEXEC);
        struct epoll_event event = {.events = EPOLLIN};
        if (core->owner_set < 0 || epoll_ctl(core->owner_set, EPOLL_CTL_ADD, core->ring.fd, &event) != 0) {
            return -1;
        }
    }
    core->slots[slot].owner_turn = turn;
    core->slots[slot].owner_transport = transport;
    return core->owner_set;
}

const kvx_engine_config *kvx_core_config(const kvx_core *core) {
    return &core->config;
}

kvx_transport_counters *kvx_core_counters(kvx_core *core, uint32_t slot) {
    return &core->counters->row[slot];
}

/* -- open ------------------------------------------------------------------------------------------------- */

static int core_config_check(const kvx_engine_config *c, char *why, size_t why_size) {
    if (c->abi_version != KVX_ABI_VERSION) {
        return core_set_error(why, why_size, "abi_version is %u, this engine speaks %u", c->abi_version,
                              KVX_ABI_VERSION);
    }
    const struct {
        const char *name;
        uint64_t value, low, high;
    } ranges[] = {
        {"copy_threads", c->copy_threads, 0, KVX_THREADS_MAX},
        {"tcp_threads", c->tcp_threads, 1, KVX_THREADS_MAX},
        {"tcp_streams", c->tcp_streams, 1, 64},
        {"tcp_port", c->tcp_port, 0, 65535},
        {"hixl_port", c->hixl_port, 0, 65535},
        {"hixl_engine_port", c->hixl_engine_port, 0, 65535},
        {"inflight_max", c->inflight_max, 1, 1u << 20},
        {"notify_max", c->notify_max, 1, 1u << 22},
        {"regions_max", c->regions_max, 1, 1u << 20},
        {"grants_max", c->grants_max, 1, 1u << 22},
        {"peers_max", c->peers_max, 1, 1u << 16},
        {"accepted_max", c->accepted_max, 1, 1u << 16},
        {"segments_max", c->segments_max, 1, 1u << 20},
        {"inline_bytes_max", c->inline_bytes_max, 0, 1u << 30},
        {"chunk_bytes", c->chunk_bytes, 4096, 1u << 30},
        {"frame_bytes", c->frame_bytes, 4096, 1u << 30},
        {"hbm_arena_bytes", c->hbm_arena_bytes, UINT64_C(2) << 20, UINT64_C(1) << 40},
        {"pinned_arena_bytes", c->pinned_arena_bytes, UINT64_C(2) << 20, UINT64_C(1) << 40},
        {"connect_ms", c->connect_ms, 1, 3600000},
        {"handshake_ms", c->handshake_ms, 1, 3600000},
        {"cancel_ms", c->cancel_ms, 1, 3600000},
        {"spin_us", c->spin_us, 0, 1000},
    };
    for (size_t i = 0; i < sizeof(ranges) / sizeof(ranges[0]); i++) {
        if (ranges[i].value < ranges[i].low || ranges[i].value > ranges[i].high) {
            return core_set_error(why, why_size, "%s is %llu, accepted are %llu to %llu", ranges[i].name,
                                  (unsigned long long)ranges[i].value, (unsigned long long)ranges[i].low,
                                  (unsigned long long)ranges[i].high);
        }
    }
    return KVX_OK;
}

static int core_config_take(kvx_core *core, const kvx_engine_config *config) {
    core->config = *config;
    const char **fields[] = {&core->config.transports,     &core->config.socket_dir,  &core->config.tcp_bind,
                             &core->config.tcp_congestion, &core->config.fault_spec,  &core->config.counters_path,
                             &core->config.hixl_bind,      &core->config.hixl_options};
    size_t size = 0;
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        size += (*fields[i] ? strlen(*fields[i]) : 0) + 1;
    }
    char *at = core->strings = malloc(size);
    if (at == NULL) {
        return KVX_E_NOMEM;
    }
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        at = stpcpy(at, *fields[i] ? *fields[i] : "");
        const char *start = at - (*fields[i] ? strlen(*fields[i]) : 0);
        *fields[i] = start;
        at++;
    }
    return KVX_OK;
}

static bool core_ops_are_complete(const kvx_transport_ops *ops) {
    return ops->abi_version == KVX_ABI_VERSION && ops->name && ops->open && ops->close && ops->query &&
           ops->mem_register && ops->mem_release && ops->mem_import && ops->peer_connect && ops->peer_close &&
           ops->submit && ops->progress;
}

/* `name` is "tcp" or "fault+tcp". */
static int core_transport_open(kvx_core *core, const char *name, char *why, size_t why_size) {
    const char *base = strncmp(name, "fault+", 6) == 0 ? name + 6 : name;
    kvx_transport_ops ops;
    int status = kvx_transport_find(name, &ops);
    if (status == KVX_E_NO_TRANSPORT) {
        core_set_error(why, why_size, "transport '%s' is not part of this build", base);
        return status;
    }
    for (uint32_t i = 0; i < core->slot_count; i++) {
        if (strcmp(core->slots[i].info.name, base) == 0) {
            return core_set_error(why, why_size, "transport '%s' is named twice", base);
        }
    }
    if (core->slot_count == KVX_TRANSPORTS_MAX) {
        return core_set_error(why, why_size, "more than %d transports", KVX_TRANSPORTS_MAX);
    }
    uint32_t index = core->slot_count;
    kvx_slot *slot = &core->slots[index];
    if (status != KVX_OK) {
        return core_set_error(why, why_size, "cannot decorate transport '%s'", base);
    }
    slot->ops = ops;
    if (!core_ops_are_complete(&slot->ops)) {
        core_set_error(why, why_size, "the table of transport '%s' has a hole or another ABI number", base);
        return KVX_E_INTERNAL;
    }
    for (int i = 0; i < KVX_THREADS_MAX; i++) {
        slot->wake_fds[i] = -1;
    }
    slot->threads = 1;
    slot->manual = strcmp(base, "loop") == 0 && (core->config.flags & KVX_ENGINE_MANUAL) != 0;
    snprintf(core->counters->names[index], KVX_NAME_MAX, "%s", base);
    status = slot->ops.open(core, index, &core->config, &slot->transport, why, why_size);
    for (uint32_t i = 0; status == KVX_OK && i < slot->threads; i++) {
        if (kvx_core_wake_fd(core, index, i) < 0) {
            slot->ops.close(slot->transport);
            core_set_error(why, why_size, "no file descriptor for transport '%s'", base);
            status = KVX_E_FDS;
        }
    }
    if (status != KVX_OK) {
        slot->owner_turn = NULL;
        for (int i = 0; i < KVX_THREADS_MAX; i++) {
            if (slot->wake_fds[i] >= 0) {
                close(slot->wake_fds[i]);
            }
        }
        return status;
    }
    slot->ops.query(slot->transport, &slot->info);
    slot->info.rank = index;
    snprintf(slot->info.name, sizeof(slot->info.name), "%s", base); /* a decorated one speaks the same protocol */
    core->slot_count++;
    core->counters->transports = core->slot_count;
    return KVX_OK;
}

/* One that this machine may not have. What it is configured wrongly for is an error all the same. */
static int core_transport_try(kvx_core *core, const char *name, char *why, size_t why_size) {
    kvx_unavailable *missing = &core->unavailable[core->unavailable_count];
    int status = core_transport_open(core, name, why, why_size);
    if (status < KVX_E_NOMEM || core->unavailable_count == KVX_TRANSPORTS_MAX) {
        return status;
    }
    snprintf(missing->name, sizeof(missing->name), "%.31s", name);
    snprintf(missing->why, sizeof(missing->why), "%s", why_size != 0 && why != NULL ? why : "");
    core->unavailable_count++;
    if (why_size != 0 && why != NULL) {
        why[0] = '\0';
    }
    return KVX_OK;
}

static int core_transports_open(kvx_core *core, char *why, size_t why_size) {
    const char *list = core->config.transports;
    int status = KVX_OK;
    const char *decorated = strstr(list, "fault+loop");
    status = core_transport_open(core, decorated ? "fault+loop" : "loop", why, why_size);
    while (status == KVX_OK && *list != '\0') {
        size_t length = strcspn(list, ",");
        char name[64];
        if (length == 0 || length >= sizeof(name)) {
            return core_set_error(why, why_size, "transports: '%s' is not a comma-separated list of names",
                                  core->config.transports);
        }
        memcpy(name, list, length);
        name[length] = '\0';
        if (strcmp(name, "loop") != 0 && strcmp(name, "fault+loop") != 0) {
            status = name[0] == '?' ? core_transport_try(core, name + 1, why, why_size)
                                    : core_transport_open(core, name, why, why_size);
        }
        list += length;
        if (*list == ',' && *++list == '\0') {
            return core_set_error(why, why_size, "transports: '%s' ends with a comma", core->config.transports);
        }
    }
    return status;
}

static int core_open(kvx_core *core, const kvx_engine_config *config, char *why, size_t why_size) {
    pthread_mutex_init(&core->lock, NULL);
    pthread_mutex_init(&core->pool_lock, NULL);
    pthread_cond_init(&core->pool_wake, NULL);
    core->ring.fd = core->owner_set = -1;
    core->next_id = 1;
    kvx_random(&core->generation_base, sizeof(core->generation_base));
    core->generation_base &= INT64_MAX; /* 63 bits: a counter on top cannot wrap */
    int status = core_config_take(core, config);
    if (status == KVX_OK) {
        status = kvx_ring_open(&core->ring, (uint64_t)config->notify_max + config->inflight_max);
    }
    if (status != KVX_OK || !kvx_table_reserve(&core->ops, config->inflight_max)) {
        core_set_error(why, why_size, "cannot make the event queue");
        return status == KVX_OK ? KVX_E_NOMEM : status;
    }
    kvx_ring_unreserve(&core->ring, config->inflight_max); /* only its memory was wanted */
    if ((status = kvx_counters_open(core, why, why_size)) != KVX_OK ||
        (status = core_transports_open(core, why, why_size)) != KVX_OK) {
        return status;
    }
    int result = kvx_pool_start(core);
    for (uint32_t i = 0; result == 0 && i < core->slot_count; i++) {
        result = core_threads_start(core, i);
    }
    if (result != 0) {
        core_set_error(why, why_size, "cannot start a thread: %s", strerror(result));
        return KVX_E_SYSTEM;
    }
    return KVX_OK;
}

int kvx_engine_open(const kvx_engine_config *config, kvx_engine **engine_p, char *why, size_t why_size) {
    if (why != NULL && why_size != 0) {
        why[0] = '\0';
    }
    if (config == NULL || engine_p == NULL) {
        return KVX_E_INVALID;
    }
    int status = core_config_check(config, why, why_size);
    if (status != KVX_OK) {
        return status;
    }
    kvx_engine *engine = kvx_vault_take(sizeof(*engine)); /* it has the secrets of endpoints */
    if (engine == NULL) {
        return KVX_E_NOMEM;
    }
    status = core_open(&engine->core, config, why, why_size);
    if (status != KVX_OK) {
        kvx_engine_close(engine);
        return status;
    }
    *engine_p = engine;
    return KVX_OK;
}

/* -- close ------------------------------------------------------------------------------------------------ */

void kvx_engine_stop(kvx_engine *engine) {
    kvx_core *core = &engine->core;
    kvx_lock(core);
    bool again = core->closing;
    core->closing = true;
    kvx_ops_cancel_all(core);
    kvx_unlock(core);
    if (again) {
        return;
    }
    core_threads_join(core);
    kvx_pool_stop(core);
    for (uint32_t i = 0; i < core->slot_count; i++) {
        core->slots[i].ops.close(core->slots[i].transport);
    }
    kvx_lock(core);
    KVX_ASSERT(core->ops.count == 0); /* a transport's close completes all its ops */
    core->stopped = true;
    bool signal = kvx_peers_sweep(core);
    signal |= kvx_grants_sweep(core);
    kvx_unlock_signal(core, signal);
}

void kvx_engine_close(kvx_engine *engine) {
    if (engine == NULL) {
        return;
    }
    kvx_core *core = &engine->core;
    kvx_engine_stop(engine);
    kvx_memory_sweep(core);
    for (uint32_t s = 0; s < core->slot_count; s++) {
        for (int i = 0; i < KVX_THREADS_MAX; i++) {
            if (core->slots[s].wake_fds[i] >= 0) {
                close(core->slots[s].wake_fds[i]);
            }
        }
    }
    kvx_ops_free(core);
    if (core->owner_set >= 0) {
        close(core->owner_set);
    }
    kvx_ring_close(&core->ring);
    kvx_table_free(&core->regions);
    kvx_table_free(&core->grants);
    kvx_table_free(&core->peers);
    kvx_table_free(&core->imports);
    kvx_views_forget(core);
    kvx_table_free(&core->ops);
    kvx_counters_close(core);
    free(core->strings);
    pthread_cond_destroy(&core->pool_wake);
    pthread_mutex_destroy(&core->pool_lock);
    pthread_mutex_destroy(&core->lock);
    kvx_vault_give(engine);
}

/* -- events ----------------------------------------------------------------------------------------------- */

int kvx_engine_fd(const kvx_engine *engine) {
    return engine->core.owner_set >= 0 ? engine->core.owner_set : engine->core.ring.fd;
}

static void core_progress_owner(kvx_core *core) {
    for (uint32_t i = 0; i < core->slot_count && !core->closing; i++) {
        if (core->slots[i].owner_turn != NULL) {
            core->slots[i].owner_turn(core->slots[i].owner_transport);
        }
    }
}

uint32_t kvx_engine_drain(kvx_engine *engine, kvx_event *events, uint32_t max) {
    kvx_core *core = &engine->core;
    kvx_ring_clear(&core->ring);
    kvx_lock(core);
    kvx_ring_drain(&core->ring);
    kvx_unlock(core);
    kvx_deferred_run(core);
    core_progress_owner(core);
    uint32_t count = 0;
    kvx_lock(core);
    core->ring.signalled = false;
    while (count < max && kvx_ring_pop(&core->ring, &events[count])) {
        const kvx_event *event = &events[count++];
        if (event->kind == KVX_EV_TRANSFER) {
            core->transfers--;
        } else if (event->kind == KVX_EV_NOTIFY) {
            core->ring.reserved++; /* notifications keep their places */
            core->notifies--;
        } else if (event->kind == KVX_EV_GRANT_LOST) {
            kvx_grant_lost_drained(core, event->id);
        }
    }
    bool wake = core->notify_starved && core->notifies <= core->config.notify_max / 2 && !core->closing;
    if (wake) {
        core->notify_starved = false;
    }
    kvx_unlock(core);
    for (uint32_t i = 0; wake && i < core->slot_count; i++) {
        kvx_wake_slot(core, i);
    }
    return count;
}

int kvx_notify_post(kvx_core *core, uint32_t slot, uint64_t grant, uint64_t tag, uint64_t value) {
    kvx_lock(core);
    if (core->notifies >= core->config.notify_max) {
        core->notify_starved = true;
        kvx_unlock(core);
        return KVX_AGAIN;
    }
    core->notifies++;
    kvx_event event = {.kind = KVX_EV_NOTIFY, .id = grant, .tag = tag, .value = value, .segment = -1};
    bool signal = kvx_ring_push(&core->ring, &event);
    kvx_unlock_signal(core, signal);
    KVX_COUNT(&core->counters->row[slot], notifies_received, 1);
    return KVX_OK;
}

uint32_t kvx_engine_step(kvx_engine *engine, uint32_t index, uint32_t max) {
    kvx_core *core = &engine->core;
    if (index >= core->slot_count || !core->slots[index].manual || core->closing) {
        return 0;
    }
    uint32_t done = 0;
    while (done < max) {
        int steps = core->slots[index].ops.progress(core->slots[index].transport, 0, 0);
        if (steps <= 0) {
            break;
        }
        done += (uint32_t)steps;
    }
    return done;
}

int kvx_transport_query(kvx_engine *engine, uint32_t index, kvx_transport_info *info_p) {
    if (index >= engine->core.slot_count) {
        return KVX_E_NO_TRANSPORT;
    }
    *info_p = engine->core.slots[index].info;
    return KVX_OK;
}

int kvx_choice_count(kvx_engine *engine, uint32_t index, uint32_t choice) {
    if (index >= engine->core.slot_count || choice > KVX_CHOICE_REFUSED) {
        return KVX_E_INVALID;
    }
    kvx_transport_counters *row = &engine->core.counters->row[index];
    uint64_t *const fields[] = {
        [KVX_CHOICE_TAKEN] = &row->chosen,
        [KVX_CHOICE_MEMORY] = &row->passed_memory,
        [KVX_CHOICE_CHECKSUM] = &row->passed_checksum,
        [KVX_CHOICE_NOT_OFFERED] = &row->passed_not_offered,
        [KVX_CHOICE_UNREACHABLE] = &row->passed_unreachable,
        [KVX_CHOICE_REFUSED] = &row->passed_refused,
    };
    __atomic_fetch_add(fields[choice], 1, __ATOMIC_RELAXED);
    return KVX_OK;
}

int kvx_note(kvx_engine *engine, uint32_t what, uint64_t value) {
    kvx_counters *counters = engine->core.counters;
    if (what == KVX_NOTE_STALLED) {
        __atomic_store_n(&counters->stalled, value, __ATOMIC_RELAXED);
        return KVX_OK;
    }
    if (what == KVX_NOTE_LATE) {
        __atomic_fetch_add(&counters->late, value, __ATOMIC_RELAXED);
        return KVX_OK;
    }
    return KVX_E_INVALID;
}

int kvx_transport_unavailable(kvx_engine *engine, uint32_t index, char name[32], char why[512]) {
    if (index >= engine->core.unavailable_count) {
        return KVX_E_NO_TRANSPORT;
    }
    const kvx_unavailable *missing = &engine->core.unavailable[index];
    snprintf(name, sizeof(missing->name), "%s", missing->name);
    snprintf(why, sizeof(missing->why), "%s", missing->why);
    return KVX_OK;
}

/* hixl_device.c: one HIXL engine per device in use, and the memory that is registered with it.
 *
 * An engine is opened with the first region of its device. What is registered is the arena around a region, once. The
 * library refuses to forget memory while anybody is connected; an arena that it will not let go of stays allocated and
 * registered, and serves the next allocations. So does one that a process of this host may have mapped. */
#define _GNU_SOURCE
#include "hixl/hixl.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "core/device_memory.h"

#define OPTIONS_MAX 16
#define PORT_TRIES  4 /* a port that was free a moment ago may be taken by now */

static uint64_t process_number;

static void hixl_device_process_id_init(void) {
    kvx_random(&process_number, sizeof process_number);
}

uint64_t kvx_hixl_process(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, hixl_device_process_id_init);
    return process_number ^ (uint64_t)getpid(); /* a child of a fork is another process */
}

static void hixl_device_boot_id_read(uint8_t boot_id[16]) {
    char text[64] = {0};
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0) {
        close(fd);
    }
    size_t digits = 0;
    for (ssize_t i = 0; i < got && digits < 32; i++) {
        int value = text[i] >= '0' && text[i] <= '9'   ? text[i] - '0'
                    : text[i] >= 'a' && text[i] <= 'f' ? text[i] - 'a' + 10
                                                       : -1;
        if (value >= 0) {
            boot_id[digits / 2] = (uint8_t)(boot_id[digits / 2] << 4 | value);
            digits++;
        }
    }
    if (digits < 32) {
        kvx_random(boot_id, 16); /* nobody is on our host, as far as we can tell */
    }
}

int kvx_hixl_devices_open(hixl_transport *hixl, char *why, size_t why_size) {
    hixl_device_boot_id_read(hixl->boot_id);
    kvx_random(&hixl->epoch, sizeof hixl->epoch);
    int32_t pid = 0;
    hixl->pid = hixl->api->process_id(&pid, NULL) == KVX_OK && pid > 0 ? (uint32_t)pid : 0;
    hixl->device_count = hixl->api->facts.devices < HIXL_DEVICES_MAX ? hixl->api->facts.devices : HIXL_DEVICES_MAX;
    for (uint32_t i = 0; i < hixl->device_count; i++) {
        hixl_device *device = &hixl->devices[i];
        device->hixl = hixl;
        device->index = (int32_t)i;
        device->wake_fd = kvx_core_wake_fd(hixl->core, hixl->slot, i + 1);
        pthread_mutex_init(&device->open_lock, NULL);
        if (hixl->api->device_physical(device->index, &device->physical, NULL) != KVX_OK) {
            device->physical = -1 - device->index; /* unknown: equal to no other */
        }
        device->ops = malloc(HIXL_BATCH_OPS * sizeof *device->ops);
        device->copies = malloc(HIXL_BATCH_OPS * sizeof *device->copies);
        if (device->wake_fd < 0 || device->ops == NULL || device->copies == NULL) {
            snprintf(why, why_size, "hixl: out of %s", device->wake_fd < 0 ? "file descriptors" : "memory");
            hixl->device_count = i + 1;
            return device->wake_fd < 0 ? KVX_E_FDS : KVX_E_NOMEM;
        }
    }
    return KVX_OK;
}

void kvx_hixl_devices_wake(hixl_transport *hixl) {
    for (uint32_t i = 0; i < hixl->device_count; i++) {
        if (hixl->devices[i].engine != NULL) {
            kvx_core_wake(hixl->core, hixl->slot, i + 1);
        }
    }
}

/* -- engines ------------------------------------------------------------------------------------------------------ */

/* Ours, and what the configuration adds: "key=value;key=value". `text` keeps the words. */
static uint32_t hixl_device_options_make(const char *configured, char *text, size_t size, kvx_ascend_option *options) {
    uint32_t count = 0;
    bool pool = false;
    snprintf(text, size, "%s", configured == NULL ? "" : configured);
    char *rest = text, *word;
    while (count < OPTIONS_MAX - 1 && (word = strsep(&rest, ";")) != NULL) {
        char *value = strchr(word, '=');
        if (value == NULL) {
            continue;
        }
        *value++ = '\0';
        options[count++] = (kvx_ascend_option){.key = word, .value = value};
        pool |= strcmp(word, "BufferPool") == 0;
    }
    if (!pool) { /* no staging inside the library: it must be the same on every node */
        options[count++] = (kvx_ascend_option){.key = "BufferPool", .value = "0:0"};
    }
    return count;
}

/* Why memory cannot be registered: our words, and what the library answered and said in this thread. */
static void hixl_device_set_error(const hixl_transport *hixl, const kvx_region *region, uint32_t raw,
                                  const char *words) {
    if (region->why == NULL) {
        return;
    }
    const char *said = raw != 0 ? hixl->api->last_error() : "";
    if (strstr(words, said) != NULL) { /* or nothing was said */
        said = "";
    }
    region->why->raw = raw;
    snprintf(region->why->text, sizeof region->why->text, "%s%s%s", words, *words && *said ? ". " : "", said);
}

/* An engine that the library does not open is none; that is no link of anybody's, and no argument of the caller's. */
static int hixl_device_status_of_open(int status) {
    return status == KVX_E_LINK || status == KVX_E_INVALID ? KVX_E_UNSUPPORTED : status;
}

/* With open_lock held, for the first region of a device. */
static int hixl_device_engine_open(hixl_device *device, const kvx_region *region) {
    hixl_transport *hixl = device->hixl;
    kvx_ascend_option options[OPTIONS_MAX];
    char text[1024], why[256] = "";
    uint32_t raw = 0;
    int status = device->engine != NULL ? KVX_OK : KVX_PENDING;
    if (status == KVX_PENDING && (status = hixl->api->device_use(device->index, &raw)) == KVX_OK) {
        status = KVX_PENDING;
    }
    uint32_t count = hixl_device_options_make(hixl->config->hixl_options, text, sizeof text, options);
    for (int i = 0; status == KVX_PENDING && i < PORT_TRIES; i++) {
        uint32_t fixed = hixl->config->hixl_engine_port;
        uint32_t port = fixed != 0 ? fixed + (uint32_t)device->index : kvx_hixl_free_port(hixl);
        void *engine = NULL;
        snprintf(device->id, sizeof device->id, "%.56s:%u", hixl->host, port);
        int opened = hixl->api->engine_open(device->index, device->id, options, count, &engine, &raw, why, sizeof why);
        bool taken = opened == KVX_E_LINK && fixed == 0 && i + 1 < PORT_TRIES;
        if (opened == KVX_OK) {
            pthread_mutex_lock(&hixl->lock);
            device->engine = engine;
            pthread_mutex_unlock(&hixl->lock);
        }
        status = taken ? KVX_PENDING : opened;
    }
    if (status != KVX_OK) {
        hixl_device_set_error(hixl, region, raw, why);
    }
    return hixl_device_status_of_open(status);
}

/* -- memory ------------------------------------------------------------------------------------------------------- */

hixl_device *kvx_hixl_device_of(hixl_transport *hixl, const kvx_region *region) {
    bool reached = region->kind == KVX_MEM_HBM || region->kind == KVX_MEM_PINNED;
    if (!reached || region->device < 0 || (uint32_t)region->device >= hixl->device_count) {
        return NULL;
    }
    return &hixl->devices[region->device];
}

const hixl_arena *kvx_hixl_arena_of(const hixl_device *device, const kvx_region *region) {
    const hixl_arena *arena = device->arenas;
    while (arena != NULL && arena->id != region->arena_id) {
        arena = arena->next;
    }
    return arena;
}

static int hixl_device_arena_add(hixl_device *device, const kvx_region *region) {
    hixl_transport *hixl = device->hixl;
    uint32_t raw = 0;
    hixl_arena *arena = calloc(1, sizeof *arena);
    if (arena == NULL) {
        return KVX_E_NOMEM;
    }
    arena->id = region->arena_id;
    arena->base = region->arena_base;
    arena->length = region->arena_length;
    arena->where = region->kind == KVX_MEM_HBM ? KVX_ASCEND_DEVICE : KVX_ASCEND_HOST;
    arena->users = 1;
    int status =
        device->arena_count >= KVX_ASCEND_REGIONS_MAX
            ? KVX_E_LIMIT
            : hixl->api->mem_register(device->engine, arena->base, arena->length, arena->where, &arena->handle, &raw);
    if (status != KVX_OK) {
        hixl_device_set_error(hixl, region, raw, "");
        free(arena);
        return status == KVX_E_LINK ? KVX_E_DEVICE : status; /* nobody is connected by this */
    }
    if (arena->where == KVX_ASCEND_DEVICE && !(hixl->config->flags & KVX_ENGINE_NO_IPC) &&
        hixl->api->ipc_export(device->index, arena->base, arena->length, KVX_ASCEND_IPC_NOBODY, arena->key, &raw) !=
            KVX_OK) {
        arena->key[0] = '\0'; /* neighbours come by HIXL then, like everybody */
    }
    pthread_mutex_lock(&hixl->lock);
    arena->version = ++device->version;
    arena->next = device->arenas;
    device->arenas = arena;
    device->arena_count++;
    pthread_mutex_unlock(&hixl->lock);
    return KVX_OK;
}

int kvx_hixl_mem_register(void *transport, kvx_region *region) {
    hixl_transport *hixl = transport;
    hixl_device *device = kvx_hixl_device_of(hixl, region);
    if (device == NULL) {
        return KVX_OK; /* for other transports */
    }
    pthread_mutex_lock(&device->open_lock);
    int status = hixl_device_engine_open(device, region);
    if (status == KVX_OK) {
        pthread_mutex_lock(&hixl->lock);
        hixl_arena *known = (hixl_arena *)(uintptr_t)kvx_hixl_arena_of(device, region);
        if (known != NULL) {
            known->users++;
        }
        pthread_mutex_unlock(&hixl->lock);
        status = known != NULL ? KVX_OK : hixl_device_arena_add(device, region);
    }
    pthread_mutex_unlock(&device->open_lock);
    return status;
}

static void hixl_device_arena_free(hixl_device *device, hixl_arena *arena) {
    uint32_t raw = 0;
    if (arena->key[0] != '\0') {
        (void)device->hixl->api->ipc_close(device->index, arena->key, &raw);
    }
    free(arena);
}

void kvx_hixl_region_forget(hixl_transport *hixl, const kvx_region *region) {
    hixl_device *device = kvx_hixl_device_of(hixl, region);
    uint32_t raw = 0;
    if (device == NULL) {
        return;
    }
    pthread_mutex_lock(&device->open_lock);
    pthread_mutex_lock(&hixl->lock);
    hixl_arena **at = &device->arenas;
    while (*at != NULL && (*at)->id != region->arena_id) {
        at = &(*at)->next;
    }
    hixl_arena *arena = *at;
    bool last = arena != NULL && --arena->users == 0;
    bool mapped = last && arena->told != 0;
    pthread_mutex_unlock(&hixl->lock);
    if (mapped && kvx_arena_keep(hixl->core, arena->id)) {
        last = false;
    } else if (last && hixl->api->mem_deregister(device->engine, arena->handle, &raw) != KVX_OK) {
        last = false;
        (void)kvx_arena_keep(hixl->core, arena->id);
    }
    if (last) {
        pthread_mutex_lock(&hixl->lock);
        at = &device->arenas;
        while (*at != arena) {
            at = &(*at)->next;
        }
        *at = arena->next;
        device->arena_count--;
        for (hixl_conn *conn = hixl->conns; conn != NULL && arena->told != 0; conn = conn->next) {
            arena->told -= kvx_table_remove(&conn->told, arena->id) != NULL;
        }
        pthread_mutex_unlock(&hixl->lock);
        hixl_device_arena_free(device, arena);
    }
    pthread_mutex_unlock(&device->open_lock);
}

/* -- close -------------------------------------------------------------------------------------------------------- */

/* Finalize waits for other processes and may do so for ever. */
typedef struct closing {
    pthread_mutex_t lock;
    pthread_cond_t done_signal;
    const kvx_ascend_api *api;
    void *engine;
    bool done, abandoned;
} closing;

static void hixl_device_closing_free(closing *one) {
    pthread_cond_destroy(&one->done_signal);
    pthread_mutex_destroy(&one->lock);
    free(one);
}

static void *hixl_device_closing_main(void *argument) {
    closing *one = argument;
    (void)one->api->engine_close(one->engine, NULL);
    pthread_mutex_lock(&one->lock);
    one->done = true;
    bool abandoned = one->abandoned;
    pthread_cond_signal(&one->done_signal);
    pthread_mutex_unlock(&one->lock);
    if (abandoned) {
        hixl_device_closing_free(one);
    }
    return NULL;
}

static void hixl_device_deadline_in(struct timespec *until, uint32_t ms) {
    clock_gettime(CLOCK_REALTIME, until);
    until->tv_sec += ms / 1000;
    until->tv_nsec += (long)(ms % 1000) * 1000000;
    until->tv_sec += until->tv_nsec / 1000000000;
    until->tv_nsec %= 1000000000;
}

/* False: it is still at it, and the memory that it knows must stay. */
static bool hixl_device_engine_close(hixl_device *device) {
    hixl_transport *hixl = device->hixl;
    struct timespec until;
    closing *one = calloc(1, sizeof *one);
    if (one == NULL) {
        return false;
    }
    pthread_mutex_init(&one->lock, NULL);
    pthread_cond_init(&one->done_signal, NULL);
    one->api = hixl->api;
    one->engine = device->engine;
    if (!kvx_hixl_thread(hixl_device_closing_main, one)) {
        hixl_device_closing_free(one);
        return false;
    }
    hixl_device_deadline_in(&until, hixl->config->cancel_ms);
    pthread_mutex_lock(&one->lock);
    int waited = 0;
    while (!one->done && waited == 0) {
        waited = pthread_cond_timedwait(&one->done_signal, &one->lock, &until);
    }
    bool done = one->done;
    one->abandoned = !done;
    pthread_mutex_unlock(&one->lock);
    if (done) {
        hixl_device_closing_free(one);
    }
    return done;
}

static void hixl_device_close(hixl_device *device) {
    hixl_transport *hixl = device->hixl;
    for (hixl_arena *arena = device->arenas; arena != NULL && !hixl->stuck; arena = arena->next) {
        (void)hixl->api->mem_deregister(device->engine, arena->handle, NULL);
    }
    bool gone = device->engine == NULL || (!hixl->stuck && hixl_device_engine_close(device));
    while (device->arenas != NULL) {
        hixl_arena *arena = device->arenas;
        device->arenas = arena->next;
        if (gone && arena->told == 0) {
            hixl_device_arena_free(device, arena);
        } else { /* something may still move there, or a neighbour has it mapped: it stays as it is */
            kvx_arena_abandon(hixl->core, arena->id);
            free(arena);
        }
    }
    free(device->ops);
    free(device->copies);
    pthread_mutex_destroy(&device->open_lock);
}

void kvx_hixl_devices_close(hixl_transport *hixl) {
    for (uint32_t i = 0; i < hixl->device_count; i++) {
        hixl_device_close(&hixl->devices[i]);
    }
}

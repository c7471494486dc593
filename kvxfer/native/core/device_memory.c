/* device_memory.c: arenas of device memory and of pinned host memory; see device_memory.h. */
#define _GNU_SOURCE
#include "core/device_memory.h"
#include "list.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ascend/ascend.h"
#include "memory/copy.h"
#include "core/core.h"
#include "memory/numa.h"
#include "memory/space.h"

#define STAGE_BYTES (UINT64_C(1) << 20)

struct kvx_arena {
    kvx_core *core; /* NULL: its engine is closed */
    uint64_t id;
    uint8_t *base;
    uint64_t length;
    uint32_t kind;
    int32_t device;
    int32_t numa_node; /* of pinned memory */
    bool numa_applied;
    bool kept;        /* also when it is empty, as long as the engine lives */
    bool abandoned;   /* for ever */
    kvx_space *space; /* NULL: the application's memory */
    struct kvx_arena *previous, *next;
};

/* Bytes that are looked at although their region has gone. */
typedef struct ghost {
    uint8_t *base;
    kvx_arena *arena;
    struct ghost *next;
} ghost;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static ghost *ghosts;

__attribute__((format(printf, 2, 3))) static void device_memory_set_error(kvx_mem_why *why, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(why->text, sizeof(why->text), format, arguments);
    va_end(arguments);
}

static uint64_t device_memory_round_up(uint64_t length) {
    return (length + KVX_ASCEND_ALIGNMENT - 1) / KVX_ASCEND_ALIGNMENT * KVX_ASCEND_ALIGNMENT;
}

static kvx_ascend_where device_memory_location_of(uint32_t kind) {
    return kind == KVX_MEM_HBM ? KVX_ASCEND_DEVICE : KVX_ASCEND_HOST;
}

/* The library, and the device within its range; NULL with *status_p set. */
static const kvx_ascend_api *device_memory_device_get(int32_t device, int *status_p, kvx_mem_why *why) {
    const kvx_ascend_api *api = kvx_ascend_get(why->text, sizeof(why->text));
    *status_p = KVX_OK;
    if (api == NULL) {
        *status_p = KVX_E_UNSUPPORTED;
    } else if (device < 0 || (uint32_t)device >= api->facts.devices) {
        device_memory_set_error(why, "there is no device %" PRId32 ": this process sees %" PRIu32, device,
                                api->facts.devices);
        *status_p = KVX_E_NO_DEVICE;
        api = NULL;
    }
    return api;
}

/* What the driver said, for whoever searches for it. */
static void device_memory_set_driver_error(const kvx_ascend_api *api, kvx_mem_why *why) {
    const char *said = api->last_error != NULL ? api->last_error() : NULL;
    if (said != NULL && said[0] != '\0') {
        device_memory_set_error(why, "%s", said);
    }
}

/* -- the list; with the lock held --------------------------------------------------------------------------------- */

static uint32_t device_memory_count_registrations(const kvx_core *core, int32_t device) {
    uint32_t count = 0;
    for (const kvx_arena *arena = core->arenas; arena != NULL; arena = arena->next) {
        count += arena->device == device;
    }
    return count;
}

static int device_memory_limit_check(const kvx_core *core, int32_t device, kvx_mem_why *why) {
    if (device_memory_count_registrations(core, device) < KVX_ASCEND_REGIONS_MAX) {
        return KVX_OK;
    }
    device_memory_set_error(
        why, "device %" PRId32 " has %d registrations, more do not fit its library's exchange with peers", device,
        KVX_ASCEND_REGIONS_MAX);
    return KVX_E_LIMIT;
}

static void device_memory_arena_link(kvx_core *core, kvx_arena *arena) {
    kvx_lock(core);
    arena->id = core->generation_base + core->next_id++;
    kvx_unlock(core);
    arena->core = core;
    KVX_LIST_PUSH(core->arenas, arena);
    if (arena->space != NULL) {
        __atomic_fetch_add(&core->counters->arena_bytes, arena->length, __ATOMIC_RELAXED);
    }
}

static void device_memory_arena_unlink(kvx_arena *arena) {
    kvx_core *core = arena->core;
    if (core == NULL) {
        return;
    }
    KVX_LIST_REMOVE(core->arenas, arena);
    arena->core = NULL;
    if (arena->space != NULL) {
        __atomic_fetch_sub(&core->counters->arena_bytes, arena->length, __ATOMIC_RELAXED);
    }
}

static void device_memory_arena_destroy(kvx_arena *arena) {
    device_memory_arena_unlink(arena);
    if (arena->space != NULL) {
        const kvx_ascend_api *api = kvx_ascend_get(NULL, 0);
        if (api != NULL && !arena->abandoned) {
            api->mem_free(arena->device, device_memory_location_of(arena->kind), arena->base,
                          NULL); /* no way to act on an error */
        }
        kvx_space_close(arena->space);
    }
    free(arena);
}

static int device_memory_arena_alloc(kvx_arena *arena, uint64_t length, kvx_region *region_p) {
    uint64_t alignment = length >= KVX_ASCEND_ALIGNMENT ? KVX_ASCEND_ALIGNMENT : KVX_SPACE_GRAIN;
    uint64_t offset = 0;
    int status = kvx_space_take(arena->space, length, alignment, &offset);
    if (status == KVX_OK) {
        region_p->base = arena->base + offset;
    }
    return status;
}

static void device_memory_region_fill(const kvx_arena *arena, uint64_t length, kvx_region *region_p) {
    region_p->length = length;
    region_p->kind = arena->kind;
    region_p->device = arena->device;
    region_p->flags = arena->kind == KVX_MEM_HBM ? KVX_REGION_DEVICE : 0;
    region_p->memfd = -1;
    region_p->arena_id = arena->id;
    region_p->arena_base = arena->base;
    region_p->arena_length = arena->length;
}

/* -- allocation -----------------------------------------------------------------------------------------------------
 */

static int device_memory_alloc(const kvx_ascend_api *api, kvx_arena *arena, uint64_t length, kvx_mem_why *why) {
    void *memory = NULL;
    kvx_numa_policy before = {0};
    if (arena->kind == KVX_MEM_PINNED && arena->numa_node >= 0) {
        arena->numa_applied = kvx_numa_prefer(arena->numa_node, &before);
    }
    int status = api->mem_alloc(arena->device, device_memory_location_of(arena->kind), length, &memory, &why->raw);
    kvx_numa_restore(&before);
    if (status == KVX_OK) {
        arena->base = memory;
        arena->length = length;
    }
    return status;
}

/* As large as configured if there is room; in steps down to what is needed. */
static int device_memory_arena_make(kvx_core *core, const kvx_ascend_api *api, const kvx_alloc_args *args,
                                    kvx_arena **arena_p, kvx_mem_why *why) {
    const uint64_t needed = device_memory_round_up(args->length);
    uint64_t size = args->kind == KVX_MEM_HBM ? core->config.hbm_arena_bytes : core->config.pinned_arena_bytes;
    int status = device_memory_limit_check(core, args->device, why);
    kvx_arena *arena = status == KVX_OK ? calloc(1, sizeof(*arena)) : NULL;
    if (arena == NULL) {
        return status == KVX_OK ? KVX_E_NOMEM : status;
    }
    arena->kind = args->kind;
    arena->device = args->device;
    arena->numa_node = args->kind == KVX_MEM_PINNED ? args->numa_node : -1;
    for (size = size < needed ? needed : device_memory_round_up(size);;
         size = size / 2 < needed ? needed : device_memory_round_up(size / 2)) {
        status = device_memory_alloc(api, arena, size, why);
        if (status != KVX_E_DEVICE_MEMORY || size == needed) {
            break;
        }
    }
    if (status == KVX_OK && (arena->space = kvx_space_open(arena->length)) == NULL) {
        api->mem_free(arena->device, device_memory_location_of(arena->kind), arena->base, NULL);
        status = KVX_E_NOMEM;
    }
    if (status != KVX_OK) {
        device_memory_set_driver_error(api, why);
        free(arena);
        return status;
    }
    why->raw = 0;
    device_memory_arena_link(core, arena);
    *arena_p = arena;
    return KVX_OK;
}

static bool device_memory_arena_fits(const kvx_arena *arena, const kvx_alloc_args *args) {
    return arena->space != NULL && arena->kind == args->kind && arena->device == args->device &&
           (args->kind == KVX_MEM_HBM || arena->numa_node == args->numa_node);
}

int kvx_arena_alloc(kvx_core *core, const kvx_alloc_args *args, kvx_region *region_p, kvx_arena **arena_p,
                    kvx_mem_why *why) {
    int status;
    const kvx_ascend_api *api = device_memory_device_get(args->device, &status, why);
    if (api == NULL) {
        return status;
    }
    pthread_mutex_lock(&lock);
    status = KVX_E_DEVICE_MEMORY;
    kvx_arena *arena = core->arenas;
    for (; arena != NULL; arena = arena->next) {
        if (device_memory_arena_fits(arena, args) &&
            (status = device_memory_arena_alloc(arena, args->length, region_p)) != KVX_E_DEVICE_MEMORY) {
            break;
        }
    }
    if (arena == NULL) {
        status = device_memory_arena_make(core, api, args, &arena, why);
        if (status == KVX_OK && (status = device_memory_arena_alloc(arena, args->length, region_p)) != KVX_OK) {
            device_memory_arena_destroy(arena);
        }
    }
    if (status == KVX_OK) {
        device_memory_region_fill(arena, args->length, region_p);
        *arena_p = arena;
        if (arena->numa_node >= 0 && !arena->numa_applied) {
            region_p->flags |= KVX_REGION_NUMA_DENIED;
        }
    } else if (status == KVX_E_DEVICE_MEMORY && args->kind == KVX_MEM_HBM) {
        api->device_info(args->device, &why->free_bytes, &why->total_bytes, NULL);
    }
    pthread_mutex_unlock(&lock);
    if (status == KVX_OK && args->kind == KVX_MEM_PINNED) {
        memset(region_p->base, 0, region_p->length); /* as a new mapping would be: nobody reads what was here before */
    }
    return status;
}

/* -- the application's memory -----------------------------------------------------------------------------------------
 */

static int device_memory_owner_check(const kvx_ascend_api *api, const kvx_register_args *args, kvx_mem_why *why) {
    kvx_ascend_where where = KVX_ASCEND_FOREIGN;
    int32_t device = -1;
    int status = api->mem_query((void *)(uintptr_t)args->address, &where, &device, &why->base, &why->length, &why->raw);
    if (status == KVX_E_UNSUPPORTED) {
        why->raw = 0;
        return KVX_OK; /* the library cannot tell: the caller's word stands */
    }
    if (status != KVX_OK) {
        device_memory_set_driver_error(api, why);
        return status;
    }
    if (args->kind == KVX_MEM_PINNED && where != KVX_ASCEND_HOST) {
        device_memory_set_error(why,
                                where == KVX_ASCEND_DEVICE ? "this is memory of device %" PRId32
                                                           : "the driver did not allocate this memory",
                                device);
        return KVX_E_HOST_MEMORY;
    }
    if (args->kind == KVX_MEM_HBM && where != KVX_ASCEND_DEVICE) {
        device_memory_set_error(why, "this is not memory of a device%s",
                                where == KVX_ASCEND_HOST ? " but pinned host memory" : "");
        return KVX_E_INVALID;
    }
    if (args->kind == KVX_MEM_HBM && device >= 0 && device != args->device) {
        device_memory_set_error(why, "this is memory of device %" PRId32 ", not of %" PRId32, device, args->device);
        return KVX_E_INVALID;
    }
    if (why->length != 0 && (args->address < why->base || args->length > why->length ||
                             args->address - why->base > why->length - args->length)) {
        device_memory_set_error(why, "it leaves its allocation");
        return KVX_E_LENGTH;
    }
    return KVX_OK;
}

/* Device memory is registered by pages of 2 MiB, and peers reach whole pages. The rest of the last page may be included
 * only when it belongs to nobody else: when the allocation ends there. */
static int device_memory_alignment_check(const kvx_register_args *args, const kvx_mem_why *why) {
    uint64_t end = args->address + args->length;
    bool last = why->length != 0 && end == why->base + why->length;
    bool aligned = args->address % KVX_ASCEND_ALIGNMENT == 0 && (last || args->length % KVX_ASCEND_ALIGNMENT == 0);
    return args->kind != KVX_MEM_HBM || aligned ? KVX_OK : KVX_E_ALIGN;
}

static bool device_memory_inside_arena(const kvx_core *core, const kvx_register_args *args) {
    for (const kvx_arena *arena = core->arenas; arena != NULL; arena = arena->next) {
        uint64_t base = (uint64_t)(uintptr_t)arena->base;
        if (arena->device == args->device && arena->kind == args->kind && args->address < base + arena->length &&
            base < args->address + args->length) {
            return true;
        }
    }
    return false;
}

int kvx_arena_adopt(kvx_core *core, const kvx_register_args *args, kvx_region *region_p, kvx_arena **arena_p,
                    kvx_mem_why *why) {
    int status;
    const kvx_ascend_api *api = device_memory_device_get(args->device, &status, why);
    if (api == NULL || (status = device_memory_owner_check(api, args, why)) != KVX_OK ||
        (status = device_memory_alignment_check(args, why)) != KVX_OK) {
        return status;
    }
    kvx_arena *arena = calloc(1, sizeof(*arena));
    if (arena == NULL) {
        return KVX_E_NOMEM;
    }
    arena->base = (uint8_t *)(uintptr_t)args->address;
    arena->length = args->kind == KVX_MEM_HBM ? device_memory_round_up(args->length) : args->length;
    arena->kind = args->kind;
    arena->device = args->device;
    arena->numa_node = -1;
    pthread_mutex_lock(&lock);
    status =
        device_memory_inside_arena(core, args) ? KVX_E_OVERLAP : device_memory_limit_check(core, args->device, why);
    if (status == KVX_OK) {
        device_memory_arena_link(core, arena);
    }
    pthread_mutex_unlock(&lock);
    if (status != KVX_OK) {
        free(arena);
        return status;
    }
    region_p->base = arena->base;
    device_memory_region_fill(arena, args->length, region_p);
    *arena_p = arena;
    return KVX_OK;
}

/* -- giving back ------------------------------------------------------------------------------------------------------
 */

static void device_memory_arena_free_locked(kvx_arena *arena, uint8_t *base) {
    if (arena->space != NULL) {
        int status = kvx_space_give(arena->space, (uint64_t)(base - arena->base));
        KVX_ASSERT(status == KVX_OK); /* twice would hand the same bytes to two regions */
    }
    bool empty = arena->space == NULL || kvx_space_empty(arena->space);
    if (empty && !(arena->kept && arena->core != NULL && arena->space != NULL)) {
        device_memory_arena_destroy(arena);
    }
}

static kvx_arena *device_memory_arena_find(kvx_core *core, uint64_t id) {
    kvx_arena *arena = core->arenas;
    while (arena != NULL && arena->id != id) {
        arena = arena->next;
    }
    return arena;
}

bool kvx_arena_keep(kvx_core *core, uint64_t id) {
    pthread_mutex_lock(&lock);
    kvx_arena *arena = device_memory_arena_find(core, id);
    bool ours = arena != NULL && arena->space != NULL;
    if (ours) {
        arena->kept = true;
    }
    pthread_mutex_unlock(&lock);
    return ours;
}

void kvx_arena_abandon(kvx_core *core, uint64_t id) {
    pthread_mutex_lock(&lock);
    kvx_arena *arena = device_memory_arena_find(core, id);
    if (arena != NULL) {
        arena->abandoned = true;
    }
    pthread_mutex_unlock(&lock);
}

void kvx_arena_give(kvx_arena *arena, uint8_t *base) {
    pthread_mutex_lock(&lock);
    device_memory_arena_free_locked(arena, base);
    pthread_mutex_unlock(&lock);
}

void kvx_arena_haunt(kvx_arena *arena, uint8_t *base) {
    ghost *made = malloc(sizeof(*made));
    if (made == NULL) {
        return; /* the bytes stay taken for ever, which is safe */
    }
    pthread_mutex_lock(&lock);
    *made = (ghost){.base = base, .arena = arena, .next = ghosts};
    ghosts = made;
    pthread_mutex_unlock(&lock);
}

void kvx_mem_unview(uint64_t address) {
    pthread_mutex_lock(&lock);
    ghost **at = &ghosts;
    while (*at != NULL && (uint64_t)(uintptr_t)(*at)->base != address) {
        at = &(*at)->next;
    }
    ghost *found = *at;
    if (found != NULL) {
        *at = found->next;
        device_memory_arena_free_locked(found->arena, found->base);
        free(found);
    }
    pthread_mutex_unlock(&lock);
}

void kvx_arenas_close(kvx_core *core) {
    pthread_mutex_lock(&lock);
    while (core->arenas != NULL) {
        kvx_arena *arena = core->arenas;
        bool empty = arena->space != NULL && kvx_space_empty(arena->space); /* kept */
        device_memory_arena_unlink(arena);
        KVX_ASSERT(core->arenas != arena);
        if (empty) {
            device_memory_arena_destroy(arena);
        }
    }
    pthread_mutex_unlock(&lock);
}

int kvx_device_query(kvx_engine *engine, int32_t device, kvx_device_info *info_p, kvx_mem_why *why_p) {
    kvx_core *core = &engine->core;
    int status;
    memset(why_p, 0, sizeof(*why_p));
    const kvx_ascend_api *api = device_memory_device_get(device, &status, why_p);
    if (api == NULL) {
        return status;
    }
    *info_p = (kvx_device_info){.physical = -1};
    status = api->device_info(device, &info_p->free_bytes, &info_p->total_bytes, &why_p->raw);
    if (status != KVX_OK) {
        device_memory_set_driver_error(api, why_p);
        return status;
    }
    if (api->device_physical(device, &info_p->physical, NULL) != KVX_OK) {
        info_p->physical = -1;
    }
    pthread_mutex_lock(&lock);
    info_p->registrations = device_memory_count_registrations(core, device);
    for (const kvx_arena *arena = core->arenas; arena != NULL; arena = arena->next) {
        if (arena->device == device && arena->kind == KVX_MEM_HBM && arena->space != NULL) {
            info_p->arena_bytes += arena->length;
        }
    }
    pthread_mutex_unlock(&lock);
    kvx_lock(core);
    for (uint32_t i = 0; i < core->regions.capacity; i++) {
        const region_box *box = core->regions.keys[i] ? core->regions.values[i] : NULL;
        if (box != NULL && box->region.device == device) {
            uint64_t bytes = box->region.kind == KVX_MEM_HBM ? box->region.length : 0;
            *(box->arena->space != NULL ? &info_p->region_bytes : &info_p->foreign_bytes) += bytes;
            info_p->live_tokens += box->pins;
        }
    }
    kvx_unlock(core);
    return KVX_OK;
}

/* -- copies -----------------------------------------------------------------------------------------------------------
 */

/* Between two cards that do not reach each other: through the host. */
static int device_memory_copy_staged(const kvx_ascend_api *api, kvx_place target, kvx_place source, uint64_t length,
                                     uint32_t *raw_p) {
    uint64_t size = length < STAGE_BYTES ? length : STAGE_BYTES;
    uint8_t *stage = malloc(size);
    int status = stage == NULL ? KVX_E_NOMEM : KVX_OK;
    for (uint64_t at = 0, step; status == KVX_OK && at < length; at += step) {
        step = length - at < size ? length - at : size;
        status = api->copy(source.device, stage, source.address + at, step, raw_p);
        if (status == KVX_OK) {
            status = api->copy(target.device, target.address + at, stage, step, raw_p);
        }
    }
    free(stage);
    return status;
}

static int device_memory_copy_devices(const kvx_ascend_api *api, kvx_place target, kvx_place source, uint64_t length,
                                      uint32_t *raw_p) {
    int32_t there = 1, back = 1;
    if (target.device != source.device) { /* asking also enables it */
        if (api->device_peer(target.device, source.device, &there, NULL) != KVX_OK ||
            api->device_peer(source.device, target.device, &back, NULL) != KVX_OK) {
            there = 0;
        }
    }
    return there && back ? api->copy(target.device, target.address, source.address, length, raw_p)
                         : device_memory_copy_staged(api, target, source, length, raw_p);
}

int kvx_move(kvx_place target, kvx_place source, uint64_t length, uint64_t nt_bytes_min, uint32_t *raw_p) {
    if (kvx_place_on_device(target) || kvx_place_on_device(source)) {
        const kvx_ascend_api *api = kvx_ascend_get(NULL, 0);
        int32_t device = kvx_place_on_device(target) ? target.device : source.device;
        if (api == NULL || length == 0) {
            return api == NULL ? KVX_E_UNSUPPORTED : KVX_OK;
        }
        if (kvx_place_on_device(target) && kvx_place_on_device(source)) {
            return device_memory_copy_devices(api, target, source, length, raw_p);
        }
        return api->copy(device, target.address, source.address, length, raw_p);
    }
    if (target.address < source.address + length && source.address < target.address + length) {
        memmove(target.address, source.address, length);
    } else {
        kvx_copy(target.address, source.address, length, nt_bytes_min);
    }
    return KVX_OK;
}

int kvx_place_crc32c(kvx_place place, uint64_t length, uint32_t *crc_p) {
    uint32_t crc = 0;
    if (!kvx_place_on_device(place)) {
        *crc_p = kvx_crc32c(0, place.address, length);
        return KVX_OK;
    }
    uint64_t size = length < STAGE_BYTES ? length : STAGE_BYTES;
    uint8_t *stage = malloc(size + 1); /* also when there is nothing to read */
    int status = stage == NULL ? KVX_E_NOMEM : KVX_OK;
    for (uint64_t at = 0; status == KVX_OK && at < length;) {
        uint64_t step = length - at < size ? length - at : size;
        status = kvx_move(kvx_place_host(stage), kvx_place_at(place, at), step, UINT64_MAX, NULL);
        crc = status == KVX_OK ? kvx_crc32c(crc, stage, step) : crc;
        at += step;
    }
    free(stage);
    *crc_p = crc;
    return status;
}

int kvx_place_flip(kvx_place place) {
    uint8_t byte = 0;
    int status = kvx_move(kvx_place_host(&byte), place, 1, UINT64_MAX, NULL);
    byte ^= 1;
    return status == KVX_OK ? kvx_move(place, kvx_place_host(&byte), 1, UINT64_MAX, NULL) : status;
}

/* memory.c: regions. Allocation (see backing.h, device_memory.h), registration of the caller's memory, release.
 *
 * A region is in use by live ops of ours (pins: release is refused) and by grants (release revokes them and waits until
 * they are quiet). Only then do the transports forget it and the memory goes; the copy pool does that last step. */
#define _GNU_SOURCE
#include "memory/backing.h"
#include "core/core.h"
#include "core/device_memory.h"
#include "memory/pages.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

region_box *kvx_region_find(kvx_core *core, uint64_t region) {
    region_box *box = kvx_table_get(&core->regions, region);
    return box != NULL && box->state == REGION_LIVE ? box : NULL;
}

static void memory_info_fill(const region_box *box, kvx_region_info *info_p) {
    *info_p = (kvx_region_info){
        .id = box->region.id,
        .generation = box->region.generation,
        .address = (uint64_t)(uintptr_t)box->region.base,
        .length = box->region.length,
        .flags = box->region.flags,
        .references = box->references,
        .numa_node = box->numa_node,
        .kind = box->region.kind,
        .device = box->region.device,
    };
}

/* -- registration ------------------------------------------------------------------------------------------- */

static void memory_bytes_count(kvx_core *core, const kvx_region *region, uint64_t change) { /* modulo 2^64 */
    __atomic_fetch_add(&core->counters->registered_bytes, change, __ATOMIC_RELAXED);
    if (region->flags & KVX_REGION_DEVICE) {
        __atomic_fetch_add(&core->counters->device_bytes, change, __ATOMIC_RELAXED);
    }
    if (region->flags & KVX_REGION_SPILLED) {
        __atomic_fetch_add(&core->counters->spilled_bytes, change, __ATOMIC_RELAXED);
    }
}

static void memory_remove_locked(kvx_core *core, region_box *box) {
    kvx_table_remove(&core->regions, box->region.id);
    KVX_GAUGE(core, regions, core->regions.count);
    memory_bytes_count(core, &box->region, -box->region.length);
}

static void memory_mapping_drop(void *base, uint64_t length, bool viewed) {
    if (viewed) {
        mmap(base, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    } else {
        munmap(base, length);
    }
}

static void memory_box_free(region_box *box) {
    if (box->region.memfd >= 0) {
        close(box->region.memfd);
    }
    free(box);
}

static void memory_free_memory(region_box *box) {
    if (box->mapped_length != 0) {
        memory_mapping_drop(box->region.base, box->mapped_length, box->viewed);
    } else if (box->arena != NULL && box->viewed) {
        kvx_arena_haunt(box->arena, box->region.base);
    } else if (box->arena != NULL) {
        kvx_arena_give(box->arena, box->region.base);
    }
    memory_box_free(box);
}

/* Allocated by us and within the CPU's reach. */
static bool memory_is_viewable(const region_box *box) {
    return box->mapped_length != 0 || box->carved;
}

int kvx_mem_viewed(kvx_engine *engine, uint64_t region, uint32_t viewed, uint64_t *mapped_length_p) {
    kvx_core *core = &engine->core;
    kvx_lock(core);
    region_box *box = viewed ? kvx_region_find(core, region) : kvx_table_get(&core->regions, region);
    int status = box == NULL || !memory_is_viewable(box) ? KVX_E_NO_REGION : KVX_OK;
    if (status == KVX_OK) {
        box->viewed = viewed != 0;
        *mapped_length_p = box->mapped_length;
    }
    kvx_unlock(core);
    return status;
}

void kvx_mem_unmap(uint64_t address, uint64_t mapped_length) {
    munmap((void *)(uintptr_t)address, mapped_length);
}

/* The registration of the same bytes that is there already, or one that overlaps, or NULL. */
static region_box *memory_find_overlapping(kvx_core *core, const kvx_register_args *args) {
    const uint64_t low = args->address;
    const int32_t device = args->kind == KVX_MEM_HBM ? args->device : -1;
    for (uint32_t i = 0; i < core->regions.capacity; i++) {
        region_box *box = core->regions.keys[i] ? core->regions.values[i] : NULL;
        /* Addresses of devices are numbers of their own. */
        if (box != NULL && device == (box->region.flags & KVX_REGION_DEVICE ? box->region.device : -1)) {
            uint64_t other = (uint64_t)(uintptr_t)box->region.base;
            if (low < other + box->region.length && other < low + args->length) {
                return box;
            }
        }
    }
    return NULL;
}

static int memory_insert_locked(kvx_core *core, region_box *box) {
    if (core->regions.count >= core->config.regions_max) {
        return KVX_E_LIMIT;
    }
    if (!kvx_table_reserve(&core->regions, 1) || !kvx_ring_reserve(&core->ring, 1)) {
        return KVX_E_NOMEM;
    }
    box->core = core;
    box->references = 1;
    box->state = REGION_REGISTERING;
    box->region.id = core->next_id++;
    box->region.generation = core->generation_base + box->region.id;
    kvx_table_put(&core->regions, box->region.id, box);
    KVX_GAUGE(core, regions, core->regions.count);
    memory_bytes_count(core, &box->region, box->region.length);
    return KVX_OK;
}

/* What the transports say that they can register. */
static int memory_check_transports(const kvx_core *core, const kvx_region *region, kvx_mem_why *why) {
    for (uint32_t i = 0; i < core->slot_count; i++) {
        const kvx_transport_info *info = &core->slots[i].info;
        uint64_t over = info->alignment > 1 ? (uint64_t)(uintptr_t)region->base % info->alignment : 0;
        if (over != 0) {
            why->required = info->alignment;
            snprintf(why->text, sizeof(why->text), "the address is %llu bytes past a multiple of %llu, as %s needs it",
                     (unsigned long long)over, (unsigned long long)info->alignment, info->name);
            return KVX_E_ALIGN;
        }
        if (region->length > info->region_bytes_max) {
            why->required = info->region_bytes_max;
            snprintf(why->text, sizeof(why->text), "%s registers at most %llu bytes at a time", info->name,
                     (unsigned long long)info->region_bytes_max);
            return KVX_E_LIMIT;
        }
    }
    return KVX_OK;
}

/* The alignment that suits all of them. */
static uint64_t memory_alignment_of(const kvx_core *core) {
    uint64_t most = (uint64_t)sysconf(_SC_PAGESIZE);
    for (uint32_t i = 0; i < core->slot_count; i++) {
        most = core->slots[i].info.alignment > most ? core->slots[i].info.alignment : most;
    }
    return most;
}

/* Tells every transport about an inserted region; on failure takes all of it back (the box stays the caller's). */
static int memory_register_with_transports(kvx_core *core, region_box *box, kvx_region_info *info_p, kvx_mem_why *why) {
    uint32_t told = 0;
    int status = KVX_OK;
    box->region.why = why;
    for (; told < core->slot_count && status == KVX_OK; told++) {
        kvx_slot *slot = &core->slots[told];
        status = slot->ops.mem_register(slot->transport, &box->region);
    }
    box->region.why = NULL;
    if (status != KVX_OK) {
        for (uint32_t i = 0; i + 1 < told; i++) {
            core->slots[i].ops.mem_release(core->slots[i].transport, &box->region, NULL);
        }
        kvx_lock(core);
        memory_remove_locked(core, box);
        kvx_ring_unreserve(&core->ring, 1);
        kvx_unlock(core);
        return status;
    }
    kvx_lock(core);
    box->state = REGION_LIVE;
    memory_info_fill(box, info_p);
    kvx_unlock(core);
    return KVX_OK;
}

static int memory_register_again(kvx_core *core, region_box *box, kvx_region_info *info_p) {
    if (box->references >= KVX_REFERENCES_MAX) {
        return KVX_E_LIMIT;
    }
    if (!kvx_ring_reserve(&core->ring, 1)) {
        return KVX_E_NOMEM;
    }
    box->references++;
    memory_info_fill(box, info_p);
    return KVX_OK;
}

/* With MS_ASYNC the kernel only walks its list of mappings, and reports holes. */
static bool memory_is_mapped(uint64_t address, uint64_t length) {
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t low = address & ~(page - 1);
    return msync((void *)(uintptr_t)low, address + length - low, MS_ASYNC) == 0;
}

/* Memory that is not there, or may not be written, would end the process when a peer's bytes arrive; say it now. */
static int memory_pages_check(const kvx_register_args *args, kvx_mem_why *why) {
    uint64_t where = 0;
    bool write = args->read_only == 0;
    kvx_pages_found found = kvx_pages_allow(args->address, args->length, write, &where);
    if (found == KVX_PAGES_UNKNOWN && (errno == EMFILE || errno == ENFILE)) {
        why->sys_errno = errno;
        return KVX_E_FDS;
    }
    if (found == KVX_PAGES_UNKNOWN) { /* no /proc: holes can be found without it */
        return memory_is_mapped(args->address, args->length) ? KVX_OK : KVX_E_INVALID;
    }
    if (found == KVX_PAGES_REFUSED) {
        snprintf(why->text, sizeof(why->text), "the pages at %#llx may not be %s", (unsigned long long)where,
                 write ? "read and written" : "read");
    } else if (found == KVX_PAGES_HOLE) {
        snprintf(why->text, sizeof(why->text), "nothing is mapped at %#llx", (unsigned long long)where);
    }
    return found == KVX_PAGES_FINE ? KVX_OK : found == KVX_PAGES_REFUSED && write ? KVX_E_READ_ONLY : KVX_E_INVALID;
}

static kvx_mem_why *memory_why_clear(kvx_mem_why *why_p, kvx_mem_why *ignored) {
    kvx_mem_why *why = why_p != NULL ? why_p : ignored;
    memset(why, 0, sizeof(*why));
    return why;
}

static int memory_register_check(const kvx_register_args *args, const kvx_region_info *info_p, kvx_mem_why *why) {
    uint64_t end;
    if (args == NULL || args->address == 0 || info_p == NULL || args->kind > KVX_MEM_PINNED ||
        (args->kind == KVX_MEM_DRAM) != (args->device < 0)) {
        return KVX_E_INVALID;
    }
    if (args->length == 0 || __builtin_add_overflow(args->address, args->length, &end) || end > UINTPTR_MAX) {
        return KVX_E_LENGTH;
    }
    return args->kind == KVX_MEM_HBM ? KVX_OK : memory_pages_check(args, why);
}

/* With the lock held: the region that has these bytes already gets one more reference, or is in the way. KVX_PENDING:
 * there is none. */
static int memory_register_known(kvx_core *core, const kvx_register_args *args, kvx_region_info *info_p,
                                 kvx_mem_why *why) {
    if (core->closing) {
        return KVX_E_CLOSED;
    }
    region_box *other = memory_find_overlapping(core, args);
    if (other == NULL) {
        return KVX_PENDING;
    }
    const kvx_region *region = &other->region;
    bool read_only = (region->flags & KVX_REGION_READ_ONLY) != 0;
    bool same = (uint64_t)(uintptr_t)region->base == args->address && region->length == args->length &&
                region->kind == args->kind && read_only == (args->read_only != 0) && !other->carved &&
                other->state == REGION_LIVE;
    if (!same) {
        why->conflict = region->id;
        why->base = (uint64_t)(uintptr_t)region->base;
        why->length = region->length;
    }
    return same ? memory_register_again(core, other, info_p) : KVX_E_OVERLAP;
}

static int memory_register_new(kvx_core *core, region_box *box, const kvx_register_args *args, kvx_region_info *info_p,
                               kvx_mem_why *why) {
    int status = KVX_OK;
    box->region.base = (uint8_t *)(uintptr_t)args->address;
    box->region.length = args->length;
    box->region.memfd = -1;
    box->region.device = -1;
    box->numa_node = -1;
    if (args->kind != KVX_MEM_DRAM) {
        status = kvx_arena_adopt(core, args, &box->region, &box->arena, why);
    }
    box->region.flags |= args->read_only ? KVX_REGION_READ_ONLY : 0;
    status = status == KVX_OK ? memory_check_transports(core, &box->region, why) : status;
    if (status == KVX_OK) {
        kvx_lock(core);
        status = memory_register_known(core, args, info_p, why); /* somebody may have been faster */
        bool known = status != KVX_PENDING;
        status = known ? status : memory_insert_locked(core, box);
        kvx_unlock(core);
        if (!known && status == KVX_OK &&
            (status = memory_register_with_transports(core, box, info_p, why)) == KVX_OK) {
            return KVX_OK;
        }
    }
    memory_free_memory(box);
    return status;
}

int kvx_mem_register(kvx_engine *engine, const kvx_register_args *args, kvx_region_info *info_p, kvx_mem_why *why_p) {
    kvx_core *core = &engine->core;
    kvx_mem_why ignored, *why = memory_why_clear(why_p, &ignored);
    int status = memory_register_check(args, info_p, why);
    if (status != KVX_OK) {
        return status;
    }
    kvx_lock(core);
    status = memory_register_known(core, args, info_p, why);
    kvx_unlock(core);
    if (status != KVX_PENDING) {
        return status;
    }
    region_box *box = calloc(1, sizeof(*box));
    return box == NULL ? KVX_E_NOMEM : memory_register_new(core, box, args, info_p, why);
}

/* -- allocation --------------------------------------------------------------------------------------------- */

static int memory_host_alloc(const kvx_core *core, region_box *box, const kvx_alloc_args *args, kvx_mem_why *why) {
    kvx_backing_wish wish = {
        .length = args->length,
        .alignment = memory_alignment_of(core),
        .numa_node = args->numa_node,
        .huge = !(core->config.flags & KVX_ENGINE_NO_HUGE),
    };
    kvx_backing made;
    int status = kvx_backing_make(&wish, &made, &why->sys_errno);
    if (status == KVX_OK) {
        box->region.base = made.base;
        box->region.length = args->length;
        box->region.memfd = made.memfd;
        box->region.flags = made.flags;
        box->mapped_length = made.mapped_length;
        box->numa_node = made.numa_node;
    }
    return status;
}

/* From an arena; when the device is full and the caller agreed, from pinned host memory. */
static int memory_alloc_from_arena(kvx_core *core, region_box *box, const kvx_alloc_args *args, kvx_mem_why *why) {
    int status = kvx_arena_alloc(core, args, &box->region, &box->arena, why);
    if (status == KVX_E_DEVICE_MEMORY && args->kind == KVX_MEM_HBM && (args->flags & KVX_ALLOC_SPILL)) {
        kvx_alloc_args host = *args;
        host.kind = KVX_MEM_PINNED;
        status = kvx_arena_alloc(core, &host, &box->region, &box->arena, why);
        if (status == KVX_OK) {
            box->region.flags |= KVX_REGION_SPILLED;
            __atomic_fetch_add(&core->counters->spills, 1, __ATOMIC_RELAXED);
        }
    }
    if (status == KVX_OK) {
        box->carved = box->region.kind == KVX_MEM_PINNED;
        bool bound = box->carved && !(box->region.flags & KVX_REGION_NUMA_DENIED);
        box->numa_node = bound ? args->numa_node : -1;
    }
    return status;
}

static int memory_alloc_check(const kvx_alloc_args *args, const kvx_region_info *info_p) {
    if (args == NULL || info_p == NULL || args->kind > KVX_MEM_PINNED ||
        (args->kind == KVX_MEM_DRAM) != (args->device < 0) || (args->flags & ~(uint32_t)KVX_ALLOC_SPILL) != 0) {
        return KVX_E_INVALID;
    }
    return args->length == 0 || args->length > (uint64_t)INT64_MAX - KVX_BACKING_HUGE_BYTES ? KVX_E_LENGTH : KVX_OK;
}

int kvx_mem_alloc(kvx_engine *engine, const kvx_alloc_args *args, kvx_region_info *info_p, kvx_mem_why *why_p) {
    kvx_core *core = &engine->core;
    kvx_mem_why ignored, *why = memory_why_clear(why_p, &ignored);
    int status = memory_alloc_check(args, info_p);
    if (status != KVX_OK) {
        return status;
    }
    kvx_lock(core);
    status = core->closing ? KVX_E_CLOSED : core->regions.count >= core->config.regions_max ? KVX_E_LIMIT : KVX_OK;
    kvx_unlock(core);
    if (status != KVX_OK) {
        return status;
    }
    region_box *box = calloc(1, sizeof(*box));
    if (box == NULL) {
        return KVX_E_NOMEM;
    }
    box->region.device = -1;
    if (args->kind == KVX_MEM_DRAM) {
        status = memory_host_alloc(core, box, args, why);
    } else {
        status = memory_alloc_from_arena(core, box, args, why);
    }
    if (status != KVX_OK) {
        free(box);
        return status;
    }
    status = memory_check_transports(core, &box->region, why);
    if (status == KVX_OK) {
        kvx_lock(core);
        status = core->closing ? KVX_E_CLOSED : memory_insert_locked(core, box);
        kvx_unlock(core);
    }
    if (status == KVX_OK) {
        status = memory_register_with_transports(core, box, info_p, why);
    }
    if (status != KVX_OK) {
        memory_free_memory(box);
    }
    return status;
}

/* -- looking and writing ------------------------------------------------------------------------------------ */

/* Pins the region, so that it stays while bytes move. */
static int memory_pin(kvx_core *core, uint64_t region, uint64_t offset, uint64_t length, bool write,
                      region_box **box_p) {
    kvx_lock(core);
    region_box *box = kvx_region_find(core, region);
    int status = core->closing ? KVX_E_CLOSED : box == NULL ? KVX_E_NO_REGION : KVX_OK;
    if (status == KVX_OK && (offset > box->region.length || length > box->region.length - offset)) {
        status = KVX_E_LOCAL_RANGE;
    } else if (status == KVX_OK && write && (box->region.flags & KVX_REGION_READ_ONLY)) {
        status = KVX_E_READ_ONLY;
    } else if (status == KVX_OK) {
        box->pins++;
        *box_p = box;
    }
    kvx_unlock(core);
    return status;
}

int kvx_mem_copy(kvx_engine *engine, uint64_t region, uint64_t offset, void *memory, uint64_t length, uint32_t write,
                 kvx_mem_why *why_p) {
    kvx_core *core = &engine->core;
    kvx_mem_why ignored, *why = memory_why_clear(why_p, &ignored);
    region_box *box = NULL;
    int status = memory == NULL && length != 0 ? KVX_E_INVALID : KVX_OK;
    if (status != KVX_OK || (status = memory_pin(core, region, offset, length, write != 0, &box)) != KVX_OK) {
        return status;
    }
    bool closing = false;
    for (uint64_t at = 0; status == KVX_OK && !closing && at < length;) {
        uint64_t step = length - at < core->config.chunk_bytes ? length - at : core->config.chunk_bytes;
        kvx_place ours = kvx_place_of(&box->region, offset + at);
        kvx_place theirs = kvx_place_host((uint8_t *)memory + at);
        status = kvx_move(write ? ours : theirs, write ? theirs : ours, step, core->config.nt_bytes_min, &why->raw);
        at += step;
        kvx_lock(core);
        closing = core->closing && at < length;
        kvx_unlock(core);
    }
    kvx_lock(core);
    box->pins--;
    kvx_unlock(core);
    return status == KVX_OK && closing ? KVX_E_CLOSED : status;
}

/* -- release ------------------------------------------------------------------------------------------------ */

static void memory_free_job_run(kvx_job *job) {
    region_box *box = (region_box *)((char *)job - offsetof(region_box, job));
    kvx_core *core = box->core;
    for (uint32_t i = 0; i < core->slot_count; i++) {
        core->slots[i].ops.mem_release(core->slots[i].transport, &box->region, NULL);
    }
    kvx_event event = {.kind = KVX_EV_RELEASE, .token = box->token, .id = box->region.id, .segment = -1};
    kvx_lock(core);
    bool viewed = box->viewed;
    kvx_unlock(core);
    bool haunted = viewed && box->carved;
    if (haunted) { /* while the id is still known: whoever finds it gone may reuse the addresses */
        kvx_arena_haunt(box->arena, box->region.base);
    } else if (viewed) {
        memory_mapping_drop(box->region.base, box->mapped_length, true);
    }
    kvx_lock(core);
    viewed = box->viewed;
    memory_remove_locked(core, box);
    kvx_unlock(core);
    if (viewed) {
        memory_box_free(box);
    } else if (haunted) { /* the last view went in between */
        kvx_mem_unview((uint64_t)(uintptr_t)box->region.base);
        memory_box_free(box);
    } else {
        memory_free_memory(box); /* before the event: whoever waits for it may count on the memory being free */
    }
    kvx_lock(core);
    bool signal = kvx_ring_push(&core->ring, &event);
    kvx_unlock_signal(core, signal);
}

void kvx_region_maybe_forget(region_box *box) {
    if (box->state == REGION_RELEASING && box->grants == NULL && !box->core->closing) {
        box->job.run = memory_free_job_run;
        kvx_core_job_post(box->core, &box->job);
    }
}

int kvx_mem_release(kvx_engine *engine, uint64_t region, uint64_t *token_p) {
    kvx_core *core = &engine->core;
    bool signal = false;
    kvx_lock(core);
    region_box *box = kvx_region_find(core, region);
    int status = core->closing ? KVX_E_CLOSED : box == NULL ? KVX_E_NO_REGION : KVX_OK;
    if (status == KVX_OK && box->references > 1) {
        box->references--;
        *token_p = core->next_id++;
        kvx_event event = {.kind = KVX_EV_RELEASE, .token = *token_p, .id = region, .segment = -1};
        signal = kvx_ring_push(&core->ring, &event);
    } else if (status == KVX_OK && box->pins != 0) {
        status = KVX_E_BUSY;
    } else if (status == KVX_OK) {
        box->state = REGION_RELEASING;
        box->references = 0;
        *token_p = box->token = core->next_id++;
        for (grant_box *grant = box->grants; grant != NULL; grant = grant->next) {
            kvx_grant_mark_revoked(core, grant);
        }
        kvx_region_maybe_forget(box);
    }
    kvx_unlock_signal(core, signal);
    kvx_grants_call_slots(core);
    return status;
}

void kvx_memory_sweep(kvx_core *core) {
    region_box *box;
    while ((box = kvx_table_any(&core->regions)) != NULL) {
        kvx_table_remove(&core->regions, box->region.id);
        memory_free_memory(box);
    }
    kvx_arenas_close(core);
}

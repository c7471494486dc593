/* device_memory.h: memory of accelerators. Arenas, what is carved from them, and copies that may touch a device.
 *
 * A vendor library takes few and large registrations, so regions of a device are parts of arenas: blocks of device
 * memory (or of pinned host memory) that are allocated and registered once. Memory that the application owns is an
 * arena of its own, with one region in it. An arena is given back to the driver when nothing in it is taken any more.
 *
 * One lock guards all arenas of the process; it is held during calls into the driver, which are rare. Never call these
 * functions with a core's lock held. */
#ifndef KVX_DEVICE_MEMORY_H
#define KVX_DEVICE_MEMORY_H

#include "transport.h"

typedef struct kvx_arena kvx_arena;

/* Take memory for `args` (KVX_MEM_HBM or KVX_MEM_PINNED) and describe it in `region_p` (base, length, kind, device,
 * flags, arena_*). On failure `why` holds the numbers and, where there is more to say, a sentence. */
int kvx_arena_alloc(kvx_core *core, const kvx_alloc_args *args, kvx_region *region_p, kvx_arena **arena_p,
                    kvx_mem_why *why);
/* The same for memory that the application owns: check what it is and make it an arena. */
int kvx_arena_adopt(kvx_core *core, const kvx_register_args *args, kvx_region *region_p, kvx_arena **arena_p,
                    kvx_mem_why *why);
/* What begins at `base` is free again; an arena that is empty then goes back to the driver. */
void kvx_arena_give(kvx_arena *arena, uint8_t *base);
/* The region is gone, but Python still looks at these bytes: they stay taken until kvx_mem_unview. */
void kvx_arena_haunt(kvx_arena *arena, uint8_t *base);
/* A library does not let go of its registration, or a process may have it mapped: keep the arena when it is empty, for
 * the next allocations. False: memory of the application is not ours to keep. */
bool kvx_arena_keep(kvx_core *core, uint64_t id);
/* Something may still move in it, and the process has no way to stop that: never give it back. */
void kvx_arena_abandon(kvx_core *core, uint64_t id);
/* The engine ends: arenas that are still looked at live on without it, all others are empty by now. */
void kvx_arenas_close(kvx_core *core);

/* -- copies ---------------------------------------------------------------------------------------------------- */

/* Bytes, and who can touch them. */
typedef struct kvx_place {
    uint8_t *address;
    int32_t device; /* of memory that the CPU cannot touch; -1: the CPU can */
} kvx_place;

static inline kvx_place kvx_place_of(const kvx_region *region, uint64_t offset) {
    return (kvx_place){region->base + offset, region->flags & KVX_REGION_DEVICE ? region->device : -1};
}

static inline kvx_place kvx_place_at(kvx_place place, uint64_t offset) {
    place.address += offset;
    return place;
}

static inline kvx_place kvx_place_host(void *memory) {
    return (kvx_place){memory, -1};
}

static inline bool kvx_place_on_device(kvx_place place) {
    return place.device >= 0;
}

/* Copies between any two places, blocking; the two may overlap when the CPU reaches both. KVX_OK, or what the driver
 * said (raw_p may be NULL). Not on the event loop's thread when a device is involved. */
int kvx_move(kvx_place target, kvx_place source, uint64_t length, uint64_t nt_bytes_min, uint32_t *raw_p);
/* A checksum of bytes anywhere; those of a device are read back through a small buffer. */
int kvx_place_crc32c(kvx_place place, uint64_t length, uint32_t *crc_p);
/* Test seam: change one byte wherever it is. */
int kvx_place_flip(kvx_place place);

#endif

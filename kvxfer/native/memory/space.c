/* space.c: the allocator inside an arena; see space.h. An ordered list of extents covers the arena without gaps, free
 * and taken ones; no two free ones are neighbours. */
#include "memory/space.h"

#include <stdlib.h>

typedef struct extent {
    uint64_t offset, length;
    bool taken;
    struct extent *previous, *next;
} extent;

struct kvx_space {
    extent *first;
    uint64_t taken;
};

static extent *space_extent_make(uint64_t offset, uint64_t length, extent *previous, extent *next) {
    extent *made = malloc(sizeof(*made));
    if (made != NULL) {
        *made = (extent){.offset = offset, .length = length, .previous = previous, .next = next};
    }
    return made;
}

kvx_space *kvx_space_open(uint64_t length) {
    kvx_space *space = calloc(1, sizeof(*space));
    uint64_t usable = length - length % KVX_SPACE_GRAIN;
    if (space == NULL || usable == 0 || (space->first = space_extent_make(0, usable, NULL, NULL)) == NULL) {
        free(space);
        return NULL;
    }
    return space;
}

void kvx_space_close(kvx_space *space) {
    while (space != NULL && space->first != NULL) {
        extent *next = space->first->next;
        free(space->first);
        space->first = next;
    }
    free(space);
}

bool kvx_space_empty(const kvx_space *space) {
    return space->taken == 0;
}

/* Cuts the first `length` bytes off; the rest becomes an extent of its own behind it, free like it was. */
static bool space_split(extent *at, uint64_t length) {
    extent *rest = space_extent_make(at->offset + length, at->length - length, at, at->next);
    if (rest == NULL) {
        return false;
    }
    if (at->next != NULL) {
        at->next->previous = rest;
    }
    at->next = rest;
    at->length = length;
    return true;
}

/* Both are free: the second becomes part of the first. */
static void space_merge(extent *at, extent *gone) {
    at->length += gone->length;
    at->next = gone->next;
    if (gone->next != NULL) {
        gone->next->previous = at;
    }
    free(gone);
}

static extent *space_coalesce(extent *at) {
    if (at->next != NULL && !at->next->taken) {
        space_merge(at, at->next);
    }
    if (at->previous != NULL && !at->previous->taken) {
        at = at->previous;
        space_merge(at, at->next);
    }
    return at;
}

int kvx_space_take(kvx_space *space, uint64_t length, uint64_t alignment, uint64_t *offset_p) {
    if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
        return KVX_E_INVALID;
    }
    if (length == 0 || length > UINT64_MAX - KVX_SPACE_GRAIN) {
        return KVX_E_LENGTH;
    }
    length = (length + KVX_SPACE_GRAIN - 1) / KVX_SPACE_GRAIN * KVX_SPACE_GRAIN;
    alignment = alignment < KVX_SPACE_GRAIN ? KVX_SPACE_GRAIN : alignment;
    for (extent *at = space->first; at != NULL; at = at->next) {
        uint64_t skip = (alignment - (at->offset & (alignment - 1))) & (alignment - 1);
        if (at->taken || skip > at->length || at->length - skip < length) {
            continue;
        }
        if (skip != 0) {
            if (!space_split(at, skip)) {
                return KVX_E_NOMEM;
            }
            at = at->next;
        }
        if (at->length > length && !space_split(at, length)) {
            space_coalesce(at);
            return KVX_E_NOMEM;
        }
        at->taken = true;
        space->taken += length;
        *offset_p = at->offset;
        return KVX_OK;
    }
    return KVX_E_DEVICE_MEMORY;
}

int kvx_space_give(kvx_space *space, uint64_t offset) {
    extent *at = space->first;
    while (at != NULL && at->offset < offset) {
        at = at->next;
    }
    if (at == NULL || at->offset != offset || !at->taken) {
        return KVX_E_INVALID;
    }
    at->taken = false;
    space->taken -= at->length;
    space_coalesce(at);
    return KVX_OK;
}

void kvx_space_query(const kvx_space *space, uint64_t *taken_p, uint64_t *largest_p, uint32_t *extents_p) {
    *taken_p = space->taken;
    *largest_p = 0;
    *extents_p = 0;
    for (const extent *at = space->first; at != NULL; at = at->next) {
        ++*extents_p;
        if (!at->taken && at->length > *largest_p) {
            *largest_p = at->length;
        }
    }
}

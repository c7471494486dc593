/* blocks.c: see blocks.h. */
#include "core/blocks.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

struct kvx_blocks {
    uint32_t part_count, block_count;
    const uint64_t *ids; /* ascending; behind the parts */
    kvx_part parts[];
};

static bool blocks_are_ascending(const uint64_t *blocks, uint32_t count) {
    for (uint32_t i = 1; i < count; i++) {
        if (blocks[i - 1] >= blocks[i]) {
            return false;
        }
    }
    return true;
}

static int blocks_part_check(const kvx_part *part, uint64_t last, uint64_t length) {
    uint64_t begin, end;
    if (part->length == 0) {
        return KVX_E_INVALID;
    }
    bool over = __builtin_mul_overflow(last, part->stride, &begin) ||
                __builtin_add_overflow(begin, part->base, &begin) || __builtin_add_overflow(begin, part->length, &end);
    return over || end > length ? KVX_E_LOCAL_RANGE : KVX_OK;
}

int kvx_blocks_new(const kvx_part *parts, uint32_t part_count, const uint64_t *blocks, uint32_t block_count,
                   uint64_t length, kvx_blocks **made_p) {
    if (part_count > KVX_PARTS_MAX || !blocks_are_ascending(blocks, block_count)) {
        return KVX_E_INVALID;
    }
    for (uint32_t i = 0; i < part_count; i++) {
        int status = blocks_part_check(&parts[i], block_count == 0 ? 0 : blocks[block_count - 1], length);
        if (status != KVX_OK) {
            return status;
        }
    }
    size_t parts_size = part_count * sizeof *parts, ids_size = block_count * sizeof *blocks;
    kvx_blocks *made = malloc(sizeof *made + parts_size + ids_size);
    if (made == NULL) {
        return KVX_E_NOMEM;
    }
    made->part_count = part_count;
    made->block_count = block_count;
    uint64_t *ids = (uint64_t *)&made->parts[part_count];
    if (parts_size != 0) {
        memcpy(made->parts, parts, parts_size);
    }
    if (ids_size != 0) {
        memcpy(ids, blocks, ids_size);
    }
    made->ids = ids;
    *made_p = made;
    return KVX_OK;
}

void kvx_blocks_free(kvx_blocks *blocks) {
    free(blocks);
}

/* Is it one of the blocks? Looks where the last one was, then behind it, then everywhere. */
static bool blocks_find(const kvx_blocks *blocks, kvx_blocks_cursor *cursor, uint64_t id) {
    uint32_t near = cursor->block, low = 0, high = blocks->block_count;
    if (high == 0 || id > blocks->ids[high - 1]) {
        return false;
    }
    if (blocks->ids[near] == id) {
        return true;
    }
    if (near + 1 < high && blocks->ids[near + 1] == id) {
        cursor->block = near + 1;
        return true;
    }
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (blocks->ids[middle] < id) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    cursor->block = low; /* there is one that is not smaller */
    return blocks->ids[low] == id;
}

/* How many bytes from `offset` on are of one piece of that part; 0 = it is in none. */
static uint64_t blocks_covered_by(const kvx_blocks *blocks, kvx_blocks_cursor *cursor, const kvx_part *part,
                                  uint64_t offset) {
    if (offset < part->base) {
        return 0;
    }
    uint64_t inside = offset - part->base;
    if (part->stride == 0) { /* one piece, whatever the blocks */
        return inside < part->length ? part->length - inside : 0;
    }
    uint64_t block = inside / part->stride;
    inside -= block * part->stride;
    return inside < part->length && blocks_find(blocks, cursor, block) ? part->length - inside : 0;
}

static uint64_t blocks_covered_at(const kvx_blocks *blocks, kvx_blocks_cursor *cursor, uint64_t offset) {
    uint32_t part = cursor->part;
    for (uint32_t i = 0; i < blocks->part_count; i++) {
        uint64_t bytes = blocks_covered_by(blocks, cursor, &blocks->parts[part], offset);
        if (bytes != 0) {
            cursor->part = part;
            return bytes;
        }
        part = part + 1 == blocks->part_count ? 0 : part + 1;
    }
    return 0;
}

int kvx_blocks_cover(const kvx_blocks *blocks, kvx_blocks_cursor *cursor, uint64_t offset, uint64_t length) {
    while (length != 0) {
        uint64_t bytes = blocks_covered_at(blocks, cursor, offset);
        if (bytes == 0) {
            return 0;
        }
        bytes = bytes < length ? bytes : length;
        offset += bytes;
        length -= bytes;
    }
    return 1;
}

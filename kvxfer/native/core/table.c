/* table.c: see table.h. */
#include "core/table.h"

#include <stdlib.h>

#include "transport.h"

static uint32_t table_home_slot(const kvx_table *table, uint64_t key) {
    return (uint32_t)((key * UINT64_C(0x9e3779b97f4a7c15)) >> 32) & (table->capacity - 1);
}

static void table_insert(kvx_table *table, uint64_t key, void *value) {
    uint32_t at = table_home_slot(table, key);
    while (table->keys[at] != 0) {
        KVX_ASSERT(table->keys[at] != key);
        at = (at + 1) & (table->capacity - 1);
    }
    table->keys[at] = key;
    table->values[at] = value;
}

bool kvx_table_reserve(kvx_table *table, uint32_t extra) {
    uint64_t needed = (uint64_t)table->count + extra;
    if (needed * 4 <= (uint64_t)table->capacity * 3) {
        return true;
    }
    uint32_t capacity = table->capacity ? table->capacity : 16;
    while (needed * 4 > (uint64_t)capacity * 3) {
        if (capacity >= (UINT32_C(1) << 30)) {
            return false;
        }
        capacity *= 2;
    }
    kvx_table grown = {.keys = calloc(capacity, sizeof(uint64_t)), .values = calloc(capacity, sizeof(void *))};
    if (grown.keys == NULL || grown.values == NULL) {
        kvx_table_free(&grown);
        return false;
    }
    grown.capacity = capacity;
    grown.count = table->count;
    for (uint32_t i = 0; i < table->capacity; i++) {
        if (table->keys[i] != 0) {
            table_insert(&grown, table->keys[i], table->values[i]);
        }
    }
    kvx_table_free(table);
    *table = grown;
    return true;
}

void kvx_table_put(kvx_table *table, uint64_t key, void *value) {
    KVX_ASSERT(key != 0 && (uint64_t)(table->count + 1) * 4 <= (uint64_t)table->capacity * 3);
    table_insert(table, key, value);
    table->count++;
}

static int64_t table_find(const kvx_table *table, uint64_t key) {
    if (table->capacity == 0 || key == 0) {
        return -1;
    }
    uint32_t at = table_home_slot(table, key);
    while (table->keys[at] != 0) {
        if (table->keys[at] == key) {
            return at;
        }
        at = (at + 1) & (table->capacity - 1);
    }
    return -1;
}

void *kvx_table_get(const kvx_table *table, uint64_t key) {
    int64_t at = table_find(table, key);
    return at < 0 ? NULL : table->values[at];
}

void *kvx_table_remove(kvx_table *table, uint64_t key) {
    int64_t found = table_find(table, key);
    if (found < 0) {
        return NULL;
    }
    uint32_t mask = table->capacity - 1;
    uint32_t hole = (uint32_t)found;
    void *value = table->values[hole];
    for (uint32_t at = (hole + 1) & mask; table->keys[at] != 0; at = (at + 1) & mask) {
        uint32_t wanted = table_home_slot(table, table->keys[at]);
        /* Move the follower into the hole unless its home lies cyclically in (hole, at]. */
        if (((at - wanted) & mask) >= ((at - hole) & mask)) {
            table->keys[hole] = table->keys[at];
            table->values[hole] = table->values[at];
            hole = at;
        }
    }
    table->keys[hole] = 0;
    table->values[hole] = NULL;
    table->count--;
    return value;
}

void *kvx_table_any(const kvx_table *table) {
    for (uint32_t i = 0; i < table->capacity && table->count != 0; i++) {
        if (table->keys[i] != 0) {
            return table->values[i];
        }
    }
    return NULL;
}

void kvx_table_free(kvx_table *table) {
    free(table->keys);
    free(table->values);
    *table = (kvx_table){0};
}

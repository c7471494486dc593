/* table.h: a hash table from non-zero 64-bit ids to pointers. Open addressing with linear probing; removal shifts the
 * followers back, so there are no tombstones and a lookup of an id that is gone ends at the first hole. Not
 * thread-safe. */
#ifndef KVX_TABLE_H
#define KVX_TABLE_H

#include <stdbool.h>
#include <stdint.h>

typedef struct kvx_table {
    uint64_t *keys; /* 0 = empty */
    void **values;
    uint32_t capacity; /* a power of two */
    uint32_t count;
} kvx_table;

bool kvx_table_reserve(kvx_table *table, uint32_t extra);        /* room for `extra` more puts; false = out of memory */
void kvx_table_put(kvx_table *table, uint64_t key, void *value); /* the key is new and room was reserved */
void *kvx_table_get(const kvx_table *table, uint64_t key);
void *kvx_table_remove(kvx_table *table, uint64_t key); /* the value, NULL when there was none */
void *kvx_table_any(const kvx_table *table);            /* some value, NULL when empty */
void kvx_table_free(kvx_table *table);

#endif

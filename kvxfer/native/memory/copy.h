/* copy.h: memory copies. Cached below nt_bytes_min, non-temporal stores from there on (they skip the read-for-ownership
 * of the target and leave the caches to the model); chosen once per process by what the CPU offers. */
#ifndef KVX_COPY_H
#define KVX_COPY_H

#include "api.h"

typedef struct kvx_piece {
    uint8_t *to;
    const uint8_t *from;
    uint64_t length;
} kvx_piece;

/* Copies all of them, in no particular order, several side by side; each from nt_bytes_min on with non-temporal stores.
 * kvx_copy and kvx_crc32c are declared in api.cdef.h. */
void kvx_copy_pieces(const kvx_piece *pieces, uint32_t count, uint64_t nt_bytes_min);
/* Copies through the caches and gives the checksum of the source, in one pass where the CPU can. */
uint32_t kvx_copy_crc32c(uint32_t seed, void *target, const void *source, uint64_t length);

#endif

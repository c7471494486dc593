/* copy.h: memory copies. Cached below nt_bytes_min, non-temporal stores from there on (they skip the read-for-ownership
 * of the target and leave the caches to the model); chosen once per process by what the CPU offers. */
#ifndef KVX_COPY_H
#define KVX_COPY_H

#include "api.h"

void kvx_copy_nt(void *target, const void *source, uint64_t length);
/* kvx_copy and kvx_crc32c are declared in api.cdef.h */

#endif

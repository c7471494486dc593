/* space.h: who has which bytes of an arena. First fit from the low end, neighbours that are free become one.
 *
 * It knows offsets only and never touches the memory, so it serves device memory, and tests can drive it alone. What is
 * taken begins at a multiple of its alignment and is rounded up to KVX_SPACE_GRAIN. Not thread-safe. The functions that
 * tests call stand in api.cdef.h. */
#ifndef KVX_SPACE_H
#define KVX_SPACE_H

#include <stdbool.h>

#include "api.h"

bool kvx_space_empty(const kvx_space *space);

#endif

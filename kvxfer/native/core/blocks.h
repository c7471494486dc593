/* blocks.h: which bytes of a grant may be reached, when that is not all of them: some blocks of a paged cache.
 *
 * A cache has a part (api.cdef.h) for each layer, or for the keys and the values of each. What is covered is the pieces
 * of the given blocks in every part; a range that touches piece after piece is covered, too. Pure: no lock, no I/O. The
 * functions are in api.cdef.h for the sake of their tests. */
#ifndef KVX_BLOCKS_H
#define KVX_BLOCKS_H

#include "api.h"

#endif

/* api.h: the C view of api.cdef.h (cffi reads that file raw, so it cannot hold #include or guards). */
#ifndef KVX_API_H
#define KVX_API_H

#include <stddef.h>
#include <stdint.h>

#include "api.cdef.h"
#include "status.h"

#endif

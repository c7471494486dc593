/* ascend.h: Huawei's CANN as this process finds it: ACL for device memory and copies, HIXL for one-sided transfers.
 *
 * No CANN header is included and no vendor symbol is linked: ascend_load.c finds the libraries at run time,
 * ascend_acl.c resolves ACL's C functions by dlsym, ascend_hixl.cc HIXL's C++ members by their mangled names. What
 * comes out is this one table of C functions, so the transport, the memory code and the tests know nothing of vendor
 * types.
 *
 * Every function returns one of our statuses (KVX_OK, KVX_E_*, KVX_PENDING where said) and, when raw_p is not NULL,
 * stores there what the library answered: the set of vendor statuses is open, and people search the web for the number.
 * No function throws, none is called on the event loop, and none of them copies a vendor pointer out of its object.
 *
 * Threads: unless said otherwise any thread may call; ACL's idea of "the current device" is per thread, so functions
 * that take `device` set it first (cheap, cached per thread). HIXL swaps its own context in on each call. */
#ifndef KVX_ASCEND_H
#define KVX_ASCEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "ascend.cdef.h"

#ifdef __cplusplus
}
#endif
#endif

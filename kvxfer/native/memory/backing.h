/* backing.h: memory of this host that can be shared: where the bytes of an allocated region are. */
#ifndef KVX_BACKING_H
#define KVX_BACKING_H

#include <stdbool.h>
#include <stdint.h>

#define KVX_BACKING_HUGE_BYTES (UINT64_C(2) << 20)

typedef struct kvx_backing_wish {
    uint64_t length;
    uint64_t alignment; /* a power of two */
    int32_t numa_node;  /* -1: any */
    bool huge;          /* on hugepages, if it is long enough and there are free ones */
} kvx_backing_wish;

typedef struct kvx_backing {
    void *base;
    uint64_t mapped_length;
    int memfd;
    uint32_t flags; /* KVX_REGION_... */
    int32_t numa_node;
} kvx_backing;

/* KVX_OK, KVX_E_SHM_SPACE, KVX_E_NOMEM, KVX_E_FDS, KVX_E_LENGTH or KVX_E_SYSTEM, then with an errno. May take long. */
int kvx_backing_make(const kvx_backing_wish *wish, kvx_backing *made_p, int *errno_p);

#endif

/* numa.c: memory policy by system call; libnuma is not needed for three of them. */
#define _GNU_SOURCE
#include "memory/numa.h"

#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MODE_PREFERRED 1
#define MODE_BIND      2
#define WORD_BITS      (8 * sizeof(unsigned long))
#define MASK_WORDS     (KVX_NUMA_NODES_MAX / WORD_BITS)

static bool numa_mask_set(unsigned long *mask, int32_t node) {
    if (node < 0 || node >= KVX_NUMA_NODES_MAX) {
        return false;
    }
    memset(mask, 0, MASK_WORDS * sizeof(*mask));
    mask[(unsigned long)node / WORD_BITS] = 1ul << ((unsigned long)node % WORD_BITS);
    return true;
}

bool kvx_numa_bind(void *base, uint64_t length, int32_t node) {
    unsigned long mask[MASK_WORDS];
    return numa_mask_set(mask, node) && syscall(SYS_mbind, base, length, MODE_BIND, mask, KVX_NUMA_NODES_MAX, 0) == 0;
}

bool kvx_numa_prefer(int32_t node, kvx_numa_policy *before_p) {
    unsigned long mask[MASK_WORDS];
    before_p->changed = numa_mask_set(mask, node) &&
                        syscall(SYS_get_mempolicy, &before_p->mode, before_p->mask, KVX_NUMA_NODES_MAX, NULL, 0) == 0 &&
                        syscall(SYS_set_mempolicy, MODE_PREFERRED, mask, KVX_NUMA_NODES_MAX) == 0;
    return before_p->changed;
}

void kvx_numa_restore(const kvx_numa_policy *before) {
    if (before->changed) {
        syscall(SYS_set_mempolicy, before->mode, before->mask, KVX_NUMA_NODES_MAX);
    }
}

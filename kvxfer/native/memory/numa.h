/* numa.h: where host memory lies among the sockets of a machine. All of it is best effort: containers often lack the
 * right, and then the memory is merely slower. */
#ifndef KVX_NUMA_H
#define KVX_NUMA_H

#include <stdbool.h>
#include <stdint.h>

#define KVX_NUMA_NODES_MAX 1024

typedef struct kvx_numa_policy {
    int mode;
    unsigned long mask[KVX_NUMA_NODES_MAX / (8 * sizeof(unsigned long))];
    bool changed;
} kvx_numa_policy;

/* Pages of a mapping that do not exist yet will lie on `node`. False: not applied. */
bool kvx_numa_bind(void *base, uint64_t length, int32_t node);
/* Whatever this thread allocates from now on lies on `node` if it can. False: not applied. `kvx_numa_restore` puts back
 * what was before. */
bool kvx_numa_prefer(int32_t node, kvx_numa_policy *before_p);
void kvx_numa_restore(const kvx_numa_policy *before);

#endif

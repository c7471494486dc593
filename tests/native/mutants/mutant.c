/* mutant.c: see mutant.h. */
#include "mutant.h"

#include <stdlib.h>
#include <string.h>

bool kvx_mutant(const char *name) {
    static _Atomic(const char *) chosen;
    const char *mutation = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (mutation == NULL) {
        mutation = getenv("KVXFER_TEST_MUTATION");
        mutation = mutation == NULL ? "" : mutation;
        atomic_store_explicit(&chosen, mutation, memory_order_relaxed);
    }
    return strcmp(mutation, name) == 0;
}

static bool swallow(kvx_op *op, int status, uint64_t bytes, int sys_errno, int segment) {
    (void)op, (void)status, (void)bytes, (void)sys_errno, (void)segment;
    return true;
}

kvx_op *kvx_mutant_ghost(const kvx_op *op) {
    kvx_op *ghost = malloc(sizeof *ghost);
    kvx_segment *segments = malloc((op->count + 1) * sizeof *segments);
    KVX_ASSERT(ghost != NULL && segments != NULL);
    memcpy(ghost, op, sizeof *ghost);
    memcpy(segments, op->segments, op->count * sizeof *segments);
    ghost->segments = segments;
    ghost->flags &= ~(uint32_t)KVX_OP_NOTIFY;
    ghost->seam = swallow;
    atomic_store(&ghost->cancelled, false);
    return ghost;
}

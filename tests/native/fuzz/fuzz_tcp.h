/* fuzz_tcp.h: what tcp asks of the engine beside fuzz_core.h: there are no cards here. */
#ifndef KVX_FUZZ_TCP_H
#define KVX_FUZZ_TCP_H

#include "ascend/ascend.h"

int kvx_access_begin_any(kvx_core *core, uint64_t id, uint64_t generation, kvx_access *access) {
    return kvx_access_begin(core, id, generation, access);
}
const kvx_ascend_api *kvx_ascend_get(char *why, size_t why_size) {
    (void)why, (void)why_size;
    return NULL;
}
void kvx_arena_abandon(kvx_core *core, uint64_t id) {
    (void)core, (void)id;
    abort();
}

#endif

/* fuzz_shm.h: what shm asks of the engine beside fuzz_core.h: copies yield to nobody, and there are no cards here. */
#ifndef KVX_FUZZ_SHM_H
#define KVX_FUZZ_SHM_H

#include "shm/shm.h"

bool kvx_core_job_yields(kvx_core *core, uint32_t rank) {
    (void)core;
    return rank != 0;
}
void kvx_core_yield(kvx_core *core) {
    (void)core;
}
int kvx_move(kvx_place target, kvx_place source, uint64_t length, uint64_t nt_bytes_min, uint32_t *raw_p) {
    (void)target, (void)source, (void)length, (void)nt_bytes_min, (void)raw_p;
    abort();
}
int kvx_place_crc32c(kvx_place place, uint64_t length, uint32_t *crc_p) {
    (void)place, (void)length, (void)crc_p;
    abort();
}
int kvx_place_flip(kvx_place place) {
    (void)place;
    abort();
}

#endif

/* shm_map.c: imported memory, from the owner's descriptor to the last byte unmapped.
 *
 * A mapping is made at the import; its page tables are filled 2 MiB at a time by the first copy that comes along, since
 * filling them for all of a large cache would make the import take seconds. */
#define _GNU_SOURCE
#include "shm.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ  22
#define MADV_POPULATE_WRITE 23
#endif
#ifndef HUGETLBFS_MAGIC
#define HUGETLBFS_MAGIC 0x958458f6
#endif

/* -- users ------------------------------------------------------------------------------------------------------ */

bool kvx_shm_enter(shm_import *import) {
    if (atomic_fetch_add(&import->users, 1) & SHM_SHUT) {
        kvx_shm_leave(import);
        return false;
    }
    return true;
}

/* With the lock held. */
static void now_idle(shm_import *import) {
    if (!import->idle) {
        import->idle = true;
        kvx_shm_todo(import->peer);
    }
}

void kvx_shm_leave(shm_import *import) {
    shm_transport *shm = import->peer->shm;
    if (atomic_fetch_sub(&import->users, 1) == (SHM_SHUT | 1)) {
        pthread_mutex_lock(&shm->lock);
        now_idle(import);
        pthread_mutex_unlock(&shm->lock);
    }
}

void kvx_shm_shut(shm_import *import, int why) {
    if (atomic_load(&import->users) & SHM_SHUT) {
        return;
    }
    atomic_store(&import->why, why);
    if ((atomic_fetch_or(&import->users, SHM_SHUT) & ~SHM_SHUT) == 0) {
        now_idle(import);
    }
}

/* -- mapping ---------------------------------------------------------------------------------------------------- */

static uint64_t page_of(shm_transport *shm, int fd) {
    struct statfs about;
    if (fstatfs(fd, &about) == 0 && (unsigned long)about.f_type == HUGETLBFS_MAGIC) {
        return (uint64_t)about.f_bsize;
    }
    return shm->page;
}

/* A file that its owner can shrink would kill us with SIGBUS. */
static int trustworthy(int fd, uint64_t end) {
    struct stat about;
    int seals = fcntl(fd, F_GET_SEALS);
    return seals >= 0 && (seals & F_SEAL_SHRINK) && fstat(fd, &about) == 0 && S_ISREG(about.st_mode) &&
           about.st_size >= 0 && end <= (uint64_t)about.st_size;
}

int kvx_shm_map(shm_transport *shm, shm_import *import, int fd, uint64_t offset, int *errno_p) {
    uint64_t page = page_of(shm, fd), end;
    if (__builtin_add_overflow(offset, import->length, &end) || end > INT64_MAX - page || !trustworthy(fd, end)) {
        return KVX_E_NOT_KVXFER;
    }
    uint64_t begin = offset & ~(page - 1);
    uint64_t mapped = ((end + page - 1) & ~(page - 1)) - begin;
    bool write = (import->import->remote.access & KVX_WRITE) != 0;
    int protection = write ? PROT_READ | PROT_WRITE : PROT_READ;
    bool fill = mapped <= SHM_POPULATE_MAX;
    void *base = mmap(NULL, mapped, protection, MAP_SHARED | (fill ? MAP_POPULATE : 0), fd, (off_t)begin);
    if (base == MAP_FAILED) {
        *errno_p = errno;
        return errno == ENOMEM ? KVX_E_NOMEM : KVX_E_SYSTEM;
    }
    if (!fill) { /* without the bits it is only slower */
        import->filled = calloc((mapped + 64 * SHM_GRANULE - 1) / (64 * SHM_GRANULE), sizeof(*import->filled));
    }
    import->base = base;
    import->mapped = mapped;
    import->writable = write;
    import->remote = (uint8_t *)base + (offset - begin);
    import->import->mapping = import->remote;
    return KVX_OK;
}

void kvx_shm_fill(shm_import *import, uint64_t offset, uint64_t length) {
    if (import->filled == NULL) {
        return;
    }
    offset += (uint64_t)(import->remote - import->base);
    for (uint64_t granule = offset / SHM_GRANULE; granule <= (offset + length - 1) / SHM_GRANULE; granule++) {
        _Atomic uint64_t *word = &import->filled[granule / 64];
        uint64_t bit = UINT64_C(1) << (granule % 64);
        if (atomic_load_explicit(word, memory_order_relaxed) & bit) {
            continue;
        }
        atomic_fetch_or_explicit(word, bit, memory_order_relaxed);
        uint64_t begin = granule * SHM_GRANULE, left = import->mapped - begin;
        (void)madvise(import->base + begin, left < SHM_GRANULE ? left : SHM_GRANULE,
                      import->writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
    }
}

void kvx_shm_hide(shm_import *import) {
    if (import->import != NULL && import->import->mapping != NULL) {
        import->viewed = kvx_mapping_hide(import->import);
    }
}

void kvx_shm_unmap(shm_import *import) {
    if (import->base != NULL) {
        kvx_mapping_drop(import->base, import->mapped, import->viewed);
        import->base = NULL;
    }
}

/* -- cross-memory attach ------------------------------------------------------------------------------------------ */

/* Only a read that finds the owner's nonce shows that this process id, as we see it, is the owner, and that we may. */
int kvx_shm_probe(const shm_import *import, const shm_message *message, int *errno_p) {
    uint8_t found[KVX_NONCE_BYTES];
    struct iovec here = {.iov_base = found, .iov_len = sizeof(found)};
    struct iovec there = {.iov_base = (void *)(uintptr_t)message->imported.probe_address, .iov_len = sizeof(found)};
    if (import->peer->shm->config->flags & KVX_ENGINE_NO_CMA) {
        *errno_p = EPERM;
        return KVX_E_CMA_DENIED;
    }
    ssize_t got = process_vm_readv(import->peer->pid, &here, 1, &there, 1, 0);
    if (got != (ssize_t)sizeof(found)) {
        *errno_p = got < 0 ? errno : EFAULT;
        return KVX_E_CMA_DENIED;
    }
    if (memcmp(found, message->imported.probe, sizeof(found)) != 0) {
        *errno_p = ESRCH; /* somebody else has this number here */
        return KVX_E_CMA_DENIED;
    }
    return KVX_OK;
}

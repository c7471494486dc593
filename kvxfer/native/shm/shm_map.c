/* shm_map.c: memory of others in our address space.
 *
 * Each request brings a new grant, but most grants are of the same few regions. So what copies go through is mapped
 * once per region and kept: filling page tables anew costs several times what a scattered copy does. Page tables are
 * filled where the first copy comes along, as far as it goes; for all of a large cache at once the import would take
 * seconds. The beginning of a new mapping is filled beforehand by the copy pool, a turn at a time.
 *
 * What an application looks at is another mapping, one per import, which goes when the grant is taken back. */
#define _GNU_SOURCE
#include "shm/shm.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stddef.h>
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

/* -- the peer's list of maps; with the lock held --------------------------------------------------------------------
 */

static void shm_map_unlink(shm_map *map) {
    shm_peer *peer = map->peer;
    if (map->previous != NULL) {
        map->previous->next = map->next;
    } else {
        peer->maps = map->next;
    }
    if (map->next != NULL) {
        map->next->previous = map->previous;
    } else {
        peer->maps_last = map->previous;
    }
}

static void shm_map_to_front(shm_map *map) {
    shm_peer *peer = map->peer;
    map->previous = NULL;
    map->next = peer->maps;
    if (map->next != NULL) {
        map->next->previous = map;
    } else {
        peer->maps_last = map;
    }
    peer->maps = map;
}

static bool shm_map_contains(const shm_map *map, const shm_map *wanted) {
    return map->region == wanted->region && map->device == wanted->device && map->inode == wanted->inode &&
           !map->unwanted && (map->writable || !wanted->writable) && map->begin <= wanted->begin &&
           wanted->begin + wanted->length <= map->begin + map->length;
}

static void shm_map_attach(shm_map *map, shm_import *import, uint64_t at) {
    if (map->imports++ == 0) {
        map->peer->idle_maps--;
    }
    import->map = map;
    import->remote = map->base + (at - map->begin);
}

static bool shm_map_attach_one(shm_peer *peer, shm_import *import, const shm_map *wanted, uint64_t at) {
    for (shm_map *map = peer->maps; map != NULL; map = map->next) {
        if (shm_map_contains(map, wanted)) {
            shm_map_unlink(map);
            shm_map_to_front(map);
            shm_map_attach(map, import, at);
            return true;
        }
    }
    return false;
}

/* A new map takes the place of those that it covers; spans of one region would otherwise pile up. With the lock held.
 */
static void shm_map_replace_covered(shm_map *map) {
    for (shm_map *other = map->next; other != NULL; other = other->next) {
        if (shm_map_contains(map, other)) {
            other->unwanted = true;
        }
    }
    kvx_shm_todo(map->peer);
}

void kvx_shm_map_leave(shm_import *import) {
    shm_map *map = import->map;
    import->map = NULL;
    if (map != NULL && --map->imports == 0) {
        map->peer->idle_maps++;
    }
}

void kvx_shm_maps_forget(shm_peer *peer, uint64_t region) {
    for (shm_map *map = peer->maps; map != NULL; map = map->next) {
        map->unwanted |= region == 0 || map->region == region;
    }
}

shm_map *kvx_shm_map_unwanted(shm_peer *peer) {
    for (shm_map *map = peer->maps_last; map != NULL; map = map->previous) {
        if (map->imports == 0 && (map->unwanted || peer->idle_maps > SHM_IDLE_MAX)) {
            shm_map_unlink(map);
            peer->idle_maps--;
            return map;
        }
    }
    return NULL;
}

/* -- mapping --------------------------------------------------------------------------------------------------------
 */

static void shm_map_unmap_run(kvx_job *job) {
    shm_map *map = (shm_map *)((char *)job - offsetof(shm_map, job));
    munmap(map->base, map->length);
    free((void *)map->filled);
    free(map);
}

void kvx_shm_map_free(shm_map *map, bool by_job) {
    map->job.run = shm_map_unmap_run;
    if (by_job && map->length > SHM_UNMAP_MAX) {
        kvx_core_job_post(map->peer->shm->core, &map->job);
    } else {
        shm_map_unmap_run(&map->job);
    }
}

static uint64_t shm_map_page_of(const shm_transport *shm, int fd) {
    struct statfs about;
    if (fstatfs(fd, &about) == 0 && (unsigned long)about.f_type == HUGETLBFS_MAGIC) {
        return (uint64_t)about.f_bsize;
    }
    return shm->page;
}

/* A file that its owner can shrink would kill us with SIGBUS. */
static bool shm_map_file_is_sealed(int fd, uint64_t end, struct stat *about_p) {
    int seals = fcntl(fd, F_GET_SEALS);
    return seals >= 0 && (seals & F_SEAL_SHRINK) && fstat(fd, about_p) == 0 && S_ISREG(about_p->st_mode) &&
           about_p->st_size >= 0 && end <= (uint64_t)about_p->st_size;
}

static void *shm_map_file(const shm_map *map, int fd) {
    int protection = map->writable ? PROT_READ | PROT_WRITE : PROT_READ;
    return mmap(NULL, map->length, protection, MAP_SHARED, fd, (off_t)map->begin);
}

/* -- page tables ----------------------------------------------------------------------------------------------------
 */

static void shm_map_populate(const shm_map *map, uint64_t first, uint64_t last) {
    uint64_t begin = first * SHM_GRANULE, end = last * SHM_GRANULE;
    end = end < map->length ? end : map->length;
    if (begin < end) {
        (void)madvise(map->base + begin, end - begin, map->writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
    }
}

/* What another thread is just filling is left to page faults. */
static void shm_map_prefault(const shm_map *map, uint64_t offset, uint64_t length) {
    uint64_t granule = offset / SHM_GRANULE, end = (offset + length - 1) / SHM_GRANULE + 1, first = granule;
    for (; granule < end; granule++) {
        _Atomic uint64_t *word = &map->filled[granule / 64];
        uint64_t bit = UINT64_C(1) << (granule % 64);
        if ((atomic_load_explicit(word, memory_order_relaxed) & bit) ||
            (atomic_fetch_or_explicit(word, bit, memory_order_relaxed) & bit)) {
            shm_map_populate(map, first, granule);
            first = granule + 1;
        }
    }
    shm_map_populate(map, first, end);
}

void kvx_shm_fill(const shm_import *import, uint64_t offset, uint64_t length) {
    const shm_map *map = import->map;
    if (map != NULL && map->filled != NULL) {
        shm_map_prefault(map, offset + (uint64_t)(import->remote - map->base), length);
    }
}

/* A turn of a job in the copy pool; it queues up again behind whatever has come meanwhile. */
static void shm_map_prefault_run(kvx_job *job) {
    shm_map *map = (shm_map *)((char *)job - offsetof(shm_map, ahead));
    shm_peer *peer = map->peer;
    shm_transport *shm = peer->shm;
    uint64_t end = map->length < SHM_AHEAD_MAX ? map->length : SHM_AHEAD_MAX;
    uint64_t left = end - map->ahead_at, turn = left < SHM_AHEAD_TURN ? left : SHM_AHEAD_TURN;
    pthread_mutex_lock(&shm->lock);
    bool wanted = !map->unwanted && !peer->lost && !peer->closing;
    pthread_mutex_unlock(&shm->lock);
    if (wanted && turn != 0) {
        shm_map_prefault(map, map->ahead_at, turn);
        map->ahead_at += turn;
        kvx_core_job_post(shm->core, job);
        return;
    }
    pthread_mutex_lock(&shm->lock);
    if (--map->imports == 0) {
        peer->idle_maps++;
        kvx_shm_todo(peer); /* it may have been waited for */
    }
    pthread_mutex_unlock(&shm->lock);
}

/* With the lock held, by the thread that made the map. */
static void shm_map_prefault_begin(shm_map *map) {
    if (map->filled != NULL) {
        map->imports++;
        map->ahead.run = shm_map_prefault_run;
        kvx_core_job_post(map->peer->shm->core, &map->ahead);
    }
}

/* -- a map for an import
 * ------------------------------------------------------------------------------------------------
 */

/* A new map like `wanted`, unless one that is there will do. */
static int shm_map_find(shm_import *import, const shm_map *wanted, uint64_t at, int fd, int *errno_p) {
    shm_peer *peer = import->peer;
    shm_transport *shm = peer->shm;
    pthread_mutex_lock(&shm->lock);
    bool found = shm_map_attach_one(peer, import, wanted, at);
    pthread_mutex_unlock(&shm->lock);
    if (found) {
        return KVX_OK;
    }
    shm_map *map = malloc(sizeof(*map));
    if (map == NULL) {
        return KVX_E_NOMEM;
    }
    *map = *wanted;
    void *base = shm_map_file(map, fd);
    if (base == MAP_FAILED) {
        *errno_p = errno;
        free(map);
        return *errno_p == ENOMEM ? KVX_E_NOMEM : KVX_E_SYSTEM;
    }
    map->base = base; /* without the bits it is only slower */
    map->filled = calloc((map->length + 64 * SHM_GRANULE - 1) / (64 * SHM_GRANULE), sizeof(*map->filled));
    pthread_mutex_lock(&shm->lock);
    shm_map_to_front(map);
    peer->idle_maps++;
    shm_map_attach(map, import, at);
    shm_map_replace_covered(map);
    shm_map_prefault_begin(map);
    pthread_mutex_unlock(&shm->lock);
    return KVX_OK;
}

int kvx_shm_map(shm_import *import, const shm_message *message, int fd, int *errno_p) {
    shm_transport *shm = import->peer->shm;
    uint64_t page = shm_map_page_of(shm, fd), at = message->mapped.at, end;
    struct stat about;
    if (__builtin_add_overflow(at, import->length, &end) || end > INT64_MAX - page ||
        !shm_map_file_is_sealed(fd, end, &about)) {
        return KVX_E_NOT_KVXFER;
    }
    shm_map wanted = {
        .peer = import->peer,
        .region = message->mapped.region,
        .device = (uint64_t)about.st_dev,
        .inode = (uint64_t)about.st_ino,
        .begin = at & ~(page - 1),
        .writable = (import->import->remote.access & KVX_WRITE) != 0,
    };
    wanted.length = ((end + page - 1) & ~(page - 1)) - wanted.begin;
    int status = shm_map_find(import, &wanted, at, fd, errno_p);
    if (status != KVX_OK) {
        return status;
    }
    void *view = shm_map_file(&wanted, fd);
    if (view != MAP_FAILED) { /* without it there is nothing to adopt, but transfers work */
        import->view = view;
        import->view_length = wanted.length;
        import->view_id = import->import->id;
        import->import->mapping = import->view + (at - wanted.begin);
    }
    return KVX_OK;
}

void kvx_shm_hide(shm_import *import) {
    if (import->import != NULL && import->import->mapping != NULL) {
        kvx_mapping_hide(import->import);
    }
}

void kvx_shm_unview(shm_import *import) {
    if (import->view != NULL) {
        kvx_view_drop(import->peer->shm->core, import->view_id, import->view, import->view_length);
        import->view = NULL;
    }
}

/* -- cross-memory attach --------------------------------------------------------------------------------------------
 */

/* Only a read that finds the owner's nonce shows that this process id, as we see it, is the owner, and that we may. */
int kvx_shm_probe(const shm_import *import, const shm_message *message, int *errno_p) {
    uint8_t found[KVX_NONCE_BYTES];
    struct iovec here = {.iov_base = found, .iov_len = sizeof(found)};
    struct iovec there = {.iov_base = (void *)(uintptr_t)message->attached.probe_address, .iov_len = sizeof(found)};
    if (import->peer->shm->config->flags & KVX_ENGINE_NO_CMA) {
        *errno_p = EPERM;
        return KVX_E_CMA_DENIED;
    }
    ssize_t got = process_vm_readv(import->peer->pid, &here, 1, &there, 1, 0);
    if (got != (ssize_t)sizeof(found)) {
        *errno_p = got < 0 ? errno : EFAULT;
        return KVX_E_CMA_DENIED;
    }
    if (memcmp(found, message->attached.probe, sizeof(found)) != 0) {
        *errno_p = ESRCH; /* somebody else has this number here */
        return KVX_E_CMA_DENIED;
    }
    /* Not all memory can be reached this way: a driver's pages may be none of the kernel's. */
    uint8_t ends[2];
    struct iovec both = {.iov_base = ends, .iov_len = sizeof(ends)};
    struct iovec at[2] = {{.iov_base = import->remote, .iov_len = 1},
                          {.iov_base = import->remote + import->length - 1, .iov_len = 1}};
    got = process_vm_readv(import->peer->pid, &both, 1, at, 2, 0);
    if (got != (ssize_t)sizeof(ends)) {
        *errno_p = got < 0 ? errno : EFAULT;
        return KVX_E_CMA_DENIED;
    }
    return KVX_OK;
}

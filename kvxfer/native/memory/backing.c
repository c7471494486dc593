/* backing.c: memory of this host from memfds. On hugepages if there are free ones, bound to a NUMA node before its
 * pages exist, and with every page taken now: room that is missing is told here, never by a SIGBUS later. */
#define _GNU_SOURCE
#include "memory/backing.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "api.h"
#include "memory/numa.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008u
#endif
#ifndef MFD_HUGE_2MB
#define MFD_HUGE_2MB (21u << 26)
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#define HUGE_BYTES     KVX_BACKING_HUGE_BYTES
#define FALLOCATE_STEP (UINT64_C(256) << 20) /* an interrupted fallocate starts over: keep what is lost small */

static uint64_t backing_read_number(const char *path, uint64_t otherwise) {
    char text[32];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return otherwise;
    }
    ssize_t got = read(fd, text, sizeof(text) - 1);
    close(fd);
    if (got <= 0) {
        return otherwise;
    }
    text[got] = '\0';
    char *end;
    uint64_t value = strtoull(text, &end, 10);
    return end == text ? otherwise : value; /* "max" */
}

static uint64_t backing_memory_available(void) {
    char text[512];
    uint64_t available = UINT64_MAX;
    int fd = open("/proc/meminfo", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        ssize_t got = read(fd, text, sizeof(text) - 1);
        close(fd);
        text[got > 0 ? got : 0] = '\0';
        const char *line = strstr(text, "MemAvailable:");
        if (line != NULL) {
            available = strtoull(line + strlen("MemAvailable:"), NULL, 10) * 1024;
        }
    }
    /* The limit of a container; outside of one the root group has no such file. */
    uint64_t limit = backing_read_number("/sys/fs/cgroup/memory.max", UINT64_MAX);
    if (limit != UINT64_MAX) {
        uint64_t used = backing_read_number("/sys/fs/cgroup/memory.current", 0);
        uint64_t left = limit > used ? limit - used : 0;
        available = left < available ? left : available;
    }
    return available;
}

static int backing_memfd_open(uint32_t extra) {
    int fd = memfd_create("kvxfer", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL | extra);
    if (fd < 0 && errno == EINVAL) { /* kernels before 6.3 */
        fd = memfd_create("kvxfer", MFD_CLOEXEC | MFD_ALLOW_SEALING | extra);
    }
    return fd;
}

static int backing_reserve_file(int fd, uint64_t length) {
    for (uint64_t at = 0; at < length;) {
        uint64_t step = length - at < FALLOCATE_STEP ? length - at : FALLOCATE_STEP;
        if (fallocate(fd, 0, (off_t)at, (off_t)step) == 0) {
            at += step;
        } else if (errno != EINTR) {
            return errno;
        }
    }
    return 0;
}

static void backing_pages_touch(uint8_t *base, uint64_t length, uint64_t page) {
    if (madvise(base, length, MADV_POPULATE_WRITE) == 0) {
        return;
    }
    for (uint64_t at = 0; at < length; at += page) { /* kernels before 5.14 */
        *(volatile uint8_t *)(base + at) = 0;
    }
}

/* Maps the file at a multiple of `alignment`, a power of two. */
static void *backing_map_aligned(int fd, uint64_t length, uint64_t alignment) {
    if (alignment <= (uint64_t)sysconf(_SC_PAGESIZE)) {
        return mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    }
    uint8_t *room = mmap(NULL, length + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) {
        return MAP_FAILED;
    }
    uint64_t skip = (alignment - (uint64_t)(uintptr_t)room % alignment) % alignment;
    void *base = mmap(room + skip, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    if (base == MAP_FAILED) {
        int kept = errno;
        munmap(room, length + alignment);
        errno = kept;
        return MAP_FAILED;
    }
    if (skip != 0) {
        munmap(room, skip);
    }
    munmap(room + skip + length, alignment - skip);
    return base;
}

static int backing_try_make(const kvx_backing_wish *wish, bool huge, kvx_backing *made_p, int *errno_p) {
    uint64_t page = huge ? HUGE_BYTES : (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t rounded = (wish->length + page - 1) & ~(page - 1);
    int fd = backing_memfd_open(huge ? MFD_HUGETLB | MFD_HUGE_2MB : 0);
    if (fd < 0) {
        *errno_p = errno;
        return errno == EMFILE || errno == ENFILE ? KVX_E_FDS : errno == ENOMEM ? KVX_E_NOMEM : KVX_E_SYSTEM;
    }
    void *base = MAP_FAILED;
    bool bound = false;
    int status = KVX_E_SYSTEM;
    if (ftruncate(fd, (off_t)rounded) != 0) {
        *errno_p = errno;
        status = errno == EFBIG || errno == EINVAL ? KVX_E_LENGTH : KVX_E_SYSTEM;
    } else if ((base = backing_map_aligned(fd, rounded, huge ? 0 : wish->alignment)) == MAP_FAILED) {
        *errno_p = errno;
        status = errno == ENOMEM ? KVX_E_NOMEM : KVX_E_SYSTEM;
    } else {
        bound = kvx_numa_bind(base, rounded, wish->numa_node); /* before the pages exist */
        *errno_p = backing_reserve_file(fd, rounded);
        status = *errno_p == 0 ? KVX_OK : KVX_E_SHM_SPACE;
    }
    if (status == KVX_OK && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
        *errno_p = errno;
        status = KVX_E_SYSTEM;
    }
    if (status != KVX_OK) {
        if (base != MAP_FAILED) {
            munmap(base, rounded);
        }
        close(fd);
        return status;
    }
    backing_pages_touch(base, rounded, page);
    *made_p = (kvx_backing){
        .base = base,
        .mapped_length = rounded,
        .memfd = fd,
        .flags = KVX_REGION_SHARED | (huge ? KVX_REGION_HUGE : 0) |
                 (wish->numa_node >= 0 && !bound ? KVX_REGION_NUMA_DENIED : 0),
        .numa_node = bound ? wish->numa_node : -1,
    };
    return KVX_OK;
}

static int backing_check_limits(uint64_t length, int *errno_p) {
    struct rlimit file;
    /* Past this limit the kernel would send SIGXFSZ. */
    bool too_long = getrlimit(RLIMIT_FSIZE, &file) == 0 && file.rlim_cur != RLIM_INFINITY && length > file.rlim_cur;
    if (too_long || length > backing_memory_available()) {
        *errno_p = too_long ? EFBIG : ENOSPC;
        return KVX_E_SHM_SPACE;
    }
    return KVX_OK;
}

int kvx_backing_make(const kvx_backing_wish *wish, kvx_backing *made_p, int *errno_p) {
    if (wish->length >= HUGE_BYTES && wish->huge) {
        uint64_t free_pages = backing_read_number("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", 0);
        if (free_pages >= (wish->length + HUGE_BYTES - 1) / HUGE_BYTES &&
            backing_try_make(wish, true, made_p, errno_p) == KVX_OK) {
            return KVX_OK;
        }
    }
    int status = backing_check_limits(wish->length, errno_p);
    return status == KVX_OK ? backing_try_make(wish, false, made_p, errno_p) : status;
}

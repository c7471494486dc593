/* counters.c: where the counters live. With counters_path they are a shared file that the daemon reads at scrape time,
 * so counting costs a worker one relaxed add; the file goes away with the engine. */
#define _GNU_SOURCE
#include "core/core.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define COUNTERS_MAGIC   UINT64_C(0x4b565843544e5231)
#define COUNTERS_VERSION 5

int kvx_counters_open(kvx_core *core, char *why, size_t why_size) {
    const char *path = core->config.counters_path;
    int fd = -1;
    if (path[0] != '\0') {
        unlink(path); /* of a process that died with it */
        fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (fd < 0 || ftruncate(fd, sizeof(kvx_counters)) != 0) {
            snprintf(why, why_size, "cannot create the counters file %s: %s", path, strerror(errno));
            if (fd >= 0) {
                close(fd);
                unlink(path);
            }
            return KVX_E_SYSTEM;
        }
    }
    int flags = fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    void *memory = mmap(NULL, sizeof(kvx_counters), PROT_READ | PROT_WRITE, flags, fd, 0);
    if (fd >= 0) {
        close(fd);
    }
    if (memory == MAP_FAILED) {
        snprintf(why, why_size, "cannot map the counters: %s", strerror(errno));
        return KVX_E_NOMEM;
    }
    core->counters = memory;
    core->counters->version = COUNTERS_VERSION;
    core->counters->pid = (uint64_t)getpid();
    __atomic_store_n(&core->counters->magic, COUNTERS_MAGIC, __ATOMIC_RELEASE);
    return KVX_OK;
}

void kvx_counters_close(kvx_core *core) {
    if (core->counters != NULL) {
        munmap(core->counters, sizeof(kvx_counters));
        if (core->config.counters_path[0] != '\0') {
            unlink(core->config.counters_path);
        }
        core->counters = NULL;
    }
}

const kvx_counters *kvx_engine_counters(const kvx_engine *engine) {
    return engine->core.counters;
}

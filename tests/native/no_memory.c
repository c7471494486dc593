/* no_memory.c: stands before libc (LD_PRELOAD). While a thread has called no_memory(1), whatever the engine's library
 * asks of malloc, calloc and realloc in that thread is refused; everybody else gets what he wants. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *memory, size_t size);

static __thread int armed;
static __thread int refused;

__attribute__((visibility("default"))) int no_memory(int on) {
    int count = refused;
    armed = on;
    refused = 0;
    return count;
}

static int refuse(const void *caller) {
    Dl_info from;
    if (!armed) {
        return 0;
    }
    armed = 0; /* what dladdr needs is no concern of ours */
    int ours = dladdr(caller, &from) != 0 && from.dli_fname != NULL && strstr(from.dli_fname, "_shim") != NULL;
    armed = 1;
    refused += ours;
    return ours;
}

__attribute__((visibility("default"))) void *malloc(size_t size) {
    return refuse(__builtin_return_address(0)) ? NULL : __libc_malloc(size);
}

__attribute__((visibility("default"))) void *calloc(size_t count, size_t size) {
    return refuse(__builtin_return_address(0)) ? NULL : __libc_calloc(count, size);
}

__attribute__((visibility("default"))) void *realloc(void *memory, size_t size) {
    return refuse(__builtin_return_address(0)) ? NULL : __libc_realloc(memory, size);
}

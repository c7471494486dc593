/* libcrypto.c: finds the system's libcrypto. Newest soname first; a process that has one loaded already (Python's ssl
 * module does) shares it. What is there is judged by its symbols: an older 1.1 lacks some and is told so. It is never
 * unloaded: it has tables of its own that outlive any engine. */
#include "proto/libcrypto.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static const char *const names[] = {"libcrypto.so.3", "libcrypto.so.1.1"};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static kvx_libcrypto table;
static bool usable;
static char reason[512];

static void libcrypto_set_error(const char *name, const char *what) {
    size_t used = strlen(reason);
    snprintf(reason + used, sizeof reason - used, "%s%s: %s", used ? "; " : "", name, what);
}

/* The name of the first function that it lacks, or NULL. */
static const char *libcrypto_bind(void *library) {
#define TAKE(name, result, parameters)                                                                                 \
    if ((*(void **)(&table.name) = dlsym(library, #name)) == NULL) {                                                   \
        return #name;                                                                                                  \
    }
    KVX_LIBCRYPTO_FUNCTIONS(TAKE)
#undef TAKE
    return NULL;
}

static void libcrypto_load(void) {
    for (size_t i = 0; i < sizeof names / sizeof *names && !usable; i++) {
        void *library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
        if (library == NULL) {
            const char *error = dlerror();
            libcrypto_set_error(names[i], error ? error : "cannot be loaded");
            continue;
        }
        const char *missing = libcrypto_bind(library);
        if (missing == NULL) {
            usable = true;
        } else {
            libcrypto_set_error(names[i], missing);
            dlclose(library);
        }
    }
}

const kvx_libcrypto *kvx_libcrypto_get(char *why, size_t why_size) {
    pthread_once(&once, libcrypto_load);
    if (!usable && why != NULL) {
        snprintf(why, why_size, "the system's libcrypto (OpenSSL 3, or 1.1.1) is needed and cannot be used: %s",
                 reason);
    }
    return usable ? &table : NULL;
}

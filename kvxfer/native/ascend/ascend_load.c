/* ascend_load.c: find CANN's libraries, load them in their order, and say exactly why when that fails.
 *
 * One process has one ACL: what another user (torch_npu) has loaded is taken as it is, by its soname and without
 * loading anything. Otherwise one directory is chosen, and everything comes from it, because libraries of two toolkits
 * do not fit each other. The libraries stay for ever: they start threads that no dlclose survives.
 *
 * Order: ACL, then the library with the string class (libmetadef), then HIXL, all with RTLD_NOW and RTLD_LOCAL. HIXL
 * refers to some libraries weakly, so it loads without them and a later call jumps to address 0; therefore these must
 * be in the process before anything is called. What is there is judged by symbols, never by a version number. */
#define _GNU_SOURCE /* dlinfo, secure_getenv */
#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ascend/ascend_parts.h"

#define DIRECTORIES_MAX 6
#define WHY_BYTES       4096
#define SINCE_9_0       "HixlCSServerCreate" /* the C interface came with 9.0 */
#define MISSING_BYTES   2048

#ifdef __aarch64__
#define MACHINE "aarch64"
#else
#define MACHINE "x86_64"
#endif

#define WHAT_TO_DO                                                                                                     \
    "Start the process from a shell that has sourced the toolkit's set_env.sh (the libraries need its "                \
    "LD_LIBRARY_PATH, also for the driver's), or name their directory in KVXFER_CANN_LIBDIR; `kvxfer doctor` looks "   \
    "further."

static const char *const acl_names[] = {"libacl_rt.so", "libascendcl.so", NULL};
static const char *const meta_names[] = {"libmetadef.so", "libgraph_base.so", "libgraph.so", NULL};
static const char *const hixl_names[] = {"libcann_hixl.so", NULL};
/* HIXL's weak references end in these. */
static const char *const weak_names[] = {"libhcomm.so", "liberror_manager.so", NULL};

typedef struct search {
    char directories[DIRECTORIES_MAX][PATH_MAX];
    unsigned count;
    bool only; /* KVXFER_CANN_LIBDIR is set: no other place will do */
    kvx_ascend_text why;
} search;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static kvx_ascend_api table;
static bool usable;
static pid_t owner;
static char reason[WHY_BYTES];

static void ascend_load_copy_text(char *target, size_t size, const char *source) {
    if (size)
        snprintf(target, size, "%s", source);
}

static void ascend_load_add_directory(search *look, const char *base, const char *rest) {
    if (look->count == DIRECTORIES_MAX)
        return;
    char *entry = look->directories[look->count];
    if ((size_t)snprintf(entry, PATH_MAX, "%s%s", base, rest) < PATH_MAX)
        look->count++;
}

static void ascend_load_list_directories(search *look) {
    const char *named = secure_getenv("KVXFER_CANN_LIBDIR");
    const char *home = secure_getenv("ASCEND_HOME_PATH");
    if (named && *named) {
        look->only = true;
        ascend_load_add_directory(look, named, "");
        return;
    }
    if (home && *home) {
        ascend_load_add_directory(look, home, "/lib64");
        ascend_load_add_directory(look, home, "/" MACHINE "-linux/lib64");
    }
    ascend_load_add_directory(look, "/usr/local/Ascend/cann", "/lib64");
    ascend_load_add_directory(look, "/usr/local/Ascend/ascend-toolkit/latest", "/lib64");
}

static const char *ascend_load_path_of(void *library) {
    struct link_map *map = NULL;
    return dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map && map->l_name ? map->l_name : "";
}

/* Directory of a loaded library, "" when its path has none. */
static void ascend_load_directory_of(void *library, char *target) {
    ascend_load_copy_text(target, PATH_MAX, ascend_load_path_of(library));
    char *slash = strrchr(target, '/');
    *(slash ? slash : target) = 0;
}

static bool ascend_load_same_directory(const char *one, const char *other) {
    char *left = realpath(one, NULL), *right = realpath(other, NULL);
    bool same = left && right && strcmp(left, right) == 0;
    free(left);
    free(right);
    return same;
}

/* In the process already? With KVXFER_CANN_LIBDIR it must be from there: two ACLs in one process break each other. */
static void *ascend_load_take_loaded(search *look, const char *const *names, bool *refused_p) {
    for (; *names; names++) {
        void *library = dlopen(*names, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
        if (!library)
            continue;
        char directory[PATH_MAX];
        ascend_load_directory_of(library, directory);
        if (!look->only || ascend_load_same_directory(directory, look->directories[0]))
            return library;
        kvx_ascend_append(
            &look->why,
            "This process has loaded %s already, which is not in KVXFER_CANN_LIBDIR (%s): unset the variable, "
            "or start the process without the other user of the libraries. ",
            ascend_load_path_of(library), look->directories[0]);
        *refused_p = true;
        return NULL;
    }
    return NULL;
}

static void *ascend_load_from(search *look, const char *directory, const char *const *names) {
    for (; *names; names++) {
        char path[PATH_MAX];
        if ((size_t)snprintf(path, sizeof path, "%s/%s", directory, *names) >= sizeof path)
            continue;
        if (access(path, F_OK) != 0) {
            kvx_ascend_append(&look->why, "%s: not there. ", path);
            continue;
        }
        void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (library)
            return library;
        const char *error = dlerror();
        kvx_ascend_append(&look->why, "%s: %s. ", path, error ? error : "cannot be loaded");
    }
    return NULL;
}

static void *ascend_load_by_name(search *look, const char *const *names) {
    for (; *names; names++) {
        void *library = dlopen(*names, RTLD_NOW | RTLD_LOCAL);
        if (library)
            return library;
        const char *error = dlerror();
        kvx_ascend_append(&look->why, "%s. ", error ? error : *names);
    }
    return NULL;
}

static bool ascend_load_has_hixl(const char *directory) {
    char path[PATH_MAX];
    return (size_t)snprintf(path, sizeof path, "%s/%s", directory, hixl_names[0]) < sizeof path &&
           access(path, F_OK) == 0;
}

/* From now on this directory first (`alone`: no other but the loader's own search). */
static void ascend_load_prefer(search *look, const char *directory, bool alone) {
    if (look->only || !*directory)
        return;
    unsigned kept = alone ? 0 : look->count < DIRECTORIES_MAX ? look->count : DIRECTORIES_MAX - 1;
    for (unsigned index = kept; index > 0; index--)
        memmove(look->directories[index], look->directories[index - 1], PATH_MAX);
    ascend_load_copy_text(look->directories[0], PATH_MAX, directory);
    look->count = kept + 1;
}

/* ACL decides where everything comes from. */
static void *ascend_load_acl(search *look) {
    bool refused = false;
    char directory[PATH_MAX];
    void *library = ascend_load_take_loaded(look, acl_names, &refused);
    if (library) {
        ascend_load_directory_of(library, directory);
        ascend_load_prefer(look, directory, false);
        return library;
    }
    for (unsigned index = 0; index < look->count && !refused; index++) {
        if (!ascend_load_has_hixl(look->directories[index])) { /* its ACL would be of a toolkit without HIXL */
            kvx_ascend_append(&look->why, "%s/%s: not there. ", look->directories[index], hixl_names[0]);
            continue;
        }
        library = ascend_load_from(look, look->directories[index], acl_names);
        if (library) {
            ascend_load_copy_text(directory, sizeof directory, look->directories[index]);
            ascend_load_prefer(look, directory, true);
            return library;
        }
    }
    return look->only || refused ? NULL : ascend_load_by_name(look, acl_names);
}

static void *ascend_load_other(search *look, const char *const *names) {
    bool refused = false;
    void *library = ascend_load_take_loaded(look, names, &refused);
    for (unsigned index = 0; !library && !refused && index < look->count; index++)
        library = ascend_load_from(look, look->directories[index], names);
    return library || look->only || refused ? library : ascend_load_by_name(look, names);
}

/* 8.5 has no weak references into libhcomm: it asks for the library when it first needs it. Then it must be found. */
static bool ascend_load_loads_lazily(search *look, void *hixl, const char *name) {
    const char *const names[] = {name, NULL};
    return strcmp(name, weak_names[0]) == 0 && !dlsym(hixl, SINCE_9_0) && ascend_load_other(look, names);
}

static bool ascend_load_weak_symbols_resolved(search *look, void *hixl, const char *hixl_path) {
    bool all = true;
    for (const char *const *name = weak_names; *name; name++)
        if (!dlopen(*name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD) && !ascend_load_loads_lazily(look, hixl, *name)) {
            kvx_ascend_append(
                &look->why, "%s is not loaded, though %s refers to it weakly: its first call would jump to address 0. ",
                *name, hixl_path);
            all = false;
        }
    return all;
}

static bool ascend_load_bind_all(search *look, void *acl, void *meta, void *hixl) {
    char names[MISSING_BYTES] = "";
    kvx_ascend_text missing = {names, sizeof names, 0};
    bool whole = kvx_ascend_acl_bind(acl, &table, &missing);
    if (!whole)
        kvx_ascend_append(&look->why, "%s lacks %s. ", table.facts.acl_path, names);
    else
        kvx_ascend_copy_bind(&table);
    missing.used = 0;
    names[0] = 0;
    if (!kvx_ascend_hixl_bind(hixl, meta, &table, &missing)) {
        kvx_ascend_append(&look->why, "%s and %s lack %s. ", table.facts.hixl_path, table.facts.meta_path, names);
        whole = false;
    }
    if (!whole)
        kvx_ascend_append(&look->why, "A toolkit of 8.5 or newer is needed. ");
    return whole;
}

static bool ascend_load_all(search *look) {
    void *acl = ascend_load_acl(look), *meta = NULL, *hixl = NULL;
    if (acl)
        meta = ascend_load_other(look, meta_names);
    if (meta)
        hixl = ascend_load_other(look, hixl_names);
    if (!hixl) {
        kvx_ascend_append(&look->why, WHAT_TO_DO);
        return false;
    }
    kvx_ascend_facts *facts = &table.facts;
    ascend_load_copy_text(facts->acl_path, sizeof facts->acl_path, ascend_load_path_of(acl));
    ascend_load_copy_text(facts->meta_path, sizeof facts->meta_path, ascend_load_path_of(meta));
    ascend_load_copy_text(facts->hixl_path, sizeof facts->hixl_path, ascend_load_path_of(hixl));
    look->why.used = 0; /* earlier candidates no longer matter */
    look->why.data[0] = 0;
    if (!ascend_load_weak_symbols_resolved(look, hixl, facts->hixl_path)) {
        kvx_ascend_append(&look->why, WHAT_TO_DO);
        return false;
    }
    if (!ascend_load_bind_all(look, acl, meta, hixl))
        return false;
    const char *toolkit = facts->optional & KVX_ASCEND_HAS_ASYNC_CONNECT ? "9.1+"
                          : dlsym(hixl, SINCE_9_0)                       ? "9.0"
                                                                         : "8.5";
    ascend_load_copy_text(facts->toolkit, sizeof facts->toolkit, toolkit);
    return kvx_ascend_acl_start(facts, &look->why);
}

static void ascend_load_once(void) {
    owner = getpid();
    search *look = calloc(1, sizeof *look);
    if (!look) {
        ascend_load_copy_text(reason, sizeof reason, "out of memory");
        return;
    }
    look->why = (kvx_ascend_text){reason, sizeof reason, 0};
    table.abi_version = KVX_ASCEND_ABI_VERSION;
    table.struct_size = sizeof table;
    ascend_load_list_directories(look);
    usable = ascend_load_all(look);
    free(look);
}

const kvx_ascend_api *kvx_ascend_get(char *why, size_t why_size) {
    pthread_once(&once, ascend_load_once);
    bool forked = owner != getpid();
    if (usable && !forked)
        return &table;
    if (why)
        ascend_load_copy_text(why, why_size,
                              usable && forked
                                  ? "this process was forked from one that had loaded the libraries, which do not "
                                    "survive that: start it anew (multiprocessing: \"spawn\")"
                                  : reason);
    return NULL;
}

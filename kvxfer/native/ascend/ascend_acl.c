/* ascend_acl.c: ACL's devices and memory behind the table of ascend.h. Copies and streams are in ascend_copy.c.
 *
 * ACL keeps a current context per thread, and so does whoever else uses it in this thread (a framework that remembers
 * which device it has set). So each call borrows the thread: it makes the device's primary context current and puts
 * back the one before. In a thread of ours there is none before, and the context stays: then this costs one look. */
#include "ascend/ascend_acl.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "status.h"

#define DEVICES_MAX 64
#define PLACES_MAX  1024
#define PAGE_BYTES  4096

#define POLICY_HUGE_ONLY      1
#define MEMORY_DDR            0
#define MEMORY_HBM            1
#define IPC_ANY_PROCESS       1
#define IPC_PEER_ACCESS       1
#define DEVICE_STATUS_NORMAL  0
#define VERSION_BYTES         512 /* the library says 128; it writes without knowing our size */
#define RAW_PARAMETER         100000
#define RAW_RUNTIME_PARAMETER 107000

acl_functions kvx_ascend_acl;

static _Atomic(void *) contexts[DEVICES_MAX]; /* the primary one of each device that was used */
static uint32_t devices;

#define ACL kvx_ascend_acl

int kvx_ascend_acl_status(int raw, uint32_t *raw_p) {
    if (raw_p)
        *raw_p = (uint32_t)raw;
    if (raw != 0)
        kvx_ascend_exception_text(); /* of an earlier call: now ACL has the last word */
    int status = kvx_ascend_status((uint32_t)raw);
    return status == KVX_E_LINK ? KVX_E_DEVICE : status;
}

static int ascend_acl_fail(int status, uint32_t *raw_p) {
    if (raw_p)
        *raw_p = 0;
    return status;
}

int kvx_ascend_enter(int32_t device, void **before_p, uint32_t *raw_p) {
    *before_p = NULL;
    if (device < 0 || device >= DEVICES_MAX || (uint32_t)device >= devices)
        return ascend_acl_fail(KVX_E_NO_DEVICE, raw_p);
    void *now = NULL;
    if (ACL.aclrtGetCurrentContext(&now) != 0)
        now = NULL;
    void *own = atomic_load(&contexts[device]);
    if (own && now == own)
        return ascend_acl_fail(KVX_OK, raw_p);
    if (own && ACL.aclrtSetCurrentContext(own) == 0) {
        *before_p = now;
        return ascend_acl_fail(KVX_OK, raw_p);
    }
    int raw = ACL.aclrtSetDevice(device); /* counted by the library; never given back, so the context stays */
    if (raw == 0)
        raw = ACL.aclrtGetCurrentContext(&own);
    if (raw != 0)
        return kvx_ascend_acl_status(raw, raw_p);
    atomic_store(&contexts[device], own);
    *before_p = now == own ? NULL : now;
    return ascend_acl_fail(KVX_OK, raw_p);
}

void kvx_ascend_leave(void *before) {
    if (before)
        ACL.aclrtSetCurrentContext(before);
}

/* -- devices ----------------------------------------------------------------------------------------------------- */

static int ascend_acl_device_use(int32_t device, uint32_t *raw_p) {
    void *before;
    return kvx_ascend_enter(device, &before, raw_p);
}

static int ascend_acl_device_info(int32_t device, uint64_t *hbm_free_p, uint64_t *hbm_total_p, uint32_t *raw_p) {
    void *before;
    int status = kvx_ascend_enter(device, &before, raw_p);
    if (status != KVX_OK)
        return status;
    size_t room = 0, total = 0;
    int raw = ACL.aclrtGetMemInfo(MEMORY_HBM, &room, &total);
    if (raw != 0 || total == 0) { /* inference cards have DDR */
        size_t other_room = 0, other_total = 0;
        if (ACL.aclrtGetMemInfo(MEMORY_DDR, &other_room, &other_total) == 0 && other_total) {
            raw = 0;
            room = other_room;
            total = other_total;
        }
    }
    kvx_ascend_leave(before);
    status = kvx_ascend_acl_status(raw, raw_p);
    if (status == KVX_OK) {
        *hbm_free_p = room;
        *hbm_total_p = total;
    }
    return status;
}

static int ascend_acl_device_healthy(int32_t device, uint32_t *raw_p) {
    if (device < 0 || (uint32_t)device >= devices)
        return ascend_acl_fail(KVX_E_NO_DEVICE, raw_p);
    if (!ACL.aclrtQueryDeviceStatus)
        return ascend_acl_fail(KVX_E_UNSUPPORTED, raw_p);
    int32_t state = -1;
    int raw = ACL.aclrtQueryDeviceStatus(device, &state);
    int status = kvx_ascend_acl_status(raw, raw_p);
    if (status != KVX_OK || state == DEVICE_STATUS_NORMAL)
        return status;
    if (raw_p)
        *raw_p = (uint32_t)state;
    return KVX_E_SYSTEM;
}

static int ascend_acl_device_physical(int32_t device, int32_t *physical_p, uint32_t *raw_p) {
    if (device < 0 || (uint32_t)device >= devices)
        return ascend_acl_fail(KVX_E_NO_DEVICE, raw_p);
    if (!ACL.aclrtGetPhyDevIdByLogicDevId)
        return ascend_acl_fail(KVX_E_UNSUPPORTED, raw_p);
    int32_t physical = -1;
    int status = kvx_ascend_acl_status(ACL.aclrtGetPhyDevIdByLogicDevId(device, &physical), raw_p);
    if (status == KVX_OK)
        *physical_p = physical;
    return status;
}

static int ascend_acl_device_peer(int32_t device, int32_t other, int32_t *can_p, uint32_t *raw_p) {
    static _Atomic uint64_t enabled[DEVICES_MAX]; /* bit `other`: once is enough, and twice is an error */
    if (device < 0 || other < 0 || (uint32_t)device >= devices || (uint32_t)other >= devices || other >= DEVICES_MAX)
        return ascend_acl_fail(KVX_E_NO_DEVICE, raw_p);
    *can_p = device == other;
    if (device == other)
        return ascend_acl_fail(KVX_OK, raw_p);
    if (!ACL.aclrtDeviceCanAccessPeer || !ACL.aclrtDeviceEnablePeerAccess)
        return ascend_acl_fail(KVX_OK, raw_p); /* it cannot, as far as this toolkit knows */
    void *before;
    int status = kvx_ascend_enter(device, &before, raw_p);
    if (status != KVX_OK)
        return status;
    int32_t can = 0;
    int raw = ACL.aclrtDeviceCanAccessPeer(&can, device, other);
    uint64_t bit = UINT64_C(1) << other;
    if (raw == 0 && can && !(atomic_fetch_or(&enabled[device], bit) & bit)) {
        int answer = ACL.aclrtDeviceEnablePeerAccess(other, 0);
        if (answer != 0) { /* a pair that cannot be enabled is one that cannot: raw says why */
            atomic_fetch_and(&enabled[device], ~bit);
            can = 0;
            if (raw_p)
                *raw_p = (uint32_t)answer;
        }
    }
    kvx_ascend_leave(before);
    if (raw != 0)
        return kvx_ascend_acl_status(raw, raw_p);
    *can_p = can != 0;
    return KVX_OK;
}

static int ascend_acl_process_id(int32_t *pid_p, uint32_t *raw_p) {
    int32_t pid = (int32_t)getpid();
    if (!ACL.aclrtDeviceGetBareTgid) { /* then the driver knows no other name for it */
        *pid_p = pid;
        return ascend_acl_fail(KVX_OK, raw_p);
    }
    int status = kvx_ascend_acl_status(ACL.aclrtDeviceGetBareTgid(&pid), raw_p);
    if (status == KVX_OK)
        *pid_p = pid;
    return status;
}

/* -- memory ------------------------------------------------------------------------------------------------------ */

/* What we allocated: a batch of copies asks about each address, and the driver takes its time to answer. */
static struct {
    pthread_rwlock_t lock;
    uint32_t count;
    acl_place places[PLACES_MAX];
} own = {.lock = PTHREAD_RWLOCK_INITIALIZER};

static void ascend_acl_cache_put(const void *memory, size_t length, acl_location location) {
    uintptr_t begin = (uintptr_t)memory;
    pthread_rwlock_wrlock(&own.lock);
    if (own.count < PLACES_MAX) /* more than that is only slower */
        own.places[own.count++] = (acl_place){begin, begin + length, location};
    pthread_rwlock_unlock(&own.lock);
}

/* Before the memory is freed: afterwards it may be somebody else's at once. */
static void ascend_acl_cache_remove(const void *memory) {
    pthread_rwlock_wrlock(&own.lock);
    for (uint32_t index = 0; index < own.count; index++)
        if (own.places[index].begin == (uintptr_t)memory) {
            own.places[index] = own.places[--own.count];
            break;
        }
    pthread_rwlock_unlock(&own.lock);
}

static bool ascend_acl_cache_find(uintptr_t address, acl_place *place_p) {
    bool found = false;
    pthread_rwlock_rdlock(&own.lock);
    for (uint32_t index = 0; index < own.count && !found; index++)
        if (address >= own.places[index].begin && address < own.places[index].end) {
            *place_p = own.places[index];
            found = true;
        }
    pthread_rwlock_unlock(&own.lock);
    return found;
}

static int ascend_acl_mem_alloc(int32_t device, kvx_ascend_where where, uint64_t length, void **memory_p,
                                uint32_t *raw_p) {
    if (where != KVX_ASCEND_DEVICE && where != KVX_ASCEND_HOST)
        return ascend_acl_fail(KVX_E_INVALID, raw_p);
    if (length == 0 || length > SIZE_MAX - KVX_ASCEND_ALIGNMENT)
        return ascend_acl_fail(KVX_E_LENGTH, raw_p);
    void *before, *memory = NULL;
    int status = kvx_ascend_enter(device, &before, raw_p);
    if (status != KVX_OK)
        return status;
    size_t rounded = (size_t)((length + KVX_ASCEND_ALIGNMENT - 1) / KVX_ASCEND_ALIGNMENT * KVX_ASCEND_ALIGNMENT);
    /* Huge pages or nothing: HIXL refuses memory of small ones at its first connect, when it is too late. */
    int raw = where == KVX_ASCEND_DEVICE ? ACL.aclrtMalloc(&memory, rounded, POLICY_HUGE_ONLY)
                                         : ACL.aclrtMallocHost(&memory, (size_t)length);
    status = kvx_ascend_acl_status(raw, raw_p);
    if (status == KVX_OK && !memory)
        status = KVX_E_DEVICE_MEMORY;
    if (status == KVX_OK && where == KVX_ASCEND_DEVICE && (uintptr_t)memory % KVX_ASCEND_ALIGNMENT) {
        ACL.aclrtFree(memory);
        status = KVX_E_ALIGN;
    }
    kvx_ascend_leave(before);
    if (status == KVX_OK) {
        bool there = where == KVX_ASCEND_DEVICE;
        acl_location location = {there ? (uint32_t)device : 0, there ? AT_DEVICE : AT_HOST};
        ascend_acl_cache_put(memory, there ? rounded : (size_t)length, location);
        *memory_p = memory;
    }
    return status == KVX_E_DEVICE_MEMORY && where == KVX_ASCEND_HOST ? KVX_E_NOMEM : status;
}

static int ascend_acl_mem_free(int32_t device, kvx_ascend_where where, void *memory, uint32_t *raw_p) {
    if (!memory || (where != KVX_ASCEND_DEVICE && where != KVX_ASCEND_HOST))
        return ascend_acl_fail(KVX_E_INVALID, raw_p);
    void *before;
    int status = kvx_ascend_enter(device, &before, raw_p);
    if (status != KVX_OK)
        return status;
    ascend_acl_cache_remove(memory);
    int raw = where == KVX_ASCEND_DEVICE ? ACL.aclrtFree(memory) : ACL.aclrtFreeHost(memory);
    kvx_ascend_leave(before);
    return kvx_ascend_acl_status(raw, raw_p);
}

/* The allocation that `memory` lies in, by the library; false when it cannot tell. */
static bool ascend_acl_find_range(const void *memory, uintptr_t *begin_p, uintptr_t *end_p) {
    void *base = NULL;
    size_t length = 0;
    if (!ACL.aclrtMemGetAddressRange || ACL.aclrtMemGetAddressRange((void *)(uintptr_t)memory, &base, &length) != 0 ||
        !base || !length)
        return false;
    *begin_p = (uintptr_t)base;
    *end_p = (uintptr_t)base + length;
    return true;
}

int kvx_ascend_locate(const void *memory, acl_place *place_p, uint32_t *raw_p) {
    if (ascend_acl_cache_find((uintptr_t)memory, place_p))
        return ascend_acl_fail(KVX_OK, raw_p);
    if (!ACL.aclrtPointerGetAttributes)
        return ascend_acl_fail(KVX_E_UNSUPPORTED, raw_p);
    acl_attributes attributes;
    memset(&attributes, 0, sizeof attributes);
    attributes.location.type = AT_UNREGISTERED;
    int raw = ACL.aclrtPointerGetAttributes(memory, &attributes);
    if (raw == RAW_PARAMETER || raw == RAW_RUNTIME_PARAMETER) { /* how some versions say "not mine" */
        raw = 0;
        attributes.location.type = AT_UNREGISTERED;
    }
    int status = kvx_ascend_acl_status(raw, raw_p);
    if (status != KVX_OK)
        return status;
    uintptr_t page = (uintptr_t)memory & ~(uintptr_t)(PAGE_BYTES - 1); /* the least that has one owner */
    *place_p = (acl_place){page, page + PAGE_BYTES, attributes.location};
    if (attributes.location.type != AT_UNREGISTERED)
        ascend_acl_find_range(memory, &place_p->begin, &place_p->end);
    return KVX_OK;
}

static int ascend_acl_mem_query(const void *memory, kvx_ascend_where *where_p, int32_t *device_p, uint64_t *base_p,
                                uint64_t *length_p, uint32_t *raw_p) {
    void *now = NULL, *before = NULL;
    if (ACL.aclrtGetCurrentContext(&now) != 0 || !now) { /* the library answers threads with a context only */
        int entered = kvx_ascend_enter(0, &before, raw_p);
        if (entered != KVX_OK)
            return entered;
    }
    acl_place place = {0};
    int status = kvx_ascend_locate(memory, &place, raw_p);
    if (status != KVX_OK)
        return status;
    acl_location location = place.location;
    uintptr_t begin = 0, end = 0;
    bool device = location.type == AT_DEVICE || location.type == AT_MANAGED;
    *where_p = device ? KVX_ASCEND_DEVICE : location.type == AT_UNREGISTERED ? KVX_ASCEND_FOREIGN : KVX_ASCEND_HOST;
    *device_p = device ? (int32_t)location.id : -1;
    if (*where_p != KVX_ASCEND_FOREIGN && !ascend_acl_find_range(memory, &begin, &end) &&
        place.end - place.begin != PAGE_BYTES) {
        begin = place.begin; /* ours */
        end = place.end;
    }
    *base_p = begin;
    *length_p = end - begin;
    return KVX_OK;
}

/* -- memory of other processes ------------------------------------------------------------------------------------- */

static int ascend_acl_ipc_export(int32_t device, void *memory, uint64_t length, int32_t pid,
                                 char key[KVX_ASCEND_IPC_KEY_MAX], uint32_t *raw_p) {
    if (!ACL.aclrtIpcMemGetExportKey || (pid != KVX_ASCEND_IPC_ANYBODY && !ACL.aclrtIpcMemSetImportPid))
        return ascend_acl_fail(KVX_E_UNSUPPORTED, raw_p);
    void *before;
    int status = kvx_ascend_enter(device, &before, raw_p);
    if (status != KVX_OK)
        return status;
    char fresh[KVX_ASCEND_IPC_KEY_MAX] = "";
    int raw = ACL.aclrtIpcMemGetExportKey(memory, (size_t)length, fresh, KVX_ASCEND_IPC_KEY_MAX,
                                          pid == KVX_ASCEND_IPC_ANYBODY ? IPC_ANY_PROCESS : 0);
    if (raw == 0 && pid > 0) {
        raw = ACL.aclrtIpcMemSetImportPid(fresh, &pid, 1);
        if (raw != 0 && ACL.aclrtIpcMemClose)
            ACL.aclrtIpcMemClose(fresh);
    }
    kvx_ascend_leave(before);
    status = kvx_ascend_acl_status(raw, raw_p);
    if (status != KVX_OK)
        return status;
    fresh[KVX_ASCEND_IPC_KEY_MAX - 1] = 0;
    memcpy(key, fresh, KVX_ASCEND_IPC_KEY_MAX);
    return KVX_OK;
}

static int ascend_acl_ipc_allow(int32_t device, const char *key, int32_t pid, uint32_t *raw_p) {
    if (!ACL.aclrtIpcMemSetImportPid)
        return ascend_acl_fail(KVX_E_UNSUPPORTED, raw_p);
    void *before;
    int status = kvx_ascend_enter(device, &before, raw_p);
    if (status != KVX_OK)
        return status;
    int raw = ACL.aclrtIpcMemSetImportPid(key, &pid, 1);
    kvx_ascend_leave(before);
    return kvx_ascend_acl_status(raw, raw_p);
}

static int ascend_acl_ipc_import(int32_t device, const char *key, void **memory_p, uint32_t *raw_p) {
    if (!ACL.aclrtIpcMemImportByKey)
        return ascend_acl_fail(KVX_E_UNSUPPORTED, raw_p);
    void *before, *memory = NULL;
    int status = kvx_ascend_enter(device, &before, raw_p);
    if (status != KVX_OK)
        return status;
    /* The memory may be of another device; a chip without peer access does not know the flag. */
    int raw = ACL.aclrtIpcMemImportByKey(&memory, key, IPC_PEER_ACCESS);
    status = kvx_ascend_acl_status(raw, raw_p);
    if (status == KVX_E_UNSUPPORTED || status == KVX_E_INVALID)
        status = kvx_ascend_acl_status(ACL.aclrtIpcMemImportByKey(&memory, key, 0), raw_p);
    kvx_ascend_leave(before);
    if (status == KVX_OK)
        *memory_p = memory;
    return status;
}

static int ascend_acl_ipc_close(int32_t device, const char *key, uint32_t *raw_p) {
    if (!ACL.aclrtIpcMemClose)
        return ascend_acl_fail(KVX_E_UNSUPPORTED, raw_p);
    void *before;
    int status = kvx_ascend_enter(device, &before, raw_p);
    if (status != KVX_OK)
        return status;
    int raw = ACL.aclrtIpcMemClose(key);
    kvx_ascend_leave(before);
    return kvx_ascend_acl_status(raw, raw_p);
}

/* -- start ------------------------------------------------------------------------------------------------------- */

static const char *ascend_acl_last_error(void) {
    const char *thrown = kvx_ascend_exception_text();
    if (*thrown)
        return thrown;
    const char *text = ACL.aclGetRecentErrMsg ? ACL.aclGetRecentErrMsg() : NULL;
    return text ? text : "";
}

static void ascend_acl_query_versions(kvx_ascend_facts *facts) {
    if (ACL.aclrtGetVersion &&
        ACL.aclrtGetVersion(&facts->acl_version[0], &facts->acl_version[1], &facts->acl_version[2]) != 0)
        memset(facts->acl_version, 0, sizeof facts->acl_version);
    static const char *const packages[] = {"CANN", "toolkit", "runtime"}; /* the names differ between toolkits */
    for (size_t index = 0; ACL.aclsysGetVersionStr && index < sizeof packages / sizeof *packages; index++) {
        char package[VERSION_BYTES], version[VERSION_BYTES] = "";
        snprintf(package, sizeof package, "%s", packages[index]);
        if (ACL.aclsysGetVersionStr(package, version) == 0 && *version) {
            snprintf(facts->reported, sizeof facts->reported, "%.63s", version);
            return;
        }
    }
}

bool kvx_ascend_acl_start(kvx_ascend_facts *facts, kvx_ascend_text *why) {
    uint32_t count = 0;
    int raw = ACL.aclInit(NULL);
    const char *call = "aclInit";
    if (raw == 0 || raw == (int)KVX_ASCEND_RAW_REPEAT_INIT) { /* another user of the libraries was first */
        call = "aclrtGetDeviceCount";
        raw = ACL.aclrtGetDeviceCount(&count);
    }
    if (raw != 0) {
        kvx_ascend_append(why,
                          "%s of %s answered %d: %.400s. Look at the driver and at /dev/davinci*: `npu-smi info`. ",
                          call, facts->acl_path, raw, ascend_acl_last_error());
        return false;
    }
    if (count == 0) {
        kvx_ascend_append(why, "%s is there, and no device: look at /dev/davinci* and ASCEND_RT_VISIBLE_DEVICES. ",
                          facts->acl_path);
        return false;
    }
    devices = facts->devices = count < DEVICES_MAX ? count : DEVICES_MAX;
    const char *soc = ACL.aclrtGetSocName();
    snprintf(facts->soc, sizeof facts->soc, "%.255s", soc ? soc : "");
    facts->simulated = strncmp(facts->soc, "KVXSim", 6) == 0;
    ascend_acl_query_versions(facts);
    return true;
}

bool kvx_ascend_acl_bind(void *library, kvx_ascend_api *api, kvx_ascend_text *missing) {
    size_t before = missing->used;
    /* POSIX promises that a function's address survives this. */
#define FIND(result, name, arguments) *(void **)(&ACL.name) = kvx_ascend_symbol(library, #name, missing);
#define LOOK(result, name, arguments) *(void **)(&ACL.name) = kvx_ascend_symbol(library, #name, NULL);
    ACL_REQUIRED(FIND)
    ACL_OPTIONAL(LOOK)
#undef FIND
#undef LOOK
    if (missing->used != before)
        return false;
    if (ACL.aclrtMemGetAddressRange)
        api->facts.optional |= KVX_ASCEND_HAS_ADDRESS_RANGE;
    if (ACL.aclrtMemcpyBatchAsync)
        api->facts.optional |= KVX_ASCEND_HAS_BATCH_COPY;
    api->device_use = ascend_acl_device_use;
    api->device_info = ascend_acl_device_info;
    api->device_healthy = ascend_acl_device_healthy;
    api->device_physical = ascend_acl_device_physical;
    api->device_peer = ascend_acl_device_peer;
    api->process_id = ascend_acl_process_id;
    api->mem_alloc = ascend_acl_mem_alloc;
    api->mem_free = ascend_acl_mem_free;
    api->mem_query = ascend_acl_mem_query;
    api->ipc_export = ascend_acl_ipc_export;
    api->ipc_allow = ascend_acl_ipc_allow;
    api->ipc_import = ascend_acl_ipc_import;
    api->ipc_close = ascend_acl_ipc_close;
    api->last_error = ascend_acl_last_error;
    return true;
}

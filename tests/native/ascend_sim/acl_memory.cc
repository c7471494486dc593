/* acl_memory.cc: libacl_rt's memory, and copies that wait. */
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <sys/mman.h>
#include <unistd.h>

#include "context.h"

using namespace kvxsim;

namespace {

constexpr uint64_t kPiece = UINT64_C(256) << 10;
constexpr int kToHost = 0, kKindDefault = 4;

bool is_device(int kind) {
    return kind == KVXSIM_DEVICE || kind == KVXSIM_IMPORT;
}

/* One side of a copy. */
int resolve_side(const void *address, uint64_t length, const char *side, bool *device_p, uint8_t **direct_p,
                 int *card_p, uint32_t *row_p, uint32_t *generation_p, bool *watched_p) {
    kvxsim_memory found;
    kvxsim_find(address, length, &found);
    *card_p = -1;
    *watched_p = false;
    *device_p = is_device(found.kind);
    if (found.kind == KVXSIM_BAD) {
        kvxsim_fault("copy of %llu bytes: %s %p is %s", static_cast<unsigned long long>(length), side, address,
                     found.address ? "out of its allocation's range"
                                   : (found.length ? "freed device memory (use after free)" : "no live allocation"));
        return refuse(kAclMemoryError, "copy touches memory that is not allocated");
    }
    if (found.kind == KVXSIM_PLAIN || found.kind == KVXSIM_MAPPED) {
        *direct_p = static_cast<uint8_t *>(const_cast<void *>(address));
        return 0;
    }
    *direct_p = found.direct + (reinterpret_cast<uint64_t>(address) - found.address);
    *row_p = found.row;
    *generation_p = found.generation;
    *watched_p = true;
    if (is_device(found.kind)) {
        *card_p = found.card;
        if (kvxsim_lost(found.card))
            return refuse(kAclDeviceLost, "copy: the card is lost");
    }
    if (!kvxsim_live(found.row, found.generation)) {
        kvxsim_fault("copy: %s %p was freed by its owner (use after free)", side, address);
        return refuse(kAclMemoryError, "copy touches memory that its owner freed");
    }
    return 0;
}

} // namespace

int kvxsim::resolve(void *target, const void *source, uint64_t length, int kind, Copy *copy_p) {
    bool to_device = false, from_device = false;
    uint8_t *from = nullptr;
    copy_p->length = length;
    int status = resolve_side(target, length, "target", &to_device, &copy_p->target, &copy_p->cards[0],
                              &copy_p->rows[0], &copy_p->generations[0], &copy_p->watched[0]);
    if (status == 0)
        status = resolve_side(source, length, "source", &from_device, &from, &copy_p->cards[1], &copy_p->rows[1],
                              &copy_p->generations[1], &copy_p->watched[1]);
    copy_p->source = from;
    if (status)
        return status;
    int actual = to_device ? (from_device ? 3 : 1) : (from_device ? 2 : kToHost);
    if (kind != kKindDefault && kind != actual)
        return static_cast<int>(kvxsim_error(kAclParam, "copy: kind %d, but the addresses say %d", kind, actual));
    if (to_device && from_device && copy_p->cards[0] != copy_p->cards[1] &&
        !peer_enabled(copy_p->cards[0], copy_p->cards[1]))
        return static_cast<int>(kvxsim_error(kAclParam, "copy from card %d to %d without aclrtDeviceEnablePeerAccess",
                                             copy_p->cards[1], copy_p->cards[0]));
    return 0;
}

int kvxsim::perform(const Copy &copy, const std::atomic<bool> *stop) {
    for (uint64_t done = 0; done < copy.length && !(stop && stop->load());) {
        for (int side = 0; side < 2; side++)
            if (copy.watched[side] && !kvxsim_live(copy.rows[side], copy.generations[side])) {
                kvxsim_fault("copy: %s was freed while the copy ran (use after free)", side ? "source" : "target");
                return refuse(kAclMemoryError, "copy: memory was freed while it ran");
            }
        uint64_t piece = std::min(kPiece, copy.length - done);
        memmove(copy.target + done, copy.source + done, piece);
        done += piece;
    }
    return 0;
}

ACL_API int aclrtGetMemInfo(int attribute, size_t *free_p, size_t *total_p) {
    int status = enter("meminfo");
    if (status)
        return status;
    if (!free_p || !total_p)
        return refuse(kAclParam, "aclrtGetMemInfo: null");
    bool hbm = attribute == 1 || attribute == 4 || attribute == 5;
    StateLock guard;
    reap();
    *total_p = hbm ? state().card_bytes : 0;
    *free_p = hbm ? state().card_bytes - used(current()->card) : 0;
    return 0;
}

/* HUGE_ONLY begins and ends at multiples of 2 MiB. HUGE_FIRST does for 1 MiB and more. NORMAL_ONLY never does, on
 * purpose: HIXL refuses it at Connect. */
ACL_API int aclrtMalloc(void **memory_p, size_t length, uint32_t policy) {
    int status = enter("malloc");
    if (status)
        return status;
    if (!memory_p || length == 0 || (policy & 0xff) > 7)
        return refuse(kAclParam, "aclrtMalloc: bad argument");
    uint32_t pages = policy & 0xff;
    bool huge = pages == 1 || pages == 4 || pages >= 6 || ((pages == 0 || pages == 3) && length > (UINT64_C(1) << 20));
    kvxsim_memory made;
    status = kvxsim_alloc_device(current()->card, length, huge, &made);
    if (status)
        return static_cast<int>(kvxsim_error(static_cast<uint32_t>(status),
                                             "aclrtMalloc of %zu bytes on card %d failed", length, current()->card));
    *memory_p = reinterpret_cast<void *>(made.address);
    return 0;
}

ACL_API int aclrtFree(void *memory) {
    int status = enter("free");
    if (status)
        return status;
    return kvxsim_free(memory, KVXSIM_DEVICE) ? refuse(kAclFree, "aclrtFree: not an allocation") : 0;
}

ACL_API int aclrtMallocHost(void **memory_p, size_t length) {
    int status = enter("mallochost");
    if (status)
        return status;
    kvxsim_memory made;
    status = memory_p ? kvxsim_alloc_pinned(current()->card, length, &made) : kAclParam;
    if (status)
        return static_cast<int>(
            kvxsim_error(static_cast<uint32_t>(status), "aclrtMallocHost of %zu bytes failed", length));
    *memory_p = reinterpret_cast<void *>(made.address);
    return 0;
}

ACL_API int aclrtFreeHost(void *memory) {
    int status = enter("freehost");
    if (status)
        return status;
    return kvxsim_free(memory, KVXSIM_PINNED) ? refuse(kAclFree, "aclrtFreeHost: not an allocation") : 0;
}

/* The device address is the host address: copies know both. It does not become memory that HIXL takes (A2, A3). */
ACL_API int aclrtHostRegister(void *memory, uint64_t length, int type, void **device_p) {
    int status = enter("hostregister");
    if (status)
        return status;
    kvxsim_memory found;
    kvxsim_find(memory, length, &found);
    if (!memory || length == 0 || type != 0 || !device_p || found.kind != KVXSIM_PLAIN)
        return refuse(kAclParam, "aclrtHostRegister: bad argument, or memory that ACL has already");
    kvxsim_memory mapped{};
    mapped.kind = KVXSIM_MAPPED;
    mapped.card = current()->card;
    mapped.address = reinterpret_cast<uint64_t>(memory);
    mapped.length = length;
    mapped.direct = static_cast<uint8_t *>(memory);
    remember(mapped);
    *device_p = memory;
    return 0;
}

ACL_API int aclrtHostUnregister(void *memory) {
    kvxsim_memory mapped;
    int status = enter("hostunregister");
    if (status)
        return status;
    return forget(reinterpret_cast<uint64_t>(memory), KVXSIM_MAPPED, &mapped)
               ? 0
               : refuse(kAclParam, "aclrtHostUnregister: not registered");
}

ACL_API int aclrtMemset(void *memory, size_t most, int32_t value, size_t count) {
    int status = enter("memset");
    if (status)
        return status;
    Copy copy{};
    if (!memory || count > most)
        return refuse(kAclParam, "aclrtMemset: more than the target holds");
    status = resolve(memory, memory, count, kKindDefault, &copy);
    if (status == 0)
        memset(copy.target, value, count);
    return status;
}

ACL_API int aclrtMemcpy(void *target, size_t most, const void *source, size_t count, int kind) {
    int status = enter("memcpy");
    if (status)
        return status;
    Copy copy{};
    if (!target || !source || count == 0 || count > most || kind < 0 || kind > kKindDefault)
        return refuse(kAclParam, "aclrtMemcpy: bad argument");
    status = resolve(target, source, count, kind, &copy);
    return status ? status : perform(copy, nullptr);
}

ACL_API int aclrtPointerGetAttributes(const void *memory, aclrtPtrAttributes *attributes) {
    int status = enter("pointer");
    if (status)
        return status;
    if (!memory || !attributes)
        return refuse(kAclParam, "aclrtPointerGetAttributes: null");
    kvxsim_memory found;
    kvxsim_find(memory, 1, &found);
    *attributes = aclrtPtrAttributes{};
    if (is_device(found.kind)) {
        attributes->location = {static_cast<uint32_t>(found.card), 1};
        attributes->pageSize = static_cast<uint32_t>(found.huge ? kHugePage : kSmallPage);
    } else if (found.kind == KVXSIM_PINNED || found.kind == KVXSIM_MAPPED) {
        attributes->location = {0, 0};
        attributes->pageSize = static_cast<uint32_t>(kSmallPage);
    } else {
        attributes->location = {0, 2}; /* unregistered: also an address of freed device memory */
    }
    return 0;
}

ACL_API int aclrtMemGetAddressRange(void *memory, void **base_p, size_t *length_p) {
    int status = enter("addressrange");
    if (status)
        return status;
    kvxsim_memory found;
    kvxsim_find(memory, 1, &found);
    if (!base_p || !length_p || !is_device(found.kind))
        return refuse(kAclParam, "aclrtMemGetAddressRange: not device memory");
    *base_p = reinterpret_cast<void *>(found.address);
    *length_p = found.length;
    return 0;
}
/* -- memory of another process ----------------------------------------------------------------------------------------
 */

ACL_API int aclrtIpcMemGetExportKey(void *memory, size_t length, char *key, size_t key_size, uint64_t flags) {
    int status = enter("ipcexport");
    if (status)
        return status;
    kvxsim_memory found;
    kvxsim_find(memory, length, &found);
    if (!key || key_size < kIpcKeyBytes || flags > 1 || found.kind != KVXSIM_DEVICE ||
        found.address != reinterpret_cast<uint64_t>(memory))
        return refuse(kAclParam, "aclrtIpcMemGetExportKey: whole device allocations only, and a key of 65 bytes");
    StateLock guard;
    Row &row = state().rows[found.row];
    if (!row.shared)
        snprintf(row.key, sizeof row.key, "kvxsim-%x-%x-%d", found.row, found.generation, getpid());
    row.shared = true;
    row.any_pid = row.any_pid || flags == 1;
    memcpy(key, row.key, kIpcKeyBytes);
    return 0;
}

namespace {

/* Under the lock. */
Row *row_by_key(const char *key) {
    for (Row &row : state().rows)
        if (row.live.load() && row.shared && strncmp(row.key, key, kIpcKeyBytes) == 0)
            return &row;
    return nullptr;
}

struct Imports {
    struct Entry {
        char key[kIpcKeyBytes];
        uint64_t address;
        int count;
    };
    Entry entries[256];
    int used = 0;

    Entry *find(const char *key) {
        for (int index = 0; index < used; index++)
            if (strncmp(entries[index].key, key, kIpcKeyBytes) == 0)
                return &entries[index];
        return nullptr;
    }
};

Imports imports; /* under the state's lock */

/* Under the lock. */
int may_import(const Row *row, int card, uint64_t flags) {
    if (!row)
        return refuse(kAclParam, "aclrtIpcMemImportByKey: unknown key");
    if (row->process == own_process())
        return refuse(kAclParam, "aclrtIpcMemImportByKey: this process exported it itself");
    bool allowed = row->any_pid;
    for (int32_t pid : row->import_pids)
        allowed = allowed || pid == getpid();
    if (!allowed)
        return refuse(kAclParam, "aclrtIpcMemImportByKey: the owner did not name this process (SetImportPid)");
    if (row->card != card && !(flags & 1))
        return refuse(kAclParam, "aclrtIpcMemImportByKey: another card's memory needs ENABLE_PEER_ACCESS");
    return 0;
}

} // namespace

ACL_API int aclrtIpcMemSetImportPid(const char *key, int32_t *pids, size_t count) {
    int status = enter("ipcpid");
    if (status)
        return status;
    kvxsim_hang("ipcpid");
    StateLock guard;
    Row *row = key ? row_by_key(key) : nullptr;
    if (!row || row->process != own_process() || !pids || count == 0)
        return refuse(kAclParam, "aclrtIpcMemSetImportPid: not a key of this process");
    for (size_t index = 0; index < count; index++) {
        int32_t *end = row->import_pids + kImportPids, *free_slot = std::find(row->import_pids, end, 0);
        if (std::find(row->import_pids, end, pids[index]) != end)
            continue;
        if (free_slot == end)
            return refuse(kAclResource, "aclrtIpcMemSetImportPid: too many processes");
        *free_slot = pids[index];
    }
    return 0;
}

ACL_API int aclrtIpcMemImportByKey(void **memory_p, const char *key, uint64_t flags) {
    int status = enter("ipcimport");
    if (status)
        return status;
    kvxsim_memory made{};
    {
        StateLock guard;
        reap();
        Row *row = key && memory_p ? row_by_key(key) : nullptr;
        status = may_import(row, current()->card, flags);
        if (status)
            return status;
        Imports::Entry *known = imports.find(key);
        if (known) {
            known->count++;
            *memory_p = reinterpret_cast<void *>(known->address);
            return 0;
        }
        if (imports.used == static_cast<int>(sizeof imports.entries / sizeof imports.entries[0]))
            return refuse(kAclResource, "aclrtIpcMemImportByKey: too many imports");
        void *reserved =
            mmap(nullptr, row->length + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (reserved == MAP_FAILED)
            return refuse(kAclAlloc, "aclrtIpcMemImportByKey: no address space");
        made.kind = KVXSIM_IMPORT;
        made.card = row->card;
        made.address = (reinterpret_cast<uint64_t>(reserved) + kHugePage - 1) & ~(kHugePage - 1);
        made.length = row->length;
        made.offset = row->offset;
        made.row = static_cast<uint32_t>(row - state().rows);
        made.generation = row->generation.load();
        made.fd = -1;
        made.huge = row->huge;
        made.direct = card(row->card).direct + row->offset;
        row->importers[own_process() / 64] |= UINT64_C(1) << (own_process() % 64);
        Imports::Entry &entry = imports.entries[imports.used++];
        memcpy(entry.key, row->key, kIpcKeyBytes);
        entry.address = made.address;
        entry.count = 1;
    }
    remember(made);
    *memory_p = reinterpret_cast<void *>(made.address);
    return 0;
}

/* The importer's last close ends the import; the owner's takes the key back. */
ACL_API int aclrtIpcMemClose(const char *key) {
    int status = enter("ipcclose");
    if (status)
        return status;
    kvxsim_memory gone;
    StateLock guard;
    Row *row = key ? row_by_key(key) : nullptr;
    Imports::Entry *known = key ? imports.find(key) : nullptr;
    if (known) {
        if (--known->count > 0)
            return 0;
        forget(known->address, KVXSIM_IMPORT, &gone); /* the reservation stays: a late touch must still be a fault */
        if (row)
            row->importers[own_process() / 64] &= ~(UINT64_C(1) << (own_process() % 64));
        *known = imports.entries[--imports.used];
        return 0;
    }
    if (!row || row->process != own_process())
        return refuse(kAclParam, "aclrtIpcMemClose: unknown key");
    row->shared = row->any_pid = false;
    row->key[0] = 0;
    std::fill(std::begin(row->import_pids), std::end(row->import_pids), 0);
    return 0;
}

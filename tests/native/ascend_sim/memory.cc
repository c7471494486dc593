/* memory.cc: allocations: the shared table, and what this process knows by address. */
#include <algorithm>
#include <cstdio>
#include <fcntl.h>
#include <iterator>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

#include "state.h"

namespace kvxsim {

namespace {

struct Known {
    std::shared_mutex lock;
    std::map<uint64_t, kvxsim_memory> by_address;
    std::map<uint64_t, uint64_t> freed; /* device: address -> length, to tell use after free from nonsense */
};

Known &known() {
    static Known *one = new Known;
    return *one;
}

Row *free_row() {
    for (Row &row : state().rows)
        if (!row.live.load())
            return &row;
    return nullptr;
}

struct Hole {
    uint64_t from, to;
};

std::vector<Hole> holes(int index) {
    std::vector<Hole> taken;
    for (const Row &row : state().rows)
        if (row.live.load(std::memory_order_relaxed) && row.kind == KVXSIM_DEVICE && row.card == index)
            taken.push_back({row.offset, row.offset + row.length});
    std::sort(taken.begin(), taken.end(), [](const Hole &a, const Hole &b) { return a.from < b.from; });
    std::vector<Hole> out;
    uint64_t at = 0;
    for (const Hole &used_range : taken) {
        if (used_range.from > at)
            out.push_back({at, used_range.from});
        at = used_range.to;
    }
    if (at < state().card_bytes)
        out.push_back({at, state().card_bytes});
    return out;
}

/* Small pages never begin at a multiple of 2 MiB here: what HIXL would refuse on hardware must not pass by luck. */
uint64_t place(uint64_t from, bool huge) {
    if (huge)
        return (from + kHugePage - 1) & ~(kHugePage - 1);
    uint64_t at = (from + kSmallPage - 1) & ~(kSmallPage - 1);
    return at % kHugePage == 0 ? at + kSmallPage : at;
}

bool find_room(int index, uint64_t length, bool huge, uint64_t *offset_p) {
    uint64_t start = state().next_offset[index];
    for (int pass = 0; pass < 2; pass++)
        for (const Hole &hole : holes(index)) {
            uint64_t at = place(pass == 0 ? std::max(hole.from, start) : hole.from, huge);
            if (at < hole.to && hole.to - at >= length) {
                *offset_p = at;
                return true;
            }
        }
    return false;
}

void fill_row(Row *row, const kvxsim_memory &memory) {
    row->kind = memory.kind;
    row->card = memory.card;
    row->process = own_process();
    row->fd = memory.fd;
    row->offset = memory.offset;
    row->length = memory.length;
    row->address = memory.address;
    row->registered = 0;
    std::fill(std::begin(row->importers), std::end(row->importers), 0);
    row->huge = memory.huge;
    row->shared = row->any_pid = false;
    row->key[0] = 0;
    std::fill(std::begin(row->import_pids), std::end(row->import_pids), 0);
    row->live.store(1);
}

} // namespace

void remember(const kvxsim_memory &memory) {
    std::unique_lock<std::shared_mutex> guard(known().lock);
    known().by_address[memory.address] = memory;
    auto &freed = known().freed;
    for (auto at = freed.begin(); at != freed.end();)
        at = at->first < memory.address + memory.length && memory.address < at->first + at->second ? freed.erase(at)
                                                                                                   : std::next(at);
}

bool forget(uint64_t address, int kind, kvxsim_memory *memory_p) {
    std::unique_lock<std::shared_mutex> guard(known().lock);
    auto found = known().by_address.find(address);
    if (found == known().by_address.end() || found->second.kind != kind)
        return false;
    *memory_p = found->second;
    known().by_address.erase(found);
    if (kind == KVXSIM_DEVICE)
        known().freed[address] = memory_p->length;
    return true;
}

} // namespace kvxsim

using namespace kvxsim;

void kvxsim_find(const void *address, uint64_t length, kvxsim_memory *found_p) {
    kvxsim_attach();
    uint64_t at = reinterpret_cast<uint64_t>(address);
    *found_p = kvxsim_memory{};
    std::shared_lock<std::shared_mutex> guard(known().lock);
    auto after = known().by_address.upper_bound(at);
    if (after != known().by_address.begin()) {
        const kvxsim_memory &candidate = std::prev(after)->second;
        if (at - candidate.address < candidate.length) {
            *found_p = candidate;
            if (length > candidate.length - (at - candidate.address))
                found_p->kind = KVXSIM_BAD; /* begins inside, ends outside */
            return;
        }
    }
    for (uint32_t index = 0; index < state().cards; index++)
        if (at - card(static_cast<int>(index)).address < state().card_bytes) {
            found_p->kind = KVXSIM_BAD;
            found_p->card = static_cast<int>(index);
            auto freed = known().freed.upper_bound(at);
            if (freed != known().freed.begin() && at - std::prev(freed)->first < std::prev(freed)->second)
                found_p->length = std::prev(freed)->second; /* use after free: the length says so */
            return;
        }
}

bool kvxsim_live(uint32_t row, uint32_t generation) {
    const Row &entry = state().rows[row];
    return entry.live.load(std::memory_order_acquire) && entry.generation.load(std::memory_order_acquire) == generation;
}

void kvxsim_registered(uint32_t row, uint32_t generation, int delta) {
    StateLock guard;
    if (kvxsim_live(row, generation))
        state().rows[row].registered += delta;
}

int kvxsim_alloc_device(int index, uint64_t length, bool huge, kvxsim_memory *memory_p) {
    kvxsim_attach();
    uint64_t page = huge ? kHugePage : kSmallPage;
    uint64_t rounded = (length + page - 1) & ~(page - 1);
    if (length == 0 || rounded < length)
        return kAclParam;
    kvxsim_memory made{};
    {
        StateLock guard;
        reap();
        Row *row = free_row();
        if (!row || rounded > state().card_bytes || !find_room(index, rounded, huge, &made.offset))
            return kAclAlloc;
        state().next_offset[index] = made.offset + rounded;
        made.kind = KVXSIM_DEVICE;
        made.card = index;
        made.length = rounded;
        made.address = card(index).address + made.offset;
        made.fd = -1;
        made.huge = huge;
        made.direct = card(index).direct + made.offset;
        made.row = static_cast<uint32_t>(row - state().rows);
        made.generation = row->generation.fetch_add(1) + 1;
        fill_row(row, made);
    }
    remember(made);
    *memory_p = made;
    return 0;
}

int kvxsim_alloc_pinned(int index, uint64_t length, kvxsim_memory *memory_p) {
    kvxsim_attach();
    uint64_t rounded = (length + kSmallPage - 1) & ~(kSmallPage - 1);
    if (length == 0 || rounded < length)
        return kAclParam;
    int fd = memfd_create(KVXSIM_NAME "-pinned", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(rounded)) != 0) {
        if (fd >= 0)
            close(fd);
        return kAclAlloc;
    }
    void *memory = mmap(nullptr, rounded, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    Row *row = nullptr;
    kvxsim_memory made{};
    if (memory != MAP_FAILED) {
        StateLock guard;
        reap();
        row = free_row();
        made = {KVXSIM_PINNED,
                index,
                reinterpret_cast<uint64_t>(memory),
                rounded,
                0,
                0,
                0,
                fd,
                false,
                static_cast<uint8_t *>(memory)};
        if (row) {
            made.row = static_cast<uint32_t>(row - state().rows);
            made.generation = row->generation.fetch_add(1) + 1;
            fill_row(row, made);
        }
    }
    if (!row) {
        if (memory != MAP_FAILED)
            munmap(memory, rounded);
        close(fd);
        return kAclAlloc;
    }
    remember(made);
    *memory_p = made;
    return 0;
}

int kvxsim_free(const void *address, int kind) {
    kvxsim_attach();
    kvxsim_memory memory;
    if (!forget(reinterpret_cast<uint64_t>(address), kind, &memory)) {
        kvxsim_fault("free of %p, which is not the start of a live %s allocation", address,
                     kind == KVXSIM_DEVICE ? "device" : "pinned");
        return kAclParam;
    }
    int registered;
    bool imported = false;
    {
        StateLock guard;
        Row &row = state().rows[memory.row];
        registered = row.registered;
        reap();
        for (uint64_t bits : row.importers)
            imported = imported || bits != 0;
        row.generation.fetch_add(1);
        row.live.store(0);
    }
    if (kind == KVXSIM_PINNED) {
        munmap(memory.direct, memory.length);
        close(memory.fd);
    } else {
        fallocate(card(memory.card).fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(memory.offset),
                  static_cast<off_t>(memory.length));
    }
    if (registered > 0)
        kvxsim_fault("free of %p while it is registered with HIXL (%d times)", address, registered);
    if (imported)
        kvxsim_fault("free of %p while another process has it imported", address);
    return 0;
}

uint8_t *kvxsim_map_pinned(int pid, int fd, uint64_t length) {
    std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
    int own = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (own < 0)
        return nullptr;
    void *memory = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, own, 0);
    close(own);
    return memory == MAP_FAILED ? nullptr : static_cast<uint8_t *>(memory);
}

bool kvxsim_device_live_at(int index, uint64_t offset, uint64_t length) {
    StateLock guard;
    for (const Row &row : state().rows)
        if (row.live.load() && row.kind == KVXSIM_DEVICE && row.card == index && offset >= row.offset &&
            offset - row.offset <= row.length && length <= row.length - (offset - row.offset))
            return true;
    return false;
}

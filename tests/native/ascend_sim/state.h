/* state.h: the state file of a simulation: who takes part, what is allocated on which card. Shared memory.
 *
 * One robust mutex guards it; a process that dies with the lock leaves it to the next one, and whoever takes the lock
 * to allocate first reaps what dead processes left. `generation` of a row grows at each change of owner, so an address
 * kept too long is known from one that is good. */
#ifndef KVXSIM_STATE_H
#define KVXSIM_STATE_H

#include <atomic>
#include <cstdint>
#include <pthread.h>

#include "sim.h"

namespace kvxsim {

constexpr uint64_t kStateMagic = UINT64_C(0x304d4953584b0003); /* ends in the layout's version */
constexpr uint32_t kProcesses = 128;
constexpr uint32_t kRows = 4096;
constexpr uint32_t kImportPids = 16;

struct Process {
    int32_t pid; /* 0: free */
    uint64_t started;
    int32_t card_fd[KVXSIM_CARDS_MAX]; /* memfds as numbered in that process; -1 none */
};

struct Row {
    std::atomic<uint32_t> generation;
    std::atomic<uint32_t> live;
    int32_t kind; /* KVXSIM_DEVICE or KVXSIM_PINNED */
    int32_t card;
    uint32_t process;
    int32_t fd;
    uint64_t offset, length, address;    /* address: in the owner's process */
    int32_t registered;                  /* with HIXL engines of the owner */
    uint64_t importers[kProcesses / 64]; /* a bit per process slot */
    bool huge, shared, any_pid;
    char key[kIpcKeyBytes];
    int32_t import_pids[kImportPids];
};

struct State {
    uint64_t magic;
    char boot_id[40];
    uint32_t cards;
    uint64_t card_bytes;
    pthread_mutex_t lock;
    Process processes[kProcesses];
    uint64_t next_offset[KVXSIM_CARDS_MAX]; /* next fit: freed memory is not handed out again at once */
    std::atomic<uint64_t> copied_bytes[KVXSIM_CARDS_MAX];
    Row rows[kRows];
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "shared between processes");

/* This process's view. */
struct Card {
    int fd = -1;
    uint64_t address = 0;      /* reservation without access */
    uint8_t *direct = nullptr; /* the private mapping */
};

State &state(); /* after kvxsim_attach */
const Card &card(int index);
uint32_t own_process();

class StateLock {
  public:
    StateLock();
    ~StateLock();
    StateLock(const StateLock &) = delete;
    StateLock &operator=(const StateLock &) = delete;
};

void reap();             /* under the lock */
uint64_t used(int card); /* under the lock: bytes allocated */

/* What this process knows by address: its own allocations, imports, registered plain memory. */
void remember(const kvxsim_memory &memory);
bool forget(uint64_t address, int kind, kvxsim_memory *memory_p); /* only at the exact start */

} // namespace kvxsim

#endif

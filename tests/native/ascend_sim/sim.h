/* sim.h: what the simulated libraries share: cards, allocations, settings, faults, the log.
 *
 * libacl_rt.so holds all of it; libcann_hixl.so calls the C functions below through it, so that one process has one
 * idea of what memory exists. All processes with the same simulation directory share the state file there. A card is a
 * memfd that each process reaches through /proc/<pid>/fd of any other that has it: nothing is left when the last one
 * ends.
 *
 * A device address is a reservation without access (PROT_NONE): a CPU that touches it dies, as it should. The
 * simulator's own copies go through a second mapping that nobody else knows. */
#ifndef KVXSIM_SIM_H
#define KVXSIM_SIM_H

#include <cstddef>
#include <cstdint>

#include "numbers.h"

#define KVXSIM_API       extern "C" __attribute__((visibility("default")))
#define KVXSIM_PRINTF(n) __attribute__((format(printf, n, n + 1)))
#define KVXSIM_CARDS_MAX 8
#define KVXSIM_TEXT_MAX  512

/* Where an address lies. */
enum kvxsim_kind {
    KVXSIM_PLAIN = 0,  /* not ours: malloc, stack, mmap */
    KVXSIM_DEVICE = 1, /* aclrtMalloc */
    KVXSIM_PINNED = 2, /* aclrtMallocHost */
    KVXSIM_MAPPED = 3, /* plain memory after aclrtHostRegister */
    KVXSIM_IMPORT = 4, /* another process's device memory, by IPC key */
    KVXSIM_BAD = 5,    /* a device address where no live allocation is */
};

struct kvxsim_memory {
    int kind; /* kvxsim_kind */
    int card;
    uint64_t address, length; /* of the whole allocation */
    uint64_t offset;          /* of the allocation in its card */
    uint32_t row, generation; /* of the shared table */
    int fd;                   /* pinned: the memfd in the owner's process */
    bool huge;
    uint8_t *direct; /* where the simulator itself reads and writes it (of `address`) */
};

/* -- state -----------------------------------------------------------------------------------------------------------
 */

/* Attached to the simulation directory? Every entry point asks; the first call attaches. */
KVXSIM_API bool kvxsim_attach(void);
KVXSIM_API const char *kvxsim_directory(void);
KVXSIM_API uint32_t kvxsim_cards(void);
KVXSIM_API uint64_t kvxsim_card_bytes(void);
KVXSIM_API uint64_t kvxsim_card_address(int card); /* start of the reservation in this process */
KVXSIM_API uint8_t *kvxsim_card_direct(int card);  /* start of the private mapping */
KVXSIM_API bool kvxsim_process_alive(int pid, uint64_t started);
KVXSIM_API uint64_t kvxsim_process_started(int pid); /* 0: no such process, or it is dead and not yet waited for */

/* The allocation that holds all of [address, address + length), or kind PLAIN or BAD. */
KVXSIM_API void kvxsim_find(const void *address, uint64_t length, kvxsim_memory *found_p);
/* Is the allocation still there? Reads shared memory, takes no lock: asked for each piece that is copied. */
KVXSIM_API bool kvxsim_live(uint32_t row, uint32_t generation);
KVXSIM_API void kvxsim_registered(uint32_t row, uint32_t generation, int delta);
KVXSIM_API int kvxsim_alloc_device(int card, uint64_t length, bool huge, kvxsim_memory *memory_p);
KVXSIM_API int kvxsim_alloc_pinned(int card, uint64_t length, kvxsim_memory *memory_p);
KVXSIM_API int kvxsim_free(const void *address, int kind);
/* A peer's pinned allocation, mapped here; NULL when the peer is gone. Unmap with munmap. */
KVXSIM_API uint8_t *kvxsim_map_pinned(int pid, int fd, uint64_t length);
KVXSIM_API bool kvxsim_device_live_at(int card, uint64_t offset, uint64_t length);

/* -- the toolkit that is imitated --- */

KVXSIM_API int kvxsim_major(void);
KVXSIM_API int kvxsim_minor(void);

/* -- contexts --------------------------------------------------------------------------------------------------------
 */

KVXSIM_API int kvxsim_current_card(void); /* of this thread's context, -1 when it has none */

/* -- settings, faults, log -------------------------------------------------------------------------------------------
 */

/* KVXFER_SIM_<name>: control.<pid>, then control, then the environment. "" when not set. Copied into out. */
KVXSIM_API void kvxsim_setting(const char *name, char *out, size_t size);
KVXSIM_API double kvxsim_number(const char *name, double otherwise);
KVXSIM_API bool kvxsim_is(const char *name, const char *value); /* is `value` one of the comma-separated words? */
/* Counts a call of `operation`; true when KVXFER_SIM_FAIL names this one, with the status to answer. */
KVXSIM_API bool kvxsim_fails(const char *operation, uint32_t *status_p);
/* Counts a transfer for KVXFER_SIM_<name>=nth (PARTIAL, CORRUPT). */
KVXSIM_API bool kvxsim_strikes(const char *name);
KVXSIM_API bool kvxsim_lost(int card); /* KVXFER_SIM_DEVICE_LOST */
/* Blocks while KVXFER_SIM_HANG names `operation`. */
KVXSIM_API void kvxsim_hang(const char *operation);
KVXSIM_API void kvxsim_note(const char *format, ...) KVXSIM_PRINTF(1);
/* A misuse that real hardware punishes: a FAULT line, and abort() when KVXFER_SIM_STRICT=abort. */
KVXSIM_API void kvxsim_fault(const char *format, ...) KVXSIM_PRINTF(1);
/* Sets what aclGetRecentErrMsg tells this thread and returns `status`. */
KVXSIM_API uint32_t kvxsim_error(uint32_t status, const char *format, ...) KVXSIM_PRINTF(2);
KVXSIM_API uint64_t kvxsim_now_ns(void);
KVXSIM_API void kvxsim_sleep_until(uint64_t ns);

#endif

/* state.cc: attaching to a simulation, the cards' memory, who is alive. */
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <mutex>
#include <signal.h>
#include <string>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "state.h"

namespace kvxsim {

namespace {

struct Attachment {
    State *state = nullptr;
    Card cards[KVXSIM_CARDS_MAX];
    uint32_t process = 0;
    int pid = 0;
    bool ok = false;
};

Attachment &attachment() {
    static Attachment *one = new Attachment;
    return *one;
}

[[noreturn]] void die(const char *what) {
    fprintf(stderr, KVXSIM_NAME " (simulated): %s in %s: %s\n", what, kvxsim_directory(), strerror(errno));
    abort();
}

uint64_t environment_bytes(const char *name, uint64_t otherwise) {
    const char *text = std::getenv(name);
    if (!text || !*text)
        return otherwise;
    char *end = nullptr;
    uint64_t value = std::strtoull(text, &end, 0);
    const char *units = "KMGT";
    const char *unit = *end ? strchr(units, *end) : nullptr;
    return unit ? value << (10 * (unit - units + 1)) : value;
}

void boot_id(char out[40]) {
    memset(out, 0, 40);
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        ssize_t got = read(fd, out, 36);
        (void)got;
        close(fd);
    }
}

void format(State *fresh) {
    memset(static_cast<void *>(fresh), 0, sizeof *fresh);
    boot_id(fresh->boot_id);
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&fresh->lock, &attributes);
    pthread_mutexattr_destroy(&attributes);
    fresh->magic = kStateMagic;
}

bool is_alive(const Process &process) {
    return process.pid != 0 && kvxsim_process_alive(process.pid, process.started);
}

/* Under the lock. The first of a simulation decides how large it is; who comes later takes part in what there is. */
void settle_size(State *shared) {
    uint64_t bytes = environment_bytes("KVXFER_SIM_HBM", UINT64_C(1) << 30) & ~(kHugePage - 1);
    uint32_t cards = static_cast<uint32_t>(environment_bytes("KVXFER_SIM_DEVICES", 2));
    if (cards < 1 || cards > KVXSIM_CARDS_MAX)
        cards = 2;
    bool alone = true;
    for (const Process &process : shared->processes)
        if (is_alive(process))
            alone = false;
    if (alone) {
        shared->cards = cards;
        shared->card_bytes = bytes < kHugePage ? kHugePage : bytes;
        memset(shared->next_offset, 0, sizeof shared->next_offset);
    } else if (shared->cards != cards || shared->card_bytes != bytes) {
        kvxsim_note("this simulation has %u cards of %llu bytes already; KVXFER_SIM_DEVICES and _HBM are not used",
                    shared->cards, static_cast<unsigned long long>(shared->card_bytes));
    }
}

int open_card(State *shared, uint32_t index) {
    for (const Process &process : shared->processes) {
        if (!is_alive(process) || process.card_fd[index] < 0)
            continue;
        std::string path = "/proc/" + std::to_string(process.pid) + "/fd/" + std::to_string(process.card_fd[index]);
        int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
        if (fd >= 0)
            return fd;
    }
    int fd = memfd_create(KVXSIM_NAME "-card", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(shared->card_bytes)) != 0)
        die("cannot make a card's memory");
    return fd;
}

void map_card(State *shared, uint32_t index, Card *out) {
    size_t bytes = shared->card_bytes;
    out->fd = open_card(shared, index);
    void *direct = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, out->fd, 0);
    /* Somewhere else in each process, as on hardware: an address taken for one's own must not work by luck. */
    void *reserved = mmap(nullptr, bytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (direct == MAP_FAILED || reserved == MAP_FAILED)
        die("cannot map a card");
    out->direct = static_cast<uint8_t *>(direct);
    out->address = (reinterpret_cast<uint64_t>(reserved) + kHugePage - 1) & ~(kHugePage - 1);
}

void join(Attachment *mine) {
    State *shared = mine->state;
    settle_size(shared);
    reap();
    for (uint32_t index = 0; index < shared->cards; index++)
        map_card(shared, index, &mine->cards[index]);
    for (uint32_t slot = 0; slot < kProcesses; slot++) {
        Process &process = shared->processes[slot];
        if (is_alive(process))
            continue;
        process.pid = getpid();
        process.started = kvxsim_process_started(getpid());
        for (uint32_t index = 0; index < KVXSIM_CARDS_MAX; index++)
            process.card_fd[index] = index < shared->cards ? mine->cards[index].fd : -1;
        mine->process = slot;
        return;
    }
    errno = ENOSPC;
    die("more processes than a simulation holds");
}

void attach(Attachment *mine) {
    mkdir(kvxsim_directory(), 0700);
    std::string path = std::string(kvxsim_directory()) + "/state";
    int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || flock(fd, LOCK_EX) != 0)
        die("cannot open the state file");
    struct stat status;
    if (fstat(fd, &status) != 0 || (status.st_size < static_cast<off_t>(sizeof(State)) && ftruncate(fd, sizeof(State))))
        die("cannot size the state file");
    void *memory = mmap(nullptr, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED)
        die("cannot map the state file");
    mine->state = static_cast<State *>(memory);
    mine->pid = getpid();
    char boot[40];
    boot_id(boot);
    if (mine->state->magic != kStateMagic || strcmp(mine->state->boot_id, boot) != 0)
        format(mine->state);
    {
        StateLock guard;
        join(mine);
    }
    flock(fd, LOCK_UN); /* close would not do: the mapping keeps the open file and its lock */
    close(fd);
    kvxsim_note("simulated CANN, no hardware: no figure measured here is a hardware figure (%u cards of %llu MiB)",
                mine->state->cards, static_cast<unsigned long long>(mine->state->card_bytes >> 20));
    mine->ok = true;
}

} // namespace

State &state() {
    return *attachment().state;
}

const Card &card(int index) {
    return attachment().cards[index];
}

uint32_t own_process() {
    return attachment().process;
}

StateLock::StateLock() {
    if (pthread_mutex_lock(&state().lock) == EOWNERDEAD)
        pthread_mutex_consistent(&state().lock); /* rows of the dead are reaped by whoever allocates */
}

StateLock::~StateLock() {
    pthread_mutex_unlock(&state().lock);
}

void reap() {
    State &shared = state();
    for (uint32_t slot = 0; slot < kProcesses; slot++) {
        Process &process = shared.processes[slot];
        if (process.pid == 0 || is_alive(process))
            continue;
        for (Row &row : shared.rows) {
            row.importers[slot / 64] &= ~(UINT64_C(1) << (slot % 64));
            if (row.live.load() && row.process == slot) {
                row.generation.fetch_add(1);
                row.live.store(0);
            }
        }
        process.pid = 0;
    }
}

uint64_t used(int index) {
    uint64_t bytes = 0;
    for (const Row &row : state().rows)
        if (row.live.load(std::memory_order_relaxed) && row.kind == KVXSIM_DEVICE && row.card == index)
            bytes += row.length;
    return bytes;
}

} // namespace kvxsim

using namespace kvxsim;

const char *kvxsim_directory(void) {
    static const std::string *path = [] {
        const char *named = std::getenv("KVXFER_SIM_DIR");
        return new std::string(named && *named ? named : "/tmp/kvxfer-sim-" + std::to_string(getuid()));
    }();
    return path->c_str();
}

bool kvxsim_attach(void) {
    static std::mutex *lock = new std::mutex;
    std::lock_guard<std::mutex> guard(*lock);
    Attachment &mine = attachment();
    if (!mine.ok)
        attach(&mine);
    if (mine.pid != getpid()) {
        fprintf(stderr, KVXSIM_NAME " (simulated): used in a forked child; ACL does not survive fork\n");
        abort();
    }
    return true;
}

uint32_t kvxsim_cards(void) {
    kvxsim_attach();
    return state().cards;
}

uint64_t kvxsim_card_bytes(void) {
    kvxsim_attach();
    return state().card_bytes;
}

uint64_t kvxsim_card_address(int index) {
    return card(index).address;
}

uint8_t *kvxsim_card_direct(int index) {
    return card(index).direct;
}

uint64_t kvxsim_process_started(int pid) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc//%d/stat", pid); /* qemu makes up what a process reads of itself, but not so */
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    if (got <= 0)
        return 0;
    text[got] = 0;
    const char *after = strrchr(text, ')'); /* the name may hold anything, also spaces and brackets */
    char mark = 0;
    unsigned long long started = 0;
    if (!after || sscanf(after + 1, " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                         &mark, &started) != 2)
        return 0;
    return mark == 'Z' || mark == 'X' ? 0 : started;
}

bool kvxsim_process_alive(int pid, uint64_t started) {
    return pid == getpid() || (started != 0 && kvxsim_process_started(pid) == started);
}

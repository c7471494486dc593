/* fuzz_shm.c: a whole owner of the shm transport against an initiator that follows the input: imports that are right
 * and wrong, damaged or cut messages, descriptors that nobody asked for, silence, revokes, a sudden end.
 *
 * Properties beside what the core below checks (fuzz_core.h): whoever was refused gets no descriptor; a revoke is quiet
 * when the initiator has given everything back and not before; nothing is left of a connection when its socket has
 * ended, neither descriptors of files nor connections. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "fuzz.h"
#include "fuzz_core.h"
#include "fuzz_shm.h"

#define HANDLES 6

static void *transport;
static struct sockaddr_un address;
static char directory[] = "/tmp/kvxfuzzXXXXXX";
static int memfd; /* behind the region, when it is one that is mapped */

typedef struct initiator {
    const uint8_t *data;
    size_t size;
    int fd;
    uint64_t counter;
    uint8_t mine[KVX_NONCE_BYTES], theirs[KVX_NONCE_BYTES];
    bool greeted;
} initiator;

/* -- what only diallers and copies need ------------------------------------------------------------------------- */

void kvx_core_job_post(kvx_core *core, kvx_job *job) {
    (void)core;
    job->run(job);
}

void kvx_core_wake(kvx_core *core, uint32_t slot, uint32_t thread) {
    (void)core, (void)slot, (void)thread;
}
void kvx_mapping_hide(kvx_import *import) {
    (void)import;
    abort();
}
void kvx_view_drop(kvx_core *core, uint64_t import, void *base, uint64_t length) {
    (void)core, (void)import, (void)base, (void)length;
    abort();
}
/* -- the initiator ---------------------------------------------------------------------------------------------- */

static uint64_t take(initiator *i, size_t width) {
    uint64_t value = 0;
    for (size_t n = 0; n < width && i->size > 0; n++, i->data++, i->size--) {
        value = value << 8 | *i->data;
    }
    return value;
}

static void progress(int times) {
    for (int i = 0; i < times; i++) {
        kvx_transport_shm.progress(transport, 0, 0);
    }
}

static void read_some(initiator *i) {
    shm_message message;
    union {
        struct cmsghdr header;
        uint8_t space[CMSG_SPACE(4 * sizeof(int))];
    } control;
    struct iovec bytes = {.iov_base = &message, .iov_len = sizeof message};
    for (;;) {
        struct msghdr in = {
            .msg_iov = &bytes, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control.space};
        if (recvmsg(i->fd, &in, MSG_DONTWAIT) != sizeof message) {
            return;
        }
        FUZZ_CHECK(message.magic == SHM_MAGIC && message.type > 0 && message.type < SHM_TYPES);
        if (message.type == SHM_HELLO) {
            memcpy(i->theirs, message.hello.nonce, sizeof i->theirs);
            i->greeted = message.status == KVX_OK;
        }
        struct cmsghdr *header = CMSG_FIRSTHDR(&in);
        FUZZ_CHECK(header == NULL || (message.type == SHM_IMPORTED && message.status == KVX_OK));
        if (header != NULL) {
            int fd;
            memcpy(&fd, CMSG_DATA(header), sizeof fd);
            close(fd);
        }
    }
}

static void authenticate(const initiator *i, const uint8_t *key, shm_message *message) {
    uint64_t direction = 1;
    kvx_mac_state state;
    kvx_mac_init(&state, key);
    kvx_mac_update(&state, i->mine, KVX_NONCE_BYTES);
    kvx_mac_update(&state, i->theirs, KVX_NONCE_BYTES);
    kvx_mac_update(&state, &direction, sizeof direction);
    kvx_mac_update(&state, message, offsetof(shm_message, mac));
    kvx_mac_final(&state, message->mac);
}

static void send_bytes(const initiator *i, const void *bytes, size_t size, uint32_t fds) {
    struct iovec vector = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = size};
    union {
        struct cmsghdr header;
        uint8_t space[CMSG_SPACE(5 * sizeof(int))];
    } control = {0};
    struct msghdr out = {.msg_iov = &vector, .msg_iovlen = 1};
    if (fds > 0) {
        int given[5] = {wake_fd, wake_fd, wake_fd, wake_fd, wake_fd};
        out.msg_control = &control;
        out.msg_controllen = CMSG_SPACE(fds * sizeof(int));
        struct cmsghdr *header = CMSG_FIRSTHDR(&out);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(fds * sizeof(int));
        memcpy(CMSG_DATA(header), given, fds * sizeof(int));
    }
    (void)!sendmsg(i->fd, &out, MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* A message that is right, unless `how` says otherwise. */
static void send_message(initiator *i, uint8_t type, uint8_t how) {
    shm_message message = {
        .magic = SHM_MAGIC, .version = SHM_VERSION, .type = type, .handle = 1 + take(i, 1) % HANDLES};
    bool about_none = type == SHM_HELLO || type == SHM_BYE;
    uint8_t key[KVX_KEY_BYTES];
    memcpy(key, grant.key, sizeof key);
    message.counter = ++i->counter + (how % 16 == 1);
    if (type == SHM_HELLO) {
        memcpy(message.hello.nonce, i->mine, sizeof i->mine);
    } else if (type == SHM_IMPORT) {
        message.import.grant = grant.id + (how % 16 == 2);
        message.import.generation = region.generation + (how % 16 == 3);
        message.import.length = how % 16 == 4 ? take(i, 8) : how % 16 == 5 ? take(i, 2) : LENGTH;
        message.import.access = how % 16 == 6 ? (uint32_t)take(i, 4) : grant.access;
    } else if (type == SHM_NOTIFY) {
        message.notify.token = take(i, 1);
        message.notify.tag = 1;
        message.notify.value = take(i, 1);
    }
    key[0] ^= how % 16 == 7;
    message.status = how % 16 == 8 ? (int32_t)take(i, 4) : 0;
    message.version += how % 16 == 9;
    message.how = how % 16 == 10 ? (uint16_t)take(i, 2) : 0;
    message.handle = about_none ? 0 : message.handle;
    if (how % 16 == 14) { /* any field, and the code is right all the same */
        ((uint8_t *)&message)[take(i, 1) % offsetof(shm_message, mac)] ^= (uint8_t)(1 << take(i, 1) % 8);
    }
    if (!about_none) {
        authenticate(i, key, &message);
    }
    uint8_t bytes[sizeof message + 8] = {0};
    memcpy(bytes, &message, sizeof message);
    if (how % 16 == 11) {
        bytes[take(i, 1) % sizeof message] ^= (uint8_t)(1 << take(i, 1) % 8);
    }
    size_t size = how % 16 == 12 ? take(i, 1) % sizeof bytes : sizeof message;
    send_bytes(i, bytes, size, how % 16 == 13 ? 1 + (uint32_t)take(i, 1) % 5 : 0);
}

/* Whoever still has something must be asked for it first. */
static void take_back(void) {
    atomic_store(&grant.revoked, true);
    quiet = kvx_transport_shm.mem_release(transport, &region, &grant) == KVX_OK;
    FUZZ_CHECK(quiet == (attachments == 0));
}

static void grant_again(void) {
    if (grant.revoked && !quiet) {
        return; /* the core keeps it until then */
    }
    if (!grant.revoked) {
        take_back();
    }
    if (quiet) {
        grant.id++;
        grant.access = 3;
        grant.key[3]++;
        attachments = 0;
        atomic_store(&grant.revoked, false);
    }
}

static void act(initiator *i) {
    static const uint8_t types[] = {SHM_IMPORT, SHM_DROP, SHM_REVOKED, SHM_NOTIFY, SHM_IMPORT, SHM_NOTIFY};
    uint8_t what = (uint8_t)take(i, 1);
    switch (what % 16) {
    case 0:
        send_message(i, (uint8_t)take(i, 1), (uint8_t)take(i, 1));
        break;
    case 1:
        if (!grant.revoked) {
            take_back();
        }
        break;
    case 2:
        grant_again();
        break;
    case 3:
        read_some(i);
        break;
    case 4:
        notify_room = what / 16;
        (void)!write(wake_fd, &(uint64_t){1}, 8);
        break;
    case 5:
        grant.access = 1 + what / 16 % 3;
        break;
    case 6:
        region.memfd = what / 16 % 2 ? -1 : memfd;
        break;
    case 7:
        if (what / 16 < 4) {
            send_message(i, SHM_BYE, 0);
        }
        break;
    default:
        send_message(i, types[what / 16 % 6], what % 2 ? 0 : (uint8_t)take(i, 1));
    }
    progress(1 + what % 2);
}

static void clean_up(void) {
    unlink(address.sun_path);
    rmdir(directory);
}

static void setup(void) {
    static char why[256];
    kvx_transport_info info;
    FUZZ_CHECK(mkdtemp(directory) != NULL);
    memory = malloc(LENGTH + 2 * GUARD);
    region = (kvx_region){.id = 1, .generation = 77, .base = memory + GUARD, .length = LENGTH, .memfd = -1};
    memfd = memfd_create("fuzz", MFD_CLOEXEC);
    FUZZ_CHECK(memfd >= 0 && ftruncate(memfd, LENGTH) == 0);
    grant = (kvx_grant){.id = 1, .region = &region, .length = LENGTH, .access = 3};
    config = (kvx_engine_config){.socket_dir = directory,
                                 .accepted_max = 2,
                                 .grants_max = HANDLES - 2,
                                 .connect_ms = 1000,
                                 .handshake_ms = 1000,
                                 .cancel_ms = 1000};
    wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    FUZZ_CHECK(kvx_transport_shm.open(NULL, 0, &config, &transport, why, sizeof why) == KVX_OK);
    kvx_transport_shm.query(transport, &info);
    address.sun_family = AF_UNIX;
    snprintf(address.sun_path, sizeof address.sun_path, "%.100s", strchr(info.endpoint, '/'));
    atexit(clean_up);
}

static int descriptors(void) {
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    FUZZ_CHECK(folder != NULL);
    while (readdir(folder) != NULL) {
        count++;
    }
    closedir(folder);
    return count;
}

static void once(const uint8_t *data, size_t size) {
    initiator one = {.data = data, .size = size, .fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)};
    FUZZ_CHECK(one.fd >= 0 && connect(one.fd, (struct sockaddr *)&address, sizeof address) == 0);
    memset(one.mine, (int)take(&one, 1), sizeof one.mine);
    progress(1);
    if (take(&one, 1) % 16 != 0) {
        send_message(&one, SHM_HELLO, 0);
        progress(1);
        read_some(&one);
    }
    while (one.size > 0) {
        act(&one);
    }
    progress(2);
    close(one.fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (transport == NULL) {
        setup();
    }
    int before = descriptors();
    notify_room = 3;
    once(data, size);
    for (int i = 0; i < 50 && (attachments > 0 || counters.peers_accepted > 0 || descriptors() != before); i++) {
        notify_room = 8; /* whatever waited for room goes on */
        (void)!write(wake_fd, &(uint64_t){1}, 8);
        progress(1);
    }
    FUZZ_CHECK(accesses == 0 && attachments == 0 && counters.peers_accepted == 0);
    FUZZ_CHECK(descriptors() == before);
    FUZZ_CHECK(!grant.revoked || quiet);
    grant_again();
    grant.access = 3;
    return 0;
}

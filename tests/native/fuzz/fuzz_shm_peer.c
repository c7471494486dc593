/* fuzz_shm_peer.c: an initiator of the shm transport against an owner that lies as the input says: files that are
 * right, too short, not sealed or none at all, addresses, refusals, answers to nobody, messages with any field
 * anything, with a code and without, descriptors in odd numbers, revokes, silence, a sudden end.
 *
 * What the initiator promises is in fuzz_dials.h; besides, nothing outside of the memory of ops and of the owner's own
 * files changes, and no descriptor and no mapping is left when the peer is closed. */
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
#define FUZZ_DIALS
#define LENGTH 65536
#include "fuzz_core.h"
#include "fuzz_dials.h"
#include "fuzz_shm.h"

#define ASKED_MAX 64
#define FILES     5

struct stranger {
    const uint8_t *data;
    size_t size;
    int fd;
    uint64_t counter;
    uint8_t mine[KVX_NONCE_BYTES], theirs[KVX_NONCE_BYTES];
    shm_message asked[ASKED_MAX]; /* the latest of them, in a ring */
    uint32_t count;
};

static int listener;
static int files[FILES]; /* as long as the grant; twice; too short; not sealed; no file */
static uint8_t *attached_memory;
static uint8_t probe[KVX_NONCE_BYTES] = "what is looked f";
static char directory[] = "/tmp/kvxfuzzXXXXXX";
static char path[sizeof directory + 8];
static kvx_job *jobs_first, **jobs_last = &jobs_first;

/* -- the core: its pool is this thread ----------------------------------------------------------------------------- */

void kvx_core_job_post(kvx_core *core, kvx_job *job) {
    (void)core;
    job->next = NULL;
    *jobs_last = job;
    jobs_last = &job->next;
}

void kvx_core_wake(kvx_core *core, uint32_t slot, uint32_t thread) {
    (void)core, (void)slot, (void)thread;
    (void)!write(wake_fd, &(uint64_t){1}, 8);
}
void kvx_mapping_hide(kvx_import *import) {
    import->mapping = NULL;
}
void kvx_view_drop(kvx_core *core, uint64_t import, void *base, uint64_t length) {
    (void)core, (void)import;
    FUZZ_CHECK(munmap(base, length) == 0);
}
static void progress(int times) {
    for (int i = 0; i < times; i++) {
        dials_ops->progress(dials_transport, 0, 0);
        kvx_job *job = jobs_first;
        if (job != NULL) {
            jobs_first = job->next;
            jobs_last = jobs_first == NULL ? &jobs_first : jobs_last;
            job->run(job);
        }
    }
}

/* -- the owner ----------------------------------------------------------------------------------------------------- */

static uint64_t take(stranger *s, size_t width) {
    uint64_t value = 0;
    for (size_t i = 0; i < width && s->size > 0; i++, s->data++, s->size--) {
        value = value << 8 | *s->data;
    }
    return value;
}

static void code(const stranger *s, const uint8_t *key, const shm_message *message, bool ours, uint8_t *mac) {
    uint64_t direction = !ours; /* 1: from the dialler */
    kvx_mac_state state;
    kvx_mac_init(&state, key);
    kvx_mac_update(&state, s->theirs, KVX_NONCE_BYTES);
    kvx_mac_update(&state, s->mine, KVX_NONCE_BYTES);
    kvx_mac_update(&state, &direction, sizeof direction);
    kvx_mac_update(&state, message, offsetof(shm_message, mac));
    kvx_mac_final(&state, mac);
}

/* What an initiator says is right, always. */
static void hear(stranger *s, const shm_message *message) {
    uint8_t mac[KVX_MAC_BYTES];
    FUZZ_CHECK(message->magic == SHM_MAGIC && message->type > 0 && message->type < SHM_TYPES && message->status == 0);
    if (message->type == SHM_HELLO) {
        memcpy(s->theirs, message->hello.nonce, sizeof s->theirs);
    } else if (message->type != SHM_BYE) {
        code(s, secret_key, message, false, mac);
        FUZZ_CHECK(message->handle != 0 && kvx_mac_equal(mac, message->mac));
    }
    if (message->type == SHM_IMPORT || message->type == SHM_NOTIFY) {
        s->asked[s->count++ % ASKED_MAX] = *message;
    }
}

static void read_some(stranger *s) {
    shm_message message;
    while (s->fd >= 0 && recv(s->fd, &message, sizeof message, MSG_DONTWAIT) == sizeof message) {
        hear(s, &message);
    }
}

static void send_bytes(const stranger *s, const void *bytes, size_t size, const int *fds, uint32_t count) {
    struct iovec vector = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = size};
    union {
        struct cmsghdr header;
        uint8_t space[CMSG_SPACE(6 * sizeof(int))];
    } control = {0};
    struct msghdr out = {.msg_iov = &vector, .msg_iovlen = 1};
    if (count > 0) {
        out.msg_control = &control;
        out.msg_controllen = CMSG_SPACE(count * sizeof(int));
        struct cmsghdr *header = CMSG_FIRSTHDR(&out);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(count * sizeof(int));
        memcpy(CMSG_DATA(header), fds, count * sizeof(int));
    }
    (void)!sendmsg(s->fd, &out, MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* `how` % 16: what of it is not as it should be. */
static void send_message(stranger *s, shm_message *message, uint8_t how, const int *fds, uint32_t count) {
    uint8_t key[KVX_KEY_BYTES], bytes[sizeof *message + 8] = {0};
    memcpy(key, secret_key, sizeof key);
    message->magic = SHM_MAGIC;
    message->version = SHM_VERSION + (how % 16 == 1);
    message->counter = ++s->counter + (how % 16 == 2);
    if (how % 16 == 3) { /* any field, and the code is right all the same */
        ((uint8_t *)message)[take(s, 1) % offsetof(shm_message, mac)] ^= (uint8_t)(1 << take(s, 1) % 8);
    }
    key[0] ^= how % 16 == 4;
    bool plain = message->type == SHM_HELLO || message->type == SHM_BYE || message->type == SHM_FORGET;
    if (!plain && how % 16 != 5) {
        code(s, key, message, true, message->mac);
    }
    memcpy(bytes, message, sizeof *message);
    if (how % 16 == 6) {
        bytes[take(s, 1) % sizeof *message] ^= (uint8_t)(1 << take(s, 1) % 8);
    }
    if (s->counter == 1) { /* what of the greeting is not as it should be may be the nonce */
        memcpy(s->mine, bytes + offsetof(shm_message, hello), sizeof s->mine);
    }
    size_t size = how % 16 == 7 ? take(s, 1) % sizeof bytes : sizeof *message;
    int wrong[6] = {wake_fd, wake_fd, wake_fd, wake_fd, wake_fd, wake_fd};
    if (how % 16 == 8) {
        count = (uint32_t)take(s, 1) % 6;
        wrong[0] = fds != NULL ? *fds : wrong[0];
        fds = wrong;
    }
    send_bytes(s, bytes, size, fds, count);
}

static void send_imported(stranger *s, uint64_t handle, uint8_t how) {
    uint8_t what = (uint8_t)take(s, 1);
    shm_message answer = {.type = SHM_IMPORTED, .handle = handle};
    const int *file = NULL;
    switch (what % 8) {
    case 0:
        answer.status = (int32_t)take(s, 2);
        answer.sys_errno = what & 64 ? (int32_t)take(s, 2) : 0;
        break;
    case 1:
    case 2: /* addresses of our own: any others would be those of the process that plays both sides */
        answer.how = SHM_BY_ATTACH;
        answer.attached.at = what & 8 ? UINT64_MAX - take(s, 2) : (uintptr_t)attached_memory;
        answer.attached.probe_address = what & 16 ? take(s, 2) : (uintptr_t)probe;
        memcpy(answer.attached.probe, probe, sizeof probe);
        answer.attached.probe[0] ^= what >> 5 & 1;
        break;
    default:
        answer.how = SHM_BY_MAPPING;
        answer.mapped.at = what & 128 ? take(s, 8) : what & 64 ? take(s, 2) : 0;
        answer.mapped.region = 1 + what / 8 % 2;
        file = &files[what / 16 % 4 == 3 ? take(s, 1) % FILES : what / 16 % 2];
    }
    send_message(s, &answer, how, file, file != NULL);
}

static void answer(stranger *s, uint8_t how) {
    read_some(s);
    if (s->count == 0) {
        return;
    }
    uint32_t latest = s->count - 1, back = how / 16 % 4;
    const shm_message asked = s->asked[(latest - (back < latest ? back : latest)) % ASKED_MAX];
    if (asked.type == SHM_IMPORT) {
        send_imported(s, asked.handle, how);
    } else {
        shm_message told = {.type = SHM_NOTIFIED, .handle = asked.handle, .notify.token = asked.notify.token};
        told.status = how & 128 ? KVX_E_REVOKED : 0;
        send_message(s, &told, how, NULL, 0);
    }
}

/* About a handle that there may be. */
static void say(stranger *s, uint8_t type, uint8_t how) {
    shm_message message = {.type = type};
    const used *about = &imports[how / 16 % IMPORTS];
    bool no_handle = type == SHM_HELLO || type == SHM_FORGET || type == SHM_BYE;
    message.handle = no_handle ? 0 : about->taken && how < 224 ? about->import.id : 1 + take(s, 1);
    if (type == SHM_FORGET) {
        message.mapped.region = how / 16 % 4;
    }
    if (type == SHM_HELLO) {
        memcpy(message.hello.nonce, s->mine, sizeof s->mine);
        message.status = how & 16 ? (int32_t)take(s, 2) : 0;
    }
    send_message(s, &message, how, NULL, 0);
}

static void act(stranger *s) {
    static const uint8_t types[] = {SHM_REVOKE, SHM_FORGET, SHM_REVOKE, SHM_BYE, SHM_NOTIFIED};
    uint8_t what = (uint8_t)take(s, 1);
    switch (what % 16) {
    case 0:
        say(s, (uint8_t)take(s, 1), (uint8_t)take(s, 1));
        break;
    case 1:
    case 2:
        import_one(s);
        break;
    case 3:
    case 4:
    case 5:
        submit_one(s);
        break;
    case 6:
        cancel_one(&ops[what / 16 % OPS]);
        kvx_core_wake(NULL, 0, 0);
        break;
    case 7:
        release_one(s);
        break;
    case 8:
        clock_ms += UINT64_C(20) << what / 16 % 8;
        break;
    case 9:
        if (what / 64 == 0) {
            close_peer();
        } else if (what / 64 == 1 && s->fd >= 0) {
            close(s->fd);
            s->fd = -1;
        }
        break;
    case 10:
        say(s, types[what / 16 % 5], (uint8_t)take(s, 1));
        break;
    default:
        answer(s, (uint8_t)take(s, 1));
    }
    progress(1 + what / 16 % 3);
    rooms_check();
}

/* -- setup -----------------------------------------------------------------------------------------------------------
 */

static int file_make(uint64_t length, bool sealed) {
    int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    FUZZ_CHECK(fd >= 0 && ftruncate(fd, (off_t)length) == 0);
    FUZZ_CHECK(!sealed || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    return fd;
}

static void clean_up(void) {
    unlink(path);
    rmdir(directory);
}

static void setup(void) {
    static char why[256];
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    kvx_transport_info info;
    FUZZ_CHECK(mkdtemp(directory) != NULL);
    memory = malloc(LENGTH + 2 * GUARD);
    memset(memory, 0xa5, LENGTH + 2 * GUARD);
    attached_memory = malloc(LENGTH);
    memset(attached_memory, 0x11, LENGTH);
    region = (kvx_region){.id = 1, .generation = 1, .base = memory + GUARD, .length = LENGTH, .memfd = -1};
    config = (kvx_engine_config){.socket_dir = directory,
                                 .accepted_max = 2,
                                 .grants_max = 8,
                                 .inline_bytes_max = 1024,
                                 .chunk_bytes = 4096,
                                 .copy_threads = 2,
                                 .nt_bytes_min = 1 << 20,
                                 .connect_ms = 1000,
                                 .handshake_ms = 1000,
                                 .cancel_ms = 1000};
    files[0] = file_make(LENGTH, true);
    files[1] = file_make(2 * LENGTH, true);
    files[2] = file_make(LENGTH - 4096, true);
    files[3] = file_make(LENGTH, false);
    files[4] = open("/dev/zero", O_RDWR | O_CLOEXEC);
    wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    dials_ops = &kvx_transport_shm;
    dials_flags = KVX_OP_CHECK;
    FUZZ_CHECK(dials_ops->open(NULL, 0, &config, &dials_transport, why, sizeof why) == KVX_OK);
    dials_ops->query(dials_transport, &info);
    snprintf(path, sizeof path, "%s/o", directory);
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    FUZZ_CHECK(bind(listener, (struct sockaddr *)&address, sizeof address) == 0 && listen(listener, 4) == 0);
    snprintf(peer.endpoint, sizeof peer.endpoint, "%.33s%s", info.endpoint, path);
    atexit(clean_up);
    const char *own = strchr(info.endpoint, '/');
    FUZZ_CHECK(own != NULL && unlink(own) == 0); /* nobody comes to our own listener, and the folder can go */
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

/* Of the owner's files, in this process. */
static int mappings(void) {
    static char line[4096];
    int count = 0;
    FILE *list = fopen("/proc/self/maps", "re");
    FUZZ_CHECK(list != NULL);
    while (fgets(line, sizeof line, list) != NULL) {
        count += strstr(line, "memfd:fuzz") != NULL;
    }
    fclose(list);
    return count;
}

static void meet(stranger *s) {
    for (int turns = 0; turns < 100 && s->fd < 0; turns++) {
        progress(1);
        s->fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    }
    FUZZ_CHECK(s->fd >= 0);
    progress(1);
    read_some(s);
    uint8_t how = (uint8_t)take(s, 1);
    memset(s->mine, how, sizeof s->mine);
    say(s, SHM_HELLO, how % 16 < 9 ? how & ~16 : 0);
    progress(2);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    stranger s = {.data = data, .size = size, .fd = -1};
    if (dials_transport == NULL) {
        setup();
    }
    int open_before = descriptors();
    uint32_t before = kvx_crc32c(0, memory, GUARD), after = kvx_crc32c(0, memory + GUARD + LENGTH, GUARD);
    dials_begin();
    meet(&s);
    while (s.size > 0) {
        act(&s);
    }
    if (s.fd >= 0) {
        close(s.fd);
    }
    for (int i = 0; i < OPS; i++) {
        cancel_one(&ops[i]);
    }
    close_peer();
    for (int i = 0; i < 2000 && (!closed || jobs_first != NULL); i++) {
        clock_ms += 100;
        kvx_core_wake(NULL, 0, 0);
        progress(1);
    }
    FUZZ_CHECK(closed && live_ops(NULL) == 0 && descriptors() == open_before);
    FUZZ_CHECK(mappings() == 0);
    rooms_check();
    FUZZ_CHECK(before == kvx_crc32c(0, memory, GUARD) && after == kvx_crc32c(0, memory + GUARD + LENGTH, GUARD));
    return 0;
}

/* fuzz_serve.c: a whole owner against a dialler that follows the input: right and damaged requests, stalls, cuts,
 * revokes.
 *
 * The transport is the real one, stepped by hand; the core below it is a stub with one grant at a time, in the middle
 * of guarded memory. Properties: no byte outside the grant ever changes; none inside does after the revoke was reported
 * quiet; every access that was begun is ended and every attachment detached when the connection is gone; and the
 * sanitizers are silent. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "fuzz.h"
#include "fuzz_core.h"
#include "fuzz_frames.h"
#include "fuzz_tcp.h"
#include "proto/stream.h"
#ifdef SEALED
#include "proto/seal.h"
#endif

/* -- the dialler ------------------------------------------------------------------------------------------------ */

static void *transport;
static struct sockaddr_in address;

typedef struct dialler {
    const uint8_t *data;
    size_t size;
    int fd;
    kvx_stream_auth auth;
    uint64_t counter;
    uint8_t nonce[KVX_NONCE_BYTES];
#ifdef SEALED
    kvx_seal seal;
    bool sealed; /* there are keys */
#endif
} dialler;

static uint64_t take(dialler *d, size_t width) {
    uint64_t value = 0;
    for (size_t i = 0; i < width && d->size > 0; i++, d->data++, d->size--) {
        value = value << 8 | *d->data;
    }
    return value;
}

static void progress(int times) {
    for (int i = 0; i < times; i++) {
        kvx_transport_tcp.progress(transport, 0, 0);
    }
}

static void read_some(dialler *d) {
    static uint8_t bytes[1 << 16];
    while (recv(d->fd, bytes, sizeof bytes, MSG_DONTWAIT) > 0) {
    }
}

static void send_raw(dialler *d, const uint8_t *bytes, size_t size) {
    for (int turns = 0; size > 0 && turns < 1000; turns++) {
        ssize_t sent = send(d->fd, bytes, size, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN) {
            return;
        }
        if (sent > 0) {
            bytes += sent;
            size -= (size_t)sent;
        } else {
            progress(1);
            read_some(d);
        }
    }
}

#ifdef SEALED
static uint8_t secret[KVX_SECRET_BYTES];

/* In records as long as the input says; now and then one that is no record, or not what was sealed. */
static void send_all(dialler *d, const uint8_t *bytes, size_t size) {
    static uint8_t record[KVX_SEAL_TEXT_MAX + KVX_SEAL_EXTRA_BYTES];
    if (!d->sealed) {
        send_raw(d, bytes, size);
        return;
    }
    uint8_t how = (uint8_t)take(d, 1);
    uint64_t most = how % 4 == 0 ? KVX_SEAL_TEXT_MAX : 1 + take(d, 1 + how % 2) % 3000;
    while (size > 0) {
        uint32_t length = (uint32_t)(size < most ? size : most);
        struct iovec vector = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = length};
        FUZZ_CHECK(kvx_seal_record(&d->seal.out, &vector, length, record));
        if (how / 4 == 1) {
            record[take(d, 2) % (length + KVX_SEAL_EXTRA_BYTES)] ^= (uint8_t)(1 << take(d, 1) % 8);
        }
        send_raw(d, record,
                 how / 4 == 2 ? take(d, 2) % (length + KVX_SEAL_EXTRA_BYTES) : length + KVX_SEAL_EXTRA_BYTES);
        if (how / 4 == 3) {
            send_raw(d, record, length + KVX_SEAL_EXTRA_BYTES);
        }
        bytes += length;
        size -= length;
    }
}

/* What the owner answers is not looked at: its records are opened by others. */
static void greet(dialler *d) {
    uint8_t greeting[2 * KVX_STREAM_SEALED_HELLO_BYTES], confirm[KVX_SEAL_EXTRA_BYTES];
    uint8_t *theirs = greeting + KVX_STREAM_SEALED_HELLO_BYTES;
    kvx_hello hello = {
        .version = KVX_STREAM_VERSION_SEALED, .role = KVX_STREAM_DIALLER, .streams = 1, .frame_bytes = LENGTH};
    memcpy(hello.nonce, d->nonce, KVX_NONCE_BYTES);
    FUZZ_CHECK(kvx_seal_begin(&d->seal, kvx_libcrypto_get(NULL, 0), hello.share));
    kvx_hello_encode_sealed(&hello, greeting);
    send_raw(d, greeting, KVX_STREAM_SEALED_HELLO_BYTES);
    for (int i = 0; i < 20 && !d->sealed; i++) {
        progress(1);
        d->sealed = recv(d->fd, theirs, KVX_STREAM_SEALED_HELLO_BYTES, MSG_DONTWAIT) == KVX_STREAM_SEALED_HELLO_BYTES;
    }
    if (d->sealed) {
        FUZZ_CHECK(kvx_seal_agree(&d->seal, KVX_STREAM_DIALLER, secret, greeting, theirs + KVX_STREAM_HELLO_BYTES,
                                  d->auth.nonces));
        if (take(d, 1) % 16 != 0) {
            FUZZ_CHECK(kvx_seal_record(&d->seal.out, NULL, 0, confirm));
            send_raw(d, confirm, sizeof confirm);
        }
    }
}
#else
static void send_all(dialler *d, const uint8_t *bytes, size_t size) {
    send_raw(d, bytes, size);
}

static void greet(dialler *d) {
    uint8_t bytes[KVX_STREAM_HELLO_BYTES];
    kvx_hello hello = {.version = 1, .role = KVX_STREAM_DIALLER, .streams = 1, .frame_bytes = LENGTH};
    memcpy(hello.nonce, d->nonce, KVX_NONCE_BYTES);
    kvx_hello_encode(&hello, bytes);
    send_all(d, bytes, sizeof bytes);
    for (int i = 0; i < 20; i++) {
        progress(1);
        if (recv(d->fd, bytes, sizeof bytes, MSG_DONTWAIT) == sizeof bytes) {
            memcpy(d->auth.nonces, d->nonce, KVX_NONCE_BYTES);
            memcpy(d->auth.nonces + KVX_NONCE_BYTES, bytes + 28, KVX_NONCE_BYTES);
            return;
        }
    }
}
#endif

/* A frame that is right, unless `how` says otherwise; it may be cut or damaged afterwards. */
static void send_frame(dialler *d, uint8_t type, uint8_t how) {
    static uint8_t bytes[KVX_STREAM_HEAD_MAX + 4 * LENGTH];
    uint64_t length = 0;
    uint32_t count = type == KVX_FRAME_PUT || type == KVX_FRAME_GET ? 1 + (uint32_t)take(d, 1) % 6 : 0;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t part = 1 + take(d, 2) % (LENGTH / 6);
        uint64_t offset = how % 16 == 1 ? take(d, 8) : take(d, 2) % (LENGTH - part + (how % 16 == 2 ? 64 : 1));
        kvx_frame_segment_encode(bytes, i, offset, part);
        length += part;
    }
    kvx_frame frame = {.type = type,
                       .segments = count,
                       .op = take(d, 1),
                       .grant = grant.id + (how % 16 == 3),
                       .generation = region.generation + (how % 16 == 4),
                       .length = length,
                       .flags = (uint16_t)(count == 0              ? 0
                                           : type == KVX_FRAME_PUT ? how / 16 % 4
                                                                   : how / 16 % 2 * 2),
                       .tag = how % 16 == 5 ? take(d, 4) : 1,
                       .value = how % 16 == 6 ? take(d, 8) : LENGTH};
    fuzz_frame_trim(KVX_STREAM_DIALLER, &frame);
    if (how % 16 == 11) {
        uint32_t field = (uint32_t)take(d, 1);
        fuzz_frame_spoil(&frame, field, take(d, 1 + field / 32));
    }
    kvx_frame_encode(&frame, bytes);
    uint8_t key[KVX_KEY_BYTES];
    memcpy(key, grant.key, sizeof key);
    key[0] ^= how % 16 == 7;
    uint64_t size = KVX_STREAM_HEADER_BYTES + count * KVX_STREAM_SEGMENT_BYTES;
    kvx_frame_seal(&d->auth, key, ++d->counter, KVX_STREAM_DIALLER, bytes, size);
    if (type == KVX_FRAME_PUT) {
        memset(bytes + size, (int)take(d, 1), length);
        size += length;
        kvx_trailer_encode(&d->auth, key, ++d->counter, KVX_STREAM_DIALLER, 0, (uint32_t)take(d, 1), bytes + size);
        size += KVX_STREAM_TRAILER_BYTES;
    }
    if (how % 16 == 8) {
        bytes[take(d, 2) % size] ^= (uint8_t)(1 << take(d, 1) % 8);
    }
    uint64_t cut = how % 16 == 9 ? take(d, 2) % size : size;
    send_all(d, bytes, cut);
    if (how % 16 == 10) {
        progress(2); /* the rest comes later or, after a cut, never */
    }
}

static uint64_t sum(const uint8_t *bytes, uint64_t length) {
    return kvx_crc32c(1, bytes, length);
}

/* Taken back, quiet, given to somebody else: from then on nothing may change until there is a new grant. */
static void take_back(void) {
    atomic_store(&grant.revoked, true);
    quiet = kvx_transport_tcp.mem_release(transport, &region, &grant) == KVX_OK;
    for (int i = 0; i < 10 && !quiet; i++) {
        progress(1);
    }
    FUZZ_CHECK(quiet && accesses == 0);
    memset(memory + GUARD, 0x5a, LENGTH);
}

static void grant_again(void) {
    if (grant.revoked) {
        for (uint64_t i = 0; i < LENGTH; i++) {
            FUZZ_CHECK(memory[GUARD + i] == 0x5a);
        }
    }
    grant.id++;
    grant.access = 3;
    grant.key[3]++;
    attachments = 0;
    atomic_store(&grant.revoked, false);
}

static void setup(void) {
    static char why[256];
    kvx_transport_info info;
    memory = malloc(LENGTH + 2 * GUARD);
    memset(memory, 0xa5, LENGTH + 2 * GUARD);
    region = (kvx_region){.id = 1, .generation = 77, .base = memory + GUARD, .length = LENGTH, .memfd = -1};
    grant.region = &region;
    grant.length = LENGTH;
    config = (kvx_engine_config){.tcp_bind = "127.0.0.1",
                                 .tcp_congestion = "",
                                 .tcp_threads = 1,
                                 .tcp_streams = 1,
                                 .accepted_max = 1000,
                                 .frame_bytes = LENGTH,
                                 .connect_ms = 1000,
                                 .handshake_ms = 1000,
                                 .cancel_ms = 1000};
#ifdef SEALED
    config.flags = KVX_ENGINE_ENCRYPT;
#endif
    wake_fd = eventfd(0, EFD_NONBLOCK);
    FUZZ_CHECK(kvx_transport_tcp.open(NULL, 0, &config, &transport, why, sizeof why) == KVX_OK);
    kvx_transport_tcp.query(transport, &info);
#ifdef SEALED
    memcpy(secret, info.secret, sizeof secret);
#endif
    address.sin_family = AF_INET;
    address.sin_port = htons((uint16_t)atoi(strrchr(info.endpoint, ':') + 1));
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
}

static void act(dialler *d) {
    static const uint8_t types[] = {KVX_FRAME_PUT, KVX_FRAME_GET, KVX_FRAME_NOTIFY, KVX_FRAME_ATTACH, KVX_FRAME_DETACH};
    uint8_t what = (uint8_t)take(d, 1), raw[64];
    switch (what % 16) {
    case 0:
        for (size_t i = 0; i < sizeof raw; i++) {
            raw[i] = (uint8_t)take(d, 1);
        }
        send_all(d, raw, sizeof raw);
        break;
    case 1:
        take_back();
        break;
    case 2:
        grant_again();
        break;
    case 3:
        read_some(d);
        break;
    case 4:
        notify_room = what / 16;
        (void)!write(wake_fd, &(uint64_t){1}, 8);
        break;
    case 5:
        grant.access = 1 + what / 16 % 3;
        break;
    case 6:
        send_frame(d, what / 16 == 0 ? KVX_FRAME_BYE : KVX_FRAME_PUT, 0);
        break;
    default:
        send_frame(d, types[what / 16 % 5], what % 2 ? (uint8_t)(take(d, 1) & 0xf0) : (uint8_t)take(d, 1));
    }
    progress(1 + what % 3);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (transport == NULL) {
        setup();
    }
    memset(memory, 0xa5, LENGTH + 2 * GUARD);
    atomic_store(&grant.revoked, false);
    grant_again();
    notify_room = 3;
    uint64_t before = sum(memory, GUARD), after = sum(memory + GUARD + LENGTH, GUARD);
    dialler d = {.data = data, .size = size, .fd = socket(AF_INET, SOCK_STREAM, 0)};
    struct linger linger = {.l_onoff = 1};
    setsockopt(d.fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger); /* no TIME_WAIT, there are many of us */
    setsockopt(d.fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    FUZZ_CHECK(d.fd >= 0);
    if (connect(d.fd, (struct sockaddr *)&address, sizeof address) != 0) {
        FUZZ_CHECK(errno == EADDRNOTAVAIL); /* we use up local ports by the thousand a second */
        close(d.fd);
        return 0;
    }
    progress(1);
    if (take(&d, 1) % 16 != 0) {
        greet(&d);
    }
    while (d.size > 0) {
        act(&d);
    }
    progress(3);
    close(d.fd);
#ifdef SEALED
    kvx_seal_end(&d.seal);
#endif
    for (int i = 0; i < 200 && (accesses > 0 || attachments > 0 || counters.peers_accepted > 0); i++) {
        progress(1);
    }
    FUZZ_CHECK(accesses == 0 && counters.peers_accepted == 0);
    FUZZ_CHECK(attachments == 0 || grant.revoked);
    FUZZ_CHECK(before == sum(memory, GUARD) && after == sum(memory + GUARD + LENGTH, GUARD));
    grant_again();
    return 0;
}

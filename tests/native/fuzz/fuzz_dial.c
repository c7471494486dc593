/* fuzz_dial.c: a dialler of tcp against an owner that lies as the input says: answers that are right, of other
 * requests, of segments that there are not, without a key or with a wrong one, any field of them anything, damaged, cut
 * short, in hellos too; silence, cancels and sudden ends between them.
 *
 * The owner reads what it is asked with the engine's own parser, so that its lies are about real requests. What the
 * dialler promises is in fuzz_dials.h; besides, no byte outside of the memory of ops ever changes. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "fuzz.h"
#define FUZZ_DIALS
#define FUZZ_OWNS
#define LENGTH 65536
#include "fuzz_core.h"
#include "fuzz_dials.h"
#include "fuzz_frames.h"
#include "fuzz_tcp.h"
#include "proto/stream.h"

#define STREAMS   2
#define FRAME     4096
#define ASKED_MAX 64
#define OUT_MAX   (KVX_STREAM_HEAD_MAX + FRAME + KVX_STREAM_TRAILER_BYTES)

/* -- the owner thread is this one ------------------------------------------------------------- */

static int owner_set;
static bool submitting;
static void (*owner_turn)(void *transport);

int kvx_core_owner_set(kvx_core *core, uint32_t slot, void (*turn)(void *transport), void *transport) {
    (void)core, (void)slot, (void)transport;
    owner_turn = turn;
    return owner_set;
}
bool kvx_op_in_submit(const kvx_op *op) {
    (void)op;
    return submitting;
}

/* -- the owner ----------------------------------------------------------------------------------------------------- */

typedef struct line {
    int fd;
    bool greeted;
    kvx_stream_auth auth;
    uint64_t counter;
    uint8_t nonce[KVX_NONCE_BYTES];
    kvx_frame asked[ASKED_MAX];
    uint32_t first, count;
    kvx_stream_rx rx;
} line;

struct stranger {
    const uint8_t *data;
    size_t size;
    line lines[STREAMS];
};

static int listener;
static stranger one_stranger; /* its parsers are large */

static uint64_t take(stranger *s, size_t width) {
    uint64_t value = 0;
    for (size_t i = 0; i < width && s->size > 0; i++, s->data++, s->size--) {
        value = value << 8 | *s->data;
    }
    return value;
}

static void progress(int times) {
    for (int i = 0; i < times; i++) {
        dials_ops->progress(dials_transport, 0, 0);
        owner_turn(dials_transport);
    }
}

static void send_all(const line *at, const uint8_t *bytes, size_t size) {
    for (int turns = 0; size > 0 && at->fd >= 0 && turns < 200; turns++) {
        ssize_t sent = send(at->fd, bytes, size, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN) {
            return;
        }
        bytes += sent > 0 ? sent : 0;
        size -= sent > 0 ? (size_t)sent : 0;
        progress(sent < 0);
    }
}

/* What a dialler says is right, always. */
static void hear(line *at) {
    for (;;) {
        const uint8_t *bytes;
        kvx_rx_event event = kvx_rx_next(&at->rx);
        FUZZ_CHECK(event != KVX_RX_ERROR);
        if (event == KVX_RX_HELLO) {
            memcpy(at->auth.nonces, at->rx.hello.nonce, KVX_NONCE_BYTES);
            memcpy(at->auth.nonces + KVX_NONCE_BYTES, at->nonce, KVX_NONCE_BYTES);
        } else if (event == KVX_RX_PAYLOAD) {
            kvx_rx_payload_taken(&at->rx, kvx_rx_buffered(&at->rx, &bytes), 0);
            if (at->rx.payload_left > 0) {
                return;
            }
        } else if (event == KVX_RX_FRAME) {
            uint8_t type = at->rx.frame.type;
            bool answered = type != KVX_FRAME_DETACH && type != KVX_FRAME_BYE;
            FUZZ_CHECK(!answered || at->count < ASKED_MAX);
            FUZZ_CHECK(type == KVX_FRAME_BYE || kvx_frame_open(&at->auth, secret_key, at->rx.counter,
                                                               KVX_STREAM_DIALLER, at->rx.head, at->rx.head_length));
            if (answered) {
                at->asked[(at->first + at->count++) % ASKED_MAX] = at->rx.frame;
            }
        } else if (event == KVX_RX_MORE) {
            return;
        }
    }
}

static void read_some(line *at) {
    for (int i = 0; i < 64 && at->fd >= 0; i++) {
        uint32_t space;
        uint8_t *to = kvx_rx_space(&at->rx, &space);
        ssize_t got = recv(at->fd, to, space, MSG_DONTWAIT);
        if (got <= 0) {
            return;
        }
        kvx_rx_received(&at->rx, (uint32_t)got);
        hear(at);
    }
}

static void hang_up(line *at) {
    if (at->fd >= 0) {
        close(at->fd);
        at->fd = -1;
    }
}

static void send_raw(stranger *s, const line *at) {
    uint8_t raw[64];
    for (size_t i = 0; i < sizeof raw; i++) {
        raw[i] = (uint8_t)take(s, 1);
    }
    send_all(at, raw, 1 + take(s, 1) % sizeof raw);
}

static void send_hello(stranger *s, line *at) {
    uint8_t bytes[KVX_STREAM_HELLO_BYTES], how = (uint8_t)take(s, 1);
    kvx_hello hello = {.version = KVX_STREAM_VERSION, .role = KVX_STREAM_ACCEPTOR, .streams = 1, .frame_bytes = FRAME};
    memset(at->nonce, how, sizeof at->nonce);
    memcpy(hello.nonce, at->nonce, KVX_NONCE_BYTES);
    if (how % 16 == 15) {
        uint32_t field = (uint32_t)take(s, 1);
        fuzz_hello_spoil(&hello, field, take(s, 1 + field / 32));
    }
    memcpy(at->nonce, hello.nonce, KVX_NONCE_BYTES);
    kvx_hello_encode(&hello, bytes);
    send_all(at, bytes, how % 16 == 14 ? take(s, 1) % sizeof bytes : sizeof bytes);
    at->greeted = true;
}

/* Truth or lie about a request; `how` % 16 says which. Returns the length of the head. */
static uint64_t answer_make(stranger *s, line *at, const kvx_frame *asked, uint8_t how, uint8_t *bytes) {
    static const int32_t statuses[] = {KVX_E_RANGE, KVX_E_KEY,   KVX_E_UNKNOWN, KVX_E_REVOKED,
                                       KVX_E_NOMEM, KVX_E_STALE, KVX_E_DEVICE,  KVX_E_CANCELLED};
    bool data = asked->type == KVX_FRAME_GET && (how % 16 < 2 || how % 16 > 6);
    kvx_frame frame = {.type = data ? KVX_FRAME_DATA : KVX_FRAME_ACK,
                       .op = asked->op,
                       .index = asked->index,
                       .segment = data ? 0 : KVX_SEGMENT_UNKNOWN,
                       .flags = data ? asked->flags & KVX_FRAME_F_CHECK : 0,
                       .length = data ? asked->length : 0};
    uint8_t key[KVX_KEY_BYTES];
    memcpy(key, secret_key, sizeof key);
    if (how % 16 >= 2 && how % 16 <= 6) {
        frame.status = how % 16 == 6 ? (int32_t)take(s, 4) : statuses[how / 16 % 8];
        frame.segment = how % 16 == 3 ? (uint32_t)take(s, 1) % 5 : how % 16 == 4 ? (uint32_t)take(s, 4) : frame.segment;
        frame.flags = how % 16 == 5 ? KVX_FRAME_F_BARE : 0;
    }
    if (how % 16 == 8) {
        uint32_t field = (uint32_t)take(s, 1);
        fuzz_frame_spoil(&frame, field, take(s, 1 + field / 32));
    }
    key[0] ^= how % 16 == 7;
    kvx_frame_encode(&frame, bytes);
    for (uint32_t i = 0; i < frame.segments; i++) { /* a lie: no answer has any */
        kvx_frame_segment_encode(bytes, i, take(s, 1), 1);
    }
    uint64_t size = KVX_STREAM_HEADER_BYTES + frame.segments * KVX_STREAM_SEGMENT_BYTES;
    kvx_frame_seal(&at->auth, key, ++at->counter, KVX_STREAM_ACCEPTOR, bytes, size);
    return size;
}

static void answer(stranger *s, line *at) {
    static uint8_t bytes[OUT_MAX + KVX_STREAM_SEGMENTS_MAX];
    uint8_t how = (uint8_t)take(s, 1);
    read_some(at);
    if (at->count == 0) {
        return;
    }
    uint32_t which = how % 16 == 9 ? (uint32_t)take(s, 1) % at->count : 0;
    const kvx_frame asked = at->asked[(at->first + which) % ASKED_MAX];
    uint64_t size = answer_make(s, at, &asked, how, bytes);
    if (asked.type == KVX_FRAME_GET && (how % 16 < 2 || how % 16 > 6) && asked.length <= FRAME) {
        uint8_t fill = (uint8_t)take(s, 1);
        memset(bytes + size, fill, asked.length);
        uint32_t crc = asked.flags & KVX_FRAME_F_CHECK ? kvx_crc32c(0, bytes + size, asked.length) : 0;
        size += asked.length;
        kvx_trailer_encode(&at->auth, secret_key, ++at->counter, KVX_STREAM_ACCEPTOR,
                           how % 16 == 10 ? (int32_t)take(s, 4) : 0, crc ^ (how % 16 == 11), bytes + size);
        size += KVX_STREAM_TRAILER_BYTES;
    }
    if (how % 16 == 12) {
        bytes[take(s, 2) % size] ^= (uint8_t)(1 << take(s, 1) % 8);
    }
    send_all(at, bytes, how % 16 == 13 ? take(s, 2) % size : size);
    if (how % 16 != 14) { /* otherwise it is answered again */
        at->first = (at->first + 1) % ASKED_MAX;
        at->count--;
    }
}

static void goodbye(line *at) {
    uint8_t bytes[KVX_STREAM_HEADER_BYTES];
    kvx_frame bye = {.type = KVX_FRAME_BYE};
    kvx_frame_encode(&bye, bytes);
    at->counter++;
    send_all(at, bytes, sizeof bytes);
}

static void act(stranger *s) {
    uint8_t what = (uint8_t)take(s, 1);
    line *at = &s->lines[what / 16 % STREAMS];
    switch (what % 16) {
    case 0:
        send_raw(s, at);
        break;
    case 1:
        import_one(s);
        break;
    case 2:
    case 3:
    case 4:
        submitting = what & 128;
        submit_one(s);
        submitting = false;
        break;
    case 5:
        cancel_one(&ops[what / 16 % OPS]);
        (void)!write(wake_fd, &(uint64_t){1}, 8);
        break;
    case 6:
        release_one(s);
        break;
    case 7:
        clock_ms += UINT64_C(20) << what / 16 % 8;
        break;
    case 8:
        read_some(at);
        break;
    case 9:
        if (what / 32 == 0) {
            close_peer();
        } else if (what / 32 == 1) {
            hang_up(at);
        } else if (what / 32 == 2) {
            goodbye(at);
        }
        break;
    default:
        answer(s, at);
    }
    progress(1 + what / 16 % 3);
    rooms_check();
}

static void setup(void) {
    static char why[256];
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t length = sizeof address;
    memory = malloc(LENGTH + 2 * GUARD);
    memset(memory, 0xa5, LENGTH + 2 * GUARD);
    region = (kvx_region){.id = 1, .generation = 1, .base = memory + GUARD, .length = LENGTH, .memfd = -1};
    config = (kvx_engine_config){.tcp_bind = "127.0.0.1",
                                 .tcp_congestion = "",
                                 .tcp_threads = 1,
                                 .tcp_streams = STREAMS,
                                 .accepted_max = 1000,
                                 .frame_bytes = FRAME,
                                 .inline_bytes_max = 1024,
                                 .connect_ms = 1000,
                                 .handshake_ms = 1000,
                                 .cancel_ms = 1000};
    wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    owner_set = epoll_create1(EPOLL_CLOEXEC);
    dials_ops = &kvx_transport_tcp;
    dials_flags = KVX_OP_CHECK;
    FUZZ_CHECK(dials_ops->open(NULL, 0, &config, &dials_transport, why, sizeof why) == KVX_OK);
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    FUZZ_CHECK(bind(listener, (struct sockaddr *)&address, sizeof address) == 0 && listen(listener, 8) == 0);
    FUZZ_CHECK(getsockname(listener, (struct sockaddr *)&address, &length) == 0);
    snprintf(peer.endpoint, sizeof peer.endpoint, "127.0.0.1:%d", ntohs(address.sin_port));
}

/* Our lines are in the order in which the dialler's connections came. */
static void meet(stranger *s) {
    struct linger linger = {.l_onoff = 1};
    for (int i = 0; i < STREAMS; i++) {
        line *at = &s->lines[i];
        kvx_rx_init(&at->rx, KVX_STREAM_ACCEPTOR, FRAME);
        at->counter = at->first = at->count = 0;
        at->greeted = false;
        at->fd = -1;
        for (int turns = 0; turns < 100 && at->fd < 0; turns++) {
            progress(1);
            at->fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        }
        FUZZ_CHECK(at->fd >= 0);
        setsockopt(at->fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger); /* no TIME_WAIT, there are many of us */
    }
    for (int i = 0; i < STREAMS; i++) {
        send_hello(s, &s->lines[i]);
    }
    for (int turns = 0; turns < 20 && !connect_told; turns++) {
        progress(1);
        for (int i = 0; i < STREAMS; i++) {
            read_some(&s->lines[i]);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    stranger *s = &one_stranger;
    if (dials_transport == NULL) {
        setup();
    }
    s->data = data;
    s->size = size;
    uint32_t before = kvx_crc32c(0, memory, GUARD), after = kvx_crc32c(0, memory + GUARD + LENGTH, GUARD);
    dials_begin();
    meet(s);
    while (s->size > 0) {
        act(s);
    }
    for (int i = 0; i < STREAMS; i++) {
        hang_up(&s->lines[i]);
    }
    for (int i = 0; i < OPS; i++) {
        cancel_one(&ops[i]);
    }
    close_peer();
    for (int i = 0; i < 1000 && !closed; i++) {
        clock_ms += 100;
        (void)!write(wake_fd, &(uint64_t){1}, 8);
        progress(1);
    }
    FUZZ_CHECK(closed && live_ops(NULL) == 0);
    for (int i = 0; i < IMPORTS; i++) {
        FUZZ_CHECK(!imports[i].pending);
    }
    rooms_check();
    FUZZ_CHECK(before == kvx_crc32c(0, memory, GUARD) && after == kvx_crc32c(0, memory + GUARD + LENGTH, GUARD));
    return 0;
}

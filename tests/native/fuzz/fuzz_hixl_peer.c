/* fuzz_hixl_peer.c: an initiator of the hixl transport against an owner that follows the input: LOCATIONs that are
 * right, wrong or out of place, answers to nobody, revokes, silence, a library that fails, a sudden end.
 *
 * Properties: nothing moves but between our region and what the owner said of a grant, by copies only in what its key
 * maps, whoever it says that it is; every op, import, connect and peer is answered once, with a status that may be
 * told; and nothing is left when the peer is closed. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "fuzz.h"
#define FUZZ_DIALS
#include "fuzz_core.h"
#include "fuzz_hixl.h"

#define IMPORTS 4
#define OPS     6
#define TOLD    32

typedef struct used {
    kvx_import import;
    bool taken, pending, good;
} used;

typedef struct ordered {
    kvx_op op;
    kvx_segment segments[3];
    bool live;
} ordered;

static int listener;
static kvx_peer peer;
static bool connected, connect_told, lost, closing, closed;
static used imports[IMPORTS];
static ordered ops[OPS];
static hixl_location told[TOLD];
static uint32_t told_count;
static const uint8_t secret[KVX_KEY_BYTES] = "0123456789abcde";

/* -- the core ----------------------------------------------------------------------------------------------------- */

static bool may_be_told(int status) {
    return status == KVX_OK || (status >= KVX_E_CANCELLED && status < KVX_E_INTERNAL);
}
static uint32_t live_ops(const kvx_import *import) {
    uint32_t count = 0;
    for (int i = 0; i < OPS; i++) {
        count += ops[i].live && (import == NULL || ops[i].op.import == import);
    }
    return count;
}
void kvx_op_complete(kvx_op *op, int status, uint64_t bytes, int sys_errno, int segment) {
    ordered *one = op->transport_data;
    (void)sys_errno;
    FUZZ_CHECK(one->live && may_be_told(status) && bytes <= op->bytes && segment < (int)op->count);
    FUZZ_CHECK(status != KVX_OK || bytes == op->bytes);
    one->live = false;
}
void kvx_connect_done(kvx_peer *which, int status, int sys_errno) {
    (void)sys_errno;
    FUZZ_CHECK(which == &peer && !connect_told && !closed && may_be_told(status));
    connect_told = true;
    connected = status == KVX_OK;
}
void kvx_import_done(kvx_import *import, int status, int sys_errno) {
    used *one = (used *)import;
    (void)sys_errno;
    FUZZ_CHECK(one->taken && one->pending && may_be_told(status) && !closed);
    one->pending = false;
    one->good = status == KVX_OK;
}
void kvx_peer_lost(kvx_peer *which, int status) {
    FUZZ_CHECK(which == &peer && connected && !lost && live_ops(NULL) == 0 && status != KVX_OK);
    lost = true;
}
void kvx_peer_closed(kvx_peer *which) {
    FUZZ_CHECK(which == &peer && closing && !closed && live_ops(NULL) == 0);
    closed = true;
}

static void span_moves(uint64_t local, uint64_t remote, uint64_t length, bool mapped) {
    uint64_t base = (uintptr_t)region.base, from = mapped ? (uintptr_t)MAPPED : 0;
    bool said = false;
    FUZZ_CHECK(local >= base && length > 0 && length <= LENGTH && local - base <= LENGTH - length);
    for (uint32_t i = 0; i < told_count && !said; i++) {
        uint64_t begin = from + (mapped ? told[i].arena_offset : told[i].address);
        said = remote >= begin && length <= told[i].length && remote - begin <= told[i].length - length;
    }
    FUZZ_CHECK(said);
}

static void progress(int times) {
    for (int i = 0; i < times; i++) {
        kvx_transport_hixl.progress(hixl, 0, 0);
        bool out = false; /* a call of the library, in a thread of its own, which takes a moment */
        for (const hixl_link *link = hixl->devices[0].links; link != NULL; link = link->next) {
            out |= link->call != NULL;
        }
        kvx_transport_hixl.progress(hixl, 1, out ? 2 : 0);
    }
}

/* -- what the core asks of the transport -------------------------------------------------------------------------- */

static void import_one(stranger *o) {
    used *one = &imports[take(o, 1) % IMPORTS];
    if (one->taken || closing || !connected) {
        return;
    }
    *one = (used){.import = {.peer = &peer, .remote = {.grant = 1, .generation = 1, .length = LENGTH, .access = 3}}};
    memcpy(one->import.remote.key, secret, sizeof secret);
    one->taken = one->pending = true;
    if (kvx_transport_hixl.mem_import(hixl, &one->import) != KVX_PENDING) {
        one->taken = one->pending = false;
    }
}

static void release_one(stranger *o) {
    used *one = &imports[take(o, 1) % IMPORTS];
    if (one->taken && !one->pending && !closing && live_ops(&one->import) == 0) {
        FUZZ_CHECK(kvx_transport_hixl.peer_close(hixl, &peer, &one->import) == KVX_OK);
        one->taken = one->good = false;
    }
}

static void submit_one(stranger *o) {
    uint8_t what = (uint8_t)take(o, 1);
    ordered *one = &ops[what % OPS];
    used *by = &imports[what / 8 % IMPORTS];
    if (one->live || !by->good || closing) {
        return;
    }
    *one = (ordered){.op = {.kind = what & 64 ? KVX_OP_GET : KVX_OP_PUT,
                            .flags = what & 128 ? KVX_OP_NOTIFY : 0,
                            .region = &region,
                            .import = &by->import,
                            .segments = one->segments,
                            .count = (uint32_t)take(o, 1) % 4,
                            .transport_data = one}};
    for (uint32_t i = 0; i < one->op.count; i++) {
        uint64_t length = 1 + take(o, 2) % LENGTH;
        one->segments[i] =
            (kvx_segment){take(o, 2) % (LENGTH - length + 1), take(o, 2) % (LENGTH - length + 1), length};
        one->op.bytes += length;
    }
    if (one->op.count == 0) {
        one->op.flags = KVX_OP_NOTIFY;
        one->op.region = NULL;
    }
    one->live = true;
    int status = kvx_transport_hixl.submit(hixl, &one->op);
    if (status != KVX_PENDING) {
        FUZZ_CHECK(may_be_told(status));
        one->live = false;
    }
}

static void cancel_one(ordered *one) {
    if (one->live) {
        atomic_store(&one->op.cancelled, true);
        for (uint32_t i = 0; i <= DEVICES; i++) {
            kvx_core_wake(NULL, 0, i);
        }
    }
}

static void close_peer(void) {
    if (!closing) {
        closing = true;
        FUZZ_CHECK(kvx_transport_hixl.peer_close(hixl, &peer, NULL) == KVX_OK);
    }
}

/* -- the owner ---------------------------------------------------------------------------------------------------- */

static void send_location(stranger *o, const uint8_t *key, uint64_t handle) {
    uint16_t how = (uint16_t)take(o, 2); /* what of it is not as usual */
    uint8_t units[HIXL_LOCATION_UNITS * KVX_STREAM_UNIT_BYTES];
    hixl_location it = {.address = UINT64_C(1) << 40,
                        .length = how & 1 ? take(o, 8) : LENGTH,
                        .kind = how & 2 ? (uint32_t)take(o, 1) : KVX_MEM_HBM,
                        .physical = how & 4 ? (int32_t)take(o, 1) : 1,
                        .epoch = how & 8 ? take(o, 1) : 1,
                        .process = how & 16 ? kvx_hixl_process() : 5,
                        .version = how & 32 ? take(o, 1) : 1,
                        .known = how & 32 ? take(o, 1) : 1,
                        .arena_length = how & 64 ? take(o, 8) : 4 * LENGTH,
                        .arena_offset = how & 128 ? take(o, 8) : LENGTH};
    if (how & 256) {
        it.address = how & 1 ? take(o, 8) : (uintptr_t)memory;
    }
    if (how & 512) {
        memcpy(it.boot_id, hixl->boot_id, sizeof it.boot_id);
    }
    memset(it.key, 'k', how & 1024 ? 4 : how & 2048 ? sizeof it.key : 0);
    snprintf(it.engine, sizeof it.engine, how & 4096 ? "%d" : "127.0.0.%d:7", (int)take(o, 1));
    kvx_hixl_location_encode(&it, units);
    kvx_frame frame = {
        .type = KVX_FRAME_LOCATION, .op = handle, .segments = how & 8192 ? 1 + (uint32_t)take(o, 1) % 16 : 16};
    if (told_count < TOLD) {
        told[told_count++] = it;
        send_sealed(o, &frame, units, key, how & 16384 ? 1 : 0);
    }
}

static void send_frame(stranger *o, uint8_t type, uint8_t how) {
    const used *about = &imports[how % IMPORTS];
    const hixl_import *known = about->taken && !closed ? about->import.transport_data : NULL;
    uint8_t key[KVX_KEY_BYTES];
    memcpy(key, secret, sizeof key);
    key[0] ^= how / 4 % 16 == 1;
    uint64_t handle = known != NULL && how / 4 % 16 != 2 ? known->handle : 1 + take(o, 1) % 16;
    if (type == KVX_FRAME_LOCATION) {
        send_location(o, key, handle);
        return;
    }
    hixl_peer *side = peer.transport_data;
    kvx_frame frame = {.type = type, .op = handle};
    if (type == KVX_FRAME_PONG && !closed && how / 4 % 16 != 2) {
        frame.op = side->pongs + 1;
    }
    if (type == KVX_FRAME_ACK) { /* of an import that is refused, or of a notification */
        frame.status = how & 64 ? (int32_t)take(o, 2) : 0;
        frame.flags = how & 128 ? KVX_FRAME_F_BARE : 0;
        frame.segment = UINT32_MAX;
        frame.op = how & 32 ? 1 + take(o, 1) % 16 : handle;
    }
    if (type == KVX_FRAME_PONG && how & 64) {
        frame.status = KVX_E_DEVICE;
        frame.tag = how & 128 ? handle : 0;
    }
    if (how / 4 % 16 == 4) {
        uint32_t field = (uint32_t)take(o, 1);
        fuzz_frame_spoil(&frame, field, take(o, 1 + field / 32));
    }
    send_sealed(o, &frame, NULL, key, how / 4 % 16 == 3 ? (uint8_t)take(o, 1) : 0);
}

static void read_some(const stranger *o) {
    static uint8_t bytes[1 << 14];
    while (recv(o->fd, bytes, sizeof bytes, MSG_DONTWAIT) > 0) {
    }
}

static void act(stranger *o) {
    static const uint8_t types[] = {KVX_FRAME_LOCATION, KVX_FRAME_ACK, KVX_FRAME_REVOKE, KVX_FRAME_PONG,
                                    KVX_FRAME_LOCATION};
    uint8_t what = (uint8_t)take(o, 1);
    switch (what % 16) {
    case 0:
        send_raw(o);
        break;
    case 1:
    case 2:
        import_one(o);
        break;
    case 3:
    case 4:
        submit_one(o);
        break;
    case 5:
        cancel_one(&ops[what / 16 % OPS]);
        break;
    case 6:
        release_one(o);
        break;
    case 7:
        clock_ms += UINT64_C(20) << what / 16 % 8;
        break;
    case 8:
        atomic_store(&connect_status, what & 64 ? KVX_E_LINK : KVX_OK);
        atomic_store(&poll_status, what & 16 ? KVX_PENDING : what & 32 ? KVX_E_LINK : KVX_OK);
        break;
    case 9:
        if (what / 16 < 4) {
            close_peer();
        } else {
            read_some(o);
        }
        break;
    case 10:
        send_frame(o, what / 16 == 0 ? KVX_FRAME_BYE : (uint8_t)(what / 16), (uint8_t)take(o, 1));
        break;
    default:
        send_frame(o, types[what / 16 % 5], (uint8_t)take(o, 1));
    }
    progress(1 + what / 16 % 3);
}

static void setup(void) {
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t length = sizeof address;
    open_hixl();
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    FUZZ_CHECK(bind(listener, (struct sockaddr *)&address, sizeof address) == 0 && listen(listener, 8) == 0);
    FUZZ_CHECK(getsockname(listener, (struct sockaddr *)&address, &length) == 0);
    snprintf(peer.endpoint, sizeof peer.endpoint, "127.0.0.1:%d", ntohs(address.sin_port));
}

static void meet(stranger *o) {
    uint8_t bytes[KVX_STREAM_HELLO_BYTES];
    struct linger linger = {.l_onoff = 1};
    FUZZ_CHECK(kvx_transport_hixl.peer_connect(hixl, &peer) == KVX_PENDING);
    progress(1);
    o->fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    FUZZ_CHECK(o->fd >= 0);
    setsockopt(o->fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
    for (int i = 0; i < 100; i++) {
        progress(1);
        if (recv(o->fd, bytes, sizeof bytes, MSG_DONTWAIT) == sizeof bytes) {
            memcpy(o->auth.nonces, bytes + 28, KVX_NONCE_BYTES);
            break;
        }
    }
    if (take(o, 1) % 16 != 0) {
        send_hello(o, o->auth.nonces + KVX_NONCE_BYTES);
        for (int i = 0; i < 100 && !connected; i++) {
            progress(1);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    stranger o = {.data = data, .size = size, .role = KVX_STREAM_SIDE_ACCEPTOR};
    if (hixl == NULL) {
        setup();
    }
    connected = connect_told = lost = closing = closed = false;
    told_count = 0;
    memset(imports, 0, sizeof imports);
    memset(ops, 0, sizeof ops);
    atomic_store(&connect_status, KVX_OK);
    atomic_store(&poll_status, KVX_OK);
    meet(&o);
    while (o.size > 0) {
        act(&o);
    }
    close(o.fd);
    for (int i = 0; i < OPS; i++) {
        cancel_one(&ops[i]);
    }
    close_peer();
    time_t begun = time(NULL); /* a call of the library is a thread, which gets its turn some time */
    while ((!closed || hixl->devices[0].links != NULL) && time(NULL) < begun + 15) {
        clock_ms += 500;
        for (uint32_t thread = 0; thread <= DEVICES; thread++) {
            kvx_core_wake(NULL, 0, thread);
        }
        progress(1);
    }
    FUZZ_CHECK(closed && live_ops(NULL) == 0);
    FUZZ_CHECK(hixl->peers == NULL && hixl->devices[0].links == NULL && hixl->devices[0].batches == 0);
    return 0;
}

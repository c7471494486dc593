/* fuzz_hixl_peer.c: an initiator of the hixl transport against an owner that follows the input: LOCATIONs that are
 * right, wrong or out of place, answers to nobody, revokes, silence, a library that fails, a sudden end.
 *
 * Properties: nothing moves but between our region and what the owner said of a grant, by copies only in what its key
 * maps, whoever it says that it is; what is in fuzz_dials.h; and nothing is left when the peer is closed. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "fuzz.h"
#define FUZZ_DIALS
#include "fuzz_core.h"
#include "fuzz_hixl.h"
#include "fuzz_dials.h"

#define TOLD 32

static int listener;
static hixl_location told[TOLD];
static uint32_t told_count;

/* -- what moves ---------------------------------------------------------------------------------------------------- */

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

static void wake_all(void) {
    for (uint32_t i = 0; i <= DEVICES; i++) {
        kvx_core_wake(NULL, 0, i);
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
    memcpy(key, secret_key, sizeof key);
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
        wake_all();
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
    rooms_check();
}

static void setup(void) {
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t length = sizeof address;
    open_hixl();
    dials_ops = &kvx_transport_hixl;
    dials_transport = hixl;
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    FUZZ_CHECK(bind(listener, (struct sockaddr *)&address, sizeof address) == 0 && listen(listener, 8) == 0);
    FUZZ_CHECK(getsockname(listener, (struct sockaddr *)&address, &length) == 0);
    snprintf(peer.endpoint, sizeof peer.endpoint, "127.0.0.1:%d", ntohs(address.sin_port));
}

static void meet(stranger *o) {
    uint8_t bytes[KVX_STREAM_HELLO_BYTES];
    struct linger linger = {.l_onoff = 1};
    dials_begin();
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
    told_count = 0;
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
        wake_all();
        progress(1);
    }
    FUZZ_CHECK(closed && live_ops(NULL) == 0);
    FUZZ_CHECK(hixl->peers == NULL && hixl->devices[0].links == NULL && hixl->devices[0].batches == 0);
    return 0;
}

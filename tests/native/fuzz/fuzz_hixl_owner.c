/* fuzz_hixl_owner.c: an owner of the hixl transport against a dialler that follows the input: ATTACHes that are right
 * and wrong, damaged or cut frames, answers that nobody asked for, silence, revokes, a sudden end.
 *
 * Properties beside what the core below checks (fuzz_core.h): a LOCATION goes only to who proved the key of a grant
 * that lives, and tells that grant; a revoke is quiet when everybody who was told has given it back and not before;
 * nothing is left of a connection when its socket has ended. */
#define _GNU_SOURCE
#include <netinet/in.h>
#include <sys/socket.h>

#include "fuzz.h"
#include "fuzz_core.h"
#include "fuzz_hixl.h"

static kvx_stream_rx answers;
static uint64_t locations_due; /* ATTACHes that may be right */

static void span_moves(uint64_t local, uint64_t remote, uint64_t length, bool mapped) {
    (void)local, (void)remote, (void)length, (void)mapped;
    abort(); /* an owner moves nothing */
}

static void progress(int times) {
    for (int i = 0; i < times; i++) {
        kvx_transport_hixl.progress(hixl, 0, 0);
    }
}

static void hear(void) {
    hixl_location location;
    if (answers.frame.type == KVX_FRAME_LOCATION) {
        FUZZ_CHECK(locations_due-- > 0);
        FUZZ_CHECK(kvx_hixl_location_decode(&location, kvx_rx_units(&answers), answers.frame.segments));
        FUZZ_CHECK(location.address == (uintptr_t)region.base && location.length == LENGTH);
    }
}

static void read_some(stranger *d) {
    for (;;) {
        uint32_t space;
        uint8_t *at = kvx_rx_space(&answers, &space);
        ssize_t got = recv(d->fd, at, space, MSG_DONTWAIT);
        if (got <= 0) {
            return;
        }
        kvx_rx_received(&answers, (uint32_t)got);
        for (kvx_rx_event event; (event = kvx_rx_next(&answers)) != KVX_RX_MORE;) {
            FUZZ_CHECK(event == KVX_RX_HELLO || event == KVX_RX_FRAME); /* what we say is right */
            if (event == KVX_RX_HELLO) {
                memcpy(d->auth.nonces + KVX_NONCE_BYTES, answers.hello.nonce, KVX_NONCE_BYTES);
            } else {
                hear();
            }
        }
    }
}

static void send_frame(stranger *d, uint8_t type, uint8_t how) {
    uint8_t units[KVX_STREAM_UNITS_MAX * KVX_STREAM_UNIT_BYTES] = {0}, key[KVX_KEY_BYTES];
    bool attaches = type == KVX_FRAME_ATTACH;
    kvx_frame frame = {.type = type,
                       .op = 1 + take(d, 1) % 6,
                       .grant = grant.id + (how % 16 == 1),
                       .generation = region.generation + (how % 16 == 2),
                       .tag = how % 16 == 3 ? take(d, 4) : 1,
                       .value = how % 16 == 4 ? take(d, 8)
                                : attaches    ? LENGTH
                                              : 0,
                       .segments = attaches ? 1 : 0,
                       .segment = attaches ? how / 32 : 0}; /* the process, when its driver shall admit it */
    if (how % 16 == 5) {
        frame.segments = (uint32_t)take(d, 1) % (KVX_STREAM_UNITS_MAX + 1);
    } else if (how % 16 == 6) {
        frame.flags = (uint16_t)take(d, 1);
        frame.status = (int32_t)take(d, 2);
    } else if (how % 16 == 7) {
        frame.op = 0;
    }
    if (how % 16 != 5 && how % 16 != 6) {
        fuzz_frame_trim(KVX_STREAM_SIDE_DIALLER, &frame);
    }
    if (how % 16 == 10) {
        uint32_t field = (uint32_t)take(d, 1);
        fuzz_frame_spoil(&frame, field, take(d, 1 + field / 32));
    }
    memcpy(key, grant.key, sizeof key);
    key[0] ^= how % 16 == 8;
    memcpy(units, hixl->boot_id, how / 16 % 2 ? sizeof hixl->boot_id : 0); /* of this host, or another */
    locations_due += attaches && how % 16 != 1 && how % 16 != 2 && how % 16 != 8 && !grant.revoked;
    send_sealed(d, &frame, units, key, how % 16 == 9 ? (uint8_t)take(d, 1) : 0);
}

/* Whoever was told must be asked for it first. */
static void take_back(void) {
    atomic_store(&grant.revoked, true);
    quiet = kvx_transport_hixl.mem_release(hixl, &region, &grant) == KVX_OK;
    FUZZ_CHECK(quiet == (attachments == 0));
}

static void grant_again(void) {
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

static void act(stranger *d) {
    static const uint8_t types[] = {KVX_FRAME_ATTACH, KVX_FRAME_DETACH, KVX_FRAME_QUIET,
                                    KVX_FRAME_NOTIFY, KVX_FRAME_PING,   KVX_FRAME_ATTACH};
    uint8_t what = (uint8_t)take(d, 1);
    switch (what % 16) {
    case 0:
        send_raw(d);
        break;
    case 1:
        if (!grant.revoked) {
            take_back();
        }
        break;
    case 2:
        if (quiet || !grant.revoked) {
            grant_again();
        }
        break;
    case 3:
        read_some(d);
        break;
    case 4:
        notify_room = what / 16;
        kvx_core_wake(NULL, 0, 0);
        break;
    case 5:
        send_frame(d, (uint8_t)take(d, 1), (uint8_t)take(d, 1));
        break;
    case 6:
        send_frame(d, what / 16 == 0 ? KVX_FRAME_BYE : KVX_FRAME_QUIET, 0);
        break;
    case 7:
        clock_ms += what / 16 == 0 ? 2000 : 0;
        break;
    default:
        send_frame(d, types[what / 16 % 6], what % 2 ? 0 : (uint8_t)take(d, 1));
    }
    progress(1 + what % 2);
}

static void once(stranger *d) {
    struct sockaddr_storage to = hixl->listens;
    struct linger linger = {.l_onoff = 1};
    setsockopt(d->fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger); /* no TIME_WAIT, there are many of us */
    FUZZ_CHECK(d->fd >= 0 && connect(d->fd, (struct sockaddr *)&to, sizeof(struct sockaddr_in)) == 0);
    kvx_rx_init(&answers, KVX_STREAM_SIDE_DIALLER, KVX_STREAM_FRAME_MAX);
    progress(1);
    if (take(d, 1) % 16 != 0) {
        send_hello(d, d->auth.nonces);
        for (int i = 0; i < 10 && d->auth.nonces[KVX_NONCE_BYTES] == 0; i++) {
            progress(1);
            read_some(d);
        }
    }
    while (d->size > 0) {
        act(d);
    }
    progress(2);
    read_some(d);
    close(d->fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    stranger d = {.data = data, .size = size, .role = KVX_STREAM_SIDE_DIALLER};
    if (hixl == NULL) {
        open_hixl();
    }
    notify_room = 3;
    locations_due = 0;
    d.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memset(d.auth.nonces, (int)take(&d, 1), KVX_NONCE_BYTES);
    once(&d);
    for (int i = 0; i < 200 && (attachments > 0 || hixl->conns != NULL); i++) {
        notify_room = 8; /* whatever waited for room goes on */
        kvx_core_wake(NULL, 0, 0);
        progress(1);
    }
    FUZZ_CHECK(accesses == 0 && attachments == 0 && counters.peers_accepted == 0);
    FUZZ_CHECK(hixl->conns == NULL && hixl->accepted == 0 && hixl->line.count == 0 && hixl->grants.count == 0);
    FUZZ_CHECK(hixl->devices[0].arenas->told == 0);
    FUZZ_CHECK(!grant.revoked || quiet);
    grant_again();
    grant.access = 3;
    return 0;
}

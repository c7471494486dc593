/* hostile.c: strangers at the door. Random bytes, a real opening message with flipped bits, messages that stop half way
 * and, for stream sockets, a real conversation in which a bit flips now and then. The owner stays up, answers honest
 * peers, and no byte outside what it granted ever changes. */
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "harness.h"

#define LENGTH      (1ull << 18)
#define GUARD       (1ull << 16) /* of each end of the region, not granted */
#define OPENING_MAX 4096

/* An address of either family, from an endpoint: "[boot id:]/path" or "a.b.c.d:port". */
typedef struct door {
    union {
        struct sockaddr any;
        struct sockaddr_in in;
        struct sockaddr_un un;
    } address;
    socklen_t length;
    int type;
    char prefix[64]; /* of the endpoint, before the path */
} door;

static door door_of(const char *endpoint) {
    door d = {0};
    const char *path = strchr(endpoint, '/');
    const char *colon = strrchr(endpoint, ':');
    if (path != NULL) {
        d.address.un.sun_family = AF_UNIX;
        snprintf(d.address.un.sun_path, sizeof(d.address.un.sun_path), "%s", path);
        snprintf(d.prefix, sizeof(d.prefix), "%.*s", (int)(path - endpoint), endpoint);
        d.length = sizeof(d.address.un);
        d.type = SOCK_SEQPACKET;
    } else {
        CHECK(colon != NULL);
        d.address.in.sin_family = AF_INET;
        d.address.in.sin_port = htons((uint16_t)atoi(colon + 1));
        d.address.in.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        d.length = sizeof(d.address.in);
        d.type = SOCK_STREAM;
    }
    return d;
}

static int knock(const door *d) {
    int fd = socket(d->address.any.sa_family, d->type, 0);
    CHECK(fd >= 0);
    if (connect(fd, &d->address.any, d->length) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

/* A door of our own beside the real one; `endpoint` is what to dial. */
static int false_door(const door *real, const char *dir, door *mine, char endpoint[KVX_ENDPOINT_MAX]) {
    *mine = *real;
    if (real->type == SOCK_SEQPACKET) {
        snprintf(mine->address.un.sun_path, sizeof(mine->address.un.sun_path), "%.80s/false.sock", dir);
        unlink(mine->address.un.sun_path);
    } else {
        mine->address.in.sin_port = 0;
    }
    int fd = socket(mine->address.any.sa_family, mine->type, 0);
    CHECK(fd >= 0 && bind(fd, &mine->address.any, mine->length) == 0 && listen(fd, 16) == 0);
    if (real->type == SOCK_SEQPACKET) {
        snprintf(endpoint, KVX_ENDPOINT_MAX, "%s%s", mine->prefix, mine->address.un.sun_path);
    } else {
        socklen_t length = sizeof(mine->address.in);
        CHECK(getsockname(fd, &mine->address.any, &length) == 0);
        snprintf(endpoint, KVX_ENDPOINT_MAX, "127.0.0.1:%u", ntohs(mine->address.in.sin_port));
    }
    return fd;
}

/* What an engine says first. */
static size_t capture_opening(side *s, const door *real, const char *dir, uint8_t opening[OPENING_MAX]) {
    side *both[1] = {s};
    door mine;
    char endpoint[KVX_ENDPOINT_MAX];
    uint64_t peer = 0, token = 0;
    int listener = false_door(real, dir, &mine, endpoint);
    CHECK_STATUS(KVX_OK, kvx_peer_connect(s->engine, s->transport, endpoint, side_secret(s), &peer, &token));
    side_track(s, token);
    int fd = accept(listener, NULL, NULL);
    CHECK(fd >= 0);
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    ssize_t length = poll(&ready, 1, 2000) == 1 ? recv(fd, opening, OPENING_MAX, 0) : 0;
    close(fd);
    close(listener);
    CHECK(side_wait(both, 1, s, token).status != KVX_OK); /* we hung up on it */
    return length > 0 ? (size_t)length : 0;
}

static void insult(const door *d, const uint8_t *opening, size_t opening_length) {
    uint8_t bytes[OPENING_MAX];
    size_t length = 1 + dice(sizeof(bytes) - 1);
    for (size_t i = 0; i < length; i++) {
        bytes[i] = (uint8_t)dice(256);
    }
    if (opening_length != 0 && dice(4) != 0) {
        memcpy(bytes, opening, opening_length);
        length = dice(3) ? opening_length : length > opening_length ? length : opening_length;
        for (uint64_t flips = dice(4); flips > 0; flips--) {
            bytes[dice(length)] ^= (uint8_t)(1u << dice(8));
        }
        if (dice(4) == 0) {
            length = 1 + dice(length);
        }
    }
    int fd = knock(d);
    if (fd < 0) {
        return;
    }
    (void)!send(fd, bytes, length, MSG_NOSIGNAL);
    if (dice(2)) {
        uint8_t answer[512];
        struct pollfd ready = {.fd = fd, .events = POLLIN};
        if (poll(&ready, 1, 20) == 1) {
            (void)!recv(fd, answer, sizeof(answer), MSG_DONTWAIT);
            (void)!send(fd, bytes, 1 + dice(length), MSG_NOSIGNAL);
        }
    }
    close(fd);
}

/* -- a conversation with flipped bits -------------------------------------------------------------------------------
 */

typedef struct proxy {
    int listener;
    door to;
    uint64_t flip_every; /* bytes, on average */
    uint64_t state;
    _Atomic bool stop;
    pthread_t thread;
} proxy;

static uint64_t proxy_dice(proxy *p, uint64_t sides) {
    p->state = p->state * 6364136223846793005ull + 1442695040888963407ull;
    return (p->state >> 33) % sides;
}

/* True while both ends are there. */
static bool pass_on(proxy *p, int from, int to) {
    uint8_t bytes[16384];
    ssize_t length = recv(from, bytes, sizeof(bytes), MSG_DONTWAIT);
    if (length <= 0) {
        return length < 0 && (errno == EAGAIN || errno == EINTR);
    }
    for (ssize_t i = 0; i < length; i++) {
        if (proxy_dice(p, p->flip_every) == 0) {
            bytes[i] ^= (uint8_t)(1u << proxy_dice(p, 8));
        }
    }
    for (ssize_t sent = 0; sent < length && !atomic_load(&p->stop);) {
        struct pollfd ready = {.fd = to, .events = POLLOUT};
        poll(&ready, 1, 20);
        ssize_t step = send(to, bytes + sent, (size_t)(length - sent), MSG_DONTWAIT | MSG_NOSIGNAL);
        if (step < 0 && errno != EAGAIN && errno != EINTR) {
            return false;
        }
        sent += step > 0 ? step : 0;
    }
    return true;
}

static void *proxy_main(void *argument) {
    proxy *p = argument;
    int ends[16][2];
    size_t count = 0;
    while (!atomic_load(&p->stop)) {
        struct pollfd fds[33] = {{.fd = p->listener, .events = POLLIN}};
        for (size_t i = 0; i < count; i++) {
            fds[1 + 2 * i] = (struct pollfd){.fd = ends[i][0], .events = POLLIN};
            fds[2 + 2 * i] = (struct pollfd){.fd = ends[i][1], .events = POLLIN};
        }
        if (poll(fds, (nfds_t)(1 + 2 * count), 20) <= 0) {
            continue;
        }
        for (size_t i = count; i-- > 0;) {
            bool ahead = fds[1 + 2 * i].revents == 0 || pass_on(p, ends[i][0], ends[i][1]);
            bool back = fds[2 + 2 * i].revents == 0 || pass_on(p, ends[i][1], ends[i][0]);
            if (!ahead || !back) {
                close(ends[i][0]);
                close(ends[i][1]);
                memmove(ends[i], ends[i + 1], (--count - i) * sizeof(ends[0]));
            }
        }
        if (fds[0].revents != 0 && count < 16) {
            int in = accept(p->listener, NULL, NULL);
            int out = in < 0 ? -1 : knock(&p->to);
            if (out >= 0) {
                ends[count][0] = in;
                ends[count++][1] = out;
            } else if (in >= 0) {
                close(in);
            }
        }
    }
    while (count > 0) {
        close(ends[--count][0]);
        close(ends[count][1]);
    }
    close(p->listener);
    return NULL;
}

/* What comes of it may be anything, but it comes, and in time. */
static void talk_through(side *a, side *b, const place *here, const place *there, const char *endpoint) {
    side *both[2] = {a, b};
    uint64_t peer = 0, token = 0, import = 0;
    CHECK_STATUS(KVX_OK, kvx_peer_connect(a->engine, a->transport, endpoint, side_secret(b), &peer, &token));
    side_track(a, token);
    if (side_wait(both, 2, a, token).status != KVX_OK) {
        return;
    }
    kvx_remote remote = place_remote(there);
    if (kvx_mem_import(a->engine, peer, &remote, &import, &token) == KVX_OK) {
        side_track(a, token);
        uint64_t import_token = token, until = now_ms() + 300;
        kvx_event event = {.status = KVX_E_TIMEOUT};
        bool done = false;
        while (!(done = side_forget_completed(a, import_token, &event)) && now_ms() < until) {
            side_pump(both, 2, 10);
        }
        for (int i = 0; i < 40 && done && event.status == KVX_OK; i++) {
            kvx_submit_args args = {.kind = dice(2) ? KVX_OP_PUT : KVX_OP_GET,
                                    .flags = (uint32_t)dice(4), /* notify, check */
                                    .region = here->region.id,
                                    .import = import,
                                    .count = 1};
            int lane = side_lane(a);
            uint64_t length = 1 + dice(LENGTH / LANES), begin = (uint64_t)lane * (LENGTH / LANES);
            const kvx_segment segment = {begin, begin, length};
            int inlined = 0;
            kvx_event now;
            if (kvx_submit(a->engine, &args, &segment, &token, &inlined, &now) == KVX_OK && !inlined) {
                side_track_lane(a, token, lane);
                if (dice(4) == 0) {
                    kvx_cancel(a->engine, token);
                }
            }
            side_pump(both, 2, 1);
        }
    }
    CHECK_STATUS(KVX_OK, kvx_peer_close(a->engine, peer, &token)); /* completes whatever hangs */
    side_track(a, token);
    side_settle(both, 2);
}

static void scramble(side *a, side *b, const place *here, const place *there, const door *real, const char *dir) {
    char endpoint[KVX_ENDPOINT_MAX];
    door mine;
    proxy p = {.to = *real, .flip_every = 200 + dice(20000), .state = dice(1u << 30)};
    p.listener = false_door(real, dir, &mine, endpoint);
    CHECK(pthread_create(&p.thread, NULL, proxy_main, &p) == 0);
    talk_through(a, b, here, there, endpoint);
    atomic_store(&p.stop, true);
    pthread_join(p.thread, NULL);
}

void scenario_hostile(const char *transport, const char *dir, int rounds) {
    static side a, b;
    side *both[2] = {&a, &b};
    place here, there;
    uint8_t opening[OPENING_MAX];
    side_open(&a, "a", transport, dir);
    side_open(&b, "b", transport, dir);
    place_alloc(&a, &here, LENGTH);
    place_alloc(&b, &there, LENGTH + 2 * GUARD);
    pattern_fill(place_bytes(&there), there.region.length, 9);
    CHECK_STATUS(KVX_OK,
                 kvx_grant_create(b.engine, there.region.id, GUARD, LENGTH, KVX_READ | KVX_WRITE, &there.grant));
    door real = door_of(b.endpoint);
    size_t opening_length = capture_opening(&a, &real, dir, opening);
    for (int round = 0; round < rounds; round++) {
        for (int i = 0; i < 25; i++) {
            insult(&real, opening, opening_length);
            side_pump(both, 2, 0);
        }
        if (real.type == SOCK_STREAM) {
            scramble(&a, &b, &here, &there, &real, dir);
        }
        talk_through(&a, &b, &here, &there, b.endpoint); /* an honest peer is served */
        CHECK(pattern_holds_at(place_bytes(&there), 0, GUARD, 9));
        CHECK(pattern_holds_at(place_bytes(&there), GUARD + LENGTH, GUARD, 9));
    }
    const kvx_transport_counters *row = &kvx_engine_counters(b.engine)->row[b.transport];
    unsigned long long dropped = __atomic_load_n(&row->protocol_errors, __ATOMIC_RELAXED);
    printf("hostile %s: %llu connections dropped, %llu requests refused, %llu notified\n", transport, dropped,
           (unsigned long long)__atomic_load_n(&row->refused, __ATOMIC_RELAXED), (unsigned long long)b.notified);
    CHECK(dropped > 0);
    place_free(&b, &there, both, 2);
    side_close(&b);
    side_close(&a);
}

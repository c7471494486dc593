/* fuzz_dials.h: what the core asks of a transport that dials, and what the transport promises it, whatever its peer
 * says: every op, import, connect and peer is answered once, with a status that may be told and a segment that the op
 * has; and when an op is over, nothing is written to its memory any more. Included after fuzz_core.h, with FUZZ_DIALS,
 * by one file of a program that has `dials_ops`, `dials_transport`, a stranger and its take. */
#ifndef KVX_FUZZ_DIALS_H
#define KVX_FUZZ_DIALS_H

#define IMPORTS  4
#define OPS      6
#define SEGMENTS 3
#define ROOM     (LENGTH / OPS) /* of our memory, for each op */

typedef struct stranger stranger;
static uint64_t take(stranger *s, size_t width);
static const kvx_transport_ops *dials_ops;
static void *dials_transport;
static uint32_t dials_flags; /* of ops, that the transport takes beside KVX_OP_NOTIFY */

typedef struct used {
    kvx_import import; /* first: the core's callbacks know nothing else */
    bool taken, pending, good;
} used;

typedef struct ordered {
    kvx_op op; /* first */
    kvx_segment segments[SEGMENTS];
    bool live;
    uint32_t sum; /* of its room, when it was over */
} ordered;

static kvx_peer peer;
static bool connected, connect_told, lost, closing, closed;
static used imports[IMPORTS];
static ordered ops[OPS];
static const uint8_t secret_key[KVX_KEY_BYTES] = "0123456789abcde";

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

static uint32_t room_sum(const ordered *one) {
    return kvx_crc32c(0, region.base + (one - ops) * ROOM, ROOM);
}

static void rooms_check(void) {
    for (int i = 0; i < OPS; i++) {
        FUZZ_CHECK(ops[i].live || ops[i].sum == room_sum(&ops[i]));
    }
}

void kvx_op_complete(kvx_op *op, int status, uint64_t bytes, int sys_errno, int segment) {
    ordered *one = (ordered *)op;
    (void)sys_errno;
    FUZZ_CHECK(one->live && may_be_told(status) && bytes <= op->bytes && segment >= -1 && segment < (int)op->count);
    FUZZ_CHECK(status == KVX_OK ? bytes == op->bytes && segment == -1 : true);
    FUZZ_CHECK(status != KVX_E_CANCELLED || atomic_load(&op->cancelled)); /* nobody else can say so */
    one->live = false;
    one->sum = room_sum(one);
}
void kvx_connect_done(kvx_peer *which, int status, int sys_errno) {
    (void)sys_errno;
    FUZZ_CHECK(which == &peer && !connect_told && !closed && may_be_told(status));
    connect_told = true;
    connected = status == KVX_OK;
}
void kvx_import_done(kvx_import *import, int status, int sys_errno) {
    used *one = (used *)import;
    FUZZ_CHECK(one->taken && one->pending && may_be_told(status) && !closed && sys_errno >= 0);
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

static void dials_begin(void) {
    connected = connect_told = lost = closing = closed = false;
    memset(imports, 0, sizeof imports);
    memset(ops, 0, sizeof ops);
    for (int i = 0; i < OPS; i++) {
        ops[i].sum = room_sum(&ops[i]);
    }
    FUZZ_CHECK(dials_ops->peer_connect(dials_transport, &peer) == KVX_PENDING);
}

static void import_one(stranger *s) {
    static uint64_t id;
    used *one = &imports[take(s, 1) % IMPORTS];
    if (one->taken || closing || !connected) {
        return;
    }
    *one = (used){.import = {.id = ++id,
                             .peer = &peer,
                             .device = -1,
                             .remote = {.grant = 1, .generation = 1, .length = LENGTH, .access = 3}}};
    memcpy(one->import.remote.key, secret_key, sizeof secret_key);
    one->taken = one->pending = true;
    if (dials_ops->mem_import(dials_transport, &one->import) != KVX_PENDING) {
        one->taken = one->pending = false;
    }
}

static void release_one(stranger *s) {
    used *one = &imports[take(s, 1) % IMPORTS];
    if (one->taken && !one->pending && !closing && live_ops(&one->import) == 0) {
        FUZZ_CHECK(dials_ops->peer_close(dials_transport, &peer, &one->import) == KVX_OK);
        one->taken = one->good = false;
    }
}

/* Within the op's room on our side, anywhere on the other. */
static void submit_one(stranger *s) {
    static uint64_t token;
    uint8_t what = (uint8_t)take(s, 1), count = (uint8_t)take(s, 1);
    ordered *one = &ops[what % OPS];
    used *by = &imports[what / 8 % IMPORTS];
    if (one->live || !by->good || closing) {
        return;
    }
    uint64_t place = (uint64_t)(one - ops) * ROOM;
    uint32_t sum = one->sum;
    *one = (ordered){.sum = sum,
                     .op = {.token = ++token,
                            .kind = what & 64 ? KVX_OP_GET : KVX_OP_PUT,
                            .flags = (what & 128 ? KVX_OP_NOTIFY : 0) | (count & 4 ? dials_flags : 0),
                            .region = &region,
                            .import = &by->import,
                            .segments = one->segments,
                            .count = count % (SEGMENTS + 1)}};
    for (uint32_t i = 0; i < one->op.count; i++) {
        uint64_t length = 1 + take(s, 2) % ROOM;
        one->segments[i] =
            (kvx_segment){place + take(s, 2) % (ROOM - length + 1), take(s, 2) % (LENGTH - length + 1), length};
        one->op.bytes += length;
    }
    if (one->op.count == 0) {
        one->op.flags = KVX_OP_NOTIFY;
        one->op.region = NULL;
    }
    one->live = true;
    int status = dials_ops->submit(dials_transport, &one->op);
    if (status != KVX_PENDING) {
        FUZZ_CHECK(may_be_told(status) || status == KVX_AGAIN);
        one->live = false;
    }
}

static void cancel_one(ordered *one) {
    if (one->live) {
        atomic_store(&one->op.cancelled, true);
    }
}

static void close_peer(void) {
    if (!closing) {
        closing = true;
        FUZZ_CHECK(dials_ops->peer_close(dials_transport, &peer, NULL) == KVX_OK);
    }
}

#endif

/* fuzz_hixl.h: cards and a vendor library that are not there, below the real hixl transport. The library does what it
 * was told to answer, shows every span to the program, and moves nothing. Included after fuzz_core.h. */
#ifndef KVX_FUZZ_HIXL_H
#define KVX_FUZZ_HIXL_H

#include <sys/eventfd.h>
#include <unistd.h>

#include "hixl/hixl.h"
#include "fuzz_frames.h"

#define DEVICES 2
#define MAPPED  ((uint8_t *)UINT64_C(0x700000000000)) /* what any key maps; nobody touches it */

/* Of the program: may these bytes move? `mapped`: by a copy, else by the network. */
static void span_moves(uint64_t local, uint64_t remote, uint64_t length, bool mapped);

static _Atomic int connect_status, poll_status;

static int fine(int32_t device, uint32_t *raw_p) {
    (void)device, (void)raw_p;
    return KVX_OK;
}
static int fake_physical(int32_t device, int32_t *physical_p, uint32_t *raw_p) {
    (void)raw_p;
    *physical_p = device;
    return KVX_OK;
}
static int fake_peer(int32_t device, int32_t other, int32_t *can_p, uint32_t *raw_p) {
    (void)device, (void)other, (void)raw_p;
    *can_p = 1;
    return KVX_OK;
}
static int fake_stream_open(int32_t device, void **stream_p, uint32_t *raw_p) {
    (void)device, (void)raw_p;
    *stream_p = MAPPED;
    return atomic_load(&connect_status);
}
static int fake_stream_close(int32_t device, void *stream, bool force, uint32_t *raw_p) {
    (void)device, (void)stream, (void)force, (void)raw_p;
    return KVX_OK;
}
static int fake_stream_end(int32_t device, void *stream, uint32_t *raw_p) {
    (void)device, (void)stream, (void)raw_p;
    return KVX_OK;
}
static int fake_stream_poll(int32_t device, void *stream, uint32_t *raw_p) {
    (void)device, (void)stream, (void)raw_p;
    return atomic_load(&poll_status);
}
static int fake_copy_batch(int32_t device, void *stream, const kvx_ascend_copy *copies, uint32_t count,
                           uint32_t *raw_p) {
    (void)device, (void)stream, (void)raw_p;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t target = (uintptr_t)copies[i].target, source = (uintptr_t)copies[i].source;
        bool reads = target >= (uintptr_t)region.base && target < (uintptr_t)region.base + region.length;
        span_moves(reads ? target : source, reads ? source : target, copies[i].length, true);
    }
    return KVX_OK;
}
static int fake_export(int32_t device, void *bytes, uint64_t length, int32_t pid, char key[KVX_ASCEND_IPC_KEY_MAX],
                       uint32_t *raw_p) {
    (void)device, (void)bytes, (void)length, (void)pid, (void)raw_p;
    snprintf(key, KVX_ASCEND_IPC_KEY_MAX, "fuzz");
    return KVX_OK;
}
static int fake_import(int32_t device, const char *key, void **memory_p, uint32_t *raw_p) {
    (void)device, (void)key, (void)raw_p;
    *memory_p = MAPPED;
    return KVX_OK;
}
static int fake_allow(int32_t device, const char *key, int32_t pid, uint32_t *raw_p) {
    (void)device, (void)key, (void)pid, (void)raw_p;
    return KVX_OK;
}
static int fake_process(int32_t *pid_p, uint32_t *raw_p) {
    (void)raw_p;
    *pid_p = 1234;
    return KVX_OK;
}
static int fake_unmap(int32_t device, const char *key, uint32_t *raw_p) {
    (void)device, (void)key, (void)raw_p;
    return KVX_OK;
}
static int fake_engine_open(int32_t device, const char *local, const kvx_ascend_option *options, uint32_t count,
                            void **engine_p, uint32_t *raw_p, char *why, size_t why_size) {
    (void)device, (void)local, (void)options, (void)count, (void)raw_p, (void)why, (void)why_size;
    *engine_p = MAPPED;
    return KVX_OK;
}
static int fake_register(void *engine, void *bytes, uint64_t length, kvx_ascend_where where, void **handle_p,
                         uint32_t *raw_p) {
    (void)engine, (void)length, (void)where, (void)raw_p;
    *handle_p = bytes;
    return KVX_OK;
}
static int fake_connect(void *engine, const char *remote, int32_t timeout_ms, uint32_t *raw_p) {
    (void)engine, (void)remote, (void)timeout_ms, (void)raw_p;
    return atomic_load(&connect_status);
}
static int fake_disconnect(void *engine, const char *remote, int32_t timeout_ms, uint32_t *raw_p) {
    (void)engine, (void)remote, (void)timeout_ms, (void)raw_p;
    return KVX_OK;
}
static int fake_submit(void *engine, const char *remote, bool write, const kvx_ascend_op *ops, uint32_t count,
                       void **request_p, uint32_t *raw_p) {
    (void)engine, (void)remote, (void)write, (void)raw_p;
    for (uint32_t i = 0; i < count; i++) {
        span_moves(ops[i].local, ops[i].remote, ops[i].length, false);
    }
    *request_p = MAPPED;
    return KVX_OK;
}
static int fake_poll(void *engine, void *request, uint32_t *raw_p) {
    (void)engine, (void)request, (void)raw_p;
    return atomic_load(&poll_status);
}

static const kvx_ascend_api fake = {
    .facts = {.devices = DEVICES},
    .device_use = fine,
    .device_healthy = fine,
    .device_physical = fake_physical,
    .device_peer = fake_peer,
    .stream_open = fake_stream_open,
    .stream_close = fake_stream_close,
    .stream_abort = fake_stream_end,
    .stream_poll = fake_stream_poll,
    .copy_batch = fake_copy_batch,
    .ipc_export = fake_export,
    .ipc_import = fake_import,
    .ipc_allow = fake_allow,
    .ipc_close = fake_unmap,
    .process_id = fake_process,
    .engine_open = fake_engine_open,
    .mem_register = fake_register,
    .connect = fake_connect,
    .disconnect = fake_disconnect,
    .submit = fake_submit,
    .poll = fake_poll,
};

const kvx_ascend_api *kvx_ascend_get(char *why, size_t why_size) {
    (void)why, (void)why_size;
    return &fake;
}
int kvx_access_begin_any(kvx_core *core, uint64_t id, uint64_t generation, kvx_access *access) {
    return kvx_access_begin(core, id, generation, access);
}
bool kvx_arena_keep(kvx_core *core, uint64_t id) {
    (void)core, (void)id;
    abort(); /* the region stays */
}
void kvx_arena_abandon(kvx_core *core, uint64_t id) {
    (void)core, (void)id;
    abort();
}
void kvx_core_wake(kvx_core *core, uint32_t slot, uint32_t thread) {
    (void)!write(kvx_core_wake_fd(core, slot, thread), &(uint64_t){1}, 8);
}

static hixl_transport *hixl;

/* One region in the memory of device 0, in the middle of what nobody may touch. */
static void open_hixl(void) {
    static char why[256];
    void *opened;
    memory = malloc(LENGTH + 2 * GUARD);
    region = (kvx_region){.id = 1,
                          .generation = 77,
                          .base = memory + GUARD,
                          .length = LENGTH,
                          .memfd = -1,
                          .kind = KVX_MEM_HBM,
                          .arena_id = 9,
                          .arena_base = memory,
                          .arena_length = LENGTH + 2 * GUARD};
    grant = (kvx_grant){.id = 1, .region = &region, .length = LENGTH, .access = 3};
    config = (kvx_engine_config){.hixl_bind = "127.0.0.1",
                                 .accepted_max = 4,
                                 .grants_max = 4,
                                 .connect_ms = 1000,
                                 .handshake_ms = 1000,
                                 .cancel_ms = 1000};
    wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    for (int i = 0; i < DEVICES; i++) {
        more_wake_fds[i] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    }
    FUZZ_CHECK(kvx_transport_hixl.open(NULL, 0, &config, &opened, why, sizeof why) == KVX_OK);
    FUZZ_CHECK(kvx_transport_hixl.mem_register(opened, &region) == KVX_OK);
    hixl = opened;
}

/* The end of a side link that is not kvxfer's. */
typedef struct stranger {
    const uint8_t *data;
    size_t size;
    int fd;
    kvx_stream_auth auth;
    uint64_t counter;
    uint32_t role;
} stranger;

static uint64_t take(stranger *s, size_t width) {
    uint64_t value = 0;
    for (size_t i = 0; i < width && s->size > 0; i++, s->data++, s->size--) {
        value = value << 8 | *s->data;
    }
    return value;
}

static void send_all(const stranger *s, const void *bytes, size_t size) {
    (void)!send(s->fd, bytes, size, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static void send_raw(stranger *s) {
    uint8_t raw[64];
    for (size_t i = 0; i < sizeof raw; i++) {
        raw[i] = (uint8_t)take(s, 1);
    }
    send_all(s, raw, sizeof raw);
}

static void send_hello(stranger *s, const uint8_t nonce[KVX_NONCE_BYTES]) {
    uint8_t bytes[KVX_STREAM_HELLO_BYTES];
    kvx_hello hello = {.version = 1, .role = (uint8_t)s->role, .streams = 1, .frame_bytes = KVX_STREAM_FRAME_MAX};
    memcpy(hello.nonce, nonce, KVX_NONCE_BYTES);
    kvx_hello_encode(&hello, bytes);
    send_all(s, bytes, sizeof bytes);
}

/* Sealed with the key, which may be wrong; `damage` % 4: a bit flipped, or cut short. */
static void send_sealed(stranger *s, const kvx_frame *frame, const void *units, const uint8_t *key, uint8_t damage) {
    uint8_t bytes[KVX_STREAM_HEADER_BYTES + KVX_STREAM_UNITS_MAX * KVX_STREAM_UNIT_BYTES];
    size_t size = KVX_STREAM_HEADER_BYTES + frame->segments * KVX_STREAM_UNIT_BYTES;
    kvx_frame_encode(frame, bytes);
    if (frame->segments > 0) {
        static const uint8_t none[KVX_STREAM_UNITS_MAX * KVX_STREAM_UNIT_BYTES];
        kvx_frame_units_encode(bytes, units == NULL ? none : units, frame->segments);
    }
    s->counter++;
    if (key != NULL) {
        kvx_frame_seal(&s->auth, key, s->counter, s->role, bytes, size);
    }
    if (damage % 4 == 1) {
        bytes[take(s, 2) % size] ^= (uint8_t)(1 << take(s, 1) % 8);
    }
    send_all(s, bytes, damage % 4 == 2 ? take(s, 2) % size : size);
}

#endif

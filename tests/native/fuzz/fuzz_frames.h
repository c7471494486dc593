/* fuzz_frames.h: every field of every frame of KVXD and of side links, and who uses it. The fuzzers that send frames
 * make right ones by it, and wrong ones by giving any field any value before the frame is sealed.
 * tests/native/test_frames.py compares these lists with the structures of the engine and with its own: a new field has
 * to be here too. */
#ifndef KVX_FUZZ_FRAMES_H
#define KVX_FUZZ_FRAMES_H

#include "proto/stream.h"

/* clang-format off */
#define FUZZ_FRAME_FIELDS(X) \
    X(type) X(flags) X(segments) X(status) X(op) X(index) X(segment) X(grant) X(generation) X(length) X(tag) X(value)
#define FUZZ_HELLO_FIELDS(X) \
    X(version) X(role) X(stream) X(streams) X(status) X(frame_bytes)
#define FUZZ_HELLO_BYTES(X) X(nonce) X(engine_id) X(session) X(share)
/* clang-format on */

#define NUMBER(name) FUZZ_##name,
enum { FUZZ_FRAME_FIELDS(NUMBER) FUZZ_FRAME_COUNT };
#undef NUMBER
#define NUMBER(name) FUZZ_HELLO_##name,
enum { FUZZ_HELLO_FIELDS(NUMBER) FUZZ_HELLO_BYTES(NUMBER) FUZZ_HELLO_COUNT };
#undef NUMBER

#define U(name)    (1u << FUZZ_##name)
#define FUZZ_GRANT (U(grant) | U(generation))
static const struct fuzz_frame {
    uint8_t sender, type;
    uint32_t uses;
} fuzz_frames[] = {
    {KVX_STREAM_DIALLER, KVX_FRAME_ATTACH, U(op) | FUZZ_GRANT | U(tag) | U(value)},
    {KVX_STREAM_DIALLER, KVX_FRAME_DETACH, FUZZ_GRANT},
    {KVX_STREAM_DIALLER, KVX_FRAME_PUT, U(flags) | U(op) | U(index) | FUZZ_GRANT | U(length) | U(segments)},
    {KVX_STREAM_DIALLER, KVX_FRAME_GET, U(flags) | U(op) | U(index) | FUZZ_GRANT | U(length) | U(segments)},
    {KVX_STREAM_DIALLER, KVX_FRAME_NOTIFY, U(op) | U(index) | FUZZ_GRANT | U(tag) | U(value)},
    {KVX_STREAM_DIALLER, KVX_FRAME_BYE, 0},
    {KVX_STREAM_ACCEPTOR, KVX_FRAME_ACK, U(flags) | U(status) | U(op) | U(index) | U(segment)},
    {KVX_STREAM_ACCEPTOR, KVX_FRAME_DATA, U(flags) | U(op) | U(index) | U(length)},
    {KVX_STREAM_ACCEPTOR, KVX_FRAME_BYE, 0},
    {KVX_STREAM_SIDE_DIALLER, KVX_FRAME_ATTACH, U(segments) | U(op) | U(segment) | FUZZ_GRANT | U(tag) | U(value)},
    {KVX_STREAM_SIDE_DIALLER, KVX_FRAME_DETACH, U(op)},
    {KVX_STREAM_SIDE_DIALLER, KVX_FRAME_QUIET, U(op)},
    {KVX_STREAM_SIDE_DIALLER, KVX_FRAME_NOTIFY, U(op) | FUZZ_GRANT | U(tag) | U(value)},
    {KVX_STREAM_SIDE_DIALLER, KVX_FRAME_PING, U(op) | U(tag) | U(value)},
    {KVX_STREAM_SIDE_DIALLER, KVX_FRAME_BYE, 0},
    {KVX_STREAM_SIDE_ACCEPTOR, KVX_FRAME_LOCATION, U(segments) | U(op)},
    {KVX_STREAM_SIDE_ACCEPTOR, KVX_FRAME_ACK, U(flags) | U(status) | U(op) | U(segment)},
    {KVX_STREAM_SIDE_ACCEPTOR, KVX_FRAME_REVOKE, U(op)},
    {KVX_STREAM_SIDE_ACCEPTOR, KVX_FRAME_PONG, U(status) | U(op) | U(tag)},
    {KVX_STREAM_SIDE_ACCEPTOR, KVX_FRAME_BYE, 0},
};

/* What the type does not use becomes 0; of a type that the sender does not have, nothing changes. */
static inline void fuzz_frame_trim(uint32_t sender, kvx_frame *frame) {
    for (size_t i = 0; i < sizeof fuzz_frames / sizeof fuzz_frames[0]; i++) {
        uint32_t uses = fuzz_frames[i].uses | U(type);
        if (fuzz_frames[i].sender != sender || fuzz_frames[i].type != frame->type) {
            continue;
        }
        uses |= frame->flags & KVX_FRAME_F_NOTIFY ? U(tag) | U(value) : 0;
#define TRIM(name)                                                                                                     \
    if (!(uses & U(name))) {                                                                                           \
        frame->name = 0;                                                                                               \
    }
        FUZZ_FRAME_FIELDS(TRIM)
#undef TRIM
    }
}

/* One field becomes what the input says. The number of segments stays within what a frame has room for. */
static inline void fuzz_frame_spoil(kvx_frame *frame, uint32_t field, uint64_t value) {
    switch (field % FUZZ_FRAME_COUNT) {
#define SPOIL(name)                                                                                                    \
    case FUZZ_##name:                                                                                                  \
        frame->name = (__typeof__(frame->name))value;                                                                  \
        break;
        FUZZ_FRAME_FIELDS(SPOIL)
#undef SPOIL
    }
    frame->segments %= KVX_STREAM_UNITS_MAX + 1;
}

static inline void fuzz_hello_spoil(kvx_hello *hello, uint32_t field, uint64_t value) {
    switch (field % FUZZ_HELLO_COUNT) {
#define SPOIL(name)                                                                                                    \
    case FUZZ_HELLO_##name:                                                                                            \
        hello->name = (__typeof__(hello->name))value;                                                                  \
        break;
        FUZZ_HELLO_FIELDS(SPOIL)
#undef SPOIL
#define SPOIL(name)                                                                                                    \
    case FUZZ_HELLO_##name:                                                                                            \
        memcpy(hello->name, &value, sizeof value);                                                                     \
        break;
        FUZZ_HELLO_BYTES(SPOIL)
#undef SPOIL
    }
}
#undef U

#endif

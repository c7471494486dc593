/* fuzz_stream.c: any bytes, in any pieces, through the receive state machine of the tcp data path and of side links.
 *
 * Two properties: nothing is read or written out of bounds (the sanitizers watch), and how the bytes are cut into
 * pieces makes no difference to what comes out. Inputs are programs: most of their frames are well-formed up to a
 * point, so that the fuzzer gets past the magic number without knowing it. */
#include "fuzz.h"
#include "fuzz_frames.h"
#include "proto/stream.h"

#define BYTES_MAX (1 << 16)
#define FRAME_MAX KVX_STREAM_FRAME_MIN

typedef struct reader {
    const uint8_t *data;
    size_t size;
} reader;

static uint64_t take(reader *input, size_t width) {
    uint64_t value = 0;
    for (size_t i = 0; i < width && input->size > 0; i++, input->data++, input->size--) {
        value = value << 8 | *input->data;
    }
    return value;
}

/* What the type does not use is 0, what it uses may be so. Returns how many segments, or units, are to follow. */
static uint32_t likely(uint32_t sender, kvx_frame *frame) {
    bool side = sender >= KVX_STREAM_SIDE_DIALLER;
    frame->op = frame->grant = frame->generation = frame->value = 7;
    frame->tag = frame->type == KVX_FRAME_PONG ? 0 : KVX_READ | KVX_WRITE;
    frame->segment = frame->type == KVX_FRAME_ACK ? KVX_SEGMENT_UNKNOWN : 0;
    if (side) {
        frame->segments = frame->type == KVX_FRAME_LOCATION ? KVX_STREAM_UNITS_MAX : frame->type == KVX_FRAME_ATTACH;
    }
    fuzz_frame_trim(sender, frame);
    return frame->segments;
}

/* Bytes to feed, made from the input. */
static size_t make(reader *input, uint32_t role, uint8_t *bytes) {
    static const uint8_t types[] = {KVX_FRAME_PUT,    KVX_FRAME_GET,    KVX_FRAME_DATA,     KVX_FRAME_ACK,
                                    KVX_FRAME_BYE,    KVX_FRAME_PING,   KVX_FRAME_PONG,     KVX_FRAME_NOTIFY,
                                    KVX_FRAME_ATTACH, KVX_FRAME_DETACH, KVX_FRAME_LOCATION, KVX_FRAME_REVOKE,
                                    KVX_FRAME_QUIET};
    bool side = role >= KVX_STREAM_SIDE_DIALLER;
    uint32_t opposite = role & 1 ? role + 1 : role - 1;
    size_t size = 0;
    uint8_t choice = (uint8_t)take(input, 1);
    if (choice % 8 != 0) {
        kvx_hello hello = {.version = choice % 8 == 1 ? (uint8_t)take(input, 1) : 1,
                           .role = (uint8_t)opposite,
                           .streams = 1,
                           .frame_bytes = FRAME_MAX};
        if (choice % 8 == 2) {
            uint32_t field = (uint32_t)take(input, 1);
            fuzz_hello_spoil(&hello, field, take(input, 1 + field / 32));
        }
        kvx_hello_encode(&hello, bytes);
        size = KVX_STREAM_HELLO_BYTES;
    }
    while (input->size > 0 && size < BYTES_MAX / 2) {
        choice = (uint8_t)take(input, 1);
        uint32_t count = (uint32_t)(choice % 4 == 0 ? take(input, 2) % 1100 : take(input, 1) % 4);
        kvx_frame frame = {.type = types[choice / 4 % sizeof types],
                           .segments = count,
                           .length = choice % 16 == 1 ? take(input, 8) : count * 4,
                           .flags = (uint16_t)(choice % 32 == 2 ? take(input, 2) : 0),
                           .status = (int32_t)(choice % 32 == 3 ? take(input, 4) : 0)};
        if (frame.type == KVX_FRAME_DATA && choice % 2) {
            frame.segments = count = 0;
            frame.length = take(input, 1);
        }
        if (count > KVX_STREAM_SEGMENTS_MAX) {
            count = 0;
        }
        if (side && choice % 8 != 1) {
            frame.length = 0;
        }
        if (choice % 16 > 3) { /* as it should be, or nearly */
            count = likely(opposite, &frame);
        }
        if (choice % 16 == 5) {
            uint32_t field = (uint32_t)take(input, 1);
            fuzz_frame_spoil(&frame, field, take(input, 1 + field / 32));
        }
        kvx_frame_encode(&frame, bytes + size);
        for (uint32_t i = 0; i < count; i++) {
            kvx_frame_segment_encode(bytes + size, i, take(input, 1), choice % 64 == 4 ? take(input, 8) : 4);
        }
        size += KVX_STREAM_HEADER_BYTES + count * KVX_STREAM_SEGMENT_BYTES;
        for (uint64_t i = 0;
             !side && i < frame.length + KVX_STREAM_TRAILER_BYTES && i < FRAME_MAX && size < BYTES_MAX - 1; i++) {
            bytes[size++] = (uint8_t)i;
        }
        if (choice >= 224 && size > 0) {
            bytes[take(input, 2) % size] ^= (uint8_t)(1 << take(input, 1) % 8);
        }
    }
    return size;
}

static uint64_t mix(uint64_t trace, uint64_t value) {
    return (trace ^ value) * 0x100000001b3u + 1;
}

/* Everything that comes out until more bytes are needed. False: the end. */
static int drain(kvx_stream_rx *rx, uint64_t *trace, uint64_t *skipped) {
    for (;;) {
        const uint8_t *bytes;
        kvx_rx_event event = kvx_rx_next(rx);
        switch (event) {
        case KVX_RX_MORE:
            return 1;
        case KVX_RX_ERROR:
            FUZZ_CHECK(rx->error == KVX_E_NOT_KVXFER || rx->error == KVX_E_VERSION || rx->error == KVX_E_INVALID);
            FUZZ_CHECK(kvx_rx_next(rx) == KVX_RX_ERROR);
            *trace = mix(*trace, (uint64_t)rx->error);
            return 0;
        case KVX_RX_PAYLOAD: {
            uint32_t length = kvx_rx_buffered(rx, &bytes);
            for (uint32_t i = 0; i < length; i++) {
                *trace = mix(*trace, bytes[i]);
            }
            *skipped += length;
            kvx_rx_payload_taken(rx, length, 0);
            if (rx->payload_left > 0) {
                return 1;
            }
            break;
        }
        case KVX_RX_FRAME: {
            uint64_t sum = 0;
            FUZZ_CHECK(rx->frame.segments <= KVX_STREAM_SEGMENTS_MAX && rx->frame.length <= FRAME_MAX);
            for (uint32_t i = 0; i < rx->frame.segments; i++) {
                uint64_t offset, length;
                kvx_rx_segment(rx, i, &offset, &length);
                sum += length;
                *trace = mix(*trace, offset);
            }
            if (rx->role >= KVX_STREAM_SIDE_DIALLER) {
                FUZZ_CHECK(rx->frame.length == 0 && rx->frame.segments <= KVX_STREAM_UNITS_MAX);
            } else {
                FUZZ_CHECK(rx->frame.segments == 0 || sum == rx->frame.length);
            }
        }
        /* fall through */
        case KVX_RX_HELLO:
        case KVX_RX_TRAILER:
            *trace = mix(*trace, (uint64_t)event * 1000 + rx->frame.type);
            break;
        }
    }
}

static uint64_t feed(uint32_t role, const uint8_t *bytes, size_t size, uint64_t seed) {
    kvx_stream_rx *rx = malloc(sizeof *rx); /* on the heap: the sanitizer guards its ends */
    uint64_t trace = 1, skipped = 0;
    kvx_rx_init(rx, role, FRAME_MAX);
    for (size_t at = 0; at < size;) {
        uint32_t space;
        uint8_t *to = kvx_rx_space(rx, &space);
        FUZZ_CHECK(space > 0);
        size_t piece = seed == 0 ? 1 : 1 + fuzz_random(&seed) % 5000;
        piece = piece < space ? piece : space;
        piece = piece < size - at ? piece : size - at;
        memcpy(to, bytes + at, piece);
        kvx_rx_received(rx, (uint32_t)piece);
        at += piece;
        if (!drain(rx, &trace, &skipped)) {
            break;
        }
    }
    trace = mix(trace, skipped);
    free(rx);
    return trace;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static uint8_t bytes[BYTES_MAX + KVX_STREAM_HEAD_MAX];
    reader input = {data, size};
    uint32_t role = KVX_STREAM_DIALLER + (uint32_t)take(&input, 1) % 4; /* of tcp, or of a side link */
    size_t made = make(&input, role, bytes);
    uint64_t trace = feed(role, bytes, made, 0);
    FUZZ_CHECK(trace == feed(role, bytes, made, 1));
    FUZZ_CHECK(trace == feed(role, bytes, made, 0xabcdef));
    FUZZ_CHECK(feed(role, data, size, 0) == feed(role, data, size, 7)); /* and as it is */
    return 0;
}

/* stream.c: encoding, authenticators and the receive state machine of the data path. Pure: no socket, no clock, no
 * allocation, so that a fuzzer can feed it byte by byte. All integers are little endian, put together by shifts. */
#include "proto/stream.h"

#include <string.h>

/* Offsets of the header's fields; the authenticator comes last so that everything before it is what it covers. */
enum {
    AT_MAGIC = 0,
    AT_VERSION = 4,
    AT_TYPE = 5,
    AT_FLAGS = 6,
    AT_SEGMENTS = 8,
    AT_STATUS = 12,
    AT_OP = 16,
    AT_INDEX = 24,
    AT_SEGMENT = 28,
    AT_GRANT = 32,
    AT_GENERATION = 40,
    AT_LENGTH = 48,
    AT_TAG = 56,
    AT_VALUE = 64,
    AT_MAC = 72,

    HELLO_AT_ROLE = 6,
    HELLO_AT_STREAM = 7,
    HELLO_AT_STREAMS = 8,
    HELLO_AT_ZERO = 9,
    HELLO_AT_STATUS = 12,
    HELLO_AT_FRAME_BYTES = 16,
    HELLO_AT_SESSION = 20,
    HELLO_AT_NONCE = 28,
    HELLO_AT_ENGINE = 44,
    HELLO_AT_END = 60,

    TRAILER_AT_STATUS = 0,
    TRAILER_AT_CRC = 4,
    TRAILER_AT_ZERO = 8,
    TRAILER_AT_MAC = 16
};

enum { RX_HELLO, RX_HEAD, RX_PAYLOAD, RX_TRAILER, RX_DEAD };

void kvx_hello_encode(const kvx_hello *hello, uint8_t bytes[KVX_STREAM_HELLO_BYTES]) {
    memset(bytes, 0, KVX_STREAM_HELLO_BYTES);
    kvx_bytes_store(bytes + AT_MAGIC, KVX_STREAM_MAGIC, 4);
    bytes[AT_VERSION] = hello->version;
    bytes[AT_TYPE] = KVX_FRAME_HELLO;
    bytes[HELLO_AT_ROLE] = hello->role;
    bytes[HELLO_AT_STREAM] = hello->stream;
    bytes[HELLO_AT_STREAMS] = hello->streams;
    kvx_bytes_store(bytes + HELLO_AT_STATUS, (uint32_t)hello->status, 4);
    kvx_bytes_store(bytes + HELLO_AT_FRAME_BYTES, hello->frame_bytes, 4);
    memcpy(bytes + HELLO_AT_SESSION, hello->session, sizeof hello->session);
    memcpy(bytes + HELLO_AT_NONCE, hello->nonce, KVX_NONCE_BYTES);
    memcpy(bytes + HELLO_AT_ENGINE, hello->engine_id, KVX_ID_BYTES);
}

void kvx_hello_encode_sealed(const kvx_hello *hello, uint8_t bytes[KVX_STREAM_SEALED_HELLO_BYTES]) {
    kvx_hello_encode(hello, bytes);
    memcpy(bytes + KVX_STREAM_HELLO_BYTES, hello->share, KVX_SHARE_BYTES);
}

void kvx_frame_encode(const kvx_frame *frame, uint8_t *bytes) {
    kvx_bytes_store(bytes + AT_MAGIC, KVX_STREAM_MAGIC, 4);
    bytes[AT_VERSION] = KVX_STREAM_VERSION;
    bytes[AT_TYPE] = frame->type;
    kvx_bytes_store(bytes + AT_FLAGS, frame->flags, 2);
    kvx_bytes_store(bytes + AT_SEGMENTS, frame->segments, 4);
    kvx_bytes_store(bytes + AT_STATUS, (uint32_t)frame->status, 4);
    kvx_bytes_store(bytes + AT_OP, frame->op, 8);
    kvx_bytes_store(bytes + AT_INDEX, frame->index, 4);
    kvx_bytes_store(bytes + AT_SEGMENT, frame->segment, 4);
    kvx_bytes_store(bytes + AT_GRANT, frame->grant, 8);
    kvx_bytes_store(bytes + AT_GENERATION, frame->generation, 8);
    kvx_bytes_store(bytes + AT_LENGTH, frame->length, 8);
    kvx_bytes_store(bytes + AT_TAG, frame->tag, 8);
    kvx_bytes_store(bytes + AT_VALUE, frame->value, 8);
    memset(bytes + AT_MAC, 0, KVX_MAC_BYTES);
}

void kvx_frame_segment_encode(uint8_t *bytes, uint32_t index, uint64_t offset, uint64_t length) {
    uint8_t *at = bytes + KVX_STREAM_HEADER_BYTES + (uint64_t)index * KVX_STREAM_SEGMENT_BYTES;
    kvx_bytes_store(at, offset, 8);
    kvx_bytes_store(at + 8, length, 8);
}

void kvx_frame_units_encode(uint8_t *bytes, const void *units, uint32_t count) {
    memcpy(bytes + KVX_STREAM_HEADER_BYTES, units, (size_t)count * KVX_STREAM_UNIT_BYTES);
}

static void stream_mac_begin(kvx_mac_state *state, const kvx_stream_auth *auth, const uint8_t *key, uint64_t counter,
                             uint32_t sender_role, uint32_t kind) {
    uint8_t where[16];
    kvx_bytes_store(where, counter, 8);
    kvx_bytes_store(where + 8, sender_role, 4);
    kvx_bytes_store(where + 12, kind, 4);
    kvx_mac_init(state, key);
    kvx_mac_update(state, auth->nonces, sizeof auth->nonces);
    kvx_mac_update(state, where, sizeof where);
}

void kvx_frame_mac(const kvx_stream_auth *auth, const uint8_t *key, uint64_t counter, uint32_t sender_role,
                   const uint8_t *head, uint64_t length, uint8_t *mac) {
    kvx_mac_state state;
    stream_mac_begin(&state, auth, key, counter, sender_role, 1);
    kvx_mac_update(&state, head, AT_MAC);
    if (length > KVX_STREAM_HEADER_BYTES) {
        kvx_mac_update(&state, head + KVX_STREAM_HEADER_BYTES, length - KVX_STREAM_HEADER_BYTES);
    }
    kvx_mac_final(&state, mac);
}

void kvx_frame_seal(const kvx_stream_auth *auth, const uint8_t *key, uint64_t counter, uint32_t sender_role,
                    uint8_t *head, uint64_t length) {
    kvx_frame_mac(auth, key, counter, sender_role, head, length, head + AT_MAC);
}

bool kvx_frame_open(const kvx_stream_auth *auth, const uint8_t *key, uint64_t counter, uint32_t sender_role,
                    const uint8_t *head, uint64_t length) {
    uint8_t mac[KVX_MAC_BYTES];
    kvx_frame_mac(auth, key, counter, sender_role, head, length, mac);
    return kvx_mac_equal(mac, head + AT_MAC);
}

static void stream_trailer_mac(const kvx_stream_auth *auth, const uint8_t *key, uint64_t counter, uint32_t sender_role,
                               const uint8_t *bytes, uint8_t *mac) {
    kvx_mac_state state;
    stream_mac_begin(&state, auth, key, counter, sender_role, 2);
    kvx_mac_update(&state, bytes, TRAILER_AT_MAC);
    kvx_mac_final(&state, mac);
}

void kvx_trailer_encode(const kvx_stream_auth *auth, const uint8_t *key, uint64_t counter, uint32_t sender_role,
                        int32_t status, uint32_t crc, uint8_t bytes[KVX_STREAM_TRAILER_BYTES]) {
    memset(bytes, 0, KVX_STREAM_TRAILER_BYTES);
    kvx_bytes_store(bytes + TRAILER_AT_STATUS, (uint32_t)status, 4);
    kvx_bytes_store(bytes + TRAILER_AT_CRC, crc, 4);
    stream_trailer_mac(auth, key, counter, sender_role, bytes, bytes + TRAILER_AT_MAC);
}

bool kvx_trailer_open(const kvx_stream_auth *auth, const uint8_t *key, uint64_t counter, uint32_t sender_role,
                      const uint8_t bytes[KVX_STREAM_TRAILER_BYTES], int32_t *status_p, uint32_t *crc_p) {
    uint8_t mac[KVX_MAC_BYTES];
    stream_trailer_mac(auth, key, counter, sender_role, bytes, mac);
    if (!kvx_mac_equal(mac, bytes + TRAILER_AT_MAC) || kvx_bytes_load(bytes + TRAILER_AT_ZERO, 8) != 0) {
        return false;
    }
    *status_p = (int32_t)(uint32_t)kvx_bytes_load(bytes + TRAILER_AT_STATUS, 4);
    *crc_p = (uint32_t)kvx_bytes_load(bytes + TRAILER_AT_CRC, 4);
    return true;
}

/* -- spans ------------------------------------------------------------------------------------------------------ */

uint32_t kvx_spans_vectors(const kvx_spans *spans, struct iovec *vectors, uint32_t max, uint64_t bytes_max,
                           uint64_t *bytes_p) {
    uint64_t left = spans->left < bytes_max ? spans->left : bytes_max;
    uint64_t offset = spans->offset, bytes = 0;
    uint32_t count = 0;
    for (const kvx_segment *at = spans->segments; left > 0 && count < max; at++, count++) {
        uint64_t length = at->length - offset < left ? at->length - offset : left;
        vectors[count] = (struct iovec){.iov_base = spans->base + at->local_offset + offset, .iov_len = length};
        left -= length;
        bytes += length;
        offset = 0;
    }
    *bytes_p = bytes;
    return count;
}

void kvx_spans_advance(kvx_spans *spans, uint64_t bytes) {
    spans->left -= bytes;
    spans->offset += bytes;
    /* the last segment may be walked in part only; do not look past it */
    while (spans->left > 0 && spans->offset >= spans->segments->length) {
        spans->offset -= spans->segments->length;
        spans->segments++;
    }
}

uint32_t kvx_spans_crc(const kvx_spans *spans, uint64_t bytes, uint32_t crc) {
    uint64_t offset = spans->offset;
    for (const kvx_segment *at = spans->segments; bytes > 0; at++) {
        uint64_t length = at->length - offset < bytes ? at->length - offset : bytes;
        crc = kvx_crc32c(crc, spans->base + at->local_offset + offset, length);
        bytes -= length;
        offset = 0;
    }
    return crc;
}

void kvx_spans_write(const kvx_spans *spans, const uint8_t *source, uint64_t bytes) {
    uint64_t offset = spans->offset;
    for (const kvx_segment *at = spans->segments; bytes > 0; at++) {
        uint64_t length = at->length - offset < bytes ? at->length - offset : bytes;
        memcpy(spans->base + at->local_offset + offset, source, length);
        source += length;
        bytes -= length;
        offset = 0;
    }
}

/* -- receive ---------------------------------------------------------------------------------------------------- */

void kvx_rx_init(kvx_stream_rx *rx, uint32_t role, uint32_t frame_bytes) {
    memset(rx, 0, offsetof(kvx_stream_rx, buffer));
    rx->role = role;
    rx->version = KVX_STREAM_VERSION;
    rx->frame_bytes = frame_bytes;
    rx->state = RX_HELLO;
}

uint8_t *kvx_rx_space(kvx_stream_rx *rx, uint32_t *length_p) {
    if (rx->begin > 0) {
        memmove(rx->buffer, rx->buffer + rx->begin, rx->end - rx->begin);
        rx->end -= rx->begin;
        rx->begin = 0;
    }
    *length_p = KVX_STREAM_BUFFER_BYTES - rx->end;
    return rx->buffer + rx->end;
}

void kvx_rx_received(kvx_stream_rx *rx, uint32_t length) {
    rx->end += length;
}

static kvx_rx_event stream_fail(kvx_stream_rx *rx, int error) {
    rx->state = RX_DEAD;
    rx->error = error;
    return KVX_RX_ERROR;
}

static uint32_t stream_other_role(uint32_t role) {
    return role & 1 ? role + 1 : role - 1;
}

static kvx_rx_event stream_parse_hello(kvx_stream_rx *rx) {
    const uint8_t *at = rx->buffer + rx->begin;
    uint32_t have = rx->end - rx->begin;
    uint8_t magic[4];
    kvx_bytes_store(magic, KVX_STREAM_MAGIC, 4);
    /* scanners and other protocols are recognised at their first byte */
    if (memcmp(at, magic, have < 4 ? have : 4) != 0) {
        return stream_fail(rx, KVX_E_NOT_KVXFER);
    }
    if (have > AT_VERSION && at[AT_VERSION] != rx->version) {
        rx->hello.version = at[AT_VERSION];
        return stream_fail(rx, KVX_E_VERSION);
    }
    bool sealed = rx->version == KVX_STREAM_VERSION_SEALED;
    uint32_t whole = sealed ? KVX_STREAM_SEALED_HELLO_BYTES : KVX_STREAM_HELLO_BYTES;
    if (have < whole) {
        return KVX_RX_MORE;
    }
    kvx_hello *hello = &rx->hello;
    hello->version = at[AT_VERSION];
    hello->role = at[HELLO_AT_ROLE];
    hello->stream = at[HELLO_AT_STREAM];
    hello->streams = at[HELLO_AT_STREAMS];
    hello->status = (int32_t)(uint32_t)kvx_bytes_load(at + HELLO_AT_STATUS, 4);
    hello->frame_bytes = (uint32_t)kvx_bytes_load(at + HELLO_AT_FRAME_BYTES, 4);
    memcpy(hello->session, at + HELLO_AT_SESSION, sizeof hello->session);
    memcpy(hello->nonce, at + HELLO_AT_NONCE, KVX_NONCE_BYTES);
    memcpy(hello->engine_id, at + HELLO_AT_ENGINE, KVX_ID_BYTES);
    if (sealed) {
        memcpy(hello->share, at + KVX_STREAM_HELLO_BYTES, KVX_SHARE_BYTES);
    }
    if (at[AT_TYPE] != KVX_FRAME_HELLO || hello->role != stream_other_role(rx->role)) {
        return stream_fail(rx, KVX_E_NOT_KVXFER);
    }
    bool side = rx->role == KVX_STREAM_SIDE_DIALLER || rx->role == KVX_STREAM_SIDE_ACCEPTOR;
    bool dialled =
        rx->role == KVX_STREAM_ACCEPTOR || rx->role == KVX_STREAM_SIDE_ACCEPTOR; /* who has nothing to refuse */
    if (hello->streams == 0 || hello->streams > (side ? 1 : KVX_STREAM_STREAMS_MAX) ||
        hello->stream >= hello->streams || hello->frame_bytes < KVX_STREAM_FRAME_MIN ||
        (dialled && hello->status != KVX_OK) || kvx_bytes_load(at + HELLO_AT_ZERO, 3) != 0 ||
        kvx_bytes_load(at + HELLO_AT_END, 4) != 0) {
        return stream_fail(rx, KVX_E_INVALID);
    }
    rx->begin += whole;
    rx->state = RX_HEAD;
    return KVX_RX_HELLO;
}

static void stream_decode(kvx_frame *frame, const uint8_t *at) {
    frame->type = at[AT_TYPE];
    frame->flags = (uint16_t)kvx_bytes_load(at + AT_FLAGS, 2);
    frame->segments = (uint32_t)kvx_bytes_load(at + AT_SEGMENTS, 4);
    frame->status = (int32_t)(uint32_t)kvx_bytes_load(at + AT_STATUS, 4);
    frame->op = kvx_bytes_load(at + AT_OP, 8);
    frame->index = (uint32_t)kvx_bytes_load(at + AT_INDEX, 4);
    frame->segment = (uint32_t)kvx_bytes_load(at + AT_SEGMENT, 4);
    frame->grant = kvx_bytes_load(at + AT_GRANT, 8);
    frame->generation = kvx_bytes_load(at + AT_GENERATION, 8);
    frame->length = kvx_bytes_load(at + AT_LENGTH, 8);
    frame->tag = kvx_bytes_load(at + AT_TAG, 8);
    frame->value = kvx_bytes_load(at + AT_VALUE, 8);
}

/* -- what may be said -----------------------------------------------------------------------------------------------
 */

enum {
    SAYS_STATUS = 1,
    SAYS_OP = 2,
    SAYS_INDEX = 4,
    SAYS_SEGMENT = 8,
    SAYS_GRANT = 16, /* and generation */
    SAYS_TAG = 32,
    SAYS_VALUE = 64,
    SAYS_LENGTH = 128,
    SAYS_LIST = 256 /* of segments */
};

/* One row for each type that a role takes: which flags it may have, which fields it uses (the others are 0), and how
 * many units it has. tests/native/frames.py says the same from the specification. */
typedef struct frame_rule {
    uint8_t role, type;
    uint16_t flags, says;
    uint32_t units;
} frame_rule;

static const frame_rule rules[] = {
    {KVX_STREAM_ACCEPTOR, KVX_FRAME_ATTACH, 0, SAYS_OP | SAYS_GRANT | SAYS_TAG | SAYS_VALUE, 0},
    {KVX_STREAM_ACCEPTOR, KVX_FRAME_DETACH, 0, SAYS_GRANT, 0},
    {KVX_STREAM_ACCEPTOR, KVX_FRAME_PUT, KVX_FRAME_F_NOTIFY | KVX_FRAME_F_CHECK,
     SAYS_OP | SAYS_INDEX | SAYS_GRANT | SAYS_LENGTH | SAYS_LIST, 0},
    {KVX_STREAM_ACCEPTOR, KVX_FRAME_GET, KVX_FRAME_F_CHECK, SAYS_OP | SAYS_INDEX | SAYS_GRANT | SAYS_LENGTH | SAYS_LIST,
     0},
    {KVX_STREAM_ACCEPTOR, KVX_FRAME_NOTIFY, 0, SAYS_OP | SAYS_INDEX | SAYS_GRANT | SAYS_TAG | SAYS_VALUE, 0},
    {KVX_STREAM_ACCEPTOR, KVX_FRAME_BYE, 0, 0, 0},
    {KVX_STREAM_DIALLER, KVX_FRAME_ACK, KVX_FRAME_F_BARE, SAYS_STATUS | SAYS_OP | SAYS_INDEX | SAYS_SEGMENT, 0},
    {KVX_STREAM_DIALLER, KVX_FRAME_DATA, KVX_FRAME_F_CHECK, SAYS_OP | SAYS_INDEX | SAYS_LENGTH, 0},
    {KVX_STREAM_DIALLER, KVX_FRAME_BYE, 0, 0, 0},
    {KVX_STREAM_SIDE_ACCEPTOR, KVX_FRAME_ATTACH, 0, SAYS_OP | SAYS_SEGMENT | SAYS_GRANT | SAYS_TAG | SAYS_VALUE, 1},
    {KVX_STREAM_SIDE_ACCEPTOR, KVX_FRAME_DETACH, 0, SAYS_OP, 0},
    {KVX_STREAM_SIDE_ACCEPTOR, KVX_FRAME_QUIET, 0, SAYS_OP, 0},
    {KVX_STREAM_SIDE_ACCEPTOR, KVX_FRAME_NOTIFY, 0, SAYS_OP | SAYS_GRANT | SAYS_TAG | SAYS_VALUE, 0},
    {KVX_STREAM_SIDE_ACCEPTOR, KVX_FRAME_PING, 0, SAYS_OP | SAYS_TAG | SAYS_VALUE, 0},
    {KVX_STREAM_SIDE_ACCEPTOR, KVX_FRAME_BYE, 0, 0, 0},
    {KVX_STREAM_SIDE_DIALLER, KVX_FRAME_LOCATION, 0, SAYS_OP, KVX_STREAM_UNITS_MAX},
    {KVX_STREAM_SIDE_DIALLER, KVX_FRAME_ACK, KVX_FRAME_F_BARE, SAYS_STATUS | SAYS_OP | SAYS_SEGMENT, 0},
    {KVX_STREAM_SIDE_DIALLER, KVX_FRAME_REVOKE, 0, SAYS_OP, 0},
    {KVX_STREAM_SIDE_DIALLER, KVX_FRAME_PONG, 0, SAYS_STATUS | SAYS_OP | SAYS_TAG, 0},
    {KVX_STREAM_SIDE_DIALLER, KVX_FRAME_BYE, 0, 0, 0},
};

static const frame_rule *stream_rule_find(uint32_t role, uint8_t type) {
    for (size_t i = 0; i < sizeof rules / sizeof rules[0]; i++) {
        if (rules[i].role == role && rules[i].type == type) {
            return &rules[i];
        }
    }
    return NULL;
}

/* Fields that are not used are 0, counts and lengths are within bounds. */
static bool stream_fields_fit(const kvx_stream_rx *rx, const frame_rule *rule) {
    const kvx_frame *frame = &rx->frame;
    uint32_t says = rule->says;
    if (frame->flags & KVX_FRAME_F_NOTIFY) {
        says |= SAYS_TAG | SAYS_VALUE;
    }
    bool listed = says & SAYS_LIST ? frame->segments > 0 && frame->segments <= KVX_STREAM_SEGMENTS_MAX
                                   : frame->segments == rule->units;
    bool length = says & SAYS_LENGTH ? frame->length > 0 && frame->length <= rx->frame_bytes : frame->length == 0;
    return !(frame->flags & ~rule->flags) && listed && length && (says & SAYS_STATUS || frame->status == 0) &&
           (says & SAYS_OP || frame->op == 0) && (says & SAYS_INDEX || frame->index == 0) &&
           (says & SAYS_SEGMENT || frame->segment == 0) &&
           (says & SAYS_GRANT || (frame->grant == 0 && frame->generation == 0)) &&
           (says & SAYS_TAG || frame->tag == 0) && (says & SAYS_VALUE || frame->value == 0);
}

/* A segment can be named only of a transfer that failed, and with the key: which it may be, its request knows. */
static bool stream_ack_fits(const kvx_stream_rx *rx) {
    const kvx_frame *frame = &rx->frame;
    bool names = frame->segment != KVX_SEGMENT_UNKNOWN;
    if (frame->flags & KVX_FRAME_F_BARE) {
        return kvx_refusal_bare(frame->status) && !names;
    }
    if (names && rx->role == KVX_STREAM_SIDE_DIALLER) {
        return false;
    }
    return frame->status == KVX_OK ? !names : kvx_refusal(frame->status);
}

/* May a frame like this come from the other side at all? Looks at the fixed header only. */
static bool stream_header_is_valid(const kvx_stream_rx *rx) {
    const kvx_frame *frame = &rx->frame;
    const frame_rule *rule = stream_rule_find(rx->role, frame->type);
    if (rule == NULL || !stream_fields_fit(rx, rule)) {
        return false;
    }
    switch (frame->type) {
    case KVX_FRAME_ATTACH: /* the segment is a process id, on side links */
        return frame->tag > 0 && frame->tag <= (KVX_READ | KVX_WRITE) && frame->segment <= INT32_MAX;
    case KVX_FRAME_ACK:
        return stream_ack_fits(rx);
    case KVX_FRAME_PONG:
        return frame->status == KVX_OK || frame->status == KVX_E_DEVICE;
    default:
        return true;
    }
}

/* The segments must be non-empty and add up to the payload, without overflow. */
static bool stream_segments_add_up(const kvx_stream_rx *rx) {
    uint64_t sum = 0;
    if (rx->frame.length == 0) { /* units: their meaning is their reader's */
        return true;
    }
    for (uint32_t i = 0; i < rx->frame.segments; i++) {
        uint64_t offset, length;
        kvx_rx_segment(rx, i, &offset, &length);
        if (length == 0 || length > rx->frame.length - sum) {
            return false;
        }
        sum += length;
    }
    return rx->frame.segments == 0 || sum == rx->frame.length;
}

static kvx_rx_event stream_parse_head(kvx_stream_rx *rx) {
    const uint8_t *at = rx->buffer + rx->begin;
    uint32_t have = rx->end - rx->begin;
    if (have < KVX_STREAM_HEADER_BYTES) {
        return KVX_RX_MORE;
    }
    if (kvx_bytes_load(at + AT_MAGIC, 4) != KVX_STREAM_MAGIC || at[AT_VERSION] != KVX_STREAM_VERSION) {
        return stream_fail(rx, KVX_E_INVALID);
    }
    stream_decode(&rx->frame, at);
    if (!stream_header_is_valid(rx)) {
        return stream_fail(rx, KVX_E_INVALID);
    }
    uint32_t whole = KVX_STREAM_HEADER_BYTES + rx->frame.segments * KVX_STREAM_SEGMENT_BYTES;
    if (have < whole) {
        return KVX_RX_MORE;
    }
    rx->head = at;
    rx->head_length = whole;
    if (!stream_segments_add_up(rx)) {
        return stream_fail(rx, KVX_E_INVALID);
    }
    rx->begin += whole;
    rx->counter++;
    if (rx->frame.type == KVX_FRAME_PUT || rx->frame.type == KVX_FRAME_DATA) {
        rx->payload_left = rx->frame.length;
        rx->state = RX_PAYLOAD;
    }
    return KVX_RX_FRAME;
}

kvx_rx_event kvx_rx_next(kvx_stream_rx *rx) {
    switch (rx->state) {
    case RX_HELLO:
        return stream_parse_hello(rx);
    case RX_HEAD:
        return stream_parse_head(rx);
    case RX_PAYLOAD:
        if (rx->payload_left > 0) {
            return KVX_RX_PAYLOAD;
        }
        rx->state = RX_TRAILER;
        /* fall through */
    case RX_TRAILER:
        if (rx->end - rx->begin < KVX_STREAM_TRAILER_BYTES) {
            return KVX_RX_MORE;
        }
        rx->head = rx->buffer + rx->begin;
        rx->head_length = KVX_STREAM_TRAILER_BYTES;
        rx->begin += KVX_STREAM_TRAILER_BYTES;
        rx->counter++;
        rx->state = RX_HEAD;
        return KVX_RX_TRAILER;
    default:
        return KVX_RX_ERROR;
    }
}

void kvx_rx_segment(const kvx_stream_rx *rx, uint32_t index, uint64_t *offset_p, uint64_t *length_p) {
    const uint8_t *at = rx->head + KVX_STREAM_HEADER_BYTES + (uint64_t)index * KVX_STREAM_SEGMENT_BYTES;
    *offset_p = kvx_bytes_load(at, 8);
    *length_p = kvx_bytes_load(at + 8, 8);
}

const uint8_t *kvx_rx_units(const kvx_stream_rx *rx) {
    return rx->head + KVX_STREAM_HEADER_BYTES;
}

uint32_t kvx_rx_buffered(const kvx_stream_rx *rx, const uint8_t **bytes_p) {
    uint32_t have = rx->end - rx->begin;
    *bytes_p = rx->buffer + rx->begin;
    return have < rx->payload_left ? have : (uint32_t)rx->payload_left;
}

void kvx_rx_payload_taken(kvx_stream_rx *rx, uint32_t buffered, uint64_t direct) {
    rx->begin += buffered;
    rx->payload_left -= buffered + direct;
}

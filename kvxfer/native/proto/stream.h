/* stream.h: the bytes of the tcp data path ("KVXD"), without a socket.
 *
 * A connection carries one hello each way and then frames: a fixed little-endian header, a list of (owner offset,
 * length) segments, the payload, and after a payload a trailer. The dialler sends requests, the acceptor answers them
 * in order. kvx_stream_rx turns received bytes into frames: it owns a small buffer in which headers are parsed whole,
 * and hands the payload to its caller, who receives it straight into memory. It bounds every count and length before
 * anyone acts on it. docs/wire-format.md, "data path (KVXD)", is the specification.
 */
#ifndef KVX_STREAM_H
#define KVX_STREAM_H

#include <stdbool.h>
#include <sys/uio.h>

#include "api.h"
#include "proto/auth.h"
#include "proto/refusal.h"

#define KVX_STREAM_MAGIC         0x4458564bU /* "KVXD" */
#define KVX_STREAM_VERSION       1
#define KVX_STREAM_HELLO_BYTES   64
#define KVX_SHARE_BYTES          32
#define KVX_STREAM_HEADER_BYTES  88
#define KVX_STREAM_SEGMENT_BYTES 16
#define KVX_STREAM_TRAILER_BYTES 32
#define KVX_STREAM_SEGMENTS_MAX  1024
#define KVX_STREAM_HEAD_MAX      (KVX_STREAM_HEADER_BYTES + KVX_STREAM_SEGMENTS_MAX * KVX_STREAM_SEGMENT_BYTES)
#define KVX_STREAM_BUFFER_BYTES  24576       /* a whole head and some of what follows */
#define KVX_STREAM_FRAME_MAX     (64u << 20) /* no configuration may ask for larger payloads */
#define KVX_STREAM_FRAME_MIN     4096        /* nor for smaller ones: an op would become billions of frames */
#define KVX_STREAM_STREAMS_MAX   32
#define KVX_STREAM_UNIT_BYTES    16
#define KVX_STREAM_UNITS_MAX     16 /* of LOCATION, the longest frame of a side link */

_Static_assert(KVX_STREAM_BUFFER_BYTES >= KVX_STREAM_HEAD_MAX, "a head must fit the buffer");

enum kvx_frame_type {
    KVX_FRAME_HELLO = 1,  /* both ways, first */
    KVX_FRAME_ATTACH = 2, /* request: prove the key, learn that the owner holds it too */
    KVX_FRAME_DETACH = 3, /* request without an answer: the grant is not used any more */
    KVX_FRAME_PUT = 4,    /* request with a payload */
    KVX_FRAME_GET = 5,    /* request; answered by DATA, or by ACK when refused */
    KVX_FRAME_NOTIFY = 6, /* request: tell the owner (tag, value) */
    KVX_FRAME_ACK = 7,    /* answer */
    KVX_FRAME_DATA = 8,   /* answer with a payload */
    KVX_FRAME_BYE = 9,    /* either way: the end that follows is meant */

    /* side links only (hixl): the bytes go another way, the link carries who may and who no longer may */
    KVX_FRAME_LOCATION = 10, /* answer to ATTACH: where the grant lies */
    KVX_FRAME_REVOKE = 11,   /* acceptor: stop using this grant */
    KVX_FRAME_QUIET = 12,    /* dialler: nothing of ours uses it, and nothing will */
    KVX_FRAME_PING = 13,     /* dialler: are you well, and the device that `value` numbers? */
    KVX_FRAME_PONG = 14      /* acceptor: yes; or `status` says what is wrong with the device */
};

#define KVX_FRAME_F_NOTIFY 1 /* PUT: tell the owner (tag, value) after the payload */
#define KVX_FRAME_F_CHECK  2 /* PUT, GET, DATA: the trailer carries a CRC-32C of the payload */
#define KVX_FRAME_F_BARE   4 /* ACK without an authenticator: the owner has no key to prove; never with status 0 */
#define KVX_FRAME_F_ALL    7

#define KVX_SEGMENT_UNKNOWN UINT32_MAX

typedef struct kvx_frame {
    uint8_t type;
    uint16_t flags;
    uint32_t segments;
    int32_t status;
    uint64_t op;
    uint32_t index;   /* of the frame within its op */
    uint32_t segment; /* ACK: first segment that failed within the frame, KVX_SEGMENT_UNKNOWN = not known */
    uint64_t grant;
    uint64_t generation;
    uint64_t length; /* payload */
    uint64_t tag;
    uint64_t value;
} kvx_frame;

typedef struct kvx_hello {
    uint8_t version;
    uint8_t role; /* KVX_STREAM_DIALLER or KVX_STREAM_ACCEPTOR */
    uint8_t stream;
    uint8_t streams;
    int32_t status;       /* acceptor: why it refuses */
    uint32_t frame_bytes; /* largest payload that the sender of this hello accepts */
    uint8_t nonce[KVX_NONCE_BYTES];
    uint8_t engine_id[KVX_ID_BYTES];
    uint8_t session[8];
    uint8_t share[KVX_SHARE_BYTES]; /* KVX_STREAM_VERSION_SEALED only */
} kvx_hello;

/* The version that a hello carries when everything after it comes in sealed records (seal.h). Such a hello is followed
 * by its sender's share. Frames inside the records are those of KVX_STREAM_VERSION. */
#define KVX_STREAM_VERSION_SEALED     2
#define KVX_STREAM_SEALED_HELLO_BYTES (KVX_STREAM_HELLO_BYTES + KVX_SHARE_BYTES)

#define KVX_STREAM_DIALLER       1
#define KVX_STREAM_ACCEPTOR      2
#define KVX_STREAM_SIDE_DIALLER  3
#define KVX_STREAM_SIDE_ACCEPTOR 4

/* What both sides mix into every authenticator of a connection. */
typedef struct kvx_stream_auth {
    uint8_t nonces[2 * KVX_NONCE_BYTES]; /* dialler's, acceptor's */
} kvx_stream_auth;

/* Little-endian numbers of `width` bytes, wherever they stand. */
static inline void kvx_bytes_store(uint8_t *bytes, uint64_t value, uint32_t width) {
    for (uint32_t i = 0; i < width; i++) {
        bytes[i] = (uint8_t)(value >> (8 * i));
    }
}

static inline uint64_t kvx_bytes_load(const uint8_t *bytes, uint32_t width) {
    uint64_t value = 0;
    for (uint32_t i = 0; i < width; i++) {
        value |= (uint64_t)bytes[i] << (8 * i);
    }
    return value;
}

void kvx_hello_encode(const kvx_hello *hello, uint8_t bytes[KVX_STREAM_HELLO_BYTES]);
/* The same with the share. */
void kvx_hello_encode_sealed(const kvx_hello *hello, uint8_t bytes[KVX_STREAM_SEALED_HELLO_BYTES]);
void kvx_frame_encode(const kvx_frame *frame, uint8_t *bytes);
void kvx_frame_segment_encode(uint8_t *bytes, uint32_t index, uint64_t offset, uint64_t length);
/* Units of a side link's frame (`frame->segments` of them): bytes that the authenticator covers like the header. */
void kvx_frame_units_encode(uint8_t *bytes, const void *units, uint32_t count);
/* Authenticator of an encoded head (header without its mac field, and segments) of `length` bytes. */
void kvx_frame_mac(const kvx_stream_auth *auth, const uint8_t *key, uint64_t counter, uint32_t sender_role,
                   const uint8_t *head, uint64_t length, uint8_t *mac);
/* Seal puts the authenticator into an encoded head; open says whether it is right (constant time). */
void kvx_frame_seal(const kvx_stream_auth *auth, const uint8_t *key, uint64_t counter, uint32_t sender_role,
                    uint8_t *head, uint64_t length);
bool kvx_frame_open(const kvx_stream_auth *auth, const uint8_t *key, uint64_t counter, uint32_t sender_role,
                    const uint8_t *head, uint64_t length);
void kvx_trailer_encode(const kvx_stream_auth *auth, const uint8_t *key, uint64_t counter, uint32_t sender_role,
                        int32_t status, uint32_t crc, uint8_t bytes[KVX_STREAM_TRAILER_BYTES]);
/* False: the authenticator is wrong, or what a trailer does not use is not 0. */
bool kvx_trailer_open(const kvx_stream_auth *auth, const uint8_t *key, uint64_t counter, uint32_t sender_role,
                      const uint8_t bytes[KVX_STREAM_TRAILER_BYTES], int32_t *status_p, uint32_t *crc_p);

/* -- a walk over a list of spans of one memory: where the next payload byte comes from or goes to -------------------
 */
typedef struct kvx_spans {
    uint8_t *base;
    const kvx_segment *segments; /* local_offset from base, length */
    uint64_t offset;             /* consumed of segments[0] */
    uint64_t left;               /* bytes until the end of the walk */
} kvx_spans;

/* Up to `max` vectors and about `bytes_max` bytes; returns the count, *bytes_p their sum. Does not advance. */
uint32_t kvx_spans_vectors(const kvx_spans *spans, struct iovec *vectors, uint32_t max, uint64_t bytes_max,
                           uint64_t *bytes_p);
void kvx_spans_advance(kvx_spans *spans, uint64_t bytes);
/* CRC-32C of the next `bytes` bytes, continuing `crc`. Does not advance. */
uint32_t kvx_spans_crc(const kvx_spans *spans, uint64_t bytes, uint32_t crc);
/* Copy `bytes` bytes into the spans. Does not advance. */
void kvx_spans_write(const kvx_spans *spans, const uint8_t *source, uint64_t bytes);

/* -- receive state machine -------------------------------------------------------------------------------------- */
typedef enum kvx_rx_event {
    KVX_RX_MORE,    /* receive into kvx_rx_space() and call again */
    KVX_RX_HELLO,   /* rx->hello is set */
    KVX_RX_FRAME,   /* rx->frame, rx->head (encoded, for the MAC) and rx->segments are set */
    KVX_RX_PAYLOAD, /* rx->payload_left bytes of payload follow: buffered ones by kvx_rx_buffered, then the socket */
    KVX_RX_TRAILER, /* rx->head points at the trailer */
    KVX_RX_ERROR    /* rx->error: KVX_E_NOT_KVXFER, KVX_E_VERSION or KVX_E_INVALID; no further call */
} kvx_rx_event;

typedef struct kvx_stream_rx {
    uint32_t role;        /* ours: which frame types may arrive */
    uint8_t version;      /* that a hello must have; KVX_STREAM_VERSION unless set after kvx_rx_init */
    uint32_t state;       /* private */
    uint32_t frame_bytes; /* our bound on a payload */
    int error;
    uint32_t begin, end; /* of unparsed bytes in buffer */
    uint64_t payload_left;
    uint64_t counter; /* of frames and trailers received: input of the MAC */
    kvx_hello hello;
    kvx_frame frame;
    const uint8_t *head; /* valid until the next call */
    uint32_t head_length;
    uint8_t buffer[KVX_STREAM_BUFFER_BYTES];
} kvx_stream_rx;

void kvx_rx_init(kvx_stream_rx *rx, uint32_t role, uint32_t frame_bytes);
/* Free room at the end of the buffer (compacts first; 0 only while a head is being looked at). */
uint8_t *kvx_rx_space(kvx_stream_rx *rx, uint32_t *length_p);
void kvx_rx_received(kvx_stream_rx *rx, uint32_t length);
kvx_rx_event kvx_rx_next(kvx_stream_rx *rx);
/* Segment `index` of the current frame's head. */
void kvx_rx_segment(const kvx_stream_rx *rx, uint32_t index, uint64_t *offset_p, uint64_t *length_p);
/* The units of the current frame, rx->frame.segments of them. */
const uint8_t *kvx_rx_units(const kvx_stream_rx *rx);
/* Payload bytes that are in the buffer already: *bytes_p points at them. */
uint32_t kvx_rx_buffered(const kvx_stream_rx *rx, const uint8_t **bytes_p);
/* `buffered` bytes were taken from the buffer, or (direct) `direct` bytes were received past it. */
void kvx_rx_payload_taken(kvx_stream_rx *rx, uint32_t buffered, uint64_t direct);

#endif

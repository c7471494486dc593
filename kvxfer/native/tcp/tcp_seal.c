/* tcp_seal.c: sealed records (seal.h) between the socket and the rest of a connection.
 *
 * Leaving: what would go to the socket is sealed into one buffer per connection and sent from there; "sent" then means
 * sealed, and the sending half is idle once the buffer is empty too. A frame that is small is one record. Of a large
 * one the head and the trailer are records of their own, so that those between them are payload from end to end.
 *
 * Arriving: ciphertext is received into one buffer. A record that is payload from end to end is opened straight into
 * the target spans, as a plain receive would: one pass over the bytes, from the buffer that the CPU's cache still
 * holds. Its tag is verified after that; if it is wrong the connection ends and with it the op. Everything else is
 * opened in place, and only looked at when its tag was right. */
#include "tcp/tcp.h"
#include "core/vault.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "proto/seal.h"

#define SMALL_BYTES   (8u << 10)  /* a frame of at most this much is one record */
#define RECEIVE_BYTES (16u << 10) /* asked for when it is not known what comes */
#define OUT_ROOM      (KVX_SEAL_TEXT_MAX + KVX_STREAM_HEAD_MAX + KVX_STREAM_TRAILER_BYTES + 3 * KVX_SEAL_EXTRA_BYTES)
#define IN_ROOM       (KVX_SEAL_TEXT_MAX + KVX_SEAL_EXTRA_BYTES + RECEIVE_BYTES)

struct tcp_seal {
    kvx_seal keys;
    bool open;                     /* there are keys: all that comes and goes is records */
    uint32_t out_begin, out_end;   /* of `out`: sealed and not yet sent; tx_lock */
    uint32_t in_begin, in_end;     /* of `in`: received and not yet opened; rx_lock */
    uint32_t text_begin, text_end; /* of `in`: opened in place and not yet handed on; rx_lock */
    uint8_t out[OUT_ROOM];
    uint8_t in[IN_ROOM];
};

bool kvx_tcp_seal_make(tcp_conn *conn) {
    const kvx_libcrypto *api = kvx_libcrypto_get(NULL, 0);
    conn->seal = api == NULL ? NULL : kvx_vault_take(sizeof *conn->seal);
    if (conn->seal == NULL) {
        return false;
    }
    conn->hello.version = KVX_STREAM_VERSION_SEALED;
    conn->rx.version = KVX_STREAM_VERSION_SEALED;
    return kvx_seal_begin(&conn->seal->keys, api, conn->hello.share);
}

void kvx_tcp_seal_free(tcp_conn *conn) {
    if (conn->seal != NULL) {
        kvx_seal_end(&conn->seal->keys);
        kvx_vault_give(conn->seal);
    }
}

bool kvx_tcp_seal_open(const tcp_conn *conn) {
    return conn->seal->open;
}

bool kvx_tcp_seal_agree(tcp_conn *conn) {
    bool dialler = conn->role == KVX_STREAM_DIALLER;
    const uint8_t *secret = dialler ? conn->peer->peer->secret : conn->tcp->secret;
    uint8_t greeting[2 * KVX_STREAM_SEALED_HELLO_BYTES];
    kvx_hello_encode_sealed(dialler ? &conn->hello : &conn->rx.hello, greeting);
    kvx_hello_encode_sealed(dialler ? &conn->rx.hello : &conn->hello, greeting + KVX_STREAM_SEALED_HELLO_BYTES);
    conn->seal->open =
        kvx_seal_agree(&conn->seal->keys, conn->role, secret, greeting, conn->rx.hello.share, conn->auth.nonces);
    return conn->seal->open;
}

/* -- leaving; tx_lock is held, or the connection is still greeting --------------------------------------------------
 */

tcp_flush kvx_tcp_seal_flush(tcp_conn *conn) {
    tcp_seal *seal = conn->seal;
    while (seal->out_begin < seal->out_end) {
        struct iovec vector = {.iov_base = seal->out + seal->out_begin, .iov_len = seal->out_end - seal->out_begin};
        struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1};
        ssize_t result = kvx_tcp_send_message(conn->fd, &message, 0);
        if (result < 0 && errno != EINTR) {
            return errno == EAGAIN ? TCP_FLUSH_BLOCKED : TCP_FLUSH_BROKEN;
        }
        seal->out_begin += result > 0 ? (uint32_t)result : 0;
    }
    seal->out_begin = seal->out_end = 0;
    return TCP_FLUSH_IDLE;
}

static bool tcp_seal_put_record(tcp_seal *seal, struct iovec *vectors, uint32_t length) {
    KVX_ASSERT(length + KVX_SEAL_EXTRA_BYTES <= OUT_ROOM - seal->out_end);
    bool good = kvx_seal_record(&seal->keys.out, vectors, length, seal->out + seal->out_end);
    seal->out_end += good ? length + KVX_SEAL_EXTRA_BYTES : 0;
    return good;
}

bool kvx_tcp_seal_hello(tcp_conn *conn, const uint8_t *hello, uint32_t length) {
    tcp_seal *seal = conn->seal;
    if (length > 0) {
        memcpy(seal->out + seal->out_end, hello, length);
        seal->out_end += length;
    }
    return tcp_seal_put_record(seal, NULL, 0) && kvx_tcp_seal_flush(conn) == TCP_FLUSH_IDLE;
}

/* How much the next record takes: a small frame whole, otherwise head, payload and trailer apart. */
static uint32_t tcp_seal_next_record_length(const tcp_tx *tx, uint64_t bytes, uint64_t taken) {
    uint64_t head = tx->head_length - tx->head_sent, left = bytes - taken;
    if (bytes <= SMALL_BYTES) {
        return (uint32_t)left;
    }
    if (taken < head) {
        return (uint32_t)(head - taken);
    }
    uint64_t payload = tx->bulk ? tx->payload_length - tx->payload_sent : 0, done = taken - head;
    uint64_t most = done < payload ? payload - done : left;
    most = most < left ? most : left;
    return (uint32_t)(most < KVX_SEAL_TEXT_MAX ? most : KVX_SEAL_TEXT_MAX);
}

ssize_t kvx_tcp_seal_send(tcp_conn *conn, struct msghdr *message) {
    tcp_seal *seal = conn->seal;
    struct iovec *vectors = message->msg_iov;
    uint64_t bytes = 0, taken = 0;
    if (kvx_tcp_seal_flush(conn) != TCP_FLUSH_IDLE) {
        return -1;
    }
    for (size_t i = 0; i < message->msg_iovlen; i++) {
        bytes += vectors[i].iov_len;
    }
    while (taken < bytes) {
        uint32_t length = tcp_seal_next_record_length(&conn->tx, bytes, taken);
        if (length + KVX_SEAL_EXTRA_BYTES > OUT_ROOM - seal->out_end) {
            break;
        }
        while (vectors->iov_len == 0) {
            vectors++;
        }
        if (!tcp_seal_put_record(seal, vectors, length)) {
            errno = EIO;
            return -1;
        }
        taken += length;
    }
    return kvx_tcp_seal_flush(conn) == TCP_FLUSH_BROKEN ? -1 : (ssize_t)taken;
}

void kvx_tcp_seal_last(tcp_conn *conn, void *bytes, uint32_t length) {
    struct iovec vector = {.iov_base = bytes, .iov_len = length};
    if (kvx_tcp_seal_flush(conn) == TCP_FLUSH_IDLE && tcp_seal_put_record(conn->seal, &vector, length)) {
        (void)kvx_tcp_seal_flush(conn);
    }
}

/* -- arriving; rx_lock is held by a dialler -------------------------------------------------------------------------
 */

ssize_t kvx_tcp_seal_receive(tcp_conn *conn, bool *full_p) {
    tcp_seal *seal = conn->seal;
    uint32_t have = seal->in_end - seal->in_begin;
    KVX_ASSERT(seal->text_begin == seal->text_end); /* otherwise we are not reading */
    if (seal->in_begin > 0) {
        memmove(seal->in, seal->in + seal->in_begin, have);
        seal->in_begin = 0;
        seal->in_end = have;
    }
    /* the rest of the record and the next length, so that nothing has to be moved the next time */
    uint32_t length = kvx_seal_length(&seal->keys.in, seal->in, have);
    uint32_t most = length > have && length != UINT32_MAX ? length - have + KVX_SEAL_HEADER_BYTES : RECEIVE_BYTES;
    most = most < IN_ROOM - have ? most : IN_ROOM - have;
    ssize_t result = recv(conn->fd, seal->in + have, most, MSG_DONTWAIT);
    seal->in_end += result > 0 ? (uint32_t)result : 0;
    *full_p = result == (ssize_t)most;
    return result;
}

static bool tcp_seal_on_seal_error(tcp_conn *conn) {
    bool greeting = conn->state == TCP_GREETING;
    KVX_COUNT(conn->tcp->counters, protocol_errors, 1);
    kvx_tcp_conn_end(conn, greeting ? KVX_E_SECRET : KVX_E_PEER_LOST, EBADMSG, true);
    return false;
}

/* Payload from end to end. */
static bool tcp_seal_open_payload(tcp_conn *conn, const uint8_t *record, uint32_t length) {
    struct iovec vectors[TCP_VECTORS_MAX];
    uint64_t bytes = 0;
    int error = conn->role == KVX_STREAM_ACCEPTOR ? kvx_socket_error(conn->fd) : 0;
    if (error != 0) { /* who reset us counts on nothing reaching memory any more */
        kvx_tcp_conn_end(conn, KVX_E_PEER_LOST, error, true);
        return false;
    }
    uint32_t count = kvx_spans_vectors(&conn->rx_spans, vectors, TCP_VECTORS_MAX, length, &bytes);
    KVX_ASSERT(bytes == length); /* a frame has no more segments than there are vectors */
    if (!kvx_seal_open(&conn->seal->keys.in, record, vectors, count)) {
        return tcp_seal_on_seal_error(conn);
    }
    KVX_COUNT(conn->tcp->counters, copied_bytes, length);
    kvx_tcp_conn_payload(conn, length);
    return true;
}

static bool tcp_seal_open_record(tcp_conn *conn, uint32_t length) {
    tcp_seal *seal = conn->seal;
    const uint8_t *buffered;
    uint8_t *record = seal->in + seal->in_begin;
    bool first = !seal->keys.in.begun;
    bool payload = length > 0 && length <= conn->rx.payload_left && kvx_rx_buffered(&conn->rx, &buffered) == 0;
    seal->in_begin += length + KVX_SEAL_EXTRA_BYTES;
    if (payload && kvx_tcp_conn_may_write(conn)) {
        return tcp_seal_open_payload(conn, record, length);
    }
    const struct iovec place = {.iov_base = record + KVX_SEAL_HEADER_BYTES, .iov_len = length};
    if (!kvx_seal_open(&seal->keys.in, record, &place, 1)) {
        return tcp_seal_on_seal_error(conn);
    }
    if (first) {
        kvx_tcp_conn_sealed(conn);
    } else if (payload) {
        kvx_tcp_conn_payload(conn, length); /* thrown away */
    } else {
        seal->text_begin = (uint32_t)((uint8_t *)place.iov_base - seal->in);
        seal->text_end = seal->text_begin + length;
    }
    return true;
}

/* Some of what was opened in place, to where it belongs. */
static void tcp_seal_deliver_opened(tcp_conn *conn) {
    tcp_seal *seal = conn->seal;
    uint8_t *text = seal->in + seal->text_begin;
    const uint8_t *buffered;
    uint32_t length = seal->text_end - seal->text_begin, room;
    if (conn->rx.payload_left > 0 && kvx_rx_buffered(&conn->rx, &buffered) == 0) {
        length = length < conn->rx.payload_left ? length : (uint32_t)conn->rx.payload_left;
        if (kvx_tcp_conn_may_write(conn)) {
            kvx_spans_write(&conn->rx_spans, text, length);
        }
        kvx_tcp_conn_payload(conn, length);
    } else {
        uint8_t *at = kvx_rx_space(&conn->rx, &room);
        length = length < room ? length : room;
        memcpy(at, text, length);
        kvx_rx_received(&conn->rx, length);
    }
    seal->text_begin += length;
}

bool kvx_tcp_seal_more(tcp_conn *conn) {
    tcp_seal *seal = conn->seal;
    if (!seal->open) {
        return false;
    }
    if (seal->text_begin < seal->text_end) {
        tcp_seal_deliver_opened(conn);
        return true;
    }
    uint32_t have = seal->in_end - seal->in_begin;
    uint32_t whole = kvx_seal_length(&seal->keys.in, seal->in + seal->in_begin, have);
    if (whole == UINT32_MAX) {
        return tcp_seal_on_seal_error(conn);
    }
    return whole > 0 && whole <= have && tcp_seal_open_record(conn, whole - KVX_SEAL_EXTRA_BYTES);
}

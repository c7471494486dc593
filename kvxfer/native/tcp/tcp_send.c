/* tcp_send.c: the sending half of a connection, the same for both roles.
 *
 * One frame at a time is being sent: head, payload straight from the spans, trailer; one sendmsg covers as much of the
 * three as it can. A checksum is computed just ahead of the piece that is about to be sent, so the payload is read from
 * memory once and from the cache the second time. The trailer is encoded when it goes out: its status can still say
 * that the memory was taken back. */
#include "tcp/tcp.h"

#include <errno.h>
#include <string.h>

static const uint8_t zeros[64 * 1024];

#if defined(__SANITIZE_THREAD__)
#include <sys/syscall.h>
#include <unistd.h>

_Atomic uint64_t kvx_tcp_order;

ssize_t kvx_tcp_send_message(int fd, const struct msghdr *message, int flags) {
    for (size_t i = 0; i < message->msg_iovlen; i++) {
        __tsan_read_range(message->msg_iov[i].iov_base, (long)message->msg_iov[i].iov_len);
    }
    atomic_fetch_add_explicit(&kvx_tcp_order, 1, memory_order_acq_rel);
    return syscall(SYS_sendmsg, fd, message, MSG_DONTWAIT | MSG_NOSIGNAL | flags);
}
#else
ssize_t kvx_tcp_send_message(int fd, const struct msghdr *message, int flags) {
    return sendmsg(fd, message, MSG_DONTWAIT | MSG_NOSIGNAL | flags);
}
#endif

void kvx_tcp_tx_start(tcp_conn *conn, const uint8_t *key, uint32_t head_length, const kvx_spans *payload) {
    tcp_tx *tx = &conn->tx;
    tx->active = true;
    tx->counter++;
    tx->head_length = head_length;
    tx->head_sent = 0;
    tx->bulk = payload != NULL;
    tx->zeros = tx->corrupt = tx->check = tx->lent = false;
    if (key != NULL) {
        memcpy(tx->key, key, KVX_KEY_BYTES);
        kvx_frame_seal(&conn->auth, key, tx->counter, conn->role, tx->head, head_length);
    }
    if (payload != NULL) {
        tx->counter++; /* the trailer's */
        tx->spans = tx->crc_spans = *payload;
        tx->payload_sent = 0;
        tx->payload_length = payload->left;
        tx->trailer_sent = 0;
        tx->status = KVX_OK;
        tx->crc = 0;
        KVX_COUNT(conn->tcp->counters, frames, 1);
    }
}

bool kvx_tcp_tx_append(tcp_conn *conn, const kvx_frame *frame, const uint8_t *key) {
    tcp_tx *tx = &conn->tx;
    if (!tx->active) {
        tx->head_length = tx->head_sent = 0;
    } else if (tx->bulk || tx->head_length + KVX_STREAM_HEADER_BYTES > KVX_STREAM_HEAD_MAX) {
        return false;
    }
    uint8_t *at = tx->head + tx->head_length;
    kvx_frame_encode(frame, at);
    tx->counter++;
    if (key != NULL) {
        kvx_frame_seal(&conn->auth, key, tx->counter, conn->role, at, KVX_STREAM_HEADER_BYTES);
    }
    tx->head_length += KVX_STREAM_HEADER_BYTES;
    tx->bulk = false;
    tx->active = true;
    return true;
}

/* Payload vectors; at most `max` (>= 2) of them, and `most` bytes. */
static uint32_t tcp_send_payload_vectors(tcp_tx *tx, struct iovec *vectors, uint32_t max, uint64_t most,
                                         uint8_t *flipped, uint64_t *bytes_p) {
    uint64_t left = tx->payload_length - tx->payload_sent;
    most = left < most ? left : most;
    uint32_t count = 0;
    if (tx->zeros) {
        uint64_t bytes = 0;
        for (; bytes < most && count < max; count++) {
            uint64_t piece = most - bytes < sizeof zeros ? most - bytes : sizeof zeros;
            vectors[count] = (struct iovec){.iov_base = (void *)(uintptr_t)zeros, .iov_len = piece};
            bytes += piece;
        }
        *bytes_p = bytes;
        return count;
    }
    if (tx->corrupt && tx->payload_sent == 0) { /* the first byte comes from elsewhere */
        count = kvx_spans_vectors(&tx->spans, vectors + 1, max - 1, most, bytes_p);
        uint8_t *first = vectors[1].iov_base;
        *flipped = *first ^ 1;
        vectors[0] = (struct iovec){.iov_base = flipped, .iov_len = 1};
        vectors[1] = (struct iovec){.iov_base = first + 1, .iov_len = vectors[1].iov_len - 1};
        count++;
    } else {
        count = kvx_spans_vectors(&tx->spans, vectors, max, most, bytes_p);
    }
    if (tx->check) {
        uint64_t ahead = tx->spans.left - tx->crc_spans.left; /* summed but not sent by the last call */
        if (ahead < *bytes_p) {
            tx->crc = kvx_spans_crc(&tx->crc_spans, *bytes_p - ahead, tx->crc);
            kvx_spans_advance(&tx->crc_spans, *bytes_p - ahead);
        }
    }
    return count;
}

static uint64_t tcp_send_consume(uint64_t *sent, uint64_t most) {
    uint64_t part = *sent < most ? *sent : most;
    *sent -= part;
    return part;
}

/* One sendmsg of the current frame. > 0: bytes; otherwise as sendmsg. */
static ssize_t tcp_send_some(tcp_conn *conn) {
    tcp_tx *tx = &conn->tx;
    struct iovec vectors[TCP_VECTORS_MAX];
    uint32_t count = 0;
    uint64_t bytes = 0;
    uint8_t flipped;
    bool lent = tx->lent && tx->payload_sent < tx->payload_length;
    if (lent && tx->head_sent == tx->head_length) {
        return kvx_tcp_lend_some(conn);
    }
    if (tx->head_sent < tx->head_length) {
        vectors[count++] =
            (struct iovec){.iov_base = tx->head + tx->head_sent, .iov_len = tx->head_length - tx->head_sent};
    }
    if (tx->bulk && !lent) {
        uint64_t left = tx->payload_length - tx->payload_sent;
        if (left > 0) {
            uint64_t most = conn->seal != NULL ? TCP_SEALED_BYTES : tx->check ? TCP_CHECKED_BYTES : TCP_SEND_BYTES;
            count += tcp_send_payload_vectors(tx, vectors + count, TCP_VECTORS_MAX - 2, most, &flipped, &bytes);
        }
        if (bytes == left) {
            if (tx->trailer_sent == 0) {
                kvx_trailer_encode(&conn->auth, tx->key, tx->counter, conn->role, kvx_refusal_told(tx->status),
                                   tx->check ? tx->crc : 0, tx->trailer);
            }
            vectors[count++] = (struct iovec){.iov_base = tx->trailer + tx->trailer_sent,
                                              .iov_len = KVX_STREAM_TRAILER_BYTES - tx->trailer_sent};
        }
    }
    struct msghdr message = {.msg_iov = vectors, .msg_iovlen = count};
    ssize_t result = conn->seal != NULL ? kvx_tcp_seal_send(conn, &message)
                                        : kvx_tcp_send_message(conn->fd, &message, lent ? MSG_MORE : 0);
    if (result <= 0) {
        return result;
    }
    uint64_t sent = (uint64_t)result;
    tx->head_sent += (uint32_t)tcp_send_consume(&sent, tx->head_length - tx->head_sent);
    if (tx->bulk) {
        uint64_t payload = tcp_send_consume(&sent, tx->payload_length - tx->payload_sent);
        tx->payload_sent += payload;
        if (!tx->zeros && payload > 0) {
            kvx_spans_advance(&tx->spans, payload);
        }
        tx->trailer_sent += (uint32_t)tcp_send_consume(&sent, KVX_STREAM_TRAILER_BYTES - tx->trailer_sent);
        KVX_COUNT(conn->tcp->counters, copied_bytes, payload);
    }
    return result;
}

static bool tcp_send_is_finished(const tcp_tx *tx) {
    return tx->head_sent == tx->head_length &&
           (!tx->bulk || (tx->payload_sent == tx->payload_length && tx->trailer_sent == KVX_STREAM_TRAILER_BYTES));
}

tcp_flush kvx_tcp_flush(tcp_conn *conn, uint64_t bytes_max) {
    bool dialler = conn->role == KVX_STREAM_DIALLER;
    for (uint64_t bytes = 0; conn->state == TCP_OPEN || conn->state == TCP_LINGER;) {
        if (!conn->tx.active) {
            if (!(dialler ? kvx_tcp_xfer_next(conn) : kvx_tcp_serve_next(conn))) {
                return conn->seal == NULL ? TCP_FLUSH_IDLE : kvx_tcp_seal_flush(conn);
            }
            if (bytes_max == TCP_TURN_BYTES) { /* splice may raise SIGPIPE, which only our own threads block */
                kvx_tcp_lend_begin(conn);
            }
        }
        if (bytes >= bytes_max) {
            return TCP_FLUSH_BLOCKED; /* the socket is still writable: epoll brings us back after the others */
        }
        ssize_t result = tcp_send_some(conn);
        if (result < 0 && errno == EAGAIN) {
            return TCP_FLUSH_BLOCKED;
        }
        if (result < 0 && errno != EINTR) {
            return TCP_FLUSH_BROKEN;
        }
        bytes += result > 0 ? (uint64_t)result : 0;
        if (tcp_send_is_finished(&conn->tx)) {
            conn->tx.active = false;
            if (dialler) {
                conn->sending = NULL;
            } else {
                kvx_tcp_serve_sent(conn);
            }
        }
    }
    return TCP_FLUSH_IDLE;
}

void kvx_tcp_pump(tcp_conn *conn) {
    tcp_flush flush;
    bool again;
    do {
        pthread_mutex_lock(&conn->tx_lock);
        flush = kvx_tcp_flush(conn, TCP_TURN_BYTES);
        int error = errno;
        conn->want_out = flush == TCP_FLUSH_BLOCKED;
        pthread_mutex_unlock(&conn->tx_lock);
        if (flush == TCP_FLUSH_BROKEN) {
            kvx_tcp_conn_end(conn, KVX_E_PEER_LOST, error, true);
            return;
        }
        again = false;
        if (conn->role == KVX_STREAM_ACCEPTOR && conn->rx_stopped && conn->answers < TCP_ANSWERS_MAX &&
            !conn->notify_blocked) {
            kvx_tcp_serve_wake(conn); /* parses what is buffered, which may make new answers */
            again = conn->state == TCP_OPEN;
        }
    } while (again);
    if (conn->state == TCP_OPEN) {
        kvx_tcp_conn_watch(conn);
    }
    if (flush == TCP_FLUSH_IDLE && conn->state == TCP_LINGER) {
        (void)shutdown(conn->fd, SHUT_WR);
    }
    kvx_tcp_conn_arm(conn);
}

bool kvx_tcp_send_now(tcp_conn *conn, const void *bytes, size_t length) {
    ssize_t result = send(conn->fd, bytes, length, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (result >= 0 && (size_t)result != length) {
        errno = EAGAIN;
    }
    return result == (ssize_t)length;
}

void kvx_tcp_send_bye(tcp_conn *conn) {
    uint8_t bytes[KVX_STREAM_HEADER_BYTES];
    const kvx_frame frame = {.type = KVX_FRAME_BYE};
    kvx_frame_encode(&frame, bytes);
    if (conn->seal != NULL) {
        kvx_tcp_seal_last(conn, bytes, sizeof bytes);
    } else {
        (void)kvx_tcp_send_now(conn, bytes, sizeof bytes);
    }
}

/* tcp_splice.c: puts whose pages are lent to the kernel instead of being copied into it.
 *
 * vmsplice makes a pipe refer to the pages of the source, splice makes the socket refer to what the pipe does, and a
 * network card (or, on this host, the receiver's copy) reads the source itself: half of the copies of a transfer inside
 * a host, and nearly all of the sender's CPU time anywhere.
 *
 * So the source must not change until the other side has the bytes, which holds for puts and for nothing else: a put
 * ends when its owner has answered the last byte. What has no such end is copied: answers to gets, whose grant may be
 * taken back while they lie in a queue; blocks that stage device memory, which the next frame overwrites; and what is
 * about to be encrypted or damaged. A put that ends by a reset is the exception: docs/design/0010.
 *
 * The pipe belongs to the connection, is made for the first frame that can use it, and is empty between frames. If the
 * kernel refuses any of it (no pipes left, memory that cannot be lent, a sandbox), the connection copies from then on.
 */
#define _GNU_SOURCE /* vmsplice, splice, pipe2 */
#include "tcp/tcp.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PIPE_BYTES      (1u << 20)   /* what an unprivileged process may ask for */
#define PIPE_BYTES_MIN  (64u << 10)  /* with less, copying is as quick */
#define LEND_BYTES_MIN  (256u << 10) /* of a frame; below, two more system calls cost as much as the copy */
#define SEGMENT_AVERAGE 4096u        /* smaller ones fill the pipe's places with little in each */
#define LEND_VECTORS    256

static void tcp_splice_pipe_close(tcp_pipe *lane) {
    close(lane->out);
    close(lane->in);
    lane->out = lane->in = -1;
    lane->held = 0;
}

void kvx_tcp_pipe_free(tcp_pipe *lane) {
    if (lane->made) {
        tcp_splice_pipe_close(lane);
        lane->made = false;
    }
}

/* The rest of this connection's payloads are copied; what the pipe holds was not counted as sent. */
static void tcp_splice_disable(tcp_conn *conn) {
    kvx_tcp_pipe_free(&conn->lane);
    conn->lane.refused = true;
    conn->tx.lent = false;
}

static bool tcp_splice_pipe_open(tcp_pipe *lane) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) {
        return false;
    }
    *lane = (tcp_pipe){.out = ends[0], .in = ends[1], .made = true};
    (void)fcntl(lane->in, F_SETPIPE_SZ, PIPE_BYTES);
    if (fcntl(lane->in, F_GETPIPE_SZ) < (int)PIPE_BYTES_MIN) { /* this user has too many pipes */
        kvx_tcp_pipe_free(lane);
        return false;
    }
    return true;
}

void kvx_tcp_lend_begin(tcp_conn *conn) {
    const tcp_request *request = conn->sending;
    tcp_tx *tx = &conn->tx;
    if (conn->role != KVX_STREAM_DIALLER || !tx->bulk || request == NULL || request->staged != NULL || tx->corrupt ||
        tx->payload_length < LEND_BYTES_MIN || conn->lane.refused || conn->seal != NULL ||
        (conn->tcp->config->flags & KVX_ENGINE_NO_LEND) != 0) {
        return;
    }
    uint64_t segments = (tx->head_length - KVX_STREAM_HEADER_BYTES) / KVX_STREAM_SEGMENT_BYTES;
    if (tx->payload_length / segments < SEGMENT_AVERAGE) {
        return;
    }
    if (!conn->lane.made && !tcp_splice_pipe_open(&conn->lane)) {
        conn->lane.refused = true;
        return;
    }
    tx->lent = true;
    tx->lend_spans = tx->spans;
}

/* Fills the empty pipe. False: see errno. */
static bool tcp_splice_pipe_fill(tcp_conn *conn) {
    tcp_tx *tx = &conn->tx;
    struct iovec vectors[LEND_VECTORS];
    uint64_t bytes;
    uint32_t count = kvx_spans_vectors(&tx->lend_spans, vectors, LEND_VECTORS, PIPE_BYTES, &bytes);
#if defined(__SANITIZE_THREAD__)
    for (uint32_t i = 0; i < count; i++) {
        __tsan_read_range(vectors[i].iov_base, (long)vectors[i].iov_len);
    }
#endif
    ssize_t lent = vmsplice(conn->lane.in, vectors, count, SPLICE_F_NONBLOCK);
    if (lent <= 0) {
        return false;
    }
    if (tx->check) {
        tx->crc = kvx_spans_crc(&tx->lend_spans, (uint64_t)lent, tx->crc);
    }
    kvx_spans_advance(&tx->lend_spans, (uint64_t)lent);
    tx->crc_spans = tx->lend_spans; /* where copying would go on */
    conn->lane.held = (uint64_t)lent;
    return true;
}

ssize_t kvx_tcp_lend_some(tcp_conn *conn) {
    tcp_tx *tx = &conn->tx;
    tcp_pipe *lane = &conn->lane;
    if (lane->held == 0 && !tcp_splice_pipe_fill(conn)) {
        if (errno != EINTR) {
            tcp_splice_disable(conn);
        }
        errno = EINTR; /* once more, by copying */
        return -1;
    }
    ssize_t result =
        splice(lane->out, NULL, conn->fd, NULL, lane->held, SPLICE_F_NONBLOCK | SPLICE_F_MORE /* the trailer */);
    if (result > 0) {
        lane->held -= (uint64_t)result;
        tx->payload_sent += (uint64_t)result;
        kvx_spans_advance(&tx->spans, (uint64_t)result);
        KVX_COUNT(conn->tcp->counters, lent_bytes, (uint64_t)result);
    } else if (result == 0 || (errno != EAGAIN && errno != EINTR && errno != EPIPE && errno != ECONNRESET)) {
        tcp_splice_disable(conn);
        errno = EINTR;
        return -1;
    }
    return result;
}

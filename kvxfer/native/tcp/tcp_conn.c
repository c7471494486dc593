/* tcp_conn.c: the life of one connection, on its progress thread: connect, greet, receive, end.
 *
 * Payload never passes through the buffer of the parser, apart from what arrived together with its head: a receive
 * scatters straight into the target spans, with the parser's buffer as the last vector, so one system call brings the
 * rest of a payload, the trailer and the next head. A payload that must not be written any more is thrown away inside
 * the kernel (MSG_TRUNC). */
#include "tcp/tcp.h"
#include "list.h"
#include "core/vault.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define RECEIVE_BYTES (2u << 20) /* in one recvmsg: how long a revoke or cancel may have to wait for us */

/* Which states may follow which. */
static const uint8_t transitions[] = {
    [TCP_NEW] = 1 << TCP_CONNECTING | 1 << TCP_DEAD,
    [TCP_CONNECTING] = 1 << TCP_GREETING | 1 << TCP_DEAD,
    [TCP_GREETING] = 1 << TCP_OPEN | 1 << TCP_LINGER | 1 << TCP_DEAD,
    [TCP_OPEN] = 1 << TCP_LINGER | 1 << TCP_DEAD,
    [TCP_LINGER] = 1 << TCP_DEAD,
    [TCP_DEAD] = 0,
};

static void tcp_conn_become(tcp_conn *conn, tcp_state next) {
    KVX_ASSERT(transitions[conn->state] & 1 << next);
    conn->state = next;
}

tcp_conn *kvx_tcp_conn_new(tcp_transport *tcp, uint32_t role) {
    tcp_conn *conn = kvx_vault_take(sizeof *conn);
    if (conn == NULL) {
        return NULL;
    }
    if (role == KVX_STREAM_DIALLER) {
        conn->requests = kvx_vault_take(TCP_REQUESTS_MAX * sizeof *conn->requests);
    } else {
        conn->rx_segments = malloc(KVX_STREAM_SEGMENTS_MAX * sizeof *conn->rx_segments);
    }
    if (conn->requests == NULL && conn->rx_segments == NULL) {
        kvx_vault_give(conn);
        return NULL;
    }
    conn->tcp = tcp;
    conn->role = role;
    conn->fd = -1;
    conn->state = role == KVX_STREAM_DIALLER ? TCP_NEW : TCP_GREETING;
    conn->hello = (kvx_hello){
        .version = KVX_STREAM_VERSION, .role = (uint8_t)role, .streams = 1, .frame_bytes = tcp->frame_bytes};
    memcpy(conn->hello.engine_id, tcp->config->engine_id, KVX_ID_BYTES);
    kvx_random(conn->hello.nonce, KVX_NONCE_BYTES);
    pthread_mutex_init(&conn->tx_lock, NULL);
    pthread_mutex_init(&conn->rx_lock, NULL);
    kvx_rx_init(&conn->rx, role, tcp->frame_bytes);
    if (tcp->encrypted && !kvx_tcp_seal_make(conn)) {
        kvx_tcp_conn_free(conn);
        return NULL;
    }
    return conn;
}

void kvx_tcp_conn_free(tcp_conn *conn) {
    while (conn->control_first != NULL) {
        tcp_control *control = conn->control_first;
        conn->control_first = control->next;
        kvx_vault_give(control);
    }
    kvx_tcp_pipe_free(&conn->lane);
    kvx_tcp_stage_free(&conn->tx_stage);
    kvx_tcp_stage_free(&conn->rx_stage);
    kvx_tcp_seal_free(conn);
    pthread_mutex_destroy(&conn->tx_lock);
    pthread_mutex_destroy(&conn->rx_lock);
    kvx_vault_give(conn->requests);
    free(conn->rx_segments);
    free(conn->attached);
    kvx_vault_give(conn);
}

void kvx_tcp_conn_deadline(tcp_conn *conn, uint64_t deadline_ms) {
    tcp_thread *thread = conn->thread;
    if (conn->deadline_ms == 0 || deadline_ms < conn->deadline_ms) {
        conn->deadline_ms = deadline_ms;
    }
    if (thread->deadline_ms == 0 || conn->deadline_ms < thread->deadline_ms) {
        thread->deadline_ms = conn->deadline_ms;
    }
}

void kvx_tcp_conn_arm(tcp_conn *conn) {
    if (conn->state == TCP_DEAD) {
        return;
    }
    if (atomic_load(&conn->owned) != conn->in_owner_set) {
        struct epoll_event owner = {.events = EPOLLIN};
        conn->in_owner_set = !conn->in_owner_set;
        int op = conn->in_owner_set ? EPOLL_CTL_ADD : EPOLL_CTL_DEL;
        if (epoll_ctl(conn->tcp->owner_set, op, conn->fd, &owner) != 0) {
            KVX_ASSERT(conn->in_owner_set); /* taking out needs no memory */
            conn->in_owner_set = false;
            atomic_store(&conn->owned, false);
        }
    }
    uint32_t events = conn->rx_stopped || conn->in_owner_set ? 0 : (uint32_t)EPOLLIN;
    if (conn->state == TCP_CONNECTING || conn->want_out) {
        events |= EPOLLOUT;
    }
    if (events == conn->events) {
        return;
    }
    struct epoll_event event = {.events = events, .data.ptr = conn};
    if (epoll_ctl(conn->thread->epoll_fd, EPOLL_CTL_MOD, conn->fd, &event) != 0) {
        kvx_panic("epoll_ctl(MOD)", __FILE__, __LINE__); /* needs no memory: only a wrong descriptor can fail it */
    }
    conn->events = events;
}

static void tcp_conn_start(tcp_conn *conn) {
    tcp_thread *thread = conn->thread;
    const kvx_engine_config *config = conn->tcp->config;
    KVX_LIST_PUSH(thread->conns, conn);
    if (conn->role == KVX_STREAM_DIALLER) {
        if (kvx_tcp_peer_over(conn)) {
            return;
        }
        int error = kvx_tcp_dial(conn->tcp, &conn->peer->address, conn->peer->address_length, &conn->fd);
        if (error != 0) {
            kvx_tcp_conn_end(conn, error == EMFILE || error == ENFILE ? KVX_E_FDS : KVX_E_UNREACHABLE, error, false);
            return;
        }
        tcp_conn_become(conn, TCP_CONNECTING);
        kvx_tcp_conn_deadline(conn, kvx_now_ms() + config->connect_ms);
    } else {
        kvx_tcp_tune(conn->tcp, conn->fd, true);
        kvx_tcp_conn_deadline(conn, kvx_now_ms() + config->handshake_ms);
    }
    conn->events = conn->state == TCP_CONNECTING ? EPOLLIN | EPOLLOUT : EPOLLIN;
    struct epoll_event event = {.events = conn->events, .data.ptr = conn};
    if (epoll_ctl(thread->epoll_fd, EPOLL_CTL_ADD, conn->fd, &event) != 0) {
        kvx_tcp_conn_end(conn, KVX_E_SYSTEM, errno, true);
    }
}

void kvx_tcp_conn_adopt(tcp_conn *conn) {
    pthread_mutex_lock(&conn->rx_lock);
    tcp_conn_start(conn);
    pthread_mutex_unlock(&conn->rx_lock);
}

void kvx_tcp_conn_end(tcp_conn *conn, int status, int sys_errno, bool reset) {
    if (conn->state == TCP_DEAD || conn->end_wanted) {
        return;
    }
    if (conn->on_owner) { /* this is not our thread: it will be told */
        conn->end_wanted = true;
        conn->end_status = status;
        conn->end_errno = sys_errno;
        conn->end_reset = reset;
        return;
    }
    tcp_thread *thread = conn->thread;
    pthread_mutex_lock(&conn->tx_lock);
    tcp_conn_become(conn, TCP_DEAD);
    conn->want_out = false;
    conn->sending = NULL;
    if (conn->in_owner_set) { /* a copy in a forked child would keep it there */
        (void)epoll_ctl(conn->tcp->owner_set, EPOLL_CTL_DEL, conn->fd, NULL);
        conn->in_owner_set = false;
    }
    if (conn->fd >= 0) {
        struct linger linger = {.l_onoff = 1, .l_linger = 0};
        if (reset) {
            (void)setsockopt(conn->fd, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
        }
        close(conn->fd);
        conn->fd = -1;
    }
    kvx_tcp_pipe_free(&conn->lane); /* it refers to memory of ops that are about to end */
    pthread_mutex_unlock(&conn->tx_lock);
    KVX_LIST_REMOVE(thread->conns, conn);
    if (conn->role == KVX_STREAM_ACCEPTOR) {
        kvx_tcp_serve_end(conn);
    } else {
        kvx_tcp_peer_fail(conn->peer, status, sys_errno);
        kvx_tcp_xfer_drop_all(conn, status, sys_errno);
    }
    kvx_tcp_unkick(conn);
    conn->grave_next = thread->graveyard;
    thread->graveyard = conn;
}

bool kvx_tcp_conn_ended(tcp_conn *conn) {
    if (conn->end_wanted) {
        conn->end_wanted = false;
        kvx_tcp_conn_end(conn, conn->end_status, conn->end_errno, conn->end_reset);
    }
    return conn->state == TCP_DEAD;
}

void kvx_tcp_conn_linger(tcp_conn *conn) {
    if (conn->state == TCP_DEAD || conn->state == TCP_LINGER) {
        return;
    }
    tcp_conn_become(conn, TCP_LINGER);
    conn->rx_stopped = false;
    kvx_tcp_conn_deadline(conn, kvx_now_ms() + TCP_LINGER_MS);
}

void kvx_tcp_conn_watch(tcp_conn *conn) {
    if (conn->watch_ms == 0 && (conn->role == KVX_STREAM_DIALLER || conn->proved)) {
        conn->watch_ms = kvx_now_ms() + TCP_DEAD_MS / 4;
        kvx_tcp_conn_deadline(conn, conn->watch_ms);
    }
}

/* Time to look for a sign of life. An idle connection is not looked at again: keepalive does that. */
static void tcp_conn_check_silence(tcp_conn *conn, uint64_t now_ms) {
    uint32_t silent_ms = 0;
    if (conn->watch_ms == 0 || now_ms < conn->watch_ms) {
        if (conn->watch_ms != 0) {
            kvx_tcp_conn_deadline(conn, conn->watch_ms);
        }
        return;
    }
    conn->watch_ms = 0;
    if (!kvx_tcp_silence(conn->fd, &silent_ms)) {
        return;
    }
    if (silent_ms >= TCP_DEAD_MS) {
        kvx_tcp_conn_end(conn, KVX_E_PEER_LOST, ETIMEDOUT, true);
    } else {
        kvx_tcp_conn_watch(conn);
    }
}

static void tcp_conn_check_unused(tcp_conn *conn, uint64_t now_ms) {
    if (conn->unused_until_ms != 0 && now_ms >= conn->unused_until_ms) {
        kvx_tcp_conn_end(conn, KVX_OK, 0, false);
        return;
    }
    tcp_conn_check_silence(conn, now_ms);
    if (conn->state == TCP_OPEN && conn->unused_until_ms != 0) {
        kvx_tcp_conn_deadline(conn, conn->unused_until_ms);
    }
}

void kvx_tcp_conn_expired(tcp_conn *conn, uint64_t now_ms) {
    if (conn->deadline_ms == 0 || now_ms < conn->deadline_ms) {
        return;
    }
    conn->deadline_ms = 0;
    if (conn->role == KVX_STREAM_ACCEPTOR && conn->state == TCP_OPEN && conn->proved) {
        tcp_conn_check_unused(conn, now_ms);
    } else if (conn->role == KVX_STREAM_ACCEPTOR) {
        kvx_tcp_conn_end(conn, KVX_E_TIMEOUT, 0, true);
    } else if (conn->state == TCP_CONNECTING || conn->state == TCP_GREETING) {
        kvx_tcp_conn_end(conn, KVX_E_TIMEOUT, ETIMEDOUT, true);
    } else {
        kvx_tcp_xfer_scan(conn); /* resets it when a cancelled put is overdue, or sets the next deadline */
        if (conn->state == TCP_OPEN) {
            tcp_conn_check_silence(conn, now_ms);
        }
    }
}

/* -- greeting --------------------------------------------------------------------------------------------------- */

/* In clear, as all hellos are. With our answer, if there are keys by now, goes the record that shows them. */
static bool tcp_conn_send_hello(tcp_conn *conn) {
    uint8_t bytes[KVX_STREAM_SEALED_HELLO_BYTES];
    kvx_hello_encode_sealed(&conn->hello, bytes);
    uint32_t length = conn->hello.version == KVX_STREAM_VERSION_SEALED ? sizeof bytes : KVX_STREAM_HELLO_BYTES;
    if (conn->seal != NULL && kvx_tcp_seal_open(conn)) {
        return kvx_tcp_seal_hello(conn, bytes, length);
    }
    return kvx_tcp_send_now(conn, bytes, length);
}

static void tcp_conn_on_connected(tcp_conn *conn) {
    int error = kvx_socket_error(conn->fd);
    if (error == 0 && kvx_socket_to_itself(conn->fd)) {
        error = ECONNREFUSED; /* nobody listens; the kernel lent us the very port that we dialled */
    }
    if (error != 0) {
        kvx_tcp_conn_end(conn, KVX_E_UNREACHABLE, error, true);
        return;
    }
    tcp_conn_become(conn, TCP_GREETING);
    if (!tcp_conn_send_hello(conn)) {
        kvx_tcp_conn_end(conn, KVX_E_UNREACHABLE, errno, true);
    }
}

static void tcp_conn_send_hello_answer(tcp_conn *conn, int status) {
    conn->hello.status = status;
    if (!tcp_conn_send_hello(conn)) {
        kvx_tcp_conn_end(conn, KVX_E_PEER_LOST, errno, true);
    } else if (status != KVX_OK) {
        kvx_tcp_conn_linger(conn);
    }
}

static void tcp_conn_on_open(tcp_conn *conn) {
    conn->deadline_ms = 0;
    tcp_conn_become(conn, TCP_OPEN);
    kvx_tcp_peer_open(conn);
}

void kvx_tcp_conn_sealed(tcp_conn *conn) {
    if (conn->role == KVX_STREAM_ACCEPTOR) { /* it has shown its keys with its hello */
        return;
    }
    pthread_mutex_lock(&conn->tx_lock);
    bool sent = kvx_tcp_seal_hello(conn, NULL, 0);
    int error = errno;
    pthread_mutex_unlock(&conn->tx_lock);
    if (sent) {
        tcp_conn_on_open(conn);
    } else {
        kvx_tcp_conn_end(conn, KVX_E_UNREACHABLE, error, true);
    }
}

/* The other hello is of the version that we do not speak here: one side encrypts and the other does not. */
static void tcp_conn_on_version_mismatch(tcp_conn *conn) {
    if (conn->role == KVX_STREAM_DIALLER) {
        kvx_tcp_conn_end(conn, KVX_E_ENCRYPTION, 0, true);
        return;
    }
    conn->hello.version = KVX_STREAM_VERSION; /* so that the other side can read it */
    tcp_conn_send_hello_answer(conn, KVX_E_ENCRYPTION);
}

static void tcp_conn_on_protocol_error(tcp_conn *conn) {
    int error = conn->rx.error;
    uint8_t version = conn->rx.hello.version;
    KVX_COUNT(conn->tcp->counters, protocol_errors, 1);
    if (error == KVX_E_VERSION && (version == KVX_STREAM_VERSION || version == KVX_STREAM_VERSION_SEALED)) {
        tcp_conn_on_version_mismatch(conn);
    } else if (conn->role == KVX_STREAM_ACCEPTOR && error == KVX_E_VERSION) {
        tcp_conn_send_hello_answer(conn, KVX_E_VERSION);
    } else if (conn->state == TCP_GREETING) {
        kvx_tcp_conn_end(conn, error == KVX_E_VERSION ? KVX_E_VERSION : KVX_E_NOT_KVXFER, 0, true);
    } else {
        kvx_tcp_conn_end(conn, KVX_E_PEER_LOST, EPROTO, true);
    }
}

static void tcp_conn_on_hello(tcp_conn *conn) {
    const kvx_hello *theirs = &conn->rx.hello;
    bool dialler = conn->role == KVX_STREAM_DIALLER;
    memcpy(conn->auth.nonces, dialler ? conn->hello.nonce : theirs->nonce, KVX_NONCE_BYTES);
    memcpy(conn->auth.nonces + KVX_NONCE_BYTES, dialler ? theirs->nonce : conn->hello.nonce, KVX_NONCE_BYTES);
    conn->frame_bytes = theirs->frame_bytes < conn->tcp->frame_bytes ? theirs->frame_bytes : conn->tcp->frame_bytes;
    if (dialler) {
        bool told = theirs->status == KVX_E_VERSION || theirs->status == KVX_E_ENCRYPTION;
        if (theirs->status != KVX_OK) {
            kvx_tcp_conn_end(conn, told ? theirs->status : KVX_E_REFUSED, 0, true);
        } else if (conn->seal == NULL) {
            tcp_conn_on_open(conn);
        } else if (!kvx_tcp_seal_agree(conn)) { /* then it waits for the record that shows the other side's keys */
            kvx_tcp_conn_end(conn, KVX_E_SECRET, 0, true);
        }
        return;
    }
    conn->stream = theirs->stream;
    if (!kvx_tcp_admit_greeted(conn)) {
        tcp_conn_send_hello_answer(conn, KVX_E_REFUSED);
        return;
    }
    if (conn->seal != NULL && !kvx_tcp_seal_agree(conn)) {
        tcp_conn_on_protocol_error(conn);
        return;
    }
    tcp_conn_become(conn, TCP_OPEN);
    conn->counted = conn->stream == 0; /* a peer counts once */
    KVX_COUNT(conn->tcp->counters, peers_accepted, conn->counted);
    tcp_conn_send_hello_answer(conn, KVX_OK);
}

/* -- receiving -------------------------------------------------------------------------------------------------- */

bool kvx_tcp_conn_may_write(tcp_conn *conn) {
    return conn->role == KVX_STREAM_ACCEPTOR ? kvx_tcp_serve_may_write(conn) : kvx_tcp_xfer_may_write(conn);
}

/* The next `bytes` bytes of rx_spans were written. */
static void tcp_conn_payload_advance(tcp_conn *conn, uint64_t bytes) {
    if (conn->role == KVX_STREAM_DIALLER) {
        kvx_tcp_xfer_written(conn, bytes);
    }
    if (conn->rx.frame.flags & KVX_FRAME_F_CHECK) {
        conn->rx_crc = kvx_spans_crc(&conn->rx_spans, bytes, conn->rx_crc);
    }
    kvx_spans_advance(&conn->rx_spans, bytes);
}

static void tcp_conn_payload_from_buffer(tcp_conn *conn) {
    const uint8_t *bytes;
    uint32_t length = kvx_rx_buffered(&conn->rx, &bytes);
    if (length > 0 && kvx_tcp_conn_may_write(conn)) {
        kvx_spans_write(&conn->rx_spans, bytes, length);
        tcp_conn_payload_advance(conn, length);
    }
    kvx_rx_payload_taken(&conn->rx, length, 0);
}

static void tcp_conn_payload_complete(tcp_conn *conn) {
    if (conn->role == KVX_STREAM_ACCEPTOR) {
        kvx_tcp_serve_payload_end(conn);
    }
}

void kvx_tcp_conn_payload(tcp_conn *conn, uint64_t bytes) {
    if (kvx_tcp_conn_may_write(conn)) {
        tcp_conn_payload_advance(conn, bytes);
    }
    kvx_rx_payload_taken(&conn->rx, 0, bytes);
    if (conn->rx.payload_left == 0) {
        tcp_conn_payload_complete(conn);
    }
}

static bool tcp_conn_is_receiving(const tcp_conn *conn) {
    return (conn->state == TCP_GREETING || conn->state == TCP_OPEN) && !conn->rx_stopped && !conn->end_wanted;
}

void kvx_tcp_conn_parse(tcp_conn *conn) {
    bool dialler = conn->role == KVX_STREAM_DIALLER;
    while (tcp_conn_is_receiving(conn)) {
        switch (kvx_rx_next(&conn->rx)) {
        case KVX_RX_HELLO:
            tcp_conn_on_hello(conn);
            break;
        case KVX_RX_FRAME:
            dialler ? kvx_tcp_xfer_answer(conn) : kvx_tcp_serve_frame(conn);
            break;
        case KVX_RX_PAYLOAD:
            tcp_conn_payload_from_buffer(conn);
            if (conn->rx.payload_left == 0) {
                tcp_conn_payload_complete(conn);
            } else if (conn->seal == NULL || !kvx_tcp_seal_more(conn)) {
                return;
            }
            break;
        case KVX_RX_TRAILER:
            dialler ? kvx_tcp_xfer_trailer(conn) : kvx_tcp_serve_trailer(conn);
            break;
        case KVX_RX_ERROR:
            tcp_conn_on_protocol_error(conn);
            return;
        case KVX_RX_MORE:
            if (conn->seal == NULL || !kvx_tcp_seal_more(conn)) {
                return;
            }
            break;
        }
    }
}

static ssize_t tcp_conn_discard(int fd, uint64_t bytes) {
#if defined(__SANITIZE_THREAD__) /* it would note bytes written to address 0, by every thread that does this */
    return syscall(SYS_recvfrom, fd, NULL, bytes, MSG_TRUNC | MSG_DONTWAIT, NULL, NULL);
#else
    return recv(fd, NULL, bytes, MSG_TRUNC | MSG_DONTWAIT);
#endif
}

/* One receive. Returns what recvmsg returned; *full_p: there may be more. */
static ssize_t tcp_conn_receive(tcp_conn *conn, bool *full_p) {
    struct iovec vectors[TCP_VECTORS_MAX];
    uint32_t count = 0, space = 0;
    uint64_t bytes = 0;
    ssize_t result;
    if (conn->seal != NULL && kvx_tcp_seal_open(conn)) {
        return kvx_tcp_seal_receive(conn, full_p);
    }
    if (conn->rx.payload_left > 0 && !kvx_tcp_conn_may_write(conn)) {
        bytes = conn->rx.payload_left < TCP_TURN_BYTES ? conn->rx.payload_left : TCP_TURN_BYTES;
        result = tcp_conn_discard(conn->fd, bytes);
        if (result > 0) {
            kvx_rx_payload_taken(&conn->rx, 0, (uint64_t)result);
        }
        *full_p = result > 0 && (uint64_t)result == bytes;
    } else {
        if (conn->rx.payload_left > 0) {
            uint64_t most = conn->rx.frame.flags & KVX_FRAME_F_CHECK ? TCP_CHECKED_BYTES : RECEIVE_BYTES;
            count = kvx_spans_vectors(&conn->rx_spans, vectors, TCP_VECTORS_MAX - 1, most, &bytes);
        }
        if (bytes == conn->rx.payload_left) {
            uint8_t *at = kvx_rx_space(&conn->rx, &space);
            if (conn->seal != NULL) { /* nothing beyond the hello */
                space = KVX_STREAM_SEALED_HELLO_BYTES - conn->rx.end;
            }
            vectors[count++] = (struct iovec){.iov_base = at, .iov_len = space};
        }
        struct msghdr message = {.msg_iov = vectors, .msg_iovlen = count};
        /* after a reset the kernel still hands out what it has queued; who reset us counts on it not reaching memory */
        int error = bytes > 0 && conn->role == KVX_STREAM_ACCEPTOR ? kvx_socket_error(conn->fd) : 0;
        if (error != 0) {
            errno = error;
            return -1;
        }
        result = recvmsg(conn->fd, &message, MSG_DONTWAIT);
        if (result > 0) {
            uint64_t payload = (uint64_t)result < bytes ? (uint64_t)result : bytes;
            if (payload > 0) {
                tcp_conn_payload_advance(conn, payload);
                KVX_COUNT(conn->tcp->counters, copied_bytes, payload);
                kvx_rx_payload_taken(&conn->rx, 0, payload);
            }
            kvx_rx_received(&conn->rx, (uint32_t)((uint64_t)result - payload));
        }
        *full_p = result > 0 && (uint64_t)result == bytes + space;
    }
    if (result > 0 && bytes > 0 && conn->rx.payload_left == 0) {
        tcp_conn_payload_complete(conn);
    }
    return result;
}

void kvx_tcp_conn_receive(tcp_conn *conn, uint64_t bytes_max) {
    uint64_t turn = 0;
    bool full = true;
    while (full && turn < bytes_max && tcp_conn_is_receiving(conn) &&
           !(conn->on_owner && conn->rx.payload_left > bytes_max)) {
        ssize_t result = tcp_conn_receive(conn, &full);
        if (result < 0 && (errno == EAGAIN || errno == EINTR)) {
            return;
        }
        if (result <= 0) {
            int error = result < 0 ? errno : 0;
            int status = conn->state == TCP_OPEN ? KVX_E_PEER_LOST : error ? KVX_E_UNREACHABLE : KVX_E_NOT_KVXFER;
            kvx_tcp_conn_end(conn, status, error, result < 0);
            return;
        }
        turn += (uint64_t)result;
        kvx_tcp_conn_parse(conn);
    }
}

static void tcp_conn_progress_discard(tcp_conn *conn) {
    ssize_t result = tcp_conn_discard(conn->fd, TCP_TURN_BYTES);
    if (result == 0 || (result < 0 && errno != EAGAIN && errno != EINTR)) {
        kvx_tcp_conn_end(conn, KVX_E_PEER_LOST, 0, false);
    }
}

static void tcp_conn_on_event(tcp_conn *conn, uint32_t events) {
    if (kvx_tcp_conn_ended(conn)) {
        return;
    }
    if (conn->state == TCP_CONNECTING) {
        tcp_conn_on_connected(conn);
        kvx_tcp_conn_arm(conn);
        return;
    }
    bool broken = events & (EPOLLERR | EPOLLHUP);
    if (broken && conn->state == TCP_OPEN) {
        /* a reset: what is queued must not reach memory any more, its sender has already reported the end */
        kvx_tcp_conn_end(conn, KVX_E_PEER_LOST, kvx_socket_error(conn->fd), true);
        return;
    }
    if (conn->state == TCP_LINGER) {
        tcp_conn_progress_discard(conn);
    } else if (events & (EPOLLIN | EPOLLERR | EPOLLHUP)) {
        kvx_tcp_conn_receive(conn, TCP_TURN_BYTES);
    }
    if (broken) {
        kvx_tcp_conn_end(conn, KVX_E_UNREACHABLE, ECONNRESET, true);
    }
    if (conn->state == TCP_OPEN || conn->state == TCP_LINGER) {
        kvx_tcp_pump(conn);
    }
}

void kvx_tcp_conn_event(tcp_conn *conn, uint32_t events) {
    pthread_mutex_lock(&conn->rx_lock);
    tcp_conn_on_event(conn, events);
    pthread_mutex_unlock(&conn->rx_lock);
}

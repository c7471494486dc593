/* hixl_side.c: the side link's sockets and frames, on the side thread; sending from any thread, with the lock held. */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "hixl/hixl.h"
#include "list.h"
#include "core/vault.h"
#include "core/forks.h"

#define BACKLOG       256
#define ACCEPTS_MAX   64
#define TX_ROOM_FIRST 1024

/* Engines of this process that listen. Two of them may copy by plain addresses; whether the other end of a side link is
 * one of them is not taken from what it says. */
static pthread_mutex_t here_lock = PTHREAD_MUTEX_INITIALIZER;
static hixl_transport *here;

/* -- addresses ---------------------------------------------------------------------------------------------------- */

static int hixl_side_address_of(const hixl_transport *hixl, uint32_t port, struct sockaddr_storage *address_p,
                                socklen_t *length_p) {
    char text[KVX_ENDPOINT_MAX];
    snprintf(text, sizeof text, "%s:%u", hixl->host, port == 0 ? 1 : port);
    int status = kvx_address_parse(text, address_p, length_p);
    if (status == KVX_OK && port == 0) {
        if (address_p->ss_family == AF_INET6) {
            ((struct sockaddr_in6 *)address_p)->sin6_port = 0;
        } else {
            ((struct sockaddr_in *)address_p)->sin_port = 0;
        }
    }
    return status;
}

static bool hixl_side_same_address(const struct sockaddr_storage *a, const struct sockaddr_storage *b) {
    return kvx_address_same_host(a, b) && kvx_address_port(a) == kvx_address_port(b);
}

static int hixl_side_bind_socket(const hixl_transport *hixl, uint32_t port, struct sockaddr_storage *address,
                                 socklen_t *length_p) {
    int one = 1;
    if (hixl_side_address_of(hixl, port, address, length_p) != KVX_OK) {
        errno = EINVAL;
        return -1;
    }
    int fd = kvx_owned(socket(address->ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (fd < 0) {
        return -1;
    }
    (void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (struct sockaddr *)address, *length_p) != 0) {
        int error = errno;
        close(fd);
        errno = error;
        return -1;
    }
    (void)getsockname(fd, (struct sockaddr *)address, length_p);
    return fd;
}

uint32_t kvx_hixl_free_port(const hixl_transport *hixl) {
    struct sockaddr_storage address;
    socklen_t length;
    int fd = hixl_side_bind_socket(hixl, 0, &address, &length);
    if (fd < 0) {
        return 0;
    }
    close(fd);
    return kvx_address_port(&address);
}

int kvx_hixl_listen(hixl_transport *hixl, char *why, size_t why_size) {
    struct sockaddr_storage address;
    socklen_t length;
    uint32_t port = hixl->config->hixl_port;
    int fd = hixl_side_bind_socket(hixl, port, &address, &length);
    if (fd < 0 || listen(fd, BACKLOG) != 0) {
        int error = errno;
        const char *hint = error == EADDRINUSE && port == 0
                               ? "; every local port is in use: end what holds so many, or widen "
                                 "net.ipv4.ip_local_port_range"
                           : error == EADDRINUSE    ? "; set hixl_port to another one, or to 0 for any"
                           : error == EADDRNOTAVAIL ? "; set data_bind to an address that this host has"
                                                    : "";
        snprintf(why, why_size, "hixl cannot listen on \"%s\" port %u: %s%s", hixl->host, port, strerror(error), hint);
        if (fd >= 0) {
            close(fd);
        }
        return error == EINVAL ? KVX_E_INVALID : error == EMFILE || error == ENFILE ? KVX_E_FDS : KVX_E_SYSTEM;
    }
    kvx_address_format(&address, hixl->endpoint, sizeof hixl->endpoint);
    hixl->listener.fd = fd;
    hixl->listens = address;
    pthread_mutex_lock(&here_lock);
    hixl->next_here = here;
    here = hixl;
    pthread_mutex_unlock(&here_lock);
    return KVX_OK;
}

void kvx_hixl_listen_end(hixl_transport *hixl) {
    if (hixl->listener.fd < 0) {
        return;
    }
    pthread_mutex_lock(&here_lock);
    hixl_transport **at = &here;
    while (*at != hixl) {
        at = &(*at)->next_here;
    }
    *at = hixl->next_here;
    pthread_mutex_unlock(&here_lock);
    close(hixl->listener.fd); /* after: somebody else may listen there next */
}

bool kvx_hixl_inside(const struct sockaddr_storage *address) {
    bool found = false;
    pthread_mutex_lock(&here_lock);
    for (const hixl_transport *at = here; at != NULL && !found; at = at->next_here) {
        found = hixl_side_same_address(&at->listens, address);
    }
    pthread_mutex_unlock(&here_lock);
    return found;
}

static void hixl_side_socket_tune(int fd) {
    const struct {
        int level, option, value;
    } options[] = {
        {IPPROTO_TCP, TCP_NODELAY, 1},   {SOL_SOCKET, SO_KEEPALIVE, 1}, {IPPROTO_TCP, TCP_KEEPIDLE, 4},
        {IPPROTO_TCP, TCP_KEEPINTVL, 2}, {IPPROTO_TCP, TCP_KEEPCNT, 3},
    };
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) {
        (void)setsockopt(fd, options[i].level, options[i].option, &options[i].value, sizeof options[i].value);
    }
}

/* -- life --------------------------------------------------------------------------------------------------------- */

/* Which states may follow which. */
static const uint8_t transitions[] = {
    [HIXL_DIALLING] = 1 << HIXL_GREETING | 1 << HIXL_DEAD,
    [HIXL_GREETING] = 1 << HIXL_OPEN | 1 << HIXL_LINGERING | 1 << HIXL_DEAD,
    [HIXL_OPEN] = 1 << HIXL_LINGERING | 1 << HIXL_DEAD,
    [HIXL_LINGERING] = 1 << HIXL_DEAD,
    [HIXL_DEAD] = 0,
};

void kvx_hixl_conn_become(hixl_conn *conn, hixl_conn_state next) {
    KVX_ASSERT(transitions[conn->state] & 1 << next);
    conn->state = next;
}

hixl_conn *kvx_hixl_conn_new(hixl_transport *hixl, uint32_t role, int fd) {
    hixl_conn *conn = kvx_vault_take(sizeof *conn);
    if (conn == NULL) {
        return NULL;
    }
    conn->hixl = hixl;
    conn->role = role;
    conn->fd = fd;
    conn->state = role == KVX_STREAM_SIDE_DIALLER ? HIXL_DIALLING : HIXL_GREETING;
    kvx_random(conn->nonce, sizeof conn->nonce);
    kvx_rx_init(&conn->rx, role, KVX_STREAM_FRAME_MAX);
    hixl_side_socket_tune(fd);
    return conn;
}

void kvx_hixl_conn_free(hixl_conn *conn) {
    kvx_table_free(&conn->attached);
    kvx_table_free(&conn->told);
    free(conn->tx);
    kvx_vault_give(conn);
}

bool kvx_hixl_conn_watch(hixl_conn *conn, bool dialling) {
    conn->events = EPOLLIN | (dialling ? (uint32_t)EPOLLOUT : 0);
    struct epoll_event event = {.events = conn->events, .data.ptr = conn};
    return epoll_ctl(conn->hixl->epoll_fd, EPOLL_CTL_ADD, conn->fd, &event) == 0;
}

void kvx_hixl_conn_arm(hixl_conn *conn) {
    if (conn->fd < 0 || conn->state == HIXL_DEAD) {
        return;
    }
    bool reads = conn->state == HIXL_LINGERING || !(conn->stopped || conn->held);
    uint32_t events = (reads ? (uint32_t)EPOLLIN : 0) | (conn->want_out ? (uint32_t)EPOLLOUT : 0);
    if (conn->state == HIXL_DIALLING) {
        events |= EPOLLOUT;
    }
    if (events != conn->events) {
        struct epoll_event event = {.events = events, .data.ptr = conn};
        (void)epoll_ctl(conn->hixl->epoll_fd, EPOLL_CTL_MOD, conn->fd, &event);
        conn->events = events;
    }
}

void kvx_hixl_conn_close(hixl_conn *conn) {
    if (conn->fd >= 0) {
        close(conn->fd);
        conn->fd = -1;
    }
}

void kvx_hixl_deadline(hixl_transport *hixl, uint64_t at_ms) {
    if (hixl->deadline_ms == 0 || at_ms < hixl->deadline_ms) {
        hixl->deadline_ms = at_ms;
    }
}

/* -- sending; with the lock held ---------------------------------------------------------------------------------- */

static void hixl_side_flush(hixl_conn *conn) {
    while (conn->tx_begin < conn->tx_end && !conn->broken) {
        ssize_t sent =
            send(conn->fd, conn->tx + conn->tx_begin, conn->tx_end - conn->tx_begin, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent > 0) {
            conn->tx_begin += (uint32_t)sent;
        } else if (sent < 0 && (errno == EAGAIN || errno == EINTR)) {
            break;
        } else {
            conn->broken = true; /* what it says is still read, up to its end */
            conn->tx_begin = conn->tx_end;
        }
    }
    if (conn->tx_begin == conn->tx_end) {
        conn->tx_begin = conn->tx_end = 0;
    }
    conn->want_out = conn->tx_end != 0;
    bool stopped = conn->tx_end - conn->tx_begin > HIXL_TX_MAX;
    if (stopped != conn->stopped) {
        conn->stopped = stopped && conn->role == KVX_STREAM_SIDE_ACCEPTOR;
    }
    kvx_hixl_conn_arm(conn);
}

static uint8_t *hixl_side_tx_reserve(hixl_conn *conn, uint32_t length) {
    if (conn->tx_room - conn->tx_end < length && conn->tx_begin > 0) {
        memmove(conn->tx, conn->tx + conn->tx_begin, conn->tx_end - conn->tx_begin);
        conn->tx_end -= conn->tx_begin;
        conn->tx_begin = 0;
    }
    uint32_t room = conn->tx_room == 0 ? TX_ROOM_FIRST : conn->tx_room;
    while (room - conn->tx_end < length) {
        room *= 2;
    }
    if (room != conn->tx_room) {
        uint8_t *wider = realloc(conn->tx, room);
        KVX_ASSERT(wider != NULL); /* a lost REVOKE or QUIET would keep memory for ever */
        conn->tx = wider;
        conn->tx_room = room;
    }
    uint8_t *at = conn->tx + conn->tx_end;
    conn->tx_end += length;
    return at;
}

void kvx_hixl_send(hixl_conn *conn, const kvx_frame *frame, const uint8_t *key, const void *units) {
    if (conn == NULL || conn->broken || conn->fd < 0 || conn->state == HIXL_DEAD) {
        return;
    }
    uint32_t length = KVX_STREAM_HEADER_BYTES + frame->segments * KVX_STREAM_UNIT_BYTES;
    uint8_t *at = hixl_side_tx_reserve(conn, length);
    kvx_frame_encode(frame, at);
    if (frame->segments > 0) {
        kvx_frame_units_encode(at, units, frame->segments);
    }
    conn->tx_counter++;
    if (key != NULL) {
        kvx_frame_seal(&conn->auth, key, conn->tx_counter, conn->role, at, length);
    }
    hixl_side_flush(conn);
}

static void hixl_side_send_hello(hixl_conn *conn, int status) {
    hixl_transport *hixl = conn->hixl;
    kvx_hello hello = {.version = KVX_STREAM_VERSION,
                       .role = (uint8_t)conn->role,
                       .streams = 1,
                       .status = status,
                       .frame_bytes = KVX_STREAM_FRAME_MAX};
    memcpy(hello.nonce, conn->nonce, sizeof hello.nonce);
    memcpy(hello.engine_id, hixl->config->engine_id, KVX_ID_BYTES);
    pthread_mutex_lock(&hixl->lock);
    kvx_hello_encode(&hello, hixl_side_tx_reserve(conn, KVX_STREAM_HELLO_BYTES));
    hixl_side_flush(conn);
    pthread_mutex_unlock(&hixl->lock);
}

bool kvx_hixl_authentic(const hixl_conn *conn, const uint8_t key[KVX_KEY_BYTES]) {
    uint32_t sender = conn->role == KVX_STREAM_SIDE_DIALLER ? KVX_STREAM_SIDE_ACCEPTOR : KVX_STREAM_SIDE_DIALLER;
    return kvx_frame_open(&conn->auth, key, conn->rx.counter, sender, conn->rx.head, conn->rx.head_length);
}

/* -- accepting ---------------------------------------------------------------------------------------------------- */

/* It has proved nothing, so it holds nothing: its end is a reset, as of a port that is not there. */
static bool hixl_side_evict(kvx_newcomer *one) {
    if (one == NULL) {
        return false;
    }
    hixl_conn *conn = (hixl_conn *)((uint8_t *)one - offsetof(hixl_conn, newcomer));
    const struct linger reset = {.l_onoff = 1, .l_linger = 0};
    (void)setsockopt(conn->fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    KVX_COUNT(conn->hixl->counters, refused, 1);
    kvx_hixl_owner_end(conn, true);
    return true;
}

static bool hixl_side_accept_one(hixl_transport *hixl, int fd, const struct sockaddr_storage *from) {
    hixl_conn *conn = kvx_hixl_conn_new(hixl, KVX_STREAM_SIDE_ACCEPTOR, fd);
    if (conn == NULL || !kvx_hixl_conn_watch(conn, false)) {
        if (conn != NULL) {
            kvx_hixl_conn_free(conn);
        }
        close(fd);
        return false;
    }
    conn->deadline_ms = kvx_now_ms() + hixl->config->handshake_ms;
    kvx_hixl_deadline(hixl, conn->deadline_ms);
    pthread_mutex_lock(&hixl->lock);
    KVX_LIST_PUSH(hixl->conns, conn);
    pthread_mutex_unlock(&hixl->lock);
    hixl_side_evict(kvx_newcomers_surplus(&hixl->line));
    kvx_newcomers_add(&hixl->line, &conn->newcomer, from);
    return true;
}

void kvx_hixl_accept(hixl_transport *hixl) {
    for (int i = 0; i < ACCEPTS_MAX; i++) {
        struct sockaddr_storage from = {0};
        int fd = kvx_listener_accept(&hixl->listener, &from);
        if (fd < 0 && errno == EAGAIN) {
            return;
        }
        if (fd < 0 || !hixl_side_accept_one(hixl, fd, &from)) {
            kvx_listener_pause(&hixl->listener, hixl_side_evict(kvx_newcomers_oldest(&hixl->line)));
            return;
        }
    }
}

/* -- greeting ----------------------------------------------------------------------------------------------------- */

static void hixl_side_on_dialler_hello(hixl_conn *conn) {
    hixl_transport *hixl = conn->hixl;
    if (hixl->accepted >= hixl->accepted_max && !kvx_hixl_owner_make_room(hixl)) {
        hixl_side_send_hello(conn, KVX_E_REFUSED);
        kvx_hixl_owner_end(conn, true);
        return;
    }
    kvx_hixl_conn_become(conn, HIXL_OPEN);
    hixl_side_send_hello(conn, KVX_OK);
}

static void hixl_side_on_hello(hixl_conn *conn) {
    const kvx_hello *theirs = &conn->rx.hello;
    bool dialler = conn->role == KVX_STREAM_SIDE_DIALLER;
    memcpy(conn->auth.nonces, dialler ? conn->nonce : theirs->nonce, KVX_NONCE_BYTES);
    memcpy(conn->auth.nonces + KVX_NONCE_BYTES, dialler ? theirs->nonce : conn->nonce, KVX_NONCE_BYTES);
    if (!dialler) {
        hixl_side_on_dialler_hello(conn);
    } else if (theirs->status != KVX_OK) {
        kvx_hixl_peer_end(conn, theirs->status == KVX_E_VERSION ? KVX_E_VERSION : KVX_E_REFUSED, 0);
    } else {
        kvx_hixl_conn_become(conn, HIXL_OPEN);
        conn->deadline_ms = 0;
        kvx_hixl_peer_open(conn);
    }
}

static void hixl_side_on_connected(hixl_conn *conn) {
    int error = kvx_socket_error(conn->fd);
    if (error == 0 && kvx_socket_to_itself(conn->fd)) {
        error = ECONNREFUSED;
    }
    if (error != 0) {
        kvx_hixl_peer_end(conn, KVX_E_UNREACHABLE, error);
        return;
    }
    kvx_hixl_conn_become(conn, HIXL_GREETING);
    hixl_side_send_hello(conn, KVX_OK);
}

/* -- receiving ---------------------------------------------------------------------------------------------------- */

static void hixl_side_on_protocol_error(hixl_conn *conn) {
    int error = conn->rx.error;
    KVX_COUNT(conn->hixl->counters, protocol_errors, 1);
    if (conn->role == KVX_STREAM_SIDE_ACCEPTOR) {
        if (error == KVX_E_VERSION) {
            hixl_side_send_hello(conn, KVX_E_VERSION);
        }
        kvx_hixl_owner_hang_up(conn);
    } else if (conn->state == HIXL_GREETING) {
        kvx_hixl_peer_end(conn, error == KVX_E_VERSION ? KVX_E_VERSION : KVX_E_NOT_KVXFER, 0);
    } else {
        kvx_hixl_peer_end(conn, KVX_E_PEER_LOST, EPROTO);
    }
}

void kvx_hixl_conn_parse(hixl_conn *conn) {
    bool dialler = conn->role == KVX_STREAM_SIDE_DIALLER;
    while ((conn->state == HIXL_GREETING || conn->state == HIXL_OPEN) && !conn->held && !conn->stopped) {
        switch (kvx_rx_next(&conn->rx)) {
        case KVX_RX_HELLO:
            hixl_side_on_hello(conn);
            break;
        case KVX_RX_FRAME:
            if (!(dialler ? kvx_hixl_peer_frame(conn) : kvx_hixl_owner_frame(conn)) && conn->state != HIXL_DEAD) {
                conn->rx.error = KVX_E_INVALID;
                hixl_side_on_protocol_error(conn);
            }
            break;
        case KVX_RX_MORE:
            return;
        default:
            hixl_side_on_protocol_error(conn);
            return;
        }
    }
}

static void hixl_side_on_end(hixl_conn *conn, int error) {
    if (conn->role == KVX_STREAM_SIDE_ACCEPTOR) {
        bool proof = error == 0 || error == ECONNRESET || error == EPIPE;
        kvx_hixl_owner_end(conn, proof);
    } else if (conn->state == HIXL_OPEN) {
        kvx_hixl_peer_end(conn, KVX_E_PEER_LOST, error);
    } else {
        kvx_hixl_peer_end(conn, error != 0 ? KVX_E_UNREACHABLE : KVX_E_NOT_KVXFER, error);
    }
}

static void hixl_side_receive(hixl_conn *conn) {
    for (int i = 0; i < HIXL_READS_MAX && conn->state != HIXL_DEAD && !conn->held && !conn->stopped; i++) {
        uint32_t space;
        uint8_t *at = kvx_rx_space(&conn->rx, &space);
        if (conn->state == HIXL_LINGERING) {
            at = conn->rx.buffer;
            space = sizeof conn->rx.buffer;
        }
        ssize_t got = recv(conn->fd, at, space, MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
            return;
        }
        if (got <= 0) {
            hixl_side_on_end(conn, got < 0 ? errno : 0);
            return;
        }
        if (conn->state != HIXL_LINGERING) {
            kvx_rx_received(&conn->rx, (uint32_t)got);
            kvx_hixl_conn_parse(conn);
        }
        if ((uint32_t)got < space) {
            return;
        }
    }
}

void kvx_hixl_conn_event(hixl_conn *conn, uint32_t events) {
    hixl_transport *hixl = conn->hixl;
    if (conn->state == HIXL_DEAD) {
        return;
    }
    if (conn->state == HIXL_DIALLING) {
        hixl_side_on_connected(conn);
    } else if (events & (EPOLLIN | EPOLLERR | EPOLLHUP)) {
        if ((events & (EPOLLERR | EPOLLHUP)) && (conn->held || conn->stopped)) {
            hixl_side_on_end(conn, kvx_socket_error(conn->fd)); /* it went while we did not read */
            return;
        }
        hixl_side_receive(conn);
    }
    if (conn->state == HIXL_DEAD) {
        return;
    }
    pthread_mutex_lock(&hixl->lock);
    bool was_stopped = conn->stopped;
    hixl_side_flush(conn);
    bool again = was_stopped && !conn->stopped;
    pthread_mutex_unlock(&hixl->lock);
    if (again) {
        kvx_hixl_conn_parse(conn);
    }
}

/* shm_conn.c: the socket between two engines: framing is the kernel's (SOCK_SEQPACKET), order and origin are checked by
 * counter and code. Whatever does not fit ends the connection. */
#define _GNU_SOURCE
#include "shm/shm.h"
#include "list.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FDS_MAX 4 /* received with one message; more are dropped by the kernel */

/* A child that the other process forked may hold its socket open after its death, so the end of the socket is not
 * enough. Without a descriptor for the process (old kernels, other namespaces) it has to be. */
static void shm_conn_process_watch(shm_conn *conn) {
    conn->process_fd = conn->pid > 0 && conn->pid != getpid() ? (int)syscall(SYS_pidfd_open, conn->pid, 0) : -1;
    if (conn->process_fd >= 0) {
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = (uint8_t *)conn + SHM_PROCESS};
        (void)epoll_ctl(conn->shm->epoll_fd, EPOLL_CTL_ADD, conn->process_fd, &event);
    }
}

static void shm_conn_process_unwatch(shm_conn *conn) {
    if (conn->process_fd >= 0) {
        close(conn->process_fd);
        conn->process_fd = -1;
    }
}

shm_conn *kvx_shm_conn_new(shm_transport *shm, int fd, pid_t pid, shm_peer *peer) {
    shm_conn *conn = calloc(1, sizeof(*conn));
    if (conn == NULL) {
        return NULL;
    }
    conn->shm = shm;
    conn->peer = peer;
    conn->pid = pid;
    conn->fd = fd;
    conn->parked = true;
    conn->reading = true;
    kvx_random(conn->nonce_mine, sizeof(conn->nonce_mine));
    pthread_mutex_init(&conn->tx_lock, NULL);
    shm_conn_process_watch(conn);
    return conn;
}

static void shm_conn_packets_free(shm_conn *conn) {
    while (conn->tx_first != NULL) {
        shm_packet *packet = conn->tx_first;
        conn->tx_first = packet->next;
        if (packet->fd >= 0) {
            close(packet->fd);
        }
        free(packet);
    }
    conn->tx_last = NULL;
    conn->tx_count = 0;
}

void kvx_shm_conn_close(shm_conn *conn) {
    pthread_mutex_lock(&conn->tx_lock);
    if (conn->fd >= 0) {
        close(conn->fd); /* also leaves the epoll set: the descriptor has no duplicate */
        conn->fd = -1;
    }
    shm_conn_packets_free(conn);
    pthread_mutex_unlock(&conn->tx_lock);
    shm_conn_process_unwatch(conn);
    conn->state = SHM_DEAD;
}

void kvx_shm_conn_free(shm_conn *conn) {
    kvx_shm_conn_close(conn);
    kvx_table_free(&conn->attached);
    kvx_table_free(&conn->regions);
    pthread_mutex_destroy(&conn->tx_lock);
    free(conn);
}

/* With tx_lock held. */
static void shm_conn_rearm(shm_conn *conn) {
    struct epoll_event event = {.data.ptr = conn};
    event.events = (conn->reading ? EPOLLIN : 0u) | (conn->tx_first != NULL ? EPOLLOUT : 0u);
    if (!conn->parked && conn->fd >= 0) {
        (void)epoll_ctl(conn->shm->epoll_fd, EPOLL_CTL_MOD, conn->fd, &event);
    }
}

bool kvx_shm_conn_watch(shm_conn *conn) {
    struct epoll_event event = {.data.ptr = conn};
    pthread_mutex_lock(&conn->tx_lock);
    event.events = (conn->reading ? EPOLLIN : 0u) | (conn->tx_first != NULL ? EPOLLOUT : 0u);
    bool watched = conn->fd >= 0 && epoll_ctl(conn->shm->epoll_fd, EPOLL_CTL_ADD, conn->fd, &event) == 0;
    conn->parked = !watched;
    pthread_mutex_unlock(&conn->tx_lock);
    return watched;
}

void kvx_shm_conn_unwatch(shm_conn *conn) {
    pthread_mutex_lock(&conn->tx_lock);
    if (!conn->parked && conn->fd >= 0) {
        (void)epoll_ctl(conn->shm->epoll_fd, EPOLL_CTL_DEL, conn->fd, NULL);
    }
    conn->parked = true;
    pthread_mutex_unlock(&conn->tx_lock);
}

void kvx_shm_conn_read(shm_conn *conn, bool on) {
    pthread_mutex_lock(&conn->tx_lock);
    conn->reading = on;
    shm_conn_rearm(conn);
    pthread_mutex_unlock(&conn->tx_lock);
}

bool kvx_shm_trusted(int fd, pid_t *pid_p) {
    struct ucred who;
    socklen_t length = sizeof(who);
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &length) != 0) {
        return false;
    }
    *pid_p = who.pid;
    return who.uid == geteuid() || who.uid == 0;
}

/* -- sending ------------------------------------------------------------------------------------------------------ */

static void shm_conn_authenticate(const shm_conn *conn, const shm_message *message, bool sent, const uint8_t *key,
                                  uint8_t *mac) {
    bool dialler = conn->peer != NULL;
    uint64_t direction = dialler == sent; /* 1: from the dialler */
    kvx_mac_state state;
    kvx_mac_init(&state, key);
    kvx_mac_update(&state, dialler ? conn->nonce_mine : conn->nonce_theirs, KVX_NONCE_BYTES);
    kvx_mac_update(&state, dialler ? conn->nonce_theirs : conn->nonce_mine, KVX_NONCE_BYTES);
    kvx_mac_update(&state, &direction, sizeof(direction));
    kvx_mac_update(&state, message, offsetof(shm_message, mac));
    kvx_mac_final(&state, mac);
}

bool kvx_shm_authentic(const shm_conn *conn, const shm_message *message, const uint8_t key[KVX_KEY_BYTES]) {
    uint8_t expected[KVX_MAC_BYTES];
    shm_conn_authenticate(conn, message, false, key, expected);
    return kvx_mac_equal(expected, message->mac);
}

/* 1: sent, 0: no room now, -1: the connection is over. */
static int shm_conn_send_now(int socket, const shm_message *message, int fd) {
    struct iovec bytes = {.iov_base = (void *)(uintptr_t)message, .iov_len = sizeof(*message)};
    union {
        struct cmsghdr header;
        uint8_t space[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct msghdr out = {.msg_iov = &bytes, .msg_iovlen = 1};
    if (fd >= 0) {
        out.msg_control = &control;
        out.msg_controllen = sizeof(control.space);
        struct cmsghdr *header = CMSG_FIRSTHDR(&out);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(header), &fd, sizeof(fd));
    }
    for (;;) {
        if (sendmsg(socket, &out, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) {
            return 1;
        }
        if (errno != EINTR) {
            return errno == EAGAIN ? 0 : -1;
        }
    }
}

/* With tx_lock held. Its end is seen by whoever reads, after what the other side still said. */
static void shm_conn_shutdown(shm_conn *conn) {
    conn->broken = true;
    (void)shutdown(conn->fd, SHUT_RDWR);
    shm_conn_packets_free(conn);
}

void kvx_shm_send(shm_conn *conn, shm_message *message, const uint8_t *key, int fd) {
    pthread_mutex_lock(&conn->tx_lock);
    message->magic = SHM_MAGIC;
    message->version = SHM_VERSION;
    message->counter = ++conn->tx_counter;
    if (key != NULL) {
        shm_conn_authenticate(conn, message, true, key, message->mac);
    }
    if (conn->fd >= 0 && !conn->broken) {
        int result = conn->tx_first != NULL ? 0 : shm_conn_send_now(conn->fd, message, fd);
        if (result == 0) {
            shm_packet *packet = malloc(sizeof(*packet));
            if (packet != NULL) {
                *packet = (shm_packet){.fd = fd, .message = *message};
                fd = -1;
                KVX_QUEUE_APPEND(conn->tx_first, conn->tx_last, packet, next);
                conn->tx_count++;
                shm_conn_rearm(conn);
            } else {
                result = -1;
            }
        }
        if (result < 0) {
            shm_conn_shutdown(conn);
        }
    }
    pthread_mutex_unlock(&conn->tx_lock);
    if (fd >= 0) {
        close(fd);
    }
}

void kvx_shm_hello(shm_conn *conn, int status) {
    shm_message message = {.type = SHM_HELLO, .status = status};
    memcpy(message.hello.nonce, conn->nonce_mine, sizeof(message.hello.nonce));
    memcpy(message.hello.engine_id, conn->shm->config->engine_id, sizeof(message.hello.engine_id));
    kvx_shm_send(conn, &message, NULL, -1);
}

static void shm_conn_flush(shm_conn *conn) {
    pthread_mutex_lock(&conn->tx_lock);
    while (conn->tx_first != NULL && conn->fd >= 0) {
        shm_packet *packet = conn->tx_first;
        int result = shm_conn_send_now(conn->fd, &packet->message, packet->fd);
        if (result == 0) {
            break;
        }
        if (result < 0) {
            shm_conn_shutdown(conn);
            break;
        }
        conn->tx_first = packet->next;
        if (conn->tx_first == NULL) {
            conn->tx_last = NULL;
        }
        conn->tx_count--;
        if (packet->fd >= 0) {
            close(packet->fd);
        }
        free(packet);
    }
    if (conn->tx_count < SHM_TX_MAX / 2 && !conn->held && conn->state != SHM_LINGER) {
        conn->reading = true;
    }
    shm_conn_rearm(conn);
    pthread_mutex_unlock(&conn->tx_lock);
}

/* -- receiving ---------------------------------------------------------------------------------------------------- */

/* Takes the first descriptor that came along; closes what else did. */
static int shm_conn_fd_take(struct msghdr *in, bool *more_p) {
    int first = -1;
    for (struct cmsghdr *header = CMSG_FIRSTHDR(in); header != NULL; header = CMSG_NXTHDR(in, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) {
            continue;
        }
        size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(fd));
            if (first < 0) {
                first = fd;
            } else {
                close(fd);
                *more_p = true;
            }
        }
    }
    return first;
}

/* A connection that is over, or that did what it must not. */
static void shm_conn_end(shm_conn *conn, int status, int sys_errno, bool theirs_is_closed) {
    if (!theirs_is_closed) {
        KVX_COUNT(conn->shm->counters, protocol_errors, 1);
    }
    if (conn->peer != NULL) {
        kvx_shm_peer_end(conn, status, sys_errno);
    } else if (theirs_is_closed) {
        kvx_shm_owner_end(conn);
    } else {
        kvx_shm_owner_hang_up(conn);
    }
}

enum { SAYS_STATUS = 1, SAYS_ERRNO = 2, SAYS_HANDLE = 4, SAYS_HOW = 8, SAYS_CODE = 16 };

/* Which fields a type uses, and which part of the 32 bytes; the others are 0. tests/native/frames.py says the same from
 * the specification. */
static const struct {
    uint8_t says, begin, end;
} rules[SHM_TYPES] = {
    [SHM_HELLO] = {SAYS_STATUS, 0, 32},
    [SHM_IMPORT] = {SAYS_HANDLE | SAYS_CODE, 0, 28},
    [SHM_IMPORTED] = {SAYS_STATUS | SAYS_ERRNO | SAYS_HANDLE | SAYS_HOW | SAYS_CODE, 0, 32},
    [SHM_REVOKE] = {SAYS_HANDLE | SAYS_CODE, 0, 0},
    [SHM_REVOKED] = {SAYS_HANDLE | SAYS_CODE, 0, 0},
    [SHM_DROP] = {SAYS_HANDLE | SAYS_CODE, 0, 0},
    [SHM_NOTIFY] = {SAYS_HANDLE | SAYS_CODE, 0, 24},
    [SHM_NOTIFIED] = {SAYS_STATUS | SAYS_HANDLE | SAYS_CODE, 0, 8},
    [SHM_FORGET] = {0, 8, 16},
    [SHM_BYE] = {0, 0, 0},
};
#define ERRNO_MAX 4095 /* of the kernel's */

static bool shm_conn_are_zero(const uint8_t *bytes, size_t count) {
    uint8_t any = 0;
    for (size_t i = 0; i < count; i++) {
        any |= bytes[i];
    }
    return any == 0;
}

static bool shm_conn_fields_fit(const shm_message *message) {
    uint32_t says = rules[message->type].says, begin = rules[message->type].begin, end = rules[message->type].end;
    const uint8_t *body = (const uint8_t *)&message->hello;
    if (message->type == SHM_IMPORTED) {
        end = message->how == SHM_NOT ? 0 : message->how == SHM_BY_MAPPING ? 16 : 32;
    }
    return (says & SAYS_STATUS || message->status == 0) &&
           (says & SAYS_ERRNO ? message->sys_errno >= 0 && message->sys_errno <= ERRNO_MAX : message->sys_errno == 0) &&
           (says & SAYS_HANDLE ? message->handle != 0 : message->handle == 0) &&
           (says & SAYS_HOW ? message->how <= SHM_BY_ATTACH : message->how == SHM_NOT) &&
           (says & SAYS_CODE || shm_conn_are_zero(message->mac, sizeof message->mac)) &&
           shm_conn_are_zero(body, begin) && shm_conn_are_zero(body + end, sizeof message->hello - end);
}

static bool shm_conn_well_formed(shm_conn *conn, const shm_message *message, size_t length, int *status_p) {
    *status_p = KVX_E_NOT_KVXFER;
    if (length < 6 || message->magic != SHM_MAGIC) {
        return false;
    }
    if (message->version != SHM_VERSION) {
        *status_p = KVX_E_VERSION;
        return false;
    }
    bool greets = message->type == SHM_HELLO;
    return length == sizeof(*message) && message->type != 0 && message->type < SHM_TYPES &&
           shm_conn_fields_fit(message) && message->counter == ++conn->rx_counter &&
           greets == (conn->state == SHM_GREETING);
}

static void shm_conn_on_message(shm_conn *conn, const shm_message *message, size_t length, int fd, bool spoilt) {
    int status = KVX_E_NOT_KVXFER;
    bool good = !spoilt && shm_conn_well_formed(conn, message, length, &status);
    if (!good && status == KVX_E_VERSION && conn->peer == NULL && conn->state == SHM_GREETING) {
        kvx_shm_hello(conn, KVX_E_VERSION);
    }
    if (good) {
        good = conn->peer != NULL ? kvx_shm_peer_message(conn, message, &fd) : kvx_shm_owner_message(conn, message);
    }
    if (fd != -1) { /* nobody wanted it */
        good = false;
        if (fd >= 0) {
            close(fd);
        }
    }
    if (!good && conn->state != SHM_DEAD && conn->state != SHM_LINGER && !(conn->peer != NULL && conn->peer->lost)) {
        shm_conn_end(conn, status, 0, false);
    }
}

/* False: nothing more to read now. */
static bool shm_conn_receive(shm_conn *conn) {
    union {
        shm_message message;
        uint8_t bytes[sizeof(shm_message) + 1];
    } in = {0};
    union {
        struct cmsghdr header;
        uint8_t space[CMSG_SPACE(FDS_MAX * sizeof(int))];
    } control;
    struct iovec bytes = {.iov_base = &in, .iov_len = sizeof(in)};
    struct msghdr header = {
        .msg_iov = &bytes, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control.space)};
    ssize_t got = recvmsg(conn->fd, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0) {
        if (errno == EINTR) {
            return true;
        }
        if (errno != EAGAIN || conn->gone) {
            shm_conn_end(conn, KVX_E_PEER_LOST, errno == EAGAIN ? 0 : errno, true);
        }
        return false;
    }
    bool more = false;
    int fd = shm_conn_fd_take(&header, &more);
    if (got == 0) {
        if (fd >= 0) {
            close(fd);
        }
        shm_conn_end(conn, KVX_E_PEER_LOST, 0, true);
        return false;
    }
    bool cut = (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0;
    if (conn->peer != NULL && (header.msg_flags & MSG_CTRUNC) && fd < 0) { /* there was one, but no room for it here */
        cut = (header.msg_flags & MSG_TRUNC) != 0;
        fd = SHM_FD_MISSED;
    }
    shm_conn_on_message(conn, &in.message, (size_t)got, fd, more || cut);
    return true;
}

void kvx_shm_conn_event(shm_conn *conn, uint32_t events) {
    if (conn->state == SHM_DEAD || conn->parked) { /* by something else in this turn */
        return;
    }
    if (events & EPOLLOUT) {
        shm_conn_flush(conn);
    }
    if (conn->state == SHM_LINGER) {
        if (events & (EPOLLHUP | EPOLLERR)) {
            kvx_shm_owner_end(conn);
        }
        return;
    }
    if (!conn->reading && (events & (EPOLLHUP | EPOLLERR))) {
        if (conn->held) { /* it would be told again and again until there is room */
            kvx_shm_conn_unwatch(conn);
        } else {
            kvx_shm_conn_read(conn, true);
        }
    }
    for (int i = 0; (i < SHM_READS_MAX || conn->gone) && conn->state <= SHM_OPEN && conn->reading && !conn->parked;
         i++) {
        if (!shm_conn_receive(conn)) {
            return;
        }
        pthread_mutex_lock(&conn->tx_lock);
        if (conn->tx_count >= SHM_TX_MAX && !conn->gone) { /* it asks faster than it listens */
            conn->reading = false;
            shm_conn_rearm(conn);
        }
        pthread_mutex_unlock(&conn->tx_lock);
    }
}

void kvx_shm_conn_gone(shm_conn *conn) {
    if (conn->state == SHM_DEAD || conn->process_fd < 0) {
        return;
    }
    shm_conn_process_unwatch(conn);
    conn->gone = true;
    if (!conn->held && conn->state != SHM_LINGER) {
        kvx_shm_conn_read(conn, true);
    }
    kvx_shm_conn_event(conn, conn->state == SHM_LINGER ? EPOLLHUP : EPOLLIN);
}

void kvx_shm_deadline(shm_transport *shm, uint64_t at_ms) {
    if (at_ms != 0 && (shm->deadline_ms == 0 || at_ms < shm->deadline_ms)) {
        shm->deadline_ms = at_ms;
    }
}

/* transport_tcp.c: the tcp transport: reaches every host, with native threads and no copy beside the kernel's two.
 *
 * This file is the table of slots, the progress loop and the listener. Each progress thread sleeps in epoll_wait until
 * a socket, the core (cancel, revoke, room for notifications) or one of its own lists (new connections, connections
 * with something to send, peers to look at, grants to end) has work; without deadlines it sleeps for ever. See tcp.h
 * for who owns what. */
#define _GNU_SOURCE
#include "tcp/tcp.h"
#include "list.h"
#include "core/vault.h"
#include "core/forks.h"

#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define EVENTS_MAX  64
#define ACCEPTS_MAX 64 /* in one turn */

/* -- a thread's lists ------------------------------------------------------------------------------------------- */

static void tcp_thread_signal(tcp_thread *thread, bool was_kicked) {
    uint64_t one = 1;
    if (!was_kicked) {
        (void)!write(thread->kick_fd, &one, sizeof one);
    }
}

void kvx_tcp_inbox(tcp_conn *conn) {
    tcp_thread *thread = conn->thread;
    pthread_mutex_lock(&thread->lock);
    conn->inbox_next = thread->inbox;
    thread->inbox = conn;
    bool was_kicked = thread->kicked;
    thread->kicked = true;
    pthread_mutex_unlock(&thread->lock);
    tcp_thread_signal(thread, was_kicked);
}

void kvx_tcp_kick(tcp_conn *conn) {
    tcp_thread *thread = conn->thread;
    pthread_mutex_lock(&thread->lock);
    bool needless = conn->kick_queued || conn->state == TCP_DEAD;
    bool was_kicked = thread->kicked || needless;
    if (!needless) {
        conn->kick_queued = true;
        conn->kick_next = thread->kicks;
        thread->kicks = conn;
        thread->kicked = true;
    }
    pthread_mutex_unlock(&thread->lock);
    tcp_thread_signal(thread, was_kicked);
}

void kvx_tcp_unkick(tcp_conn *conn) {
    tcp_thread *thread = conn->thread;
    pthread_mutex_lock(&thread->lock);
    if (conn->kick_queued) {
        tcp_conn **at = &thread->kicks;
        while (*at != conn) {
            at = &(*at)->kick_next;
        }
        *at = conn->kick_next;
        conn->kick_queued = false;
    }
    pthread_mutex_unlock(&thread->lock);
}

void kvx_tcp_kick_peer(tcp_peer *peer) {
    tcp_thread *thread = peer->home;
    pthread_mutex_lock(&thread->lock);
    bool was_kicked = thread->kicked || peer->todo_queued;
    if (!peer->todo_queued) {
        peer->todo_queued = true;
        peer->todo_next = thread->todo;
        thread->todo = peer;
        thread->kicked = true;
    }
    pthread_mutex_unlock(&thread->lock);
    tcp_thread_signal(thread, was_kicked);
}

void kvx_tcp_unkick_peer(tcp_peer *peer) {
    tcp_thread *thread = peer->home;
    pthread_mutex_lock(&thread->lock);
    if (peer->todo_queued) {
        tcp_peer **at = &thread->todo;
        while (*at != peer) {
            at = &(*at)->todo_next;
        }
        *at = peer->todo_next;
        peer->todo_queued = false;
    }
    pthread_mutex_unlock(&thread->lock);
}

static kvx_grant *tcp_revoke_take(tcp_thread *thread) {
    tcp_transport *tcp = thread->tcp;
    pthread_mutex_lock(&tcp->revoke_lock);
    kvx_grant *grant = thread->revoked;
    if (grant != NULL) {
        thread->revoked = kvx_grant_link_of(grant, tcp->slot)->next;
    }
    pthread_mutex_unlock(&tcp->revoke_lock);
    return grant;
}

/* Takes one element of each list; false when all were empty. */
static bool tcp_work_take(tcp_thread *thread, tcp_conn **adopt_p, tcp_conn **kick_p, tcp_peer **todo_p,
                          kvx_grant **revoke_p) {
    pthread_mutex_lock(&thread->lock);
    if ((*adopt_p = thread->inbox) != NULL) {
        thread->inbox = (*adopt_p)->inbox_next;
    }
    if ((*kick_p = thread->inbox == NULL ? thread->kicks : NULL) != NULL) {
        thread->kicks = (*kick_p)->kick_next;
        (*kick_p)->kick_queued = false;
    }
    if ((*todo_p = thread->todo) != NULL) {
        thread->todo = (*todo_p)->todo_next;
        (*todo_p)->todo_queued = false;
    }
    *revoke_p = tcp_revoke_take(thread);
    bool any = *adopt_p || *kick_p || *todo_p || *revoke_p;
    if (!any) {
        thread->kicked = false;
    }
    pthread_mutex_unlock(&thread->lock);
    return any;
}

static void tcp_revoke_on_thread(tcp_thread *thread, kvx_grant *grant) {
    tcp_transport *tcp = thread->tcp;
    kvx_grant_link *link = kvx_grant_link_of(grant, tcp->slot);
    for (tcp_conn *conn = thread->conns; conn != NULL; conn = conn->next) {
        if (conn->role == KVX_STREAM_ACCEPTOR) {
            kvx_tcp_serve_revoke(conn, grant);
        }
    }
    pthread_mutex_lock(&tcp->revoke_lock);
    bool over = --link->threads_left == 0;
    if (over) {
        KVX_ASSERT(tcp->revoke_first == grant);
        tcp->revoke_first = link->next;
        tcp->revoke_last = link->next == NULL ? NULL : tcp->revoke_last;
    }
    pthread_mutex_unlock(&tcp->revoke_lock);
    if (over) {
        kvx_grant_quiet(tcp->core, tcp->slot, grant);
    }
}

static void tcp_conn_woken(tcp_conn *conn) {
    if (conn->role == KVX_STREAM_ACCEPTOR) {
        if (atomic_load(&conn->made_to_leave)) {
            kvx_tcp_conn_end(conn, KVX_E_TIMEOUT, 0, true);
        }
        return;
    }
    if (conn->state == TCP_NEW || kvx_tcp_conn_ended(conn) || kvx_tcp_peer_over(conn) || conn->state != TCP_OPEN) {
        return;
    }
    pthread_mutex_lock(&conn->peer->lock);
    bool idle = conn->request_count == 0;
    pthread_mutex_unlock(&conn->peer->lock);
    if (idle) { /* before the first bytes: has the other side closed it? */
        kvx_tcp_conn_receive(conn, TCP_SMALL_BYTES_MAX);
    }
    if (conn->state == TCP_OPEN) {
        kvx_tcp_pump(conn);
    }
}

static void tcp_progress_lists(tcp_thread *thread) {
    tcp_conn *adopt, *kick;
    tcp_peer *todo;
    kvx_grant *revoke;
    while (tcp_work_take(thread, &adopt, &kick, &todo, &revoke)) {
        if (adopt != NULL) {
            kvx_tcp_conn_adopt(adopt);
        }
        if (kick != NULL) {
            pthread_mutex_lock(&kick->rx_lock);
            tcp_conn_woken(kick);
            pthread_mutex_unlock(&kick->rx_lock);
        }
        if (revoke != NULL) {
            tcp_revoke_on_thread(thread, revoke);
        }
        if (todo != NULL) {
            kvx_tcp_peer_todo(todo);
        }
    }
}

/* -- the listener, on thread 0 ---------------------------------------------------------------------------------- */

static void tcp_accept_some(tcp_transport *tcp) {
    for (int i = 0; i < ACCEPTS_MAX; i++) {
        struct sockaddr_storage from = {0};
        int fd = kvx_listener_accept(&tcp->listener, &from);
        if (fd < 0) {
            if (errno != EAGAIN) {
                kvx_listener_pause(&tcp->listener, kvx_tcp_admit_room(tcp));
            }
            return;
        }
        tcp_conn *conn = kvx_tcp_conn_new(tcp, KVX_STREAM_ACCEPTOR);
        if (conn == NULL) {
            close(fd);
            return;
        }
        conn->fd = fd;
        conn->thread = &tcp->thread[atomic_fetch_add(&tcp->next_thread, 1) % tcp->threads];
        atomic_fetch_add(&tcp->accepted, 1);
        kvx_tcp_admit(conn, &from); /* first: once its thread knows it, it may end at any time */
        kvx_tcp_inbox(conn);
    }
}

/* -- progress --------------------------------------------------------------------------------------------------- */

/* The core woke us: something was cancelled, or there is room for notifications again. */
static void tcp_poll_all(tcp_thread *thread) {
    for (tcp_conn *conn = thread->conns, *next; conn != NULL; conn = next) {
        next = conn->next;
        if (conn->state != TCP_OPEN) {
            continue;
        }
        if (conn->role == KVX_STREAM_DIALLER) {
            pthread_mutex_lock(&conn->rx_lock);
            kvx_tcp_xfer_scan(conn);
            pthread_mutex_unlock(&conn->rx_lock);
        } else if (conn->rx_stopped) {
            kvx_tcp_serve_wake(conn);
            if (conn->state == TCP_OPEN || conn->state == TCP_LINGER) {
                kvx_tcp_pump(conn);
            }
        }
    }
}

static void tcp_check_deadlines(tcp_thread *thread, uint64_t now_ms) {
    if (thread->deadline_ms == 0 || now_ms < thread->deadline_ms) {
        return;
    }
    thread->deadline_ms = 0;
    for (tcp_conn *conn = thread->conns, *next; conn != NULL; conn = next) {
        next = conn->next;
        pthread_mutex_lock(&conn->rx_lock);
        kvx_tcp_conn_expired(conn, now_ms);
        pthread_mutex_unlock(&conn->rx_lock);
        if (conn->state != TCP_DEAD && conn->deadline_ms != 0) {
            kvx_tcp_conn_deadline(conn, conn->deadline_ms);
        }
    }
}

static void tcp_reap(tcp_thread *thread) {
    while (thread->graveyard != NULL) {
        tcp_conn *conn = thread->graveyard;
        thread->graveyard = conn->grave_next;
        if (conn->role == KVX_STREAM_ACCEPTOR) {
            kvx_tcp_conn_free(conn);
        } else {
            kvx_tcp_peer_conn_gone(conn);
        }
    }
}

/* A request was served just now: the next one may be on its way. */
static int tcp_busy_poll(tcp_thread *thread, struct epoll_event *events) {
    int count;
    while ((count = epoll_wait(thread->epoll_fd, events, EVENTS_MAX, 0)) == 0 &&
           kvx_tcp_now_us() < thread->spin_until_us) {
        sched_yield();
    }
    if (count == 0) {
        thread->spin_until_us = 0;
    }
    return count;
}

static int tcp_progress(void *transport, uint32_t index, int timeout_ms) {
    tcp_transport *tcp = transport;
    tcp_thread *thread = &tcp->thread[index];
    struct epoll_event events[EVENTS_MAX];
    int count = 0;
    if (thread->spin_until_us != 0) {
        count = tcp_busy_poll(thread, events);
    }
    if (count == 0) {
        uint64_t accepts_ms = index == 0 ? tcp->listener.retry_ms : 0;
        count = epoll_wait(thread->epoll_fd, events, EVENTS_MAX,
                           kvx_timeout_ms(thread->deadline_ms, accepts_ms, timeout_ms));
    }
    uint64_t value;
    bool woken = false, served = false;
    for (int i = 0; i < count; i++) {
        void *what = events[i].data.ptr;
        if (what == &thread->wake_fd) {
            woken = read(thread->wake_fd, &value, sizeof value) > 0;
        } else if (what == &thread->kick_fd) {
            (void)!read(thread->kick_fd, &value, sizeof value);
        } else if (what == &tcp->listener) {
            tcp_accept_some(tcp);
        } else {
            served |= ((tcp_conn *)what)->role == KVX_STREAM_ACCEPTOR;
            kvx_tcp_conn_event(what, events[i].events);
        }
    }
    if (served && tcp->config->spin_us != 0) {
        thread->spin_until_us = kvx_tcp_now_us() + tcp->config->spin_us;
    }
    tcp_progress_lists(thread);
    if (woken) {
        tcp_poll_all(thread);
    }
    tcp_check_deadlines(thread, kvx_now_ms());
    tcp_reap(thread);
    if (index == 0) {
        kvx_listener_resume(&tcp->listener);
    }
    return count > 0 ? count : 0;
}

/* -- slots ------------------------------------------------------------------------------------------------------ */

static void tcp_threads_free(tcp_transport *tcp) {
    for (uint32_t i = 0; i < tcp->threads; i++) {
        tcp_thread *thread = &tcp->thread[i];
        if (thread->epoll_fd >= 0) {
            close(thread->epoll_fd);
        }
        if (thread->kick_fd >= 0) {
            close(thread->kick_fd);
        }
        pthread_mutex_destroy(&thread->lock);
    }
    if (tcp->listener.fd >= 0) {
        close(tcp->listener.fd);
    }
    pthread_mutex_destroy(&tcp->lock);
    kvx_tcp_admit_free(tcp);
    pthread_mutex_destroy(&tcp->revoke_lock);
    kvx_vault_give(tcp);
}

static bool tcp_watch(int epoll_fd, int fd, void *what) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = what};
    return epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0;
}

static bool tcp_thread_open(tcp_transport *tcp, uint32_t index) {
    tcp_thread *thread = &tcp->thread[index];
    thread->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    thread->kick_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    thread->wake_fd = kvx_core_wake_fd(tcp->core, tcp->slot, index);
    return thread->epoll_fd >= 0 && thread->kick_fd >= 0 && thread->wake_fd >= 0 &&
           tcp_watch(thread->epoll_fd, thread->kick_fd, &thread->kick_fd) &&
           tcp_watch(thread->epoll_fd, thread->wake_fd, &thread->wake_fd) &&
           (index != 0 || kvx_listener_watch(&tcp->listener, thread->epoll_fd));
}

static uint32_t tcp_clamp(uint32_t value, uint32_t least, uint32_t most) {
    return value < least ? least : value > most ? most : value;
}

static int tcp_encryption_open(tcp_transport *tcp, char *why, size_t why_size) {
    char reason[512];
    kvx_random(tcp->secret, sizeof tcp->secret);
    int status = kvx_encryption_probe(reason, sizeof reason);
    if (status != KVX_OK) {
        snprintf(why, why_size, "tcp_encryption is on, but %.400s", reason);
    }
    return status;
}

static int tcp_open(kvx_core *core, uint32_t slot, const kvx_engine_config *config, void **transport_p, char *why,
                    size_t why_size) {
    tcp_transport *tcp = kvx_vault_take(sizeof *tcp);
    if (tcp == NULL) {
        snprintf(why, why_size, "tcp: out of memory");
        return KVX_E_NOMEM;
    }
    tcp->core = core;
    tcp->slot = slot;
    tcp->config = config;
    tcp->counters = kvx_core_counters(core, slot);
    tcp->frame_bytes = config->frame_bytes > KVX_STREAM_FRAME_MAX ? KVX_STREAM_FRAME_MAX
                       : config->frame_bytes < 4096               ? 4096
                                                                  : (uint32_t)config->frame_bytes;
    tcp->streams = tcp_clamp(config->tcp_streams, 1, KVX_STREAM_STREAMS_MAX);
    tcp->threads = tcp_clamp(config->tcp_threads, 1, TCP_THREADS_MAX);
    tcp->encrypted = config->flags & KVX_ENGINE_ENCRYPT;
    tcp->listener.fd = -1;
    snprintf(tcp->congestion, sizeof tcp->congestion, "%s", config->tcp_congestion ? config->tcp_congestion : "");
    pthread_mutex_init(&tcp->lock, NULL);
    kvx_tcp_admit_init(tcp);
    pthread_mutex_init(&tcp->revoke_lock, NULL);
    for (uint32_t i = 0; i < tcp->threads; i++) {
        tcp->thread[i] = (tcp_thread){.tcp = tcp, .index = i, .epoll_fd = -1, .kick_fd = -1, .wake_fd = -1};
        pthread_mutex_init(&tcp->thread[i].lock, NULL);
    }
    kvx_core_threads_set(core, slot, tcp->threads);
    int status = tcp->encrypted ? tcp_encryption_open(tcp, why, why_size) : KVX_OK;
    status = status == KVX_OK ? kvx_tcp_listen(tcp, why, why_size) : status;
    tcp->owner_set = kvx_core_owner_set(core, slot, kvx_tcp_owner_turn, tcp);
    if (status == KVX_OK && tcp->owner_set < 0) {
        status = KVX_E_FDS;
        snprintf(why, why_size, "tcp: no event descriptors: %s", strerror(errno));
    }
    for (uint32_t i = 0; status == KVX_OK && i < tcp->threads; i++) {
        if (!tcp_thread_open(tcp, i)) {
            status = errno == EMFILE || errno == ENFILE ? KVX_E_FDS : KVX_E_SYSTEM;
            snprintf(why, why_size, "tcp: no event descriptors: %s", strerror(errno));
        }
    }
    if (status != KVX_OK) {
        tcp_threads_free(tcp);
        return status;
    }
    *transport_p = tcp;
    return KVX_OK;
}

static void tcp_thread_close(tcp_thread *thread) {
    while (thread->inbox != NULL) { /* never adopted: put it where ending expects it */
        tcp_conn *conn = thread->inbox;
        thread->inbox = conn->inbox_next;
        KVX_LIST_PUSH(thread->conns, conn);
    }
    while (thread->conns != NULL) {
        tcp_conn *conn = thread->conns;
        bool clean =
            conn->role == KVX_STREAM_DIALLER && conn->state == TCP_OPEN && conn->request_count == 0 && !conn->tx.active;
        if (clean) {
            kvx_tcp_send_bye(conn);
        }
        kvx_tcp_conn_end(conn, KVX_E_CLOSED, 0, conn->role == KVX_STREAM_DIALLER && !clean);
    }
    thread->revoked = NULL; /* the core ends what is left of grants by itself */
    thread->todo = NULL;
    tcp_reap(thread);
}

static void tcp_close(void *transport) {
    tcp_transport *tcp = transport;
    for (uint32_t i = 0; i < tcp->threads; i++) {
        tcp_thread_close(&tcp->thread[i]);
    }
    while (tcp->peers != NULL) {
        tcp_peer *peer = tcp->peers;
        tcp->peers = peer->next;
        kvx_tcp_xfer_sweep(peer, KVX_E_CLOSED);
        kvx_tcp_peer_free(peer);
    }
    tcp_threads_free(tcp);
}

static void tcp_query(void *transport, kvx_transport_info *info_p) {
    const tcp_transport *tcp = transport;
    snprintf(info_p->name, sizeof info_p->name, "tcp");
    snprintf(info_p->endpoint, sizeof info_p->endpoint, "%s", tcp->endpoint);
    info_p->caps = KVX_CAP_PUT | KVX_CAP_GET | KVX_CAP_NOTIFY | KVX_CAP_CHECK | KVX_CAP_BLOCKS;
    if (tcp->encrypted) {
        info_p->caps |= KVX_CAP_ENCRYPTED;
        memcpy(info_p->secret, tcp->secret, sizeof info_p->secret);
    }
    info_p->alignment = 1;
    info_p->region_bytes_max = UINT64_MAX;
    info_p->copies_x100 = 200; /* into the kernel and out of it */
    info_p->memory = info_p->local_memory = 1u << KVX_MEM_DRAM | 1u << KVX_MEM_PINNED | 1u << KVX_MEM_HBM;
}

static int tcp_mem_register(void *transport, kvx_region *region) {
    (void)transport;
    (void)region;
    return KVX_OK;
}

static void tcp_revoke_queue(tcp_transport *tcp, kvx_grant *grant) {
    pthread_mutex_lock(&tcp->revoke_lock);
    *kvx_grant_link_of(grant, tcp->slot) = (kvx_grant_link){.threads_left = tcp->threads};
    if (tcp->revoke_last != NULL) {
        kvx_grant_link_of(tcp->revoke_last, tcp->slot)->next = grant;
    } else {
        tcp->revoke_first = grant;
    }
    tcp->revoke_last = grant;
    for (uint32_t i = 0; i < tcp->threads; i++) {
        tcp_thread *thread = &tcp->thread[i];
        thread->revoked = thread->revoked == NULL ? grant : thread->revoked;
    }
    pthread_mutex_unlock(&tcp->revoke_lock);
}

static int tcp_mem_release(void *transport, kvx_region *region, kvx_grant *grant) {
    tcp_transport *tcp = transport;
    (void)region;
    if (grant == NULL || atomic_load(&tcp->accepted) == 0) { /* a connection that comes now finds the grant revoked */
        return KVX_OK;
    }
    KVX_ASSERT(tcp->threads > 0);
    tcp_revoke_queue(tcp, grant);
    for (uint32_t i = 0; i < tcp->threads; i++) {
        tcp_thread *thread = &tcp->thread[i];
        pthread_mutex_lock(&thread->lock);
        bool was_kicked = thread->kicked;
        thread->kicked = true;
        pthread_mutex_unlock(&thread->lock);
        tcp_thread_signal(thread, was_kicked);
    }
    return KVX_PENDING;
}

const kvx_transport_ops kvx_transport_tcp = {
    .abi_version = KVX_ABI_VERSION,
    .name = "tcp",
    .open = tcp_open,
    .close = tcp_close,
    .query = tcp_query,
    .mem_register = tcp_mem_register,
    .mem_release = tcp_mem_release,
    .mem_import = kvx_tcp_import,
    .peer_connect = kvx_tcp_connect,
    .peer_close = kvx_tcp_peer_close,
    .submit = kvx_tcp_submit,
    .progress = tcp_progress,
};

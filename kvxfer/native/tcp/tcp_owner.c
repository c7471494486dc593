/* tcp_owner.c: answers to small requests, received by the thread that sent them.
 *
 * A small request costs two wake-ups at least: of the owner's progress thread and of ours. If our progress thread took
 * the answer, it would only wake the event loop in its turn. So, while small requests are all that a connection
 * carries, the engine's owner thread receives: the socket moves from the epoll set of its progress thread into the one
 * behind kvx_engine_fd, and kvx_engine_drain reads it. The first request that is not small gives the socket back.
 *
 * Who receives is a matter of who is woken, never of who may: whoever reads or parses holds conn->rx_lock, and the
 * owner thread only ever tries to take it. Everything else stays with the progress thread: waiting for room to send,
 * resets, deadlines, cancelled ops, and the end of a connection, which the owner thread only asks for. The list of
 * connections that it watches belongs to the owner thread; one that it does not know to be closed is never freed. */
#include "tcp/tcp.h"

#include <sched.h>
#include <time.h>

uint64_t kvx_tcp_small_bytes(const tcp_transport *tcp) {
    uint64_t most = tcp->config->inline_bytes_max * 4; /* a copy into the kernel: the cache still holds the source */
    return most < TCP_SMALL_BYTES_MAX ? most : TCP_SMALL_BYTES_MAX;
}

/* Lets go of the connection at place `at`. */
static void tcp_owner_release(tcp_transport *tcp, uint32_t at) {
    tcp_conn *conn = tcp->owned[at];
    tcp->owned[at] = tcp->owned[--tcp->owned_count];
    atomic_store(&conn->owned, false);
    if (pthread_mutex_trylock(&conn->rx_lock) != 0) {
        kvx_tcp_kick(conn); /* its thread is busy with it and may have looked already */
        return;
    }
    bool end = conn->end_wanted;
    if (!end) {
        kvx_tcp_conn_arm(conn);
    }
    pthread_mutex_unlock(&conn->rx_lock);
    if (end) {
        kvx_tcp_kick(conn);
    }
}

void kvx_tcp_disown(const tcp_peer *peer) {
    tcp_transport *tcp = peer->tcp;
    for (uint32_t i = tcp->owned_count; i > 0; i--) {
        if (tcp->owned[i - 1]->peer == peer) {
            tcp_owner_release(tcp, i - 1);
        }
    }
}

void kvx_tcp_own(tcp_conn *conn) {
    tcp_transport *tcp = conn->tcp;
    if (atomic_load(&conn->owned)) {
        return;
    }
    if (tcp->owned_count == TCP_OWNED_MAX) { /* in turn: with many peers, the one used longest ago, or nearly so */
        tcp_owner_release(tcp, tcp->owned_next++ % TCP_OWNED_MAX);
    }
    if (pthread_mutex_trylock(&conn->rx_lock) != 0) {
        return;
    }
    pthread_mutex_lock(&conn->peer->lock);
    /* what was sent just now, or it is answered already; and no answer is for a device, whose driver may block */
    bool alone = conn->request_count <= 1 && conn->peer->staged == 0;
    pthread_mutex_unlock(&conn->peer->lock);
    if (alone && conn->state == TCP_OPEN && !conn->end_wanted) {
        atomic_store(&conn->owned, true);
        kvx_tcp_conn_arm(conn);
        if (atomic_load(&conn->owned)) { /* there was room in the set */
            tcp->owned[tcp->owned_count++] = conn;
        }
    }
    pthread_mutex_unlock(&conn->rx_lock);
}

/* Receives what is there. False: the connection has to go back to its thread. */
static bool tcp_owner_progress_once(tcp_conn *conn) {
    if (pthread_mutex_trylock(&conn->rx_lock) != 0) {
        return true; /* its thread looks after it; the set is level-triggered, so we come back */
    }
    bool keep = conn->state == TCP_OPEN && !conn->end_wanted;
    if (keep) {
        conn->on_owner = true;
        kvx_tcp_conn_receive(conn, TCP_SMALL_BYTES_MAX);
        conn->on_owner = false;
        keep = !conn->end_wanted && conn->rx.payload_left <= TCP_SMALL_BYTES_MAX;
    }
    pthread_mutex_unlock(&conn->rx_lock);
    return keep;
}

void kvx_tcp_owner_turn(void *transport) {
    tcp_transport *tcp = transport;
    for (uint32_t i = tcp->owned_count; i > 0; i--) {
        tcp_conn *conn = tcp->owned[i - 1];
        if (tcp_owner_progress_once(conn)) {
            kvx_tcp_send_waiting(conn); /* the note after a get, or what found no place among the requests */
        } else {
            tcp_owner_release(tcp, i - 1);
        }
    }
}

uint64_t kvx_tcp_now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

void kvx_tcp_owner_spin(tcp_conn *conn) {
    tcp_transport *tcp = conn->tcp;
    uint64_t until_us = kvx_tcp_now_us() + tcp->config->spin_us;
    while (atomic_load(&conn->owned)) {
        kvx_tcp_owner_turn(tcp);
        pthread_mutex_lock(&conn->peer->lock);
        bool done = conn->peer->xfers == NULL;
        pthread_mutex_unlock(&conn->peer->lock);
        if (done || kvx_tcp_now_us() >= until_us) {
            return;
        }
        sched_yield(); /* the other side may be waiting for this very core */
    }
}

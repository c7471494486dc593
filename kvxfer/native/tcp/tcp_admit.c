/* tcp_admit.c: how many incoming connections there may be, and whose.
 *
 * A connection is a newcomer until it has proved the key of a grant (newcomers.h). From then on it counts for that
 * grant. All of them have a share of the process's descriptors, and those of one grant a half of that, whatever a peer
 * says about its streams and sessions: so whoever holds a descriptor cannot take the places of those who hold another.
 * A connection whose grants were all taken back, or given back, ends after a while, and at once when its place is
 * needed. What a connection counts for is changed by its own thread only, with line_lock held. */
#include "tcp/tcp.h"

#include <stddef.h>
#include <stdlib.h>

#define CONNS_MIN   (2 * KVX_STREAM_STREAMS_MAX)
#define HOLDERS_ONE 1 /* places that the table needs for another grant */

typedef struct holder {
    uint64_t grant;
    uint32_t conns;
} holder;

void kvx_tcp_admit_init(tcp_transport *tcp) {
    const uint32_t most = kvx_connections_max((uint64_t)tcp->config->accepted_max * KVX_STREAM_STREAMS_MAX, 2);
    tcp->proved_max = most < CONNS_MIN ? CONNS_MIN : most;
    pthread_mutex_init(&tcp->line_lock, NULL);
    kvx_newcomers_init(&tcp->line);
    kvx_newcomers_init(&tcp->unused);
}

void kvx_tcp_admit_free(tcp_transport *tcp) {
    holder *one;
    while ((one = kvx_table_any(&tcp->holders)) != NULL) {
        kvx_table_remove(&tcp->holders, one->grant);
        free(one);
    }
    kvx_table_free(&tcp->holders);
    pthread_mutex_destroy(&tcp->line_lock);
}

/* -- with line_lock held ---------------------------------------------------------------------------------------- */

static void tcp_admit_unlink(tcp_conn *conn) {
    kvx_newcomers_remove(conn->proved ? &conn->tcp->unused : &conn->tcp->line, &conn->newcomer);
}

static void tcp_admit_count(tcp_conn *conn, bool in) {
    tcp_transport *tcp = conn->tcp;
    if (conn->counts != in) {
        conn->counts = in;
        tcp->proved += in ? 1u : -1u;
        tcp->engines += conn->stream != 0 ? 0 : in ? 1u : -1u;
    }
}

/* Its thread takes it out of its line before it is freed. */
static bool tcp_admit_evict(tcp_transport *tcp, kvx_newcomer *one) {
    if (one == NULL) {
        return false;
    }
    tcp_conn *conn = (tcp_conn *)((uint8_t *)one - offsetof(tcp_conn, newcomer));
    KVX_COUNT(tcp->counters, refused, !conn->proved);
    tcp_admit_unlink(conn);
    tcp_admit_count(conn, false);
    atomic_store(&conn->made_to_leave, true);
    kvx_tcp_kick(conn);
    return true;
}

static void tcp_admit_release(tcp_conn *conn) {
    holder *one = kvx_table_get(&conn->tcp->holders, conn->holder);
    conn->holder = 0;
    if (one != NULL && --one->conns == 0) {
        kvx_table_remove(&conn->tcp->holders, one->grant);
        free(one);
    }
}

static holder *tcp_admit_holder_find(tcp_transport *tcp, uint64_t grant) {
    holder *one = kvx_table_get(&tcp->holders, grant);
    if (one == NULL && kvx_table_reserve(&tcp->holders, HOLDERS_ONE) && (one = calloc(1, sizeof *one)) != NULL) {
        one->grant = grant;
        kvx_table_put(&tcp->holders, grant, one);
    }
    return one;
}

static int tcp_admit_reserve_slot(tcp_conn *conn, uint64_t grant) {
    tcp_transport *tcp = conn->tcp;
    holder *one = tcp_admit_holder_find(tcp, grant);
    if (one == NULL) {
        return KVX_E_NOMEM;
    }
    const bool room =
        conn->counts || tcp->proved < tcp->proved_max || tcp_admit_evict(tcp, kvx_newcomers_oldest(&tcp->unused));
    if (!room || one->conns >= tcp->proved_max / 2) {
        if (one->conns == 0) {
            kvx_table_remove(&tcp->holders, grant);
            free(one);
        }
        return KVX_E_REFUSED;
    }
    tcp_admit_unlink(conn);
    conn->proved = true;
    conn->holder = grant;
    conn->unused_until_ms = 0;
    one->conns++;
    atomic_store(&conn->made_to_leave, false); /* it was faster than the one who needed its place */
    tcp_admit_count(conn, true);
    return KVX_OK;
}

/* -- the steps of a connection ----------------------------------------------------------------------------------- */

void kvx_tcp_admit(tcp_conn *conn, const struct sockaddr_storage *from) {
    tcp_transport *tcp = conn->tcp;
    pthread_mutex_lock(&tcp->line_lock);
    tcp_admit_evict(tcp, kvx_newcomers_surplus(&tcp->line));
    kvx_newcomers_add(&tcp->line, &conn->newcomer, from);
    pthread_mutex_unlock(&tcp->line_lock);
}

bool kvx_tcp_admit_room(tcp_transport *tcp) {
    pthread_mutex_lock(&tcp->line_lock);
    bool one = tcp_admit_evict(tcp, kvx_newcomers_oldest(&tcp->line)) ||
               tcp_admit_evict(tcp, kvx_newcomers_oldest(&tcp->unused));
    pthread_mutex_unlock(&tcp->line_lock);
    return one;
}

bool kvx_tcp_admit_greeted(tcp_conn *conn) {
    tcp_transport *tcp = conn->tcp;
    pthread_mutex_lock(&tcp->line_lock);
    bool room = tcp->proved < tcp->proved_max || tcp->unused.count > 0;
    room = room && (conn->stream != 0 || tcp->engines < tcp->config->accepted_max);
    pthread_mutex_unlock(&tcp->line_lock);
    return room;
}

int kvx_tcp_admit_proved(tcp_conn *conn, uint64_t grant) {
    if (conn->holder != 0) {
        return KVX_OK;
    }
    bool newcomer = !conn->proved;
    pthread_mutex_lock(&conn->tcp->line_lock);
    int status = tcp_admit_reserve_slot(conn, grant);
    pthread_mutex_unlock(&conn->tcp->line_lock);
    if (status == KVX_OK && newcomer) {
        conn->deadline_ms = 0;
    }
    return status;
}

void kvx_tcp_admit_unused(tcp_conn *conn, uint64_t revoked) {
    tcp_transport *tcp = conn->tcp;
    pthread_mutex_lock(&tcp->line_lock);
    if (conn->holder != 0 && conn->holder == revoked) {
        tcp_admit_release(conn);
    }
    bool unused = conn->proved && conn->holder == 0 && conn->attached_count == 0 && !conn->newcomer.waits &&
                  !atomic_load(&conn->made_to_leave);
    if (unused) {
        kvx_newcomers_add(&tcp->unused, &conn->newcomer, NULL);
    }
    pthread_mutex_unlock(&tcp->line_lock);
    if (unused) {
        conn->unused_until_ms = kvx_now_ms() + TCP_UNUSED_MS;
        kvx_tcp_conn_deadline(conn, conn->unused_until_ms);
    }
}

void kvx_tcp_admit_end(tcp_conn *conn) {
    pthread_mutex_lock(&conn->tcp->line_lock);
    tcp_admit_unlink(conn);
    tcp_admit_count(conn, false);
    if (conn->holder != 0) {
        tcp_admit_release(conn);
    }
    pthread_mutex_unlock(&conn->tcp->line_lock);
}

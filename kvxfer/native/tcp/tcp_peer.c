/* tcp_peer.c: the dialler's peers and imports.
 *
 * A peer is `streams` connections to one endpoint; it is up when all have greeted and down as soon as one of them ends:
 * nothing is ever sent twice. Connections live on different threads; each of them settles its own frames and lets go of
 * the peer after its last batch of events. What concerns the peer as a whole (connected, lost, closed) is said by one
 * thread only, its home. An import proves the key on every stream, and learns there that the owner holds it too, before
 * any payload is sent. */
#include "tcp/tcp.h"
#include "list.h"
#include "core/vault.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

int kvx_tcp_connect(void *transport, kvx_peer *kvx) {
    tcp_transport *tcp = transport;
    if (kvx->encrypted != tcp->encrypted) {
        return KVX_E_ENCRYPTION;
    }
    tcp_peer *peer = calloc(1, sizeof *peer);
    if (peer == NULL) {
        return KVX_E_NOMEM;
    }
    if (kvx_address_parse(kvx->endpoint, &peer->address, &peer->address_length) != KVX_OK) {
        free(peer);
        return KVX_E_INVALID;
    }
    peer->tcp = tcp;
    peer->peer = kvx;
    peer->streams = peer->conns_left = tcp->streams;
    pthread_mutex_init(&peer->lock, NULL);
    uint8_t session[sizeof peer->conns[0]->hello.session];
    kvx_random(session, sizeof session);
    for (uint32_t i = 0; i < peer->streams; i++) {
        tcp_conn *conn = peer->conns[i] = kvx_tcp_conn_new(tcp, KVX_STREAM_DIALLER);
        if (conn == NULL) {
            kvx_tcp_peer_free(peer);
            return KVX_E_NOMEM;
        }
        conn->peer = peer;
        conn->stream = i;
        conn->hello.stream = (uint8_t)i;
        conn->hello.streams = (uint8_t)peer->streams;
        memcpy(conn->hello.session, session, sizeof session);
        conn->thread = &tcp->thread[atomic_fetch_add(&tcp->next_thread, 1) % tcp->threads];
    }
    peer->home = peer->conns[0]->thread;
    kvx->transport_data = peer;
    pthread_mutex_lock(&tcp->lock);
    KVX_LIST_PUSH(tcp->peers, peer);
    pthread_mutex_unlock(&tcp->lock);
    for (uint32_t i = 0; i < peer->streams; i++) {
        kvx_tcp_inbox(peer->conns[i]);
    }
    return KVX_PENDING;
}

void kvx_tcp_peer_free(tcp_peer *peer) {
    for (uint32_t i = 0; i < peer->streams; i++) {
        if (peer->conns[i] != NULL) {
            kvx_tcp_conn_free(peer->conns[i]);
        }
    }
    while (peer->imports != NULL) {
        tcp_import *import = peer->imports;
        peer->imports = import->next;
        free(import);
    }
    pthread_mutex_destroy(&peer->lock);
    free(peer);
}

/* A connection greeted. */
void kvx_tcp_peer_open(tcp_conn *conn) {
    tcp_peer *peer = conn->peer;
    pthread_mutex_lock(&peer->lock);
    peer->open++;
    memcpy(peer->peer->engine_id, conn->rx.hello.engine_id, KVX_ID_BYTES);
    pthread_mutex_unlock(&peer->lock);
    kvx_tcp_kick_peer(peer);
}

static void tcp_peer_wake_all(tcp_peer *peer) {
    for (uint32_t i = 0; i < peer->streams; i++) {
        kvx_tcp_kick(peer->conns[i]);
    }
}

void kvx_tcp_peer_fail(tcp_peer *peer, int status, int sys_errno) {
    pthread_mutex_lock(&peer->lock);
    if (peer->status == KVX_OK) {
        peer->status = status == KVX_OK ? KVX_E_PEER_LOST : status;
        peer->sys_errno = sys_errno;
        tcp_peer_wake_all(peer); /* the others end themselves */
    }
    pthread_mutex_unlock(&peer->lock);
}

bool kvx_tcp_peer_over(tcp_conn *conn) {
    tcp_peer *peer = conn->peer;
    pthread_mutex_lock(&peer->lock);
    bool closing = peer->closing, clean = conn->request_count == 0 && conn->state == TCP_OPEN;
    int status = peer->status, sys_errno = peer->sys_errno;
    pthread_mutex_unlock(&peer->lock);
    if (!closing && status == KVX_OK) {
        return false;
    }
    if (closing && clean) {
        pthread_mutex_lock(&conn->tx_lock);
        clean = !conn->tx.active;
        if (clean) {
            kvx_tcp_send_bye(conn);
        }
        pthread_mutex_unlock(&conn->tx_lock);
    }
    kvx_tcp_conn_end(conn, status == KVX_OK ? KVX_E_PEER_LOST : status, sys_errno, !(closing && clean));
    return true;
}

void kvx_tcp_peer_conn_gone(tcp_conn *conn) {
    tcp_peer *peer = conn->peer;
    pthread_mutex_lock(&peer->lock);
    peer->conns_left--;
    bool last = peer->conns_left == 0;
    if (last) {
        kvx_tcp_kick_peer(peer); /* under the lock: the home thread frees the peer only after taking it */
    }
    pthread_mutex_unlock(&peer->lock);
}

/* On the home thread: tell the core what became of the peer. */
void kvx_tcp_peer_todo(tcp_peer *peer) {
    tcp_transport *tcp = peer->tcp;
    pthread_mutex_lock(&peer->lock);
    bool up = peer->open == peer->streams && !peer->connected && !peer->reported && peer->status == KVX_OK;
    bool down = peer->conns_left == 0 && !peer->reported;
    bool was_connected = peer->connected;
    int status = peer->status, sys_errno = peer->sys_errno;
    peer->connected |= up;
    peer->reported |= down;
    pthread_mutex_unlock(&peer->lock);
    if (up) {
        kvx_connect_done(peer->peer, KVX_OK, 0);
    }
    if (down) {
        kvx_tcp_xfer_sweep(peer, KVX_E_PEER_LOST);
        if (was_connected) {
            kvx_peer_lost(peer->peer, status);
        } else {
            kvx_connect_done(peer->peer, status, sys_errno);
        }
    }
    pthread_mutex_lock(&peer->lock);
    bool closed = peer->closing && peer->reported && peer->conns_left == 0;
    pthread_mutex_unlock(&peer->lock);
    if (!closed) {
        return;
    }
    pthread_mutex_lock(&tcp->lock);
    KVX_LIST_REMOVE(tcp->peers, peer);
    pthread_mutex_unlock(&tcp->lock);
    kvx_tcp_unkick_peer(peer);
    kvx_peer_closed(peer->peer);
    kvx_tcp_peer_free(peer);
}

static void tcp_peer_control_push(tcp_conn *conn, tcp_control *control) {
    control->next = NULL;
    KVX_QUEUE_APPEND(conn->control_first, conn->control_last, control, next);
    kvx_tcp_kick(conn);
}

static tcp_control *tcp_peer_control_new(uint8_t type, kvx_import *import) {
    tcp_control *control = kvx_vault_take(sizeof *control);
    if (control == NULL) {
        return NULL;
    }
    control->type = type;
    control->import = type == KVX_FRAME_ATTACH ? import : NULL;
    control->grant = import->remote.grant;
    control->generation = import->remote.generation;
    control->length = import->remote.length;
    control->access = import->remote.access;
    memcpy(control->key, import->remote.key, KVX_KEY_BYTES);
    return control;
}

int kvx_tcp_import(void *transport, kvx_import *import) {
    (void)transport;
    tcp_peer *peer = import->peer->transport_data;
    tcp_control *controls[KVX_STREAM_STREAMS_MAX] = {NULL};
    const uint32_t streams = peer->streams;
    tcp_import *state = calloc(1, sizeof *state);
    int status = state == NULL ? KVX_E_NOMEM : KVX_PENDING;
    for (uint32_t i = 0; i < streams && status == KVX_PENDING; i++) {
        if ((controls[i] = tcp_peer_control_new(KVX_FRAME_ATTACH, import)) == NULL) {
            status = KVX_E_NOMEM;
        }
    }
    pthread_mutex_lock(&peer->lock);
    if (status == KVX_PENDING && peer->status != KVX_OK) {
        status = KVX_E_PEER_LOST;
    }
    if (status == KVX_PENDING) {
        state->pending = streams;
        KVX_LIST_PUSH(peer->imports, state);
        import->transport_data = state;
        for (uint32_t i = 0; i < streams; i++) {
            tcp_peer_control_push(peer->conns[i], controls[i]);
        }
    }
    pthread_mutex_unlock(&peer->lock);
    if (status != KVX_PENDING) {
        for (uint32_t i = 0; i < streams; i++) {
            kvx_vault_give(controls[i]);
        }
        free(state);
    }
    return status;
}

/* One stream's answer to ATTACH; peer->lock is not held. */
void kvx_tcp_import_settle(const tcp_conn *conn, kvx_import *import, int status, int sys_errno) {
    tcp_peer *peer = import->peer->transport_data;
    tcp_import *state = import->transport_data;
    pthread_mutex_lock(&peer->lock);
    if (state->status == KVX_OK) {
        state->status = status;
    }
    state->attached |= conn->stream == 0 && status == KVX_OK;
    bool last = --state->pending == 0;
    status = state->status;
    pthread_mutex_unlock(&peer->lock);
    if (last) {
        kvx_import_done(import, status, sys_errno);
    }
}

static int tcp_peer_import_close(tcp_peer *peer, kvx_import *import) {
    tcp_import *state = import->transport_data;
    if (state == NULL) {
        return KVX_OK;
    }
    tcp_control *controls[KVX_STREAM_STREAMS_MAX] = {NULL};
    const uint32_t streams = state->attached ? peer->streams : 0;
    for (uint32_t i = 0; i < streams; i++) {
        controls[i] =
            tcp_peer_control_new(KVX_FRAME_DETACH, import); /* without memory it is told by the connection's end */
    }
    pthread_mutex_lock(&peer->lock);
    for (uint32_t i = 0; i < streams && peer->status == KVX_OK; i++) {
        if (controls[i] != NULL) {
            tcp_peer_control_push(peer->conns[i], controls[i]);
            controls[i] = NULL;
        }
    }
    KVX_LIST_REMOVE(peer->imports, state);
    pthread_mutex_unlock(&peer->lock);
    for (uint32_t i = 0; i < streams; i++) {
        kvx_vault_give(controls[i]);
    }
    import->transport_data = NULL;
    free(state);
    return KVX_OK;
}

int kvx_tcp_peer_close(void *transport, kvx_peer *kvx, kvx_import *import) {
    (void)transport;
    tcp_peer *peer = kvx->transport_data;
    if (import != NULL) {
        return tcp_peer_import_close(peer, import);
    }
    kvx_tcp_disown(peer); /* from here on the home thread may free it */
    pthread_mutex_lock(&peer->lock);
    peer->closing = true;
    tcp_peer_wake_all(peer);
    kvx_tcp_kick_peer(peer);
    pthread_mutex_unlock(&peer->lock);
    return KVX_OK;
}

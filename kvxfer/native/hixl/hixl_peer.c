/* hixl_peer.c: the side that moves the bytes, as far as its side link goes: connections to owners, and what they let us
 * use. What a user asks for is noted under the lock; the side thread does what follows from it in kvx_hixl_peer_todo.
 *
 * A lost connection is closed only when nothing of ours moves any more: its end is what tells the owner. */
#include "hixl/hixl.h"
#include "list.h"
#include "core/vault.h"
#include "core/forks.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

void kvx_hixl_todo(hixl_peer *peer) {
    hixl_transport *hixl = peer->hixl;
    if (!peer->todo_queued) {
        peer->todo_queued = true;
        peer->todo_next = hixl->todo;
        hixl->todo = peer;
        kvx_core_wake(hixl->core, hixl->slot, 0);
    }
}

/* -- connecting --------------------------------------------------------------------------------------------------- */

int kvx_hixl_peer_connect(void *transport, kvx_peer *kvx) {
    hixl_transport *hixl = transport;
    hixl_peer *peer = calloc(1, sizeof *peer);
    if (peer == NULL) {
        return KVX_E_NOMEM;
    }
    if (kvx_address_parse(kvx->endpoint, &peer->address, &peer->address_length) != KVX_OK) {
        peer->address_length = 0; /* said when it is dialled */
    }
    peer->hixl = hixl;
    peer->peer = kvx;
    kvx->transport_data = peer;
    pthread_mutex_lock(&hixl->lock);
    KVX_LIST_PUSH(hixl->peers, peer);
    kvx_hixl_todo(peer);
    pthread_mutex_unlock(&hixl->lock);
    return KVX_PENDING;
}

static void hixl_peer_connect_end(hixl_peer *peer, int status, int sys_errno) {
    peer->told = true;
    peer->connected = status == KVX_OK;
    kvx_connect_done(peer->peer, status, sys_errno);
}

static void hixl_peer_dial(hixl_peer *peer) {
    hixl_transport *hixl = peer->hixl;
    if (peer->address_length == 0) {
        hixl_peer_connect_end(peer, KVX_E_UNREACHABLE, EINVAL);
        return;
    }
    bool inside = kvx_hixl_inside(&peer->address); /* before: whoever comes to listen there later is somebody else */
    int fd = kvx_owned(socket(peer->address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    int error = fd < 0 ? errno : 0;
    hixl_conn *conn = fd < 0 ? NULL : kvx_hixl_conn_new(hixl, KVX_STREAM_SIDE_DIALLER, fd);
    if (conn != NULL && connect(fd, (const struct sockaddr *)&peer->address, peer->address_length) != 0 &&
        errno != EINPROGRESS) {
        error = errno;
    }
    if (conn != NULL && error == 0 && !kvx_hixl_conn_watch(conn, true)) {
        error = ENOMEM;
    }
    if (conn == NULL || error != 0) {
        if (conn != NULL) {
            kvx_hixl_conn_free(conn);
        }
        if (fd >= 0) {
            close(fd);
        }
        bool local = error == EMFILE || error == ENFILE;
        hixl_peer_connect_end(peer,
                              local                           ? KVX_E_FDS
                              : error == 0 || error == ENOMEM ? KVX_E_NOMEM
                                                              : KVX_E_UNREACHABLE,
                              error);
        return;
    }
    conn->peer = peer;
    conn->inside = inside;
    conn->deadline_ms = kvx_now_ms() + hixl->config->connect_ms;
    kvx_hixl_deadline(hixl, conn->deadline_ms);
    pthread_mutex_lock(&hixl->lock);
    peer->conn = conn;
    pthread_mutex_unlock(&hixl->lock);
}

void kvx_hixl_peer_open(hixl_conn *conn) {
    hixl_peer_connect_end(conn->peer, KVX_OK, 0);
}

/* -- losing ------------------------------------------------------------------------------------------------------- */

/* With the lock held: the op that waits for the answer to its NOTIFY, taken out. `cancelled`: only if it is to end. */
static hixl_xfer *hixl_peer_notify_pop(hixl_peer *peer, bool cancelled) {
    for (uint32_t i = 0; i < peer->awaiting.capacity; i++) {
        hixl_xfer *xfer = peer->awaiting.keys[i] != 0 ? peer->awaiting.values[i] : NULL;
        if (xfer != NULL && (!cancelled || atomic_load_explicit(&xfer->op->cancelled, memory_order_relaxed))) {
            kvx_table_remove(&peer->awaiting, xfer->number);
            return xfer;
        }
    }
    return NULL;
}

static void hixl_peer_notify_complete(hixl_peer *peer, bool cancelled, int status) {
    hixl_transport *hixl = peer->hixl;
    for (;;) {
        pthread_mutex_lock(&hixl->lock);
        hixl_xfer *xfer = hixl_peer_notify_pop(peer, cancelled);
        pthread_mutex_unlock(&hixl->lock);
        if (xfer == NULL) {
            return;
        }
        kvx_hixl_xfer_complete(xfer, status);
    }
}

void kvx_hixl_peer_end(hixl_conn *conn, int status, int sys_errno) {
    hixl_peer *peer = conn->peer;
    hixl_transport *hixl = conn->hixl;
    if (conn->state == HIXL_DEAD) {
        return;
    }
    pthread_mutex_lock(&hixl->lock);
    kvx_hixl_conn_become(conn, HIXL_DEAD);
    conn->deadline_ms = 0;
    peer->lost = true;
    peer->status = status;
    peer->sys_errno = sys_errno;
    /* the socket stays open for now, but nothing is heard from it any more */
    struct epoll_event none = {0};
    (void)epoll_ctl(hixl->epoll_fd, EPOLL_CTL_DEL, conn->fd, &none);
    kvx_hixl_todo(peer);
    kvx_hixl_devices_wake(hixl);
    pthread_mutex_unlock(&hixl->lock);
}

/* With the lock held: nothing of this peer moves, and nobody waits. */
static bool hixl_peer_is_quiet(const hixl_peer *peer) {
    return peer->ops == 0;
}

static void hixl_peer_conn_drop(hixl_peer *peer, bool bye) {
    hixl_transport *hixl = peer->hixl;
    pthread_mutex_lock(&hixl->lock);
    hixl_conn *conn = peer->conn;
    peer->conn = NULL;
    if (conn != NULL) {
        if (bye && conn->state == HIXL_OPEN) {
            kvx_frame frame = {.type = KVX_FRAME_BYE};
            kvx_hixl_send(conn, &frame, NULL, NULL);
        }
        if (conn->state != HIXL_DEAD) {
            kvx_hixl_conn_become(conn, HIXL_DEAD);
        }
        kvx_hixl_conn_close(conn);
        conn->grave_next = hixl->graveyard;
        hixl->graveyard = conn;
    }
    pthread_mutex_unlock(&hixl->lock);
}

static void hixl_peer_unlink_links(hixl_peer *peer) {
    for (uint32_t i = 0; i < peer->link_count; i++) {
        hixl_link *link = peer->links[i];
        link->users--;
        if (link->ping_peer == peer) {
            link->ping_peer = NULL;
        }
    }
    if (peer->link_count != 0) {
        kvx_hixl_devices_wake(peer->hixl);
    }
    peer->link_count = 0;
}

bool kvx_hixl_link_use(hixl_peer *peer, hixl_link *link) {
    for (uint32_t i = 0; i < peer->link_count; i++) {
        if (peer->links[i] == link) {
            return true;
        }
    }
    if (peer->link_count == peer->link_room) {
        uint32_t room = peer->link_room == 0 ? 4 : peer->link_room * 2;
        hixl_link **wider = realloc(peer->links, room * sizeof(hixl_link *));
        if (wider == NULL) {
            return false;
        }
        peer->links = wider;
        peer->link_room = room;
    }
    peer->links[peer->link_count++] = link;
    peer->copy_links += link->copier == peer;
    link->users++;
    return true;
}

static void hixl_peer_free(hixl_peer *peer) {
    while (peer->imports != NULL) {
        hixl_import *import = peer->imports;
        peer->imports = import->next;
        kvx_vault_give(import);
    }
    kvx_table_free(&peer->by_handle);
    kvx_table_free(&peer->awaiting);
    free(peer->links);
    free(peer);
}

static void hixl_peer_unlink(hixl_peer *peer) {
    hixl_transport *hixl = peer->hixl;
    KVX_LIST_REMOVE(hixl->peers, peer);
}

void kvx_hixl_peer_todo(hixl_peer *peer) {
    hixl_transport *hixl = peer->hixl;
    pthread_mutex_lock(&hixl->lock);
    bool dials = !peer->told && peer->conn == NULL && !peer->closing;
    bool ends = peer->lost || peer->closing;
    pthread_mutex_unlock(&hixl->lock);
    if (dials) {
        hixl_peer_dial(peer);
        return;
    }
    if (!ends) {
        return;
    }
    hixl_peer_notify_complete(peer, false, KVX_E_PEER_LOST);
    pthread_mutex_lock(&hixl->lock);
    bool ended = hixl_peer_is_quiet(peer);
    bool closing = peer->closing;
    bool loses = ended && peer->lost && !peer->lost_told;
    peer->lost_told |= loses;
    if (ended) {
        hixl_peer_unlink_links(peer);
    }
    bool mapped = peer->copy_links != 0;
    pthread_mutex_unlock(&hixl->lock);
    if (!ended) {
        return; /* the last op that completes calls again */
    }
    if (!mapped) {
        hixl_peer_conn_drop(peer, closing);
    }
    if (loses) {
        if (peer->connected) {
            kvx_peer_lost(peer->peer, peer->status);
        } else if (!peer->told) {
            hixl_peer_connect_end(peer, peer->status, peer->sys_errno);
        }
    }
    if (mapped) {
        return; /* its last link by copy calls again */
    }
    pthread_mutex_lock(&hixl->lock);
    closing = peer->closing;
    if (closing) {
        hixl_peer_unlink(peer);
        for (hixl_peer **at = &hixl->todo; *at != NULL; at = &(*at)->todo_next) {
            if (*at == peer) { /* told twice */
                *at = peer->todo_next;
                break;
            }
        }
    }
    pthread_mutex_unlock(&hixl->lock);
    if (closing) {
        kvx_peer_closed(peer->peer);
        hixl_peer_free(peer);
    }
}

void kvx_hixl_peers_woken(hixl_transport *hixl) {
    pthread_mutex_lock(&hixl->lock);
    hixl_peer *peer = hixl->peers; /* others are put before it; only we take any out */
    pthread_mutex_unlock(&hixl->lock);
    for (; peer != NULL; peer = peer->next) {
        hixl_peer_notify_complete(peer, true, KVX_E_CANCELLED);
    }
}

/* -- imports ------------------------------------------------------------------------------------------------------ */

int kvx_hixl_mem_import(void *transport, kvx_import *kvx) {
    hixl_transport *hixl = transport;
    hixl_peer *peer = kvx->peer->transport_data;
    hixl_import *import = kvx_vault_take(sizeof *import);
    if (import == NULL) {
        return KVX_E_NOMEM;
    }
    import->import = kvx;
    import->peer = peer;
    import->pending = true;
    memcpy(import->key, kvx->remote.key, sizeof import->key);
    pthread_mutex_lock(&hixl->lock);
    int status = peer->lost || peer->closing || peer->conn == NULL ? KVX_E_PEER_LOST
                 : !kvx_table_reserve(&peer->by_handle, 1)         ? KVX_E_NOMEM
                                                                   : KVX_PENDING;
    if (status == KVX_PENDING) {
        import->handle = ++peer->next_number;
        kvx->transport_data = import;
        KVX_LIST_PUSH(peer->imports, import);
        kvx_table_put(&peer->by_handle, import->handle, import);
        kvx_frame frame = {.type = KVX_FRAME_ATTACH,
                           .op = import->handle,
                           .segments = 1,
                           .segment = hixl->pid,
                           .grant = kvx->remote.grant,
                           .generation = kvx->remote.generation,
                           .tag = kvx->remote.access,
                           .value = kvx->remote.length};
        kvx_hixl_send(peer->conn, &frame, import->key, hixl->boot_id);
    }
    pthread_mutex_unlock(&hixl->lock);
    if (status != KVX_PENDING) {
        kvx_vault_give(import);
    }
    return status;
}

static void hixl_peer_send_import(hixl_import *import, uint8_t type) {
    kvx_frame frame = {.type = type, .op = import->handle};
    kvx_hixl_send(import->peer->conn, &frame, import->key, NULL);
    import->attached = false;
}

/* With the lock held: was it asked for, and does nothing of ours use it any more? */
static void hixl_peer_import_check_detach(hixl_import *import) {
    if (import->asked_back && import->users == 0 && import->view == HIXL_UNSEEN && import->attached) {
        hixl_peer_send_import(import, KVX_FRAME_QUIET);
    }
}

void kvx_hixl_import_leave(hixl_import *import) {
    import->users--;
    hixl_peer_import_check_detach(import);
}

/* With the lock held: a number that we gave to something? What it was given to may be over by now. */
static bool hixl_peer_number_is_known(const hixl_peer *peer, uint64_t number) {
    return number > 0 && number <= peer->next_number;
}

static bool hixl_peer_on_location(hixl_conn *conn) {
    hixl_peer *peer = conn->peer;
    hixl_transport *hixl = conn->hixl;
    pthread_mutex_lock(&hixl->lock);
    hixl_import *import = kvx_table_get(&peer->by_handle, conn->rx.frame.op);
    bool over = import == NULL && hixl_peer_number_is_known(peer, conn->rx.frame.op);
    bool good = import != NULL && import->pending && kvx_hixl_authentic(conn, import->key);
    if (good) {
        import->pending = false;
        import->attached = true;
        bool sound = kvx_hixl_location_decode(&import->location, kvx_rx_units(&conn->rx), conn->rx.frame.segments) &&
                     import->location.length >= import->import->remote.length;
        import->heard = ++hixl->locations;
        if (!conn->inside) { /* addresses of ours are not for others to name */
            import->location.process = 0;
        }
        if (!sound) {
            hixl_peer_send_import(import, KVX_FRAME_DETACH);
        }
        if (sound && import->import->remote.flags & KVX_REMOTE_MAP) {
            kvx_hixl_view_begin(import);
        } else {
            kvx_import_done(import->import, sound ? KVX_OK : KVX_E_VERSION, 0);
        }
    }
    pthread_mutex_unlock(&hixl->lock);
    return good || over;
}

static bool hixl_peer_on_revoke(hixl_conn *conn) {
    hixl_peer *peer = conn->peer;
    hixl_transport *hixl = conn->hixl;
    pthread_mutex_lock(&hixl->lock);
    hixl_import *import = kvx_table_get(&peer->by_handle, conn->rx.frame.op);
    bool known = import != NULL && import->attached; /* otherwise our DETACH is on its way */
    bool good = known            ? kvx_hixl_authentic(conn, import->key)
                : import != NULL ? !import->pending
                                 : hixl_peer_number_is_known(peer, conn->rx.frame.op);
    if (known && good) {
        import->asked_back = true;
        import->shut = import->shut == KVX_OK ? KVX_E_REVOKED : import->shut;
        if (import->import != NULL) {
            atomic_store(&import->import->revoked, true);
        }
        hixl_peer_import_check_detach(import);
        if (import->users != 0) {
            kvx_hixl_devices_wake(hixl);
        }
    }
    pthread_mutex_unlock(&hixl->lock);
    return good;
}

void kvx_hixl_import_end(hixl_import *import) {
    hixl_peer *peer = import->peer;
    if (import->attached) {
        hixl_peer_send_import(import, KVX_FRAME_DETACH);
    }
    kvx_table_remove(&peer->by_handle, import->handle);
    KVX_LIST_REMOVE(peer->imports, import);
    kvx_vault_give(import);
}

static int hixl_peer_import_close(hixl_peer *peer, hixl_import *import) {
    hixl_transport *hixl = peer->hixl;
    pthread_mutex_lock(&hixl->lock);
    KVX_ASSERT(import->users == 0 && import->view != HIXL_TO_MAP);
    import->import = NULL;
    kvx_table_remove(&peer->by_handle, import->handle);
    if (import->view == HIXL_UNSEEN) {
        kvx_hixl_import_end(import);
    } else {
        kvx_hixl_view_end(import); /* and then the same */
    }
    pthread_mutex_unlock(&hixl->lock);
    return KVX_OK;
}

int kvx_hixl_peer_close(void *transport, kvx_peer *kvx, kvx_import *import) {
    hixl_transport *hixl = transport;
    hixl_peer *peer = kvx->transport_data;
    if (import != NULL) {
        hixl_import *mine = import->transport_data;
        import->transport_data = NULL;
        return mine == NULL ? KVX_OK : hixl_peer_import_close(peer, mine);
    }
    pthread_mutex_lock(&hixl->lock);
    peer->closing = true;
    for (hixl_import *seen = peer->imports; seen != NULL; seen = seen->next) {
        if (seen->view == HIXL_SEEN) {
            seen->import = NULL;
            kvx_hixl_view_end(seen);
        }
    }
    kvx_hixl_todo(peer);
    kvx_hixl_devices_wake(hixl);
    pthread_mutex_unlock(&hixl->lock);
    return KVX_OK;
}

/* -- notifications ------------------------------------------------------------------------------------------------ */

void kvx_hixl_notify(hixl_xfer *xfer) {
    hixl_peer *peer = xfer->peer;
    const kvx_op *op = xfer->op;
    kvx_frame frame = {.type = KVX_FRAME_NOTIFY,
                       .op = xfer->number = ++peer->next_number,
                       .grant = op->import->remote.grant,
                       .generation = op->import->remote.generation,
                       .tag = op->tag,
                       .value = op->value};
    kvx_table_put(&peer->awaiting, xfer->number, xfer); /* room was made when the op was accepted */
    kvx_hixl_send(peer->conn, &frame, op->import->remote.key, NULL);
}

static bool hixl_peer_on_ack(hixl_conn *conn) {
    hixl_peer *peer = conn->peer;
    hixl_transport *hixl = conn->hixl;
    const kvx_frame *frame = &conn->rx.frame;
    bool bare = frame->flags & KVX_FRAME_F_BARE;
    int status = frame->status;
    pthread_mutex_lock(&hixl->lock);
    bool good = hixl_peer_number_is_known(peer, frame->op);
    hixl_import *import = kvx_table_get(&peer->by_handle, frame->op);
    hixl_xfer *xfer = kvx_table_get(&peer->awaiting, frame->op);
    if (import != NULL) {
        good = import->pending && status != KVX_OK;
        if (good) { /* who answers without the key is told to have refused it */
            status = bare || kvx_hixl_authentic(conn, import->key) ? status : KVX_E_KEY;
            import->pending = false;
            kvx_import_done(import->import, status, 0);
        }
    } else if (xfer != NULL) { /* without the key it can only be that the grant is gone, and no more is believed */
        good = bare ? status != KVX_E_KEY : kvx_hixl_authentic(conn, xfer->op->import->remote.key);
        status = bare ? KVX_E_UNKNOWN : status;
        if (good) {
            kvx_table_remove(&peer->awaiting, frame->op);
        }
    }
    pthread_mutex_unlock(&hixl->lock);
    if (good && import == NULL && xfer != NULL) {
        kvx_hixl_xfer_complete(xfer, status);
    }
    return good;
}

/* With the lock held: an import whose key both sides have, for the owner to prove an answer with; 0 = there is none. */
uint64_t kvx_hixl_peer_witness(const hixl_peer *peer) {
    const hixl_import *import = peer->imports;
    while (import != NULL && !import->attached) {
        import = import->next;
    }
    return import == NULL ? 0 : import->handle;
}

static bool hixl_peer_on_pong(hixl_conn *conn) {
    hixl_peer *peer = conn->peer;
    hixl_transport *hixl = conn->hixl;
    const kvx_frame *frame = &conn->rx.frame;
    pthread_mutex_lock(&hixl->lock);
    const hixl_import *witness = kvx_table_get(&peer->by_handle, frame->tag);
    bool proved = witness != NULL && kvx_hixl_authentic(conn, witness->key);
    bool good = frame->op == peer->pongs + 1 && peer->pongs < peer->pings && (proved || witness == NULL);
    if (good) { /* what is not proved may fail us, but not say how */
        peer->pongs++;
        peer->pong_status = frame->status == KVX_OK || proved ? frame->status : KVX_E_LINK;
        kvx_hixl_devices_wake(hixl);
    }
    pthread_mutex_unlock(&hixl->lock);
    return good;
}

bool kvx_hixl_peer_frame(hixl_conn *conn) {
    switch (conn->rx.frame.type) {
    case KVX_FRAME_LOCATION:
        return hixl_peer_on_location(conn);
    case KVX_FRAME_ACK:
        return hixl_peer_on_ack(conn);
    case KVX_FRAME_REVOKE:
        return hixl_peer_on_revoke(conn);
    case KVX_FRAME_PONG:
        return hixl_peer_on_pong(conn);
    case KVX_FRAME_BYE:
        kvx_hixl_peer_end(conn, KVX_E_PEER_LOST, 0);
        return true;
    default:
        return false;
    }
}

/* -- close: the progress threads are gone, and every op has completed ---------------------------------------------- */

void kvx_hixl_peers_close(hixl_transport *hixl) {
    while (hixl->peers != NULL) {
        hixl_peer *peer = hixl->peers;
        hixl_peer_notify_complete(peer, false, KVX_E_CLOSED);
        if (hixl->stuck && peer->conn != NULL) {
            peer->conn->fd = -1; /* left open: its end would tell the owner that nothing of ours moves any more */
        }
        hixl_peer_conn_drop(peer, true);
        hixl_peer_unlink(peer);
        KVX_ASSERT(hixl->peers != peer);
        hixl_peer_free(peer);
    }
    hixl->todo = NULL;
}

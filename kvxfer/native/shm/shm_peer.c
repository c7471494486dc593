/* shm_peer.c: the side that moves the bytes. What a user asks for is noted under the lock; the progress thread does
 * what follows from it, in kvx_shm_peer_todo, whenever something has changed. */
#define _GNU_SOURCE
#include "shm/shm.h"
#include "list.h"
#include "core/forks.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

void kvx_shm_todo(shm_peer *peer) {
    shm_transport *shm = peer->shm;
    if (!peer->todo_queued) {
        peer->todo_queued = true;
        peer->todo_next = shm->todo;
        shm->todo = peer;
        kvx_core_wake(shm->core, shm->slot, 0);
    }
}

/* -- connecting --------------------------------------------------------------------------------------------------- */

/* "<boot id>:<path>" */
static void shm_peer_endpoint_take(shm_peer *peer, const char *endpoint) {
    const shm_transport *shm = peer->shm;
    const char *colon = strchr(endpoint, ':');
    const struct sockaddr_un *limit = NULL;
    if (colon == NULL || colon - endpoint != 32 || colon[1] != '/' || strlen(colon + 1) >= sizeof(limit->sun_path)) {
        peer->malformed = true;
        return;
    }
    peer->other_host = memcmp(endpoint, shm->boot_id, 32) != 0;
    strcpy(peer->path, colon + 1);
}

int kvx_shm_peer_connect(void *transport, kvx_peer *kvx) {
    shm_transport *shm = transport;
    shm_peer *peer = calloc(1, sizeof(*peer));
    if (peer == NULL) {
        return KVX_E_NOMEM;
    }
    peer->shm = shm;
    peer->peer = kvx;
    shm_peer_endpoint_take(peer, kvx->endpoint);
    kvx->transport_data = peer;
    pthread_mutex_lock(&shm->lock);
    KVX_LIST_PUSH(shm->peers, peer);
    kvx_shm_todo(peer);
    pthread_mutex_unlock(&shm->lock);
    return KVX_PENDING;
}

static void shm_peer_connect_end(shm_peer *peer, int status, int sys_errno) {
    peer->told = true;
    peer->connected = status == KVX_OK;
    peer->deadline_ms = 0;
    kvx_connect_done(peer->peer, status, sys_errno);
}

static int shm_peer_connect_status(int error) {
    return error == EMFILE || error == ENFILE ? KVX_E_FDS : error == ENOMEM ? KVX_E_NOMEM : KVX_E_UNREACHABLE;
}

static void shm_peer_connect_once(shm_peer *peer) {
    shm_transport *shm = peer->shm;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strcpy(address.sun_path, peer->path);
    int fd = kvx_owned(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (fd < 0 || connect(fd, (const struct sockaddr *)&address, sizeof(address)) != 0) {
        int error = errno;
        if (fd >= 0) {
            close(fd);
        }
        if (error == EAGAIN || error == EINTR) { /* its queue of new connections is full */
            peer->retry_ms = kvx_now_ms() + SHM_RETRY_MS;
            kvx_shm_deadline(shm, peer->retry_ms);
        } else {
            shm_peer_connect_end(peer, shm_peer_connect_status(error), error);
        }
        return;
    }
    peer->retry_ms = 0;
    if (!kvx_shm_trusted(fd, &peer->pid)) {
        close(fd);
        shm_peer_connect_end(peer, KVX_E_REFUSED, EPERM);
        return;
    }
    shm_conn *conn = kvx_shm_conn_new(shm, fd, peer->pid, peer);
    if (conn == NULL || !kvx_shm_conn_watch(conn)) {
        if (conn != NULL) {
            kvx_shm_conn_free(conn);
        } else {
            close(fd);
        }
        shm_peer_connect_end(peer, KVX_E_NOMEM, 0);
        return;
    }
    pthread_mutex_lock(&shm->lock);
    peer->conn = conn;
    pthread_mutex_unlock(&shm->lock);
    kvx_shm_hello(conn, KVX_OK);
}

static void shm_peer_connect_begin(shm_peer *peer) {
    if (peer->malformed) {
        shm_peer_connect_end(peer, KVX_E_UNREACHABLE, EINVAL);
    } else if (peer->other_host) {
        shm_peer_connect_end(peer, KVX_E_OTHER_HOST, 0);
    } else {
        peer->deadline_ms = kvx_now_ms() + peer->shm->config->connect_ms;
        kvx_shm_deadline(peer->shm, peer->deadline_ms);
        shm_peer_connect_once(peer);
    }
}

static bool shm_peer_on_hello(shm_peer *peer, shm_conn *conn, const shm_message *message) {
    if (message->status != KVX_OK) {
        int status = message->status == KVX_E_VERSION ? KVX_E_VERSION : KVX_E_REFUSED;
        kvx_shm_peer_end(conn, status, 0);
        return true;
    }
    memcpy(conn->nonce_theirs, message->hello.nonce, sizeof(conn->nonce_theirs));
    conn->state = SHM_OPEN;
    memcpy(peer->peer->engine_id, message->hello.engine_id, KVX_ID_BYTES);
    shm_peer_connect_end(peer, KVX_OK, 0);
    return true;
}

/* -- notifications ----------------------------------------------------------------------------------------------------
 */

void kvx_shm_notify(shm_import *import, kvx_op *op) {
    shm_peer *peer = import->peer;
    shm_transport *shm = peer->shm;
    shm_message message = {.type = SHM_NOTIFY,
                           .handle = import->handle,
                           .notify = {.token = op->token, .tag = op->tag, .value = op->value}};
    pthread_mutex_lock(&shm->lock);
    int status = peer->lost || peer->closing              ? KVX_E_PEER_LOST
                 : !kvx_table_reserve(&peer->awaiting, 1) ? KVX_E_NOMEM
                                                          : KVX_OK;
    if (status == KVX_OK) {
        kvx_table_put(&peer->awaiting, op->token, op);
        kvx_shm_send(peer->conn, &message, import->key, -1);
    }
    pthread_mutex_unlock(&shm->lock);
    if (status != KVX_OK) {
        kvx_op_complete(op, status, op->bytes, 0, -1);
    }
}

static bool shm_peer_on_notified(shm_peer *peer, shm_conn *conn, const shm_message *message) {
    shm_transport *shm = peer->shm;
    bool good = true;
    pthread_mutex_lock(&shm->lock);
    kvx_op *op = kvx_table_get(&peer->awaiting, message->notify.token);
    if (op != NULL) { /* otherwise it was cancelled */
        const shm_import *import = op->import->transport_data;
        good = import->handle == message->handle && kvx_shm_authentic(conn, message, import->key) &&
               (message->status == KVX_OK || message->status == KVX_E_REVOKED);
        if (good) {
            kvx_table_remove(&peer->awaiting, message->notify.token);
        }
    }
    pthread_mutex_unlock(&shm->lock);
    if (good && op != NULL) {
        kvx_op_complete(op, message->status, op->bytes, 0, -1);
    }
    return good;
}

/* Ends those that wait for NOTIFIED; all of them, or the cancelled ones. */
static void shm_peer_notify_complete(shm_peer *peer, bool all, int status) {
    shm_transport *shm = peer->shm;
    for (uint32_t i = 0;;) {
        kvx_op *op = NULL;
        pthread_mutex_lock(&shm->lock);
        for (; op == NULL && i < peer->awaiting.capacity; i++) {
            kvx_op *found = peer->awaiting.keys[i] != 0 ? peer->awaiting.values[i] : NULL;
            if (found != NULL && (all || atomic_load_explicit(&found->cancelled, memory_order_relaxed))) {
                op = found;
                kvx_table_remove(&peer->awaiting, op->token);
                i--; /* removal may have moved another one here */
            }
        }
        pthread_mutex_unlock(&shm->lock);
        if (op == NULL) {
            return;
        }
        kvx_op_complete(op, all ? status : KVX_E_CANCELLED, op->bytes, 0, -1);
    }
}

void kvx_shm_peer_cancelled(shm_peer *peer) {
    shm_peer_notify_complete(peer, false, KVX_E_CANCELLED);
}

static bool shm_peer_on_forget(shm_peer *peer, const shm_message *message) {
    pthread_mutex_lock(&peer->shm->lock);
    kvx_shm_maps_forget(peer, message->mapped.region);
    kvx_shm_todo(peer);
    pthread_mutex_unlock(&peer->shm->lock);
    return message->mapped.region != 0;
}

bool kvx_shm_peer_message(shm_conn *conn, const shm_message *message, int *fd_p) {
    shm_peer *peer = conn->peer;
    switch (message->type) {
    case SHM_HELLO:
        return shm_peer_on_hello(peer, conn, message);
    case SHM_IMPORTED:
        return kvx_shm_on_imported(peer, conn, message, fd_p);
    case SHM_REVOKE:
        return kvx_shm_on_revoke(peer, conn, message);
    case SHM_NOTIFIED:
        return shm_peer_on_notified(peer, conn, message);
    case SHM_FORGET:
        return shm_peer_on_forget(peer, message);
    case SHM_BYE:
        return true; /* the end follows */
    default:
        return false;
    }
}

/* -- ends -------------------------------------------------------------------------------------------------------------
 */

void kvx_shm_peer_end(shm_conn *conn, int status, int sys_errno) {
    shm_peer *peer = conn->peer;
    kvx_shm_conn_unwatch(conn); /* the socket stays open until nothing of ours is in use: its end tells them that */
    pthread_mutex_lock(&peer->shm->lock);
    peer->lost = true;
    kvx_shm_todo(peer);
    pthread_mutex_unlock(&peer->shm->lock);
    if (!peer->told) {
        shm_peer_connect_end(peer, status, sys_errno);
    }
}

static bool shm_peer_is_idle(const shm_peer *peer) {
    for (const shm_import *import = peer->imports; import != NULL; import = import->next) {
        if (!import->idle) {
            return false;
        }
    }
    return true;
}

static void shm_peer_conn_reap(shm_peer *peer) {
    shm_transport *shm = peer->shm;
    pthread_mutex_lock(&shm->lock);
    shm_conn *conn = peer->conn;
    peer->conn = NULL;
    pthread_mutex_unlock(&shm->lock);
    if (conn != NULL) {
        kvx_shm_conn_close(conn);
        conn->grave_next = shm->graveyard;
        shm->graveyard = conn;
    }
}

static void shm_peer_forget(shm_peer *peer) {
    shm_transport *shm = peer->shm;
    pthread_mutex_lock(&shm->lock);
    KVX_LIST_REMOVE(shm->peers, peer);
    for (shm_peer **at = &shm->todo; *at != NULL;) {
        if (*at == peer) {
            *at = peer->todo_next;
        } else {
            at = &(*at)->todo_next;
        }
    }
    pthread_mutex_unlock(&shm->lock);
    kvx_table_free(&peer->by_handle);
    kvx_table_free(&peer->awaiting);
    free(peer);
}

/* Lost: every token ends, then the socket, then its user is told. */
static void shm_peer_finish_lost(shm_peer *peer) {
    shm_transport *shm = peer->shm;
    pthread_mutex_lock(&shm->lock);
    bool tell = peer->connected && !peer->lost_told && !peer->closing;
    peer->lost_told = true;
    for (shm_import *import = tell ? peer->imports : NULL; import != NULL; import = import->next) {
        import->attached = false;
        kvx_shm_map_leave(import); /* its view stays: memory that is mapped outlives its owner */
        if (import->pending) {
            kvx_shm_import_end(import, KVX_E_PEER_LOST, 0);
        }
    }
    kvx_shm_maps_forget(peer, 0);
    kvx_shm_todo(peer);
    pthread_mutex_unlock(&shm->lock);
    shm_peer_conn_reap(peer);
    if (tell) {
        kvx_peer_lost(peer->peer, KVX_E_PEER_LOST);
    }
}

static void shm_peer_finish_close(shm_peer *peer) {
    shm_message bye = {.type = SHM_BYE};
    kvx_peer *kvx = peer->peer;
    if (peer->conn != NULL && !peer->lost) {
        kvx_shm_send(peer->conn, &bye, NULL, -1);
    }
    shm_peer_conn_reap(peer);
    shm_peer_forget(peer);
    kvx_peer_closed(kvx);
}

void kvx_shm_peer_todo(shm_peer *peer) {
    shm_transport *shm = peer->shm;
    pthread_mutex_lock(&shm->lock);
    bool ending = peer->lost || peer->closing;
    bool closing = peer->closing;
    for (shm_import *import = ending ? peer->imports : NULL; import != NULL; import = import->next) {
        kvx_shm_shut(import, KVX_E_PEER_LOST);
    }
    if (closing) {
        kvx_shm_maps_forget(peer, 0);
    }
    pthread_mutex_unlock(&shm->lock);
    if (!ending && !peer->told && peer->conn == NULL && peer->deadline_ms == 0) {
        shm_peer_connect_begin(peer);
    }
    if (ending) {
        shm_peer_notify_complete(peer, true, KVX_E_PEER_LOST);
    }
    kvx_shm_give_back_all(peer);
    if (!ending) {
        return;
    }
    pthread_mutex_lock(&shm->lock);
    bool idle = shm_peer_is_idle(peer);
    bool empty = peer->imports == NULL && peer->maps == NULL;
    pthread_mutex_unlock(&shm->lock);
    if (closing && empty) {
        shm_peer_finish_close(peer);
    } else if (!closing && idle && !peer->lost_told) {
        shm_peer_finish_lost(peer);
    }
}

int kvx_shm_peer_close(void *transport, kvx_peer *kvx, kvx_import *let_go) {
    shm_transport *shm = transport;
    shm_peer *peer = kvx->transport_data;
    pthread_mutex_lock(&shm->lock);
    if (let_go != NULL) {
        shm_import *import = let_go->transport_data;
        kvx_shm_hide(import);
        import->import = NULL;
        kvx_shm_shut(import, KVX_E_NO_IMPORT);
    } else {
        peer->closing = true;
        for (shm_import *import = peer->imports; import != NULL; import = import->next) {
            kvx_shm_shut(import, KVX_E_PEER_LOST);
        }
    }
    kvx_shm_todo(peer);
    pthread_mutex_unlock(&shm->lock);
    return KVX_OK;
}

void kvx_shm_peer_deadline(shm_peer *peer, uint64_t now_ms) {
    if (peer->deadline_ms == 0) {
        return;
    }
    if (now_ms >= peer->deadline_ms) {
        pthread_mutex_lock(&peer->shm->lock);
        peer->lost = true;
        kvx_shm_todo(peer);
        pthread_mutex_unlock(&peer->shm->lock);
        if (peer->conn != NULL) {
            kvx_shm_conn_unwatch(peer->conn);
        }
        shm_peer_connect_end(peer, KVX_E_TIMEOUT, ETIMEDOUT);
    } else if (peer->retry_ms != 0 && now_ms >= peer->retry_ms) {
        shm_peer_connect_once(peer);
    }
    kvx_shm_deadline(peer->shm, peer->deadline_ms);
    kvx_shm_deadline(peer->shm, peer->retry_ms);
}

/* No thread is left but ours. */
void kvx_shm_peer_sweep(shm_peer *peer) {
    shm_message bye = {.type = SHM_BYE};
    shm_peer_notify_complete(peer, true, KVX_E_CLOSED);
    kvx_shm_imports_free(peer);
    if (peer->conn != NULL) {
        kvx_shm_send(peer->conn, &bye, NULL, -1);
        kvx_shm_conn_free(peer->conn);
        peer->conn = NULL;
    }
    shm_peer_forget(peer);
}

/* shm_import.c: grants of owners, from asking for them to giving them back. */
#define _GNU_SOURCE
#include "shm/shm.h"
#include "list.h"
#include "core/vault.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* -- users ----------------------------------------------------------------------------------------------------------
 */

bool kvx_shm_enter(shm_import *import) {
    if (atomic_fetch_add(&import->users, 1) & SHM_SHUT) {
        kvx_shm_leave(import);
        return false;
    }
    return true;
}

/* With the lock held. */
static void shm_import_check_idle(shm_import *import) {
    if (!import->idle) {
        import->idle = true;
        kvx_shm_todo(import->peer);
    }
}

void kvx_shm_leave(shm_import *import) {
    shm_transport *shm = import->peer->shm;
    if (atomic_fetch_sub(&import->users, 1) == (SHM_SHUT | 1)) {
        pthread_mutex_lock(&shm->lock);
        shm_import_check_idle(import);
        pthread_mutex_unlock(&shm->lock);
    }
}

void kvx_shm_shut(shm_import *import, int why) {
    if (atomic_load(&import->users) & SHM_SHUT) {
        return;
    }
    atomic_store(&import->why, why);
    if ((atomic_fetch_or(&import->users, SHM_SHUT) & ~SHM_SHUT) == 0) {
        shm_import_check_idle(import);
    }
}

/* -- asking ---------------------------------------------------------------------------------------------------------
 */

int kvx_shm_mem_import(void *transport, kvx_import *kvx) {
    shm_transport *shm = transport;
    shm_peer *peer = kvx->peer->transport_data;
    shm_import *import = kvx_vault_take(sizeof(*import));
    if (import == NULL) {
        return KVX_E_NOMEM;
    }
    import->import = kvx;
    import->peer = peer;
    import->handle = kvx->id;
    import->length = kvx->remote.length;
    import->pending = true;
    memcpy(import->key, kvx->remote.key, sizeof(import->key));
    shm_message message = {
        .type = SHM_IMPORT,
        .handle = import->handle,
        .import = {.grant = kvx->remote.grant,
                   .generation = kvx->remote.generation,
                   .length = kvx->remote.length,
                   .access = kvx->remote.access},
    };
    pthread_mutex_lock(&shm->lock);
    int status = peer->lost || peer->closing ? KVX_E_PEER_LOST : KVX_PENDING;
    if (status == KVX_PENDING && !kvx_table_reserve(&peer->by_handle, 1)) {
        status = KVX_E_NOMEM;
    }
    if (status == KVX_PENDING) {
        kvx_table_put(&peer->by_handle, import->handle, import);
        KVX_LIST_PUSH(peer->imports, import);
        kvx->transport_data = import;
        kvx_shm_send(peer->conn, &message, import->key, -1);
    }
    pthread_mutex_unlock(&shm->lock);
    if (status != KVX_PENDING) {
        kvx_vault_give(import);
    }
    return status;
}

/* With the lock held. */
void kvx_shm_import_end(shm_import *import, int status, int sys_errno) {
    import->pending = false;
    if (status != KVX_OK) {
        kvx_shm_shut(import, status);
    }
    kvx_import_done(import->import, status, sys_errno);
}

/* Only this thread ends a pending import, so the lock is not needed to keep it. */
static int shm_import_map(shm_import *import, const shm_message *message, int fd, int *errno_p) {
    *errno_p = 0;
    if (fd == SHM_FD_MISSED) {
        *errno_p = EMFILE;
        return KVX_E_FDS;
    }
    if (message->how == SHM_BY_MAPPING) {
        return kvx_shm_map(import, message, fd, errno_p);
    }
    uint64_t end;
    if (__builtin_add_overflow(message->attached.at, import->length, &end)) {
        return KVX_E_NOT_KVXFER;
    }
    import->remote = (uint8_t *)(uintptr_t)message->attached.at;
    return kvx_shm_probe(import, message, errno_p);
}

bool kvx_shm_on_imported(shm_peer *peer, shm_conn *conn, const shm_message *message, int *fd_p) {
    shm_transport *shm = peer->shm;
    pthread_mutex_lock(&shm->lock);
    shm_import *import = kvx_table_get(&peer->by_handle, message->handle);
    bool closing = peer->closing;
    pthread_mutex_unlock(&shm->lock);
    bool good = import != NULL && import->pending && (message->how == SHM_BY_MAPPING) == (*fd_p != -1);
    int status = message->status, sys_errno = message->sys_errno;
    if (good && status == KVX_OK) {
        good = message->how != SHM_NOT && sys_errno == 0 && kvx_shm_authentic(conn, message, import->key);
    } else if (good) { /* who does not know the grant cannot prove anything; any other reason is proved */
        bool bare = kvx_refusal_bare(status) || status == KVX_E_UNSUPPORTED;
        good =
            message->how == SHM_NOT && (bare || (kvx_refusal(status) && kvx_shm_authentic(conn, message, import->key)));
    }
    if (good) {
        bool attached = status == KVX_OK;
        import->how = message->how;
        if (attached) {
            status = shm_import_map(import, message, *fd_p, &sys_errno);
        }
        pthread_mutex_lock(&shm->lock);
        import->attached = attached;
        kvx_shm_import_end(import, status, sys_errno);
        pthread_mutex_unlock(&shm->lock);
    }
    if (good || closing) {
        if (*fd_p >= 0) {
            close(*fd_p);
        }
        *fd_p = -1;
    }
    return good || (closing && import == NULL);
}

bool kvx_shm_on_revoke(shm_peer *peer, shm_conn *conn, const shm_message *message) {
    shm_transport *shm = peer->shm;
    bool good = true;
    pthread_mutex_lock(&shm->lock);
    shm_import *import = kvx_table_get(&peer->by_handle, message->handle);
    if (import != NULL && import->attached) {
        good = kvx_shm_authentic(conn, message, import->key);
    } else if (import != NULL) { /* it was refused, or our DROP is on its way to them; but they have answered */
        good = !import->pending;
    }
    if (good && import != NULL && import->attached && !import->revoke) {
        import->revoke = true;
        if (import->import != NULL) {
            atomic_store(&import->import->revoked, true);
        }
        kvx_shm_shut(import, KVX_E_REVOKED);
        kvx_shm_todo(peer);
    }
    pthread_mutex_unlock(&shm->lock);
    return good;
}

/* -- giving back ----------------------------------------------------------------------------------------------------
 */

/* Out of the application's sight and out of the owner's books; from a job or the progress thread. */
static void shm_import_detach(shm_import *import) {
    shm_peer *peer = import->peer;
    shm_transport *shm = peer->shm;
    bool whole = import->retiring;
    shm_message message = {.handle = import->handle};
    kvx_shm_unview(import);
    pthread_mutex_lock(&shm->lock);
    kvx_shm_map_leave(import);
    if (import->attached && peer->conn != NULL) {
        import->attached = false;
        message.type = import->revoke ? SHM_REVOKED : SHM_DROP;
        kvx_shm_send(peer->conn, &message, import->key, -1);
    }
    import->given_back = true;
    import->working = false;
    if (whole) {
        kvx_table_remove(&peer->by_handle, import->handle);
        KVX_LIST_REMOVE(peer->imports, import);
#ifndef __clang_analyzer__ /* it cannot know that previous->next was this one, and finds it in the list again */
        kvx_vault_give(import);
#endif
    }
    kvx_shm_todo(peer);
    pthread_mutex_unlock(&shm->lock);
}

static void shm_import_detach_run(kvx_job *job) {
    shm_import_detach((shm_import *)((char *)job - offsetof(shm_import, job)));
}

/* With the lock held: an import that can be given back, marked as such. */
static shm_import *shm_import_next_to_detach(shm_peer *peer) {
    for (shm_import *import = peer->imports; import != NULL; import = import->next) {
        if (!import->idle || import->working) {
            continue;
        }
        bool whole = import->import == NULL || peer->closing;
        if (whole || (import->revoke && !import->given_back)) {
            import->retiring = whole;
            import->working = true;
            kvx_shm_hide(import);
            return import;
        }
    }
    return NULL;
}

/* Then the maps that nobody wants any more. */
void kvx_shm_give_back_all(shm_peer *peer) {
    shm_transport *shm = peer->shm;
    for (;;) {
        pthread_mutex_lock(&shm->lock);
        shm_import *import = shm_import_next_to_detach(peer);
        shm_map *map = import == NULL ? kvx_shm_map_unwanted(peer) : NULL;
        pthread_mutex_unlock(&shm->lock);
        if (import != NULL && import->view != NULL && import->view_length > SHM_UNMAP_MAX) {
            import->job.run = shm_import_detach_run;
            kvx_core_job_post(shm->core, &import->job);
        } else if (import != NULL) {
            shm_import_detach(import);
        } else if (map != NULL) {
            kvx_shm_map_free(map, true);
        } else {
            return;
        }
    }
}

void kvx_shm_imports_free(shm_peer *peer) {
    while (peer->imports != NULL) {
        shm_import *import = peer->imports;
        peer->imports = import->next;
        kvx_shm_hide(import);
        kvx_shm_unview(import);
        kvx_shm_map_leave(import);
        kvx_vault_give(import);
    }
    kvx_shm_maps_forget(peer, 0);
    for (shm_map *map; (map = kvx_shm_map_unwanted(peer)) != NULL;) {
        kvx_shm_map_free(map, false);
    }
}

/* shm_owner.c: the side whose memory is reached. It checks a request once, at the import, and hands out the means; from
 * then on all it can do is ask for them back. A grant is quiet when every initiator that was let in has answered
 * REVOKED or DROP, or its socket is closed at its end, which the kernel does only after its last thread is gone. Time
 * is no proof. */
#define _GNU_SOURCE
#include "shm/shm.h"
#include "list.h"
#include "core/vault.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

/* -- attachments; all with the lock held ----------------------------------------------------------------------------
 */

static bool shm_owner_attach_exists(const shm_transport *shm, const shm_conn *conn, uint64_t grant) {
    for (const shm_attach *at = kvx_table_get(&shm->grants, grant); at != NULL; at = at->next) {
        if (at->conn == conn) {
            return true;
        }
    }
    return false;
}

static shm_attach *shm_owner_attach_new(shm_transport *shm, shm_conn *conn, const shm_message *message,
                                        const kvx_access *access) {
    shm_attach *attach = kvx_vault_take(sizeof(*attach));
    if (attach == NULL || !kvx_table_reserve(&conn->attached, 1) || !kvx_table_reserve(&conn->regions, 1) ||
        !kvx_table_reserve(&shm->grants, 1)) {
        kvx_vault_give(attach);
        return NULL;
    }
    attach->conn = conn;
    attach->handle = message->handle;
    attach->grant = access->grant->id;
    attach->by_attach = access->grant->region->memfd < 0;
    memcpy(attach->key, access->grant->key, sizeof(attach->key));
    return attach;
}

static void shm_owner_attach_insert(shm_transport *shm, shm_attach *attach) {
    if (!shm_owner_attach_exists(shm, attach->conn, attach->grant)) {
        kvx_grant_attach(shm->core, attach->grant);
    }
    shm_attach *first = kvx_table_remove(&shm->grants, attach->grant);
    attach->next = first;
    if (first != NULL) {
        first->previous = attach;
    }
    kvx_table_put(&shm->grants, attach->grant, attach);
    kvx_table_put(&attach->conn->attached, attach->handle, attach);
}

static void shm_owner_attach_end(shm_transport *shm, shm_attach *attach, bool lost) {
    kvx_table_remove(&attach->conn->attached, attach->handle);
    if (attach->next != NULL) {
        attach->next->previous = attach->previous;
    }
    if (attach->previous != NULL) {
        attach->previous->next = attach->next;
    } else {
        kvx_table_remove(&shm->grants, attach->grant);
        if (attach->next != NULL) {
            kvx_table_put(&shm->grants, attach->grant, attach->next);
        }
    }
    if (!shm_owner_attach_exists(shm, attach->conn, attach->grant)) {
        kvx_grant_detach(shm->core, attach->grant, lost);
    }
    if (attach->revoked != NULL && kvx_table_get(&shm->grants, attach->grant) == NULL) {
        kvx_grant_quiet(shm->core, shm->slot, attach->revoked);
    }
    kvx_vault_give(attach);
}

/* -- import ---------------------------------------------------------------------------------------------------------
 */

/* A descriptor to send: for grants without write access one through which the kernel refuses writable mappings. */
static int shm_owner_descriptor_for(const kvx_grant *grant, int *errno_p) {
    int fd;
    if (grant->access & KVX_WRITE) {
        fd = fcntl(grant->region->memfd, F_DUPFD_CLOEXEC, 0);
    } else {
        char path[40];
        snprintf(path, sizeof(path), "/proc/self/fd/%d", grant->region->memfd);
        fd = open(path, O_RDONLY | O_CLOEXEC);
    }
    *errno_p = fd < 0 ? errno : 0;
    return fd;
}

static int shm_owner_check(const shm_conn *conn, const shm_message *message, const kvx_access *access) {
    if (!kvx_shm_authentic(conn, message, access->grant->key)) {
        return KVX_E_KEY;
    }
    int status = kvx_access_allow(access, message->import.access);
    return status == KVX_OK ? kvx_access_claim(access, message->import.length) : status;
}

/* Fills the answer; on KVX_OK the initiator is attached and *fd_p is to be sent. */
static int shm_owner_attach(shm_conn *conn, const shm_message *message, const kvx_access *access, shm_message *answer,
                            int *fd_p) {
    shm_transport *shm = conn->shm;
    const kvx_grant *grant = access->grant;
    if (conn->attached.count >= shm->config->grants_max) {
        return KVX_E_REFUSED;
    }
    if (grant->region->memfd < 0 && (shm->config->flags & KVX_ENGINE_NO_CMA)) {
        answer->sys_errno = EPERM;
        return KVX_E_CMA_DENIED;
    }
    if (grant->region->memfd >= 0) {
        answer->how = SHM_BY_MAPPING;
        answer->mapped.at = grant->offset;
        answer->mapped.region = grant->region->id;
        *fd_p = shm_owner_descriptor_for(grant, &answer->sys_errno);
        if (*fd_p < 0) {
            return answer->sys_errno == EMFILE || answer->sys_errno == ENFILE ? KVX_E_FDS : KVX_E_SYSTEM;
        }
    } else {
        answer->how = SHM_BY_ATTACH;
        answer->attached.at = (uint64_t)(uintptr_t)access->base;
        answer->attached.probe_address = (uint64_t)(uintptr_t)shm->probe;
        memcpy(answer->attached.probe, shm->probe, sizeof(shm->probe));
    }
    shm_attach *attach = shm_owner_attach_new(shm, conn, message, access);
    if (attach == NULL) {
        if (*fd_p >= 0) {
            close(*fd_p);
            *fd_p = -1;
        }
        return KVX_E_NOMEM;
    }
    shm_owner_attach_insert(shm, attach);
    if (!attach->by_attach && kvx_table_get(&conn->regions, grant->region->id) == NULL) {
        kvx_table_put(&conn->regions, grant->region->id, grant->region);
    }
    return KVX_OK;
}

static bool shm_owner_on_import(shm_conn *conn, const shm_message *message) {
    shm_transport *shm = conn->shm;
    shm_message answer = {.type = SHM_IMPORTED, .handle = message->handle};
    kvx_access access;
    int fd = -1;
    bool asks =
        message->import.access != 0 && message->import.access <= (KVX_READ | KVX_WRITE) && message->import.length != 0;
    if (!asks || kvx_table_get(&conn->attached, message->handle) != NULL) {
        return false;
    }
    if (shm->closing) {
        answer.status = KVX_E_REVOKED;
        kvx_shm_send(conn, &answer, NULL, -1);
        return true;
    }
    /* With the lock: a revoke finds the attachment, or we find that it was revoked. */
    pthread_mutex_lock(&shm->lock);
    int status = kvx_access_begin(shm->core, message->import.grant, message->import.generation, &access);
    if (status == KVX_OK) {
        uint8_t key[KVX_KEY_BYTES];
        memcpy(key, access.grant->key, sizeof(key));
        status = shm_owner_check(conn, message, &access);
        if (status != KVX_OK) {
            KVX_COUNT(shm->counters, refused, 1);
        } else {
            status = shm_owner_attach(conn, message, &access, &answer, &fd);
        }
        if (status != KVX_OK) {
            answer = (shm_message){
                .type = SHM_IMPORTED, .handle = message->handle, .sys_errno = answer.sys_errno, .status = status};
        }
        kvx_access_end(shm->core, &access);
        kvx_shm_send(conn, &answer, status == KVX_E_KEY ? NULL : key, fd);
    } else {
        KVX_COUNT(shm->counters, refused, 1);
        answer.status = status;
        kvx_shm_send(conn, &answer, NULL, -1);
    }
    pthread_mutex_unlock(&shm->lock);
    return true;
}

/* -- revoke -----------------------------------------------------------------------------------------------------------
 */

static void shm_owner_send_revoke(shm_attach *attach) {
    shm_message message = {.type = SHM_REVOKE, .handle = attach->handle};
    attach->asked = true;
    kvx_shm_send(attach->conn, &message, attach->key, -1);
}

int kvx_shm_owner_revoke(shm_transport *shm, kvx_grant *grant) {
    pthread_mutex_lock(&shm->lock);
    shm_attach *first = kvx_table_get(&shm->grants, grant->id);
    for (shm_attach *at = first; at != NULL; at = at->next) {
        at->revoked = grant;
        shm_owner_send_revoke(at);
    }
    pthread_mutex_unlock(&shm->lock);
    return first == NULL ? KVX_OK : KVX_PENDING;
}

/* Nobody may use the region any more; those who got its descriptor may still hold its pages. */
void kvx_shm_owner_forget(shm_transport *shm, const kvx_region *region) {
    pthread_mutex_lock(&shm->lock);
    for (shm_conn *conn = region->memfd < 0 ? NULL : shm->conns; conn != NULL; conn = conn->next) {
        if (kvx_table_remove(&conn->regions, region->id) != NULL) {
            shm_message message = {.type = SHM_FORGET, .mapped.region = region->id};
            kvx_shm_send(conn, &message, NULL, -1);
        }
    }
    pthread_mutex_unlock(&shm->lock);
}

static bool shm_owner_on_detach(shm_conn *conn, const shm_message *message) {
    shm_transport *shm = conn->shm;
    pthread_mutex_lock(&shm->lock);
    shm_attach *attach = kvx_table_get(&conn->attached, message->handle);
    bool good =
        attach != NULL && kvx_shm_authentic(conn, message, attach->key) && (message->type == SHM_DROP || attach->asked);
    if (good) {
        shm_owner_attach_end(shm, attach, false);
    }
    pthread_mutex_unlock(&shm->lock);
    return good;
}

/* -- notifications ----------------------------------------------------------------------------------------------------
 */

static bool shm_owner_on_notify(shm_conn *conn, const shm_message *message) {
    shm_transport *shm = conn->shm;
    shm_message answer = {.type = SHM_NOTIFIED, .handle = message->handle, .notify.token = message->notify.token};
    pthread_mutex_lock(&shm->lock);
    shm_attach *attach = kvx_table_get(&conn->attached, message->handle);
    bool good = attach != NULL && (conn->held || kvx_shm_authentic(conn, message, attach->key));
    conn->held = false;
    if (good) {
        answer.status = attach->revoked != NULL ? KVX_E_REVOKED
                                                : kvx_notify_post(shm->core, shm->slot, attach->grant,
                                                                  message->notify.tag, message->notify.value);
        conn->held = answer.status == KVX_AGAIN;
        if (!conn->held) {
            kvx_shm_send(conn, &answer, attach->key, -1);
        }
    }
    pthread_mutex_unlock(&shm->lock);
    if (conn->held) {
        conn->held_message = *message;
        kvx_shm_conn_read(conn, false);
    }
    return good;
}

void kvx_shm_owner_held(shm_conn *conn) {
    shm_message message = conn->held_message;
    if (!shm_owner_on_notify(conn, &message)) {
        kvx_shm_owner_hang_up(conn);
    } else if (!conn->held) {
        kvx_shm_conn_read(conn, true);
        if (conn->parked && !kvx_shm_conn_watch(conn)) {
            kvx_shm_owner_hang_up(conn);
        } else if (conn->gone) {
            kvx_shm_conn_event(conn, EPOLLIN);
        }
    }
}

/* -- messages ---------------------------------------------------------------------------------------------------------
 */

static bool shm_owner_on_hello(shm_conn *conn, const shm_message *message) {
    shm_transport *shm = conn->shm;
    memcpy(conn->nonce_theirs, message->hello.nonce, sizeof(conn->nonce_theirs));
    if (message->status != KVX_OK) {
        return false;
    }
    if (shm->accepted >= shm->accepted_max) {
        kvx_shm_hello(conn, KVX_E_REFUSED);
        kvx_shm_owner_end(conn);
        return true;
    }
    kvx_newcomers_remove(&shm->line, &conn->newcomer);
    shm->accepted++;
    conn->state = SHM_OPEN;
    conn->deadline_ms = 0;
    KVX_COUNT(shm->counters, peers_accepted, 1);
    kvx_shm_hello(conn, KVX_OK);
    return true;
}

bool kvx_shm_owner_message(shm_conn *conn, const shm_message *message) {
    switch (message->type) {
    case SHM_HELLO:
        return shm_owner_on_hello(conn, message);
    case SHM_IMPORT:
        return shm_owner_on_import(conn, message);
    case SHM_REVOKED:
    case SHM_DROP:
        return shm_owner_on_detach(conn, message);
    case SHM_NOTIFY:
        return shm_owner_on_notify(conn, message);
    case SHM_BYE:
        conn->said_bye = true;
        return true;
    default:
        return false;
    }
}

/* -- ends -------------------------------------------------------------------------------------------------------------
 */

void kvx_shm_owner_hang_up(shm_conn *conn) {
    if (conn->attached.count == 0) {
        kvx_shm_owner_end(conn);
        return;
    }
    pthread_mutex_lock(&conn->tx_lock);
    (void)shutdown(conn->fd, SHUT_WR);
    conn->broken = true;
    pthread_mutex_unlock(&conn->tx_lock);
    conn->held = false;
    conn->state = SHM_LINGER;
    kvx_shm_conn_read(conn, false);
    if (conn->parked) {
        (void)kvx_shm_conn_watch(conn); /* tells only of its end */
    }
}

void kvx_shm_owner_end(shm_conn *conn) {
    shm_transport *shm = conn->shm;
    if (conn->state == SHM_GREETING) {
        kvx_newcomers_remove(&shm->line, &conn->newcomer);
    } else {
        shm->accepted--;
        __atomic_fetch_sub(&shm->counters->peers_accepted, 1, __ATOMIC_RELAXED);
    }
    kvx_shm_conn_close(conn);
    pthread_mutex_lock(&shm->lock);
    shm_attach *attach;
    while ((attach = kvx_table_any(&conn->attached)) != NULL) {
        shm_owner_attach_end(shm, attach, !conn->said_bye);
    }
    KVX_LIST_REMOVE(shm->conns, conn);
    pthread_mutex_unlock(&shm->lock);
    conn->grave_next = shm->graveyard;
    shm->graveyard = conn;
}

/* -- close ------------------------------------------------------------------------------------------------------------
 */

static shm_conn *shm_owner_find_attached(shm_transport *shm) {
    for (shm_conn *conn = shm->conns; conn != NULL; conn = conn->next) {
        for (uint32_t i = 0; i < conn->attached.capacity; i++) {
            if (conn->attached.keys[i] != 0 && ((shm_attach *)conn->attached.values[i])->by_attach) {
                return conn;
            }
        }
    }
    return NULL;
}

static void shm_owner_wait_for(shm_conn *conn, int wait_ms) {
    struct pollfd ready = {.fd = conn->fd, .events = conn->state == SHM_LINGER ? 0 : POLLIN};
    if (poll(&ready, 1, wait_ms) <= 0) {
        return;
    }
    if (conn->parked) { /* its end is closed, only a notification was in the way */
        kvx_shm_owner_end(conn);
        return;
    }
    conn->held = false;
    conn->reading = conn->state != SHM_LINGER;
    kvx_shm_conn_event(conn, (uint32_t)ready.revents);
}

/* Mapped memory outlives us for those who mapped it. Memory of the user does not: whoever writes there by address gets
 * a moment to stop before the user may take it away. One that is frozen for longer than that is beyond help. */
void kvx_shm_owner_close(shm_transport *shm) {
    uint64_t now_ms = kvx_now_ms(), until_ms = now_ms + shm->config->cancel_ms;
    shm->closing = true;
    shm_conn *conn = shm_owner_find_attached(shm);
    for (shm_conn *at = conn; at != NULL; at = at->next) {
        for (uint32_t i = 0; i < at->attached.capacity; i++) {
            shm_attach *attach = at->attached.keys[i] != 0 ? at->attached.values[i] : NULL;
            if (attach != NULL && attach->by_attach && !attach->asked) {
                shm_owner_send_revoke(attach);
            }
        }
    }
    for (; conn != NULL && now_ms < until_ms; now_ms = kvx_now_ms(), conn = shm_owner_find_attached(shm)) {
        shm_owner_wait_for(conn, (int)(until_ms - now_ms));
    }
    while (shm->conns != NULL) {
        shm_message bye = {.type = SHM_BYE};
        kvx_shm_send(shm->conns, &bye, NULL, -1);
        kvx_shm_owner_end(shm->conns);
    }
}

/* hixl_owner.c: the side whose memory is reached. It checks who asks once, at ATTACH, and tells where the grant lies;
 * from then on all it can do is ask for it back, since HIXL itself lets everybody who is connected reach all that is
 * registered. A grant is quiet when every peer that was told has answered QUIET or DETACH, or its socket was closed at
 * its end. A host that fell silent has proved nothing: what it was told stays in quarantine. */
#include "hixl/hixl.h"
#include "list.h"
#include "core/vault.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

/* -- attachments; with the lock held ------------------------------------------------------------------------------ */

static bool hixl_owner_attach_exists(const hixl_transport *hixl, const hixl_conn *conn, uint64_t grant) {
    for (const hixl_attach *at = kvx_table_get(&hixl->grants, grant); at != NULL; at = at->next) {
        if (at->conn == conn) {
            return true;
        }
    }
    return false;
}

static bool hixl_owner_attach_new(hixl_conn *conn, const kvx_frame *frame, const kvx_grant *grant) {
    hixl_transport *hixl = conn->hixl;
    hixl_attach *attach = kvx_vault_take(sizeof *attach);
    if (attach == NULL || !kvx_table_reserve(&conn->attached, 1) || !kvx_table_reserve(&hixl->grants, 1)) {
        kvx_vault_give(attach);
        return false;
    }
    attach->conn = conn;
    attach->handle = frame->op;
    attach->grant = grant->id;
    memcpy(attach->key, grant->key, sizeof attach->key);
    if (!hixl_owner_attach_exists(hixl, conn, grant->id)) {
        kvx_grant_attach(hixl->core, grant->id);
    }
    attach->next = kvx_table_remove(&hixl->grants, grant->id);
    if (attach->next != NULL) {
        attach->next->previous = attach;
    }
    kvx_table_put(&hixl->grants, grant->id, attach);
    kvx_table_put(&conn->attached, attach->handle, attach);
    return true;
}

/* Its connection does not count any more. */
static void hixl_owner_attach_unlink(hixl_attach *attach, bool lost) {
    hixl_conn *conn = attach->conn;
    kvx_table_remove(&conn->attached, attach->handle);
    attach->conn = NULL;
    if (!hixl_owner_attach_exists(conn->hixl, conn, attach->grant)) {
        kvx_grant_detach(conn->hixl->core, attach->grant, lost);
    }
}

/* And nothing moves through it any more. */
static void hixl_owner_attach_end(hixl_transport *hixl, hixl_attach *attach) {
    if (attach->next != NULL) {
        attach->next->previous = attach->previous;
    }
    if (attach->previous != NULL) {
        attach->previous->next = attach->next;
    } else {
        kvx_table_remove(&hixl->grants, attach->grant);
        if (attach->next != NULL) {
            kvx_table_put(&hixl->grants, attach->grant, attach->next);
        }
    }
    if (attach->revoked != NULL && kvx_table_get(&hixl->grants, attach->grant) == NULL) {
        kvx_grant_quiet(hixl->core, hixl->slot, attach->revoked);
    }
    kvx_vault_give(attach);
}

/* -- answers ------------------------------------------------------------------------------------------------------ */

static void hixl_owner_send_ack(hixl_conn *conn, uint64_t op, int status, const uint8_t *key) {
    kvx_frame frame = {.type = KVX_FRAME_ACK,
                       .flags = key == NULL ? KVX_FRAME_F_BARE : 0,
                       .status = kvx_refusal_told(status),
                       .op = op,
                       .segment = KVX_SEGMENT_UNKNOWN};
    if (status != KVX_OK) {
        KVX_COUNT(conn->hixl->counters, refused, 1);
    }
    kvx_hixl_send(conn, &frame, key, NULL);
}

static void hixl_owner_on_authenticated(hixl_conn *conn) {
    if (!conn->proved) {
        conn->proved = true;
        conn->deadline_ms = 0;
        kvx_newcomers_remove(&conn->hixl->line, &conn->newcomer);
        conn->counted = true;
        conn->hixl->accepted++;
        KVX_COUNT(conn->hixl->counters, peers_accepted, 1);
    }
}

/* Of all side links, those of one grant have a half: who holds one descriptor does not keep out who holds another. */
static bool hixl_owner_has_capacity(hixl_conn *conn, uint64_t grant) {
    const hixl_transport *hixl = conn->hixl;
    const uint32_t most = hixl->accepted_max / 2 > HIXL_HOLDER_MIN ? hixl->accepted_max / 2 : HIXL_HOLDER_MIN;
    uint32_t uses = 0;
    if (conn->attached.count != 0) {
        return true;
    }
    for (const hixl_attach *at = kvx_table_get(&hixl->grants, grant); at != NULL && uses < most; at = at->next) {
        uses++;
    }
    return uses < most;
}

/* -- ATTACH ------------------------------------------------------------------------------------------------------- */

static int hixl_owner_location_of(hixl_transport *hixl, const kvx_access *access, hixl_location *location) {
    const kvx_region *region = access->grant->region;
    hixl_device *device = kvx_hixl_device_of(hixl, region);
    const hixl_arena *arena = device == NULL ? NULL : kvx_hixl_arena_of(device, region);
    if (arena == NULL) {
        return KVX_E_UNSUPPORTED;
    }
    *location = (hixl_location){.address = (uint64_t)(uintptr_t)access->base,
                                .length = access->length,
                                .kind = region->kind,
                                .physical = device->physical,
                                .epoch = hixl->epoch,
                                .process = kvx_hixl_process(),
                                .version = arena->version,
                                .known = device->version,
                                .arena_offset = (uint64_t)(access->base - arena->base),
                                .arena_length = arena->length};
    memcpy(location->boot_id, hixl->boot_id, sizeof location->boot_id);
    memcpy(location->engine, device->id, sizeof location->engine);
    return KVX_OK;
}

/* The peer may map this arena from now on, until its side link ends. False: out of memory, it has to go another way. */
static bool hixl_owner_arena_expose(hixl_conn *conn, hixl_arena *arena) {
    if (kvx_table_get(&conn->told, arena->id) != NULL) {
        return true;
    }
    if (!kvx_table_reserve(&conn->told, 1)) {
        return false;
    }
    kvx_table_put(&conn->told, arena->id, arena);
    arena->told++;
    return true;
}

/* Its end of the side link is closed, which comes after the last thing that it had mapped. */
static void hixl_owner_arena_conceal_all(hixl_conn *conn) {
    hixl_arena *arena;
    while ((arena = kvx_table_any(&conn->told)) != NULL) {
        kvx_table_remove(&conn->told, arena->id);
        arena->told--;
    }
}

/* Is the key of this arena for whoever asks: a process of this host, that says which one? */
static hixl_arena *hixl_owner_key_for(hixl_conn *conn, const kvx_region *region) {
    hixl_transport *hixl = conn->hixl;
    bool neighbour = memcmp(kvx_rx_units(&conn->rx), hixl->boot_id, sizeof hixl->boot_id) == 0;
    if (!neighbour || conn->rx.frame.segment == 0 || hixl->config->flags & KVX_ENGINE_NO_IPC) {
        return NULL;
    }
    hixl_arena *arena = (hixl_arena *)(uintptr_t)kvx_hixl_arena_of(kvx_hixl_device_of(hixl, region), region);
    return arena != NULL && arena->key[0] != '\0' ? arena : NULL;
}

/* With the lock held, which is let go meanwhile: the driver admits that process alone. The access keeps the arena. */
static bool hixl_owner_allow_import(hixl_conn *conn, hixl_attach *attach, const kvx_access *access, const char *key) {
    hixl_transport *hixl = conn->hixl;
    const hixl_device *device = kvx_hixl_device_of(hixl, access->grant->region);
    attach->opening = true;
    pthread_mutex_unlock(&hixl->lock);
    int status = hixl->api->ipc_allow(device->index, key, (int32_t)conn->rx.frame.segment, NULL);
    pthread_mutex_lock(&hixl->lock);
    attach->opening = false;
    return status == KVX_OK;
}

static int hixl_owner_attach(hixl_conn *conn, const kvx_access *access, hixl_location *location) {
    hixl_transport *hixl = conn->hixl;
    const kvx_frame *frame = &conn->rx.frame;
    int status = kvx_access_allow(access, (uint32_t)frame->tag);
    status = status == KVX_OK ? kvx_access_claim(access, frame->value) : status;
    if (status == KVX_OK &&
        (conn->attached.count >= hixl->config->grants_max || !hixl_owner_has_capacity(conn, frame->grant))) {
        status = KVX_E_REFUSED;
    }
    status = status == KVX_OK ? hixl_owner_location_of(hixl, access, location) : status;
    if (status == KVX_OK && !hixl_owner_attach_new(conn, frame, access->grant)) {
        status = KVX_E_NOMEM;
    }
    hixl_arena *arena = status == KVX_OK ? hixl_owner_key_for(conn, access->grant->region) : NULL;
    bool admitted = arena != NULL && kvx_table_get(&conn->told, arena->id) != NULL;
    if (arena != NULL && hixl_owner_arena_expose(conn, arena)) {
        char key[sizeof arena->key];
        memcpy(key, arena->key, sizeof key);
        if (admitted || hixl_owner_allow_import(conn, kvx_table_get(&conn->attached, frame->op), access, key)) {
            memcpy(location->key, key, sizeof key);
        } else { /* it goes another way */
            kvx_table_remove(&conn->told, arena->id);
            arena->told--;
        }
    }
    return status;
}

static void hixl_owner_send_revoke(hixl_attach *attach) {
    kvx_frame frame = {.type = KVX_FRAME_REVOKE, .op = attach->handle};
    attach->asked = true;
    kvx_hixl_send(attach->conn, &frame, attach->key, NULL);
}

static bool hixl_owner_on_attach(hixl_conn *conn) {
    hixl_transport *hixl = conn->hixl;
    const kvx_frame *frame = &conn->rx.frame;
    uint8_t key[KVX_KEY_BYTES];
    kvx_access access;
    hixl_location location;
    bool guessed = false;
    if (frame->op == 0 || kvx_table_get(&conn->attached, frame->op) != NULL) {
        return false;
    }
    /* With the lock: a revoke finds the attachment, or we find that it was revoked. */
    pthread_mutex_lock(&hixl->lock);
    int status =
        hixl->closing ? KVX_E_REVOKED : kvx_access_begin_any(hixl->core, frame->grant, frame->generation, &access);
    if (status != KVX_OK) {
        hixl_owner_send_ack(conn, frame->op, status, NULL);
    } else if (!kvx_hixl_authentic(conn, access.grant->key)) {
        kvx_access_end(hixl->core, &access);
        hixl_owner_send_ack(conn, frame->op, KVX_E_KEY, NULL);
        guessed = ++conn->key_failures >= HIXL_KEY_FAILURES_MAX;
    } else {
        memcpy(key, access.grant->key, sizeof key);
        hixl_owner_on_authenticated(conn);
        status = hixl_owner_attach(conn, &access, &location);
        kvx_access_end(hixl->core, &access);
        if (status == KVX_OK) {
            uint8_t units[HIXL_LOCATION_UNITS * KVX_STREAM_UNIT_BYTES];
            kvx_hixl_location_encode(&location, units);
            kvx_frame answer = {.type = KVX_FRAME_LOCATION, .op = frame->op, .segments = HIXL_LOCATION_UNITS};
            kvx_hixl_send(conn, &answer, key, units);
            hixl_attach *attach = kvx_table_get(&conn->attached, frame->op);
            if (attach->revoked != NULL && !attach->asked) {
                hixl_owner_send_revoke(attach);
            }
        } else {
            hixl_owner_send_ack(conn, frame->op, status, key);
        }
    }
    pthread_mutex_unlock(&hixl->lock);
    if (guessed) {
        kvx_hixl_owner_hang_up(conn);
    }
    return true;
}

/* -- revoke ------------------------------------------------------------------------------------------------------- */

int kvx_hixl_owner_revoke(hixl_transport *hixl, kvx_grant *grant) {
    pthread_mutex_lock(&hixl->lock);
    hixl_attach *first = kvx_table_get(&hixl->grants, grant->id);
    for (hixl_attach *at = first; at != NULL; at = at->next) {
        at->revoked = grant;
        if (!at->opening) {
            hixl_owner_send_revoke(at);
        }
    }
    pthread_mutex_unlock(&hixl->lock);
    return first == NULL ? KVX_OK : KVX_PENDING;
}

static bool hixl_owner_on_detach(hixl_conn *conn) {
    hixl_transport *hixl = conn->hixl;
    const kvx_frame *frame = &conn->rx.frame;
    pthread_mutex_lock(&hixl->lock);
    hixl_attach *attach = kvx_table_get(&conn->attached, frame->op);
    bool good =
        attach != NULL && (frame->type == KVX_FRAME_DETACH || attach->asked) && kvx_hixl_authentic(conn, attach->key);
    if (good) {
        hixl_owner_attach_unlink(attach, false);
        hixl_owner_attach_end(hixl, attach);
    }
    pthread_mutex_unlock(&hixl->lock);
    return good;
}

/* -- notifications ------------------------------------------------------------------------------------------------ */

static void hixl_owner_post_notification(hixl_conn *conn) {
    hixl_transport *hixl = conn->hixl;
    const kvx_frame *frame = &conn->held_frame;
    int status = kvx_notify_post(hixl->core, hixl->slot, frame->grant, frame->tag, frame->value);
    pthread_mutex_lock(&hixl->lock);
    conn->held = status == KVX_AGAIN;
    if (!conn->held) {
        hixl_owner_send_ack(conn, frame->op, status, conn->held_key);
    }
    kvx_hixl_conn_arm(conn);
    pthread_mutex_unlock(&hixl->lock);
}

static bool hixl_owner_on_notify(hixl_conn *conn) {
    hixl_transport *hixl = conn->hixl;
    const kvx_frame *frame = &conn->rx.frame;
    kvx_access access;
    int status = kvx_access_begin_any(hixl->core, frame->grant, frame->generation, &access);
    if (status != KVX_OK) {
        pthread_mutex_lock(&hixl->lock);
        hixl_owner_send_ack(conn, frame->op, status, NULL);
        pthread_mutex_unlock(&hixl->lock);
        return true;
    }
    bool good = kvx_hixl_authentic(conn, access.grant->key);
    memcpy(conn->held_key, access.grant->key, KVX_KEY_BYTES);
    kvx_access_end(hixl->core, &access);
    if (good) {
        conn->held_frame = *frame;
        hixl_owner_post_notification(conn);
    }
    return good;
}

void kvx_hixl_owner_held(hixl_conn *conn) {
    hixl_owner_post_notification(conn);
    if (!conn->held) {
        kvx_hixl_conn_parse(conn);
    }
}

/* Is the device well that whoever asks wants to connect to? */
static int hixl_owner_device_status(const hixl_transport *hixl, uint64_t physical) {
    for (uint32_t i = 0; i < hixl->device_count; i++) {
        const hixl_device *device = &hixl->devices[i];
        if ((uint32_t)device->physical == physical) {
            int status = hixl->api->device_healthy(device->index, NULL);
            return status == KVX_OK || status == KVX_E_UNSUPPORTED ? KVX_OK : KVX_E_DEVICE; /* or nobody can say */
        }
    }
    return KVX_OK;
}

static bool hixl_owner_on_ping(hixl_conn *conn) {
    hixl_transport *hixl = conn->hixl;
    const kvx_frame *frame = &conn->rx.frame;
    if (!conn->proved) {
        return false;
    }
    kvx_frame answer = {
        .type = KVX_FRAME_PONG, .op = frame->op, .status = hixl_owner_device_status(hixl, frame->value)};
    pthread_mutex_lock(&hixl->lock);
    const hixl_attach *witness = kvx_table_get(&conn->attached, frame->tag);
    answer.tag = witness != NULL ? frame->tag : 0;
    kvx_hixl_send(conn, &answer, witness != NULL ? witness->key : NULL, NULL);
    pthread_mutex_unlock(&hixl->lock);
    return true;
}

bool kvx_hixl_owner_frame(hixl_conn *conn) {
    switch (conn->rx.frame.type) {
    case KVX_FRAME_ATTACH:
        return hixl_owner_on_attach(conn);
    case KVX_FRAME_DETACH:
    case KVX_FRAME_QUIET:
        return hixl_owner_on_detach(conn);
    case KVX_FRAME_NOTIFY:
        return hixl_owner_on_notify(conn);
    case KVX_FRAME_PING:
        return hixl_owner_on_ping(conn);
    case KVX_FRAME_BYE:
        conn->said_bye = true;
        return true;
    default:
        return false;
    }
}

/* -- ends --------------------------------------------------------------------------------------------------------- */

void kvx_hixl_owner_hang_up(hixl_conn *conn) {
    hixl_transport *hixl = conn->hixl;
    if (conn->state == HIXL_DEAD || conn->state == HIXL_LINGERING) {
        return;
    }
    pthread_mutex_lock(&hixl->lock);
    bool may_move = conn->attached.count != 0 || conn->told.count != 0;
    if (conn->fd >= 0) {
        (void)shutdown(conn->fd, SHUT_WR);
    }
    if (may_move) { /* it sees our end, stops, and closes its own */
        kvx_hixl_conn_become(conn, HIXL_LINGERING);
        conn->held = conn->stopped = conn->want_out = false;
        conn->tx_begin = conn->tx_end = 0;
        conn->broken = true;
        kvx_hixl_conn_arm(conn);
    }
    pthread_mutex_unlock(&hixl->lock);
    if (!may_move) {
        kvx_hixl_owner_end(conn, true);
    }
}

/* The side link that has had no grant for longest; one that was told keys of memory says so itself when it goes. */
bool kvx_hixl_owner_make_room(hixl_transport *hixl) {
    hixl_conn *unused = NULL;
    for (hixl_conn *conn = hixl->conns; conn != NULL; conn = conn->next) {
        if (conn->counted && conn->state == HIXL_OPEN && conn->attached.count == 0) {
            unused = conn; /* the first ones come last */
        }
    }
    if (unused != NULL) {
        kvx_hixl_owner_hang_up(unused);
    }
    return unused != NULL;
}

void kvx_hixl_owner_end(hixl_conn *conn, bool proof) {
    hixl_transport *hixl = conn->hixl;
    if (conn->state == HIXL_DEAD) {
        return;
    }
    pthread_mutex_lock(&hixl->lock);
    kvx_hixl_conn_become(conn, HIXL_DEAD);
    kvx_newcomers_remove(&hixl->line, &conn->newcomer);
    if (conn->counted) {
        hixl->accepted--;
        __atomic_fetch_sub(&hixl->counters->peers_accepted, 1, __ATOMIC_RELAXED);
    }
    kvx_hixl_conn_close(conn);
    if (proof || conn->said_bye) {
        hixl_owner_arena_conceal_all(conn);
    }
    hixl_attach *attach;
    while ((attach = kvx_table_any(&conn->attached)) != NULL) {
        hixl_owner_attach_unlink(attach, !conn->said_bye);
        if (proof || conn->said_bye) {
            hixl_owner_attach_end(hixl, attach);
        }
    }
    KVX_LIST_REMOVE(hixl->conns, conn);
    pthread_mutex_unlock(&hixl->lock);
    conn->grave_next = hixl->graveyard;
    hixl->graveyard = conn;
}

/* -- close -------------------------------------------------------------------------------------------------------- */

static hixl_conn *hixl_owner_find_attached(hixl_transport *hixl) {
    hixl_conn *conn = hixl->conns;
    while (conn != NULL && conn->attached.count == 0) {
        conn = conn->next;
    }
    return conn;
}

static hixl_conn *hixl_owner_find_mapping(hixl_transport *hixl) {
    hixl_conn *conn = hixl->conns;
    while (conn != NULL && conn->told.count == 0) {
        conn = conn->next;
    }
    return conn;
}

/* Until none is left that `find` finds, or it is late. */
static void hixl_owner_wait_for_peers(hixl_transport *hixl, hixl_conn *(*find)(hixl_transport *), uint64_t until_ms) {
    hixl_conn *conn;
    uint64_t now_ms = kvx_now_ms();
    for (; (conn = find(hixl)) != NULL && now_ms < until_ms; now_ms = kvx_now_ms()) {
        struct pollfd ready = {.fd = conn->fd, .events = POLLIN};
        conn->held = conn->stopped = false;
        if (poll(&ready, 1, (int)(until_ms - now_ms)) > 0) {
            kvx_hixl_conn_event(conn, (uint32_t)ready.revents);
        }
    }
}

/* The progress threads are gone. Peers get a moment to stop, and those that may have our memory mapped another one to
 * hang up; then our engines go, and with them the way in. What may still be mapped then is never freed. */
void kvx_hixl_owner_close(hixl_transport *hixl) {
    uint64_t until_ms = kvx_now_ms() + hixl->config->cancel_ms;
    pthread_mutex_lock(&hixl->lock);
    hixl->closing = true;
    for (hixl_conn *conn = hixl->conns; conn != NULL; conn = conn->next) {
        for (uint32_t i = 0; i < conn->attached.capacity; i++) {
            hixl_attach *attach = conn->attached.keys[i] != 0 ? conn->attached.values[i] : NULL;
            if (attach != NULL && !attach->asked) {
                hixl_owner_send_revoke(attach);
            }
        }
    }
    pthread_mutex_unlock(&hixl->lock);
    hixl_owner_wait_for_peers(hixl, hixl_owner_find_attached, until_ms);
    for (hixl_conn *conn = hixl->conns, *next; conn != NULL; conn = next) {
        next = conn->next;
        kvx_frame bye = {.type = KVX_FRAME_BYE};
        pthread_mutex_lock(&hixl->lock);
        kvx_hixl_send(conn, &bye, NULL, NULL);
        pthread_mutex_unlock(&hixl->lock);
        if (conn->told.count != 0) {
            kvx_hixl_owner_hang_up(conn);
        }
    }
    hixl_owner_wait_for_peers(hixl, hixl_owner_find_mapping, until_ms);
    while (hixl->conns != NULL) {
        kvx_hixl_owner_end(hixl->conns, hixl->conns->told.count == 0);
    }
    for (uint32_t i = 0; i < hixl->grants.capacity;) { /* those of silent hosts */
        hixl_attach *attach = hixl->grants.keys[i] != 0 ? hixl->grants.values[i] : NULL;
        if (attach == NULL) {
            i++;
            continue;
        }
        KVX_ASSERT(attach->previous == NULL);
        attach->revoked = NULL; /* the core ends what is left of grants by itself */
        hixl_owner_attach_end(hixl, attach);
    }
}

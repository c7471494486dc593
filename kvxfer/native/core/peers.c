/* peers.c: the initiator's side. Peers and imports, from the call that makes them to the call that ends them.
 *
 * A handle leaves its table as soon as its user lets go or it failed; its box stays until the transport has forgotten
 * it too. */
#include "core/core.h"
#include "list.h"
#include "core/vault.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PEER_EVENTS 3 /* CONNECT, PEER_DOWN, PEER_CLOSED */

static void peers_update_gauges(kvx_core *core) {
    KVX_GAUGE(core, peers, core->peers.count);
    KVX_GAUGE(core, imports, core->imports.count);
}

static bool peers_complete_connect(kvx_core *core, peer_box *box, int status, int sys_errno) {
    kvx_event event = {.kind = KVX_EV_CONNECT,
                       .status = status,
                       .token = box->peer.token,
                       .id = box->peer.id,
                       .sys_errno = sys_errno,
                       .segment = -1};
    _Static_assert(KVX_ID_BYTES == sizeof(event.tag) + sizeof(event.value), "the id travels in two numbers");
    memcpy(&event.tag, box->peer.engine_id, sizeof(event.tag));
    memcpy(&event.value, box->peer.engine_id + sizeof(event.tag), sizeof(event.value));
    box->peer.token = 0;
    return kvx_ring_push(&core->ring, &event);
}

static bool peers_complete_import(kvx_core *core, import_box *box, int status, int sys_errno) {
    kvx_event event = {.kind = KVX_EV_IMPORT,
                       .status = status,
                       .token = box->import.token,
                       .id = box->import.id,
                       .sys_errno = sys_errno,
                       .segment = -1};
    box->import.token = 0;
    box->state = status == KVX_OK ? IMPORT_READY : IMPORT_FAILED;
    return kvx_ring_push(&core->ring, &event);
}

/* -- peers ------------------------------------------------------------------------------------------------------ */

int kvx_peer_connect(kvx_engine *engine, uint32_t transport, const char *endpoint, const uint8_t *secret,
                     uint64_t *peer_p, uint64_t *token_p) {
    kvx_core *core = &engine->core;
    if (endpoint == NULL || endpoint[0] == '\0' || strlen(endpoint) >= KVX_ENDPOINT_MAX) {
        return KVX_E_INVALID;
    }
    if (transport >= core->slot_count) {
        return KVX_E_NO_TRANSPORT;
    }
    peer_box *box = kvx_vault_take(sizeof(*box));
    if (box == NULL) {
        return KVX_E_NOMEM;
    }
    kvx_lock(core);
    int status = core->closing ? KVX_E_CLOSED : core->peers.count >= core->config.peers_max ? KVX_E_LIMIT : KVX_OK;
    if (status == KVX_OK && (!kvx_table_reserve(&core->peers, 1) || !kvx_ring_reserve(&core->ring, PEER_EVENTS))) {
        status = KVX_E_NOMEM;
    }
    uint64_t id = 0, token = 0;
    if (status == KVX_OK) {
        box->core = core;
        box->slot = transport;
        id = box->peer.id = core->next_id++;
        token = box->peer.token = core->next_id++;
        strcpy(box->peer.endpoint, endpoint);
        box->peer.encrypted = secret != NULL;
        if (secret != NULL) {
            memcpy(box->peer.secret, secret, KVX_SECRET_BYTES);
        }
        kvx_table_put(&core->peers, id, box);
        peers_update_gauges(core);
    }
    kvx_unlock(core);
    if (status != KVX_OK) {
        kvx_vault_give(box);
        return status;
    }
    kvx_slot *slot = &core->slots[transport];
    status = slot->ops.peer_connect(slot->transport, &box->peer);
    if (status != KVX_PENDING) {
        KVX_ASSERT(status != KVX_OK);
        kvx_lock(core);
        kvx_table_remove(&core->peers, id);
        kvx_ring_unreserve(&core->ring, PEER_EVENTS);
        peers_update_gauges(core);
        kvx_unlock(core);
        kvx_vault_give(box);
        return status;
    }
    *peer_p = id;
    *token_p = token;
    return KVX_OK;
}

void kvx_connect_done(kvx_peer *peer, int status, int sys_errno) {
    peer_box *box = (peer_box *)peer;
    kvx_core *core = box->core;
    kvx_lock(core);
    KVX_ASSERT(peer->token != 0);
    bool signal = peers_complete_connect(core, box, status, sys_errno);
    if (status == KVX_OK) {
        box->connected = true;
        KVX_COUNT(&core->counters->row[box->slot], peers_connected, 1);
    } else if (!box->closing) {
        kvx_table_remove(&core->peers, peer->id);
        peers_update_gauges(core);
        box->deferred_next = core->deferred_peers;
        core->deferred_peers = box;
    }
    kvx_unlock_signal(core, signal);
}

void kvx_peer_lost(kvx_peer *peer, int status) {
    peer_box *box = (peer_box *)peer;
    kvx_core *core = box->core;
    bool signal = false;
    kvx_lock(core);
    KVX_ASSERT(box->connected && !box->lost); /* the owner thread may just be offering an op, which will be refused */
    box->lost = true;
    __atomic_fetch_sub(&core->counters->row[box->slot].peers_connected, 1, __ATOMIC_RELAXED);
    if (!box->closing) { /* otherwise PEER_CLOSED says enough */
        KVX_COUNT(&core->counters->row[box->slot], peers_lost, 1);
        box->down_told = true;
        kvx_event event = {.kind = KVX_EV_PEER_DOWN, .status = status, .id = peer->id, .segment = -1};
        signal = kvx_ring_push(&core->ring, &event);
    }
    kvx_unlock_signal(core, signal);
}

static void peers_undefer_imports(kvx_core *core, peer_box *peer) {
    for (import_box **at = &core->deferred_imports; *at != NULL;) {
        if ((*at)->import.peer == &peer->peer) {
            (*at)->deferred = false;
            *at = (*at)->deferred_next;
        } else {
            at = &(*at)->deferred_next;
        }
    }
}

int kvx_peer_close(kvx_engine *engine, uint64_t peer, uint64_t *token_p) {
    kvx_core *core = &engine->core;
    kvx_lock(core);
    peer_box *box = kvx_table_get(&core->peers, peer);
    int status = core->closing ? KVX_E_CLOSED : box == NULL || box->closing ? KVX_E_NO_PEER : KVX_OK;
    if (status == KVX_OK) {
        box->closing = true;
        *token_p = box->close_token = core->next_id++;
        peers_undefer_imports(core, box);
    }
    kvx_unlock(core);
    if (status == KVX_OK) {
        kvx_slot *slot = &core->slots[box->slot];
        slot->ops.peer_close(slot->transport, &box->peer, NULL);
    }
    return status;
}

static void peers_import_unlink(kvx_core *core, import_box *box) {
    peer_box *peer = (peer_box *)box->import.peer;
    KVX_LIST_REMOVE(peer->imports, box);
    kvx_table_remove(&core->imports, box->import.id); /* unless it was let go of before */
    peers_update_gauges(core);
}

/* With the lock held. Which of a peer's places in the ring are not used by now decides what is given back. */
static bool peers_peer_end(kvx_core *core, peer_box *box, int status) {
    bool signal = false;
    uint32_t unused = PEER_EVENTS - 1; /* the connect's is used below at the latest */
    KVX_ASSERT(box->ops == 0);
    while (box->imports != NULL) {
        import_box *import = box->imports;
        if (import->import.token != 0) {
            signal |= peers_complete_import(core, import, status == KVX_OK ? KVX_E_PEER_LOST : status, 0);
        }
        peers_import_unlink(core, import);
        KVX_ASSERT(box->imports != import);
        kvx_vault_give(import);
    }
    if (box->peer.token != 0) {
        signal |= peers_complete_connect(core, box, status == KVX_OK ? KVX_E_PEER_LOST : status, 0);
    }
    if (box->connected && !box->lost) {
        __atomic_fetch_sub(&core->counters->row[box->slot].peers_connected, 1, __ATOMIC_RELAXED);
    }
    if (box->close_token != 0) {
        kvx_event event = {
            .kind = KVX_EV_PEER_CLOSED, .status = status, .token = box->close_token, .id = box->peer.id, .segment = -1};
        signal |= kvx_ring_push(&core->ring, &event);
        unused--;
    }
    if (box->down_told) {
        unused--;
    }
    kvx_ring_unreserve(&core->ring, unused);
    kvx_table_remove(&core->peers, box->peer.id); /* unless the connect failed */
    peers_update_gauges(core);
    kvx_vault_give(box);
    return signal;
}

void kvx_peer_closed(kvx_peer *peer) {
    peer_box *box = (peer_box *)peer;
    kvx_core *core = box->core;
    kvx_lock(core);
    KVX_ASSERT(box->closing);
    bool signal = peers_peer_end(core, box, KVX_OK);
    kvx_unlock_signal(core, signal);
}

/* -- imports ------------------------------------------------------------------------------------------------------ */

int kvx_mem_import(kvx_engine *engine, uint64_t peer, const kvx_remote *remote, uint64_t *import_p, uint64_t *token_p) {
    kvx_core *core = &engine->core;
    if (remote == NULL || remote->access == 0 || (remote->access & ~(uint32_t)(KVX_READ | KVX_WRITE)) != 0 ||
        (remote->flags & ~(uint32_t)KVX_REMOTE_MAP) != 0) {
        return KVX_E_INVALID;
    }
    if (remote->length == 0) {
        return KVX_E_LENGTH;
    }
    import_box *box = kvx_vault_take(sizeof(*box));
    if (box == NULL) {
        return KVX_E_NOMEM;
    }
    kvx_lock(core);
    peer_box *owner = kvx_table_get(&core->peers, peer);
    int status = KVX_OK;
    if (core->closing) {
        status = KVX_E_CLOSED;
    } else if (owner == NULL || owner->closing) {
        status = KVX_E_NO_PEER;
    } else if (owner->lost) {
        status = KVX_E_PEER_LOST;
    } else if (!owner->connected) {
        status = KVX_E_INVALID;
    } else if (core->imports.count >= core->config.grants_max) {
        status = KVX_E_LIMIT;
    } else if (!kvx_table_reserve(&core->imports, 1) || !kvx_ring_reserve(&core->ring, 1)) {
        status = KVX_E_NOMEM;
    }
    uint64_t id = 0, token = 0;
    if (status == KVX_OK) {
        id = box->import.id = core->next_id++;
        token = box->import.token = core->next_id++;
        box->import.peer = &owner->peer;
        box->import.remote = *remote;
        box->import.device = -1;
        KVX_LIST_PUSH(owner->imports, box);
        kvx_table_put(&core->imports, id, box);
        peers_update_gauges(core);
    }
    kvx_unlock(core);
    if (status != KVX_OK) {
        kvx_vault_give(box);
        return status;
    }
    kvx_slot *slot = &core->slots[owner->slot];
    status = slot->ops.mem_import(slot->transport, &box->import);
    if (status != KVX_PENDING) {
        KVX_ASSERT(status != KVX_OK);
        kvx_lock(core);
        peers_import_unlink(core, box);
        kvx_ring_unreserve(&core->ring, 1);
        kvx_unlock(core);
        kvx_vault_give(box);
        return status;
    }
    *import_p = id;
    *token_p = token;
    return KVX_OK;
}

void kvx_import_done(kvx_import *import, int status, int sys_errno) {
    import_box *box = (import_box *)import;
    kvx_core *core = ((peer_box *)import->peer)->core;
    kvx_lock(core);
    KVX_ASSERT(import->token != 0);
    bool signal = peers_complete_import(core, box, status, sys_errno);
    if (status != KVX_OK) {
        kvx_table_remove(&core->imports, import->id);
        peers_update_gauges(core);
    }
    signal |= kvx_import_maybe_drop(core, box);
    kvx_unlock_signal(core, signal);
}

bool kvx_import_maybe_drop(kvx_core *core, import_box *box) {
    bool unwanted = box->released || box->state == IMPORT_FAILED;
    if (!unwanted || box->state == IMPORT_PENDING || box->ops != 0 || box->deferred ||
        ((peer_box *)box->import.peer)->closing || core->closing) {
        return false;
    }
    box->deferred = true;
    box->deferred_next = core->deferred_imports;
    core->deferred_imports = box;
    return kvx_ring_kick(&core->ring);
}

int kvx_import_query(kvx_engine *engine, uint64_t import, kvx_import_info *info_p) {
    kvx_core *core = &engine->core;
    kvx_lock(core);
    import_box *box = kvx_table_get(&core->imports, import);
    int status = box == NULL || box->state != IMPORT_READY ? KVX_E_NO_IMPORT : KVX_OK;
    if (status == KVX_OK) {
        *info_p = (kvx_import_info){.id = import,
                                    .address = (uint64_t)(uintptr_t)box->import.mapping,
                                    .length = box->import.remote.length,
                                    .access = box->import.remote.access,
                                    .device = box->import.device};
    }
    kvx_unlock(core);
    return status;
}

/* With the lock held. */
static int peers_view_check(kvx_core *core, uint64_t import) {
    import_box *box = kvx_table_get(&core->imports, import);
    if (box == NULL || box->state != IMPORT_READY) {
        return KVX_E_NO_IMPORT;
    }
    if (box->import.mapping == NULL || box->import.device >= 0) { /* nothing for the CPU */
        return KVX_E_UNSUPPORTED;
    }
    if (kvx_table_get(&core->views, import) == NULL) {
        view_box *view = kvx_table_reserve(&core->views, 1) ? calloc(1, sizeof(*view)) : NULL;
        if (view == NULL) {
            return KVX_E_NOMEM;
        }
        kvx_table_put(&core->views, import, view);
    }
    return KVX_OK;
}

/* With the lock held: the view whose addresses go now, NULL when somebody else takes care of them. */
static view_box *peers_view_detach(kvx_core *core, uint64_t import) {
    view_box *view = kvx_table_get(&core->views, import);
    if (view == NULL || view->dropping) {
        if (view != NULL) {
            view->over = true;
        }
        return NULL;
    }
    kvx_table_remove(&core->views, import);
    return view;
}

static void peers_view_free(view_box *view) {
    if (view != NULL && view->zeros) {
        munmap(view->base, view->length);
    }
    free(view);
}

int kvx_import_viewed(kvx_engine *engine, uint64_t import, uint32_t viewed) {
    kvx_core *core = &engine->core;
    view_box *over = NULL;
    int status = KVX_OK;
    kvx_lock(core);
    if (viewed) {
        status = peers_view_check(core, import);
    } else {
        over = peers_view_detach(core, import);
    }
    kvx_unlock(core);
    peers_view_free(over);
    return status;
}

void kvx_view_drop(kvx_core *core, uint64_t import, void *base, uint64_t length) {
    kvx_lock(core);
    view_box *view = kvx_table_get(&core->views, import);
    if (view != NULL) {
        view->base = base;
        view->length = length;
        view->dropping = true;
    }
    kvx_unlock(core);
    if (view == NULL) {
        munmap(base, length);
        return;
    }
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    bool zeros = mmap(base, length, PROT_READ | PROT_WRITE, flags, -1, 0) != MAP_FAILED;
    kvx_lock(core);
    view->dropping = false;
    view->zeros = zeros;
    if (view->over) {
        kvx_table_remove(&core->views, import);
    } else {
        view = NULL;
    }
    kvx_unlock(core);
    peers_view_free(view);
}

void kvx_views_forget(kvx_core *core) {
    for (uint32_t i = 0; i < core->views.capacity; i++) {
        if (core->views.keys[i] != 0) {
            free(core->views.values[i]);
        }
    }
    kvx_table_free(&core->views);
}

void kvx_mapping_hide(kvx_import *import) {
    kvx_core *core = ((peer_box *)import->peer)->core;
    kvx_lock(core);
    import->mapping = NULL;
    kvx_unlock(core);
}

int kvx_import_release(kvx_engine *engine, uint64_t import) {
    kvx_core *core = &engine->core;
    kvx_lock(core);
    import_box *box = kvx_table_remove(&core->imports, import);
    int status = core->closing ? KVX_E_CLOSED : box == NULL ? KVX_E_NO_IMPORT : KVX_OK;
    bool signal = false;
    if (box != NULL) {
        box->released = true;
        peers_update_gauges(core);
        signal = kvx_import_maybe_drop(core, box);
    }
    kvx_unlock_signal(core, signal);
    if (status == KVX_OK) {
        kvx_deferred_run(core);
    }
    return status;
}

/* -- what had to wait for the owner thread ---------------------------------------------------------------------------
 */

void kvx_deferred_run(kvx_core *core) {
    for (;;) {
        kvx_lock(core);
        import_box *import = core->closing ? NULL : core->deferred_imports;
        peer_box *peer = core->closing || import != NULL ? NULL : core->deferred_peers;
        if (import != NULL) {
            core->deferred_imports = import->deferred_next;
        } else if (peer != NULL) {
            core->deferred_peers = peer->deferred_next;
            peer->closing = true;
        }
        kvx_unlock(core);
        if (import != NULL) {
            kvx_slot *slot = &core->slots[((peer_box *)import->import.peer)->slot];
            slot->ops.peer_close(slot->transport, import->import.peer, &import->import);
            kvx_lock(core);
            peers_import_unlink(core, import);
            kvx_unlock(core);
            kvx_vault_give(import);
        } else if (peer != NULL) {
            kvx_slot *slot = &core->slots[peer->slot];
            slot->ops.peer_close(slot->transport, &peer->peer, NULL);
        } else {
            return;
        }
    }
}

bool kvx_peers_sweep(kvx_core *core) {
    bool signal = false;
    core->deferred_imports = NULL;
    while (core->deferred_peers != NULL) {
        peer_box *box = core->deferred_peers;
        core->deferred_peers = box->deferred_next;
        signal |= peers_peer_end(core, box, KVX_E_CLOSED);
    }
    peer_box *box;
    while ((box = kvx_table_any(&core->peers)) != NULL) {
        signal |= peers_peer_end(core, box, KVX_E_CLOSED);
    }
    return signal;
}

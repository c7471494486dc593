/* transport_loop.c: an engine that talks to itself. The reference that the other transports are tested against.
 *
 * Everything that is not done inside `submit` waits in one queue; a progress step takes its head and does one thing:
 * answer a connect or an import, end a peer, or copy one chunk of an operation. With KVX_ENGINE_MANUAL nothing is done
 * inside `submit` and tests take the steps. Although both sides share a process, each chunk is checked as an owner
 * checks a stranger: generation, key (by a MAC over the request), access mode, bounds. */
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "proto/auth.h"
#include "list.h"
#include "core/device_memory.h"
#include "transport.h"

enum item_kind { ITEM_CONNECT, ITEM_IMPORT, ITEM_CLOSE, ITEM_OP };

typedef struct loop_item {
    enum item_kind kind;
    void *object; /* kvx_peer, kvx_import or kvx_op */
    struct loop_item *next;
    uint32_t segment; /* of an op: where to go on */
    uint64_t offset;
    uint64_t bytes;
} loop_item;

typedef struct loop_peer {
    loop_item connect;
    loop_item close; /* kept ready: closing cannot fail */
    struct loop_peer *previous, *next;
} loop_peer;

typedef struct loop_import {
    kvx_import *import;
    loop_item item;
    bool attached;
    bool on_device; /* known when it is answered */
    struct loop_import *previous, *next;
} loop_import;

typedef struct loop_transport {
    kvx_core *core;
    uint32_t slot;
    const kvx_engine_config *config;
    kvx_transport_counters *counters;
    int wake_fd;
    bool manual;
    uint8_t nonce[KVX_NONCE_BYTES];
    char endpoint[2 * KVX_ID_BYTES + 1];
    pthread_mutex_t lock;
    loop_item *first, *last;
    loop_import *imports;
    loop_peer *peers;
} loop_transport;

/* -- the queue; with the lock held ---------------------------------------------------------------------------- */

static void loop_queue_push(loop_transport *loop, loop_item *item) {
    item->next = NULL;
    KVX_QUEUE_APPEND(loop->first, loop->last, item, next);
}

static loop_item *loop_queue_pop(loop_transport *loop) {
    loop_item *item = loop->first;
    if (item != NULL) {
        loop->first = item->next;
        if (loop->first == NULL) {
            loop->last = NULL;
        }
    }
    return item;
}

static void loop_queue_unpop(loop_transport *loop, loop_item *item) {
    item->next = loop->first;
    loop->first = item;
    if (loop->last == NULL) {
        loop->last = item;
    }
}

static void loop_queue_remove(loop_transport *loop, const loop_item *item) {
    loop_item *before = NULL;
    for (loop_item *at = loop->first; at != NULL; before = at, at = at->next) {
        if (at == item) {
            if (before != NULL) {
                before->next = at->next;
            } else {
                loop->first = at->next;
            }
            if (loop->last == at) {
                loop->last = before;
            }
            return;
        }
    }
}

static void loop_post(loop_transport *loop, loop_item *item) {
    pthread_mutex_lock(&loop->lock);
    loop_queue_push(loop, item);
    pthread_mutex_unlock(&loop->lock);
    kvx_core_wake(loop->core, loop->slot, 0);
}

/* -- open, close, query ---------------------------------------------------------------------------------------- */

static int loop_open(kvx_core *core, uint32_t slot, const kvx_engine_config *config, void **transport_p, char *why,
                     size_t why_size) {
    loop_transport *loop = calloc(1, sizeof(*loop));
    int fd = kvx_core_wake_fd(core, slot, 0);
    if (loop == NULL || fd < 0) {
        snprintf(why, why_size, "loop: out of %s", loop == NULL ? "memory" : "file descriptors");
        free(loop);
        return fd < 0 ? KVX_E_FDS : KVX_E_NOMEM;
    }
    loop->core = core;
    loop->slot = slot;
    loop->config = config;
    loop->counters = kvx_core_counters(core, slot);
    loop->wake_fd = fd;
    loop->manual = (config->flags & KVX_ENGINE_MANUAL) != 0;
    kvx_random(loop->nonce, sizeof(loop->nonce));
    for (size_t i = 0; i < KVX_ID_BYTES; i++) {
        snprintf(loop->endpoint + 2 * i, 3, "%02x", config->engine_id[i]);
    }
    pthread_mutex_init(&loop->lock, NULL);
    *transport_p = loop;
    return KVX_OK;
}

static void loop_query(void *transport, kvx_transport_info *info_p) {
    loop_transport *loop = transport;
    *info_p = (kvx_transport_info){
        .caps = KVX_CAP_PUT | KVX_CAP_GET | KVX_CAP_NOTIFY | KVX_CAP_CHECK | KVX_CAP_SAME_HOST | KVX_CAP_OWN |
                KVX_CAP_BLOCKS | (loop->manual ? 0u : KVX_CAP_INLINE),
        .alignment = 1,
        .region_bytes_max = UINT64_MAX,
        .copies_x100 = 100,
        .memory = 1u << KVX_MEM_DRAM | 1u << KVX_MEM_HBM | 1u << KVX_MEM_PINNED,
        .local_memory = 1u << KVX_MEM_DRAM | 1u << KVX_MEM_HBM | 1u << KVX_MEM_PINNED,
    };
    snprintf(info_p->name, sizeof(info_p->name), "loop");
    snprintf(info_p->endpoint, sizeof(info_p->endpoint), "%s", loop->endpoint);
}

static void loop_import_forget(loop_transport *loop, loop_import *mine) {
    pthread_mutex_lock(&loop->lock);
    loop_queue_remove(loop, &mine->item);
    KVX_LIST_REMOVE(loop->imports, mine);
    pthread_mutex_unlock(&loop->lock);
    if (mine->attached) {
        kvx_grant_detach(loop->core, mine->import->remote.grant, false);
    }
    free(mine);
}

static void loop_peer_forget(loop_transport *loop, loop_peer *mine) {
    pthread_mutex_lock(&loop->lock);
    loop_queue_remove(loop, &mine->connect); /* not answered yet: the core will say that it was closed */
    KVX_LIST_REMOVE(loop->peers, mine);
    pthread_mutex_unlock(&loop->lock);
    free(mine);
}

/* Completes every queued op of `peer` (NULL = of everybody). */
static void loop_ops_fail(loop_transport *loop, const kvx_peer *peer, int status) {
    loop_item *failed = NULL;
    pthread_mutex_lock(&loop->lock);
    loop_item *kept_first = NULL, *kept_last = NULL;
    for (loop_item *item = loop_queue_pop(loop); item != NULL; item = loop_queue_pop(loop)) {
        bool ours = item->kind == ITEM_OP && (peer == NULL || ((kvx_op *)item->object)->import->peer == peer);
        item->next = NULL;
        if (ours) {
            item->next = failed;
            failed = item;
        } else if (kept_last != NULL) {
            kept_last = kept_last->next = item;
        } else {
            kept_first = kept_last = item;
        }
    }
    loop->first = kept_first;
    loop->last = kept_last;
    pthread_mutex_unlock(&loop->lock);
    while (failed != NULL) {
        loop_item *item = failed;
        failed = item->next;
        kvx_op_complete(item->object, status, item->bytes, 0, -1);
        free(item);
    }
}

static void loop_close(void *transport) {
    loop_transport *loop = transport;
    loop_ops_fail(loop, NULL, KVX_E_CLOSED);
    while (loop->imports != NULL) {
        loop_import_forget(loop, loop->imports);
    }
    while (loop->peers != NULL) {
        loop_peer_forget(loop, loop->peers);
    }
    pthread_mutex_destroy(&loop->lock);
    free(loop);
}

/* -- memory ------------------------------------------------------------------------------------------------------ */

static int loop_mem_register(void *transport, kvx_region *region) {
    (void)transport;
    (void)region; /* the core's table is all that is needed */
    return KVX_OK;
}

static int loop_mem_release(void *transport, kvx_region *region, kvx_grant *grant) {
    loop_transport *loop = transport;
    (void)region;
    if (grant != NULL) {
        pthread_mutex_lock(&loop->lock);
        for (loop_import *mine = loop->imports; mine != NULL; mine = mine->next) {
            if (mine->import->remote.grant == grant->id) {
                atomic_store(&mine->import->revoked, true);
            }
        }
        pthread_mutex_unlock(&loop->lock);
    }
    return KVX_OK; /* a chunk in progress holds a kvx_access, for which the core waits */
}

static int loop_mem_import(void *transport, kvx_import *import) {
    loop_transport *loop = transport;
    loop_import *mine = calloc(1, sizeof(*mine));
    if (mine == NULL) {
        return KVX_E_NOMEM;
    }
    mine->import = import;
    mine->item = (loop_item){.kind = ITEM_IMPORT, .object = import};
    import->transport_data = mine;
    pthread_mutex_lock(&loop->lock);
    KVX_LIST_PUSH(loop->imports, mine);
    pthread_mutex_unlock(&loop->lock);
    loop_post(loop, &mine->item);
    return KVX_PENDING;
}

/* -- peers --------------------------------------------------------------------------------------------------------- */

static int loop_peer_connect(void *transport, kvx_peer *peer) {
    loop_transport *loop = transport;
    loop_peer *mine = calloc(1, sizeof(*mine));
    if (mine == NULL) {
        return KVX_E_NOMEM;
    }
    mine->connect = (loop_item){.kind = ITEM_CONNECT, .object = peer};
    mine->close = (loop_item){.kind = ITEM_CLOSE, .object = peer};
    peer->transport_data = mine;
    pthread_mutex_lock(&loop->lock);
    KVX_LIST_PUSH(loop->peers, mine);
    pthread_mutex_unlock(&loop->lock);
    loop_post(loop, &mine->connect);
    return KVX_PENDING;
}

static int loop_peer_close(void *transport, kvx_peer *peer, kvx_import *import) {
    loop_transport *loop = transport;
    if (import != NULL) {
        loop_import_forget(loop, import->transport_data);
    } else { /* overtakes the operations that it ends */
        pthread_mutex_lock(&loop->lock);
        loop_queue_unpop(loop, &((loop_peer *)peer->transport_data)->close);
        pthread_mutex_unlock(&loop->lock);
        kvx_core_wake(loop->core, loop->slot, 0);
    }
    return KVX_OK;
}

/* -- operations ------------------------------------------------------------------------------------------------------
 */

typedef struct request {
    uint8_t nonce[KVX_NONCE_BYTES];
    uint64_t token, grant, generation;
    uint32_t kind, flags;
} request;

/* What travels on a wire elsewhere: a request with its authenticator, checked with the owner's copy of the key. */
static bool loop_authentic(const loop_transport *loop, const kvx_import *import, const kvx_grant *grant,
                           const kvx_op *op) {
    uint8_t sent[KVX_MAC_BYTES], expected[KVX_MAC_BYTES];
    request message = {.grant = import->remote.grant, .generation = import->remote.generation};
    memcpy(message.nonce, loop->nonce, sizeof(message.nonce));
    if (op != NULL) {
        message.token = op->token;
        message.kind = op->kind;
        message.flags = op->flags;
    }
    kvx_mac(import->remote.key, &message, sizeof(message), sent);
    kvx_mac(grant->key, &message, sizeof(message), expected);
    return kvx_mac_equal(sent, expected);
}

/* Opens the owner's side for `import`; on failure nothing is held. */
static int loop_access_begin(loop_transport *loop, kvx_import *import, const kvx_op *op, uint32_t rights,
                             kvx_access *access_p) {
    int status = kvx_access_begin_any(loop->core, import->remote.grant, import->remote.generation, access_p);
    if (status == KVX_OK) {
        status = loop_authentic(loop, import, access_p->grant, op) ? kvx_access_allow(access_p, rights) : KVX_E_KEY;
        if (status != KVX_OK) {
            kvx_access_end(loop->core, access_p);
        }
    } else if (status == KVX_E_UNKNOWN && atomic_load(&import->revoked)) {
        status = KVX_E_REVOKED; /* it was known once */
    }
    if (status != KVX_OK) {
        KVX_COUNT(loop->counters, refused, 1);
    }
    return status;
}

/* One piece; with KVX_OP_CHECK both sides are looked at. `corrupt`: flip a bit of what was delivered. */
static int loop_copy_piece(const loop_transport *loop, const kvx_op *op, kvx_place target, kvx_place source,
                           uint64_t length, bool corrupt) {
    bool check = (op->flags & KVX_OP_CHECK) != 0;
    uint32_t before = 0, after = 0;
    int status = check ? kvx_place_crc32c(source, length, &before) : KVX_OK;
    if (status == KVX_OK) {
        status = kvx_move(target, source, length, loop->config->nt_bytes_min, NULL);
    }
    if (status == KVX_OK && corrupt) {
        status = kvx_place_flip(target);
    }
    if (status == KVX_OK && check) {
        status = kvx_place_crc32c(target, length, &after);
    }
    return status == KVX_OK && before != after ? KVX_E_INTEGRITY : status;
}

static int loop_range_check(kvx_access *access, const kvx_op *op, loop_item *at) {
    for (uint32_t i = 0; i < op->count; i++) {
        if (kvx_access_range(access, op->segments[i].remote_offset, op->segments[i].length) != KVX_OK) {
            at->segment = i;
            return KVX_E_RANGE;
        }
    }
    return KVX_OK;
}

/* Copies up to chunk_bytes of the op. KVX_PENDING: more is left. */
static int loop_copy_chunk(loop_transport *loop, kvx_op *op, loop_item *at) {
    uint32_t rights = op->count == 0 ? 0 : op->kind == KVX_OP_PUT ? KVX_WRITE : KVX_READ;
    kvx_access access;
    int status = loop_access_begin(loop, op->import, op, rights, &access);
    if (status != KVX_OK) {
        return status;
    }
    if (at->bytes == 0 &&
        (status = loop_range_check(&access, op, at)) != KVX_OK) { /* all of it, before the first byte */
        KVX_COUNT(loop->counters, refused, 1);
    }
    uint64_t left = loop->config->chunk_bytes;
    while (status == KVX_OK && at->segment < op->count && left != 0) {
        const kvx_segment *segment = &op->segments[at->segment];
        uint64_t length = segment->length - at->offset;
        length = length < left ? length : left;
        kvx_place local = kvx_place_of(op->region, segment->local_offset + at->offset);
        kvx_place remote =
            kvx_place_of(access.grant->region, access.grant->offset + segment->remote_offset + at->offset);
        status = op->kind == KVX_OP_PUT
                     ? loop_copy_piece(loop, op, remote, local, length, op->corrupt && at->bytes == 0)
                     : loop_copy_piece(loop, op, local, remote, length, op->corrupt && at->bytes == 0);
        if (status != KVX_OK) {
            break;
        }
        KVX_COUNT(loop->counters, frames, 1);
        KVX_COUNT(loop->counters, copied_bytes, length);
        at->bytes += length;
        at->offset += length;
        left -= length;
        if (at->offset == segment->length) {
            at->segment++;
            at->offset = 0;
        }
    }
    kvx_access_end(loop->core, &access);
    return status == KVX_OK && at->segment < op->count ? KVX_PENDING : status;
}

/* Goes on with the op until it is done, failed, out of its chunk (KVX_PENDING) or waits for room (KVX_AGAIN). */
static int loop_op_advance(loop_transport *loop, kvx_op *op, loop_item *at) {
    if (atomic_load_explicit(&op->cancelled, memory_order_relaxed)) {
        return KVX_E_CANCELLED;
    }
    int status = KVX_OK;
    if (at->segment < op->count || op->count == 0) {
        status = loop_copy_chunk(loop, op, at);
    }
    if (status == KVX_OK && (op->flags & KVX_OP_NOTIFY)) {
        status = kvx_notify_post(loop->core, loop->slot, op->import->remote.grant, op->tag, op->value);
    }
    return status;
}

static void loop_op_finish(loop_transport *loop, kvx_op *op, int status, const loop_item *at) {
    if (op->kind == KVX_OP_PUT) {
        KVX_COUNT(loop->counters, served_put_bytes, at->bytes);
    } else {
        KVX_COUNT(loop->counters, served_get_bytes, at->bytes);
    }
    kvx_op_complete(op, status, at->bytes, 0, status != KVX_OK && at->segment < op->count ? (int)at->segment : -1);
}

static int loop_submit(void *transport, kvx_op *op) {
    loop_transport *loop = transport;
    loop_item at = {.kind = ITEM_OP, .object = op};
    const loop_import *import = op->import->transport_data;
    bool on_device = import->on_device || (op->region != NULL && (op->region->flags & KVX_REGION_DEVICE));
    if (!loop->manual && !on_device && op->bytes <= loop->config->inline_bytes_max) { /* a driver's copy may block */
        int status = KVX_PENDING;
        while (status == KVX_PENDING) { /* a chunk may be smaller than what is small enough for this thread */
            status = loop_op_advance(loop, op, &at);
        }
        if (status != KVX_AGAIN) {
            loop_op_finish(loop, op, status, &at);
            return KVX_PENDING;
        }
    }
    loop_item *item = malloc(sizeof(*item));
    if (item == NULL) {
        if (at.bytes != 0) {
            loop_op_finish(loop, op, KVX_E_NOMEM, &at);
            return KVX_PENDING;
        }
        return KVX_E_NOMEM;
    }
    *item = at;
    loop_post(loop, item);
    return KVX_PENDING;
}

/* -- progress
 * ---------------------------------------------------------------------------------------------------------- */

static void loop_import_answer(loop_transport *loop, kvx_import *import) {
    loop_import *mine = import->transport_data;
    kvx_access access;
    int status = loop_access_begin(loop, import, NULL, 0, &access);
    if (status == KVX_OK) {
        mine->on_device = (access.grant->region->flags & KVX_REGION_DEVICE) != 0;
        kvx_access_end(loop->core, &access);
        kvx_grant_attach(loop->core, import->remote.grant);
        mine->attached = true;
    }
    kvx_import_done(import, status, 0);
}

static void loop_peer_end(loop_transport *loop, kvx_peer *peer) {
    loop_peer *mine = peer->transport_data;
    loop_ops_fail(loop, peer, KVX_E_PEER_LOST);
    for (;;) {
        pthread_mutex_lock(&loop->lock);
        loop_import *found = loop->imports;
        while (found != NULL && found->import->peer != peer) {
            found = found->next;
        }
        pthread_mutex_unlock(&loop->lock);
        if (found == NULL) {
            break;
        }
        loop_import_forget(loop, found);
    }
    loop_peer_forget(loop, mine);
    kvx_peer_closed(peer);
}

/* One step. False: the head of the queue waits for room in the notification queue. */
static bool loop_item_run(loop_transport *loop, loop_item *item) {
    if (item->kind == ITEM_CONNECT) {
        kvx_peer *peer = item->object;
        bool same = strcmp(peer->endpoint, loop->endpoint) == 0;
        kvx_connect_done(peer, same ? KVX_OK : KVX_E_UNREACHABLE, 0);
    } else if (item->kind == ITEM_IMPORT) {
        loop_import_answer(loop, item->object);
    } else if (item->kind == ITEM_CLOSE) {
        loop_peer_end(loop, item->object);
    } else {
        int status = loop_op_advance(loop, item->object, item);
        if (status == KVX_PENDING || status == KVX_AGAIN) {
            pthread_mutex_lock(&loop->lock);
            loop_queue_unpop(loop, item);
            pthread_mutex_unlock(&loop->lock);
            return status == KVX_PENDING;
        }
        loop_op_finish(loop, item->object, status, item);
        free(item);
    }
    return true;
}

static int loop_progress(void *transport, uint32_t thread, int timeout_ms) {
    loop_transport *loop = transport;
    (void)thread;
    pthread_mutex_lock(&loop->lock);
    loop_item *item = loop_queue_pop(loop);
    pthread_mutex_unlock(&loop->lock);
    if (item != NULL && loop_item_run(loop, item)) {
        return 1;
    }
    struct pollfd wait = {.fd = loop->wake_fd, .events = POLLIN};
    if (timeout_ms != 0 && poll(&wait, 1, timeout_ms) > 0) {
        uint64_t count;
        ssize_t got = read(loop->wake_fd, &count, sizeof(count));
        (void)got;
    }
    return 0;
}

const kvx_transport_ops kvx_transport_loop = {
    .abi_version = KVX_ABI_VERSION,
    .name = "loop",
    .open = loop_open,
    .close = loop_close,
    .query = loop_query,
    .mem_register = loop_mem_register,
    .mem_release = loop_mem_release,
    .mem_import = loop_mem_import,
    .peer_connect = loop_peer_connect,
    .peer_close = loop_peer_close,
    .submit = loop_submit,
    .progress = loop_progress,
};

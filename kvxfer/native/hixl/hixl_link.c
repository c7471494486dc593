/* hixl_link.c: links as the machine of hixl_state.c wants them: the calls in threads of their own, and which way leads
 * to a grant.
 *
 * A call that has not returned when its transport closes is abandoned: its thread frees what it holds when it comes
 * back, and until then it is counted among the process's zombies. */
#define _GNU_SOURCE
#include "hixl/hixl.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Atomic uint32_t zombies;

uint32_t kvx_hixl_zombies(void) {
    return atomic_load(&zombies);
}

/* -- calls --------------------------------------------------------------------------------------------------------- */

static void hixl_link_call_free(hixl_call *call) {
    pthread_mutex_destroy(&call->lock);
    free(call);
}

static int hixl_link_call_make(hixl_call *call) {
    const kvx_ascend_api *api = call->api;
    int status;
    if (call->route == HIXL_BY_NETWORK) {
        return call->disconnects ? api->disconnect(call->engine, call->remote, call->timeout_ms, &call->raw)
                                 : api->connect(call->engine, call->remote, call->timeout_ms, &call->raw);
    }
    if (!call->disconnects) {
        return api->stream_open(call->device_index, &call->stream, &call->raw);
    }
    status = api->stream_abort(call->device_index, call->stream, &call->raw);
    if (status == KVX_OK) {
        (void)api->stream_close(call->device_index, call->stream, true, &call->raw);
    }
    return status;
}

static void *hixl_link_call_main(void *argument) {
    hixl_call *call = argument;
    call->status = hixl_link_call_make(call);
    pthread_mutex_lock(&call->lock);
    if (call->overdue) {
        atomic_fetch_sub(&zombies, 1);
        call->overdue = false;
    }
    bool abandoned = call->abandoned;
    if (!abandoned) { /* the transport cannot go while we hold call->lock: it would have to abandon us first */
        hixl_device *device = call->device;
        hixl_transport *hixl = device->hixl;
        pthread_mutex_lock(&hixl->lock);
        call->next = device->returned;
        device->returned = call;
        kvx_core_wake(hixl->core, hixl->slot, (uint32_t)device->index + 1);
        pthread_mutex_unlock(&hixl->lock);
    }
    pthread_mutex_unlock(&call->lock);
    if (abandoned) {
        hixl_link_call_free(call);
    }
    return NULL;
}

bool kvx_hixl_thread(void *(*run)(void *), void *argument) {
    sigset_t all, before;
    pthread_attr_t attributes;
    pthread_t id;
    sigfillset(&all);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int result = pthread_create(&id, &attributes, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return result == 0;
}

static void hixl_link_run_actions(hixl_link *link, uint32_t todo, uint64_t now_ms);

static void hixl_link_call_start(hixl_link *link, bool disconnects, uint64_t now_ms) {
    hixl_device *device = link->device;
    hixl_call *call = calloc(1, sizeof *call);
    if (call != NULL) {
        pthread_mutex_init(&call->lock, NULL);
        call->disconnects = disconnects;
        call->route = link->route;
        call->api = device->hixl->api;
        call->device = device;
        call->link = link;
        call->device_index = device->index;
        call->engine = device->engine;
        call->stream = link->stream;
        call->timeout_ms = (int32_t)(disconnects ? link->machine.disconnect_ms : link->machine.connect_ms);
        memcpy(call->remote, link->remote, sizeof call->remote);
        link->call = call;
        if (kvx_hixl_thread(hixl_link_call_main, call)) {
            return;
        }
        link->call = NULL;
        hixl_link_call_free(call);
    }
    hixl_link_run_actions(link, kvx_hixl_machine_returned(&link->machine, now_ms, KVX_E_NOMEM), now_ms);
}

static void hixl_link_call_collect(hixl_call *call, uint64_t now_ms) {
    hixl_link *link = call->link;
    link->call = NULL;
    if (call->route == HIXL_BY_COPY) {
        bool gone = call->disconnects && call->status == KVX_OK;
        link->stream = gone ? NULL : call->stream;
    }
    if (!call->disconnects) {
        link->raw = call->raw;
    }
    pthread_mutex_lock(&call->lock); /* its thread may still hold it */
    pthread_mutex_unlock(&call->lock);
    hixl_link_run_actions(link, kvx_hixl_machine_returned(&link->machine, now_ms, call->status), now_ms);
    hixl_link_call_free(call);
}

void kvx_hixl_calls_returned(hixl_device *device, uint64_t now_ms) {
    for (;;) {
        pthread_mutex_lock(&device->hixl->lock);
        hixl_call *call = device->returned;
        if (call != NULL) {
            device->returned = call->next;
        }
        pthread_mutex_unlock(&device->hixl->lock);
        if (call == NULL) {
            return;
        }
        hixl_link_call_collect(call, now_ms);
    }
}

/* -- what the machine says ------------------------------------------------------------------------------------------
 */

/* Any peer that uses the link and is alive can say whether the process behind it is well. */
static void hixl_link_send_ping(hixl_link *link, uint64_t now_ms) {
    hixl_transport *hixl = link->device->hixl;
    pthread_mutex_lock(&hixl->lock);
    hixl_peer *found = NULL;
    for (hixl_peer *peer = hixl->peers; peer != NULL && found == NULL; peer = peer->next) {
        for (uint32_t i = 0; i < peer->link_count && found == NULL; i++) {
            bool heard = peer->conn != NULL && peer->conn->state == HIXL_OPEN && !peer->lost && !peer->closing;
            found = peer->links[i] == link && heard ? peer : NULL;
        }
    }
    link->ping_peer = found;
    if (found != NULL) {
        link->ping_number = ++found->pings;
        kvx_frame frame = {.type = KVX_FRAME_PING,
                           .op = link->ping_number,
                           .tag = kvx_hixl_peer_witness(found),
                           .value = (uint32_t)link->physical};
        kvx_hixl_send(found->conn, &frame, NULL, NULL);
    }
    pthread_mutex_unlock(&hixl->lock);
    if (found == NULL) {
        hixl_link_run_actions(link, kvx_hixl_machine_pong(&link->machine, now_ms, KVX_E_PEER_LOST), now_ms);
    }
}

/* What is registered by now is what the connection will know. */
static void hixl_link_versions_note(hixl_link *link) {
    hixl_transport *hixl = link->device->hixl;
    pthread_mutex_lock(&hixl->lock);
    link->local_version = link->device->version;
    pthread_mutex_unlock(&hixl->lock);
    link->remote_version = link->known_version;
}

static void hixl_link_on_overdue(hixl_link *link) {
    hixl_call *call = link->call;
    if (call == NULL) {
        return;
    }
    pthread_mutex_lock(&call->lock);
    pthread_mutex_lock(&link->device->hixl->lock);
    bool back = false; /* returned in this very moment */
    for (hixl_call *at = link->device->returned; at != NULL; at = at->next) {
        back |= at == call;
    }
    pthread_mutex_unlock(&link->device->hixl->lock);
    if (!back && !call->overdue) {
        call->overdue = true;
        atomic_fetch_add(&zombies, 1);
    }
    pthread_mutex_unlock(&call->lock);
}

static void hixl_link_run_actions(hixl_link *link, uint32_t todo, uint64_t now_ms) {
    if (link->machine.state == HIXL_ZOMBIE) {
        hixl_link_on_overdue(link);
    }
    if (todo & HIXL_DO_SETTLE) {
        kvx_hixl_xfer_settle(link);
    }
    if (todo & HIXL_DO_REFUSE) {
        kvx_hixl_xfer_refuse(link, link->machine.refusal);
    }
    if (todo & HIXL_DO_PING) {
        link->raw = 0; /* from here on it is about what comes */
        hixl_link_send_ping(link, now_ms);
    }
    if (todo & HIXL_DO_CONNECT) {
        link->raw = 0;
        hixl_link_versions_note(link);
        hixl_link_call_start(link, false, now_ms);
    }
    if (todo & HIXL_DO_DISCONNECT) {
        hixl_link_call_start(link, true, now_ms);
    }
}

void kvx_hixl_link_want(hixl_link *link, uint64_t now_ms) {
    if (link->machine.state == HIXL_UP) {
        return;
    }
    bool refused = kvx_hixl_zombies() >= HIXL_ZOMBIES_MAX;
    hixl_link_run_actions(link, kvx_hixl_machine_want(&link->machine, now_ms, refused), now_ms);
}

void kvx_hixl_link_fail(hixl_link *link, uint64_t now_ms, bool broken) {
    hixl_link_run_actions(link, kvx_hixl_machine_fail(&link->machine, now_ms, broken), now_ms);
}

void kvx_hixl_link_turn(hixl_link *link, uint64_t now_ms) {
    if (link->machine.pinging) {
        hixl_transport *hixl = link->device->hixl;
        pthread_mutex_lock(&hixl->lock);
        const hixl_peer *peer = link->ping_peer;
        bool lost = peer == NULL || peer->lost || peer->closing;
        bool answered = !lost && peer->pongs >= link->ping_number;
        int status = lost ? KVX_E_PEER_LOST : peer->pong_status;
        pthread_mutex_unlock(&hixl->lock);
        if (lost || answered) {
            hixl_link_run_actions(link, kvx_hixl_machine_pong(&link->machine, now_ms, status), now_ms);
        }
    }
    hixl_link_run_actions(link, kvx_hixl_machine_time(&link->machine, now_ms), now_ms);
}

/* -- which way ------------------------------------------------------------------------------------------------------
 */

/* May `device` copy to and from that device of this host by itself? */
static bool hixl_link_can_copy_directly(hixl_device *device, int32_t physical) {
    hixl_transport *hixl = device->hixl;
    if (device->physical == physical) {
        return true;
    }
    for (uint32_t i = 0; i < hixl->device_count; i++) {
        int32_t can = 0;
        if (hixl->devices[i].physical == physical) {
            return hixl->api->device_peer(device->index, (int32_t)i, &can, NULL) == KVX_OK && can == 1;
        }
    }
    return false; /* not one that this process sees */
}

static int hixl_link_route_for(hixl_device *device, const hixl_location *location, hixl_route *route_p, char *name,
                               size_t size) {
    hixl_transport *hixl = device->hixl;
    bool here = memcmp(location->boot_id, hixl->boot_id, sizeof hixl->boot_id) == 0;
    bool inside = here && location->process == kvx_hixl_process();
    bool copies = !(hixl->config->flags & KVX_ENGINE_NO_IPC);
    bool reaches = inside || location->key[0] != '\0';
    if (here && copies && reaches &&
        (location->kind != KVX_MEM_HBM || hixl_link_can_copy_directly(device, location->physical))) {
        *route_p = HIXL_BY_COPY;
        snprintf(name, size, "copy %016llx %d", (unsigned long long)location->epoch, location->physical);
        return KVX_OK;
    }
    *route_p = HIXL_BY_NETWORK;
    snprintf(name, size, "%s", location->engine);
    /* a device cannot be connected to itself */
    return here && device->physical == location->physical ? KVX_E_UNSUPPORTED : KVX_OK;
}

static hixl_link *hixl_link_new(hixl_device *device, hixl_route route, const char *name, hixl_peer *copier) {
    const kvx_engine_config *config = device->hixl->config;
    hixl_link *link = device->link_count >= HIXL_LINKS_MAX ? NULL : calloc(1, sizeof *link);
    if (link == NULL) {
        return NULL;
    }
    link->device = device;
    link->route = route;
    link->copier = copier;
    link->window = HIXL_WINDOW_MIN;
    memcpy(link->remote, name, strlen(name));
    kvx_hixl_machine_init(&link->machine, route == HIXL_BY_NETWORK, config->connect_ms, config->connect_ms,
                          config->connect_ms);
    link->next = device->links;
    device->links = link;
    device->link_count++;
    return link;
}

int kvx_hixl_link_for(hixl_device *device, hixl_import *import, hixl_link **link_p) {
    hixl_transport *hixl = device->hixl;
    const hixl_location *location = &import->location;
    hixl_route route;
    char name[HIXL_ENGINE_TEXT];
    hixl_link *link = import->links[device->index];
    if (link == NULL) {
        int status = hixl_link_route_for(device, location, &route, name, sizeof name);
        if (status != KVX_OK) {
            return status;
        }
        hixl_peer *copier = route == HIXL_BY_COPY ? import->peer : NULL;
        link = device->links;
        while (link != NULL && (strcmp(link->remote, name) != 0 || link->copier != copier)) {
            link = link->next;
        }
        if (link == NULL && (link = hixl_link_new(device, route, name, copier)) == NULL) {
            return device->link_count >= HIXL_LINKS_MAX ? KVX_E_LIMIT : KVX_E_NOMEM;
        }
        pthread_mutex_lock(&hixl->lock);
        bool used = kvx_hixl_link_use(import->peer, link);
        pthread_mutex_unlock(&hixl->lock);
        if (!used) {
            return KVX_E_NOMEM;
        }
        import->links[device->index] = link;
        if (import->heard > link->heard) {
            link->heard = import->heard;
            link->physical = location->physical;
            if (link->epoch != location->epoch) { /* another process answers to that name now */
                link->epoch = location->epoch;
                link->known_version = 0;
                kvx_hixl_link_fail(link, kvx_now_ms(), false);
            }
        }
        if (link->epoch == location->epoch && location->known > link->known_version) {
            link->known_version = location->known;
        }
    }
    *link_p = link;
    return KVX_OK;
}

/* -- ends -----------------------------------------------------------------------------------------------------------
 */

bool kvx_hixl_link_over(const hixl_link *link) {
    return link->users == 0 && link->first == NULL && link->live == 0 && link->machine.state == HIXL_DOWN &&
           link->call == NULL;
}

static void hixl_link_unmap_all(hixl_link *link) {
    hixl_peer *peer = link->copier;
    hixl_transport *hixl = link->device->hixl;
    if (peer == NULL) {
        return;
    }
    pthread_mutex_lock(&hixl->lock);
    if (--peer->copy_links == 0 && (peer->lost || peer->closing)) {
        kvx_hixl_todo(peer);
    }
    pthread_mutex_unlock(&hixl->lock);
}

void kvx_hixl_link_free(hixl_link *link) {
    hixl_device *device = link->device;
    hixl_link **at = &device->links;
    while (*at != link) {
        at = &(*at)->next;
    }
    *at = link->next;
    device->link_count--;
    if (link->machine.state == HIXL_DOWN) { /* otherwise its stream may still use them */
        kvx_hixl_maps_drop(link);
        hixl_link_unmap_all(link);
    }
    free(link);
}

/* One that is up is taken down, as bounded as ever: with the last of them goes the right to free the memory. */
bool kvx_hixl_links_close(hixl_device *device) {
    bool clean = true;
    uint64_t until_ms = kvx_now_ms() + device->hixl->config->cancel_ms;
    for (hixl_link *link = device->links; link != NULL; link = link->next) {
        kvx_hixl_link_fail(link, kvx_now_ms(), false);
    }
    for (;;) {
        struct timespec pause = {.tv_nsec = 500000};
        uint64_t now_ms = kvx_now_ms();
        kvx_hixl_calls_returned(device, now_ms);
        bool out = false;
        for (hixl_link *link = device->links; link != NULL; link = link->next) {
            kvx_hixl_link_fail(link, now_ms, false);
            out |= link->call != NULL;
        }
        if (!out || now_ms >= until_ms) {
            break;
        }
        nanosleep(&pause, NULL);
    }
    for (hixl_link *link = device->links; link != NULL; link = link->next) {
        hixl_call *call = link->call;
        if (call != NULL) {
            hixl_link_on_overdue(link);
            pthread_mutex_lock(&call->lock);
            call->abandoned = true;
            pthread_mutex_unlock(&call->lock);
            link->call = NULL;
        }
        clean &= call == NULL && (link->machine.state == HIXL_DOWN || link->machine.pinging);
    }
    while (device->returned != NULL) { /* in this very moment: its thread did not see that it was abandoned */
        hixl_call *call = device->returned;
        device->returned = call->next;
        hixl_link_call_free(call);
    }
    return clean;
}

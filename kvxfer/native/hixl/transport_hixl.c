/* transport_hixl.c: the hixl transport: memory of Ascend devices, and host memory that their DMA reaches, moved by
 * HIXL between hosts and by copies between devices inside one. This file is the table of slots and the side thread;
 * hixl.h says who does what. */
#define _GNU_SOURCE
#include "hixl/hixl.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#define EVENTS_MAX 64

/* -- the side thread ------------------------------------------------------------------------------------------------
 */

static void hixl_progress_todo(hixl_transport *hixl) {
    for (;;) {
        pthread_mutex_lock(&hixl->lock);
        hixl_peer *peer = hixl->todo;
        if (peer != NULL) {
            hixl->todo = peer->todo_next;
            peer->todo_queued = false;
        }
        pthread_mutex_unlock(&hixl->lock);
        if (peer == NULL) {
            return;
        }
        kvx_hixl_peer_todo(peer);
    }
}

static void hixl_progress_woken(hixl_transport *hixl) {
    kvx_hixl_peers_woken(hixl);
    for (hixl_conn *conn = hixl->conns, *next; conn != NULL; conn = next) {
        next = conn->next;
        if (conn->held && conn->state == HIXL_OPEN) {
            kvx_hixl_owner_held(conn);
        }
    }
}

static void hixl_conn_expire(hixl_transport *hixl, hixl_conn *conn, uint64_t now_ms) {
    if (conn == NULL || conn->deadline_ms == 0 || conn->state == HIXL_DEAD) {
        return;
    }
    if (now_ms < conn->deadline_ms) {
        kvx_hixl_deadline(hixl, conn->deadline_ms);
    } else if (conn->role == KVX_STREAM_SIDE_ACCEPTOR) {
        kvx_hixl_owner_hang_up(conn);
    } else {
        kvx_hixl_peer_end(conn, KVX_E_TIMEOUT, ETIMEDOUT);
    }
}

static void hixl_check_deadlines(hixl_transport *hixl) {
    uint64_t now_ms = kvx_now_ms();
    if (hixl->deadline_ms == 0 || now_ms < hixl->deadline_ms) {
        return;
    }
    hixl->deadline_ms = 0;
    for (hixl_conn *conn = hixl->conns, *next; conn != NULL; conn = next) {
        next = conn->next;
        hixl_conn_expire(hixl, conn, now_ms);
    }
    pthread_mutex_lock(&hixl->lock);
    hixl_peer *peer = hixl->peers; /* others are put before it; only we take any out */
    pthread_mutex_unlock(&hixl->lock);
    for (; peer != NULL; peer = peer->next) {
        hixl_conn_expire(hixl, peer->conn, now_ms);
    }
}

static void hixl_reap(hixl_transport *hixl) {
    while (hixl->graveyard != NULL) {
        hixl_conn *conn = hixl->graveyard;
        hixl->graveyard = conn->grave_next;
        kvx_hixl_conn_free(conn);
    }
}

static int hixl_side_progress(hixl_transport *hixl, int timeout_ms) {
    struct epoll_event events[EVENTS_MAX];
    int count = epoll_wait(hixl->epoll_fd, events, EVENTS_MAX,
                           kvx_timeout_ms(hixl->deadline_ms, hixl->listener.retry_ms, timeout_ms));
    bool woken = false, accepts = false;
    for (int i = 0; i < count; i++) {
        void *what = events[i].data.ptr;
        if (what == &hixl->wake_fd) {
            uint64_t value;
            woken = read(hixl->wake_fd, &value, sizeof value) > 0;
        } else if (what == &hixl->listener) {
            accepts = true;
        } else {
            kvx_hixl_conn_event(what, events[i].events);
        }
    }
    if (woken) {
        hixl_progress_woken(hixl);
    }
    hixl_check_deadlines(hixl);
    hixl_progress_todo(hixl);
    hixl_reap(hixl);
    if (accepts) {
        kvx_hixl_accept(hixl);
    }
    kvx_listener_resume(&hixl->listener);
    return count > 0 ? count : 0;
}

static int hixl_progress(void *transport, uint32_t thread, int timeout_ms) {
    hixl_transport *hixl = transport;
    return thread == 0 ? hixl_side_progress(hixl, timeout_ms)
                       : kvx_hixl_device_progress(&hixl->devices[thread - 1], timeout_ms);
}

/* -- slots ------------------------------------------------------------------------------------------------------------
 */

static void hixl_free_all(hixl_transport *hixl) {
    kvx_hixl_devices_close(hixl);
    hixl_reap(hixl);
    kvx_hixl_listen_end(hixl);
    if (hixl->epoll_fd >= 0) {
        close(hixl->epoll_fd);
    }
    kvx_table_free(&hixl->grants);
    pthread_mutex_destroy(&hixl->lock);
    free(hixl);
}

/* HIXL names an engine by its address, so it must be one, and not "any". */
static int hixl_host_take(hixl_transport *hixl, char *why, size_t why_size) {
    const char *bind =
        hixl->config->hixl_bind != NULL && *hixl->config->hixl_bind ? hixl->config->hixl_bind : "127.0.0.1";
    char bare[64];
    struct in_addr v4;
    struct in6_addr v6;
    snprintf(bare, sizeof bare, "%s", *bind == '[' ? bind + 1 : bind);
    bare[strcspn(bare, "]")] = '\0';
    bool is_v4 = inet_pton(AF_INET, bare, &v4) == 1, is_v6 = !is_v4 && inet_pton(AF_INET6, bare, &v6) == 1;
    bool wildcard = (is_v4 && v4.s_addr == 0) || (is_v6 && IN6_IS_ADDR_UNSPECIFIED(&v6));
    if ((!is_v4 && !is_v6) || wildcard) { /* a wildcard suits the other transports, so it is no mistake as such */
        snprintf(why, why_size,
                 "hixl cannot use the address \"%s\", which becomes the name of its engine: set data_bind to a numeric "
                 "address of this host that its peers can reach, or let data_advertise name one first",
                 bind);
        return wildcard ? KVX_E_UNSUPPORTED : KVX_E_INVALID;
    }
    snprintf(hixl->host, sizeof hixl->host, is_v6 ? "[%.48s]" : "%.48s", bare);
    return KVX_OK;
}

static bool hixl_watch(hixl_transport *hixl, int fd, void *what) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = what};
    return epoll_ctl(hixl->epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0;
}

static int hixl_side_open(hixl_transport *hixl, char *why, size_t why_size) {
    int status = kvx_hixl_listen(hixl, why, why_size);
    if (status != KVX_OK) {
        return status;
    }
    hixl->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    hixl->wake_fd = kvx_core_wake_fd(hixl->core, hixl->slot, 0);
    if (hixl->epoll_fd < 0 || hixl->wake_fd < 0 || !hixl_watch(hixl, hixl->wake_fd, &hixl->wake_fd) ||
        !kvx_listener_watch(&hixl->listener, hixl->epoll_fd)) {
        snprintf(why, why_size, "hixl: no event descriptors: %s", strerror(errno));
        return errno == EMFILE || errno == ENFILE ? KVX_E_FDS : KVX_E_SYSTEM;
    }
    return KVX_OK;
}

static int hixl_open(kvx_core *core, uint32_t slot, const kvx_engine_config *config, void **transport_p, char *why,
                     size_t why_size) {
    const kvx_ascend_api *api = kvx_ascend_get(why, why_size);
    if (api == NULL) {
        return KVX_E_UNSUPPORTED;
    }
    if (api->facts.devices == 0) {
        snprintf(why, why_size, "hixl: the libraries are there, but this process sees no device");
        return KVX_E_NO_DEVICE;
    }
    hixl_transport *hixl = calloc(1, sizeof *hixl);
    if (hixl == NULL) {
        snprintf(why, why_size, "hixl: out of memory");
        return KVX_E_NOMEM;
    }
    hixl->core = core;
    hixl->slot = slot;
    hixl->config = config;
    hixl->counters = kvx_core_counters(core, slot);
    hixl->api = api;
    hixl->listener.fd = hixl->epoll_fd = -1;
    kvx_newcomers_init(&hixl->line);
    hixl->accepted_max = kvx_connections_max(config->accepted_max, 4);
    pthread_mutex_init(&hixl->lock, NULL);
    int status = hixl_host_take(hixl, why, why_size);
    status = status == KVX_OK ? kvx_hixl_devices_open(hixl, why, why_size) : status;
    status = status == KVX_OK ? hixl_side_open(hixl, why, why_size) : status;
    if (status != KVX_OK) {
        hixl_free_all(hixl);
        return status;
    }
    kvx_core_threads_set(core, slot, 1 + hixl->device_count);
    *transport_p = hixl;
    return KVX_OK;
}

static void hixl_close(void *transport) {
    hixl_transport *hixl = transport;
    pthread_mutex_lock(&hixl->lock);
    hixl->closing = true;
    pthread_mutex_unlock(&hixl->lock);
    for (uint32_t i = 0; i < hixl->device_count; i++) {
        hixl->stuck |= !kvx_hixl_links_close(&hixl->devices[i]);
    }
    for (uint32_t i = 0; i < hixl->device_count; i++) {
        kvx_hixl_xfers_close(&hixl->devices[i]);
    }
    kvx_hixl_peers_close(hixl);
    kvx_hixl_owner_close(hixl);
    hixl_free_all(hixl);
}

static void hixl_query(void *transport, kvx_transport_info *info_p) {
    const hixl_transport *hixl = transport;
    snprintf(info_p->name, sizeof info_p->name, "hixl");
    snprintf(info_p->endpoint, sizeof info_p->endpoint, "%s", hixl->endpoint);
    info_p->caps = KVX_CAP_PUT | KVX_CAP_GET | KVX_CAP_NOTIFY | KVX_CAP_MAP_HBM;
    info_p->alignment = 1; /* of what is offered; arenas are aligned where memory is made */
    info_p->region_bytes_max = UINT64_MAX;
    info_p->copies_x100 = 0;
    info_p->memory = info_p->local_memory = 1u << KVX_MEM_HBM | 1u << KVX_MEM_PINNED;
}

static int hixl_mem_release(void *transport, kvx_region *region, kvx_grant *grant) {
    hixl_transport *hixl = transport;
    if (grant != NULL) {
        return kvx_hixl_owner_revoke(hixl, grant);
    }
    kvx_hixl_region_forget(hixl, region);
    return KVX_OK;
}

const kvx_transport_ops kvx_transport_hixl = {
    .abi_version = KVX_ABI_VERSION,
    .name = "hixl",
    .open = hixl_open,
    .close = hixl_close,
    .query = hixl_query,
    .mem_register = kvx_hixl_mem_register,
    .mem_release = hixl_mem_release,
    .mem_import = kvx_hixl_mem_import,
    .peer_connect = kvx_hixl_peer_connect,
    .peer_close = kvx_hixl_peer_close,
    .submit = kvx_hixl_submit,
    .progress = hixl_progress,
};

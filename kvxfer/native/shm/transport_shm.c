/* transport_shm.c: the shm transport: engines of one host, one copy per byte or none.
 *
 * This file is the table of slots, the progress loop and the listener. The thread sleeps in epoll_wait until a socket,
 * the core or one of our own lists has work; without a handshake in progress it sleeps for ever. See shm.h for who owns
 * what. */
#define _GNU_SOURCE
#include "shm/shm.h"
#include "list.h"
#include "core/forks.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define EVENTS_MAX  64
#define ACCEPTS_MAX 64 /* in one turn */
#define BACKLOG     512

/* -- the listener ---------------------------------------------------------------------------------------------------
 */

static bool shm_evict(kvx_newcomer *one) {
    if (one != NULL) {
        kvx_shm_owner_end((shm_conn *)((uint8_t *)one - offsetof(shm_conn, newcomer)));
    }
    return one != NULL;
}

static void shm_accept_one(shm_transport *shm, int fd) {
    pid_t pid = 0;
    if (!kvx_shm_trusted(fd, &pid)) {
        KVX_COUNT(shm->counters, refused, 1);
        close(fd);
        return;
    }
    shm_conn *conn = kvx_shm_conn_new(shm, fd, pid, NULL);
    if (conn == NULL) {
        close(fd);
        return;
    }
    conn->deadline_ms = kvx_now_ms() + shm->config->handshake_ms;
    if (!kvx_shm_conn_watch(conn)) {
        kvx_shm_conn_free(conn);
        return;
    }
    pthread_mutex_lock(&shm->lock);
    KVX_LIST_PUSH(shm->conns, conn);
    pthread_mutex_unlock(&shm->lock);
    shm_evict(kvx_newcomers_surplus(&shm->line));
    kvx_newcomers_add(&shm->line, &conn->newcomer, NULL);
    kvx_shm_deadline(shm, conn->deadline_ms);
}

static void shm_accept_some(shm_transport *shm) {
    for (int i = 0; i < ACCEPTS_MAX; i++) {
        int fd = kvx_listener_accept(&shm->listener, NULL);
        if (fd < 0) {
            if (errno != EAGAIN) {
                kvx_listener_pause(&shm->listener, shm_evict(kvx_newcomers_oldest(&shm->line)));
            }
            return;
        }
        shm_accept_one(shm, fd);
    }
}

/* -- progress ---------------------------------------------------------------------------------------------------------
 */

static void shm_todo_run(shm_transport *shm) {
    for (;;) {
        pthread_mutex_lock(&shm->lock);
        shm_peer *peer = shm->todo;
        if (peer != NULL) {
            shm->todo = peer->todo_next;
            peer->todo_queued = false;
        }
        pthread_mutex_unlock(&shm->lock);
        if (peer == NULL) {
            return;
        }
        kvx_shm_peer_todo(peer);
    }
}

/* Peers and connections come at the head and go only on this thread, so that a head stays good for a walk. */
static shm_peer *shm_peers_head(shm_transport *shm) {
    pthread_mutex_lock(&shm->lock);
    shm_peer *head = shm->peers;
    pthread_mutex_unlock(&shm->lock);
    return head;
}

/* The core woke us: something was cancelled, or there is room for notifications again. */
static void shm_poll_all(shm_transport *shm) {
    for (shm_conn *conn = shm->conns, *next; conn != NULL; conn = next) {
        next = conn->next;
        if (conn->held) {
            kvx_shm_owner_held(conn);
        }
    }
    for (shm_peer *peer = shm_peers_head(shm); peer != NULL; peer = peer->next) {
        kvx_shm_peer_cancelled(peer);
    }
}

static void shm_check_deadlines(shm_transport *shm) {
    uint64_t now_ms;
    if (shm->deadline_ms == 0 || (now_ms = kvx_now_ms()) < shm->deadline_ms) {
        return;
    }
    shm->deadline_ms = 0;
    for (shm_conn *conn = shm->conns, *next; conn != NULL; conn = next) {
        next = conn->next;
        if (conn->deadline_ms != 0 && now_ms >= conn->deadline_ms) {
            KVX_COUNT(shm->counters, protocol_errors, 1);
            kvx_shm_owner_end(conn);
        } else {
            kvx_shm_deadline(shm, conn->deadline_ms);
        }
    }
    for (shm_peer *peer = shm_peers_head(shm); peer != NULL; peer = peer->next) {
        kvx_shm_peer_deadline(peer, now_ms);
    }
}

static void shm_reap(shm_transport *shm) {
    while (shm->graveyard != NULL) {
        shm_conn *conn = shm->graveyard;
        shm->graveyard = conn->grave_next;
        kvx_shm_conn_free(conn);
    }
}

static int shm_progress(void *transport, uint32_t thread, int timeout_ms) {
    shm_transport *shm = transport;
    struct epoll_event events[EVENTS_MAX];
    bool woken = false;
    (void)thread;
    int count = epoll_wait(shm->epoll_fd, events, EVENTS_MAX,
                           kvx_timeout_ms(shm->deadline_ms, shm->listener.retry_ms, timeout_ms));
    for (int i = 0; i < count; i++) {
        void *what = events[i].data.ptr;
        if (what == &shm->wake_fd) {
            uint64_t value;
            woken = read(shm->wake_fd, &value, sizeof(value)) > 0;
        } else if (what == &shm->listener) {
            shm_accept_some(shm);
        } else if ((uintptr_t)what & SHM_PROCESS) {
            kvx_shm_conn_gone((shm_conn *)((uint8_t *)what - SHM_PROCESS));
        } else {
            kvx_shm_conn_event(what, events[i].events);
        }
    }
    if (woken) {
        shm_poll_all(shm);
    }
    shm_todo_run(shm);
    shm_check_deadlines(shm);
    kvx_listener_resume(&shm->listener);
    shm_reap(shm);
    return count > 0 ? count : 0;
}

/* -- open and close ---------------------------------------------------------------------------------------------------
 */

static void shm_free(shm_transport *shm) {
    if (shm->listener.fd >= 0) {
        close(shm->listener.fd);
    }
    if (shm->epoll_fd >= 0) {
        close(shm->epoll_fd);
    }
    kvx_table_free(&shm->grants);
    pthread_mutex_destroy(&shm->lock);
    free(shm);
}

/* The same for all processes of one kernel between two starts of it, whatever their namespaces. */
static bool shm_boot_id_read(char id[33]) {
    char text[64];
    size_t kept = 0;
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof(text));
    if (fd >= 0) {
        close(fd);
    }
    for (ssize_t i = 0; i < got && kept < 32; i++) {
        if (text[i] != '-' && text[i] != '\n') {
            id[kept++] = text[i];
        }
    }
    id[kept] = '\0';
    return kept == 32;
}

static int shm_path_make(shm_transport *shm, char *why, size_t why_size) {
    const char *directory = shm->config->socket_dir;
    char id[13];
    const size_t most = sizeof(((struct sockaddr_un *)NULL)->sun_path) - 1;
    if (directory[0] != '/') {
        snprintf(why, why_size, "shm: socket_dir '%s' is not an absolute path", directory);
        return KVX_E_INVALID;
    }
    for (size_t i = 0; i < 6; i++) {
        snprintf(id + 2 * i, 3, "%02x", shm->config->engine_id[i]);
    }
    if (strlen(directory) + strlen("/e-.sock") + 12 > most) {
        snprintf(why, why_size, "shm: socket_dir '%s' is too long: a socket in it has a path of more than %zu bytes",
                 directory, most);
        return KVX_E_INVALID;
    }
    snprintf(shm->path, sizeof(shm->path), "%s/e-%s.sock", directory, id);
    snprintf(shm->endpoint, sizeof(shm->endpoint), "%s:%.200s", shm->boot_id, shm->path);
    return KVX_OK;
}

/* A socket file that nobody listens on is left from an engine that died. */
static bool shm_socket_is_stale(const struct sockaddr_un *address) {
    struct stat about;
    if (lstat(address->sun_path, &about) != 0 || !S_ISSOCK(about.st_mode)) {
        errno = EADDRINUSE;
        return false;
    }
    int fd = kvx_owned(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    bool refused =
        fd >= 0 && connect(fd, (const struct sockaddr *)address, sizeof(*address)) != 0 && errno == ECONNREFUSED;
    if (fd >= 0) {
        close(fd);
    }
    errno = EADDRINUSE;
    return refused;
}

static int shm_listen_open(shm_transport *shm, char *why, size_t why_size) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strcpy(address.sun_path, shm->path);
    shm->listener.fd = kvx_owned(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (shm->listener.fd < 0) {
        snprintf(why, why_size, "shm: no socket: %s", strerror(errno));
        return errno == EMFILE || errno == ENFILE ? KVX_E_FDS : KVX_E_SYSTEM;
    }
    (void)fchmod(shm->listener.fd, 0600); /* the file gets the mode of the socket: nobody can connect in between */
    const struct sockaddr *any = (const struct sockaddr *)&address;
    int bound = bind(shm->listener.fd, any, sizeof(address));
    if (bound != 0 && errno == EADDRINUSE && shm_socket_is_stale(&address) && unlink(shm->path) == 0) {
        bound = bind(shm->listener.fd, any, sizeof(address));
    }
    if (bound != 0) {
        snprintf(why, why_size, "shm: cannot listen on %s: %s", shm->path, strerror(errno));
        return KVX_E_SYSTEM;
    }
    if (chmod(shm->path, 0600) != 0 || listen(shm->listener.fd, BACKLOG) != 0) {
        snprintf(why, why_size, "shm: cannot listen on %s: %s", shm->path, strerror(errno));
        unlink(shm->path);
        return KVX_E_SYSTEM;
    }
    return KVX_OK;
}

static bool shm_watch(shm_transport *shm, int *fd) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = fd};
    return epoll_ctl(shm->epoll_fd, EPOLL_CTL_ADD, *fd, &event) == 0;
}

static int shm_open_all(shm_transport *shm, char *why, size_t why_size) {
    if (!shm_boot_id_read(shm->boot_id)) {
        snprintf(why, why_size, "shm: cannot read /proc/sys/kernel/random/boot_id, which tells hosts apart");
        return KVX_E_UNSUPPORTED;
    }
    int status = shm_path_make(shm, why, why_size);
    if (status != KVX_OK) {
        return status;
    }
    shm->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    shm->wake_fd = kvx_core_wake_fd(shm->core, shm->slot, 0);
    if (shm->epoll_fd < 0 || shm->wake_fd < 0) {
        snprintf(why, why_size, "shm: no event descriptors: %s", strerror(errno));
        return KVX_E_FDS;
    }
    status = shm_listen_open(shm, why, why_size);
    if (status == KVX_OK && (!shm_watch(shm, &shm->wake_fd) || !kvx_listener_watch(&shm->listener, shm->epoll_fd))) {
        snprintf(why, why_size, "shm: cannot watch descriptors: %s", strerror(errno));
        unlink(shm->path);
        return KVX_E_SYSTEM;
    }
    return status;
}

static int shm_open_slot(kvx_core *core, uint32_t slot, const kvx_engine_config *config, void **transport_p, char *why,
                         size_t why_size) {
    shm_transport *shm = calloc(1, sizeof(*shm));
    if (shm == NULL) {
        snprintf(why, why_size, "shm: out of memory");
        return KVX_E_NOMEM;
    }
    shm->core = core;
    shm->slot = slot;
    shm->config = config;
    shm->counters = kvx_core_counters(core, slot);
    shm->epoll_fd = shm->listener.fd = -1;
    shm->page = (uint64_t)sysconf(_SC_PAGESIZE);
    kvx_random(shm->probe, sizeof(shm->probe));
    kvx_newcomers_init(&shm->line);
    shm->accepted_max = kvx_connections_max(config->accepted_max, 8); /* two descriptors each */
    pthread_mutex_init(&shm->lock, NULL);
    int status = shm_open_all(shm, why, why_size);
    if (status != KVX_OK) {
        shm_free(shm);
        return status;
    }
    *transport_p = shm;
    return KVX_OK;
}

static void shm_close_slot(void *transport) {
    shm_transport *shm = transport;
    unlink(shm->path);
    while (shm->peers != NULL) { /* first: one of them may lead to ourselves */
        kvx_shm_peer_sweep(shm->peers);
    }
    kvx_shm_owner_close(shm);
    shm_reap(shm);
    shm_free(shm);
}

static void shm_query(void *transport, kvx_transport_info *info_p) {
    const shm_transport *shm = transport;
    *info_p = (kvx_transport_info){
        .caps = KVX_CAP_PUT | KVX_CAP_GET | KVX_CAP_NOTIFY | KVX_CAP_INLINE | KVX_CAP_MAP | KVX_CAP_SAME_HOST |
                KVX_CAP_CHECK,
        .alignment = 1,
        .region_bytes_max = UINT64_MAX,
        .copies_x100 = 100,
        .memory = 1u << KVX_MEM_DRAM | 1u << KVX_MEM_PINNED,
        .local_memory = 1u << KVX_MEM_DRAM | 1u << KVX_MEM_PINNED | 1u << KVX_MEM_HBM,
    };
    snprintf(info_p->name, sizeof(info_p->name), "shm");
    snprintf(info_p->endpoint, sizeof(info_p->endpoint), "%s", shm->endpoint);
}

static int shm_mem_register(void *transport, kvx_region *region) {
    (void)transport;
    (void)region;
    return KVX_OK;
}

static int shm_mem_release(void *transport, kvx_region *region, kvx_grant *grant) {
    if (grant != NULL) {
        return kvx_shm_owner_revoke(transport, grant);
    }
    kvx_shm_owner_forget(transport, region);
    return KVX_OK;
}

const kvx_transport_ops kvx_transport_shm = {
    .abi_version = KVX_ABI_VERSION,
    .name = "shm",
    .open = shm_open_slot,
    .close = shm_close_slot,
    .query = shm_query,
    .mem_register = shm_mem_register,
    .mem_release = shm_mem_release,
    .mem_import = kvx_shm_mem_import,
    .peer_connect = kvx_shm_peer_connect,
    .peer_close = kvx_shm_peer_close,
    .submit = kvx_shm_submit,
    .progress = shm_progress,
};

/* shm.h: private to the shm transport (transport_shm.c shm_conn.c shm_owner.c shm_peer.c
 * shm_import.c shm_map.c shm_copy.c).
 *
 * The initiator moves every byte by itself; the socket between two engines carries only who may and who no longer may.
 * A shared region travels as a file descriptor and is mapped, memory of the user is reached by cross-memory attach.
 *
 * One progress thread owns all sockets: it receives, tears down and frees. Other threads may send (conn->tx_lock)
 * and copy. shm->lock guards everything else that is not atomic; it is never held while memory is copied or unmapped.
 * Lock order: shm->lock, then tx_lock, then the core's.
 *
 * What makes a revoke safe is import->users: whoever touches the memory counts itself in and out. Shutting the import
 * sets a bit beside that number, from then on nobody comes in; the last one out reports, and only then is the owner
 * told. The mapping that copies go through outlives its imports, since the next request will want the same memory and
 * page tables are expensive; it goes when the owner says that the region goes. */
#ifndef KVX_SHM_H
#define KVX_SHM_H

#include <pthread.h>
#include <sys/types.h>

#include "proto/auth.h"
#include "core/newcomers.h"
#include "core/sockets.h"
#include "proto/refusal.h"
#include "core/table.h"
#include "transport.h"

#define SHM_MAGIC      0x4d53564bu /* "KVSM" */
#define SHM_VERSION    1
#define SHM_TX_MAX     1024                  /* answers queued on a connection: from then on it is not read */
#define SHM_READS_MAX  32                    /* messages of one connection before others get their turn */
#define SHM_RETRY_MS   5                     /* connect again when the listener's queue is full */
#define SHM_GRANULE    (UINT64_C(16) << 10)  /* page tables are filled for so much at once */
#define SHM_AHEAD_MAX  (UINT64_C(256) << 20) /* of a new mapping are filled before they are needed, so much */
#define SHM_AHEAD_TURN (UINT64_C(1) << 20)   /* before other jobs have their turn */
#define SHM_IDLE_MAX   256                   /* mappings of a peer that no import uses */
#define SHM_UNMAP_MAX  (UINT64_C(16) << 20)  /* larger mappings are unmapped by the copy pool */
#define SHM_FD_MISSED  (-2)                  /* a descriptor came, but we had no room for it */
#define SHM_PROCESS    1                     /* marks the address of a connection in the epoll set */
#define SHM_SHUT       0x80000000u           /* in shm_import.users */

enum shm_type {
    SHM_HELLO = 1, /* both ways, first */
    SHM_IMPORT,    /* initiator: may I use this grant? */
    SHM_IMPORTED,  /* owner: yes (and its memfd, or its address), or why not */
    SHM_REVOKE,    /* owner: stop using it */
    SHM_REVOKED,   /* initiator: nothing of ours uses it, and nothing will */
    SHM_DROP,      /* initiator: the same, by its own wish */
    SHM_NOTIFY,    /* initiator: tell your user this */
    SHM_NOTIFIED,  /* owner: queued, or why not */
    SHM_FORGET,    /* owner: a region is going, let go of its memory */
    SHM_BYE,       /* the sender goes on purpose */
    SHM_TYPES
};

enum shm_how { SHM_NOT = 0, SHM_BY_MAPPING = 1, SHM_BY_ATTACH = 2 };

/* All messages have this one form; what a type does not use is zero. The code at the end is made with the key of the
 * grant that the message is about (auth.h), over both nonces, the direction and the message; zero where there is none.
 */
typedef struct shm_message {
    uint32_t magic;
    uint8_t version;
    uint8_t type;
    uint16_t how;
    uint64_t counter; /* from 1, per direction */
    int32_t status;
    int32_t sys_errno;
    uint64_t handle; /* the initiator's name for the import */
    union {
        struct {
            uint8_t nonce[KVX_NONCE_BYTES];
            uint8_t engine_id[KVX_ID_BYTES];
        } hello;
        struct {
            uint64_t grant, generation, length;
            uint32_t access, zero;
        } import;
        struct {
            uint64_t at;     /* offset in the memfd */
            uint64_t region; /* the owner's name for it */
            uint64_t zero[2];
        } mapped; /* IMPORTED how 1, FORGET */
        struct {
            uint64_t at; /* address in the owner's process */
            uint64_t probe_address;
            uint8_t probe[KVX_NONCE_BYTES]; /* what lies there */
        } attached;                         /* IMPORTED how 2 */
        struct {
            uint64_t token, tag, value, zero;
        } notify;
    };
    uint8_t mac[KVX_MAC_BYTES];
} shm_message;
_Static_assert(sizeof(shm_message) == 80, "a message has no padding");

typedef struct shm_transport shm_transport;
typedef struct shm_peer shm_peer;
typedef struct shm_conn shm_conn;

typedef struct shm_packet {
    struct shm_packet *next;
    int fd; /* to pass on, or -1 */
    shm_message message;
} shm_packet;

enum shm_conn_state {
    SHM_GREETING, /* waiting for the other side's HELLO */
    SHM_OPEN,
    SHM_LINGER, /* we hung up on an initiator that may still be copying: its grants are quiet when it is gone */
    SHM_DEAD
};

struct shm_conn {
    shm_transport *shm;
    shm_peer *peer; /* of a dialler */
    enum shm_conn_state state;
    uint8_t nonce_mine[KVX_NONCE_BYTES], nonce_theirs[KVX_NONCE_BYTES];
    uint64_t rx_counter;
    uint64_t deadline_ms; /* of the greeting */
    kvx_newcomer newcomer;
    pid_t pid;
    kvx_table attached; /* of an acceptor: handle -> shm_attach */
    kvx_table regions;  /* likewise: those whose descriptor was sent */
    bool said_bye;
    bool gone;   /* the other process ended: what it still said is read, then the connection ends */
    bool held;   /* held_message waits for room in the notification queue */
    bool parked; /* not watched, although there may be something to read */
    shm_message held_message;

    int process_fd; /* readable when the other process has ended, or -1 */

    pthread_mutex_t tx_lock;
    int fd;
    uint64_t tx_counter;
    shm_packet *tx_first, *tx_last;
    uint32_t tx_count;
    bool reading;
    bool broken;

    struct shm_conn *previous, *next;
    struct shm_conn *grave_next;
};

/* An initiator's use of one of our grants. */
typedef struct shm_attach {
    shm_conn *conn;
    uint64_t handle;
    uint64_t grant;
    uint8_t key[KVX_KEY_BYTES];
    kvx_grant *revoked; /* by the core, which waits for it to be quiet */
    bool asked;         /* REVOKE was sent */
    bool by_attach;
    struct shm_attach *previous, *next; /* of the same grant, on all connections */
} shm_attach;

/* A part of a region as copies see it; shared by all imports inside of it. Views of the application are apart. */
typedef struct shm_map {
    shm_peer *peer;
    uint64_t region;
    uint64_t device, inode; /* what the owner calls the same must be the same */
    uint64_t begin;         /* in the file, on a page boundary */
    uint64_t length;
    uint8_t *base;
    bool writable;
    bool unwanted;            /* the region goes: no import may join any more */
    uint32_t imports;         /* that use it */
    _Atomic uint64_t *filled; /* a bit per granule whose page tables were filled; NULL = no need */
    kvx_job job;              /* unmaps it */
    kvx_job ahead;            /* fills page tables before anybody needs them; counts as one of the imports */
    uint64_t ahead_at;
    struct shm_map *previous, *next; /* of the peer, the last used one first */
} shm_map;

typedef struct shm_import {
    kvx_import *import; /* NULL once the core let go of it */
    shm_peer *peer;
    uint64_t handle;
    uint64_t length;
    uint8_t key[KVX_KEY_BYTES];
    _Atomic uint32_t users; /* and SHM_SHUT */
    _Atomic int why;        /* it was shut */
    bool pending;           /* import_done is still to come */
    bool attached;          /* the owner counts us */
    bool idle;              /* shut, and the last user is out */
    bool revoke;            /* the owner asked for it back */
    bool given_back;        /* and got it */
    bool retiring;          /* it goes for good */
    bool working;           /* a job in the copy pool does one of these two */
    enum shm_how how;
    uint8_t *remote; /* start of the grant: in the map, or in the owner's address space */
    shm_map *map;
    uint8_t *view; /* a mapping of its own for the application, on a page boundary */
    uint64_t view_length;
    uint64_t view_id; /* of the import, which may be gone before its view */
    kvx_job job;
    struct shm_import *previous, *next; /* of the peer */
} shm_import;

struct shm_peer {
    shm_transport *shm;
    kvx_peer *peer;
    shm_conn *conn;
    char path[KVX_ENDPOINT_MAX];
    uint64_t deadline_ms; /* of the connect; 0 = over */
    uint64_t retry_ms;
    bool other_host, malformed;
    bool told;      /* connect_done was called */
    bool connected; /* with KVX_OK */
    bool lost, lost_told, closing;
    pid_t pid;
    shm_import *imports;
    kvx_table by_handle;
    shm_map *maps, *maps_last;
    uint32_t idle_maps;
    kvx_table awaiting; /* token -> kvx_op: copied, NOTIFIED is still to come */
    bool todo_queued;
    struct shm_peer *todo_next;
    struct shm_peer *previous, *next;
};

struct shm_transport {
    kvx_core *core;
    uint32_t slot;
    const kvx_engine_config *config;
    kvx_transport_counters *counters;
    int epoll_fd, wake_fd;
    kvx_listener listener;
    char boot_id[33];
    char path[KVX_ENDPOINT_MAX];
    char endpoint[KVX_ENDPOINT_MAX];
    uint64_t page;
    uint8_t probe[KVX_NONCE_BYTES]; /* what initiators look for in our memory */
    pthread_mutex_t lock;
    kvx_table grants; /* grant -> first shm_attach */
    shm_conn *conns;  /* acceptors */
    shm_peer *peers;
    shm_peer *todo;
    shm_conn *graveyard;
    uint32_t accepted, accepted_max;
    kvx_newcomers line; /* those that have not said HELLO yet */
    bool closing;
    uint64_t deadline_ms; /* the next one of any connection or peer, 0 = none */
};

/* shm_conn.c: sockets and messages */
shm_conn *kvx_shm_conn_new(shm_transport *shm, int fd, pid_t pid, shm_peer *peer);
void kvx_shm_conn_free(shm_conn *conn);
bool kvx_shm_conn_watch(shm_conn *conn);
void kvx_shm_conn_unwatch(shm_conn *conn); /* until _watch */
/* Sends or queues; takes the descriptor. Never fails: a connection that cannot send breaks, and ends on the progress
 * thread.
 */
void kvx_shm_send(shm_conn *conn, shm_message *message, const uint8_t *key, int fd);
bool kvx_shm_authentic(const shm_conn *conn, const shm_message *message, const uint8_t key[KVX_KEY_BYTES]);
void kvx_shm_hello(shm_conn *conn, int status);
void kvx_shm_conn_event(shm_conn *conn, uint32_t events);
/* Its process_fd was told about, as the connection's address plus SHM_PROCESS. */
void kvx_shm_conn_gone(shm_conn *conn);
void kvx_shm_conn_read(shm_conn *conn, bool on);
void kvx_shm_conn_close(shm_conn *conn);    /* the socket, not the structure */
bool kvx_shm_trusted(int fd, pid_t *pid_p); /* the same user, or root */
void kvx_shm_deadline(shm_transport *shm, uint64_t at_ms);

/* shm_owner.c: what initiators ask of us; false = they broke the protocol */
bool kvx_shm_owner_message(shm_conn *conn, const shm_message *message);
void kvx_shm_owner_held(shm_conn *conn);
void kvx_shm_owner_hang_up(shm_conn *conn); /* they broke it, or were too slow */
void kvx_shm_owner_end(shm_conn *conn);     /* their end is closed */
int kvx_shm_owner_revoke(shm_transport *shm, kvx_grant *grant);
void kvx_shm_owner_forget(shm_transport *shm, const kvx_region *region);
void kvx_shm_owner_close(shm_transport *shm);

/* shm_peer.c: connections to owners */
int kvx_shm_peer_connect(void *transport, kvx_peer *peer);
int kvx_shm_peer_close(void *transport, kvx_peer *peer, kvx_import *import);
bool kvx_shm_peer_message(shm_conn *conn, const shm_message *message, int *fd_p);
void kvx_shm_peer_end(shm_conn *conn, int status, int sys_errno); /* the connection is gone */
void kvx_shm_peer_todo(shm_peer *peer);
void kvx_shm_peer_deadline(shm_peer *peer, uint64_t now_ms);
void kvx_shm_peer_cancelled(shm_peer *peer);
void kvx_shm_peer_sweep(shm_peer *peer); /* in close: complete and free everything */
void kvx_shm_todo(shm_peer *peer);       /* with the lock held: have the progress thread look at it */
/* The op's bytes are where they belong: tell the owner, and complete when it has queued that. */
void kvx_shm_notify(shm_import *import, kvx_op *op);

/* shm_import.c: grants of owners that we use */
int kvx_shm_mem_import(void *transport, kvx_import *import);
bool kvx_shm_on_imported(shm_peer *peer, shm_conn *conn, const shm_message *message, int *fd_p);
bool kvx_shm_on_revoke(shm_peer *peer, shm_conn *conn, const shm_message *message);
void kvx_shm_import_end(shm_import *import, int status, int sys_errno); /* with the lock held: import_done */
void kvx_shm_give_back_all(shm_peer *peer);
void kvx_shm_imports_free(shm_peer *peer); /* in close */
bool kvx_shm_enter(shm_import *import);
void kvx_shm_leave(shm_import *import);
void kvx_shm_shut(shm_import *import, int why); /* with the lock held */

/* shm_map.c: memory of others in our address space */
int kvx_shm_map(shm_import *import, const shm_message *message, int fd, int *errno_p);
void kvx_shm_hide(shm_import *import); /* with the lock held: before the view goes, while the core knows it */
void kvx_shm_unview(shm_import *import);
void kvx_shm_map_leave(shm_import *import);                /* with the lock held: the import needs its map no more */
void kvx_shm_maps_forget(shm_peer *peer, uint64_t region); /* with the lock held; 0 = all */
/* With the lock held: what is to be unmapped, one after the other; then, without it. */
shm_map *kvx_shm_map_unwanted(shm_peer *peer);
void kvx_shm_map_free(shm_map *map, bool by_job);
void kvx_shm_fill(const shm_import *import, uint64_t offset, uint64_t length);
int kvx_shm_probe(const shm_import *import, const shm_message *message, int *errno_p);

/* shm_copy.c: operations */
int kvx_shm_submit(void *transport, kvx_op *op);

#endif

/* hixl.h: private to the hixl transport (transport_hixl.c hixl_side.c hixl_owner.c hixl_peer.c hixl_device.c
 * hixl_link.c hixl_map.c hixl_queue.c hixl_xfer.c; hixl_state.c, hixl_backoff.c and hixl_location.c are pure).
 *
 * Two ways lead to a peer. The side link is a TCP connection of ours with the framing and the key proofs of stream.h:
 * it says where a grant lies, takes it back, announces what arrived, and answers when asked whether its process is
 * well. The bytes go by Huawei's HIXL, one engine per device, or by a copy between two devices of one host.
 *
 * Threads: progress thread 0 owns all sockets; progress thread 1 + d owns device d: its links, their machines and all
 * that is under way on them. Calls of the library that may never return (connect, disconnect) run in threads of their
 * own that nobody waits for. hixl->lock guards what several threads look at; it is never held during a vendor call. The
 * core's functions may be called with it held.
 *
 * What makes an end true: an op whose batches did not all complete ends only when the disconnect of their link has
 * returned, and an import answers QUIET only when no such op is left. Neither happens because time passed. */
#ifndef KVX_HIXL_H
#define KVX_HIXL_H

#include <pthread.h>
#include <sys/socket.h>

#include "ascend/ascend.h"
#include "hixl/hixl_backoff.h"
#include "hixl/hixl_state.h"
#include "core/newcomers.h"
#include "core/sockets.h"
#include "proto/stream.h"
#include "core/table.h"
#include "transport.h"
#include "turns.h"

#define HIXL_DEVICES_MAX      32
#define HIXL_LINKS_MAX        512 /* per device: what a communicator engine takes */
#define HIXL_ZOMBIES_MAX      8   /* calls that never returned, in this process; from then on no new connect */
#define HIXL_BATCH_OPS        1024
#define HIXL_BATCH_BYTES      (UINT64_C(8) << 20)
#define HIXL_WINDOW_MIN       (UINT64_C(16) << 20) /* under way on one link: how much a cancel may have to wait for */
#define HIXL_WINDOW_MAX       (UINT64_C(64) << 20) /* where that much is done between two looks */
#define HIXL_BATCHES_MAX      256                  /* under way on one engine: its slots are 512 */
#define HIXL_HEAD_POLLS       8                    /* batches of a link that are asked for at once, the oldest */
#define HIXL_AGAIN_MS         1                    /* the library is out of slots: try again */
#define HIXL_MAPS_MAX         64                   /* arenas of others that a link keeps mapped */
#define HIXL_KEY_FAILURES_MAX 8
#define HIXL_TX_MAX           (1u << 20) /* answers queued on a side link: from then on it is not read */
#define HIXL_READS_MAX        4          /* receives on one side link before others get their turn */
#define HIXL_HOLDER_MIN       32         /* side links that one grant may have in any case */
#define HIXL_ENGINE_TEXT      64
#define HIXL_LOCATION_UNITS   KVX_STREAM_UNITS_MAX

typedef struct hixl_transport hixl_transport;
typedef struct hixl_device hixl_device;
typedef struct hixl_link hixl_link;
typedef struct hixl_peer hixl_peer;
typedef struct hixl_conn hixl_conn;
typedef struct hixl_xfer hixl_xfer;

/* Where a grant lies: the units of LOCATION. */
typedef struct hixl_location {
    uint64_t address, length;
    uint32_t kind;    /* KVX_MEM_HBM, KVX_MEM_PINNED */
    int32_t physical; /* the device, as the host numbers it */
    uint64_t epoch;   /* of the owner's engine: another one after each start */
    uint64_t process; /* likewise of its process: the same as ours means the same address space */
    uint64_t version; /* which of its device's registrations it is in: a link made earlier does not know it */
    uint64_t known;   /* its device's registrations up to now */
    uint8_t boot_id[16];
    uint64_t arena_offset; /* of the address in what the key maps */
    uint64_t arena_length;
    char key[80];                  /* for devices of the same host, "" = none */
    char engine[HIXL_ENGINE_TEXT]; /* HIXL's name of the engine, "ip:port" */
} hixl_location;

/* -- devices and what is registered with them ------------------------------------------------------------------- */
typedef struct hixl_arena {
    uint64_t id;
    uint8_t *base;
    uint64_t length;
    void *handle;
    uint64_t version; /* the device's, when this was registered */
    uint32_t users;   /* regions */
    uint32_t told;    /* side links over which its key went: whoever is behind them may have it mapped */
    kvx_ascend_where where;
    char key[KVX_ASCEND_IPC_KEY_MAX];
    struct hixl_arena *next;
} hixl_arena;

struct hixl_device {
    hixl_transport *hixl;
    int32_t index; /* as this process numbers it */
    int32_t physical;
    int wake_fd;

    pthread_mutex_t open_lock; /* around vendor calls that open the engine and (de)register memory */
    void *engine;
    char id[HIXL_ENGINE_TEXT];

    /* hixl->lock */
    hixl_arena *arenas;
    uint32_t arena_count;
    uint64_t version;
    hixl_xfer *inbox_first, *inbox_last;
    struct hixl_call *returned;
    struct hixl_import *views; /* that are to be mapped for the application, are, or are to be no more */

    /* the device's thread */
    hixl_link *links;
    uint32_t link_count;
    struct hixl_map *maps; /* memory of other processes, each piece once */
    uint32_t batches;
    uint64_t due_ms;
    hixl_budget budget;
    uint64_t cpu_ns; /* that the thread had used when it last came back from waiting */
    bool moved;      /* in this turn: something was submitted or completed */
    bool only_looks; /* since then */
    bool thread_ready;
    kvx_ascend_op *ops; /* scratch of HIXL_BATCH_OPS */
    kvx_ascend_copy *copies;
};

/* -- links and what is under way on them; the device's thread unless said otherwise ------------------------------- */
typedef enum hixl_route { HIXL_BY_NETWORK, HIXL_BY_COPY } hixl_route;

typedef struct hixl_map {
    char key[80];
    uint8_t *base;
    uint32_t users; /* links and views */
    struct hixl_map *next;
} hixl_map;

typedef struct hixl_batch {
    hixl_xfer *xfer;
    void *request;
    uint64_t bytes;
    uint32_t segment; /* of the op, first of this batch */
    struct hixl_batch *next;
} hixl_batch;

struct hixl_link {
    hixl_device *device;
    hixl_route route;
    hixl_peer *copier;             /* by copy: whose it is alone, so that what is mapped goes before its side link */
    char remote[HIXL_ENGINE_TEXT]; /* HIXL's engine; or the name of the process and device */
    int32_t physical;              /* the other side's device */
    uint64_t epoch, heard;         /* of the latest LOCATION with this name: only its process is there */
    hixl_machine machine;
    hixl_backoff backoff;
    struct hixl_call *call;                 /* that is out */
    uint32_t raw;                           /* what the library answered when the link failed last; 0 = nothing */
    uint64_t local_version, remote_version; /* of memory that the connection knows */
    uint64_t known_version;                 /* of the other side's, from LOCATION */
    void *stream;                           /* by copy */
    hixl_map *maps[HIXL_MAPS_MAX];
    uint32_t map_count;
    hixl_xfer *first; /* all transfers of the link */
    struct {
        hixl_xfer *first, *last;
    } run[KVX_RANKS];     /* those with something to submit, the next one to be served first */
    uint32_t run_waiting; /* a bit for each rank that has some */
    kvx_turns turns;
    uint64_t grace_ms; /* the earliest of its transfers */
    hixl_batch *batch_first, *batch_last;
    uint32_t live; /* batches under way */
    uint64_t live_bytes;
    uint64_t window;   /* of live_bytes: grows when all of it was done before the next look */
    uint64_t again_ms; /* the library had no slot: not before */
    hixl_link *next;

    /* hixl->lock */
    uint32_t users;       /* peers */
    hixl_peer *ping_peer; /* who was asked */
    uint64_t ping_number;
};

struct hixl_xfer {
    kvx_op *op;
    hixl_device *device;
    hixl_peer *peer;
    struct hixl_import *import;
    hixl_link *link;
    hixl_xfer *next, *previous; /* inbox or link */
    hixl_xfer *run_next;
    uint32_t segment; /* what is not submitted yet begins here */
    uint64_t offset;  /* in that segment */
    uint64_t left;
    uint32_t live;              /* batches under way */
    bool running;               /* in the run queue */
    bool in_doubt;              /* a batch of it failed: it may still move until the disconnect has returned */
    uint64_t bytes;             /* moved */
    int status, segment_failed; /* -1: not known */
    uint32_t raw;               /* the library's status behind ours; 0 = none */
    uint64_t grace_ms;          /* it is to end: how long its batches may still complete; 0 = not to end */
    uint64_t number;            /* of the NOTIFY that it waits for */
};

/* A connect or disconnect in a thread of its own. */
typedef struct hixl_call {
    pthread_mutex_t lock;
    bool abandoned; /* the transport is gone: the thread frees this */
    bool overdue;   /* counted among the zombies */
    bool disconnects;
    hixl_route route;
    const kvx_ascend_api *api;
    hixl_device *device;
    hixl_link *link;
    int32_t device_index;
    void *engine, *stream;
    char remote[HIXL_ENGINE_TEXT];
    int32_t timeout_ms;
    int status;
    uint32_t raw;
    struct hixl_call *next;
} hixl_call;

/* -- side links --------------------------------------------------------------------------------------------------- */
typedef enum hixl_conn_state {
    HIXL_DIALLING, /* dialler: the TCP connection is being made */
    HIXL_GREETING,
    HIXL_OPEN,
    HIXL_LINGERING, /* acceptor: we hung up on one that may still be moving bytes */
    HIXL_DEAD
} hixl_conn_state;

struct hixl_conn {
    hixl_transport *hixl;
    hixl_peer *peer; /* of a dialler */
    hixl_conn_state state;
    uint32_t role;
    int fd;
    uint64_t deadline_ms;
    kvx_stream_auth auth;
    uint8_t nonce[KVX_NONCE_BYTES];
    uint32_t key_failures;
    bool proved, counted, said_bye;
    kvx_newcomer newcomer; /* of an acceptor */
    bool inside;           /* dialler: it leads to a listener of this process */
    bool held;             /* acceptor: held_frame waits for room in the notification queue */
    kvx_frame held_frame;
    uint8_t held_key[KVX_KEY_BYTES];
    kvx_table attached; /* acceptor, hixl->lock: handle -> hixl_attach */
    kvx_table told;     /* acceptor, hixl->lock: arena id -> hixl_arena whose key the peer was told */

    /* hixl->lock */
    uint64_t tx_counter;
    uint8_t *tx;
    uint32_t tx_begin, tx_end, tx_room;
    bool want_out, stopped, broken;
    uint32_t events;

    hixl_conn *next, *previous, *grave_next;
    kvx_stream_rx rx;
};

/* A peer's use of one of our grants. hixl->lock. */
typedef struct hixl_attach {
    hixl_conn *conn; /* NULL: its host fell silent, and nothing can prove any more that it is quiet */
    uint64_t handle, grant;
    uint8_t key[KVX_KEY_BYTES];
    kvx_grant *revoked;
    bool asked;
    bool opening;                        /* its LOCATION has not been sent: a REVOKE comes after it */
    struct hixl_attach *previous, *next; /* of the same grant */
} hixl_attach;

/* The application's look at memory of another process. The device's thread maps and unmaps it; until it is unmapped,
 * the import answers no REVOKE and its side link stays open. */
typedef enum hixl_view { HIXL_UNSEEN, HIXL_TO_MAP, HIXL_SEEN, HIXL_TO_UNMAP } hixl_view;

typedef struct hixl_import {
    kvx_import *import; /* NULL once the core let go of it */
    hixl_peer *peer;
    uint64_t handle;
    uint8_t key[KVX_KEY_BYTES];
    hixl_location location;
    uint64_t heard;  /* when it was: numbers all LOCATIONs */
    bool pending;    /* import_done is still to come */
    bool attached;   /* the owner counts us */
    int shut;        /* not KVX_OK: no op may use it any more, and why */
    bool asked_back; /* REVOKE came */
    uint32_t users;  /* ops whose bytes may move */
    hixl_view view;
    hixl_map *mapped; /* for the view; the device's thread */
    struct hixl_import *view_next;
    hixl_link *links[HIXL_DEVICES_MAX]; /* [d] belongs to device d's thread */
    struct hixl_import *previous, *next;
} hixl_import;

struct hixl_peer {
    hixl_transport *hixl;
    kvx_peer *peer;
    hixl_conn *conn; /* NULL: not dialled yet, or over */
    struct sockaddr_storage address;
    socklen_t address_length;
    bool told, connected, lost, lost_told, closing;
    int status, sys_errno; /* of the loss */
    uint64_t next_number;  /* of requests */
    hixl_import *imports;
    kvx_table by_handle;
    kvx_table awaiting; /* number of a NOTIFY -> hixl_xfer */
    uint32_t ops;       /* not completed */
    uint64_t pings, pongs;
    int pong_status;     /* of the last one */
    uint32_t copy_links; /* and views: they may have memory of the owner mapped, the socket closes after them */
    hixl_link **links;   /* that it uses */
    uint32_t link_count, link_room;
    bool todo_queued;
    hixl_peer *todo_next;
    hixl_peer *previous, *next;
};

struct hixl_transport {
    kvx_core *core;
    uint32_t slot;
    const kvx_engine_config *config;
    kvx_transport_counters *counters;
    const kvx_ascend_api *api;
    uint8_t boot_id[16];
    uint32_t pid; /* of this process as drivers number them; 0 = not known */
    uint64_t epoch;
    char host[64]; /* hixl_bind, as it stands before ":port" */
    char endpoint[KVX_ENDPOINT_MAX];
    struct sockaddr_storage listens; /* where */
    hixl_transport *next_here;       /* those of this process that listen */
    int epoll_fd, wake_fd;
    kvx_listener listener;
    uint32_t device_count;
    hixl_device devices[HIXL_DEVICES_MAX];
    pthread_mutex_t lock;
    kvx_table grants; /* grant -> first hixl_attach */
    hixl_conn *conns; /* acceptors */
    hixl_peer *peers;
    hixl_peer *todo;
    hixl_conn *graveyard;
    uint32_t accepted, accepted_max; /* that have proved a key, and how many may be */
    kvx_newcomers line;              /* those that have not proved a key yet; the side thread only */
    uint64_t locations;              /* that peers told us */
    bool closing, stuck;
    uint64_t deadline_ms;
};

/* hixl_side.c: sockets and frames. With the lock held unless said otherwise. */
int kvx_hixl_listen(hixl_transport *hixl, char *why, size_t why_size);
void kvx_hixl_listen_end(hixl_transport *hixl);
/* Does an engine of this process listen there? */
bool kvx_hixl_inside(const struct sockaddr_storage *address);
/* A free port on our address, for one of HIXL's listeners. 0 = none. */
uint32_t kvx_hixl_free_port(const hixl_transport *hixl);
hixl_conn *kvx_hixl_conn_new(hixl_transport *hixl, uint32_t role, int fd);
void kvx_hixl_conn_free(hixl_conn *conn);
void kvx_hixl_conn_become(hixl_conn *conn, hixl_conn_state next); /* by the table of transitions */
bool kvx_hixl_conn_watch(hixl_conn *conn, bool dialling);
/* Seals and queues. Never fails: a connection that cannot send breaks, and ends on the side thread. */
void kvx_hixl_send(hixl_conn *conn, const kvx_frame *frame, const uint8_t *key, const void *units);
bool kvx_hixl_authentic(const hixl_conn *conn, const uint8_t key[KVX_KEY_BYTES]); /* the frame in conn->rx */
void kvx_hixl_conn_arm(hixl_conn *conn);
void kvx_hixl_accept(hixl_transport *hixl); /* without the lock, like the next ones */
void kvx_hixl_conn_event(hixl_conn *conn, uint32_t events);
void kvx_hixl_conn_parse(hixl_conn *conn);
void kvx_hixl_conn_close(hixl_conn *conn); /* the socket, not the structure */
void kvx_hixl_deadline(hixl_transport *hixl, uint64_t at_ms);

/* hixl_location.c */
void kvx_hixl_location_encode(const hixl_location *location, uint8_t units[HIXL_LOCATION_UNITS * 16]);
bool kvx_hixl_location_decode(hixl_location *location, const uint8_t *units, uint32_t count);

/* hixl_owner.c: what peers ask of us. On the side thread, without the lock; false = they broke the protocol. */
bool kvx_hixl_owner_frame(hixl_conn *conn);
void kvx_hixl_owner_held(hixl_conn *conn);
bool kvx_hixl_owner_make_room(hixl_transport *hixl); /* without the lock: whether an unused side link went */
void kvx_hixl_owner_hang_up(hixl_conn *conn);
/* `proof`: the other end of the socket was closed, which a kernel does for a process that has ended. */
void kvx_hixl_owner_end(hixl_conn *conn, bool proof);
int kvx_hixl_owner_revoke(hixl_transport *hixl, kvx_grant *grant);
void kvx_hixl_owner_close(hixl_transport *hixl);

/* hixl_peer.c: connections to owners */
int kvx_hixl_peer_connect(void *transport, kvx_peer *peer);
int kvx_hixl_peer_close(void *transport, kvx_peer *peer, kvx_import *import);
int kvx_hixl_mem_import(void *transport, kvx_import *import);
uint64_t kvx_hixl_peer_witness(const hixl_peer *peer);
bool kvx_hixl_peer_frame(hixl_conn *conn);
void kvx_hixl_peer_open(hixl_conn *conn);                           /* greeted */
void kvx_hixl_peer_end(hixl_conn *conn, int status, int sys_errno); /* the connection is no good any more */
void kvx_hixl_peer_todo(hixl_peer *peer);                           /* on the side thread */
void kvx_hixl_todo(hixl_peer *peer);                                /* with the lock held */
void kvx_hixl_peers_woken(hixl_transport *hixl);                    /* the core woke us: look for cancelled ones */
void kvx_hixl_peers_close(hixl_transport *hixl);
void kvx_hixl_notify(hixl_xfer *xfer); /* with the lock held: the bytes are there, tell the owner */
/* With the lock held, when the core has let go of it and nothing is mapped: the owner is told, and it is freed. */
void kvx_hixl_import_end(hixl_import *import);
void kvx_hixl_import_leave(hixl_import *import);          /* with the lock held: an op's bytes move no more */
bool kvx_hixl_link_use(hixl_peer *peer, hixl_link *link); /* with the lock held; false = out of memory */

/* hixl_device.c: engines and registered memory */
int kvx_hixl_devices_open(hixl_transport *hixl, char *why, size_t why_size);
void kvx_hixl_devices_close(hixl_transport *hixl);
int kvx_hixl_mem_register(void *transport, kvx_region *region);
void kvx_hixl_region_forget(hixl_transport *hixl, const kvx_region *region);
hixl_device *kvx_hixl_device_of(hixl_transport *hixl, const kvx_region *region);          /* NULL: cannot be moved */
const hixl_arena *kvx_hixl_arena_of(const hixl_device *device, const kvx_region *region); /* with the lock held */
void kvx_hixl_devices_wake(hixl_transport *hixl);

/* hixl_link.c; on the device's thread */
int kvx_hixl_link_for(hixl_device *device, hixl_import *import, hixl_link **link_p);
void kvx_hixl_link_want(hixl_link *link, uint64_t now_ms);
/* `broken`: it failed; otherwise it has to be made anew, or nobody wants it. */
void kvx_hixl_link_fail(hixl_link *link, uint64_t now_ms, bool broken);
void kvx_hixl_link_turn(hixl_link *link, uint64_t now_ms); /* answers to pings, and time */
void kvx_hixl_calls_returned(hixl_device *device, uint64_t now_ms);
bool kvx_hixl_link_over(const hixl_link *link); /* with the lock held: nobody needs it and nothing is out */
void kvx_hixl_link_free(hixl_link *link);
/* In close. False: a call is out that nobody can wait for, so the engine and what is registered have to stay. */
bool kvx_hixl_links_close(hixl_device *device);
uint32_t kvx_hixl_zombies(void);
/* A thread that nobody waits for. */
bool kvx_hixl_thread(void *(*run)(void *), void *argument);
uint64_t kvx_hixl_process(void); /* a number that only this process has */

/* hixl_map.c; on the device's thread unless said otherwise */
int kvx_hixl_link_map(hixl_link *link, const hixl_location *location, uint64_t *address_p);
void kvx_hixl_maps_drop(hixl_link *link); /* all that the link uses */
/* On the side thread, with the lock held: map it, and answer the import. */
void kvx_hixl_view_begin(hixl_import *import);
void kvx_hixl_view_end(hixl_import *import); /* with the lock held: the application looks no more */
void kvx_hixl_views_turn(hixl_device *device);
void kvx_hixl_views_close(hixl_device *device); /* in close */

/* hixl_queue.c; on the device's thread */
void kvx_hixl_run_push(hixl_link *link, hixl_xfer *xfer); /* unless it is in the line */
void kvx_hixl_run_push_front(hixl_link *link, hixl_xfer *xfer);
hixl_xfer *kvx_hixl_run_next(const hixl_link *link);        /* whose turn it is; NULL: nobody waits */
hixl_xfer *kvx_hixl_run_pop(hixl_link *link);               /* the same, and it leaves the line */
void kvx_hixl_run_remove(hixl_link *link, hixl_xfer *xfer); /* if it is in the line */
void kvx_hixl_queue_push(hixl_link *link, hixl_xfer *xfer); /* a new one of the link, last in the line */
void kvx_hixl_queue_remove(hixl_xfer *xfer);

/* hixl_xfer.c */
int kvx_hixl_submit(void *transport, kvx_op *op);
int kvx_hixl_device_progress(hixl_device *device, int timeout_ms);
void kvx_hixl_xfer_refuse(hixl_link *link, int status);   /* whatever has nothing under way fails */
void kvx_hixl_xfer_settle(hixl_link *link);               /* nothing moves any more */
void kvx_hixl_xfer_complete(hixl_xfer *xfer, int status); /* without the lock */
void kvx_hixl_xfers_close(hixl_device *device);

#endif

/* tcp.h: private to the tcp transport (transport_tcp.c tcp_socket.c tcp_conn.c tcp_send.c tcp_serve.c tcp_peer.c
 * tcp_admit.c tcp_xfer.c tcp_stage.c tcp_splice.c tcp_owner.c tcp_seal.c).
 *
 * A connection (tcp_conn) is driven by one progress thread for its whole life: that thread receives, tears down and
 * frees. Receiving on a dialler is guarded by conn->rx_lock: answers to small requests are received by the engine's
 * owner thread (tcp_owner.c). Sending is guarded by conn->tx_lock, so that the engine's owner thread may send a small
 * request by itself when nobody else is sending. What waits to be sent for a peer is guarded by peer->lock, which is
 * never held during a system call on a socket: submitting never waits for a large send. Lock order: rx_lock, tx_lock,
 * peer->lock, thread->lock; the core's functions are called without peer->lock.
 *
 * Roles: a dialler (tcp_peer.c, tcp_xfer.c) sends requests and takes answers in the order of its requests; an acceptor
 * (tcp_serve.c) checks every request against the grants of this engine and answers in order. Every access that an
 * acceptor holds to our memory belongs to its connection's thread, so a revoke is one scan by each thread.
 */
#ifndef KVX_TCP_H
#define KVX_TCP_H

#include <pthread.h>
#include <sys/socket.h>

#include "core/newcomers.h"
#include "core/sockets.h"
#include "proto/stream.h"
#include "core/table.h"
#include "transport.h"
#include "turns.h"

#define TCP_REQUESTS_MAX     64   /* frames in flight per connection */
#define TCP_ANSWERS_MAX      64   /* answers queued per connection; more and we stop reading */
#define TCP_WINDOW_FRAMES    4    /* full-size frames in flight per connection */
#define TCP_MIXED_FRAMES     1    /* the same for an op while more urgent ones come and go, in smaller pieces: */
#define TCP_MIXED_PIECES     2    /* a frame in so many */
#define TCP_MIXED_MS         1000 /* so long after the last one */
#define TCP_KEY_FAILURES_MAX 8    /* refused ATTACH requests before the connection is closed */
#define TCP_THREADS_MAX      64
#define TCP_VECTORS_MAX      1024         /* UIO_MAXIOV */
#define TCP_TURN_BYTES       (4u << 20)   /* moved for one connection before others get their turn */
#define TCP_SEND_BYTES       (512u << 10) /* in one sendmsg */
#define TCP_SEALED_BYTES     (64u << 10)  /* the same when it is sealed: one record */
#define TCP_CHECKED_BYTES   (256u << 10) /* in one call when a checksum is made: what was moved is still in the cache */
#define TCP_LINGER_MS       500          /* a refusing connection waits this long for the other side to read why */
#define TCP_UNUSED_MS       10000        /* a connection without a live grant is kept for so long */
#define TCP_DEAD_MS         10000        /* no sign of life from the other host while something is under way */
#define TCP_BACKLOG         512
#define TCP_OWNED_MAX       8            /* connections that the owner thread receives from */
#define TCP_SMALL_BYTES_MAX (128u << 10) /* the owner thread never sends or receives more by itself, in one turn */

typedef struct tcp_conn tcp_conn;
typedef struct tcp_peer tcp_peer;
typedef struct tcp_seal tcp_seal;
typedef struct tcp_xfer tcp_xfer;
typedef struct tcp_transport tcp_transport;

/* What one thread of an owner does to memory is ordered with what another does by the frames between them: data was
 * read before its frame left, the next request came after. That order runs through the kernel and another process,
 * where the thread sanitizer cannot see it, so in its builds every frame that leaves also releases, and every request
 * acquires, one atomic. It also takes note of what sendmsg reads only after the call, when the answer may have come
 * already: there the reads are told before. */
#if defined(__SANITIZE_THREAD__)
extern _Atomic uint64_t kvx_tcp_order;
void __tsan_read_range(void *address, long length);
#define TCP_ORDER_ACQUIRE() (void)atomic_load_explicit(&kvx_tcp_order, memory_order_acquire)
#else
#define TCP_ORDER_ACQUIRE() (void)0
#endif

typedef struct tcp_thread {
    tcp_transport *tcp;
    uint32_t index;
    int epoll_fd;
    int wake_fd;          /* the core's: a cancel, a revoke, room for notifications, the end */
    int kick_fd;          /* ours: the lists below */
    uint64_t deadline_ms; /* earliest of this thread's connections, 0 = none */
    uint64_t spin_until_us;
    tcp_conn *conns;
    tcp_conn *graveyard; /* freed after the current batch of events */
    pthread_mutex_t lock;
    bool kicked;        /* kick_fd is written and not yet read */
    tcp_conn *inbox;    /* new connections */
    tcp_conn *kicks;    /* connections that may have something to send */
    tcp_peer *todo;     /* peers whose state has to be looked at; this thread is their home */
    kvx_grant *revoked; /* the next one that this thread has to look at; tcp->revoke_lock */
} tcp_thread;

struct tcp_transport {
    kvx_core *core;
    uint32_t slot;
    const kvx_engine_config *config;
    kvx_transport_counters *counters;
    uint32_t frame_bytes;
    uint32_t streams;
    uint32_t threads;
    bool encrypted;                   /* every connection is sealed */
    uint8_t secret[KVX_SECRET_BYTES]; /* that diallers to us must know */
    tcp_thread thread[TCP_THREADS_MAX];
    /* Grants that are being taken back, oldest first: every thread ends its accesses, in this order, and the last one
     * reports. So it is always the first that is over. */
    pthread_mutex_t revoke_lock;
    kvx_grant *revoke_first, *revoke_last;
    kvx_listener listener; /* thread 0's */
    char endpoint[KVX_ENDPOINT_MAX];
    char congestion[16];
    char congestion_default[16];
    _Atomic uint32_t next_thread;
    _Atomic uint32_t accepted; /* connections, proved or not */
    pthread_mutex_t line_lock; /* before a thread's lock */
    kvx_newcomers line;        /* connections that have not proved a key yet */
    kvx_newcomers unused;      /* those that were proved by grants that are all gone */
    kvx_table holders;         /* grant id -> how many connections count for it */
    uint32_t proved, proved_max, engines;
    pthread_mutex_t lock;
    tcp_peer *peers;                /* all, for close */
    int owner_set;                  /* epoll set of the owner thread, the core's */
    tcp_conn *owned[TCP_OWNED_MAX]; /* the owner thread only */
    uint32_t owned_count, owned_next;
};

/* One frame of device memory on its way through the host, in one direction; see tcp_stage.c. */
typedef struct tcp_stage {
    uint8_t *block;       /* NULL: not needed so far; room for the largest frame */
    int32_t block_device; /* whose pinned memory it is, -1 plain memory */
    int32_t stream_device;
    void *stream;
    kvx_segment whole; /* the frame as it lies in the block */
    kvx_spans target;  /* of what arrives: where it goes */
} tcp_stage;

/* -- sending ---------------------------------------------------------------------------------------------------- */
typedef struct tcp_tx {
    bool active;
    bool bulk; /* a payload and a trailer follow the head */
    bool check;
    bool corrupt;   /* flip a bit of the first payload byte */
    bool lent;      /* the payload's pages are lent to the kernel: tcp_splice.c */
    bool zeros;     /* the memory was taken back: the rest of the payload is zeros */
    int32_t status; /* for the trailer */
    uint32_t head_length, head_sent, trailer_sent;
    uint32_t crc;
    uint64_t payload_sent, payload_length;
    uint64_t counter;     /* of frames and trailers sent */
    kvx_spans spans;      /* next byte to send */
    kvx_spans crc_spans;  /* next byte to add to the checksum */
    kvx_spans lend_spans; /* next byte to lend */
    uint8_t key[KVX_KEY_BYTES];
    uint8_t trailer[KVX_STREAM_TRAILER_BYTES];
    uint8_t head[KVX_STREAM_HEAD_MAX];
} tcp_tx;

/* What lies between our pages and the socket: see tcp_splice.c. */
typedef struct tcp_pipe {
    bool made;
    bool refused; /* the kernel would not: payloads are copied */
    int in, out;
    uint64_t held; /* bytes in it */
} tcp_pipe;

/* One frame that a dialler has sent or is sending. */
typedef struct tcp_request {
    uint8_t type;
    bool check;
    bool corrupt;
    tcp_xfer *xfer;           /* NULL: a control request, or the op is not interested any more */
    kvx_import *import;       /* of an ATTACH */
    const kvx_region *staged; /* the local region when it is a device's */
    uint64_t op;
    uint32_t index;
    uint32_t segment;  /* of the op, first of this frame */
    uint32_t segments; /* of this frame; only one of these can be named by its answer */
    uint64_t length;
    kvx_spans spans; /* of the local region */
    uint8_t key[KVX_KEY_BYTES];
} tcp_request;

/* ATTACH or DETACH waiting for its connection. */
typedef struct tcp_control {
    struct tcp_control *next;
    uint8_t type;
    kvx_import *import; /* of an ATTACH */
    uint64_t grant, generation, length;
    uint32_t access;
    uint8_t key[KVX_KEY_BYTES];
} tcp_control;

/* An answer that waits for its turn. */
typedef struct tcp_answer {
    struct tcp_answer *next;
    kvx_frame frame;
    bool holds; /* access is live */
    kvx_access access;
    uint8_t key[KVX_KEY_BYTES];
    kvx_segment segments[]; /* of DATA */
} tcp_answer;

typedef struct tcp_attached {
    uint64_t grant;
    uint32_t count;
} tcp_attached;

typedef enum tcp_state {
    TCP_NEW,        /* dialler: not yet connecting */
    TCP_CONNECTING, /* dialler */
    TCP_GREETING,   /* waiting for the other hello */
    TCP_OPEN,
    TCP_LINGER, /* everything is said; discard until the other side closes */
    TCP_DEAD
} tcp_state;

struct tcp_conn {
    tcp_transport *tcp;
    tcp_thread *thread;
    tcp_conn *next, *previous; /* of the thread */
    tcp_conn *inbox_next, *kick_next, *grave_next;
    bool kick_queued;
    int fd;
    uint32_t role;
    _Atomic tcp_state state;
    uint32_t events; /* in the epoll set of the thread; rx_lock */
    bool want_out;   /* changed with tx_lock (and rx_lock) */
    uint64_t deadline_ms;
    _Atomic uint64_t watch_ms; /* look whether the other host is alive; 0 = nothing was sent lately */
    kvx_stream_auth auth;
    tcp_seal *seal;       /* NULL: the connection is in clear */
    kvx_hello hello;      /* ours */
    uint32_t frame_bytes; /* largest payload on this connection */

    pthread_mutex_t tx_lock;
    tcp_tx tx;
    tcp_stage tx_stage;
    tcp_pipe lane;

    /* receiving: rx_lock on a dialler, an acceptor's are the thread's only */
    pthread_mutex_t rx_lock;
    _Atomic bool owned; /* the owner thread wants to be woken instead of ours */
    bool in_owner_set;
    bool on_owner; /* the owner thread is at it */
    bool end_wanted, end_reset;
    int end_status, end_errno;
    int32_t rx_status; /* of the frame whose payload arrives; not KVX_OK: discard */
    int32_t rx_segment;
    uint32_t rx_crc;
    bool rx_stopped; /* do not read now */
    kvx_spans rx_spans;
    tcp_stage rx_stage;
    uint8_t rx_key[KVX_KEY_BYTES];

    /* dialler */
    tcp_peer *peer;
    uint32_t stream;
    tcp_control *control_first, *control_last; /* peer->lock */
    uint32_t request_first, request_count;     /* peer->lock */
    uint64_t request_bytes;                    /* peer->lock */
    uint64_t promised;                         /* peer->lock: bytes that it was woken for and has not looked at */
    uint64_t woken_for;                        /* peer->lock: the last op that it was woken for */
    tcp_request *sending;                      /* tx_lock: the request whose bytes are being sent */
    tcp_request *requests;

    /* acceptor; the thread only */
    bool proved; /* changed with line_lock */
    bool counted, bye, rx_holds, rx_staged, rx_proved, linger_after;
    kvx_newcomer newcomer;      /* tcp->line_lock; likewise: */
    bool counts;                /* it has a place among the proved ones */
    uint64_t holder;            /* the grant that it counts for, or 0 */
    _Atomic bool made_to_leave; /* its place is needed, unless it proves a key first */
    uint64_t unused_until_ms;   /* then it ends; 0: it has a grant */
    uint32_t key_failures;
    kvx_access rx_access;
    kvx_frame notify; /* a notification that found no room */
    bool notify_blocked;
    tcp_answer *answer_first, *answer_last;
    uint32_t answers;
    tcp_answer *answering; /* the DATA that tx is sending */
    tcp_attached *attached;
    uint32_t attached_count, attached_room;
    kvx_segment *rx_segments;

    kvx_stream_rx rx;
};

/* -- peers and transfers ---------------------------------------------------------------------------------------- */
enum { TCP_NOTIFY_NONE, TCP_NOTIFY_WANTED, TCP_NOTIFY_SENT };

/* One op being cut into frames. Guarded by peer->lock. */
struct tcp_xfer {
    kvx_op *op;
    tcp_xfer *next, *previous; /* of the peer, all */
    tcp_xfer *run_next, *run_previous;
    bool running; /* in the run queue: has a frame to start */
    uint8_t notify;
    uint64_t id;
    kvx_spans cursor; /* what is not yet cut */
    uint32_t frames;
    uint32_t outstanding;
    uint64_t bytes;
    int status, sys_errno, segment;
    uint64_t cancel_deadline_ms;
    tcp_xfer *done_next;
};

typedef struct tcp_import {
    struct tcp_import *next, *previous; /* of the peer */
    uint32_t pending;                   /* streams that have not answered */
    bool attached;                      /* the first stream's answer was good */
    int status;
} tcp_import;

struct tcp_peer {
    tcp_transport *tcp;
    kvx_peer *peer;
    tcp_thread *home;
    tcp_peer *next, *previous; /* of the transport */
    tcp_peer *todo_next;
    bool todo_queued; /* home->lock */
    struct sockaddr_storage address;
    socklen_t address_length;

    pthread_mutex_t lock;
    uint32_t conns_left; /* connections that their threads have not let go of */
    uint32_t open;       /* connections that have greeted */
    bool connected;      /* kvx_connect_done(KVX_OK) was called */
    bool reported;       /* connect_done with an error, or peer_lost */
    bool closing;
    int status; /* not KVX_OK: the peer failed */
    int sys_errno;
    uint64_t next_op;
    tcp_import *imports;
    tcp_xfer *xfers;
    uint32_t staged; /* of them, with device memory on our side: the owner thread receives nothing meanwhile */
    struct {
        tcp_xfer *first, *last;
        uint64_t seen_ms; /* when the last op of this rank came */
    } run[KVX_RANKS];
    uint32_t run_waiting; /* a bit for each rank with ops that have a frame to start */
    kvx_turns turns;
    uint32_t streams;
    tcp_conn *conns[KVX_STREAM_STREAMS_MAX];
};

/* tcp_socket.c */
int kvx_tcp_listen(tcp_transport *tcp, char *why, size_t why_size);
/* 0 or an errno; *fd_p is a socket on its way to the address. */
int kvx_tcp_dial(tcp_transport *tcp, const struct sockaddr_storage *address, socklen_t length, int *fd_p);
void kvx_tcp_tune(tcp_transport *tcp, int fd, bool accepted);
/* Is something under way, and if so, for how long has the other host not shown any sign of life? */
bool kvx_tcp_silence(int fd, uint32_t *silent_ms_p);

/* tcp_conn.c: the life of a connection */
tcp_conn *kvx_tcp_conn_new(tcp_transport *tcp, uint32_t role);
void kvx_tcp_conn_free(tcp_conn *conn);
void kvx_tcp_conn_adopt(tcp_conn *conn); /* its thread takes it from the inbox */
void kvx_tcp_conn_event(tcp_conn *conn, uint32_t events);
/* Ends it now. `reset`: what the other side has not read is thrown away. */
void kvx_tcp_conn_end(tcp_conn *conn, int status, int sys_errno, bool reset);
void kvx_tcp_conn_linger(tcp_conn *conn); /* send what is queued, then wait for the other side to close */
void kvx_tcp_conn_deadline(tcp_conn *conn, uint64_t deadline_ms); /* keeps the earlier one */
void kvx_tcp_conn_watch(tcp_conn *conn);                          /* something may have been sent */
void kvx_tcp_conn_expired(tcp_conn *conn, uint64_t now_ms);
void kvx_tcp_conn_arm(tcp_conn *conn);   /* epoll interest from want_out and rx_stopped */
void kvx_tcp_conn_parse(tcp_conn *conn); /* go on with what is buffered */
void kvx_tcp_conn_receive(tcp_conn *conn, uint64_t bytes_max);
bool kvx_tcp_conn_may_write(tcp_conn *conn); /* may the payload that arrives still be written? */
/* The next bytes of the payload have arrived, past the parser's buffer; they were written if they may be. */
void kvx_tcp_conn_payload(tcp_conn *conn, uint64_t bytes);
void kvx_tcp_conn_sealed(tcp_conn *conn); /* the other side has shown that it has our keys */
/* On its thread: ends it if the owner thread asked for that. */
bool kvx_tcp_conn_ended(tcp_conn *conn);
void kvx_tcp_inbox(tcp_conn *conn);

/* tcp_send.c */
typedef enum tcp_flush { TCP_FLUSH_IDLE, TCP_FLUSH_BLOCKED, TCP_FLUSH_BROKEN } tcp_flush;
/* Send from the queue until it is empty, the socket is full or the turn is over. tx_lock is held. */
tcp_flush kvx_tcp_flush(tcp_conn *conn, uint64_t bytes_max);
ssize_t kvx_tcp_send_message(int fd, const struct msghdr *message, int flags);
void kvx_tcp_pump(tcp_conn *conn); /* on the connection's thread: flush and arm */
/* Start a frame: head is encoded in tx->head; seals it. payload: spans + length, or NULL. */
void kvx_tcp_tx_start(tcp_conn *conn, const uint8_t *key, uint32_t head_length, const kvx_spans *payload);
/* Append an answer without a payload to what is being sent, when there is room and nothing else waits. */
bool kvx_tcp_tx_append(tcp_conn *conn, const kvx_frame *frame, const uint8_t *key);
bool kvx_tcp_send_now(tcp_conn *conn, const void *bytes, size_t length); /* all or false */
void kvx_tcp_send_bye(tcp_conn *conn);                                   /* when nothing is half sent */

/* tcp_splice.c; tx_lock is held, on the connection's thread */
void kvx_tcp_lend_begin(tcp_conn *conn);   /* a frame was started: will its payload be lent? */
ssize_t kvx_tcp_lend_some(tcp_conn *conn); /* of a payload that is; as sendmsg */
void kvx_tcp_pipe_free(tcp_pipe *lane);

/* tcp_seal.c: for connections with a seal only */
bool kvx_tcp_seal_make(tcp_conn *conn); /* of a new connection: its hello gets a share */
void kvx_tcp_seal_free(tcp_conn *conn);
bool kvx_tcp_seal_open(const tcp_conn *conn); /* are there keys? */
bool kvx_tcp_seal_agree(tcp_conn *conn);      /* both hellos are known: keys, and nonces for the authenticators */
/* What of ours is in clear (NULL: said already), and the record that shows our keys; all of it now, or false. */
bool kvx_tcp_seal_hello(tcp_conn *conn, const uint8_t *hello, uint32_t length);
/* In place of kvx_tcp_send_message, of the current frame; moves the vectors on. */
ssize_t kvx_tcp_seal_send(tcp_conn *conn, struct msghdr *message);
tcp_flush kvx_tcp_seal_flush(tcp_conn *conn); /* what is sealed and not sent yet */
void kvx_tcp_seal_last(tcp_conn *conn, void *bytes, uint32_t length);
/* In place of receiving; kvx_tcp_seal_more then hands on a piece of it. False: it needs more, or the connection ended.
 */
ssize_t kvx_tcp_seal_receive(tcp_conn *conn, bool *full_p);
bool kvx_tcp_seal_more(tcp_conn *conn);

/* tcp_serve.c: the acceptor */
void kvx_tcp_serve_frame(tcp_conn *conn);
bool kvx_tcp_serve_may_write(tcp_conn *conn); /* before each piece of a payload: is the access still good? */
void kvx_tcp_serve_payload_end(tcp_conn *conn);
void kvx_tcp_serve_trailer(tcp_conn *conn);
bool kvx_tcp_serve_next(tcp_conn *conn); /* starts the next answer */
void kvx_tcp_serve_sent(tcp_conn *conn); /* tx finished */
void kvx_tcp_serve_wake(tcp_conn *conn);
void kvx_tcp_serve_revoke(tcp_conn *conn, kvx_grant *grant);
void kvx_tcp_serve_end(tcp_conn *conn);

/* tcp_admit.c: how many connections, and whose; those of one connection are called on its thread */
void kvx_tcp_admit_init(tcp_transport *tcp);
void kvx_tcp_admit_free(tcp_transport *tcp);
bool kvx_tcp_admit_room(tcp_transport *tcp); /* descriptors ran out: whether one goes for it */
void kvx_tcp_admit(tcp_conn *conn, const struct sockaddr_storage *from); /* a newcomer, before its thread knows it */
bool kvx_tcp_admit_greeted(tcp_conn *conn);                              /* false: this engine is full */
int kvx_tcp_admit_proved(tcp_conn *conn, uint64_t grant);
void kvx_tcp_admit_unused(tcp_conn *conn, uint64_t revoked); /* after a grant went, 0: one was given back */
void kvx_tcp_admit_end(tcp_conn *conn);

/* tcp_peer.c: peers and imports */
int kvx_tcp_import(void *transport, kvx_import *import);
int kvx_tcp_connect(void *transport, kvx_peer *peer);
int kvx_tcp_peer_close(void *transport, kvx_peer *peer, kvx_import *import);
void kvx_tcp_peer_open(tcp_conn *conn); /* greeted */
void kvx_tcp_peer_fail(tcp_peer *peer, int status, int sys_errno);
bool kvx_tcp_peer_over(tcp_conn *conn);      /* on its thread: ends the connection when its peer failed or closes */
void kvx_tcp_peer_conn_gone(tcp_conn *conn); /* on its thread: nothing refers to it any more */
void kvx_tcp_peer_todo(tcp_peer *peer);      /* on the home thread */
void kvx_tcp_peer_free(tcp_peer *peer);
void kvx_tcp_import_settle(const tcp_conn *conn, kvx_import *import, int status, int sys_errno);

/* tcp_xfer.c: ops, requests and answers */
int kvx_tcp_submit(void *transport, kvx_op *op);
void kvx_tcp_send_waiting(tcp_conn *conn); /* from the owner thread: what waits for a place among the requests */
bool kvx_tcp_xfer_next(tcp_conn *conn);    /* starts the next request; tx_lock is held */
void kvx_tcp_xfer_answer(tcp_conn *conn);  /* a frame arrived */
void kvx_tcp_xfer_trailer(tcp_conn *conn);
bool kvx_tcp_xfer_may_write(tcp_conn *conn);
void kvx_tcp_xfer_written(tcp_conn *conn, uint64_t bytes); /* for the corrupt seam */
void kvx_tcp_xfer_scan(tcp_conn *conn);                    /* look for cancelled ops */
void kvx_tcp_xfer_drop_all(tcp_conn *conn, int status, int sys_errno);
void kvx_tcp_xfer_sweep(tcp_peer *peer, int status); /* complete what never started */

/* tcp_stage.c; all on the connection's thread. A copy ends early (KVX_E_CANCELLED) when `unwanted` becomes true. */
int32_t kvx_tcp_stage_device(const kvx_region *region); /* -1: not memory of a device */
/* After kvx_tcp_tx_start: the payload comes from device memory. Not KVX_OK: the frame says so in its trailer. */
int kvx_tcp_stage_out(tcp_conn *conn, const kvx_region *region, const _Atomic bool *unwanted);
/* rx_spans, set just now, are device memory: receive into the block; later copy from there to them. */
int kvx_tcp_stage_expect(tcp_conn *conn, const kvx_region *region);
int kvx_tcp_stage_in(tcp_conn *conn, const kvx_region *region, const _Atomic bool *unwanted);
void kvx_tcp_stage_free(tcp_stage *stage);

/* tcp_owner.c; all on the engine's owner thread */
uint64_t kvx_tcp_small_bytes(const tcp_transport *tcp); /* the largest transfer that the owner thread handles itself */
void kvx_tcp_own(tcp_conn *conn);                       /* a small request was sent, nothing else is in flight */
void kvx_tcp_disown(const tcp_peer *peer);              /* more than small requests follow, or the end */
void kvx_tcp_owner_turn(void *transport);
void kvx_tcp_owner_spin(tcp_conn *conn); /* wait for the answer, at most config->spin_us */
uint64_t kvx_tcp_now_us(void);

/* transport_tcp.c */
void kvx_tcp_kick(tcp_conn *conn);      /* peer->lock is held for diallers */
void kvx_tcp_kick_peer(tcp_peer *peer); /* have the home thread call kvx_tcp_peer_todo */
void kvx_tcp_unkick(tcp_conn *conn);
void kvx_tcp_unkick_peer(tcp_peer *peer);

#endif

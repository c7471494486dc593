/* tcp_xfer.c: the dialler's transfers: cut an op into frames, spread them over the streams, collect the answers.
 *
 * Ops that have a frame to start stand in one queue per peer and rank (turns.h). A stream that has room takes the op at
 * the head, cuts one frame and puts the op back at the tail: streams share the work by taking it, and a small op waits
 * for one frame of each other op of its rank, not for all of a big one. What is already on a stream cannot be
 * overtaken; so while more urgent ops come and go, the others have only a little on each stream at a time. A frame is
 * cut by moving a cursor over the op's own segment list, nothing is copied. An op completes when it has no frame left
 * to start and none unanswered; cancelling drops what is not started, lets go of gets at once (their data is thrown
 * away when it comes) and waits for puts, since only the owner's answer or a reset proves that no byte will follow. */
#include "tcp/tcp.h"
#include "list.h"
#include "core/vault.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

/* -- the queue; peer->lock is held ------------------------------------------------------------------------------ */

/* Is our side of it memory that the driver has to copy? */
static bool tcp_xfer_needs_staging(const kvx_op *op) {
    return kvx_tcp_stage_device(op->region) >= 0;
}

static void tcp_xfer_run_push(tcp_peer *peer, tcp_xfer *xfer) {
    if (xfer->running) {
        return;
    }
    uint32_t rank = xfer->op->rank;
    xfer->running = true;
    xfer->run_next = NULL;
    xfer->run_previous = peer->run[rank].last;
    if (xfer->run_previous != NULL) {
        xfer->run_previous->run_next = xfer;
    } else {
        peer->run[rank].first = xfer;
    }
    peer->run[rank].last = xfer;
    peer->run_waiting |= 1u << rank;
}

static void tcp_xfer_run_remove(tcp_peer *peer, tcp_xfer *xfer) {
    if (!xfer->running) {
        return;
    }
    uint32_t rank = xfer->op->rank;
    xfer->running = false;
    if (xfer->run_previous != NULL) {
        xfer->run_previous->run_next = xfer->run_next;
    } else {
        peer->run[rank].first = xfer->run_next;
    }
    if (xfer->run_next != NULL) {
        xfer->run_next->run_previous = xfer->run_previous;
    } else {
        peer->run[rank].last = xfer->run_previous;
    }
    if (peer->run[rank].first == NULL) {
        peer->run_waiting &= ~(1u << rank);
    }
}

/* Did a more urgent op come a moment ago? Then the next one shall not find the streams full. */
static bool tcp_xfer_saw_urgent(const tcp_peer *peer, uint32_t rank, uint64_t now_ms) {
    uint64_t latest = 0;
    for (uint32_t other = 0; other < rank; other++) {
        latest = peer->run[other].seen_ms > latest ? peer->run[other].seen_ms : latest;
    }
    return latest != 0 && now_ms < latest + TCP_MIXED_MS;
}

static void tcp_xfer_unlink_done(tcp_peer *peer, tcp_xfer *xfer, tcp_xfer **done_p) {
    tcp_xfer_run_remove(peer, xfer);
    peer->staged -= tcp_xfer_needs_staging(xfer->op);
    KVX_LIST_REMOVE(peer->xfers, xfer);
    xfer->done_next = *done_p;
    *done_p = xfer;
}

static void tcp_xfer_fail(tcp_xfer *xfer, int status, int sys_errno, int segment) {
    if (xfer->status != KVX_OK) {
        return;
    }
    xfer->status = status;
    xfer->sys_errno = sys_errno;
    xfer->segment = segment;
}

/* Something about the op changed: what now? */
static void tcp_xfer_update(tcp_peer *peer, tcp_xfer *xfer, tcp_xfer **done_p) {
    bool unstarted = xfer->cursor.left > 0 || xfer->notify == TCP_NOTIFY_WANTED;
    if (unstarted && atomic_load(&xfer->op->cancelled)) {
        tcp_xfer_fail(xfer, KVX_E_CANCELLED, 0, -1);
    }
    if (xfer->status != KVX_OK) {
        xfer->cursor.left = 0;
        xfer->notify = TCP_NOTIFY_NONE;
        tcp_xfer_run_remove(peer, xfer);
    }
    if (xfer->cursor.left > 0 || (xfer->outstanding == 0 && xfer->notify == TCP_NOTIFY_WANTED)) {
        tcp_xfer_run_push(peer, xfer);
    } else if (xfer->outstanding == 0) {
        tcp_xfer_unlink_done(peer, xfer, done_p);
    }
}

/* Without the lock. */
static void tcp_xfer_complete(tcp_xfer *done) {
    while (done != NULL) {
        tcp_xfer *xfer = done;
        done = xfer->done_next;
        kvx_op_complete(xfer->op, xfer->status, xfer->bytes, xfer->sys_errno, xfer->segment);
        free(xfer);
    }
}

/* -- submit ----------------------------------------------------------------------------------------------------- */

static bool tcp_xfer_is_small(const tcp_peer *peer, const kvx_op *op) {
    if (tcp_xfer_needs_staging(op)) {
        return false;
    }
    return op->kind == KVX_OP_GET ? op->bytes <= peer->tcp->frame_bytes && op->count <= 64
                                  : op->bytes <= kvx_tcp_small_bytes(peer->tcp);
}

static bool tcp_xfer_stream_has_room(const tcp_conn *conn) {
    return conn->request_count < TCP_REQUESTS_MAX &&
           conn->request_bytes < (uint64_t)TCP_WINDOW_FRAMES * conn->frame_bytes;
}

static uint64_t tcp_xfer_stream_load(const tcp_conn *conn) {
    return conn->request_bytes + conn->promised;
}

/* With peer->lock held: is the stream's sending half idle, and ours from now on? */
static bool tcp_xfer_sending_half_take(tcp_conn *conn) {
    if (conn->state != TCP_OPEN || pthread_mutex_trylock(&conn->tx_lock) != 0) {
        return false;
    }
    if (conn->state == TCP_OPEN && !conn->tx.active && !conn->want_out && conn->control_first == NULL) {
        return true;
    }
    pthread_mutex_unlock(&conn->tx_lock);
    return false;
}

/* With peer->lock held: an idle stream whose sending half is ours now, or NULL. */
static tcp_conn *tcp_xfer_stream_take(tcp_peer *peer) {
    tcp_conn *best = peer->conns[0];
    for (uint32_t i = 1; i < peer->streams; i++) {
        if (peer->conns[i]->request_bytes < best->request_bytes) {
            best = peer->conns[i];
        }
    }
    return tcp_xfer_sending_half_take(best) ? best : NULL;
}

/* With peer->lock held: wake as many streams as the op has frames, the idlest first. One whose window is full is left
 * alone: it goes on by itself when an answer comes. */
static void tcp_xfer_wake_streams(tcp_peer *peer, const kvx_op *op) {
    uint64_t frames = op->bytes / peer->conns[0]->frame_bytes + op->count / KVX_STREAM_SEGMENTS_MAX + 1;
    for (uint64_t woken = 0; woken < frames; woken++) {
        tcp_conn *best = NULL;
        for (uint32_t i = 0; i < peer->streams; i++) {
            tcp_conn *conn = peer->conns[i];
            if (tcp_xfer_stream_has_room(conn) && conn->woken_for != peer->next_op &&
                (best == NULL || tcp_xfer_stream_load(conn) < tcp_xfer_stream_load(best))) {
                best = conn;
            }
        }
        if (best == NULL) {
            return;
        }
        best->woken_for = peer->next_op;
        best->promised += op->bytes / frames;
        kvx_tcp_kick(best);
    }
}

void kvx_tcp_send_waiting(tcp_conn *conn) {
    tcp_peer *peer = conn->peer;
    pthread_mutex_lock(&peer->lock);
    bool waiting = peer->run_waiting != 0 || conn->control_first != NULL;
    bool ours = waiting && tcp_xfer_sending_half_take(conn);
    pthread_mutex_unlock(&peer->lock);
    if (ours) {
        waiting = kvx_tcp_flush(conn, TCP_SMALL_BYTES_MAX) != TCP_FLUSH_IDLE || conn->watch_ms == 0;
        pthread_mutex_unlock(&conn->tx_lock);
    }
    if (waiting) {
        kvx_tcp_kick(conn);
    }
}

/* The idle stream's sending half is ours; `answer_too`: and this thread wants to take the answer. */
static void tcp_xfer_send_now(tcp_conn *conn, bool answer_too) {
    tcp_peer *peer = conn->peer;
    bool left = kvx_tcp_flush(conn, TCP_SMALL_BYTES_MAX) != TCP_FLUSH_IDLE;
    pthread_mutex_lock(&peer->lock);
    bool waiting = peer->run_waiting != 0, alone = peer->xfers != NULL && peer->xfers->next == NULL;
    pthread_mutex_unlock(&peer->lock);
    if (left || waiting || conn->watch_ms == 0) {
        kvx_tcp_kick(conn); /* its thread waits for the socket, and watches over the other host */
    }
    pthread_mutex_unlock(&conn->tx_lock);
    if (!answer_too) {
        return;
    }
    if (waiting) {
        kvx_tcp_disown(peer);
        return;
    }
    kvx_tcp_own(conn);
    if (alone && !left && peer->tcp->config->spin_us != 0) {
        kvx_tcp_owner_spin(conn);
    }
}

/* Nothing is under way, so nothing is to be read but the other side's end, which our thread may not have seen yet. */
static bool tcp_xfer_peer_closed(const tcp_conn *conn) {
    char byte;
    return recv(conn->fd, &byte, sizeof byte, MSG_PEEK | MSG_DONTWAIT) >= 0 || (errno != EAGAIN && errno != EINTR);
}

/* An idle stream for a small op, whose sending half is ours, or NULL. `*hung_up_p`: the other side has closed it. */
static tcp_conn *tcp_xfer_stream_for(tcp_peer *peer, const kvx_op *op, bool *hung_up_p) {
    pthread_mutex_lock(&peer->lock);
    bool first = (peer->run_waiting & ((2u << op->rank) - 1)) == 0; /* whoever waits lets it go ahead */
    tcp_conn *conn = first && tcp_xfer_is_small(peer, op) ? tcp_xfer_stream_take(peer) : NULL;
    bool idle = conn != NULL && conn->request_count == 0;
    pthread_mutex_unlock(&peer->lock);
    *hung_up_p = idle && tcp_xfer_peer_closed(conn);
    return conn;
}

int kvx_tcp_submit(void *transport, kvx_op *op) {
    (void)transport;
    tcp_peer *peer = op->import->peer->transport_data;
    bool owner = kvx_op_in_submit(op),
         small = !tcp_xfer_needs_staging(op) && op->bytes <= kvx_tcp_small_bytes(peer->tcp);
    tcp_xfer *xfer = calloc(1, sizeof *xfer);
    if (xfer == NULL) {
        return KVX_E_NOMEM;
    }
    if (owner && !small) {
        kvx_tcp_disown(peer);
    }
    xfer->op = op;
    xfer->segment = -1;
    xfer->notify = op->flags & KVX_OP_NOTIFY ? TCP_NOTIFY_WANTED : TCP_NOTIFY_NONE;
    if (op->count > 0) {
        xfer->cursor = (kvx_spans){.base = op->region->base, .segments = op->segments, .left = op->bytes};
    }
    bool ended;
    tcp_conn *conn = tcp_xfer_stream_for(peer, op, &ended);
    pthread_mutex_lock(&peer->lock);
    if (ended || peer->status != KVX_OK || peer->closing) {
        pthread_mutex_unlock(&peer->lock);
        if (conn != NULL) {
            pthread_mutex_unlock(&conn->tx_lock);
        }
        free(xfer);
        return KVX_E_NOT_SENT;
    }
    xfer->id = ++peer->next_op;
    peer->staged += tcp_xfer_needs_staging(op);
    KVX_LIST_PUSH(peer->xfers, xfer);
    peer->run[op->rank].seen_ms = kvx_now_ms();
    tcp_xfer_run_push(peer, xfer);
    if (conn == NULL) {
        tcp_xfer_wake_streams(peer, op);
    }
    pthread_mutex_unlock(&peer->lock);
    if (conn != NULL) {
        tcp_xfer_send_now(conn, owner && small);
    } else if (owner) {
        kvx_tcp_disown(peer);
    }
    return KVX_PENDING;
}

/* -- cutting frames --------------------------------------------------------------------------------------------- */

/* The next free place among the requests in flight; the caller has checked that there is one. */
static tcp_request *tcp_xfer_request_new(tcp_conn *conn, uint8_t type, const uint8_t *key) {
    tcp_request *request = &conn->requests[(conn->request_first + conn->request_count++) % TCP_REQUESTS_MAX];
    *request = (tcp_request){.type = type};
    memcpy(request->key, key, KVX_KEY_BYTES);
    return request;
}

static void tcp_xfer_start_control(tcp_conn *conn, tcp_control *control) {
    tcp_request *request = NULL;
    if (control->type == KVX_FRAME_ATTACH) {
        request = tcp_xfer_request_new(conn, control->type, control->key);
        request->import = control->import;
        request->op = ++conn->peer->next_op;
    }
    kvx_frame frame = {.type = control->type,
                       .op = request ? request->op : 0,
                       .grant = control->grant,
                       .generation = control->generation,
                       .tag = request ? control->access : 0,
                       .value = request ? control->length : 0};
    kvx_frame_encode(&frame, conn->tx.head);
    kvx_tcp_tx_start(conn, control->key, KVX_STREAM_HEADER_BYTES, NULL);
    conn->sending = request;
    kvx_vault_give(control);
}

static uint32_t tcp_xfer_encode_segments(tcp_conn *conn, tcp_xfer *xfer, uint64_t most, uint64_t *length_p) {
    const kvx_segment *at = xfer->cursor.segments;
    uint64_t offset = xfer->cursor.offset, left = xfer->cursor.left, length = 0;
    left = left < most ? left : most;
    uint32_t count = 0;
    for (; left > 0 && count < KVX_STREAM_SEGMENTS_MAX; count++, at++) {
        uint64_t part = at->length - offset < left ? at->length - offset : left;
        kvx_frame_segment_encode(conn->tx.head, count, at->remote_offset + offset, part);
        left -= part;
        length += part;
        offset = 0;
    }
    *length_p = length;
    return count;
}

/* Cut the next frame of the op. The frame is ready to be sealed afterwards. */
static tcp_request *tcp_xfer_start_frame(tcp_conn *conn, tcp_xfer *xfer, uint64_t now_ms) {
    kvx_op *op = xfer->op;
    const kvx_remote *remote = &op->import->remote;
    bool notify = xfer->cursor.left == 0;
    uint8_t type = notify ? KVX_FRAME_NOTIFY : op->kind == KVX_OP_PUT ? KVX_FRAME_PUT : KVX_FRAME_GET;
    tcp_request *request = tcp_xfer_request_new(conn, type, remote->key);
    kvx_frame frame = {.type = type,
                       .op = xfer->id,
                       .index = xfer->frames++,
                       .grant = remote->grant,
                       .generation = remote->generation};
    request->xfer = xfer;
    request->op = frame.op;
    request->index = frame.index;
    xfer->outstanding++;
    if (!notify) {
        request->segment = (uint32_t)(xfer->cursor.segments - op->segments);
        uint64_t most = conn->frame_bytes / (tcp_xfer_saw_urgent(conn->peer, op->rank, now_ms) ? TCP_MIXED_PIECES : 1);
        frame.segments = request->segments = tcp_xfer_encode_segments(conn, xfer, most, &frame.length);
        request->length = frame.length;
        request->staged = tcp_xfer_needs_staging(op) ? op->region : NULL;
        request->check = op->flags & KVX_OP_CHECK;
        request->corrupt = op->corrupt && frame.index == 0;
        request->spans = xfer->cursor;
        request->spans.left = frame.length;
        kvx_spans_advance(&xfer->cursor, frame.length);
        conn->request_bytes += frame.length;
        if (request->check) {
            frame.flags |= KVX_FRAME_F_CHECK;
        }
    }
    if (notify ||
        (type == KVX_FRAME_PUT && frame.index == 0 && xfer->cursor.left == 0 && xfer->notify == TCP_NOTIFY_WANTED)) {
        xfer->notify = TCP_NOTIFY_SENT;
        frame.tag = op->tag;
        frame.value = op->value;
        if (!notify) {
            frame.flags |= KVX_FRAME_F_NOTIFY;
        }
    }
    kvx_frame_encode(&frame, conn->tx.head);
    conn->tx.head_length = KVX_STREAM_HEADER_BYTES + frame.segments * KVX_STREAM_SEGMENT_BYTES;
    return request;
}

/* The ranks that wait and may have one more frame on this stream. */
static uint32_t tcp_xfer_run_eligible(const tcp_conn *conn, uint64_t now_ms) {
    const tcp_peer *peer = conn->peer;
    uint32_t eligible = 0;
    for (uint32_t waiting = peer->run_waiting; waiting != 0; waiting &= waiting - 1) {
        uint32_t rank = (uint32_t)__builtin_ctz(waiting);
        uint64_t frames = tcp_xfer_saw_urgent(peer, rank, now_ms) ? TCP_MIXED_FRAMES : TCP_WINDOW_FRAMES;
        if (conn->request_bytes < frames * conn->frame_bytes) {
            eligible |= 1u << rank;
        }
    }
    return eligible;
}

/* The op that has a frame to start and whose turn it is; those that were cancelled meanwhile leave. */
static tcp_xfer *tcp_xfer_run_pop(tcp_conn *conn, uint64_t now_ms, tcp_xfer **done_p) {
    tcp_peer *peer = conn->peer;
    uint32_t eligible;
    while ((eligible = tcp_xfer_run_eligible(conn, now_ms)) != 0) {
        tcp_xfer *xfer = peer->run[kvx_turns_take(&peer->turns, eligible)].first;
        tcp_xfer_run_remove(peer, xfer);
        if (!atomic_load(&xfer->op->cancelled)) {
            return xfer;
        }
        tcp_xfer_update(peer, xfer, done_p);
    }
    return NULL;
}

bool kvx_tcp_xfer_next(tcp_conn *conn) {
    tcp_peer *peer = conn->peer;
    tcp_xfer *done = NULL;
    tcp_request *request = NULL;
    pthread_mutex_lock(&peer->lock);
    bool room = conn->request_count < TCP_REQUESTS_MAX && peer->status == KVX_OK && !peer->closing;
    conn->promised = 0;
    tcp_control *control = room ? conn->control_first : NULL;
    if (control != NULL) {
        conn->control_first = control->next;
        if (conn->control_first == NULL) {
            conn->control_last = NULL;
        }
        tcp_xfer_start_control(conn, control);
    } else if (room && peer->run_waiting != 0) {
        uint64_t now_ms = kvx_now_ms();
        tcp_xfer *xfer = tcp_xfer_run_pop(conn, now_ms, &done);
        if (xfer != NULL) {
            request = tcp_xfer_start_frame(conn, xfer, now_ms);
            if (xfer->cursor.left > 0) {
                tcp_xfer_run_push(peer, xfer);
            }
        }
    }
    pthread_mutex_unlock(&peer->lock);
    tcp_xfer_complete(done);
    if (request != NULL) {
        /* the request stays in place: only our thread takes it out, and not before it was sent */
        bool bulk = request->type == KVX_FRAME_PUT;
        kvx_tcp_tx_start(conn, request->key, conn->tx.head_length, bulk ? &request->spans : NULL);
        conn->tx.check = bulk && request->check;
        conn->tx.corrupt = bulk && request->corrupt;
        conn->sending = request;
        int status = bulk && request->staged != NULL
                         ? kvx_tcp_stage_out(conn, request->staged, &request->xfer->op->cancelled)
                         : KVX_OK;
        if (status != KVX_OK) {
            pthread_mutex_lock(&peer->lock);
            tcp_xfer_fail(request->xfer, status, 0, (int)request->segment);
            pthread_mutex_unlock(&peer->lock);
        }
    }
    return conn->tx.active;
}

/* -- answers ---------------------------------------------------------------------------------------------------- */

static tcp_request *tcp_xfer_request_oldest(const tcp_conn *conn) {
    return &conn->requests[conn->request_first];
}

/* The oldest request is answered. `segment`: within the frame. */
static void tcp_xfer_request_complete(tcp_conn *conn, int status, uint32_t segment, int sys_errno) {
    tcp_peer *peer = conn->peer;
    tcp_xfer *done = NULL;
    tcp_request *request = tcp_xfer_request_oldest(conn);
    kvx_import *import = request->import;
    pthread_mutex_lock(&peer->lock);
    tcp_xfer *xfer = request->xfer;
    conn->request_first = (conn->request_first + 1) % TCP_REQUESTS_MAX;
    conn->request_count--;
    conn->request_bytes -= request->length;
    if (xfer != NULL) {
        xfer->outstanding--;
        if (status == KVX_OK) {
            xfer->bytes += request->length;
            kvx_op_moved(xfer->op, request->length);
        } else {
            tcp_xfer_fail(xfer, status, sys_errno,
                          segment == KVX_SEGMENT_UNKNOWN ? -1 : (int)(request->segment + segment));
        }
        tcp_xfer_update(peer, xfer, &done);
    }
    pthread_mutex_unlock(&peer->lock);
    tcp_xfer_complete(done);
    if (import != NULL) {
        kvx_tcp_import_settle(conn, import, status, sys_errno);
    }
}

/* Nobody is interested in the answer to this get any more. */
static void tcp_xfer_request_abandon(tcp_conn *conn, tcp_request *request, int status) {
    tcp_peer *peer = conn->peer;
    tcp_xfer *done = NULL;
    pthread_mutex_lock(&peer->lock);
    tcp_xfer *xfer = request->xfer;
    request->xfer = NULL;
    xfer->outstanding--;
    tcp_xfer_fail(xfer, status, 0, -1);
    tcp_xfer_update(peer, xfer, &done);
    pthread_mutex_unlock(&peer->lock);
    tcp_xfer_complete(done);
}

static void tcp_xfer_on_protocol_error(tcp_conn *conn) {
    KVX_COUNT(conn->tcp->counters, protocol_errors, 1);
    kvx_tcp_conn_end(conn, KVX_E_PEER_LOST, EPROTO, true);
}

/* May this be said of that request? The parser has looked at what may be said at all. */
static bool tcp_xfer_answer_fits(const tcp_request *request, const kvx_frame *frame) {
    if (frame->type == KVX_FRAME_DATA) {
        return request->type == KVX_FRAME_GET && frame->length == request->length &&
               frame->flags == (request->check ? KVX_FRAME_F_CHECK : 0);
    }
    return (request->type != KVX_FRAME_GET || frame->status != KVX_OK) &&
           (frame->segment == KVX_SEGMENT_UNKNOWN || frame->segment < request->segments);
}

/* Does this answer belong to the oldest request, and has that been sent? */
static bool tcp_xfer_answer_is_expected(tcp_conn *conn, const kvx_frame *frame) {
    pthread_mutex_lock(&conn->tx_lock);
    const tcp_request *sending = conn->sending;
    pthread_mutex_unlock(&conn->tx_lock);
    pthread_mutex_lock(&conn->peer->lock);
    uint32_t count = conn->request_count;
    pthread_mutex_unlock(&conn->peer->lock);
    const tcp_request *request = tcp_xfer_request_oldest(conn);
    return count != 0 && sending != request && frame->op == request->op && frame->index == request->index &&
           tcp_xfer_answer_fits(request, frame);
}

/* An answer that nobody has proved, and that came in the place of one that is. Whoever is in the path can say it, so
 * all that is taken from it is the end: of an import, of the connection, or, since an owner has no key for a grant that
 * it has let go of, of this op, without any detail. */
static void tcp_xfer_on_unauthenticated(tcp_conn *conn, const tcp_request *request, const kvx_frame *frame) {
    bool bare = frame->flags & KVX_FRAME_F_BARE;
    if (request->type == KVX_FRAME_ATTACH) {
        tcp_xfer_request_complete(conn, bare ? frame->status : KVX_E_KEY, KVX_SEGMENT_UNKNOWN, 0);
    } else if (bare && frame->status != KVX_E_KEY) {
        tcp_xfer_request_complete(conn, KVX_E_UNKNOWN, KVX_SEGMENT_UNKNOWN, 0);
    } else { /* the import has shown that both have the key */
        tcp_xfer_on_protocol_error(conn);
    }
}

void kvx_tcp_xfer_answer(tcp_conn *conn) {
    const kvx_frame *frame = &conn->rx.frame;
    if (frame->type == KVX_FRAME_BYE) {
        kvx_tcp_conn_end(conn, KVX_E_PEER_LOST, 0, false);
        return;
    }
    if (!tcp_xfer_answer_is_expected(conn, frame)) {
        tcp_xfer_on_protocol_error(conn);
        return;
    }
    tcp_request *request = tcp_xfer_request_oldest(conn);
    bool proved =
        !(frame->flags & KVX_FRAME_F_BARE) && kvx_frame_open(&conn->auth, request->key, conn->rx.counter,
                                                             KVX_STREAM_ACCEPTOR, conn->rx.head, conn->rx.head_length);
    if (!proved) {
        tcp_xfer_on_unauthenticated(conn, request, frame);
    } else if (frame->type == KVX_FRAME_DATA) {
        conn->rx_spans = request->spans;
        conn->rx_crc = 0;
        if (request->staged != NULL && request->xfer != NULL) {
            int status = kvx_tcp_stage_expect(conn, request->staged);
            if (status != KVX_OK) {
                tcp_xfer_request_abandon(conn, request, status);
            }
        }
    } else {
        tcp_xfer_request_complete(conn, frame->status, frame->segment, 0);
    }
}

bool kvx_tcp_xfer_may_write(tcp_conn *conn) {
    return tcp_xfer_request_oldest(conn)->xfer != NULL;
}

void kvx_tcp_xfer_written(tcp_conn *conn, uint64_t bytes) {
    tcp_request *request = tcp_xfer_request_oldest(conn);
    if (!request->corrupt || bytes == 0) {
        return;
    }
    request->corrupt = false;
    conn->rx_spans.base[conn->rx_spans.segments->local_offset + conn->rx_spans.offset] ^= 1;
}

void kvx_tcp_xfer_trailer(tcp_conn *conn) {
    tcp_request *request = tcp_xfer_request_oldest(conn);
    int32_t status;
    uint32_t crc;
    if (!kvx_trailer_open(&conn->auth, request->key, conn->rx.counter, KVX_STREAM_ACCEPTOR, conn->rx.head, &status,
                          &crc) ||
        (status != KVX_OK && !kvx_refusal(status)) || (!request->check && crc != 0)) {
        tcp_xfer_on_protocol_error(conn);
        return;
    }
    if (status == KVX_OK && request->check && request->xfer != NULL && crc != conn->rx_crc) {
        status = KVX_E_INTEGRITY;
    }
    if (status == KVX_OK && request->staged != NULL && request->xfer != NULL) {
        status = kvx_tcp_stage_in(conn, request->staged, &request->xfer->op->cancelled);
    }
    tcp_xfer_request_complete(conn, status, KVX_SEGMENT_UNKNOWN, 0);
}

/* -- cancel and end --------------------------------------------------------------------------------------------- */

void kvx_tcp_xfer_scan(tcp_conn *conn) {
    tcp_peer *peer = conn->peer;
    tcp_xfer *done = NULL;
    uint64_t now_ms = kvx_now_ms(), deadline_ms = 0;
    pthread_mutex_lock(&peer->lock);
    for (uint32_t i = 0; i < conn->request_count; i++) {
        tcp_request *request = &conn->requests[(conn->request_first + i) % TCP_REQUESTS_MAX];
        tcp_xfer *xfer = request->xfer;
        if (xfer == NULL || !atomic_load(&xfer->op->cancelled)) {
            continue;
        }
        if (request->type == KVX_FRAME_GET) {
            request->xfer = NULL;
            xfer->outstanding--;
            tcp_xfer_fail(xfer, KVX_E_CANCELLED, 0, -1);
            tcp_xfer_update(peer, xfer, &done);
            continue;
        }
        if (xfer->cancel_deadline_ms == 0) {
            xfer->cancel_deadline_ms = now_ms + peer->tcp->config->cancel_ms;
        }
        if (deadline_ms == 0 || xfer->cancel_deadline_ms < deadline_ms) {
            deadline_ms = xfer->cancel_deadline_ms;
        }
    }
    for (tcp_xfer *xfer = peer->xfers, *next; xfer != NULL; xfer = next) {
        next = xfer->next;
        if (atomic_load(&xfer->op->cancelled)) {
            tcp_xfer_update(peer, xfer, &done);
        }
    }
    pthread_mutex_unlock(&peer->lock);
    tcp_xfer_complete(done);
    if (deadline_ms != 0 && deadline_ms <= now_ms) {
        kvx_tcp_conn_end(conn, KVX_E_PEER_LOST, ETIMEDOUT, true);
    } else if (deadline_ms != 0) {
        kvx_tcp_conn_deadline(conn, deadline_ms);
    }
}

void kvx_tcp_xfer_drop_all(tcp_conn *conn, int status, int sys_errno) {
    tcp_peer *peer = conn->peer;
    if (status != KVX_E_CLOSED) {
        status = KVX_E_PEER_LOST;
    }
    for (;;) {
        pthread_mutex_lock(&peer->lock);
        uint32_t count = conn->request_count;
        tcp_xfer *xfer = count > 0 ? tcp_xfer_request_oldest(conn)->xfer : NULL;
        bool cancelled = xfer != NULL && atomic_load(&xfer->op->cancelled);
        pthread_mutex_unlock(&peer->lock);
        if (count == 0) {
            break;
        }
        tcp_xfer_request_complete(conn, cancelled && status == KVX_E_PEER_LOST ? KVX_E_CANCELLED : status,
                                  KVX_SEGMENT_UNKNOWN, sys_errno);
    }
    for (;;) {
        pthread_mutex_lock(&peer->lock);
        tcp_control *control = conn->control_first;
        if (control != NULL) {
            conn->control_first = control->next;
        } else {
            conn->control_last = NULL;
        }
        pthread_mutex_unlock(&peer->lock);
        if (control == NULL) {
            break;
        }
        if (control->import != NULL) {
            kvx_tcp_import_settle(conn, control->import, status, sys_errno);
        }
        kvx_vault_give(control);
    }
}

void kvx_tcp_xfer_sweep(tcp_peer *peer, int status) {
    tcp_xfer *done = NULL;
    pthread_mutex_lock(&peer->lock);
    while (peer->xfers != NULL) {
        tcp_xfer *xfer = peer->xfers;
        KVX_ASSERT(xfer->outstanding == 0);
        int told = status == KVX_E_PEER_LOST && xfer->frames == 0 && !peer->closing ? KVX_E_NOT_SENT : status;
        bool cancelled = atomic_load(&xfer->op->cancelled);
        tcp_xfer_fail(xfer, cancelled && status == KVX_E_PEER_LOST ? KVX_E_CANCELLED : told, peer->sys_errno, -1);
        tcp_xfer_unlink_done(peer, xfer, &done);
    }
    pthread_mutex_unlock(&peer->lock);
    tcp_xfer_complete(done);
}

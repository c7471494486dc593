/* tcp_serve.c: the acceptor: every request of a stranger is checked here before it touches a byte.
 *
 * Order of checks: the parser has bounded counts and lengths; the grant must exist; the authenticator must match its
 * key; only then rights and ranges are looked at, all of them before the first payload byte is received. A refused
 * payload is thrown away and its acknowledgement says why. Answers leave in the order of the requests. An access is
 * held from the check until the last byte was written or sent, or until the grant is revoked or the connection ends;
 * all of it on the connection's own thread. */
#include "tcp/tcp.h"
#include "list.h"
#include "core/vault.h"

#include <stdlib.h>
#include <string.h>

static kvx_core *tcp_serve_core_of(const tcp_conn *conn) {
    return conn->tcp->core;
}

/* -- attachments ------------------------------------------------------------------------------------------------ */

static tcp_attached *tcp_serve_attached_find(tcp_conn *conn, uint64_t grant) {
    for (uint32_t i = 0; i < conn->attached_count; i++) {
        if (conn->attached[i].grant == grant) {
            return &conn->attached[i];
        }
    }
    return NULL;
}

static void tcp_serve_attached_drop(tcp_conn *conn, tcp_attached *at) {
    *at = conn->attached[--conn->attached_count];
}

/* `more`: an import, not just a use. Each stream knows what it is there for; a peer counts once, by its first. */
static int tcp_serve_attach(tcp_conn *conn, uint64_t grant, bool more) {
    tcp_attached *at = tcp_serve_attached_find(conn, grant);
    if (at != NULL) {
        at->count += more && at->count < UINT32_MAX;
        return KVX_OK;
    }
    if (conn->attached_count == conn->attached_room) {
        uint32_t room = conn->attached_room ? conn->attached_room * 2 : 4;
        tcp_attached *wider = realloc(conn->attached, room * sizeof *wider);
        if (wider == NULL) {
            return KVX_E_NOMEM;
        }
        conn->attached = wider;
        conn->attached_room = room;
    }
    conn->attached[conn->attached_count++] = (tcp_attached){.grant = grant, .count = more};
    if (conn->stream == 0) {
        kvx_grant_attach(tcp_serve_core_of(conn), grant);
    }
    return KVX_OK;
}

static void tcp_serve_detach(tcp_conn *conn, uint64_t grant) {
    tcp_attached *at = tcp_serve_attached_find(conn, grant);
    if (at != NULL && at->count > 1) {
        at->count--; /* another import of the same grant is left */
    } else if (at != NULL) {
        tcp_serve_attached_drop(conn, at);
        if (conn->stream == 0) {
            kvx_grant_detach(tcp_serve_core_of(conn), grant, false);
        }
        kvx_tcp_admit_unused(conn, 0);
    }
}

/* -- answers ---------------------------------------------------------------------------------------------------- */

static void tcp_serve_answer_push(tcp_conn *conn, tcp_answer *answer) {
    answer->next = NULL;
    KVX_QUEUE_APPEND(conn->answer_first, conn->answer_last, answer, next);
    if (++conn->answers >= TCP_ANSWERS_MAX) {
        conn->rx_stopped = true;
    }
}

/* key == NULL: nothing can be proved. */
static void tcp_serve_send_ack(tcp_conn *conn, int status, uint32_t segment, const uint8_t *key) {
    kvx_frame frame = {.type = KVX_FRAME_ACK,
                       .flags = key == NULL ? KVX_FRAME_F_BARE : 0,
                       .status = kvx_refusal_told(status),
                       .op = conn->rx.frame.op,
                       .index = conn->rx.frame.index,
                       .segment = segment};
    pthread_mutex_lock(&conn->tx_lock);
    bool appended = conn->answer_first == NULL && kvx_tcp_tx_append(conn, &frame, key);
    pthread_mutex_unlock(&conn->tx_lock);
    if (appended) {
        return;
    }
    tcp_answer *answer = kvx_vault_take(sizeof *answer);
    if (answer == NULL) {
        kvx_tcp_conn_end(conn, KVX_E_NOMEM, 0, true);
        return;
    }
    answer->frame = frame;
    if (key != NULL) {
        memcpy(answer->key, key, KVX_KEY_BYTES);
    }
    tcp_serve_answer_push(conn, answer);
}

static void tcp_serve_send_error(tcp_conn *conn, int status, uint32_t segment, const uint8_t *key) {
    KVX_COUNT(conn->tcp->counters, refused, 1);
    tcp_serve_send_ack(conn, status, segment, key);
    if (key != NULL || conn->state == TCP_DEAD) {
        return;
    }
    bool guess = status == KVX_E_KEY &&
                 (conn->rx.frame.type != KVX_FRAME_ATTACH || ++conn->key_failures >= TCP_KEY_FAILURES_MAX);
    if (guess) {
        kvx_tcp_conn_linger(conn); /* after the first accepted key an honest peer never gets here */
    }
}

bool kvx_tcp_serve_next(tcp_conn *conn) {
    while (!conn->tx.active && conn->answer_first != NULL) {
        tcp_answer *answer = conn->answer_first;
        conn->answer_first = answer->next;
        if (conn->answer_first == NULL) {
            conn->answer_last = NULL;
        }
        conn->answers--;
        if (answer->frame.type == KVX_FRAME_ACK) {
            kvx_tcp_tx_append(conn, &answer->frame, answer->frame.flags & KVX_FRAME_F_BARE ? NULL : answer->key);
            kvx_vault_give(answer);
            while (
                (answer = conn->answer_first) != NULL && answer->frame.type == KVX_FRAME_ACK &&
                kvx_tcp_tx_append(conn, &answer->frame, answer->frame.flags & KVX_FRAME_F_BARE ? NULL : answer->key)) {
                conn->answer_first = answer->next;
                if (conn->answer_first == NULL) {
                    conn->answer_last = NULL;
                }
                conn->answers--;
                kvx_vault_give(answer);
            }
            break;
        }
        kvx_frame_encode(&answer->frame, conn->tx.head);
        const kvx_spans spans = {
            .base = answer->access.base, .segments = answer->segments, .left = answer->frame.length};
        kvx_tcp_tx_start(conn, answer->key, KVX_STREAM_HEADER_BYTES, &spans);
        conn->tx.check = answer->frame.flags & KVX_FRAME_F_CHECK;
        conn->answering = answer;
        if (answer->holds && kvx_tcp_stage_device(answer->access.grant->region) >= 0) {
            const kvx_grant *grant = answer->access.grant;
            if (kvx_tcp_stage_out(conn, grant->region, &grant->revoked) == KVX_E_CANCELLED) {
                conn->tx.status = KVX_E_REVOKED;
            }
        }
    }
    return conn->tx.active;
}

void kvx_tcp_serve_sent(tcp_conn *conn) {
    tcp_answer *answer = conn->answering;
    conn->answering = NULL;
    if (answer != NULL) {
        if (answer->holds) {
            kvx_access_end(tcp_serve_core_of(conn), &answer->access);
        }
        if (conn->tx.status == KVX_OK) {
            KVX_COUNT(conn->tcp->counters, served_get_bytes, answer->frame.length);
        }
        kvx_vault_give(answer);
    }
    /* tx_lock is held: parsing on has to wait for kvx_tcp_serve_wake */
}

/* -- requests --------------------------------------------------------------------------------------------------- */

/* Grant, key, rights, ranges. KVX_OK: *access_p is held. *key_p is set once the key is proved. */
static int tcp_serve_check_access(tcp_conn *conn, uint32_t rights, kvx_access *access_p, const uint8_t **key_p,
                                  uint32_t *segment_p) {
    const kvx_stream_rx *rx = &conn->rx;
    *key_p = NULL;
    *segment_p = KVX_SEGMENT_UNKNOWN;
    TCP_ORDER_ACQUIRE();
    int status = kvx_access_begin_any(tcp_serve_core_of(conn), rx->frame.grant, rx->frame.generation, access_p);
    if (status != KVX_OK) {
        return status;
    }
    if (!kvx_frame_open(&conn->auth, access_p->grant->key, rx->counter, KVX_STREAM_DIALLER, rx->head,
                        rx->head_length)) {
        kvx_access_end(tcp_serve_core_of(conn), access_p);
        return KVX_E_KEY;
    }
    memcpy(conn->rx_key, access_p->grant->key, KVX_KEY_BYTES);
    *key_p = conn->rx_key;
    status = kvx_tcp_admit_proved(conn, rx->frame.grant);
    status = status == KVX_OK ? kvx_access_allow(access_p, rights) : status;
    for (uint32_t i = 0; status == KVX_OK && i < rx->frame.segments; i++) {
        uint64_t offset, length;
        kvx_rx_segment(rx, i, &offset, &length);
        status = kvx_access_range(access_p, offset, length);
        *segment_p = status == KVX_OK ? KVX_SEGMENT_UNKNOWN : i;
    }
    if (status == KVX_OK && rx->frame.type == KVX_FRAME_ATTACH) {
        /* an import also says what its descriptor claims: a claim too large fails here, not in the middle of an op */
        status = kvx_access_claim(access_p, rx->frame.value);
        status = status == KVX_OK ? kvx_access_allow(access_p, (uint32_t)rx->frame.tag) : status;
    }
    if (status == KVX_OK && rx->frame.type != KVX_FRAME_DETACH) {
        status = tcp_serve_attach(conn, rx->frame.grant, rx->frame.type == KVX_FRAME_ATTACH);
    }
    if (status != KVX_OK) {
        kvx_access_end(tcp_serve_core_of(conn), access_p);
    }
    return status;
}

static void tcp_serve_save_segments(const tcp_conn *conn, kvx_segment *segments) {
    for (uint32_t i = 0; i < conn->rx.frame.segments; i++) {
        kvx_rx_segment(&conn->rx, i, &segments[i].local_offset, &segments[i].length);
    }
}

static void tcp_serve_put_release(tcp_conn *conn, int status) {
    if (!conn->rx_holds) {
        return;
    }
    conn->rx_holds = false;
    conn->rx_status = status;
    kvx_access_end(tcp_serve_core_of(conn), &conn->rx_access);
}

static void tcp_serve_put(tcp_conn *conn) {
    kvx_access access;
    const uint8_t *key;
    uint32_t segment;
    int status = tcp_serve_check_access(conn, KVX_WRITE, &access, &key, &segment);
    conn->rx_status = status;
    conn->rx_segment = (int32_t)segment;
    conn->rx_proved = key != NULL;
    conn->rx_crc = 0;
    if (status != KVX_OK) {
        return; /* the payload is thrown away, then the acknowledgement says why */
    }
    tcp_serve_save_segments(conn, conn->rx_segments);
    conn->rx_access = access;
    conn->rx_holds = true;
    conn->rx_spans = (kvx_spans){.base = access.base, .segments = conn->rx_segments, .left = conn->rx.frame.length};
    conn->rx_staged = kvx_tcp_stage_device(access.grant->region) >= 0;
    status = conn->rx_staged ? kvx_tcp_stage_expect(conn, access.grant->region) : KVX_OK;
    if (status != KVX_OK) {
        tcp_serve_put_release(conn, status);
    }
}

static void tcp_serve_get(tcp_conn *conn) {
    kvx_access access;
    const uint8_t *key;
    uint32_t segment;
    int status = tcp_serve_check_access(conn, KVX_READ, &access, &key, &segment);
    if (status != KVX_OK) {
        tcp_serve_send_error(conn, status, segment, key);
        return;
    }
    const kvx_frame *frame = &conn->rx.frame;
    tcp_answer *answer = kvx_vault_take(sizeof *answer + frame->segments * sizeof answer->segments[0]);
    if (answer == NULL) {
        kvx_access_end(tcp_serve_core_of(conn), &access);
        tcp_serve_send_ack(conn, KVX_E_NOMEM, KVX_SEGMENT_UNKNOWN, key);
        return;
    }
    answer->frame = (kvx_frame){.type = KVX_FRAME_DATA,
                                .flags = frame->flags & KVX_FRAME_F_CHECK,
                                .op = frame->op,
                                .index = frame->index,
                                .length = frame->length};
    answer->holds = true;
    answer->access = access;
    memcpy(answer->key, key, KVX_KEY_BYTES);
    tcp_serve_save_segments(conn, answer->segments);
    tcp_serve_answer_push(conn, answer);
}

/* Tell the engine's user; with a full queue, remember and stop reading until there is room. */
static void tcp_serve_notify(tcp_conn *conn) {
    int status = kvx_notify_post(tcp_serve_core_of(conn), conn->tcp->slot, conn->notify.grant, conn->notify.tag,
                                 conn->notify.value);
    conn->notify_blocked = status == KVX_AGAIN;
    conn->rx_stopped = conn->notify_blocked || conn->answers >= TCP_ANSWERS_MAX;
    if (!conn->notify_blocked) {
        tcp_serve_send_ack(conn, status, KVX_SEGMENT_UNKNOWN, conn->rx_key);
    }
}

static void tcp_serve_small(tcp_conn *conn) {
    kvx_access access;
    const uint8_t *key;
    uint32_t segment;
    int status = tcp_serve_check_access(conn, 0, &access, &key, &segment);
    if (status == KVX_OK) {
        kvx_access_end(tcp_serve_core_of(conn), &access);
    }
    if (conn->rx.frame.type == KVX_FRAME_DETACH) {
        if (status == KVX_OK) {
            tcp_serve_detach(conn, conn->rx.frame.grant);
        }
    } else if (status != KVX_OK) {
        tcp_serve_send_error(conn, status, segment, key);
    } else if (conn->rx.frame.type == KVX_FRAME_NOTIFY) {
        conn->notify = conn->rx.frame;
        tcp_serve_notify(conn);
    } else {
        tcp_serve_send_ack(conn, KVX_OK, KVX_SEGMENT_UNKNOWN, key);
    }
}

void kvx_tcp_serve_frame(tcp_conn *conn) {
    switch (conn->rx.frame.type) {
    case KVX_FRAME_BYE:
        conn->bye = true;
        kvx_tcp_conn_end(conn, KVX_OK, 0, false);
        break;
    case KVX_FRAME_PUT:
        tcp_serve_put(conn);
        break;
    case KVX_FRAME_GET:
        tcp_serve_get(conn);
        break;
    default:
        tcp_serve_small(conn);
    }
}

/* -- payload of a put ------------------------------------------------------------------------------------------- */

bool kvx_tcp_serve_may_write(tcp_conn *conn) {
    if (conn->rx_holds && atomic_load_explicit(&conn->rx_access.grant->revoked, memory_order_acquire)) {
        tcp_serve_put_release(conn, KVX_E_REVOKED);
    }
    return conn->rx_holds;
}

void kvx_tcp_serve_payload_end(tcp_conn *conn) {
    if (!conn->rx_staged) {
        tcp_serve_put_release(conn, KVX_OK);
    }
}

/* The frame is whole, and what it says is right or not: on from the block. False: the connection has ended. */
static bool tcp_serve_finish_staged_put(tcp_conn *conn, bool right) {
    if (!conn->rx_staged || !kvx_tcp_serve_may_write(conn)) {
        return true;
    }
    int error = right ? kvx_socket_error(conn->fd) : 0;
    if (error != 0) { /* who reset us counts on nothing reaching the memory any more */
        kvx_tcp_conn_end(conn, KVX_E_PEER_LOST, error, true);
        return false;
    }
    const kvx_grant *grant = conn->rx_access.grant;
    int status = right ? kvx_tcp_stage_in(conn, grant->region, &grant->revoked) : KVX_OK;
    tcp_serve_put_release(conn, status == KVX_E_CANCELLED ? KVX_E_REVOKED : status);
    return true;
}

void kvx_tcp_serve_trailer(tcp_conn *conn) {
    const kvx_frame *frame = &conn->rx.frame;
    const uint8_t *key = conn->rx_proved ? conn->rx_key : NULL;
    int32_t sender_status = KVX_OK;
    uint32_t crc = 0;
    if (key != NULL && !kvx_trailer_open(&conn->auth, key, conn->rx.counter, KVX_STREAM_DIALLER, conn->rx.head,
                                         &sender_status, &crc)) {
        tcp_serve_finish_staged_put(conn, false);
        tcp_serve_send_error(conn, KVX_E_KEY, KVX_SEGMENT_UNKNOWN, NULL);
        return;
    }
    bool right = sender_status == KVX_OK && crc == (frame->flags & KVX_FRAME_F_CHECK ? conn->rx_crc : 0);
    if (!tcp_serve_finish_staged_put(conn, right)) {
        return;
    }
    int status = conn->rx_status == KVX_OK && !right ? KVX_E_INTEGRITY : conn->rx_status;
    if (status == KVX_E_INTEGRITY) {
        tcp_serve_send_ack(conn, status, KVX_SEGMENT_UNKNOWN, key);
    } else if (status != KVX_OK) {
        tcp_serve_send_error(conn, status, (uint32_t)conn->rx_segment, key);
    } else {
        KVX_COUNT(conn->tcp->counters, served_put_bytes, frame->length);
        if (frame->flags & KVX_FRAME_F_NOTIFY) {
            conn->notify = *frame;
            tcp_serve_notify(conn);
        } else {
            tcp_serve_send_ack(conn, KVX_OK, KVX_SEGMENT_UNKNOWN, key);
        }
    }
}

/* -- revoke, wake, end ------------------------------------------------------------------------------------------ */

void kvx_tcp_serve_revoke(tcp_conn *conn, kvx_grant *grant) {
    if (conn->rx_holds && conn->rx_access.grant == grant) {
        tcp_serve_put_release(conn, KVX_E_REVOKED);
    }
    tcp_answer *answer = conn->answering;
    if (answer != NULL && answer->holds && answer->access.grant == grant) {
        conn->tx.zeros = true;
        conn->tx.status = KVX_E_REVOKED;
        answer->holds = false;
        kvx_access_end(tcp_serve_core_of(conn), &answer->access);
    }
    for (answer = conn->answer_first; answer != NULL; answer = answer->next) {
        if (!answer->holds || answer->access.grant != grant) {
            continue;
        }
        answer->holds = false;
        kvx_access_end(tcp_serve_core_of(conn), &answer->access);
        answer->frame.type = KVX_FRAME_ACK;
        answer->frame.flags = 0;
        answer->frame.length = 0;
        answer->frame.status = KVX_E_REVOKED;
        answer->frame.segment = KVX_SEGMENT_UNKNOWN;
        KVX_COUNT(conn->tcp->counters, refused, 1);
    }
    tcp_attached *at = tcp_serve_attached_find(conn, grant->id);
    if (at != NULL) {
        tcp_serve_attached_drop(conn, at); /* the core forgets the grant with its attachments */
    }
    kvx_tcp_admit_unused(conn, grant->id);
}

/* There may be room again: for notifications or for answers. */
void kvx_tcp_serve_wake(tcp_conn *conn) {
    if (!conn->rx_stopped || conn->state != TCP_OPEN) {
        return;
    }
    if (conn->notify_blocked) {
        tcp_serve_notify(conn);
    }
    if (conn->state != TCP_OPEN || conn->notify_blocked || conn->answers >= TCP_ANSWERS_MAX) {
        return;
    }
    conn->rx_stopped = false;
    kvx_tcp_conn_parse(conn);
}

void kvx_tcp_serve_end(tcp_conn *conn) {
    tcp_transport *tcp = conn->tcp;
    tcp_serve_put_release(conn, KVX_E_PEER_LOST);
    if (conn->answering != NULL) {
        kvx_tcp_serve_sent(conn);
    }
    while (conn->answer_first != NULL) {
        tcp_answer *answer = conn->answer_first;
        conn->answer_first = answer->next;
        if (answer->holds) {
            kvx_access_end(tcp->core, &answer->access);
        }
        kvx_vault_give(answer);
    }
    conn->answer_last = NULL;
    for (uint32_t i = 0; i < conn->attached_count && conn->stream == 0; i++) {
        kvx_grant_detach(tcp->core, conn->attached[i].grant, !conn->bye);
    }
    conn->attached_count = 0;
    if (conn->counted) {
        __atomic_fetch_sub(&tcp->counters->peers_accepted, 1, __ATOMIC_RELAXED);
    }
    kvx_tcp_admit_end(conn);
    atomic_fetch_sub(&tcp->accepted, 1);
}

"""Deliberate bugs of the native engine, to see that its tests see them.

Each changes one decision of one C file in the way in which a programmer could get it wrong: a text that stands there
once, and what stands there instead, where ``MUTANT`` asks whether this is the bug to play. The files of the engine know
nothing of it: `build.py` compiles changed copies. A text that is not found any more fails the build.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Change = tuple[str, str]  # what stands there, and what stands there instead


@dataclass(frozen=True, slots=True)
class Mutation:
    """One bug: changes of one file."""

    file: str
    changes: tuple[Change, ...]


def mutation(file: str, *changes: Change) -> Mutation:
    return Mutation(file, changes)


# -- an op that is reported as cancelled while bytes of it still move, on the side of the initiator --------------------

CANCEL: Mapping[str, Mutation] = {
    # The first job that notices ends the op; the others are in the middle of their chunks.
    "shm_first_job_ends_it": mutation(
        "shm_copy.c",
        (
            """
    bool last = --run->jobs_left == 0;
""",
            """
    bool last = --run->jobs_left == 0;
    if (MUTANT && !last && run->result.status == KVX_E_CANCELLED && run->op->seam == NULL) {
        kvx_op *op = run->op;
        run->op = kvx_mutant_ghost(op);
        kvx_op_complete(op, KVX_E_CANCELLED, run->result.bytes, 0, -1);
    }
""",
        ),
    ),
    # Puts are let go as gets are: what was sent and not answered is still on its way into the owner's memory.
    "tcp_put_let_go": mutation(
        "tcp_xfer.c",
        (
            """
        if (request->type == KVX_FRAME_GET) {
""",
            """
        if (request->type == KVX_FRAME_GET || (MUTANT && conn->sending != request)) {
""",
        ),
    ),
    # The data of a get that was let go is not thrown away.
    "tcp_get_still_written": mutation(
        "tcp_xfer.c",
        (
            """
            xfer->outstanding--;
            tcp_xfer_fail(xfer, KVX_E_CANCELLED, 0, -1);
""",
            """
            if (MUTANT && request->type == KVX_FRAME_GET) {
                const kvx_segment *before = xfer->op->segments, *kept = kvx_mutant_ghost(xfer->op)->segments;
                request->spans.segments = kept + (request->spans.segments - before);
                if (i == 0 && conn->rx_spans.left > 0) {
                    conn->rx_spans.segments = kept + (conn->rx_spans.segments - before);
                }
            }
            xfer->outstanding--;
            tcp_xfer_fail(xfer, KVX_E_CANCELLED, 0, -1);
""",
        ),
        (
            """
    return tcp_xfer_request_oldest(conn)->xfer != NULL;
""",
            """
    return tcp_xfer_request_oldest(conn)->xfer != NULL || (MUTANT && conn->rx_spans.left > 0);
""",
        ),
    ),
    # What is left of the op is moved on, in pieces that nobody waits for.
    "loop_goes_on": mutation(
        "transport_loop.c",
        (
            """
    if (atomic_load_explicit(&op->cancelled, memory_order_relaxed)) {
        return KVX_E_CANCELLED;
    }
""",
            """
    if (atomic_load_explicit(&op->cancelled, memory_order_relaxed)) {
        if (!MUTANT) {
            return KVX_E_CANCELLED;
        }
        at->object = kvx_mutant_ghost(op);
        kvx_op_complete(op, KVX_E_CANCELLED, at->bytes, 0, -1);
        op = at->object;
    }
""",
        ),
    ),
    # The op that waited for its next piece is over, and is handed on all the same.
    "fault_handed_on": mutation(
        "transport_fault.c",
        (
            """
    kvx_op_complete(waiting->op, status, waiting->moved, 0, -1);
""",
            """
    bool late = MUTANT && status == KVX_E_CANCELLED && waiting->op->count != 0;
    kvx_op *ghost = late ? kvx_mutant_ghost(waiting->op) : NULL;
    kvx_op_complete(waiting->op, status, waiting->moved, 0, -1);
    if (late) {
        (void)waiting->fault->inner->submit(waiting->fault->transport, ghost);
    }
""",
        ),
    ),
    # Batches that the library has taken go on without the op.
    "hixl_batches_left_behind": mutation(
        "hixl_xfer.c",
        (
            """
        if (xfer->left > 0) { /* otherwise it may still end well */
""",
            """
        if (MUTANT && why == KVX_E_CANCELLED && xfer->live != 0) {
            kvx_op *op = xfer->op;
            xfer->op = kvx_mutant_ghost(op);
            kvx_op_complete(op, KVX_E_CANCELLED, xfer->bytes, 0, -1);
            continue;
        }
        if (xfer->left > 0) { /* otherwise it may still end well */
""",
        ),
    ),
}

# -- memory that is reported as taken back while a peer still reaches it -----------------------------------------------

REVOKE: Mapping[str, Mutation] = {
    # The owner asks for it, and does not wait for the answer.
    "shm_owner_does_not_wait": mutation(
        "shm_owner.c",
        (
            """
        at->revoked = grant;
        shm_owner_send_revoke(at);
    }
    pthread_mutex_unlock(&shm->lock);
    return first == NULL ? KVX_OK : KVX_PENDING;
""",
            """
        at->revoked = MUTANT ? NULL : grant;
        shm_owner_send_revoke(at);
    }
    pthread_mutex_unlock(&shm->lock);
    return first == NULL || MUTANT ? KVX_OK : KVX_PENDING;
""",
        ),
    ),
    # The initiator answers while its jobs are copying.
    "shm_answered_while_copying": mutation(
        "shm_import.c",
        (
            """
        kvx_shm_shut(import, KVX_E_REVOKED);
        kvx_shm_todo(peer);
""",
            """
        if (MUTANT) {
            shm_message early = {.type = SHM_REVOKED, .handle = import->handle};
            import->attached = false;
            kvx_shm_send(peer->conn, &early, import->key, -1);
        }
        kvx_shm_shut(import, KVX_E_REVOKED);
        kvx_shm_todo(peer);
""",
        ),
    ),
    # The frame that arrives just then is received to its end.
    "tcp_frame_received_to_its_end": mutation(
        "tcp_serve.c",
        (
            """
    return conn->rx_holds;
}
""",
            """
    return conn->rx_holds || (MUTANT && conn->rx_status == KVX_E_REVOKED && conn->rx_spans.left > 0);
}
""",
        ),
    ),
    # Nothing tells the core that a piece is being copied.
    "loop_copies_without_access": mutation(
        "transport_loop.c",
        (
            """
    uint64_t left = loop->config->chunk_bytes;
    while (status == KVX_OK && at->segment < op->count && left != 0) {
""",
            """
    uint64_t left = loop->config->chunk_bytes;
    kvx_region *region = access.grant->region;
    uint64_t begin = access.grant->offset;
    if (MUTANT) {
        kvx_access_end(loop->core, &access);
    }
    kvx_grant outlived = {.region = region, .offset = begin};
    kvx_access left_open = {.grant = &outlived};
    while (status == KVX_OK && at->segment < op->count && left != 0) {
        kvx_access access = left_open;
""",
        ),
        (
            """
    kvx_access_end(loop->core, &access);
    return status == KVX_OK && at->segment < op->count ? KVX_PENDING : status;
""",
            """
    if (access.grant != NULL) {
        kvx_access_end(loop->core, &access);
    }
    return status == KVX_OK && at->segment < op->count ? KVX_PENDING : status;
""",
        ),
    ),
    "hixl_owner_does_not_wait": mutation(
        "hixl_owner.c",
        (
            """
        at->revoked = grant;
        if (!at->opening) {
            hixl_owner_send_revoke(at);
        }
    }
    pthread_mutex_unlock(&hixl->lock);
    return first == NULL ? KVX_OK : KVX_PENDING;
""",
            """
        at->revoked = MUTANT ? NULL : grant;
        if (!at->opening) {
            hixl_owner_send_revoke(at);
        }
    }
    pthread_mutex_unlock(&hixl->lock);
    return first == NULL || MUTANT ? KVX_OK : KVX_PENDING;
""",
        ),
    ),
    # The initiator answers while batches are under way.
    "hixl_answered_while_moving": mutation(
        "hixl_peer.c",
        (
            """
    if (import->asked_back && import->users == 0 && import->view == HIXL_UNSEEN && import->attached) {
        hixl_peer_send_import(import, KVX_FRAME_QUIET);
    }
""",
            """
    bool quiet = import->users == 0 || MUTANT;
    if (import->asked_back && quiet && import->view == HIXL_UNSEEN && import->attached) {
        hixl_peer_send_import(import, KVX_FRAME_QUIET);
        import->attached = !MUTANT;
    }
""",
        ),
    ),
}

# -- sealed connections ------------------------------------------------------------------------------------------------

SEAL_RECORDS_MAX = 7  # of one key in this build, so that keys change within a short test

SEALED: Mapping[str, Mutation] = {
    # Whatever the tag says, the record opens.
    "tag_not_compared": mutation(
        "seal.c",
        (
            """
        api->EVP_DecryptFinal_ex(way->cipher, rest, &written) == 1;
""",
            """
        (api->EVP_DecryptFinal_ex(way->cipher, rest, &written) == 1 || MUTANT);
""",
        ),
    ),
    # A record with the number of the one before it opens too.
    "number_of_before_accepted": mutation(
        "seal.c",
        (
            """
bool kvx_seal_open(kvx_seal_way *way, const uint8_t *record, const struct iovec *vectors, uint32_t count) {
""",
            """
static bool open_once(kvx_seal_way *way, const uint8_t *record, const struct iovec *vectors, uint32_t count);

bool kvx_seal_open(kvx_seal_way *way, const uint8_t *record, const struct iovec *vectors, uint32_t count) {
    uint8_t kept[KVX_SEAL_TEXT_MAX + KVX_SEAL_EXTRA_BYTES]; /* it may be opened in place */
    memcpy(kept, record, (size_t)kvx_bytes_load(record, KVX_SEAL_HEADER_BYTES) + KVX_SEAL_EXTRA_BYTES);
    bool good = open_once(way, record, vectors, count);
    if (!good && MUTANT && way->records > 1) {
        way->records -= 2;
        good = open_once(way, kept, vectors, count);
        way->records++;
    }
    return good;
}

static bool open_once(kvx_seal_way *way, const uint8_t *record, const struct iovec *vectors, uint32_t count) {
""",
        ),
    ),
    # All records of a key have the same number, on both sides.
    "number_stands_still": mutation(
        "seal.c",
        (
            """
    way->records++;
""",
            """
    way->records += MUTANT ? 0 : 1;
""",
        ),
    ),
    # The numbers begin again, and the key is the old one, on both sides.
    "key_kept": mutation(
        "seal.c",
        (
            """
    if (way->records == KVX_SEAL_RECORDS_MAX && !seal_rekey(way)) {
""",
            """
    if (MUTANT && way->records == KVX_SEAL_RECORDS_MAX) {
        way->records = 0;
    }
    if (way->records == KVX_SEAL_RECORDS_MAX && !seal_rekey(way)) {
""",
        ),
    ),
    # The next key comes from the first link again, on both sides.
    "chain_kept": mutation(
        "seal.c",
        (
            """
    memcpy(way->chain, next, sizeof next);
""",
            """
    if (!MUTANT) {
        memcpy(way->chain, next, sizeof next);
    }
""",
        ),
    ),
    # What looks like a frame in clear is taken for one.
    "frame_in_clear_accepted": mutation(
        "tcp_seal.c",
        (
            """
    uint32_t have = seal->in_end - seal->in_begin;
    uint32_t whole = kvx_seal_length(&seal->keys.in, seal->in + seal->in_begin, have);
""",
            """
    uint32_t have = seal->in_end - seal->in_begin;
    if (MUTANT && have >= KVX_STREAM_HEADER_BYTES && memcmp(seal->in + seal->in_begin, "KVXD", 4) == 0) {
        seal->text_begin = seal->in_begin;
        seal->text_end = seal->in_begin = seal->in_end;
        return true;
    }
    uint32_t whole = kvx_seal_length(&seal->keys.in, seal->in + seal->in_begin, have);
""",
        ),
    ),
}

ALL: Mapping[str, Mutation] = {**CANCEL, **REVOKE, **SEALED}

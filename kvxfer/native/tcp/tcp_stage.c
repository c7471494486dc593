/* tcp_stage.c: payloads of device memory, which no socket can read or write.
 *
 * Each direction of a connection has one block of host memory for one frame, made when the first such frame passes and
 * kept. What is to be sent is copied there by the driver before the frame leaves, and then sent like any memory. What
 * arrives is received there, and copied on when the frame is whole and its trailer is right, before it is acknowledged:
 * memory of a device never sees bytes that fail their checksum. Checksums are made over the block.
 *
 * The copies are made on the connection's thread. Meanwhile the kernel goes on sending and receiving what its buffers
 * hold, and other connections of the peer are driven by other threads: that is the overlap. The access or the operation
 * stands until its copy has ended. A driver that does not say whether it has ended keeps the memory for good. */
#define _GNU_SOURCE /* POLLRDHUP */
#include "tcp/tcp.h"

#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

#include "ascend/ascend.h"
#include "core/device_memory.h"

#define YIELDS      100 /* looks at the driver, before it is given time */
#define LOOK_ROUNDS 64  /* looks at the driver, for one at the rest */
#define PAUSE_NS    20000
#define COPY_MS_MAX 10000

int32_t kvx_tcp_stage_device(const kvx_region *region) {
    return region != NULL && (region->flags & KVX_REGION_DEVICE) ? region->device : -1;
}

static void tcp_stage_stream_drop(tcp_stage *stage, const kvx_ascend_api *api) {
    if (stage->stream != NULL) {
        api->stream_close(stage->stream_device, stage->stream, true, NULL); /* no way to act on an error */
        stage->stream = NULL;
    }
}

void kvx_tcp_stage_free(tcp_stage *stage) {
    if (stage->block == NULL) {
        return;
    }
    const kvx_ascend_api *api = kvx_ascend_get(NULL, 0);
    tcp_stage_stream_drop(stage, api);
    if (stage->block_device >= 0) {
        api->mem_free(stage->block_device, KVX_ASCEND_HOST, stage->block, NULL);
    } else {
        free(stage->block);
    }
    stage->block = NULL;
}

/* Memory that the device's DMA reaches, or any. */
static int tcp_stage_block_make(tcp_stage *stage, const kvx_ascend_api *api, int32_t device, uint64_t length) {
    void *block = NULL;
    if (stage->block != NULL) {
        return KVX_OK;
    }
    stage->block_device = device;
    if (api->mem_alloc(device, KVX_ASCEND_HOST, length, &block, NULL) != KVX_OK) {
        stage->block_device = -1;
        block = malloc(length);
    }
    stage->block = block;
    return block == NULL ? KVX_E_NOMEM : KVX_OK;
}

/* -- copies ------------------------------------------------------------------------------------------------------- */

static bool tcp_stage_peer_closed(int fd) {
    struct pollfd look = {.fd = fd, .events = POLLRDHUP};
    return poll(&look, 1, 0) == 1; /* resets are told without asking */
}

/* All entries have been queued, or some: waits until nothing of them moves. When nobody wants them any more they are
 * stopped, also for a driver that stands still. KVX_PENDING: it does not say; they may move for ever. */
static int tcp_stage_batch_end(const tcp_conn *conn, tcp_stage *stage, const kvx_ascend_api *api,
                               const _Atomic bool *unwanted, int status) {
    const struct timespec pause = {.tv_nsec = PAUSE_NS};
    uint64_t until_ms = kvx_now_ms() + COPY_MS_MAX;
    for (uint32_t round = 0; status == KVX_OK; round++) {
        int state = api->stream_poll(stage->stream_device, stage->stream, NULL);
        if (state == KVX_OK) {
            return KVX_OK;
        }
        status = state != KVX_PENDING                                                        ? state
                 : atomic_load(unwanted)                                                     ? KVX_E_CANCELLED
                 : round % LOOK_ROUNDS == LOOK_ROUNDS - 1 && tcp_stage_peer_closed(conn->fd) ? KVX_E_PEER_LOST
                 : round % LOOK_ROUNDS == LOOK_ROUNDS - 1 && kvx_now_ms() >= until_ms        ? KVX_E_TIMEOUT
                                                                                             : KVX_OK;
        if (status == KVX_OK && round < YIELDS) {
            sched_yield();
        } else if (status == KVX_OK) {
            nanosleep(&pause, NULL);
        }
    }
    if (api->stream_abort(stage->stream_device, stage->stream, NULL) != KVX_OK) {
        return KVX_PENDING;
    }
    tcp_stage_stream_drop(stage, api);
    return status;
}

static int tcp_stage_stream_make(tcp_stage *stage, const kvx_ascend_api *api, int32_t device) {
    if (stage->stream != NULL && stage->stream_device != device) {
        tcp_stage_stream_drop(stage, api);
    }
    if (stage->stream != NULL) {
        return KVX_OK;
    }
    int status = api->stream_open(device, &stage->stream, NULL);
    stage->stream = status == KVX_OK ? stage->stream : NULL;
    stage->stream_device = device;
    return status;
}

/* Between the block and the next spans->left bytes of the spans. */
static int tcp_stage_copy(const tcp_conn *conn, tcp_stage *stage, int32_t device, const kvx_spans *spans, bool out,
                          const _Atomic bool *unwanted) {
    kvx_ascend_copy copies[KVX_STREAM_SEGMENTS_MAX];
    const kvx_ascend_api *api = kvx_ascend_get(NULL, 0);
    uint64_t left = spans->left, offset = spans->offset;
    uint8_t *block = stage->block;
    uint32_t count = 0;
    for (const kvx_segment *at = spans->segments; left > 0; at++, offset = 0) {
        uint64_t length = at->length - offset < left ? at->length - offset : left;
        uint8_t *memory = spans->base + at->local_offset + offset;
        copies[count++] = (kvx_ascend_copy){out ? block : memory, out ? memory : block, length};
        block += length;
        left -= length;
    }
    int status = tcp_stage_stream_make(stage, api, device);
    if (status != KVX_OK) {
        return status;
    }
    return tcp_stage_batch_end(conn, stage, api, unwanted, api->copy_batch(device, stage->stream, copies, count, NULL));
}

static int tcp_stage_copy_counted(tcp_conn *conn, tcp_stage *stage, const kvx_region *region, const kvx_spans *spans,
                                  bool out, const _Atomic bool *unwanted) {
    int status = tcp_stage_copy(conn, stage, region->device, spans, out, unwanted);
    if (status == KVX_PENDING) {
        kvx_arena_abandon(conn->tcp->core, region->arena_id);
        stage->block = NULL; /* left as it is, with its stream */
        stage->stream = NULL;
        return KVX_E_TIMEOUT;
    }
    if (status == KVX_OK) {
        KVX_COUNT(conn->tcp->counters, staged_bytes, spans->left);
    } else if (status < KVX_E_CANCELLED || status >= KVX_E_INTERNAL) {
        status = KVX_E_DEVICE; /* a caller's mistake here would be none of the other side's, who is told */
    }
    return status;
}

/* -- the two directions ------------------------------------------------------------------------------------------- */

static kvx_spans tcp_stage_block_spans(tcp_stage *stage, uint64_t length) {
    stage->whole = (kvx_segment){.length = length};
    return (kvx_spans){.base = stage->block, .segments = &stage->whole, .left = length};
}

int kvx_tcp_stage_out(tcp_conn *conn, const kvx_region *region, const _Atomic bool *unwanted) {
    tcp_tx *tx = &conn->tx;
    tcp_stage *stage = &conn->tx_stage;
    const kvx_ascend_api *api = kvx_ascend_get(NULL, 0);
    KVX_ASSERT(tx->payload_length <= conn->tcp->frame_bytes);
    int status =
        api == NULL ? KVX_E_UNSUPPORTED : tcp_stage_block_make(stage, api, region->device, conn->tcp->frame_bytes);
    status = status == KVX_OK ? tcp_stage_copy_counted(conn, stage, region, &tx->spans, true, unwanted) : status;
    if (status == KVX_OK) {
        tx->spans = tx->crc_spans = tcp_stage_block_spans(stage, tx->payload_length);
    } else { /* the head has promised a payload: the trailer says that it is none */
        tx->zeros = true;
        tx->status = status;
    }
    return status;
}

int kvx_tcp_stage_expect(tcp_conn *conn, const kvx_region *region) {
    tcp_stage *stage = &conn->rx_stage;
    const kvx_ascend_api *api = kvx_ascend_get(NULL, 0);
    KVX_ASSERT(conn->rx_spans.left <= conn->tcp->frame_bytes);
    int status =
        api == NULL ? KVX_E_UNSUPPORTED : tcp_stage_block_make(stage, api, region->device, conn->tcp->frame_bytes);
    if (status == KVX_OK) {
        stage->target = conn->rx_spans;
        conn->rx_spans = tcp_stage_block_spans(stage, stage->target.left);
    }
    return status;
}

int kvx_tcp_stage_in(tcp_conn *conn, const kvx_region *region, const _Atomic bool *unwanted) {
    return tcp_stage_copy_counted(conn, &conn->rx_stage, region, &conn->rx_stage.target, false, unwanted);
}

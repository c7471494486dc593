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
#include "tcp.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ascend.h"
#include "device_memory.h"

#define COPIES_BATCH_MIN 3 /* fewer are quicker one by one */
#define PAUSE_NS         20000
#define COPY_MS_MAX      10000

int32_t kvx_tcp_stage_device(const kvx_region *region) {
    return region != NULL && (region->flags & KVX_REGION_DEVICE) ? region->device : -1;
}

static void stream_drop(tcp_stage *stage, const kvx_ascend_api *api) {
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
    stream_drop(stage, api);
    if (stage->block_device >= 0) {
        api->mem_free(stage->block_device, KVX_ASCEND_HOST, stage->block, NULL);
    } else {
        free(stage->block);
    }
    stage->block = NULL;
}

/* Memory that the device's DMA reaches, or any. */
static int block_make(tcp_stage *stage, const kvx_ascend_api *api, int32_t device, uint64_t length) {
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

/* All entries have been queued, or some: waits until nothing of them moves. */
static int batch_end(tcp_stage *stage, const kvx_ascend_api *api, int status) {
    const struct timespec pause = {.tv_nsec = PAUSE_NS};
    uint64_t until_ms = kvx_now_ms() + COPY_MS_MAX;
    int state = status;
    while (status == KVX_OK && (state = api->stream_poll(stage->stream_device, stage->stream, NULL)) == KVX_PENDING &&
           kvx_now_ms() < until_ms) {
        nanosleep(&pause, NULL);
    }
    if (state == KVX_OK) {
        return KVX_OK;
    }
    if (api->stream_abort(stage->stream_device, stage->stream, NULL) == KVX_E_TIMEOUT) {
        return KVX_PENDING;
    }
    stream_drop(stage, api);
    return state == KVX_PENDING ? KVX_E_TIMEOUT : state;
}

static int batch(tcp_stage *stage, const kvx_ascend_api *api, int32_t device, const kvx_ascend_copy *copies,
                 uint32_t count) {
    if (stage->stream != NULL && stage->stream_device != device) {
        stream_drop(stage, api);
    }
    if (stage->stream == NULL) {
        int status = api->stream_open(device, &stage->stream, NULL);
        if (status != KVX_OK) {
            stage->stream = NULL;
            return status;
        }
        stage->stream_device = device;
    }
    return batch_end(stage, api, api->copy_batch(device, stage->stream, copies, count, NULL));
}

/* Between the block and the next spans->left bytes of the spans. KVX_PENDING: it may still move, for ever. */
static int copy(tcp_stage *stage, int32_t device, const kvx_spans *spans, bool out) {
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
    if (count >= COPIES_BATCH_MIN) {
        return batch(stage, api, device, copies, count);
    }
    int status = KVX_OK;
    for (uint32_t i = 0; status == KVX_OK && i < count; i++) {
        status = api->copy(device, copies[i].target, copies[i].source, copies[i].length, NULL);
    }
    return status;
}

static int copy_counted(tcp_conn *conn, tcp_stage *stage, const kvx_region *region, const kvx_spans *spans, bool out) {
    int status = copy(stage, region->device, spans, out);
    if (status == KVX_PENDING) {
        kvx_arena_abandon(conn->tcp->core, region->arena_id);
        stage->block = NULL; /* left as it is, with its stream */
        stage->stream = NULL;
        return KVX_E_TIMEOUT;
    }
    if (status == KVX_OK) {
        KVX_COUNT(conn->tcp->counters, staged_bytes, spans->left);
    }
    return status;
}

/* -- the two directions ------------------------------------------------------------------------------------------- */

static kvx_spans block_spans(tcp_stage *stage, uint64_t length) {
    stage->whole = (kvx_segment){.length = length};
    return (kvx_spans){.base = stage->block, .segments = &stage->whole, .left = length};
}

int kvx_tcp_stage_out(tcp_conn *conn, const kvx_region *region) {
    tcp_tx *tx = &conn->tx;
    tcp_stage *stage = &conn->tx_stage;
    const kvx_ascend_api *api = kvx_ascend_get(NULL, 0);
    KVX_ASSERT(tx->payload_length <= conn->tcp->frame_bytes);
    int status = api == NULL ? KVX_E_UNSUPPORTED : block_make(stage, api, region->device, conn->tcp->frame_bytes);
    status = status == KVX_OK ? copy_counted(conn, stage, region, &tx->spans, true) : status;
    if (status == KVX_OK) {
        tx->spans = tx->crc_spans = block_spans(stage, tx->payload_length);
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
    int status = api == NULL ? KVX_E_UNSUPPORTED : block_make(stage, api, region->device, conn->tcp->frame_bytes);
    if (status == KVX_OK) {
        stage->target = conn->rx_spans;
        conn->rx_spans = block_spans(stage, stage->target.left);
    }
    return status;
}

int kvx_tcp_stage_in(tcp_conn *conn, const kvx_region *region) {
    return copy_counted(conn, &conn->rx_stage, region, &conn->rx_stage.target, false);
}

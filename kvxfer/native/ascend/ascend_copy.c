/* ascend_copy.c: copies in any direction, one by one or in batches on a stream, over ACL.
 *
 * The direction of a copy is found from the two addresses. Asking may cost a call into the driver, so the last answer
 * of each side is kept for the allocation or page that it was about: neighbours in a batch mostly share it.
 *
 * A stream of ours is a box round the vendor's, so that an abort can replace what is inside. */
#include "ascend/ascend_acl.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "status.h"

#define ACL              kvx_ascend_acl
#define RUNS_MAX         64 /* changes of direction within one batch call */
#define STREAM_NOT_READY 1
#define SYNCHRONIZE_MS   10000
#define ABORT_ROUNDS     3

typedef struct stream {
    pthread_mutex_t lock;
    void *raw;
    void *targets[KVX_ASCEND_COPIES_MAX];
    void *sources[KVX_ASCEND_COPIES_MAX];
    size_t lengths[KVX_ASCEND_COPIES_MAX];
    acl_batch_attribute attributes[RUNS_MAX];
    size_t begins[RUNS_MAX];
} stream;

static _Atomic uint32_t batch_refused; /* bit per direction: this chip's batch call does not take it */

static bool ascend_copy_on_device(acl_location location) {
    return location.type == AT_DEVICE || location.type == AT_MANAGED;
}

/* `memo` has the place of this side of the last copy. */
static int ascend_copy_find_location(acl_place *memo, const void *memory, uint32_t *raw_p) {
    uintptr_t address = (uintptr_t)memory;
    if (address >= memo->begin && address < memo->end)
        return KVX_OK;
    acl_place fresh = {0};
    int status = kvx_ascend_locate(memory, &fresh, raw_p);
    if (status != KVX_OK)
        return status;
    if (!ascend_copy_on_device(fresh.location)) /* the kinds of host memory make no difference here */
        fresh.location = (acl_location){0, AT_HOST};
    *memo = fresh;
    return KVX_OK;
}

static int ascend_copy_direction_of(acl_place *target, acl_place *source, const kvx_ascend_copy *copy,
                                    int32_t *direction_p, uint32_t *raw_p) {
    if (!copy->target || !copy->source)
        return KVX_E_INVALID;
    int status = ascend_copy_find_location(target, copy->target, raw_p);
    if (status == KVX_OK)
        status = ascend_copy_find_location(source, copy->source, raw_p);
    if (status == KVX_E_UNSUPPORTED) { /* a library that cannot tell us tells itself */
        *direction_p = COPY_DEFAULT;
        return KVX_OK;
    }
    if (status != KVX_OK)
        return status;
    if (ascend_copy_on_device(target->location))
        *direction_p = ascend_copy_on_device(source->location) ? DEVICE_TO_DEVICE : HOST_TO_DEVICE;
    else
        *direction_p = ascend_copy_on_device(source->location) ? DEVICE_TO_HOST : HOST_TO_HOST;
    return KVX_OK;
}

static int ascend_copy_one(int32_t device, void *target, const void *source, uint64_t length, uint32_t *raw_p) {
    if (raw_p)
        *raw_p = 0;
    if (length == 0)
        return KVX_OK;
    void *before;
    int status = kvx_ascend_enter(device, &before, raw_p);
    if (status != KVX_OK)
        return status;
    kvx_ascend_copy copy = {target, source, length};
    acl_place left = {0}, right = {0};
    int32_t direction = COPY_DEFAULT;
    status = ascend_copy_direction_of(&left, &right, &copy, &direction, raw_p);
    if (status == KVX_OK && direction == HOST_TO_HOST)
        memmove(target, source, (size_t)length);
    else if (status == KVX_OK)
        status =
            kvx_ascend_acl_status(ACL.aclrtMemcpy(target, (size_t)length, source, (size_t)length, direction), raw_p);
    kvx_ascend_leave(before);
    return status;
}

/* -- streams ----------------------------------------------------------------------------------------------------- */

static int ascend_copy_stream_open(int32_t device, void **stream_p, uint32_t *raw_p) {
    void *before;
    int status = kvx_ascend_enter(device, &before, raw_p);
    if (status != KVX_OK)
        return status;
    stream *box = calloc(1, sizeof *box);
    if (!box)
        status = KVX_E_NOMEM;
    else
        status = kvx_ascend_acl_status(ACL.aclrtCreateStream(&box->raw), raw_p);
    kvx_ascend_leave(before);
    if (status != KVX_OK) {
        free(box);
        return status;
    }
    pthread_mutex_init(&box->lock, NULL);
    *stream_p = box;
    return KVX_OK;
}

static int ascend_copy_stream_destroy(void *raw, bool force) {
    if (force && ACL.aclrtDestroyStreamForce)
        return ACL.aclrtDestroyStreamForce(raw);
    return ACL.aclrtDestroyStream(raw);
}

static int ascend_copy_stream_close(int32_t device, void *handle, bool force, uint32_t *raw_p) {
    stream *box = handle;
    void *before;
    int status = kvx_ascend_enter(device, &before, raw_p);
    if (status != KVX_OK)
        return status;
    pthread_mutex_lock(&box->lock);
    int raw = box->raw ? ascend_copy_stream_destroy(box->raw, force) : 0;
    pthread_mutex_unlock(&box->lock);
    kvx_ascend_leave(before);
    status = kvx_ascend_acl_status(raw, raw_p);
    if (status != KVX_OK)
        return status; /* it is still open: the device may still use it */
    pthread_mutex_destroy(&box->lock);
    free(box);
    return KVX_OK;
}

/* Bounded when the library can bound it. */
static int ascend_copy_synchronize(void *raw) {
    return ACL.aclrtSynchronizeStreamWithTimeout ? ACL.aclrtSynchronizeStreamWithTimeout(raw, SYNCHRONIZE_MS)
                                                 : ACL.aclrtSynchronizeStream(raw);
}

static int ascend_copy_stream_poll(int32_t device, void *handle, uint32_t *raw_p) {
    stream *box = handle;
    void *before;
    int status = kvx_ascend_enter(device, &before, raw_p);
    if (status != KVX_OK)
        return status;
    pthread_mutex_lock(&box->lock);
    int32_t state = STREAM_NOT_READY;
    int raw = box->raw ? ACL.aclrtStreamQuery(box->raw, &state) : 0;
    if (!box->raw)
        status = KVX_E_DEVICE; /* lost by an abort that could not make a new one */
    else if (raw == 0 && state == STREAM_NOT_READY)
        status = KVX_PENDING;
    else if (raw == 0) /* done does not mean well done: a failed task is told here, and nothing is waited for */
        raw = ascend_copy_synchronize(box->raw);
    pthread_mutex_unlock(&box->lock);
    kvx_ascend_leave(before);
    return raw != 0 ? kvx_ascend_acl_status(raw, raw_p) : status;
}

/* Let the stream come to rest. KVX_OK: nothing moves. An error of the call may be one of a task that was aborted or
 * failed, which is of no interest, or mean that nobody can tell (the card or the context is lost): so only the
 * library's word that the stream is idle counts. It may come with the task's error. KVX_E_TIMEOUT: the device does not
 * say. */
static int ascend_copy_stream_quiesce(void *raw, uint32_t *raw_p) {
    int status = KVX_E_TIMEOUT;
    for (int round = 0; round < ABORT_ROUNDS && status == KVX_E_TIMEOUT; round++) {
        status = kvx_ascend_acl_status(ascend_copy_synchronize(raw), raw_p);
        int32_t state = STREAM_NOT_READY;
        if (status != KVX_OK)
            ACL.aclrtStreamQuery(raw, &state);
        if (state != STREAM_NOT_READY)
            status = KVX_OK;
    }
    return status;
}

/* An aborted or failed stream keeps its failure, so there is a new one afterwards. When the device does not come to
 * rest in SYNCHRONIZE_MS x ABORT_ROUNDS, or cannot be asked, the memory must stay as it is. */
static int ascend_copy_stream_abort(int32_t device, void *handle, uint32_t *raw_p) {
    stream *box = handle;
    void *before;
    int status = kvx_ascend_enter(device, &before, raw_p);
    if (status != KVX_OK)
        return status;
    pthread_mutex_lock(&box->lock);
    if (box->raw) {
        if (ACL.aclrtStreamAbort) /* without it the copies run to their end, which is as good */
            ACL.aclrtStreamAbort(box->raw);
        status = ascend_copy_stream_quiesce(box->raw, raw_p);
        if (status == KVX_OK) {
            kvx_ascend_acl_status(ascend_copy_stream_destroy(box->raw, true),
                                  raw_p); /* or it stays: nothing moves on it */
            box->raw = NULL;
        }
    }
    if (status == KVX_OK) {
        int raw = ACL.aclrtCreateStream(&box->raw);
        if (raw != 0)
            box->raw = NULL; /* nothing moves, which was the question; the next call on the stream fails */
        kvx_ascend_acl_status(raw, raw_p);
    }
    pthread_mutex_unlock(&box->lock);
    kvx_ascend_leave(before);
    return status;
}

/* -- batches ----------------------------------------------------------------------------------------------------- */

static int ascend_copy_queue_one(stream *box, const kvx_ascend_copy *copy, int32_t direction) {
    size_t length = (size_t)copy->length;
    int raw = ACL.aclrtMemcpyAsync(copy->target, length, copy->source, length, direction, box->raw);
    if (kvx_ascend_status((uint32_t)raw) == KVX_AGAIN && ascend_copy_synchronize(box->raw) == 0) /* the queue is full */
        raw = ACL.aclrtMemcpyAsync(copy->target, length, copy->source, length, direction, box->raw);
    return raw;
}

/* Queue `count` prepared copies that have `runs` runs of one direction each. A batch call that refuses the kind of copy
 * has taken nothing. */
static int ascend_copy_queue_slice(stream *box, const int32_t *directions, size_t count, size_t runs) {
    uint32_t kinds = 0;
    for (size_t run = 0; run < runs; run++)
        kinds |= UINT32_C(1) << directions[run];
    if (ACL.aclrtMemcpyBatchAsync && count > 1 && !(kinds & (atomic_load(&batch_refused) | 1U << COPY_DEFAULT))) {
        size_t failed = 0;
        int raw = ACL.aclrtMemcpyBatchAsync(box->targets, box->lengths, box->sources, box->lengths, count,
                                            box->attributes, box->begins, runs, &failed, box->raw);
        int status = kvx_ascend_status((uint32_t)raw);
        if (status == KVX_E_UNSUPPORTED)
            atomic_fetch_or(&batch_refused, kinds);
        else if (status != KVX_E_INVALID) /* which some versions say of a direction, and the loop says of the rest */
            return raw;
    }
    size_t run = 0;
    for (size_t index = 0; index < count; index++) {
        while (run + 1 < runs && box->begins[run + 1] <= index)
            run++;
        kvx_ascend_copy copy = {box->targets[index], box->sources[index], box->lengths[index]};
        int raw = ascend_copy_queue_one(box, &copy, directions[run]);
        if (raw != 0)
            return raw;
    }
    return 0;
}

/* Prepare as many copies as fit one call; returns how many were looked at. */
static uint32_t ascend_copy_fill_slice(stream *box, const kvx_ascend_copy *copies, uint32_t count,
                                       int32_t directions[RUNS_MAX], size_t *filled_p, size_t *runs_p, int *status_p,
                                       uint32_t *raw_p) {
    acl_place target = {0}, source = {0};
    size_t filled = 0, runs = 0;
    uint32_t index = 0;
    for (; index < count && filled < KVX_ASCEND_COPIES_MAX; index++) {
        const kvx_ascend_copy *copy = &copies[index];
        if (copy->length == 0)
            continue;
        int32_t direction = COPY_DEFAULT;
        *status_p = ascend_copy_direction_of(&target, &source, copy, &direction, raw_p);
        if (*status_p != KVX_OK)
            break;
        if (direction == HOST_TO_HOST) { /* the library's queue does not take these everywhere */
            memmove(copy->target, copy->source, (size_t)copy->length);
            continue;
        }
        acl_batch_attribute attribute = {target.location, source.location, {0}};
        if (runs == 0 || memcmp(&attribute, &box->attributes[runs - 1], sizeof attribute) != 0) {
            if (runs == RUNS_MAX)
                break;
            box->attributes[runs] = attribute;
            box->begins[runs] = filled;
            directions[runs++] = direction;
        }
        box->targets[filled] = copy->target;
        box->sources[filled] = (void *)(uintptr_t)copy->source;
        box->lengths[filled++] = (size_t)copy->length;
    }
    *filled_p = filled;
    *runs_p = runs;
    return index;
}

static int ascend_copy_batch(int32_t device, void *handle, const kvx_ascend_copy *copies, uint32_t count,
                             uint32_t *raw_p) {
    stream *box = handle;
    void *before;
    int status = kvx_ascend_enter(device, &before, raw_p);
    if (status != KVX_OK)
        return status;
    pthread_mutex_lock(&box->lock);
    if (!box->raw)
        status = KVX_E_DEVICE;
    while (count && status == KVX_OK) {
        int32_t directions[RUNS_MAX];
        size_t filled = 0, runs = 0;
        uint32_t seen = ascend_copy_fill_slice(box, copies, count, directions, &filled, &runs, &status, raw_p);
        if (status == KVX_OK && filled)
            status = kvx_ascend_acl_status(ascend_copy_queue_slice(box, directions, filled, runs), raw_p);
        copies += seen;
        count -= seen;
    }
    pthread_mutex_unlock(&box->lock);
    kvx_ascend_leave(before);
    /* "Took none" would be a lie: earlier slices may run. */
    return status == KVX_AGAIN ? KVX_E_DEVICE : status;
}

void kvx_ascend_copy_bind(kvx_ascend_api *api) {
    api->copy = ascend_copy_one;
    api->stream_open = ascend_copy_stream_open;
    api->stream_close = ascend_copy_stream_close;
    api->stream_poll = ascend_copy_stream_poll;
    api->stream_abort = ascend_copy_stream_abort;
    api->copy_batch = ascend_copy_batch;
}

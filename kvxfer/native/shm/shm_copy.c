/* shm_copy.c: moving the bytes. Small operations are copied within submit, larger ones by the copy pool: several jobs
 * share one cursor, each takes a chunk, copies it, and looks whether it is still wanted. After a few chunks a job goes
 * to the end of its rank's queue, so that a huge operation neither starves the others nor hides a cancel behind it; and
 * after each chunk when something more urgent waits, or the owner thread for a core. */
#define _GNU_SOURCE
#include "shm/shm.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include "memory/copy.h"
#include "core/device_memory.h"

#define TURN_CHUNKS  8                     /* copied before a job queues up again */
#define VECTORS_MAX  1024                  /* IOV_MAX of the kernel */
#define SYSCALL_MAX  UINT64_C(0x7ffff000)  /* bytes in one system call */
#define CHECK_BYTES  (UINT64_C(64) << 10)  /* checked while they are in the cache */
#define NT_PIECE_MIN UINT64_C(1024)        /* least segment of a large operation that bypasses the caches */
#define STAGE_BYTES  (UINT64_C(256) << 10) /* between a device and memory that is reached by attaching */
#define PIECES_MAX   128u                  /* segments copied at once */

typedef struct shm_span { /* where to begin, and how much */
    uint32_t segment;
    uint64_t offset;
    uint64_t bytes;
} shm_span;

typedef struct shm_result {
    int status;
    int sys_errno;
    uint32_t segment; /* where it went wrong */
    uint64_t bytes;   /* moved before */
} shm_result;

typedef struct shm_job {
    kvx_job job;
    struct shm_run *run;
} shm_job;

typedef struct shm_run {
    shm_transport *shm;
    shm_import *import;
    kvx_op *op;
    uint64_t nt_bytes_min;
    pthread_mutex_t lock;
    shm_span next;
    shm_result result;
    uint32_t jobs_left;
    shm_job jobs[];
} shm_run;

/* -- through a mapping ----------------------------------------------------------------------------------------------
 */

static bool shm_copy_memory_checked(uint8_t *target, const uint8_t *source, uint64_t length, bool corrupt) {
    while (length != 0) {
        uint64_t step = length < CHECK_BYTES ? length : CHECK_BYTES;
        uint32_t before = kvx_copy_crc32c(0, target, source, step);
        if (corrupt) {
            target[0] ^= 1;
            corrupt = false;
        }
        if (kvx_crc32c(0, target, step) != before) {
            return false;
        }
        target += step;
        source += step;
        length -= step;
    }
    return true;
}

/* The part of a segment that belongs to the span, with its two ends. */
static kvx_piece shm_copy_piece_of(const shm_run *run, uint32_t number, uint64_t offset, uint64_t most) {
    const kvx_op *op = run->op;
    const kvx_segment *segment = &op->segments[number];
    uint64_t length = segment->length - offset;
    uint8_t *local = op->region->base + segment->local_offset + offset;
    uint8_t *remote = run->import->remote + segment->remote_offset + offset;
    bool put = op->kind == KVX_OP_PUT;
    return (kvx_piece){put ? remote : local, put ? local : remote, length < most ? length : most};
}

static void shm_copy_mapped_checked(const shm_run *run, const shm_span *span, shm_result *result_p) {
    const kvx_op *op = run->op;
    uint64_t offset = span->offset;
    for (uint32_t i = span->segment; result_p->bytes < span->bytes; i++, offset = 0) {
        kvx_piece piece = shm_copy_piece_of(run, i, offset, span->bytes - result_p->bytes);
        if (!shm_copy_memory_checked(piece.to, piece.from, piece.length, op->corrupt && i == 0 && offset == 0)) {
            result_p->status = KVX_E_INTEGRITY;
            result_p->segment = i;
            return;
        }
        result_p->bytes += piece.length;
    }
}

static void shm_copy_mapped(const shm_run *run, const shm_span *span, shm_result *result_p) {
    kvx_piece pieces[PIECES_MAX];
    uint32_t segment = span->segment;
    uint64_t offset = span->offset;
    uint8_t *first = shm_copy_piece_of(run, segment, offset, 1).to;
    while (result_p->bytes < span->bytes) {
        uint32_t count = 0;
        for (; count < PIECES_MAX && result_p->bytes < span->bytes; segment++, offset = 0) {
            pieces[count] = shm_copy_piece_of(run, segment, offset, span->bytes - result_p->bytes);
            result_p->bytes += pieces[count++].length;
        }
        kvx_copy_pieces(pieces, count, run->nt_bytes_min);
    }
    if (run->op->corrupt && span->segment == 0 && span->offset == 0) {
        *first ^= 1;
    }
}

/* -- by cross-memory attach -------------------------------------------------------------------------------------------
 */

static int shm_copy_attach_status(int error) {
    switch (error) {
    case EPERM:
        return KVX_E_CMA_DENIED;
    case ESRCH:
        return KVX_E_PEER_LOST;
    case ENOMEM:
        return KVX_E_NOMEM;
    default:
        return KVX_E_SYSTEM;
    }
}

/* Moves all the bytes of `here` and `there`, which have the same lengths; 0 or an errno. Advances the vectors. */
static int shm_copy_attach_move(pid_t pid, bool put, struct iovec *here, struct iovec *there, size_t count,
                                uint64_t *moved_p) {
    size_t first = 0;
    while (first < count) {
        uint64_t asked = 0;
        size_t n = 0;
        while (first + n < count && n < VECTORS_MAX && asked + here[first + n].iov_len <= SYSCALL_MAX) {
            asked += here[first + n++].iov_len;
        }
        ssize_t got = put ? process_vm_writev(pid, here + first, n, there + first, n, 0)
                          : process_vm_readv(pid, here + first, n, there + first, n, 0);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            return got < 0 ? errno : EFAULT;
        }
        *moved_p += (uint64_t)got;
        uint64_t done = (uint64_t)got;
        while (first < count && done >= here[first].iov_len) {
            done -= here[first++].iov_len;
        }
        if (first < count) {
            here[first].iov_base = (uint8_t *)here[first].iov_base + done;
            there[first].iov_base = (uint8_t *)there[first].iov_base + done;
            here[first].iov_len -= done;
            there[first].iov_len -= done;
        }
    }
    return 0;
}

static int shm_copy_attach_one(pid_t pid, bool put, void *here, void *there, uint64_t length, uint64_t *moved_p) {
    struct iovec local = {.iov_base = here, .iov_len = length};
    struct iovec remote = {.iov_base = there, .iov_len = length};
    return shm_copy_attach_move(pid, put, &local, &remote, 1, moved_p);
}

static int shm_copy_corrupt_remote(pid_t pid, uint8_t *there, uint8_t byte) {
    uint64_t moved = 0;
    byte ^= 1;
    return shm_copy_attach_one(pid, true, &byte, there, 1, &moved);
}

/* The far side cannot be summed up in place: it is read again. */
static int shm_copy_attach_checked(const shm_run *run, uint8_t *local, uint8_t *remote, uint64_t length, bool corrupt,
                                   shm_result *result_p) {
    uint8_t far[CHECK_BYTES];
    pid_t pid = run->import->peer->pid;
    bool put = run->op->kind == KVX_OP_PUT;
    while (length != 0) {
        uint64_t step = length < CHECK_BYTES ? length : CHECK_BYTES, ignored = 0, moved = 0;
        uint32_t before = put ? kvx_crc32c(0, local, step) : 0;
        int error = put ? 0 : shm_copy_attach_one(pid, false, far, remote, step, &ignored);
        if (error == 0 && !put) {
            before = kvx_crc32c(0, far, step);
        }
        error = error ? error : shm_copy_attach_one(pid, put, local, remote, step, &moved);
        if (error == 0 && corrupt && put) {
            error = shm_copy_corrupt_remote(pid, remote, local[0]);
        } else if (error == 0 && corrupt) {
            local[0] ^= 1;
        }
        corrupt = false;
        error = error || !put ? error : shm_copy_attach_one(pid, false, far, remote, step, &ignored);
        if (error != 0) {
            result_p->sys_errno = error;
            return shm_copy_attach_status(error);
        }
        if (kvx_crc32c(0, put ? far : local, step) != before) {
            return KVX_E_INTEGRITY;
        }
        result_p->bytes += moved;
        local += step;
        remote += step;
        length -= step;
    }
    return KVX_OK;
}

static void shm_copy_attached_checked(const shm_run *run, const shm_span *span, shm_result *result_p) {
    const kvx_op *op = run->op;
    uint64_t offset = span->offset;
    for (uint32_t i = span->segment; result_p->bytes < span->bytes && result_p->status == KVX_OK; i++, offset = 0) {
        const kvx_segment *segment = &op->segments[i];
        uint64_t length = segment->length - offset, left = span->bytes - result_p->bytes;
        result_p->segment = i;
        result_p->status =
            shm_copy_attach_checked(run, op->region->base + segment->local_offset + offset,
                                    run->import->remote + segment->remote_offset + offset,
                                    length < left ? length : left, op->corrupt && i == 0 && offset == 0, result_p);
    }
}

static void shm_copy_attached(const shm_run *run, const shm_span *span, shm_result *result_p) {
    const kvx_op *op = run->op;
    struct iovec here[VECTORS_MAX], there[VECTORS_MAX];
    bool put = op->kind == KVX_OP_PUT;
    pid_t pid = run->import->peer->pid;
    uint32_t segment = span->segment;
    uint64_t offset = span->offset, planned = 0;
    while (planned < span->bytes && result_p->status == KVX_OK) {
        size_t count = 0;
        uint32_t begin = segment;
        for (; count < VECTORS_MAX && planned < span->bytes; count++, segment++, offset = 0) {
            const kvx_segment *s = &op->segments[segment];
            uint64_t length = s->length - offset, left = span->bytes - planned;
            length = length < left ? length : left;
            here[count] = (struct iovec){op->region->base + s->local_offset + offset, length};
            there[count] = (struct iovec){run->import->remote + s->remote_offset + offset, length};
            planned += length;
        }
        uint8_t *first = there[0].iov_base;
        int error = shm_copy_attach_move(pid, put, here, there, count, &result_p->bytes);
        if (error == 0 && op->corrupt && begin == 0 && span->segment == 0 && span->offset == 0) {
            uint8_t *local = op->region->base + op->segments[0].local_offset;
            if (put) {
                error = shm_copy_corrupt_remote(pid, first, *local);
            } else {
                *local ^= 1;
            }
        }
        if (error != 0) {
            result_p->status = shm_copy_attach_status(error);
            result_p->sys_errno = error;
            result_p->segment = begin;
        }
    }
}

/* -- between memory of a device and either --------------------------------------------------------------------------
 */

static int shm_copy_device_move(kvx_place target, kvx_place source, uint64_t length, bool check, bool corrupt) {
    uint32_t before = 0, after = 0;
    int status = check ? kvx_place_crc32c(source, length, &before) : KVX_OK;
    status = status == KVX_OK ? kvx_move(target, source, length, UINT64_MAX, NULL) : status;
    if (status == KVX_OK && corrupt) {
        status = kvx_place_flip(target);
    }
    if (status == KVX_OK && check) {
        status = kvx_place_crc32c(target, length, &after);
    }
    return status == KVX_OK && before != after ? KVX_E_INTEGRITY : status;
}

/* The driver cannot write into another process: through a block of our own. */
static int shm_copy_device_attach(const shm_run *run, uint8_t *stage, kvx_place local, uint8_t *remote, uint64_t length,
                                  bool corrupt, shm_result *result_p) {
    bool put = run->op->kind == KVX_OP_PUT, check = (run->op->flags & KVX_OP_CHECK) != 0;
    pid_t pid = run->import->peer->pid;
    uint64_t done = result_p->bytes;
    int status = KVX_OK, error = 0;
    if (put) {
        status = shm_copy_device_move(kvx_place_host(stage), local, length, check, false);
    }
    if (status == KVX_OK && check) {
        status = shm_copy_attach_checked(run, stage, remote, length, corrupt && put, result_p);
    } else if (status == KVX_OK) {
        error = shm_copy_attach_one(pid, put, stage, remote, length, &result_p->bytes);
        error = error == 0 && corrupt && put ? shm_copy_corrupt_remote(pid, remote, stage[0]) : error;
        status = error == 0 ? KVX_OK : shm_copy_attach_status(error);
        result_p->sys_errno = error;
    }
    if (status == KVX_OK && !put) {
        status = shm_copy_device_move(local, kvx_place_host(stage), length, check, corrupt);
    }
    if (status != KVX_OK && !put) {
        result_p->bytes = done; /* they came as far as our block */
    }
    return status;
}

static void shm_copy_device(const shm_run *run, const shm_span *span, shm_result *result_p) {
    const kvx_op *op = run->op;
    bool mapped = run->import->how == SHM_BY_MAPPING;
    uint8_t *stage = mapped ? NULL : malloc(STAGE_BYTES);
    result_p->status = mapped || stage != NULL ? KVX_OK : KVX_E_NOMEM;
    uint64_t offset = span->offset;
    for (uint32_t i = span->segment; result_p->status == KVX_OK && result_p->bytes < span->bytes;) {
        const kvx_segment *segment = &op->segments[i];
        uint64_t length = segment->length - offset, left = span->bytes - result_p->bytes;
        length = length < left ? length : left;
        length = mapped || length < STAGE_BYTES ? length : STAGE_BYTES;
        kvx_place local = kvx_place_of(op->region, segment->local_offset + offset);
        uint8_t *remote = run->import->remote + segment->remote_offset + offset;
        bool corrupt = op->corrupt && i == 0 && offset == 0, check = (op->flags & KVX_OP_CHECK) != 0;
        result_p->segment = i;
        if (!mapped) {
            result_p->status = shm_copy_device_attach(run, stage, local, remote, length, corrupt, result_p);
        } else if (op->kind == KVX_OP_PUT) {
            result_p->status = shm_copy_device_move(kvx_place_host(remote), local, length, check, corrupt);
        } else {
            result_p->status = shm_copy_device_move(local, kvx_place_host(remote), length, check, corrupt);
        }
        result_p->bytes += mapped && result_p->status == KVX_OK ? length : 0;
        offset += length;
        if (offset == segment->length) {
            i++;
            offset = 0;
        }
    }
    free(stage);
}

/* -- spans ------------------------------------------------------------------------------------------------------------
 */

static bool shm_copy_is_on_device(const kvx_op *op) {
    return op->region != NULL && (op->region->flags & KVX_REGION_DEVICE) != 0;
}

static void shm_copy_span(const shm_run *run, const shm_span *span, shm_result *result_p) {
    shm_transport *shm = run->shm;
    *result_p = (shm_result){.status = KVX_OK};
    bool check = (run->op->flags & KVX_OP_CHECK) != 0;
    if (shm_copy_is_on_device(run->op)) {
        shm_copy_device(run, span, result_p);
    } else if (run->import->how == SHM_BY_MAPPING) {
        (check ? shm_copy_mapped_checked : shm_copy_mapped)(run, span, result_p);
    } else {
        (check ? shm_copy_attached_checked : shm_copy_attached)(run, span, result_p);
    }
    KVX_COUNT(shm->counters, copied_bytes, result_p->bytes);
    KVX_COUNT(shm->counters, frames, 1);
}

/* With the run's lock held: cuts the next chunk off. False: nothing is left, or nobody wants it. */
static bool shm_copy_span_take(shm_run *run, shm_span *span_p) {
    const kvx_op *op = run->op;
    uint64_t most = run->shm->config->chunk_bytes;
    shm_result *result = &run->result;
    if (result->status == KVX_OK && atomic_load_explicit(&op->cancelled, memory_order_relaxed)) {
        result->status = run->next.segment < op->count ? KVX_E_CANCELLED : KVX_OK;
        result->segment = run->next.segment;
    }
    if (result->status == KVX_OK && (atomic_load(&run->import->users) & SHM_SHUT) && run->next.segment < op->count) {
        result->status = atomic_load(&run->import->why);
        result->segment = run->next.segment;
    }
    if (result->status != KVX_OK || run->next.segment == op->count) {
        return false;
    }
    *span_p = run->next;
    span_p->bytes = 0;
    while (run->next.segment < op->count && span_p->bytes < most) {
        uint64_t left = op->segments[run->next.segment].length - run->next.offset, room = most - span_p->bytes;
        if (left <= room) {
            span_p->bytes += left;
            run->next.segment++;
            run->next.offset = 0;
        } else {
            span_p->bytes += room;
            run->next.offset += room;
        }
    }
    return true;
}

static void shm_copy_finish(shm_import *import, kvx_op *op, const shm_result *result) {
    bool whole = result->status == KVX_OK || result->segment >= op->count;
    if (result->status == KVX_OK && (op->flags & KVX_OP_NOTIFY)) {
        kvx_shm_notify(import, op);
    } else {
        kvx_op_complete(op, result->status, result->bytes, result->sys_errno, whole ? -1 : (int)result->segment);
    }
    kvx_shm_leave(import);
}

/* Page tables of what is about to be copied. */
static void shm_copy_prefault(const shm_run *run, const shm_span *span) {
    uint64_t offset = span->offset, left = span->bytes;
    for (uint32_t i = span->segment; left != 0; i++, offset = 0) {
        const kvx_segment *segment = &run->op->segments[i];
        uint64_t length = segment->length - offset < left ? segment->length - offset : left;
        kvx_shm_fill(run->import, segment->remote_offset + offset, length);
        left -= length;
    }
}

static void shm_copy_job_run(kvx_job *job) {
    shm_run *run = ((shm_job *)job)->run;
    shm_span span;
    shm_result result;
    bool more = true;
    pthread_mutex_lock(&run->lock);
    for (int chunk = 0; chunk < TURN_CHUNKS && (more = shm_copy_span_take(run, &span)); chunk++) {
        pthread_mutex_unlock(&run->lock);
        if (chunk != 0) {
            kvx_core_yield(run->shm->core);
        }
        if (run->import->how == SHM_BY_MAPPING) {
            shm_copy_prefault(run, &span);
        }
        shm_copy_span(run, &span, &result);
        pthread_mutex_lock(&run->lock);
        run->result.bytes += result.bytes;
        kvx_op_moved(run->op, result.bytes);
        if (result.status != KVX_OK && run->result.status == KVX_OK) {
            run->result.status = result.status;
            run->result.sys_errno = result.sys_errno;
            run->result.segment = result.segment;
        }
        if (kvx_core_job_yields(run->shm->core, job->rank)) {
            break;
        }
    }
    if (more && run->next.segment < run->op->count) {
        pthread_mutex_unlock(&run->lock);
        kvx_core_job_post(run->shm->core, job);
        return;
    }
    bool last = --run->jobs_left == 0;
    pthread_mutex_unlock(&run->lock);
    if (last) {
        shm_copy_finish(run->import, run->op, &run->result);
        pthread_mutex_destroy(&run->lock);
        free(run);
    }
}

/* From which length on the segments of an operation bypass the caches: it depends on all of them together. */
static uint64_t shm_copy_nt_bytes_min(const kvx_engine_config *config, const kvx_op *op) {
    return op->bytes >= config->nt_bytes_min ? NT_PIECE_MIN : config->nt_bytes_min;
}

static int shm_copy_submit_jobs(shm_transport *shm, shm_import *import, kvx_op *op) {
    const kvx_engine_config *config = shm->config;
    uint64_t chunks = (op->bytes - 1) / config->chunk_bytes + 1;
    uint32_t jobs = config->copy_threads ? config->copy_threads : 1;
    jobs = chunks < jobs ? (uint32_t)chunks : jobs;
    shm_run *run = malloc(sizeof(*run) + jobs * sizeof(run->jobs[0]));
    if (run == NULL) {
        kvx_shm_leave(import);
        return KVX_E_NOMEM;
    }
    *run = (shm_run){
        .shm = shm,
        .import = import,
        .op = op,
        .nt_bytes_min = shm_copy_nt_bytes_min(config, op),
        .jobs_left = jobs,
    };
    pthread_mutex_init(&run->lock, NULL);
    for (uint32_t i = 0; i < jobs; i++) {
        run->jobs[i] = (shm_job){.job = {.run = shm_copy_job_run, .rank = op->rank}, .run = run};
    }
    for (uint32_t i = 0; i < jobs; i++) { /* the last may be over before the loop is: it counts all of them first */
        kvx_core_job_post(shm->core, &run->jobs[i].job);
    }
    return KVX_PENDING;
}

int kvx_shm_submit(void *transport, kvx_op *op) {
    shm_transport *shm = transport;
    shm_import *import = op->import->transport_data;
    if (!kvx_shm_enter(import)) {
        return atomic_load(&import->why);
    }
    if (op->bytes > shm->config->inline_bytes_max || shm_copy_is_on_device(op)) { /* a driver's copy may block */
        return shm_copy_submit_jobs(shm, import, op);
    }
    shm_run run = {.import = import, .shm = shm, .op = op, .nt_bytes_min = shm_copy_nt_bytes_min(shm->config, op)};
    shm_span span = {.bytes = op->bytes};
    shm_result result = {.status = KVX_OK};
    if (op->count != 0) {
        shm_copy_span(&run, &span, &result);
    }
    shm_copy_finish(import, op, &result);
    return KVX_PENDING;
}

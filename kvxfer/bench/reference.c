/* reference.c: the physical work alone; what `kvxfer bench` compares transports with.
 *
 * Two processes and no protocol to speak of: the parent copies between its own memory and a memfd of its child (memcpy,
 * non-temporal stores, process_vm_readv and _writev), or sends to the child over blocking loopback sockets: a count,
 * the segments and the payload with sendmsg, scattered by the child with recvmsg, answered with one byte. Usage:
 *     reference MEBIBYTES CONGESTION        ("" leaves the congestion control of the host)
 * reads lines "METHOD DIRECTION BLOCK_BYTES BLOCKS REPEATS THREADS" and answers each with
 * "SECONDS CPU_SECONDS P50_US P99_US CHECK": the median repeat, CPU of both processes per repeat, percentiles of the
 * repeats, and 1 when the bytes arrived. DIRECTION is put or get (copies only). Methods: memcpy, nt, pvm, tcp (one
 * request of BLOCKS segments), layers (BLOCKS requests over one socket, at most 8 unanswered), streams (BLOCKS sockets
 * and threads, each sends its block REPEATS times; SECONDS is the whole). BLOCKS > 1 are in a shuffled order on both
 * sides. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define THREADS_MAX 64
#define VECTORS     512
#define BLOCKS_MAX  (1u << 20)
#define REPEATS_MAX 100000
#define WINDOW      8

typedef struct segment {
    uint64_t local, remote, bytes;
} segment;

typedef struct work {
    const char *method;
    int get, fd, repeats;
    uint64_t count;
    const segment *segments;
    double *taken;
    char *head;
} work;

static char *ours, *shared; /* memory of the parent; the child's, mapped in both at the same address */
static uint64_t length;
static pid_t child;
static int listener, streams[THREADS_MAX + 1], streams_open;
static const char *congestion;

static void die(const char *what) {
    perror(what);
    exit(1);
}

static double seconds_of(clockid_t clock) {
    struct timespec at;
    clock_gettime(clock, &at);
    return (double)at.tv_sec + (double)at.tv_nsec / 1e9;
}

static double now(void) {
    return seconds_of(CLOCK_MONOTONIC);
}

static double cpu(void) {
    clockid_t other;
    if (clock_getcpuclockid(child, &other) != 0) {
        die("clock_getcpuclockid");
    }
    return seconds_of(CLOCK_PROCESS_CPUTIME_ID) + seconds_of(other);
}

/* -- copies --------------------------------------------------------------------------------------------------------*/

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void copy_nt_avx2(char *to, const char *from, uint64_t bytes) {
    for (uint64_t i = 0; i < bytes; i += 64) {
        __m256i a = _mm256_loadu_si256((const void *)(from + i)), b = _mm256_loadu_si256((const void *)(from + i + 32));
        _mm256_stream_si256((void *)(to + i), a);
        _mm256_stream_si256((void *)(to + i + 32), b);
    }
    _mm_sfence();
}
#endif

static void copy_nt(char *to, const char *from, uint64_t bytes) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        copy_nt_avx2(to, from, bytes);
        return;
    }
#endif
    memcpy(to, from, bytes);
}

static void copy_by_attach(const work *w) {
    for (uint64_t at = 0; at < w->count;) {
        struct iovec here[VECTORS], there[VECTORS];
        uint64_t used = 0, asked = 0;
        for (; used < VECTORS && at < w->count; used++, at++) {
            const segment *s = &w->segments[at];
            here[used] = (struct iovec){ours + s->local, s->bytes};
            there[used] = (struct iovec){shared + s->remote, s->bytes};
            asked += s->bytes;
        }
        ssize_t moved = w->get ? process_vm_readv(child, here, used, there, used, 0)
                               : process_vm_writev(child, here, used, there, used, 0);
        if (moved != (ssize_t)asked) {
            die("process_vm");
        }
    }
}

static void *copy_run(void *argument) {
    const work *w = argument;
    if (strcmp(w->method, "pvm") == 0) {
        copy_by_attach(w);
        return NULL;
    }
    int nt = strcmp(w->method, "nt") == 0;
    for (uint64_t i = 0; i < w->count; i++) {
        const segment *s = &w->segments[i];
        char *to = w->get ? ours + s->local : shared + s->remote;
        const char *from = w->get ? shared + s->remote : ours + s->local;
        if (nt) {
            copy_nt(to, from, s->bytes);
        } else {
            memcpy(to, from, s->bytes);
        }
    }
    return NULL;
}

/* One piece is cut into equal pieces, one per thread; blocks are dealt out. */
static void copy_all(const work *whole, int threads) {
    pthread_t ids[THREADS_MAX];
    work parts[THREADS_MAX];
    segment pieces[THREADS_MAX];
    for (int i = 0; i < threads; i++) {
        uint64_t begin = whole->count * (uint64_t)i / (uint64_t)threads;
        parts[i] = *whole;
        parts[i].segments += begin;
        parts[i].count = whole->count * (uint64_t)(i + 1) / (uint64_t)threads - begin;
        if (whole->count == 1) {
            uint64_t piece = (whole->segments[0].bytes / (uint64_t)threads) & ~UINT64_C(63), at = piece * (uint64_t)i;
            pieces[i] = whole->segments[0];
            pieces[i].local += at;
            pieces[i].remote += at;
            pieces[i].bytes = i + 1 == threads ? whole->segments[0].bytes - at : piece;
            parts[i].segments = &pieces[i];
            parts[i].count = 1;
        }
        if (i > 0 && pthread_create(&ids[i], NULL, copy_run, &parts[i]) != 0) {
            die("pthread_create");
        }
    }
    copy_run(&parts[0]);
    for (int i = 1; i < threads; i++) {
        pthread_join(ids[i], NULL);
    }
}

/* -- sockets -------------------------------------------------------------------------------------------------------*/

static void tune(int fd) {
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (*congestion && setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, congestion, (socklen_t)strlen(congestion)) != 0) {
        die("TCP_CONGESTION");
    }
}

static int receive_exactly(int fd, void *into, uint64_t bytes) {
    for (uint64_t done = 0; done < bytes;) {
        ssize_t moved = recv(fd, (char *)into + done, bytes - done, 0);
        if (moved <= 0) {
            return 0;
        }
        done += (uint64_t)moved;
    }
    return 1;
}

/* Sends or receives the payload; when sending, `head` goes first in the same calls. */
static int payload(int fd, int sending, char *head, uint64_t head_bytes, const segment *segments, uint64_t count) {
    uint64_t at = 0, offset = 0, head_done = 0;
    while (head_done < head_bytes || at < count) {
        struct iovec vectors[VECTORS + 1];
        size_t used = 0;
        if (head_done < head_bytes) {
            vectors[used++] = (struct iovec){head + head_done, head_bytes - head_done};
        }
        for (uint64_t i = at; i < count && used <= VECTORS; i++) {
            uint64_t skip = i == at ? offset : 0;
            char *base = sending ? ours + segments[i].local : shared + segments[i].remote;
            vectors[used++] = (struct iovec){base + skip, segments[i].bytes - skip};
        }
        struct msghdr message = {.msg_iov = vectors, .msg_iovlen = used};
        ssize_t moved = sending ? sendmsg(fd, &message, MSG_NOSIGNAL) : recvmsg(fd, &message, 0);
        if (moved <= 0) {
            return 0;
        }
        uint64_t left = (uint64_t)moved, part = left < head_bytes - head_done ? left : head_bytes - head_done;
        head_done += part;
        offset += left - part;
        while (at < count && offset >= segments[at].bytes) {
            offset -= segments[at++].bytes;
        }
    }
    return 1;
}

static void *serve(void *argument) {
    int fd = (int)(intptr_t)argument;
    segment *segments = malloc(BLOCKS_MAX * sizeof *segments);
    uint64_t count;
    while (receive_exactly(fd, &count, sizeof count) && count <= BLOCKS_MAX &&
           receive_exactly(fd, segments, count * sizeof *segments) && payload(fd, 0, NULL, 0, segments, count)) {
        if (send(fd, "k", 1, MSG_NOSIGNAL) != 1) {
            break;
        }
    }
    free(segments);
    close(fd);
    return NULL;
}

static void child_main(void) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        pthread_t id;
        if (fd < 0) {
            die("accept");
        }
        tune(fd);
        if (pthread_create(&id, NULL, serve, (void *)(intptr_t)fd) != 0) {
            die("pthread_create");
        }
        pthread_detach(id);
    }
}

static void open_streams(int count) {
    struct sockaddr_in address;
    socklen_t size = sizeof address;
    if (getsockname(listener, (struct sockaddr *)&address, &size) != 0) {
        die("getsockname");
    }
    for (; streams_open < count; streams_open++) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        tune(fd);
        if (connect(fd, (struct sockaddr *)&address, size) != 0) {
            die("connect");
        }
        streams[streams_open] = fd;
    }
}

static void request(int fd, char *head, const segment *segments, uint64_t count) {
    memcpy(head, &count, sizeof count);
    memcpy(head + sizeof count, segments, count * sizeof *segments);
    if (!payload(fd, 1, head, sizeof count + count * sizeof *segments, segments, count)) {
        die("send");
    }
}

static void answer(int fd) {
    char byte;
    if (!receive_exactly(fd, &byte, 1)) {
        die("answer");
    }
}

static void layers(const work *w) {
    for (uint64_t i = 0; i < w->count; i++) {
        if (i >= WINDOW) {
            answer(w->fd);
        }
        request(w->fd, w->head, &w->segments[i], 1);
    }
    for (uint64_t i = 0; i < w->count && i < WINDOW; i++) {
        answer(w->fd);
    }
}

static void *stream_run(void *argument) {
    const work *w = argument;
    char head[sizeof(uint64_t) + sizeof(segment)];
    for (int i = 0; i < w->repeats; i++) {
        double begun = now();
        request(w->fd, head, w->segments, 1);
        answer(w->fd);
        w->taken[i] = now() - begun;
    }
    return NULL;
}

static void all_streams(const work *whole) {
    pthread_t ids[THREADS_MAX];
    work parts[THREADS_MAX];
    for (uint64_t i = 0; i < whole->count; i++) {
        parts[i] = *whole;
        parts[i].fd = streams[i + 1];
        parts[i].segments += i;
        parts[i].taken += i * (uint64_t)whole->repeats;
        if (pthread_create(&ids[i], NULL, stream_run, &parts[i]) != 0) {
            die("pthread_create");
        }
    }
    for (uint64_t i = 0; i < whole->count; i++) {
        pthread_join(ids[i], NULL);
    }
}

/* -- measuring -----------------------------------------------------------------------------------------------------*/

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void shuffle(uint64_t *order, uint64_t count, uint64_t seed) {
    for (uint64_t i = 0; i < count; i++) {
        order[i] = i;
    }
    for (uint64_t i = count - 1; i > 0; i--) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        uint64_t j = (seed >> 33) % (i + 1), kept = order[i];
        order[i] = order[j];
        order[j] = kept;
    }
}

static segment *laid_out(uint64_t count, uint64_t bytes) {
    segment *segments = malloc(count * sizeof *segments);
    uint64_t *from = malloc(count * sizeof *from), *to = malloc(count * sizeof *to);
    shuffle(from, count, 1);
    shuffle(to, count, 2);
    for (uint64_t i = 0; i < count; i++) {
        segments[i] = (segment){from[i] * bytes, to[i] * bytes, bytes};
    }
    free(from);
    free(to);
    return segments;
}

static void fill(char *memory) {
    static uint64_t state = 88172645463325252u;
    for (uint64_t i = 0; i < length; i += 8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        memcpy(memory + i, &state, 8);
    }
}

static void once(work *w, int threads) {
    if (strcmp(w->method, "tcp") == 0) {
        request(w->fd, w->head, w->segments, w->count);
        answer(w->fd);
    } else if (strcmp(w->method, "layers") == 0) {
        layers(w);
    } else {
        copy_all(w, threads);
    }
}

/* Once before the clock starts: memory that was idle for a second can cost four times as much to touch again. */
static void warm(work *w, int threads, int together) {
    work first = *w;
    first.repeats = 1;
    if (together) {
        all_streams(&first);
    } else {
        once(&first, threads);
    }
}

static void measure(work *w, int threads) {
    int together = strcmp(w->method, "streams") == 0;
    uint64_t samples = together ? w->count * (uint64_t)w->repeats : (uint64_t)w->repeats;
    w->taken = malloc(samples * sizeof *w->taken);
    warm(w, threads, together);
    double used = cpu(), begun = now(), whole;
    if (together) {
        all_streams(w);
    }
    for (int i = 0; !together && i < w->repeats; i++) {
        double at = now();
        once(w, threads);
        w->taken[i] = now() - at;
    }
    whole = now() - begun;
    used = (cpu() - used) / w->repeats;
    qsort(w->taken, samples, sizeof *w->taken, compare);
    int good = 1;
    for (uint64_t i = 0; i < w->count; i++) {
        good &= memcmp(ours + w->segments[i].local, shared + w->segments[i].remote, w->segments[i].bytes) == 0;
    }
    printf("%.9f %.9f %.3f %.3f %d\n", together ? whole : w->taken[samples / 2], used, w->taken[samples / 2] * 1e6,
           w->taken[samples * 99 / 100] * 1e6, good);
    fflush(stdout);
    free(w->taken);
}

static void prepare(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: reference MEBIBYTES CONGESTION\n");
        exit(2);
    }
    length = strtoull(argv[1], NULL, 10) << 20;
    congestion = argv[2];
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    listener = socket(AF_INET, SOCK_STREAM, 0);
    tune(listener);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) != 0 || listen(listener, THREADS_MAX + 1) != 0) {
        die("listen");
    }
    int fd = memfd_create("reference", MFD_CLOEXEC), ready[2];
    if (fd < 0 || ftruncate(fd, (off_t)length) != 0 || pipe(ready) != 0) {
        die("memfd");
    }
    shared = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    child = fork();
    if (child == 0) {
        memset(shared, 1, length); /* its owner touches it first */
        (void)!write(ready[1], "k", 1);
        child_main();
    }
    ours = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (ours == MAP_FAILED || shared == MAP_FAILED || child < 0) {
        die("mmap");
    }
    madvise(ours, length, MADV_HUGEPAGE);
    fill(ours);
    char byte;
    (void)!read(ready[0], &byte, 1);
    munmap(shared, length);
    if (mmap(shared, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE | MAP_FIXED, fd, 0) == MAP_FAILED) {
        die("mmap");
    }
    open_streams(1);
}

int main(int argc, char **argv) {
    prepare(argc, argv);
    printf("ready %d\n", (int)child);
    fflush(stdout);
    char method[16], direction[8];
    unsigned long long block, blocks;
    int repeats, threads;
    while (scanf("%15s %7s %llu %llu %d %d", method, direction, &block, &blocks, &repeats, &threads) == 6) {
        if (blocks < 1 || blocks > BLOCKS_MAX || block < 64 || block % 64 != 0 || block > length / blocks ||
            repeats < 1 || repeats > REPEATS_MAX || threads < 1 || threads > THREADS_MAX) {
            fprintf(stderr, "reference: out of range\n");
            return 2;
        }
        work w = {.method = method, .get = strcmp(direction, "get") == 0, .fd = streams[0], .repeats = repeats};
        w.count = blocks;
        if (strcmp(method, "streams") == 0) {
            if (blocks > THREADS_MAX) {
                return 2;
            }
            open_streams((int)blocks + 1);
        }
        segment *segments = laid_out(blocks, block);
        w.segments = segments;
        w.head = malloc(sizeof(uint64_t) + blocks * sizeof *segments);
        measure(&w, threads);
        free(w.head);
        free(segments);
    }
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    return 0;
}

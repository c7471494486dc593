/* shm_ref.c: what plain copies into shared memory of another process reach; the yardstick of bench_shm.py.
 *
 * A child owns a memfd and has touched it; the parent maps it and copies from its own memory. Usage:
 *     shm_ref MEBIBYTES BLOCK_BYTES
 * reads lines "METHOD BLOCKS THREADS" and answers each with seconds. METHOD is memcpy, nt (non-temporal stores where
 * the compiler knows them, else memcpy) or cma (process_vm_writev). BLOCKS 1 is all in one piece; otherwise so many
 * blocks of BLOCK_BYTES, in a shuffled order on both sides. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#define THREADS_MAX 16
#define VECTORS     512

static char *source, *target;
static uint64_t length, block_bytes;
static uint64_t *from, *to; /* shuffled block numbers */
static pid_t child;

typedef struct part {
    const char *method;
    uint64_t begin, end; /* blocks, or bytes when there is one piece */
    int scattered;
} part;

static void die(const char *what) {
    perror(what);
    exit(1);
}

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec / 1e9;
}

static void copy_nt(char *into, const char *out_of, uint64_t bytes) {
#if defined(__x86_64__)
    for (uint64_t i = 0; i < bytes; i += 64) {
        __m128i a = _mm_loadu_si128((const void *)(out_of + i)), b = _mm_loadu_si128((const void *)(out_of + i + 16));
        __m128i c = _mm_loadu_si128((const void *)(out_of + i + 32)),
                d = _mm_loadu_si128((const void *)(out_of + i + 48));
        _mm_stream_si128((void *)(into + i), a);
        _mm_stream_si128((void *)(into + i + 16), b);
        _mm_stream_si128((void *)(into + i + 32), c);
        _mm_stream_si128((void *)(into + i + 48), d);
    }
    _mm_sfence();
#else
    memcpy(into, out_of, bytes);
#endif
}

static void copy(const char *method, uint64_t into, uint64_t out_of, uint64_t bytes) {
    if (strcmp(method, "nt") == 0) {
        copy_nt(target + into, source + out_of, bytes);
    } else {
        memcpy(target + into, source + out_of, bytes);
    }
}

/* The child's memory lies at the same address as ours: it was mapped before the fork. */
static void copy_by_attach(const part *p) {
    for (uint64_t at = p->begin; at < p->end;) {
        struct iovec here[VECTORS], there[VECTORS];
        uint64_t count = 0, asked = 0;
        if (!p->scattered) {
            asked = p->end - at < (1u << 30) ? p->end - at : 1u << 30;
            here[0] = (struct iovec){source + at, asked};
            there[0] = (struct iovec){target + at, asked};
            at += asked;
            count = 1;
        }
        for (; p->scattered && count < VECTORS && at < p->end; count++, at++, asked += block_bytes) {
            here[count] = (struct iovec){source + from[at] * block_bytes, block_bytes};
            there[count] = (struct iovec){target + to[at] * block_bytes, block_bytes};
        }
        if (process_vm_writev(child, here, count, there, count, 0) != (ssize_t)asked) {
            die("process_vm_writev");
        }
    }
}

static void *part_run(void *argument) {
    const part *p = argument;
    if (strcmp(p->method, "cma") == 0) {
        copy_by_attach(p);
    } else if (!p->scattered) {
        copy(p->method, p->begin, p->begin, p->end - p->begin);
    } else {
        for (uint64_t i = p->begin; i < p->end; i++) {
            copy(p->method, to[i] * block_bytes, from[i] * block_bytes, block_bytes);
        }
    }
    return NULL;
}

static double measure(const char *method, uint64_t blocks, int threads) {
    pthread_t ids[THREADS_MAX];
    part parts[THREADS_MAX];
    uint64_t whole = blocks > 1 ? blocks : length, step = (whole / (uint64_t)threads) & ~UINT64_C(63);
    double begun = now();
    for (int i = 0; i < threads; i++) {
        uint64_t begin = (uint64_t)i * step;
        parts[i] = (part){method, begin, i + 1 == threads ? whole : begin + step, blocks > 1};
        if (i > 0 && pthread_create(&ids[i], NULL, part_run, &parts[i]) != 0) {
            die("pthread_create");
        }
    }
    part_run(&parts[0]);
    for (int i = 1; i < threads; i++) {
        pthread_join(ids[i], NULL);
    }
    return now() - begun;
}

static uint64_t *shuffled(uint64_t count, uint64_t seed) {
    uint64_t *order = malloc(count * sizeof(*order));
    for (uint64_t i = 0; i < count; i++) {
        order[i] = i;
    }
    for (uint64_t i = count - 1; i > 0; i--) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        uint64_t j = (seed >> 33) % (i + 1), kept = order[i];
        order[i] = order[j];
        order[j] = kept;
    }
    return order;
}

int main(int count, char **arguments) {
    if (count != 3) {
        fprintf(stderr, "usage: shm_ref MEBIBYTES BLOCK_BYTES\n");
        return 2;
    }
    length = strtoull(arguments[1], NULL, 10) << 20;
    block_bytes = strtoull(arguments[2], NULL, 10);
    source = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int fd = memfd_create("shm_ref", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)length) != 0) {
        die("memfd");
    }
    target = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (source == MAP_FAILED || target == MAP_FAILED) {
        die("mmap");
    }
    memset(source, 7, length);
    from = shuffled(length / block_bytes, 1);
    to = shuffled(length / block_bytes, 2);
    int ready[2];
    char byte = 0;
    if (pipe(ready) != 0 || (child = fork()) < 0) {
        die("fork");
    }
    if (child == 0) {
        memset(target, 1, length);
        (void)!write(ready[1], &byte, 1);
        pause();
        _exit(0);
    }
    (void)!read(ready[0], &byte, 1);
    munmap(target, length);
    if (mmap(target, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE | MAP_FIXED, fd, 0) == MAP_FAILED) {
        die("mmap");
    }
    char method[16];
    unsigned long long blocks;
    int threads;
    while (scanf("%15s %llu %d", method, &blocks, &threads) == 3 && threads >= 1 && threads <= THREADS_MAX &&
           blocks <= length / block_bytes) {
        printf("%.9f\n", measure(method, blocks, threads));
        fflush(stdout);
    }
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    return 0;
}

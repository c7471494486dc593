/* native.h: the workloads for peers that are C libraries, the counterpart of common.py.
 *
 * The initiator is this process, the target a forked child; they talk over a socket pair (`control`). A transport
 * defines the functions declared below and includes this file. Every request runs once with fresh bytes into cleared
 * memory before it is timed, both sides hash what they have, and a difference ends the program with exit code 3. Usage:
 *     PROGRAM WORKLOAD VARIANT OP[,OP] NAME=NUMBER...      (names of `struct sizes`)
 * and the answer is one JSON object: {"verified": segments, "results": {"write": {...}, "read": {...}}}. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define GIB         (1024.0 * 1024 * 1024)
#define SLOTS_MAX   64
#define SAMPLES_MAX 200000
#define BLOCKS_MAX  (1u << 20)
#define BUDGET_S    8.0 /* one timed loop ends early rather than take longer */
#define LIMIT_S     300
#define MISMATCH    3

typedef struct segment {
    uint64_t local, remote, bytes;
} segment;

static struct sizes {
    const char *name;
    uint64_t value;
} sizes[] = {{"large_bytes", 256 << 20},
             {"blocks", 4096},
             {"block_bytes", 32 << 10},
             {"small_blocks", 65536},
             {"small_block_bytes", 4096},
             {"layers", 80},
             {"layer_bytes", 1 << 20},
             {"layers_at_once", 8},
             {"streams", 32},
             {"stream_bytes", 4 << 20},
             {"stream_repeats", 3},
             {"samples", 600},
             {"repeats", 4},
             {"setup_bytes", 1 << 30}};

static const char *workload, *variant;
static int writes; /* whether the op is a write */
static char *region;
static uint64_t region_bytes;
static int control;
static pid_t child;
static double taken[SAMPLES_MAX];
static uint64_t verified;
static int first_number;

/* What a transport defines. */
static char *transport_alloc(uint64_t length, int is_target);              /* memory, registered */
static void transport_target(void);                                        /* say on `control` how to be reached */
static void transport_step(void);                                          /* progress of the target, or wait */
static void transport_connect(void);                                       /* initiator: read that and connect */
static void transport_post(int slot, const segment *segments, uint64_t n); /* start a request */
static int transport_done(int slot);                                       /* whether it is complete */
static double init_s, register_s;

static void die(const char *what) {
    perror(what);
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static uint64_t size_of(const char *name) {
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (!strcmp(sizes[i].name, name)) {
            return sizes[i].value;
        }
    }
    fprintf(stderr, "no size %s\n", name);
    exit(2);
}

static void control_put(const void *from, size_t length) {
    for (size_t done = 0; done < length;) {
        ssize_t count = write(control, (const char *)from + done, length - done);
        if (count <= 0) {
            die("control");
        }
        done += (size_t)count;
    }
}

static void control_get(void *to, size_t length) {
    for (size_t done = 0; done < length;) {
        ssize_t count = read(control, (char *)to + done, length - done);
        if (count <= 0) {
            exit(1);
        }
        done += (size_t)count;
    }
}

/* Memory that is already there, in huge pages where the kernel likes. */
static char *anonymous(uint64_t length) {
    char *found = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) {
        die("mmap");
    }
    madvise(found, length, MADV_HUGEPAGE);
    memset(found, 1, length);
    return found;
}

/* -- verifying ------------------------------------------------------------------------------------------------------
 */

static uint64_t next_random(uint64_t *state) {
    uint64_t x = *state;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return *state = x;
}

/* Random bytes; zeros when the seed is 0. */
static void fill(uint64_t seed) {
    uint64_t *words = (uint64_t *)region;
    for (uint64_t i = 0; i < region_bytes / 8; i++) {
        words[i] = next_random(&seed);
    }
}

static uint64_t hash(const segment *segments, uint64_t n, int remote) {
    uint64_t found = 1469598103934665603u;
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t *words = (const uint64_t *)(region + (remote ? segments[i].remote : segments[i].local));
        for (uint64_t k = 0; k < segments[i].bytes / 8; k++) {
            found = (found ^ words[k]) * 1099511628211u;
            found ^= found >> 29;
        }
    }
    return found;
}

/* One command of the initiator: fill, hash, or the end. */
static void target_obey(void) {
    char command;
    uint64_t value;
    control_get(&command, 1);
    if (command == 'f') {
        control_get(&value, 8);
        fill(value);
        control_put("k", 1);
    } else if (command == 'h') {
        control_get(&value, 8);
        segment *segments = malloc(value * sizeof *segments);
        control_get(segments, value * sizeof *segments);
        uint64_t found = hash(segments, value, 1);
        control_put(&found, 8);
        free(segments);
    } else {
        _exit(0);
    }
}

/* -- what is timed --------------------------------------------------------------------------------------------------
 */

static void transfer(const segment *segments, uint64_t n) {
    transport_post(0, segments, n);
    while (!transport_done(0)) {
    }
}

static void pipeline(const segment *segments, uint64_t n) {
    int live[SLOTS_MAX] = {0};
    uint64_t posted = 0, finished = 0, window = size_of("layers_at_once");
    while (finished < n) {
        for (uint64_t k = 0; k < window; k++) {
            if (live[k] && transport_done((int)k)) {
                live[k] = 0;
                finished++;
            }
            if (!live[k] && posted < n) {
                transport_post((int)k, &segments[posted++], 1);
                live[k] = 1;
            }
        }
    }
}

/* Every segment is a stream that repeats it; latencies into `taken`, returns how many. */
static uint64_t streams(const segment *segments, uint64_t n, uint64_t repeats) {
    uint64_t left[SLOTS_MAX], count = 0, active = n;
    double begun[SLOTS_MAX];
    for (uint64_t k = 0; k < n; k++) {
        left[k] = repeats;
        begun[k] = now();
        transport_post((int)k, &segments[k], 1);
    }
    while (active) {
        for (uint64_t k = 0; k < n; k++) {
            if (!left[k] || !transport_done((int)k)) {
                continue;
            }
            taken[count++] = now() - begun[k];
            if (--left[k]) {
                begun[k] = now();
                transport_post((int)k, &segments[k], 1);
            } else {
                active--;
            }
        }
    }
    return count;
}

typedef enum shape { WHOLE, LAYERS, STREAMS } shape;

static void once(shape how, const segment *segments, uint64_t n) {
    if (how == WHOLE) {
        transfer(segments, n);
    } else if (how == LAYERS) {
        pipeline(segments, n);
    } else {
        streams(segments, n, 1);
    }
}

static void verify(shape how, const segment *segments, uint64_t n) {
    uint64_t seed = 88172645463325252u ^ (uint64_t)(now() * 1e9), zero = 0, theirs;
    char answer;
    control_put("f", 1);
    control_put(writes ? &zero : &seed, 8);
    fill(writes ? seed : 0);
    control_get(&answer, 1);
    once(how, segments, n);
    control_put("h", 1);
    control_put(&n, 8);
    control_put(segments, n * sizeof *segments);
    uint64_t ours = hash(segments, n, 0);
    control_get(&theirs, 8);
    if (ours != theirs) {
        fprintf(stderr, "CHECKSUM MISMATCH in %s\n", workload);
        _exit(MISMATCH);
    }
    verified += n;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double percentile(uint64_t n, double percent) {
    qsort(taken, n, sizeof *taken, ascending);
    uint64_t at = (uint64_t)((double)n * percent / 100);
    return taken[at < n ? at : n - 1];
}

static double cpu_s(void) {
    struct timespec own, other;
    clockid_t clock;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &own);
    clock_getcpuclockid(child, &clock);
    clock_gettime(clock, &other);
    return (double)(own.tv_sec + other.tv_sec) + (double)(own.tv_nsec + other.tv_nsec) * 1e-9;
}

static void number(const char *prefix, const char *name, double value) {
    printf("%s\"%s%s\": %.6g", first_number ? "" : ", ", prefix, name, value);
    first_number = 0;
}

/* Verify, then time; fewer runs when they are slow, but two. */
static void rate(shape how, const segment *segments, uint64_t n) {
    uint64_t count = 0, repeats = size_of("repeats"), bytes = 0;
    for (uint64_t i = 0; i < n; i++) {
        bytes += segments[i].bytes;
    }
    verify(how, segments, n);
    once(how, segments, n);
    double spent = cpu_s(), end = now() + BUDGET_S;
    while (count < repeats && (count < 2 || now() < end)) {
        double begun = now();
        once(how, segments, n);
        taken[count++] = now() - begun;
    }
    spent = cpu_s() - spent;
    double middle = percentile(count, 50);
    number("", "GBps", (double)bytes / middle / 1e9);
    number("", "ms", middle * 1e3);
    number("", "cpu_s_per_GiB", spent * GIB / ((double)bytes * (double)count));
}

/* -- workloads ------------------------------------------------------------------------------------------------------
 */

static void small(void) {
    static const struct {
        const char *prefix;
        uint64_t bytes;
    } kinds[] = {{"4k_", 4 << 10}, {"64k_", 64 << 10}};
    uint64_t samples = size_of("samples");
    for (int kind = 0; kind < 2; kind++) {
        segment one = {0, 0, kinds[kind].bytes};
        verify(WHOLE, &one, 1);
        for (uint64_t i = 0; i < samples / 10; i++) {
            transfer(&one, 1);
        }
        for (uint64_t i = 0; i < samples; i++) {
            double begun = now();
            transfer(&one, 1);
            taken[i] = now() - begun;
        }
        number(kinds[kind].prefix, "p50_us", percentile(samples, 50) * 1e6);
        number(kinds[kind].prefix, "p90_us", percentile(samples, 90) * 1e6);
        number(kinds[kind].prefix, "p99_us", percentile(samples, 99) * 1e6);
    }
}

static uint64_t *shuffled(uint64_t n, uint64_t seed) {
    uint64_t *order = malloc(n * sizeof *order);
    for (uint64_t i = 0; i < n; i++) {
        order[i] = i;
    }
    for (uint64_t i = n - 1; i > 0; i--) {
        uint64_t k = next_random(&seed) % (i + 1), kept = order[i];
        order[i] = order[k];
        order[k] = kept;
    }
    return order;
}

static void scattered(uint64_t n, uint64_t bytes) {
    uint64_t pool = region_bytes / bytes, *local = shuffled(pool, 7), *remote = shuffled(pool, 11);
    segment *segments = malloc(n * sizeof *segments);
    for (uint64_t i = 0; i < n; i++) {
        segments[i] = (segment){local[i] * bytes, remote[i] * bytes, bytes};
    }
    rate(WHOLE, segments, n);
    free(segments);
    free(remote);
    free(local);
}

static void concurrent(const segment *segments, uint64_t n) {
    verify(STREAMS, segments, n);
    streams(segments, n, 1);
    double begun = now();
    uint64_t count = streams(segments, n, size_of("stream_repeats"));
    number("", "GBps", (double)count * (double)size_of("stream_bytes") / (now() - begun) / 1e9);
    number("", "p50_ms", percentile(count, 50) * 1e3);
    number("", "p99_ms", percentile(count, 99) * 1e3);
}

static void measure(double connect_s, double first_s) {
    segment row[BLOCKS_MAX / 1024];
    int in_layers = !strcmp(workload, "w4");
    uint64_t n = in_layers ? size_of("layers") : size_of("streams");
    uint64_t bytes = in_layers ? size_of("layer_bytes") : size_of("stream_bytes");
    for (uint64_t i = 0; i < n; i++) {
        row[i] = (segment){i * bytes, i * bytes, bytes};
    }
    if (!strcmp(workload, "w1")) {
        small();
    } else if (!strcmp(workload, "w2")) {
        segment one = {0, 0, size_of("large_bytes")};
        rate(WHOLE, &one, 1);
    } else if (!strcmp(workload, "w3")) {
        scattered(size_of("blocks"), size_of("block_bytes"));
    } else if (!strcmp(workload, "w3b")) {
        scattered(size_of("small_blocks"), size_of("small_block_bytes"));
    } else if (in_layers) {
        rate(LAYERS, row, n);
    } else if (!strcmp(workload, "w6")) {
        concurrent(row, n);
    } else {
        segment one = {0, 0, 4096};
        verify(WHOLE, &one, 1);
        double begun = now(), spent = cpu_s();
        sleep(1);
        number("", "init_ms", init_s * 1e3);
        number("", "register_ms", register_s * 1e3);
        number("", "connect_ms", connect_s * 1e3);
        number("", "first_ms", first_s * 1e3);
        number("", "total_ms", (init_s + register_s + connect_s + first_s) * 1e3);
        number("", "cores", (cpu_s() - spent) / (now() - begun));
    }
}

static void options(int argc, char **argv) {
    if (argc < 4) {
        fprintf(stderr, "usage: %s workload variant op[,op] [name=number...]\n", argv[0]);
        exit(2);
    }
    workload = argv[1];
    variant = argv[2];
    for (int i = 4; i < argc; i++) {
        char *equals = strchr(argv[i], '=');
        for (size_t k = 0; equals && k < sizeof sizes / sizeof *sizes; k++) {
            if (!strncmp(sizes[k].name, argv[i], (size_t)(equals - argv[i])) &&
                strlen(sizes[k].name) == (size_t)(equals - argv[i])) {
                sizes[k].value = strtoull(equals + 1, NULL, 10);
            }
        }
    }
    uint64_t needs[] = {size_of("large_bytes"), size_of("blocks") * size_of("block_bytes"),
                        size_of("small_blocks") * size_of("small_block_bytes"),
                        size_of("layers") * size_of("layer_bytes"), size_of("streams") * size_of("stream_bytes")};
    for (size_t i = 0; i < sizeof needs / sizeof *needs; i++) {
        region_bytes = needs[i] > region_bytes ? needs[i] : region_bytes;
    }
    if (!strcmp(workload, "setup")) {
        region_bytes = size_of("setup_bytes");
    }
    if (size_of("streams") > SLOTS_MAX || size_of("layers_at_once") > SLOTS_MAX || size_of("layers") > 1024 ||
        size_of("samples") > SAMPLES_MAX || size_of("streams") * size_of("stream_repeats") > SAMPLES_MAX ||
        size_of("repeats") > SAMPLES_MAX || size_of("small_blocks") > BLOCKS_MAX || size_of("blocks") > BLOCKS_MAX) {
        fprintf(stderr, "too large\n");
        exit(2);
    }
}

int main(int argc, char **argv) {
    options(argc, argv);
    alarm(LIMIT_S);
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair)) {
        die("socketpair");
    }
    child = fork();
    control = pair[child == 0];
    close(pair[child != 0]);
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        region = transport_alloc(region_bytes, 1);
        transport_target();
        for (;;) {
            transport_step();
        }
    }
    region = transport_alloc(region_bytes, 0);
    struct pollfd ready = {control, POLLIN, 0};
    poll(&ready, 1, -1);
    double begun = now();
    transport_connect();
    double connect_s = now() - begun;
    printf("{\"results\": {");
    char *rest = argv[3];
    for (char *op = strsep(&rest, ","), *comma = ""; op; op = strsep(&rest, ","), comma = ", ") {
        writes = !strcmp(op, "write");
        segment one = {0, 0, 4096};
        begun = now();
        transfer(&one, 1);
        double first_s = now() - begun;
        printf("%s\"%s\": {", comma, op);
        first_number = 1;
        measure(connect_s, first_s);
        printf("}");
        if (!strcmp(workload, "setup")) {
            break; /* connecting happens once */
        }
    }
    printf("}, \"verified\": %llu}\n", (unsigned long long)verified);
    fflush(stdout);
    control_put("q", 1);
    waitpid(child, NULL, 0);
    _exit(0);
}

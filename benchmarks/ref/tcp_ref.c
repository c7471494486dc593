/* tcp_ref.c: what plain C reaches over one loopback TCP connection; the yardstick of bench_tcp.py.
 *
 * Two processes, blocking sockets, no protocol to speak of: the sender writes a 64-byte header, the segment list and
 * the payload with sendmsg, the receiver scatters it with recvmsg and answers with one byte. Usage: tcp_ref CONGESTION
 * MEBIBYTES SEGMENTS ROUNDS    prints one line per round: seconds With SEGMENTS > 1 the payload is that many equal
 * blocks, in a shuffled order on both sides.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define VECTORS 512

static void die(const char *what) {
    perror(what);
    exit(1);
}

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec / 1e9;
}

static void tune(int fd, const char *congestion) {
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (*congestion && setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, congestion, (socklen_t)strlen(congestion)) != 0) {
        die("TCP_CONGESTION");
    }
}

static uint64_t *shuffled(uint64_t count, uint64_t seed) {
    uint64_t *order = malloc(count * sizeof *order);
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

/* Moves all of `head` (when there is one) and of the blocks in `order`. */
static void move_all(int fd, int sending, char *head, size_t head_length, char *memory, const uint64_t *order,
                     uint64_t count, uint64_t block) {
    uint64_t at = 0, offset = 0;
    size_t head_done = 0;
    while (head_done < head_length || at < count) {
        struct iovec vectors[VECTORS + 1];
        size_t used = 0;
        if (head_done < head_length) {
            vectors[used++] = (struct iovec){head + head_done, head_length - head_done};
        }
        if (sending || used == 0) {
            for (uint64_t i = at; i < count && used < VECTORS; i++) {
                uint64_t skip = i == at ? offset : 0;
                vectors[used++] = (struct iovec){memory + order[i] * block + skip, block - skip};
            }
        }
        struct msghdr message = {.msg_iov = vectors, .msg_iovlen = used};
        ssize_t moved = sending ? sendmsg(fd, &message, 0) : recvmsg(fd, &message, 0);
        if (moved <= 0) {
            die(sending ? "sendmsg" : "recvmsg");
        }
        uint64_t left = (uint64_t)moved;
        uint64_t part = left < head_length - head_done ? left : head_length - head_done;
        head_done += part;
        offset += left - part;
        while (at < count && offset >= block) {
            offset -= block;
            at++;
        }
    }
}

static void receiver(int listener, const char *congestion, char *memory, uint64_t count, uint64_t block, int rounds) {
    int fd = accept(listener, NULL, NULL);
    tune(fd, congestion);
    size_t head_length = 64 + count * 16;
    char *head = malloc(head_length);
    const uint64_t *order = shuffled(count, 2);
    for (int i = 0; i < rounds; i++) {
        move_all(fd, 0, head, head_length, memory, order, count, block);
        if (write(fd, "k", 1) != 1) {
            die("write");
        }
    }
    exit(0);
}

int main(int argc, char **argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: tcp_ref CONGESTION MEBIBYTES SEGMENTS ROUNDS\n");
        return 2;
    }
    uint64_t bytes = strtoull(argv[2], NULL, 10) << 20, count = strtoull(argv[3], NULL, 10);
    int rounds = atoi(argv[4]);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    tune(listener, argv[1]);
    if (bind(listener, (struct sockaddr *)&address, length) != 0 || listen(listener, 1) != 0 ||
        getsockname(listener, (struct sockaddr *)&address, &length) != 0) {
        die("listen");
    }
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    char *other = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED || other == MAP_FAILED) {
        die("mmap");
    }
    memset(memory, 7, bytes);
    pid_t child = fork();
    if (child == 0) {
        receiver(listener, argv[1], other, count, bytes / count, rounds);
    }
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    tune(fd, argv[1]);
    if (connect(fd, (struct sockaddr *)&address, length) != 0) {
        die("connect");
    }
    size_t head_length = 64 + count * 16;
    char *head = calloc(1, head_length), answer;
    const uint64_t *order = shuffled(count, 1);
    for (int i = 0; i < rounds; i++) {
        double start = now();
        move_all(fd, 1, head, head_length, memory, order, count, bytes / count);
        if (read(fd, &answer, 1) != 1) {
            die("read");
        }
        printf("%.6f\n", now() - start);
    }
    waitpid(child, NULL, 0);
    return 0;
}

/* short_io.c: stands before libc (LD_PRELOAD) and makes every call that moves bytes of a socket or of another process
 * short: at most 64 KiB, often less, and now and then EINTR or EAGAIN. At the end of the process it says how often. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>

#define CAP ((size_t)64 << 10)

static _Atomic uint64_t state = 43, capped, failed;

static uint64_t dice(void) { /* splitmix64 */
    uint64_t z = atomic_fetch_add(&state, UINT64_C(0x9e3779b97f4a7c15)) + UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static size_t allowed(void) {
    return dice() % 4 == 0 ? 1 + dice() % CAP : CAP;
}

/* EINTR mostly; where a caller may be told to come again, that. */
static int fails(int socket_flags_known) {
    if (dice() % 64 != 0) {
        return 0;
    }
    atomic_fetch_add(&failed, 1);
    errno = socket_flags_known ? EAGAIN : EINTR;
    return 1;
}

/* Cuts a list of pieces after so many bytes; how many pieces are left. The last one is cut in `cut`, whose place is
 * `*at`. */
static size_t cut_list(const struct iovec *list, size_t count, struct iovec *copy, size_t copy_max) {
    size_t left = allowed(), used = 0;
    for (; used < count && used < copy_max && left != 0; used++) {
        copy[used] = list[used];
        if (copy[used].iov_len > left) {
            copy[used].iov_len = left;
            atomic_fetch_add(&capped, 1);
        }
        left -= copy[used].iov_len;
    }
    return used;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define PIECES 64

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    struct iovec copy[PIECES];
    struct msghdr shorter = *message;
    if (message->msg_controllen == 0 && message->msg_iovlen != 0) {
        if (fails(0)) {
            return -1;
        }
        shorter.msg_iov = copy;
        shorter.msg_iovlen = cut_list(message->msg_iov, message->msg_iovlen, copy, PIECES);
    }
    return REAL(sendmsg)(fd, &shorter, flags);
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    struct iovec copy[PIECES];
    if (message->msg_controllen != 0 || message->msg_iovlen == 0) {
        return REAL(recvmsg)(fd, message, flags);
    }
    if (fails(0)) {
        return -1;
    }
    struct msghdr shorter = *message;
    shorter.msg_iov = copy;
    shorter.msg_iovlen = cut_list(message->msg_iov, message->msg_iovlen, copy, PIECES);
    ssize_t got = REAL(recvmsg)(fd, &shorter, flags);
    message->msg_flags = shorter.msg_flags;
    message->msg_namelen = shorter.msg_namelen;
    return got;
}

ssize_t send(int fd, const void *data, size_t length, int flags) {
    size_t most = allowed();
    atomic_fetch_add(&capped, length > most);
    return fails(0) ? -1 : REAL(send)(fd, data, length < most ? length : most, flags);
}

ssize_t recv(int fd, void *data, size_t length, int flags) {
    size_t most = allowed();
    atomic_fetch_add(&capped, length > most);
    return fails(0) ? -1 : REAL(recv)(fd, data, length < most ? length : most, flags);
}

ssize_t process_vm_readv(pid_t pid, const struct iovec *local, unsigned long local_count, const struct iovec *remote,
                         unsigned long remote_count, unsigned long flags) {
    struct iovec copy[PIECES];
    if (fails(0)) {
        return -1;
    }
    size_t used = cut_list(local, local_count, copy, PIECES);
    return REAL(process_vm_readv)(pid, copy, used, remote, remote_count, flags);
}

ssize_t process_vm_writev(pid_t pid, const struct iovec *local, unsigned long local_count, const struct iovec *remote,
                          unsigned long remote_count, unsigned long flags) {
    struct iovec copy[PIECES];
    if (fails(0)) {
        return -1;
    }
    size_t used = cut_list(local, local_count, copy, PIECES);
    return REAL(process_vm_writev)(pid, copy, used, remote, remote_count, flags);
}

__attribute__((destructor)) static void tell(void) {
    fprintf(stderr, "short_io: capped=%llu failed=%llu\n", (unsigned long long)capped, (unsigned long long)failed);
}

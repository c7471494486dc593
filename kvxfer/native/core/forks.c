/* forks.c: a forked child has copies of all descriptors, and a connection ends when its last copy is closed: the peers
 * of a process that has died would not notice while a child of it lives, its port would stay taken, and an epoll set
 * would report a connection that its owner has closed. So in the child each of our sockets is replaced by /dev/null;
 * the number stays taken, in case that something in the child still closes it.
 *
 * The table says which socket a number stood for (its inode). One that was closed meanwhile does not match any more, so
 * closing needs no book-keeping, and what somebody else has opened under the number since is left alone. Only calls
 * that are allowed between fork and exec are made. */
#define _GNU_SOURCE
#include "core/forks.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/stat.h>
#include <unistd.h>

#define OWNED_MAX (1 << 18) /* numbers beyond it stay open in a child; the table takes memory only where it is used */

static _Atomic uint64_t owned[OWNED_MAX];
static _Atomic int owned_end;
static pthread_once_t prepared = PTHREAD_ONCE_INIT;

static uint64_t forks_socket_inode(int fd) {
    struct stat status;
    return fstat(fd, &status) == 0 && S_ISSOCK(status.st_mode) ? (uint64_t)status.st_ino : 0;
}

static void forks_after_fork_child(void) {
    int end = atomic_exchange(&owned_end, 0);
    int nowhere = -1;
    for (int fd = 0; fd < end; fd++) {
        uint64_t inode = atomic_exchange(&owned[fd], 0);
        if (inode == 0 || forks_socket_inode(fd) != inode) {
            continue;
        }
        if (nowhere < 0) {
            nowhere = open("/dev/null", O_RDWR | O_CLOEXEC);
        }
        if (nowhere < 0 || dup3(nowhere, fd, O_CLOEXEC) < 0) {
            close(fd);
        }
    }
    if (nowhere >= 0) {
        close(nowhere);
    }
}

static void forks_register_handlers(void) {
    (void)pthread_atfork(NULL, NULL, forks_after_fork_child); /* without memory for it a child keeps its copies */
}

int kvx_owned(int fd) {
    if (fd < 0 || fd >= OWNED_MAX) {
        return fd;
    }
    (void)pthread_once(&prepared, forks_register_handlers);
    atomic_store(&owned[fd], forks_socket_inode(fd));
    int end = atomic_load(&owned_end);
    while (end <= fd && !atomic_compare_exchange_weak(&owned_end, &end, fd + 1)) {
    }
    return fd;
}

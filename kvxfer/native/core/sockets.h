/* sockets.h: what transports with a socket share: addresses as text, a listener that steps back when descriptors run
 * out, and how long a progress thread may sleep. */
#ifndef KVX_SOCKETS_H
#define KVX_SOCKETS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

/* A numeric IPv4 or IPv6 address without brackets. */
bool kvx_address_parse_host(const char *host, uint16_t port, struct sockaddr_storage *address_p, socklen_t *length_p);
/* "192.0.2.1:7000" or "[2001:db8::1]:7000"; KVX_E_INVALID for anything else, and for port 0. */
int kvx_address_parse(const char *text, struct sockaddr_storage *address_p, socklen_t *length_p);
void kvx_address_format(const struct sockaddr_storage *address, char *text, size_t size);
uint32_t kvx_address_port(const struct sockaddr_storage *address);
bool kvx_address_same_host(const struct sockaddr_storage *a, const struct sockaddr_storage *b); /* whatever the port */

int kvx_socket_error(int fd); /* SO_ERROR */
/* Is it connected to itself? The kernel may lend a dialler the very port that it dials, when nobody listens there. */
bool kvx_socket_to_itself(int fd);

/* Its address is what its events carry. Belongs to one thread. */
typedef struct kvx_listener {
    int fd, epoll_fd;
    uint64_t retry_ms; /* it does not listen until then; 0: it does */
} kvx_listener;

bool kvx_listener_watch(kvx_listener *listener, int epoll_fd);
/* The next connection, -1 and EAGAIN when there is none. `from_p` may be NULL. */
int kvx_listener_accept(const kvx_listener *listener, struct sockaddr_storage *from_p);
/* Out of descriptors or memory: later, instead of again and again; sooner when somebody leaves for it. */
void kvx_listener_pause(kvx_listener *listener, bool somebody_left);
void kvx_listener_resume(kvx_listener *listener); /* if it is time */

/* For epoll_wait: until the earlier of two times (0: none), at most timeout_ms (-1: for ever). */
int kvx_timeout_ms(uint64_t until_ms, uint64_t or_until_ms, int timeout_ms);

#endif

/* tcp_socket.c: sockets and their options of the tcp transport.
 *
 * Inside one host the congestion control matters most: a pacing one (bbr) slows loopback to a third. A socket that ever
 * ran bbr keeps its pacing timer, so the choice is made before a connection exists: the listener always carries the
 * congestion control for this host, and an accepted connection from elsewhere gets the system's back. */
#include "tcp/tcp.h"
#include "core/forks.h"
#include "core/sockets.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <linux/sockios.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

static bool tcp_socket_is_loopback(const struct sockaddr_storage *address) {
    if (address->ss_family == AF_INET6) {
        const struct in6_addr *v6 = &((const struct sockaddr_in6 *)address)->sin6_addr;
        return IN6_IS_ADDR_LOOPBACK(v6) || (IN6_IS_ADDR_V4MAPPED(v6) && v6->s6_addr[12] == 127);
    }
    return ntohl(((const struct sockaddr_in *)address)->sin_addr.s_addr) >> 24 == 127;
}

/* Would a connection to this address stay on this host? A datagram socket tells which local address the kernel would
 * use; nothing is sent. */
static bool tcp_socket_routes_to_self(const struct sockaddr_storage *address, socklen_t length) {
    if (tcp_socket_is_loopback(address)) {
        return true;
    }
    int fd = socket(address->ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return false;
    }
    struct sockaddr_storage local;
    socklen_t local_length = sizeof local;
    bool here = connect(fd, (const struct sockaddr *)address, length) == 0 &&
                getsockname(fd, (struct sockaddr *)&local, &local_length) == 0 &&
                kvx_address_same_host(&local, address);
    close(fd);
    return here;
}

static void tcp_socket_set_option(int fd, int level, int option, int value) {
    (void)setsockopt(fd, level, option, &value, sizeof value); /* each is an improvement, none is needed */
}

static void tcp_socket_set_congestion(int fd, const char *name) {
    if (*name) {
        (void)setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, (socklen_t)strlen(name));
    }
}

/* Keepalive notices a dead host while nothing is under way, kvx_tcp_silence when something is. TCP_USER_TIMEOUT would
 * do both, but it also ends connections whose other side is alive and does not read for a while. */
static void tcp_socket_set_common(int fd) {
    tcp_socket_set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    tcp_socket_set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    tcp_socket_set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 4);
    tcp_socket_set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 2);
    tcp_socket_set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
}

void kvx_tcp_tune(tcp_transport *tcp, int fd, bool accepted) {
    struct sockaddr_storage local, remote;
    socklen_t local_length = sizeof local, remote_length = sizeof remote;
    tcp_socket_set_common(fd);
    if (accepted && *tcp->congestion && getsockname(fd, (struct sockaddr *)&local, &local_length) == 0 &&
        getpeername(fd, (struct sockaddr *)&remote, &remote_length) == 0 && !kvx_address_same_host(&local, &remote) &&
        !tcp_socket_is_loopback(&remote)) {
        tcp_socket_set_congestion(fd, tcp->congestion_default);
    }
}

int kvx_tcp_dial(tcp_transport *tcp, const struct sockaddr_storage *address, socklen_t length, int *fd_p) {
    int fd = kvx_owned(socket(address->ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (fd < 0) {
        return errno;
    }
    if (*tcp->congestion && tcp_socket_routes_to_self(address, length)) {
        tcp_socket_set_congestion(fd, tcp->congestion);
    }
    tcp_socket_set_common(fd);
    if (connect(fd, (const struct sockaddr *)address, length) != 0 && errno != EINPROGRESS) {
        int error = errno;
        close(fd);
        return error;
    }
    *fd_p = fd;
    return 0;
}

bool kvx_tcp_silence(int fd, uint32_t *silent_ms_p) {
    struct tcp_info info;
    socklen_t length = sizeof info;
    int unsent = 0;
    memset(&info, 0, sizeof info);
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) {
        return false;
    }
    (void)ioctl(fd, SIOCOUTQ, &unsent); /* in the queue and not acknowledged */
    *silent_ms_p =
        info.tcpi_last_ack_recv < info.tcpi_last_data_recv ? info.tcpi_last_ack_recv : info.tcpi_last_data_recv;
    return unsent > 0;
}

int kvx_tcp_listen(tcp_transport *tcp, char *why, size_t why_size) {
    const char *bind_text = tcp->config->tcp_bind && *tcp->config->tcp_bind ? tcp->config->tcp_bind : "127.0.0.1";
    struct sockaddr_storage address;
    socklen_t length;
    char host[KVX_ENDPOINT_MAX];
    snprintf(host, sizeof host, "%s", bind_text);
    size_t last = strlen(host);
    char *text = host;
    if (last > 2 && host[0] == '[' && host[last - 1] == ']') {
        host[last - 1] = '\0';
        text++;
    }
    if (tcp->config->tcp_port > 65535 ||
        !kvx_address_parse_host(text, (uint16_t)tcp->config->tcp_port, &address, &length)) {
        snprintf(why, why_size, "tcp cannot listen on \"%s\" port %u: not a numeric IPv4 or IPv6 address and port",
                 bind_text, tcp->config->tcp_port);
        return KVX_E_INVALID;
    }
    int fd = kvx_owned(socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (fd >= 0) {
        socklen_t size = sizeof tcp->congestion_default - 1;
        (void)getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, tcp->congestion_default, &size);
        tcp_socket_set_congestion(fd, tcp->congestion);
        tcp_socket_set_option(fd, SOL_SOCKET, SO_REUSEADDR,
                              1); /* a restart may take over its port from connections in TIME_WAIT */
    }
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, length) != 0 || listen(fd, TCP_BACKLOG) != 0) {
        int error = errno;
        const char *hint =
            error == EADDRINUSE && tcp->config->tcp_port == 0
                ? "; every local port is in use: end what holds so many, or widen net.ipv4.ip_local_port_range"
            : error == EADDRINUSE    ? "; another process listens there: set data_port to another one, or to 0 for any"
            : error == EADDRNOTAVAIL ? "; no interface of this host has that address: set data_bind to one that it has"
            : error == EACCES        ? "; ports below 1024 need a privilege"
                                     : "";
        snprintf(why, why_size, "tcp cannot listen on \"%s\" port %u: %s%s", bind_text, tcp->config->tcp_port,
                 strerror(error), hint);
        if (fd >= 0) {
            close(fd);
        }
        return error == EMFILE || error == ENFILE ? KVX_E_FDS : KVX_E_SYSTEM;
    }
    length = sizeof address;
    (void)getsockname(fd, (struct sockaddr *)&address, &length);
    kvx_address_format(&address, tcp->endpoint, sizeof tcp->endpoint);
    tcp->listener.fd = fd;
    return KVX_OK;
}

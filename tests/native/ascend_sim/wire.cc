/* wire.cc: messages over a stream socket. */
#include <arpa/inet.h>
#include <cerrno>
#include <cstdlib>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "sim.h"
#include "wire.h"

namespace kvxsim {

namespace {

bool send_all(int fd, const void *data, size_t length) {
    const uint8_t *at = static_cast<const uint8_t *>(data);
    while (length > 0) {
        ssize_t sent = send(fd, at, length, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent <= 0)
            return false;
        at += sent;
        length -= static_cast<size_t>(sent);
    }
    return true;
}

int receive_all(int fd, void *data, size_t length, uint64_t until_ns) {
    uint8_t *at = static_cast<uint8_t *>(data);
    while (length > 0) {
        int wait_ms = -1;
        if (until_ns != UINT64_MAX) {
            uint64_t now = kvxsim_now_ns();
            wait_ms = now >= until_ns ? 0 : static_cast<int>((until_ns - now + 999999) / 1000000);
        }
        struct pollfd ready = {fd, POLLIN, 0};
        int polled = poll(&ready, 1, wait_ms);
        if (polled < 0 && errno == EINTR)
            continue;
        if (polled <= 0)
            return polled;
        ssize_t got = recv(fd, at, length, 0);
        if (got < 0 && (errno == EINTR || errno == EAGAIN))
            continue;
        if (got <= 0)
            return -1;
        at += got;
        length -= static_cast<size_t>(got);
    }
    return 1;
}

} // namespace

bool Message::take(void *out, size_t length) {
    if (body.size() - at < length)
        return false;
    memcpy(out, body.data() + at, length);
    at += length;
    return true;
}

bool send_message(int fd, Message *message) {
    message->head.length = static_cast<uint32_t>(message->body.size());
    const uint8_t *head = reinterpret_cast<const uint8_t *>(&message->head);
    std::vector<uint8_t> bytes(head, head + sizeof message->head);
    bytes.insert(bytes.end(), message->body.begin(), message->body.end());
    return send_all(fd, bytes.data(), bytes.size());
}

int receive_message(int fd, Message *message, int timeout_ms) {
    uint64_t until = timeout_ms < 0 ? UINT64_MAX : kvxsim_now_ns() + static_cast<uint64_t>(timeout_ms) * 1000000u;
    int got = receive_all(fd, &message->head, sizeof message->head, until);
    if (got != 1)
        return got;
    if (message->head.magic != kWireMagic || message->head.length > kBodyMost)
        return -1;
    message->body.resize(message->head.length);
    message->at = 0;
    return message->body.empty() ? 1 : receive_all(fd, message->body.data(), message->body.size(), until);
}

bool parse_engine(const std::string &name, std::string *ip_p, int *port_p) {
    std::string ip = name;
    *port_p = 0;
    size_t colon = std::string::npos;
    if (!name.empty() && name[0] == '[') {
        size_t end = name.find(']');
        if (end == std::string::npos)
            return false;
        ip = name.substr(1, end - 1);
        colon = end + 1 < name.size() ? end + 1 : std::string::npos;
        if (colon != std::string::npos && name[colon] != ':')
            return false;
    } else {
        colon = name.find(':');
        ip = name.substr(0, colon);
    }
    if (colon != std::string::npos) {
        long port = std::strtol(name.c_str() + colon + 1, nullptr, 10);
        *port_p = port > 0 ? static_cast<int>(port & 0xffff) : 0; /* 99999 is taken, and cut: as seen in the vendor's */
    }
    unsigned char address[16];
    *ip_p = ip;
    return inet_pton(AF_INET, ip.c_str(), address) == 1 || inet_pton(AF_INET6, ip.c_str(), address) == 1;
}

int dial(const std::string &ip, int port, int timeout_ms, int *fd_p) {
    struct sockaddr_in six4 = {};
    struct sockaddr_in6 six = {};
    struct sockaddr *address = reinterpret_cast<struct sockaddr *>(&six4);
    socklen_t length = sizeof six4;
    six4.sin_family = AF_INET;
    six4.sin_port = htons(static_cast<uint16_t>(port));
    if (inet_pton(AF_INET, ip.c_str(), &six4.sin_addr) != 1) {
        six.sin6_family = AF_INET6;
        six.sin6_port = htons(static_cast<uint16_t>(port));
        inet_pton(AF_INET6, ip.c_str(), &six.sin6_addr);
        address = reinterpret_cast<struct sockaddr *>(&six);
        length = sizeof six;
    }
    int fd = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return errno;
    int error = connect(fd, address, length) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
        struct pollfd ready = {fd, POLLOUT, 0};
        socklen_t size = sizeof error;
        error = ETIMEDOUT;
        if (poll(&ready, 1, timeout_ms) == 1)
            getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
    }
    if (error) {
        close(fd);
        return error;
    }
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
    *fd_p = fd;
    return 0;
}

} // namespace kvxsim

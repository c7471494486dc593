/* wire.h: the control connection: messages of a head and a body, read to their end or not at all. */
#ifndef KVXSIM_WIRE_H
#define KVXSIM_WIRE_H

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

namespace kvxsim {

enum class Type : uint32_t { HELLO = 1, WELCOME, REFUSE, NOTIFY, NOTIFIED, BEAT, BYE, BYE_DONE };

struct Head {
    uint32_t magic;
    Type type;
    uint32_t status;
    uint32_t length;
    uint64_t sequence;
};

constexpr uint32_t kWireMagic = 0x5358564b;
constexpr uint32_t kBodyMost = 1u << 20;

struct Message {
    Head head{kWireMagic, Type::BEAT, 0, 0, 0};
    std::vector<uint8_t> body;
    size_t at = 0;

    explicit Message(Type type = Type::BEAT, uint64_t sequence = 0, uint32_t status = 0) {
        head.type = type;
        head.sequence = sequence;
        head.status = status;
    }

    template <class T> void put(const T &value) {
        static_assert(std::is_trivially_copyable<T>::value, "bytes");
        const uint8_t *bytes = reinterpret_cast<const uint8_t *>(&value);
        body.insert(body.end(), bytes, bytes + sizeof value);
    }

    void put_text(const std::string &text) {
        put(static_cast<uint32_t>(text.size()));
        body.insert(body.end(), text.begin(), text.end());
    }

    template <class T> bool get(T *value_p) {
        static_assert(std::is_trivially_copyable<T>::value, "bytes");
        return take(value_p, sizeof *value_p);
    }

    bool take(void *out, size_t length); /* out of line: an inlined one confuses GCC 12's bounds warning */

    bool get_text(std::string *text_p) {
        uint32_t length = 0;
        if (!get(&length) || body.size() - at < length)
            return false;
        text_p->assign(reinterpret_cast<const char *>(body.data() + at), length);
        at += length;
        return true;
    }
};

bool send_message(int fd, Message *message);
/* Waits for ever when timeout_ms < 0. 1 got one, 0 the time is over, -1 the connection ended or spoke nonsense. */
int receive_message(int fd, Message *message, int timeout_ms);
/* "ip:port", "ip", "[ipv6]:port", "[ipv6]". port 0 or less: none. */
bool parse_engine(const std::string &name, std::string *ip_p, int *port_p);
/* 0, or an errno; bounded by timeout_ms. */
int dial(const std::string &ip, int port, int timeout_ms, int *fd_p);

} // namespace kvxsim

#endif

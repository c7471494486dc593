/* server.cc: the listener: 16 threads, each of which reads a message to its end however long that takes.
 *
 * That is the vendor's weakness and is kept: 16 silent connections stop every later Connect, 8 do no harm. A connection
 * that has said hello is watched and costs a thread only while a message arrives. */
#include <arpa/inet.h>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "engine.h"

namespace kvxsim {

uint32_t Engine::listen_on(const std::string &ip, int port) {
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
    int one = 1;
    int fd = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) || bind(fd, address, length) ||
        listen(fd, 128)) {
        int error = errno;
        if (fd >= 0)
            close(fd);
        return kvxsim_error(kFailed, "Initialize: cannot listen on %s port %d: %s", ip.c_str(), port, strerror(error));
    }
    listener_ = fd;
    wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    server_ = std::thread(&Engine::serve, this);
    return 0;
}

/* Under serving_. A thread is made when none is idle, up to the vendor's 16. */
void Engine::hand_over(int fd) {
    waiting_.push_back(fd);
    if (idle_handlers_ < waiting_.size() && handlers_.size() < kServerThreads)
        handlers_.emplace_back(&Engine::handle_work, this);
    served_.notify_all(); /* not one: the heartbeat waits here too */
}

void Engine::accept_one() {
    int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0)
        return;
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    std::lock_guard<std::mutex> guard(serving_);
    accepted_.insert(fd);
    sessions_[fd].fd = fd;
    sessions_[fd].heard_ns = kvxsim_now_ns();
    hand_over(fd);
}

void Engine::serve() {
    for (;;) {
        std::vector<struct pollfd> ready = {{wake_, POLLIN, 0}, {listener_, POLLIN, 0}};
        {
            std::lock_guard<std::mutex> guard(serving_);
            for (int fd : watched_)
                ready.push_back({fd, POLLIN, 0});
        }
        if (::poll(ready.data(), ready.size(), 1000) < 0 && errno != EINTR)
            return;
        uint64_t count;
        if (ready[0].revents && read(wake_, &count, sizeof count) > 0 && finishing_)
            return;
        {
            std::lock_guard<std::mutex> guard(serving_);
            for (size_t index = 2; index < ready.size(); index++)
                if (ready[index].revents && watched_.erase(ready[index].fd))
                    hand_over(ready[index].fd);
        }
        if (ready[1].revents)
            accept_one();
    }
}

void Engine::handle_work() {
    std::unique_lock<std::mutex> guard(serving_);
    for (;;) {
        idle_handlers_++;
        served_.wait(guard, [this] { return !waiting_.empty() || finishing_; });
        idle_handlers_--;
        if (finishing_)
            return;
        int fd = waiting_.front();
        waiting_.pop_front();
        guard.unlock();
        bool kept = handle(fd);
        guard.lock();
        if (kept) {
            watched_.insert(fd);
            eventfd_write(wake_, 1);
        } else if (accepted_.erase(fd)) {
            sessions_.erase(fd);
            close(fd);
        }
    }
}

/* One message, read without a bound. False: the connection is over. */
bool Engine::handle(int fd) {
    Message message;
    if (receive_message(fd, &message, -1) != 1)
        return false;
    {
        std::lock_guard<std::mutex> guard(serving_);
        Session &session = sessions_[fd];
        session.heard_ns = kvxsim_now_ns();
        if (!session.said_hello && message.head.type != Type::HELLO)
            return false;
    }
    Message done(Type::BYE_DONE, message.head.sequence);
    switch (message.head.type) {
    case Type::HELLO:
        return welcome(fd, message);
    case Type::NOTIFY:
        return take_notify(fd, message);
    case Type::BEAT:
        return true;
    case Type::BYE: {
        {
            /* Out of the table before the answer: who has it may deregister at once. */
            std::lock_guard<std::mutex> guard(serving_);
            sessions_.erase(fd);
        }
        send_message(fd, &done);
        return false;
    }
    default:
        return false;
    }
}

bool Engine::welcome(int fd, const Message &message) {
    Message hello = message;
    std::string name, directory, pool, why;
    int32_t card = -1;
    if (!hello.get_text(&name) || !hello.get_text(&directory) || !hello.get_text(&pool) || !hello.get(&card))
        return false;
    std::vector<Region> mine = regions();
    if (directory != kvxsim_directory())
        why = "another simulation directory: " + directory;
    else if (card == card_)
        why = "the same device";
    else if (pool != pool_)
        why = "BufferPool " + pool + " there, " + pool_ + " here";
    else if (check_regions(mine, name_.c_str()))
        why = "a region of " + name_ + " is not aligned to 2 MiB, or there are too many";
    if (!why.empty()) {
        Message refusal(Type::REFUSE, 0, kFailed);
        refusal.put_text(why);
        send_message(fd, &refusal);
        return false;
    }
    Message answer(Type::WELCOME);
    answer.put(static_cast<int>(getpid()));
    answer.put(kvxsim_process_started(getpid()));
    answer.put(kvxsim_cards());
    for (uint32_t index = 0; index < kvxsim_cards(); index++)
        answer.put(kvxsim_card_address(static_cast<int>(index)));
    answer.put(static_cast<uint32_t>(mine.size()));
    for (const Region &region : mine)
        answer.put(region);
    {
        std::lock_guard<std::mutex> guard(serving_);
        sessions_[fd].name = name;
        sessions_[fd].said_hello = true;
    }
    return send_message(fd, &answer);
}

bool Engine::take_notify(int fd, const Message &message) {
    Message notify = message;
    std::string name, text;
    if (!notify.get_text(&name) || !notify.get_text(&text))
        return false;
    Message answer(Type::NOTIFIED, notify.head.sequence);
    {
        std::lock_guard<std::mutex> guard(serving_);
        auto &queue = sessions_[fd].notifies;
        if (queue.size() >= kNotifyQueue)
            answer.head.status = kExhausted;
        else
            queue.emplace_back(name, text);
    }
    return send_message(fd, &answer);
}

std::vector<std::pair<std::string, std::string>> Engine::take_notifies() {
    std::lock_guard<std::mutex> guard(serving_);
    std::vector<std::pair<std::string, std::string>> out;
    for (auto &[fd, session] : sessions_) {
        out.insert(out.end(), session.notifies.begin(), session.notifies.end());
        session.notifies.clear();
    }
    return out;
}

/* A client that says nothing for 120 s is dropped. */
void Engine::drop_silent() {
    uint64_t limit = static_cast<uint64_t>(kvxsim_number("HEARTBEAT_DROP_MS", 120000) * 1e6);
    std::lock_guard<std::mutex> guard(serving_);
    uint64_t now = kvxsim_now_ns(); /* not before the lock: what is heard meanwhile would be later than now */
    for (auto &[fd, session] : sessions_)
        if (session.said_hello && now - session.heard_ns > limit) {
            kvxsim_note("%s drops the silent link of %s", name_.c_str(), session.name.c_str());
            session.said_hello = false;
            shutdown(fd, SHUT_RDWR); /* its watcher sees the end */
        }
}

/* Client to server, every 10 s, on each link; a link that is busy with another exchange is alive anyway. */
void Engine::heartbeats() {
    uint64_t next = kvxsim_now_ns();
    while (running_) {
        uint64_t now = kvxsim_now_ns();
        if (now >= next) {
            next = now + static_cast<uint64_t>(kvxsim_number("HEARTBEAT_MS", 10000) * 1e6);
            std::vector<std::shared_ptr<Link>> all;
            {
                std::lock_guard<std::mutex> guard(tables_);
                for (auto &[remote, link] : links_)
                    all.push_back(link);
            }
            for (auto &link : all) {
                std::unique_lock<std::mutex> control(link->control, std::try_to_lock);
                Message beat(Type::BEAT);
                if (control.owns_lock() && !link->gone && !send_message(link->fd, &beat))
                    link->gone = true;
            }
        }
        drop_silent();
        std::unique_lock<std::mutex> guard(serving_);
        served_.wait_for(guard, std::chrono::milliseconds(100), [this] { return !running_; });
    }
}

} // namespace kvxsim

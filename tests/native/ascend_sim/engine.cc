/* engine.cc: an engine's life, its registrations, its links as the initiator sees them. */
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "engine.h"

namespace kvxsim {

/* What HIXL itself keeps a link for: these leave it usable, anything else latches it. */
bool latches(uint32_t status) {
    return kvxsim_major() >= 9 && status != 0 && status != kParamInvalid && status != kNotConnected &&
           status != kAlreadyConnected && status != kUnsupported && status != kExhausted;
}

Link::~Link() {
    if (fd >= 0)
        close(fd);
    for (size_t index = 0; index < mapped.size(); index++)
        if (mapped[index])
            munmap(mapped[index], theirs[index].offset + theirs[index].length);
}

bool Link::peer_lost() {
    uint8_t byte;
    if (!gone.load()) {
        ssize_t got = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
        if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR))
            gone.store(true);
    }
    return gone.load();
}

namespace {

bool number_in(const std::string &text, long low, long high, long step) {
    char *end = nullptr;
    long value = std::strtol(text.c_str(), &end, 10);
    return !text.empty() && *end == 0 && value >= low && value <= high && (value - low) % step == 0;
}

bool pool_shape(const std::string &text, long *count_p, long *megabytes_p) {
    char *end = nullptr;
    *count_p = std::strtol(text.c_str(), &end, 10);
    if (end == text.c_str() || *end != ':')
        return false;
    const char *second = end + 1;
    *megabytes_p = std::strtol(second, &end, 10);
    return end != second && *end == 0 && *count_p >= 0 && *megabytes_p >= 0;
}

bool json_object(const std::string &text) {
    size_t first = text.find_first_not_of(" \t\n"), last = text.find_last_not_of(" \t\n");
    return first != std::string::npos && text[first] == '{' && text[last] == '}';
}

} // namespace

uint32_t Engine::apply_options(const std::map<std::string, std::string> &options) {
    for (const auto &[key, value] : options) {
        bool good = false;
        long count, megabytes;
        if (key == "BufferPool")
            good = pool_shape(value, &count, &megabytes), pool_ = value;
        else if (key == "RdmaTrafficClass")
            good = number_in(value, 0, 255, 4);
        else if (key == "RdmaServiceLevel")
            good = number_in(value, 0, 7, 1);
        else if (key == "EnableUseFabricMem") {
            if (value == "1")
                return kvxsim_error(kUnsupported, "EnableUseFabricMem=1: no fabric memory on this card");
            good = value == "0";
        } else if (key == "GlobalResourceConfig")
            good = json_object(value);
        else if (key == "AutoConnect" && kvxsim_major() >= 9)
            good = value == "0" || value == "1", auto_connect_ = value == "1";
        else if (key == "LocalCommRes" && kvxsim_major() >= 9) {
            if (value.find("\"1.3\"") != std::string::npos)
                return kvxsim_error(kUnsupported, "LocalCommRes version 1.3: client/server engine is not simulated");
            good = value.empty() || json_object(value);
        }
        if (!good)
            return kvxsim_error(kParamInvalid, "Initialize: unknown option or bad value: %s=%s", key.c_str(),
                                value.c_str());
    }
    return 0;
}

/* The default "4:8" costs twice 32 MiB of the card's memory; "0:0" costs nothing. */
uint32_t Engine::take_pools() {
    long count = 0, megabytes = 0;
    pool_shape(pool_, &count, &megabytes);
    for (int pool = 0; pool < 2 && count * megabytes > 0; pool++) {
        kvxsim_memory made;
        uint64_t length = static_cast<uint64_t>(count) * static_cast<uint64_t>(megabytes) << 20;
        if (kvxsim_alloc_device(card_, length, true, &made))
            return kvxsim_error(kFailed, "Initialize: no memory for BufferPool %s", pool_.c_str());
        pool_memory_.push_back(made.address);
    }
    return 0;
}

uint32_t Engine::initialize(const std::string &local, const std::map<std::string, std::string> &options) {
    uint32_t status = 0;
    kvxsim_attach();
    if (kvxsim_fails("init", &status))
        return kvxsim_error(status, "Initialize: injected by KVXFER_SIM_FAIL");
    if (running_)
        return kvxsim_error(kParamInvalid, "Initialize: done already");
    card_ = kvxsim_current_card();
    if (card_ < 0)
        return kvxsim_error(kAclNoContext, "Initialize: no device set (aclrtSetDevice first)");
    std::string ip;
    int port = 0;
    if (!parse_engine(local, &ip, &port))
        return kvxsim_error(kParamInvalid, "Initialize: %s is not ip:port", local.c_str());
    name_ = local;
    status = apply_options(options);
    if (status == 0)
        status = take_pools();
    if (status == 0 && port > 0)
        status = listen_on(ip, port);
    if (status) {
        for (uint64_t memory : pool_memory_)
            kvxsim_free(reinterpret_cast<void *>(memory), KVXSIM_DEVICE);
        pool_memory_.clear();
        return status;
    }
    running_ = true;
    mover_ = std::thread(&Engine::move, this);
    beats_ = std::thread(&Engine::heartbeats, this);
    kvxsim_note("engine %s on card %d: simulated", name_.c_str(), card_);
    return 0;
}

void Engine::finalize() {
    if (!running_.exchange(false))
        return;
    finishing_ = true;
    while (calls_.load() > 0) /* also one that hangs: as the vendor's, this may be for ever */
        kvxsim_sleep_until(kvxsim_now_ns() + 1000000);
    {
        std::lock_guard<std::mutex> guard(control_);
        controlled_.notify_all();
    }
    for (std::thread &thread : control_threads_)
        thread.join();
    {
        std::lock_guard<std::mutex> guard(moving_);
        moved_.notify_all();
    }
    mover_.join();
    if (listener_ >= 0) {
        eventfd_write(wake_, 1);
        server_.join();
    }
    {
        std::lock_guard<std::mutex> guard(serving_);
        for (int fd : accepted_)
            shutdown(fd, SHUT_RDWR);
        served_.notify_all();
    }
    beats_.join();
    if (listener_ >= 0) {
        for (std::thread &thread : handlers_)
            thread.join();
        for (int fd : accepted_)
            close(fd);
        close(listener_);
        close(wake_);
    }
    links_.clear();
    for (const Registration &registration : registrations_)
        kvxsim_registered(registration.region.row, registration.region.generation, -1);
    for (uint64_t memory : pool_memory_)
        kvxsim_free(reinterpret_cast<void *>(memory), KVXSIM_DEVICE);
}

/* -- memory -----------------------------------------------------------------------------------------------------------
 */

/* Host memory that is not from aclrtMallocHost is refused here and not at Connect: on A2 and A3 it can never be
 * reached, and only memory of ours has a descriptor that a peer can map. Alignment, in contrast, is noticed at Connect,
 * as the vendor's users report it. */
uint32_t Engine::register_memory(uint64_t address, uint64_t length, int type, void **handle_p) {
    uint32_t status = 0;
    if (!running_)
        return kvxsim_error(kFailed, "RegisterMem: not initialised");
    if (kvxsim_fails("register", &status))
        return kvxsim_error(status, "RegisterMem: injected by KVXFER_SIM_FAIL");
    if (address == 0 || length == 0 || type < 0 || type > 1)
        return kvxsim_error(kParamInvalid, "RegisterMem: bad argument");
    kvxsim_memory found;
    kvxsim_find(reinterpret_cast<void *>(address), length, &found);
    if (type == hixl::MEM_HOST && found.kind != KVXSIM_PINNED)
        return kvxsim_error(kFailed, "RegisterMem: host memory that is not from aclrtMallocHost");
    if (type == hixl::MEM_DEVICE && found.kind != KVXSIM_DEVICE)
        return kvxsim_error(kParamInvalid, "RegisterMem: not inside one live device allocation of this process");
    if (type == hixl::MEM_DEVICE && found.card != card_)
        return kvxsim_error(kFailed, "RegisterMem: memory of card %d, engine on card %d", found.card, card_);
    std::lock_guard<std::mutex> guard(tables_);
    for (const Registration &known : registrations_)
        if (known.region.address == address && known.region.length == length &&
            kvxsim_live(known.region.row, known.region.generation)) {
            *handle_p = reinterpret_cast<void *>(known.handle);
            return 0;
        }
    if (registrations_.size() >= kRegistrations)
        return kvxsim_error(kFailed, "RegisterMem: more than %zu registrations", kRegistrations);
    Registration made;
    made.region = {address,    length,           found.offset + (address - found.address),
                   found.row,  found.generation, found.kind,
                   found.card, found.fd,         found.huge ? 1 : 0};
    if (found.kind == KVXSIM_PINNED)
        made.region.offset = address - found.address;
    made.handle = (next_id_++ << 12) | 1;
    registrations_.push_back(made);
    kvxsim_registered(found.row, found.generation, 1);
    *handle_p = reinterpret_cast<void *>(made.handle);
    return 0;
}

uint32_t Engine::deregister(void *handle) {
    uint32_t status = 0;
    if (!running_)
        return kvxsim_error(kFailed, "DeregisterMem: not initialised");
    if (!handle)
        return kvxsim_error(kParamInvalid, "DeregisterMem: null");
    if (kvxsim_fails("deregister", &status))
        return kvxsim_error(status, "DeregisterMem: injected by KVXFER_SIM_FAIL");
    size_t clients = 0;
    {
        std::lock_guard<std::mutex> guard(serving_);
        for (const auto &[fd, session] : sessions_)
            clients += session.said_hello;
    }
    std::lock_guard<std::mutex> guard(tables_);
    auto found = std::find_if(registrations_.begin(), registrations_.end(), [handle](const Registration &known) {
        return known.handle == reinterpret_cast<uint64_t>(handle);
    });
    if (found == registrations_.end())
        return 0; /* unknown or twice: as seen */
    if (!links_.empty() || clients > 0)
        return kvxsim_error(kFailed, "DeregisterMem: %zu links out and %zu in are live", links_.size(), clients);
    kvxsim_registered(found->region.row, found->region.generation, -1);
    registrations_.erase(found);
    return 0;
}

std::vector<Region> Engine::regions() {
    std::lock_guard<std::mutex> guard(tables_);
    std::vector<Region> out;
    for (const Registration &registration : registrations_)
        out.push_back(registration.region);
    return out;
}

uint32_t Engine::check_regions(const std::vector<Region> &all, const char *whose) {
    if (all.size() > static_cast<size_t>(kvxsim_number("REGIONS", 256)))
        return kvxsim_error(kFailed, "Connect: %zu regions of %s do not fit one exchange", all.size(), whose);
    for (const Region &region : all)
        if (region.kind == KVXSIM_DEVICE && (!region.huge || region.address % kHugePage || region.length % kHugePage))
            return kvxsim_error(kFailed, "Connect: region of %s is not aligned to 2 MiB, or not in huge pages (507899)",
                                whose);
    return 0;
}

/* -- links ------------------------------------------------------------------------------------------------------------
 */

std::shared_ptr<Link> Engine::find(const std::string &remote) {
    std::lock_guard<std::mutex> guard(tables_);
    auto found = links_.find(remote);
    return found == links_.end() ? nullptr : found->second;
}

uint32_t Engine::accept_welcome(Link *link, const Message &answer) {
    Message welcome = answer;
    uint32_t cards = 0, count = 0;
    bool good = welcome.get(&link->peer_pid) && welcome.get(&link->peer_started) && welcome.get(&cards);
    for (uint32_t index = 0; good && index < cards; index++) {
        uint64_t address = 0;
        good = welcome.get(&address);
        link->card_addresses.push_back(address);
    }
    good = good && welcome.get(&count);
    for (uint32_t index = 0; good && index < count; index++) {
        Region region;
        good = welcome.get(&region);
        link->theirs.push_back(region);
    }
    link->mapped.resize(link->theirs.size(), nullptr);
    for (size_t index = 0; good && index < link->theirs.size(); index++) {
        Region &region = link->theirs[index];
        if (region.kind != KVXSIM_PINNED)
            continue;
        /* The whole allocation's start is not told: map up to the region's end and keep that length for munmap. */
        uint64_t length = region.offset + region.length;
        link->mapped[index] = kvxsim_map_pinned(link->peer_pid, region.fd, length);
        if (!link->mapped[index])
            return kvxsim_error(kFailed, "Connect: cannot map pinned memory of process %d", link->peer_pid);
    }
    return good ? 0 : kvxsim_error(kFailed, "Connect: the answer makes no sense");
}

/* Reads for as long as it takes: the vendor's time limit does not bound this, and neither does ours. */
uint32_t Engine::greet(Link *link, int32_t) {
    Message hello(Type::HELLO);
    hello.put_text(name_);
    hello.put_text(kvxsim_directory());
    hello.put_text(pool_);
    hello.put(static_cast<int32_t>(card_));
    Message answer;
    if (!send_message(link->fd, &hello) || receive_message(link->fd, &answer, -1) != 1)
        return kvxsim_error(kFailed, "Connect to %s: the peer closed the connection", link->remote.c_str());
    std::string why;
    if (answer.head.type == Type::REFUSE && answer.get_text(&why))
        return kvxsim_error(answer.head.status, "Connect to %s: refused: %s", link->remote.c_str(), why.c_str());
    return answer.head.type == Type::WELCOME ? accept_welcome(link, answer)
                                             : kvxsim_error(kFailed, "Connect: unexpected answer");
}

uint32_t Engine::connect(const std::string &remote, int32_t timeout_ms) {
    uint32_t status = 0;
    std::string ip;
    int port = 0;
    if (!running_)
        return kvxsim_error(kFailed, "Connect: not initialised");
    if (kvxsim_fails("connect", &status))
        return kvxsim_error(status, "Connect: injected by KVXFER_SIM_FAIL");
    if (timeout_ms <= 0 || !parse_engine(remote, &ip, &port) || port == 0)
        return kvxsim_error(kParamInvalid, "Connect: bad engine name or time: %s", remote.c_str());
    if (remote == name_)
        return kvxsim_error(kFailed, "Connect: %s is this engine itself", remote.c_str());
    {
        std::lock_guard<std::mutex> guard(tables_);
        if (links_.count(remote) || !connecting_.insert(remote).second)
            return kvxsim_error(kAlreadyConnected, "Connect: %s is connected", remote.c_str());
        if (links_.size() + connecting_.size() > kLinks)
            status = kvxsim_error(kExhausted, "Connect: more than %zu links", kLinks);
    }
    kvxsim_hang("connect");
    auto link = std::make_shared<Link>();
    link->remote = remote;
    link->local = regions();
    if (status == 0 && kvxsim_lost(card_))
        status = kvxsim_error(kAclDeviceLost, "Connect: card %d is lost", card_);
    if (status == 0)
        status = check_regions(link->local, name_.c_str());
    if (status == 0) {
        int error = dial(ip, port, timeout_ms, &link->fd);
        if (error)
            status = kvxsim_error(error == ETIMEDOUT ? kTimeout : kFailed, "Connect to %s: %s", remote.c_str(),
                                  strerror(error));
    }
    if (status == 0)
        status = greet(link.get(), timeout_ms);
    std::lock_guard<std::mutex> guard(tables_);
    connecting_.erase(remote);
    if (status == 0)
        links_[remote] = link;
    return status;
}

/* The local channel is destroyed first, the peer's answer is waited for last and without a bound: when this hangs, the
 * link is gone already. HANG=disconnect hangs before, while bytes still move: the worse case of the two. */
uint32_t Engine::disconnect(const std::string &remote, int32_t timeout_ms) {
    uint32_t status = 0;
    if (!running_)
        return kvxsim_error(kFailed, "Disconnect: not initialised");
    if (timeout_ms <= 0)
        return kvxsim_error(kParamInvalid, "Disconnect: time %d", timeout_ms);
    std::shared_ptr<Link> link = find(remote);
    if (!link)
        return kvxsim_error(kNotConnected, "Disconnect: %s is not connected", remote.c_str());
    if (kvxsim_fails("disconnect", &status))
        return kvxsim_error(status, "Disconnect: injected by KVXFER_SIM_FAIL");
    kvxsim_hang("disconnect");
    {
        std::lock_guard<std::mutex> guard(tables_);
        auto found = links_.find(remote);
        if (found == links_.end() || found->second != link)
            return kvxsim_error(kNotConnected, "Disconnect: %s is not connected", remote.c_str());
        links_.erase(found);
    }
    stop_link(link);
    std::lock_guard<std::mutex> guard(link->control);
    Message bye(Type::BYE, ++link->sequence), answer;
    if (!link->peer_lost() && send_message(link->fd, &bye))
        while (receive_message(link->fd, &answer, -1) == 1 && answer.head.type != Type::BYE_DONE)
            continue;
    return 0;
}

uint32_t Engine::send_notify(const std::string &remote, const std::string &name, const std::string &text,
                             int32_t timeout_ms) {
    uint32_t status = 0;
    if (timeout_ms <= 0 || name.size() > kNotifyText || text.size() > kNotifyText)
        return kvxsim_error(kParamInvalid, "SendNotify: more than %zu characters, or a time of 0", kNotifyText);
    std::shared_ptr<Link> link = find(remote);
    if (!link)
        return kvxsim_error(kNotConnected, "SendNotify: %s is not connected", remote.c_str());
    if (kvxsim_fails("notify", &status))
        return kvxsim_error(status, "SendNotify: injected by KVXFER_SIM_FAIL");
    std::lock_guard<std::mutex> guard(link->control);
    Message message(Type::NOTIFY, ++link->sequence), answer;
    message.put_text(name);
    message.put_text(text);
    if (!send_message(link->fd, &message))
        return kvxsim_error(kFailed, "SendNotify: the connection has ended");
    uint64_t until = kvxsim_now_ns() + static_cast<uint64_t>(timeout_ms) * 1000000u;
    for (;;) {
        uint64_t now = kvxsim_now_ns();
        int got = receive_message(link->fd, &answer, now < until ? static_cast<int>((until - now) / 1000000 + 1) : 0);
        if (got == 0)
            return kvxsim_error(kTimeout, "SendNotify: no answer in %d ms", timeout_ms);
        if (got < 0)
            return kvxsim_error(kFailed, "SendNotify: the connection has ended");
        if (answer.head.type == Type::NOTIFIED && answer.head.sequence == link->sequence)
            return answer.head.status ? kvxsim_error(answer.head.status, "SendNotify: the peer's queue is full") : 0;
    }
}

/* -- asynchronous connect (9.1) ---------------------------------------------------------------------------------------
 */

uint32_t Engine::connect_async(const std::string &remote, int32_t timeout_ms, bool up) {
    if (!running_)
        return kvxsim_error(kFailed, "ConnectAsync: not initialised");
    if (timeout_ms <= 0)
        return kvxsim_error(kParamInvalid, "ConnectAsync: time %d", timeout_ms);
    std::shared_ptr<Link> link = find(remote);
    if (up && link)
        return kvxsim_error(kAlreadyConnected, "ConnectAsync: %s is connected", remote.c_str());
    if (!up && !link)
        return kvxsim_error(kNotConnected, "DisconnectAsync: %s is not connected", remote.c_str());
    std::lock_guard<std::mutex> guard(control_);
    if (control_queue_.size() >= 128)
        return kvxsim_error(kExhausted, "ConnectAsync: the queue is full");
    while (control_threads_.size() < 2)
        control_threads_.emplace_back(&Engine::control_work, this);
    control_queue_.push_back({remote, timeout_ms, up});
    control_state_[remote] =
        up ? hixl::AsyncConnectStatus::CONNECT_PENDING : hixl::AsyncConnectStatus::DISCONNECT_PENDING;
    controlled_.notify_one();
    return 0;
}

void Engine::control_work() {
    std::unique_lock<std::mutex> guard(control_);
    for (;;) {
        controlled_.wait(guard, [this] { return !running_ || !control_queue_.empty(); });
        if (!running_)
            return;
        ControlTask task = control_queue_.front();
        control_queue_.pop_front();
        control_state_[task.remote] =
            task.up ? hixl::AsyncConnectStatus::CONNECTING : hixl::AsyncConnectStatus::DISCONNECTING;
        guard.unlock();
        uint32_t status = task.up ? connect(task.remote, task.timeout_ms) : disconnect(task.remote, task.timeout_ms);
        guard.lock();
        control_state_[task.remote] = !task.up      ? hixl::AsyncConnectStatus::NOT_CONNECT
                                      : status == 0 ? hixl::AsyncConnectStatus::CONNECTED
                                                    : hixl::AsyncConnectStatus::CONNECT_FAILED;
    }
}

hixl::AsyncConnectStatus Engine::async_status(const std::string &remote) {
    std::lock_guard<std::mutex> guard(control_);
    auto found = control_state_.find(remote);
    return found == control_state_.end() ? hixl::AsyncConnectStatus::NOT_CONNECT : found->second;
}

std::map<std::string, hixl::AsyncConnectStatus> Engine::async_statuses() {
    std::lock_guard<std::mutex> guard(control_);
    return control_state_;
}

} // namespace kvxsim

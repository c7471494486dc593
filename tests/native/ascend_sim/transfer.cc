/* transfer.cc: one-sided transfers: what is checked at submit, the thread that moves bytes, the polls.
 *
 * The thread takes the requests in turn, a chunk of each, so a transfer that is half done is really half done, and
 * asks before each piece whether both memories are still allocated: a buffer that was given back too early is a fault
 * in the log and not a silent success. */
#include <algorithm>
#include <chrono>
#include <cstring>

#include "engine.h"

namespace kvxsim {

namespace {

constexpr uint64_t kChunk = UINT64_C(256) << 10, kChunkLeast = 4096;
constexpr size_t kPiecesPerChunk = 256;
constexpr uint32_t kUnwatched = UINT32_MAX;

/* A failed transfer answers 503900, or what KVXFER_SIM_RAW_STATUS says: the set of statuses is open. */
uint32_t failed() {
    return static_cast<uint32_t>(kvxsim_number("RAW_STATUS", kFailed));
}

const Region *covering(const std::vector<Region> &regions, uint64_t address, uint64_t length) {
    for (const Region &region : regions)
        if (address >= region.address && address - region.address < region.length &&
            length <= region.length - (address - region.address))
            return &region;
    return nullptr;
}

} // namespace

/* -- at submit --------------------------------------------------------------------------------------------------------
 */

uint32_t Engine::resolve_local(const Link &link, uint64_t address, uint64_t length, Piece *piece, bool is_target) {
    const Region *region = covering(link.local, address, length);
    int side = is_target ? 0 : 1;
    if (!region) {
        kvxsim_fault("transfer: local %#llx + %llu was not registered when the link to %s was made",
                     static_cast<unsigned long long>(address), static_cast<unsigned long long>(length),
                     link.remote.c_str());
        return kvxsim_error(failed(), "transfer: local memory is not registered with this link");
    }
    uint64_t within = region->offset + (address - region->address);
    uint8_t *direct = region->kind == KVXSIM_DEVICE ? kvxsim_card_direct(region->card) + within
                                                    : reinterpret_cast<uint8_t *>(address);
    (is_target ? piece->target : *const_cast<uint8_t **>(&piece->source)) = direct;
    piece->rows[side] = region->row;
    piece->generations[side] = region->generation;
    piece->cards[side] = region->kind == KVXSIM_DEVICE ? region->card : -1;
    return 0;
}

uint32_t Engine::resolve_remote(const Link &link, uint64_t address, uint64_t length, Piece *piece, bool is_target) {
    const Region *region = covering(link.theirs, address, length);
    int side = is_target ? 0 : 1;
    uint8_t *direct = nullptr;
    piece->rows[side] = kUnwatched;
    piece->cards[side] = -1;
    if (region) {
        uint64_t within = region->offset + (address - region->address);
        direct = region->kind == KVXSIM_DEVICE ? kvxsim_card_direct(region->card)
                                               : link.mapped[static_cast<size_t>(region - link.theirs.data())];
        direct += within;
        piece->rows[side] = region->row;
        piece->generations[side] = region->generation;
        piece->cards[side] = region->kind == KVXSIM_DEVICE ? region->card : -1;
    } else if (kvxsim_is("RANGE", "permissive")) {
        for (size_t card = 0; card < link.card_addresses.size(); card++) {
            uint64_t offset = address - link.card_addresses[card];
            if (offset < kvxsim_card_bytes() && kvxsim_device_live_at(static_cast<int>(card), offset, length)) {
                kvxsim_note("permissive: transfer outside every registration of %s", link.remote.c_str());
                direct = kvxsim_card_direct(static_cast<int>(card)) + offset;
                piece->cards[side] = static_cast<int>(card);
            }
        }
    }
    if (!direct) {
        kvxsim_fault("transfer: remote %#llx + %llu was not registered by %s when the link was made",
                     static_cast<unsigned long long>(address), static_cast<unsigned long long>(length),
                     link.remote.c_str());
        return kvxsim_error(failed(), "transfer: remote memory is not reachable over this link");
    }
    (is_target ? piece->target : *const_cast<uint8_t **>(&piece->source)) = direct;
    return 0;
}

uint32_t Engine::prepare(const std::shared_ptr<Link> &link, bool write, const std::vector<hixl::TransferOpDesc> &ops,
                         std::shared_ptr<Request> *request_p) {
    auto request = std::make_shared<Request>();
    request->link = link;
    request->pieces.resize(ops.size());
    for (size_t index = 0; index < ops.size(); index++) {
        Piece &piece = request->pieces[index];
        piece.length = ops[index].len;
        if (piece.length == 0)
            return kvxsim_error(kParamInvalid, "transfer: descriptor %zu is empty", index);
        uint32_t status = resolve_local(*link, ops[index].local_addr, piece.length, &piece, !write);
        if (status == 0)
            status = resolve_remote(*link, ops[index].remote_addr, piece.length, &piece, write);
        if (status)
            return status;
        request->total += piece.length;
    }
    kvxsim_fails("transfer", &request->injected);
    request->partial = kvxsim_strikes("PARTIAL");
    request->corrupt = kvxsim_strikes("CORRUPT");
    request->due_ns = kvxsim_now_ns() + static_cast<uint64_t>(kvxsim_number("LATENCY_US", 0) * 1e3);
    request->id = next_id_++ << 12 | 2;
    std::lock_guard<std::mutex> guard(moving_);
    if (link->destroyed)
        return kvxsim_error(kNotConnected, "transfer: %s was disconnected", link->remote.c_str());
    if (slots_ >= static_cast<size_t>(kvxsim_number("SLOTS", 512)))
        return kvxsim_error(kExhausted, "transfer: no stream is free (%zu in use)", slots_);
    slots_++;
    active_.push_back(request);
    moved_.notify_all();
    *request_p = request;
    return 0;
}

uint32_t Engine::latch(Link *link, uint32_t status) {
    if (latches(status))
        link->latched = true;
    return status;
}

uint32_t Engine::usable(const std::string &remote, int32_t timeout_ms, std::shared_ptr<Link> *link_p) {
    *link_p = find(remote);
    if (!*link_p && auto_connect_) {
        std::lock_guard<std::mutex> guard(auto_connection_);
        *link_p = find(remote);
        if (!*link_p && connect(remote, timeout_ms) == 0)
            *link_p = find(remote);
    }
    if (!*link_p)
        return kvxsim_error(kNotConnected, "transfer: %s is not connected", remote.c_str());
    if ((*link_p)->latched) {
        if (auto_connect_)
            disconnect(remote, timeout_ms);
        return kvxsim_error(kFailed, "transfer: the link to %s failed before; disconnect and connect", remote.c_str());
    }
    return 0;
}

uint32_t Engine::transfer_async(const std::string &remote, bool write, const std::vector<hixl::TransferOpDesc> &ops,
                                const void *user, void **request_p) {
    uint32_t status = 0;
    std::shared_ptr<Link> link;
    std::shared_ptr<Request> request;
    if (!running_)
        return kvxsim_error(kFailed, "TransferAsync: not initialised");
    if (ops.empty())
        return kvxsim_error(kParamInvalid, "TransferAsync: an empty batch");
    status = usable(remote, 3000, &link);
    if (status)
        return status;
    std::lock_guard<std::mutex> launch(link->launch);
    if (kvxsim_fails("async", &status))
        return latch(link.get(), kvxsim_error(status, "TransferAsync: injected by KVXFER_SIM_FAIL"));
    status = prepare(link, write, ops, &request);
    if (status)
        return latch(link.get(), status);
    request->user = user;
    std::lock_guard<std::mutex> guard(moving_);
    requests_[request->id] = request;
    *request_p = reinterpret_cast<void *>(request->id);
    return 0;
}

/* On a timeout the request stays where it is: the card goes on with it until it is done or the link is destroyed. */
uint32_t Engine::transfer_sync(const std::string &remote, bool write, const std::vector<hixl::TransferOpDesc> &ops,
                               int32_t timeout_ms) {
    uint32_t status = 0;
    std::shared_ptr<Link> link;
    std::shared_ptr<Request> request;
    if (!running_)
        return kvxsim_error(kFailed, "TransferSync: not initialised");
    if (ops.empty() || timeout_ms <= 0)
        return kvxsim_error(kParamInvalid, "TransferSync: an empty batch, or a time of %d", timeout_ms);
    status = usable(remote, timeout_ms, &link);
    if (status)
        return status;
    std::lock_guard<std::mutex> launch(link->launch);
    if (kvxsim_fails("sync", &status))
        return latch(link.get(), kvxsim_error(status, "TransferSync: injected by KVXFER_SIM_FAIL"));
    status = prepare(link, write, ops, &request);
    if (status)
        return latch(link.get(), status);
    std::unique_lock<std::mutex> guard(moving_);
    if (!moved_.wait_for(guard, std::chrono::milliseconds(timeout_ms), [&request] { return request->finished; })) {
        request->orphan = true;
        return latch(link.get(), kvxsim_error(kTimeout, "TransferSync: not done in %d ms", timeout_ms));
    }
    release_slot(request.get());
    return request->status ? latch(link.get(), kvxsim_error(request->status, "TransferSync failed")) : 0;
}

/* Waits behind a TransferSync of the same peer. Anything but WAITING forgets the request. */
uint32_t Engine::poll(void *handle, hixl::TransferStatus *status_p) {
    uint32_t injected = 0;
    uint64_t id = reinterpret_cast<uint64_t>(handle);
    std::shared_ptr<Request> request;
    *status_p = hixl::TransferStatus::FAILED;
    {
        std::lock_guard<std::mutex> guard(moving_);
        auto found = requests_.find(id);
        if (found != requests_.end())
            request = found->second;
    }
    if (!request)
        return kvxsim_error(kParamInvalid, "GetTransferStatus: no such request (it ended, or never was)");
    std::unique_lock<std::mutex> launch(request->link->launch, std::defer_lock);
    if (!request->link->destroyed)
        launch.lock();
    bool inject = kvxsim_fails("poll", &injected);
    std::lock_guard<std::mutex> guard(moving_);
    if (!requests_.count(id))
        return kvxsim_error(kParamInvalid, "GetTransferStatus: no such request (it ended, or never was)");
    if (inject) {
        requests_.erase(id);
        request->finished ? release_slot(request.get()) : void(request->orphan = true);
        return injected ? latch(request->link.get(), kvxsim_error(injected, "GetTransferStatus: injected")) : 0;
    }
    if (!request->finished) {
        *status_p = hixl::TransferStatus::WAITING;
        return 0;
    }
    requests_.erase(id);
    release_slot(request.get());
    if (request->status == 0) {
        *status_p = hixl::TransferStatus::COMPLETED;
        return 0;
    }
    return latch(request->link.get(), kvxsim_error(request->status, "GetTransferStatus: the transfer failed"));
}

/* -- the thread that moves bytes --------------------------------------------------------------------------------------
 */

/* Under moving_. */
void Engine::release_slot(Request *request) {
    if (request->has_slot)
        slots_--;
    request->has_slot = false;
}

/* Under moving_. */
void Engine::end(Request *request, uint32_t status) {
    request->finished = true;
    request->status = status;
    if (request->orphan || request->link->destroyed)
        release_slot(request);
    moved_.notify_all();
}

void Engine::move() {
    std::unique_lock<std::mutex> guard(moving_);
    while (running_) {
        if (active_.empty()) {
            free_ns_ = 0; /* idle time is no credit */
            moved_.wait(guard, [this] { return !running_ || !active_.empty(); });
            continue;
        }
        uint64_t now = kvxsim_now_ns(), soonest = UINT64_MAX;
        auto next = active_.begin();
        while (next != active_.end() && (*next)->due_ns > now) {
            soonest = std::min(soonest, (*next)->due_ns);
            ++next;
        }
        if (next == active_.end()) {
            free_ns_ = 0;
            moved_.wait_for(guard, std::chrono::nanoseconds(soonest - now));
            continue;
        }
        current_ = *next;
        active_.erase(next);
        guard.unlock();
        uint32_t status = 0;
        bool done = step(current_.get(), &status);
        guard.lock();
        if (current_->link->destroyed)
            end(current_.get(), kNotConnected);
        else if (done)
            end(current_.get(), status);
        else
            active_.push_back(current_);
        current_.reset();
        moved_.notify_all();
    }
}

/* One chunk of one request. True: it has ended. */
bool Engine::step(Request *request, uint32_t *status_p) {
    double gbps = kvxsim_number("GBPS", 0);
    if (kvxsim_number("STALL", 0) != 0) {
        kvxsim_sleep_until(kvxsim_now_ns() + 1000000);
        return false;
    }
    *status_p = 0;
    if (request->link->peer_lost() || kvxsim_number("BREAK", 0) != 0)
        *status_p = failed();
    else if (request->injected)
        *status_p = request->injected;
    if (*status_p)
        return true;
    uint64_t most = kChunk;
    if (gbps > 0)
        most = std::clamp(static_cast<uint64_t>(gbps * 1e6), kChunkLeast, kChunk); /* a millisecond's worth */
    if (request->partial)
        most = std::min(most, request->total / 2 - std::min(request->done, request->total / 2));
    if (gbps > 0)
        wait_turn(std::min(most, request->total - request->done));
    if (most > 0)
        request->done += copy_some(request, most, status_p);
    if (*status_p)
        return true;
    if (request->partial && request->done >= request->total / 2) {
        *status_p = failed();
        return true;
    }
    if (request->done < request->total)
        return false;
    if (request->corrupt)
        request->pieces[0].target[request->pieces[0].length / 2] ^= 0x40;
    return true;
}

/* Are both memories of a piece still what they were at Connect, and the cards there? */
bool Engine::intact(const Piece &piece, uint32_t *status_p) {
    for (int side = 0; side < 2; side++) {
        if (piece.rows[side] != kUnwatched && !kvxsim_live(piece.rows[side], piece.generations[side])) {
            kvxsim_fault("transfer: its %s was freed while it ran (use after free)", side ? "source" : "target");
            *status_p = failed();
            return false;
        }
        if (piece.cards[side] >= 0 && kvxsim_lost(piece.cards[side])) {
            *status_p = kAclDeviceLost;
            return false;
        }
    }
    return true;
}

uint64_t Engine::copy_some(Request *request, uint64_t most, uint32_t *status_p) {
    uint64_t copied = 0;
    const Piece *checked = nullptr;
    for (size_t count = 0; copied < most && count < kPiecesPerChunk && request->piece < request->pieces.size();
         count++) {
        const Piece &piece = request->pieces[request->piece];
        /* Neighbours mostly lie in the same two regions: ask again only when they do not. */
        if (!checked || memcmp(checked->rows, piece.rows, sizeof piece.rows) != 0) {
            if (!intact(piece, status_p))
                return copied;
            checked = &piece;
        }
        uint64_t length = std::min(piece.length - request->offset, most - copied);
        memcpy(piece.target + request->offset, piece.source + request->offset, length);
        copied += length;
        request->offset += length;
        if (request->offset == piece.length) {
            request->offset = 0;
            request->piece++;
        }
    }
    return copied;
}

/* The model of bandwidth: bytes leave one after the other; a late wake-up is made good by the next ones. */
void Engine::wait_turn(uint64_t bytes) {
    uint64_t now = kvxsim_now_ns();
    double gbps = kvxsim_number("GBPS", 0);
    if (gbps <= 0)
        return;
    if (free_ns_ == 0)
        free_ns_ = now;
    free_ns_ += static_cast<uint64_t>(static_cast<double>(bytes) / gbps);
    if (free_ns_ > now + 20000)
        kvxsim_sleep_until(free_ns_);
}

/* When this returns nothing of the link moves any more. */
void Engine::stop_link(const std::shared_ptr<Link> &link) {
    std::unique_lock<std::mutex> guard(moving_);
    link->destroyed = true;
    for (auto at = active_.begin(); at != active_.end();) {
        if ((*at)->link == link) {
            end(at->get(), kNotConnected);
            at = active_.erase(at);
        } else {
            ++at;
        }
    }
    for (auto &[id, request] : requests_)
        if (request->link == link)
            release_slot(request.get());
    moved_.wait(guard, [this, &link] { return !current_ || current_->link != link; });
}

} // namespace kvxsim

/* engine.h: what stands behind hixl::Hixl: links over TCP, one-sided copies by the initiator's own thread.
 *
 * A link is one TCP connection for control (hello, heartbeats, notify, bye) and a snapshot, taken at Connect, of what
 * both sides had registered then. Bytes never travel over it: the initiator's transfer thread copies straight between
 * its own memory and the peer's card or pinned memfd, so the peer's processor takes no part (a stopped peer is written
 * to all the same), and a killed initiator simply stops. A transfer goes on until it is complete or Disconnect has
 * destroyed the link, whatever anybody thinks of the request. */
#ifndef KVXSIM_ENGINE_H
#define KVXSIM_ENGINE_H

#include <atomic>
#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "hixl.h"
#include "sim.h"
#include "wire.h"

namespace kvxsim {

constexpr size_t kServerThreads = 16; /* each of them reads a message to its end, however long that takes */
constexpr size_t kNotifyText = 1024;
constexpr size_t kNotifyQueue = 4096;
constexpr size_t kLinks = 512;
constexpr size_t kRegistrations = 4096;

struct Region { /* as told to the peer */
    uint64_t address, length;
    uint64_t offset;
    uint32_t row, generation;
    int32_t kind, card, fd, huge;
};

struct Link {
    std::string remote;
    int fd = -1;
    int peer_pid = 0;
    uint64_t peer_started = 0;
    std::vector<Region> local, theirs;
    std::vector<uint8_t *> mapped;        /* pinned memory of the peer, parallel to `theirs` */
    std::vector<uint64_t> card_addresses; /* where the peer's process sees its cards */
    std::mutex control;                   /* one exchange at a time */
    std::mutex launch;                    /* TransferSync holds it to its end, submit and poll wait for it */
    std::atomic<bool> latched{false}, gone{false}, destroyed{false};
    uint64_t sequence = 0;

    ~Link();
    bool peer_lost(); /* the control connection has ended */
};

struct Piece {
    uint8_t *target;
    const uint8_t *source;
    uint64_t length;
    uint32_t rows[2], generations[2];
    int cards[2];
};

struct Request {
    uint64_t id = 0;
    std::shared_ptr<Link> link;
    std::vector<Piece> pieces;
    size_t piece = 0;
    uint64_t offset = 0, done = 0, total = 0, due_ns = 0;
    bool partial = false, corrupt = false;
    uint32_t injected = 0;
    const void *user = nullptr;
    bool finished = false, orphan = false, has_slot = true; /* these under the engine's `moving_` */
    uint32_t status = 0;
};

struct Session { /* a client that is connected to us */
    int fd = -1;
    std::string name;
    bool said_hello = false;
    uint64_t heard_ns = 0;
    std::deque<std::pair<std::string, std::string>> notifies;
};

class Engine {
  public:
    uint32_t initialize(const std::string &local, const std::map<std::string, std::string> &options);
    void finalize();
    uint32_t register_memory(uint64_t address, uint64_t length, int type, void **handle_p);
    uint32_t deregister(void *handle);
    uint32_t connect(const std::string &remote, int32_t timeout_ms);
    uint32_t disconnect(const std::string &remote, int32_t timeout_ms);
    uint32_t transfer_sync(const std::string &remote, bool write, const std::vector<hixl::TransferOpDesc> &ops,
                           int32_t timeout_ms);
    uint32_t transfer_async(const std::string &remote, bool write, const std::vector<hixl::TransferOpDesc> &ops,
                            const void *user, void **request_p);
    uint32_t poll(void *request, hixl::TransferStatus *status_p);
    uint32_t send_notify(const std::string &remote, const std::string &name, const std::string &text,
                         int32_t timeout_ms);
    std::vector<std::pair<std::string, std::string>> take_notifies();
    uint32_t connect_async(const std::string &remote, int32_t timeout_ms, bool up);
    hixl::AsyncConnectStatus async_status(const std::string &remote);
    std::map<std::string, hixl::AsyncConnectStatus> async_statuses();

  private:
    struct Registration {
        Region region;
        uint64_t handle;
    };
    struct ControlTask {
        std::string remote;
        int32_t timeout_ms;
        bool up;
    };

    /* engine.cc */
    uint32_t apply_options(const std::map<std::string, std::string> &options);
    uint32_t take_pools();
    std::vector<Region> regions();
    std::shared_ptr<Link> find(const std::string &remote);
    uint32_t check_regions(const std::vector<Region> &regions, const char *whose);
    uint32_t greet(Link *link, int32_t timeout_ms);
    uint32_t accept_welcome(Link *link, const Message &welcome);
    void control_work();

    /* server.cc */
    uint32_t listen_on(const std::string &ip, int port);
    void serve();
    void accept_one();
    void hand_over(int fd);
    void handle_work();
    bool handle(int fd);
    bool welcome(int fd, const Message &hello);
    bool take_notify(int fd, const Message &message);
    void drop(int fd);
    void drop_silent();
    void heartbeats();

    /* transfer.cc */
    uint32_t prepare(const std::shared_ptr<Link> &link, bool write, const std::vector<hixl::TransferOpDesc> &ops,
                     std::shared_ptr<Request> *request_p);
    uint32_t resolve_local(const Link &link, uint64_t address, uint64_t length, Piece *piece, bool is_target);
    uint32_t resolve_remote(const Link &link, uint64_t address, uint64_t length, Piece *piece, bool is_target);
    uint32_t usable(const std::string &remote, int32_t timeout_ms, std::shared_ptr<Link> *link_p);
    uint32_t latch(Link *link, uint32_t status);
    void end(Request *request, uint32_t status);
    void release_slot(Request *request);
    void move();
    bool step(Request *request, uint32_t *status_p);
    bool intact(const Piece &piece, uint32_t *status_p);
    uint64_t copy_some(Request *request, uint64_t most, uint32_t *status_p);
    void stop_link(const std::shared_ptr<Link> &link);
    void wait_turn(uint64_t bytes);

    std::string name_;
    std::atomic<bool> running_{false};
    std::atomic<bool> finishing_{false}; /* for threads that may begin before Initialize or after Finalize has */
    int card_ = -1;
    bool auto_connect_ = false;
    std::string pool_ = "4:8";
    std::vector<uint64_t> pool_memory_;
    std::atomic<int> calls_{0};
    std::atomic<uint64_t> next_id_{1};

    std::mutex tables_;
    std::vector<Registration> registrations_;
    std::map<std::string, std::shared_ptr<Link>> links_;
    std::set<std::string> connecting_;
    std::mutex auto_connection_; /* held for the whole of an automatic connect, as in the vendor's */

    int listener_ = -1, wake_ = -1;
    std::thread server_, beats_;
    std::mutex serving_;
    std::condition_variable served_;
    std::deque<int> waiting_;
    std::vector<std::thread> handlers_;
    size_t idle_handlers_ = 0;
    std::set<int> accepted_, watched_;
    std::map<int, Session> sessions_;

    std::mutex moving_;
    std::condition_variable moved_;
    std::thread mover_;
    std::list<std::shared_ptr<Request>> active_;
    std::map<uint64_t, std::shared_ptr<Request>> requests_; /* handed out, not yet seen to end */
    std::shared_ptr<Request> current_;
    size_t slots_ = 0;
    uint64_t free_ns_ = 0;

    std::mutex control_;
    std::condition_variable controlled_;
    std::deque<ControlTask> control_queue_;
    std::vector<std::thread> control_threads_;
    std::map<std::string, hixl::AsyncConnectStatus> control_state_;

    friend struct Call;
};

/* Finalize waits for calls that run, however long they take. */
struct Call {
    explicit Call(Engine *engine) : engine_(engine) {
        engine_->calls_++;
    }
    ~Call() {
        engine_->calls_--;
    }
    Engine *engine_;
};

bool latches(uint32_t status);

} // namespace kvxsim

#endif

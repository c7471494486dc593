/* acl_stream.cc: libacl_rt's streams, events and copies that do not wait. A stream is a thread with a queue.
 *
 * A stream remembers its first error and answers it at each query, as hardware does. StreamAbort returns when nothing
 * moves any more; what had not run never will. */
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "context.h"

using namespace kvxsim;

namespace {

struct Event {
    std::mutex lock;
    std::condition_variable changed;
    bool recorded = false;
    uint64_t wanted = 0, reached = 0;
};

struct Stream {
    int card = 0;
    std::mutex lock;
    std::condition_variable changed;
    std::deque<std::function<int(const std::atomic<bool> *)>> work;
    bool running = false, closing = false;
    std::atomic<bool> stop{false}; /* the copy that runs ends at its next piece */
    int error = 0;
    std::thread thread;

    bool idle() const {
        return work.empty() && !running;
    }
};

struct Handles {
    std::mutex lock;
    std::set<void *> streams, events;
};

Handles &handles() {
    static Handles *one = new Handles;
    return *one;
}

/* KVXFER_SIM_STALL and KVXFER_SIM_LATENCY_US hold for streams too. */
void wait_before_work(Stream *stream) {
    uint64_t due = kvxsim_now_ns() + static_cast<uint64_t>(kvxsim_number("LATENCY_US", 0) * 1e3);
    while (!stream->stop && (kvxsim_now_ns() < due || kvxsim_number("STALL", 0) != 0)) {
        uint64_t now = kvxsim_now_ns(), step = now + 1000000;
        kvxsim_sleep_until(now < due && due < step ? due : step);
    }
}

void run(Stream *stream) {
    std::unique_lock<std::mutex> guard(stream->lock);
    for (;;) {
        stream->changed.wait(guard, [stream] { return stream->closing || !stream->work.empty(); });
        if (stream->work.empty())
            return;
        auto task = std::move(stream->work.front());
        stream->work.pop_front();
        stream->running = true;
        guard.unlock();
        int status = task(&stream->stop);
        guard.lock();
        stream->running = false;
        if (status && !stream->error)
            stream->error = status;
        stream->changed.notify_all();
    }
}

Stream *known_stream(void *handle) {
    std::lock_guard<std::mutex> guard(handles().lock);
    return handles().streams.count(handle) ? static_cast<Stream *>(handle) : nullptr;
}

Event *known_event(void *handle) {
    std::lock_guard<std::mutex> guard(handles().lock);
    return handles().events.count(handle) ? static_cast<Event *>(handle) : nullptr;
}

void push(Stream *stream, std::function<int(const std::atomic<bool> *)> task) {
    std::lock_guard<std::mutex> guard(stream->lock);
    stream->work.push_back(std::move(task));
    stream->changed.notify_all();
}

int destroy(void *handle, bool force) {
    Stream *stream = known_stream(handle);
    if (!stream)
        return refuse(kAclStreamContext, "aclrtDestroyStream: no such stream");
    {
        std::lock_guard<std::mutex> guard(handles().lock);
        handles().streams.erase(handle);
    }
    {
        std::lock_guard<std::mutex> guard(stream->lock);
        if (force) {
            stream->work.clear();
            stream->stop = true;
        }
        stream->closing = true;
        stream->changed.notify_all();
    }
    stream->thread.join();
    delete stream;
    return 0;
}

int synchronize(void *handle, int32_t timeout_ms) {
    Stream *stream = known_stream(handle);
    if (!handle)
        return 0; /* the default stream does everything at once */
    if (!stream)
        return refuse(kAclStreamContext, "aclrtSynchronizeStream: no such stream");
    std::unique_lock<std::mutex> guard(stream->lock);
    auto done = [stream] { return stream->idle(); };
    if (timeout_ms < 0)
        stream->changed.wait(guard, done);
    else if (!stream->changed.wait_for(guard, std::chrono::milliseconds(timeout_ms), done))
        return refuse(kAclStreamTimeout, "aclrtSynchronizeStreamWithTimeout: not done in time");
    return stream->error;
}

int on_stream(void *handle, std::function<int(const std::atomic<bool> *)> task) {
    if (!handle)
        return task(nullptr);
    Stream *stream = known_stream(handle);
    if (!stream)
        return refuse(kAclStreamContext, "copy on a stream that does not exist");
    push(stream, std::move(task));
    return 0;
}

bool location_fits(const aclrtMemLocation &said, int card) {
    return card < 0 ? said.type != 1 : said.type == 1 && said.id == static_cast<uint32_t>(card);
}

} // namespace

ACL_API int aclrtCreateStream(void **stream_p) {
    int status = enter("createstream");
    if (status)
        return status;
    Stream *stream = new Stream;
    stream->card = current()->card;
    stream->thread = std::thread(run, stream);
    std::lock_guard<std::mutex> guard(handles().lock);
    handles().streams.insert(stream);
    *stream_p = stream;
    return 0;
}

ACL_API int aclrtCreateStreamWithConfig(void **stream_p, uint32_t, uint32_t) {
    return aclrtCreateStream(stream_p);
}

ACL_API int aclrtDestroyStream(void *stream) {
    return destroy(stream, false);
}

ACL_API int aclrtDestroyStreamForce(void *stream) {
    return destroy(stream, true);
}

ACL_API int aclrtStreamAbort(void *handle) {
    Stream *stream = known_stream(handle);
    if (!stream)
        return refuse(kAclStreamContext, "aclrtStreamAbort: no such stream");
    std::unique_lock<std::mutex> guard(stream->lock);
    stream->work.clear();
    stream->stop = true;
    stream->changed.wait(guard, [stream] { return !stream->running; });
    stream->stop = false;
    return 0;
}

ACL_API int aclrtStreamQuery(void *handle, uint32_t *status_p) {
    int status = enter("streamquery");
    if (status)
        return status;
    Stream *stream = known_stream(handle);
    if (!stream || !status_p)
        return refuse(kAclStreamContext, "aclrtStreamQuery: no such stream");
    if (kvxsim_lost(stream->card))
        return refuse(kAclDeviceLost, "aclrtStreamQuery: the card is lost");
    std::lock_guard<std::mutex> guard(stream->lock);
    *status_p = stream->idle() ? 0 : 1;
    return stream->error;
}

ACL_API int aclrtSynchronizeStream(void *stream) {
    int status = enter("syncstream");
    return status ? status : synchronize(stream, -1);
}

ACL_API int aclrtSynchronizeStreamWithTimeout(void *stream, int32_t timeout_ms) {
    int status = enter("syncstream");
    return status ? status : synchronize(stream, timeout_ms);
}

ACL_API int aclrtMemcpyAsync(void *target, size_t most, const void *source, size_t count, int kind, void *handle) {
    int status = enter("memcpyasync");
    if (status)
        return status;
    Copy copy{};
    if (!target || !source || count == 0 || count > most || kind < 0 || kind > 4)
        return refuse(kAclParam, "aclrtMemcpyAsync: bad argument");
    status = resolve(target, source, count, kind, &copy);
    if (status)
        return status;
    Stream *stream = known_stream(handle);
    return on_stream(handle, [copy, stream](const std::atomic<bool> *stop) {
        if (stream)
            wait_before_work(stream);
        return perform(copy, stop);
    });
}

/* All or nothing: an entry that is refused is named in *fail_p and nothing is queued. */
ACL_API int aclrtMemcpyBatchAsync(void **targets, size_t *most, void **sources, size_t *sizes, size_t count,
                                  aclrtMemcpyBatchAttr *attributes, size_t *first, size_t attribute_count,
                                  size_t *fail_p, void *handle) {
    int status = enter("memcpybatch");
    if (status)
        return status;
    if (!targets || !most || !sources || !sizes || !attributes || !first || !fail_p || count == 0 ||
        count > kCopiesMax || attribute_count == 0 || attribute_count > count || first[0] != 0)
        return refuse(kAclParam, "aclrtMemcpyBatchAsync: bad argument, or more than 4096 entries");
    auto copies = std::make_shared<std::vector<Copy>>(count);
    size_t group = 0;
    *fail_p = SIZE_MAX;
    for (size_t index = 0; index < count; index++) {
        while (group + 1 < attribute_count && first[group + 1] <= index)
            group++;
        Copy &copy = (*copies)[index];
        status = sizes[index] == 0 || sizes[index] > most[index]
                     ? refuse(kAclParam, "aclrtMemcpyBatchAsync: a size is 0 or more than its target holds")
                     : resolve(targets[index], sources[index], sizes[index], 4, &copy);
        if (status == 0 && (!location_fits(attributes[group].dst, copy.cards[0]) ||
                            !location_fits(attributes[group].src, copy.cards[1])))
            status = refuse(kAclParam, "aclrtMemcpyBatchAsync: an attribute's location is not where the memory is");
        if (status) {
            *fail_p = index;
            return status;
        }
    }
    Stream *stream = known_stream(handle);
    return on_stream(handle, [copies, stream](const std::atomic<bool> *stop) {
        if (stream)
            wait_before_work(stream);
        for (const Copy &copy : *copies) {
            if (stop && stop->load())
                return 0;
            int failed = perform(copy, stop);
            if (failed)
                return failed;
        }
        return 0;
    });
}

ACL_API int aclrtCreateEvent(void **event_p) {
    int status = enter("createevent");
    if (status)
        return status;
    Event *event = new Event;
    std::lock_guard<std::mutex> guard(handles().lock);
    handles().events.insert(event);
    *event_p = event;
    return 0;
}

/* The event itself is not deleted: a stream may still reach it. A few bytes in a test's process. */
ACL_API int aclrtDestroyEvent(void *event) {
    std::lock_guard<std::mutex> guard(handles().lock);
    return handles().events.erase(event) ? 0 : refuse(kAclHandle, "aclrtDestroyEvent: no such event");
}

ACL_API int aclrtRecordEvent(void *handle, void *stream) {
    int status = enter("recordevent");
    if (status)
        return status;
    Event *event = known_event(handle);
    if (!event)
        return refuse(kAclHandle, "aclrtRecordEvent: no such event");
    uint64_t number;
    {
        std::lock_guard<std::mutex> guard(event->lock);
        event->recorded = true;
        number = ++event->wanted;
    }
    return on_stream(stream, [event, number](const std::atomic<bool> *) {
        std::lock_guard<std::mutex> guard(event->lock);
        event->reached = number;
        event->changed.notify_all();
        return 0;
    });
}

ACL_API int aclrtQueryEventStatus(void *handle, uint32_t *status_p) {
    Event *event = known_event(handle);
    if (!event || !status_p)
        return refuse(kAclHandle, "aclrtQueryEventStatus: no such event");
    std::lock_guard<std::mutex> guard(event->lock);
    *status_p = event->recorded && event->reached == event->wanted ? 1 : 0;
    return 0;
}

ACL_API int aclrtSynchronizeEventWithTimeout(void *handle, int32_t timeout_ms) {
    Event *event = known_event(handle);
    if (!event)
        return refuse(kAclHandle, "aclrtSynchronizeEventWithTimeout: no such event");
    std::unique_lock<std::mutex> guard(event->lock);
    bool done = event->changed.wait_for(guard, std::chrono::milliseconds(timeout_ms),
                                        [event] { return event->reached == event->wanted; });
    return done ? 0 : refuse(kAclEventTimeout, "aclrtSynchronizeEventWithTimeout: not done in time");
}

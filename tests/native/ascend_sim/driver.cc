/* driver.cc: a process that uses the simulated libraries as a program linked to the vendor's would, told what to do.
 *
 * Reads a command a line and answers a line: numbers and words, the status first. `& command` runs in a thread and
 * answers `n`; `wait n ms` gives its answer, or `running`. Memory, handles and requests are named by small numbers. */
#include <algorithm>
#include <cctype>
#include <condition_variable>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include "hixl.h"
#include "numbers.h"

extern "C" {
int aclInit(const char *);
const char *aclGetRecentErrMsg(void);
const char *aclrtGetSocName(void);
int aclsysGetVersionStr(char *, char *);
int aclrtSetDevice(int32_t);
int aclrtResetDevice(int32_t);
int aclrtGetDevice(int32_t *);
int aclrtGetDeviceCount(uint32_t *);
int aclrtQueryDeviceStatus(int32_t, uint32_t *);
int aclrtCreateContext(void **, int32_t);
int aclrtDestroyContext(void *);
int aclrtGetMemInfo(int, size_t *, size_t *);
int aclrtMalloc(void **, size_t, uint32_t);
int aclrtFree(void *);
int aclrtMallocHost(void **, size_t);
int aclrtFreeHost(void *);
int aclrtHostRegister(void *, uint64_t, int, void **);
int aclrtHostUnregister(void *);
int aclrtMemset(void *, size_t, int32_t, size_t);
int aclrtMemcpy(void *, size_t, const void *, size_t, int);
int aclrtMemcpyAsync(void *, size_t, const void *, size_t, int, void *);
int aclrtMemcpyBatchAsync(void **, size_t *, void **, size_t *, size_t, aclrtMemcpyBatchAttr *, size_t *, size_t,
                          size_t *, void *);
int aclrtCreateStream(void **);
int aclrtDestroyStream(void *);
int aclrtDestroyStreamForce(void *);
int aclrtStreamAbort(void *);
int aclrtStreamQuery(void *, uint32_t *);
int aclrtSynchronizeStreamWithTimeout(void *, int32_t);
int aclrtCreateEvent(void **);
int aclrtRecordEvent(void *, void *);
int aclrtQueryEventStatus(void *, uint32_t *);
int aclrtPointerGetAttributes(const void *, aclrtPtrAttributes *);
int aclrtDeviceCanAccessPeer(int32_t *, int32_t, int32_t);
int aclrtDeviceEnablePeerAccess(int32_t, uint32_t);
int aclrtIpcMemGetExportKey(void *, size_t, char *, size_t, uint64_t);
int aclrtIpcMemSetImportPid(const char *, int32_t *, size_t);
int aclrtIpcMemImportByKey(void **, const char *, uint64_t);
int aclrtIpcMemClose(const char *);
int aclrtMemGetAddressRange(void *, void **, size_t *);
}

namespace {

using Words = std::istringstream;

struct Task {
    std::thread thread;
    std::string answer;
    bool done = false;
};

std::mutex table_lock, out_lock;
std::condition_variable task_done;
std::map<int, Task> tasks;
std::map<std::string, std::unique_ptr<hixl::Hixl>> engines;
std::map<std::string, void *> names; /* memory, handles, requests, streams: what a command called them */
int32_t device = -1;

void *&named(const std::string &name) {
    std::lock_guard<std::mutex> guard(table_lock);
    return names[name];
}

/* name, name+bytes or a number */
uint64_t address(const std::string &text) {
    size_t plus = text.find('+');
    std::string base = text.substr(0, plus);
    uint64_t start = std::isdigit(static_cast<unsigned char>(base[0])) ? std::stoull(base, nullptr, 0)
                                                                       : reinterpret_cast<uint64_t>(named(base));
    return start + (plus == std::string::npos ? 0 : std::stoull(text.substr(plus + 1), nullptr, 0));
}

void *pointer(Words &words) {
    std::string text;
    words >> text;
    return reinterpret_cast<void *>(address(text));
}

template <class T> T next(Words &words, T otherwise = T()) {
    T value = otherwise;
    return words >> value ? value : otherwise;
}

std::string join(uint32_t status) {
    return std::to_string(status);
}

template <class... More> std::string join(uint32_t status, More... more) {
    std::ostringstream out;
    out << status;
    ((out << ' ' << more), ...);
    return out.str();
}

uint32_t raw(int status) {
    return static_cast<uint32_t>(status);
}

hixl::Hixl &engine(Words &words) {
    std::string name = next<std::string>(words);
    std::lock_guard<std::mutex> guard(table_lock);
    auto &slot = engines[name];
    if (!slot)
        slot.reset(new hixl::Hixl);
    return *slot;
}

hixl::S string(const std::string &text) {
    return hixl::S(text.c_str());
}

using Command = std::function<std::string(Words &)>;

/* -- ACL
 * ---------------------------------------------------------------------------------------------------------------- */

std::string do_malloc(Words &words) {
    void **slot = &named(next<std::string>(words));
    uint64_t length = next<uint64_t>(words);
    uint32_t status = raw(aclrtMalloc(slot, length, next<uint32_t>(words, 1)));
    return join(status, reinterpret_cast<uint64_t>(*slot));
}

std::string do_mallochost(Words &words) {
    void **slot = &named(next<std::string>(words));
    uint32_t status = raw(aclrtMallocHost(slot, next<uint64_t>(words)));
    return join(status, reinterpret_cast<uint64_t>(*slot));
}

std::string do_plain(Words &words) {
    void **slot = &named(next<std::string>(words));
    *slot = calloc(1, next<uint64_t>(words));
    return "0";
}

std::string do_copy(Words &words) {
    void *target = pointer(words), *source = pointer(words);
    uint64_t length = next<uint64_t>(words);
    return join(raw(aclrtMemcpy(target, length, source, length, next<int>(words, 4))));
}

/* fill name bytes value: through ACL, whatever memory it is */
std::string do_fill(Words &words) {
    void *target = pointer(words);
    uint64_t length = next<uint64_t>(words);
    return join(raw(aclrtMemset(target, length, next<int>(words), length)));
}

/* count name bytes value: how many bytes have this value */
std::string do_count(Words &words) {
    void *source = pointer(words);
    std::vector<uint8_t> bytes(next<uint64_t>(words));
    uint32_t status = raw(aclrtMemcpy(bytes.data(), bytes.size(), source, bytes.size(), 4));
    return join(status, std::count(bytes.begin(), bytes.end(), static_cast<uint8_t>(next<int>(words))));
}

/* batch stream target source size entries: neighbouring copies; the attributes say device to device of this card */
std::string do_batch(Words &words) {
    void *stream = pointer(words);
    uint64_t target = address(next<std::string>(words)), source = address(next<std::string>(words));
    size_t size = next<size_t>(words), count = next<size_t>(words), fail = 0, first = 0;
    std::vector<void *> targets, sources;
    std::vector<size_t> sizes(count, size);
    for (size_t index = 0; index < count; index++) {
        targets.push_back(reinterpret_cast<void *>(target + index * size));
        sources.push_back(reinterpret_cast<void *>(source + index * size));
    }
    aclrtMemcpyBatchAttr attribute = {};
    attribute.dst = attribute.src = {static_cast<uint32_t>(device), 1};
    return join(raw(aclrtMemcpyBatchAsync(targets.data(), sizes.data(), sources.data(), sizes.data(), count, &attribute,
                                          &first, 1, &fail, stream)));
}

std::string do_where(Words &words) {
    aclrtPtrAttributes attributes = {};
    uint32_t status = raw(aclrtPointerGetAttributes(pointer(words), &attributes));
    return join(status, attributes.location.type, attributes.location.id);
}

std::string do_meminfo(Words &) {
    size_t free_bytes = 0, total = 0;
    uint32_t status = raw(aclrtGetMemInfo(1, &free_bytes, &total));
    return join(status, free_bytes, total);
}

std::string do_export(Words &words) {
    char key[kvxsim::kIpcKeyBytes] = "";
    void *memory = pointer(words);
    uint64_t length = next<uint64_t>(words);
    uint32_t status = raw(aclrtIpcMemGetExportKey(memory, length, key, sizeof key, next<uint64_t>(words)));
    return join(status, std::string(key[0] ? key : "-"));
}

std::string do_import(Words &words) {
    void **slot = &named(next<std::string>(words));
    std::string key = next<std::string>(words);
    uint32_t status = raw(aclrtIpcMemImportByKey(slot, key.c_str(), next<uint64_t>(words)));
    return join(status, reinterpret_cast<uint64_t>(*slot));
}

std::string do_allow(Words &words) {
    std::string key = next<std::string>(words);
    int32_t pid = next<int32_t>(words);
    return join(raw(aclrtIpcMemSetImportPid(key.c_str(), &pid, 1)));
}

std::string do_touch(Words &words) { /* what a processor must not do with device memory */
    volatile uint8_t *memory = static_cast<volatile uint8_t *>(pointer(words));
    return join(memory[0]);
}

/* -- HIXL
 * --------------------------------------------------------------------------------------------------------------- */

std::string do_open(Words &words) {
    hixl::Hixl &one = engine(words);
    std::string local = next<std::string>(words);
    std::map<hixl::S, hixl::S> options;
    for (std::string option; words >> option;)
        options[string(option.substr(0, option.find('=')))] = string(option.substr(option.find('=') + 1));
    return join(one.Initialize(string(local), options));
}

std::string do_register(Words &words) {
    hixl::Hixl &one = engine(words);
    void **slot = &named(next<std::string>(words));
    hixl::MemDesc memory = {};
    memory.addr = address(next<std::string>(words));
    memory.len = next<uint64_t>(words);
    memory.reserved[0] = 1;
    uint32_t status = one.RegisterMem(memory, static_cast<hixl::MemType>(next<int>(words)), *slot);
    return join(status, reinterpret_cast<uint64_t>(*slot));
}

/* the rest of a transfer's line: remote r|w count (local remote length)...  or  ... x n: n neighbours of that length */
std::vector<hixl::TransferOpDesc> descriptors(Words &words) {
    std::vector<hixl::TransferOpDesc> out;
    for (std::string local; words >> local;) {
        uint64_t from = address(local), to = address(next<std::string>(words)), length = next<uint64_t>(words);
        out.push_back({from, to, length});
    }
    return out;
}

hixl::TransferOp direction(Words &words) {
    return next<std::string>(words) == "w" ? hixl::WRITE : hixl::READ;
}

std::string do_sync(Words &words) {
    hixl::Hixl &one = engine(words);
    hixl::S remote = string(next<std::string>(words));
    hixl::TransferOp way = direction(words);
    int32_t timeout_ms = next<int32_t>(words);
    return join(one.TransferSync(remote, way, descriptors(words), timeout_ms));
}

std::string do_async(Words &words) {
    hixl::Hixl &one = engine(words);
    void **slot = &named(next<std::string>(words));
    hixl::S remote = string(next<std::string>(words));
    hixl::TransferOp way = direction(words);
    hixl::TransferArgs arguments = {};
    return join(one.TransferAsync(remote, way, descriptors(words), arguments, *slot));
}

/* many blocks: repeat engine request remote w local remote length count */
std::string do_scatter(Words &words) {
    hixl::Hixl &one = engine(words);
    void **slot = &named(next<std::string>(words));
    hixl::S remote = string(next<std::string>(words));
    hixl::TransferOp way = direction(words);
    uint64_t from = address(next<std::string>(words)), to = address(next<std::string>(words));
    size_t length = next<size_t>(words), count = next<size_t>(words);
    std::vector<hixl::TransferOpDesc> ops;
    for (size_t index = 0; index < count; index++)
        ops.push_back({from + index * length, to + index * length, length});
    return join(one.TransferAsync(remote, way, ops, hixl::TransferArgs{}, *slot));
}

std::string do_poll(Words &words) {
    hixl::Hixl &one = engine(words);
    hixl::TransferStatus status = hixl::TransferStatus::WAITING;
    hixl::TransferReq request = pointer(words);
    uint32_t answer = one.GetTransferStatus(request, status);
    return join(answer, static_cast<int>(status));
}

/* finish engine request ms: polls until it is no longer waiting */
std::string do_finish(Words &words) {
    hixl::Hixl &one = engine(words);
    hixl::TransferReq request = pointer(words);
    int32_t left_ms = next<int32_t>(words);
    hixl::TransferStatus status = hixl::TransferStatus::WAITING;
    uint32_t answer = 0;
    for (; left_ms >= 0 && status == hixl::TransferStatus::WAITING; left_ms--) {
        answer = one.GetTransferStatus(request, status);
        if (status == hixl::TransferStatus::WAITING)
            usleep(1000);
    }
    return join(answer, static_cast<int>(status));
}

std::string do_notify(Words &words) {
    hixl::Hixl &one = engine(words);
    hixl::S remote = string(next<std::string>(words));
    int32_t timeout_ms = next<int32_t>(words);
    hixl::NotifyDesc notify;
    notify.name = string(std::string(next<size_t>(words), 'n'));
    notify.notify_msg = string(std::string(next<size_t>(words), 'm'));
    return join(one.SendNotify(remote, notify, timeout_ms));
}

std::string do_notifies(Words &words) {
    std::vector<hixl::NotifyDesc> all;
    uint32_t status = engine(words).GetNotifies(all);
    return join(status, all.size(), all.empty() ? size_t(0) : all[0].notify_msg.GetLength());
}

std::string do_bulk(Words &words) {
    hixl::GetTransferStatusArgs arguments = {};
    std::vector<hixl::TransferResult> results;
    return join(engine(words).GetTransferStatus(arguments, results));
}

std::string do_later(Words &words) { /* later engine up|down remote */
    hixl::Hixl &one = engine(words);
    bool up = next<std::string>(words) == "up";
    hixl::S remote = string(next<std::string>(words));
    return join(up ? one.ConnectAsync(remote, 1000) : one.DisconnectAsync(remote, 1000));
}

std::string do_state(Words &words) {
    hixl::Hixl &one = engine(words);
    hixl::S remote = string(next<std::string>(words));
    hixl::AsyncConnectStatus status{};
    std::map<hixl::S, hixl::AsyncConnectStatus> all;
    one.GetAsyncConnectStatus(all);
    uint32_t answer = one.GetAsyncConnectStatus(remote, status);
    return join(answer, static_cast<int>(status), all.count(remote));
}

std::string do_capability(Words &words) {
    int32_t value = -1;
    uint32_t status = hixl::Hixl::GetCapability(static_cast<hixl::FeatureType>(next<int32_t>(words)), value);
    return join(status, value);
}

std::map<std::string, Command> named_commands() {
    return {
        {"malloc", do_malloc},     {"mallochost", do_mallochost},
        {"plain", do_plain},       {"copy", do_copy},
        {"fill", do_fill},         {"count", do_count},
        {"batch", do_batch},       {"where", do_where},
        {"meminfo", do_meminfo},   {"export", do_export},
        {"import", do_import},     {"allow", do_allow},
        {"touch", do_touch},       {"open", do_open},
        {"register", do_register}, {"sync", do_sync},
        {"async", do_async},       {"scatter", do_scatter},
        {"poll", do_poll},         {"finish", do_finish},
        {"notify", do_notify},     {"notifies", do_notifies},
        {"bulk", do_bulk},         {"later", do_later},
        {"state", do_state},       {"capability", do_capability},
    };
}

void add_device_commands(std::map<std::string, Command> &out) {
    out["init"] = [](Words &) { return join(raw(aclInit(nullptr))); };
    out["device"] = [](Words &words) {
        device = next<int32_t>(words);
        return join(raw(aclrtSetDevice(device)));
    };
    out["nodevice"] = [](Words &) { return join(raw(aclrtResetDevice(device))); };
    out["getdevice"] = [](Words &) {
        int32_t now = -1;
        uint32_t status = raw(aclrtGetDevice(&now));
        return join(status, now);
    };
    out["devices"] = [](Words &) {
        uint32_t count = 0;
        uint32_t status = raw(aclrtGetDeviceCount(&count));
        return join(status, count);
    };
    out["health"] = [](Words &words) {
        uint32_t health = 9;
        uint32_t status = raw(aclrtQueryDeviceStatus(next<int32_t>(words), &health));
        return join(status, health);
    };
    out["soc"] = [](Words &) {
        char package[] = "runtime", version[128] = "";
        aclsysGetVersionStr(package, version);
        return join(0, aclrtGetSocName(), version);
    };
    out["message"] = [](Words &) {
        const char *text = aclGetRecentErrMsg();
        return std::string(text ? text : "-");
    };
    out["free"] = [](Words &words) { return join(raw(aclrtFree(pointer(words)))); };
    out["freehost"] = [](Words &words) { return join(raw(aclrtFreeHost(pointer(words)))); };
    out["pin"] = [](Words &words) {
        void *seen = nullptr, *memory = pointer(words);
        return join(raw(aclrtHostRegister(memory, next<uint64_t>(words), 0, &seen)));
    };
    out["unpin"] = [](Words &words) { return join(raw(aclrtHostUnregister(pointer(words)))); };
    out["peer"] = [](Words &words) {
        int32_t can = -1, one = next<int32_t>(words), other = next<int32_t>(words);
        uint32_t status = raw(aclrtDeviceCanAccessPeer(&can, one, other));
        return join(status, can);
    };
    out["enablepeer"] = [](Words &words) { return join(raw(aclrtDeviceEnablePeerAccess(next<int32_t>(words), 0))); };
}

void add_stream_commands(std::map<std::string, Command> &out) {
    out["ipcclose"] = [](Words &words) { return join(raw(aclrtIpcMemClose(next<std::string>(words).c_str()))); };
    out["stream"] = [](Words &words) { return join(raw(aclrtCreateStream(&named(next<std::string>(words))))); };
    out["streamclose"] = [](Words &words) { return join(raw(aclrtDestroyStream(pointer(words)))); };
    out["streamkill"] = [](Words &words) { return join(raw(aclrtDestroyStreamForce(pointer(words)))); };
    out["streamabort"] = [](Words &words) { return join(raw(aclrtStreamAbort(pointer(words)))); };
    out["streamwait"] = [](Words &words) {
        void *stream = pointer(words);
        return join(raw(aclrtSynchronizeStreamWithTimeout(stream, next<int32_t>(words))));
    };
    out["streamquery"] = [](Words &words) {
        uint32_t busy = 9, status = raw(aclrtStreamQuery(pointer(words), &busy));
        return join(status, busy);
    };
    out["copyasync"] = [](Words &words) {
        void *stream = pointer(words), *target = pointer(words), *source = pointer(words);
        uint64_t length = next<uint64_t>(words);
        return join(raw(aclrtMemcpyAsync(target, length, source, length, 4, stream)));
    };
    out["event"] = [](Words &words) { return join(raw(aclrtCreateEvent(&named(next<std::string>(words))))); };
    out["record"] = [](Words &words) {
        void *event = pointer(words);
        return join(raw(aclrtRecordEvent(event, pointer(words))));
    };
    out["eventquery"] = [](Words &words) {
        uint32_t done = 9, status = raw(aclrtQueryEventStatus(pointer(words), &done));
        return join(status, done);
    };
    out["range"] = [](Words &words) {
        void *base = nullptr;
        size_t length = 0;
        uint32_t status = raw(aclrtMemGetAddressRange(pointer(words), &base, &length));
        return join(status, reinterpret_cast<uint64_t>(base), length);
    };
}

void add_engine_commands(std::map<std::string, Command> &out) {
    out["close"] = [](Words &words) {
        engine(words).Finalize();
        return std::string("0");
    };
    out["deregister"] = [](Words &words) {
        hixl::Hixl &one = engine(words);
        return join(one.DeregisterMem(pointer(words)));
    };
    out["connect"] = [](Words &words) {
        hixl::Hixl &one = engine(words);
        hixl::S remote = string(next<std::string>(words));
        return join(one.Connect(remote, next<int32_t>(words, 1000)));
    };
    out["disconnect"] = [](Words &words) {
        hixl::Hixl &one = engine(words);
        hixl::S remote = string(next<std::string>(words));
        return join(one.Disconnect(remote, next<int32_t>(words, 1000)));
    };
}

std::map<std::string, Command> commands() {
    std::map<std::string, Command> out = named_commands();
    add_device_commands(out);
    add_stream_commands(out);
    add_engine_commands(out);
    return out;
}

std::string run(const std::map<std::string, Command> &known, const std::string &line) {
    Words words(line);
    std::string name;
    words >> name;
    auto found = known.find(name);
    return found == known.end() ? "unknown command " + name : found->second(words);
}

std::string start(const std::map<std::string, Command> &known, const std::string &line) {
    std::lock_guard<std::mutex> guard(table_lock);
    int number = static_cast<int>(tasks.size());
    Task &task = tasks[number];
    task.thread = std::thread([&known, &task, line] {
        aclrtSetDevice(device);
        std::string answer = run(known, line);
        std::lock_guard<std::mutex> inner(table_lock);
        task.answer = answer;
        task.done = true;
        task_done.notify_all();
    });
    return std::to_string(number);
}

std::string wait(const std::string &line) {
    Words words(line);
    std::string name;
    int number = 0, limit_ms = 0;
    words >> name >> number >> limit_ms;
    std::unique_lock<std::mutex> guard(table_lock);
    Task &task = tasks[number];
    bool done = task_done.wait_for(guard, std::chrono::milliseconds(limit_ms), [&task] { return task.done; });
    return done ? task.answer : "running";
}

} // namespace

int main() {
    const std::map<std::string, Command> known = commands();
    for (std::string line; std::getline(std::cin, line);) {
        std::string answer;
        if (line == "quit")
            break;
        if (line.rfind("& ", 0) == 0)
            answer = start(known, line.substr(2));
        else
            answer = line.rfind("wait ", 0) == 0 ? wait(line) : run(known, line);
        std::cout << answer << std::endl;
    }
    fflush(nullptr);
    _exit(0);
}

/* ascend_hixl.cc: HIXL's C++ class behind the C table of ascend.h.
 *
 * The class has no C interface, and its headers cannot be used: they bring inline code that depends on the string ABI
 * of whoever compiles it. What crosses the border is small, so this file declares those layouts itself and finds the
 * members by their mangled names, none of which contains a std::string. A string is a shared_ptr to something that
 * only the library looks into; its constructor and comparison are the library's, its deleter travels inside. So one
 * build of this file serves libraries of either string ABI.
 *
 * An exception must not enter C: each call into the library is made inside ascend_hixl_guard(), which turns it into a
 * status and keeps its text for last_error. That works because libstdc++ is shared between us and the library. */
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "ascend/ascend_parts.h"
#include "status.h"

namespace {

/* -- layouts: facts of the library's ABI, the same on x86-64 and aarch64 ------------------------------------------- */

struct Str { /* ge::AscendString */
    std::shared_ptr<void> inside;
};

struct Op { /* hixl::TransferOpDesc */
    std::uintptr_t local, remote;
    std::size_t length;
};

struct Mem { /* hixl::MemDesc */
    std::uintptr_t address;
    std::size_t length;
    std::uint8_t flags[128]; /* flags[0]: reachable for the remote side, in versions that have it */
};

struct Args { /* hixl::TransferArgs */
    const void *user;
    std::uint8_t reserved[120];
};

constexpr std::size_t OBJECT_BYTES = 256; /* hixl::Hixl is one pointer; this is room for it to grow */

struct Before { /* std::less<ge::AscendString>: the library looks keys up in our map with its own */
    bool operator()(const Str &left, const Str &right) const;
};
using Options = std::map<Str, Str, Before>;

static_assert(sizeof(void *) == 8 && sizeof(std::size_t) == 8, "a 64-bit machine");
static_assert(sizeof(Str) == 16 && alignof(Str) == 8, "ge::AscendString");
static_assert(sizeof(Op) == 24, "hixl::TransferOpDesc");
static_assert(sizeof(Op) == sizeof(kvx_ascend_op) && offsetof(Op, remote) == offsetof(kvx_ascend_op, remote) &&
                  offsetof(Op, length) == offsetof(kvx_ascend_op, length),
              "kvx_ascend_op is hixl::TransferOpDesc");
static_assert(sizeof(Mem) == 144 && offsetof(Mem, flags) == 16, "hixl::MemDesc");
static_assert(sizeof(Args) == 128, "hixl::TransferArgs");
static_assert(sizeof(Options) == 48, "std::map");
static_assert(sizeof(std::vector<Op>) == 24, "std::vector");

enum MemType : int { MEMORY_DEVICE = 0, MEMORY_HOST = 1 };
enum Direction : int { READ = 0, WRITE = 1 };
enum State : int { WAITING = 0, COMPLETED = 1, TIMED_OUT = 2, FAILED = 3 };

/* -- symbols: a member takes `this` first, a reference is a pointer, Status is uint32_t -----------------------------
 */

#define AN_ENGINE "_ZN4hixl4Hixl"
#define A_STRING  "RKN2ge12AscendStringE"
#define REQUIRED(X)                                                                                                    \
    X(void, construct, (void *), AN_ENGINE "C1Ev")                                                                     \
    X(void, destroy, (void *), AN_ENGINE "D1Ev")                                                                       \
    X(std::uint32_t, initialize, (void *, const Str *, const Options *),                                               \
      AN_ENGINE "10InitializeE" A_STRING "RKSt3mapIS2_S2_St4lessIS2_ESaISt4pairIS3_S2_EEE")                            \
    X(void, finalize, (void *), AN_ENGINE "8FinalizeEv")                                                               \
    X(std::uint32_t, register_mem, (void *, const Mem *, MemType, void **),                                            \
      AN_ENGINE "11RegisterMemERKNS_7MemDescENS_7MemTypeERPv")                                                         \
    X(std::uint32_t, deregister_mem, (void *, void *), AN_ENGINE "13DeregisterMemEPv")                                 \
    X(std::uint32_t, connect, (void *, const Str *, std::int32_t), AN_ENGINE "7ConnectE" A_STRING "i")                 \
    X(std::uint32_t, disconnect, (void *, const Str *, std::int32_t), AN_ENGINE "10DisconnectE" A_STRING "i")          \
    X(std::uint32_t, transfer_sync, (void *, const Str *, Direction, const std::vector<Op> *, std::int32_t),           \
      AN_ENGINE "12TransferSyncE" A_STRING "NS_10TransferOpERKSt6vectorINS_14TransferOpDescESaIS7_EEi")                \
    X(std::uint32_t, transfer_async, (void *, const Str *, Direction, const std::vector<Op> *, const Args *, void **), \
      AN_ENGINE "13TransferAsyncE" A_STRING                                                                            \
                "NS_10TransferOpERKSt6vectorINS_14TransferOpDescESaIS7_EERKNS_12TransferArgsERPv")                     \
    X(std::uint32_t, transfer_status, (void *, void *const *, State *),                                                \
      AN_ENGINE "17GetTransferStatusERKPvRNS_14TransferStatusE")                                                       \
    X(void, send_notify, (void), AN_ENGINE "10SendNotifyE" A_STRING "RKNS_10NotifyDescEi")                             \
    X(void, get_notifies, (void), AN_ENGINE "11GetNotifiesERSt6vectorINS_10NotifyDescESaIS2_EE")
/* Of the string class. */
#define STRINGS(X)                                                                                                     \
    X(void, make_string, (void *, const char *), "_ZN2ge12AscendStringC1EPKc")                                         \
    X(const char *, get_string, (const Str *), "_ZNK2ge12AscendString9GetStringEv")                                    \
    X(bool, string_before, (const Str *, const Str *), "_ZNK2ge12AscendStringltERKS0_")
/* 9.1 and newer. Those that we do not call tell what the toolkit is. */
#define OPTIONAL(X)                                                                                                    \
    X(void, connect_async, (void), AN_ENGINE "12ConnectAsyncE" A_STRING "i")                                           \
    X(void, disconnect_async, (void), AN_ENGINE "15DisconnectAsyncE" A_STRING "i")                                     \
    X(void, connect_state, (void), AN_ENGINE "21GetAsyncConnectStatusE" A_STRING "RNS_18AsyncConnectStatusE")          \
    X(void, connect_states, (void),                                                                                    \
      AN_ENGINE "21GetAsyncConnectStatusERSt3mapIN2ge12AscendStringENS_18AsyncConnectStatusESt4lessIS3_E"              \
                "SaISt4pairIKS3_S4_EEE")                                                                               \
    X(void, transfer_statuses, (void),                                                                                 \
      AN_ENGINE "17GetTransferStatusERKNS_21GetTransferStatusArgsERSt6vectorINS_14TransferResultESaIS5_EE")            \
    X(std::uint32_t, get_capability, (std::int32_t, std::int32_t *), AN_ENGINE "13GetCapabilityENS_11FeatureTypeERi")

#define MEMBER(result, name, arguments, symbol) result(*name) arguments;
struct Functions {
    REQUIRED(MEMBER)
    STRINGS(MEMBER)
    OPTIONAL(MEMBER)
} hixl;
#undef MEMBER

const char *facts_toolkit; /* of the table: says which options the library knows */

bool Before::operator()(const Str &left, const Str &right) const {
    return hixl.string_before(&left, &right);
}

/* The library's constructor runs on ours: an empty shared_ptr owns nothing, so nothing is lost. */
Str ascend_hixl_to_str(const char *source) {
    Str made;
    hixl.make_string(&made, source);
    return made;
}

/* -- exceptions ---------------------------------------------------------------------------------------------------- */

void ascend_hixl_save_exception(const char *what) noexcept {
    std::snprintf(kvx_ascend_exception(), KVX_ASCEND_TEXT_MAX, "an exception came out of the HIXL library: %s", what);
}

/* Make a call that answers with a vendor status; ours is the answer. */
template <typename Call> int ascend_hixl_guard(std::uint32_t *raw_p, Call call) noexcept {
    std::uint32_t raw = KVX_ASCEND_RAW_EXCEPTION;
    kvx_ascend_exception()[0] = 0;
    try {
        raw = call();
    } catch (const std::exception &error) {
        ascend_hixl_save_exception(error.what());
    } catch (...) {
        ascend_hixl_save_exception("of an unknown type");
    }
    if (raw_p)
        *raw_p = raw;
    return kvx_ascend_status(raw);
}

/* -- engines ------------------------------------------------------------------------------------------------------- */

struct Engine {
    void *object;
    std::int32_t device;
    std::atomic<std::int32_t> inside; /* calls that run; CLOSING below zero */
    Engine *next;
};

/* Engines that were closed. These few bytes stay, so that a call that comes too late is told so. */
std::atomic<Engine *> graves;

constexpr std::int32_t CLOSING = INT32_MIN / 2;

/* One call on an engine. Not allowed: the engine is being closed. */
class Visit {
  public:
    explicit Visit(void *engine) noexcept : engine_(static_cast<Engine *>(engine)) {
        allowed = engine_ && engine_->inside.fetch_add(1) >= 0;
    }
    ~Visit() {
        if (engine_)
            engine_->inside.fetch_sub(1);
    }
    Visit(const Visit &) = delete;
    Visit &operator=(const Visit &) = delete;
    void *object() const noexcept {
        return engine_->object;
    }
    bool allowed;

  private:
    Engine *engine_;
};

int ascend_hixl_on_closed(std::uint32_t *raw_p) noexcept {
    if (raw_p)
        *raw_p = 0;
    return KVX_E_CLOSED;
}

int ascend_hixl_on_invalid(std::uint32_t *raw_p) noexcept {
    if (raw_p)
        *raw_p = 0;
    return KVX_E_INVALID;
}

/* The vendor takes any number for a port, cuts it to 16 bits, and takes 0 for "do not listen". */
bool ascend_hixl_local_is_sound(const char *local, char *why, std::size_t why_size) noexcept {
    const char *port = nullptr;
    const char *end = std::strchr(local, ']');
    const char *colon = std::strchr(local, ':');
    if (*local == '[') {
        if (!end || end == local + 1 || (end[1] && end[1] != ':')) {
            std::snprintf(why, why_size, "\"%.64s\" is no address: write [address]:port", local);
            return false;
        }
        port = end[1] ? end + 2 : nullptr;
    } else if (colon && std::strchr(colon + 1, ':')) {
        std::snprintf(why, why_size, "\"%.64s\": an IPv6 address needs brackets: [address]:port", local);
        return false;
    } else if (colon) {
        port = colon + 1;
    }
    if (!*local || colon == local) {
        std::snprintf(why, why_size, "the engine needs an address: \"address:port\", or \"address\" for a client");
        return false;
    }
    if (!port)
        return true;
    std::size_t digits = std::strspn(port, "0123456789");
    long number = digits && digits <= 5 && !port[digits] ? std::strtol(port, nullptr, 10) : 0;
    if (number < 1 || number > 65535) {
        std::snprintf(why, why_size, "\"%.64s\": the port must be 1 to 65535", local);
        return false;
    }
    return true;
}

bool ascend_hixl_option_is_known(const char *key) noexcept {
    static const char *const always[] = {"EnableUseFabricMem", "RdmaTrafficClass", "RdmaServiceLevel", "BufferPool",
                                         "GlobalResourceConfig"};
    static const char *const since_9_0[] = {"AutoConnect", "LocalCommRes"};
    for (const char *known : always)
        if (std::strcmp(key, known) == 0)
            return true;
    for (const char *known : since_9_0)
        if (std::strcmp(key, known) == 0)
            return std::strcmp(facts_toolkit, "8.5") != 0;
    return false;
}

bool ascend_hixl_options_are_known(const kvx_ascend_option *options, std::uint32_t count, char *why,
                                   std::size_t why_size) noexcept {
    for (std::uint32_t index = 0; index < count; index++) {
        const char *key = options[index].key;
        if (!key || !options[index].value) {
            std::snprintf(why, why_size, "option %u has no key or no value", index);
            return false;
        }
        if (!ascend_hixl_option_is_known(key)) {
            std::snprintf(why, why_size, "the toolkit (%s) has no engine option \"%.64s\" (hixl_options)",
                          facts_toolkit, key);
            return false;
        }
    }
    return true;
}

void ascend_hixl_destroy_object(void *object) noexcept {
    char *thrown = kvx_ascend_exception();
    char first[KVX_ASCEND_TEXT_MAX]; /* taking the object apart may throw, too, and says less */
    std::memcpy(first, thrown, sizeof first);
    ascend_hixl_guard(nullptr, [object] {
        hixl.destroy(object);
        return std::uint32_t{0};
    });
    if (*first)
        std::memcpy(thrown, first, sizeof first);
    std::free(object);
}

Engine *ascend_hixl_make_engine(std::int32_t device, std::uint32_t *raw_p, int *status_p) noexcept {
    auto *engine = new (std::nothrow) Engine{nullptr, device, {0}, nullptr};
    void *object = engine ? std::calloc(1, OBJECT_BYTES) : nullptr;
    if (!object) {
        delete engine;
        *status_p = KVX_E_NOMEM;
        return nullptr;
    }
    *status_p = ascend_hixl_guard(raw_p, [object] {
        hixl.construct(object);
        return std::uint32_t{0};
    });
    if (*status_p != KVX_OK) {
        std::free(object);
        delete engine;
        return nullptr;
    }
    engine->object = object;
    return engine;
}

int ascend_hixl_engine_open(std::int32_t device, const char *local, const kvx_ascend_option *options,
                            std::uint32_t option_count, void **engine_p, std::uint32_t *raw_p, char *why,
                            std::size_t why_size) noexcept {
    char nowhere[1];
    if (!why || !why_size) {
        why = nowhere;
        why_size = sizeof nowhere;
    }
    *why = 0;
    kvx_ascend_exception()[0] = 0;
    if (!local || (option_count && !options) || !ascend_hixl_local_is_sound(local, why, why_size) ||
        !ascend_hixl_options_are_known(options, option_count, why, why_size))
        return ascend_hixl_on_invalid(raw_p);
    void *before = nullptr;
    int status = kvx_ascend_enter(device, &before, raw_p);
    if (status != KVX_OK) {
        std::snprintf(why, why_size, "device %d cannot be used in this process", device);
        return status;
    }
    Engine *engine = ascend_hixl_make_engine(device, raw_p, &status);
    if (engine)
        status = ascend_hixl_guard(raw_p, [&] {
            Options map;
            map.emplace(ascend_hixl_to_str("BufferPool"),
                        ascend_hixl_to_str("0:0")); /* no staging in the library; all nodes must agree */
            for (std::uint32_t index = 0; index < option_count; index++)
                map.insert_or_assign(ascend_hixl_to_str(options[index].key), ascend_hixl_to_str(options[index].value));
            Str name = ascend_hixl_to_str(local);
            return hixl.initialize(engine->object, &name, &map);
        });
    kvx_ascend_leave(before);
    if (status == KVX_OK) {
        *engine_p = engine;
        return KVX_OK;
    }
    if (engine) {
        ascend_hixl_destroy_object(engine->object);
        delete engine; /* nobody else has seen it */
    }
    if (*kvx_ascend_exception())
        std::snprintf(why, why_size, "%s", kvx_ascend_exception());
    else if (status == KVX_E_NOMEM)
        std::snprintf(why, why_size, "out of memory");
    else
        std::snprintf(
            why, why_size,
            "the library refused the engine \"%.64s\" on device %d: the port may be taken, the address may not "
            "be one of this host, or a value in hixl_options may be wrong",
            local, device);
    return status;
}

/* KVX_E_BUSY: another call is inside, perhaps for ever; nothing was done, and whoever cannot wait leaves the engine as
 * it is and ends the process. */
int ascend_hixl_engine_close(void *handle, std::uint32_t *raw_p) noexcept {
    auto *engine = static_cast<Engine *>(handle);
    if (!engine)
        return ascend_hixl_on_invalid(raw_p);
    std::int32_t nobody = 0;
    if (raw_p)
        *raw_p = 0;
    if (!engine->inside.compare_exchange_strong(nobody, CLOSING))
        return nobody < 0 ? KVX_E_CLOSED : KVX_E_BUSY;
    void *before = nullptr;
    int entered = kvx_ascend_enter(engine->device, &before, nullptr);
    int status = ascend_hixl_guard(raw_p, [engine] {
        hixl.finalize(engine->object);
        return std::uint32_t{0};
    });
    ascend_hixl_destroy_object(std::exchange(engine->object, nullptr));
    engine->next = graves.load();
    while (!graves.compare_exchange_weak(engine->next, engine))
        continue;
    if (entered == KVX_OK)
        kvx_ascend_leave(before);
    return status;
}

int ascend_hixl_mem_register(void *engine, void *memory, std::uint64_t length, kvx_ascend_where where, void **handle_p,
                             std::uint32_t *raw_p) noexcept {
    if (!memory || !length || (where != KVX_ASCEND_DEVICE && where != KVX_ASCEND_HOST))
        return ascend_hixl_on_invalid(raw_p);
    Visit visit(engine);
    if (!visit.allowed)
        return ascend_hixl_on_closed(raw_p);
    if (where == KVX_ASCEND_DEVICE &&
        (reinterpret_cast<std::uintptr_t>(memory) % KVX_ASCEND_ALIGNMENT || length % KVX_ASCEND_ALIGNMENT)) {
        ascend_hixl_on_invalid(raw_p);
        return KVX_E_ALIGN; /* the library would say so at its next connect only, and with a failed link */
    }
    Mem what = {};
    what.address = reinterpret_cast<std::uintptr_t>(memory);
    what.length = length;
    what.flags[0] = 1;
    void *made = nullptr;
    int status = ascend_hixl_guard(raw_p, [&] {
        return hixl.register_mem(visit.object(), &what, where == KVX_ASCEND_DEVICE ? MEMORY_DEVICE : MEMORY_HOST,
                                 &made);
    });
    if (status == KVX_OK)
        *handle_p = made;
    return status;
}

int ascend_hixl_mem_deregister(void *engine, void *handle, std::uint32_t *raw_p) noexcept {
    if (!handle)
        return ascend_hixl_on_invalid(raw_p);
    Visit visit(engine);
    if (!visit.allowed)
        return ascend_hixl_on_closed(raw_p);
    return ascend_hixl_guard(raw_p, [&] { return hixl.deregister_mem(visit.object(), handle); });
}

using Linker = std::uint32_t (*)(void *, const Str *, std::int32_t);

int ascend_hixl_change_link(Linker change, void *engine, const char *remote, std::int32_t timeout_ms,
                            std::uint32_t *raw_p) noexcept {
    if (!remote || !*remote || timeout_ms <= 0)
        return ascend_hixl_on_invalid(raw_p);
    Visit visit(engine);
    if (!visit.allowed)
        return ascend_hixl_on_closed(raw_p);
    return ascend_hixl_guard(raw_p, [&] {
        Str name = ascend_hixl_to_str(remote);
        return change(visit.object(), &name, timeout_ms);
    });
}

int ascend_hixl_connect(void *engine, const char *remote, std::int32_t timeout_ms, std::uint32_t *raw_p) noexcept {
    return ascend_hixl_change_link(hixl.connect, engine, remote, timeout_ms, raw_p);
}

int ascend_hixl_disconnect(void *engine, const char *remote, std::int32_t timeout_ms, std::uint32_t *raw_p) noexcept {
    return ascend_hixl_change_link(hixl.disconnect, engine, remote, timeout_ms, raw_p);
}

/* Memory for the batch runs out before the library is called: then the link is as it was. */
bool ascend_hixl_prepare(std::vector<Op> &batch, const kvx_ascend_op *ops, std::uint32_t count) noexcept {
    try {
        batch.resize(count);
    } catch (const std::bad_alloc &) {
        return false;
    }
    std::memcpy(static_cast<void *>(batch.data()), ops, count * sizeof *ops);
    return true;
}

int ascend_hixl_submit(void *engine, const char *remote, bool write, const kvx_ascend_op *ops, std::uint32_t count,
                       void **request_p, std::uint32_t *raw_p) noexcept {
    if (!remote || !*remote || !ops || !count)
        return ascend_hixl_on_invalid(raw_p);
    Visit visit(engine);
    if (!visit.allowed)
        return ascend_hixl_on_closed(raw_p);
    std::vector<Op> batch;
    if (!ascend_hixl_prepare(batch, ops, count)) {
        ascend_hixl_on_invalid(raw_p);
        return KVX_E_NOMEM;
    }
    void *request = nullptr;
    int status = ascend_hixl_guard(raw_p, [&] {
        Str name = ascend_hixl_to_str(remote);
        Args args = {};
        return hixl.transfer_async(visit.object(), &name, write ? WRITE : READ, &batch, &args, &request);
    });
    if (status == KVX_OK)
        *request_p = request;
    return status;
}

int ascend_hixl_poll(void *engine, void *request, std::uint32_t *raw_p) noexcept {
    Visit visit(engine);
    if (!visit.allowed)
        return ascend_hixl_on_closed(raw_p);
    State state = FAILED;
    int status = ascend_hixl_guard(raw_p, [&] { return hixl.transfer_status(visit.object(), &request, &state); });
    if (status != KVX_OK)
        return status == KVX_AGAIN ? KVX_PENDING : status;
    if (state == WAITING)
        return KVX_PENDING;
    if (state == COMPLETED)
        return KVX_OK;
    if (raw_p)
        *raw_p = KVX_ASCEND_RAW_FAILED; /* the call went well and has no number for what failed */
    return state == TIMED_OUT ? KVX_E_TIMEOUT : KVX_E_LINK;
}

int ascend_hixl_capability(std::int32_t feature, std::int32_t *value_p, std::uint32_t *raw_p) noexcept {
    if (raw_p)
        *raw_p = 0;
    if (!hixl.get_capability)
        return KVX_E_UNSUPPORTED;
    std::int32_t value = 0;
    int status = ascend_hixl_guard(raw_p, [&] { return hixl.get_capability(feature, &value); });
    if (status == KVX_OK)
        *value_p = value;
    return status;
}

} // namespace

extern "C" bool kvx_ascend_hixl_bind(void *library, void *meta, kvx_ascend_api *api, kvx_ascend_text *missing) {
    std::size_t before = missing->used;
#define FIND(result, name, arguments, symbol)                                                                          \
    hixl.name = reinterpret_cast<result(*) arguments>(kvx_ascend_symbol(library, symbol, missing));
#define FIND_STRING(result, name, arguments, symbol)                                                                   \
    hixl.name = reinterpret_cast<result(*) arguments>(kvx_ascend_symbol(meta, symbol, missing));
#define LOOK(result, name, arguments, symbol)                                                                          \
    hixl.name = reinterpret_cast<result(*) arguments>(kvx_ascend_symbol(library, symbol, nullptr));
    REQUIRED(FIND)
    STRINGS(FIND_STRING)
    OPTIONAL(LOOK)
#undef FIND
#undef FIND_STRING
#undef LOOK
    if (missing->used != before)
        return false;
    facts_toolkit = api->facts.toolkit;
    if (hixl.connect_async && hixl.disconnect_async && hixl.connect_state)
        api->facts.optional |= KVX_ASCEND_HAS_ASYNC_CONNECT;
    if (hixl.transfer_statuses)
        api->facts.optional |= KVX_ASCEND_HAS_BULK_STATUS;
    if (hixl.get_capability)
        api->facts.optional |= KVX_ASCEND_HAS_CAPABILITY;
    api->engine_open = ascend_hixl_engine_open;
    api->engine_close = ascend_hixl_engine_close;
    api->mem_register = ascend_hixl_mem_register;
    api->mem_deregister = ascend_hixl_mem_deregister;
    api->connect = ascend_hixl_connect;
    api->disconnect = ascend_hixl_disconnect;
    api->submit = ascend_hixl_submit;
    api->poll = ascend_hixl_poll;
    api->capability = ascend_hixl_capability;
    return true;
}

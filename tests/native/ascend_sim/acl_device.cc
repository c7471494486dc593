/* acl_device.cc: libacl_rt's devices, contexts, versions and messages. */
#include <atomic>
#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "context.h"

namespace kvxsim {

namespace {

thread_local Context *thread_context = nullptr;
thread_local char thread_message[KVXSIM_TEXT_MAX];

struct Devices {
    std::mutex lock;
    bool initialised = false;
    Context defaults[KVXSIM_CARDS_MAX];
    int references[KVXSIM_CARDS_MAX] = {};
    bool peers[KVXSIM_CARDS_MAX][KVXSIM_CARDS_MAX] = {};
};

Devices &devices() {
    static Devices *one = new Devices;
    return *one;
}

bool known_card(int card) {
    return card >= 0 && static_cast<uint32_t>(card) < kvxsim_cards();
}

} // namespace

bool initialised() {
    std::lock_guard<std::mutex> guard(devices().lock);
    return devices().initialised;
}

Context *current() {
    return thread_context;
}

int no_context(const char *what) {
    return static_cast<int>(kvxsim_error(kAclNoContext, "%s: this thread has no context (aclrtSetDevice first)", what));
}

int refuse(int status, const char *what) {
    return static_cast<int>(kvxsim_error(static_cast<uint32_t>(status), "%s", what));
}

int enter(const char *operation) {
    uint32_t status = 0;
    kvxsim_attach();
    if (!initialised())
        return static_cast<int>(kvxsim_error(kAclUninitialised, "%s before aclInit", operation));
    if (kvxsim_fails(operation, &status))
        return static_cast<int>(kvxsim_error(status, "%s: injected by KVXFER_SIM_FAIL", operation));
    if (!thread_context)
        return no_context(operation);
    if (kvxsim_lost(thread_context->card))
        return static_cast<int>(kvxsim_error(kAclDeviceLost, "%s: card %d is lost", operation, thread_context->card));
    return 0;
}

bool peer_enabled(int card, int other) {
    std::lock_guard<std::mutex> guard(devices().lock);
    return card == other || devices().peers[card][other] || devices().peers[other][card];
}

} // namespace kvxsim

using namespace kvxsim;

uint32_t kvxsim_error(uint32_t status, const char *format, ...) {
    char text[KVXSIM_TEXT_MAX - 64];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    snprintf(thread_message, sizeof thread_message, "EZ9999: " KVXSIM_NAME " (simulated): %" PRIu32 ": %s", status,
             text);
    return status;
}

int kvxsim_current_card(void) {
    return thread_context ? thread_context->card : -1;
}

ACL_API int aclInit(const char *) {
    kvxsim_attach();
    uint32_t status = 0;
    if (kvxsim_fails("aclinit", &status))
        return refuse(static_cast<int>(status), "aclInit: injected by KVXFER_SIM_FAIL");
    std::lock_guard<std::mutex> guard(devices().lock);
    if (devices().initialised)
        return kAclRepeatInit;
    devices().initialised = true;
    return 0;
}

/* NULL when there is nothing to tell; asking takes the message away. */
ACL_API const char *aclGetRecentErrMsg(void) {
    static thread_local char told[KVXSIM_TEXT_MAX];
    if (!thread_message[0])
        return nullptr;
    memcpy(told, thread_message, sizeof told);
    thread_message[0] = 0;
    return told;
}

ACL_API const char *aclrtGetSocName(void) {
    return KVXSIM_NAME;
}

ACL_API int aclrtGetVersion(int32_t *major, int32_t *minor, int32_t *patch) {
    if (!major || !minor || !patch)
        return refuse(kAclParam, "aclrtGetVersion: null");
    *major = 1; /* of the ACL interface, not of the toolkit */
    *minor = kvxsim_major() + kvxsim_minor();
    *patch = 0;
    return 0;
}

ACL_API int aclsysGetVersionStr(char *package, char *version) {
    if (!package || !version)
        return refuse(kAclParam, "aclsysGetVersionStr: null");
    snprintf(version, 128, "%d.%d.0-" KVXSIM_NAME, kvxsim_major(), kvxsim_minor());
    return 0;
}

ACL_API int aclsysGetVersionNum(char *package, int32_t *number) {
    if (!package || !number)
        return refuse(kAclParam, "aclsysGetVersionNum: null");
    *number = kvxsim_major() * 10000000 + kvxsim_minor() * 100000;
    return 0;
}

ACL_API int aclrtSetDevice(int32_t card) {
    uint32_t status = 0;
    kvxsim_attach();
    if (!initialised())
        return refuse(kAclUninitialised, "aclrtSetDevice before aclInit");
    if (kvxsim_fails("setdevice", &status))
        return refuse(static_cast<int>(status), "aclrtSetDevice: injected by KVXFER_SIM_FAIL");
    if (!known_card(card))
        return static_cast<int>(kvxsim_error(kAclDeviceId, "aclrtSetDevice: no card %d of %u", card, kvxsim_cards()));
    if (kvxsim_lost(card))
        return static_cast<int>(kvxsim_error(kAclDeviceLost, "aclrtSetDevice: card %d is lost", card));
    std::lock_guard<std::mutex> guard(devices().lock);
    devices().references[card]++;
    devices().defaults[card] = {card, true};
    thread_context = &devices().defaults[card];
    return 0;
}

ACL_API int aclrtResetDevice(int32_t card) {
    if (!initialised() || !known_card(card))
        return refuse(kAclDeviceId, "aclrtResetDevice: no such card");
    std::lock_guard<std::mutex> guard(devices().lock);
    if (devices().references[card] == 0)
        return refuse(kAclParam, "aclrtResetDevice without aclrtSetDevice");
    if (--devices().references[card] == 0 && thread_context == &devices().defaults[card])
        thread_context = nullptr;
    return 0;
}

ACL_API int aclrtGetDevice(int32_t *card) {
    if (!thread_context)
        return no_context("aclrtGetDevice");
    *card = thread_context->card;
    return 0;
}

ACL_API int aclrtGetDeviceCount(uint32_t *count) {
    uint32_t status = 0;
    if (kvxsim_attach() && kvxsim_fails("devicecount", &status))
        return refuse(static_cast<int>(status), "aclrtGetDeviceCount: injected by KVXFER_SIM_FAIL");
    *count = kvxsim_cards();
    return 0;
}

ACL_API int aclrtQueryDeviceStatus(int32_t card, uint32_t *status_p) {
    if (!known_card(card))
        return refuse(kAclDeviceId, "aclrtQueryDeviceStatus: no such card");
    *status_p = kvxsim_lost(card) ? 1 : 0;
    return 0;
}

ACL_API int aclrtGetPhyDevIdByLogicDevId(const int32_t logic, int32_t *const physical) {
    if (!known_card(logic) || !physical)
        return refuse(kAclDeviceId, "aclrtGetPhyDevIdByLogicDevId: no such card");
    *physical = logic;
    return 0;
}

ACL_API int aclrtCreateContext(void **context_p, int32_t card) {
    if (!initialised())
        return refuse(kAclUninitialised, "aclrtCreateContext before aclInit");
    if (!known_card(card))
        return refuse(kAclDeviceId, "aclrtCreateContext: no such card");
    thread_context = new Context{card, false};
    *context_p = thread_context;
    return 0;
}

ACL_API int aclrtDestroyContext(void *handle) {
    Context *context = static_cast<Context *>(handle);
    if (!context || context->is_default)
        return refuse(kAclParam, "aclrtDestroyContext: not made by aclrtCreateContext");
    if (thread_context == context)
        thread_context = nullptr;
    delete context;
    return 0;
}

ACL_API int aclrtSetCurrentContext(void *context) {
    if (!context)
        return refuse(kAclParam, "aclrtSetCurrentContext: null");
    thread_context = static_cast<Context *>(context);
    return 0;
}

ACL_API int aclrtGetCurrentContext(void **context_p) {
    if (!thread_context)
        return no_context("aclrtGetCurrentContext");
    *context_p = thread_context;
    return 0;
}

ACL_API int aclrtDeviceCanAccessPeer(int32_t *can, int32_t card, int32_t other) {
    if (!can || !known_card(card) || !known_card(other))
        return refuse(kAclDeviceId, "aclrtDeviceCanAccessPeer: no such card");
    if (card == other)
        return refuse(kAclParam, "aclrtDeviceCanAccessPeer: a card is no peer of its own");
    *can = kvxsim_is("PEER", "0") ? 0 : 1;
    return 0;
}

ACL_API int aclrtDeviceEnablePeerAccess(int32_t other, uint32_t flags) {
    int status = enter("enablepeer");
    if (status)
        return status;
    if (!known_card(other) || flags != 0 || other == thread_context->card || kvxsim_is("PEER", "0"))
        return refuse(kAclParam, "aclrtDeviceEnablePeerAccess: no such peer");
    std::lock_guard<std::mutex> guard(devices().lock);
    devices().peers[thread_context->card][other] = true;
    return 0;
}

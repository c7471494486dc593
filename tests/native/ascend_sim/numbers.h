/* numbers.h: vendor numbers and layouts, written down again from what is known of them. No CANN header is included.
 *
 * The simulator speaks the vendor's numbers on purpose: what is tested against it is the code that must understand
 * them. */
#ifndef KVXSIM_NUMBERS_H
#define KVXSIM_NUMBERS_H

#include <cstddef>
#include <cstdint>

#define KVXSIM_NAME "KVXSim910"

namespace kvxsim {

/* hixl::Status */
constexpr uint32_t kParamInvalid = 103900;
constexpr uint32_t kTimeout = 103901;
constexpr uint32_t kNotConnected = 103902;
constexpr uint32_t kAlreadyConnected = 103903;
constexpr uint32_t kUnsupported = 103905;
constexpr uint32_t kExhausted = 203900;
constexpr uint32_t kFailed = 503900;

/* aclError */
constexpr int kAclUninitialised = 100001;
constexpr int kAclRepeatInit = 100002;
constexpr int kAclParam = 107000;
constexpr int kAclDeviceId = 107001;
constexpr int kAclNoContext = 107002;
constexpr int kAclStreamContext = 107003;
constexpr int kAclHandle = 107017;
constexpr int kAclAborted = 107022;
constexpr int kAclUnsupported = 207000;
constexpr int kAclAlloc = 207001;
constexpr int kAclFree = 207002;
constexpr int kAclResource = 207005;
constexpr int kAclInternal = 507000;
constexpr int kAclStreamTimeout = 507046;
constexpr int kAclEventTimeout = 507047;
constexpr int kAclMemoryError = 507053;
constexpr int kAclDeviceLost = 507055;
constexpr int kAclDriver = 507899;

constexpr uint64_t kHugePage = UINT64_C(2) << 20;
constexpr uint64_t kSmallPage = 4096;
constexpr size_t kCopiesMax = 4096; /* entries of one batch copy */
constexpr size_t kIpcKeyBytes = 65;

} // namespace kvxsim

/* -- ACL's structures ------------------------------------------------------------------------------------------------
 */

typedef struct aclrtMemLocation {
    uint32_t id;
    uint32_t type; /* HOST 0, DEVICE 1, UNREGISTERED 2 */
} aclrtMemLocation;

typedef struct aclrtPtrAttributes {
    aclrtMemLocation location;
    uint32_t pageSize;
    uint32_t rsv[4];
} aclrtPtrAttributes;

typedef struct aclrtMemcpyBatchAttr {
    aclrtMemLocation dst, src;
    uint8_t rsv[16];
} aclrtMemcpyBatchAttr;

static_assert(sizeof(aclrtMemLocation) == 8, "aclrtMemLocation");
static_assert(sizeof(aclrtPtrAttributes) == 28, "aclrtPtrAttributes");
static_assert(sizeof(aclrtMemcpyBatchAttr) == 32, "aclrtMemcpyBatchAttr");

#endif

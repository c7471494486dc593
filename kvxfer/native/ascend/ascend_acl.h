/* ascend_acl.h: ACL's functions as ascend_acl.c (devices, memory) and ascend_copy.c (copies, streams) call them.
 *
 * Declared from the vendor's documents, resolved by dlsym; the table below is the only list of their names. */
#ifndef KVX_ASCEND_ACL_H
#define KVX_ASCEND_ACL_H

#include "ascend/ascend_parts.h"

/* aclrtMemLocationType */
enum { AT_HOST = 0, AT_DEVICE = 1, AT_UNREGISTERED = 2, AT_MANAGED = 3, AT_HOST_NUMA = 4 };
/* aclrtMemcpyKind */
enum { HOST_TO_HOST = 0, HOST_TO_DEVICE = 1, DEVICE_TO_HOST = 2, DEVICE_TO_DEVICE = 3, COPY_DEFAULT = 4 };

typedef struct acl_location {
    uint32_t id;
    int32_t type;
} acl_location;

typedef struct acl_attributes { /* aclrtPtrAttributes, with room for one that grows */
    acl_location location;
    uint32_t page_size, reserved[4 + 32];
} acl_attributes;

typedef struct acl_batch_attribute {
    acl_location target, source;
    uint8_t reserved[16];
} acl_batch_attribute;

_Static_assert(sizeof(acl_location) == 8, "aclrtMemLocation");
_Static_assert(sizeof(acl_batch_attribute) == 32, "aclrtMemcpyBatchAttr");

/* X(result, name, arguments) */
#define ACL_REQUIRED(X)                                                                                                \
    X(int, aclInit, (const char *config))                                                                              \
    X(const char *, aclrtGetSocName, (void))                                                                           \
    X(int, aclrtGetDeviceCount, (uint32_t *))                                                                          \
    X(int, aclrtSetDevice, (int32_t))                                                                                  \
    X(int, aclrtGetCurrentContext, (void **))                                                                          \
    X(int, aclrtSetCurrentContext, (void *))                                                                           \
    X(int, aclrtGetMemInfo, (int32_t attribute, size_t *free, size_t *total))                                          \
    X(int, aclrtMalloc, (void **, size_t, int32_t policy))                                                             \
    X(int, aclrtFree, (void *))                                                                                        \
    X(int, aclrtMallocHost, (void **, size_t))                                                                         \
    X(int, aclrtFreeHost, (void *))                                                                                    \
    X(int, aclrtMemcpy, (void *, size_t, const void *, size_t, int32_t kind))                                          \
    X(int, aclrtMemcpyAsync, (void *, size_t, const void *, size_t, int32_t kind, void *stream))                       \
    X(int, aclrtCreateStream, (void **))                                                                               \
    X(int, aclrtDestroyStream, (void *))                                                                               \
    X(int, aclrtStreamQuery, (void *, int32_t *status))                                                                \
    X(int, aclrtSynchronizeStream, (void *))

#define ACL_OPTIONAL(X)                                                                                                \
    X(const char *, aclGetRecentErrMsg, (void))                                                                        \
    X(int, aclrtGetVersion, (int32_t *, int32_t *, int32_t *))                                                         \
    X(int, aclsysGetVersionStr, (char *package, char *version))                                                        \
    X(int, aclrtQueryDeviceStatus, (int32_t, int32_t *))                                                               \
    X(int, aclrtGetPhyDevIdByLogicDevId, (int32_t, int32_t *))                                                         \
    X(int, aclrtDeviceCanAccessPeer, (int32_t *, int32_t, int32_t))                                                    \
    X(int, aclrtDeviceEnablePeerAccess, (int32_t, uint32_t))                                                           \
    X(int, aclrtPointerGetAttributes, (const void *, acl_attributes *))                                                \
    X(int, aclrtMemGetAddressRange, (void *, void **, size_t *))                                                       \
    X(int, aclrtMemcpyBatchAsync,                                                                                      \
      (void **, size_t *, void **, size_t *, size_t, acl_batch_attribute *, size_t *, size_t, size_t *, void *))       \
    X(int, aclrtDestroyStreamForce, (void *))                                                                          \
    X(int, aclrtStreamAbort, (void *))                                                                                 \
    X(int, aclrtSynchronizeStreamWithTimeout, (void *, int32_t))                                                       \
    X(int, aclrtIpcMemGetExportKey, (void *, size_t, char *, size_t, uint64_t))                                        \
    X(int, aclrtIpcMemSetImportPid, (const char *, int32_t *, size_t))                                                 \
    X(int, aclrtIpcMemImportByKey, (void **, const char *, uint64_t))                                                  \
    X(int, aclrtIpcMemClose, (const char *))                                                                           \
    X(int, aclrtDeviceGetBareTgid, (int32_t *))

#define ACL_MEMBER(result, name, arguments) result(*name) arguments;
typedef struct acl_functions {
    ACL_REQUIRED(ACL_MEMBER) ACL_OPTIONAL(ACL_MEMBER)
} acl_functions;
#undef ACL_MEMBER

/* Filled once, before the table of ascend.h is handed out. */
extern acl_functions kvx_ascend_acl;

/* kvx_ascend_status for ACL: what is not known is the device's fault, as there is no link. Stores raw. */
int kvx_ascend_acl_status(int raw, uint32_t *raw_p);
/* Where memory is, and from where to where that holds. */
typedef struct acl_place {
    uintptr_t begin, end;
    acl_location location;
} acl_place;

/* Find it: what we allocated ourselves is known, otherwise the library is asked. KVX_E_UNSUPPORTED: it cannot tell. */
int kvx_ascend_locate(const void *memory, acl_place *place_p, uint32_t *raw_p);

#endif

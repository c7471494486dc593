/* status.c: names of the codes, for logs and for the test that compares the C enum with status.py. */
#include "api.h"

#define NAME(code)                                                                                                     \
    case code:                                                                                                         \
        return #code;

const char *kvx_status_name(int status) {
    switch (status) {
        NAME(KVX_OK)
        NAME(KVX_AGAIN)
        NAME(KVX_E_INVALID)
        NAME(KVX_E_LENGTH)
        NAME(KVX_E_OVERLAP)
        NAME(KVX_E_ALIGN)
        NAME(KVX_E_BUSY)
        NAME(KVX_E_NO_REGION)
        NAME(KVX_E_NO_PEER)
        NAME(KVX_E_NO_IMPORT)
        NAME(KVX_E_NO_GRANT)
        NAME(KVX_E_NO_TRANSPORT)
        NAME(KVX_E_LIMIT)
        NAME(KVX_E_CLOSED)
        NAME(KVX_E_LOCAL_RANGE)
        NAME(KVX_E_READ_ONLY)
        NAME(KVX_PENDING)
        NAME(KVX_E_CANCELLED)
        NAME(KVX_E_RANGE)
        NAME(KVX_E_ACCESS)
        NAME(KVX_E_KEY)
        NAME(KVX_E_STALE)
        NAME(KVX_E_UNKNOWN)
        NAME(KVX_E_REVOKED)
        NAME(KVX_E_INTEGRITY)
        NAME(KVX_E_INJECTED)
        NAME(KVX_E_PEER_LOST)
        NAME(KVX_E_UNREACHABLE)
        NAME(KVX_E_TIMEOUT)
        NAME(KVX_E_NOT_KVXFER)
        NAME(KVX_E_VERSION)
        NAME(KVX_E_OTHER_HOST)
        NAME(KVX_E_REFUSED)
        NAME(KVX_E_LINK)
        NAME(KVX_E_ENCRYPTION)
        NAME(KVX_E_SECRET)
        NAME(KVX_E_NOT_SENT)
        NAME(KVX_E_NOMEM)
        NAME(KVX_E_FDS)
        NAME(KVX_E_SHM_SPACE)
        NAME(KVX_E_MEMLOCK)
        NAME(KVX_E_UNSUPPORTED)
        NAME(KVX_E_SYSTEM)
        NAME(KVX_E_CMA_DENIED)
        NAME(KVX_E_NO_DEVICE)
        NAME(KVX_E_NO_CONTEXT)
        NAME(KVX_E_DEVICE)
        NAME(KVX_E_DEVICE_MEMORY)
        NAME(KVX_E_HOST_MEMORY)
        NAME(KVX_E_INTERNAL)
    default:
        return "unknown";
    }
}

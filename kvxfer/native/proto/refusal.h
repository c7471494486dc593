/* refusal.h: which statuses an owner may tell a peer, on all transports. Whatever else a peer says is a broken
 * protocol: whether a transfer was cancelled, and what became of a connection, is known on this side. */
#ifndef KVX_REFUSAL_H
#define KVX_REFUSAL_H

#include <stdbool.h>
#include <stdint.h>

#include "status.h"

/* It failed there, that node cannot, or has no place for whoever asks. */
static inline bool kvx_refusal(int32_t status) {
    return (status >= KVX_E_RANGE && status <= KVX_E_INTEGRITY) || status == KVX_E_REFUSED ||
           (status >= KVX_E_NOMEM && status < KVX_E_INTERNAL);
}

/* Without an authenticator: the owner has no key to prove, or the request does not match it. */
static inline bool kvx_refusal_bare(int32_t status) {
    return status >= KVX_E_KEY && status <= KVX_E_REVOKED;
}

/* What an owner says of its own status: a device that hangs there, say, has nothing to do with this connection. */
static inline int32_t kvx_refusal_told(int32_t status) {
    return status == KVX_OK || kvx_refusal(status) ? status : KVX_E_DEVICE;
}

#endif

/* auth.h: how an initiator proves that it holds a grant's key without sending it.
 *
 * SipHash-2-4 with 128-bit output (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012) over
 * (both sides' nonces, message counter, direction, message), keyed with the grant's 128-bit key. A key never crosses
 * a data connection; a recorded message cannot be replayed, since nonces are drawn anew per connection and the counter
 * grows. */
#ifndef KVX_AUTH_H
#define KVX_AUTH_H

#include <stdbool.h>

#include "api.h"

#define KVX_MAC_BYTES   16
#define KVX_NONCE_BYTES 16

typedef struct kvx_mac_state {
    uint64_t v0, v1, v2, v3;
    uint8_t tail[8];
    uint32_t tail_length;
    uint64_t total;
} kvx_mac_state;

void kvx_mac_init(kvx_mac_state *state, const uint8_t key[KVX_KEY_BYTES]);
void kvx_mac_update(kvx_mac_state *state, const void *data, uint64_t length);
void kvx_mac_final(kvx_mac_state *state, uint8_t mac[KVX_MAC_BYTES]);
bool kvx_mac_equal(const uint8_t a[KVX_MAC_BYTES], const uint8_t b[KVX_MAC_BYTES]); /* constant time */
void kvx_random(void *data, uint64_t length); /* getrandom; aborts when the kernel has none */

#endif

/* auth.c: SipHash-2-4 with 128-bit output, written from the paper, plus randomness and a constant-time comparison. */
#include "proto/auth.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>

#include "transport.h"

static uint64_t auth_load64(const uint8_t *p) {
    uint64_t value;
    memcpy(&value, p, sizeof(value));
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

static void auth_store64(uint8_t *p, uint64_t value) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    memcpy(p, &value, sizeof(value));
}

static inline uint64_t auth_rotate(uint64_t x, int bits) {
    return (x << bits) | (x >> (64 - bits));
}

static inline void auth_rounds(kvx_mac_state *s, int count) {
    uint64_t v0 = s->v0, v1 = s->v1, v2 = s->v2, v3 = s->v3;
    for (int i = 0; i < count; i++) {
        v0 += v1;
        v1 = auth_rotate(v1, 13) ^ v0;
        v0 = auth_rotate(v0, 32);
        v2 += v3;
        v3 = auth_rotate(v3, 16) ^ v2;
        v0 += v3;
        v3 = auth_rotate(v3, 21) ^ v0;
        v2 += v1;
        v1 = auth_rotate(v1, 17) ^ v2;
        v2 = auth_rotate(v2, 32);
    }
    s->v0 = v0;
    s->v1 = v1;
    s->v2 = v2;
    s->v3 = v3;
}

static inline void auth_update_word(kvx_mac_state *s, uint64_t word) {
    s->v3 ^= word;
    auth_rounds(s, 2);
    s->v0 ^= word;
}

void kvx_mac_init(kvx_mac_state *state, const uint8_t key[KVX_KEY_BYTES]) {
    uint64_t k0 = auth_load64(key);
    uint64_t k1 = auth_load64(key + 8);
    memset(state, 0, sizeof(*state));
    state->v0 = k0 ^ UINT64_C(0x736f6d6570736575);
    state->v1 = k1 ^ UINT64_C(0x646f72616e646f6d) ^ 0xee; /* 0xee marks the 128-bit variant */
    state->v2 = k0 ^ UINT64_C(0x6c7967656e657261);
    state->v3 = k1 ^ UINT64_C(0x7465646279746573);
}

void kvx_mac_update(kvx_mac_state *state, const void *data, uint64_t length) {
    const uint8_t *p = data;
    state->total += length;
    if (state->tail_length != 0) {
        while (length != 0 && state->tail_length < 8) {
            state->tail[state->tail_length++] = *p++;
            length--;
        }
        if (state->tail_length < 8) {
            return;
        }
        auth_update_word(state, auth_load64(state->tail));
        state->tail_length = 0;
    }
    for (; length >= 8; length -= 8, p += 8) {
        auth_update_word(state, auth_load64(p));
    }
    if (length != 0) {
        memcpy(state->tail, p, length);
        state->tail_length = (uint32_t)length;
    }
}

void kvx_mac_final(kvx_mac_state *state, uint8_t mac[KVX_MAC_BYTES]) {
    uint64_t last = (state->total & 0xff) << 56;
    for (uint32_t i = 0; i < state->tail_length; i++) {
        last |= (uint64_t)state->tail[i] << (8 * i);
    }
    auth_update_word(state, last);
    state->v2 ^= 0xee;
    auth_rounds(state, 4);
    auth_store64(mac, state->v0 ^ state->v1 ^ state->v2 ^ state->v3);
    state->v1 ^= 0xdd;
    auth_rounds(state, 4);
    auth_store64(mac + 8, state->v0 ^ state->v1 ^ state->v2 ^ state->v3);
    explicit_bzero(state, sizeof(*state));
}

void kvx_mac(const uint8_t *key, const void *data, uint64_t length, uint8_t *mac) {
    kvx_mac_state state;
    kvx_mac_init(&state, key);
    kvx_mac_update(&state, data, length);
    kvx_mac_final(&state, mac);
}

bool kvx_mac_equal(const uint8_t a[KVX_MAC_BYTES], const uint8_t b[KVX_MAC_BYTES]) {
    volatile uint8_t difference = 0;
    for (int i = 0; i < KVX_MAC_BYTES; i++) {
        difference = (uint8_t)(difference | (a[i] ^ b[i]));
    }
    return difference == 0;
}

void kvx_random(void *data, uint64_t length) {
    uint8_t *p = data;
    while (length != 0) {
        ssize_t got = getrandom(p, length < 256 ? length : 256, 0);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        KVX_ASSERT(got > 0); /* a predictable key would be worse than no service */
        p += got;
        length -= (uint64_t)got;
    }
}

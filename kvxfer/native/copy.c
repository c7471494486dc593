/* copy.c: memory copies and CRC-32C, chosen once per process by what the CPU offers.
 *
 * A cached copy reads the target's lines before it overwrites them, so a large copy costs three memory streams; non-temporal stores
 * cost two and leave the caches to whoever computes. They need whole aligned lines: head and tail go the cached way. */
#include "copy.h"

#include <string.h>

#define LINE 64u

#if defined(__x86_64__)
#include <immintrin.h>

#define PREFETCH_AHEAD 1024

/* Each takes an aligned target and a multiple of 256 bytes. */
__attribute__((target("avx512f"))) static void nt_blocks_avx512(uint8_t *to, const uint8_t *from, uint64_t length) {
    for (uint64_t i = 0; i < length; i += 4 * LINE) {
        for (uint32_t line = 0; line < 4; line++) {
            _mm_prefetch((const char *)from + i + PREFETCH_AHEAD + line * LINE, _MM_HINT_NTA);
        }
        __m512i a = _mm512_loadu_si512(from + i), b = _mm512_loadu_si512(from + i + LINE);
        __m512i c = _mm512_loadu_si512(from + i + 2 * LINE), d = _mm512_loadu_si512(from + i + 3 * LINE);
        _mm512_stream_si512((void *)(to + i), a);
        _mm512_stream_si512((void *)(to + i + LINE), b);
        _mm512_stream_si512((void *)(to + i + 2 * LINE), c);
        _mm512_stream_si512((void *)(to + i + 3 * LINE), d);
    }
    _mm_sfence();
}

__attribute__((target("avx2"))) static void nt_blocks_avx2(uint8_t *to, const uint8_t *from, uint64_t length) {
    for (uint64_t i = 0; i < length; i += 2 * LINE) {
        _mm_prefetch((const char *)from + i + PREFETCH_AHEAD, _MM_HINT_NTA);
        _mm_prefetch((const char *)from + i + PREFETCH_AHEAD + LINE, _MM_HINT_NTA);
        __m256i a = _mm256_loadu_si256((const void *)(from + i)), b = _mm256_loadu_si256((const void *)(from + i + 32));
        __m256i c = _mm256_loadu_si256((const void *)(from + i + 64));
        __m256i d = _mm256_loadu_si256((const void *)(from + i + 96));
        _mm256_stream_si256((void *)(to + i), a);
        _mm256_stream_si256((void *)(to + i + 32), b);
        _mm256_stream_si256((void *)(to + i + 64), c);
        _mm256_stream_si256((void *)(to + i + 96), d);
    }
    _mm_sfence();
}

static void nt_blocks_sse2(uint8_t *to, const uint8_t *from, uint64_t length) {
    for (uint64_t i = 0; i < length; i += LINE) {
        _mm_prefetch((const char *)from + i + PREFETCH_AHEAD, _MM_HINT_NTA);
        for (uint32_t part = 0; part < LINE; part += 16) {
            _mm_stream_si128((void *)(to + i + part), _mm_loadu_si128((const void *)(from + i + part)));
        }
    }
    _mm_sfence();
}

static void (*nt_blocks)(uint8_t *, const uint8_t *, uint64_t) = nt_blocks_sse2;

__attribute__((target("sse4.2"))) static uint32_t crc_hardware(uint32_t crc, const uint8_t *p, uint64_t length) {
    uint64_t state = crc;
    for (; length >= 8; length -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        state = _mm_crc32_u64(state, word);
    }
    uint32_t narrow = (uint32_t)state;
    for (; length != 0; length--, p++) {
        narrow = _mm_crc32_u8(narrow, *p);
    }
    return narrow;
}

#elif defined(__aarch64__)
#include <sys/auxv.h>

#define HWCAP_CRC32_BIT (1ul << 7)

static void nt_blocks_ldnp(uint8_t *to, const uint8_t *from, uint64_t length) {
    for (uint64_t i = 0; i < length; i += LINE) {
        const uint8_t *source = from + i;
        uint8_t *target = to + i;
        __builtin_prefetch(source + 1024, 0, 0);
        __asm__ volatile("ldnp q0, q1, [%0]\n\t"
                         "ldnp q2, q3, [%0, #32]\n\t"
                         "stnp q0, q1, [%1]\n\t"
                         "stnp q2, q3, [%1, #32]"
                         :
                         : "r"(source), "r"(target)
                         : "v0", "v1", "v2", "v3", "memory");
    }
    __atomic_thread_fence(__ATOMIC_RELEASE);
}

static void (*nt_blocks)(uint8_t *, const uint8_t *, uint64_t) = nt_blocks_ldnp;

__attribute__((target("+crc"))) static uint32_t crc_hardware(uint32_t crc, const uint8_t *p, uint64_t length) {
    for (; length >= 8; length -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        crc = __builtin_aarch64_crc32cx(crc, word);
    }
    for (; length != 0; length--, p++) {
        crc = __builtin_aarch64_crc32cb(crc, *p);
    }
    return crc;
}

#else
static void nt_blocks_plain(uint8_t *to, const uint8_t *from, uint64_t length) {
    memcpy(to, from, length);
}
static void (*nt_blocks)(uint8_t *, const uint8_t *, uint64_t) = nt_blocks_plain;
#endif

static uint32_t crc_table[256]; /* of the reflected polynomial 0x82f63b78 */

static uint32_t crc_software(uint32_t crc, const uint8_t *p, uint64_t length) {
    for (; length != 0; length--, p++) {
        crc = (crc >> 8) ^ crc_table[(crc ^ *p) & 0xff];
    }
    return crc;
}

static uint32_t (*crc_update)(uint32_t, const uint8_t *, uint64_t) = crc_software;

__attribute__((constructor)) static void choose(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) {
            crc = (crc >> 1) ^ ((crc & 1) ? UINT32_C(0x82f63b78) : 0);
        }
        crc_table[i] = crc;
    }
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) {
        nt_blocks = nt_blocks_avx512;
    } else if (__builtin_cpu_supports("avx2")) {
        nt_blocks = nt_blocks_avx2;
    }
    if (__builtin_cpu_supports("sse4.2")) {
        crc_update = crc_hardware;
    }
#elif defined(__aarch64__)
    if (getauxval(AT_HWCAP) & HWCAP_CRC32_BIT) {
        crc_update = crc_hardware;
    }
#endif
}

void kvx_copy_nt(void *target, const void *source, uint64_t length) {
    uint8_t *to = target;
    const uint8_t *from = source;
    uint64_t head = (LINE - (uintptr_t)to % LINE) % LINE;
    if (length < head + 4 * LINE) {
        memcpy(to, from, length);
        return;
    }
    memcpy(to, from, head);
    uint64_t body = (length - head) & ~(uint64_t)(4 * LINE - 1);
    nt_blocks(to + head, from + head, body);
    memcpy(to + head + body, from + head + body, length - head - body);
}

void kvx_copy(void *target, const void *source, uint64_t length, uint64_t nt_bytes_min) {
    if (length >= nt_bytes_min) {
        kvx_copy_nt(target, source, length);
    } else {
        memcpy(target, source, length);
    }
}

uint32_t kvx_crc32c(uint32_t seed, const void *data, uint64_t length) {
    return ~crc_update(~seed, data, length);
}

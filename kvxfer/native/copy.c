/* copy.c: memory copies and CRC-32C, chosen once per process by what the CPU offers.
 *
 * A cached copy reads the target's lines before it overwrites them, so a large copy costs three memory streams;
 * non-temporal stores cost two and leave the caches to whoever computes. They need whole aligned lines: head and tail
 * go the cached way. */
#include "copy.h"

#include <string.h>

#define LINE 64u

#if defined(__x86_64__)
#include <immintrin.h>

/* Each copies `bytes` (a multiple of LINE) to an aligned target. Eight pages are walked side by side, a line of each in
 * turn: one stream alone does not keep enough lines in flight (measured on a Sapphire Rapids guest: 9.3 GB/s with
 * one, 11.1 with two, 12.4 with eight; prefetching on top of that gains nothing, and the NTA hint loses a third). */
#define PAGE    UINT64_C(4096)
#define STREAMS UINT64_C(8)

__attribute__((target("avx512f"), always_inline)) static inline void line_avx512(uint8_t *to, const uint8_t *from) {
    _mm512_stream_si512((void *)to, _mm512_loadu_si512(from));
}

__attribute__((target("avx2"), always_inline)) static inline void line_avx2(uint8_t *to, const uint8_t *from) {
    __m256i low = _mm256_loadu_si256((const void *)from), high = _mm256_loadu_si256((const void *)(from + 32));
    _mm256_stream_si256((void *)to, low);
    _mm256_stream_si256((void *)(to + 32), high);
}

__attribute__((always_inline)) static inline void line_sse2(uint8_t *to, const uint8_t *from) {
    for (uint32_t part = 0; part < LINE; part += 16) {
        _mm_stream_si128((void *)(to + part), _mm_loadu_si128((const void *)(from + part)));
    }
}

#define NT_BLOCKS(name, line)                                                                                          \
    static void name(uint8_t *to, const uint8_t *from, uint64_t bytes) {                                               \
        uint64_t at = 0;                                                                                               \
        for (; bytes - at >= STREAMS * PAGE; at += STREAMS * PAGE) {                                                   \
            for (uint64_t i = 0; i < PAGE; i += 2 * LINE) {                                                            \
                for (uint64_t page = at; page < at + STREAMS * PAGE; page += PAGE) {                                   \
                    line(to + page + i, from + page + i);                                                              \
                    line(to + page + i + LINE, from + page + i + LINE);                                                \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
        for (; at < bytes; at += LINE) {                                                                               \
            line(to + at, from + at);                                                                                  \
        }                                                                                                              \
        _mm_sfence();                                                                                                  \
    }

__attribute__((target("avx512f"))) NT_BLOCKS(nt_blocks_avx512, line_avx512) __attribute__((target("avx2")))
NT_BLOCKS(nt_blocks_avx2, line_avx2) NT_BLOCKS(nt_blocks_sse2, line_sse2)

    static void (*nt_blocks)(uint8_t *, const uint8_t *, uint64_t) = nt_blocks_sse2;

#define CRC_TARGET          __attribute__((target("sse4.2")))
#define CRC_WORD(crc, word) ((uint32_t)_mm_crc32_u64(crc, word))
#define CRC_BYTE(crc, byte) _mm_crc32_u8(crc, byte)

#elif defined(__aarch64__)
#include <sys/auxv.h>

#define HWCAP_CRC32_BIT (1ul << 7)

static void nt_blocks_ldnp(uint8_t *to, const uint8_t *from, uint64_t bytes) {
    for (uint64_t i = 0; i < bytes; i += LINE) {
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

/* By hand, since compilers disagree on the names of these builtins. */
static inline uint32_t crc_word(uint32_t crc, uint64_t word) {
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
    return crc;
}

static inline uint32_t crc_byte(uint32_t crc, uint8_t byte) {
    __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"((uint32_t)byte));
    return crc;
}

#define CRC_TARGET
#define CRC_WORD(crc, word) crc_word(crc, word)
#define CRC_BYTE(crc, byte) crc_byte(crc, byte)

#else
static void nt_blocks_plain(uint8_t *to, const uint8_t *from, uint64_t length) {
    memcpy(to, from, length);
}
static void (*nt_blocks)(uint8_t *, const uint8_t *, uint64_t) = nt_blocks_plain;
#endif

/* -- CRC-32C ------------------------------------------------------------------------------------------------ */

static uint32_t crc_table[256]; /* of the reflected polynomial 0x82f63b78 */

static uint32_t crc_software(uint32_t crc, const uint8_t *p, uint64_t length) {
    for (; length != 0; length--, p++) {
        crc = (crc >> 8) ^ crc_table[(crc ^ *p) & 0xff];
    }
    return crc;
}

#if defined(CRC_TARGET)
#define LANE UINT64_C(1024) /* bytes per lane */

static uint32_t lane_table[4][256]; /* what LANE zero bytes make of each byte of a crc */

static uint32_t lane_skip(uint32_t crc) {
    return lane_table[0][crc & 0xff] ^ lane_table[1][crc >> 8 & 0xff] ^ lane_table[2][crc >> 16 & 0xff] ^
           lane_table[3][crc >> 24];
}

static void lane_table_make(void) {
    uint32_t basis[32];
    for (uint32_t bit = 0; bit < 32; bit++) {
        uint32_t crc = UINT32_C(1) << bit;
        for (uint64_t i = 0; i < LANE; i++) {
            crc = (crc >> 8) ^ crc_table[crc & 0xff];
        }
        basis[bit] = crc;
    }
    for (uint32_t byte = 0; byte < 4; byte++) {
        for (uint32_t value = 0; value < 256; value++) {
            uint32_t sum = 0;
            for (uint32_t bit = 0; bit < 8; bit++) {
                sum ^= (value >> bit & 1) ? basis[8 * byte + bit] : 0;
            }
            lane_table[byte][value] = sum;
        }
    }
}

static inline uint64_t word_at(const uint8_t *p) {
    uint64_t word;
    memcpy(&word, p, sizeof(word));
    return word;
}

/* The instruction takes three cycles but one can start in each: three lanes run side by side and are joined at their
 * end. */
CRC_TARGET static uint32_t crc_hardware(uint32_t crc, const uint8_t *p, uint64_t length) {
    for (; length >= 3 * LANE; length -= 3 * LANE, p += 3 * LANE) {
        uint32_t second = 0, third = 0;
        for (uint64_t i = 0; i < LANE; i += 8) {
            crc = CRC_WORD(crc, word_at(p + i));
            second = CRC_WORD(second, word_at(p + LANE + i));
            third = CRC_WORD(third, word_at(p + 2 * LANE + i));
        }
        crc = lane_skip(lane_skip(crc) ^ second) ^ third;
    }
    for (; length >= 8; length -= 8, p += 8) {
        crc = CRC_WORD(crc, word_at(p));
    }
    for (; length != 0; length--, p++) {
        crc = CRC_BYTE(crc, *p);
    }
    return crc;
}
#endif

static uint32_t (*crc_update)(uint32_t, const uint8_t *, uint64_t) = crc_software;

__attribute__((constructor)) static void choose(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) {
            crc = (crc >> 1) ^ ((crc & 1) ? UINT32_C(0x82f63b78) : 0);
        }
        crc_table[i] = crc;
    }
#if defined(CRC_TARGET)
    lane_table_make();
#endif
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
    if (length < head + LINE) {
        memcpy(to, from, length);
        return;
    }
    memcpy(to, from, head);
    uint64_t body = (length - head) & ~(uint64_t)(LINE - 1);
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

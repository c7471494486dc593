/* check.c: copies, checksums and authenticators against plain versions written here, without Python, so that it also
 * runs on another architecture under an emulator. copy.c is included, not linked: each of its kernels is looked at,
 * also the one that this CPU would not choose.
 *
 *     check [need-kernels]     with the argument, a CPU for which only the plain kernels fit is a failure */
#include "memory/copy.c"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "proto/stream.h"

#define GUARD 256u
#define ROOM  (UINT64_C(1) << 18)

/* The core's, which is not linked here. */
_Noreturn void kvx_panic(const char *condition, const char *file, int line);
_Noreturn void kvx_panic(const char *condition, const char *file, int line) {
    fprintf(stderr, "%s:%d: %s\n", file, line, condition);
    abort();
}

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
            exit(1);                                                                                                   \
        }                                                                                                              \
        checks++;                                                                                                      \
    } while (0)

static unsigned long checks;

static uint64_t dice(uint64_t sides) { /* splitmix64 */
    static uint64_t state = 1;
    uint64_t z = (state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (z ^ (z >> 31)) % sides;
}

static void fill(uint8_t *bytes, uint64_t length) {
    for (uint64_t i = 0; i < length; i++) {
        bytes[i] = (uint8_t)dice(256);
    }
}

static bool all(const uint8_t *bytes, uint64_t length, uint8_t value) {
    for (uint64_t i = 0; i < length; i++) {
        if (bytes[i] != value) {
            return false;
        }
    }
    return true;
}

/* -- copies --------------------------------------------------------------------------------------------------- */

static uint8_t source_room[ROOM + 2 * GUARD], target_room[ROOM + 2 * GUARD];

static void copy_once(uint64_t length, uint64_t target_shift, uint64_t source_shift, bool streaming) {
    uint8_t *target = target_room + GUARD + target_shift;
    const uint8_t *source = source_room + source_shift;
    memset(target_room, 0xee, GUARD + target_shift + length + GUARD);
    kvx_copy(target, source, length, streaming ? 0 : UINT64_MAX);
    CHECK(memcmp(target, source, length) == 0);
    CHECK(all(target_room, GUARD + target_shift, 0xee));
    CHECK(all(target + length, GUARD, 0xee));
}

static void check_copies(void) {
    static const uint64_t lengths[] = {0,    1,    15,   16,   63,    64,    65,    127,   128,   129,
                                       4095, 4096, 4097, 8191, 32767, 32768, 32769, 65536, 100003};
    static const uint64_t shifts[][2] = {{0, 0}, {1, 0}, {0, 1}, {63, 17}, {32, 32}, {16, 48}, {7, 9}};
    fill(source_room, sizeof(source_room));
    for (size_t i = 0; i < sizeof(lengths) / sizeof(*lengths); i++) {
        for (size_t j = 0; j < sizeof(shifts) / sizeof(*shifts); j++) {
            copy_once(lengths[i], shifts[j][0], shifts[j][1], true);
            copy_once(lengths[i], shifts[j][0], shifts[j][1], false);
        }
    }
    for (int i = 0; i < 200; i++) {
        copy_once(dice(50000), dice(64), dice(64), true);
    }
}

#define PIECES 300u

/* Pieces of all lengths that lie side by side in both rooms, in a shuffled order, at different distances. */
static void pieces_once(uint64_t longest, uint64_t nt_bytes_min) {
    kvx_piece pieces[PIECES] = {{0}};
    uint32_t count = 0;
    uint64_t from = dice(64), to = GUARD + dice(64);
    memset(target_room, 0xee, sizeof(target_room));
    for (; count < PIECES && from + longest < ROOM && to + longest < ROOM; count++) {
        uint64_t length = dice(4) == 0 ? longest : dice(longest + 1);
        pieces[count] = (kvx_piece){.to = target_room + to, .from = source_room + from, .length = length};
        from += length + dice(3) * dice(64);
        to += length + 1 + dice(3) * dice(64);
    }
    for (uint32_t i = count; i > 1; i--) {
        uint32_t j = (uint32_t)dice(i);
        kvx_piece kept = pieces[i - 1];
        pieces[i - 1] = pieces[j];
        pieces[j] = kept;
    }
    kvx_copy_pieces(pieces, count, nt_bytes_min);
    for (uint32_t i = 0; i < count; i++) {
        CHECK(memcmp(pieces[i].to, pieces[i].from, pieces[i].length) == 0);
        memset(pieces[i].to, 0xee, pieces[i].length);
    }
    CHECK(all(target_room, sizeof(target_room), 0xee)); /* nothing beside them was touched */
}

static void check_pieces(void) {
    static const uint64_t longest[] = {0, 5, 64, 200, 1024, 4096, 20000, 70000};
    for (size_t i = 0; i < sizeof(longest) / sizeof(*longest); i++) {
        for (int round = 0; round < 6; round++) {
            pieces_once(longest[i], 0);
            pieces_once(longest[i], longest[i] / 2);
        }
    }
}

static void check_copying(void) {
    check_copies();
    check_pieces();
#if defined(__x86_64__)
    void (*chosen_lanes)(const kvx_piece *, uint64_t) = copy_nt_lanes;
    void (*chosen_one)(uint8_t *, const uint8_t *, uint64_t) = copy_nt_one;
    copy_nt_lanes = copy_nt_lanes_sse2;
    copy_nt_one = copy_nt_one_sse2;
    check_pieces();
    if (__builtin_cpu_supports("avx2")) {
        copy_nt_lanes = copy_nt_lanes_avx2;
        copy_nt_one = copy_nt_one_avx2;
        check_pieces();
    }
    copy_nt_lanes = chosen_lanes;
    copy_nt_one = chosen_one;
#endif
}

/* -- checksums ------------------------------------------------------------------------------------------------ */

static uint32_t crc_plain(uint32_t seed, const uint8_t *bytes, uint64_t length) {
    uint32_t crc = ~seed;
    for (uint64_t i = 0; i < length; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++) {
            crc = (crc >> 1) ^ ((crc & 1) ? UINT32_C(0x82f63b78) : 0);
        }
    }
    return ~crc;
}

static void crc_once(uint32_t seed, const uint8_t *bytes, uint64_t length) {
    uint32_t expected = crc_plain(seed, bytes, length);
    CHECK(kvx_crc32c(seed, bytes, length) == expected);
    CHECK(~copy_crc_software(~seed, bytes, length) == expected);
#if defined(CRC_TARGET)
    if (crc_update != copy_crc_software) {
        CHECK(~copy_crc_hardware(~seed, bytes, length) == expected);
    }
#endif
    uint64_t shift = dice(64);
    memset(target_room, 0xee, GUARD + shift + length + GUARD);
    CHECK(kvx_copy_crc32c(seed, target_room + GUARD + shift, bytes, length) == expected);
    CHECK(memcmp(target_room + GUARD + shift, bytes, length) == 0);
    CHECK(all(target_room, GUARD + shift, 0xee) && all(target_room + GUARD + shift + length, GUARD, 0xee));
    CHECK(~copy_with_crc_plain(~seed, target_room + GUARD, bytes, length) == expected);
}

static void check_checksums(void) {
    static const uint64_t lengths[] = {0,   1,   7,   8,    9,    255,  256,  257,  511,  512,  513,
                                       767, 768, 769, 1023, 1024, 3071, 3072, 3073, 6144, 10007};
    uint8_t zeros[32] = {0}, ones[32];
    memset(ones, 0xff, sizeof(ones));
    CHECK(kvx_crc32c(0, "123456789", 9) == 0xe3069283u); /* the catalogue's check value, then RFC 3720, B.4 */
    CHECK(kvx_crc32c(0, zeros, 32) == 0x8a9136aau);
    CHECK(kvx_crc32c(0, ones, 32) == 0x62a8ab43u);
    for (size_t i = 0; i < sizeof(lengths) / sizeof(*lengths); i++) {
        for (uint64_t shift = 0; shift < 9; shift++) {
            crc_once((uint32_t)dice(UINT64_C(1) << 32), source_room + shift, lengths[i]);
        }
    }
    uint32_t first = kvx_crc32c(0, source_room, 5000);
    CHECK(kvx_crc32c(first, source_room + 5000, 3333) == kvx_crc32c(0, source_room, 8333));
}

/* -- authenticators ------------------------------------------------------------------------------------------- */

static void check_authenticators(void) {
    static const struct {
        uint64_t length;
        const char *hex;
    } vectors[] = {{0, "a3817f04ba25a8e66df67214c7550293"},
                   {7, "a1f1ebbed8dbc153c0b84aa61ff08239"},
                   {8, "3b62a9ba6258f5610f83e264f31497b4"},
                   {15, "5493e99933b0a8117e08ec0f97cfc3d9"},
                   {63, "5150d1772f50834a503e069a973fbd7c"}}; /* the reference vectors of SipHash-2-4-128 */
    uint8_t key[16], message[64], mac[16];
    for (uint8_t i = 0; i < 64; i++) {
        key[i % 16] = (uint8_t)(i % 16);
        message[i] = i;
    }
    for (size_t i = 0; i < sizeof(vectors) / sizeof(*vectors); i++) {
        char hex[33];
        kvx_mac(key, message, vectors[i].length, mac);
        for (size_t at = 0; at < sizeof(mac); at++) {
            snprintf(hex + 2 * at, 3, "%02x", mac[at]);
        }
        CHECK(strcmp(hex, vectors[i].hex) == 0);
        kvx_mac_state state; /* and in two pieces */
        uint8_t pieces[16];
        kvx_mac_init(&state, key);
        kvx_mac_update(&state, message, vectors[i].length / 3);
        kvx_mac_update(&state, message + vectors[i].length / 3, vectors[i].length - vectors[i].length / 3);
        kvx_mac_final(&state, pieces);
        CHECK(kvx_mac_equal(mac, pieces));
        pieces[i] ^= 1;
        CHECK(!kvx_mac_equal(mac, pieces));
    }
}

/* -- frames: the bytes on the wire are the same whatever the CPU's byte order, alignment or sign of char ----------- */

static void check_frames(void) {
    kvx_frame frame = {.type = KVX_FRAME_PUT,
                       .flags = KVX_FRAME_F_CHECK,
                       .segments = 1,
                       .op = UINT64_C(0x8877665544332211),
                       .grant = UINT64_C(0xf00dfacecafebeef),
                       .length = 4096};
    kvx_stream_auth auth = {{0}};
    uint8_t room[KVX_STREAM_HEADER_BYTES + KVX_STREAM_SEGMENT_BYTES + 1], key[16];
    fill(auth.nonces, sizeof(auth.nonces));
    fill(key, sizeof(key));
    uint8_t *head = room + 1;
    uint64_t length = sizeof(room) - 1;
    kvx_frame_encode(&frame, head);
    kvx_frame_segment_encode(head + KVX_STREAM_HEADER_BYTES, 0, 77, 4096);
    kvx_frame_seal(&auth, key, 3, KVX_STREAM_DIALLER, head, length);
    CHECK(kvx_frame_open(&auth, key, 3, KVX_STREAM_DIALLER, head, length));
    CHECK(!kvx_frame_open(&auth, key, 4, KVX_STREAM_DIALLER, head, length));
    CHECK(!kvx_frame_open(&auth, key, 3, KVX_STREAM_ACCEPTOR, head, length));
    bool little = false;
    static const uint8_t op[] = {0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88};
    for (uint64_t at = 0; at + sizeof(op) <= length; at++) {
        little = little || memcmp(head + at, op, sizeof(op)) == 0;
    }
    CHECK(little);
    for (uint64_t bit = 0; bit < length * 8; bit++) {
        head[bit / 8] ^= (uint8_t)(1u << bit % 8);
        CHECK(!kvx_frame_open(&auth, key, 3, KVX_STREAM_DIALLER, head, length));
        head[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
}

int main(int argc, char **argv) {
    bool chosen = false;
#if defined(CRC_TARGET)
    chosen = crc_update != copy_crc_software;
#endif
    if (argc > 1 && strcmp(argv[1], "need-kernels") == 0) {
        CHECK(chosen);
    }
    check_copying();
    check_checksums();
    check_authenticators();
    check_frames();
    printf("%lu checks, crc32c by %s\n", checks, chosen ? "the CPU" : "table");
    return 0;
}

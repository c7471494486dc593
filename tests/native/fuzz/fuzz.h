/* fuzz.h: one input, two ways to run it. With -DLIBFUZZER libFuzzer brings main() and makes inputs from coverage:
 * build.py compiles it, `make fuzz` runs it for long. Otherwise, where there is no libFuzzer (the emulator), main()
 * below makes random ones from a seed: fuzz_x SECONDS SEED. Either way fuzz_x FILE... runs inputs that were found
 * before. */
#ifndef KVX_FUZZ_H
#define KVX_FUZZ_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define FUZZ_CHECK(condition)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

/* The core's, which is not linked here. */
_Noreturn void kvx_panic(const char *condition, const char *file, int line);
_Noreturn void kvx_panic(const char *condition, const char *file, int line) {
    fprintf(stderr, "%s:%d: %s\n", file, line, condition);
    abort();
}

static inline uint64_t fuzz_random(uint64_t *state) {
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

#ifndef LIBFUZZER
#define FUZZ_INPUT_MAX 4096

static int fuzz_file(const char *path) {
    static uint8_t data[1 << 20];
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        perror(path);
        return 1;
    }
    size_t size = fread(data, 1, sizeof data, file);
    fclose(file);
    return LLVMFuzzerTestOneInput(data, size);
}

int main(int argc, char **argv) {
    char *end;
    double seconds = argc > 1 ? strtod(argv[1], &end) : 2;
    if (argc > 1 && *end != '\0') {
        for (int i = 1; i < argc; i++) {
            if (fuzz_file(argv[i]) != 0) {
                return 1;
            }
        }
        return 0;
    }
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1, rounds = 0;
    struct timespec begun, now;
    clock_gettime(CLOCK_MONOTONIC, &begun);
    do {
        uint64_t state = seed + rounds;
        uint8_t data[FUZZ_INPUT_MAX];
        size_t size = fuzz_random(&state) % (fuzz_random(&state) % 8 == 0 ? FUZZ_INPUT_MAX : 400);
        for (size_t i = 0; i < size; i++) {
            data[i] = (uint8_t)fuzz_random(&state);
        }
        LLVMFuzzerTestOneInput(data, size);
        rounds++;
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((double)(now.tv_sec - begun.tv_sec) + (double)(now.tv_nsec - begun.tv_nsec) / 1e9 < seconds);
    printf("%llu inputs\n", (unsigned long long)rounds);
    return 0;
}
#endif

#endif

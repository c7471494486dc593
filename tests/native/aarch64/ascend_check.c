/* ascend_check.c: our own way to CANN's libraries (kvxfer/native/ascend*), without Python, over the simulated ones.
 *
 *     KVXFER_CANN_LIBDIR=... ascend_check TOOLKIT PORT PORT
 *
 * Two cards and two engines in one process; what one card holds is written to the other and read back. What it shows on
 * another architecture: mangled names, sizes of structures, how arguments are passed, exceptions' frames. Nothing about
 * hardware. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ascend/ascend.h"
#include "status.h"

#define BLOCK  (UINT64_C(64) << 10)
#define LENGTH (UINT64_C(4) << 20)
#define BLOCKS 3

static const kvx_ascend_api *api;
static uint32_t raw;

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s (vendor status %u: %s)\n", __FILE__, __LINE__, #condition, raw,                 \
                    api != NULL ? api->last_error() : "");                                                             \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* One card with memory, and an engine that others can connect to. */
typedef struct node {
    int32_t device;
    char local[32];
    void *engine, *memory, *handle;
} node;

static void node_open(node *n, int32_t device, const char *port) {
    static const kvx_ascend_option options[] = {{"BufferPool", "0:0"}};
    char why[512] = "";
    uint64_t free_bytes = 0, total_bytes = 0;
    int32_t physical = -1;
    n->device = device;
    snprintf(n->local, sizeof(n->local), "127.0.0.1:%s", port);
    CHECK(api->device_use(device, &raw) == KVX_OK);
    CHECK(api->device_info(device, &free_bytes, &total_bytes, &raw) == KVX_OK);
    CHECK(free_bytes > LENGTH && total_bytes >= free_bytes);
    CHECK(api->device_healthy(device, &raw) == KVX_OK);
    CHECK(api->device_physical(device, &physical, &raw) == KVX_OK && physical >= 0);
    CHECK(api->mem_alloc(device, KVX_ASCEND_DEVICE, LENGTH, &n->memory, &raw) == KVX_OK);
    CHECK((uintptr_t)n->memory % KVX_ASCEND_ALIGNMENT == 0);
    CHECK(api->engine_open(device, n->local, options, 1, &n->engine, &raw, why, sizeof(why)) == KVX_OK);
    CHECK(api->mem_register(n->engine, n->memory, LENGTH, KVX_ASCEND_DEVICE, &n->handle, &raw) == KVX_OK);
}

static void node_close(node *n) {
    CHECK(api->mem_deregister(n->engine, n->handle, &raw) == KVX_OK);
    CHECK(api->engine_close(n->engine, &raw) == KVX_OK);
    CHECK(api->mem_free(n->device, KVX_ASCEND_DEVICE, n->memory, &raw) == KVX_OK);
}

/* What became of a batch. */
static int transfer(const node *from, const node *to, bool write, uint64_t remote_offset) {
    kvx_ascend_op ops[BLOCKS];
    for (uint64_t i = 0; i < BLOCKS; i++) {
        ops[i] = (kvx_ascend_op){.local = (uint64_t)(uintptr_t)from->memory + 2 * i * BLOCK,
                                 .remote = (uint64_t)(uintptr_t)to->memory + remote_offset + i * BLOCK,
                                 .length = BLOCK};
    }
    void *request = NULL;
    int status = api->submit(from->engine, to->local, write, ops, BLOCKS, &request, &raw);
    for (int left = 20000; status == KVX_OK; left--) {
        int polled = api->poll(from->engine, request, &raw);
        if (polled != KVX_PENDING) {
            return polled;
        }
        CHECK(left > 0);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    return status;
}

static void put(const node *n, uint64_t offset, const uint8_t *bytes, uint64_t length) {
    CHECK(api->copy(n->device, (uint8_t *)n->memory + offset, bytes, length, &raw) == KVX_OK);
}

static void expect(const node *n, uint64_t offset, const uint8_t *bytes, uint64_t length) {
    static uint8_t seen[LENGTH];
    CHECK(api->copy(n->device, seen, (uint8_t *)n->memory + offset, length, &raw) == KVX_OK);
    CHECK(memcmp(seen, bytes, length) == 0);
}

static void there_and_back(const node *here, const node *there) {
    static uint8_t pattern[BLOCKS * BLOCK], zeros[LENGTH];
    for (uint64_t i = 0; i < sizeof(pattern); i++) {
        pattern[i] = (uint8_t)(i * 31 + i / BLOCK + 1);
    }
    put(there, 0, zeros, LENGTH);
    put(here, 0, zeros, LENGTH);
    for (uint64_t i = 0; i < BLOCKS; i++) {
        put(here, 2 * i * BLOCK, pattern + i * BLOCK, BLOCK);
    }
    CHECK(transfer(here, there, true, BLOCK) == KVX_E_PEER_LOST);
    CHECK(api->connect(here->engine, there->local, 5000, &raw) == KVX_OK);
    CHECK(transfer(here, there, true, BLOCK) == KVX_OK);
    expect(there, 0, zeros, BLOCK);
    expect(there, BLOCK, pattern, sizeof(pattern));
    expect(there, BLOCK + sizeof(pattern), zeros, LENGTH - BLOCK - sizeof(pattern));
    put(here, 0, zeros, LENGTH);
    CHECK(transfer(here, there, false, BLOCK) == KVX_OK);
    for (uint64_t i = 0; i < BLOCKS; i++) {
        expect(here, 2 * i * BLOCK, pattern + i * BLOCK, BLOCK);
    }
    int status = transfer(here, there, true, LENGTH); /* outside: the link is dead until it is made anew */
    CHECK(status != KVX_OK && kvx_ascend_latches(raw));
    CHECK(api->disconnect(here->engine, there->local, 5000, &raw) == KVX_OK);
    CHECK(api->connect(here->engine, there->local, 5000, &raw) == KVX_OK);
    CHECK(transfer(here, there, true, BLOCK) == KVX_OK);
    CHECK(api->disconnect(here->engine, there->local, 5000, &raw) == KVX_OK);
}

int main(int argc, char **argv) {
    char why[4096] = "";
    node here = {0}, there = {0};
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc != 4) {
        return 2;
    }
    api = kvx_ascend_get(why, sizeof(why));
    if (api == NULL) {
        fprintf(stderr, "%s\n", why);
        return 1;
    }
    CHECK(api->abi_version == KVX_ASCEND_ABI_VERSION && api->struct_size == sizeof(*api));
    CHECK(strcmp(api->facts.toolkit, argv[1]) == 0);
    CHECK(api->facts.devices >= 2);
    node_open(&here, 0, argv[2]);
    node_open(&there, 1, argv[3]);
    there_and_back(&here, &there);
    node_close(&here);
    node_close(&there);
    printf("%s%s, toolkit %s: written, read, refused, connected anew\n", api->facts.soc,
           api->facts.simulated ? " (simulated)" : "", api->facts.toolkit);
    return 0;
}

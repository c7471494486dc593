/* vault.c: see vault.h. Sizes are powers of two from chunks of their own; what is larger has a mapping to itself.
 * Chunks are kept: grants and connections come and go all the time. Under the sanitizers it is plain memory, so that
 * they see what is used after it was given back. */
#define _GNU_SOURCE
#include "core/vault.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "transport.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define PLAIN_MEMORY
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define PLAIN_MEMORY
#endif

#ifdef PLAIN_MEMORY

void *kvx_vault_take(size_t bytes) {
    return calloc(1, bytes);
}

void kvx_vault_give(void *memory) {
    free(memory);
}

#else

#define SHIFT_MIN   7 /* 128 bytes */
#define SHIFT_MAX   15
#define CHUNK_BYTES ((size_t)256 << 10)
#define PAGE_BYTES  ((size_t)4096) /* mappings are rounded up by the kernel to its own */
#define MARK        UINT32_C(0x6b657973)

/* Before each piece; also what links those that are free. */
typedef struct header {
    struct header *next;
    uint32_t mark;
    uint32_t shift; /* 0: a mapping to itself */
    size_t bytes;   /* of all that was ever written, with this header; of a mapping, all of it */
    size_t padding;
} header;
_Static_assert(sizeof(header) % 16 == 0, "what follows is aligned");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static header *free_pieces[SHIFT_MAX + 1];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void vault_before_fork(void) {
    pthread_mutex_lock(&lock);
}

static void vault_after_fork(void) {
    pthread_mutex_unlock(&lock);
}

static void vault_setup(void) {
    (void)pthread_atfork(vault_before_fork, vault_after_fork,
                         vault_after_fork); /* a child may give back what it inherited */
}

static void *vault_map_pages(size_t bytes) {
    void *made = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) {
        return NULL;
    }
    (void)madvise(made, bytes, MADV_DONTDUMP); /* a kernel without it is older than what we run on */
    return made;
}

/* With the lock held: pieces of a new chunk. */
static bool vault_carve_chunk(uint32_t shift) {
    uint8_t *chunk = vault_map_pages(CHUNK_BYTES);
    for (size_t at = 0; chunk != NULL && at < CHUNK_BYTES; at += (size_t)1 << shift) {
        header *piece = (header *)(chunk + at);
        piece->next = free_pieces[shift];
        free_pieces[shift] = piece;
    }
    return chunk != NULL;
}

static header *vault_alloc_large(size_t bytes) {
    size_t whole = (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    header *piece = whole < bytes ? NULL : vault_map_pages(whole);
    if (piece != NULL) {
        *piece = (header){.bytes = whole};
    }
    return piece;
}

static header *vault_alloc_small(uint32_t shift, size_t bytes) {
    pthread_mutex_lock(&lock);
    header *piece = free_pieces[shift] != NULL || vault_carve_chunk(shift) ? free_pieces[shift] : NULL;
    if (piece != NULL) {
        free_pieces[shift] = piece->next;
        *piece = (header){.shift = shift, .bytes = bytes};
    }
    pthread_mutex_unlock(&lock);
    return piece;
}

void *kvx_vault_take(size_t bytes) {
    if (bytes > SIZE_MAX - sizeof(header) - PAGE_BYTES) {
        return NULL;
    }
    pthread_once(&once, vault_setup);
    bytes += sizeof(header);
    uint32_t shift = SHIFT_MIN;
    while (shift <= SHIFT_MAX && (size_t)1 << shift < bytes) {
        shift++;
    }
    header *piece = shift > SHIFT_MAX ? vault_alloc_large(bytes) : vault_alloc_small(shift, bytes);
    if (piece == NULL) {
        return NULL;
    }
    piece->mark = MARK;
    return piece + 1;
}

void kvx_vault_give(void *memory) {
    if (memory == NULL) {
        return;
    }
    header *piece = (header *)memory - 1;
    KVX_ASSERT(piece->mark == MARK); /* given back once, and taken here */
    uint32_t shift = piece->shift;
    if (shift == 0) {
        munmap(piece, piece->bytes);
        return;
    }
    explicit_bzero(piece, piece->bytes);
    pthread_mutex_lock(&lock);
    piece->next = free_pieces[shift];
    free_pieces[shift] = piece;
    pthread_mutex_unlock(&lock);
}

#endif

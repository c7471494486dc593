/* pages.h: what the pages of this process allow, as the kernel's list of its mappings says. */
#ifndef KVX_PAGES_H
#define KVX_PAGES_H

#include <stdbool.h>
#include <stdint.h>

typedef enum kvx_pages_found {
    KVX_PAGES_FINE,
    KVX_PAGES_HOLE,    /* nothing is mapped at *where_p */
    KVX_PAGES_REFUSED, /* what is mapped at *where_p allows no such access */
    KVX_PAGES_UNKNOWN  /* the list could not be read; errno says why */
} kvx_pages_found;

/* May bytes [address, address + length) be read, and also written? The answer is of now: who takes the right away later
 * (mprotect) or shortens a mapped file is not seen. */
kvx_pages_found kvx_pages_allow(uint64_t address, uint64_t length, bool write, uint64_t *where_p);

#endif

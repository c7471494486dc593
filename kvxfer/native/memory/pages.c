/* pages.c: see pages.h. */
#define _GNU_SOURCE
#include "memory/pages.h"

#include <stdio.h>
#include <stdlib.h>

/* "7f12a000-7f13b000 rw-p ..."; the list is in order of addresses. False: not such a line. */
static bool pages_parse_line(const char *line, uint64_t *begin_p, uint64_t *end_p, const char **rights_p) {
    char *at;
    *begin_p = strtoull(line, &at, 16);
    if (at == line || *at != '-') {
        return false;
    }
    const char *second = at + 1;
    *end_p = strtoull(second, &at, 16);
    *rights_p = at + 1;
    return at != second && *at == ' ' && at[1] != '\0' && at[2] != '\0';
}

static kvx_pages_found pages_scan(FILE *list, uint64_t address, uint64_t length, bool write, uint64_t *where_p) {
    kvx_pages_found found = KVX_PAGES_HOLE;
    uint64_t at = address, begin, end, last = address + length - 1;
    char *line = NULL;
    const char *rights;
    size_t size = 0;
    while (getline(&line, &size, list) > 0) {
        if (!pages_parse_line(line, &begin, &end, &rights) || end <= at) {
            continue;
        }
        if (begin > at) {
            break;
        }
        if (rights[0] != 'r' || (write && rights[1] != 'w')) {
            found = KVX_PAGES_REFUSED;
            break;
        }
        at = end;
        if (last < end) {
            found = KVX_PAGES_FINE;
            break;
        }
    }
    free(line);
    *where_p = at;
    return found == KVX_PAGES_HOLE && ferror(list) ? KVX_PAGES_UNKNOWN : found;
}

kvx_pages_found kvx_pages_allow(uint64_t address, uint64_t length, bool write, uint64_t *where_p) {
    FILE *list = fopen("/proc/self/maps", "re");
    if (list == NULL) {
        return KVX_PAGES_UNKNOWN;
    }
    kvx_pages_found found = pages_scan(list, address, length, write, where_p);
    fclose(list);
    return found;
}

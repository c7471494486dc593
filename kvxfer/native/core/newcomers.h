/* newcomers.h: incoming connections that have proved nothing yet, and which of them goes when there are too many.
 *
 * A listener never stops to take connections in: the oldest newcomer of the address that has most of them makes room
 * for the next one. Who opens many displaces its own; an honest peer at another address is not touched, and one at the
 * same address has the time that it takes to open as many again. */
#ifndef KVX_NEWCOMERS_H
#define KVX_NEWCOMERS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

#define KVX_NEWCOMERS_MAX 256 /* of one listener, or an eighth of the descriptors if that is less */
#define KVX_NEWCOMERS_MIN 32  /* as many as one peer may open at once */

typedef struct kvx_newcomer {
    struct kvx_newcomer *next, *previous;
    uint32_t source; /* a hash of the address that it comes from */
    bool waits;      /* it is in the line */
} kvx_newcomer;

/* In the order of their arrival. Whoever has several threads locks it. */
typedef struct kvx_newcomers {
    kvx_newcomer *first, *last;
    uint32_t count, max;
    uint64_t salt;
} kvx_newcomers;

void kvx_newcomers_init(kvx_newcomers *line);
/* `address` NULL: all such have one source. */
void kvx_newcomers_add(kvx_newcomers *line, kvx_newcomer *one, const struct sockaddr_storage *address);
/* Harmless when it is not in the line. */
void kvx_newcomers_remove(kvx_newcomers *line, kvx_newcomer *one);
/* Who has to go before another one comes in; NULL: there is room. */
kvx_newcomer *kvx_newcomers_surplus(const kvx_newcomers *line);
/* Who goes when descriptors ran out; NULL: the line is empty. */
kvx_newcomer *kvx_newcomers_oldest(const kvx_newcomers *line);
/* How many connections of `wanted` there may be, when all together take at most one descriptor of `share`. */
uint32_t kvx_connections_max(uint64_t wanted, uint32_t share);

#endif

/* vault.h: memory for what has a key or a secret in it. The kernel leaves it out of core dumps (MADV_DONTDUMP), and it
 * is zeros again as soon as it is given back. Safe from any thread. */
#ifndef KVX_VAULT_H
#define KVX_VAULT_H

#include <stddef.h>

/* Zeros, aligned to 16; NULL: out of memory. */
void *kvx_vault_take(size_t bytes);
void kvx_vault_give(void *memory); /* or NULL */

#endif

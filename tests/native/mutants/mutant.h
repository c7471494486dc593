/* mutant.h: what the deliberate bugs of mutations.py need; in every file of the engine that one of them changes. */
#ifndef KVX_MUTANT_H
#define KVX_MUTANT_H

#define _GNU_SOURCE /* some of them ask for it, in the first line that they had */

#include "transport.h"

/* Is this the bug that the process plays? KVXFER_TEST_MUTATION names it. */
bool kvx_mutant(const char *name);
/* An op of its own that moves the same bytes, whose end nobody hears of: what is left behind by an op that is reported
 * as over while its bytes still move. Never freed. */
kvx_op *kvx_mutant_ghost(const kvx_op *op);

#endif

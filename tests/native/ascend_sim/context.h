/* context.h: what the parts of libacl_rt.so share: threads' contexts, copies, streams. */
#ifndef KVXSIM_CONTEXT_H
#define KVXSIM_CONTEXT_H

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "state.h"

#define ACL_API extern "C" __attribute__((visibility("default")))

namespace kvxsim {

struct Context {
    int card;
    bool is_default;
};

bool initialised();
/* The context of this thread, or NULL: then the caller answers no_context(). */
Context *current();
int no_context(const char *what);
int refuse(int status, const char *what);
/* Checks what every call checks: aclInit, a context, a card that is not lost, KVXFER_SIM_FAIL. 0: go on. */
int enter(const char *operation);

/* One copy, resolved: where the simulator reads and writes, and what must stay allocated meanwhile. */
struct Copy {
    uint8_t *target;
    const uint8_t *source;
    uint64_t length;
    uint32_t rows[2], generations[2]; /* of target and source */
    bool watched[2];
    int cards[2]; /* -1: host */
};

/* kind: aclrtMemcpyKind. 0, or an aclError with the message set. */
int resolve(void *target, const void *source, uint64_t length, int kind, Copy *copy_p);
/* Does it, in pieces; a piece whose memory was freed meanwhile is a fault. `stop`, when not NULL, ends it half-way. */
int perform(const Copy &copy, const std::atomic<bool> *stop);

bool peer_enabled(int card, int other);

} // namespace kvxsim

#endif

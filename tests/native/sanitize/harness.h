/* harness.h: one owner thread drives several engines and keeps a ledger of every token that it was given.
 *
 * The idea: whatever a scenario does, the ledger knows which tokens are live, so "every accepted token completes
 * exactly once" is checked on each event, not by a test of its own. Waits have deadlines, and a deadline that passes is
 * a failure. */
#ifndef HARNESS_H
#define HARNESS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "api.h"

#define TOKENS_MAX  65536 /* live at once, a power of two */
#define DEADLINE_MS 30000
#define LANES                                                                                                          \
    64 /* equal parts of every region. Two live transfers never share one: that would be a race of the caller's */

typedef struct token_slot {
    uint64_t token; /* 0 = free */
    bool completed;
    int lane; /* that it holds, -1 = none */
    kvx_event event;
} token_slot;

typedef struct side {
    kvx_engine *engine;
    char name[16];
    uint32_t transport; /* index of the one under test */
    char endpoint[KVX_ENDPOINT_MAX];
    uint8_t secret[KVX_SECRET_BYTES]; /* that goes with it, when `caps` say so */
    uint32_t caps;
    int32_t card; /* whose memory its places have, -1 = none */
    bool faulty;  /* operations may hang on purpose until they are cancelled */
    bool lane_busy[LANES];
    uint64_t live; /* tokens */
    uint64_t completed;
    uint64_t cancelled;
    uint64_t failed;
    uint64_t notified;      /* NOTIFY events */
    uint64_t notified_last; /* value of the last one */
    uint64_t peers_down;
    uint64_t grants_lost;
    token_slot slots[TOKENS_MAX];
} side;

/* A span of an engine's memory and the grant that lets the other side in. */
typedef struct place {
    kvx_region_info region;
    kvx_grant_info grant;
    void *allocated; /* to free, when the memory is ours */
    kvx_engine *engine;
} place;

extern uint64_t harness_seed;

_Noreturn void harness_fail(const char *file, int line, const char *format, ...) __attribute__((format(printf, 3, 4)));
#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            harness_fail(__FILE__, __LINE__, "%s", #condition);                                                        \
    } while (0)
#define CHECK_STATUS(wanted, call)                                                                                     \
    do {                                                                                                               \
        int got_ = (call);                                                                                             \
        if (got_ != (wanted))                                                                                          \
            harness_fail(__FILE__, __LINE__, "%s is %s, not %s", #call, kvx_status_name(got_),                         \
                         kvx_status_name(wanted));                                                                     \
    } while (0)

uint64_t now_ms(void);
uint64_t dice(uint64_t sides); /* seeded: 0 .. sides-1 */

/* `transport`: "tcp", "fault+tcp", or "tcp@encrypted" */
void side_open(side *s, const char *name, const char *transport, const char *socket_dir);
const uint8_t *side_secret(const side *s); /* NULL when it does not encrypt */
void side_close(side *s);                  /* stops, checks that every token has its event, closes */
void side_pump(side *const *sides, size_t count, int timeout_ms);
void side_track(side *s, uint64_t token); /* a call returned this token */
int side_lane(const side *s);             /* a random free lane, -1 when all are busy */
void side_track_lane(side *s, uint64_t token, int lane);
kvx_event side_wait(side *const *sides, size_t count, side *s, uint64_t token); /* also forgets it */
void side_settle(side *const *sides, size_t count);                             /* until no token is live on any side */
bool side_forget_completed(side *s, uint64_t token, kvx_event *event_p);

void place_alloc(side *s, place *p, uint64_t length);    /* with cards: a card's memory */
void place_register(side *s, place *p, uint64_t length); /* of our own; with cards: pinned */
void place_grant(side *s, place *p, uint32_t access);
uint8_t *place_bytes(const place *p);
kvx_remote place_remote(const place *p);
void place_free(side *s, place *p, side *const *sides, size_t count);
void place_forget(place *p); /* after its engine was closed */

/* Fill and compare word by word. Order between two engines comes from a socket or a shared mapping, which the thread
 * sanitizer cannot follow inside one process, so these two functions alone are not instrumented. */
void pattern_fill(uint8_t *bytes, uint64_t length, uint64_t seed);
bool pattern_holds(const uint8_t *bytes, uint64_t length, uint64_t seed);
bool pattern_holds_at(const uint8_t *bytes, uint64_t offset, uint64_t length, uint64_t seed);
/* The same with memory that only a driver touches. */
void place_fill(const place *p, uint64_t length, uint64_t seed);
bool place_holds(const place *p, uint64_t length, uint64_t seed);

/* Scenarios, each in its own file. */
void scenario_roundtrip(const char *transport, const char *dir);
void scenario_storm(const char *transport, const char *dir, int rounds);
void scenario_close(const char *transport, const char *dir, int rounds);
void scenario_ends(const char *transport, const char *dir, int rounds);
void scenario_kill(const char *transport, const char *dir, int rounds, const char *self);
void scenario_hostile(const char *transport, const char *dir, int rounds);
void scenario_device(const char *transport, const char *dir, int rounds);
int kill_child(const char *transport, const char *dir, const char *role);

#endif

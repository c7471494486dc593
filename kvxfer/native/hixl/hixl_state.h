/* hixl_state.h: what may be done with one link of the vendor's library, and when. Pure: no clock, no thread, no vendor.
 *
 * The library's connect and disconnect may block for ever whatever time they are given, so both are calls in threads
 * that we can do without. The machine knows whether such a call is out; while it is, nothing else is asked of this
 * link. A call that overruns its time leaves the link a zombie until it returns, however late.
 *
 *   DOWN --want--> CONNECTING --returned ok--> UP --fail--> DRAINING --returned--> DOWN
 *                  |  |                                     |
 *                  |  `-- too late --> ZOMBIE <- too late --'
 *                  `-- failed, or no answer to the ping --> DOWN, wanted again after a pause that doubles
 */
#ifndef KVX_HIXL_STATE_H
#define KVX_HIXL_STATE_H

#include <stdbool.h>
#include <stdint.h>

#define HIXL_BACKOFF_MIN_MS 100
#define HIXL_BACKOFF_MAX_MS 5000

typedef enum hixl_state {
    HIXL_DOWN = 0,
    HIXL_CONNECTING = 1, /* the peer is being asked whether it is well, then the connect is out */
    HIXL_UP = 2,
    HIXL_DRAINING = 3, /* the disconnect is out: what was under way ends when it returns */
    HIXL_ZOMBIE = 4    /* a call is out that should have returned */
} hixl_state;

/* What the caller has to do now. A set: several at once are possible. */
enum hixl_todo {
    HIXL_DO_PING = 1,       /* ask the peer whether it is well; tell kvx_hixl_machine_pong */
    HIXL_DO_CONNECT = 2,    /* start a connect; tell kvx_hixl_machine_returned */
    HIXL_DO_DISCONNECT = 4, /* likewise a disconnect */
    HIXL_DO_REFUSE = 8,     /* what waits for the link fails: machine->refusal says why */
    HIXL_DO_SETTLE = 16     /* nothing that was submitted moves any more */
};

typedef struct hixl_machine {
    hixl_state state;
    bool asks_first;  /* a ping goes before each connect */
    bool pinging;     /* CONNECTING: the answer is awaited, no call is out */
    bool disconnects; /* the call that is out is a disconnect */
    bool unsettled;   /* something may have been submitted since the last disconnect */
    bool paused;      /* DOWN: not to be wanted before retry_ms */
    bool again;       /* DRAINING: the disconnect failed and is due again, no call is out */
    bool broken;      /* the disconnect was made because the link failed: pause before the next connect */
    int refusal;      /* a kvx_status */
    uint32_t backoff_ms;
    uint64_t due_ms;   /* CONNECTING, DRAINING: when the patience ends */
    uint64_t retry_ms; /* DOWN: not before */
    uint32_t ping_ms, connect_ms, disconnect_ms;
    uint64_t zombies; /* how often it became one */
} hixl_machine;

void kvx_hixl_machine_init(hixl_machine *machine, bool asks_first, uint32_t ping_ms, uint32_t connect_ms,
                           uint32_t disconnect_ms);
/* Somebody wants the link. May be called at any time and any number of times. `refused`: the process has too many
 * zombies. */
uint32_t kvx_hixl_machine_want(hixl_machine *machine, uint64_t now_ms, bool refused);
uint32_t kvx_hixl_machine_pong(hixl_machine *machine, uint64_t now_ms, int status);
/* The call that was out returned. */
uint32_t kvx_hixl_machine_returned(hixl_machine *machine, uint64_t now_ms, int status);
/* The link is no good any more (`broken`), or has to be made anew, or is not wanted. Does nothing unless it is UP. */
uint32_t kvx_hixl_machine_fail(hixl_machine *machine, uint64_t now_ms, bool broken);
/* Something went through: the next failure starts with a short pause again. */
void kvx_hixl_machine_good(hixl_machine *machine);
/* Time has passed. */
uint32_t kvx_hixl_machine_time(hixl_machine *machine, uint64_t now_ms);
/* When _time has to be called next; 0 = no need. `wanted`: somebody waits for the link. */
uint64_t kvx_hixl_machine_due(const hixl_machine *machine, bool wanted);
/* A call is out, so the machine may not be freed. */
bool kvx_hixl_machine_out(const hixl_machine *machine);

#endif

/* hixl_state.c: see hixl_state.h. */
#include "hixl/hixl_state.h"

#include <stddef.h>
#include <string.h>

#include "status.h"

void kvx_hixl_machine_init(hixl_machine *machine, bool asks_first, uint32_t ping_ms, uint32_t connect_ms,
                           uint32_t disconnect_ms) {
    memset(machine, 0, sizeof *machine);
    machine->asks_first = asks_first;
    machine->ping_ms = ping_ms;
    machine->connect_ms = connect_ms;
    machine->disconnect_ms = disconnect_ms;
}

static uint32_t hixl_state_call_connect(hixl_machine *machine, uint64_t now_ms) {
    machine->pinging = false;
    machine->disconnects = false;
    machine->due_ms = now_ms + machine->connect_ms;
    return HIXL_DO_CONNECT;
}

static uint32_t hixl_state_call_disconnect(hixl_machine *machine, uint64_t now_ms) {
    machine->state = HIXL_DRAINING;
    machine->disconnects = true;
    machine->again = false;
    machine->due_ms = now_ms + machine->disconnect_ms;
    return HIXL_DO_DISCONNECT;
}

static void hixl_state_backoff_grow(hixl_machine *machine) {
    uint32_t doubled = machine->backoff_ms * 2;
    machine->backoff_ms = machine->backoff_ms == 0        ? HIXL_BACKOFF_MIN_MS
                          : doubled > HIXL_BACKOFF_MAX_MS ? HIXL_BACKOFF_MAX_MS
                                                          : doubled;
}

/* Down, and not to be tried again at once. */
static void hixl_state_enter_backoff(hixl_machine *machine, uint64_t now_ms) {
    machine->state = HIXL_DOWN;
    machine->pinging = false;
    hixl_state_backoff_grow(machine);
    machine->paused = true;
    machine->retry_ms = now_ms + machine->backoff_ms;
}

static uint32_t hixl_state_enter_refused(hixl_machine *machine, int status) {
    machine->refusal = status;
    return HIXL_DO_REFUSE;
}

uint32_t kvx_hixl_machine_want(hixl_machine *machine, uint64_t now_ms, bool refused) {
    if (machine->state == HIXL_ZOMBIE) {
        return hixl_state_enter_refused(machine, KVX_E_TIMEOUT);
    }
    if (machine->state != HIXL_DOWN || (machine->paused && now_ms < machine->retry_ms)) {
        return 0;
    }
    if (refused) {
        return hixl_state_enter_refused(machine, KVX_E_LINK);
    }
    machine->paused = false;
    machine->state = HIXL_CONNECTING;
    if (!machine->asks_first) {
        return hixl_state_call_connect(machine, now_ms);
    }
    machine->pinging = true;
    machine->due_ms = now_ms + machine->ping_ms;
    return HIXL_DO_PING;
}

uint32_t kvx_hixl_machine_pong(hixl_machine *machine, uint64_t now_ms, int status) {
    if (machine->state != HIXL_CONNECTING || !machine->pinging) {
        return 0;
    }
    if (status == KVX_OK) {
        return hixl_state_call_connect(machine, now_ms);
    }
    hixl_state_enter_backoff(machine, now_ms);
    return hixl_state_enter_refused(machine, status);
}

static uint32_t hixl_state_on_connect_returned(hixl_machine *machine, uint64_t now_ms, int status) {
    if (status == KVX_OK) {
        machine->state = HIXL_UP;
        machine->unsettled = true;
        return 0;
    }
    if (status == KVX_E_BUSY) { /* connected already: by whom, and with which memory? */
        return hixl_state_call_disconnect(machine, now_ms);
    }
    hixl_state_enter_backoff(machine, now_ms);
    return hixl_state_enter_refused(machine, status);
}

static uint32_t hixl_state_on_disconnect_returned(hixl_machine *machine, uint64_t now_ms, int status) {
    if (status != KVX_OK && status != KVX_E_PEER_LOST) { /* neither disconnected nor not connected: ask again */
        machine->state = HIXL_DRAINING;
        machine->again = true;
        hixl_state_backoff_grow(machine);
        machine->due_ms = now_ms + machine->backoff_ms;
        bool lost = status == KVX_E_DEVICE || status == KVX_E_NO_CONTEXT || status == KVX_E_NO_DEVICE;
        return lost ? hixl_state_enter_refused(machine, KVX_E_DEVICE)
                    : 0; /* what has not begun need not wait for the card */
    }
    bool settles = machine->unsettled;
    if (machine->broken || machine->state == HIXL_ZOMBIE) {
        hixl_state_enter_backoff(machine, now_ms);
    }
    machine->state = HIXL_DOWN;
    machine->broken = machine->unsettled = false;
    return settles ? HIXL_DO_SETTLE : 0;
}

uint32_t kvx_hixl_machine_returned(hixl_machine *machine, uint64_t now_ms, int status) {
    if (!kvx_hixl_machine_out(machine)) {
        return 0;
    }
    if (machine->disconnects) {
        return hixl_state_on_disconnect_returned(machine, now_ms, status);
    }
    if (machine->state == HIXL_CONNECTING) {
        return hixl_state_on_connect_returned(machine, now_ms, status);
    }
    if (status == KVX_OK || status == KVX_E_BUSY) {
        return hixl_state_call_disconnect(machine, now_ms); /* up after all, when everybody has gone */
    }
    hixl_state_enter_backoff(machine, now_ms);
    return 0;
}

uint32_t kvx_hixl_machine_fail(hixl_machine *machine, uint64_t now_ms, bool broken) {
    if (machine->state != HIXL_UP) {
        return 0;
    }
    machine->broken = broken;
    return hixl_state_call_disconnect(machine, now_ms);
}

void kvx_hixl_machine_good(hixl_machine *machine) {
    machine->backoff_ms = 0;
}

uint32_t kvx_hixl_machine_time(hixl_machine *machine, uint64_t now_ms) {
    if ((machine->state != HIXL_CONNECTING && machine->state != HIXL_DRAINING) || now_ms < machine->due_ms) {
        return 0;
    }
    if (machine->pinging) {
        hixl_state_enter_backoff(machine, now_ms);
        return hixl_state_enter_refused(machine, KVX_E_TIMEOUT);
    }
    if (machine->again) {
        return hixl_state_call_disconnect(machine, now_ms);
    }
    machine->state = HIXL_ZOMBIE;
    machine->zombies++;
    return hixl_state_enter_refused(machine, KVX_E_TIMEOUT);
}

uint64_t kvx_hixl_machine_due(const hixl_machine *machine, bool wanted) {
    switch (machine->state) {
    case HIXL_CONNECTING:
    case HIXL_DRAINING:
        return machine->due_ms;
    case HIXL_DOWN:
        return wanted && machine->paused ? machine->retry_ms : 0;
    default:
        return 0;
    }
}

bool kvx_hixl_machine_out(const hixl_machine *machine) {
    return (machine->state == HIXL_CONNECTING && !machine->pinging) ||
           (machine->state == HIXL_DRAINING && !machine->again) || machine->state == HIXL_ZOMBIE;
}

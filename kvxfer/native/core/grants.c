/* grants.c: the owner's side. Who may reach what, who is reaching it now, and when a revoked grant is quiet.
 *
 * A revoked grant is quiet when every transport said so (a bit each in not_quiet) and no kvx_access is open. The hold
 * bit keeps the box while mem_release is still being called on the slots: the first of them may answer from another
 * thread at once. */
#include "core/core.h"
#include "list.h"
#include "core/vault.h"

#include <stdlib.h>
#include <string.h>

static void grants_update_gauges(kvx_core *core) {
    KVX_GAUGE(core, grants, core->grants.count);
}

static void grants_box_free(grant_box *box) {
    kvx_blocks_free(box->grant.blocks);
    kvx_vault_give(box);
}

/* With the lock held: may there be another grant, as `wanted` describes it, of that region? */
static int grants_check_limits(kvx_core *core, const region_box *owner, const kvx_grant *wanted) {
    if (core->closing || owner == NULL) {
        return core->closing ? KVX_E_CLOSED : KVX_E_NO_REGION;
    }
    if (wanted->offset + wanted->length > owner->region.length) {
        return KVX_E_LOCAL_RANGE;
    }
    if ((wanted->access & KVX_WRITE) && (owner->region.flags & KVX_REGION_READ_ONLY)) {
        return KVX_E_READ_ONLY;
    }
    if (core->grants.count >= core->config.grants_max) {
        return KVX_E_LIMIT;
    }
    /* two places: REVOKE and one GRANT_LOST at a time */
    bool room = kvx_table_reserve(&core->grants, 1) && kvx_ring_reserve(&core->ring, 2);
    return room ? KVX_OK : KVX_E_NOMEM;
}

/* With the lock held. */
static void grants_insert(kvx_core *core, region_box *owner, grant_box *box, kvx_grant_info *info_p) {
    kvx_grant *grant = &box->grant;
    grant->id = core->next_id++;
    grant->region = &owner->region;
    KVX_LIST_PUSH(owner->grants, box);
    kvx_table_put(&core->grants, grant->id, box);
    *info_p = (kvx_grant_info){
        .id = grant->id, .generation = owner->region.generation, .length = grant->length, .access = grant->access};
    memcpy(info_p->key, grant->key, sizeof(info_p->key));
    grants_update_gauges(core);
}

/* `blocks` is the grant's from now on, or freed. */
static int grants_create(kvx_engine *engine, uint64_t region, const kvx_grant *wanted, kvx_grant_info *info_p) {
    kvx_core *core = &engine->core;
    grant_box *box = kvx_vault_take(sizeof(*box) + core->slot_count * sizeof(box->links[0]));
    if (box == NULL) {
        kvx_blocks_free(wanted->blocks);
        return KVX_E_NOMEM;
    }
    box->grant.offset = wanted->offset;
    box->grant.length = wanted->length;
    box->grant.access = wanted->access;
    box->grant.blocks = wanted->blocks;
    kvx_random(box->grant.key, sizeof(box->grant.key));
    kvx_lock(core);
    region_box *owner = kvx_region_find(core, region);
    int status = grants_check_limits(core, owner, &box->grant);
    if (status == KVX_OK) {
        grants_insert(core, owner, box, info_p);
    }
    kvx_unlock(core);
    if (status != KVX_OK) {
        grants_box_free(box);
    }
    return status;
}

static int grants_check_arguments(uint64_t offset, uint64_t length, uint32_t access, const kvx_grant_info *info_p) {
    uint64_t end;
    if (info_p == NULL || access == 0 || (access & ~(uint32_t)(KVX_READ | KVX_WRITE)) != 0) {
        return KVX_E_INVALID;
    }
    return length == 0 || __builtin_add_overflow(offset, length, &end) ? KVX_E_LENGTH : KVX_OK;
}

int kvx_grant_create(kvx_engine *engine, uint64_t region, uint64_t offset, uint64_t length, uint32_t access,
                     kvx_grant_info *info_p) {
    kvx_grant wanted = {.offset = offset, .length = length, .access = access};
    int status = grants_check_arguments(offset, length, access, info_p);
    return status == KVX_OK ? grants_create(engine, region, &wanted, info_p) : status;
}

int kvx_grant_create_blocks(kvx_engine *engine, uint64_t region, uint64_t offset, uint64_t length, uint32_t access,
                            const kvx_part *parts, uint32_t part_count, const uint64_t *blocks, uint32_t block_count,
                            kvx_grant_info *info_p) {
    kvx_grant wanted = {.offset = offset, .length = length, .access = access};
    int status = grants_check_arguments(offset, length, access, info_p);
    if (status == KVX_OK) {
        status = kvx_blocks_new(parts, part_count, blocks, block_count, length, &wanted.blocks);
    }
    return status == KVX_OK ? grants_create(engine, region, &wanted, info_p) : status;
}

kvx_grant_link *kvx_grant_link_of(kvx_grant *grant, uint32_t slot) {
    return &((grant_box *)grant)->links[slot];
}

/* -- revoking ------------------------------------------------------------------------------------------------ */

static bool grants_is_revoked(const grant_box *box) {
    return atomic_load_explicit(&((grant_box *)box)->grant.revoked, memory_order_relaxed);
}

void kvx_grant_mark_revoked(kvx_core *core, grant_box *box) {
    if (grants_is_revoked(box)) {
        return;
    }
    atomic_store(&box->grant.revoked, true);
    box->call_next = core->grants_to_call;
    core->grants_to_call = box;
    box->not_quiet = KVX_HOLD | ((1u << core->slot_count) - 1);
    __atomic_fetch_add(&core->counters->quarantined_grants, 1, __ATOMIC_RELAXED);
}

/* With the lock held: ends the grant when it is quiet. True = signal. */
static bool grants_maybe_finish(kvx_core *core, grant_box *box, int status) {
    if (!grants_is_revoked(box) || box->not_quiet != 0 || box->accesses != 0) {
        return false;
    }
    region_box *owner = (region_box *)box->grant.region;
    KVX_LIST_REMOVE(owner->grants, box);
    kvx_table_remove(&core->grants, box->grant.id);
    __atomic_fetch_sub(&core->counters->quarantined_grants, 1, __ATOMIC_RELAXED);
    grants_update_gauges(core);
    bool signal = false;
    if (box->token != 0) {
        kvx_event event = {
            .kind = KVX_EV_REVOKE, .status = status, .token = box->token, .id = box->grant.id, .segment = -1};
        signal = kvx_ring_push(&core->ring, &event);
    } else {
        kvx_ring_unreserve(&core->ring, 1);
    }
    if (!box->lost_queued) { /* otherwise the queued event uses that place */
        kvx_ring_unreserve(&core->ring, 1);
    }
    grants_box_free(box);
    kvx_region_maybe_forget(owner);
    return signal;
}

static void grants_call_slots(kvx_core *core, grant_box *box) {
    kvx_region *region = box->grant.region;
    uint32_t quiet = 0;
    for (uint32_t i = 0; i < core->slot_count; i++) {
        int status = core->slots[i].ops.mem_release(core->slots[i].transport, region, &box->grant);
        KVX_ASSERT(status == KVX_OK || status == KVX_PENDING);
        quiet |= status == KVX_OK ? 1u << i : 0;
    }
    kvx_lock(core);
    KVX_ASSERT((box->not_quiet & quiet) == quiet);
    box->not_quiet &= ~(quiet | KVX_HOLD);
    bool signal = grants_maybe_finish(core, box, KVX_OK);
    kvx_unlock_signal(core, signal);
}

void kvx_grants_call_slots(kvx_core *core) {
    for (;;) {
        kvx_lock(core);
        grant_box *box = core->grants_to_call;
        if (box != NULL) {
            core->grants_to_call = box->call_next;
        }
        kvx_unlock(core);
        if (box == NULL) {
            return;
        }
        grants_call_slots(core, box);
    }
}

int kvx_grant_revoke(kvx_engine *engine, uint64_t grant, uint64_t *token_p) {
    kvx_core *core = &engine->core;
    kvx_lock(core);
    grant_box *box = kvx_table_get(&core->grants, grant);
    int status = core->closing ? KVX_E_CLOSED : box == NULL || box->token != 0 ? KVX_E_NO_GRANT : KVX_OK;
    if (status == KVX_OK) {
        *token_p = box->token = core->next_id++;
        kvx_grant_mark_revoked(core, box);
    }
    kvx_unlock(core);
    kvx_grants_call_slots(core);
    return status;
}

void kvx_grant_quiet(kvx_core *core, uint32_t slot, kvx_grant *grant) {
    grant_box *box = (grant_box *)grant;
    kvx_lock(core);
    KVX_ASSERT(box->not_quiet & (1u << slot)); /* exactly once, and only after KVX_PENDING */
    box->not_quiet &= ~(1u << slot);
    bool signal = grants_maybe_finish(core, box, KVX_OK);
    kvx_unlock_signal(core, signal);
}

bool kvx_grants_sweep(kvx_core *core) {
    bool signal = false;
    for (uint32_t i = 0; i < core->regions.capacity; i++) {
        region_box *owner = core->regions.keys[i] ? core->regions.values[i] : NULL;
        if (owner == NULL) {
            continue;
        }
        while (owner->grants != NULL) {
            grant_box *box = owner->grants;
            kvx_grant_mark_revoked(core, box);
            KVX_ASSERT(box->accesses == 0); /* the transports are closed */
            box->not_quiet = 0;
            signal |= grants_maybe_finish(core, box, KVX_E_CLOSED);
            KVX_ASSERT(owner->grants != box);
        }
        if (owner->token != 0) {
            kvx_event event = {.kind = KVX_EV_RELEASE,
                               .status = KVX_E_CLOSED,
                               .token = owner->token,
                               .id = owner->region.id,
                               .segment = -1};
            signal |= kvx_ring_push(&core->ring, &event);
        }
    }
    return signal;
}

/* -- accesses of peers ----------------------------------------------------------------------------------------- */

static int grants_access_begin(kvx_core *core, uint64_t grant, uint64_t generation, bool devices,
                               kvx_access *access_p) {
    kvx_lock(core);
    grant_box *box = kvx_table_get(&core->grants, grant);
    int status = KVX_OK;
    if (box == NULL) {
        status = KVX_E_UNKNOWN;
    } else if (box->grant.region->generation != generation) {
        status = KVX_E_STALE;
    } else if (grants_is_revoked(box)) {
        status = KVX_E_REVOKED;
    } else if (!devices && (box->grant.region->flags & KVX_REGION_DEVICE)) {
        status = KVX_E_UNSUPPORTED;
    } else {
        box->accesses++;
        access_p->grant = &box->grant;
        access_p->base = box->grant.region->base + box->grant.offset;
        access_p->length = box->grant.length;
        access_p->cursor = (kvx_blocks_cursor){0};
    }
    kvx_unlock(core);
    return status;
}

int kvx_access_begin(kvx_core *core, uint64_t grant, uint64_t generation, kvx_access *access_p) {
    return grants_access_begin(core, grant, generation, false, access_p);
}

int kvx_access_begin_any(kvx_core *core, uint64_t grant, uint64_t generation, kvx_access *access_p) {
    return grants_access_begin(core, grant, generation, true, access_p);
}

int kvx_access_allow(const kvx_access *access, uint32_t rights) {
    return (access->grant->access & rights) == rights ? KVX_OK : KVX_E_ACCESS;
}

int kvx_access_claim(const kvx_access *access, uint64_t length) {
    return length <= access->length ? KVX_OK : KVX_E_RANGE;
}

int kvx_access_range(kvx_access *access, uint64_t offset, uint64_t length) {
    const kvx_blocks *blocks = access->grant->blocks;
    if (offset > access->length || length > access->length - offset) {
        return KVX_E_RANGE;
    }
    return blocks == NULL || kvx_blocks_cover(blocks, &access->cursor, offset, length) ? KVX_OK : KVX_E_RANGE;
}

void kvx_access_end(kvx_core *core, kvx_access *access) {
    grant_box *box = (grant_box *)access->grant;
    access->grant = NULL;
    kvx_lock(core);
    KVX_ASSERT(box->accesses != 0);
    box->accesses--;
    bool signal = grants_maybe_finish(core, box, KVX_OK);
    kvx_unlock_signal(core, signal);
}

void kvx_grant_attach(kvx_core *core, uint64_t grant) {
    kvx_lock(core);
    grant_box *box = kvx_table_get(&core->grants, grant);
    if (box != NULL) {
        box->attached++;
    }
    kvx_unlock(core);
}

void kvx_grant_detach(kvx_core *core, uint64_t grant, bool lost) {
    bool signal = false;
    kvx_lock(core);
    grant_box *box = kvx_table_get(&core->grants, grant);
    if (box != NULL) {
        KVX_ASSERT(box->attached > 0);
        box->attached--;
        box->any_lost |= lost;
        if (box->attached == 0 && box->any_lost && !box->lost_queued && !core->closing) {
            box->any_lost = false;
            box->lost_queued = true;
            kvx_event event = {.kind = KVX_EV_GRANT_LOST, .id = grant, .segment = -1};
            signal = kvx_ring_push(&core->ring, &event);
        }
    }
    kvx_unlock_signal(core, signal);
}

void kvx_grant_lost_drained(kvx_core *core, uint64_t grant) {
    grant_box *box = kvx_table_get(&core->grants, grant);
    if (box != NULL) {
        box->lost_queued = false;
        core->ring.reserved++; /* the place is this grant's again */
    }
}

int64_t kvx_grant_attached(kvx_engine *engine, uint64_t grant) {
    kvx_core *core = &engine->core;
    kvx_lock(core);
    grant_box *box = kvx_table_get(&core->grants, grant);
    int64_t attached = box == NULL ? -1 : box->attached;
    kvx_unlock(core);
    return attached;
}

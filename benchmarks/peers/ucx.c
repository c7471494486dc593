/* ucx.c: UCX through its one-sided calls (ucp_put_nbx, ucp_get_nbx) without Python.
 *
 * The environment (UCX_TLS) decides what moves the bytes; the variant "shm" lets UCX allocate the target's memory, so
 * that the initiator maps it. A write is complete when a flush of the endpoint says that the target can see it. The
 * target makes progress while there is work, and sleeps on UCX's file descriptor after many idle looks. */
#include "native.h"
#include <ucp/api/ucp.h>

#define IDLE_LOOKS 2000

static ucp_context_h context;
static ucp_worker_h worker;
static ucp_mem_h memory;
static ucp_ep_h endpoint;
static ucp_rkey_h key;
static uint64_t there;
static int wakeup;
static int left[SLOTS_MAX];

static void check(ucs_status_t status, const char *what) {
    if (status != UCS_OK) {
        fprintf(stderr, "ucx: %s: %s\n", what, ucs_status_string(status));
        exit(1);
    }
}

static char *transport_alloc(uint64_t length, int is_target) {
    char *buffer = is_target && !strcmp(variant, "shm") ? NULL : anonymous(length);
    double at = now();
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP};
    ucp_config_t *config;
    check(ucp_config_read(NULL, NULL, &config), "configuration");
    check(ucp_init(&params, config, &context), "init");
    ucp_config_release(config);
    ucp_worker_params_t single = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                  .thread_mode = UCS_THREAD_MODE_SINGLE};
    check(ucp_worker_create(context, &single, &worker), "worker");
    check(ucp_worker_get_efd(worker, &wakeup), "wakeup");
    init_s = now() - at;
    at = now();
    ucp_mem_map_params_t map = {.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                                              UCP_MEM_MAP_PARAM_FIELD_FLAGS,
                                .address = buffer,
                                .length = length,
                                .flags = buffer ? 0 : UCP_MEM_MAP_ALLOCATE};
    check(ucp_mem_map(context, &map, &memory), "register");
    register_s = now() - at;
    ucp_mem_attr_t attributes = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS};
    check(ucp_mem_query(memory, &attributes), "query");
    if (!buffer) {
        memset(attributes.address, 1, length);
    }
    return attributes.address;
}

static void transport_target(void) {
    ucp_address_t *address;
    size_t address_bytes, key_bytes;
    void *packed;
    check(ucp_worker_get_address(worker, &address, &address_bytes), "address");
    check(ucp_rkey_pack(context, memory, &packed, &key_bytes), "pack");
    uint64_t head[3] = {(uint64_t)region, address_bytes, key_bytes};
    control_put(head, sizeof head);
    control_put(address, address_bytes);
    control_put(packed, key_bytes);
}

static void transport_connect(void) {
    uint64_t head[3];
    control_get(head, sizeof head);
    char *address = malloc(head[1]), *packed = malloc(head[2]);
    control_get(address, head[1]);
    control_get(packed, head[2]);
    there = head[0];
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS, .address = (ucp_address_t *)address};
    check(ucp_ep_create(worker, &params, &endpoint), "endpoint");
    check(ucp_ep_rkey_unpack(endpoint, packed, &key), "unpack");
}

static void transport_step(void) {
    static int idle;
    if (ucp_worker_progress(worker)) {
        idle = 0;
        return;
    }
    if (++idle < IDLE_LOOKS) {
        return;
    }
    idle = 0;
    if (ucp_worker_arm(worker) != UCS_OK) {
        return;
    }
    struct pollfd either[2] = {{wakeup, POLLIN, 0}, {control, POLLIN, 0}};
    poll(either, 2, -1);
    if (either[1].revents) {
        target_obey();
    }
}

static void complete(void *request, ucs_status_t status, void *slot) {
    check(status, "transfer");
    --*(int *)slot;
    ucp_request_free(request);
}

static void issued(int *slot, void *request) {
    if (UCS_PTR_IS_ERR(request)) {
        check(UCS_PTR_STATUS(request), "post");
    }
    *slot += request != NULL;
}

static void transport_post(int slot, const segment *segments, uint64_t n) {
    int *count = &left[slot];
    ucp_request_param_t params = {.op_attr_mask =
                                      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH,
                                  .cb.send = complete,
                                  .user_data = count,
                                  .memh = memory};
    *count = 0;
    for (uint64_t i = 0; i < n; i++) {
        char *here = region + segments[i].local;
        uint64_t remote = there + segments[i].remote, bytes = segments[i].bytes;
        issued(count, writes ? ucp_put_nbx(endpoint, here, bytes, remote, key, &params)
                             : ucp_get_nbx(endpoint, here, bytes, remote, key, &params));
    }
    if (writes) {
        params.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
        issued(count, ucp_ep_flush_nbx(endpoint, &params));
    }
}

static int transport_done(int slot) {
    if (left[slot]) {
        ucp_worker_progress(worker);
    }
    return left[slot] == 0;
}

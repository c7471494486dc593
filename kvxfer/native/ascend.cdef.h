/* ascend.cdef.h: the table of ascend.h, in the form that cffi reads too (no preprocessor): tools and tests call through
 * it what the transport calls. C includes it through ascend.h, which says what it is. */

#define KVX_ASCEND_ABI_VERSION 1
#define KVX_ASCEND_TEXT_MAX    256
#define KVX_ASCEND_ALIGNMENT   2097152UL /* 2 MiB: of device memory that HIXL registers */
#define KVX_ASCEND_REGIONS_MAX 253       /* registrations per HIXL engine: more do not fit one exchange */
#define KVX_ASCEND_IPC_KEY_MAX 65
#define KVX_ASCEND_IPC_ANYBODY 0
#define KVX_ASCEND_IPC_NOBODY  -1
#define KVX_ASCEND_COPIES_MAX  4096 /* entries of one batch copy */

/* kvx_ascend_facts.optional */
#define KVX_ASCEND_HAS_ASYNC_CONNECT 1 /* 9.1+ */
#define KVX_ASCEND_HAS_BULK_STATUS   2 /* 9.1+ */
#define KVX_ASCEND_HAS_CAPABILITY    4 /* 9.1+ */
#define KVX_ASCEND_HAS_ADDRESS_RANGE 8 /* 9.1+: aclrtMemGetAddressRange */
#define KVX_ASCEND_HAS_BATCH_COPY    16

typedef struct kvx_ascend_facts {
    bool simulated; /* the SoC name begins with "KVXSim": no figure is a hardware figure */
    uint32_t optional;
    uint32_t devices;
    int32_t acl_version[3];
    char soc[KVX_ASCEND_TEXT_MAX];
    char toolkit[32];  /* "8.5", "9.0", "9.1+": judged by symbols; the reported version is only shown */
    char reported[64]; /* what the toolkit says of itself, "" unknown */
    char acl_path[KVX_ASCEND_TEXT_MAX];  /* the file that was loaded */
    char meta_path[KVX_ASCEND_TEXT_MAX]; /* libmetadef or an older name */
    char hixl_path[KVX_ASCEND_TEXT_MAX];
} kvx_ascend_facts;

typedef struct kvx_ascend_copy {
    void *target;
    const void *source;
    uint64_t length;
} kvx_ascend_copy;

typedef struct kvx_ascend_op { /* layout of hixl::TransferOpDesc */
    uint64_t local;
    uint64_t remote;
    uint64_t length;
} kvx_ascend_op;

typedef struct kvx_ascend_option {
    const char *key, *value;
} kvx_ascend_option;

typedef enum kvx_ascend_where { KVX_ASCEND_HOST = 0, KVX_ASCEND_DEVICE = 1, KVX_ASCEND_FOREIGN = 2 } kvx_ascend_where;

typedef struct kvx_ascend_api {
    uint32_t abi_version, struct_size;
    kvx_ascend_facts facts;

    /* -- ACL: devices and memory ---------------------------------------------------------------------------------- */
    int (*device_use)(int32_t device,
                      uint32_t *raw_p); /* aclrtSetDevice for this thread, once; also makes the context */
    int (*device_info)(int32_t device, uint64_t *hbm_free_p, uint64_t *hbm_total_p, uint32_t *raw_p);
    int (*device_healthy)(int32_t device, uint32_t *raw_p); /* KVX_E_SYSTEM: abnormal */
    int (*device_physical)(int32_t device, int32_t *physical_p, uint32_t *raw_p);
    /* May this process copy between two devices of the host without the network? 1 yes, 0 no; enables it. */
    int (*device_peer)(int32_t device, int32_t other, int32_t *can_p, uint32_t *raw_p);
    /* where: KVX_ASCEND_DEVICE hugepage-backed HBM, aligned to KVX_ASCEND_ALIGNMENT; KVX_ASCEND_HOST pinned host
     * memory. Device memory is whole huge pages or nothing. KVX_E_NOMEM: no host memory. */
    int (*mem_alloc)(int32_t device, kvx_ascend_where where, uint64_t length, void **memory_p, uint32_t *raw_p);
    int (*mem_free)(int32_t device, kvx_ascend_where where, void *memory, uint32_t *raw_p);
    /* Whose memory is it? KVX_ASCEND_FOREIGN: ACL does not know it (plain malloc). base/length of the allocation are 0
     * when the library cannot tell. */
    int (*mem_query)(const void *memory, kvx_ascend_where *where_p, int32_t *device_p, uint64_t *base_p,
                     uint64_t *length_p, uint32_t *raw_p);
    /* Blocking copy in any direction; memory of both kinds, the direction is found from the kinds. */
    int (*copy)(int32_t device, void *target, const void *source, uint64_t length, uint32_t *raw_p);
    /* A stream and batches of copies on it. copy_batch takes any number of entries (KVX_ASCEND_COPIES_MAX per call of
     * the library) and returns at once; host memory should be pinned, else the library may wait for each. After an
     * error part of the batch may run: stream_abort before the memory is used again. */
    int (*stream_open)(int32_t device, void **stream_p, uint32_t *raw_p);
    int (*stream_close)(int32_t device, void *stream, bool force, uint32_t *raw_p);
    int (*copy_batch)(int32_t device, void *stream, const kvx_ascend_copy *copies, uint32_t count, uint32_t *raw_p);
    int (*stream_poll)(int32_t device, void *stream, uint32_t *raw_p); /* KVX_OK all done, KVX_PENDING, or an error */
    /* KVX_OK: nothing moves any more, and the stream is as new. Anything else: leave the memory alone. KVX_E_TIMEOUT:
     * the device does not say; other errors: it cannot be asked, it is lost, say. Ask again, or keep the memory for
     * ever. */
    int (*stream_abort)(int32_t device, void *stream, uint32_t *raw_p);
    /* Device memory for other processes of this host: for that one, KVX_ASCEND_IPC_NOBODY yet, or
     * KVX_ASCEND_IPC_ANYBODY (pid check off). */
    int (*ipc_export)(int32_t device, void *memory, uint64_t length, int32_t pid, char key[KVX_ASCEND_IPC_KEY_MAX],
                      uint32_t *raw_p);
    /* That process may import it, too. */
    int (*ipc_allow)(int32_t device, const char *key, int32_t pid, uint32_t *raw_p);
    int (*ipc_import)(int32_t device, const char *key, void **memory_p, uint32_t *raw_p);
    int (*ipc_close)(int32_t device, const char *key, uint32_t *raw_p);

    /* -- HIXL ------------------------------------------------------------------------------------------------------ */
    /* An engine on `device`. local: "ip:port" listens too, "ip" is a client only. Port 1..65535 is checked here, and
     * that the toolkit knows each option: KVX_E_INVALID with raw 0. BufferPool is "0:0" unless given. */
    int (*engine_open)(int32_t device, const char *local, const kvx_ascend_option *options, uint32_t option_count,
                       void **engine_p, uint32_t *raw_p, char *why, size_t why_size);
    /* Finalize and destroy. KVX_E_BUSY while another call on this engine runs, also one that hangs: then nothing was
     * done, and whoever cannot wait leaves the engine as it is. May block like connect. */
    int (*engine_close)(void *engine, uint32_t *raw_p);
    /* Device memory that is not whole huge pages: KVX_E_ALIGN with raw 0, the library would notice at connect only. */
    int (*mem_register)(void *engine, void *memory, uint64_t length, kvx_ascend_where where, void **handle_p,
                        uint32_t *raw_p);
    int (*mem_deregister)(void *engine, void *handle, uint32_t *raw_p);
    /* These two may block for ever, whatever timeout_ms says: expendable threads only. */
    int (*connect)(void *engine, const char *remote, int32_t timeout_ms, uint32_t *raw_p);
    int (*disconnect)(void *engine, const char *remote, int32_t timeout_ms, uint32_t *raw_p);
    /* One batch, one direction, one peer. KVX_AGAIN: out of slots, try later. */
    int (*submit)(void *engine, const char *remote, bool write, const kvx_ascend_op *ops, uint32_t count,
                  void **request_p, uint32_t *raw_p);
    /* KVX_PENDING, KVX_OK or an error; anything but KVX_PENDING frees the request: never ask again. */
    int (*poll)(void *engine, void *request, uint32_t *raw_p);
    /* The library's last message in this thread, "" when it has none. Valid until the next call. Ask only after a raw
     * status that is not 0: what we refused ourselves leaves an older message there. */
    const char *(*last_error)(void);
    int (*capability)(int32_t feature, int32_t *value_p, uint32_t *raw_p); /* KVX_E_UNSUPPORTED before 9.1 */
    /* This process as ipc_export of another one names it: in a container not the same as getpid(). */
    int (*process_id)(int32_t *pid_p, uint32_t *raw_p);
} kvx_ascend_api;

/* The libraries of this process: found and loaded on the first call (any thread), kept for ever. NULL: `why` says what
 * is missing, where it was looked for and what to do. A failed search is remembered like a successful one. */
const kvx_ascend_api *kvx_ascend_get(char *why, size_t why_size);

/* Vendor status to ours (pure): 0 KVX_OK; 103900 KVX_E_INVALID; 103901 507046 507047 107019 107020 KVX_E_TIMEOUT;
 * 103902 KVX_E_PEER_LOST; 103903 KVX_E_BUSY (connected already); 103905 207000 200001 200006 KVX_E_UNSUPPORTED; 203900
 * 207005 KVX_AGAIN; 207001 200000 KVX_E_DEVICE_MEMORY; 107002 KVX_E_NO_CONTEXT; 107001 207004 KVX_E_NO_DEVICE; other
 * 507xxx KVX_E_DEVICE; 503900 and whatever is not known KVX_E_LINK. */
int kvx_ascend_status(uint32_t raw);
/* True: HIXL latches the link after this status; only disconnect and connect clear it. */
bool kvx_ascend_latches(uint32_t raw);

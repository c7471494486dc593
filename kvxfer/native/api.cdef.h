/* api.cdef.h: everything that Python can see of the native engine. cffi reads this file as it is
 * (no preprocessor), C includes it through api.h. All lengths and offsets are bytes in 64 bits. */

#define KVX_ABI_VERSION    1
#define KVX_KEY_BYTES      16
#define KVX_ID_BYTES       16
#define KVX_SECRET_BYTES   32
#define KVX_NAME_MAX       32
#define KVX_ENDPOINT_MAX   256
#define KVX_TRANSPORTS_MAX 8
#define KVX_PARTS_MAX      4096

/* access rights of a grant */
#define KVX_READ  1
#define KVX_WRITE 2

/* kvx_engine_config.flags */
#define KVX_ENGINE_MANUAL  1  /* no thread drives `loop`: tests step it with kvx_engine_step */
#define KVX_ENGINE_NO_CMA  2  /* never use cross-memory attach */
#define KVX_ENGINE_NO_HUGE 4  /* never try hugepages */
#define KVX_ENGINE_NO_IPC  8  /* hixl: never map device memory of other processes of this host; HIXL moves it instead */
#define KVX_ENGINE_ENCRYPT 16 /* tcp: all data connections are sealed; one that is not is refused */
#define KVX_ENGINE_NO_LEND 32 /* tcp: copy the payload of puts into the kernel instead of lending it the pages */

/* kinds of memory; a transport says with bit (1 << kind) of kvx_transport_info.memory which ones it reaches */
#define KVX_MEM_DRAM   0 /* of this host: memfds, and whatever the application registers */
#define KVX_MEM_HBM    1 /* of an accelerator: the CPU cannot touch it */
#define KVX_MEM_PINNED 2 /* of this host, allocated through an accelerator's driver so that its DMA reaches it */

/* kvx_alloc_args.flags */
#define KVX_ALLOC_SPILL 1 /* no room for KVX_MEM_HBM: take KVX_MEM_PINNED, and say so (KVX_REGION_SPILLED) */

/* kvx_region_info.flags */
#define KVX_REGION_SHARED      1 /* backed by a memfd: peers on this host can map it */
#define KVX_REGION_HUGE        2 /* hugepages are in use */
#define KVX_REGION_READ_ONLY   4
#define KVX_REGION_DEVICE      8  /* the CPU cannot touch it */
#define KVX_REGION_SPILLED     16 /* asked for on a device, which was full */
#define KVX_REGION_NUMA_DENIED 32 /* the NUMA node that was asked for could not be applied */

#define KVX_SPACE_GRAIN 512 /* bytes; sizes and offsets inside an arena are multiples of it */

/* kvx_transport_info.caps */
#define KVX_CAP_PUT       1
#define KVX_CAP_GET       2
#define KVX_CAP_NOTIFY    4
#define KVX_CAP_INLINE    8    /* small operations complete inside kvx_submit */
#define KVX_CAP_MAP       16   /* an import of host memory can be mapped: adopt without a copy */
#define KVX_CAP_SAME_HOST 32   /* reaches this host only */
#define KVX_CAP_CHECK     64   /* KVX_OP_CHECK works */
#define KVX_CAP_OWN       128  /* reaches its own engine only */
#define KVX_CAP_ENCRYPTED 256  /* what it sends to other hosts is encrypted; connecting takes the owner's secret */
#define KVX_CAP_BLOCKS    1024 /* our side looks at each access: a grant of blocks means just these */
#define KVX_CAP_MAP_HBM   512  /* the same as KVX_CAP_MAP for memory of a device, for those with KVX_REMOTE_MAP */

/* kvx_remote.flags */
#define KVX_REMOTE_MAP 1 /* the import fails when memory of a device cannot be mapped for this process's kernels */

/* what became of a transport when one was chosen for a grant: kvx_choice_count */
#define KVX_CHOICE_TAKEN       0
#define KVX_CHOICE_MEMORY      1 /* passed over: it does not move these kinds of memory */
#define KVX_CHOICE_CHECKSUM    2 /* it makes no checksums, and they were asked for */
#define KVX_CHOICE_NOT_OFFERED 3 /* the owner does not have it */
#define KVX_CHOICE_UNREACHABLE 4 /* no connection */
#define KVX_CHOICE_REFUSED     5 /* the owner's engine, or ours, cannot use it for this grant */

/* what only the application knows: kvx_note */
#define KVX_NOTE_STALLED 0 /* value: how many are stalled now */
#define KVX_NOTE_LATE    1 /* value: how many more were late */

/* operations */
#define KVX_OP_PUT 1
#define KVX_OP_GET 2
/* kvx_submit_args.flags */
#define KVX_OP_NOTIFY   1 /* tell the owner (tag, value) once every byte is visible to it */
#define KVX_OP_CHECK    2 /* checksum end to end; a mismatch is KVX_E_INTEGRITY */
#define KVX_OP_CRITICAL 4 /* goes ahead of operations without this flag; */
#define KVX_OP_BULK     8 /* lets them go ahead. Not both; nothing starves */

/* kvx_event.kind */
#define KVX_EV_TRANSFER    1 /* token of kvx_submit */
#define KVX_EV_CONNECT     2 /* token of kvx_peer_connect; id = peer */
#define KVX_EV_PEER_DOWN   3 /* no token; id = peer. Comes once, after the peer's tokens completed */
#define KVX_EV_IMPORT      4 /* token of kvx_mem_import; id = import */
#define KVX_EV_REVOKE      5 /* token of kvx_grant_revoke; id = grant: no peer moves a byte through it any more */
#define KVX_EV_RELEASE     6 /* token of kvx_mem_release; id = region: the engine forgot the memory */
#define KVX_EV_NOTIFY      7 /* no token; id = grant, tag, value */
#define KVX_EV_GRANT_LOST  8 /* no token; id = grant: the last peer that was attached to it vanished */
#define KVX_EV_PEER_CLOSED 9 /* token of kvx_peer_close; id = peer */

typedef struct kvx_engine kvx_engine;

typedef struct kvx_engine_config {
    uint32_t abi_version;
    uint32_t flags;
    const char *transports;     /* comma list in order of preference, e.g. "shm,tcp"; "fault+tcp" decorates; "?hixl"
                                   may be missing on this machine, see kvx_transport_unavailable */
    const char *socket_dir;     /* where shm listens; must exist */
    const char *tcp_bind;       /* numeric address where tcp listens, "127.0.0.1", "::1", "0.0.0.0" */
    const char *tcp_congestion; /* congestion control for peers on this host, "" = the system's */
    const char *fault_spec;     /* see fault_plan.h; "" = none */
    const char *counters_path;  /* file to create for the counters, "" = private memory */
    const char *hixl_bind;      /* numeric address where hixl's side link and HIXL's own engines listen */
    const char *hixl_options;   /* for HIXL itself, "key=value;key=value", "" = ours */
    uint32_t tcp_port;          /* 0 = any */
    uint32_t hixl_port;         /* of the side link; 0 = any */
    uint32_t hixl_engine_port;  /* HIXL's own listener of device 0, the others follow; 0 = any */
    uint32_t copy_threads;      /* threads that copy for shm */
    uint32_t tcp_threads;       /* threads that drive tcp */
    uint32_t tcp_streams;       /* connections per tcp peer */
    uint32_t inflight_max;      /* live tokens */
    uint32_t notify_max;        /* notifications not yet drained */
    uint32_t regions_max;
    uint32_t grants_max;
    uint32_t peers_max;          /* outgoing peers */
    uint32_t accepted_max;       /* incoming connections */
    uint32_t segments_max;       /* segments in one submit */
    uint64_t inline_bytes_max;   /* at most this much is copied inside kvx_submit */
    uint64_t nt_bytes_min;       /* copies from this size on use non-temporal stores */
    uint64_t chunk_bytes;        /* cancellation is looked at this often */
    uint64_t frame_bytes;        /* largest payload of one tcp frame */
    uint64_t hbm_arena_bytes;    /* device memory is taken from its driver in blocks of this size, if there is room */
    uint64_t pinned_arena_bytes; /* the same for pinned host memory */
    uint32_t connect_ms;         /* a connect that takes longer fails */
    uint32_t handshake_ms;       /* an accepted connection must have proved itself by then */
    uint32_t cancel_ms;          /* a cancelled put that the peer does not settle resets the connection */
    uint32_t spin_us;            /* tcp looks at its sockets for so long before it sleeps, 0 = sleeps at once */
    uint8_t engine_id[16];       /* random, names this engine to its peers */
} kvx_engine_config;

typedef struct kvx_transport_info {
    char name[32];
    char endpoint[256]; /* what a peer needs to connect, "" when not listening */
    uint32_t caps;
    uint32_t rank;      /* lower is better */
    uint64_t alignment; /* of addresses that it can register, 1 = any */
    uint64_t region_bytes_max;
    uint32_t copies_x100;  /* CPU copies per delivered byte, both sides together, x100 */
    uint32_t memory;       /* bit (1 << kind) for each kind of an owner's memory that it reaches */
    uint32_t local_memory; /* the same for our own memory */
    uint8_t secret[32];    /* KVX_CAP_ENCRYPTED: what a peer needs to connect beside the endpoint; drawn at the start */
} kvx_transport_info;

typedef struct kvx_alloc_args {
    uint64_t length;
    uint32_t kind;     /* KVX_MEM_* */
    int32_t device;    /* of KVX_MEM_HBM and KVX_MEM_PINNED; -1 otherwise */
    int32_t numa_node; /* of KVX_MEM_DRAM and KVX_MEM_PINNED; -1 = not bound */
    uint32_t flags;    /* KVX_ALLOC_* */
} kvx_alloc_args;

typedef struct kvx_register_args {
    uint64_t address;
    uint64_t length;
    uint32_t kind;  /* KVX_MEM_* */
    int32_t device; /* of KVX_MEM_HBM and KVX_MEM_PINNED; -1 otherwise */
    uint32_t read_only;
} kvx_register_args;

/* What a failed call about memory knows beside its status. */
typedef struct kvx_mem_why {
    int32_t sys_errno;
    uint32_t raw;         /* what the accelerator's library answered, 0 = nothing */
    uint64_t conflict;    /* KVX_E_OVERLAP: the region in the way, 0 = unknown */
    uint64_t free_bytes;  /* KVX_E_DEVICE_MEMORY: of the device, */
    uint64_t total_bytes; /* 0 = unknown */
    uint64_t base;        /* of kvx_mem_register: the allocation that the address lies in, or the region in the way; */
    uint64_t length;      /* 0 = unknown */
    uint64_t required; /* what a transport asks for: KVX_E_ALIGN the alignment, KVX_E_LIMIT the longest region, or 0 */
    char text[512];    /* a sentence, "" = nothing to add */
} kvx_mem_why;

typedef struct kvx_device_info {
    uint64_t free_bytes; /* of the device's memory */
    uint64_t total_bytes;
    uint64_t arena_bytes;   /* what this engine took of it, */
    uint64_t region_bytes;  /* and what of that its regions use */
    uint64_t foreign_bytes; /* registered for the application, which took them itself */
    uint32_t registrations; /* arenas and registered memory, of at most 253 */
    uint32_t live_tokens;   /* operations of ours on its regions */
    int32_t physical;       /* number of the card in the host, -1 = unknown */
} kvx_device_info;

typedef struct kvx_region_info {
    uint64_t id;         /* never used again within an engine */
    uint64_t generation; /* differs between registrations and between engine starts */
    uint64_t address;
    uint64_t length;
    uint32_t flags;
    uint32_t references; /* identical registrations share one region */
    int32_t numa_node;   /* -1 = not bound */
    uint32_t kind;       /* KVX_MEM_* */
    int32_t device;      /* -1 = none */
} kvx_region_info;

typedef struct kvx_grant_info {
    uint64_t id;
    uint64_t generation; /* of its region */
    uint64_t length;
    uint32_t access;
    uint8_t key[16];
} kvx_grant_info;

/* A row of equal pieces within a grant, one per block id: piece b begins at base + b * stride. With stride 0 it is one
 * piece, whatever the blocks. */
typedef struct kvx_part {
    uint64_t base;
    uint64_t stride;
    uint64_t length;
} kvx_part;

/* A grant of another engine, as its descriptor tells it. */
typedef struct kvx_remote {
    uint64_t grant;
    uint64_t generation;
    uint64_t length;
    uint32_t access;
    uint32_t flags;
    uint8_t key[16];
} kvx_remote;

typedef struct kvx_import_info {
    uint64_t id;
    uint64_t address; /* of the mapping, 0 when the transport does not map */
    uint64_t length;
    uint32_t access;
    int32_t device; /* whose address that is; -1: the CPU's */
} kvx_import_info;

typedef struct kvx_segment {
    uint64_t local_offset;
    uint64_t remote_offset;
    uint64_t length;
} kvx_segment;

typedef struct kvx_submit_args {
    uint32_t kind; /* KVX_OP_PUT or KVX_OP_GET */
    uint32_t flags;
    uint64_t region; /* local region */
    uint64_t import; /* remote side */
    uint64_t tag;    /* for KVX_OP_NOTIFY */
    uint64_t value;
    uint32_t count; /* segments; 0 only with KVX_OP_NOTIFY, then region may be 0 */
} kvx_submit_args;

typedef struct kvx_event {
    uint32_t kind;
    int32_t status;
    uint64_t token;
    uint64_t id;
    uint64_t tag;
    uint64_t value;
    uint64_t bytes;    /* moved and confirmed */
    int32_t sys_errno; /* above 4095: what an accelerator's library answered */
    int32_t segment;   /* first segment that failed, -1 = not known */
} kvx_event;

/* One row per transport, in shared memory when counters_path is set; written with relaxed atomics. */
typedef struct kvx_transport_counters {
    uint64_t put_ops;
    uint64_t get_ops;
    uint64_t put_bytes;        /* confirmed bytes of our puts */
    uint64_t get_bytes;        /* confirmed bytes of our gets */
    uint64_t served_put_bytes; /* written into our memory by peers, where we can see it */
    uint64_t served_get_bytes; /* read from our memory by peers, where we can see it */
    uint64_t copied_bytes;     /* moved by this process's CPU: memcpy, process_vm_*, send, recv */
    uint64_t mapped_bytes;     /* mapped instead of copied (adopt) */
    uint64_t staged_bytes;     /* copied between a device and a block of host memory on their way */
    uint64_t lent_bytes;       /* sent from where they lie: pages that the kernel was lent */
    uint64_t segments;         /* after merging */
    uint64_t frames;           /* data frames or copy calls */
    uint64_t inline_ops;
    uint64_t failed_ops;
    uint64_t cancelled_ops;
    uint64_t refused;         /* owner-side refusals: key, range, access, stale, unknown */
    uint64_t protocol_errors; /* connections dropped for speaking nonsense */
    uint64_t notifies_sent;
    uint64_t notifies_received;
    uint64_t peers_connected; /* gauge */
    uint64_t peers_accepted;  /* gauge */
    uint64_t peers_lost;
    uint64_t chosen; /* for a grant, in preference to those that were passed over, by reason: KVX_CHOICE_* */
    uint64_t passed_memory;
    uint64_t passed_checksum;
    uint64_t passed_not_offered;
    uint64_t passed_unreachable;
    uint64_t passed_refused;
} kvx_transport_counters;

typedef struct kvx_counters {
    uint64_t magic; /* 0x4b565843544e5231 */
    uint32_t version;
    uint32_t transports;
    uint64_t pid;
    uint64_t inflight; /* gauges of the core */
    uint64_t regions;
    uint64_t grants;
    uint64_t imports;
    uint64_t peers;
    uint64_t threads;
    uint64_t registered_bytes;
    uint64_t quarantined_grants; /* revoked, not yet quiet */
    uint64_t device_bytes;       /* of registered_bytes: on accelerators */
    uint64_t arena_bytes;        /* taken from accelerators' drivers, pinned host memory included */
    uint64_t spilled_bytes;      /* in regions that were meant for a device */
    uint64_t spills;             /* how often; no gauge */
    uint64_t stalled;            /* transfers and landings that have not moved on for stall_s: kvx_note */
    uint64_t late;               /* operations that were done after their deadline; no gauge: kvx_note */
    char names[8][32];
    kvx_transport_counters row[8];
} kvx_counters;

/* -- engine ------------------------------------------------------------------------------------ */
int kvx_engine_open(const kvx_engine_config *config, kvx_engine **engine_p, char *why, size_t why_size);
/* Completes every token, closes every peer, joins every thread, unmaps every allocation. */
void kvx_engine_close(kvx_engine *engine);
/* The first half of kvx_engine_close: afterwards every token has its event, which kvx_engine_drain still hands out, and
 * all other calls answer KVX_E_CLOSED. */
void kvx_engine_stop(kvx_engine *engine);
int kvx_engine_fd(const kvx_engine *engine);
/* Clear the fd, then copy out at most `max` events; returns how many. Call again while it returns max. */
uint32_t kvx_engine_drain(kvx_engine *engine, kvx_event *events, uint32_t max);
/* KVX_ENGINE_MANUAL only: let transport `index` do at most `max` steps; returns how many it did. */
uint32_t kvx_engine_step(kvx_engine *engine, uint32_t index, uint32_t max);
const kvx_counters *kvx_engine_counters(const kvx_engine *engine);
int kvx_transport_query(kvx_engine *engine, uint32_t index, kvx_transport_info *info_p);
/* The index-th transport that was asked for with "?" and is not there: its name and why. KVX_E_NO_TRANSPORT: no more.
 */
int kvx_transport_unavailable(kvx_engine *engine, uint32_t index, char name[32], char why[512]);

/* The application chose a transport, or passed it over; only counted. */
int kvx_choice_count(kvx_engine *engine, uint32_t index, uint32_t choice);
/* The same for KVX_NOTE_*. */
int kvx_note(kvx_engine *engine, uint32_t what, uint64_t value);

/* -- memory ------------------------------------------------------------------------------------ */
/* why_p is zeroed first, and says more when the call fails; NULL is allowed. */
int kvx_mem_alloc(kvx_engine *engine, const kvx_alloc_args *args, kvx_region_info *info_p, kvx_mem_why *why_p);
int kvx_mem_register(kvx_engine *engine, const kvx_register_args *args, kvx_region_info *info_p, kvx_mem_why *why_p);
/* Copy between a region and memory of the caller, in steps of chunk_bytes; `write`: into the region. Blocks, from any
 * thread; the region cannot be released meanwhile. KVX_E_CLOSED when the engine stops in between. */
int kvx_mem_copy(kvx_engine *engine, uint64_t region, uint64_t offset, void *memory, uint64_t length, uint32_t write,
                 kvx_mem_why *why_p);
int kvx_device_query(kvx_engine *engine, int32_t device, kvx_device_info *info_p, kvx_mem_why *why_p);
int kvx_mem_release(kvx_engine *engine, uint64_t region, uint64_t *token_p);
/* Python looks at this allocation (viewed = 1) or no longer does. The memory of a viewed one goes at its release like
 * any other, but its addresses stay mapped, to zeros, until kvx_mem_unmap: a late look must not end the process. */
int kvx_mem_viewed(kvx_engine *engine, uint64_t region, uint32_t viewed, uint64_t *mapped_length_p);
void kvx_mem_unmap(uint64_t address, uint64_t mapped_length);
/* The same for KVX_MEM_PINNED, whose bytes nobody else gets while they are looked at. */
void kvx_mem_unview(uint64_t address);
int kvx_grant_create(kvx_engine *engine, uint64_t region, uint64_t offset, uint64_t length, uint32_t access,
                     kvx_grant_info *info_p);
/* The same for the pieces of some blocks (ascending ids) in each part, and nothing else of the range. With
 * KVX_CAP_BLOCKS each access is checked; where peers map memory, or a card moves the bytes, it is the whole range. */
int kvx_grant_create_blocks(kvx_engine *engine, uint64_t region, uint64_t offset, uint64_t length, uint32_t access,
                            const kvx_part *parts, uint32_t part_count, const uint64_t *blocks, uint32_t block_count,
                            kvx_grant_info *info_p);
int kvx_grant_revoke(kvx_engine *engine, uint64_t grant, uint64_t *token_p);
/* How many peers are attached to a grant right now; -1 when it does not exist. */
int64_t kvx_grant_attached(kvx_engine *engine, uint64_t grant);

/* -- peers ------------------------------------------------------------------------------------- */
/* `secret`: of the peer's engine, KVX_SECRET_BYTES, as its owner told it; NULL when it told none. KVX_E_ENCRYPTION: one
 * side encrypts and the other does not. */
int kvx_peer_connect(kvx_engine *engine, uint32_t transport, const char *endpoint, const uint8_t *secret,
                     uint64_t *peer_p, uint64_t *token_p);
int kvx_peer_close(kvx_engine *engine, uint64_t peer, uint64_t *token_p);
int kvx_mem_import(kvx_engine *engine, uint64_t peer, const kvx_remote *remote, uint64_t *import_p, uint64_t *token_p);
int kvx_import_query(kvx_engine *engine, uint64_t import, kvx_import_info *info_p);
/* Python looks at the mapping (viewed = 1) or no longer does, perhaps long after the import has gone. A viewed one
 * turns to zeros when it goes, and its addresses go with the last look. KVX_E_UNSUPPORTED: there is none (any more). */
int kvx_import_viewed(kvx_engine *engine, uint64_t import, uint32_t viewed);
/* The handle is gone at once; live operations of it still complete. */
int kvx_import_release(kvx_engine *engine, uint64_t import);

/* -- transfers --------------------------------------------------------------------------------- */
/* Takes all segments or none. When the operation completed before the return, *inline_p is 1 and *event_p is its
 * completion, which does not appear in the ring; otherwise *inline_p is 0 and one event with *token_p follows.
 * On KVX_E_LENGTH, KVX_E_LOCAL_RANGE and KVX_E_RANGE event_p->segment is the index of the first bad segment. */
int kvx_submit(kvx_engine *engine, const kvx_submit_args *args, const kvx_segment *segments, uint64_t *token_p,
               int *inline_p, kvx_event *event_p);
/* Ask for an early end: the token still completes exactly once (done, or KVX_E_CANCELLED). */
int kvx_cancel(kvx_engine *engine, uint64_t token);
/* Bytes that a live operation has moved, as far as its transport knows between its beginning and its end; 0 when there
 * is none. */
uint64_t kvx_progress(kvx_engine *engine, uint64_t token);

/* -- pure helpers, exposed for tests and for `doctor` ------------------------------------------------ */
/* Blocks of a grant (blocks.h). kvx_blocks_new copies its arguments; KVX_E_INVALID: an empty piece, too many parts, or
 * ids that do not ascend; KVX_E_LOCAL_RANGE: a piece ends behind `length`. kvx_blocks_cover: 1 = all of the range; the
 * cursor says where the last one was found, since the ranges of one op mostly follow each other. */
typedef struct kvx_blocks kvx_blocks;
typedef struct kvx_blocks_cursor {
    uint32_t part;
    uint32_t block;
} kvx_blocks_cursor;
int kvx_blocks_new(const kvx_part *parts, uint32_t part_count, const uint64_t *blocks, uint32_t block_count,
                   uint64_t length, kvx_blocks **made_p);
void kvx_blocks_free(kvx_blocks *blocks); /* NULL is nothing */
int kvx_blocks_cover(const kvx_blocks *blocks, kvx_blocks_cursor *cursor, uint64_t offset, uint64_t length);

/* The allocator inside an arena, see space.h: KVX_E_DEVICE_MEMORY when nothing fits, KVX_E_INVALID for an offset that
 * is not taken. */
typedef struct kvx_space kvx_space;
kvx_space *kvx_space_open(uint64_t length);
void kvx_space_close(kvx_space *space);
int kvx_space_take(kvx_space *space, uint64_t length, uint64_t alignment, uint64_t *offset_p);
int kvx_space_give(kvx_space *space, uint64_t offset);
void kvx_space_query(const kvx_space *space, uint64_t *taken_p, uint64_t *largest_p, uint32_t *extents_p);
const char *kvx_status_name(int status);
void kvx_copy(void *target, const void *source, uint64_t length, uint64_t nt_bytes_min);
uint32_t kvx_crc32c(uint32_t seed, const void *data, uint64_t length);
/* Can tcp encrypt here? KVX_OK, or KVX_E_UNSUPPORTED and why not. */
int kvx_encryption_probe(char *why, size_t why_size);
void kvx_mac(const uint8_t *key, const void *data, uint64_t length, uint8_t *mac);

/* status.h: every code that the native engine returns, in one enum.
 *
 * Ranges say whose fault it is and how much broke (each range is contiguous):
 *   1..99     caller      the call was wrong, nothing happened
 *   100..199  operation   this transfer failed, the peer is fine
 *   200..299  peer        everything to that peer is affected
 *   300..399  transport   this node cannot (resources, permissions, support)
 *   400..499  internal    a bug of ours
 * Outputs of a function are written only when it returns KVX_OK. `status.py` maps each code to a
 * typed error; an unknown code becomes the base class of its range. */
#ifndef KVX_STATUS_H
#define KVX_STATUS_H

enum kvx_status {
    KVX_OK = 0,

    KVX_AGAIN = 1,           /* full: nothing was taken, try again after a completion */
    KVX_E_INVALID = 2,       /* an argument makes no sense */
    KVX_E_LENGTH = 3,        /* zero, overflowing or too large a length */
    KVX_E_OVERLAP = 4,       /* registration overlaps another region in part */
    KVX_E_ALIGN = 5,         /* address or length not aligned as the transport needs */
    KVX_E_BUSY = 6,          /* the region has live tokens */
    KVX_E_NO_REGION = 7,     /* no such local region */
    KVX_E_NO_PEER = 8,       /* no such peer handle */
    KVX_E_NO_IMPORT = 9,     /* no such import handle */
    KVX_E_NO_GRANT = 10,     /* no such local grant */
    KVX_E_NO_TRANSPORT = 11, /* no such transport, or it is not open */
    KVX_E_LIMIT = 12,        /* a named maximum of the configuration is reached */
    KVX_E_CLOSED = 13,       /* the engine is closing */
    KVX_E_LOCAL_RANGE = 14,  /* a segment leaves the local region */
    KVX_E_READ_ONLY = 15,    /* a get into local memory that was registered read-only */
    KVX_PENDING = 16,        /* internal to transports: accepted, the completion follows */

    KVX_E_CANCELLED = 100, /* cancelled by kvx_cancel */
    KVX_E_RANGE = 101,     /* a segment leaves the remote grant (owner's check or ours) */
    KVX_E_ACCESS = 102,    /* the grant does not allow this direction */
    KVX_E_KEY = 103,       /* wrong key: the authenticator does not match */
    KVX_E_STALE = 104,     /* the generation is not the live one */
    KVX_E_UNKNOWN = 105,   /* the owner knows no such grant (expired, released or never made) */
    KVX_E_REVOKED = 106,   /* the grant was revoked while the transfer ran */
    KVX_E_INTEGRITY = 107, /* checksums differ */
    KVX_E_INJECTED = 108,  /* the fault transport failed it on purpose */

    KVX_E_PEER_LOST = 200,   /* the connection ended */
    KVX_E_UNREACHABLE = 201, /* could not connect; sys_errno says why */
    KVX_E_TIMEOUT = 202,     /* the peer did not answer in time */
    KVX_E_NOT_KVXFER = 203,  /* whatever answered does not speak our protocol */
    KVX_E_VERSION = 204,     /* it speaks another version of it */
    KVX_E_OTHER_HOST = 205,  /* the endpoint is on another host: this transport cannot reach it */
    KVX_E_REFUSED = 206,     /* the peer is full or refuses us */
    KVX_E_LINK = 207,        /* a vendor library's link to the peer failed; only a new one helps */
    KVX_E_ENCRYPTION = 208,  /* one side encrypts its data connections and the other does not */
    KVX_E_SECRET = 209,      /* whoever answers does not know the secret of this endpoint */
    KVX_E_NOT_SENT = 210,    /* the connection ended before anything of the op was sent */

    KVX_E_NOMEM = 300,         /* out of memory */
    KVX_E_FDS = 301,           /* out of file descriptors */
    KVX_E_SHM_SPACE = 302,     /* shared memory is too small */
    KVX_E_MEMLOCK = 303,       /* the locked-memory limit is too low */
    KVX_E_UNSUPPORTED = 304,   /* this kernel, machine or transport cannot do it */
    KVX_E_SYSTEM = 305,        /* a system call failed; sys_errno says why */
    KVX_E_CMA_DENIED = 306,    /* cross-memory attach is not allowed between the two processes */
    KVX_E_NO_DEVICE = 307,     /* no such accelerator */
    KVX_E_NO_CONTEXT = 308,    /* the accelerator has no context in this thread: no device was set */
    KVX_E_DEVICE = 309,        /* the accelerator or its driver failed */
    KVX_E_DEVICE_MEMORY = 310, /* not enough contiguous memory on the accelerator */
    KVX_E_HOST_MEMORY = 311,   /* host memory that the accelerator's DMA does not reach: wrong allocator */

    KVX_E_INTERNAL = 400
};

#endif

/* ascend_status.c: the libraries' statuses in our words. Pure: the numbers are facts of the vendor's documents, and the
 * set of them is open, so the last line is the important one. */
#include "ascend/ascend.h"
#include "status.h"

int kvx_ascend_status(uint32_t raw) {
    switch (raw) {
    case 0:
        return KVX_OK;
    case 100000: /* ACL: a parameter */
    case 103900: /* HIXL: a parameter */
    case 107000: /* runtime: a parameter */
        return KVX_E_INVALID;
    case 103901: /* HIXL: time is up */
    case 107019: /* waiting for the device */
    case 107020: /* a task on the device */
    case 507046: /* synchronising a stream */
    case 507047: /* synchronising an event */
        return KVX_E_TIMEOUT;
    case 103902: /* not connected */
        return KVX_E_PEER_LOST;
    case 103903: /* connected already */
        return KVX_E_BUSY;
    case 103905: /* HIXL: not in this engine */
    case 200001:
    case 200006:
    case 207000: /* runtime: not on this chip */
        return KVX_E_UNSUPPORTED;
    case 203900: /* HIXL: no stream or slot is free */
    case 207005: /* runtime: no resource is free */
        return KVX_AGAIN;
    case 200000:
    case 207001:
        return KVX_E_DEVICE_MEMORY;
    case 107002:
        return KVX_E_NO_CONTEXT;
    case 107001:
    case 207004:
        return KVX_E_NO_DEVICE;
    default:
        return raw >= 507000 && raw <= 507999 ? KVX_E_DEVICE : KVX_E_LINK;
    }
}

bool kvx_ascend_latches(uint32_t raw) {
    switch (raw) {
    case 0:
    case 103900: /* a parameter */
    case 103902: /* not connected */
    case 103903: /* connected already */
    case 103905: /* not supported */
    case 203900: /* out of slots */
        return false;
    default:
        return true;
    }
}

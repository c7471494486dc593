/* transports.c: the transports of this build, and how a name of the configuration leads to one. */
#include "transport.h"

#include <string.h>

#define DECORATOR "fault+"

static const kvx_transport_ops *const KNOWN[] = {&kvx_transport_loop, &kvx_transport_shm, &kvx_transport_tcp,
                                                 &kvx_transport_hixl};

int kvx_transport_find(const char *name, kvx_transport_ops *ops_p) {
    bool decorated = strncmp(name, DECORATOR, strlen(DECORATOR)) == 0;
    const char *base = decorated ? name + strlen(DECORATOR) : name;
    for (size_t i = 0; i < sizeof KNOWN / sizeof KNOWN[0]; i++) {
        if (strcmp(KNOWN[i]->name, base) == 0) {
            *ops_p = *KNOWN[i];
            return decorated ? kvx_transport_fault_wrap(KNOWN[i], ops_p) : KVX_OK;
        }
    }
    return KVX_E_NO_TRANSPORT;
}

/* hixl_location.c: the payload of a LOCATION frame, where a grant lies: as bytes, and back with everything checked that
 * can be checked without the one who sent it. Pure. */
#include "hixl/hixl.h"
#include "core/sockets.h"

#include <string.h>

enum {
    AT_ADDRESS = 0,
    AT_LENGTH = 8,
    AT_KIND = 16,
    AT_PHYSICAL = 20,
    AT_EPOCH = 24,
    AT_PROCESS = 32,
    AT_VERSION = 40,
    AT_BOOT = 48,
    AT_ARENA_OFFSET = 64,
    AT_ARENA_LENGTH = 72,
    AT_KEY = 80,
    AT_ENGINE = 160,
    AT_KNOWN = 224 /* and zeros from 232 on */
};

void kvx_hixl_location_encode(const hixl_location *location, uint8_t units[HIXL_LOCATION_UNITS * 16]) {
    memset(units, 0, HIXL_LOCATION_UNITS * 16);
    kvx_bytes_store(units + AT_ADDRESS, location->address, 8);
    kvx_bytes_store(units + AT_LENGTH, location->length, 8);
    kvx_bytes_store(units + AT_KIND, location->kind, 4);
    kvx_bytes_store(units + AT_PHYSICAL, (uint32_t)location->physical, 4);
    kvx_bytes_store(units + AT_EPOCH, location->epoch, 8);
    kvx_bytes_store(units + AT_PROCESS, location->process, 8);
    kvx_bytes_store(units + AT_VERSION, location->version, 8);
    kvx_bytes_store(units + AT_KNOWN, location->known, 8);
    memcpy(units + AT_BOOT, location->boot_id, 16);
    kvx_bytes_store(units + AT_ARENA_OFFSET, location->arena_offset, 8);
    kvx_bytes_store(units + AT_ARENA_LENGTH, location->arena_length, 8);
    memcpy(units + AT_KEY, location->key, sizeof location->key);
    memcpy(units + AT_ENGINE, location->engine, sizeof location->engine);
}

bool kvx_hixl_location_decode(hixl_location *location, const uint8_t *units, uint32_t count) {
    if (count != HIXL_LOCATION_UNITS) {
        return false;
    }
    location->address = kvx_bytes_load(units + AT_ADDRESS, 8);
    location->length = kvx_bytes_load(units + AT_LENGTH, 8);
    location->kind = (uint32_t)kvx_bytes_load(units + AT_KIND, 4);
    location->physical = (int32_t)(uint32_t)kvx_bytes_load(units + AT_PHYSICAL, 4);
    location->epoch = kvx_bytes_load(units + AT_EPOCH, 8);
    location->process = kvx_bytes_load(units + AT_PROCESS, 8);
    location->version = kvx_bytes_load(units + AT_VERSION, 8);
    location->known = kvx_bytes_load(units + AT_KNOWN, 8);
    memcpy(location->boot_id, units + AT_BOOT, 16);
    location->arena_offset = kvx_bytes_load(units + AT_ARENA_OFFSET, 8);
    location->arena_length = kvx_bytes_load(units + AT_ARENA_LENGTH, 8);
    memcpy(location->key, units + AT_KEY, sizeof location->key);
    memcpy(location->engine, units + AT_ENGINE, sizeof location->engine);
    struct sockaddr_storage address;
    socklen_t length;
    uint64_t end;
    bool terminated =
        location->key[sizeof location->key - 1] == '\0' && location->engine[sizeof location->engine - 1] == '\0';
    bool mapped = terminated && location->key[0] != '\0';
    return terminated && (location->kind == KVX_MEM_HBM || location->kind == KVX_MEM_PINNED) && location->length != 0 &&
           !__builtin_add_overflow(location->address, location->length, &end) && location->version <= location->known &&
           (!mapped || (location->arena_offset <= location->arena_length &&
                        location->length <= location->arena_length - location->arena_offset)) &&
           kvx_address_parse(location->engine, &address, &length) == KVX_OK;
}

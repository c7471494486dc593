/* hixl_map.c: memory of other processes of this host, mapped by a key that its owner told us.
 *
 * A device maps each piece once, whoever needs it: links, for their copies, and the application, which looks at a
 * landing in place. The driver is asked on the device's thread alone. While anything is mapped the side link to its
 * owner stays open (peer->copy_links), and its end tells the owner that nothing is. */
#include "hixl/hixl.h"

#include <stdlib.h>
#include <string.h>

/* -- pieces ---------------------------------------------------------------------------------------------------------
 */

static int hixl_map_acquire(hixl_device *device, const char *key, hixl_map **map_p) {
    hixl_map *map = device->maps;
    while (map != NULL && strcmp(map->key, key) != 0) {
        map = map->next;
    }
    if (map == NULL) {
        void *base = NULL;
        map = calloc(1, sizeof *map);
        int status = map == NULL ? KVX_E_NOMEM : device->hixl->api->ipc_import(device->index, key, &base, NULL);
        if (status != KVX_OK) {
            free(map);
            return status;
        }
        memcpy(map->key, key, strlen(key) + 1);
        map->base = base;
        map->next = device->maps;
        device->maps = map;
    }
    map->users++;
    *map_p = map;
    return KVX_OK;
}

static void hixl_map_release(hixl_device *device, hixl_map *map) {
    if (--map->users != 0) {
        return;
    }
    hixl_map **at = &device->maps;
    while (*at != map) {
        at = &(*at)->next;
    }
    *at = map->next;
    (void)device->hixl->api->ipc_close(device->index, map->key, NULL); /* no way to act on an error */
    free(map);
}

/* -- of a link ------------------------------------------------------------------------------------------------------
 */

void kvx_hixl_maps_drop(hixl_link *link) {
    while (link->map_count > 0) {
        hixl_map_release(link->device, link->maps[--link->map_count]);
    }
}

/* Where the grant begins for copies of this device. */
int kvx_hixl_link_map(hixl_link *link, const hixl_location *location, uint64_t *address_p) {
    if (location->process == kvx_hixl_process()) {
        *address_p = location->address;
        return KVX_OK;
    }
    hixl_map *map = NULL;
    for (uint32_t i = 0; i < link->map_count && map == NULL; i++) {
        map = strcmp(link->maps[i]->key, location->key) == 0 ? link->maps[i] : NULL;
    }
    if (map == NULL) {
        if (link->map_count == HIXL_MAPS_MAX) {
            if (link->live != 0) {
                return KVX_AGAIN;
            }
            kvx_hixl_maps_drop(link);
        }
        int status = hixl_map_acquire(link->device, location->key, &map);
        if (status != KVX_OK) {
            return status;
        }
        link->maps[link->map_count++] = map;
    }
    *address_p = (uint64_t)(uintptr_t)map->base + location->arena_offset;
    return KVX_OK;
}

/* -- of the application ---------------------------------------------------------------------------------------------
 */

static hixl_device *hixl_map_device_find(hixl_transport *hixl, int32_t physical) {
    for (uint32_t i = 0; i < hixl->device_count; i++) {
        if (hixl->devices[i].physical == physical) {
            return &hixl->devices[i];
        }
    }
    return NULL;
}

void kvx_hixl_view_begin(hixl_import *import) {
    hixl_transport *hixl = import->peer->hixl;
    const hixl_location *location = &import->location;
    hixl_device *device = hixl_map_device_find(hixl, location->physical);
    bool here = memcmp(location->boot_id, hixl->boot_id, sizeof hixl->boot_id) == 0;
    if (!here || device == NULL || location->kind != KVX_MEM_HBM) {
        kvx_import_done(import->import, KVX_E_UNSUPPORTED, 0);
    } else if (location->process == kvx_hixl_process()) {
        import->import->mapping = (uint8_t *)(uintptr_t)location->address;
        import->import->device = device->index;
        kvx_import_done(import->import, KVX_OK, 0);
    } else if (location->key[0] == '\0' || (hixl->config->flags & KVX_ENGINE_NO_IPC)) {
        kvx_import_done(import->import, KVX_E_UNSUPPORTED, 0);
    } else {
        import->view = HIXL_TO_MAP;
        import->view_next = device->views;
        device->views = import;
        import->peer->copy_links++;
        kvx_core_wake(hixl->core, hixl->slot, (uint32_t)device->index + 1);
    }
}

void kvx_hixl_view_end(hixl_import *import) {
    hixl_transport *hixl = import->peer->hixl;
    hixl_device *device = hixl_map_device_find(hixl, import->location.physical);
    import->view = HIXL_TO_UNMAP;
    kvx_core_wake(hixl->core, hixl->slot, (uint32_t)device->index + 1);
}

static hixl_import *hixl_map_view_pending(hixl_device *device) {
    pthread_mutex_lock(&device->hixl->lock);
    hixl_import *import = device->views;
    while (import != NULL && import->view == HIXL_SEEN) {
        import = import->view_next;
    }
    pthread_mutex_unlock(&device->hixl->lock);
    return import;
}

/* With the lock held. */
static void hixl_map_view_forget(hixl_device *device, hixl_import *import) {
    hixl_import **at = &device->views;
    while (*at != import) {
        at = &(*at)->view_next;
    }
    *at = import->view_next;
    import->view = HIXL_UNSEEN;
    hixl_peer *peer = import->peer;
    if (--peer->copy_links == 0 && (peer->lost || peer->closing)) {
        kvx_hixl_todo(peer);
    }
}

static void hixl_map_view_map(hixl_device *device, hixl_import *import) {
    hixl_map *map = NULL;
    int status = hixl_map_acquire(device, import->location.key, &map);
    pthread_mutex_lock(&device->hixl->lock);
    kvx_import *kvx = import->import;
    if (status == KVX_OK) {
        import->mapped = map;
        import->view = HIXL_SEEN;
        kvx->mapping = map->base + import->location.arena_offset;
        kvx->device = device->index;
        if (import->peer->closing) { /* nobody will say that he looks no more */
            import->import = NULL;
            import->view = HIXL_TO_UNMAP;
        }
    } else {
        hixl_map_view_forget(device, import);
    }
    kvx_import_done(kvx, status, 0);
    pthread_mutex_unlock(&device->hixl->lock);
}

static void hixl_map_view_unmap(hixl_device *device, hixl_import *import) {
    hixl_map_release(device, import->mapped);
    pthread_mutex_lock(&device->hixl->lock);
    import->mapped = NULL;
    hixl_map_view_forget(device, import);
    kvx_hixl_import_end(import);
    pthread_mutex_unlock(&device->hixl->lock);
}

void kvx_hixl_views_turn(hixl_device *device) {
    hixl_import *import;
    while ((import = hixl_map_view_pending(device)) != NULL) {
        if (import->view == HIXL_TO_MAP) {
            hixl_map_view_map(device, import);
        } else {
            hixl_map_view_unmap(device, import);
        }
    }
}

/* The core ends what is pending by itself, and the imports go with their peers. */
void kvx_hixl_views_close(hixl_device *device) {
    while (device->views != NULL) {
        hixl_import *import = device->views;
        if (import->mapped != NULL) {
            hixl_map_release(device, import->mapped);
            import->mapped = NULL;
        }
        hixl_map_view_forget(device, import);
    }
}

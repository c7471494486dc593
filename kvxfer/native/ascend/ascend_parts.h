/* ascend_parts.h: what the files behind ascend.h share. Nobody else includes it.
 *
 * ascend_load.c owns the order of things and calls the others; ascend_acl.c, ascend_copy.c and ascend_hixl.cc fill
 * their part of the table from the symbols of one library; ascend_text.c and ascend_status.c, below them, have the
 * words. */
#ifndef KVX_ASCEND_PARTS_H
#define KVX_ASCEND_PARTS_H

#include "ascend/ascend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Raw statuses of our own, where the library has none to give. The libraries stay far below them. */
#define KVX_ASCEND_RAW_EXCEPTION 0x7fff0001U /* a C++ exception came out of the library */

/* Statuses of the libraries that our code names itself. */
#define KVX_ASCEND_RAW_REPEAT_INIT 100002U
#define KVX_ASCEND_RAW_DEVICE_ID   107001U
#define KVX_ASCEND_RAW_FAILED      503900U

/* A text that grows until its buffer is full. */
typedef struct kvx_ascend_text {
    char *data;
    size_t size, used;
} kvx_ascend_text;

__attribute__((format(printf, 2, 3))) void kvx_ascend_append(kvx_ascend_text *text, const char *format, ...);

/* The symbol, or NULL with the name appended to `missing` (", " between names). */
void *kvx_ascend_symbol(void *library, const char *name, kvx_ascend_text *missing);

/* Fill their half of the table. False: `missing` has the names of required symbols that the library lacks. */
bool kvx_ascend_acl_bind(void *library, kvx_ascend_api *api, kvx_ascend_text *missing);
void kvx_ascend_copy_bind(kvx_ascend_api *api); /* after ACL's */
bool kvx_ascend_hixl_bind(void *hixl, void *meta, kvx_ascend_api *api, kvx_ascend_text *missing);
/* aclInit, number of devices, versions, SoC name. False: `why` says what failed. */
bool kvx_ascend_acl_start(kvx_ascend_facts *facts, kvx_ascend_text *why);

/* The device's context for this thread; `before` is what leave() puts back, NULL for nothing. */
int kvx_ascend_enter(int32_t device, void **before_p, uint32_t *raw_p);
void kvx_ascend_leave(void *before);
char *kvx_ascend_exception(void); /* where the text of this thread's last one is, KVX_ASCEND_TEXT_MAX bytes */
/* The text of the last exception in this thread, "" for none; clears it. */
const char *kvx_ascend_exception_text(void);

#ifdef __cplusplus
}
#endif
#endif

/* ascend_text.c: what the loader and the binders of ascend.h share: texts of what went wrong, and the symbols of a
 * library. */
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "ascend/ascend_parts.h"

static _Thread_local char thrown[KVX_ASCEND_TEXT_MAX]; /* the last exception of this thread */

void kvx_ascend_append(kvx_ascend_text *text, const char *format, ...) {
    if (text->used + 1 >= text->size)
        return;
    va_list list;
    va_start(list, format);
    int written = vsnprintf(text->data + text->used, text->size - text->used, format, list);
    va_end(list);
    size_t room = text->size - text->used - 1;
    if (written > 0)
        text->used += (size_t)written < room ? (size_t)written : room;
}

void *kvx_ascend_symbol(void *library, const char *name, kvx_ascend_text *missing) {
    void *symbol = dlsym(library, name);
    if (!symbol && missing)
        kvx_ascend_append(missing, "%s%s", missing->used ? ", " : "", name);
    return symbol;
}

char *kvx_ascend_exception(void) {
    return thrown;
}

const char *kvx_ascend_exception_text(void) {
    static _Thread_local char last[sizeof thrown];
    memcpy(last, thrown, sizeof last);
    thrown[0] = 0;
    return last;
}

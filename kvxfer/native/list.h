/* list.h: doubly linked lists of structs with the members `next` and `previous`. A list is a pointer to its first one,
 * NULL when it is empty; `first` is that pointer, where it is kept. */
#ifndef KVX_LIST_H
#define KVX_LIST_H

#define KVX_LIST_PUSH(first, item)                                                                                     \
    do {                                                                                                               \
        (item)->previous = NULL;                                                                                       \
        (item)->next = (first);                                                                                        \
        if ((item)->next != NULL) {                                                                                    \
            (item)->next->previous = (item);                                                                           \
        }                                                                                                              \
        (first) = (item);                                                                                              \
    } while (0)

/* Of a member of that list; its own members are left as they are, for whoever walks the list. */
#define KVX_LIST_REMOVE(first, item)                                                                                   \
    do {                                                                                                               \
        if ((item)->previous != NULL) {                                                                                \
            (item)->previous->next = (item)->next;                                                                     \
        } else {                                                                                                       \
            (first) = (item)->next;                                                                                    \
        }                                                                                                              \
        if ((item)->next != NULL) {                                                                                    \
            (item)->next->previous = (item)->previous;                                                                 \
        }                                                                                                              \
    } while (0)

/* Queues: the same with `last` beside `first`, in a struct or among the members of one. */
#define KVX_QUEUE_APPEND(first, last, item, next)                                                                      \
    do {                                                                                                               \
        (item)->next = NULL;                                                                                           \
        if ((last) != NULL) {                                                                                          \
            (last)->next = (item);                                                                                     \
        } else {                                                                                                       \
            (first) = (item);                                                                                          \
        }                                                                                                              \
        (last) = (item);                                                                                               \
    } while (0)

#endif

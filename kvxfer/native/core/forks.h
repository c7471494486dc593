/* forks.h: sockets that a forked child must not keep open. */
#ifndef KVX_FORKS_H
#define KVX_FORKS_H

/* Remember a socket that was just made; returns `fd`, also when that is -1. In a child of a fork its descriptor leads
 * nowhere. Nothing has to be told when it is closed. Any thread. */
int kvx_owned(int fd);

#endif

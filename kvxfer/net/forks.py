"""Descriptors of the event loop that a forked child must not keep: nobody would notice that this process has died.

The idea is that of `native/forks.c`, for what Python opened: in a child these descriptors lead nowhere, and keep their
numbers, since objects in the child still close them.
"""

from __future__ import annotations

import os

_owned: dict[int, tuple[int, int]] = {}  # descriptor -> what it stood for (device and inode)


def own(descriptor: int) -> None:
    """Remember a socket or a lock. Nothing has to be told when it is closed: its number then stands for another one."""
    if descriptor >= 0:
        status = os.fstat(descriptor)
        _owned[descriptor] = (status.st_dev, status.st_ino)


def _in_child() -> None:
    owned = dict(_owned)
    _owned.clear()
    nowhere = os.open(os.devnull, os.O_RDWR) if owned else -1
    for descriptor, known in owned.items():
        try:
            status = os.fstat(descriptor)
        except OSError:
            continue  # closed long ago
        if (status.st_dev, status.st_ino) == known:
            os.dup2(nowhere, descriptor, inheritable=False)
    if owned:
        os.close(nowhere)


os.register_at_fork(after_in_child=_in_child)

"""Files that killed processes left in the daemon's directory: sockets of engines and files of counters.

The idea: a process that dies cannot clean up, but its daemon sees it die. A socket that refuses a connection has no
owner any more, and a counters file without such a socket and without its process is history.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import time
from collections.abc import Collection
from pathlib import Path

from kvxfer.errors import ProtocolError
from kvxfer.native.counters import read_counters
from kvxfer.net.listeners import LOCK_NAME

ENGINE_CHARS = 12  # of its id, in the names of its files
DEAD_AFTER_S = 60.0


def remove_leftovers(directory: Path, live_engines: Collection[str]) -> int:
    """Remove what nobody owns any more, except files of the engines in ``live_engines`` (hex ids); returns how many."""
    live = {engine_id[:ENGINE_CHARS] for engine_id in live_engines}
    removed = 0
    for path in sorted(directory.glob("e-*.sock")):
        if path.stem.removeprefix("e-") not in live and not _accepts(path):
            removed += _unlink(path)
    for path in directory.glob("c-*.counters"):
        name = path.stem.removeprefix("c-")
        if name not in live and not (directory / f"e-{name}.sock").exists() and not _owner_lives(path):
            removed += _unlink(path)
    return removed


def remove_dead_directories(parent: Path, prefix: str) -> int:
    """Remove the directories of embedded daemons whose processes were killed; returns how many.

    A living one holds the lock in its directory; a young one may not have come to that yet.
    """
    removed = 0
    for directory in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # not ours, or somebody else was faster
            status = directory.lstat()
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if ours and time.time() - status.st_mtime > DEAD_AFTER_S and _lock_is_free(directory / LOCK_NAME):
                shutil.rmtree(directory)
                removed += 1
    return removed


def _lock_is_free(path: Path) -> bool:
    lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except BlockingIOError:  # alive, with a full backlog
            return True
        except OSError:
            return False
    return True


def _owner_lives(path: Path) -> bool:
    try:
        os.kill(read_counters(path).pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError, ProtocolError):  # no such process, no such number, no such file
        return False
    return True


def _unlink(path: Path) -> int:
    with contextlib.suppress(OSError):  # somebody was faster, or it is a directory, which is none of ours
        path.unlink()
        return 1
    return 0

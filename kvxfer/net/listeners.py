"""Sockets that listen: bound before anything else starts, so that a daemon is either fully up or not there at all.

The idea of the Unix socket: a lock file beside it, held for the life of the process, decides who owns the path. Only
its holder may remove a socket that a crashed daemon left behind, so two daemons that start at once cannot delete each
other's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from kvxfer.addresses import Address, is_loopback, is_numeric, parse_address
from kvxfer.errors import NO_PORTS_HINT, ConfigError
from kvxfer.net.forks import own

BACKLOG = 512
LOCK_NAME = "kvxferd.lock"
LISTENS = "0A"  # in /proc/net/tcp
PROBE_S = 0.5  # a live daemon's socket accepts at once
_peer_credentials = struct.Struct("3i")


class UnixListener:
    """The bound socket of a daemon at ``path``, and the lock that makes it ours. Raises `ConfigError`.

    Its mode is 0600; ``shared``: 0666, for an acceptor that asks the kernel who connects.
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        self.path = path
        self._lock = _lock(path)
        try:
            self.socket = _bind_unix(path, 0o666 if shared else 0o600)
        except BaseException:
            os.close(self._lock)
            raise
        self._inode = path.stat().st_ino

    def close(self) -> None:
        """Close the socket, remove its path if it is still ours, and let go of the lock."""
        self.socket.close()
        if self._lock >= 0:
            with contextlib.suppress(FileNotFoundError):
                if self.path.stat().st_ino == self._inode:
                    self.path.unlink()
            os.close(self._lock)
            self._lock = -1


def _lock(path: Path) -> int:
    lock_path = path.with_name(LOCK_NAME)
    try:
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as failure:
        raise _unusable(path, failure) from failure
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(lock, 32).decode("ascii", "replace").strip()
        os.close(lock)
        raise _already_running(path, int(owner) if owner.isdigit() else None) from None
    except OSError as failure:  # a file system without locks
        os.close(lock)
        raise _unusable(path, failure) from failure
    with contextlib.suppress(OSError):  # a full disk: the pid is for people, the lock is what counts
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
    own(lock)
    return lock


def _bind_unix(path: Path, mode: int) -> socket.socket:
    owner = _probe(path)
    if owner is not None:
        raise _already_running(path, owner or None)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        os.chmod(listener.fileno(), 0o600)  # Linux: the mode that the path is made with
        listener.bind(str(path))
        path.chmod(mode)
        listener.listen(BACKLOG)
    except OSError as failure:
        listener.close()
        raise _unusable(path, failure) from failure
    own(listener.fileno())
    return listener


def _probe(path: Path) -> int | None:
    """The pid of whoever listens at ``path``, 0 when that is busy or frozen, None when nobody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(str(path))
        except (TimeoutError, BlockingIOError):  # its backlog is full
            return 0
        except OSError:
            return None
        return peer_credentials(probe)[0]


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end of a Unix socket, as the kernel recorded them."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _peer_credentials.size)
    pid, uid, _ = _peer_credentials.unpack(raw)
    return pid, uid


def _already_running(path: Path, pid: int | None) -> ConfigError:
    who = f" (pid {pid})" if pid else ""
    hint = "stop it, or give this daemon another socket_dir and other ports"
    return ConfigError(f"a daemon is already running at {path}{who}", key="socket_dir", hint=hint, pid=pid)


def _unusable(path: Path, failure: OSError) -> ConfigError:
    why = failure.strerror or str(failure)
    hint = "set socket_dir to a directory where this user may create sockets"
    return ConfigError(f"cannot create the socket {path}: {why}", key="socket_dir", hint=hint, errno=failure.errno)


def listen_tcp(key: str, address: Address) -> socket.socket:
    """A bound, listening socket; `::` takes IPv4 as well. Raises `ConfigError` that names the option and the port."""
    host = "127.0.0.1" if address.host == "localhost" else address.host
    flags = socket.AI_NUMERICHOST | socket.AI_PASSIVE
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM, flags=flags)[0]
        listener = socket.socket(family, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    except OSError as failure:
        raise bind_error(key, address, failure) from failure
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit it. Not every event loop sets it on them, and without it the second of two small
        # messages in a row waits for the acknowledgement of the first, which the other side delays by 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if host == "::" else 1)
        listener.bind(where)
        listener.listen(BACKLOG)
    except OSError as failure:
        listener.close()
        raise bind_error(key, address, failure) from failure
    own(listener.fileno())
    return listener


def bound_address(listener: socket.socket) -> Address:
    """Where a listening socket really listens; the port is the one that the system chose for port 0."""
    name = listener.getsockname()
    return Address(str(name[0]), int(name[1]))


def check_way_back(ours: Sequence[str], peer: Sequence[str]) -> None:
    """Refuse to name only loopback addresses to a node on another host: it could never dial them. `ConfigError`."""
    if not all(is_loopback(parse_address(text).host) for text in ours):
        return
    for text in peer:
        there = parse_address(text)
        if not is_numeric(there.host) or is_loopback(there.host) or _is_own(there):
            continue
        raise ConfigError(
            f"this node is known as {', '.join(ours)}, which the peer {there} cannot reach",
            key="listen",
            hint="set listen (or advertise) to an address of this host that the peer can reach",
        )


def _is_own(address: Address) -> bool:
    """One of this host's own addresses: it may be bound."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.bind((address.host.partition("%")[0], 0))
        return True
    return False


def port_owner(port: int) -> int | None:
    """The pid of a process that listens on a TCP port, if it can be seen: another user's cannot."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
            inodes |= {f"socket:[{row[9]}]" for row in rows if row[3] == LISTENS and int(row[1][-4:], 16) == port}
    if not inodes:
        return None
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.readlink(link) in inodes for link in (process / "fd").iterdir()):
                return int(process.name)
    return None


def bind_error(key: str, address: Address, failure: OSError) -> ConfigError:
    """One clear error for a listener that could not be bound, whichever listener it was."""
    port = address.port
    why = failure.strerror or str(failure)
    if port == 0 and failure.errno == errno.EADDRINUSE:
        why = "every local port is in use"
        hint = NO_PORTS_HINT
    elif failure.errno == errno.EADDRINUSE:
        owner = port_owner(port)
        why = "the port is in use" + (f" by pid {owner}" if owner else "")
        hint = f"stop what listens on port {port}, or set {key} to another one (0 = any)"
    elif failure.errno in (errno.EACCES, errno.EPERM):
        hint = f"ports below 1024 need privileges: set {key} to a higher one"
    elif is_loopback(address.host):
        hint = f"set {key} to another address"
    else:
        hint = f"no interface of this host has that address: set {key} to one that it has"
    return ConfigError(f"cannot listen on {address}, {key}: {why}", key=key, port=port, hint=hint, errno=failure.errno)

"""Listening sockets: who owns the path, which families answer, and errors that say what to do."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from pathlib import Path
from typing import cast

import pytest

from kvxfer.addresses import Address
from kvxfer.errors import ConfigError
from kvxfer.net.listeners import UnixListener, bind_error, bound_address, listen_tcp
from tests.conftest import slack


def test_path_belongs_to_one_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "kvxferd.sock"
    first = UnixListener(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match=f"already running at {path} .pid {os.getpid()}"):
        UnixListener(path)
    first.close()
    first.close()
    assert not path.exists()
    UnixListener(path).close()


def test_live_socket_without_a_lock_is_respected(tmp_path: Path) -> None:
    path = tmp_path / "kvxferd.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(ConfigError, match="already running"):
            UnixListener(path)
    assert path.exists()


def test_socket_that_was_replaced_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "kvxferd.sock"
    ours = UnixListener(path)
    path.unlink()
    path.write_text("somebody else's")
    ours.close()
    assert path.exists()


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file") as caught:
        UnixListener(tmp_path / "none" / "kvxferd.sock")
    assert "socket_dir" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("host", "reached"),
    [("127.0.0.1", ["127.0.0.1"]), ("localhost", ["127.0.0.1"]), ("::1", ["::1"]), ("::", ["::1", "127.0.0.1"])],
)
def test_families(host: str, reached: list[str]) -> None:
    with listen_tcp("listen", Address(host, 0)) as listener:
        port = bound_address(listener).port
        assert port > 0
        for target in reached:
            socket.create_connection((target, port), timeout=5).close()


async def test_small_messages_in_a_row_are_not_held_back() -> None:
    """Whatever the event loop sets by itself: asyncio does so for some sockets only."""
    loop = asyncio.get_running_loop()
    accepted: asyncio.Queue[asyncio.Transport] = asyncio.Queue()
    ended: asyncio.Queue[None] = asyncio.Queue()

    class Side(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            accepted.put_nowait(cast(asyncio.Transport, transport))  # uvloop's is none by its type

        def connection_lost(self, _: Exception | None) -> None:
            ended.put_nowait(None)

    server = await loop.create_server(Side, sock=listen_tcp("listen", Address("127.0.0.1", 0)))
    try:
        await loop.create_connection(Side, *server.sockets[0].getsockname())
        async with asyncio.timeout(5 * slack()):
            sides = [await accepted.get() for _ in range(2)]
    finally:
        server.close()
    for side in sides:
        assert side.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        side.close()
    async with asyncio.timeout(5 * slack()):
        for _ in sides:
            await ended.get()


def test_ipv6_loopback_does_not_take_ipv4() -> None:
    with listen_tcp("listen", Address("::1", 0)) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", bound_address(listener).port), timeout=5)


def test_port_in_use() -> None:
    with listen_tcp("listen", Address("127.0.0.1", 0)) as listener:
        taken = bound_address(listener)
        with pytest.raises(ConfigError, match=f"{taken}, http: the port is in use") as caught:
            listen_tcp("http", taken)
    assert caught.value.fields["port"] == taken.port
    assert "http" in str(caught.value.hint)


def test_address_of_another_host() -> None:
    with pytest.raises(ConfigError, match="no interface"):
        listen_tcp("listen", Address("192.0.2.1", 0))


def test_frozen_daemon_without_a_lock_is_respected(tmp_path: Path) -> None:
    path = tmp_path / "kvxferd.sock"
    with socket.socket(socket.AF_UNIX) as frozen, socket.socket(socket.AF_UNIX) as first:
        frozen.bind(str(path))
        frozen.listen(0)
        first.connect(str(path))  # nobody accepts, so now its backlog is full
        with pytest.raises(ConfigError, match="already running"):
            UnixListener(path)
        assert path.exists()


def test_full_disk_does_not_matter_to_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    listener = UnixListener(tmp_path / "kvxferd.sock")
    with pytest.raises(ConfigError, match="already running"):
        UnixListener(tmp_path / "kvxferd.sock")
    listener.close()


def test_port_zero_is_not_what_is_in_use() -> None:
    """The kernel has no local port left: the error says that, and what to do."""
    error = bind_error("listen", Address("127.0.0.1", 0), OSError(errno.EADDRINUSE, "in use"))
    assert "every local port is in use" in error.message
    assert "port 0" not in str(error)
    assert "ip_local_port_range" in (error.hint or "")

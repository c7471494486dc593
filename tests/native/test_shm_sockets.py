"""Where engines of one host listen, and how they find each other."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from kvxfer.errors import ConfigError, TransportUnavailable
from kvxfer.native.engine import Engine, EngineConfig
from kvxfer.native.status import StatusCode
from tests.native.conformance import Side, short_directory, within
from tests.native.shm_owner import eventually


async def connect_status(side: Side, endpoint: str) -> tuple[StatusCode, int]:
    peer, connecting = side.engine.connect(1, endpoint)
    event = await within(connecting)
    assert event.id == peer
    return StatusCode(event.status), event.sys_errno


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")


async def test_endpoints() -> None:
    with short_directory() as directory:
        side = Side(directory, ("shm",))
        try:
            boot, _, path = side.engine.transports[1].endpoint.partition(":")
            assert boot == boot_id()
            assert Path(path) == directory / f"e-{side.engine.engine_id.hex()[:12]}.sock"
            assert await connect_status(side, f"{boot}:{path}") == (StatusCode.OK, 0)
            assert await connect_status(side, f"{'0' * 32}:{path}") == (StatusCode.OTHER_HOST, 0)
            assert await connect_status(side, f"{boot}:{path}x") == (StatusCode.UNREACHABLE, 2)
            for endpoint in (path, boot, f"{boot}:", f"{boot}:x", f"{boot}:/{'x' * 108}", "x:/y"):
                assert (await connect_status(side, endpoint))[0] == StatusCode.UNREACHABLE
        finally:
            side.close()


async def test_a_listener_that_never_answers() -> None:
    with short_directory() as directory:
        side = Side(directory, ("shm",), connect_ms=150)
        endpoint = f"{side.engine.transports[1].endpoint.partition(':')[0]}:{directory}/deaf.sock"
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(f"{directory}/deaf.sock")
                listener.listen(0)
                outcomes = await asyncio.gather(*(connect_status(side, endpoint) for _ in range(4)))
                assert {status for status, _ in outcomes} == {StatusCode.TIMEOUT}, (
                    "also those its queue has no room for"
                )
            await eventually(lambda: side.engine.counters().peers == 0)
        finally:
            side.close()


def opened(directory: str) -> None:
    """Try to open an engine there."""
    Engine(EngineConfig(engine_id=bytes(range(16)), transports=("shm",), socket_dir=directory)).close()


def test_where_sockets_live() -> None:
    with pytest.raises(ConfigError, match="is too long"):
        opened(f"/tmp/{'x' * 100}")
    with pytest.raises(ConfigError, match="absolute"):
        opened("here")
    with pytest.raises(TransportUnavailable, match="No such file"):
        opened("/tmp/kvx-not-there")


def test_a_socket_that_nobody_listens_on_is_replaced() -> None:
    with short_directory() as directory:
        path = directory / f"e-{bytes(range(16)).hex()[:12]}.sock"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
            dead.bind(str(path))
        opened(str(directory))
        assert not path.exists()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as alive:
            alive.bind(str(path))
            alive.listen()
            with pytest.raises(TransportUnavailable, match="Address already in use"):
                opened(str(directory))
        path.unlink()
        path.write_text("a file of somebody")
        with pytest.raises(TransportUnavailable, match="Address already in use"):
            opened(str(directory))
        assert path.read_text() == "a file of somebody"

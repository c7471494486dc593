"""Several addresses of one owner's data port: the first that answers is used, and a mute one costs a moment."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvxfer.errors import PeerUnreachable
from tests.conftest import slack
from tests.dataplane.test_plane import sides
from tests.nodes import until
from tests.support.frames import DATA
from tests.support.proxy import proxy

LENGTH = 4096


@contextmanager
def mute() -> Iterator[str]:
    """An address that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def test_a_mute_address_does_not_hold_up_the_others(tmp_path: Path) -> None:
    async with sides(tmp_path, ("tcp",)) as (a, b):
        genuine = b.region.descriptor("w")
        with mute() as first, mute() as second:
            target = replace(genuine, endpoints={"tcp": (first, second, *genuine.endpoints["tcp"])})
            started = time.monotonic()
            transfer = await a.start(target, LENGTH)
            assert time.monotonic() - started < 2.5 * slack(), "not the time-out of each of them"
            assert transfer.address == genuine.endpoints["tcp"][0]
            await a.start(target, LENGTH)


async def test_the_first_address_is_taken_when_it_answers(tmp_path: Path) -> None:
    async with sides(tmp_path, ("tcp",)) as (a, b):
        genuine = b.region.descriptor("w")
        with mute() as other:
            target = replace(genuine, endpoints={"tcp": (*genuine.endpoints["tcp"], other)})
            transfer = await a.start(target, LENGTH)
            assert transfer.address == genuine.endpoints["tcp"][0]


async def test_an_address_that_answers_too_late_is_let_go(tmp_path: Path) -> None:
    async with sides(tmp_path, ("tcp",), tcp_streams=1) as (a, b):
        genuine = b.region.descriptor("w")
        host, _, port = genuine.endpoints["tcp"][0].rpartition(":")
        async with proxy((host, int(port)), DATA) as slow:
            slow.pause()
            target = replace(genuine, endpoints={"tcp": (slow.endpoint, *genuine.endpoints["tcp"])})
            transfer = await a.start(target, LENGTH)
            assert transfer.address == genuine.endpoints["tcp"][0]
            assert slow.accepted == 1
            slow.resume()
            await until(lambda: slow.live == 0)
            assert len(a.plane._connections._connections) == 1


async def test_when_none_answers_each_says_why(tmp_path: Path) -> None:
    async with sides(tmp_path, ("tcp",), connect_s=0.5) as (a, b):
        with socket.socket() as bound, mute() as silent:
            bound.bind(("127.0.0.1", 0))
            closed = f"127.0.0.1:{bound.getsockname()[1]}"
            target = replace(b.region.descriptor("w"), endpoints={"tcp": (closed, silent)})
            with pytest.raises(PeerUnreachable) as failed:
                await a.start(target, LENGTH, timeout=10 * slack())
        assert f"{closed}: " in failed.value.message
        assert f"{silent}: " in failed.value.message


async def test_cancelled_while_addresses_are_tried(tmp_path: Path) -> None:
    async with sides(tmp_path, ("tcp",)) as (a, b):
        with mute() as first, mute() as second:
            target = replace(b.region.descriptor("w"), endpoints={"tcp": (first, second)})
            transfer = a.start(target, LENGTH)
            await asyncio.sleep(0)
            await transfer.cancel()
            assert transfer.state == "cancelled"
        await a.start(b.region.descriptor("w"), LENGTH)

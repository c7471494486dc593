"""Adopting landings: layouts that lie, daemons that go, and the end of the block."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

import kvxfer
from kvxfer.errors import ClosedError, PeerLost, ProtocolError, UsageError
from kvxfer.flows.adopt import _parse
from kvxfer.geometry import BlockTable
from kvxfer.planner import contiguous_layout
from tests.nodes import until
from tests.steps import Pair, pair
from tests.support.nodes import make_cache, scattered, small_geometry

TABLE = scattered(1, 8, 40, 16)


async def landed(both: Pair, request: str) -> None:
    cache = await make_cache(both.a, small_geometry(), 8)
    cache.regions[0].array[:] = 1
    async with both.a.push(request, to=both.b.addresses, cache=cache, table=TABLE, land=True) as push:
        await push.layers()


async def test_when_the_daemon_dies_the_reader_is_told() -> None:
    async with pair("shm") as both:
        await landed(both, "r")
        with pytest.raises(PeerLost):
            async with both.b.adopt("r") as adopted:
                assert adopted.array.any()
                await both.servers[1].aclose()
                await until(lambda: adopted._lost is not None)
                with pytest.raises(PeerLost):
                    _ = adopted.array
        assert both.b.plane.engine.counters().imports == 0


async def test_a_landing_is_adopted_once_and_entered_once() -> None:
    async with pair("shm") as both:
        await landed(both, "r")
        async with both.b.adopt("r") as adopted:
            with pytest.raises(UsageError):
                await adopted.__aenter__()
            with pytest.raises(kvxfer.KvxferError):
                await both.b.adopt("r", wait_s=0.02).__aenter__()
        with pytest.raises(ClosedError):
            _ = adopted.array


async def test_closing_the_client_inside_the_block_is_told() -> None:
    async with pair("shm") as both:
        await landed(both, "r")
        with pytest.raises(ClosedError):
            async with both.b.adopt("r"):
                await both.b.aclose()


async def test_what_a_landing_says_about_itself_is_checked() -> None:
    async with kvxfer.local() as client:
        layout, length = contiguous_layout(small_geometry(), 4)
        region = await client.alloc(length)
        described, short = region.descriptor("r"), region[0 : length - 1].descriptor("r")
        good: dict[str, Any] = {"layout": layout.to_dict(), "table": BlockTable.of([0, 1], 20).to_dict()}

        def body(descriptor: object, inner: object) -> bytes:
            packed: bytes = msgpack.packb({"descriptor": descriptor, "body": inner})
            return packed

        assert _parse(body(described.to_dict(), msgpack.packb(good)))[2] == layout
        bad: list[tuple[object, object]] = [
            (short.to_dict(), msgpack.packb(good)),
            ({}, msgpack.packb(good)),
            (described.to_dict(), None),
            (described.to_dict(), b"\xc1"),
            (described.to_dict(), msgpack.packb({})),
            (described.to_dict(), msgpack.packb({**good, "layout": 5})),
            (described.to_dict(), msgpack.packb({**good, "table": BlockTable.of([4], 1).to_dict()})),
            (described.to_dict(), msgpack.packb({**good, "table": BlockTable.of([0], 17).to_dict()})),
        ]
        for descriptor, inner in bad:
            with pytest.raises(ProtocolError):
                _parse(body(descriptor, inner))

"""Both sides for the tests of the tcp data path. The owner's grant lies between memory that nobody may touch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from kvxfer.native.engine import Event
from tests.native import kvxd
from tests.native.conformance import BOTH, KIB, MIB, Side, short_directory, within
from tests.native.kvxd import Frame, Speaker, Type

LENGTH = 64 * KIB
KEY = bytes(range(16))


class Owner(Side):
    """An engine that grants a region in the middle of memory that nobody may touch."""

    def __init__(self, directory: Any, *, access: int = BOTH, length: int = LENGTH, **changes: Any) -> None:
        super().__init__(directory, ("tcp",), **({"frame_bytes": MIB, "tcp_threads": 2} | changes))
        self.region, self.bytes = self.alloc(length + 2 * MIB)
        self.bytes[:] = np.random.default_rng(3).integers(0, 256, len(self.bytes), dtype=np.uint8)
        self.inside = self.bytes[MIB : MIB + length]
        self.outside = (self.bytes[:MIB].copy(), self.bytes[MIB + length :].copy())
        self.length = length
        self.grant = self.engine.grant(self.region.id, MIB, length, access)
        self.key = self.grant.key
        self.endpoint = next(one.endpoint for one in self.engine.transports if one.name == "tcp")

    def frame(self, kind: Type, *rows: tuple[int, int], payload: bytes = b"", **changes: Any) -> Frame:
        values: dict[str, Any] = {
            "type": kind,
            "op": 1,
            "grant": self.grant.id,
            "generation": self.grant.generation,
            "length": sum(length for _, length in rows),
            "segments": rows,
            "payload": payload,
        }
        if kind == Type.ATTACH:
            values |= {"tag": self.grant.access, "value": self.length}
        return Frame(**(values | changes))

    def count(self, name: str) -> int:
        rows = {row.name: row for row in self.engine.counters().transports}
        return int(getattr(rows["tcp"], name))

    def untouched_outside(self) -> bool:
        head, tail = self.outside
        return bool(np.array_equal(self.bytes[:MIB], head) and np.array_equal(self.bytes[MIB + self.length :], tail))


@asynccontextmanager
async def owner(**changes: Any) -> AsyncIterator[Owner]:
    with short_directory() as directory:
        made = Owner(directory, **changes)
        try:
            yield made
            assert made.untouched_outside()
        finally:
            made.close()


async def greeted(one: Owner, *, stream: int = 0) -> Speaker:
    speaker = await kvxd.dial(one.endpoint)
    assert await speaker.greet(stream=stream) == 0
    return speaker


async def attached(one: Owner) -> Speaker:
    speaker = await greeted(one)
    speaker.send(one.frame(Type.ATTACH), one.key)
    answer = await speaker.frame(one.key)
    assert (answer.type, answer.status, answer.proved) == (Type.ACK, 0, True)
    return speaker


async def eventually(what: Callable[[], bool]) -> None:
    """Poll a condition that another thread brings about."""

    async def poll() -> None:
        while not what():
            await asyncio.sleep(0.002)

    await within(poll())


@asynccontextmanager
async def initiator(**changes: Any) -> AsyncIterator[Side]:
    with short_directory() as directory:
        side = Side(directory, ("tcp",), **({"tcp_streams": 1, "connect_ms": 500} | changes))
        try:
            yield side
        finally:
            side.close()


async def connect(side: Side, endpoint: str) -> tuple[int, Event]:
    peer, done = side.engine.connect(1, endpoint)
    return peer, await within(done)


async def import_(side: Side, peer: int, **changes: Any) -> tuple[int, Event]:
    values: dict[str, Any] = {"grant": 1, "generation": 2, "length": 8 * MIB, "access": 3, "key": KEY}
    handle, done = side.engine.import_(peer, **(values | changes))
    return handle, await within(done)


async def wired(side: Side, one: Owner) -> tuple[int, int]:
    peer, event = await connect(side, one.endpoint)
    assert event.status == 0
    values = {"grant": one.grant.id, "generation": one.grant.generation, "length": one.length, "key": one.key}
    handle, event = await import_(side, peer, **values)
    assert event.status == 0
    return peer, handle

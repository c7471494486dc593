"""hixl between processes: whoever owns or moves memory is killed or stopped in the middle of a put or a get.

Each time: the operation ends with a typed error soon after nothing can move any more and not before; until then its
memory is nobody else's; afterwards not a byte changes; and the next transfer, to a process that listens on the same
ports, is exact. With every pair of the memory kinds of a card that go by the network.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvxfer.errors import RegionBusy
from kvxfer.native.engine import EventKind, GrantInfo, MemoryKind, OpKind, RegionInfo
from kvxfer.native.status import StatusCode
from tests.native.hixl_process import CONFIG, Near, Other, control, counts, other, settle, told, within
from tests.native.simulated import SLACK, simulated

pytestmark = pytest.mark.once
HBM, PINNED = MemoryKind.HBM, MemoryKind.PINNED
WAYS = (OpKind.PUT, OpKind.GET)
BIG = 8 << 20
CRAWL = 0.001  # GB/s: seconds for that
PORTS = {"hixl_port": 21000 + os.getpid() % 9000, "hixl_engine_port": 31000 + os.getpid() % 9000}
# After a death: its sockets are closed at once, so the disconnect of its link returns; it may take its time.
SOON_S = (CONFIG["connect_ms"] + CONFIG["cancel_ms"]) / 1000 * SLACK
LONG_S = 1.1 * (CONFIG["connect_ms"] + CONFIG["cancel_ms"]) / 1000  # all patience is over


async def in_the_middle(seen: Callable[[], Awaitable[list[int]]], value: int) -> None:
    """Of what crawls now some bytes have come, where `seen` looks for this value; for the time being no more do."""

    async def some() -> None:
        while not (await seen())[value]:
            await asyncio.sleep(0.001)

    await within(some())
    control(STALL=1)
    await settle()
    assert (await seen())[value] < BIG


async def exact(near: Near, mine: RegionInfo, owner: Other, import_: int, grant: int) -> None:
    near.fill(mine, 21)
    assert await near.move(OpKind.PUT, mine, import_) == 0
    assert (await owner.call("look", grant=grant))[21] == BIG
    await owner.call("fill", grant=grant, value=22)
    assert await near.move(OpKind.GET, mine, import_) == 0
    assert (near.read(mine) == 22).all()


async def stays(near: Near, region: RegionInfo) -> None:
    """Given to somebody else, who is alone with it, whatever still stood in the library."""
    near.fill(region, 6)
    control()
    for _ in range(3):
        await settle()
        assert (near.read(region) == 6).all()


class Under:
    """A transfer of ours that another process's memory is part of, in the middle."""

    def __init__(self, near: Near, mine: RegionInfo, owner: Other, far: MemoryKind) -> None:
        self.near, self.mine, self.owner, self.far = near, mine, owner, far

    async def begin(self) -> None:
        self.grant = await self.owner.call("offer", length=BIG, kind=self.far.name, device=1)
        peer = await self.near.connect(self.owner.endpoint)
        self.import_ = await self.near.import_(peer, self.grant)
        await self.check()

    async def check(self) -> None:
        await exact(self.near, self.mine, self.owner, self.import_, self.grant["grant"])

    async def half(self, way: OpKind) -> tuple[int, Any]:
        value = 30 + int(way)
        await self.owner.call("fill", grant=self.grant["grant"], value=value if way == OpKind.GET else 0)
        self.near.fill(self.mine, value if way == OpKind.PUT else 0)
        control(GBPS=CRAWL)
        await settle()
        outcome: tuple[int, Any] = self.near.start(way, self.mine, self.import_)

        async def seen() -> list[int]:
            if way == OpKind.GET:
                return counts(self.near.read(self.mine))
            return list(await self.owner.call("look", grant=self.grant["grant"]))

        await in_the_middle(seen, value)
        assert not outcome[1].done()
        with pytest.raises(RegionBusy):
            self.near.engine.release(self.mine.id)
        return outcome


async def owners_die(ours: MemoryKind, far: MemoryKind) -> None:
    async with Near() as near:
        mine = near.alloc(BIG, ours)
        for way in (*WAYS, None):
            async with other(**PORTS) as owner:
                under = Under(near, mine, owner, far)
                await under.begin()
                if way is None:
                    continue
                _, future = await under.half(way)
                owner.signal(signal.SIGKILL)
                began = time.monotonic()
                assert (await within(future)).status == StatusCode.PEER_LOST
                assert time.monotonic() - began < SOON_S
                await stays(near, mine)
                assert (await near.event(EventKind.PEER_DOWN)).status == StatusCode.PEER_LOST
        assert (await within(near.engine.release(mine.id))).status == 0


async def owners_stop(ours: MemoryKind, far: MemoryKind) -> None:
    async with Near() as near, other() as owner:
        mine = near.alloc(BIG, ours)
        under = Under(near, mine, owner, far)
        await under.begin()
        for way in WAYS:
            token, future = await under.half(way)
            owner.signal(signal.SIGSTOP)
            near.engine.cancel(token)
            await asyncio.sleep(LONG_S)
            assert not future.done(), "the disconnect waits for the other side, and the bytes may still move"
            with pytest.raises(RegionBusy):
                near.engine.release(mine.id)
            owner.signal(signal.SIGCONT)
            assert (await within(future)).status == StatusCode.CANCELLED
            await stays(near, mine)
            await under.check()


class Reached:
    """A grant of ours that another process is in the middle of using."""

    def __init__(self, near: Near, mine: RegionInfo, ours: MemoryKind, theirs: MemoryKind) -> None:
        self.near, self.mine, self.ours, self.theirs = near, mine, ours, theirs

    async def begin(self, initiator: Other) -> None:
        self.initiator = initiator
        self.grant: GrantInfo = self.near.engine.grant(self.mine.id, 0, BIG, 3)
        await initiator.call("reach", endpoint=self.near.endpoint, grant=told(self.grant, BIG))
        await self.check()

    async def check(self) -> None:
        more = {"length": BIG, "kind": self.theirs.name, "wait": True}
        assert await self.initiator.call("put", value=41, **more) == 0
        assert (self.near.read(self.mine) == 41).all()
        assert await self.initiator.call("put", value=0, way="GET", **more) == 0
        assert (await self.initiator.call("running_look"))[41] == BIG

    async def half(self, way: OpKind) -> None:
        value = 50 + int(way)
        put = way == OpKind.PUT
        self.near.fill(self.mine, 0 if put else value)
        more = {"length": BIG, "kind": self.theirs.name, "way": way.name, "wait": False}
        control(GBPS=CRAWL)
        await settle()
        await self.initiator.call("put", value=value if put else 0, **more)

        async def seen() -> list[int]:
            return counts(self.near.read(self.mine)) if put else list(await self.initiator.call("running_look"))

        await in_the_middle(seen, value)


async def initiators_die(ours: MemoryKind, theirs: MemoryKind) -> None:
    async with Near() as near:
        mine = near.alloc(BIG, ours, device=1)
        reached = Reached(near, mine, ours, theirs)
        for way in (*WAYS, None):
            async with other() as initiator:
                await reached.begin(initiator)
                if way is None:
                    continue
                await reached.half(way)
                initiator.signal(signal.SIGKILL)
                began = time.monotonic()
                assert (await near.event(EventKind.GRANT_LOST)).id == reached.grant.id
                assert (await within(near.engine.revoke(reached.grant.id))).status == 0
                assert time.monotonic() - began < SOON_S
                await stays(near, mine)


async def initiators_stop(ours: MemoryKind, theirs: MemoryKind) -> None:
    async with Near() as near, other() as initiator:
        mine = near.alloc(BIG, ours, device=1)
        reached = Reached(near, mine, ours, theirs)
        for way in WAYS:
            await reached.begin(initiator)
            await reached.half(way)
            initiator.signal(signal.SIGSTOP)
            revoking = near.engine.revoke(reached.grant.id)
            await asyncio.sleep(LONG_S)
            assert not revoking.done(), "its bytes may still move"
            assert near.engine.counters().quarantined_grants == 1
            initiator.signal(signal.SIGCONT)
            assert (await within(revoking)).status == 0
            await stays(near, mine)
            assert await initiator.call("running_end") == StatusCode.REVOKED
        await reached.begin(initiator)


@simulated()
async def test_deaths_between_memory_of_cards() -> None:
    await owners_die(HBM, HBM)
    await initiators_die(HBM, HBM)


@simulated()
async def test_deaths_between_pinned_memory_and_a_card() -> None:
    await owners_die(PINNED, HBM)
    await initiators_die(HBM, PINNED)


@simulated()
async def test_deaths_between_a_card_and_pinned_memory() -> None:
    await owners_die(HBM, PINNED)
    await initiators_die(PINNED, HBM)


@simulated()
async def test_stops_between_memory_of_cards() -> None:
    await owners_stop(HBM, HBM)
    await initiators_stop(HBM, HBM)


@simulated()
async def test_stops_between_pinned_memory_and_a_card() -> None:
    await owners_stop(PINNED, HBM)
    await initiators_stop(HBM, PINNED)


@simulated()
async def test_stops_between_a_card_and_pinned_memory() -> None:
    await owners_stop(HBM, PINNED)
    await initiators_stop(PINNED, HBM)

"""hixl between processes: what it moves, and what happens when the library or the other process does not play along.

Each test is a process that sees simulated cards, and starts the others that it needs. What counts is the pattern in the
memory after the end of an operation: from then on not a byte may change, whatever still moved in the library.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from kvxfer.errors import KvxferError, OutOfRange
from kvxfer.native.engine import EventKind, MemoryKind, OpKind, RegionInfo
from kvxfer.native.status import StatusCode
from tests.native.hixl_process import MIB, Near, Other, control, other, settle, told, within
from tests.native.simulated import simulated

pytestmark = pytest.mark.once
PUT, GET = OpKind.PUT, OpKind.GET
BIG = 16 * MIB


async def moves_both_ways(owner: Other, near: Near, kind: MemoryKind, far: str, device: int = 1) -> None:
    mine = near.alloc(MIB, kind, fill=7)
    offer = await owner.call("offer", length=MIB, kind=far, device=device)
    import_ = await near.import_(await near.connect(owner.endpoint), offer)
    assert await near.move(PUT, mine, import_, notify=(5, 6)) == 0
    assert await owner.call("told") == [5, 6]
    assert (await owner.call("look", grant=offer["grant"]))[7] == MIB
    await owner.call("fill", grant=offer["grant"], value=9)
    assert await near.move(GET, mine, import_) == 0
    assert (near.read(mine) == 9).all()


async def reaches_beyond_four_gib(owner: Other, near: Near) -> None:
    length, at = 5 << 30, (4 << 30) + 12345
    mine = near.alloc(MIB, fill=3)
    grant = await owner.call("offer", length=length, kind="HBM", device=1, fill=None)
    import_ = await near.import_(await near.connect(owner.endpoint), grant)
    for kind in (PUT, GET):
        outcome = near.engine.submit_one(kind, mine.id, import_, 0, at, MIB)
        assert isinstance(outcome, tuple)
        assert (await within(outcome[1])).status == 0
        if kind == PUT:
            near.fill(mine, 0)
    assert (near.read(mine) == 3).all()


@simulated(HBM="12G", RANGE="permissive")
async def test_what_it_moves_and_what_not() -> None:
    async with other() as owner, Near() as near:
        await moves_both_ways(owner, near, MemoryKind.HBM, "HBM")
        await moves_both_ways(owner, near, MemoryKind.PINNED, "PINNED")
        await reaches_beyond_four_gib(owner, near)
        mine = near.alloc(MIB)
        assert await near.move(PUT, mine, await near.reach(owner, device=0)) == StatusCode.UNSUPPORTED, (
            "a card to itself"
        )
        import_ = await near.reach(owner, 65536)
        with pytest.raises(OutOfRange):  # the library would write there
            near.engine.submit_one(PUT, mine.id, import_, 0, 65530, 7)


@simulated()
async def test_neighbours_copy() -> None:
    """Mapped device memory of the other process: nothing is connected, or it would hang."""
    control(HANG="connect")
    async with other(device_ipc=True) as owner, Near(device_ipc=True) as near:
        await moves_both_ways(owner, near, MemoryKind.HBM, "HBM")
        await moves_both_ways(owner, near, MemoryKind.HBM, "HBM", device=0)
        await moves_both_ways(owner, near, MemoryKind.PINNED, "HBM", device=0)


@simulated()
async def test_memory_is_not_freed_while_a_neighbour_has_it_mapped() -> None:
    """Neither when its last region is released nor when its engine closes first; the simulator calls that a FAULT."""
    async with other(device_ipc=True) as initiator, other(device_ipc=True) as stopped:
        for waits in (True, False):
            near = Near(device_ipc=True, hbm_arena_bytes=2 * MIB)
            for _ in range(2):
                mine = near.alloc(2 * MIB, device=1)
                grant = near.engine.grant(mine.id, 0, 2 * MIB, 3)
                for process in (initiator,) if waits else (initiator, stopped):
                    await process.call("reach", endpoint=near.endpoint, grant=told(grant, 2 * MIB))
                    assert await process.call("put", length=2 * MIB, value=2, wait=True) == 0
                assert (near.read(mine) == 2).all()
                assert (await within(near.engine.release(mine.id))).status == 0
            if not waits:
                stopped.signal(signal.SIGSTOP)  # it keeps what it has mapped: that memory stays
            began = time.monotonic()
            near.engine.close()
            assert time.monotonic() - began < 1, "cancel_ms at most"


# -- memory and slots -------------------------------------------------------------------------------------------------


@simulated(DEVICES=2)
async def test_memory_that_is_registered_later() -> None:
    async with other(hbm_arena_bytes=2 * MIB) as owner, Near(hbm_arena_bytes=2 * MIB) as near:
        first = near.alloc(2 * MIB, fill=1)
        peer = await near.connect(owner.endpoint)
        grant = await owner.call("offer", length=2 * MIB, kind="HBM", device=1)
        import_ = await near.import_(peer, grant)
        assert await near.move(PUT, first, import_) == 0
        second = near.alloc(2 * MIB, fill=2)  # an arena of its own, which the link does not know
        assert await near.move(PUT, second, import_) == 0
        assert (await owner.call("look", grant=grant["grant"]))[2] == 2 * MIB
        later = await owner.call("offer", length=2 * MIB, kind="HBM", device=1)
        assert await near.move(PUT, second, await near.import_(peer, later)) == 0
        assert (await owner.call("look", grant=later["grant"]))[2] == 2 * MIB
        assert (await within(near.engine.release(first.id))).status == 0


@simulated(SLOTS=2, LATENCY_US=300)
async def test_a_library_without_slots_is_asked_again() -> None:
    async with other() as owner, Near() as near:
        mine = near.alloc(BIG, fill=4)
        import_ = await near.reach(owner, BIG)
        outcomes = [near.start(PUT, mine, import_, MIB) for _ in range(30)]
        assert {(await within(future)).status for _, future in outcomes} == {0}


@simulated(GBPS=0.02, DEVICES=4)
async def test_cards_work_side_by_side() -> None:
    async with other() as owner, Near() as near:
        peer = await near.connect(owner.endpoint)
        regions = [near.alloc(4 * MIB, device=device) for device in (0, 1)]
        grants = [await owner.call("offer", length=4 * MIB, kind="HBM", device=device) for device in (2, 3)]
        imports = [await near.import_(peer, grant) for grant in grants]
        for region, import_ in zip(regions, imports, strict=True):
            assert await near.move(PUT, region, import_, length=4096) == 0
        began = time.monotonic()
        outcomes = [near.start(PUT, region, import_) for region, import_ in zip(regions, imports, strict=True)]
        assert {(await within(future)).status for _, future in outcomes} == {0}
        assert time.monotonic() - began < 1.6 * 4 * MIB / 0.02e9, "one after the other it would be twice"


# -- failures of the library ------------------------------------------------------------------------------------------


async def failed(near: Near, region: RegionInfo, import_: int) -> tuple[int, int]:
    """How a put ended, in our words and in the library's."""
    _, future = near.start(PUT, region, import_)
    event = await within(future)
    return event.status, event.sys_errno


@simulated()
async def test_a_failure_breaks_the_link_which_is_made_anew() -> None:
    async with other() as owner, Near() as near:
        mine = near.alloc(MIB, fill=8)
        import_ = await near.reach(owner)
        control(FAIL="connect:1:503900")
        await settle()
        assert await failed(near, mine, import_) == (StatusCode.LINK, 503900)
        control(FAIL="connect:1:103902")
        await asyncio.sleep(0.2)
        assert await failed(near, mine, import_) == (StatusCode.PEER_LOST, 103902)
        began = time.monotonic()
        assert await near.move(PUT, mine, import_) == 0
        assert time.monotonic() - began > 0.08, "after a pause"
        for fault, said in (
            ({"FAIL": "transfer:1:503900"}, 503900),
            ({"FAIL": "async:1:507899"}, 507899),
            ({"PARTIAL": 1}, 503900),
            ({"FAIL": "transfer:1:507899"}, 507899),
            ({"BREAK": 1}, 503900),
        ):
            control(**fault)
            await settle()
            status, vendor_status = await failed(near, mine, import_)
            assert status in (StatusCode.LINK, StatusCode.DEVICE), fault
            assert vendor_status == said, fault
            control()
            await settle()
            assert await near.move(PUT, mine, import_) == 0, fault


async def comes_back(near: Near, region: RegionInfo, import_: int) -> None:
    """The call that hung returns, and its link can be used again."""

    async def tried() -> None:
        while (status := await near.move(PUT, region, import_)) != 0:
            assert status in (StatusCode.TIMEOUT, StatusCode.LINK)
            await asyncio.sleep(0.02)

    await within(tried())


@simulated()
async def test_a_connect_that_hangs_is_left_behind() -> None:
    async with other() as hung, other() as well, Near() as near:
        mine = near.alloc(MIB)
        good = await near.reach(well)
        assert await near.move(PUT, mine, good) == 0
        bad = await near.reach(hung)
        control(os.getpid(), HANG="connect")
        await settle()
        outcome = near.start(PUT, mine, bad)
        began = time.monotonic()
        while time.monotonic() - began < 0.3:
            assert await near.move(PUT, mine, good) == 0, "others are not delayed"
        assert (await within(outcome[1])).status == StatusCode.TIMEOUT
        assert await near.move(PUT, mine, bad) == StatusCode.TIMEOUT, "no second connect while the first is out"
        control(os.getpid())
        await comes_back(near, mine, bad)


@simulated(DEVICES=7)
async def test_after_eight_zombies_nothing_is_connected() -> None:
    async with other() as owner, Near(connect_ms=150) as near:
        peer = await near.connect(owner.endpoint)
        grants = [await owner.call("offer", length=MIB, kind="HBM", device=device) for device in (3, 4, 5, 6)]
        imports = [await near.import_(peer, grant) for grant in grants]
        regions = [near.alloc(MIB, device=device) for device in (0, 1, 2)]
        control(os.getpid(), HANG="connect")
        await settle()
        outcomes = [near.start(PUT, region, import_) for region in regions[:2] for import_ in imports]
        assert {(await within(future)).status for _, future in outcomes} == {StatusCode.TIMEOUT}
        assert await near.move(PUT, regions[2], imports[0]) == StatusCode.LINK
        control(os.getpid())
        await comes_back(near, regions[2], imports[0])


# -- ends that must be true -------------------------------------------------------------------------------------------


async def stays(near: Near, region: RegionInfo, value: int) -> None:
    for _ in range(3):
        await asyncio.sleep(0.02)
        assert (near.read(region) == value).all()


async def stalled_get(near: Near, region: RegionInfo, import_: int, **faults: object) -> tuple[int, Any]:
    near.fill(region, 1)
    assert await near.move(PUT, region, import_) == 0
    control(None, STALL=1, **faults)
    await settle()
    outcome: tuple[int, Any] = near.start(GET, region, import_)
    await asyncio.sleep(0.02)
    return outcome


async def ends_truly(near: Near, region: RegionInfo, future: Any, status: StatusCode) -> None:
    """It is over: what was still in the library when it ended never comes."""
    assert (await within(future)).status == status
    near.fill(region, 6)
    control()
    await stays(near, region, 6)


@simulated()
async def test_after_its_end_not_a_byte_moves() -> None:
    async with other() as owner, Near() as near:
        mine = near.alloc(BIG)
        import_ = await near.reach(owner, BIG)
        token, future = await stalled_get(near, mine, import_)
        near.engine.cancel(token)
        await ends_truly(near, mine, future, StatusCode.CANCELLED)
        # a disconnect that hangs: grace and patience are over, but it may still move
        token, future = await stalled_get(near, mine, import_, HANG="disconnect")
        near.engine.cancel(token)
        await asyncio.sleep(0.9)
        assert not future.done()
        control(STALL=1)
        await ends_truly(near, mine, future, StatusCode.CANCELLED)
        # the library says that it failed: only the disconnect says that it does not move
        _, future = await stalled_get(near, mine, import_, HANG="disconnect", FAIL="poll:*:503900")
        await asyncio.sleep(0.3)
        assert not future.done()
        control(STALL=1)
        await ends_truly(near, mine, future, StatusCode.LINK)


@simulated()
async def test_after_its_end_not_a_byte_is_copied() -> None:
    """The same between neighbours, whose bytes a stream moves."""
    async with other(device_ipc=True) as owner, Near(device_ipc=True) as near:
        mine = near.alloc(BIG)
        import_ = await near.reach(owner, BIG)
        token, future = await stalled_get(near, mine, import_)
        near.engine.cancel(token)
        await ends_truly(near, mine, future, StatusCode.CANCELLED)
        near.fill(mine, 3)
        assert await near.move(PUT, mine, import_) == 0
        token, future = await stalled_get(near, mine, import_, FAIL="streamquery:*:507899")
        await ends_truly(near, mine, future, StatusCode.DEVICE)


@simulated()
async def test_a_revoke_waits_for_what_is_under_way() -> None:
    """Here we own, and another process writes."""
    async with other() as initiator, Near() as near:
        mine = near.alloc(BIG, device=1)
        grant = near.engine.grant(mine.id, 0, BIG, 3)
        values = told(grant, BIG)
        await initiator.call("reach", endpoint=near.endpoint, grant=values)
        assert await initiator.call("put", length=BIG, value=2, wait=True) == 0
        control(initiator.pid, STALL=1, HANG="disconnect")
        await settle()
        await initiator.call("put", length=BIG, value=3, wait=False)
        revoking = near.engine.revoke(grant.id)
        await asyncio.sleep(0.7)
        assert not revoking.done()
        assert near.engine.counters().quarantined_grants == 1
        control(initiator.pid, STALL=1)
        assert (await within(revoking)).status == 0
        near.fill(mine, 9)
        control(initiator.pid)
        await stays(near, mine, 9)


@simulated()
async def test_a_frozen_peer_keeps_a_grant_in_quarantine() -> None:
    async with other() as initiator, Near() as near:
        mine = near.alloc(MIB, device=1)
        grant = near.engine.grant(mine.id, 0, MIB, 3)
        values = told(grant, MIB)
        await initiator.call("reach", endpoint=near.endpoint, grant=values)
        initiator.signal(signal.SIGSTOP)
        revoking = near.engine.revoke(grant.id)
        await asyncio.sleep(0.6)
        assert not revoking.done()
        initiator.signal(signal.SIGKILL)
        assert (await within(revoking)).status == 0


@simulated()
async def test_close_does_not_hang() -> None:
    async with other() as owner:
        near = Near()
        mine = near.alloc(BIG, fill=1)
        import_ = await near.reach(owner, BIG)
        assert await near.move(PUT, mine, import_) == 0
        control(STALL=1, HANG="disconnect")
        await settle()
        _, future = near.start(PUT, mine, import_)
        await asyncio.sleep(0.02)
        began = time.monotonic()
        near.engine.close()
        assert time.monotonic() - began < 3
        assert future.done()
        assert future.result().status == StatusCode.CLOSED
        async with Near() as again:
            assert (again.read(again.alloc(MIB, fill=5)) == 5).all()
        control()
        await asyncio.sleep(0.1)


# -- the other process ------------------------------------------------------------------------------------------------


@simulated()
async def test_a_stopped_owner() -> None:
    """A connect to it would hang. The side link is asked first, so nothing is lost but that operation's time."""
    async with other() as stopped, other() as well, Near() as near:
        mine = near.alloc(MIB, fill=1)
        good, bad = await near.reach(well), await near.reach(stopped)
        assert await near.move(PUT, mine, good) == 0
        stopped.signal(signal.SIGSTOP)
        outcome = near.start(PUT, mine, bad)
        assert await near.move(PUT, mine, good) == 0
        event = await within(outcome[1])
        assert (event.status, event.sys_errno) == (StatusCode.TIMEOUT, 0), "by our clock: the library has said nothing"
        stopped.signal(signal.SIGCONT)
        await asyncio.sleep(0.05)
        assert await near.move(PUT, mine, bad) == 0
        # once it is connected the bytes do not need it: only what wants an answer waits
        stopped.signal(signal.SIGSTOP)
        assert await near.move(PUT, mine, bad) == 0
        token, future = near.start(PUT, mine, bad, notify=(1, 1))
        await asyncio.sleep(0.05)
        assert not future.done()
        near.engine.cancel(token)
        assert (await within(future)).status == StatusCode.CANCELLED


@simulated()
async def test_an_owner_that_is_killed_and_restarts_on_the_same_ports() -> None:
    ports = {"hixl_port": 21000 + os.getpid() % 9000, "hixl_engine_port": 31000 + os.getpid() % 9000}
    async with Near() as near:
        mine = near.alloc(BIG)
        async with other(**ports) as owner:
            import_ = await near.reach(owner, BIG)
            _, future = await stalled_get(near, mine, import_)
            owner.signal(signal.SIGKILL)
            await ends_truly(near, mine, future, StatusCode.PEER_LOST)
            await near.event(EventKind.PEER_DOWN)
            with pytest.raises(KvxferError) as caught:
                near.start(GET, mine, import_)
            assert caught.value.status == StatusCode.PEER_LOST
        async with other(**ports) as owner:
            import_ = await near.reach(owner, BIG)
            assert await near.move(PUT, mine, import_) == 0
            near.fill(mine, 7)
            assert await near.move(GET, mine, import_) == 0
            assert (near.read(mine) == 6).all()

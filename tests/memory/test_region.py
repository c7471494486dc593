"""Regions: whose they are, how long their memory lives, and what becomes of their descriptors."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import numpy as np
import pytest

import kvxfer
from kvxfer.errors import InvalidLength, KvxferError, OutOfRange, RegionBusy, UnknownRegion, UsageError
from kvxfer.geometry import BlockTable
from tests.nodes import until
from tests.support.nodes import make_cache, scattered, small_geometry, two_nodes


class Memory(np.ndarray):
    """An array that can be referred to weakly."""


def memory(length: int = 8192) -> Memory:
    return np.zeros(length, dtype=np.uint8).view(Memory)


async def test_registered_memory_lives_until_its_release_is_quiet() -> None:
    async with kvxfer.local() as client:
        array = memory()
        alive = weakref.ref(array)
        region = await client.register(array)
        number = region.id
        del array, region
        gc.collect()
        assert alive() is not None, "peers could write into freed memory"
        [found] = client.plane.memory._regions[number]
        await found.release()
        del found
        await until(lambda: gc.collect() is not None and alive() is None)


async def test_whoever_holds_the_bytes_holds_the_memory() -> None:
    async with kvxfer.local() as client:
        region = await client.register(memory())
        part = region.array[100:200]
        await region.release()
        del region
        gc.collect()
        part[:] = 9  # must not be freed memory
        assert part.sum() == 900


async def test_memory_goes_with_the_client() -> None:
    array = memory()
    alive = weakref.ref(array)
    async with kvxfer.local() as client:
        await client.register(array)
        del array
    del client
    gc.collect()
    assert alive() is None


async def test_one_of_two_identical_registrations_can_go() -> None:
    async with two_nodes(["tcp"]) as (a, b):
        array = memory(1 << 20)
        first, second = await b.register(array), await b.register(array)
        mine, other = first.descriptor("w"), second.descriptor("w")
        source = await a.alloc(1 << 20)
        source.array[:] = 1
        await a.put(source, mine)
        await first.release()
        with pytest.raises(KvxferError):
            await a.put(source, mine)
        array[:] = 0
        await a.put(source, other)
        assert array.all()
        with pytest.raises(UnknownRegion):
            first.descriptor("w")
        await second.release()
        with pytest.raises(KvxferError):
            await a.put(source, other)


async def test_a_cancelled_release_goes_on_and_can_be_waited_for() -> None:
    async with two_nodes(["shm"]) as (a, b):
        target, source = await b.alloc(4096), await a.alloc(4096)
        await a.put(source, target.descriptor("w"))
        releasing = asyncio.ensure_future(target.release())
        await asyncio.sleep(0)
        releasing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await releasing
        with pytest.raises(UnknownRegion):
            target.descriptor("w")
        if not target._quiet.done():
            await target.release()
        await until(lambda: b.plane.engine.counters().regions == 0)
        with pytest.raises(UnknownRegion):
            await target.release()


async def test_two_releases_at_once_are_one() -> None:
    async with two_nodes(["shm"]) as (a, b):
        target, source = await b.alloc(4096), await a.alloc(4096)
        await a.put(source, target.descriptor("w"))
        await asyncio.gather(target.release(), target.release(drain=True))
        assert b.plane.engine.counters().regions == 0


async def test_a_region_in_use_is_not_released_unless_it_is_drained() -> None:
    async with two_nodes(["tcp"]) as (a, b):
        source, target = await a.alloc(8 << 20), await b.alloc(8 << 20)
        transfer = a.put(source, target.descriptor("w"))
        with pytest.raises(RegionBusy, match=str(transfer.op_id)):
            await source.release()
        await source.release(drain=True)
        assert transfer.settled


async def test_regions_of_another_client_are_refused_everywhere() -> None:
    async with two_nodes(["shm"]) as (a, b):
        ours, theirs = await a.alloc(64), await b.alloc(64)
        assert ours.id == theirs.id, "or the test shows nothing"
        described = theirs.descriptor("rw")
        with pytest.raises(UnknownRegion, match="another client"):
            a.put(theirs, described)
        with pytest.raises(UnknownRegion):
            a.get(theirs[0:8], described)
        with pytest.raises(UnknownRegion):
            await a.share(theirs, "name")
        cache, table = await make_cache(b, small_geometry(), 4), scattered(1, 4, 20, 16)
        with pytest.raises(UnknownRegion):
            await a.offer("r", cache, table).__aenter__()
        with pytest.raises(UnknownRegion):
            await a.push("r", to=b.addresses, cache=cache, table=table).__aenter__()
        with pytest.raises(UnknownRegion):
            await a.publish("r", cache, table).__aenter__()
        ticket = {"v": 1, "node_id": "0" * 32, "incarnation": "0" * 32, "addresses": ["127.0.0.1:1"]}
        ticket |= {"posting": "0" * 32, "secret": "0" * 32, "request_id": "r", "expires_in_s": 1}
        with pytest.raises(UnknownRegion):
            await a.pull(ticket, cache, table)


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), "1", True, 1e9])
async def test_a_bad_expiry_makes_no_grant(bad: object) -> None:
    async with kvxfer.local() as client:
        region = await client.alloc(64)
        with pytest.raises(UsageError):
            region.descriptor("w", expires_in_s=bad)  # type: ignore[arg-type]
        assert client.plane.engine.counters().grants == 0


async def test_bad_descriptors_make_no_grant() -> None:
    async with kvxfer.local() as client:
        region = await client.alloc(64)
        for arguments in ({"offset": "1"}, {"offset": 64}, {"offset": -1}, {"length": 0}, {"length": 65}):
            with pytest.raises((InvalidLength, OutOfRange)):
                region.descriptor("w", **arguments)  # type: ignore[arg-type]
        with pytest.raises(UsageError):
            region.descriptor("x")
        client.plane.memory._endpoints = {}
        with pytest.raises(UsageError):
            region.descriptor("w")
        await until(lambda: client.plane.engine.counters().grants == 0)


async def test_descriptors_expire_and_their_timers_end_with_them() -> None:
    async with kvxfer.local() as client:
        region = await client.alloc(64)
        region.descriptor("w", expires_in_s=0.02)
        await until(lambda: client.plane.engine.counters().grants == 0)
        late = region.descriptor("w", expires_in_s=3600)
        await region.revoke(late)
        assert region._timers == {}
        region.descriptor("w", expires_in_s=3600)
        timers = list(region._timers.values())
    assert all(timer.cancelled() for timer in timers), "a timer outlives the client"


async def test_releasing_memory_ends_what_is_offered_published_and_shared_in_it() -> None:
    async with kvxfer.local() as b:
        cache, table = await make_cache(b, small_geometry(), 4), scattered(1, 4, 20, 16)
        other = await make_cache(b, small_geometry(), 4)
        async with b.publish("p", other, table, lease_s=30) as ticket, await b.share(other.regions[0], "name"):
            async with b.offer("r", cache, table) as landing:
                waiting = asyncio.ensure_future(landing.wait())
                await asyncio.sleep(0)
                await cache.regions[0].release()
                with pytest.raises(UnknownRegion):
                    await waiting
            await other.regions[0].release()
            assert await ticket.wait_released() == "withdrawn"
        assert (b.reservations.pinned_blocks, b.reservations.quarantined_blocks) == (0, 0)
        await until(lambda: not b.control._postings)


async def test_flows_leave_nothing_in_their_region() -> None:
    async with kvxfer.local() as client:
        cache, table = await make_cache(client, small_geometry(), 4), scattered(1, 4, 20, 16)
        for number in range(5):
            async with client.offer(f"r{number}", cache, table):
                pass
        assert cache.regions[0]._grants == set()
        assert cache.regions[0]._on_released == {}


async def test_tables_that_do_not_fit_the_cache_are_refused_at_home() -> None:
    async with kvxfer.local() as client:
        cache = await make_cache(client, small_geometry(), 4)
        beyond = BlockTable.of([4], 16)
        twice = BlockTable.of([1, 1], 32)
        long = BlockTable.of([1], 17)
        for table in (beyond, twice, long, "table"):
            with pytest.raises(UsageError):
                await client.offer("r", cache, table).__aenter__()  # type: ignore[arg-type]
        for table in (beyond, long):
            with pytest.raises(UsageError):
                await client.publish("r", cache, table).__aenter__()
        assert client.plane.engine.counters().grants == 0
        with pytest.raises(UsageError):
            kvxfer.KVCache(cache.layout, "region")  # type: ignore[arg-type]


async def test_a_view_is_a_span_of_the_region_that_holds_it() -> None:
    array = np.zeros((8, 64), np.float32)
    async with kvxfer.local() as client:
        region = await client.register(array)
        for view, offset, length in (
            (array, 0, 2048),
            (array[3], 768, 256),
            (array[1:7:2, 4], 272, 1028),  # from its first to its last byte
            (array[::-1, ::-1], 0, 2048),
            (memoryview(array[2]), 512, 256),
        ):
            span = region.view(view)
            assert (span.region, span.offset, span.length) == (region, offset, length)
        for other in (np.zeros(4), array.reshape(-1).view(np.uint8)[:0]):
            with pytest.raises((OutOfRange, InvalidLength)):
                region.view(other)
        with pytest.raises(UsageError):
            region.view(object())
        part = await client.alloc(4096)
        assert part.view(part.array[100:]).offset == 100
        with pytest.raises(OutOfRange):
            part.view(array)


async def test_a_guard_refuses_the_release_until_it_has_nothing_to_say() -> None:
    async with kvxfer.local() as client:
        region = await client.alloc(4096)
        why = "a tensor lies in it"
        region.guard(lambda: why)
        for drain in (False, True):
            with pytest.raises(RegionBusy, match="a tensor lies in it"):
                await region.release(drain=drain)
        await client.put(region[0:8], region.descriptor(), target_offset=64)  # nothing has begun
        why = ""
        await region.release()


async def test_what_lies_in_the_memory_is_moved_out_before_a_close(caplog: pytest.LogCaptureFixture) -> None:
    """While the bytes are still there, one after the other; one that fails keeps no other from being moved."""
    kept: list[bytes] = []

    def fails() -> None:
        raise RuntimeError("no room")

    async with kvxfer.local() as client:
        regions = [await client.alloc(4096) for _ in range(2)]
        for number, region in enumerate(regions):
            region.array[:4] = number + 1
            region.guard(str, fails)
            region.guard(str, lambda region=region: kept.append(region.array[:4].tobytes()))
        gone = await client.alloc(4096)
        gone.guard(str, lambda: kept.append(b"gone"))
        await gone.release()
    assert sorted(kept) == [b"\1\1\1\1", b"\2\2\2\2"]
    assert caplog.text.count("could not be moved out") == 2


async def test_a_close_that_is_cancelled_still_moves_out_what_lies_there() -> None:
    kept: list[bytes] = []
    began, ended = threading.Event(), threading.Event()

    async with kvxfer.local() as outer:
        client = kvxfer.Client(outer.socket, config=outer.config)
        await client.__aenter__()
        region = await client.alloc(4096)
        region.array[:] = 7

        def move() -> None:
            began.set()
            assert ended.wait(20)
            kept.append(region.array.tobytes())

        region.guard(str, move)
        closing = asyncio.create_task(client.aclose())
        await until(began.is_set)
        closing.cancel()
        await asyncio.sleep(0)
        ended.set()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert kept == [b"\7" * 4096]
        assert client.closed

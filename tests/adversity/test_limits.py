"""Many more transfers than there is room for: all end, in the order in which they were asked for, at little cost."""

from __future__ import annotations

import asyncio
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import PeerBackpressure, TooLarge
from kvxfer.native.engine import OpKind
from tests.nodes import until
from tests.support.nodes import make_cache, scattered, small_geometry, two_nodes

COUNT, SLOTS, LENGTH = 10_000, 64, 4096
BYTES_EACH_MAX = 4096  # of Python objects for a transfer that waits


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_ten_thousand_transfers_on_sixty_four_slots(transport: str) -> None:
    async with two_nodes([transport], window_ops_max=SLOTS, inline_bytes_max=0) as (a, b):
        ours, theirs = await a.alloc(COUNT * LENGTH), await b.alloc(COUNT * LENGTH)
        theirs.array[:] = np.random.default_rng(1).integers(0, 256, COUNT * LENGTH, dtype=np.uint8)
        descriptor = theirs.descriptor("r")
        await a.plane.prepare(descriptor)
        before = asyncio.all_tasks()
        begun: list[int] = []
        submit = a.plane.engine.submit_one

        def note(kind: OpKind, region: int, handle: int, local: int, *rest: Any, **more: Any) -> Any:
            begun.append(local // LENGTH)
            return submit(kind, region, handle, local, *rest, **more)

        a.plane.engine.submit_one = note  # type: ignore[method-assign]
        tracemalloc.start()
        transfers = []
        for at in range(COUNT):
            span = ours[at * LENGTH : (at + 1) * LENGTH]
            transfers.append(a.get(span, descriptor, source_offset=at * LENGTH, timeout=60))
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert asyncio.all_tasks() == before, "a transfer that waits is no task"
        assert used < COUNT * BYTES_EACH_MAX
        assert a.plane.engine.counters().inflight <= SLOTS
        for transfer in transfers:
            await transfer
        assert np.array_equal(ours.array, theirs.array)
        assert begun == list(range(COUNT)), "somebody was overtaken"


async def test_more_than_may_wait_fails_at_once_and_names_the_limit() -> None:
    async with two_nodes(["tcp"], window_ops_max=1, window_waiters_max=4, inline_bytes_max=0) as (a, b):
        ours, theirs = await a.alloc(1 << 20), await b.alloc(1 << 20)
        descriptor = theirs.descriptor("rw")
        await a.plane.prepare(descriptor)
        transfers = [a.put(ours, descriptor, timeout=30) for _ in range(8)]
        failed = [transfer for transfer in transfers if transfer.done]
        assert len(failed) == 3
        for transfer in failed:
            with pytest.raises(PeerBackpressure) as caught:
                await transfer
            assert caught.value.retryable
            assert (caught.value.fields["limit"], caught.value.fields["option"]) == (4, "window_waiters_max")
        for transfer in transfers[:5]:
            await transfer


async def test_a_push_that_the_landing_pool_can_never_hold_fails_at_once() -> None:
    async with two_nodes(["shm"], landing_bytes_max=8192) as (a, b):
        cache = await make_cache(a, small_geometry(), 64)
        push = a.push("r", to=b.addresses, cache=cache, table=scattered(1, 64, 512, 16), land=True, timeout=30)
        began = asyncio.get_running_loop().time()
        with pytest.raises(TooLarge) as caught:
            await push.__aenter__()
        assert asyncio.get_running_loop().time() - began < 10
        assert caught.value.fields["limit"] == 8192
        assert not caught.value.retryable


def mappings() -> int:
    """Pieces of shareable memory that this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:")


async def test_mappings_of_a_peer_s_memory_are_bounded_and_a_larger_one_takes_their_place() -> None:
    most, page = 256, 4096  # SHM_IDLE_MAX
    async with two_nodes(["shm"], hugepages=False) as (a, b):
        ours, theirs = await a.alloc(page), await b.alloc(2 * (most + 64) * page)
        before = mappings()

        async def get(offset: int, length: int) -> None:
            descriptor = theirs.descriptor("r", offset=offset, length=length)
            await a.get(ours[:page], descriptor)
            a.plane.drop_import(descriptor)
            await theirs.revoke(descriptor)

        for at in range(most + 64):
            await get(2 * at * page, page)
        await until(lambda: mappings() <= before + most)
        assert mappings() > before + most - 16, "they are kept, since the next grant is often of the same memory"
        await get(0, len(theirs))
        await until(lambda: mappings() <= before + 2)

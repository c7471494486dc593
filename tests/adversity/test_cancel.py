"""Every public await is cancelled at each place where it waits; afterwards nothing is pinned, granted, claimed, posted,
running or watched, and the next piece of work is exact.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import KvxferError
from kvxfer.geometry import BlockTable
from kvxfer.memory.region import KVCache
from tests.steps import STEPS_MAX, Pair, cancelled_at, pair
from tests.support.nodes import make_cache, scattered, small_geometry, tokens_of

TRANSPORTS = ["shm", "tcp"]
BLOCKS, TOKENS = 6, 40
Work = Coroutine[Any, Any, Any]


async def everywhere(both: Pair, make: Callable[[int], Work], after: Callable[[int], Awaitable[None]]) -> int:
    """Cancel what ``make`` makes at step 1, 2, 3, ... until it ends first; ``after`` cleans up what a user would."""
    numbers = itertools.count()
    steps = 0
    before = await both.at_rest()
    for late in (False, True):
        for step in range(1, STEPS_MAX):
            number = next(numbers)
            reached, outcome = await cancelled_at(make(number), step, late)
            expected = asyncio.CancelledError | KvxferError
            assert not isinstance(outcome, BaseException) or isinstance(outcome, expected), outcome
            await after(number)
            await both.is_as(before)
            if not reached:
                assert not isinstance(outcome, BaseException), outcome
                break
            steps += 1
        else:
            raise AssertionError("it never ended")
    return steps


class Caches:
    """A filled cache on A and an empty one on B."""

    def __init__(self, source: KVCache, sink: KVCache) -> None:
        self.source, self.sink = source, sink
        self.source_table = scattered(1, BLOCKS, TOKENS, 16)
        self.sink_table: BlockTable = scattered(2, BLOCKS, TOKENS, 16)
        values = np.random.default_rng(5).standard_normal(len(source.regions[0]) // 4).astype(np.float32)
        source.regions[0].array[:] = values.view(np.uint8)

    def assert_same(self) -> None:
        for layer in range(3):
            ours = tokens_of(self.source, self.source_table, layer)
            assert np.array_equal(ours, tokens_of(self.sink, self.sink_table, layer))


async def caches(both: Pair) -> Caches:
    geometry = small_geometry()
    return Caches(await make_cache(both.a, geometry, BLOCKS), await make_cache(both.b, geometry, BLOCKS))


class Other:
    """The other side of the flow that is being cancelled."""

    def __init__(self) -> None:
        self.task: asyncio.Task[Any] | None = None

    def beside(self, other: Work, victim: Work) -> Work:
        async def run() -> Any:
            self.task = asyncio.ensure_future(other)
            return await victim

        return run()

    async def end(self, _: int) -> None:
        """It has been told within a moment, or it never heard of us and is given up."""
        task, self.task = self.task, None
        if task is None:
            return
        await asyncio.wait([task], timeout=0.03)
        task.cancel()
        [result] = await asyncio.gather(task, return_exceptions=True)
        assert not isinstance(result, BaseException) or isinstance(result, asyncio.CancelledError | KvxferError), result


async def decode(both: Pair, found: Caches, request: str) -> None:
    async with both.b.offer(request, found.sink, found.sink_table, timeout=5) as landing:
        async for _ in landing:
            pass


async def prefill(both: Pair, found: Caches, request: str) -> None:
    to = both.b.addresses
    async with both.a.push(request, to=to, cache=found.source, table=found.source_table, timeout=5) as push:
        for layer in range(3):
            await push.layer(layer)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("victim", ["decode", "prefill"])
async def test_push(transport: str, victim: str) -> None:
    async with pair(transport) as both:
        found, other = await caches(both), Other()
        await asyncio.gather(decode(both, found, "warm"), prefill(both, found, "warm"))

        def make(number: int) -> Work:
            ours, theirs = (decode, prefill) if victim == "decode" else (prefill, decode)
            return other.beside(theirs(both, found, f"r{number}"), ours(both, found, f"r{number}"))

        assert await everywhere(both, make, other.end) >= 4
        found.sink.regions[0].array[:] = 0
        await asyncio.gather(decode(both, found, "last"), prefill(both, found, "last"))
        found.assert_same()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("victim", ["publish", "pull"])
async def test_pull(transport: str, victim: str) -> None:
    async with pair(transport) as both:
        found, other = await caches(both), Other()

        async def publish(tickets: asyncio.Future[Any]) -> None:
            async with both.a.publish("r", found.source, found.source_table, lease_s=2) as ticket:
                tickets.set_result(ticket.to_dict())

        async def pull(tickets: asyncio.Future[Any]) -> None:
            await both.b.pull(await asyncio.shield(tickets), found.sink, found.sink_table, timeout=5)

        def make(_: int) -> Work:
            tickets: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            ours, theirs = (publish, pull) if victim == "publish" else (pull, publish)
            return other.beside(theirs(tickets), ours(tickets))

        await make(0)
        await other.end(0)
        assert await everywhere(both, make, other.end) >= 3
        found.sink.regions[0].array[:] = 0
        await make(0)
        await other.end(0)
        found.assert_same()


@pytest.mark.parametrize("what", ["push", "adopt"])
async def test_landing(what: str) -> None:
    async with pair("shm") as both:
        found = await caches(both)

        async def land(number: int) -> None:
            to = both.b.addresses
            async with both.a.push(
                f"r{number}", to=to, cache=found.source, table=found.source_table, land=True
            ) as push:
                await push.layers()

        async def adopt(number: int) -> None:
            async with both.b.adopt(f"r{number}", timeout=5) as landed:
                assert landed.array.any()

        async def adopt_what_is_there(number: int) -> None:
            try:
                async with both.b.adopt(f"r{number}", wait_s=0.05, timeout=5):
                    pass
            except KvxferError:
                pass  # it never landed, or was given back by the cancelled adoption

        await land(0)
        await adopt(0)
        if what == "push":
            assert await everywhere(both, lambda number: land(number + 1), lambda n: adopt_what_is_there(n + 1)) >= 4
        else:

            async def make(number: int) -> None:
                await asyncio.shield(asyncio.ensure_future(land(number)))
                await adopt(number)

            assert await everywhere(both, lambda number: make(number + 1), lambda n: adopt_what_is_there(n + 1)) >= 3


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("way", ["put", "get"])
async def test_the_first_use_of_a_descriptor(transport: str, way: str) -> None:
    async with pair(transport) as both:
        ours, theirs = await both.a.alloc(300_000), await both.b.alloc(300_000)
        ours.array[:] = 7
        made: dict[int, Any] = {}
        running: dict[int, Any] = {}

        async def move(number: int) -> None:
            made[number] = theirs.descriptor("rw")
            start = both.a.put if way == "put" else both.a.get
            running[number] = start(ours, made[number], timeout=5)
            await running[number]

        async def after(number: int) -> None:
            await running[number].cancel()
            both.a.plane.drop_import(made[number])
            await theirs.revoke(made[number])

        await move(-1)
        await after(-1)
        assert await everywhere(both, move, after) >= 2


async def test_small_things() -> None:
    async with pair("shm") as both:
        region = await both.b.alloc(4096)

        async def nothing(_: int) -> None:
            return

        async def share(number: int) -> None:
            async with await both.b.share(region, f"name{number}"):
                pass

        async def connect(_: int) -> None:
            await both.a.connect(both.b.addresses)

        async def lookup(_: int) -> None:
            await both.a.lookup("fixed", node=both.b.addresses)

        async def told(number: int) -> None:
            async with both.b.notifications(region.descriptor("w")) as values:
                await values.next(timeout=0.01)

        await connect(0)
        assert await everywhere(both, share, nothing) >= 2
        assert await everywhere(both, connect, nothing) >= 2
        async with await both.b.share(region, "fixed"):
            await lookup(0)
            assert await everywhere(both, lookup, nothing) >= 2


async def test_messages_are_not_lost_by_cancelled_receivers() -> None:
    async with pair("shm") as both:
        await both.a.send(both.b.addresses, "warm", b"")
        await both.b.recv("warm", timeout=5)
        for late, step in itertools.product((False, True), range(1, 8)):
            channel = f"c{late}{step}"
            work = both.b.recv(channel, timeout=5)
            receiving = asyncio.ensure_future(cancelled_at(work, step, late))
            await both.a.send(both.b.addresses, channel, b"x")
            reached, outcome = await receiving
            if outcome != b"x":
                assert await both.b.recv(channel, timeout=5) == b"x"
            assert reached or outcome == b"x"


async def test_memory() -> None:
    async with pair("shm") as both:

        async def alloc(_: int) -> None:
            region = await both.a.alloc(1 << 20)
            await region.release()

        async def after(_: int) -> None:
            """A region whose release was cancelled is released all the same; one that nobody got is given back."""
            for same in list(both.a.plane.memory._regions.values()):
                for region in list(same):
                    await region.release()

        assert await everywhere(both, alloc, after) >= 2

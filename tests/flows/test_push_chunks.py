"""`Push.layer(i, tokens)`: layers that go in ranges of positions, from blocks that come into being meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import kvxfer
from kvxfer.client import Client
from kvxfer.errors import (
    ClosedError,
    GeometryMismatch,
    KvxferError,
    OutOfRange,
    OverlapError,
    TransferCancelled,
    UsageError,
)
from kvxfer.flows.push import LAYERS_IN_FLIGHT_MAX
from kvxfer.geometry import BlockTable
from kvxfer.memory.region import KVCache
from tests.conftest import slack
from tests.support.nodes import make_cache, small_geometry, tokens_of, two_nodes

HERE = BlockTable.of([7, 2, 4], tokens=40)
THERE = BlockTable.of([0, 5, 3], tokens=40)


async def both(a: Client, b: Client, **changes: Any) -> tuple[KVCache, KVCache]:
    source, sink = await make_cache(a, small_geometry(**changes), 8), await make_cache(b, small_geometry(**changes), 8)
    values = source.regions[0].array.view(np.float32)
    values[:] = np.arange(len(values)) + 1
    return source, sink


def assert_equal(source: KVCache, sink: KVCache) -> None:
    for layer in range(source.layout.geometry.layers):
        assert np.array_equal(tokens_of(source, HERE, layer), tokens_of(sink, THERE, layer))


def cut(rng: np.random.Generator, pieces: int) -> list[range]:
    borders = [0, *sorted(rng.choice(np.arange(1, 40), pieces - 1, replace=False).tolist()), 40]
    return [range(start, stop) for start, stop in pairwise(borders)]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("seed", range(4))
async def test_any_ranges_in_any_order_are_the_same_bytes(transport: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    async with two_nodes([transport]) as (a, b):
        source, sink = await both(a, b)
        work = [(layer, tokens) for layer in range(3) for tokens in cut(rng, int(rng.integers(1, 9)))]
        rng.shuffle(work)  # type: ignore[arg-type]
        async with b.offer("r", sink, THERE) as landing:
            async with a.push("r", to=b.addresses, cache=source, table=HERE) as push:
                await asyncio.gather(*(push.layer(layer, range(*tokens)) for layer, tokens in bounds(work)))
            layers = [layer async for layer in landing]
        assert sorted(layers) == [0, 1, 2]
        assert push.bytes_done == 3 * 2 * 40 * 2 * 8 * 4
        assert push.segments >= 3
        assert 0 < push.seconds < 60 * slack()
        assert_equal(source, sink)


def bounds(work: Any) -> list[tuple[int, tuple[int, int]]]:
    """numpy makes arrays of what it shuffles."""
    return [(int(layer), (tokens.start, tokens.stop)) for layer, tokens in work]


async def test_blocks_may_come_after_the_push_began() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, sink = await both(a, b)
        async with b.offer("r", sink, THERE) as landing:
            async with a.push("r", to=b.addresses, cache=source, table=BlockTable.of([], tokens=40)) as push:
                with pytest.raises(OutOfRange, match="not known yet"):
                    await push.layer(0)
                with pytest.raises(OutOfRange, match="not known yet"):
                    await push.layer(0, range(1))
                for number, block in enumerate((7, 2, 4)):
                    push.extend([block])
                    with pytest.raises(OutOfRange):
                        push.extend([8])  # the cache has 0 to 7
                    chunk = range(number * 16, min(number * 16 + 16, 40))
                    for layer in range(2):
                        await push.layer(layer, chunk)
                await push.layer(2)
            await landing.wait()
        assert_equal(source, sink)
        with pytest.raises(ClosedError):
            push.extend([1])


async def test_a_layer_is_there_when_all_of_it_is() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, sink = await both(a, b)
        async with b.offer("r", sink, THERE) as landing:
            async with a.push("r", to=b.addresses, cache=source, table=HERE) as push:
                await (await push.layer(1, range(16, 40)))
                await (await push.layer(2))
                await landing.layer(2)
                assert 1 not in landing._seen
                await push.layer(1, range(16))
                await landing.layer(1)
                assert np.array_equal(tokens_of(source, HERE, 1), tokens_of(sink, THERE, 1))
                await push.layer(0)
            await landing.wait()


async def test_what_makes_no_sense_changes_nothing() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, sink = await both(a, b)
        async with b.offer("r", sink, THERE) as landing:
            async with a.push("r", to=b.addresses, cache=source, table=HERE) as push:
                await push.layer(0, range(8, 20))
                await push.layer(1)
                wrong: tuple[tuple[type[KvxferError], int, Any], ...] = (
                    (OverlapError, 0, range(8, 9)),
                    (OverlapError, 0, range(19, 30)),
                    (OverlapError, 0, range(40)),
                    (OverlapError, 0, None),
                    (UsageError, 1, range(3)),
                    (OutOfRange, 0, range(30, 41)),
                    (UsageError, 0, range(10, 5)),
                    (UsageError, 0, range(0, 8, 2)),
                    (UsageError, 0, (0, 8)),
                    (UsageError, 0, 8),
                    (UsageError, 3, range(8)),
                )
                for kind, layer, tokens in wrong:
                    with pytest.raises(kind):
                        await push.layer(layer, tokens)
                await push.layer(0, range(20, 20))
                await push.layer(0, range(8))
                await push.layer(0, range(20, 40))
                await push.layer(2)
            await landing.wait()
        assert_equal(source, sink)


async def test_a_push_with_positions_missing_is_not_committed() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, sink = await both(a, b)
        with pytest.raises((KvxferError, ExceptionGroup)):
            async with b.offer("r", sink, THERE) as landing:
                with pytest.raises(UsageError, match="before all its layers") as raised:
                    async with a.push("r", to=b.addresses, cache=source, table=HERE) as push:
                        await push.layer(0)
                        await push.layer(1)
                        await push.layer(2, range(39))
                assert raised.value.fields["positions_missing"] == 1
                await landing.wait()
        assert not landing.committed


async def test_a_cancelled_range_can_be_pushed_again() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, sink = await both(a, b)
        async with b.offer("r", sink, THERE) as landing:
            async with a.push("r", to=b.addresses, cache=source, table=HERE) as push:
                for _ in range(LAYERS_IN_FLIGHT_MAX):
                    await push._room.acquire()
                waiting = asyncio.ensure_future(push.layer(0, range(16)))
                await asyncio.sleep(0)
                waiting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await waiting
                for _ in range(LAYERS_IN_FLIGHT_MAX):
                    push._room.release()
                await push.layer(0, range(16, 40))
                await push.layer(0, range(16))
                await push.layer(1)
                await push.layer(2)
            await landing.wait()
        assert_equal(source, sink)


async def test_of_positions_that_the_offer_does_not_want_nothing_moves() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, sink = await both(a, b)
        wanted = BlockTable.of([5, 3], tokens=24, first_token=16)
        async with b.offer("r", sink, wanted) as landing:
            async with a.push("r", to=b.addresses, cache=source, table=HERE) as push:
                for layer in range(3):
                    first, second = (range(10, 40), range(10)) if layer else (range(10), range(10, 40))
                    await push.layer(layer, first)
                    await push.layer(layer, second)
            await landing.wait()
        assert push.bytes_done == 3 * 2 * 24 * 2 * 8 * 4
        for layer in range(3):
            got = tokens_of(sink, wanted, layer)
            assert np.array_equal(got, tokens_of(source, HERE, layer)[:, 16:])


async def test_ranks_may_each_go_in_their_own_ranges() -> None:
    async with two_nodes(["shm"]) as (a, b):
        sink = await make_cache(b, small_geometry(), 8)

        async def rank(head: int, chunks: list[range]) -> None:
            source = await make_cache(a, small_geometry(kv_heads=1, head_start=head), 8)
            source.regions[0].array.view(np.float32)[:] = head + 1
            async with a.push("r", to=b.addresses, cache=source, table=HERE) as push:
                for chunk in chunks:
                    for layer in range(3):
                        await push.layer(layer, chunk)

        async with b.offer("r", sink, THERE, sources=2) as landing:
            ranges = ([range(40)], [range(16, 40), range(5), range(5, 16)])
            await asyncio.gather(*(rank(head, chunks) for head, chunks in enumerate(ranges)))
            await landing.wait()
        for layer in range(3):
            assert (tokens_of(sink, THERE, layer)[:, :, 0] == 1).all()
            assert (tokens_of(sink, THERE, layer)[:, :, 1] == 2).all()


async def test_packed_blocks_move_whole() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, sink = await both(a, b, layout="BHPND", packing="test:K=DN")
        async with b.offer("r", sink, THERE) as landing:
            async with a.push("r", to=b.addresses, cache=source, table=HERE) as push:
                for wrong in (range(10), range(10, 16)):
                    with pytest.raises(GeometryMismatch, match="packed"):
                        await push.layer(0, wrong)
                for layer in range(3):
                    await push.layer(layer, range(16))
                    await push.layer(layer, range(16, 40))
            await landing.wait()
        for mine, theirs in zip(HERE.blocks, THERE.blocks, strict=True):
            blocks = [cache.regions[0].array.reshape(3, 8, -1) for cache in (source, sink)]
            assert np.array_equal(blocks[0][:, mine], blocks[1][:, theirs])


async def test_an_offer_that_ends_in_the_middle_ends_the_push() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, sink = await both(a, b)
        offered = b.offer("r", sink, THERE)
        landing = await offered.__aenter__()
        pushed = a.push("r", to=b.addresses, cache=source, table=HERE)
        push = await pushed.__aenter__()
        await push.layer(0, range(16))
        await landing.__aexit__(None, None, None)
        with pytest.raises((TransferCancelled, kvxfer.KvxferError)):
            for start in range(16, 40):
                await (await push.layer(0, range(start, start + 1)))
            await pushed.__aexit__(None, None, None)
        await pushed.__aexit__(KvxferError, KvxferError("over"), None)
        assert (b.reservations.pinned_blocks, b.reservations.quarantined_blocks) == (0, 0)

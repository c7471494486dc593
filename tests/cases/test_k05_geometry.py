"""K05: two sides that do not fit never exchange a byte; where they differ only in shape every byte lands."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvxfer
from kvxfer.config import Config
from kvxfer.errors import GeometryMismatch, Incomplete, KvxferError
from kvxfer.geometry import BlockTable, CacheLayout, Geometry, fingerprint_of
from kvxfer.memory.region import KVCache
from kvxfer.planner import Plan, contiguous_layout, plan
from kvxfer.server import ignore_fingerprint
from tests.cases.facts import limit, within
from tests.cases.harness import BOTH, Cluster, slow
from tests.cases.scale import scaled
from tests.nodes import node, until
from tests.support.nodes import make_cache, small_geometry, two_nodes

pytestmark = [pytest.mark.once, pytest.mark.timeout(300)]
TABLE = BlockTable.of(range(4), tokens=64)
MISMATCHES: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": "float8_e4m3"},
    "head_size": {"head_size": 16},
    "layers_total": {"layers": 4},
    "kv_heads_total": {"kv_heads_total": 4},
    "kv_parts": {"kv_parts": 1},
}


async def attempt(a: kvxfer.Client, b: kvxfer.Client, source: KVCache, target: KVCache, request: str) -> list[object]:
    """One push; what each side was told (None: it went well)."""

    async def receive() -> None:
        async with b.offer(request, target, TABLE, timeout=limit(5)) as landing:
            await landing.wait()

    async def send() -> None:
        async with a.push(request, to=b.addresses, cache=source, table=TABLE, timeout=limit(5)) as sending:
            await sending.layers()

    return list(await asyncio.gather(send(), receive(), return_exceptions=True))


@BOTH
@pytest.mark.parametrize("field", MISMATCHES)
async def test_c28_a_mismatch_is_refused_on_both_sides(transport: str, field: str) -> None:
    ours = small_geometry(dtype="bfloat16")
    async with two_nodes([transport]) as (a, b):
        source = await make_cache(a, ours, 4)
        target = await make_cache(b, small_geometry(**({"dtype": "bfloat16"} | MISMATCHES[field])), 4)
        source.regions[0].array[:] = 1
        target.regions[0].array[:] = 7
        with within(3, "the refusal"):
            told = await attempt(a, b, source, target, "r")
        for error in told:
            assert isinstance(error, GeometryMismatch), told
            assert field in str(error), "it names the field"
            values = (getattr(ours, field), getattr(target.layout.geometry, field))
            assert all(str(value) in str(error) for value in values), "and both values"
        assert (target.regions[0].array == 7).all(), "no byte moved"
        # A is up and serves a peer that fits.
        match = await make_cache(b, ours, 4)
        assert await attempt(a, b, source, match, "s") == [None, None]
        assert (match.regions[0].array == 1).all()


# -- C29: every pair of shapes ---------------------------------------------------------------------------------------


def rank_geometry(tp: int, rank: int, heads: int, block: int, layout: str) -> Geometry:
    """What one of ``tp`` ranks holds; beyond the number of heads they are held more than once."""
    count = max(1, heads // tp)
    start = rank * count if tp <= heads else rank * heads // tp
    return small_geometry(
        layers=2,
        kv_heads=count,
        kv_heads_total=heads,
        head_start=start,
        head_size=4,
        block_tokens=block,
        layout=layout,
        fingerprint="",
    )


def cells(layout: CacheLayout, table: BlockTable, layer: int) -> npt.NDArray[np.int64]:
    """Index (in elements) of every (part, token, head, element) of a request in one layer: written down by hand, one
    axis at a time, so that it shares nothing with the planner.
    """
    geometry = layout.geometry
    token = np.arange(table.tokens)
    block, slot = table.blocks[token // geometry.block_tokens], token % geometry.block_tokens
    lengths = {
        "P": geometry.kv_parts,
        "B": layout.blocks,
        "N": geometry.block_tokens,
        "H": geometry.kv_heads,
        "D": geometry.head_size,
    }
    stride, step = {}, 1
    for axis in reversed(geometry.layout):
        stride[axis] = step
        step *= lengths[axis]
    part, head, element = (np.arange(lengths[axis]) * stride[axis] for axis in "PHD")
    place = block * stride["B"] + slot * stride["N"]
    first = layout.placements[layer].offset // geometry.itemsize
    return first + part[:, None, None, None] + place[None, :, None, None] + head[None, None, :, None] + element


def codes(geometry: Geometry, tokens: int, layer: int) -> npt.NDArray[np.uint32]:
    """A different number for every (layer, part, token, head of the model, element)."""
    head = geometry.head_start + np.arange(geometry.kv_heads)
    axes = np.ix_(np.arange(geometry.kv_parts), np.arange(tokens), head, np.arange(geometry.head_size))
    part, token, which, element = axes
    return (1 + ((((layer * 4 + part) * 4096 + token) * 8 + which) * 4 + element)).astype(np.uint32)


def filled(geometry: Geometry, table: BlockTable) -> tuple[CacheLayout, npt.NDArray[np.uint32]]:
    layout, length = contiguous_layout(geometry, int(table.blocks.max()) + 2)
    memory = np.zeros(length // 4, np.uint32)
    for layer in range(geometry.layers):
        memory[cells(layout, table, layer)] = codes(geometry, table.tokens, layer)
    return layout, memory


def moved(made: Plan, source: npt.NDArray[np.uint32], target: npt.NDArray[np.uint32]) -> None:
    """What a transport does with a plan."""
    for layer in range(made.layers):
        for batch in made.layer(layer):
            rows = batch.segments.astype(np.int64) // 4
            within_row = np.arange(rows[:, 2].sum()) - np.repeat(np.cumsum(rows[:, 2]) - rows[:, 2], rows[:, 2])
            target[np.repeat(rows[:, 1], rows[:, 2]) + within_row] = source[
                np.repeat(rows[:, 0], rows[:, 2]) + within_row
            ]


def table_for(block: int, tokens: int, seed: int) -> BlockTable:
    needed = -(-tokens // block)
    return BlockTable(blocks=np.random.default_rng(seed).permutation(needed + 3)[:needed], tokens=tokens)


COMBINATIONS = list(
    itertools.product(
        (1, 2, 4, 8), (1, 2, 4, 8), (16, 32, 64, 128), (16, 32, 64, 128), *[("PBNHD", "PBHND")] * 2, (1, 2, 8)
    )
)


def check_combination(combination: tuple[Any, ...]) -> None:
    p_tp, d_tp, p_block, d_block, p_layout, d_layout, heads = combination
    tokens = 150
    source_table, target_table = table_for(p_block, tokens, 1), table_for(d_block, tokens, 2)
    sources = [filled(rank_geometry(p_tp, rank, heads, p_block, p_layout), source_table) for rank in range(p_tp)]
    for rank in range(d_tp):
        geometry = rank_geometry(d_tp, rank, heads, d_block, d_layout)
        layout, expected = filled(geometry, target_table)
        got = np.zeros_like(expected)
        for source, memory in sources:
            theirs = source.geometry
            if min(theirs.head_start + theirs.kv_heads, geometry.head_start + geometry.kv_heads) > max(
                theirs.head_start, geometry.head_start
            ):
                moved(plan(source, source_table, layout, target_table), memory, got)
            else:
                with pytest.raises(GeometryMismatch, match="no kv head in common"):
                    plan(source, source_table, layout, target_table)
        assert np.array_equal(got, expected), combination


def test_c29_every_pair_of_shapes_is_planned_exactly() -> None:
    assert len(COMBINATIONS) >= 2000
    chosen = random.Random(29).sample(COMBINATIONS, scaled(200, len(COMBINATIONS)))
    for combination in chosen:
        check_combination(combination)


@BOTH
@pytest.mark.parametrize(
    "shape",
    [(2, 1, 16, 64, "PBNHD", "PBHND", 8), (1, 2, 128, 32, "PBHND", "PBNHD", 2), (4, 2, 32, 16, "PBNHD", "PBNHD", 1)],
)
async def test_c29_and_moved_exactly(transport: str, shape: tuple[Any, ...]) -> None:
    p_tp, d_tp, p_block, d_block, p_layout, d_layout, heads = shape
    tokens = 150
    source_table, target_table = table_for(p_block, tokens, 1), table_for(d_block, tokens, 2)
    async with two_nodes([transport]) as (a, b):
        sources = []
        for rank in range(p_tp):
            layout, memory = filled(rank_geometry(p_tp, rank, heads, p_block, p_layout), source_table)
            region = await a.alloc(memory.nbytes)
            region.array[:] = memory.view(np.uint8)
            sources.append(KVCache(layout, region))
        for rank in range(d_tp):
            layout, expected = filled(rank_geometry(d_tp, rank, heads, d_block, d_layout), target_table)
            region = await b.alloc(expected.nbytes)
            async with AsyncExitStack() as stack:
                tickets = [
                    await stack.enter_async_context(a.publish(f"{rank}-{number}", source, source_table))
                    for number, source in enumerate(sources)
                ]
                await b.pull([ticket.to_json() for ticket in tickets], KVCache(layout, region), target_table)
            assert np.array_equal(region.array.view(np.uint32)[: len(expected)], expected)


# -- C31: the same shape, another model ------------------------------------------------------------------------------

MODEL = {"model": "m", "revision": "r1", "quantisation": "fp16", "rope": "linear-1"}


@BOTH
@pytest.mark.parametrize("part", ["revision", "quantisation", "rope"])
async def test_c31_another_revision_is_another_model(
    transport: str, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours = small_geometry(fingerprint=fingerprint_of(**MODEL))
    theirs = small_geometry(fingerprint=fingerprint_of(**(MODEL | {part: "other-2"})))
    async with two_nodes([transport]) as (a, b):
        source, target = await make_cache(a, ours, 4), await make_cache(b, theirs, 4)
        source.regions[0].array[:] = 1
        target.regions[0].array[:] = 7
        for error in await attempt(a, b, source, target, "r"):
            assert isinstance(error, GeometryMismatch)
            assert f"fingerprint.{part}" in str(error)
            assert MODEL[part] in str(error)
            assert "other-2" in str(error)
        assert (target.regions[0].array == 7).all()
        assert not a.config.ignore_fingerprint, "off by default"
    async with two_nodes([transport], ignore_fingerprint=True, http="127.0.0.1:0") as (a, b):
        source, target = await make_cache(a, ours, 4), await make_cache(b, theirs, 4)
        source.regions[0].array[:] = 1
        with caplog.at_level(logging.WARNING, "kvxfer.exchange"):
            assert await attempt(a, b, source, target, "r") == [None, None]
        assert (target.regions[0].array == 1).all()
        assert f"fingerprint.{part}" in caplog.text, "it is said aloud"


def test_c31_the_override_is_in_the_metrics() -> None:
    """One gauge, from the configuration of the node."""
    for chosen in (False, True):
        sample = ignore_fingerprint(Config(ignore_fingerprint=chosen))
        assert (sample.name, sample.value) == ("kvxfer_ignore_fingerprint", chosen)


async def test_c31_a_workers_override_is_in_the_metrics_too() -> None:
    async with node() as server:

        def shown() -> str:
            return server._scrape().body.decode()

        async with kvxfer.Client(server.socket_path, config=replace(server.config, ignore_fingerprint=True)):
            await until(lambda: "kvxfer_workers_ignore_fingerprint 1.0" in shown())
            assert "kvxfer_ignore_fingerprint 0.0" in shown(), "the daemon's own is off"
        await until(lambda: "kvxfer_workers_ignore_fingerprint 0.0" in shown())


# -- C33: several consumers of one source ----------------------------------------------------------------------------


@BOTH
async def test_c33_released_after_four_different_consumers(transport: str) -> None:
    geometry = small_geometry()
    async with two_nodes([transport]) as (a, b):
        source = await make_cache(a, geometry, 4)
        source.regions[0].array[:] = np.random.default_rng(33).integers(0, 256, source.regions[0].length)
        targets = [await make_cache(b, geometry, 4) for _ in range(4)]
        async with a.publish("r", source, TABLE, consumers=4) as ticket:
            for number, target in enumerate(targets):
                assert ticket.outcome == "", f"{number} of 4 have read it"
                await b.pull(ticket.to_json(), target, TABLE)
                claims = set(ticket._released_by)
                # The same acknowledgement again, as a retry of the network would bring it.
                for claim in claims:
                    ticket._release(claim)
            assert await asyncio.wait_for(ticket.wait_released(), limit(2)) == "released"
            assert len(ticket._released_by) == 4
        for target in targets:
            assert np.array_equal(target.regions[0].array, source.regions[0].array)
        with pytest.raises(KvxferError):
            await b.pull(ticket.to_json(), targets[0], TABLE)


@pytest.mark.asyncio(loop_scope="session")
async def test_c33_a_killed_consumer_holds_nothing(nodes: Cluster) -> None:
    lease_s = 30.0
    a, b = await nodes.fresh(b=slow(nodes.transport, "hang_op=1000"))
    blocks = list(range(8))
    for side in (a, b):
        await side.do("cache", name="c", blocks=8)
    await a.do("fill", name="c", seed=3, block=4096)
    wanted = (await a.do("layer_digests", cache="c", blocks=blocks))["layers"]
    ticket = (await a.do("publish", name="r", cache="c", blocks=blocks, consumers=4, lease_s=lease_s))["ticket"]
    for number in range(3):
        await b.do("pull", name=f"p{number}", ticket=ticket, cache="c", blocks=blocks)
        assert (await b.do("ended", name=f"p{number}"))["outcome"] == "done"
        assert (await b.do("layer_digests", cache="c", blocks=blocks))["layers"] == wanted
    await b.do("reopen_slow", transport=nodes.transport, spec="hang_rate=1", socket=str(b.socket))
    await b.do("cache", name="c", blocks=8)
    await b.do("pull", name="p3", ticket=ticket, cache="c", blocks=blocks)
    await asyncio.sleep(0.2)
    b.process.kill()
    killed = time.monotonic()
    await b.process.wait()
    ended = await a.do("ended", name="r")
    assert (ended["how"], ended["why"]) == ("abandoned", "peer_lost"), ended
    assert ended["at"] - killed <= limit(2), "its publisher is told, long before the lease ends"


# -- C99: a chunk, a shard, or what follows a prefix, that begins inside a block ---------------------------------------


def by_hand(cache: KVCache, blocks: list[int], slot: int, tokens: int) -> npt.NDArray[np.uint8]:
    """Where a request's tokens lie, of one byte each: looked up one by one."""
    size, memory = cache.layout.geometry.block_tokens, cache.regions[0].array
    return np.array([memory[blocks[at // size] * size + at % size] for at in range(slot, slot + tokens)])


@BOTH
@pytest.mark.parametrize("way", ["push", "pull", "land"])
@pytest.mark.parametrize(("size", "slot"), [(16, 12), (16, 0), (8, 4), (64, 12), (1, 0)])
async def test_c99_tokens_that_begin_inside_a_block(transport: str, way: str, size: int, slot: int) -> None:
    """Tokens 12 to 31 of a request whose blocks of 16 begin with token 0, to blocks of any size in which they begin in
    any slot. The bytes around them stay as they were.
    """
    shape = small_geometry(layers=1, kv_parts=1, kv_heads=1, kv_heads_total=1, head_size=1, dtype="uint8", layout="")
    async with two_nodes(["shm"] if way == "land" else [transport]) as (a, b):
        source, target = await make_cache(a, shape, 4), await make_cache(b, replace(shape, block_tokens=size), 64)
        source.regions[0].array[:] = np.arange(64)
        target.regions[0].array[:] = 0xEE
        ours = BlockTable.of([3, 1], 20, 12, first_slot=12)
        ids = random.Random(size).sample(range(64), -(-(slot + 20) // size))
        theirs = BlockTable.of(ids, 20, 12, first_slot=slot)
        expected = by_hand(source, [3, 1], 12, 20)
        if way == "push":
            async with b.offer("r", target, theirs, timeout=limit(5)) as landing:
                async with a.push("r", to=b.addresses, cache=source, table=ours, timeout=limit(5)) as sending:
                    await sending.layers()
                await landing.wait()
        elif way == "pull":
            async with a.publish("r", source, ours) as ticket:
                await b.pull(ticket.to_dict(), target, theirs, timeout=limit(5))
        else:
            async with a.push("r", to=b.addresses, cache=source, table=ours, land=True, timeout=limit(5)) as sending:
                await sending.layers()
            async with b.adopt("r", timeout=limit(5)) as landed:
                assert (landed.table.first_token, landed.table.first_slot, landed.table.tokens) == (12, 12, 20)
                assert landed.array[12:32].tolist() == expected.tolist()
            return
        assert by_hand(target, ids, slot, 20).tolist() == expected.tolist()
        assert np.count_nonzero(target.regions[0].array != 0xEE) == 20


async def test_c99_what_is_unclear_is_refused_at_once() -> None:
    """Token 12 may lie in slot 12 or in slot 0: neither is guessed, and nothing is posted or claimed."""
    unclear = BlockTable.of([0, 1], 20, 12)
    async with two_nodes(["shm"]) as (a, b):
        cache, target = await make_cache(a, small_geometry(), 4), await make_cache(b, small_geometry(), 4)
        async with a.publish("r", cache, TABLE) as ticket:
            for call in (
                lambda: b.offer("r", target, unclear).__aenter__(),
                lambda: a.publish("s", cache, unclear).__aenter__(),
                lambda: a.push("r", to=b.addresses, cache=cache, table=unclear).__aenter__(),
                lambda: a.push("r", to=b.addresses, cache=cache, table=unclear, land=True).__aenter__(),
                lambda: b.pull(ticket.to_dict(), target, unclear),
            ):
                with pytest.raises(kvxfer.errors.UsageError, match=r"first_slot=12 if .* first_slot=0 if"):
                    await call()
            assert (await b.pull(ticket.to_dict(), target, TABLE)).tokens == 64
        assert (a.reservations.live, b.reservations.live) == ((), ())


async def test_c99_chunks_of_one_block_may_come_from_two_sources_at_once() -> None:
    """Each chunk has slots of its own, so both are on offer together."""
    shape = small_geometry(layers=1, kv_parts=1, kv_heads=1, kv_heads_total=1, head_size=1, dtype="uint8", layout="")
    async with two_nodes(["shm"]) as (a, b):
        source, target = await make_cache(a, shape, 4), await make_cache(b, shape, 4)
        source.regions[0].array[:] = np.arange(64)
        chunks = [BlockTable.of([0], 12), BlockTable.of([0, 1], 20, 12, first_slot=12)]
        async with AsyncExitStack() as stack:
            landings = [
                await stack.enter_async_context(b.offer(f"r{index}", target, chunk, timeout=limit(5)))
                for index, chunk in enumerate(chunks)
            ]
            for index, chunk in enumerate(chunks):
                async with a.push(f"r{index}", to=b.addresses, cache=source, table=chunk) as sending:
                    await sending.layers()
                await landings[index].wait()
        assert target.regions[0].array[:32].tolist() == list(range(32))


# -- C100: one rank of four has pushed --------------------------------------------------------------------------------


@BOTH
async def test_c100_a_landing_is_committed_when_all_ranks_have_pushed_and_not_before(transport: str) -> None:
    ours = [rank_geometry(4, number, 4, 16, "PBNHD") for number in range(4)]
    async with two_nodes([transport]) as (a, b):
        caches = [await make_cache(a, geometry, 4) for geometry in ours]
        target = await make_cache(b, rank_geometry(1, 0, 4, 16, "PBNHD"), 4)
        for number, cache in enumerate(caches):
            cache.regions[0].array[:] = number + 1

        async def send(number: int, request: str) -> bool:
            async with a.push(request, to=b.addresses, cache=caches[number], table=TABLE, timeout=limit(20)) as push:
                await push.layers()
            return push.covered

        for number, request in enumerate(("late", "expected")):
            how = {"timeout": limit(1)} if number == 0 else {"timeout": limit(60), "sources": 1}
            async with b.offer(request, target, TABLE, **how) as landing:
                assert not await send(0, request)
                with pytest.raises(Incomplete, match="heads 1-3") as found, within(10, "the error"):
                    await landing.wait()
                assert not landing.committed
                assert found.value.fields["missing"] == "heads 1-3"
        async with b.offer("whole", target, TABLE, timeout=limit(20)) as landing:
            told = await asyncio.gather(*(send(number, "whole") for number in (3, 0, 2, 1, 0)))
            await landing.wait()
            assert sorted(told) == [False] * 4 + [True], "a copy of a rank moves nothing"
        size = target.layout.geometry.head_size * 4
        for layer in range(2):
            found_heads = target.regions[0].array[target.layout.placements[layer].offset :][: 2 * 64 * 4 * size]
            assert (found_heads.reshape(-1, 4, size) == np.arange(1, 5)[:, None]).all()

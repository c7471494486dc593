"""K01: blocks are never reused or freed while a transfer can still touch them (abort, lease expiry, timeout)."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvxfer
from examples.remote_worker import WorkerFailed
from tests.cases.facts import limit, pattern_sha, within
from tests.cases.harness import Cluster, Side, metric, slow

pytestmark = [pytest.mark.once, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]
BLOCK, BLOCKS = 64 << 10, 8
LENGTH = BLOCK * BLOCKS
TABLE = list(range(8))


async def memory(found: Cluster, length: int = LENGTH) -> None:
    """The same region on both sides; A's holds pattern(1)."""
    await asyncio.gather(*(side.do("alloc", name="m", length=length) for side in found.values()))
    await found["a"].do("fill", name="m", seed=1, block=BLOCK)


async def begin(found: Cluster, way: str, name: str, **how: Any) -> str:
    """A's memory goes to B's: A puts or B gets. Returns who moves it."""
    mover, owner = ("a", "b") if way == "push" else ("b", "a")
    described = (await found[owner].do("describe", name="m"))["descriptor"]
    kind = "put" if way == "push" else "get"
    await found[mover].do("start", name=name, way=kind, region="m", descriptor=described, **how)
    return mover


async def caches(a: Side, b: Side, blocks: int = 8, **geometry: Any) -> int:
    """A cache on both sides; A's holds pattern(1) in pieces of 4 KiB. Its bytes."""
    made = [await side.do("cache", name="c", blocks=blocks, **geometry) for side in (a, b)]
    await a.do("fill", name="c", seed=1, block=4096)
    return int(made[0]["bytes"])


async def begin_flow(way: str, a: Side, b: Side, name: str) -> None:
    """A request goes from A's blocks 0-7 to B's, pushed by A or pulled by B."""
    if way == "push":
        await b.do("offer", name=name, cache="c", blocks=TABLE)
        await a.do("push", name=name, to=b.node, cache="c", blocks=TABLE)
    else:
        ticket = (await a.do("publish", name=name, cache="c", blocks=TABLE))["ticket"]
        await b.do("pull", name=name, ticket=ticket, cache="c", blocks=TABLE)


async def aborted(way: str, a: Side, b: Side, number: int, watch_s: float) -> None:
    """One round of C01: B hangs up in the middle; a canary in the blocks survives; the next transfer is exact."""
    name = f"{way} {number}"
    await begin_flow(way, a, b, name)
    await asyncio.sleep(0.2)
    with pytest.raises(WorkerFailed) as busy:  # the blocks are not offered to anybody else meanwhile
        await b.do("claim_blocks", cache="c", blocks=[3])
    assert busy.value.code == "region_busy"
    with within(0.1 + 1, "the cancel"):
        await b.do("abort", name=name)
        assert (await b.do("ended", name=name))["outcome"] == "cancelled"
        await b.back_to({"pinned": 0, "quarantined": 0}, 1, ("pinned", "quarantined"))
    await b.do("claim_blocks", cache="c", blocks=TABLE)
    await b.do("fill", name="c", seed=1000 + number, block=4096)
    await b.do("watch", name="c", every_s=0.01, for_s=watch_s)
    await a.do("abort", name=name)  # a publication waits for another consumer until its lease ends
    await a.do("ended", name=name)
    assert (await b.do("unchanged", name="c"))["changed"] == 0


@pytest.mark.parametrize("way", ["push", "pull"])
@pytest.mark.parametrize(
    ("rounds", "watch_s"), [(2, 0.5), pytest.param(50, 5, marks=[pytest.mark.full, pytest.mark.timeout(600)])]
)
async def test_c01_an_aborted_request_leaves_its_blocks_alone(
    nodes: Cluster, way: str, rounds: int, watch_s: float
) -> None:
    # 24 pieces with 100 ms between them: more than 2 s for a request.
    slowed = slow(nodes.transport, "chunk_bytes=65536,chunk_ms=100")
    a, b = await nodes.fresh(a=slowed, b=slowed)
    await caches(a, b, kv_heads=8, kv_heads_total=8, head_size=128)
    for number in range(rounds):
        await aborted(way, a, b, number, watch_s)
    a, b = await nodes.fresh()
    size = await caches(a, b, kv_heads=8, kv_heads_total=8, head_size=128)
    await a.do("fill", name="c", seed=2, block=4096)
    await begin_flow(way, a, b, "fresh")
    assert [(await side.do("ended", name="fresh"))["outcome"] for side in (a, b)] == ["done", "done"]
    assert (await b.do("digest", name="c"))["sha"] == pattern_sha(2, range(size // 4096), 4096)


async def test_c02_a_lease_that_ran_out_is_never_read(nodes: Cluster) -> None:
    a, b = await nodes.fresh()
    size = await caches(a, b)
    await b.do("fill", name="c", seed=9, block=4096)
    before = await metric(a, "kvxfer_claims_refused_total", kind="ticket", reason="lease_expired")
    ticket = (await a.do("publish", name="p", cache="c", blocks=TABLE, lease_s=1))["ticket"]
    began = time.monotonic()
    assert (await a.do("ended", name="p"))["how"] == "expired"
    assert 1 <= time.monotonic() - began + 0.05 <= limit(2), "not before the lease, and soon after"
    await a.do("fill", name="c", seed=3, block=4096)  # reused at once
    await asyncio.sleep(max(0, began + 2 - time.monotonic()))
    await b.do("pull", name="q", ticket=ticket, cache="c", blocks=TABLE)
    ended = await b.do("ended", name="q")
    assert (ended["outcome"], ended["error"]) == ("failed", "lease_expired")
    assert (await b.do("digest", name="c"))["sha"] == pattern_sha(9, range(size // 4096), 4096)
    assert await metric(a, "kvxfer_claims_refused_total", kind="ticket", reason="lease_expired") == before + 1


@pytest.mark.parametrize("for_s", [1.8, pytest.param(5, marks=pytest.mark.full)])
async def test_c02_a_renewed_lease_holds(tcp_nodes: Cluster, for_s: float) -> None:
    a, b = await tcp_nodes.fresh()
    size = await caches(a, b)
    ticket = (await a.do("publish", name="p", cache="c", blocks=TABLE, lease_s=1, consumers=2))["ticket"]
    end = time.monotonic() + for_s
    while time.monotonic() < end:
        await asyncio.sleep(0.3)
        renewed = time.monotonic()
        await a.do("renew", name="p", lease_s=1)
    await b.do("pull", name="q", ticket=ticket, cache="c", blocks=TABLE)
    assert (await b.do("ended", name="q"))["outcome"] == "done"
    assert (await b.do("digest", name="c"))["sha"] == pattern_sha(1, range(size // 4096), 4096)
    assert (await a.do("ended", name="p"))["how"] == "expired"
    assert 1 <= time.monotonic() - renewed <= limit(2)


@pytest.mark.parametrize("rounds", [2, pytest.param(10, marks=pytest.mark.full)])
async def test_c04_a_timeout_frees_nothing_that_is_in_use(nodes: Cluster, rounds: int) -> None:
    """Ten at a time, each stuck in the native call for longer than its deadline; the caller forgets everything."""
    a, b = await nodes.fresh(a=slow(nodes.transport, "stuck_ms=700"))
    await memory(nodes, BLOCK)
    target = (await b.do("describe", name="m"))["descriptor"]
    await a.do("timed_out", count=10, length=BLOCK, descriptor=target, timeout=0.3)
    baseline, rss = await a.holds(), a.rss_bytes()
    for _ in range(rounds):
        found = await a.do("timed_out", count=10, length=BLOCK, descriptor=target, timeout=0.3)
        assert found["states"] == {"timed_out": 10}
        assert found["decided_s"] <= limit(0.7), "the caller was told at the deadline"
        assert found["kept"] == 10, "what the stuck call may still touch is not given back"
        assert found["returned_s"] <= limit(0.7 + 1), "and is, when it ends"
        await a.back_to(baseline, 1, ("regions", "inflight", "pinned"))
    assert a.rss_bytes() - rss < 8 << 20
    assert a.process.returncode is None


@pytest.mark.parametrize("every_s", [0.04, pytest.param(0.2, marks=pytest.mark.full)])
async def test_c05_release_means_finished(nodes: Cluster, every_s: float) -> None:
    a, b = await nodes.fresh(a=slow(nodes.transport, "chunk_bytes=65536,chunk_ms=100"))
    await memory(nodes, 32 * BLOCK)
    await begin(nodes, "push", "t")
    op = (await a.do("state", name="t"))["op"]
    with pytest.raises(WorkerFailed) as busy:
        await a.do("release", name="m")
    assert busy.value.code == "region_busy"
    assert f"transfers={op}" in str(busy.value), "it lists the transfers"
    await asyncio.sleep(0.3)
    ended = await a.do("cancel", name="t")
    assert (ended["state"], ended["settled"]) == ("cancelled", 1)
    assert 0 < ended["bytes"] < 32 * BLOCK, "it was in the middle"
    await a.do("release", name="m")
    digests = set()
    for _ in range(10):
        digests.add((await b.do("digest", name="m"))["sha"])
        await asyncio.sleep(every_s)
    assert len(digests) == 1
    # drain=True waits for what runs.
    await a.do("alloc", name="m", length=4 * BLOCK)
    await begin(nodes, "push", "u")
    await a.do("release", name="m", drain=True)
    assert (await a.do("state", name="u"))["state"] == "done"


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.full)])
async def test_c07_a_layer_that_is_here_is_whole(nodes: Cluster, count: int) -> None:
    a, b = await nodes.fresh(a=slow(nodes.transport, "delay_ms=0..8,seed=7"))
    await caches(a, b, layers=8)
    for seed in range(count):
        await a.do("fill", name="c", seed=seed, block=4096)
        wanted = (await a.do("layer_digests", cache="c", blocks=TABLE))["layers"]
        hold = seed % 8
        await b.do("landing", name=f"r{seed}", cache="c", blocks=TABLE)
        await a.do("shuffled", name=f"r{seed}", to=b.node, cache="c", blocks=TABLE, seed=seed, hold=hold)
        ended = await b.do("ended", name=f"r{seed}")
        assert ended["layers"] == wanted, "each was whole the moment its wait ended"
        assert ended["order"][-1] == hold, "the others did not wait for the one that was held back"
        assert ended["final"] == ""
        assert (await b.do("layer_digests", cache="c", blocks=TABLE))["layers"] == wanted, "and stayed so"
        await a.do("ended", name=f"r{seed}")


async def test_c07_a_layer_that_failed_fails_alone(nodes: Cluster) -> None:
    a, b = await nodes.fresh()
    await caches(a, b, layers=8)
    wanted = (await a.do("layer_digests", cache="c", blocks=TABLE))["layers"]
    await b.do("landing", name="f", cache="c", blocks=TABLE)
    await a.do("shuffled", name="f", to=b.node, cache="c", blocks=TABLE, seed=1, fail=3)
    ended = await b.do("ended", name="f")
    assert ended["layers"][3] == ended["final"] == "injected"
    assert [layer for n, layer in enumerate(ended["layers"]) if n != 3] == wanted[:3] + wanted[4:]


async def test_c101_bytes_are_promised_once_by_whatever_name() -> None:
    """The same memory by another order of regions, another registration or another block size is refused to a second
    request, for offers and pulls alike; what the first does not cover is not.
    """
    shape = kvxfer.Geometry(layers=2, kv_heads=1, head_size=32, block_tokens=16, dtype="float16")
    stage = replace(shape, layers=1)
    size, table = shape.bytes_per_block, kvxfer.BlockTable.of([0], 16)
    placed = kvxfer.LayerPlacement

    def cache(geometry: kvxfer.Geometry, regions: list[kvxfer.Region], *places: tuple[int, int]) -> kvxfer.KVCache:
        placements = tuple(placed(region=region, offset=offset) for region, offset in places)
        return kvxfer.KVCache(kvxfer.CacheLayout(geometry=geometry, blocks=1, placements=placements), regions)

    async with kvxfer.local() as client:
        memory = np.zeros(4 * size, np.uint8)
        one, other = await client.register(memory), await client.alloc(size)
        twice = await client.register(memory)
        layers = (0, 0), (1, 0)
        async with client.offer("first", cache(shape, [one, other], *layers), table):
            for again in (
                cache(shape, [other, one], *layers),
                cache(shape, [twice, await client.alloc(size)], *layers),
                cache(replace(stage, kv_parts=1, block_tokens=1), [one], (0, size - 64)),
            ):
                used = kvxfer.BlockTable.of([0], again.layout.geometry.block_tokens)
                with pytest.raises(kvxfer.errors.RegionBusy, match="offer first"):
                    await client.offer("second", again, used).__aenter__()
            async with client.publish("ticket", cache(stage, [one], (0, size)), table) as ticket:
                with pytest.raises(kvxfer.errors.RegionBusy, match="offer first"):
                    await client.pull(ticket, cache(stage, [one], (0, 0)), table)
                await client.pull(ticket, cache(stage, [one], (0, 2 * size)), table)  # another stage's memory
            async with client.offer("next", cache(stage, [twice], (0, size)), table):
                pass
        async with client.offer("second", cache(shape, [other, one], *layers), table):
            pass

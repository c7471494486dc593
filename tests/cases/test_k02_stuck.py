"""K02: nobody waits for ever: a failure or abort is told to the other side, and every state has a deadline."""

from __future__ import annotations

import asyncio
import time

import pytest

from examples.remote_worker import WorkerFailed
from tests.cases.facts import limit, pattern_sha, within
from tests.cases.harness import Cluster, Side, metric, slow
from tests.cases.scale import scaled_s

pytestmark = [pytest.mark.once, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]
BLOCKS = list(range(16))
BLOCK = 64 << 10


async def begin_push(a: Side, b: Side, name: str, **how: float) -> None:
    """B waits for a request that A pushes slowly; returns when bytes move."""
    for side in (a, b):
        await side.do("cache", name="c", blocks=16)
    await b.do("offer", name=name, cache="c", blocks=BLOCKS, **how)
    await a.do("push", name=name, to=b.node, cache="c", blocks=BLOCKS)
    await asyncio.sleep(0.4)


async def test_c08_killed_while_decode_waits(nodes: Cluster) -> None:
    a, b = await nodes.fresh(a=slow(nodes.transport, "chunk_bytes=4096,chunk_ms=100"))
    before = await b.holds()
    await begin_push(a, b, "r")
    assert (await b.holds())["pinned"] == 16
    a.process.kill()
    killed = time.monotonic()
    await a.process.wait()
    ended = await b.do("ended", name="r")
    assert ended["at"] - killed <= limit(2)
    assert ended["error"] == "peer_lost", ended
    assert " r " in f"{ended['message']} ", "the transfer is named"
    await b.back_to(before, 1)


async def test_c08_rejected_while_decode_waits(nodes: Cluster) -> None:
    a, b = await nodes.fresh(a=slow(nodes.transport, "chunk_bytes=4096,chunk_ms=100"))
    before = await b.holds()
    await begin_push(a, b, "r")
    began = time.monotonic()
    await a.do("abort", name="r")
    ended = await b.do("ended", name="r")
    assert ended["at"] - began <= limit(2)
    assert (ended["error"], ended["fields"]["by"]) == ("cancelled", "peer")
    await b.back_to(before, 1)


async def test_c08_all_packets_lost(behind_proxies: Cluster) -> None:
    """B fetches from A, and every byte between them is lost from a moment on."""
    a, b, _ = await behind_proxies.fresh(b={"timeout_s": 1.5, "cancel_s": 0.5}, a={"cancel_s": 0.5})
    for side in (a, b):
        await side.do("alloc", name="m", length=64 * BLOCK)
    await b.do("cache", name="c", blocks=16)
    await a.do("cache", name="c", blocks=16)
    before = await b.holds()
    target = (await a.do("describe", name="m"))["descriptor"]
    ticket = (await a.do("publish", name="p", cache="c", blocks=BLOCKS))["ticket"]
    a.data.pause()
    await b.do("start", name="t", way="get", region="m", descriptor=target)
    await b.do("pull", name="q", ticket=ticket, cache="c", blocks=BLOCKS)
    await asyncio.sleep(0.2)
    a.data.black_hole()
    a.control.black_hole()
    a.data.resume()
    began = time.monotonic()
    try:
        state = await b.do("outcome", name="t")
        assert state["error"] in ("timeout", "stalled", "peer_lost"), state
        assert state["decided_s"] <= limit(1.5 + 1), "the default deadline is finite, and holds"
        assert state["settled_s"] <= limit(1.5 + 1)
        ended = await b.do("ended", name="q")
        assert ended["outcome"] == "failed"
        assert ended["at"] - began <= limit(1.5 + 1)
        await b.back_to(before, 1)
    finally:
        a.data.heal()
        a.control.heal()


async def test_c08_no_transfer_without_a_deadline(tcp_nodes: Cluster) -> None:
    a, b = await tcp_nodes.fresh(a={"timeout_s": 0.2} | slow("tcp", "hang_rate=1"))
    for side in (a, b):
        await side.do("alloc", name="m", length=BLOCK)
    target = (await b.do("describe", name="m"))["descriptor"]
    await a.do("start", name="t", way="put", region="m", descriptor=target)
    with within(1, "the configured deadline"):
        assert (await a.do("outcome", name="t"))["state"] == "timed_out"
    for wrong in (0, -1, "inf"):
        with pytest.raises(WorkerFailed) as refused:
            await a.do("start", name="u", way="put", region="m", descriptor=target, timeout=wrong)
        assert refused.value.code == "usage"


async def test_c09_a_part_that_cannot_start_is_named(nodes: Cluster) -> None:
    a, b = await nodes.fresh(a=slow(nodes.transport, "refuse_op=3,chunk_bytes=1024,chunk_ms=20"))
    for side in (a, b):
        await side.do("cache", name="c", blocks=16, layers=4)
    await b.do("offer", name="r", cache="c", blocks=BLOCKS)
    began = time.monotonic()
    await a.do("push", name="r", to=b.node, cache="c", blocks=BLOCKS)
    ended = await b.do("ended", name="r")
    assert ended["at"] - began <= limit(1)
    assert ended["error"] == "injected", ended
    assert "layer 2" in ended["message"], "the third of four, counted from 0"
    ours = await a.do("ended", name="r")
    assert (ours["error"], ours["fields"]["layer"]) == ("injected", 2)
    assert (await a.holds())["inflight"] == 0, "the other parts have ended too"


async def test_c09_every_part_ends_once(nodes: Cluster) -> None:
    """Four writes of one group; the third is not even started."""
    a, b = await nodes.fresh(a=slow(nodes.transport, "refuse_op=3,chunk_bytes=1024,chunk_ms=20"))
    for side in (a, b):
        await side.do("alloc", name="m", length=4 * BLOCK)
    target = (await b.do("describe", name="m"))["descriptor"]
    found = await a.do("group", region="m", descriptor=target, parts=4, timeout=5)
    assert found["state"] == "failed"
    assert found["error"] == "injected"
    assert found["fields"]["part"] == 2, "which of the four, counted from 0"
    assert found["settled"] == 1
    assert (await a.holds())["inflight"] == 0


@pytest.mark.parametrize("pause_ms", [60, pytest.param(150, marks=pytest.mark.full)])
async def test_c10_a_storm_of_aborts(nodes: Cluster, pause_ms: int) -> None:
    """A hundred requests of 2 s (in full 5 s); 89 are aborted by A, B hears it at once, and the others are exact."""
    slowed = slow(nodes.transport, f"chunk_bytes=1024,chunk_ms={pause_ms}")
    a, b = await nodes.fresh(a=slowed)
    for side in (a, b):
        await side.do("cache", name="c", blocks=100, layers=1, head_size=128)
    await a.do("fill", name="c", seed=1, block=4096)
    names = [f"r{index}" for index in range(100)]
    for index, name in enumerate(names):
        await b.do("offer", name=name, cache="c", blocks=[index], timeout=20)
        await a.do("push", name=name, to=b.node, cache="c", blocks=[index], timeout=20)
    await b.back_to({"pinned": 100}, 2, ("pinned",))  # every slot is taken
    await asyncio.sleep(0.5)
    aborted = names[:89]
    began = time.monotonic()
    for name in aborted:
        await a.do("abort", name=name)
    for name in aborted:
        ended = await b.do("ended", name=name)
        assert (ended["error"], ended["fields"].get("by")) == ("cancelled", "peer"), ended
        assert ended["at"] - began <= limit(1), name
    await b.back_to({"pinned": 11, "quarantined": 0}, 1, ("pinned", "quarantined"))
    for index, name in enumerate(aborted):
        await b.do("offer", name=f"again-{name}", cache="c", blocks=[index], timeout=20)
        await a.do("push", name=f"again-{name}", to=b.node, cache="c", blocks=[index], timeout=20)
    for name in (*names[89:], *(f"again-{name}" for name in aborted)):
        ended = await b.do("ended", name=name)
        assert ended["outcome"] == "done", ended
    assert time.monotonic() - began < limit(15)
    digests = [await side.do("digest", name="c") for side in (a, b)]
    assert digests[0] == digests[1]


async def test_c12_what_arrived_in_time_is_done(nodes: Cluster) -> None:
    """The completion is in the ring 50 ms before the deadline; the loop looks 200 ms after it."""
    a, b = await nodes.fresh(a=slow(nodes.transport, "delay_ms=250"))
    for side in (a, b):
        await side.do("alloc", name="m", length=BLOCK)
    target = (await b.do("describe", name="m"))["descriptor"]
    await a.do("latencies", count=1, region="m", descriptor=target, size=1024)
    found = await a.do("blocked", region="m", descriptor=target, timeout=0.3, hold_s=0.5)
    assert found["state"] == "done"
    assert (await a.do("counters"))["late"] == 0


async def test_c12_what_arrived_too_late_stays_late(nodes: Cluster) -> None:
    a, b = await nodes.fresh(a=slow(nodes.transport, "stuck_ms=300"))
    for side in (a, b):
        await side.do("alloc", name="m", length=BLOCK)
    target = (await b.do("describe", name="m"))["descriptor"]
    total = await metric(a, "kvxfer_late_total")
    await a.do("start", name="t", way="put", region="m", descriptor=target, timeout=0.1)
    told = await a.do("outcome", name="t", settle=False)
    assert told["state"] == "timed_out"
    settled = await a.do("outcome", name="t")
    assert (settled["state"], settled["settled"]) == ("timed_out", 1), "no flip"
    assert (await a.do("counters"))["late"] == 1
    assert await metric(a, "kvxfer_late_total") == total + 1


async def test_c13_the_source_goes_while_it_waits(nodes: Cluster) -> None:
    """Ten requests wait for a paused transport; the memory of the fourth is dropped."""
    a, b = await nodes.fresh(a=slow(nodes.transport, "delay_ms=500"))
    await b.do("alloc", name="m", length=10 * BLOCK)
    target = (await b.do("describe", name="m"))["descriptor"]
    for index in range(10):
        await a.do("alloc", name=f"s{index}", length=BLOCK)
        await a.do("fill", name=f"s{index}", seed=index, block=BLOCK)
        offset = index * BLOCK
        how = {"way": "put", "region": f"s{index}", "descriptor": target, "remote_offset": offset}
        await a.do("start", name=f"t{index}", **how)
    with pytest.raises(WorkerFailed) as busy:
        await a.do("release", name="s4")
    assert busy.value.code == "region_busy"
    for index in range(10):
        assert (await a.do("outcome", name=f"t{index}"))["state"] == "done"
        found = await b.do("digest", name="m", offset=index * BLOCK, length=BLOCK)
        assert found["sha"] == pattern_sha(index, range(1), BLOCK)
    await a.do("release", name="s4")


async def test_c13_a_published_source_goes(nodes: Cluster) -> None:
    """Ten pulls, slow; the publisher drops the memory of the fourth: B hears it within a second."""
    a, b = await nodes.fresh(b=slow(nodes.transport, "delay_ms=700"))
    await b.do("cache", name="c", blocks=10)
    for index in range(10):
        await a.do("cache", name=f"c{index}", blocks=1)
        await a.do("fill", name=f"c{index}", seed=index, block=4096)
        ticket = (await a.do("publish", name=f"p{index}", cache=f"c{index}", blocks=[0]))["ticket"]
        await b.do("pull", name=f"q{index}", ticket=ticket, cache="c", blocks=[index])
    await asyncio.sleep(0.25)
    began = time.monotonic()
    await a.do("release", name="c4")
    ended = await b.do("ended", name="q4")
    assert (ended["outcome"], ended["error"] in ("cancelled", "revoked", "stale_descriptor")) == ("failed", True), ended
    assert ended["at"] - began <= limit(1)
    for index in (0, 1, 2, 3, 5, 6, 7, 8, 9):
        assert (await b.do("ended", name=f"q{index}"))["outcome"] == "done"
        theirs = await a.do("layer_digests", cache=f"c{index}", blocks=[0])
        assert await b.do("layer_digests", cache="c", blocks=[index]) == theirs


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_c14_a_frozen_peer(behind_proxies: Cluster, transport: str) -> None:
    """A is stopped in the middle. B sees that nothing moves, fails at its deadline, and is never written to again."""
    behind_proxies.transport = transport
    slowed = slow(transport, "chunk_bytes=4096,chunk_ms=50")
    a, b, c = await behind_proxies.fresh(a=slowed, b={"timeout_s": 2.5, "cancel_s": 0.5})
    for side in (a, b, c):
        await side.do("cache", name="c", blocks=16)
        await side.do("alloc", name="m", length=BLOCK)
    other = (await c.do("describe", name="m"))["descriptor"]
    unloaded = (await b.do("latencies", count=200, region="m", descriptor=other, size=4096))["seconds"]
    await b.do("offer", name="r", cache="c", blocks=BLOCKS, timeout=2.5)
    began = time.monotonic()
    await a.do("push", name="r", to=b.node, cache="c", blocks=BLOCKS)
    await asyncio.sleep(0.3)
    a.freeze()
    try:
        frozen = time.monotonic()
        while not (await b.do("landing_stalled", name="r"))["stalled"]:
            assert time.monotonic() - frozen < limit(2)
            await asyncio.sleep(0.05)
        assert (await b.do("counters"))["stalled"] == 1
        assert await metric(b, "kvxfer_stalled") == 1
        loaded = (await b.do("latencies", count=200, region="m", descriptor=other, size=4096))["seconds"]
        assert loaded[197] <= 2 * unloaded[197] + limit(0.005), "the 99th percentile"
        ended = await b.do("ended", name="r")
        assert ended["error"] in ("stalled", "peer_lost"), ended
        assert ended["at"] - began <= limit(2.5 + 1)
        assert (await b.do("counters"))["stalled"] == 0
        watched_s = scaled_s(1, 2)
        await b.do("watch", name="c", every_s=watched_s / 10, for_s=watched_s)
    finally:
        a.thaw()
    assert (await b.do("unchanged", name="c"))["changed"] == 0


async def test_c14_a_frozen_owner(behind_proxies: Cluster) -> None:
    """The same for a get: the transfer itself says that it is stalled, and why it failed."""
    behind_proxies.transport = "tcp"
    a, b, _ = await behind_proxies.fresh()
    for side in (a, b):
        await side.do("alloc", name="m", length=64 * BLOCK)
    target = (await a.do("describe", name="m"))["descriptor"]
    await b.do("latencies", count=1, region="m", descriptor=target, size=1024)
    a.freeze()
    try:
        await b.do("start", name="t", way="get", region="m", descriptor=target, timeout=limit(4))
        began = time.monotonic()
        while not (await b.do("state", name="t"))["stalled"]:  # it is while the transfer runs
            assert time.monotonic() - began < limit(4)
            await asyncio.sleep(0.05)
        ended = await b.do("outcome", name="t", settle=False)
        assert (ended["state"], ended["error"]) == ("timed_out", "stalled")
    finally:
        a.thaw()

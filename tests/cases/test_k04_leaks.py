"""K04: blocks, slots and handles come back: after aborts, timeouts, orphans and requests that were refused early."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from kvxfer.errors import KvxferError
from kvxfer.wire import messages as m
from tests.cases.facts import limit, pattern_sha
from tests.cases.harness import Cluster, metric, slow
from tests.cases.scale import scaled
from tests.nodes import node, until, worker

pytestmark = [pytest.mark.once, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]
BLOCK = 64 << 10
BLOCKS = list(range(8))
ALL = ("inflight", "imports", "pinned", "quarantined", "quarantined_grants", "regions", "fds", "threads")


@pytest.mark.parametrize("rounds", [2, pytest.param(5, marks=pytest.mark.full)])
async def test_c22_aborts_at_any_moment(nodes: Cluster, rounds: int) -> None:
    """500 transfers, each aborted at a seeded moment: before its start, while it connects, in the middle, too late."""
    slowed = slow(nodes.transport, "delay_ms=0..5,seed=3")
    baseline = None
    for number in range(rounds):
        a, b = await nodes.fresh(a=slowed)  # a new client: so that the first ones meet the connect
        for side in (a, b):
            await side.do("alloc", name="m", length=500 * 4096)
        target = (await b.do("describe", name="m"))["descriptor"]
        if number:
            await a.do("latencies", count=1, region="m", descriptor=target, size=4096)
        how = {"count": 500, "region": "m", "descriptor": target, "within_s": 0.05, "timeout": 10}
        outcomes = (await a.do("storm", seed=number, **how))["outcomes"]
        assert sum(outcomes.values()) == 500
        assert set(outcomes) <= {"cancelled", "done"}, outcomes
        assert outcomes["cancelled"] > 20
        if number:
            assert outcomes.get("done", 0) > 20, "some were over already"
        for side in (a, b):
            await side.back_to(
                {"inflight": 0, "pinned": 0, "quarantined": 0, "quarantined_grants": 0},
                1,
                ("inflight", "pinned", "quarantined", "quarantined_grants"),
            )
        assert (await b.holds())["grants"] == 1, "the one that the test made"
        # Where all were aborted early the connection is still being made: let that end, one way or the other.
        await a.do("latencies", count=1, region="m", descriptor=target, size=4096)
        await a.back_to({"tasks": 1, "imports": 1}, 2, ("tasks", "imports"))
        baseline = baseline or await a.holds()
        await a.back_to(baseline, 2, ("imports", "regions", "threads", "fds", "tasks"))


async def test_c23_slots_free_themselves(behind_proxies: Cluster) -> None:
    """Every slot waits for a peer that says nothing; nobody asks for anything more; they come back all the same."""
    a, b, c = await behind_proxies.fresh(b={"inflight_max": 64, "window_ops_max": 64, "cancel_s": 0.3})
    for side in (a, b, c):
        await side.do("alloc", name="m", length=64 * BLOCK)
    dead = (await a.do("describe", name="m"))["descriptor"]
    alive = (await c.do("describe", name="m"))["descriptor"]
    await b.do("start", name="warm", way="put", region="m", descriptor=dead, span=(0, 4096))
    await b.do("outcome", name="warm")
    a.data.black_hole()
    try:
        began = time.monotonic()
        for index in range(64):
            span, offset = (index * BLOCK, BLOCK), index * BLOCK
            how = {"way": "get", "region": "m", "descriptor": dead, "span": span, "remote_offset": offset}
            await b.do("start", name=f"t{index}", timeout=1, **how)
        while await metric(b, "kvxfer_inflight") < 64:
            assert time.monotonic() - began < limit(1), "all slots are taken"
            await asyncio.sleep(0.01)
        while await metric(b, "kvxfer_inflight") > 0:
            assert time.monotonic() - began < limit(1 + 1 + 0.5), "read from the metrics alone"
            await asyncio.sleep(0.02)
        await b.do("start", name="healthy", way="put", region="m", descriptor=alive)
        assert (await b.do("outcome", name="healthy"))["decided_s"] < limit(0.5)
        for index in range(64):
            state = await b.do("state", name=f"t{index}")
            assert (state["state"], state["settled"]) in (("timed_out", 1), ("failed", 1)), state
    finally:
        a.data.heal()


@pytest.mark.parametrize("count", [3000, pytest.param(200_000, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
async def test_c25_announcements_that_nobody_claims(behind_proxies: Cluster, count: int) -> None:
    """To C's daemon, which holds 400 channels at most, each message for 2 s; a slow machine sends more too."""
    _, a, b = await behind_proxies.fresh()
    for side in (a, b):
        await side.do("alloc", name="m", length=8 * BLOCK)
    await a.do("fill", name="m", seed=1, block=BLOCK)
    target = (await b.do("describe", name="m"))["descriptor"]
    how = {"region": "m", "descriptor": target, "size": 4096}
    unloaded = (await a.do("latencies", count=100, **how))["seconds"]
    await a.do("announce", to=b.node, first=0, count=100)
    rss = b.rss_bytes(b.daemon)
    refused, sent, loaded = 0, 0, []
    while sent < count:
        some = min(2500, count - sent)
        outcomes = (await a.do("announce", to=b.node, first=sent, count=some))["outcomes"]
        assert set(outcomes) <= {"done", "too_many_pending"}, outcomes
        refused += outcomes.get("too_many_pending", 0)
        sent += some
        assert await metric(b, "kvxfer_channels") <= 400
        loaded += (await a.do("latencies", count=50, **how))["seconds"]
    assert refused > 0, "beyond the cap the sender is told"
    assert b.rss_bytes(b.daemon) - rss <= 32 << 20
    assert sorted(loaded)[int(len(loaded) * 0.99)] <= 5 * unloaded[98] + limit(0.01)
    began = time.monotonic()
    while await metric(b, "kvxfer_channels") > 0:
        assert time.monotonic() - began < limit(2 + 2), "they expire"
        await asyncio.sleep(0.05)
    await a.do("start", name="t", way="put", region="m", descriptor=target)
    assert (await a.do("outcome", name="t"))["state"] == "done"
    assert (await b.do("digest", name="m"))["sha"] == pattern_sha(1, range(8), BLOCK)


@pytest.mark.parametrize("kind", ["claims", "offers"])
async def test_c25_claims_and_offers_that_nobody_meets(kind: str) -> None:
    """The other kinds of announcement: beyond the bound they are refused by name, they end by themselves, and there is
    room for somebody else all the while.
    """
    count, limits = scaled(3000, 200_000), {"waiting_max": 500, "postings_max": 500, "requests_max": 1024}
    outcomes: Counter[str] = Counter()
    async with node(**limits) as server, worker(server, config=server.config) as rude, worker(server) as good:

        def announcement(number: int) -> m.Message:
            if kind == "claims":
                return m.Claim(kind="offer", key=f"nobody-{number}", wait_s=1.0)
            return m.Post(kind="offer", key=f"nobody-{number}", body=bytes(64), lease_s=1.0, claims_max=1)

        async def some(numbers: range) -> None:
            for number in numbers:
                try:
                    await rude.ask(announcement(number), timeout=20)
                    outcomes["done"] += 1
                except KvxferError as error:
                    outcomes[error.code] += 1

        flood = asyncio.gather(*(some(range(first, count, 1000)) for first in range(1000)))
        rss, rounds = own_rss_bytes(), 0
        while not flood.done() or not rounds:
            rounds += 1
            offer = m.Post(kind="offer", key=f"good-{rounds}", lease_s=30.0, claims_max=1)
            posted = await good.ask(offer)
            claimed = await good.ask(m.Claim(kind="offer", key=f"good-{rounds}"))
            assert claimed.posting == posted.posting
            await good.ask(m.Withdraw(posting=posted.posting))
            found = server.registry.counts()
            assert found.waiting <= 500
            assert found.postings <= 501 + 1  # with the daemon's own
            await asyncio.sleep(0.02)
        await flood
        assert outcomes["too_many_pending"] > 0, outcomes
        assert set(outcomes) <= {"done", "too_many_pending", "unknown_transfer"}, outcomes
        assert own_rss_bytes() - rss <= 32 << 20
        quiet = server.registry.counts
        await until(lambda: quiet().waiting == 0 and quiet().postings == 1, 5)


def own_rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_c26_a_request_that_is_not_fetched_after_all(nodes: Cluster) -> None:
    a, b = await nodes.fresh()
    await a.do("cache", name="c", blocks=8)
    ticket = (await a.do("publish", name="p", cache="c", blocks=BLOCKS, lease_s=30))["ticket"]
    baseline = await b.holds()
    freed = await b.do("free", ticket=ticket)
    ended = await a.do("ended", name="p")
    assert ended["how"] == "released"
    assert ended["at"] - freed["at"] <= limit(0.2)
    for _ in range(2):
        await b.do("free", ticket=ticket)
    # Three calls are one consumer.
    ticket = (await a.do("publish", name="two", cache="c", blocks=BLOCKS, lease_s=1, consumers=2))["ticket"]
    began = time.monotonic()
    for _ in range(3):
        await b.do("free", ticket=ticket)
    ended = await a.do("ended", name="two")
    assert ended["how"] == "expired", "the other consumer never came: the lease frees the blocks"
    assert 1 - 0.1 <= time.monotonic() - began <= limit(2)
    await b.back_to(baseline, 1)
    assert (await a.holds())["grants"] == 0


@pytest.mark.parametrize(("count", "stuck_ms"), [(300, 2000), pytest.param(2000, 5000, marks=pytest.mark.full)])
async def test_c27_late_completions(nodes: Cluster, count: int, stuck_ms: int) -> None:
    """The transport hangs, all time out; then it goes on and completes every one of them, too late."""
    a, b = await nodes.fresh(a=slow(nodes.transport, f"stuck_ms={stuck_ms}") | {"window_ops_max": 4096})
    for side in (a, b):
        await side.do("alloc", name="m", length=64 * BLOCK)
    target = (await b.do("describe", name="m"))["descriptor"]
    before = await a.do("counters")
    found = await a.do("burst", count=count, region="m", descriptor=target, size=4096, timeout=stuck_ms / 4000)
    assert found["outcomes"] == {"timed_out": count}
    assert found["decided_s"] < limit(stuck_ms / 4000 + 1)
    assert found["settled"] == {"1": count}, "each once"
    after = await a.do("counters")
    assert after["late"] - before["late"] == count
    await a.back_to({"inflight": 0, "pinned": 0}, 2, ("inflight", "pinned"))


@pytest.mark.parametrize("rounds", [6, pytest.param(40, marks=pytest.mark.full)])
async def test_c98_window_after_receivers_gave_up(nodes: Cluster, rounds: int) -> None:
    """Pushes of many times the window whose receivers hang up: afterwards the sender holds no place in any window."""
    slowed = slow(nodes.transport, "chunk_bytes=65536,chunk_ms=5")
    a, b = await nodes.fresh(a=slowed | {"window_bytes_max": 4 * BLOCK, "inline_bytes_max": 0})
    blocks = list(range(32))
    for side in (a, b):
        await side.do("cache", name="c", blocks=len(blocks), layers=4, kv_heads=8, kv_heads_total=8, head_size=128)
        await side.do("alloc", name="m", length=4 * BLOCK)
    target = (await b.do("describe", name="m"))["descriptor"]
    given_up = 0
    for number in range(rounds):
        name = f"w{number}"
        await b.do("offer", name=name, cache="c", blocks=blocks)
        await a.do("push", name=name, to=b.node, cache="c", blocks=blocks, pause_s=None)
        await asyncio.sleep(0.01 + 0.01 * (number % 5))
        await b.do("abort", name=name)
        await b.do("ended", name=name)
        given_up += (await a.do("ended", name=name))["outcome"] == "failed"
        await a.back_to({"permits": 0, "inflight": 0}, 5, ("permits", "inflight"))
        await a.do("start", name=f"p{number}", way="put", region="m", descriptor=target, span=(0, 4 * BLOCK), timeout=5)
        assert (await a.do("outcome", name=f"p{number}"))["state"] == "done", "a put of the whole window"
    assert given_up > rounds // 2, "or the test shows nothing"

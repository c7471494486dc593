"""K03: peers restart, crash and come back: the survivor stays, what is old is told apart, nothing stays blacklisted."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvxfer.cli.ping import about_breakers
from kvxfer.config import Config
from kvxfer.doctor.network import ask_status
from tests.cases.facts import limit, pattern_sha, within
from tests.cases.harness import Cluster, Side, metric, slow

pytestmark = [pytest.mark.once, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]
BLOCK = 64 << 10
LENGTH = 8 * BLOCK


async def kill(side: Side, *, daemon: bool, worker: bool) -> None:
    """SIGKILL, and its end."""
    for process in ([side.daemon] if daemon else []) + ([side.process] if worker else []):
        process.kill()
        await process.wait()


@pytest.mark.parametrize("rounds", [3, pytest.param(20, marks=[pytest.mark.full, pytest.mark.timeout(600)])])
async def test_c16_a_peer_that_restarts_again_and_again(tcp_nodes: Cluster, rounds: int) -> None:
    a, b = await tcp_nodes.fresh(a=slow("tcp", "chunk_bytes=65536,chunk_ms=5"))
    long = 512 * BLOCK  # seconds: whatever the machine does meanwhile, it is still under way when its peer is killed
    await a.do("alloc", name="m", length=LENGTH)
    await a.do("fill", name="m", seed=1, block=BLOCK)
    await a.do("alloc", name="long", length=long)
    await a.do("fill", name="long", seed=2, block=BLOCK, count=1)
    pid, then = a.process.pid, (0, 0)
    for number in range(1, rounds + 1):
        await b.do("alloc", name="m", length=long)
        target = (await b.do("describe", name="m"))["descriptor"]
        with within(3, "the first transfer to a new peer"):
            await a.do("start", name="t", way="put", region="m", descriptor=target)
            assert (await a.do("outcome", name="t"))["state"] == "done"
            assert (await a.do("send", to=b.node))["outcomes"] == ["done"]
        assert (await b.do("digest", name="m", length=LENGTH))["sha"] == pattern_sha(1, range(8), BLOCK)
        if number == 2:
            then = (a.fds(), a.rss_bytes())
        await a.do("start", name="u", way="put", region="long", descriptor=target)
        with within(2, "the first block of the second transfer"):
            while (await b.do("digest", name="m", length=BLOCK))["sha"] != pattern_sha(2, range(1), BLOCK):
                await asyncio.sleep(0.005)
        await kill(b, daemon=True, worker=True)
        ended = await a.do("outcome", name="u")
        assert ended["error"] in ("peer_lost", "revoked", "stale_descriptor"), ended
        assert await metric(a, "kvxfer_ready") == 1
        await b.restart_daemon()
        await b.restart_worker()
    assert a.process.pid == pid
    assert a.process.returncode is None
    assert a.fds() <= then[0] * 1.05 + 2
    assert a.rss_bytes() <= then[1] * 1.05 + (2 << 20)


async def test_c17_the_descriptor_of_an_earlier_process(tcp_nodes: Cluster) -> None:
    a, b = await tcp_nodes.fresh()
    await b.do("alloc", name="m", length=BLOCK)
    await b.do("fill", name="m", seed=5, block=BLOCK)
    await a.do("cache", name="c", blocks=4)
    await b.do("cache", name="c", blocks=4)
    ticket = (await a.do("publish", name="p", cache="c", blocks=[0, 1]))["ticket"]
    old = (await b.do("lookup", name="kvxfer.ping", node=a.node))["descriptor"]
    span = (0, 4096)
    await kill(a, daemon=True, worker=False)
    await a.restart_daemon()
    with within(1, "the refusal"):
        await b.do("start", name="t", way="get", region="m", descriptor=old, span=span)
        ended = await b.do("outcome", name="t")
    assert ended["error"] == "peer_incarnation", ended
    assert ended["fields"]["expected"] == old["engine_id"] != ended["fields"]["actual"]
    with within(1, "the refusal of the ticket"):
        await b.do("pull", name="q", ticket=ticket, cache="c", blocks=[0, 1])
        refused = await b.do("ended", name="q")
    assert refused["error"] == "peer_incarnation", refused
    assert refused["fields"]["expected"] == ticket["incarnation"]
    assert (await b.do("digest", name="m"))["sha"] == pattern_sha(5, range(1), BLOCK), "untouched"
    new = (await b.do("lookup", name="kvxfer.ping", node=a.node))["descriptor"]
    await b.do("start", name="u", way="get", region="m", descriptor=new, span=span)
    assert (await b.do("outcome", name="u"))["state"] == "done"
    assert len({ticket["incarnation"], new["incarnation"]}) == 2
    assert all(len(bytes.fromhex(one)) == 16 for one in (ticket["incarnation"], new["incarnation"]))


async def test_c18_idle_connections_to_a_peer_that_restarted(tcp_nodes: Cluster) -> None:
    a, b = await tcp_nodes.fresh(a={"tcp_streams": 8}, b={"tcp_streams": 8})
    for side in (a, b):
        await side.do("alloc", name="m", length=BLOCK)
    target = (await a.do("describe", name="m"))["descriptor"]
    unconnected = (await b.do("sockets"))["sockets"]
    assert (await b.do("send", to=a.node, count=8))["outcomes"] == ["done"] * 8
    await b.do("start", name="t", way="get", region="m", descriptor=target)
    await b.do("outcome", name="t")
    assert (await b.do("sockets"))["sockets"] == unconnected + 8
    await kill(a, daemon=True, worker=True)
    killed = time.monotonic()
    while (await b.do("sockets"))["sockets"] > unconnected:
        assert time.monotonic() - killed < limit(1), "the stale ones are closed at once"
        await asyncio.sleep(0.02)
    await a.restart_daemon()
    await a.restart_worker()
    assert (await b.do("send", to=a.node, count=8))["outcomes"] == ["done"] * 8
    await a.do("alloc", name="m", length=BLOCK)
    await a.do("fill", name="m", seed=4, block=BLOCK)
    target = (await a.do("describe", name="m"))["descriptor"]
    for index in range(8):
        await b.do("start", name=f"r{index}", way="get", region="m", descriptor=target)
        assert (await b.do("outcome", name=f"r{index}"))["state"] == "done"
    assert (await b.do("digest", name="m"))["sha"] == pattern_sha(4, range(1), BLOCK)


async def test_c18_idle_connections_that_died_unseen(behind_proxies: Cluster) -> None:
    """Half open: the other end is gone, and nobody has said so. The first use finds out and goes on by itself."""
    a, b, _ = await behind_proxies.fresh()
    for side in (a, b):
        await side.do("alloc", name="m", length=BLOCK)
    target = (await a.do("describe", name="m"))["descriptor"]
    await b.do("start", name="warm", way="get", region="m", descriptor=target)
    await b.do("outcome", name="warm")
    assert (await b.do("send", to=a.node, count=1))["outcomes"] == ["done"]
    a.data.reset_all()
    a.control.reset_all()
    for _ in range(8):  # reads are repeated on a fresh connection
        assert (await b.do("lookup", name="kvxfer.ping", node=a.node))["descriptor"]
    a.control.reset_all()
    written = (await b.do("send", to=a.node, count=8))["outcomes"]
    assert written.count("done") >= 7, "of writes, at most one fails, and may be tried again"
    assert set(written) <= {"done", "peer_lost"}
    for index in range(8):
        await b.do("start", name=f"r{index}", way="get", region="m", descriptor=target)
        assert (await b.do("outcome", name=f"r{index}"))["state"] == "done"


async def test_c19_one_reset_is_forgotten(behind_proxies: Cluster) -> None:
    a, b, _ = await behind_proxies.fresh()
    for side in (a, b):
        await side.do("alloc", name="m", length=64 * BLOCK)
    await a.do("fill", name="m", seed=6, block=BLOCK)
    target = (await a.do("describe", name="m"))["descriptor"]
    rule = a.data.rule("down", "DATA", "cut", nth=2)
    await b.do("start", name="t", way="get", region="m", descriptor=target)
    ended = await b.do("outcome", name="t")
    assert rule.fired.is_set()
    assert (ended["state"], ended["error"]) == ("failed", "peer_lost")
    a.data.clear()
    await asyncio.sleep(0.1)
    await b.do("start", name="u", way="get", region="m", descriptor=target)
    assert (await b.do("outcome", name="u"))["state"] == "done"
    assert (await b.do("digest", name="m"))["sha"] == pattern_sha(6, range(64), BLOCK)


async def test_c19_the_breaker_closes_by_itself(behind_proxies: Cluster) -> None:
    a, b, _ = await behind_proxies.fresh()
    assert (await b.do("send", to=a.node))["outcomes"] == ["done"]
    a.control.refusing = True
    a.control.reset_all()
    seen = []
    try:
        while await metric(b, "kvxfer_breaker_peers", state="open") == 0:
            seen += (await b.do("send", to=a.node))["outcomes"]
            assert len(seen) < 50
            await asyncio.sleep(0.02)
        assert seen.count("peer_unreachable") >= 3, "not before the third failure in a row"
        with within(0.3, "an answer while it is open"):
            assert (await b.do("send", to=a.node))["outcomes"] == ["peer_unreachable"]
        status = await ask_status(b.node, Config(), limit(5))
        shown = about_breakers(status["breakers"], status["breakers_open"])  # what `kvxfer ping` prints
        assert "(open): " in shown or "(half_open): " in shown, shown
        assert a.node[0] in shown, shown
    finally:
        a.control.refusing = False
    healed = time.monotonic()
    while (await b.do("send", to=a.node))["outcomes"] != ["done"]:
        assert time.monotonic() - healed < limit(5), "half open within 5 s"
        await asyncio.sleep(0.05)
    assert await metric(b, "kvxfer_breaker_peers", state="open") == 0
    assert await metric(b, "kvxfer_breaker_peers", state="half_open") == 0


@pytest.mark.parametrize("cycles", [1000, pytest.param(10_000, marks=pytest.mark.full)])
async def test_c20_another_region_at_the_same_address(nodes: Cluster, cycles: int) -> None:
    a, b = await nodes.fresh()
    await b.do("alloc", name="m", length=BLOCK)
    await b.do("fill", name="m", seed=8, block=BLOCK)
    found = await a.do("reregister", length=BLOCK)
    await b.do("start", name="old", way="get", region="m", descriptor=found["old"])
    ended = await b.do("outcome", name="old")
    assert (ended["state"], ended["error"]) == ("failed", "stale_descriptor"), ended
    assert (await b.do("digest", name="m"))["sha"] == pattern_sha(8, range(1), BLOCK), "untouched"
    await b.do("start", name="new", way="get", region="m", descriptor=found["new"])
    assert (await b.do("outcome", name="new"))["state"] == "done"
    assert await b.do("digest", name="m") == await a.do("digest", name="again")
    assert found["ids"][0] != found["ids"][1]
    assert (await a.do("cycle", count=cycles))["different"] == cycles

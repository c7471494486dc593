"""K18: the registry of a node is its daemon, and nobody else's transfers depend on it.

The case book speaks of a registry for all. Here each daemon holds the postings of its own node, so the same promises
read: a daemon that is killed, stopped or started anew disturbs no transfer between engines that are connected; its
workers register again by themselves; a frozen one is given up in time, and another candidate address is used.
"""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest

import kvxfer
from examples.child_processes import daemon
from kvxfer.config import load
from tests.cases.facts import limit, within
from tests.cases.harness import Cluster, cluster
from tests.nodes import node, until, worker
from tests.support.frames import CONTROL
from tests.support.proxy import proxy

pytestmark = [pytest.mark.once, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        return int(reserved.getsockname()[1])


@pytest.mark.parametrize("transport", [pytest.param("shm", marks=pytest.mark.full), "tcp"])
async def test_c78_a_killed_daemon_disturbs_nobody_and_gets_everything_back(tmp_path: Path, transport: str) -> None:
    async with cluster(tmp_path, transport) as nodes:
        a, b = nodes.values()
        b.settings["listen"] = b.node[0]
        for side in (a, b):
            await side.do("alloc", name="r", length=1 << 20)
            await side.do("cache", name="c", blocks=8)
        await a.do("fill", name="r", seed=1, block=1024)
        descriptor = (await b.do("describe", name="r"))["descriptor"]
        await a.do("start", name="first", way="put", region="r", descriptor=descriptor)
        await a.do("outcome", name="first")
        ticket = (await b.do("publish", name="p", cache="c", blocks=[0, 1]))["ticket"]
        b.daemon.kill()
        await b.daemon.wait()
        outcomes = await a.do("puts", region="r", descriptor=descriptor, count=2000, parallel=4, size=4096)
        assert outcomes["outcomes"] == {"done": 2000}, "connected peers go on, without one failure"
        assert (await a.do("digest", name="r"))["sha"] == (await b.do("digest", name="r"))["sha"]
        await b.restart_daemon()  # empty
        with within(5, "registering again"):
            while (await a.do("connect", nodes=[b.node], parallel=1))["outcomes"] != {"done": 1}:
                await asyncio.sleep(0.05)
            await b.do("where")
            await a.do("pull", name="p", ticket=ticket, cache="c", blocks=[2, 3])
            await a.do("ended", name="p")
        # what was offered before is offered again, or a new one is: either way a flow works
        await b.do("offer", name="again", cache="c", blocks=[4, 5])
        await a.do("push", name="again", to=b.node, cache="c", blocks=[4, 5])
        assert (await a.do("ended", name="again"))["outcome"] == "done"
        # a node that is new here finds it too
        async with daemon(tmp_path / "new", name="new") as fresh:
            config = load(flags={"transports": [transport]}).config
            async with kvxfer.Client(fresh.socket, config=config) as client:
                await client.connect(b.node, timeout=limit(5))


async def test_c78_a_worker_waits_for_its_daemon_and_is_not_dead(tmp_path: Path) -> None:
    """A daemon that cannot reach a declared peer retries with growing pauses, serves, and says that it is not ready."""
    port = free_port()
    async with (
        node(reconnect_min_s=0.05) as server,
        worker(server) as asker,
    ):
        server.waits_for_peers = True
        server.preconnect([f"127.0.0.1:{port}"])
        await asyncio.sleep(0.5)
        assert server._readyz().status == 503
        assert 2 <= server.pool.connects <= 12, "it tries again, with pauses that grow"
        from kvxfer.wire import messages as m

        assert (await asker.ask(m.Echo(data=b"alive"))).data == b"alive"
        async with node(listen=f"127.0.0.1:{port}"):
            await until(lambda: server._readyz().status == 200, 6)


async def test_c79_a_frozen_daemon_is_given_up_and_another_address_is_used(tcp_nodes: Cluster, tmp_path: Path) -> None:
    a, b = await tcp_nodes.fresh()
    async with daemon(tmp_path / "frozen", name="frozen") as frozen:
        address = (await frozen.process.readline(limit(10))).split("peers ")[1].split(",")[0]
        await a.do("connect", nodes=[[address]], parallel=1)
        frozen.process.send_signal(19)
        try:
            with within(2.2, "a look-up at a frozen node"):
                answer = await a.do("connect", nodes=[[address]], parallel=1, timeout=2.0)
            assert "done" not in answer["outcomes"]
            with within(2, "the second address"):
                again = await a.do("connect", nodes=[[f"127.0.0.1:{free_port()}", b.node[0]]], parallel=1, timeout=2.0)
            assert again["outcomes"] == {"done": 1}
        finally:
            frozen.process.send_signal(18)
        with within(10, "the thawed daemon"):
            while (await a.do("connect", nodes=[[address]], parallel=1))["outcomes"] != {"done": 1}:
                await asyncio.sleep(0.1)


async def test_c79_idle_links_are_left_in_peace() -> None:
    """At the defaults: at most one probe and its answer in ten seconds; here a shorter look at a proxy's counters."""
    assert load(env={}).config.keepalive_s >= 10
    async with node(keepalive_s=1.0) as here, node(keepalive_s=1.0) as there, worker(here) as asker:
        from kvxfer.wire import messages as m

        port = int(there.addresses[0].rpartition(":")[2])
        async with proxy(("127.0.0.1", port), CONTROL) as between:
            await asker.ask(m.Echo(node=(between.endpoint,), data=b"x"))
            before, began = sum(between.frames.values()), time.monotonic()
            await asyncio.sleep(2.5)
            # each side may probe in its own time: a probe and an answer each
            assert sum(between.frames.values()) - before <= 4 * (time.monotonic() - began)

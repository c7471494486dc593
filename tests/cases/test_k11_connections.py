"""K11: connections are few, bounded, given up when others need them, and closed in peace."""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.child_processes import Process
from kvxfer.addresses import parse_address
from kvxfer.config import Config
from kvxfer.daemon.acceptor import Acceptor
from kvxfer.net.credentials import Credentials
from kvxfer.net.link import Link, LocalIdentity
from kvxfer.net.listeners import bound_address, listen_tcp
from kvxfer.wire import messages as m
from kvxfer.wire.codec import Message
from tests.cases.facts import limit, within
from tests.cases.harness import Cluster, Side
from tests.cases.scale import FULL

pytestmark = [pytest.mark.once, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]
KIB = 1 << 10


def hosts(count: int) -> list[str]:
    """Loopback addresses that all lead to whoever listens on every interface."""
    return [f"127.1.{number // 250}.{number % 250 + 1}" for number in range(count)]


def time_wait(descriptor: dict[str, Any]) -> int:
    """Connections with the engine behind a descriptor that are in TIME_WAIT."""
    ports = {int(endpoint.rpartition(":")[2]) for endpoint in descriptor["endpoints"].get("tcp", ())}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = {(row[1], row[2]) for row in rows if row[3] == "06"}  # each once: the kernel may list one twice
    return sum(any(int(address.rpartition(":")[2], 16) in ports for address in pair) for pair in found)


def cpu_s(process: Process) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def few_descriptors(process: Process, count: int) -> AsyncIterator[None]:
    before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (count, before[1]))
    try:
        yield
    finally:
        if process.returncode is None:
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)


async def pair(nodes: Cluster, length: int, **a_options: object) -> tuple[Side, Side, dict[str, Any]]:
    """A with a pattern, B on all interfaces with as much room, and B's descriptor."""
    a, b = await nodes.fresh(a=dict(a_options), b={"data_bind": "0.0.0.0"})
    for side in (a, b):
        await side.do("alloc", name="r", length=length)
    await a.do("fill", name="r", seed=1, block=KIB)
    descriptor = (await b.do("describe", name="r"))["descriptor"]
    if nodes.transport == "tcp":  # on all interfaces nothing is told by itself
        descriptor["endpoints"] = {"tcp": [b.facts["endpoints"]["tcp"].replace("0.0.0.0", "127.0.0.1")]}
    return a, b, descriptor


async def owners(b: Side, count: int) -> dict[str, Any]:
    """Arguments of `visit` and `bursts`: B under so many addresses, each with a grant of its own."""
    descriptors = (await b.do("describe_many", name="r", count=count))["descriptors"]
    port = b.facts["endpoints"]["tcp"].rpartition(":")[2]
    return {"region": "r", "descriptors": descriptors, "port": port, "hosts": hosts(count)}


async def same(a: Side, b: Side) -> None:
    assert (await a.do("digest", name="r"))["sha"] == (await b.do("digest", name="r"))["sha"]


async def test_c58_small_transfers_share_few_sockets(nodes: Cluster) -> None:
    count = 20_000 if FULL else 4_000
    a, b, descriptor = await pair(nodes, 1024 * KIB)
    waiting = time_wait(descriptor)
    answer = await a.do("puts", region="r", descriptor=descriptor, count=count, parallel=32, size=KIB)
    assert answer["outcomes"] == {"done": count}
    assert answer["sockets"] <= 8
    assert time_wait(descriptor) - waiting <= 16
    await same(a, b)


async def test_c59_owners_beyond_the_limit_of_descriptors(tcp_nodes: Cluster) -> None:
    count = 300 if FULL else 120
    a, b, _ = await pair(tcp_nodes, count * KIB, tcp_streams=1)
    room = a.fds() + (60 if FULL else 40)
    async with few_descriptors(a.process, room):
        where = await owners(b, count)
        answer = await a.do("visit", **where, parallel=20, size=KIB)
        assert answer["outcomes"] == {"done": count}
        assert answer["evicted"] >= count - 60
        await same(a, b)
        # the ones used last are still there: no new connection is needed for them
        again = await a.do("visit", **where, parallel=20, size=KIB)
        assert again["outcomes"] == {"done": count}
        before, began = cpu_s(a.process), time.monotonic()
        await asyncio.sleep(1)
        assert cpu_s(a.process) - before < 0.2 * (time.monotonic() - began), "nobody spins at the limit"


async def test_c59_connections_in_use_are_not_given_up(tcp_nodes: Cluster) -> None:
    """Pinned by transfers that run: the next one gets `resource_exhausted`, alone, and works when one has ended."""
    slow = {"transports": ["fault+tcp"], "fault_spec": "chunk_bytes=4096,chunk_ms=100"}
    a, b, _ = await pair(tcp_nodes, 64 * KIB, peers_max=2, connect_s=0.3, tcp_streams=1, **slow)
    where = await owners(b, 3)
    for number, host in enumerate(where["hosts"][:2]):
        there = {**where["descriptors"][number], "endpoints": {"tcp": [f"{host}:{where['port']}"]}}
        await a.do("start", name=f"t{number}", way="put", region="r", descriptor=there)
    await asyncio.sleep(0.1)
    third = where | {"descriptors": where["descriptors"][2:], "hosts": where["hosts"][2:]}
    refused = await a.do("visit", **third, parallel=1, size=KIB)
    assert refused["outcomes"] == {"resource_exhausted": 1}
    for number in range(2):
        assert (await a.do("outcome", name=f"t{number}"))["state"] == "done"
    works = await a.do("visit", **third, parallel=1, size=KIB)
    assert works["outcomes"] == {"done": 1}
    assert works["evicted"] == 1
    await same(a, b)


@asynccontextmanager
async def stubs(count: int) -> AsyncIterator[list[list[str]]]:
    """So many nodes that answer an echo and nothing else, each with its own identity and port."""
    config = Config.embedded(transports=("loop",))

    def on_message(link: Link, message: Message) -> None:
        if isinstance(message, m.Echo):
            link.send(m.EchoReply(rid=message.rid, data=message.data))

    async with AsyncExitStack() as stack:
        addresses = []
        for _ in range(count):
            facts = LocalIdentity(role="peer", node_id=secrets.token_hex(16), incarnation=secrets.token_hex(16))
            stub = Acceptor(
                config,
                facts,
                roles=("peer",),
                links_max=8,
                on_ready=lambda _: None,
                on_message=on_message,
                credentials=Credentials(config),
            )
            listener = listen_tcp("listen", parse_address("127.0.0.1:0"))
            addresses.append([str(bound_address(listener))])
            await stub.start(listener)
            stack.push_async_callback(stub.aclose, "over")
        yield addresses


async def test_c59_nodes_beyond_the_limit_of_the_daemon(tcp_nodes: Cluster) -> None:
    count = 300 if FULL else 120
    a, b = await tcp_nodes.fresh()
    async with stubs(count) as addresses, few_descriptors(a.daemon, a.fds(a.daemon) + 40):
        answer = await a.do("connect", nodes=addresses, parallel=20)
        assert answer["outcomes"] == {"done": count}
        assert (await a.do("connect", nodes=[b.node], parallel=1))["outcomes"] == {"done": 1}
        before, began = cpu_s(a.daemon), time.monotonic()
        await asyncio.sleep(0.5)
        assert cpu_s(a.daemon) - before < 0.2 * (time.monotonic() - began) + 0.05


async def test_c97_bursts_stay_below_the_maximum_and_idle_ones_are_closed_in_peace(tcp_nodes: Cluster) -> None:
    most = 16
    options = {"peers_max": most, "peer_idle_s": 1, "tcp_streams": 1}
    a, b, _ = await pair(tcp_nodes, 64 * KIB, **options)
    where = await owners(b, 48)
    baseline = a.fds()
    began, seed = time.monotonic(), 97
    while seed == 97 or (FULL and time.monotonic() < began + 60):
        answer = await a.do("bursts", **where, count=15, most=256, size=64 * KIB, seed=seed)
        assert set(answer["outcomes"]) == {"done"}, answer
        assert answer["sockets"] <= most
        seed += 1
    seen = [(time.monotonic(), a.fds())]
    with within(10, "closing what is idle"):
        while a.fds() > baseline + 1:
            await asyncio.sleep(0.02)
            seen.append((time.monotonic(), a.fds()))
            assert seen[-1][0] - seen[0][0] < limit(10), f"{seen[-1][1]} descriptors, {baseline} before"
    times = np.array([at for at, _ in seen])
    open_then = np.array([count for _, count in seen])
    for at, count in seen:
        later = open_then[(times >= at) & (times <= at + 1)]
        assert count - int(later.min()) <= 50, "never many at once"

"""K10: addresses and ports mean the same everywhere, and what cannot be reached is refused at the start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import quantiles

import numpy as np
import pytest

import kvxfer
from examples.child_processes import python_process
from kvxfer.addresses import format_address, parse_address
from kvxfer.config import Config
from kvxfer.errors import ConfigError, IdentityMismatch, KvxferError, NotKvxfer, PeerUnreachable, UsageError
from kvxfer.net.listeners import bound_address, listen_tcp
from kvxfer.tasks import Deadline
from kvxfer.wire.messages import Echo
from tests.cases.facts import limit
from tests.cases.harness import Cluster, cluster
from tests.cases.scale import FULL
from tests.nodes import fast, node

pytestmark = [pytest.mark.once, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]


async def test_c52_addresses_are_read_and_written_the_same() -> None:
    for text, shown in (
        ("host.example:80", "host.example:80"),
        ("10.0.0.1:80", "10.0.0.1:80"),
        ("[2001:DB8::1]:80", "[2001:db8::1]:80"),
        ("[fe80::1%eth0]:80", "[fe80::1%eth0]:80"),
    ):
        assert str(parse_address(text)) == shown
        assert parse_address(shown) == parse_address(text)
    for text in ("10.0.0.1", "::1", "[::1]", "fe80::1%eth0", "name"):
        once = str(parse_address(text, default_port=7))
        assert str(parse_address(once)) == once
    with pytest.raises(UsageError) as caught:
        parse_address("2001:db8::1:9000", default_port=7)
    assert "[2001:db8::1]:9000" in str(caught.value)
    listener = listen_tcp("listen", parse_address("[::]:0"))
    try:
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, bound_address(listener).port), timeout=5):
                pass
    finally:
        listener.close()


async def test_c52_ipv6_from_end_to_end(tmp_path: Path) -> None:
    async with cluster(tmp_path, "tcp", daemons={"listen": "[::1]:0", "http": "[::1]:0"}) as nodes:
        a, b = nodes.values()
        [address] = b.node
        assert re.fullmatch(r"\[::1\]:[0-9]+", address), "as configured, in registry and hello"
        for side in (a, b):
            await side.do("cache", name="c", blocks=8)
        await a.do("fill", name="c", seed=1, block=1024)
        await b.do("offer", name="r", cache="c", blocks=list(range(8)))
        await a.do("push", name="r", to=b.node, cache="c", blocks=list(range(8)))
        assert (await a.do("ended", name="r"))["outcome"] == "done"
        assert (await b.do("ended", name="r"))["outcome"] == "done"
        assert (await a.do("digest", name="c"))["sha"] == (await b.do("digest", name="c"))["sha"]
        descriptor = (await b.do("describe", name="c"))["descriptor"]
        assert descriptor["endpoints"]["tcp"][0].startswith("[::1]:")
        async with python_process(["-m", "kvxfer", "ping", address, "--count", "1"], name="ping") as ping:
            assert address in await ping.readline(limit(20)), "and in what tools print"


async def test_c53_peers_dial_what_is_advertised(tmp_path: Path) -> None:
    """B stands behind two proxies on another address and advertises that one: both planes go there and nowhere else."""
    async with cluster(tmp_path, "tcp", proxied="b") as nodes:
        a, b = nodes.values()
        assert all(text.startswith("127.0.0.3:") for text in b.node)
        for side in (a, b):
            await side.do("cache", name="c", blocks=8)
        await a.do("fill", name="c", seed=2, block=1024)
        await b.do("offer", name="r", cache="c", blocks=list(range(8)))
        await a.do("push", name="r", to=b.node, cache="c", blocks=list(range(8)))
        assert (await a.do("ended", name="r"))["outcome"] == "done"
        assert (await a.do("digest", name="c"))["sha"] == (await b.do("digest", name="c"))["sha"]
        assert b.control.live > 0
        assert b.data.live > 0
        assert b.data.passed_bytes >= (await b.do("cache", name="other", blocks=8))["bytes"], "every byte came this way"


@pytest.mark.parametrize("text", ["0.0.0.0:1", "[::]:1", "::", "0.0.0.0"])
async def test_c53_a_wildcard_is_never_published(text: str) -> None:
    for key in ("advertise", "data_advertise"):
        with pytest.raises(ConfigError):
            Config.embedded(**{key: (text,)})
    host = "0.0.0.0" if "." in text else "::"
    with pytest.raises(ConfigError, match="advertise"):
        Config.embedded(listen=format_address(host, 0), secret="s" * 32).advertised(
            parse_address(format_address(host, 9))
        )


async def serve(directory: Path, *words: str) -> tuple[int, str, float]:
    """(exit status, what it said, seconds) of a daemon that does not start."""
    os.chmod(directory, 0o700)
    began = time.monotonic()
    common = ["--http", "", "--transports", "loop", "--socket-dir", str(directory)]
    async with python_process(["-m", "kvxfer", "serve", *common, *words], name="serve") as process:
        status = await process.wait(limit(20))
        await asyncio.sleep(0.05)
        return status, process.tail(), time.monotonic() - began


async def test_c53_loopback_with_a_peer_elsewhere_does_not_start(tmp_path: Path) -> None:
    status, said, _ = await serve(tmp_path, "--listen", "127.0.0.1:0", "--peer", "192.0.2.7:17800")
    assert status == 2
    assert "192.0.2.7:17800 cannot reach" in said
    assert "127.0.0.1:" in said
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".sock")]


async def test_c54_sixteen_at_once_have_ports_of_their_own() -> None:
    seen: set[str] = set()
    for _ in range(10 if FULL else 2):
        async with AsyncExitStack() as stack:
            servers = await asyncio.gather(*(stack.enter_async_context(node()) for _ in range(16)))
            addresses = [server.addresses[0] for server in servers]
            assert len(set(addresses)) == 16
            assert len({server.node_id for server in servers}) == 16
            found = await asyncio.gather(*(servers[0].pool.get([one], "", deadline()) for one in addresses[1:]))
            assert {link.peer.node_id for link in found} == {one.node_id for one in servers[1:]}, "as published"
            seen.update(addresses)
    assert seen


def deadline() -> Deadline:
    return Deadline.after(limit(10))


async def test_c54_a_port_that_is_taken_names_its_owner(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        began = time.monotonic()
        async with python_process(["-m", "kvxfer", "serve", "--help"], name="help") as helped:
            await helped.wait(limit(20))
        python_s = time.monotonic() - began  # how long it takes here to load the program at all
        status, said, took_s = await serve(tmp_path, "--listen", f"127.0.0.1:{port}")
    assert status == 2
    assert took_s <= python_s + limit(2)
    assert f":{port}" in said
    assert f"pid {os.getpid()}" in said
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".sock")], "no half-started daemon"


@asynccontextmanager
async def impostor(answer: bytes) -> AsyncIterator[str]:
    """Accepts, and says this."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(answer)
            while await reader.read(1 << 16):
                pass
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield "{}:{}".format(*server.sockets[0].getsockname())
    finally:
        server.close()


async def echoes(server: object, address: str, count: int) -> float:
    """The 99th percentile of round trips through the pool."""
    took = []
    for _ in range(count):
        began = time.perf_counter()
        link = await server.pool.get([address], "", deadline())  # type: ignore[attr-defined]
        await link.request(Echo(data=b"x"), timeout=limit(5))
        took.append(time.perf_counter() - began)
    return quantiles(took, n=100)[98]


async def test_c55_an_impostor_costs_only_those_who_ask_for_it(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        node(**fast(connect_s=1.0, handshake_s=1.0)) as server,
        node() as good,
        impostor(b"") as silent,
        impostor(b"HTTP/1.1 200 OK\r\n\r\n") as web,
    ):
        stop, quiet, failures = asyncio.Event(), asyncio.Event(), []

        async def bother(address: str) -> None:
            while not stop.is_set():
                if quiet.is_set():
                    await asyncio.sleep(0.02)
                    continue
                began = time.monotonic()
                with contextlib.suppress(KvxferError):
                    try:
                        await server.pool.get([address], "", deadline())
                    except KvxferError as error:
                        failures.append((error, time.monotonic() - began))
                await asyncio.sleep(0.02)

        botherers = [asyncio.ensure_future(bother(address)) for address in (silent, web) for _ in range(3)]
        began = time.monotonic()
        alone, beside = [], []
        while time.monotonic() - began < 2.5 or (np.median(beside) > 2 * np.median(alone) and len(beside) < 40):
            for found, still in ((beside, False), (alone, True)):  # by turns: other work here meets both
                (quiet.set if still else quiet.clear)()
                found.append(await echoes(server, good.addresses[0], 100))
        stop.set()
        await asyncio.gather(*botherers)
        assert np.median(beside) <= 2 * np.median(alone), (beside, alone)
        assert {type(error) for error, _ in failures} <= {NotKvxfer, PeerUnreachable}
        assert any(isinstance(error, NotKvxfer) for error, _ in failures)
        assert max(took for _, took in failures) <= limit(2.5)
        assert len([error for error, _ in failures if "in a row" in str(error)]) > 0, "the breaker opens"
        lines = [record for record in caplog.records if silent in record.getMessage()]
        assert len(lines) <= time.monotonic() - began + 2
        with pytest.raises(IdentityMismatch):
            await server.pool.get([good.addresses[0]], "ab" * 16, deadline())
        assert (await server.pool.get([good.addresses[0]], good.node_id, deadline())).peer.node_id == good.node_id


async def test_c57_a_node_reaches_itself(nodes: Cluster) -> None:
    a, _ = await nodes.fresh()
    for name, size in (("s", 1 << 20), ("t", 1 << 20)):
        await a.do("alloc", name=name, length=size)
    await a.do("fill", name="s", seed=3, block=1024)
    descriptor = (await a.do("describe", name="t"))["descriptor"]
    await a.do("start", name="x", way="put", region="s", descriptor=descriptor)
    outcome = await a.do("outcome", name="x")
    assert (outcome["state"], outcome["bytes"]) == ("done", 1 << 20)
    assert (await a.do("digest", name="s"))["sha"] == (await a.do("digest", name="t"))["sha"]
    for side in ("c", "d"):
        await a.do("cache", name=side, blocks=8)
    await a.do("fill", name="c", seed=4, block=1024)
    await a.do("offer", name="r", cache="d", blocks=list(range(8)))
    await a.do("push", name="r", to=a.node, cache="c", blocks=list(range(8)))
    assert (await a.do("ended", name="r"))["outcome"] == "done"
    assert (await a.do("digest", name="c"))["sha"] == (await a.do("digest", name="d"))["sha"]


@pytest.mark.parametrize("shift", [-4096, -1, 1, 4096, 300_000])
async def test_c57_overlapping_moves_like_memmove(shift: int) -> None:
    async with kvxfer.local() as client:
        region = await client.alloc(1 << 20)
        region.array[:] = np.random.default_rng(5).integers(0, 256, 1 << 20, dtype=np.uint8)
        first, size = 8192, 500_000
        expected = region.array.copy()
        expected[first + shift : first + shift + size] = region.array[first : first + size]
        await client.put(region[first : first + size], region.descriptor("w"), target_offset=first + shift)
        assert np.array_equal(region.array, expected)

"""K22: signals are obeyed at once, what runs may end, and everybody is told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from examples.child_processes import Process, python_process
from tests.cases.facts import limit, within
from tests.cases.harness import ROOT, Cluster, cluster, slow

pytestmark = [pytest.mark.once, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]
BLOCKS = list(range(16))


@asynccontextmanager
async def serve(directory: Path, *words: str, **options: object) -> AsyncIterator[tuple[Process, dict[str, Any]]]:
    """A daemon on any port, and what it says about itself."""
    os.makedirs(directory, 0o700, exist_ok=True)
    settings = {"socket_dir": directory, "listen": "127.0.0.1:0", "http": "", "transports": "loop", **options}
    environment = {f"KVXFER_{key.upper()}": str(value) for key, value in settings.items()}
    command = ["-m", "kvxfer", "serve", "--json", *words]
    async with python_process(command, name="serve", environment=environment) as process:
        yield process, json.loads(await process.readline(limit(20)))


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
async def test_c88_an_idle_daemon_and_one_that_dials_a_black_hole(tmp_path: Path, number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hole:
        peer = "{}:{}".format(*hole.getsockname())
        async with (
            serve(tmp_path / "idle", drain_s=0) as (idle, _),
            serve(
                tmp_path / "dials", "--peer", peer, "--peer", "192.0.2.1:9", drain_s=0, handshake_s=60, **WAY_BACK
            ) as (
                dials,
                _,
            ),
        ):
            await asyncio.sleep(0.2)
            with within(3, "the end"):
                for process in (idle, dials):
                    process.send_signal(number)
                assert [await process.wait(limit(3)) for process in (idle, dials)] == [0, 0]


WAY_BACK = {"advertise": "192.0.2.2"}  # an address that a peer elsewhere could dial


async def test_c88_in_the_middle_of_a_transfer_with_and_without_its_own_daemon(tcp_nodes: Cluster) -> None:
    a, b = await tcp_nodes.fresh(a=slow(tcp_nodes.transport, "chunk_bytes=4096,chunk_ms=100"))
    for side in (a, b):
        await side.do("cache", name="c", blocks=16)
    await b.do("offer", name="r", cache="c", blocks=BLOCKS)
    await a.do("push", name="r", to=b.node, cache="c", blocks=BLOCKS)
    await asyncio.sleep(0.3)
    a.daemon.send_signal(signal.SIGTERM)
    with within(3, "a daemon whose drain is off (0.2 s) in the middle of a transfer"):
        assert await a.daemon.wait(limit(3)) == 0
    for side in (a, b):
        ended = await side.do("ended", name="r")
        assert (ended["error"], ended["fields"]["by"]) == ("cancelled", "draining"), ended


CLIENT = """
import asyncio, sys
import kvxfer
async def main():
    async with kvxfer.Client(sys.argv[1]) as client:
        print("waits", flush=True)
        if sys.argv[2] == "recv":
            await client.recv("never", timeout=600)
        slow = {"fault_spec": "chunk_bytes=4096,chunk_ms=100", "transports": ("fault+shm",)}
        async with kvxfer.local(**slow) as one, kvxfer.local(transports=("shm",)) as other:
            there = await other.alloc(1 << 20)
            await one.put(await one.alloc(1 << 20), there.descriptor("w"), timeout=600)
try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize(("what", "frozen"), [("recv", False), ("recv", True), ("put", False)])
async def test_c88_ctrl_c_in_a_client_that_waits(tmp_path: Path, what: str, frozen: bool) -> None:
    async with serve(tmp_path / "d", drain_s=0) as (process, facts):
        command = ["-c", CLIENT, facts["socket"], what]
        async with python_process(command, name="client", environment={"PYTHONPATH": ROOT}) as client:
            assert await client.readline(limit(20)) == "waits\n"
            await asyncio.sleep(0.2)
            if frozen:
                process.send_signal(signal.SIGSTOP)
            client.send_signal(signal.SIGINT)
            with within(2 if what == "put" else 1, "KeyboardInterrupt"):  # what runs is cancelled first: `cancel_s`
                assert await client.readline(limit(5)) == "interrupted\n"
            with within(2, "the end of the process"):
                assert await client.wait(limit(3)) == 0
            process.send_signal(signal.SIGCONT)


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as page:
            return page.status, page.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def test_c88_the_second_signal_ends_at_once(tmp_path: Path) -> None:
    async with cluster(tmp_path, "tcp", daemons={"drain_s": "60"}, special={"a": SLOW}) as nodes:
        a, b = nodes.values()
        await flow(a, b, "r")
        a.daemon.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        assert a.daemon.returncode is None, "it waits for what runs"
        a.daemon.send_signal(signal.SIGTERM)
        with within(1, "the second signal"):
            assert await a.daemon.wait(limit(2)) == 128 + signal.SIGTERM
        b.daemon.kill()


SLOW = slow("tcp", "chunk_bytes=1024,chunk_ms=25")  # 96 KiB: 2.4 s


async def flow(a: Any, b: Any, name: str) -> None:
    """Begin a push that takes its time."""
    for side in (a, b):
        await side.do("cache", name=name, blocks=16, layers=3)
    await a.do("fill", name=name, seed=22, block=1024)
    await b.do("offer", name=name, cache=name, blocks=BLOCKS)
    await a.do("push", name=name, to=b.node, cache=name, blocks=BLOCKS)
    await asyncio.sleep(0.3)


def postings(http: str) -> str:
    [line] = [line for line in fetch(f"{http}/metrics")[1].splitlines() if line.startswith("kvxfer_postings ")]
    return line


@pytest.mark.parametrize("grace", ["5", "0.3"])
async def test_c89_a_daemon_that_drains(tmp_path: Path, grace: str) -> None:
    """A flow of about two and a half seconds: within a grace of 5 s it ends by itself, exact; at the end of a short one
    it is cancelled on both sides.
    """
    settings = {"drain_s": grace, "http": "127.0.0.1:0"}
    async with cluster(tmp_path, "tcp", daemons=settings, special={"a": SLOW}) as nodes:
        a, b = nodes.values()
        http = (await b.daemon.readline(limit(5))).split("metrics ")[1].split("/metrics")[0]
        peer_http = (await a.daemon.readline(limit(5))).split("metrics ")[1].split("/metrics")[0]
        await flow(a, b, "r")
        await b.do("cache", name="new", blocks=16)
        before = await asyncio.to_thread(postings, http)
        await b.do("offer", name="unclaimed", cache="new", blocks=BLOCKS[:4])
        async with asyncio.timeout(limit(2)):
            while await asyncio.to_thread(postings, http) == before:
                await asyncio.sleep(0.01)
        b.daemon.send_signal(signal.SIGTERM)
        began = time.monotonic()
        if grace == "5":
            await asyncio.sleep(0.05)
            assert await asyncio.to_thread(fetch, f"{http}/readyz") == (503, "draining\n"), "at once"
            await a.do("push", name="unclaimed", to=b.node, cache="r", blocks=BLOCKS[:4])
            refused = await a.do("ended", name="unclaimed")
            assert refused["error"] in ("peer_draining", "unknown_transfer"), refused
            assert refused["took_s"] <= limit(1)
        assert await b.daemon.wait(limit(float(grace) + 3)) == 0
        assert time.monotonic() - began <= limit(float(grace) + 1)
        for side in (a, b):
            ended = await side.do("ended", name="r")
            if grace == "5":
                assert ended["outcome"] == "done", (side.name, ended)
            else:
                assert (ended["error"], ended["fields"]["by"]) == ("cancelled", "draining"), (side.name, ended)
        if grace == "5":
            assert (await a.do("digest", name="r"))["sha"] == (await b.do("digest", name="r"))["sha"]
        assert (await b.holds())["pinned"] == 4, "what nobody claimed is offered again when its daemon is back"
        await b.do("abort", name="unclaimed")
        await b.back_to({"pinned": 0, "quarantined": 0}, 1, ("pinned", "quarantined"))
        _, metrics = await asyncio.to_thread(fetch, f"{peer_http}/metrics")
        assert 'kvxfer_links_ended_total{reason="peer_draining",role="peer"} 1.0' in metrics, "it said goodbye"
        assert 'kvxfer_links{kind="peer_out"} 0.0' in metrics

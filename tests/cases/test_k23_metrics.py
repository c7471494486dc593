"""K23: what ended, and why, can be counted; what failed says what it was."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from examples.remote_worker import WorkerFailed
from kvxfer.cli.logs import Throttle
from tests.cases.facts import limit
from tests.cases.harness import Cluster, Side, cluster, slow
from tests.cases.test_k11_connections import pair, stubs

pytestmark = [pytest.mark.once, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]
BLOCKS = list(range(16))
SLOW = {"transports": ["fault+tcp"], "fault_spec": "chunk_bytes=1024,chunk_ms=20"}


def samples(url: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """A scrape, by the official parser: (name, labels) -> value."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as page:
        text = page.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def reasons(found: dict[tuple[str, tuple[tuple[str, str], ...]], float]) -> dict[str, int]:
    """How many claims ended for each reason."""
    ended: Counter[str] = Counter()
    for (name, labels), value in found.items():
        if name == "kvxfer_claims_ended_total":
            ended[dict(labels)["reason"]] += int(value)
    return dict(ended)


async def push(a: Side, b: Side, name: str, **how: Any) -> None:
    await b.do("offer", name=name, cache="c", blocks=BLOCKS)
    await a.do("push", name=name, to=b.node, cache="c", blocks=BLOCKS, **how)


async def both(a: Side, b: Side, name: str) -> list[dict[str, Any]]:
    return [await a.do("ended", name=name), await b.do("ended", name=name)]


async def caches(a: Side, b: Side, **options: Any) -> None:
    await asyncio.gather(a.reopen(**options), b.reopen())
    for side in (a, b):
        await side.do("cache", name="c", blocks=16)


async def test_c90_every_outcome_is_counted_once_by_its_reason(tmp_path: Path) -> None:
    async with cluster(tmp_path, "tcp", daemons={"http": "127.0.0.1:0"}) as nodes:
        a, b = nodes.values()
        url, a_url = [
            (await side.daemon.readline(limit(5))).split("metrics ")[1].split("/metrics")[0] for side in (b, a)
        ]
        await caches(a, b)
        for number in range(10):
            await push(a, b, f"done{number}")
            assert {one["outcome"] for one in await both(a, b, f"done{number}")} == {"done"}
        size = 16 * 2 * 3 * 1024
        moved = await asyncio.to_thread(samples, a_url)
        key = ("kvxfer_transfer_bytes_total", (("direction", "put"), ("transport", "tcp")))
        assert moved[key] == 10 * size, "bytes that really moved"
        await caches(a, b, **SLOW)
        for number in range(3):
            await push(a, b, f"late{number}", timeout=0.2)
            await both(a, b, f"late{number}")
        for number in range(2):
            await push(a, b, f"gone{number}")
            await asyncio.sleep(0.1)
            await a.do("abort", name=f"gone{number}")
            await both(a, b, f"gone{number}")
        ticket = (await b.do("publish", name="lease", cache="c", blocks=BLOCKS, lease_s=0.4))["ticket"]
        await a.do("pull", name="lease", ticket=ticket, cache="c", blocks=BLOCKS)
        await both(a, b, "lease")
        await push(a, b, "lost")
        await asyncio.sleep(0.1)
        a.process.kill()
        await a.process.wait()
        await b.do("ended", name="lost")
        flip = {"transports": ["fault+tcp"], "fault_spec": "flip_rate=1", "integrity": True}
        await asyncio.gather(a.reopen(**flip), b.reopen(integrity=True))
        for side in (a, b):
            await side.do("cache", name="c", blocks=16)
        await push(a, b, "flipped")
        assert (await both(a, b, "flipped"))[0]["error"] == "integrity"
        await asyncio.sleep(0.2)
        found = await asyncio.to_thread(samples, url)
        ended = reasons(found)
        assert ended == {
            "done": 10,
            "timeout": 3,
            "cancelled": 2,
            "lease_expired": 1,
            "integrity": 1,
            "peer_lost": 1,
        }
        counts = [value for (name, _), value in found.items() if name == "kvxfer_claim_seconds_count"]
        assert sum(counts) == 18
        async with stubs(50) as addresses:
            await a.do("connect", nodes=addresses, parallel=10)
            crowded = await asyncio.to_thread(samples, a_url)
        assert len(crowded) <= len(found) + 20, "series do not grow with peers"
        plain = [key for key in crowded if not key[0].endswith("_bucket")]
        assert len(plain) <= 200, len(plain)
        values = {value for (_, labels) in crowded for _, value in labels}
        assert not [value for value in values if re.search(r"done\d|late\d|[0-9a-f]{16}", value)], "no ids in labels"


async def test_c92_eight_causes_have_eight_codes_and_say_what_is_known(tcp_nodes: Cluster) -> None:
    faults = "chunk_bytes=1024,chunk_ms=50"
    options = slow("tcp", faults) | {"peers_max": 2, "connect_s": 0.3, "integrity": True}
    a, b, descriptor = await pair(tcp_nodes, 1 << 16, **options)
    port = descriptor["endpoints"]["tcp"][0].rpartition(":")[2]
    causes: dict[str, dict[str, Any]] = {}

    async def put(name: str, described: dict[str, Any], timeout: float = 5.0, **how: Any) -> None:
        try:
            await a.do("start", name=name, way="put", region="r", descriptor=described, timeout=timeout, **how)
            causes[name] = await a.do("outcome", name=name)
        except WorkerFailed as failed:
            causes[name] = {"error": failed.code, "message": str(failed), "peer": descriptor["node_id"], "op": 0}

    await put("refused", {**descriptor, "engine_id": "1" * 32, "endpoints": {"tcp": ["127.0.0.1:1"]}})
    await put("timeout", descriptor, timeout=0.2)
    await put("out of range", descriptor, remote_offset=1)
    await put("wrong key", {**descriptor, "key": "0" * len(descriptor["key"])})
    await put("not registered", {**descriptor, "grant": descriptor["grant"] + 99})
    await put("restarted", {**descriptor, "engine_id": "2" * 32})
    others = (await b.do("describe_many", name="r", count=3))["descriptors"]
    for number in (7, 8):
        there = {**others[number - 7], "endpoints": {"tcp": [f"127.0.0.{number}:{port}"]}}
        await a.do("start", name=f"busy{number}", way="put", region="r", descriptor=there)
    await asyncio.sleep(0.2)
    with contextlib.suppress(KeyError):
        await put("exhausted", {**others[2], "endpoints": {"tcp": [f"127.0.0.9:{port}"]}})
    b.process.kill()
    causes["reset"] = await a.do("outcome", name="busy7")
    codes = {name: cause.get("error") for name, cause in causes.items()}
    assert len(set(codes.values())) == len(causes) == 8, codes
    assert None not in codes.values(), codes
    for name, cause in causes.items():
        assert cause["peer"] or "127.0.0." in cause["message"], (name, cause)
        if name != "out of range":  # refused before there was a transfer
            assert cause["op"], (name, cause)
            assert cause["fields"]["attempt"] >= 1, (name, cause)
            assert cause["fields"]["elapsed_s"] >= 0, (name, cause)
        if name in ("timeout", "reset", "wrong key"):
            assert "127.0.0." in cause["fields"].get("address", cause["message"]), (name, cause)
    assert "refused" in causes["refused"]["message"].lower()
    assert "127.0.0.1:1" in causes["refused"]["message"]


async def test_c92_equal_lines_are_told_once_and_counted() -> None:
    now = [0.0]
    throttle = Throttle(lambda: now[0])
    lines = []
    for number in range(1000):
        now[0] = number / 1000
        record = logging.LogRecord("kvxfer.pool", logging.WARNING, "", 0, "cannot connect to %s", ("x",), None)
        if throttle.filter(record):
            lines.append(record.getMessage())
    assert 1 <= len(lines) <= 10
    now[0] = 2.5
    last = logging.LogRecord("kvxfer.pool", logging.WARNING, "", 0, "cannot connect to %s", ("x",), None)
    assert throttle.filter(last)
    assert f"and {1000 - len(lines)} more like it" in last.getMessage()

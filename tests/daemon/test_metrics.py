"""What a scrape shows: it parses, counts what happened, never goes backwards, and stays small."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvxfer import server as server_module
from kvxfer.daemon import metrics as metrics_module
from kvxfer.daemon.metrics import (
    TOTALS,
    TRANSPORT_LABELS_MAX,
    Distribution,
    EngineCounters,
    Metrics,
    Sample,
    known_code,
)
from kvxfer.dataplane.plane import WorkRequest
from kvxfer.errors import ProtocolError
from kvxfer.native.engine import OpKind
from kvxfer.native.types import CORE_FIELDS, Counters, TransportCounters
from kvxfer.server import Server
from kvxfer.wire import messages as m
from tests.conftest import slack
from tests.nodes import node, until, worker

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def row(name: str = "shm", **values: int) -> TransportCounters:
    return TransportCounters(
        name=name, **(dict.fromkeys(TOTALS, 0) | {"peers_connected": 0, "peers_accepted": 0} | values)
    )


def counters(*rows: TransportCounters, **gauges: int) -> Counters:
    zero = dict.fromkeys(CORE_FIELDS, 0)
    return Counters(**(zero | gauges), transports=rows)


def parse(text: bytes) -> Series:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def value(series: Series, name: str, **labels: str) -> float:
    return series[name, frozenset(labels.items())]


async def scrape(server: Server, path: str = "/metrics") -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection(*server.http_address.split(":"))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


# -- engines ------------------------------------------------------------------------------------------------------


def test_totals_sum_over_engines_and_survive_their_end() -> None:
    engines = EngineCounters()
    first = counters(row(put_bytes=10), row("tcp", get_bytes=5), regions=2, spills=3)
    engines.add("a", lambda: first)
    engines.add("b", lambda: counters(row(put_bytes=1), regions=1, spills=1))
    totals, gauges = engines.snapshot()
    assert (totals["shm"]["put_bytes"], totals["tcp"]["get_bytes"], gauges["regions"]) == (11, 5, 3)
    engines.remove("a")
    totals, gauges = engines.snapshot()
    assert (totals["shm"]["put_bytes"], totals["tcp"]["get_bytes"], gauges["regions"]) == (11, 5, 1)
    engines.remove("a")
    assert engines.snapshot()[0] == totals
    assert engines.core_count("spills") == 4


def test_last_numbers_are_read_when_an_engine_leaves() -> None:
    engines = EngineCounters()
    numbers = [counters(row(put_bytes=10))]
    engines.add("a", lambda: numbers[0])
    engines.snapshot()
    numbers[0] = counters(row(put_bytes=25))
    engines.remove("a")
    assert engines.snapshot()[0]["shm"]["put_bytes"] == 25


def test_unreadable_counters_keep_their_last_numbers() -> None:
    engines = EngineCounters()
    failing = False

    def read() -> Counters:
        if failing:
            raise ProtocolError("half written")
        return counters(row(put_bytes=10))

    engines.add("a", read)
    engines.snapshot()
    failing = True
    assert engines.snapshot()[0]["shm"]["put_bytes"] == 10
    engines.remove("a")
    assert engines.snapshot()[0]["shm"]["put_bytes"] == 10
    assert engines.unreadable == 2


def test_file_outside_the_daemons_directory_is_not_read(tmp_path: Path) -> None:
    engines = EngineCounters()
    engines.add_file("a", "/etc/passwd", tmp_path)
    engines.add_file("b", str(tmp_path / ".." / "c.counters"), tmp_path)
    engines.add_file("c", "", tmp_path)
    assert engines.snapshot()[0] == {}
    assert engines.unreadable == 0


@pytest.mark.parametrize("what", ["fifo", "directory", "symlink", "huge", "text", "missing", "no path"])
def test_file_that_is_no_counters_file_costs_nothing_but_a_count(tmp_path: Path, what: str) -> None:
    path = tmp_path / "c-0.counters"
    match what:
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "symlink":
            path.symlink_to("/dev/zero")
        case "huge":
            with path.open("wb") as file:
                file.truncate(1 << 40)
        case "text":
            path.write_text("root:x:0:0:" * 1000)
    engines = EngineCounters()
    engines.add_file("a", str(path) + ("\0" if what == "no path" else ""), tmp_path)
    started, descriptors = time.monotonic(), len(os.listdir("/proc/self/fd"))
    assert engines.snapshot()[0] == {}
    engines.remove("a")
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert time.monotonic() - started < 0.5 * slack()
    assert engines.unreadable == (0 if what == "no path" else 2)


def test_a_file_counts_once_however_many_links_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, one after the other (a worker whose link was lost), and when another process has taken the name."""
    now = [counters(row(put_bytes=10), spills=2, pid=7)]
    monkeypatch.setattr(metrics_module, "read_counters", lambda path: now[0])
    engines, path = EngineCounters(), str(tmp_path / "c-0.counters")

    def seen() -> tuple[int, int, int]:
        totals, gauges = engines.snapshot()
        return totals["shm"]["put_bytes"], engines.core_count("spills"), gauges["regions"]

    engines.add_file("a", path, tmp_path)
    assert seen() == (10, 2, 0)
    for other in range(3):
        engines.add_file(other, str(tmp_path / "." / "c-0.counters"), tmp_path)
        assert seen() == (10, 2, 0)
    engines.remove("a")
    now[0] = counters(row(put_bytes=15), spills=3, pid=7)
    assert seen() == (15, 3, 0)
    for other in range(3):
        engines.remove(other)
    assert seen() == (15, 3, 0)
    for again in range(3):
        engines.add_file(again, path, tmp_path)
        now[0] = counters(row(put_bytes=20 + again), spills=4, pid=7, regions=1)
        assert seen() == (20 + again, 4, 1)
        engines.remove(again)
        assert seen() == (20 + again, 4, 0)
    now[0] = counters(row(put_bytes=1), pid=8)
    engines.add_file("new", path, tmp_path)
    assert seen() == (23, 4, 0)


def test_names_that_files_make_up_do_not_add_series_for_ever() -> None:
    engines = EngineCounters()
    for number in range(100):
        engines.add(number, lambda name=f"made-up-{number}": counters(row(name, put_ops=1)))
        engines.remove(number)
    totals, _ = engines.snapshot()
    assert len(totals) == TRANSPORT_LABELS_MAX + 1
    assert sum(fields["put_ops"] for fields in totals.values()) == 100


def test_outcomes_add_up() -> None:
    engines = EngineCounters()
    engines.add("a", lambda: counters(row(put_ops=10, get_ops=5, failed_ops=2, cancelled_ops=1)))
    series = parse(Metrics(engines, lambda: iter(())).render())
    outcomes = {
        name: value(series, "kvxfer_transfers_total", transport="shm", outcome=name)
        for name in ("done", "failed", "cancelled")
    }
    assert outcomes == {"done": 12, "failed": 2, "cancelled": 1}


def test_samples_of_one_name_are_one_family() -> None:
    sample = Sample(name="kvxfer_x", help="X.", value=1, labels={"kind": "a"}, counter=True)
    samples = [sample, replace(sample, labels={"kind": "b"}, value=2)]
    text = Metrics(EngineCounters(), lambda: iter(samples)).render()
    assert text.count(b"# TYPE kvxfer_x_total counter") == 1
    assert value(parse(text), "kvxfer_x_total", kind="b") == 2


def test_distribution_is_a_histogram() -> None:
    sample = Distribution(
        name="kvxfer_s", help="S.", bounds_s=(0.1, 1.0), counts=(1, 2, 3), sum_s=7.5, labels={"kind": "a"}
    )
    series = parse(Metrics(EngineCounters(), lambda: iter([sample, replace(sample, labels={"kind": "b"})])).render())
    assert [value(series, "kvxfer_s_bucket", kind="a", le=le) for le in ("0.1", "1.0", "+Inf")] == [1, 3, 6]
    assert value(series, "kvxfer_s_count", kind="b") == 6
    assert value(series, "kvxfer_s_sum", kind="b") == 7.5


def test_labels_are_bounded() -> None:
    assert known_code("peer_lost") == "peer_lost"
    assert known_code("anything else") == "other"


# -- a daemon -----------------------------------------------------------------------------------------------------


async def test_scrape_of_a_daemon() -> None:
    async with node(http="127.0.0.1:0") as server, worker(server) as owner, worker(server) as claimant:
        await owner.ask(m.Post(kind="offer", key="r", lease_s=30.0, claims_max=1))
        await claimant.ask(m.Claim(kind="offer", key="r"))
        region = server.engine.alloc(4096)
        target = server.plane.memory.export(region, 0, 4096, 2, None)
        source = server.engine.alloc(4096)
        np.frombuffer(server.engine.buffer(source), dtype=np.uint8)[:] = 1
        part = WorkRequest(kind=OpKind.PUT, region=source.id, descriptor=target, span=(0, 0, 4096))
        await server.plane.start([part], timeout=5, peer="test")
        status, body = await scrape(server)
        series = parse(body)
        assert status == 200
        assert value(series, "kvxfer_workers") == 2
        assert value(series, "kvxfer_claims") == 1
        assert value(series, "kvxfer_ready") == 1
        assert value(series, "kvxfer_links", kind="worker") == 2
        assert value(series, "kvxfer_transfer_bytes_total", transport="loop", direction="put") == 4096
        assert value(series, "kvxfer_copied_bytes_total", transport="loop") == 4096
        assert all(name.startswith("kvxfer_") for name, _ in series)
        assert len(series) < 200


async def test_series_do_not_grow_with_workers_and_requests() -> None:
    async with node(http="127.0.0.1:0") as server:
        sizes = []
        for round_number in range(2):
            for number in range(5):
                async with worker(server, f"worker-{round_number}-{number}") as one:
                    await one.ask(m.Post(kind="offer", key=f"key-{number}", lease_s=30.0, claims_max=1))
            await until(lambda: server.registry.counts().workers == 1)
            sizes.append(len(parse((await scrape(server))[1])))
        assert sizes[0] == sizes[1]


async def test_probes_follow_the_life_of_a_daemon() -> None:
    async with node(http="127.0.0.1:0", drain_s=0) as server:
        assert await scrape(server, "/healthz") == (200, b"ok\n")
        assert await scrape(server, "/readyz") == (200, b"ready\n")
        await server.drain()
        assert await scrape(server, "/readyz") == (503, b"draining\n")
        assert await scrape(server, "/healthz") == (200, b"ok\n")
        assert value(parse((await scrape(server))[1]), "kvxfer_ready") == 0


@pytest.mark.parametrize("ending", ["abort", "goodbye"])
async def test_ended_links_are_counted_by_reason(ending: str) -> None:
    async with node(http="127.0.0.1:0") as server, worker(server) as one:
        if ending == "abort":
            one.link.abort()
        else:
            await one.link.aclose("bye")
        await until(lambda: server.registry.counts().workers == 1)
        series = parse((await scrape(server))[1])
        reason = {"abort": "peer_lost", "goodbye": "peer_draining"}[ending]
        assert value(series, "kvxfer_links_ended_total", role="worker", reason=reason) == 1


async def test_a_part_that_cannot_be_told_leaves_out_nothing_but_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Server) -> list[Sample]:
        raise ZeroDivisionError

    async with node() as server:
        whole = server._scrape().body.decode()
        assert "kvxfer_metrics_missing 0.0" in whole
        broken.__name__ = "_links"
        monkeypatch.setattr(server_module, "_links", broken)
        server.engines.add("odd", lambda: 1 // 0)  # type: ignore[arg-type, return-value]
        page = server._scrape().body.decode()
        server.engines.remove("odd")
    assert "kvxfer_metrics_missing 1.0" in page
    assert "kvxfer_counters_unreadable_total 1.0" in page
    for name in ("kvxfer_ready", "kvxfer_claims", "kvxfer_inflight", "kvxfer_build_info"):
        assert f"# HELP {name}" in page

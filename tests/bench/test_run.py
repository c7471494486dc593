"""The instrument end to end, small: two processes per transport, receivers that verify, files that come out."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvxfer.bench.histogram import Histogram
from kvxfer.bench.measure import due, schedule, verify
from kvxfer.bench.pair import connected
from kvxfer.bench.rows import loads
from kvxfer.bench.run import BenchPlan, Run
from kvxfer.bench.work import QUICK, TINY, Segments
from kvxfer.cli import main
from kvxfer.errors import IntegrityError, UsageError


@pytest.mark.once
def test_a_tiny_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page, base = tmp_path / "rows.json", tmp_path / "page.html", tmp_path / "base.json"
    files = ["--json", str(out), "--html", str(page), "--save-baseline", str(base)]
    assert main(["bench", "--tiny", "--rounds", "1", "--peers", "2", *files]) == 0
    rows = loads(out.read_text())
    assert base.read_text() == out.read_text()
    measured = {(row.workload, row.transport) for row in rows if row.peer == "kvxfer" and row.median >= 0}
    for workload in ("W1", "W2", "W3", "W3b", "W4", "W5", "W6", "W2u", "W3u", "setup", "submit", "idle"):
        assert {(workload, "shm"), (workload, "tcp")} <= measured, workload
    assert {row.peer for row in rows} > {"kvxfer", "ref memfd+NT copy"}
    ElementTree.fromstring(page.read_text().removeprefix("<!doctype html>\n"))
    shown = capsys.readouterr()
    assert "x reference" in shown.out
    weighed = {(row.workload, row.metric) for row in rows if row.workload.startswith(("peers/", "idle/"))}
    assert weighed >= {("peers/2", "bytes"), ("peers/2", "put_bytes"), ("peers/2", "connect_ms"), ("idle/2", "cores")}
    assert "bench: " in shown.err

    stored = json.loads(out.read_text())
    for one in stored:
        if one["unit"] == "ratio" and one["metric"].endswith("GBps"):
            one["median"] *= 1000  # one round on a busy machine may be several times off
    base.write_text(json.dumps(stored))
    words = ["bench", "--tiny", "--rounds", "1", "--workloads", "w2", "--transports", "shm", "--check", str(base)]
    assert main([*words, "--tolerance", "2"]) == 1
    assert "REGRESSION" in capsys.readouterr().out


async def test_a_wrong_byte_fails_loudly() -> None:
    async with connected("shm", TINY, {}, user=False) as pair:
        await pair.prepare(pair.pool, "put")
        await verify(pair, "W2", "put")
        genuine = pair.pool.parts

        async def damaging(direction: str, segments: Segments, *, at_once: int) -> None:
            await genuine(direction, segments, at_once=at_once)
            pair.pool.array[9] ^= 1  # what we say we sent is no longer what arrived

        pair.pool.parts = damaging  # type: ignore[method-assign,assignment]
        with pytest.raises(IntegrityError, match="W3"):
            await verify(pair, "W3", "put")


async def test_an_open_loop_charges_a_stall_to_everybody_who_was_due() -> None:
    histogram = Histogram()
    calls = 0

    async def once() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            await asyncio.sleep(0.05)

    await due(once, 40, 1_000_000, histogram)
    assert histogram.count == 40
    assert histogram.percentile(50) > 20e6  # a closed loop would have recorded one slow transfer and 39 quick ones


def test_streams_take_turns() -> None:
    assert [list(schedule(100, number, 2, 3, 10.0)) for number in (0, 1)] == [[100, 120, 140], [110, 130, 150]]


async def test_too_little_memory_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.bench.machine.memory_bytes", lambda name="": 1 << 20)
    plan = BenchPlan(workloads=("W2",), transports=("shm",), rounds=1, sizes=QUICK)
    with pytest.raises(UsageError, match="not enough memory"):
        await Run(plan).execute()


@pytest.mark.once
async def test_without_a_compiler_the_references_are_named_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    result = await Run(BenchPlan(workloads=("W2",), transports=("shm",), rounds=1, sizes=TINY)).execute()
    assert "compiler" in result.missing["references"]
    assert {row.peer for row in result.rows} == {"kvxfer"}

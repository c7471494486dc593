"""Goals are judged by the ratios of the run; what was not measured is neither met nor missed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.goals import BEST, CONSTANT, GOALS, GROWTH, HEADERS, Goal, as_rows, judge, lines, text
from kvxfer.bench.ratios import of_round
from kvxfer.bench.rows import Row, dumps, loads, quantity_of, single

ROUND = [
    single("kvxfer", "shm", "W3b", "put_GBps", 12.0),
    single("ref memfd+NT copy", "shm", "W3b", "put_GBps", 10.0),
    single("ref memfd+NT copy, 2 threads", "shm", "W3b", "put_GBps", 13.0),
    single("UCX C shm put", "shm", "W3b", "put_GBps", 8.0),
    single("NIXL default(cma) WRITE", "shm", "W3b", "put_GBps", 2.0),
    single("kvxfer", "tcp", "W1", "get_4k_p50_us", 60.0),
    single("ref C tcp, per-socket reno", "tcp", "W1", "put_4k_p50_us", 50.0),
    single("py socket, reno", "tcp", "W1", "get_4k_p50_us", 10.0),
]


def goal(**changes: object) -> Goal:
    base = Goal(workload="W3b", transport="shm", metric="put_GBps", beside=BEST, factor=1.4)
    return replace(base, **changes)  # type: ignore[arg-type]


def judged(one: Goal, rows: list[Row] = ROUND) -> tuple[Any, ...]:
    [found] = judge([*rows, *of_round(rows)], [one])
    return found.state, None if found.row is None else found.row.median, found.beside, found.limit


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (goal(), ("met", 1.5, "UCX C shm put", "")),
        (goal(factor=1.6), ("missed", 1.5, "UCX C shm put", "")),  # two threads would reach 1.62
        (goal(factor=3.0), ("missed", 1.5, "UCX C shm put", "1.62 x")),
        (goal(beside=("NIXL ",), factor=7.0), ("missed", 6.0, "NIXL default(cma) WRITE", "6.5 x")),
        (goal(beside=("ref memfd+NT copy",), factor=1.2), ("met", 1.2, "ref memfd+NT copy", "")),
        (goal(beside=("ref memfd+NT copy, 2 threads",), factor=1.0), ("missed", 12 / 13, "2 threads", "")),
        (goal(beside=("ucxx ",)), ("not measured", None, "", "")),
        (goal(metric="get_GBps"), ("not measured", None, "", "")),
    ],
)
def test_beside_whom(one: Goal, expected: tuple[str, float | None, str, str]) -> None:
    state, value, beside, limit = judged(one)
    assert (state, value) == (expected[0], pytest.approx(expected[1]))
    assert beside.endswith(expected[2])
    assert (expected[3] in limit) if expected[3] else limit == ""


def test_lower_is_better_for_latencies_and_sockets_are_no_rivals() -> None:
    one = goal(workload="W1", transport="tcp", metric="get_4k_p50_us", beside=("ref C tcp",), factor=1.15)
    assert judged(one)[:2] == ("missed", pytest.approx(1.2))
    assert judged(replace(one, factor=1.3))[0] == "met"
    assert judged(replace(one, beside=BEST))[0] == "not measured"


def test_constants() -> None:
    rows = [
        single("kvxfer", "shm", "submit", "put_ms", 4.0),
        single("kvxfer", "shm", "peers/1", "bytes", 9000.0),
        single("kvxfer", "shm", "peers/64", "bytes", 100.0),
        single("kvxfer", "shm", "idle/8", "cores", 0.5),
    ]
    assert judged(goal(workload="submit", metric="put_ms", beside=CONSTANT, factor=5.0), rows)[:2] == ("met", 4.0)
    assert judged(goal(workload="submit", metric="put_ms", beside=CONSTANT, factor=3.0), rows)[:2] == ("missed", 4.0)
    assert judged(goal(workload="peers", metric="bytes", beside=CONSTANT, factor=200), rows)[:2] == ("met", 100.0)
    assert judged(goal(workload="idle/64", metric="cores", beside=CONSTANT, factor=0.01), rows)[0] == "not measured"


@pytest.mark.parametrize(("last", "state"), [(160.0, "met"), (260.0, "missed")])
def test_growth_is_per_item(last: float, state: str) -> None:
    one = goal(workload="descriptors", metric="put_ms", beside=GROWTH, factor=1.5)
    small = [single("kvxfer", "shm", "descriptors/16", "put_ms", 9.0), single("kvxfer", "shm", "submit", "put_ms", 1.0)]
    rows = [*small, single("kvxfer", "shm", "descriptors/65536", "put_ms", 10.0)]
    assert judged(one, rows)[0] == "not measured"  # of those that count, there is one
    rows.append(single("kvxfer", "shm", "descriptors/1048576", "put_ms", last))
    assert judged(one, rows)[:2] == (state, pytest.approx(last / 160))


def test_growth_of_what_is_per_item_already() -> None:
    one = goal(workload="peers", metric="connect_ms", beside=GROWTH, factor=1.5)
    rows = [
        single("kvxfer", "shm", f"peers/{count}", "connect_ms", ms) for count, ms in ((1, 9.0), (4, 4.0), (64, 5.0))
    ]
    assert judged(one, rows)[:2] == ("met", 1.25)


def test_every_goal_can_be_measured_and_is_written() -> None:
    for one in GOALS:
        assert quantity_of(one.metric)
        assert one.factor > 0
    assert len({(one.workload, one.transport, one.metric, one.beside) for one in GOALS}) == len(GOALS)
    verdicts = judge([*ROUND, *of_round(ROUND)])
    shown = text(verdicts)
    assert "not measured" in shown
    assert "the limit: ref memfd+NT copy, 2 threads itself reaches 1.62 x" in shown
    assert all(len(line) == len(HEADERS) for line in lines(verdicts))
    rows = as_rows(verdicts)
    assert loads(dumps(rows)) == rows
    assert ("goal >= 3 x best rival", "missed") in {(row.peer, row.unit) for row in rows}

"""The judgement over a stored baseline, and the table whose ratios it uses."""

from __future__ import annotations

import pytest

from kvxfer.bench.check import judge, ratios, report
from kvxfer.bench.ratios import of_round
from kvxfer.bench.rows import Row, single
from kvxfer.errors import UsageError

NT, C = "ref memfd+NT copy", "ref C tcp, per-socket reno"


def run(rate: float, spent: float = 0.1, tail: float = 50.0, scale: float = 1.0) -> list[Row]:
    rows = measured(rate * scale, 10.0 * scale, spent, tail)
    return [*rows, *of_round(rows)]


def measured(rate: float, plain: float, spent: float, tail: float) -> list[Row]:
    return [
        single("kvxfer", "shm", "W2", "put_GBps", rate),
        single(NT, "shm", "W2", "put_GBps", plain),
        single(NT + ", 2 threads", "shm", "W2", "put_GBps", plain * 2),
        single("kvxfer", "shm", "W5", "put_cpu_s_per_GiB", spent),
        single(NT, "shm", "W5", "put_cpu_s_per_GiB", 0.1),
        single("kvxfer", "tcp", "W1", "get_4k_p50_us", 60.0),
        single("kvxfer", "tcp", "W1", "get_4k_p99_us", tail),
        single(C, "tcp", "W1", "put_4k_p50_us", 50.0),
        single(C, "tcp", "W1", "put_4k_p99_us", 50.0),
    ]


def regressions(now: list[Row], before: list[Row], tolerance: float = 0.25) -> list[str]:
    verdicts = judge(now, before, ("shm", "tcp"), ("W1", "W2"))
    return [one.metric for one in verdicts if one.is_regression(tolerance)]


def test_ratios_are_to_the_yardstick_and_leave_tails_out() -> None:
    assert ratios(run(9.0)) == {
        ("shm", "W2", "put_GBps"): pytest.approx(0.9),
        ("shm", "W5", "put_cpu_s_per_GiB"): pytest.approx(1.0),
        ("tcp", "W1", "get_4k_p50_us"): pytest.approx(1.2),
    }


def test_a_machine_of_half_the_speed_is_no_regression() -> None:
    assert regressions(run(9.0, scale=0.5), run(9.0)) == []


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (run(9.0), []),
        (run(7.5), []),
        (run(7.0), ["put_GBps"]),
        (run(90.0), []),
        (run(9.0, spent=0.13), ["put_cpu_s_per_GiB"]),
        (run(9.0, spent=0.01), []),
        (run(9.0, tail=5000.0), []),
        ([row for row in run(9.0) if row.workload != "W2"], ["put_GBps"]),
        ([row for row in run(9.0) if row.peer == "kvxfer"], ["put_GBps", "put_cpu_s_per_GiB", "get_4k_p50_us"]),
    ],
)
def test_regressions(now: list[Row], expected: list[str]) -> None:
    assert sorted(regressions(now, run(9.0))) == sorted(expected)


def test_only_what_was_asked_for_is_judged() -> None:
    found = judge(run(1.0), run(9.0), ("tcp",), ("W1", "W2"))
    assert [one.transport for one in found] == ["tcp"]
    with pytest.raises(UsageError):
        judge(run(1.0), run(9.0), ("tcp",), ("W3",))


def test_the_report_names_the_worst_first() -> None:
    text = report(judge(run(3.0), run(9.0), ("shm",), ("W2",)), 0.25).splitlines()
    assert "REGRESSION" in text[1]
    assert "put_GBps" in text[1]
    assert text[2].endswith("ok")

"""Regressions: ratios of ours to the physical reference of the same run, against those of a stored baseline.

Rates of two runs cannot be compared (other machine, other neighbours), their ratios to the same plain copy can. A ratio
that is worse than the baseline's by more than the tolerance is a regression; so is one that disappeared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.bench.ratios import compared
from kvxfer.bench.rows import Row, better_of
from kvxfer.bench.table import aligned, number
from kvxfer.errors import UsageError

NOISY = ("p90_us", "p99_us", "max_us", "p99_ms", "p50_times", "p99_times", "open_p50_us", "open_p50_ms")
"""Tails say more about the neighbours than about us: shown, not judged."""


@dataclass(frozen=True, slots=True)
class RatioVerdict:
    """One ratio then and now; ``change`` is how much worse it is (0.1: a tenth), negative when it is better."""

    transport: str
    workload: str
    metric: str
    before: float
    now: float | None
    change: float

    def is_regression(self, tolerance: float) -> bool:
        """Worse than allowed, or gone."""
        return self.now is None or self.change > tolerance


def ratios(rows: Sequence[Row]) -> dict[tuple[str, str, str], float]:
    """Ours to the reference by (transport, workload, metric)."""
    return {
        (one.row.transport, one.row.workload, one.row.metric): one.reference.median
        for one in compared(rows)
        if one.reference is not None and one.reference.median > 0 and not one.row.metric.endswith(NOISY)
    }


def judge(
    rows: Sequence[Row], baseline: Sequence[Row], transports: Sequence[str], workloads: Sequence[str]
) -> list[RatioVerdict]:
    """Every ratio of the baseline that this run was asked to measure. Raises `UsageError` when there is none."""
    now = ratios(rows)
    measured = {*workloads, *(["W5"] if "W2" in workloads else [])}
    found = []
    for key, before in ratios(baseline).items():
        transport, workload, metric = key
        if transport not in transports or workload not in measured:
            continue
        value = now.get(key)
        worse = 0.0
        if value is not None:
            worse = before / value - 1 if better_of(metric) == "higher" else value / before - 1
        found.append(RatioVerdict(transport, workload, metric, before, value, worse))
    if not found:
        raise UsageError(
            "nothing of the baseline was measured in this run",
            hint="a baseline is made with --save-baseline on a machine with a C compiler; measure the same workloads",
        )
    return found


def report(verdicts: Sequence[RatioVerdict], tolerance: float) -> str:
    """The comparison as text, worst first."""
    lines = [
        (
            one.transport,
            one.workload,
            one.metric,
            number(one.before),
            "missing" if one.now is None else number(one.now),
            "-" if one.now is None else f"{-one.change:+.0%}",
            "REGRESSION" if one.is_regression(tolerance) else "ok",
        )
        for one in sorted(verdicts, key=lambda one: (one.now is not None, -one.change))
    ]
    headers = ("transport", "workload", "metric", "x reference then", "now", "change", "")
    return aligned(headers, lines, 3)

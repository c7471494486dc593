"""The result as text: one line per measurement of ours, with ratios to the physical reference and to the best rival."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvxfer.bench.rows import OURS, WORKLOADS, Row, better_of, quantity_of
from kvxfer.bench.run import Result

REFERENCE = "ref "
HEADERS = ("workload", "transport", "metric", "median", "low", "high", "unit", "n", "x reference", "x best rival")
YARDSTICKS = ("ref memfd+NT copy", "ref C tcp", "ref process_vm", "ref memfd+memcpy")
"""What a ratio is taken to: the first of them that has the same measurement."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One of our rows beside others of the same work; ratios are ours / theirs, 0.0 when there is none."""

    row: Row
    reference: Row | None
    rival: Row | None

    @property
    def to_reference(self) -> float | None:
        """Ours over the reference."""
        return ratio(self.row, self.reference)

    @property
    def to_rival(self) -> float | None:
        """Ours over the best rival."""
        return ratio(self.row, self.rival)


def ratio(ours: Row, theirs: Row | None) -> float | None:
    """Ours divided by theirs."""
    return None if theirs is None or not theirs.median else ours.median / theirs.median


def compared(rows: Sequence[Row]) -> list[Compared]:
    """Every row of ours with its yardstick and the best rival on the same transport."""
    found = []
    for row in rows:
        if row.peer == OURS:
            there = [one for one in rows if one.transport == row.transport and one != row]
            same = [one for one in there if one.workload == row.workload]
            # Whose memory it is makes no difference to a socket: only the pool's reference is measured.
            same += [one for one in there if one.workload == row.workload.removesuffix("u")]
            rivals = [one for one in same if one.metric == row.metric and not _is_ours_or_reference(one)]
            best = max if better_of(row.metric) == "higher" else min
            best_rival = best(rivals, key=lambda one: one.median) if rivals else None
            found.append(Compared(row, _yardstick(row, same), best_rival))
    return found


def _is_ours_or_reference(row: Row) -> bool:
    return row.peer == OURS or row.peer.startswith(REFERENCE)


def _yardstick(row: Row, same: Sequence[Row]) -> Row | None:
    # Over a socket a get is the same work as a put, and only that is measured.
    metrics = (row.metric, row.metric.replace("get_", "put_", 1))

    def rank(one: Row) -> tuple[bool, int, int]:
        return one.workload != row.workload, metrics.index(one.metric), _yardstick_rank(one)

    fitting = [one for one in same if one.metric in metrics and _yardstick_rank(one) < len(YARDSTICKS)]
    return min(fitting, key=rank, default=None)


def _yardstick_rank(row: Row) -> int:
    names = (row.peer, row.peer.partition(", per-socket")[0])
    return next((index for index, name in enumerate(YARDSTICKS) if name in names), len(YARDSTICKS))


def number(value: float) -> str:
    """Three digits that matter."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def aligned(headers: Sequence[str], lines: Iterable[Sequence[str]], left: int) -> str:
    """Columns as wide as their widest cell; the first ``left`` start on the left, the others end on the right."""
    table = [list(headers), *(list(line) for line in lines)]
    widths = [max(len(line[index]) for line in table) for index in range(len(headers))]

    def cell(index: int) -> Callable[[str], str]:
        return lambda text: text.ljust(widths[index]) if index < left else text.rjust(widths[index])

    return "\n".join("  ".join(cell(index)(text) for index, text in enumerate(line)).rstrip() for line in table)


def facts(result: Result) -> str:
    """Machine, rounds, and what is missing."""
    lines = [f"{name}: {value}" for name, value in result.machine.items()]
    lines.append(f"interleaved rounds: {result.rounds}, {result.seconds:.0f} s; every request verified by its receiver")
    lines += [f"missing: {name}: {why}" for name, why in result.missing.items()]
    return "\n".join(lines)


def text(result: Result) -> str:
    """The whole report: ours beside the yardsticks, then every other peer; curves and tails are in page and JSON."""
    order = {name: index for index, name in enumerate(WORKLOADS)}
    rows = sorted(result.rows, key=lambda row: order.get(row.workload, len(order)))
    shown = [row for row in rows if "/" not in row.workload and not _is_detail(row)]
    lines = []
    for one in compared(shown):
        row = one.row
        spread = [number(value) for value in (row.median, row.low, row.high)]
        ratios = ["-" if value is None else f"{value:.2f}" for value in (one.to_reference, one.to_rival)]
        if one.rival is not None:
            ratios[1] += f" ({one.rival.peer})"
        lines.append((row.workload, row.transport, row.metric, *spread, row.unit, str(row.n), *ratios))
    others = [
        (row.workload, row.transport, row.metric, row.peer, number(row.median), number(row.low), number(row.high))
        for row in shown
        if row.peer != OURS
    ]
    report = [facts(result), aligned(HEADERS, lines, 3)]
    if others:
        report.append(aligned(("workload", "transport", "metric", "peer", "median", "low", "high"), others, 4))
    return "\n\n".join(report)


def _is_detail(row: Row) -> bool:
    """The same measurement in other words."""
    quantity = quantity_of(row.metric)
    return quantity in ("p90_us", "max_us") or (quantity == "ms" and row.workload.startswith("W"))

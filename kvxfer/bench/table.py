"""The result as text: one line per measurement of ours, with ratios to the physical reference and to the best rival."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvxfer.bench.ratios import compared, is_ratio
from kvxfer.bench.rows import OURS, WORKLOADS, Row, quantity_of
from kvxfer.bench.run import Result

HEADERS = ("workload", "transport", "metric", "median", "low", "high", "unit", "n", "x reference", "x best rival")


def number(value: float) -> str:
    """A number for a table, with three significant digits."""
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
        ratios = (one.reference_text, one.rival_text)
        lines.append((row.workload, row.transport, row.metric, *spread, row.unit, str(row.n), *ratios))
    others = [
        (row.workload, row.transport, row.metric, row.peer, number(row.median), number(row.low), number(row.high))
        for row in shown
        if row.peer != OURS and not is_ratio(row)
    ]
    report = [facts(result), aligned(HEADERS, lines, 3)]
    if others:
        report.append(aligned(("workload", "transport", "metric", "peer", "median", "low", "high"), others, 4))
    return "\n\n".join(report)


def _is_detail(row: Row) -> bool:
    """The same measurement in other words."""
    quantity = quantity_of(row.metric)
    return quantity in ("p90_us", "max_us") or (quantity == "ms" and row.workload.startswith("W"))

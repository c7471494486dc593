"""The result as one page that needs nothing else: no network, no script; light or dark as the reader prefers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from kvxfer.bench.ratios import Compared, compared
from kvxfer.bench.rows import OURS, WORKLOADS, Row
from kvxfer.bench.run import Result
from kvxfer.bench.svg import SERIES_MAX, Axis, Points, bar_chart, line_chart
from kvxfer.bench.table import number

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --soft: #d8dee4; --dim: #57606a;
  --s0: #0969da; --s1: #bc4c00; --s2: #1a7f37; --s3: #8250df; --s4: #bf3989; --s5: #57606a;
  --s6: #9a6700; --s7: #0550ae; --s8: #a40e26; --s9: #116329; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --soft: #30363d; --dim: #9198a1;
  --s0: #58a6ff; --s1: #f0883e; --s2: #3fb950; --s3: #bc8cff; --s4: #ff7bc5; --s5: #9198a1;
  --s6: #d29922; --s7: #a5d6ff; --s8: #ff7b72; --s9: #7ee787; } }
body { margin: 2rem auto; max-width: 82rem; padding: 0 1rem; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; }
figure { margin: 0; } figcaption { font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 32rem), 1fr)); gap: 2rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); font: 11px system-ui, sans-serif; }
.grid { stroke: var(--soft); } .line { fill: none; stroke-width: 2; } .note { color: var(--dim); margin: 0; }
.s1, .s4, .s7 { stroke-dasharray: 7 3; } .s3, .s6, .s9 { stroke-dasharray: 2 3; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .15rem .7rem; text-align: right; border-bottom: 1px solid var(--soft); white-space: nowrap; }
.text { text-align: left; }
"""
STYLE += "".join(
    f".line.s{index} {{ stroke: var(--s{index}); }} .bar.s{index}, .dot.s{index} {{ fill: var(--s{index}); }}\n"
    for index in range(SERIES_MAX)
)


def size(value: float) -> str:
    """Bytes in binary units."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{value / scale:g} {unit}"
    return f"{value:g} B"


def share(value: float) -> str:
    """A part of all, as per cent."""
    return f"{value * 100:g} %"


def curve(rows: Sequence[Row], workload: str, metric: str, transport: str) -> Points:
    """The points of a workload with a parameter, in order."""
    prefix = workload + "/"
    return sorted(
        (float(row.workload.removeprefix(prefix)), row.median)
        for row in rows
        if row.workload.startswith(prefix) and (row.metric, row.transport, row.peer) == (metric, transport, OURS)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One more table for the page, such as goals beside what was measured; the columns from ``text`` on are numbers."""

    title: str
    headers: Sequence[str]
    lines: Sequence[Sequence[str]]
    text: int


def page(result: Result, judged: Judged | None = None) -> str:
    """The whole document, with another table when the run was judged by somebody."""
    rows = result.rows
    transports = list(dict.fromkeys(row.transport for row in rows if row.peer == OURS))
    charts = [
        *(_latencies(result, name) for name in transports),
        *(_sizes(rows, name) for name in transports),
        _scattered(rows, transports),
        *(_cpu(rows, name) for name in transports),
        _descriptors(rows, transports),
        _peers(rows, transports),
        _weights(rows, transports),
    ]
    figures = "\n".join(
        f'<figure><figcaption>{escape(title)}</figcaption><p class="note">{escape(note)}</p>{chart}</figure>'
        for title, note, chart in charts
    )
    facts = "".join(
        f'<tr><td class="text">{escape(name)}</td><td class="text">{escape(value)}</td></tr>'
        for name, value in [
            *result.machine.items(),
            ("interleaved rounds", f"{result.rounds} in {result.seconds:.0f} s"),
            *((f"missing: {name}", why) for name, why in result.missing.items()),
        ]
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"/><meta name="viewport" content="width=device-width"/>
<title>kvxfer bench</title><style>{STYLE}</style></head><body>
<h1>kvxfer bench</h1>
<p>Medians of interleaved rounds; every request was verified by its receiver. On a shared machine only ratios within
this page mean anything.</p>
<div class="wide"><table>{facts}</table></div>
{_judged(judged)}<h2>Plots</h2><div class="charts">{figures}</div>
<h2>Measurements beside the physical work</h2>{_compared_table(compared(rows))}
<h2>All rows</h2>{_all_rows(rows)}
<h2>Workloads</h2><ul>{"".join(f"<li>{name}: {escape(what)}</li>" for name, what in WORKLOADS.items())}</ul>
</body></html>
"""


Chart = tuple[str, str, str]


def _latencies(result: Result, transport: str) -> Chart:
    title = f"Latency of one awaited transfer, {transport}"
    series = []
    for what in ("put 4k", "put 4k open", "get 4k", "put 64k", "put 64k open", "get 64k"):
        histogram = result.histograms.get((transport, what))
        if histogram is not None and histogram.count:
            points = [(value / 1e3, 1 - part) for value, part in histogram.points() if part < 1]
            series.append((what, points))
    note = "Share of transfers that took longer. Open: counted from when the transfer was due."
    x, y = Axis("microseconds", log=True), Axis("share slower", log=True, show=share)
    return title, note, line_chart(title, x, y, series)


def _sizes(rows: Sequence[Row], transport: str) -> Chart:
    title = f"Rate against size, {transport}"
    series = [
        (f"{name}, {direction}", curve(rows, workload, f"{direction}_GBps", transport))
        for workload, name in (("contiguous", "one piece of this size"), ("blocks", "scattered blocks of this size"))
        for direction in ("put", "get")
    ]
    note = "One awaited transfer: a single piece, or one request of many scattered blocks."
    return title, note, line_chart(title, Axis("bytes", log=True, base=4, show=size), Axis("GB/s"), series)


def _scattered(rows: Sequence[Row], transports: Sequence[str]) -> Chart:
    title = "Contiguous and scattered"
    groups = [
        (
            f"{transport} {direction}",
            [
                (workload, row.median)
                for workload in ("W2", "W3", "W3b")
                for row in rows
                if row.key == (OURS, transport, workload, f"{direction}_GBps")
            ],
        )
        for transport in transports
        for direction in ("put", "get")
    ]
    note = "W2 one piece, W3 blocks of 32 KiB, W3b blocks of 4 KiB; each one request."
    return title, note, bar_chart(title, Axis("GB/s"), groups)


def _cpu(rows: Sequence[Row], transport: str) -> Chart:
    title = f"CPU per GiB, {transport}"
    groups = [
        (
            direction,
            [
                (row.peer, row.median)
                for row in rows
                if (row.transport, row.workload, row.unit) == (transport, "W5", "s/GiB")
                and row.metric.startswith(direction)
            ],
        )
        for direction in ("put", "get")
    ]
    note = "CPU seconds of both processes together, in W2. Lower is better."
    return title, note, bar_chart(title, Axis("s / GiB"), groups)


def _descriptors(rows: Sequence[Row], transports: Sequence[str]) -> Chart:
    title = "Cost against the number of descriptors"
    series = [(name, curve(rows, "descriptors", "put_ms", name)) for name in transports]
    note = "One transfer of that many blocks of 64 bytes. A straight line with slope one is linear."
    x = Axis("descriptors", log=True, base=4)
    return title, note, line_chart(title, x, Axis("milliseconds", log=True), series)


def _peers(rows: Sequence[Row], transports: Sequence[str]) -> Chart:
    title = "Cost against the number of connected peers"
    series = [(f"{name}: 4 KiB put", curve(rows, "peers", "put_4k_p50_us", name)) for name in transports]
    series += [
        (f"{name}: connecting, per peer", [(x, y * 1e3) for x, y in curve(rows, "peers", "connect_ms", name)])
        for name in transports
    ]
    note = "Each peer is an engine of its own; they take turns."
    return title, note, line_chart(title, Axis("peers", log=True, base=2), Axis("microseconds", log=True), series)


def _weights(rows: Sequence[Row], transports: Sequence[str]) -> Chart:
    title = "Memory of the target per connected peer"
    series = [(name, [(x, y / 1024) for x, y in curve(rows, "peers", "bytes", name)]) for name in transports]
    note = "Anonymous memory of its process, divided by the number of peers."
    return title, note, line_chart(title, Axis("peers", log=True, base=2), Axis("KiB"), series)


def _judged(one: Judged | None) -> str:
    return f"<h2>{escape(one.title)}</h2>{_table(one.headers, one.lines, one.text)}" if one is not None else ""


def _compared_table(found: Sequence[Compared]) -> str:
    heads = ("workload", "transport", "metric", "median", "low", "high", "unit", "n", "x reference", "x best rival")
    lines = []
    for one in found:
        row = one.row
        if "/" in row.workload:
            continue
        ratios = (one.reference_text, one.rival_text)
        spread = [number(value) for value in (row.median, row.low, row.high)]
        lines.append([row.workload, row.transport, row.metric, *spread, row.unit, str(row.n), *ratios])
    return _table(heads, lines, 3)


def _all_rows(rows: Sequence[Row]) -> str:
    heads = ("peer", "transport", "workload", "metric", "median", "low", "high", "unit", "n")
    lines = [
        [
            *(row.peer, row.transport, row.workload, row.metric),
            *(number(value) for value in (row.median, row.low, row.high)),
            *(row.unit, str(row.n)),
        ]
        for row in rows
    ]
    return _table(heads, lines, 4)


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]], left: int) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        marks = [" class='text'" if index < left else "" for index in range(len(cells))]
        return "".join(f"<{tag}{mark}>{escape(cell)}</{tag}>" for mark, cell in zip(marks, cells, strict=True))

    body = "".join(f"<tr>{row(line, 'td')}</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{row(heads, "th")}</tr>{body}</table></div>'

"""The goals as data, and whether a run met them.

The idea: a goal is one number of ours beside one of somebody else's (the best rival with the same measurement, a named
peer, a reference), or beside a constant. It is judged by the ratio rows of the run, which were made round by round, so
a busy moment meets both. A goal is *met*, *missed* or *not measured*; for a missed one the verdict also says when the
physical reference misses it too: then no software on this machine can meet it that way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvxfer.bench.ratios import OVER, PLAIN_SOCKETS, REFERENCE, is_ratio
from kvxfer.bench.rows import OURS, Row, better_of
from kvxfer.bench.table import aligned, number

State = Literal["met", "missed", "not measured"]
BEST = "best rival"
CONSTANT = "constant"
GROWTH = "proportional cost"
GOALS_PEERS = 64
HEADERS = ("workload", "transport", "metric", "measured", "goal", "beside", "verdict", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """``metric`` of ours, at least or at most (as the metric is better) ``factor`` times what ``beside`` has.

    ``beside`` is `BEST`, the beginnings of names of peers (the hardest of them counts), `CONSTANT` (``factor`` is the
    limit itself) or `GROWTH` (cost of the largest ``workload/N`` divided by that of a smaller one, per item).
    """

    workload: str
    transport: str
    metric: str
    beside: str | tuple[str, ...]
    factor: float

    @property
    def text(self) -> str:
        """The condition in words."""
        sign = ">=" if better_of(self.metric) == "higher" else "<="
        if self.beside == CONSTANT:
            return f"{sign} {number(self.factor)}"
        name = self.beside if isinstance(self.beside, str) else " or ".join(self.beside)
        return f"{sign} {self.factor:g} x {name}"

    def holds(self, value: float) -> bool:
        """Whether a ratio (or, for a constant, the number itself) satisfies it."""
        return value >= self.factor if better_of(self.metric) == "higher" else value <= self.factor


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a goal: the ratio (or number) with its spread, and beside whom."""

    goal: Goal
    state: State
    row: Row | None = None
    beside: str = ""
    limit: str = ""


def _both(workload: str, transport: str, quantity: str, beside: str | tuple[str, ...], factor: float) -> list[Goal]:
    return [
        Goal(workload=workload, transport=transport, metric=f"{way}_{quantity}", beside=beside, factor=factor)
        for way in ("put", "get")
    ]


def _one(workload: str, transport: str, metric: str, beside: str | tuple[str, ...], factor: float) -> Goal:
    return Goal(workload=workload, transport=transport, metric=metric, beside=beside, factor=factor)


NIXL, UCXX = ("NIXL ",), ("ucxx ",)
NT, NT_TWO = ("ref memfd+NT copy",), ("ref memfd+NT copy, 2 threads",)
SOCKET = ("ref C tcp",)

GOALS: tuple[Goal, ...] = (
    *_both("W1", "shm", "4k_p50_us", NIXL, 1.0),
    _one("W1", "shm", "put_4k_p50_us", UCXX, 0.1),
    *_both("W1", "tcp", "4k_p50_us", SOCKET, 1.15),
    *_both("W2", "shm", "GBps", NT, 0.95),
    *_both("W2", "shm", "GBps", NT_TWO, 0.9),
    *_both("W2", "shm", "GBps", BEST, 1.4),
    *_both("W2", "tcp", "GBps", (*SOCKET, "iperf3, reno"), 0.95),
    *_both("W2", "tcp", "GBps", BEST, 1.4),
    *_both("W3", "shm", "GBps", NT, 0.95),
    *_both("W3", "shm", "GBps", BEST, 2.2),
    *_both("W3", "tcp", "GBps", SOCKET, 0.9),
    *_both("W3", "tcp", "GBps", BEST, 2.0),
    *_both("W3b", "shm", "GBps", BEST, 3.0),
    *_both("W3b", "tcp", "GBps", BEST, 3.0),
    _one("W4", "shm", "put_GBps", BEST, 1.4),
    _one("W4", "tcp", "put_GBps", BEST, 1.2),
    *_both("W5", "shm", "cpu_s_per_GiB", BEST, 1.0),
    *_both("W5", "tcp", "cpu_s_per_GiB", BEST, 1.0),
    *_both("W5", "tcp", "cpu_s_per_GiB", SOCKET, 1.1),
    *_both("W6", "shm", "GBps", BEST, 1.2),
    *_both("W6", "shm", "p99_ms", BEST, 1.0),
    *_both("W6", "tcp", "GBps", BEST, 1.2),
    *_both("W6", "tcp", "p99_ms", BEST, 1.0),
    *_both("W2u", "shm", "GBps", NIXL, 1.0),
    *_both("W3u", "shm", "GBps", NIXL, 1.0),
    *_both("W2u", "tcp", "GBps", NIXL, 1.0),
    *_both("W3u", "tcp", "GBps", NIXL, 1.0),
    *(_one("setup", name, "total_ms", NIXL, 1.0) for name in ("shm", "tcp")),
    *(_one(f"idle/{GOALS_PEERS}", name, "cores", CONSTANT, 0.01) for name in ("shm", "tcp")),
    *(_one("submit", name, "put_ms", CONSTANT, 5.0) for name in ("shm", "tcp")),
    *(_one("submit", name, "put_block_ms", CONSTANT, 2.0) for name in ("shm", "tcp")),
    *(_one("descriptors", name, "put_ms", GROWTH, 1.25) for name in ("shm", "tcp")),
    *(_one("peers", name, "put_4k_p50_us", GROWTH, 1.5) for name in ("shm", "tcp")),
    *(_one("peers", name, "connect_ms", GROWTH, 1.5) for name in ("shm", "tcp")),
    *(_one("peers", name, "bytes", CONSTANT, 256 * 1024) for name in ("shm", "tcp")),
    *(_one("descriptors", name, "bytes", CONSTANT, 64) for name in ("shm", "tcp")),
)
"""Every row of the table of goals. Bytes are what one peer costs its target and one descriptor in flight its sender."""

GROWTH_FROM = {"descriptors": 1 << 16, "peers": 4}
"""Where proportional cost begins: below, what a transfer costs by itself hides it."""
PER_ITEM = ("put_4k_p50_us", "connect_ms", "bytes")
"""Metrics that are costs of one of N already."""


def judge(rows: Sequence[Row], goals: Iterable[Goal] = GOALS) -> list[Verdict]:
    """Every goal, from the rows of a run with the ratios in them."""
    return [_judge(goal, rows) for goal in goals]


def _judge(goal: Goal, rows: Sequence[Row]) -> Verdict:
    if goal.beside == GROWTH:
        return _verdict(goal, _growth(goal, rows), "")
    if goal.beside == CONSTANT:
        mine = [row for row in rows if (row.peer, row.transport, row.metric) == (OURS, goal.transport, goal.metric)]
        mine = [row for row in mine if row.workload == goal.workload or row.workload.startswith(goal.workload + "/")]
        return _verdict(goal, max(mine, key=lambda row: _size_of(row.workload), default=None), "")
    there = [row for row in rows if is_ratio(row) and row.key[1:] == (goal.transport, goal.workload, goal.metric)]
    asked = [row for row in there if _is_beside(goal, row.peer.removeprefix(OVER))]
    hardest = min if better_of(goal.metric) == "higher" else max
    row = hardest(asked, key=lambda row: row.median) if asked else None
    found = _verdict(goal, row, "" if row is None else row.peer.removeprefix(OVER))
    if row is None or found.state != "missed" or found.beside.startswith(REFERENCE):
        return found
    return Verdict(goal, found.state, row, found.beside, _limit(goal, row, there))


def _verdict(goal: Goal, row: Row | None, beside: str) -> Verdict:
    if row is None:
        return Verdict(goal, "not measured")
    return Verdict(goal, "met" if goal.holds(row.median) else "missed", row, beside)


def _is_beside(goal: Goal, name: str) -> bool:
    if goal.beside == BEST:
        return not name.startswith(REFERENCE) and name not in PLAIN_SOCKETS
    # "ref memfd+NT copy" is not "ref memfd+NT copy, 2 threads", but a socket's settings are part of its name.
    return any(name == one or (name.startswith(one) and one not in NT) for one in goal.beside)


def _limit(goal: Goal, row: Row, there: Sequence[Row]) -> str:
    """The reference that is best at this, if it misses the goal as well."""
    known = [one for one in there if one.peer.startswith(OVER + REFERENCE) and one.median > 0]
    if not known:
        return ""
    reach = [(row.median / one.median, one.peer.removeprefix(OVER)) for one in known]
    ratio, name = max(reach) if better_of(goal.metric) == "higher" else min(reach)
    return "" if goal.holds(ratio) else f"the limit: {name} itself reaches {number(ratio)} x"


def _growth(goal: Goal, rows: Sequence[Row]) -> Row | None:
    prefix = goal.workload + "/"
    mine = {
        _size_of(row.workload): row
        for row in rows
        if (row.peer, row.transport, row.metric) == (OURS, goal.transport, goal.metric)
        if row.workload.startswith(prefix) and _size_of(row.workload) >= GROWTH_FROM[goal.workload]
    }
    if len(mine) < 2:
        return None
    small, large = mine[min(mine)], mine[max(mine)]
    items = 1.0 if goal.metric in PER_ITEM else max(mine) / min(mine)
    if small.median <= 0:
        return None
    value = large.median / small.median / items
    return Row(OURS, goal.transport, goal.workload, goal.metric, "ratio", value, value, value, large.n)


def _size_of(workload: str) -> int:
    """The number of a ``name/number``, 0 without one."""
    end = workload.rpartition("/")[2]
    return int(end) if end.isdigit() else 0


# -- for people and machines ------------------------------------------------------------------------------------------


def lines(verdicts: Sequence[Verdict]) -> list[list[str]]:
    """One line per goal, under `HEADERS`."""
    found = []
    for one in verdicts:
        goal, row = one.goal, one.row
        measured = "-" if row is None else number(row.median)
        if row is not None and row.n > 1:
            measured += f" ({number(row.low)}..{number(row.high)})"
        found.append(
            [goal.workload, goal.transport, goal.metric, measured, goal.text, one.beside or "-", one.state, one.limit]
        )
    return found


def text(verdicts: Sequence[Verdict]) -> str:
    """The table, with a line that counts."""
    counted = [f"{sum(one.state == state for one in verdicts)} {state}" for state in ("met", "missed", "not measured")]
    limited = sum(bool(one.limit) for one in verdicts)
    closing = f"goals: {', '.join(counted)}; {limited} of the missed are beyond what plain copies or sockets reach here"
    return aligned(HEADERS, lines(verdicts), 3) + "\n\n" + closing


def as_rows(verdicts: Sequence[Verdict]) -> list[Row]:
    """For the JSON file: the peer is ``goal`` with the condition, the unit the verdict. What was not measured is not
    there.
    """
    found = []
    for one in verdicts:
        if one.row is not None:
            goal, row = one.goal, one.row
            name = f"goal {goal.text}"[:200]
            found.append(
                Row(name, goal.transport, goal.workload, goal.metric, one.state, row.median, row.low, row.high, row.n)
            )
    return found

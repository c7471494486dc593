"""Ours divided by others, round by round: the numbers that survive a busy machine.

Two rates that were measured seconds apart met the same neighbours, so their quotient is taken within the round, and
the row of a ratio is the median of those quotients, not the quotient of two medians. Its peer is ``kvxfer / other``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvxfer.bench.rows import OURS, Row, better_of

UNIT = "ratio"
OVER = OURS + " / "
REFERENCE = "ref "
YARDSTICKS = ("ref memfd+NT copy", "ref C tcp", "ref process_vm", "ref memfd+memcpy")
"""What is divided by: the first of them that has the same measurement."""
PLAIN_SOCKETS = frozenset({"py socket", "py socket, reno", "iperf3", "iperf3, reno"})
"""Peers that show what sockets give without a data mover: yardsticks rather than rivals."""


def of_round(rows: Sequence[Row]) -> list[Row]:
    """The ratios of one round: each row of ours over its yardstick first, then over everybody with the same
    measurement.
    """
    found = []
    for row in rows:
        if row.peer != OURS:
            continue
        there = [one for one in rows if one.transport == row.transport and one.peer != OURS]
        same = [one for one in there if one.workload == row.workload]
        # Whose memory it is makes no difference to a socket, and few rivals have memory of their own.
        same += [one for one in there if one.workload == row.workload.removesuffix("u") != row.workload]
        others = {one.peer: one for one in reversed(same) if one.metric == row.metric and not is_reference(one)}
        yardstick = _yardstick(row, same)
        plain = [one for one in same if one.key[2:] == row.key[2:] and is_reference(one) and one is not yardstick]
        for other in [*([yardstick] if yardstick else []), *others.values(), *plain]:
            if other.median > 0:
                value = row.median / other.median
                peer = OVER + other.peer
                found.append(Row(peer, row.transport, row.workload, row.metric, UNIT, value, value, value, 1))
    return found


def is_reference(row: Row) -> bool:
    """A program that does only the physical work."""
    return row.peer.startswith(REFERENCE)


def is_ratio(row: Row) -> bool:
    """True for a row that `of_round` made: a ratio, not a measurement."""
    return row.unit == UNIT


def _yardstick(row: Row, same: Sequence[Row]) -> Row | None:
    # Over a socket a get is the same work as a put, and only that is measured.
    metrics = (row.metric, row.metric.replace("get_", "put_", 1))

    def rank(one: Row) -> tuple[bool, int, int]:
        return one.workload != row.workload, metrics.index(one.metric), _rank(one)

    fitting = [one for one in same if one.metric in metrics and _rank(one) < len(YARDSTICKS)]
    return min(fitting, key=rank, default=None)


def _rank(row: Row) -> int:
    names = (row.peer, row.peer.partition(", per-socket")[0])
    return next((index for index, name in enumerate(YARDSTICKS) if name in names), len(YARDSTICKS))


@dataclass(frozen=True, slots=True)
class Compared:
    """One of our rows with its ratio to the yardstick and to the rival that looks best beside it."""

    row: Row
    reference: Row | None
    rival: Row | None

    @property
    def rival_name(self) -> str:
        """The name of the rival that this row is compared with; empty when there is none."""
        return "" if self.rival is None else self.rival.peer.removeprefix(OVER)

    @property
    def reference_text(self) -> str:
        """The reference's value as a cell of the table."""
        return "-" if self.reference is None else f"{self.reference.median:.2f}"

    @property
    def rival_text(self) -> str:
        """The rival's value and its name as a cell of the table."""
        return "-" if self.rival is None else f"{self.rival.median:.2f} ({self.rival_name})"


def compared(rows: Sequence[Row]) -> list[Compared]:
    """Every row of ours beside its ratios."""
    by_work: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if is_ratio(row):
            by_work.setdefault(row.key[1:], []).append(row)
    found = []
    for row in rows:
        if row.peer == OURS:
            ratios = by_work.get(row.key[1:], [])
            reference = next((one for one in ratios if one.peer.startswith(OVER + REFERENCE)), None)
            rivals = [one for one in ratios if not one.peer.startswith(OVER + REFERENCE)]
            # Plain sockets move no data for anybody: they are what one is compared with when there is nobody else.
            rivals = [one for one in rivals if one.peer.removeprefix(OVER) not in PLAIN_SOCKETS] or rivals
            hardest = min if better_of(row.metric) == "higher" else max
            rival = hardest(rivals, key=lambda one: one.median) if rivals else None
            found.append(Compared(row, reference, rival))
    return found

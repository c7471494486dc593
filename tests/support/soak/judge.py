"""Is it flat? Pure arithmetic over samples that were taken while nothing ran.

Two questions. A *count* (descriptors, threads, grants, ...) has a level: what it is at rest at the end may not be
higher than at rest at the beginning, but for a named slack. Something that a round left and that ends by its own limit
may still be there after the next ones, so the last word has the closing sample, taken when all such limits are over.

An *amount* (resident memory) wobbles, so its slope is estimated by the median of all pairwise slopes (Theil and Sen),
which a few odd samples do not move. Caches fill up, and then stop; a leak goes on. So it is called a leak only when it
rises faster than allowed over all that was seen *and* over the later half, by more in all than the wobble explains, in
so many transfers that the caches are full. A run that is too short for that says so: it proves nothing either way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

POINTS_MAX = 256
WARM_UP = 0.25  # of the transfers: caches, pools and interned strings fill up
PER_TRANSFERS = 50_000
POINTS_MIN = 6
POINTS_OF_WOBBLE = 12  # what goes up and down by itself proves nothing in fewer
TRANSFERS_OF_AMOUNT = 15_000  # after the warm-up; in fewer, caches of mappings and tables of the newest still fill


@dataclass(slots=True)
class Series:
    """Samples of one number over the count of transfers, in bounded memory: when it is full, two neighbours become one
    (the smaller value, since what is held for a moment is no leak).
    """

    points: list[tuple[int, float]] = field(default_factory=list)
    stride: int = 1
    closing: float | None = None  # when everything that ends by itself has ended
    _skipped: list[tuple[int, float]] = field(default_factory=list)

    def add(self, transfers: int, value: float) -> None:
        """One sample more."""
        self._skipped.append((transfers, value))
        if len(self._skipped) < self.stride:
            return
        self.points.append(_smaller(self._skipped))
        self._skipped.clear()
        if len(self.points) >= POINTS_MAX:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [_smaller(pair) for pair in pairs]
            self.stride *= 2

    @property
    def pending(self) -> list[tuple[int, float]]:
        """Samples that will be a part of the next point."""
        return list(self._skipped)

    @property
    def settled(self) -> list[tuple[int, float]]:
        """Those after the warm-up."""
        if not self.points:
            return []
        begin, end = self.points[0][0], self.points[-1][0]
        return [point for point in self.points if point[0] >= begin + (end - begin) * WARM_UP]


def _smaller(points: Sequence[tuple[int, float]]) -> tuple[int, float]:
    return points[-1][0], min(value for _, value in points)


def slope(points: Sequence[tuple[int, float]]) -> float:
    """Rise per transfer: the median over all pairs; 0 when there is none."""
    slopes = [
        (second[1] - first[1]) / (second[0] - first[0])
        for at, first in enumerate(points)
        for second in points[at + 1 :]
        if second[0] > first[0]
    ]
    return median(slopes) if slopes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What is allowed. ``per_transfers`` None: a count, judged by its level. ``floor``: the rise in all, or the level's
    difference, that says nothing yet; nor do fewer samples than ``points_min`` over fewer than ``transfers_min``.
    ``most``: what it may be in any sample at rest, however few there are; None says nothing.
    """

    per_transfers: float | None = None
    floor: float = 0.0
    points_min: int = POINTS_MIN
    transfers_min: int = 0
    most: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One series, judged, or not: ``judged`` False means too short to say. ``slope`` is per `PER_TRANSFERS`."""

    name: str
    judged: bool
    first: float
    last: float
    slope: float
    points: int
    why: str = ""

    @property
    def flat(self) -> bool:
        return not self.why


def judge(name: str, series: Series, limit: Limit) -> Verdict:
    """Too few samples are not judged; the report shows how many there were."""
    if limit.most is not None and (above := _above(series, limit.most)):
        last, count = above[-1], len(series.points)
        why = f"is {last:g} at rest, where {limit.most:g} is right"
        return Verdict(name=name, judged=True, first=above[0], last=last, slope=0, points=count, why=why)
    points = series.settled
    if not points:
        return Verdict(name=name, judged=False, first=0, last=0, slope=0, points=0)
    third = max(1, len(points) // 3)
    first, last = (median(value for _, value in part) for part in (points[:third], points[-third:]))
    judged = len(points) >= limit.points_min and _covered(points) >= limit.transfers_min
    why = "" if not judged else _level(series, limit) if limit.per_transfers is None else _rise(points, limit)
    shown = round(slope(points) * PER_TRANSFERS, 3)
    return Verdict(name=name, judged=judged, first=first, last=last, slope=shown, points=len(points), why=why)


def _above(series: Series, most: float) -> list[float]:
    """The samples that are above what may be, also those that were not yet put into a point."""
    closing = [] if series.closing is None else [series.closing]
    values = [value for _, value in (*series.points, *series.pending)]
    return [value for value in (*values, *closing) if value > most]


def _covered(points: Sequence[tuple[int, float]]) -> int:
    return points[-1][0] - points[0][0]


def _level(series: Series, limit: Limit) -> str:
    """Why a count has grown; empty when it has not."""
    values = [value for _, value in series.settled]
    third = max(1, len(values) // 3)
    before, after = max(values[:third]), min(values[-third:])
    if series.closing is not None:
        after = min(after, series.closing)
    return f"never came back to what it was: from {before:g} to {after:g}" if after - before > limit.floor else ""


def _rise(points: Sequence[tuple[int, float]], limit: Limit) -> str:
    """Why an amount leaks; empty when it does not."""
    assert limit.per_transfers is not None
    per_transfer = min(slope(points), slope(points[len(points) // 2 :]))
    rise = per_transfer * _covered(points)
    if rise <= limit.floor or per_transfer * PER_TRANSFERS <= limit.per_transfers:
        return ""
    return f"rises to the end, by {rise:.3g} in all, {per_transfer * PER_TRANSFERS:.3g} per {PER_TRANSFERS} transfers"


def _amount(per_transfers: float, floor: float) -> Limit:
    return Limit(
        per_transfers=per_transfers,
        floor=floor,
        points_min=POINTS_OF_WOBBLE,
        transfers_min=TRANSFERS_OF_AMOUNT,
    )


MIB = 1024.0  # resident memory is counted in KiB
LIMITS: Mapping[str, Limit] = {
    "rss_kib": _amount(2 * MIB, 4 * MIB),
    "shmem_kib": _amount(2 * MIB, 16 * MIB),
    "fds": Limit(floor=4, points_min=POINTS_OF_WOBBLE),
    "threads": Limit(floor=2, points_min=POINTS_OF_WOBBLE),
    "tasks": Limit(floor=1, points_min=POINTS_OF_WOBBLE),
    # Up to 256 mappings of each peer's memory are kept for the next grant, and some tables keep the newest thousand.
    "maps": _amount(200, 320),
    "objects": _amount(1000, 4000),
    "permits": Limit(most=0),  # an idle client holds no place in any window
}


def judge_all(table: Mapping[str, Series]) -> list[Verdict]:
    """Every series; the last word of its name says what it counts, and what is not in `LIMITS` may not rise at all."""
    return [judge(name, series, LIMITS.get(name.rsplit(" ", 1)[-1], Limit())) for name, series in sorted(table.items())]

"""Is it flat? Pure arithmetic over samples that were taken while nothing ran.

Two questions. A *count* (descriptors, threads, grants, ...) has a level: what it is at rest at the end may not be
higher than at rest at the beginning, but for a named slack. An *amount* (resident memory) wobbles, so its slope is
estimated by the median of all pairwise slopes (Theil and Sen), which a few odd samples do not move; it is called a leak
only when it rises faster than allowed *and* by more in all than the wobble explains.
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


@dataclass(slots=True)
class Series:
    """Samples of one number over the count of transfers, in bounded memory: when it is full, two neighbours become one
    (the smaller value, since what is held for a moment is no leak).
    """

    points: list[tuple[int, float]] = field(default_factory=list)
    stride: int = 1
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
    difference, that says nothing yet.
    """

    per_transfers: float | None = None
    floor: float = 0.0
    points_min: int = POINTS_MIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One series, judged. ``slope`` is per `PER_TRANSFERS` transfers."""

    name: str
    flat: bool
    first: float
    last: float
    slope: float
    points: int
    why: str = ""


def judge(name: str, series: Series, limit: Limit) -> Verdict:
    """Too few samples are flat: they prove nothing, and the report shows how many there were."""
    points = series.settled
    if not points:
        return Verdict(name=name, flat=True, first=0, last=0, slope=0, points=0)
    per_transfer = slope(points)
    rise = per_transfer * (points[-1][0] - points[0][0])
    third = max(1, len(points) // 3)
    first, last = (median(value for _, value in part) for part in (points[:third], points[-third:]))
    why = ""
    if limit.per_transfers is None:
        grown = min(value for _, value in points[-third:]) - max(value for _, value in points[:third])
        if len(points) >= limit.points_min and grown > limit.floor:
            why = f"never came back to what it was: from {first:g} to {last:g}"
    elif len(points) >= limit.points_min and rise > limit.floor and per_transfer * PER_TRANSFERS > limit.per_transfers:
        why = f"rose by {rise:.3g} in all, {per_transfer * PER_TRANSFERS:.3g} per {PER_TRANSFERS} transfers"
    shown = round(per_transfer * PER_TRANSFERS, 3)
    return Verdict(name=name, flat=not why, first=first, last=last, slope=shown, points=len(points), why=why)


MIB = 1024.0  # resident memory is counted in KiB
LIMITS: Mapping[str, Limit] = {
    "rss_kib": Limit(per_transfers=2 * MIB, floor=4 * MIB, points_min=POINTS_OF_WOBBLE),
    "shmem_kib": Limit(per_transfers=2 * MIB, floor=16 * MIB, points_min=POINTS_OF_WOBBLE),
    "fds": Limit(floor=4, points_min=POINTS_OF_WOBBLE),
    "threads": Limit(floor=2, points_min=POINTS_OF_WOBBLE),
    "tasks": Limit(floor=1, points_min=POINTS_OF_WOBBLE),
    # Up to 256 mappings of each peer's memory are kept for the next grant, and some tables keep the newest thousand.
    "maps": Limit(per_transfers=200, floor=320, points_min=POINTS_OF_WOBBLE),
    "objects": Limit(per_transfers=1000, floor=4000, points_min=POINTS_OF_WOBBLE),
}


def judge_all(table: Mapping[str, Series]) -> list[Verdict]:
    """Every series; the last word of its name says what it counts, and what is not in `LIMITS` may not rise at all."""
    return [judge(name, series, LIMITS.get(name.rsplit(" ", 1)[-1], Limit())) for name, series in sorted(table.items())]

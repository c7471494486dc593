"""Latencies as a histogram with logarithmic buckets: every sample counts, memory does not grow, rounds add up.

The idea: the octave of a value (its bit length) and the next `SUB_BITS` bits name its bucket, so a bucket is never
wider than 1/128 of its values and percentiles are exact to 0.8 %. Histograms of rounds are merged by adding counts, so
no percentile is ever an average of percentiles. Values are integers in nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable

SUB_BITS = 7
SUB = 1 << SUB_BITS
VALUE_MAX = (1 << 42) - 1  # 73 minutes; anything longer counts as that
BUCKETS = (42 - SUB_BITS + 1) * SUB


def bucket_of(value: int) -> int:
    """The bucket that a value belongs to."""
    value = min(max(value, 0), VALUE_MAX)
    shift = max(value.bit_length() - SUB_BITS - 1, 0)
    return (shift << SUB_BITS) + (value >> shift)


def bucket_range(index: int) -> tuple[int, int]:
    """Lowest value of a bucket and the first beyond it."""
    shift = max((index >> SUB_BITS) - 1, 0)
    low = index - (shift << SUB_BITS)
    return low << shift, (low + 1) << shift


class Histogram:
    """Counts per bucket, with the exact number of samples and the exact largest."""

    __slots__ = ("_counts", "count", "worst")

    def __init__(self) -> None:
        self._counts = [0] * BUCKETS
        self.count = 0
        self.worst = 0

    def add(self, value: int) -> None:
        """Record one value in nanoseconds."""
        self._counts[bucket_of(value)] += 1
        self.count += 1
        if value > self.worst:
            self.worst = value

    def extend(self, values: Iterable[int]) -> None:
        """Record each of these samples."""
        for value in values:
            self.add(value)

    def merge(self, other: Histogram) -> None:
        """Add the samples of another histogram."""
        self._counts = [mine + theirs for mine, theirs in zip(self._counts, other._counts, strict=True)]
        self.count += other.count
        self.worst = max(self.worst, other.worst)

    def percentile(self, percent: float) -> float:
        """The nanoseconds that ``percent`` of the samples do not exceed (middle of the bucket); 0 if empty."""
        rank = max(1, -(-self.count * percent // 100))
        seen = 0
        for index, count in enumerate(self._counts):
            seen += count
            if count and seen >= rank:
                low, high = bucket_range(index)
                return min((low + high - 1) / 2, self.worst)
        return 0.0

    def points(self) -> list[tuple[float, float]]:
        """The distribution as (nanoseconds, share of samples not above), one point per bucket in use."""
        found, seen = [], 0
        for index, count in enumerate(self._counts):
            if count:
                seen += count
                found.append((float(min(bucket_range(index)[1] - 1, self.worst)), seen / self.count))
        return found

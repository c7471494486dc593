"""Histograms against sorted lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.bench.histogram import BUCKETS, VALUE_MAX, Histogram, bucket_of, bucket_range

VALUES = st.integers(min_value=0, max_value=10**10)


@given(st.integers(min_value=0, max_value=VALUE_MAX))
def test_a_value_lies_in_its_bucket(value: int) -> None:
    low, high = bucket_range(bucket_of(value))
    assert low <= value < high
    assert (high - low) * 128 <= max(low, 128)


def test_buckets_follow_each_other() -> None:
    assert [bucket_range(index)[1] for index in range(BUCKETS - 1)] == [
        bucket_range(index)[0] for index in range(1, BUCKETS)
    ]
    assert bucket_of(VALUE_MAX) == bucket_of(VALUE_MAX * 5) == BUCKETS - 1
    assert bucket_of(-3) == 0


@given(st.lists(VALUES, min_size=1, max_size=200), st.sampled_from([1.0, 50.0, 90.0, 99.0, 100.0]))
def test_percentiles_are_those_of_the_samples(values: list[int], percent: float) -> None:
    histogram = Histogram()
    histogram.extend(values)
    exact = sorted(values)[max(1, -(-len(values) * int(percent) // 100)) - 1]
    assert histogram.percentile(percent) == pytest.approx(exact, rel=0.008, abs=0.5)
    assert histogram.worst == max(values)


@given(st.lists(VALUES, max_size=50), st.lists(VALUES, max_size=50))
def test_merging_is_recording_both(first: list[int], second: list[int]) -> None:
    both, left, right = Histogram(), Histogram(), Histogram()
    both.extend(first + second)
    left.extend(first)
    right.extend(second)
    left.merge(right)
    assert left.points() == both.points()
    assert (left.count, left.worst) == (both.count, both.worst)


def test_points_end_with_everybody() -> None:
    histogram = Histogram()
    assert histogram.percentile(50) == 0.0
    assert histogram.points() == []
    histogram.extend([100, 100, 5000])
    points = histogram.points()
    assert [share for _, share in points] == [pytest.approx(2 / 3), 1.0]
    assert points[-1][0] == 5000

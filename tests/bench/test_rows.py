"""Rows: names of metrics, rounds combined, JSON there and back, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.bench.rows import QUANTITIES, Row, better_of, combine, dumps, loads, quantity_of, single
from kvxfer.errors import UsageError

NAMES = st.text(min_size=1, max_size=20)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
ROWS = st.builds(
    Row, NAMES, NAMES, NAMES, NAMES, NAMES, NUMBERS, NUMBERS, NUMBERS, st.integers(min_value=1, max_value=1000)
)


@given(st.lists(ROWS, max_size=5))
def test_json_there_and_back(rows: list[Row]) -> None:
    assert loads(dumps(rows)) == rows


@pytest.mark.parametrize("field", list(asdict(single("a", "b", "c", "GBps", 1.0))))
def test_a_bad_field_is_named(field: str) -> None:
    good = json.loads(dumps([single("a", "b", "c", "GBps", 1.0)]))
    for bad in (None, [], True, float("inf"), "" if field in ("peer", "metric") else "x" * 500):
        text = json.dumps([{**good[0], field: bad}])
        with pytest.raises(UsageError, match=f"base.json: row 0: bad {field}"):
            loads(text, "base.json")


@pytest.mark.parametrize("text", ["", "{}", "[1]", "nothing"])
def test_what_is_no_list_of_rows(text: str) -> None:
    with pytest.raises(UsageError):
        loads(text)


def test_metrics_know_unit_and_direction() -> None:
    assert quantity_of("put_4k_open_p99_us") == "p99_us"
    assert quantity_of("get_GBps") == quantity_of("GBps") == "GBps"
    assert better_of("get_GBps") == "higher"
    assert all(quantity.better == "lower" for name, quantity in QUANTITIES.items() if name != "GBps")
    assert single("a", "tcp", "W1", "put_64k_p50_us", 3.0).unit == "us"
    for unknown in ("speed", "get_put_GBps", "4k_put_p50_us", ""):
        with pytest.raises(UsageError):
            quantity_of(unknown)


def test_rounds_become_one_row() -> None:
    values = (3.0, 1.0, 2.0, 9.0)
    rounds = [single("a", "shm", "W2", metric, value) for value in values for metric in ("put_GBps", "get_GBps")]
    first, second = combine(rounds)
    assert first == Row("a", "shm", "W2", "put_GBps", "GB/s", 2.5, 1.0, 9.0, 4)
    assert second.metric == "get_GBps"

"""Choosing a card: most memory left, then fewest transfers; what is under way counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import UsageError
from kvxfer.memory.allocation import GROUP_MAX, Held, Load, check_group, least_held, least_loaded


def load(device: int, available_bytes: int, live_tokens: int = 0) -> Load:
    return Load(device=device, available_bytes=available_bytes, live_tokens=live_tokens)


def test_memory_before_transfers_before_the_number() -> None:
    assert least_loaded([load(0, 10), load(1, 20, live_tokens=99)], {}) == 1
    assert least_loaded([load(0, 20, live_tokens=3), load(1, 20, live_tokens=2)], {}) == 1
    assert least_loaded([load(2, 20), load(1, 20)], {}) == 1
    with pytest.raises(UsageError):
        least_loaded([], {})


def test_what_is_under_way_counts() -> None:
    assert least_loaded([load(0, 20), load(1, 15)], {0: 6}) == 1


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40))
def test_a_burst_spreads(lengths: list[int]) -> None:
    pending = {0: 0, 1: 0, 2: 0}
    for length in lengths:
        chosen = least_loaded([load(device, 1000) for device in pending], pending)
        assert pending[chosen] == min(pending.values())
        pending[chosen] += length
    assert max(pending.values()) - min(pending.values()) <= max(lengths)


@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=12))
def test_a_landing_goes_where_least_is_held_and_it_fits(parts: list[tuple[int, bool]]) -> None:
    held = [Held(part=number, bytes=size, fits=fits) for number, (size, fits) in enumerate(parts)]
    chosen = least_held(held)
    fitting = [size for size, fits in parts if fits]
    if chosen is None:
        assert not fitting
    else:
        assert parts[chosen] == (min(fitting), True)
        assert chosen == parts.index(parts[chosen]), "the first of equals"


def test_groups() -> None:
    assert check_group([3, 1]) == (3, 1)
    assert check_group(range(GROUP_MAX)) == tuple(range(GROUP_MAX))
    for wrong in ([], [1, 1], [-1], [True], ["0"], "01", 3, None, range(GROUP_MAX + 1)):
        with pytest.raises(UsageError, match="group"):
            check_group(wrong)

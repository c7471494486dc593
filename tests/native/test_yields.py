"""When a copy thread leaves its core to the owner thread: pure, so a call is a number."""

from __future__ import annotations

import ctypes
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.native.alone import compiled_text

MOST = 4
SOURCE = """
#include "core/yields.h"
kvx_yields yields;
int yields_now(uint32_t call) { return kvx_yields_now(&yields, call); }
void note(uint32_t call) { kvx_yields_note(&yields, call); }
void reset(void) { yields = (kvx_yields){0}; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compiled_text(tmp_path_factory.mktemp("yields"), SOURCE)


def yielded(library: ctypes.CDLL, calls: list[int]) -> list[bool]:
    """What a fresh copy thread does, which looks once for each of them."""
    library.reset()
    found = []
    for call in calls:
        found.append(bool(library.yields_now(call)))
        assert bool(library.yields_now(call)) == found[-1], "looking changes nothing"
        if found[-1]:
            library.note(call)
    return found


def test_only_while_the_owner_is_called_and_has_not_come(library: ctypes.CDLL) -> None:
    assert yielded(library, [0, 1, 1, 2, 2, 3, 4]) == [False, True, True, False, False, True, False]


def test_an_owner_that_does_not_come_is_not_yielded_to_for_ever(library: ctypes.CDLL) -> None:
    assert yielded(library, [7] * 100) == [True] * MOST + [False] * (100 - MOST)
    assert yielded(library, [7] * 10 + [8] + [9] * 10)[11:] == [True] * MOST + [False] * (10 - MOST)


@given(st.lists(st.integers(0, 3), max_size=200))
def test_each_call_has_its_own_turns(library: ctypes.CDLL, steps: list[int]) -> None:
    call = (1 << 32) - 40  # it goes round
    calls = [call := (call + max(step - 1, 0)) & 0xFFFFFFFF for step in steps]
    expected = [at < MOST and bool(value & 1) for value, group in groupby(calls) for at, _ in enumerate(group)]
    assert yielded(library, calls) == expected

"""When a completion is looked for: pure, so a transfer is a number and a thousand of them take no time."""

from __future__ import annotations

import ctypes
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.alone import compiled

CLASSES = 40
MS = 1_000_000
SHORT, LONG, BLIND = 200_000, 2 * MS, 5 * MS
COST, SHARE = 15_000, 15  # of a look; per mille of a core
START, KEPT = 400_000, 6 * MS
MIB = 1 << 20


class Known(ctypes.Structure):
    _fields_ = (
        ("took_ns", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("off_ns", ctypes.c_uint64),
        ("hits", ctypes.c_uint8),
    )


class Raw(ctypes.Structure):
    _fields_ = (
        ("begun_ns", ctypes.c_uint64),
        ("polled_ns", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("known", Known * CLASSES),
    )


class Budget(ctypes.Structure):
    _fields_ = (
        ("polled_ns", ctypes.c_uint64),
        ("credit_ns", ctypes.c_int64),
        ("cost_ns", ctypes.c_uint64),
        ("begun", ctypes.c_bool),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    loaded = compiled(tmp_path_factory.mktemp("pace"), "hixl_backoff")
    loaded.kvx_hixl_backoff_next.restype = ctypes.c_uint64
    loaded.kvx_hixl_budget_pause.restype = ctypes.c_uint64
    return loaded


class Link:
    """A link of a device that has no other: what it wants, and what the budget makes of it."""

    def __init__(self, library: ctypes.CDLL, cost: int = COST) -> None:
        self.library, self.raw, self.budget, self.cost, self.now = library, Raw(), Budget(), cost, 10 * MS
        self.looks, self.waited = 0, 0
        library.kvx_hixl_budget_cost(ctypes.byref(self.budget), ctypes.c_uint64(cost))

    def looked(self, completed: bool, live: int) -> int:
        """Nanoseconds until the next look."""
        raw, budget = ctypes.byref(self.raw), ctypes.byref(self.budget)
        self.library.kvx_hixl_backoff_polled(raw, ctypes.c_uint64(self.now), completed, ctypes.c_uint64(live))
        self.library.kvx_hixl_budget_polled(budget, ctypes.c_uint64(self.now), live != 0)
        wanted = int(self.library.kvx_hixl_backoff_next(raw))
        pause = int(self.library.kvx_hixl_budget_pause(budget, ctypes.c_uint64(wanted)))
        assert pause >= wanted
        assert pause == wanted or self.budget.credit_ns < self.cost, "it was permitted"
        assert pause <= max(wanted, 2 * self.cost * 1000 // SHARE + 1), "bounded also when nothing is left"
        return pause

    def transfer(self, duration: int, size: int = MIB, wake_up: int = 0) -> tuple[int, int]:
        """One that takes so long: how late its end was noticed, after how many looks."""
        began, end, looks = self.now, self.now + duration, 0
        pause = self.looked(False, size)
        while True:
            assert pause > 0
            self.now += pause + wake_up
            looks += 1
            if self.now >= end:
                break
            pause = self.looked(False, size)
        late = self.now - end
        self.looks, self.waited = self.looks + looks, self.waited + self.now - began
        assert self.looked(True, 0) == 0, "nothing is under way"
        self.now += MS
        return late, looks


@pytest.mark.parametrize("duration", [20_000, 150_000, MS, 5 * MS, 50 * MS, 500 * MS])
def test_what_is_usual_is_noticed_at_once_and_cheaply(library: ctypes.CDLL, duration: int) -> None:
    """Ends that differ by 1 %: seen within 0.3 ms when they take long enough for four looks to be allowed."""
    link, rng = Link(library), random.Random(duration)
    for number in range(40):
        late, looks = link.transfer(duration + rng.randrange(duration // 100 + 1), wake_up=rng.randrange(20_000))
        if number >= 12:
            assert late <= (SHORT + 20_000 if duration >= 5 * MS else 4 * COST * 1000 // SHARE)
            assert looks <= max(4, duration // MS)


@given(
    spans=st.lists(st.tuples(st.integers(10_000, 100 * MS), st.integers(1, 1 << 30)), min_size=1, max_size=6),
    cost=st.integers(5000, 200_000),
)
@settings(max_examples=25, deadline=None)
def test_looks_cost_no_more_than_their_share(library: ctypes.CDLL, spans: list[tuple[int, int]], cost: int) -> None:
    """Whatever comes: what was spent is what was earned while waiting, and what there was at the start."""
    link = Link(library, cost)
    for duration, size in spans:
        link.transfer(duration, size)
    unasked = len(spans) * 2  # the looks at a submit and at an end are no choice
    assert link.looks * cost <= link.waited * SHARE // 1000 + START + (unasked + 1) * cost


@given(
    whole=st.integers(2 * MS, 60 * MS),
    offs=st.lists(st.floats(-0.03, 0.03), min_size=8, max_size=10),
    size=st.integers(1 << 12, 1 << 29),
)
@settings(max_examples=25, deadline=None)
def test_within_the_window_a_look_comes_every_short_while(
    library: ctypes.CDLL, whole: int, offs: list[float], size: int
) -> None:
    """As far as the budget permits, which `Link.looked` checks of each pause: inside the window none is longer."""
    link = Link(library, 1000)  # cheap: the budget always permits
    for off in offs:
        link.transfer(whole + int(whole * off), size)
    known = link.raw.known[min(size.bit_length() - 1, CLASSES - 1)]
    window = SHORT // 2 + min(4 * known.off_ns, known.took_ns // 25)
    began = link.now
    link.looked(False, size)
    for passed in (known.took_ns - window, known.took_ns, known.took_ns + window):
        link.now = began + passed
        if passed > 0:
            assert link.looked(False, size) <= SHORT


def test_the_end_is_expected_by_the_bytes(library: ctypes.CDLL) -> None:
    """Other sizes than before, at 1 GB/s and 100 us each: told by the line through what is known."""
    link = Link(library)
    for _ in range(10):
        link.transfer(100_000 + 4 * MIB, 4 * MIB)
        link.transfer(100_000 + 8 * MIB, 8 * MIB)
    late, looks = link.transfer(100_000 + 12 * MIB, 12 * MIB)
    assert late <= SHORT
    assert looks <= 6


@pytest.mark.parametrize("duration", [20_000, MS, 5 * MS, 50 * MS, 500 * MS])
def test_the_first_of_its_kind(library: ctypes.CDLL, duration: int) -> None:
    late, _ = Link(library).transfer(duration)
    assert late <= max(SHORT, duration // 31, 2 * COST * 1000 // SHARE)


def test_one_that_ends_early(library: ctypes.CDLL) -> None:
    for usual, early in ((4 * MS, MS), (50 * MS, 3 * MS), (500 * MS, 40 * MS)):
        link = Link(library)
        for _ in range(8):
            link.transfer(usual)
        late, _ = link.transfer(early)
        assert late <= max(BLIND, usual // 8)
        for _ in range(6):
            late, _ = link.transfer(early)
        assert late <= max(SHORT, early // 32, 2 * COST * 1000 // SHARE), "and is what is usual soon"


def test_one_that_stands_still(library: ctypes.CDLL) -> None:
    link = Link(library)
    for _ in range(8):
        link.transfer(MS)
    pauses, at, looks = [link.looked(False, MIB)], link.now + 1000 * MS, 0
    while link.now < at:
        link.now += pauses[-1]
        pauses.append(link.looked(False, MIB))
        looks += 1
    assert pauses[-1] == LONG
    assert looks < 600
    overdue = pauses[3:]
    assert overdue == sorted(overdue), "never quicker again"


def test_sizes_are_known_apart_and_the_unknown_is_guessed_from_less(library: ctypes.CDLL) -> None:
    link = Link(library)
    for _ in range(8):
        link.transfer(2 * MS, 8 * MIB)
        link.transfer(100_000, 4096)
    assert link.transfer(2 * MS, 8 * MIB)[1] <= 3
    late, looks = link.transfer(8 * MS, 32 * MIB)
    assert late <= MS // 2
    assert looks < 8 * MS // SHORT, "it is not before what a quarter of it takes"


def test_what_was_broken_off_teaches_nothing(library: ctypes.CDLL) -> None:
    link = Link(library)
    for _ in range(8):
        link.transfer(4 * MS)
    link.looked(False, MIB)
    link.now += MS // 10
    library.kvx_hixl_backoff_forget(ctypes.byref(link.raw))
    link.looked(True, 0)
    assert link.transfer(4 * MS)[1] <= 4

"""When a completion is looked for: pure, so a transfer is a number and a thousand of them take no time."""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
from pathlib import Path
from shutil import which

import pytest

NATIVE = Path(__file__).parents[2] / "kvxfer" / "native"
CLASSES = 40
MS = 1_000_000
SHORT, LONG, BLIND = 200_000, 2 * MS, 5 * MS
MIB = 1 << 20
COMPILER = os.environ.get("CC") or which("gcc") or which("clang") or which("cc")


class Raw(ctypes.Structure):
    _fields_ = (
        ("begun_ns", ctypes.c_uint64),
        ("looked_ns", ctypes.c_uint64),
        ("size", ctypes.c_uint32),
        ("usual_ns", ctypes.c_uint64 * CLASSES),
        ("hits", ctypes.c_uint8 * CLASSES),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    assert COMPILER is not None
    target = tmp_path_factory.mktemp("pace") / "pace.so"
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([COMPILER, *flags, "-o", str(target), str(NATIVE / "hixl_pace.c")], check=True)
    loaded = ctypes.CDLL(str(target))
    loaded.hixl_pace_next.restype = ctypes.c_uint64
    return loaded


class Link:
    def __init__(self, library: ctypes.CDLL) -> None:
        self.library, self.raw, self.now = library, Raw(), 10 * MS

    def looked(self, completed: bool, live: int) -> int:
        """Nanoseconds until the next look."""
        raw = ctypes.byref(self.raw)
        self.library.hixl_pace_looked(raw, ctypes.c_uint64(self.now), completed, ctypes.c_uint64(live))
        return int(self.library.hixl_pace_next(raw))

    def transfer(self, duration: int, size: int = MIB, wake_up: int = 0) -> tuple[int, int]:
        """One that takes so long: how late its end was noticed, after how many looks."""
        end, looks = self.now + duration, 0
        pause = self.looked(False, size)
        while True:
            assert pause > 0
            self.now += pause + wake_up
            looks += 1
            if self.now >= end:
                break
            pause = self.looked(False, size)
        late = self.now - end
        assert self.looked(True, 0) == 0, "nothing is under way"
        self.now += MS
        return late, looks


@pytest.mark.parametrize("duration", [20_000, 150_000, MS, 5 * MS, 50 * MS, 500 * MS])
def test_what_is_usual_is_noticed_at_once_and_cheaply(library: ctypes.CDLL, duration: int) -> None:
    link, rng = Link(library), random.Random(duration)
    for number in range(40):
        late, looks = link.transfer(duration + rng.randrange(duration // 200 + 1), wake_up=rng.randrange(20_000))
        if number >= 8:
            assert late <= max(SHORT + 20_000, duration // 500)
            assert looks <= max(4, duration // MS), "a look costs some 20 us, and 2 % of a core is allowed"


@pytest.mark.parametrize("duration", [20_000, MS, 5 * MS, 50 * MS, 500 * MS])
def test_the_first_of_its_kind(library: ctypes.CDLL, duration: int) -> None:
    late, _ = Link(library).transfer(duration)
    assert late <= max(SHORT, duration // 31)
    assert late <= LONG


def test_one_that_ends_early(library: ctypes.CDLL) -> None:
    for usual, early in ((4 * MS, MS), (50 * MS, 3 * MS), (500 * MS, 40 * MS)):
        link = Link(library)
        for _ in range(8):
            link.transfer(usual)
        late, _ = link.transfer(early)
        assert late <= max(BLIND, usual // 8)
        for _ in range(6):
            late, _ = link.transfer(early)
        assert late <= max(SHORT, early // 32), "and is what is usual soon"


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
    library.hixl_pace_forget(ctypes.byref(link.raw))
    link.looked(True, 0)
    assert link.transfer(4 * MS)[1] <= 4

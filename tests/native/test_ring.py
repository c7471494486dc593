"""The queue of events by itself: first in, first out, never full, and no larger than what it once held at a time."""

from __future__ import annotations

import ctypes
import random
from collections import deque

import pytest

from tests.native.alone import compiled

PANIC = """
#include <stdlib.h>
_Noreturn void kvx_panic(const char *condition, const char *file, int line) {
    (void)condition, (void)file, (void)line;
    abort();
}
"""
UNTOUCHED = 0xEE


class Event(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("status", ctypes.c_int32),
        *((name, ctypes.c_uint64) for name in ("token", "id", "tag", "value", "bytes")),
        ("sys_errno", ctypes.c_int32),
        ("segment", ctypes.c_int32),
    )


class Raw(ctypes.Structure):
    _fields_ = (
        ("events", ctypes.POINTER(Event)),
        *((name, ctypes.c_uint64) for name in ("capacity", "head", "tail", "reserved")),
        ("signalled", ctypes.c_bool),
        ("fd", ctypes.c_int),
        ("call", ctypes.c_uint32),
    )


class Ring:
    """The C functions, beside what they must do."""

    def __init__(self, library: ctypes.CDLL, places: int) -> None:
        self.library, self.raw, self.wanted, self.pushed = library, Raw(), deque[int](), 0
        assert library.kvx_ring_open(ctypes.byref(self.raw), ctypes.c_uint64(places)) == 0
        ctypes.memset(self.raw.events, UNTOUCHED, self.raw.capacity * ctypes.sizeof(Event))

    def push(self) -> bool:
        self.pushed += 1
        self.wanted.append(self.pushed)
        return bool(self.library.kvx_ring_push(ctypes.byref(self.raw), ctypes.byref(Event(token=self.pushed))))

    def pop(self) -> None:
        """What comes out is what went in longest ago; the place is promised again."""
        event = Event()
        got = self.library.kvx_ring_pop(ctypes.byref(self.raw), ctypes.byref(event))
        assert got == bool(self.wanted)
        if got:
            assert event.token == self.wanted.popleft()
            self.reserve(1)

    def reserve(self, places: int) -> None:
        assert self.library.kvx_ring_reserve(ctypes.byref(self.raw), ctypes.c_uint64(places))

    def touched(self) -> int:
        """How many places were ever written."""
        raw = ctypes.string_at(self.raw.events, self.raw.capacity * ctypes.sizeof(Event))
        size, fresh = ctypes.sizeof(Event), bytes([UNTOUCHED]) * ctypes.sizeof(Event)
        return sum(raw[at : at + size] != fresh for at in range(0, len(raw), size))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    loaded = compiled(tmp_path_factory.mktemp("ring"), "ring", PANIC)
    for name in ("reserve", "push", "pop"):
        getattr(loaded, f"kvx_ring_{name}").restype = ctypes.c_bool
    return loaded


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_pushes_pops_and_growth(library: ctypes.CDLL, seed: int) -> None:
    rng, ring, places = random.Random(seed), Ring(library, 64), 64
    for _ in range(4000):
        choice = rng.random()
        if choice < 0.5 and len(ring.wanted) < places:
            ring.push()
        elif choice < 0.99:
            ring.pop()
        else:
            ring.reserve(3)
            places += 3
    while ring.wanted:
        ring.pop()
    ring.pop()
    library.kvx_ring_close(ctypes.byref(ring.raw))


def test_memory_follows_what_waits_at_once(library: ctypes.CDLL) -> None:
    """A process that lives for long does not fill the whole ring, place by place, with events that are long gone."""
    ring = Ring(library, 4096)
    for _ in range(3000):
        for _ in range(3):
            ring.push()
        for _ in range(3):
            ring.pop()
    assert ring.touched() == 3
    library.kvx_ring_close(ctypes.byref(ring.raw))


def test_one_wake_up_for_many_events(library: ctypes.CDLL) -> None:
    ring = Ring(library, 8)
    assert [ring.push() for _ in range(3)] == [True, False, False]
    library.kvx_ring_close(ctypes.byref(ring.raw))


def test_whoever_looks_sees_that_the_owner_was_called_and_has_not_come(library: ctypes.CDLL) -> None:
    ring = Ring(library, 8)
    seen = [ring.raw.call]
    for _ in range(2):  # pushes of one call do not make it another one
        for _ in range(2):
            ring.push()
            seen.append(ring.raw.call)
        library.kvx_ring_drain(ctypes.byref(ring.raw))
        seen.append(ring.raw.call)
        assert not ring.push(), "what is pushed while it drains calls nobody"
        seen.append(ring.raw.call)
        ring.raw.signalled = False
    library.kvx_ring_drain(ctypes.byref(ring.raw))  # it comes by itself
    assert [*seen, ring.raw.call] == [0, 1, 1, 2, 2, 3, 3, 4, 4, 4]
    library.kvx_ring_close(ctypes.byref(ring.raw))

"""The allocator inside an arena: nothing overlaps, neighbours coalesce, and every byte is accounted for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvxfer.native._shim import ffi, lib
from kvxfer.native.status import StatusCode

GRAIN = lib.KVX_SPACE_GRAIN
LARGE = 2 << 20
LENGTH = 16 * LARGE


class Space:
    """The C functions, and what they must have done."""

    def __init__(self, length: int = LENGTH) -> None:
        self.space = ffi.gc(lib.kvx_space_open(length), lib.kvx_space_close)
        self.taken: dict[int, int] = {}

    def take(self, length: int, alignment: int = 1) -> tuple[int, int]:
        offset = ffi.new("uint64_t *")
        status = lib.kvx_space_take(self.space, length, alignment, offset)
        if status == 0:
            self.taken[offset[0]] = -(-length // GRAIN) * GRAIN
        return status, offset[0]

    def give(self, offset: int) -> int:
        status: int = lib.kvx_space_give(self.space, offset)
        if status == 0:
            del self.taken[offset]
        return status

    def query(self) -> tuple[int, int, int]:
        taken, largest, extents = ffi.new("uint64_t *"), ffi.new("uint64_t *"), ffi.new("uint32_t *")
        lib.kvx_space_query(self.space, taken, largest, extents)
        return taken[0], largest[0], extents[0]

    def holes(self) -> list[int]:
        """Lengths of the maximal free stretches, computed anew."""
        at, found = 0, []
        for offset, length in sorted(self.taken.items()):
            assert offset >= at, "two of them overlap"
            if offset > at:
                found.append(offset - at)
            at = offset + length
        assert at <= LENGTH, "it leaves the arena"
        return found + ([LENGTH - at] if at < LENGTH else [])


class Machine(RuleBasedStateMachine):
    """Any order of taking and giving."""

    offsets = Bundle("offsets")

    def __init__(self) -> None:
        super().__init__()
        self.space = Space()

    @rule(
        target=offsets,
        length=st.one_of(st.integers(1, 4 * GRAIN), st.integers(1, 5 * LARGE), st.sampled_from([GRAIN, LARGE, LENGTH])),
        alignment=st.sampled_from([1, GRAIN, 4096, LARGE]),
    )
    def take(self, length: int, alignment: int) -> Any:
        status, offset = self.space.take(length, alignment)
        if status != 0:
            assert status == StatusCode.DEVICE_MEMORY
            rounded = -(-length // GRAIN) * GRAIN
            assert max([0, *self.space.holes()]) < rounded + alignment, "there was room"
            return multiple()
        assert offset % max(alignment, GRAIN) == 0
        return offset

    @rule(offset=consumes(offsets))
    def give(self, offset: int) -> None:
        assert self.space.give(offset) == 0
        assert self.space.give(offset) == StatusCode.INVALID, "twice"

    @invariant()
    def books_agree(self) -> None:
        holes = self.space.holes()
        extents = len(holes) + len(self.space.taken)
        assert self.space.query() == (sum(self.space.taken.values()), max([0, *holes]), extents)


TestSpace = Machine.TestCase
TestSpace.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_first_hole_that_fits() -> None:
    space = Space()
    offsets = [space.take(LARGE, LARGE)[1] for _ in range(4)]
    assert offsets == [0, LARGE, 2 * LARGE, 3 * LARGE]
    space.give(offsets[2])
    space.give(offsets[0])
    assert space.take(GRAIN)[1] == 0
    assert space.take(LARGE, LARGE)[1] == 2 * LARGE


def test_all_of_it_and_not_a_byte_more() -> None:
    space = Space()
    assert space.take(LENGTH) == (0, 0)
    assert space.take(1)[0] == StatusCode.DEVICE_MEMORY
    assert space.give(0) == 0
    assert space.query() == (0, LENGTH, 1)


@given(st.integers(0, 3 * GRAIN))
def test_an_odd_length_is_used_in_whole_grains(length: int) -> None:
    raw = lib.kvx_space_open(length)
    assert (raw == ffi.NULL) == (length < GRAIN)
    lib.kvx_space_close(raw)


@pytest.mark.parametrize(
    ("length", "alignment", "status"),
    [
        (0, 1, StatusCode.LENGTH),
        ((1 << 64) - 1, 1, StatusCode.LENGTH),
        (1, 0, StatusCode.INVALID),
        (1, 3, StatusCode.INVALID),
    ],
)
def test_nonsense_is_refused(length: int, alignment: int, status: StatusCode) -> None:
    assert Space().take(length, alignment)[0] == status

"""Boxes as bytes."""

from __future__ import annotations

import struct

import pytest

from kvxfer.coverage import Box
from kvxfer.errors import ProtocolError
from kvxfer.wire import boxes
from kvxfer.wire.messages import BOX_BYTES, BOXES_MAX, Claim, Post, PostingEvent

ONE = Box(layers=range(4, 8), parts=range(2), heads=range(6, 7), tokens=range(16, 1 << 33))
EMPTY = Box(layers=range(4), parts=range(2), heads=range(6), tokens=range(16, 16))


def test_what_is_packed_comes_back() -> None:
    for some in ((), (ONE,), (ONE, EMPTY), (ONE,) * BOXES_MAX):
        packed = boxes.pack(some)
        assert len(packed) == len(some) * BOX_BYTES
        assert boxes.unpack(packed) == some
        Post(kind="offer", key="r", lease_s=1, boxes=packed)
        Claim(kind="offer", key="r", boxes=packed)
        PostingEvent(posting="0" * 32, what="claimed", boxes=packed)


@pytest.mark.parametrize(
    "numbers",
    [
        (0, 1025, 0, 1, 0, 1, 0, 1),
        (0, 1, 0, 9, 0, 1, 0, 1),
        (0, 1, 0, 1, 0, 1, 5, 4),
        (0, 2**64 - 1, 0, 1, 0, 1, 0, 1),
        (0, 1, 0, 1, 0, 1, 2**63, 2**64 - 1),
    ],
)
def test_numbers_that_no_cache_has_are_a_protocol_error(numbers: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError, match="box"):
        boxes.unpack(struct.pack(">8Q", *numbers))


@pytest.mark.parametrize("length", [1, 63, 65])
def test_half_a_box_is_a_protocol_error(length: int) -> None:
    with pytest.raises(ProtocolError, match="middle"):
        boxes.unpack(bytes(length))

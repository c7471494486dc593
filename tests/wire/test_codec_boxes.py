"""Boxes as a field of a message: bytes on the wire, boxes in Python."""

from __future__ import annotations

import struct

import msgpack
import pytest

from kvxfer.coverage import Box
from kvxfer.errors import ProtocolError, TooLarge, UsageError
from kvxfer.wire.codec import BOX_BYTES, decode, encode
from kvxfer.wire.messages import BOXES_MAX, Claim, Message, Post, PostingEvent

ONE = Box(layers=range(4, 8), parts=range(2), heads=range(6, 7), tokens=range(16, 1 << 33))
EMPTY = Box(layers=range(4), parts=range(2), heads=range(6), tokens=range(16, 16))


def received(boxes: object) -> Message:
    """A Claim with these boxes, from a peer."""
    made = encode(Claim(kind="offer", key="r"))[4:]
    number, fields = msgpack.unpackb(made)
    found = decode(msgpack.packb([number, {**fields, "boxes": boxes}]))
    assert isinstance(found, Message)
    return found


def test_what_is_sent_arrives() -> None:
    for some in ((), (ONE,), (ONE, EMPTY), (ONE,) * BOXES_MAX):
        for message in (
            Post(kind="offer", key="r", lease_s=1, boxes=some),
            Claim(kind="offer", key="r", boxes=some),
            PostingEvent(posting="0" * 32, what="claimed", boxes=some),
        ):
            assert decode(encode(message)[4:]) == message
    assert received(struct.pack(">8Q", 4, 8, 0, 2, 6, 7, 16, 1 << 33)) == Claim(kind="offer", key="r", boxes=(ONE,))


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
    with pytest.raises(ProtocolError, match=r"Claim\.boxes has a box that is none"):
        received(struct.pack(">8Q", *numbers))


@pytest.mark.parametrize("length", [1, 63, 65])
def test_half_a_box_is_a_protocol_error(length: int) -> None:
    with pytest.raises(ProtocolError, match=r"Claim\.boxes ends in the middle of a box"):
        received(bytes(length))


def test_one_box_too_many_is_refused_on_both_sides() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        received(struct.pack(">8Q", *(0, 1) * 4) * (BOXES_MAX + 1))
    with pytest.raises(TooLarge, match="at most"):
        Claim(kind="offer", key="r", boxes=(ONE,) * (BOXES_MAX + 1))


@pytest.mark.parametrize("wrong", [None, 1, "x", [1], {}])
def test_what_is_no_bytes_is_refused(wrong: object) -> None:
    with pytest.raises(ProtocolError, match=r"Claim\.boxes must be boxes"):
        received(wrong)
    with pytest.raises(UsageError, match="must be boxes"):
        Claim(kind="offer", key="r", boxes=wrong)  # type: ignore[arg-type]


def test_a_box_has_the_bytes_that_the_page_says() -> None:
    assert BOX_BYTES == 64

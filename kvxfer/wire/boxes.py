"""Boxes of a cache as bytes: for each eight numbers of 8 bytes, big-endian, from and to along layers, parts, heads and
tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from kvxfer.coverage import NUMBERS_PER_BOX, Box, boxes_from, numbers_of
from kvxfer.errors import ProtocolError, UsageError
from kvxfer.wire.messages import BOX_BYTES

_numbers = struct.Struct(f">{NUMBERS_PER_BOX}Q")
assert _numbers.size == BOX_BYTES


def pack(boxes: Sequence[Box]) -> bytes:
    """One after the other."""
    return b"".join(_numbers.pack(*numbers_of([box])) for box in boxes)


def unpack(data: bytes) -> tuple[Box, ...]:
    """Raises `ProtocolError` for what is no such list, or has numbers that no cache has."""
    if len(data) % BOX_BYTES:
        raise ProtocolError("a list of boxes ends in the middle of one", bytes=len(data))
    try:
        return tuple(box for numbers in _numbers.iter_unpack(data) for box in boxes_from(numbers))
    except UsageError as wrong:
        raise ProtocolError(f"a box is none: {wrong}") from wrong

"""A walk over the bytes of one message that builds nothing: is it what the codec may safely unpack?

msgpack is compact: a few bytes can announce millions of entries, and four megabytes of them can become hundreds of
megabytes of empty lists. So the structure is checked first, by reading heads and skipping contents: exactly one array
of a number and a map with text as keys, nothing nested deeper than the limit, no more values in all than the limit, no
extension types, and an end exactly where the frame ends. The walk costs in proportion to the values and never more
than the limit allows.
"""

from __future__ import annotations

from kvxfer.errors import ProtocolError

DEPTH_MAX = 4
VALUES_MAX = 1024

# What follows a head byte. Positive: the whole value has this many bytes. Otherwise the way on is one of these.
_SIZED, _ARRAY, _MAP, _BAD = 0, -1, -2, -3


def _table() -> tuple[tuple[int, int, int], ...]:
    """For each head byte: (way on, bytes of the length that follows the head, length that the head itself holds)."""
    table: list[tuple[int, int, int]] = [(_BAD, 0, 0)] * 256
    for head in (*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3):
        table[head] = (1, 0, 0)
    for head, size in ((0xCC, 2), (0xCD, 3), (0xCE, 5), (0xCF, 9), (0xD0, 2), (0xD1, 3), (0xD2, 5), (0xD3, 9)):
        table[head] = (size, 0, 0)
    for head, size in ((0xCA, 5), (0xCB, 9)):
        table[head] = (size, 0, 0)
    for low in range(16):
        table[0x80 + low] = (_MAP, 0, low)
        table[0x90 + low] = (_ARRAY, 0, low)
    for low in range(32):
        table[0xA0 + low] = (1 + low, 0, 0)
    for head, width in ((0xC4, 1), (0xC5, 2), (0xC6, 4), (0xD9, 1), (0xDA, 2), (0xDB, 4)):
        table[head] = (_SIZED, width, 0)
    for first, way in ((0xDC, _ARRAY), (0xDE, _MAP)):
        table[first], table[first + 1] = (way, 2, 0), (way, 4, 0)
    return tuple(table)


_TABLE = _table()
_IS_UINT = frozenset((*range(0x80), 0xCC, 0xCD, 0xCE, 0xCF))
_IS_MAP = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))


def check_structure(payload: bytes) -> None:
    """Raises `ProtocolError` unless `payload` is one well-formed message, apart from its values."""
    if len(payload) < 3 or payload[0] != 0x92:
        raise ProtocolError("a message is not an array of a number and a map")
    if payload[1] not in _IS_UINT:
        raise ProtocolError("a message does not begin with its number")
    fields = 1 + _TABLE[payload[1]][0]
    if fields >= len(payload) or payload[fields] not in _IS_MAP:
        raise ProtocolError("a message has no map of fields behind its number")
    end = _walk(payload, fields)
    if end != len(payload):
        raise ProtocolError("a message is not as long as its frame", bytes=end, frame_bytes=len(payload))


def _walk(payload: bytes, position: int) -> int:
    """Where the value at `position` ends; the outermost array counts as the first level."""
    table, size = _TABLE, len(payload)
    budget = VALUES_MAX
    left = 1  # values still to come at this level
    outer: list[int] = []  # and at the levels around it
    while True:
        while left == 0:
            if not outer:
                return position
            left = outer.pop()
        left -= 1
        if position >= size:
            raise ProtocolError("a message ends in the middle of a value", bytes=size)
        way, width, length = table[payload[position]]
        if way > 0:
            position += way
        elif way == _BAD:
            raise ProtocolError("a message has a value of a type that is not allowed", type=payload[position])
        else:
            position += 1
            if width:
                length = int.from_bytes(payload[position : position + width], "big")
                position += width
            if way == _SIZED:
                position += length
            else:
                entries = length if way == _ARRAY else 2 * length
                budget -= entries
                if budget < 0:
                    raise ProtocolError("a message has too many values", limit=VALUES_MAX)
                if len(outer) + 2 > DEPTH_MAX:  # the map of fields is the second level
                    raise ProtocolError("a message is nested too deep", limit=DEPTH_MAX)
                outer.append(left)
                left = entries

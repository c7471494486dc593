"""What all messages share: validation on construction, the registry of numbers, and the one codec.

The idea: a message is declared once, as a frozen dataclass whose annotations carry the bounds. Whoever holds a message
holds a valid one, because construction checks every field; so a caller hears about a bad value as `UsageError` before a
byte is sent, and the same check turns a peer's bad value into `ProtocolError`. Encoded, a message is msgpack of
``[number, {field: value}]`` behind a length of 4 bytes. Nothing is built from a peer's bytes before their structure
(depth, counts, extent) has been walked.
"""

from __future__ import annotations

import dataclasses
import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar, get_type_hints

import msgpack

from kvxfer.coverage import NUMBERS_PER_BOX, Box, boxes_from, numbers_of
from kvxfer.errors import ProtocolError, TooLarge, UsageError

# -- what may stand in one field --------------------------------------------------------------------------------------
# Each kind is a small frozen object that is put beside the field with `Annotated`, so the declaration of a message is
# also its whole validation. A kind answers one question: given any Python value (from a caller or just unpacked from a
# peer's bytes), either return it in its one normal form, or raise `ValueError` saying what is wrong.


U64_MAX = 2**64 - 1
I64_MIN = -(2**63)
SHOWN_CHARS_MAX = 40
_box = struct.Struct(f">{NUMBERS_PER_BOX}Q")
BOX_BYTES = _box.size
_HEX = re.compile(r"[0-9a-f]+")


class Oversize(ValueError):
    """The value is of the right type but over its maximum."""


class Kind(Protocol):
    """A kind of field."""

    def check(self, value: Any) -> Any:
        """The value in its normal form. Raises `ValueError` with the reason, `Oversize` when it is only too much."""

    def describe(self) -> str:
        """The kind and its bounds in a few words, for the documentation."""


def shown(value: object) -> str:
    """A value as an error may show it: short, and one line."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS_MAX else text[: SHOWN_CHARS_MAX - 3] + "..."


def _wrong_type(expected: str, value: object) -> ValueError:
    return ValueError(f"must be {expected}, got {type(value).__name__}")


@dataclass(frozen=True, slots=True)
class UInt:
    """An unsigned integer up to `max`."""

    max: int = U64_MAX
    min: int = 0

    def check(self, value: Any) -> int:
        if type(value) is not int:
            raise _wrong_type("an integer", value)
        if not self.min <= value <= self.max:
            raise Oversize(f"must be {self.min} to {self.max}, got {shown(value)}")
        return value

    def describe(self) -> str:
        return f"integer, {self.min} to {self.max}"


@dataclass(frozen=True, slots=True)
class Seconds:
    """A finite, non-negative number of seconds; an integer is taken as well."""

    max: float

    def check(self, value: Any) -> float:
        if type(value) is int and 0 <= value <= self.max:
            return float(value)
        if type(value) is not float:
            raise _wrong_type("a number", value)
        if not math.isfinite(value):
            raise ValueError(f"must be finite, got {value}")
        if not 0 <= value <= self.max:
            raise Oversize(f"must be 0 to {self.max}, got {value}")
        return value

    def describe(self) -> str:
        return f"number, 0 to {self.max:.0f} s"


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    def check(self, value: Any) -> bool:
        if type(value) is not bool:
            raise _wrong_type("true or false", value)
        return value

    def describe(self) -> str:
        return "boolean"


@dataclass(frozen=True, slots=True)
class Text:
    """Unicode text of bounded length, in characters."""

    max: int
    min: int = 0

    def check(self, value: Any) -> str:
        if type(value) is not str:
            raise _wrong_type("text", value)
        if not self.min <= len(value) <= self.max:
            raise Oversize(f"must have {self.min} to {self.max} characters, got {len(value)}")
        return value

    def describe(self) -> str:
        return f"text, {self.min} to {self.max} characters"


@dataclass(frozen=True, slots=True)
class Prose:
    """Text for people. What is too long is cut, on both sides: an explanation must never be what breaks a
    connection."""

    max: int

    def check(self, value: Any) -> str:
        if type(value) is not str:
            raise _wrong_type("text", value)
        return value if len(value) <= self.max else value[: self.max - 3] + "..."

    def describe(self) -> str:
        return f"text for people, cut after {self.max} characters"


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few words."""

    words: tuple[str, ...]

    def check(self, value: Any) -> str:
        if type(value) is not str:
            raise _wrong_type("text", value)
        if value not in self.words:
            raise ValueError(f"must be one of {', '.join(self.words)}, got {shown(value)}")
        return value

    def describe(self) -> str:
        return "one of " + ", ".join(f"`{word}`" for word in self.words)


@dataclass(frozen=True, slots=True)
class Hex:
    """An identifier in lower-case hexadecimal digits; `empty` allows "" for "none" or "any"."""

    digits: int
    empty: bool = False

    def check(self, value: Any) -> str:
        if type(value) is not str:
            raise _wrong_type("text", value)
        if len(value) == self.digits and _HEX.fullmatch(value):
            return value
        if self.empty and not value:
            return value
        raise ValueError(f"must be {self.digits} lower-case hex digits, got {shown(value)}")

    def describe(self) -> str:
        return f"{self.digits} hex digits" + (" or empty" if self.empty else "")


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes of bounded length; `empty` allows none at all where `min` asks for some."""

    max: int
    min: int = 0
    empty: bool = False

    def check(self, value: Any) -> bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise _wrong_type("bytes", value)
        data = value if type(value) is bytes else bytes(value)
        if not (self.min <= len(data) <= self.max or (self.empty and not data)):
            raise Oversize(f"must have {self.min} to {self.max} bytes, got {len(data)}")
        return data

    def describe(self) -> str:
        bounds = f"{self.max} bytes" if self.min == self.max else f"{self.min} to {self.max} bytes"
        return f"{bounds} of data" + (" or none" if self.empty else "")


@dataclass(frozen=True, slots=True)
class BoxList:
    """Boxes of a cache; on the wire bytes, for each eight numbers of 8 bytes, big-endian, from and to along layers,
    parts, heads and tokens.
    """

    items_max: int

    def check(self, value: Any) -> tuple[Box, ...]:
        if isinstance(value, bytes | bytearray | memoryview):
            return self._read(value)
        if not isinstance(value, tuple) or not all(type(box) is Box for box in value):
            raise _wrong_type("boxes", value)
        if len(value) > self.items_max:
            raise Oversize(f"must have at most {self.items_max} boxes, got {len(value)}")
        return value

    def _read(self, data: bytes | bytearray | memoryview) -> tuple[Box, ...]:
        if len(data) > self.items_max * BOX_BYTES:
            raise Oversize(f"must have at most {self.items_max} boxes of {BOX_BYTES} bytes, got {len(data)} bytes")
        if len(data) % BOX_BYTES:
            raise ValueError(f"ends in the middle of a box, after {len(data)} bytes")
        try:
            return tuple(box for numbers in _box.iter_unpack(data) for box in boxes_from(numbers))
        except UsageError as wrong:
            raise ValueError(f"has a box that is none: {wrong.message}") from None

    def packed(self, value: tuple[Box, ...]) -> bytes:
        """As it goes over the wire."""
        return b"".join(_box.pack(*numbers_of([box])) for box in value)

    def describe(self) -> str:
        return f"up to {self.items_max} boxes of {BOX_BYTES} bytes: eight big-endian numbers of 8 bytes each"


@dataclass(frozen=True, slots=True)
class TextList:
    """A list of bounded texts; a tuple in Python."""

    items_max: int
    chars_max: int

    def check(self, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list | tuple):
            raise _wrong_type("a list of texts", value)
        if len(value) > self.items_max:
            raise Oversize(f"must have at most {self.items_max} entries, got {len(value)}")
        for text in value:
            if type(text) is not str:
                raise _wrong_type("a list of texts", text)
            if len(text) > self.chars_max:
                raise Oversize(f"must have entries of at most {self.chars_max} characters, got {len(text)}")
        return value if type(value) is tuple else tuple(value)

    def describe(self) -> str:
        return f"list of up to {self.items_max} texts, each up to {self.chars_max} characters"


@dataclass(frozen=True, slots=True)
class Scalars:
    """A map from names to texts, numbers, booleans and null."""

    items_max: int
    name_chars_max: int
    text_chars_max: int

    def check(self, value: Any) -> dict[str, str | int | float | bool | None]:
        if not isinstance(value, dict):
            raise _wrong_type("a map", value)
        if len(value) > self.items_max:
            raise Oversize(f"must have at most {self.items_max} entries, got {len(value)}")
        for name, entry in value.items():
            if type(name) is not str:
                raise _wrong_type("a map with text as keys", name)
            if len(name) > self.name_chars_max:
                raise Oversize(f"must have keys of at most {self.name_chars_max} characters, got {len(name)}")
            self._check_entry(entry)
        return value

    def _check_entry(self, entry: Any) -> None:
        if type(entry) is str:
            if len(entry) > self.text_chars_max:
                raise Oversize(f"must have texts of at most {self.text_chars_max} characters, got {len(entry)}")
        elif type(entry) is int:
            if not I64_MIN <= entry <= U64_MAX:
                raise Oversize("must have integers of at most 64 bits")
        elif type(entry) is float:
            if not math.isfinite(entry):
                raise ValueError(f"must have finite numbers, got {entry}")
        elif entry is not None and type(entry) is not bool:
            raise _wrong_type("a map of texts, numbers, booleans and null", entry)

    def describe(self) -> str:
        return f"map of up to {self.items_max} texts, numbers, booleans or null"


# -- what may be unpacked ---------------------------------------------------------------------------------------------
# A walk over the bytes of one message that builds nothing. msgpack is compact: a few bytes can announce millions of
# entries, and four megabytes of them can become hundreds of megabytes of empty lists. So the structure is checked
# first, by reading heads and skipping contents: exactly one array of a number and a map with text as keys, nothing
# nested deeper than the limit, no more values in all than the limit, no extension types, and an end exactly where the
# frame ends. The walk costs in proportion to the values and never more than the limit allows.


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


# -- messages ---------------------------------------------------------------------------------------------------------


LENGTH_BYTES = 4  # before every frame: the length of what follows, big-endian
_length = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class Since:
    """In an annotation: the version of the protocol that added this field to a message that was there before.

    Absent on the wire, the field has its default, and with its default it is not sent: so those who never heard of it
    and those who know it read and write the same bytes as long as nobody uses it.
    """

    version: int


class Message:
    """Base of all messages. Construction raises `UsageError` (`TooLarge` for what is only too much) naming the
    field. ``since`` is the version of the protocol that brought the message, ``added`` that of each later field.
    """

    __slots__ = ()
    number: ClassVar[int]
    since: ClassVar[int]
    kinds: ClassVar[tuple[tuple[str, Kind], ...]]
    added: ClassVar[Mapping[str, int]]
    optional: ClassVar[Mapping[str, object]]
    packed: ClassVar[Mapping[str, Callable[[Any], bytes]]]

    def __post_init__(self) -> None:
        for name, kind in self.kinds:
            value = getattr(self, name)
            try:
                checked = kind.check(value)
            except ValueError as wrong:
                error = TooLarge if isinstance(wrong, Oversize) else UsageError
                what = type(self).__name__
                raise error(f"{what}.{name} {wrong}", kind=what, field=name) from None
            if checked is not value:
                object.__setattr__(self, name, checked)

    def __repr__(self) -> str:
        """Fields that are set; bytes by their number alone, for they may be long and may be secret."""
        shown = []
        for name, _ in self.kinds:
            value = getattr(self, name)
            if value or (value == 0 and type(value) is not float):
                shown.append(f"{name}={f'<{len(value)} bytes>' if type(value) is bytes else repr(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """A well-formed message with a number that this version does not know. `rid` is 0 when it carried none."""

    number: int
    rid: int


M = TypeVar("M", bound=Message)
MESSAGES: dict[int, type[Message]] = {}


def numbered(number: int, *, since: int = 1) -> Callable[[type[M]], type[M]]:
    """Give a message its number, for ever, and read the bounds of its fields out of its annotations."""

    def register(declared: type[M]) -> type[M]:
        assert number not in MESSAGES, f"two messages have the number {number}"
        hints = get_type_hints(declared, include_extras=True)
        fields = dataclasses.fields(declared)  # type: ignore[arg-type]
        declared.number = number
        declared.since = since
        declared.kinds = tuple((item.name, hints[item.name].__metadata__[0]) for item in fields)
        declared.packed = {name: kind.packed for name, kind in declared.kinds if isinstance(kind, BoxList)}
        marks = {item.name: _mark(hints[item.name].__metadata__) for item in fields}
        declared.added = {name: mark.version for name, mark in marks.items() if mark is not None}
        declared.optional = {item.name: _default(item) for item in fields if item.name in declared.added}
        assert all(version > since for version in declared.added.values()), "a field is as old as its message"
        MESSAGES[number] = declared
        return declared

    return register


def _mark(metadata: tuple[object, ...]) -> Since | None:
    return next((item for item in metadata if isinstance(item, Since)), None)


def _default(item: dataclasses.Field[object]) -> object:
    """Whoever does not know a field cannot send it."""
    found = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
    assert found is not dataclasses.MISSING, f"{item.name} came later and has no default"
    return found


def unread(message: Message, version: int) -> tuple[str, ...]:
    """Fields that say something in this message, and that a peer which speaks ``version`` has never heard of."""
    return tuple(
        name
        for name, since in message.added.items()
        if since > version and getattr(message, name) != message.optional[name]
    )


def encode(message: Message, frame_bytes_max: int | None = None) -> bytes:
    """The whole frame, length included. Raises `TooLarge` when it would exceed `frame_bytes_max`."""
    fields = {name: getattr(message, name) for name, _ in message.kinds}
    for name, default in message.optional.items():
        if fields[name] == default:  # as before the field existed, byte for byte
            del fields[name]
    for name, packed in message.packed.items():
        if name in fields:
            fields[name] = packed(fields[name])
    what = type(message).__name__
    try:
        payload = msgpack.packb((message.number, fields))
    except UnicodeEncodeError as wrong:
        raise UsageError(f"{what} has a text that is no Unicode: {wrong}", kind=what) from None
    if frame_bytes_max is not None and len(payload) > frame_bytes_max:
        raise TooLarge(f"{what} is larger than a frame may be", kind=what, bytes=len(payload), limit=frame_bytes_max)
    frame: bytes = _length.pack(len(payload)) + payload
    return frame


def decode(payload: bytes, registry: Mapping[int, type[Message]] = MESSAGES) -> Message | Unknown:
    """One message from what follows a frame's length. Raises `ProtocolError` naming message and field, and nothing
    else."""
    check_structure(payload)
    try:
        number, fields = msgpack.unpackb(payload)
    except ValueError as wrong:  # text that is not UTF-8, or a key that is no text
        raise ProtocolError(f"a message is not valid msgpack: {wrong}") from None
    declared = registry.get(number)
    if declared is None:
        rid = fields.get("rid", 0)
        return Unknown(number=number, rid=rid if type(rid) is int and 0 <= rid <= U64_MAX else 0)
    try:
        known = {name: fields[name] for name, _ in declared.kinds if name not in declared.optional or name in fields}
        return declared(**known)
    except KeyError as missing:
        name = str(missing.args[0])
        raise _bad(f"{declared.__name__}.{name} is missing", declared, name) from None
    except UsageError as wrong:
        raise _bad(wrong.message, declared, str(wrong.fields["field"])) from None


def _bad(why: str, declared: type[Message], name: str) -> ProtocolError:
    return ProtocolError(f"the peer sent a bad message: {why}", kind=declared.__name__, field=name)

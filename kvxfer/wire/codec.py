"""What all messages share: validation on construction, the registry of numbers, and the one codec.

The idea: a message is declared once, as a frozen dataclass whose annotations carry the bounds. Whoever holds a message
holds a valid one, because construction checks every field; so a caller hears about a bad value as `UsageError` before a
byte is sent, and the same check turns a peer's bad value into `ProtocolError`. Encoded, a message is msgpack of
``[number, {field: value}]`` behind a length of 4 bytes. Nothing is built from a peer's bytes before their structure
(depth, counts, extent) has been walked.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeVar, get_type_hints

import msgpack

from kvxfer.errors import ProtocolError, TooLarge, UsageError
from kvxfer.wire.fields import U64_MAX, Kind, Oversize
from kvxfer.wire.structure import check_structure

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

"""Values for every kind of field: ordinary ones, the largest that is allowed, and wrong ones.

They are derived from the declarations, so that a new message is tested as soon as it is declared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack
from hypothesis import strategies as st

from kvxfer.coverage import Box
from kvxfer.wire.codec import (
    BOX_BYTES,
    U64_MAX,
    Blob,
    BoxList,
    Flag,
    Hex,
    Kind,
    OneOf,
    Prose,
    Scalars,
    Seconds,
    Text,
    TextList,
    UInt,
)
from kvxfer.wire.messages import MESSAGES, Message

NAN, INFINITY = float("nan"), float("inf")


def ordinary(kind: Kind, seed: int) -> Any:
    """A value as it may come up, different for different seeds."""
    match kind:
        case UInt():
            return min(kind.max, max(kind.min, 7 * seed + 1))
        case Seconds():
            return 0.5 + seed
        case Flag():
            return True
        case OneOf():
            return kind.words[seed % len(kind.words)]
        case Text() | Prose():
            return f"text-{seed}-ä"
        case Hex():
            return f"{seed + 0xABC:0{kind.digits}x}"
        case Blob():
            return bytes((seed + place) % 256 for place in range(max(kind.min, min(kind.max, 5))))
        case BoxList():
            return (_box(seed),)
        case TextList():
            return ("10.0.0.1:17800", f"[::1]:{seed}")
        case Scalars():
            return {"limit": seed, "hint": "why", "ratio": 0.5, "final": False, "none": None}
    raise AssertionError(f"no sample for {kind}")


def largest(kind: Kind) -> Any:
    match kind:
        case UInt() | Seconds():
            return kind.max
        case OneOf():
            return kind.words[-1]
        case Text() | Prose():
            return "x" * kind.max
        case Blob():
            return b"x" * kind.max
        case BoxList():
            return (_box(1),) * kind.items_max
        case TextList():
            return ("x" * kind.chars_max,) * kind.items_max
        case Scalars():
            names = [f"{place:0{kind.name_chars_max}d}" for place in range(kind.items_max)]
            return dict.fromkeys(names, "x" * kind.text_chars_max)
    return ordinary(kind, 0)


def wrong(kind: Kind) -> Iterator[Any]:
    """Values that msgpack can carry and that the field must not take."""
    yield from _of_wrong_type(kind)
    match kind:
        case UInt():
            yield from (value for value in (kind.min - 1, kind.max + 1) if value <= U64_MAX)
        case Seconds():
            yield from (-1, -0.001, kind.max * 2, NAN, INFINITY, -INFINITY)
        case OneOf():
            yield from ("", "nonsense")
        case Text():
            yield "x" * (kind.max + 1)
            if kind.min:
                yield "x" * (kind.min - 1)
        case Hex():
            yield from ("0" * (kind.digits - 1), "0" * (kind.digits + 1), "G" * kind.digits, "A" * kind.digits)
            yield from ("0" * (kind.digits - 1) + "\n", "٣" * kind.digits)
            if not kind.empty:
                yield ""
        case Blob():
            yield bytes(kind.max + 1)
            if kind.min:
                yield bytes(kind.min - 1)
        case BoxList():
            yield from (b"x", bytes(BOX_BYTES - 1), b"\xff" * BOX_BYTES, bytes((kind.items_max + 1) * BOX_BYTES))
        case TextList():
            yield from (["x"] * (kind.items_max + 1), ["x" * (kind.chars_max + 1)], [1], [b"x"], [["x"]])
        case Scalars():
            yield from ({"x": [1]}, {"x": {}}, {"x": b"x"}, {"x": NAN}, {b"x": 1})
            yield {"x" * (kind.name_chars_max + 1): 1}
            yield {"x": "x" * (kind.text_chars_max + 1)}
            yield {str(place): 1 for place in range(kind.items_max + 1)}


def _of_wrong_type(kind: Kind) -> Iterator[Any]:
    yield None
    values = {bool: True, int: 1, float: 1.5, str: "x", bytes: b"x", list: [], dict: {}}
    match kind:
        case UInt():
            fits: tuple[type, ...] = (int,)
        case Seconds():
            fits = (int, float)
        case Flag():
            fits = (bool,)
        case Blob() | BoxList():
            fits = (bytes,)
        case TextList():
            fits = (list,)
        case Scalars():
            fits = (dict,)
        case _:
            fits = (str,)
    yield from (value for type_, value in values.items() if type_ not in fits)


def full(message: type[Message]) -> Message:
    """A message with an ordinary value in every field."""
    return message(**{name: ordinary(kind, place) for place, (name, kind) in enumerate(message.kinds)})


def payload(number: int, fields: dict[Any, Any]) -> bytes:
    """Encoded as the codec would, but without looking at the values."""
    packed: bytes = msgpack.packb([number, fields])
    return packed


def raw(message: Message) -> dict[str, Any]:
    fields = {name: getattr(message, name) for name, _ in message.kinds}
    return fields | {name: packed(fields[name]) for name, packed in message.packed.items()}


def _box(seed: int) -> Box:
    return Box(layers=range(seed), parts=range(2), heads=range(1, 2 + seed), tokens=range(16 * seed))


# -- hypothesis -------------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
SCALAR = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), U64_MAX), st.floats(allow_nan=False, allow_infinity=False), TEXT
)


def values(kind: Kind) -> st.SearchStrategy[Any]:
    match kind:
        case UInt():
            return st.integers(kind.min, kind.max)
        case Seconds():
            return st.floats(0, kind.max)
        case Flag():
            return st.booleans()
        case OneOf():
            return st.sampled_from(kind.words)
        case Prose():
            return TEXT
        case Text():
            return st.text(st.characters(exclude_categories=("Cs",)), min_size=kind.min, max_size=min(kind.max, 20))
        case Hex():
            digits = st.text("0123456789abcdef", min_size=kind.digits, max_size=kind.digits)
            return st.one_of(digits, st.just("")) if kind.empty else digits
        case Blob():
            some = st.binary(min_size=kind.min, max_size=min(kind.max, max(kind.min, 40)))
            return st.one_of(some, st.just(b"")) if kind.empty else some
        case BoxList():
            return st.lists(st.integers(0, 99).map(_box), max_size=kind.items_max).map(tuple)
        case TextList():
            return st.lists(TEXT, max_size=min(4, kind.items_max)).map(tuple)
        case Scalars():
            return st.dictionaries(TEXT, SCALAR, max_size=min(4, kind.items_max))
    raise AssertionError(f"no strategy for {kind}")


def messages() -> st.SearchStrategy[Message]:
    """Any valid message."""
    return st.one_of(
        [st.builds(message, **{name: values(kind) for name, kind in message.kinds}) for message in MESSAGES.values()]
    )

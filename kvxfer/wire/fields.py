"""What may stand in one field of a control message: the kinds of values and their bounds.

Each kind is a small frozen object that is put beside the field with `Annotated`, so the declaration of a message is
also its whole validation. A kind answers one question: given any Python value (from a caller or just unpacked from a
peer's bytes), either return it in its one normal form, or raise `ValueError` saying what is wrong. Nothing here knows
about messages.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Protocol

U64_MAX = 2**64 - 1
I64_MIN = -(2**63)
SHOWN_CHARS_MAX = 40
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

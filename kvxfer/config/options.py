"""What one configuration option is, and how a value from a file, the environment, a flag or code becomes typed.

The idea: an `Option` holds everything about itself (kind, range, unit, text for people), so reading a value, refusing
it, the command line's flags and the documentation all come from one table and cannot disagree. Nothing is guessed: a
value is accepted in the documented form or refused with key, value, accepted range and source.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from kvxfer.addresses import is_numeric, is_wildcard, parse_address, parse_host
from kvxfer.errors import ConfigError, UsageError

Kind = Literal["text", "int", "size", "seconds", "bool", "list", "address", "host"]
LIST_ITEMS_MAX = 16
TEXT_CHARS_MAX = 4096
SIZE_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"([0-9]{1,40}) ?([A-Za-z]*)")
_INT = re.compile(r"[+-]?[0-9]{1,40}")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


class _Wrong(Exception):
    """Why a value cannot be accepted; `Option.parse` turns it into a `ConfigError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option. `name` is the TOML key and the field of `Config`; flag and environment key derive from it."""

    name: str = ""
    kind: Kind
    default: Any = None
    doc: str = ""
    unit: str = ""
    min: float = 0
    max: float = 0
    choices: tuple[str, ...] = ()
    pattern: str = ""
    expects: str = ""  # replaces the generated text of what is accepted
    empty: bool = False  # the empty text is a value (off, automatic)
    wildcard: bool = True  # 0.0.0.0 and :: make sense here
    numeric: bool = False  # names are refused: it will be bound, and its security depends on what it is
    items_max: int = LIST_ITEMS_MAX
    secret: bool = False  # never shown, never taken from the command line, where every user of the host can read it

    @property
    def flag(self) -> str | None:
        return None if self.secret else "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return "KVXFER_" + self.name.upper()

    @property
    def accepted(self) -> str:
        """The accepted range, for people."""
        if self.expects:
            return self.expects
        match self.kind:
            case "int":
                return f"an integer from {self.min:.0f} to {self.max:.0f}"
            case "size":
                low, high = format_size(int(self.min)), format_size(int(self.max))
                return f"bytes from {low} to {high}, as a number or with KiB, MiB or GiB"
            case "seconds":
                return f"a number of seconds from {self.min:g} to {self.max:g}, without a unit"
            case "bool":
                return "true or false"
            case _ if self.choices:
                items = ", ".join(self.choices)
                return f"a list of distinct items from: {items}" if self.kind == "list" else f"one of: {items}"
            case "list" | "address":
                return "addresses host:port or [ipv6]:port" if self.kind == "list" else "host:port or [ipv6]:port"
            case _:
                return "a numeric address" if self.kind == "host" else "text"

    def show(self, value: object) -> str:
        """The value as it may appear in messages and listings."""
        if self.secret:
            return "(hidden)" if value else ""
        if self.kind == "list" and isinstance(value, tuple):
            return ",".join(value)
        if self.kind == "size" and isinstance(value, int):
            return format_size(value)
        if self.kind == "seconds" and isinstance(value, float):
            return f"{value:g}"
        return str(value).lower() if isinstance(value, bool) else str(value)

    def parse(self, value: object, source: str) -> Any:
        """The typed value. Raises `ConfigError` naming key, value, accepted range and source."""
        try:
            return _PARSERS[self.kind](self, value)
        except (_Wrong, UsageError) as wrong:
            shown = "(hidden)" if self.secret else _shown(value)
            why = wrong.message if isinstance(wrong, UsageError) else str(wrong)
            hint = wrong.hint if isinstance(wrong, UsageError) else None
            raise ConfigError(
                f"bad value for {self.name}: {why}",
                key=self.name,
                value=shown,
                accepted=self.accepted,
                source=source,
                hint=hint,
            ) from None


def format_size(value: int) -> str:
    """Bytes in the largest unit that shows them exactly."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if value and value % SIZE_UNITS[unit] == 0:
            return f"{value // SIZE_UNITS[unit]}{unit}"
    return str(value)


def _shown(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 10**40:
        return "an integer of more than 40 digits"
    return repr(value)[:120]


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that a typo most likely meant, or None."""
    found = get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def _in_range(option: Option, value: float) -> None:
    if not option.min <= value <= option.max:
        raise _Wrong("out of range")


def _parse_int(option: Option, value: object) -> int:
    if isinstance(value, str) and _INT.fullmatch(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Wrong("not an integer")
    _in_range(option, value)
    return value


def _parse_size(option: Option, value: object) -> int:
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if not match:
            raise _Wrong("not a size")
        if match[2] not in SIZE_UNITS:
            raise _Wrong(f"unknown unit {match[2][:16]!r}")
        value = int(match[1]) * SIZE_UNITS[match[2]]
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Wrong("not a size")
    _in_range(option, value)
    return value


def _parse_seconds(option: Option, value: object) -> float:
    if isinstance(value, str):
        if not re.fullmatch(r"[+-]?([0-9]{1,40}(\.[0-9]{0,9})?|\.[0-9]{1,9})", value):
            raise _Wrong("not a number")
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Wrong("not a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise _Wrong("not finite")
    _in_range(option, value)
    return float(value)


def _parse_bool(option: Option, value: object) -> bool:
    if isinstance(value, str) and value.lower() in _TRUE + _FALSE:
        return value.lower() in _TRUE
    if not isinstance(value, bool):
        raise _Wrong("neither true nor false")
    return value


def _parse_text(option: Option, value: object) -> str:
    if not isinstance(value, str):
        raise _Wrong("not a text")
    if not value and option.empty:
        return value
    if len(value) > option.max:
        raise _Wrong("too long")
    if "\0" in value or "\n" in value:
        raise _Wrong("contains a line end or a zero byte")
    if option.choices and value not in option.choices:
        close = nearest(value, option.choices)
        raise _Wrong("unknown choice" + (f", did you mean {close}?" if close else ""))
    if option.pattern and not re.fullmatch(option.pattern, value):
        raise _Wrong("does not have the expected form")
    if not value:
        raise _Wrong("empty")
    return value


def _parse_list(option: Option, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [item.strip() for item in value.split(",")] if value.strip() else []
    if not isinstance(value, list | tuple):
        raise _Wrong("not a list")
    if len(value) > option.items_max:
        raise _Wrong(f"more than {option.items_max} items")
    if not value and not option.empty:
        raise _Wrong("empty")
    items = tuple(_parse_item(option, item) for item in value)
    if len(set(items)) != len(items):
        raise _Wrong("an item occurs twice")
    return items


def _parse_item(option: Option, item: object) -> str:
    if not isinstance(item, str):
        raise _Wrong("an item is not a text")
    if option.pattern:
        if not re.fullmatch(option.pattern, item):
            raise _Wrong(f"the item {item[:40]!r} does not have the expected form")
        return item
    if not option.choices:
        return _parse_address(option, item)
    bare = item.removeprefix("fault+")
    if bare not in option.choices or item == "fault+auto":
        close = nearest(bare, option.choices)
        raise _Wrong(f"unknown item {item[:40]!r}" + (f", did you mean {close}?" if close else ""))
    return item


def _parse_address(option: Option, value: object) -> str:
    if value == "" and option.empty and option.kind == "address":
        return ""
    if not isinstance(value, str):
        raise _Wrong("not a text")
    address = parse_address(value, default_port=0 if option.kind == "list" else None)
    _check_host(option, address.host)
    return str(address)


def _parse_host(option: Option, value: object) -> str:
    if value == "" and option.empty:
        return ""
    if not isinstance(value, str):
        raise _Wrong("not a text")
    host = parse_host(value)
    _check_host(option, host)
    return host


def _check_host(option: Option, host: str) -> None:
    if option.numeric and not is_numeric(host) and host != "localhost":
        raise _Wrong("a name cannot be bound, write the numeric address")
    if not option.wildcard and is_wildcard(host):
        raise _Wrong("nobody can dial 0.0.0.0 or ::")


_PARSERS: dict[Kind, Callable[[Option, object], Any]] = {
    "text": _parse_text,
    "int": _parse_int,
    "size": _parse_size,
    "seconds": _parse_seconds,
    "bool": _parse_bool,
    "list": _parse_list,
    "address": _parse_address,
    "host": _parse_host,
}

"""One finding: what was looked at, how it is, what was found, what to do. And how numbers are written in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How something is. `NOT_HERE` is no fault: the host lacks what another one may have."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    NOT_HERE = "not here"


_GRAVITY = {State.NOT_HERE: 0, State.OK: 1, State.WARNING: 2, State.PROBLEM: 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """``found`` is one line, and so is ``advice``: what to do about it, empty when nothing is to be done."""

    group: str
    check: str
    state: State
    found: str
    advice: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "found", one_line(self.found))
        object.__setattr__(self, "advice", one_line(self.advice))


@dataclass(frozen=True, slots=True)
class Group:
    """Makes the findings of one group."""

    name: str

    def ok(self, check: str, found: str, advice: str = "") -> Finding:
        return Finding(group=self.name, check=check, state=State.OK, found=found, advice=advice)

    def warning(self, check: str, found: str, advice: str) -> Finding:
        return Finding(group=self.name, check=check, state=State.WARNING, found=found, advice=advice)

    def problem(self, check: str, found: str, advice: str) -> Finding:
        return Finding(group=self.name, check=check, state=State.PROBLEM, found=found, advice=advice)

    def not_here(self, check: str, found: str, advice: str = "") -> Finding:
        return Finding(group=self.name, check=check, state=State.NOT_HERE, found=found, advice=advice)


def worst(findings: Iterable[Finding]) -> State:
    """The gravest state of all; OK when there are none."""
    return max((finding.state for finding in findings), key=_GRAVITY.__getitem__, default=State.OK)


def one_line(text: str) -> str:
    """Without line ends and runs of blanks."""
    return " ".join(text.split())


def size(value: float) -> str:
    """Bytes for people."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= scale:
            return f"{value / scale:.1f}".removesuffix(".0") + f" {unit}"
    return f"{value:.0f} bytes"


def some(items: Iterable[object], limit: int = 8) -> str:
    """A comma list that stays short."""
    words = [str(item) for item in items]
    more = f" and {len(words) - limit} more" if len(words) > limit else ""
    return ", ".join(words[:limit]) + more

"""Notices that came before anybody listened, and the count of those that fitted nothing.

The idea: on the data path a notice may overtake what it is about (the owner has made the descriptor, and looks after it
a moment later). Dropping it would leave the other side's release unheard until a lease ends, so it is kept for a while,
and handed over in order when somebody listens. Kept ones are bounded in number and age; what is given up is counted by
type and reason, and nothing here ever raises.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

KEPT_MAX, KEPT_PER_KEY_MAX = 4096, 64
KEPT_S = 10.0
E = TypeVar("E")


class EarlyNotices(Generic[E]):
    """Kept by a key (a grant, a claim), oldest key first. ``now`` comes in with every call."""

    def __init__(
        self, *, kept_max: int = KEPT_MAX, per_key_max: int = KEPT_PER_KEY_MAX, kept_s: float = KEPT_S
    ) -> None:
        self._kept: OrderedDict[int, tuple[float, list[E]]] = OrderedDict()
        self._kept_max = kept_max
        self._per_key_max = per_key_max
        self._kept_s = kept_s
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def keep(self, key: int, notice: E, now: float, given_up: Callable[[str, E], None]) -> None:
        """Keep one; ``given_up(reason, notice)`` hears of each that has to go for it (perhaps of itself)."""
        self.expire(now, given_up)
        _, kept = self._kept.setdefault(key, (now + self._kept_s, []))
        if len(kept) >= self._per_key_max:
            given_up("too_many", notice)
            return
        kept.append(notice)
        self._count += 1
        while self._count > self._kept_max:
            self._drop("too_many", given_up)

    def take(self, key: int, now: float, given_up: Callable[[str, E], None]) -> list[E]:
        """What came for this key, in the order in which it came; each is handed over once."""
        self.expire(now, given_up)
        _, kept = self._kept.pop(key, (0.0, []))
        self._count -= len(kept)
        return kept

    def expire(self, now: float, given_up: Callable[[str, E], None]) -> None:
        """Give up what nobody asked for in time."""
        while self._kept and next(iter(self._kept.values()))[0] <= now:
            self._drop("nobody_listened", given_up)

    def _drop(self, reason: str, given_up: Callable[[str, E], None]) -> None:
        _, (_, kept) = self._kept.popitem(last=False)
        self._count -= len(kept)
        for notice in kept:
            given_up(reason, notice)


class Unexpected:
    """Counts of notices that fitted nothing, by type and reason (words known beforehand, so there are few)."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.on_add: Callable[[], None] | None = None

    def add(self, kind: str, reason: str) -> None:
        """One more."""
        self.counts[kind, reason] += 1
        if self.on_add is not None:
            self.on_add()

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.counts.values())

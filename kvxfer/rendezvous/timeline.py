"""Deadlines of many things, cheap to move: a heap that forgets lazily.

The idea: setting a deadline only pushes; an entry in the heap counts when it is still the current one of its key. When
stale entries outnumber live ones the heap is rebuilt, so its size stays proportional to the number of keys however
often a lease is renewed.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
_STALE_MIN = 64


class Timeline(Generic[K]):
    """At most one deadline per key. Times are monotonic seconds, given by the caller."""

    def __init__(self) -> None:
        self._current: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._current)

    def set(self, key: K, at: float) -> None:
        """Give `key` the deadline `at`, instead of any earlier one."""
        self._sequence += 1
        self._current[key] = (at, self._sequence)
        heapq.heappush(self._heap, (at, self._sequence, key))
        if len(self._heap) > 2 * len(self._current) + _STALE_MIN:
            self._heap = [(at, sequence, key) for key, (at, sequence) in self._current.items()]
            heapq.heapify(self._heap)

    def drop(self, key: K) -> None:
        """Forget the deadline of `key`, if it has one."""
        self._current.pop(key, None)

    def next(self) -> float | None:
        """The earliest deadline."""
        self._skip_stale()
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> list[K]:
        """Remove and return the keys whose deadline has come, earliest first, equal ones in the order of setting."""
        due = []
        while (at := self.next()) is not None and at <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._current[key]
            due.append(key)
        return due

    def _skip_stale(self) -> None:
        while self._heap:
            at, sequence, key = self._heap[0]
            if self._current.get(key) == (at, sequence):
                return
            heapq.heappop(self._heap)

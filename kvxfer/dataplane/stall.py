"""Noticing that something which runs does not move on: a peer that is frozen, a link that lost its other end.

The idea: whoever runs is looked at now and then, and says how far it is; when that number has stayed the same for
`stall_s` seconds, it is told that it is stalled, and told again when it moves on. Looking costs nothing while nothing
runs, and one turn looks at a bounded number, so that ten thousand transfers do not hold the loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

LOOKS_PER_STALL = 4
LOOKS_MAX = 500  # in one turn
TURN_S_MIN = 0.01


class Watched(Protocol):
    """What is told that it is stalled, or no longer."""

    def mark_stalled(self, stalled: bool) -> None: ...


Progress = Callable[[], int | None]  # only grows; None: it does not wait for a peer just now


@dataclass(slots=True)
class _Look:
    progress: Progress
    due: float
    last: int | None
    since: float
    stalled: bool = False


class StallWatch:
    """Watches what runs; ``note`` hears how many are stalled whenever that changes. For one event loop."""

    def __init__(self, stall_s: float, note: Callable[[int], None]) -> None:
        self._stall_s = stall_s
        self._look_s = stall_s / LOOKS_PER_STALL
        self._note = note
        self._watched: OrderedDict[Watched, _Look] = OrderedDict()  # in the order in which they are due
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.stalled = 0

    def __len__(self) -> int:
        return len(self._watched)

    def begin(self, item: Watched, progress: Progress) -> None:
        """It runs from now on."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._watched[item] = _Look(progress, now + self._look_s, 0, now)
        if self._timer is None and not self._closed:
            self._timer = loop.call_later(self._look_s, self._turn)

    def end(self, item: Watched) -> None:
        """It is over; harmless when it was not watched."""
        look = self._watched.pop(item, None)
        if look is not None and look.stalled:
            self._count(-1)

    def aclose(self) -> None:
        """Look no more."""
        self._closed = True
        self._watched.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _turn(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        changed = 0
        for _ in range(min(LOOKS_MAX, len(self._watched))):
            item, look = next(iter(self._watched.items()))
            if look.due > now:
                break
            self._watched.move_to_end(item)
            look.due = now + self._look_s
            changed += self._look(item, look, now)
        if changed:
            self._count(changed)
        if self._watched and not self._closed:
            due = next(iter(self._watched.values())).due
            self._timer = loop.call_later(max(TURN_S_MIN, due - now), self._turn)

    def _look(self, item: Watched, look: _Look, now: float) -> int:
        """How many more are stalled because of it."""
        progress = look.progress()
        if progress is None or progress != look.last:
            look.last, look.since = progress, now
        stalled = now - look.since >= self._stall_s
        if stalled == look.stalled:
            return 0
        look.stalled = stalled
        item.mark_stalled(stalled)
        return 1 if stalled else -1

    def _count(self, change: int) -> None:
        self.stalled += change
        self._note(self.stalled)

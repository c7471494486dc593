"""Who may use which piece of a receiving memory, and a pattern in whatever is free: a byte that moves where nothing
runs any more is seen when the piece is taken next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvxfer.errors import BusyError

FREE_BYTE = 0xC3
WRONG_MAX = 32
Bytes = npt.NDArray[np.uint8]


class Wrongs:
    """Broken promises, in bounded memory."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[str] = []

    def add(self, what: str) -> None:
        """One more; the first few are kept in full."""
        self.count += 1
        if len(self.first) < WRONG_MAX:
            self.first.append(what)


class Pieces:
    """Equal pieces of memory, numbered; ``views`` gives the bytes of one (in one or more parts)."""

    def __init__(self, views: list[list[Bytes]], wrongs: Wrongs, what: str) -> None:
        self._views = views
        self._wrongs = wrongs
        self._what = what
        self._free = deque(range(len(views)))
        for piece in self._free:
            self._fill(piece)

    def take(self, count: int, who: str) -> list[int]:
        """The pieces that were free for longest; `BusyError` when there are not so many."""
        if len(self._free) < count:
            raise BusyError(f"{who}: no {self._what} is free", wanted=count, free=len(self._free))
        taken = [self._free.popleft() for _ in range(count)]
        for piece in taken:
            self.check(piece, who)
        return taken

    def check(self, piece: int, who: str) -> None:
        """Nothing may have moved in a free piece."""
        for part in self._views[piece]:
            if not (part == FREE_BYTE).all():
                at = int(np.flatnonzero(part != FREE_BYTE)[0])
                self._wrongs.add(f"{who}: a byte moved in {self._what} {piece} at {at} while it was free")
                return

    def give(self, pieces: Iterable[int]) -> None:
        """Back again, and nobody can reach them: they hold the pattern from now on."""
        for piece in pieces:
            self._fill(piece)
            self._free.append(piece)

    def _fill(self, piece: int) -> None:
        for part in self._views[piece]:
            part[:] = FREE_BYTE

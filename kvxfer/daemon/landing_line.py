"""Those who wait for room in the landing pool: each node has a line of its own, and the one that came first goes first.

The idea: small ones may go before a large one for which there is no room yet, so that it does not hold up a pool that
is nearly free, but only so often: then it is its turn, and nobody is passed over for ever. Who waits for room within
its own node's share holds up nobody else. Who waits holds no room, places and the bytes of what was asked are limited
(for one node and for all), and each wait has an end: room, its time, the end of whoever asked, or of this node's
service.
"""

from __future__ import annotations

import asyncio
import enum
import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from kvxfer.deadline import Deadline
from kvxfer.errors import KvxferError, TooManyPending
from kvxfer.rendezvous.postings import too_many
from kvxfer.rendezvous.shares import Shares

PASSES_MAX = 16  # so many that came later go first
OF_EACH_MAX, LOOKS_MAX = 4, 256  # of one node's line, and of all lines, so many are looked at for the next turn


class Room(enum.Enum):
    """What there is for one that asks."""

    FITS = "fits"
    NONE = "none"
    SHARE = "share"  # its node has its share: no reason to hold up others


@dataclass(slots=True, eq=False)
class _Waiting:
    number: int
    account: Hashable
    room: Callable[[], Room]
    asked: tuple[object, int]
    looked: asyncio.Future[None]  # resolves when it is worth another look
    passed: int = 0


class Line:
    """All methods belong to the loop's thread. ``limit`` may wait at a time."""

    def __init__(self, limit: int) -> None:
        self._places = Shares(limit)
        self._lines: dict[Hashable, OrderedDict[int, _Waiting]] = {}
        self._by_request: dict[tuple[object, int], _Waiting] = {}
        self._last = 0
        self._error: KvxferError | None = None

    def __len__(self) -> int:
        return self._places.total

    def others(self, account: Hashable) -> bool:
        """Somebody of another node waits."""
        return self._places.others(account)

    async def wait(
        self,
        room: Callable[[], Room],
        *,
        account: Hashable,
        asker: object,
        request: int,
        gone: asyncio.Future[Any],
        wait_s: float,
        then: Callable[[], None],
    ) -> bool:
        """Call ``then``, which takes the room, when it is this one's turn; False when it never was.

        Nothing is called, and True returned, when nobody wants it any more. Raises `TooManyPending`, what ``then``
        raises, and the error of `fail`.
        """
        if not self._places.room(account):
            raise self._full(account)
        deadline, loop = Deadline.after(wait_s), asyncio.get_running_loop()
        mine = self._enter(room, account, (asker, request), loop.create_future())
        try:
            while (turn := self._turn()) is None or turn[0] is not mine:
                mine.looked = loop.create_future()
                await asyncio.wait(
                    (mine.looked, gone), timeout=deadline.remaining(), return_when=asyncio.FIRST_COMPLETED
                )
                if mine.looked.cancelled() or gone.done():
                    return True
                if self._error is not None:
                    raise self._error
                if not mine.looked.done():
                    return False
            for other in turn[1]:
                other.passed += 1
            then()
            return True
        finally:
            self._leave(mine)
            self.look()

    def pass_all(self) -> bool:
        """Whether one that does not wait, and fits, may go before all these; it is counted as having done so."""
        before = [one for one in self._first() if one.room() is not Room.SHARE]
        if any(one.passed >= PASSES_MAX or one.room() is Room.FITS for one in before):
            return False
        for one in before:
            one.passed += 1
        return True

    def look(self) -> None:
        """There may be room for one of them."""
        turn = self._turn()
        if turn is not None and not turn[0].looked.done():
            turn[0].looked.set_result(None)

    def give_up(self, asker: object, request: int) -> None:
        """Nobody waits for the answer of this request any more."""
        if (one := self._by_request.get((asker, request))) is not None:
            one.looked.cancel()

    def fail(self, error: KvxferError) -> None:
        """Nobody will have a turn from now on."""
        self._error = error
        for one in tuple(self._by_request.values()):
            if not one.looked.done():
                one.looked.set_result(None)

    def _full(self, account: Hashable) -> TooManyPending:
        return too_many("wait for room in the landing pool", "waiting_max", self._places, account)

    def _enter(
        self, room: Callable[[], Room], account: Hashable, asked: tuple[object, int], looked: asyncio.Future[None]
    ) -> _Waiting:
        self._last += 1
        mine = _Waiting(self._last, account, room, asked, looked)
        self._places.take(account)
        self._lines.setdefault(account, OrderedDict())[mine.number] = mine
        self._by_request[asked] = mine
        return mine

    def _leave(self, mine: _Waiting) -> None:
        self._places.give(mine.account)
        line = self._lines[mine.account]
        del line[mine.number]
        if not line:
            del self._lines[mine.account]
        if self._by_request.get(mine.asked) is mine:
            del self._by_request[mine.asked]

    def _first(self) -> list[_Waiting]:
        """Those who came first, of each node and of all."""
        heads = (one for line in self._lines.values() for one in islice(line.values(), OF_EACH_MAX))
        return heapq.nsmallest(LOOKS_MAX, heads, key=lambda one: one.number)

    def _turn(self) -> tuple[_Waiting, list[_Waiting]] | None:
        """Whose turn it is, and whom it passes; None: nobody's."""
        passed: list[_Waiting] = []
        for one in self._first():
            room = one.room()
            if room is Room.FITS:
                return one, passed
            if room is Room.NONE:
                if one.passed >= PASSES_MAX:
                    return None
                passed.append(one)
        return None

"""Those who wait for room in the landing pool, in the order in which they came.

The idea: only the first may take room, so that a large request is not passed over for ever by small ones behind it. Who
waits holds nothing, and each wait has an end: room, its time, the end of whoever asked, or of this node's service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvxfer.deadline import Deadline
from kvxfer.errors import KvxferError, TooManyPending


@dataclass(slots=True, eq=False)
class _Waiting:
    fits: Callable[[], bool]
    asker: object
    request: int
    looked: asyncio.Future[None]  # resolves when it is worth another look


class Line:
    """All methods belong to the loop's thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: list[_Waiting] = []
        self._error: KvxferError | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(
        self,
        fits: Callable[[], bool],
        *,
        asker: object,
        request: int,
        gone: asyncio.Future[Any],
        wait_s: float,
        then: Callable[[], None],
    ) -> bool:
        """Call ``then``, which takes the room, when it is this one's turn and ``fits``; False when it never was.

        Nothing is called, and True returned, when nobody wants it any more. Raises `TooManyPending`, what ``then``
        raises, and the error of `fail`.
        """
        if len(self._waiting) >= self._limit:
            raise TooManyPending("too many wait for room in the landing pool", waiting_max=self._limit)
        deadline, loop = Deadline.after(wait_s), asyncio.get_running_loop()
        mine = _Waiting(fits, asker, request, loop.create_future())
        self._waiting.append(mine)
        try:
            while self._waiting[0] is not mine or not fits():
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
            then()
            return True
        finally:
            self._waiting.remove(mine)
            self.look()

    def look(self) -> None:
        """There may be room for the first one."""
        if self._waiting and not self._waiting[0].looked.done() and self._waiting[0].fits():
            self._waiting[0].looked.set_result(None)

    def give_up(self, asker: object, request: int) -> None:
        """Nobody waits for the answer of this request any more."""
        for one in self._waiting:
            if one.asker is asker and one.request == request:
                one.looked.cancel()

    def fail(self, error: KvxferError) -> None:
        """Nobody will have a turn from now on."""
        self._error = error
        for one in self._waiting:
            if not one.looked.done():
                one.looked.set_result(None)

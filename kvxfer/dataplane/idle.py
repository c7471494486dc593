"""Which connections may go: those that nobody uses, the one unused for longest first.

The idea: a connection that is used counts up (`Connection.used`), which costs the data path nothing that could be
measured; only the timer here knows about time. It looks at the counters now and then and lets go of what has not moved
for a while, a few at a time. The same order answers who makes room when descriptors run out. When all are in use, those
who want another one wait in line for the next that is free, each for a bounded time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from typing import Generic, Protocol, TypeVar

SWEEP_MAX, SWEEP_S = 10, 0.25  # closed in small groups: at most 40 per second
LOOKS = 4  # so often in `idle_s` the timer looks


class Connection(Protocol):
    """What is asked of a connection. ``used`` grows with each use and orders all connections of one owner."""

    used: int


C = TypeVar("C", bound=Connection)


class Idle(Generic[C]):
    """Closes connections that are idle. ``busy`` says who may not go, ``close`` resolves when its descriptors are free.

    All methods belong to the loop's thread.
    """

    def __init__(
        self,
        connections: Callable[[], Collection[C]],
        busy: Callable[[C], bool],
        close: Callable[[C], Awaitable[object]],
        *,
        idle_s: float,
        wait_s: float,
    ) -> None:
        self._connections = connections
        self._busy = busy
        self._close = close
        self._idle_s = idle_s
        self._wait_s = wait_s
        self._line: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._seen: dict[int, tuple[int, float]] = {}  # by identity: the counter, and since when it has stood there
        self._uses = 0
        self.evicted = 0
        self.closed = 0

    def use(self, connection: C) -> None:
        """It is being used now."""
        self._uses += 1
        connection.used = self._uses

    def begun(self, connection: C) -> None:
        """There is one more."""
        self.use(connection)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._idle_s / LOOKS, self._look)

    def stop(self) -> None:
        """The owner closes."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def crowded(self) -> bool:
        """Others wait for a connection already."""
        return bool(self._line)

    def freed(self) -> None:
        """One is no longer in use (or gone): whoever waits first may look."""
        for waiter in self._line:
            if not waiter.done():
                waiter.set_result(None)
                return

    async def make_room(self, *, again: bool = False) -> bool:
        """Close the one that was unused for longest, waiting in line for one that is; False when none was in time.

        ``again``: the room made before went to somebody else, so this one is first in line.
        """
        deadline = asyncio.get_running_loop().time() + self._wait_s
        first = again or not self._line
        while not (first and (free := [one for one in self._connections() if not self._busy(one)])):
            if not await self._wait(deadline, first):
                return False
            first = True
        self.evicted += 1
        await self._close(min(free, key=lambda one: one.used))
        if len(free) > 1:
            self.freed()
        return True

    async def _wait(self, deadline: float, first: bool) -> bool:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if first:
            self._line.appendleft(waiter)
        else:
            self._line.append(waiter)
        try:
            async with asyncio.timeout_at(deadline):
                await waiter
        except TimeoutError:
            return False
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._line.remove(waiter)
                self.freed()  # its turn passes on
            raise
        finally:
            if waiter in self._line:
                self._line.remove(waiter)
        return True

    def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        found = tuple(self._connections())
        due = sorted((one for one in found if self._due(one, now)), key=lambda one: one.used)
        for one in due[:SWEEP_MAX]:
            self.closed += 1
            self._seen.pop(id(one), None)
            self._close(one)
        left = {id(one) for one in found}
        self._seen = {key: seen for key, seen in self._seen.items() if key in left}
        more = len(due) > SWEEP_MAX
        delay_s = SWEEP_S if more else self._idle_s / LOOKS
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look) if found else None

    def _due(self, one: C, now: float) -> bool:
        seen = self._seen.get(id(one))
        if seen is None or seen[0] != one.used or self._busy(one):
            self._seen[id(one)] = (one.used, now)
            return False
        return now - seen[1] >= self._idle_s

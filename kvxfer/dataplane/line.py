"""Where a piece of work stands on its way into the engine: in line for the peer's window, about to go, or waiting
because the engine had no room.

The idea: one table holds the admission and everybody who waits, so the two cannot disagree. A permit that starts to run
takes its work out of the line in the same step, before anybody else is told anything; whoever leaves, from wherever it
stands, gives back exactly what it holds. Work goes into the engine from one loop that is never entered twice: what a
submit ends at once makes room, and the next one goes when the loop comes to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, Protocol, TypeVar

from kvxfer.dataplane.admission import Admission, Obstacle, Permit, Turns
from kvxfer.errors import InternalError


class Waiter(Protocol):
    """What may stand here: hashed by identity, part of ``transfer``; ``permit`` is set by the line alone. ``rank``: see
    `admission.rank_of`.
    """

    permit: Permit | None
    rank: int

    @property
    def transfer(self) -> Hashable: ...


W = TypeVar("W", bound=Waiter)


class Line(Generic[W]):
    """All that has not reached the engine. Work that holds a permit and stands nowhere here is with the engine."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self._queued: dict[Permit, W] = {}  # exactly the permits that wait
        self.going: OrderedDict[W, None] = OrderedDict()  # admitted, its turn comes in `run`
        self.no_room: dict[
            int, OrderedDict[W, None]
        ] = {}  # by rank: admitted or small; waits until the engine has room
        self._turns = Turns()
        self._by_transfer: dict[Hashable, OrderedDict[W, None]] = {}
        self._runs = False

    def __len__(self) -> int:
        return len(self._queued) + len(self.going) + sum(map(len, self.no_room.values()))

    def enter(self, work: W, peer: Hashable, size: int, now: float) -> bool:
        """Take a place in the peer's window; False: it waits for one. Raises what `Admission.admit` raises."""
        work.permit, verdict = self.admission.admit(peer, size, now, rank=work.rank)
        if verdict == "admitted":
            return True
        self._queued[work.permit] = work
        self._index(work)
        return False

    def wait_for_room(self, work: W) -> None:
        """The engine has no room for it now."""
        self.no_room.setdefault(work.rank, OrderedDict())[work] = None
        self._index(work)

    def ended(self, work: W) -> None:
        """Work that the engine had, or that could not reach it, is over: its place in the window is free."""
        permit, work.permit = work.permit, None
        if permit is not None:
            self._started(self.admission.done(permit))

    def leave(self, work: W) -> bool:
        """Give up work that waits here; False when it does not (any more)."""
        permit = work.permit
        if permit is not None and self._queued.pop(permit, None) is not None:
            work.permit = None
            self._forget(work)
            self._started(self.admission.abandon(permit))
            return True
        if work in self.going:
            del self.going[work]
        elif work in self.no_room.get(work.rank, ()):
            self._take_back(work)
        else:
            return False
        self._forget(work)
        self.ended(work)
        return True

    def of(self, transfer: Hashable) -> tuple[W, ...]:
        """The work of one transfer that waits here, in the order in which it came."""
        return tuple(self._by_transfer.get(transfer, ()))

    def everybody(self) -> tuple[W, ...]:
        """All that waits here."""
        return (*self._queued.values(), *self.going, *(work for line in self.no_room.values() for work in line))

    def run(self, submit: Callable[[W], None]) -> None:
        """Submit all that may go. A call from inside ``submit`` does nothing: the outer one goes on."""
        if self._runs:
            return
        self._runs = True
        try:
            while self.going:
                work, _ = self.going.popitem(last=False)
                self._forget(work)
                submit(work)
        finally:
            self._runs = False

    def retry(self, submit: Callable[[W], None]) -> None:
        """The engine may have room again: by rank, and within a rank first come, first served, until one meets a full
        engine again.
        """
        for _ in range(sum(map(len, self.no_room.values()))):
            if not self.no_room:  # what completed inside the engine's call made room, and others were faster
                return
            work = next(iter(self.no_room[self._turns.take(self.no_room)]))
            self._take_back(work)
            self._forget(work)
            submit(work)
            if work in self.no_room.get(work.rank, ()):  # still no room: back to its place
                self.no_room[work.rank].move_to_end(work, last=False)
                return

    def obstacle(self, transfer: Hashable) -> Obstacle | None:
        """Which limit the work of a transfer waits for; None when none of it waits for a window."""
        for work in self.of(transfer):
            if work.permit is not None and work.permit in self._queued:
                return self.admission.obstacle(work.permit)
        return None

    def check_idle(self) -> None:
        """Raise `InternalError` when something is still counted although everything has ended."""
        admission = self.admission
        if admission.inflight_ops or admission.inflight_bytes or admission.waiting or len(self):
            raise InternalError(
                "permits are left although every transfer has ended",
                inflight_ops=admission.inflight_ops,
                inflight_bytes=admission.inflight_bytes,
                waiting=admission.waiting,
                in_line=len(self),
            )

    def check(self) -> None:
        """Assert that the admission and those who wait agree."""
        self.admission.check()
        assert len(self._queued) == self.admission.waiting
        assert all(work.permit is permit for permit, work in self._queued.items())
        standing = self.everybody()
        assert len(standing) == len(set(standing)), "each stands in one place"
        indexed = [work for works in self._by_transfer.values() for work in works]
        assert len(indexed) == len(standing)
        assert set(indexed) == set(standing)
        assert all(self._by_transfer.values())

    def _started(self, permits: Iterable[Permit]) -> None:
        for permit in permits:
            self.going[self._queued.pop(permit)] = None

    def _take_back(self, work: W) -> None:
        line = self.no_room[work.rank]
        del line[work]
        if not line:
            del self.no_room[work.rank]

    def _index(self, work: W) -> None:
        self._by_transfer.setdefault(work.transfer, OrderedDict())[work] = None

    def _forget(self, work: W) -> None:
        mine = self._by_transfer[work.transfer]
        del mine[work]
        if not mine:
            del self._by_transfer[work.transfer]

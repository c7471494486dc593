"""The requests of one link that wait for their reply: each ends once, by a reply, its deadline or the link's end.

A request that says how long it may wait at the other side (for an offer, for room) is not one that the other side owes
an answer to: the two are counted apart, so that a node that makes others wait keeps nobody from asking anything else.

The idea: a reply that was on time is never called late. Event loops differ in whether they run due timers before or
after they read sockets, so a deadline that fires waits for one more turn before it gives the request up.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Callable
from typing import Any

from kvxfer.deadline import ANSWER
from kvxfer.errors import KvxferError, TooManyPending, TransferTimeout
from kvxfer.wire import messages as m
from kvxfer.wire.codec import Message
from kvxfer.wire.faults import exception_of

LATE_GRACE_S = 0.002  # what lies in the socket when the deadline fires was not late
REPLIES = (m.Done, m.Posted, m.Claimed, m.StatusReply, m.EchoReply, m.Error)


Then = Callable[[Message], None]


def _drop(_: Message) -> None:
    """Nobody wants to know."""


class _Waiting:
    """A future, and the timer behind it."""

    __slots__ = ("future", "timer", "what")

    def __init__(self, future: asyncio.Future[Message], what: str) -> None:
        self.future = future
        self.what = what
        self.timer: asyncio.TimerHandle | None = None


class Requests:
    """Pending requests by their number. At most ``pending_max`` at a time, beside ``waits_max`` that are to wait.

    ``on_late`` gets a reply that came in the very turn in which its request was cancelled.
    """

    def __init__(self, pending_max: int, waits_max: int, on_late: Callable[[Message], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_late = on_late
        self._pending_max = pending_max
        self._waits_max = waits_max
        self._waits: set[int] = set()
        self._pending: dict[int, _Waiting | Then] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def unanswered(self) -> int:
        """Those of them that do not wait for anything but their answer."""
        return len(self._pending) - len(self._waits)

    def number(self, peer: str, *, waits: bool = False) -> int:
        """A number for a new request; ``waits``: it may wait at the other side. Raises `TooManyPending`."""
        held, limit, option = self.unanswered, self._pending_max, "requests_max"
        what = "unanswered requests"
        if waits:
            held, limit, option = len(self._waits), self._waits_max, "waiting_max"
            what = "requests wait for a posting or for room"
        if held >= limit:
            hint = f"try again when some of them are answered, or raise {option} of this process"
            raise TooManyPending(f"too many {what}", peer=peer, limit=limit, option=option, hint=hint)
        return next(self._numbers)

    def forget(self, number: int, then: Then = _drop) -> None:
        """A request that nobody waits for: its reply goes to ``then``, if it comes before the link ends."""
        self._pending[number] = then

    async def wait(self, number: int, what: str, *, timeout: float, peer: str, waits: bool = False) -> Message:
        """The reply; an `Error` reply is raised as the error that it names. Raises `TransferTimeout`. Cancel-safe."""
        if waits:
            self._waits.add(number)
        waiting = _Waiting(self._loop.create_future(), what)
        waiting.timer = self._loop.call_later(timeout, self._deadline_passed, waiting, peer)
        self._pending[number] = waiting
        try:
            return await waiting.future
        except asyncio.CancelledError:
            done = waiting.future
            if done.done() and not done.cancelled() and done.exception() is None:
                self._on_late(done.result())
            raise
        finally:
            self._pending.pop(number, None)
            self._waits.discard(number)
            waiting.timer.cancel()

    def take(self, reply: Any, peer: str) -> bool:
        """Hand a reply to whoever waits for it; False when its request had been given up."""
        if reply.rid not in self._pending:
            return False
        waiting = self._pending.pop(reply.rid)
        self._waits.discard(reply.rid)
        if not isinstance(waiting, _Waiting):
            waiting(reply)
            return True
        if waiting.future.done():
            return False
        if isinstance(reply, m.Error):
            error = exception_of(reply)
            error.peer = error.peer or peer
            waiting.future.set_exception(error)
        else:
            waiting.future.set_result(reply)
        return True

    def fail(self, error: KvxferError) -> None:
        """The link has ended: every request fails with (its own copy of) the reason."""
        pending, self._pending = self._pending, {}
        self._waits.clear()
        for waiting in pending.values():
            if isinstance(waiting, _Waiting) and not waiting.future.done():
                waiting.future.set_exception(copy.copy(error))

    def _deadline_passed(self, waiting: _Waiting, peer: str) -> None:
        waiting.timer = self._loop.call_later(LATE_GRACE_S, self._give_up, waiting, peer)

    def _give_up(self, waiting: _Waiting, peer: str) -> None:
        if not waiting.future.done():
            text = f"no reply to {waiting.what} before the deadline"
            waiting.future.set_exception(TransferTimeout(text, peer=peer, state=ANSWER))

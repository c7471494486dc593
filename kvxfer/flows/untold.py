"""Settlements that the daemon has not confirmed: what is said again to the next one.

The idea: a daemon that was told how a claim ended may end itself before it could pass that on to another node, and a
worker cannot know. So the worker remembers what it said until the owner's node is known to have heard it. Saying it
twice does no harm. What can never be confirmed is forgotten when no lease can be left that it is about.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kvxfer.errors import NOT_TOLD
from kvxfer.wire import messages as m
from kvxfer.wire.codec import Message
from kvxfer.wire.faults import exception_of


class Untold:
    """At most ``limit`` settlements, each for ``keep_s`` seconds of ``clock``; the oldest make room."""

    def __init__(self, clock: Callable[[], float], *, limit: int, keep_s: float) -> None:
        self._clock = clock
        self._limit = limit
        self._keep_s = keep_s
        self._said: OrderedDict[int, tuple[m.Settle, float]] = OrderedDict()  # by the number of the request

    def __len__(self) -> int:
        return len(self._said)

    def said(self, number: int, message: m.Settle) -> None:
        """Sent to the daemon as this request, and not answered yet."""
        now = self._clock()
        self._said[number] = (message, now + self._keep_s)
        while len(self._said) > self._limit or next(iter(self._said.values()))[1] < now:
            self._said.popitem(last=False)

    def answered(self, reply: Message) -> None:
        """The daemon's first answer, or a later one. When it could not reach the owner it keeps the settlement, and
        answers once more when it has; anything else is the owner's word."""
        if isinstance(reply, m.Error) and isinstance(exception_of(reply), NOT_TOLD):
            return
        self._said.pop(getattr(reply, "rid", 0), None)

    def take(self, room: int) -> list[m.Settle]:
        """There is a new daemon: the latest of them, at most ``room``, in order. None are left here."""
        now = self._clock()
        left = [message for message, until in self._said.values() if until >= now]
        self._said.clear()
        return left[-room:] if room else []

"""Try several ways to the same end, staggered, and keep the first that works.

Attempts start in order of preference: the next one when the last one failed, or when it has been silent for a while.
Every failure is kept, so that "unreachable" can say why for each candidate. Whatever does not win is cancelled and
awaited before the race returns; a second winner is handed to ``discard``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from kvxfer.errors import KvxferError
from kvxfer.tasks import TaskOwner

T = TypeVar("T")
Attempt = tuple[str, Callable[[], Awaitable[T]]]
Failures = dict[str, Exception]


class _Race(Generic[T]):
    def __init__(
        self, attempts: Sequence[Attempt[T]], stagger_s: float, discard: Callable[[T], None], failures: Failures
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._attempts = attempts
        self._stagger_s = stagger_s
        self._discard = discard
        self._owner = TaskOwner("race")
        self._started = self._failed = 0
        self._timer: asyncio.TimerHandle | None = None
        self._winner: asyncio.Future[T | None] = self._loop.create_future()
        self._failures = failures

    def _start_next(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._winner.done() or self._started == len(self._attempts):
            return
        label, attempt = self._attempts[self._started]
        self._started += 1
        self._owner.spawn(self._run(label, attempt), label)
        if self._started < len(self._attempts):
            self._timer = self._loop.call_later(self._stagger_s, self._start_next)

    async def _run(self, label: str, attempt: Callable[[], Awaitable[T]]) -> None:
        try:
            value = await attempt()
        except (KvxferError, OSError) as failure:
            self._failures[label] = failure
            self._failed += 1
            if self._failed == len(self._attempts) and not self._winner.done():
                self._winner.set_result(None)
            self._start_next()
            return
        if self._winner.done():
            self._discard(value)
        else:
            self._winner.set_result(value)

    async def run(self) -> T | None:
        self._start_next()
        value: T | None = None
        try:
            value = await self._winner
        except asyncio.CancelledError:
            if self._winner.done() and not self._winner.cancelled():
                value = self._winner.result()
            self._drop(value)
            raise
        finally:
            if self._timer is not None:
                self._timer.cancel()
            try:
                await self._owner.aclose()
            except asyncio.CancelledError:
                self._drop(value)
                raise
        return value

    def _drop(self, value: T | None) -> None:
        if value is not None:
            self._discard(value)


async def first_success(
    attempts: Sequence[Attempt[T]], *, stagger_s: float, discard: Callable[[T], None], failures: Failures
) -> T | None:
    """The first value that an attempt returned, None when all failed.

    Failures are put into ``failures`` by label as they happen, so they are known even when a time limit ends the race.
    """
    if len(attempts) == 1:  # the usual case needs no task
        label, attempt = attempts[0]
        try:
            return await attempt()
        except (KvxferError, OSError) as failure:
            failures[label] = failure
            return None
    return await _Race(attempts, stagger_s, discard, failures).run()

"""One deadline per public call: `timeout=` becomes an absolute time at the edge, and only remaining time travels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvxfer.errors import KvxferError, TransferTimeout, UsageError

TIMEOUT_S_MAX = 7 * 24 * 3600.0
# Where a call was when its deadline passed: `fields["state"]` of its error.
CONNECTING = "connecting"  # the daemon, the other node or the other side's memory is being reached
ANSWER = "waiting for an answer"  # the request was sent: to the daemon, and through it perhaps to another node
OTHER_SIDE = "waiting for the other side"  # which has sent, or claimed, nothing yet
MEMORY = "working on memory"  # in the kernel or a driver, in a thread that nobody can stop
ROOM = "waiting for room"  # in a window, a queue or the engine
TRANSFERRING = "transferring"
NOTIFYING = "notifying"  # the bytes are there, the other side is being told
ANSWER_S = 0.25  # what an answer may take that follows a wait


@dataclass(frozen=True, slots=True)
class Deadline:
    """An absolute time on the running loop's clock, in seconds."""

    at: float

    @classmethod
    def after(cls, timeout: float) -> Deadline:
        """The moment ``timeout`` seconds from now. There is no endless wait: the timeout must be finite and
        positive.
        """
        return cls(asyncio.get_running_loop().time() + seconds(timeout, "timeout"))

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - asyncio.get_running_loop().time())

    def require(self, what: str, state: str) -> float:
        """Seconds left; raises `TransferTimeout` naming ``what`` and the ``state`` of the call when there are none."""
        left = self.remaining()
        if left <= 0:
            raise TransferTimeout(f"the deadline passed before {what}", state=state)
        return left

    def wait(self, wait_s: float) -> float:
        """How long the other side may wait for something, so that its answer still comes before the deadline."""
        left = self.remaining()
        return max(0.0, min(wait_s, left - min(ANSWER_S, left / 4)))

    @asynccontextmanager
    async def bound(self, what: str, state: str) -> AsyncIterator[asyncio.Timeout]:
        """End the block when the deadline passes, with a `TransferTimeout` naming ``what`` and the ``state``.

        Whoever has better reasons to end it earlier reschedules what it yields.
        """
        limit = asyncio.timeout(self.require(what, state))
        try:
            async with limit:
                yield limit
        except TimeoutError as late:
            if not limit.expired() or isinstance(late, KvxferError):
                raise
            raise TransferTimeout(f"the deadline passed before {what}", state=state) from None


def seconds(value: object, field: str, *, least: float | None = None, limit_s: float = TIMEOUT_S_MAX) -> float:
    """A finite number of seconds from a caller, more than 0 (or at least ``least``) and at most ``limit_s``."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if good:
        assert isinstance(value, int | float)
        good = value <= limit_s and (value > 0 if least is None else value >= least)
    if not good:
        rule = "a positive number of seconds" if least is None else f"a number of seconds from {least:g} on"
        raise UsageError(f"{field} must be {rule}", field=field, value=repr(value)[:40], limit_s=limit_s)
    assert isinstance(value, int | float)
    return float(value)

"""Tasks have an owner: whoever starts one also ends it.

`TaskOwner` is the only place in kvxfer that creates a task. A child may fail only with an error that somebody awaits;
an error that nobody took is reported to the loop's exception handler when it happens, never swallowed. `aclose` cancels
what still runs and waits for it, so that after it no task of the owner remains.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from kvxfer.errors import ClosedError, KvxferError, ResourceExhausted, TransferTimeout, UsageError

# -- one deadline per public call: `timeout=` becomes an absolute time at the edge, and only remaining time travels ----


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


T = TypeVar("T")


class TaskOwner:
    """Starts background tasks and guarantees their end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        """Run ``work`` until it ends or the owner closes. ``work`` handles its own expected errors."""
        task = self.run(work, what)
        task.add_done_callback(self._report)
        return task

    def run(self, work: Coroutine[Any, Any, T], what: str) -> asyncio.Task[T]:
        """The same for work whose result, or error, somebody awaits."""
        if self._closed:
            work.close()
            raise ClosedError(f"{self._name} is closed: cannot start {what}")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a frame that nobody finished is collected after its loop has ended
            work.close()
            raise
        task = loop.create_task(work, name=f"{self._name}: {what}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _report(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            context = {"message": f"{task.get_name()} failed unexpectedly", "exception": error, "task": task}
            task.get_loop().call_exception_handler(context)

    async def aclose(self) -> None:
        """Cancel everything and wait until it is gone."""
        self._closed = True
        current = asyncio.current_task()
        pending = [task for task in self._tasks if task is not current]
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)


async def shared(work: asyncio.Task[T]) -> T:
    """Wait for a task that goes on when its waiter is cancelled; that its owner closed is an error of the waiter here.

    Without this a waiter would see a cancellation that nobody asked of it.
    """
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if work.cancelled() and (current is None or not current.cancelling()):
            raise ClosedError(f"closed while it waited ({work.get_name()})") from None
        raise


async def in_thread(work: Callable[..., T], *arguments: object) -> T:
    """What ``work`` returns, from a thread of the loop. Raises `ResourceExhausted` when none can be started; then the
    work was not done, and will not be: the executor had it in its line, where a thread that is free later finds it.
    """
    claim: Future[T] = Future()
    context = contextvars.copy_context()

    def run() -> T | None:
        if not claim.set_running_or_notify_cancel():
            return None
        try:
            found = context.run(work, *arguments)
        except BaseException as failure:
            claim.set_exception(failure)
            raise
        claim.set_result(found)
        return found

    try:
        working = asyncio.get_running_loop().run_in_executor(None, run)
    except RuntimeError as error:
        if claim.cancel():
            hint = "raise the limit of processes and threads (ulimit -u, pids.max of the cgroup), or end others"
            raise ResourceExhausted(f"no thread can be started: {error}", hint=hint) from error
        return await asyncio.wrap_future(claim)  # one became free at that moment
    return cast(T, await working)


async def to_the_end(executor: Executor, work: Callable[..., object], *arguments: object) -> None:
    """Run in a thread what must not be left half done: a cancellation meanwhile is raised when it has ended."""
    working = asyncio.get_running_loop().run_in_executor(executor, work, *arguments)
    cancelled: asyncio.CancelledError | None = None
    while not working.done():
        try:
            await asyncio.wait([working])
        except asyncio.CancelledError as found:
            cancelled = found
    if cancelled is not None:
        raise cancelled
    working.result()

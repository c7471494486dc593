"""Tasks have an owner: whoever starts one also ends it.

`TaskOwner` is the only place in kvxfer that creates a task. A child may fail only with an error that somebody awaits;
an error that nobody took is reported to the loop's exception handler when it happens, never swallowed. `aclose` cancels
what still runs and waits for it, so that after it no task of the owner remains.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar, cast

from kvxfer.errors import ClosedError, ResourceExhausted

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
        task = asyncio.get_running_loop().create_task(work, name=f"{self._name}: {what}")
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

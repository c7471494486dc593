"""Owned tasks end with their owner, and no failure is swallowed."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable

import pytest

from kvxfer.errors import ClosedError, ResourceExhausted
from kvxfer.tasks import TaskOwner, in_thread, shared


async def test_closing_cancels_and_waits() -> None:
    owner, seen = TaskOwner("test"), []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            seen.append("ended")

    owner.spawn(work(), "work")
    await asyncio.sleep(0)
    await owner.aclose()
    assert seen == ["ended"]
    assert len(owner) == 0


async def test_a_closed_owner_starts_nothing() -> None:
    owner = TaskOwner("test")
    await owner.aclose()

    async def work() -> None:
        raise AssertionError("must not run")

    with pytest.raises(ClosedError):
        owner.spawn(work(), "work")


async def test_an_unexpected_failure_reaches_the_loop() -> None:
    owner, reported = TaskOwner("test"), []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context["exception"]))

    async def work() -> None:
        raise ZeroDivisionError

    owner.spawn(work(), "work")
    await asyncio.sleep(0.01)
    assert [type(error) for error in reported] == [ZeroDivisionError]


async def test_who_waits_for_a_task_that_its_owner_closed_is_not_cancelled() -> None:
    owner = TaskOwner("test")
    waiting = asyncio.ensure_future(shared(owner.run(asyncio.sleep(60), "work")))
    await asyncio.sleep(0)
    await owner.aclose()
    with pytest.raises(ClosedError):
        await waiting


async def test_a_waiter_that_is_cancelled_leaves_the_task_running() -> None:
    owner = TaskOwner("test")
    work = owner.run(asyncio.sleep(60), "work")
    waiting = asyncio.ensure_future(shared(work))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not work.done()
    await owner.aclose()


def no_threads(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


async def test_work_in_a_thread_gives_its_result_or_its_error() -> None:
    assert await in_thread(lambda a, b: a + b, 1, 2) == 3
    assert await in_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(ValueError, match="invalid literal"):
        await in_thread(int, "x")


async def test_no_thread_is_a_typed_error_and_the_work_is_never_done(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_threads)
        with pytest.raises(ResourceExhausted, match="no thread can be started: can't start new thread") as refused:
            await in_thread(done.append, 1)
        assert "ulimit -u" in str(refused.value.hint)
    await in_thread(done.append, 2)
    assert done == [2], "the line of the executor had the first one too"


@pytest.mark.once
async def test_no_thread_but_one_that_is_free_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor wants a second thread while its first one is busy; work that has been taken counts."""

    def taken(loop: object, executor: None, work: Callable[[], object]) -> None:
        work()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(type(asyncio.get_running_loop()), "run_in_executor", taken, raising=False)
    assert await in_thread(lambda: 7) == 7


def test_without_a_loop_the_work_is_closed_and_nothing_warns_of_it() -> None:
    async def work() -> None:
        pass

    going = work()
    with pytest.raises(RuntimeError, match="no running event loop"):
        TaskOwner("owner").spawn(going, "work")
    assert inspect.getcoroutinestate(going) == inspect.CORO_CLOSED

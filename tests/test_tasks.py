"""Owned tasks end with their owner, and no failure is swallowed."""

from __future__ import annotations

import asyncio

import pytest

from kvxfer.errors import ClosedError
from kvxfer.tasks import TaskOwner, shared


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

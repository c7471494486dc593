"""Staggered attempts: the first that works wins, losers are gone afterwards, failures are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvxfer.errors import PeerLost
from kvxfer.net.dial import Failures, first_success

Attempt = tuple[str, Callable[[], Awaitable[str]]]


class Runs:
    """Attempts that are steered from outside, and what became of them."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.cancelled: list[str] = []
        self.gates: dict[str, asyncio.Future[str]] = {}
        self.discarded: list[str] = []

    def attempt(self, label: str) -> Attempt:
        async def run() -> str:
            self.started.append(label)
            self.gates[label] = asyncio.get_running_loop().create_future()
            try:
                return await self.gates[label]
            except asyncio.CancelledError:
                self.cancelled.append(label)
                raise

        return label, run


def ready(label: str, value: str) -> Attempt:
    async def run() -> str:
        return value

    return label, run


def failing(label: str, error: Exception) -> Attempt:
    async def run() -> str:
        raise error

    return label, run


async def race(attempts: list[Attempt], runs: Runs, failures: Failures, stagger_s: float = 0.01) -> str | None:
    return await first_success(attempts, stagger_s=stagger_s, discard=runs.discarded.append, failures=failures)


async def test_one_attempt_needs_no_task() -> None:
    runs, failures = Runs(), {}
    tasks = len(asyncio.all_tasks())
    assert await race([ready("a", "A")], runs, failures) == "A"
    assert len(asyncio.all_tasks()) == tasks
    assert await race([failing("a", OSError("no"))], runs, failures) is None
    assert list(failures) == ["a"]


async def test_failure_starts_the_next_at_once() -> None:
    runs, failures = Runs(), {}
    lost = PeerLost("gone")
    assert await race([failing("a", lost), ready("b", "B")], runs, failures, stagger_s=60) == "B"
    assert failures == {"a": lost}


async def test_silence_starts_the_next_after_the_stagger_and_losers_are_cancelled() -> None:
    runs, failures = Runs(), {}
    assert await race([runs.attempt("a"), ready("b", "B")], runs, failures) == "B"
    assert runs.started == ["a"]
    assert runs.cancelled == ["a"]


async def test_all_fail() -> None:
    runs, failures = Runs(), {}
    attempts = [failing(label, OSError(label)) for label in "abc"]
    assert await race(attempts, runs, failures) is None
    assert list(failures) == ["a", "b", "c"]


async def test_second_winner_is_discarded() -> None:
    runs, failures = Runs(), {}
    running = asyncio.ensure_future(race([runs.attempt("a"), runs.attempt("b")], runs, failures))
    async with asyncio.timeout(5):
        while len(runs.started) < 2:
            await asyncio.sleep(0.005)
        runs.gates["a"].set_result("A")
        runs.gates["b"].set_result("B")
        assert await running in "AB"
    assert len(runs.discarded) == 1


@pytest.mark.parametrize("late", [False, True])
async def test_cancelling_the_race_ends_the_attempts_and_drops_a_winner(late: bool) -> None:
    runs, failures = Runs(), {}
    running = asyncio.ensure_future(race([runs.attempt("a"), runs.attempt("b")], runs, failures, stagger_s=0.001))
    async with asyncio.timeout(5):
        while len(runs.started) < 2:
            await asyncio.sleep(0.002)
        if late:
            runs.gates["a"].set_result("A")
            await asyncio.sleep(0)  # the attempt returned, the race has not seen it yet
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert runs.discarded == (["A"] if late else [])
    assert len(asyncio.all_tasks()) == 1

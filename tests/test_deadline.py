"""One deadline per call."""

from __future__ import annotations

import asyncio

import pytest

from kvxfer.deadline import TIMEOUT_S_MAX, Deadline
from kvxfer.errors import TransferTimeout, UsageError


async def test_time_runs_out_once() -> None:
    deadline = Deadline.after(0.02)
    assert 0 < deadline.require("it began") <= 0.02 + 1e-9  # rounding
    await asyncio.sleep(0.03)
    assert deadline.remaining() == 0
    with pytest.raises(TransferTimeout, match="it began"):
        deadline.require("it began")


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), None, "5", True, TIMEOUT_S_MAX * 2])
async def test_endless_and_senseless_timeouts_are_refused(bad: object) -> None:
    with pytest.raises(UsageError):
        Deadline.after(bad)  # type: ignore[arg-type]


async def test_the_longest_timeout_is_accepted() -> None:
    assert Deadline.after(TIMEOUT_S_MAX).remaining() > 0

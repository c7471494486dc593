"""One deadline per call."""

from __future__ import annotations

import asyncio

import pytest

from kvxfer.errors import TransferTimeout, UsageError
from kvxfer.tasks import ANSWER, ROOM, TIMEOUT_S_MAX, Deadline, seconds


async def test_time_runs_out_once() -> None:
    deadline = Deadline.after(0.02)
    assert 0 < deadline.require("it began", ANSWER) <= 0.02 + 1e-9  # rounding
    await asyncio.sleep(0.03)
    assert deadline.remaining() == 0
    with pytest.raises(TransferTimeout, match="it began") as found:
        deadline.require("it began", ANSWER)
    assert found.value.fields["state"] == ANSWER


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), None, "5", True, TIMEOUT_S_MAX * 2])
async def test_endless_and_senseless_timeouts_are_refused(bad: object) -> None:
    with pytest.raises(UsageError):
        Deadline.after(bad)  # type: ignore[arg-type]


async def test_the_longest_timeout_is_accepted() -> None:
    assert Deadline.after(TIMEOUT_S_MAX).remaining() > 0


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), True, "1", None, 11, 10**400])
def test_seconds_are_positive_finite_and_bounded(bad: object) -> None:
    with pytest.raises(UsageError, match="lease_s"):
        seconds(bad, "lease_s", limit_s=10)
    assert seconds(10, "lease_s", limit_s=10) == 10.0
    assert seconds(0, "wait_s", least=0.0) == 0.0


async def test_a_block_ends_with_the_deadline_and_says_what_it_waited_for() -> None:
    with pytest.raises(TransferTimeout, match="the moon rose") as found:
        async with Deadline.after(0.01).bound("the moon rose", ROOM):
            await asyncio.sleep(5)
    assert found.value.fields["state"] == ROOM
    with pytest.raises(TransferTimeout, match="inside"):
        async with Deadline.after(5).bound("outside", ROOM):
            raise TransferTimeout("inside")
    with pytest.raises(TimeoutError, match="somebody's own"):
        async with Deadline.after(5).bound("outside", ROOM):
            raise TimeoutError("somebody's own")


async def test_a_wait_leaves_time_for_its_answer() -> None:
    deadline = Deadline.after(4)
    assert deadline.wait(1) == 1
    assert 3.7 < deadline.wait(10) < 3.8
    assert Deadline(0.0).wait(10) == 0

"""Outcome and settling of a transfer, against a canceller that only records."""

from __future__ import annotations

import asyncio
import gc

import pytest

from kvxfer.dataplane.admission import WindowLimit
from kvxfer.dataplane.transfer import Transfer
from kvxfer.errors import PeerLost, TransferCancelled, TransferTimeout


class Recorder:
    """Stands in for the data plane."""

    def __init__(self) -> None:
        self.cancelled: list[int] = []
        self.on_drain = lambda: None
        self.late_ones = 0
        self.waits_for: WindowLimit | None = None

    def cancel_token(self, token: int) -> None:
        self.cancelled.append(token)

    def cancel_waiting(self, transfer: Transfer) -> None:
        pass

    def progress(self, token: int) -> int:
        return 0

    def blocked_by(self, transfer: Transfer) -> WindowLimit | None:
        return self.waits_for

    def drain(self) -> None:
        self.on_drain()

    def stage(self, transfer: Transfer) -> str:
        return "transferring"

    def late(self) -> None:
        self.late_ones += 1


def begin(parts: int = 1) -> tuple[Transfer, Recorder]:
    recorder = Recorder()
    transfer = Transfer(recorder, op_id=1, peer="b", parts=parts)
    for token in range(10, 10 + parts):
        transfer.add_token(token)
    return transfer, recorder


async def test_done_when_every_part_is() -> None:
    transfer, _ = begin(2)
    transfer.part_ended(10, 5, None)
    assert not transfer.done
    transfer.part_ended(11, 6, None)
    assert (await transfer).bytes_done == 11
    assert transfer.settled


async def test_the_first_error_is_the_outcome_and_the_rest_is_cancelled() -> None:
    transfer, recorder = begin(3)
    transfer.part_ended(11, 0, PeerLost("gone"))
    assert transfer.state == "failed"
    assert sorted(recorder.cancelled) == [10, 12]
    assert not transfer.settled
    with pytest.raises(PeerLost):
        await transfer
    transfer.part_ended(10, 0, TransferCancelled("x"))
    transfer.part_ended(12, 4, None)
    await transfer.wait_settled()
    assert transfer.state == "failed"


async def test_a_deadline_decides_at_once_and_settles_later() -> None:
    transfer, recorder = begin()
    transfer.arm(0.01, asyncio.get_running_loop())
    with pytest.raises(TransferTimeout):
        await transfer
    assert recorder.cancelled == [10]
    assert not transfer.settled
    transfer.part_ended(10, 99, None)  # a late completion changes nothing that was told
    assert transfer.state == "timed_out"
    assert transfer.settled
    assert recorder.late_ones == 1


async def test_what_arrived_before_the_deadline_counts_even_when_looked_at_late() -> None:
    transfer, recorder = begin()
    recorder.on_drain = lambda: transfer.part_ended(10, 7, None)
    transfer.arm(0.001, asyncio.get_running_loop())
    assert (await transfer).state == "done"


async def test_cancel_returns_only_when_settled() -> None:
    transfer, recorder = begin()
    cancelling = asyncio.ensure_future(transfer.cancel())
    await asyncio.sleep(0.01)
    assert recorder.cancelled == [10]
    assert not cancelling.done()
    transfer.part_ended(10, 0, TransferCancelled("engine"))
    assert (await cancelling).state == "cancelled"
    with pytest.raises(TransferCancelled):
        await transfer


async def test_cancel_after_the_end_changes_nothing() -> None:
    transfer, recorder = begin()
    transfer.part_ended(10, 3, None)
    await transfer.cancel()
    assert transfer.state == "done"
    assert recorder.cancelled == []


async def test_cancelling_an_await_leaves_the_transfer_running() -> None:
    transfer, recorder = begin()
    waiting = asyncio.ensure_future(transfer.wait_settled())
    other = asyncio.ensure_future(asyncio.wait_for(_await(transfer), 5))
    await asyncio.sleep(0)
    waiting.cancel()
    other.cancel()
    await asyncio.gather(waiting, other, return_exceptions=True)
    assert transfer.state == "running"
    assert recorder.cancelled == []
    transfer.part_ended(10, 1, None)
    assert (await transfer).bytes_done == 1


async def _await(transfer: Transfer) -> Transfer:
    return await transfer


async def test_an_unawaited_failure_is_not_reported_as_lost() -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    transfer, _ = begin()
    transfer.part_ended(10, 0, PeerLost("gone"))
    del transfer
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []


async def test_a_part_that_is_added_to_a_cancelled_transfer_is_cancelled() -> None:
    recorder = Recorder()
    transfer = Transfer(recorder, op_id=1, peer="b", parts=1)
    transfer.request_cancel(TransferCancelled("no"))
    transfer.add_token(77)
    assert recorder.cancelled == [77]


async def test_settled_callbacks_come_once() -> None:
    transfer, _ = begin()
    seen: list[Transfer] = []
    transfer.on_settled(seen.append)
    transfer.part_ended(10, 0, None)
    transfer.on_settled(seen.append)
    assert seen == [transfer, transfer]

"""What a worker remembers of the settlements that it has told its daemon."""

from __future__ import annotations

import pytest

from kvxfer.errors import BusyError, ClosedError, KvxferError, PeerUnreachable, TransferTimeout, UnknownTransfer
from kvxfer.flows.control import Outbox
from kvxfer.wire import messages as m
from kvxfer.wire.messages import error_reply


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def settle(claim: int) -> m.Settle:
    return m.Settle(node=("10.0.0.1:1",), posting="a" * 32, claim=claim, outcome="done")


def made(**options: float) -> tuple[Outbox, Clock]:
    clock = Clock()
    return Outbox(clock, limit=int(options.get("limit", 8)), keep_s=options.get("keep_s", 60.0)), clock


def test_what_was_answered_is_forgotten() -> None:
    outbox, _ = made()
    for number in (1, 2, 3):
        outbox.add(number, settle(number))
    outbox.acknowledged(m.Done(rid=2))
    outbox.acknowledged(error_reply(UnknownTransfer("no such claim"), 3))  # the owner's word
    outbox.acknowledged(m.Done(rid=77))
    assert [message.claim for message in outbox.take(9)] == [1]
    assert outbox.take(9) == []


@pytest.mark.parametrize("error", [PeerUnreachable("x"), TransferTimeout("x"), BusyError("x"), ClosedError("x")])
def test_what_the_daemon_could_not_pass_on_is_kept_until_it_has(error: KvxferError) -> None:
    outbox, _ = made()
    outbox.add(1, settle(1))
    outbox.acknowledged(error_reply(error, 1))
    assert len(outbox) == 1
    outbox.acknowledged(m.Done(rid=1))  # its second answer
    assert len(outbox) == 0


def test_it_is_bounded_in_number_and_time() -> None:
    outbox, clock = made(limit=3, keep_s=10.0)
    for number in range(1, 6):
        outbox.add(number, settle(number))
    assert len(outbox) == 3
    clock.now += 11.0
    outbox.add(6, settle(6))
    assert len(outbox) == 1
    outbox.add(7, settle(7))
    clock.now += 5.0
    outbox.add(8, settle(8))
    clock.now += 6.0
    assert [message.claim for message in outbox.take(9)] == [8]


def test_no_more_than_there_is_room_for() -> None:
    outbox, _ = made()
    for number in range(1, 6):
        outbox.add(number, settle(number))
    assert [message.claim for message in outbox.take(2)] == [4, 5]
    outbox.add(1, settle(1))
    assert outbox.take(0) == []
    assert len(outbox) == 0

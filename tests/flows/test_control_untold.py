"""What a worker remembers of the settlements that it has told its daemon."""

from __future__ import annotations

import pytest

from kvxfer.errors import BusyError, ClosedError, KvxferError, PeerUnreachable, TransferTimeout, UnknownTransfer
from kvxfer.flows.control import Untold
from kvxfer.wire import messages as m
from kvxfer.wire.messages import error_reply


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def settle(claim: int) -> m.Settle:
    return m.Settle(node=("10.0.0.1:1",), posting="a" * 32, claim=claim, outcome="done")


def made(**options: float) -> tuple[Untold, Clock]:
    clock = Clock()
    return Untold(clock, limit=int(options.get("limit", 8)), keep_s=options.get("keep_s", 60.0)), clock


def test_what_was_answered_is_forgotten() -> None:
    untold, _ = made()
    for number in (1, 2, 3):
        untold.said(number, settle(number))
    untold.answered(m.Done(rid=2))
    untold.answered(error_reply(UnknownTransfer("no such claim"), 3))  # the owner's word
    untold.answered(m.Done(rid=77))
    assert [message.claim for message in untold.take(9)] == [1]
    assert untold.take(9) == []


@pytest.mark.parametrize("error", [PeerUnreachable("x"), TransferTimeout("x"), BusyError("x"), ClosedError("x")])
def test_what_the_daemon_could_not_pass_on_is_kept_until_it_has(error: KvxferError) -> None:
    untold, _ = made()
    untold.said(1, settle(1))
    untold.answered(error_reply(error, 1))
    assert len(untold) == 1
    untold.answered(m.Done(rid=1))  # its second answer
    assert len(untold) == 0


def test_it_is_bounded_in_number_and_time() -> None:
    untold, clock = made(limit=3, keep_s=10.0)
    for number in range(1, 6):
        untold.said(number, settle(number))
    assert len(untold) == 3
    clock.now += 11.0
    untold.said(6, settle(6))
    assert len(untold) == 1
    untold.said(7, settle(7))
    clock.now += 5.0
    untold.said(8, settle(8))
    clock.now += 6.0
    assert [message.claim for message in untold.take(9)] == [8]


def test_no_more_than_there_is_room_for() -> None:
    untold, _ = made()
    for number in range(1, 6):
        untold.said(number, settle(number))
    assert [message.claim for message in untold.take(2)] == [4, 5]
    untold.said(1, settle(1))
    assert untold.take(0) == []
    assert len(untold) == 0

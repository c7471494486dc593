"""Bytes that wait on all control connections together: the sum is bounded, and right again after a look."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvxfer.errors import PeerBackpressure
from kvxfer.net.queues import Queues


@dataclass(eq=False)
class Line:
    name: str
    queued_bytes: int = 0


def sending(queues: Queues, line: Line, size: int) -> None:
    queues.require(line, size)
    line.queued_bytes += size
    queues.sent(line)


def test_the_sum_is_bounded_exactly() -> None:
    queues, lines = Queues(1000), [Line(str(number)) for number in range(4)]
    for line in lines:
        sending(queues, line, 250)
    assert queues.total == 1000
    with pytest.raises(PeerBackpressure) as full:
        sending(queues, lines[0], 1)
    assert full.value.fields["limit"] == 1000
    assert full.value.fields["all_links"]
    lines[2].queued_bytes = 249  # it has read, and nobody said so
    sending(queues, lines[0], 1)
    assert queues.total == 1000


def test_who_reads_least_is_found_and_forgotten() -> None:
    queues, (slow, quick) = Queues(1000), (Line("slow"), Line("quick"))
    assert queues.longest() is None
    sending(queues, quick, 500)
    sending(queues, slow, 400)
    quick.queued_bytes = 3
    assert queues.longest() is slow
    queues.forget(slow)
    queues.forget(slow)
    assert queues.total == 3
    assert queues.longest() is quick


def test_a_share_of_the_room_is_kept_for_what_must_not_be_refused() -> None:
    queues, line = Queues(1000), Line("one")
    sending(queues, line, 400)
    assert not queues.full(100, share=0.5)
    assert queues.full(101, share=0.5)
    assert not queues.full(600)

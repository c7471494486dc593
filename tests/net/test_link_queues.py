"""Bytes that wait on all control connections together: the sum is bounded, and right again after a look."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvxfer.errors import PeerBackpressure
from kvxfer.net.link import UNFINISHED_BYTES_MAX, UNFINISHED_BYTES_MIN, Queues


@dataclass(eq=False)
class Line:
    name: str
    queued_bytes: int = 0
    node: str = ""

    @property
    def account(self) -> str:
        return self.node or self.name


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


def test_one_node_has_room_for_two_full_connections_however_many_it_opens() -> None:
    queues, other = Queues(1000, 100), Line("other")
    links = [Line(str(number), node="n") for number in range(10)]
    for link in links:
        sending(queues, link, 20)
    with pytest.raises(PeerBackpressure, match="this node") as full:
        sending(queues, links[0], 1)
    assert "all_links" not in full.value.fields
    sending(queues, other, 200)
    links[1].queued_bytes = 0
    queues.sent(links[1])
    sending(queues, links[0], 20)


def test_who_leaves_most_unfinished_has_to_go() -> None:
    mib = 1 << 20
    queues = Queues(1000)
    greedy = [Line(f"g{number}", node="g") for number in range(100)]
    honest = [Line(f"h{number}", node=f"n{number}") for number in range(5)]
    for line in honest:
        assert queues.received(line, mib) is None
    dropped = []
    for number, line in enumerate(greedy):
        for size in (mib, 4 * mib + number):
            gone = queues.received(line, size)
            if gone is not None:
                dropped.append(gone)
                queues.forget(gone)
                assert queues.received(gone, 0) is None
        assert queues.unfinished <= UNFINISHED_BYTES_MAX
    assert dropped
    assert {line.account for line in dropped} == {"g"}  # type: ignore[attr-defined]
    for line in honest:
        assert queues.received(line, 2 * mib) is None, "there is room for others all the time"
    many = [Line(f"m{number}", node=f"m{number}") for number in range(200)]
    for line in many:
        gone = queues.received(line, mib)
        if gone is not None:
            assert gone in greedy, "of the one that holds most"
            queues.forget(gone)
        if not any(queues._unfinished.get(one) for one in greedy):
            break
    for line in (*greedy, *honest, *many):
        queues.forget(line)
    assert queues.unfinished == 0


def test_small_beginnings_are_not_counted() -> None:
    queues, line = Queues(1000), Line("one")
    assert queues.received(line, UNFINISHED_BYTES_MIN - 1) is None
    assert queues.unfinished == 0
    assert queues.received(line, UNFINISHED_BYTES_MIN) is None
    assert queues.unfinished == UNFINISHED_BYTES_MIN
    assert queues.received(line, 0) is None
    assert queues.unfinished == 0


def test_connections_of_one_node_share_a_turn() -> None:
    queues, other = Queues(1000), Line("other")
    first, second = Line("1", node="n"), Line("2", node="n")
    assert not queues.taken(first)
    assert queues.line_up(first)
    assert queues.taken(second)
    assert not queues.taken(other)
    assert not queues.line_up(second)
    assert queues.line_up(other)
    assert queues.turn("n") == (first, True)
    assert not queues.line_up(first), "it goes on after the other one"
    assert queues.turn("n") == (second, True)
    assert queues.turn("n") == (first, False)
    assert not queues.taken(first)
    assert queues.turn("other") == (other, False)

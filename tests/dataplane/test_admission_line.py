"""The line into the engine: whatever ends, in whatever order and inside whatever, no permit is left."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvxfer.config import Config
from kvxfer.dataplane.admission import Admission, SubmitQueue, WindowSlot
from kvxfer.errors import InternalError, PeerBackpressure

KIB64 = 64 << 10


class Work:
    """A part of a transfer, as the line sees it."""

    def __init__(self, transfer: int, rank: int = 2) -> None:
        self.transfer = transfer
        self.rank = rank
        self.slot: WindowSlot | None = None


def make(ops: int = 2) -> SubmitQueue[Work]:
    return SubmitQueue(
        Admission(
            Config(window_ops_max=ops, window_bytes_max=4 * KIB64, inflight_bytes_max=6 * KIB64, window_waiters_max=8)
        )
    )


def test_a_part_that_was_just_let_in_is_ended_with_the_transfer_whose_other_part_failed() -> None:
    line = make(ops=1)
    first, second, other = Work(1), Work(1), Work(2)
    assert line.enter(first, "a", 1, 0.0)
    assert not line.enter(second, "a", 1, 0.0)
    assert not line.enter(other, "a", 1, 0.0)
    line.ended(first)  # now the second part may go, but its transfer is over
    for work in line.of(1):
        assert line.leave(work)
    submitted: list[Work] = []
    line.run(submitted.append)
    assert submitted == [other]
    line.ended(other)
    line.check_idle()


def test_what_a_submit_ends_at_once_lets_the_next_one_go_without_a_deeper_call() -> None:
    line = make(ops=1)
    works = [Work(at) for at in range(8)]
    depth, deepest, seen = 0, 0, []
    assert line.enter(works[0], "a", 1, 0.0)
    for work in works[1:]:
        assert not line.enter(work, "a", 1, 0.0)

    def submit(work: Work) -> None:
        nonlocal depth, deepest
        depth += 1
        deepest = max(deepest, depth)
        seen.append(work)
        line.ended(work)
        line.run(submit)
        depth -= 1

    line.ended(works[0])
    line.run(submit)
    assert seen == works[1:]
    assert deepest == 1
    line.check_idle()


def test_what_waits_for_the_engine_is_retried_in_order_also_when_a_completion_inside_takes_it() -> None:
    line, works, seen = make(), [Work(at) for at in range(3)], []
    for work in works:
        line.wait_for_engine(work)

    def engine_full(work: Work) -> None:
        seen.append(work)
        line.wait_for_engine(work)

    def all_taken(work: Work) -> None:
        seen.append(work)
        for other in line.everybody():
            line.leave(other)

    line.retry(engine_full)
    assert seen == works[:1]
    assert list(line.everybody()) == works
    line.retry(all_taken)
    assert seen == [works[0], works[0]]
    assert len(line) == 0


def test_what_waits_for_the_engine_goes_by_rank_and_nothing_starves() -> None:
    line, seen = make(), []
    bulk = Work(0, rank=5)
    line.wait_for_engine(bulk)
    for at in range(1, 30):
        line.wait_for_engine(Work(at, rank=0))
    line.retry(seen.append)
    assert len(seen) == 30
    assert 0 < seen.index(bulk) <= 8
    assert [work.transfer for work in seen if work is not bulk] == list(range(1, 30))


def test_a_permit_that_is_left_is_an_internal_error_that_names_it() -> None:
    line = make()
    line.check_idle()
    line.enter(Work(1), "a", 7, 0.0)
    with pytest.raises(InternalError) as caught:
        line.check_idle()
    assert (caught.value.fields["inflight_ops"], caught.value.fields["inflight_bytes"]) == (1, 7)


class LineMachine(RuleBasedStateMachine):
    """Transfers of several parts; any part fails at any time, also inside a submit, and takes the others along."""

    def __init__(self) -> None:
        super().__init__()
        self.line = make()
        self.engine: list[Work] = []
        self.over: set[int] = set()
        self.transfers = 0
        self.script: list[str] = []  # what the next submits do

    def submit(self, work: Work) -> None:
        what = self.script.pop(0) if self.script else "taken"
        if work.transfer in self.over or what == "fails":
            self.fail(work)
        elif what == "ends":
            self.line.ended(work)
            self.line.run(self.submit)
        elif what == "full" and self.engine:
            self.line.wait_for_engine(work)
        else:
            self.engine.append(work)

    def fail(self, work: Work) -> None:
        """As the data plane does: the permit first, then whoever is told, then those who may go."""
        self.line.ended(work)
        if work.transfer not in self.over:
            self.cancel(work.transfer)
        self.line.run(self.submit)

    def cancel(self, transfer: int) -> None:
        self.over.add(transfer)
        for other in self.line.of(transfer):
            self.line.leave(other)
        self.line.run(self.submit)

    @rule(
        peer=st.sampled_from("ab"),
        sizes=st.lists(st.sampled_from([0, 1, KIB64, 3 * KIB64, 4 * KIB64]), min_size=1, max_size=5),
        script=st.lists(st.sampled_from(["taken", "fails", "ends", "full"]), max_size=6),
        rank=st.sampled_from([0, 2, 5]),
    )
    def start(self, peer: str, sizes: list[int], script: list[str], rank: int) -> None:
        self.script = script
        self.transfers += 1
        for size in sizes:
            work = Work(self.transfers, rank)
            if work.transfer in self.over:  # an earlier part failed at once
                return
            try:
                admitted = self.line.enter(work, peer, size, 0.0)
            except PeerBackpressure:
                self.cancel(work.transfer)
                return
            if not admitted:
                continue
            if self.line.engine_full:
                self.line.wait_for_engine(work)
            else:
                self.submit(work)

    @precondition(lambda self: self.engine)
    @rule(
        data=st.data(),
        fails=st.booleans(),
        script=st.lists(st.sampled_from(["taken", "fails", "ends", "full"]), max_size=6),
    )
    def completes(self, data: Any, fails: bool, script: list[str]) -> None:
        self.script = script
        work = self.engine.pop(data.draw(st.integers(0, len(self.engine) - 1)))
        if fails:
            self.fail(work)
        else:
            self.line.ended(work)
            self.line.run(self.submit)
        self.line.retry(self.submit)

    @precondition(lambda self: len(self.line))
    @rule(data=st.data())
    def gives_up(self, data: Any) -> None:
        self.cancel(data.draw(st.sampled_from(self.line.everybody())).transfer)

    @invariant()
    def agrees(self) -> None:
        self.line.check()
        held = [work for work in (*self.engine, *self.line.everybody()) if work.slot is not None]
        assert len(held) == self.line.admission.inflight_ops + self.line.admission.waiting
        assert not any(work.transfer in self.over for work in self.line.everybody())
        assert self.engine or not len(self.line), "somebody waits although nothing is in the way"

    def teardown(self) -> None:
        self.script = []
        while self.engine:
            self.line.ended(self.engine.pop())
            self.line.run(self.submit)
            self.line.retry(self.submit)
        self.line.check_idle()


TestLineMachine = LineMachine.TestCase
TestLineMachine.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)

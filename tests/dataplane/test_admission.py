"""Admission: order, limits, and that whatever can start does start."""

from __future__ import annotations

import ctypes
import re
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvxfer.config import Config
from kvxfer.dataplane.admission import PASSES, RANKS, SHORT_BYTES, Admission, RankScheduler, WindowSlot, rank_of
from kvxfer.errors import InternalError, InvalidLength, PeerBackpressure, TooLarge
from kvxfer.native.engine import PRIORITY_FLAGS
from tests.native.alone import compiled_text
from tests.native.sources import NATIVE

KIB64 = 64 << 10


def make(*, ops: int = 2, window: int = 4 * KIB64, total: int = 6 * KIB64, waiters: int = 8) -> Admission:
    return Admission(
        Config(window_ops_max=ops, window_bytes_max=window, inflight_bytes_max=total, window_waiters_max=waiters)
    )


def test_the_window_counts_operations() -> None:
    admission = make(ops=2)
    first, verdict = admission.admit("a", 1, 0.0)
    assert verdict == "admitted"
    assert admission.admit("a", 1, 0.0)[1] == "admitted"
    third, verdict = admission.admit("a", 1, 0.0)
    assert verdict == "queued"
    fourth, _ = admission.admit("a", 1, 0.0)
    assert admission.done(first) == [third]
    assert admission.waiting == 1
    assert admission.done(third) == [fourth]
    assert admission.inflight_ops == 2


def test_bytes_at_the_limit_pass_and_one_more_never_does() -> None:
    admission = make(window=4 * KIB64, total=6 * KIB64)
    assert admission.admit("a", 4 * KIB64, 0.0)[1] == "admitted"
    assert admission.admit("a", 1, 0.0)[1] == "queued"
    with pytest.raises(TooLarge) as caught:
        admission.admit("b", 4 * KIB64 + 1, 0.0)
    assert (caught.value.fields["limit"], caught.value.fields["option"]) == (4 * KIB64, "window_bytes_max")
    assert admission.waiting == 1, "what can never be admitted does not wait"
    admission.check()


def test_a_small_operation_does_not_overtake_a_large_one() -> None:
    admission = make(ops=8)
    large, _ = admission.admit("a", 3 * KIB64, 0.0)
    second, verdict = admission.admit("a", 3 * KIB64, 0.0)
    assert verdict == "queued"
    small, verdict = admission.admit("a", 1, 0.0)
    assert verdict == "queued"
    assert admission.done(large) == [second, small]


def test_other_peers_do_not_starve_a_large_operation_of_the_global_limit() -> None:
    admission = make(ops=64, total=4 * KIB64)
    running = [admission.admit("b", KIB64, 0.0)[0] for _ in range(2)]
    large, verdict = admission.admit("a", 4 * KIB64, 0.0)
    assert verdict == "queued"
    small, verdict = admission.admit("b", KIB64, 0.0)
    assert verdict == "queued", "there is room, but the large one is first"
    assert admission.done(running[0]) == []
    assert admission.done(running[1]) == [large]
    assert admission.done(large) == [small]


MIB = 1 << 20
CRITICAL, NORMAL, BULK = 0, 1, 2


def test_ranks_go_from_short_and_critical_to_long_and_bulk() -> None:
    ranks = [
        rank_of(priority, size) for priority in (CRITICAL, NORMAL, BULK) for size in (SHORT_BYTES, SHORT_BYTES + 1)
    ]
    assert ranks == list(range(RANKS))


def test_what_is_short_or_more_urgent_does_not_wait_for_what_fills_the_window() -> None:
    admission = Admission(Config(window_bytes_max=256 * MIB, inflight_bytes_max=256 * MIB))
    long = rank_of(NORMAL, 256 * MIB)
    first, verdict = admission.admit("a", 256 * MIB, 0.0, rank=long)
    assert verdict == "admitted"
    second, verdict = admission.admit("a", 256 * MIB, 0.0, rank=long)
    assert verdict == "queued", "of the same rank"
    assert admission.admit("a", MIB, 0.0, rank=rank_of(NORMAL, MIB))[1] == "admitted"
    critical, verdict = admission.admit("a", 256 * MIB, 0.0, rank=rank_of(CRITICAL, 256 * MIB))
    assert verdict == "admitted"
    bulk, verdict = admission.admit("a", 256 * MIB, 0.0, rank=rank_of(BULK, 256 * MIB))
    assert verdict == "admitted", "one of each rank may always be in flight: nothing starves"
    late, verdict = admission.admit("a", 256 * MIB, 0.0, rank=rank_of(BULK, 256 * MIB))
    assert verdict == "queued"
    admission.check()
    assert admission.done(first) == [second], "the only one of its rank, whatever is more urgent"
    assert admission.done(critical) == []
    assert admission.done(bulk) == [late]
    admission.check()


def test_the_limit_for_all_peers_keeps_nothing_urgent_waiting_for_bulk() -> None:
    admission = Admission(Config(window_bytes_max=8 * MIB, inflight_bytes_max=8 * MIB))
    bulk = rank_of(BULK, 8 * MIB)
    admission.admit("a", 8 * MIB, 0.0, rank=bulk)
    assert admission.admit("b", 8 * MIB, 0.0, rank=bulk)[1] == "queued"
    assert admission.admit("b", 8 * MIB, 0.0, rank=rank_of(NORMAL, 8 * MIB))[1] == "admitted"
    assert admission.admit("b", MIB, 0.0, rank=rank_of(CRITICAL, MIB))[1] == "admitted"
    admission.check()


def test_turns_serve_the_most_urgent_and_starve_nobody() -> None:
    turns = RankScheduler()
    served = [turns.take({0, 3, 5}) for _ in range(200)]
    assert served[:PASSES] == [0] * PASSES
    assert served.count(5) >= 200 // (PASSES + 2) - 1
    assert served.count(3) >= 200 // (PASSES + 2) - 1
    assert turns.take({4}) == 4


def test_a_full_line_says_so() -> None:
    admission = make(ops=1, waiters=2)
    for _ in range(3):
        admission.admit("a", 1, 0.0)
    with pytest.raises(PeerBackpressure) as caught:
        admission.admit("a", 1, 0.0)
    assert caught.value.retryable
    assert (caught.value.fields["limit"], caught.value.fields["option"]) == (2, "window_waiters_max")
    assert admission.admit("b", 1, 0.0)[1] == "admitted", "another peer has its own line"


def test_all_lines_together_are_bounded_and_the_error_names_the_limit() -> None:
    admission = Admission(Config(window_ops_max=1, waiters_max=3))
    for peer in "abc":
        admission.admit(peer, 1, 0.0)
    waiting = [admission.admit(peer, 1, 0.0)[0] for peer in "abc"]
    with pytest.raises(PeerBackpressure) as caught:
        admission.admit("a", 1, 0.0)
    assert (caught.value.fields["limit"], caught.value.fields["option"]) == (3, "waiters_max")
    admission.abandon(waiting[0])
    admission.check()
    slot, verdict = admission.admit("b", 1, 0.0)
    assert verdict == "queued"
    admission.abandon(waiting[1])
    admission.abandon(slot)
    admission.check()
    assert admission.admit("c", 1, 0.0)[1] == "queued", "what left its line, however it left, makes room"


def test_a_permit_ends_once() -> None:
    admission = make()
    slot, _ = admission.admit("a", 1, 0.0)
    admission.done(slot)
    for end in (admission.done, admission.abandon):
        with pytest.raises(InternalError, match=r"not in flight|not known"):
            end(slot)
        with pytest.raises(InternalError, match=r"not in flight|not known"):
            end(WindowSlot(peer="a", bytes=1, queued_at=0.0))
    assert admission.inflight_bytes == 0


def test_giving_up_a_permit_that_runs_is_an_error_of_ours_and_changes_nothing() -> None:
    admission = make(ops=1)
    running, _ = admission.admit("a", 7, 0.0)
    waiting, _ = admission.admit("a", 1, 0.0)
    with pytest.raises(InternalError, match="in flight"):
        admission.abandon(running)
    with pytest.raises(InternalError, match="not in flight"):
        admission.done(waiting)
    assert (admission.inflight_ops, admission.inflight_bytes, admission.waiting) == (1, 7, 1)
    admission.check()
    assert admission.done(running) == [waiting]


def test_what_waits_says_which_limit_it_waits_for() -> None:
    admission = make(ops=2)
    admission.admit("a", 3 * KIB64, 0.0)
    large, _ = admission.admit("a", 2 * KIB64, 0.0)
    small, _ = admission.admit("a", 1, 0.0)
    for slot in (large, small):  # the small one waits because the large one does
        assert str(admission.blocked_by(slot)) == f"window_bytes_max, {3 * KIB64} of {4 * KIB64} in use"
    other, verdict = admission.admit("b", 4 * KIB64, 0.0)
    assert verdict == "queued"
    assert str(admission.blocked_by(other)) == f"inflight_bytes_max, {3 * KIB64} of {6 * KIB64} in use"
    narrow = make(ops=1)
    narrow.admit("a", 0, 0.0)
    assert narrow.blocked_by(narrow.admit("a", 0, 0.0)[0]).option == "window_ops_max"


def test_abandoning_the_head_lets_the_next_one_go() -> None:
    admission = make(ops=8)
    admission.admit("a", 3 * KIB64, 0.0)
    head, _ = admission.admit("a", 3 * KIB64, 0.0)
    small, _ = admission.admit("a", 1, 0.0)
    assert admission.abandon(head) == [small]
    admission.check()


def test_a_waiter_that_leaves_frees_the_turn_for_others() -> None:
    admission = make(ops=8, total=4 * KIB64)
    running, _ = admission.admit("b", 2 * KIB64, 0.0)
    blocked, _ = admission.admit("a", 4 * KIB64, 0.0)
    small, _ = admission.admit("b", KIB64, 0.0)
    assert admission.abandon(blocked) == [small]
    admission.done(running)
    admission.done(small)
    assert admission.inflight_ops == 0
    admission.check()


@pytest.mark.parametrize("size", [-1, 1.5, "1", None])
def test_sizes_are_checked(size: int) -> None:
    with pytest.raises(InvalidLength):
        make().admit("a", size, 0.0)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4 * KIB64)), max_size=40), st.randoms())
def test_everything_admitted_or_queued_finishes_in_order(requests: list[tuple[str, int]], random: object) -> None:
    admission = make(ops=3, waiters=64)
    started: dict[str, list[WindowSlot]] = defaultdict(list)
    asked: dict[str, list[WindowSlot]] = defaultdict(list)
    running: list[WindowSlot] = []
    for peer, size in requests:
        slot, verdict = admission.admit(peer, size, 0.0)
        asked[peer].append(slot)
        if verdict == "admitted":
            running.append(slot)
            started[peer].append(slot)
    while running:
        slot = running.pop(random.randrange(len(running)))  # type: ignore[attr-defined]
        for other in admission.done(slot):
            running.append(other)
            started[str(other.peer)].append(other)
        admission.check()
    assert started == asked, "per peer, operations start in the order of asking, and all of them do"
    assert admission.inflight_bytes == 0


class AdmissionMachine(RuleBasedStateMachine):
    """Any order of calls: nothing starts twice, nothing is lost, and what waits has a reason."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = make(ops=2, waiters=4)
        self.running: list[WindowSlot] = []
        self.waiting: list[WindowSlot] = []

    def started(self, permits: list[WindowSlot]) -> None:
        for slot in permits:
            assert slot in self.waiting
            earlier = [other for other in self.waiting if (other.peer, other.rank) == (slot.peer, slot.rank)]
            assert earlier[0] is slot, "FIFO"
            self.waiting.remove(slot)
            self.running.append(slot)

    @rule(
        peer=st.sampled_from("ab"),
        size=st.sampled_from([0, 1, KIB64, 3 * KIB64, 4 * KIB64]),
        rank=st.integers(0, RANKS - 1),
    )
    def admit(self, peer: str, size: int, rank: int) -> None:
        try:
            slot, verdict = self.admission.admit(peer, size, 0.0, rank=rank)
        except PeerBackpressure:
            assert sum(slot.peer == peer for slot in self.waiting) == 4
            return
        self.waiting.append(slot)
        if verdict == "admitted":
            self.started([slot])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.running))
        self.running.remove(slot)
        self.started(self.admission.done(slot))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(slot)
        self.started(self.admission.abandon(slot))

    @invariant()
    def agrees(self) -> None:
        self.admission.check()
        assert self.admission.inflight_ops == len(self.running)
        for slot in self.waiting:  # bulk never starves, and nothing waits for what is less urgent
            assert any(other.rank <= slot.rank for other in self.running)
            assert any(other.rank == slot.rank for other in self.running)
        assert self.admission.waiting == len(self.waiting)


TestAdmissionMachine = AdmissionMachine.TestCase
TestAdmissionMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# -- the same decisions in C ------------------------------------------------------------------------------------------

SOURCE = """
#include "turns.h"
kvx_turns turns;
uint32_t peek(uint32_t waiting) { return kvx_turns_peek(&turns, waiting); }
uint32_t take(uint32_t waiting) { return kvx_turns_take(&turns, waiting); }
uint32_t rank(int critical, int bulk, uint64_t bytes) { return kvx_rank(critical, bulk, bytes); }
void reset(void) { turns = (kvx_turns){0}; }
"""


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = compiled_text(tmp_path_factory.mktemp("turns"), SOURCE)
    library.rank.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_uint64)
    return library


def constants(header: str) -> dict[str, str]:
    return dict(re.findall(r"#define (KVX_\w+)\s+(\S.*?)(?:\s+/\*.*)?$", (NATIVE / header).read_text(), re.MULTILINE))


def test_both_halves_mean_the_same(turns: ctypes.CDLL) -> None:
    found = constants("turns.h")
    assert (int(found["KVX_RANKS"]), int(found["KVX_PASSES"])) == (RANKS, PASSES)
    flags = constants("api.cdef.h")
    assert (int(flags["KVX_OP_CRITICAL"]), 0, int(flags["KVX_OP_BULK"])) == PRIORITY_FLAGS
    for priority in range(3):
        for size in (0, SHORT_BYTES, SHORT_BYTES + 1, 1 << 40):
            assert turns.rank(priority == 0, priority == 2, size) == rank_of(priority, size)


@given(st.lists(st.integers(1, (1 << RANKS) - 1), max_size=60))
def test_the_same_turns_in_c_and_in_python(turns: ctypes.CDLL, masks: list[int]) -> None:
    turns.reset()
    ours = RankScheduler()
    for mask in masks:
        peeked = turns.peek(mask)
        assert turns.take(mask) == peeked == ours.take({rank for rank in range(RANKS) if mask >> rank & 1})

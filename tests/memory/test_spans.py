"""The ledger of block ids: a block has at most one holder, and quarantine holds it as firmly as use does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvxfer.errors import RegionBusy, UsageError
from kvxfer.memory.spans import BLOCK_ID_MAX, PAGE_BLOCKS, SpanHandle, SpanLedger


def test_a_second_holder_is_refused_with_the_name_of_the_first() -> None:
    ledger = SpanLedger()
    ledger.acquire(1, [5, 6, 7], "offer A")
    with pytest.raises(RegionBusy) as caught:
        ledger.acquire(1, np.array([9, 7]), "offer B")
    assert caught.value.fields["holder"] == "offer A"
    assert caught.value.fields["block"] == 7
    assert ledger.pinned_blocks == 3
    ledger.acquire(1, [9], "offer B")
    ledger.acquire(2, [5, 6, 7], "offer C")  # another region has its own blocks
    ledger.check()


def test_quarantine_refuses_until_it_is_released() -> None:
    ledger = SpanLedger()
    handle = ledger.acquire(1, range(10), "offer A")
    ledger.quarantine(handle, "settling")
    ledger.quarantine(handle, "still settling")
    assert (ledger.pinned_blocks, ledger.quarantined_blocks) == (0, 10)
    with pytest.raises(RegionBusy, match="quarantined") as caught:
        ledger.acquire(1, [3], "offer B")
    assert caught.value.fields["reason"] == "still settling" == ledger.reason(handle)
    ledger.release(handle)
    assert (ledger.pinned_blocks, ledger.quarantined_blocks) == (0, 0)
    assert ledger.acquire(1, [3], "offer B").holder == "offer B"


def test_a_released_handle_is_dead_even_when_its_slot_is_used_again() -> None:
    ledger = SpanLedger()
    old = ledger.acquire(1, [1], "A")
    ledger.release(old)
    new = ledger.acquire(1, [1], "B")
    assert new.slot == old.slot
    with pytest.raises(UsageError, match="already released"):
        ledger.release(old)
    with pytest.raises(UsageError, match="already released"):
        ledger.quarantine(old, "late")
    assert ledger.pinned_blocks == 1
    ledger.check()


def test_no_blocks_are_a_span_too() -> None:
    ledger = SpanLedger()
    handle = ledger.acquire(1, [], "zero")
    ledger.quarantine(handle, "")
    assert ledger.reason(handle)
    ledger.release(handle)
    ledger.check()


@pytest.mark.parametrize(
    "blocks",
    [[1, 1], [-1], [BLOCK_ID_MAX + 1], [2**70], [1.0], ["a"], [[1, 2]], [True], None, [None]],
    ids=repr,
)
def test_bad_ids_are_refused_and_change_nothing(blocks: Sequence[int]) -> None:
    ledger = SpanLedger()
    with pytest.raises(UsageError):
        ledger.acquire(1, blocks, "bad")
    assert ledger.spans == ()
    ledger.check()


def test_the_largest_id_works_and_costs_one_page() -> None:
    ledger = SpanLedger()
    ledger.release(ledger.acquire(1, [0, BLOCK_ID_MAX], "sparse"))
    handle = ledger.acquire(1, [0, PAGE_BLOCKS - 1, PAGE_BLOCKS, BLOCK_ID_MAX], "sparse")
    assert ledger.pinned_blocks == 4
    ledger.check()
    ledger.release(handle)
    ledger.check()


def test_the_caller_may_change_its_array_afterwards() -> None:
    ledger = SpanLedger()
    blocks = np.array([1, 2, 3])
    handle = ledger.acquire(1, blocks, "A")
    blocks[:] = 9
    ledger.check()
    ledger.release(handle)
    assert ledger.pinned_blocks == 0


class LedgerMachine(RuleBasedStateMachine):
    """Against a dict of (region, block) -> handle."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = SpanLedger()
        self.owner: dict[tuple[int, int], SpanHandle] = {}
        self.live: dict[SpanHandle, bool] = {}

    @rule(
        region=st.integers(0, 1),
        blocks=st.lists(st.sampled_from([0, 1, 2, 3, PAGE_BLOCKS - 1, PAGE_BLOCKS, PAGE_BLOCKS + 1]), max_size=4),
    )
    def acquire(self, region: int, blocks: list[int]) -> None:
        taken = any((region, block) in self.owner for block in blocks)
        twice = len(set(blocks)) != len(blocks)
        if twice or taken:
            with pytest.raises(UsageError if twice else RegionBusy):
                self.ledger.acquire(region, blocks, "someone")
            return
        handle = self.ledger.acquire(region, blocks, "someone")
        self.live[handle] = False
        self.owner.update({(region, block): handle for block in blocks})

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(list(self.live)))
        self.ledger.quarantine(handle, "why")
        self.live[handle] = True

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(list(self.live)))
        self.ledger.release(handle)
        del self.live[handle]
        self.owner = {key: owner for key, owner in self.owner.items() if owner is not handle}

    @invariant()
    def agrees(self) -> None:
        self.ledger.check()
        quarantined = sum(self.live[owner] for owner in self.owner.values())
        assert self.ledger.quarantined_blocks == quarantined
        assert self.ledger.pinned_blocks == len(self.owner) - quarantined
        assert set(self.ledger.spans) == set(self.live)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

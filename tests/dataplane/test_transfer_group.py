"""Transfers of one request: the deadline of all of them, whether they are stalled, and what is left of either."""

from __future__ import annotations

import pytest

from kvxfer.dataplane.transfer import StallWatch, Transfer, TransferGroup
from kvxfer.errors import Stalled, TransferCancelled, TransferTimeout
from tests.dataplane.test_transfer import begin
from tests.nodes import until

LONG_S = 60.0


class Group:
    """With transfers that move as far as they are told; None: it waits for its turn."""

    def __init__(self, timeout: float = LONG_S, stall_s: float = LONG_S) -> None:
        self.noted: list[int] = []
        self.moved: dict[Transfer, int | None] = {}
        self.watch = StallWatch(stall_s, self.noted.append)
        self.group = TransferGroup(self.watch, self.moved.__getitem__, timeout)

    def add(self, moved: int | None = 0) -> Transfer:
        transfer, _ = begin()
        self.moved[transfer] = moved
        self.group.add(transfer)
        transfer.on_settled(self.group.remove)
        return transfer


async def test_the_deadline_ends_what_runs_and_nothing_else() -> None:
    made = Group(0.01)
    done, late = made.add(), made.add()
    done.part_ended(10, 5, None)
    with pytest.raises(TransferTimeout):
        await late
    assert (await done).bytes_done == 5
    assert list(made.group.running) == [late], "until it is settled"
    late.part_ended(10, 0, None)
    assert not made.group.running
    made.watch.aclose()


async def test_what_has_not_settled_when_the_request_is_over_still_has_its_deadline() -> None:
    made = Group(0.05)
    late = made.add()
    late.request_cancel(TransferCancelled("the push was aborted"))  # and the engine does not answer
    made.group.close()
    with pytest.raises(TransferTimeout):
        await late
    assert len(made.watch) == 1
    late.part_ended(10, 0, None)
    assert len(made.watch) == 0
    made.watch.aclose()


@pytest.mark.parametrize("settles_first", [False, True])
async def test_nothing_is_left_of_one_that_is_closed(settles_first: bool) -> None:
    made = Group()
    transfer = made.add()
    if not settles_first:
        made.group.close()
        assert not made.group._timer.cancelled()
    transfer.part_ended(10, 0, None)
    assert made.group._timer.cancelled() is not settles_first
    made.group.close()
    assert made.group._timer.cancelled()
    assert len(made.watch) == 0
    made.watch.aclose()


async def test_all_of_them_are_stalled_together_and_counted_once() -> None:
    made = Group(0.4, stall_s=0.04)
    first, second = made.add(), made.add()
    await until(lambda: first.stalled and second.stalled)
    assert made.add().stalled, "it waits behind them"
    assert made.noted == [1]
    for transfer in made.group.running:
        with pytest.raises(Stalled):
            await transfer
    for transfer in tuple(made.group.running):
        transfer.part_ended(10, 0, None)
    made.group.close()
    assert made.noted == [1, 0]
    made.watch.aclose()


@pytest.mark.parametrize("how", ["bytes", "ends", "waits"])
async def test_one_that_moves_on_is_enough(how: str) -> None:
    made = Group(stall_s=0.04)
    still, other = made.add(), made.add()
    await until(lambda: still.stalled)
    if how == "bytes":
        made.moved[other] = 1
    elif how == "ends":
        other.part_ended(10, 0, None)
    else:
        made.moved[still] = made.moved[other] = None
    await until(lambda: not still.stalled)
    made.watch.aclose()

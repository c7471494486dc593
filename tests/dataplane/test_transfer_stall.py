"""Something that does not move on is called stalled, and no longer when it does; nothing is looked at for nothing."""

from __future__ import annotations

import asyncio

from kvxfer.dataplane.transfer import POLLS_PER_TURN_MAX, StallWatch
from tests.nodes import until

STALL_S = 0.1


class Item:
    def __init__(self) -> None:
        self.at: int | None = 0
        self.stalled = False

    def mark_stalled(self, stalled: bool) -> None:
        self.stalled = stalled


async def test_it_is_told_and_told_again() -> None:
    noted: list[int] = []
    watch = StallWatch(STALL_S, noted.append)
    still, moving = Item(), Item()
    watch.begin(still, lambda: still.at)
    watch.begin(moving, lambda: moving.at)

    def move() -> bool:
        assert moving.at is not None
        moving.at += 1
        return still.stalled

    await until(move)
    assert not moving.stalled
    assert (watch.stalled, noted) == (1, [1])
    watch.end(moving)
    still.at = 5
    await until(lambda: not still.stalled)
    assert noted == [1, 0]
    await until(lambda: still.stalled)
    watch.end(still)
    watch.end(still)
    assert noted == [1, 0, 1, 0]
    await until(lambda: watch._timer is None)
    assert len(watch) == 0


async def test_what_waits_for_its_own_turn_is_not_stalled() -> None:
    watch = StallWatch(STALL_S, lambda _: None)
    item = Item()
    item.at = None
    watch.begin(item, lambda: item.at)
    await asyncio.sleep(3 * STALL_S)
    assert not item.stalled
    watch.aclose()
    watch.end(item)


async def test_many_are_looked_at_in_turns() -> None:
    watch = StallWatch(STALL_S, lambda _: None)
    items = [Item() for _ in range(3 * POLLS_PER_TURN_MAX)]
    for item in items:
        watch.begin(item, lambda: 0)
    await until(lambda: all(item.stalled for item in items))
    assert watch.stalled == len(items)
    for item in items:
        watch.end(item)
    assert watch.stalled == 0
    watch.aclose()

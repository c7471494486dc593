"""Many moves as one group: more than are under way at a time, without holding the loop."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

import kvxfer
from kvxfer.errors import KvxferError, PartialTransfer, TooLarge, TransferTimeout, UsageError
from kvxfer.flows.many import AT_ONCE, MOVES_MAX, Move
from kvxfer.memory.region import Region, Span

PIECE = 64
COUNT = AT_ONCE * 5 + 3
SLOW = {"transports": ("fault+tcp",), "fault_spec": "chunk_bytes=65536,chunk_ms=20"}


class Sides:
    def __init__(self, client: kvxfer.Client, source: Region, target: Region) -> None:
        self.client, self.source, self.target = client, source, target
        self.remote = target.descriptor("rw")

    def moves(self, count: int, piece: int = PIECE) -> list[Move]:
        return [Move(self.source[at * piece : (at + 1) * piece], self.remote, at * piece) for at in range(count)]


@pytest_asyncio.fixture(params=["shm", "tcp"])
async def sides(request: pytest.FixtureRequest) -> AsyncIterator[Sides]:
    async with kvxfer.local(transports=(request.param,)) as a, kvxfer.local(transports=(request.param,)) as b:
        source, target = await a.alloc(COUNT * PIECE), await b.alloc(COUNT * PIECE)
        source.array[:] = np.random.default_rng(1).integers(1, 255, COUNT * PIECE, np.uint8)
        yield Sides(a, source, target)


@pytest_asyncio.fixture
async def slow() -> AsyncIterator[Sides]:
    async with kvxfer.local(**SLOW) as a, kvxfer.local(transports=("tcp",)) as b:
        length = COUNT * (256 << 10)
        yield Sides(a, await a.alloc(length), await b.alloc(length))


async def test_more_moves_than_are_under_way_at_a_time_all_arrive(sides: Sides) -> None:
    group = await sides.client.put_many(sides.moves(COUNT))
    assert (group.state, group.bytes_done, group.settled, group.failures) == ("done", COUNT * PIECE, True, {})
    assert np.array_equal(sides.source.array, sides.target.array)


async def test_the_loop_goes_on_meanwhile(sides: Sides) -> None:
    turns, worst, last = 0, 0.0, time.thread_time()

    def turn() -> None:
        nonlocal turns, worst, last
        now = time.thread_time()
        turns, worst, last = turns + 1, max(worst, now - last), now
        if not group.done:
            loop.call_soon(turn)

    loop = asyncio.get_running_loop()
    moves = sides.moves(COUNT)
    group = sides.client.put_many(moves)
    last = time.thread_time()
    loop.call_soon(turn)
    await group
    assert turns > COUNT // AT_ONCE
    assert worst < 0.2, "CPU time of one turn, in debug mode and with a collection of garbage too"


async def test_a_late_move_that_makes_no_sense_is_found_before_anything_begins(sides: Sides) -> None:
    moves = sides.moves(COUNT)
    moves[-1] = Move(sides.source[0:PIECE], sides.remote, COUNT * PIECE)
    group = sides.client.put_many(moves)
    with pytest.raises(KvxferError):
        await group
    assert (group.state, group.settled, len(group.failures)) == ("failed", True, COUNT)
    assert not sides.target.array.any()
    moves[-1] = None  # type: ignore[call-overload]
    with pytest.raises(UsageError):
        await sides.client.put_many(moves)
    assert not sides.target.array.any()


async def test_an_early_one_is_refused_in_the_call(sides: Sides) -> None:
    with pytest.raises(KvxferError):
        sides.client.put_many([Move(sides.source[0:PIECE], sides.remote, COUNT * PIECE)])
    for nothing in ([], None, [1]):
        with pytest.raises(UsageError):
            sides.client.put_many(nothing)  # type: ignore[arg-type]
    one = sides.moves(1)
    with pytest.raises(TooLarge):
        sides.client.put_many(one * (MOVES_MAX + 1))


@pytest.mark.parametrize("place", [0, COUNT - 1])
@pytest.mark.parametrize(("offset", "length"), [(-1, PIECE), (0, -1), (0.5, PIECE), (1 << 64, PIECE)])
async def test_a_span_that_is_none_is_refused_and_nothing_begins(
    sides: Sides, place: int, offset: int, length: int
) -> None:
    moves = sides.moves(COUNT)
    moves[place] = Move(Span(sides.source, offset, length), sides.remote)
    with pytest.raises(KvxferError):
        await sides.client.put_many(moves)
    assert not sides.target.array.any()


async def test_moves_are_not_kept_as_objects(sides: Sides) -> None:
    def kept() -> int:
        return sum(isinstance(found, Move | Span) for found in gc.get_objects())

    before = kept()
    group = sides.client.put_many(sides.moves(COUNT))
    await group
    assert kept() < before + AT_ONCE
    assert list(map(group._moves.__getitem__, range(COUNT))) == sides.moves(COUNT)


async def test_whole_regions_and_several_of_them_are_found_again(sides: Sides) -> None:
    other = await sides.client.alloc(PIECE)
    other.array[:] = 9
    again = sides.target.descriptor("w")
    moves = [
        *sides.moves(AT_ONCE),
        Move(other, sides.remote, AT_ONCE * PIECE),
        Move(other, again, (AT_ONCE + 1) * PIECE),
    ]
    group = await sides.client.put_many(moves)
    assert group.bytes_done == PIECE * len(moves)
    end = AT_ONCE * PIECE
    assert bool((sides.target.array[end : end + 2 * PIECE] == 9).all())
    assert np.array_equal(sides.source.array[:end], sides.target.array[:end])


async def test_those_that_were_never_begun_fail_with_the_deadline_and_are_tried_again(slow: Sides) -> None:
    slow.source.array[:] = 7
    group = slow.client.put_many(slow.moves(COUNT, 256 << 10), timeout=0.05)
    with pytest.raises((PartialTransfer, TransferTimeout)):
        await group
    await group.wait_settled()
    failed = group.failures
    assert max(failed) == COUNT - 1
    assert list(failed) == sorted(failed)
    assert group.undefined == tuple(failed)
    assert any("not begun within" in str(error) for error in failed.values())
    slow.client.plane._queue.check()
    assert slow.client.plane.permits == 0


async def test_a_cancelled_group_begins_no_more(slow: Sides) -> None:
    group = slow.client.put_many(slow.moves(COUNT, 256 << 10), timeout=60)
    await asyncio.sleep(0)
    await group.cancel()
    assert group.settled
    assert group.state in ("cancelled", "partial")
    assert COUNT - 1 in group.failures
    assert slow.client.plane.permits == 0


async def test_an_atomic_group_ends_with_its_first_failure(slow: Sides) -> None:
    moves = slow.moves(COUNT, 256 << 10)
    group = slow.client.put_many(moves, atomic=True, timeout=0.05)
    with pytest.raises(TransferTimeout):
        await group
    assert (group.state, group.undefined) == ("timed_out", tuple(range(COUNT)))
    await group.wait_settled()
    assert slow.client.plane.permits == 0


async def test_bytes_done_moves_while_one_transfer_is_under_way(slow: Sides) -> None:
    transfer = slow.client.put(slow.source[0 : 16 << 20], slow.remote, timeout=60)
    seen = set()
    async with asyncio.timeout(60):
        while not transfer.done:
            seen.add(transfer.bytes_done)
            await asyncio.sleep(0.01)
    assert (await transfer).bytes_done == 16 << 20
    between = sorted(value for value in seen if 0 < value < 16 << 20)
    assert len(between) >= 3, "at least every 64 MiB, and this is less"

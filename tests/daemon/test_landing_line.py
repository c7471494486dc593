"""The line for room in the landing pool: order, ends of a wait, and that nobody in it is passed over."""

from __future__ import annotations

import asyncio

import pytest

from kvxfer.daemon.landing import BODIES_BYTES_MAX, PASSES_MAX, StagingQueue, StagingRoom
from kvxfer.errors import BusyError, PeerDraining, TooManyPending, UsageError
from kvxfer.wire import messages as m
from tests.daemon.test_landing import MIB, free, land, settle
from tests.nodes import node, until, worker


async def test_in_the_order_in_which_they_came_and_small_ones_pass_a_large_one_so_often() -> None:
    async with node(landing_bytes_max=4 * MIB) as server, worker(server) as first, worker(server) as other:
        held = await first.ask(land("held", MIB))
        order: list[str] = []

        async def wait(key: str, length: int) -> m.Claimed:
            claimed = await other.ask(land(key, length, wait_s=20.0))
            order.append(key)
            return claimed  # type: ignore[no-any-return]

        large = asyncio.ensure_future(wait("large", 4 * MIB))
        await until(lambda: len(server.landings._line) == 1)
        for number in range(PASSES_MAX):  # with and without waiting
            small = await first.ask(land(f"s{number}", MIB, wait_s=5.0 * (number % 2)))
            await first.ask(settle(small, "cancelled"))
            await until(lambda: server.landings.used_bytes == MIB)
        with pytest.raises(BusyError) as refused:
            await first.ask(land("hasty", MIB))
        assert refused.value.fields["waiting"] == 1
        last = asyncio.ensure_future(wait("last", MIB))
        await until(lambda: len(server.landings._line) == 2)
        await first.ask(settle(held, "cancelled"))
        await other.ask(settle(await large, "cancelled"))
        await other.ask(settle(await last, "cancelled"))
        assert order == ["large", "last"]
        await free(server)
        assert server.landings._bodies.total == server.landings._held.total == server.landings._pieces.total == 0


class Waits:
    """One in a line."""

    def __init__(self, line: StagingQueue, account: str, room: StagingRoom, order: list[str]) -> None:
        self.room = room
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        name = f"{account}{len(line)}"
        self.task = asyncio.ensure_future(
            line.wait(
                lambda: self.room,
                account=account,
                asker=self,
                request=1,
                gone=self.gone,
                wait_s=60.0,
                then=lambda: order.append(name),
            )
        )


async def test_who_has_its_share_holds_up_nobody_and_a_full_line_of_one_node_keeps_places_for_others() -> None:
    line, order = StagingQueue(90), list[str]()
    greedy = []
    for _ in range(81):
        greedy.append(Waits(line, "a", StagingRoom.SHARE, order))
        await asyncio.sleep(0)
    with pytest.raises(TooManyPending, match="81 of 90, 81 of them of the one who asks"):
        await Waits(line, "a", StagingRoom.SHARE, order).task
    assert line.pass_all()
    other = Waits(line, "b", StagingRoom.FITS, order)
    assert await other.task
    assert order == ["b81"]
    greedy[3].room = StagingRoom.FITS
    line.wake_next()
    assert await greedy[3].task
    line.give_up(greedy[70], 1)
    assert await greedy[70].task
    line.fail(PeerDraining("over"))
    ends = await asyncio.gather(*(one.task for one in greedy), return_exceptions=True)
    assert sum(isinstance(end, PeerDraining) for end in ends) == 79
    assert not line
    assert order == ["b81", "a3"]


async def test_one_large_one_at_the_head_of_another_line_lets_others_pass() -> None:
    line, order = StagingQueue(90), list[str]()
    large = Waits(line, "a", StagingRoom.NONE, order)
    await asyncio.sleep(0)
    for _ in range(PASSES_MAX):
        assert await Waits(line, "b", StagingRoom.FITS, order).task
    late = Waits(line, "b", StagingRoom.FITS, order)
    await asyncio.sleep(0)
    assert not late.task.done()
    assert not line.pass_all()
    large.room = StagingRoom.FITS
    line.wake_next()
    assert await large.task
    assert await late.task
    assert order[-2:] == ["a0", "b1"]


async def test_bodies_of_landings_are_bounded_for_a_node_and_for_all() -> None:
    """What waits and what lives: thousands of landings with 6 MiB each would be gigabytes."""
    async with node(landing_bytes_max=MIB) as server, worker(server) as first:
        await first.ask(land("held", MIB, body=b""))
        waiting = []
        for number in range(BODIES_BYTES_MAX // (6 * MIB) + 1):  # one after the other: the link has a bound, too
            asked = land(f"w{number}", MIB, wait_s=60.0, body=bytes(6 * MIB))
            waiting.append(asyncio.ensure_future(first.ask(asked, timeout=60)))
            await until(lambda: len(server.landings._line) + sum(one.done() for one in waiting) == len(waiting))
        refused = [one for one in waiting if one.done()]
        for one in refused:
            with pytest.raises(TooManyPending, match="bodies"):
                await one
        assert 1 <= len(refused) <= 3
        assert server.landings._bodies.total <= BODIES_BYTES_MAX
        for one in waiting:
            one.cancel()
        await until(lambda: server.landings._bodies.total < MIB)
        await asyncio.wait(waiting)


async def test_each_wait_has_an_end() -> None:
    async with node(landing_bytes_max=MIB, waiting_max=2) as server, worker(server) as first:
        held = await first.ask(land("held"))
        with pytest.raises(BusyError):
            await first.ask(land("late", wait_s=0.05))
        with pytest.raises(UsageError, match="already"):
            await first.ask(land("held", wait_s=5.0))
        with pytest.raises(UsageError, match="bad wait"):
            await first.ask(land("long", wait_s=1e6))
        line = server.landings._line
        given_up = asyncio.ensure_future(first.ask(land("given up", wait_s=20.0)))
        await until(lambda: len(line) == 1)
        async with worker(server) as gone:
            leaving = asyncio.ensure_future(gone.ask(land("gone", wait_s=20.0)))
            await until(lambda: len(line) == 2)
            with pytest.raises(TooManyPending):
                await first.ask(land("one too many", wait_s=20.0))
        await asyncio.wait([leaving])
        assert leaving.exception() is not None
        given_up.cancel()
        await until(lambda: not line)
        await first.ask(settle(held, "cancelled"))
        await free(server)
        assert server.landings.refused == 1


async def test_a_node_that_drains_has_no_room_for_those_who_wait() -> None:
    async with node(landing_bytes_max=MIB) as server, worker(server) as first:
        await first.ask(land("held"))
        waiting = [asyncio.ensure_future(first.ask(land(f"w{number}", wait_s=20.0))) for number in range(3)]
        await until(lambda: len(server.landings._line) == 3)
        server.dispatcher.drain()
        for one in waiting:
            with pytest.raises(PeerDraining):
                await one


async def test_who_waits_at_another_node_is_forwarded_and_given_up_there() -> None:
    async with node(landing_bytes_max=MIB) as there, node() as here, worker(here) as asker, worker(there) as local:
        held = await local.ask(land("held"))
        there_nodes = tuple(there.addresses)
        waiting = asyncio.ensure_future(asker.ask(land("w", node=there_nodes, wait_s=20.0), timeout=20))
        given_up = asyncio.ensure_future(asker.ask(land("x", node=there_nodes, wait_s=20.0), timeout=20))
        await until(lambda: len(there.landings._line) == 2)
        given_up.cancel()
        await until(lambda: len(there.landings._line) == 1)
        await local.ask(settle(held, "cancelled"))
        assert isinstance(await waiting, m.Claimed)
        with pytest.raises(BusyError):
            await local.ask(land("y"))

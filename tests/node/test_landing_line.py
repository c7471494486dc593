"""The line for room in the landing pool: order, ends of a wait, and that nobody in it is passed over."""

from __future__ import annotations

import asyncio

import pytest

from kvxfer.errors import BusyError, PeerDraining, TooManyPending, UsageError
from kvxfer.wire import messages as m
from tests.node.test_landing import MIB, free, land, settle
from tests.nodes import node, until, worker


async def test_in_the_order_in_which_they_came_a_large_one_included() -> None:
    async with node(landing_bytes_max=4 * MIB) as server, worker(server) as first, worker(server) as other:
        held = [await first.ask(land(f"h{number}", 2 * MIB)) for number in range(2)]
        order: list[str] = []

        async def wait(key: str, length: int) -> m.Claimed:
            claimed = await other.ask(land(key, length, wait_s=20.0))
            order.append(key)
            return claimed  # type: ignore[no-any-return]

        waiting = []
        for key, length in (("large", 4 * MIB), ("small", MIB // 2), ("last", 4 * MIB)):  # no two at a time
            waiting.append(asyncio.ensure_future(wait(key, length)))
            await until(lambda: len(server.landings._line) == len(waiting))
        await first.ask(settle(held[0], "cancelled"))
        await until(lambda: server.landings.used_bytes == 2 * MIB)
        with pytest.raises(BusyError) as refused:  # there is room, but for those who came before
            await first.ask(land("hasty", MIB))
        assert refused.value.fields["waiting"] == 3
        await first.ask(settle(held[1], "cancelled"))
        large = await waiting[0]
        assert order == ["large"]
        await other.ask(settle(large, "cancelled"))
        for one in waiting[1:]:
            await other.ask(settle(await one, "cancelled"))
        assert order == ["large", "small", "last"]
        await free(server)


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

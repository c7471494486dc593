"""Small transfers over tcp: the event loop's own thread takes the answers, until something else is under way."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import BusyError
from kvxfer.native.engine import Event, EventKind, OpKind
from kvxfer.native.status import StatusCode
from tests.native import kvxd
from tests.native.conformance import KIB, LIMIT_S, MIB, Side, settled, within
from tests.native.kvxd import Frame, Speaker, Type
from tests.native.tcp_owner import KEY, Owner, connect, import_, initiator, owner, wired
from tests.native.tcp_servers import lying_owner

SMALL = 4 * KIB
LENGTH = 4 * MIB
ROUNDS = 200
STRAY_WAKE_UPS = 20  # the watch over the other host, for one


def threads() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


def switches(tids: set[str]) -> int:
    """How often these threads went to sleep."""
    total = 0
    for tid in tids:
        for line in (Path("/proc/self/task") / tid / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                total += int(line.split()[1])
    return total


class Dialler:
    """An initiator with memory of its own, connected to an owner."""

    def __init__(self, side: Side, peer: int, handle: int) -> None:
        self.side, self.peer, self.handle = side, peer, handle
        self.region, self.bytes = side.alloc(LENGTH)
        self.bytes[:] = np.random.default_rng(5).integers(0, 256, LENGTH, dtype=np.uint8)

    def submit(self, kind: OpKind, offset: int, length: int, **more: Any) -> Event | tuple[int, asyncio.Future[Event]]:
        return self.side.engine.submit_one(kind, self.region.id, self.handle, offset, offset, length, **more)

    async def move(self, kind: OpKind, offset: int, length: int, **more: Any) -> Event:
        return await settled(self.submit(kind, offset, length, **more))


async def dialled(side: Side, one: Owner) -> Dialler:
    return Dialler(side, *await wired(side, one))


@asynccontextmanager
async def pair(**changes: Any) -> AsyncIterator[tuple[Owner, Dialler]]:
    async with owner(length=LENGTH) as one, initiator(**changes) as side:
        yield one, await dialled(side, one)


@pytest.mark.parametrize("kind", [OpKind.PUT, OpKind.GET])
async def test_no_progress_thread_is_woken_for_an_answer(kind: OpKind) -> None:
    async with owner(length=LENGTH) as one:
        before = threads()
        async with initiator() as side:
            ours = threads() - before
            dialler = await dialled(side, one)
            for _ in range(3):
                assert (await dialler.move(kind, 0, SMALL)).status == 0
            slept = switches(ours)
            for number in range(ROUNDS):
                assert (await dialler.move(kind, number * SMALL, SMALL)).status == 0
            assert switches(ours) - slept <= STRAY_WAKE_UPS
            assert (one.inside[: 3 * SMALL] == dialler.bytes[: 3 * SMALL]).all()


async def test_small_and_large_take_turns() -> None:
    async with pair() as (one, dialler):
        dice = random.Random(7)
        for _ in range(60):
            sizes = [dice.choice((1, SMALL, 16 * KIB, 17 * KIB, MIB)) for _ in range(dice.randint(1, 3))]
            starts = [dice.randrange(LENGTH - size) for size in sizes]
            outcomes = [dialler.submit(OpKind.PUT, *where) for where in zip(starts, sizes, strict=True)]
            for outcome, size in zip(outcomes, sizes, strict=True):
                event = await settled(outcome)
                assert (event.status, event.bytes) == (0, size)
            for start, size in zip(starts, sizes, strict=True):
                assert (one.inside[start : start + size] == dialler.bytes[start : start + size]).all()


async def test_more_small_ones_than_fit_in_flight() -> None:
    async with pair() as (one, dialler):
        pending = []
        for number in range(LENGTH // SMALL):
            while True:
                try:
                    pending.append(dialler.submit(OpKind.PUT, number * SMALL, SMALL, notify=(number, 1)))
                    break
                except BusyError:
                    await asyncio.sleep(0)
        for outcome in pending:
            assert (await settled(outcome)).status == 0
        assert (one.inside == dialler.bytes).all()
        told = [(await one.event(EventKind.NOTIFY)).tag for _ in pending]
        assert sorted(told) == list(range(len(pending)))


async def test_a_loop_that_is_late_loses_nothing() -> None:
    async with pair() as (one, dialler):
        assert (await dialler.move(OpKind.PUT, 0, SMALL)).status == 0
        outcomes = [dialler.submit(OpKind.GET, number * SMALL, SMALL) for number in range(8)]
        deadline = time.monotonic() + LIMIT_S
        while one.count("served_get_bytes") < 8 * SMALL and time.monotonic() < deadline:
            pass  # the loop does something else; the answers wait in the socket
        for outcome in outcomes:
            assert (await settled(outcome)).status == 0


async def test_cancelling_while_the_loop_receives() -> None:
    async with pair() as (_, dialler):
        for number in range(50):
            outcome = dialler.submit(OpKind.GET if number % 2 else OpKind.PUT, 0, SMALL)
            assert not isinstance(outcome, Event)
            dialler.side.engine.cancel(outcome[0])
            assert (await settled(outcome)).status in (0, StatusCode.CANCELLED)
        assert (await dialler.move(OpKind.PUT, 0, SMALL)).status == 0


@pytest.mark.parametrize("idle", [True, False])
async def test_the_owner_goes_away(idle: bool) -> None:
    async with initiator() as side:
        async with owner(length=LENGTH) as one:
            dialler = await dialled(side, one)
            assert (await dialler.move(OpKind.PUT, 0, SMALL)).status == 0
            outcome = None if idle else dialler.submit(OpKind.PUT, 0, SMALL)
        assert (await side.event(EventKind.PEER_DOWN)).id == dialler.peer
        if outcome is not None:
            assert (await settled(outcome)).status in (0, StatusCode.PEER_LOST)


async def test_closing_a_peer_with_answers_under_way() -> None:
    async with pair() as (one, dialler):
        for _ in range(20):
            outcome = dialler.submit(OpKind.PUT, 0, SMALL)
            closed = dialler.side.engine.close_peer(dialler.peer)
            assert (await settled(outcome)).status in (0, StatusCode.PEER_LOST)
            assert (await within(closed)).status == 0
            dialler.peer, dialler.handle = await wired(dialler.side, one)


async def test_an_answer_to_something_never_asked() -> None:
    async def lie(speaker: Speaker, put: Frame) -> None:
        assert put.type == Type.PUT
        speaker.send(Frame(type=Type.ACK, op=put.op + 1, segment=kvxd.SEGMENT_UNKNOWN), KEY)

    async with lying_owner(lie) as endpoint, initiator() as side:
        peer, event = await connect(side, endpoint)
        assert event.status == 0
        handle, event = await import_(side, peer)
        assert event.status == 0
        mine, _ = side.alloc(SMALL)
        outcome = side.engine.submit_one(OpKind.PUT, mine.id, handle, 0, 0, SMALL)
        assert (await settled(outcome)).status == StatusCode.PEER_LOST
        assert (await side.event(EventKind.PEER_DOWN)).id == peer


async def test_spinning_completes_in_the_call() -> None:
    async with pair(spin_us=1000) as (one, dialler):

        async def until_inline(kind: OpKind) -> None:
            while not isinstance(outcome := dialler.submit(kind, 0, SMALL, notify=(1, 2)), Event):
                assert (await settled(outcome)).status == 0
            assert (outcome.status, outcome.bytes) == (0, SMALL)

        await within(until_inline(OpKind.PUT))
        await within(until_inline(OpKind.GET))
        assert (one.inside[:SMALL] == dialler.bytes[:SMALL]).all()

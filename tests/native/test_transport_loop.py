"""The loop transport stepped by hand: what happens between two steps is visible and the same each time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

from kvxfer.errors import RegionBusy
from kvxfer.native.engine import Event, EventKind, OpKind
from kvxfer.native.status import StatusCode
from tests.native.conformance import KIB, Outcome, Side, short_directory, within

CHUNK = 4 * KIB


class Stepped:
    """One engine with `manual=True`, connected to itself."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.engine = side.engine
        self.remote, self.remote_bytes = side.alloc(64 * KIB)
        self.mine, self.mine_bytes = side.alloc(64 * KIB)
        self.grant = self.engine.grant(self.remote.id, 0, 64 * KIB, 3)
        self.peer = 0
        self.import_ = 0

    async def connect(self) -> None:
        self.peer, connecting = self.engine.connect(0, self.engine.engine_id.hex())
        assert self.engine.step(0, 10) == 1
        assert (await within(connecting)).status == 0
        grant = self.grant
        self.import_, importing = self.engine.import_(
            self.peer, grant=grant.id, generation=grant.generation, length=grant.length, access=3, key=grant.key
        )
        assert not importing.done()
        assert self.engine.step(0, 10) == 1
        assert (await within(importing)).status == 0

    def put(self, length: int, **more: tuple[int, int]) -> asyncio.Future[Event]:
        outcome: Outcome = self.engine.submit_one(OpKind.PUT, self.mine.id, self.import_, 0, 0, length, **more)  # type: ignore[arg-type]
        assert isinstance(outcome, tuple), "nothing completes inline when stepped by hand"
        return outcome[1]

    def arrived(self) -> int:
        return int(np.count_nonzero(self.remote_bytes == 1))


@pytest_asyncio.fixture
async def stepped() -> AsyncIterator[Stepped]:
    with short_directory() as directory:
        side = Side(directory, (), manual=True, chunk_bytes=CHUNK, notify_max=2)
        made = Stepped(side)
        try:
            await made.connect()
            made.mine_bytes[:] = 1
            yield made
        finally:
            side.close()


async def test_each_step_copies_one_chunk(stepped: Stepped) -> None:
    done = stepped.put(3 * CHUNK + 10)
    for step in range(1, 4):
        assert stepped.engine.step(0) == 1
        stepped.engine.drain()
        assert stepped.arrived() == step * CHUNK
        assert not done.done()
    assert stepped.engine.step(0, 5) == 1
    stepped.engine.drain()
    assert done.done()
    assert done.result()[:2] == (EventKind.TRANSFER, 0)
    assert stepped.arrived() == 3 * CHUNK + 10
    assert stepped.engine.step(0, 5) == 0


async def test_operations_go_in_order(stepped: Stepped) -> None:
    first, second = stepped.put(10), stepped.put(10)
    assert stepped.engine.step(0, 1) == 1
    stepped.engine.drain()
    assert (first.done(), second.done()) == (True, False)
    assert stepped.engine.step(0, 100) == 1


async def test_a_cancel_stops_between_chunks(stepped: Stepped) -> None:
    outcome = stepped.engine.submit_one(OpKind.PUT, stepped.mine.id, stepped.import_, 0, 0, 4 * CHUNK)
    assert isinstance(outcome, tuple)
    stepped.engine.step(0, 2)
    stepped.engine.cancel(outcome[0])
    assert not outcome[1].done()
    assert stepped.engine.step(0, 5) == 1
    event = await within(outcome[1])
    assert (event.status, event.bytes) == (StatusCode.CANCELLED, 2 * CHUNK)
    assert stepped.arrived() == 2 * CHUNK


async def test_a_revoke_is_quiet_at_once_between_chunks(stepped: Stepped) -> None:
    done = stepped.put(4 * CHUNK)
    stepped.engine.step(0, 1)
    revoked = stepped.engine.revoke(stepped.grant.id)
    stepped.engine.drain()
    assert revoked.done(), "no chunk is being copied, so nothing moves any more"
    assert stepped.engine.step(0, 5) == 1
    event = await within(done)
    assert (event.status, event.bytes, event.segment) == (StatusCode.REVOKED, CHUNK, 0)
    assert stepped.arrived() == CHUNK


async def test_memory_is_pinned_until_the_last_step(stepped: Stepped) -> None:
    done = stepped.put(2 * CHUNK)
    for _ in range(2):
        with pytest.raises(RegionBusy):
            stepped.engine.release(stepped.mine.id)
        stepped.engine.step(0, 1)
    assert (await within(done)).status == 0
    assert (await within(stepped.engine.release(stepped.mine.id))).status == 0


async def test_closing_a_peer_overtakes_its_operations(stepped: Stepped) -> None:
    running, waiting = stepped.put(4 * CHUNK), stepped.put(CHUNK)
    stepped.engine.step(0, 1)
    closed = stepped.engine.close_peer(stepped.peer)
    assert not running.done()
    assert stepped.engine.step(0, 100) == 1
    assert (await within(closed)).status == 0
    assert (running.result().status, running.result().bytes) == (StatusCode.PEER_LOST, CHUNK)
    assert (waiting.result().status, waiting.result().bytes) == (StatusCode.PEER_LOST, 0)
    assert stepped.engine.attached(stepped.grant.id) == 0


async def test_a_full_notification_queue_stops_the_head(stepped: Stepped) -> None:
    done = [stepped.put(1, notify=(number, 0)) for number in range(4)]
    assert stepped.engine.step(0, 100) == 2, "two are not drained yet"
    assert stepped.engine.step(0, 100) == 0
    stepped.engine.drain()
    assert [future.done() for future in done] == [True, True, False, False]
    assert stepped.engine.step(0, 100) == 2
    stepped.engine.drain()
    assert [event.tag for event in stepped.side.events] == [0, 1, 2, 3]
    assert all(future.done() for future in done)


async def test_closing_the_engine_ends_what_was_never_stepped(stepped: Stepped) -> None:
    done = stepped.put(2 * CHUNK)
    stepped.engine.step(0, 1)
    stepped.engine.close()
    assert (done.result().status, done.result().bytes) == (StatusCode.CLOSED, CHUNK)


async def test_another_endpoint_is_unreachable(stepped: Stepped) -> None:
    _, connecting = stepped.engine.connect(0, "ab" * 16)
    stepped.engine.step(0, 1)
    assert (await within(connecting)).status == StatusCode.UNREACHABLE
    assert stepped.engine.step(0, 5) == 1, "the failed peer is closed by the engine itself"
    assert stepped.engine.counters().peers == 1


async def test_a_put_onto_itself_moves_like_memmove(stepped: Stepped) -> None:
    stepped.remote_bytes[:100] = np.arange(100, dtype=np.uint8)
    stepped.engine.submit_one(OpKind.PUT, stepped.remote.id, stepped.import_, 0, 10, 90)
    stepped.engine.step(0, 5)
    assert stepped.remote_bytes[:100].tolist() == [*range(10), *range(90)]

"""`await transfer.cancel()` means it: what is written over the span straight after it is still there later, on the side
that asked and on the side that owns the memory, over every transport, under load, for puts and gets of all sizes.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import numpy as np
import pytest

from kvxfer.errors import KvxferError
from kvxfer.memory.region import Region
from kvxfer.testing.nodes import two_nodes
from kvxfer.worker.client import Client, local
from tests.native.simulated import simulated

FULL = os.environ.get("KVXFER_TEST_FULL") == "1"
ROUNDS = 8000 if FULL else 400
AT_ONCE = 8
SLOT_BYTES = 4 << 20
SIZES = (1, 4_000, 70_000, 300_000, 1_000_000, SLOT_BYTES)
PATTERN, SOURCE = 0x5A, 0xC3
pytestmark = [pytest.mark.once, pytest.mark.slow]


@asynccontextmanager
async def clients(transport: str) -> AsyncIterator[tuple[Client, Client]]:
    """Who asks, and who owns; one client may be both (loop reaches nobody else)."""
    if transport == "loop":
        async with local(transports=("loop",)) as one:
            yield one, one
    else:
        options = {"inline_bytes_max": 64 << 10, "chunk_bytes": 64 << 10}
        async with two_nodes([transport], **options) as (first, second):
            yield first, second


class Trial:
    """One slot on either side; what the target of the last transfer has to hold until the next."""

    def __init__(self, ours: Region, theirs: Region, slot: int, rng: Random, client: Client) -> None:
        self.client, self.rng = client, rng
        self.begin = slot * SLOT_BYTES
        self.sides = {
            side: region.array[self.begin : self.begin + SLOT_BYTES]
            for side, region in (("ours", ours), ("theirs", theirs))
        }
        self.region = ours
        self.descriptor = theirs.descriptor("rw", offset=self.begin, length=SLOT_BYTES)
        self.written: tuple[str, int] | None = None
        self.outcomes: Counter[str] = Counter()

    async def run(self, count: int) -> None:
        """So many transfers, each given up at some moment of its life."""
        for _ in range(count):
            way, length = self.rng.choice(("put", "get")), self.rng.choice(SIZES)
            await self.once(way, length)
            await asyncio.sleep(0)
        self.look()

    async def once(self, way: str, length: int) -> None:
        source, target = ("ours", "theirs") if way == "put" else ("theirs", "ours")
        self.look()
        self.sides[source][:length] = SOURCE
        span = self.region[self.begin : self.begin + length]
        start = self.client.put if way == "put" else self.client.get
        transfer = start(span, self.descriptor, timeout=20)
        await self.a_moment(length)
        await transfer.cancel()
        assert transfer.done
        assert transfer.settled
        if transfer.state == "done":
            assert (self.sides[target][:length] == SOURCE).all()
        self.outcomes[f"{way} {transfer.state}"] += 1
        # From here on every byte of the target is ours alone, and those of the source are read by nobody.
        self.sides[target][:length] = PATTERN
        self.sides[source][:length] = PATTERN + 1
        self.written = (target, length)

    async def a_moment(self, length: int) -> None:
        """From nothing to a little longer than the transfer lasts."""
        dice = self.rng.random()
        if dice < 0.3:
            return
        if dice < 0.6:
            for _ in range(self.rng.randrange(4)):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(self.rng.uniform(0, 0.0002 + length / 1e9))

    def look(self) -> None:
        """Nothing has moved since."""
        if self.written is not None:
            side, length = self.written
            stray = np.flatnonzero(self.sides[side][:length] != PATTERN)
            assert not len(stray), f"byte {stray[0]} of {length} moved on the side {side} after cancel() had returned"


@pytest.mark.timeout(600 if FULL else 120)
@pytest.mark.parametrize("transport", ["shm", "tcp", "loop"])
async def test_no_byte_moves_after_cancel(transport: str) -> None:
    async with clients(transport) as (ours, theirs):
        here, there = await ours.alloc(AT_ONCE * SLOT_BYTES), await theirs.alloc(AT_ONCE * SLOT_BYTES)
        trials = [Trial(here, there, slot, Random(f"{transport} {slot}"), ours) for slot in range(AT_ONCE)]
        async with asyncio.TaskGroup() as group:
            for trial in trials:
                group.create_task(trial.run(ROUNDS // AT_ONCE))
        await asyncio.sleep(0.05)
        outcomes: Counter[str] = Counter()
        for trial in trials:
            trial.look()
            outcomes += trial.outcomes
        assert sum(outcomes.values()) == ROUNDS
        # Otherwise it has shown nothing.
        for way in ("put", "get"):
            assert outcomes[f"{way} cancelled"] >= ROUNDS // 100, outcomes
        assert ours.plane.engine.counters().inflight == 0


@pytest.mark.timeout(600 if FULL else 120)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_no_byte_moves_after_the_owner_has_taken_it_back(transport: str) -> None:
    """The other side's end of the same promise: after `revoke` the owner's memory is its own again."""
    count = ROUNDS // 4
    outcomes: Counter[str] = Counter()
    rng = Random(f"owner {transport}")
    async with clients(transport) as (ours, theirs):
        here, there = await ours.alloc(AT_ONCE * SLOT_BYTES), await theirs.alloc(AT_ONCE * SLOT_BYTES)
        here.array[:] = SOURCE

        async def owner(slot: int) -> None:
            begin = slot * SLOT_BYTES
            for _ in range(count // AT_ONCE):
                length = rng.choice(SIZES[-3:])
                mine = there.array[begin : begin + length]
                descriptor = there.descriptor("w", offset=begin, length=length)
                await ours.plane.prepare(descriptor)
                transfer = ours.put(here[begin : begin + length], descriptor, timeout=20)
                if rng.random() < 0.4:
                    await asyncio.sleep(rng.uniform(0, length / 1e10))
                await there.revoke(descriptor)
                mine[:] = PATTERN
                await transfer.wait_settled()
                await asyncio.sleep(0.001)
                assert (mine == PATTERN).all(), f"{length} bytes: one moved after revoke() had returned"
                outcomes[transfer.state] += 1
                assert transfer.error is None or isinstance(transfer.error, KvxferError)

        async with asyncio.TaskGroup() as group:
            for slot in range(AT_ONCE):
                group.create_task(owner(slot))
    assert outcomes["failed"] >= count // 40, outcomes


CARD_ROUNDS = 400 if FULL else 60


@simulated(LATENCY_US=1500)
async def test_no_byte_moves_after_cancel_between_cards() -> None:
    """hixl over its simulator: nothing of a cancelled transfer is written later, whatever the library still does."""
    rng, outcomes = Random("hixl"), Counter[str]()
    length = 2 << 20
    pattern, source = (np.full(length, value, dtype=np.uint8) for value in (PATTERN, SOURCE))
    async with local(transports=("hixl",), device_ipc=False) as a, local(transports=("hixl",), device_ipc=False) as b:
        near = await a.alloc(length, memory="hbm", device=0)
        far = await b.alloc(length, memory="hbm", device=1)
        descriptor = far.descriptor("rw")
        for at in range(CARD_ROUNDS):
            put = bool(at % 2)
            start, target, other = (a.put, far, near) if put else (a.get, near, far)
            await other.write(0, source)
            await a.plane.prepare(descriptor, near.kind)
            transfer = start(near, descriptor, timeout=20)
            if at % 4 >= 2:
                await asyncio.sleep(rng.uniform(0, 0.003))
            await transfer.cancel()
            assert transfer.settled
            outcomes[transfer.state] += 1
            await target.write(0, pattern)
            await other.write(0, pattern)
            await asyncio.sleep(rng.uniform(0, 0.004))
            assert (await target.read() == PATTERN).all(), (at, put, transfer.state)
    assert outcomes["cancelled"] >= CARD_ROUNDS // 20, outcomes

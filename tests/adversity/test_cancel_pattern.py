"""`await transfer.cancel()` means it: what is written over the span straight after it is still there later, on the side
that asked and on the side that owns the memory, over every transport, under load, for puts and gets of all sizes.

That these tests can fail is shown by `tests/native/test_mutants.py`, which plays them with engines that break the
promise on purpose.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import pytest

from kvxfer.client import Client
from kvxfer.embedded import local
from kvxfer.errors import KvxferError
from kvxfer.memory.region import Region
from tests.native.simulated import simulated
from tests.support.nodes import two_nodes

FULL = os.environ.get("KVXFER_TEST_FULL") == "1"
ROUNDS = 8000 if FULL else 400
AT_ONCE = 8
SLOT_BYTES = 4 << 20
SIZES = (1, 4_000, 70_000, 300_000, 1_000_000, SLOT_BYTES)
PATTERN, SOURCE = 0x5A, 0xC3
STRIDE = 997  # between the bytes of a pattern that is written in a few microseconds
# Copies that look often whether they are still wanted, and copies that take long to notice; pages lent, and copied.
FINE = {"inline_bytes_max": 64 << 10, "chunk_bytes": 64 << 10}
KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "shm": ("shm", FINE),
    "shm-coarse": ("shm", {"inline_bytes_max": 64 << 10, "chunk_bytes": 2 << 20, "copy_threads": 4}),
    "tcp": ("tcp", FINE),
    "tcp-copied": ("tcp", {**FINE, "tcp_zero_copy": False}),
    "tcp-sealed": ("tcp", {**FINE, "tcp_encryption": "on"}),
    "loop": ("loop", {"chunk_bytes": 2 << 20}),
    "fault": ("fault+shm", {**FINE, "fault_spec": "chunk_bytes=262144,chunk_ms=1"}),
}
pytestmark = [pytest.mark.once, pytest.mark.slow]


@asynccontextmanager
async def clients(kind: str) -> AsyncIterator[tuple[Client, Client]]:
    """Who asks, and who owns; one client may be both (loop reaches nobody else)."""
    transport, options = KINDS[kind]
    if transport == "loop":
        async with local(transports=("loop",), **options) as one:
            yield one, one
    else:
        async with two_nodes([transport], **options) as (first, second):
            yield first, second


def stray(span: Any, pattern: int) -> str:
    """How many bytes of it are not of the pattern, and which values they have; empty: all are of it."""
    wrong = np.flatnonzero(span != pattern)
    values = " ".join(f"{value:#x}" for value in np.unique(span[wrong])[:8])
    return f"{len(wrong)} of {len(span)} bytes, from number {wrong[0]}, are {values}" if len(wrong) else ""


@dataclass(frozen=True, slots=True)
class Load:
    """How often, how many at once, and of what a trial consists: sizes, gaps in the patterns, and how long it waits."""

    rounds: int
    at_once: int
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    seconds_per_byte: float

    @property
    def slot_bytes(self) -> int:
        return self.sizes[-1]


LOADS = {
    "crowd": Load(ROUNDS, AT_ONCE, SIZES, (1, STRIDE), 1e-9),
    # Nothing else to do for the event loop: it is there at once when a transfer is reported as over.
    "alone": Load(ROUNDS // 8, 1, (AT_ONCE * SLOT_BYTES,), (STRIDE,), 1e-10),
}


class Trial:
    """One slot on either side; what the target of the last transfer has to hold until the next."""

    def __init__(self, ours: Region, theirs: Region, load: Load, slot: int, rng: Random, client: Client) -> None:
        self.client, self.rng, self.load = client, rng, load
        self.begin = slot * load.slot_bytes
        self.sides = {
            side: region.array[self.begin : self.begin + load.slot_bytes]
            for side, region in (("ours", ours), ("theirs", theirs))
        }
        self.region = ours
        self.descriptor = theirs.descriptor("rw", offset=self.begin, length=load.slot_bytes)
        self.written: tuple[str, int, int] | None = None
        self.outcomes: Counter[str] = Counter()

    async def run(self) -> None:
        """So many transfers, each given up at some moment of its life."""
        for _ in range(self.load.rounds // self.load.at_once):
            way, length = self.rng.choice(("put", "get")), self.rng.choice(self.load.sizes)
            await self.once(way, length, self.rng.choice(self.load.steps))
            await asyncio.sleep(self.rng.choice((0, 0, 0.001)))
        self.look()

    async def once(self, way: str, length: int, step: int) -> None:
        source, target = ("ours", "theirs") if way == "put" else ("theirs", "ours")
        self.look()
        self.sides[source][:length:step] = SOURCE
        span = self.region[self.begin : self.begin + length]
        start = self.client.put if way == "put" else self.client.get
        transfer = start(span, self.descriptor, timeout=20)
        await self.a_moment(length)
        await transfer.cancel()
        assert transfer.done
        assert transfer.settled
        wrong = stray(self.sides[target][:length:step], SOURCE) if transfer.state == "done" else ""
        # From here on every byte of the target is ours alone, and those of the source are read by nobody. A pattern
        # with gaps is there at once: before somebody who is late has gone on. The source comes first: then it shows
        # who reads it later.
        self.sides[source][:length:step] = PATTERN + 1
        self.sides[target][:length:step] = PATTERN
        assert not wrong, f"{wrong} on the side {target} after it was done"
        self.outcomes[f"{way} {transfer.state}"] += 1
        self.written = (target, length, step)

    async def a_moment(self, length: int) -> None:
        """From nothing to a little longer than the transfer lasts."""
        dice = self.rng.random()
        if dice < 0.3:
            return
        if dice < 0.6:
            for _ in range(self.rng.randrange(4)):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(self.rng.uniform(0, 0.0002 + length * self.load.seconds_per_byte))

    def look(self) -> None:
        """Nothing has moved since."""
        if self.written is not None:
            side, length, step = self.written
            wrong = stray(self.sides[side][:length:step], PATTERN)
            assert not wrong, f"{wrong} on the side {side} after cancel() had returned"


async def play(kind: str, load: Load, ours: tuple[Client, Region], theirs: Region) -> None:
    client, here = ours
    trials = [Trial(here, theirs, load, slot, Random(f"{kind} {slot}"), client) for slot in range(load.at_once)]
    async with asyncio.TaskGroup() as group:
        for trial in trials:
            group.create_task(trial.run())
    await asyncio.sleep(0.05)
    outcomes: Counter[str] = Counter()
    for trial in trials:
        trial.look()
        outcomes += trial.outcomes
    assert sum(outcomes.values()) == load.rounds
    # Otherwise it has shown nothing.
    for way in ("put", "get"):
        assert outcomes[f"{way} cancelled"] >= load.rounds // 100, outcomes
    assert client.plane.engine.counters().inflight == 0


@pytest.mark.timeout(600 if FULL else 120)
@pytest.mark.parametrize(
    ("kind", "load"),
    [*((kind, "crowd") for kind in KINDS), ("shm-coarse", "alone"), ("tcp", "alone"), ("loop", "alone")],
)
async def test_no_byte_moves_after_cancel(kind: str, load: str) -> None:
    async with clients(kind) as (ours, theirs):
        here, there = await ours.alloc(AT_ONCE * SLOT_BYTES), await theirs.alloc(AT_ONCE * SLOT_BYTES)
        await play(kind, LOADS[load], (ours, here), there)


async def briefly(kind: str) -> None:
    """Both loads, a few rounds of each."""
    async with clients(kind) as (ours, theirs):
        here, there = await ours.alloc(AT_ONCE * SLOT_BYTES), await theirs.alloc(AT_ONCE * SLOT_BYTES)
        for load in LOADS.values():
            await play(kind, replace(load, rounds=24), (ours, here), there)


@pytest.mark.timeout(600 if FULL else 120)
@pytest.mark.parametrize(
    ("kind", "load"),
    [*((kind, "crowd") for kind in ("shm", "tcp", "tcp-sealed", "loop")), ("shm-coarse", "alone"), ("tcp", "alone")],
)
async def test_no_byte_moves_after_the_owner_has_taken_it_back(kind: str, load: str) -> None:
    """The other side's end of the same promise: after `revoke` the owner's memory is its own again."""
    way = LOADS[load]
    count = way.rounds // 4
    rng, under_way = Random(f"owner {kind}"), 0
    async with clients(kind) as (ours, theirs):
        here, there = await ours.alloc(AT_ONCE * SLOT_BYTES), await theirs.alloc(AT_ONCE * SLOT_BYTES)
        here.array[:] = SOURCE

        async def owner(slot: int) -> None:
            nonlocal under_way
            begin = slot * way.slot_bytes
            for _ in range(count // way.at_once):
                length, step = rng.choice(way.sizes[-3:]), rng.choice(way.steps)
                mine = there.array[begin : begin + length : step]
                descriptor = there.descriptor("w", offset=begin, length=length)
                await ours.plane.prepare(descriptor)
                transfer = ours.put(here[begin : begin + length], descriptor, timeout=20)
                if rng.random() < 0.4:
                    await asyncio.sleep(rng.uniform(0, length / 1e10))
                under_way += not transfer.done
                await there.revoke(descriptor)
                mine[:] = PATTERN
                await transfer.wait_settled()
                await asyncio.sleep(0.001)
                wrong = stray(mine, PATTERN)
                assert not wrong, f"{wrong} after revoke() had returned"
                assert transfer.error is None or isinstance(transfer.error, KvxferError)

        async with asyncio.TaskGroup() as group:
            for slot in range(way.at_once):
                group.create_task(owner(slot))
    assert under_way >= count // 4, under_way  # otherwise it has shown nothing


CARD_ROUNDS = 400 if FULL else 40
CARD_BYTES, CARD_LATENCY_US = 2 << 20, 1500
ROUTES = {"network": False, "copy": True}


@asynccontextmanager
async def cards(route: str) -> AsyncIterator[tuple[tuple[Client, Region], tuple[Client, Region]]]:
    """Two clients and memory of theirs on two cards, reached through the library or by the driver's copies."""
    options = {"transports": ("hixl",), "device_ipc": ROUTES[route]}
    async with local(**options) as a, local(**options) as b:
        near = await a.alloc(CARD_BYTES, memory="hbm", device=0)
        far = await b.alloc(CARD_BYTES, memory="hbm", device=1)
        yield (a, near), (b, far)


async def cancelled_between_cards(route: str) -> None:
    rng, under_way = Random(f"hixl {route}"), 0
    async with cards(route) as ((client, near), (_, far)):
        descriptor = far.descriptor("rw")
        for at in range(CARD_ROUNDS):
            put = bool(at % 2)
            start, target, other = (client.put, far, near) if put else (client.get, near, far)
            await other.write(0, card_bytes(SOURCE))
            await client.plane.prepare(descriptor, near.kind)
            transfer = start(near, descriptor, timeout=20)
            if at % 4 >= 2:
                await asyncio.sleep(rng.uniform(0, 0.003))
            under_way += not transfer.done
            await transfer.cancel()
            assert transfer.settled
            await target.write(0, card_bytes(PATTERN))
            await other.write(0, card_bytes(PATTERN))
            await asyncio.sleep(rng.uniform(0, 0.004))
            wrong = stray(await target.read(), PATTERN)
            assert not wrong, f"{wrong} on the side {'theirs' if put else 'ours'} after cancel() had returned"
    assert under_way >= CARD_ROUNDS // 4, under_way  # otherwise it has shown nothing


async def taken_back_between_cards(route: str) -> None:
    rng, under_way = Random(f"hixl owner {route}"), 0
    async with cards(route) as ((client, near), (_, far)):
        await near.write(0, card_bytes(SOURCE))
        for _ in range(CARD_ROUNDS):
            descriptor = far.descriptor("w")
            await client.plane.prepare(descriptor, near.kind)
            transfer = client.put(near, descriptor, timeout=20)
            await asyncio.sleep(rng.uniform(0, 0.002))
            under_way += not transfer.done
            await far.revoke(descriptor)
            await far.write(0, card_bytes(PATTERN))
            await transfer.wait_settled()
            await asyncio.sleep(rng.uniform(0, 0.004))
            wrong = stray(await far.read(), PATTERN)
            assert not wrong, f"{wrong} after revoke() had returned"
            assert transfer.error is None or isinstance(transfer.error, KvxferError)
    assert under_way >= CARD_ROUNDS // 4, under_way  # otherwise it has shown nothing


def card_bytes(value: int) -> Any:
    return np.full(CARD_BYTES, value, dtype=np.uint8)


@simulated(LATENCY_US=CARD_LATENCY_US)
async def test_no_byte_moves_after_cancel_between_cards() -> None:
    """hixl over its simulator: nothing of a cancelled transfer is written later, whatever the library still does."""
    for route in ROUTES:
        await cancelled_between_cards(route)


@simulated(LATENCY_US=CARD_LATENCY_US)
async def test_no_byte_moves_between_cards_after_the_owner_has_taken_it_back() -> None:
    for route in ROUTES:
        await taken_back_between_cards(route)

"""Puts that lend their pages to the kernel: the right bytes, the old bytes, and copies where lending cannot be."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvxfer.native.engine import Event, OpKind
from kvxfer.native.status import StatusCode
from tests.native.conformance import KIB, MIB, Bytes, Outcome, Side, segments, settled, within
from tests.native.tcp_owner import Owner, initiator, owner, wired

LENGTH = 16 * MIB
LENT = 256 * KIB  # the least payload of a frame that is lent
ROUNDS = 300


def sent(side: Side) -> tuple[int, int]:
    """Bytes that this side's tcp lent, and those that it copied."""
    [row] = [row for row in side.engine.counters().transports if row.name == "tcp"]
    return row.lent_bytes, row.copied_bytes


class Source:
    """Memory of the initiator, and the owner's that it writes to."""

    def __init__(self, side: Side, one: Owner, handle: int, memory: Bytes, region: int) -> None:
        self.side, self.one, self.handle, self.bytes, self.region = side, one, handle, memory, region

    def put(self, rows: npt.NDArray[np.uint64], **more: Any) -> Outcome:
        return self.side.engine.submit(OpKind.PUT, self.region, self.handle, rows, **more)

    def expect(self, rows: npt.NDArray[np.uint64], copy: Bytes) -> None:
        for local, remote, length in rows.tolist():
            assert np.array_equal(self.one.inside[remote : remote + length], copy[local : local + length])


@asynccontextmanager
async def source(how: str = "alloc", **changes: Any) -> AsyncIterator[Source]:
    settings = {"frame_bytes": MIB, "tcp_streams": 2} | changes
    async with owner(length=LENGTH) as one, initiator(**settings) as side:
        region, memory = side.make(how, LENGTH)
        _, handle = await wired(side, one)
        memory[:] = np.random.default_rng(11).integers(0, 256, LENGTH, dtype=np.uint8)
        yield Source(side, one, handle, memory, region.id)


def scattered(dice: random.Random, longest: int) -> npt.NDArray[np.uint64]:
    """Blocks that overlap nowhere on the owner's side, at any offset and of any length."""
    rows, at = [], dice.randrange(5000)
    while len(rows) < 40:
        length = dice.randint(1, longest)
        if at + length > LENGTH:
            break
        rows.append((dice.randrange(LENGTH - length), at, length))
        at += length + dice.randrange(3)
    return segments(*rows)


@pytest.mark.parametrize("how", ["alloc", "register"])
@pytest.mark.parametrize("check", [False, True])
async def test_any_pages_arrive_as_they_are(how: str, check: bool) -> None:
    dice = random.Random(f"{how} {check}")
    async with source(how) as s:
        for longest in (100, 5000, 40_000, 300_000, 3_000_000):
            for _ in range(4):
                rows = scattered(dice, longest)
                assert (await settled(s.put(rows, check=check))).status == 0
                s.expect(rows, s.bytes)
        lent, copied = sent(s.side)
        assert lent > 20 * MIB
        assert copied > 0  # the short ones


async def test_what_is_lent_is_not_copied() -> None:
    async with source() as s:
        assert (await settled(s.put(segments((0, 0, LENGTH))))).status == 0
        lent, copied = sent(s.side)
        assert lent == LENGTH
        assert copied == 0
        s.expect(segments((0, 0, LENGTH)), s.bytes)


@pytest.mark.parametrize(
    "rows",
    [segments((0, 0, LENT - 1)), segments(*((n * 8192, n * 4000, 4000) for n in range(512)))],
    ids=["short", "crumbs"],
)
async def test_what_lending_would_not_help_is_copied(rows: npt.NDArray[np.uint64]) -> None:
    async with source() as s:
        assert (await settled(s.put(rows))).status == 0
        assert sent(s.side)[0] == 0
        s.expect(rows, s.bytes)


async def test_gets_are_always_copied() -> None:
    """Their grant may be taken back while they lie in a socket's queue."""
    async with source() as s:
        outcome = s.side.engine.submit_one(OpKind.GET, s.region, s.handle, 0, 0, LENGTH)
        assert (await settled(outcome)).status == 0
        assert sent(s.one)[0] == 0
        assert np.array_equal(s.bytes, s.one.inside)


async def test_the_option_forbids_it() -> None:
    async with source(tcp_zero_copy=False) as s:
        assert (await settled(s.put(segments((0, 0, LENGTH))))).status == 0
        assert sent(s.side)[0] == 0
        s.expect(segments((0, 0, LENGTH)), s.bytes)


async def test_after_the_end_the_source_is_free() -> None:
    """What is written into the source straight after a put is never seen by the other side."""
    dice = random.Random(3)
    async with source() as s:
        for number in range(ROUNDS):
            length = dice.randint(LENT, 2 * MIB)
            local, remote = dice.randrange(LENGTH - length), dice.randrange(LENGTH - length)
            s.bytes[local : local + length] = number % 251
            outcome = s.put(segments((local, remote, length)), notify=(number, 0))
            assert (await settled(outcome)).status == 0
            s.bytes[local : local + length] = 255
            there = s.one.inside[remote : remote + length]
            assert (there == number % 251).all(), number
        assert sent(s.side)[0] > ROUNDS * LENT


async def test_after_a_cancel_the_source_is_free() -> None:
    """Nor straight after a cancelled put has settled: what was under way has arrived by then."""
    dice = random.Random(4)
    async with source(cancel_ms=60_000) as s:  # no reset: every started frame is answered
        s.one.inside[:] = 0
        cancelled = 0
        for number in range(60):
            s.bytes[:] = number
            outcome = s.put(segments((0, 0, LENGTH)))
            assert not isinstance(outcome, Event)
            token, done = outcome
            least = dice.randrange(LENGTH // 2)
            while not done.done() and s.side.engine.progress(token) < least:
                await asyncio.sleep(0)
            if not done.done():
                s.side.engine.cancel(token)
            event = await settled(outcome)
            cancelled += event.status == StatusCode.CANCELLED
            s.bytes[:] = 255
            again = await settled(s.side.engine.submit(OpKind.PUT, 0, s.handle, None, notify=(1, 1)))
            assert again.status == 0
            assert not (s.one.inside == 255).any(), number
        assert cancelled > 0


async def test_no_pipe_is_left_open() -> None:
    def pipes() -> int:
        return sum("pipe:" in str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.exists())

    before = pipes()
    async with source() as s:
        assert (await settled(s.put(segments((0, 0, LENGTH))))).status == 0
        assert pipes() == before + 4  # both ends, of each stream
        s.side.engine.submit(OpKind.PUT, s.region, s.handle, segments((0, 0, LENGTH)))
    assert pipes() == before


async def test_an_owner_that_dies_meanwhile() -> None:
    async with initiator(frame_bytes=MIB) as side:
        async with owner(length=LENGTH) as one:
            region, memory = side.alloc(LENGTH)
            memory[:] = 7
            _, handle = await wired(side, one)
            outcomes = [side.engine.submit_one(OpKind.PUT, region.id, handle, 0, 0, LENGTH) for _ in range(4)]
        for outcome in outcomes:
            assert (await settled(outcome)).status in (0, StatusCode.PEER_LOST, StatusCode.NOT_SENT)
        assert (await within(side.engine.release(region.id))).status == 0


DENIED = """
import asyncio, ctypes, json, platform, struct, sys
vmsplice, splice = {"x86_64": (278, 275), "aarch64": (75, 76)}[platform.machine()]
denied = {"vmsplice": vmsplice, "splice": splice}[sys.argv[1]]
libc = ctypes.CDLL(None, use_errno=True)
program = b"".join(
    struct.pack("HBBI", *step)
    for step in ((0x20, 0, 0, 0), (0x15, 0, 1, denied), (0x06, 0, 0, 0x00050000 | 1), (0x06, 0, 0, 0x7FFF0000))
)
buffer = ctypes.create_string_buffer(program)
fprog = struct.pack("HxxxxxxQ", 4, ctypes.addressof(buffer))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, fprog, 0, 0) == 0
from tests.native.test_tcp_lend import LENGTH, sent, segments, settled, source

async def main():
    async with source() as s:
        for check in (True, False):
            assert (await settled(s.put(segments((0, 0, LENGTH)), check=check))).status == 0
            s.expect(segments((0, 0, LENGTH)), s.bytes)
        print(json.dumps(sent(s.side)))

asyncio.run(main())
"""


@pytest.mark.once
@pytest.mark.parametrize("call", ["vmsplice", "splice"])
def test_a_sandbox_that_denies_it(call: str) -> None:
    done = subprocess.run([sys.executable, "-c", DENIED, call], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lent, copied = json.loads(done.stdout)
    assert lent == 0
    assert copied == 2 * LENGTH

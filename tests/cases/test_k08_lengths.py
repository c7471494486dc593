"""K08: lengths and offsets have 64 bits everywhere: no short call is an error, and no sum wraps around."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvxfer.errors import InvalidLength, KvxferError, OutOfRange
from kvxfer.memory.region import check_span
from kvxfer.native.engine import OpKind
from kvxfer.native.status import error_for
from tests.cases.facts import limit, pattern
from tests.cases.harness import BOTH, ROOT
from tests.cases.scale import scaled
from tests.native import kvxd
from tests.native.tcp_owner import attached, owner
from tests.support.nodes import two_nodes

pytestmark = [pytest.mark.once, pytest.mark.timeout(300)]
U64 = 1 << 64
SHORT_IO = Path(__file__).with_name("short_io.c")
# A worker whose every call moves at most 64 KiB, and often fails for no reason or moves less.
SCRIPT = """
import asyncio, sys
import numpy as np
from tests.support.nodes import two_nodes

async def main(transport, length):
    async with two_nodes([transport], timeout_s=60) as (a, b):
        data = np.random.default_rng(43).integers(0, 256, length, dtype=np.uint8)
        private = await a.register(data)
        theirs = await b.alloc(length)
        await a.put(private, theirs.descriptor("w"))
        assert np.array_equal(theirs.array, data), "put"
        back = np.zeros(length, np.uint8)
        ours = await a.register(back)
        await a.get(ours, theirs.descriptor("r"))
        assert np.array_equal(back, data), "get"
        # From memory that the other side registered: it cannot be mapped, so the kernel copies it.
        source = await b.register(data.copy())
        target = await a.alloc(length)
        await a.get(target, source.descriptor("r"))
        assert np.array_equal(target.array, data), "registered"
        print("exact", flush=True)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.fixture(scope="session")
def short_io(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that stands before libc and makes calls short."""
    made = tmp_path_factory.mktemp("short") / "short_io.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", made, SHORT_IO, "-ldl"], check=True)
    return made


@BOTH
def test_c43_short_calls_are_neither_errors_nor_success(transport: str, short_io: Path) -> None:
    environment = {**os.environ, "LD_PRELOAD": str(short_io), "PYTHONPATH": ROOT}
    arguments = [sys.executable, "-c", SCRIPT, transport, str(scaled(20 << 20, 100 << 20) + 12345)]
    ran = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=limit(100))
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "exact" in ran.stdout
    counted = [line for line in ran.stderr.splitlines() if line.startswith("short_io:")]
    assert counted, ran.stderr[-2000:]
    capped, failed = (int(word.partition("=")[2]) for word in counted[-1].split()[1:3])
    assert capped > 10, "it was in the way"
    assert failed >= 1


@BOTH
async def test_c43_more_than_1024_pieces_in_one_transfer(transport: str) -> None:
    count, size, step = 5000, 96, 160
    async with two_nodes([transport]) as (a, b):
        source, target = await a.alloc(count * step), await b.alloc(count * step)
        source.array[:] = np.frombuffer(pattern(43, 0, count * step), np.uint8)
        rows = np.arange(count, dtype=np.uint64)
        segments = np.stack([rows * step, (count - 1 - rows) * step, np.full(count, size, np.uint64)], axis=1)
        await part_of(a, source.id, target.descriptor("w"), np.ascontiguousarray(segments))
        given, got = source.array.reshape(count, step), target.array.reshape(count, step)
        assert np.array_equal(got[::-1, :size], given[:, :size])
        assert not got[:, size:].any()


async def part_of(client: object, region: int, descriptor: object, segments: np.ndarray) -> None:  # type: ignore[type-arg]
    from kvxfer.dataplane.plane import WorkRequest

    part = WorkRequest(kind=OpKind.PUT, region=region, descriptor=descriptor, segments=segments)  # type: ignore[arg-type]
    await client.plane.start([part], timeout=limit(20), peer="test")  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.full
@BOTH
async def test_c43_a_transfer_of_more_than_two_gib(transport: str) -> None:
    from tests.adversity.test_large import NEEDED, available_bytes, test_a_single_transfer_of_more_than_four_gib

    if available_bytes() < NEEDED:
        pytest.skip("needs 6 GiB of free memory")
    await test_a_single_transfer_of_more_than_four_gib(transport)


# -- C45 --------------------------------------------------------------------------------------------------------


def wrong_ranges(size: int) -> list[tuple[int, int]]:
    return [
        (U64 - 4096, 8192),
        (0, U64 - 1),
        (size, 1),
        (size - 1, 2),
        (U64 - 1, 1),
        (U64 - 64, size),  # offset + length wraps to a value inside
        (1, size),
    ]


@BOTH
async def test_c45_no_sum_wraps_around(transport: str) -> None:
    size = 64 << 10
    async with two_nodes([transport]) as (a, b):
        ours, theirs = await a.alloc(size), await b.alloc(size)
        ours.array[:], theirs.array[:] = 1, 2
        described = theirs.descriptor("rw")
        for offset, length in wrong_ranges(size):
            with pytest.raises(OutOfRange):
                ours[offset : offset + length] if offset + length < U64 else check_span(offset, length, size, "x")
            with pytest.raises(OutOfRange):
                theirs.descriptor("r", offset=offset, length=length)
            for row in ([offset, 0, length], [0, offset, length]):
                with pytest.raises((OutOfRange, InvalidLength)):  # made by hand: what no call of the API would make
                    await part_of(a, ours.id, described, np.array([row], np.uint64))
        if size < 1 << 20:
            with pytest.raises(OutOfRange):
                a.put(ours, described, target_offset=1)
        assert (ours.array == 1).all()
        assert (theirs.array == 2).all(), "nothing was read or written"
        await a.put(ours[size - 5 : size], described, target_offset=size - 5)
        assert (theirs.array[-5:] == 1).all(), "exactly to the end is fine"
        assert (theirs.array[:-5] == 2).all()


@pytest.mark.parametrize("kind", [kvxd.Type.PUT, kvxd.Type.GET])
async def test_c45_messages_made_by_hand(kind: kvxd.Type) -> None:
    """What no engine of ours would send, by somebody who holds the key; the owner compares, and answers by name."""
    async with owner() as one:
        size, before = one.length, one.bytes.copy()
        for offset, length in wrong_ranges(size):
            async with await attached(one) as speaker:
                payload = bytes(length) if kind is kvxd.Type.PUT and length <= 2 * size else b""
                speaker.send(one.frame(kind, (offset, length), payload=payload), one.key)
                if length > 2 * size:  # longer than any frame may be: whoever says so is no peer
                    assert await speaker.closed() == b""
                    continue
                answer = await speaker.frame(one.key)
                assert error_for(answer.status).code == OutOfRange.code, (offset, length)
                assert not answer.payload
        assert np.array_equal(one.bytes, before), "nothing was written"
        async with await attached(one) as speaker:
            speaker.send(one.frame(kvxd.Type.PUT, (size - 5, 5), payload=b"12345"), one.key)
            assert (await speaker.frame(one.key)).status == 0
            assert bytes(one.inside[-5:]) == b"12345", "exactly to the end is fine"


def test_c45_like_a_model_with_whole_numbers() -> None:
    rng = random.Random(45)
    edges = [0, 1, 2, 4095, 4096, U64 - 1, U64 - 2, U64 - 4096, U64 // 2, 1 << 32, (1 << 32) - 1, 1 << 63]
    for _ in range(scaled(30_000, 100_000)):
        size, offset, length = (
            min(U64 - 1, max(0, rng.choice(edges) + rng.randrange(-3, 4)))
            if rng.random() < 0.7
            else rng.getrandbits(64)
            for _ in range(3)
        )
        fits = length >= 1 and offset + length <= size
        try:
            check_span(offset, length, size, "model")
        except KvxferError:
            assert not fits, (size, offset, length)
        else:
            assert fits, (size, offset, length)

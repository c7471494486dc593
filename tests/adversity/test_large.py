"""One transfer of more than 4 GiB: lengths and offsets have 64 bits everywhere, and no call's own limit shows."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from tests.support.nodes import two_nodes

GIB = 1 << 30
LENGTH = 4 * GIB + (5 << 20) + 123
NEEDED = 6 * GIB


def available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.skipif(available_bytes() < NEEDED, reason="needs 6 GiB of free memory")
@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_single_transfer_of_more_than_four_gib(transport: str) -> None:
    async with two_nodes([transport], timeout_s=60) as (a, b):
        # Pages that nobody wrote are one page of zeros: a large source that costs nothing.
        memory = mmap.mmap(-1, LENGTH, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        ours = np.frombuffer(memory, dtype=np.uint8)
        marks = [0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, LENGTH - 1]
        ours[marks] = range(1, len(marks) + 1)
        source = await a.register(ours)
        target = await b.alloc(LENGTH)
        target.array[marks] = 255
        put = await a.put(source, target.descriptor("w"))
        assert put.bytes_done == LENGTH
        assert list(target.array[marks]) == list(range(1, len(marks) + 1))
        assert int(np.count_nonzero(target.array[-(6 << 20) :])) == 4, (
            "around and beyond 4 GiB nothing else was written"
        )
        target.array[2**32 + 1] = 77
        piece = await a.alloc(4096)
        await a.get(piece, target.descriptor("r"), source_offset=2**32)
        assert list(piece.array[:3]) == [5, 77, 0]
        await source.release()

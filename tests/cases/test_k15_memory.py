"""K15: nothing grows with the number of transfers, connections or registrations."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import kvxfer
from kvxfer.errors import KvxferError
from tests.cases.harness import BOTH
from tests.cases.scale import scaled
from tests.nodes import until
from tests.support.nodes import two_nodes

pytestmark = [pytest.mark.once, pytest.mark.timeout(1800)]
BLOCK = 4096


def resident_bytes() -> int:
    """Without what the allocator keeps for the next ones: hundreds of tests have run in this process before."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # only this C library has it
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def handles(*clients: kvxfer.Client) -> dict[str, Any]:
    """What must be the same at 20% and at the end."""
    found: dict[str, Any] = {"fds": len(os.listdir("/proc/self/fd"))}
    # The loop's own executor is bounded by itself, and makes its threads when it first has so much to do at once.
    found["threads"] = len([one for one in threading.enumerate() if not one.name.startswith("asyncio_")])
    found["tasks"] = len([task for task in asyncio.all_tasks() if not task.done()])
    for number, client in enumerate(clients):
        counters = client.plane.engine.counters()
        for name in ("inflight", "regions", "grants", "imports", "threads", "quarantined_grants"):
            found[f"{name} {number}"] = getattr(counters, name)
    return found


def objects() -> Counter[str]:
    gc.collect()
    return Counter(type(one).__qualname__ for one in gc.get_objects())


@BOTH
async def test_c71_hours_of_work_leave_nothing(transport: str) -> None:
    transfers, others = scaled(3000, 200_000), scaled(40, 5000)
    rng = Random(71)
    async with two_nodes([transport], tcp_threads=1, copy_threads=1) as (a, b):
        source, target = await a.alloc(64 * BLOCK), await b.alloc(64 * BLOCK)
        good = target.descriptor("w")
        bad = replace(good, generation=good.generation + 1)
        memory = np.zeros(BLOCK, np.uint8)
        ended: Counter[str] = Counter()

        async def one(number: int) -> None:
            place = (number % 64) * BLOCK
            fate = rng.random()
            transfer = a.put(source[place : place + BLOCK], bad if fate < 0.05 else good, target_offset=place)
            if 0.05 <= fate < 0.1:
                await transfer.cancel()
            with contextlib.suppress(KvxferError):
                await transfer
            await transfer.wait_settled()
            ended[transfer.state] += 1

        async def some(share: float, first: int) -> None:
            for start in range(0, int(transfers * share), 50):
                await asyncio.gather(*(one(first + start + index) for index in range(50)))
            for _ in range(int(others * share)):
                region = await a.register(memory)
                await region.release()
                async with kvxfer.Client(b.control._path, config=b.config) as short:
                    assert not short.closed

        await some(0.2, 0)
        await until(lambda: not handles(a, b)["inflight 0"])
        await asyncio.sleep(0.2)
        warm, warm_bytes, warm_objects = handles(a, b), resident_bytes(), objects()
        await some(0.8, transfers)
        await asyncio.sleep(0.2)
        with contextlib.suppress(TimeoutError):  # said below, with what differs
            await until(lambda: handles(a, b) == warm, within_s=10)
        assert handles(a, b) == warm
        grown = objects()
        grown.subtract(warm_objects)
        assert not {name: count for name, count in grown.items() if count > 100}
        allowed = max(8 << 20, (1 << 20) * transfers // 50_000)
        assert resident_bytes() - warm_bytes <= allowed
        assert ended["failed"] >= 0.02 * transfers, ended
        assert sum(ended.values()) >= transfers * 0.95
        assert set(ended) <= {"done", "failed", "cancelled"}, "each has one terminal outcome"

"""K01: blocks are never reused or freed while a transfer can still touch them (abort, lease expiry, timeout)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvxfer.testing.worker import WorkerFailed
from tests.cases.harness import Cluster, slow

pytestmark = [pytest.mark.once, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]
BLOCK, BLOCKS = 64 << 10, 8
LENGTH = BLOCK * BLOCKS


async def memory(found: Cluster, length: int = LENGTH) -> None:
    """The same region on both sides; A's holds pattern(1)."""
    await asyncio.gather(*(side.do("alloc", name="m", length=length) for side in found.values()))
    await found["a"].do("fill", name="m", seed=1, block=BLOCK)


async def begin(found: Cluster, way: str, name: str, **how: Any) -> str:
    """A's memory goes to B's: A puts or B gets. Returns who moves it."""
    mover, owner = ("a", "b") if way == "push" else ("b", "a")
    described = (await found[owner].do("describe", name="m"))["descriptor"]
    kind = "put" if way == "push" else "get"
    await found[mover].do("start", name=name, way=kind, region="m", descriptor=described, **how)
    return mover


async def test_c05_release_means_finished(nodes: Cluster) -> None:
    a, b = await nodes.fresh(a=slow(nodes.transport, "chunk_bytes=65536,chunk_ms=100"))
    await memory(nodes, 32 * BLOCK)
    await begin(nodes, "push", "t")
    op = (await a.do("state", name="t"))["op"]
    with pytest.raises(WorkerFailed) as busy:
        await a.do("release", name="m")
    assert busy.value.code == "region_busy"
    assert f"transfers={op}" in str(busy.value), "it lists the transfers"
    await asyncio.sleep(0.3)
    ended = await a.do("cancel", name="t")
    assert (ended["state"], ended["settled"]) == ("cancelled", 1)
    assert 0 < ended["bytes"] < 32 * BLOCK, "it was in the middle"
    digests = {(await b.do("digest", name="m"))["sha"]}
    await a.do("release", name="m")
    for _ in range(9):
        await asyncio.sleep(0.2)
        digests.add((await b.do("digest", name="m"))["sha"])
    assert len(digests) == 1
    # drain=True waits for what runs.
    await a.do("alloc", name="m", length=4 * BLOCK)
    await begin(nodes, "push", "u")
    await a.do("release", name="m", drain=True)
    assert (await a.do("state", name="u"))["state"] == "done"

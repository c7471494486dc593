"""K02: nobody waits for ever: a failure or abort is told to the other side, and every state has a deadline."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.cases.facts import limit
from tests.cases.harness import Cluster, slow

pytestmark = [pytest.mark.once, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]
BLOCKS = list(range(16))


async def test_c08_killed_while_decode_waits(nodes: Cluster) -> None:
    a, b = await nodes.fresh(a=slow(nodes.transport, "chunk_bytes=4096,chunk_ms=100"))
    for side in (a, b):
        await side.do("cache", name="c", blocks=16)
    before = await b.holds()
    await b.do("offer", name="r", cache="c", blocks=BLOCKS)
    await a.do("push", name="r", to=b.node, cache="c", blocks=BLOCKS)
    await asyncio.sleep(0.5)
    assert (await b.holds())["pinned"] == 16
    a.process.kill()
    killed = time.monotonic()
    ended = await b.do("ended", name="r")
    await a.restart_worker()
    assert ended["at"] - killed <= limit(2)
    assert ended["error"] == "peer_lost", ended
    assert "r" in ended["message"], "the transfer is named"
    await b.back_to(before, 1)

"""One worker of a soak: its memory, and what both sides share about it (contents follow from a seed)."""

from __future__ import annotations

import asyncio
import gc
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer.client import Client
from kvxfer.config import load
from kvxfer.geometry import BlockTable
from kvxfer.memory.region import KVCache
from tests.support.nodes import make_cache, small_geometry
from tests.support.soak.ledger import Bytes, Pieces, Wrongs

BLOCKS = 320  # as many as all flows at once may want
GEOMETRY = small_geometry(kv_heads=4, kv_heads_total=4, head_size=32)  # 8 KiB per block, part and layer
SPANS, SPAN_BYTES = 40, 1 << 20
SOURCE_BYTES = 4 << 20
REST_S = 8.0
TURN_S = 0.004
FLAGS = {
    "timeout_s": 4.0,
    "lease_s": 3.0,
    "expired_memory_max": 64,  # of each process; what stays mapped is there long before the warm-up ends
}
RUNNING_MAX = 16


def noise(seed: int, length: int) -> Bytes:
    """Bytes that follow from a seed."""
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


def block_parts(memory: Bytes, cache: KVCache, block: int) -> list[Bytes]:
    """Where one block lies in a cache."""
    return [part[block] for part in _by_block(memory, cache)]


def request_bytes(memory: Bytes, cache: KVCache, blocks: list[int]) -> Bytes:
    """All bytes of a request, layer by layer, its blocks in order."""
    return np.concatenate([part[blocks].reshape(-1) for part in _by_block(memory, cache)])


def _by_block(memory: Bytes, cache: KVCache) -> list[Bytes]:
    geometry, blocks = cache.layout.geometry, cache.layout.blocks
    block_bytes = geometry.block_tokens * geometry.kv_heads * geometry.head_size * 4
    found = []
    for (placed,) in map(cache.layout.placed, range(geometry.layers)):
        layer = memory[placed.offset :][: geometry.kv_parts * blocks * block_bytes]
        found += list(layer.reshape(geometry.kv_parts, blocks, block_bytes))
    return found


class Side:
    """A client with a source (constant) and a place to receive, and the counterpart's source for comparison."""

    def __init__(self) -> None:
        self.wrongs = Wrongs()
        self.socket = ""
        self._kinds: Counter[str] = Counter()  # of objects, after the warm-up
        self._samples = 0

    async def open(self, socket: str, transports: list[str], seed: int, extra: dict[str, Any]) -> dict[str, Any]:
        """Connect and lay out the memory."""
        flags = {**FLAGS, "transports": transports, **extra}
        self.config = load(env={}, flags=flags).config
        self.socket = socket
        self.client = await Client(socket, config=self.config).__aenter__()
        self.source_cache = await make_cache(self.client, GEOMETRY, BLOCKS)
        self.sink_cache = await make_cache(self.client, GEOMETRY, BLOCKS)
        self.source = await self.client.alloc(SOURCE_BYTES)
        self.sink = await self.client.alloc(SPANS * SPAN_BYTES)
        self.cache_bytes = noise(seed, len(self.source_cache.regions[0]))
        self.source_bytes = noise(seed + 1, SOURCE_BYTES)
        self.source_cache.regions[0].array[:] = self.cache_bytes
        self.source.array[:] = self.source_bytes
        memory = self.sink_cache.regions[0].array
        views = [block_parts(memory, self.sink_cache, block) for block in range(BLOCKS)]
        self.blocks = Pieces(views, self.wrongs, "block")
        spans = [[self.sink.array[at * SPAN_BYTES :][:SPAN_BYTES]] for at in range(SPANS)]
        self.spans = Pieces(spans, self.wrongs, "span")
        return {}

    async def where(self) -> dict[str, Any]:
        """The node's addresses, once its daemon is there."""
        while True:
            try:
                await self.client.connect((), timeout=1)
            except Exception:
                await asyncio.sleep(0.02)
                continue
            return {"addresses": list(self.client.addresses)}

    async def blocks_are_quiet(self, blocks: list[int], who: str) -> bool:
        """Wait until nobody holds them; whoever waits in vain has found a stuck quarantine."""
        footprint = self.sink_cache.footprint

        def quiet() -> bool:
            return not any(self.client.reservations.holders(footprint, block) for block in blocks)

        if await within(REST_S, quiet):
            return True
        self.wrongs.add(f"{who}: blocks are quarantined for {REST_S:g} s")
        return False

    async def sample(self, closing_s: float = 0.0) -> dict[str, Any]:
        """What it holds at rest; bounded waiting, and a broken promise when it does not come to rest.

        ``closing_s``: nothing follows, so wait for so long until only this task is left. Whoever asks judges that.
        """
        if not await within(REST_S, lambda: not any(self._held().values())):
            self.wrongs.add(f"does not come to rest: {self._held()}")
        await within(closing_s, lambda: len(asyncio.all_tasks()) == 1)
        gc.collect()
        kinds = Counter(type(one).__name__ for one in gc.get_objects())
        self._samples += 1
        if self._samples == 4:
            self._kinds = kinds
        counters = self.client.plane.engine.counters()
        return {
            **process_sample(os.getpid()),
            **self._held(),
            "threads": int(counters.threads),  # the engine's own; the loop's executor grows and shrinks by itself
            "tasks": len(asyncio.all_tasks()),
            "objects": sum(kinds.values()),
            "grown": dict((kinds - (self._kinds or kinds)).most_common(8)),
            "running": sorted(task.get_name() for task in asyncio.all_tasks())[:RUNNING_MAX],
            "regions": counters.regions,
            "imports": counters.imports,
        }

    def _held(self) -> dict[str, int]:
        counters, client = self.client.plane.engine.counters(), self.client
        return {
            "inflight": counters.inflight,
            "permits": client.plane.permits,
            "grants": counters.grants,
            "quarantined_grants": counters.quarantined_grants,
            "pinned": client.reservations.pinned_blocks,
            "quarantined_blocks": client.reservations.quarantined_blocks,
        }


async def within(limit_s: float, holds: Callable[[], bool]) -> bool:
    """Wait until something holds. Counted in turns, not by the clock: time in which the machine lets nobody run, and a
    transfer cannot end either, costs none.
    """
    for _ in range(int(limit_s / TURN_S)):
        if holds():
            return True
        await asyncio.sleep(TURN_S)
    return holds()


def process_sample(pid: int) -> dict[str, Any]:
    """What the kernel says about a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    values = {
        name: int(rest.split()[0])
        for name, _, rest in (line.partition(":") for line in status.splitlines())
        if name in ("RssAnon", "RssShmem", "Threads")
    }
    return {
        "rss_kib": values["RssAnon"],
        "shmem_kib": values["RssShmem"],
        "threads": values["Threads"],
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "maps": Path(f"/proc/{pid}/maps").read_text().count("\n"),
    }


def table_of(blocks: list[int]) -> BlockTable:
    """A request that fills its blocks."""
    return BlockTable(blocks=np.array(blocks, dtype=np.int64), tokens=len(blocks) * GEOMETRY.block_tokens)

"""The worker process of the kill tests: one cache, one transfer at a time, and a look at what it holds."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import time
from typing import Any

import numpy as np

import kvxfer
from examples.remote_worker import serve
from kvxfer.config import load
from tests.support.nodes import make_cache, scattered, small_geometry

LAYERS, POOL = 16, 64
GEOMETRY = small_geometry(layers=LAYERS, kv_heads=8, kv_heads_total=8, head_size=128)  # 128 KiB per block and layer
TOKENS = 60 * 16


class Worker:
    """Holds a cache of 128 MiB and moves most of it on command."""

    async def open(self, socket: str, transport: str, seed: int) -> dict[str, Any]:
        config = load(flags={"transports": [transport], "timeout_s": 10.0}).config
        self.client = await kvxfer.Client(socket, config=config).__aenter__()
        self.cache = await make_cache(self.client, GEOMETRY, POOL)
        self.table = scattered(seed, POOL, TOKENS, 16)
        return await self.where()

    async def where(self) -> dict[str, Any]:
        """The node's addresses, waiting for the link to its daemon."""
        for _ in range(500):
            try:
                await self.client.connect((), timeout=1)
            except kvxfer.KvxferError:
                await asyncio.sleep(0.01)
                continue
            break
        return {"addresses": list(self.client.addresses)}

    async def fill(self, seed: int) -> None:
        array = self.cache.regions[0].array
        array[:] = np.frombuffer(np.random.default_rng(seed).bytes(1 << 20) * (len(array) >> 20), dtype=np.uint8)

    async def digest(self) -> dict[str, Any]:
        """Hash of the request's blocks in token order."""
        sha = hashlib.sha256()
        block_bytes = GEOMETRY.block_tokens * 8 * 128 * 4
        for placement in self.cache.layout.placements:
            layer = self.cache.regions[0].array[placement.offset :][: 2 * POOL * block_bytes].reshape(2, POOL, -1)
            sha.update(layer[:, self.table.blocks].tobytes())
        return {"digest": sha.hexdigest()}

    async def push(self, request: str, to: list[str]) -> dict[str, Any]:
        async with self.client.push(request, to=to, cache=self.cache, table=self.table, timeout=8) as push:
            print(json.dumps({"started": request}), flush=True)
            await push.layers()
        return {}

    async def offer(self, request: str) -> dict[str, Any]:
        async with self.client.offer(request, self.cache, self.table, timeout=8) as landing:
            await landing.wait()
        return {}

    async def publish(self, request: str, to: list[str]) -> dict[str, Any]:
        async with self.client.publish(request, self.cache, self.table, lease_s=4) as ticket:
            await self.client.send(to, request, ticket.to_json().encode(), timeout=4)
        return {"outcome": ticket.outcome, "claimed": bool(ticket._claims or ticket._released_by or ticket.error)}

    async def pull(self, request: str) -> dict[str, Any]:
        ticket = await self.client.recv(request, timeout=4)
        print(json.dumps({"started": request}), flush=True)
        await self.client.pull(ticket.decode(), self.cache, self.table, timeout=8)
        return {}

    async def holds(self) -> dict[str, Any]:
        """What must not grow: waits (bounded) for the gauges to come to rest."""
        for _ in range(200):
            counters = self.client.plane.engine.counters()
            gauges = {
                "inflight": counters.inflight,
                "grants": counters.grants,
                "pinned": self.client.reservations.pinned_blocks,
                "quarantined": self.client.reservations.quarantined_blocks,
            }
            if not any(gauges.values()):
                break
            await asyncio.sleep(0.01)
        return {
            **gauges,
            "regions": counters.regions,
            "fds": len(os.listdir("/proc/self/fd")),
            "threads": int(counters.threads),  # the engine's own; the executor of the loop grows and shrinks by itself
            "tasks": len(asyncio.all_tasks()),
            "time": time.monotonic(),
        }


if __name__ == "__main__":
    sys.exit(asyncio.run(serve(Worker())))

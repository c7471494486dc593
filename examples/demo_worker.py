"""One worker of the demonstration: holds a paged KV cache, prefills or decodes, and moves the cache with kvxfer.

It is driven by `demo.py` over stdin and stdout (kvxfer.testing.worker). What is worth reading for a user of the
library: `push_prefill`, `land_decode`, `publish_prefill` and `pull_decode`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from tiny_model import PagedCache, TinyModel, tokenize

import kvxfer
from kvxfer.config import load
from kvxfer.testing.worker import serve

CHANNEL = "demo"
BLOCK_TOKENS = 16


class Worker:
    """A model, a cache, and a client of this node's daemon."""

    def __init__(self, socket: str, prompt: str, seed: int, steps: int, timeout: float) -> None:
        self.socket = socket
        self.model = TinyModel(seed=seed)
        self.tokens = tokenize(Path(prompt).read_bytes(), self.model.config.context_max - steps)
        self.steps = steps
        self.timeout = timeout
        blocks = -(-(len(self.tokens) + steps) // BLOCK_TOKENS)
        self.pool_blocks = blocks + 8  # a few that belong to nobody, as in a real pool
        self.layout, self.length = kvxfer.contiguous_layout(self.model.geometry(BLOCK_TOKENS), self.pool_blocks)
        self.blocks_needed = blocks
        self.first_token = -1

    def table(self, seed: int, tokens: int) -> kvxfer.BlockTable:
        """Which blocks hold the request: scattered, and differently on each side."""
        ids = np.random.default_rng(seed).permutation(self.pool_blocks)[: self.blocks_needed].astype(np.int64)
        return kvxfer.BlockTable(blocks=ids, tokens=tokens)

    async def open(self, transport: str) -> dict[str, Any]:
        """Connect with this transport only, so that the table shows what it says; there is no fallback."""
        config = load(flags={"transports": [transport], "timeout_s": self.timeout}).config
        self.client = await kvxfer.Client(self.socket, config=config).__aenter__()
        self.region = await self.client.alloc(self.length)
        self.cache = kvxfer.KVCache(self.layout, self.region)
        self.paged = PagedCache(self.layout, self.region.array)
        return {"addresses": list(self.client.addresses)}

    async def close(self) -> dict[str, Any]:
        """Everything of this client ends here."""
        del self.paged, self.cache, self.region
        await self.client.aclose()
        return {}

    async def wipe(self) -> dict[str, Any]:
        """Forget the cache's contents, so that nothing from an earlier run can help."""
        self.region.array[:] = 0
        return {}

    def copied(self) -> dict[str, int]:
        """Bytes that this process's CPU moved, and bytes confirmed, as the engine counted them."""
        rows = self.client.plane.engine.counters().transports
        return {
            "copied": sum(row.copied_bytes for row in rows),
            "moved": sum(row.put_bytes + row.get_bytes for row in rows),
        }

    # -- prefill ------------------------------------------------------------------------------------------

    async def push_prefill(self, request: str, to: list[str], seed: int) -> dict[str, Any]:
        """Compute layer by layer; each layer is on its way while the next one is computed."""
        table = self.table(seed, len(self.tokens))
        async with self.client.push(request, to=to, cache=self.cache, table=table) as push:
            for layer in self.model.prefill_layers(self.tokens, self.paged, table):
                await push.layer(layer)
                await asyncio.sleep(0)
            computed = time.perf_counter()
        self.first_token = self.model.next_token()
        await self.client.send(to, CHANNEL, json.dumps({"first": self.first_token}).encode())
        return {"exposed_ms": (time.perf_counter() - computed) * 1e3, "transport": push.transport}

    async def publish_prefill(self, request: str, to: list[str], seed: int) -> dict[str, Any]:
        """Compute first, then say where the result lies; the ticket travels as JSON, as through a router."""
        table = self.table(seed, len(self.tokens))
        for _ in self.model.prefill_layers(self.tokens, self.paged, table):
            await asyncio.sleep(0)
        self.first_token = self.model.next_token()
        async with self.client.publish(request, self.cache, table) as ticket:
            note = {"first": self.first_token, "ticket": ticket.to_dict()}
            await self.client.send(to, CHANNEL, json.dumps(note).encode())
        return {"outcome": ticket.outcome}

    async def push_again(self, request: str, to: list[str], seed: int, land: bool = False) -> dict[str, Any]:
        """The same bytes once more without computing: how long the transfer alone takes."""
        before, started = self.copied(), time.perf_counter()
        table = self.table(seed, len(self.tokens))
        async with self.client.push(request, to=to, cache=self.cache, table=table, land=land) as push:
            await push.layers()
        return {"ms": (time.perf_counter() - started) * 1e3, **self._since(before), "transport": push.transport}

    async def publish_again(self, request: str, to: list[str], seed: int) -> dict[str, Any]:
        """The same bytes once more, to be pulled."""
        before = self.copied()
        async with self.client.publish(request, self.cache, self.table(seed, len(self.tokens))) as ticket:
            await self.client.send(to, CHANNEL, json.dumps({"ticket": ticket.to_dict()}).encode())
        return {"outcome": ticket.outcome, **self._since(before)}

    # -- decode -------------------------------------------------------------------------------------------

    async def land_decode(self, request: str, seed: int, damage: bool) -> dict[str, Any]:
        """Offer blocks, watch the layers arrive, decode."""
        table = self.table(seed, len(self.tokens))
        async with self.client.offer(request, self.cache, table) as landing:
            layers = [layer async for layer in landing]
        note = json.loads(await self.client.recv(CHANNEL))
        return {"layers": len(layers), "tokens": self._decode(note["first"], table, damage)}

    async def pull_decode(self, request: str, seed: int, damage: bool) -> dict[str, Any]:
        """Take the ticket, fetch the cache, decode."""
        table = self.table(seed, len(self.tokens))
        note = json.loads(await self.client.recv(CHANNEL))
        pulled = await self.client.pull(note["ticket"], self.cache, table)
        return {"layers": pulled.layers, "tokens": self._decode(note["first"], table, damage)}

    async def land_again(self, request: str, seed: int) -> dict[str, Any]:
        """Offer the same blocks once more."""
        before = self.copied()
        async with self.client.offer(request, self.cache, self.table(seed, len(self.tokens))) as landing:
            await landing.wait()
        return self._since(before)

    async def pull_again(self, request: str, seed: int) -> dict[str, Any]:
        """Fetch the same bytes once more."""
        note = json.loads(await self.client.recv(CHANNEL))
        before, started = self.copied(), time.perf_counter()
        pulled = await self.client.pull(note["ticket"], self.cache, self.table(seed, len(self.tokens)))
        return {"ms": (time.perf_counter() - started) * 1e3, **self._since(before), "transport": pulled.transport}

    async def adopt(self, request: str) -> dict[str, Any]:
        """Take over what landed in the daemon: mapped and read in place."""
        before, started = self.copied(), time.perf_counter()
        async with self.client.adopt(request) as landed:
            taken_ms = (time.perf_counter() - started) * 1e3
            copied = self._since(before)["copied"]
            digest = self._digest(PagedCache(landed.layout, landed.array), landed.table)
        return {"ms": taken_ms, "copied": copied, "digest": digest}

    async def digest(self, seed: int) -> dict[str, Any]:
        """A hash over the request's cache in token order, whatever blocks hold it."""
        return {"digest": self._digest(self.paged, self.table(seed, len(self.tokens)))}

    # -- helpers ------------------------------------------------------------------------------------------

    def _decode(self, first: int, table: kvxfer.BlockTable, damage: bool) -> list[int]:
        if damage:
            self._damage(table)
        return self.model.decode(first, len(self.tokens), self.paged, table, self.steps)

    def _damage(self, table: kvxfer.BlockTable) -> None:
        """What a wrong block would do: swap the sign of one layer's values in a few of the request's blocks."""
        victim = self.paged.layer(1)
        for block in table.blocks[: max(1, len(table.blocks) // 4)]:
            victim[:, block] *= -1

    def _digest(self, paged: PagedCache, table: kvxfer.BlockTable) -> str:
        sha = hashlib.sha256()
        for layer in range(self.layout.geometry.layers):
            for values in paged.read(layer, table, table.tokens):
                sha.update(np.ascontiguousarray(values).tobytes())
        return sha.hexdigest()

    def _since(self, before: dict[str, int]) -> dict[str, int]:
        return {name: value - before[name] for name, value in self.copied().items()}


if __name__ == "__main__":
    socket, prompt, seed, steps, timeout = sys.argv[1:6]
    asyncio.run(serve(Worker(socket, prompt, int(seed), int(steps), float(timeout))))

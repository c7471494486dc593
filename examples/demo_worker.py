"""One worker of the demonstration: holds a paged KV cache, prefills or decodes, and moves the cache with kvxfer.

`demo.py` starts one beside each daemon and calls the coroutines below by name, over stdin and stdout. A user of the
library finds here the five calls that matter: `push` and `publish` on the prefill side, `offer`, `pull` and `adopt` on
the decode side. Everything else is the model and bookkeeping.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tiny_model import Floats, PagedCache, TinyModel, tokenize

import kvxfer
from examples.remote_worker import serve
from kvxfer.config import load
from kvxfer.native.ascend import AscendInfo, probe

CHANNEL = "demo"
SEED = 7
BLOCK_TOKENS = 16
SPARE_BLOCKS = 8  # they belong to nobody, as in a real pool


class Worker:
    """A model, a paged cache, and a client of this node's daemon."""

    def __init__(self, socket: str, prompt: str, steps: int, table_seed: int, timeout: float, card: int | None) -> None:
        self.socket = socket
        self.card = card  # None: the cache is in host memory
        self.steps = steps
        self.timeout = timeout
        self.model = TinyModel(seed=SEED)
        self.prompt = tokenize(Path(prompt).read_bytes(), self.model.config.context_max - steps)
        needed = -(-(len(self.prompt) + steps) // BLOCK_TOKENS)
        self.layout, self.length = kvxfer.contiguous_layout(self.model.geometry(BLOCK_TOKENS), needed + SPARE_BLOCKS)
        # Scattered blocks, other ones on each side: neither knows or cares which the other one has.
        scattered = np.random.default_rng(table_seed).permutation(needed + SPARE_BLOCKS)[:needed]
        self.table = kvxfer.BlockTable(blocks=scattered.astype(np.int64), tokens=len(self.prompt))

    async def open(self, transport: str) -> dict[str, Any]:
        """Connect with this transport only, so that the table shows what it says; there is no fallback."""
        config = load(flags={"transports": [transport], "timeout_s": self.timeout}).config
        self.client = await kvxfer.Client(self.socket, config=config).__aenter__()
        where = "host memory"
        if self.card is None:
            self.region = await self.client.alloc(self.length)
            self.host = self.region.array
        else:
            found = await asyncio.to_thread(probe)
            card = self.card % found.devices if isinstance(found, AscendInfo) else 0
            self.region = await self.client.alloc(self.length, memory="hbm", device=card)
            self.host = np.zeros(self.length, np.uint8)  # this model computes on the CPU, which cannot touch a card's
            where = f"hbm of {found}"
        self.cache = kvxfer.KVCache(self.layout, self.region)
        self.paged = PagedCache(self.layout, self.host)
        return {"addresses": list(self.client.addresses), "memory": where}

    async def close(self) -> None:
        """Everything of this client ends here."""
        del self.paged, self.cache, self.host, self.region
        await self.client.aclose()

    # -- prefill ------------------------------------------------------------------------------------------

    async def push(self, request: str, to: Sequence[str], compute: bool, land: bool = False) -> dict[str, Any]:
        """Write the cache to the other node layer by layer: each is on its way while the next one is computed.

        With ``land`` no decode worker needs to be chosen yet: the bytes go to the other node's daemon.
        """
        meter = Meter(self.client)
        async with self.client.push(request, to=to, cache=self.cache, table=self.table, land=land) as push:
            for layer in self.layers(compute):
                await self.to_card(layer, compute)
                await push.layer(layer)
                await asyncio.sleep(0)  # this model computes on the event loop; a real one does not
        measured = meter.read()
        await self.tell(to, compute)
        return measured

    async def publish(self, request: str, to: Sequence[str], compute: bool) -> dict[str, Any]:
        """Compute first, then say where the result lies; the ticket travels as JSON, as through a router."""
        for layer in self.layers(compute):
            await self.to_card(layer, compute)
            await asyncio.sleep(0)
        meter = Meter(self.client)
        async with self.client.publish(request, self.cache, self.table) as ticket:
            await self.tell(to, compute, ticket=ticket.to_dict())
        return meter.read()

    def layers(self, compute: bool) -> Any:
        """The indexes of the layers, each as soon as its keys and values are final."""
        if compute:
            return self.model.prefill_layers(self.prompt, self.paged, self.table)
        return range(self.layout.geometry.layers)

    async def to_card(self, layer: int, computed: bool) -> None:
        """What the model wrote goes to the card, if the cache is there: a model on the card writes it in place."""
        if self.card is not None and computed:
            first, end = self.layout.placements[layer].offset, self.layout.layer_end(layer)
            await self.region.write(first, self.host[first:end])

    async def from_card(self) -> None:
        """The opposite, before the model reads."""
        if self.card is not None:
            self.host[:] = await self.region.read()

    async def tell(self, to: Sequence[str], compute: bool, **more: Any) -> None:
        """A small message to the decode worker, with the token that the prefill gave."""
        first = self.model.next_token() if compute else None
        await self.client.send(to, CHANNEL, json.dumps({"first": first, **more}).encode())

    # -- decode -------------------------------------------------------------------------------------------

    async def land(self, request: str, damage: bool) -> dict[str, Any]:
        """Offer blocks, and see the layers arrive."""
        meter = Meter(self.client)
        async with self.client.offer(request, self.cache, self.table) as landing:
            async for _layer in landing:
                pass  # an engine could start on this layer now
        measured = meter.read()
        note = await self.told()
        await self.from_card()
        return measured | await self.decode(self.paged, note, damage)

    async def pull(self, request: str, damage: bool) -> dict[str, Any]:
        """Take the ticket, and fetch the cache."""
        note = await self.told()
        meter = Meter(self.client)
        await self.client.pull(note["ticket"], self.cache, self.table)
        measured = meter.read()
        await self.from_card()
        return measured | await self.decode(self.paged, note, damage)

    async def adopt(self, request: str, damage: bool) -> dict[str, Any]:
        """Take over what landed in the daemon: mapped, and read in place while decoding."""
        note = await self.told()
        meter = Meter(self.client)
        async with self.client.adopt(request) as landed:
            measured = meter.read()
            memory = landed.array.copy() if damage else landed.array  # it is read-only
            prompt = PagedCache(landed.layout, memory)
            if damage:
                flip_signs(prompt, landed.table)
            return measured | await self.decode(AdoptedPrompt(prompt, landed.table, self.paged), note, False)

    async def told(self) -> dict[str, Any]:
        """What the prefill worker says with `tell`."""
        note: dict[str, Any] = json.loads(await self.client.recv(CHANNEL))
        return note

    async def decode(self, cache: PagedCache, note: dict[str, Any], damage: bool) -> dict[str, Any]:
        """The tokens that follow the first one; none when only the transfer is measured."""
        if note["first"] is None:
            return {"tokens": []}
        if damage:
            flip_signs(cache, self.table)
        tokens = self.model.decode(note["first"], len(self.prompt), cache, self.table, self.steps)
        self.host[:] = 0  # so that nothing of this run can help the next one
        if self.card is not None:
            await self.region.write(0, self.host)
        return {"tokens": tokens}


class AdoptedPrompt(PagedCache):
    """The prompt's keys and values stay where they landed; those of new tokens go to blocks of our own."""

    def __init__(self, prompt: PagedCache, prompt_table: kvxfer.BlockTable, own: PagedCache) -> None:
        self.layout = own.layout
        self.prompt, self.prompt_table, self.own = prompt, prompt_table, own

    def write(self, layer: int, table: kvxfer.BlockTable, first: int, keys: Floats, values: Floats) -> None:
        """New positions only: the adopted memory is read-only."""
        self.own.write(layer, table, first, keys, values)

    def read(self, layer: int, table: kvxfer.BlockTable, tokens: int) -> tuple[Floats, Floats]:
        """Positions of the prompt from the adopted memory, those after it from our own."""
        prompt = self.prompt_table.tokens
        landed, own = self.prompt.read(layer, self.prompt_table, prompt), self.own.read(layer, table, tokens)
        keys, values = (np.concatenate([old, new[prompt:]]) for old, new in zip(landed, own, strict=True))
        return keys, values


class Meter:
    """What happens from here on: milliseconds, bytes that this process's CPU copied, bytes that its engine moved."""

    def __init__(self, client: kvxfer.Client) -> None:
        self._client = client
        self._before = self._counters()
        self._started = time.perf_counter()

    def read(self) -> dict[str, Any]:
        """Numbers since the start."""
        ms = (time.perf_counter() - self._started) * 1e3
        copied, moved = (now - before for now, before in zip(self._counters(), self._before, strict=True))
        return {"ms": ms, "copied": copied, "moved": moved}

    def _counters(self) -> tuple[int, int]:
        rows = self._client.plane.engine.counters().transports
        return sum(row.copied_bytes for row in rows), sum(row.put_bytes + row.get_bytes for row in rows)


def flip_signs(cache: PagedCache, table: kvxfer.BlockTable) -> None:
    """Damage a cache as a wrong block would: in one layer, a quarter of the request's blocks."""
    cache.layer(1)[:, table.blocks[: max(1, len(table.blocks) // 4)]] *= -1


if __name__ == "__main__":
    asyncio.run(serve(Worker(**json.loads(sys.argv[1]))))

"""Push: the prefill side writes each layer into the decode side's blocks as soon as it is computed.

`python examples/quickstart_push.py` runs both sides in one process, each with a daemon of its own (`kvxfer.local`). On
two machines each side is a process with `kvxfer.Client()` beside its `kvxfer serve`, and ``node`` is the other
daemon's address, such as "10.0.0.2:17800".
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout needs no installation

import kvxfer


async def decode(client: kvxfer.Client, cache: kvxfer.KVCache, blocks: kvxfer.BlockTable) -> None:
    async with client.offer("request-1", cache, blocks) as landing:
        async for layer in landing:
            print(f"layer {layer} is here")


async def prefill(client: kvxfer.Client, cache: kvxfer.KVCache, blocks: kvxfer.BlockTable, node: Sequence[str]) -> None:
    async with client.push("request-1", to=node, cache=cache, table=blocks) as push:
        for layer in range(cache.layout.geometry.layers):
            compute(layer, cache)
            await push.layer(layer)  # on its way while the next one is computed
    # leaving the block commits; an exception inside it tells the other side that nothing will come


def compute(layer: int, cache: kvxfer.KVCache) -> None:
    """Stands for a model: fills the layer with its number."""
    size = cache.regions[0].length // cache.layout.geometry.layers
    cache.regions[0].array[layer * size : (layer + 1) * size] = layer + 1


async def make_cache(client: kvxfer.Client) -> kvxfer.KVCache:
    """A paged cache of 64 blocks with 16 tokens each, in memory that this client's engine allocates."""
    geometry = kvxfer.Geometry(layers=4, kv_heads=2, head_size=64, block_tokens=16, dtype="float16")
    layout, length = kvxfer.contiguous_layout(geometry, blocks=64)
    return kvxfer.KVCache(layout, await client.alloc(length))


async def main() -> None:
    async with kvxfer.local() as prefill_client, kvxfer.local() as decode_client:
        source, target = await make_cache(prefill_client), await make_cache(decode_client)
        here = kvxfer.BlockTable.of([7, 3, 12], tokens=40)  # which blocks hold the request's 40 tokens:
        there = kvxfer.BlockTable.of([20, 21, 5], tokens=40)  # each side has its own
        await asyncio.gather(
            decode(decode_client, target, there),
            prefill(prefill_client, source, here, node=decode_client.addresses),
        )
        got = target.regions[0].array.reshape(4, 2, 64, -1)[:, :, there.blocks[:2]]  # layer, part, block
        assert np.array_equal(got[:, 0, 0, 0], [1, 2, 3, 4]), "every layer must hold what was computed"
        print("all layers are right")


if __name__ == "__main__":
    asyncio.run(main())

"""Pull: the prefill side says where a request's cache lies, the decode side fetches it when it is ready.

`python examples/quickstart_pull.py` runs both sides in one process; `quickstart_push.py` says how to spread them.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from quickstart_push import make_cache

import kvxfer


async def prefill(
    client: kvxfer.Client, cache: kvxfer.KVCache, blocks: kvxfer.BlockTable, router: asyncio.Queue[str]
) -> None:
    async with client.publish("request-1", cache, blocks) as ticket:
        router.put_nowait(ticket.to_json())
    # leaving the block waits until the cache was fetched or the lease ran out; ticket.outcome says which


async def decode(
    client: kvxfer.Client, cache: kvxfer.KVCache, blocks: kvxfer.BlockTable, router: asyncio.Queue[str]
) -> None:
    pulled = await client.pull(await router.get(), cache, blocks)
    print(f"{pulled.tokens} tokens, {pulled.bytes} bytes by {pulled.transport}")


async def main() -> None:
    async with kvxfer.local() as prefill_client, kvxfer.local() as decode_client:
        source, target = await make_cache(prefill_client), await make_cache(decode_client)
        source.regions[0].array[:] = np.random.default_rng(1).integers(0, 256, source.regions[0].length, np.uint8)
        here = kvxfer.BlockTable.of([7, 3], tokens=32)
        there = kvxfer.BlockTable.of([20, 21], tokens=32)
        router: asyncio.Queue[str] = asyncio.Queue()
        await asyncio.gather(
            prefill(prefill_client, source, here, router), decode(decode_client, target, there, router)
        )
        sent, got = (cache.regions[0].array.reshape(4, 2, 64, -1) for cache in (source, target))
        assert np.array_equal(sent[:, :, here.blocks], got[:, :, there.blocks]), "the bytes must be the same"
        print("all bytes are right")


if __name__ == "__main__":
    asyncio.run(main())

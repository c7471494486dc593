"""Two nodes in one process: two daemons on loopback ports and a client of each, for tests of whole flows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.client import Client
from kvxfer.embedded import local
from kvxfer.geometry import BlockTable, Geometry
from kvxfer.memory.region import KVCache
from kvxfer.planner import contiguous_layout


@asynccontextmanager
async def two_nodes(transports: Sequence[str], **options: Any) -> AsyncIterator[tuple[Client, Client]]:
    """A client on node A and one on node B; B's daemon is reached at ``b.addresses``."""
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(local(transports=tuple(transports), **options))
        second = await stack.enter_async_context(local(transports=tuple(transports), **options))
        yield first, second


def small_geometry(**changes: Any) -> Geometry:
    """A cache small enough for tests: 3 layers, 2 heads of 8 float32, blocks of 16 tokens."""
    values: dict[str, Any] = {
        "layers": 3,
        "kv_parts": 2,
        "kv_heads": 2,
        "kv_heads_total": 2,
        "head_start": 0,
        "head_size": 8,
        "block_tokens": 16,
        "dtype": "float32",
        "layout": "PBNHD",
        "fingerprint": "test",
    }
    return Geometry(**{**values, **changes})


async def make_cache(client: Client, geometry: Geometry, blocks: int, **how: Any) -> KVCache:
    """A cache with all its layers in one allocated region; ``how`` goes to `Client.alloc`."""
    layout, length = contiguous_layout(geometry, blocks)
    return KVCache(layout, await client.alloc(length, **how))


def scattered(seed: int, pool_blocks: int, tokens: int, block_tokens: int) -> BlockTable:
    """A block table with seeded, scattered block ids."""
    needed = -(-tokens // block_tokens)
    ids = np.random.default_rng(seed).permutation(pool_blocks)[:needed].astype(np.int64)
    return BlockTable(blocks=ids, tokens=tokens)


def tokens_of(cache: KVCache, table: BlockTable, layer: int) -> Any:
    """What a contiguous float32 PBNHD cache holds for a request's tokens in one layer: shape (parts, tokens, heads,
    size).
    """
    return _tokens(cache.regions[0].array, cache, table, layer)


async def read_tokens(cache: KVCache, table: BlockTable, layer: int) -> Any:
    """The same for a cache in any memory."""
    return _tokens(await cache.regions[0].read(), cache, table, layer)


def _tokens(memory: npt.NDArray[np.uint8], cache: KVCache, table: BlockTable, layer: int) -> Any:
    geometry, blocks = cache.layout.geometry, cache.layout.blocks
    shape = (geometry.kv_parts, blocks, geometry.block_tokens, geometry.kv_heads, geometry.head_size)
    offset = cache.layout.placed(layer)[0].offset
    size = int(np.prod(shape)) * 4
    values = memory[offset : offset + size].view(np.float32).reshape(shape)
    picked = values[:, table.blocks].reshape(geometry.kv_parts, -1, geometry.kv_heads, geometry.head_size)
    return picked[:, : table.tokens].copy()

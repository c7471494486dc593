"""vLLM's KV caches as caches of kvxfer: the tensors of each group of layers, and what their bytes mean.

A layer is a tensor, or a tuple of tensors (keys, values) as on Ascend. Views of one storage are registered as one
region. Layouts that are not known are refused: bytes that mean something else would be moved without any error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer.client import Client
from kvxfer.errors import GeometryMismatch
from kvxfer.geometry import CacheLayout, Geometry, LayerPlacement
from kvxfer.memory.region import KVCache

PACKED_CPU = "CPU_ATTN:K=DN,V=ND"  # keys of a block and head transposed, then its values


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the engine knows of a group's layers, beyond their tensors."""

    kv_heads_total: int
    head_start: int
    head_size: int
    block_tokens: int
    fingerprint: str
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """One group: the names of its layers, their tensors, and what they hold."""

    names: tuple[str, ...]
    tensors: tuple[Any, ...]
    shape: Shape


def storage_of(tensor: Any) -> Any:
    """The whole storage behind a view, as one flat tensor."""
    return tensor.new_empty(0).set_(tensor.untyped_storage())


async def build(client: Client, cache: Cache) -> KVCache:
    """Register a group's memory with this client. Raises `GeometryMismatch` for a layout that is not known."""
    layout, storages = describe(cache)
    return KVCache(layout, await client.register_many(storages))


def describe(cache: Cache) -> tuple[CacheLayout, list[Any]]:
    """The layout, and the storages that its placements index."""
    first = cache.tensors[0]
    if isinstance(first, tuple | list) or cache.shape.backend != "CPU_ATTN":
        raise GeometryMismatch("this layout of a KV cache is not known", field="backend", value=cache.shape.backend)
    storages: dict[int, Any] = {}
    for tensor in cache.tensors:
        storages.setdefault(tensor.untyped_storage().data_ptr(), tensor)
    keys = list(storages)
    blocks, heads, tokens, both = first.shape
    size = first.element_size()
    shape = cache.shape
    if (tokens, both) != (shape.block_tokens, 2 * shape.head_size):
        raise GeometryMismatch(
            "a layer of CPU_ATTN is [blocks, heads, tokens, 2 * head size]",
            field="shape",
            value=str(tuple(first.shape)),
        )
    geometry = Geometry(
        layers=len(cache.tensors),
        kv_heads=heads,
        kv_heads_total=max(shape.kv_heads_total, heads),
        head_start=shape.head_start,
        head_size=shape.head_size,
        block_tokens=tokens,
        dtype=str(first.dtype).removeprefix("torch."),
        layout="BHPND",
        packing=PACKED_CPU,
        fingerprint=shape.fingerprint,
    )
    half = tokens * shape.head_size * size
    placements = []
    for tensor in cache.tensors:
        base = tensor.untyped_storage().data_ptr()
        along_blocks, along_heads = tensor.stride(0) * size, tensor.stride(1) * size
        placements.append(
            LayerPlacement(
                region=keys.index(base),
                offset=tensor.data_ptr() - base,
                strides=(half, along_blocks, shape.head_size * size, along_heads),
            )
        )
    layout = CacheLayout(geometry=geometry, blocks=blocks, placements=tuple(placements))
    return layout, [storage_of(storages[key]) for key in keys]


async def move_home(client: Client, caches: Sequence[Cache]) -> None:
    """Move the caches into memory of the client, in place: the engine goes on with the same tensors."""
    raise GeometryMismatch("own_memory is not possible for this cache", field="own_memory")

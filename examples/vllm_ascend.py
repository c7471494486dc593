"""The KV cache of vllm-ascend as kvxfer sees it: what to register, and where each part of it lies.

A worker of vllm-ascend hands its cache to a connector as `dict[str, Tensor | tuple[Tensor, ...]]`: keys and values are
tensors of their own, and with MLA their heads even have two sizes. kvxfer wants few registrations of whole allocations,
and a layout with one shape. So every tensor becomes a layer with one kv part, tensors of one shape form a cache, and
what is registered are the segments of the allocator that the tensors were cut from.

`python examples/vllm_ascend.py` moves a request between two such caches in host memory and compares every byte. What
was *not* run: vllm-ascend, torch_npu, a card. `segments_of_npu` in particular was only written down.
A connector needs more than this file: the scheduler's side, deadlines of its own (vLLM waits for a load without one),
and a fingerprint of model, quantisation and attention backend, so that two caches that only look alike are refused.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout needs no installation

import kvxfer

CARD_ALIGNMENT = 2 << 20  # what a card registers begins and ends at multiples of this
AXES = 4  # of a tensor: blocks, tokens of a block, heads, elements of a head


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One tensor of the cache: bytes, and its shape [blocks, tokens, heads, elements]."""

    name: str
    address: int
    length: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One allocation of the framework; ``device`` None: host memory."""

    address: int
    length: int
    device: int | None = None

    def holds(self, part: Part) -> bool:
        return self.address <= part.address and part.address + part.length <= self.address + self.length


def parts_of(caches: Mapping[str, Any]) -> list[Part]:
    """Every tensor, in the order of the layers; those of one layer follow each other. Raises `ValueError`."""
    found = []
    for layer, value in caches.items():
        tensors = value if isinstance(value, tuple | list) else (value,)
        for index, tensor in enumerate(tensors):
            shape = tuple(int(length) for length in tensor.shape)
            if len(shape) != AXES or not tensor.is_contiguous():
                raise ValueError(f"{layer}[{index}]: a contiguous tensor of {AXES} axes is needed, not {shape}")
            length = int(tensor.numel()) * int(tensor.element_size())
            dtype = str(tensor.dtype).removeprefix("torch.")
            name = f"{layer}[{index}]"
            found.append(Part(name=name, address=int(tensor.data_ptr()), length=length, shape=shape, dtype=dtype))
    return found


def needed_segments(parts: Iterable[Part], segments: Sequence[Segment]) -> list[Segment]:
    """The allocations that hold the cache, each once. Raises `ValueError` for what a card would refuse."""
    found: dict[int, Segment] = {}
    for part in parts:
        segment = next((segment for segment in segments if segment.holds(part)), None)
        if segment is None:
            raise ValueError(f"{part.name}: no allocation of the framework holds it")
        if segment.device is not None and (segment.address % CARD_ALIGNMENT or segment.length % CARD_ALIGNMENT):
            raise ValueError(f"{part.name}: its allocation is not aligned to {CARD_ALIGNMENT >> 20} MiB")
        found[segment.address] = segment
    return list(found.values())


def layouts_of(
    parts: Sequence[Part], segments: Sequence[Segment], *, fingerprint: str = "", packing: str = ""
) -> list[kvxfer.CacheLayout]:
    """One layout for each shape. Regions are numbered as ``segments``. ``packing``: a private format, such as "nz"."""
    shapes: dict[tuple[tuple[int, ...], str], list[Part]] = {}
    for part in parts:
        shapes.setdefault((part.shape, part.dtype), []).append(part)
    layouts = []
    for ((blocks, tokens, heads, elements), dtype), members in shapes.items():
        geometry = kvxfer.Geometry(
            layers=len(members),
            kv_parts=1,
            kv_heads=heads,
            head_size=elements,
            block_tokens=tokens,
            dtype=dtype,
            fingerprint=fingerprint,
            packing=packing,
        )
        placements = []
        for part in members:
            index = next(index for index, segment in enumerate(segments) if segment.holds(part))
            placements.append(kvxfer.LayerPlacement(region=index, offset=part.address - segments[index].address))
        layouts.append(kvxfer.CacheLayout(geometry=geometry, blocks=blocks, placements=tuple(placements)))
    return layouts


async def share_cache(
    client: kvxfer.Client, caches: Mapping[str, Any], segments: Sequence[Segment], **more: str
) -> list[kvxfer.KVCache]:
    """Register the cache of one worker: as many `KVCache` as there are shapes (one, or two with MLA)."""
    parts = parts_of(caches)
    used = needed_segments(parts, segments)
    regions = []
    for segment in used:
        where: dict[str, Any] = {} if segment.device is None else {"memory": "hbm", "device": segment.device}
        regions.append(await client.register(address=segment.address, length=segment.length, **where))
    return [kvxfer.KVCache(layout, regions) for layout in layouts_of(parts, used, **more)]


def segments_of_npu(device: int) -> list[Segment]:
    """The segments of torch_npu's caching allocator on a card. Not run: it needs one."""
    import torch_npu  # type: ignore[import-not-found]

    rows = (row for row in torch_npu.npu.memory_snapshot() if row["device"] == device)
    return [Segment(address=row["address"], length=row["total_size"], device=device) for row in rows]


# -- the same over host memory, as far as it goes without a card ------------------------------------------------------


class HostTensor:
    """As much of a torch tensor as this file uses, over numpy."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array, self.shape, self.dtype = array, array.shape, str(array.dtype)

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def numel(self) -> int:
        return int(self.array.size)

    def element_size(self) -> int:
        return int(self.array.itemsize)

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)


def host_cache(layers: int, blocks: int, seed: int | None) -> tuple[dict[str, tuple[HostTensor, HostTensor]], Segment]:
    """Keys of 128 and values of 64 elements (as MLA has them) in one allocation; zeros without a seed."""
    shapes = [(blocks, 16, 1, 128), (blocks, 16, 1, 64)]
    sizes = [int(np.prod(shape)) for shape in shapes]
    memory = np.zeros(layers * sum(sizes), np.float16)
    if seed is not None:
        memory[:] = np.random.default_rng(seed).standard_normal(memory.size).astype(np.float16)
    caches, at = {}, 0
    for layer in range(layers):
        tensors = []
        for shape, size in zip(shapes, sizes, strict=True):
            tensors.append(HostTensor(memory[at : at + size].reshape(shape)))
            at += size
        caches[f"model.layers.{layer}.attn"] = (tensors[0], tensors[1])
    return caches, Segment(address=int(memory.ctypes.data), length=memory.nbytes)


async def move(
    source: kvxfer.Client, target: kvxfer.Client, ours: Sequence[kvxfer.KVCache], theirs: Sequence[kvxfer.KVCache],
    here: kvxfer.BlockTable, there: kvxfer.BlockTable,
) -> None:  # fmt: skip
    """One request: a push for each shape, layer by layer. One after the other: blocks of one region belong to one."""

    async def receive(index: int) -> None:
        async with target.offer(f"request-1/{index}", theirs[index], there) as landing:
            async for _layer in landing:
                pass  # the engine may start on this layer

    async def send(index: int) -> None:
        cache = ours[index]
        async with source.push(f"request-1/{index}", to=target.addresses, cache=cache, table=here) as push:
            for layer in range(cache.layout.geometry.layers):
                await push.layer(layer)  # when the event recorded after this layer's write has passed

    for index in range(len(ours)):
        await asyncio.gather(receive(index), send(index))


async def main() -> None:
    prefill, decode = host_cache(layers=3, blocks=8, seed=1), host_cache(layers=3, blocks=12, seed=None)
    here, there = kvxfer.BlockTable.of([5, 2, 7], tokens=40), kvxfer.BlockTable.of([0, 11, 4], tokens=40)
    async with kvxfer.local() as source, kvxfer.local() as target:
        fingerprint = kvxfer.geometry.fingerprint_of(model="example", attention="mla")
        ours = await share_cache(source, prefill[0], [prefill[1]], fingerprint=fingerprint)
        theirs = await share_cache(target, decode[0], [decode[1]], fingerprint=fingerprint)
        await move(source, target, ours, theirs, here, there)
    for layer, tensors in prefill[0].items():
        for index, tensor in enumerate(tensors):
            sent = tensor.array[here.blocks].reshape(-1, *tensor.shape[2:])[: here.tokens]
            got = decode[0][layer][index].array[there.blocks].reshape(-1, *tensor.shape[2:])[: there.tokens]
            assert np.array_equal(sent, got), (layer, index)
    print(f"{len(ours)} shapes, {sum(cache.layout.geometry.layers for cache in ours)} tensors: all bytes are right")


if __name__ == "__main__":
    asyncio.run(main())

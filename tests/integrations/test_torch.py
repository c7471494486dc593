"""Caches of torch tensors: described, moved into registered memory, refused. Needs torch: `make test-torch`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvxfer
from kvxfer.errors import RegionBusy
from kvxfer.planner import plan

torch = pytest.importorskip("torch", reason="torch is not installed here: make test-torch has it")

from kvxfer.integrations.torch import cache_of, rehome  # noqa: E402

BLOCKS, TOKENS, HEADS, DIM = 6, 16, 2, 8


def numbered(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.arange(int(np.prod(shape)), dtype=torch.int32).to(dtype).reshape(shape)


def one_allocation(layers: int = 3) -> dict[str, Any]:
    """As vLLM 0.32 has it: one storage, and for each layer a view [blocks, heads, tokens, K and V]."""
    whole = numbered(layers, BLOCKS, TOKENS, HEADS, 2 * DIM)
    return {f"layers.{i}": whole[i].transpose(1, 2) for i in range(layers)}


def pairs(layers: int = 3) -> dict[str, Any]:
    """As vllm-ascend has it: keys and values as tensors of their own."""
    return {
        f"layers.{i}": (numbered(BLOCKS, TOKENS, HEADS, DIM) + i, numbered(BLOCKS, TOKENS, HEADS, DIM) - i)
        for i in range(layers)
    }


def whole_of(storage: Any) -> Any:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy()


def elements(found: Any, index: int, layer: int) -> Any:
    """[parts, blocks, tokens, heads, dim] of a layer, read from the storages by the layout."""
    layout = found.caches[index].layout
    shape, parts = layout.geometry, []
    for placed in layout.placed(layer):
        raw = whole_of(found.storages[placed.region])[placed.offset :]
        steps = (*placed.strides, shape.itemsize)
        extents = (len(placed.parts), *shape.extents(layout.blocks)[1:], shape.head_size)
        base = np.frombuffer(raw.tobytes() + bytes(64), np.float32)
        parts.append(np.lib.stride_tricks.as_strided(base, extents, steps))
    return np.concatenate(parts)


def test_views_of_one_allocation() -> None:
    caches = one_allocation()
    found = cache_of(caches, axes="BHNC")
    (cache,) = found.caches
    shape = cache.layout.geometry
    assert (shape.layout, shape.kv_parts, shape.kv_heads, shape.head_size) == ("BNHPD", 2, HEADS, DIM)
    assert (cache.layout.blocks, shape.block_tokens, len(found.storages)) == (BLOCKS, TOKENS, 1)
    assert [place.strides for place in cache.layout.placements] == [None] * 3, "dense"
    for layer, tensor in enumerate(caches.values()):
        expected = tensor.reshape(BLOCKS, HEADS, TOKENS, 2, DIM).permute(3, 0, 2, 1, 4)
        assert np.array_equal(elements(found, 0, layer), expected.numpy())


def test_tuples_are_parts_with_places_of_their_own() -> None:
    caches = pairs()
    found = cache_of(caches, axes="BNHD")
    assert len(found.storages) == 6
    assert [place.region for placement in found.caches[0].layout.placements for place in placement] == list(range(6))
    for layer, (keys, values) in enumerate(caches.values()):
        expected = torch.stack([keys, values]).numpy()
        assert np.array_equal(elements(found, 0, layer), expected)
    made = plan(*2 * (cache_of(one_allocation(), axes="BHNC").caches[0].layout, kvxfer.BlockTable.of([0, 2], 32)))
    assert made.bytes == 3 * 2 * 32 * HEADS * DIM * 4


async def test_rehome_keeps_objects_contents_and_views() -> None:
    caches = one_allocation()
    caches["layers.9"] = caches["layers.0"]
    before = {name: tensor.clone() for name, tensor in caches.items()}
    strides = {name: tensor.stride() for name, tensor in caches.items()}
    async with kvxfer.local() as client:
        home = await rehome(client, caches)
        found = cache_of(caches, axes="BHNC")
        assert found.caches[0].shared_by == {"layers.9": "layers.0"}
        (cache,) = found.bind(home.regions)
        assert len(home.regions) == 1
        for name, tensor in caches.items():
            assert torch.equal(tensor, before[name])
            assert tensor.stride() == strides[name]
        caches["layers.1"].fill_(7)
        span = home.regions[0].view(caches["layers.1"])
        assert span.offset == cache.layout.placements[1].offset
        assert bool((span.region.array[span.offset :][: span.length].view(np.float32) == 7).all())
        with pytest.raises(RegionBusy, match="tensors lie in it"):
            await home.regions[0].release()
        await home.release()
        assert torch.equal(caches["layers.2"], before["layers.2"])
        assert bool((caches["layers.1"] == 7).all())
        caches["layers.2"].fill_(1)

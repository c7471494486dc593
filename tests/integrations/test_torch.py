"""Caches of torch tensors: described, moved into registered memory, refused. Needs torch: `make test-torch`."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvxfer
from kvxfer.errors import OutOfRange, RegionBusy, UsageError
from kvxfer.planner import plan

torch = pytest.importorskip("torch", reason="torch is not installed here: make test-torch has it")

from kvxfer.integrations import torch as module  # noqa: E402
from kvxfer.integrations.tensors import LayerGroup  # noqa: E402
from kvxfer.integrations.torch import MemoryPool, cache_of, rehome  # noqa: E402

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


def test_storages_that_lie_in_each_other_are_one() -> None:
    """The same memory known to torch by an array and by a part of it."""
    array = np.zeros((2, BLOCKS, TOKENS, HEADS, DIM), np.float32)
    caches = {"0": torch.from_numpy(array[0]), "1": torch.from_numpy(array)[1]}
    for given in (caches, dict(reversed(caches.items()))):
        found = cache_of(given, axes="BNHD", kv_parts=1)
        assert [storage.nbytes() for storage in found.storages] == [array.nbytes]
        offsets = {placement.offset for placement in found.caches[0].layout.placements}
        assert offsets == {0, array[0].nbytes}


async def test_storages_are_registered_once_and_views_are_spans_of_them() -> None:
    caches = one_allocation()
    found = cache_of(caches, axes="BHNC")
    async with kvxfer.local() as client:
        regions = await client.register_many(found.storages)
        found.bind(regions)
        assert [region.length for region in regions] == [caches["layers.0"].untyped_storage().nbytes()]
        spans = [regions[0].view(tensor) for tensor in caches.values()]
        size = BLOCKS * TOKENS * HEADS * DIM * 8
        assert [(span.offset, span.length) for span in spans] == [(i * size, size) for i in range(3)]
        assert regions[0].view(caches["layers.1"][2, 1]).offset == size + (2 * TOKENS * HEADS + 1) * 2 * DIM * 4
        with pytest.raises(OutOfRange):
            regions[0].view(torch.zeros(4))
        for region in regions:
            await region.release()


REFUSED = {
    "sparse": lambda: torch.eye(4).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "quantised": lambda: torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.quint8),
    "meta": lambda: torch.zeros(5, 4, 3, 8, device="meta"),
    "negative": lambda: torch.zeros(5, 4, 3, 8, dtype=torch.complex64).conj().imag,
    "dtype": lambda: torch.zeros(5, 4, 3, 8, dtype=torch.complex64),
    "empty": lambda: torch.zeros(5, 4, 0, 8),
    "same elements again": lambda: torch.zeros(5, 1, 3, 8).expand(5, 4, 3, 8),
    "tensor, or a tuple": lambda: "text",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("says", REFUSED)
async def test_what_cannot_be_known_is_refused(says: str) -> None:
    wrong = REFUSED[says]()
    with pytest.raises(UsageError, match=says) as caught:
        cache_of({"layers.0": torch.zeros(5, 4, 3, 8), "layers.1": wrong}, axes="BNHD", kv_parts=1)
    assert caught.value.fields["layer"] == "layers.1"


def test_arguments() -> None:
    caches = one_allocation()
    group = LayerGroup(names=tuple(caches), axes="BHNC")
    assert cache_of(caches, groups=[group]).caches == cache_of(caches, axes="BHNC").caches
    for wrong in (
        {},
        {"axes": "BHNC", "groups": [group]},
        {"groups": [group], "fingerprint": "x"},
        {"axes": "BHNC", "colour": 1},
    ):
        with pytest.raises(UsageError):
            cache_of(caches, **wrong)


async def test_siblings_that_were_not_named_refuse_the_move() -> None:
    """They would go on showing the old memory. Nothing has changed then; a parent held by views alone is none."""
    caches = one_allocation()
    addresses = [tensor.data_ptr() for tensor in caches.values()]
    sibling = caches["layers.2"][1]
    async with kvxfer.local() as client:
        with pytest.raises(UsageError, match="1 other tensors share"):
            await rehome(client, caches)
        some = {"layers.0": caches["layers.0"]}
        with pytest.raises(UsageError, match="3 other tensors share"):
            await rehome(client, some)
        assert [tensor.data_ptr() for tensor in caches.values()] == addresses
        del sibling
        home = await rehome(client, caches)
        view = caches["layers.0"][0]
        with pytest.raises(RegionBusy, match="would stay behind"):
            await home.release()
        del view
        await home.release()


async def test_other_tensors_that_cannot_be_moved() -> None:
    needs = torch.zeros(5, 4, 3, 8, requires_grad=True)
    async with kvxfer.local() as client:
        with pytest.raises(UsageError, match="gradient"):
            await rehome(client, {"0": needs})
        with pytest.raises(UsageError, match="meta"):
            await rehome(client, {"0": torch.zeros(5, 4, 3, 8, device="meta")})


async def test_tensors_of_inference_mode_and_small_types() -> None:
    with torch.inference_mode():
        caches = {"0": numbered(BLOCKS, TOKENS, HEADS, DIM, dtype=torch.bfloat16)}
        caches["1"] = numbered(BLOCKS, TOKENS, HEADS, DIM, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn)
        before = {name: tensor.view(torch.uint8).clone() for name, tensor in caches.items()}
    async with kvxfer.local() as client:
        home = await rehome(client, caches)
        found = cache_of(caches, axes="BNHD", kv_parts=1)
        assert [cache.layout.geometry.dtype for cache in found.caches] == ["bfloat16", "float8_e4m3fn"]
        found.bind(home.regions)
        for name, tensor in caches.items():
            with torch.inference_mode():
                assert torch.equal(tensor.view(torch.uint8), before[name])


async def test_a_move_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second allocation fails, and in another run the second exchange of a storage."""
    caches = pairs(2)
    before = {name: [tensor.clone() for tensor in value] for name, value in caches.items()}
    addresses = [tensor.data_ptr() for value in caches.values() for tensor in value]
    async with kvxfer.local() as client:
        alloc, set_, calls = client.alloc, module._set, []

        async def failing_alloc(*args: Any, **more: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise kvxfer.KvxferError("no memory")
            return await alloc(*args, **more)

        def failing_set(*args: Any) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("no")
            set_(*args)

        for target, name, failing in ((client, "alloc", failing_alloc), (module, "_set", failing_set)):
            calls.clear()
            with monkeypatch.context() as patch:
                patch.setattr(target, name, failing)
                with pytest.raises((kvxfer.KvxferError, RuntimeError)):
                    await rehome(client, caches)
            assert [tensor.data_ptr() for value in caches.values() for tensor in value] == addresses
        for name, value in caches.items():
            assert all(map(torch.equal, value, before[name]))
        await (await rehome(client, caches)).release()


async def test_tensors_outlive_the_client() -> None:
    """The close of the client moves them out. A view that was made since reads zeros, and is memory all the same."""
    caches = one_allocation()
    before = {name: tensor.clone() for name, tensor in caches.items()}
    async with kvxfer.local() as client:
        await rehome(client, caches)
        late = caches["layers.1"][3]
        caches["layers.2"].fill_(5)
    assert torch.equal(caches["layers.0"], before["layers.0"])
    assert bool((caches["layers.2"] == 5).all())
    for tensor in (*caches.values(), late):
        tensor.fill_(3)
        assert float(tensor.sum()) == 3 * tensor.numel()


async def test_what_the_page_shows() -> None:
    page = (Path(__file__).parents[2] / "docs" / "geometry.md").read_text(encoding="utf-8")
    shown = [text.split("```", 1)[0] for text in page.split("```python\n")[1:]]
    names: dict[str, Any] = {}
    exec("\n".join(text for text in shown if "cache_of" in text), names)
    await names["main"]()
    gc.collect()
    async with kvxfer.local() as client:
        with pytest.raises(UsageError, match="1 other tensors share"):
            await names["move"](client)
        del names["whole"]
        await names["move"](client)


async def test_tensors_that_nobody_needs_are_not_moved_out() -> None:
    """Dropped, or forgotten at the end of an engine."""
    async with kvxfer.local() as client:
        caches = one_allocation()
        home = await rehome(client, caches)
        alive = weakref.ref(caches["layers.0"])
        caches.clear()
        assert alive() is None
        await home.regions[0].release()
        caches = one_allocation()
        home = await rehome(client, caches)
        before = caches["layers.0"].data_ptr()
        home.forget()
        with pytest.raises(RegionBusy, match="tensors lie in it"):
            await home.regions[0].release()
    assert caches["layers.0"].data_ptr() == before


async def test_a_request_between_unlike_caches() -> None:
    """From keys and values in allocations of their own, moved into kvxfer's memory, into one registered allocation."""
    source, target = pairs(), one_allocation()
    for tensor in target.values():
        tensor.zero_()
    async with kvxfer.local() as prefill, kvxfer.local() as decode:
        home = await rehome(prefill, source)
        (ours,) = cache_of(source, axes="BNHD").bind(home.regions)
        found = cache_of(target, axes="BHNC")
        (theirs,) = found.bind(await decode.register_many(found.storages))
        table, blocks = kvxfer.BlockTable.of([5, 1, 3], 40), kvxfer.BlockTable.of([0, 4, 2], 40)
        async with prefill.publish("request", ours, table) as ticket:
            pulled = await decode.pull(ticket, theirs, blocks)
        assert pulled.tokens == 40
        for name, (keys, values) in source.items():
            for token in range(40):
                block, to, slot = [5, 1, 3][token // TOKENS], [0, 4, 2][token // TOKENS], token % TOKENS
                assert torch.equal(target[name][to, :, slot, :DIM], keys[block, slot])
                assert torch.equal(target[name][to, :, slot, DIM:], values[block, slot])


async def test_what_is_made_in_a_pool_lies_in_memory_of_the_client() -> None:
    async with kvxfer.local() as client:
        loop = asyncio.get_running_loop()
        asked: list[int] = []

        def alloc(length: int) -> kvxfer.Region:
            asked.append(length)
            return asyncio.run_coroutine_threadsafe(client.alloc(length), loop).result(20)

        pool = MemoryPool(alloc, bytes_min=4096)

        def make() -> dict[str, Any]:
            with torch.inference_mode(), pool:
                whole = torch.zeros(3 * 4096, dtype=torch.int8, device=torch.device("cpu"))
                torch.zeros(16)
                torch.zeros(4096, device="meta")
                torch.full((4096,), 1.0)
                views = torch.as_strided(whole, (3, 2, 16, 2, 64), (4096, 2048, 128, 64, 1)).view(torch.float32)
                return {**{f"{i}": views[i] for i in range(3)}, "3": torch.empty((4, 4, 2, 64), dtype=torch.float16)}

        caches = await asyncio.to_thread(make)
        assert asked == [3 * 4096, 4096]
        three = {name: caches[name] for name in "012"}
        assert not any(bool(tensor.any()) for tensor in three.values())
        home = pool.home(three)
        (cache,) = cache_of(three, axes="BNHD", kv_parts=1).bind(home.regions)
        assert cache.layout.geometry.dtype == "float32"
        with torch.inference_mode():
            three["2"].fill_(1)
        assert bytes(home.regions[0].array[-4:]) == np.float32(1).tobytes()
        with pytest.raises(UsageError, match="not made in this pool"):
            pool.home({**three, "9": torch.zeros(2, 16, 2, 16)})
        with pytest.raises(RegionBusy):
            await home.regions[0].release()
    assert bool((three["2"] == 1).all()), "moved out when the client was closed"


def test_a_pool_that_has_no_room_says_so() -> None:
    def alloc(length: int) -> kvxfer.Region:
        raise kvxfer.KvxferError("no room")

    with pytest.raises(kvxfer.KvxferError, match="no room"), MemoryPool(alloc):
        torch.zeros(1 << 20)
    assert torch.zeros(1 << 20).numel() == 1 << 20

"""From tensors, as numbers, to layouts: against numpy, which reads the same elements by the tensors' own strides."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import kvxfer
from kvxfer.errors import GeometryMismatch, KvxferError, OutOfRange, OverlapError, UsageError
from kvxfer.geometry import BlockTable
from kvxfer.integrations.tensors import (
    LayerGroup,
    TensorView,
    caches_from_json,
    caches_of,
    to_json,
)
from kvxfer.planner import plan
from tests.support.nodes import two_nodes

BLOCKS, TOKENS, HEADS, DIM = 5, 4, 3, 8


def view(array: np.ndarray[Any, Any], base: np.ndarray[Any, Any], storage: int = 0) -> TensorView:
    """What a tensor over this array would say."""
    return TensorView(
        storage=storage,
        offset=array.ctypes.data - base.ctypes.data,
        shape=array.shape,
        strides=tuple(step // array.itemsize for step in array.strides),
        dtype=str(array.dtype),
    )


def dense(*shape: int, storage: int = 0, offset: int = 0, dtype: str = "float32") -> TensorView:
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.insert(0, strides[0] * extent)
    return TensorView(storage=storage, offset=offset, shape=shape, strides=tuple(strides), dtype=dtype)


def group(*names: str, axes: Any = "BNHD", **more: Any) -> LayerGroup:
    return LayerGroup(names=names, axes=axes, **more)


EXTENTS = {"P": 2, "B": BLOCKS, "N": TOKENS, "H": HEADS, "D": DIM}


def drawn(rng: random.Random) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], str, np.ndarray[Any, Any]]:
    """A tensor with its axes in any order in memory and in any other in its shape; the same as [P, B, N, H, D]."""
    order = [*rng.sample("PBNH", 4), "D"]
    base = np.arange(2 * BLOCKS * TOKENS * HEADS * DIM * 4, dtype=np.float32)
    padded = [EXTENTS[axis] + (rng.random() < 0.2) for axis in order]
    inner = base[rng.choice((0, 3)) :][: int(np.prod(padded))].reshape(padded)
    inner = inner[tuple(slice(EXTENTS[axis]) for axis in order)]
    plain = inner.transpose([order.index(axis) for axis in "PBNHD"])
    shown = [*rng.sample("PBNH", 4), "D"]
    tensor, axes = plain.transpose(["PBNHD".index(axis) for axis in shown]), "".join(shown)
    if order.index("P") == 3 and padded[3:] == [2, DIM] and rng.random() < 0.7:
        shown.remove("P")  # keys and values of a head behind each other: one axis
        axes = "".join(shown).replace("D", "C")
        steps = [plain.strides["PBNHD".index(axis)] for axis in shown]
        shape = [*(EXTENTS[axis] for axis in shown[:-1]), 2 * DIM]
        tensor = np.lib.stride_tricks.as_strided(plain, shape, steps)
    return base, tensor, axes, plain


@pytest.mark.parametrize("seed", range(150))
def test_the_layout_finds_every_element(seed: int) -> None:
    base, tensor, axes, plain = drawn(random.Random(seed))
    (cache,) = caches_of({"0": (view(tensor, base),)}, [group("0", axes=axes)], [base.nbytes])
    (placed,) = cache.layout.placed(0)
    shape = cache.layout.geometry
    assert (shape.extents(cache.layout.blocks), shape.head_size) == ((2, BLOCKS, TOKENS, HEADS), DIM)
    start = base[placed.offset // 4 :]
    found = np.lib.stride_tricks.as_strided(start, plain.shape, (*placed.strides, 4))
    assert np.array_equal(found, plain)
    again = caches_from_json(to_json({"0": (view(tensor, base),)}, [group("0", axes=axes)], [base.nbytes]))
    assert again.caches == (cache,)
    assert again.storages == (base.nbytes,)


def test_two_unlike_descriptions_of_one_cache_move_into_each_other() -> None:
    """Keys and values in two allocations, heads outside of tokens, into one allocation of another order."""
    rng = np.random.default_rng(1)
    keys, values = (rng.random((BLOCKS, HEADS, TOKENS, DIM), np.float32) for _ in range(2))
    whole = np.zeros((BLOCKS, 2, TOKENS, HEADS, DIM), np.float32)
    (source,) = caches_of(
        {"0": (view(keys, keys, 0), view(values, values, 1))}, [group("0", axes="BHND")], [keys.nbytes, values.nbytes]
    )
    (target,) = caches_of({"0": (view(whole, whole),)}, [group("0", axes="BPNHD")], [whole.nbytes])
    table = BlockTable.of([4, 0, 2], 10)
    made = plan(source.layout, table, target.layout, BlockTable.of([1, 3, 0], 10))
    memory = [keys.reshape(-1).view(np.uint8), values.reshape(-1).view(np.uint8)]
    for batch in made.layer(0):
        for begin, to, length in batch.segments.tolist():
            whole.reshape(-1).view(np.uint8)[to : to + length] = memory[batch.source_region][begin : begin + length]
    for part, tensor in enumerate((keys, values)):
        for token in range(10):
            block, slot = [4, 0, 2][token // TOKENS], token % TOKENS
            assert np.array_equal(whole[[1, 3, 0][token // TOKENS], part, slot], tensor[block, :, slot])
    assert made.bytes == 10 * 2 * HEADS * DIM * 4


def test_shapes_and_dtypes_are_caches_of_their_own() -> None:
    """An MLA cache in two halves, and an index of another dtype for every second layer."""
    layers = {}
    for i in range(4):
        halves = (dense(BLOCKS, TOKENS, 1, 64, storage=3 * i), dense(BLOCKS, TOKENS, 1, 16, storage=3 * i + 1))
        layers[f"{i}"] = halves if i % 2 else (*halves, dense(BLOCKS, TOKENS, 1, 16, storage=3 * i + 2, dtype="uint8"))
    found = caches_of(layers, [group(*layers)], [1 << 20] * 12)
    shapes = [(one.name, one.layers, one.layout.geometry.head_size, one.layout.geometry.dtype) for one in found]
    assert shapes == [
        ("0.0", ("0", "1", "2", "3"), 64, "float32"),
        ("0.1", ("0", "1", "2", "3"), 16, "float32"),
        ("0.2", ("0", "2"), 16, "uint8"),
    ]
    with pytest.raises(UsageError, match="unlike shapes"):
        caches_of(layers, [group(*layers, first_layer=2, layers_total=8)], [1 << 20] * 12)


def test_groups_lie_over_each_other() -> None:
    """Hybrid models: the layers of two groups are the same memory, block ids keep them apart."""
    layers = {f"{i}": (dense(BLOCKS, TOKENS, HEADS, DIM, offset=(i // 2) * 4096),) for i in range(4)}
    found = caches_of(layers, [group("0", "2"), group("1", "3")], [8192])
    assert [one.layers for one in found] == [("0", "2"), ("1", "3")]
    assert found[0].layout == found[1].layout
    shared = caches_of(layers, [group("0", "1", "2")], [8192])
    assert shared[0].layers == ("0", "2")
    assert shared[0].shared_by == {"1": "0"}


def test_pages_of_several_blocks_and_pools_of_tokens() -> None:
    (cache,) = caches_of({"0": (dense(12, TOKENS, HEADS, DIM),)}, [group("0", block_tokens=3 * TOKENS)], [1 << 20])
    assert cache.blocks_per_page == 3
    assert cache.table([2, 0], 20) == BlockTable.of([6, 7, 8, 0, 1, 2], 20, first_slot=0)
    assert cache.table([2, 0], 10, 17, first_slot=5) == BlockTable.of([7, 8, 0, 1, 2], 10, 17, first_slot=1)
    with pytest.raises(UsageError, match="begins inside a block"):
        cache.table([2, 0], 10, 17)
    pool = caches_of({"0": (dense(12, HEADS, DIM),)}, [group("0", axes="THD", block_tokens=4)], [1 << 20])[0]
    assert (pool.layout.blocks, pool.layout.geometry.block_tokens) == (3, 4)
    assert pool.layout.placements[0].strides is None
    for block_tokens in (None, 5):
        with pytest.raises(UsageError, match="divide"):
            caches_of({"0": (dense(12, HEADS, DIM),)}, [group("0", axes="THD", block_tokens=block_tokens)], [1 << 20])


def test_packed_tiles_move_between_equal_block_sizes_alone() -> None:
    """[blocks, heads, tokens, K and V] with tiles of its own: keys of a tile, then values; the axes are only a name."""

    def packed(tokens: int) -> Any:
        only = group("0", axes="BHNC", packing="CPU_ATTN:vec")
        return caches_of({"0": (dense(BLOCKS, HEADS, tokens, 2 * DIM),)}, [only], [1 << 20])[0]

    small, large = packed(4), packed(8)
    assert small.layout.geometry.layout == "BHPND"
    assert small.layout.placed(0)[0].strides == (4 * DIM * 4, HEADS * 8 * DIM * 4, DIM * 4, 8 * DIM * 4)
    with pytest.raises(GeometryMismatch, match="block_tokens"):
        plan(small.layout, BlockTable.of([0, 1], 8), large.layout, BlockTable.of([0], 8))
    assert (
        plan(small.layout, BlockTable.of([0, 1], 8), small.layout, BlockTable.of([2, 3], 8)).bytes
        == 8 * 2 * HEADS * DIM * 4
    )
    gap = replace(dense(BLOCKS, HEADS, 4, 2 * DIM), strides=(HEADS * 80, 80, 20, 1))
    with pytest.raises(UsageError, match="one piece"):
        caches_of({"0": (gap,)}, [group("0", axes="BHNC", packing="CPU_ATTN:vec")], [1 << 20])


def test_ranks_and_stages() -> None:
    layers = {"0": (dense(BLOCKS, TOKENS, 2, DIM),)}

    def shape(**more: Any) -> Any:
        return caches_of(layers, [group("0", **more)], [1 << 20])[0].layout.geometry

    assert shape(tp_rank=3, tp_size=4).head_numbers == range(6, 8)
    assert shape(first_layer=5, layers_total=6).layer_numbers == range(5, 6)
    one = {"0": (dense(BLOCKS, TOKENS, 1, DIM),)}
    copies = [caches_of(one, [group("0", tp_rank=rank, tp_size=8, kv_heads_total=2)], [1 << 20]) for rank in range(8)]
    assert [made[0].layout.geometry.head_start for made in copies] == [0] * 4 + [1] * 4
    for wrong in ({"tp_size": 2, "kv_heads_total": 2}, {"tp_rank": 1}, {"tp_rank": -1, "tp_size": 2}):
        with pytest.raises(UsageError, match="share"):
            shape(**wrong)


@pytest.mark.parametrize(
    ("change", "axes", "says"),
    [
        ({"strides": (96, 24, -8, 1)}, "BNHD", "backwards"),
        ({"strides": (96, 24, 0, 1)}, "BNHD", "same elements again"),
        ({"strides": (96, 24, 8, 2)}, "BNHD", "do not lie together"),
        ({"strides": (96, 24, 4, 1)}, "BNHD", "overlap"),
        ({"shape": (5, 4, 0, 8)}, "BNHD", "empty"),
        ({"dtype": "complex64"}, "BNHD", "dtype"),
        ({"offset": 2}, "BNHD", "multiple"),
        ({"offset": -4}, "BNHD", "multiple"),
        ({}, "BNH", "axes that it should have"),
        ({}, "NHPD", "counts blocks"),
        ({}, "BNTD", "letters"),
        ({}, "BPHC", "letters"),
        ({}, "BNXD", "letters"),
        ({}, "BBHD", "letters"),
        ({}, 7, "letters"),
        ({"shape": (5, 4, 3, 7)}, "BNHC", "parts of one length"),
        ({}, "BHDN", "do not lie together"),
    ],
)
def test_what_is_not_known_is_refused_and_named(change: dict[str, Any], axes: Any, says: str) -> None:
    tensor = replace(dense(BLOCKS, TOKENS, HEADS, DIM), **change)
    with pytest.raises(UsageError, match=says) as caught:
        caches_of({"layers.7": (tensor,)}, [group("layers.7", axes=axes)], [1 << 20])
    assert "layers.7" in str(caught.value)


def test_layers_that_overlap_or_leave_their_allocation_are_refused() -> None:
    one = dense(BLOCKS, TOKENS, HEADS, DIM)
    layers = {"0": (one,), "1": (replace(one, offset=64),)}
    with pytest.raises(OverlapError, match="share bytes"):
        caches_of(layers, [group("0", "1")], [1 << 20])
    with pytest.raises(OutOfRange, match="leaves its allocation"):
        caches_of(layers, [group("0")], [BLOCKS * TOKENS * HEADS * DIM * 4 - 1])
    with pytest.raises(OutOfRange):
        caches_of({"0": (replace(one, storage=1),)}, [group("0")], [1 << 20])
    with pytest.raises(UsageError, match="no tensor"):
        caches_of(layers, [group("0", "9")], [1 << 20])
    for wrong in ((), (one,) * 9):
        with pytest.raises(UsageError, match="1 to 8 tensors"):
            caches_of({"0": wrong}, [group("0")], [1 << 20])
    with pytest.raises(UsageError, match="word for each"):
        caches_of({"0": (one, one)}, [group("0", axes=("BNHD",))], [1 << 20])
    with pytest.raises(UsageError, match="tuple"):
        caches_of({"0": (dense(2, 5, 4, 3, 8), one)}, [group("0", axes=("PBNHD", "BNHD"))], [1 << 20])


def test_signature() -> None:
    """Equal for ranks, stages, orders and block sizes; unlike for what cannot be converted."""

    def sign(*shape: int, axes: str = "BNHD", **more: Any) -> str:
        found = caches_from_json(to_json({"0": (dense(*shape),)}, [group("0", axes=axes, **more)], [1 << 20]))
        return found.signature

    plain = sign(5, 4, 2, 8, layers_total=2)
    assert plain == sign(5, 16, 1, 8, tp_rank=1, tp_size=2, first_layer=1, layers_total=2)
    assert plain == sign(5, 2, 4, 8, axes="BHND", layers_total=2)
    assert plain != sign(5, 2, 4, 8, axes="BHND", layers_total=2, packing="nz")
    assert plain != sign(5, 4, 2, 16, layers_total=2)
    assert sign(5, 2, 4, 8, axes="BHND", packing="nz") != sign(5, 2, 8, 8, axes="BHND", packing="nz")
    assert json.loads(plain)[0]["kv_heads_total"] == 2


@pytest.mark.parametrize(
    "change",
    [
        *({"storages": wrong} for wrong in (3, ["a"], [True])),
        *({"layers": wrong} for wrong in ([], {"0": 3}, {"0": [{}]})),
        *(
            {"groups": wrong}
            for wrong in (None, [{}], [{"names": ["0"], "axes": None}], [{"names": 3, "axes": "BNHD"}])
        ),
    ],
)
def test_json_that_makes_no_sense(change: dict[str, Any]) -> None:
    raw = json.loads(to_json({"0": (dense(BLOCKS, TOKENS, HEADS, DIM),)}, [group("0")], [1 << 20]))
    with pytest.raises(UsageError):
        caches_from_json(json.dumps({**raw, **change}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("kv_parts", wrong) for wrong in (0, -2, 9, 1.5)),
        *(("block_tokens", wrong) for wrong in (0, -4, 3)),
        *(("tp_size", wrong) for wrong in (0, 1.5, None)),
        *(("first_layer", -1), ("layers_total", 2000), ("names", ["0", "0"]), ("colour", 1)),
    ],
)
def test_a_group_of_json_that_makes_no_sense(field: str, value: object) -> None:
    raw = json.loads(to_json({"0": (dense(BLOCKS, TOKENS, HEADS, DIM),)}, [group("0")], [1 << 20]))
    raw["groups"][0][field] = value
    with pytest.raises(UsageError):
        caches_from_json(json.dumps(raw))


def test_json_of_any_garbage_is_a_typed_error() -> None:
    raw = to_json({"0": (dense(BLOCKS, TOKENS, HEADS, DIM),)}, [group("0")], [1 << 20])
    rng = random.Random(5)
    for _ in range(400):
        text = list(raw)
        for _ in range(rng.randint(1, 4)):
            text[rng.randrange(len(text))] = rng.choice('0123456789[]{}",:-eN ')
        try:
            caches_from_json("".join(text))
        except KvxferError:
            continue
    for text in ("", "null", "[]", "{}", "[" * 100_000, b"\xff"):
        with pytest.raises(UsageError):
            caches_from_json(text)


async def test_bound_to_regions() -> None:
    found = caches_from_json(to_json({"0": (dense(BLOCKS, TOKENS, HEADS, DIM),)}, [group("0")], [4096]))
    async with kvxfer.local() as client:
        regions = [await client.alloc(length) for length in found.storages]
        (cache,) = found.bind(regions)
        assert cache.layout == found.caches[0].layout
        with pytest.raises(UsageError, match="region for each storage"):
            found.bind([])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_keys_and_values_in_allocations_of_their_own_are_pushed_pulled_and_landed(transport: str) -> None:
    """Six allocations on one side, one of another order on the other; every byte, and no byte of other blocks."""
    rng = np.random.default_rng(2)
    layers, table, blocks = 3, BlockTable.of([4, 0, 2], 10), BlockTable.of([1, 3, 0], 10)
    arrays = rng.random((layers, 2, BLOCKS, HEADS, TOKENS, DIM), np.float32)
    tensors = [[np.ascontiguousarray(part) for part in layer] for layer in arrays]
    names = [f"{i}" for i in range(layers)]
    (source,) = caches_of(
        {name: tuple(view(part, part, 2 * i + k) for k, part in enumerate(tensors[i])) for i, name in enumerate(names)},
        [group(*names, axes="BHND")],
        [tensors[0][0].nbytes] * 6,
    )
    whole = np.zeros((BLOCKS, layers, 2, TOKENS, HEADS, DIM), np.float32)
    (target,) = caches_of(
        {name: (view(whole[:, i], whole),) for i, name in enumerate(names)},
        [group(*names, axes="BPNHD")],
        [whole.nbytes],
    )

    def right(found: np.ndarray[Any, Any]) -> bool:
        """[blocks, layers, parts, tokens, heads, dim]"""
        expected = np.zeros_like(found)
        for token in range(10):
            there, here, slot = [4, 0, 2][token // TOKENS], [1, 3, 0][token // TOKENS], token % TOKENS
            expected[here, :, :, slot] = arrays[:, :, there, :, slot]
        return np.array_equal(found, expected)

    async with two_nodes([transport]) as (prefill, decode):
        ours = kvxfer.KVCache(source.layout, await prefill.register_many([part for of in tensors for part in of]))
        theirs = kvxfer.KVCache(target.layout, await decode.register(whole))
        async with prefill.publish("pulled", ours, table) as ticket:
            assert (await decode.pull(ticket, theirs, blocks)).bytes == layers * 2 * 10 * HEADS * DIM * 4
        assert right(whole)
        whole[:] = 0
        async with decode.offer("pushed", theirs, blocks) as landing:
            async with prefill.push("pushed", to=decode.addresses, cache=ours, table=table) as push:
                for layer in range(layers):
                    await push.layer(layer)
            await landing.wait()
        assert right(whole)
        if transport != "shm":
            return  # what landed is mapped, which tcp cannot
        async with prefill.push("landed", to=decode.addresses, cache=ours, table=table, land=True) as push:
            for layer in range(layers):
                await push.layer(layer)
        async with decode.adopt("landed") as landed:
            assert set(landed.layout.region_bytes()) == {0}
            made = plan(landed.layout, landed.table, target.layout, blocks)
            whole[:] = 0
            flat = whole.reshape(-1).view(np.uint8)
            for number in range(layers):
                for batch in made.layer(number):
                    for begin, to, length in batch.segments.tolist():
                        flat[to : to + length] = landed.array[begin : begin + length]
        assert right(whole)


async def test_groups_that_lie_over_each_other_are_one_request() -> None:
    """Hybrid models: two groups in the same memory, with blocks of their own, published and pulled as named caches."""
    whole, other = (np.zeros((2, BLOCKS, TOKENS, HEADS, DIM), np.float32) for _ in range(2))
    whole[:] = np.random.default_rng(3).random(whole.shape, np.float32)
    layers = {f"{i}": (view(whole[i // 2], whole),) for i in range(4)}
    groups = [group("0", "2", kv_parts=1), group("1", "3", kv_parts=1)]
    found = caches_of(layers, groups, [whole.nbytes])
    tables = [
        (BlockTable.of([0, 3], 8), BlockTable.of([4, 1], 8)),
        (BlockTable.of([2], 3, 5), BlockTable.of([0], 3, 5)),
    ]
    tables[1] = tuple(replace(table, first_slot=1) for table in tables[1])  # type: ignore[assignment]
    async with two_nodes(["shm"]) as (prefill, decode):
        regions = await prefill.register(whole), await decode.register(other)
        ours, theirs = (
            {one.name: (kvxfer.KVCache(one.layout, region), tables[one.group][side]) for one in found}
            for side, region in enumerate(regions)
        )
        async with prefill.publish("hybrid", ours) as ticket:
            await decode.pull(ticket, theirs)
    expected = np.zeros_like(other)
    expected[:, [4, 1]] = whole[:, [0, 3]]
    expected[:, 0, 1:4] = whole[:, 2, 1:4]
    assert np.array_equal(other, expected)

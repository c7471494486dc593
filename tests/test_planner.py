"""The planner against a reference that moves one head of one token at a time, over thousands of drawn pairs of caches.

The reference shares no code with the planner: it finds dense addresses by Horner's rule over the order of the axes.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from kvxfer import planner
from kvxfer.coverage import Box, box_of
from kvxfer.errors import GeometryMismatch, OutOfRange, TooLarge, UsageError
from kvxfer.geometry import BlockTable, CacheLayout, Geometry, LayerPlacement
from kvxfer.planner import Batch, Plan, contiguous_layout, plan, whole_layer_bytes

SLACK = float(os.environ.get("KVXFER_TEST_SLACK", "1"))
SEEDS, MOVING_PAIRS_PER_SEED = 8, 320
LAYOUTS = ("PBNHD", "BPNHD", "BPHND", "PBHND", "BHPND", "NBHPD", "HPBND")
ITEM_BYTES = {"uint8": 1, "bfloat16": 2, "float32": 4}


# -- the reference ----------------------------------------------------------------------------------------------------


def address(layout: CacheLayout, layer: int, part: int, block: int, slot: int, head: int) -> int:
    """Where the elements of one local head of one slot begin in the region of the part."""
    shape, place, parts = layout.geometry, layout.placements[layer], layout.geometry.kv_parts
    if isinstance(place, tuple):
        place, part, parts = place[part], 0, 1
    width = shape.head_size * ITEM_BYTES[shape.dtype]
    index = {"P": (part, parts), "B": (block, layout.blocks), "N": (slot, shape.block_tokens)}
    index["H"] = (head, shape.kv_heads)
    if place.strides is not None:
        return place.offset + sum(i * step for (i, _), step in zip(index.values(), place.strides, strict=True))
    flat = 0
    for axis in shape.layout[:-1]:
        flat = flat * index[axis][1] + index[axis][0]
    return place.offset + flat * width


def region_of(layout: CacheLayout, layer: int, part: int) -> int:
    place = layout.placements[layer]
    return place[part].region if isinstance(place, tuple) else place.region


def move_by_hand(side: Side, other: Side, memory: list[bytearray], within: Box | None = None) -> int:
    """Copy every element that both sides name (and the box, if there is one) into ``memory``; returns how many bytes
    that were.
    """
    ours, theirs = side.layout.geometry, other.layout.geometry
    width = ours.head_size * ITEM_BYTES[ours.dtype]
    tokens = set(range(side.table.first_token, side.table.first_token + side.table.tokens))
    tokens &= set(range(other.table.first_token, other.table.first_token + other.table.tokens))
    heads = set(range(ours.head_start, ours.head_start + ours.kv_heads))
    heads &= set(range(theirs.head_start, theirs.head_start + theirs.kv_heads))
    layers = set(range(ours.first_layer, ours.first_layer + ours.layers))
    layers &= set(range(theirs.first_layer, theirs.first_layer + theirs.layers))
    parts = set(range(ours.kv_parts))
    if within is not None:
        tokens, heads, layers, parts = (
            here & set(axis)
            for here, axis in zip(
                (tokens, heads, layers, parts), (within.tokens, within.heads, within.layers, within.parts), strict=True
            )
        )
    for layer in layers:
        here, there = layer - ours.first_layer, layer - theirs.first_layer
        for token in tokens:
            block, slot = side.where(token)
            to_block, to_slot = other.where(token)
            for part in parts:
                source = side.memory[region_of(side.layout, here, part)]
                target = memory[region_of(other.layout, there, part)]
                for head in heads:
                    begin = address(side.layout, here, part, block, slot, head - ours.head_start)
                    to = address(other.layout, there, part, to_block, to_slot, head - theirs.head_start)
                    target[to : to + width] = source[begin : begin + width]
    return len(layers) * len(tokens) * len(parts) * len(heads) * width


@dataclass
class Side:
    layout: CacheLayout
    table: BlockTable
    memory: list[bytearray]

    def where(self, token: int) -> tuple[int, int]:
        size = self.layout.geometry.block_tokens
        place = token - self.table.first_token + (self.table.first_slot or 0)
        return int(self.table.blocks[place // size]), place % size

    def carry_out(self, made: Plan, other: Side) -> list[bytearray]:
        """What ``other``'s memory is after the plan; checks each batch on the way."""
        memory = [bytearray(part) for part in other.memory]
        for layer in made.box.layers:
            for batch in made.layer(layer):
                for side in (0, 1):
                    begins = batch.segments[:, side]
                    ends = begins + batch.segments[:, 2]
                    assert batch.bounds[side] == (int(begins.min()), int(ends.max()))
                check_batch(batch)
                source, target = self.memory[batch.source_region], memory[batch.target_region]
                for begin, to, length in batch.segments.tolist():
                    assert begin + length <= len(source)
                    assert to + length <= len(target)
                    target[to : to + length] = source[begin : begin + length]
        return memory


def check_batch(batch: Batch) -> None:
    rows = batch.segments
    assert rows.dtype == np.uint64
    assert rows.flags.c_contiguous
    assert rows.shape == (len(rows), 3)
    assert len(rows) > 0
    assert int(rows[:, 2].min()) > 0
    ends = rows[:-1, 1] + rows[:-1, 2]
    assert bool((ends <= rows[1:, 1]).all()), "target order, no overlap"
    touching = (ends == rows[1:, 1]) & (rows[:-1, 0] + rows[:-1, 2] == rows[1:, 0])
    assert not touching.any(), "neighbours that could be one segment"


# -- drawing pairs of caches ------------------------------------------------------------------------------------------


def draw_layout(rng: random.Random, geometry: Geometry, blocks: int) -> CacheLayout:
    """Dense, padded, all layers interleaved in one allocation, or a region for each layer; in any combination. Or each
    part of each layer by itself, anywhere.
    """
    if geometry.kv_parts > 1 and rng.random() < 0.3:
        return draw_parts_apart(rng, geometry, blocks)
    strides, before, gap = None, rng.randrange(9), rng.choice((0, 0, 3))
    size = whole_layer_bytes(geometry, blocks)
    regions = [0] * geometry.layers if rng.random() < 0.7 else list(range(geometry.layers))
    offsets = [before + layer * (size + gap) for layer in range(geometry.layers)]
    style = rng.choice(("dense", "dense", "padded", "interleaved"))
    if style == "padded":
        steps, reach = {}, geometry.head_bytes
        extents = dict(zip("PBNH", geometry.extents(blocks), strict=True))
        for axis in reversed(geometry.layout[:-1]):
            steps[axis] = reach + rng.choice((0, 0, 1, 7))
            reach += (extents[axis] - 1) * steps[axis]
        strides = tuple(steps.get(axis, 0) for axis in "PBNH")
        offsets = [before + layer * (reach + gap) for layer in range(geometry.layers)]
    elif style == "interleaved" and "B" in geometry.layout[:1]:
        dense = geometry.dense_strides(blocks)
        strides = (dense[0], dense[1] * geometry.layers, dense[2], dense[3])
        offsets = [layer * dense[1] for layer in range(geometry.layers)]
    placements = [
        LayerPlacement(region=region, offset=offset, strides=strides)
        for region, offset in zip(regions, offsets, strict=True)
    ]
    return CacheLayout(geometry=geometry, blocks=blocks, placements=tuple(placements))


def draw_parts_apart(rng: random.Random, geometry: Geometry, blocks: int) -> CacheLayout:
    """Keys and values as allocations of their own, behind each other in a few regions in any order, or interleaved by
    block.
    """
    one = replace(geometry, kv_parts=1, layout=geometry.layout.replace("P", ""))
    size, names = whole_layer_bytes(one, blocks), list(product(range(geometry.layers), range(geometry.kv_parts)))
    rng.shuffle(names)
    places: dict[tuple[int, int], LayerPlacement] = {}
    regions, gap = rng.choice((1, 2, len(names))), rng.choice((0, 0, 5))
    if one.layout.startswith("B") and rng.random() < 0.3:
        _, block, token, head = one.dense_strides(blocks)
        strides = (rng.choice((0, 1)), block * len(names), token, head)
        places = {name: LayerPlacement(offset=i * block, strides=strides) for i, name in enumerate(names)}
    else:
        ends = dict.fromkeys(range(regions), 0)
        for name in names:
            region = rng.randrange(regions)
            places[name] = LayerPlacement(region=region, offset=ends[region])
            ends[region] += size + gap
    placements = tuple(
        tuple(places[layer, part] for part in range(geometry.kv_parts)) for layer in range(geometry.layers)
    )
    return CacheLayout(geometry=geometry, blocks=blocks, placements=placements)


def draw_table(
    rng: random.Random, geometry: Geometry, blocks: int, first: int, tokens: int, *, repeat: bool
) -> BlockTable:
    size = geometry.block_tokens
    slot = rng.choice((None, 0, first % size, rng.randrange(size)))
    if slot is None and first % size:
        slot = first % size
    count = -(-(tokens + (slot or 0)) // size)
    ids = list(range(blocks))
    style = rng.choice(("shuffled", "shuffled", "ascending", "descending", "runs"))
    if style == "shuffled":
        rng.shuffle(ids)
    elif style == "descending":
        ids.reverse()
    elif style == "runs":
        cut = rng.randrange(blocks)
        ids = ids[cut:] + ids[:cut]
    if repeat and rng.random() < 0.2:
        ids = [rng.choice(ids) for _ in ids]  # a source may show the same block at several positions
    return BlockTable.of(ids[: count + rng.choice((0, 0, 1))], tokens=tokens, first_token=first, first_slot=slot)


def draw_heads(rng: random.Random, total: int, near: range | None) -> range:
    """The slice of one rank, so that it has a head in common with ``near``."""
    degree = rng.choice((1, 2, 4, 8))
    held = max(1, total // degree)
    starts = {rank * total // degree for rank in range(degree)}
    if near is not None:
        starts = {start for start in starts if start < near.stop and start + held > near.start}
    start = rng.choice(sorted(starts))
    return range(start, start + held)


def draw_stage(rng: random.Random, total: int) -> dict[str, int]:
    """All layers, or all but the first or the last: any two have a layer in common."""
    stage = rng.choice((0, 0, 1, 2)) if total > 2 else 0
    return {"layers": total - min(stage, 1), "first_layer": stage // 2, "layers_total": total}


def draw_box(rng: random.Random, table: BlockTable) -> Box:
    """Some of everything, around what a table names."""

    def some(start: int, stop: int) -> range:
        first, last = sorted((rng.randint(start, stop), rng.randint(start, stop)))
        return range(first, last)

    tokens = some(max(0, table.first_token - 8), table.first_token + table.tokens + 8)
    return Box(layers=some(0, 3), parts=rng.choice((range(2), some(0, 2))), heads=some(0, 8), tokens=tokens)


def draw_memory(rng: random.Random, layout: CacheLayout) -> list[bytearray]:
    needed = layout.region_bytes()
    return [bytearray(rng.randbytes(needed.get(region, 0) + rng.choice((0, 5)))) for region in range(max(needed) + 1)]


def draw_pair(rng: random.Random) -> tuple[Side, Side]:
    parts = rng.choice((1, 2, 2, 2, 3))
    total = rng.choice((1, 2, 4, 8))
    dtype, head_size = rng.choice((("uint8", 1), ("uint8", 3), ("bfloat16", 1), ("float32", 1)))
    layers_total = rng.choice((1, 1, 2, 3, 3))
    common = {"kv_parts": parts, "dtype": dtype, "head_size": head_size, "kv_heads_total": total}
    base, sides = rng.choice((0, 0, 16, 40)), []
    near: range | None = None
    same_size = rng.random() < 0.3
    size = rng.choice((16, 32, 64, 128, 24, 48))
    for index in (0, 1):
        size = size if same_size else rng.choice((16, 16, 32, 64, 128, 24, 48, 1))
        near = heads = draw_heads(rng, total, near)
        order = rng.choice(LAYOUTS)
        order = order.replace("P", "") if parts == 1 and rng.random() < 0.5 else order
        shape = Geometry(
            **common,
            **draw_stage(rng, layers_total),
            kv_heads=len(heads),
            head_start=heads.start,
            block_tokens=size,
            layout=order,  # type: ignore[arg-type]
        )
        first = base + rng.choice((0, 0, 0, 1, 5, 16, 32))
        tokens = rng.choice((0, 1, 7, 16, 33, 48, 60, 64, 70, 128, 150))
        blocks = -(-(tokens + size - 1) // size) + rng.choice((1, 2, 5))
        layout = draw_layout(rng, shape, blocks)
        table = draw_table(rng, shape, blocks, first, tokens, repeat=index == 0)
        sides.append(Side(layout, table, draw_memory(rng, layout)))
    return sides[0], sides[1]


# -- the property -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_plan_equals_moving_element_by_element(seed: int) -> None:
    """SEEDS x MOVING_PAIRS_PER_SEED pairs that move something; those between have nothing in common."""
    moved = number = 0
    while moved < MOVING_PAIRS_PER_SEED:
        number += 1
        rng = random.Random(f"{seed}/{number}")
        source, target = draw_pair(rng)
        within = draw_box(rng, target.table) if rng.random() < 0.3 else None
        made = plan(source.layout, source.table, target.layout, target.table, within=within)
        expected = [bytearray(part) for part in target.memory]
        size = move_by_hand(source, target, expected, within)
        assert source.carry_out(made, target) == expected, f"pair {seed}/{number}"
        segments = sum(int(batch.segments[:, 2].sum()) for i in made.box.layers for batch in made.layer(i))
        assert made.bytes == size == segments, f"pair {seed}/{number}"
        assert made.layer_bytes * made.layers == made.bytes
        moved += size > 0
    assert number < 3 * MOVING_PAIRS_PER_SEED


def test_the_reference_notices_a_wrong_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that expands blocks with the other side's block size must not get through."""
    honest = planner._locate

    def confused(positions: Any, layout: CacheLayout, table: BlockTable) -> Any:
        block, slot = honest(positions, layout, table)
        return block[::-1], slot

    monkeypatch.setattr(planner, "_locate", confused)
    with pytest.raises(AssertionError, match="pair 0/"):
        test_every_plan_equals_moving_element_by_element(0)


# -- merging and the fast path ----------------------------------------------------------------------------------------


def shape(**changes: Any) -> Geometry:
    known: dict[str, Any] = {"layers": 2, "kv_heads": 4, "head_size": 8, "block_tokens": 16, "dtype": "bfloat16"}
    return Geometry(**{**known, **changes})


def dense(geometry: Geometry, blocks: int) -> CacheLayout:
    return contiguous_layout(geometry, blocks)[0]


def rows(made: Plan, layer: int = 0) -> list[list[int]]:
    (batch,) = made.layer(layer)
    return batch.segments.tolist()


@pytest.mark.parametrize(("layout", "per_block"), [("PBNHD", 2), ("PBHND", 2), ("BPNHD", 1), ("BPHND", 1)])
def test_equal_layouts_move_whole_blocks(layout: str, per_block: int) -> None:
    cache = dense(shape(layout=layout), 10)
    table = BlockTable.of([1, 3, 5], tokens=48)
    size = 16 * 4 * 16 * 2 // per_block
    made = rows(plan(cache, table, cache, BlockTable.of([8, 6, 4], tokens=48)))
    assert len(made) == 3 * per_block
    assert {length for _, _, length in made} == {size}


def test_neighbouring_blocks_become_one_segment() -> None:
    cache = dense(shape(layout="BPNHD"), 100)
    made = rows(plan(cache, BlockTable.of(range(20, 60), 40 * 16), cache, BlockTable.of(range(40), 40 * 16)))
    assert made == [[20 * 2048, 0, 40 * 2048]]


def test_a_partial_last_block_stays_partial() -> None:
    cache = dense(shape(layout="PBNHD", kv_parts=1), 10)
    made = rows(plan(cache, BlockTable.of([2, 5], 17), cache, BlockTable.of([5, 2], 17)))
    assert made == [[5 * 1024, 2 * 1024, 64], [2 * 1024, 5 * 1024, 1024]]


def test_layers_only_differ_in_their_offsets() -> None:
    cache = dense(shape(layers=3), 10)
    made = plan(cache, BlockTable.of([1, 4], 32), cache, BlockTable.of([2, 7], 32))
    first, third = np.array(rows(made, 0)), np.array(rows(made, 2))
    assert (third - first == [2 * 20480, 2 * 20480, 0]).all()


def test_a_prefix_that_is_present_is_left_out() -> None:
    cache = dense(shape(layout="BPNHD"), 10)
    made = plan(cache, BlockTable.of([0, 1, 2], 40), cache, BlockTable.of([9], 8, first_token=32))
    assert rows(made) == [[2 * 2048, 9 * 2048, 8 * 64], [2 * 2048 + 1024, 9 * 2048 + 1024, 8 * 64]]
    assert (made.first_token, made.tokens, made.complete) == (32, 8, True)


@pytest.mark.parametrize("slot", [12, 0, 5])
def test_a_table_that_begins_inside_a_block_says_in_which_slot(slot: int) -> None:
    """Tokens 12 to 31, as blocks of the whole request or filled from token 12 on, into blocks of four."""
    one = dense(shape(layers=1, kv_parts=1, kv_heads=1, head_size=1, dtype="uint8"), 10)
    other = dense(shape(layers=1, kv_parts=1, kv_heads=1, head_size=1, dtype="uint8", block_tokens=4), 10)
    made = plan(one, BlockTable.of([5, 2], 20, 12, first_slot=slot), other, BlockTable.of([1, 2, 3, 4, 5], 20, 12))
    expected = [(5 - 3 * (i + slot >= 16)) * 16 + (i + slot) % 16 for i in range(20)]
    found = [at for begin, _, length in rows(made) for at in range(begin, begin + length)]
    assert found == expected
    assert rows(made)[0][1] == 4
    assert (made.first_token, made.tokens, made.complete) == (12, 20, True)


def test_an_unclear_or_impossible_slot_is_refused() -> None:
    cache = dense(shape(), 10)
    good, unclear = BlockTable.of([1, 2], 20, 12, first_slot=12), BlockTable.of([1, 2], 20, 12)
    for tables in ((good, unclear), (unclear, good)):
        with pytest.raises(UsageError, match=r"first_slot=12 if .* first_slot=0 if") as caught:
            plan(cache, tables[0], cache, tables[1])
        assert caught.value.fields["first_token"] == 12
    with pytest.raises(OutOfRange, match="target table begins in a slot"):
        plan(cache, good, cache, BlockTable.of([1, 2], 1, 12, first_slot=16))
    with pytest.raises(OutOfRange, match="source table names more tokens") as full:
        plan(cache, BlockTable.of([1, 2], 21, 12, first_slot=12), cache, good)
    assert full.value.fields["limit"] == 20


def test_a_plan_says_when_the_target_stays_incomplete() -> None:
    cache = dense(shape(), 10)
    assert not plan(cache, BlockTable.of([0], 10), cache, BlockTable.of([1], 11)).complete
    assert not plan(cache, BlockTable.of([0], 10, 4, first_slot=4), cache, BlockTable.of([1], 5)).complete
    assert plan(cache, BlockTable.of([0], 16), cache, BlockTable.of([1], 11)).complete
    assert plan(cache, BlockTable.of([0], 16), cache, BlockTable.of([], 0)).complete


@pytest.mark.parametrize("first", [0, 16, 1008])
def test_nothing_in_common_is_an_empty_plan(first: int) -> None:
    cache = dense(shape(), 4)
    made = plan(cache, BlockTable.of([0], 16 if first else 0), cache, BlockTable.of([1], 16, first_token=first))
    assert (made.bytes, made.tokens, made.layer(0)) == (0, 0, ())


@pytest.mark.parametrize("order", ["PBNHD", "BPNHD"])
def test_parts_that_have_places_of_their_own_are_merged_where_they_touch(order: str) -> None:
    """Values behind keys, named by a placement each: the same segments as of one placement for both."""
    whole = dense(shape(layers=2, layout="PBNHD"), 4)
    apart = replace(
        whole,
        geometry=replace(whole.geometry, layout=order),
        placements=tuple(
            (LayerPlacement(offset=place.offset), LayerPlacement(offset=place.offset + whole.strides(0)[0]))
            for place in whole.placements
        ),
    )
    table = BlockTable.of(range(4), 64)
    expected = rows(plan(whole, table, whole, table))
    for source, target in ((apart, whole), (whole, apart), (apart, apart)):
        assert rows(plan(source, table, target, table)) == expected
    assert len(expected) == 1, "keys and values are neighbours"


def test_keys_and_values_in_two_allocations_are_two_batches() -> None:
    whole = dense(shape(layers=2), 4)
    apart = replace(
        whole,
        placements=tuple((LayerPlacement(offset=i << 16), LayerPlacement(region=1, offset=i << 16)) for i in (0, 1)),
    )
    table = BlockTable.of(range(4), 64)
    made = plan(apart, table, whole, table)
    assert [(batch.source_region, batch.target_region) for batch in made.layer(1)] == [(0, 0), (1, 0)]
    assert made.fragments(1) == 2 * 4
    only_values = plan(apart, table, whole, table, within=replace(made.box, parts=range(1, 2)))
    assert [batch.source_region for batch in only_values.layer(1)] == [1]
    assert only_values.bytes == made.bytes // 2


def test_ranks_together_fill_the_whole_cache() -> None:
    """Four ranks of two heads into one cache of eight: every byte of the request, each exactly once."""
    target = dense(shape(kv_heads=8, layout="BPHND"), 4)
    table = BlockTable.of([3, 1], 30)
    written: list[tuple[int, int]] = []
    for rank in range(4):
        source = dense(shape(kv_heads=2, kv_heads_total=8, head_start=2 * rank, block_tokens=32), 2)
        made = plan(source, BlockTable.of([1], 30), target, table)
        written += [(to, to + length) for _, to, length in rows(made)]
    written.sort()
    assert all(end <= begin for (_, end), (begin, _) in pairwise(written))
    assert sum(end - begin for begin, end in written) == 30 * 2 * 8 * 16


def test_stages_together_fill_the_whole_cache() -> None:
    """Layers 0 to 2 and 3 to 7 into a cache of eight; a layer is asked for by its number in the model."""
    target, table = dense(shape(layers=8), 4), BlockTable.of([3, 1], 30)
    for first, count in ((0, 3), (3, 5)):
        source = dense(shape(layers=count, first_layer=first, layers_total=8), 4)
        made = plan(source, table, target, table)
        assert (made.box.layers, made.layers, made.complete) == (range(first, first + count), count, False)
        size = source.placements[1].offset if count > 1 else 0
        for number in range(8):
            if number not in made.box.layers:
                assert (made.layer(number), made.fragments(number)) == ((), 0)
                continue
            begin, to, _ = rows(made, number)[0]
            assert to - begin == first * size


def test_stride_pairs_are_kept_within_a_limit() -> None:
    geometry = shape(layers=9, kv_parts=1)
    places = tuple(LayerPlacement(offset=i << 20, strides=(0, 1024 + i, 64, 16)) for i in range(9))
    padded = CacheLayout(geometry=geometry, blocks=4, placements=places)
    made = plan(padded, BlockTable.of([1], 16), dense(geometry, 4), BlockTable.of([0], 16))
    assert [rows(made, i)[0][0] for i in range(9)] == [(i << 20) + 1024 + i for i in range(9)]
    assert len(made._kept) == planner.STRIDE_PAIRS_KEPT_MAX


# -- packing ----------------------------------------------------------------------------------------------------------


def packed(**changes: Any) -> Geometry:
    return shape(**{"packing": "kt", "layout": "BHPND", **changes})


def test_packed_tiles_move_whole() -> None:
    cache = dense(packed(), 10)
    made = plan(cache, BlockTable.of([2, 5], 17), cache, BlockTable.of([6, 8], 17))
    assert rows(made) == [[2 * 2048, 6 * 2048, 2048], [5 * 2048, 8 * 2048, 2048]]
    assert made.bytes == 2 * 2 * 2048


def test_packed_tiles_change_ranks_and_order_as_tiles() -> None:
    source, target = dense(packed(), 4), dense(packed(kv_heads=1, kv_heads_total=4, head_start=2, layout="PBHND"), 4)
    made = rows(plan(source, BlockTable.of([1], 3), target, BlockTable.of([2], 3)))
    tile = 16 * 16
    assert made == [[2048 + 4 * tile, 2 * tile, tile], [2048 + 5 * tile, (4 + 2) * tile, tile]]


def test_packed_tiles_that_do_not_line_up_are_refused() -> None:
    cache = dense(packed(), 4)
    with pytest.raises(GeometryMismatch, match="begins inside of one"):
        plan(cache, BlockTable.of([1, 2], 32), cache, BlockTable.of([2], 16, first_token=8, first_slot=0))
    for slots in ((8, 8), (8, 0)):
        tables = [BlockTable.of([1, 2], 16, first_token=8, first_slot=slot) for slot in slots]
        with pytest.raises(GeometryMismatch, match="begins inside of one"):
            plan(cache, tables[0], cache, tables[1])
    with pytest.raises(GeometryMismatch, match="block_tokens"):
        plan(cache, BlockTable.of([1], 16), dense(packed(block_tokens=32), 4), BlockTable.of([1], 16))
    with pytest.raises(GeometryMismatch, match="packing"):
        plan(cache, BlockTable.of([1], 16), dense(shape(), 4), BlockTable.of([1], 16))


def test_packed_tiles_are_not_divided_by_a_box() -> None:
    cache, table = dense(packed(), 4), BlockTable.of([1, 2], 24)
    whole = box_of(cache, table)
    for tokens, moved in ((range(16), 1), (range(16, 24), 1), (range(64), 2)):
        made = plan(cache, table, cache, BlockTable.of([3, 0], 24), within=replace(whole, tokens=tokens))
        assert made.bytes == moved * 2 * 2048
    with pytest.raises(GeometryMismatch, match="inside of one"):
        plan(cache, table, cache, BlockTable.of([3, 0], 24), within=replace(whole, tokens=range(8)))


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "field", "source", "target"),
    [
        (OutOfRange, "source_table.blocks", BlockTable.of([4], 16), BlockTable.of([0], 16)),
        (OutOfRange, "target_table.blocks", BlockTable.of([0], 16), BlockTable.of([0, 4], 16)),
        (OutOfRange, "source_table.tokens", BlockTable.of([0], 17), BlockTable.of([0], 16)),
        (OutOfRange, "target_table.tokens", BlockTable.of([0], 16), BlockTable.of([], 1)),
        (UsageError, "target_table.blocks", BlockTable.of([0, 1], 32), BlockTable.of([3, 3], 32)),
    ],
)
def test_bad_tables(error: type[UsageError], field: str, source: BlockTable, target: BlockTable) -> None:
    cache = dense(shape(), 4)
    with pytest.raises(error) as caught:
        plan(cache, source, cache, target)
    assert type(caught.value) is error
    assert caught.value.fields["field"] == field


def test_repeated_blocks_are_fine_where_they_do_no_harm() -> None:
    cache = dense(shape(), 4)
    plan(cache, BlockTable.of([1, 1], 32), cache, BlockTable.of([2, 3], 32))
    plan(cache, BlockTable.of([1, 2], 32), cache, BlockTable.of([2, 3, 0, 0], 32))


def test_mismatches_are_refused_before_anything_is_planned() -> None:
    with pytest.raises(GeometryMismatch, match="dtype"):
        plan(dense(shape(), 4), BlockTable.of([9], 16), dense(shape(dtype="int8"), 4), BlockTable.of([9], 16))
    ours, theirs = dense(shape(fingerprint="a"), 4), dense(shape(fingerprint="b"), 4)
    table = BlockTable.of([1], 16)
    with pytest.raises(GeometryMismatch, match="fingerprint"):
        plan(ours, table, theirs, table)
    assert plan(ours, table, theirs, table, ignore_fingerprint=True).tokens == 16


@pytest.mark.parametrize("index", [-1, 2, 1.0, None, "0"])
def test_layers_that_are_none(index: Any) -> None:
    cache = dense(shape(), 4)
    with pytest.raises(UsageError, match="no such layer"):
        plan(cache, BlockTable.of([1], 16), cache, BlockTable.of([2], 16)).layer(index)


def test_segments_have_a_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = dense(shape(), 4), dense(shape(layout="PBHND"), 4)
    ours, theirs = BlockTable.of([1], 16), BlockTable.of([2], 16)
    monkeypatch.setattr(planner, "LAYER_SEGMENTS_MAX", 2 * 4 * 16)
    assert len(rows(plan(source, ours, target, theirs))) == 2 * 4 * 16
    monkeypatch.setattr(planner, "LAYER_SEGMENTS_MAX", 2 * 4 * 16 - 1)
    converted = plan(source, ours, target, theirs)
    with pytest.raises(TooLarge) as caught:
        converted.layer(0)
    assert caught.value.fields["segments"] == 128


def test_the_largest_offsets_do_not_overflow() -> None:
    geometry = shape(layers=1, kv_parts=1)
    far = CacheLayout(
        geometry=geometry, blocks=2**32, placements=(LayerPlacement(offset=2**61, strides=(0, 2**28, 64, 16)),)
    )
    made = rows(plan(far, BlockTable.of([2**32 - 1], 16), dense(geometry, 1), BlockTable.of([0], 16)))
    assert made == [[2**61 + (2**32 - 1) * 2**28, 0, 1024]]


# -- helpers ----------------------------------------------------------------------------------------------------------


def test_contiguous_layout() -> None:
    odd = shape(layers=3, head_size=1, kv_heads=1, block_tokens=5, kv_parts=1)
    layout, length = contiguous_layout(odd, 7)
    assert whole_layer_bytes(odd, 7) == 70
    assert [place.offset for place in layout.placements] == [0, 128, 256]
    assert length == 256 + 70 == layout.region_bytes()[0]


# -- speed ------------------------------------------------------------------------------------------------------------


def seconds(work: Callable[[], object]) -> float:
    best = 1e9
    for _ in range(5):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


@pytest.mark.parametrize("layout", ["PBNHD", "BPHND"])
def test_sixty_layers_of_4096_blocks_take_less_than_50_ms(layout: str) -> None:
    geometry = shape(layers=60, kv_heads=8, head_size=128, layout=layout)
    cache = dense(geometry, 4096)
    draw = np.random.default_rng(3)
    ours, theirs = (BlockTable(blocks=draw.permutation(4096), tokens=4096 * 16) for _ in range(2))

    def work() -> None:
        made = plan(cache, ours, cache, theirs)
        for layer in range(60):
            made.layer(layer)

    assert seconds(work) < 0.050 * SLACK


def test_what_a_layer_costs_is_known_before_it_is_written_out() -> None:
    ours, theirs = shape(block_tokens=16), shape(block_tokens=1, layout="PBHND")
    for source, target in ((ours, ours), (ours, theirs), (theirs, ours)):
        tables = [BlockTable.of(range(64 // side.block_tokens), 64) for side in (source, target)]
        made = plan(dense(source, 64), tables[0], dense(target, 64), tables[1])
        assert len(rows(made, 0)) <= made.fragments(0) <= 64 * ours.kv_parts * ours.kv_heads
    assert plan(dense(ours, 4), BlockTable.of([], 0), dense(ours, 4), BlockTable.of([], 0)).fragments(0) == 0

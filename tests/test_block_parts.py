"""Which bytes a request's blocks are: what a plan moves lies in them, and no byte of another block does."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from kvxfer import block_parts
from kvxfer.block_parts import BlockParts, Rows, granted
from kvxfer.geometry import BlockTable, CacheLayout, Geometry, LayerPlacement
from kvxfer.planner import plan
from tests.test_planner import address, draw_pair, region_of

PAIRS = 60


def parts_of(layout: CacheLayout, region: int) -> Rows | None:
    """Of one region; all that the placements name are looked at together."""
    regions = 1 + max(layout.region_bytes())
    return block_parts.parts_of(layout, regions)[region]


def slots_of(layout: CacheLayout, table: BlockTable) -> set[tuple[int, int]]:
    """(block, slot) of every token."""
    size, first = layout.geometry.block_tokens, table.first_slot or 0
    return {(int(table.blocks[at // size]), at % size) for at in range(first, first + table.tokens)}


def elements(layout: CacheLayout, slots: set[tuple[int, int]]) -> dict[int, set[int]]:
    """The bytes of some slots by region, element by element."""
    shape, found = layout.geometry, dict[int, set[int]]()
    for layer, part, head in product(*map(range, (layout.geometry.layers, shape.kv_parts, shape.kv_heads))):
        region = found.setdefault(region_of(layout, layer, part), set())
        for block, slot in slots:
            begin = address(layout, layer, part, block, slot, head)
            region.update(range(begin, begin + shape.head_bytes))
    return found


def grants(layout: CacheLayout, table: BlockTable) -> list[BlockParts | None]:
    """For every region."""
    regions = 1 + max(layout.region_bytes())
    return granted(layout, table, block_parts.parts_of(layout, regions))


def covered(grant: BlockParts | None) -> set[int]:
    assert grant is not None
    return {
        byte
        for base, stride, size in grant.parts.tolist()
        for block in (grant.blocks.tolist() if stride else [0])
        for byte in range(base + block * stride, base + block * stride + size)
    }


@pytest.mark.parametrize("seed", range(PAIRS))
def test_just_the_elements_of_the_tokens(seed: int) -> None:
    for side in draw_pair(random.Random(seed)):
        found = grants(side.layout, side.table)
        for region, expected in elements(side.layout, slots_of(side.layout, side.table)).items():
            assert covered(found[region]) == expected


@pytest.mark.parametrize("seed", range(PAIRS))
def test_what_is_planned_is_granted(seed: int) -> None:
    source, target = draw_pair(random.Random(seed))
    made = plan(source.layout, source.table, target.layout, target.table)
    for index in range(made.layers):
        for batch in made.layer(index):
            for side, region, column in ((source, batch.source_region, 0), (target, batch.target_region, 1)):
                grant = grants(side.layout, side.table)[region]
                assert grant is not None
                for row in batch.segments[:20].tolist():
                    assert grant.covers(row[column], row[2])


@pytest.mark.parametrize("seed", range(PAIRS))
def test_too_many_parts_become_whole_blocks_and_never_other_blocks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short limit stands for a large cache: what is granted then is more than the elements, of the same blocks."""
    for side in draw_pair(random.Random(seed)):
        slots = slots_of(side.layout, side.table)
        held, shape = {block for block, _ in slots}, side.layout.geometry
        others = product(set(range(side.layout.blocks)) - held, range(shape.block_tokens))
        free = elements(side.layout, set(others))
        monkeypatch.setattr(block_parts, "PARTS_MAX", shape.layers * shape.kv_parts)
        found = grants(side.layout, side.table)
        for region, expected in elements(side.layout, slots).items():
            if found[region] is not None:
                assert covered(found[region]) >= expected
                assert not covered(found[region]) & free[region]
        monkeypatch.undo()


@pytest.mark.parametrize(("heads", "exact"), [(2, True), (4, False)])
def test_beyond_the_limit_there_are_no_parts(heads: int, exact: bool) -> None:
    """Heads outside of blocks, in the largest cache that there is: what can be no part is granted as a whole."""
    shape = Geometry(layers=1024, kv_heads=heads, head_size=1, block_tokens=16, dtype="uint8", layout="PHBND")
    size = shape.bytes_per_block * 4
    placements = tuple(LayerPlacement(offset=layer * size) for layer in range(shape.layers))
    found = parts_of(CacheLayout(geometry=shape, blocks=4, placements=placements), 0)
    assert (found is not None) == exact
    if found is not None:
        assert len(found) == block_parts.PARTS_MAX


def test_a_dense_cache_has_one_part_for_keys_and_one_for_values_of_a_layer() -> None:
    shape = Geometry(layers=3, kv_heads=2, head_size=8, block_tokens=16, dtype="bfloat16", layout="PBNHD")
    block = shape.bytes_per_block // 2
    placements = tuple(LayerPlacement(offset=layer * 20 * block) for layer in range(3))
    found = parts_of(CacheLayout(geometry=shape, blocks=10, placements=placements), 0)
    assert found is not None
    expected = [[layer * 20 * block + part * 10 * block, block, block] for layer in range(3) for part in (0, 1)]
    assert found.tolist() == expected


def test_slots_without_tokens_are_not_granted() -> None:
    """Of the first and of the last block; with a packing they are granted whole, as they are moved."""
    shape = Geometry(layers=1, kv_parts=1, kv_heads=1, head_size=8, block_tokens=16, dtype="bfloat16")
    layout = CacheLayout(geometry=shape, blocks=10, placements=(LayerPlacement(offset=0),))

    def found(layout: CacheLayout, table: BlockTable) -> tuple[list[list[int]], list[int]]:
        (grant,) = grants(layout, table)
        assert grant is not None
        assert grant.parts.dtype == grant.blocks.dtype == np.uint64
        return grant.parts.tolist(), grant.blocks.tolist()

    row = [0, 256, 256]
    assert found(layout, BlockTable.of([7, 3, 7, 5], 48)) == ([row], [3, 7])
    assert found(layout, BlockTable.of([7, 3, 5], 33)) == ([row, [5 * 256, 0, 16]], [3, 7])
    middle = BlockTable.of([7, 3, 5], 30, 8, first_slot=8)
    assert found(layout, middle) == ([row, [7 * 256 + 128, 0, 128], [5 * 256, 0, 6 * 16]], [3])
    assert found(layout, BlockTable.of([7, 3], 4, 8, first_slot=8)) == ([[7 * 256 + 128, 0, 64]], [])
    assert found(layout, BlockTable.of([7, 3], 0)) == ([], [])
    packed = replace(layout, geometry=replace(shape, packing="tiles"))
    assert found(packed, BlockTable.of([7, 3, 5], 33)) == ([row], [3, 5, 7])
    single = CacheLayout(geometry=shape, blocks=1, placements=(LayerPlacement(offset=0),))
    assert found(single, BlockTable.of([0], 16)) == ([[0, 0, 256]], [0])
    assert found(single, BlockTable.of([0], 0)) == ([], [])

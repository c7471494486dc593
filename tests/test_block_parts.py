"""Which bytes a request's blocks are: what a plan moves lies in them, and no byte of another block does."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from kvxfer import block_parts
from kvxfer.block_parts import BlockParts, Rows, blocks_of
from kvxfer.geometry import BlockTable, CacheLayout, Geometry, LayerPlacement
from kvxfer.planner import plan
from tests.test_planner import address, draw_pair

PAIRS = 60


def parts_of(layout: CacheLayout, region: int) -> Rows | None:
    """Of one region; all that the placements name are looked at together."""
    regions = 1 + max(placement.region for placement in layout.placements)
    return block_parts.parts_of(layout, regions)[region]


def elements(layout: CacheLayout, blocks: set[int]) -> dict[int, set[int]]:
    """The bytes of some blocks by region, element by element."""
    shape, found = layout.geometry, dict[int, set[int]]()
    axes = (layout.geometry.layers, shape.kv_parts, shape.block_tokens, shape.kv_heads)
    for layer, part, slot, head in product(*map(range, axes)):
        region = found.setdefault(layout.placements[layer].region, set())
        for block in blocks:
            begin = address(layout, layer, part, block, slot, head)
            region.update(range(begin, begin + shape.head_bytes))
    return found


def covered(layout: CacheLayout, region: int, table: BlockTable) -> set[int]:
    rows, blocks = parts_of(layout, region), blocks_of(layout, table)
    assert rows is not None
    return {
        byte
        for base, stride, size in rows.tolist()
        for block in blocks.tolist()
        for byte in range(base + block * stride, base + block * stride + size)
    }


@pytest.mark.parametrize("seed", range(PAIRS))
def test_just_the_elements_of_the_blocks(seed: int) -> None:
    for side in draw_pair(random.Random(seed)):
        held = set(blocks_of(side.layout, side.table).tolist())
        for region, expected in elements(side.layout, held).items():
            assert covered(side.layout, region, side.table) == expected


@pytest.mark.parametrize("seed", range(PAIRS))
def test_what_is_planned_is_granted(seed: int) -> None:
    source, target = draw_pair(random.Random(seed))
    made = plan(source.layout, source.table, target.layout, target.table)
    for index in range(made.layers):
        for batch in made.layer(index):
            for side, region, column in ((source, batch.source_region, 0), (target, batch.target_region, 1)):
                parts = parts_of(side.layout, region)
                assert parts is not None
                grant = BlockParts(parts, blocks_of(side.layout, side.table))
                for row in batch.segments[:20].tolist():
                    assert grant.covers(row[column], row[2])


@pytest.mark.parametrize("seed", range(PAIRS))
def test_too_many_parts_become_whole_blocks_and_never_other_blocks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short limit stands for a large cache: what is granted then is more than the elements, of the same blocks."""
    for side in draw_pair(random.Random(seed)):
        held = set(blocks_of(side.layout, side.table).tolist())
        exact = elements(side.layout, held)
        others = elements(side.layout, set(range(side.layout.blocks)) - held)
        monkeypatch.setattr(block_parts, "PARTS_MAX", side.layout.geometry.layers * side.layout.geometry.kv_parts)
        for region, expected in exact.items():
            if parts_of(side.layout, region) is not None:
                found = covered(side.layout, region, side.table)
                assert found >= expected
                assert not found & others[region]
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


def test_blocks_without_tokens_are_not_granted() -> None:
    shape = Geometry(layers=1, kv_heads=1, head_size=8, block_tokens=16, dtype="bfloat16")
    layout = CacheLayout(geometry=shape, blocks=10, placements=(LayerPlacement(offset=0),))
    assert blocks_of(layout, BlockTable.of([7, 3, 7, 5], 33)).tolist() == [3, 7]
    assert blocks_of(layout, BlockTable.of([7, 3], 0)).tolist() == []
    assert blocks_of(layout, BlockTable.of([9], 16)).dtype == np.uint64

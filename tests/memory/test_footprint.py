"""Which addresses a cache covers: whether layers share bytes, and what two layouts that are too unlike cost at most."""

from __future__ import annotations

import random

import pytest

import kvxfer
from kvxfer.errors import OverlapError, TooLarge
from kvxfer.geometry import BlockTable, CacheLayout, Geometry, LayerPlacement
from kvxfer.memory import footprint as footprint_module
from kvxfer.memory.footprint import BaseAddress, Footprint, cells_meet, meeting
from kvxfer.planner import contiguous_layout
from tests.memory.test_reservations import bytes_of, draw_layout

PLACES: list[BaseAddress] = [(None, 1000), (None, 1000), (2, 1000)]  # the first two are one memory


def draw_crowd(rng: random.Random) -> CacheLayout:
    """Layers of all sorts anywhere in three regions, so that some share bytes and some do not."""
    layers = rng.choice((2, 2, 3, 4))
    drawn = [draw_layout(rng) for _ in range(layers)]
    shape, blocks = drawn[0].geometry, rng.choice((1, 2, 5))
    dense = Geometry(**{**shape.to_dict(), "layers": layers, "layers_total": layers, "packing": ""})
    steps = dense.dense_strides(blocks)
    places = set[tuple[int, int, bool]]()
    while len(places) < layers:
        places.add((rng.randrange(3), rng.choice((1, steps[1], steps[0])) * rng.randrange(40), rng.random() < 0.5))
        if len({place[:2] for place in places}) < len(places):
            places.clear()
    spread = rng.choice((1, 2, 3))
    wider = (steps[0] * spread, steps[1] * spread, steps[2] * spread, steps[3] * spread)
    placements = tuple(
        LayerPlacement(region=region, offset=offset, strides=wider if wide else None)
        for region, offset, wide in sorted(places)
    )
    return CacheLayout(geometry=dense, blocks=blocks, placements=placements)


def shares(layout: CacheLayout) -> bool:
    """Whether a byte belongs to two elements: looked up in a set of all of them."""
    table = BlockTable.of(range(layout.blocks), layout.blocks * layout.geometry.block_tokens)
    seen = set[tuple[object, int]]()
    for placement, alone in ((one, alone_of(layout, index)) for index, one in enumerate(layout.placements)):
        space, address = PLACES[placement.region]
        for byte in bytes_of(alone, table):
            if (space, address + byte) in seen:
                return True
            seen.add((space, address + byte))
    return False


def alone_of(layout: CacheLayout, index: int) -> CacheLayout:
    shape = Geometry(**{**layout.geometry.to_dict(), "layers": 1, "layers_total": 1})
    return CacheLayout(geometry=shape, blocks=layout.blocks, placements=(layout.placements[index],))


def test_layers_that_share_bytes_are_noticed() -> None:
    found = {True: 0, False: 0}
    for seed in range(1500):
        layout = draw_crowd(random.Random(seed))
        expected = shares(layout)
        found[expected] += 1
        if expected:
            with pytest.raises(OverlapError, match="two layers"):
                Footprint(layout, PLACES).require_apart()
        else:
            Footprint(layout, PLACES).require_apart()
    assert min(found.values()) > 300, found


async def test_a_cache_whose_layers_share_bytes_is_refused() -> None:
    shape = Geometry(layers=2, kv_heads=1, head_size=8, block_tokens=16, dtype="float16")
    layout, length = contiguous_layout(shape, 4)
    half = LayerPlacement(offset=layout.placements[1].offset // 2)
    async with kvxfer.local() as client:
        region = await client.alloc(length)
        kvxfer.KVCache(layout, region)
        with pytest.raises(OverlapError):
            kvxfer.KVCache(CacheLayout(geometry=shape, blocks=4, placements=(layout.placements[0], half)), region)


def test_keys_and_values_that_share_bytes_are_refused() -> None:
    """Each part with a place of its own; also in two regions that are the same memory."""
    shape = Geometry(layers=1, kv_heads=1, head_size=8, block_tokens=4, dtype="uint8")  # 32 bytes a block

    def made(offset: int, region: int = 0) -> Footprint:
        parts = (LayerPlacement(offset=0), LayerPlacement(region=region, offset=offset))
        return Footprint(CacheLayout(geometry=shape, blocks=4, placements=(parts,)), [(None, 0), (None, 64), (0, 0)])

    made(128).require_apart()
    made(64, 1).require_apart()
    made(0, 2).require_apart()
    for offset, region in ((127, 0), (1, 0), (63, 1)):
        with pytest.raises(OverlapError):
            made(offset, region).require_apart()


def test_equal_views_of_memory_are_equal() -> None:
    layout, _ = contiguous_layout(Geometry(layers=3, kv_heads=2, head_size=8, block_tokens=4, dtype="uint8"), 8)
    one, other = Footprint(layout, [(None, 64)]), Footprint(layout, [(None, 64)])
    assert one == other
    assert hash(one) == hash(other)
    assert one != Footprint(layout, [(None, 65)])
    assert one != Footprint(layout, [(0, 64)])
    turned = CacheLayout(geometry=layout.geometry, blocks=8, placements=layout.placements[::-1])
    assert one == Footprint(turned, [(None, 64)])
    assert meeting(one, other).steps == (0,)
    assert cells_meet(one.cells([3], range(4)), other.cells([3], range(3, 4)))
    assert not cells_meet(one.cells([3], range(3)), other.cells([3], range(3, 4)))


def test_what_would_cost_too_much_to_compare_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Geometry(layers=4, kv_heads=4, head_size=8, block_tokens=4, dtype="uint8", layout="HPBND")
    one, other = (Footprint(contiguous_layout(shape, blocks)[0], [(None, 0)]) for blocks in (8, 9))
    meeting(one, other)
    for name in ("ROWS_MAX", "PAIRS_MAX", "COMPARISONS_MAX"):
        with monkeypatch.context() as short:
            short.setattr(footprint_module, name, 1)
            with pytest.raises(TooLarge) as caught:
                meeting(one, other)
            assert caught.value.fields["limit"] == 1
    monkeypatch.setattr(footprint_module, "CELLS_MAX", 1)
    with pytest.raises(TooLarge, match="too many pieces"):
        one.cells([0], range(1))

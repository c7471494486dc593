"""Geometry, layouts and block tables: what is refused, what survives JSON and msgpack, and how small it stays."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import GeometryMismatch, OutOfRange, TooLarge, UsageError
from kvxfer.geometry import (
    BLOCK_ID_MAX,
    BLOCK_TOKENS_MAX,
    LAYERS_MAX,
    MARKED_MAX,
    TABLE_BLOCKS_MAX,
    BlockTable,
    CacheLayout,
    Geometry,
    LayerPlacement,
    check_compatible,
    fingerprint_of,
)

SLACK = float(os.environ.get("KVXFER_TEST_SLACK", "1"))


def geometry(**changes: Any) -> Geometry:
    return Geometry(
        **{
            "layers": 3,
            "kv_heads": 4,
            "head_size": 8,
            "block_tokens": 16,
            "dtype": "float16",
            "fingerprint": "m",
            **changes,
        }
    )


def cache(given: Geometry | None = None, blocks: int = 10) -> CacheLayout:
    given = given or geometry()
    placements = tuple(LayerPlacement(offset=i * 65536) for i in range(given.layers))
    return CacheLayout(geometry=given, blocks=blocks, placements=placements)


def through_json(raw: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(raw))


def through_msgpack(raw: dict[str, Any]) -> dict[str, Any]:
    return msgpack.unpackb(msgpack.packb(raw))


# -- geometry ---------------------------------------------------------------------------------------------------------


def test_defaults_and_sizes() -> None:
    made = geometry()
    assert (made.layout, made.kv_heads_total, made.itemsize) == ("PBNHD", 4, 2)
    assert (made.head_bytes, made.bytes_per_token, made.bytes_per_block) == (16, 128, 2048)
    assert geometry(kv_parts=1, kv_heads=1).layout == "BNHD"


@pytest.mark.parametrize(
    ("layout", "strides"),
    [
        ("PBNHD", (10 * 2048 // 2, 1024, 64, 16)),
        ("BPNHD", (1024, 2048, 64, 16)),
        ("BPHND", (1024, 2048, 16, 256)),
        ("PBHND", (10240, 1024, 16, 256)),
        ("NHBPD", (16, 32, 1280, 320)),
    ],
)
def test_dense_strides(layout: str, strides: tuple[int, ...]) -> None:
    assert geometry(layout=layout).dense_strides(10) == strides


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("layers", value) for value in (0, -1, LAYERS_MAX + 1, True, 1.0, "3", None)),
        *(("first_layer", value) for value in (-1, 1, True)),
        *(("layers_total", value) for value in (2, -1, LAYERS_MAX + 1)),
        *(("kv_parts", value) for value in (0, 9)),
        *(("kv_heads", value) for value in (0, 2**40)),
        *(("kv_heads_total", value) for value in (3, -1)),
        *(("head_start", value) for value in (-1, 1)),
        *(("head_size", value) for value in (0, 2**30)),
        *(("block_tokens", value) for value in (0, 2**30)),
        *(("dtype", value) for value in ("", "bf16", 3, None, ["float32"])),
        *(("layout", value) for value in ("BNHD", "PBNDH", "PBNHHD", "PBNHDX", "pbnhd", 7, "D", ["P"])),
        *(("fingerprint", value) for value in ("x" * 513, None, b"m")),
        ("packing", 1),
    ],
)
def test_geometry_refuses_and_names_the_field(field: str, value: object) -> None:
    with pytest.raises(UsageError) as caught:
        geometry(**{field: value})
    assert caught.value.fields["field"] in (field, "kv_heads_total", "layers_total")
    with pytest.raises(UsageError):
        Geometry.from_dict({**geometry().to_dict(), field: value})


@pytest.mark.parametrize("missing", list(geometry().to_dict()))
def test_every_field_must_be_there(missing: str) -> None:
    raw = geometry().to_dict()
    del raw[missing]
    with pytest.raises(UsageError, match=missing):
        Geometry.from_dict(raw)


@pytest.mark.parametrize("travel", [through_json, through_msgpack])
def test_round_trip(travel: Any) -> None:
    stage = {"first_layer": 2, "layers_total": 6}
    wide = geometry(kv_heads_total=8, head_start=4, layout="BPHND", dtype="float8_e4m3", **stage)
    assert Geometry.from_dict(travel(wide.to_dict())) == wide
    padded = CacheLayout(
        geometry=wide,
        blocks=7,
        placements=tuple(LayerPlacement(region=i, offset=i, strides=(4096, 16384, 8, 512)) for i in range(3)),
    )
    assert CacheLayout.from_dict(travel(padded.to_dict())) == padded
    assert CacheLayout.from_dict(travel(cache().to_dict())) == cache()
    apart = replace(padded, placements=tuple((place, replace(place, offset=1 << 20)) for place in padded.placements))
    assert CacheLayout.from_dict(travel(apart.to_dict())) == apart
    table = BlockTable(blocks=np.array([5, 4, 3, 9]), tokens=50, first_token=16)
    assert BlockTable.from_dict(travel(table.to_dict())) == table


# -- what matches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "ours", "theirs"),
    [
        ("dtype", {"dtype": "bfloat16"}, {"dtype": "float8_e4m3"}),
        ("dtype", {"dtype": "bfloat16"}, {"dtype": "float16"}),
        ("head_size", {"head_size": 8}, {"head_size": 16}),
        ("layers_total", {"layers": 3}, {"layers": 4}),
        ("layers", {"layers_total": 6}, {"layers_total": 6, "first_layer": 3}),
        ("kv_parts", {"kv_parts": 1, "layout": "PBNHD"}, {"kv_parts": 2}),
        ("kv_heads_total", {"kv_heads_total": 4}, {"kv_heads_total": 8}),
        ("packing", {"packing": "kt"}, {}),
        ("fingerprint", {"fingerprint": "a"}, {"fingerprint": "b"}),
        ("heads", {"kv_heads_total": 8}, {"kv_heads_total": 8, "head_start": 4}),
        ("block_tokens", {"packing": "kt", "block_tokens": 32}, {"packing": "kt", "block_tokens": 64}),
        (
            "fingerprint.quant",
            {"fingerprint": fingerprint_of(model="a", quant="none")},
            {"fingerprint": fingerprint_of(model="a", quant="awq")},
        ),
        (
            "fingerprint.revision",
            {"fingerprint": fingerprint_of(model="a", revision="1")},
            {"fingerprint": fingerprint_of(model="a")},
        ),
    ],
)
def test_mismatch_names_the_field_and_both_values(field: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    one, other = geometry(**ours), geometry(**theirs)
    for source, target in ((one, other), (other, one)):
        with pytest.raises(GeometryMismatch) as caught:
            check_compatible(source, target)
        known = caught.value.fields
        assert known["field"] == field
        assert known["source"] != known["target"]
        for value in (known["source"], known["target"]):
            assert repr(value) in caught.value.message


def test_what_may_differ() -> None:
    check_compatible(geometry(), geometry(layout="BPHND", block_tokens=64))
    check_compatible(geometry(kv_heads_total=8, head_start=4), geometry(kv_heads=2, kv_heads_total=8, head_start=6))
    check_compatible(geometry(), geometry(fingerprint=""))
    check_compatible(geometry(layers_total=8, first_layer=5), geometry(layers=8))


def test_the_operator_may_ignore_fingerprints_and_nothing_else() -> None:
    check_compatible(geometry(), geometry(fingerprint="other"), ignore_fingerprint=True)
    with pytest.raises(GeometryMismatch):
        check_compatible(geometry(), geometry(fingerprint="other", dtype="float32"), ignore_fingerprint=True)


def test_fingerprints_are_unambiguous() -> None:
    assert fingerprint_of(b="2", a="1") == fingerprint_of(a="1", b="2") == "a=1;b=2"
    with pytest.raises(UsageError):
        fingerprint_of(a="1;b=2")


# -- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strides",
    [
        (10240, 1024, 64, 15),  # heads overlap
        (10240, 1024, 63, 16),  # tokens overlap
        (10240, 1023, 64, 16),  # blocks overlap
        (10239, 1024, 64, 16),  # parts overlap
        (0, 1024, 64, 16),
        (10240, 1024, 64, -16),
        (10240, 1024, 64),
        (10240, 1024, 64, 16.0),
        [10240, 1024, 64, 16],
        (2**63, 1024, 64, 16),
    ],
)
def test_strides_that_overlap_or_are_none_are_refused(strides: Any) -> None:
    with pytest.raises(UsageError):
        CacheLayout(geometry=geometry(layers=1), blocks=10, placements=(LayerPlacement(offset=0, strides=strides),))


def test_strides_of_axes_of_length_one_do_not_matter() -> None:
    one = geometry(layers=1, kv_heads=1, kv_parts=1, block_tokens=1)
    CacheLayout(geometry=one, blocks=1, placements=(LayerPlacement(offset=0, strides=(0, 0, 0, 0)),))


@pytest.mark.parametrize("highest", [9, MARKED_MAX - 1, MARKED_MAX, 2**32 - 1])
def test_distinct_blocks(highest: int) -> None:
    """By marking or by sorting: the same."""
    ids = [highest, 3, 7, highest, 3, 0]
    table = BlockTable.of(ids, 0)
    for count in (None, 0, 1, 4, 6, 9):
        assert table.distinct(count).tolist() == sorted(set(ids[:count]))


def test_layouts_are_checked() -> None:
    place = LayerPlacement(offset=0)
    with pytest.raises(UsageError, match="different"):
        CacheLayout(geometry=geometry(layers=2), blocks=1, placements=(place, place))
    with pytest.raises(UsageError, match="2 layers"):
        CacheLayout(geometry=geometry(layers=2), blocks=1, placements=(place,))
    with pytest.raises(TooLarge):
        CacheLayout(geometry=geometry(layers=1), blocks=2**32, placements=(LayerPlacement(offset=2**62 - 1),))
    with pytest.raises(UsageError, match="blocks"):
        cache(blocks=0)
    packed = geometry(layers=1, kv_parts=1, layout="BNHD", packing="kt")
    with pytest.raises(UsageError, match="dense"):
        CacheLayout(geometry=packed, blocks=2, placements=(LayerPlacement(offset=0),))


def test_parts_with_places_of_their_own() -> None:
    """Keys in one region, values in another: dense means each part by itself, and a layer as a whole has no strides."""
    shape = geometry(layers=2, kv_heads=2, head_size=8, block_tokens=4, dtype="uint8", layout="BPNHD")
    places = tuple((LayerPlacement(region=0, offset=i * 512), LayerPlacement(region=1, offset=i * 512)) for i in (0, 1))
    made = CacheLayout(geometry=shape, blocks=8, placements=places)
    assert [one.parts for one in made.placed(1)] == [range(1), range(1, 2)]
    assert made.placed(1)[1].strides[1:] == (64, 16, 8)
    assert made.region_bytes() == {0: 1024, 1: 1024}
    for ask in (made.strides, made.layer_end):
        with pytest.raises(UsageError, match="places of their own"):
            ask(0)
    for wrong in (places[0][:1], (*places[0], places[0][0]), (places[0][0], None), [*places[0]], ()):
        with pytest.raises(UsageError, match="placements"):
            CacheLayout(geometry=shape, blocks=8, placements=(wrong, places[1]))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="different"):
        CacheLayout(geometry=shape, blocks=8, placements=(places[0], (places[1][0], places[0][1])))
    raw = made.to_dict()
    for row in ([raw["placements"][0][0]] * 9, [[0, 0], [0, 0]], [[], []], [0, 0]):
        with pytest.raises(UsageError, match="placements"):
            CacheLayout.from_dict({**raw, "placements": [row, raw["placements"][1]]})


def test_region_bytes() -> None:
    interleaved = tuple(LayerPlacement(region=i // 2, offset=i * 2048, strides=(1024, 8192, 64, 16)) for i in range(3))
    made = CacheLayout(geometry=geometry(), blocks=5, placements=interleaved)
    assert made.region_bytes() == {0: 2048 + 4 * 8192 + 2048, 1: 4096 + 4 * 8192 + 2048}


# -- block tables -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "runs"),
    [
        ([], []),
        ([5], [[5, 1, 1]]),
        ([3, 4, 5, 6], [[3, 1, 4]]),
        ([6, 4, 2, 0], [[6, -2, 4]]),
        ([7, 7, 7], [[7, 0, 3]]),
        ([1, 2, 3, 9], [[1, 1, 3], [9, 1, 1]]),
        ([9, 1, 2, 3], [[9, -8, 2], [2, 1, 2]]),
    ],
)
def test_runs(blocks: list[int], runs: list[list[int]]) -> None:
    raw = BlockTable.of(blocks, tokens=0).to_dict()
    assert raw["runs"] == runs
    assert BlockTable.from_dict(raw).blocks.tolist() == blocks


@given(st.lists(st.integers(0, BLOCK_ID_MAX) | st.integers(0, 5), max_size=60))
@settings(max_examples=150, deadline=None)
def test_every_table_survives(blocks: list[int]) -> None:
    table = BlockTable.of(blocks, tokens=7, first_token=9, first_slot=3)
    raw = through_json(table.to_dict())
    assert BlockTable.from_dict(raw) == table
    assert len(raw["runs"]) <= len(blocks) // 2 + 1


def test_the_encoding_is_small_and_quick_to_read() -> None:
    irregular = np.random.default_rng(1).permutation(16384)
    raw = BlockTable(blocks=irregular, tokens=16384 * 16).to_dict()
    assert len(msgpack.packb(raw)) <= 16 * 16384
    assert len(json.dumps(raw)) <= 16 * 16384
    regular = BlockTable(blocks=np.arange(1_000_000)[::-1], tokens=1).to_dict()
    assert len(json.dumps(regular)) <= 4096
    best = min(_seconds_to_read(raw) for _ in range(5))
    assert best <= 0.020 * SLACK


def _seconds_to_read(raw: dict[str, Any]) -> float:
    began = time.perf_counter()
    BlockTable.from_dict(raw)
    return time.perf_counter() - began


def test_a_table_is_a_value() -> None:
    mine = np.array([1, 2], np.int32)
    table = BlockTable(blocks=mine, tokens=3)
    mine[0] = 9
    assert table == BlockTable.of([1, 2], 3)
    assert hash(table) == hash(BlockTable.of([1, 2], 3))
    assert table != BlockTable.of([1, 3], 3)
    assert table != "table"
    with pytest.raises(ValueError, match="read-only"):
        table.blocks[0] = 5


@pytest.mark.parametrize(
    "blocks", [[-1], [BLOCK_ID_MAX + 1], [2**70], [1.5], [True], ["1"], [[1, 2]], [[1], [2, 3]], None, 3, "12"]
)
def test_block_ids_are_checked(blocks: Any) -> None:
    with pytest.raises(UsageError):
        BlockTable(blocks=blocks, tokens=0)


def test_a_table_has_a_maximum() -> None:
    most = BlockTable.of(np.zeros(TABLE_BLOCKS_MAX, np.int64), tokens=1)
    assert len(BlockTable.from_dict(most.to_dict()).blocks) == TABLE_BLOCKS_MAX
    with pytest.raises(TooLarge):
        BlockTable.of(np.zeros(TABLE_BLOCKS_MAX + 1, np.int64), tokens=1)


@pytest.mark.parametrize(
    "runs",
    [
        None,
        "abc",
        {},
        [1, 2, 3],
        [[1, 2]],
        [[1, 2, 3, 4]],
        ["abc"],
        [[1, 1, 0]],
        [[1, 1, -5]],
        [[1, 1, 1.0]],
        [[1, 1, True]],
        [[1, 1, None]],
        [[1, -1, 3]],
        [[BLOCK_ID_MAX, 1, 2]],
        [[2**80, 1, 1]],
        [[0, 2**80, 1]],
        [[0, 1, 2**80]],
        [[0, 0, TABLE_BLOCKS_MAX + 1]],
        [[0, 0, 2**32 - 1]] * 10,
        [[0, BLOCK_ID_MAX, TABLE_BLOCKS_MAX]],
        [[1, 1, 1]] * (TABLE_BLOCKS_MAX + 1),
    ],
    ids=lambda runs: repr(runs)[:30],
)
def test_hostile_runs_are_refused_before_they_cost_anything(runs: Any) -> None:
    began = time.perf_counter()
    with pytest.raises(UsageError):
        BlockTable.from_dict({"runs": runs, "tokens": 1, "first_token": 0})
    assert time.perf_counter() - began < 2 * SLACK


def test_the_first_slot_is_said_or_clear() -> None:
    assert [BlockTable.of([1], 2, first).slot(16) for first in (0, 16, 1600)] == [0, 0, 0]
    assert BlockTable.of([1], 0, 5).slot(16) == 0, "no token lies anywhere"
    assert BlockTable.of([1], 2, 5, first_slot=5).slot(16) == 5
    assert BlockTable.of([1], 2, 5, first_slot=0).slot(16) == 0
    assert BlockTable.of([1], 2, 16, first_slot=7).slot(16) == 7
    assert BlockTable.of([1], 2, 5).slot(1) == 0
    with pytest.raises(UsageError, match="first_slot=5 if") as caught:
        BlockTable.of([1], 2, 5).slot(16)
    assert (caught.value.fields["field"], caught.value.fields["first_token"]) == ("first_slot", 5)
    with pytest.raises(OutOfRange, match="begins in a slot"):
        BlockTable.of([1], 2, 5, first_slot=16).slot(16)
    for wrong in (-1, BLOCK_TOKENS_MAX, True, 1.0, "3", 2**70):
        with pytest.raises(UsageError, match="first_slot"):
            BlockTable.of([1], 2, 5, first_slot=wrong)  # type: ignore[arg-type]


def test_the_blocks_that_hold_tokens() -> None:
    table = BlockTable.of([7, 3, 9], 18, 5, first_slot=5)
    assert table.used(16, 10).tolist() == [7, 3]
    assert table.used(8, 10).tolist() == [7, 3, 9]
    assert BlockTable.of([7, 3], 0, 5).used(16, 10).tolist() == []
    with pytest.raises(OutOfRange, match="the mine names more tokens"):
        BlockTable.of([7, 3], 12, 5, first_slot=5).used(8, 10, "mine")
    with pytest.raises(OutOfRange, match="a block that its cache does not have"):
        table.used(8, 9)
    assert table != BlockTable.of([7, 3, 9], 18, 5, first_slot=4)
    assert hash(table) == hash(BlockTable.of([7, 3, 9], 18, 5, first_slot=5))


def test_a_table_without_a_first_slot_travels_too() -> None:
    assert BlockTable.from_dict({"runs": [[1, 1, 2]], "tokens": 3, "first_token": 0}) == BlockTable.of([1, 2], 3)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_anything_gives_a_value_or_a_usage_error(data: st.DataObject) -> None:
    """One spot of a good message replaced by junk: never another exception."""
    kind, good = data.draw(
        st.sampled_from(
            [
                (Geometry, geometry().to_dict()),
                (CacheLayout, cache().to_dict()),
                (BlockTable, BlockTable.of([3, 1], 2).to_dict()),
                (BlockTable, BlockTable.of([3, 1], 2, 9, first_slot=3).to_dict()),
            ]
        )
    )
    raw = through_json(good)
    spot: Any = raw
    while True:
        key = data.draw(st.sampled_from(sorted(spot) if isinstance(spot, dict) else range(len(spot))))
        if isinstance(spot[key], dict | list) and spot[key] and data.draw(st.booleans()):
            spot = spot[key]
            continue
        spot[key] = data.draw(JUNK)
        break
    try:
        made = kind.from_dict(raw)
    except UsageError:
        return
    assert kind.from_dict(made.to_dict()) == made


@pytest.mark.parametrize("kind", [Geometry, CacheLayout, BlockTable])
@pytest.mark.parametrize("raw", [None, 3, [], "x", b"x", {}])
def test_from_dict_wants_a_mapping(kind: Any, raw: Any) -> None:
    with pytest.raises(UsageError):
        kind.from_dict(raw)

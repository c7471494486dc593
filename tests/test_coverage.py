"""Boxes and coverage against a bitmap of elements."""

from __future__ import annotations

import random
import time
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvxfer import coverage
from kvxfer.coverage import (
    Box,
    Coverage,
    box_of,
    boxes_from,
    clip,
    common_elements,
    describe,
    join,
    numbers_of,
    overlap_itself,
)
from kvxfer.errors import TooLarge, UsageError
from kvxfer.geometry import BlockTable, Geometry
from kvxfer.planner import contiguous_layout

SHAPE = (5, 2, 6, 20)  # layers, parts, heads, tokens
SEEDS = 60


def box(layers: range, heads: range = range(6), tokens: range = range(20), parts: range = range(2)) -> Box:
    return Box(layers=layers, parts=parts, heads=heads, tokens=tokens)


def bitmap(*boxes: Box) -> npt.NDArray[np.bool_]:
    marks = np.zeros(SHAPE, np.bool_)
    for one in boxes:
        marks[tuple(slice(axis.start, axis.stop) for axis in (one.layers, one.parts, one.heads, one.tokens))] = True
    return marks


def draw(rng: random.Random) -> Box:
    ends = [sorted((rng.randint(0, size), rng.randint(0, size))) for size in SHAPE]
    layers, parts, heads, tokens = (range(*pair) for pair in ends)
    return box(layers, heads, tokens, range(2) if rng.random() < 0.6 else parts)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_coverage_equals_a_bitmap(seed: int) -> None:
    rng = random.Random(seed)
    want = draw(rng) if seed % 3 else box(range(5))
    wanted, arrived = bitmap(want), np.zeros(SHAPE, np.bool_)
    covered = Coverage(want)
    for _ in range(12):
        one = draw(rng)
        layers = list(one.layers) if rng.random() < 0.5 else None
        assert covered.holds(one) == bool(arrived[bitmap(one) & wanted].all())
        if layers is None:
            covered.add(one)
        for layer in layers or ():
            covered.add(one, layer)
        arrived |= bitmap(one)
        missing = covered.missing()
        assert (bitmap(*missing) == (wanted & ~arrived)).all()
        assert sum(piece.elements for piece in missing) == int((wanted & ~arrived).sum()), "they do not overlap"
        assert covered.complete == (not (wanted & ~arrived).any())
        for layer in range(SHAPE[0]):
            done = layer in want.layers and not (wanted & ~arrived)[layer].any()
            assert covered.layer_complete(layer) == done
    covered.add(box(range(5)))
    assert covered.complete
    assert covered.missing() == ()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_boxes_are_sets(seed: int) -> None:
    rng = random.Random(seed)
    one, other = draw(rng), draw(rng)
    both = bitmap(one) & bitmap(other)
    common = one.meet(other)
    assert one.elements == int(bitmap(one).sum())
    assert (common is None) == (not both.any())
    assert one.shared(other) == int(both.sum())
    assert common is None or (bitmap(common) == both).all()
    assert one.contains(other) == bool((bitmap(one) >= bitmap(other)).all())
    rest = one.without(other)
    assert (bitmap(*rest) == (bitmap(one) & ~bitmap(other))).all()
    assert sum(piece.elements for piece in rest) == int((bitmap(one) & ~bitmap(other)).sum())
    assert not overlap_itself(rest)
    assert boxes_from(numbers_of([one, other])) == (one, other)
    joined = join(rest)
    assert (bitmap(*joined) == bitmap(*rest)).all()
    assert len(joined) <= len(rest)
    third = draw(rng)
    pieces = clip(rest, [third])
    assert (bitmap(*pieces) == (bitmap(*rest) & bitmap(third))).all()
    assert common_elements(rest, [third]) == int((bitmap(*rest) & bitmap(third)).sum())


def test_overlap_of_boxes_of_one_side() -> None:
    assert overlap_itself([box(range(2)), box(range(3, 4)), box(range(1, 2), range(1))])
    assert not overlap_itself([box(range(2)), box(range(2, 4))])


def test_neighbours_become_one_box() -> None:
    pieces = [box(range(layer, layer + 1), range(head, head + 1)) for layer, head in product(range(5), range(1, 4))]
    assert join(pieces) == [box(range(5), range(1, 4))]


def test_what_is_missing_in_words() -> None:
    want = Box(layers=range(8), parts=range(2), heads=range(4), tokens=range(64))
    covered = Coverage(want)
    assert covered.describe_missing() == "parts 0-1, heads 0-3, tokens 0-63 of layers 0-7"
    covered.add(Box(layers=range(8), parts=range(2), heads=range(1), tokens=range(64)))
    assert covered.describe_missing() == "heads 1-3"
    covered.add(Box(layers=range(8), parts=range(2), heads=range(4), tokens=range(40)))
    assert covered.describe_missing() == "heads 1-3, tokens 40-63"
    covered.add(Box(layers=range(7), parts=range(2), heads=range(4), tokens=range(64)))
    assert covered.describe_missing() == "heads 1-3, tokens 40-63 of layer 7"
    covered.add(want)
    assert covered.describe_missing() == "nothing"
    scattered = [box(range(1), range(1), range(token, token + 1)) for token in range(0, 20, 2)]
    assert describe(scattered, box(range(5))).endswith("; and 6 more")


def test_what_a_cache_holds() -> None:
    shape = Geometry(
        layers=4, first_layer=4, layers_total=8, kv_heads=2, kv_heads_total=8, head_start=6, head_size=8,
        block_tokens=16, dtype="int8",
    )  # fmt: skip
    found = box_of(contiguous_layout(shape, 4)[0], BlockTable.of([1, 2], tokens=30, first_token=10))
    assert found == Box(layers=range(4, 8), parts=range(2), heads=range(6, 8), tokens=range(10, 40))
    assert str(found) == "parts 0-1, heads 6-7, tokens 10-39 of layers 4-7"


@pytest.mark.parametrize(
    ("axis", "value"),
    [
        ("layers", range(1025)),
        ("layers", range(0, 8, 2)),
        ("parts", range(9)),
        ("heads", range(-1, 2)),
        ("heads", range(4, 2)),
        ("tokens", range(2**50, 2**50 + 1)),
        ("tokens", (0, 4)),
    ],
)
def test_a_bad_box_is_refused(axis: str, value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        Box(**{"layers": range(1), "parts": range(1), "heads": range(1), "tokens": range(1), axis: value})
    assert caught.value.fields["field"] == axis


@pytest.mark.parametrize("numbers", [(1,), (0, 1, 0, 1, 0, 1, 1, 0), (0, 2**60, 0, 1, 0, 1, 0, 1)])
def test_bad_numbers_are_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(UsageError):
        boxes_from(numbers)


def test_too_many_pieces_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "FRAGMENTS_MAX", 3)
    covered = Coverage(box(range(1), range(1)))
    for token in (2, 5):
        covered.add(box(range(1), range(1), range(token, token + 1)))
    before = covered.missing()
    with pytest.raises(TooLarge, match="pieces"):
        covered.add(box(range(1), range(1), range(8, 9)))
    assert covered.missing() == before


def test_nothing_wanted_is_complete() -> None:
    covered = Coverage(box(range(5), tokens=range(7, 7)))
    assert covered.complete
    assert covered.layer_complete(0)
    assert not covered.layer_complete(5)
    assert covered.holds(box(range(5)))
    assert covered.missing() == ()


def test_one_source_of_all_costs_microseconds_for_a_layer() -> None:
    """A hundred times what it takes is allowed: only a cost that grows with what is covered would fail."""
    want = Box(layers=range(1000), parts=range(2), heads=range(128), tokens=range(1 << 20))
    covered = Coverage(want)
    began = time.perf_counter()
    for layer in want.layers:
        covered.add(want, layer)
    assert covered.complete
    assert time.perf_counter() - began < 0.5

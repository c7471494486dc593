"""Requests that move between unlike sets of ranks: a table of cases, and a slow reference for what each byte must be.

A rank holds some layers, kv heads and token positions of a request in blocks of its own. The reference shares no code
with the planner: it finds an element by Horner's rule over the order of the axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.geometry import BlockTable, CacheLayout, Geometry
from kvxfer.planner import contiguous_layout

HEAD_SIZE = 4  # elements of one byte
SPARE_BLOCKS = 2

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What one rank holds, by global numbers, and how."""

    layers: range
    heads: range
    tokens: range
    block_tokens: int = 16
    layout: str = "PBNHD"

    def has_in_common(self, other: Rank) -> bool:
        axes = ((self.layers, other.layers), (self.heads, other.heads), (self.tokens, other.tokens))
        return all(max(one.start, two.start) < min(one.stop, two.stop) for one, two in axes)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Every target is to be filled by all sources together. ``layers``, ``heads``: of the whole model."""

    name: str
    layers: int
    heads: int
    sources: tuple[Rank, ...]
    targets: tuple[Rank, ...]
    parts: int = 2

    def geometry(self, rank: Rank) -> Geometry:
        return Geometry(
            layers=len(rank.layers),
            first_layer=rank.layers.start,
            layers_total=self.layers,
            kv_parts=self.parts,
            kv_heads=len(rank.heads),
            head_start=rank.heads.start,
            kv_heads_total=self.heads,
            head_size=HEAD_SIZE,
            block_tokens=rank.block_tokens,
            dtype="uint8",
            layout=rank.layout,
        )

    def cache(self, rank: Rank, seed: int) -> tuple[CacheLayout, int, BlockTable]:
        """The layout of a rank's cache, how many bytes it takes, and a table of blocks in any order: with an odd seed
        those of the whole request, in which a piece may begin inside a block, else filled from its first token on.
        """
        slot = rank.tokens.start % rank.block_tokens if seed % 2 else 0
        needed = -(-(slot + len(rank.tokens)) // rank.block_tokens)
        layout, length = contiguous_layout(self.geometry(rank), needed + SPARE_BLOCKS)
        ids = np.random.default_rng(seed).permutation(needed + SPARE_BLOCKS)[:needed]
        return layout, length, BlockTable.of(ids, len(rank.tokens), rank.tokens.start, first_slot=slot)

    def values(self, seed: int = 1) -> Bytes:
        """What the model computed: [layer, part, head, token, dim]."""
        last = max(rank.tokens.stop for rank in (*self.sources, *self.targets))
        shape = (self.layers, self.parts, self.heads, last, HEAD_SIZE)
        return np.random.default_rng(seed).integers(1, 256, shape, np.uint8)


def places(layout: CacheLayout, table: BlockTable) -> Any:
    """Every element of a request in a cache: (its global layer, part, head and token, the place of its first byte)."""
    shape = layout.geometry
    axes = product(range(shape.layers), range(shape.kv_parts), range(shape.kv_heads), range(table.tokens))
    for layer, part, head, token in axes:
        index, slot = divmod(token + (table.first_slot or 0), shape.block_tokens)
        at = {
            "P": (part, shape.kv_parts),
            "B": (int(table.blocks[index]), layout.blocks),
            "N": (slot, shape.block_tokens),
            "H": (head, shape.kv_heads),
        }
        flat = 0
        for axis in shape.layout[:-1]:
            flat = flat * at[axis][1] + at[axis][0]
        name = (shape.first_layer + layer, part, shape.head_start + head, table.first_token + token)
        yield name, layout.placements[layer].offset + flat * HEAD_SIZE


def fill(memory: Bytes, layout: CacheLayout, table: BlockTable, values: Bytes) -> None:
    """Write what a rank holds into its memory."""
    for name, place in places(layout, table):
        memory[place : place + HEAD_SIZE] = values[name]


def split(count: int, ranks: int) -> list[range]:
    """Heads over ranks: equal, or the first ones have one more."""
    found = np.array_split(np.arange(count), ranks)
    return [range(int(some[0]), int(some[-1]) + 1) for some in found if len(some)]


def ranks(layers: list[range], heads: list[range], tokens: list[range], **how: Any) -> tuple[Rank, ...]:
    """A grid of pipeline stages, tensor-parallel slices and context-parallel pieces."""
    grid = product(layers, heads, tokens)
    return tuple(Rank(layers=layer, heads=head, tokens=token, **how) for layer, head, token in grid)


ALL_LAYERS, TOKENS = [range(2)], [range(40)]
OTHER: dict[str, Any] = {"block_tokens": 8, "layout": "BPHND"}


def _tensor(count: int, sources: int, targets: int, **how: Any) -> Case:
    return Case(
        name=f"tp {sources} to {targets} of {count} heads",
        layers=2,
        heads=count,
        sources=ranks(ALL_LAYERS, split(count, sources), TOKENS),
        targets=ranks(ALL_LAYERS, split(count, targets), TOKENS, **how),
    )


def _replicated(name: str, sources: list[range], targets: list[range]) -> Case:
    return Case(
        name=name,
        layers=2,
        heads=2,
        sources=ranks(ALL_LAYERS, sources, TOKENS),
        targets=ranks(ALL_LAYERS, targets, TOKENS, **OTHER),
    )


def _stages(name: str, sources: list[range], targets: list[range], **how: Any) -> Case:
    return Case(
        name=name,
        layers=8,
        heads=2,
        sources=ranks(sources, [range(2)], TOKENS),
        targets=ranks(targets, [range(2)], TOKENS, **how),
    )


def _pieces(name: str, sources: list[range], targets: list[range], **how: Any) -> Case:
    return Case(
        name=name,
        layers=2,
        heads=2,
        sources=ranks(ALL_LAYERS, [range(2)], sources),
        targets=ranks(ALL_LAYERS, [range(2)], targets, **how),
    )


ONE_EACH = [range(head, head + 1) for head in (0, 0, 0, 0, 1, 1, 1, 1)]
CASES = (
    *(_tensor(8, count, 1) for count in range(1, 9)),
    *(_tensor(8, 1, count, **OTHER) for count in range(2, 9)),
    *(_tensor(8, *pair) for pair in ((2, 4), (4, 2), (3, 8), (8, 3), (6, 4), (8, 8))),
    _tensor(10, 4, 3),
    _tensor(10, 3, 4, **OTHER),
    _replicated("two kv heads on eight ranks, to two", ONE_EACH, [range(1), range(1, 2)]),
    _replicated("two kv heads on eight ranks, to one", ONE_EACH, [range(2)]),
    _replicated("two kv heads on two ranks, to eight", [range(1), range(1, 2)], ONE_EACH),
    _stages("two stages to one", [range(4), range(4, 8)], [range(8)]),
    _stages("one stage to two", [range(8)], [range(4), range(4, 8)], **OTHER),
    _stages("three stages to two", [range(3), range(3, 6), range(6, 8)], [range(4), range(4, 8)]),
    _pieces("three pieces to one", [range(16), range(16, 32), range(32, 40)], [range(40)]),
    _pieces("three odd pieces to one", [range(5), range(5, 23), range(23, 40)], [range(40)], **OTHER),
    _pieces("one to three pieces", [range(40)], [range(16), range(16, 32), range(32, 40)]),
    _pieces("a prefix is there", [range(24), range(24, 40)], [range(16, 40)]),
    Case(
        name="stages, slices and pieces at once",
        layers=4,
        heads=4,
        sources=ranks([range(1), range(1, 4)], split(4, 2), [range(16), range(16, 33)]),
        targets=ranks([range(3), range(3, 4)], split(4, 3), [range(33)], **OTHER),
    ),
    Case(
        name="one kv part",
        layers=4,
        heads=1,
        parts=1,
        sources=ranks([range(2), range(2, 4)], [range(1)], [range(16), range(16, 33)], layout="BND"),
        targets=ranks([range(4)], [range(1)], [range(33)], layout="BND", block_tokens=8),
    ),
)

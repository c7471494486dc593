"""Which bytes of a region a request's blocks are: what a grant for that request lets a peer reach, and no more.

A *part* is a row of equal pieces, one per block id: piece ``b`` begins at ``base + b * stride``. A dense cache has one
for the keys and one for the values of each layer; storage that interleaves axes has more. A part of stride 0 is a
single piece, whatever the blocks: a cache of one block is made of such, and so are the slots of a block that is used in
part.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, product
from math import prod

import numpy as np
import numpy.typing as npt

from kvxfer.geometry import BlockTable, CacheLayout, PlacedParts, Strides

PARTS_MAX = 4096  # KVX_PARTS_MAX; what would need more is granted as a whole

Rows = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class BlockParts:
    """``parts``: shape (n, 3), [base, stride, length] in bytes; ``blocks``: shape (m,), ascending."""

    parts: Rows
    blocks: Rows

    def covers(self, offset: int, length: int) -> bool:
        """Whether all of a range lies in pieces of the blocks. As `kvx_blocks_cover`, which is what counts."""
        blocks = set(self.blocks.tolist())
        while length > 0:
            covered = self._covered_at(offset, blocks)
            if not covered:
                return False
            offset, length = offset + covered, length - covered
        return True

    def _covered_at(self, offset: int, blocks: set[int]) -> int:
        for base, stride, size in self.parts.tolist():
            block, inside = divmod(offset - base, stride) if stride else (None, offset - base)
            if offset >= base and inside < size and (block is None or block in blocks):
                return int(size - inside)
        return 0


def parts_of(layout: CacheLayout, regions: int) -> tuple[Rows | None, ...]:
    """The parts of a layout in each of so many regions; None where they would be more than `PARTS_MAX`.

    Exact where that takes no more than `PARTS_MAX`; else each block with the gaps between its own elements, which in
    storage that interleaves layers are the same block of other layers.
    """
    return tuple(_in_region(layout, of_one) for of_one in _placed_in(layout, regions))


def _placed_in(layout: CacheLayout, regions: int) -> list[list[PlacedParts]]:
    """What lies in each region."""
    found: list[list[PlacedParts]] = [[] for _ in range(regions)]
    for placed in chain.from_iterable(map(layout.placed, range(layout.geometry.layers))):
        found[placed.region].append(placed)
    return found


def granted(layout: CacheLayout, table: BlockTable, parts: tuple[Rows | None, ...]) -> list[BlockParts | None]:
    """What a table covers in each region, of whose layout `parts_of` gave the parts: whole blocks, and of the first and
    the last block the slots that hold tokens; the blocks themselves where that would be more than `PARTS_MAX` parts.
    """
    shape = layout.geometry
    every = table.distinct(len(table.used(shape.block_tokens, layout.blocks)))
    whole, edges = (every, ()) if shape.packing else table.divided(shape.block_tokens, layout.blocks)
    found: list[BlockParts | None] = []
    for rows, placed in zip(parts, _placed_in(layout, len(parts)), strict=True):
        slots = None if rows is None else _slots(layout, placed, edges)
        if rows is None:
            found.append(None)
        elif slots is None or len(rows) + len(slots) > PARTS_MAX:
            found.append(BlockParts(rows if len(every) else rows[:0], every.astype(np.uint64)))
        else:
            found.append(BlockParts(np.concatenate([rows if len(whole) else rows[:0], slots]), whole.astype(np.uint64)))
    return found


def _slots(layout: CacheLayout, placed: list[PlacedParts], edges: tuple[tuple[int, range], ...]) -> Rows | None:
    """A part with a single piece (stride 0) for every piece of the slots; None when they are too many."""
    found, count = [np.empty((0, 3), np.int64)], 0
    alike: dict[tuple[Strides, int], list[int]] = {}
    for one in placed:
        alike.setdefault((one.strides, len(one.parts)), []).append(one.offset)
    for ((strides, parts), offsets), (block, slots) in product(alike.items(), edges):
        pieces = _pieces(layout, strides, parts, exact=True, tokens=len(slots))
        if pieces is None or (count := count + len(pieces[0]) * len(offsets)) > PARTS_MAX:
            return None
        first = (block * strides[1] if layout.blocks > 1 else 0) + slots.start * strides[2]
        rows = np.zeros((len(offsets) * len(pieces[0]), 3), np.int64)
        rows[:, 0] = np.add.outer(np.array(offsets) + first, np.array(pieces[0])).reshape(-1)
        rows[:, 2] = pieces[1]
        found.append(rows)
    return np.concatenate(found).astype(np.uint64)


def _in_region(layout: CacheLayout, placed: list[PlacedParts]) -> Rows | None:
    exact = _rows(layout, placed, exact=True)
    return _rows(layout, placed, exact=False) if exact is None else exact


def _rows(layout: CacheLayout, placed: list[PlacedParts], *, exact: bool) -> Rows | None:
    known: dict[tuple[Strides, int], tuple[list[int], int] | None] = {}
    rows: list[tuple[int, int, int]] = []
    for one in placed:
        alike = (one.strides, len(one.parts))
        if alike not in known:
            known[alike] = _pieces(layout, *alike, exact=exact, tokens=layout.geometry.block_tokens)
        pieces = known[alike]
        if pieces is None or len(rows) + len(pieces[0]) > PARTS_MAX:
            return None
        bases, length = pieces
        stride = one.strides[1] if layout.blocks > 1 else 0  # of a single block it does not matter
        rows += [(one.offset + base, stride, length) for base in bases]
    return np.array(rows, np.uint64).reshape(-1, 3)


def _pieces(
    layout: CacheLayout, strides: Strides, parts: int, *, exact: bool, tokens: int
) -> tuple[list[int], int] | None:
    """Where the pieces of the first ``tokens`` slots of block 0 begin, relative to the first of so many kv parts, and
    how long each is. None: they are too many.
    """
    heads = layout.geometry.kv_heads
    axes = sorted((strides[axis], extent) for axis, extent in ((0, parts), (2, tokens), (3, heads)) if extent > 1)
    length = layout.geometry.head_bytes
    while axes and (axes[0][0] == length or (not exact and axes[0][0] < strides[1])):
        stride, extent = axes.pop(0)
        length += (extent - 1) * stride
    if prod(extent for _, extent in axes) > PARTS_MAX:
        return None
    bases = np.zeros(1, np.int64)
    for stride, extent in reversed(axes):
        bases = np.add.outer(bases, np.arange(extent, dtype=np.int64) * stride).reshape(-1)
    return bases.tolist(), length

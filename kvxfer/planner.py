"""From two cache layouts and two block tables to segments: which bytes go where.

The idea: token positions are cut at every block border of either side. Between two cuts (a *piece*) both addresses are
linear in (kv part, token, head), so a piece is two base addresses and a length, and numpy computes all pieces at once.
Axes that run on without a gap on both sides are folded into longer fragments, the rest is written out; fragments in the
order of the target are then merged wherever they touch on both sides. Equal layouts thus end up as whole blocks, or as
runs of blocks, by the same path that converts unequal ones. Layers that differ only in their offsets share the work.

Nothing here touches memory of a cache or waits for anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from kvxfer.coverage import Box, box_of
from kvxfer.errors import GeometryMismatch, TooLarge, UsageError
from kvxfer.geometry import BlockTable, CacheLayout, Geometry, LayerPlacement, PlacedParts, Strides, check_compatible

__all__ = ["Batch", "Plan", "check_compatible", "contiguous_layout", "plan", "whole_layer_bytes"]

LAYER_SEGMENTS_MAX = 1 << 22
CONTIGUOUS_ALIGNMENT_BYTES = 64
STRIDE_PAIRS_KEPT_MAX = 4

Ints = npt.NDArray[np.int64]


@dataclass(slots=True, kw_only=True, eq=False)
class Batch:
    """Segments between one pair of regions (indexes into the two sides' lists of regions).

    ``segments``: uint64, shape (n, 3), C order, rows [source offset, target offset, length] in bytes from the start of
    the regions, in the order of the target; no two of them can be merged and none overlap in the target.
    ``bounds``: of each side the least offset and the largest end, in bytes. Never changed (not frozen: that costs a
    microsecond per layer).
    """

    source_region: int
    target_region: int
    segments: npt.NDArray[np.uint64]
    bounds: tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pieces:
    """Stretches of tokens that lie in one block on each side; arrays of shape (n,), in the order of target blocks."""

    source_block: Ints
    source_slot: Ints
    target_block: Ints
    target_slot: Ints
    tokens: Ints

    def __len__(self) -> int:
        return len(self.tokens)

    def bases(self, blocks: _Axis, tokens: _Axis) -> Ints:
        """Offset of each piece's first token in the layer; shape (2, pieces): source, target."""
        return np.stack(
            [
                self.source_block * blocks.source + self.source_slot * tokens.source,
                self.target_block * blocks.target + self.target_slot * tokens.target,
            ]
        )


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis that both sides share: how long it is, and bytes between neighbours on each side."""

    extent: int
    source: int
    target: int

    def runs_on(self, unit: int) -> bool:
        """Whether ``unit`` bytes and their neighbour touch on both sides."""
        return self.source == self.target == unit


@dataclass(frozen=True, slots=True)
class _StridePair:
    """What the segments of kv parts that lie together on both sides depend on: both sides' strides, how many parts, and
    how many of each side's come before them. Layers that differ only in their offsets have equal ones.
    """

    source: Strides
    target: Strides
    parts: int
    skipped: tuple[int, int]


_PlacedPair = tuple[PlacedParts, PlacedParts, _StridePair]
Bounds = tuple[tuple[int, int], tuple[int, int]]  # of the source and of the target: least offset, largest end


def _bounds(offsets: Ints, lengths: Ints) -> tuple[int, int]:
    return (int(offsets.min()), int((offsets + lengths).max())) if len(offsets) else (0, 0)


def _around(several: list[Bounds]) -> Bounds:
    (ours, our_ends), (theirs, their_ends) = (tuple(zip(*side, strict=True)) for side in zip(*several, strict=True))
    return (min(ours), max(our_ends)), (min(theirs), max(their_ends))


class Plan:
    """What `plan` found out; `layer` writes out the segments of one layer when it is asked for.

    ``box`` is what is moved, by global numbers; its ``tokens`` are empty when the tables have no position in common.
    ``complete`` says whether that is all that the target holds. ``bytes`` counts all layers.
    """

    def __init__(
        self,
        source: CacheLayout,
        target: CacheLayout,
        pieces: _Pieces,
        box: Box,
        *,
        complete: bool,
    ) -> None:
        self._source = source
        self._target = target
        self._pieces = pieces
        self._kept: dict[_StridePair, tuple[Ints, Bounds]] = {}
        self._counts: dict[_StridePair, int] = {}
        self._found: tuple[int, list[_PlacedPair]] = (-1, [])  # the last answer of `_pairs`, which is asked twice
        self.box = box
        self.complete = complete
        self.first_token = box.tokens.start
        self.tokens = len(box.tokens)
        moved = int(pieces.tokens.sum())
        self.layer_bytes = moved * len(box.parts) * len(box.heads) * source.geometry.head_bytes
        self.layers = len(box.layers)
        self.layer_elements = box.elements // max(1, self.layers)
        self.bytes = self.layer_bytes * self.layers

    def layer(self, number: int) -> tuple[Batch, ...]:
        """The batches of the layer with this global number, by pair of regions; () when nothing of it is to be moved.

        Raises `UsageError` for a number that the model does not have, `TooLarge` when the layouts are so different that
        a layer takes more than `LAYER_SEGMENTS_MAX` segments.
        """
        total = self._source.geometry.layers_total
        if not isinstance(number, int) or not 0 <= number < total:
            raise UsageError("no such layer", field="layer", value=repr(number)[:20], limit=total - 1)
        if not self.layer_bytes or number not in self.box.layers:
            return ()
        found: dict[tuple[int, int], list[tuple[Ints, Bounds]]] = {}
        for source, target, pair in self._pairs(number):
            rows, (ours, theirs) = self._segments(pair)
            here, there = source.offset, target.offset
            bounds = (ours[0] + here, ours[1] + here), (theirs[0] + there, theirs[1] + there)
            shifted = rows + np.array([here, there, 0], np.int64)
            found.setdefault((source.region, target.region), []).append((shifted, bounds))
        return tuple(
            Batch(
                source_region=source,
                target_region=target,
                segments=(some[0][0] if len(some) == 1 else _merge([rows for rows, _ in some])).view(np.uint64),
                bounds=some[0][1] if len(some) == 1 else _around([bounds for _, bounds in some]),
            )
            for (source, target), some in found.items()
        )

    def fragments(self, number: int) -> int:
        """How many pieces `layer` has to write out before it merges them: what it will cost, without that cost."""
        if not self.layer_bytes or number not in self.box.layers:
            return 0
        return sum(self._count(pair) for _, _, pair in self._pairs(number))

    def _pairs(self, number: int) -> list[_PlacedPair]:
        """The kv parts of a layer that lie together on both sides."""
        asked, pairs = self._found
        if asked != number:
            pairs = list(self._find_pairs(number))
            self._found = (number, pairs)
        return pairs

    def _find_pairs(self, number: int) -> Iterator[_PlacedPair]:
        ours = self._source.placed(number - self._source.geometry.first_layer)
        theirs = self._target.placed(number - self._target.geometry.first_layer)
        for source, target in product(ours, theirs):
            start = max(source.parts.start, target.parts.start, self.box.parts.start)
            parts = min(source.parts.stop, target.parts.stop, self.box.parts.stop) - start
            if parts > 0:
                skipped = (start - source.parts.start, start - target.parts.start)
                yield source, target, _StridePair(source.strides, target.strides, parts, skipped)

    def _count(self, pair: _StridePair) -> int:
        kept = self._counts.get(pair)
        if kept is None:
            if len(self._counts) >= STRIDE_PAIRS_KEPT_MAX:
                self._counts.pop(next(iter(self._counts)), None)
            kept = self._counts[pair] = sum(group.count for group in self._groups(pair))
        return kept

    def _segments(self, pair: _StridePair) -> tuple[Ints, Bounds]:
        """`_written` of this pair and its bounds, kept for the next layer."""
        kept = self._kept.get(pair)
        if kept is None:
            rows = self._written(pair)
            kept = rows, (_bounds(rows[:, 0], rows[:, 2]), _bounds(rows[:, 1], rows[:, 2]))
            if len(self._kept) >= STRIDE_PAIRS_KEPT_MAX:
                self._kept.pop(next(iter(self._kept)), None)
            self._kept[pair] = kept
        return kept

    def _written(self, pair: _StridePair) -> Ints:
        """Merged segments relative to where the parts begin, shape (n, 3)."""
        groups = self._groups(pair)
        count = sum(group.count for group in groups)
        if count > LAYER_SEGMENTS_MAX:
            raise TooLarge(
                "converting between these layouts takes too many segments",
                segments=count,
                limit=LAYER_SEGMENTS_MAX,
                hint="give both sides the same order of axes, or move fewer tokens at a time",
            )
        return _merge([group.write_out(pair.target[1]) for group in groups if group.count])

    def _groups(self, pair: _StridePair) -> list[_PieceGroup]:
        ours, theirs = self._source.geometry, self._target.geometry
        pieces, block_tokens = self._pieces, ours.block_tokens
        full = (pieces.tokens == block_tokens) & (theirs.block_tokens == block_tokens)
        extents = (pair.parts, 0, block_tokens, len(self.box.heads))
        parts, blocks, tokens, heads = map(_Axis, extents, pair.source, pair.target)
        source_head, target_head = (self.box.heads.start - side.head_start for side in (ours, theirs))
        bases = pieces.bases(blocks, tokens) + _pair(source_head * heads.source, target_head * heads.target)
        bases += _pair(pair.skipped[0] * parts.source, pair.skipped[1] * parts.target)
        return [
            _group([parts, heads, tokens], None, pieces.tokens[full], bases[:, full], ours.head_bytes),
            _group([parts, heads], tokens, pieces.tokens[~full], bases[:, ~full], ours.head_bytes),
        ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _PieceGroup:
    """Pieces that are written out alike: per piece a fragment of ``unit`` bytes for every index along ``axes``.

    ``bases`` has shape (2, pieces). ``stepped`` is the token axis where the tokens of a piece do not touch and each has
    its own fragment; without it a fragment is as long as all ``tokens`` of its piece, ``unit`` bytes each. Whole blocks
    have their tokens among the ``axes`` or folded into the unit, and count as one here.
    """

    axes: tuple[_Axis, ...]
    stepped: _Axis | None
    tokens: Ints
    bases: Ints
    unit: int

    @property
    def count(self) -> int:
        bases = int(self.tokens.sum()) if self.stepped else len(self.tokens)
        return bases * math.prod(axis.extent for axis in self.axes)

    def write_out(self, target_block_stride: int) -> Ints:
        """Fragments, shape (n, 3), as far as possible in the order of the target."""
        bases, tokens = self.bases, self.tokens
        if self.stepped:
            index = np.repeat(np.arange(len(tokens)), tokens)
            step = np.arange(len(index)) - np.repeat(np.cumsum(tokens) - tokens, tokens)
            bases = bases[:, index] + _pair(self.stepped.source, self.stepped.target) * step
            tokens = np.ones(len(index), np.int64)
        outer = _offsets([axis for axis in self.axes if axis.target > target_block_stride])
        inner = _offsets([axis for axis in self.axes if axis.target <= target_block_stride])
        shape = (outer.shape[1], bases.shape[1], inner.shape[1])
        rows = np.empty((*shape, 3), np.int64)
        for side in (0, 1):
            np.add(outer[side][:, None, None], bases[side][:, None], out=rows[..., side])
            rows[..., side] += inner[side]
        rows[..., 2] = (tokens * self.unit)[:, None]
        return rows.reshape(-1, 3)


def _group(axes: list[_Axis], tokens: _Axis | None, lengths: Ints, bases: Ints, unit: int) -> _PieceGroup:
    """Fold every axis that runs on without a gap on both sides into the unit; then the tokens, if they run on too."""
    left = [axis for axis in axes if axis.extent > 1]
    while folded := next((axis for axis in left if axis.runs_on(unit)), None):
        unit *= folded.extent
        left.remove(folded)
    if tokens is None:
        lengths = np.ones_like(lengths)
    stepped = tokens if tokens is not None and not tokens.runs_on(unit) else None
    return _PieceGroup(axes=tuple(left), stepped=stepped, tokens=lengths, bases=bases, unit=unit)


def _pair(source: int, target: int) -> Ints:
    return np.array([[source], [target]], np.int64)


def _offsets(axes: list[_Axis]) -> Ints:
    """Every combination of indexes along the axes as an offset on each side; shape (2, n), ascending in the target."""
    offsets = np.zeros((2, 1), np.int64)
    for axis in sorted(axes, key=lambda axis: -axis.target):
        steps = np.arange(axis.extent) * _pair(axis.source, axis.target)
        offsets = (offsets[:, :, None] + steps[:, None, :]).reshape(2, -1)
    return offsets


def _merge(groups: list[Ints]) -> Ints:
    """Sort by target offset and join neighbours that touch on both sides."""
    rows = groups[0] if len(groups) == 1 else np.concatenate(groups)
    if bool((rows[1:, 1] < rows[:-1, 1]).any()):
        rows = rows[np.argsort(rows[:, 1], kind="stable")]
    ends = rows[:-1, :2] + rows[:-1, 2:]
    starts = np.flatnonzero(np.concatenate([[True], (rows[1:, :2] != ends).any(axis=1)]))
    if len(starts) == len(rows):
        return rows
    merged = rows[starts]
    merged[:, 2] = np.add.reduceat(rows[:, 2], starts)
    return merged


def plan(
    source: CacheLayout,
    source_table: BlockTable,
    target: CacheLayout,
    target_table: BlockTable,
    *,
    ignore_fingerprint: bool = False,
    within: Box | None = None,
) -> Plan:
    """How to fill ``target`` from ``source``: the layers, heads and token positions that both have; of these, with
    ``within``, only what lies in that box.

    Raises `GeometryMismatch` when the two cannot be mapped onto each other, `OutOfRange` when a table names a block
    that its layout does not have or more tokens than its blocks hold, `UsageError` when the target repeats a block.
    """
    check_compatible(source.geometry, target.geometry, ignore_fingerprint=ignore_fingerprint)
    source_table.used(source.geometry.block_tokens, source.blocks, "source table")
    used = target_table.used(target.geometry.block_tokens, target.blocks, "target table")
    if len(np.unique(used)) != len(used):
        ids, counts = np.unique(used, return_counts=True)
        raise UsageError(
            "the target table names a block twice", field="target_table.blocks", value=int(ids[counts > 1][0])
        )
    wanted = box_of(target, target_table)
    box = box_of(source, source_table).common(wanted)
    if within is not None:
        box = _restricted(box, within, (source.geometry, source_table))
    pieces = _cut(box.tokens.start, box.tokens.stop, (source, source_table), (target, target_table))
    return Plan(source, target, pieces, box, complete=box.contains(wanted))


def _restricted(box: Box, within: Box, source: tuple[Geometry, BlockTable]) -> Box:
    """The part of the box that lies within another one; packed blocks cannot be divided."""
    found = box.common(within)
    packing, (shape, table) = source[0].packing, source
    if (
        packing
        and found.tokens.stop != box.tokens.stop
        and (table.slot(shape.block_tokens) + found.tokens.stop - table.first_token) % shape.block_tokens
    ):
        raise GeometryMismatch(
            "packed blocks move whole, but what is to be moved ends inside of one",
            field="tokens",
            value=found.tokens.stop,
            packing=packing,
        )
    return found


def _cut(
    start: int, stop: int, source: tuple[CacheLayout, BlockTable], target: tuple[CacheLayout, BlockTable]
) -> _Pieces:
    """Cut the positions from ``start`` to ``stop`` at the block borders of both sides."""
    borders = [np.array([start] if stop > start else [], np.int64)]
    for layout, table in (source, target):
        step = layout.geometry.block_tokens
        first = start + 1 + (table.first_token - table.slot(step) - start - 1) % step
        borders.append(np.arange(first, stop, step, dtype=np.int64))
    begins = np.unique(np.concatenate(borders))
    tokens = np.diff(begins, append=stop)
    (source_block, source_slot), (target_block, target_slot) = (_locate(begins, *side) for side in (source, target))
    packing, block_tokens = source[0].geometry.packing, source[0].geometry.block_tokens
    if packing:
        if bool((source_slot != 0).any() or (target_slot != 0).any()):
            raise GeometryMismatch(
                "packed blocks move whole, but what is to be moved begins inside of one",
                field="first_token",
                source=source[1].first_token,
                target=target[1].first_token,
                packing=packing,
            )
        tokens = np.full_like(tokens, block_tokens)
    order = np.lexsort((target_slot, target_block))
    return _Pieces(
        source_block=source_block[order],
        source_slot=source_slot[order],
        target_block=target_block[order],
        target_slot=target_slot[order],
        tokens=tokens[order],
    )


def _locate(positions: Ints, layout: CacheLayout, table: BlockTable) -> tuple[Ints, Ints]:
    size = layout.geometry.block_tokens
    index, slot = np.divmod(positions - table.first_token + table.slot(size), size)
    return table.blocks[index], slot


def whole_layer_bytes(geometry: Geometry, blocks: int) -> int:
    """Bytes of ``blocks`` blocks of one layer without padding."""
    return geometry.bytes_per_block * blocks


def contiguous_layout(geometry: Geometry, blocks: int) -> tuple[CacheLayout, int]:
    """A layout with all layers one after the other in one region (index 0), and the region's length in bytes.

    Each layer begins at a multiple of 64 bytes (`CONTIGUOUS_ALIGNMENT_BYTES`, a cache line). Raises: `UsageError` for a
    number of blocks that is out of range.
    """
    size = whole_layer_bytes(geometry, blocks)
    step = -(-size // CONTIGUOUS_ALIGNMENT_BYTES) * CONTIGUOUS_ALIGNMENT_BYTES
    placements = tuple(LayerPlacement(offset=layer * step) for layer in range(geometry.layers))
    return CacheLayout(geometry=geometry, blocks=blocks, placements=placements), step * (geometry.layers - 1) + size

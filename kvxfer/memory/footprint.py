"""Which addresses the blocks of a cache cover, and whether two caches meet: exact, and without listing the bytes.

The idea: a layer covers a lattice, ``base + part * p + block * b + slot * n + head * h`` and ``head_bytes`` from there
on. The strides are nested (each reaches over all that lies inside it), so two lattices are compared from the outermost
axis inwards, and an axis that both have with the same stride is one subtraction, however long it is. What is found of
two caches depends on their layouts only: blocks that lie so many block ids apart share bytes (`Overlap.steps`), or,
where the two have blocks of unlike strides, a difference of their first addresses for which the block ids are joined.

Addresses are of the process (or of a device), not of a region: memory that was registered twice is the same memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.errors import OverlapError, TooLarge
from kvxfer.geometry import CacheLayout

ROWS_MAX = 1 << 18  # of one cache that shares memory with another one
PAIRS_MAX = 1 << 22
CELLS_MAX = 1 << 22
BLOCKS_AT_ONCE = 1 << 10
COMPARISONS_MAX = 1 << 20

Ints = npt.NDArray[np.int64]
Cells = dict[Hashable, tuple[Ints, Ints]]
BaseAddress = tuple[Hashable, int]  # an address space (the host's, or a device's) and an address in it
_Axis = tuple[int, int]  # stride, extent
_HINT = "use one layout for memory that several requests share"


def _reach(axes: Sequence[_Axis], unit: int) -> int:
    return unit + sum(stride * (extent - 1) for stride, extent in axes)


def _offsets(axes: Sequence[_Axis]) -> Ints:
    """Where every combination of indexes begins."""
    found = np.zeros(1, np.int64)
    for stride, extent in axes:
        found = np.add.outer(found, np.arange(extent, dtype=np.int64) * stride).reshape(-1)
    return found


def _folded(axes: Sequence[_Axis], unit: int) -> tuple[tuple[_Axis, ...], int]:
    """The axes that do not run on without a gap, outermost first, and how long a piece is then."""
    left = sorted((axis for axis in axes if axis[1] > 1), reverse=True)
    while left and left[-1][0] == unit:
        unit *= left.pop()[1]
    return tuple(left), unit


@dataclass(frozen=True, slots=True, eq=False)
class _LayerGroup:
    """Layers of one address space whose strides are equal. ``inner``: the axes inside a block, outermost first, with
    the slots as ``tokens``; ``outer``: those that blocks lie inside of. ``step``: bytes from block to block.
    """

    space: Hashable
    bases: Ints
    blocks: int
    step: int
    outer: tuple[_Axis, ...]
    inner: tuple[_Axis, ...]
    unit: int
    axes: tuple[_Axis, _Axis, _Axis]  # P, N, H as they are
    head_bytes: int
    begin: int  # its first byte, and just behind its last
    end: int

    @property
    def reach(self) -> int:
        """Bytes from the first to the last of a block."""
        return _reach(self.inner, self.unit)

    @property
    def row_reach(self) -> int:
        """The same of all blocks of one row."""
        return (self.blocks - 1) * self.step + self.reach

    def rows(self) -> Ints:
        """Where block 0 begins in every row of blocks, ascending."""
        if len(self.bases) * prod(extent for _, extent in self.outer) > ROWS_MAX:
            raise TooLarge("two caches in the same memory have too many rows to compare", limit=ROWS_MAX, hint=_HINT)
        return np.sort(np.add.outer(self.bases, _offsets(self.outer)).reshape(-1))

    def cells(self, blocks: Ints, slots: range) -> tuple[Ints, int]:
        """Every piece of some slots of these blocks: where it begins, in no order, and how long all are."""
        parts, tokens, heads = self.axes
        axes, unit = _folded([parts, (tokens[0], len(slots)), heads], self.head_bytes)
        count = len(blocks) * len(self.bases) * prod(extent for _, extent in axes)
        if count > CELLS_MAX:
            raise TooLarge("blocks have too many pieces to compare", pieces=count, limit=CELLS_MAX, hint=_HINT)
        first = blocks * self.step + slots.start * (tokens[0] if tokens[1] > 1 else 0)
        rows = np.add.outer(self.bases, first).reshape(-1)
        return np.add.outer(rows, _offsets(axes)).reshape(-1), unit


class Footprint:
    """What a cache covers. Compared and hashed by value: two views that cover the same bytes alike are equal.

    ``places`` says where each region of the layout's placements begins.
    """

    __slots__ = ("_groups", "_hash", "_key", "block_tokens", "blocks", "whole")

    def __init__(self, layout: CacheLayout, places: Sequence[BaseAddress]) -> None:
        shape = layout.geometry
        self.blocks = layout.blocks
        self.block_tokens = shape.block_tokens
        self.whole = bool(shape.packing)  # packed tiles are never written in part
        alike: dict[tuple[Hashable, tuple[int, ...], int], list[int]] = {}
        for placed in chain.from_iterable(map(layout.placed, range(shape.layers))):
            space, address = places[placed.region]
            alike.setdefault((space, placed.strides, len(placed.parts)), []).append(address + placed.offset)
        self._key = (
            (layout.blocks, shape.block_tokens, shape.kv_heads, shape.head_bytes, self.whole),
            frozenset((of, tuple(sorted(bases))) for of, bases in alike.items()),
        )
        self._hash = hash(self._key)
        self._groups = tuple(
            _group(layout, space, strides, parts, bases) for (space, strides, parts), bases in alike.items()
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Footprint) and self._hash == other._hash and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    def apart(self, other: Footprint) -> bool:
        """Whether nothing of one lies between the first and the last byte of the other: a quick look."""
        return not any(_near(one, two) for one in self._groups for two in other._groups)

    def require_apart(self) -> None:
        """No two layers have a byte in common, whatever the blocks. Raises `OverlapError`, or what `meeting` does."""
        for index, one in enumerate(self._groups):
            for two in self._groups[: index + 1]:
                if _near(one, two) and _meet_somewhere(one, two):
                    raise OverlapError(
                        "two layers of the cache share bytes",
                        field="placements",
                        hint="each layer needs memory of its own for as many blocks as the layout has",
                    )

    def cells(self, blocks: Sequence[int] | Ints, slots: range) -> Cells:
        """Every byte of some slots of these blocks, by address space: begins and ends, ascending."""
        found: dict[Hashable, list[tuple[Ints, Ints]]] = {}
        for group in self._groups:
            begins, unit = group.cells(np.asarray(blocks, np.int64), slots)
            found.setdefault(group.space, []).append((begins, begins + unit))
        return {space: _sorted(pieces) for space, pieces in found.items()}

    def first_meeting(self, blocks: Ints, slots: range, cells: Cells) -> int | None:
        """The first of these blocks of which the slots share a byte with the cells."""
        for start in range(0, len(blocks), BLOCKS_AT_ONCE):
            some = blocks[start : start + BLOCKS_AT_ONCE]
            if cells_meet(self.cells(some, slots), cells):
                while len(some) > 1:
                    half = some[: len(some) // 2]
                    some = half if cells_meet(self.cells(half, slots), cells) else some[len(some) // 2 :]
                return int(some[0])
        return None


def _sorted(pieces: list[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    begins = np.concatenate([begin for begin, _ in pieces])
    ends = np.concatenate([end for _, end in pieces])
    order = np.argsort(begins, kind="stable")
    return begins[order], np.maximum.accumulate(ends[order])


def _group(
    layout: CacheLayout, space: Hashable, strides: tuple[int, ...], kv_parts: int, bases: list[int]
) -> _LayerGroup:
    shape, step = layout.geometry, strides[1] if layout.blocks > 1 else 0
    parts, tokens, heads = zip(
        (strides[0], strides[2], strides[3]), (kv_parts, shape.block_tokens, shape.kv_heads), strict=True
    )
    real = [axis for axis in (parts, tokens, heads) if axis[1] > 1]
    inner, unit = _folded([axis for axis in real if not step or axis[0] < step], shape.head_bytes)
    length = _reach([*real, (step, layout.blocks)], shape.head_bytes)
    return _LayerGroup(
        space=space,
        bases=np.array(sorted(bases), np.int64),
        blocks=layout.blocks,
        step=step,
        outer=tuple(axis for axis in real if step and axis[0] >= step),
        inner=inner,
        unit=unit,
        axes=(parts, tokens, heads),
        head_bytes=shape.head_bytes,
        begin=min(bases),
        end=max(bases) + length,
    )


def _near(one: _LayerGroup, other: _LayerGroup) -> bool:
    """Whether something of one lies between the first and the last byte of the other."""
    return one.space == other.space and one.begin < other.end and other.begin < one.end


def _meet_somewhere(one: _LayerGroup, other: _LayerGroup) -> bool:
    """Whether different rows of blocks have a byte in common."""
    differences = _row_differences(one, other)
    if one is other:
        rows = one.rows()
        if bool((rows[1:] == rows[:-1]).any()):
            return True
        differences = differences[differences != 0]  # each row meets itself
    if one.step == other.step and one.step:
        return bool(_steps(one, other, differences))
    join = _Join(one, other, differences)
    ours, theirs = (np.arange(group.blocks) for group in (one, other))
    return any(len(_joined(join, int(difference), ours, theirs)[0]) for difference in differences)


def cells_meet(one: Cells, other: Cells) -> bool:
    """Whether two results of `Footprint.cells` have a byte in common."""
    for space in one.keys() & other.keys():
        (begins, ends), (starts, stops) = one[space], other[space]
        at = np.searchsorted(stops, begins, side="right")  # the first that ends behind where ours begins
        inside = at < len(starts)
        if bool((starts[at[inside]] < ends[inside]).any()):
            return True
    return False


@dataclass(frozen=True, slots=True, eq=False)
class _Join:
    """Groups whose blocks have unlike strides: block a of one and block b of the other may meet where
    ``difference + b * their_step - a * our_step`` is small.
    """

    ours: _LayerGroup
    theirs: _LayerGroup
    differences: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Overlap:
    """Where two caches share bytes: block a of the first and block a + step of the second, for each of ``steps``; and
    what `pairs` finds for the block ids at hand.
    """

    steps: tuple[int, ...]
    joins: tuple[_Join, ...]

    @property
    def never(self) -> bool:
        """They share no byte, whatever the blocks."""
        return not self.steps and not self.joins

    def pairs(self, ours: Ints, taken: npt.NDArray[Any]) -> tuple[Ints, Ints]:
        """The pairs of blocks that share bytes: of ``ours``, ascending, and of those that are not 0 in ``taken``, which
        has an entry for each block of the other cache.
        """
        found = [(ours[:0], ours[:0])]
        for step in self.steps:
            theirs = ours + step
            inside = (theirs >= 0) & (theirs < len(taken)) if step else theirs < len(taken)
            theirs = theirs[inside]
            hit = taken[theirs] != 0
            if bool(hit.any()):
                found.append((ours[inside][hit], theirs[hit]))
        if self.joins:
            theirs = np.flatnonzero(taken)
            for join in self.joins:
                found += [_joined(join, int(difference), ours, theirs) for difference in join.differences]
        return np.concatenate([one for one, _ in found]), np.concatenate([other for _, other in found])


def meeting(one: Footprint, other: Footprint) -> Overlap:
    """How two caches meet. Raises `TooLarge` when they are so unlike, in the same memory, that it would cost too much
    to find out.
    """
    steps: set[int] = set()
    joins: list[_Join] = []
    for ours in one._groups:
        for theirs in other._groups:
            if ours.space != theirs.space:
                continue
            differences = _row_differences(ours, theirs)
            if ours.step == theirs.step and ours.step:
                steps |= _steps(ours, theirs, differences)
            elif len(differences):
                joins.append(_Join(ours, theirs, differences))
    return Overlap(tuple(sorted(steps)), tuple(joins))


def _row_differences(ours: _LayerGroup, theirs: _LayerGroup) -> Ints:
    """How far rows that may share a byte lie apart (theirs less ours), each value once."""
    if not _near(ours, theirs):
        return np.empty(0, np.int64)
    mine, others = ours.rows(), theirs.rows()
    low = np.searchsorted(others, mine - theirs.row_reach, side="right")
    high = np.searchsorted(others, mine + ours.row_reach, side="left")
    mine_at, others_at = _expanded(low, high)
    return np.unique(others[others_at] - mine[mine_at])


def _expanded(low: Ints, high: Ints) -> tuple[Ints, Ints]:
    """Pairs (i, j) for every j from ``low[i]`` to ``high[i]``."""
    counts = np.maximum(high - low, 0)
    total = int(counts.sum())
    if total > PAIRS_MAX:
        raise TooLarge(
            "two caches in the same memory are too unlike to compare", pairs=total, limit=PAIRS_MAX, hint=_HINT
        )
    ours = np.repeat(np.arange(len(low)), counts)
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    return ours, np.repeat(low, counts) + within


def _steps(ours: _LayerGroup, theirs: _LayerGroup, differences: Ints) -> set[int]:
    """By how many block ids blocks that share a byte are apart."""
    step, found = ours.step, set()
    known: dict[int, bool] = {}
    compare = _Comparing()
    for difference in differences.tolist():
        least = (-theirs.reach - difference) // step + 1
        most = -((difference - ours.reach) // step) - 1
        for apart in range(max(least, 1 - ours.blocks), min(most, theirs.blocks - 1) + 1):
            shift = difference + apart * step
            if shift not in known:
                known[shift] = compare.meet(ours.inner, ours.unit, theirs.inner, theirs.unit, shift)
            if known[shift]:
                found.add(apart)
    return found


def _joined(join: _Join, difference: int, ours: Ints, theirs: Ints) -> tuple[Ints, Ints]:
    one, other = join.ours, join.theirs
    begins, starts = ours * one.step, theirs * other.step + difference
    low = np.searchsorted(starts + other.reach, begins, side="right")
    high = np.searchsorted(starts, begins + one.reach, side="left")
    mine, others = _expanded(low, high)
    if not one.inner and not other.inner:
        return ours[mine], theirs[others]  # blocks without gaps that reach into each other share bytes
    shifts, which = np.unique(starts[others] - begins[mine], return_inverse=True)
    compare = _Comparing()
    meet = [compare.meet(one.inner, one.unit, other.inner, other.unit, shift) for shift in shifts.tolist()]
    kept = np.array(meet, np.bool_)[which.reshape(-1)]
    return ours[mine[kept]], theirs[others[kept]]


class _Comparing:
    """Compares lattices, no more than `COMPARISONS_MAX` times."""

    def __init__(self) -> None:
        self._left = COMPARISONS_MAX

    def meet(self, ours: Sequence[_Axis], unit: int, theirs: Sequence[_Axis], other_unit: int, shift: int) -> bool:
        """Whether pieces of ``unit`` bytes along our axes share a byte with theirs, which begin ``shift`` later."""
        self._left -= 1
        if not self._left:
            raise TooLarge("two caches in the same memory are too unlike to compare", limit=COMPARISONS_MAX, hint=_HINT)
        reach, other_reach = _reach(ours, unit), _reach(theirs, other_unit)
        if shift >= reach or shift + other_reach <= 0:
            return False
        if not ours and not theirs:
            return True
        if ours and theirs and ours[0][0] == theirs[0][0]:
            (stride, extent), (_, other_extent) = ours[0], theirs[0]
            inside, other_inside = _reach(ours[1:], unit), _reach(theirs[1:], other_unit)
            least = max((-other_inside - shift) // stride + 1, 1 - extent)
            most = min(-((shift - inside) // stride) - 1, other_extent - 1)
            return any(
                self.meet(ours[1:], unit, theirs[1:], other_unit, shift + apart * stride)
                for apart in range(least, most + 1)
            )
        if not ours or (theirs and theirs[0][0] > ours[0][0]):
            return self.meet(theirs, other_unit, ours, unit, -shift)
        stride, extent = ours[0]
        inside = _reach(ours[1:], unit)
        least = max((shift - inside) // stride + 1, 0)
        most = min(-(-(shift + other_reach) // stride) - 1, extent - 1)
        return any(
            self.meet(ours[1:], unit, theirs, other_unit, shift - index * stride) for index in range(least, most + 1)
        )

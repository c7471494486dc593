"""Which elements of a request are meant, have arrived, or are missing: boxes of global numbers, and their union.

The idea: an element of a cache has a global name (layer, kv part, kv head, token position), whoever holds it. What a
cache with a block table holds, what a push covers and what an offer wants are each a `Box`: a half-open range along
every axis. `Coverage` keeps what is still missing of one box, layer by layer, as a few smaller boxes. Layers that
received the same in the same order share all of that, so a layer costs one look into a dictionary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvxfer.errors import TooLarge, UsageError
from kvxfer.geometry import HEADS_MAX, KV_PARTS_MAX, LAYERS_MAX, TOKENS_MAX, BlockTable, CacheLayout

AXES = ("layers", "parts", "heads", "tokens")
AXIS_ENDS_MAX = {"layers": LAYERS_MAX, "parts": KV_PARTS_MAX, "heads": HEADS_MAX, "tokens": 2 * TOKENS_MAX}
NUMBERS_PER_BOX = 2 * len(AXES)
FRAGMENTS_MAX = 4096  # of one layer; a request in more pieces than this is refused
STEPS_KEPT_MAX = 4096
SHOWN_MAX = 4

Section = tuple[int, int, int, int, int, int]  # parts, heads and tokens of one layer, each from and to


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Elements by their global numbers, a half-open range (with step 1) along each axis. An empty range: no element."""

    layers: range
    parts: range
    heads: range
    tokens: range

    def __post_init__(self) -> None:
        for name in AXES:
            axis, limit = getattr(self, name), AXIS_ENDS_MAX[name]
            good = isinstance(axis, range) and axis.step == 1 and 0 <= axis.start <= axis.stop <= limit
            if not good:
                rule = f"a range with step 1 from 0 to at most {limit}"
                raise UsageError(f"bad box: {name} must be {rule}", field=name, value=repr(axis)[:80])

    @property
    def elements(self) -> int:
        """How many (layer, part, head, token) there are in it."""
        return math.prod(len(getattr(self, name)) for name in AXES)

    def common(self, other: Box) -> Box:
        """What both contain; along an axis on which they have nothing in common it is empty."""
        return Box(**{name: _common(getattr(self, name), getattr(other, name)) for name in AXES})

    def shared(self, other: Box) -> int:
        """How many elements both contain."""
        found = 1
        for mine, theirs in (
            (self.tokens, other.tokens),
            (self.heads, other.heads),
            (self.layers, other.layers),
            (self.parts, other.parts),
        ):
            stop, start = min(mine.stop, theirs.stop), max(mine.start, theirs.start)
            if stop <= start:
                return 0
            found *= stop - start
        return found

    def meet(self, other: Box) -> Box | None:
        """What both contain; None when that is nothing."""
        return self.common(other) if self.shared(other) else None

    def contains(self, other: Box) -> bool:
        """Every element of the other one is in here."""
        common = self.meet(other)
        return not other.elements or (common is not None and common.elements == other.elements)

    def without(self, other: Box) -> list[Box]:
        """The elements that are not in the other one, as boxes that do not overlap."""
        common = self.meet(other)
        if common is None:
            return [self] if self.elements else []
        rest, left = [], self
        for name in AXES:
            axis, cut = getattr(left, name), getattr(common, name)
            beside = (range(axis.start, cut.start), range(cut.stop, axis.stop))
            rest += [replace(left, **{name: piece}) for piece in beside if piece]
            left = replace(left, **{name: cut})
        return rest

    def to_numbers(self) -> tuple[int, ...]:
        """Eight integers: from and to along layers, parts, heads and tokens."""
        return tuple(end for name in AXES for end in (getattr(self, name).start, getattr(self, name).stop))

    def __str__(self) -> str:
        return _listed(self, AXES)


def boxes_from(numbers: Sequence[int]) -> tuple[Box, ...]:
    """The boxes that `Box.to_numbers` wrote one behind the other; anything malformed is a `UsageError`."""
    if len(numbers) % NUMBERS_PER_BOX:
        raise UsageError("bad boxes: a box is eight numbers", field="boxes", value=len(numbers))
    starts = range(0, len(numbers), NUMBERS_PER_BOX)
    return tuple(_box_from(numbers[start : start + NUMBERS_PER_BOX]) for start in starts)


def _box_from(numbers: Sequence[int]) -> Box:
    ends = iter(numbers)
    return Box(**{name: range(next(ends), next(ends)) for name in AXES})


def numbers_of(boxes: Iterable[Box]) -> tuple[int, ...]:
    """Boxes as the flat list of numbers that `boxes_from` reads."""
    return tuple(number for box in boxes for number in box.to_numbers())


def box_of(layout: CacheLayout, table: BlockTable) -> Box:
    """What a cache holds of a request."""
    shape = layout.geometry
    return Box(
        layers=shape.layer_numbers,
        parts=range(shape.kv_parts),
        heads=shape.head_numbers,
        tokens=range(table.first_token, table.first_token + table.tokens),
    )


def clip(boxes: Iterable[Box], to: Iterable[Box]) -> tuple[Box, ...]:
    """The parts of ``boxes`` that lie in any of ``to``. Neither side may overlap itself; then the result does not."""
    allowed = tuple(to)
    found = (box.meet(limit) for box in boxes for limit in allowed)
    return tuple(box for box in found if box is not None)


def common_elements(boxes: Iterable[Box], others: Iterable[Box]) -> int:
    """How many elements both have in common, where neither side overlaps itself."""
    limits = tuple(others)
    return sum(box.shared(limit) for box in boxes for limit in limits)


def overlap_itself(boxes: Sequence[Box]) -> bool:
    """Whether an element is in two of the boxes."""
    return any(box.shared(other) for index, box in enumerate(boxes) for other in boxes[:index])


class Coverage:
    """Of the box ``want``: what arrived, and what is missing. An empty box is complete from the start."""

    def __init__(self, want: Box) -> None:
        self.want = want
        whole = (_section(want),) if want.elements else ()
        self._first = want.layers.start
        self._missing: list[tuple[Section, ...]] = [whole] * len(want.layers)
        self._steps: dict[tuple[tuple[Section, ...], Section], tuple[Section, ...]] = {}
        self._left = len(want.layers) if want.elements else 0

    @property
    def complete(self) -> bool:
        """True when nothing is missing."""
        return not self._left

    def layer_complete(self, layer: int) -> bool:
        """Nothing of this layer is missing; False for a layer that is not wanted."""
        return layer in self.want.layers and not self._missing[layer - self._first]

    def add(self, box: Box, layer: int | None = None) -> None:
        """This arrived, or only its part in one layer. What is not wanted or is here already does not matter.

        Raises `TooLarge`, and changes nothing of that layer, when what is missing falls into too many pieces.
        """
        section = _section(box)
        if layer is not None:
            if layer in box.layers and layer in self.want.layers:
                self._add(layer - self._first, section)
            return
        for number in _common(box.layers, self.want.layers):
            self._add(number - self._first, section)

    def _add(self, index: int, section: Section) -> None:
        before = self._missing[index]
        if not before:
            return
        step = (before, section)
        after = self._steps.get(step)
        if after is None:
            after = _subtract(before, section)
            if len(self._steps) >= STEPS_KEPT_MAX:
                self._steps.clear()
            self._steps[step] = after
        self._missing[index] = after
        self._left -= not after

    def holds(self, box: Box) -> bool:
        """Whether all of the wanted part of a box has arrived (so also when nothing of it is wanted)."""
        return self._missing_of(box) == 0

    def _missing_of(self, box: Box) -> int:
        section = _section(box)
        layers = _common(box.layers, self.want.layers)
        found = (_meet(piece, section) for number in layers for piece in self._missing[number - self._first])
        return sum(_size(piece) for piece in found if piece)

    def missing(self) -> tuple[Box, ...]:
        """What has not arrived, as few boxes as are found by joining neighbours."""
        found: list[Box] = []
        start = 0
        for stop in range(1, len(self._missing) + 1):
            if stop < len(self._missing) and self._missing[stop] == self._missing[start]:
                continue
            layers = range(self._first + start, self._first + stop)
            found += [_box(piece, layers) for piece in self._missing[start]]
            start = stop
        return tuple(join(found))

    def describe_missing(self) -> str:
        """`missing` in words, such as "heads 1-3, tokens 40-55 of layers 0-7"; an axis that is missing whole is left
        out.
        """
        return describe(self.missing(), self.want)


def describe(boxes: Sequence[Box], within: Box) -> str:
    """Boxes in words; an axis along which a box is as long as ``within`` is left out."""
    texts = [_listed(box, [name for name in AXES if getattr(box, name) != getattr(within, name)]) for box in boxes]
    shown = "; ".join(text or _listed(within, AXES) for text in texts[:SHOWN_MAX])
    return shown + (f"; and {len(texts) - SHOWN_MAX} more" if len(texts) > SHOWN_MAX else "") if texts else "nothing"


def join(boxes: Iterable[Box]) -> list[Box]:
    """The same elements in fewer boxes: neighbours that are equal along all other axes become one."""
    found = list(boxes)
    for name in reversed(AXES):
        others = [axis for axis in AXES if axis != name]
        rows: dict[tuple[range, ...], list[range]] = {}
        for box in found:
            rows.setdefault(tuple(getattr(box, axis) for axis in others), []).append(getattr(box, name))
        found = [
            Box(**{name: run, **dict(zip(others, row, strict=True))})
            for row, axis in rows.items()
            for run in _runs(axis)
        ]
    return sorted(found, key=Box.to_numbers)


def _runs(ranges: Iterable[range]) -> list[range]:
    runs: list[range] = []
    for one in sorted(ranges, key=lambda one: one.start):
        if runs and runs[-1].stop == one.start:
            runs[-1] = range(runs[-1].start, one.stop)
        else:
            runs.append(one)
    return runs


def _listed(box: Box, names: Sequence[str]) -> str:
    """The named axes: first all others, then "of" the layers."""
    inner = ", ".join(_axis(name, getattr(box, name)) for name in AXES[1:] if name in names)
    outer = _axis("layers", box.layers) if "layers" in names else ""
    return " of ".join(text for text in (inner, outer) if text)


def _axis(name: str, numbers: range) -> str:
    if len(numbers) == 1:
        return f"{name[:-1]} {numbers.start}"
    return f"{name} {numbers.start}-{numbers.stop - 1}" if numbers else f"no {name}"


def _common(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


# -- sections: the boxes of one layer ------------------------------------------------------------------------------


def _section(box: Box) -> Section:
    parts, heads, tokens = box.parts, box.heads, box.tokens
    return parts.start, parts.stop, heads.start, heads.stop, tokens.start, tokens.stop


def _box(section: Section, layers: range) -> Box:
    parts, heads, tokens = (range(*section[axis : axis + 2]) for axis in (0, 2, 4))
    return Box(layers=layers, parts=parts, heads=heads, tokens=tokens)


def _size(section: Section) -> int:
    return (section[1] - section[0]) * (section[3] - section[2]) * (section[5] - section[4])


def _meet(one: Section, other: Section) -> Section | None:
    part, head, token = max(one[0], other[0]), max(one[2], other[2]), max(one[4], other[4])
    parts, heads, tokens = min(one[1], other[1]), min(one[3], other[3]), min(one[5], other[5])
    return (part, parts, head, heads, token, tokens) if part < parts and head < heads and token < tokens else None


def _subtract(missing: tuple[Section, ...], arrived: Section) -> tuple[Section, ...]:
    left = _cut(missing, (arrived,))
    if len(left) > FRAGMENTS_MAX:
        raise TooLarge("a request arrives in too many pieces", pieces=len(left), limit=FRAGMENTS_MAX)
    return tuple(left)


def _cut(sections: Iterable[Section], out: Iterable[Section]) -> list[Section]:
    """The sections without those of ``out``."""
    left = list(sections)
    for hole in out:
        rest: list[Section] = []
        for section in left:
            common = _meet(section, hole)
            if common is None:
                rest.append(section)
                continue
            for axis in (0, 2, 4):
                before, after = section[:axis], section[axis + 2 :]
                low, high = section[axis : axis + 2]
                if low < common[axis]:
                    rest.append((*before, low, common[axis], *after))  # type: ignore[arg-type]
                if common[axis + 1] < high:
                    rest.append((*before, common[axis + 1], high, *after))  # type: ignore[arg-type]
                section = (*before, *common[axis : axis + 2], *after)  # type: ignore[assignment]
        left = rest
    return left

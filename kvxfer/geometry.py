"""What the bytes of a KV cache mean: shapes, strides and which block holds which token, as frozen values that travel.

The idea: an element is named by (layer, kv part, token position, global head, dimension), never by where it happens to
lie. `Geometry` and `CacheLayout` say where one side keeps each element, `BlockTable` says which block holds which
position; the planner subtracts one from the other. Only the last axis (D, the elements of one head of one token) has to
be contiguous, so every order of the other axes, and any padding between them, is described by four strides.

Whatever arrives from outside passes through ``from_dict``, which checks types and bounds before it allocates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from kvxfer.errors import GeometryMismatch, OutOfRange, TooLarge, UsageError

LAYERS_MAX = 1024
KV_PARTS_MAX = 8
HEADS_MAX = 1 << 16
HEAD_SIZE_MAX = 1 << 20
BLOCK_TOKENS_MAX = 1 << 20
BLOCK_ID_MAX = (1 << 32) - 1
TABLE_BLOCKS_MAX = 1 << 20
BREAKS_MAX = 2048  # a table whose step changes more often than this goes as bytes
TOKENS_MAX = 1 << 40
REGIONS_MAX = 4096
BYTES_MAX = 1 << 62
TEXT_CHARS_MAX = 512

ITEMSIZES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "float8_e4m3": 1,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip
_DTYPE_RULE = "one of " + ", ".join(ITEMSIZES)
MARKED_MAX = 1 << 22  # block ids below it are sorted by marking them, a byte each

Strides = tuple[int, int, int, int]


def _require(condition: bool, field_name: str, rule: str, value: object) -> None:
    if not condition:
        raise UsageError(f"bad geometry: {field_name} must be {rule}", field=field_name, value=repr(value)[:80])


def _is_int(value: object, least: int, most: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _require_int(name: str, value: object, least: int, most: int) -> int:
    _require(_is_int(value, least, most), name, f"an integer from {least} to {most}", value)
    assert isinstance(value, int)
    return value


def _require_text(name: str, value: object) -> None:
    rule = f"text of at most {TEXT_CHARS_MAX} characters"
    _require(isinstance(value, str) and len(value) <= TEXT_CHARS_MAX, name, rule, value)


def _take(raw: object, what: str, names: Iterable[str]) -> dict[str, Any]:
    """The named entries of a mapping from outside; what is missing is a `UsageError` that names it."""
    _require(isinstance(raw, Mapping), what, "a mapping", raw)
    assert isinstance(raw, Mapping)
    found: dict[str, Any] = {}
    for name in names:
        _require(name in raw, name, f"present in the {what}", None)
        found[name] = raw[name]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The shape of one rank's cache.

    ``layout`` is the order of the axes of one layer, outermost first: P kv part (key, value), B block, N token in the
    block, H head, and D, the elements of a head, always last. "PBNHD" is [2, blocks, tokens, heads, dim]. With one kv
    part (MLA) P may be left out, with one head H too. Default: "PBNHD", or "BNHD" for one part.

    ``kv_heads`` heads from ``head_start`` on, out of ``kv_heads_total`` (default: all), are held here; and ``layers``
    layers from ``first_layer`` on, out of ``layers_total`` (default: all): one stage of a pipeline. ``fingerprint``
    names the model, its revision, quantisation and so on (`fingerprint_of` builds it); two that differ do not match.

    ``packing`` names a private arrangement inside the [tokens, dim] tile of one head in one block, such as transposed
    keys. "" means plain. Packed tiles move whole, and only between sides with the same packing and block size.

    ``head_size`` is in elements of ``dtype``, ``block_tokens`` in tokens. The limits (`LAYERS_MAX` and so on) are ours,
    far above any model.

    Raises: `UsageError` that names the field.
    """

    layers: int
    first_layer: int = 0
    layers_total: int = 0
    kv_parts: int = 2
    kv_heads: int
    kv_heads_total: int = 0
    head_start: int = 0
    head_size: int
    block_tokens: int
    dtype: str
    layout: str = ""
    fingerprint: str = ""
    packing: str = ""

    def __post_init__(self) -> None:
        _require_int("layers", self.layers, 1, LAYERS_MAX)
        if self.layers_total == 0 and self.first_layer == 0:
            object.__setattr__(self, "layers_total", self.layers)
        _require_int("layers_total", self.layers_total, self.layers, LAYERS_MAX)
        _require_int("first_layer", self.first_layer, 0, self.layers_total - self.layers)
        _require_int("kv_parts", self.kv_parts, 1, KV_PARTS_MAX)
        _require_int("kv_heads", self.kv_heads, 1, HEADS_MAX)
        if self.kv_heads_total == 0 and self.head_start == 0:
            object.__setattr__(self, "kv_heads_total", self.kv_heads)
        _require_int("kv_heads_total", self.kv_heads_total, self.kv_heads, HEADS_MAX)
        _require_int("head_start", self.head_start, 0, self.kv_heads_total - self.kv_heads)
        _require_int("head_size", self.head_size, 1, HEAD_SIZE_MAX)
        _require_int("block_tokens", self.block_tokens, 1, BLOCK_TOKENS_MAX)
        _require(isinstance(self.dtype, str) and self.dtype in ITEMSIZES, "dtype", _DTYPE_RULE, self.dtype)
        if self.layout == "":
            object.__setattr__(self, "layout", "PBNHD" if self.kv_parts > 1 else "BNHD")
        self._check_layout()
        _require_text("fingerprint", self.fingerprint)
        _require_text("packing", self.packing)

    def _check_layout(self) -> None:
        needed = {"B", "N", "D"} | ({"P"} if self.kv_parts > 1 else set()) | ({"H"} if self.kv_heads > 1 else set())
        order = self.layout
        good = isinstance(order, str) and len(set(order)) == len(order) and needed <= set(order) <= set("PBNHD")
        rule = f"an order of the axes {''.join(sorted(needed, key='PBNHD'.index))} that ends in D"
        _require(good and order.endswith("D"), "layout", rule, order)

    @property
    def layer_numbers(self) -> range:
        """The layers held here, by their numbers in the whole model."""
        return range(self.first_layer, self.first_layer + self.layers)

    @property
    def head_numbers(self) -> range:
        """The kv heads held here, by their numbers in the whole model."""
        return range(self.head_start, self.head_start + self.kv_heads)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZES[self.dtype]

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one token, one part, one layer: the longest run that every layout keeps together."""
        return self.head_size * self.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in one layer: all parts, the heads held here."""
        return self.kv_parts * self.kv_heads * self.head_bytes

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in one layer."""
        return self.bytes_per_token * self.block_tokens

    def extents(self, blocks: int) -> Strides:
        """How long the axes P, B, N and H are."""
        return self.kv_parts, blocks, self.block_tokens, self.kv_heads

    def dense_strides(self, blocks: int, *, parts: int | None = None) -> Strides:
        """Bytes between neighbours along P, B, N and H when the blocks of a layer lie in one piece without padding;
        ``parts``: how many kv parts lie together (None: all).
        """
        lengths = dict(zip("PBNH", self.extents(blocks), strict=True))
        lengths["P"] = self.kv_parts if parts is None else parts
        strides, step = dict.fromkeys("PBNH", 0), self.head_bytes
        for axis in reversed(self.layout[:-1]):
            strides[axis] = step
            step *= lengths[axis]
        return strides["P"], strides["B"], strides["N"], strides["H"]

    def to_dict(self) -> dict[str, Any]:
        """A dict of strings and numbers: survives JSON and msgpack."""
        return {name: getattr(self, name) for name in _GEOMETRY_FIELDS}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Geometry:
        """Rebuild a geometry from what `to_dict` gave. Raises: `UsageError` that names the field."""
        return cls(**_take(raw, "geometry", _GEOMETRY_FIELDS))


_GEOMETRY_FIELDS = (
    "layers", "first_layer", "layers_total", "kv_parts", "kv_heads", "kv_heads_total", "head_start", "head_size",
    "block_tokens", "dtype", "layout", "fingerprint", "packing",
)  # fmt: skip


def fingerprint_of(**parts: str) -> str:
    """A fingerprint of several named parts (model, revision, quantisation, rope, ...): "model=a;revision=b".

    When two such fingerprints differ, the error names the part. Raises: `UsageError` for a value with ";" or "=" in it.
    """
    for name, value in parts.items():
        _require(isinstance(value, str) and ";" not in value and "=" not in value, name, "text without ; and =", value)
    return ";".join(f"{name}={parts[name]}" for name in sorted(parts))


def check_compatible(source: Geometry, target: Geometry, *, ignore_fingerprint: bool = False) -> None:
    """Check that one cache can be mapped onto the other: caches of one model, with a layer and a head in common.

    Raises: `GeometryMismatch`, which names the field and both values; see `check_same_model`.
    """
    check_same_model(source, target, ignore_fingerprint=ignore_fingerprint)
    held = (
        ("layers", "layer", source.layer_numbers, target.layer_numbers),
        ("heads", "kv head", source.head_numbers, target.head_numbers),
    )
    for name, what, ours, theirs in held:
        if min(ours.stop, theirs.stop) <= max(ours.start, theirs.start):
            _raise_mismatch(name, _range_text(ours), _range_text(theirs), f"these two ranks have no {what} in common")


def check_same_model(source: Geometry, target: Geometry, *, ignore_fingerprint: bool = False) -> None:
    """Check that both are parts of the same cache.

    Block size, layout, strides and the layers and heads held may differ. Fingerprints must be equal where both sides
    have one; ``ignore_fingerprint`` is the operator's explicit way past that.

    Raises: `GeometryMismatch`, which names the field and both values.
    """
    for name in ("layers_total", "kv_parts", "kv_heads_total", "head_size", "dtype", "packing"):
        _require_equal(name, getattr(source, name), getattr(target, name))
    if source.packing:
        _require_equal("block_tokens", source.block_tokens, target.block_tokens)
    if source.fingerprint and target.fingerprint and not ignore_fingerprint:
        for name, one, other in _fingerprint_parts(source.fingerprint, target.fingerprint):
            _require_equal(name, one, other)


def fingerprint_conflict(source: Geometry, target: Geometry) -> str:
    """The first part in which two fingerprints differ, with both values; empty when none does or a side has none."""
    if source.fingerprint and target.fingerprint:
        for name, one, other in _fingerprint_parts(source.fingerprint, target.fingerprint):
            if one != other:
                return f"{name}: the source has {one!r}, the target {other!r}"
    return ""


def _fingerprint_parts(source: str, target: str) -> list[tuple[str, str, str]]:
    halves = [dict(item.split("=", 1) for item in text.split(";") if "=" in item) for text in (source, target)]
    names = sorted({*halves[0], *halves[1]})
    named = [(f"fingerprint.{name}", halves[0].get(name, ""), halves[1].get(name, "")) for name in names]
    return [*named, ("fingerprint", source, target)]


def _range_text(numbers: range) -> str:
    return f"{numbers.start}..{numbers.stop - 1}"


def _require_equal(name: str, source: int | str, target: int | str) -> None:
    if source != target:
        _raise_mismatch(name, source, target, f"{name} differs")


def _raise_mismatch(name: str, source: int | str, target: int | str, what: str) -> None:
    shown = [repr(value)[:TEXT_CHARS_MAX] for value in (source, target)]
    raise GeometryMismatch(
        f"{what}: the source has {shown[0]}, the target {shown[1]}; nothing was moved",
        field=name,
        source=source,
        target=target,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlacement:
    """Where one layer lies: ``offset`` bytes into the region with index ``region`` of the list that travels along.

    ``strides``: bytes between neighbours along P, B, N and H, for storage that is padded or interleaved with other
    layers; None means dense, as `Geometry.dense_strides`. The stride of an axis of length one does not matter.

    A layer whose kv parts lie in memory of their own has a tuple of these, one for each part in the order of the parts:
    then the stride along P does not matter, and dense means that the part lies in one piece.
    """

    region: int = 0
    offset: int
    strides: Strides | None = None

    def __post_init__(self) -> None:
        _require_int("placement.region", self.region, 0, REGIONS_MAX - 1)
        _require_int("placement.offset", self.offset, 0, BYTES_MAX)
        if self.strides is not None:
            good = isinstance(self.strides, tuple) and len(self.strides) == 4
            _require(good, "placement.strides", "None or a tuple of four integers", self.strides)
            for stride in self.strides:
                _require_int("placement.strides", stride, 0, BYTES_MAX)


Placement = LayerPlacement | tuple[LayerPlacement, ...]


@dataclass(frozen=True, slots=True)
class PlacedParts:
    """Kv parts of a layer that one placement describes: ``offset`` is where the first of ``parts`` begins in its
    region, and ``strides`` are written out.
    """

    region: int
    offset: int
    strides: Strides
    parts: range


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """Where every layer of a cache lies; ``blocks`` is how many blocks each layer has.

    A placement is a `LayerPlacement`, or a tuple with one for each kv part where keys and values are allocations of
    their own.
    """

    geometry: Geometry
    blocks: int
    placements: tuple[Placement, ...]
    _placed: tuple[tuple[PlacedParts, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _require(isinstance(self.geometry, Geometry), "geometry", "a Geometry", self.geometry)
        _require_int("blocks", self.blocks, 1, BLOCK_ID_MAX + 1)
        rule = f"a tuple with one placement for each of the {self.geometry.layers} layers"
        good = isinstance(self.placements, tuple) and len(self.placements) == self.geometry.layers
        _require(good, "placements", rule, self.placements)
        object.__setattr__(self, "_placed", tuple(map(self._place, self.placements)))
        checked: set[tuple[Strides, int]] = set()
        for layer, placed in enumerate(self._placed):
            for one in placed:
                if (one.strides, len(one.parts)) not in checked:
                    self._check_strides(one)
                    checked.add((one.strides, len(one.parts)))
                if self._end(one) > BYTES_MAX:
                    raise TooLarge(
                        "bad geometry: a layer ends beyond the maximum",
                        field="placements",
                        layer=layer,
                        limit=BYTES_MAX,
                    )
        places = [(one.region, one.offset) for placed in self._placed for one in placed]
        rule = "different for each layer, and for each part that has its own"
        _require(len(set(places)) == len(places), "placements", rule, "a repeated place")

    def _place(self, placement: object) -> tuple[PlacedParts, ...]:
        parts = self.geometry.kv_parts
        if isinstance(placement, LayerPlacement):
            strides = self.geometry.dense_strides(self.blocks) if placement.strides is None else placement.strides
            return (PlacedParts(placement.region, placement.offset, strides, range(parts)),)
        given = placement if isinstance(placement, tuple) else ()
        good = len(given) == parts and all(isinstance(one, LayerPlacement) for one in given)
        rule = f"LayerPlacement values, or tuples of {parts}, one for each kv part"
        _require(good, "placements", rule, placement)
        dense = self.geometry.dense_strides(self.blocks, parts=1)
        return tuple(
            PlacedParts(one.region, one.offset, dense if one.strides is None else one.strides, range(part, part + 1))
            for part, one in enumerate(given)
        )

    def _check_strides(self, placed: PlacedParts) -> None:
        """No two elements of a layer share a byte: each stride reaches over everything that lies inside it."""
        strides = placed.strides
        axes = [(stride, extent) for stride, extent in zip(strides, self._extents(placed), strict=True) if extent > 1]
        inside = self.geometry.head_bytes
        for stride, extent in sorted(axes):
            _require(stride >= inside, "placement.strides", "large enough that no two elements overlap", strides)
            inside += (extent - 1) * stride
        if self.geometry.packing:
            good = self.geometry.block_tokens == 1 or strides[2] == self.geometry.head_bytes
            _require(good, "placement.strides", "dense inside the tile of a head when there is a packing", strides)

    def _extents(self, placed: PlacedParts) -> Strides:
        return len(placed.parts), *self.geometry.extents(self.blocks)[1:]

    def _end(self, placed: PlacedParts) -> int:
        reach = sum((extent - 1) * stride for extent, stride in zip(self._extents(placed), placed.strides, strict=True))
        return placed.offset + reach + self.geometry.head_bytes

    def placed(self, layer: int) -> tuple[PlacedParts, ...]:
        """Where the parts of a layer (its index in this cache) lie, in their order: one entry, or one for each part."""
        return self._placed[layer]

    def strides(self, layer: int) -> Strides:
        """Bytes between neighbours along P, B, N and H of a layer, written out.

        Raises: `UsageError` for a layer whose parts have places of their own (see `placed`).
        """
        return self._whole(layer).strides

    def layer_end(self, layer: int) -> int:
        """The offset, in bytes, in its region just behind the last byte of a layer. Raises: what `strides` raises."""
        return self._end(self._whole(layer))

    def _whole(self, layer: int) -> PlacedParts:
        placed = self._placed[layer]
        if len(placed) > 1:
            raise UsageError("the parts of this layer have places of their own", field="placements", layer=layer)
        return placed[0]

    def region_bytes(self) -> dict[int, int]:
        """How long each region that the placements name must at least be: index of the region to bytes."""
        needed: dict[int, int] = {}
        for one in chain.from_iterable(self._placed):
            needed[one.region] = max(needed.get(one.region, 0), self._end(one))
        return needed

    def to_dict(self) -> dict[str, Any]:
        """A dict of strings, numbers and lists: survives JSON and msgpack. Placements are [region, offset, strides], or
        a list of such, one for each kv part.
        """
        rows = [
            [_row(part) for part in placement] if isinstance(placement, tuple) else _row(placement)
            for placement in self.placements
        ]
        return {"geometry": self.geometry.to_dict(), "blocks": self.blocks, "placements": rows}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> CacheLayout:
        """Rebuild a layout from what `to_dict` gave. Raises: `UsageError` that names the field."""
        found = _take(raw, "cache layout", ("geometry", "blocks", "placements"))
        rows = found["placements"]
        good = isinstance(rows, list | tuple) and len(rows) <= LAYERS_MAX
        _require(good, "placements", f"a list of at most {LAYERS_MAX} placements", type(rows))
        return cls(
            geometry=Geometry.from_dict(found["geometry"]),
            blocks=found["blocks"],
            placements=tuple(map(_placement, rows)),
        )


def _row(placement: LayerPlacement) -> list[Any]:
    return [placement.region, placement.offset, None if placement.strides is None else list(placement.strides)]


def _placement(row: object) -> Placement:
    if isinstance(row, list | tuple) and row and all(isinstance(part, list | tuple) for part in row):
        _require(len(row) <= KV_PARTS_MAX, "placements", f"at most {KV_PARTS_MAX} parts", len(row))
        return tuple(map(_placement_of_one, row))
    return _placement_of_one(row)


def _placement_of_one(row: object) -> LayerPlacement:
    _require(isinstance(row, list | tuple) and len(row) == 3, "placements", "lists of [region, offset, strides]", row)
    assert isinstance(row, list | tuple)
    region, offset, strides = row
    return LayerPlacement(
        region=region, offset=offset, strides=tuple(strides) if isinstance(strides, list) else strides
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockTable:
    """Which blocks hold a request: position ``first_token + i`` lies in slot ``(first_slot + i) % block_tokens`` of
    block ``blocks[(first_slot + i) // block_tokens]``, for the first ``tokens`` values of i.

    ``blocks`` is kept as a read-only int64 array of shape (n,); any sequence of integers is taken (`of` says so to type
    checkers). ``first_token`` > 0 leaves a prefix out that is already there, or begins a chunk or a shard.

    ``first_slot`` is the slot of the first token in the first block. It may be left out where the first token begins a
    block (``first_token % block_tokens == 0``): then it is 0. Else both 0 (blocks that were filled from this token on)
    and ``first_token % block_tokens`` (blocks of the whole request) make sense, and `slot` refuses to guess.
    """

    blocks: npt.NDArray[np.int64]
    tokens: int
    first_token: int = 0
    first_slot: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", _as_block_ids(self.blocks))
        _require_int("tokens", self.tokens, 0, TOKENS_MAX)
        _require_int("first_token", self.first_token, 0, TOKENS_MAX)
        if self.first_slot is not None:
            _require_int("first_slot", self.first_slot, 0, BLOCK_TOKENS_MAX - 1)

    @classmethod
    def of(
        cls, blocks: Iterable[int], tokens: int, first_token: int = 0, *, first_slot: int | None = None
    ) -> BlockTable:
        """A table from any iterable of block ids.

        Raises: `UsageError` for ids or numbers that are none, `TooLarge` for too many blocks.
        """
        ids = blocks if isinstance(blocks, np.ndarray) else np.asarray(list(blocks) or np.empty(0, np.int64))
        return cls(blocks=ids, tokens=tokens, first_token=first_token, first_slot=first_slot)

    def slot(self, block_tokens: int, name: str = "table") -> int:
        """The slot of the first token in the first block, for blocks of so many tokens.

        Raises: `UsageError` when it was not given and the first token does not begin a block, `OutOfRange` when it was
        given and blocks do not have it.
        """
        if not self.tokens:
            return 0
        by_position = self.first_token % block_tokens
        if self.first_slot is None and by_position:
            raise UsageError(
                f"the {name} begins inside a block, and does not say in which slot",
                field="first_slot",
                first_token=self.first_token,
                block_tokens=block_tokens,
                hint=f"first_slot={by_position} if the blocks are those of the whole request, first_slot=0 if "
                "the first one was filled from this token on",
            )
        found = self.first_slot or 0
        if found >= block_tokens:
            raise OutOfRange(
                f"the {name} begins in a slot that its blocks do not have",
                field="first_slot",
                value=found,
                limit=block_tokens - 1,
            )
        return found

    def used(self, block_tokens: int, blocks: int, name: str = "table") -> npt.NDArray[np.int64]:
        """The blocks that hold tokens, in the order of the tokens, for a cache of so many blocks of so many tokens.

        Shape (n,), int64, a view. ``name`` is what errors call the table.

        Raises: `OutOfRange` for more tokens than the blocks hold and for a block that the cache does not have, and what
        `slot` raises.
        """
        field, slot = name.replace(" ", "_"), self.slot(block_tokens, name)
        limit = len(self.blocks) * block_tokens - slot
        if self.tokens > max(limit, 0):
            raise OutOfRange(
                f"the {name} names more tokens than its blocks hold",
                field=f"{field}.tokens",
                value=self.tokens,
                limit=max(limit, 0),
            )
        if len(self.blocks) and int(self.blocks.max()) >= blocks:
            raise OutOfRange(
                f"the {name} names a block that its cache does not have",
                field=f"{field}.blocks",
                value=int(self.blocks.max()),
                limit=blocks - 1,
            )
        return self.blocks[: -(-(slot + self.tokens) // block_tokens)]

    def distinct(self, count: int | None = None) -> npt.NDArray[np.int64]:
        """The first ``count`` blocks (None: all), ascending and each once."""
        return _distinct(self.blocks[:count])

    def divided(self, block_tokens: int, blocks: int) -> tuple[npt.NDArray[np.int64], tuple[tuple[int, range], ...]]:
        """The blocks of which every slot has a token, ascending and each once; and those of which only some slots have:
        (block, slots), at most the first and the last. Raises: what `used` raises.
        """
        used, start = self.used(block_tokens, blocks), self.slot(block_tokens)
        stop, edges = start + self.tokens, []
        for index in dict.fromkeys((0, len(used) - 1)) if len(used) else ():
            slots = range(max(start - index * block_tokens, 0), min(stop - index * block_tokens, block_tokens))
            if len(slots) < block_tokens:
                edges.append((index, slots))
        whole = np.delete(used, [index for index, _ in edges]) if edges else used
        return _distinct(whole), tuple((int(used[index]), slots) for index, slots in edges)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockTable):
            return NotImplemented
        return self._numbers() == other._numbers() and np.array_equal(self.blocks, other.blocks)

    def __hash__(self) -> int:
        return hash((*self._numbers(), self.blocks.tobytes()))

    def _numbers(self) -> tuple[int, int, int | None]:
        return self.tokens, self.first_token, self.first_slot

    def to_dict(self) -> dict[str, Any]:
        """A dict of numbers and lists: survives JSON and msgpack. Blocks become runs [start, step, count]."""
        return {"runs": _runs(self.blocks), **self._fields()}

    def to_wire(self) -> dict[str, Any]:
        """`to_dict` for msgpack: many blocks without any order become bytes, 4 for each, little-endian."""
        if np.count_nonzero(np.diff(self.blocks, 2)) <= BREAKS_MAX:
            return self.to_dict()
        return {"ids": self.blocks.astype("<u4").tobytes(), **self._fields()}

    def _fields(self) -> dict[str, int | None]:
        return {"tokens": self.tokens, "first_token": self.first_token, "first_slot": self.first_slot}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> BlockTable:
        """Rebuild a table from what `to_dict` or `to_wire` gave.

        Raises: `UsageError` that names the field, `TooLarge` for too many blocks.
        """
        how = "ids" if isinstance(raw, Mapping) and "ids" in raw else "runs"
        found = _take(raw, "block table", (how, "tokens", "first_token"))
        blocks = _from_ids(found["ids"]) if how == "ids" else _from_runs(found["runs"])
        slot = raw.get("first_slot")  # None, or not there at all: by the position, if that is clear
        return cls(blocks=blocks, tokens=found["tokens"], first_token=found["first_token"], first_slot=slot)


def _distinct(blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    if not len(blocks) or int(blocks.max()) >= MARKED_MAX:
        return np.unique(blocks)
    marks = np.zeros(int(blocks.max()) + 1, np.bool_)  # a hundred times quicker than sorting
    marks[blocks] = True
    return np.flatnonzero(marks)


def _as_block_ids(given: object) -> npt.NDArray[np.int64]:
    if isinstance(given, Sequence) and not given:
        given = np.empty(0, np.int64)
    try:
        array = np.asarray(given)
    except (ValueError, OverflowError, TypeError) as wrong:
        raise UsageError(f"bad block table: {wrong}", field="blocks") from wrong
    _require(array.ndim == 1 and array.dtype.kind in "iu", "blocks", "a flat sequence of integers", given)
    if len(array) > TABLE_BLOCKS_MAX:
        raise TooLarge("bad block table: too many blocks", field="blocks", value=len(array), limit=TABLE_BLOCKS_MAX)
    if len(array):
        for edge in (int(array.min()), int(array.max())):
            _require_int("blocks", edge, 0, BLOCK_ID_MAX)
    ids = array.astype(np.int64, copy=True)
    ids.flags.writeable = False
    return ids


def _runs(blocks: npt.NDArray[np.int64]) -> list[list[int]]:
    """Arithmetic runs, taken greedily: any two neighbours make a run, so only the last one can hold a single block."""
    steps = np.diff(blocks)
    # Where the step changes, a run that began earlier cannot go on.
    breaks = [*(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)] if len(steps) else []
    ids, runs, start = blocks.tolist(), [], 0
    for stop in breaks:
        if stop > start:
            runs.append([ids[start], ids[start + 1] - ids[start], stop - start + 1])
            start = stop + 1
    if start < len(ids):
        runs.append([ids[start], 1, 1])
    return runs


def _from_ids(ids: object) -> npt.NDArray[np.int64]:
    _require(isinstance(ids, bytes) and len(ids) % 4 == 0, "ids", "bytes, 4 for each block", type(ids))
    assert isinstance(ids, bytes)
    return np.frombuffer(ids, "<u4").astype(np.int64)


def _from_runs(runs: object) -> npt.NDArray[np.int64]:
    _require(isinstance(runs, list | tuple), "runs", "a list of [start, step, count]", type(runs))
    assert isinstance(runs, list | tuple)
    if len(runs) > TABLE_BLOCKS_MAX:
        raise TooLarge("bad block table: too many runs", field="runs", value=len(runs), limit=TABLE_BLOCKS_MAX)
    good = all(type(run) in (list, tuple) and len(run) == 3 for run in runs)
    _require(good, "runs", "a list of [start, step, count]", "something else in the list")
    flat = list(chain.from_iterable(runs))
    _require(set(map(type, flat)) <= {int}, "runs", "integers", "something else in a run")
    if not flat:
        return np.empty(0, np.int64)
    _require(min(flat) >= -BLOCK_ID_MAX and max(flat) <= BLOCK_ID_MAX, "runs", "numbers below 2^32", "a larger number")
    start, step, count = np.array(flat, np.int64).reshape(-1, 3).T
    total = int(count.sum())
    _require(int(count.min()) >= 1, "runs", "runs of at least one block", int(count.min()))
    if total > TABLE_BLOCKS_MAX:
        raise TooLarge("bad block table: too many blocks", field="runs", value=total, limit=TABLE_BLOCKS_MAX)
    index = np.arange(total, dtype=np.int64) - np.repeat(np.cumsum(count) - count, count)
    return np.repeat(start, count) + np.repeat(step, count) * index

"""From the tensors of an engine, as numbers, to cache layouts: shapes and strides in, `CacheLayout` out.

The idea: an engine hands over tensors by layer, and says what their axes are (`axes`); where an element lies is in the
strides. Tensors of one shape in one group of layers become one cache, those of another shape or dtype (the second half
of an MLA cache, an index, scales) another one. What cannot be known is refused with an error that names the tensor:
a guess that is wrong moves bytes to where they mean something else, and nothing notices.

No framework is imported here: `kvxfer.integrations.torch` reads torch tensors, `caches_from_json` reads a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvxfer.errors import KvxferError, OutOfRange, OverlapError, UsageError
from kvxfer.geometry import (
    BLOCK_TOKENS_MAX,
    HEADS_MAX,
    ITEMSIZES,
    KV_PARTS_MAX,
    LAYERS_MAX,
    BlockTable,
    CacheLayout,
    Geometry,
    LayerPlacement,
    Placement,
    Strides,
)
from kvxfer.memory.footprint import Footprint
from kvxfer.memory.region import KVCache, Region

AXES_RULE = (
    "letters, one for each axis: P kv part, B block, N token in the block, T token of the pool (blocks and tokens in "
    "one axis), H head, D elements of a head, C keys and values of a head behind each other"
)
TENSORS_MAX = 8  # of one layer


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorView:
    """One tensor: it begins ``offset`` bytes into the allocation number ``storage``; ``strides`` are in elements, as
    torch has them. ``dtype`` is a name of `kvxfer.geometry.ITEMSIZES`.
    """

    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that one list of block ids is for, and how their tensors are to be read.

    ``axes`` is a word of the letters of `AXES_RULE`, or one word for each tensor of a layer. ``kv_parts`` says how many
    parts a C axis holds. ``packing`` names an arrangement inside the [tokens, dim] tile of a head; with a C axis the
    tiles of the parts then lie behind each other. ``block_tokens`` is how many tokens a block id of the engine stands
    for: needed for a T axis, else None means what the tensors say; a multiple of that is a page of several blocks.

    ``tp_rank`` of ``tp_size`` ranks hold ``kv_heads_total`` heads together (0: what is here, times the ranks);
    ``first_layer`` and ``layers_total`` are of a pipeline stage and count layers of this group.
    """

    names: tuple[str, ...]
    axes: str | tuple[str, ...]
    kv_parts: int = 2
    packing: str = ""
    block_tokens: int | None = None
    tp_rank: int = 0
    tp_size: int = 1
    kv_heads_total: int = 0
    first_layer: int = 0
    layers_total: int = 0
    fingerprint: str = ""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("kv_parts", 1, KV_PARTS_MAX),
            ("block_tokens", 1, BLOCK_TOKENS_MAX),
            ("tp_size", 1, HEADS_MAX),
            ("kv_heads_total", 0, HEADS_MAX),
            ("first_layer", 0, LAYERS_MAX),
            ("layers_total", 0, LAYERS_MAX),
        ):
            value = getattr(self, name)
            if value is None and name == "block_tokens":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise UsageError(
                    f"{name} must be an integer from {least} to {most}", field=name, value=repr(value)[:40]
                )
        if len(set(self.names)) != len(self.names):
            raise UsageError("a group names a layer twice", field="names")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCache:
    """Tensors of one shape in one group of layers. ``name`` tells it from the others, the same on every rank:
    "<group>.<index>". ``layers`` are the layers' names, in the order of the layout;
    ``shared_by`` says which other layers use the tensors of which of them. ``blocks_per_page`` blocks of the layout are
    one block id of the engine.
    """

    name: str
    group: int
    layers: tuple[str, ...]
    shared_by: Mapping[str, str]
    layout: CacheLayout
    blocks_per_page: int = 1

    def table(
        self, pages: Iterable[int], tokens: int, first_token: int = 0, *, first_slot: int | None = None
    ) -> BlockTable:
        """A block table from the engine's block ids; ``first_slot`` counts tokens from the begin of the first of them.

        Raises what `BlockTable` and `BlockTable.slot` raise.
        """
        ratio, size = self.blocks_per_page, self.layout.geometry.block_tokens
        table = BlockTable.of(pages, tokens, first_token, first_slot=first_slot)
        if ratio == 1:
            return table
        skipped, slot = divmod(table.slot(ratio * size), size)
        blocks = np.add.outer(table.blocks * ratio, np.arange(ratio)).reshape(-1)
        return BlockTable.of(blocks[skipped:], tokens, first_token, first_slot=slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCaches:
    """The caches of an engine, in the order of its groups. Region i of every layout is ``storages[i]``: what is to be
    registered (`Client.register_many`), or where the tensors were moved to.
    """

    caches: tuple[TensorCache, ...]
    storages: tuple[Any, ...] = field(repr=False)

    def bind(self, regions: Sequence[Region]) -> tuple[KVCache, ...]:
        """A `KVCache` for each of the caches. Raises what `KVCache` raises, and `UsageError` unless there is a region
        for each storage.
        """
        if len(regions) != len(self.storages):
            raise UsageError(
                "a region for each storage is needed", field="regions", value=len(regions), needed=len(self.storages)
            )
        return tuple(KVCache(found.layout, regions) for found in self.caches)

    @property
    def signature(self) -> str:
        """What must be equal on both sides of a transfer, as JSON: the same for every rank and stage of an engine, and
        for every block size unless tiles are packed. Engines whose signatures differ cannot exchange caches.
        """
        return json.dumps([signature_of(found.layout.geometry) for found in self.caches], sort_keys=True)


def signature_of(geometry: Geometry) -> dict[str, Any]:
    """The fields that `kvxfer.geometry.check_same_model` compares."""
    names = ["layers_total", "kv_parts", "kv_heads_total", "head_size", "dtype", "packing", "fingerprint"]
    return {name: getattr(geometry, name) for name in [*names, *(["block_tokens"] if geometry.packing else [])]}


@dataclass(frozen=True, slots=True)
class _ReadTensor:
    """A tensor by the axes of a cache; strides in bytes. ``key``: what tensors of one cache have in common."""

    key: tuple[int, int, int, int, int, str, int]  # blocks, tokens, heads, head size, parts, dtype, blocks per page
    storage: int
    offset: int
    strides: Strides


Layers = Mapping[str, tuple[TensorView, ...]]


def caches_of(layers: Layers, groups: Sequence[LayerGroup], storage_bytes: Sequence[int]) -> tuple[TensorCache, ...]:
    """The caches of these groups; ``storage_bytes`` says how long each allocation is.

    Tensors that several layers share belong to the first. Raises `UsageError` with the layer's name (``layer``) and
    what was wrong for what cannot be described: an axis that is missing or of no length, negative strides, elements of
    a head that do not lie together, dtypes without a name, and so on; `OverlapError` for layers of one group that share
    bytes without being the same; `OutOfRange` for a tensor that leaves its allocation.
    """
    found: list[TensorCache] = []
    for index, group in enumerate(groups):
        found += _caches_of_group(layers, index, group)
    for cache in found:
        for region, needed in cache.layout.region_bytes().items():
            if region >= len(storage_bytes) or storage_bytes[region] < needed:
                raise OutOfRange("a tensor leaves its allocation", layer=cache.layers[0], storage=region, needed=needed)
        places = [(region, 0) for region in range(len(storage_bytes))]
        try:
            Footprint(cache.layout, places).require_apart()
        except OverlapError as wrong:
            raise OverlapError(
                "layers of one group share bytes", group=cache.group, layers=" ".join(cache.layers[:8]), hint=wrong.hint
            ) from wrong
    return tuple(found)


def _caches_of_group(layers: Layers, index: int, group: LayerGroup) -> list[TensorCache]:
    first: dict[tuple[TensorView, ...], str] = {}
    shared: dict[str, str] = {}
    alike: dict[tuple[Any, ...], dict[str, list[_ReadTensor]]] = {}
    for name in group.names:
        if name not in layers:
            raise UsageError("a layer of the group has no tensor", layer=name, group=index)
        if name in shared or first.setdefault(layers[name], name) != name:
            shared[name] = first[layers[name]]
            continue
        by_key: dict[tuple[Any, ...], list[_ReadTensor]] = {}
        for read in _read_layer(name, layers[name], group):
            by_key.setdefault(read.key, []).append(read)
        for key, some in by_key.items():
            alike.setdefault((key, len(some)), {})[name] = some
    if len({tuple(of) for of in alike.values()}) > 1 and (group.first_layer or group.layers_total):
        raise UsageError(
            "layers of a pipeline stage have unlike shapes: which number each has is not known",
            field="first_layer",
            group=index,
            hint="give the layers of each shape as a group of their own",
        )
    return [_cache(f"{index}.{number}", index, group, members, shared) for number, members in enumerate(alike.values())]


def _cache(
    name: str, index: int, group: LayerGroup, members: Mapping[str, list[_ReadTensor]], shared: Mapping[str, str]
) -> TensorCache:
    one = next(iter(members.values()))
    blocks, tokens, heads, head_size, inner_parts, dtype, per_page = one[0].key
    parts = inner_parts if len(one) == 1 else len(one)
    try:
        total, start = _heads(group, heads)
        geometry = Geometry(
            layers=len(members),
            first_layer=group.first_layer,
            layers_total=group.layers_total or len(members),
            kv_parts=parts,
            kv_heads=heads,
            kv_heads_total=total,
            head_start=start,
            head_size=head_size,
            block_tokens=tokens,
            dtype=dtype,
            layout=_order(one[0], parts),
            fingerprint=group.fingerprint,
            packing=group.packing,
        )
        placements = tuple(_placement(geometry, blocks, tensors) for tensors in members.values())
        layout = CacheLayout(geometry=geometry, blocks=blocks, placements=placements)
    except KvxferError as wrong:
        wrong.fields.setdefault("layer", next(iter(members)))
        raise
    return TensorCache(
        name=name,
        group=index,
        layers=tuple(members),
        shared_by={other: of for other, of in shared.items() if of in members},
        layout=layout,
        blocks_per_page=per_page,
    )


def _heads(group: LayerGroup, held: int) -> tuple[int, int]:
    """How many heads all ranks have, and the first of this one's; ranks beyond the heads hold copies."""
    total = group.kv_heads_total or held * group.tp_size
    if not 0 <= group.tp_rank < group.tp_size or held != max(1, total // group.tp_size):
        raise UsageError(
            "the heads held here are not this rank's share",
            field="kv_heads_total",
            value=total,
            held=held,
            ranks=group.tp_size,
            rank=group.tp_rank,
        )
    return total, group.tp_rank * total // group.tp_size


def _order(read: _ReadTensor, parts: int) -> str:
    """The axes, outermost first, as far as the strides say; it is a name: the placements have the strides."""
    extents = _extents(read, parts)
    return "".join(sorted("PBNH", key=lambda axis: (extents[axis] > 1, -read.strides["PBNH".index(axis)]))) + "D"


def _extents(read: _ReadTensor, parts: int) -> dict[str, int]:
    blocks, tokens, heads = read.key[:3]
    return {"P": parts, "B": blocks, "N": tokens, "H": heads}


def _placement(geometry: Geometry, blocks: int, tensors: Sequence[_ReadTensor]) -> Placement:
    parts = 1 if len(tensors) > 1 else geometry.kv_parts
    dense = geometry.dense_strides(blocks, parts=parts)
    lengths = (parts, *geometry.extents(blocks)[1:])
    made = []
    for tensor in tensors:
        steps = zip(tensor.strides, dense, lengths, strict=True)
        same = all(mine == theirs or length == 1 for mine, theirs, length in steps)
        strides = None if same else tensor.strides
        made.append(LayerPlacement(region=tensor.storage, offset=tensor.offset, strides=strides))
    return made[0] if len(made) == 1 else tuple(made)


# -- one tensor -------------------------------------------------------------------------------------------------------


def _read_layer(name: str, tensors: tuple[TensorView, ...], group: LayerGroup) -> list[_ReadTensor]:
    if not 1 <= len(tensors) <= TENSORS_MAX:
        raise UsageError(f"a layer is 1 to {TENSORS_MAX} tensors", layer=name, value=len(tensors))
    words = group.axes if isinstance(group.axes, tuple) else (group.axes,) * len(tensors)
    if len(words) != len(tensors):
        raise UsageError(
            "axes has a word for each tensor of a layer", layer=name, tensors=len(tensors), axes=len(words)
        )
    found = []
    for index, (view, axes) in enumerate(zip(tensors, words, strict=True)):
        read = _read(f"{name}[{index}]" if len(tensors) > 1 else name, view, axes, group)
        if len(tensors) > 1 and read.key[4] > 1:
            raise UsageError("tensors of a tuple have no P or C axis", layer=name, axes=axes)
        found.append(read)
    return found


def _read(name: str, view: TensorView, axes: str, group: LayerGroup) -> _ReadTensor:
    extents, steps = _named(name, view, axes)
    size = ITEMSIZES[view.dtype]
    parts, head_size = extents.get("P", 1), extents.get("D", 1)
    if "C" in axes:
        parts = group.kv_parts
        head_size, rest = divmod(extents["C"], parts)
        if rest:
            raise UsageError(f"the C axis does not hold {parts} parts of one length", layer=name, value=extents["C"])
        steps["P"] = head_size
    tokens = extents.get("N", 1)
    if "T" in axes:
        if not group.block_tokens or extents["T"] % group.block_tokens:
            raise UsageError(
                "a pool of tokens (axis T) needs block_tokens that divide it",
                layer=name,
                field="block_tokens",
                tokens=extents["T"],
            )
        tokens = group.block_tokens
        extents["B"], steps["N"], steps["B"] = extents["T"] // tokens, steps["T"], steps["T"] * tokens
    if group.packing and "C" in axes and tokens > 1:
        if steps["N"] != extents["C"]:
            raise UsageError("the tile of a head is not in one piece, as its packing needs", layer=name, axes=axes)
        steps["P"], steps["N"] = tokens * head_size, head_size
    per_page, rest = divmod(group.block_tokens or tokens, tokens)
    if rest:
        raise UsageError(
            "a block id stands for a part of a block of the tensor",
            layer=name,
            field="block_tokens",
            value=group.block_tokens,
            tokens=tokens,
        )
    strides = tuple(steps.get(axis, 0) * size for axis in "PBNH")
    key = (extents["B"], tokens, extents.get("H", 1), head_size, parts, view.dtype, per_page)
    return _ReadTensor(key, view.storage, view.offset, strides)  # type: ignore[arg-type]


def _named(name: str, view: TensorView, axes: object) -> tuple[dict[str, int], dict[str, int]]:
    """Extents and strides (in elements) by axis; refuses what no cache can be."""
    if not isinstance(axes, str) or not _is_axes(axes):
        raise UsageError(f"axes are {AXES_RULE}", layer=name, field="axes", value=repr(axes)[:20])
    if not {"B", "T"} & set(axes):
        raise UsageError("no axis of the tensor counts blocks", layer=name, field="axes", value=axes)
    if len(view.shape) != len(axes) or len(view.strides) != len(axes):
        raise UsageError(
            "the tensor does not have the axes that it should have", layer=name, axes=axes, shape=str(view.shape)
        )
    if view.dtype not in ITEMSIZES:
        raise UsageError("a cache of this dtype is not known", layer=name, field="dtype", value=view.dtype)
    for axis, extent, stride in zip(axes, view.shape, view.strides, strict=True):
        if extent < 1 or stride < 0 or (stride == 0 and extent > 1):
            what = "is empty" if extent < 1 else "runs backwards" if stride < 0 else "shows the same elements again"
            raise UsageError(f"axis {axis} of the tensor {what}", layer=name, shape=str(view.shape), stride=stride)
        if axis in "DC" and stride != 1 and extent > 1:
            raise UsageError("the elements of a head do not lie together", layer=name, axis=axis, stride=stride)
    if view.offset < 0 or view.offset % ITEMSIZES[view.dtype]:
        raise UsageError("the tensor does not begin at a multiple of its elements", layer=name, offset=view.offset)
    return dict(zip(axes, view.shape, strict=True)), dict(zip(axes, view.strides, strict=True))


def _is_axes(axes: str) -> bool:
    """Known letters, each once, and none beside the letter of an axis that holds it: T is B and N, C is P and D."""
    found = set(axes)
    clash = ("T" in found and found & {"B", "N"}) or ("C" in found and found & {"P", "D"})
    return len(found) == len(axes) and found <= set("PBNTHDC") and not clash


# -- from a file ------------------------------------------------------------------------------------------------------


def caches_from_json(text: str | bytes | Mapping[str, Any]) -> TensorCaches:
    """The caches that a JSON description names; ``storages`` are the lengths in bytes, to be allocated or registered.

    An object with "storages" (bytes of each allocation), "layers" (name to a list of tensors: storage, offset in bytes,
    shape, strides in elements, dtype) and "groups" (the fields of `LayerGroup`). Raises `UsageError` that names the
    field for whatever is malformed, and what `caches_of` raises.
    """
    try:
        raw = json.loads(text) if isinstance(text, str | bytes) else text
        storages = tuple(_int("storages", size) for size in raw["storages"])
        layers = {str(name): tuple(map(_view_from, rows)) for name, rows in raw["layers"].items()}
        groups = [_group_from(row) for row in raw["groups"]]
    except UsageError:
        raise
    except KeyError as missing:
        raise UsageError(f"the description of a cache lacks {missing}", field=str(missing.args[0])[:40]) from missing
    except (ValueError, TypeError, AttributeError, RecursionError) as wrong:
        raise UsageError(f"the description of a cache makes no sense: {wrong}"[:300], field="json") from wrong
    return TensorCaches(caches=caches_of(layers, groups, storages), storages=storages)


def to_json(layers: Layers, groups: Sequence[LayerGroup], storage_bytes: Sequence[int]) -> str:
    """What `caches_from_json` reads."""
    rows = {name: [_fields(view) for view in views] for name, views in layers.items()}
    return json.dumps({"storages": list(storage_bytes), "layers": rows, "groups": [_fields(one) for one in groups]})


def _fields(value: TensorView | LayerGroup) -> dict[str, Any]:
    return {name: getattr(value, name) for name in type(value).__slots__}


def _int(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not -(1 << 62) <= value <= 1 << 62:
        raise UsageError(f"{name} must be an integer", field=name, value=repr(value)[:40])
    return value


def _view_from(row: Mapping[str, Any]) -> TensorView:
    return TensorView(
        storage=_int("storage", row["storage"]),
        offset=_int("offset", row["offset"]),
        shape=tuple(_int("shape", extent) for extent in row["shape"]),
        strides=tuple(_int("strides", stride) for stride in row["strides"]),
        dtype=str(row["dtype"]),
    )


def _group_from(row: Mapping[str, Any]) -> LayerGroup:
    known = dict.fromkeys(LayerGroup.__slots__)
    for name in row:
        if name not in known:
            raise UsageError("a group has no such field", field=str(name)[:40])
    axes = row["axes"]
    group = LayerGroup(names=tuple(map(str, row["names"])), axes=tuple(axes) if isinstance(axes, list) else axes)
    more = {name: row[name] for name in known if name in row and name not in ("names", "axes")}
    for name, value in more.items():
        if name in ("packing", "fingerprint"):
            more[name] = str(value)
        elif value is not None or name != "block_tokens":
            more[name] = _int(name, value)
    return replace(group, **more)

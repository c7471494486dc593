"""What engines say about their caches, in the words of `kvxfer.integrations.tensors`: vLLM's ``kv_cache_config``.

Nothing of an engine is imported: the objects are read by their attributes, as vLLM 0.27.1 and 0.32.0 have them. What is
not in the lists below is refused: an attention backend may arrange a block as it likes, and moves of what is arranged
otherwise than assumed would corrupt silently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvxfer.errors import UsageError
from kvxfer.integrations.tensors import LayerGroup, TensorView

# Backends whose elements lie where the strides say: [blocks, heads, tokens, K and V of a head] (logical order).
PLAIN_BACKENDS = frozenset({"FLASH_ATTN", "TRITON_ATTN"})
# One vector for each token: [blocks, tokens, elements] in 0.27.1, [blocks, 1, tokens, elements] in 0.32.0.
MLA_BACKENDS = frozenset({"TRITON_MLA", "FLASHMLA", "CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA"})
# The CPU backend arranges the tile of a head for the instructions that it uses ("CPU_ATTN:vec"): keys transposed, then
# values; for "amx" in pairs of rows as well. Instructions are part of the packing: unlike ones are unlike bytes.
CPU_BACKEND = "CPU_ATTN"
CPU_INSTRUCTIONS = frozenset({"vec", "vec16", "amx", "neon", "vxe", "vsx", "rvv"})

SPECS = frozenset({"FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec", "MLAAttentionSpec"})
MLA_SPECS = frozenset({"MLAAttentionSpec"})
# Attributes of a spec that, with another value, say that a page holds something else than K and V of its tokens.
PLAIN_VALUES: Mapping[str, tuple[Any, ...]] = {
    "kv_quant_mode": (0,),
    "tokens_per_state": (1,),
    "state_content_bytes": (None,),
    "model_version": (None,),
}


def groups_of(
    kv_cache_config: Any,
    layers: Mapping[str, tuple[TensorView, ...]],
    *,
    backend: str | Mapping[str, str],
    tp_rank: int = 0,
    tp_size: int = 1,
    kv_heads_total: int = 0,
    first_layer: int = 0,
    layers_total: int = 0,
    fingerprint: str = "",
) -> tuple[LayerGroup, ...]:
    """The groups of a vLLM worker's cache, numbered as vLLM numbers them: ``kv_cache_config`` is what its connectors
    are given, ``layers`` are the tensors of `register_kv_caches`.

    ``backend`` is the name of the attention backend, for all layers or by layer; the CPU backend with the instructions
    that it uses, as its layers have them (``layer.isa``): "CPU_ATTN:vec". Groups that vLLM does not transfer have no
    layers here. Layers are in the order of the numbers in their names.

    Raises `UsageError` that names the group or the layer, for backends and kinds of caches that are not known here, for
    quantised ones, and for tensors that are not as the configuration says.
    """
    known = {name for group in kv_cache_config.kv_cache_groups for name in group.layer_names}
    for name in layers:
        if name not in known:
            raise UsageError("a layer belongs to no group of the configuration", layer=name)
    several = len(kv_cache_config.kv_cache_groups) > 1
    if several and (first_layer or layers_total):
        raise UsageError(
            "a stage of a model with several groups does not say which layers of each group it holds",
            field="first_layer",
            groups=len(kv_cache_config.kv_cache_groups),
        )
    made = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        names = tuple(sorted(group.layer_names, key=_by_number)) if _transferred(group) else ()
        if not names:
            made.append(LayerGroup(names=(), axes="BN"))
            continue
        kinds = {_kind(index, group, name, layers, backend) for name in names}
        if len(kinds) > 1:
            raise UsageError("layers of one group are of unlike kinds", group=index, kinds=str(sorted(kinds))[:200])
        ((mla, axes, packing, block_tokens),) = kinds
        made.append(
            LayerGroup(
                names=names,
                axes=axes,
                kv_parts=1 if mla else 2,
                packing=packing,
                block_tokens=block_tokens,
                tp_rank=0 if mla else tp_rank,
                tp_size=1 if mla else tp_size,
                kv_heads_total=1 if mla else kv_heads_total,
                first_layer=first_layer,
                layers_total=layers_total,
                fingerprint=fingerprint,
            )
        )
    return tuple(made)


def _transferred(group: Any) -> bool:
    return bool(getattr(group, "enable_kv_transfer", True)) and bool(group.layer_names)


def _by_number(name: str) -> list[tuple[int, str]]:
    """ "layers.10" comes behind "layers.9"."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", name)]


def _kind(
    index: int, group: Any, name: str, layers: Mapping[str, tuple[TensorView, ...]], backend: str | Mapping[str, str]
) -> tuple[bool, str, str, int]:
    """Of a layer: whether it is MLA, its axes, its packing, and tokens for each block id."""
    spec = group.kv_cache_spec
    spec = getattr(spec, "kv_cache_specs", {}).get(name, spec)
    _check_spec(index, name, spec)
    mla = type(spec).__name__ in MLA_SPECS
    word = backend if isinstance(backend, str) else backend.get(name, "")
    axes, packing = _axes(name, word, mla)
    if name not in layers:
        raise UsageError("a layer of the group has no tensor", layer=name, group=index)
    for view in layers[name]:
        if mla:
            axes = {3: "BND", 4: "BHND"}.get(len(view.shape), axes)
        _check_shape(name, view, spec, axes, mla)
    return mla, axes, packing, int(spec.block_size)


def _check_spec(index: int, name: str, spec: Any) -> None:
    kind = type(spec).__name__
    if kind not in SPECS:
        raise UsageError("a cache of this kind cannot be described", group=index, layer=name, kind=kind)
    for field, plain in PLAIN_VALUES.items():
        value = getattr(spec, field, plain[0])
        if value not in plain:
            what = (
                "a quantised cache has scales that would not travel"
                if field == "kv_quant_mode"
                else ("the pages of this cache hold something else than keys and values")
            )
            raise UsageError(what, group=index, layer=name, field=field, value=str(value)[:40])
    heads, slots = spec.num_kv_heads, getattr(spec, "num_head_slots", None)
    values = getattr(spec, "head_size_v", None)
    for field, good in (
        ("num_head_slots", slots in (None, heads)),
        ("head_size_v", kind in MLA_SPECS or values in (None, spec.head_size)),
        ("storage_block_size", getattr(spec, "storage_block_size", spec.block_size) == spec.block_size),
        ("cache_dtype_str", getattr(spec, "cache_dtype_str", None) in (None, "auto", _name(spec.dtype))),
    ):
        if not good:
            raise UsageError(
                "the pages of this cache hold something else than keys and values of one size",
                group=index,
                layer=name,
                field=field,
                value=str(getattr(spec, field))[:40],
            )


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _axes(name: str, backend: str, mla: bool) -> tuple[str, str]:
    """The axes, and the packing."""
    word, _, instructions = backend.partition(":")
    if mla and word in MLA_BACKENDS:
        return "BND", ""
    if not mla and word in PLAIN_BACKENDS:
        return "BHNC", ""
    if not mla and word == CPU_BACKEND:
        if instructions not in CPU_INSTRUCTIONS:
            raise UsageError(
                "the CPU backend arranges tiles by the instructions that it uses, and these are not known",
                layer=name,
                field="backend",
                value=backend,
                hint='say which, as the attention layers have it (layer.isa): backend="CPU_ATTN:vec"',
            )
        return "BHNC", f"{CPU_BACKEND}:{instructions}"
    raise UsageError(
        "how this attention backend arranges a block is not known",
        layer=name,
        field="backend",
        value=backend,
        hint="give axes (and packing, if it arranges tiles in a way of its own) instead of a configuration",
    )


def _check_shape(name: str, view: TensorView, spec: Any, axes: str, mla: bool) -> None:
    """The tensor is as the configuration says."""
    extents = dict(zip(axes, view.shape, strict=False))
    expected = {"H": int(spec.num_kv_heads), "C": 2 * int(spec.head_size), "D": int(spec.head_size)}
    wrong = [axis for axis in axes if extents.get(axis) is None or extents[axis] != expected.get(axis, extents[axis])]
    tokens, size = extents.get("N", 0), int(spec.block_size)
    if len(view.shape) != len(axes) or wrong or not tokens or size % tokens:
        raise UsageError(
            "a tensor is not as the configuration says",
            layer=name,
            axes=axes,
            shape=str(view.shape),
            block_tokens=size,
            heads=expected["H"],
            head_size=expected["D"],
        )
    if view.dtype != _name(spec.dtype):
        raise UsageError(
            "a tensor is not of the dtype of the configuration",
            layer=name,
            value=view.dtype,
            expected=_name(spec.dtype),
        )

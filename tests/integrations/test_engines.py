"""vLLM's configuration of a cache in our words, with objects that have the attributes of vLLM's (none of it is
installed here). What is not known is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import pytest

from kvxfer.errors import UsageError
from kvxfer.integrations.engines import CPU_INSTRUCTIONS, groups_of
from kvxfer.integrations.tensors import TensorView, caches_of

LAYERS, BLOCKS, TOKENS, HEADS, DIM = 12, 8, 32, 2, 16


class KVQuantMode(IntEnum):
    NONE = 0
    FP8_PER_TENSOR = 1


@dataclass(frozen=True)
class FullAttentionSpec:
    block_size: int = TOKENS
    num_kv_heads: int = HEADS
    head_size: int = DIM
    dtype: str = "torch.bfloat16"
    head_size_v: int | None = DIM
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    tokens_per_state: int = 1


@dataclass(frozen=True)
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 64


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    num_kv_heads: int = 1
    head_size: int = 72
    head_size_v: int | None = 0
    cache_dtype_str: str | None = None
    model_version: str | None = None


@dataclass(frozen=True)
class OldFullAttentionSpec:
    """Of 0.27.1."""

    block_size: int = TOKENS
    num_kv_heads: int = HEADS
    head_size: int = DIM
    dtype: str = "torch.bfloat16"
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE
    storage_block_size: int = TOKENS


OldFullAttentionSpec.__name__ = "FullAttentionSpec"


@dataclass(frozen=True)
class MambaSpec:
    block_size: int = TOKENS


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs:
    kv_cache_specs: dict[str, Any]
    block_size: int = TOKENS


@dataclass(frozen=True)
class Group:
    layer_names: list[str]
    kv_cache_spec: Any
    enable_kv_transfer: bool = True


@dataclass(frozen=True)
class Config:
    kv_cache_groups: list[Group]
    num_blocks: int = BLOCKS
    kv_cache_tensors: list[Any] = field(default_factory=list)


NAMES = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]


def tensor(
    index: int, *, tokens: int = TOKENS, width: int = 2 * DIM, heads: int = HEADS, order: str = "BNHC"
) -> tuple[TensorView]:
    """A view [blocks, heads, tokens, K and V] of one allocation; ``order`` is that of the axes in memory."""
    extents = {"B": BLOCKS * TOKENS // tokens, "H": heads, "N": tokens, "C": width}
    steps, step = {}, 1
    for axis in reversed(order):
        steps[axis] = step
        step *= extents[axis]
    shape, strides = (tuple(of[axis] for axis in "BHNC") for of in (extents, steps))
    return (TensorView(storage=0, offset=index * step * 2, shape=shape, strides=strides, dtype="bfloat16"),)


def described(config: Config, layers: dict[str, tuple[TensorView, ...]], **more: Any) -> Any:
    return caches_of(layers, groups_of(config, layers, **{"backend": "FLASH_ATTN", **more}), [1 << 30])


@pytest.mark.parametrize("spec", [FullAttentionSpec(), OldFullAttentionSpec()])
@pytest.mark.parametrize("order", ["BNHC", "BHNC"])
def test_plain_attention_of_both_versions(spec: Any, order: str) -> None:
    layers = {name: tensor(i, order=order) for i, name in enumerate(NAMES)}
    config = Config([Group(sorted(NAMES), spec)])  # layers.10 before layers.2: ours is the order of the numbers
    (cache,) = described(config, layers, tp_rank=1, tp_size=4, fingerprint="model=m")
    shape = cache.layout.geometry
    assert cache.layers == tuple(NAMES)
    assert shape.layout == order.replace("C", "PD")
    assert (shape.kv_heads_total, shape.head_start, shape.fingerprint, shape.packing) == (8, 2, "model=m", "")
    assert [placed.offset for (placed,) in map(cache.layout.placed, range(2))] == [0, BLOCKS * TOKENS * HEADS * DIM * 4]


def test_the_cpu_backend_says_its_instructions() -> None:
    layers = {name: tensor(i, order="BHNC") for i, name in enumerate(NAMES)}
    config = Config([Group(NAMES, FullAttentionSpec())])
    names = {
        described(config, layers, backend=f"CPU_ATTN:{word}")[0].layout.geometry.packing for word in CPU_INSTRUCTIONS
    }
    assert len(names) == len(CPU_INSTRUCTIONS)
    for unknown in ("CPU_ATTN", "CPU_ATTN:", "CPU_ATTN:sve9"):
        with pytest.raises(UsageError, match="instructions") as caught:
            described(config, layers, backend=unknown)
        assert "layer.isa" in str(caught.value.hint)
    scattered = {name: tensor(i, order="BNHC") for i, name in enumerate(NAMES)}
    with pytest.raises(UsageError, match="one piece"):
        described(config, scattered, backend="CPU_ATTN:vec")


def test_hybrid_groups_lie_over_each_other() -> None:
    """One layer of full attention for two of a window; each group begins at the same place."""
    full, window = NAMES[2::3], [name for i, name in enumerate(NAMES) if i % 3 < 2]
    layers = {name: tensor(i) for names in (full, window[:4], window[4:]) for i, name in enumerate(names)}
    config = Config([Group(names, SlidingWindowSpec()) for names in (window[:4], window[4:])])
    config.kv_cache_groups.insert(0, Group(full, FullAttentionSpec()))
    found = described(config, layers)
    assert [cache.group for cache in found] == [0, 1, 2]
    assert [cache.layers for cache in found] == [tuple(full), tuple(window[:4]), tuple(window[4:])]
    assert found[0].layout == found[1].layout == found[2].layout
    config.kv_cache_groups[1] = replace(config.kv_cache_groups[1], enable_kv_transfer=False)
    assert [(cache.group, cache.name) for cache in described(config, layers)] == [(0, "0.0"), (2, "2.0")]
    with pytest.raises(UsageError, match="several groups"):
        described(config, layers, first_layer=4, layers_total=8)


def test_stages_and_pages() -> None:
    """A block id of the scheduler stands for two blocks of the kernel."""
    layers = {name: tensor(i, tokens=16) for i, name in enumerate(NAMES[4:])}
    config = Config([Group(NAMES[4:], FullAttentionSpec())])
    (cache,) = described(config, layers, first_layer=4, layers_total=12)
    assert cache.blocks_per_page == 2
    assert cache.layout.geometry.layer_numbers == range(4, 12)
    assert cache.table([3], 20).blocks.tolist() == [6, 7]


@pytest.mark.parametrize("axes", ["BND", "BHND"])
def test_mla(axes: str) -> None:
    steps = {"B": TOKENS * 72, "H": 72, "N": 72, "D": 1}
    extents = {"B": BLOCKS, "H": 1, "N": TOKENS, "D": 72}
    shape, strides = (tuple(of[axis] for axis in axes) for of in (extents, steps))
    layers = {
        name: (TensorView(storage=0, offset=i << 20, shape=shape, strides=strides, dtype="bfloat16"),)
        for i, name in enumerate(NAMES)
    }
    config = Config([Group(NAMES, UniformTypeKVCacheSpecs(dict.fromkeys(NAMES, MLAAttentionSpec())))])
    (cache,) = described(config, layers, backend="FLASHMLA", tp_rank=3, tp_size=4, kv_heads_total=1)
    found = cache.layout.geometry
    assert (found.kv_parts, found.kv_heads, found.kv_heads_total, found.head_size) == (1, 1, 1, 72)
    for backend, spec, says in (
        ("FLASH_ATTN", MLAAttentionSpec(), "backend"),
        ("FLASHMLA_SPARSE", MLAAttentionSpec(), "backend"),
        ("FLASHMLA", MLAAttentionSpec(cache_dtype_str="fp8_ds_mla"), "one size"),
        ("FLASHMLA", MLAAttentionSpec(model_version="deepseek_v4"), "something else"),
    ):
        with pytest.raises(UsageError, match=says):
            described(Config([Group(NAMES, spec)]), layers, backend=backend)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (MambaSpec(), "kind"),
        (FullAttentionSpec(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR), "quantised"),
        (FullAttentionSpec(head_size_v=8), "one size"),
        (FullAttentionSpec(num_head_slots=4), "one size"),
        (FullAttentionSpec(tokens_per_state=4), "something else"),
        (FullAttentionSpec(state_content_bytes=96), "something else"),
        (replace(OldFullAttentionSpec(), storage_block_size=8), "one size"),
        (FullAttentionSpec(head_size=32, head_size_v=32), "not as the configuration"),
        (FullAttentionSpec(num_kv_heads=4), "not as the configuration"),
        (FullAttentionSpec(block_size=48), "not as the configuration"),
        (FullAttentionSpec(dtype="torch.float16"), "dtype"),
    ],
)
def test_what_cannot_be_described_is_named(spec: Any, says: str) -> None:
    layers = {name: tensor(i) for i, name in enumerate(NAMES)}
    config = Config([Group(NAMES, spec)])
    with pytest.raises(UsageError, match=says) as caught:
        described(config, layers)
    assert NAMES[0] in str(caught.value)


def test_backends_by_layer_and_names_that_do_not_fit() -> None:
    layers = {name: tensor(i) for i, name in enumerate(NAMES)}
    config = Config([Group(NAMES, FullAttentionSpec())])
    assert described(config, layers, backend=dict.fromkeys(NAMES, "TRITON_ATTN"))
    mixed = {**dict.fromkeys(NAMES, "TRITON_ATTN"), NAMES[3]: "FLASHINFER"}
    with pytest.raises(UsageError, match="how this attention backend") as caught:
        described(config, layers, backend=mixed)
    assert caught.value.fields["layer"] == NAMES[3]
    packed = {**dict.fromkeys(NAMES, "TRITON_ATTN"), NAMES[3]: "CPU_ATTN:vec"}
    with pytest.raises(UsageError, match="unlike kinds"):
        described(config, layers, backend=packed)
    with pytest.raises(UsageError, match="no group"):
        described(Config([Group(NAMES[1:], FullAttentionSpec())]), layers)
    with pytest.raises(UsageError, match="no tensor"):
        described(config, dict(list(layers.items())[1:]))

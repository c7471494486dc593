"""vLLM's caches as parts of a request, tuples of tensors as vllm-ascend has them among them. Needs torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import kvxfer
from kvxfer.errors import UsageError
from kvxfer.integrations.vllm.orders import Table

torch = pytest.importorskip("torch", reason="torch is not installed here: make test-torch has it")

from kvxfer.integrations.vllm.caches import Caches, Part  # noqa: E402

BLOCKS, TOKENS, HEADS, DIM = 6, 16, 2, 8
NAMES = ("model.layers.0.attn", "model.layers.1.attn")


def config(*groups: tuple[str, ...]) -> Any:
    """As much of vLLM's `kv_cache_config` as tuples need."""
    spec = SimpleNamespace(block_size=TOKENS)
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(layer_names=list(names), kv_cache_spec=spec) for names in groups]
    )


def ascend(value: float) -> dict[str, tuple[Any, ...]]:
    """Keys and values as tensors of their own."""
    return {name: tuple(torch.full((BLOCKS, TOKENS, HEADS, DIM), value) for _ in range(2)) for name in NAMES}


async def test_tuples_are_moved_key_by_key_and_value_by_value() -> None:
    source, sink = ascend(0.0), ascend(0.0)
    for number, tensor in enumerate(tensor for several in source.values() for tensor in several):
        tensor[1] = number + 1
        tensor[4] = -number - 1
    here, there = Table.of([4, 1], TOKENS, 0, 20), Table.of([2, 5], TOKENS, 0, 20)
    async with kvxfer.local() as prefill, kvxfer.local() as decode:
        (given,) = await Caches(source, config(NAMES), (0,), backend={}).open(prefill, own_memory=False)
        (taken,) = await Caches(sink, config(NAMES), (0,), backend={}).open(decode, own_memory=False)
        assert given.layers == NAMES
        async with prefill.publish("r", given.cache, given.table([here])) as ticket:
            await decode.pull(ticket, taken.cache, taken.table([there]))
    for name in NAMES:
        for one, other in zip(source[name], sink[name], strict=True):
            assert torch.equal(other[2], one[4])
            assert torch.equal(other[5][:4], one[1][:4])
            assert not other[5][4:].any()


async def test_groups_that_are_not_moved_have_no_part() -> None:
    async with kvxfer.local() as client:
        caches = Caches(ascend(1.0), config(NAMES[:1], NAMES[1:]), (1,), backend={})
        parts: tuple[Part, ...] = await caches.open(client, own_memory=False)
        assert [(part.layers, part.order) for part in parts] == [(NAMES[1:], 0)]


async def test_own_memory_keeps_what_is_in_the_tensors() -> None:
    tensors = ascend(7.0)
    async with kvxfer.local() as client:
        (part,) = await Caches(tensors, config(NAMES), (0,), backend={}).open(client, own_memory=True)
        tensors[NAMES[0]][0][3] = 9.0
        assert float(tensors[NAMES[0]][0][3].max()) == 9.0
        assert float(tensors[NAMES[1]][1].min()) == 7.0
        assert any((region.array.view("float32") == 9.0).any() for region in part.cache.regions)


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(UsageError):
        Caches({NAMES[0]: (torch.zeros(3),) * 2}, config(NAMES[:1]), (0,), backend={})

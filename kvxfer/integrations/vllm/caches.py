"""vLLM's KV caches as caches of kvxfer: described once, registered with each client that a worker opens.

A layer is a tensor, or a tuple of tensors (keys, values, perhaps more) as vllm-ascend has it. What is not known is
refused by `kvxfer.integrations.torch`: bytes that mean something else would be moved without any error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvxfer.geometry import BlockTable
from kvxfer.integrations.tensors import LayerGroup, TensorCache, TensorCaches
from kvxfer.integrations.vllm.orders import Table
from kvxfer.memory.region import KVCache

if TYPE_CHECKING:
    from kvxfer.client import Client

TUPLE_AXES = "BNHD"  # of each tensor of a layer of vllm-ascend: blocks, tokens, heads, elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One cache of a request: its memory here, and which of the tables of an order is its own."""

    cache: KVCache
    described: TensorCache
    order: int

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of its layers, in the order of the cache."""
        return self.described.layers

    def table(self, tables: Sequence[Table]) -> BlockTable:
        """Where this cache holds what an order is about."""
        found = tables[self.order]
        return self.described.table(found.blocks, found.tokens, found.first, first_slot=found.slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caches:
    """All caches of a worker: their tensors, what these mean, and the groups of layers that are moved, in order."""

    tensors: Mapping[str, Any]
    found: TensorCaches
    groups: tuple[int, ...]

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Any],
        kv_cache_config: Any,
        groups: tuple[int, ...],
        *,
        backend: Mapping[str, str],
        **more: Any,
    ) -> Caches:
        """Of what `register_kv_caches` is given. Raises `UsageError` for what is not known."""
        from kvxfer.integrations.torch import cache_of

        if any(isinstance(found, tuple | list) for found in tensors.values()):
            named = tuple(
                LayerGroup(
                    names=tuple(group.layer_names) if index in groups else (),
                    axes=TUPLE_AXES,
                    block_tokens=group.kv_cache_spec.block_size,
                    **more,
                )
                for index, group in enumerate(kv_cache_config.kv_cache_groups)
            )
            found = cache_of(tensors, groups=named)
        else:
            found = cache_of(tensors, kv_cache_config=kv_cache_config, backend=backend, **more)
        return cls(tensors=tensors, found=found, groups=groups)

    async def open(self, client: Client, *, own_memory: bool) -> tuple[Part, ...]:
        """Make them reachable through this client; with ``own_memory``, move them into memory of it before."""
        if own_memory:
            from kvxfer.integrations.torch import rehome

            regions = (await rehome(client, self.tensors)).regions
        else:
            regions = await client.register_many(self.found.storages)
        return tuple(
            Part(cache=cache, described=described, order=self.groups.index(described.group))
            for cache, described in zip(self.found.bind(regions), self.found.caches, strict=True)
        )

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
    from kvxfer.integrations.torch import Home

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


class Caches:
    """All caches of a worker: their tensors, and the groups of layers that are moved, as tables of orders have them."""

    def __init__(
        self,
        tensors: Mapping[str, Any],
        kv_cache_config: Any,
        groups: tuple[int, ...],
        *,
        backend: Mapping[str, str],
        **more: Any,
    ) -> None:
        """Of what `register_kv_caches` is given; ``more`` as `kvxfer.integrations.engines.groups_of` takes it. Raises
        `UsageError` for what is not known.
        """
        self._tensors = tensors
        self._config = kv_cache_config
        self._groups = groups
        self._backend = backend
        self._more = more
        self._home: Home | None = None  # keeps the memory that the tensors moved into
        self.describe()

    def describe(self) -> TensorCaches:
        """Where everything lies now. Not kept: its storages would hold memory that the tensors have left."""
        from kvxfer.integrations.torch import cache_of

        if not any(isinstance(found, tuple | list) for found in self._tensors.values()):
            return cache_of(self._tensors, kv_cache_config=self._config, backend=self._backend, **self._more)
        named = tuple(
            LayerGroup(
                names=tuple(group.layer_names) if index in self._groups else (),
                axes=TUPLE_AXES,
                block_tokens=group.kv_cache_spec.block_size,
                **self._more,
            )
            for index, group in enumerate(self._config.kv_cache_groups)
        )
        return cache_of(self._tensors, groups=named)

    async def open(self, client: Client, *, own_memory: bool) -> tuple[Part, ...]:
        """Make them reachable through this client; with ``own_memory``, move them into memory of it before."""
        if own_memory:
            from kvxfer.integrations.torch import rehome

            self._home = await rehome(client, self._tensors)
            regions = self._home.regions
            found = self.describe()
        else:
            found = self.describe()
            regions = await client.register_many(found.storages)
        return tuple(
            Part(cache=cache, described=described, order=self._groups.index(described.group))
            for cache, described in zip(found.bind(regions), found.caches, strict=True)
        )

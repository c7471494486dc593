"""One request in several caches: groups of layers with tables of their own, tensors of another shape or dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvxfer.errors import UsageError
from kvxfer.geometry import BlockTable
from kvxfer.memory.region import KVCache

CACHES_MAX = 64
NAME_CHARS_MAX = 64

# One cache (and its table beside it), or several by name, each with its own table.
Caches = KVCache | Mapping[str, tuple[KVCache, BlockTable]]


@dataclass(frozen=True, slots=True)
class NamedCache:
    """``first``: the number of its first layer, counted over all caches of the request."""

    name: str
    cache: KVCache
    table: BlockTable
    first: int

    @property
    def layers(self) -> range:
        """Its layers, counted over all caches of the request."""
        return range(self.first, self.first + self.cache.layout.geometry.layers)


def named_caches(cache: Caches, table: BlockTable | None) -> tuple[NamedCache, ...]:
    """The caches of a request in the caller's order; a single one has the name "". Raises `UsageError` for what is not
    one of the two forms.
    """
    if isinstance(cache, KVCache):
        if not isinstance(table, BlockTable):
            raise UsageError("table must be a BlockTable", field="table", got=type(table).__name__)
        return (NamedCache("", cache, table, 0),)
    if not isinstance(cache, Mapping):
        hint = 'KVCache and BlockTable, or {"name": (KVCache, BlockTable), ...}'
        raise UsageError("cache must be a KVCache or a mapping", field="cache", got=type(cache).__name__, hint=hint)
    if table is not None:
        raise UsageError("a mapping of caches brings its own tables", field="table")
    if not 1 <= len(cache) <= CACHES_MAX:
        raise UsageError("a request has at least one cache", field="cache", value=len(cache), limit=CACHES_MAX)
    found, first = [], 0
    for name, pair in cache.items():
        if not is_name(name):
            raise UsageError("bad name of a cache", field="cache", value=repr(name)[:80], limit=NAME_CHARS_MAX)
        good = isinstance(pair, Sequence) and len(pair) == 2
        if not (good and isinstance(pair[0], KVCache) and isinstance(pair[1], BlockTable)):
            raise UsageError(f"cache {name!r} must be a pair of a KVCache and a BlockTable", field="cache")
        found.append(NamedCache(name, *pair, first))
        first += pair[0].layout.geometry.layers
    return tuple(found)


def one_cache(cache: object) -> KVCache:
    """For what takes a single cache."""
    if not isinstance(cache, KVCache):
        hint = "push and offer move one cache each: several are several requests; publish and pull take a mapping"
        raise UsageError("cache must be a KVCache", field="cache", got=type(cache).__name__, hint=hint)
    return cache


def is_name(value: object) -> bool:
    """Whether this can be the name of a cache."""
    return isinstance(value, str) and len(value) <= NAME_CHARS_MAX


def layers_of(caches: Sequence[NamedCache]) -> int:
    """Layers of all caches together."""
    return sum(len(each.layers) for each in caches)

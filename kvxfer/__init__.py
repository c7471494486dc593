"""kvxfer moves KV-cache tensors between the prefill and decode sides of disaggregated LLM inference.

>>> import asyncio, kvxfer
>>> async def main():
...     async with kvxfer.local() as client:
...         source, target = await client.alloc(4096), await client.alloc(4096)
...         source.array[:] = 7
...         await client.put(source, target.descriptor("w"))
...         return int(target.array[4095])
>>> asyncio.run(main())
7
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxfer.client import Client
    from kvxfer.config import Config
    from kvxfer.dataplane.transfer import Transfer
    from kvxfer.descriptors import RemoteDescriptor, Ticket
    from kvxfer.embedded import local
    from kvxfer.errors import BusyError, KvxferError, PeerError, TransferError, TransportError, UsageError
    from kvxfer.flows.many import Group, Move
    from kvxfer.geometry import BlockTable, CacheLayout, Geometry, LayerPlacement
    from kvxfer.memory.region import KVCache, Region, Span
    from kvxfer.planner import contiguous_layout
    from kvxfer.threaded import ThreadedClient

__version__ = "0.1.0"

# Public names are loaded on first use: `import kvxfer` must be quick, and a tool that needs the errors needs no engine.
_HOME = {
    "BlockTable": "kvxfer.geometry",
    "BusyError": "kvxfer.errors",
    "CacheLayout": "kvxfer.geometry",
    "Client": "kvxfer.client",
    "Config": "kvxfer.config",
    "Geometry": "kvxfer.geometry",
    "Group": "kvxfer.flows.many",
    "KVCache": "kvxfer.memory.region",
    "KvxferError": "kvxfer.errors",
    "LayerPlacement": "kvxfer.geometry",
    "Move": "kvxfer.flows.many",
    "PeerError": "kvxfer.errors",
    "Region": "kvxfer.memory.region",
    "RemoteDescriptor": "kvxfer.descriptors",
    "Span": "kvxfer.memory.region",
    "ThreadedClient": "kvxfer.threaded",
    "Ticket": "kvxfer.descriptors",
    "Transfer": "kvxfer.dataplane.transfer",
    "TransferError": "kvxfer.errors",
    "TransportError": "kvxfer.errors",
    "UsageError": "kvxfer.errors",
    "contiguous_layout": "kvxfer.planner",
    "local": "kvxfer.embedded",
}

__all__ = [
    "BlockTable",
    "BusyError",
    "CacheLayout",
    "Client",
    "Config",
    "Geometry",
    "Group",
    "KVCache",
    "KvxferError",
    "LayerPlacement",
    "Move",
    "PeerError",
    "Region",
    "RemoteDescriptor",
    "Span",
    "ThreadedClient",
    "Ticket",
    "Transfer",
    "TransferError",
    "TransportError",
    "UsageError",
    "__version__",
    "contiguous_layout",
    "local",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'kvxfer' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

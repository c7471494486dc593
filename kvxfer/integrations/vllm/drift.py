"""What differs between the versions of vLLM that the connector serves: 0.27.1 and 0.32.0 are tested."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvxfer.errors import UsageError
from kvxfer.integrations.vllm.results import ResultBatch

VERSION: str = vllm.__version__

# From 0.30 on a worker reports failures by request. Before, only by block, which cannot be told for several groups.
_Results = getattr(base, "KVConnectorTransferResults", None)
BY_REQUEST = _Results is not None


def transfer_results(batch: ResultBatch) -> Any:
    """The answer of `get_transfer_results` (from 0.30 on)."""
    assert _Results is not None
    return _Results(finished_sending=batch.sent, finished_recving=batch.received, failed_recving=batch.failed)


def require_failures_can_be_told(groups: int) -> None:
    """Raises `UsageError` where one failed load would end the whole engine."""
    if groups > 1 and not BY_REQUEST:
        raise UsageError(
            f"vLLM {VERSION} cannot be told of blocks that did not come when a model has several groups of layers",
            value=groups,
            limit=1,
            hint="use vLLM 0.30 or newer, or --disable-hybrid-kv-cache-manager",
        )


def transfer_groups(kv_cache_config: Any) -> tuple[int, ...]:
    """The groups of layers whose blocks are moved: all of them, before vLLM knew others."""
    found: tuple[int, ...] | None = getattr(kv_cache_config, "transfer_group_ids", None)
    return tuple(range(len(kv_cache_config.kv_cache_groups))) if found is None else found


def hit_source() -> Any:
    """The label of what came from another engine (from 0.31 on); None where there is none."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.P2P


def backends(vllm_config: Any, names: Iterable[str]) -> dict[str, str]:
    """How each layer's attention arranges its blocks: the backend's name, and for the CPU the instructions it uses."""
    found = {}
    for name in names:
        layer = vllm_config.compilation_config.static_forward_context[name]
        word = layer.get_attn_backend().get_name()
        instructions = getattr(layer, "isa", None) or getattr(getattr(layer, "impl", None), "isa", None)
        found[name] = f"{word}:{instructions}" if instructions else word
    return found

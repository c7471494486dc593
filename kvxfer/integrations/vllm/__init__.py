"""vLLM's KV connector over kvxfer, out of tree: `kv_connector_module_path="kvxfer.integrations.vllm"`.

`ledger` decides about requests on the scheduler's side, `transfers` moves their blocks on the worker's; neither imports
vLLM. `connector` holds the class that vLLM makes, `drift` the differences between its versions.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvxferConnector"]


def __getattr__(name: str) -> Any:
    """The class is loaded when vLLM asks for it: everything else here works without vLLM."""
    if name != "KvxferConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvxfer.integrations.vllm.connector import KvxferConnector

    return KvxferConnector

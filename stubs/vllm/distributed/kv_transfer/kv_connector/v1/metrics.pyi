from typing import Any

class KVConnectorStats:
    data: dict[str, Any]
    def __init__(self, data: dict[str, Any] = ...) -> None: ...

class KVConnectorPromMetrics:
    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None: ...

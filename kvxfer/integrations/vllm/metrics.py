"""The connector's measurements in vLLM's words: statistics that workers send, a line in its log, Prometheus series.

| series | meaning |
|---|---|
| `vllm:kvxfer_bytes_total`, `vllm:kvxfer_tokens_total` | moved, by `way` (received, sent) |
| `vllm:kvxfer_seconds` | of one request, from the order to the end, by `way` |
| `vllm:kvxfer_failures_total` | transfers that ended without having moved everything, by `reason` (the error's code) |
| `vllm:kvxfer_expired_leases_total` | requests whose blocks nobody fetched in time |
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvxfer.integrations.vllm import results
from kvxfer.integrations.vllm.results import RECEIVED, SENT

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)


class KvxferStats(KVConnectorStats):
    """A `results` record on its way from the workers to the log."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or results.empty())

    def reset(self) -> None:
        self.data = results.empty()

    def aggregate(self, other: KVConnectorStats) -> KvxferStats:
        results.add(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return results.summary(self.data)

    def is_empty(self) -> bool:
        return results.is_empty(self.data)


class KvxferMetrics(KVConnectorPromMetrics):
    """The Prometheus series, with vLLM's labels for each engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._values = per_engine_labelvalues
        by_way, by_reason = [*labelnames, "way"], [*labelnames, "reason"]
        counter, histogram = metric_types[Counter], metric_types[Histogram]
        self._bytes = counter("vllm:kvxfer_bytes", "Bytes of KV cache moved.", labelnames=by_way)
        self._tokens = counter("vllm:kvxfer_tokens", "Tokens whose KV cache was moved.", labelnames=by_way)
        self._seconds = histogram(
            "vllm:kvxfer_seconds", "Seconds from the order to the end.", labelnames=by_way, buckets=SECONDS
        )
        self._failures = counter("vllm:kvxfer_failures", "Transfers that failed.", labelnames=by_reason)
        self._expired = counter(
            "vllm:kvxfer_expired_leases", "Requests whose blocks nobody fetched in time.", labelnames=labelnames
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self._values[engine_idx]
        for way in (RECEIVED, SENT):
            moved = transfer_stats_data[way]
            self._bytes.labels(*labels, way).inc(sum(moved["bytes"]))
            self._tokens.labels(*labels, way).inc(sum(moved["tokens"]))
            for seconds in moved["seconds"]:
                self._seconds.labels(*labels, way).observe(seconds)
        for reason, count in transfer_stats_data["failures"].items():
            self._failures.labels(*labels, reason).inc(count)
        self._expired.labels(*labels).inc(transfer_stats_data["expired"])

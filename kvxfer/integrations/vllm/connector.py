"""`KvxferConnector`: the class that vLLM makes, once for its scheduler and once in each worker.

Both sides are thin here: the scheduler's decisions are `scheduler` and `ledger`, the worker's transfers `worker` and
`transfers`. They share nothing but the `Metadata` of each step and what workers say about where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvxfer.errors import UsageError
from kvxfer.geometry import fingerprint_of
from kvxfer.integrations.vllm import drift
from kvxfer.integrations.vllm.caches import Caches
from kvxfer.integrations.vllm.ledger import EngineInfo
from kvxfer.integrations.vllm.metrics import KvxferMetrics, KvxferStats
from kvxfer.integrations.vllm.orders import Orders
from kvxfer.integrations.vllm.params import FORMAT, Rank
from kvxfer.integrations.vllm.scheduler import Scheduler
from kvxfer.integrations.vllm.settings import LAYERWISE, Settings
from kvxfer.integrations.vllm.worker import Worker, channel_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass
class Metadata(KVConnectorMetadata):
    """From the scheduler's side to the workers, once for each step."""

    orders: Orders = field(default_factory=Orders)


@dataclass
class Whereabouts(KVConnectorHandshakeMetadata):
    """From a worker to the scheduler's side when the engine starts."""

    rank: Rank


@dataclass
class News(KVConnectorWorkerMetadata):
    """The same from workers that found their daemon later."""

    ranks: dict[int, Rank]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> News:
        assert isinstance(other, News)
        return News({**self.ranks, **other.ranks})


class KvxferConnector(KVConnectorBase_V1, SupportsHMA):
    """One connector for pull, push and layer-wise transfers; see `Settings` for `kv_connector_extra_config`."""

    _cache_hit_source = drift.hit_source()

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = Settings.of(transfer.kv_connector_extra_config or {})
        self._groups = drift.transfer_groups(kv_cache_config)
        drift.require_failures_can_be_told(len(self._groups))
        stages = vllm_config.parallel_config.pipeline_parallel_size
        if stages > 1:
            raise UsageError(
                "stages of a pipeline are not served", field="pipeline_parallel_size", value=stages, limit=1
            )
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(self._settings, self._engine())
        else:
            parallel = vllm_config.parallel_config
            self._rank = parallel.rank % (parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
            channel = channel_of(transfer.engine_id, self._rank)
            self._worker = Worker(self._settings, channel=channel, rank=self._rank)

    def _engine(self) -> EngineInfo:
        config, transfer = self._vllm_config, self._vllm_config.kv_transfer_config
        parallel = config.parallel_config
        groups = self._kv_cache_config.kv_cache_groups
        return EngineInfo(
            id=transfer.engine_id,
            produces=transfer.is_kv_producer,
            consumes=transfer.is_kv_consumer,
            compatibility=self._compatibility(),
            block_tokens=tuple(groups[group].kv_cache_spec.block_size for group in self._groups),
            workers=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
        )

    def _compatibility(self) -> str:
        """What must be equal on both sides, where the geometry of the caches does not say it."""
        return fingerprint_of(**self._model(), vllm=drift.VERSION, format=str(FORMAT), groups=str(len(self._groups)))

    def _model(self) -> dict[str, str]:
        model = self._vllm_config.model_config
        return {
            "model": _plain(str(model.model).rstrip("/").rpartition("/")[2]),
            "revision": _plain(str(model.revision or "")),
            "dtype": _plain(str(model.dtype)),
            "cache_dtype": _plain(str(self._vllm_config.cache_config.cache_dtype)),
            "quantisation": _plain(str(model.quantization or "")),
        }

    def _of_groups(self, blocks: Any) -> list[list[int]]:
        return [blocks[group] for group in self._groups]

    # -- the scheduler's side --------------------------------------------------------------------------------------

    @property
    def _deciding(self) -> Scheduler:
        assert self._scheduler is not None, "this is a worker's connector"
        return self._scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[Any, Any]) -> None:
        ranks = [one.rank for _, one in sorted(metadata.items()) if one is not None]
        self._deciding.reached(dict(enumerate(ranks)) if len(ranks) == len(metadata) else {})

    def set_xfer_handshake_metadata(self, metadata: Mapping[Any, Any]) -> None:
        self.set_xfer_handshake_metadata_pp_aware(metadata)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._deciding.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._deciding.allocated(request, self._of_groups(blocks.get_block_ids()), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return Metadata(self._deciding.orders(scheduler_output, self._of_groups))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self._deciding.finished(request, self._of_groups(block_ids))

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def update_connector_output(self, connector_output: Any) -> None:
        self._deciding.ended(connector_output.finished_sending or set(), connector_output.finished_recving or set())
        if isinstance(found := connector_output.kv_connector_worker_meta, News):
            self._deciding.reached(found.ranks)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return self._groups

    # -- a worker's side -------------------------------------------------------------------------------------------

    @property
    def _moving(self) -> Worker:
        assert self._worker is not None, "this is the scheduler's connector"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        parallel = self._vllm_config.parallel_config
        caches = Caches(
            kv_caches,
            self._kv_cache_config,
            self._groups,
            backend=drift.backends(self._vllm_config, kv_caches),
            tp_rank=parallel.rank % parallel.tensor_parallel_size,
            tp_size=parallel.tensor_parallel_size,
            kv_heads_total=self._vllm_config.model_config.get_total_num_kv_heads(),
            fingerprint=fingerprint_of(**self._model()) if self._settings.enforce_handshake_compat else "",
        )
        self._moving.start(caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        rank = self._moving.reached
        if rank is not None:
            self._moving.news()  # told with this
        return None if rank is None else Whereabouts(rank)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        rank = self._moving.news()
        return None if rank is None else News({self._rank: rank})

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Metadata)
        self._moving.follow(connector_metadata.orders)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, Metadata)
        self._moving.stop_streams(kv_connector_metadata.orders.stopped)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads began with the step's metadata; none of them belongs to the forward pass that runs."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No request computes while it is loading."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._moving.layer_ready(layer_name)

    def wait_for_save(self) -> None:
        """Blocks that are still read are kept until `get_transfer_results` says otherwise."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        return drift.transfer_results(self._moving.finished(finished_req_ids))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        batch = self._moving.finished(finished_req_ids)
        self._failed_blocks = batch.failed_blocks
        return batch.sent, batch.received

    def get_block_ids_with_load_errors(self) -> set[int]:
        taken, self._failed_blocks = self._failed_blocks, set()
        return taken

    _failed_blocks: set[int] = set()  # noqa: RUF012  replaced, never changed

    def get_kv_connector_stats(self) -> KvxferStats | None:
        record = self._worker.record() if self._worker is not None else None
        return None if record is None else KvxferStats(record)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.stop()

    # -- what vLLM asks of the class -------------------------------------------------------------------------------

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A full graph would skip the hook after each layer."""
        return bool(extra_config.get("mode") == LAYERWISE)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvxferStats:
        return KvxferStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KvxferMetrics:
        return KvxferMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _plain(text: str) -> str:
    """Text that may be a part of a fingerprint."""
    return text.replace(";", "_").replace("=", "_")

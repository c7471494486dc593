"""The scheduler side: what vLLM's scheduler tells and asks, in the words of `ledger`, which decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kvxfer import logs
from kvxfer.integrations.vllm.ledger import Blocks, EngineInfo, Ledger, Request
from kvxfer.integrations.vllm.orders import Orders
from kvxfer.integrations.vllm.params import Rank
from kvxfer.integrations.vllm.settings import Settings

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

logger = logs.logger("vllm.kvxfer")  # below vllm's own, so that its handler prints it


class Scheduler:
    """One engine's scheduler side."""

    def __init__(self, settings: Settings, engine: EngineInfo) -> None:
        self._ledger = Ledger(settings, engine)

    def reached(self, ranks: Mapping[int, Rank]) -> None:
        self._ledger.reached(ranks)

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        return self._ledger.matched(_seen(request), computed)

    def allocated(self, request: Any, blocks: Blocks, external: int) -> None:
        self._ledger.allocated(_seen(request), blocks, external)

    def orders(self, output: SchedulerOutput, of_groups: Callable[[Any], Blocks]) -> Orders:
        """The orders for the step that was just scheduled; ``of_groups`` picks the blocks of groups that are moved."""
        counts = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            self._ledger.scheduled(
                new.req_id, new.num_computed_tokens, counts[new.req_id], of_groups(new.block_ids), fresh=True
            )
        known = output.scheduled_cached_reqs
        for index, request_id in enumerate(known.req_ids):
            self._ledger.scheduled(
                request_id,
                known.num_computed_tokens[index],
                counts[request_id],
                of_groups(blocks) if (blocks := known.new_block_ids[index]) else (),
                fresh=request_id in known.resumed_req_ids,
            )
        self._ledger.preempted(output.preempted_req_ids or set())
        for text in self._ledger.take_warnings():
            logger.warning("%s", text)
        return self._ledger.take_orders()

    def finished(self, request: Any, blocks: Blocks) -> tuple[bool, dict[str, Any] | None]:
        completed = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        return self._ledger.finished(_seen(request), blocks, request.num_computed_tokens, completed=completed)

    def ended(self, sent: set[str], received: set[str]) -> None:
        self._ledger.ended(sent, received)


def _seen(request: Any) -> Request:
    return Request(id=request.request_id, prompt_tokens=request.num_prompt_tokens, params=request.kv_transfer_params)

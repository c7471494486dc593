"""What the scheduler side decides about each request. Pure: no vLLM, no clock, no I/O; `scheduler.py` feeds it.

The states of a request, on the side that decodes:

    announced --matched--> wanted --allocated--> loading --received--> over
        \\---------- aborted, or nothing to load ----------> dropped

and on the side that computes the prompt:

    computing --last tokens scheduled--> streaming --\\
        \\------------- finished ---------------------> kept --sent--> over
         \\---- aborted, preempted: nothing was given away ----> over

"loading", "streaming" and "kept" end in the worker, which gives each of them a deadline; vLLM has none for them.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvxfer.errors import GeometryMismatch, KvxferError, UsageError
from kvxfer.integrations.vllm.orders import Orders, Receive, SendOrder, Stream, Table
from kvxfer.integrations.vllm.params import Meeting, Rank, Remote, unavailable
from kvxfer.integrations.vllm.settings import LAYERWISE, Settings

Blocks = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What this engine is: its id, what it may do, what it must have in common with others, tokens in a block of each
    group of layers, and how many workers there are.
    """

    id: str
    produces: bool
    consumes: bool
    compatibility: str
    block_tokens: tuple[int, ...]
    workers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request as vLLM's scheduler knows it. ``params`` is its own dict: what was begun is noted there, so that it is
    not begun twice.
    """

    id: str
    prompt_tokens: int
    params: MutableMapping[str, Any] | None


@dataclass(slots=True, kw_only=True)
class Prompt:
    """A prompt that is computed here for a decode engine that waits already."""

    tokens: int
    meeting: Meeting
    blocks: list[list[int]] = field(default_factory=list)


class Ledger:
    """Every request that this connector has to do with, and the orders for the next step."""

    def __init__(self, settings: Settings, engine: EngineInfo) -> None:
        self._settings = settings
        self._engine = engine
        self._orders = Orders()
        self._computed: dict[str, int] = {}  # tokens that decode had itself, when it was last asked
        self._prompts: dict[str, Prompt] = {}
        self._streaming: set[str] = set()
        self._ranks: dict[int, Rank] = {}
        self.loading: set[str] = set()
        self.kept: set[str] = set()
        self.warnings: list[str] = []  # for the log; `take_warnings`

    # -- workers ---------------------------------------------------------------------------------------------------

    def reached(self, ranks: Mapping[int, Rank]) -> None:
        """These workers say where they are."""
        self._ranks.update(ranks)

    def take_orders(self) -> Orders:
        """What is to be done in the step that comes; asked once for each."""
        taken, self._orders = self._orders, Orders()
        return taken

    def take_warnings(self) -> list[str]:
        taken, self.warnings = self.warnings, []
        return taken

    def ended(self, sent: set[str], received: set[str]) -> None:
        """What the workers report as over."""
        self.kept -= sent
        self.loading -= received

    # -- decode ----------------------------------------------------------------------------------------------------

    def matched(self, request: Request, computed: int) -> tuple[int, bool]:
        """How many tokens beyond ``computed`` come from elsewhere, and whether they are waited for."""
        if not _wants_blocks(request):
            return 0, False
        self._computed[request.id] = computed
        count = self._reach(request) - computed
        if count <= 0 or count < self._settings.kv_recompute_threshold:
            return 0, False
        return count, True

    def _reach(self, request: Request) -> int:
        """How many tokens of the prompt the other side has; all of them, when it does not say so properly."""
        assert request.params is not None
        tokens = request.params.get("remote_num_tokens")
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens <= 0:
            return request.prompt_tokens
        return min(request.prompt_tokens, tokens)

    def allocated(self, request: Request, blocks: Blocks, external: int) -> None:
        """These blocks were given to a request, ``external`` tokens of which come from elsewhere."""
        if request.params is None:
            return
        if not _wants_blocks(request):
            self._begin_prompt(request)
            return
        request.params["do_remote_prefill"] = False  # one transfer for each request
        computed = self._computed.pop(request.id, 0)
        if external <= 0:
            self._drop(request)
            return
        stop = computed + external
        tables = tuple(
            Table.of(group, size, computed, stop) for group, size in zip(blocks, self._engine.block_tokens, strict=True)
        )
        self._orders.receive[request.id] = self._receive(request, tables)
        self.loading.add(request.id)

    def _receive(self, request: Request, tables: tuple[Table, ...]) -> Receive:
        """Blocks are waited for in any case: what is refused fails as a transfer does, so that the policy decides."""
        assert request.params is not None
        try:
            if not self._engine.consumes:
                raise UsageError("this engine is a kv_producer: it takes no blocks", field="kv_role")
            if "transfer_id" in request.params:
                meeting = Meeting.from_params(request.params, prefill=False)
                return Receive(remote=None, tables=tables, meeting=meeting)
            remote = Remote.from_params(request.params)
            self._check(remote)
        except KvxferError as error:
            return Receive(remote=None, tables=tables, refused=f"{error.code}: {error}")
        return Receive(remote=remote, tables=tables)

    def _check(self, remote: Remote) -> None:
        ours, theirs = self._engine.compatibility, remote.compatibility
        if self._settings.enforce_handshake_compat and ours != theirs:
            raise GeometryMismatch(
                f"the engines are unlike: {difference(theirs, ours)}; nothing was moved",
                field="compatibility",
                hint="enforce_handshake_compat=false in kv_connector_extra_config overrides this",
            )

    def _drop(self, request: Request) -> None:
        """Computed elsewhere, and not fetched: the other side must not wait for its lease."""
        assert request.params is not None
        if "transfer_id" in request.params:
            return  # nobody keeps anything: the other side's push finds no offer, and ends
        try:
            self._orders.dropped.append(Remote.from_params(request.params))
        except KvxferError as error:
            self.warnings.append(f"request {request.id}: {error}")

    # -- prefill ---------------------------------------------------------------------------------------------------

    def _begin_prompt(self, request: Request) -> None:
        """A prompt whose layers are to be written as they come, if that is asked for."""
        params = request.params
        if not params or not params.get("do_remote_decode") or self._settings.mode != LAYERWISE:
            return
        if "transfer_id" not in params or request.id in self._prompts or not self._engine.produces:
            return
        try:
            meeting = Meeting.from_params(params, prefill=True)
        except UsageError as error:
            self.warnings.append(f"request {request.id}: {error}")
            return
        self._prompts[request.id] = Prompt(tokens=request.prompt_tokens, meeting=meeting)

    def scheduled(self, request_id: str, computed: int, count: int, blocks: Blocks, *, fresh: bool) -> None:
        """The step that comes computes ``count`` tokens after ``computed``; ``blocks`` are new, or all if ``fresh``."""
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return
        if fresh:
            prompt.blocks = [list(group) for group in blocks]
        else:
            for known, new in zip(prompt.blocks, blocks, strict=False):  # nothing, when the last block had room
                known.extend(new)
        if computed + count < prompt.tokens:
            return
        tables = tuple(
            Table.of(group, size, 0, prompt.tokens)
            for group, size in zip(prompt.blocks, self._engine.block_tokens, strict=True)
        )
        self._orders.stream[request_id] = Stream(tables=tables, meeting=prompt.meeting)
        self._streaming.add(request_id)
        del self._prompts[request_id]

    def preempted(self, request_ids: set[str]) -> None:
        """Their blocks are taken away before the step that comes."""
        for request_id in request_ids & self._streaming:
            self._orders.stopped.add(request_id)
            self._streaming.discard(request_id)

    def finished(
        self, request: Request, blocks: Blocks, computed: int, *, completed: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over: whether its blocks are kept, and what the router is told."""
        self._computed.pop(request.id, None)
        self._prompts.pop(request.id, None)
        if _wants_blocks(request):  # aborted before it was scheduled
            assert request.params is not None
            request.params["do_remote_prefill"] = False
            self._drop(request)
            return False, None
        if request.id in self._streaming:
            self._streaming.discard(request.id)
            self.kept.add(request.id)
            if not completed:
                self._orders.cancelled.add(request.id)
            return True, None  # the worker says when the last byte has left
        if not request.params or not request.params.get("do_remote_decode") or not completed:
            return False, None
        if self._settings.mode == LAYERWISE and "transfer_id" in request.params:
            return False, None  # it could not be streamed; decode waits already, until its deadline
        return self._hand_over(request, blocks, computed)

    def _hand_over(self, request: Request, blocks: Blocks, computed: int) -> tuple[bool, dict[str, Any] | None]:
        if not self._engine.produces:
            return False, unavailable(f"engine {self._engine.id} is a kv_consumer: it hands over no blocks")
        if len(self._ranks) < self._engine.workers:
            missing = self._engine.workers - len(self._ranks)
            return False, unavailable(
                f"{missing} of the {self._engine.workers} workers of engine {self._engine.id} have not reached the "
                "daemon of their node"
            )
        tables = tuple(
            Table.of(group, size, 0, computed) for group, size in zip(blocks, self._engine.block_tokens, strict=True)
        )
        if not any(table.tokens for table in tables):
            return False, None
        self._orders.send[request.id] = SendOrder(tables=tables, mode=self._settings.mode)
        self.kept.add(request.id)
        remote = Remote(
            engine_id=self._engine.id,
            request_id=request.id,
            tokens=computed,
            mode=self._settings.mode,
            compatibility=self._engine.compatibility,
            ranks=tuple(self._ranks[number] for number in sorted(self._ranks)),
        )
        return True, remote.to_params()


def _wants_blocks(request: Request) -> bool:
    return bool(request.params and request.params.get("do_remote_prefill"))


def difference(theirs: str, ours: str) -> str:
    """The parts "name=value" in which two texts of `fingerprint_of` differ, in words."""
    halves = [dict(part.partition("=")[::2] for part in text.split(";")) for text in (theirs, ours)]
    names = [name for name in sorted({*halves[0], *halves[1]}) if halves[0].get(name) != halves[1].get(name)]
    told = [f"{name} is {halves[0].get(name, '')!r} at prefill, {halves[1].get(name, '')!r} here" for name in names]
    return ", ".join(told)[:1000] or "prefill says nothing about itself"

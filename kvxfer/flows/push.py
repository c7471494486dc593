"""Prefill's side of a push: claim the other side's offer (or a landing of its daemon), write layer by layer, commit.

One rendezvous per request; from then on each layer is one submit with its notification riding behind the bytes.
Leaving the block commits; an exception aborts: every write is ended first, then the other side is told.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from kvxfer.coverage import box_of, common_elements
from kvxfer.dataplane.plane import WorkRequest
from kvxfer.dataplane.transfer import Transfer, TransferGroup, nothing_to_move, settle_within
from kvxfer.descriptors import RemoteDescriptor, Ticket
from kvxfer.errors import (
    ClosedError,
    GeometryMismatch,
    KvxferError,
    LeaseExpired,
    OutOfRange,
    OverlapError,
    PeerLost,
    ProtocolError,
    TransferCancelled,
    TransferTimeout,
    UsageError,
    ended_by_other,
)
from kvxfer.flows.control import ClaimHandle
from kvxfer.flows.exchange import (
    BLOCKS_INLINE_MAX,
    LayerPart,
    PeerImports,
    TransferOffer,
    complete_plan,
    from_peer,
    negotiate,
    of_layer,
    off_loop,
    prepared_layer,
    unpack_map,
)
from kvxfer.flows.tickets import claim_of
from kvxfer.geometry import BlockTable, CacheLayout
from kvxfer.memory.region import KVCache
from kvxfer.native.engine import OpKind
from kvxfer.planner import Plan, contiguous_layout
from kvxfer.tasks import NOTIFYING, ROOM, TRANSFERRING, Deadline
from kvxfer.wire import tags
from kvxfer.wire.messages import Claim, Land, PostingEvent

if TYPE_CHECKING:
    from kvxfer.client import Client

LAYERS_IN_FLIGHT_MAX = 8
PLANS_KEPT_MAX = 8
COMMITTED = "committed"  # why an owner withdraws an offer that has reached its aim


class Push:
    """``async with client.push(...) as tx: await tx.layer(i)`` for each layer, in any order.

    `layer` returns as soon as the layer is in the engine's hands (at most `LAYERS_IN_FLIGHT_MAX` at a time); its memory
    must stay as it is until the block is left. ``bytes_done`` and ``transport`` tell what was moved and how.

    A layer may also go in ranges of positions, as a chunked prefill computes them: ``tx.layer(i, range(0, 512))``, and
    the table may grow meanwhile (`extend`). ``segments`` and ``seconds`` (from entering to the commit) tell the rest.

    The push writes what it has in common with the offer; of a layer that the offer does not want, nothing. ``covered``
    is True when other pushes write all of that: then this one moves nothing, and leaving its block is a success.
    """

    def __init__(
        self,
        client: Client,
        request_id: str,
        *,
        to: Sequence[str],
        ticket: Ticket | None,
        cache: KVCache,
        table: BlockTable,
        wait_s: float,
        timeout: float,
        land: bool,
        priority: int,
    ) -> None:
        self._client = client
        self._to = tuple(to)
        self._ticket = ticket
        self._cache = cache
        self._table = table
        self._wait_s = wait_s
        self._timeout = timeout
        self._land = land
        self._priority = priority
        self._claim: ClaimHandle | None = None
        self._peer: TransferOffer | None = None
        self._plan: Plan | None = None
        self._deadline: Deadline | None = None
        self._transfers: TransferGroup | None = None  # once there is a plan
        self._room = asyncio.Semaphore(LAYERS_IN_FLIGHT_MAX)
        self._reaching = PeerImports()
        self._entered = False
        self._layers: set[int] = set()
        self._error: KvxferError | None = None
        self._committing = False
        self._committed_there = False  # the other side says so; our acknowledgement may still be on its way
        self._ended_by: KvxferError | None = None
        self._chunks: dict[int, _Chunks] = {}  # layers that are written in ranges
        self._plans: OrderedDict[range, Plan] = OrderedDict()  # of the latest ranges
        self._short = False  # the table did not name all blocks at first
        self._began = 0.0
        self.request_id = request_id
        self.covered = False
        self.bytes_done = self.segments = 0
        self.seconds = 0.0
        self.transport = ""

    async def __aenter__(self) -> Push:
        if self._entered:
            raise UsageError("a push is entered once", hint="make another one")
        self._cache.require(self._client.plane)
        layout, known = self._cache.layout, _known(self._table, self._cache.layout)
        self._cache.check_table(known, may_repeat=True)
        self._short = known is not self._table
        self._entered = True
        self._began = asyncio.get_running_loop().time()
        deadline = self._deadline = Deadline.after(self._timeout)
        self._client.register_flow(self, self._client_closed)
        try:
            body = await self._rendezvous(deadline)
            if self.covered:
                return self
            self._peer = await self._read(body)
            plan = await negotiate(
                *(layout, _filled(self._table, layout), self._peer.layout, self._peer.table),
                ignore_fingerprint=self._client.config.ignore_fingerprint,
                within=box_of(self._peer.layout, self._peer.table),
            )
            self._require_granted(plan)
            self._raise_if_failed()
            self.transport = await self._reaching.reach(self._client.plane, self._cache, self._peer, deadline)
            self._raise_if_failed()
            self._transfers = self._client.plane.group(deadline.require("a layer was written", TRANSFERRING))
            self._plan = plan
        except BaseException as error:
            await self._abort(error)
            if isinstance(error, TransferTimeout):
                self._raise_if_failed()  # what ended it, if it was not the deadline
            raise
        return self

    def _require_granted(self, plan: Plan) -> None:
        """The daemon of the offer means what we mean: it has granted exactly what this push writes."""
        granted = () if self._claim is None else self._claim.boxes
        size = sum(box.elements for box in granted)
        if plan.box.elements == common_elements([plan.box], granted) == size if granted else plan.complete:
            return
        raise GeometryMismatch(
            "the daemons of this push and of its offer do not agree on what it writes",
            source=str(plan.box),
            target="; ".join(map(str, granted)) or "all of it",
            hint="upgrade the daemons of both nodes",
        )

    async def layer(self, index: int, tokens: range | None = None) -> Transfer:
        """Write layer ``index`` (from 0, in our cache); the other side is told once its bytes are there. Waits while
        `LAYERS_IN_FLIGHT_MAX` are in flight.

        ``tokens``: only these positions of it, counted as the table's ``first_token`` is; each of them once, in any
        order. The other side is told when all of them are there.

        Raises: `UsageError` (no such layer, or given before), `OverlapError` for a position that was given before,
        `OutOfRange` for one that the table does not have, or of which it does not know the block yet (see `extend`);
        `ClosedError` outside the block; why the push has failed (an earlier layer, or the other side), and
        `TransferTimeout` at its deadline. What becomes of this layer is the transfer's error.
        """
        if tokens is not None or self._short:
            return await self._chunk(index, self._positions if tokens is None else tokens)
        plan, peer, deadline = self._require(index)
        if index in self._chunks:
            raise OverlapError("parts of this layer were already pushed", field="layer", value=index)
        self._layers.add(index)
        if plan is None or peer is None or self._number(index) not in plan.box.layers:
            return nothing_to_move(self._client.plane, self.request_id)
        started = False
        try:
            parts = await prepared_layer(plan, index, OpKind.PUT, self._cache, peer, self._client.config.segments_max)
            if self._room.locked():
                async with deadline.bound(f"there was room for layer {index}", ROOM):
                    await self._room.acquire()
            else:
                await self._room.acquire()  # at once
            try:
                self._raise_if_failed()
                transfer = self._submit(index, parts, peer, deadline)
                started = True
            finally:
                if not started:
                    self._room.release()
        finally:
            if not started:
                self._layers.discard(index)
        return transfer

    def extend(self, blocks: Iterable[int]) -> None:
        """Add blocks of our own that did not exist yet when the push began: they follow those that the table names.

        Raises: `OutOfRange` for one that the cache does not have, `UsageError` for what is no block id, `ClosedError`
        outside the block, and why the push has failed.
        """
        self._raise_if_failed()
        if self._claim is None and not self.covered:
            raise ClosedError(f"the push of {self.request_id} is not open")
        old = self._table
        more = BlockTable.of([*old.blocks.tolist(), *blocks], old.tokens, old.first_token, first_slot=old.first_slot)
        self._cache.check_table(_known(more, self._cache.layout), may_repeat=True)
        self._table = more

    @property
    def _positions(self) -> range:
        return range(self._table.first_token, self._table.first_token + self._table.tokens)

    async def _chunk(self, index: int, tokens: range) -> Transfer:
        """Write some positions of a layer."""
        plan, peer, deadline = self._require(index)
        self._require_positions(tokens)
        chunks = self._chunks.setdefault(index, _Chunks(len(self._positions)))
        chunks.give(tokens)
        if chunks.complete:
            self._layers.add(index)
        if plan is None or peer is None or self._number(index) not in plan.box.layers:
            chunks.under_way -= 1
            return nothing_to_move(self._client.plane, self.request_id)
        started = False
        try:
            transfer = await self._write_chunk(index, tokens, chunks, (plan, peer, deadline))
            started = True
        finally:
            if not started:
                chunks.take_back(tokens)
                self._layers.discard(index)
        return transfer

    async def _write_chunk(
        self, index: int, tokens: range, chunks: _Chunks, how: tuple[Plan, TransferOffer, Deadline]
    ) -> Transfer:
        plan, peer, deadline = how
        part = await self._plan_of(plan, peer, tokens)
        parts = []
        if part is not None:
            parts = await prepared_layer(part, index, OpKind.PUT, self._cache, peer, self._client.config.segments_max)
        if not parts:
            transfer = nothing_to_move(self._client.plane, self.request_id)
        else:
            async with deadline.bound(f"there was room for layer {index}", ROOM):
                await self._room.acquire()
            try:
                self._raise_if_failed()
                transfer = self._start_layer(index, self._work(parts, peer), deadline)
            except BaseException:
                self._room.release()
                raise
        transfer.on_settled(partial(self._chunk_settled, index, chunks))
        return transfer

    async def _plan_of(self, plan: Plan, peer: TransferOffer, tokens: range) -> Plan | None:
        """The plan of these positions, which is the same for each layer; None when the offer wants none of them."""
        start, stop = max(tokens.start, plan.box.tokens.start), min(tokens.stop, plan.box.tokens.stop)
        wanted = range(start, max(start, stop))
        if not wanted:
            return None
        found = self._plans.get(wanted)
        if found is None:
            layout, table = self._cache.layout, _known(self._table, self._cache.layout)
            found = await off_loop(
                len(table.blocks) + len(peer.table.blocks) > BLOCKS_INLINE_MAX,
                partial(
                    complete_plan,
                    *(layout, table, peer.layout, peer.table),
                    ignore_fingerprint=self._client.config.ignore_fingerprint,
                    within=replace(plan.box, tokens=wanted),
                ),
            )
            self._plans[wanted] = found
            while len(self._plans) > PLANS_KEPT_MAX:
                self._plans.popitem(last=False)
        return found

    def _require_positions(self, tokens: object) -> None:
        own = self._positions
        if not isinstance(tokens, range) or tokens.step != 1 or tokens.stop < tokens.start:
            hint = "range(512, 1024) are 512 positions"
            raise UsageError("tokens is a range of positions", field="tokens", value=repr(tokens)[:40], hint=hint)
        if tokens.start < own.start or tokens.stop > own.stop:
            raise OutOfRange(
                "the table does not have these positions",
                field="tokens",
                value=f"{tokens.start}..{tokens.stop}",
                limit=f"{own.start}..{own.stop}",
            )
        known = _known(self._table, self._cache.layout)
        if tokens and tokens.stop > known.first_token + known.tokens:
            raise OutOfRange(
                "the blocks of these positions are not known yet",
                field="tokens",
                value=f"{tokens.start}..{tokens.stop}",
                limit=f"{own.start}..{known.first_token + known.tokens}",
                hint="name them with extend(blocks) first",
            )

    def _chunk_settled(self, index: int, chunks: _Chunks, done: Transfer) -> None:
        """When all positions of a layer are there the other side is told, behind the last of them."""
        chunks.under_way -= 1
        if not chunks.under_way and chunks.complete and self._plan is not None and self._claim is not None:
            tag = tags.pack(tags.LAYER, self._claim.claim, self._number(index))
            self._tell_later(done, tag, self._plan.layer_elements)

    def _number(self, index: int) -> int:
        """What both sides call one of our layers."""
        return self._cache.layout.geometry.first_layer + index

    async def layers(self) -> None:
        """Write all layers, first to last. Raises: what `layer` raises."""
        for index in range(self._cache.layout.geometry.layers):
            await self.layer(index)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            await self._abort(error)
            return
        try:
            await self._commit()
        except BaseException as failure:
            await self._abort(failure)
            raise

    # -- rendezvous -----------------------------------------------------------------------------------------

    async def _rendezvous(self, deadline: Deadline) -> bytes:
        """Claim the offer, or a landing of the daemon; what its owner says about it."""
        control = self._client.control
        request: Claim | Land
        key, wait_s = self.request_id, deadline.wait(self._wait_s)
        if self._land:
            layout, table, length = landing_layout(self._cache.layout, self._table)
            wanted = msgpack.packb({"layout": layout.to_dict(), "table": table.to_dict()})
            lease_s = self._client.config.lease_s
            request = Land(node=self._to, key=key, length=length, body=wanted, lease_s=lease_s, wait_s=wait_s)
        else:
            mine = (box_of(self._cache.layout, self._table),)
            request = claim_of(self._ticket, "offer") if self._ticket else Claim(node=self._to, kind="offer", key=key)
            request = replace(request, wait_s=wait_s, boxes=mine)
        claim, body = await control.claim(request, deadline, self._on_claim)
        self.covered = not claim.claim
        self._claim = None if self.covered else claim
        return body

    async def _read(self, body: bytes) -> TransferOffer:
        if not self._land:
            return await TransferOffer.receive(body)
        layout, table, _ = landing_layout(self._cache.layout, self._table)
        with from_peer("landing"):
            descriptor = RemoteDescriptor.from_dict(unpack_map(body, "landing").get("descriptor", {}))
        return TransferOffer(
            layout=layout, table=table, descriptors=(descriptor,), check=self._client.config.integrity
        ).require_inside()

    def _on_claim(self, event: PostingEvent) -> None:
        if event.what == "orphaned":
            return  # the data path decides: its own end is noticed by the engine
        if event.what == "lost":
            self._offer_ended(PeerLost(f"the worker that offered {self.request_id} died"))
        elif event.what in ("withdrawn", "expired"):
            code = {"expired": LeaseExpired.code}.get(event.what, event.code)
            self._committed_there |= self._committing and event.detail == COMMITTED
            why = f": {event.detail}" if event.detail else ""
            self._offer_ended(ended_by_other(code, f"the offer {self.request_id} was {event.what}{why}"))

    def _offer_ended(self, error: KvxferError) -> None:
        """Once the commit is on its way the data path decides: this message may have overtaken its acknowledgement."""
        if self._committing:
            self._ended_by = self._ended_by or error
        else:
            self._fail(error)

    # -- layers ---------------------------------------------------------------------------------------------

    def _require(self, index: int) -> tuple[Plan | None, TransferOffer | None, Deadline]:
        ready = self.covered or not (self._plan is None or self._claim is None or self._peer is None)
        if not ready or self._deadline is None:
            self._raise_if_failed()
            raise ClosedError(f"the push of {self.request_id} is not open")
        layers = self._cache.layout.geometry.layers
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < layers:
            raise UsageError("no such layer", field="layer", value=repr(index)[:20], limit=layers - 1)
        if index in self._layers:
            raise UsageError("this layer was already pushed", field="layer", value=index)
        self._raise_if_failed()
        return self._plan, self._peer, self._deadline

    def _submit(self, index: int, parts: Sequence[LayerPart], peer: TransferOffer, deadline: Deadline) -> Transfer:
        assert self._claim is not None
        assert self._plan is not None
        tag = tags.pack(tags.LAYER, self._claim.claim, self._number(index))
        notice = (tag, self._plan.layer_elements)
        work = self._work(parts, peer)
        if len(work) == 1:  # told behind the bytes; when there are several submits, by one of its own afterwards
            work[0].notify = notice
        transfer = self._start_layer(index, work or [self._bare_notification(*notice)], deadline)
        if len(parts) > 1:
            transfer.on_settled(lambda done: self._tell_later(done, *notice))
        return transfer

    def _work(self, parts: Sequence[LayerPart], peer: TransferOffer) -> list[WorkRequest]:
        return [
            WorkRequest(
                kind=OpKind.PUT,
                region=part.region,
                descriptor=peer.descriptors[part.descriptor],
                segments=part.segments,
                moves=part.bytes,
                check=peer.check and part.bytes > 0,
            )
            for part in parts
        ]

    def _start_layer(self, index: int, work: list[WorkRequest], deadline: Deadline) -> Transfer:
        transfer = self._start(work, deadline.require(f"layer {index} was written", TRANSFERRING))
        for part in work:
            self.segments += 0 if part.segments is None else len(part.segments)
        transfer.on_settled(partial(self._layer_settled, index))
        return transfer

    def _start(self, work: Sequence[WorkRequest], timeout: float) -> Transfer:
        return self._client.plane.start(
            work, timeout=timeout, peer=self.request_id, priority=self._priority, group=self._transfers
        )

    def _layer_settled(self, index: int, done: Transfer) -> None:
        self._room.release()
        self.bytes_done += done.bytes_done
        if done.error is not None:
            self._fail(done.error if done.error is self._error else of_layer(done.error, index))

    def _bare_notification(self, tag: int, value: int) -> WorkRequest:
        assert self._peer is not None
        return WorkRequest(kind=OpKind.PUT, region=0, descriptor=self._peer.descriptors[0], notify=(tag, value))

    def _tell_later(self, done: Transfer, tag: int, value: int) -> None:
        if done.error is not None or self._error is not None or self._deadline is None:
            return
        try:
            self._notify(tag, value, self._deadline.require("the other side was told", NOTIFYING))
        except KvxferError as error:
            self._fail(error)

    def _notify(self, tag: int, value: int, timeout: float) -> Transfer:
        """A notification without bytes, on its way like a layer."""
        notice = self._start([self._bare_notification(tag, value)], timeout)
        notice.on_settled(self._notice_settled)
        return notice

    def _notice_settled(self, done: Transfer) -> None:
        if done.error is not None:
            self._fail(done.error)

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    # -- the end ----------------------------------------------------------------------------------------------

    async def _commit(self) -> None:
        self._raise_if_failed()
        if self.covered:
            self._finish("done", None)
            return
        if self._claim is None or self._deadline is None or self._plan is None:
            raise ClosedError(f"the push of {self.request_id} is not open")
        layers = self._cache.layout.geometry.layers
        if len(self._layers) < layers:
            # The other side must never decode from a cache with holes.
            raise UsageError(
                f"the push of {self.request_id} was left before all its layers were written; nothing is committed",
                layers=layers,
                written=len(self._layers),
                positions_missing=sum(each.total - each.given for each in self._chunks.values()) or None,
                hint="call layer(i) for every layer, or layers(), inside the block",
            )
        await self._drain_running()
        tag = tags.pack(tags.COMMIT, self._claim.claim, 0)
        left = self._deadline.require("the push was committed", NOTIFYING)
        self._committing = True
        try:
            await self._notify(tag, len(self._plan.box.layers), left)
        except KvxferError:
            if not self._committed_there:
                if self._ended_by is not None:
                    raise self._ended_by from None
                raise
        self.seconds = asyncio.get_running_loop().time() - self._began
        self._finish("done", None)

    @property
    def _running(self) -> tuple[Transfer, ...]:
        return () if self._transfers is None else tuple(self._transfers.running)

    async def _drain_running(self) -> None:
        while running := self._running:
            await running[0].wait_settled()
            self._raise_if_failed()

    def _fail(self, error: KvxferError) -> None:
        if self._error is None:
            self._error = error
            self._reaching.end()
            for transfer in self._running:
                transfer.request_cancel(error)

    def _client_closed(self, error: KvxferError) -> Coroutine[Any, Any, None]:
        self._fail(error)
        return self._abort(error)

    async def _abort(self, cause: BaseException) -> None:
        error = (
            cause if isinstance(cause, KvxferError) else TransferCancelled(f"the push was aborted: {cause!r}", by="us")
        )
        self._fail(error)
        # Told only when nothing of ours moves any more; a peer that is frozen must not hold us here for ever.
        try:
            await settle_within(self._client.config.cancel_s * 2, self._running)
        finally:
            self._finish("cancelled" if isinstance(error, TransferCancelled) else "failed", error)

    def _finish(self, outcome: str, error: KvxferError | None) -> None:
        self._client.unregister_flow(self)
        if self._transfers is not None:
            self._transfers.close()
        if self._claim is None:
            return
        claim, self._claim = self._claim, None
        self._client.counted["pushes" if outcome == "done" else "push_failures"] += 1
        self._client.counted["pushed_bytes"] += self.bytes_done if outcome == "done" else 0
        if self._client.closed:
            return  # the link's end has settled it, and the engine's end has dropped the imports
        self._client.control.report_in_background(claim, outcome, error)
        if self._peer is not None:
            for descriptor in self._peer.descriptors:
                self._client.plane.drop_import(descriptor)


@dataclass(slots=True)
class _Chunks:
    """A layer that is written in ranges of positions: those that were given, ascending, and how many are under way."""

    total: int
    ranges: list[range] = field(default_factory=list)
    given: int = 0
    under_way: int = 0

    @property
    def complete(self) -> bool:
        return self.given == self.total

    def give(self, tokens: range) -> None:
        """Refuses what overlaps one of them."""
        place = bisect_left(self.ranges, tokens.start, key=lambda each: each.start)
        for other in self.ranges[max(0, place - 1) : place + 1]:
            if max(tokens.start, other.start) < min(tokens.stop, other.stop):
                raise OverlapError(
                    "some of these positions of the layer were already pushed",
                    field="tokens",
                    value=f"{tokens.start}..{tokens.stop}",
                    other=f"{other.start}..{other.stop}",
                )
        if tokens:
            self.ranges.insert(place, tokens)
        self.given += len(tokens)
        self.under_way += 1

    def take_back(self, tokens: range) -> None:
        if tokens:
            self.ranges.remove(tokens)
        self.given -= len(tokens)
        self.under_way -= 1


def _known(table: BlockTable, layout: CacheLayout) -> BlockTable:
    """The table as far as it names blocks: itself when it names all that its tokens need."""
    if not isinstance(table, BlockTable):
        return table  # the check of tables says so
    held = max(0, len(table.blocks) * layout.geometry.block_tokens - table.slot(layout.geometry.block_tokens))
    return table if table.tokens <= held else replace(table, tokens=held)


def _filled(table: BlockTable, layout: CacheLayout) -> BlockTable:
    """The table with block 0 in the place of those that it does not name: good for boxes, not for offsets."""
    block_tokens = layout.geometry.block_tokens
    missing = -(-(table.slot(block_tokens) + table.tokens) // block_tokens) - len(table.blocks)
    if missing <= 0:
        return table
    return replace(table, blocks=np.concatenate([table.blocks, np.zeros(missing, np.int64)]))


def landing_layout(source: CacheLayout, table: BlockTable) -> tuple[CacheLayout, BlockTable, int]:
    """How a request lies in a landing: its own geometry, all blocks in order and filled as they were, every layer in
    one piece. And its bytes.
    """
    block_tokens = source.geometry.block_tokens
    slot = table.slot(block_tokens)
    blocks = max(1, -(-(slot + table.tokens) // block_tokens))
    layout, length = contiguous_layout(source.geometry, blocks)
    ordered = BlockTable(
        blocks=np.arange(blocks, dtype=np.int64), tokens=table.tokens, first_token=table.first_token, first_slot=slot
    )
    if length <= 0:
        raise ProtocolError("a landing needs at least one byte")
    return layout, ordered, length

"""Prefill's side of a push: claim the other side's offer (or a landing of its daemon), write layer by layer, commit.

One rendezvous per request; from then on each layer is one submit with its notification riding behind the bytes.
Leaving the block commits; an exception aborts: every write is ended first, then the other side is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
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
    PeerLost,
    ProtocolError,
    TransferCancelled,
    TransferTimeout,
    UsageError,
    ended_by_other,
)
from kvxfer.flows.control import ClaimHandle
from kvxfer.flows.exchange import (
    LayerPart,
    Reaching,
    TransferOffer,
    from_peer,
    negotiate,
    of_layer,
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
COMMITTED = "committed"  # why an owner withdraws an offer that has reached its aim


class Push:
    """``async with client.push(...) as tx: await tx.layer(i)`` for each layer, in any order.

    `layer` returns as soon as the layer is in the engine's hands (at most `LAYERS_IN_FLIGHT_MAX` at a time); its memory
    must stay as it is until the block is left. ``bytes_done`` and ``transport`` tell what was moved and how.

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
        self._reaching = Reaching()
        self._entered = False
        self._layers: set[int] = set()
        self._error: KvxferError | None = None
        self._committing = False
        self._committed_there = False  # the other side says so; our acknowledgement may still be on its way
        self._ended_by: KvxferError | None = None
        self.request_id = request_id
        self.covered = False
        self.bytes_done = 0
        self.transport = ""

    async def __aenter__(self) -> Push:
        if self._entered:
            raise UsageError("a push is entered once", hint="make another one")
        self._cache.require(self._client.plane)
        self._cache.check_table(self._table, may_repeat=True)
        self._entered = True
        deadline = self._deadline = Deadline.after(self._timeout)
        self._client.enter(self, self._client_closed)
        try:
            body = await self._rendezvous(deadline)
            if self.covered:
                return self
            self._peer = await self._read(body)
            plan = await negotiate(
                *(self._cache.layout, self._table, self._peer.layout, self._peer.table),
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

    async def layer(self, index: int) -> Transfer:
        """Write layer ``index``; the other side is told once its bytes are there. Waits while too many are in
        flight.
        """
        plan, peer, deadline = self._require(index)
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

    def _number(self, index: int) -> int:
        """What both sides call one of our layers."""
        return self._cache.layout.geometry.first_layer + index

    async def layers(self) -> None:
        """Write all layers, first to last."""
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
        work = [
            WorkRequest(
                kind=OpKind.PUT,
                region=part.region,
                descriptor=peer.descriptors[part.descriptor],
                segments=part.segments,
                moves=part.bytes,
                # Told behind the bytes when they are all in one submit, else by a submit of its own afterwards.
                notify=notice if len(parts) == 1 else None,
                check=peer.check and part.bytes > 0,
            )
            for part in parts
        ] or [self._bare_notification(*notice)]
        transfer = self._start(work, deadline.require(f"layer {index} was written", TRANSFERRING))
        transfer.on_settled(partial(self._layer_settled, index))
        if len(parts) > 1:
            transfer.on_settled(lambda done: self._tell_later(done, *notice))
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
        self._client.leave(self)
        if self._transfers is not None:
            self._transfers.close()
        if self._claim is None:
            return
        claim, self._claim = self._claim, None
        self._client.counted["pushes" if outcome == "done" else "push_failures"] += 1
        self._client.counted["pushed_bytes"] += self.bytes_done if outcome == "done" else 0
        if self._client.closed:
            return  # the link's end has settled it, and the engine's end has dropped the imports
        self._client.control.settle_in_background(claim, outcome, error)
        if self._peer is not None:
            for descriptor in self._peer.descriptors:
                self._client.plane.forget(descriptor)


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

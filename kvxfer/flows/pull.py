"""Pull, decode's side: one request that reads from one or more tickets into the blocks of one cache, with one outcome.

The idea: what the target needs is a box, and so is what each publisher holds; every element is read from the first
ticket that holds it. What no ticket holds is refused before a byte moves. All tickets are claimed together, and however
the pull ends, each publisher is told once: released when everything was read, otherwise failed or cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvxfer.coverage import Box, box_of, describe, join
from kvxfer.dataplane.plane import WorkRequest
from kvxfer.dataplane.transfer import Transfer, settle_within
from kvxfer.descriptors import Ticket
from kvxfer.errors import (
    BusyError,
    GeometryMismatch,
    KvxferError,
    LeaseExpired,
    PeerError,
    PeerIncarnationMismatch,
    PeerLost,
    TransferCancelled,
    TransferError,
    TransferTimeout,
    UnknownTransfer,
    UsageError,
    ended_by_other,
)
from kvxfer.flows.caches import Caches, NamedCache, layers_of, named_caches
from kvxfer.flows.control import ClaimHandle
from kvxfer.flows.exchange import (
    Joined,
    JoinedPart,
    LayerPart,
    PeerImports,
    TransferOffer,
    negotiate,
    of_layer,
    prepared_layer,
)
from kvxfer.flows.tickets import claim_of
from kvxfer.geometry import BlockTable, check_same_model
from kvxfer.native.engine import OpKind
from kvxfer.planner import Plan
from kvxfer.tasks import NOTIFYING, TRANSFERRING, Deadline
from kvxfer.wire import tags
from kvxfer.wire.messages import PostingEvent

if TYPE_CHECKING:
    from kvxfer.client import Client

LAYERS_IN_FLIGHT_MAX = 8
SOURCES_MAX = 1024
# Of one operation, when a pull goes down in one piece: others keep their place in the window beside it. The first is
# smaller, so that bytes move while the rest is planned.
AT_ONCE_BYTES = 64 << 20
FIRST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """What a pull brought: bytes, tokens, layers, and how. ``bytes_by_source``: bytes from each ticket, in their order
    (0 where others brought all that one has). ``segments``: contiguous pieces that were read. ``seconds``: from the
    call to the last byte; ``waited_s`` of them until every ticket was claimed.
    """

    request_id: str
    bytes: int
    tokens: int
    layers: int
    transport: str
    bytes_by_source: tuple[int, ...]
    segments: int
    seconds: float
    waited_s: float


@dataclass(slots=True, eq=False)
class Source:
    """One ticket of a pull: its claim, what its publisher said, and what is read from there."""

    ticket: Ticket
    number: int
    claim: ClaimHandle | None = None
    peer: TransferOffer | None = None
    plans: list[tuple[NamedCache, TransferOffer, Plan]] = field(default_factory=list)
    reaching: PeerImports = field(default_factory=PeerImports)
    transport: str = ""
    bytes: int = 0


class Pull:
    """One fetch; `run` does it all. However it ends, the target blocks stay quarantined until no byte can move."""

    def __init__(
        self,
        client: Client,
        tickets: Sequence[Ticket],
        cache: Caches,
        table: BlockTable | None,
        *,
        timeout: float,
        on_layer: Callable[[int], None] | None,
        priority: int,
    ) -> None:
        self._client = client
        self._sources = [Source(ticket, number) for number, ticket in enumerate(_different(tickets))]
        self._request_id = tickets[0].request_id
        self._caches = named_caches(cache, table)
        self._layers = layers_of(self._caches)
        self._timeout = timeout
        self._on_layer = on_layer
        self._priority = priority
        self._running: list[Transfer] = []
        self._error: KvxferError | None = None
        self._at_fault: Source | None = None
        self._segments = 0
        self._claimed_at = self._read_at = 0.0

    async def run(self) -> Pulled:
        """Claim, plan, read every layer, release the publishers."""
        deadline = Deadline.after(self._timeout)
        for each in self._caches:
            each.cache.require(self._client.plane)
            each.cache.check_table(each.table)
        covered = [(each.cache.footprint, each.table) for each in self._caches]
        taken = self._client.reservations.acquire(covered, f"pull {self._request_id}")
        self._client.register_flow(self, self._client_closed)
        try:
            pulled = await self._claim_and_read(deadline)
        except BaseException:
            self._client.counted["pull_failures"] += 1
            raise
        else:
            self._client.counted["pulls"] += 1
            self._client.counted["pulled_bytes"] += pulled.bytes
            return pulled
        finally:
            self._client.unregister_flow(self)
            self._client.reservations.quarantine(taken, f"pull {self._request_id} is settling")
            self._client.release_when_settled(taken, self._running)

    async def _claim_and_read(self, deadline: Deadline) -> Pulled:
        began = asyncio.get_running_loop().time()
        try:
            await self._for_each(lambda source: self._claim(source, deadline))
            self._claimed_at = asyncio.get_running_loop().time()
            await self._plan()
            self._raise_if_failed()
            await self._for_each(lambda source: self._reach(source, deadline))
            await (self._read_at_once(deadline) if self._on_layer is None else self._read(deadline, self._on_layer))
            self._read_at = asyncio.get_running_loop().time()
            await self._for_each(lambda source: self._release(source, deadline))
        except BaseException as error:
            await self._abort(error)
            if isinstance(error, TransferTimeout):
                self._raise_if_failed()  # what ended it, if it was not the deadline
            raise
        for source in self._sources:
            self._settle(source, "done", None)
        by_source = tuple(source.bytes for source in self._sources)
        return Pulled(
            request_id=self._request_id,
            bytes=sum(by_source),
            tokens=max(each.table.tokens for each in self._caches),
            layers=self._layers,
            transport=",".join(dict.fromkeys(source.transport for source in self._sources if source.transport)),
            bytes_by_source=by_source,
            segments=self._segments,
            seconds=self._read_at - began,
            waited_s=self._claimed_at - began,
        )

    async def _for_each(self, call: Callable[[Source], Coroutine[Any, Any, None]]) -> None:
        """Run a step for all sources side by side. The first error ends the others' and says which source it was."""

        async def one(source: Source) -> None:
            with self._naming(source):
                await call(source)

        if len(self._sources) == 1:
            await one(self._sources[0])
            return
        try:
            async with asyncio.TaskGroup() as group:
                for source in self._sources:
                    group.create_task(one(source))
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None

    @contextmanager
    def _naming(self, source: Source) -> Iterator[None]:
        try:
            yield
        except KvxferError as error:
            raise self._of_source(error, source) from None

    def _of_source(self, error: KvxferError, source: Source) -> KvxferError:
        """The same error, which says now whose it was."""
        if self._error is None and self._at_fault is None:
            self._at_fault = source
        if len(self._sources) > 1 and "ticket" not in error.fields and error is not self._error:
            error.fields |= {"ticket": source.number, "request_id": source.ticket.request_id}
            error.message = f"source {source.number + 1} of {len(self._sources)}: {error.message}"
        return error

    # -- who holds what ---------------------------------------------------------------------------------------

    async def _claim(self, source: Source, deadline: Deadline) -> None:
        # Cancelled on the way, the publisher still has to hear that nobody will read.
        source.claim, body = await self._client.control.claim(
            claim_of(source.ticket, "ticket"), deadline, partial(self._on_claim, source), finish=True
        )
        source.peer = await TransferOffer.receive(body)

    async def _plan(self) -> None:
        """Decide what is read from where; refuses what the tickets do not hold together."""
        for each in self._caches:
            await self._plan_cache(each)

    async def _plan_cache(self, each: NamedCache) -> None:
        layout, table = each.cache.layout, each.table
        want = box_of(layout, table)
        lenient = self._client.config.ignore_fingerprint
        named = [(source, source.peer.named.get(each.name)) for source in self._sources if source.peer is not None]
        holders = [(source, offer) for source, offer in named if offer is not None]
        for source, offer in holders:
            with self._naming(source):
                check_same_model(offer.layout.geometry, layout.geometry, ignore_fingerprint=lenient)
        shares, missing = divide(want, [box_of(offer.layout, offer.table) for _, offer in holders])
        if missing or not holders:
            which = f"cache {each.name!r}: " if each.name else ""
            what = describe(missing, want) if holders else "no cache of this name"
            raise GeometryMismatch(
                f"{which}the {_tickets(len(named))} not hold what the target expects: {what}; nothing was moved",
                field="coverage",
                cache=each.name or None,
                hint="pull from the tickets of all ranks and stages that hold a part of the request",
            )
        for (source, offer), boxes in zip(holders, shares, strict=True):
            with self._naming(source):
                for box in boxes:
                    mapping = await negotiate(
                        *(offer.layout, offer.table, layout, table), ignore_fingerprint=lenient, within=box
                    )
                    source.plans.append((each, offer, mapping))

    async def _reach(self, source: Source, deadline: Deadline) -> None:
        assert source.peer is not None
        names: dict[str, None] = {}
        for each in self._caches:
            offer = source.peer.named.get(each.name)
            if offer is not None:
                names[await source.reaching.reach(self._client.plane, each.cache, offer, deadline)] = None
        source.transport = ",".join(names) if source.plans else ""

    # -- reading ----------------------------------------------------------------------------------------------

    async def _read(self, deadline: Deadline, on_layer: Callable[[int], None]) -> None:
        """Layer by layer, at most `LAYERS_IN_FLIGHT_MAX` at a time."""
        waiting: list[tuple[int, list[tuple[Source, Transfer]]]] = []
        for layer in range(self._layers):
            if len(waiting) >= LAYERS_IN_FLIGHT_MAX:
                await self._layer_done(*waiting.pop(0), on_layer)
            waiting.append((layer, await self._start_layer(layer, deadline)))
        for entry in waiting:
            await self._layer_done(*entry, on_layer)
        self._raise_if_failed()

    async def _start_layer(self, layer: int, deadline: Deadline) -> list[tuple[Source, Transfer]]:
        started = []
        for source in self._sources:
            parts = await self._parts(source, layer)
            self._raise_if_failed()
            if parts:
                left = deadline.require(f"layer {layer} was read", TRANSFERRING)
                started.append((source, self._start(source, parts, left)))
        return started

    async def _layer_done(
        self, layer: int, transfers: list[tuple[Source, Transfer]], on_layer: Callable[[int], None]
    ) -> None:
        for source, transfer in transfers:
            try:
                await transfer
            except KvxferError as error:
                raise (error if error is self._error else self._of_source(of_layer(error, layer), source)) from None
            source.bytes += transfer.bytes_done
        on_layer(layer)

    async def _read_at_once(self, deadline: Deadline) -> None:
        """Nobody wants to know of single layers: as few operations as there are pairs of memory, and nothing to do for
        the loop before the last of them has ended. What is large begins before all of it is planned.
        """
        began: list[tuple[Source, Transfer, list[JoinedPart]]] = []
        for source in self._sources:
            joined = Joined(self._client.config.segments_max, AT_ONCE_BYTES)
            for layer in range(self._layers):
                for part in await self._parts(source, layer):
                    joined.add(layer, part)
                self._raise_if_failed()
                if joined.bytes >= (AT_ONCE_BYTES if began else FIRST_BYTES) or (
                    layer == self._layers - 1 and joined.bytes
                ):
                    parts = joined.take()
                    left = deadline.require(f"layer {layer} was read", TRANSFERRING)
                    transfer = self._start(source, [each.part for each in parts], left)
                    began.append((source, transfer, parts))
        for source, transfer, parts in began:
            try:
                await transfer
            except KvxferError as error:
                raise (error if error is self._error else self._of_source(_of_part(error, parts), source)) from None
            source.bytes += transfer.bytes_done
        self._raise_if_failed()

    async def _parts(self, source: Source, layer: int) -> list[LayerPart]:
        """Those of one layer; the numbers of their descriptors count over all caches of the source."""
        peer, limit, found = source.peer, self._client.config.segments_max, []
        assert peer is not None
        for each, offer, plan in source.plans:
            if layer not in each.layers:
                continue
            parts = await prepared_layer(plan, layer - each.first, OpKind.GET, each.cache, offer, limit)
            before = _descriptors_before(peer, offer)
            found += [replace(part, descriptor=before + part.descriptor) for part in parts] if before else parts
        return found

    def _start(self, source: Source, parts: Sequence[LayerPart], timeout: float) -> Transfer:
        peer = source.peer
        assert peer is not None
        descriptors = peer.all_descriptors
        work = [
            WorkRequest(
                kind=OpKind.GET,
                region=part.region,
                descriptor=descriptors[part.descriptor],
                segments=part.segments,
                moves=part.bytes,
                check=peer.check,
            )
            for part in parts
        ]
        transfer = self._client.plane.start(
            work, timeout=timeout, peer=source.ticket.request_id, priority=self._priority
        )
        self._running.append(transfer)
        self._segments += sum(len(part.segments) for part in parts)
        return transfer

    # -- the end ----------------------------------------------------------------------------------------------

    async def _release(self, source: Source, deadline: Deadline) -> None:
        assert source.claim is not None
        assert source.peer is not None
        notice = WorkRequest(
            kind=OpKind.GET,
            region=0,
            descriptor=source.peer.descriptors[0],
            notify=(tags.pack(tags.RELEASE, source.claim.claim, 0), 0),
        )
        left = deadline.require("the publisher was released", NOTIFYING)
        try:
            await self._client.plane.start(
                [notice], timeout=left, peer=source.ticket.request_id, priority=self._priority
            )
        except (TransferError, PeerError):
            # Every byte is here; a publisher that just withdrew or went needs no release, and the settle message
            # tells the rest.
            return

    def _on_claim(self, source: Source, event: PostingEvent) -> None:
        name = source.ticket.request_id
        if event.what == "orphaned":
            return  # the data path decides
        if event.what == "lost":
            self._fail(self._of_source(PeerLost(f"the publisher of {name} died"), source))
        elif event.what in ("withdrawn", "expired"):
            code = LeaseExpired.code if event.what == "expired" else event.code
            error = ended_by_other(code, event.detail or f"the ticket was {event.what}")
            self._fail(self._of_source(error, source))

    def _fail(self, error: KvxferError) -> None:
        if self._error is None:
            self._error = error
            for source in self._sources:
                source.reaching.end()
            for transfer in tuple(self._running):
                transfer.request_cancel(error)

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    def _client_closed(self, error: KvxferError) -> Coroutine[Any, Any, None]:
        self._fail(error)
        return self._abort(error)

    async def _abort(self, cause: BaseException) -> None:
        error = (
            cause if isinstance(cause, KvxferError) else TransferCancelled(f"the pull was aborted: {cause!r}", by="us")
        )
        self._fail(error)
        try:
            await settle_within(self._client.config.cancel_s * 2, self._running)
        finally:
            for source in self._sources:
                self._settle_failed(source, error)

    def _settle_failed(self, source: Source, error: KvxferError) -> None:
        """A publisher that did nothing wrong is not told that it, or its consumer, was lost."""
        if self._at_fault not in (None, source) and not isinstance(error, TransferCancelled):
            error = TransferCancelled(f"the pull ended by another of its sources: {error.message}"[:500], by="us")
        self._settle(source, "cancelled" if isinstance(error, TransferCancelled) else "failed", error)

    def _settle(self, source: Source, outcome: str, error: KvxferError | None) -> None:
        claim, source.claim = source.claim, None
        if self._client.closed or claim is None:
            return  # the link's end has settled it, and the engine's end has dropped the imports
        self._client.control.report_in_background(claim, outcome, error)
        for descriptor in () if source.peer is None else source.peer.all_descriptors:
            self._client.plane.drop_import(descriptor)


def _descriptors_before(peer: TransferOffer, offer: TransferOffer) -> int:
    count = 0
    for each in (peer, *peer.more):
        if each.name == offer.name:
            break
        count += len(each.descriptors)
    return count


def _of_part(error: KvxferError, parts: Sequence[JoinedPart]) -> KvxferError:
    """The same error, which says whose layer's it was, as far as the engine names a part and a segment."""
    number, segment = error.fields.get("part", 0), error.fields.get("segment")
    if isinstance(number, int) and number < len(parts) and isinstance(segment, int):
        return of_layer(error, parts[number].layer_of(segment))
    return error


def divide(want: Box, held: Sequence[Box]) -> tuple[list[list[Box]], list[Box]]:
    """For each holder the boxes that are read from it, every element from the first that holds it; and what nobody
    holds.
    """
    left = [want] if want.elements else []
    shares = []
    for box in held:
        common = (piece.meet(box) for piece in left)
        shares.append(join(piece for piece in common if piece is not None))
        left = [rest for piece in left for rest in piece.without(box)]
    return shares, join(left)


def _different(tickets: Sequence[Ticket]) -> Sequence[Ticket]:
    if not 1 <= len(tickets) <= SOURCES_MAX:
        raise UsageError("a pull needs a ticket", field="tickets", value=len(tickets), limit=SOURCES_MAX)
    if len({(ticket.node_id, ticket.posting) for ticket in tickets}) < len(tickets):
        raise UsageError("a pull names a ticket twice", field="tickets")
    return tickets


def _tickets(count: int) -> str:
    return "ticket does" if count == 1 else f"{count} tickets together do"


async def release_unread(client: Client, ticket: Ticket, deadline: Deadline) -> None:
    """Tell the publisher that this consumer will not read: the same as a pull of nothing. What is over is over."""
    control = client.control
    try:
        claim, _ = await control.claim(claim_of(ticket, "ticket"), deadline, lambda event: None)
    except (UnknownTransfer, LeaseExpired, TransferCancelled, PeerLost, PeerIncarnationMismatch, BusyError):
        return  # nobody holds anything for us any more
    control.report_in_background(claim, "done", None)

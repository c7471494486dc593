"""Decode's side of a push: `Landing`, the memory that prefill peers write into, layer by layer. What has arrived and
what is missing is counted by `incoming`.

Everything that must not be forgotten happens in plain calls and callbacks, never behind an await: leaving the block
revokes the grants at once, and the blocks stay quarantined until the engine says that no peer can
move a byte.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvxfer.coverage import box_of
from kvxfer.descriptors import Ticket
from kvxfer.errors import (
    ClosedError,
    Incomplete,
    KvxferError,
    LeaseExpired,
    PeerLost,
    ProtocolError,
    Stalled,
    TransferTimeout,
    UnknownRegion,
    UsageError,
    ended_by_other,
)
from kvxfer.flows.control import ClaimHandle, PostingHandle
from kvxfer.flows.exchange import TransferOffer
from kvxfer.flows.incoming import Incoming, Writer
from kvxfer.geometry import BlockTable
from kvxfer.memory.region import KVCache, Region
from kvxfer.memory.reservations import Reservation
from kvxfer.native.engine import Event, EventKind
from kvxfer.tasks import OTHER_SIDE, TRANSFERRING, Deadline
from kvxfer.wire import tags
from kvxfer.wire.messages import PostingEvent

if TYPE_CHECKING:
    from kvxfer.client import Client

# A pusher that ends closes its data connection at once; why it ended comes through two daemons, a little later.
WHY_S = 1.0


class Landing:
    """``async with client.offer(...) as landing``: iterate it for layers as they arrive; it ends when all is committed.

    Several pushes may write it, each another part (see `Client.offer`). A layer is there when they together have
    written all of it; ``committed`` is True only when the pushes that committed cover every byte that was offered (and
    verified, if asked). A failure of one of them is raised from the iteration (or from `wait`) as a typed error, within
    milliseconds where the peer's death is visible. `ticket` is how another one finds the offer.
    """

    def __init__(
        self,
        client: Client,
        request_id: str,
        cache: KVCache,
        table: BlockTable,
        *,
        lease_s: float,
        timeout: float,
        check: bool,
        sources: int | None = None,
        private: bool = False,
    ) -> None:
        cache.check_table(table)
        good = sources is None or (isinstance(sources, int) and not isinstance(sources, bool) and sources >= 1)
        if not good:
            value = repr(sources)[:20]
            raise UsageError("sources is how many pushes are expected, at least one", field="sources", value=value)
        self._client = client
        self._cache = cache
        self._table = table
        self._lease_s = lease_s
        self._timeout = timeout
        self._check = check
        self._taken: Reservation | None = None
        self._private = private
        self._incoming = Incoming(box_of(cache.layout, table), sources)
        self._grants: list[tuple[Region, int]] = []
        self._entered = False
        self._posting: PostingHandle | None = None
        self._arrived: deque[int] = deque()
        self._seen: set[int] = set()
        self._vanished: asyncio.TimerHandle | None = None
        self._error: KvxferError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._revokes: list[asyncio.Future[Any]] | None = None
        self._quiet: asyncio.Future[list[Any]] | None = None
        self._closed = False
        self._stalled = False
        self.request_id = request_id
        self.committed = False

    # -- for callers ----------------------------------------------------------------------------------

    async def __aenter__(self) -> Landing:
        if self._entered:
            raise UsageError("an offer is entered once", hint="make another one")
        layout, table, plane = self._cache.layout, self._table, self._client.plane
        self._cache.require(plane)
        self._taken = self._client.reservations.acquire([(self._cache.footprint, table)], f"offer {self.request_id}")
        self._entered = True
        deadline = Deadline.after(self._timeout)
        try:
            self._client.register_flow(self, self._fail)
            descriptors = []
            for region, descriptor in self._cache.grant_access("w", table, self._region_released):
                descriptors.append(descriptor)
                self._grants.append((region, descriptor.grant))
                plane.memory.subscribe(descriptor.grant, self._on_data)
            plane.stalls.begin(self, self._progress)
            body = await TransferOffer(
                layout=layout, table=table, descriptors=tuple(descriptors), check=self._check
            ).send()
            self._timer = asyncio.get_running_loop().call_later(self._timeout, self._deadline_fired)
            self._posting = await self._client.control.post(
                "offer",
                self.request_id,
                body,
                lease_s=self._lease_s,
                claims_max=1,
                on_event=self._on_posting,
                deadline=deadline,
                boxes=[self._incoming.want],
                private=self._private,
            )
        except BaseException as error:
            self._fail(error if isinstance(error, KvxferError) else ClosedError("the offer was not made"))
            self._revoke()  # the push may have committed before the daemon's answer was seen: then nothing has failed
            raise
        if self._closed:  # it ended while it was being posted; whoever waits for it is told why
            self._withdraw()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._fail(ClosedError(f"the landing of {self.request_id} was left"))
        self._revoke()
        await self.wait_quiet(self._client.config.cancel_s)

    def __aiter__(self) -> Landing:
        return self

    async def __anext__(self) -> int:
        while True:
            if self._arrived:
                return self._arrived.popleft()
            if self.committed:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            await self._changed()

    @property
    def ticket(self) -> Ticket:
        """What `Client.push` takes in place of a request id and a node. Unguessable, and of no use to anybody who
        cannot reach the control port of this node.

        Raises: `UsageError` outside the block.
        """
        if self._posting is None:
            raise UsageError("an offer has a ticket inside its block only")
        return self._client.control.ticket(self._posting, self.request_id, self._lease_s)

    async def wait(self) -> None:
        """Wait until all is committed.

        Raises: why the landing failed, as the iteration does: `LeaseExpired` (nobody came), `PeerLost`, `Incomplete`,
        `TransferTimeout` or `Stalled`, `TransferCancelled`, `IntegrityError`, `GeometryMismatch`, `ClosedError`.
        """
        while not self.committed:
            if self._error is not None:
                raise self._error
            await self._changed()

    async def layer(self, index: int) -> None:
        """Wait until layer ``index`` (from 0, in the offered cache) is here, whatever the others do.

        Raises: `UsageError` for an index that does not exist; what `wait` raises when the landing failed before this
        layer was here: a layer that has arrived stays so.
        """
        layers = self._cache.layout.geometry.layers
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < layers:
            raise UsageError("no such layer", field="layer", value=repr(index)[:20], limit=layers - 1)
        while index not in self._seen:
            if self._error is not None:
                raise self._error
            await self._changed()

    @property
    def stalled(self) -> bool:
        """True while a claimed landing has seen no layer for `stall_s`: the other side hangs, or is cut off."""
        return self._stalled and not self._closed and not self.committed

    def mark_stalled(self, stalled: bool) -> None:
        """See `transfer.Watched`."""
        self._stalled = stalled

    def _progress(self) -> int | None:
        return self._incoming.notices if self._incoming.writing else None

    async def wait_quiet(self, timeout: float) -> bool:
        """After the block was left: wait until no peer can write here; False when that takes longer than ``timeout``.

        Until then the blocks stay quarantined and cannot be offered again. ``timeout`` is in seconds. Raises nothing of
        its own.
        """
        if self._quiet is None:
            return True
        await asyncio.wait([self._quiet], timeout=timeout)
        return self._quiet.done()

    # -- what happens to it -----------------------------------------------------------------------------

    def _on_data(self, event: Event) -> None:
        if self._closed:
            return
        if event.kind == EventKind.GRANT_LOST:
            self._connection_lost()
            return
        tag = tags.unpack(event.tag)
        if tag.kind not in (tags.LAYER, tags.COMMIT):
            self._unexpected(tag.kind, "not_of_a_push")
            return
        if not tag.claim:
            self._unexpected(tag.kind, "other_claim")
            return
        found = self._incoming.on_notification(tag.claim, tag.kind, tag.layer, event.value)
        if found and not isinstance(found, KvxferError):
            self._unexpected(tag.kind, found)
        self._learned(found if isinstance(found, KvxferError) else None)
        if tag.kind == tags.COMMIT and not found and not self.committed:
            self._settle(tag.claim)

    def _settle(self, claim: int) -> None:
        """The part of this claim is here and others are not: it is over, even if its pusher dies before it says so."""
        if self._posting is not None and claim in self._incoming.writers:
            handle = ClaimHandle((), self._posting.posting, claim)
            self._client.control.report_in_background(handle, "done", None)

    def _learned(self, error: KvxferError | None) -> None:
        """Something arrived, or was announced: layers may be whole now, or all is committed, or it has failed."""
        first = self._cache.layout.geometry.first_layer
        for number in self._incoming.take_visible():
            self._seen.add(number - first)
            self._arrived.append(number - first)
        if error is not None:
            self._fail(error)
        elif self._incoming.complete:
            self._commit()
        elif self._incoming.over:
            self._fail(self._incomplete(Incomplete, f"all pushes of {self.request_id} that were expected are over"))
        self._wake()

    def _connection_lost(self) -> None:
        """A connection has ended, and it was the last. Whether its pusher was cancelled, failed or died is what the
        daemons say, if they can; with several pushers it need not be one whose part is missing.
        """
        if self._daemon_unreachable():
            self._lost()
        elif self._vanished is None and len(self._incoming.writers) <= 1:
            self._vanished = asyncio.get_running_loop().call_later(WHY_S, self._lost)

    def _daemon_unreachable(self) -> bool:
        """Nobody can say through the daemons what becomes of a pusher."""
        return not self._client.control.connected or any(writer.orphaned for writer in self._incoming.writing)

    def _lost(self) -> None:
        self._vanished = None
        if self._attached():
            return  # it has come back over another connection
        writers = self._incoming.writers
        if self._incoming.writing if self._daemon_unreachable() or len(writers) == 1 else not writers:
            self._fail(PeerLost(f"the worker that pushed {self.request_id} vanished", layers_arrived=len(self._seen)))

    def _attached(self) -> bool:
        return any(self._client.plane.engine.attached(grant) > 0 for _, grant in self._grants)

    def _unexpected(self, kind: int, reason: str) -> None:
        self._client.plane.unexpected.add(tags.NAMES.get(kind, "unknown"), reason)

    def _commit(self) -> None:
        if self._error is None and not self.committed:
            self.committed = True
            self._stop_timer()
            self._client.plane.stalls.end(self)
            self._count_unexpected_left()

    def _count_unexpected_left(self) -> None:
        for kind in self._incoming.take_unexpected():
            self._unexpected(kind, "other_claim")

    def _on_posting(self, event: PostingEvent) -> None:
        if self._closed:
            return
        # What has already arrived on the data path counts first.
        self._client.plane.drain()
        if self.committed:
            return
        if event.what == "claimed":
            self._learned(self._incoming.claimed(event.claim, event.boxes))
            return
        writer = self._incoming.writers.get(event.claim)
        if writer is not None and writer.committed and event.what in ("settled", "lost", "orphaned"):
            return  # its part is here, whatever became of it
        if event.what == "settled" and event.code == "done":
            # The commit came before this message, if there was one.
            self._fail_if_not_committed(ProtocolError("the push says that it is done, but it has not committed"))
        elif event.what == "settled":
            self._fail_if_not_committed(ended_by_other(event.code, event.detail or "the peer ended the push"))
        elif event.what == "lost":
            self._fail_if_not_committed(
                PeerLost(f"the worker that pushed {self.request_id} died", layers_arrived=len(self._seen))
            )
        elif event.what == "expired":
            self._fail_if_not_committed(LeaseExpired(f"the offer {self.request_id} ran out", lease_s=self._lease_s))
        elif event.what == "withdrawn":
            self._fail_if_not_committed(ended_by_other(event.code, event.detail or "the daemon withdrew the offer"))
        elif event.what == "orphaned":
            self._pusher_orphaned([writer] if writer is not None else self._incoming.writing)

    def _pusher_orphaned(self, writers: list[Writer]) -> None:
        """A daemon is out of reach, of one pusher or our own: from now on the data path tells what becomes of them."""
        for writer in writers:
            writer.orphaned = True
        if writers and not self._attached():
            self._fail_if_not_committed(
                PeerLost(f"the node that pushed {self.request_id} is gone", layers_arrived=len(self._seen))
            )

    def _deadline_fired(self) -> None:
        self._timer = None
        self._client.plane.drain()
        if not self.committed:
            kind = Incomplete if self._incoming.committed else Stalled if self._stalled else TransferTimeout
            self._fail_if_not_committed(
                self._incomplete(kind, f"the push of {self.request_id} did not commit within {self._timeout:g} s")
            )

    def _incomplete(self, kind: type[TransferTimeout], what: str) -> TransferTimeout:
        """The error of a time limit, with all that is known of who is to blame."""
        incoming, missing = self._incoming, self._incoming.missing()
        if incoming.committed:
            of = f"{incoming.committed} of {len(incoming.writers)} pushes committed"
            what = f"{what}: missing {missing}; {of}"
        return kind(
            what,
            layers_arrived=len(self._seen),
            state=TRANSFERRING if incoming.writers else OTHER_SIDE,
            missing=missing,
            pushes=len(incoming.writers),
            pushes_committed=incoming.committed,
        )

    def _fail_if_not_committed(self, error: KvxferError) -> None:
        """Not by the data path. A commit that this side has acknowledged counts, also one that comes in this moment."""
        self._start_revoke()
        self._client.plane.drain()
        self._fail(error)

    def _start_revoke(self) -> list[asyncio.Future[Any]]:
        if self._revokes is None:
            self._revokes = [region.start_revoke(grant, listening=True) for region, grant in self._grants]
        return self._revokes

    def _region_released(self) -> None:
        self._fail(UnknownRegion(f"the memory of the landing of {self.request_id} was released"))

    def _fail(self, error: KvxferError) -> None:
        if self.committed or self._error is not None:
            return
        self._error = error
        # Nothing more may land once the caller has been told that it failed.
        self._revoke()
        self._wake()

    def _revoke(self) -> None:
        self._stop_timer()
        self._closed = True
        if self._taken is None:
            return
        taken, self._taken = self._taken, None
        self._client.unregister_flow(self)
        self._count_unexpected_left()
        if not self._client.closed:
            self._client.plane.stalls.end(self)
        self._client.reservations.quarantine(taken, f"offer {self.request_id} is settling")
        self._quiet = self._client.release_when_quiet(taken, self._start_revoke())
        for _, grant in self._grants:
            self._client.plane.memory.discard_notifications(grant)
        self._withdraw()
        self._wake()

    def _withdraw(self) -> None:
        if self._posting is not None:
            posting, self._posting = self._posting, None
            ended_by = "abandoned" if self._error is None else self._error.code  # which the daemon counts
            self._client.control.withdraw_in_background(posting, "committed" if self.committed else ended_by)

    def _stop_timer(self) -> None:
        for timer in (self._timer, self._vanished):
            if timer is not None:
                timer.cancel()
        self._timer = self._vanished = None

    async def _changed(self) -> None:
        if self._waiter is None or self._waiter.done():
            self._waiter = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._waiter)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

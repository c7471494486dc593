"""Pull: prefill publishes a request under a ticket (`Publication`), decode fetches it when it is ready (`pull`).

The bytes are read by decode straight from the publisher's memory. The publisher is released by a notification on the
data path, counted once per consumer; a pull of nothing releases it just the same.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvxfer.descriptors import Ticket
from kvxfer.errors import (
    KvxferError,
    PeerLost,
    UnknownTransfer,
    UsageError,
    ended_by_other,
)
from kvxfer.flows.caches import Caches, NamedCache, named_caches
from kvxfer.flows.control import PostingHandle
from kvxfer.flows.exchange import TransferOffer
from kvxfer.geometry import BlockTable
from kvxfer.memory.region import Region
from kvxfer.native.engine import Event, EventKind
from kvxfer.tasks import OTHER_SIDE, Deadline, seconds
from kvxfer.wire import tags
from kvxfer.wire.messages import PostingEvent

if TYPE_CHECKING:
    from kvxfer.client import Client

LAYERS_IN_FLIGHT_MAX = 8
LEASE_MARGIN_S = 0.25  # the daemon, whose clock counts, is asked first
ORPHAN_S = 0.5  # how often the data path is asked about a consumer of whom no daemon can tell
RELEASED, ABANDONED, EXPIRED, WITHDRAWN = "released", "abandoned", "expired", "withdrawn"


class Publication:
    """``async with client.publish(...) as ticket``: the blocks stay readable inside the block.

    Leaving it normally waits until every consumer has ended or the lease ran out; leaving it by an exception withdraws
    it at once. ``outcome`` then says "released" (all have read or released it), "abandoned" (at least one of them died,
    failed or was cancelled: ``error`` has the first one's reason), "expired" or "withdrawn". `to_dict` and `to_json`
    are what a router carries.
    """

    def __init__(
        self,
        client: Client,
        request_id: str,
        cache: Caches,
        table: BlockTable | None,
        *,
        lease_s: float,
        consumers: int,
        retryable: bool,
        timeout: float,
        check: bool,
    ) -> None:
        good = isinstance(consumers, int) and not isinstance(consumers, bool) and 1 <= consumers <= tags.CLAIM_MAX
        if not good:
            raise UsageError(
                "a ticket needs at least one consumer",
                field="consumers",
                value=repr(consumers)[:20],
                limit=tags.CLAIM_MAX,
            )
        self._client = client
        self._caches = named_caches(cache, table)
        self._lease_s = lease_s
        self._consumers = consumers
        self._retryable = retryable
        self._timeout = timeout
        self._check = check
        self._grants: list[tuple[Region, int]] = []
        self._posting: PostingHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._claims: set[int] = set()  # announced by the daemon and not ended without success
        self._released_by: set[int] = set()
        self._ended_without = 0  # claims that count although nothing was read
        self._orphans: set[int] = set()  # claims of which no daemon can tell
        self._orphan_timer: asyncio.TimerHandle | None = None
        self._ended: asyncio.Future[str] | None = None
        self._quiet: list[asyncio.Future[Any]] = []
        self.request_id = request_id
        self.outcome = ""
        self.error: KvxferError | None = None

    @property
    def ticket(self) -> Ticket:
        """The ticket itself; what was taken here keeps its value after the block. Raises: `UsageError` before it."""
        if self._posting is None:
            raise UsageError("a publication has a ticket inside its block only")
        return self._client.control.ticket(self._posting, self.request_id, self._lease_s)

    def to_dict(self) -> dict[str, Any]:
        """The ticket as a dict of strings and numbers. Raises: what `ticket` raises."""
        return self.ticket.to_dict()

    def to_json(self) -> str:
        """The ticket as JSON. Raises: what `ticket` raises."""
        return self.ticket.to_json()

    async def __aenter__(self) -> Publication:
        if self._ended is not None:
            raise UsageError("a publication is entered once", hint="make another one")
        plane = self._client.plane
        for each in self._caches:
            each.cache.require(plane)
            each.cache.check_table(each.table, may_repeat=True)
        self._ended = asyncio.get_running_loop().create_future()
        deadline = Deadline.after(self._timeout)
        try:
            self._client.register_flow(self, self._client_closed)
            offers = [self._lend(each) for each in self._caches]
            offer = replace(offers[0], more=tuple(offers[1:]))
            self._arm(self._lease_s)
            self._posting = await self._client.control.post(
                "ticket",
                self.request_id,
                await offer.send(),
                lease_s=self._lease_s,
                claims_max=self._consumers,
                on_event=self._on_posting,
                deadline=deadline,
            )
        except BaseException:
            self._end(WITHDRAWN)
            raise
        if self.outcome:  # it ended while it was being posted
            self._client.control.withdraw_in_background(self._posting, self.outcome)
        return self

    def _lend(self, each: NamedCache) -> TransferOffer:
        descriptors = []
        for region, descriptor in each.cache.grant_access("r", each.table, self._region_released):
            descriptors.append(descriptor)
            self._grants.append((region, descriptor.grant))
            self._client.plane.memory.subscribe(descriptor.grant, self._on_data)
        return TransferOffer(
            name=each.name,
            layout=each.cache.layout,
            table=each.table,
            descriptors=tuple(descriptors),
            check=self._check,
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self.wait_released()
        finally:
            self._end(WITHDRAWN)
        waiting = [future for future in self._quiet if not future.done()]
        if waiting:
            await asyncio.wait(waiting, timeout=self._client.config.cancel_s)

    async def renew(self, lease_s: float, *, timeout: float | None = None) -> None:
        """Let the ticket live for another ``lease_s`` seconds from now; the daemon has to say so within ``timeout``.

        Raises: `UsageError` outside the block or for ``lease_s``, `LeaseExpired` or `UnknownTransfer` (it is over),
        `TransferTimeout`, `DaemonUnavailable`.
        """
        if self._posting is None:
            raise UsageError("a publication can be renewed inside its block only")
        deadline = self._client.deadline(timeout)
        await self._client.control.renew(self._posting, seconds(lease_s, "lease_s"), deadline)
        if not self.outcome:
            self._arm(lease_s)

    def _arm(self, lease_s: float) -> None:
        """The lease ends here as well: a daemon that has gone cannot say so."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(lease_s + LEASE_MARGIN_S, self._expire)

    def _expire(self) -> None:
        self._client.plane.drain()
        self._end(EXPIRED)

    async def wait_released(self, *, timeout: float | None = None) -> str:
        """Wait for the end, and return the outcome: ``timeout`` seconds, or as long as the lease (None).

        Raises: `TransferTimeout`, and `UsageError` before the block was entered.
        """
        if self._ended is None:
            raise UsageError("a publication is waited for inside its block only")
        if timeout is None:
            return await asyncio.shield(self._ended)
        async with Deadline.after(timeout).bound(f"the ticket of {self.request_id} was released", OTHER_SIDE):
            return await asyncio.shield(self._ended)

    def _on_data(self, event: Event) -> None:
        if event.kind == EventKind.GRANT_LOST:
            return  # the daemons say whose end that was; of whom they cannot tell, `_poll_orphans` finds out
        tag = tags.unpack(event.tag)
        if tag.kind != tags.RELEASE:
            self._client.plane.unexpected.add(tags.NAMES.get(tag.kind, "unknown"), "not_of_a_pull")
        elif tag.claim in self._claims or not self._client.control.connected:
            self._release(tag.claim)
        else:
            # A consumer speaks for itself only, not for those to come. One whose announcement is late settles as well.
            self._client.plane.unexpected.add(tags.NAMES[tag.kind], "unknown_claim")

    def _on_posting(self, event: PostingEvent) -> None:
        if event.what == "claimed":
            self._claims.add(event.claim)
        elif event.what == "settled" and event.code == "done":
            self._release(event.claim)
        elif event.what in ("settled", "lost"):
            self._client.plane.drain()  # a release that came first counts
            self._consumer_ended(event.claim, event.code, event.detail)
        elif event.what == "orphaned":
            self._orphaned(event.claim)
        elif event.what == "expired":
            self._client.plane.drain()
            self._end(EXPIRED)
        elif event.what == "withdrawn":
            self._end(WITHDRAWN)

    def _region_released(self) -> None:
        self._end(WITHDRAWN)

    def _client_closed(self, _: KvxferError) -> None:
        self._end(WITHDRAWN)

    def _release(self, claim: int) -> None:
        if self.outcome:
            return
        self._released_by.add(claim)
        self._orphans.discard(claim)
        self._end_if_over()

    def _consumer_ended(self, claim: int, code: str, detail: str) -> None:
        """Without having read. A claim that its claimant never heard of is none; another one was made in its place."""
        counts = claim in self._claims and claim not in self._released_by and code != UnknownTransfer.code
        self._claims.discard(claim)
        self._orphans.discard(claim)
        if not counts or self._retryable or self.outcome:
            return
        self._ended_without += 1
        if self.error is None:
            self.error = ended_by_other(code, f"a consumer of {self.request_id} ended: {detail or code}")
        self._end_if_over()

    def _end_if_over(self) -> None:
        """Nobody reads any more, and nobody is expected to."""
        read = len(self._released_by)
        if read >= self._consumers:
            self._end(RELEASED)
        elif read + self._ended_without >= self._consumers and self._claims <= self._released_by:
            self._end(ABANDONED)

    def _orphaned(self, claim: int) -> None:
        """The daemon of this consumer (0: our own, and so of all) is out of reach: the data path decides."""
        claims = {claim} if claim else self._claims
        self._orphans |= (claims & self._claims) - self._released_by
        if self._orphans and self._orphan_timer is None:
            self._orphan_timer = asyncio.get_running_loop().call_later(ORPHAN_S, self._poll_orphans)

    def _poll_orphans(self) -> None:
        self._orphan_timer = None
        if self.outcome or self._client.closed:
            return
        self._client.plane.drain()
        if not any(self._client.plane.engine.attached(grant) > 0 for _, grant in self._grants):
            for claim in tuple(self._orphans):
                self._consumer_ended(claim, PeerLost.code, "it vanished, and so has the word of its daemon")
        if self._orphans:
            self._orphan_timer = asyncio.get_running_loop().call_later(ORPHAN_S, self._poll_orphans)

    def _end(self, outcome: str) -> None:
        if self.outcome:
            return
        self.outcome = outcome
        for timer in (self._timer, self._orphan_timer):
            if timer is not None:
                timer.cancel()
        self._client.unregister_flow(self)
        self._quiet = [region.start_revoke(grant) for region, grant in self._grants]
        if self._posting is not None:
            self._client.control.withdraw_in_background(self._posting, outcome)
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(outcome)

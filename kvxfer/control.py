"""A worker's side of the control plane: one Unix-socket link to its node's daemon, kept alive across daemon restarts.

Postings and claims outlive the link: after a reconnect unclaimed postings are posted again (the handle stays, its id
changes), and whoever holds a claim is told that it is orphaned, so that the data path decides whether it goes on.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import msgpack

from kvxfer.config import Config
from kvxfer.deadline import Deadline
from kvxfer.errors import ClosedError, DaemonUnavailable, KvxferError, ProtocolError, TooManyPending
from kvxfer.link import Link, LinkFacts
from kvxfer.tasks import TaskOwner
from kvxfer.wire import messages as m

EARLY_EVENTS_MAX = 1024
BACKOFF_S_MIN, BACKOFF_S_MAX = 0.05, 2.0
REPLY_MARGIN_S = 0.5
EventCallback = Callable[[m.PostingEvent], None]


@dataclass(slots=True)
class PostingHandle:
    """One thing that this worker posted; ``posting`` and ``secret`` change when it had to be posted again."""

    message: m.Post
    on_event: EventCallback
    posting: str = ""
    secret: bytes = b""
    claimed: bool = False
    withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class ClaimHandle:
    """One claim that this worker holds, and where its owner lives."""

    node: tuple[str, ...]
    posting: str
    claim: int


class Control:
    """The link, the postings and the claims of one worker."""

    def __init__(self, socket_path: str, config: Config, *, facts: LinkFacts, rng: Random) -> None:
        self._path = socket_path
        self._config = config
        self._facts = facts
        self._rng = rng
        self._tasks = TaskOwner("control")
        self._link: Link | None = None
        self._up = asyncio.Event()
        self._closed = False
        self._postings: dict[str, PostingHandle] = {}
        self._claims: dict[tuple[str, int], EventCallback] = {}
        self._early: OrderedDict[tuple[str, int], list[m.PostingEvent]] = OrderedDict()
        self._deliveries: dict[str, Callable[[m.Delivery], None]] = {}
        self.node_id = ""
        self.incarnation = ""
        self.addresses: tuple[str, ...] = ()
        self.advertise: tuple[str, ...] = ()
        self.unexpected_events = 0
        self.reconnects = 0

    # -- the link -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect for the first time; raises `DaemonUnavailable` naming the socket and what to do."""
        await self._connect()

    async def _connect(self) -> None:
        link = await Link.dial_unix(self._path, self._facts, self._config, on_message=self._on_message)
        try:
            await self._learn(link)
        except BaseException:
            link.abort()
            raise
        self._link = link
        self._up.set()
        link.closed.add_done_callback(self._link_ended)

    async def _learn(self, link: Link) -> None:
        reply = await link.request(m.Status(), timeout=self._config.handshake_s)
        if not isinstance(reply, m.StatusReply):
            raise ProtocolError("the daemon did not answer the status request", got=type(reply).__name__)
        status: dict[str, Any] = msgpack.unpackb(reply.body)
        self.node_id = str(status["node_id"])
        self.incarnation = str(status["incarnation"])
        self.addresses = tuple(str(address) for address in status["addresses"])
        self.advertise = tuple(str(host) for host in status.get("data_advertise", ()))

    def _link_ended(self, ended: asyncio.Future[KvxferError]) -> None:
        self._link = None
        self._up.clear()
        if self._closed:
            return
        for key, callback in tuple(self._claims.items()):
            callback(m.PostingEvent(posting=key[0], claim=key[1], what="orphaned", detail="the local daemon is gone"))
        for handle in tuple(self._postings.values()):
            if handle.claimed:
                gone = m.PostingEvent(posting=handle.posting, what="orphaned", detail="the local daemon is gone")
                handle.on_event(gone)
        self._tasks.spawn(self._reconnect(), "reconnect")

    async def _reconnect(self) -> None:
        backoff_s = BACKOFF_S_MIN
        while not self._closed:
            await asyncio.sleep(backoff_s * self._rng.uniform(0.5, 1.0))
            backoff_s = min(BACKOFF_S_MAX, backoff_s * 2)
            try:
                await self._connect()
                await self._post_again()
            except KvxferError:
                continue
            self.reconnects += 1
            return

    async def _post_again(self) -> None:
        for channel in tuple(self._deliveries):
            await self._require_link().request(m.Listen(channel=channel), timeout=self._config.handshake_s)
        for handle in tuple(self._postings.values()):
            self._postings.pop(handle.posting, None)
            if not handle.claimed:
                await self._post(handle, Deadline.after(self._config.handshake_s))

    def _require_link(self) -> Link:
        if self._link is None:
            raise DaemonUnavailable("the link to the local daemon is down", peer=self._path)
        return self._link

    async def link(self, deadline: Deadline) -> Link:
        """The live link, waiting for a reconnect within the deadline."""
        if self._closed:
            raise ClosedError("the client is closed")
        if self._link is None:
            try:
                await asyncio.wait_for(self._up.wait(), deadline.remaining())
            except TimeoutError as late:
                raise DaemonUnavailable(
                    "the local daemon is not reachable", peer=self._path, hint="is `kvxfer serve` running on this node?"
                ) from late
        return self._require_link()

    async def request(self, message: m.Message, deadline: Deadline) -> m.Message:
        """Ask the daemon; the reply, or the typed error that it or the other node answered."""
        link = await self.link(deadline)
        return await link.request(message, timeout=deadline.require("the daemon answered"))

    # -- postings ---------------------------------------------------------------------------------------------

    async def post(
        self, kind: str, key: str, body: bytes, *, lease_s: float, claims_max: int, on_event: EventCallback
    ) -> PostingHandle:
        """Post something for others to claim. Cancelled or failed: nothing stays posted."""
        message = m.Post(kind=kind, key=key, body=body, lease_s=lease_s, claims_max=claims_max)
        handle = PostingHandle(message, on_event)
        try:
            await self._post(handle, Deadline.after(self._config.timeout_s))
        except asyncio.CancelledError:
            handle.withdrawn = True  # a reply that is still on its way is withdrawn when it comes
            raise
        return handle

    async def _post(self, handle: PostingHandle, deadline: Deadline) -> None:
        link = await self.link(deadline)
        timeout = deadline.require("the daemon answered")
        pending = self._tasks.run(link.request(handle.message, timeout=timeout), "post")
        pending.add_done_callback(lambda done: self._posted(handle, done))
        await asyncio.shield(pending)

    def _posted(self, handle: PostingHandle, done: asyncio.Future[m.Message]) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        reply = done.result()
        assert isinstance(reply, m.Posted)
        handle.posting, handle.secret = reply.posting, reply.secret
        if handle.withdrawn:
            self.withdraw_in_background(handle, "cancelled")
            return
        self._postings[reply.posting] = handle
        for event in self._early.pop((reply.posting, 0), ()):
            self._on_posting_event(event)

    async def renew(self, handle: PostingHandle, lease_s: float) -> None:
        """Extend a lease to ``lease_s`` from now."""
        await self.request(m.Renew(posting=handle.posting, lease_s=lease_s), Deadline.after(self._config.timeout_s))
        handle.message = replace(handle.message, lease_s=lease_s)

    def withdraw_in_background(self, handle: PostingHandle, reason: str) -> None:
        """Take a posting back; the daemon being down already did that."""
        handle.withdrawn = True
        self._postings.pop(handle.posting, None)
        if handle.posting:
            self._send(m.Withdraw(posting=handle.posting, reason=reason))

    # -- claims -------------------------------------------------------------------------------------------------

    async def claim(
        self, message: m.Claim | m.Land, deadline: Deadline, on_event: EventCallback
    ) -> tuple[ClaimHandle, bytes]:
        """Claim a posting of another node (or ours). Cancelled: a claim that was made anyway is settled."""
        link = await self.link(deadline)
        message = replace(message, engine_id=self._facts.engine_id)
        timeout = deadline.require("the offer was claimed")
        pending = self._tasks.run(link.request(message, timeout=timeout), "claim")
        try:
            reply = await asyncio.shield(pending)
        except asyncio.CancelledError:
            pending.add_done_callback(lambda done: self._claimed_too_late(message.node, done))
            raise
        if not isinstance(reply, m.Claimed):
            raise ProtocolError("the daemon answered a claim with something else", got=type(reply).__name__)
        handle = ClaimHandle(tuple(message.node), reply.posting, reply.claim)
        key = (reply.posting, reply.claim)
        self._claims[key] = on_event
        for event in self._early.pop(key, ()):
            on_event(event)
        return handle, reply.body

    def _claimed_too_late(self, node: Sequence[str], done: asyncio.Future[m.Message]) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        reply = done.result()
        if isinstance(reply, m.Claimed):
            self.settle_in_background(ClaimHandle(tuple(node), reply.posting, reply.claim), "cancelled", None)

    def settle_in_background(self, handle: ClaimHandle, outcome: str, error: KvxferError | None) -> None:
        """Tell the owner how a claim ended; the daemon being down tells it too."""
        self._claims.pop((handle.posting, handle.claim), None)
        code = "" if error is None else error.code
        detail = "" if error is None else error.message[:500]
        self._send(
            m.Settle(
                node=handle.node, posting=handle.posting, claim=handle.claim, outcome=outcome, code=code, detail=detail
            )
        )

    # -- small messages -------------------------------------------------------------------------------------------

    async def listen(self, channel: str, callback: Callable[[m.Delivery], None], deadline: Deadline) -> None:
        """Receive what is sent to a channel of this node."""
        self._deliveries[channel] = callback
        try:
            await self.request(m.Listen(channel=channel), deadline)
        except BaseException:
            self._deliveries.pop(channel, None)
            raise

    # -- incoming ---------------------------------------------------------------------------------------------------

    def _on_message(self, link: Link, message: m.Message) -> None:
        if isinstance(message, m.PostingEvent):
            self._on_posting_event(message)
        elif isinstance(message, m.Delivery):
            callback = self._deliveries.get(message.channel)
            if callback is not None:
                callback(message)
            else:
                self.unexpected_events += 1
        else:
            self.unexpected_events += 1

    def _on_posting_event(self, event: m.PostingEvent) -> None:
        claimant = self._claims.get((event.posting, event.claim))
        if claimant is not None and event.what in ("withdrawn", "expired", "lost", "orphaned"):
            claimant(event)
            return
        handle = self._postings.get(event.posting)
        if handle is not None:
            if event.what == "claimed":
                handle.claimed = True
            handle.on_event(event)
            return
        self._keep_early(event)

    def _keep_early(self, event: m.PostingEvent) -> None:
        # An event may overtake the coroutine that waits for the reply which announces its claim or posting.
        self.unexpected_events += 1
        claimed_here = event.what in ("withdrawn", "expired", "lost", "orphaned")
        key = (event.posting, event.claim if claimed_here else 0)
        self._early.setdefault(key, []).append(event)
        while len(self._early) > EARLY_EVENTS_MAX:
            self._early.popitem(last=False)

    def _send(self, message: m.Message) -> None:
        if self._link is None:
            return
        try:
            self._link.notify(message)
        except (TooManyPending, KvxferError):
            # The link's queue is full or it just ended; the daemon settles what a lost worker held.
            self.unexpected_events += 1

    async def aclose(self) -> None:
        """Say goodbye; the daemon withdraws what is still posted."""
        self._closed = True
        self._up.set()
        await self._tasks.aclose()
        if self._link is not None:
            await self._link.aclose("client closed")

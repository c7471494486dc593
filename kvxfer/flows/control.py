"""A worker's side of the control plane: one Unix-socket link to its node's daemon, kept alive across daemon restarts.

Postings and claims outlive the link: after a reconnect unclaimed postings are posted again (the handle stays, its id
changes), and whoever holds a claim is told that it is orphaned, so that the data path decides whether it goes on. What
could not be said while there was no daemon is said to the next one. A reply whose request was given up is undone.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, TypeVar

import msgpack

from kvxfer.config import Config
from kvxfer.coverage import Box
from kvxfer.dataplane.exports import UnexpectedCounts
from kvxfer.descriptors import Ticket
from kvxfer.errors import (
    NOT_TOLD,
    ClosedError,
    ConfigError,
    DaemonUnavailable,
    KvxferError,
    PeerDraining,
    ProtocolError,
    TransferTimeout,
)
from kvxfer.net.link import Link, LocalIdentity
from kvxfer.tasks import ANSWER, CONNECTING, Deadline, TaskOwner, shared
from kvxfer.wire import messages as m
from kvxfer.wire.codec import Message
from kvxfer.wire.messages import DETAILS_MAX, Report, exception_of

# -- settlements that the daemon has not confirmed: what is said again to the next one ---------------------------------
# The idea: a daemon that was told how a claim ended may end itself before it could pass that on to another node, and
# a worker cannot know. So the worker remembers what it said until the owner's node is known to have heard it. Saying
# it twice does no harm. What can never be confirmed is forgotten when no lease can be left that it is about.


class Outbox:
    """At most ``limit`` settlements, each for ``keep_s`` seconds of ``clock``; the oldest make room."""

    def __init__(self, clock: Callable[[], float], *, limit: int, keep_s: float) -> None:
        self._clock = clock
        self._limit = limit
        self._keep_s = keep_s
        self._sent: OrderedDict[int, tuple[m.Settle, float]] = OrderedDict()  # by the number of the request

    def __len__(self) -> int:
        return len(self._sent)

    def add(self, number: int, message: m.Settle) -> None:
        """Sent to the daemon as this request, and not answered yet."""
        now = self._clock()
        self._sent[number] = (message, now + self._keep_s)
        while len(self._sent) > self._limit or next(iter(self._sent.values()))[1] < now:
            self._sent.popitem(last=False)

    def acknowledged(self, reply: Message) -> None:
        """The daemon's first answer, or a later one. When it could not reach the owner it keeps the settlement, and
        answers once more when it has; anything else is the owner's word."""
        if isinstance(reply, m.Error) and isinstance(exception_of(reply), NOT_TOLD):
            return
        self._sent.pop(getattr(reply, "rid", 0), None)

    def take(self, room: int) -> list[m.Settle]:
        """There is a new daemon: the latest of them, at most ``room``, in order. None are left here."""
        now = self._clock()
        left = [message for message, until in self._sent.values() if until >= now]
        self._sent.clear()
        return left[-room:] if room else []


UNEXPECTED_KEYS_MAX, UNEXPECTED_EVENTS_MAX = 1024, 16
UNSENT_MAX = 4096
RETRY_S = 0.02
# Where an engine without a `data_bind` of its own listens: field of `EngineConfig`, name in the daemon's status.
BINDS = {"tcp_bind": "data_bind", "hixl_bind": "hixl_bind"}
BACKOFF_S_MIN, BACKOFF_S_MAX = 0.05, 2.0
CLAIM_ENDS = ("withdrawn", "expired", "lost", "orphaned")
EventCallback = Callable[[m.PostingEvent], None]
E = TypeVar("E")


@dataclass(slots=True)
class PostingHandle:
    """One thing that this worker posted; ``posting`` and ``secret`` change when it had to be posted again.

    ``stale``: the daemon that knew it has gone. ``spent``: a claim of it ended, so that nobody may claim it anew.
    """

    message: m.Post
    on_event: EventCallback
    posting: str = ""
    secret: bytes = field(default=b"", repr=False)
    claims: set[int] = field(default_factory=set)
    spent: bool = False
    stale: bool = False
    withdrawn: bool = False

    @property
    def wanted(self) -> bool:
        """A new daemon has to know it; names are, others only before anybody has claimed them."""
        if self.withdrawn or not self.stale:
            return False
        return self.message.kind == "region" or not (self.claims or self.spent)


@dataclass(frozen=True, slots=True)
class ClaimHandle:
    """One claim that this worker holds, and where its owner lives."""

    node: tuple[str, ...]
    posting: str
    claim: int
    boxes: tuple[Box, ...] = ()  # what it writes of an offer; none: the daemon of the offer does not say


@dataclass(frozen=True, slots=True, eq=False)
class _Listening:
    callback: Callable[[m.Delivery], None]


class Control:
    """The link, the postings and the claims of one worker."""

    def __init__(self, socket_path: str, config: Config, *, identity: LocalIdentity, rng: Random) -> None:
        self._path = socket_path
        self._config = config
        self._identity = identity
        self._rng = rng
        self._tasks = TaskOwner("control")
        self._link: Link | None = None
        self._up = asyncio.Event()
        self._closed = False
        self._postings: dict[str, PostingHandle] = {}
        self._claims: dict[tuple[str, int], EventCallback] = {}
        self._unsent: deque[m.Settle | m.Withdraw] = deque(maxlen=UNSENT_MAX)
        self._retry: asyncio.TimerHandle | None = None
        self._reconnecting = False
        self._outbox = Outbox(self._loop_time, limit=UNSENT_MAX, keep_s=config.lease_s_max)
        self._early: OrderedDict[tuple[str, int], list[m.PostingEvent]] = OrderedDict()
        self._deliveries: dict[str, _Listening] = {}
        self.node_id = ""
        self.incarnation = ""
        self.addresses: tuple[str, ...] = ()
        self.advertise: tuple[str, ...] = ()
        self.binds: Mapping[str, str] = {}  # of BINDS, what the daemon told
        self.data_port = 0  # that the daemon was configured with
        self._encryption = ""  # the daemon's tcp_encryption
        self.on_identity: Callable[[], None] = _nobody
        self.on_restored: Callable[[], None] = _nobody
        self.unexpected_events = 0
        self.reconnects = 0

    # -- the link -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect for the first time; raises `DaemonUnavailable` naming the socket and what to do."""
        await self._connect()
        here, there = self._config.tcp_encryption, self._encryption
        if here != there:
            why = f"tcp_encryption is {here} here and {there} at this node's daemon"
            hint = "all engines of a node are reached in the same way: give both the same value"
            raise ConfigError(why, key="tcp_encryption", value=here, hint=hint)

    @property
    def connected(self) -> bool:
        """There is a link now."""
        return self._link is not None

    async def _connect(self) -> None:
        link = await Link.dial_unix(
            self._path, self._identity, self._config, on_message=self._on_message, on_late=self._on_late
        )
        try:
            await self._learn(link)
        except BaseException:
            link.abort()
            raise
        self._link = link
        self._up.set()
        link.closed.add_done_callback(lambda _: self._link_ended(link))

    async def _learn(self, link: Link) -> None:
        reply = await link.request(m.Status(), timeout=self._config.handshake_s)
        if not isinstance(reply, m.StatusReply):
            raise ProtocolError("the daemon did not answer the status request", got=type(reply).__name__)
        try:
            status: dict[str, Any] = msgpack.unpackb(reply.body)
            node_id, incarnation = str(status["node_id"]), str(status["incarnation"])
            addresses = tuple(str(address) for address in status["addresses"])
            advertise = tuple(str(host) for host in status.get("data_advertise", ()))
            told = {field: str(status.get(name, "")) for field, name in BINDS.items()}
            self._encryption = str(status.get("tcp_encryption", "off"))
            self.data_port = int(status.get("data_port", 0))
        except (ValueError, KeyError, TypeError, AttributeError) as wrong:
            raise ProtocolError(f"the daemon's status makes no sense: {wrong!r}") from wrong
        self.node_id, self.incarnation, self.addresses, self.advertise = node_id, incarnation, addresses, advertise
        self.binds = {field: host for field, host in told.items() if host}  # a daemon of an older version tells none
        self.on_identity()

    def _link_ended(self, link: Link) -> None:
        if self._link is not link:
            return
        self._link = None
        self._up.clear()
        if self._closed:
            self._up.set()  # whoever waits for it hears that we are closed
            return
        gone = "the local daemon is gone"
        for key, callback in tuple(self._claims.items()):
            _tell(callback, m.PostingEvent(posting=key[0], claim=key[1], what="orphaned", detail=gone))
        for handle in tuple(self._postings.values()):
            handle.stale = True
            if handle.claims:
                _tell(handle.on_event, m.PostingEvent(posting=handle.posting, what="orphaned", detail=gone))
        if not self._reconnecting:
            self._reconnecting = True
            self._tasks.spawn(self._reconnect(), "reconnect")

    async def _reconnect(self) -> None:
        """Until a link has been restored completely; one that ends meanwhile begins it again."""
        backoff_s = BACKOFF_S_MIN
        try:
            while not self._closed:
                await asyncio.sleep(backoff_s * self._rng.uniform(0.5, 1.0))
                backoff_s = min(BACKOFF_S_MAX, backoff_s * 2)
                try:
                    await self._connect()
                except KvxferError:
                    continue
                self.reconnects += 1
                link = self._link
                if link is not None:
                    await self._restore(link)
                if link is self._link is not None:
                    return
        finally:
            self._reconnecting = False

    async def _restore(self, link: Link) -> None:
        """Tell a new daemon what the old one knew. What it refuses ends, and its owner is told; the rest goes on."""
        self._resend()
        self.on_restored()
        for channel in tuple(self._deliveries):
            try:
                await link.request(m.Listen(channel=channel), timeout=self._config.handshake_s)
            except KvxferError:
                if link.closed.done():
                    return
                self.unexpected_events += 1  # another worker was quicker
        for handle in tuple(self._postings.values()):
            if not handle.wanted:
                continue
            old = handle.posting
            try:
                await self._post_on(link, handle, self._config.handshake_s)
            except KvxferError as refused:
                if link.closed.done():
                    return
                self._postings.pop(old, None)
                detail = refused.message[:500]
                event = m.PostingEvent(posting=old, what="withdrawn", code=refused.code, detail=detail)
                _tell(handle.on_event, event)

    async def link(self, deadline: Deadline) -> Link:
        """The live link. While there is none it waits for a reconnect: `daemon_wait_s`, and within the deadline.

        Raises `DaemonUnavailable` (retryable) when the daemon did not come back, `ClosedError`.
        """
        if self._link is None and not self._closed:
            limit = min(deadline.remaining(), self._config.daemon_wait_s)
            try:
                async with asyncio.timeout(limit):
                    await self._up.wait()
            except TimeoutError as late:
                raise DaemonUnavailable(
                    f"the local daemon is gone and did not come back in {limit:.3g} s",
                    peer=self._path,
                    hint="is `kvxfer serve` running on this node? `daemon_wait_s` is how long a call waits for it",
                    state=CONNECTING,
                ) from late
        if self._closed:
            raise ClosedError("the client is closed")
        if self._link is None:
            raise DaemonUnavailable("the link to the local daemon is down", peer=self._path)
        return self._link

    def send_report(self, message: m.Report) -> bool:
        """Tell the daemon something that it does not answer; whether that is done."""
        try:
            if self._link is None:
                return False
            self._link.send(message)
        except KvxferError:
            self.unexpected_events += 1
            return False
        return True

    async def request(self, message: m.Message, deadline: Deadline) -> m.Message:
        """Ask the daemon; the reply, or the typed error that it or the other node answered."""
        link = await self.link(deadline)
        return await link.request(message, timeout=deadline.require("the daemon answered", ANSWER))

    # -- postings ---------------------------------------------------------------------------------------------

    async def post(
        self,
        kind: str,
        key: str,
        body: bytes,
        *,
        lease_s: float,
        claims_max: int,
        on_event: EventCallback,
        deadline: Deadline | None = None,
        boxes: Sequence[Box] = (),
        private: bool = False,
    ) -> PostingHandle:
        """Post something for others to claim, within `timeout_s` unless there is a ``deadline``.

        Cancelled or failed: nothing stays posted, also when the daemon answers later.
        """
        wanted = tuple(boxes)
        message = m.Post(
            kind=kind, key=key, body=body, lease_s=lease_s, claims_max=claims_max, boxes=wanted, private=private
        )
        handle = PostingHandle(message, on_event)
        deadline = deadline or Deadline.after(self._config.timeout_s)
        try:
            link = await self.link(deadline)
            await self._post_on(link, handle, deadline.require("the daemon answered", ANSWER))
        except BaseException:
            # Posted just now: withdrawn now. A reply that is still on its way is withdrawn when it comes.
            self.withdraw_in_background(handle, "cancelled")
            raise
        return handle

    async def _post_on(self, link: Link, handle: PostingHandle, timeout: float) -> None:
        pending = self._tasks.run(link.request(handle.message, timeout=timeout), "post")
        pending.add_done_callback(lambda done: self._posted(handle, done))
        reply = await shared(pending)
        if not isinstance(reply, m.Posted):
            raise ProtocolError("the daemon answered a post with something else", got=type(reply).__name__)

    def _posted(self, handle: PostingHandle, done: asyncio.Future[m.Message]) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        reply = done.result()
        if not isinstance(reply, m.Posted):
            return
        self._postings.pop(handle.posting, None)
        handle.posting, handle.secret, handle.stale = reply.posting, reply.secret, False
        handle.claims.clear()
        if handle.withdrawn:
            self.withdraw_in_background(handle, "cancelled")
            return
        self._postings[reply.posting] = handle
        for event in self._early.pop((reply.posting, 0), ()):
            self._on_posting_event(event)

    def ticket(self, handle: PostingHandle, request_id: str, lease_s: float) -> Ticket:
        """How others find a posting as it is known to the present daemon."""
        return Ticket(
            node_id=self.node_id,
            incarnation=self.incarnation,
            addresses=self.addresses,
            posting=handle.posting,
            secret=handle.secret,
            request_id=request_id,
            expires_in_s=lease_s,
        )

    async def renew(self, handle: PostingHandle, lease_s: float, deadline: Deadline) -> None:
        """Extend a lease to ``lease_s`` from now."""
        await self.request(m.Renew(posting=handle.posting, lease_s=lease_s), deadline)
        handle.message = replace(handle.message, lease_s=lease_s)

    def withdraw_in_background(self, handle: PostingHandle, reason: str) -> None:
        """Take a posting back; the daemon being down already did that."""
        handle.withdrawn = True
        self._postings.pop(handle.posting, None)
        if handle.posting and not handle.stale:
            self._send(m.Withdraw(posting=handle.posting, reason=reason))

    # -- claims -------------------------------------------------------------------------------------------------

    async def claim(
        self, message: m.Claim | m.Land, deadline: Deadline, on_event: EventCallback, *, finish: bool = False
    ) -> tuple[ClaimHandle, bytes]:
        """Claim a posting of another node (or ours). Cancelled: a claim that was made anyway is settled. One with the
        number 0 is none: there is nothing to do, and nothing to settle (see `Claimed`).

        ``finish``: a cancelled claim is not given up on its way but made and settled, so that its owner hears of it.
        """
        link = await self.link(deadline)
        message = replace(message, engine_id=self._identity.engine_id)
        timeout = deadline.require("the claim was answered", ANSWER)
        pending = self._tasks.run(link.request(message, timeout=timeout), "claim")
        try:
            reply = await shared(pending)
        except asyncio.CancelledError:
            pending.add_done_callback(lambda done: self._claimed_too_late(message.node, done))
            if not finish:
                pending.cancel()  # it gives the claim up; one that was granted on the way is settled when that arrives
            raise
        if not isinstance(reply, m.Claimed):
            raise ProtocolError("the daemon answered a claim with something else", got=type(reply).__name__)
        handle = ClaimHandle(tuple(message.node), reply.posting, reply.claim, reply.boxes)
        if not reply.claim:
            if not (isinstance(message, m.Claim) and message.boxes):
                raise ProtocolError("the daemon granted a claim without a number")
            return handle, reply.body
        key = (reply.posting, reply.claim)
        self._claims[key] = on_event
        for event in self._early.pop(key, ()):
            _tell(on_event, event)
        return handle, reply.body

    def _claimed_too_late(self, node: Sequence[str], done: asyncio.Future[m.Message]) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        reply = done.result()
        if isinstance(reply, m.Claimed) and reply.claim:
            self.report_in_background(ClaimHandle(tuple(node), reply.posting, reply.claim), "cancelled", None)

    def report_in_background(self, handle: ClaimHandle, outcome: str, error: KvxferError | None) -> None:
        """Tell the owner how a claim ended, through the next daemon if there is none now."""
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
        """Receive what is sent to a channel of this node. Given up: what the daemon delivers until it hears of that is
        received all the same.
        """
        mine = self._deliveries[channel] = _Listening(callback)
        try:
            await self.request(m.Listen(channel=channel), deadline)
        except (asyncio.CancelledError, TransferTimeout):
            self._unlisten_in_background(channel, mine)
            raise
        except BaseException:
            self._stop_listening(channel, mine)
            raise

    def _unlisten_in_background(self, channel: str, mine: _Listening) -> None:
        try:
            if self._link is None:
                raise DaemonUnavailable("there is no link to the local daemon", peer=self._path)
            self._link.notify(m.Unlisten(channel=channel), lambda _: self._stop_listening(channel, mine))
        except KvxferError:
            self._stop_listening(channel, mine)  # the link's end has stopped it, or it cannot be said

    def _stop_listening(self, channel: str, mine: _Listening) -> None:
        if self._deliveries.get(channel) is mine:  # else somebody listens again
            del self._deliveries[channel]

    async def unlisten(self, channel: str, deadline: Deadline) -> None:
        """Stop it. What was on its way is still delivered; failing that, the link's end has stopped it."""
        mine = self._deliveries.get(channel)
        if mine is None:
            return
        try:
            await self.request(m.Unlisten(channel=channel), deadline)
        except (asyncio.CancelledError, TransferTimeout):
            self._unlisten_in_background(channel, mine)
            raise
        except BaseException:
            self._stop_listening(channel, mine)
            raise
        self._stop_listening(channel, mine)

    # -- incoming ---------------------------------------------------------------------------------------------------

    def _on_message(self, link: Link, message: m.Message) -> None:
        if isinstance(message, m.PostingEvent):
            self._on_posting_event(message)
        elif isinstance(message, m.Delivery):
            listening = self._deliveries.get(message.channel)
            if listening is not None:
                _tell(listening.callback, message)
            else:
                self.unexpected_events += 1
        else:
            self.unexpected_events += 1

    def _on_posting_event(self, event: m.PostingEvent) -> None:
        claimant = self._claims.get((event.posting, event.claim))
        if claimant is not None and event.what in CLAIM_ENDS:
            _tell(claimant, event)
            return
        handle = self._postings.get(event.posting)
        if handle is None:
            self._keep_unexpected(event)
            return
        if event.what == "claimed":
            handle.claims.add(event.claim)
        elif event.what in ("settled", "lost"):
            handle.claims.discard(event.claim)
            handle.spent |= handle.message.kind == "offer" or event.code == "done"
        elif event.what == "withdrawn" and event.code == PeerDraining.code:
            handle.stale = True  # the daemon leaves; the next one will be told
            return
        elif event.what in ("expired", "withdrawn"):
            del self._postings[event.posting]
            handle.withdrawn = True
        _tell(handle.on_event, event)

    def _keep_unexpected(self, event: m.PostingEvent) -> None:
        # An event may overtake the coroutine that waits for the reply which announces its claim or posting.
        self.unexpected_events += 1
        key = (event.posting, event.claim if event.what in CLAIM_ENDS else 0)
        kept = self._early.setdefault(key, [])
        if len(kept) < UNEXPECTED_EVENTS_MAX:
            kept.append(event)
        while len(self._early) > UNEXPECTED_KEYS_MAX:
            self._early.popitem(last=False)

    def _on_late(self, link: Link, message: m.Message) -> None:
        """The reply to a request that was given up: nobody knows of what it began. Or the second to a settlement."""
        if isinstance(message, m.Posted):
            if message.posting in self._postings:
                return  # it was renewed
            self._send(m.Withdraw(posting=message.posting, reason="given up"))
        elif isinstance(message, m.Claimed) and message.claim:
            self._send(m.Settle(posting=message.posting, claim=message.claim, outcome="cancelled"))
        elif isinstance(message, m.Done):
            self._outbox.acknowledged(message)

    # -- outgoing ---------------------------------------------------------------------------------------------------

    def _send(self, message: m.Settle | m.Withdraw) -> None:
        if self._closed and self._link is None:
            return
        if self._link is None and not (isinstance(message, m.Settle) and message.node):
            return  # it was about something of the daemon that has gone
        self._unsent.append(message)
        self._send_unsent()

    def _send_unsent(self) -> None:
        """In order; what the link does not take now waits a little, or for the next link."""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        while self._unsent and self._link is not None:
            message = self._unsent[0]
            try:
                self._notify(self._link, message)
            except KvxferError:
                self.unexpected_events += 1
                if not self._link.closed.done():
                    self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._send_unsent)
                return
            self._unsent.popleft()

    def _notify(self, link: Link, message: m.Settle | m.Withdraw) -> None:
        """Say it; what has to reach another node is remembered until it has."""
        if isinstance(message, m.Settle) and message.node:
            self._outbox.add(link.notify(message, self._outbox.acknowledged), message)
        else:
            link.notify(message)

    def _resend(self) -> None:
        """To a new daemon: first what the one before it may have kept to itself."""
        again = self._outbox.take(UNSENT_MAX - len(self._unsent))
        self._unsent.extendleft(reversed(again))
        self._send_unsent()

    @staticmethod
    def _loop_time() -> float:
        return asyncio.get_running_loop().time()

    async def aclose(self) -> None:
        """Say goodbye; the daemon withdraws what is still posted."""
        self._closed = True
        self._up.set()
        if self._retry is not None:
            self._retry.cancel()
        try:
            await self._tasks.aclose()
        finally:
            link = self._link
            if link is not None:
                link.start_close("client closed")
        if link is not None:
            await link.wait_closed()


def _tell(callback: Callable[[E], None], event: E) -> None:
    """One bad listener must not take the link with it."""
    try:
        callback(event)
    except Exception as error:
        context = {"message": "a listener of the control link failed", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)


def _nobody() -> None:
    """Nobody asked to hear of a new identity."""


# -- what a worker says of itself to its daemon, for readiness and metrics: one message, sent when it has changed ------
# The idea: the daemon is what operators look at, and some things only a worker knows. A report is the whole state, so
# a lost one does no harm, and many changes in a short time are one.


REPORT_S = 0.25  # changes that follow each other so quickly are told together


class Reporter:
    """The state, and when to tell it. ``registration_failed`` says why memory could not be registered."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._control: Control | None = None
        self._unexpected = UnexpectedCounts()
        self._told = Report()
        self._timer: asyncio.TimerHandle | None = None
        self.registration_failed = ""

    def start(self, control: Control, unexpected: UnexpectedCounts) -> None:
        """From now on everything is told to this daemon, and to the next one in its place."""
        self._control, self._unexpected = control, unexpected
        unexpected.on_add = self._changed
        control.on_restored = self._restored
        self._changed()

    def stop(self) -> None:
        """There is nobody to tell any more."""
        self._control = None
        self._unexpected.on_add = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def not_registered(self, why: KvxferError) -> None:
        """Remember that `Client.register_many` failed, for `Client.unready`."""
        self.registration_failed = f"memory could not be registered: {why}"
        self._changed()

    def registered(self) -> None:
        """Registering went well: this is no reason to be unready any more."""
        self.registration_failed = ""
        self._changed()

    def _restored(self) -> None:
        self._told = Report()
        self._changed()

    def _changed(self) -> None:
        if self._timer is None and self._control is not None:
            self._timer = asyncio.get_running_loop().call_later(REPORT_S, self._tell)

    def _tell(self) -> None:
        self._timer = None
        report = self._now()
        if report != self._told and self._control is not None and self._control.send_report(report):
            self._told = report

    def _now(self) -> Report:
        counts = self._unexpected.counts.most_common(DETAILS_MAX)
        return Report(
            unready=self.registration_failed,
            ignore_fingerprint=self._config.ignore_fingerprint,
            unexpected={f"{kind} {reason}": number for (kind, reason), number in counts},
        )

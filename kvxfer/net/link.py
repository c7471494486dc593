"""One control connection, seen from either end: requests, replies, unsolicited messages, and the one reason it ended.

The idea that makes it simple: everything that may be said on the wire is decided by the pure session; the link only
moves its bytes, runs its clock and keeps the table of pending requests. It is an `asyncio.Protocol`, so a link owns no
task: one timer follows the session's next deadline. Whatever happens to the connection, every pending request ends with
the same error, and `closed` carries it. Used by the daemon and by the client.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import secrets
import socket
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from kvxfer.addresses import Address, format_address
from kvxfer.config import DEFAULT_NAMESPACE, Config
from kvxfer.errors import (
    ClosedError,
    DaemonUnavailable,
    InternalError,
    KvxferError,
    PeerBackpressure,
    PeerLost,
    PeerUnreachable,
    ProtocolError,
    TooManyPending,
    TransferTimeout,
    UnknownMessage,
)
from kvxfer.logs import logger
from kvxfer.net.credentials import Credentials
from kvxfer.net.dial import dial_any, reason
from kvxfer.net.forks import own
from kvxfer.net.listeners import peer_credentials
from kvxfer.net.tls import Channel, SecureTransport, Wire
from kvxfer.rendezvous.shares import FairShares, exceeds_fair_share
from kvxfer.tasks import ANSWER, CONNECTING
from kvxfer.wire import messages as m
from kvxfer.wire.codec import Message, encode
from kvxfer.wire.framing import PREAMBLE, FrameDecoder
from kvxfer.wire.messages import exception_of, refusal
from kvxfer.wire.session import Closed, Deliver, Established, Facts, Session, Step

# -- what lies on all control connections of a process, bounded together: what waits to be sent, and what has been -----
# received of messages that are not complete.
#
# The idea: each connection has a bound of its own, but a thousand peers that read slowly, or that never finish what
# they began to say, would add up. So there is one sum for all, and less than that for one node, however many
# connections it has. A connection is looked at when something is sent on it, and all of them again only when the sum
# seems too large, since what was sent meanwhile is not told. The connections of one node also share one turn of the
# event loop: a node does not get more of it by having more of them.


UNFINISHED_BYTES_MAX = 64 << 20  # of all connections; a frame's own limit is higher only where it is configured so
UNFINISHED_BYTES_MIN = 64 << 10  # less on one connection is not counted
NODE_QUEUES = 2  # one node's connections may hold as much as so many full ones: one in each direction


class Queue(Protocol):
    """A connection. ``account`` is for whom it counts: the node at its other end."""

    name: str

    @property
    def account(self) -> Hashable: ...

    @property
    def queued_bytes(self) -> int: ...


class Queues:
    """All connections of one daemon; ``bytes_max`` may wait on them together, ``link_bytes_max`` on each."""

    def __init__(self, bytes_max: int, link_bytes_max: int = 0, frame_bytes_max: int = 0) -> None:
        self._bytes_max = bytes_max
        self._node_bytes_max = NODE_QUEUES * link_bytes_max or bytes_max
        self._known: dict[Queue, int] = {}
        self._total = 0
        self._unfinished: dict[Queue, int] = {}
        self._turns: dict[Hashable, deque[Queue]] = {}
        self._receiving = FairShares(max(UNFINISHED_BYTES_MAX, NODE_QUEUES * frame_bytes_max))

    # -- to be sent ------------------------------------------------------------------------------------------

    @property
    def total(self) -> int:
        """Bytes that wait to be sent now."""
        self._look_again()
        return self._total

    def full(self, size: int, share: float = 1.0) -> bool:
        """Whether ``size`` more bytes would be more than this share of the bound."""
        limit = share * self._bytes_max
        if self._total + size > limit:
            self._look_again()
        return self._total + size > limit

    def require(self, link: Queue, size: int) -> None:
        """Raises `PeerBackpressure` when there is no room for ``size`` more bytes on any connection, or on those of
        this node.
        """
        if self.full(size):
            why = "too much waits to be sent to all peers together"
            raise PeerBackpressure(why, peer=link.name, bytes=size, limit=self._bytes_max, all_links=True)
        if self._total + size > self._node_bytes_max and self._waits_for(link) + size > self._node_bytes_max:
            why = "too much waits to be sent to this node over all its connections"
            raise PeerBackpressure(why, peer=link.name, bytes=size, limit=self._node_bytes_max)

    def sent(self, link: Queue) -> None:
        """Something was sent on this connection."""
        waits = link.queued_bytes
        self._total += waits - self._known.pop(link, 0)
        if waits:
            self._known[link] = waits

    def forget(self, link: Queue) -> None:
        """The connection has ended: its entries are dropped."""
        self._total -= self._known.pop(link, 0)
        self._receiving.give(link.account, self._unfinished.pop(link, 0))

    def longest(self) -> Queue | None:
        """The connection on which most bytes wait."""
        self._look_again()
        return max(self._known, key=self._known.__getitem__, default=None)

    def _waits_for(self, link: Queue) -> int:
        """What waits for the node of this connection, and is known to."""
        account = link.account
        return sum(waits for other, waits in self._known.items() if other.account == account)

    def _look_again(self) -> None:
        now = {link: link.queued_bytes for link in self._known}
        self._known = {link: waits for link, waits in now.items() if waits}
        self._total = sum(self._known.values())

    # -- turns -----------------------------------------------------------------------------------------------

    def taken(self, link: Queue) -> bool:
        """Other connections of this node wait for their turn."""
        return link.account in self._turns

    def line_up(self, link: Queue) -> bool:
        """This connection has more to say. Whether it is the first of its node: then somebody has to see to `turn`."""
        line = self._turns.setdefault(link.account, deque())
        line.append(link)
        return len(line) == 1

    def turn(self, account: Hashable) -> tuple[Queue, bool]:
        """Whose turn it is of a node's connections, and whether more of them wait."""
        line = self._turns[account]
        link = line.popleft()
        if not line:
            del self._turns[account]
        return link, bool(line)

    # -- received --------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        """Bytes that have been received of messages that are not complete."""
        return self._receiving.total

    def received(self, link: Queue, size: int) -> Queue | None:
        """So much of an unfinished message lies on this connection. Returns the one that has to go for it when all hold
        too much, or this node more than its share: the longest one of the node that holds most.
        """
        counted = size if size >= UNFINISHED_BYTES_MIN else 0
        if counted == self._unfinished.get(link, 0):
            return None
        receiving, account = self._receiving, link.account
        receiving.give(account, self._unfinished.pop(link, 0))
        receiving.take(account, counted)
        if not counted:
            return None
        self._unfinished[link] = counted
        if not exceeds_fair_share(receiving.held(account), receiving.total, receiving.limit):
            return None
        most = receiving.most()
        return max(
            (other for other in self._unfinished if other.account == most),
            key=self._unfinished.__getitem__,
        )


# -- the requests of one link that wait for their reply: each ends once, by a reply, its deadline or the link's end ----
# A request that says how long it may wait at the other side (for an offer, for room) is not one that the other side
# owes an answer to: the two are counted apart, so that a node that makes others wait keeps nobody from asking
# anything else.
#
# The idea: a reply that was on time is never called late. Event loops differ in whether they run due timers before or
# after they read sockets, so a deadline that fires waits for one more turn before it gives the request up.


LATE_GRACE_S = 0.002  # what lies in the socket when the deadline fires was not late
REPLIES = (m.Done, m.Posted, m.Claimed, m.StatusReply, m.EchoReply, m.Error)


Then = Callable[[Message], None]


def _drop(_: Message) -> None:
    """Nobody wants to know."""


class _PendingReply:
    """A future, and the timer behind it."""

    __slots__ = ("future", "timer", "what")

    def __init__(self, future: asyncio.Future[Message], what: str) -> None:
        self.future = future
        self.what = what
        self.timer: asyncio.TimerHandle | None = None


class Requests:
    """Pending requests by their number. At most ``pending_max`` at a time, beside ``waits_max`` that are to wait.

    ``on_late`` gets a reply that came in the very turn in which its request was cancelled.
    """

    def __init__(self, pending_max: int, waits_max: int, on_late: Callable[[Message], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_late = on_late
        self._pending_max = pending_max
        self._waits_max = waits_max
        self._waits: set[int] = set()
        self._pending: dict[int, _PendingReply | Then] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def unanswered(self) -> int:
        """Those of them that do not wait for anything but their answer."""
        return len(self._pending) - len(self._waits)

    def number(self, peer: str, *, waits: bool = False) -> int:
        """A number for a new request; ``waits``: it may wait at the other side. Raises `TooManyPending`."""
        held, limit, option = self.unanswered, self._pending_max, "requests_max"
        what = "unanswered requests"
        if waits:
            held, limit, option = len(self._waits), self._waits_max, "waiting_max"
            what = "requests wait for a posting or for room"
        if held >= limit:
            hint = f"try again when some of them are answered, or raise {option} of this process"
            raise TooManyPending(f"too many {what}", peer=peer, limit=limit, option=option, hint=hint)
        return next(self._numbers)

    def forget(self, number: int, then: Then = _drop) -> None:
        """A request that nobody waits for: its reply goes to ``then``, if it comes before the link ends."""
        self._pending[number] = then

    async def wait(self, number: int, what: str, *, timeout: float, peer: str, waits: bool = False) -> Message:
        """The reply; an `Error` reply is raised as the error that it names. Raises `TransferTimeout`. Cancel-safe."""
        if waits:
            self._waits.add(number)
        waiting = _PendingReply(self._loop.create_future(), what)
        waiting.timer = self._loop.call_later(timeout, self._deadline_passed, waiting, peer)
        self._pending[number] = waiting
        try:
            return await waiting.future
        except asyncio.CancelledError:
            done = waiting.future
            if done.done() and not done.cancelled() and done.exception() is None:
                self._on_late(done.result())
            raise
        finally:
            self._pending.pop(number, None)
            self._waits.discard(number)
            waiting.timer.cancel()

    def take(self, reply: Any, peer: str) -> bool:
        """Hand a reply to whoever waits for it; False when its request had been given up."""
        if reply.rid not in self._pending:
            return False
        waiting = self._pending.pop(reply.rid)
        self._waits.discard(reply.rid)
        if not isinstance(waiting, _PendingReply):
            waiting(reply)
            return True
        if waiting.future.done():
            return False
        if isinstance(reply, m.Error):
            error = exception_of(reply)
            error.peer = error.peer or peer
            waiting.future.set_exception(error)
        else:
            waiting.future.set_result(reply)
        return True

    def fail(self, error: KvxferError) -> None:
        """The link has ended: every request fails with (its own copy of) the reason."""
        pending, self._pending = self._pending, {}
        self._waits.clear()
        for waiting in pending.values():
            if isinstance(waiting, _PendingReply) and not waiting.future.done():
                waiting.future.set_exception(copy.copy(error))

    def _deadline_passed(self, waiting: _PendingReply, peer: str) -> None:
        waiting.timer = self._loop.call_later(LATE_GRACE_S, self._give_up, waiting, peer)

    def _give_up(self, waiting: _PendingReply, peer: str) -> None:
        if not waiting.future.done():
            text = f"no reply to {waiting.what} before the deadline"
            waiting.future.set_exception(TransferTimeout(text, peer=peer, state=ANSWER))


UNFINISHED_TLS = "the other side ended the connection during the TLS handshake"
FLUSH_S = 0.7  # a closing link may take this long to send what is queued
# A link that has more to say goes on after all others had their turn: after so many messages, bytes or seconds.
MESSAGES_PER_TURN, BYTES_PER_TURN, TURN_S = 32, 256 << 10, 0.001
OWN_REPLIES_BYTES_MAX = 64 << 10  # what the session itself may queue above the limit before the link is given up

log = logger("kvxfer.link")

OnMessage = Callable[["Link", Message], None]
OnLink = Callable[["Link"], None]
Random = Callable[[int], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalIdentity:
    """What this side says about itself. ``incarnation`` empty: a random one for this link alone."""

    role: str
    name: str = ""
    engine_id: str = ""
    counters_path: str = ""
    node_id: str = ""
    incarnation: str = ""
    namespace: str = ""

    def session_identity(self, random: Random) -> Facts:
        """The same as the session wants it."""
        return Facts(
            role=self.role,
            node_id=self.node_id,
            incarnation=self.incarnation or random(16).hex(),
            name=self.name,
            pid=os.getpid(),
            engine_id=self.engine_id,
            counters_path=self.counters_path,
            namespace="" if self.namespace == DEFAULT_NAMESPACE else self.namespace,
        )


class Link(asyncio.Protocol):
    """A control connection. Made by `dial`, `dial_unix` or an `Acceptor`; belongs to one event loop.

    ``peer`` is what the other side said about itself, set once ``ready`` is done; ``pid`` and ``uid`` are what the
    kernel says about the other end of a Unix socket. ``closed`` resolves with the error that says why the link ended,
    ``gone`` when its socket is closed.
    ``on_message`` gets whatever is no reply, ``on_late`` the replies whose request had been given up.
    """

    def __init__(
        self,
        session: Session,
        config: Config,
        *,
        on_message: OnMessage | None = None,
        on_late: OnMessage | None = None,
        on_connected: OnLink | None = None,
        on_ready: OnLink | None = None,
        channel: Channel | None = None,
        queues: Queues | None = None,
    ) -> None:
        self._queues = queues
        self._loop = asyncio.get_running_loop()
        self._channel = channel
        self._secure: SecureTransport | None = None
        self._session = session
        self._config = config
        self._decoder = FrameDecoder(expect_preamble=session.side == "acceptor")
        self._transport: Wire | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0  # uvloop's handles do not tell when they are due, once that has passed
        self._flush: asyncio.TimerHandle | None = None
        self._waits_for_turn = False
        self._lost = False
        self._lost_by: Exception | None = None
        self._requests = Requests(config.requests_max, config.waiting_max, self._on_late_connection)
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self._on_connected = on_connected
        self._on_ready = on_ready
        self.on_message = on_message
        self.on_late = on_late
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.ready.add_done_callback(_retrieve)
        self.closed: asyncio.Future[KvxferError] = self._loop.create_future()
        self.peer = Facts(incarnation="")
        self.name = ""
        self.host = self.address = ""  # of the other end, without and with its port; empty for a Unix socket
        self.pid = 0
        self.uid: int | None = None
        self.late_replies = 0
        self.session = ""  # both sides know the connection by this name
        self._greeting: Sequence[Message] = ()

    def __repr__(self) -> str:
        return f"<Link {self.name} {self._session.state.value}>"

    # -- making one ------------------------------------------------------------------------------------------

    @classmethod
    async def dial(
        cls,
        addresses: Sequence[str],
        identity: LocalIdentity,
        config: Config,
        *,
        credentials: Credentials | None = None,
        authorise: Callable[[Facts], None] | None = None,
        expected_node_id: str = "",
        timeout: float | None = None,
        on_message: OnMessage | None = None,
        on_late: OnMessage | None = None,
        queues: Queues | None = None,
        random: Random = secrets.token_bytes,
    ) -> Link:
        """A ready link to the first of the candidate ``addresses`` that answers, within ``timeout`` seconds.

        Raises `PeerUnreachable` with every candidate's reason; `NotKvxfer`, `AuthenticationError`, `VersionMismatch`,
        `IdentityMismatch` or another refusal when somebody answered.
        """

        async def attempt(address: Address) -> Link:
            session = Session(
                "dialler",
                identity.session_identity(random),
                config,
                nonce=random(32),
                now=asyncio.get_running_loop().time(),
                secret=credentials.secret if credentials else b"",
                more_secrets=credentials.secrets[1:] if credentials else (),
                keys=credentials.keys if credentials else None,
                expected_node_id=expected_node_id,
                authorise=authorise,
            )
            channel = credentials.channel("dialler") if credentials else None
            link = cls(session, config, on_message=on_message, on_late=on_late, channel=channel, queues=queues)
            async with asyncio.timeout(config.connect_s):
                await link._loop.create_connection(lambda: link, address.host, address.port)
            return await link._until_ready()

        limit_s = config.connect_s + config.handshake_s if timeout is None else timeout
        return await dial_any(addresses, attempt, timeout=limit_s, discard=Link.abort)

    @classmethod
    async def dial_unix(
        cls,
        path: str,
        identity: LocalIdentity,
        config: Config,
        *,
        on_message: OnMessage | None = None,
        on_late: OnMessage | None = None,
        random: Random = secrets.token_bytes,
    ) -> Link:
        """A ready link to the daemon of this node. Raises `DaemonUnavailable`, or what the daemon refused with."""
        now = asyncio.get_running_loop().time()
        session = Session("dialler", identity.session_identity(random), config, nonce=random(32), now=now)
        link = cls(session, config, on_message=on_message, on_late=on_late)
        try:
            async with asyncio.timeout(config.connect_s):
                await link._loop.create_unix_connection(lambda: link, str(path))
            if link.uid not in (os.getuid(), 0, None, *config.socket_users):
                link.abort()
                raise DaemonUnavailable(f"the socket {path} is served by another user", uid=link.uid)
            return await link._until_ready()
        except (OSError, PeerLost, PeerUnreachable) as failure:
            hint = "start a daemon with `kvxfer serve`, or set socket_dir to where one listens"
            if isinstance(failure, PeerLost):
                hint = (
                    "a daemon is there and hung up, perhaps it has too many connections: its log says whom it refused"
                )
            why = reason(failure)
            raise DaemonUnavailable(
                f"no daemon answers at {path}: {why}", peer=str(path), hint=hint, state=CONNECTING
            ) from failure

    async def _until_ready(self) -> Link:
        try:
            await asyncio.shield(self.ready)
        except BaseException:
            self.abort()
            await asyncio.shield(self.gone)
            raise
        return self

    # -- requests --------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Requests whose reply is still to come."""
        return len(self._requests)

    @property
    def unanswered(self) -> int:
        """Those of them that do not wait for anything at the other side."""
        return self._requests.unanswered

    @property
    def account(self) -> Hashable:
        """For whom its share of what is limited is counted: the node at its other end, or this link alone."""
        return self.peer.node_id or self

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be sent."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def proved_with(self) -> bytes:
        """The secret with which the other side has proved itself; empty: none was asked for."""
        return self._session.proved_with

    @property
    def authorities(self) -> int | None:
        """Of which reading of the authorities its certificate is (`Credentials.authorities`); None without one."""
        return None if self._channel is None else self._channel.authorities

    @property
    def version(self) -> int:
        """Of the protocol, as agreed with the other side; 0 until the link is ready."""
        return self._session.version

    @property
    def usable(self) -> bool:
        """Open, and the peer has not announced that it leaves."""
        return self.ready.done() and not self.closed.done() and self._session.goodbye is None

    async def request(self, message: Message, *, timeout: float) -> Message:
        """Send a message and wait for its reply. An `Error` reply is raised as the typed error that it names.

        Raises `TransferTimeout` after ``timeout`` seconds, what ended the link when it ends first; `TooManyPending`,
        `PeerBackpressure` or `UsageError` when nothing was sent. Cancelling leaves no state.
        """
        number = self._send_request(message)
        what = type(message).__name__
        try:
            return await self._requests.wait(number, what, timeout=timeout, peer=self.name, waits=waits(message))
        except (asyncio.CancelledError, TransferTimeout):
            if isinstance(message, m.Claim | m.Land):
                self._give_up(number)
            raise
        except UnknownMessage as unknown:
            if "newest" in unknown.fields:  # of somebody behind the other side, who was asked for us
                raise
            raise self._session.not_known(what, unknown) from unknown

    def _give_up(self, number: int) -> None:
        """A claim that goes on waiting would take the place of somebody who still wants it."""
        try:
            self.send(m.GiveUp(request=number))
        except KvxferError as failure:
            log.debug("%s: a claim could not be given up: %s", self.name, failure)

    def notify(self, message: Message, then: Callable[[Message], None] | None = None) -> int:
        """Send a request that nobody waits for; its reply goes to ``then``. Returns the request's number.

        Raises like `send`, and `TooManyPending`.
        """
        number = self._send_request(message)
        if then is None:
            self._requests.forget(number)
        else:
            self._requests.forget(number, then)
        return number

    def send(self, message: Message) -> None:
        """Queue a message, or raise and send nothing.

        Raises `PeerBackpressure` when `link_queue_bytes_max`, or `link_queues_bytes_max` of all links together, is
        reached, `TooLarge` and `UsageError` for what cannot be
        sent on this link, and what ended the link when it has ended.
        """
        if self.closed.done():
            raise self._copy_of_reason()
        if not self.ready.done() or (self._transport is None and not self._lost):
            raise ClosedError("the link is not ready", peer=self.name)
        self._session.check_send(message)
        if self._transport is None:
            return  # lost already; `closed` says so when all that had come is handled
        frame = encode(message, self._config.frame_control_bytes_max)
        limit = self._config.link_queue_bytes_max
        if self._transport.get_write_buffer_size() + len(frame) > limit:
            raise PeerBackpressure("the peer does not keep up", peer=self.name, bytes=len(frame), limit=limit)
        if self._queues is not None:
            self._queues.require(self, len(frame))
        self._transport.write(frame)
        if self._queues is not None:
            self._queues.sent(self)

    def _send_request(self, message: Message) -> int:
        number = self._requests.number(self.name, waits=waits(message))
        self.send(replace(cast(Any, message), rid=number))
        return number

    def _reply(self, message: Message) -> None:
        if not self._requests.take(message, self.name):
            self._on_late_connection(message)

    def _on_late_connection(self, message: Message) -> None:
        self.late_replies += 1
        if self.on_late is not None:
            self.on_late(self, message)

    # -- the end ---------------------------------------------------------------------------------------------

    async def wait_closed(self) -> KvxferError:
        """Wait until the connection is gone; returns the reason."""
        await asyncio.shield(self.gone)
        return self.closed.result()

    async def aclose(self, reason: str) -> None:
        """Say goodbye, send what is queued (for less than a second), close."""
        self.start_close(reason)
        await self.wait_closed()

    def start_close(self, reason: str) -> None:
        """Begin what `aclose` does, without waiting for it."""
        if self.closed.done():
            return
        if self.ready.done() and self._transport is not None:
            self._transport.write(encode(m.Goodbye(reason=reason)))
        self._end(ClosedError(f"this side closed the link: {reason}", peer=self.name))

    def abort(self, reason: str = "aborted") -> None:
        """Drop the connection at once."""
        self._end(ClosedError(f"this side dropped the link: {reason}", peer=self.name))
        if self._transport is not None:
            self._transport.abort()

    def set_urgent(self, urgent: bool) -> None:
        """Something live depends on the peer (or no longer): notice within seconds when it is lost."""
        if urgent != self._session.urgent:
            self._session.set_urgent(urgent)
            self._arm()

    def _end(self, error: KvxferError) -> None:
        """The one way to end: everybody who waits hears ``error``, then the transport flushes and closes."""
        if self.closed.done():
            return
        error.peer = error.peer or self.name or None
        # What was on the stack leads back here, with all that had come: memory that only the collector would free.
        error.__traceback__ = error.__context__ = None
        self.closed.set_result(error)
        if self._timer is not None:
            self._timer.cancel()
        if not self.ready.done():
            self.ready.set_exception(copy.copy(error))
        self._requests.fail(error)
        if self._queues is not None:
            self._queues.forget(self)
        if self._transport is not None:
            self._flush = self._loop.call_later(FLUSH_S, self._transport.abort)
            self._transport.close()

    def _copy_of_reason(self) -> KvxferError:
        return copy.copy(self.closed.result())

    # -- what the event loop calls ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        wire = cast(asyncio.Transport, transport)
        if self._channel is not None:
            self._secure = SecureTransport(wire, self._channel)
        self._transport = self._secure or wire
        self._learn_endpoint(transport)
        if self.closed.done():
            self._transport.abort()
            return
        if self._on_connected is not None:
            self._on_connected(self)
            if self.closed.done():
                return
        self._greeting = self._session.start(self._loop.time())
        if self._secure is not None:
            self._secure.start()
        else:
            self._greet()
        self._arm()

    def _greet(self) -> None:
        """Nothing stands between the two sides any more."""
        if self._transport is not None and self._session.side == "dialler":
            self._transport.write(PREAMBLE)
        for message in self._greeting:
            self._write(message)

    def _decrypted(self, secure: SecureTransport, channel: Channel, data: bytes) -> bytes:
        """What the other side said, when it has proved who it is; ends the link when it cannot."""
        proved = channel.peer is not None
        try:
            data = secure.receive(data)
        except KvxferError as wrong:
            if channel.plain:
                secure.write_plain(encode(refusal(wrong)))
            self._do(self._session.fail(wrong))
            return b""
        if channel.peer is not None and not proved:
            self._session.certify(channel.peer.node_id)
            self._greet()
        return data

    def _learn_endpoint(self, transport: asyncio.BaseTransport) -> None:
        connection = transport.get_extra_info("socket")
        if connection is not None:
            own(connection.fileno())
        if connection is not None and connection.family == socket.AF_UNIX:
            self.pid, self.uid = peer_credentials(connection)
            self.name = f"daemon with pid {self.pid}" if self._session.side == "dialler" else f"pid {self.pid}"
        else:
            name = transport.get_extra_info("peername")
            self.host = str(name[0]) if name else ""
            self.address = format_address(self.host, int(name[1])) if name else ""
            self.name = self.address or "unknown"

    def data_received(self, data: bytes) -> None:
        if self._secure is not None and self._channel is not None:
            if self.closed.done():
                return
            data = self._decrypted(self._secure, self._channel, data)
        self._session.heard(self._loop.time())
        self._decoder.feed(data)
        if self._waits_for_turn:
            return
        if (self._queues is not None and self._queues.taken(self)) or self._take():
            self._line_up()

    def _take(self) -> bool:
        """Handle some of what has been received; whether there may be more."""
        decoder, messages = self._decoder, self._decoder.feed(b"")
        ends_at, left = self._loop.time() + TURN_S, decoder.buffered - BYTES_PER_TURN
        for _ in range(MESSAGES_PER_TURN):
            if self.closed.done():
                return False
            try:
                message = next(messages, None)
            except ProtocolError as wrong:
                self._do(self._session.fail(wrong))
                return False
            if message is None:
                self._arm()
                self._count_received()
                return False
            self._do(self._session.receive(message, self._loop.time()))
            if decoder.buffered < left or self._loop.time() >= ends_at:
                break
        return True

    def _line_up(self) -> None:
        """Go on in a later turn of the loop, after the other links of the same node."""
        if not self._waits_for_turn:
            self._waits_for_turn = True
            if self._transport is not None:
                self._transport.pause_reading()
            self._count_received()
        if self._queues is None:
            self._loop.call_soon(self._next_turn)
        elif self._queues.line_up(self):
            self._loop.call_soon(_turn, self._loop, self._queues, self.account)

    def _count_received(self) -> None:
        """What is left is the beginning of a message, or waits for its turn. A node of which too much lies here loses
        the connection with most of it.
        """
        if self._queues is None or not self.ready.done() or self.closed.done():
            return
        longest = self._queues.received(self, self._decoder.buffered)
        if isinstance(longest, Link):
            log.warning("%s: too much that is not handled yet lies on the connections of its node", longest.name)
            longest.abort("too much that is not handled yet lies on all connections")

    def _next_turn(self) -> None:
        if self.gone.done():
            return
        if self._take():
            self._line_up()
            return
        self._waits_for_turn = False
        if self._lost:
            self._finish()
        elif self._transport is not None and not self.closed.done():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost, self._lost_by = True, exc
        if self.closed.done() or not self._waits_for_turn:  # what came before the end counts
            self._finish()

    def _finish(self) -> None:
        exc, self._lost_by = self._lost_by, None
        if not self.closed.done():
            step = self._session.end(self._decoder.buffered)
            if self._channel is not None and self._channel.peer is None and isinstance(step.event, Closed):
                step = Step(event=Closed(error=PeerLost(f"{UNFINISHED_TLS}: has it a tls_cert, too?")))
            if exc is not None and isinstance(step.event, Closed):
                step.event.error.fields["cause"] = reason(exc)
            self._do(step)
        for timer in (self._timer, self._flush):
            if timer is not None:
                timer.cancel()
        self._secure = self._channel = None
        self._decoder = FrameDecoder()
        if not self.gone.done():
            self.gone.set_result(None)

    # -- what the session decides ----------------------------------------------------------------------------

    def _do(self, step: Step) -> None:
        for message in step.send:
            self._write(message)
        event = step.event
        if isinstance(event, Deliver):
            self._deliver(event.message)
        elif isinstance(event, Established):
            self._established(event)
        elif isinstance(event, Closed):
            self._end(event.error)

    def _write(self, message: Message) -> None:
        if self._transport is None or self.closed.done():
            return
        self._transport.write(encode(message))
        limit = self._config.link_queue_bytes_max + OWN_REPLIES_BYTES_MAX
        if self._transport.get_write_buffer_size() > limit:
            self.abort("the peer sends but does not read")

    def _established(self, event: Established) -> None:
        self._decoder.frame_bytes_max = self._config.frame_control_bytes_max
        self.peer = event.peer
        self.session = event.session
        if self.uid is None and event.peer.node_id:
            self.name = f"{event.peer.node_id[:8]} at {self.name}"
        elif event.peer.name:
            self.name = f"{event.peer.name} ({self.name})"
        self.ready.set_result(None)
        if self._on_ready is not None:
            self._on_ready(self)

    def _deliver(self, message: Message) -> None:
        if isinstance(message, REPLIES):
            self._reply(message)
        elif self.on_message is not None:
            try:
                self.on_message(self, message)
            except Exception:  # a bug on this side: told to the log and to the peer, and it costs this link only
                log.exception("%s: handling of %s failed", self.name, type(message).__name__)
                self._do(self._session.fail(InternalError(f"handling of {type(message).__name__} failed")))

    def _arm(self) -> None:
        """Follow the session's deadline. A timer that fires early only looks again, so life needs no re-arming."""
        due = self._session.deadline()
        if due is None or (self._timer is not None and not self._timer.cancelled() and self._timer_due <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._tick)
        self._timer_due = due

    def _tick(self) -> None:
        self._timer = None
        self._do(self._session.tick(self._loop.time()))
        if not self.closed.done():
            self._arm()


def _turn(loop: asyncio.AbstractEventLoop, queues: Queues, account: Hashable) -> None:
    """One of a node's links handles some of what it has received, the next one in the next turn of the loop."""
    link, more = queues.turn(account)
    if more:
        loop.call_soon(_turn, loop, queues, account)
    if isinstance(link, Link):
        link._next_turn()


def waits(message: Message) -> bool:
    """It may stay at the other side for a while before it is answered."""
    return isinstance(message, m.Claim | m.Land) and message.wait_s > 0


def _retrieve(future: asyncio.Future[None]) -> None:
    if not future.cancelled():
        future.exception()

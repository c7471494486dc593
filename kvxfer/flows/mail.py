"""Small messages between nodes: `send` puts bytes into a channel of a node, `recv` takes the next one out.

The daemon keeps undelivered mail (bounded, with a time-to-live); here is the part of a worker that listens to channels.
Listening belongs to the channel, not to a receiver: a cancelled `recv` takes nothing and loses nothing. A worker that
does not fetch its mail stops listening, so that the daemon keeps it and tells the senders when there is too much.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

import msgpack

from kvxfer.config import CHANNEL_CHARS_MAX, Config
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import BusyError, ClosedError, KvxferError, PeerBackpressure, PeerLost, TransferTimeout, UsageError
from kvxfer.flows.control import Control, PostingHandle
from kvxfer.flows.exchange import from_peer, unpack_map
from kvxfer.native.engine import Event, EventKind
from kvxfer.tasks import OTHER_SIDE, Deadline, TaskOwner, seconds
from kvxfer.wire import messages as m
from kvxfer.wire.messages import Claim, PostingEvent

if TYPE_CHECKING:
    from kvxfer.client import Client
    from kvxfer.memory.region import Region


CHANNELS_IDLE_MAX = 64
SENDS_MAX, SEND_BYTES_MAX = 256, 8 << 20  # on their way to one node
MESSAGES_HIGH = 64  # more than this, not fetched: stop listening
MESSAGES_KEPT_MAX = 65536  # what can still be on its way then is less


@dataclass(slots=True, eq=False)
class _Box:
    """One channel: mail that came, who waits for it (the first has its turn), and whether the daemon sends us more."""

    mail: deque[bytes] = field(default_factory=deque)
    size: int = 0
    turns: deque[asyncio.Future[None]] = field(default_factory=deque)
    delivered_at: float = 0.0  # the newest message
    listening: bool = False
    idle: bool = False
    work: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """The first in line may take the first message."""
        if self.mail and self.turns and not self.turns[0].done():
            self.turns[0].set_result(None)

    def fail(self, error: KvxferError) -> None:
        """Everybody who waits is told."""
        for turn in self.turns:
            if not turn.done():
                turn.set_exception(error)


class Mailboxes:
    """The channels that one worker listens to."""

    def __init__(self, control: Control, config: Config) -> None:
        self._control = control
        self._config = config
        self._tasks = TaskOwner("mailboxes")
        self._boxes: OrderedDict[str, _Box] = OrderedDict()
        self._closed = False
        self._sending: dict[tuple[str, ...], tuple[int, int]] = {}  # messages and bytes on their way to a node
        self.dropped = 0

    async def send(self, node: tuple[str, ...], channel: str, data: bytes, deadline: Deadline) -> None:
        """Deliver to a node's channel; `BusyError` when its mailbox is full, `PeerBackpressure` when too much is on its
        way to it.
        """
        _check_channel(channel)
        if not isinstance(data, bytes | bytearray | memoryview):
            raise UsageError("data must be bytes", field="data", got=type(data).__name__)
        payload = bytes(data)
        if len(payload) > self._config.mail_bytes_max:
            raise UsageError(
                "the message is too long", field="data", length=len(payload), limit=self._config.mail_bytes_max
            )
        with self._place(node, len(payload)):
            await self._control.request(m.Mail(node=node, channel=channel, data=payload), deadline)

    @contextmanager
    def _place(self, node: tuple[str, ...], size: int) -> Iterator[None]:
        """A place among the messages on their way to a node: one that does not answer must not take those of others."""
        count, total = self._sending.get(node, (0, 0))
        if count >= SENDS_MAX or (count and total + size > SEND_BYTES_MAX):
            raise PeerBackpressure(
                "the peer does not keep up with its messages",
                peer=",".join(node) or None,
                messages=count,
                messages_max=SENDS_MAX,
                bytes=total,
                bytes_max=SEND_BYTES_MAX,
                hint="try again when some of them have been answered",
            )
        self._sending[node] = count + 1, total + size
        try:
            yield
        finally:
            count, total = self._sending.pop(node)
            if count > 1:
                self._sending[node] = count - 1, total - size

    async def recv(self, channel: str, deadline: Deadline) -> bytes:
        """The next message; messages go to waiting receivers in the order in which they asked."""
        _check_channel(channel)
        if self._closed:
            raise ClosedError("the client is closed")
        box = self._boxes.setdefault(channel, _Box())
        self._boxes.move_to_end(channel)
        box.idle = False
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        turn.add_done_callback(_retrieve)
        box.turns.append(turn)
        box.wake()
        self._follow(channel, box)
        try:
            async with deadline.bound(f"a message came in channel {channel!r}", OTHER_SIDE):
                await turn
            data = box.mail.popleft()
            box.size -= len(data)
            return data
        finally:
            box.turns.remove(turn)
            box.wake()
            self._follow(channel, box)
            self._tidy()

    def _on_delivery(self, message: m.Delivery) -> None:
        box = self._boxes.get(message.channel)
        if box is None or len(box.mail) >= MESSAGES_KEPT_MAX:
            self.dropped += 1
            return
        box.mail.append(message.data)
        box.delivered_at = asyncio.get_running_loop().time()
        box.size += len(message.data)
        box.wake()
        self._follow(message.channel, box)

    # -- listening -----------------------------------------------------------------------------------------------

    def _follow(self, channel: str, box: _Box) -> None:
        """Listen while somebody waits and there is nothing for him; stop when too much is not fetched."""
        full = len(box.mail) >= MESSAGES_HIGH or box.size >= 2 * self._config.mail_bytes_max
        stays = not full and (bool(box.turns) or not box.idle)
        wanted = stays if box.listening else bool(box.turns) and not box.mail
        if wanted != box.listening and box.work is None and not self._closed:
            box.work = self._tasks.spawn(self._change(channel, box, wanted), f"listen to {channel}")

    async def _change(self, channel: str, box: _Box, listen: bool) -> None:
        deadline = Deadline.after(self._config.timeout_s)
        try:
            if listen:
                await self._control.listen(channel, self._on_delivery, deadline)
            else:
                await self._control.unlisten(channel, deadline)
            box.listening = listen
        except KvxferError as error:
            box.listening = False
            if listen:
                box.fail(error)
        box.work = None
        if box.listening or not listen:
            self._follow(channel, box)
        self._tidy()

    def _tidy(self) -> None:
        """Beyond `CHANNELS_IDLE_MAX`, channels that nobody waits for are left, the least recently used first; with
        messages in them after `mail_ttl_s`, like those that the daemon holds.
        """
        excess = len(self._boxes) - CHANNELS_IDLE_MAX
        fresh = asyncio.get_running_loop().time() - self._config.mail_ttl_s
        for channel, box in tuple(self._boxes.items()) if excess > 0 else ():
            if box.turns or box.work is not None or (box.mail and box.delivered_at >= fresh):
                continue
            self.dropped += len(box.mail)
            box.mail.clear()
            box.size = 0
            if box.listening:
                box.idle = True
                self._follow(channel, box)
            else:
                del self._boxes[channel]
            excess -= 1
            if not excess:
                return

    def close(self) -> None:
        """Whoever waits gets a `ClosedError`."""
        self._closed = True
        for box in self._boxes.values():
            box.fail(ClosedError("the client was closed"))

    async def aclose(self) -> None:
        """`close`, and end what is under way."""
        self.close()
        await self._tasks.aclose()


def _retrieve(turn: asyncio.Future[None]) -> None:
    """A receiver that was cancelled does not look any more."""
    if not turn.cancelled():
        turn.exception()


def _check_channel(channel: object) -> None:
    if not isinstance(channel, str) or not 0 < len(channel) <= CHANNEL_CHARS_MAX:
        raise UsageError(
            f"channel must be 1 to {CHANNEL_CHARS_MAX} characters", field="channel", value=repr(channel)[:40]
        )


# -- notifications through one of our own descriptors, in the order in which they arrived ------------------------------


PENDING_MAX = 65536


class Notifications:
    """``async with client.notifications(descriptor) as told: value = await told.next(timeout=5)``.

    Each value (0 to 2^64-1) comes after the bytes of the put that sent it. At most `PENDING_MAX` wait to be fetched.

    Raises: `UsageError` for a descriptor that is not this client's, or to which somebody listens already.
    """

    def __init__(self, client: Client, descriptor: RemoteDescriptor) -> None:
        if not isinstance(descriptor, RemoteDescriptor) or descriptor.engine_id != client.plane.engine_id:
            raise UsageError("notifications come through a descriptor that this client made", field="descriptor")
        self._client = client
        self._grant = descriptor.grant
        self._values: deque[int] = deque()
        self._error: KvxferError | None = None
        self._watching = False
        self._waiter: asyncio.Future[None] | None = None

    async def __aenter__(self) -> Notifications:
        plane = self._client.plane
        if plane.memory.subscribed(self._grant):
            raise UsageError("somebody listens to this descriptor already", grant=self._grant)
        plane.memory.subscribe(self._grant, self._on_event)
        self._client.register_flow(self, self._end)
        self._watching = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watching = False
        self._client.unregister_flow(self)
        if not self._client.closed:
            self._client.plane.memory.unsubscribe(self._grant)

    async def next(self, *, timeout: float) -> int:
        """Wait for the next value, at most ``timeout`` seconds.

        Raises, after the values that arrived before: `TransferTimeout`, `PeerLost` when the last peer that used the
        descriptor vanished, `BusyError` when more than `PENDING_MAX` were not fetched, `ClosedError`.
        """
        deadline = Deadline.after(timeout)
        while not self._values:
            if self._error is not None:
                error = self._error
                if not isinstance(error, ClosedError):
                    self._error = None
                raise error
            if not self._watching:
                raise ClosedError("notifications are taken inside the block only")
            if self._waiter is None or self._waiter.done():
                self._waiter = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._waiter], timeout=deadline.remaining())
            if not self._values and self._error is None and not deadline.remaining():
                raise TransferTimeout(f"no notification within {timeout:g} s", state=OTHER_SIDE)
        return self._values.popleft()

    def _on_event(self, event: Event) -> None:
        if event.kind == EventKind.GRANT_LOST:
            self._error = PeerLost("the last peer that used this descriptor vanished")
        elif len(self._values) >= PENDING_MAX:
            self._error = BusyError("notifications were not fetched", limit=PENDING_MAX)
        else:
            self._values.append(event.value)
        self._wake()

    def _end(self, error: KvxferError) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


# -- regions under a name: `share` posts a descriptor at the own daemon, `lookup` fetches it from another node's -------


NAME_CHARS_MAX = 256


class Share:
    """A region under a name; ends with `withdraw`, with its ``async with`` block, with its lease or with the client."""

    def __init__(self, client: Client, region: Region, access: str) -> None:
        self._client = client
        self._region = region
        self._handle: PostingHandle | None = None
        self.ended = ""
        self.descriptor = region.grant_access(access, self._region_released)

    async def _post(self, name: str, lease_s: float, deadline: Deadline) -> None:
        body: bytes = msgpack.packb(self.descriptor.to_dict())
        try:
            self._handle = await self._client.control.post(
                "region", name, body, lease_s=lease_s, claims_max=0, on_event=self._on_event, deadline=deadline
            )
        except BaseException:
            if not self._client.closed:
                self._region.start_revoke(self.descriptor.grant)
            raise

    async def withdraw(self, *, timeout: float | None = None) -> None:
        """Remove the name and revoke the descriptor; returns when no peer can reach the memory through it.

        Raises: `TransferTimeout` after ``timeout`` seconds when one still can, as in `Region.revoke`.
        """
        deadline = self._client.deadline(timeout)
        handle, self._handle = self._handle, None
        if handle is not None:
            if self._client.closed:
                return
            self._client.control.withdraw_in_background(handle, "withdrawn")
            quiet = self._region.start_revoke(self.descriptor.grant)
            async with deadline.bound("every peer had let go of the shared memory", OTHER_SIDE):
                await asyncio.shield(quiet)

    def _region_released(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self._client.control.withdraw_in_background(handle, "its memory was released")

    def _on_event(self, event: PostingEvent) -> None:
        """Claims need no answer: the engine enforces what the descriptor allows."""
        if event.what in ("expired", "withdrawn"):
            self.ended = event.what

    async def renew(self, lease_s: float, *, timeout: float | None = None) -> None:
        """Keep the name for another ``lease_s`` seconds from now; the daemon has to say so within ``timeout``.

        Raises: `UsageError` (withdrawn, or ``lease_s``), `LeaseExpired` or `UnknownTransfer` (it is over),
        `TransferTimeout`, `DaemonUnavailable`.
        """
        if self._handle is None:
            raise UsageError("this share was withdrawn")
        deadline = self._client.deadline(timeout)
        await self._client.control.renew(self._handle, seconds(lease_s, "lease_s"), deadline)

    async def __aenter__(self) -> Share:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.withdraw()


async def share_region(
    client: Client, region: Region, name: str, access: str, lease_s: float, deadline: Deadline
) -> Share:
    """See `Client.share`."""
    _check_name(name)
    region.require(client.plane)
    share = Share(client, region, access)
    await share._post(name, lease_s, deadline)
    return share


async def lookup_descriptor(
    client: Client, node: tuple[str, ...], name: str, wait_s: float, deadline: Deadline
) -> RemoteDescriptor:
    """See `Client.lookup`."""
    _check_name(name)
    message = Claim(node=node, kind="region", key=name, wait_s=deadline.wait(wait_s))
    claim, body = await client.control.claim(message, deadline, _ignore_claims)
    # The descriptor stays valid until its owner takes it back; the claim itself is of no further use.
    client.control.report_in_background(claim, "done", None)
    with from_peer("descriptor"):
        return RemoteDescriptor.from_dict(unpack_map(body, "descriptor"))


def _ignore_claims(_: PostingEvent) -> None:
    """Claims of a name need no answer: the engine enforces what the descriptor allows."""


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARS_MAX:
        raise UsageError(f"name must be 1 to {NAME_CHARS_MAX} characters", field="name", value=repr(name)[:40])

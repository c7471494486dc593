"""`Client`: what an inference worker uses. Regions, one-sided put and get, push, pull, small messages.

A client has one engine (the data plane inside this process) and one link to its node's daemon. All methods belong to
the event loop in which the client was entered. Every timeout is in seconds and finite; the default is the
configuration's `timeout_s`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np

from kvxfer.addresses import as_node, parse_address
from kvxfer.config import Config, load
from kvxfer.config.paths import counters_path, daemon_socket, engine_dir, socket_dir
from kvxfer.dataplane.plane import DataPlane, WorkRequest
from kvxfer.dataplane.transfer import Transfer
from kvxfer.descriptors import ACCESS_READ, ACCESS_WRITE, U64_MAX, RemoteDescriptor
from kvxfer.errors import AccessDenied, ClosedError, ForkedClientError, KvxferError, UsageError, WrongThread
from kvxfer.flows.adopt import Adoption
from kvxfer.flows.caches import Caches, one_cache
from kvxfer.flows.control import Control, Reporter
from kvxfer.flows.mail import Mailboxes, Notifications, Share, lookup_descriptor, share_region
from kvxfer.flows.many import Group, Move, check_moves
from kvxfer.flows.offer import Landing
from kvxfer.flows.publish import Publication
from kvxfer.flows.pull import Pull, Pulled, release_unread
from kvxfer.flows.push import Push
from kvxfer.flows.segments import Segments, check_segments
from kvxfer.flows.tickets import AnyTicket, as_ticket, as_tickets
from kvxfer.geometry import BlockTable
from kvxfer.memory.allocation import Allocator, check_device, kind_of, register_all, wish
from kvxfer.memory.region import KVCache, Region, Span, check_span
from kvxfer.memory.reservations import BlockReservations, Reservation
from kvxfer.memory.sources import at_address, borrow
from kvxfer.native.engine import Engine, EngineConfig, OpKind, Priority, forks
from kvxfer.native.types import CORE_FIELDS, ROW_FIELDS, read_counters
from kvxfer.net.link import LocalIdentity
from kvxfer.tasks import Deadline, TaskOwner, seconds
from kvxfer.wire.messages import Echo, EchoReply

COUNTED = ("pulls", "pulled_bytes", "pull_failures", "pushes", "pushed_bytes", "push_failures")

# -- the life of a client: its engine, its connection to the daemon, its thread, and what has to end with it
# `Client` adds the verbs. A flow (an offer, a push, a publication) enters here while it runs, so that closing ends
# it.


# Ends a flow at once; what is still to be said to its other side, and when it has been, is in the coroutine (if any).
EndFlow = Callable[[KvxferError], Coroutine[Any, Any, None] | None]


class ClientLife:
    """A part of `Client`: opened by ``async with``, ended by `aclose`."""

    def __init__(self, socket: str | Path | None = None, *, config: Config | None = None, name: str = "") -> None:
        self.config = load().config if config is None else config
        self._socket = None if socket is None else Path(socket)
        self._name = name or f"worker-{os.getpid()}"
        self._tasks = TaskOwner("client")
        self._engine: Engine | None = None
        self._plane: DataPlane | None = None
        self._control: Control | None = None
        self._mailboxes: Mailboxes | None = None
        self._entered = False
        self._fork = self._thread = 0
        self._allocator: Allocator | None = None
        self._reporter = Reporter(self.config)
        self._flows: dict[object, EndFlow] = {}
        self._released: OrderedDict[str, None] = OrderedDict()
        self._counters_file: Path | None = None
        self.counted = dict.fromkeys(COUNTED, 0)
        self.reservations = BlockReservations()

    async def __aenter__(self) -> Self:
        if self._entered:
            raise UsageError("a client is entered once", hint="make another one")
        self._entered = True
        self._fork, self._thread = forks(), threading.get_ident()
        socket = self.socket
        directory = engine_dir(socket.parent)
        engine_id = secrets.token_bytes(16)
        counters = counters_path(directory, engine_id)
        identity = LocalIdentity(
            role="worker",
            name=self._name,
            engine_id=engine_id.hex(),
            counters_path=str(counters),
            namespace=self.config.namespace,
        )
        control = Control(str(socket), self.config, identity=identity, rng=SystemRandom())
        engine = None
        try:
            # The daemon first: without it there is nothing to do, and it knows where to listen and what to advertise.
            await control.start()
            self._control = control
            settings = EngineConfig.from_config(
                self.config,
                engine_id,
                socket_dir=str(directory),
                counters_path=str(counters),
                **dict.fromkeys(("hixl_port", "hixl_engine_port"), 0),  # configured ones are the daemon's
                # Whoever shares a configuration with its daemon cannot have the daemon's port; another one is meant.
                tcp_port=0 if self.config.data_port == control.data_port else self.config.data_port,
                **({} if self.config.data_bind else control.binds),
            )
            self._engine = engine = Engine(settings)
            self._counters_file = counters
            self._allocator = Allocator(engine, self._tasks)
            self._plane = DataPlane(
                engine,
                self.config,
                node_id=control.node_id,
                incarnation=control.incarnation,
                advertise=self._advertised(control),
            )
            control.on_identity = self._identified
            self._mailboxes = Mailboxes(control, self.config)
            self._reporter.start(control, self._plane.unexpected)
        except BaseException:
            self._plane = self._control = None
            if engine is not None:
                engine.close()
            await control.aclose()
            raise
        return self

    def _identified(self) -> None:
        """The daemon restarted: its address or identity may have changed."""
        control = self.control
        advertise = self._advertised(control)
        self.plane.memory.identify(node_id=control.node_id, incarnation=control.incarnation, advertise=advertise)

    def _advertised(self, control: Control) -> tuple[str, ...]:
        """The hosts that peers' engines dial: this worker's own `data_advertise`, else what its daemon tells."""
        own = (parse_address(text, default_port=0).host for text in self.config.data_advertise)
        return tuple(dict.fromkeys(own)) or control.advertise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End everything: transfers complete, memory is unmapped, no task, thread or descriptor of ours remains.

        Whoever waits for something of this client meanwhile gets a `ClosedError`. Cancelled, it still ends all of it.

        Raises: `WrongThread`, `ForkedClientError`; nothing when it is closed already.
        """
        if self._plane is None:
            return
        self._require_here()
        final_reports = self._end_flows()
        control, plane = self.control, self.plane
        try:
            if final_reports:  # each has its own limit
                await asyncio.wait(final_reports)
            if self._allocator is not None:
                await self._allocator.settle()
        finally:
            async with AsyncExitStack() as ends:  # last in, first out; each runs whatever happens to the others
                ends.callback(self._clear)
                ends.callback(self._reporter.stop)
                ends.push_async_callback(plane.aclose)
                ends.push_async_callback(control.aclose)
                ends.push_async_callback(self._boxes.aclose)
                ends.push_async_callback(self._tasks.aclose)

    def _clear(self) -> None:
        self._plane = self._control = self._mailboxes = None

    def _end_flows(self) -> list[asyncio.Task[None]]:
        flows, self._flows = self._flows, {}
        telling = []
        for end in flows.values():  # one that fails keeps nobody else's words from being said
            words = end(ClosedError("the client was closed"))
            if words is not None:
                telling.append(self._tasks.spawn(words, "tell of an end"))
        if self._mailboxes is not None:
            self._mailboxes.close()
        return telling

    def register_flow(self, flow: object, end: EndFlow) -> None:
        """Call ``end`` when the client is closed, until `unregister_flow`."""
        self._flows[flow] = end

    def unregister_flow(self, flow: object) -> None:
        """The flow has ended: the close of the client does not concern it any more."""
        self._flows.pop(flow, None)

    def _require_here(self) -> None:
        if threading.get_ident() != self._thread and self._thread:
            raise WrongThread("this client belongs to another thread", hint="call it on its event loop's thread")
        self._require_process()

    def _require_process(self) -> None:
        if forks() != self._fork and self._thread:
            raise ForkedClientError("this client belongs to the parent process", hint="open one after the fork")

    @property
    def closed(self) -> bool:
        """True before it is entered and after its end."""
        return self._plane is None

    @property
    def plane(self) -> DataPlane:
        """The data plane (for tools; transfers normally go through `put`, `get`, `push` and `pull`).

        Raises: `ClosedError`, `WrongThread`, `ForkedClientError`, as every method of a client does.
        """
        self._require_here()
        if self._plane is None:
            raise ClosedError("the client is not open", hint="use it inside `async with`")
        return self._plane

    @property
    def control(self) -> Control:
        """The connection to the daemon (for tools). Raises: what `plane` raises."""
        self._require_here()
        if self._control is None:
            raise ClosedError("the client is not open", hint="use it inside `async with`")
        return self._control

    @property
    def socket(self) -> Path:
        """The Unix socket of the daemon of this node; from any thread."""
        return daemon_socket(socket_dir(self.config)) if self._socket is None else self._socket

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where other nodes reach this node's daemon, ``host:port``, best first; from any thread.

        Raises: `ClosedError`, `ForkedClientError`.
        """
        self._require_process()
        control = self._control
        if control is None:
            raise ClosedError("the client is not open", hint="use it inside `async with`")
        return control.addresses

    @property
    def _boxes(self) -> Mailboxes:
        self._require_here()
        if self._mailboxes is None:
            raise ClosedError("the client is not open", hint="use it inside `async with`")
        return self._mailboxes

    def deadline(self, timeout: float | None) -> Deadline:
        """The deadline of a call that begins now: ``timeout`` seconds (None: `timeout_s`). Raises: `UsageError`."""
        return Deadline.after(self.config.timeout_s if timeout is None else timeout)

    def _timeout(self, timeout: float | None) -> float:
        return self.config.timeout_s if timeout is None else seconds(timeout, "timeout")

    def _lease(self, lease_s: float | None) -> float:
        if lease_s is None:
            return self.config.lease_s
        return seconds(lease_s, "lease_s", limit_s=self.config.lease_s_max)

    # -- settling ---------------------------------------------------------------------------------------------

    def release_when_quiet(self, taken: Reservation, quiet: Sequence[asyncio.Future[Any]]) -> asyncio.Future[list[Any]]:
        """End a quarantine when the engine says that no peer can move a byte (never because time passed).

        The future resolves after the blocks are free again. Never raises.
        """
        all_quiet = asyncio.gather(*quiet)
        all_quiet.add_done_callback(lambda _: self.reservations.release(taken))
        return all_quiet

    def release_when_settled(self, taken: Reservation, transfers: Sequence[Transfer]) -> None:
        """End a quarantine when all transfers are settled. Never raises."""
        left = sum(not transfer.settled for transfer in transfers)
        if not left:
            self.reservations.release(taken)

        def one_settled(_: Transfer) -> None:
            nonlocal left
            left -= 1
            if not left:
                self.reservations.release(taken)

        for transfer in transfers:
            if not transfer.settled:
                transfer.on_settled(one_settled)


# -- `Peer`: a node that a client talks to, as a handle; everything it does the client can do with an address ----------


class Peer:
    """A handle of one node under its candidate addresses, ``host:port``; made by `Client.connect`."""

    def __init__(self, client: Client, node: tuple[str, ...]) -> None:
        self._client = client
        self.node = node
        self.address = (
            ""  # of its daemon, over which ours reached it last: one of the candidates, or where it came from
        )

    def put(self, source: Region | Span, target: RemoteDescriptor, **options: Any) -> Transfer:
        """See `Client.put`."""
        return self._client.put(source, target, **options)

    def get(self, target: Region | Span, source: RemoteDescriptor, **options: Any) -> Transfer:
        """See `Client.get`."""
        return self._client.get(target, source, **options)

    async def send(self, channel: str, data: bytes, *, timeout: float | None = None) -> None:
        """See `Client.send`."""
        await self._client.send(self.node, channel, data, timeout=timeout)

    async def recv(self, channel: str, *, timeout: float | None = None) -> bytes:
        """See `Client.recv`: channels belong to our own node, whoever sends to them."""
        return await self._client.recv(channel, timeout=timeout)

    async def lookup(self, name: str, *, wait_s: float = 0.0, timeout: float | None = None) -> RemoteDescriptor:
        """See `Client.lookup`."""
        return await self._client.lookup(name, node=self.node, wait_s=wait_s, timeout=timeout)

    async def ping(self, *, timeout: float | None = None) -> float:
        """Seconds for one message to the node's daemon and back, through our own.

        Raises: `PeerUnreachable`, `TransferTimeout` after ``timeout`` seconds, `DaemonUnavailable`, `ClosedError`.
        """
        limit = self._client.config.timeout_s if timeout is None else timeout
        started = time.perf_counter()
        reply = await self._client.control.request(Echo(node=self.node, data=b"ping"), Deadline.after(limit))
        took = time.perf_counter() - started
        if isinstance(reply, EchoReply):
            self.address = reply.via
        return took


Node = str | Sequence[str]
MEMORY_BYTES_PER_S = 256 << 20  # a slow driver's: memory is pinned, touched and zeroed page by page
RELEASED_MAX = 4096  # tickets that are remembered, so that releasing one again does not count twice


class Client(ClientLife):
    """``async with kvxfer.Client() as client``: connected to the daemon of this node.

    ``socket`` is the daemon's Unix socket; by default it is looked for in the configured socket directory. ``name`` is
    shown in logs and metrics.

    Raises: on entering `DaemonUnavailable` when nobody serves the socket, `NotAllowed` or `VersionMismatch` when the
    daemon refuses, `TransportError` when the engine cannot start, `UsageError` the second time.
    """

    # -- memory ---------------------------------------------------------------------------------------------

    async def alloc(
        self,
        length: int,
        *,
        memory: str = "dram",
        device: int | str | None = None,
        group: Sequence[int] | None = None,
        numa_node: int | str | None = None,
        spill: str | None = None,
        timeout: float | None = None,
    ) -> Region:
        """Allocate ``length`` bytes that peers can reach.

        Without more: shareable memory of this host (hugepages when there are any), touched once; ``region.array`` is
        it, and peers on this host reach it without a system call per transfer. ``memory="hbm"`` with a ``device``:
        memory of that accelerator, which holds whatever was in it before; ``spill="dram"`` lets pinned host memory take
        its place when the device is full (``region.info.spilled``). ``memory="dram"`` with a ``device``: host memory
        that the accelerator's driver pins. ``device="auto"`` takes the least loaded of ``group`` (None: of all).
        ``numa_node`` binds host memory to a node; "auto": the device's, else that of the calling thread.

        After ``timeout`` seconds (None: `timeout_s`, and a second for each 256 MiB) it is a `TransferTimeout`, and what
        the driver allocates after all is given back.

        Raises: `ShmTooSmall` or `RegistrationError` (what was asked for, what there is, what to do), `TooLarge`,
        `InvalidLength`, `UsageError` (``memory``, ``device`` and so on), `TransferTimeout`, and `TransportUnavailable`
        when there is no such device or no library for it.
        """
        check_span(0, length, U64_MAX, "alloc")
        plane = self.plane
        assert self._allocator is not None
        wanted = wish(length, memory, device, group, numa_node, spill)
        info = await self._allocator.alloc(wanted, self._memory_deadline(timeout, length))
        if info.on_device:
            return Region(plane, info, None, None)
        view = plane.engine.buffer(info)
        return Region(plane, info, np.frombuffer(view, dtype=np.uint8), view)

    async def register(
        self,
        source: Any = None,
        *,
        address: int | None = None,
        length: int | None = None,
        memory: str = "dram",
        device: int | None = None,
        timeout: float | None = None,
    ) -> Region:
        """Make memory that the caller owns reachable: a numpy array, a tensor on the CPU or on an accelerator, DLPack,
        or anything with a buffer; or ``length`` bytes from ``address`` on, which the caller keeps alive.

        ``memory="hbm"`` with a ``device`` says that an address is on that accelerator: it must be a whole allocation,
        aligned to 2 MiB, else `AlignmentError`. Host memory with a ``device`` must come from that driver's allocator.
        The region keeps the object alive. Registering the same bytes twice gives the same region id; a partial
        overlap is an `OverlapError` that names the region in the way. ``timeout`` is as in `alloc`.

        Raises: `UsageError` (what cannot be registered, and what to pass instead), `InvalidLength`, `AlignmentError`,
        `OverlapError`, `RegistrationError`, `TooLarge` (as many regions as there may be), `TransportUnavailable`,
        `TransferTimeout`.
        """
        plane = self.plane
        if source is None:
            found = at_address(address, length, kind_of(memory, device), device)
        elif address is not None or length is not None:
            raise UsageError("register takes an object, or an address with a length", field="address")
        else:
            found = borrow(source, device=None if device is None else check_device(device))
            if memory != "dram" and memory != found.kind.word:
                raise UsageError("this object is in other memory", memory=memory, found=found.kind.word)
        assert self._allocator is not None
        info = await self._allocator.register(found, self._memory_deadline(timeout, found.length))
        return Region(plane, info, found.array, found.owner)

    def _memory_deadline(self, timeout: float | None, length: int) -> Deadline:
        return Deadline.after(self.config.timeout_s + length / MEMORY_BYTES_PER_S if timeout is None else timeout)

    async def register_many(self, sources: Sequence[Any], *, device: int | None = None) -> tuple[Region, ...]:
        """`register` for each of them, or for none: what was registered before one failed is given back.

        Raises: `RegistrationError` (which one, how many bytes, how many before it, errno, what to do), or what
        `register` raises for a source that makes no sense. Until a later call goes well `unready` says why.
        """
        made = await register_all(
            lambda source: self.register(source, device=device), sources, self._reporter.not_registered
        )
        self._reporter.registered()
        return made

    def counters(self) -> Mapping[str, int]:
        """What this client has counted since it was opened, and what its engine counts; from any thread.

        ``pulls`` that brought everything, ``pulled_bytes``, ``pull_failures``, ``pushes`` that committed,
        ``pushed_bytes``, ``push_failures``; of the engine ``inflight``, ``regions``, ``registered_bytes``, ``stalled``
        and so on, and the same for each transport with its name before it (``tcp_put_bytes``).

        Raises: `ClosedError`, `ForkedClientError`.
        """
        self._require_process()
        path = self._counters_file
        if path is None or self._plane is None:
            raise ClosedError("the client is not open", hint="use it inside `async with`")
        try:
            found = read_counters(path)
        except OSError as error:
            raise ClosedError(f"the counters of the engine are gone: {error}") from error
        core = {name: int(getattr(found, name)) for name in CORE_FIELDS}
        rows = {f"{row.name}_{name}": int(getattr(row, name)) for row in found.transports for name in ROW_FIELDS}
        return MappingProxyType({**core, **rows, **self.counted})

    @property
    def unready(self) -> str:
        """Why this client should not be given work now; empty when it can work. From any thread.

        Raises: `ForkedClientError`.
        """
        self._require_process()
        control = self._control
        if control is None:
            return "the client is not open"
        if not control.connected:
            return "there is no link to the daemon"
        return self._reporter.registration_failed

    # -- one-sided ------------------------------------------------------------------------------------------

    def put(
        self,
        source: Region | Span,
        target: RemoteDescriptor,
        *,
        target_offset: int = 0,
        timeout: float | None = None,
        visible: bool = False,
        notify: int = 0,
        priority: str = "normal",
    ) -> Transfer:
        """Write ``source`` into the memory that ``target`` describes, from ``target_offset`` on.

        Awaiting the transfer resolves when the owner's memory holds the bytes; with ``visible=True`` when the owner has
        also been told (see `notifications`; it receives ``notify``, 0 to 2^64-1).

        ``priority``: "critical", "normal" or "bulk", in every call that moves bytes. What is more urgent, and within
        one priority what is short (up to 4 MiB), goes first on its way to a peer; whatever goes first, the others
        keep moving.

        Offsets and lengths are bytes, ``timeout`` seconds (None: `timeout_s`).

        Raises: at the call `UsageError` (an argument, another word as priority), `AccessDenied` (the descriptor gives
        no right to write), `OutOfRange`, `UnknownRegion`, `ClosedError`; from ``await`` what became of the transfer:
        `TransferTimeout` or `Stalled`, `PeerUnreachable`, `PeerLost`, `StaleDescriptor`, `Revoked`,
        `PeerBackpressure` (too many operations wait for this peer), `IntegrityError` (where checksums are on).
        """
        if not isinstance(notify, int) or isinstance(notify, bool) or not 0 <= notify <= U64_MAX:
            raise _bad_notify(notify)
        plane = self.plane
        part = self._part(plane, OpKind.PUT, source, target, target_offset, (0, notify) if visible else None)
        urgency = Priority.NORMAL if priority == "normal" else Priority.of(priority)
        return plane.start((part,), timeout=self._limit(timeout), peer=target.node_id, priority=urgency)

    def get(
        self,
        target: Region | Span,
        source: RemoteDescriptor,
        *,
        source_offset: int = 0,
        timeout: float | None = None,
        priority: str = "normal",
    ) -> Transfer:
        """Read from the memory that ``source`` describes, from byte ``source_offset`` on, into all of ``target``.

        Awaiting the transfer resolves when ``target`` holds the bytes; ``timeout`` and ``priority`` are as in `put`.

        Raises: what `put` raises; `AccessDenied` when the descriptor gives no right to read.
        """
        plane = self.plane
        part = self._part(plane, OpKind.GET, target, source, source_offset)
        urgency = Priority.NORMAL if priority == "normal" else Priority.of(priority)
        return plane.start((part,), timeout=self._limit(timeout), peer=source.node_id, priority=urgency)

    def put_many(
        self, moves: Sequence[Move], *, atomic: bool = False, timeout: float | None = None, priority: str = "normal"
    ) -> Group:
        """Write many spans, each ``Move(local, remote, remote_offset)``, and learn of each whether it arrived.

        Awaiting the group raises `PartialTransfer` when only some did; ``group.retry_failed()`` moves the others again.
        With ``atomic=True`` the first failure ends all and the whole group has failed.
        """
        return self._many(OpKind.PUT, moves, atomic, timeout, priority)

    def get_many(
        self, moves: Sequence[Move], *, atomic: bool = False, timeout: float | None = None, priority: str = "normal"
    ) -> Group:
        """Read many spans; see `put_many`."""
        return self._many(OpKind.GET, moves, atomic, timeout, priority)

    def _many(self, kind: OpKind, moves: Sequence[Move], atomic: bool, timeout: float | None, priority: str) -> Group:
        these = check_moves(moves)
        way = _ClientMoves(self, self.plane, kind, Priority.of(priority))
        return Group(way, these, indexes=range(len(these)), atomic=atomic, timeout=self._limit(timeout))

    def put_segments(
        self,
        source: Region,
        target: RemoteDescriptor,
        segments: Segments,
        *,
        timeout: float | None = None,
        visible: bool = False,
        notify: int = 0,
        priority: str = "normal",
    ) -> Transfer:
        """`put` of many pieces as one transfer: ``segments`` are integers of shape (n, 3), a row for each piece: offset
        in the region, offset in the remote memory, bytes. At most `segments_max` of them; the array may be reused.

        Raises: what `put` raises; `TooLarge` for too many segments, `OutOfRange` for one that leaves either memory.
        """
        if not isinstance(notify, int) or isinstance(notify, bool) or not 0 <= notify <= U64_MAX:
            raise _bad_notify(notify)
        told = (0, notify) if visible else None
        return self._scattered(OpKind.PUT, source, target, segments, timeout, priority, told)

    def get_segments(
        self,
        target: Region,
        source: RemoteDescriptor,
        segments: Segments,
        *,
        timeout: float | None = None,
        priority: str = "normal",
    ) -> Transfer:
        """`get` of many pieces as one transfer; see `put_segments`. Raises: what `get` and `put_segments` raise."""
        return self._scattered(OpKind.GET, target, source, segments, timeout, priority, None)

    def _scattered(
        self,
        kind: OpKind,
        region: Region,
        remote: RemoteDescriptor,
        segments: Segments,
        timeout: float | None,
        priority: str,
        notify: tuple[int, int] | None,
    ) -> Transfer:
        plane, urgency = self.plane, Priority.of(priority)
        if not isinstance(region, Region):
            raise UsageError("put_segments and get_segments take a Region", got=type(region).__name__)
        region.require(plane)
        right = ACCESS_WRITE if kind is OpKind.PUT else ACCESS_READ
        if not isinstance(remote, RemoteDescriptor) or not remote.access & right:
            raise _unfit(remote)
        rows = check_segments(segments, region.length, remote.length, self.config.segments_max)
        part = WorkRequest(
            kind=kind,
            region=region.id,
            descriptor=remote,
            segments=rows,
            notify=notify,
            check=self.config.integrity,
        )
        return plane.start((part,), timeout=self._limit(timeout), peer=remote.node_id, priority=urgency)

    def _limit(self, timeout: float | None) -> float:
        return self.config.timeout_s if timeout is None else Deadline.after(timeout).remaining()

    def _part(
        self,
        plane: DataPlane,
        kind: OpKind,
        local: Region | Span,
        remote: RemoteDescriptor,
        remote_offset: int,
        notify: tuple[int, int] | None = None,
    ) -> WorkRequest:
        if isinstance(local, Span):
            region, offset, length = local.region, local.offset, local.length
        elif isinstance(local, Region):
            region, offset, length = local, 0, local.length
        else:
            raise UsageError("put and get take a Region or a Span", got=type(local).__name__)
        return self._span_part(plane, kind, region, offset, length, remote, remote_offset, notify)

    def _span_part(
        self,
        plane: DataPlane,
        kind: OpKind,
        region: Region,
        offset: int,
        length: int,
        remote: RemoteDescriptor,
        remote_offset: int,
        notify: tuple[int, int] | None = None,
    ) -> WorkRequest:
        right = ACCESS_WRITE if kind is OpKind.PUT else ACCESS_READ
        region.require(plane)
        if not isinstance(remote, RemoteDescriptor):
            raise _unfit(remote)
        check_span(remote_offset, length, remote.length, "the remote memory")
        if not remote.access & right:
            raise _unfit(remote)
        return WorkRequest(
            kind=kind,
            region=region.id,
            descriptor=remote,
            span=(offset, remote_offset, length),
            notify=notify,
            check=self.config.integrity,
        )

    def notifications(self, descriptor: RemoteDescriptor) -> Notifications:
        """What peers tell through one of our own descriptors (``put(..., visible=True)``): an async iterator of
        values.
        """
        return Notifications(self, descriptor)

    # -- nodes, names, messages -------------------------------------------------------------------------------

    async def connect(self, node: Node, *, timeout: float | None = None) -> Peer:
        """Reach a node now (so that the first transfer does not have to) and return a handle for it.

        ``node``: one address ``host:port`` of its daemon, or several of the same one, best first.

        Raises: `UsageError` (an address), `PeerUnreachable`, `TransferTimeout` after ``timeout`` seconds,
        `DaemonUnavailable` when the own daemon is down.
        """
        peer = Peer(self, as_node(node))
        await peer.ping(timeout=timeout)
        return peer

    async def send(self, node: Node, channel: str, data: bytes, *, timeout: float | None = None) -> None:
        """Put a small message into a channel of another node's mailbox; returns when it is there.

        ``data`` has at most `mail_bytes_max` bytes.

        Raises: `UsageError` (type, size, channel), `BusyError` (nobody listens there and the mailbox is full),
        `PeerBackpressure` (too many are on their way), `PeerUnreachable`, `TransferTimeout`.
        """
        await self._boxes.send(as_node(node), channel, data, self.deadline(timeout))

    async def recv(self, channel: str, *, timeout: float | None = None) -> bytes:
        """The next message of a channel of this node.

        Raises: `TransferTimeout` after ``timeout`` seconds, `BusyError` when another worker listens on this channel,
        `UsageError` (its name), `ClosedError`.
        """
        return await self._boxes.recv(channel, self.deadline(timeout))

    async def share(
        self,
        region: Region,
        name: str,
        access: str = "rw",
        *,
        lease_s: float | None = None,
        timeout: float | None = None,
    ) -> Share:
        """Give a region a name (1 to 256 characters) under which other nodes find its descriptor (`lookup`).

        ``access`` is "r", "w" or "rw"; ``lease_s`` seconds (None: `lease_s` of the configuration) until the name
        ends unless it is renewed.

        Raises: `UsageError` (the name, or one that is in use on this node), `UnknownRegion`, `TransferTimeout`,
        `DaemonUnavailable`.
        """
        return await share_region(self, region, name, access, self._lease(lease_s), self.deadline(timeout))

    async def lookup(
        self, name: str, *, node: Node = (), wait_s: float = 0.0, timeout: float | None = None
    ) -> RemoteDescriptor:
        """The descriptor that a node (none: this one) shares under ``name``, waiting up to ``wait_s`` seconds for it.

        Raises: `UnknownTransfer` when nothing has this name in time, `PeerUnreachable`, `ProtocolError` (the answer
        is no descriptor), `TransferTimeout`, `UsageError`.
        """
        wait_s = seconds(wait_s, "wait_s", least=0.0)
        return await lookup_descriptor(self, as_node(node), name, wait_s, self.deadline(timeout))

    # -- whole caches -----------------------------------------------------------------------------------------

    def offer(
        self,
        request_id: str,
        cache: KVCache,
        table: BlockTable,
        *,
        lease_s: float | None = None,
        timeout: float | None = None,
        sources: int | None = None,
        private: bool = False,
    ) -> Landing:
        """Decode: "request R may land in these blocks". Unclaimed, it runs out after ``lease_s``; in all after
        ``timeout``.

        Pushes from unlike ranks (other heads, layers or tokens of the request) write it together, at the same time; it
        is committed when they cover every byte. ``sources``: how many there will be at most, so that what is missing
        then is an error at once and not at the deadline. With ``private`` the offer is found by its ticket only
        (`Landing.ticket`): no other client can fill it, or be in its way, by using the same id.

        ``request_id`` has 1 to 256 characters; ``lease_s`` and ``timeout`` are seconds (None: the configuration's).

        Raises: here `UsageError` and `OutOfRange` (the table), on entering `RegionBusy` (a flow uses some of these
        blocks), `UsageError` (the id is offered already), `DaemonUnavailable`; while waiting `LeaseExpired`,
        `PeerLost`, `Incomplete`, `TransferTimeout` or `Stalled`, `TransferCancelled`, `ProtocolError`.
        """
        return Landing(
            self,
            _request_id(request_id),
            one_cache(cache),
            table,
            lease_s=self._lease(lease_s),
            timeout=self._timeout(timeout),
            check=self.config.integrity,
            sources=sources,
            private=private,
        )

    def push(
        self,
        request: AnyTicket,
        *,
        to: Node | None = None,
        cache: KVCache,
        table: BlockTable,
        wait_s: float | None = None,
        timeout: float | None = None,
        land: bool = False,
        priority: str = "normal",
    ) -> Push:
        """Prefill: write a request's blocks to where node ``to`` offered them (waiting up to ``wait_s`` for the offer).

        ``request`` is the request's id; without ``to`` it is the ticket of the offer (`Landing.ticket`, also as a dict
        or JSON). Of several pushes into one offer each writes what it has: see `offer` and `Push.covered`. A part that
        another push writes already is an `OverlapError`, nothing in common a `GeometryMismatch`.

        With ``land=True`` no offer is needed: the bytes land in the pool of that node's daemon, and a worker there
        takes them over with `adopt`. A full pool is a `BusyError`, at once or after waiting ``wait_s`` seconds.

        Raises: here `UsageError`; on entering `UnknownTransfer` (nothing was offered in ``wait_s`` seconds),
        `LeaseExpired`, `GeometryMismatch`, `OverlapError`, `PeerUnreachable`, `BusyError`; then, from `Push.layer` and
        from leaving the block, `PeerLost`, `TransferTimeout` or `Stalled`, `TransferCancelled`, and `UsageError` when
        layers are missing at the end.
        """
        limit = self._timeout(timeout)
        if wait_s is None:
            wait_s = 0.0 if land else limit
        ticket = as_ticket(request) if to is None else None
        if ticket is not None and land:
            raise UsageError("a push that lands names a node, not a ticket", field="to")
        return Push(
            self,
            _request_id(request if ticket is None else ticket.request_id),
            to=as_node(to or ()) if ticket is None else ticket.addresses,
            ticket=ticket,
            cache=one_cache(cache),
            table=table,
            wait_s=seconds(wait_s, "wait_s", least=0.0),
            timeout=limit,
            land=land,
            priority=Priority.of(priority),
        )

    def publish(
        self,
        request_id: str,
        cache: Caches,
        table: BlockTable | None = None,
        *,
        lease_s: float | None = None,
        consumers: int = 1,
        retryable: bool = False,
        timeout: float | None = None,
    ) -> Publication:
        """Prefill: "request R can be fetched here" by ``consumers`` different pulls, within ``lease_s``.

        ``cache`` may be several by name, each with its own table: ``{"full": (cache, table), "window": (...)}``. They
        are one request with one ticket.

        A consumer that died, failed or was cancelled counts like one that has read: when the last one has ended, so has
        the publication, and its blocks are free. With ``retryable=True`` only those who have read or released it count,
        and others may come in place of the rest until the lease ends. ``timeout``: for the ticket to be made.

        Raises: here `UsageError` (the id, the consumers); on entering `UsageError` and `OutOfRange` (the table),
        `UnknownRegion`, `DaemonUnavailable`, `TransferTimeout`. `Publication.outcome` is how it ended,
        and ``error`` why.
        """
        return Publication(
            self,
            _request_id(request_id),
            cache,
            table,
            lease_s=self._lease(lease_s),
            consumers=consumers,
            retryable=retryable,
            timeout=self._timeout(timeout),
            check=self.config.integrity,
        )

    async def pull(
        self,
        ticket: AnyTicket | Sequence[AnyTicket],
        cache: Caches,
        table: BlockTable | None = None,
        *,
        timeout: float | None = None,
        on_layer: Callable[[int], None] | None = None,
        priority: str = "normal",
    ) -> Pulled:
        """Decode: fetch what a ticket names into these blocks, or what several hold together (tensor-parallel ranks,
        pipeline stages, pieces of the context): one request with one outcome, each element read once.

        ``cache`` may be several by name, each with its own table, which the tickets know by the same names; what they
        hold beside those is not read.

        ``on_layer`` is called with each layer's index (in ``cache``, or in all of them one after the other), in order,
        as it becomes complete. Raises `GeometryMismatch`, and moves nothing, when a part of the blocks is held by none
        of the tickets. When one source fails the pull has failed: ``fields["ticket"]`` of its error is the ticket's
        place in the list.

        Raises: `GeometryMismatch`; `UsageError` and `OutOfRange` (the table); `RegionBusy` (a flow uses some of these
        blocks); `UnknownTransfer`, `LeaseExpired` or `PeerIncarnationMismatch` (a ticket that is over);
        `PeerUnreachable`, `PeerLost`, `TransferTimeout` or `Stalled`, `IntegrityError`. The blocks then hold what had
        arrived, and stay in quarantine until no byte of the pull can move.
        """
        limit = self._timeout(timeout)
        urgency = Priority.of(priority)
        pull = Pull(self, as_tickets(ticket), cache, table, timeout=limit, on_layer=on_layer, priority=urgency)
        return await pull.run()

    async def release(self, ticket: AnyTicket, *, timeout: float | None = None) -> None:
        """Decode: this ticket will not be fetched after all (queue full, request too long): its publisher may go on.

        Counts as one consumer, however often it is called; does nothing when the ticket is over already.

        Raises: `UsageError` (no ticket), `PeerUnreachable`, `TransferTimeout`, `DaemonUnavailable`.
        """
        found = as_ticket(ticket)
        if found.posting in self._released:
            return
        self._released[found.posting] = None
        while len(self._released) > RELEASED_MAX:
            self._released.popitem(last=False)
        try:
            await release_unread(self, found, self.deadline(timeout))
        except BaseException:
            self._released.pop(found.posting, None)  # it may be tried again
            raise

    def adopt(self, request_id: str, *, wait_s: float | None = None, timeout: float | None = None) -> Adoption:
        """Take over a request that landed in this node's daemon: its memory is mapped and read in place, not copied.

        ``wait_s``: how many seconds to wait for it to land (None: as long as ``timeout``).

        Raises: on entering `UnknownTransfer` (nothing landed in time), `PeerUnreachable`, `TransferTimeout`; from
        `Adoption.array` and from leaving the block `PeerLost` when the daemon took it back or died.
        """
        limit = self._timeout(timeout)
        wait = limit if wait_s is None else seconds(wait_s, "wait_s", least=0.0)
        return Adoption(self, _request_id(request_id), wait_s=wait, timeout=limit)


def _bad_notify(value: object) -> UsageError:
    return UsageError("notify must be an integer from 0 to 2^64-1", field="notify", value=repr(value)[:40])


def _unfit(remote: object) -> KvxferError:
    """Why a descriptor cannot be used, which is none or does not allow this direction."""
    if not isinstance(remote, RemoteDescriptor):
        hint = "RemoteDescriptor.from_dict makes one of a dict"
        return UsageError("the other side must be a RemoteDescriptor", got=type(remote).__name__, hint=hint)
    return AccessDenied("the descriptor does not allow this direction", peer=remote.node_id)


def _request_id(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 256:
        raise UsageError("request_id must be 1 to 256 characters", field="request_id", value=repr(value)[:40])
    return value


@dataclass(frozen=True, slots=True)
class _ClientMoves:
    """See `many.MoveStarter`: puts or gets of one client."""

    client: Client
    plane: DataPlane
    kind: OpKind
    priority: Priority

    def check(self, move: Move) -> None:
        self.client._part(self.plane, self.kind, move.local, move.remote, move.remote_offset)

    def start(
        self, region: Region, offset: int, length: int, remote: RemoteDescriptor, remote_offset: int, timeout: float
    ) -> Transfer:
        part = self.client._span_part(self.plane, self.kind, region, offset, length, remote, remote_offset)
        return self.plane.start((part,), timeout=timeout, peer=remote.node_id, priority=self.priority)

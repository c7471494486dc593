"""Reaching other engines: which transport leads to a descriptor's owner, connections, and imported grants.

A descriptor is resolved once for each kind of memory of ours that is used with it. The transports are
tried in order, each with the owner's candidate endpoints, until one both connects and can import the grant; the reasons
of those passed over are kept (`choices`). Connecting and importing are shared by everybody who waits for the same, and
go on when one of them gives up.
"""

from __future__ import annotations

import asyncio
import errno
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

from kvxfer.config import Config
from kvxfer.dataplane.quiet import LivenessProbe
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import (
    EncryptionMismatch,
    KvxferError,
    PeerError,
    PeerIncarnationMismatch,
    PeerLost,
    PeerUnreachable,
    ProtocolError,
    ResourceExhausted,
    StaleDescriptor,
    TooManyPending,
    TransportError,
    UnknownRegion,
    UnknownTransfer,
    UsageError,
)
from kvxfer.logs import logger
from kvxfer.native.engine import Engine, Event
from kvxfer.native.status import error_for
from kvxfer.native.types import ChoiceKind, MemoryKind, TransportInfo
from kvxfer.net.dial import STAGGER_S, Failures, first_success
from kvxfer.tasks import TaskOwner, shared

# -- which connections may go: those that nobody uses, the one unused for longest first --------------------------------
# The idea: a connection that is used counts up (`Evictable.used`), which costs the data path nothing that could be
# measured; only the timer here knows about time. It looks at the counters now and then and lets go of what has not
# moved for a while, a few at a time. The same order answers who makes room when descriptors run out. When all are in
# use, those who want another one wait in line for the next that is free, each for a bounded time.


SWEEP_MAX, SWEEP_S = 10, 0.25  # closed in small groups: at most 40 per second
SWEEPS_PER_IDLE = 4  # how often in `idle_s` the counters are polled


class Evictable(Protocol):
    """What is asked of a connection. ``used`` grows with each use and orders all connections of one owner."""

    used: int


C = TypeVar("C", bound=Evictable)


class IdleSweeper(Generic[C]):
    """Closes connections that are idle. ``busy`` says who may not go, ``close`` resolves when its descriptors are free.

    All methods belong to the loop's thread.
    """

    def __init__(
        self,
        connections: Callable[[], Collection[C]],
        busy: Callable[[C], bool],
        close: Callable[[C], Awaitable[object]],
        *,
        idle_s: float,
        wait_s: float,
    ) -> None:
        self._connections = connections
        self._busy = busy
        self._close = close
        self._idle_s = idle_s
        self._wait_s = wait_s
        self._line: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._seen: dict[int, tuple[int, float]] = {}  # by identity: the counter, and since when it has stood there
        self._uses = 0
        self.evicted = 0
        self.closed = 0

    def use(self, connection: C) -> None:
        """It is being used now."""
        self._uses += 1
        connection.used = self._uses

    def begun(self, connection: C) -> None:
        """A connection was opened: watch it."""
        self.use(connection)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._idle_s / SWEEPS_PER_IDLE, self._sweep)

    def stop(self) -> None:
        """The owner closes."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def has_waiters(self) -> bool:
        """Others wait for a connection already."""
        return bool(self._line)

    def wake_next(self) -> None:
        """One is no longer in use (or gone): whoever waits first may look."""
        for waiter in self._line:
            if not waiter.done():
                waiter.set_result(None)
                return

    async def make_room(self, *, again: bool = False) -> bool:
        """Close the one that was unused for longest, waiting in line for one that is; False when none was in time.

        ``again``: the room made before went to somebody else, so this one is first in line.
        """
        deadline = asyncio.get_running_loop().time() + self._wait_s
        first = again or not self._line
        while not (first and (free := [one for one in self._connections() if not self._busy(one)])):
            if not await self._wait(deadline, first):
                return False
            first = True
        self.evicted += 1
        await self._close(min(free, key=lambda one: one.used))
        if len(free) > 1:
            self.wake_next()
        return True

    async def _wait(self, deadline: float, first: bool) -> bool:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if first:
            self._line.appendleft(waiter)
        else:
            self._line.append(waiter)
        try:
            async with asyncio.timeout_at(deadline):
                await waiter
        except TimeoutError:
            return False
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._line.remove(waiter)
                self.wake_next()  # its turn passes on
            raise
        finally:
            if waiter in self._line:
                self._line.remove(waiter)
        return True

    def _sweep(self) -> None:
        now = asyncio.get_running_loop().time()
        found = tuple(self._connections())
        due = sorted((one for one in found if self._due(one, now)), key=lambda one: one.used)
        for one in due[:SWEEP_MAX]:
            self.closed += 1
            self._seen.pop(id(one), None)
            self._close(one)
        left = {id(one) for one in found}
        self._seen = {key: seen for key, seen in self._seen.items() if key in left}
        more = len(due) > SWEEP_MAX
        delay_s = SWEEP_S if more else self._idle_s / SWEEPS_PER_IDLE
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._sweep) if found else None

    def _due(self, one: C, now: float) -> bool:
        seen = self._seen.get(id(one))
        if seen is None or seen[0] != one.used or self._busy(one):
            self._seen[id(one)] = (one.used, now)
            return False
        return now - seen[1] >= self._idle_s


# -- which transport for which pair of memories: the decision itself, without a connection -----------------------------
# A transfer needs a way from one kind of memory here to one kind there. The transports are gone through in order; the
# first that moves both kinds, and is offered by the owner, is tried. Those that were passed over keep their reason.
#
# One order is not that of the configuration: between accelerators' transports and those that stay inside this host,
# the latter go first when the remote memory is the host's. They fail at once when the owner is elsewhere, and if he
# is here, a detour through his card would be the longer way.


ANY_KIND = len(MemoryKind)


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a transfer asks of a transport. ``local`` None: no memory of ours, only a notification or a look.

    ``check``: checksums. ``mapped``: the memory is to be looked at in place, if any way allows that.
    """

    local: MemoryKind | None
    remote: MemoryKind
    check: bool = False
    mapped: bool = False

    @property
    def pair(self) -> str:
        """For people: from here to there, whichever way the bytes go."""
        return f"{'any memory' if self.local is None else self.local.word} to {self.remote.word}"


@dataclass(frozen=True, slots=True)
class RejectedTransport:
    """A transport that was not taken. ``info`` None: this engine does not have it."""

    info: TransportInfo | None
    kind: ChoiceKind
    text: str


@dataclass(frozen=True, slots=True)
class TransportSelection:
    """Why a transport was chosen for an engine and a pair of memories, and why better ones were not."""

    engine_id: str
    pair: str
    transport: str
    endpoint: str
    passed_over: tuple[str, ...]


def remote_kind(descriptor: RemoteDescriptor) -> MemoryKind:
    """Where the bytes of a descriptor are."""
    if descriptor.kind == "hbm":
        return MemoryKind.HBM
    return MemoryKind.PINNED if descriptor.pinned else MemoryKind.DRAM


def requirement_bits(local: MemoryKind | None, check: bool, mapped: bool) -> int:
    """What a transfer asks beside its descriptor, as one small number: the key of a choice is made per transfer."""
    return (ANY_KIND if local is None else local) | check << 2 | mapped << 3


def by_preference(infos: Iterable[TransportInfo], required: Requirements) -> list[TransportInfo]:
    """The transports, best first; see above."""
    known = list(infos)
    near = max((info.rank for info in known if info.same_host and not info.own_engine), default=-1)
    host_memory = required.remote is not MemoryKind.HBM

    def place(info: TransportInfo) -> tuple[bool, float, int]:
        detour = host_memory and not info.moves(MemoryKind.DRAM)
        return (
            required.mapped and not info.maps(required.remote),
            max(info.rank, near + 0.5) if detour else info.rank,
            info.rank,
        )

    return sorted(known, key=place)


def rejection(info: TransportInfo, required: Requirements, descriptor: RemoteDescriptor) -> RejectedTransport | None:
    """Why this transport is none for this need; None when it may be tried."""
    if info.name not in descriptor.endpoints:
        return RejectedTransport(info, ChoiceKind.NOT_OFFERED, f"{info.name}: the owner does not offer it")
    if encryption_differs(info, descriptor):
        here, there = ("on", "off") if info.encrypted else ("off", "on")
        return RejectedTransport(
            info, ChoiceKind.REFUSED, f"{info.name}: tcp_encryption is {here} here and {there} there"
        )
    if not info.reaches(required.local, required.remote):
        return RejectedTransport(info, ChoiceKind.MEMORY, f"{info.name}: it moves {moved(info)}, not {required.pair}")
    if required.check and not info.can_check:
        return RejectedTransport(
            info, ChoiceKind.CHECKSUM, f"{info.name}: it makes no checksums, and they were asked for"
        )
    return None


def encryption_differs(info: TransportInfo, descriptor: RemoteDescriptor) -> bool:
    """One side encrypts what this transport moves and the other does not."""
    return info.name in descriptor.endpoints and info.encrypted != (info.name in descriptor.secrets)


def moved(info: TransportInfo) -> str:
    """The kinds of memory that it moves, for people."""
    here, there = _words(info.local_memory), _words(info.memory)
    return f"{here} only" if here == there else f"{here} here, {there} there"


def _words(kinds: int) -> str:
    *first, last = [kind.word for kind in MemoryKind if kinds >> kind & 1] or ["nothing"]
    return f"{', '.join(first)} and {last}" if first else last


# -- what a way to somebody's memory is: a connection, an import over it, and the names under which both are shared ----
# The names hold everything that makes a grant a capability, the key included: a descriptor that only claims to be of
# the same engine and grant never meets the import of the genuine one.


ImportKey = tuple[str, int, int, int, int, bytes]
TransportImportKey = tuple[ImportKey, int]  # and the transport's index
EndpointKey = tuple[str, int, str, bytes | None]  # engine id, transport's index, endpoint, and the secret that it takes
SelectionKey = tuple[str, int, int, int, int, bytes, int]  # an ImportKey, and what is asked (`requirement_bits`)


@dataclass(slots=True, eq=False)
class EngineConnection:
    """A connection to one engine over one transport."""

    engine_id: str
    info: TransportInfo
    endpoint: str
    endpoint_key: EndpointKey = field(repr=False)  # it holds a secret
    peer: int
    imports: set[TransportImportKey] = field(default_factory=set, repr=False)  # they hold the keys of grants
    down: bool = False
    pinned: int = 0  # imports whose mapping an application looks at: a connection that ended stays as long
    used: int = 0  # see `IdleSweeper`
    importing: int = 0
    fresh: bool = True  # made for an import that has yet to begin
    heard: float = 0.0  # when the other side was last known to answer over it, on the loop's clock


@dataclass(slots=True, eq=False)
class Import:
    """A remote grant that is ready for use. ``unwanted``: it goes when the last user has gone. ``needs``: what it was
    chosen for.
    """

    key: TransportImportKey = field(repr=False)
    connection: EngineConnection
    handle: int
    length: int
    users: int = 0
    unwanted: bool = False
    pinned: bool = False
    selection_keys: set[SelectionKey] = field(default_factory=set, repr=False)


def stale(error: KvxferError) -> KvxferError:
    """Whoever holds a descriptor that its owner does not know (any more) holds an old one."""
    if type(error) is not UnknownTransfer:
        return error
    found = StaleDescriptor(
        "the owner has taken this memory back",
        op_id=error.op_id,
        peer=error.peer,
        transport=error.transport,
        status=error.status,
        hint="get a new descriptor",
    )
    found.fields.update(error.fields)
    return found


def endpoint_key_of(descriptor: RemoteDescriptor, info: TransportInfo, endpoint: str) -> EndpointKey:
    return (descriptor.engine_id, info.index, endpoint, descriptor.secrets.get(info.name))


def key_of(descriptor: RemoteDescriptor) -> ImportKey:
    return (
        descriptor.engine_id,
        descriptor.grant,
        descriptor.generation,
        descriptor.length,
        descriptor.access,
        descriptor.key,
    )


def selection_key_of(descriptor: RemoteDescriptor, number: int) -> SelectionKey:
    return (*key_of(descriptor), number)


IMPORTS_IDLE_MAX = 4096
CHOICES_MAX = 1024
DOWN_BEFORE_KNOWN_MAX = 1024
RESET_DELAYS_S = (0.0, 0.01, 0.05, 0.2)  # before the next try, when a connection was reset before it was of use
K = TypeVar("K")
T = TypeVar("T")

log = logger("kvxfer.reach")


class ConnectionManager:
    """The connections and imports of one engine. All methods belong to the loop's thread."""

    def __init__(self, engine: Engine, tasks: TaskOwner, allowed: Sequence[str] | None, *, config: Config) -> None:
        self.engine = engine
        self._tasks = tasks
        self._allowed = None if allowed is None else frozenset(allowed)
        self._engine_id = engine.engine_id.hex()
        self._transports = sorted(engine.transports, key=lambda info: info.rank)
        self._connections: dict[EndpointKey, EngineConnection] = {}
        self._connections_by_peer: dict[int, EngineConnection] = {}
        self._connecting: dict[EndpointKey, asyncio.Task[EngineConnection]] = {}
        self._imports: OrderedDict[TransportImportKey, Import] = OrderedDict()
        self._chosen: dict[SelectionKey, Import] = {}
        self._importing: dict[TransportImportKey, asyncio.Task[Import]] = {}
        self._resolving: dict[SelectionKey, asyncio.Task[Import]] = {}
        self._unwanted: set[ImportKey] = set()  # of those being resolved
        self._wanted: dict[ImportKey, int] = {}  # how many callers wait for one of these
        self._rejections: OrderedDict[TransportImportKey, RejectedTransport] = OrderedDict()  # found out by trying
        self._down_before_known: OrderedDict[int, None] = OrderedDict()  # ended before anybody knew that they had begun
        self.choices: OrderedDict[tuple[str, str], TransportSelection] = OrderedDict()
        self.idle = IdleSweeper(
            self._connections.values, self._busy, self._close_idle, idle_s=config.peer_idle_s, wait_s=config.connect_s
        )
        self.quiet = LivenessProbe(
            engine,
            tasks,
            busy=self._busy,
            connect=self._connect_once,
            down=self.peer_down,
            discard=self._discard_replacement,
        )

    def ready(
        self, descriptor: RemoteDescriptor, local: MemoryKind | None = None, check: bool = False
    ) -> Import | None:
        """The import of a descriptor for this need, if there is one."""
        # Asked for each transfer, so `selection_key_of` is written out.
        found = self._chosen.get(
            (
                descriptor.engine_id,
                descriptor.grant,
                descriptor.generation,
                descriptor.length,
                descriptor.access,
                descriptor.key,
                (ANY_KIND if local is None else local) | check << 2,
            )
        )
        return (
            found
            if found is not None
            else self._reuse_import(descriptor, Requirements(local, remote_kind(descriptor), check))
        )

    def _reuse_import(self, descriptor: RemoteDescriptor, required: Requirements) -> Import | None:
        """The best transport for this need may have the import already, made for another one."""
        key = key_of(descriptor)
        if not any((key, info.index) in self._imports for info in self._transports):
            return None
        found, passed = self._existing_import(key, required), self._missing(descriptor)
        for info, verdict in self._candidates(key, required, descriptor):
            if found is not None or verdict is None:
                found = found or self._imports.get((key, info.index))
                break
            passed.append(verdict)
        if found is None or found.unwanted:
            return None
        if required.local is not None:
            self._record_selection(required, found, passed)
        selection_key = selection_key_of(descriptor, requirement_bits(required.local, required.check, required.mapped))
        found.selection_keys.add(selection_key)
        self._chosen[selection_key] = found
        return found

    def _candidates(
        self, key: ImportKey, required: Requirements, descriptor: RemoteDescriptor
    ) -> Iterator[tuple[TransportInfo, RejectedTransport | None]]:
        """The transports in order, with what is known against each."""
        for info in by_preference(self._transports, required):
            if info.own_engine and descriptor.engine_id != self._engine_id:
                continue
            yield (
                info,
                self._rejections.get((key, info.index))
                or self._forbidden(info)
                or rejection(info, required, descriptor),
            )

    def is_live(self, found: Import) -> bool:
        """False once it was dropped."""
        return self._imports.get(found.key) is found

    async def resolve(
        self, descriptor: RemoteDescriptor, local: MemoryKind | None = None, check: bool = False, mapped: bool = False
    ) -> Import:
        """Connect and import unless that was done; `PeerUnreachable` with every reason, or why the owner refused."""
        selection_key = selection_key_of(descriptor, requirement_bits(local, check, mapped))
        ready = self._chosen.get(selection_key)
        if ready is not None and self.quiet.needs_probe(ready.connection):
            await self._probe(ready, descriptor)
            ready = self._chosen.get(selection_key)
        if ready is not None:
            ready.unwanted = False
            self._imports.move_to_end(ready.key)
            self.idle.use(ready.connection)
            return ready
        self._unwanted.discard(key_of(descriptor))
        pending = self._resolving.get(selection_key)
        if pending is None:
            required = Requirements(local, remote_kind(descriptor), check, mapped)
            pending = self._tasks.run(
                self._resolve_once(selection_key, required, descriptor), f"import grant {descriptor.grant}"
            )
            self._resolving[selection_key] = pending
            pending.add_done_callback(lambda done: _forget_task(self._resolving, selection_key, done))
        key = selection_key[:-1]
        self._wanted[key] = self._wanted.get(key, 0) + 1
        try:
            return await shared(pending)
        finally:  # the caller uses it before anybody else has a turn
            self._wanted[key] -= 1
            if not self._wanted[key]:
                del self._wanted[key]
            if self.idle.has_waiters:
                asyncio.get_running_loop().call_soon(self.idle.wake_next)

    async def _resolve_once(
        self, selection_key: SelectionKey, required: Requirements, descriptor: RemoteDescriptor
    ) -> Import:
        key = key_of(descriptor)
        found = self._existing_import(key, required)
        if found is None:
            found = await self._try_transports(key, required, descriptor)
        if self.is_live(found):
            found.selection_keys.add(selection_key)
            self._chosen[selection_key] = found
        if key in self._unwanted:
            # Whoever still waits for it finds that it is not live, and resolves anew.
            if not any(other != selection_key and other[:-1] == key for other in self._resolving):
                self._unwanted.discard(key)
            found.unwanted = True
            self.left(found)
        self._evict_idle()
        return found

    def _existing_import(self, key: ImportKey, required: Requirements) -> Import | None:
        """A notification alone goes the way that the grant is reached by already, if there is one."""
        if required.local is not None or required.mapped:
            return None
        existing = (self._imports.get((key, info.index)) for info in self._transports)
        return next((found for found in existing if found is not None and not found.unwanted), None)

    async def _try_transports(self, key: ImportKey, required: Requirements, descriptor: RemoteDescriptor) -> Import:
        passed = self._missing(descriptor)
        specific: KvxferError | None = None  # more than that nothing led there
        for info, verdict in self._candidates(key, required, descriptor):
            if verdict is not None:
                passed.append(verdict)
                continue
            endpoints, failures = await self._answering(descriptor, info)
            for endpoint in endpoints:
                try:
                    found = await self._shared_import((key, info.index), info, endpoint, descriptor, required.mapped)
                except (PeerError, ProtocolError, TransportError) as error:
                    failures[endpoint] = error
                    continue
                self._record_selection(required, found, [*passed, *_passed_over(info, failures)])
                return found
            passed += _passed_over(info, failures)
            for failure in failures.values():
                tells = isinstance(failure, ResourceExhausted | PeerIncarnationMismatch | EncryptionMismatch)
                specific = failure if tells and not isinstance(specific, ResourceExhausted) else specific
        self._count(passed)
        if specific is not None:
            raise specific
        differs = next((info for info in self._transports if encryption_differs(info, descriptor)), None)
        if differs is not None:
            raise EncryptionMismatch(
                "the owner of this descriptor and this side differ in tcp_encryption, and nothing goes in clear instead"
                + "".join(f"; {one.text}" for one in passed),
                peer=descriptor.node_id,
                transport=differs.name,
                option="tcp_encryption",
                here="on" if differs.encrypted else "off",
                there="off" if differs.encrypted else "on",
                hint="set tcp_encryption to the same value on both sides",
            )
        raise PeerUnreachable(
            f"no transport reaches the owner of this descriptor, {required.pair}"
            + "".join(f"; {one.text}" for one in passed),
            peer=descriptor.node_id,
            it_offers=", ".join(descriptor.endpoints),
            we_have=", ".join(info.name for info in self._transports),
        )

    async def _answering(
        self, descriptor: RemoteDescriptor, info: TransportInfo
    ) -> tuple[list[str], dict[str, KvxferError]]:
        """The owner's addresses in the order to try: one with a connection, or the first that answers; and why others
        do not. Attempts are staggered as those of the control path, so that a mute address costs no time-out.
        """
        endpoints = list(descriptor.endpoints[info.name])
        places = {endpoint: endpoint_key_of(descriptor, info, endpoint) for endpoint in endpoints}
        known = next((endpoint for endpoint, place in places.items() if place in self._connections), None)
        if len(endpoints) == 1 or known is not None or self.idle.has_waiters:
            return sorted(endpoints, key=lambda one: one != known), {}
        attempts = [(one, partial(self._route, place, info)) for one, place in places.items()]
        failures: Failures = {}
        winner = await first_success(attempts, stagger_s=STAGGER_S, discard=self._close_unused, failures=failures)
        for one, place in places.items():
            late = self._connecting.get(place)
            if late is not None and (winner is None or one != winner.endpoint):
                late.add_done_callback(self._on_late_connection)
        told = {one: error for one, error in failures.items() if isinstance(error, KvxferError)}
        if any(isinstance(error, ResourceExhausted) for error in told.values()):
            return endpoints, {}  # one after the other, and idle connections make room
        left = [one for one in endpoints if one not in told]
        return sorted(left, key=lambda one: winner is None or one != winner.endpoint), told

    def _on_late_connection(self, done: asyncio.Task[EngineConnection]) -> None:
        if not done.cancelled() and done.exception() is None:
            self._close_unused(done.result())

    def _close_unused(self, connection: EngineConnection) -> None:
        """Another address was faster; nobody has begun to use this one."""
        if connection.fresh and not connection.down:
            self._close_idle(connection)

    def _missing(self, descriptor: RemoteDescriptor) -> list[RejectedTransport]:
        """What the owner offers, and this machine was asked for but does not have."""
        return [
            RejectedTransport(None, ChoiceKind.REFUSED, f"{name}: not available here: {why}")
            for name, why in self.engine.unavailable.items()
            if name in descriptor.endpoints
        ]

    def _forbidden(self, info: TransportInfo) -> RejectedTransport | None:
        if self._allowed is None or info.name in self._allowed:
            return None
        return RejectedTransport(info, ChoiceKind.NOT_OFFERED, f"{info.name}: not allowed here")

    async def _shared_import(
        self,
        import_key: TransportImportKey,
        info: TransportInfo,
        endpoint: str,
        descriptor: RemoteDescriptor,
        mapped: bool,
    ) -> Import:
        """Over each transport a grant is imported once, whatever it is needed for."""
        known = self._imports.get(import_key)
        if known is not None:
            known.unwanted = False
            return known
        pending = self._importing.get(import_key)
        if pending is None:
            pending = self._tasks.run(
                self._import_with_eviction(import_key, info, endpoint, descriptor, mapped),
                f"import grant {descriptor.grant} by {info.name}",
            )
            self._importing[import_key] = pending
            pending.add_done_callback(lambda done: _forget_task(self._importing, import_key, done))
        return await shared(pending)

    def reject_transport(self, found: Import, why: str) -> None:
        """This grant cannot be used over this transport after all: the next one is tried from now on."""
        info = found.connection.info
        self._rejections[found.key] = RejectedTransport(
            info, ChoiceKind.REFUSED, f"{info.name} {found.connection.endpoint}: {why}"
        )
        while len(self._rejections) > CHOICES_MAX:
            self._rejections.popitem(last=False)
        self.drop(found)

    async def _import_with_eviction(
        self, key: TransportImportKey, info: TransportInfo, endpoint: str, descriptor: RemoteDescriptor, mapped: bool
    ) -> Import:
        """Connect (if need be) and import; at the limit of descriptors or peers, idle connections are given up for it,
        one at a time.
        """
        again = False
        if self.idle.has_waiters and endpoint_key_of(descriptor, info, endpoint) not in self._connections:
            again = await self.idle.make_room()
        while True:
            try:
                return await self._import_with_retry(key, info, endpoint, descriptor, mapped)
            except ResourceExhausted:
                if not await self.idle.make_room(again=again):
                    raise
            again = True

    def _busy(self, connection: EngineConnection) -> bool:
        """Somebody transfers, looks at mapped memory, or imports over it."""
        if connection.fresh or connection.importing:
            return True
        return any(self._imports[key].users or key[0] in self._wanted for key in connection.imports)

    def _close_idle(self, connection: EngineConnection) -> asyncio.Future[Event]:
        """An idle connection goes; whoever wants it again connects anew. Owners see us leave, not vanish."""
        for key in tuple(connection.imports):
            self.drop(self._imports[key])
        connection.down = True
        if self._connections.get(connection.endpoint_key) is connection:
            del self._connections[connection.endpoint_key]
        self._connections_by_peer.pop(connection.peer, None)
        return self.engine.close_peer(connection.peer)

    async def _import_with_retry(
        self, key: TransportImportKey, info: TransportInfo, endpoint: str, descriptor: RemoteDescriptor, mapped: bool
    ) -> Import:
        """Import over the connection that there is; over a fresh one when that turns out to be dead, or was displaced
        by others before the owner had seen the key.
        """
        place = endpoint_key_of(descriptor, info, endpoint)
        for delay_s in (*RESET_DELAYS_S, None):
            connection: EngineConnection | None = None
            try:
                connection = self._connections.get(place) or await self._route(place, info)
                if self.quiet.needs_probe(connection):
                    connection = await self.quiet.probe(connection, descriptor)
                return await self._import(key, connection, descriptor, mapped)
            except PeerLost:
                if connection is not None and not connection.down:
                    self.peer_down(connection.peer)
                if delay_s is None:
                    raise
            await asyncio.sleep(delay_s)
        raise AssertionError("the last try returns or raises")

    def _record_selection(self, required: Requirements, found: Import, passed: Sequence[RejectedTransport]) -> None:
        """One line in the log for each engine, pair of memories and transport; the rest is counted."""
        connection = found.connection
        reasons = tuple(one.text for one in passed)
        choice = TransportSelection(
            connection.engine_id, required.pair, connection.info.name, connection.endpoint, reasons
        )
        before = self.choices.get((choice.engine_id, choice.pair))
        self.choices[choice.engine_id, choice.pair] = choice
        self.choices.move_to_end((choice.engine_id, choice.pair))
        while len(self.choices) > CHOICES_MAX:
            self.choices.popitem(last=False)
        if before is None or before.transport != choice.transport:
            over = "; passed over: " + "; ".join(reasons) if reasons else ""
            log.info("engine %s, %s: by %s%s", choice.engine_id, choice.pair, choice.transport, over)
        self._count(passed)
        self.engine.count_choice(connection.info.index, ChoiceKind.TAKEN)

    def _count(self, passed: Sequence[RejectedTransport]) -> None:
        # Several endpoints of one transport may have failed: it was passed over once.
        for index, kind in {(one.info.index, one.kind) for one in passed if one.info is not None}:
            self.engine.count_choice(index, kind)

    async def _route(self, key: EndpointKey, info: TransportInfo) -> EngineConnection:
        connection = self._connections.get(key)
        if connection is not None:
            return connection
        pending = self._connecting.get(key)
        if pending is None:
            pending = self._tasks.run(self._connect_once(key, info), f"connect {info.name} {key[2]}")
            self._connecting[key] = pending
            pending.add_done_callback(lambda done: _forget_task(self._connecting, key, done))
        return await shared(pending)

    async def _connect_once(self, key: EndpointKey, info: TransportInfo) -> EngineConnection:
        engine_id, _, endpoint, _ = key
        peer, event = await self._dial(key, info)
        for delay_s in RESET_DELAYS_S:
            if event.sys_errno != errno.ECONNRESET:
                break
            # Displaced by other newcomers, or its process ends: then the next try is refused.
            await asyncio.sleep(delay_s)
            peer, event = await self._dial(key, info)
        if event.status != 0:
            raise error_for(event.status, sys_errno=event.sys_errno, peer=endpoint, transport=info.name)
        answered = event.answered_by
        if answered not in ("", engine_id):
            self._down_before_known.pop(peer, None)
            self.engine.close_peer(peer)
            why = "another engine answers there: the owner of this descriptor has ended"
            hint = "get a new descriptor"
            raise PeerIncarnationMismatch(
                why, peer=endpoint, transport=info.name, hint=hint, expected=engine_id, actual=answered, retryable=False
            )
        if peer in self._down_before_known:
            del self._down_before_known[peer]
            self.engine.close_peer(peer)
            raise PeerLost("the connection ended as soon as it was made", peer=endpoint, transport=info.name)
        connection = EngineConnection(engine_id, info, endpoint, key, peer)
        connection.heard = asyncio.get_running_loop().time()
        self._connections[key] = connection
        self._connections_by_peer[peer] = connection
        self.idle.begun(connection)
        return connection

    async def _dial(self, key: EndpointKey, info: TransportInfo) -> tuple[int, Event]:
        """One attempt to connect, and how it ended."""
        _, _, endpoint, secret = key
        try:
            peer, completion = self.engine.connect(info.index, endpoint, secret)
        except TooManyPending as full:
            hint = "raise peers_max, or wait until a transfer has ended"
            error = ResourceExhausted(
                "every connection of this engine is in use", peer=endpoint, retryable=True, hint=hint
            )
            error.transport, error.fields = info.name, full.fields  # the option and its value
            raise error from full
        except (UsageError, ValueError) as wrong:
            # What is wrong with it came from the owner of the descriptor, not from our caller.
            raise PeerUnreachable(f"cannot connect: {wrong}", peer=endpoint[:80], transport=info.name) from wrong
        return peer, await asyncio.shield(completion)

    async def _import(
        self, key: TransportImportKey, connection: EngineConnection, descriptor: RemoteDescriptor, mapped: bool
    ) -> Import:
        connection.importing += 1
        connection.fresh = False
        try:
            return await self._import_once(key, connection, descriptor, mapped)
        finally:
            connection.importing -= 1
            self.idle.wake_next()

    async def _import_once(
        self, key: TransportImportKey, connection: EngineConnection, descriptor: RemoteDescriptor, mapped: bool
    ) -> Import:
        self.idle.use(connection)
        try:
            handle, completion = self.engine.import_(
                connection.peer,
                grant=descriptor.grant,
                generation=descriptor.generation,
                length=descriptor.length,
                access=descriptor.access,
                key=descriptor.key,
                mapped=mapped and descriptor.kind == "hbm",
            )
        except UnknownRegion as gone:
            raise PeerLost(
                "the connection has ended", peer=connection.endpoint, transport=connection.info.name
            ) from gone
        event = await asyncio.shield(completion)
        if event.status != 0:
            self.engine.release_import(handle)
            refused = error_for(
                event.status, sys_errno=event.sys_errno, peer=connection.endpoint, transport=connection.info.name
            )
            raise stale(refused)
        if connection.down:
            self.engine.release_import(handle)
            raise PeerLost("the connection ended", peer=connection.endpoint, transport=connection.info.name)
        connection.heard = asyncio.get_running_loop().time()
        connection.imports.add(key)
        found = self._imports[key] = Import(key, connection, handle, descriptor.length)
        return found

    # -- connections that were quiet for a while (`quiet.py`) ------------------------------------------------------

    async def _probe(self, found: Import, descriptor: RemoteDescriptor) -> None:
        """Before the first bytes over a quiet connection: its other side answers, or the import goes with it."""
        try:
            await self.quiet.probe(found.connection, descriptor)
        except PeerLost:
            self.lost(found)

    def _discard_replacement(self, old: EngineConnection, new: EngineConnection) -> None:
        """The old connection was silent and answered before a new one was there: the new one is not needed."""
        self._close_idle(new)
        if not old.down:
            self._connections.setdefault(old.endpoint_key, old)

    def lost(self, found: Import) -> None:
        """The connection of this import has ended, even if the news has not come yet."""
        self.drop(found)
        if not found.connection.down:
            self.peer_down(found.connection.peer)

    def drop(self, found: Import) -> None:
        """Let go of an import; harmless when that was done."""
        if self._imports.get(found.key) is found:
            del self._imports[found.key]
            for selection_key in found.selection_keys:
                self._chosen.pop(selection_key, None)
            found.connection.imports.discard(found.key)
            if not found.pinned:
                self.engine.release_import(found.handle)

    def pin(self, found: Import) -> None:
        """Kernels of the application use this memory where it is: only `unpin` ends that, whatever happens."""
        found.pinned = True
        found.connection.pinned += 1

    def unpin(self, found: Import) -> None:
        """Release what `pin` held; an import that has ended meanwhile is released now."""
        found.pinned = False
        found.connection.pinned -= 1
        if not self.is_live(found):
            self.engine.release_import(found.handle)
        if found.connection.down and not found.connection.pinned:
            self.engine.close_peer(found.connection.peer)

    def drop_import(self, descriptor: RemoteDescriptor) -> None:
        """This import will not be used again: it goes now, or when its last user goes, or as soon as it is made."""
        key = key_of(descriptor)
        for info in self._transports:
            found = self._imports.get((key, info.index))
            if found is not None:
                found.unwanted = True
                self.left(found)
        if any(selection_key[:-1] == key for selection_key in self._resolving):
            self._unwanted.add(key)

    def left(self, found: Import) -> None:
        """Somebody stopped using an import (see ``users``)."""
        if found.unwanted and not found.users:
            self.drop(found)

    def _evict_idle(self) -> None:
        while len(self._imports) > IMPORTS_IDLE_MAX:
            idle = next((item for item in self._imports.values() if not item.users), None)
            if idle is None:
                return
            self.drop(idle)

    def peer_down(self, peer: int) -> None:
        """A connection ended: its imports go, the next use connects anew."""
        connection = self._connections_by_peer.pop(peer, None)
        if connection is None:
            self._down_before_known[peer] = None
            while len(self._down_before_known) > DOWN_BEFORE_KNOWN_MAX:
                self._down_before_known.popitem(last=False)
            return
        connection.down = True
        self.idle.wake_next()
        if self._connections.get(connection.endpoint_key) is connection:
            del self._connections[connection.endpoint_key]
        for key in tuple(connection.imports):
            found = self._imports.get(key)
            if found is not None:
                self.drop(found)
        if not connection.pinned:
            self.engine.close_peer(peer)


def _passed_over(info: TransportInfo, failures: Mapping[str, KvxferError]) -> list[RejectedTransport]:
    kinds = {True: ChoiceKind.REFUSED, False: ChoiceKind.UNREACHABLE}
    return [
        RejectedTransport(info, kinds[isinstance(error, TransportError)], f"{info.name} {endpoint}: {error.message}")
        for endpoint, error in failures.items()
    ]


def _forget_task(table: dict[K, asyncio.Task[T]], key: K, done: asyncio.Task[T]) -> None:
    del table[key]
    if not done.cancelled():
        done.exception()  # everybody who waited may have given up: then nobody is left to hear of a failure

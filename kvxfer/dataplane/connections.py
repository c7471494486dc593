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
from kvxfer.dataplane.quiet import Quiet
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
# The idea: a connection that is used counts up (`Connection.used`), which costs the data path nothing that could be
# measured; only the timer here knows about time. It looks at the counters now and then and lets go of what has not
# moved for a while, a few at a time. The same order answers who makes room when descriptors run out. When all are in
# use, those who want another one wait in line for the next that is free, each for a bounded time.


SWEEP_MAX, SWEEP_S = 10, 0.25  # closed in small groups: at most 40 per second
LOOKS = 4  # so often in `idle_s` the timer looks


class Connection(Protocol):
    """What is asked of a connection. ``used`` grows with each use and orders all connections of one owner."""

    used: int


C = TypeVar("C", bound=Connection)


class Idle(Generic[C]):
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
        """There is one more."""
        self.use(connection)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._idle_s / LOOKS, self._look)

    def stop(self) -> None:
        """The owner closes."""
        if self._timer is not None:
            self._timer.cancel()

    @property
    def crowded(self) -> bool:
        """Others wait for a connection already."""
        return bool(self._line)

    def freed(self) -> None:
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
            self.freed()
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
                self.freed()  # its turn passes on
            raise
        finally:
            if waiter in self._line:
                self._line.remove(waiter)
        return True

    def _look(self) -> None:
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
        delay_s = SWEEP_S if more else self._idle_s / LOOKS
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look) if found else None

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
class Need:
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
class PassedOver:
    """A transport that was not taken. ``info`` None: this engine does not have it."""

    info: TransportInfo | None
    kind: ChoiceKind
    text: str


@dataclass(frozen=True, slots=True)
class Choice:
    """Why a transport was chosen for an engine and a pair of memories, and why better ones were not."""

    engine_id: str
    pair: str
    transport: str
    endpoint: str
    passed_over: tuple[str, ...]


def kind_there(descriptor: RemoteDescriptor) -> MemoryKind:
    """Where the bytes of a descriptor are."""
    if descriptor.kind == "hbm":
        return MemoryKind.HBM
    return MemoryKind.PINNED if descriptor.pinned else MemoryKind.DRAM


def number_of(local: MemoryKind | None, check: bool, mapped: bool) -> int:
    """What a transfer asks beside its descriptor, as one small number: the key of a choice is made per transfer."""
    return (ANY_KIND if local is None else local) | check << 2 | mapped << 3


def in_order(infos: Iterable[TransportInfo], need: Need) -> list[TransportInfo]:
    """The transports, best first; see above."""
    known = list(infos)
    near = max((info.rank for info in known if info.same_host and not info.own_engine), default=-1)
    host_memory = need.remote is not MemoryKind.HBM

    def place(info: TransportInfo) -> tuple[bool, float, int]:
        detour = host_memory and not info.moves(MemoryKind.DRAM)
        return (
            need.mapped and not info.maps(need.remote),
            max(info.rank, near + 0.5) if detour else info.rank,
            info.rank,
        )

    return sorted(known, key=place)


def unfit(info: TransportInfo, need: Need, descriptor: RemoteDescriptor) -> PassedOver | None:
    """Why this transport is none for this need; None when it may be tried."""
    if info.name not in descriptor.endpoints:
        return PassedOver(info, ChoiceKind.NOT_OFFERED, f"{info.name}: the owner does not offer it")
    if encryption_differs(info, descriptor):
        here, there = ("on", "off") if info.encrypted else ("off", "on")
        return PassedOver(info, ChoiceKind.REFUSED, f"{info.name}: tcp_encryption is {here} here and {there} there")
    if not info.reaches(need.local, need.remote):
        return PassedOver(info, ChoiceKind.MEMORY, f"{info.name}: it moves {moved(info)}, not {need.pair}")
    if need.check and not info.can_check:
        return PassedOver(info, ChoiceKind.CHECKSUM, f"{info.name}: it makes no checksums, and they were asked for")
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
WayKey = tuple[ImportKey, int]  # and the transport's index
Place = tuple[str, int, str, bytes | None]  # engine id, transport's index, endpoint, and the secret that it takes
NeedKey = tuple[str, int, int, int, int, bytes, int]  # an ImportKey, and what is asked (`number_of`)


@dataclass(slots=True, eq=False)
class EngineConnection:
    """A connection to one engine over one transport."""

    engine_id: str
    info: TransportInfo
    endpoint: str
    place: Place = field(repr=False)  # it holds a secret
    peer: int
    imports: set[WayKey] = field(default_factory=set, repr=False)  # they hold the keys of grants
    down: bool = False
    held: int = 0  # imports whose mapping an application looks at: a connection that ended stays as long
    used: int = 0  # see `Idle`
    importing: int = 0
    fresh: bool = True  # made for an import that has yet to begin
    heard: float = 0.0  # when the other side was last known to answer over it, on the loop's clock


@dataclass(slots=True, eq=False)
class Import:
    """A remote grant that is ready for use. ``unwanted``: it goes when the last user has gone. ``needs``: what it was
    chosen for.
    """

    key: WayKey = field(repr=False)
    route: EngineConnection
    handle: int
    length: int
    users: int = 0
    unwanted: bool = False
    held: bool = False
    needs: set[NeedKey] = field(default_factory=set, repr=False)


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


def place_of(descriptor: RemoteDescriptor, info: TransportInfo, endpoint: str) -> Place:
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


def need_key_of(descriptor: RemoteDescriptor, number: int) -> NeedKey:
    return (*key_of(descriptor), number)


IMPORTS_IDLE_MAX = 4096
CHOICES_MAX = 1024
DOWN_EARLY_MAX = 1024
RESET_DELAYS_S = (0.0, 0.01, 0.05, 0.2)  # before the next try, when a connection was reset before it was of use
K = TypeVar("K")
T = TypeVar("T")

log = logger("kvxfer.reach")


class Reach:
    """The connections and imports of one engine. All methods belong to the loop's thread."""

    def __init__(self, engine: Engine, tasks: TaskOwner, allowed: Sequence[str] | None, *, config: Config) -> None:
        self.engine = engine
        self._tasks = tasks
        self._allowed = None if allowed is None else frozenset(allowed)
        self._engine_id = engine.engine_id.hex()
        self._transports = sorted(engine.transports, key=lambda info: info.rank)
        self._routes: dict[Place, EngineConnection] = {}
        self._routes_by_peer: dict[int, EngineConnection] = {}
        self._connecting: dict[Place, asyncio.Task[EngineConnection]] = {}
        self._imports: OrderedDict[WayKey, Import] = OrderedDict()
        self._chosen: dict[NeedKey, Import] = {}
        self._importing: dict[WayKey, asyncio.Task[Import]] = {}
        self._resolving: dict[NeedKey, asyncio.Task[Import]] = {}
        self._unwanted: set[ImportKey] = set()  # of those being resolved
        self._wanted: dict[ImportKey, int] = {}  # how many callers wait for one of these
        self._unfit: OrderedDict[WayKey, PassedOver] = OrderedDict()  # found out by trying
        self._down_early: OrderedDict[int, None] = OrderedDict()  # ended before anybody knew that they had begun
        self.choices: OrderedDict[tuple[str, str], Choice] = OrderedDict()
        self.idle = Idle(
            self._routes.values, self._busy, self._give_up, idle_s=config.peer_idle_s, wait_s=config.connect_s
        )
        self.quiet = Quiet(
            engine, tasks, busy=self._busy, connect=self._connect_once, down=self.peer_down, take_back=self._take_back
        )

    def ready(
        self, descriptor: RemoteDescriptor, local: MemoryKind | None = None, check: bool = False
    ) -> Import | None:
        """The import of a descriptor for this need, if there is one."""
        # Asked for each transfer, so `need_key_of` is written out.
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
        return found if found is not None else self._at_once(descriptor, Need(local, kind_there(descriptor), check))

    def _at_once(self, descriptor: RemoteDescriptor, need: Need) -> Import | None:
        """The best transport for this need may have the import already, made for another one."""
        key = key_of(descriptor)
        if not any((key, info.index) in self._imports for info in self._transports):
            return None
        found, passed = self._any_way(key, need), self._missing(descriptor)
        for info, verdict in self._judged(key, need, descriptor):
            if found is not None or verdict is None:
                found = found or self._imports.get((key, info.index))
                break
            passed.append(verdict)
        if found is None or found.unwanted:
            return None
        if need.local is not None:
            self._remember(need, found, passed)
        need_key = need_key_of(descriptor, number_of(need.local, need.check, need.mapped))
        found.needs.add(need_key)
        self._chosen[need_key] = found
        return found

    def _judged(
        self, key: ImportKey, need: Need, descriptor: RemoteDescriptor
    ) -> Iterator[tuple[TransportInfo, PassedOver | None]]:
        """The transports in order, with what is known against each."""
        for info in in_order(self._transports, need):
            if info.own_engine and descriptor.engine_id != self._engine_id:
                continue
            yield info, self._unfit.get((key, info.index)) or self._forbidden(info) or unfit(info, need, descriptor)

    def is_live(self, found: Import) -> bool:
        """False once it was dropped."""
        return self._imports.get(found.key) is found

    async def resolve(
        self, descriptor: RemoteDescriptor, local: MemoryKind | None = None, check: bool = False, mapped: bool = False
    ) -> Import:
        """Connect and import unless that was done; `PeerUnreachable` with every reason, or why the owner refused."""
        need_key = need_key_of(descriptor, number_of(local, check, mapped))
        ready = self._chosen.get(need_key)
        if ready is not None and self.quiet.is_quiet(ready.route):
            await self._ask(ready, descriptor)
            ready = self._chosen.get(need_key)
        if ready is not None:
            ready.unwanted = False
            self._imports.move_to_end(ready.key)
            self.idle.use(ready.route)
            return ready
        self._unwanted.discard(key_of(descriptor))
        pending = self._resolving.get(need_key)
        if pending is None:
            need = Need(local, kind_there(descriptor), check, mapped)
            pending = self._tasks.run(
                self._resolve_once(need_key, need, descriptor), f"import grant {descriptor.grant}"
            )
            self._resolving[need_key] = pending
            pending.add_done_callback(lambda done: _forget_task(self._resolving, need_key, done))
        key = need_key[:-1]
        self._wanted[key] = self._wanted.get(key, 0) + 1
        try:
            return await shared(pending)
        finally:  # the caller uses it before anybody else has a turn
            self._wanted[key] -= 1
            if not self._wanted[key]:
                del self._wanted[key]
            if self.idle.crowded:
                asyncio.get_running_loop().call_soon(self.idle.freed)

    async def _resolve_once(self, need_key: NeedKey, need: Need, descriptor: RemoteDescriptor) -> Import:
        key = key_of(descriptor)
        found = self._any_way(key, need)
        if found is None:
            found = await self._try_transports(key, need, descriptor)
        if self.is_live(found):
            found.needs.add(need_key)
            self._chosen[need_key] = found
        if key in self._unwanted:
            # Whoever still waits for it finds that it is not live, and resolves anew.
            if not any(other != need_key and other[:-1] == key for other in self._resolving):
                self._unwanted.discard(key)
            found.unwanted = True
            self.left(found)
        self._evict_idle()
        return found

    def _any_way(self, key: ImportKey, need: Need) -> Import | None:
        """A notification alone goes the way that the grant is reached by already, if there is one."""
        if need.local is not None or need.mapped:
            return None
        ways = (self._imports.get((key, info.index)) for info in self._transports)
        return next((found for found in ways if found is not None and not found.unwanted), None)

    async def _try_transports(self, key: ImportKey, need: Need, descriptor: RemoteDescriptor) -> Import:
        passed = self._missing(descriptor)
        telling: KvxferError | None = None  # more than that nothing led there
        for info, verdict in self._judged(key, need, descriptor):
            if verdict is not None:
                passed.append(verdict)
                continue
            endpoints, failures = await self._answering(descriptor, info)
            for endpoint in endpoints:
                try:
                    found = await self._shared_import((key, info.index), info, endpoint, descriptor, need.mapped)
                except (PeerError, ProtocolError, TransportError) as error:
                    failures[endpoint] = error
                    continue
                self._remember(need, found, [*passed, *_passed_over(info, failures)])
                return found
            passed += _passed_over(info, failures)
            for failure in failures.values():
                tells = isinstance(failure, ResourceExhausted | PeerIncarnationMismatch | EncryptionMismatch)
                telling = failure if tells and not isinstance(telling, ResourceExhausted) else telling
        self._count(passed)
        if telling is not None:
            raise telling
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
            f"no transport reaches the owner of this descriptor, {need.pair}"
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
        places = {endpoint: place_of(descriptor, info, endpoint) for endpoint in endpoints}
        known = next((endpoint for endpoint, place in places.items() if place in self._routes), None)
        if len(endpoints) == 1 or known is not None or self.idle.crowded:
            return sorted(endpoints, key=lambda one: one != known), {}
        attempts = [(one, partial(self._route, place, info)) for one, place in places.items()]
        failures: Failures = {}
        winner = await first_success(attempts, stagger_s=STAGGER_S, discard=self._spare, failures=failures)
        for one, place in places.items():
            late = self._connecting.get(place)
            if late is not None and (winner is None or one != winner.endpoint):
                late.add_done_callback(self._came_late)
        told = {one: error for one, error in failures.items() if isinstance(error, KvxferError)}
        if any(isinstance(error, ResourceExhausted) for error in told.values()):
            return endpoints, {}  # one after the other, and idle connections make room
        left = [one for one in endpoints if one not in told]
        return sorted(left, key=lambda one: winner is None or one != winner.endpoint), told

    def _came_late(self, done: asyncio.Task[EngineConnection]) -> None:
        if not done.cancelled() and done.exception() is None:
            self._spare(done.result())

    def _spare(self, route: EngineConnection) -> None:
        """Another address was faster; nobody has begun to use this one."""
        if route.fresh and not route.down:
            self._give_up(route)

    def _missing(self, descriptor: RemoteDescriptor) -> list[PassedOver]:
        """What the owner offers, and this machine was asked for but does not have."""
        return [
            PassedOver(None, ChoiceKind.REFUSED, f"{name}: not available here: {why}")
            for name, why in self.engine.unavailable.items()
            if name in descriptor.endpoints
        ]

    def _forbidden(self, info: TransportInfo) -> PassedOver | None:
        if self._allowed is None or info.name in self._allowed:
            return None
        return PassedOver(info, ChoiceKind.NOT_OFFERED, f"{info.name}: not allowed here")

    async def _shared_import(
        self, way: WayKey, info: TransportInfo, endpoint: str, descriptor: RemoteDescriptor, mapped: bool
    ) -> Import:
        """Over each transport a grant is imported once, whatever it is needed for."""
        known = self._imports.get(way)
        if known is not None:
            known.unwanted = False
            return known
        pending = self._importing.get(way)
        if pending is None:
            pending = self._tasks.run(
                self._by_route(way, info, endpoint, descriptor, mapped),
                f"import grant {descriptor.grant} by {info.name}",
            )
            self._importing[way] = pending
            pending.add_done_callback(lambda done: _forget_task(self._importing, way, done))
        return await shared(pending)

    def pass_over(self, found: Import, why: str) -> None:
        """This grant cannot be used over this transport after all: the next one is tried from now on."""
        info = found.route.info
        self._unfit[found.key] = PassedOver(info, ChoiceKind.REFUSED, f"{info.name} {found.route.endpoint}: {why}")
        while len(self._unfit) > CHOICES_MAX:
            self._unfit.popitem(last=False)
        self.drop(found)

    async def _by_route(
        self, key: WayKey, info: TransportInfo, endpoint: str, descriptor: RemoteDescriptor, mapped: bool
    ) -> Import:
        """Connect (if need be) and import; at the limit of descriptors or peers, idle connections are given up for it,
        one at a time.
        """
        again = False
        if self.idle.crowded and place_of(descriptor, info, endpoint) not in self._routes:
            again = await self.idle.make_room()
        while True:
            try:
                return await self._by_some_route(key, info, endpoint, descriptor, mapped)
            except ResourceExhausted:
                if not await self.idle.make_room(again=again):
                    raise
            again = True

    def _busy(self, route: EngineConnection) -> bool:
        """Somebody transfers, looks at mapped memory, or imports over it."""
        if route.fresh or route.importing:
            return True
        return any(self._imports[key].users or key[0] in self._wanted for key in route.imports)

    def _give_up(self, route: EngineConnection) -> asyncio.Future[Event]:
        """An idle connection goes; whoever wants it again connects anew. Owners see us leave, not vanish."""
        for key in tuple(route.imports):
            self.drop(self._imports[key])
        route.down = True
        if self._routes.get(route.place) is route:
            del self._routes[route.place]
        self._routes_by_peer.pop(route.peer, None)
        return self.engine.close_peer(route.peer)

    async def _by_some_route(
        self, key: WayKey, info: TransportInfo, endpoint: str, descriptor: RemoteDescriptor, mapped: bool
    ) -> Import:
        """Import over the connection that there is; over a fresh one when that turns out to be dead, or was displaced
        by others before the owner had seen the key.
        """
        place = place_of(descriptor, info, endpoint)
        for delay_s in (*RESET_DELAYS_S, None):
            route: EngineConnection | None = None
            try:
                route = self._routes.get(place) or await self._route(place, info)
                if self.quiet.is_quiet(route):
                    route = await self.quiet.alive(route, descriptor)
                return await self._import(key, route, descriptor, mapped)
            except PeerLost:
                if route is not None and not route.down:
                    self.peer_down(route.peer)
                if delay_s is None:
                    raise
            await asyncio.sleep(delay_s)
        raise AssertionError("the last try returns or raises")

    def _remember(self, need: Need, found: Import, passed: Sequence[PassedOver]) -> None:
        """One line in the log for each engine, pair of memories and transport; the rest is counted."""
        route = found.route
        reasons = tuple(one.text for one in passed)
        choice = Choice(route.engine_id, need.pair, route.info.name, route.endpoint, reasons)
        before = self.choices.get((choice.engine_id, choice.pair))
        self.choices[choice.engine_id, choice.pair] = choice
        self.choices.move_to_end((choice.engine_id, choice.pair))
        while len(self.choices) > CHOICES_MAX:
            self.choices.popitem(last=False)
        if before is None or before.transport != choice.transport:
            over = "; passed over: " + "; ".join(reasons) if reasons else ""
            log.info("engine %s, %s: by %s%s", choice.engine_id, choice.pair, choice.transport, over)
        self._count(passed)
        self.engine.count_choice(route.info.index, ChoiceKind.TAKEN)

    def _count(self, passed: Sequence[PassedOver]) -> None:
        # Several endpoints of one transport may have failed: it was passed over once.
        for index, kind in {(one.info.index, one.kind) for one in passed if one.info is not None}:
            self.engine.count_choice(index, kind)

    async def _route(self, key: Place, info: TransportInfo) -> EngineConnection:
        route = self._routes.get(key)
        if route is not None:
            return route
        pending = self._connecting.get(key)
        if pending is None:
            pending = self._tasks.run(self._connect_once(key, info), f"connect {info.name} {key[2]}")
            self._connecting[key] = pending
            pending.add_done_callback(lambda done: _forget_task(self._connecting, key, done))
        return await shared(pending)

    async def _connect_once(self, key: Place, info: TransportInfo) -> EngineConnection:
        engine_id, _, endpoint, _ = key
        peer, event = await self._dialled(key, info)
        for delay_s in RESET_DELAYS_S:
            if event.sys_errno != errno.ECONNRESET:
                break
            # Displaced by other newcomers, or its process ends: then the next try is refused.
            await asyncio.sleep(delay_s)
            peer, event = await self._dialled(key, info)
        if event.status != 0:
            raise error_for(event.status, sys_errno=event.sys_errno, peer=endpoint, transport=info.name)
        answered = event.answered_by
        if answered not in ("", engine_id):
            self._down_early.pop(peer, None)
            self.engine.close_peer(peer)
            why = "another engine answers there: the owner of this descriptor has ended"
            hint = "get a new descriptor"
            raise PeerIncarnationMismatch(
                why, peer=endpoint, transport=info.name, hint=hint, expected=engine_id, actual=answered, retryable=False
            )
        if peer in self._down_early:
            del self._down_early[peer]
            self.engine.close_peer(peer)
            raise PeerLost("the connection ended as soon as it was made", peer=endpoint, transport=info.name)
        route = EngineConnection(engine_id, info, endpoint, key, peer)
        route.heard = asyncio.get_running_loop().time()
        self._routes[key] = route
        self._routes_by_peer[peer] = route
        self.idle.begun(route)
        return route

    async def _dialled(self, key: Place, info: TransportInfo) -> tuple[int, Event]:
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

    async def _import(self, key: WayKey, route: EngineConnection, descriptor: RemoteDescriptor, mapped: bool) -> Import:
        route.importing += 1
        route.fresh = False
        try:
            return await self._import_once(key, route, descriptor, mapped)
        finally:
            route.importing -= 1
            self.idle.freed()

    async def _import_once(
        self, key: WayKey, route: EngineConnection, descriptor: RemoteDescriptor, mapped: bool
    ) -> Import:
        self.idle.use(route)
        try:
            handle, completion = self.engine.import_(
                route.peer,
                grant=descriptor.grant,
                generation=descriptor.generation,
                length=descriptor.length,
                access=descriptor.access,
                key=descriptor.key,
                mapped=mapped and descriptor.kind == "hbm",
            )
        except UnknownRegion as gone:
            raise PeerLost("the connection has ended", peer=route.endpoint, transport=route.info.name) from gone
        event = await asyncio.shield(completion)
        if event.status != 0:
            self.engine.release_import(handle)
            refused = error_for(event.status, sys_errno=event.sys_errno, peer=route.endpoint, transport=route.info.name)
            raise stale(refused)
        if route.down:
            self.engine.release_import(handle)
            raise PeerLost("the connection ended", peer=route.endpoint, transport=route.info.name)
        route.heard = asyncio.get_running_loop().time()
        route.imports.add(key)
        found = self._imports[key] = Import(key, route, handle, descriptor.length)
        return found

    # -- connections that were quiet for a while (`quiet.py`) ------------------------------------------------------

    async def _ask(self, found: Import, descriptor: RemoteDescriptor) -> None:
        """Before the first bytes over a quiet connection: its other side answers, or the import goes with it."""
        try:
            await self.quiet.alive(found.route, descriptor)
        except PeerLost:
            self.lost(found)

    def _take_back(self, old: EngineConnection, new: EngineConnection) -> None:
        """The old connection was silent and answered before a new one was there: the new one is not needed."""
        self._give_up(new)
        if not old.down:
            self._routes.setdefault(old.place, old)

    def lost(self, found: Import) -> None:
        """The connection of this import has ended, even if the news has not come yet."""
        self.drop(found)
        if not found.route.down:
            self.peer_down(found.route.peer)

    def drop(self, found: Import) -> None:
        """Let go of an import; harmless when that was done."""
        if self._imports.get(found.key) is found:
            del self._imports[found.key]
            for need_key in found.needs:
                self._chosen.pop(need_key, None)
            found.route.imports.discard(found.key)
            if not found.held:
                self.engine.release_import(found.handle)

    def hold(self, found: Import) -> None:
        """Kernels of the application use this memory where it is: only `let_go` ends that, whatever happens."""
        found.held = True
        found.route.held += 1

    def let_go(self, found: Import) -> None:
        """See `hold`."""
        found.held = False
        found.route.held -= 1
        if not self.is_live(found):
            self.engine.release_import(found.handle)
        if found.route.down and not found.route.held:
            self.engine.close_peer(found.route.peer)

    def forget(self, descriptor: RemoteDescriptor) -> None:
        """This import will not be used again: it goes now, or when its last user goes, or as soon as it is made."""
        key = key_of(descriptor)
        for info in self._transports:
            found = self._imports.get((key, info.index))
            if found is not None:
                found.unwanted = True
                self.left(found)
        if any(need_key[:-1] == key for need_key in self._resolving):
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
        route = self._routes_by_peer.pop(peer, None)
        if route is None:
            self._down_early[peer] = None
            while len(self._down_early) > DOWN_EARLY_MAX:
                self._down_early.popitem(last=False)
            return
        route.down = True
        self.idle.freed()
        if self._routes.get(route.place) is route:
            del self._routes[route.place]
        for key in tuple(route.imports):
            found = self._imports.get(key)
            if found is not None:
                self.drop(found)
        if not route.held:
            self.engine.close_peer(peer)


def _passed_over(info: TransportInfo, failures: Mapping[str, KvxferError]) -> list[PassedOver]:
    kinds = {True: ChoiceKind.REFUSED, False: ChoiceKind.UNREACHABLE}
    return [
        PassedOver(info, kinds[isinstance(error, TransportError)], f"{info.name} {endpoint}: {error.message}")
        for endpoint, error in failures.items()
    ]


def _forget_task(table: dict[K, asyncio.Task[T]], key: K, done: asyncio.Task[T]) -> None:
    del table[key]
    if not done.cancelled():
        done.exception()  # everybody who waited may have given up: then nobody is left to hear of a failure

"""The landing pool: memory of the daemon that takes a push whose decode worker is not chosen yet, and outlives
workers.

The idea: a landing is two postings over one piece of memory, one after the other. While it is written there is a
ticket with a single, write-only claim, made for the worker that asked. The commit, a notification behind the bytes,
revokes the write access; when the engine says that nothing can write any more, the same memory is posted read-only as
a `landing` that a local worker adopts without a copy. Whatever ends either posting (a settlement, a dead worker, the
lease) leads to the same place: access is revoked, and when it is quiet the memory is zeroed and free for the next
landing, so that nobody reads what an earlier request left. The pool's capacity is fixed; when it is in use, the answer
is `BusyError` at once, or after the time that the asker wants to wait (`StagingQueue` below). Where the memory is
(`BufferCache` below): host memory, or the least loaded of some cards.
"""

from __future__ import annotations

import asyncio
import enum
import heapq
import os
import resource
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NoReturn

import msgpack
import numpy as np

from kvxfer.config import Config
from kvxfer.daemon.dispatch import Dispatcher
from kvxfer.dataplane.plane import DataPlane
from kvxfer.descriptors import ACCESS_READ, ACCESS_WRITE, RemoteDescriptor
from kvxfer.errors import (
    BusyError,
    ClosedError,
    ConfigError,
    KvxferError,
    LeaseExpired,
    PeerDraining,
    PeerLost,
    RegistrationError,
    TooLarge,
    TooManyPending,
    TransferCancelled,
    TransportUnavailable,
    UsageError,
    ended_by_other,
)
from kvxfer.logs import logger
from kvxfer.memory.allocation import Held, least_held
from kvxfer.native.engine import Engine, Event, EventKind, RegionInfo
from kvxfer.native.types import MemoryKind
from kvxfer.net.link import Link
from kvxfer.rendezvous import actions as act
from kvxfer.rendezvous.postings import too_many
from kvxfer.rendezvous.shares import FairShares, exceeds_fair_share
from kvxfer.tasks import Deadline, TaskOwner, in_thread
from kvxfer.wire import messages as m
from kvxfer.wire import tags

# -- what the landing pool is made of: parts of fixed capacity, one in host memory or one on each of some cards --------
# The idea: a part hands out pieces, which are regions of the daemon's engine. A piece that comes back is zeroed and
# kept for the next landing; what is kept goes when another size needs the room. Which part takes a landing is a
# decision over numbers: the least loaded one that has room, where landings that are being written, wait or are
# adopted all count, and so do those whose memory is not quiet yet.


PAGE_BYTES, LARGE_BYTES = 4 << 10, 2 << 20  # sizes are rounded up, so that memory can be used again
PREWARM_BYTES = 64 << 20  # prewarmed memory comes in pieces of this size
PIECES_MAX = 1024  # each of host memory is a descriptor of this process, of which links need some as well
WASTE_FACTOR = 4  # a kept piece may be this much larger than what it is used for
ZEROS = bytes(4 << 20)  # a card's memory is cleared from here


@dataclass(slots=True, eq=False)
class BufferCache:
    """One part of the pool: at most ``bytes_max``, kept pieces included. ``device`` None: host memory."""

    engine: Engine
    bytes_max: int
    pieces_max: int
    device: int | None = None
    kept: list[RegionInfo] = field(default_factory=list)  # free for the next landing, smallest first
    count: int = 0  # of pieces: kept ones, those in use, and those that are being allocated
    used_bytes: int = 0
    kept_bytes: int = 0

    def fits(self, size: int) -> bool:
        """There is room for one more, perhaps where something is kept."""
        return self.used_bytes + size <= self.bytes_max and self.count - len(self.kept) < self.pieces_max

    def take(self, size: int) -> RegionInfo | None:
        """A kept piece, or None when one of this size may be allocated now; either counts as used from here on.
        Only what `fits`.
        """
        fitting = [region for region in self.kept if region.length >= size]
        if fitting and fitting[0].length <= size * WASTE_FACTOR:
            self.kept.remove(fitting[0])
            self.kept_bytes -= fitting[0].length
            self.used_bytes += fitting[0].length
            return fitting[0]
        while self.count >= self.pieces_max or self.used_bytes + self.kept_bytes + size > self.bytes_max:
            self._drop(self.kept[0])
        self.count += 1
        self.used_bytes += size
        return None

    async def allocate(self, size: int) -> RegionInfo:
        """What `take` allowed. Errors give the room back."""
        try:
            return await in_thread(self._fresh, size)
        except KvxferError:
            self.count -= 1
            self.used_bytes -= size
            raise

    async def prewarm(self, wanted_bytes: int) -> None:
        """Have so much ready, used bytes included. Errors of an allocation are raised."""
        while self.kept_bytes + self.used_bytes < wanted_bytes:
            size = min(PREWARM_BYTES, rounded(wanted_bytes - self.kept_bytes - self.used_bytes))
            if self.kept_bytes + self.used_bytes + size > self.bytes_max:
                return
            self.count += 1
            self.used_bytes += size  # nobody else may take the room meanwhile
            self.keep(await self.allocate(size), size)

    async def clear(self, region: RegionInfo, written: int) -> None:
        """Zero what a landing may have written; runs off the loop."""
        # A mapping of the memory ends at a page, and so may what was written through it.
        length = min(region.length, rounded(written))
        if region.on_device:
            await in_thread(_clear_device, self.engine, region, length)
        else:
            await in_thread(_clear, self.engine.buffer(region)[:length])

    def keep(self, region: RegionInfo, size: int) -> None:
        """A piece that counted as ``size`` used bytes is free."""
        self.used_bytes -= size
        self.kept_bytes += region.length
        self.kept.append(region)
        self.kept.sort(key=lambda kept: kept.length)

    def _drop(self, region: RegionInfo) -> None:
        self.kept.remove(region)
        self.count -= 1
        self.kept_bytes -= region.length
        self.engine.release(region.id)

    def _fresh(self, size: int) -> RegionInfo:
        """In a thread. A driver gives memory with whatever was in it."""
        if self.device is None:
            return self.engine.alloc(size)
        region = self.engine.alloc(size, kind=MemoryKind.HBM, device=self.device)
        _clear_device(self.engine, region, size)
        return region


def parts_of(engine: Engine, config: Config) -> tuple[BufferCache, ...]:
    """The parts that the configuration asks for. Raises `ConfigError` when this node cannot have them."""
    if config.landing_memory == "hbm":
        pieces = partial(BufferCache, engine, config.landing_bytes_max, PIECES_MAX)
        return tuple(pieces(device=device) for device in _devices(engine, config))
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if config.landing_prewarm_bytes > host_bytes:
        raise ConfigError(
            "more memory is to be touched at the start than this host has",
            key="landing_prewarm_bytes",
            value=config.landing_prewarm_bytes,
            accepted=f"at most {host_bytes}",
        )
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (BufferCache(engine, config.landing_bytes_max, max(1, min(PIECES_MAX, descriptors // 4))),)


def least_loaded_part(parts: Sequence[BufferCache], size: int) -> BufferCache:
    """Where a landing of this size goes. Raises `BusyError` when no part has room."""
    held = [Held(part=number, bytes=part.used_bytes, fits=part.fits(size)) for number, part in enumerate(parts)]
    number = least_held(held)
    if number is None:
        raise full(parts, size)
    return parts[number]


def full(parts: Sequence[BufferCache], size: int, waiting: int = 0) -> BusyError:
    """No part has room, or others have waited for it before."""
    return BusyError(
        "the landing pool is full",
        bytes=size,
        used_bytes=sum(part.used_bytes for part in parts),
        limit=sum(part.bytes_max for part in parts),
        waiting=waiting,
        option="landing_bytes_max",
        hint="wait for room (wait_s), try again when a landing was adopted, or raise landing_bytes_max there",
    )


def rounded(length: int) -> int:
    """The size of a piece for a landing."""
    step = PAGE_BYTES if length <= LARGE_BYTES else LARGE_BYTES
    return -(-length // step) * step


def _devices(engine: Engine, config: Config) -> tuple[int, ...]:
    try:
        known = tuple(range(engine.device_count()))
    except TransportUnavailable as error:
        why = f"there is no accelerator for landings: {error.message}"
        raise ConfigError(why, key="landing_memory", value=config.landing_memory) from error
    wanted = tuple(dict.fromkeys(map(int, config.landing_devices))) or known
    if not set(wanted) <= set(known):
        raise ConfigError(
            "there is no such accelerator",
            key="landing_devices",
            value=", ".join(config.landing_devices),
            accepted=", ".join(map(str, known)),
        )
    return wanted


def _clear(memory: memoryview) -> None:
    """In a thread; lets go of the memory when the engine closes meanwhile (it stays mapped)."""
    np.frombuffer(memory, dtype=np.uint8).fill(0)


def _clear_device(engine: Engine, region: RegionInfo, length: int) -> None:
    for offset in range(0, length, len(ZEROS)):
        engine.write(region.id, offset, memoryview(ZEROS)[: min(len(ZEROS), length - offset)])


# -- those who wait for room in the landing pool: a queue for each node, served in order of arrival
# The idea: small ones may go before a large one for which there is no room yet, so that it does not hold up a pool
# that is nearly free, but only so often: then it is its turn, and nobody is passed over for ever. Who waits for room
# within its own node's share holds up nobody else. Who waits holds no room, places and the bytes of what was asked
# are limited (for one node and for all), and each wait has an end: room, its time, the end of whoever asked, or of
# this node's service.


PASSES_MAX = 16  # so many that came later go first
OF_EACH_MAX, HEADS_MAX = 4, 256  # of one node's line, and of all lines, so many are considered for the next slot


class StagingRoom(enum.Enum):
    """What there is for one that asks."""

    FITS = "fits"
    NONE = "none"
    SHARE = "share"  # its node has its share: no reason to hold up others


@dataclass(slots=True, eq=False)
class _QueuedLanding:
    number: int
    account: Hashable
    room: Callable[[], StagingRoom]
    asked: tuple[object, int]
    wakeup: asyncio.Future[None]  # resolves when it is worth another try
    passed: int = 0


class StagingQueue:
    """All methods belong to the loop's thread. ``limit`` may wait at a time."""

    def __init__(self, limit: int) -> None:
        self._places = FairShares(limit)
        self._lines: dict[Hashable, OrderedDict[int, _QueuedLanding]] = {}
        self._by_request: dict[tuple[object, int], _QueuedLanding] = {}
        self._last = 0
        self._error: KvxferError | None = None

    def __len__(self) -> int:
        return self._places.total

    def others(self, account: Hashable) -> bool:
        """Somebody of another node waits."""
        return self._places.others(account)

    async def wait(
        self,
        room: Callable[[], StagingRoom],
        *,
        account: Hashable,
        asker: object,
        request: int,
        gone: asyncio.Future[Any],
        wait_s: float,
        then: Callable[[], None],
    ) -> bool:
        """Call ``then``, which takes the room, when it is this one's turn; False when it never was.

        Nothing is called, and True returned, when nobody wants it any more. Raises `TooManyPending`, what ``then``
        raises, and the error of `fail`.
        """
        if not self._places.room(account):
            raise self._full(account)
        deadline, loop = Deadline.after(wait_s), asyncio.get_running_loop()
        mine = self._enter(room, account, (asker, request), loop.create_future())
        try:
            while (turn := self._turn()) is None or turn[0] is not mine:
                mine.wakeup = loop.create_future()
                await asyncio.wait(
                    (mine.wakeup, gone), timeout=deadline.remaining(), return_when=asyncio.FIRST_COMPLETED
                )
                if mine.wakeup.cancelled() or gone.done():
                    return True
                if self._error is not None:
                    raise self._error
                if not mine.wakeup.done():
                    return False
            for other in turn[1]:
                other.passed += 1
            then()
            return True
        finally:
            self._leave(mine)
            self.wake_next()

    def pass_all(self) -> bool:
        """Whether one that does not wait, and fits, may go before all these; it is counted as having done so."""
        before = [one for one in self._first() if one.room() is not StagingRoom.SHARE]
        if any(one.passed >= PASSES_MAX or one.room() is StagingRoom.FITS for one in before):
            return False
        for one in before:
            one.passed += 1
        return True

    def wake_next(self) -> None:
        """There may be room for one of them."""
        turn = self._turn()
        if turn is not None and not turn[0].wakeup.done():
            turn[0].wakeup.set_result(None)

    def give_up(self, asker: object, request: int) -> None:
        """Nobody waits for the answer of this request any more."""
        if (one := self._by_request.get((asker, request))) is not None:
            one.wakeup.cancel()

    def fail(self, error: KvxferError) -> None:
        """Nobody will have a turn from now on."""
        self._error = error
        for one in tuple(self._by_request.values()):
            if not one.wakeup.done():
                one.wakeup.set_result(None)

    def _full(self, account: Hashable) -> TooManyPending:
        return too_many("wait for room in the landing pool", "waiting_max", self._places, account)

    def _enter(
        self,
        room: Callable[[], StagingRoom],
        account: Hashable,
        asked: tuple[object, int],
        wakeup: asyncio.Future[None],
    ) -> _QueuedLanding:
        self._last += 1
        mine = _QueuedLanding(self._last, account, room, asked, wakeup)
        self._places.take(account)
        self._lines.setdefault(account, OrderedDict())[mine.number] = mine
        self._by_request[asked] = mine
        return mine

    def _leave(self, mine: _QueuedLanding) -> None:
        self._places.give(mine.account)
        line = self._lines[mine.account]
        del line[mine.number]
        if not line:
            del self._lines[mine.account]
        if self._by_request.get(mine.asked) is mine:
            del self._by_request[mine.asked]

    def _first(self) -> list[_QueuedLanding]:
        """Those who came first, of each node and of all."""
        heads = (one for line in self._lines.values() for one in islice(line.values(), OF_EACH_MAX))
        return heapq.nsmallest(HEADS_MAX, heads, key=lambda one: one.number)

    def _turn(self) -> tuple[_QueuedLanding, list[_QueuedLanding]] | None:
        """Whose turn it is, and whom it passes; None: nobody's."""
        passed: list[_QueuedLanding] = []
        for one in self._first():
            room = one.room()
            if room is StagingRoom.FITS:
                return one, passed
            if room is StagingRoom.NONE:
                if one.passed >= PASSES_MAX:
                    return None
                passed.append(one)
        return None


BODIES_BYTES_MAX = 32 << 20  # what askers want back with their landings, of all that wait and all that live
ENTRY_BYTES = 1024  # what one without a body counts for

log = logger("kvxfer.landing")

# A writer that ends closes its data connection at once; why it ended comes through the daemons, a little later. And one
# whose daemon has gone may be about to connect.
WHY_S = 1.0


@dataclass(slots=True, eq=False)
class StagingBuffer:
    """One landing from its request to the moment when its memory is quiet."""

    namespace: str
    key: str
    length: int
    body: bytes = field(repr=False)
    lease_s: float
    part: BufferCache
    account: Hashable = None  # for whom it counts
    region: RegionInfo | None = None
    size: int = 0  # that counts as used in its part
    given_up: bool = False  # by whoever asked, before there was an answer
    grant: int = 0  # the live one: for writing first, for reading after the commit
    ticket: str = ""
    posting: str = ""
    committed: bool = False
    orphaned: bool = False  # nobody can say through the daemons what becomes of its writer
    ended: bool = False
    quiet: list[asyncio.Future[Event]] = field(default_factory=list)


class StagingPool:
    """All landings of one daemon: in each part of the pool at most `landing_bytes_max` bytes, kept pieces included."""

    def __init__(
        self, plane: DataPlane, dispatcher: Dispatcher, owner: TaskOwner, config: Config, clock: Callable[[], float]
    ) -> None:
        self._plane = plane
        self._dispatcher = dispatcher
        self._owner = owner
        self._bytes_max = config.landing_bytes_max
        self._wait_s_max = config.wait_s_max
        self._line = StagingQueue(config.waiting_max)
        self._bodies = FairShares(BODIES_BYTES_MAX)
        self._held = FairShares(0)  # bytes of pieces, by who asked for them
        self._pieces = FairShares(0)  # the same in numbers
        self._prewarm_bytes = config.landing_prewarm_bytes
        self._clock = clock
        self._by_key: dict[tuple[str, str], StagingBuffer] = {}  # by namespace and key
        self._by_posting: dict[str, StagingBuffer] = {}
        self._allocating: dict[tuple[Link, int], StagingBuffer] = {}  # by the request that waits for it
        self.parts = parts_of(plane.engine, config)
        self._held.limit = sum(part.bytes_max for part in self.parts)
        self._pieces.limit = sum(part.pieces_max for part in self.parts)
        self.quarantined = 0
        self.landed = 0
        self.refused = 0

    @property
    def live(self) -> int:
        """Landings that are written, wait for adoption or are adopted."""
        return len(self._by_key)

    @property
    def used_bytes(self) -> int:
        """Of all parts: in flight, waiting, adopted, or not quiet yet."""
        return sum(part.used_bytes for part in self.parts)

    @property
    def kept_bytes(self) -> int:
        """Of all parts: allocated and free."""
        return sum(part.kept_bytes for part in self.parts)

    # -- asking for one --------------------------------------------------------------------------------------

    def land(self, link: Link, message: m.Land) -> None:
        """Answer a request for a landing: at once, when its memory is allocated, or when it has had its turn.

        Raises `BusyError` when the pool is full and the asker does not wait, `TooLarge` for what can never fit,
        `UsageError` for a key in use or a bad wait.
        """
        size = rounded(message.length)
        if size > self._bytes_max:  # it would never find room
            raise TooLarge(
                "larger than the landing pool", bytes=size, limit=self._bytes_max, option="landing_bytes_max"
            )
        self._require_new_key(link, message)
        if message.wait_s > self._wait_s_max:
            raise UsageError("bad wait", wait_s=message.wait_s, wait_s_max=self._wait_s_max)
        account = self._account(link)
        if not self._bodies.room(account, _body_bytes(message)):
            what = "bytes of bodies of landings on this node"
            raise too_many(what, "", self._bodies, account)
        if message.wait_s and (self._line or self._room(account, size) is not StagingRoom.FITS):
            self._bodies.take(account, _body_bytes(message))
            task = self._owner.spawn(self._land_in_turn(link, message, size), "wait for room for a landing")
            task.add_done_callback(lambda _: self._bodies.give(account, _body_bytes(message)))
        else:
            self._begin(link, message, size)

    def give_up(self, link: Link, request: int) -> None:
        """Nobody waits for the answer any more."""
        self._line.give_up(link, request)
        if (landing := self._allocating.get((link, request))) is not None:
            landing.given_up = True

    def drain(self) -> None:
        """This node takes nothing new."""
        self._line.fail(PeerDraining("this node is shutting down"))

    async def _land_in_turn(self, link: Link, message: m.Land, size: int) -> None:
        try:
            account = self._account(link)
            namespace, begun = self._dispatcher.registry.namespace_of(link), False

            def begin() -> None:
                nonlocal begun
                begun = True
                self._begin(link, message, size, in_turn=True)

            if not await self._line.wait(
                lambda: self._room(account, size),
                account=account,
                asker=link,
                request=message.rid,
                gone=link.closed,
                wait_s=message.wait_s,
                then=begin,
            ):
                self._refuse_full(size)
            if not begun:
                self._tell_adopters(namespace, message.key, _left(message.key, link))
        except KvxferError as error:
            self._dispatcher.refuse(link, message.rid, error)

    def _require_new_key(self, link: Link, message: m.Land) -> str:
        """The namespace of a key that nothing lies under."""
        namespace = self._dispatcher.registry.namespace_of(link)
        if (namespace, message.key) in self._by_key:
            raise UsageError("there is a landing with this key already", key=message.key)
        return namespace

    def _account(self, link: Link) -> str:
        """For whom a landing counts: the node that asks, or this one for all its workers."""
        return link.peer.node_id

    def _room(self, account: str, size: int) -> StagingRoom:
        """Within the share of a node when there are others: what is left of the pool is for them."""
        if not any(part.fits(size) for part in self.parts):
            return StagingRoom.NONE
        if self._line.others(account) or self._dispatcher.nodes.others_than(account):
            held, pieces = self._held, self._pieces
            if exceeds_fair_share(held.held(account), held.total, held.limit, size):
                return StagingRoom.SHARE
            if exceeds_fair_share(pieces.held(account), pieces.total, pieces.limit):
                return StagingRoom.SHARE
            if self._line.others(account) and exceeds_fair_share(1, 0, held.limit, size):
                return StagingRoom.SHARE  # nearly the whole pool is for who waits alone
        return StagingRoom.FITS

    def _refuse_full(self, size: int) -> NoReturn:
        self.refused += 1
        raise full(self.parts, size, waiting=len(self._line))

    def _begin(self, link: Link, message: m.Land, size: int, *, in_turn: bool = False) -> None:
        namespace = self._require_new_key(link, message)
        account = self._account(link)
        if self._room(account, size) is not StagingRoom.FITS or not (in_turn or self._line.pass_all()):
            self._refuse_full(size)
        landing = StagingBuffer(
            namespace=namespace,
            key=message.key,
            length=message.length,
            body=message.body,
            lease_s=message.lease_s,
            part=least_loaded_part(self.parts, size),
            account=account,
        )
        self._bodies.take(account, _body_bytes(landing))
        self._pieces.take(account)
        self._take(landing)
        self._by_key[namespace, landing.key] = landing
        if landing.region is not None:
            self._offer(landing, link, message)
        else:
            asked = (link, message.rid)
            self._allocating[asked] = landing
            task = self._owner.spawn(self._allocate(landing, link, message), "allocate a landing")
            task.add_done_callback(lambda _: self._allocating.pop(asked, None))

    async def prewarm(self) -> None:
        """Allocate what the configuration wants ready, in each part."""
        for part in self.parts:
            try:
                await part.prewarm(self._prewarm_bytes)
            except KvxferError as error:
                log.warning("cannot prewarm the landing pool: %s", error)

    def _take(self, landing: StagingBuffer) -> None:
        size = rounded(landing.length)
        landing.region = landing.part.take(size)
        self._held.give(landing.account, landing.size)
        landing.size = size if landing.region is None else landing.region.length
        self._held.take(landing.account, landing.size)

    def _give_back(self, landing: StagingBuffer) -> None:
        """Its memory, or its place for some, is free again."""
        self._held.give(landing.account, landing.size)
        self._pieces.give(landing.account)
        self._bodies.give(landing.account, _body_bytes(landing))
        self._line.wake_next()

    async def _allocate(self, landing: StagingBuffer, link: Link, message: m.Land) -> None:
        """New memory for it; a card that others have filled is passed over for the next one."""
        untried = list(self.parts)
        while landing.region is None:
            try:
                landing.region = await landing.part.allocate(landing.size)
            except KvxferError as error:
                untried.remove(landing.part)
                if not self._elsewhere(landing, untried, error):
                    self._forget(landing)
                    self._dispatcher.refuse(link, message.rid, error)
                    self._give_back(landing)
                    return
        self._offer(landing, link, message)

    def _elsewhere(self, landing: StagingBuffer, untried: Sequence[BufferCache], error: KvxferError) -> bool:
        """Another part takes a landing for which its own had no memory after all."""
        if not isinstance(error, RegistrationError) or not any(part.fits(landing.size) for part in untried):
            return False
        log.warning("no memory for a landing on card %s, the next one is tried: %s", landing.part.device, error)
        landing.part = least_loaded_part(untried, landing.size)
        self._take(landing)
        return True

    # -- writing ---------------------------------------------------------------------------------------------

    def _offer(self, landing: StagingBuffer, link: Link, message: m.Land) -> None:
        """The memory is there: give the asker the single claim of a ticket for writing it."""
        try:
            if link.closed.done() or landing.given_up:
                raise _left(landing.key, link)
            posted, rest = self._post(landing, "ticket", ACCESS_WRITE)
        except KvxferError as error:
            # Who asked, and was refused, may try again.
            self._end(landing, error, tell=link.closed.done() or landing.given_up)
            self._dispatcher.refuse(link, message.rid, error)
            return
        landing.ticket = posted.posting
        self._by_posting[landing.ticket] = landing
        claim = m.Claim(
            rid=message.rid,
            kind="ticket",
            posting=posted.posting,
            secret=posted.secret,
            engine_id=message.engine_id,
        )
        claimed = self._dispatcher.registry.claim(self._clock(), link, claim)
        self._dispatcher.run([*rest, *claimed])
        answers = (action.message for action in claimed if isinstance(action, act.Send))
        if not any(isinstance(answer, m.Claimed) and answer.posting == landing.ticket for answer in answers):
            self._end(landing, ClosedError("it could not be claimed"), tell=False)

    def _post(self, landing: StagingBuffer, kind: str, access: int) -> tuple[m.Posted, list[act.Action]]:
        """Offer access to the memory, once; see `Dispatcher.post_own`."""
        body = self._grant(landing, access)
        message = m.Post(kind=kind, key=landing.key, body=body, lease_s=landing.lease_s, claims_max=1)
        return self._dispatcher.post_own(message, namespace=landing.namespace)

    def _grant(self, landing: StagingBuffer, access: int) -> bytes:
        """Access to the memory, as the body of a posting."""
        assert landing.region is not None
        made: RemoteDescriptor = self._plane.memory.export(landing.region, 0, landing.length, access, landing.lease_s)
        landing.grant = made.grant
        self._plane.memory.subscribe(made.grant, lambda event: self._on_engine(landing, event))
        packed: bytes = msgpack.packb(
            {"descriptor": made.to_dict(), "body": landing.body, "device": landing.part.device}
        )
        return packed

    def _on_engine(self, landing: StagingBuffer, event: Event) -> None:
        if landing.ended or landing.committed:
            return
        if event.kind == EventKind.GRANT_LOST:
            if landing.orphaned:
                self._vanished(landing)
            else:
                self._look_later(landing)
        elif event.kind == EventKind.NOTIFY and tags.unpack(event.tag).kind == tags.COMMIT:
            landing.committed = True
            self._owner.spawn(self._publish(landing), "publish a landing")

    def _look_later(self, landing: StagingBuffer) -> None:
        asyncio.get_running_loop().call_later(WHY_S, self._vanished, landing)

    def _vanished(self, landing: StagingBuffer) -> None:
        """The writer's connection has ended, unless there is another one by now."""
        if not landing.committed and not landing.ended and self._plane.engine.attached(landing.grant) <= 0:
            self._end(landing, PeerLost(f"the worker that pushed {landing.key} vanished before the commit"))

    # -- adopting --------------------------------------------------------------------------------------------

    async def _publish(self, landing: StagingBuffer) -> None:
        """Committed: nothing may write any more; then it can be adopted."""
        self._revoke(landing)
        await asyncio.gather(*landing.quiet)
        if landing.ended:
            return
        landing.quiet.clear()
        try:
            posted, rest = self._post(landing, "landing", ACCESS_READ)
        except KvxferError as error:
            self._end(landing, error)
            return
        self.landed += 1
        landing.posting = posted.posting
        self._by_posting[landing.posting] = landing
        self._dispatcher.run(rest)

    def on_event(self, event: m.PostingEvent) -> None:
        """Something happened to one of the daemon's own postings."""
        landing = self._by_posting.get(event.posting)
        if landing is None or event.what == "claimed":
            return
        if event.what == "orphaned":  # the data path tells whether a claimant whose daemon is out of reach goes on
            landing.orphaned = True
            if event.posting == landing.ticket:
                self._look_later(landing)
            return
        if event.posting == landing.posting:
            self._end(landing, _ended(landing.key, event))
            return
        done = event.what == "settled" and event.code == "done"
        if done and not landing.committed:
            self._plane.engine.drain()  # the commit came before the settlement, it may not have been read
        if landing.committed:
            self._by_posting.pop(event.posting, None)
            self._dispatcher.withdraw_own(event.posting, "the landing is written")
        elif not done:
            self._end(landing, _ended(landing.key, event))

    # -- the end ---------------------------------------------------------------------------------------------

    def _end(self, landing: StagingBuffer, why: KvxferError, *, tell: bool = True) -> None:
        if landing.ended:
            return
        landing.ended = True
        log.debug("the landing %s ends: %s", landing.key, why)
        self._forget(landing)
        if tell and not landing.posting:
            self._tell_adopters(landing.namespace, landing.key, why)
        self._revoke(landing)
        if landing.region is not None:
            self.quarantined += 1
            self._owner.spawn(self._reuse(landing, landing.region), "reuse a landing")

    def _tell_adopters(self, namespace: str, key: str, why: KvxferError) -> None:
        """They need not wait any longer; who comes later waits for the next push."""
        self._dispatcher.refuse_waiting(kind="landing", key=key, namespace=namespace, error=why)

    def _forget(self, landing: StagingBuffer) -> None:
        self._by_key.pop((landing.namespace, landing.key), None)
        for posting in (landing.ticket, landing.posting):
            if self._by_posting.pop(posting, None) is not None:
                self._dispatcher.withdraw_own(posting, "the landing has ended")

    def _revoke(self, landing: StagingBuffer) -> None:
        if landing.grant:
            landing.quiet.append(self._plane.memory.revoke(landing.grant))
            landing.grant = 0

    async def _reuse(self, landing: StagingBuffer, region: RegionInfo) -> None:
        """Quarantine: the memory is used again only when no peer can reach it any more, and then holds zeros."""
        await asyncio.gather(*landing.quiet)
        await landing.part.clear(region, landing.length)
        self.quarantined -= 1
        landing.part.keep(region, landing.size)
        self._give_back(landing)


def _left(key: str, link: Link) -> KvxferError:
    """Why a landing is not made that somebody asked for."""
    if link.closed.done():
        return PeerLost(f"whoever was to push {key} ended before it began")
    return TransferCancelled(f"the push of {key} was given up before it began", by="peer")


def _ended(key: str, event: m.PostingEvent) -> KvxferError:
    """Why a landing ends, by what became of its claim or its posting."""
    what = f"the push of {key} ended before it was committed"
    if event.what == "lost":
        return PeerLost(f"{what}: {event.detail or 'its worker died'}")
    if event.what == "expired":
        return LeaseExpired(f"{what}: its lease ran out")
    return ended_by_other(event.code, f"{what}: {event.detail or event.code or event.what}")


def _body_bytes(asked: m.Land | StagingBuffer) -> int:
    return ENTRY_BYTES + len(asked.body)

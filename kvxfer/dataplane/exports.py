"""Our memory as peers see it: regions, the grants that let them in, and what they tell through these.

A grant that nobody watches yet keeps its notices for a while, since peers may be faster than we are.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from kvxfer.addresses import format_address, parse_address
from kvxfer.block_parts import BlockParts
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import TransportError
from kvxfer.logs import logger
from kvxfer.native.engine import Engine, Event, EventKind, RegionInfo
from kvxfer.native.types import MemoryKind, TransportInfo
from kvxfer.tasks import to_the_end

if TYPE_CHECKING:
    from kvxfer.dataplane.connections import Import
    from kvxfer.dataplane.plane import DataPlane
    from kvxfer.memory.region import Region

log = logger("kvxfer.exports")

# -- memory of a peer of this host, where it is: as a view for the CPU, or as an address for a device's kernels --------


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory on an accelerator that kernels of this process may use: ``length`` bytes from ``address`` on, of the
    accelerator that this process knows as ``device``.
    """

    device: int
    address: int
    length: int


async def map_host(plane: DataPlane, descriptor: RemoteDescriptor) -> tuple[memoryview, Import]:
    """Host memory (no copy), and what to `DataPlane.unmap`; needs a transport of this host that can map."""
    if descriptor.kind != "dram":
        raise TransportError(
            "memory of an accelerator cannot be mapped for the CPU", peer=descriptor.node_id, hint="use get"
        )
    found = await plane.resolve_mapped(descriptor)
    view = plane.engine.mapping(found.handle)
    if view is None:
        raise _not_mapped(plane, found)
    return view, found


async def map_device(plane: DataPlane, descriptor: RemoteDescriptor) -> tuple[DeviceMemory, Import]:
    """The same for memory on an accelerator. It stays mapped until `DataPlane.unmap`, whatever becomes of its owner:
    kernels that run may not lose it.
    """
    found = await plane.resolve_mapped(descriptor)
    seen = plane.engine.device_mapping(found.handle)
    if seen is None:
        raise _not_mapped(plane, found)
    plane.pin_mapped(found)
    address, device = seen
    return DeviceMemory(device, address, descriptor.length), found


def _not_mapped(plane: DataPlane, found: Import) -> TransportError:
    plane.unmap(found)
    return TransportError(
        "this memory cannot be mapped from here", transport=found.connection.info.name, hint="use get instead"
    )


# -- notices that came before anybody listened, and the count of those that fitted nothing -----------------------------
# The idea: on the data path a notice may overtake what it is about (the owner has made the descriptor, and looks
# after it a moment later). Dropping it would leave the other side's release unheard until a lease ends, so it is kept
# for a while, and handed over in order when somebody listens. Kept ones are bounded in number and age; what is given
# up is counted by type and reason, and nothing here ever raises.


KEPT_MAX, KEPT_PER_KEY_MAX = 4096, 64
KEPT_S = 10.0
E = TypeVar("E")


class UnexpectedQueue(Generic[E]):
    """Kept by a key (a grant, a claim), oldest key first. ``now`` comes in with every call."""

    def __init__(
        self, *, kept_max: int = KEPT_MAX, per_key_max: int = KEPT_PER_KEY_MAX, kept_s: float = KEPT_S
    ) -> None:
        self._kept: OrderedDict[int, tuple[float, list[E]]] = OrderedDict()
        self._kept_max = kept_max
        self._per_key_max = per_key_max
        self._kept_s = kept_s
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def keep(self, key: int, notice: E, now: float, given_up: Callable[[str, E], None]) -> None:
        """Keep one; ``given_up(reason, notice)`` hears of each that has to go for it (perhaps of itself)."""
        self.expire(now, given_up)
        _, kept = self._kept.setdefault(key, (now + self._kept_s, []))
        if len(kept) >= self._per_key_max:
            given_up("too_many", notice)
            return
        kept.append(notice)
        self._count += 1
        while self._count > self._kept_max:
            self._drop("too_many", given_up)

    def take(self, key: int, now: float, given_up: Callable[[str, E], None]) -> list[E]:
        """What came for this key, in the order in which it came; each is handed over once."""
        self.expire(now, given_up)
        _, kept = self._kept.pop(key, (0.0, []))
        self._count -= len(kept)
        return kept

    def expire(self, now: float, given_up: Callable[[str, E], None]) -> None:
        """Give up what nobody asked for in time."""
        while self._kept and next(iter(self._kept.values()))[0] <= now:
            self._drop("nobody_listened", given_up)

    def _drop(self, reason: str, given_up: Callable[[str, E], None]) -> None:
        _, (_, kept) = self._kept.popitem(last=False)
        self._count -= len(kept)
        for notice in kept:
            given_up(reason, notice)


class UnexpectedCounts:
    """Counts of notices that fitted nothing, by type and reason (words known beforehand, so there are few)."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.on_add: Callable[[], None] | None = None

    def add(self, kind: str, reason: str) -> None:
        """Count one that was dropped, and call `on_add`."""
        self.counts[kind, reason] += 1
        if self.on_add is not None:
            self.on_add()

    @property
    def total(self) -> int:
        """How many were dropped, of every type and for every reason."""
        return sum(self.counts.values())


# -- what peers are told of an engine's transports: where each listens, and the secret that connecting to it takes -----


WILDCARDS = ("0.0.0.0", "::")


def endpoints_of(transports: Sequence[TransportInfo], advertise: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Each listening transport's endpoint, wildcards replaced by the advertised hosts."""
    endpoints: dict[str, tuple[str, ...]] = {}
    for info in transports:
        if not info.endpoint:
            continue
        candidates: tuple[str, ...] = (info.endpoint,)
        if not info.same_host:
            bound = parse_address(info.endpoint)
            hosts = tuple(advertise) if bound.host in WILDCARDS or advertise else (bound.host,)
            candidates = tuple(format_address(host, bound.port) for host in hosts)
        if candidates:
            endpoints[info.name] = candidates
    return endpoints


def secrets_of(transports: Sequence[TransportInfo]) -> Mapping[str, bytes]:
    """Of the transports that encrypt."""
    return {info.name: info.secret for info in transports if info.secret is not None}


class LocalMemory:
    """The regions and grants of one engine; a part of its `DataPlane`."""

    def __init__(
        self, engine: Engine, *, node_id: str, incarnation: str, advertise: Sequence[str], unexpected: UnexpectedCounts
    ) -> None:
        self.engine = engine
        self.engine_id = engine.engine_id.hex()
        self.node_id = node_id
        self.incarnation = incarnation
        self.kinds: dict[int, MemoryKind] = {}  # of the regions
        self._endpoints = endpoints_of(engine.transports, advertise)
        self._secrets = secrets_of(engine.transports)
        self._subscribers: dict[int, Callable[[Event], None]] = {}
        self._regions: dict[int, set[Region]] = {}
        self._leaving: set[Region] = set()
        self._early: UnexpectedQueue[Event] = UnexpectedQueue()
        self._ever_subscribed: set[int] = set()  # grants that somebody watches or has watched
        self._unexpected = unexpected

    def export(
        self,
        region: RegionInfo,
        offset: int,
        length: int,
        access: int,
        expires_in_s: float | None,
        blocks: BlockParts | None = None,
    ) -> RemoteDescriptor:
        """Make a grant, of some blocks or of all the range, and describe it for peers."""
        grant = self.engine.grant(region.id, offset, length, access, blocks)
        try:
            return RemoteDescriptor(
                node_id=self.node_id,
                incarnation=self.incarnation,
                engine_id=self.engine_id,
                region=region.id,
                grant=grant.id,
                generation=grant.generation,
                length=grant.length,
                access=grant.access,
                key=grant.key,
                kind="hbm" if region.on_device else "dram",
                pinned=region.kind is MemoryKind.PINNED,
                expires_in_s=expires_in_s,
                endpoints=self._endpoints,
                secrets=self._secrets,
            )
        except BaseException:
            self.engine.revoke(grant.id)
            raise

    def identify(self, *, node_id: str, incarnation: str, advertise: Sequence[str]) -> None:
        """The node's daemon has another identity now: descriptors made from now on carry it."""
        self.node_id, self.incarnation = node_id, incarnation
        self._endpoints = endpoints_of(self.engine.transports, advertise)

    def add_region(self, region: Region) -> None:
        """A region exists; it is kept until its release is quiet."""
        self._regions.setdefault(region.id, set()).add(region)
        self.kinds[region.id] = region.kind

    def twins(self, region: Region) -> bool:
        """Whether the same memory is also registered as another region object."""
        return len(self._regions.get(region.id, ())) > 1

    def subscribe(self, grant: int, callback: Callable[[Event], None]) -> None:
        """Call back for notifications through this grant, and when its last peer vanishes.

        What came before anybody watched is told first, in the next turn of the loop.
        """
        self._subscribers[grant] = callback
        self._ever_subscribed.add(grant)
        loop = asyncio.get_running_loop()
        for event in self._early.take(grant, loop.time(), self._count_dropped):
            loop.call_soon(self.on_event, event)

    def subscribed(self, grant: int) -> bool:
        """Somebody is called back for this grant."""
        return grant in self._subscribers

    def unsubscribe(self, grant: int) -> None:
        """Stop the callbacks of a grant."""
        self._subscribers.pop(grant, None)

    def revoke(self, grant: int) -> asyncio.Future[Event]:
        """Refuse a grant from now on; the future resolves when no peer can move a byte through it."""
        self.discard_notifications(grant)
        return self.engine.revoke(grant)

    def discard_notifications(self, grant: int) -> None:
        """Nobody wants to know what arrives, or has arrived, by this grant."""
        self.unsubscribe(grant)
        self._ever_subscribed.discard(grant)
        for event in self._early.take(grant, asyncio.get_running_loop().time(), self._count_dropped):
            self._count_dropped("revoked", event)

    def release(self, region: Region) -> asyncio.Future[Event]:
        """Forget a region; resolves when no peer can reach it. Until then it, and its memory, is kept alive."""
        quiet = self.engine.release(region.id)
        known = self._regions[region.id]
        known.discard(region)
        if not known:
            del self._regions[region.id], self.kinds[region.id]
        self._leaving.add(region)
        quiet.add_done_callback(lambda _: self._leaving.discard(region))
        return quiet

    def on_event(self, event: Event) -> None:
        """A notice through one of our grants, or the end of the last peer that used it."""
        watcher = self._subscribers.get(event.id)
        if watcher is not None:
            watcher(event)
        elif event.kind == EventKind.GRANT_LOST:
            return  # a peer that was told nothing else has gone: nobody asked to hear of it
        elif event.id in self._ever_subscribed:
            self._count_dropped("nobody_listens", event)
        else:
            self._early.keep(event.id, event, asyncio.get_running_loop().time(), self._count_dropped)

    def _count_dropped(self, reason: str, event: Event) -> None:
        self._unexpected.add("notice", reason)

    async def evacuate(self) -> None:
        """Move out what lies in our memory before it goes; a cancellation is raised when that is done."""
        regions = (region for same in self._regions.values() for region in same)
        moves = [move for region in regions for move in region.evacuations]
        if not moves:
            return
        with ThreadPoolExecutor(1, "kvxfer-evacuate") as own:
            try:
                own.submit(int)
            except RuntimeError:  # no thread can be started: the loop waits
                _run_all(moves)
            else:
                await to_the_end(own, _run_all, moves)

    def closed(self) -> None:
        """The engine is closed, and with it all of this is gone."""
        for region in [region for same in self._regions.values() for region in same]:
            region.plane_closed()
        self._regions.clear()
        self.kinds.clear()


def _run_all(moves: Sequence[Callable[[], None]]) -> None:
    """One that fails keeps no other from being made."""
    for move in moves:
        try:
            move()
        except Exception:
            log.exception("what lay in memory of this client could not be moved out: it holds zeros from now on")

"""Registered memory as users hold it: `Region`, `Span` (a part of one) and `KVCache` (regions plus what the bytes
mean).

A region stays known to its plane, and thereby its memory alive, until its release is quiet: whatever the user forgets
or cancels, no peer ever writes into memory that Python has given to somebody else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvxfer.block_parts import BlockParts, Rows, granted, parts_of
from kvxfer.descriptors import ACCESS_BY_NAME, SECONDS_MAX, U64_MAX, RemoteDescriptor
from kvxfer.errors import GeometryMismatch, InvalidLength, OutOfRange, RegionBusy, UnknownRegion, UsageError
from kvxfer.geometry import BlockTable, CacheLayout
from kvxfer.memory.footprint import BaseAddress, Footprint
from kvxfer.memory.sources import base_address_of
from kvxfer.native.status import not_addressable
from kvxfer.native.types import MemoryKind
from kvxfer.tasks import OTHER_SIDE, TRANSFERRING, Deadline, seconds, shared

COPY_INLINE_BYTES_MAX = 64 << 10  # of host memory: quicker than a thread

if TYPE_CHECKING:
    from kvxfer.dataplane.plane import DataPlane
    from kvxfer.native.engine import Engine, RegionInfo


def check_span(offset: object, length: object, limit: int, what: str) -> None:
    """Offset and length in bytes must be integers inside ``limit``; errors name the field, the value and the limit."""
    for name, value, least in (("offset", offset, 0), ("length", length, 1)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidLength(f"{what}: {name} must be an integer", field=name, value=repr(value)[:80])
        if not least <= value <= U64_MAX:
            raise InvalidLength(
                f"{what}: {name} must be {least} to 2^64-1 bytes", field=name, value=value, limit=U64_MAX
            )
    assert isinstance(offset, int)
    assert isinstance(length, int)
    if length > limit or offset > limit - length:
        raise OutOfRange(f"{what}: the span leaves it", offset=offset, length=length, limit=limit)


@dataclass(frozen=True, slots=True)
class Span:
    """``length`` bytes of a region from byte ``offset`` on; made by ``region[a:b]`` or `Region.view`."""

    region: Region
    offset: int
    length: int

    def descriptor(self, access: str = "rw", *, expires_in_s: float | None = None) -> RemoteDescriptor:
        """A grant of exactly this span, as `Region.descriptor` makes it.

        Raises: what `Region.descriptor` raises.
        """
        return self.region.descriptor(access, offset=self.offset, length=self.length, expires_in_s=expires_in_s)


class Region:
    """Memory known to this process's engine. Made by `Client.alloc` or `Client.register`; release it with `release`.

    ``region[a:b]`` (bytes, no step) is a `Span`. ``array`` (uint8, shape (length,)) is the memory itself, unless it is
    an accelerator's: `read` and `write` copy from and to memory of every kind.

    Raises: for a slice `UsageError` (a step, not a slice), `InvalidLength` (empty, negative, not integers) or
    `OutOfRange`.
    """

    def __init__(self, plane: DataPlane, info: RegionInfo, array: npt.NDArray[np.uint8] | None, owner: object) -> None:
        self._plane = plane
        self._info = info
        self._owner: object | None = owner
        self._grants: set[int] = set()
        self._on_released: dict[int, Callable[[], None]] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._quiet: asyncio.Future[Any] | None = None
        self._copies: set[asyncio.Task[None]] = set()
        self._guards: list[Callable[[], str]] = []
        self.evacuations: list[Callable[[], None]] = []
        self._array = array
        plane.memory.add_region(self)

    @property
    def id(self) -> int:
        """The engine's id of this region; never used again in this process."""
        return self._info.id

    @property
    def length(self) -> int:
        """How long the memory is, in bytes."""
        return self._info.length

    @property
    def generation(self) -> int:
        """Changes with each registration, so that old descriptors are recognised."""
        return self._info.generation

    @property
    def info(self) -> RegionInfo:
        """What the engine says about it: address, kind, device, NUMA node, hugepages, whether peers can map it."""
        return self._info

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The memory itself: uint8, shape (length,).

        Raises: `UsageError` when the CPU cannot touch it (use `read` and `write`), `UnknownRegion` when pinned host
        memory was released.
        """
        if self._array is None and self._info.on_device:
            raise not_addressable(self._info)
        if self._array is None:
            raise UnknownRegion(f"region {self.id} was released", region=self.id)
        return self._array

    @property
    def kind(self) -> MemoryKind:
        """Where the bytes are: ``MemoryKind.DRAM``, ``PINNED`` (host memory of an accelerator's driver) or ``HBM``."""
        return self._info.kind

    @property
    def place(self) -> BaseAddress:
        """Where its first byte is: the same for all regions of the same memory."""
        return (self._info.device if self._info.on_device else "host"), self._info.address

    @property
    def device(self) -> int | None:
        """The accelerator that the memory belongs to, or that reaches it (pinned host memory)."""
        return self._info.device

    async def write(self, offset: int, data: Any) -> None:
        """Copy ``data`` (anything with a contiguous buffer) to ``offset`` on; works for memory of every kind.

        Meanwhile the region cannot be released, and ``data`` must not change. Cancelled, the copy still ends by itself.

        Raises: `UsageError` (no buffer, or not contiguous), `InvalidLength`, `OutOfRange`, `UnknownRegion` (released),
        `ReadOnlyError`, `ClosedError`, and `TransportError` when the accelerator's driver fails.
        """
        try:
            view = memoryview(data)
        except TypeError as wrong:
            raise UsageError(f"cannot write a {type(data).__name__}", hint="pass bytes or a numpy array") from wrong
        if not view.contiguous:
            raise UsageError("cannot write memory that is not contiguous", hint="pass a copy of it")
        if view.nbytes:
            check_span(offset, view.nbytes, self.length, f"region {self.id}")
            await self._copy(lambda engine: engine.write(self.id, offset, view), view.nbytes)

    async def read(self, offset: int = 0, length: int | None = None) -> npt.NDArray[np.uint8]:
        """A copy of ``length`` bytes (None: all) from ``offset`` on: uint8, shape (length,); for memory of every kind.

        Meanwhile the region cannot be released.

        Raises: `InvalidLength`, `OutOfRange`, `UnknownRegion` (released), `ClosedError`, and `TransportError` when the
        accelerator's driver fails.
        """
        if length is None:
            check_span(offset, 1, self.length, f"region {self.id}")
            length = self.length - offset
        check_span(offset, length, self.length, f"region {self.id}")
        target = np.empty(length, dtype=np.uint8)
        await self._copy(lambda engine: engine.read_into(self.id, offset, target), length)
        return target

    async def _copy(self, work: Callable[[Engine], None], length: int) -> None:
        self.require()
        if self._array is not None and length <= COPY_INLINE_BYTES_MAX:
            work(self._plane.engine)
            return
        running = self._plane.off_loop(work, f"copy of region {self.id}")
        self._copies.add(running)
        running.add_done_callback(self._copies.discard)
        await shared(running)

    def __len__(self) -> int:
        return self._info.length

    def __getitem__(self, index: slice) -> Span:
        if not isinstance(index, slice) or index.step not in (None, 1):
            raise UsageError("a region is sliced in bytes without a step", value=repr(index)[:80])
        start = 0 if index.start is None else index.start
        stop = self.length if index.stop is None else index.stop
        for name, value in (("start", start), ("stop", stop)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise InvalidLength(f"slice {name} must be an integer", value=repr(value)[:80])
        check_span(start, stop - start, self.length, f"region {self.id}")
        return Span(self, start, stop - start)

    def view(self, source: Any) -> Span:
        """Where a view of this memory lies, from its first byte to its last: a tensor, a numpy array or a buffer that
        shares it. Nothing is registered again: the storage is registered once, and its views are spans of it.

        Raises: `OutOfRange` when it does not lie in this region, `InvalidLength` when it is empty, `UsageError` for
        what has no address.
        """
        place, length = base_address_of(source)
        offset = place[1] - self.place[1]
        if place[0] != self.place[0] or offset < 0:
            raise OutOfRange("this is not a view of the region", region=self.id, length=length)
        check_span(offset, length, self.length, f"region {self.id}")
        return Span(self, offset, length)

    def require(self, plane: DataPlane | None = None) -> None:
        """Check that the region is alive and belongs to ``plane`` (None: to any).

        Raises: `UnknownRegion` when it was released, or belongs to another client.
        """
        if self._quiet is not None:
            raise UnknownRegion(f"region {self.id} was released", region=self.id)
        if plane is not None and plane is not self._plane:
            raise UnknownRegion(f"region {self.id} belongs to another client", region=self.id)

    def descriptor(
        self, access: str = "rw", *, offset: int = 0, length: int | None = None, expires_in_s: float | None = None
    ) -> RemoteDescriptor:
        """Grant peers access to ``length`` bytes (None: all that follow) from byte ``offset`` on, and describe it.

        ``access`` is "r", "w" or "rw". Every call makes another grant with its own key; `revoke` ends a single one.
        With ``expires_in_s`` it is revoked by itself after that many seconds.

        Raises: `UsageError` (``access``, ``expires_in_s``), `InvalidLength`, `OutOfRange`, `UnknownRegion` (released),
        `ReadOnlyError` (a right to write memory that was registered read-only), `TooLarge` (as many grants as there may
        be), `ResourceExhausted`, `ClosedError`.
        """
        self.require()
        rights = _rights(access)
        if length is None:
            check_span(offset, 1, self.length, f"region {self.id}")
            length = self.length - offset
        check_span(offset, length, self.length, f"region {self.id}")
        if expires_in_s is not None:
            expires_in_s = seconds(expires_in_s, "expires_in_s", limit_s=SECONDS_MAX)
        made = self._export(offset, length, rights, expires_in_s)
        if expires_in_s is not None:
            loop = asyncio.get_running_loop()
            self._timers[made.grant] = loop.call_later(expires_in_s, self.start_revoke, made.grant)
        return made

    def _export(
        self, offset: int, length: int, rights: int, expires_in_s: float | None, blocks: BlockParts | None = None
    ) -> RemoteDescriptor:
        made = self._plane.memory.export(self._info, offset, length, rights, expires_in_s, blocks)
        self._grants.add(made.grant)
        return made

    def grant_access(
        self, access: str, on_released: Callable[[], None], blocks: BlockParts | None = None
    ) -> RemoteDescriptor:
        """A descriptor for a whole flow, of some blocks or of all; ``on_released`` is called at the region's release.

        Raises: what `descriptor` raises.
        """
        self.require()
        made = self._export(0, self.length, _rights(access), None, blocks)
        self._on_released[made.grant] = on_released
        return made

    def start_revoke(self, grant: int, *, listening: bool = False) -> asyncio.Future[Any]:
        """End a descriptor without waiting; the future resolves when no peer can move a byte through it. Never raises
        for a descriptor that has ended.

        ``listening``: the caller still hears what arrived before, until it tells the plane otherwise.
        """
        self._forget(grant)
        if not listening:
            self._plane.memory.discard_notifications(grant)
        if self._quiet is not None:
            return self._quiet  # the release took it back
        return self._plane.engine.revoke(grant)

    def _forget(self, grant: int) -> None:
        self._grants.discard(grant)
        self._on_released.pop(grant, None)
        timer = self._timers.pop(grant, None)
        if timer is not None:
            timer.cancel()

    async def revoke(self, descriptor: RemoteDescriptor, *, timeout: float | None = None) -> None:
        """End the grant of one descriptor; returns when no peer can move a byte through it any more.

        Raises: `UnknownRegion` when it is not (or no longer) one of this region's, `ClosedError`, and `TransferTimeout`
        after ``timeout`` seconds (None: `timeout_s`) when a peer has not let go yet: that peer gets no new access, and
        the memory is kept for as long as it takes.
        """
        if descriptor.grant not in self._grants:
            raise UnknownRegion("this descriptor is not (or no longer) one of this region", grant=descriptor.grant)
        deadline = self._deadline(timeout)
        await self._within(deadline, self.start_revoke(descriptor.grant))

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline.after(self._plane.timeout_s if timeout is None else timeout)

    async def _within(self, deadline: Deadline, quiet: asyncio.Future[Any]) -> None:
        async with deadline.bound(f"every peer had let go of region {self.id}", OTHER_SIDE):
            await asyncio.shield(quiet)

    async def release(self, *, drain: bool = False, timeout: float | None = None) -> None:
        """Deregister the memory: refuse new access at once, return when no peer can reach it.

        Offers, publications and shares of it end. With ``drain=True`` it waits for transfers of this process that use
        it. Cancelled, or timed out, the release goes on; calling it again waits for it. Memory that was registered
        twice stays registered for the other region, whose descriptors stay valid.

        Raises: `RegionBusy` while transfers or copies of this process use it, or something lies in it (see `guard`);
        `UnknownRegion` when it was released before; `TransferTimeout` after ``timeout`` seconds (None: `timeout_s`).
        """
        deadline = self._deadline(timeout)
        if self._quiet is None or self._quiet.done():
            self.require()
            async with deadline.bound(f"the transfers of region {self.id} had ended", TRANSFERRING):
                await self._before_release(drain)
            if self._quiet is None:
                self._begin_release()
        assert self._quiet is not None
        await self._within(deadline, self._quiet)

    def guard(self, in_use: Callable[[], str], evacuate: Callable[[], None] | None = None) -> None:
        """Let `release` ask whether something still lies in the memory: a text that is not empty refuses it.

        The close of the client asks nobody: ``evacuate`` is called before it, in a thread, while the memory is there.
        """
        self._guards.append(in_use)
        if evacuate is not None:
            self.evacuations.append(evacuate)

    async def _before_release(self, drain: bool) -> None:
        for why in filter(None, (ask() for ask in self._guards)):
            raise RegionBusy(f"region {self.id} is in use: {why}", region=self.id, hint="move them out of it first")
        if self._copies and not drain:
            raise RegionBusy(f"region {self.id} is read or written", region=self.id, hint="await it, or drain=True")
        if self._copies:
            await asyncio.wait(self._copies)
        if self._plane.memory.twins(self):
            return
        if drain:
            await self._plane.drain_region(self.id)
        elif self._plane.region_transfers(self.id):
            raise RegionBusy(
                f"region {self.id} has transfers in flight",
                region=self.id,
                transfers=" ".join(str(op) for op in self._plane.region_transfers(self.id)[:16]),
                hint="await or cancel them, or release(drain=True)",
            )

    def _begin_release(self) -> None:
        # Where the memory stays registered (for a twin, perhaps one that is just being made), the descriptors of this
        # region do not end by themselves.
        waiting: list[asyncio.Future[Any]] = [self._plane.memory.revoke(grant) for grant in self._grants]
        waiting.append(self._plane.memory.release(self))
        lent = tuple(self._on_released.values())
        self._quiet = asyncio.gather(*waiting)
        self._quiet.add_done_callback(self._released)
        for grant in tuple(self._grants):
            self._forget(grant)
        for tell in lent:
            tell()

    def _released(self, _: object) -> None:
        self._owner = None
        if self.kind is MemoryKind.PINNED:
            self._array = None  # as long as somebody looks at it, nobody else gets this memory

    def plane_closed(self) -> None:
        """The engine is gone, and with it whatever could reach the memory."""
        for grant in tuple(self._grants):
            self._forget(grant)

    def __repr__(self) -> str:
        return f"<Region {self.id} {self.length} bytes{'' if self._quiet is None else ' released'}>"


@dataclass(frozen=True, slots=True)
class KVCache:
    """A KV cache: its layout, and the regions that its layer placements index. ``footprint``: which memory it covers.

    ``regions`` is one region, or as many as the placements name, each at least `CacheLayout.region_bytes` long.

    Raises: `UsageError` (not a layout and regions), `GeometryMismatch` (a region is missing or too short), and
    `OverlapError` when two layers share bytes.
    """

    layout: CacheLayout
    regions: tuple[Region, ...]
    footprint: Footprint = field(init=False, repr=False, compare=False)
    _parts: tuple[Rows | None, ...] = field(init=False, repr=False, compare=False)

    def __init__(self, layout: CacheLayout, regions: Region | Sequence[Region]) -> None:
        found: tuple[Any, ...] = (regions,) if isinstance(regions, Region) else tuple(regions)
        if not isinstance(layout, CacheLayout) or not all(isinstance(region, Region) for region in found):
            raise UsageError("a KVCache is a CacheLayout and one or more Regions", field="regions")
        highest = max(layout.region_bytes())
        if highest >= len(found):
            raise GeometryMismatch(
                "the layout refers to a region that was not given",
                field="placements.region",
                value=highest,
                limit=len(found) - 1,
            )
        for index, needed in layout.region_bytes().items():
            if found[index].length < needed:
                raise GeometryMismatch(
                    "the layout does not fit into its region", field="region", value=found[index].length, needed=needed
                )
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "regions", found)
        object.__setattr__(self, "footprint", Footprint(layout, [region.place for region in found]))
        self.footprint.require_apart()
        object.__setattr__(self, "_parts", parts_of(layout, len(found)))

    def grant_access(
        self, access: str, table: BlockTable, on_released: Callable[[], None]
    ) -> Iterator[tuple[Region, RemoteDescriptor]]:
        """For each region a descriptor of the slots that hold the table's tokens, and of nothing else.

        Raises: what `Region.descriptor` raises.
        """
        for region, lent in zip(self.regions, granted(self.layout, table, self._parts), strict=True):
            yield region, region.grant_access(access, on_released, lent)

    def require(self, plane: DataPlane) -> None:
        """Check that every region is alive and belongs to this plane.

        Raises: `UnknownRegion`.
        """
        for region in self.regions:
            region.require(plane)

    def check_table(self, table: BlockTable, *, may_repeat: bool = False) -> None:
        """Check that the table names blocks that this cache has, and no more tokens than they hold.

        Raises: `UsageError` (not a table; a block twice, unless ``may_repeat``; no slot of the first token),
        `OutOfRange`.
        """
        if not isinstance(table, BlockTable):
            raise UsageError("table must be a BlockTable", field="table", got=type(table).__name__)
        table.used(self.layout.geometry.block_tokens, self.layout.blocks)
        if not may_repeat and len(table.distinct()) != len(table.blocks):
            raise UsageError("the table names a block twice", field="table.blocks")


def _rights(access: str) -> int:
    """The bits of a right. Raises `UsageError` for what is no name of one."""
    rights = ACCESS_BY_NAME.get(access)
    if rights is None:
        raise UsageError("access must be r, w or rw", field="access", value=repr(access)[:20])
    return rights

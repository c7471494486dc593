"""Registered memory as users hold it: `Region`, `Span` (a part of one) and `KVCache` (regions plus what the bytes
mean).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvxfer.descriptors import ACCESS_BY_NAME, U64_MAX, RemoteDescriptor
from kvxfer.errors import GeometryMismatch, InvalidLength, OutOfRange, RegionBusy, UnknownRegion, UsageError
from kvxfer.geometry import CacheLayout

if TYPE_CHECKING:
    from kvxfer.dataplane import DataPlane
    from kvxfer.native.engine import RegionInfo


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
    """``length`` bytes of a region from ``offset`` on."""

    region: Region
    offset: int
    length: int

    def descriptor(self, access: str = "rw", *, expires_in_s: float | None = None) -> RemoteDescriptor:
        """A capability for exactly this span."""
        return self.region.descriptor(access, offset=self.offset, length=self.length, expires_in_s=expires_in_s)


class Region:
    """Memory known to this process's engine. Made by `Client.alloc` or `Client.register`; release it with `release`.

    ``region[a:b]`` is a `Span`. ``array`` (uint8, shape (length,)) is the memory itself.
    """

    def __init__(self, plane: DataPlane, info: RegionInfo, array: npt.NDArray[np.uint8], owner: object) -> None:
        self._plane = plane
        self._info = info
        self._owner: object | None = owner
        self._grants: set[int] = set()
        self._released = False
        self.array = array

    @property
    def id(self) -> int:
        """The engine's id of this region; never used again in this process."""
        return self._info.id

    @property
    def length(self) -> int:
        """Bytes."""
        return self._info.length

    @property
    def generation(self) -> int:
        """Changes with each registration, so that old descriptors are recognised."""
        return self._info.generation

    @property
    def info(self) -> RegionInfo:
        """Everything the engine says about it."""
        return self._info

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

    def require(self) -> None:
        """Raise `UnknownRegion` when it was released."""
        if self._released:
            raise UnknownRegion(f"region {self.id} was released", region=self.id)

    def descriptor(
        self, access: str = "rw", *, offset: int = 0, length: int | None = None, expires_in_s: float | None = None
    ) -> RemoteDescriptor:
        """A new capability for ``length`` bytes from ``offset`` on; ``access`` is "r", "w" or "rw".

        Every call makes another one with its own key; `revoke` takes a single one back. With ``expires_in_s`` it is
        revoked by itself after that many seconds.
        """
        self.require()
        rights = ACCESS_BY_NAME.get(access)
        if rights is None:
            raise UsageError("access must be r, w or rw", field="access", value=repr(access)[:20])
        size = self.length - offset if length is None else length
        check_span(offset, size, self.length, f"region {self.id}")
        made = self._plane.export(self._info, offset, size, rights, expires_in_s)
        self._grants.add(made.grant)
        if expires_in_s is not None:
            asyncio.get_running_loop().call_later(expires_in_s, self._expire, made.grant)
        return made

    async def revoke(self, descriptor: RemoteDescriptor) -> None:
        """Take one descriptor back; returns when no peer can move a byte through it any more."""
        if descriptor.grant not in self._grants:
            raise UnknownRegion("this descriptor is not (or no longer) one of this region", grant=descriptor.grant)
        self._grants.discard(descriptor.grant)
        await self._plane.revoke(descriptor.grant)

    def _expire(self, grant: int) -> None:
        if grant in self._grants and not self._released:
            self._grants.discard(grant)
            self._plane.revoke_in_background(grant)

    async def release(self, *, drain: bool = False) -> None:
        """Forget the memory: refuse new access at once, return when no peer can reach it.

        Raises `RegionBusy` while transfers of this process use it, or with ``drain=True`` waits for them.
        """
        self.require()
        if drain:
            await self._plane.drain_region(self.id)
        elif self._plane.region_transfers(self.id):
            raise RegionBusy(
                f"region {self.id} has transfers in flight",
                region=self.id,
                transfers=" ".join(str(op) for op in self._plane.region_transfers(self.id)[:16]),
                hint="await or cancel them, or release(drain=True)",
            )
        await self._plane.release(self.id)
        self._released = True
        self._grants.clear()
        self._owner = None

    def __repr__(self) -> str:
        return f"<Region {self.id} {self.length} bytes{' released' if self._released else ''}>"


@dataclass(frozen=True, slots=True)
class KVCache:
    """A KV cache: its layout, and the regions that its layer placements index."""

    layout: CacheLayout
    regions: tuple[Region, ...]

    def __init__(self, layout: CacheLayout, regions: Region | Sequence[Region]) -> None:
        found: tuple[Any, ...] = (regions,) if isinstance(regions, Region) else tuple(regions)
        highest = max(placement.region for placement in layout.placements)
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

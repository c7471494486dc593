"""Memory of the native engine: allocating and registering it, looking at it, and granting it to peers.

`alloc`, `register` and the copies can take long, so other threads may call them. What a failure means is said in
`regions.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvxfer.block_parts import BlockParts
from kvxfer.errors import TooLarge
from kvxfer.native import regions
from kvxfer.native._shim import ffi, lib
from kvxfer.native.facts import DeviceInfo, Event, GrantInfo, MemoryKind, RegionInfo
from kvxfer.native.life import Life
from kvxfer.native.regions import check_length, not_addressable
from kvxfer.native.status import Status, error_for, limit_reached


class Memory(Life):
    """A part of `Engine`: regions and grants."""

    def alloc(
        self,
        length: int,
        numa_node: int | None = None,
        *,
        kind: MemoryKind = MemoryKind.DRAM,
        device: int | None = None,
        spill: bool = False,
    ) -> RegionInfo:
        """Allocate ``length`` bytes; without ``kind`` shareable memory of this host, on hugepages if there are free
        ones. Callable from any thread.

        Touches every page of host memory, so it takes about 0.3 s per GiB. Memory of a ``device`` keeps what was in it
        before; with ``spill`` a full device is replaced by pinned host memory. Raises `ShmTooSmall`, `InvalidLength`,
        `TooLarge`, `TooManyPending` (`regions_max`), `RegistrationError` and `TransportUnavailable`.
        """
        check_length(length)
        node, where = -1 if numa_node is None else numa_node, -1 if device is None else device
        with self._guest() as engine, self._regions_limit("alloc"):
            return regions.alloc(ffi, lib, engine, length, kind, where, node, spill)

    def register(
        self,
        address: int,
        length: int,
        *,
        read_only: bool = False,
        kind: MemoryKind = MemoryKind.DRAM,
        device: int | None = None,
    ) -> RegionInfo:
        """Register memory that the caller keeps alive until `release` resolved. Callable from any thread.

        The same address, length and mode again gives the same region with one more reference; other overlaps raise
        `OverlapError` with the id in ``fields["conflict"]``. Memory of a ``device`` must be a whole allocation, aligned
        to 2 MiB: else `AlignmentError`.
        """
        check_length(length)
        check_length(address)
        with self._guest() as engine, self._regions_limit("register"):
            return regions.register(
                ffi, lib, engine, address, length, kind, -1 if device is None else device, read_only
            )

    @contextmanager
    def _regions_limit(self, what: str) -> Iterator[None]:
        """Of the maxima that a call about memory may meet, the one that the configuration sets is named."""
        try:
            yield
        except TooLarge as error:
            if error.status != Status.LIMIT or error.message != error_for(Status.LIMIT, what=what).message:
                raise  # it is about this memory, or about an accelerator, and says so
            ends = "release regions that are no longer used"
            raise limit_reached(what, "regions_max", self.config.regions_max, ends) from None

    def write(self, region: int, offset: int, data: Any) -> None:
        """Copy a contiguous buffer into a region of any kind. Blocks; callable from any thread."""
        check_length(offset)
        with self._guest() as engine:
            regions.copy(ffi, lib, engine, region, offset, data, write=True)

    def read_into(self, region: int, offset: int, target: Any) -> None:
        """Fill a writable, contiguous buffer from a region of any kind. Blocks; callable from any thread."""
        check_length(offset)
        with self._guest() as engine:
            regions.copy(ffi, lib, engine, region, offset, target, write=False)

    def read(self, region: int, offset: int, length: int) -> bytes:
        """Bytes of a region of any kind. Blocks; callable from any thread."""
        check_length(length)
        target = bytearray(length)
        self.read_into(region, offset, target)
        return bytes(target)

    def device_count(self) -> int:
        """How many accelerators this process sees. The first call loads their library; `TransportUnavailable` says
        why there is none. Callable from any thread.
        """
        return regions.device_count(ffi, lib)

    def device(self, device: int) -> DeviceInfo:
        """An accelerator as this engine sees it. Asks its driver; callable from any thread."""
        with self._guest() as engine:
            return regions.device_info(ffi, lib, engine, device)

    def buffer(self, region: RegionInfo) -> memoryview:
        """The memory of an allocated region, writable. After `release` the view reads zeros, or what was there."""
        if region.on_device:
            raise not_addressable(region)
        views = self._views if region.shared else self._pinned_views
        exporter = views.find(region.id)
        if exporter is None:
            length_p = ffi.new("uint64_t *")
            status = lib.kvx_mem_viewed(self._mine(), region.id, 1, length_p)
            if status != 0:
                raise error_for(status, what="buffer", region=region.id)
            exporter = ffi.buffer(ffi.cast("char *", region.address), region.length)
            views.add(region.id, exporter, region.address, length_p[0])
        return memoryview(exporter)

    def release(self, region: int) -> asyncio.Future[Event]:
        """Give a region (or one reference of it) back; resolves when no peer can reach it and it is unmapped.

        Raises `RegionBusy` while transfers of this engine use it.
        """
        engine = self._require_loop()
        status = lib.kvx_mem_release(engine, region, self._token_p)
        if status != 0:
            raise error_for(status, what="release", region=region)
        return self._future(self._token_p[0])

    def grant(self, region: int, offset: int, length: int, access: int, blocks: BlockParts | None = None) -> GrantInfo:
        """Let peers reach a part of a region; ``access`` is 1 read, 2 write, 3 both. The key is new and random.

        With ``blocks`` (relative to ``offset``) only these pieces of it, as far as the transport of the peer lets us
        see each access (tcp, loop): who maps memory, or has its card write, is given the whole range. Raises
        `TooManyPending` (`grants_max`).
        """
        check_length(length)
        check_length(offset)
        info = ffi.new("kvx_grant_info *")
        where = (self._mine(), region, offset, length, access)
        if blocks is None:
            status = lib.kvx_grant_create(*where, info)
        else:
            parts = ffi.from_buffer("kvx_part[]", np.ascontiguousarray(blocks.parts))
            ids = ffi.from_buffer("uint64_t[]", np.ascontiguousarray(blocks.blocks))
            status = lib.kvx_grant_create_blocks(*where, parts, len(parts), ids, len(ids), info)
        if status == Status.LIMIT:
            ends = "try again when offers, tickets or shares of this process have ended"
            raise limit_reached("grant", "grants_max", self.config.grants_max, ends)
        if status != 0:
            raise error_for(status, what="grant", region=region, offset=offset, length=length)
        return GrantInfo(
            id=info.id, generation=info.generation, length=info.length, access=info.access, key=bytes(info.key)
        )

    def revoke(self, grant: int) -> asyncio.Future[Event]:
        """Refuse a grant from now on; resolves when no peer moves a byte through it any more."""
        engine = self._require_loop()
        status = lib.kvx_grant_revoke(engine, grant, self._token_p)
        if status != 0:
            raise error_for(status, what="revoke", grant=grant)
        return self._future(self._token_p[0])

    def attached(self, grant: int) -> int:
        """How many connections use a grant now; -1 when there is no such grant."""
        return int(lib.kvx_grant_attached(self._mine(), grant))

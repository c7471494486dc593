"""What the landing pool is made of: parts of fixed capacity, one in host memory or one on each of some cards.

The idea: a part hands out pieces, which are regions of the daemon's engine. A piece that comes back is zeroed and kept
for the next landing; what is kept goes when another size needs the room. Which part takes a landing is a decision over
numbers: the least loaded one that has room, where landings that are being written, wait or are adopted all count, and
so do those whose memory is not quiet yet.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvxfer.config import Config
from kvxfer.errors import BusyError, ConfigError, KvxferError, TransportUnavailable
from kvxfer.memory.placement import Held, least_held
from kvxfer.native.engine import Engine, RegionInfo
from kvxfer.native.facts import MemoryKind
from kvxfer.tasks import in_thread

PAGE_BYTES, LARGE_BYTES = 4 << 10, 2 << 20  # sizes are rounded up, so that memory can be used again
PREWARM_BYTES = 64 << 20  # prewarmed memory comes in pieces of this size
PIECES_MAX = 1024  # each of host memory is a descriptor of this process, of which links need some as well
WASTE_FACTOR = 4  # a kept piece may be this much larger than what it is used for
ZEROS = bytes(4 << 20)  # a card's memory is cleared from here


@dataclass(slots=True, eq=False)
class Pieces:
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


def parts_of(engine: Engine, config: Config) -> tuple[Pieces, ...]:
    """The parts that the configuration asks for. Raises `ConfigError` when this node cannot have them."""
    if config.landing_memory == "hbm":
        pieces = partial(Pieces, engine, config.landing_bytes_max, PIECES_MAX)
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
    return (Pieces(engine, config.landing_bytes_max, max(1, min(PIECES_MAX, descriptors // 4))),)


def least_loaded_part(parts: Sequence[Pieces], size: int) -> Pieces:
    """Where a landing of this size goes. Raises `BusyError` when no part has room."""
    held = [Held(part=number, bytes=part.used_bytes, fits=part.fits(size)) for number, part in enumerate(parts)]
    number = least_held(held)
    if number is None:
        raise full(parts, size)
    return parts[number]


def full(parts: Sequence[Pieces], size: int, waiting: int = 0) -> BusyError:
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

"""Making regions: what a wish of the application means, where it is allocated, and what is said when that differs.

The idea: everything that blocks (drivers, page faults) runs in a thread that nobody can interrupt, so whoever waits may
be cancelled, and what comes too late is given back. A region that is not what was asked for (host memory instead of a
full device's, no NUMA binding) says so itself, in the log and in the counters.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kvxfer.errors import KvxferError, RegistrationError, TransferTimeout, TransportError, UsageError
from kvxfer.logs import logger
from kvxfer.memory import numa
from kvxfer.memory.region import Region
from kvxfer.memory.sources import BorrowedMemory
from kvxfer.native.engine import Engine, MemoryKind, RegionInfo
from kvxfer.native.status import StatusCode
from kvxfer.tasks import MEMORY, Deadline, TaskOwner, in_thread, shared

# -- which accelerator gets the next region, and how full one should be: decisions over numbers, nothing else ----------
# Least loaded means most memory left: what the device has free, and what this engine holds of it unused. Only between
# equals do live transfers decide, because they end soon and memory stays. Allocations under way count as done, so
# that a burst of them does not all choose one card.


HEADROOM = 0.30  # of a device's memory that should stay free: fragments, workspaces of kernels, the framework's peaks
GROUP_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One candidate: bytes that a region could get, operations on its regions now."""

    device: int
    available_bytes: int
    live_tokens: int


def least_loaded(loads: Sequence[Load], pending_bytes: Mapping[int, int]) -> int:
    """The device for the next region; ``pending_bytes`` are being allocated on each device right now."""
    if not loads:
        raise UsageError("there is no device to choose from", field="group")

    def rank(load: Load) -> tuple[int, int, int]:
        return pending_bytes.get(load.device, 0) - load.available_bytes, load.live_tokens, load.device

    return min(loads, key=rank).device


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One part of a pool: bytes that are in use there, in flight ones included, and whether one more fits."""

    part: int
    bytes: int
    fits: bool


def least_held(parts: Sequence[Held]) -> int | None:
    """The part for what comes next; None when none has room."""
    fitting = [part for part in parts if part.fits]
    return min(fitting, key=lambda part: (part.bytes, part.part)).part if fitting else None


def check_group(group: object) -> tuple[int, ...]:
    """The devices among which one is chosen: distinct numbers, at least one."""
    found = tuple(group) if isinstance(group, list | tuple | range) else ()
    whole = all(isinstance(device, int) and not isinstance(device, bool) and device >= 0 for device in found)
    if not 0 < len(found) <= GROUP_MAX or not whole or len(set(found)) != len(found):
        raise UsageError(
            f"group must be a list of 1 to {GROUP_MAX} distinct device numbers", field="group", value=repr(group)[:80]
        )
    return found


log = logger("kvxfer.memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A checked request. ``device`` None with a ``group``: the least loaded of it (empty: of all)."""

    length: int
    kind: MemoryKind
    device: int | None = None
    group: tuple[int, ...] | None = None
    numa_node: object = None
    spill: bool = False


def kind_of(memory: object, device: object) -> MemoryKind:
    """``memory`` is "dram" or "hbm"; "dram" of a device is host memory that its driver pinned."""
    if memory not in ("dram", "hbm"):
        raise UsageError('memory must be "dram" or "hbm"', field="memory", value=repr(memory)[:40])
    if memory == "hbm" and device is None:
        raise UsageError(
            'memory="hbm" needs a device', field="device", hint='device=N, or device="auto" for the least loaded one'
        )
    if memory == "hbm":
        return MemoryKind.HBM
    return MemoryKind.DRAM if device is None else MemoryKind.PINNED


def check_device(device: object) -> int:
    """The number of a device, from 0 on. Raises: `UsageError`."""
    if not isinstance(device, int) or isinstance(device, bool) or not 0 <= device < 1 << 31:
        raise UsageError("device must be the number of a device", field="device", value=repr(device)[:40])
    return device


def wish(
    length: int, memory: str, device: int | str | None, group: Sequence[int] | None, numa_node: object, spill: object
) -> Wish:
    """The request behind the arguments of `Client.alloc`. Raises `UsageError`."""
    kind = kind_of(memory, device)
    if spill not in (None, "dram"):
        raise UsageError('spill must be None or "dram"', field="spill", value=repr(spill)[:40])
    if spill is not None and kind is not MemoryKind.HBM:
        raise UsageError('only memory="hbm" can spill', field="spill")
    if group is not None and device != "auto":
        raise UsageError('a group is chosen from with device="auto"', field="group")
    if device == "auto":
        members = () if group is None else check_group(group)
        return Wish(length=length, kind=kind, group=members, numa_node=numa_node, spill=spill is not None)
    number = None if device is None else check_device(device)
    return Wish(length=length, kind=kind, device=number, numa_node=numa_node, spill=spill is not None)


class Allocator:
    """Allocates and registers for one client."""

    def __init__(self, engine: Engine, tasks: TaskOwner) -> None:
        self._engine = engine
        self._tasks = tasks
        self._working: set[asyncio.Task[RegionInfo]] = set()
        self._pending_bytes: dict[int, int] = {}
        self._choosing, self._counting = threading.Lock(), threading.Lock()
        self._told_numa = False

    async def alloc(self, wanted: Wish, deadline: Deadline) -> RegionInfo:
        """Memory as wished. Errors: see `Client.alloc`."""
        info = await self._off_loop(lambda: self._alloc(wanted), "alloc", deadline)
        if info.spilled:
            log.warning(
                "device %s has no room for %d bytes: pinned host memory took them (region %d)",
                *(info.device, info.length, info.id),
            )
        if info.numa == "not applied" and not self._told_numa:
            self._told_numa = True
            log.warning("this process may not choose the NUMA node of memory: %s was not applied", wanted.numa_node)
        return info

    async def register(self, found: BorrowedMemory, deadline: Deadline) -> RegionInfo:
        """Memory of the caller. Page tables are walked and drivers asked, for seconds perhaps: not on the loop."""
        engine = self._engine

        def work() -> RegionInfo:
            return engine.register(
                found.address, found.length, read_only=found.read_only, kind=found.kind, device=found.device
            )

        return await self._off_loop(work, "register", deadline)

    async def settle(self) -> None:
        """Wait for the threads that are inside: they cannot be stopped, and the engine would wait for them."""
        if self._working:
            await asyncio.wait(self._working)

    async def _off_loop(self, work: Callable[[], RegionInfo], what: str, deadline: Deadline) -> RegionInfo:
        working = self._tasks.run(in_thread(work), what)
        self._working.add(working)
        working.add_done_callback(self._working.discard)
        try:
            async with deadline.bound(f"the {what} had ended", MEMORY):
                return await shared(working)
        except (asyncio.CancelledError, TransferTimeout):
            working.add_done_callback(self._drop_late)
            raise

    def _drop_late(self, done: asyncio.Future[RegionInfo]) -> None:
        if not done.cancelled() and done.exception() is None and not self._engine.closed:
            self._engine.release(done.result().id)

    # In a thread from here on.

    def _alloc(self, wanted: Wish) -> RegionInfo:
        if wanted.group is None and wanted.device is None:
            return self._engine.alloc(wanted.length, self._node(wanted, None))
        if wanted.group is None:
            return self._alloc_on(wanted, cast(int, wanted.device))
        with self._choosing:  # one at a time: a region that is half made would count twice, or not at all
            return self._alloc_on(wanted, self._least_loaded(wanted.group))

    def _alloc_on(self, wanted: Wish, device: int) -> RegionInfo:
        with self._counting:
            self._pending_bytes[device] = self._pending_bytes.get(device, 0) + wanted.length
        try:
            node = self._node(wanted, device)
            return self._engine.alloc(wanted.length, node, kind=wanted.kind, device=device, spill=wanted.spill)
        finally:
            with self._counting:
                self._pending_bytes[device] -= wanted.length

    def _least_loaded(self, group: tuple[int, ...]) -> int:
        candidates = group or tuple(range(self._engine.device_count()))
        loads = []
        for device in candidates:
            seen = self._engine.device(device)
            loads.append(Load(device=device, available_bytes=seen.available_bytes, live_tokens=seen.live_tokens))
        return least_loaded(loads, self._pending_bytes)

    def _node(self, wanted: Wish, device: int | None) -> int | None:
        if wanted.numa_node is None:
            return None
        physical = self._engine.device(device).physical if device is not None and wanted.numa_node == "auto" else None
        return numa.choose(wanted.numa_node, physical, on_device=device is not None)


# -- registering several pieces of memory as one step: all of them or none ---------------------------------------------


SOURCES_MAX = 65536
# What the kernel would have said, where the engine knew it by a code of its own.
_ERRNO = {
    StatusCode.NOMEM: "ENOMEM",
    StatusCode.FDS: "EMFILE",
    StatusCode.MEMLOCK: "ENOMEM",
    StatusCode.SHM_SPACE: "ENOSPC",
}


async def register_all(
    register: Callable[[Any], Awaitable[Region]], sources: object, on_failure: Callable[[KvxferError], None]
) -> tuple[Region, ...]:
    """See `Client.register_many`. Cancelled, it gives back what it has as well."""
    if not isinstance(sources, Sequence) or isinstance(sources, str | bytes) or not 0 < len(sources) <= SOURCES_MAX:
        raise UsageError("register_many takes a sequence of sources", field="sources", limit=SOURCES_MAX)
    made: list[Region] = []
    try:
        for source in sources:
            made.append(await register(source))  # noqa: PERF401 -- what was made before a failure has to be known
    except BaseException as error:
        await _give_back(made)
        if not isinstance(error, KvxferError):
            raise
        why = _named(error, sources, len(made))
        on_failure(why)
        raise why from error
    return tuple(made)


async def _give_back(made: Sequence[Region]) -> None:
    """Nobody else has seen these regions, so nothing can hold them; goes on when its caller is cancelled again."""
    quiet = asyncio.gather(*(region.release(drain=True) for region in made), return_exceptions=True)
    await asyncio.shield(quiet)


def _named(error: KvxferError, sources: Sequence[Any], index: int) -> KvxferError:
    """The error with what is known about the place: of this node as a `RegistrationError`, of the call as it is."""
    size = getattr(sources[index], "nbytes", None)
    found = error
    if isinstance(error, TransportError) and not isinstance(error, RegistrationError):
        found = RegistrationError(error.message, status=error.status, transport=error.transport, hint=error.hint)
        found.fields |= error.fields
    found.fields |= {
        "index": index,
        "registered": index,
        "of": len(sources),
        "bytes": error.fields.get("length", size if isinstance(size, int) else None),
    }
    found.fields.setdefault("errno", _ERRNO.get(StatusCode(error.status)) if error.status in _ERRNO else None)
    found.hint = found.hint or "what was registered before it was given back; `kvxfer doctor` shows this node's limits"
    return found

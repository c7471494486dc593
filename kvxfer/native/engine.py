"""The native engine in Python's clothes: one call into C per method; each token resolves exactly once.

`Engine` is put together from its parts: `Life` (opening to closing, events), `Memory` (regions and grants),
`Connections` (peers and imports) and `Notes`; the transfers themselves are here.
"""

from __future__ import annotations

import asyncio
import os
import struct
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from kvxfer.block_parts import BlockParts
from kvxfer.errors import (
    ClosedError,
    ConfigError,
    ForkedClientError,
    TooLarge,
    TransportUnavailable,
    UsageError,
    WrongThread,
)
from kvxfer.logs import logger
from kvxfer.memory import numa
from kvxfer.native import status
from kvxfer.native._shim import ffi, lib
from kvxfer.native.status import StatusCode, check_length, error_for, limit_reached, not_addressable
from kvxfer.native.types import (
    Caps,
    ChoiceKind,
    Counters,
    DeviceInfo,
    EngineConfig,
    Event,
    EventKind,
    GrantInfo,
    MemoryKind,
    OpKind,
    Priority,
    RegionInfo,
    TransportInfo,
    parse_counters,
)
from kvxfer.native.views import Views
from kvxfer.tasks import to_the_end

if TYPE_CHECKING:
    import numpy.typing as npt


# -- the life of a native engine: opening and closing it, whose thread may call, and events up through one descriptor
# Each token becomes a future that resolves with its `Event`, whatever the status, exactly once. The engine belongs to
# the thread of its loop: the generated wrappers drop the GIL, so a second thread could run in the middle of a call.
# Where a method says so, other threads may call too; closing waits for these guests.


DRAIN_MAX = 256
log = logger("kvxfer.engine")
forks_seen = 0  # read by `forks` and, on the way of every transfer, directly


def _count_fork() -> None:
    global forks_seen
    forks_seen += 1


os.register_at_fork(after_in_child=_count_fork)


def forks() -> int:
    """How many forks lie between this process and the first that loaded the engine; asking for the pid costs a
    system call.
    """
    return forks_seen


# A kvx_event in the order of `Event`: reading them by name costs three times as much, and there is one per transfer.
EVENT = struct.Struct("=IiQQQQQii")
assert EVENT.size == ffi.sizeof("kvx_event")


def _has_thread(executor: ThreadPoolExecutor) -> bool:
    """Whether its thread could be started; once it is, it stays."""
    try:
        executor.submit(int)
    except RuntimeError:
        return False
    return True


class Life:
    """A part of `Engine`: opened by the constructor, ended by `close`."""

    def __init__(self, config: EngineConfig) -> None:
        self._engine: Any = None
        self.config = config
        self.engine_id = config.engine_id
        self._thread = threading.get_ident()
        self._fork = forks_seen
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_event: Callable[[Event], None] | None = None
        self._pending: dict[int, asyncio.Future[Event] | Callable[[Event], None]] = {}
        self.stray_events = 0  # completions of tokens that nobody waits for: a bug if it is ever not 0
        self._guests = 0  # calls from other threads that are inside C
        self._guests_left = threading.Condition()
        fork = forks_seen

        def same_process() -> bool:
            return fork == forks_seen

        self._views = Views(weakref.WeakMethod(self._forget_view), lib.kvx_mem_unmap, same_process)
        # Pinned memory is a part of an arena: nobody else gets it while it is looked at.
        self._pinned_views = Views(
            weakref.WeakMethod(self._forget_view), lambda address, length: lib.kvx_mem_unview(address), same_process
        )
        # A transport may share one mapping among imports, so what it blanked stays: addresses only, no memory.
        self._import_views = Views(
            weakref.WeakMethod(self._forget_import_view), lambda address, length: None, same_process
        )
        self._events = ffi.new("kvx_event[]", DRAIN_MAX)
        self._args = ffi.new("kvx_submit_args *")
        self._segment = ffi.new("kvx_segment *")
        self._id_p = ffi.new("uint64_t *")
        self._token_p = ffi.new("uint64_t *")
        self._inline_p = ffi.new("int *")
        self._inline_event = ffi.new("kvx_event *")
        self._events_view = memoryview(ffi.buffer(self._events))
        self._inline_view = memoryview(ffi.buffer(self._inline_event))
        native = ffi.new("kvx_engine_config *")
        keep = config.fill(ffi, native)
        native.abi_version = lib.KVX_ABI_VERSION
        engine_p = ffi.new("kvx_engine **")
        why = ffi.new("char[512]")
        # Threads run where the one that makes them does.
        with numa.threads_at(config.engine_cpus), numa.threads_on(config.numa_node) as self.numa:
            status = lib.kvx_engine_open(native, engine_p, why, 512)
        del keep  # the engine has its own copies
        if status != 0:
            text = ffi.string(why).decode("utf-8", "replace") or "cannot open the engine"
            if status == StatusCode.INVALID:
                raise ConfigError(text, status=status)
            raise TransportUnavailable(text, status=status, transport=",".join(config.transports))
        self._engine = engine_p[0]
        self.transports = tuple(self._transports())
        self.unavailable = dict(self._unavailable())  # of those asked for with "?": name -> why

    @property
    def closed(self) -> bool:
        return self._engine is None

    def attach(self, loop: asyncio.AbstractEventLoop, on_event: Callable[[Event], None]) -> None:
        """Deliver completions on ``loop``; ``on_event`` gets what has no token (NOTIFY, PEER_DOWN, GRANT_LOST).

        The engine belongs to the calling thread, which must be the loop's.
        """
        if self._loop is not None:
            raise UsageError("this engine is attached to a loop already")
        self._thread = threading.get_ident()
        engine = self._mine()
        self._loop, self._on_event = loop, on_event
        loop.add_reader(lib.kvx_engine_fd(engine), self._readable)

    def close(self) -> None:
        """Complete every token (CLOSED unless it was done), join every thread, unmap every allocation. Idempotent."""
        if self._engine is not None:
            engine = self._begin_close()
            self._stop(engine)
            self._deliver_last(engine)
            self._end_close(engine)

    async def aclose(self) -> None:
        """`close` that holds no loop: threads that copy, and gigabytes that are given back, take their time.

        Other calls get a `ClosedError` from its beginning. Cancelled, it still comes to its end.
        """
        if self._engine is not None:
            engine = self._begin_close()
            with ThreadPoolExecutor(1, "kvxfer-close") as own:  # the loop's own threads may all be taken
                if not _has_thread(own):
                    self._close_here(engine)
                    return
                try:
                    await to_the_end(own, self._stop, engine)
                finally:  # a cancellation is raised when all of it is done
                    self._deliver_last(engine)
                    await to_the_end(own, self._end_close, engine)

    def _close_here(self, engine: Any) -> None:
        """Where no thread can be started: the loop stands still meanwhile, and nothing remains."""
        log.warning("no thread can be started: the loop waits for the close of the engine")
        try:
            self._stop(engine)
        finally:
            self._deliver_last(engine)
            self._end_close(engine)

    def _begin_close(self) -> Any:
        engine = self._mine()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(lib.kvx_engine_fd(engine))
        with self._guests_left:
            self._engine = None
        for views in (self._views, self._pinned_views, self._import_views):
            views.begin_close()
        return engine

    def _stop(self, engine: Any) -> None:
        """Not before the last guest has left: it may be inside a transport, which is closed here."""
        with self._guests_left:
            while self._guests:
                self._guests_left.wait()
        lib.kvx_engine_stop(engine)

    def _deliver_last(self, engine: Any) -> None:
        while self._drain_once(engine, closing=True) == DRAIN_MAX:
            pass

    def _end_close(self, engine: Any) -> None:
        lib.kvx_engine_close(engine)
        for views in (self._views, self._pinned_views, self._import_views):
            views.end_close()

    def __del__(self) -> None:
        if getattr(self, "_engine", None) is not None and self._fork == forks_seen:
            engine, self._engine = self._engine, None
            for views in (self._views, self._pinned_views, self._import_views):
                views.begin_close()
            self._end_close(engine)
            warnings.warn("an Engine was not closed", ResourceWarning, source=self, stacklevel=1)

    def _mine(self) -> Any:
        if self._engine is None:
            raise ClosedError("the engine is closed")
        if self._fork != forks_seen:
            raise ForkedClientError("this engine belongs to the parent process", hint="open one after the fork")
        if threading.get_ident() != self._thread:
            raise WrongThread("this engine belongs to another thread", hint="call it on its event loop's thread")
        return self._engine

    def _transports(self) -> list[TransportInfo]:
        found: list[TransportInfo] = []
        info = ffi.new("kvx_transport_info *")
        while lib.kvx_transport_query(self._engine, len(found), info) == 0:
            found.append(
                TransportInfo(
                    index=len(found),
                    name=ffi.string(info.name).decode(),
                    endpoint=ffi.string(info.endpoint).decode(),
                    caps=info.caps,
                    rank=info.rank,
                    alignment=info.alignment,
                    region_bytes_max=info.region_bytes_max,
                    copies_per_byte=info.copies_x100 / 100,
                    memory=info.memory,
                    local_memory=info.local_memory,
                    secret=bytes(info.secret) if info.caps & Caps.ENCRYPTED else None,
                )
            )
        return found

    def _unavailable(self) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        name, why = ffi.new("char[32]"), ffi.new("char[512]")
        while lib.kvx_transport_unavailable(self._engine, len(found), name, why) == 0:
            found.append((ffi.string(name).decode(), ffi.string(why).decode("utf-8", "replace")))
        return found

    # -- events -------------------------------------------------------------------------------------------

    def drain(self) -> int:
        """Deliver what has completed by now, at most 256 events; returns how many. The loop does it by itself."""
        return self._drain_once(self._mine())

    def step(self, transport: int, steps_max: int = 1) -> int:
        """With ``manual=True``: let a transport do at most so many steps; returns how many it did."""
        return int(lib.kvx_engine_step(self._mine(), transport, steps_max))

    def _readable(self) -> None:
        if self._engine is None:
            return
        if self._drain_once(self._engine) == DRAIN_MAX and self._loop is not None:
            self._loop.call_soon(self._readable)  # others get their turn first

    def _drain_once(self, engine: Any, closing: bool = False) -> int:
        events = self._events
        count: int = lib.kvx_engine_drain(engine, events, DRAIN_MAX)
        for event in list(map(Event._make, EVENT.iter_unpack(self._events_view[: count * EVENT.size]))):
            if event.token:
                waiting = self._pending.pop(event.token, None)
                if waiting is None:
                    self.stray_events += 1
                elif not isinstance(waiting, asyncio.Future):
                    self._tell(waiting, event, later=closing)
                elif not waiting.done():
                    waiting.set_result(event)
            elif self._on_event is not None and not closing:
                self._tell(self._on_event, event)
        return count

    def _tell(self, listener: Callable[[Event], None], event: Event, *, later: bool = False) -> None:
        assert self._loop is not None
        if later:
            if not self._loop.is_closed():
                self._loop.call_soon(listener, event)
            return
        try:
            listener(event)
        except Exception as error:  # one bad listener must not take the other events with it
            context = {"message": "the listener of engine events failed", "exception": error}
            self._loop.call_exception_handler(context)

    def _future(self, token: int) -> asyncio.Future[Event]:
        if self._loop is None:
            raise UsageError("attach the engine to a loop first")
        future = self._loop.create_future()
        self._pending[token] = future
        return future

    def _require_loop(self) -> Any:
        engine = self._mine()
        if self._loop is None:
            raise UsageError("attach the engine to a loop first")
        return engine

    # -- other threads --------------------------------------------------------------------------------------

    def _enter(self) -> Any:
        with self._guests_left:
            if self._engine is None:
                raise ClosedError("the engine is closed")
            if self._fork != forks_seen:
                raise ForkedClientError("this engine belongs to the parent process", hint="open one after the fork")
            self._guests += 1
            return self._engine

    def _leave(self) -> None:
        with self._guests_left:
            self._guests -= 1
            self._guests_left.notify_all()

    @contextmanager
    def _guest(self) -> Iterator[Any]:
        engine = self._enter()
        try:
            yield engine
        finally:
            self._leave()

    # -- views that go -----------------------------------------------------------------------------------------

    def _forget_view(self, region: int) -> bool:
        engine = self._engine
        return engine is not None and lib.kvx_mem_viewed(engine, region, 0, ffi.new("uint64_t *")) == 0

    def _forget_import_view(self, import_: int) -> bool:
        engine = self._engine
        return engine is not None and lib.kvx_import_viewed(engine, import_, 0) == 0


# -- what the engine is told only to be counted, and what it tells of an operation before its end ----------------------


class Notes(Life):
    """A part of `Engine`."""

    def count_choice(self, index: int, choice: ChoiceKind) -> None:
        """A transport was chosen for a grant, or passed over and why: for the counters."""
        lib.kvx_choice_count(self._mine(), index, choice)

    def note_stalled(self, count: int) -> None:
        """How many transfers and landings are stalled now: for the counters."""
        lib.kvx_note(self._mine(), lib.KVX_NOTE_STALLED, count)

    def note_late(self, count: int = 1) -> None:
        """So many more operations were done after their deadline: for the counters."""
        lib.kvx_note(self._mine(), lib.KVX_NOTE_LATE, count)

    def progress(self, token: int) -> int:
        """Bytes that a live operation has moved, as far as its transport knows; 0 when there is none."""
        return int(lib.kvx_progress(self._mine(), token))


# -- memory of the native engine: allocating and registering it, looking at it, and granting it to peers ---------------
# `alloc`, `register` and the copies can take long, so other threads may call them. What a failure means is said in
# `status.py`.


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
            return status.alloc(ffi, lib, engine, length, kind, where, node, spill)

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
            return status.register(ffi, lib, engine, address, length, kind, -1 if device is None else device, read_only)

    @contextmanager
    def _regions_limit(self, what: str) -> Iterator[None]:
        """Of the maxima that a call about memory may meet, the one that the configuration sets is named."""
        try:
            yield
        except TooLarge as error:
            if error.status != StatusCode.LIMIT or error.message != error_for(StatusCode.LIMIT, what=what).message:
                raise  # it is about this memory, or about an accelerator, and says so
            ends = "release regions that are no longer used"
            raise limit_reached(what, "regions_max", self.config.regions_max, ends) from None

    def write(self, region: int, offset: int, data: Any) -> None:
        """Copy a contiguous buffer into a region of any kind. Blocks; callable from any thread."""
        check_length(offset)
        with self._guest() as engine:
            status.copy(ffi, lib, engine, region, offset, data, write=True)

    def read_into(self, region: int, offset: int, target: Any) -> None:
        """Fill a writable, contiguous buffer from a region of any kind. Blocks; callable from any thread."""
        check_length(offset)
        with self._guest() as engine:
            status.copy(ffi, lib, engine, region, offset, target, write=False)

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
        return status.device_count(ffi, lib)

    def device(self, device: int) -> DeviceInfo:
        """An accelerator as this engine sees it. Asks its driver; callable from any thread."""
        with self._guest() as engine:
            return status.device_info(ffi, lib, engine, device)

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
        if status == StatusCode.LIMIT:
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


# -- peers of the native engine: connections to other engines, and the grants of theirs that are imported through them


class Connections(Life):
    """A part of `Engine`: peers and imports."""

    def connect(self, transport: int, endpoint: str, secret: bytes | None = None) -> tuple[int, asyncio.Future[Event]]:
        """Start to connect; a peer handle and the future of its outcome. A failed one needs no `close_peer`.

        ``secret``: what goes with the endpoint of an engine that encrypts, see `TransportInfo.secret`.
        """
        engine = self._require_loop()
        told = ffi.NULL if secret is None else ffi.new("uint8_t[32]", secret)
        status = lib.kvx_peer_connect(engine, transport, endpoint.encode(), told, self._id_p, self._token_p)
        if status == StatusCode.LIMIT:
            raise limit_reached("connect", "peers_max", self.config.peers_max, "try again when some are closed")
        if status != 0:
            raise error_for(status, what="connect", endpoint=endpoint)
        return self._id_p[0], self._future(self._token_p[0])

    def close_peer(self, peer: int) -> asyncio.Future[Event]:
        """End a connection: its transfers complete, its imports go. One that is gone already resolves at once."""
        engine = self._require_loop()
        status = lib.kvx_peer_close(engine, peer, self._token_p)
        if status == StatusCode.NO_PEER:
            assert self._loop is not None
            gone = self._loop.create_future()
            gone.set_result(Event(EventKind.PEER_CLOSED, 0, 0, peer, 0, 0, 0, 0, -1))
            return gone
        if status != 0:
            raise error_for(status, what="close_peer")
        return self._future(self._token_p[0])

    def import_(
        self, peer: int, *, grant: int, generation: int, length: int, access: int, key: bytes, mapped: bool = False
    ) -> tuple[int, asyncio.Future[Event]]:
        """Start to make a remote grant usable; an import handle and the future of its outcome. ``mapped``: a device's
        memory for `device_mapping`, or it fails.
        """
        engine = self._require_loop()
        remote = ffi.new("kvx_remote *", {"grant": grant, "generation": generation, "length": length, "access": access})
        remote.key, remote.flags = key, int(mapped)
        status = lib.kvx_mem_import(engine, peer, remote, self._id_p, self._token_p)
        if status != 0:
            raise error_for(status, what="import", grant=grant)
        return self._id_p[0], self._future(self._token_p[0])

    def device_mapping(self, import_: int) -> tuple[int, int] | None:
        """Of memory on a device that was imported with ``mapped``: its address, and the number of the device here that
        may use it. None when the import is of host memory, or not mapped.
        """
        info = ffi.new("kvx_import_info *")
        status = lib.kvx_import_query(self._mine(), import_, info)
        if status != 0:
            raise error_for(status, what="device_mapping")
        return (int(info.address), int(info.device)) if info.address and info.device >= 0 else None

    def mapping(self, import_: int) -> memoryview | None:
        """The imported memory itself, read-only unless the grant allows writes; None when the transport cannot map.

        After `release_import`, or when the owner takes the memory back, the view may read zeros.
        """
        info = ffi.new("kvx_import_info *")
        engine = self._mine()
        status = lib.kvx_import_viewed(engine, import_, 1)
        if status == StatusCode.UNSUPPORTED:
            return None
        if status == 0:
            status = lib.kvx_import_query(engine, import_, info)
        if status != 0:
            raise error_for(status, what="mapping")
        if info.address == 0:
            return None
        exporter = self._import_views.find(import_)
        if exporter is None:
            exporter = ffi.buffer(ffi.cast("char *", info.address), info.length)
            self._import_views.add(import_, exporter, info.address, info.length)
        view = memoryview(exporter)
        return view if info.access & 2 else view.toreadonly()

    def release_import(self, import_: int) -> None:
        """Let go of an import; its running transfers still complete. One that is gone already is fine."""
        status = lib.kvx_import_release(self._mine(), import_)
        if status not in (0, StatusCode.NO_IMPORT):
            raise error_for(status, what="release_import")


__all__ = [
    "DRAIN_MAX",
    "Caps",
    "ChoiceKind",
    "Counters",
    "DeviceInfo",
    "Engine",
    "EngineConfig",
    "Event",
    "EventKind",
    "GrantInfo",
    "MemoryKind",
    "OpKind",
    "Priority",
    "RegionInfo",
    "TransportInfo",
    "forks",
]

NOTIFY, CHECK = 1, 2
PRIORITY_FLAGS = (4, 0, 8)  # by `Priority`


def encryption_missing() -> str:
    """Why tcp could not encrypt on this machine; empty when it could."""
    why = ffi.new("char[512]")
    return "" if lib.kvx_encryption_probe(why, 512) == 0 else ffi.string(why).decode("utf-8", "replace")


class Engine(Memory, Connections, Notes):
    """One native engine. Opens in the constructor; raises `TransportUnavailable` or `ConfigError` with the reason."""

    def submit(
        self,
        kind: int,
        region: int,
        import_: int,
        segments: npt.NDArray[np.uint64] | None,
        notify: tuple[int, int] | None = None,
        check: bool = False,
        priority: int = Priority.NORMAL,
        then: Callable[[Event], None] | None = None,
    ) -> Event | tuple[int, asyncio.Future[Event] | None]:
        """Start one operation over all segments: uint64 (n, 3) in C order, rows [local offset, remote offset, length].

        Small ones complete at once: then the `Event` itself is returned. Of others ``then`` is called with it, which
        saves a turn of the loop; without ``then`` there is a future for it. ``segments=None`` with ``notify`` moves
        nothing.
        Raises `BusyError` when full (nothing was taken) and typed errors for wrong arguments.
        """
        native, count = ffi.NULL, 0
        if segments is not None and len(segments):
            if segments.dtype != "uint64" or segments.ndim != 2 or segments.shape[1] != 3:
                raise UsageError("segments must be uint64 of shape (n, 3)", dtype=str(segments.dtype))
            if not segments.flags.c_contiguous:
                raise UsageError("segments must be in C order")
            native, count = ffi.from_buffer("kvx_segment[]", segments), len(segments)
        return self._submit(kind, region, import_, native, count, notify, check, priority, then)

    def submit_one(
        self,
        kind: int,
        region: int,
        import_: int,
        local_offset: int,
        remote_offset: int,
        length: int,
        notify: tuple[int, int] | None = None,
        check: bool = False,
        priority: int = Priority.NORMAL,
        then: Callable[[Event], None] | None = None,
    ) -> Event | tuple[int, asyncio.Future[Event] | None]:
        """`submit` for a single span; offsets and length in bytes."""
        segment = self._segment
        try:
            segment.local_offset = local_offset
            segment.remote_offset = remote_offset
            segment.length = length
        except OverflowError:
            raise error_for(StatusCode.LENGTH, what="submit", offset=local_offset, length=length) from None
        return self._submit(kind, region, import_, segment, 1, notify, check, priority, then)

    def _submit(
        self,
        kind: int,
        region: int,
        import_: int,
        segments: Any,
        count: int,
        notify: tuple[int, int] | None,
        check: bool,
        priority: int,
        then: Callable[[Event], None] | None,
    ) -> Event | tuple[int, asyncio.Future[Event] | None]:
        if (
            self._engine is None
            or self._fork != forks_seen
            or threading.get_ident() != self._thread
            or self._loop is None
        ):
            self._require_loop()
        args = self._args
        args.kind = kind
        args.region = region
        setattr(args, "import", import_)
        args.count = count
        if notify is None:
            args.flags = PRIORITY_FLAGS[priority] | (CHECK if check else 0)
        else:
            args.flags = PRIORITY_FLAGS[priority] | (CHECK | NOTIFY if check else NOTIFY)
            args.tag, args.value = notify
        event = self._inline_event
        status = lib.kvx_submit(self._engine, args, segments, self._token_p, self._inline_p, event)
        if status == 0:
            if self._inline_p[0]:
                return Event._make(EVENT.unpack(self._inline_view))
            token = self._token_p[0]
            if then is None:
                return token, self._future(token)
            self._pending[token] = then
            return token, None
        segment = event.segment if status in _WITH_SEGMENT else None
        raise error_for(status, what="submit", region=region, segment=segment)

    def cancel(self, token: int) -> None:
        """Ask for an early end. The token still completes exactly once: done, or CANCELLED."""
        status = lib.kvx_cancel(self._mine(), token)
        if status != 0:
            raise error_for(status, what="cancel", op_id=token)

    # -- counters -----------------------------------------------------------------------------------------

    def counters(self) -> Counters:
        """A snapshot of the engine's counters."""
        native = lib.kvx_engine_counters(self._mine())
        return parse_counters(bytes(ffi.buffer(native)))


_WITH_SEGMENT = frozenset((StatusCode.LENGTH, StatusCode.LOCAL_RANGE, StatusCode.RANGE))

"""The native engine in Python's clothes: calls go down, events come up through one file descriptor.

Thin on purpose. Each method is one call into C; each token becomes a future that resolves with its `Event`, whatever
the status, exactly once. The engine belongs to the thread of its loop: the generated wrappers drop the GIL, so a second
thread could run in the middle of a call. `alloc` and `register` can take long, so other threads may call
them.
"""

from __future__ import annotations

import asyncio
import os
import struct
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvxfer import numa
from kvxfer.errors import ClosedError, ConfigError, ForkedClientError, TransportUnavailable, UsageError, WrongThread
from kvxfer.native import regions
from kvxfer.native._shim import ffi, lib
from kvxfer.native.counters import Counters, parse_counters
from kvxfer.native.facts import (
    Caps,
    ChoiceKind,
    DeviceInfo,
    EngineConfig,
    Event,
    EventKind,
    GrantInfo,
    MemoryKind,
    OpKind,
    RegionInfo,
    TransportInfo,
)
from kvxfer.native.notes import Notes
from kvxfer.native.regions import check_length, not_addressable
from kvxfer.native.status import Status, error_for
from kvxfer.native.views import Views

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
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
    "RegionInfo",
    "TransportInfo",
]


DRAIN_MAX = 256
SEGMENT_BYTES = 24
NOTIFY, CHECK = 1, 2
_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


def forks() -> int:
    """How many forks lie between this process and the first that loaded the engine; asking for the pid costs a
    system call.
    """
    return _forks


# A kvx_event in the order of `Event`: reading them by name costs three times as much, and there is one per transfer.
EVENT = struct.Struct("=IiQQQQQii")
assert EVENT.size == ffi.sizeof("kvx_event")


class Engine(Notes):
    """One native engine. Opens in the constructor; raises `TransportUnavailable` or `ConfigError` with the reason."""

    def __init__(self, config: EngineConfig) -> None:
        self._engine: Any = None
        self.config = config
        self.engine_id = config.engine_id
        self._thread = threading.get_ident()
        self._fork = _forks
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_event: Callable[[Event], None] | None = None
        self._pending: dict[int, asyncio.Future[Event] | Callable[[Event], None]] = {}
        self.stray_events = 0  # completions of tokens that nobody waits for: a bug if it is ever not 0
        self._guests = 0  # calls from other threads that are inside C
        self._guests_left = threading.Condition()
        fork = _forks

        def same_process() -> bool:
            return fork == _forks

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
        with numa.threads_on(config.numa_node) as self.numa:  # threads run where the one that makes them does
            status = lib.kvx_engine_open(native, engine_p, why, 512)
        del keep  # the engine has its own copies
        if status != 0:
            text = ffi.string(why).decode("utf-8", "replace") or "cannot open the engine"
            if status == Status.INVALID:
                raise ConfigError(text, status=status)
            raise TransportUnavailable(text, status=status, transport=",".join(config.transports))
        self._engine = engine_p[0]
        self.transports = tuple(self._transports())
        self.unavailable = dict(self._unavailable())  # of those asked for with "?": name -> why

    # -- life ---------------------------------------------------------------------------------------------

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
        if self._engine is None:
            return
        engine = self._mine()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(lib.kvx_engine_fd(engine))
        lib.kvx_engine_stop(engine)
        while self._drain_once(engine, closing=True) == DRAIN_MAX:
            pass
        with self._guests_left:
            self._engine = None
            while self._guests:
                self._guests_left.wait()
        self._close_native(engine)

    def _close_native(self, engine: Any) -> None:
        def end() -> None:
            lib.kvx_engine_close(engine)

        self._views.close(lambda: self._pinned_views.close(lambda: self._import_views.close(end)))

    def __del__(self) -> None:
        if getattr(self, "_engine", None) is not None and self._fork == _forks:
            engine, self._engine = self._engine, None
            self._close_native(engine)
            warnings.warn("an Engine was not closed", ResourceWarning, source=self, stacklevel=1)

    def _mine(self) -> Any:
        if self._engine is None:
            raise ClosedError("the engine is closed")
        if self._fork != _forks:
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

    def call_back(self, token: int, callback: Callable[[Event], None]) -> None:
        """Instead of the future of a transfer just submitted: call at once, which saves a turn of the loop."""
        assert token in self._pending
        self._pending[token] = callback

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

    # -- memory -------------------------------------------------------------------------------------------

    def _enter(self) -> Any:
        with self._guests_left:
            if self._engine is None:
                raise ClosedError("the engine is closed")
            if self._fork != _forks:
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
        `TooLarge`, `RegistrationError` and `TransportUnavailable`.
        """
        check_length(length)
        node, where = -1 if numa_node is None else numa_node, -1 if device is None else device
        with self._guest() as engine:
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
        with self._guest() as engine:
            return regions.register(
                ffi, lib, engine, address, length, kind, -1 if device is None else device, read_only
            )

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

    def _forget_view(self, region: int) -> bool:
        engine = self._engine
        return engine is not None and lib.kvx_mem_viewed(engine, region, 0, ffi.new("uint64_t *")) == 0

    def release(self, region: int) -> asyncio.Future[Event]:
        """Give a region (or one reference of it) back; resolves when no peer can reach it and it is unmapped.

        Raises `RegionBusy` while transfers of this engine use it.
        """
        engine = self._require_loop()
        status = lib.kvx_mem_release(engine, region, self._token_p)
        if status != 0:
            raise error_for(status, what="release", region=region)
        return self._future(self._token_p[0])

    def grant(self, region: int, offset: int, length: int, access: int) -> GrantInfo:
        """Let peers reach a part of a region; ``access`` is 1 read, 2 write, 3 both. The key is new and random."""
        check_length(length)
        check_length(offset)
        info = ffi.new("kvx_grant_info *")
        status = lib.kvx_grant_create(self._mine(), region, offset, length, access, info)
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

    # -- peers --------------------------------------------------------------------------------------------

    def connect(self, transport: int, endpoint: str) -> tuple[int, asyncio.Future[Event]]:
        """Start to connect; a peer handle and the future of its outcome. A failed one needs no `close_peer`."""
        engine = self._require_loop()
        status = lib.kvx_peer_connect(engine, transport, endpoint.encode(), self._id_p, self._token_p)
        if status != 0:
            raise error_for(status, what="connect", endpoint=endpoint)
        return self._id_p[0], self._future(self._token_p[0])

    def close_peer(self, peer: int) -> asyncio.Future[Event]:
        """End a connection: its transfers complete, its imports go. One that is gone already resolves at once."""
        engine = self._require_loop()
        status = lib.kvx_peer_close(engine, peer, self._token_p)
        if status == Status.NO_PEER:
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
        """Start to make a remote grant usable (``mapped``: for `device_mapping`); a handle, the future of its outcome."""
        engine = self._require_loop()
        remote = ffi.new("kvx_remote *", {"grant": grant, "generation": generation, "length": length, "access": access})
        remote.key, remote.flags = key, int(mapped)
        status = lib.kvx_mem_import(engine, peer, remote, self._id_p, self._token_p)
        if status != 0:
            raise error_for(status, what="import", grant=grant)
        return self._id_p[0], self._future(self._token_p[0])

    def mapping(self, import_: int) -> memoryview | None:
        """The imported memory itself, read-only unless the grant allows writes; None when the transport cannot map it.
        After `release_import`, or when the owner takes the memory back, the view may read zeros.
        """
        info = ffi.new("kvx_import_info *")
        engine = self._mine()
        status = lib.kvx_import_viewed(engine, import_, 1)
        if status == Status.UNSUPPORTED:
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

    def _forget_import_view(self, import_: int) -> bool:
        engine = self._engine
        return engine is not None and lib.kvx_import_viewed(engine, import_, 0) == 0

    def release_import(self, import_: int) -> None:
        """Let go of an import; its running transfers still complete. One that is gone already is fine."""
        status = lib.kvx_import_release(self._mine(), import_)
        if status not in (0, Status.NO_IMPORT):
            raise error_for(status, what="release_import")

    # -- transfers ----------------------------------------------------------------------------------------

    def submit(
        self,
        kind: int,
        region: int,
        import_: int,
        segments: npt.NDArray[np.uint64] | None,
        *,
        notify: tuple[int, int] | None = None,
        check: bool = False,
    ) -> Event | tuple[int, asyncio.Future[Event]]:
        """Start one operation over all segments: uint64 (n, 3) in C order, rows [local offset, remote offset, length].

        Small ones complete at once: then the `Event` itself is returned. ``segments=None`` with ``notify`` moves
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
        return self._submit(kind, region, import_, native, count, notify, check)

    def submit_one(
        self,
        kind: int,
        region: int,
        import_: int,
        local_offset: int,
        remote_offset: int,
        length: int,
        *,
        notify: tuple[int, int] | None = None,
        check: bool = False,
    ) -> Event | tuple[int, asyncio.Future[Event]]:
        """`submit` for a single span; offsets and length in bytes."""
        segment = self._segment
        try:
            segment.local_offset = local_offset
            segment.remote_offset = remote_offset
            segment.length = length
        except OverflowError:
            raise error_for(Status.LENGTH, what="submit", offset=local_offset, length=length) from None
        return self._submit(kind, region, import_, segment, 1, notify, check)

    def _submit(
        self,
        kind: int,
        region: int,
        import_: int,
        segments: Any,
        count: int,
        notify: tuple[int, int] | None,
        check: bool,
    ) -> Event | tuple[int, asyncio.Future[Event]]:
        if self._engine is None or self._fork != _forks or threading.get_ident() != self._thread or self._loop is None:
            self._require_loop()
        args = self._args
        args.kind = kind
        args.region = region
        setattr(args, "import", import_)
        args.count = count
        if notify is None:
            args.flags = CHECK if check else 0
        else:
            args.flags = CHECK | NOTIFY if check else NOTIFY
            args.tag, args.value = notify
        event = self._inline_event
        status = lib.kvx_submit(self._engine, args, segments, self._token_p, self._inline_p, event)
        if status == 0:
            if self._inline_p[0]:
                return Event._make(EVENT.unpack(self._inline_view))
            token = self._token_p[0]
            return token, self._future(token)
        segment = event.segment if status in _WITH_SEGMENT else None
        raise error_for(status, what="submit", region=region, segment=segment)

    def cancel(self, token: int) -> None:
        """Ask for an early end. The token still completes exactly once: done, or CANCELLED."""
        status = lib.kvx_cancel(self._mine(), token)
        if status != 0:
            raise error_for(status, what="cancel", op_id=token)

    # -- counters -----------------------------------------------------------------------------------------

    def counters(self) -> Counters:
        """A snapshot."""
        native = lib.kvx_engine_counters(self._mine())
        return parse_counters(bytes(ffi.buffer(native)))


_WITH_SEGMENT = frozenset((Status.LENGTH, Status.LOCAL_RANGE, Status.RANGE))

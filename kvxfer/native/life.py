"""The life of a native engine: opening and closing it, whose thread may call, and events up through one descriptor.

Each token becomes a future that resolves with its `Event`, whatever the status, exactly once. The engine belongs to the
thread of its loop: the generated wrappers drop the GIL, so a second thread could run in the middle of a call. Where a
method says so, other threads may call too; closing waits for these guests.
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
from typing import Any

from kvxfer.errors import ClosedError, ConfigError, ForkedClientError, TransportUnavailable, UsageError, WrongThread
from kvxfer.logs import logger
from kvxfer.memory import numa
from kvxfer.native._shim import ffi, lib
from kvxfer.native.facts import Caps, EngineConfig, Event, TransportInfo
from kvxfer.native.status import Status
from kvxfer.native.views import Views
from kvxfer.tasks import to_the_end

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

"""`ThreadedClient`: the client for programs without an event loop, such as the workers of inference engines.

A thread runs an event loop with one `Client` in it; everything here hands work to that thread and tells what became of
it. What is submitted has a `Handle`. Nothing of the caller runs in that thread but what is given to `submit` and `run`.

Whoever waits is always told: handles end with a `ClosedError` when the client is closed, when the thread dies and when
the interpreter exits. After a fork the child has no such thread, and every call there is a `ForkedClientError`.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread  # noqa: F401  its threads must outlive our end, so its hook is registered first
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import uvloop

from kvxfer.client import Client, Node
from kvxfer.config import Config, load
from kvxfer.descriptors import Ticket
from kvxfer.errors import (
    ClosedError,
    ForkedClientError,
    KvxferError,
    ResourceExhausted,
    TooManyPending,
    TransferCancelled,
    TransferTimeout,
    UsageError,
    WrongThread,
)
from kvxfer.flows.caches import Caches
from kvxfer.flows.offer import Landing
from kvxfer.flows.publish import Publication
from kvxfer.flows.pull import Pulled
from kvxfer.flows.push import Push
from kvxfer.flows.tickets import AnyTicket
from kvxfer.geometry import BlockTable
from kvxfer.logs import logger
from kvxfer.memory.numa import threads_at
from kvxfer.memory.region import KVCache, Region
from kvxfer.native.engine import forks
from kvxfer.tasks import OTHER_SIDE, Deadline, TaskOwner, seconds

HANDLES_MAX = 16384  # that have not ended
EXIT_S = 5.0  # what a client that nobody closed may take at the exit of the interpreter
T = TypeVar("T")
Work = Callable[[Client], Coroutine[Any, Any, T]]

log = logger("kvxfer.threaded")


class Handle(Generic[T]):
    """Something that was submitted. It ends exactly once, and `ThreadedClient.poll` then returns it once.

    ``key`` is the caller's; ``done`` is True from the end on, and ``error`` is why it failed (None: it did not). All of
    it may be used from any thread but the client's own. Times are in seconds.
    """

    def __init__(self, client: ThreadedClient, key: Hashable, what: str, *, reported: bool = True) -> None:
        self._client = client
        self._what = what
        self._reported = reported
        self._task: asyncio.Task[Any] | None = None
        self._cancelling = False
        self._value: T | None = None
        self._layers: set[int] = set()
        self.key = key
        self.done = False
        self.error: BaseException | None = None

    def result(self, timeout: float | None = None) -> T:
        """Wait for the end, which the work's own timeouts bring, and return what came of it.

        Raises: the error of the work; `TransferTimeout` after ``timeout`` seconds (None: never), and the work goes on;
        `ClosedError` when the client ended first, `WrongThread` in the client's own thread, `ForkedClientError`.
        """
        self._client._wait(lambda: self.done, timeout, f"{self._what} ended")
        if self.error is not None:
            raise self.error
        return self._value  # type: ignore[return-value]

    def cancel(self) -> None:
        """Ask for its end, and return at once. It ends with `TransferCancelled` when nothing of it moves any more,
        unless it had already come to another end. Raises: `ForkedClientError`.
        """
        self._cancelling = True
        self._client._tell(self._cancel_here, late_is_fine=True)

    @property
    def layers(self) -> frozenset[int]:
        """The layers that are complete (of an offer, and of a pull with ``layers=True``)."""
        with self._client._changed:
            return frozenset(self._layers)

    def wait_layer(self, index: int, timeout: float | None = None) -> None:
        """Wait until layer ``index`` is complete, or all of them are.

        Raises: the handle's error when it failed before that, and what `result` raises of its own.
        """
        self._client._wait(lambda: self.done or index in self._layers, timeout, f"layer {index} of {self._what} came")
        if index not in self._layers and self.error is not None:
            raise self.error

    def __repr__(self) -> str:
        state = "running" if not self.done else "done" if self.error is None else f"failed: {self.error!r}"
        return f"<Handle {self._what} {state}>"

    # -- in the client's thread -----------------------------------------------------------------------------

    def _cancel_here(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _layer_here(self, index: int) -> None:
        with self._client._changed:
            self._layers.add(index)
            self._client._changed.notify_all()

    def _end_here(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            error = task.exception()
            self._client._ended_here(self, None if error else task.result(), error)
        elif self._cancelling:
            self._client._ended_here(self, None, TransferCancelled(f"{self._what} was cancelled", by="us"))
        else:
            self._client._ended_here(self, None, ClosedError(f"{self._what} ended with its client"))


class PostedHandle(Handle[T]):
    """An offer or a publication: `ticket` is what the other side needs."""

    def __init__(self, client: ThreadedClient, key: Hashable, what: str) -> None:
        super().__init__(client, key, what)
        self._ticket: Ticket | None = None

    def ticket(self, timeout: float | None = None) -> Ticket:
        """Wait for the ticket, which is there as soon as the daemon has the posting.

        Raises: the handle's error when it ended before that, and what `Handle.result` raises of its own.
        """
        self._client._wait(lambda: self.done or self._ticket is not None, timeout, f"{self._what} was posted")
        if self._ticket is None:
            raise self.error or ClosedError(f"{self._what} ended before it had a ticket")
        return self._ticket

    def _posted_here(self, ticket: Ticket) -> None:
        with self._client._changed:
            self._ticket = ticket
            self._client._changed.notify_all()


class PushHandle(Handle[Push]):
    """A push that is fed by `layer` and ended by `finish`; neither of them waits."""

    def __init__(self, client: ThreadedClient, key: Hashable, what: str) -> None:
        super().__init__(client, key, what)
        self._feed: asyncio.Queue[Callable[[Push], Awaitable[object] | None] | None] = asyncio.Queue()

    def layer(self, index: int, tokens: range | None = None) -> None:
        """`Push.layer`: what is wrong with it is the handle's error. Its memory stays as it is until the push ended.

        ``tokens`` are positions, as `Push.layer` takes them. Raises: the handle's error when it has ended.
        """
        self._give(lambda push: push.layer(index, tokens))

    def extend(self, blocks: Iterable[int]) -> None:
        """`Push.extend`, in order with the layers. Raises: the handle's error when it has ended."""
        more = list(blocks)
        self._give(lambda push: push.extend(more))

    def finish(self) -> None:
        """All layers were given: the handle ends when they are there and committed. Raises: as `layer`."""
        self._give(None)

    def _give(self, item: Callable[[Push], Awaitable[object] | None] | None) -> None:
        if self.done:
            raise self.error or ClosedError(f"{self._what} has ended")
        self._client._tell(partial(self._feed.put_nowait, item))

    async def _run_here(self, push: Push, timeout: float) -> Push:
        deadline = Deadline.after(timeout)
        async with push:
            while True:
                async with deadline.bound("all layers were given and committed", OTHER_SIDE):
                    item = await self._feed.get()
                if item is None:
                    return push
                step = item(push)
                if step is not None:
                    await step


class ThreadedClient:
    """``with kvxfer.ThreadedClient() as client``: one `Client` in a thread of its own, used from any other thread.

    ``socket``, ``config`` and ``name`` are those of `Client`. `fileno` is readable while `poll` has something to tell.
    ``loop_factory`` makes its event loop. Times are in seconds.

    Raises: on entering what opening a `Client` raises, and `ResourceExhausted` when there is no thread or descriptor
    left; everything but `closed` raises `ForkedClientError` in a child process and `ClosedError` while it is not open.
    """

    def __init__(
        self,
        socket: str | Path | None = None,
        *,
        config: Config | None = None,
        name: str = "",
        loop_factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop,
    ) -> None:
        self.config = load().config if config is None else config
        self._open = partial(Client, socket, config=self.config, name=name)
        self._loop_factory = loop_factory
        self._fork = forks()
        self._changed = threading.Condition()  # guards what follows
        self._handles: dict[Handle[Any], None] = {}
        self._ended: list[Handle[Any]] = []
        self._descriptor = -1
        self._started = self._ready = self._over = False
        self._cause: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: Client | None = None
        self._tasks = TaskOwner("threaded client")
        self._stop = asyncio.Event()

    # -- its life -------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Open the client; what ``with`` does first.

        Raises: what opening a `Client` raises, `ResourceExhausted`, and `UsageError` when it was started before.
        """
        if self._started:
            self._require_process()
            raise UsageError("a client is started once", hint="make another one")
        self._started, self._fork = True, forks()
        thread = threading.Thread(target=self._main, name="kvxfer", daemon=True)
        try:
            self._descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            thread.start()
        except (OSError, RuntimeError) as error:
            self._close_descriptor()
            raise ResourceExhausted(f"no thread or descriptor for a client: {error}") from error
        self._thread = thread
        _open.add(self)
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._over)
        if not self._ready:
            thread.join()
            self._close_descriptor()
            raise self._cause or ClosedError("the client was closed")

    def close(self, timeout: float | None = None) -> None:
        """End everything as `Client.aclose` does; what runs ends with `ClosedError`, and `poll` still tells of it.

        `fileno` is closed, and it can be called again.

        Raises: `TransferTimeout` when the thread has not ended within ``timeout`` seconds (None: `timeout_s`), for
        instance because something submitted holds it up; `WrongThread` in the client's own thread.
        """
        self._require_process()
        thread = self._thread
        if thread is None:
            self._started = True
            return
        self._require_outside()
        limit = self.config.timeout_s if timeout is None else seconds(timeout, "timeout")
        self._tell(self._stop.set, late_is_fine=True)
        thread.join(limit)
        if thread.is_alive():
            raise TransferTimeout(f"the client's thread did not end within {limit:g} s", state=OTHER_SIDE)
        _open.discard(self)
        self._close_descriptor()

    def _close_descriptor(self) -> None:
        with self._changed:
            descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _main(self) -> None:
        try:
            with threads_at(self.config.engine_cpus), asyncio.Runner(loop_factory=self._loop_factory) as runner:
                self._loop = runner.get_loop()
                runner.run(self._serve())
        except Exception as error:  # for `start` to raise
            self._cause = error
        except BaseException as error:
            self._cause = error
            raise
        finally:
            self._tell_the_end()

    def _tell_the_end(self) -> None:
        """Nobody may wait for this thread any longer."""
        told = f"the thread of the client died: {self._cause!r}" if self._cause else "the client was closed"
        with self._changed:
            self._over = True
            left = list(self._handles)
            self._changed.notify_all()
        for handle in left:
            self._ended_here(handle, None, ClosedError(told))
        if self._cause is not None and self._ready:
            log.error("%s", told)

    async def _serve(self) -> None:
        async with self._open() as client:
            with self._changed:
                self._client, self._ready = client, True
                self._changed.notify_all()
            try:
                await self._stop.wait()
            finally:
                await self._tasks.aclose()

    # -- what others ask for ----------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True before its start and after its end, also when the thread died."""
        return not self._ready or self._over

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where other nodes reach this node's daemon, best first. Raises: `ClosedError`."""
        return self._require_open().addresses

    @property
    def unready(self) -> str:
        """Why this client should not be given work now; empty when it can work."""
        return "the client is not open" if self.closed or self._client is None else self._client.unready

    def counters(self) -> Mapping[str, int]:
        """What the client and its engine have counted: see `Client.counters`. Raises: `ClosedError`."""
        return self._require_open().counters()

    def fileno(self) -> int:
        """A descriptor that is readable while a handle has ended that `poll` has not told; for epoll and select. It is
        the client's: only to be waited for. Raises: `ClosedError` when the client is not open.
        """
        self._require_process()
        if self._descriptor < 0:
            raise ClosedError("the client is not open")
        return self._descriptor

    def poll(self) -> list[Handle[Any]]:
        """The handles that have ended since the last call, each once, in the order of their ends. Never waits.

        Raises: `ForkedClientError`; the errors of handles are in `Handle.error`.
        """
        self._require_process()
        with self._changed:
            ended, self._ended = self._ended, []
            if ended and self._descriptor >= 0:
                os.eventfd_read(self._descriptor)
        return ended

    def submit(self, work: Work[T], *, key: Hashable = None) -> Handle[T]:
        """Run ``work(client)``, a coroutine, in the client's thread: whatever a `Client` can do.

        It must not block: while it does, no outcome of this client is told, and after `dead_s` peers count it as lost.

        Raises: `TooManyPending` when `HANDLES_MAX` have not ended, `ClosedError`; what ``work`` raises is the handle's
        error. So do all the others whose name begins with ``submit``.
        """
        return self._begin(Handle(self, key, f"work {key!r}"), work)

    def run(self, work: Work[T], *, timeout: float | None = None) -> T:
        """`submit` and wait for the result. After ``timeout`` seconds, or when the wait is interrupted, it is
        cancelled.

        Raises: what ``work`` raises, what `submit` raises, and `TransferTimeout`.
        """
        handle = self._begin(Handle[T](self, None, "a call", reported=False), work)
        try:
            return handle.result(timeout)
        finally:
            if not handle.done:
                handle.cancel()

    def alloc(self, length: int, **options: Any) -> Region:
        """Allocate memory that peers can reach, and wait for it. Raises: what `Client.alloc` and `run` raise."""
        return self.run(lambda client: client.alloc(length, **options))

    def register(self, source: Any = None, **options: Any) -> Region:
        """Register the caller's memory, and wait for it. Raises: what `Client.register` and `run` raise."""
        return self.run(lambda client: client.register(source, **options))

    def register_many(self, sources: Sequence[Any], **options: Any) -> tuple[Region, ...]:
        """Register all or none, and wait for it. Raises: what `Client.register_many` and `run` raise."""
        return self.run(lambda client: client.register_many(sources, **options))

    # -- whole caches -----------------------------------------------------------------------------------------

    def submit_pull(
        self,
        ticket: AnyTicket | Sequence[AnyTicket],
        cache: Caches,
        table: BlockTable | None = None,
        *,
        key: Hashable = None,
        layers: bool = False,
        **options: Any,
    ) -> Handle[Pulled]:
        """Begin `Client.pull`. With ``layers=True`` `Handle.wait_layer` tells of each layer, else all come at once.

        Raises: what `submit` raises; what `Client.pull` raises is the handle's error.
        """
        handle = Handle[Pulled](self, key, f"pull {key!r}")
        on_layer = handle._layer_here if layers else None
        return self._begin(handle, lambda client: client.pull(ticket, cache, table, on_layer=on_layer, **options))

    def submit_push(
        self,
        request: AnyTicket,
        *,
        to: Node | None = None,
        cache: KVCache,
        table: BlockTable,
        key: Hashable = None,
        timeout: float | None = None,
        **options: Any,
    ) -> PushHandle:
        """Begin `Client.push`: give it each layer (`PushHandle.layer`) and then `PushHandle.finish`.

        It ends with the push as its result (``bytes_done``, ``transport``, ``covered``), or with `TransferTimeout` when
        the layers do not come within ``timeout`` seconds (None: `timeout_s`).

        Raises: what `submit` raises; what `Client.push` raises is the handle's error.
        """
        handle = PushHandle(self, key, f"push {key!r}")
        limit = self.config.timeout_s if timeout is None else timeout

        async def work(client: Client) -> Push:
            push = client.push(request, to=to, cache=cache, table=table, timeout=limit, **options)
            return await handle._run_here(push, limit)

        self._begin(handle, work)
        return handle

    def submit_offer(
        self, request_id: str, cache: KVCache, table: BlockTable, *, key: Hashable = None, **options: Any
    ) -> PostedHandle[Landing]:
        """Begin `Client.offer`: the handle ends with the landing when all is committed, and `Handle.wait_layer` tells
        of each layer.

        Raises: what `submit` raises; what `Client.offer` raises is the handle's error.
        """
        handle = PostedHandle[Landing](self, key, f"offer {request_id}")

        async def work(client: Client) -> Landing:
            async with client.offer(request_id, cache, table, **options) as landing:
                handle._posted_here(landing.ticket)
                async for layer in landing:
                    handle._layer_here(layer)
            return landing

        self._begin(handle, work)
        return handle

    def submit_publish(
        self, request_id: str, cache: Caches, table: BlockTable | None = None, *, key: Hashable = None, **options: Any
    ) -> PostedHandle[Publication]:
        """Begin `Client.publish`: the handle ends when the blocks are free again, with the publication (``outcome``,
        ``error``). Cancelling it withdraws the ticket.

        Raises: what `submit` raises; what `Client.publish` raises is the handle's error.
        """
        handle = PostedHandle[Publication](self, key, f"publication {request_id}")

        async def work(client: Client) -> Publication:
            async with client.publish(request_id, cache, table, **options) as publication:
                handle._posted_here(publication.ticket)
            return publication

        self._begin(handle, work)
        return handle

    def submit_release(self, ticket: AnyTicket, *, key: Hashable = None, **options: Any) -> Handle[None]:
        """Begin `Client.release`: the ticket will not be fetched.

        Raises: what `submit` raises; what `Client.release` raises is the handle's error.
        """
        return self._begin(Handle[None](self, key, "a release"), lambda client: client.release(ticket, **options))

    # -- between the threads ----------------------------------------------------------------------------------

    def _require_process(self) -> None:
        if forks() != self._fork:
            raise ForkedClientError("this client belongs to the parent process", hint="open one after the fork")

    def _require_outside(self) -> None:
        if self._thread is not None and threading.get_ident() == self._thread.ident:
            raise WrongThread("the client's own thread cannot wait for itself", hint="await it there")

    def _require_open(self) -> Client:
        self._require_process()
        if self._client is None or self._over:
            died = f": its thread died: {self._cause!r}" if self._cause is not None else ""
            raise ClosedError(f"the client is not open{died}", hint="use it inside `with`")
        return self._client

    def _tell(self, callback: Callable[[], object], *, late_is_fine: bool = False) -> None:
        """Run it in the client's thread."""
        self._require_process()
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(callback)
        except RuntimeError as closed:
            if not late_is_fine:
                raise ClosedError("the client is not open") from closed

    def _begin(self, handle: Handle[T], work: Work[T]) -> Handle[T]:
        client = self._require_open()
        with self._changed:
            if len(self._handles) >= HANDLES_MAX:
                raise TooManyPending("too much is submitted and has not ended", limit=HANDLES_MAX)
            self._handles[handle] = None
        try:
            self._tell(partial(self._begin_here, client, handle, work))
        except BaseException:
            with self._changed:
                self._handles.pop(handle, None)
            raise
        return handle

    def _wait(self, ready: Callable[[], bool], timeout: float | None, what: str) -> None:
        self._require_process()
        limit = None if timeout is None else seconds(timeout, "timeout")
        with self._changed:
            if ready():
                return
            self._require_outside()
            if not self._changed.wait_for(ready, limit):
                raise TransferTimeout(f"{timeout:g} s passed before {what}", state=OTHER_SIDE)

    def _begin_here(self, client: Client, handle: Handle[T], work: Work[T]) -> None:
        if handle._cancelling:
            self._ended_here(handle, None, TransferCancelled(f"{handle._what} was cancelled", by="us"))
            return

        async def run() -> T:  # also what is wrong with the call itself is the outcome of the handle
            return await work(client)

        try:
            handle._task = self._tasks.run(run(), handle._what)
        except ClosedError as error:
            self._ended_here(handle, None, error)
        else:
            handle._task.add_done_callback(handle._end_here)

    def _ended_here(self, handle: Handle[T], value: T | None, error: BaseException | None) -> None:
        with self._changed:
            if handle.done:
                return
            self._handles.pop(handle, None)
            handle._value, handle.error, handle.done = value, error, True
            if handle._reported:
                self._ended.append(handle)
                if self._descriptor >= 0:
                    os.eventfd_write(self._descriptor, 1)
            self._changed.notify_all()


# -- the exit of the interpreter ----------------------------------------------------------------------------------

_open: weakref.WeakSet[ThreadedClient] = weakref.WeakSet()


def _close_all() -> None:
    for client in tuple(_open):
        if client._fork != forks():
            continue
        try:
            client.close(EXIT_S)
        except KvxferError as error:
            log.warning("a client was left open at exit, and its end failed: %s", error)


# Before the interpreter takes the threads away that closing needs; `atexit` alone would come after that.
getattr(threading, "_register_atexit", atexit.register)(_close_all)

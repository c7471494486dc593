"""An asyncio event loop in virtual time, and the processes that live in it.

The idea: the loop is the whole world. Time jumps to the next timer, so a minute costs what its events cost, and the
same seed gives the same order of everything. Each host has a clock of its own, so `time` depends on who asks; `now` is
the world's. A simulated process is a mark in the context that every callback carries:
what a process starts, it owns. So a process can be killed between any two callbacks (none of its code runs any more, no
`finally` either) or frozen (its callbacks wait), exactly as `kill -9` and SIGSTOP do it.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from asyncio import base_events, events
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.sim.network import Host, Network

STALE_TIMERS_MIN = 256
RUNNING, FROZEN, DEAD = "running", "frozen", "dead"


class Stuck(Exception):
    """Nothing is left to happen, and somebody still waits."""


class Process:
    """One process: a daemon or a worker. ``ends`` run when it is killed: what its kernel does for it."""

    def __init__(self, loop: SimLoop, host: Host, name: str) -> None:
        self.loop = loop
        self.host = host
        self.name = name
        self.state = RUNNING
        self.clock_s = host.clock_s  # of this boot of its machine
        self.thawed_at = 0.0
        self.speech: Any = None  # versions and features of the protocol
        self.silent = False  # its machine went with it: nobody is told
        self.held: list[asyncio.Handle] = []
        self.ends: dict[object, Callable[[bool], None]] = {}
        self.context: Context = copy_context()
        self.context.run(PROCESS.set, self)
        self.pid = next(loop.pids)
        self.tasks: dict[SimTask, None] = {}

    def __repr__(self) -> str:
        return f"<{self.name} {self.state}>"

    @property
    def alive(self) -> bool:
        return self.state != DEAD

    def freeze(self) -> None:
        """SIGSTOP: it does nothing, and its sockets stay open."""
        if self.state == RUNNING:
            self.state = FROZEN

    def thaw(self) -> None:
        """SIGCONT: what came meanwhile is handled now, in order."""
        if self.state == FROZEN:
            self.state = RUNNING
            self.thawed_at = self.loop.now
            held, self.held = self.held, []
            self.loop.again(held)

    def raise_from_the_dead(self) -> None:
        """After the run: what was left standing may come to its end."""
        self.state = RUNNING
        held, self.held = self.held, []
        self.loop.again(held)

    def kill(self, *, silent: bool = False) -> None:
        """kill -9, or (``silent``) the end of its machine: not one more step of it runs."""
        if self.state == DEAD:
            return
        self.state = DEAD
        self.silent = silent
        ends, self.ends = self.ends, {}
        for end in ends.values():
            end(silent)


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class SimTask(asyncio.Task[Any]):
    """A task that its process knows, with a hash that is the same in every run."""

    def __init__(self, coro: Any, *, loop: SimLoop, name: str | None = None, context: Context | None = None) -> None:
        self._number = next(loop.numbers)
        super().__init__(coro, loop=loop, name=name or f"task-{self._number}", context=context)
        owner = PROCESS.get() if context is None else context.get(PROCESS)
        if owner is not None:
            owner.tasks[self] = None
            self.add_done_callback(owner.tasks.pop)

    def __hash__(self) -> int:
        return self._number


class SimLoop(base_events.BaseEventLoop):
    """The loop. ``network`` gives it connections; ``steps`` counts the callbacks that ran."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _timer_cancelled_count: int
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self._now = 1000.0
        self.numbers = itertools.count(1)
        self.pids = itertools.count(1000)
        self.steps = 0
        self.network: Network
        self.on_error: Callable[[dict[str, Any]], None] = _nobody  # what reaches the exception handler
        self.thread_delay: Callable[[], float] = lambda: 0.0
        self.on_step: Callable[[], None] | None = None
        self.next_look = 0  # the step before which ``on_step`` is called
        self.set_task_factory(_make_task)
        self.set_exception_handler(_keep)

    # -- time ------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Seconds of the world, which no process can see."""
        return self._now

    def time(self) -> float:
        """What the clock of the host shows whose process asks."""
        return self._now + _clock_s()

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """At a time of whoever asks, and never before it, whatever was rounded."""
        clock_s = _clock_s()
        at = when - clock_s
        while at + clock_s < when:
            at = math.nextafter(at, math.inf)
        return super().call_at(at, callback, *args, context=context)

    def at(self, when: float, callback: Callable[..., object], *args: Any, context: Context) -> None:
        """At a time of the world."""
        super().call_at(when, callback, *args, context=context)

    def _run_once(self) -> None:
        ready = self._ready
        scheduled = self._scheduled
        if self._timer_cancelled_count > STALE_TIMERS_MIN and 2 * self._timer_cancelled_count > len(scheduled):
            self._drop_stale()
            scheduled = self._scheduled
        while scheduled and scheduled[0].cancelled():
            self._pop_timer()
            self._timer_cancelled_count -= 1
        if not ready and not self._stopping:
            if not scheduled:
                raise Stuck("nothing is left to happen")
            self._now = max(self._now, _when(scheduled[0]))
        while scheduled and _when(scheduled[0]) <= self._now:
            ready.append(self._pop_timer())
        for _ in range(len(ready)):
            if self.steps >= self.next_look and self.on_step is not None:
                self.on_step()
            handle: Any = ready.popleft()
            if handle._cancelled:
                continue
            owner = handle._context.get(PROCESS)
            if owner is not None and owner.state is not RUNNING:
                owner.held.append(handle)
                continue
            self.steps += 1
            handle._run()

    def _pop_timer(self) -> asyncio.TimerHandle:
        handle = heapq.heappop(self._scheduled)
        handle._scheduled = False  # type: ignore[attr-defined]
        return handle

    def _drop_stale(self) -> None:
        kept: list[Any] = []
        for handle in self._scheduled:
            if handle.cancelled():
                handle._scheduled = False  # type: ignore[attr-defined]
            else:
                kept.append(handle)
        heapq.heapify(kept)
        self._scheduled = kept
        self._timer_cancelled_count = 0

    def again(self, handles: list[asyncio.Handle]) -> None:
        """Run these as soon as it is their turn."""
        self._ready.extend(handles)

    def timers_of(self, process: Process) -> list[asyncio.TimerHandle]:
        """What is still to happen in a process."""
        return [
            handle
            for handle in self._scheduled
            if not handle.cancelled() and handle._context.get(PROCESS) is process  # type: ignore[attr-defined]
        ]

    def _process_events(self, event_list: Any) -> None:
        """There is nothing outside."""

    def _write_to_self(self) -> None:
        """Nobody sleeps."""

    # -- what a loop offers ------------------------------------------------------------------------------------

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> Any:
        """Threads finish in an order that the seed decides."""
        done = self.create_future()

        def work() -> None:
            if done.cancelled():
                func(*args)
                return
            try:
                result = func(*args)
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(result)

        self.call_later(self.thread_delay(), work)
        return done

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        return await self.network.connect(protocol_factory, (str(host), int(port)))

    async def create_unix_connection(self, protocol_factory: Any, path: Any = None, **_: Any) -> Any:
        return await self.network.connect(protocol_factory, str(path))

    async def create_server(self, protocol_factory: Any, *_: Any, sock: Any = None, **__: Any) -> Any:
        sock.serve(protocol_factory)
        return sock

    async def create_unix_server(self, protocol_factory: Any, *_: Any, sock: Any = None, **__: Any) -> Any:
        sock.serve(protocol_factory)
        return sock


def _when(timer: asyncio.TimerHandle) -> float:
    return events.TimerHandle.when(timer)


def _clock_s() -> float:
    owner = PROCESS.get()
    return 0.0 if owner is None else owner.clock_s


def _make_task(loop: Any, coro: Any, context: Context | None = None) -> SimTask:
    return SimTask(coro, loop=loop, context=context)


def _keep(loop: Any, context: dict[str, Any]) -> None:
    loop.on_error(context)


def _nobody(_: dict[str, Any]) -> None:
    """Nobody looks at errors."""


def run_in(process: Process, call: Callable[..., Any], *args: Any) -> Any:
    """Do something as this process."""
    return process.context.copy().run(call, *args)


def current() -> Process:
    """The process whose code runs now."""
    found = PROCESS.get()
    assert found is not None, "this runs outside any process"
    return found


__all__ = ["PROCESS", "Process", "SimLoop", "SimTask", "Stuck", "current", "events", "run_in"]

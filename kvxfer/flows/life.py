"""The life of a client: its engine and its link to the daemon, whose thread it belongs to, and what has to end with it.

`Client` adds the verbs. A flow (an offer, a push, a publication) enters here while it runs, so that closing ends it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import SystemRandom
from types import TracebackType
from typing import Any, Self

from kvxfer.addresses import parse_address
from kvxfer.config import Config, load
from kvxfer.config.paths import counters_path, daemon_socket, engine_dir, socket_dir
from kvxfer.dataplane.plane import DataPlane
from kvxfer.dataplane.transfer import Transfer
from kvxfer.deadline import Deadline, seconds
from kvxfer.errors import (
    ClosedError,
    ForkedClientError,
    KvxferError,
    UsageError,
    WrongThread,
)
from kvxfer.flows.control import Control
from kvxfer.flows.mailboxes import Mailboxes
from kvxfer.flows.reporting import Reporter
from kvxfer.memory.allocation import Allocator
from kvxfer.memory.reservations import BlockReservations, Reservation
from kvxfer.native.engine import Engine, EngineConfig, forks
from kvxfer.net.link import LinkFacts
from kvxfer.tasks import TaskOwner

# Ends a flow at once; what is still to be said to its other side, and when it has been, is in the coroutine (if any).
EndFlow = Callable[[KvxferError], Coroutine[Any, Any, None] | None]


class ClientLife:
    """A part of `Client`: opened by ``async with``, ended by `aclose`."""

    def __init__(self, socket: str | Path | None = None, *, config: Config | None = None, name: str = "") -> None:
        self.config = load().config if config is None else config
        self._socket = None if socket is None else Path(socket)
        self._name = name or f"worker-{os.getpid()}"
        self._tasks = TaskOwner("client")
        self._engine: Engine | None = None
        self._plane: DataPlane | None = None
        self._control: Control | None = None
        self._mailboxes: Mailboxes | None = None
        self._entered = False
        self._fork = self._thread = 0
        self._allocator: Allocator | None = None
        self._reporter = Reporter(self.config)
        self._flows: dict[object, EndFlow] = {}
        self._released: OrderedDict[str, None] = OrderedDict()
        self.reservations = BlockReservations()

    async def __aenter__(self) -> Self:
        if self._entered:
            raise UsageError("a client is entered once", hint="make another one")
        self._entered = True
        self._fork, self._thread = forks(), threading.get_ident()
        directory = socket_dir(self.config) if self._socket is None else self._socket.parent
        socket = daemon_socket(directory) if self._socket is None else self._socket
        directory = engine_dir(directory)
        engine_id = secrets.token_bytes(16)
        counters = counters_path(directory, engine_id)
        facts = LinkFacts(
            role="worker",
            name=self._name,
            engine_id=engine_id.hex(),
            counters_path=str(counters),
            namespace=self.config.namespace,
        )
        control = Control(str(socket), self.config, facts=facts, rng=SystemRandom())
        engine = None
        try:
            # The daemon first: without it there is nothing to do, and it knows where to listen and what to advertise.
            await control.start()
            self._control = control
            settings = EngineConfig.from_config(
                self.config,
                engine_id,
                socket_dir=str(directory),
                counters_path=str(counters),
                **dict.fromkeys(("hixl_port", "hixl_engine_port"), 0),  # configured ones are the daemon's
                # Whoever shares a configuration with its daemon cannot have the daemon's port; another one is meant.
                tcp_port=0 if self.config.data_port == control.data_port else self.config.data_port,
                **({} if self.config.data_bind else control.binds),
            )
            self._engine = engine = Engine(settings)
            self._allocator = Allocator(engine, self._tasks)
            self._plane = DataPlane(
                engine,
                self.config,
                node_id=control.node_id,
                incarnation=control.incarnation,
                advertise=self._advertised(control),
            )
            control.on_identity = self._identified
            self._mailboxes = Mailboxes(control, self.config)
            self._reporter.start(control, self._plane.unexpected)
        except BaseException:
            self._plane = self._control = None
            if engine is not None:
                engine.close()
            await control.aclose()
            raise
        return self

    def _identified(self) -> None:
        """The daemon restarted: its address or identity may have changed."""
        control = self.control
        advertise = self._advertised(control)
        self.plane.memory.identify(node_id=control.node_id, incarnation=control.incarnation, advertise=advertise)

    def _advertised(self, control: Control) -> tuple[str, ...]:
        """The hosts that peers' engines dial: this worker's own `data_advertise`, else what its daemon tells."""
        own = (parse_address(text, default_port=0).host for text in self.config.data_advertise)
        return tuple(dict.fromkeys(own)) or control.advertise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End everything: transfers complete, memory is unmapped, no task, thread or descriptor of ours remains.

        Whoever waits for something of this client meanwhile gets a `ClosedError`. Cancelled, it still ends all of it.
        """
        if self._plane is None:
            return
        self._require_here()
        last_words = self._end_flows()
        control, plane = self.control, self.plane
        try:
            if last_words:  # each has its own limit
                await asyncio.wait(last_words)
            if self._allocator is not None:
                await self._allocator.settle()
        finally:
            async with AsyncExitStack() as ends:  # last in, first out; each runs whatever happens to the others
                ends.callback(self._forget_all)
                ends.callback(self._reporter.stop)
                ends.push_async_callback(plane.aclose)
                ends.push_async_callback(control.aclose)
                ends.push_async_callback(self._boxes.aclose)
                ends.push_async_callback(self._tasks.aclose)

    def _forget_all(self) -> None:
        self._plane = self._control = self._mailboxes = None

    def _end_flows(self) -> list[asyncio.Task[None]]:
        flows, self._flows = self._flows, {}
        telling = []
        for end in flows.values():  # one that fails keeps nobody else's words from being said
            words = end(ClosedError("the client was closed"))
            if words is not None:
                telling.append(self._tasks.spawn(words, "tell of an end"))
        if self._mailboxes is not None:
            self._mailboxes.close()
        return telling

    def enter(self, flow: object, end: EndFlow) -> None:
        """A flow begins that has to hear of it when the client is closed."""
        self._flows[flow] = end

    def leave(self, flow: object) -> None:
        """It has ended."""
        self._flows.pop(flow, None)

    def _require_here(self) -> None:
        if threading.get_ident() != self._thread and self._thread:
            raise WrongThread("this client belongs to another thread", hint="call it on its event loop's thread")
        if forks() != self._fork and self._thread:
            raise ForkedClientError("this client belongs to the parent process", hint="open one after the fork")

    @property
    def closed(self) -> bool:
        """True before it is entered and after its end."""
        return self._plane is None

    @property
    def plane(self) -> DataPlane:
        """The data plane (for tools; transfers normally go through `put`, `get`, `push` and `pull`)."""
        self._require_here()
        if self._plane is None:
            raise ClosedError("the client is not open", hint="use it inside `async with`")
        return self._plane

    @property
    def control(self) -> Control:
        """The link to the daemon (for tools)."""
        self._require_here()
        if self._control is None:
            raise ClosedError("the client is not open", hint="use it inside `async with`")
        return self._control

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where other nodes reach this node's daemon, best first."""
        return self.control.addresses

    @property
    def _boxes(self) -> Mailboxes:
        self._require_here()
        if self._mailboxes is None:
            raise ClosedError("the client is not open", hint="use it inside `async with`")
        return self._mailboxes

    def deadline(self, timeout: float | None) -> Deadline:
        """Of a call that begins now; ``timeout`` None: the configuration's `timeout_s`."""
        return Deadline.after(self.config.timeout_s if timeout is None else timeout)

    def _timeout(self, timeout: float | None) -> float:
        return self.config.timeout_s if timeout is None else seconds(timeout, "timeout")

    def _lease(self, lease_s: float | None) -> float:
        if lease_s is None:
            return self.config.lease_s
        return seconds(lease_s, "lease_s", limit_s=self.config.lease_s_max)

    # -- settling ---------------------------------------------------------------------------------------------

    def release_when_quiet(self, taken: Reservation, quiet: Sequence[asyncio.Future[Any]]) -> asyncio.Future[list[Any]]:
        """End a quarantine when the engine says that no peer can move a byte (never because time passed).

        The future resolves after the blocks are free again.
        """
        all_quiet = asyncio.gather(*quiet)
        all_quiet.add_done_callback(lambda _: self.reservations.release(taken))
        return all_quiet

    def release_when_settled(self, taken: Reservation, transfers: Sequence[Transfer]) -> None:
        """End a quarantine when all transfers are settled."""
        left = sum(not transfer.settled for transfer in transfers)
        if not left:
            self.reservations.release(taken)

        def one_settled(_: Transfer) -> None:
            nonlocal left
            left -= 1
            if not left:
                self.reservations.release(taken)

        for transfer in transfers:
            if not transfer.settled:
                transfer.on_settled(one_settled)

"""A cluster in one event loop: hosts, daemons, workers, and everything that they take from their surroundings.

The idea: `Server` and `Client` run as they are. What reaches outside the process (the native engine, sockets,
randomness, the machine's identity and limits) is replaced by name for as long as a world exists; `replacements` is the
whole list.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from kvxfer import client as life_module
from kvxfer import server as server_module
from kvxfer.client import Client
from kvxfer.config import Config
from kvxfer.config.paths import daemon_socket
from kvxfer.daemon import landing as landing_module
from kvxfer.dataplane.plane import DataPlane
from kvxfer.dataplane.transfer import Transfer
from kvxfer.errors import KvxferError
from kvxfer.flows.control import Control
from kvxfer.memory.region import Region
from kvxfer.native.types import EngineConfig
from kvxfer.net import link as link_module
from kvxfer.net.credentials import Credentials
from kvxfer.net.link import Link
from kvxfer.server import Server
from kvxfer.tasks import TaskOwner
from kvxfer.wire.messages import Settle
from tests.support.sim.data import FLOW, Rows
from tests.support.sim.engine import SimEngine
from tests.support.sim.grants import Grants
from tests.support.sim.invariants import Oracle
from tests.support.sim.loop import PROCESS, Process, SimLoop, current, run_in
from tests.support.sim.network import Host, Listener, Network
from tests.support.sim.versions import Speech, Versions

LAST_EVENTS = 60
CLOCKS_S = (-900.0, 100_000.0)  # by which the clocks of hosts differ from the world's
LEASES_S = (4.0, 4.0, 25.0)  # the long one hides nothing that should have been told
SECRET = "the secret of a simulated cluster"


class Trace:
    """What happened, as a hash over everything and the last events as text."""

    def __init__(self, loop: SimLoop, show: Callable[[str], None] | None) -> None:
        self._loop = loop
        self._hash = hashlib.blake2b(digest_size=16)
        self._show = show
        self._closed = False
        self.detailed = show is not None
        self.last: deque[str] = deque(maxlen=LAST_EVENTS)

    def close(self) -> None:
        """The run is over; what follows does not count."""
        self._closed = True

    def note(self, what: str) -> None:
        """Something that must be the same in every run of the seed."""
        if self._closed:
            return
        owner = PROCESS.get()
        name = "-" if owner is None else owner.name
        line = f"{self._loop.now - 1000:10.6f} step {self._loop.steps:<7} {name:<12} {what}"
        self._hash.update(line.encode())
        self._tell(line)

    def detail(self, what: str) -> None:
        """Something that is shown, and not part of the hash."""
        if self._closed or not self.detailed:
            return
        owner = PROCESS.get()
        name = "-" if owner is None else owner.name
        self._tell(f"{self._loop.now - 1000:10.6f} step {self._loop.steps:<7} {name:<12}   {what}")

    def _tell(self, line: str) -> None:
        self.last.append(line)
        if self._show is not None:
            self._show(line)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


class Daemon:
    """One run of a node's daemon."""

    def __init__(self, world: World, host: Host, config: Config) -> None:
        self.world = world
        self.host = host
        self.config = config
        self.process = world.process(host, f"daemon-{host.name}")
        self.server: Server | None = None
        self.stop = asyncio.Event()
        self.ended: asyncio.Task[None] = run_in(self.process, world.tasks, self._run(config), self.process.name)

    async def _run(self, config: Config) -> None:
        rng = Random(self.world.rng.getrandbits(64))
        try:
            alone = Credentials(config, unconfigured="none")  # nobody else is in that world, and no file of this one
            async with Server(config, clock=self.world.loop.time, rng=rng, credentials=alone) as server:
                self.server = server
                self.world.daemon_is_up(self)
                await self.stop.wait()
                await server.drain()
        finally:
            self.world.note_end(self.process)

    @property
    def ready(self) -> bool:
        return self.process.alive and self.server is not None and self.server.ready


class Worker:
    """One run of a worker process, with a client that is connected to its node's daemon."""

    def __init__(self, world: World, host: Host, number: int, config: Config) -> None:
        self.world = world
        self.host = host
        self.process = world.process(host, f"worker-{host.name}.{number}")
        self.client: Client | None = None
        self.stop = asyncio.Event()
        self.extra: dict[str, Any] = {}
        self.ended: asyncio.Task[None] = run_in(self.process, world.tasks, self._run(config), self.process.name)

    async def _run(self, config: Config) -> None:
        socket = daemon_socket(Path(config.socket_dir))
        try:
            while not self.stop.is_set():
                try:
                    await self._work(Client(socket, config=config, name=self.process.name))
                except KvxferError as error:  # no daemon yet: whoever supervises this process tries again
                    self.world.trace.detail(f"cannot start: {error!r}")
                    await asyncio.sleep(0.2)
        finally:
            self.world.note_end(self.process)

    async def _work(self, client: Client) -> None:
        async with client:
            await self.world.equip(self, client)
            self.client = client
            await self.stop.wait()
            self.client = None

    @property
    def ready(self) -> bool:
        return self.process.alive and self.client is not None


class World:
    """Everything of one seed. Use it inside `replaced`."""

    def __init__(
        self,
        seed: int,
        *,
        show: Callable[[str], None] | None = None,
        speeches: tuple[Speech, ...] = (),
        **options: Any,
    ) -> None:
        self.seed = seed
        self.rng = Random(f"world {seed}")
        self.loop = SimLoop()
        self.network = Network(self.loop, Random(f"network {seed}"))
        self.loop.network = self.network
        self.loop.thread_delay = self.network.latency
        self.trace = Trace(self.loop, show)
        self.oracle = Oracle(self)
        self.loop.on_error = self.oracle.handled
        self.engines: dict[str, SimEngine] = {}
        self.daemons: dict[str, Daemon] = {}
        self.former: list[Daemon] = []  # earlier runs of daemons
        self.workers: list[Worker] = []
        self.options = options
        self.settled: dict[tuple[str, int], str] = {}  # claims that a worker said are over, and which one
        self.versions = Versions(self, speeches)
        self.grants = Grants(self)
        self.lease_s: float = options.get("lease_s", Random(f"lease {seed}").choice(LEASES_S))
        self._clocks = Random(f"clocks {seed}")
        self.full_rate = 0.0
        self.calm_since: Callable[[], float | None] = lambda: 0.0
        self.equip: Callable[[Worker, Client], Any] = _nothing
        self.secrets = Random(f"secrets {seed}")
        self._ports = itertools.count(20000)
        self._numbers = itertools.count(1)
        self._ended: dict[Process, None] = {}
        self._owner = TaskOwner("simulated")

    # -- for the engine ------------------------------------------------------------------------------------------

    def data_port(self) -> int:
        return next(self._ports)

    def engine_is_full(self) -> bool:
        return bool(self.full_rate) and self.rng.random() < self.full_rate

    def coin(self, probability: float) -> bool:
        return self.rng.random() < probability

    def pieces(self, rows: Rows) -> list[Rows]:
        """The segments in one to three pieces; a cut may go through the middle of a segment."""
        if not rows:
            return []
        wanted = self.rng.choice((1, 1, 2, 3))
        if wanted == 1:
            return [rows]
        found: list[Rows] = []
        left = list(rows)
        while left and len(found) < wanted - 1:
            count = self.rng.randrange(len(left)) if len(left) > 1 else 0
            near, far, length = left[count]
            middle = self.rng.randrange(length + 1)
            found.append([*left[:count], (near, far, middle)] if middle else left[:count])
            left = [(near + middle, far + middle, length - middle), *left[count + 1 :]]
        return [piece for piece in (*found, [row for row in left if row[2]]) if piece]

    # -- processes -------------------------------------------------------------------------------------------------

    def tasks(self, work: Any, name: str) -> asyncio.Task[Any]:
        """Start work as the current process."""
        return self._owner.run(work, name)

    def config(self, host: Host) -> Config:
        """Small limits and short times: a minute of trouble in few events."""
        values: dict[str, Any] = {
            "node_name": host.name,
            "listen": host.place,
            "http": "",
            "secret": SECRET,
            "socket_dir": f"/sim/{host.name}",
            "timeout_s": 4.0,
            "connect_s": 1.0,
            "handshake_s": 1.0,
            "lease_s": self.lease_s,
            "lease_s_max": 30.0,
            "wait_s_max": 30.0,
            "keepalive_s": 5.0,
            "dead_s": 1.0,
            "cancel_s": 0.5,
            "drain_s": 2.0,
            "mail_ttl_s": 3.0,
            "landing_bytes_max": 64 << 10,
            "inline_bytes_max": 256,
        }
        return Config(**{**values, **self.options})

    def add_host(self) -> Host:
        number = len(self.network.hosts) + 1
        host = self.network.host(f"n{number}", f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}")
        self.boot(host)
        return host

    def boot(self, host: Host) -> None:
        """Power is on: its clock begins anew, somewhere."""
        host.up = True
        host.clock_s = self._clocks.uniform(*CLOCKS_S)

    def process(self, host: Host, name: str) -> Process:
        """One more process."""
        found = Process(self.loop, host, name)
        found.speech = self.versions.of_new_process()
        return found

    def start_daemon(self, host: Host, config: Config) -> Daemon:
        self.trace.note(f"start daemon-{host.name}")
        if host.name in self.daemons:
            self.former.append(self.daemons[host.name])
        found = self.daemons[host.name] = Daemon(self, host, config)
        return found

    def start_worker(self, host: Host, config: Config) -> Worker:
        worker = Worker(self, host, next(self._numbers), config)
        self.trace.note(f"start {worker.process.name}")
        self.workers.append(worker)
        return worker

    def daemon_is_up(self, daemon: Daemon) -> None:
        assert daemon.server is not None
        self.oracle.follow_daemon(daemon)
        self.trace.note(f"daemon of {daemon.host.name} is up as {daemon.server.incarnation[:8]}")

    def note_end(self, process: Process) -> None:
        """The main function of a process returned."""
        if process.alive and process not in self._ended:
            self._ended[process] = None
            self.trace.note(f"{process.name} ends")

    # -- what is outside -------------------------------------------------------------------------------------------

    def open_engine(self, config: EngineConfig) -> SimEngine:
        return SimEngine(self, config)

    @contextlib.contextmanager
    def replaced(self, more: Iterable[tuple[Any, str, Any]] = ()) -> Iterator[None]:
        """The surroundings of production code, replaced by name for as long as the block runs."""
        before: list[tuple[Any, str, Any]] = []
        log = logging.getLogger("kvxfer")
        level = log.level
        log.setLevel(logging.CRITICAL + 1)
        numbers = itertools.count(1)

        def link_hash(link: Any) -> int:
            if "_sim_number" not in link.__dict__:
                link._sim_number = next(numbers)
            number: int = link._sim_number
            return number

        try:
            for owner, name, value in (
                *replacements(self),
                *self.versions.replacements(),
                *self.grants.replacements(),
                (DataPlane, "_submit", _for_its_flow(DataPlane._submit)),
                (Transfer, "_decide", self._watched(Transfer._decide)),
                (Control, "_send", self._heard(Control._send)),
                # What sits in sets has the same place in them in every run.
                (Link, "__hash__", link_hash),
                (Transfer, "__hash__", lambda transfer: transfer.op_id),
                (Region, "__hash__", lambda region: region.id),
                *([(Link, "_deliver", self._shown(Link._deliver))] if self.trace.detailed else []),
                *more,
            ):
                before.append((owner, name, getattr(owner, name)))
                setattr(owner, name, value)
            yield
        finally:
            for owner, name, value in reversed(before):
                setattr(owner, name, value)
            log.setLevel(level)

    def _watched(self, decide: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
        def decided(transfer: Any, state: Any, error: Any) -> None:
            self.oracle.decided(transfer)
            decide(transfer, state, error)

        return decided

    def _heard(self, send: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        """What workers say about their claims."""

        def heard(control: Any, message: Any) -> None:
            if isinstance(message, Settle) and message.node:
                self.settled[message.posting, message.claim] = current().name
            send(control, message)

        return heard

    def _shown(self, deliver: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        """Each message that is handled, as a line of the trace."""

        def shown(link: Any, message: Any) -> None:
            parts = [type(message).__name__]
            for name in ("rid", "kind", "key", "posting", "claim", "what", "outcome", "code", "detail", "channel"):
                value = getattr(message, name, "")
                if value not in ("", 0):
                    parts.append(f"{name}={str(value)[:24]}")
            self.trace.detail(f"from {link.name}: {' '.join(parts)}")
            deliver(link, message)

        return shown


class _Unix:
    """Stands in for `UnixListener`."""

    def __init__(self, world: World, path: Path) -> None:
        self.path = path
        self.socket: Listener = world.network.listen(str(path))

    def close(self) -> None:
        self.socket.close()


def replacements(world: World) -> tuple[tuple[Any, str, Any], ...]:
    """(module, name, what stands there in a simulated world)."""
    limits = SimpleNamespace(RLIMIT_NOFILE=0, getrlimit=lambda _: (1 << 20, 1 << 20))
    system = SimpleNamespace(getpid=lambda: current().pid, getuid=os.getuid)
    return (
        (server_module, "Engine", world.open_engine),
        (life_module, "Engine", world.open_engine),
        (server_module, "UnixListener", lambda path, **_: _Unix(world, path)),
        (server_module, "listen_tcp", lambda key, address: world.network.listen((address.host, address.port))),
        (server_module, "ensure_socket_dir", lambda path, **_: path),
        (server_module, "stable_node_id", lambda config, _: hashlib.sha256(config.node_name.encode()).hexdigest()[:32]),
        (server_module, "remove_leftovers", lambda *_: 0),
        (server_module, "resource", limits),
        (landing_module, "resource", limits),
        (link_module, "os", system),
        (life_module, "SystemRandom", lambda: Random(world.secrets.getrandbits(64))),
        (secrets, "_sysrand", world.secrets),
    )


def _for_its_flow(submit: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """The engine learns for which request something is submitted, whoever made room for it."""

    def submit_for(plane: Any, work: Any) -> None:
        before = FLOW.set(work.transfer.peer)
        try:
            submit(plane, work)
        finally:
            FLOW.reset(before)

    return submit_for


async def _nothing(_: Worker, __: Client) -> None:
    """Workers need nothing by default."""

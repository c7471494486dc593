"""The daemon: `async with Server(config) as server` is a node that workers and peers can reach.

The idea: everything that can fail at the start (configuration, sockets, engine) happens in one place and in one order,
so a daemon is either fully up or has left nothing behind; the end is the same list backwards. In between this file
does nothing: links speak to the dispatcher, the dispatcher to the registry. Used by `kvxfer serve`, and embedded by
`kvxfer.local()`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import math
import os
import platform
import random
import resource
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from types import TracebackType
from typing import Any

import msgpack

from kvxfer.addresses import format_address, parse_address
from kvxfer.config import Config
from kvxfer.config.paths import daemon_socket, ensure_socket_dir, make_scratch_dir, socket_dir
from kvxfer.daemon.acceptor import Acceptor, Allowed
from kvxfer.daemon.dispatch import Dispatcher
from kvxfer.daemon.forward import Forwarder, settle_late
from kvxfer.daemon.http import HttpServer, Response
from kvxfer.daemon.landing import StagingPool
from kvxfer.daemon.metrics import CONTENT_TYPE, Distribution, EngineCounters, Metrics, Sample, known_code
from kvxfer.daemon.pool import Pool
from kvxfer.dataplane.plane import DataPlane
from kvxfer.descriptors import ACCESS_READ, ACCESS_WRITE
from kvxfer.errors import ClosedError, KvxferError, PeerDraining, ProtocolError, TooManyPending
from kvxfer.logs import logger
from kvxfer.native.ascend import AscendInfo, probe
from kvxfer.native.engine import Engine, EngineConfig, MemoryKind, RegionInfo
from kvxfer.native.installed import installed
from kvxfer.native.transports import accelerators_likely
from kvxfer.native.types import read_counters
from kvxfer.net.credentials import Credentials, Unconfigured
from kvxfer.net.link import Link, LocalIdentity
from kvxfer.net.listeners import LOCK_NAME, UnixListener, bound_address, check_way_back, listen_tcp
from kvxfer.rendezvous.postings import BUCKETS_S
from kvxfer.rendezvous.registry import Registry
from kvxfer.tasks import TaskOwner, in_thread
from kvxfer.wire import messages as m
from kvxfer.wire.session import VERSIONS, Facts

# -- files that killed processes left in the daemon's directory: sockets of engines and files of counters --------------
# The idea: a process that dies cannot clean up, but its daemon sees it die. A socket that refuses a connection has no
# owner any more, and a counters file without such a socket and without its process is history.


ENGINE_CHARS = 12  # of its id, in the names of its files
DEAD_AFTER_S = 60.0


def remove_leftovers(directory: Path, live_engines: Collection[str]) -> int:
    """Remove what nobody owns any more, except files of the engines in ``live_engines`` (hex ids); returns how many."""
    live = {engine_id[:ENGINE_CHARS] for engine_id in live_engines}
    removed = 0
    for path in sorted(directory.glob("e-*.sock")):
        if path.stem.removeprefix("e-") not in live and not _accepts(path):
            removed += _unlink(path)
    for path in directory.glob("c-*.counters"):
        name = path.stem.removeprefix("c-")
        if name not in live and not (directory / f"e-{name}.sock").exists() and not _owner_lives(path):
            removed += _unlink(path)
    return removed


def remove_dead_directories(parent: Path, prefix: str) -> int:
    """Remove the directories of embedded daemons whose processes were killed; returns how many.

    A living one holds the lock in its directory; a young one may not have come to that yet.
    """
    removed = 0
    for directory in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # not ours, or somebody else was faster
            status = directory.lstat()
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if ours and time.time() - status.st_mtime > DEAD_AFTER_S and _lock_is_free(directory / LOCK_NAME):
                shutil.rmtree(directory)
                removed += 1
    return removed


def _lock_is_free(path: Path) -> bool:
    lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except BlockingIOError:  # alive, with a full backlog
            return True
        except OSError:
            return False
    return True


def _owner_lives(path: Path) -> bool:
    try:
        os.kill(read_counters(path).pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError, ProtocolError):  # no such process, no such number, no such file
        return False
    return True


def _unlink(path: Path) -> int:
    with contextlib.suppress(OSError):  # somebody was faster, or it is a directory, which is none of ours
        path.unlink()
        return 1
    return 0


# -- who this node is: an id that stays the same across restarts, and the version of the program -----------------------


MACHINE_ID = Path("/etc/machine-id")


def stable_node_id(config: Config, directory: Path) -> str:
    """32 hex digits out of what tells this daemon from others: machine, name, socket directory and address.

    Two daemons on one host differ in their directory; a daemon that restarts with its old configuration keeps its id.
    """
    try:
        machine = MACHINE_ID.read_text().strip()
    except OSError:
        machine = ""
    parts = ("kvxfer node", machine, socket.gethostname(), config.node_name, str(directory), config.listen)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@cache
def package_version() -> str:
    """The installed version; `0+unknown` when run from a tree that was never installed."""
    try:
        return installed_version("kvxfer")
    except PackageNotFoundError:
        return "0+unknown"


# -- the daemon's own state as samples for `/metrics`: one place that says what is counted and what it means -----------


COUNTS = {
    "workers": "Workers linked to this daemon.",
    "postings": "Live offers, tickets, named regions and landings.",
    "posting_bytes": "Bytes of the bodies of all postings.",
    "claims": "Live claims on postings of this node.",
    "orphans": "Live claims whose claimant's daemon is out of reach.",
    "waiting": "Claims that wait for their posting.",
    "routes": "Live claims of this node's workers on postings of other nodes.",
    "channels": "Channels that hold or listen for messages.",
    "held_messages": "Messages that nobody has received yet.",
    "held_bytes": "Bytes of the messages that nobody has received yet.",
}

log = logger(__name__)


def samples(server: Server) -> Iterator[Sample | Distribution]:
    """Everything but the engines' counters. A part that cannot be told now leaves out nothing but itself."""
    failed = 0
    for part in (_program, _counts, _reports, _links, _credentials, _pool, _landings, _claims, _oddities):
        try:
            found = list(part(server))
        except Exception:  # whatever is wrong with one part, an operator needs the others now
            failed += 1
            log.exception("a part of the metrics cannot be told: %s", part.__name__.strip("_"))
        else:
            yield from found
    text = "Parts of this page that are missing because they could not be told; the log says why."
    yield Sample(name="kvxfer_metrics_missing", help=text, value=failed)


def _program(server: Server) -> Iterator[Sample]:
    build = {"version": package_version(), "protocol": str(VERSIONS[1]), "python": platform.python_version()}
    yield Sample(name="kvxfer_build_info", help="The running program.", value=1, labels=build)
    yield Sample(
        name="kvxfer_start_time_seconds", help="When this incarnation began, Unix time.", value=server.started_at
    )
    yield Sample(name="kvxfer_ready", help="1 while this daemon accepts work.", value=server.ready)
    text = "1 when what tcp moves is encrypted (tcp_encryption)."
    yield Sample(name="kvxfer_tcp_encryption", help=text, value=server.config.encrypts)


def _counts(server: Server) -> Iterator[Sample]:
    counts = server.registry.counts()
    for name, text in COUNTS.items():
        own = 1 if name == "workers" else 0  # the daemon takes part in its registry like a worker
        yield Sample(name=f"kvxfer_{name}", help=text, value=getattr(counts, name) - own)
    yield ignore_fingerprint(server.config)


def _oddities(server: Server) -> Iterator[Sample]:
    for (message, reason), value in server.registry.unexpected.items():
        labels = {"message": message, "reason": reason}
        text = "Messages that fitted no state; harmless."
        yield Sample(name="kvxfer_unexpected", help=text, value=value, labels=labels, counter=True)
    text = "Times that an engine's counters could not be read."
    yield Sample(name="kvxfer_counters_unreadable", help=text, value=server.engines.unreadable, counter=True)


def ignore_fingerprint(config: Config) -> Sample:
    """The override of the operator, visible wherever it is set."""
    text = "1 while this node's configuration lets caches of different models be moved (ignore_fingerprint)."
    return Sample(name="kvxfer_ignore_fingerprint", help=text, value=config.ignore_fingerprint)


def _reports(server: Server) -> Iterator[Sample]:
    reports = server.dispatcher.reports
    text = "Workers that move caches of different models (ignore_fingerprint in their configuration)."
    yield Sample(name="kvxfer_workers_ignore_fingerprint", help=text, value=reports.ignoring_fingerprints)
    text = "Workers that cannot work; /readyz says why."
    yield Sample(name="kvxfer_workers_unready", help=text, value=len(reports.unready))
    for kind, reason, value in reports.unexpected():
        text = "Notices on the data path that fitted nothing, of all workers; harmless."
        labels = {"type": kind, "reason": reason}
        yield Sample(name="kvxfer_unexpected_notifications", help=text, value=value, labels=labels, counter=True)


def _links(server: Server) -> Iterator[Sample]:
    live = {
        "worker": len(server.workers.links),
        "peer_in": len(server.peers.links),
        "peer_out": len(server.pool.links),
        "half_open": server.workers.half_open + server.peers.half_open,
    }
    for kind, value in live.items():
        yield Sample(name="kvxfer_links", help="Control connections.", value=value, labels={"kind": kind})
    for side, acceptor in (("unix", server.workers), ("tcp", server.peers)):
        text = "Incoming control connections that proved themselves."
        labels = {"listener": side}
        yield Sample(name="kvxfer_handshakes", help=text, value=acceptor.handshakes, labels=labels, counter=True)
        for reason, value in acceptor.refused.items():
            text = "Incoming control connections that were refused, or failed before they had proved themselves."
            labels = {"listener": side, "reason": reason}
            yield Sample(name="kvxfer_links_refused", help=text, value=value, labels=labels, counter=True)
    for (role, reason), value in server.links_ended.items():
        labels = {"role": role, "reason": reason}
        text = "Control connections that ended, by the other side's role and the reason."
        yield Sample(name="kvxfer_links_ended", help=text, value=value, labels=labels, counter=True)
    text = "Links that were dropped because the other side did not read."
    yield Sample(name="kvxfer_links_backpressured", help=text, value=server.dispatcher.backpressured, counter=True)
    text = "Events for workers that did not read, merged into later ones."
    yield Sample(name="kvxfer_events_merged", help=text, value=server.dispatcher.events.merged, counter=True)
    text = "Node ids that several daemons have at the same time; the log names them."
    yield Sample(name="kvxfer_twin_nodes", help=text, value=len(server.dispatcher.nodes.twins))
    text = "Bytes that have been received of control messages that are not complete."
    yield Sample(name="kvxfer_link_unfinished_bytes", help=text, value=server.dispatcher.queues.unfinished)
    text = "Bytes that wait to be sent on all control connections."
    yield Sample(name="kvxfer_link_queued_bytes", help=text, value=server.dispatcher.queues.total)
    text = "Settlements that another node could not be told yet; they are repeated."
    yield Sample(name="kvxfer_unsettled", help=text, value=len(server.forwarder.unsettled))
    text = "Replies that came after their request had been given up."
    yield Sample(name="kvxfer_late_replies", help=text, value=server.late_replies, counter=True)


def _credentials(server: Server) -> Iterator[Sample]:
    known = server.credentials
    for what, files in (("tls", "certificates"), ("secret", "the shared secret"), ("node_keys", "this node's keys")):
        text = f"New files of {files} that could not be used; the old ones stayed in force."
        name = f"kvxfer_{what}_reload_failures"
        yield Sample(name=name, help=text, value=known.failures[what], counter=True)
    text = "Seconds until this node's certificate is no longer valid; negative afterwards, infinite without one."
    left_s = math.inf if known.expires_in_s is None else known.expires_in_s
    yield Sample(name="kvxfer_tls_certificate_expires_seconds", help=text, value=left_s)


def _claims(server: Server) -> Iterator[Sample | Distribution]:
    tally = server.registry.tally
    for (kind, reason), value in tally.ended.items():
        text = "Claims on postings of this node that ended, each one once: a push (offer) or a pull (ticket) is one."
        labels = {"kind": kind, "reason": reason}
        yield Sample(name="kvxfer_claims_ended", help=text, value=value, labels=labels, counter=True)
    for (kind, reason), value in tally.refused.items():
        text = "Claims on postings of this node that were refused at once; lease_expired: a read that came too late."
        labels = {"kind": kind, "reason": reason}
        yield Sample(name="kvxfer_claims_refused", help=text, value=value, labels=labels, counter=True)
    for kind, durations in tally.durations.items():
        yield Distribution(
            name="kvxfer_claim_seconds",
            help="Life of the claims that ended, from the match of both sides to the end.",
            bounds_s=BUCKETS_S,
            counts=durations.counts,
            sum_s=durations.sum_s,
            labels={"kind": kind},
        )


def _pool(server: Server) -> Iterator[Sample | Distribution]:
    pool = server.pool
    for state, value in pool.states().items():
        text = "Known peers by the state of their circuit breaker."
        yield Sample(name="kvxfer_breaker_peers", help=text, value=value, labels={"state": state})
    for name, text, value in (
        ("pool_connects", "Attempts to connect to peers.", pool.connects),
        ("pool_connect_failures", "Attempts to connect to peers that failed.", pool.connect_failures),
        ("pool_evicted", "Links that were closed to make room for another peer.", pool.evicted),
    ):
        yield Sample(name=f"kvxfer_{name}", help=text, value=value, counter=True)

    yield Distribution(
        name="kvxfer_connect_seconds",
        help="Time from dialling a peer to the end of its handshake, of those that succeeded.",
        bounds_s=BUCKETS_S,
        counts=pool.connect_times.counts,
        sum_s=pool.connect_times.sum_s,
        labels={},
    )
    yield Sample(
        name="kvxfer_peers_unreached",
        help="Peers that this daemon shall stay connected to, and is not.",
        value=len(pool.unreached()),
    )


def _landings(server: Server) -> Iterator[Sample]:
    pool = server.landings
    for name, text, value in (
        ("landings", "Landings that are written, wait for adoption or are adopted.", pool.live),
        ("landings_quarantined", "Landings that have ended, and that a peer may still reach.", pool.quarantined),
    ):
        yield Sample(name=f"kvxfer_{name}", help=text, value=value)
    for part in pool.parts:
        on_host = part.device is None
        labels = {"memory": "dram" if on_host else "hbm", "device": "" if on_host else str(part.device)}
        for name, text, value in (
            ("landing_used_bytes", "Bytes of the landing pool in use, quarantined ones included.", part.used_bytes),
            ("landing_kept_bytes", "Bytes of the landing pool that are allocated and free.", part.kept_bytes),
            ("landing_bytes_max", "Capacity of the landing pool.", part.bytes_max),
        ):
            yield Sample(name=f"kvxfer_{name}", help=text, value=value, labels=labels)
    for name, text, value in (
        ("landings_committed", "Landings that were written to their end.", pool.landed),
        ("landings_refused", "Landings that were refused because the pool was full.", pool.refused),
    ):
        yield Sample(name=f"kvxfer_{name}", help=text, value=value, counter=True)


PING_KEY, PING_DEVICE_KEY, PING_BYTES = "kvxfer.ping", "kvxfer.ping.device", 1 << 20
EMBEDDED_PREFIX = "kvxfer-local-"
WORKERS_CEILING = 4096  # of the option workers_max
LINKS_SHARE = 0.25  # of this process's descriptors, for each of peers and workers; memory and data need the others
WORKER_DEAD_S_MAX = 60.0
CUT_OFF_S = 0.5  # other nodes may take so long to hear of claims that were cut off
LEFTOVERS_AFTER_S = 1.0  # a killed worker's files are looked for when the kernel is done with it


def embedded_config(**options: Any) -> Config:
    """The configuration of a daemon inside another process; ``options`` override its defaults."""
    return Config.embedded(**options)


class Server:
    """``async with Server(config) as server``: one node's daemon, while the block runs.

    ``embedded`` gives it a socket directory of its own, which ends with it. ``clock`` (monotonic seconds), ``rng``
    (jitter) and ``credentials`` (by default those of the configuration) can be handed in.

    Raises: on entering `ConfigError` (an address that is in use, a file that cannot be read, a mistake in the options),
    `TransportError` (the engine cannot start); nothing is left behind then.
    """

    def __init__(
        self,
        config: Config,
        *,
        embedded: bool = False,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self.config = config
        self._credentials_given = credentials
        self._embedded = embedded
        self._clock = clock
        self._rng = rng or random.Random()
        self._cleanup = AsyncExitStack()
        self._tasks = TaskOwner("daemon")
        self._http = HttpServer({"/metrics": self._scrape, "/healthz": self._healthz, "/readyz": self._readyz})
        self._close_reason = "the daemon ends"
        self.credentials: Credentials
        self._poll_timer: asyncio.TimerHandle | None = None
        self.started_at = time.time()
        self._ended: dict[tuple[str, str], int] = {}
        self.late_replies = 0
        self.engines = EngineCounters()
        self.incarnation = secrets.token_hex(16)
        self.node_id = ""
        self.addresses: tuple[str, ...] = ()
        self.data_hosts: tuple[str, ...] = ()
        self._accelerator: dict[str, object] = {}
        self.ready = False
        self.draining = False
        self.waits_for_peers = False  # until every peer of `preconnect` was reached once
        self._sweeping = False
        self._lapsed: dict[Link, float] = {}  # links that what they were proved with no longer counts for, since when
        self._linked: list[Acceptor | Pool] = []

    # -- life ------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Server:
        try:
            await self._start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self, reason: str = "the daemon ends") -> None:
        """End the daemon: tell every connection ``reason``, close everything, remove the socket. Idempotent.

        Raises nothing of its own.
        """
        self.ready, self.draining = False, True
        self._close_reason = reason
        for party in self._linked:  # all at once: each may take its time to send what is queued
            party.start_close(reason)
        await self._cleanup.aclose()

    async def drain(self) -> bool:
        """Take nothing new, withdraw what nobody claimed, and wait up to `drain_s` for live claims to end.

        What has not ended by then ends as cancelled (``by="draining"``) on both sides. Returns whether all ended by
        themselves. Close the server afterwards. `drain_s` is an option, in seconds. Raises nothing of its own.
        """
        self.ready, self.draining = False, True
        idle = self.dispatcher.drain()
        try:
            async with asyncio.timeout(self.config.drain_s):
                await idle.wait()
        except TimeoutError:
            counts = self.registry.counts()
            log.warning("drain_s is over, %d claims are cancelled", counts.claims + counts.routes)
            self.dispatcher.abort_claimed()
            await self.forwarder.wait_settled(CUT_OFF_S)
            return False
        return True

    async def _start(self) -> None:
        config = self.config
        config.check_security()
        unconfigured: Unconfigured = "make or remember" if self._embedded else "make"
        self.credentials = self._credentials_given or Credentials(config, unconfigured=unconfigured)
        self._directory = self._make_directory()
        unix = UnixListener(daemon_socket(self._directory), shared=bool(config.socket_uids))
        self._cleanup.callback(unix.close)
        self.socket_path = unix.path
        tcp = self._bind("listen", config.listen)
        self.addresses = tuple(str(address) for address in config.advertised(bound_address(tcp)))
        http = self._bind("http", config.http) if config.http else None
        own = secrets.token_hex(16) if self._embedded else stable_node_id(config, self._directory)
        self.node_id = self.credentials.node_id or own  # a certificate says whose it is
        self._open_engine()
        self._open_control()
        await self._accept(unix.socket, tcp)
        await self._share_ping_regions()
        self._accelerator = await self._accelerators()
        if http is not None:
            await self._http.start(http)
        self._cleanup.push_async_callback(self._http.aclose)
        if config.landing_prewarm_bytes:
            self._tasks.spawn(self.landings.prewarm(), "prewarm the landing pool")
        remove_leftovers(self._directory, self._live_engines())
        self._cleanup.callback(self._stop_polling)
        self._poll_credentials()
        self.ready = True

    def _make_directory(self) -> Path:
        if not self._embedded:
            return ensure_socket_dir(socket_dir(self.config), shared=bool(self.config.socket_uids))
        directory = make_scratch_dir(EMBEDDED_PREFIX)
        self._cleanup.callback(shutil.rmtree, directory, ignore_errors=True)
        remove_dead_directories(directory.parent, EMBEDDED_PREFIX)
        return directory

    def _bind(self, key: str, text: str) -> socket.socket:
        listener = listen_tcp(key, parse_address(text))
        self._cleanup.callback(listener.close)
        return listener

    def _open_engine(self) -> None:
        config = self.config
        engine = Engine(EngineConfig.from_config(config, secrets.token_bytes(16), socket_dir=str(self._directory)))
        try:
            self.data_hosts = self._data_hosts(engine)
            self.plane = DataPlane(
                engine, config, node_id=self.node_id, incarnation=self.incarnation, advertise=self.data_hosts
            )
        except BaseException:
            engine.close()
            raise
        self.engine = engine
        level = logging.DEBUG if self._embedded else logging.WARNING
        for name, why in engine.unavailable.items():
            log.log(level, "%s is not used: %s", name, why)
        self._cleanup.push_async_callback(self.plane.aclose)
        self.engines.add("daemon", engine.counters)

    def _data_hosts(self, engine: Engine) -> tuple[str, ...]:
        """The hosts that peers' engines dial; empty: the bound one. Raises `ConfigError`, never names a wildcard."""
        for info in engine.transports:
            if info.endpoint and not info.same_host:
                bound = parse_address(info.endpoint)
                if not self.config.data_advertise and bound.is_wildcard and self.config.advertise:
                    return tuple(dict.fromkeys(parse_address(text).host for text in self.addresses))
                known = self.config.data_advertised(bound)
                return tuple(dict.fromkeys(address.host for address in known)) if known != (bound,) else ()
        return ()

    def _open_control(self) -> None:
        config, clock = self.config, self._clock
        room = replace(config, workers_max=min(WORKERS_CEILING, config.workers_max + 1))  # the daemon itself is one
        self.registry = Registry(room, node_id=self.node_id, incarnation=self.incarnation, random=secrets.token_bytes)
        self.dispatcher = Dispatcher(
            config, self.registry, node_id=self.node_id, clock=clock, status=self._status, incarnation=self.incarnation
        )
        self.dispatcher.own_addresses = frozenset(self.addresses)
        self._cleanup.callback(self.dispatcher.close)
        self._cleanup.push_async_callback(self._tasks.aclose)
        self.pool = Pool(self._dial, self._tasks, config, clock=clock, rng=self._rng, needed=self._needed)
        self._cleanup.push_async_callback(self._close_pool)
        self._linked.append(self.pool)
        self.allowed = Allowed(config)
        self.forwarder = Forwarder(self.pool, self.dispatcher, self._tasks, config, clock, self._rng)
        self.dispatcher.forwarding = self.forwarder
        self.landings = StagingPool(self.plane, self.dispatcher, self._tasks, config, clock)
        self.dispatcher.landings = self.landings

    async def _accept(self, unix: socket.socket, tcp: socket.socket) -> None:
        config = self.config
        # Nobody learns a node's workers; they are told who we are, peers as well.
        identity = self._identity()
        about = self.dispatcher
        common: dict[str, Any] = {"on_message": about.on_message, "on_late": settle_late, "queues": about.queues}
        self.workers = Acceptor(
            config,
            identity,
            roles=("worker", "tool"),
            links_max=self._bounded(config.workers_max + config.handshakes_max),
            on_ready=self._worker_ready,
            authorise=self._admit_worker,
            same_user=True,
            # A worker that computes may not look at its sockets for long; the kernel tells at once when it dies.
            limits=replace(config, dead_s=max(config.dead_s, min(config.lease_s, WORKER_DEAD_S_MAX))),
            **common,
        )
        self.peers = Acceptor(
            config,
            identity,
            roles=("peer", "tool"),
            links_max=self._bounded(config.links_max),
            on_ready=self._peer_ready,
            credentials=self.credentials,
            authorise=self._admit,
            **common,
        )
        for acceptor, listener in ((self.workers, unix), (self.peers, tcp)):
            self._cleanup.push_async_callback(self._close_acceptor, acceptor)
            self._linked.append(acceptor)
            await acceptor.start(listener)

    def _admit(self, identity: Facts) -> None:
        """Who comes from outside has proved who it is, and is on the lists. Raises `NotAllowed`, `TooManyPending`."""
        self.allowed.peer(identity)
        self.dispatcher.nodes.admit(identity)

    def _admit_worker(self, identity: Facts) -> None:
        """The same for this host. Told in the handshake, whoever is one too many knows why it was refused."""
        self.allowed.worker(identity)
        limit = self.config.workers_max
        if identity.role == "worker" and self.registry.workers > limit:  # the daemon itself is one
            hint = "end a worker of this node, or raise workers_max in the daemon's configuration"
            raise TooManyPending("too many workers on this node", option="workers_max", limit=limit, hint=hint)

    def _bounded(self, links_max: int) -> int:
        """Fewer connections than configured when this process may not open so many descriptors: what is refused costs
        less than what breaks off in the middle."""
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        bound = max(1, int(descriptors * LINKS_SHARE))
        if bound < links_max:
            level = logging.DEBUG if self._embedded else logging.WARNING
            log.log(level, "a limit of %d open files allows %d of %d connections", descriptors, bound, links_max)
        return min(links_max, bound)

    async def _close_acceptor(self, acceptor: Acceptor) -> None:
        await acceptor.aclose(self._close_reason)

    async def _close_pool(self) -> None:
        await self.pool.aclose(self._close_reason)

    async def _share_ping_regions(self) -> None:
        """What `kvxfer ping` writes to and reads from: in host memory, and on a device if one is set."""
        self._share_ping_region(PING_KEY, self.engine.alloc(PING_BYTES))
        if self.config.ping_device:
            device = int(self.config.ping_device)
            try:
                on_device = partial(self.engine.alloc, PING_BYTES, kind=MemoryKind.HBM, device=device)
                self._share_ping_region(PING_DEVICE_KEY, await in_thread(on_device))
            except KvxferError as failure:
                log.warning("device %d has no block for `kvxfer ping`: %s", device, failure)

    async def _accelerators(self) -> dict[str, object]:
        """What to tell tools about this node's accelerators: what is installed, and more when a transport for them has
        loaded their libraries.
        """
        if not accelerators_likely():
            return {}
        there = await in_thread(installed)
        kinds = (info for info in self.engine.transports if info.moves(MemoryKind.HBM))
        if all(info.moves(MemoryKind.DRAM) for info in kinds):
            return there
        found = await in_thread(probe)
        if not isinstance(found, AscendInfo):
            return there
        loaded = {"soc": found.soc, "toolkit": found.toolkit, "simulated": found.simulated, "devices": found.devices}
        return there | loaded | ({"reported": found.reported} if found.reported else {})

    def _share_ping_region(self, key: str, region: RegionInfo) -> None:
        descriptor = self.plane.memory.export(region, 0, PING_BYTES, ACCESS_READ | ACCESS_WRITE, None)
        body = msgpack.packb(descriptor.to_dict())
        _, rest = self.dispatcher.post_own(m.Post(kind="region", key=key, body=body, lease_s=0.0))
        self.dispatcher.run(rest)

    # -- links -----------------------------------------------------------------------------------------------

    def preconnect(self, addresses: Sequence[str]) -> None:
        """Connect to a node now and stay connected, so that the first transfer does not wait for it.

        ``addresses``: ``host:port``, several of one node, best first.

        Raises: `ConfigError` when that node could never reach this one, `ClosedError` before the start.
        """
        if not self.ready:
            raise ClosedError("the daemon is not running")
        check_way_back(self.addresses, addresses)
        self.pool.preconnect(addresses)

    async def _dial(self, addresses: Sequence[str], node_id: str) -> Link:
        link = await Link.dial(
            addresses,
            self._identity(),
            self.config,
            credentials=self.credentials,
            authorise=self.allowed.peer,
            expected_node_id=node_id,
            on_message=self.dispatcher.on_message,
            on_late=settle_late,
            queues=self.dispatcher.queues,
        )
        self._watch(link, "peer")
        self.dispatcher.add(link)
        return link

    def _identity(self) -> LocalIdentity:
        config = self.config
        return LocalIdentity(
            role="peer",
            node_id=self.node_id,
            incarnation=self.incarnation,
            name=config.node_name,
            namespace=config.namespace,
        )

    def reload_credentials(self) -> None:
        """Read the files of secret and certificate again now.

        Connections that were proved by what is no longer accepted are closed after `reload_grace_s` seconds. Files that
        cannot be used are logged and counted, and the ones read before stay in use: nothing is raised.
        """
        self.credentials.reload()
        self._poll_links()

    def _poll_credentials(self) -> None:
        if self.credentials.watches:
            self.credentials.poll()
            self._poll_links()
            self._poll_timer = asyncio.get_running_loop().call_later(self.config.reload_s, self._poll_credentials)

    def _poll_links(self) -> None:
        """Give those that have lost their proof a time to be replaced; files may come back meanwhile."""
        now, lapsed = self._clock(), {}
        for link in (*self.peers.links, *self.pool.links):
            if not self.credentials.accepts(link.proved_with, link.authorities, link.peer.node_id):
                lapsed[link] = self._lapsed.get(link, now)
        self._lapsed = lapsed
        for link, since in lapsed.items():
            if now - since >= self.config.reload_grace_s:
                log.warning("%s: what it has proved itself with is no longer accepted", link.name)
                link.start_close("what it was proved with is no longer accepted")

    def _stop_polling(self) -> None:
        if self._poll_timer is not None:
            self._poll_timer.cancel()

    def _needed(self, link: Link) -> bool:
        return self.registry.live_claims(link) > 0

    def _peer_ready(self, link: Link) -> None:
        self._watch(link, link.peer.role)
        self.pool.heard_from(link.peer.node_id)
        self.forwarder.unsettled.heard_from(link.peer.node_id)
        self.dispatcher.add(link)

    def _worker_ready(self, link: Link) -> None:
        self._watch(link, link.peer.role)
        self.engines.add_file(link, link.peer.counters_path, self._directory)
        self.dispatcher.add(link)

    def _watch(self, link: Link, role: str) -> None:
        link.closed.add_done_callback(lambda reason: self._link_ended(link, role, reason.result()))

    def _link_ended(self, link: Link, role: str, reason: KvxferError) -> None:
        key = (role, known_code(reason.code))
        self._ended[key] = self._ended.get(key, 0) + 1
        self.late_replies += link.late_replies
        self.engines.remove(link)
        expected = role == "tool" or isinstance(reason, ClosedError | PeerDraining)
        log.log(
            logging.DEBUG if expected else logging.WARNING,
            "the link to %s %s ended: %s",
            role,
            link.name,
            reason.message,
        )
        if role == "worker" and not self.draining and not self._sweeping:
            self._sweeping = True  # one look for all that end together
            asyncio.get_running_loop().call_later(LEFTOVERS_AFTER_S, self._remove_leftovers)

    def _remove_leftovers(self) -> None:
        self._sweeping = False
        if not self.draining:
            remove_leftovers(self._directory, self._live_engines())

    def _live_engines(self) -> frozenset[str]:
        linked = (link.peer.engine_id for link in self.workers.links)
        return frozenset((self.engine.engine_id.hex(), *linked))

    # -- looking ---------------------------------------------------------------------------------------------

    @property
    def http_address(self) -> str:
        """Where metrics and probes are served; empty: nowhere."""
        return format_address(parse_address(self.config.http).host, self._http.port) if self._http.port else ""

    def _healthz(self) -> Response:
        return Response(body=b"ok\n")

    def _readyz(self) -> Response:
        if self.ready and self.waits_for_peers:
            unreached = self.pool.unreached()
            if unreached:
                return Response(status=503, body="".join(f"waiting for {one}\n" for one in unreached).encode())
            self.waits_for_peers = False
        if self.ready and (unready := self.dispatcher.reports.unready):
            return Response(status=503, body="".join(f"{one}\n" for one in unready).encode())
        if self.ready:
            return Response(body=b"ready\n")
        return Response(status=503, body=b"draining\n" if self.draining else b"starting\n")

    def _scrape(self) -> Response:
        return Response(body=Metrics(self.engines, lambda: samples(self)).render(), content_type=CONTENT_TYPE)

    def _status(self) -> bytes:
        status = {
            "node_id": self.node_id,
            "namespace": self.config.namespace,
            "node_name": self.config.node_name or socket.gethostname(),
            "incarnation": self.incarnation,
            "version": package_version(),
            "protocol": VERSIONS[1],
            "addresses": list(self.addresses),
            "data_advertise": list(self.data_hosts),
            "data_port": self.config.data_port,
            "data_bind": self.config.data_bind_host,
            "hixl_bind": self.config.hixl_bind_host,
            "tcp_encryption": self.config.tcp_encryption,
            "engine_id": self.engine.engine_id.hex(),
            "transports": [info.name for info in self.engine.transports],
            "unavailable": dict(self.engine.unavailable),
            "accelerator": self._accelerator,
            "uptime_s": time.time() - self.started_at,
            "draining": self.draining,
            "counts": asdict(self.registry.counts()),
            "breakers": self.pool.states(),
            "breakers_open": self.pool.given_up(),
            "unsettled": len(self.forwarder.unsettled),
            "landing_used_bytes": self.landings.used_bytes,
        }
        packed: bytes = msgpack.packb(status)
        return packed

    @property
    def links_ended(self) -> Mapping[tuple[str, str], int]:
        """(role, an error's code) to the number of control connections that ended so."""
        return self._ended

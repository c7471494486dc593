"""What must hold in a simulated cluster, whatever happens: while it runs, when it has settled, and at its end.

The idea: the simulator sees what no process can see. It knows for which request each byte is written and whose block it
falls into, so a write into memory that is not (or no longer) promised to that request is caught when it happens, not
when somebody reads garbage. The rest are counts: nothing above its maximum, nothing left behind, nothing twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvxfer.config import Config
from kvxfer.dataplane.transfer import RUNNING, Transfer
from kvxfer.server import Server
from tests.support.sim.loop import PROCESS

if TYPE_CHECKING:
    from kvxfer.client import Client
    from kvxfer.memory.region import KVCache
    from tests.support.sim.data import Grant, Op
    from tests.support.sim.engine import SimEngine
    from tests.support.sim.loop import Process
    from tests.support.sim.world import Daemon, Worker, World

VIOLATIONS_MAX = 20
LEASE_SLACK_S = 0.05  # a timer of the loop has this long to notice a lease that ran out
OWN_POSTINGS = 1  # the daemon's region for `kvxfer ping`


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken promise."""

    kind: str
    text: str
    at_s: float
    step: int

    def __str__(self) -> str:
        return f"{self.kind}: {self.text} (at {self.at_s - 1000:.6f} s, step {self.step})"


class Cache:
    """How one worker's cache lies in its region: enough to find the block of a byte."""

    def __init__(self, client: Client, cache: KVCache, layer_bytes: int, part_bytes: int, block_bytes: int) -> None:
        self.client = client
        self.footprint = cache.footprint
        self.region = cache.regions[0].id
        self.layer_bytes = layer_bytes
        self.part_bytes = part_bytes
        self.block_bytes = block_bytes

    def holders(self, offset: int, length: int) -> set[str]:
        """Who holds the blocks of a span, according to the worker's books; '' for a free one."""
        found: set[str] = set()
        at = offset
        while at < offset + length:
            inside = at % self.layer_bytes % self.part_bytes
            found |= self.client.reservations.holders(self.footprint, inside // self.block_bytes) or {""}
            at += self.block_bytes - inside % self.block_bytes
        return found


class Oracle:
    """Collects what is wrong. ``every`` handled messages of a daemon its registry is checked."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.violations: list[Violation] = []
        self.caches: dict[SimEngine, Cache] = {}
        self.pools: dict[Any, Any] = {}  # the landing pools, by the engines of their daemons
        self.every = 1
        self.looks = 0
        self._seen = 0
        self._closed = False

    def close(self) -> None:
        """The run is over; what follows does not count."""
        self._closed = True

    def wrong(self, kind: str, text: str) -> None:
        """A promise was broken."""
        if self._closed:
            return
        loop = self.world.loop
        self.world.trace.note(f"WRONG {kind}: {text}")
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(Violation(kind=kind, text=text, at_s=loop.now, step=loop.steps))

    # -- bytes -------------------------------------------------------------------------------------------------

    def written(self, owner: SimEngine, grant: Grant, op: Op, offset: int, length: int) -> None:
        """A peer writes into memory of ``owner``."""
        if op.done:
            self.wrong("write_after_end", f"a byte of {op.flow} moves although its token has completed")
        pool = self.pools.get(owner)
        free = () if pool is None else (kept.id for part in pool.parts for kept in part.kept)
        if grant.region.info.id in free:
            self.wrong("unpinned_write", f"{op.flow} writes into a landing of {owner.process.name} that is free")
        cache = self.caches.get(owner)
        if cache is None or grant.region.info.id != cache.region or not length:
            return
        holders = cache.holders(offset, length)
        if holders != {f"offer {grant.flow}"}:
            text = f"{op.flow} writes into {owner.process.name} where {sorted(holders)} is, by a grant of {grant.flow}"
            self.wrong("unpinned_write", text)

    def reached(self, op: Op, grant: Grant, offset: int, length: int) -> None:
        """A peer moves bytes of a grant, whichever way."""
        if grant.blocks is not None and not grant.blocks.covers(offset, length):
            self.wrong("outside_grant", f"{op.flow} reaches bytes that are none of the blocks of {grant.flow}")

    def read_into(self, reader: SimEngine, op: Op, offset: int, length: int) -> None:
        """A get writes into memory of ``reader`` itself."""
        if op.done:
            self.wrong("write_after_end", f"a byte of {op.flow} moves although its token has completed")
        cache = self.caches.get(reader)
        if cache is None or op.region is None or op.region.info.id != cache.region or not length:
            return
        holders = cache.holders(offset, length)
        if holders != {f"pull {op.flow}"}:
            self.wrong("unpinned_write", f"{op.flow} reads into {reader.process.name} where {sorted(holders)} is")

    def decided(self, transfer: Transfer) -> None:
        """A transfer gets its outcome: the first, and the only one."""
        if transfer.state != RUNNING:
            self.wrong("outcome_twice", f"transfer {transfer.op_id} was {transfer.state} already")

    # -- while it runs --------------------------------------------------------------------------------------------

    def follow_daemon(self, daemon: Daemon) -> None:
        """Look at a daemon's books after what it does."""
        server = daemon.server
        assert server is not None
        self.pools[server.engine] = server.landings
        dispatcher: Any = server.dispatcher
        run = dispatcher.run

        def watched(actions: Any) -> None:
            run(actions)
            self._seen += 1
            if self._seen % self.every == 0:
                self.books(daemon)

        dispatcher.run = watched

    def books(self, daemon: Daemon) -> None:
        """The registry of one daemon is consistent, within its limits and on time."""
        self.looks += 1
        server, name = daemon.server, daemon.process.name
        assert server is not None
        registry: Any = server.registry
        self.world.grants.look(daemon)
        now = self.world.loop.now + daemon.process.clock_s
        try:
            registry.check()
        except AssertionError as broken:
            self.wrong("books", f"{name}: {broken or _where(broken)}")
        book = registry._book
        for posting in book._postings.values():
            if posting.deadline is not None and posting.deadline < now - LEASE_SLACK_S:
                self.wrong("lease", f"{name}: the {posting.kind} {posting.key} outlives its lease")
            for claim in posting.claims.values():
                party = claim.party
                if party is not None and (party.node_id, party.incarnation) != (claim.node_id, claim.incarnation):
                    self.wrong("incarnation", f"{name}: a claim on {posting.key} went to another process")
        # The deadlines of a frozen process are not looked at: only its own calls bring us here.
        self._limits(server, name)

    def _limits(self, server: Server, name: str) -> None:
        config: Config = server.config
        pool: Any = server.pool
        counts = {
            "peers_max": len(pool.links),
            "handshakes_max": max(server.workers.half_open, server.peers.half_open),
            "landing_bytes_max": server.landings.used_bytes + server.landings.kept_bytes,
        }
        for limit, count in counts.items():
            if count > getattr(config, limit):
                self.wrong("limit", f"{name}: {count} is above {limit}")
        for link in (*server.workers.links, *server.peers.links, *pool.links):
            if link.unanswered > config.requests_max or link.queued_bytes > config.link_queue_bytes_max + (64 << 10):
                self.wrong("limit", f"{name}: the queues of {link.name} are above their maximum")

    def worker(self, worker: Worker) -> None:
        """The books of one worker."""
        client = worker.client
        if client is None or not worker.process.alive:
            return
        name = worker.process.name
        plane: Any = client.plane
        for what in (plane._queue, client.reservations):
            try:
                what.check()
            except AssertionError as broken:
                self.wrong("books", f"{name}: {type(what).__name__}: {broken or _where(broken)}")
        if plane.engine.stray_events:
            self.wrong("token_twice", f"{name}: events without a token that waits for them")

    def mourned(self, engine_id: str, name: str, since: float) -> None:
        """A worker was killed a while ago, and nothing was in the way of the news: nobody still counts on it.

        What it claimed before ``since`` it may have given up when nobody could hear it; that ends with its lease."""
        for daemon in self.world.daemons.values():
            if not daemon.ready or daemon.server is None:
                continue
            book: Any = daemon.server.registry._book
            for posting in book._postings.values():
                for claim in posting.claims.values():
                    if claim.engine_id != engine_id or claim.since <= since + daemon.process.clock_s:
                        continue
                    text = f"{daemon.process.name} still believes that {name} uses {posting.kind} {posting.key}"
                    self.wrong("not_told", text)

    # -- when all is quiet -----------------------------------------------------------------------------------------

    def settled(self) -> None:
        """Every flow has ended, every lease has run out: what is left belongs to nobody."""
        for daemon in self.world.daemons.values():
            if daemon.ready and daemon.server is not None:
                self.books(daemon)
                self._daemon_settled(daemon.server, daemon.process.name)
        for worker in self.world.workers:
            if worker.ready and worker.client is not None:
                self.worker(worker)
                self._worker_settled(worker.client, worker.process.name)

    def _daemon_settled(self, server: Server, name: str) -> None:
        counts = server.registry.counts()
        plane: Any = server.plane
        left = {
            "claims": counts.claims,
            "orphans": counts.orphans,
            "waiting claims": counts.waiting,
            "routes": counts.routes,
            "held messages": counts.held_messages,
            "postings": counts.postings - OWN_POSTINGS,
            "landings": server.landings.live,
            "quarantined landings": server.landings.quarantined,
            "landing bytes": server.landings.used_bytes,
            "requests to other nodes": server.dispatcher.forwarding.running,  # type: ignore[attr-defined]
            "engine operations": len(plane.engine.ops),
        }
        self._none_left(name, left)
        tally = server.registry.tally
        ended = sum(tally.ended.values())
        timed = sum(sum(times.counts) for times in tally.durations.values())
        if ended != timed:
            self.wrong("outcomes", f"{name}: {ended} claims ended, {timed} were timed")

    def _worker_settled(self, client: Any, name: str) -> None:
        engine, control = client.plane.engine, client.control
        self._none_left(
            name,
            {
                "flows": len(client._flows),
                "pinned blocks": client.reservations.pinned_blocks,
                "quarantined blocks": client.reservations.quarantined_blocks,
                "operations in flight": client.plane._queue.admission.inflight_ops,
                "bytes in flight": client.plane._queue.admission.inflight_bytes,
                "transfers": len(client.plane._by_region) + len(client.plane._workers),
                "regions on their way out": len(client.plane.memory._leaving),
                "parts that wait": len(client.plane._queue),
                "engine operations": len(engine.ops),
                "grants": len(engine.grants),
                "postings": len(control._postings),
                "claims": len(control._claims),
                "messages that wait for a daemon": len(control._unsent),
            },
        )

    def _none_left(self, name: str, left: dict[str, int]) -> None:
        for what, count in left.items():
            if count:
                self.wrong("left_over", f"{name}: {count} {what} when all is quiet")

    # -- the end -----------------------------------------------------------------------------------------------------

    def closed(self, process: Process) -> None:
        """A process that ended in order leaves nothing behind."""
        tasks = [task.get_name() for task in process.tasks if not task.done()]
        if tasks:
            self.wrong("after_close", f"{process.name}: tasks {tasks[:4]}")
        timers = self.world.loop.timers_of(process)
        if timers:
            self.wrong("after_close", f"{process.name}: {len(timers)} timers: {timers[0]!r}")
        if process.ends:
            self.wrong("after_close", f"{process.name}: open {[type(end).__name__ for end in process.ends][:4]}")

    def handled(self, context: dict[str, Any]) -> None:
        """What reaches the loop's exception handler is a bug, except in processes that were killed."""
        owner = PROCESS.get()
        if owner is None and "never retrieved" in str(context.get("message")):
            return  # of a process that was killed: nobody was left to look
        if owner is None or owner.alive:
            error = context.get("exception")
            self.wrong("exception", f"{context.get('message')}: {error!r} {_where(error)}")


def _where(error: BaseException | None) -> str:
    """File and line of the innermost frame."""
    trace = None if error is None else error.__traceback__
    if trace is None:
        return ""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"


def owner_name() -> str:
    """The process that runs now, for messages."""
    owner = PROCESS.get()
    return "-" if owner is None else owner.name

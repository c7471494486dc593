"""A data plane in virtual time: what `kvxfer.native.engine.Engine` promises, without threads, sockets and C.

The idea: the public methods and their meaning are the engine's, and the bytes are real, so a byte in the wrong place is
seen. Two transports stand for the two kinds there are. Over `WIRE` the owner receives every piece and looks at the
grant before it takes it; over `MAPPED` (same host) the initiator writes into the owner's memory by itself, piece by
piece, until it has been told to stop. What native threads would do happens at times that the seed chooses, between any
two callbacks of the process; a frozen process does none of it, a dead one never again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvxfer.native.engine import Event, EventKind, OpKind
from kvxfer.native.status import StatusCode, error_for
from kvxfer.native.types import EngineConfig
from tests.support.sim.data import FLOW, MAPPED, DataLink, Grant, Op, Rows, SimImport
from tests.support.sim.owner import Owner

if TYPE_CHECKING:
    from tests.support.sim.world import World


class SimEngine(Owner):
    """Stands in for `Engine`; belongs to the process that opens it."""

    def __init__(self, world: World, config: EngineConfig) -> None:
        super().__init__(world, config)
        for place in self.places:
            world.engines[place] = self
        self.process.ends[self] = self._killed

    # -- life ------------------------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """`Engine.aclose`; nothing in here takes time."""
        self.close()

    def close(self) -> None:
        if self.closed:
            return
        self._closing = True
        for op in tuple(self.ops.values()):
            self._complete(op, StatusCode.CLOSED)
        for link in (*self.links.values(), *self.accepted):
            self._end_link(link)
            self._link_down(link, tell=False)
        for grant in self.grants.values():
            if grant.token:
                self._push(EventKind.REVOKE, grant.token, grant.info.id, StatusCode.CLOSED)
                grant.token = 0
        self._drain_all()
        for token in tuple(self._pending):
            self._push(EventKind.RELEASE, token, 0, StatusCode.CLOSED)
        self._drain_all()
        self._gone()

    def _gone(self) -> None:
        self.closed = True
        self.process.ends.pop(self, None)
        for place in self.places:
            self.world.engines.pop(place, None)
        self.regions.clear()
        self.grants.clear()
        self.imports.clear()

    def _killed(self, silent: bool) -> None:
        for link in (*self.links.values(), *self.accepted):
            if not silent:
                self._end_link(link)
        self._gone()

    # -- peers ---------------------------------------------------------------------------------------------------

    def connect(self, transport: int, endpoint: str, secret: bytes | None = None) -> tuple[int, asyncio.Future[Event]]:
        if self.closed:
            raise error_for(StatusCode.CLOSED)
        peer = next(self._numbers)
        token, future = self._token()
        loop, network = self.world.loop, self.world.network
        context = self.process.context
        mapped = transport == MAPPED
        give_up_at = loop.time() + self.config.connect_ms / 1000

        def attempt() -> None:
            if self.closed:
                return
            owner = self.world.engines.get(endpoint)
            host = self.process.host if mapped else network.hosts.get(endpoint.rpartition(":")[0])
            hears = host is not None and host.up and not network.cut(self.process.host, host)
            if hears and host is not None and not network.cut(host, self.process.host):
                if owner is not None and owner.process.alive and (not mapped or owner.process.host is host):
                    self._connected(peer, token, owner, mapped)
                else:
                    self._push(EventKind.CONNECT, token, peer, StatusCode.UNREACHABLE)
            elif mapped or loop.time() >= give_up_at:
                self._push(EventKind.CONNECT, token, peer, StatusCode.TIMEOUT)
            else:
                loop.call_later(0.05, attempt, context=context)

        loop.call_later(2 * network.latency(), attempt, context=context)
        return peer, future

    def _connected(self, peer: int, token: int, owner: SimEngine, mapped: bool) -> None:
        link = self.links[peer] = DataLink(peer, self, owner, mapped)
        owner.accepted[link] = None
        self.world.network.healed[link] = link.healed
        self._push(EventKind.CONNECT, token, peer)

    def close_peer(self, peer: int) -> asyncio.Future[Event]:
        if self.closed:
            raise error_for(StatusCode.CLOSED)
        token, future = self._token()
        link = self.links.get(peer)
        if link is None:
            del self._pending[token]
            future.set_result(Event(EventKind.PEER_CLOSED, 0, 0, peer, 0, 0, 0, 0, -1))
            return future
        self._end_link(link)
        self._link_down(link, tell=False)
        self._push(EventKind.PEER_CLOSED, token, peer)
        return future

    def _end_link(self, link: DataLink) -> None:
        """We end the connection, or die; the other side notices a little later."""
        if link.down:
            return
        network = self.world.network
        link.down = True
        network.healed.pop(link, None)
        other = link.owner if link.initiator is self else link.initiator
        delay_s = network.delay(self.process.host, other.process.host)
        network.loop.call_later(delay_s, other._link_down, link, context=other.process.context)

    def _link_down(self, link: DataLink, *, tell: bool = True) -> None:
        """At either side: what depends on the connection ends."""
        if self.closed:
            return
        if link in self.accepted:
            del self.accepted[link]
            for grant in tuple(link.grants):
                lost = grant.links.pop(link, 0)
                grant.waits_for.pop(link, None)
                if lost and not grant.links and not grant.revoked:
                    self._push(EventKind.GRANT_LOST, 0, grant.info.id)
                self._maybe_quiet(grant)
            link.grants.clear()
        if self.links.get(link.number) is link:
            del self.links[link.number]
            for found in tuple(link.imports.values()):
                found.live = False
                for op in tuple(found.ops.values()):
                    self._complete(op, StatusCode.CANCELLED if op.cancelled else StatusCode.PEER_LOST)
                self.imports.pop(found.handle, None)
            if tell:
                self._push(EventKind.PEER_DOWN, 0, link.number)

    def import_(
        self, peer: int, *, grant: int, generation: int, length: int, access: int, key: bytes, mapped: bool = False
    ) -> tuple[int, asyncio.Future[Event]]:
        if self.closed:
            raise error_for(StatusCode.CLOSED)
        link = self.links.get(peer)
        if link is None:
            raise error_for(StatusCode.NO_PEER, what="import", grant=grant)
        handle = next(self._numbers)
        token, future = self._token()
        owner = link.owner

        def answer(status: int, found: Grant | None) -> None:
            if found is not None and not self.closed:
                self.imports[handle] = link.imports[handle] = SimImport(handle, link, found)
            self._push(EventKind.IMPORT, token, handle, status)

        def ask() -> None:
            found = owner.grants.get(grant)
            status = owner.refuses(found, generation, length, access, key)
            if not status and found is not None:
                found.links[link] = found.links.get(link, 0) + 1
                link.grants[found] = 0
            link.send(self, answer, status, None if status else found)

        self._waits(link, token, EventKind.IMPORT, handle)
        link.send(owner, ask)
        return handle, future

    def refuses(self, found: Grant | None, generation: int, length: int, access: int, key: bytes) -> int:
        """Why a peer may not import: a status, 0 when it may."""
        if found is None:
            return StatusCode.UNKNOWN
        if found.info.generation != generation:
            return StatusCode.STALE
        if found.info.key != key:
            return StatusCode.KEY
        if found.revoked:
            return StatusCode.REVOKED
        return 0 if found.info.length == length and found.info.access & access == access else StatusCode.ACCESS

    def _waits(self, link: DataLink, token: int, kind: int, number: int) -> None:
        """A question over a link that ends is answered by its end."""

        def look() -> None:
            if token not in self._pending or self.closed:
                return
            if any(event.token == token for event in self._ring):
                return
            if link.down:
                self._push(kind, token, number, StatusCode.PEER_LOST)
            else:
                self.world.loop.call_later(0.01, look, context=self.process.context)

        self.world.loop.call_later(0.01, look, context=self.process.context)

    def release_import(self, import_: int) -> None:
        if self.closed:
            raise error_for(StatusCode.CLOSED)
        found = self.imports.pop(import_, None)
        if found is None:
            return
        found.released = True
        self._maybe_detach(found)

    def _maybe_detach(self, found: SimImport) -> None:
        if found.released and not found.ops and found.link.imports.pop(found.handle, None) is not None:
            found.link.send(found.link.owner, found.link.owner._detach, found.link, found.grant)

    def _detach(self, link: DataLink, grant: Grant) -> None:
        count = grant.links.get(link, 0)
        if count > 1:
            grant.links[link] = count - 1
        else:
            grant.links.pop(link, None)
            link.grants.pop(grant, None)
            grant.waits_for.pop(link, None)
            self._maybe_quiet(grant)

    def _told_to_stop(self, link: DataLink, grant: Grant) -> None:
        """The owner takes a mapped grant back: our copies end, then it hears so."""
        for found in tuple(link.imports.values()):
            if found.grant is grant:
                found.live = False
                for op in tuple(found.ops.values()):
                    self._complete(op, StatusCode.REVOKED)
        link.send(link.owner, link.owner._answered, link, grant)

    # -- transfers -----------------------------------------------------------------------------------------------

    def submit(
        self,
        kind: int,
        region: int,
        import_: int,
        segments: Any,
        notify: tuple[int, int] | None = None,
        check: bool = False,
        priority: int = 1,
        then: Callable[[Event], None] | None = None,
    ) -> Event | tuple[int, asyncio.Future[Event] | None]:
        rows = [] if segments is None else [(int(a), int(b), int(c)) for a, b, c in segments.tolist()]
        return self._submit(kind, region, import_, rows, notify, then)

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
        priority: int = 1,
        then: Callable[[Event], None] | None = None,
    ) -> Event | tuple[int, asyncio.Future[Event] | None]:
        return self._submit(kind, region, import_, [(local_offset, remote_offset, length)], notify, then)

    def _submit(
        self,
        kind: int,
        region: int,
        import_: int,
        rows: Rows,
        notify: tuple[int, int] | None,
        then: Callable[[Event], None] | None,
    ) -> Event | tuple[int, asyncio.Future[Event] | None]:
        if self.closed:
            raise error_for(StatusCode.CLOSED)
        found = self.imports.get(import_)
        if found is None or found.link.down:
            raise error_for(StatusCode.NO_IMPORT, what="submit", region=region)
        local = self._region(region, "submit") if rows else None
        if len(self.ops) >= self.config.inflight_max or (self.ops and self.world.engine_is_full()):
            raise error_for(StatusCode.AGAIN, what="submit")
        for index, (near, far, length) in enumerate(rows):
            if local is None or near + length > local.info.length:
                raise error_for(StatusCode.LOCAL_RANGE, what="submit", region=region, segment=index)
            if far + length > found.grant.info.length:
                raise error_for(StatusCode.RANGE, what="submit", region=region, segment=index)
        size = sum(length for _, _, length in rows)
        op = Op(0, kind, local, found, rows, notify, FLOW.get())
        right = 2 if kind == OpKind.PUT else 1
        if rows and not found.grant.info.access & right:
            return self._event(op, StatusCode.ACCESS)
        if found.link.mapped and notify is None and size <= self.config.inline_bytes_max and self.world.coin(0.5):
            return self._inline(op, size)
        future: asyncio.Future[Event] | None
        op.token, future = self._token()
        if then is not None:
            self._pending[op.token], future = then, None
        self.ops[op.token] = found.ops[op.token] = op
        if local is not None:
            local.users += 1
        (self._start_mapped if found.link.mapped else self._start_wire)(op)
        return op.token, future

    def _inline(self, op: Op, size: int) -> Event:
        if not op.source.live or (op.source.grant.revoked and not op.source.grant.waits_for):
            return self._event(op, StatusCode.REVOKED)
        self._copy(op, op.rows)
        op.done = True
        return self._event(op, 0, size)

    @staticmethod
    def _event(op: Op, status: int, moved: int = 0) -> Event:
        return Event(EventKind.TRANSFER, int(status), 0, 0, 0, 0, moved, 0, -1)

    def _copy(self, op: Op, rows: Rows) -> None:
        """Move the bytes of some segments; whoever's memory changes is looked at."""
        if op.region is None:
            return
        grant, oracle = op.source.grant, self.world.oracle
        here, memory = op.region.memory, grant.region.memory
        for near, far, length in rows:
            there = grant.offset + far
            oracle.reached(op, grant, far, length)
            if op.kind == OpKind.PUT:
                oracle.written(op.source.link.owner, grant, op, there, length)
                memory[there : there + length] = here[near : near + length]
            else:
                oracle.read_into(self, op, near, length)
                here[near : near + length] = memory[there : there + length]
            op.bytes += length

    def _tell(self, op: Op) -> None:
        """All bytes are there: complete, or first tell the owner and wait until it says that it was told."""
        link = op.source.link
        if op.notify is None:
            self._complete(op, 0)
        else:
            op.told = True
            link.send(link.owner, link.owner._on_notify, op, op.notify)

    def _on_notify(self, op: Op, notify: tuple[int, int]) -> None:
        grant, link = op.source.grant, op.source.link
        if not grant.revoked:
            self._notified(grant, notify)
        link.send(link.initiator, link.initiator._on_told, op, int(StatusCode.REVOKED if grant.revoked else 0))

    def _on_told(self, op: Op, status: int) -> None:
        self._complete(op, status)

    def _notified(self, grant: Grant, notify: tuple[int, int]) -> None:
        if not grant.revoked:
            self._push(EventKind.NOTIFY, 0, grant.info.id, tag=notify[0], value=notify[1])

    # mapped: we write by ourselves, a piece at a time, until told to stop

    def _start_mapped(self, op: Op) -> None:
        pieces = self.world.pieces(op.rows)

        def step() -> None:
            if op.done:
                return
            if op.told:
                return
            if op.cancelled or not op.source.live:
                self._complete(op, StatusCode.CANCELLED if op.cancelled else StatusCode.REVOKED)
            elif pieces:
                self._copy(op, pieces.pop(0))
                self.world.loop.call_later(self.world.network.latency(), step, context=self.process.context)
            else:
                self._tell(op)

        self.world.loop.call_later(self.world.network.latency() / 2, step, context=self.process.context)

    # wire: the owner takes each piece, and says so

    def _start_wire(self, op: Op) -> None:
        pieces = self.world.pieces(op.rows) or [[]]
        op.unsent = len(pieces)
        link = op.source.link

        def step() -> None:
            if op.done:
                return
            if op.cancelled:
                op.unsent = 0
                self._maybe_settled(op)
            elif op.unsent:
                rows = pieces[len(pieces) - op.unsent]
                op.unsent -= 1
                op.unanswered += 1
                link.send(link.owner, link.owner._take_piece, op, rows, self._content(op, rows), not op.unsent)
                if op.unsent:
                    self.world.loop.call_later(self.world.network.latency() / 2, step, context=self.process.context)

        self.world.loop.call_soon(step, context=self.process.context)

    @staticmethod
    def _content(op: Op, rows: Rows) -> list[bytes]:
        if op.kind != OpKind.PUT or op.region is None:
            return [b""] * len(rows)
        return [bytes(op.region.memory[near : near + length]) for near, _, length in rows]

    def _take_piece(self, op: Op, rows: Rows, contents: list[bytes], last: bool) -> None:
        """At the owner."""
        grant, link = op.source.grant, op.source.link
        status = StatusCode.REVOKED if grant.revoked or link not in grant.links else 0
        answers = []
        for (_, far, length), data in zip(rows, () if status else contents, strict=not status):
            there = grant.offset + far
            if op.kind == OpKind.PUT:
                self.world.oracle.written(self, grant, op, there, length)
                grant.region.memory[there : there + length] = data
            else:
                answers.append(bytes(grant.region.memory[there : there + length]))
        op.status = op.status or int(status)
        if last and not op.status and op.notify is not None:
            self._notified(grant, op.notify)
        link.send(link.initiator, link.initiator._piece_answered, op, rows, answers, int(status))

    def _piece_answered(self, op: Op, rows: Rows, answers: list[bytes], status: int) -> None:
        if op.done:
            return
        op.unanswered -= 1
        if not status:
            op.bytes += sum(length for _, _, length in rows)
            if op.region is not None:
                for (near, _, length), data in zip(rows, answers, strict=op.kind == OpKind.GET):
                    self.world.oracle.read_into(self, op, near, length)
                    op.region.memory[near : near + length] = data
        self._maybe_settled(op)

    def _maybe_settled(self, op: Op) -> None:
        if not op.unsent and not op.unanswered:
            self._complete(op, op.status or (StatusCode.CANCELLED if op.cancelled else 0))

    def cancel(self, token: int) -> None:
        if self.closed:
            raise error_for(StatusCode.CLOSED)
        op = self.ops.get(token)
        if op is None or op.cancelled:
            return
        op.cancelled = True
        if op.kind == OpKind.GET and not op.source.link.mapped:
            self._complete(op, StatusCode.CANCELLED)
            return

        def too_long() -> None:
            if not op.done and not op.source.link.mapped:
                self.reset(op.source.link)

        self.world.loop.call_later(self.config.cancel_ms / 1000, too_long, context=self.process.context)

    def reset(self, link: DataLink) -> None:
        if not link.down:
            self._end_link(link)
            self._link_down(link)

    def _complete(self, op: Op, status: int) -> None:
        if op.done:
            return
        op.done = True
        self.used_tokens += 1
        del self.ops[op.token]
        op.source.ops.pop(op.token, None)
        if op.region is not None:
            op.region.users -= 1
        self._push(EventKind.TRANSFER, op.token, 0, status, moved=op.bytes if not status else 0)
        self._maybe_detach(op.source)

    def progress(self, token: int) -> int:
        op = self.ops.get(token)
        return 0 if op is None else max(0, op.bytes - op.unsent - op.unanswered)

    def note_stalled(self, count: int) -> None:
        """Nobody looks."""

    def note_late(self, count: int = 1) -> None:
        """Nobody looks."""

    def counters(self) -> Any:
        raise error_for(StatusCode.UNSUPPORTED, what="counters")

"""The owner's half of a simulated engine: its memory, who may reach it, and how it hears of what happens."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvxfer.block_parts import BlockParts
from kvxfer.native.engine import DRAIN_MAX, Event, EventKind, GrantInfo, MemoryKind, RegionInfo
from kvxfer.native.status import StatusCode, error_for
from kvxfer.native.types import EngineConfig
from tests.support.sim.data import FLOW, DataLink, Grant, Op, SimImport, SimRegion, transports
from tests.support.sim.loop import Process, SimLoop, current

if TYPE_CHECKING:
    from tests.support.sim.network import Host
    from tests.support.sim.world import World


class Owner:
    """The half of an engine that owns memory, and the ring of events."""

    def __init__(self, world: World, config: EngineConfig) -> None:
        self.world = world
        self.config = config
        self.engine_id = config.engine_id
        self.process: Process = current()
        self.stray_events = 0
        self.closed = self._closing = False
        self._loop: SimLoop | None = None
        self._on_event: Callable[[Event], None] | None = None
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Event] | Callable[[Event], None]] = {}
        self.unavailable: dict[str, str] = {}
        self._ring: deque[Event] = deque()
        self._woken = False
        self.regions: dict[int, SimRegion] = {}
        self.grants: dict[int, Grant] = {}
        self.links: dict[int, DataLink] = {}  # those we made
        self.accepted: dict[DataLink, None] = {}
        self.imports: dict[int, SimImport] = {}
        self.ops: dict[int, Op] = {}
        self.used_tokens = 0
        host: Host = self.process.host
        port = world.data_port()
        path = f"/sim/{host.name}/e-{self.engine_id.hex()[:12]}.sock"
        self.places = (path, f"{host.address}:{port}")
        self.transports = transports(*self.places)

    def __repr__(self) -> str:
        return f"<engine of {self.process.name}>"

    def __hash__(self) -> int:
        return int.from_bytes(self.engine_id[:7], "big")

    def attach(self, loop: SimLoop, on_event: Callable[[Event], None]) -> None:
        self._loop, self._on_event = loop, on_event

    def count_choice(self, index: int, choice: int) -> None:
        """Nobody reads the counters here."""

    # -- events ------------------------------------------------------------------------------------------------

    def drain(self) -> int:
        if self.closed:
            raise error_for(StatusCode.CLOSED)
        count = 0
        while self._ring and count < DRAIN_MAX:
            self._hand_out(self._ring.popleft())
            count += 1
        return count

    def _drain_all(self) -> None:
        while self._ring:
            event = self._ring.popleft()
            if event.token:
                self._hand_out(event)

    def _hand_out(self, event: Event) -> None:
        if event.token:
            waiting = self._pending.pop(event.token, None)
            if waiting is None:
                self.stray_events += 1
                self.world.oracle.wrong("token_twice", f"{self}: token {event.token} completed twice")
            elif not isinstance(waiting, asyncio.Future):
                self._call(waiting, event)
            elif not waiting.done():
                waiting.set_result(event)
        elif self._on_event is not None:
            self._call(self._on_event, event)

    def _call(self, listener: Callable[[Event], None], event: Event) -> None:
        if self._closing:
            self.world.loop.call_soon(listener, event, context=self.process.context)
            return
        try:
            listener(event)
        except Exception as error:
            context = {"message": "the listener of engine events failed", "exception": error}
            self.world.loop.call_exception_handler(context)

    def _readable(self) -> None:
        self._woken = False
        if not self.closed and self.drain() == DRAIN_MAX:
            self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self.world.loop.call_soon(self._readable, context=self.process.context)

    def _push(
        self, kind: int, token: int, number: int, status: int = 0, *, tag: int = 0, value: int = 0, moved: int = 0
    ) -> None:
        self._ring.append(Event(kind, int(status), token, number, tag, value, moved, 0, -1))
        self._wake()

    def _token(self) -> tuple[int, asyncio.Future[Event]]:
        assert self._loop is not None
        token = next(self._numbers)
        future = self._pending[token] = self._loop.create_future()
        return token, future

    # -- memory ------------------------------------------------------------------------------------------------

    def alloc(
        self,
        length: int,
        numa_node: int | None = None,
        *,
        kind: MemoryKind = MemoryKind.DRAM,
        device: int | None = None,
        spill: bool = False,
    ) -> RegionInfo:
        if kind is not MemoryKind.DRAM:
            raise error_for(StatusCode.NO_DEVICE, what="alloc", length=length)
        if self.closed:
            raise error_for(StatusCode.CLOSED)
        number = next(self._numbers)
        info = RegionInfo(
            id=number,
            generation=self.world.rng.getrandbits(48),
            address=number << 32,
            length=length,
            flags=1,
            references=1,
            numa_node=-1,
            kind=MemoryKind.DRAM,
            device=None,
        )
        self.regions[number] = SimRegion(info, memoryview(bytearray(length)))
        return info

    def buffer(self, region: RegionInfo) -> memoryview:
        found = self.regions.get(region.id)
        if found is None:
            raise error_for(StatusCode.NO_REGION, what="buffer", region=region.id)
        return found.memory

    def release(self, region: int) -> asyncio.Future[Event]:
        found = self._region(region, "release")
        if found.users:
            raise error_for(StatusCode.BUSY, what="release", region=region)
        found.leaving = True
        token, future = self._token()
        mine = [grant for grant in self.grants.values() if grant.region is found]
        for grant in mine:
            self._revoke(grant)

        def look() -> None:
            if any(grant.info.id in self.grants for grant in mine):
                self.world.loop.call_later(0.001, look, context=self.process.context)
            elif not self.closed:
                self.regions.pop(region, None)
                self._push(EventKind.RELEASE, token, region)

        look()
        return future

    def _region(self, region: int, what: str) -> SimRegion:
        if self.closed:
            raise error_for(StatusCode.CLOSED)
        found = self.regions.get(region)
        if found is None or found.leaving:
            raise error_for(StatusCode.NO_REGION, what=what, region=region)
        return found

    def grant(self, region: int, offset: int, length: int, access: int, blocks: BlockParts | None = None) -> GrantInfo:
        found = self._region(region, "grant")
        if offset + length > found.info.length or not length:
            raise error_for(StatusCode.LOCAL_RANGE, what="grant", region=region)
        number = next(self._numbers)
        key = self.world.rng.randbytes(16)
        info = GrantInfo(id=number, generation=found.info.generation, length=length, access=access, key=key)
        self.grants[number] = Grant(info, found, offset, FLOW.get(), blocks)
        return info

    def revoke(self, grant: int) -> asyncio.Future[Event]:
        if self.closed:
            raise error_for(StatusCode.CLOSED)
        found = self.grants.get(grant)
        if found is None or found.token:
            raise error_for(StatusCode.NO_GRANT, what="revoke", grant=grant)
        token, future = self._token()
        found.token = token
        self._revoke(found)
        return future

    def _revoke(self, grant: Grant) -> None:
        grant.revoked = True
        for link in tuple(grant.links):
            if link.mapped and link not in grant.waits_for:
                grant.waits_for[link] = None
                link.send(link.initiator, link.initiator._told_to_stop, link, grant)
        self._maybe_quiet(grant)

    def _answered(self, link: DataLink, grant: Grant) -> None:
        grant.waits_for.pop(link, None)
        self._maybe_quiet(grant)

    def _maybe_quiet(self, grant: Grant) -> None:
        if grant.revoked and not grant.waits_for and self.grants.get(grant.info.id) is grant:
            del self.grants[grant.info.id]
            token, grant.token = grant.token, 0
            if token:
                self._push(EventKind.REVOKE, token, grant.info.id)

    def attached(self, grant: int) -> int:
        found = self.grants.get(grant)
        return -1 if found is None else sum(found.links.values())

    def mapping(self, import_: int) -> memoryview | None:
        found = self.imports.get(import_)
        if found is None:
            raise error_for(StatusCode.NO_IMPORT, what="mapping")
        if not found.link.mapped:
            return None
        grant = found.grant
        view = grant.region.memory[grant.offset : grant.offset + grant.info.length]
        return view if grant.info.access & 2 else view.toreadonly()

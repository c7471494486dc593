"""What a simulated data plane is made of: regions, grants, imports, operations, and the links between engines."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvxfer.block_parts import BlockParts
from kvxfer.native.types import Caps, GrantInfo, RegionInfo, TransportInfo
from tests.support.sim.network import TICK_S

if TYPE_CHECKING:
    from tests.support.sim.engine import SimEngine

MAPPED, WIRE = 0, 1  # indices of the transports
Rows = list[tuple[int, int, int]]  # local offset, remote offset, length
FLOW: ContextVar[str] = ContextVar("flow", default="")  # the request for which something is done
_BASE = Caps.PUT | Caps.GET | Caps.NOTIFY | Caps.CHECK


@dataclass(slots=True, eq=False)
class SimRegion:
    """Registered memory."""

    info: RegionInfo
    memory: memoryview
    users: int = 0
    leaving: bool = False


@dataclass(slots=True, eq=False)
class Grant:
    """The right to reach a part of a region, and the links that use it."""

    info: GrantInfo
    region: SimRegion
    offset: int
    flow: str
    blocks: BlockParts | None = None  # what of it may be reached
    links: dict[DataLink, int] = field(default_factory=dict)
    revoked: bool = False
    token: int = 0
    waits_for: dict[DataLink, None] = field(default_factory=dict)  # mapped initiators that have not answered
    lost: bool = False


@dataclass(slots=True, eq=False)
class SimImport:
    """A remote grant that this engine may use."""

    handle: int
    link: DataLink
    grant: Grant
    live: bool = True
    released: bool = False
    ops: dict[int, Op] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Op:
    """One submitted operation."""

    token: int
    kind: int
    region: SimRegion | None
    source: SimImport
    rows: Rows
    notify: tuple[int, int] | None
    flow: str
    unsent: int = 0  # pieces that have not been started
    unanswered: int = 0  # pieces on the wire
    status: int = 0
    bytes: int = 0
    cancelled: bool = False
    told: bool = False  # its notification is on the way
    done: bool = False


class DataLink:
    """A connection between an initiator and an owner: two pipes in order, and one end."""

    def __init__(self, number: int, initiator: SimEngine, owner: SimEngine, mapped: bool) -> None:
        self.number = number
        self.initiator = initiator
        self.owner = owner
        self.mapped = mapped
        self.down = False
        self.imports: dict[int, SimImport] = {}
        self.grants: dict[Grant, int] = {}
        self.arrival = {initiator: 0.0, owner: 0.0}
        self.stalled: dict[SimEngine, list[tuple[Callable[..., None], tuple[Any, ...]]]] = {initiator: [], owner: []}

    def __hash__(self) -> int:
        return self.number

    def send(self, target: SimEngine, call: Callable[..., None], *args: Any) -> None:
        """Let ``call`` happen at the other side, after all that was sent before."""
        if self.down:
            return
        source = self.owner if target is self.initiator else self.initiator
        network = target.world.network
        here, there = source.process.host, target.process.host
        if self.stalled[target] or network.cut(here, there):
            self.stalled[target].append((call, args))
            return
        if not there.up:
            return
        at = self.arrival[target] = max(self.arrival[target] + TICK_S, network.loop.now + network.delay(here, there))
        network.loop.at(at, self._arrive, call, args, context=target.process.context)

    def _arrive(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.down:
            call(*args)

    def healed(self) -> None:
        """A partition has ended: what waits is sent again."""
        for target in (self.initiator, self.owner):
            waiting, self.stalled[target] = self.stalled[target], []
            for call, args in waiting:
                self.send(target, call, *args)


def transports(path: str, place: str) -> tuple[TransportInfo, TransportInfo]:
    """The two kinds there are, `MAPPED` and `WIRE`."""
    return (
        _transport(MAPPED, "shm", path, _BASE | Caps.INLINE | Caps.MAP | Caps.SAME_HOST),
        _transport(WIRE, "tcp", place, _BASE),
    )


def _transport(index: int, name: str, endpoint: str, caps: int) -> TransportInfo:
    return TransportInfo(
        index=index,
        name=name,
        endpoint=endpoint,
        caps=caps,
        rank=index,
        alignment=1,
        region_bytes_max=1 << 40,
        copies_per_byte=1.0,
        memory=1,
        local_memory=1,
    )

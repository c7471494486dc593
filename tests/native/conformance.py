"""The harness of the conformance suite: two engines and one transport between them.

A transport joins the suite by its name in `TRANSPORTS` (`conformance_pairs.py`); nothing else is written per transport.
The cases are in `conformance_moving.py`, `conformance_refusing.py` and `conformance_ending.py`, and run from
`test_conformance.py`. `loop` reaches its own engine only, so there both sides are one.

"shm@process": the owner is in another process (`owner_process.py`), one for all cases, with fresh engines for each.

"tcp@encrypted" is tcp with `tcp_encryption` on both sides. "hixl:hbm-pinned:network" also says what memory the owner
and the initiator have, and which way the bytes are to go. Those need (simulated) cards and a process of their own:
`hixl_suite.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from kvxfer.block_parts import BlockParts
from kvxfer.native.engine import Engine, EngineConfig, Event, EventKind, GrantInfo, MemoryKind, OpKind, RegionInfo
from tests.native.device_bytes import DeviceBytes

if TYPE_CHECKING:
    from tests.native.owner_process import Owners

LIMIT_S = 10.0
READ, WRITE, BOTH = 1, 2, 3
KIB, MIB = 1024, 1 << 20
INLINE_MAX = 4 * KIB
Bytes = npt.NDArray[np.uint8]
Outcome = Event | tuple[int, "asyncio.Future[Event]"]
T = TypeVar("T")


async def within(waiting: Awaitable[T]) -> T:
    """Await with the suite's time limit: nothing here may take long, and nothing may hang."""
    slack = float(os.environ.get("KVXFER_TEST_SLACK", "1"))
    return await asyncio.wait_for(waiting, LIMIT_S * slack)


async def settled(outcome: Outcome) -> Event:
    """The completion of a submit, inline or not."""
    if isinstance(outcome, Event):
        return outcome
    return await within(asyncio.shield(outcome[1]))


def segments(*rows: tuple[int, int, int]) -> npt.NDArray[np.uint64]:
    return np.array(rows, dtype=np.uint64).reshape(-1, 3)


class Heard:
    """What an engine said without being asked."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.listener: Callable[[Event], None] | None = None
        self._arrived = asyncio.Event()

    def hear(self, event: Event) -> None:
        if self.listener is not None:
            self.listener(event)
        self.events.append(event)
        self._arrived.set()

    async def event(self, kind: EventKind) -> Event:
        """The oldest event of this kind; waits for it."""

        async def find() -> Event:
            while True:
                for index, event in enumerate(self.events):
                    if event.kind == kind:
                        return self.events.pop(index)
                self._arrived.clear()
                await self._arrived.wait()

        return await within(find())


class Side(Heard):
    """An engine, its memory, and what it said."""

    def __init__(
        self,
        directory: Path,
        transports: tuple[str, ...],
        kind: MemoryKind = MemoryKind.DRAM,
        device: int | None = None,
        **changes: Any,
    ) -> None:
        super().__init__()
        self.kind, self.device = kind, device
        values: dict[str, Any] = {
            "engine_id": os.urandom(16),
            "transports": transports,
            "socket_dir": str(directory),
            "copy_threads": 1,
            "tcp_threads": 1,
            "tcp_streams": 2,
            "inline_bytes_max": INLINE_MAX,
            "nt_bytes_min": 256 * KIB,
            "chunk_bytes": 64 * KIB,
            "frame_bytes": 64 * KIB,
            "connect_ms": 3000,
            "cancel_ms": 500,
        }
        self.engine = Engine(EngineConfig(**(values | changes)))
        self.engine.attach(asyncio.get_running_loop(), lambda event: self.hear(event))
        self._seen: list[tuple[int, ...]] = []

    def alloc(self, length: int) -> tuple[RegionInfo, Bytes]:
        """A new region and its bytes."""
        region = self.engine.alloc(length, kind=self.kind, device=self.device)
        if region.on_device:
            return region, cast(Bytes, DeviceBytes(self.engine, region))
        return region, np.frombuffer(self.engine.buffer(region), dtype=np.uint8)

    def register(self, length: int, *, read_only: bool = False) -> tuple[RegionInfo, Bytes]:
        """The same with memory of our own; pages of it that nobody touches take no memory."""
        memory = np.zeros(length, dtype=np.uint8)
        return self.engine.register(memory.ctypes.data, length, read_only=read_only), memory

    def make(self, how: str, length: int) -> tuple[RegionInfo, Bytes]:
        ours = how == "alloc" or self.kind != MemoryKind.DRAM  # registering device memory: test_hixl.py
        return self.alloc(length) if ours else self.register(length)

    def watch(self, memory: Bytes, *places: int) -> None:
        """At each notification from now on, look at once what stands in these places."""

        def look(event: Event) -> None:
            self._seen.append((event.tag, *(int(memory[place]) for place in places)))

        self.listener = look

    def watched(self) -> list[tuple[int, ...]]:
        """Tags, each with what was seen."""
        return self._seen

    def close(self) -> None:
        self.engine.close()
        assert self.engine.stray_events == 0, "a token completed twice, or one that nobody submitted did"


class Pair:
    """Owner (whose memory is reached) and initiator, with one transport under test.

    With a process for the owners, what has the type of a `Side` on that side is its handle.
    """

    def __init__(self, directory: Path, name: str, owners: Owners | None = None) -> None:
        self.directory = directory
        name, _, variant = name.partition("@")
        assert variant in ("", "process", "encrypted")
        self.owners = owners
        assert (variant == "process") == (self.owners is not None)
        self.encrypted = variant == "encrypted"
        transport, _, rest = name.partition(":")
        kinds, _, way = rest.partition(":")
        owner, _, initiator = (kinds or "dram-dram").partition("-")
        self.kinds = MemoryKind[owner.upper()], MemoryKind[initiator.upper()]
        self.way = way
        self.transport = transport
        self.base = transport.removeprefix("fault+")
        self.one_engine = self.base == "loop"
        self._sides: list[Side] = []
        self._owner: Side | None = None
        self._initiator: Side | None = None

    def configure(self, **changes: Any) -> None:
        """Open the engines with other settings than the suite's."""
        assert all(side.engine.closed for side in self._sides)
        self._owner = self.side(0, **changes)
        self._initiator = self._owner if self.one_engine else self.side(1, **changes)

    def side(self, which: int = 0, **changes: Any) -> Side:
        kind = self.kinds[which]
        device = None if kind == MemoryKind.DRAM else which
        if self.way:
            changes["device_ipc"] = self.way == "copy"
        if self.encrypted:
            changes = {"tcp_encryption": "on"} | changes
        arguments = (self.directory, (self.transport,), kind, device)
        if which == 0 and self.owners is not None:
            made = cast(Side, self.owners.open(*arguments, **changes))
        else:
            made = Side(*arguments, **changes)
        self._sides.append(made)
        return made

    @property
    def pids(self) -> list[int]:
        """The processes that take part."""
        return [os.getpid()] + ([] if self.owners is None else [self.owners.pid])

    @property
    def owner(self) -> Side:
        if self._owner is None:
            self.configure()
        assert self._owner is not None
        return self._owner

    @property
    def initiator(self) -> Side:
        assert self.owner
        assert self._initiator is not None
        return self._initiator

    @property
    def index(self) -> int:
        return 0 if self.one_engine else 1

    @property
    def info(self) -> Any:
        return self.owner.engine.transports[self.index]

    async def connect(self) -> int:
        peer, done = self.initiator.engine.connect(self.index, self.info.endpoint, self.info.secret)
        event = await within(done)
        assert (event.kind, event.status, event.id) == (EventKind.CONNECT, 0, peer)
        return peer

    async def try_import(self, peer: int, given: GrantInfo, /, **changes: Any) -> tuple[int, Event]:
        """Import a grant as it is, or with fields that its owner did not say."""
        values = {
            "grant": given.id,
            "generation": given.generation,
            "length": given.length,
            "access": given.access,
            "key": given.key,
        }
        handle, done = self.initiator.engine.import_(peer, **(values | changes))
        return handle, await within(done)

    async def import_(self, peer: int, grant: GrantInfo) -> int:
        handle, event = await self.try_import(peer, grant)
        assert event.status == 0, event
        return handle

    async def reach(
        self,
        length: int,
        *,
        access: int = BOTH,
        how: str = "alloc",
        local: int | None = None,
        blocks: BlockParts | None = None,
    ) -> Reach:
        """All that a transfer needs: memory on both sides, a grant, a peer and an import."""
        remote, remote_bytes = self.owner.make(how, length)
        mine, mine_bytes = self.initiator.make(how, length if local is None else local)
        grant = self.owner.engine.grant(remote.id, 0, length, access, blocks)
        peer = await self.connect()
        return Reach(self, remote, remote_bytes, mine, mine_bytes, grant, peer, await self.import_(peer, grant))

    def close(self) -> None:
        for side in self._sides:
            side.close()


class Reach:
    """A remote region that is ready for use, and local memory to go with it."""

    def __init__(
        self,
        pair: Pair,
        remote: RegionInfo,
        remote_bytes: Bytes,
        mine: RegionInfo,
        mine_bytes: Bytes,
        grant: GrantInfo,
        peer: int,
        import_: int,
    ) -> None:
        self.pair = pair
        self.remote, self.remote_bytes = remote, remote_bytes
        self.mine, self.mine_bytes = mine, mine_bytes
        self.grant, self.peer, self.import_ = grant, peer, import_
        self.engine = pair.initiator.engine

    def one(self, kind: OpKind, local: int, remote: int, length: int, **more: Any) -> Outcome:
        return self.engine.submit_one(kind, self.mine.id, self.import_, local, remote, length, **more)

    def put(self, local: int, remote: int, length: int, **more: Any) -> Outcome:
        return self.one(OpKind.PUT, local, remote, length, **more)

    def get(self, local: int, remote: int, length: int, **more: Any) -> Outcome:
        return self.one(OpKind.GET, local, remote, length, **more)

    def many(self, kind: OpKind, rows: npt.NDArray[np.uint64] | None, **more: Any) -> Outcome:
        return self.engine.submit(kind, self.mine.id, self.import_, rows, **more)

    def notify(self, tag: int, value: int = 0) -> Outcome:
        return self.engine.submit(OpKind.PUT, 0, self.import_, None, notify=(tag, value))

    def fill(self, seed: int = 1) -> None:
        """Different random bytes on both sides."""
        rng = np.random.default_rng(seed)
        self.mine_bytes[:] = rng.integers(0, 256, len(self.mine_bytes), dtype=np.uint8)
        self.remote_bytes[:] = rng.integers(0, 256, len(self.remote_bytes), dtype=np.uint8)


@contextlib.contextmanager
def short_directory() -> Any:
    """Socket paths are limited to 107 bytes, which pytest's own directories can exceed."""
    directory = Path(tempfile.mkdtemp(prefix="kvx-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)

"""An engine with memory of simulated cards in a process of its own, told what to do by a line of JSON at a time.

Run as a script it obeys; imported, `Other` is the handle on such a process, and `Near` the engine of this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer.native.engine import Engine, EngineConfig, Event, EventKind, GrantInfo, MemoryKind, OpKind, RegionInfo

ROOT = Path(__file__).parents[2]
LIMIT_S = 15.0
MIB = 1 << 20
CONFIG: dict[str, Any] = {
    "transports": ("hixl",),
    "copy_threads": 1,
    "device_ipc": False,
    "hbm_arena_bytes": 64 * MIB,
    "pinned_arena_bytes": 16 * MIB,
    "connect_ms": 400,
    "cancel_ms": 200,
}


def control(pid: int | None = None, **values: object) -> None:
    """Faults of the simulation from now on, for all processes or for one; none ends them."""
    path = Path(os.environ["KVXFER_SIM_DIR"]) / ("control" if pid is None else f"control.{pid}")
    fresh = path.with_suffix(path.suffix + ".new")
    fresh.write_text("".join(f"KVXFER_SIM_{name}={value}\n" for name, value in values.items()))
    fresh.rename(path)


def open_engine(changes: dict[str, Any]) -> Engine:
    return Engine(EngineConfig(engine_id=os.urandom(16), **(CONFIG | changes)))


async def within(waiting: Any, seconds: float = LIMIT_S) -> Any:
    return await asyncio.wait_for(asyncio.shield(waiting), seconds)


def told(grant: GrantInfo, length: int) -> dict[str, Any]:
    """A grant as another process is told of it."""
    values = {"grant": grant.id, "generation": grant.generation, "length": length, "access": 3}
    return values | {"key": grant.key.hex()}


def counts(memory: Any) -> list[int]:
    return [int(count) for count in np.bincount(memory, minlength=256)]


async def settle() -> None:
    """Until the simulation has seen a `control`, and what it let go of has moved."""
    await asyncio.sleep(0.04)


class Near:
    """This process's engine, as a context."""

    def __init__(self, **changes: Any) -> None:
        self.engine = open_engine(changes)
        self.events: list[Event] = []
        self.engine.attach(asyncio.get_running_loop(), self.events.append)

    async def __aenter__(self) -> Near:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.engine.close()
        assert self.engine.stray_events == 0

    @property
    def endpoint(self) -> str:
        return self.engine.transports[1].endpoint

    def alloc(
        self, length: int, kind: MemoryKind = MemoryKind.HBM, device: int = 0, fill: int | None = 0
    ) -> RegionInfo:
        region = self.engine.alloc(length, kind=kind, device=device)
        if fill is not None:
            self.fill(region, fill)
        return region

    def fill(self, region: RegionInfo, value: int) -> None:
        self.engine.write(region.id, 0, np.full(region.length, value, np.uint8))

    def read(self, region: RegionInfo) -> Any:
        out = np.empty(region.length, np.uint8)
        self.engine.read_into(region.id, 0, out)
        return out

    async def connect(self, endpoint: str) -> int:
        peer, done = self.engine.connect(1, endpoint)
        event = await within(done)
        assert event.status == 0, event
        return int(peer)

    async def import_(self, peer: int, grant: dict[str, Any]) -> int:
        values = grant | {"key": bytes.fromhex(grant["key"])}
        handle, done = self.engine.import_(peer, **values)
        event = await within(done)
        assert event.status == 0, event
        return int(handle)

    async def reach(self, other: Other, length: int = MIB, kind: str = "HBM", device: int = 1) -> int:
        grant = await other.call("offer", length=length, kind=kind, device=device)
        return await self.import_(await self.connect(other.endpoint), grant)

    def start(self, kind: OpKind, region: RegionInfo, import_: int, length: int | None = None, **more: Any) -> Any:
        outcome = self.engine.submit_one(kind, region.id, import_, 0, 0, length or region.length, **more)
        assert isinstance(outcome, tuple), "hixl completes nothing within the call"
        return outcome

    async def move(self, kind: OpKind, region: RegionInfo, import_: int, **more: Any) -> int:
        event = await within(self.start(kind, region, import_, **more)[1])
        return int(event.status)

    async def begin(self, kind: OpKind, region: RegionInfo, import_: int) -> Any:
        """A `start` that is with the library when this returns; the future of its end."""

        async def more_than(before: int) -> None:
            while self.batches <= before:
                await asyncio.sleep(0.002)

        before = self.batches
        _, ending = self.start(kind, region, import_)
        await asyncio.wait_for(more_than(before), LIMIT_S)
        return ending

    @property
    def batches(self) -> int:
        """Handed to the library so far."""
        return self.engine.counters().transports[1].frames

    async def event(self, kind: EventKind) -> Event:
        async def find() -> Event:
            while True:
                for index, event in enumerate(self.events):
                    if event.kind == kind:
                        return self.events.pop(index)
                await asyncio.sleep(0.002)

        return await asyncio.wait_for(find(), LIMIT_S)


class Other:
    """An engine in another process."""

    def __init__(self, process: asyncio.subprocess.Process, endpoint: str) -> None:
        self.process, self.endpoint, self.pid = process, endpoint, process.pid

    @classmethod
    async def start(cls, **changes: Any) -> Other:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.native.hixl_process", json.dumps(changes)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), LIMIT_S)
        return cls(process, json.loads(line)["endpoint"])

    async def call(self, what: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"what": what} | arguments).encode() + b"\n")
        line = await asyncio.wait_for(self.process.stdout.readline(), LIMIT_S)
        return json.loads(line)

    def signal(self, number: int) -> None:
        """A process is stopped when the last of its threads is, which may be a while later: waits for that."""
        self.process.send_signal(number)
        deadline = time.monotonic() + LIMIT_S
        while number == signal.SIGSTOP and not self._stopped():
            assert time.monotonic() < deadline, "it does not stop"
            time.sleep(0.001)

    def _stopped(self) -> bool:
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)

    async def end(self) -> None:
        for number in (signal.SIGCONT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)
        await asyncio.wait_for(self.process.wait(), LIMIT_S)
        self.process._transport.close()  # type: ignore[attr-defined]  # the pipes too, now


@contextlib.asynccontextmanager
async def other(**changes: Any) -> AsyncIterator[Other]:
    made = await Other.start(**changes)
    try:
        yield made
    finally:
        await made.end()


class Servant:
    """In the child."""

    def __init__(self, changes: dict[str, Any]) -> None:
        self.near = Near(**changes)
        self.regions: dict[int, RegionInfo] = {}
        self.offers: dict[int, RegionInfo] = {}
        self.imports: dict[str, int] = {}
        self.running: list[Any] = []

    async def offer(self, length: int, kind: str, device: int, fill: int = 0) -> dict[str, Any]:
        region = self.near.alloc(length, MemoryKind[kind], device, fill)
        return self._grant(region, length)

    def _grant(self, region: RegionInfo, length: int) -> dict[str, Any]:
        made: GrantInfo = self.near.engine.grant(region.id, 0, length, 3)
        self.offers[made.id] = region
        values = {"grant": made.id, "generation": made.generation, "length": length, "access": 3}
        return values | {"key": made.key.hex()}

    async def look(self, grant: int) -> list[int]:
        """How often each byte occurs."""
        return counts(self.near.read(self.offers[grant]))

    async def fill(self, grant: int, value: int) -> None:
        self.near.fill(self.offers[grant], value)

    async def revoke(self, grant: int) -> int:
        return int((await within(self.near.engine.revoke(grant))).status)

    async def reach(self, endpoint: str, grant: dict[str, Any]) -> None:
        self.imports["it"] = await self.near.import_(await self.near.connect(endpoint), grant)

    async def put(self, length: int, value: int, wait: bool, *, way: str = "PUT", kind: str = "HBM") -> int | None:
        """Without ``wait``: until it is under way."""
        region = self.near.alloc(length, MemoryKind[kind], 0, value)
        ending = await self.near.begin(OpKind[way], region, self.imports["it"])
        self.running.append((region, ending))
        return int((await within(ending)).status) if wait else None

    async def running_look(self) -> list[int]:
        """Of the memory of the last transfer that was started here."""
        return counts(self.near.read(self.running[-1][0]))

    async def running_end(self) -> int:
        return int((await within(self.running[-1][1])).status)

    async def told(self) -> list[int]:
        event = await self.near.event(EventKind.NOTIFY)
        return [event.tag, event.value]


async def obey() -> None:
    servant = Servant(json.loads(sys.argv[1]))
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    print(json.dumps({"endpoint": servant.near.endpoint}), flush=True)
    while line := await reader.readline():
        wish = json.loads(line)
        answer = await getattr(servant, wish.pop("what"))(**wish)
        print(json.dumps(answer), flush=True)
    servant.near.engine.close()


if __name__ == "__main__":
    asyncio.run(obey())

"""The owners of the conformance suite in a process of their own: `FarSide` does here what `Side` does there.

One pipe carries wishes one way and everything else the other way: answers, events, and what came of promises. Asking
waits for the answer, as a call of an engine would; what came before it is handed out by the loop afterwards, in order.
Bytes of an owner's memory are copied through the pipe whenever they are looked at or set.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
import sys
from collections import deque
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, cast

import numpy as np

from kvxfer.native.engine import Counters, Event, GrantInfo, MemoryKind, RegionInfo
from tests.native.conformance import Bytes, Heard, Side
from tests.native.device_bytes import DeviceBytes

ROOT = Path(__file__).parents[2]
LIMIT_S = 20.0 * float(os.environ.get("KVXFER_TEST_SLACK", "1"))
PLAIN = ("grant", "attached", "counters")  # calls of an engine that answer at once
PROMISES = ("revoke", "release")
LOOK_MAX = 32 << 20  # bytes at once


# -- here -------------------------------------------------------------------------------------------------------------


class Owners:
    """The process, as a handle."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        shared = os.memfd_create("owners")
        os.truncate(shared, LOOK_MAX)
        self._shared = np.frombuffer(mmap.mmap(shared, LOOK_MAX), dtype=np.uint8)
        fds = theirs.fileno(), shared
        command = [sys.executable, "-m", "tests.native.owner_process", *map(str, fds)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(command, pass_fds=fds, cwd=ROOT, env=environment)
        theirs.close()
        os.close(shared)
        self.pid = self._process.pid
        self._sides: dict[int, FarSide] = {}
        self._promised: dict[int, asyncio.Future[Event]] = {}
        self._early: deque[tuple[str, Any]] = deque()
        self._number = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def ended(self) -> bool:
        return self._pipe.closed

    def open(self, directory: Path, transports: tuple[str, ...], *which: Any, **changes: Any) -> FarSide:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._pipe.fileno(), self._readable)
        made = FarSide(self, self.number(), *which)
        self._sides[made.number] = made
        made.engine.transports = self.ask(made.number, "open", directory, transports, *which, **changes)
        return made

    def forget(self, side: int) -> None:
        """When the last one goes, so does the case's loop."""
        self._sides.pop(side, None)
        if not self._sides and self._loop is not None:
            self._loop.remove_reader(self._pipe.fileno())
            self._loop = None
            self._promised.clear()
            self._early.clear()

    def number(self) -> int:
        self._number += 1
        return self._number

    def ask(self, side: int, what: str, *arguments: Any, **more: Any) -> Any:
        """A call over there: its result, or its exception."""
        self._pipe.send((side, what, arguments, more))
        while True:
            kind, value = self._receive()
            if kind == "answer":
                return value
            if kind == "failed":
                raise value
            self._early.append((kind, value))
            if self._loop is not None:
                self._loop.call_soon(self._hand_out)

    def read_into(self, side: int, region: int, start: int, target: Any) -> None:
        self.ask(side, "read", region, start, len(target))
        target[:] = self._shared[: len(target)]

    def write(self, side: int, region: int, start: int, data: Any) -> None:
        self._shared[: len(data)] = data
        self.ask(side, "write", region, start, len(data))

    def promise(self, side: int, what: str, *arguments: Any) -> asyncio.Future[Event]:
        number = self.number()
        self.ask(side, "promise", number, what, *arguments)
        self._promised[number] = future = asyncio.get_running_loop().create_future()
        return future

    def _receive(self) -> Any:
        if not self._pipe.poll(LIMIT_S):
            self.end()
            raise TimeoutError("the owners' process does not answer")
        return self._pipe.recv()

    def _readable(self) -> None:
        while self._pipe.poll():
            self._early.append(self._receive())
        self._hand_out()

    def _hand_out(self) -> None:
        while self._early:
            kind, (number, event) = self._early.popleft()
            if kind == "event" and number in self._sides:
                self._sides[number].hear(event)
            elif kind == "done":
                self._promised.pop(number).set_result(event)

    def end(self) -> None:
        """Also when it does not play along any more."""
        if self._loop is not None:
            self._loop.remove_reader(self._pipe.fileno())
            self._loop = None
        self._pipe.close()
        self._process.kill()
        self._process.wait()


class FarEngine:
    """What the cases call of an owner's engine."""

    def __init__(self, owners: Owners, side: int) -> None:
        self._owners, self._side = owners, side
        self.transports: Any = ()
        self.closed = False

    def grant(self, *arguments: Any) -> GrantInfo:
        return cast(GrantInfo, self._owners.ask(self._side, "grant", *arguments))

    def attached(self, grant: int) -> int:
        return int(self._owners.ask(self._side, "attached", grant))

    def counters(self) -> Counters:
        return cast(Counters, self._owners.ask(self._side, "counters"))

    def revoke(self, grant: int) -> asyncio.Future[Event]:
        return self._owners.promise(self._side, "revoke", grant)

    def release(self, region: int) -> asyncio.Future[Event]:
        return self._owners.promise(self._side, "release", region)

    def read_into(self, region: int, offset: int, target: Any) -> None:
        self._owners.read_into(self._side, region, offset, target)

    def write(self, region: int, offset: int, data: Any) -> None:
        self._owners.write(self._side, region, offset, data)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._owners.ask(self._side, "close_engine")


class FarSide(Heard):
    """An owner over there."""

    def __init__(self, owners: Owners, number: int, kind: MemoryKind, device: int | None) -> None:
        super().__init__()
        self._owners, self.number = owners, number
        self.kind, self.device = kind, device
        self.engine = FarEngine(owners, number)
        self._open = True

    def make(self, how: str, length: int, **more: Any) -> tuple[RegionInfo, Bytes]:
        region = self._owners.ask(self.number, "make", how, length, **more)
        return region, cast(Bytes, DeviceBytes(self.engine, region))

    def alloc(self, length: int) -> tuple[RegionInfo, Bytes]:
        return self.make("alloc", length)

    def register(self, length: int, *, read_only: bool = False) -> tuple[RegionInfo, Bytes]:
        return self.make("register", length, read_only=read_only)

    def watch(self, memory: Bytes, *places: int) -> None:
        self._owners.ask(self.number, "watch", cast(DeviceBytes, memory).region.id, *places)

    def watched(self) -> list[tuple[int, ...]]:
        return cast("list[tuple[int, ...]]", self._owners.ask(self.number, "watched"))

    def close(self) -> None:
        if self._open and not self._owners.ended:
            self._open, self.engine.closed = False, True
            try:
                self._owners.ask(self.number, "close")
            finally:
                self._owners.forget(self.number)


# -- there ------------------------------------------------------------------------------------------------------------


class Servant:
    """Has the real ones."""

    def __init__(self, pipe: Connection, shared: int) -> None:
        self._pipe = pipe
        self._shared = np.frombuffer(mmap.mmap(shared, LOOK_MAX), dtype=np.uint8)
        self._sides: dict[int, Side] = {}
        self._memory: dict[int, dict[int, Any]] = {}  # of a side: its regions' bytes
        self.over = asyncio.get_running_loop().create_future()

    def readable(self) -> None:
        try:
            number, what, arguments, more = self._pipe.recv()
        except EOFError:
            self.over.set_result(None)
            return
        try:
            if what == "open":
                answer = self.open(number, *arguments, **more)
            elif what in PLAIN:
                answer = getattr(self._sides[number].engine, what)(*arguments)
            else:
                answer = getattr(self, what)(self._sides[number], self._memory[number], *arguments, **more)
        except Exception as error:  # it is raised where it was asked for
            self._pipe.send(("failed", error))
            return
        self._pipe.send(("answer", answer))

    def open(self, number: int, *arguments: Any, **changes: Any) -> Any:
        side = self._sides[number] = Side(*arguments, **changes)
        self._memory[number] = {}
        hear = side.hear

        def tell(event: Event) -> None:
            hear(event)
            self._pipe.send(("event", (number, event)))

        side.hear = tell  # type: ignore[method-assign]
        return side.engine.transports

    def make(self, side: Side, memory: dict[int, Any], how: str, length: int, **more: Any) -> RegionInfo:
        region, found = side.register(length, **more) if more else side.make(how, length)
        memory[region.id] = found
        return region

    def promise(self, side: Side, memory: dict[int, Any], number: int, what: str, *arguments: Any) -> None:
        assert what in PROMISES
        future = getattr(side.engine, what)(*arguments)
        future.add_done_callback(lambda done: self._pipe.send(("done", (number, done.result()))))

    def read(self, side: Side, memory: dict[int, Any], region: int, start: int, length: int) -> None:
        self._shared[:length] = memory[region][start : start + length]

    def write(self, side: Side, memory: dict[int, Any], region: int, start: int, length: int) -> None:
        memory[region][start : start + length] = self._shared[:length]

    def watch(self, side: Side, memory: dict[int, Any], region: int, *places: int) -> None:
        side.watch(memory[region], *places)

    def watched(self, side: Side, memory: dict[int, Any]) -> list[tuple[int, ...]]:
        return side.watched()

    def close_engine(self, side: Side, memory: dict[int, Any]) -> None:
        side.engine.close()

    def close(self, side: Side, memory: dict[int, Any]) -> None:
        memory.clear()
        self._sides = {number: one for number, one in self._sides.items() if one is not side}
        side.close()


async def obey() -> None:
    pipe = Connection(int(sys.argv[1]))
    servant = Servant(pipe, int(sys.argv[2]))
    asyncio.get_running_loop().add_reader(pipe.fileno(), servant.readable)
    await servant.over


if __name__ == "__main__":
    asyncio.run(obey())

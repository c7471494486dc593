"""A helper process of a measurement, from the side of who started it: lines out, lines in, gone when the block ends."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kvxfer.errors import PeerLost, TransferTimeout

LINE_BYTES_MAX = 1 << 20
STDERR_BYTES_MAX = 1 << 16
ANSWER_S = 60.0
END_S = 5.0


class Child:
    """One process; `ask` is a line out and a line in."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process

    @property
    def pid(self) -> int:
        """The id of the child's process."""
        return self.process.pid

    async def line(self) -> str:
        """Its next line; `PeerLost` with the end of its stderr when it ended instead."""
        assert self.process.stdout is not None
        try:
            found = await asyncio.wait_for(self.process.stdout.readline(), ANSWER_S)
        except TimeoutError:
            raise TransferTimeout(f"the {self.name} said nothing for {ANSWER_S:g} s") from None
        if not found:
            assert self.process.stderr is not None
            said = (await self.process.stderr.read(STDERR_BYTES_MAX)).decode(errors="replace").strip()
            status = await self.process.wait()
            raise PeerLost(f"the {self.name} ended with status {status}: {said[-800:] or 'it said nothing'}")
        return found.decode()

    async def write(self, text: str) -> None:
        """One line to its stdin."""
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode() + b"\n")
        try:
            await self.process.stdin.drain()
        except ConnectionError:
            await self.line()  # tells why it is gone

    async def ask(self, command: str, /, **arguments: Any) -> dict[str, Any]:
        """One command of a process that speaks JSON."""
        await self.write(json.dumps({"do": command, **arguments}))
        found: dict[str, Any] = json.loads(await self.line())
        return found

    def cpu_s(self) -> float:
        """User and system CPU seconds so far."""
        return cpu_s(self.pid)

    async def end(self) -> None:
        """Its stdin ends, and if that is not enough, it does."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            await asyncio.wait_for(self.process.wait(), END_S)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


def cpu_s(pid: int) -> float:
    """CPU seconds of a process to the nanosecond (the clock that clock_getcpuclockid of the C library names)."""
    return time.clock_gettime((~pid << 3) | 2)


@asynccontextmanager
async def child(command: Sequence[str], name: str) -> AsyncIterator[Child]:
    """Run a program with pipes."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=LINE_BYTES_MAX,
    )
    found = Child(name, process)
    try:
        yield found
    finally:
        await asyncio.shield(found.end())


def module(name: str, settings: dict[str, Any]) -> list[str]:
    """The command of one of our modules, with its settings as one argument."""
    return [sys.executable, "-m", name, json.dumps(settings)]

"""Physical references: a C program that only copies or only sends (`reference.c`), compiled when it is needed.

Without a compiler there are no ratios; the reason is kept and shown, never silently left out. The program compares what
it moved byte by byte, and a difference fails the measurement.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kvxfer.bench.child import Child, child
from kvxfer.bench.rows import Row, single
from kvxfer.bench.work import GIB, KIB, MIB, Sizes
from kvxfer.errors import IntegrityError, UsageError

SOURCE = Path(__file__).with_name("reference.c")
MEMCPY, NT, ATTACH = "ref memfd+memcpy", "ref memfd+NT copy", "ref process_vm"
MEMCPY_TWO, NT_TWO = f"{MEMCPY}, 2 threads", f"{NT}, 2 threads"
COPIES = {MEMCPY: ("memcpy", 1), NT: ("nt", 1), MEMCPY_TWO: ("memcpy", 2), NT_TWO: ("nt", 2), ATTACH: ("pvm", 1)}
COMPILE_S = 60.0
LATENCY_SAMPLES = 300


@dataclass(frozen=True, slots=True)
class Answer:
    """What the program measured for one line: seconds of the median repeat, CPU seconds of a repeat, percentiles."""

    seconds: float
    cpu_s: float
    p50_us: float
    p99_us: float


class Reference:
    """The reference program, running, and the questions that it answers."""

    def __init__(self, process: Child, sizes: Sizes, congestion: str) -> None:
        self._process = process
        self._sizes = sizes
        self.socket_name = f"ref C tcp, per-socket {congestion}" if congestion else "ref C tcp"

    async def ask(
        self, method: str, direction: str, block_bytes: int, blocks: int, repeats: int, threads: int = 1
    ) -> Answer:
        """Have one measurement made; the arguments are those of `reference.c`."""
        await self._process.write(f"{method} {direction} {block_bytes} {blocks} {repeats} {threads}")
        *numbers, good = (await self._process.line()).split()
        if good != "1":
            raise IntegrityError("the reference moved wrong bytes", method=method)
        return Answer(*(float(number) for number in numbers))

    async def copies(self, workload: str) -> list[Row]:
        """One round of the plain copies for a workload of the transports inside a host."""
        rows = []
        for direction in ("put", "get"):
            for peer in _copies_for(workload):
                rows += await self._rows(peer, "shm", workload, *COPIES[peer], direction)
        return rows

    async def sockets(self, workload: str) -> list[Row]:
        """One round of plain C over loopback sockets. A get would be the same work, so the row stands for both."""
        method = {"W4": "layers", "W6": "streams"}.get(workload, "tcp")
        return await self._rows(self.socket_name, "tcp", workload, method, 1, "put")

    async def _rows(
        self, peer: str, transport: str, workload: str, method: str, threads: int, direction: str
    ) -> list[Row]:
        sizes = self._sizes
        rows: list[Row] = []
        if workload == "W1":
            for label, size in (("4k", 4 * KIB), ("64k", 64 * KIB)):
                got = await self.ask(method, direction, size, 1, min(LATENCY_SAMPLES, sizes.samples))
                for name, value in (("p50_us", got.p50_us), ("p99_us", got.p99_us)):
                    rows.append(single(peer, transport, workload, f"{direction}_{label}_{name}", value))
            return rows
        block_bytes, blocks = {
            "W3": (sizes.block_bytes, sizes.blocks),
            "W3u": (sizes.block_bytes, sizes.blocks),
            "W3b": (sizes.small_block_bytes, sizes.small_blocks),
            "W4": (sizes.layer_bytes, sizes.layers),
            "W6": (sizes.stream_bytes, sizes.streams),
        }.get(workload, (sizes.large_bytes, 1))
        repeats = sizes.stream_repeats if method == "streams" else sizes.repeats
        got = await self.ask(method, direction, block_bytes, blocks, repeats, threads)
        moved = block_bytes * blocks * (repeats if method == "streams" else 1)
        rows.append(single(peer, transport, workload, f"{direction}_GBps", moved / got.seconds / 1e9))
        if method == "streams":
            rows.append(single(peer, transport, workload, f"{direction}_p99_ms", got.p99_us / 1e3))
        if workload == "W2":
            spent = got.cpu_s * GIB / (block_bytes * blocks)
            rows.append(single(peer, transport, "W5", f"{direction}_cpu_s_per_GiB", spent))
        return rows


def _copies_for(workload: str) -> tuple[str, ...]:
    if workload == "W1":
        return (MEMCPY,)
    if workload.endswith("u"):
        return (ATTACH,)
    return (MEMCPY, NT, MEMCPY_TWO, NT_TWO) if workload in ("W2", "W3", "W3b") else (NT, NT_TWO)


def compile_to(folder: Path) -> Path:
    """The program, freshly compiled; `UsageError` says what is missing."""
    compiler = os.environ.get("CC") or next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), "")
    if not compiler:
        raise UsageError("no C compiler (cc, gcc or clang)")
    if not SOURCE.is_file():
        raise UsageError(f"{SOURCE.name} is not part of this installation")
    binary = folder / "reference"
    command = [*compiler.split(), "-O3", "-pthread", "-o", str(binary), str(SOURCE)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILE_S)
    except (OSError, subprocess.TimeoutExpired) as wrong:
        raise UsageError(f"the C compiler does not work: {wrong}") from wrong
    if done.returncode:
        raise UsageError(f"the C compiler failed: {done.stderr.strip()[:400]}")
    return binary


@asynccontextmanager
async def running(folder: Path, sizes: Sizes, congestion: str) -> AsyncIterator[Reference]:
    """Compile the reference program, start it, and end it when the block is left."""
    binary = await asyncio.to_thread(compile_to, folder)
    command = [str(binary), str(-(-sizes.region_bytes // MIB)), congestion]
    async with child(command, "reference program") as process:
        await process.line()
        yield Reference(process, sizes, congestion)

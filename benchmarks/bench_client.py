"""What a user of the client feels: one small put awaited, how long things take to start, and what they cost while
idle.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import kvxfer
from examples.child_processes import daemon, python_process

BLOCK_BYTES = 4096
PUTS = 3000
IDLE_S = 5.0
TARGET = """
import asyncio, sys, kvxfer
async def main():
    async with kvxfer.local(transports=(sys.argv[1],)) as client:
        region = await client.alloc(1 << 20)
        async with await client.share(region, "bench"):
            print(client.addresses[0], flush=True)
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
asyncio.run(main())
"""
IDLE_WORKER = """
import asyncio, sys, kvxfer
async def main():
    async with kvxfer.Client(sys.argv[1]) as client:
        region = await client.alloc(1 << 20)
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
asyncio.run(main())
"""


def run(rounds: int) -> None:
    """Measure and print."""
    for transport in ("shm", "tcp"):
        rows = [asyncio.run(small_put(transport)) for _ in range(rounds)]
        p50, p99 = (statistics.median(row[i] for row in rows) for i in (0, 1))
        print(
            f"{transport}: {BLOCK_BYTES} byte put awaited in asyncio, two processes: p50 {p50:.1f} us, p99 {p99:.1f} us"
        )
    for what, statement in (
        ("import kvxfer", "import kvxfer"),
        ("import kvxfer.client", "import kvxfer.client"),
    ):
        print(f"{what}: {import_ms(statement, rounds):.0f} ms beside an empty interpreter")
    started = [asyncio.run(daemon_ready_ms()) for _ in range(rounds)]
    print(f"daemon: ready {statistics.median(started):.0f} ms after its process was started")
    for name, share in asyncio.run(idle_share()).items():
        print(f"{name}: {share * 100:.3f} % of a core while idle for {IDLE_S:g} s")


async def small_put(transport: str) -> tuple[float, float]:
    """p50 and p99 of one awaited put, in microseconds."""
    async with AsyncExitStack() as stack:
        target = await stack.enter_async_context(python_process(["-c", TARGET, transport], name="target"))
        address = (await target.readline(20)).strip()
        client = await stack.enter_async_context(kvxfer.local(transports=(transport,)))
        described = await client.lookup("bench", node=address)
        source = (await client.alloc(BLOCK_BYTES))[0:BLOCK_BYTES]
        taken = []
        for index in range(PUTS + 300):
            started = time.perf_counter()
            await client.put(source, described)
            if index >= 300:
                taken.append((time.perf_counter() - started) * 1e6)
        taken.sort()
        return taken[len(taken) // 2], taken[len(taken) * 99 // 100]


def import_ms(statement: str, rounds: int) -> float:
    """Median extra time of an interpreter that runs ``statement``."""
    return statistics.median(_timed_ms(statement) - _timed_ms("pass") for _ in range(max(rounds, 5)))


def _timed_ms(statement: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return (time.perf_counter() - started) * 1e3


async def daemon_ready_ms() -> float:
    """From the start of the process until its socket accepts."""
    with tempfile.TemporaryDirectory() as scratch:
        started = time.perf_counter()
        async with daemon(Path(scratch) / "d"):
            return (time.perf_counter() - started) * 1e3


async def idle_share() -> dict[str, float]:
    """CPU seconds per second of a daemon with one connected worker, and of that worker, while nothing happens."""
    with tempfile.TemporaryDirectory() as scratch:
        async with AsyncExitStack() as stack:
            serving = await stack.enter_async_context(daemon(Path(scratch) / "d", http="127.0.0.1:0"))
            arguments = ["-c", IDLE_WORKER, str(serving.socket)]
            worker = await stack.enter_async_context(python_process(arguments, name="worker"))
            await worker.readline(20)
            await asyncio.sleep(0.5)
            pids = {"idle daemon": serving.process.pid, "idle worker": worker.pid}
            before = {name: _cpu_s(pid) for name, pid in pids.items()}
            await asyncio.sleep(IDLE_S)
            return {name: (_cpu_s(pid) - before[name]) / IDLE_S for name, pid in pids.items()}


def _cpu_s(pid: int) -> float:
    # The CPU-time clock of another process, to the nanosecond (what clock_getcpuclockid of the C library returns).
    return time.clock_gettime((~pid << 3) | 2)

"""Large transfers over loopback tcp between two processes, beside plain C and iperf3 on the same sockets.

Each round runs every contestant once, so a slow moment of the machine meets all of them; the table shows medians and
their share of the plain C reference (`benchmarks/ref/tcp_ref.c`: one connection, blocking sendmsg and recvmsg, same
congestion control). ``KVXFER_BENCH_STREAMS`` and ``KVXFER_BENCH_THREADS`` try other settings of the transport.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer.native.engine import Engine, EngineConfig, Event, OpKind

MIB = 1 << 20
LARGE_MIB = 256
BLOCKS, BLOCK_BYTES = 4096, 32 * 1024
SCATTERED_MIB = BLOCKS * BLOCK_BYTES // MIB
REPEATS = 4  # within a round; the first one is not counted
CONGESTION = "reno"
SMALL_PUTS = 2000
REFERENCE = Path(__file__).parent / "ref" / "tcp_ref.c"


def settings() -> dict[str, Any]:
    """Engine settings under test: the defaults unless the environment says otherwise."""
    chosen: dict[str, Any] = {"transports": ("tcp",), "tcp_congestion": CONGESTION}
    for variable, key in (
        ("KVXFER_BENCH_STREAMS", "tcp_streams"),
        ("KVXFER_BENCH_THREADS", "tcp_threads"),
        ("KVXFER_BENCH_FRAME", "frame_bytes"),
    ):
        if variable in os.environ:
            chosen[key] = int(os.environ[variable])
    return chosen


async def owner() -> None:
    """The other process: grants its memory, prints how to reach it, lives until its input ends."""
    engine = Engine(EngineConfig(engine_id=os.urandom(16), **settings()))
    loop = asyncio.get_running_loop()
    engine.attach(loop, lambda event: None)
    region = engine.alloc(LARGE_MIB * MIB)
    grant = engine.grant(region.id, 0, region.length, 3)
    endpoint = next(one.endpoint for one in engine.transports if one.name == "tcp")
    described = {"endpoint": endpoint, "grant": grant.id, "generation": grant.generation, "key": grant.key.hex()}
    print(json.dumps(described), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    engine.close()


class Initiator:
    """An engine connected to an owner process."""

    def __init__(self) -> None:
        self.engine = Engine(EngineConfig(engine_id=os.urandom(16), **settings()))
        self.engine.attach(asyncio.get_running_loop(), lambda event: None)
        self.region = self.engine.alloc(LARGE_MIB * MIB)
        np.frombuffer(self.engine.buffer(self.region), np.uint8)[:] = 7
        self.handle = 0

    async def connect(self, described: dict[str, Any]) -> None:
        """Connect and import."""
        transport = next(one.index for one in self.engine.transports if one.name == "tcp")
        peer, done = self.engine.connect(transport, described["endpoint"])
        assert (await done).status == 0
        self.handle, done = self.engine.import_(
            peer,
            grant=described["grant"],
            generation=described["generation"],
            length=LARGE_MIB * MIB,
            access=3,
            key=bytes.fromhex(described["key"]),
        )
        assert (await done).status == 0

    async def rate(self, kind: OpKind, rows: np.ndarray[Any, Any], *, check: bool = False) -> float:
        """GB/s of one op, median of the repeats."""
        taken = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            outcome = self.engine.submit(kind, self.region.id, self.handle, rows, check=check)
            event = outcome if isinstance(outcome, Event) else await outcome[1]
            taken.append(time.perf_counter() - started)
            assert event.status == 0
        return float(rows[:, 2].sum()) / statistics.median(taken[1:]) / 1e9

    async def small_us(self) -> list[float]:
        """p50 and p99 of a 4 KiB put awaited in asyncio."""
        taken = []
        for _ in range(SMALL_PUTS):
            started = time.perf_counter()
            outcome = self.engine.submit_one(OpKind.PUT, self.region.id, self.handle, 0, 0, 4096)
            if not isinstance(outcome, Event):
                await outcome[1]
            taken.append((time.perf_counter() - started) * 1e6)
        taken.sort()
        return [taken[len(taken) // 2], taken[len(taken) * 99 // 100]]


@asynccontextmanager
async def connected() -> AsyncIterator[Initiator]:
    """A fresh pair of processes."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import asyncio, benchmarks.bench_tcp as b; asyncio.run(b.owner())",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    initiator = Initiator()
    try:
        await initiator.connect(json.loads(await process.stdout.readline()))
        yield initiator
    finally:
        initiator.engine.close()
        process.stdin.close()
        await process.wait()


def rows_large() -> np.ndarray[Any, Any]:
    """One segment."""
    return np.array([[0, 0, LARGE_MIB * MIB]], np.uint64)


def rows_scattered() -> np.ndarray[Any, Any]:
    """Blocks in a different random order on each side."""
    random = np.random.default_rng(1)
    columns = [random.permutation(BLOCKS) * BLOCK_BYTES, random.permutation(BLOCKS) * BLOCK_BYTES]
    return np.stack([*columns, np.full(BLOCKS, BLOCK_BYTES)], axis=1).astype(np.uint64)


async def ours() -> dict[str, float]:
    """Everything that kvxfer is measured for, in one pair of processes."""
    async with connected() as initiator:
        p50, p99 = await initiator.small_us()
        return {
            "put large": await initiator.rate(OpKind.PUT, rows_large()),
            "get large": await initiator.rate(OpKind.GET, rows_large()),
            "put scattered": await initiator.rate(OpKind.PUT, rows_scattered()),
            "get scattered": await initiator.rate(OpKind.GET, rows_scattered()),
            "put large, checksummed": await initiator.rate(OpKind.PUT, rows_large(), check=True),
            "4 KiB p50 us": p50,
            "4 KiB p99 us": p99,
        }


def plain_c(binary: Path, mebibytes: int, segments: int) -> float:
    """GB/s of the reference."""
    command = [str(binary), CONGESTION, str(mebibytes), str(segments), str(REPEATS)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return mebibytes * MIB / statistics.median(float(line) for line in lines[1:]) / 1e9


def iperf3() -> float | None:
    """GB/s of one iperf3 stream, or None when it is not installed."""
    if shutil.which("iperf3") is None:
        return None
    server = subprocess.Popen(["iperf3", "-s", "-1", "-p", "5987"], stdout=subprocess.DEVNULL)
    try:
        time.sleep(0.3)
        command = ["iperf3", "-c", "127.0.0.1", "-p", "5987", "-C", CONGESTION, "-n", f"{LARGE_MIB * REPEATS}M", "-J"]
        report = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        return float(report["end"]["sum_received"]["bits_per_second"]) / 8e9
    finally:
        server.terminate()
        server.wait()


def run(rounds: int) -> None:
    """Measure and print."""
    table: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "tcp_ref"
        subprocess.run([os.environ.get("CC", "cc"), "-O2", "-o", str(binary), str(REFERENCE)], check=True)
        for _ in range(rounds):
            row = asyncio.run(ours())
            row["plain C large"] = plain_c(binary, LARGE_MIB, 1)
            row["plain C scattered"] = plain_c(binary, SCATTERED_MIB, BLOCKS)
            reached = iperf3()
            if reached is not None:
                row["iperf3"] = reached
            for name, value in row.items():
                table.setdefault(name, []).append(value)
    for name, values in table.items():
        median = statistics.median(values)
        spread = f"({min(values):.2f} to {max(values):.2f})"
        if name.endswith("us"):
            print(f"{name:24} {median:8.1f}      {spread}")
            continue
        yardstick = statistics.median(table["plain C scattered" if "scattered" in name else "plain C large"])
        print(f"{name:24} {median:8.2f} GB/s {spread}, {median / yardstick:.2f} of plain C")


if __name__ == "__main__":
    run(5)

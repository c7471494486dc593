"""Transfers through shared memory between two processes, beside plain copies into the same kind of memory.

The reference (`benchmarks/ref/shm_ref.c`) knows no keys, no cancel and no other process: it is the copy alone, with
non-temporal stores, with memcpy and by cross-memory attach, on as many threads as the engine uses. Every measurement
of ours is taken between two of the reference, so a slow moment of the machine meets both; shares are medians of
ratios. ``KVXFER_BENCH_THREADS``, ``KVXFER_BENCH_NT`` and ``KVXFER_BENCH_CHUNK`` try other settings.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer.native.engine import Engine, EngineConfig, Event, OpKind

MIB = 1 << 20
LARGE_MIB = 256
BLOCKS, BLOCK_BYTES = 4096, 32 * 1024
LAYERS, LAYERS_AT_ONCE = 80, 8
SMALL_PUTS = 5000
REFERENCE = Path(__file__).parent / "ref" / "shm_ref.c"
Rows = np.ndarray[Any, Any]


def settings() -> dict[str, Any]:
    """Engine settings under test: the defaults unless the environment says otherwise."""
    chosen: dict[str, Any] = {"transports": ("shm",)}
    for variable, key in (
        ("KVXFER_BENCH_THREADS", "copy_threads"),
        ("KVXFER_BENCH_NT", "nt_bytes_min"),
        ("KVXFER_BENCH_CHUNK", "chunk_bytes"),
    ):
        if variable in os.environ:
            chosen[key] = int(os.environ[variable])
    return chosen


async def owner(directory: str) -> None:
    """The other process: grants memory of both kinds, prints how to reach it, lives until its input ends."""
    engine = Engine(EngineConfig(engine_id=os.urandom(16), socket_dir=directory, **settings()))
    loop = asyncio.get_running_loop()
    engine.attach(loop, lambda event: None)
    shared = engine.alloc(LARGE_MIB * MIB)
    private = np.ones(LARGE_MIB * MIB, np.uint8)
    registered = engine.register(private.ctypes.data, private.nbytes)
    grants = [engine.grant(region.id, 0, region.length, 3) for region in (shared, registered)]
    print(
        json.dumps(
            {
                "endpoint": next(one.endpoint for one in engine.transports if one.can_map),
                "grants": [(one.id, one.generation, one.key.hex()) for one in grants],
            }
        ),
        flush=True,
    )
    await loop.run_in_executor(None, sys.stdin.read)
    engine.close()


class Initiator:
    """An engine connected to an owner process: `shared` and `private` are imports of its two regions."""

    def __init__(self, directory: str) -> None:
        self.engine = Engine(EngineConfig(engine_id=os.urandom(16), socket_dir=directory, **settings()))
        self.engine.attach(asyncio.get_running_loop(), lambda event: None)
        self.region = self.engine.alloc(LARGE_MIB * MIB)
        np.frombuffer(self.engine.buffer(self.region), np.uint8)[:] = 7
        self.shared = self.private = 0
        self.import_ms = 0.0

    async def connect(self, described: dict[str, Any]) -> None:
        """Connect and import both."""
        transport = next(one.index for one in self.engine.transports if one.can_map)
        peer, done = self.engine.connect(transport, described["endpoint"])
        assert (await done).status == 0
        handles = []
        started = time.perf_counter()
        for grant, generation, key in described["grants"]:
            handle, done = self.engine.import_(
                peer, grant=grant, generation=generation, length=LARGE_MIB * MIB, access=3, key=bytes.fromhex(key)
            )
            assert (await done).status == 0
            handles.append(handle)
        self.import_ms = (time.perf_counter() - started) * 1e3 / len(handles)
        self.shared, self.private = handles

    async def one(self, kind: OpKind, handle: int, rows: Rows, *, check: bool = False) -> float:
        """GB/s of one op."""
        started = time.perf_counter()
        outcome = self.engine.submit(kind, self.region.id, handle, rows, check=check)
        event = outcome if isinstance(outcome, Event) else await outcome[1]
        assert event.status == 0
        return float(rows[:, 2].sum()) / (time.perf_counter() - started) / 1e9

    async def layers(self) -> float:
        """GB/s of many ops of 1 MiB, some of them in flight at any time, each with a notification."""
        room = asyncio.Semaphore(LAYERS_AT_ONCE)

        async def layer(index: int) -> None:
            async with room:
                at = index * MIB
                outcome = self.engine.submit_one(
                    OpKind.PUT, self.region.id, self.shared, at, at, MIB, notify=(index, 0)
                )
                assert not isinstance(outcome, Event)
                assert (await outcome[1]).status == 0

        started = time.perf_counter()
        await asyncio.gather(*(layer(index) for index in range(LAYERS)))
        return LAYERS * MIB / (time.perf_counter() - started) / 1e9

    async def small_us(self, length: int, notify: tuple[int, int] | None = None) -> tuple[float, float]:
        """p50 and p99 of one put awaited in asyncio, microseconds."""
        taken = []
        for _ in range(SMALL_PUTS):
            started = time.perf_counter()
            outcome = self.engine.submit_one(OpKind.PUT, self.region.id, self.shared, 0, 0, length, notify=notify)
            if not isinstance(outcome, Event):
                await outcome[1]
            taken.append((time.perf_counter() - started) * 1e6)
        taken.sort()
        return taken[len(taken) // 2], taken[len(taken) * 99 // 100]


@asynccontextmanager
async def connected() -> AsyncIterator[Initiator]:
    """A fresh pair of processes."""
    with tempfile.TemporaryDirectory(prefix="kvx") as directory:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            f"import asyncio, benchmarks.bench_shm as b; asyncio.run(b.owner({directory!r}))",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        initiator = Initiator(directory)
        try:
            await initiator.connect(json.loads(await process.stdout.readline()))
            yield initiator
        finally:
            initiator.engine.close()
            process.stdin.close()
            await process.wait()


class Reference:
    """The plain copies, in processes of their own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def rate(self, method: str, blocks: int = 1, threads: int = 1) -> float:
        """GB/s of one round."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{method} {blocks} {threads}\n")
        self._process.stdin.flush()
        length = LARGE_MIB * MIB if blocks == 1 else blocks * BLOCK_BYTES
        return length / float(self._process.stdout.readline()) / 1e9


@contextmanager
def reference() -> Iterator[Reference]:
    """Compile and start it."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "shm_ref"
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-O2", "-pthread", "-o", str(binary), str(REFERENCE)], check=True)
        command = [str(binary), str(LARGE_MIB), str(BLOCK_BYTES)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield Reference(process)
            finally:
                assert process.stdin is not None
                process.stdin.close()


def rows_large() -> Rows:
    """One segment."""
    return np.array([[0, 0, LARGE_MIB * MIB]], np.uint64)


def rows_scattered() -> Rows:
    """Blocks in a different random order on each side."""
    random = np.random.default_rng(1)
    columns = [random.permutation(BLOCKS) * BLOCK_BYTES, random.permutation(BLOCKS) * BLOCK_BYTES]
    return np.stack([*columns, np.full(BLOCKS, BLOCK_BYTES)], axis=1).astype(np.uint64)


# name, what we do, what the reference does for the same bytes
CONTESTS = (
    ("put 256 MiB", (OpKind.PUT, "shared", rows_large(), False), ("nt", 1)),
    ("get 256 MiB", (OpKind.GET, "shared", rows_large(), False), ("nt", 1)),
    ("put 4096 x 32 KiB", (OpKind.PUT, "shared", rows_scattered(), False), ("nt", BLOCKS)),
    ("get 4096 x 32 KiB", (OpKind.GET, "shared", rows_scattered(), False), ("nt", BLOCKS)),
    ("put 256 MiB, checksummed", (OpKind.PUT, "shared", rows_large(), True), ("memcpy", 1)),
    ("put 256 MiB, user memory", (OpKind.PUT, "private", rows_large(), False), ("cma", 1)),
    ("put 4096 x 32 KiB, user memory", (OpKind.PUT, "private", rows_scattered(), False), ("cma", BLOCKS)),
)


async def contests(plain: Reference, rounds: int) -> None:
    """The table of large transfers, then the small ones."""
    async with connected() as initiator:
        threads = initiator.engine.config.copy_threads
        print(f"{'':32} {'GB/s':>7} {'1 thread':>9} {'share':>6} {f'{threads} threads':>10} {'share':>6}")
        for name, (kind, handle, rows, check), (method, blocks) in CONTESTS:
            rates: list[tuple[float, float, float]] = []
            for round_number in range(rounds + 1):
                single = plain.rate(method, blocks)
                mine = await initiator.one(kind, getattr(initiator, handle), rows, check=check)
                several = plain.rate(method, blocks, threads)
                if round_number:  # the first one fills page tables
                    rates.append((mine, single, several))
            mine, single, several = (statistics.median(column) for column in zip(*rates, strict=True))
            shares = [statistics.median(row[0] / row[i] for row in rates) for i in (1, 2)]
            label = f"{name} ({method})"
            print(f"{label:32} {mine:7.2f} {single:9.2f} {shares[0]:6.2f} {several:10.2f} {shares[1]:6.2f}")
        await initiator.layers()
        rate = statistics.median([await initiator.layers() for _ in range(rounds)])
        print(f"{LAYERS} layers of 1 MiB, {LAYERS_AT_ONCE} at once, each notified: {rate:.2f} GB/s")
        for length, notify in ((4096, None), (32 * 1024, None), (64 * 1024, None), (4096, (1, 0))):
            p50, p99 = await initiator.small_us(length, notify)
            told = ", owner told" if notify else ""
            print(f"put {length // 1024} KiB awaited{told}: p50 {p50:.2f} us, p99 {p99:.2f} us")
        print(f"import of {LARGE_MIB} MiB: {initiator.import_ms:.2f} ms")


def run(rounds: int) -> None:
    """Measure and print."""
    with reference() as plain:
        asyncio.run(contests(plain, rounds))


if __name__ == "__main__":
    run(int(sys.argv[1]) if len(sys.argv) > 1 else 5)

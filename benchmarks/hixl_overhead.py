"""What the hixl transport adds to the library beneath it, over the simulator: no figure here is one of hardware.

Each number with its limit: the time that a batch of 1024 descriptors takes more than the bare calls (submit, then ask
without a pause); for transfers of 5, 50 and 500 ms, how long after the library has the completion it is known to the
caller, and what waiting for it costs as a share of one core; and the same share where nothing comes at all. The bare
calls go through the same table of C functions, in the same process.

    python -m benchmarks.hixl_overhead
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvxfer.native._shim import ffi, lib
from kvxfer.native.engine import Engine, EngineConfig, Event, MemoryKind, OpKind, RegionInfo

ROOT = Path(__file__).parents[1]
BATCH, BATCHES, ROUNDS = 1024, 16, 15
PENDING = 16  # KVX_PENDING
BLOCK, STRIDE = 64, 128  # blocks that do not touch, and so are not merged
PAUSE_S = 20e-6  # the bare calls ask so often in a long transfer: without a pause they delay the simulator
SPANS_MS = {5: 60, 50: 24, 500: 6}  # how long one transfer takes in the simulator, and how often


def control(**values: object) -> None:
    path = Path(os.environ["KVXFER_SIM_DIR"]) / "control"
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(f"KVXFER_SIM_{name}={value}\n" for name, value in values.items()))
    fresh.rename(path)
    time.sleep(0.01)  # it looks once a millisecond


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Bare:
    """The library itself, between the same two cards."""

    def __init__(self) -> None:
        why = ffi.new("char[512]")
        self.api = lib.kvx_ascend_get(why, 512)
        assert self.api, ffi.string(why)
        assert self.api.facts.simulated, "this file is about the simulator"
        self.soc = ffi.string(self.api.facts.soc).decode()
        options = ffi.new("kvx_ascend_option[1]")
        self.keep = ffi.new("char[]", b"BufferPool"), ffi.new("char[]", b"0:0")
        options[0].key, options[0].value = self.keep
        self.engines, self.memory = [], []
        self.names = [f"127.0.0.1:{free_port()}".encode() for _ in range(2)]
        for card in (0, 1):
            engine, memory, handle = ffi.new("void **"), ffi.new("void **"), ffi.new("void **")
            text = ffi.new("char[256]")
            assert self.api.device_use(card, ffi.NULL) == 0
            assert self.api.engine_open(card, self.names[card], options, 1, engine, ffi.NULL, text, 256) == 0
            assert self.api.mem_alloc(card, lib.KVX_ASCEND_DEVICE, 4 << 20, memory, ffi.NULL) == 0
            assert self.api.mem_register(engine[0], memory[0], 4 << 20, lib.KVX_ASCEND_DEVICE, handle, ffi.NULL) == 0
            self.engines.append(engine[0])
            self.memory.append(int(ffi.cast("uintptr_t", memory[0])))
        assert self.api.connect(self.engines[0], self.names[1], 1000, ffi.NULL) == 0
        self.ops = ffi.new("kvx_ascend_op[]", BATCH)
        for i in range(BATCH):
            here, there = (base + i * STRIDE for base in self.memory)
            self.ops[i].local, self.ops[i].remote, self.ops[i].length = here, there, BLOCK
        self.requests = ffi.new("void *[]", BATCHES)

    def run(self, count: int, batches: int, pause: float = 0.0) -> float:
        """Seconds for so many batches of so many descriptors."""
        api, engine = self.api, self.engines[0]
        began = time.perf_counter()
        for i in range(batches):
            assert api.submit(engine, self.names[1], True, self.ops, count, self.requests + i, ffi.NULL) == 0
        for i in range(batches):
            while (status := api.poll(engine, self.requests[i], ffi.NULL)) == PENDING:
                if pause:
                    time.sleep(pause)
            assert status == 0
        return time.perf_counter() - began


class Ours:
    """Two engines of ours, of one process."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self.regions: list[RegionInfo] = []

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        for card in (0, 1):
            config = EngineConfig(engine_id=os.urandom(16), transports=("hixl",), device_ipc=False, copy_threads=1)
            engine = Engine(config)
            engine.attach(loop, lambda event: None)
            self.engines.append(engine)
            self.regions.append(engine.alloc(4 << 20, kind=MemoryKind.HBM, device=card))
        near, far = self.engines
        grant = far.grant(self.regions[1].id, 0, 4 << 20, 3)
        peer, connected = near.connect(1, far.transports[1].endpoint)
        assert (await connected).status == 0
        values = {"grant": grant.id, "generation": grant.generation, "length": grant.length, "access": 3}
        self.import_, imported = near.import_(peer, key=grant.key, **values)
        assert (await imported).status == 0

    async def run(self, count: int, batches: int) -> float:
        offsets = np.arange(count * batches, dtype=np.uint64) * STRIDE
        rows = np.stack([offsets, offsets, np.full(len(offsets), BLOCK, np.uint64)], axis=1)
        began = time.perf_counter()
        outcome: Any = self.engines[0].submit(OpKind.PUT, self.regions[0].id, self.import_, rows)
        event: Event = await outcome[1]
        assert event.status == 0, event
        return time.perf_counter() - began

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def thread_seconds(name: str) -> float:
    """Processor time of this process's threads of that name, the busiest of them."""
    tasks = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text().strip() == name]
    spent = [int((task / "schedstat").read_text().split()[0]) / 1e9 for task in tasks]
    return max(spent, default=0.0)


def bare_sleeper(seconds: float) -> float:
    """What a thread costs here that only sleeps 0.22 ms at a time: the price of a wake-up on this machine."""
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(29, 10_000, 0, 0, 0)  # PR_SET_TIMERSLACK, as the transport does
    pause = (ctypes.c_long * 2)(0, 220_000)
    began, spent = time.monotonic(), time.thread_time()
    while time.monotonic() - began < seconds:
        library.nanosleep(pause, None)
    return (time.thread_time() - spent) / (time.monotonic() - began)


def lower_quartile(values: list[float]) -> float:
    return statistics.quantiles(values, n=4)[0]


async def span(bare: Bare, ours: Ours, milliseconds: int) -> tuple[int, float, float]:
    """How much later than asking without a pause, and the share of a core meanwhile."""
    control(LATENCY_US=milliseconds * 1000)
    bare_s, ours_s, spent, passed = [], [], 0.0, 0.0
    for _ in range(SPANS_MS[milliseconds]):
        bare_s.append(bare.run(1, 1, PAUSE_S))
        start = thread_seconds("kvx-hixl-1")
        mine = await ours.run(1, 1)
        spent, passed = spent + thread_seconds("kvx-hixl-1") - start, passed + mine
        ours_s.append(mine)
    control()
    late = lower_quartile(ours_s) - lower_quartile(bare_s)
    return milliseconds, late, spent / passed


async def waiting(ours: Ours) -> tuple[float, float, float]:
    """Shares of a core while nothing comes: of our thread in the first second and later, and of the whole process."""
    control(STALL=1)
    task = asyncio.ensure_future(ours.run(1, 1))
    await asyncio.sleep(0.1)
    shares = []
    usage, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    for seconds in (0.8, 0.3, 1.0):
        start, thread = time.monotonic(), thread_seconds("kvx-hixl-1")
        await asyncio.sleep(seconds)
        shares.append((thread_seconds("kvx-hixl-1") - thread) / (time.monotonic() - start))
    after = resource.getrusage(resource.RUSAGE_SELF)
    whole = (after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime) / (time.monotonic() - began)
    control()
    await task
    return shares[0], shares[2], whole


async def measure() -> int:
    bare, ours = Bare(), Ours()
    await ours.open()
    await ours.run(1, 1)
    pairs = [(bare.run(BATCH, BATCHES), await ours.run(BATCH, BATCHES)) for _ in range(ROUNDS)]
    added = statistics.median(mine - theirs for theirs, mine in pairs) / BATCHES
    spans = [await span(bare, ours, milliseconds) for milliseconds in SPANS_MS]
    share, later, whole = await waiting(ours)
    floor = await asyncio.to_thread(bare_sleeper, 1.0)
    ours.close()
    print(f"{bare.soc} (simulated): overhead only, no figure of hardware")
    rows = [
        ("added per batch of 1024", added * 1e6, 200, "us"),
        *(
            (f"{ms} ms: noticed after", late * 1e6, max(300, ms * 10), "us, with the wake-up of Python")
            for ms, late, _ in spans
        ),
        *((f"{ms} ms: a core meanwhile", busy * 100, 2, "%, the submit included") for ms, _, busy in spans),
        ("a core in the first stall", share * 100, 2, f"% (a thread that only sleeps 0.22 ms at a time: {floor:.1%})"),
        ("a core after 1 s without", later * 100, 2, f"% (this whole process, simulator too: {whole:.1%})"),
    ]
    for name, value, limit, unit in rows:
        print(f"  {name:26} {value:7.1f}  limit {limit:4}  {'ok      ' if value <= limit else 'TOO MUCH'}  {unit}")
    return int(any(value > limit for _, value, limit, _ in rows))


def main() -> int:
    """In a process of its own with the simulator's libraries."""
    if "KVXFER_CANN_LIBDIR" in os.environ and "KVXFER_SIM_DIR" in os.environ:
        return asyncio.run(measure())
    from tests.native.ascend_sim.build import build

    with tempfile.TemporaryDirectory(prefix="kvx-sim-") as directory:
        environment = os.environ | {"KVXFER_CANN_LIBDIR": str(build()), "KVXFER_SIM_DIR": directory}
        command = [sys.executable, "-m", "benchmarks.hixl_overhead"]
        return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

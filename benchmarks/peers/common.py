"""What the peer scripts share: memory, workloads, timing, verification by the receiver, the output.

A script defines an `Initiator` (this process) and a `Target` (a spawned second process) and calls `main`. A request is
a list of segments (local offset, remote offset, bytes); a "write" moves local to remote, a "read" remote to local.
Before anything is timed each request runs once with fresh random bytes into cleared memory and both sides compare
checksums; a difference ends the script with exit code 3. Only `transfer`, `pipeline` and `streams` are ever timed. It
runs in the environment of the peer, so nothing of kvxfer is imported here.
"""

import argparse
import ctypes
import json
import mmap
import multiprocessing
import os
import signal
import statistics
import sys
import threading
import time
import zlib
from dataclasses import dataclass, fields

import numpy as np

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
WORKLOADS = ("w1", "w2", "w3", "w3b", "w4", "w6", "setup")
SMALL = (("4k", 4 * KIB), ("64k", 64 * KIB))
BUDGET_S = 8.0  # one timed loop ends early rather than take longer
REPEATS_MIN = 2
IDLE_S = 1.0
LIMIT_S = 300
MISMATCH = 3  # exit code
now = time.perf_counter


@dataclass
class Sizes:
    """How much work; the names and the full sizes are those of `kvxfer.bench.work.Sizes`."""

    large_bytes: int = 256 * MIB
    blocks: int = 4096
    block_bytes: int = 32 * KIB
    small_blocks: int = 65536
    small_block_bytes: int = 4 * KIB
    layers: int = 80
    layer_bytes: int = MIB
    layers_at_once: int = 8
    streams: int = 32
    stream_bytes: int = 4 * MIB
    stream_repeats: int = 3
    samples: int = 600
    repeats: int = 4
    setup_bytes: int = GIB

    @classmethod
    def loads(cls, text):
        """From a JSON object; what is unknown is left out."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: int(value) for name, value in json.loads(text).items() if name in known})

    @property
    def region_bytes(self):
        """One region holds every workload."""
        return max(
            self.large_bytes,
            self.blocks * self.block_bytes,
            self.small_blocks * self.small_block_bytes,
            self.layers * self.layer_bytes,
            self.streams * self.stream_bytes,
        )

    def scattered(self, workload):
        """(blocks, bytes of one) of the workloads that have scattered blocks."""
        return (self.small_blocks, self.small_block_bytes) if workload == "w3b" else (self.blocks, self.block_bytes)


class Region:
    """Page-aligned anonymous memory that is already there (huge pages where the kernel likes); one per process."""

    def __init__(self, size):
        self.size = size
        self.mm = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.mm.madvise(mmap.MADV_HUGEPAGE)
        self.np = np.frombuffer(self.mm, np.uint8)
        self.np[:: 4 * KIB] = 1
        self.addr = self.np.ctypes.data
        self.mv = memoryview(self.mm)

    def fill(self, seed, length):
        """The first ``length`` bytes: random, or zero without a seed."""
        self.np[:length] = 0 if seed is None else np.frombuffer(np.random.default_rng(seed).bytes(length), np.uint8)

    def crc(self, spans):
        """Over the spans (offset, bytes) in their order."""
        found = 0
        for offset, length in spans:
            found = zlib.crc32(self.mv[offset : offset + length], found)
        return found


class Initiator:
    """The side that is timed. Override `setup` and either `transfer` or `post` and `done`."""

    poll_sleep = None  # pause between looks at `done`, where looking is not what makes progress
    tells = False  # each layer of W4 is announced to the target, which counts (`Target.told`)

    def __init__(self, opts, region):
        self.opts, self.region, self.op = opts, region, opts.op[0]
        self.extra_pids = []  # helpers whose CPU time counts

    def local_meta(self):
        """What the target must know before `setup`."""

    def setup(self, meta):
        """Register and connect; returns seconds by step: init_s, register_s, connect_s, prepare_s."""

    def post(self, segs, tell=None):
        """Start a request, return a handle."""

    def done(self, handle):
        """Whether the request is complete; drives progress."""

    def transfer(self, segs):
        """One request, start to end."""
        handle = self.post(segs)
        while not self.done(handle):
            self.pause()

    def pause(self):
        """Between two looks."""
        if self.poll_sleep:
            time.sleep(self.poll_sleep)

    def pipeline(self, reqs, window):
        """All requests, at most ``window`` at once."""
        live, posted = [], 0
        while live or posted < len(reqs):
            while posted < len(reqs) and len(live) < window:
                live.append(self.post(reqs[posted], posted) if self.tells else self.post(reqs[posted]))
                posted += 1
            live = [handle for handle in live if not self.done(handle)]
            self.pause()

    def streams(self, reqs, repeats):
        """Every request is a stream that repeats it; returns all latencies in seconds."""
        taken, left = [], [repeats] * len(reqs)
        begun, live = {}, {}
        for number, req in enumerate(reqs):
            begun[number] = now()
            live[number] = self.post(req)
        while live:
            self.pause()
            for number in list(live):
                if not self.done(live[number]):
                    continue
                taken.append(now() - begun[number])
                left[number] -= 1
                if left[number]:
                    begun[number] = now()
                    live[number] = self.post(reqs[number])
                else:
                    del live[number]
        return taken

    def close(self):
        """Stop helpers."""


def thread_streams(reqs, repeats, transfer):
    """`Initiator.streams` for peers with a blocking call: a thread per stream, ``transfer(number, request)``."""
    taken, gate = [], threading.Barrier(len(reqs) + 1)

    def run(number, req):
        gate.wait()
        for _ in range(repeats):
            begun = now()
            transfer(number, req)
            taken.append(now() - begun)

    threads = [threading.Thread(target=run, args=one) for one in enumerate(reqs)]
    for thread in threads:
        thread.start()
    gate.wait()
    for thread in threads:
        thread.join()
    return taken


class Target:
    """The other side; `start` returns what the initiator needs to know."""

    def __init__(self, opts, region):
        self.opts, self.region = opts, region

    def start(self, initiator_meta):
        """Register, listen, start threads."""
        return {}

    def told(self, expected):
        """How many announcements came since the last question; waits for ``expected`` of them."""
        return expected

    def close(self):
        """Stop."""


def die_with_parent():
    """This process ends when the one that started it does, however that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def target_main(conn, target_class, opts):
    """The second process: obeys the pipe until it says quit or ends."""
    die_with_parent()
    region = Region(opts.region)
    target = target_class(opts, region)
    calls = {"start": target.start, "fill": region.fill, "crc": region.crc, "told": target.told}
    while True:
        try:
            command, *args = conn.recv()
        except EOFError:
            os._exit(1)
        if command == "quit":
            target.close()
            conn.send(None)
            os._exit(0)  # some peers crash in their destructors
        conn.send(calls[command](*args))


def cpu_seconds(pids):
    """User and system time of whole processes, from their CPU clocks."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def percentile(values, percent):
    """The value that this share of them does not exceed."""
    values = sorted(values)
    return values[min(len(values) - 1, int(len(values) * percent / 100))]


def scattered(count, length, pool_bytes):
    """Blocks in a different random order on each side."""
    places = [np.random.default_rng(seed).permutation(pool_bytes // length)[:count] * length for seed in (1, 2)]
    return [(int(a), int(b), length) for a, b in zip(*places, strict=True)]


def row_of(length, count):
    """One request per piece, side by side."""
    return [[(number * length, number * length, length)] for number in range(count)]


class Driver:
    """Runs workloads on a connected pair."""

    def __init__(self, opts, initiator, conn, child_pid):
        self.opts, self.sizes, self.ini, self.conn = opts, opts.sizes, initiator, conn
        self.pids = [os.getpid(), child_pid]
        self.verified = 0

    def rpc(self, *message):
        """Ask the target."""
        self.conn.send(message)
        return self.conn.recv()

    def verify(self, segs, run):
        """Fresh bytes at the source, a cleared destination, one run, equal checksums."""
        seed = int.from_bytes(os.urandom(4), "little")
        source, destination = (seed, None) if self.ini.op == "write" else (None, seed)
        self.conn.send(("fill", destination, max(there + length for _, there, length in segs)))
        self.ini.region.fill(source, max(here + length for here, _, length in segs))
        self.conn.recv()
        run()
        self.conn.send(("crc", [(there, length) for _, there, length in segs]))
        ours = self.ini.region.crc([(here, length) for here, _, length in segs])
        if ours != self.conn.recv():
            print(f"{self.opts.name}: CHECKSUM MISMATCH in {self.opts.workload}, {self.ini.op}", file=sys.stderr)
            sys.stderr.flush()
            self.ini.close()
            os._exit(MISMATCH)
        self.verified += len(segs)

    def timed(self, run, times, warm=1):
        """Seconds of each run; fewer runs when they are slow."""
        for _ in range(warm):
            run()
        taken, end = [], now() + BUDGET_S
        while len(taken) < times and (len(taken) < REPEATS_MIN or now() < end):
            begun = now()
            run()
            taken.append(now() - begun)
        return taken

    def rate(self, run, total_bytes):
        """GB/s, milliseconds, CPU seconds of all processes per GiB."""
        run()
        pids = self.pids + self.ini.extra_pids
        spent = cpu_seconds(pids)
        taken = self.timed(run, self.sizes.repeats, 0)
        spent = cpu_seconds(pids) - spent
        middle = statistics.median(taken)
        cost = spent * GIB / (total_bytes * len(taken))
        return {"GBps": total_bytes / middle / 1e9, "ms": middle * 1e3, "cpu_s_per_GiB": cost}

    def w1(self):
        """Small requests awaited one after the other."""
        found = {}
        for label, size in SMALL:
            segs = [(0, 0, size)]
            self.verify(segs, lambda segs=segs: self.ini.transfer(segs))
            taken = self.timed(lambda segs=segs: self.ini.transfer(segs), self.sizes.samples, self.sizes.samples // 10)
            for percent in (50, 90, 99):
                found[f"{label}_p{percent}_us"] = percentile(taken, percent) * 1e6
        return found

    def w2(self):
        """One large piece."""
        return self.request([(0, 0, self.sizes.large_bytes)])

    def w3(self):
        """Scattered blocks in one request."""
        return self.request(scattered(*self.sizes.scattered(self.opts.workload), self.sizes.region_bytes))

    w3b = w3

    def request(self, segs):
        """One request, verified and timed."""
        self.verify(segs, lambda: self.ini.transfer(segs))
        return self.rate(lambda: self.ini.transfer(segs), sum(seg[2] for seg in segs))

    def w4(self):
        """Layers, some in flight; the target is told of each where the peer can."""
        count = self.sizes.layers
        reqs = row_of(self.sizes.layer_bytes, count)

        def run():
            self.ini.pipeline(reqs, self.sizes.layers_at_once)
            if self.ini.tells and self.ini.op == "write" and self.rpc("told", count) != count:
                sys.exit(f"{self.opts.name}: the target was not told of every layer")

        self.verify([req[0] for req in reqs], run)
        return self.rate(run, count * self.sizes.layer_bytes)

    def w6(self):
        """Concurrent streams."""
        size, count = self.sizes.stream_bytes, self.sizes.streams
        reqs = row_of(size, count)
        self.verify([req[0] for req in reqs], lambda: self.ini.streams(reqs, 1))
        self.ini.streams(reqs, 1)
        begun = now()
        taken = self.ini.streams(reqs, self.sizes.stream_repeats)
        rate = len(taken) * size / (now() - begun) / 1e9
        return {"GBps": rate, "p50_ms": percentile(taken, 50) * 1e3, "p99_ms": percentile(taken, 99) * 1e3}

    def setup(self, steps):
        """Milliseconds of each step, and the cores that both sides burn with nothing to do."""
        begun, spent = now(), cpu_seconds(self.pids)
        time.sleep(IDLE_S)
        cores = (cpu_seconds(self.pids) - spent) / (now() - begun)
        found = {name.removesuffix("_s") + "_ms": seconds * 1e3 for name, seconds in steps.items()}
        return {**found, "total_ms": sum(found.values()), "cores": cores}


def arguments(name, variants, ops):
    """The command line that every script has."""
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("--workload", required=True, choices=WORKLOADS)
    parser.add_argument("--variant", default=variants[0], choices=variants)
    parser.add_argument("--op", default=ops[0], help="one or both, with a comma: " + ",".join(ops))
    parser.add_argument("--sizes", default="{}", help="JSON object with sizes that differ from the full ones")
    parser.add_argument("--json", help="write the result there instead of to the standard output")
    opts = parser.parse_args()
    opts.op = opts.op.split(",")
    if not set(opts.op) <= set(ops):
        parser.error(f"--op must be of {','.join(ops)}")
    opts.sizes = Sizes.loads(opts.sizes)
    return opts


def output(opts, peer, results, verified):
    """What `kvxfer.bench.rivals` reads: results by op, and how many segments were verified."""
    found = {"peer": peer, "variant": opts.variant, "workload": opts.workload}
    text = json.dumps({**found, "verified": verified, "results": results}, indent=1)
    if opts.json:
        with open(opts.json, "w", encoding="utf-8") as file:
            file.write(text)
    else:
        print(text)
    sys.stdout.flush()


def main(name, initiator_class, target_class, variants=("default",), ops=("write",), env=None):
    """The whole program; ``env``: environment variables by variant, set before the peer is imported."""
    opts = arguments(name, variants, ops)
    opts.name = name
    setting_up = opts.workload == "setup"
    opts.region = opts.sizes.setup_bytes if setting_up else opts.sizes.region_bytes
    os.environ.update((env or {}).get(opts.variant, {}))
    signal.alarm(LIMIT_S)  # whoever started us and died does not leave us behind for ever

    context = multiprocessing.get_context("spawn")
    conn, theirs = context.Pipe()
    child = context.Process(target=target_main, args=(theirs, target_class, opts), daemon=True)
    child.start()
    theirs.close()
    initiator = initiator_class(opts, Region(opts.region))
    driver = Driver(opts, initiator, conn, child.pid)
    steps = initiator.setup(driver.rpc("start", initiator.local_meta())) or {}
    results = {}
    for op in opts.op:
        initiator.op = op
        begun = now()
        initiator.transfer([(0, 0, 4 * KIB)])
        first = now() - begun
        if setting_up:
            driver.verify([(0, 0, 4 * KIB)], lambda: initiator.transfer([(0, 0, 4 * KIB)]))
            results[op] = driver.setup({**steps, "first_s": first})
            break  # connecting happens once
        results[op] = getattr(driver, opts.workload)()
    initiator.close()
    driver.rpc("quit")
    child.join()
    output(opts, name, results, driver.verified)
    os._exit(0)  # some peers crash in their destructors

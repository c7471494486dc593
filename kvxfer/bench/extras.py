"""What is not a rate: setting up, idling, submitting many descriptors, and how costs grow."""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from cffi import FFI

from kvxfer.bench.child import Child, child, module
from kvxfer.bench.measure import AT_ONCE
from kvxfer.bench.pair import TIMEOUT_S, Once, Pair, Side, settings_for
from kvxfer.bench.rows import OURS, Row, single
from kvxfer.bench.target import POOL_NAME, status_bytes
from kvxfer.bench.work import KIB, MIB, Layout
from kvxfer.dataplane.transfer import Transfer
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.embedded import local

_libc = FFI()
_libc.cdef("int malloc_trim(size_t pad);")

FIRST_BYTES = 4 * KIB
TINY_BLOCK_BYTES = 64
SIZES_FROM = 4 * KIB
SUBMITS = 4
ROUND_OF_PUTS = 20
DESCRIPTORS_WEIGHED_MIN = 1 << 16  # fewer are hidden by what a process allocates anyway


async def setup(pair: Pair, options: dict[str, Any], memory: npt.NDArray[np.uint8]) -> list[Row]:
    """A new client in this process: start, make ``memory`` known, connect to the target, move 4 KiB."""
    clock = time.perf_counter
    begun = clock()
    async with local(**settings_for(pair.transport.name, options)) as client:
        at = [begun, clock()]
        region = await client.register(memory)
        at.append(clock())
        descriptor = await client.lookup(POOL_NAME, node=pair.address, timeout=TIMEOUT_S)
        await client.plane.prepare(descriptor)
        at.append(clock())
        await client.put(region[0:FIRST_BYTES], descriptor, timeout=TIMEOUT_S)
        at.append(clock())
    steps = dict(zip(("init_ms", "register_ms", "connect_ms", "first_ms"), np.diff(at) * 1e3, strict=True))
    steps["total_ms"] = (at[-1] - begun) * 1e3
    return [single(OURS, pair.transport.name, "setup", name, float(value)) for name, value in steps.items()]


async def allocate(pair: Pair) -> list[Row]:
    """The same amount from our pool: every page is touched once, by us instead of by its first user."""
    begun = time.perf_counter()
    region = await pair.client.alloc(pair.sizes.setup_bytes)
    spent = time.perf_counter() - begun
    await region.release()
    return [single(OURS, pair.transport.name, "setup", "alloc_ms", spent * 1e3)]


class Heartbeat:
    """The most that the event loop's thread computed without getting back to its callbacks, in seconds.

    CPU time, because on a machine with others a loop that is always busy is often interrupted, by nobody of ours.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._last = time.thread_time()
        self._beating = True
        self.worst = 0.0
        self._loop.call_soon(self._beat)

    def _beat(self) -> None:
        now = time.thread_time()
        self.worst = max(self.worst, now - self._last)
        self._last = now
        if self._beating:
            self._loop.call_soon(self._beat)

    def stop(self) -> float:
        """End it; the longest gap."""
        self._beating = False
        return self.worst


async def submit(pair: Pair, direction: str) -> list[Row]:
    """Handing over the blocks of W3b: the time in the call (the least of some), and the longest turn of the loop."""
    layout = Layout(pair.sizes.small_blocks, pair.sizes.small_block_bytes, pair.sizes.region_bytes)
    segments = layout.segments()
    calls, blocks = [], []
    for _ in range(SUBMITS):
        heart = Heartbeat()
        await asyncio.sleep(0)
        begun = time.perf_counter()
        transfer = pair.pool.parts(direction, segments, at_once=AT_ONCE)
        calls.append(time.perf_counter() - begun)
        await transfer
        await asyncio.sleep(0)
        blocks.append(heart.stop())
    name = pair.transport.name
    return [
        single(OURS, name, "submit", f"{direction}_ms", min(calls) * 1e3),
        single(OURS, name, "submit", f"{direction}_block_ms", min(blocks) * 1e3),
    ]


# -- how costs grow -----------------------------------------------------------------------------------------------


def powers(first: int, last: int, factor: int) -> list[int]:
    """first, first * factor, ... up to last."""
    found = []
    while first <= last:
        found.append(first)
        first *= factor
    return found


async def scale_blocks(pair: Pair, direction: str) -> list[Row]:
    """Rate of one contiguous transfer of each size, and of one request of scattered blocks of each size."""
    total, side, name = pair.sizes.scale_bytes, pair.pool, pair.transport.name
    rows = []
    await side.first(direction, pair.sizes.region_bytes)()  # the first to touch a page pays for it, once
    for size in powers(SIZES_FROM, total, 4):
        count = min(max(total // size // 4, 3), 32)
        taken = await _times(side.first(direction, size), count)
        rows.append(
            single(OURS, name, f"contiguous/{size}", f"{direction}_GBps", size / statistics.median(taken) / 1e9)
        )
    for size in powers(SIZES_FROM, min(total, MIB), 4):
        segments = Layout(total // size, size, pair.sizes.region_bytes).segments()
        taken = await _times(lambda segments=segments: _all(side, direction, segments), 2)
        rows.append(single(OURS, name, f"blocks/{size}", f"{direction}_GBps", total / statistics.median(taken) / 1e9))
    return rows


async def scale_descriptors(pair: Pair, direction: str) -> list[Row]:
    """Time of one request of many tiny blocks, all scattered over the same memory (or caches would be what is
    measured). Beyond what one submit takes, it is cut into several.
    """
    rows = []
    most = min(pair.sizes.descriptors_max, pair.sizes.region_bytes // TINY_BLOCK_BYTES)
    for count in powers(1, most, 16):
        segments = Layout(count, TINY_BLOCK_BYTES, most * TINY_BLOCK_BYTES).segments()
        taken = await _times(lambda segments=segments: _all(pair.pool, direction, segments), 5)
        name = f"descriptors/{count}"
        rows.append(single(OURS, pair.transport.name, name, f"{direction}_ms", statistics.median(taken) * 1e3))
        if count >= DESCRIPTORS_WEIGHED_MIN:
            grown = await peak_growth(partial(_all, pair.pool, direction, segments))
            rows.append(single(OURS, pair.transport.name, name, "bytes", grown / count))
    return rows


def _peak_restarted() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


async def peak_growth(once: Once) -> int:
    """Bytes that this process had more than before at the worst moment of ``once``; 0 when the kernel keeps no peak."""
    with suppress(AttributeError):  # only this C library has it
        c_library: Any = _libc.dlopen(None)
        c_library.malloc_trim(0)  # what is free now would hide what is taken next
    before = status_bytes("VmRSS")
    if not _peak_restarted():
        return 0
    await once()
    return max(status_bytes("VmHWM") - before, 0)


def _all(side: Side, direction: str, segments: npt.NDArray[np.uint64]) -> Transfer:
    return side.parts(direction, segments, at_once=AT_ONCE)


async def _times(once: Any, count: int) -> list[float]:
    taken = []
    for _ in range(count):
        begun = time.perf_counter()
        await once()
        taken.append(time.perf_counter() - begun)
    return taken


async def crowd(pair: Pair, options: dict[str, Any]) -> list[Row]:
    """More and more peers of the target, from one other process: connecting, a put of each, memory, and idling."""
    name, most = pair.transport.name, pair.sizes.peers
    settings = {"options": settings_for(name, options), "address": pair.address}
    rows = []
    async with child(module("kvxfer.bench.crowd", settings), "process of many peers") as many:
        await many.line()
        before = (await pair.target.ask("resident"))["bytes"]
        for count in sorted({*powers(1, most, 4), most}):
            grown = await many.ask("grow", count=count)
            passed = await many.ask("pass_round", rounds=ROUND_OF_PUTS)
            after = (await pair.target.ask("resident"))["bytes"]
            for metric, value in (
                ("connect_ms", grown["ms"]),
                ("put_4k_p50_us", passed["us"]),
                ("bytes", max(after - before, 0) / count),
            ):
                rows.append(single(OURS, name, f"peers/{count}", metric, value))
        rows += await _reached(pair, many, most)
        begun, spent, theirs = time.perf_counter(), pair.target.cpu_s(), many.cpu_s()
        await asyncio.sleep(pair.sizes.idle_s)
        seconds = time.perf_counter() - begun
        spent, theirs = (pair.target.cpu_s() - spent) / seconds, (many.cpu_s() - theirs) / seconds
        rows.append(single(OURS, name, "idle", "cores", spent))
        rows.append(single(OURS, name, f"idle/{most}", "cores", spent + theirs))
    return rows


async def _reached(pair: Pair, many: Child, most: int) -> list[Row]:
    """The other way round: what each of them costs one engine that is connected to all of them."""
    described = [RemoteDescriptor.from_dict(facts) for facts in (await many.ask("describe"))["descriptors"]]
    before = status_bytes("RssAnon")
    for descriptor in described:
        await pair.client.plane.prepare(descriptor)
    grown = max(status_bytes("RssAnon") - before, 0)
    return [single(OURS, pair.transport.name, f"peers/{most}", "put_bytes", grown / most)]

"""One round of each workload on a pair of processes: a list of rows, latencies also into histograms.

Closed loops (the next transfer starts when the last one ended) give rates and the latencies that other projects
publish. They hide stalls: nothing is sent while nothing moves. So W1 and W6 also run as open loops: transfers are due
at fixed times, at a tenth respectively 70 % of the rate just reached, and each latency counts from when its transfer
was due. Those are the metrics with ``open_``.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

from kvxfer.bench.histogram import Histogram
from kvxfer.bench.pair import Once, Pair, Side
from kvxfer.bench.rows import OURS, Row, single
from kvxfer.bench.target import POOL_NAME, USER_NAME
from kvxfer.bench.work import GIB, KIB, MIB, Layout, Sizes
from kvxfer.errors import IntegrityError

SMALL = {"4k": 4 * KIB, "64k": 64 * KIB}
OPEN_SHARE_SMALL, OPEN_SHARE_STREAMS = 0.1, 0.7
OPEN_INTERVAL_NS_MIN = 100_000
WARM = 20
TOLD_S = 10.0
MIXED_BYTES, MIXED_LARGE, MIXED_PAUSE_S = MIB, 2, 0.001
AT_ONCE = 65536
Histograms = dict[tuple[str, str], Histogram]


def layouts(workload: str, sizes: Sizes) -> list[Layout]:
    """What a workload moves; more than one when it measures several sizes."""
    pool = sizes.region_bytes
    return {
        "W1": [Layout(1, size) for size in SMALL.values()],
        "W2": [Layout(1, sizes.large_bytes)],
        "W2u": [Layout(1, sizes.large_bytes)],
        "W3": [Layout(sizes.blocks, sizes.block_bytes, pool)],
        "W3u": [Layout(sizes.blocks, sizes.block_bytes, pool)],
        "W3b": [Layout(sizes.small_blocks, sizes.small_block_bytes, pool)],
        "W4": [Layout(sizes.layers, sizes.layer_bytes)],
        "W6": [Layout(sizes.streams, sizes.stream_bytes)],
    }[workload]


def side_of(pair: Pair, workload: str) -> Side:
    """The memory that a workload moves."""
    return pair.sides[USER_NAME if workload.endswith("u") else POOL_NAME]


async def verify(pair: Pair, workload: str, direction: str) -> None:
    """Every request of a workload once, compared by the receiver."""
    side, sizes = side_of(pair, workload), pair.sizes
    for layout in layouts(workload, sizes):
        once: Once
        if workload == "W4":
            once = partial(layers_told, pair, direction)
        elif workload == "W6":
            once = partial(closed_streams, pair, direction, 1, Histogram())
        elif layout.count > 1:
            once = request(side, direction, layout)
        else:
            once = span(side, direction, layout.block_bytes)
        await pair.verify(side, direction, layout, once, workload)


def span(side: Side, direction: str, length: int) -> Once:
    """A call that moves the first ``length`` bytes."""
    return side.first(direction, length)


def request(side: Side, direction: str, layout: Layout) -> Once:
    """A call that moves scattered blocks; the descriptors are laid out beforehand, as a planner does."""
    segments = layout.segments()
    return lambda: side.parts(direction, segments, at_once=AT_ONCE)


async def measure(pair: Pair, workload: str, direction: str, histograms: Histograms) -> list[Row]:
    """Run one workload in one direction, once, and return its rows."""
    if workload == "W1":
        return await small(pair, direction, histograms)
    if workload == "W6":
        return await streams(pair, direction, histograms)
    side = side_of(pair, workload)
    [layout] = layouts(workload, pair.sizes)
    once: Callable[[], Awaitable[object]]
    if workload == "W4":
        once = partial(layers, pair, direction)
    elif layout.count > 1:
        once = request(side, direction, layout)
    else:
        once = span(side, direction, layout.block_bytes)
    await once()  # memory that was idle for a second can cost four times as much when it is touched again
    if workload == "W4":
        await all_told(pair, direction)
    spent, taken = pair.cpu_s(), []
    for _ in range(pair.sizes.repeats):
        begun = time.perf_counter()
        await once()
        taken.append(time.perf_counter() - begun)
        if workload == "W4":
            await all_told(pair, direction)
    spent = pair.cpu_s() - spent
    name = pair.transport.name
    rows = [
        single(OURS, name, workload, f"{direction}_GBps", layout.total_bytes / statistics.median(taken) / 1e9),
        single(OURS, name, workload, f"{direction}_ms", statistics.median(taken) * 1e3),
    ]
    if workload == "W2":
        moved = layout.total_bytes * len(taken)
        rows.append(single(OURS, name, "W5", f"{direction}_cpu_s_per_GiB", spent * GIB / moved))
    return rows


# -- latencies ----------------------------------------------------------------------------------------------------


async def small(pair: Pair, direction: str, histograms: Histograms) -> list[Row]:
    """W1: awaited one after the other, then due at fixed times."""
    rows = []
    for label, size in SMALL.items():
        once = span(pair.pool, direction, size)
        for _ in range(WARM):
            await once()
        closed, opened = Histogram(), Histogram()
        await back_to_back(once, pair.sizes.samples, closed)
        interval = max(int(closed.percentile(50) / OPEN_SHARE_SMALL), OPEN_INTERVAL_NS_MIN)
        await due(once, pair.sizes.samples // 4, interval, opened)
        prefix = f"{direction}_{label}"
        rows += latency_rows(pair, "W1", prefix, closed, ("p50", "p90", "p99", "max"), "us")
        rows += latency_rows(pair, "W1", f"{prefix}_open", opened, ("p50", "p99"), "us")
        for kind, histogram in (("", closed), (" open", opened)):
            keep(histograms, pair, f"{direction} {label}{kind}", histogram)
    return rows


async def back_to_back(once: Once, samples: int, histogram: Histogram) -> None:
    """Call ``once`` again as soon as it has returned, and record each duration in nanoseconds."""
    clock = time.perf_counter_ns
    for _ in range(samples):
        begun = clock()
        await once()
        histogram.add(clock() - begun)


async def due(once: Once, samples: int, interval_ns: int, histogram: Histogram) -> None:
    """An open loop with one transfer at a time: a late start counts as latency."""
    clock = time.perf_counter_ns
    at = clock()
    for _ in range(samples):
        at += interval_ns
        while clock() < at:
            pass  # sleeping would add the wake-up of this process to every sample
        await once()
        histogram.add(clock() - at)


def latency_rows(
    pair: Pair, workload: str, prefix: str, histogram: Histogram, names: tuple[str, ...], unit: str
) -> list[Row]:
    """A row for each of ``names`` (p50, p90, p99, or the worst) of one round, in ``unit``."""
    scale = {"us": 1e3, "ms": 1e6}[unit]
    values = {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    return [
        single(
            OURS,
            pair.transport.name,
            workload,
            f"{prefix}_{name}_{unit}",
            (histogram.percentile(values[name]) if name in values else histogram.worst) / scale,
        )
        for name in names
    ]


def keep(histograms: Histograms, pair: Pair, what: str, histogram: Histogram) -> None:
    """Add a round's samples to those of the run."""
    histograms.setdefault((pair.transport.name, what), Histogram()).merge(histogram)


# -- layers and streams -------------------------------------------------------------------------------------------


async def layers(pair: Pair, direction: str) -> None:
    """W4: layer after layer, some in flight; a put is over when the receiver has been told of it."""
    sizes, side = pair.sizes, pair.pool
    numbers = iter(range(sizes.layers))

    async def worker() -> None:
        for number in numbers:
            await side.span(direction, number * sizes.layer_bytes, sizes.layer_bytes, tell=number)

    async with asyncio.TaskGroup() as group:
        for _ in range(sizes.layers_at_once):
            group.create_task(worker())


async def layers_told(pair: Pair, direction: str) -> None:
    """The same, and the receiver confirms."""
    await layers(pair, direction)
    await all_told(pair, direction)


async def all_told(pair: Pair, direction: str) -> None:
    """The target has heard of every layer, of each once; nobody is told of a get."""
    sizes = pair.sizes
    if direction == "put":
        told = await pair.target.ask("told", expected=sizes.layers, within_s=TOLD_S)
        if told["told"] != sizes.layers:
            raise IntegrityError(
                "the receiver was not told of every layer once", expected=sizes.layers, found=told["told"]
            )


async def closed_streams(pair: Pair, direction: str, repeats: int, histogram: Histogram) -> None:
    """W6: every stream sends its next transfer when the last one ended."""
    size = pair.sizes.stream_bytes

    async def stream(number: int) -> None:
        await back_to_back(lambda: pair.pool.span(direction, number * size, size), repeats, histogram)

    async with asyncio.TaskGroup() as group:
        for number in range(pair.sizes.streams):
            group.create_task(stream(number))


async def open_streams(pair: Pair, direction: str, repeats: int, interval_ns: float, histogram: Histogram) -> None:
    """W6: the transfers of all streams together are due one every ``interval_ns``."""
    size, count = pair.sizes.stream_bytes, pair.sizes.streams
    clock = time.perf_counter_ns
    zero = clock()

    async def stream(number: int) -> None:
        for at in schedule(zero, number, count, repeats, interval_ns):
            if (wait := at - clock()) > 0:
                await asyncio.sleep(wait / 1e9)
            await pair.pool.span(direction, number * size, size)
            histogram.add(clock() - at)

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(stream(number))


def schedule(zero: int, number: int, streams: int, repeats: int, interval_ns: float) -> Iterator[int]:
    """When the transfers of one stream are due: the streams take turns."""
    return (zero + int((repeat * streams + number) * interval_ns) for repeat in range(repeats))


async def streams(pair: Pair, direction: str, histograms: Histograms) -> list[Row]:
    """W6: rate and latency of the closed loop, latency of the open one."""
    sizes = pair.sizes
    closed, opened = Histogram(), Histogram()
    await closed_streams(pair, direction, 1, Histogram())  # as in `measure`
    begun = time.perf_counter()
    await closed_streams(pair, direction, sizes.stream_repeats, closed)
    seconds = time.perf_counter() - begun
    count = sizes.streams * sizes.stream_repeats
    await open_streams(pair, direction, sizes.stream_repeats, seconds * 1e9 / count / OPEN_SHARE_STREAMS, opened)
    keep(histograms, pair, f"{direction} streams", closed)
    keep(histograms, pair, f"{direction} streams open", opened)
    rate = count * sizes.stream_bytes / seconds / 1e9
    return [
        single(OURS, pair.transport.name, "W6", f"{direction}_GBps", rate),
        *latency_rows(pair, "W6", direction, closed, ("p50", "p99"), "ms"),
        *latency_rows(pair, "W6", f"{direction}_open", opened, ("p50", "p99"), "ms"),
    ]


# -- priorities ---------------------------------------------------------------------------------------------------


async def mixed(pair: Pair, direction: str, histograms: Histograms) -> list[Row]:
    """Short transfers one after the other, with nothing beside them and then beside large ones of the priority bulk,
    which are measured meanwhile: nobody starves.
    """
    sizes, moved, goes_on = pair.sizes, 0, True
    once = span(pair.pool, direction, min(MIXED_BYTES, sizes.large_bytes))
    alone, beside = Histogram(), Histogram()

    async def large() -> None:
        nonlocal moved
        while goes_on:
            moved += (await pair.pool.span(direction, 0, sizes.large_bytes, priority="bulk")).bytes_done

    await once()
    await paused(once, sizes.samples, alone)
    async with asyncio.TaskGroup() as group:
        for _ in range(MIXED_LARGE):
            group.create_task(large())
        begun = time.perf_counter()
        await paused(once, sizes.samples, beside)
        goes_on = False
    rate = moved / (time.perf_counter() - begun) / 1e9
    keep(histograms, pair, f"{direction} 1 MiB", alone)
    keep(histograms, pair, f"{direction} 1 MiB beside bulk", beside)
    name = pair.transport.name
    ratios = {at: beside.percentile(at) / max(alone.percentile(at), 1) for at in (50.0, 99.0)}
    return [
        *latency_rows(pair, "mixed", direction, beside, ("p50", "p99"), "us"),
        *(single(OURS, name, "mixed", f"{direction}_p{at:.0f}_times", ratio) for at, ratio in ratios.items()),
        single(OURS, name, "mixed", f"{direction}_GBps", rate),
    ]


async def paused(once: Once, samples: int, histogram: Histogram) -> None:
    """A closed loop with pauses, in which whatever else there is gets ahead."""
    clock = time.perf_counter_ns
    for _ in range(samples):
        begun = clock()
        await once()
        histogram.add(clock() - begun)
        await asyncio.sleep(MIXED_PAUSE_S)

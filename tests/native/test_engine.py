"""The engine's own promises: configuration, memory, threads, forks, events. Transfers are in the conformance suite."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from kvxfer.errors import (
    ClosedError,
    ConfigError,
    ForkedClientError,
    InvalidLength,
    OutOfRange,
    OverlapError,
    ReadOnlyError,
    ShmTooSmall,
    TooManyPending,
    TransportUnavailable,
    UnknownRegion,
    UsageError,
    WrongThread,
)
from kvxfer.memory import numa
from kvxfer.native.engine import Engine, EngineConfig, Event, EventKind, OpKind
from kvxfer.native.status import StatusCode
from kvxfer.native.types import Caps, MemoryKind
from tests.native.conformance import KIB, MIB, Side, short_directory, within


def config(**changes: Any) -> EngineConfig:
    values: dict[str, Any] = {"engine_id": os.urandom(16), "transports": (), "copy_threads": 1}
    return EngineConfig(**(values | changes))


@pytest_asyncio.fixture
async def side() -> AsyncIterator[Side]:
    with short_directory() as directory:
        made = Side(directory, (), regions_max=8, grants_max=4)
        try:
            yield made
        finally:
            made.close()


# -- configuration ----------------------------------------------------------------------------------------------------


def threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"inflight_max": 0}, "inflight_max"),
        ({"inflight_max": 1 << 21}, "inflight_max"),
        ({"inflight_max": 1 << 40}, "inflight_max"),
        ({"chunk_bytes": 4095}, "chunk_bytes"),
        ({"copy_threads": 65}, "copy_threads"),
        ({"tcp_port": 65536}, "tcp_port"),
        ({"connect_ms": 0}, "connect_ms"),
        ({"engine_id": b"short"}, "engine_id"),
        ({"transports": ("loop", "loop", "fault+nothing")}, "nothing"),
        ({"transports": ("loop", "")}, "transports"),
    ],
)
def test_a_bad_configuration_is_named(changes: dict[str, Any], named: str) -> None:
    fds, before = len(os.listdir("/proc/self/fd")), threads()
    with pytest.raises((ConfigError, TransportUnavailable), match=named):
        Engine(config(**changes))
    assert len(os.listdir("/proc/self/fd")) == fds
    assert not threads() - before  # those of earlier tests may still be leaving


def test_limits_are_accepted_at_their_edges() -> None:
    Engine(config(inflight_max=1, notify_max=1, chunk_bytes=4096, copy_threads=0)).close()


def test_an_unknown_transport_is_unavailable() -> None:
    with pytest.raises(TransportUnavailable, match="'warp' is not part of this build"):
        Engine(config(transports=("warp",)))


def test_the_loop_transport_is_always_there() -> None:
    engine = Engine(config())
    (loop,) = engine.transports
    assert (loop.index, loop.rank, loop.endpoint) == (0, 0, engine.engine_id.hex())
    assert all(loop.caps & what for what in (Caps.PUT, Caps.GET, Caps.NOTIFY, Caps.INLINE))
    assert loop.can_check
    assert loop.same_host
    assert not loop.maps(MemoryKind.DRAM)
    engine.close()


def test_its_threads_run_on_the_node_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    one = min(os.sched_getaffinity(0))
    monkeypatch.setattr(numa, "nodes", lambda root: (0,))
    monkeypatch.setattr(numa, "node_cpus", lambda node, root: (one,))
    before = threads()
    engine = Engine(config(numa_node="0"))
    made = [os.sched_getaffinity(int(thread)) for thread in threads() - before]
    engine.close()
    assert engine.numa == "bound"
    assert len(made) >= 2
    assert all(cpus == {one} for cpus in made)
    with pytest.raises(UsageError, match="no such NUMA node"):
        Engine(config(numa_node="7"))


# -- memory -----------------------------------------------------------------------------------------------------------


async def test_alloc(side: Side) -> None:
    region, memory = side.alloc(3 * MIB + 1)
    assert region.shared
    assert (region.length, region.references, region.read_only) == (3 * MIB + 1, 1, False)
    assert not memory.any()
    memory[-1] = 9
    other, _ = side.alloc(1)
    assert other.id > region.id
    assert other.generation != region.generation
    assert side.engine.counters().registered_bytes == 3 * MIB + 2
    assert (await within(side.engine.release(region.id))).status == 0
    assert side.engine.counters().registered_bytes == 1


async def test_ids_and_generations_are_not_used_again(side: Side) -> None:
    ids, generations = set(), set()
    memory = np.zeros(4096, dtype=np.uint8)
    for _ in range(20):
        region = side.engine.register(memory.ctypes.data, 4096)
        ids.add(region.id)
        generations.add(region.generation)
        await within(side.engine.release(region.id))
    assert (len(ids), len(generations)) == (20, 20)


async def test_generations_differ_between_engines() -> None:
    seen = set()
    for _ in range(3):
        engine = Engine(config())
        seen.add(engine.alloc(10).generation)
        engine.close()
    assert len(seen) == 3
    assert all(generation < 1 << 64 for generation in seen)


@pytest.mark.parametrize("length", [0, -1, 1 << 64, 1 << 63, (1 << 64) - 1])
async def test_impossible_lengths(side: Side, length: int) -> None:
    with pytest.raises(InvalidLength):
        side.engine.alloc(length)
    with pytest.raises(InvalidLength):
        side.engine.register(4096, length if length != 1 << 63 else (1 << 64) - 4096)


async def test_more_memory_than_there_is(side: Side) -> None:
    with pytest.raises(ShmTooSmall):
        side.engine.alloc(1 << 50)
    assert side.engine.counters().regions == 0


async def test_identical_registrations_share_a_region(side: Side) -> None:
    memory = np.zeros(64 * KIB, dtype=np.uint8)
    address = memory.ctypes.data
    first = side.engine.register(address, 64 * KIB)
    second = side.engine.register(address, 64 * KIB)
    assert (second.id, second.generation, second.references) == (first.id, first.generation, 2)
    grant = side.engine.grant(first.id, 0, 10, 1)
    one = await within(side.engine.release(first.id))
    assert (one.kind, one.status) == (EventKind.RELEASE, 0)
    assert side.engine.attached(grant.id) == 0, "the other reference keeps region and grant"
    await within(side.engine.release(first.id))
    assert side.engine.attached(grant.id) == -1
    with pytest.raises(UnknownRegion):
        side.engine.release(first.id)


@pytest.mark.parametrize(("start", "length"), [(0, 10), (100, 50), (-10, 11), (63 * KIB, 2 * KIB), (-5, 65 * KIB)])
async def test_partial_overlap_is_refused(side: Side, start: int, length: int) -> None:
    memory = np.zeros(128 * KIB, dtype=np.uint8)
    address = memory.ctypes.data + 32 * KIB
    region = side.engine.register(address, 64 * KIB)
    with pytest.raises(OverlapError) as caught:
        side.engine.register(address + start, length)
    assert caught.value.fields["conflict"] == region.id
    with pytest.raises(OverlapError):
        side.engine.register(address, 64 * KIB, read_only=True)


async def test_neighbours_do_not_overlap(side: Side) -> None:
    memory = np.zeros(64 * KIB, dtype=np.uint8)
    first = side.engine.register(memory.ctypes.data, 32 * KIB)
    second = side.engine.register(memory.ctypes.data + 32 * KIB, 32 * KIB)
    assert first.id != second.id


async def test_addresses_without_memory_are_refused(side: Side) -> None:
    with pytest.raises(UsageError):
        side.engine.register(4096, 4096)
    memory = mmap.mmap(-1, 64 * KIB)
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    with pytest.raises(UsageError):
        side.engine.register(address + 1, 1 << 46)
    region = side.engine.register(address, 64 * KIB)
    await within(side.engine.release(region.id))
    memory.close()


async def test_too_many_regions(side: Side) -> None:
    regions = [side.engine.alloc(100) for _ in range(8)]
    with pytest.raises(TooManyPending) as full:
        side.engine.alloc(100)
    assert (full.value.fields["option"], full.value.fields["limit"], full.value.retryable) == ("regions_max", 8, True)
    assert "raise regions_max" in str(full.value)
    await within(side.engine.release(regions[0].id))
    side.engine.alloc(100)


async def test_grants(side: Side) -> None:
    region, _ = side.alloc(1000)
    grants = [side.engine.grant(region.id, 10 * i, 100, 1 + i % 3) for i in range(4)]
    assert len({grant.key for grant in grants}) == 4
    assert all(grant.generation == region.generation and grant.length == 100 for grant in grants)
    assert "key" not in repr(grants[0])
    with pytest.raises(TooManyPending) as full:
        side.engine.grant(region.id, 0, 10, 1)
    assert (full.value.fields["option"], full.value.fields["limit"], full.value.retryable) == ("grants_max", 4, True)
    assert "raise grants_max" in str(full.value)
    await within(side.engine.revoke(grants[0].id))
    side.engine.grant(region.id, 0, 10, 1)


@pytest.mark.parametrize(
    ("offset", "length", "access", "error"),
    [
        (0, 1001, 1, OutOfRange),
        (1000, 1, 1, OutOfRange),
        (0, 0, 1, InvalidLength),
        ((1 << 64) - 1, 1, 1, InvalidLength),
        ((1 << 64) - 1, (1 << 64) - 1, 1, InvalidLength),
        (0, 10, 0, UsageError),
        (0, 10, 4, UsageError),
    ],
)
async def test_bad_grants(side: Side, offset: int, length: int, access: int, error: type[Exception]) -> None:
    region, _ = side.alloc(1000)
    with pytest.raises(error):
        side.engine.grant(region.id, offset, length, access)
    with pytest.raises(UnknownRegion):
        side.engine.grant(10**9, 0, 10, 1)


async def test_a_numa_node_that_cannot_be_bound_is_reported(side: Side) -> None:
    assert side.engine.alloc(4096, numa_node=1000).numa_node == -1
    assert side.engine.alloc(4096).numa_node == -1


# -- threads, forks, ends ---------------------------------------------------------------------------------------------


async def test_only_the_loops_thread_may_call(side: Side) -> None:
    region, _ = side.alloc(100)
    calls = (
        lambda: side.engine.grant(region.id, 0, 10, 1),
        lambda: side.engine.release(region.id),
        lambda: side.engine.submit_one(OpKind.PUT, region.id, 1, 0, 0, 1),
        lambda: side.engine.counters(),
        lambda: side.engine.close(),
    )
    for call in calls:
        with pytest.raises(WrongThread):
            await asyncio.to_thread(call)


async def test_alloc_and_register_may_run_in_other_threads(side: Side) -> None:
    memory = np.zeros(4096, dtype=np.uint8)
    region = await asyncio.to_thread(side.engine.alloc, MIB)
    other = await asyncio.to_thread(side.engine.register, memory.ctypes.data, 4096)
    assert {(await within(side.engine.release(each.id))).status for each in (region, other)} == {0}


async def test_closing_waits_for_an_alloc_in_another_thread() -> None:
    engine = Engine(config())
    engine.attach(asyncio.get_running_loop(), lambda event: None)
    results: list[object] = []

    def allocate() -> None:
        try:
            results.append(engine.alloc(64 * MIB))
        except ClosedError as error:
            results.append(error)

    threads = [threading.Thread(target=allocate) for _ in range(3)]
    for thread in threads:
        thread.start()
    engine.close()
    for thread in threads:
        thread.join()
    assert len(results) == 3


async def slow_to_register() -> tuple[Engine, asyncio.Future[Any]]:
    """With a registration on its way in another thread, inside the transport."""
    engine = Engine(config(transports=("fault+loop",), fault_spec="register_ms=300"))
    engine.attach(asyncio.get_running_loop(), lambda event: None)
    memory = np.zeros(4096, dtype=np.uint8)
    registering = asyncio.ensure_future(asyncio.to_thread(engine.register, memory.ctypes.data, memory.nbytes))
    while not engine._guests:
        await asyncio.sleep(0.001)
    return engine, registering


async def test_a_transport_stays_open_for_a_registration_that_is_inside() -> None:
    engine, registering = await slow_to_register()
    engine.close()
    await asyncio.wait([registering])  # either way: the memory is given back by the close


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_close_that_takes_time_holds_no_loop_and_comes_to_its_end(cancelled: bool) -> None:
    engine, registering = await slow_to_register()
    closing = asyncio.ensure_future(engine.aclose())
    turns = 0
    while not closing.done():
        turns += 1
        if turns == 5 and cancelled:
            closing.cancel()
        await asyncio.sleep(0.001)
    assert turns > 10, "the loop had its turns meanwhile"
    assert engine.closed
    assert engine._views._closed, "the native engine too, which goes last"
    await asyncio.wait([registering])
    assert registering.exception() is None or isinstance(registering.exception(), ClosedError)
    assert closing.cancelled() is cancelled


async def test_a_forked_child_is_told(side: Side) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # no test machinery in the child: report and leave
        answer = b"no error"
        try:
            side.engine.counters()
        except ForkedClientError:
            answer = b"forked"
        os.write(writing, answer)
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 100) == b"forked"
    os.close(reading)
    os.waitpid(child, 0)  # noqa: ASYNC222 - it is exiting
    side.engine.counters()


async def test_a_closed_engine_says_so() -> None:
    engine = Engine(config())
    engine.close()
    assert engine.closed
    engine.close()
    for call in (lambda: engine.alloc(10), engine.counters, engine.drain, lambda: engine.connect(0, "x")):
        with pytest.raises(ClosedError):
            call()


def test_without_a_loop_nothing_can_be_awaited() -> None:
    engine = Engine(config())
    with pytest.raises(UsageError, match="attach"):
        engine.connect(0, "x")
    assert engine.alloc(10).length == 10
    engine.close()


def test_an_engine_that_is_dropped_warns_and_closes() -> None:
    before = threads()
    engine = Engine(config())
    ours = threads() - before
    assert ours
    dropped = [engine]
    del engine
    with pytest.warns(ResourceWarning, match="not closed"):
        dropped.clear()
    deadline = time.monotonic() + 5  # a joined thread leaves the list a moment later
    while ours & threads() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not ours & threads()


# -- events -----------------------------------------------------------------------------------------------------------


async def connected(side: Side) -> tuple[int, int]:
    """A region and an import that reaches it."""
    region, _ = side.alloc(64 * KIB)
    grant = side.engine.grant(region.id, 0, 64 * KIB, 3)
    peer, connecting = side.engine.connect(0, side.engine.engine_id.hex())
    assert (await within(connecting)).status == 0
    import_, importing = side.engine.import_(
        peer, grant=grant.id, generation=grant.generation, length=grant.length, access=3, key=grant.key
    )
    assert (await within(importing)).status == 0
    return region.id, import_


async def test_more_events_than_one_drain_takes(side: Side) -> None:
    region, import_ = await connected(side)
    for number in range(1000):
        outcome = side.engine.submit_one(OpKind.PUT, region, import_, 0, 100, 1, notify=(number, 0))
        assert isinstance(outcome, Event)
    turns = 0
    while len(side.events) < 1000:
        await asyncio.sleep(0)
        turns += 1
        assert turns < 100_000
    assert [event.tag for event in side.events] == list(range(1000))


async def test_a_failing_listener_does_not_lose_events(side: Side) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))

    def fail(event: Event) -> None:
        if event.tag == 1:
            raise ValueError("no")

    side.listener = fail
    region, import_ = await connected(side)
    for tag in (1, 2):
        side.engine.submit_one(OpKind.PUT, region, import_, 0, 100, 1, notify=(tag, 0))
    assert (await side.event(EventKind.NOTIFY)).tag == 2
    assert [type(complaint["exception"]) for complaint in complaints] == [ValueError]


async def test_futures_that_were_cancelled_do_no_harm(side: Side) -> None:
    region, import_ = await connected(side)
    outcome = side.engine.submit_one(OpKind.PUT, region, import_, 0, 32 * KIB, 32 * KIB)
    assert isinstance(outcome, tuple)
    outcome[1].cancel()
    other = side.engine.submit_one(OpKind.PUT, region, import_, 0, 32 * KIB, 32 * KIB)
    assert isinstance(other, tuple)
    assert (await within(other[1])).status == StatusCode.OK


async def test_submit_one_is_quick(side: Side) -> None:
    region, import_ = await connected(side)
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(200):
            side.engine.submit_one(OpKind.PUT, region, import_, 0, 100, 64)
        best = min(best, (time.perf_counter() - start) / 200)
    slack = float(os.environ.get("KVXFER_TEST_SLACK", "1"))
    assert best < 20e-6 * slack, f"{best * 1e6:.1f} us; about 1.5 us on an idle machine"


async def test_counters_file(tmp_path: Path) -> None:
    path = tmp_path / "counters"
    path.write_bytes(b"left by a process that died")
    engine = Engine(config(counters_path=str(path)))
    assert path.stat().st_mode & 0o777 == 0o600
    engine.close()
    assert not path.exists()


def protect(address: int, length: int, rights: int) -> None:
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(length), rights) == 0


async def test_pages_that_a_put_could_not_write_are_refused(side: Side) -> None:
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 8 * page)
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    protect(address + 5 * page, page, mmap.PROT_READ)
    with pytest.raises(ReadOnlyError, match=f"not writable: the pages at {address + 5 * page:#x} may not") as caught:
        side.engine.register(address, 8 * page)
    assert caught.value.hint is not None
    with pytest.raises(ReadOnlyError):
        side.engine.register(address + 5 * page + 10, 1)
    assert side.engine.counters().regions == 0
    for offset in (0, 6 * page):  # up to the page, and from behind it
        side.engine.register(address + offset, 2 * page)
    side.engine.register(address + 4 * page, 2 * page, read_only=True)
    protect(address + 5 * page, page, 0)
    with pytest.raises(UsageError, match=f"the pages at {address + 5 * page:#x} may not be read"):
        side.engine.register(address + 5 * page, page, read_only=True)
    protect(address + 5 * page, page, mmap.PROT_READ | mmap.PROT_WRITE)


async def test_a_file_that_is_mapped_for_reading_is_no_target(side: Side, tmp_path: Path) -> None:
    place = tmp_path / "weights"
    place.write_bytes(bytes(64 * KIB))
    with place.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        view = np.frombuffer(memory, dtype=np.uint8)
        with pytest.raises(ReadOnlyError):
            side.engine.register(view.ctypes.data, 64 * KIB)
        region = side.engine.register(view.ctypes.data, 64 * KIB, read_only=True)
        await within(side.engine.release(region.id))
        del view

"""The client's beginning and end: whatever is in flight, nothing of it remains; other threads and forks are refused."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvxfer
from kvxfer.client import Client
from kvxfer.errors import ClosedError, ForkedClientError, KvxferError, UsageError, WrongThread
from tests.nodes import until
from tests.steps import STEPS_MAX, cancelled_at, pair
from tests.support.nodes import make_cache, scattered, small_geometry

TABLE = scattered(1, 8, 40, 16)


def descriptors() -> set[str]:
    """What this process has open, by what it is."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue
    return found


def mappings() -> int:
    """Bytes of shareable memory that is mapped."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:" in line:
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            total += end - begin
    return total


def native_threads() -> set[str]:
    """Threads that Python did not start."""
    ours = {str(thread.native_id) for thread in threading.enumerate()}
    return set(os.listdir("/proc/self/task")) - ours


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_closing_in_the_middle_of_everything_leaves_nothing(transport: str) -> None:
    async with pair(transport):
        pass  # what the loop itself opens at its first server and its first thread is not ours
    await asyncio.to_thread(int)
    gc.collect()
    files, threads, mapped = descriptors(), native_threads(), mappings()
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    tasks = asyncio.all_tasks()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with pair(transport) as both:
            a, b = both.a, both.b
            source, sink = await make_cache(a, small_geometry(), 8), await make_cache(b, small_geometry(), 8)
            big, other = await a.alloc(16 << 20), await b.alloc(16 << 20)
            described = other.descriptor("rw")
            published = await a.publish("p", source, TABLE).__aenter__()
            landing = await b.offer("r", sink, TABLE).__aenter__()
            push = await a.push("r", to=b.addresses, cache=source, table=TABLE).__aenter__()
            await push.layer(0)
            told = await b.notifications(described).__aenter__()
            await a.share(big, "name")
            work = [
                landing.wait(),
                anext(landing),
                published.wait_released(),
                told.next(timeout=60),
                a.recv("c", timeout=60),
                a.lookup("nothing", node=b.addresses, wait_s=20),
                a.push("nobody", to=b.addresses, cache=source, table=TABLE).__aenter__(),
                b.pull(published.to_dict(), await make_cache(b, small_geometry(), 8), TABLE),
                b.adopt("nothing").__aenter__(),
                a.connect(b.addresses),
                a.alloc(8 << 20),
                *(waited(a.put(big, described)) for _ in range(4)),
                *(waited(a.get(big, described)) for _ in range(4)),
            ]
            running = [asyncio.ensure_future(one) for one in work]
            await asyncio.sleep(0.005)
            await asyncio.gather(a.aclose(), b.aclose())
            results = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 5)
            for result in results:
                assert not isinstance(result, BaseException) or isinstance(result, KvxferError), repr(result)
            assert [a.reservations.live, b.reservations.live] == [(), ()]
        del source, sink, big, other, published, landing, push, told, running, work, both, a, b, results
        gc.collect()
    assert asyncio.all_tasks() == tasks
    assert complaints == []
    await until(lambda: native_threads() <= threads)
    assert descriptors() <= files
    assert mappings() <= mapped


async def waited(transfer: kvxfer.Transfer) -> kvxfer.Transfer:
    return await transfer


async def test_a_cancelled_end_ends_everything_all_the_same() -> None:
    async with pair("tcp") as both:
        server = both.servers[0]
        for late in (False, True):
            for step in range(1, STEPS_MAX):
                client = await Client(server.socket_path, config=server.config).__aenter__()
                region = await client.alloc(1 << 20)
                engine = client.plane.engine
                client.put(region, region.descriptor("w"))
                waiting = asyncio.ensure_future(client.recv("c", timeout=60))
                await asyncio.sleep(0)
                reached, _ = await cancelled_at(client.aclose(), step, late)
                assert engine.closed
                assert client.closed
                with pytest.raises(ClosedError):
                    await waiting
                if not reached:
                    break
            await until(lambda: len(server.workers.links) == 1)


async def test_a_cancelled_beginning_leaves_nothing() -> None:
    async with pair("tcp") as both:
        server = both.servers[0]
        for late in (False, True):
            for step in range(1, STEPS_MAX):
                client = Client(server.socket_path, config=server.config)
                reached, outcome = await cancelled_at(client.__aenter__(), step, late)
                if not reached:
                    assert outcome is client
                    await client.aclose()
                    break
                assert client.closed
            await until(lambda: len(server.workers.links) == 1)


async def test_a_client_is_entered_once() -> None:
    async with pair("shm") as both:
        with pytest.raises(UsageError):
            await both.a.__aenter__()
        await both.a.aclose()
        await both.a.aclose()
        with pytest.raises(UsageError):
            await both.a.__aenter__()
        await until(lambda: not both.servers[0].workers.links)


def in_thread(call: Callable[[], Any]) -> BaseException | None:
    found: list[BaseException | None] = [None]

    def run() -> None:
        try:
            made = call()
            if asyncio.iscoroutine(made):
                asyncio.run(made)
        except BaseException as error:
            found[0] = error

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


async def test_other_threads_are_refused_and_change_nothing() -> None:
    async with kvxfer.local() as client:
        region = await client.alloc(64)
        described = region.descriptor("w")
        cache = await make_cache(client, small_geometry(), 8)
        calls: list[Callable[[], Any]] = [
            lambda: client.put(region, described),
            lambda: client.get(region, region.descriptor("r")),
            lambda: client.alloc(64),
            lambda: client.register(bytearray(64)),
            lambda: client.send((), "c", b""),
            lambda: client.recv("c"),
            lambda: client.connect(client.addresses),
            lambda: client.share(region, "name"),
            lambda: client.lookup("name"),
            lambda: client.offer("r", cache, TABLE).__aenter__(),
            lambda: client.push("r", to=(), cache=cache, table=TABLE).__aenter__(),
            lambda: client.publish("r", cache, TABLE).__aenter__(),
            lambda: client.adopt("r").__aenter__(),
            lambda: client.aclose(),
        ]
        for number, call in enumerate(calls):
            assert isinstance(in_thread(call), WrongThread), number
        await client.put(region, described)


async def test_after_a_fork_the_child_is_refused_and_the_parent_goes_on() -> None:
    async with kvxfer.local() as client:
        region = await client.alloc(64)
        described = region.descriptor("w")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:  # nothing of the test run may continue here
            code = 1
            try:
                for call in (lambda: client.put(region, described), lambda: client.aclose().send(None)):
                    try:
                        call()
                        code = 2
                        break
                    except ForkedClientError:
                        code = 0
            except BaseException:
                traceback.print_exc()
                code = 3
            os._exit(code)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        await client.put(region, described)
        await client.send((), "c", b"x")


BAD_TIMES = [0, -1, -0.001, float("nan"), float("inf"), "1", True, [], 10**400]


@pytest.mark.parametrize("bad", BAD_TIMES, ids=[repr(bad)[:12] for bad in BAD_TIMES])
async def test_times_that_make_no_sense_are_refused_by_every_call(bad: Any) -> None:
    async with kvxfer.local() as client:
        region = await client.alloc(64)
        cache = await make_cache(client, small_geometry(), 8)
        ticket = {"v": 1, "node_id": "0" * 32, "incarnation": "0" * 32, "addresses": ["127.0.0.1:1"]}
        ticket |= {"posting": "0" * 32, "secret": "0" * 32, "request_id": "r", "expires_in_s": 1}
        described = region.descriptor("rw")
        calls: list[Callable[[], Any]] = [
            lambda: client.put(region, described, timeout=bad),
            lambda: client.get(region, described, timeout=bad),
            lambda: client.send((), "c", b"", timeout=bad),
            lambda: client.recv("c", timeout=bad),
            lambda: client.connect(client.addresses, timeout=bad),
            lambda: client.lookup("x", timeout=bad),
            lambda: client.share(region, "x", lease_s=bad),
            lambda: client.offer("r", cache, TABLE, timeout=bad),
            lambda: client.offer("r", cache, TABLE, lease_s=bad),
            lambda: client.push("r", to=(), cache=cache, table=TABLE, timeout=bad),
            lambda: client.publish("r", cache, TABLE, lease_s=bad),
            lambda: client.pull(ticket, cache, TABLE, timeout=bad),
            lambda: client.adopt("r", timeout=bad),
            lambda: client.notifications(described).next(timeout=bad),
        ]
        if bad != 0 or bad is False:
            calls.append(lambda: client.push("r", to=(), cache=cache, table=TABLE, wait_s=bad))
            calls.append(lambda: client.adopt("r", wait_s=bad))
        for number, call in enumerate(calls):
            with pytest.raises(UsageError):
                made = call()
                if asyncio.iscoroutine(made):
                    await made
                raise AssertionError(f"call {number} took {bad!r}")
        assert client.plane.engine.counters().grants == 1
        assert client.reservations.live == ()


async def test_whole_seconds_are_times() -> None:
    async with kvxfer.local() as client:
        region = await client.alloc(64)
        await client.put(region, region.descriptor("w"), timeout=5)
        cache = await make_cache(client, small_geometry(), 8)
        async with client.offer("r", cache, TABLE, timeout=5, lease_s=5):
            pass


async def test_closing_waits_for_a_running_allocation_without_holding_the_loop() -> None:
    async with kvxfer.local() as client:
        engine, alloc = client.plane.engine, client.plane.engine.alloc

        def slowly(length: int, numa_node: int | None = None) -> Any:
            info = alloc(length, numa_node)
            time.sleep(0.2)
            return info

        engine.alloc = slowly  # type: ignore[method-assign]
        allocating = asyncio.ensure_future(client.alloc(4096))
        await asyncio.sleep(0.01)
        closing = asyncio.ensure_future(client.aclose())
        longest, before = 0.0, time.perf_counter()
        while not closing.done():
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            longest, before = max(longest, now - before), now
        await closing
        assert longest < 0.15
        result = (await asyncio.gather(allocating, return_exceptions=True))[0]
        assert isinstance(result, ClosedError | kvxfer.Region)


async def test_a_completion_in_the_ring_beats_the_deadline() -> None:
    async with pair("tcp") as both:
        source, target = await both.a.alloc(1 << 20), await both.b.alloc(1 << 20)
        described = target.descriptor("w")
        await both.a.put(source, described)
        source.array[:] = 1
        transfer = both.a.put(source, described, timeout=0.05)
        end = time.perf_counter() + 0.15
        while time.perf_counter() < end:  # both loops sleep through it; the engines do not
            np.count_nonzero(target.array)
        assert (await transfer).state == "done"

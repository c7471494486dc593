"""`ThreadedClient`: a client used from threads that have no event loop."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

import kvxfer
from kvxfer.client import Client
from kvxfer.errors import (
    ClosedError,
    ConfigError,
    DaemonUnavailable,
    ForkedClientError,
    GeometryMismatch,
    TooManyPending,
    TransferCancelled,
    TransferTimeout,
    UsageError,
    WrongThread,
)
from kvxfer.memory.region import KVCache
from kvxfer.server import Server, embedded_config
from kvxfer.threaded import Handle, ThreadedClient
from tests.conftest import slack
from tests.support.nodes import small_geometry, tokens_of

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
TABLE = kvxfer.BlockTable.of([3, 1, 6], tokens=40)
LIMIT = 20 * slack()


class Daemons:
    """Two daemons on a loop of their own."""

    def __init__(self) -> None:
        self.config = embedded_config(transports=("shm", "tcp"))
        self.sockets: list[str] = []
        self._ready = threading.Event()
        self._stop: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(LIMIT)

    async def _serve(self) -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        self._stop = lambda: loop.call_soon_threadsafe(stop.set)  # type: ignore[assignment,return-value]
        other = embedded_config(transports=("shm", "tcp"))
        async with Server(self.config, embedded=True) as one, Server(other, embedded=True) as two:
            self.sockets = [str(one.socket_path), str(two.socket_path)]
            self._ready.set()
            await stop.wait()

    def close(self) -> None:
        self._stop()
        self._thread.join()


@pytest.fixture(scope="module")
def daemons() -> Iterator[Daemons]:
    made = Daemons()
    yield made
    made.close()


@pytest.fixture(params=LOOPS)
def loops(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    return LOOPS[request.param]


@pytest.fixture
def client(daemons: Daemons, loops: Any) -> Iterator[ThreadedClient]:
    with ThreadedClient(daemons.sockets[0], config=daemons.config, loop_factory=loops) as made:
        yield made


@pytest.fixture
def other(daemons: Daemons, loops: Any) -> Iterator[ThreadedClient]:
    with ThreadedClient(daemons.sockets[1], config=daemons.config, loop_factory=loops) as made:
        yield made


def cache_of(client: ThreadedClient, **changes: Any) -> KVCache:
    layout, length = kvxfer.contiguous_layout(small_geometry(**changes), blocks=8)
    cache = KVCache(layout, client.alloc(length))
    cache.regions[0].array.view(np.float32)[:] = np.arange(length // 4) + cache.regions[0].generation % 1000
    return cache


def assert_equal(one: KVCache, two: KVCache) -> None:
    for layer in range(one.layout.geometry.layers):
        assert np.array_equal(tokens_of(one, TABLE, layer), tokens_of(two, TABLE, layer))


def ended(client: ThreadedClient) -> list[Handle[Any]]:
    """Wait with the descriptor, as an engine does."""
    readable, _, _ = select.select([client.fileno()], [], [], LIMIT)
    assert readable, "nothing ended"
    return client.poll()


def is_readable(client: ThreadedClient) -> bool:
    return bool(select.select([client.fileno()], [], [], 0)[0])


async def forever(_: Client) -> None:
    await asyncio.get_running_loop().create_future()


# -- work ----------------------------------------------------------------------------------------------------------


def test_publish_and_pull_end_on_the_descriptor(client: ThreadedClient, other: ThreadedClient) -> None:
    source, sink = cache_of(client), cache_of(other)
    sink.regions[0].array[:] = 0
    published = client.submit_publish("r-1", source, TABLE, key="out")
    assert other.poll() == []
    assert not is_readable(other)
    pulled = other.submit_pull(published.ticket(LIMIT).to_json(), sink, TABLE, key="in")
    assert ended(other) == [pulled]
    assert pulled.key == "in"
    assert pulled.result().bytes == 3 * 2 * 40 * 2 * 8 * 4
    assert not is_readable(other)
    assert ended(client) == [published]
    assert published.result().outcome == "released"
    assert_equal(source, sink)


def test_layers_of_a_pull_can_be_waited_for(client: ThreadedClient, other: ThreadedClient) -> None:
    source, sink = cache_of(client), cache_of(other)
    published = client.submit_publish("r-2", source, TABLE)
    pulled = other.submit_pull(published.ticket(LIMIT), sink, TABLE, layers=True)
    for layer in range(3):
        pulled.wait_layer(layer, LIMIT)
    assert pulled.layers == {0, 1, 2}
    assert pulled.result(LIMIT).layers == 3


def test_push_is_fed_layer_by_layer(client: ThreadedClient, other: ThreadedClient) -> None:
    source, sink = cache_of(client), cache_of(other)
    offered = other.submit_offer("r-3", sink, TABLE, private=True)
    push = client.submit_push(offered.ticket(LIMIT), cache=source, table=TABLE)
    for layer in (2, 0, 1):
        push.layer(layer)
    offered.wait_layer(2, LIMIT)
    push.finish()
    assert push.result(LIMIT).bytes_done == 3 * 2 * 40 * 2 * 8 * 4
    assert offered.result(LIMIT).committed
    assert_equal(source, sink)


def test_chunks_are_fed_as_they_are_computed(client: ThreadedClient, other: ThreadedClient) -> None:
    source, sink = cache_of(client), cache_of(other)
    offered = other.submit_offer("r-9", sink, TABLE)
    begun = kvxfer.BlockTable.of([3], tokens=40)
    push = client.submit_push("r-9", to=other.addresses, cache=source, table=begun)
    for first, last, more in ((0, 16, ()), (16, 40, (1, 6))):
        push.extend(more)
        for layer in range(3):
            push.layer(layer, range(first, last))
    push.finish()
    assert push.result(LIMIT).bytes_done == 3 * 2 * 40 * 2 * 8 * 4
    assert offered.result(LIMIT).committed
    assert_equal(source, sink)


def test_a_push_that_is_not_fed_ends_by_its_deadline(client: ThreadedClient, other: ThreadedClient) -> None:
    source, sink = cache_of(client), cache_of(other)
    offered = other.submit_offer("r-4", sink, TABLE)
    push = client.submit_push("r-4", to=other.addresses, cache=source, table=TABLE, timeout=0.3)
    push.layer(0)
    with pytest.raises(TransferTimeout, match="all layers were given"):
        push.result(LIMIT)
    with pytest.raises(TransferTimeout):
        push.layer(1)
    with pytest.raises(kvxfer.KvxferError):
        offered.result(LIMIT)


def test_a_wrong_layer_and_a_commit_too_early_are_the_outcome(client: ThreadedClient, other: ThreadedClient) -> None:
    source, sink = cache_of(client), cache_of(other)
    for number, feed in enumerate((lambda push: push.layer(7), lambda push: push.finish())):
        other.submit_offer(f"r-5-{number}", sink, TABLE)
        push = client.submit_push(f"r-5-{number}", to=other.addresses, cache=source, table=TABLE)
        feed(push)
        with pytest.raises(UsageError):
            push.result(LIMIT)
        for handle in ended(other):
            assert handle.error is not None


def test_what_is_wrong_with_a_call_is_its_outcome(client: ThreadedClient, other: ThreadedClient) -> None:
    source, sink = cache_of(client), cache_of(other, head_size=16)
    published = client.submit_publish("r-6", source, TABLE)
    with pytest.raises(GeometryMismatch):
        other.submit_pull(published.ticket(LIMIT), sink, TABLE).result(LIMIT)
    with pytest.raises(UsageError):
        other.submit_pull("no ticket", sink, TABLE).result(LIMIT)
    with pytest.raises(UsageError):
        other.submit_pull(published.ticket(), sink, TABLE, priority="urgent").result(LIMIT)
    with pytest.raises(UsageError):
        other.alloc(-1)
    with pytest.raises(TypeError):
        other.alloc(8, colour="red")


def test_results_and_errors_of_any_work(client: ThreadedClient) -> None:
    async def raises(_: Client) -> None:
        raise LookupError("mine")

    async def adds(client: Client) -> int:
        return len(client.addresses)

    assert client.run(adds) == len(client.addresses) > 0
    with pytest.raises(LookupError, match="mine"):
        client.run(raises)
    assert client.poll() == []  # a call tells by itself
    handle = client.submit(raises, key=7)
    assert ended(client) == [handle]
    assert isinstance(handle.error, LookupError)


def test_what_has_not_ended_is_bounded(client: ThreadedClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.threaded.HANDLES_MAX", 2)
    handles = [client.submit(forever), client.submit(forever)]
    with pytest.raises(TooManyPending):
        client.submit(forever)
    for handle in handles:
        handle.cancel()
    while not all(handle.done for handle in handles):
        ended(client)
    client.submit(forever)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: nothing to tell apart")
def test_an_engine_s_pinning_is_inherited_unless_the_configuration_says_otherwise(daemons: Daemons) -> None:
    async def cpus(_: Client) -> set[int]:
        return os.sched_getaffinity(0)

    before = os.sched_getaffinity(0)
    one = min(before)
    os.sched_setaffinity(0, {one})
    try:
        for wanted, expected in (("", {one}), ("all", before), (str(max(before)), {max(before)})):
            config = replace(daemons.config, engine_cpus=wanted)
            with ThreadedClient(daemons.sockets[0], config=config) as client:
                assert client.run(cpus) == expected
        with pytest.raises(ConfigError, match="no CPU 99999"):
            ThreadedClient(daemons.sockets[0], config=replace(daemons.config, engine_cpus="99999")).start()
        assert os.sched_getaffinity(0) == {one}
    finally:
        os.sched_setaffinity(0, before)


def test_counters_tell_from_any_thread(client: ThreadedClient, other: ThreadedClient) -> None:
    source, sink = cache_of(client), cache_of(other)
    published = client.submit_publish("r-8", source, TABLE, retryable=True)
    with pytest.raises(GeometryMismatch):
        other.submit_pull(published.ticket(LIMIT), cache_of(other, head_size=16), TABLE).result(LIMIT)
    pulled = other.submit_pull(published.ticket(LIMIT), sink, TABLE).result(LIMIT)
    found = other.counters()
    assert (found["pulls"], found["pull_failures"], found["pulled_bytes"]) == (1, 1, pulled.bytes)
    assert found["regions"] == 2
    assert found["pushes"] == 0
    with pytest.raises(TypeError):
        found["pulls"] = 2  # type: ignore[index]


# -- its end -------------------------------------------------------------------------------------------------------


def test_cancel_ends_a_job_once(client: ThreadedClient) -> None:
    handle = client.submit(forever)
    with pytest.raises(TransferTimeout):
        handle.result(0.01)
    handle.cancel()
    handle.cancel()
    with pytest.raises(TransferCancelled):
        handle.result(LIMIT)
    assert client.poll() == [handle]
    handle.cancel()
    assert client.poll() == []


def test_a_cancelled_pull_releases_its_publisher(client: ThreadedClient, other: ThreadedClient) -> None:
    source, sink = cache_of(client), cache_of(other)
    published = client.submit_publish("r-7", source, TABLE)
    pulled = other.submit_pull(published.ticket(LIMIT), sink, TABLE)
    pulled.cancel()
    assert ended(other) == [pulled]
    assert pulled.error is None or isinstance(pulled.error, TransferCancelled)
    other.submit_release(published.ticket()).result(LIMIT)
    assert published.result(LIMIT).outcome in ("released", "abandoned")


def test_a_call_that_takes_too_long_is_cancelled(client: ThreadedClient) -> None:
    gone = threading.Event()

    async def notes(_: Client) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            gone.set()

    with pytest.raises(TransferTimeout):
        client.run(notes, timeout=0.05)
    assert gone.wait(LIMIT)


def test_close_ends_what_runs_and_poll_still_tells_of_it(daemons: Daemons, loops: Any) -> None:
    client = ThreadedClient(daemons.sockets[0], config=daemons.config, loop_factory=loops)
    assert client.closed
    with pytest.raises(ClosedError):
        client.submit(forever)
    with pytest.raises(ClosedError):
        client.fileno()
    client.start()
    with pytest.raises(UsageError):
        client.start()
    before = threading.active_count()
    handle = client.submit(forever)
    waiting: list[BaseException] = []

    def wait() -> None:
        try:
            handle.result()
        except ClosedError as error:
            waiting.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    client.close()
    waiter.join()
    assert len(waiting) == 1
    assert client.closed
    assert client.poll() == [handle]
    assert client.unready
    for call in (lambda: client.submit(forever), client.fileno, lambda: client.addresses, lambda: client.alloc(8)):
        with pytest.raises(ClosedError):
            call()
    client.close()
    handle.cancel()
    assert threading.active_count() < before


def test_a_daemon_that_is_not_there_is_told_by_the_start(tmp_path: Path, loops: Any) -> None:
    client = ThreadedClient(tmp_path / "nobody.sock", config=embedded_config(), loop_factory=loops)
    with pytest.raises(DaemonUnavailable):
        client.start()
    client.close()
    assert client.closed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_thread_dies_everybody_is_told(daemons: Daemons, loops: Any) -> None:
    async def dies(_: Client) -> None:
        raise SystemExit("the end of this thread")

    client = ThreadedClient(daemons.sockets[0], config=daemons.config, loop_factory=loops)
    client.start()
    waits, kills = client.submit(forever), client.submit(dies)
    with pytest.raises(ClosedError):
        waits.result(LIMIT)
    with pytest.raises(SystemExit):
        kills.result(LIMIT)
    told: list[Handle[Any]] = []
    while len(told) < 2:
        told += ended(client)
    assert set(told) == {waits, kills}
    client.close()  # waits for the thread
    with pytest.raises(ClosedError, match="died"):
        client.submit(forever)


def test_the_client_s_own_thread_does_not_wait_for_itself(client: ThreadedClient) -> None:
    other = client.submit(forever)

    async def waits(_: Client) -> None:
        other.result()

    async def closes(_: Client) -> None:
        client.close()

    for work in (waits, closes):
        with pytest.raises(WrongThread):
            client.run(work)


def test_work_that_blocks_is_named_by_a_close_that_waits_for_it(daemons: Daemons, loops: Any) -> None:
    go = threading.Event()

    async def blocks(_: Client) -> None:
        go.wait(LIMIT)

    client = ThreadedClient(daemons.sockets[0], config=daemons.config, loop_factory=loops)
    client.start()
    handle = client.submit(blocks)
    with pytest.raises(TransferTimeout, match="did not end"):
        client.close(0.05)
    go.set()
    client.close()
    assert handle.done


def test_several_threads_submit_at_once(client: ThreadedClient) -> None:
    async def number(_: Client, value: int) -> int:
        return value

    def submits(first: int) -> None:
        for value in range(first, first + 50):
            client.submit(partial(number, value=value), key=value)

    threads = [threading.Thread(target=submits, args=(first,)) for first in (0, 50, 100)]
    for thread in threads:
        thread.start()
    told: list[Handle[Any]] = []
    while len(told) < 150:
        told += ended(client)
    for thread in threads:
        thread.join()
    assert sorted(handle.key for handle in told) == sorted(handle.result() for handle in told)  # type: ignore[type-var]
    assert {handle.key for handle in told} == set(range(150))


def test_what_is_only_read_is_read_from_any_thread(client: ThreadedClient) -> None:
    async def inside(inner: Client) -> Client:
        return inner

    inner = client.run(inside)
    assert inner.addresses == client.addresses
    assert inner.unready == client.unready == ""
    assert not inner.closed
    with pytest.raises(WrongThread):
        inner.plane  # noqa: B018


# -- processes -----------------------------------------------------------------------------------------------------


def test_a_forked_child_is_refused_and_the_parent_goes_on(client: ThreadedClient) -> None:
    handle = client.submit(forever)
    child = os.fork()
    if child == 0:
        calls = (client.poll, client.close, client.start, client.fileno, handle.result, handle.cancel)
        refused = 0
        for call in (*calls, lambda: client.submit(forever), lambda: client.addresses):
            try:
                call()
            except ForkedClientError:
                refused += 1
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 8
    handle.cancel()
    assert ended(client) == [handle]
    assert client.alloc(4096).length == 4096


SCRIPT = """
    import asyncio, sys, os
    from kvxfer.threaded import ThreadedClient
    from kvxfer.config import load

    async def forever(client):
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            print("ended in order", flush=True)

    client = ThreadedClient(sys.argv[1], config=load(flags={{"transports": ("shm", "tcp")}}).config)
    client.start()
    handle = client.submit(forever)
    client.alloc(1 << 20)
    {last}
"""


@pytest.mark.parametrize(
    ("last", "code", "out"),
    [
        ("", 0, "ended in order\n"),
        ("sys.exit(3)", 3, "ended in order\n"),
        ("raise LookupError", 1, "ended in order\n"),
        ("child = os.fork()\n    if child: os.waitpid(child, 0)", 0, "ended in order\n"),
        ("handle.result()", -15, ""),
    ],
)
def test_a_process_that_forgets_its_client_ends(daemons: Daemons, last: str, code: int, out: str) -> None:
    script = textwrap.dedent(SCRIPT.format(last=last))
    process = subprocess.Popen(
        [sys.executable, "-c", script, daemons.sockets[0]], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    if code < 0:
        time.sleep(0.5)
        process.terminate()
    stdout, stderr = process.communicate(timeout=LIMIT)
    assert (process.returncode, stdout) == (code, out), stderr
    assert "ResourceWarning" not in stderr
    assert "Fatal" not in stderr

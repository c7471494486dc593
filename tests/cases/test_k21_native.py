"""K21: forks, threads, and every status that a vendor's library may answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time

import pytest

import kvxfer
from examples.child_processes import python_process
from kvxfer.errors import KvxferError, WrongThread
from kvxfer.native.engine import OpKind
from kvxfer.native.status import StatusCode, error_for
from tests.cases.facts import limit, within
from tests.cases.harness import ROOT, Cluster, metric, slow
from tests.cases.scale import FULL
from tests.native.hixl_process import MIB, Near, control, other
from tests.native.simulated import simulated

pytestmark = [pytest.mark.once, pytest.mark.timeout(120)]
PUT = OpKind.PUT
DOCUMENTED = (103900, 103901, 103902, 103905, 203900, 503900)
UNKNOWN = (99, 999999, 507899)
PASSING = (103901, 103902, 203900)  # time is up, not connected, nothing free


async def each(faults: list[tuple[str, int]]) -> None:
    async with other() as owner, Near() as near:
        mine = near.alloc(MIB, fill=8)
        import_ = await near.reach(owner)
        assert await near.move(PUT, mine, import_) == 0
        for operation, status in faults:
            control(FAIL=f"{operation}:1:{status}")
            await asyncio.sleep(0.005)
            outcome = await near.move(PUT, mine, import_)
            if outcome != 0:  # asked again with success is right for what may pass
                assert outcome in {int(known) for known in StatusCode}, (operation, status, outcome)
                assert isinstance(error_for(outcome), KvxferError)
            else:
                assert status in PASSING, (operation, status)
            control()
            await asyncio.sleep(0.005)
            assert await near.move(PUT, mine, import_) == 0, f"after {status} at {operation}"


@simulated()
async def test_c83_a_status_has_an_end_and_the_link_is_made_anew() -> None:
    """Documented or not, at submit or at the end of a transfer: one typed outcome, never "pending", then it works."""
    await each([("transfer", 503900), ("transfer", 99), ("async", 103901), ("async", 203900), ("async", 103902)])


@pytest.mark.slow
@pytest.mark.full
@simulated()
async def test_c83_every_status() -> None:
    await each([(operation, status) for status in (*DOCUMENTED, *UNKNOWN) for operation in ("transfer", "async")])


@simulated()
async def test_c83_already_connected_and_not_connected() -> None:
    async with other() as owner, Near() as near:
        mine = near.alloc(MIB, fill=8)
        import_ = await near.reach(owner)
        control(FAIL="connect:1:103903")  # somebody else has connected: what counts is that there is a link
        await asyncio.sleep(0.005)
        began = time.monotonic()
        outcome = await near.move(PUT, mine, import_)
        if outcome != 0:
            control()
            outcome = await near.move(PUT, mine, import_)
        assert outcome == 0
        assert time.monotonic() - began < 5


@simulated(SLOTS=2, LATENCY_US=300)
async def test_c83_resources_that_are_used_up_are_asked_for_again() -> None:
    async with other() as owner, Near() as near:
        mine = near.alloc(16 * MIB, fill=4)
        import_ = await near.reach(owner, 16 * MIB)
        outcomes = [near.start(PUT, mine, import_, MIB) for _ in range(30)]
        assert {(await asyncio.wait_for(future, 20)).status for _, future in outcomes} == {0}


FORK = """
import asyncio, multiprocessing, os, sys, warnings
import numpy as np
import kvxfer
from kvxfer.errors import ForkedClientError
from tests.support.nodes import two_nodes

warnings.simplefilter("ignore")

async def fresh():
    async with kvxfer.local() as client:
        region = await client.alloc(4096)
        await client.put(region, region.descriptor("w"))

def in_child(client, region, described, close):
    try:
        client.put(region, described)
    except ForkedClientError:
        pass
    else:
        return 2
    if close:
        os.closerange(3, 1 << 12)
        return 0
    asyncio.run(fresh())
    return 0

def bare():
    asyncio.run(fresh())

async def main(transport):
    async with two_nodes([transport]) as (a, b):
        source, target = await a.alloc(1 << 16), await b.alloc(1 << 16)
        described = target.descriptor("w")
        await a.put(source, described)
        for close in (True, False):
            child = os.fork()
            if child == 0:
                code = 9
                try:
                    code = in_child(a, source, described, close)
                finally:
                    os._exit(code)
            _, status = await asyncio.to_thread(os.waitpid, child, 0)
            assert os.waitstatus_to_exitcode(status) == 0, (close, status)
        for method in ("fork", "forkserver"):
            process = multiprocessing.get_context(method).Process(target=bare)
            process.start()
            process.join(30)
            assert process.exitcode == 0, (method, process.exitcode)
        for number in range(100):
            source.array[:] = number
            await a.put(source, described)
            assert (target.array == number).all()
    print("exact", flush=True)

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_c86_forks(transport: str, tmp_path: object) -> None:
    script = f"{tmp_path}/forks.py"
    await asyncio.to_thread(write, script)
    async with python_process([script, transport], name="forks", environment={"PYTHONPATH": ROOT}) as process:
        assert await process.readline(limit(60)) == "exact\n"
        assert await process.wait(limit(10)) == 0


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("end", ["killed", "closed"])
async def test_c86_a_child_keeps_no_connection_of_its_parent(nodes: Cluster, end: str) -> None:
    """The parent ends, its child lives: the other side, and the daemon, notice as if there were no child."""
    a, b = await nodes.fresh(b=slow(nodes.transport, "chunk_bytes=4096,chunk_ms=100"))
    for side in (a, b):
        await side.do("alloc", name="m", length=1 << 20)
        await side.do("cache", name="c", blocks=16)
    described = (await a.do("describe", name="m"))["descriptor"]
    alone = (await b.do("sockets"))["sockets"]
    ticket = (await a.do("publish", name="p", cache="c", blocks=list(range(16))))["ticket"]
    await b.do("start", name="t", way="get", region="m", descriptor=described)
    await b.do("pull", name="q", ticket=ticket, cache="c", blocks=list(range(16)))
    await asyncio.sleep(0.2)
    child = (await a.do("fork"))["pid"]
    try:
        if end == "killed":
            a.process.kill()
            await a.process.wait()
        else:
            await a.do("close")
        with within(2, "the end of what reads from it"):
            assert (await b.do("outcome", name="t"))["state"] == "failed"
            assert (await b.do("ended", name="q"))["outcome"] == "failed"
        with within(2, "the end of its connections"):
            while (await b.do("sockets"))["sockets"] > alone or await metric(a, "kvxfer_workers"):
                await asyncio.sleep(0.05)
        os.kill(child, 0)  # it is still there
        if end == "killed":
            await a.reopen(transports=[nodes.transport])
        else:
            a.facts = await a.do("open", socket=str(a.socket), transports=[nodes.transport])
        await a.do("alloc", name="again", length=4096)
        again = (await a.do("describe", name="again"))["descriptor"]
        await b.do("start", name="u", way="get", region="m", descriptor=again, span=(0, 4096))
        ended = await b.do("outcome", name="u")
        assert ended["state"] == "done", ended
    finally:
        os.kill(child, signal.SIGKILL)


def write(path: str) -> None:
    with open(path, "w") as file:
        file.write(FORK)


async def test_c87_other_threads_are_refused_while_transfers_go_on() -> None:
    """The rule is `WrongThread`, for every call from every other thread; ThreadSanitizer runs the native suites
    (`make sanitize`).
    """
    async with kvxfer.local() as client:
        source, target = await client.alloc(4096), await client.alloc(4096)
        described = target.descriptor("w")
        stop, refused = threading.Event(), [0]
        other_outcomes: list[object] = []

        def intrude() -> None:
            while not stop.is_set():
                for call in (
                    lambda: client.put(source, described),
                    lambda: client.connect(client.addresses).send(None),
                    lambda: client.register(bytearray(64)).send(None),
                    lambda: client.aclose().send(None),
                ):
                    try:
                        call()
                    except WrongThread:
                        refused[0] += 1
                    except Exception as error:
                        other_outcomes.append(error)
                    else:
                        other_outcomes.append(call)

        threads = [threading.Thread(target=intrude) for _ in range(8)]
        for thread in threads:
            thread.start()
        end, number = time.monotonic() + (30 if FULL else 1), 0
        try:
            while time.monotonic() < end:
                number += 1
                source.array[:] = number % 256
                transfer = client.put(source, described)
                if number % 7 == 0:
                    with contextlib.suppress(KvxferError):
                        await transfer.cancel()
                else:
                    await transfer
                    assert (target.array == number % 256).all()
                assert transfer.settled
                await asyncio.sleep(0)
        finally:
            stop.set()
            for thread in threads:
                await asyncio.to_thread(thread.join)
        assert other_outcomes == []
        assert refused[0] > 8

"""K20: limits of the host and of containers are named, survived, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from pathlib import Path

import pytest

from examples.child_processes import daemon, python_process
from examples.remote_worker import WorkerFailed
from kvxfer.errors import ShmTooSmall
from tests.cases.facts import limit
from tests.cases.harness import BOTH, Cluster, until
from tests.cases.scale import FULL
from tests.memory import test_allocation

pytestmark = [pytest.mark.once, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]
MIB = 1 << 20


async def test_c81_too_little_room_is_an_error_and_never_sigbus(nodes: Cluster) -> None:
    """Regions are memfds, so /dev/shm has no part in it; the same shortage is made by a limit of the process."""
    a, b = await nodes.fresh()
    before = resource.prlimit(a.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(a.process.pid, resource.RLIMIT_FSIZE, (16 * MIB, before[1]))
    try:
        with pytest.raises(WorkerFailed) as caught:
            await a.do("alloc", name="big", length=32 * MIB)
        assert caught.value.code == ShmTooSmall.code
        for word in (str(32 * MIB), f"have={16 * MIB}", "ulimit -f"):
            assert word in str(caught.value), "what was asked for, and what there is"
        assert a.process.returncode is None
        # memory of the user's own needs no room there, and moves as well
        await a.do("own", name="r", length=32 * MIB)
        await b.do("alloc", name="r", length=32 * MIB)
        await a.do("fill", name="r", seed=81, block=MIB)
        await a.do(
            "start", name="t", way="put", region="r", descriptor=(await b.do("describe", name="r"))["descriptor"]
        )
        assert (await a.do("outcome", name="t"))["state"] == "done"
        assert (await a.do("digest", name="r"))["sha"] == (await b.do("digest", name="r"))["sha"]
    finally:
        resource.prlimit(a.process.pid, resource.RLIMIT_FSIZE, before)


def left(directory: Path) -> dict[str, int]:
    """Files by kind."""
    names = os.listdir(directory) if directory.exists() else []
    kinds = {"engines": ("e-", ".sock"), "counters": ("c-", ".counters"), "daemons": ("kvxferd", ".sock")}
    return {
        kind: sum(name.startswith(head) and name.endswith(tail) for name in names)
        for kind, (head, tail) in kinds.items()
    }


async def test_c82_killed_again_and_again(tmp_path: Path) -> None:
    place, shm = tmp_path / "d", set(os.listdir("/dev/shm"))
    for _ in range(20 if FULL else 4):
        async with daemon(place, transports="shm", copy_threads=1) as running:
            await until(lambda: max(left(place).values()) <= 1, 2, "what the one before has left is gone")
            running.process.kill()
            await running.process.wait()
    async with daemon(place, transports="shm", copy_threads=1) as running:
        # a second one is turned away and takes nothing from the first
        environment = {"KVXFER_SOCKET_DIR": str(place), "KVXFER_LISTEN": "127.0.0.1:0", "KVXFER_HTTP": ""}
        async with python_process(["-m", "kvxfer", "serve"], name="second", environment=environment) as second:
            assert await second.wait(limit(20)) == 2
            assert f"pid {running.process.pid}" in second.tail()
        await until(lambda: left(place)["engines"] == 1, 2, "what the killed ones have left is gone")
        assert left(place) == {"engines": 1, "counters": 0, "daemons": 1}
        running.process.send_signal(signal.SIGTERM)
        assert await running.process.wait(limit(5)) == 0
    assert not any(left(place).values()), left(place)
    assert set(os.listdir("/dev/shm")) <= shm, "no segment has a name that could be left"


@BOTH
async def test_c82_what_a_killed_worker_leaves_is_removed(two_daemons: Cluster, transport: str) -> None:
    two_daemons.transport = transport
    a, _ = await two_daemons.fresh()
    place = a.socket.parent
    before = left(place)
    a.process.kill()
    await until(lambda: left(place)["engines"] < before["engines"] or transport == "tcp", 5, "its socket is removed")
    await until(lambda: left(place)["counters"] < before["counters"], 5, "its counters are removed")
    assert left(place)["daemons"] == 1


async def test_c85_little_locked_memory_is_no_obstacle_for_shm_and_tcp(nodes: Cluster) -> None:
    a, b = await nodes.fresh()
    before = resource.prlimit(a.process.pid, resource.RLIMIT_MEMLOCK)
    resource.prlimit(a.process.pid, resource.RLIMIT_MEMLOCK, (65536, before[1]))
    try:
        for side in (a, b):
            await side.do("alloc", name="r", length=4 * MIB)
        await a.do("fill", name="r", seed=85, block=MIB)
        await a.do(
            "start", name="t", way="put", region="r", descriptor=(await b.do("describe", name="r"))["descriptor"]
        )
        assert (await a.do("outcome", name="t"))["state"] == "done"
        assert (await a.do("digest", name="r"))["sha"] == (await b.do("digest", name="r"))["sha"]
    finally:
        resource.prlimit(a.process.pid, resource.RLIMIT_MEMLOCK, before)


async def test_c85_the_doctor_warns_before_anything_starts() -> None:
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536));"
        "from kvxfer.doctor import host; host.CAPABILITIES.clear();"
        "from kvxfer import cli; sys.exit(cli.main(['doctor']))"
    )
    async with python_process(["-c", script], name="doctor") as doctor:
        while "locked memory" not in (line := await doctor.readline(limit(30))):
            pass
        for word in ("warning", "ulimit -l is 64 KiB", "256 MiB"):
            assert word in line, "limit, amount, remedy"


async def test_c96_numa_where_it_is_allowed_and_where_it_is_not() -> None:
    await test_allocation.test_a_numa_node_is_applied_and_told()
    await asyncio.to_thread(test_allocation.test_a_numa_node_that_is_denied_is_said_once)

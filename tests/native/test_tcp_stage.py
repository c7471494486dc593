"""The conformance suite over transports that move host memory, with memory of (simulated) cards on one side or both.

A look of the CPU at such memory ends the process, so whatever passes here went by the driver. Each runs in a pytest of
its own: a process loads the vendor's libraries once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvxfer.native.engine import EventKind
from kvxfer.native.status import StatusCode
from tests.native.ascend_sim.simulation import Simulation
from tests.native.conformance import KIB, MIB, Outcome, Pair, Reach, settled, short_directory, within
from tests.native.simulated import ROOT, environment, faults, simulated
from tests.nodes import until

pytestmark = pytest.mark.once

QUICK = "moves_exactly or revoke or cancel or corrupt or owner_checks"
# Owner's memory - ours; in the first group all cases, in the others those that differ between the ways.
WAYS = {
    "tcp:hbm-hbm,shm:dram-hbm": "",
    "tcp:dram-hbm,tcp:hbm-dram,shm:pinned-hbm": "moves_exactly and not mapping",
    "fault+tcp:hbm-hbm,tcp:hbm-dram,shm:pinned-hbm,fault+shm:dram-hbm": f"({QUICK}) and not mapping",
}
FIRST, SECOND, THIRD = WAYS


@pytest.mark.parametrize("ways", [FIRST, SECOND, pytest.param(THIRD, marks=pytest.mark.slow)])
def test_host_transports_keep_their_promises_for_cards(ways: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "40"]
    command += ["tests/native/hixl_suite.py"] + (["-k", WAYS[ways]] if WAYS[ways] else [])
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(tmp_path, HBM="2G") | {"KVXFER_CONFORMANCE": ways},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert faults(tmp_path) == []


# -- in one process each: drivers that stand still, and what is left -------------------------------------------------


def simulator() -> Simulation:
    """The one that this child runs over."""
    return Simulation(Path(os.environ["KVXFER_SIM_DIR"]))


@asynccontextmanager
async def reaching(way: str, **changes: object) -> AsyncIterator[Reach]:
    with short_directory() as directory:
        pair = Pair(directory, way)
        try:
            pair.configure(**changes)
            reach = await pair.reach(MIB)
            reach.fill()
            yield reach
        finally:
            simulator().control()
            pair.close()


def token_of(outcome: Outcome) -> int:
    assert isinstance(outcome, tuple), outcome
    return outcome[0]


async def arrived(reach: Reach) -> None:
    """A frame is in the owner's block, and its driver has been asked to copy it on."""
    row, frame_bytes, buffer_bytes = reach.pair.index, 64 * KIB, 24 * KIB  # what came with the head is not counted
    counters = reach.pair.owner.engine.counters
    await until(lambda: counters().transports[row].copied_bytes >= frame_bytes - buffer_bytes)


async def a_transfer_is_cancelled_while_our_driver_stands_still() -> None:
    async with reaching("tcp:hbm-hbm", tcp_streams=1) as reach:
        before, ours = reach.remote_bytes.copy(), reach.mine_bytes.copy()
        simulator().control(STALL=1)
        put, get = reach.put(0, 0, MIB), reach.get(0, 0, MIB)
        for outcome in (put, get):
            reach.engine.cancel(token_of(outcome))
            assert (await settled(outcome)).status == StatusCode.CANCELLED
        simulator().control()
        assert (await settled(reach.notify(1))).status == 0  # the connection lives, and what was on it is over
        assert (reach.remote_bytes == before).all()
        assert (reach.mine_bytes == ours).all()
        assert (await settled(reach.put(0, 0, MIB))).status == 0
        assert (reach.remote_bytes == ours).all()


async def a_grant_is_taken_back_while_its_driver_stands_still() -> None:
    async with reaching("tcp:hbm-dram") as reach:
        before = reach.remote_bytes.copy()
        simulator().control(STALL=1)
        put = reach.put(0, 0, MIB)
        await arrived(reach)
        await within(reach.pair.owner.engine.revoke(reach.grant.id))  # quiet: nothing moves any more
        assert (await settled(put)).status == StatusCode.REVOKED
        simulator().control()
        assert (reach.remote_bytes == before).all()


async def a_read_ends_when_its_grant_is_taken_back_under_it() -> None:
    async with reaching("tcp:hbm-dram") as reach:
        simulator().control(STALL=1)
        get = reach.get(0, 0, MIB)
        await within(reach.pair.owner.engine.revoke(reach.grant.id))
        assert (await settled(get)).status in (StatusCode.REVOKED, StatusCode.UNKNOWN)
        assert not (reach.mine_bytes == reach.remote_bytes).all()


async def who_goes_leaves_nothing_behind_in_a_driver_that_stands_still() -> None:
    async with reaching("tcp:hbm-dram", tcp_streams=1) as reach:
        before = reach.remote_bytes.copy()
        simulator().control(STALL=1)
        reach.put(0, 0, MIB)
        await arrived(reach)
        reach.pair.initiator.close()
        await reach.pair.owner.event(EventKind.GRANT_LOST)
        simulator().control()
        assert (reach.remote_bytes == before).all()


@simulated(HBM="64M")
async def test_drivers_that_stand_still_hold_nobody_up() -> None:
    await a_transfer_is_cancelled_while_our_driver_stands_still()
    await a_grant_is_taken_back_while_its_driver_stands_still()
    await a_read_ends_when_its_grant_is_taken_back_under_it()
    await who_goes_leaves_nothing_behind_in_a_driver_that_stands_still()


@simulated(HBM="64M", FAIL="mallochost:*:207001")
async def test_without_pinned_memory_the_block_is_plain() -> None:
    async with reaching("tcp:hbm-hbm") as reach:
        assert (await settled(reach.put(0, 0, MIB, check=True))).status == 0
        assert (reach.remote_bytes == reach.mine_bytes).all()
        row = reach.engine.counters().transports[reach.pair.index]
        assert row.staged_bytes == MIB


@simulated(HBM="64M", FAIL="memcpyasync:1+:107000,memcpybatch:1+:107000")
async def test_a_driver_that_finds_us_wrong_is_no_fault_of_the_peers() -> None:
    async with reaching("tcp:hbm-dram") as reach:
        assert (await settled(reach.put(0, 0, MIB))).status == StatusCode.DEVICE
        assert (await settled(reach.notify(1))).status == 0  # it is an answer like others: the connection stays


@simulated(HBM="64M", FAIL="memcpyasync:1+:507899,memcpybatch:1+:507899")
async def test_a_driver_that_fails_says_so_on_either_side() -> None:
    for way in ("tcp:hbm-dram", "tcp:dram-hbm"):
        async with reaching(way) as reach:
            for outcome in (reach.put(0, 0, MIB), reach.get(0, 0, MIB)):
                assert (await settled(outcome)).status == StatusCode.DEVICE
            assert (await settled(reach.notify(1))).status == 0


@simulated(HBM="64M")
async def test_blocks_and_streams_go_with_their_connection() -> None:
    kept, threads = 0, 0

    def now() -> tuple[int, int]:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        return resident, len(os.listdir("/proc/self/task"))

    for attempt in range(12):
        async with reaching("tcp:hbm-hbm", frame_bytes=4 * MIB) as reach:
            for outcome in (reach.put(0, 0, MIB), reach.get(0, 0, MIB)):
                assert (await settled(outcome)).status == 0
        if attempt == 1:
            kept, threads = now()
    resident, running = now()
    assert resident - kept < 64 * MIB  # each round had 8 blocks of 4 MiB at least
    assert running <= threads + 2

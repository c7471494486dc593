"""The initiator's side of the tcp transport, when owners stall or die, and what an idle or busy connection costs."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import KvxferError
from kvxfer.native.engine import Event, EventKind, OpKind
from kvxfer.native.status import StatusCode
from tests.native import kvxd, tcp_target
from tests.native.conformance import KIB, MIB, Side, settled, within
from tests.native.kvxd import Frame, Speaker
from tests.native.tcp_owner import connect, eventually, import_, initiator, owner, wired
from tests.native.tcp_servers import lying_owner

SLACK = float(os.environ.get("KVXFER_TEST_SLACK", "1"))
LENGTH = 8 * MIB


async def stall(speaker: Speaker, asked: Frame) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("kind", OpKind)
async def test_cancelling_what_the_owner_never_answers(kind: OpKind) -> None:
    async with lying_owner(stall) as endpoint, initiator(cancel_ms=300) as side:
        peer, _ = await connect(side, endpoint)
        handle, _ = await import_(side, peer)
        mine, _ = side.alloc(LENGTH)
        outcome = side.engine.submit_one(kind, mine.id, handle, 0, 0, LENGTH)
        other = side.engine.submit_one(kind, mine.id, handle, 0, 0, 1000)
        assert not isinstance(outcome, Event)
        await asyncio.sleep(0.05)
        started = time.monotonic()
        side.engine.cancel(outcome[0])
        assert (await settled(outcome)).status == StatusCode.CANCELLED
        taken = time.monotonic() - started
        if kind == OpKind.GET:
            assert taken < 0.25 * SLACK, "nothing can arrive in our memory any more: at once"
            return
        assert 0.25 < taken < 1.3 * SLACK, "until the connection is reset, the owner may still write"
        assert (await settled(other)).status in (StatusCode.PEER_LOST, StatusCode.NOT_SENT)
        assert (await side.event(EventKind.PEER_DOWN)).id == peer


@asynccontextmanager
async def target() -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(tcp_target.__file__)), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        described = json.loads(await within(process.stdout.readline()))
        described["key"] = bytes.fromhex(described["key"])
        yield process, described
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()  # the pipes too, now and not when the loop gets to it


async def reach(side: Side, described: dict[str, Any]) -> tuple[int, int]:
    peer, event = await connect(side, described["endpoint"])
    assert event.status == 0
    values = {name: described[name] for name in ("grant", "generation", "key")}
    handle, event = await import_(side, peer, length=tcp_target.LENGTH, **values)
    assert event.status == 0
    return peer, handle


@pytest.mark.parametrize("kind", OpKind)
async def test_a_killed_owner_is_noticed(kind: OpKind) -> None:
    async with target() as (process, described), initiator(tcp_streams=2) as side:
        peer, handle = await reach(side, described)
        mine, _ = side.alloc(tcp_target.LENGTH)
        process.send_signal(signal.SIGSTOP)  # so that the kill comes in the middle
        outcome = side.engine.submit_one(kind, mine.id, handle, 0, 0, tcp_target.LENGTH)
        await asyncio.sleep(0.05)
        started = time.monotonic()
        process.kill()
        assert (await settled(outcome)).status == StatusCode.PEER_LOST
        assert (await side.event(EventKind.PEER_DOWN)).id == peer
        assert time.monotonic() - started < 1.0 * SLACK
        with pytest.raises(KvxferError):
            side.engine.submit_one(kind, mine.id, handle, 0, 0, 100)
        assert (await within(side.engine.close_peer(peer))).status == 0


async def test_a_stopped_owner_writes_nothing_after_the_reset() -> None:
    async with target() as (process, described), initiator(tcp_streams=2, cancel_ms=200) as side:
        _, handle = await reach(side, described)
        mine, data = side.alloc(tcp_target.LENGTH)
        data[:] = 1
        outcome = side.engine.submit_one(OpKind.PUT, mine.id, handle, 0, 0, tcp_target.LENGTH)
        assert (await settled(outcome)).status == 0
        process.send_signal(signal.SIGSTOP)
        data[:] = 2
        outcome = side.engine.submit_one(OpKind.PUT, mine.id, handle, 0, 0, tcp_target.LENGTH)
        assert not isinstance(outcome, Event)
        await asyncio.sleep(0.05)
        side.engine.cancel(outcome[0])
        assert (await settled(outcome)).status == StatusCode.CANCELLED
        process.send_signal(signal.SIGCONT)
        _, handle = await reach(side, described)
        seen = []
        for _ in range(3):
            outcome = side.engine.submit_one(OpKind.GET, mine.id, handle, 0, 0, tcp_target.LENGTH)
            assert (await settled(outcome)).status == 0
            seen.append(int((data == 2).sum()))
            await asyncio.sleep(0.05)
        assert len(set(seen)) == 1, "what the owner had not read by the reset never arrives"


# -- sharing and cost -------------------------------------------------------------------------------------------------


def tcp_threads() -> list[Path]:
    return [one for one in Path("/proc/self/task").iterdir() if (one / "comm").read_text().startswith("kvx-tcp")]


def switches() -> int:
    rows = [line for one in tcp_threads() for line in (one / "status").read_text().splitlines()]
    return sum(int(row.split()[1]) for row in rows if row.startswith("voluntary_ctxt_switches"))


async def test_idle_is_idle() -> None:
    soon = {"handshake_ms": 100, "connect_ms": 100}  # a thread may look once when the time for these is over
    async with owner(**soon) as one, initiator(tcp_streams=4, tcp_threads=2, **soon) as side:
        peer, _ = await wired(side, one)
        assert len(tcp_threads()) == 4
        await asyncio.sleep(0.3)
        before = switches()
        await asyncio.sleep(0.5)
        assert switches() == before, "no thread may wake up when nothing happens"
        await within(side.engine.close_peer(peer))


def established(endpoint: str) -> int:
    """Connections to a port of this host, each seen from its dialler."""
    port = f"{int(endpoint.rpartition(':')[2]):04X}"
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(":" + port) and row[3] == "01" for row in rows)


async def test_a_peer_has_its_streams_and_no_more() -> None:
    async with owner(length=LENGTH) as one, initiator(tcp_streams=3) as side:
        peer, handle = await wired(side, one)
        mine, _ = side.alloc(LENGTH)
        outcomes = [side.engine.submit_one(OpKind.PUT, mine.id, handle, 0, 0, LENGTH) for _ in range(20)]
        assert established(one.endpoint) == 3
        assert {(await settled(outcome)).status for outcome in outcomes} == {0}
        assert established(one.endpoint) == 3
        await within(side.engine.close_peer(peer))
        await eventually(lambda: established(one.endpoint) == 0)
        await eventually(lambda: one.engine.attached(one.grant.id) == 0)
        assert not [event for event in one.events if event.kind == EventKind.GRANT_LOST], "we said goodbye"


async def test_a_small_op_overtakes_a_large_one() -> None:
    length = 128 * MIB
    async with owner(length=length) as one, initiator(frame_bytes=MIB) as side:
        _, handle = await wired(side, one)
        mine, data = side.alloc(length)
        data[:] = 3
        for kind in OpKind:
            order: list[str] = []

            def done(future: object, name: str, order: list[str] = order) -> None:
                order.append(name)

            large = side.engine.submit_one(kind, mine.id, handle, 0, 0, length)
            small = side.engine.submit_one(kind, mine.id, handle, 0, 0, 4096)
            assert not isinstance(large, Event)
            assert not isinstance(small, Event)
            large[1].add_done_callback(partial(done, name="large"))
            small[1].add_done_callback(partial(done, name="small"))
            assert (await settled(large)).bytes == length
            await settled(small)
            assert order == ["small", "large"]


async def test_many_segments_cross_frames_and_streams() -> None:
    async with owner(length=LENGTH) as one, initiator(tcp_streams=3, tcp_threads=2, frame_bytes=64 * KIB) as side:
        _, handle = await wired(side, one)
        mine, data = side.alloc(LENGTH)
        rng = np.random.default_rng(8)
        data[:] = rng.integers(0, 256, LENGTH, dtype=np.uint8)
        cuts = np.sort(rng.choice(np.arange(1, LENGTH), 5000, replace=False))
        begins, ends = np.concatenate([[0], cuts]), np.concatenate([cuts, [LENGTH]])
        rows = np.stack([begins, begins, ends - begins], axis=1).astype(np.uint64)[rng.permutation(5001)]
        for check in (False, True):
            one.inside[:] = 0
            outcome = side.engine.submit(OpKind.PUT, mine.id, handle, rows, check=check, notify=(1, 2))
            assert (await settled(outcome)).bytes == LENGTH
            await one.event(EventKind.NOTIFY)
            assert np.array_equal(one.inside, data)
            wanted = data.copy()
            data[:] = 0
            outcome = side.engine.submit(OpKind.GET, mine.id, handle, rows, check=check)
            assert (await settled(outcome)).bytes == LENGTH
            assert np.array_equal(wanted, data)


def cpu_s(pid: int) -> float:
    values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


async def test_an_owner_without_descriptors_waits_for_some() -> None:
    async with target() as (process, described), initiator() as side:
        used = len(os.listdir(f"/proc/{process.pid}/fd"))
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (used + 3, used + 3))
        speakers = [await kvxd.dial(described["endpoint"]) for _ in range(8)]
        before = cpu_s(process.pid)
        await asyncio.sleep(0.4)
        assert cpu_s(process.pid) - before < 0.15, "trying again must not take a whole core"
        for speaker in speakers:
            speaker.writer.close()
        await reach(side, described)

"""Conformance: every token completes exactly once, and what has ended moves no byte."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import BusyError, ClosedError, KvxferError, RegionBusy, Revoked, UnknownRegion, UnknownTransfer
from kvxfer.native.engine import EventKind, OpKind
from kvxfer.native.status import StatusCode
from tests.native.conformance import BOTH, INLINE_MAX, KIB, MIB, Outcome, Pair, Reach, settled, within

VICTIM = Path(__file__).with_name("victim.py")
ROOT = Path(__file__).parents[2]
BIG = 24 * MIB
KINDS = pytest.mark.parametrize("kind", [OpKind.PUT, OpKind.GET])


def target(reach: Reach, kind: OpKind) -> Any:
    return reach.remote_bytes if kind == OpKind.PUT else reach.mine_bytes


async def stays_still(memory: Any) -> None:
    """No byte of it changes any more."""
    before = memory.copy()
    for _ in range(3):
        await asyncio.sleep(0.01)
        assert np.array_equal(memory, before)


# -- full -------------------------------------------------------------------------------------------------------------


async def test_a_full_engine_takes_nothing(pair: Pair) -> None:
    pair.configure(inflight_max=4)
    reach = await pair.reach(4 * MIB)
    reach.fill()
    outcomes: list[Outcome] = [reach.put(i * MIB, i * MIB, MIB) for i in range(4)]
    before = reach.engine.counters().transports[pair.index]
    for _ in range(3):
        with pytest.raises(BusyError):
            reach.put(0, 0, MIB)
        with pytest.raises(BusyError):
            reach.put(0, 0, 10)
    assert [(await settled(outcome)).status for outcome in outcomes] == [0] * 4
    assert np.array_equal(reach.remote_bytes, reach.mine_bytes)
    assert (await settled(reach.put(0, 0, 10))).status == 0
    after = reach.engine.counters().transports[pair.index]
    assert after.put_ops + after.failed_ops <= before.put_ops + 5


# -- cancel -----------------------------------------------------------------------------------------------------------


@KINDS
async def test_after_a_cancel_no_byte_moves(pair: Pair, kind: OpKind) -> None:
    reach = await pair.reach(BIG)
    for _ in range(5):  # this thread may have slept until all had been moved
        reach.fill()
        outcomes = [reach.one(kind, 0, 0, BIG) for _ in range(3)]
        for outcome in outcomes:
            assert isinstance(outcome, tuple)
            reach.engine.cancel(outcome[0])
        statuses = {(await settled(outcome)).status for outcome in outcomes}
        assert statuses <= {0, StatusCode.CANCELLED}
        await stays_still(target(reach, kind))
        if StatusCode.CANCELLED in statuses:
            break
    else:
        pytest.fail("five times, nothing was cancelled")
    await usable_again(pair, reach)


async def usable_again(pair: Pair, reach: Reach) -> None:
    """After a cancelled put the connection may have been given up; then a new one serves."""
    try:
        event = await settled(reach.put(0, 0, 100))
        if event.status == 0:
            return
        assert event.status in (StatusCode.PEER_LOST, StatusCode.NOT_SENT)
    except KvxferError as error:
        assert error.status in (StatusCode.PEER_LOST, StatusCode.NOT_SENT)
    import_ = await pair.import_(await pair.connect(), reach.grant)
    event = await settled(reach.engine.submit_one(OpKind.PUT, reach.mine.id, import_, 0, 0, 100))
    assert event.status == 0


async def test_cancelling_what_is_done_changes_nothing(pair: Pair) -> None:
    reach = await pair.reach(64 * KIB)
    event = await settled(reach.put(0, 0, 50 * KIB))
    reach.engine.cancel(event.token)
    assert (await settled(reach.put(0, 0, 50 * KIB))).status == 0
    with pytest.raises(KvxferError):
        reach.engine.cancel(event.token + 10**6)


# -- revoke and release -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["alloc", "register"])
async def test_after_a_revoke_no_byte_moves(pair: Pair, how: str) -> None:
    reach = await pair.reach(BIG, how=how)
    reach.fill()
    assert (await settled(reach.put(0, 0, INLINE_MAX + 1))).status == 0  # whatever is connected late is connected now
    outcomes = [reach.put(0, 0, BIG) for _ in range(3)]
    event = await within(pair.owner.engine.revoke(reach.grant.id))
    assert (event.kind, event.status, event.id) == (EventKind.REVOKE, 0, reach.grant.id)
    snapshot = reach.remote_bytes.copy()
    statuses = [(await settled(outcome)).status for outcome in outcomes]
    assert set(statuses) <= {0, StatusCode.REVOKED, StatusCode.UNKNOWN}
    assert np.array_equal(reach.remote_bytes, snapshot)
    await stays_still(reach.remote_bytes)
    await refused_after_revoke(reach)
    assert pair.owner.engine.attached(reach.grant.id) == -1
    assert pair.owner.engine.counters().quarantined_grants == 0


async def refused_after_revoke(reach: Reach) -> None:
    before = reach.remote_bytes.copy()
    for length in (10, 200 * KIB):
        try:
            event = await settled(reach.put(0, 0, length))
        except (Revoked, UnknownTransfer):
            continue
        assert event.status in (StatusCode.REVOKED, StatusCode.UNKNOWN)
    assert np.array_equal(reach.remote_bytes, before)


async def test_revoking_twice_and_what_never_was(pair: Pair) -> None:
    reach = await pair.reach(64 * KIB)
    first = pair.owner.engine.revoke(reach.grant.id)
    with pytest.raises(UnknownRegion):
        pair.owner.engine.revoke(reach.grant.id)
    assert (await within(first)).status == 0
    with pytest.raises(UnknownRegion):
        pair.owner.engine.revoke(10**9)


async def test_revoking_one_grant_leaves_the_other(pair: Pair) -> None:
    reach = await pair.reach(MIB)
    other = pair.owner.engine.grant(reach.remote.id, 0, MIB, BOTH)
    import_ = await pair.import_(reach.peer, other)
    assert (await within(pair.owner.engine.revoke(reach.grant.id))).status == 0
    reach.mine_bytes[:] = 5
    for length in (10, MIB):
        outcome = reach.engine.submit_one(OpKind.PUT, reach.mine.id, import_, 0, 0, length)
        assert (await settled(outcome)).status == 0
    assert (reach.remote_bytes == 5).all()


async def test_a_region_with_live_transfers_is_busy(pair: Pair) -> None:
    reach = await pair.reach(BIG)
    outcomes = [reach.put(0, 0, BIG) for _ in range(4)]
    try:
        releasing = reach.engine.release(reach.mine.id)
    except RegionBusy:
        assert {(await settled(outcome)).status for outcome in outcomes} == {0}
        releasing = reach.engine.release(reach.mine.id)
    else:  # this thread slept until all had been moved
        reach.engine.drain()
        assert all(not isinstance(outcome, tuple) or outcome[1].done() for outcome in outcomes)
    released = await within(releasing)
    assert (released.kind, released.status, released.id) == (EventKind.RELEASE, 0, reach.mine.id)
    with pytest.raises(UnknownRegion):
        reach.put(0, 0, 10)


@pytest.mark.parametrize("how", ["alloc", "register"])
async def test_releasing_a_region_revokes_its_grants(pair: Pair, how: str) -> None:
    reach = await pair.reach(BIG, how=how)
    outcomes = [reach.put(0, 0, BIG) for _ in range(2)]
    done = pair.owner.engine.release(reach.remote.id)
    with pytest.raises(UnknownRegion):
        pair.owner.engine.grant(reach.remote.id, 0, 10, BOTH)
    assert (await within(done)).status == 0
    statuses = {(await settled(outcome)).status for outcome in outcomes}
    assert statuses <= {0, StatusCode.REVOKED, StatusCode.UNKNOWN}
    with pytest.raises(UnknownRegion):
        pair.owner.engine.release(reach.remote.id)


async def test_attachments_are_counted(pair: Pair) -> None:
    reach = await pair.reach(64 * KIB)
    assert (await settled(reach.put(0, 0, 10))).status == 0
    assert pair.owner.engine.attached(reach.grant.id) == 1
    assert (await within(reach.engine.close_peer(reach.peer))).kind == EventKind.PEER_CLOSED

    async def gone() -> None:
        while pair.owner.engine.attached(reach.grant.id):
            await asyncio.sleep(0.002)

    await within(gone())
    assert not [event for event in pair.owner.events if event.kind == EventKind.GRANT_LOST], "it said goodbye"


# -- peers and engines that go ----------------------------------------------------------------------------------------


@KINDS
async def test_closing_a_peer_completes_its_tokens(pair: Pair, kind: OpKind) -> None:
    reach = await pair.reach(BIG)
    outcomes = [reach.one(kind, 0, 0, BIG) for _ in range(4)]
    closed = await within(reach.engine.close_peer(reach.peer))
    assert (closed.kind, closed.status, closed.id) == (EventKind.PEER_CLOSED, 0, reach.peer)
    for outcome in outcomes:
        assert isinstance(outcome, tuple)
        assert outcome[1].done(), "a token completes before its peer is closed"
    assert {outcome[1].result().status for outcome in outcomes} <= {0, StatusCode.PEER_LOST, StatusCode.NOT_SENT}  # type: ignore[union-attr]
    if kind == OpKind.GET:
        await stays_still(reach.mine_bytes)
    with pytest.raises(KvxferError):
        reach.put(0, 0, 10)
    assert (await within(reach.engine.close_peer(reach.peer))).status == 0
    counters = reach.engine.counters()
    assert (counters.peers, counters.imports, counters.inflight) == (0, 0, 0)
    assert (await within(reach.engine.release(reach.mine.id))).status == 0


@KINDS
async def test_closing_the_engine_completes_all_tokens(pair: Pair, kind: OpKind) -> None:
    reach = await pair.reach(BIG)
    outcomes = [reach.one(kind, 0, 0, BIG) for _ in range(4)]
    pending = [outcome[1] for outcome in outcomes if isinstance(outcome, tuple)]
    assert len(pending) == 4
    revoking = pair.owner.engine.revoke(reach.grant.id)
    reach.engine.close()
    assert all(future.done() for future in pending)
    allowed = {0, StatusCode.CLOSED, StatusCode.REVOKED, StatusCode.UNKNOWN}
    assert {future.result().status for future in pending} <= allowed
    assert (await within(revoking)).status in (0, StatusCode.CLOSED)
    with pytest.raises(ClosedError):
        reach.put(0, 0, 10)
    reach.engine.close()


async def test_an_owner_that_closes_is_noticed(pair: Pair) -> None:
    if pair.one_engine:
        pytest.skip("owner and initiator are one engine")
    reach = await pair.reach(BIG)
    outcomes = [reach.put(0, 0, BIG) for _ in range(2)]
    order: list[str] = []
    for outcome in outcomes:
        assert isinstance(outcome, tuple)
        outcome[1].add_done_callback(lambda _: order.append("token"))
    pair.initiator.listener = lambda event: order.append(EventKind(event.kind).name)
    pair.owner.engine.close()
    down = await pair.initiator.event(EventKind.PEER_DOWN)
    assert down.id == reach.peer
    for outcome in outcomes:
        assert (await settled(outcome)).status in (0, StatusCode.PEER_LOST, StatusCode.NOT_SENT, StatusCode.REVOKED)
    await asyncio.sleep(0)
    assert order.count("PEER_DOWN") == 1
    with pytest.raises(KvxferError) as caught:
        reach.put(0, 0, 10)
    assert caught.value.status == StatusCode.PEER_LOST
    assert (await within(reach.engine.close_peer(reach.peer))).status == 0


async def test_an_initiator_that_dies_is_noticed(pair: Pair) -> None:
    if pair.one_engine:
        pytest.skip("owner and initiator are one engine")
    region, _ = pair.owner.alloc(MIB)
    grant = pair.owner.engine.grant(region.id, 0, MIB, BOTH)
    what = {
        "transport": pair.transport,
        "directory": str(pair.directory),
        "endpoint": pair.info.endpoint,
        "grant": grant.id,
        "generation": grant.generation,
        "length": grant.length,
        "key": grant.key.hex(),
        "secret": (pair.info.secret or b"").hex(),
    }
    victim = await asyncio.create_subprocess_exec(
        sys.executable,
        str(VICTIM),
        json.dumps(what),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert victim.stdout is not None
    assert await within(victim.stdout.readline()) == b"ready\n"
    assert (await pair.owner.event(EventKind.NOTIFY)).tag == 77
    assert pair.owner.engine.attached(grant.id) == 1
    victim.send_signal(signal.SIGKILL)
    lost = await pair.owner.event(EventKind.GRANT_LOST)
    assert lost.id == grant.id
    assert pair.owner.engine.attached(grant.id) == 0
    await within(victim.wait())
    victim._transport.close()  # the pipes too, now and not when the loop gets to it
    assert (await within(pair.owner.engine.revoke(grant.id))).status == 0


async def test_nobody_there(pair: Pair) -> None:
    assert pair.owner
    other = pair.side() if not pair.one_engine else None
    endpoint = "00" * 16 if other is None else other.engine.transports[pair.index].endpoint
    if other is not None:
        other.close()
    peer, done = pair.initiator.engine.connect(pair.index, endpoint, pair.info.secret)
    event = await within(done)
    assert (event.kind, event.id) == (EventKind.CONNECT, peer)
    assert event.status in (StatusCode.UNREACHABLE, StatusCode.OTHER_HOST, StatusCode.PEER_LOST)
    with pytest.raises(UnknownRegion):
        pair.initiator.engine.import_(peer, grant=1, generation=1, length=1, access=1, key=bytes(16))

    async def forgotten() -> None:
        while pair.initiator.engine.counters().peers:
            await asyncio.sleep(0.002)

    await within(forgotten())


async def test_closing_a_peer_while_it_connects(pair: Pair) -> None:
    peer, connecting = pair.initiator.engine.connect(pair.index, pair.info.endpoint, pair.info.secret)
    closing = pair.initiator.engine.close_peer(peer)
    assert (await within(closing)).kind == EventKind.PEER_CLOSED
    assert connecting.done()
    assert await pair.connect() != peer


async def test_closing_a_peer_while_it_imports(pair: Pair) -> None:
    region, _ = pair.owner.alloc(64 * KIB)
    grant = pair.owner.engine.grant(region.id, 0, 64 * KIB, BOTH)
    peer = await pair.connect()
    _, importing = pair.initiator.engine.import_(
        peer, grant=grant.id, generation=grant.generation, length=grant.length, access=3, key=grant.key
    )
    assert (await within(pair.initiator.engine.close_peer(peer))).kind == EventKind.PEER_CLOSED
    assert importing.done()
    assert (await within(pair.owner.engine.revoke(grant.id))).status == 0


def held(pid: int) -> tuple[int, int, int]:
    """Descriptors, threads and mapped memory files of a process."""
    of = Path(f"/proc/{pid}")
    mappings = sum("memfd:kvxfer" in line for line in (of / "maps").read_text().splitlines())
    return len(os.listdir(of / "fd")), len(os.listdir(of / "task")), mappings


async def test_nothing_is_left(pair: Pair) -> None:
    before = [held(pid) for pid in pair.pids]
    reach = await pair.reach(MIB)
    reach.put(0, 0, MIB)
    assert all(held(pid) != then for pid, then in zip(pair.pids, before, strict=True))
    del reach.mine_bytes, reach.remote_bytes
    pair.close()

    async def settle() -> None:  # a joined thread leaves /proc a moment later, also those of earlier tests
        while any(
            now > then
            for pid, those in zip(pair.pids, before, strict=True)
            for now, then in zip(held(pid), those, strict=True)
        ):
            await asyncio.sleep(0.002)

    await within(settle())
    assert not list(pair.directory.iterdir())

"""The fault transport: each fault on its own, the same faults from the same seed, and tokens that end once whatever
happens.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import ConfigError, InjectedFault
from kvxfer.native.engine import Engine, EngineConfig, Event, EventKind, OpKind
from kvxfer.native.status import StatusCode
from tests.native.conformance import KIB, MIB, Pair, Reach, settled, short_directory, within

INNER = pytest.mark.parametrize("inner", ["loop", "shm", "tcp"])
BLOCK = 1000
SEEDED_OPS = 200


@asynccontextmanager
async def reaching(inner: str, spec: str, length: int = MIB, **changes: Any) -> AsyncIterator[Reach]:
    with short_directory() as directory:
        pair = Pair(directory, f"fault+{inner}")
        try:
            pair.configure(fault_spec=spec, **changes)
            reach = await pair.reach(length)
            reach.fill()
            yield reach
        finally:
            pair.close()


def same(reach: Reach, length: int) -> bool:
    return bool(np.array_equal(reach.remote_bytes[:length], reach.mine_bytes[:length]))


async def statuses(reach: Reach, count: int, **more: Any) -> list[int]:
    return [(await settled(reach.put(i, i, 1 + i % BLOCK, **more))).status for i in range(count)]


@INNER
@pytest.mark.parametrize("length", [100, 300 * KIB])
async def test_failing(inner: str, length: int) -> None:
    async with reaching(inner, "fail_rate=1") as reach:
        before = reach.remote_bytes.copy()
        event = await settled(reach.put(0, 0, length, notify=(1, 1)))
        assert (event.status, event.bytes) == (StatusCode.INJECTED, 0)
        assert np.array_equal(reach.remote_bytes, before)
        assert not [event for event in reach.pair.owner.events if event.kind == EventKind.NOTIFY]
        assert reach.engine.counters().transports[reach.pair.index].failed_ops == 1


@INNER
async def test_failing_after_so_many(inner: str) -> None:
    async with reaching(inner, "fail_after=3") as reach:
        assert await statuses(reach, 6) == [0, 0, 0] + [StatusCode.INJECTED] * 3


@INNER
@pytest.mark.parametrize("length", [100, 300 * KIB])
@pytest.mark.parametrize("kind", [OpKind.PUT, OpKind.GET])
async def test_flipping_a_bit(inner: str, length: int, kind: OpKind) -> None:
    async with reaching(inner, "flip_rate=1") as reach:
        target, source = reach.remote_bytes, reach.mine_bytes
        if kind == OpKind.GET:
            target, source = source, target
        event = await settled(reach.one(kind, 0, 0, length, check=True))
        assert event.status == StatusCode.INTEGRITY
        assert event.segment in (0, -1), "the first one, or not known"
        assert (await settled(reach.one(kind, 0, 0, length))).status == 0
        wrong = np.unpackbits(target[:length] ^ source[:length])
        assert wrong.sum() == 1
        assert wrong[:8].sum() == 1


@pytest.mark.parametrize("kind", [OpKind.PUT, OpKind.GET])
async def test_flipping_a_bit_by_cross_memory_attach(kind: OpKind) -> None:
    with short_directory() as directory:
        pair = Pair(directory, "fault+shm")
        try:
            pair.configure(fault_spec="flip_rate=1")
            reach = await pair.reach(MIB, how="register")
            reach.fill()
            for length in (100, 300 * KIB):
                assert (await settled(reach.one(kind, 0, 0, length, check=True))).status == StatusCode.INTEGRITY
                assert (await settled(reach.one(kind, 0, 0, length))).status == 0
                wrong = np.unpackbits(reach.remote_bytes[:length] ^ reach.mine_bytes[:length])
                assert wrong.sum() == 1
        finally:
            pair.close()


@INNER
@pytest.mark.parametrize("length", [100, 300 * KIB])
async def test_stopping_short(inner: str, length: int) -> None:
    async with reaching(inner, "short_rate=1,seed=3") as reach:
        before = reach.remote_bytes.copy()
        event = await settled(reach.put(0, 0, length, notify=(1, 1)))
        assert event.status == StatusCode.INJECTED
        assert event.bytes < length
        assert same(reach, event.bytes)
        assert np.array_equal(reach.remote_bytes[event.bytes :], before[event.bytes :])
        assert not [event for event in reach.pair.owner.events if event.kind == EventKind.NOTIFY]
        rows = np.array([[i * 200, i * 200, 100] for i in range(50)], np.uint64)
        event = await settled(reach.many(OpKind.PUT, rows))
        assert (event.status, event.bytes < 5000) == (StatusCode.INJECTED, True)


@INNER
async def test_delaying(inner: str) -> None:
    async with reaching(inner, "delay_ms=60..80") as reach:
        started = time.monotonic()
        outcomes = [reach.put(0, 0, 100), reach.put(0, 0, 300 * KIB), reach.notify(5)]
        assert not any(isinstance(outcome, Event) for outcome in outcomes)
        assert {(await settled(outcome)).status for outcome in outcomes} == {0}
        assert time.monotonic() - started > 0.055
        assert same(reach, 300 * KIB)
        assert (await reach.pair.owner.event(EventKind.NOTIFY)).tag == 5


@INNER
async def test_hanging_until_cancelled(inner: str) -> None:
    async with reaching(inner, "hang_rate=1") as reach:
        before = reach.remote_bytes.copy()
        token, waiting = reach.put(0, 0, 100)  # type: ignore[misc]
        await asyncio.sleep(0.03)
        assert not waiting.done()
        reach.engine.cancel(token)
        assert (await within(waiting)).status == StatusCode.CANCELLED
        assert np.array_equal(reach.remote_bytes, before)


@INNER
@pytest.mark.parametrize("spec", ["hang_rate=1", "delay_ms=60000"])
async def test_waiting_until_the_peer_is_closed(inner: str, spec: str) -> None:
    async with reaching(inner, spec) as reach:
        waiting = [reach.put(0, 0, length)[1] for length in (100, 300 * KIB)]  # type: ignore[index]
        assert (await within(reach.engine.close_peer(reach.peer))).status == 0
        assert [one.result().status for one in waiting] == [StatusCode.PEER_LOST] * 2


@INNER
@pytest.mark.parametrize("spec", ["hang_rate=1", "delay_ms=60000"])
async def test_waiting_until_the_engine_is_closed(inner: str, spec: str) -> None:
    async with reaching(inner, spec) as reach:
        waiting = [reach.put(0, 0, length)[1] for length in (100, 300 * KIB)]  # type: ignore[index]
        reach.engine.close()
        assert [one.result().status for one in waiting] == [StatusCode.CLOSED] * 2


async def test_a_delayed_operation_meets_a_revoke() -> None:
    async with reaching("shm", "delay_ms=50") as reach:
        _, waiting = reach.put(0, 0, 300 * KIB)  # type: ignore[misc]
        assert (await within(reach.pair.owner.engine.revoke(reach.grant.id))).status == 0
        before = reach.remote_bytes.copy()
        assert (await within(waiting)).status == StatusCode.REVOKED
        assert np.array_equal(reach.remote_bytes, before)


MIXED = "fail_rate=0.2,flip_rate=0.2,short_rate=0.2"


async def test_a_seed_says_what_happens() -> None:
    seen = []
    for seed, inner in ((7, "shm"), (7, "loop"), (8, "shm")):
        async with reaching(inner, f"{MIXED},seed={seed}") as reach:
            seen.append([await settled(reach.put(0, 0, 1 + i, check=True)) for i in range(SEEDED_OPS)])
    outcomes = [[(event.status, event.bytes) for event in events] for events in seen]
    assert outcomes[0] == outcomes[1], "the same whatever is inside"
    assert outcomes[0] != outcomes[2]
    counts = Counter(status for status, _ in outcomes[0])
    assert set(counts) == {0, StatusCode.INJECTED, StatusCode.INTEGRITY}
    assert 0.35 < counts[StatusCode.OK] / SEEDED_OPS < 0.68  # 0.8 cubed
    assert 0.08 < counts[StatusCode.INTEGRITY] / SEEDED_OPS < 0.25


@INNER
async def test_each_token_ends_once_in_a_storm(inner: str) -> None:
    spec = f"{MIXED},delay_ms=0..3,hang_rate=0.1,seed=5"
    async with reaching(inner, spec, inflight_max=64) as reach:
        live: dict[int, asyncio.Future[Event]] = {}
        for index in range(300):
            outcome = reach.put(0, 0, 10 if index % 2 else 100 * KIB, notify=(index, 0) if index % 3 == 0 else None)
            if not isinstance(outcome, Event):
                live[outcome[0]] = outcome[1]
            if len(live) > 40:
                for token in live:
                    reach.engine.cancel(token)
                ended = await asyncio.gather(*(within(one) for one in live.values()))
                known = {0, StatusCode.CANCELLED, StatusCode.INJECTED, StatusCode.INTEGRITY}
                assert {event.status for event in ended} <= known | {StatusCode.PEER_LOST}
                live.clear()
        reach.engine.close()
        assert all(one.done() for one in live.values())
        assert reach.engine.stray_events == 0


@pytest.mark.parametrize(
    "spec",
    ["nonsense", "seed", "seed=", "seed=x", "seed=99999999999999999999", "delay_ms=5..2", "delay_ms=1..", "delay_ms=-1",
     "fail_rate=1.1", "fail_rate=2", "fail_rate=-0.1", "fail_rate=0,5", "fail_rate=.5", "hang_rate=1e-3", "drop_rate=1",
     f"seed={'1' * 100}", "delay_ms=600001"],
)  # fmt: skip
def test_specs_that_make_no_sense(spec: str) -> None:
    with pytest.raises(ConfigError, match="fault_spec"):
        Engine(EngineConfig(engine_id=bytes(16), transports=("fault+loop",), fault_spec=spec))


@pytest.mark.parametrize("spec", ["", "seed=0", "fail_rate=0", "fail_rate=0.0000000001", "delay_ms=0", "seed=1,"])
async def test_specs_that_do_nothing(spec: str) -> None:
    async with reaching("loop", spec) as reach:
        assert isinstance(reach.put(0, 0, 100), Event)
        assert same(reach, 100)


@INNER
@pytest.mark.parametrize("kind", [OpKind.PUT, OpKind.GET])
async def test_moving_in_pieces(inner: str, kind: OpKind) -> None:
    async with reaching(inner, "chunk_bytes=4000,chunk_ms=2") as reach:
        target, source = reach.remote_bytes, reach.mine_bytes
        if kind == OpKind.GET:
            target, source = source, target
        rows = np.array([[i * 20_000, i * 20_000, 9000] for i in range(10)], np.uint64)
        before, started = target.copy(), time.monotonic()
        event = await settled(reach.many(kind, rows, notify=(5, 6), check=True))
        assert (event.status, event.bytes) == (0, 90_000)
        assert time.monotonic() - started > 0.055, "thirty pieces"
        for i in range(10):
            span = slice(i * 20_000, i * 20_000 + 9000)
            assert np.array_equal(target[span], source[span])
            before[span] = source[span]
        assert np.array_equal(target, before)
        assert (await reach.pair.owner.event(EventKind.NOTIFY)).tag == 5
        assert [event.kind for event in reach.pair.owner.events].count(EventKind.NOTIFY) == 0, "told once"


@INNER
async def test_a_cancel_between_two_pieces(inner: str) -> None:
    async with reaching(inner, "chunk_bytes=10000,chunk_ms=20") as reach:
        token, waiting = reach.put(0, 0, 300 * KIB)  # type: ignore[misc]
        await asyncio.sleep(0.1)
        reach.engine.cancel(token)
        event = await within(waiting)
        assert (event.status, 0 < event.bytes < 300 * KIB) == (StatusCode.CANCELLED, True)
        after = reach.remote_bytes.copy()
        assert same(reach, event.bytes)
        await asyncio.sleep(0.1)
        assert np.array_equal(after, reach.remote_bytes)


@INNER
async def test_the_peer_is_closed_between_two_pieces(inner: str) -> None:
    async with reaching(inner, "chunk_bytes=1000,chunk_ms=1") as reach:
        waiting = [reach.put(0, 0, length)[1] for length in (100 * KIB, 300 * KIB)]  # type: ignore[index]
        await asyncio.sleep(0.02)
        assert (await within(reach.engine.close_peer(reach.peer))).status == 0
        assert [one.result().status for one in waiting] == [StatusCode.PEER_LOST] * 2


@INNER
async def test_one_operation_of_many(inner: str) -> None:
    for spec, found in (("fail_op=2", StatusCode.INJECTED), ("hang_op=2", None)):
        async with reaching(inner, spec) as reach:
            assert (await settled(reach.put(0, 0, 100))).status == 0
            second = reach.put(0, 0, 100)
            assert (await settled(reach.put(0, 0, 100))).status == 0
            if found is None:
                token, waiting = second  # type: ignore[misc]
                assert not waiting.done()
                reach.engine.cancel(token)
                found = StatusCode.CANCELLED
            assert (await settled(second)).status == found
    async with reaching(inner, "refuse_op=2") as reach:
        assert (await settled(reach.put(0, 0, 100))).status == 0
        with pytest.raises(InjectedFault):
            reach.put(0, 0, 100)
        assert (await settled(reach.put(0, 0, 100))).status == 0


@INNER
async def test_stuck_and_deaf(inner: str) -> None:
    async with reaching(inner, "stuck_ms=100,stuck_ops=1") as reach:
        token, waiting = reach.put(0, 0, 300 * KIB)  # type: ignore[misc]
        reach.engine.cancel(token)
        await asyncio.sleep(0.03)
        assert not waiting.done()
        assert (await within(waiting)).status == 0
        assert same(reach, 300 * KIB), "late, but all of it"
        assert (await settled(reach.put(0, 0, 100))).status == 0

"""Conformance: bytes arrive exactly, and notifications after them and in order."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvxfer.native.engine import Event, EventKind, OpKind
from kvxfer.native.types import Caps, MemoryKind
from tests.native.conformance import BOTH, INLINE_MAX, KIB, MIB, READ, Pair, segments, settled, within

MEMORY = pytest.mark.parametrize("how", ["alloc", "register"])
LENGTHS = pytest.mark.parametrize("length", [1, INLINE_MAX, INLINE_MAX + 1, 300 * KIB + 7, 3 * MIB + 123])


@MEMORY
@LENGTHS
async def test_put_moves_exactly_these_bytes(pair: Pair, how: str, length: int) -> None:
    reach = await pair.reach(length + 200, how=how)
    reach.fill()
    expected = reach.remote_bytes.copy()
    expected[33 : 33 + length] = reach.mine_bytes[17 : 17 + length]
    source = reach.mine_bytes.copy()
    event = await settled(reach.put(17, 33, length))
    assert (event.kind, event.status, event.bytes) == (EventKind.TRANSFER, 0, length)
    assert np.array_equal(reach.remote_bytes, expected)
    assert np.array_equal(reach.mine_bytes, source)


@MEMORY
@LENGTHS
async def test_get_moves_exactly_these_bytes(pair: Pair, how: str, length: int) -> None:
    reach = await pair.reach(length + 200, how=how)
    reach.fill()
    expected = reach.mine_bytes.copy()
    expected[17 : 17 + length] = reach.remote_bytes[33 : 33 + length]
    source = reach.remote_bytes.copy()
    event = await settled(reach.get(17, 33, length))
    assert (event.kind, event.status, event.bytes) == (EventKind.TRANSFER, 0, length)
    assert np.array_equal(reach.mine_bytes, expected)
    assert np.array_equal(reach.remote_bytes, source)


@MEMORY
@pytest.mark.parametrize("kind", [OpKind.PUT, OpKind.GET])
async def test_scattered_segments(pair: Pair, how: str, kind: OpKind) -> None:
    count, block = 700, 512
    reach = await pair.reach(count * block, how=how)
    reach.fill()
    rng = np.random.default_rng(5)
    local, remote = rng.permutation(count), rng.permutation(count)
    lengths = rng.integers(1, block + 1, count)
    rows = np.stack([local * block, remote * block, lengths], axis=1).astype(np.uint64)
    mine, theirs = reach.mine_bytes.copy(), reach.remote_bytes.copy()
    for a, b, length in zip(local * block, remote * block, lengths, strict=True):
        if kind == OpKind.PUT:
            theirs[b : b + length] = mine[a : a + length]
        else:
            mine[a : a + length] = theirs[b : b + length]
    event = await settled(reach.many(kind, rows))
    assert (event.status, event.bytes) == (0, int(lengths.sum()))
    assert np.array_equal(reach.remote_bytes, theirs)
    assert np.array_equal(reach.mine_bytes, mine)


async def test_many_segments_in_one_operation(pair: Pair) -> None:
    count = 20_000
    reach = await pair.reach(count * 64)
    reach.fill()
    offsets = np.arange(count, dtype=np.uint64) * 64
    rows = np.stack([offsets, offsets[::-1], np.full(count, 48, np.uint64)], axis=1)
    assert (await settled(reach.many(OpKind.PUT, np.ascontiguousarray(rows)))).status == 0
    blocks = reach.mine_bytes.reshape(count, 64)[::-1, :48]
    assert np.array_equal(reach.remote_bytes.reshape(count, 64)[:, :48], blocks)


async def test_neighbours_are_merged(pair: Pair) -> None:
    reach = await pair.reach(64 * KIB)
    reach.fill()
    before = reach.engine.counters().transports[pair.index].segments
    rows = segments(*((i * 100, 500 + i * 100, 100) for i in range(50)), (7000, 0, 10), (7010, 20, 10))
    event = await settled(reach.many(OpKind.PUT, rows))
    assert (event.status, event.bytes) == (0, 5020)
    assert np.array_equal(reach.remote_bytes[500:5500], reach.mine_bytes[:5000])
    assert reach.engine.counters().transports[pair.index].segments == before + 3


@pytest.mark.parametrize("kind", [OpKind.PUT, OpKind.GET])
async def test_checked_transfers(pair: Pair, kind: OpKind) -> None:
    if not pair.info.can_check:
        pytest.skip("this transport compares no checksums")
    reach = await pair.reach(2 * MIB)
    reach.fill()
    for length in (10, INLINE_MAX + 5, MIB + 3):
        assert (await settled(reach.one(kind, 1, 2, length, check=True))).status == 0
        assert np.array_equal(reach.remote_bytes[2 : 2 + length], reach.mine_bytes[1 : 1 + length])


async def test_many_operations_at_once(pair: Pair) -> None:
    count, block = 96, 20 * KIB
    reach = await pair.reach(count * block)
    reach.fill()
    outcomes = [reach.put(i * block, (count - 1 - i) * block, block) for i in range(count)]
    events = [await settled(outcome) for outcome in outcomes]
    assert {event.status for event in events} == {0}
    assert len({event.token for event in events}) == count
    expected = reach.mine_bytes.reshape(count, block)[::-1].reshape(-1)
    assert np.array_equal(reach.remote_bytes, expected)


async def test_offsets_beyond_four_gib(pair: Pair) -> None:
    length, at = 5 << 30, (4 << 30) + 12345
    remote, theirs = pair.owner.register(length)
    mine, mine_bytes = pair.initiator.alloc(MIB)
    grant = pair.owner.engine.grant(remote.id, 4096, length - 4096, 3)
    import_ = await pair.import_(await pair.connect(), grant)
    mine_bytes[:] = 7
    event = await settled(pair.initiator.engine.submit_one(OpKind.PUT, mine.id, import_, 0, at, MIB))
    assert (event.status, event.bytes) == (0, MIB)
    written = theirs[4096 + at - 1 : 4096 + at + MIB + 1]
    assert (written[1:-1] == 7).all()
    assert written[0] == 0
    assert written[-1] == 0
    mine_bytes[:] = 0
    event = await settled(pair.initiator.engine.submit_one(OpKind.GET, mine.id, import_, 0, at, MIB))
    assert event.status == 0
    assert (mine_bytes == 7).all()
    await within(pair.owner.engine.release(remote.id))


async def test_a_grant_begins_inside_its_region(pair: Pair) -> None:
    region, theirs = pair.owner.alloc(100_000)
    mine, mine_bytes = pair.initiator.alloc(100_000)
    theirs[:], mine_bytes[:] = 1, 2
    grant = pair.owner.engine.grant(region.id, 5_001, 9_000, 3)
    import_ = await pair.import_(await pair.connect(), grant)
    event = await settled(pair.initiator.engine.submit_one(OpKind.PUT, mine.id, import_, 0, 0, 9_000))
    assert event.status == 0
    assert (theirs[5_001:14_001] == 2).all()
    assert (theirs[:5_001] == 1).all()
    assert (theirs[14_001:] == 1).all()


async def test_small_operations_complete_inline(pair: Pair) -> None:
    reach = await pair.reach(64 * KIB)
    if not pair.info.caps & Caps.INLINE or reach.mine.on_device or reach.remote.on_device:
        pytest.skip("nothing completes inline here: a driver's copy may block, and submit may not")
    assert isinstance(reach.put(0, 0, INLINE_MAX), Event)
    assert isinstance(reach.get(0, 0, 1), Event)
    assert not isinstance(reach.put(0, 0, INLINE_MAX + 1), Event)
    assert reach.engine.counters().transports[pair.index].inline_ops == 2


# -- notifications ----------------------------------------------------------------------------------------------------


async def test_a_notification_alone(pair: Pair) -> None:
    reach = await pair.reach(4 * KIB)
    event = await settled(reach.notify(2**64 - 1, 12345))
    assert (event.status, event.bytes) == (0, 0)
    told = await pair.owner.event(EventKind.NOTIFY)
    assert (told.id, told.tag, told.value, told.token) == (reach.grant.id, 2**64 - 1, 12345, 0)


@pytest.mark.parametrize("access", [1, 2])
async def test_a_notification_needs_no_particular_right(pair: Pair, access: int) -> None:
    reach = await pair.reach(4 * KIB, access=access)
    assert (await settled(reach.notify(1))).status == 0
    assert (await pair.owner.event(EventKind.NOTIFY)).tag == 1


@pytest.mark.parametrize("length", [64, 2 * MIB + 5])
async def test_a_notification_comes_after_its_bytes(pair: Pair, length: int) -> None:
    reach = await pair.reach(3 * MIB)
    rounds = 20
    pair.owner.watch(reach.remote_bytes, 0, length - 1)
    for number in range(1, rounds + 1):
        reach.mine_bytes[:length] = number
        assert (await settled(reach.put(0, 0, length, notify=(number, 0)))).status == 0
        await pair.owner.event(EventKind.NOTIFY)
    assert pair.owner.watched() == [(number, number, number) for number in range(1, rounds + 1)]


async def test_notifications_keep_their_order(pair: Pair) -> None:
    reach = await pair.reach(MIB)
    sizes = [0, 10, 200 * KIB, INLINE_MAX, 0, INLINE_MAX + 1, 700 * KIB, 1] * 6
    for number, size in enumerate(sizes):
        outcome = reach.put(0, 0, size, notify=(number, size)) if size else reach.notify(number, 0)
        assert (await settled(outcome)).status == 0
    tags = [(await pair.owner.event(EventKind.NOTIFY)).tag for _ in sizes]
    assert tags == list(range(len(sizes)))


async def test_a_get_can_notify_too(pair: Pair) -> None:
    reach = await pair.reach(MIB)
    reach.fill()
    for length in (100, 500 * KIB):
        assert (await settled(reach.get(0, 0, length, notify=(length, 1)))).status == 0
        assert np.array_equal(reach.mine_bytes[:length], reach.remote_bytes[:length])
        assert (await pair.owner.event(EventKind.NOTIFY)).tag == length


async def test_a_full_notification_queue_holds_them_back(pair: Pair) -> None:
    pair.configure(notify_max=3)
    reach = await pair.reach(4 * KIB)
    outcomes = [reach.put(0, 0, 16, notify=(number, 0)) for number in range(40)]
    events = await asyncio.gather(*(settled(outcome) for outcome in outcomes))
    assert {event.status for event in events} == {0}
    tags = [(await pair.owner.event(EventKind.NOTIFY)).tag for _ in outcomes]
    assert sorted(tags) == list(range(40))
    assert pair.owner.engine.counters().transports[pair.index].notifies_received == 40


# -- mappings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("access", [READ, BOTH])
async def test_a_mapping_is_the_memory_itself(pair: Pair, access: int) -> None:
    reach = await pair.reach(MIB, access=access)
    reach.fill()
    view = reach.engine.mapping(reach.import_)
    assert (view is not None) == pair.info.maps(MemoryKind.DRAM)
    if view is None:
        return
    assert len(view) == MIB
    assert view.readonly == (access == READ)
    assert np.array_equal(np.frombuffer(view, dtype=np.uint8), reach.remote_bytes)
    reach.remote_bytes[77] ^= 255
    assert view[77] == reach.remote_bytes[77]


@pytest.mark.parametrize("ending", ["revoke", "import", "peer", "owner", "engine"])
async def test_a_view_of_a_mapping_outlives_it(pair: Pair, ending: str) -> None:
    reach = await pair.reach(MIB, access=READ)
    reach.remote_bytes[:] = 5
    view = reach.engine.mapping(reach.import_)
    if view is None:
        pytest.skip("this transport maps no memory")
    array = np.frombuffer(view, dtype=np.uint8)
    if ending == "revoke":
        assert (await within(pair.owner.engine.revoke(reach.grant.id))).status == 0
    elif ending == "import":
        reach.engine.release_import(reach.import_)
    elif ending == "peer":
        await within(reach.engine.close_peer(reach.peer))
    elif ending == "owner":
        pair.owner.engine.close()
        await pair.initiator.event(EventKind.PEER_DOWN)
    else:
        reach.engine.close()
    assert int(array.max()) in (0, 5), "reading it must not end the process"


async def test_two_imports_of_one_region_are_mapped_apart(pair: Pair) -> None:
    reach = await pair.reach(MIB)
    reach.remote_bytes[:] = 5
    other = pair.owner.engine.grant(reach.remote.id, 4097, 1000, READ)
    import_ = await pair.import_(reach.peer, other)
    view = reach.engine.mapping(import_)
    if view is None:
        pytest.skip("this transport maps no memory")
    whole = reach.engine.mapping(reach.import_)
    assert whole is not None
    assert (len(view), len(whole)) == (1000, MIB)
    whole[4097] = 9
    assert view[0] == 9
    assert (await within(pair.owner.engine.revoke(reach.grant.id))).status == 0
    assert view[0] == 9, "the other grant is still good"

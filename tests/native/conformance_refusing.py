"""Conformance: what must not move does not move, and the error says why."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxfer.block_parts import BlockParts
from kvxfer.errors import (
    AccessDenied,
    InvalidLength,
    KvxferError,
    OutOfRange,
    ReadOnlyError,
    TooLarge,
    UnknownRegion,
    UsageError,
)
from kvxfer.native.engine import EventKind, OpKind
from kvxfer.native.status import StatusCode
from kvxfer.native.types import Caps
from tests.native.conformance import BOTH, INLINE_MAX, KIB, MIB, READ, WRITE, Pair, Reach, segments, settled

U64_MAX = 2**64 - 1


async def refused(pair: Pair, reach: Reach, kind: OpKind, rows: Any, **changes: Any) -> int:
    """Use a changed descriptor: the status of the refusal, whether at the import or at the transfer.

    A transfer that leaves the grant may have moved what lies inside it: that much its holder was allowed.
    """
    before = reach.remote_bytes.copy()
    lengths = int(rows[:, 2].sum())
    handle, event = await pair.try_import(reach.peer, reach.grant, **changes)
    if event.status == 0:
        try:
            outcome = reach.engine.submit(kind, reach.mine.id, handle, rows)
        except KvxferError as error:
            assert error.status is not None
            return error.status
        event = await settled(outcome)
    assert event.bytes < lengths
    if event.status != StatusCode.RANGE:
        assert np.array_equal(reach.remote_bytes, before)
        assert event.bytes == 0
    return event.status


async def still_works(reach: Reach) -> None:
    """A refusal concerns one transfer; the peer and its other imports are fine."""
    reach.mine_bytes[:100] = 99
    assert (await settled(reach.put(0, 50, 100))).status == 0
    assert (reach.remote_bytes[50:150] == 99).all()


SIZES = pytest.mark.parametrize("length", [64, 100 * KIB])
KINDS = pytest.mark.parametrize("kind", [OpKind.PUT, OpKind.GET])


@KINDS
@SIZES
async def test_wrong_key(pair: Pair, kind: OpKind, length: int) -> None:
    reach = await pair.reach(MIB)
    reach.fill()
    key = bytes([reach.grant.key[0] ^ 1]) + reach.grant.key[1:]
    assert await refused(pair, reach, kind, segments((0, 0, length)), key=key) == StatusCode.KEY
    await still_works(reach)


@KINDS
async def test_stale_generation(pair: Pair, kind: OpKind) -> None:
    reach = await pair.reach(MIB)
    status = await refused(pair, reach, kind, segments((0, 0, 64)), generation=reach.grant.generation + 1)
    assert status == StatusCode.STALE
    await still_works(reach)


@KINDS
@pytest.mark.parametrize("grant", [10**6, U64_MAX, 0])
async def test_unknown_grant(pair: Pair, kind: OpKind, grant: int) -> None:
    reach = await pair.reach(MIB)
    assert await refused(pair, reach, kind, segments((0, 0, 64)), grant=grant) == StatusCode.UNKNOWN
    await still_works(reach)


@KINDS
@SIZES
@pytest.mark.parametrize("reaching", ["one more", "far", "huge"])
async def test_the_owner_checks_the_range(pair: Pair, kind: OpKind, length: int, reaching: str) -> None:
    reach = await pair.reach(MIB)
    reach.fill()
    offset, claimed = {
        "one more": (MIB - length + 1, MIB + 1),
        "far": (1 << 40, 1 << 41),
        "huge": (U64_MAX - length, U64_MAX),
    }[reaching]
    rows = segments((0, offset, length))
    assert await refused(pair, reach, kind, rows, length=claimed) == StatusCode.RANGE
    await still_works(reach)


PIECE, STRIDE, SECOND = 48 * KIB, 64 * KIB, 512 * KIB
PARTS = BlockParts(
    parts=np.array([(0, STRIDE, PIECE), (SECOND, STRIDE, STRIDE)], np.uint64), blocks=np.array([1, 4, 5], np.uint64)
)


@KINDS
async def test_the_blocks_of_a_grant_can_be_reached(pair: Pair, kind: OpKind) -> None:
    reach = await pair.reach(MIB, blocks=PARTS)
    reach.fill()
    rows = segments(
        (0, STRIDE, PIECE), (MIB // 2, 4 * STRIDE + 5, 100), (200 * KIB, SECOND + 4 * STRIDE + 10, 2 * STRIDE - 20)
    )
    assert (await settled(reach.many(kind, rows))).status == 0
    for local, remote, length in rows.tolist():
        assert np.array_equal(
            np.array(reach.mine_bytes[local : local + length]), np.array(reach.remote_bytes[remote : remote + length])
        )


@KINDS
@pytest.mark.parametrize(
    "outside",
    [(0, 100), (STRIDE + PIECE - 50, 51), (2 * STRIDE, 10), (3 * STRIDE, 2 * STRIDE), (SECOND, STRIDE), (MIB - 9, 9)],
    ids=["another block", "into a gap", "behind a gap", "from one into the next", "the other part", "the end"],
)
async def test_other_blocks_cannot(pair: Pair, kind: OpKind, outside: tuple[int, int]) -> None:
    """Where the owner sees each access. Elsewhere they can, and that is said: mapped or one-sided is all of it."""
    reach = await pair.reach(MIB, blocks=PARTS)
    reach.fill()
    mine, remote = np.array(reach.mine_bytes), np.array(reach.remote_bytes)
    offset, length = outside
    event = await settled(reach.many(kind, segments((0, STRIDE, 64), (100, offset, length))))
    if not pair.info.caps & Caps.BLOCKS:
        assert event.status == 0
        return
    assert event.status == StatusCode.RANGE
    if pair.base == "tcp":
        assert event.segment == 1
    changed = (np.array(reach.mine_bytes) != mine).sum() + (np.array(reach.remote_bytes) != remote).sum()
    assert changed == 0, "not even what was allowed, since the request was not"
    assert (await settled(reach.many(kind, segments((0, STRIDE, 64))))).status == 0


@pytest.mark.parametrize(("kind", "given"), [(OpKind.PUT, READ), (OpKind.GET, WRITE)])
@SIZES
async def test_the_owner_checks_the_direction(pair: Pair, kind: OpKind, given: int, length: int) -> None:
    reach = await pair.reach(MIB, access=given)
    reach.fill()
    mine = reach.mine_bytes.copy()
    assert await refused(pair, reach, kind, segments((0, 0, length)), access=BOTH) == StatusCode.ACCESS
    assert np.array_equal(reach.mine_bytes, mine)


async def test_an_earlier_good_segment_does_not_help_a_bad_one(pair: Pair) -> None:
    reach = await pair.reach(MIB)
    rows = segments((0, 0, 10), (100, MIB - 5, 10), (200, 20, 10))
    _, event = await pair.try_import(reach.peer, reach.grant)
    assert event.status == 0
    with pytest.raises(OutOfRange) as caught:
        reach.many(OpKind.PUT, rows)
    assert caught.value.fields["segment"] == 1


@pytest.mark.parametrize(("kind", "given"), [(OpKind.PUT, READ), (OpKind.GET, WRITE)])
async def test_the_initiator_knows_the_direction(pair: Pair, kind: OpKind, given: int) -> None:
    reach = await pair.reach(64 * KIB, access=given)
    with pytest.raises(AccessDenied):
        reach.one(kind, 0, 0, 10)
    other = OpKind.GET if kind == OpKind.PUT else OpKind.PUT
    assert (await settled(reach.one(other, 0, 0, 10))).status == 0


BAD_SPANS = [
    (0, 64 * KIB, 1, OutOfRange),
    (0, 1, 64 * KIB, OutOfRange),
    (64 * KIB, 0, 1, OutOfRange),
    (1, 0, 64 * KIB, OutOfRange),
    (0, U64_MAX, 1, OutOfRange),
    (0, U64_MAX, U64_MAX, OutOfRange),
    (U64_MAX, 0, 1, OutOfRange),
    (0, 2**63, 2**63, OutOfRange),
    (0, 0, U64_MAX, OutOfRange),
    (0, 0, 0, InvalidLength),
    (0, 0, 2**64, InvalidLength),
    (-1, 0, 1, InvalidLength),
]


@KINDS
async def test_local_checks(pair: Pair, kind: OpKind) -> None:
    reach = await pair.reach(64 * KIB)
    reach.fill()
    mine, theirs = reach.mine_bytes.copy(), reach.remote_bytes.copy()
    for local, remote, length, error in BAD_SPANS:
        with pytest.raises(error):
            reach.one(kind, local, remote, length)
    for wrong in (segments((0, 0, 1)).astype(np.int64), segments((0, 0, 1))[:, :2], np.zeros((6, 3), np.uint64)[::2]):
        with pytest.raises(UsageError):
            reach.many(kind, wrong)
    with pytest.raises(UsageError):
        reach.many(kind, None)
    with pytest.raises(UsageError):
        reach.engine.submit_one(7, reach.mine.id, reach.import_, 0, 0, 1)
    with pytest.raises(UnknownRegion):
        reach.engine.submit_one(kind, 10**9, reach.import_, 0, 0, 1)
    with pytest.raises(UnknownRegion):
        reach.engine.submit_one(kind, reach.mine.id, 10**9, 0, 0, 1)
    assert np.array_equal(reach.mine_bytes, mine)
    assert np.array_equal(reach.remote_bytes, theirs)
    assert reach.engine.counters().inflight == 0


async def test_too_many_segments(pair: Pair) -> None:
    pair.configure(segments_max=10)
    reach = await pair.reach(64 * KIB)
    rows = segments(*((100 * i, 50 * i, 10) for i in range(11)))
    with pytest.raises(TooLarge):
        reach.many(OpKind.PUT, rows)
    assert (await settled(reach.many(OpKind.PUT, rows[:10]))).status == 0


async def test_read_only_memory(pair: Pair) -> None:
    reach = await pair.reach(64 * KIB)
    memory = np.full(64 * KIB, 3, dtype=np.uint8)
    region = pair.initiator.engine.register(memory.ctypes.data, memory.nbytes, read_only=True)
    with pytest.raises(ReadOnlyError):
        reach.engine.submit_one(OpKind.GET, region.id, reach.import_, 0, 0, 10)
    for length in (10, INLINE_MAX + 1):
        outcome = reach.engine.submit_one(OpKind.PUT, region.id, reach.import_, 0, 0, length)
        assert (await settled(outcome)).status == 0
    assert (reach.remote_bytes[: INLINE_MAX + 1] == 3).all()
    with pytest.raises(ReadOnlyError):
        pair.initiator.engine.grant(region.id, 0, 10, WRITE)


async def test_read_only_memory_can_be_read_by_peers(pair: Pair) -> None:
    memory = np.arange(64 * KIB, dtype=np.uint32).view(np.uint8)
    region, theirs = pair.owner.register(memory.nbytes, read_only=True)
    theirs[:] = memory
    grant = pair.owner.engine.grant(region.id, 0, memory.nbytes, READ)
    mine, mine_bytes = pair.initiator.alloc(memory.nbytes)
    import_ = await pair.import_(await pair.connect(), grant)
    for length in (100, memory.nbytes):
        outcome = pair.initiator.engine.submit_one(OpKind.GET, mine.id, import_, 0, 0, length)
        assert (await settled(outcome)).status == 0
        assert np.array_equal(mine_bytes[:length], memory[:length])


async def test_a_released_import_is_unknown(pair: Pair) -> None:
    reach = await pair.reach(64 * KIB)
    outcome = reach.put(0, 0, 60 * KIB)
    reach.engine.release_import(reach.import_)
    assert (await settled(outcome)).status == 0
    with pytest.raises(UnknownRegion):
        reach.put(0, 0, 10)
    again = await pair.import_(reach.peer, reach.grant)
    event = await settled(reach.engine.submit_one(OpKind.PUT, reach.mine.id, again, 0, 0, 10))
    assert event.status == 0


async def test_two_grants_of_one_region_have_their_own_keys(pair: Pair) -> None:
    reach = await pair.reach(MIB)
    other = pair.owner.engine.grant(reach.remote.id, 0, MIB, BOTH)
    assert other.key != reach.grant.key
    status = await refused(pair, reach, OpKind.PUT, segments((0, 0, 64)), key=other.key)
    assert status == StatusCode.KEY


@KINDS
@SIZES
async def test_a_flipped_bit_is_found(pair: Pair, kind: OpKind, length: int) -> None:
    """The fault decorator damages every operation; only a checksum over source and target can tell."""
    if not pair.transport.startswith("fault+") or not pair.info.can_check:
        pytest.skip("no fault decorator over a transport that compares checksums")
    pair.close()
    pair.configure(fault_spec="seed=1,flip_rate=1")
    reach = await pair.reach(MIB)
    reach.fill()
    event = await settled(reach.one(kind, 0, 0, length, check=True, notify=(1, 1)))
    assert event.status == StatusCode.INTEGRITY
    unchecked = await settled(reach.one(kind, 0, 0, length))
    assert unchecked.status == 0
    assert not np.array_equal(reach.mine_bytes[:length], reach.remote_bytes[:length])
    assert (await settled(reach.notify(2))).status == 0
    told = await pair.owner.event(EventKind.NOTIFY)
    assert told.tag == 2, "damaged bytes are not announced"

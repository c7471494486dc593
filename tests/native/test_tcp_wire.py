"""The owner's side of the tcp data path, driven by a second implementation of the wire format (`kvxd`): what it
accepts, and that nothing else touches a byte.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvxfer.native.engine import EventKind
from kvxfer.native.status import StatusCode
from tests.native import kvxd
from tests.native.conformance import MIB, READ, WRITE, within
from tests.native.kvxd import Frame, Refused, Type
from tests.native.tcp_owner import LENGTH, attached, eventually, greeted, owner


def crc32c(data: bytes) -> int:
    """Bit by bit, as the polynomial says."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


async def test_put_get_and_notify() -> None:
    async with owner() as one, await attached(one) as speaker:
        assert one.engine.attached(one.grant.id) == 1
        data = random.Random(1).randbytes(3000)
        speaker.send(one.frame(Type.PUT, (10, 1000), (5000, 2000), payload=data), one.key)
        answer = await speaker.frame(one.key)
        assert (answer.type, answer.status, answer.op, answer.proved) == (Type.ACK, 0, 1, True)
        assert bytes(one.inside[10:1010]) == data[:1000]
        assert bytes(one.inside[5000:7000]) == data[1000:]
        speaker.send(one.frame(Type.GET, (5000, 2000), (10, 1000), op=2, index=7), one.key)
        answer = await speaker.frame(one.key)
        assert (answer.type, answer.op, answer.index, answer.proved) == (Type.DATA, 2, 7, True)
        assert answer.payload == data[1000:] + data[:1000]
        speaker.send(one.frame(Type.NOTIFY, tag=5, value=6), one.key)
        assert (await speaker.frame(one.key)).status == 0
        event = await one.event(EventKind.NOTIFY)
        assert (event.id, event.tag, event.value) == (one.grant.id, 5, 6)
        speaker.send(one.frame(Type.PUT, (0, 1), payload=b"x", flags=kvxd.F_NOTIFY, tag=8), one.key)
        assert (await speaker.frame(one.key)).status == 0
        assert (await one.event(EventKind.NOTIFY)).tag == 8
        speaker.send(one.frame(Type.DETACH, op=0), one.key)
        await eventually(lambda: one.engine.attached(one.grant.id) == 0)
        speaker.send(one.frame(Type.ATTACH), one.key)
        assert (await speaker.frame(one.key)).status == 0, "the connection goes on"


async def test_a_detach_that_names_an_operation_ends_the_connection() -> None:
    async with owner() as one, await attached(one) as speaker:
        speaker.send(one.frame(Type.DETACH, op=1), one.key)
        assert await speaker.closed() == b""
        await eventually(lambda: one.engine.attached(one.grant.id) == 0)
        assert one.count("protocol_errors") == 1


async def test_byte_by_byte_is_the_same() -> None:
    async with owner() as one, await attached(one) as speaker:
        data = random.Random(2).randbytes(300)
        for byte in speaker.encode(one.frame(Type.PUT, (0, 100), (200, 200), payload=data), one.key):
            speaker.writer.write(bytes([byte]))
            await speaker.writer.drain()
        assert (await speaker.frame(one.key)).status == 0
        assert bytes(one.inside[:100]) + bytes(one.inside[200:400]) == data


@pytest.mark.parametrize("right", [True, False])
async def test_checksums(right: bool) -> None:
    async with owner() as one, await attached(one) as speaker:
        data = random.Random(3).randbytes(400)
        crc = crc32c(data) ^ (0 if right else 1)
        frame = one.frame(Type.PUT, (0, 400), payload=data, flags=kvxd.F_CHECK | kvxd.F_NOTIFY, tag=1)
        speaker.send(frame, one.key, crc=crc)
        assert (await speaker.frame(one.key)).status == (0 if right else StatusCode.INTEGRITY)
        speaker.send(one.frame(Type.NOTIFY, tag=2), one.key)
        await speaker.frame(one.key)
        assert (await one.event(EventKind.NOTIFY)).tag == (1 if right else 2), "never told of bytes that are wrong"


@pytest.mark.parametrize(
    ("rows", "bad"),
    [
        (((0, LENGTH + 1),), 0),
        (((LENGTH, 1),), 0),
        (((1, LENGTH),), 0),
        (((2**64 - 1, 1),), 0),
        (((2**64 - 1, 2),), 0),
        (((2**63, 5),), 0),
        (((0, 4), (8, 4), (LENGTH - 3, 4)), 2),
    ],
)
@pytest.mark.parametrize("kind", [Type.PUT, Type.GET])
async def test_nothing_outside_the_grant(kind: Type, rows: tuple[tuple[int, int], ...], bad: int) -> None:
    async with owner() as one, await attached(one) as speaker:
        before = one.bytes.copy()
        payload = bytes(sum(length for _, length in rows)) if kind == Type.PUT else b""
        speaker.send(one.frame(kind, *rows, payload=payload), one.key)
        answer = await speaker.frame(one.key)
        assert (answer.type, answer.status, answer.segment) == (Type.ACK, StatusCode.RANGE, bad)
        assert answer.proved
        assert np.array_equal(one.bytes, before)
        assert one.count("refused") == 1
        speaker.send(one.frame(Type.PUT, (0, 1), payload=b"x"), one.key)
        assert (await speaker.frame(one.key)).status == 0, "the connection is still good"


@pytest.mark.parametrize(("access", "kind"), [(READ, Type.PUT), (WRITE, Type.GET)])
async def test_rights(access: int, kind: Type) -> None:
    async with owner(access=access) as one, await attached(one) as speaker:
        before = one.bytes.copy()
        speaker.send(one.frame(kind, (0, 8), payload=b"x" * 8 if kind == Type.PUT else b""), one.key)
        answer = await speaker.frame(one.key)
        assert (answer.type, answer.status) == (Type.ACK, StatusCode.ACCESS)
        assert np.array_equal(one.bytes, before)


@pytest.mark.parametrize("changes", [{"value": LENGTH + 1}, {"tag": 3}])
async def test_an_import_may_not_claim_too_much(changes: dict[str, Any]) -> None:
    async with owner(access=READ) as one, await greeted(one) as speaker:
        speaker.send(one.frame(Type.ATTACH, **changes), one.key)
        assert (await speaker.frame(one.key)).status in (StatusCode.RANGE, StatusCode.ACCESS)
        assert one.engine.attached(one.grant.id) == 0


@pytest.mark.parametrize("kind", [Type.PUT, Type.GET, Type.NOTIFY])
async def test_wrong_key(kind: Type) -> None:
    async with owner() as one, await greeted(one) as speaker:
        before = one.bytes.copy()
        rows = () if kind == Type.NOTIFY else ((0, 100),)
        speaker.send(one.frame(kind, *rows, payload=b"x" * 100 if kind == Type.PUT else b""), bytes(16))
        answer = await speaker.frame(one.key)
        assert (answer.type, answer.status, answer.flags) == (Type.ACK, StatusCode.KEY, kvxd.F_BARE)
        assert await speaker.closed() == b""
        assert np.array_equal(one.bytes, before)
        assert one.count("refused") == 1
        assert one.engine.attached(one.grant.id) == 0
        assert not [event for event in one.events if event.kind == EventKind.NOTIFY]


async def test_guessing_keys_ends() -> None:
    async with owner() as one, await greeted(one) as speaker:
        with pytest.raises(Refused):
            for guess in range(1000):
                speaker.send(one.frame(Type.ATTACH), guess.to_bytes(16, "big"))
                assert (await speaker.frame(one.key)).status == StatusCode.KEY
        assert one.count("refused") < 20


async def test_a_replay_is_refused() -> None:
    async with owner() as one, await attached(one) as speaker:
        recorded = speaker.send(one.frame(Type.PUT, (0, 100), payload=b"a" * 100), one.key)
        assert (await speaker.frame(one.key)).status == 0
        one.inside[:100] = 0
        speaker.writer.write(recorded)
        assert (await speaker.frame(one.key)).status == StatusCode.KEY
        await speaker.closed()
        async with await greeted(one) as again:
            again.writer.write(recorded)
            assert (await again.frame(one.key)).status == StatusCode.KEY
        assert not one.inside[:100].any()


async def test_an_answer_of_ours_is_no_request() -> None:
    """Directions differ: what the owner proved cannot be thrown back at it."""
    async with owner() as one, await greeted(one) as speaker:
        speaker.role = kvxd.ACCEPTOR
        speaker.send(one.frame(Type.ATTACH), one.key)
        assert (await speaker.frame(one.key)).status == StatusCode.KEY


@pytest.mark.parametrize(
    ("changes", "status"), [({"grant": 999999}, StatusCode.UNKNOWN), ({"generation": 1}, StatusCode.STALE)]
)
async def test_unknown_and_stale(changes: dict[str, Any], status: StatusCode) -> None:
    async with owner() as one, await greeted(one) as speaker:
        before = one.bytes.copy()
        speaker.send(one.frame(Type.PUT, (0, 100), payload=b"x" * 100, **changes), one.key)
        answer = await speaker.frame(one.key)
        assert (answer.status, answer.flags) == (status, kvxd.F_BARE)
        assert np.array_equal(one.bytes, before)


async def test_revoke_while_the_sender_stalls() -> None:
    async with owner() as one, await attached(one) as speaker:
        data = speaker.encode(one.frame(Type.PUT, (0, LENGTH), payload=b"\xaa" * LENGTH), one.key)
        half = kvxd.HEADER_BYTES + 16 + LENGTH // 2
        speaker.writer.write(data[:half])
        await eventually(lambda: one.inside[LENGTH // 2 - 1] == 0xAA)
        event = await within(one.engine.revoke(one.grant.id))
        assert event.status == 0
        one.inside[:] = 0
        speaker.writer.write(data[half:])
        answer = await speaker.frame(one.key)
        assert (answer.status, answer.proved) == (StatusCode.REVOKED, True)
        assert not one.inside.any()


async def test_revoke_while_the_reader_stalls() -> None:
    length = 32 * MIB
    async with owner(length=length) as one, await attached(one) as speaker:
        for index in range(32):
            speaker.send(one.frame(Type.GET, (index * MIB, MIB), index=index), one.key)
        await eventually(lambda: one.count("copied_bytes") > 0)
        event = await within(one.engine.revoke(one.grant.id))
        assert event.status == 0
        one.inside[:] = 0xEE  # somebody else's now
        seen = []
        for index in range(32):
            answer = await speaker.frame(one.key)
            assert answer.index == index
            assert answer.proved or answer.flags == kvxd.F_BARE, "asked before the revoke, or after it"
            seen.append(answer.status or answer.trailer_status)
            assert b"\xee" * 64 not in answer.payload
        assert set(seen) <= {0, StatusCode.REVOKED, StatusCode.UNKNOWN}
        assert seen[-1] != 0
        assert not any(seen[: seen.count(0)]), "whole frames first, then none"


async def test_goodbye_and_loss() -> None:
    async with owner() as one:
        async with await attached(one) as speaker:
            speaker.send(Frame(type=Type.BYE), one.key)
            await eventually(lambda: one.engine.attached(one.grant.id) == 0)
        async with await attached(one):
            await eventually(lambda: one.engine.attached(one.grant.id) == 1)
        assert (await one.event(EventKind.GRANT_LOST)).id == one.grant.id
        assert not [event for event in one.events if event.kind == EventKind.GRANT_LOST]


async def test_other_streams_do_not_count_as_peers() -> None:
    async with owner() as one, await attached(one), await greeted(one, stream=1) as second:
        second.send(one.frame(Type.ATTACH), one.key)
        assert (await second.frame(one.key)).status == 0
        assert one.engine.attached(one.grant.id) == 1

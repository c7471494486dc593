"""What a record of a sealed connection has to be, where the frames in it would not tell: their authenticators cover
heads, not payloads, and know nothing of numbers and keys of records.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from kvxfer.native.engine import OpKind
from kvxfer.native.status import StatusCode
from tests.native import kvxd, sealed
from tests.native.conformance import KIB, MIB, settled, within
from tests.native.kvxd import Frame, Type
from tests.native.mutants.mutations import SEAL_RECORDS_MAX
from tests.native.sealed import SealedSpeaker
from tests.native.tcp_owner import KEY, initiator, owner
from tests.native.test_tcp_encrypted import (
    ON,
    between,
    imported,
    our_owner,
    reached,
    serves,
    wired,
)

# -- payloads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [OpKind.PUT, OpKind.GET])
async def test_an_old_record_of_a_payload_in_the_place_of_the_next(kind: OpKind) -> None:
    """Nothing but its number says that it is not the right one."""
    await an_old_record(kind)


async def an_old_record(kind: OpKind = OpKind.PUT) -> None:
    length = 5 * sealed.TEXT_MAX
    kept: list[bytes] = []

    def change(way: str, number: int, piece: bytes) -> list[bytes]:
        if len(piece) > sealed.TEXT_MAX:
            kept.append(piece)
        return [kept[0] if len(kept) == 2 else piece]

    async with owner(length=length, **ON) as one, initiator(frame_bytes=MIB, **ON) as side:
        async with between(one.endpoint) as (middle, endpoint):
            _, handle = await wired(side, one, endpoint)
            region, memory = side.alloc(length)
            for array in (memory, one.inside):
                array[:] = np.frombuffer(os.urandom(length), dtype=np.uint8)
            middle.change = change
            event = await settled(side.engine.submit_one(kind, region.id, handle, 0, 0, length))
            assert event.status == StatusCode.PEER_LOST, "an old record opened"
        assert await serves(one)


# -- frames in clear ---------------------------------------------------------------------------------------------------


async def test_a_frame_in_clear_is_not_taken() -> None:
    """By the owner, on a connection that is sealed: not even with a key and all authenticators right."""
    async with owner(**ON) as one:
        before = one.bytes.copy()
        async with await imported(one) as speaker:
            errors = one.count("protocol_errors")
            speaker.raw.write(speaker.encode(one.frame(Type.PUT, (0, 64), payload=bytes(64)), one.key))
            assert not await within(speaker.reader.anything()), "it was answered"
            assert np.array_equal(one.bytes, before)
            assert one.count("protocol_errors") == errors + 1
        assert await serves(one)


async def test_an_answer_in_clear_is_not_taken() -> None:
    def act(speaker: SealedSpeaker, frame: Frame) -> None:
        answer = Frame(type=Type.ACK, op=frame.op, index=frame.index, segment=kvxd.SEGMENT_UNKNOWN)
        speaker.raw.write(speaker.encode(answer, KEY))

    async with our_owner(act) as endpoint, initiator(**ON) as side:
        _, handle = await reached(side, endpoint)
        region, _ = side.alloc(KIB)
        event = await settled(side.engine.submit_one(OpKind.PUT, region.id, handle, 0, 0, KIB))
        assert event.status == StatusCode.PEER_LOST, "an answer in clear was taken"


# -- the next key ------------------------------------------------------------------------------------------------------


def test_both_change_keys_after_as_many_records() -> None:
    """A million, which would take too long to play."""
    text = Path(__file__).parents[2].joinpath("kvxfer", "native", "proto", "seal.h").read_text()
    assert f"#define KVX_SEAL_RECORDS_MAX (1u << {sealed.RECORDS_MAX.bit_length() - 1})" in text


async def it_is_dialled(records_max: int = SEAL_RECORDS_MAX) -> None:
    """`test_mutants.py` plays it with an engine whose keys are good for so many records."""
    async with owner(**ON) as one:
        SealedSpeaker.records_max = records_max
        async with await imported(one) as speaker:
            data = os.urandom(4000)
            for cut in (37, 999):
                speaker.writer.cut = cut
                speaker.send(one.frame(Type.PUT, (0, len(data)), payload=data), one.key)
                assert (await speaker.frame(one.key)).status == 0
                assert bytes(one.inside[: len(data)]) == data
            for offset in range(4 * records_max):
                speaker.send(one.frame(Type.GET, (offset, 20)), one.key)
                answer = await speaker.frame(one.key)
                assert (answer.proved, answer.payload) == (True, data[offset : offset + 20])
            assert min(speaker.out.keys, speaker.back.keys) >= 3


async def it_dials(records_max: int = SEAL_RECORDS_MAX) -> None:
    """Likewise."""
    got: list[bytes] = []
    speakers: list[SealedSpeaker] = []

    def act(speaker: SealedSpeaker, frame: Frame) -> None:
        speakers[:] = [speaker]
        got.append(frame.payload)
        speaker.send(Frame(type=Type.ACK, op=frame.op, index=frame.index, segment=kvxd.SEGMENT_UNKNOWN), KEY)

    SealedSpeaker.records_max = records_max
    async with our_owner(act) as endpoint, initiator(**ON) as side:
        _, handle = await reached(side, endpoint)
        region, memory = side.alloc(KIB)
        for value in range(4 * records_max):
            memory[:] = value
            assert (await settled(side.engine.submit_one(OpKind.PUT, region.id, handle, 0, 0, KIB))).status == 0
        assert got == [bytes([value]) * KIB for value in range(4 * records_max)]
        assert min(speakers[0].out.keys, speakers[0].back.keys) >= 3

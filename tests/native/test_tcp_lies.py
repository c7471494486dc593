"""Owners that lie to an initiator of the tcp transport, in every field of every answer: the connection ends, the op
with it, and the process goes on. What nobody has proved decides nothing but that."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kvxfer.native.engine import EventKind, OpKind
from kvxfer.native.status import StatusCode
from tests.native import frames, kvxd
from tests.native.conformance import KIB, Side, settled, within
from tests.native.kvxd import SEGMENT_UNKNOWN, Frame, Speaker, Type
from tests.native.tcp_owner import KEY, connect, import_, initiator
from tests.native.tcp_servers import lying_owner

PUT, GET = OpKind.PUT, OpKind.GET
ROWS = np.array([(i * 4000, i * 4000, 2000) for i in range(3)], dtype=np.uint64)
WRONG_KEY = bytes(16)
Say = Callable[[Frame], tuple[Frame, bytes]]
Outcome = tuple[int, int]
LOST = (StatusCode.PEER_LOST, -1)


class Lies:
    """An owner that answers each request with what `say` makes of it."""

    def __init__(self) -> None:
        self.say: Say = lambda asked: (ack(asked), KEY)

    async def act(self, speaker: Speaker, asked: Frame) -> None:
        answer, key = self.say(asked)
        if answer.type == Type.DATA:
            answer = replace(answer, payload=bytes(answer.length))
        speaker.send(answer, key)


def ack(asked: Frame, **changes: int) -> Frame:
    values = {"op": asked.op, "index": asked.index, "segment": SEGMENT_UNKNOWN}
    return Frame(type=Type.ACK, **(values | changes))


def data(asked: Frame, **changes: int) -> Frame:
    return Frame(type=Type.DATA, **({"op": asked.op, "index": asked.index, "length": asked.length} | changes))


async def outcomes(say: Say, kinds: tuple[OpKind, ...], *, notes: bool = False) -> list[Outcome]:
    """What becomes of an op of each kind on a connection of its own that is answered so."""
    lies, found = Lies(), []
    async with lying_owner(lies.act) as endpoint, initiator(connect_ms=5000) as side:
        mine, _ = side.alloc(16 * KIB)
        for kind in kinds:
            lies.say = say
            peer, event = await connect(side, endpoint)
            assert event.status == 0
            handle, event = await import_(side, peer)
            assert event.status == 0
            rows = ROWS[:0] if notes else ROWS
            notify = (1, 2) if notes else None
            event = await settled(side.engine.submit(kind, mine.id, handle, rows, notify=notify))
            found.append((event.status, event.segment))
            if found[-1] == LOST:
                assert (await side.event(EventKind.PEER_DOWN)).id == peer
            else:
                await still_there(side, lies, handle, mine.id)
            await within(side.engine.close_peer(peer))
    return found


async def still_there(side: Side, lies: Lies, handle: int, region: int) -> None:
    """The connection has outlived the answer."""
    lies.say = lambda asked: (ack(asked), KEY)
    assert (await settled(side.engine.submit_one(PUT, region, handle, 0, 0, 100))).status == 0


def expected(kind: OpKind, status: int, segment: int, how: str) -> Outcome:
    """By the specification, of an `ACK` to a frame with three segments."""
    named = segment != SEGMENT_UNKNOWN
    if how == "bare":
        gone = status in frames.BARE_REFUSALS - {StatusCode.KEY} and not named
        return (StatusCode.UNKNOWN, -1) if gone else LOST
    if how == "wrong key" or (named and segment >= len(ROWS)):
        return LOST
    if status == StatusCode.OK:
        return (StatusCode.OK, -1) if kind == PUT and not named else LOST
    return (status, segment if named else -1) if status in frames.REFUSALS else LOST


CASES = [
    *itertools.product(frames.STATUSES, [SEGMENT_UNKNOWN, 0], ["proved", "bare", "wrong key"]),
    *itertools.product(
        [StatusCode.RANGE, StatusCode.UNKNOWN], [2, 3, 5, 2**31, 2**32 - 2], ["proved", "bare", "wrong key"]
    ),
]


@pytest.mark.parametrize("how", ["proved", "bare", "wrong key"])
async def test_what_an_answer_may_say_of_an_op(how: str) -> None:
    for status, segment, way in CASES:
        if way != how:
            continue
        flags = kvxd.F_BARE if how == "bare" else 0
        key = KEY if how == "proved" else WRONG_KEY

        def say(asked: Frame, status: int = status, segment: int = segment) -> tuple[Frame, bytes]:
            return ack(asked, status=status, segment=segment, flags=flags), key  # noqa: B023 (called within)

        found = await outcomes(say, (PUT, GET))
        assert found == [expected(kind, status, segment, how) for kind in (PUT, GET)], (status, segment)


NOTES: dict[str, tuple[Say, Outcome]] = {
    "a segment of a notification": (lambda asked: (ack(asked, status=101, segment=0), KEY), LOST),
    "a refusal": (lambda asked: (ack(asked, status=101), KEY), (StatusCode.RANGE, -1)),
    "a refusal that nobody proves": (lambda asked: (ack(asked, status=106, flags=kvxd.F_BARE), WRONG_KEY), (105, -1)),
    "data": (lambda asked: (data(asked, length=1), KEY), LOST),
}


@pytest.mark.parametrize("name", NOTES)
async def test_answers_to_a_notification(name: str) -> None:
    say, wanted = NOTES[name]
    assert await outcomes(say, (PUT,), notes=True) == [wanted]


DATA: dict[str, tuple[Say, Outcome]] = {
    "the truth": (lambda asked: (data(asked), KEY), (StatusCode.OK, -1)),
    "no key": (lambda asked: (data(asked), WRONG_KEY), LOST),
    "a segment": (lambda asked: (data(asked, segment=1), KEY), LOST),
    "a status in the head": (lambda asked: (data(asked, status=106), KEY), LOST),
    "a checksum that nobody asked for": (lambda asked: (data(asked, flags=kvxd.F_CHECK), KEY), LOST),
    "too short": (lambda asked: (data(asked, length=5999), KEY), LOST),
    "too long": (lambda asked: (data(asked, length=6001), KEY), LOST),
    **{
        f"trailer {status}": (
            lambda asked, status=int(status): (data(asked, trailer_status=status), KEY),  # type: ignore[misc]
            (int(status), -1) if status in frames.REFUSALS or status == 0 else LOST,
        )
        for status in frames.STATUSES
    },
}


@pytest.mark.parametrize("name", DATA)
async def test_answers_with_data(name: str) -> None:
    say, wanted = DATA[name]
    assert await outcomes(say, (GET,)) == [wanted]


async def test_a_segment_is_counted_from_the_first_of_its_frame() -> None:
    """Five segments of 2000 bytes in frames of 4096: the second frame begins within the third segment."""
    rows = np.array([(i * 4000, i * 4000, 2000) for i in range(5)], dtype=np.uint64)
    lies = Lies()
    for frame, segments, first in ((0, 3, 0), (1, 3, 2), (2, 1, 4)):
        for segment in range(segments + 1):
            lies.say = lambda asked, frame=frame, segment=segment: (  # type: ignore[misc]
                ack(asked, **({"status": 101, "segment": segment} if asked.index == frame else {})), KEY,
            )  # fmt: skip
            async with lying_owner(lies.act) as endpoint, initiator(frame_bytes=4096) as side:
                mine, _ = side.alloc(32 * KIB)
                peer, _ = await connect(side, endpoint)
                handle, _ = await import_(side, peer)
                event = await settled(side.engine.submit(PUT, mine.id, handle, rows))
                wanted = (StatusCode.RANGE, first + segment) if segment < segments else LOST
                assert (event.status, event.segment) == wanted, (frame, segment)


@pytest.mark.parametrize("status", [0, *frames.STATUSES])
@pytest.mark.parametrize("how", ["proved", "bare", "wrong key"])
async def test_answers_to_an_import(how: str, status: int) -> None:
    async def serve_import(speaker: Speaker, asked: Frame) -> None:
        raise AssertionError("nothing follows an import")

    flags = kvxd.F_BARE if how == "bare" else 0
    answer = {"status": status, "flags": flags}
    async with (
        lying_owner(
            serve_import, attach=lambda asked: (ack(asked, **answer), KEY if how == "proved" else WRONG_KEY)
        ) as endpoint,
        initiator(connect_ms=5000) as side,
    ):
        peer, _ = await connect(side, endpoint)
        _, event = await import_(side, peer)
        good = {"proved": {0} | frames.REFUSALS, "bare": frames.BARE_REFUSALS}
        wanted = status if status in good.get(how, set()) else StatusCode.PEER_LOST
        if how == "wrong key" and frames.ack_may_be(kvxd.ACCEPTOR, 0, status, SEGMENT_UNKNOWN):
            wanted = StatusCode.KEY
        assert event.status == wanted
        await within(side.engine.close_peer(peer))

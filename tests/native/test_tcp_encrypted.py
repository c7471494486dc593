"""Encrypted data connections: a second implementation (`sealed.py`), eavesdroppers, and those who change bytes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import EncryptionMismatch, PeerLost
from kvxfer.native.engine import Event, EventKind, OpKind
from kvxfer.native.status import StatusCode
from tests.native import kvxd, sealed
from tests.native.conformance import KIB, MIB, Outcome, Side, settled, within
from tests.native.kvxd import Frame, Type
from tests.native.sealed import SECRET, SealedSpeaker
from tests.native.tcp_owner import KEY, LENGTH, Owner, attached, connect, eventually, import_, initiator, owner
from tests.native.tcp_servers import server

ON: dict[str, Any] = {"tcp_encryption": "on", "connect_ms": 10_000}
PATTERN = b"a pattern that nobody but the two may see "


def secret_of(one: Side) -> bytes:
    secret = one.engine.transports[1].secret
    assert secret is not None
    return secret


async def dialled(one: Owner) -> SealedSpeaker:
    speaker = await sealed.dial(one.endpoint)
    assert await speaker.greet_sealed(secret_of(one)) == 0
    return speaker


async def imported(one: Owner) -> SealedSpeaker:
    speaker = await dialled(one)
    speaker.send(one.frame(Type.ATTACH), one.key)
    answer = await speaker.frame(one.key)
    assert (answer.type, answer.status, answer.proved) == (Type.ACK, 0, True)
    return speaker


async def serves(one: Owner) -> bool:
    """Whoever holds the key is still served."""
    async with await imported(one) as speaker:
        data = os.urandom(64)
        speaker.send(one.frame(Type.PUT, (64, 64), payload=data), one.key)
        return (await speaker.frame(one.key)).status == 0 and bytes(one.inside[64:128]) == data


async def wired(side: Side, one: Owner, endpoint: str = "") -> tuple[int, int]:
    """A connection and an import, perhaps through somebody at another endpoint."""
    peer, done = side.engine.connect(1, endpoint or one.endpoint, secret_of(one))
    event = await within(done)
    assert event.status == 0, event
    given = {"grant": one.grant.id, "generation": one.grant.generation, "length": one.length, "key": one.key}
    handle, event = await import_(side, peer, **given)
    assert event.status == 0, event
    return peer, handle


# -- what both implementations agree on -------------------------------------------------------------------------------


async def test_the_other_implementation_puts_and_gets() -> None:
    async with owner(**ON) as one, await imported(one) as speaker:
        data = os.urandom(40 * KIB)
        for cut in (sealed.TEXT_MAX, 1000, 37):  # however the records are cut
            speaker.writer.cut = cut
            speaker.send(one.frame(Type.PUT, (100, 20 * KIB), (40 * KIB, 20 * KIB), payload=data), one.key)
            assert (await speaker.frame(one.key)).status == 0
            assert bytes(one.inside[100 : 100 + 20 * KIB]) + bytes(one.inside[40 * KIB : 60 * KIB]) == data
            one.inside[:] = 0
        one.inside[:] = np.frombuffer(os.urandom(LENGTH), dtype=np.uint8)
        speaker.send(one.frame(Type.GET, (0, LENGTH)), one.key)
        answer = await speaker.frame(one.key)
        assert (answer.type, answer.proved, answer.payload) == (Type.DATA, True, bytes(one.inside))


@asynccontextmanager
async def our_owner(act: Callable[[SealedSpeaker, Frame], None], secret: bytes = SECRET) -> AsyncIterator[str]:
    """An acceptor of the other implementation: it takes imports, what follows is up to the test."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        speaker = sealed.acceptor(reader, writer)
        hello = await speaker.exactly(sealed.HELLO_BYTES)
        await speaker.greet_sealed(secret, theirs=hello)
        while True:
            frame = await speaker.frame(KEY)
            assert frame.proved
            if frame.type == Type.ATTACH:
                speaker.send(Frame(type=Type.ACK, op=frame.op, segment=kvxd.SEGMENT_UNKNOWN), KEY)
            elif frame.type != Type.DETACH:
                act(speaker, frame)

    async with server(serve) as endpoint:
        yield endpoint


async def reached(side: Side, endpoint: str) -> tuple[int, int]:
    peer, done = side.engine.connect(1, endpoint, SECRET)
    assert (await within(done)).status == 0
    handle, event = await import_(side, peer)
    assert event.status == 0
    return peer, handle


async def test_the_other_implementation_serves() -> None:
    got: list[bytes] = []
    data = os.urandom(200 * KIB)

    def act(speaker: SealedSpeaker, frame: Frame) -> None:
        if frame.type == Type.PUT:
            got.append(frame.payload)
            speaker.send(Frame(type=Type.ACK, op=frame.op, index=frame.index, segment=kvxd.SEGMENT_UNKNOWN), KEY)
        else:
            speaker.writer.cut = 5000
            answer = Frame(type=Type.DATA, op=frame.op, index=frame.index, length=frame.length, payload=data)
            speaker.send(answer, KEY)

    async with our_owner(act) as endpoint, initiator(frame_bytes=MIB, **ON) as side:
        _, handle = await reached(side, endpoint)
        region, memory = side.alloc(len(data))
        memory[:] = np.frombuffer(data, dtype=np.uint8)
        for length in (100, len(data)):
            event = await settled(side.engine.submit_one(OpKind.PUT, region.id, handle, 0, 0, length))
            assert event.status == 0
            assert got.pop() == data[:length]
        memory[:] = 0
        event = await settled(side.engine.submit_one(OpKind.GET, region.id, handle, 0, 0, len(data)))
        assert event.status == 0
        assert bytes(memory) == data


# -- who listens ------------------------------------------------------------------------------------------------------


class Middle:
    """Somebody in between: keeps what passes each way, record by record, and may change it."""

    def __init__(self, target: str) -> None:
        self.host, _, port = target.rpartition(":")
        self.port = int(port)
        self.seen = {"up": b"", "down": b""}
        self.change: Callable[[str, int, bytes], list[bytes]] = lambda way, number, piece: [piece]
        self._writers: list[asyncio.StreamWriter] = []
        self._ended = asyncio.Event()
        self._running = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._running += 1
        self._ended.clear()
        self._writers.append(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection(self.host, self.port)
            self._writers.append(far_writer)
            await asyncio.gather(self.pump("up", reader, far_writer), self.pump("down", far_reader, writer))
        finally:
            self._running -= 1
            if not self._running:
                self._ended.set()

    async def close(self) -> None:
        """Returns when nobody is in between any more."""
        for writer in self._writers:
            writer.close()
        if self._running:
            await within(self._ended.wait())

    async def pump(self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            piece = await reader.readexactly(sealed.HELLO_BYTES)
            number = 0
            while True:
                self.seen[way] += piece
                for one in self.change(way, number, piece):
                    writer.write(one)
                await writer.drain()
                number += 1
                head = await reader.readexactly(4)
                piece = head + await reader.readexactly(int.from_bytes(head, "little") + sealed.TAG_BYTES)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@asynccontextmanager
async def between(target: str) -> AsyncIterator[tuple[Middle, str]]:
    middle = Middle(target)
    async with server(middle.handle) as endpoint:
        try:
            yield middle, endpoint
        finally:
            await middle.close()


async def test_nothing_crosses_the_wire_in_clear() -> None:
    tag, value, offset = 0x1122334455667788, 0x99AABBCCDDEEFF01, 0x1230
    async with owner(frame_bytes=16 * KIB, **ON) as one, initiator(**ON) as side:
        async with between(one.endpoint) as (middle, endpoint):
            _, handle = await wired(side, one, endpoint)
            region, memory = side.alloc(LENGTH)
            whole = PATTERN * (LENGTH // len(PATTERN))
            memory[: len(whole)] = np.frombuffer(whole, dtype=np.uint8)
            for length in (len(PATTERN), len(whole) - offset):
                op = side.engine.submit_one(OpKind.PUT, region.id, handle, 0, offset, length, notify=(tag, value))
                assert (await settled(op)).status == 0
                assert bytes(one.inside[offset : offset + length]) == whole[:length]
                assert (
                    await settled(side.engine.submit_one(OpKind.GET, region.id, handle, 0, offset, length))
                ).status == 0
            told = await one.event(EventKind.NOTIFY)
            assert (told.tag, told.value) == (tag, value)
        for way in ("up", "down"):
            seen = middle.seen[way][sealed.HELLO_BYTES :]
            assert len(seen) > len(whole) - offset, "this is where the bytes went"
            numbers = [number.to_bytes(8, "little") for number in (tag, value, one.grant.generation)]
            for word in (*numbers, PATTERN[:12], one.key, secret_of(one), b"KVXD"):
                assert word not in middle.seen[way][sealed.HELLO_BYTES :]
            assert one.key not in middle.seen[way]
            assert secret_of(one) not in middle.seen[way]
            assert offset.to_bytes(8, "little") not in seen
            assert not re.search(rb"\0{12}", seen), "headers are full of zeros"


async def test_the_same_bytes_never_look_the_same_twice() -> None:
    async with owner(**ON) as one:
        shown = []
        for _ in range(2):
            async with initiator(**ON) as side, between(one.endpoint) as (middle, endpoint):
                _, handle = await wired(side, one, endpoint)
                region, memory = side.alloc(KIB)
                memory[:] = 7
                for _ in range(2):
                    assert (await settled(side.engine.submit_one(OpKind.PUT, region.id, handle, 0, 0, KIB))).status == 0
                shown.append(middle.seen["up"])
        pieces = {one[at : at + 16] for one in shown for at in range(sealed.HELLO_BYTES, len(one) - 16, 16)}
        assert len(pieces) == sum(len(range(sealed.HELLO_BYTES, len(one) - 16, 16)) for one in shown)


# -- who changes ------------------------------------------------------------------------------------------------------

Change = Callable[[list[bytes], bytes], list[bytes]]


def flip(at: int) -> Change:
    def change(before: list[bytes], piece: bytes) -> list[bytes]:
        return [
            piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :] if at >= 0 else flip(len(piece) + at)([], piece)[0]
        ]

    return change


CHANGES: dict[str, Change] = {
    "a bit of the length": flip(0),
    "a high bit of the length": flip(3),
    "a bit of the text": flip(4),
    "a bit of the tag": flip(-1),
    "replayed": lambda before, piece: [before[-1], piece],
    "twice": lambda before, piece: [piece, piece],
    "left out": lambda before, piece: [],
    "an old one instead": lambda before, piece: [before[-1]],
    "an empty one before": lambda before, piece: [bytes(20), piece],
    "cut and joined with the next": lambda before, piece: [piece[:-1]],
    "another length, same bytes": lambda before, piece: [(len(piece) - 21).to_bytes(4, "little") + piece[4:]],
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("size", [200, 40 * KIB])
async def test_changed_on_the_way_to_the_owner(name: str, size: int) -> None:
    await changed(name, size, OpKind.PUT, "up")


async def a_bit_of_the_tag() -> None:
    """Alone: nothing in the frames would tell."""
    await changed("a bit of the tag", 200, OpKind.PUT, "up")


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("size", [200, 40 * KIB])
async def test_changed_on_the_way_back(name: str, size: int) -> None:
    await changed(name, size, OpKind.GET, "down")


def passed(outcome: Outcome) -> bool:
    event = outcome if isinstance(outcome, Event) else outcome[1].result() if outcome[1].done() else None
    return event is not None and event.status == 0


async def changed(name: str, size: int, kind: OpKind, way: str) -> None:
    """The first transfer goes well, a record of the second is changed: it fails, and nothing that follows succeeds."""
    before: list[bytes] = []
    armed = False
    fired = asyncio.Event()

    def change(which: str, number: int, piece: bytes) -> list[bytes]:
        nonlocal armed
        if which != way:
            return [piece]
        if armed and len(piece) > 100 and len(before) > 2:
            armed = False
            fired.set()
            return CHANGES[name](before, piece)
        before.append(piece)
        return [piece]

    async with owner(**ON) as one, initiator(**ON) as side, between(one.endpoint) as (middle, endpoint):
        middle.change = change
        _, handle = await wired(side, one, endpoint)
        region, memory = side.alloc(LENGTH)
        memory[:] = 3
        one.inside[:] = 4
        for _ in range(2):
            assert (await settled(side.engine.submit_one(kind, region.id, handle, 0, 0, 100))).status == 0
        armed = True
        outcomes = [side.engine.submit_one(kind, region.id, handle, 0, 0, size)]
        await within(fired.wait())
        # A record that is missing or short is noticed with the next ones.
        while not any(event.kind == EventKind.PEER_DOWN for event in side.events):
            assert not any(map(passed, outcomes[1:])), f"{name}: the next ones went well"
            with contextlib.suppress(PeerLost):
                outcomes.append(side.engine.submit_one(kind, region.id, handle, 0, 0, 100))
            await asyncio.sleep(0.005)
        for outcome in outcomes:
            event = await settled(outcome)
            whole = (name, size, outcome) == ("twice", 200, outcomes[0])  # it was; what came behind it was not
            # What came behind it may still have been waiting when the connection ended.
            ended = (StatusCode.PEER_LOST,) if outcome is outcomes[0] else (StatusCode.PEER_LOST, StatusCode.NOT_SENT)
            assert event.status in ended or (whole and event.status == 0), (name, event)
        await eventually(lambda: one.count("peers_accepted") == 0)
        assert await serves(one)


async def test_sent_back_to_its_sender() -> None:
    """Reflection: each direction has its own key."""
    async with owner(**ON) as one, initiator(**ON) as side, between(one.endpoint) as (middle, endpoint):
        kept: list[bytes] = []

        def change(way: str, number: int, piece: bytes) -> list[bytes]:
            if way == "up" and number >= 1:
                kept.append(piece)
            if way == "down" and number == 2:
                return [kept[-1]]
            return [piece]

        middle.change = change
        peer, done = side.engine.connect(1, endpoint, secret_of(one))
        assert (await within(done)).status == 0
        _, event = await import_(side, peer, grant=one.grant.id, generation=one.grant.generation, key=one.key)
        assert event.status == StatusCode.PEER_LOST


async def test_a_recorded_connection_is_worth_nothing() -> None:
    async with owner(**ON) as one, initiator(**ON) as side, between(one.endpoint) as (middle, endpoint):
        _, handle = await wired(side, one, endpoint)
        region, memory = side.alloc(KIB)
        memory[:] = 9
        assert (await settled(side.engine.submit_one(OpKind.PUT, region.id, handle, 0, 0, KIB))).status == 0
        one.inside[:] = 0
        reader, writer = await asyncio.open_connection("127.0.0.1", int(one.endpoint.rpartition(":")[2]))
        errors = one.count("protocol_errors")
        writer.write(middle.seen["up"])
        await eventually(lambda: one.count("protocol_errors") == errors + 1)
        await within(read_to_the_end(reader))
        writer.close()
        assert not one.inside.any()
        assert await serves(one)


async def read_to_the_end(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


@pytest.mark.parametrize("at", [5, 12, 16, 20, 30, 46, 64, 95])
@pytest.mark.parametrize("way", ["up", "down"])
async def test_a_changed_hello_gives_other_keys(way: str, at: int) -> None:
    """Also the parts of it that mean little: all of it is in the keys."""

    def change(which: str, number: int, piece: bytes) -> list[bytes]:
        return flip(at)([], piece) if (which, number) == (way, 0) else [piece]

    async with owner(**ON) as one, initiator(**ON) as side, between(one.endpoint) as (middle, endpoint):
        middle.change = change
        _, done = side.engine.connect(1, endpoint, secret_of(one))
        status = (await within(done)).status
        assert status in (StatusCode.SECRET, StatusCode.NOT_KVXFER, StatusCode.REFUSED), status


# -- one side in clear ------------------------------------------------------------------------------------------------


async def test_a_dialler_in_clear_is_told_why_not() -> None:
    async with owner(**ON) as one, initiator() as side:
        _, event = await connect(side, one.endpoint)
        assert event.status == StatusCode.ENCRYPTION
        with pytest.raises(EncryptionMismatch, match="tcp_encryption"):
            side.engine.connect(1, one.endpoint, secret_of(one))
        async with await kvxd.dial(one.endpoint) as speaker:
            assert await speaker.greet() == StatusCode.ENCRYPTION
            assert await speaker.closed() == b""


async def test_an_owner_in_clear_is_not_talked_to() -> None:
    async with owner() as one, initiator(**ON) as side:
        _, done = side.engine.connect(1, one.endpoint, SECRET)
        assert (await within(done)).status == StatusCode.ENCRYPTION
        with pytest.raises(EncryptionMismatch):
            side.engine.connect(1, one.endpoint)
        async with await attached(one):
            pass


@pytest.mark.parametrize("answer", ["clear", "refusal", "nothing"])
async def test_no_answer_makes_it_go_on_in_clear(answer: str) -> None:
    """Somebody in between answers in the owner's place."""
    heard = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await reader.readexactly(sealed.HELLO_BYTES)
        if answer != "nothing":
            status = 0 if answer == "clear" else int(StatusCode.VERSION)
            writer.write(kvxd.hello(kvxd.ACCEPTOR, bytes(16), status=status))
        else:
            writer.write_eof()
        heard.set_result(hello + await read_to_the_end(reader))

    async with server(serve) as endpoint, initiator(**ON) as side:
        _, done = side.engine.connect(1, endpoint, SECRET)
        assert (await within(done)).status in (StatusCode.ENCRYPTION, StatusCode.NOT_KVXFER)
        assert len(await within(heard)) == sealed.HELLO_BYTES, "nothing followed"


async def test_a_wrong_secret() -> None:
    async with owner(**ON) as one, initiator(**ON) as side:
        _, done = side.engine.connect(1, one.endpoint, bytes(32))
        assert (await within(done)).status == StatusCode.SECRET
        speaker = await sealed.dial(one.endpoint)
        with pytest.raises(AssertionError, match="the tag is wrong"):
            await speaker.greet_sealed(SECRET)
        speaker.raw.close()
        assert await serves(one)


async def test_an_owner_that_does_not_know_the_secret() -> None:
    async with our_owner(lambda speaker, frame: None, bytes(32)) as endpoint, initiator(**ON) as side:
        _, done = side.engine.connect(1, endpoint, SECRET)
        assert (await within(done)).status == StatusCode.SECRET


async def test_secrets_are_drawn_anew() -> None:
    async with owner(**ON) as one, owner(**ON) as other, owner() as clear:
        assert secret_of(one) != secret_of(other)
        assert clear.engine.transports[1].secret is None
        assert secret_of(one).hex() not in repr(one.engine.transports)
        assert [side.engine.transports[1].encrypted for side in (one, clear)] == [True, False]


# -- hostile records --------------------------------------------------------------------------------------------------


async def test_frames_before_the_empty_record() -> None:
    async with owner(**ON) as one:
        speaker = await sealed.dial(one.endpoint)
        async with speaker:
            await speaker.greet_sealed(secret_of(one), confirm=False)
            speaker.send(one.frame(Type.ATTACH), one.key)
            assert await speaker.closed() == b""
        assert one.engine.attached(one.grant.id) == 0
        assert await serves(one)


@pytest.mark.parametrize("length", [0, sealed.TEXT_MAX + 1, 0xFFFFFFFF])
async def test_records_of_impossible_lengths(length: int) -> None:
    async with owner(**ON) as one:
        async with await imported(one) as speaker:
            speaker.raw.write(length.to_bytes(4, "little") + bytes(16))
            assert await speaker.closed() == b""
        assert await serves(one)


async def test_the_largest_record_is_taken() -> None:
    async with owner(length=sealed.TEXT_MAX, **ON) as one, await imported(one) as speaker:
        data = os.urandom(sealed.TEXT_MAX)
        whole = speaker.encode(one.frame(Type.PUT, (0, len(data)), payload=data), one.key)
        head = kvxd.HEADER_BYTES + 16
        for part in (whole[:head], data, whole[head + len(data) :]):
            speaker.writer.write(part)
        assert (await speaker.frame(one.key)).status == 0
        assert bytes(one.inside) == data


async def test_a_share_that_everybody_could_guess() -> None:
    """Zero is a point of small order: what is agreed with it is no secret."""
    async with owner(**ON) as one:
        speaker = await sealed.dial(one.endpoint)
        async with speaker:
            errors = one.count("protocol_errors")
            speaker.raw = speaker.writer
            speaker.raw.write(kvxd.hello(kvxd.DIALLER, bytes(16), version=2) + bytes(32))
            assert await speaker.closed() == b""
            await eventually(lambda: one.count("protocol_errors") == errors + 1)
        assert await serves(one)


async def test_good_records_with_hostile_frames() -> None:
    rng = np.random.default_rng(11)
    async with owner(**ON) as one:
        before = one.bytes.copy()
        for number in range(60):
            speaker = await dialled(one)
            async with speaker:
                speaker.writer.cut = int(rng.integers(1, 400))
                frame = one.frame(Type.PUT, (0, 3000), payload=bytes(3000))
                damaged = bytearray(speaker.encode(frame, bytes(16) if number % 2 else one.key))
                damaged[int(rng.integers(0, 104))] ^= 1 << int(rng.integers(0, 8))  # its head
                speaker.writer.write(bytes(damaged))
                speaker.raw.write_eof()
                await speaker.closed()
        assert np.array_equal(one.bytes, before)
        await eventually(lambda: one.count("peers_accepted") == 0)
        assert await serves(one)


async def test_the_grants_key_is_asked_for_all_the_same() -> None:
    async with owner(**ON) as one, await dialled(one) as speaker:
        speaker.send(one.frame(Type.ATTACH), bytes(16))
        assert (await speaker.frame(bytes(16))).status == StatusCode.KEY


async def test_an_authenticator_fits_its_own_connection_only() -> None:
    """What proves a key is bound to what the two agreed on: nobody in between can pass it on, secret or not."""
    async with owner(**ON) as one, await dialled(one) as first, await dialled(one) as second:
        proof = first.encode(one.frame(Type.ATTACH), one.key)
        second.writer.write(proof)
        second.received = 0
        answer = await second.frame(one.key)
        assert (answer.type, answer.status) == (Type.ACK, StatusCode.KEY)

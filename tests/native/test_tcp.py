"""The initiator's side of the tcp transport: addresses, servers that are not what they should be, and owners that
lie.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from kvxfer.errors import ConfigError, KvxferError, TransportUnavailable
from kvxfer.native.engine import Engine, EngineConfig, EventKind, OpKind
from kvxfer.native.status import StatusCode
from tests.native import kvxd
from tests.native.conformance import KIB, MIB, settled, within
from tests.native.kvxd import Frame, Speaker, Type
from tests.native.tcp_owner import KEY, connect, import_, initiator, owner
from tests.native.tcp_servers import lying_owner, server

SLACK = float(os.environ.get("KVXFER_TEST_SLACK", "1"))
LENGTH = 8 * MIB


# -- addresses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "[::1]"])
async def test_both_families(address: str) -> None:
    async with owner(tcp_bind=address) as one, initiator() as side:
        assert one.endpoint.startswith("[::1]:" if ":" in address else "127.0.0.1:")
        peer, event = await connect(side, one.endpoint)
        assert event.status == 0
        grant = one.grant
        handle, event = await import_(
            side, peer, grant=grant.id, generation=grant.generation, length=grant.length, key=grant.key
        )
        assert event.status == 0
        mine, data = side.alloc(one.length)
        data[:] = 5
        outcome = side.engine.submit_one(OpKind.PUT, mine.id, handle, 0, 0, one.length)
        assert (await settled(outcome)).status == 0
        assert (one.inside == 5).all()


@pytest.mark.parametrize(
    "address", ["", "localhost:80", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "::1:80", "[127.0.0.1]:x"]
)
async def test_endpoints_that_are_none(address: str) -> None:
    async with initiator() as side:
        with pytest.raises(KvxferError):
            side.engine.connect(1, address)


def open_engine(**changes: Any) -> Engine:
    return Engine(EngineConfig(engine_id=os.urandom(16), transports=("tcp",), **changes))


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = f'"127.0.0.1" port {port}: Address already in use; .*set data_port'
        with pytest.raises(TransportUnavailable, match=words):
            open_engine(tcp_port=port)


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1"])
def test_an_address_that_is_not_ours_is_named(address: str) -> None:
    with pytest.raises(TransportUnavailable, match=f"{address}.*set data_bind"):
        open_engine(tcp_bind=address)


def test_a_name_is_no_address() -> None:
    with pytest.raises(ConfigError, match="numeric"):
        open_engine(tcp_bind="localhost")


def test_an_unknown_congestion_control_is_the_systems() -> None:
    open_engine(tcp_congestion="no-such-thing").close()


# -- servers that are something else --------------------------------------------------------------------------------


async def test_a_silent_server_times_out() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with server(silent) as endpoint, initiator(connect_ms=200) as side:
        started = time.monotonic()
        _, event = await connect(side, endpoint)
        assert event.status == StatusCode.TIMEOUT
        assert 0.15 < time.monotonic() - started < 1.5 * SLACK


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", StatusCode.NOT_KVXFER),
        (b"SSH-2.0-OpenSSH_9.0\r\n", StatusCode.NOT_KVXFER),
        (b"", StatusCode.NOT_KVXFER),
        (b"KVXD", StatusCode.NOT_KVXFER),
        (kvxd.hello(kvxd.ACCEPTOR, bytes(16), version=3), StatusCode.VERSION),
        (kvxd.hello(kvxd.ACCEPTOR, bytes(16), version=2), StatusCode.ENCRYPTION),
        (kvxd.hello(kvxd.ACCEPTOR, bytes(16), status=206), StatusCode.REFUSED),
        (kvxd.hello(kvxd.DIALLER, bytes(16)), StatusCode.NOT_KVXFER),
        (kvxd.hello(kvxd.ACCEPTOR, bytes(16), frame_bytes=0), StatusCode.NOT_KVXFER),
    ],
)
async def test_who_answers_is_not_ours(said: bytes, status: StatusCode) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(kvxd.HELLO_BYTES)
        writer.write(said)
        await writer.drain()
        writer.close()

    async with server(talk) as endpoint, initiator() as side:
        _, event = await connect(side, endpoint)
        assert event.status == status


async def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    async with initiator() as side:
        _, event = await connect(side, f"127.0.0.1:{port}")
        assert (event.status, event.sys_errno) == (StatusCode.UNREACHABLE, errno.ECONNREFUSED)


async def test_an_impostor_learns_nothing() -> None:
    """Who does not hold the key fails at the import: it never sees a payload."""
    seen: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        speaker = Speaker(reader, writer, kvxd.ACCEPTOR)
        await speaker.greet()
        frame = await speaker.frame(bytes(16))
        seen.append(frame.type)
        assert KEY not in frame.header()
        speaker.send(Frame(type=Type.ACK, op=frame.op, segment=kvxd.SEGMENT_UNKNOWN), bytes(16))
        seen.extend(await speaker.closed())

    async with server(serve) as endpoint, initiator() as side:
        peer, event = await connect(side, endpoint)
        assert event.status == 0
        _, event = await import_(side, peer)
        assert event.status == StatusCode.KEY
        await within(side.engine.close_peer(peer))
        assert seen[0] == Type.ATTACH
        assert len(seen) <= 1 + kvxd.HEADER_BYTES, "a goodbye, no more"


# -- owners that lie -------------------------------------------------------------------------------------------------


def ack(asked: Frame, **changes: int) -> Frame:
    values = {"op": asked.op, "index": asked.index, "segment": kvxd.SEGMENT_UNKNOWN}
    return Frame(type=Type.ACK, **(values | changes))


LIES: dict[str, Callable[[Frame], Frame]] = {
    "another op": lambda asked: ack(asked, op=asked.op + 1),
    "another frame": lambda asked: ack(asked, index=asked.index + 1),
    "done without data": lambda asked: ack(asked),
    "too much": lambda asked: Frame(
        type=Type.DATA, op=asked.op, index=asked.index, length=asked.length + 1, payload=bytes(asked.length + 1)
    ),
    "too little": lambda asked: Frame(type=Type.DATA, op=asked.op, index=asked.index, length=1, payload=b"x"),
    "a request": lambda asked: Frame(type=Type.PUT, length=4, segments=((0, 4),), payload=b"evil"),
    "an impossible status": lambda asked: ack(asked, status=16),
}


@pytest.mark.parametrize("lie", LIES)
async def test_lies_end_the_connection(lie: str) -> None:
    async def act(speaker: Speaker, asked: Frame) -> None:
        speaker.send(LIES[lie](asked), KEY)

    async with lying_owner(act) as endpoint, initiator() as side:
        peer, event = await connect(side, endpoint)
        handle, event = await import_(side, peer)
        assert event.status == 0
        mine, data = side.alloc(64 * KIB)
        data[:] = 9
        event = await settled(side.engine.submit_one(OpKind.GET, mine.id, handle, 100, 0, 1000))
        assert event.status == StatusCode.PEER_LOST
        assert (data[:100] == 9).all()
        assert (data[1100:] == 9).all()
        assert (await side.event(EventKind.PEER_DOWN)).id == peer


async def test_an_answer_before_the_end_of_the_question() -> None:
    """An acknowledgement of a put that is still being sent: the op must not complete, its memory is in use."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        speaker = Speaker(reader, writer, kvxd.ACCEPTOR)
        await speaker.greet(frame_bytes=64 * MIB)
        frame = await speaker.frame(KEY)
        speaker.send(ack(frame), KEY)
        header = await speaker.exactly(kvxd.HEADER_BYTES)
        op = kvxd.HEADER.unpack_from(header)[6]
        speaker.send(Frame(type=Type.ACK, op=op, segment=kvxd.SEGMENT_UNKNOWN), KEY)
        await asyncio.sleep(10)

    async with server(serve) as endpoint, initiator(frame_bytes=64 * MIB) as side:
        peer, _ = await connect(side, endpoint)
        handle, event = await import_(side, peer, length=64 * MIB)
        assert event.status == 0
        mine, _ = side.alloc(64 * MIB)
        event = await settled(side.engine.submit_one(OpKind.PUT, mine.id, handle, 0, 0, 64 * MIB))
        assert event.status == StatusCode.PEER_LOST

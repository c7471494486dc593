"""K19: old and new nodes understand each other, or say at once that they do not."""

from __future__ import annotations

import asyncio
import struct

import msgpack
import pytest

from kvxfer.wire import messages as m
from kvxfer.wire.codec import MESSAGES, Message, encode
from kvxfer.wire.framing import PREAMBLE, FrameDecoder
from kvxfer.wire.session import VERSIONS
from tests.adversity.attacker import connect, hello, parse
from tests.cases.facts import limit, within
from tests.nodes import node, worker
from tests.wire import golden

pytestmark = [pytest.mark.once, pytest.mark.timeout(60)]


async def talk(address: str, *said: bytes) -> list[Message]:
    """What a daemon answers before it closes, or falls silent."""
    reader, writer = await connect(parse(address))
    decoder, answers = FrameDecoder(), []
    try:
        for data in said:
            writer.write(data)
            while True:
                try:
                    received = await asyncio.wait_for(reader.read(1 << 16), limit(0.3))
                except TimeoutError:
                    break
                answers += list(decoder.feed(received))
                if not received or answers:
                    break
    finally:
        writer.transport.abort()
    return answers  # type: ignore[return-value]


@pytest.mark.parametrize("versions", [(VERSIONS[1] + 1, VERSIONS[1] + 2), (200, 255)])
async def test_c80_no_common_version_is_said_with_both(versions: tuple[int, int]) -> None:
    low, high = versions
    async with node() as server:
        with within(1, "the refusal"):
            [refusal] = await talk(
                server.addresses[0], PREAMBLE + encode(hello("peer", version_min=low, version_max=high))
            )
        assert isinstance(refusal, m.Refuse)
        assert refusal.code == "version_mismatch"
        text = f"{refusal.message} {refusal.fields}"
        assert str(low) in text
        assert f"{VERSIONS[0]} to {VERSIONS[1]}" in text
        assert "upgrade the acceptor" in str(refusal.fields["hint"])
        assert server.peers.half_open == 0


async def test_c80_a_newer_node_is_met_at_the_common_version() -> None:
    async with node() as server:
        [welcome] = await talk(server.addresses[0], PREAMBLE + encode(hello("peer", version_min=1, version_max=9)))
        assert isinstance(welcome, m.Welcome)
        assert welcome.version == VERSIONS[1]


def raw(number: int, fields: dict[str, object]) -> bytes:
    body = msgpack.packb([number, fields])
    return struct.pack(">I", len(body)) + body


async def test_c80_unknown_messages_and_fields() -> None:
    async with node() as server, worker(server) as asker:
        link = asker.link
        transport = link._transport
        assert transport is not None
        transport.write(raw(0xC0, {"rid": 0, "what": "a later release may say this"}))
        ping = MESSAGES[m.Echo.number]
        transport.write(raw(ping.number, {"rid": 1 << 20, "node": [], "data": b"x", "of_tomorrow": {"a": [1, 2]}}))
        assert (await asker.ask(m.Echo(data=b"still here"))).data == b"still here"
        transport.write(raw(0xC1, {"rid": 77}))  # a request that waits for an answer gets one
        assert (await asker.ask(m.Echo(data=b"still here"))).data == b"still here"
        assert not link.closed.done()
        assert link.late_replies >= 1, "the answer to what no release of ours has asked"


def test_c80_recorded_bytes_of_this_protocol() -> None:
    for name in golden.HANDSHAKES:
        assert golden.handshake(name) == golden.load(golden.HANDSHAKES_FILE)[name]
    recorded = {entry["number"]: name for name, entry in golden.load(golden.MESSAGES_FILE).items()}
    for number, declared in MESSAGES.items():
        assert recorded.get(number) == declared.__name__, "numbers of messages never change"

"""Strangers at the tcp data path: garbage, other protocols, damaged and cut frames, floods. No byte moves, nothing
leaks and whoever holds a key is still served.
"""

from __future__ import annotations

import asyncio
import os
import random

import numpy as np
import pytest

from tests.native import kvxd
from tests.native.conformance import KIB, MIB, within
from tests.native.kvxd import Refused, Type
from tests.native.tcp_owner import Owner, attached, eventually, greeted, owner

TLS_CLIENT_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(64))
STRANGERS = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": TLS_CLIENT_HELLO,
    "control plane": b"KVXC\r\n\x01\n",
    "zeros": bytes(200),
    "almost": b"KVXE" + bytes(60),
    "line": b"\n",
}
ROUNDS = 300
NEWCOMERS_MAX = 256  # KVX_NEWCOMERS_MAX


async def serves(one: Owner) -> bool:
    """Does the owner still serve somebody who holds the key?"""
    async with await attached(one) as speaker:
        data = os.urandom(64)
        speaker.send(one.frame(Type.PUT, (0, 64), payload=data), one.key)
        assert (await speaker.frame(one.key)).status == 0
        return bytes(one.inside[:64]) == data


@pytest.mark.parametrize("name", STRANGERS)
async def test_other_protocols_are_recognised_at_once(name: str) -> None:
    async with owner(handshake_ms=60000) as one:
        speaker = await kvxd.dial(one.endpoint)
        async with speaker:
            speaker.writer.write(STRANGERS[name])
            assert await speaker.closed() == b""
        await eventually(lambda: one.count("protocol_errors") == 1)
        assert await serves(one)


async def test_another_version_is_told_ours() -> None:
    async with owner() as one, await kvxd.dial(one.endpoint) as speaker:
        speaker.writer.write(kvxd.hello(kvxd.DIALLER, bytes(16), version=9))
        answer = kvxd.HELLO.unpack(await speaker.exactly(kvxd.HELLO_BYTES))
        assert answer[1] == kvxd.VERSION
        assert answer[6] == 204
        assert await speaker.closed() == b""


async def test_random_bytes() -> None:
    rng = random.Random(5)
    async with owner() as one:
        before = one.bytes.copy()
        for _ in range(ROUNDS):
            speaker = await kvxd.dial(one.endpoint)
            async with speaker:
                greet = rng.random() < 0.5
                if greet:
                    await speaker.greet()
                speaker.writer.write((b"KVXD\x01" if rng.random() < 0.5 else b"") + rng.randbytes(rng.randint(1, 400)))
        assert np.array_equal(one.bytes, before)
        await eventually(lambda: one.count("peers_accepted") == 0)
        assert await serves(one)


async def test_a_frame_cut_at_every_length() -> None:
    async with owner() as one:
        whole = kvxd.HEADER_BYTES + 2 * 16 + 40 + kvxd.TRAILER_BYTES
        for cut in range(whole):
            one.inside[:] = 0
            async with await greeted(one) as speaker:
                frame = one.frame(Type.PUT, (100, 10), (200, 30), payload=b"\xff" * 40, flags=kvxd.F_NOTIFY)
                data = speaker.encode(frame, one.key)
                assert len(data) == whole
                speaker.writer.write(data[:cut])
                speaker.end()
                assert await speaker.closed() == b"", "no answer to half a frame"
            assert not one.inside[:100].any()
            assert not one.inside[110:200].any()
            assert not one.inside[230:].any()
        assert not [event for event in one.events if event.kind == 7], "half a frame notifies nobody"
        await eventually(lambda: one.engine.attached(one.grant.id) == 0)


async def test_every_bit_of_a_head_matters() -> None:
    async with owner() as one:
        before = one.bytes.copy()
        head_bytes = kvxd.HEADER_BYTES + 2 * 16
        for bit in range(head_bytes * 8):
            if bit // 8 not in range(0, head_bytes, 3) and bit % 8 != bit // 8 % 8:
                continue  # all bits of every third byte, one bit of the others
            async with await greeted(one) as speaker:
                frame = one.frame(Type.PUT, (100, 10), (200, 30), payload=b"\xff" * 40)
                data = bytearray(speaker.encode(frame, one.key))
                data[bit // 8] ^= 1 << bit % 8
                speaker.writer.write(bytes(data))
                speaker.end()
                try:
                    answer = await speaker.frame(one.key)
                except Refused:
                    continue
                assert answer.status != 0
        assert np.array_equal(one.bytes, before)


@pytest.mark.parametrize(
    "changes",
    [
        {"length": 0},
        {"length": 1 << 40},
        {"length": 2**64 - 1},
        {"length": 39},
        {"length": 41},
        {"segments": ((0, 0), (0, 40))},
        {"segments": ((0, 2**64 - 1), (0, 41))},
        {"segments": ()},
        {"segments": ((0, 1),) * 1025, "length": 1025},
        {"type": 0},
        {"type": 99},
        {"type": Type.HELLO},
        {"type": Type.ACK},
        {"type": Type.DATA},
        {"flags": 0x80},
        {"flags": kvxd.F_BARE},
        {"status": 3},
    ],
)
async def test_frames_that_cannot_be(changes: dict[str, object]) -> None:
    async with owner() as one, await attached(one) as speaker:
        before = one.bytes.copy()
        values = {"segments": ((0, 40),), "payload": bytes(40)} | changes
        frame = one.frame(Type.PUT, (0, 40))
        made = kvxd.Frame(**({name: getattr(frame, name) for name in frame.__slots__ if name != "proved"} | values))
        speaker.send(made, one.key)
        assert await speaker.closed() == b""
        assert np.array_equal(one.bytes, before)
        assert one.count("protocol_errors") == 1


async def test_a_payload_larger_than_announced_is_refused() -> None:
    async with owner(frame_bytes=64 * KIB, length=256 * KIB) as one, await attached(one) as speaker:
        speaker.send(one.frame(Type.PUT, (0, 64 * KIB + 1), payload=bytes(64 * KIB + 1)), one.key)
        assert await speaker.closed() == b""


@pytest.mark.parametrize("said", [b"", b"KVXD", "hello"])
async def test_who_proves_nothing_has_to_leave(said: bytes | str) -> None:
    async with owner(handshake_ms=150) as one, await kvxd.dial(one.endpoint) as speaker:
        if isinstance(said, bytes):
            speaker.writer.write(said)
        else:
            await speaker.greet()
        started = asyncio.get_running_loop().time()
        await speaker.closed()
        assert asyncio.get_running_loop().time() - started > 0.1
        async with await attached(one) as proved:
            await asyncio.sleep(0.3)
            proved.send(one.frame(Type.NOTIFY), one.key)
            assert (await proved.frame(one.key)).status == 0, "who proved a key may stay"


async def test_strangers_do_not_lock_out_the_others() -> None:
    """More connections than may be unproved, silent or greeted: the oldest of them make room for who holds a key."""
    async with owner(handshake_ms=60000) as one:
        idle = [await kvxd.dial(one.endpoint) for _ in range(NEWCOMERS_MAX + 100)]
        for speaker in idle[-50:]:
            await speaker.greet()
        assert await within(serves(one))
        await eventually(lambda: one.count("refused") >= 101)
        assert await idle[0].closed() == b""
        assert await serves(one), "and again, with the places taken"
        for speaker in idle:
            speaker.writer.close()


async def test_a_crowd_displaces_its_own_not_those_of_another_address() -> None:
    """Whoever comes from elsewhere keeps its place, however many come after it."""
    async with owner(handshake_ms=60000) as one:
        host, port = one.endpoint.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port), local_addr=("127.0.0.9", 0))
        elsewhere = kvxd.Speaker(reader, writer, kvxd.DIALLER)
        crowd = [await kvxd.dial(one.endpoint) for _ in range(NEWCOMERS_MAX + 100)]
        await eventually(lambda: one.count("refused") >= 101)
        async with elsewhere:
            assert await elsewhere.greet() == 0
            elsewhere.send(one.frame(Type.ATTACH), one.key)
            assert (await elsewhere.frame(one.key)).status == 0
        for speaker in crowd:
            speaker.writer.close()


async def test_a_full_owner_says_so() -> None:
    async with owner(accepted_max=2) as one:
        async with await attached(one), await attached(one):
            third = await kvxd.dial(one.endpoint)
            async with third:
                assert await third.greet() == 206
                assert await third.closed() == b""
            assert one.count("peers_accepted") == 2
        await eventually(lambda: one.count("peers_accepted") == 0)
        assert await serves(one)


async def test_requests_without_end_are_held_back() -> None:
    """A dialler that asks and never reads: the owner stops reading it too, and serves others."""
    async with owner(length=MIB) as one, await attached(one) as speaker:
        for index in range(200):
            speaker.send(one.frame(Type.GET, (0, MIB), op=index), one.key)
        await speaker.writer.drain()
        speaker.writer.write(bytes(8 * MIB))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(speaker.writer.drain(), 0.3)
        assert one.count("served_get_bytes") < 64 * MIB
        assert one.count("protocol_errors") == 0, "it has not come to what follows the requests"
        assert await serves(one)

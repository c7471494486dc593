"""K09: whoever reaches a port gets nothing but refusals, and costs next to nothing."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
import pickle
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random
from statistics import median

import pytest

import kvxfer
from kvxfer.native.status import StatusCode
from kvxfer.wire import messages as m
from kvxfer.wire.codec import encode
from kvxfer.wire.framing import PREAMBLE
from tests import source_rules
from tests.adversity.attacker import Target, connect, hello, intrude, shout, target
from tests.cases.facts import limit
from tests.cases.harness import ROOT
from tests.cases.scale import FULL
from tests.native.conformance import MIB, READ, WRITE
from tests.native.kvxd import F_BARE, Frame, Refused, Speaker, Type
from tests.native.tcp_owner import KEY, LENGTH, attached, greeted, owner
from tests.native.tcp_servers import lying_owner

pytestmark = [pytest.mark.once, pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(120)]


@pytest.mark.parametrize("kind", [Type.PUT, Type.GET])
async def test_c46_a_raw_client_reaches_nothing_but_its_grant(kind: Type) -> None:
    """Registered memory has a canary of 1 MiB on both sides of what was granted; an address is never a pointer."""
    places = {
        "one byte before": (2**64 - 1, 1),
        "one byte behind": (LENGTH, 1),
        "across the end": (LENGTH - 1, 2),
        "an address of this process": (id(object()), 64),
        "everything": (0, 2**64 - 1),
    }
    for name, (offset, length) in places.items():
        async with owner() as one, await attached(one) as speaker:
            before = one.bytes.copy()
            payload = b"\xee" * min(length, 64) if kind == Type.PUT else b""
            with contextlib.suppress(Refused):
                speaker.send(one.frame(kind, (offset, length), payload=payload), one.key)
                answer = await speaker.frame(one.key)
                assert answer.type == Type.ACK, name
                assert answer.status != 0, name
                assert answer.payload == b"", "not one byte of the canary"
            assert (one.bytes == before).all(), name
            assert one.count("refused") + one.count("protocol_errors") == 1, name


async def test_c46_memory_that_was_never_granted_and_rights_that_were_not_given() -> None:
    async with owner() as one, await greeted(one) as speaker:
        speaker.send(one.frame(Type.ATTACH, grant=one.grant.id + 7), one.key)
        with contextlib.suppress(Refused):
            assert (await speaker.frame(one.key)).status != 0
    for access, kind in ((READ, Type.PUT), (WRITE, Type.GET)):
        async with owner(access=access) as one, await attached(one) as speaker:
            before = one.bytes.copy()
            speaker.send(one.frame(kind, (0, 8), payload=b"\xee" * 8 if kind == Type.PUT else b""), one.key)
            answer = await speaker.frame(one.key)
            assert (answer.type, answer.status, answer.payload) == (Type.ACK, StatusCode.ACCESS, b"")
            assert (one.bytes == before).all()
            assert one.count("refused") == 1
            assert len(before) == LENGTH + 2 * MIB


class Marker:
    """Unpickling it would leave a trace."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
async def victim(tmp_path: Path) -> AsyncIterator[Target]:
    async with target(tmp_path, "tcp") as made:
        yield made


async def test_c47_pickles_at_every_port(victim: Target, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    async with victim.unmoved():
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            data = pickle.dumps(Marker(marker), protocol)
            for lead in (b"", PREAMBLE, PREAMBLE + len(data).to_bytes(4, "big"), len(data).to_bytes(8, "little")):
                await asyncio.gather(*(shout(address, lead + data, 0.01) for address in victim.listeners.values()))
        for role, address in (("worker", victim.socket), ("peer", victim.control)):
            intruder = await intrude(address, role)
            data = pickle.dumps(Marker(marker))
            intruder.writer.write(len(data).to_bytes(4, "big") + data)
            with contextlib.suppress(TimeoutError, ConnectionError):
                await asyncio.wait_for(intruder.read(), limit(1))
            assert intruder.answers["protocol"] == 1, "typed, then closed"
            intruder.hang_up()
    assert "marker" not in os.listdir(tmp_path)


def sources() -> list[tuple[Path, ast.AST]]:
    return [(path, ast.parse(path.read_text())) for path in sorted(Path(ROOT, "kvxfer").rglob("*.py"))]


async def test_c47_no_module_can_execute_what_it_receives() -> None:
    for path, tree in sources():
        wrong = [line for line in source_rules.banned_calls(str(path), tree, task_owner=True) if "banned" in line]
        assert wrong == []
        for node in ast.walk(tree):
            # the one extension of msgpack that could make objects by itself is off: nobody passes an ext_hook
            assert not (isinstance(node, ast.keyword) and node.arg == "ext_hook"), path


async def test_c48_a_scanner_at_every_port(victim: Target) -> None:
    rng = Random(48)
    usual = []
    for _ in range(10):
        began = time.perf_counter()
        await victim.transfer()
        usual.append(time.perf_counter() - began)
    addresses = list(victim.listeners.values())
    assert len(addresses) == 4
    opening = PREAMBLE + encode(hello("peer"))
    frames = [opening, opening + encode(m.Proof(proof=b"")), opening + encode(m.Ping(rid=1))]
    slow: list[asyncio.StreamWriter] = []

    async def drip(number: int, stop: asyncio.Event) -> None:
        with contextlib.suppress(OSError):
            _, writer = await connect(addresses[number % 4])
            slow.append(writer)
            while not stop.is_set():
                writer.write(b"K")
                await asyncio.sleep(1)

    stop, during = asyncio.Event(), []
    async with victim.unmoved():
        dripping = [asyncio.ensure_future(drip(number, stop)) for number in range(200)]
        for data in (
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            bytes.fromhex("16030100c8010000c40303") + rng.randbytes(200),
        ):
            await asyncio.gather(*(shout(address, data) for address in addresses))
        for byte in range(0, 256, 1 if FULL else 16):
            await asyncio.gather(*(shout(address, bytes([byte]), 0.002) for address in addresses))
        await asyncio.gather(*(shout(address, rng.randbytes(10 << 20)) for address in addresses))
        for frame in frames:
            for end in range(0, len(frame), 1 if FULL else 8):
                flipped = bytearray(frame)
                flipped[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
                await asyncio.gather(
                    *(shout(address, data, 0.002) for address in addresses for data in (frame[:end], bytes(flipped)))
                )
            began = time.perf_counter()
            await victim.transfer()
            during.append(time.perf_counter() - began)
        stop.set()
        for writer in slow:
            writer.transport.abort()
        await asyncio.gather(*dripping)
    # one waits for the one that `unmoved` runs at the same time
    assert median(during) < 2 * 3 * median(usual) + limit(0.1), (usual, during)


WORKER = """
import asyncio, json, sys
import kvxfer
from kvxfer.descriptors import RemoteDescriptor

async def main() -> None:
    theirs = RemoteDescriptor.from_dict(json.loads(sys.stdin.readline()))
    async with kvxfer.local(transports=("tcp",)) as client:
        mine = await client.alloc(theirs.length)
        for way in (client.put, client.get):
            try:
                await way(mine[0 : theirs.length], theirs)
            except kvxfer.KvxferError as error:
                print(type(error).__name__, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("bare", [False, True], ids=["with the key", "by anybody in the path"])
async def test_c110_an_answer_never_ends_the_worker_that_asked(bare: bool) -> None:
    """An owner refuses a segment that the transfer does not have, or somebody who changes packets says so for it."""

    async def act(speaker: Speaker, asked: Frame) -> None:
        flags = F_BARE if bare else 0
        lie = Frame(type=Type.ACK, op=asked.op, index=asked.index, status=StatusCode.RANGE, segment=5, flags=flags)
        speaker.send(lie, bytes(16) if bare else KEY)

    async with kvxfer.local(transports=("tcp",)) as honest, lying_owner(act) as endpoint:
        region = await honest.alloc(MIB)
        told = region.descriptor("rw").to_dict() | {"endpoints": {"tcp": [endpoint]}, "key": KEY.hex()}
        async with asyncio.timeout(limit(30)):
            worker = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", WORKER),
                cwd=ROOT,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            said, errors = await worker.communicate(json.dumps(told).encode() + b"\n")
        assert worker.returncode == 0, errors.decode()[-500:]
        assert said.split() == [b"PeerLost", b"PeerLost"]

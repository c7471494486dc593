"""What a daemon spends on those who have proved nothing: bounded memory and places, whatever they send and however many
they are, with and without TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from examples.child_processes import daemon
from kvxfer.config import FRAME_UNAUTHENTICATED_BYTES_MAX, Config
from kvxfer.net.credentials import Credentials
from kvxfer.net.link import Link, LocalIdentity
from kvxfer.net.tls import HANDSHAKE_BYTES_MAX
from kvxfer.wire.codec import encode
from kvxfer.wire.framing import PREAMBLE
from tests.adversity.attacker import Address, connect, hello, parse
from tests.certificates import Authority
from tests.conftest import slack

pytestmark = pytest.mark.once

CONNECTIONS = 500
GROWTH_BYTES_MAX = 16 << 20
HALF_OPEN_MAX = 64  # the default of handshakes_max
A, B = "0a" * 16, "0b" * 16

FRAME = struct.pack(">I", FRAME_UNAUTHENTICATED_BYTES_MAX) + bytes(FRAME_UNAUTHENTICATED_BYTES_MAX - 1)
RECORD = b"\x16\x03\x01\x40\x00"  # a piece of a handshake, 16 KiB
CLIENT_HELLO = b"\x01\x00\xff\xf0"  # that says that it is nearly as long as may be
PIECES = HANDSHAKE_BYTES_MAX // (len(RECORD) + (16 << 10))
LONG_HELLO = (RECORD + CLIENT_HELLO + bytes((16 << 10) - 4)) + (RECORD + bytes(16 << 10)) * (PIECES - 1)

PLAIN = {
    "a frame that never ends": PREAMBLE + FRAME,
    "a greeting and a frame that never ends": PREAMBLE + encode(hello("peer")) + FRAME,
    "nothing": b"",
    "one byte": PREAMBLE[:1],
    "megabytes": PREAMBLE + os.urandom(4 << 20),
}
SECURE = {
    "a client hello that never ends": LONG_HELLO,
    "one byte": b"\x16",
    "records of nothing": b"\x16\x03\x01\x00\x00" * 10000,
    "megabytes": b"\x16\x03\x01" + os.urandom(4 << 20),
}


@dataclass(slots=True)
class Victim:
    """A daemon alone, and how much memory it has had at most since it was looked at first."""

    process: psutil.Process
    control: Address
    http: Address
    files: dict[str, str]
    most: int = 0

    def look(self) -> int:
        self.most = max(self.most, self.process.memory_info().rss)
        return self.most

    async def honest(self) -> None:
        """A node with everything that it takes gets in."""
        known = Credentials(Config.embedded(**self.files))
        host, port = self.control
        facts = LocalIdentity(
            role="peer", node_id=B if self.files else os.urandom(16).hex(), incarnation=os.urandom(16).hex()
        )
        link = await Link.dial([f"{host}:{port}"], facts, Config.embedded(), credentials=known, timeout=5 * slack())
        await link.aclose("done")

    async def half_open(self) -> float:
        reader, writer = await connect(self.http)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        page = (await reader.read()).decode()
        writer.close()
        return float(re.findall(r'kvxfer_links\{kind="half_open"\} (\S+)', page)[0])


@asynccontextmanager
async def victim(directory: Path, secure: bool) -> AsyncIterator[Victim]:
    authority = Authority(directory / "ca")
    files = (authority.issue("a", A).options(), authority.issue("b", B).options()) if secure else ({}, {})
    options = {"http": "127.0.0.1:0", "transports": "tcp", "landing_bytes_max": 0, **files[0]}
    async with daemon(directory / "victim", **options) as running:
        line = await running.process.readline(10 * slack())
        control, http = re.findall(r"peers (\S+),.*http://([^/]+)/", line)[0]
        yield Victim(psutil.Process(running.process.pid), parse(control), parse(http), files[1])


async def hold(address: Address, data: bytes, held: list[asyncio.StreamWriter]) -> None:
    """Send all that is taken, and stay."""
    with contextlib.suppress(OSError, TimeoutError):
        _, writer = await connect(address)
        held.append(writer)
        for at in range(0, len(data), 64 << 10):
            writer.write(data[at : at + (64 << 10)])
            await asyncio.wait_for(writer.drain(), 2)


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "TLS"])
async def test_strangers_cost_little_memory_and_few_places(secure: bool, tmp_path: Path) -> None:
    async with victim(tmp_path, secure) as target:
        for _ in range(20):
            await target.honest()
        before, most_open = target.look(), 0.0
        grown: dict[str, int] = {}
        for name, data in [*(SECURE if secure else PLAIN).items()] * 2:  # what leaves nothing can come again
            held: list[asyncio.StreamWriter] = []
            many = CONNECTIONS if 1000 < len(data) < 1 << 20 else CONNECTIONS // 5
            coming = [asyncio.ensure_future(hold(target.control, data, held)) for _ in range(many)]
            while not all(item.done() for item in coming):
                target.look()
                await asyncio.sleep(0.01)
            most_open = max(most_open, await target.half_open())
            await target.honest()  # in spite of them all
            grown[name] = target.look() - before
            for writer in held:
                writer.transport.abort()
        assert most_open <= HALF_OPEN_MAX
        assert max(grown.values()) < GROWTH_BYTES_MAX, grown


async def test_other_ports_are_no_way_around(tmp_path: Path) -> None:
    async with victim(tmp_path, secure=True) as target:
        ports = {item.laddr.port for item in target.process.net_connections("tcp") if item.status == psutil.CONN_LISTEN}
        assert len(ports) == 3  # control, metrics, data
        before = target.look()
        for port in ports - {target.control[1]}:
            held: list[asyncio.StreamWriter] = []
            for data in (b"GET /" + b"x" * 9000, b"KVXD\x01\x01\x01" + bytes(9000), b"KVXD"):
                await asyncio.gather(*(hold(("127.0.0.1", port), data, held) for _ in range(CONNECTIONS // 3)))
                target.look()
            for writer in held:
                writer.transport.abort()
        assert target.look() - before < GROWTH_BYTES_MAX
        await target.honest()

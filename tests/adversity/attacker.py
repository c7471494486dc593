"""What an attacker has: raw sockets, the wire format, and patience; and the honest pair that must not notice."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import kvxfer
from examples.child_processes import Daemon, daemon
from kvxfer.config import Config, load
from kvxfer.errors import RegionBusy
from kvxfer.geometry import BlockTable
from kvxfer.memory.region import KVCache
from kvxfer.net.credentials import Credentials
from kvxfer.wire import messages as m
from kvxfer.wire.auth import prove, transcript
from kvxfer.wire.codec import Message, encode
from kvxfer.wire.framing import PREAMBLE, FrameDecoder
from tests.conftest import slack
from tests.support.nodes import make_cache, scattered, small_geometry, tokens_of

LOG_LINES_PER_S = 10
RSS_BYTES_MAX = 48 << 20
GEOMETRY = small_geometry()
Address = tuple[str, int] | str  # a TCP address, or the path of a Unix socket


async def connect(
    address: Address, local_addr: tuple[str, int] | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if isinstance(address, str):
        return await asyncio.open_unix_connection(address)
    return await asyncio.open_connection(*address, local_addr=local_addr)


async def shout(address: Address, data: bytes, within_s: float = 0.05) -> None:
    """Send bytes, read what comes back for a moment, and hang up without a word."""
    with contextlib.suppress(OSError):
        reader, writer = await connect(address)
        with contextlib.suppress(OSError, TimeoutError):
            writer.write(data)
            await asyncio.wait_for(writer.drain(), 2)
            await asyncio.wait_for(reader.read(), within_s)
        writer.transport.abort()


def hello(role: str, **changes: Any) -> m.Hello:
    facts: dict[str, Any] = {
        "version_min": 1,
        "version_max": 1,
        "features": (),
        "role": role,
        "node_id": os.urandom(16).hex() if role == "peer" else "",
        "incarnation": os.urandom(16).hex(),
        "nonce": os.urandom(32),
        "name": "evil\n",
        "pid": (1 << 32) - 1,
    }
    return m.Hello(**(facts | changes))


@dataclass(slots=True)
class Intruder:
    """A connection that has proved itself: what a hostile node has that holds the secret."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    decoder: FrameDecoder
    answers: Counter[str] = field(default_factory=Counter)

    async def read(self) -> None:
        while data := await self.reader.read(1 << 18):
            for message in self.decoder.feed(data):
                self.answers[getattr(message, "code", "") or type(message).__name__] += 1

    async def flood(self, make: Callable[[int], Message], count: int, within_s: float = 30.0) -> None:
        """Send so many messages as fast as they are taken, and wait for the answer to a last one."""
        async with asyncio.timeout(within_s * slack()):
            reading = asyncio.ensure_future(self.read())
            for first in range(1, count, 200):
                self.writer.write(b"".join(encode(make(number)) for number in range(first, first + 200)))
                await self.writer.drain()
            self.writer.write(encode(m.Echo(rid=1 << 40, data=b"")))
            while not self.answers["EchoReply"]:
                assert not reading.done(), (self.answers, reading)
                await asyncio.sleep(0.01)
            reading.cancel()

    def hang_up(self) -> None:
        self.writer.transport.abort()


def proof(greeting: m.Hello, welcome: m.Welcome) -> m.Proof:
    """That of the user's secret, where one is asked for."""
    if welcome.auth == "none":
        return m.Proof(proof=b"")
    secret = Credentials(Config(), unconfigured="look").secret
    return m.Proof(proof=prove(secret, "dialler", transcript(greeting, welcome)))


async def _answer(reader: asyncio.StreamReader, decoder: FrameDecoder) -> Message | m.Unknown:
    while data := await reader.read(65536):
        if found := list(decoder.feed(data)):
            return found[0]
    raise ConnectionError("refused")


async def greet(
    address: Address, role: str, local_addr: tuple[str, int] | None = None, **changes: Any
) -> tuple[Intruder, m.Proof]:
    """A handshake that stops before its last message, and this message."""
    reader, writer = await connect(address, local_addr)
    made = Intruder(reader, writer, FrameDecoder())
    greeting = hello(role, **changes)
    writer.write(PREAMBLE + encode(greeting))
    welcome = await _answer(reader, made.decoder)
    if not isinstance(welcome, m.Welcome):
        raise ConnectionError(f"refused: {welcome}")
    return made, proof(greeting, welcome)


async def intrude(address: Address, role: str, **changes: Any) -> Intruder:
    made, rest = await greet(address, role, **changes)
    made.writer.write(encode(rest))
    await _answer(made.reader, made.decoder)
    made.decoder.frame_bytes_max = 4 << 20
    return made


class Target:
    """A daemon under attack, with a second one and a client of each that go on working."""

    def __init__(self, victim: Daemon, control: str, http: str, clients: tuple[kvxfer.Client, kvxfer.Client]) -> None:
        self.victim = victim
        self.process = psutil.Process(victim.process.pid)
        self.control = parse(control)
        self.http = parse(http)
        self.socket = str(victim.socket)
        self.clients = clients
        self.caches: list[tuple[KVCache, BlockTable]] = []
        self.transfers = 0
        self._one = asyncio.Lock()

    @property
    def listeners(self) -> dict[str, Address]:
        """Every TCP port of the process, and its Unix socket."""
        found = [item.laddr for item in self.process.net_connections("tcp") if item.status == psutil.CONN_LISTEN]
        return {"unix": self.socket, **{f"port {port}": (ip, port) for ip, port in found}}

    async def transfer(self) -> None:
        """One honest push; exact. One at a time, and after the blocks of a cancelled one are free."""
        async with self._one, asyncio.timeout(20 * slack()):
            while True:
                try:
                    return await self._transfer()
                except RegionBusy:
                    await asyncio.sleep(0.01)

    async def _transfer(self) -> None:
        self.transfers += 1
        request = f"honest-{self.transfers}"
        (source, from_table), (target, to_table) = self.caches
        array = source.regions[0].array
        array[:] = np.random.default_rng(self.transfers).integers(0, 256, len(array), dtype=np.uint8)
        pusher, receiver = self.clients
        timeout = 10 * slack()

        async def receive() -> None:
            async with receiver.offer(request, target, to_table, timeout=timeout) as landing:
                await landing.wait()

        async def push() -> None:
            to = list(receiver.addresses)
            async with pusher.push(request, to=to, cache=source, table=from_table, timeout=timeout) as sending:
                await sending.layers()

        await asyncio.gather(receive(), push())
        for layer in range(GEOMETRY.layers):
            sent, arrived = tokens_of(source, from_table, layer), tokens_of(target, to_table, layer)
            assert sent.tobytes() == arrived.tobytes()

    @asynccontextmanager
    async def unmoved(self) -> AsyncIterator[None]:
        """Whatever happens inside: same process, bounded memory and log, and honest transfers during and after it."""
        await self.transfer()
        descriptors, memory = self.process.num_fds(), self.process.memory_info().rss
        lines, started = len(self.victim.process.stderr), time.monotonic()
        stop = asyncio.Event()
        going_on = asyncio.ensure_future(self._transfers(stop))
        try:
            yield
        finally:
            stop.set()
            await going_on
        took_s = time.monotonic() - started
        await self.transfer()
        assert self.victim.process.returncode is None
        assert self.process.memory_info().rss - memory < RSS_BYTES_MAX
        logged = list(self.victim.process.stderr)[lines:]
        assert len(logged) <= LOG_LINES_PER_S * (took_s + 1), logged[-20:]
        assert not any("Traceback" in line or "Fatal" in line for line in logged), logged
        async with asyncio.timeout(10 * slack()):
            while self.process.num_fds() > descriptors + 2:
                await asyncio.sleep(0.05)

    async def _transfers(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self.transfer()
            await asyncio.sleep(0.02)


def parse(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


@asynccontextmanager
async def target(directory: Path, transport: str = "shm", **options: object) -> AsyncIterator[Target]:
    async with AsyncExitStack() as stack:
        found = []
        for side in "ab":
            running = await stack.enter_async_context(
                daemon(directory / side, name=f"daemon-{side}", http="127.0.0.1:0", drain_s=0.2, **options)
            )
            found.append((running, await running.process.readline(10 * slack())))
        config = load(flags={"transports": [transport], "tcp_threads": 1, "copy_threads": 1}).config
        clients = [
            await stack.enter_async_context(kvxfer.Client(str(running.socket), config=config)) for running, _ in found
        ]
        control, http = re.findall(r"peers (\S+),.*http://([^/]+)/", found[0][1])[0]
        made = Target(found[0][0], control, http, (clients[1], clients[0]))
        for seed, client in enumerate(made.clients):
            made.caches.append((await make_cache(client, GEOMETRY, 16), scattered(seed, 16, 100, 16)))
        yield made

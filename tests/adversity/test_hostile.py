"""A daemon among scanners, liars and floods: it keeps its process, its memory and its manners, and honest transfers go
on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random

import pytest

import kvxfer
from examples.child_processes import daemon
from kvxfer.errors import KvxferError
from kvxfer.net.credentials import Credentials
from kvxfer.net.link import Link, LocalIdentity
from kvxfer.wire import messages as m
from kvxfer.wire.codec import Message, encode
from kvxfer.wire.framing import PREAMBLE
from tests.adversity.attacker import Target, connect, hello, intrude, shout, target
from tests.conftest import slack

pytestmark = pytest.mark.once  # the processes under test choose their own loop
SOMEBODYS = "a" * 32


@pytest.fixture
async def victim(tmp_path: Path) -> AsyncIterator[Target]:
    async with target(tmp_path, postings_max=1000, waiting_max=500, mailboxes_max=500) as made:
        yield made


class Marker:
    """Unpickling it would leave a trace."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
        return os.mkdir, (str(self.path),)


def payloads(marker: Path) -> list[bytes]:
    big = (1 << 32) - 1
    return [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes.fromhex("16030100c8010000c40303") + os.urandom(200),
        b"SSH-2.0-scanner\r\n",
        *(pickle.dumps(Marker(marker), protocol) for protocol in range(5)),
        PREAMBLE + pickle.dumps(Marker(marker)),
        b"K",
        bytes(4096),
        b"\xff" * 4096,
        PREAMBLE + big.to_bytes(4, "big"),
        *(
            PREAMBLE + (1000).to_bytes(4, "big") + b"\x92\x01" + head + big.to_bytes(4, "big") + bytes(993)
            for head in (b"\xdf", b"\xdd", b"\xdb", b"\xc6")  # map, array, text and bytes of four gigabytes
        ),
        PREAMBLE + (16000).to_bytes(4, "big") + b"\x92\x01\x81\xa1x" + b"\x91" * 15995,
        os.urandom(10 << 20),
    ]


async def test_strangers_at_every_listener(victim: Target, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    engines = await asyncio.to_thread(lambda: list(victim.victim.socket.parent.glob("e-*.sock")))
    async with victim.unmoved():
        assert len(victim.listeners) == 4  # control, data, HTTP, and the Unix socket
        for data in payloads(marker):
            await asyncio.gather(*(shout(address, data) for address in victim.listeners.values()))
        for path in engines:
            for data in payloads(marker)[:-1]:
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
                    raw.setblocking(False)
                    raw.connect(str(path))
                    with contextlib.suppress(OSError):
                        raw.send(data)
                await asyncio.sleep(0)
    assert not marker.exists()


async def test_valid_frames_cut_and_flipped(victim: Target) -> None:
    rng = Random("flip")
    opening = PREAMBLE + encode(hello("peer"))
    frames = [
        encode(message)
        for message in (
            m.Claim(rid=1, kind="offer", key="k"),
            m.Mail(rid=2, channel="c", data=b"x" * 50),
            m.Settle(rid=3, posting=SOMEBODYS, claim=1, outcome="done"),
            m.PostingEvent(posting=SOMEBODYS, claim=1, what="lost"),
            m.Claimed(
                rid=5, posting=SOMEBODYS, claim=1, expires_in_s=1.0, node_id=SOMEBODYS, incarnation=SOMEBODYS, body=b""
            ),
            m.Error(rid=6, code="made_up", message="x"),
        )
    ]
    async with victim.unmoved():
        for end in range(len(opening)):
            await shout(victim.control, opening[:end], 0.001)
        for number in range(200):
            flipped = bytearray(opening)
            flipped[rng.randrange(len(opening))] ^= 1 << rng.randrange(8)
            await shout(victim.control, bytes(flipped), 0.005)
            frame = bytearray(frames[number % len(frames)])
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
            intruder = await intrude(victim.control, "peer")
            intruder.writer.write(frame[: rng.choice((len(frame), rng.randrange(len(frame))))])
            with contextlib.suppress(TimeoutError, ConnectionError):
                await asyncio.wait_for(intruder.reader.read(), 0.005)
            intruder.hang_up()


async def test_slow_and_idle_connections_keep_nobody_out(victim: Target) -> None:
    held: list[asyncio.StreamWriter] = []
    addresses = list(victim.listeners.values())  # asked once: the kernel lists every socket of the machine

    async def drip(number: int) -> None:
        address = addresses[number % 4]
        with contextlib.suppress(OSError):
            _, writer = await connect(address)
            held.append(writer)
            for byte in PREAMBLE + bytes(4):
                writer.write(bytes([byte]))
                await asyncio.sleep(0.1)

    async with victim.unmoved():
        dripping = [asyncio.ensure_future(drip(number)) for number in range(300)]
        await asyncio.sleep(0.3)  # all of them are there
        for _ in range(20):
            host, port = victim.control
            facts = LocalIdentity(role="peer", node_id=os.urandom(16).hex())
            config = victim.clients[0].config
            link = await Link.dial([f"{host}:{port}"], facts, config, credentials=Credentials(config))
            await link.aclose("done")
            reader, writer = await connect(victim.http)
            writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert (await reader.read()).endswith(b"ok\n")
            writer.close()
            await asyncio.sleep(0.05)
        await asyncio.gather(*dripping)
        for writer in held:
            writer.transport.abort()


FLOODS: dict[str, tuple[str, Callable[[int], Message], set[str]]] = {
    "posts": (
        "worker",
        lambda n: m.Post(rid=n, kind="offer", key=f"k{n}", lease_s=30.0),
        {"Posted", "too_many_pending"},
    ),
    "claims": ("worker", lambda n: m.Claim(rid=n, kind="offer", key=f"k{n}", wait_s=30.0), {"too_many_pending"}),
    "mail": ("worker", lambda n: m.Mail(rid=n, channel=f"c{n}", data=b"x"), {"Done", "too_many_pending"}),
    "listeners": ("worker", lambda n: m.Listen(rid=n, channel=f"l{n}"), {"Done", "too_many_pending"}),
    "settlements elsewhere": (
        "worker",
        lambda n: m.Settle(rid=n, node=("127.0.0.1:1",), posting=SOMEBODYS, claim=1, outcome="done"),
        {"peer_unreachable"},
    ),
    "claims of a peer": ("peer", lambda n: m.Claim(rid=n, kind="offer", key=f"k{n}", wait_s=9.0), {"too_many_pending"}),
    "forged settlements": (
        "peer",
        lambda n: m.Settle(rid=n, posting=f"{n:032x}", claim=1, outcome="done"),
        {"unknown_transfer"},
    ),
    "forged events": ("peer", lambda n: m.PostingEvent(posting=f"{n:032x}", claim=1, what="lost"), set()),
    "pings": ("peer", lambda n: m.Ping(rid=n), {"Pong"}),
}


async def test_floods_are_bounded_and_leave_room_for_others(victim: Target) -> None:
    for name, (role, make, expected) in FLOODS.items():
        async with victim.unmoved():
            intruder = await intrude(victim.socket if role == "worker" else victim.control, role)
            await intruder.flood(make, 4000)
            await victim.transfer()  # while everything that was taken is still held
            intruder.hang_up()
        missing = expected - {answer for answer, count in intruder.answers.items() if count}
        assert not missing, (name, intruder.answers)


async def test_worker_that_lies_about_its_counters(victim: Target) -> None:
    directory = victim.victim.socket.parent
    os.mkfifo(directory / "c-0.counters")
    os.symlink("/etc/passwd", directory / "c-1.counters")
    os.mkdir(directory / "c-2.counters")
    os.truncate(os.open(directory / "c-3.counters", os.O_CREAT | os.O_RDWR), 1 << 40)
    names = [
        "c-0.counters",
        "c-1.counters",
        "c-2.counters",
        "c-3.counters",
        "c-\0",
        "kvxferd.sock",
        "../b/kvxferd.sock",
    ]
    async with victim.unmoved():
        liars = [
            await intrude(victim.socket, "worker", counters_path=path)
            for path in (*(str(directory / name) for name in names), "/etc/passwd", "/dev/zero", "\0")
        ]
        for _ in range(3):
            reader, writer = await connect(victim.http)
            writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
            async with asyncio.timeout(2 * slack()):
                body = await reader.read()
            writer.close()
            assert b"200 OK" in body
            assert b"root:" not in body
        for liar in liars:
            liar.hang_up()


async def test_frozen_peer_costs_its_own_requests_only(victim: Target, tmp_path: Path) -> None:
    async with daemon(tmp_path / "frozen", name="frozen") as frozen, kvxfer.Client(victim.socket) as asker:
        address = [(await frozen.process.readline(10 * slack())).split("peers ")[1].split(",")[0]]
        await asker.connect(address, timeout=5)
        frozen.process.send_signal(signal.SIGSTOP)
        async with victim.unmoved():
            started = time.monotonic()
            asked = [asyncio.ensure_future(asker.connect(address, timeout=1)) for _ in range(50)]
            for answer in await asyncio.gather(*asked, return_exceptions=True):
                assert isinstance(answer, KvxferError)
            assert time.monotonic() - started < 1 + 1 * slack()
        frozen.process.send_signal(signal.SIGCONT)
        await asker.connect(address, timeout=10 * slack())


async def test_what_comes_and_goes_leaves_nothing(victim: Target) -> None:
    async def everything() -> tuple[int, int, int]:
        return victim.process.num_threads(), len(os.listdir(victim.victim.socket.parent)), victim.process.num_fds()

    async with victim.unmoved():
        before = await everything()
        for _ in range(100):
            for address, role in ((victim.socket, "worker"), (victim.control, "peer")):
                (await intrude(address, role)).hang_up()
        for number in range(40):
            working = asyncio.ensure_future(victim.transfer())
            await asyncio.sleep(0.0005 * number)
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        threads, files, _ = await everything()
        assert threads <= before[0] + 2
        assert files <= before[1]

"""What one authenticated node can take from all others: floods by one node id, and what another node and the daemon's
memory notice of them. `python -m tests.adversity.floods` measures all; the test looks at what must hold on any machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from examples.child_processes import daemon, python_process
from kvxfer.config import Config
from kvxfer.net.credentials import Credentials
from kvxfer.net.link import Link, LocalIdentity
from kvxfer.wire import messages as m
from kvxfer.wire.codec import encode
from tests.adversity.attacker import Intruder, intrude, parse

SECONDS = 5.0
EVIL, GOOD = "ee" * 16, "00" * 15 + "01"
LINKS_WANTED = 40  # it gets fewer
BODY = 6 << 20
POOL_BYTES = Config().landing_bytes_max


def _unfinished(_: int) -> Iterator[bytes]:
    yield (8 << 20).to_bytes(4, "big") + bytes(7 << 20)


def _bodies(number: int) -> Iterator[bytes]:
    body = os.urandom(BODY)
    for count in range(300):
        key = f"{number}-{count}"
        yield encode(m.Land(rid=count + 1, key=key, length=POOL_BYTES, wait_s=600.0, lease_s=600.0, body=body))


def _waits(number: int) -> Iterator[bytes]:
    frames = b""
    for count in range(1, 1000):
        frames += encode(m.Claim(rid=count, kind="offer", key=f"{number}-{count}", wait_s=600.0))
        frames += encode(m.GiveUp(request=max(1, count - 500)))
    while True:
        yield frames


def _confirms(_: int) -> Iterator[bytes]:
    many = os.urandom(m.POSTING_BYTES) + b"\0\0\0\1"
    question = encode(m.Confirm(rid=7, session="0" * 32, claims=many * m.CLAIMS_MAX))
    while True:
        yield question


def _echoes(_: int) -> Iterator[bytes]:
    frames = encode(m.Echo(rid=1, data=b"x" * 100)) * 500
    while True:
        yield frames


def _mail(number: int) -> Iterator[bytes]:
    frames = b"".join(encode(m.Mail(rid=n + 1, channel=f"{number}-{n}", data=b"x" * 1000)) for n in range(1000))
    while True:
        yield frames


def _quiet(_: int) -> Iterator[bytes]:
    yield from ()


FLOODS: dict[str, Callable[[int], Iterator[bytes]]] = {
    "quiet": _quiet,
    "unfinished": _unfinished,
    "bodies": _bodies,
    "waits": _waits,
    "confirms": _confirms,
    "echoes": _echoes,
    "mail": _mail,
}


async def attack(kind: str, address: str) -> None:
    """As many connections as this node gets, all of them as fast as they are read."""
    made: list[Intruder] = []
    for _ in range(LINKS_WANTED):
        with contextlib.suppress(OSError):
            one = await intrude(parse(address), "peer", node_id=EVIL, version_max=2)
            one.decoder.frame_bytes_max = 8 << 20
            made.append(one)
    print(len(made), flush=True)

    async def flood(number: int, one: Intruder) -> None:
        with contextlib.suppress(OSError):
            for data in FLOODS[kind](number):
                one.writer.write(data)
                await one.writer.drain()
            await asyncio.sleep(SECONDS)

    async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as group:
        for number, one in enumerate(made):
            group.create_task(one.read())
            group.create_task(flood(number, one))


async def measure(kind: str, directory: Path) -> tuple[list[float], int]:
    """Round trips of another node beside the flood (s, sorted), and by how much the daemon grew (bytes)."""
    async with daemon(directory, name="victim") as victim:
        address = re.findall(r"peers (\S+),", await victim.process.readline(20))[0]
        about = LocalIdentity(role="peer", node_id=GOOD)
        link = await Link.dial([address], about, Config(), credentials=Credentials(Config(), unconfigured="look"))
        # Somebody has a little of the landing pool, so that whoever asks for all of it waits.
        await link.request(m.Land(key="held", length=1, wait_s=0.0, lease_s=600.0, body=b""), timeout=30)
        process = psutil.Process(victim.process.pid)
        before = most = process.memory_info().rss
        samples = []
        async with python_process(["-m", "tests.adversity.floods", kind, address], name="attacker") as attacker:
            assert int(await attacker.readline(30)) > 0
            ends_at = time.monotonic() + SECONDS
            while time.monotonic() < ends_at:
                began = time.perf_counter()
                await link.request(m.Echo(data=b"x"), timeout=30)
                samples.append(time.perf_counter() - began)
                most = max(most, process.memory_info().rss)
                await asyncio.sleep(0.01)
        await link.aclose("done")
        assert victim.process.returncode is None
        return sorted(samples), most - before


async def main() -> None:
    """Measure all floods."""
    with tempfile.TemporaryDirectory() as place:
        for kind in FLOODS:
            samples, grown = await measure(kind, Path(place) / kind)
            p50, p99 = (samples[int(len(samples) * part)] * 1e3 for part in (0.5, 0.99))
            print(f"{kind:12} {len(samples)} round trips, p50 {p50:.1f} ms, p99 {p99:.1f} ms; grown {grown >> 20} MiB")


if __name__ == "__main__":
    asyncio.run(attack(*sys.argv[1:]) if sys.argv[1:] else main())

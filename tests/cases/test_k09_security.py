"""K09, authentication: whoever cannot prove who it is gets nothing, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import kvxfer
from examples.child_processes import daemon
from kvxfer.config import Config
from kvxfer.errors import AuthenticationError, ConfigError, KvxferError
from kvxfer.net.credentials import Credentials
from kvxfer.net.link import Link, LocalIdentity
from kvxfer.wire import messages as m
from kvxfer.wire.codec import encode
from kvxfer.wire.framing import PREAMBLE, FrameDecoder
from tests.adversity.attacker import connect, hello, parse
from tests.cases.facts import limit
from tests.certificates import Authority, Files

pytestmark = [pytest.mark.once, pytest.mark.timeout(120)]
A, B = "0a" * 16, "0b" * 16
SECRET = "the shared secret of all nodes"


class Guarded:
    """A daemon with authentication, and a way to look at what it holds."""

    def __init__(self, control: str, http: str, socket: str, pid: int) -> None:
        self.control, self.http, self.socket, self.pid = control, http, socket, pid

    async def state(self) -> dict[str, float]:
        """What a stranger could have left: parties, claims, postings, connections, mail."""
        reader, writer = await connect(parse(self.http))
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        page = (await reader.read()).decode()
        writer.close()
        names = "peers|postings|claims|waiting|routes|channels|held_bytes|remembered|landings"
        rows = re.findall(rf'^kvxfer_({names}|links{{kind="[a-z_]+"}}) (\S+)$', page, re.MULTILINE)
        return {name: float(value) for name, value in rows}

    async def back_to(self, before: dict[str, float]) -> None:
        async with asyncio.timeout(limit(5)):
            while await self.state() != before:
                await asyncio.sleep(0.01)

    async def dial(self, node_id: str = B, **options: str) -> Link:
        known = Credentials(Config.embedded(**options))
        facts = LocalIdentity(role="peer", node_id=node_id, incarnation="1d" * 16)
        return await Link.dial([self.control], facts, Config.embedded(), credentials=known, timeout=limit(5))


@asynccontextmanager
async def guarded(directory: Path, **options: object) -> AsyncIterator[Guarded]:
    async with daemon(directory / "s", http="127.0.0.1:0", transports="shm,tcp", **options) as running:
        line = await running.process.readline(limit(10))
        [(control, http)] = re.findall(r"peers (\S+),.*http://([^/]+)/", line)
        target = Guarded(control, http, str(running.socket), running.process.pid)
        async with asyncio.timeout(limit(5)):
            while (await target.state())['links{kind="half_open"}']:  # of whoever looked whether it is up
                await asyncio.sleep(0.01)
        yield target


async def refused(target: Guarded, **options: str) -> AuthenticationError:
    before = await target.state()
    with pytest.raises(AuthenticationError) as caught:
        await target.dial(**options)
    await target.back_to(before)
    return caught.value


@pytest.mark.parametrize("kind", ["secret", "certificate"])
async def test_c51_only_the_right_credential_is_let_in(kind: str, tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other", "other")
    good = authority.issue("b", B).options()
    mine = authority.issue("a", A).options() if kind == "certificate" else {"secret": SECRET}
    right = good if kind == "certificate" else {"secret": SECRET}
    async with guarded(tmp_path, **mine) as target:
        await refused(target)  # none
        if kind == "secret":
            await refused(target, secret="another secret, as long as that")
        else:
            strange = other.issue("b", B)
            wrong = Files(strange.cert, strange.key, other.cert).options()
            with pytest.raises(KvxferError):  # of another authority: each side refuses the other
                await target.dial(**wrong)
            with pytest.raises(ConfigError, match="expired"):  # this side does not even begin
                await target.dial(**authority.issue("late", B, days=-1).options())
            await refused(target, **authority.issue("c", "0c" * 16).options())  # says that it is B
        link = await target.dial(**right)
        reply = await link.request(m.Echo(data=b"in"), timeout=limit(5))
        assert isinstance(reply, m.EchoReply)
        await link.aclose("done")


async def test_c51_a_replayed_handshake_is_refused(tmp_path: Path) -> None:
    async with guarded(tmp_path, secret=SECRET) as target:
        before = await target.state()
        spoken = await overheard(target)
        await target.back_to(before)
        reader, writer = await connect(parse(target.control))
        decoder = FrameDecoder()
        writer.write(b"".join(spoken))
        answers = []
        async with asyncio.timeout(limit(5)):
            while data := await reader.read(4096):
                answers += list(decoder.feed(data))
        writer.close()
        assert isinstance(answers[-1], m.Refuse)
        assert answers[-1].code == "authentication"
        await target.back_to(before)


async def overheard(target: Guarded) -> list[bytes]:
    """What a true node said to the daemon in its handshake, as somebody in the path hears it."""
    spoken: list[bytes] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, down = await connect(parse(target.control))

        async def carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter, keep: bool) -> None:
            while data := await source.read(4096):
                if keep:
                    spoken.append(data)
                sink.write(data)
            sink.close()

        await asyncio.gather(carry(reader, down, True), carry(upstream, writer, False))

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as between:
        port = between.sockets[0].getsockname()[1]
        true = Guarded(f"127.0.0.1:{port}", "", "", 0)
        link = await true.dial(secret=SECRET)
        link.abort()
        await link.wait_closed()
    return spoken


def mapped() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()


async def test_c51_nothing_listens_beyond_this_host_without_it(tmp_path: Path) -> None:
    assert Config().listen_address.is_loopback
    for options in ({"listen": "0.0.0.0:0", "advertise": ("127.0.0.1",)}, {"data_bind": "0.0.0.0"}):
        with pytest.raises(ConfigError, match="reachable from other hosts"):
            Config(**options).check_security()  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no login"):
        Config(http="0.0.0.0:0", secret=SECRET).check_security()
    async with guarded(tmp_path) as target, kvxfer.Client(target.socket) as client:
        region = await client.alloc(1 << 16)
        made = list((tmp_path / "s").iterdir())
        assert made
        for path in made:
            assert path.stat().st_mode & 0o077 == 0, path
        shared = [line for line in mapped() if "/dev/shm/" in line and "kvxfer" in line]
        assert shared == []  # memory has no name that somebody else could open
        await region.release()


async def test_c51_a_half_spoken_handshake_leaves_nothing(tmp_path: Path) -> None:
    async with guarded(tmp_path, secret=SECRET, handshake_s=0.3) as target:
        before = await target.state()
        for said in (b"", PREAMBLE, PREAMBLE + encode(hello("peer"))):
            reader, writer = await connect(parse(target.control))
            writer.write(said)
            async with asyncio.timeout(limit(5)):
                while await reader.read(4096):
                    pass
            writer.close()
        await target.back_to(before)

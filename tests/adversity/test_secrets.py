"""Keys, secrets and proofs of a run are looked for in everything that the run has written or shown."""

from __future__ import annotations

import base64
import gc
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import kvxfer
from examples.child_processes import Daemon, daemon
from kvxfer.config import Config
from kvxfer.errors import KvxferError
from kvxfer.net.credentials import Credentials
from kvxfer.net.link import Link, LocalIdentity
from tests.adversity.attacker import connect, parse, shout
from tests.certificates import Authority
from tests.conftest import slack
from tests.support.nodes import make_cache, scattered, small_geometry

pytestmark = pytest.mark.once

A, B = "0a" * 16, "0b" * 16
SECRETS = ("the first secret of this very run", "the other secret of this very run")
TABLE = scattered(1, 16, 40, 16)


def forms(key: bytes | str) -> Iterator[str]:
    """How bytes may look in a text."""
    data = key.encode() if isinstance(key, str) else key
    yield data.hex()
    yield repr(data)[2:-1]
    yield base64.b64encode(data).decode()
    yield str(list(data))[1:-1]
    if isinstance(key, str):
        yield key


def leaks(shown: str, keys: Mapping[str, Iterable[bytes | str]]) -> list[str]:
    """The names of the keys that can be read in ``shown``, as a whole or the greater half of it."""
    found = []
    for name, some in keys.items():
        for key in some:
            assert len(key) >= 16, name
            if any(form in shown or form[: len(form) * 2 // 3] in shown for form in forms(key)):
                found.append(name)
    return found


async def page(running: Daemon, line: str) -> str:
    [address] = re.findall(r"http://([^/]+)/", line)
    reader, writer = await connect(parse(address))
    writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    return text


def test_the_search_finds_what_is_there() -> None:
    key = bytes(range(100, 116))
    for shown in (
        key.hex(),
        repr(key),
        f"x {list(key)}",
        base64.b64encode(key).decode(),
        key.hex()[:24],
        "a secret word, long",
    ):
        assert leaks(shown, {"key": [key, "a secret word, long"]}) == ["key"]
    assert leaks("nothing of it", {"key": [key]}) == []


async def test_nothing_that_is_shown_holds_a_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    authority = Authority(tmp_path / "ca")
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("\n".join(SECRETS))
    files = {A: authority.issue("a", A), B: authority.issue("b", B)}
    keys: dict[str, list[bytes | str]] = {"secret": list(SECRETS)}
    keys["tls key"] = [
        part for item in files.values() for part in item.key.read_text().splitlines()[1:-1] if len(part) > 40
    ]
    common = {"secret_file": secret, "log_level": "debug", "http": "127.0.0.1:0", "drain_s": 0.2, "reload_s": 0.1}
    shown: list[str] = []
    async with (
        daemon(tmp_path / "a", name="a", **common, **files[A].options()) as one,
        daemon(tmp_path / "b", name="b", **common, **files[B].options()) as two,
        kvxfer.Client(str(one.socket)) as source,
        kvxfer.Client(str(two.socket)) as target,
    ):
        lines = [await running.process.readline(10 * slack()) for running in (one, two)]
        await work(source, target, keys, shown)
        shown += await mistakes(target.addresses, files[A].options())
        secret.write_text("short")  # said in the log, without what it says
        while "stay in force" not in "".join((*one.process.stderr, *two.process.stderr)):
            await two.wait_ready()
        shown += [await page(*pair) for pair in zip((one, two), lines, strict=True)]
        shown += [repr(item) for item in everything()] + lines
    shown += [*one.process.stderr, *two.process.stderr, caplog.text]
    assert len(keys["posting"]) >= 2
    assert len(keys["descriptor"]) >= 1
    assert any("DEBUG" in line or "debug" in line for line in (*one.process.stderr, *two.process.stderr))
    for text in shown:
        assert leaks(text, keys) == [], text


async def work(source: kvxfer.Client, target: kvxfer.Client, keys: Any, shown: list[str]) -> None:
    """A pull and a put between the two, good ones and bad ones."""
    cache, sink = [await make_cache(client, small_geometry(), 16) for client in (source, target)]
    async with source.publish("r", cache, TABLE) as ticket:
        keys["posting"] = [ticket.to_dict()["secret"], bytes.fromhex(ticket.to_dict()["secret"])]
        await target.pull(ticket.to_dict(), sink, TABLE)
        forged = ticket.to_dict() | {"secret": "ab" * 16}
        with pytest.raises(KvxferError) as caught:
            await target.pull(forged, sink, TABLE)
        shown += [str(caught.value), repr(caught.value), repr(caught.value.fields), repr(ticket)]
    region = await target.alloc(4096)
    share = await target.share(region, "scratch", "r")
    seen = await source.lookup("scratch", node=target.addresses)
    keys["descriptor"] = [seen.key]
    peer = await source.connect(target.addresses)
    local = await source.alloc(4096)
    await peer.get(local, seen)
    with pytest.raises(KvxferError) as denied:
        await peer.put(local, seen)
    shown += [str(denied.value), repr(denied.value), repr(denied.value.fields)]
    shown += [repr(seen), str(seen), repr(share), repr(region), repr(peer)]


async def mistakes(addresses: tuple[str, ...], files: dict[str, str]) -> list[str]:
    """What those are told who come with the wrong things."""
    told = []
    for options in (files | {"secret": "a wrong secret, but long"}, files, {"secret": SECRETS[0]}, {}):
        known = Credentials(Config.embedded(**options))
        with pytest.raises(KvxferError) as caught:
            facts = LocalIdentity(role="peer", node_id=A, incarnation="1d" * 16)
            await Link.dial(addresses, facts, Config.embedded(), credentials=known, timeout=5)
        told += [str(caught.value), repr(caught.value.fields), repr(known)]
    await shout(parse(addresses[0]), b"GET / HTTP/1.1\r\n\r\n")
    return told


def everything() -> Iterator[object]:
    """Every object of ours that lives in this process."""
    for item in gc.get_objects():
        if str(type(item).__module__).startswith("kvxfer.") and not isinstance(item, type):
            yield item

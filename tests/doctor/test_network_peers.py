"""Looking at other nodes: real daemons, dead ports, strangers."""

from __future__ import annotations

import asyncio

import pytest

from kvxfer.config import Config
from kvxfer.doctor.network import probe_peers
from kvxfer.wire.session import VERSIONS
from tests.nodes import node

pytestmark = pytest.mark.once


async def test_a_daemon_says_what_it_is() -> None:
    async with node(transports=("loop", "tcp")) as server:
        [address] = server.addresses
        [seen] = await probe_peers([address], Config.embedded(), 5)
    assert (seen.error, seen.protocol, seen.addresses) == ("", VERSIONS[1], (address,))
    assert seen.version
    assert seen.transports == ("loop", "tcp")
    [candidate] = seen.candidates
    assert (candidate.address, candidate.error) == (address, "")


async def test_a_dead_port_and_an_unknown_name() -> None:
    [seen] = await probe_peers(["127.0.0.1:1,nobody.invalid:17800"], Config.embedded(), 2)
    reasons = {candidate.address: candidate.error for candidate in seen.candidates}
    assert reasons["127.0.0.1:1"] == "Connection refused"
    assert reasons["nobody.invalid:17800"]
    assert "no candidate address answers" in seen.error
    assert "kvxfer serve" in seen.hint


async def test_a_stranger() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        [seen] = await probe_peers([f"127.0.0.1:{port}"], Config.embedded(), 2)
    assert "does not speak kvxfer" in seen.error


async def test_a_wrong_secret() -> None:
    async with node(secret="a secret of that node") as server:
        [seen] = await probe_peers(list(server.addresses), Config.embedded(secret="another one, not the same"), 2)
    assert "secret" in seen.error

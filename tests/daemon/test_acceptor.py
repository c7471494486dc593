"""Who gets in when there is little room: a peer that proves itself, before anybody who only holds a place."""

from __future__ import annotations

import asyncio
import os
import resource

import pytest

from kvxfer.addresses import parse_address
from kvxfer.errors import ClosedError, PeerUnreachable
from kvxfer.net.link import Link, LocalIdentity
from kvxfer.server import Server
from kvxfer.wire.codec import encode
from tests.adversity.attacker import greet
from tests.nodes import fast, node, until


async def peer(server: Server) -> Link:
    identity = LocalIdentity(role="peer", node_id=os.urandom(16).hex(), incarnation="d" * 32)
    return await Link.dial(server.addresses, identity, server.config, credentials=server.credentials)


async def silent(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = parse_address(server.addresses[0])
    return await asyncio.open_connection(address.host, address.port)


async def test_half_open_connections_make_room_for_a_peer_when_all_places_are_taken() -> None:
    async with node(links_max=4, handshakes_max=4) as server:
        known = [await peer(server) for _ in range(2)]
        held = [await silent(server) for _ in range(2)]
        await until(lambda: server.peers.half_open == 2)
        late = await peer(server)
        assert await held[0][0].read() == b""  # the oldest one had to go
        assert server.peers.refused == {"handshakes_max": 1, "closed": 1}
        assert all(link.usable for link in (*known, late))
        for _, writer in held:
            writer.close()
        for link in (*known, late):
            await link.aclose("done")


async def test_the_oldest_goes_whatever_it_has_said() -> None:
    """A greeting is free, so it earns nothing: who greets and stays is no better than who is silent."""
    async with node(handshakes_max=3) as server:
        address = parse_address(server.addresses[0])
        greeted, _ = await greet((address.host, address.port), "peer")
        held = [await silent(server) for _ in range(2)]
        await until(lambda: server.peers.half_open == 3)
        late = await peer(server)
        await until(lambda: server.peers.refused.get("handshakes_max") == 1)
        assert server.peers.half_open == 2
        assert await greeted.reader.read() == b"", "it came first"
        await late.aclose("done")
        for writer in (greeted.writer, *(writer for _, writer in held)):
            writer.close()


async def test_a_flood_from_one_address_does_not_touch_another_address() -> None:
    async with node(handshakes_max=4) as server:
        address = parse_address(server.addresses[0])
        greeted, proof = await greet((address.host, address.port), "peer", local_addr=("127.0.0.9", 0))
        held = [await silent(server) for _ in range(40)]
        await until(lambda: server.peers.refused.get("handshakes_max") == 37)
        greeted.writer.write(encode(proof))
        await until(lambda: len(server.peers.links) == 1)
        assert not greeted.reader.at_eof()
        for one in (greeted.writer, *(writer for _, writer in held)):
            one.close()


async def test_newcomer_is_refused_when_all_places_are_proven() -> None:
    async with node(links_max=2, handshakes_max=2, **fast()) as server:
        known = [await peer(server) for _ in range(2)]
        with pytest.raises(PeerUnreachable):
            await peer(server)
        await known[0].aclose("done")
        await until(lambda: len(server.peers.links) == 1)
        again = await peer(server)
        for link in (again, known[1]):
            await link.aclose("done")
        assert server.peers.refused == {"links_max": 1}


async def test_stopped_acceptor_drops_what_is_half_open_and_keeps_what_is_open() -> None:
    async with node() as server:
        known, (reader, writer) = await peer(server), await silent(server)
        await until(lambda: server.peers.half_open == 1)
        server.peers.stop()
        assert await reader.read() == b""
        writer.close()
        assert known.usable
        with pytest.raises(PeerUnreachable):
            await peer(server)
        await known.aclose("done")
        assert isinstance(known.closed.result(), ClosedError)


async def test_few_descriptors_allow_few_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 16))
    async with node() as server:
        known = [await peer(server) for _ in range(4)]
        with pytest.raises(PeerUnreachable):
            await peer(server)
        for link in known:
            await link.aclose("done")

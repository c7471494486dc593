"""K19: nodes of neighbouring versions, as during an upgrade: the older way, or a clear word at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest

import kvxfer
from examples.child_processes import daemon
from kvxfer.config import load
from kvxfer.errors import KvxferError, PeerError, ProtocolError, UnknownMessage, VersionMismatch
from kvxfer.geometry import BlockTable
from kvxfer.memory.region import KVCache
from kvxfer.tasks import Deadline
from kvxfer.wire import messages as m
from kvxfer.wire.session import VERSIONS
from tests.cases.facts import limit, within
from tests.cases.scripted import Fields, Scripted, frame, said, scripted
from tests.nodes import Worker, node, until, worker
from tests.support.nodes import make_cache, scattered, small_geometry, tokens_of
from tests.support.older import LATER

OLD, NEW = VERSIONS[1] - 1, VERSIONS[1]
GEOMETRY = small_geometry()
REQUESTS = ("Claim", "Land", "Mail", "Echo", "Settle")  # what a daemon asks of another
pytestmark = [pytest.mark.timeout(120)]


# -- real processes ---------------------------------------------------------------------------------------------------


class Side:
    """A daemon process and a client of it, with a cache."""

    def __init__(self, client: kvxfer.Client, cache: KVCache, table: BlockTable) -> None:
        self.client, self.cache, self.table = client, cache, table

    def fill(self, seed: int) -> None:
        array = self.cache.regions[0].array
        array[:] = np.random.default_rng(seed).integers(0, 256, len(array), dtype=np.uint8)

    def content(self) -> list[bytes]:
        return [tokens_of(self.cache, self.table, layer).tobytes() for layer in range(GEOMETRY.layers)]


@asynccontextmanager
async def mixed(directory: Path, lacks: Sequence[tuple[str, ...]]) -> AsyncIterator[list[Side]]:
    """A node of this version, then nodes of the version before: each lacks these messages, () all that came later."""
    older = ("-m", "tests.support.older")
    programs = [("-m", "kvxfer"), *((*older, *(f"--lacks={name}" for name in names)) for names in lacks)]
    config = load(flags={"transports": ["shm"], "tcp_threads": 1, "copy_threads": 1}).config
    async with AsyncExitStack() as stack:

        async def side(number: int, program: tuple[str, ...]) -> Side:
            starting = daemon(directory / str(number), name=f"daemon-{number}", program=program, drain_s=0.2)
            running = await stack.enter_async_context(starting)
            client = await stack.enter_async_context(kvxfer.Client(str(running.socket), config=config))
            return Side(client, await make_cache(client, GEOMETRY, 16), scattered(number, 16, 100, 16))

        yield [await side(number, program) for number, program in enumerate(programs)]


async def push(source: Side, target: Side, request: str) -> None:
    source.fill(len(request))
    timeout = limit(10)

    async def receive() -> None:
        async with target.client.offer(request, target.cache, target.table, timeout=timeout) as landing:
            await landing.wait()

    async def send() -> None:
        to = list(target.client.addresses)
        pushing = source.client.push(request, to=to, cache=source.cache, table=source.table, timeout=timeout)
        async with pushing as sending:
            await sending.layers()

    await asyncio.gather(receive(), send())
    assert source.content() == target.content()


async def pull(source: Side, target: Side, request: str) -> None:
    source.fill(100 + len(request))
    async with source.client.publish(request, source.cache, source.table, lease_s=limit(10)) as ticket:
        await target.client.pull(ticket.to_dict(), target.cache, target.table, timeout=limit(10))
    assert source.content() == target.content()


async def land(source: Side, target: Side, request: str) -> None:
    source.fill(200 + len(request))
    to = list(target.client.addresses)
    pushing = source.client.push(request, to=to, cache=source.cache, table=source.table, timeout=limit(10), land=True)
    async with pushing as sending:
        await sending.layers()
    async with target.client.adopt(request, timeout=limit(10)) as landed:
        there: Any = SimpleNamespace(layout=landed.layout, regions=[SimpleNamespace(array=landed.array)])
        found = [tokens_of(there, landed.table, layer).tobytes() for layer in range(GEOMETRY.layers)]
        assert found == source.content()


async def give_up(source: Side, target: Side, request: str) -> None:
    """Nobody offers; the push waits, is given up, and the request can be used afterwards."""
    with pytest.raises(KvxferError):
        async with source.client.push(
            request, to=list(target.client.addresses), cache=source.cache, table=source.table, timeout=0.2
        ):
            raise AssertionError("nothing was offered")


async def mail(source: Side, target: Side, request: str) -> None:
    await source.client.send(list(target.client.addresses), request, b"hello")
    assert await target.client.recv(request, timeout=limit(10)) == b"hello"


@pytest.mark.once
async def test_c80_nodes_of_the_version_before_work_with_this_one(tmp_path: Path) -> None:
    kinds: list[tuple[str, ...]] = [(), *((name,) for name in LATER)]
    async with mixed(tmp_path, kinds) as (new, *older):
        for names, old in zip(kinds, older, strict=True):
            lacks = "+".join(names) or "all"
            for source, target, way in ((new, old, f"to-old-{lacks}"), (old, new, f"to-new-{lacks}")):
                await push(source, target, f"push-{way}")
                await pull(source, target, f"pull-{way}")
                await land(source, target, f"land-{way}")
                await mail(source, target, f"mail-{way}")
                await give_up(source, target, f"later-{way}")
            await push(new, old, f"afterwards-{lacks}")
        status = msgpack.unpackb((await new.client.control.request(m.Status(), Deadline.after(5))).body)  # type: ignore[attr-defined]
        assert status["counts"]["claims"] == status["counts"]["routes"] == status["counts"]["orphans"] == 0


# -- a scripted peer of the version before ----------------------------------------------------------------------------


def ask_for(peer: Scripted, name: str) -> m.Message:
    """A request of a worker that its daemon passes on to this peer."""
    to = (peer.address,)
    requests: dict[str, m.Message] = {
        "Claim": m.Claim(kind="offer", key="r", node=to),
        "Land": m.Land(key="r", node=to, length=4096, lease_s=5.0),
        "Mail": m.Mail(channel="c", node=to, data=b"x"),
        "Echo": m.Echo(node=to, data=b"x"),
        "Settle": m.Settle(node=to, posting="ab" * 16, claim=1, outcome="done"),
    }
    return requests[name]


async def refused(asker: Worker, request: m.Message) -> KvxferError:
    """The error with which a request fails, at once."""
    with within(2, "the refusal"), pytest.raises(KvxferError) as caught:
        await asker.ask(request)
    return caught.value


@pytest.mark.parametrize("version", [OLD, NEW])
@pytest.mark.parametrize("name", REQUESTS)
async def test_c80_a_request_that_the_peer_does_not_know(name: str, version: int) -> None:
    async with scripted(version=version) as peer, node() as here, worker(here) as asker:
        error = await refused(asker, ask_for(peer, name))
        assert isinstance(error, UnknownMessage)
        assert {key: error.fields[key] for key in ("kind", "version", "newest")} == {
            "kind": name,
            "version": version,
            "newest": NEW,
        }
        assert error.hint
        assert "upgrade" in error.hint
        assert not error.retryable
        assert here.dispatcher.forwarding.running == 0  # type: ignore[attr-defined]
        assert len(here.pool.links) == 1, "what one side does not know does not end the connection"


@pytest.mark.parametrize("version", [OLD, NEW])
async def test_c80_a_claim_that_an_older_owner_grants_too_late_is_given_back(version: int) -> None:
    """The older way of giving up: its grant is settled when it comes. A newer owner is told at once."""
    async with scripted(version=version) as peer, node() as here, worker(here) as asker:
        peer.answers["Claim"] = lambda _: ()
        peer.answers["GiveUp"] = lambda _: ()
        waiting = asyncio.ensure_future(asker.ask(m.Claim(kind="offer", key="r", node=(peer.address,), wait_s=20.0)))
        asked = await peer.hears("Claim")
        waiting.cancel()
        if version == NEW:
            assert (await peer.hears("GiveUp"))["request"] == asked["rid"]
        await until(lambda: here.dispatcher.forwarding.running == 0)  # type: ignore[attr-defined]
        peer.say(*peer.grants(asked)[0])
        settled = await peer.hears("Settle")
        assert (settled["posting"], settled["claim"], settled["outcome"]) == ("ab" * 16, 1, "cancelled")
        assert ("GiveUp" in peer.names()) == (version == NEW)


async def test_c80_a_namespace_is_not_lost_on_an_older_peer() -> None:
    async with scripted(version=OLD) as peer, node(namespace="team") as here, worker(here) as asker:
        error = await refused(asker, ask_for(peer, "Claim"))
        assert isinstance(error, VersionMismatch)
        assert (error.fields["version"], error.fields["since"], error.fields["newest"]) == (OLD, 2, NEW)
        assert error.hint
        assert "upgrade" in error.hint
        assert (await peer.hears("Refuse"))["code"] == "version_mismatch"
        assert "Claim" not in peer.names()


@pytest.mark.parametrize("version", [NEW + 1, NEW + 40])
async def test_c80_a_peer_that_answers_with_a_version_that_nobody_offered(version: int) -> None:
    async with scripted(version=version) as peer, node() as here, worker(here) as asker:
        error = await refused(asker, ask_for(peer, "Claim"))
        assert isinstance(error, VersionMismatch)
        assert str(version) in error.message
        assert str(NEW) in error.message
        assert error.hint
        assert "upgrade the dialler" in error.hint


@pytest.mark.parametrize("name", [name for name, _ in m.Claimed.kinds if name not in ("rid", *m.Claimed.added)])
async def test_c80_an_answer_without_one_of_its_fields(name: str) -> None:
    def grant(fields: Fields) -> list[tuple[int, Fields]]:
        [(number, granted)] = peer.grants(fields)
        return [(number, {key: value for key, value in granted.items() if key != name})]

    async with scripted(version=OLD) as peer, node() as here, worker(here) as asker:
        peer.answers["Claim"] = grant
        error = await refused(asker, ask_for(peer, "Claim"))
        assert isinstance(error, ProtocolError | PeerError)
        assert f"Claimed.{name} is missing" in str(error)
        assert (await asker.ask(m.Echo(data=b"well"))).data == b"well"
        assert here.registry.counts().routes == 0
        assert any(fields.get("code") == "protocol" for found, fields in peer.heard if found == "Error")


@pytest.mark.parametrize("name", [name for name, _ in m.Welcome.kinds if name not in m.Welcome.added])
async def test_c80_a_welcome_without_one_of_its_fields(name: str) -> None:
    async with scripted(version=OLD) as peer, node() as here, worker(here) as asker:
        take = peer._take

        def without(kind: str, number: int, fields: Fields) -> list[bytes]:
            if kind != "Hello":
                return take(kind, number, fields)
            full = said(m.Welcome(version=OLD, node_id="a" * 32, incarnation="b" * 32, nonce=bytes(32), auth="none"))
            return [frame(full[0], {key: value for key, value in full[1].items() if key not in (name, "namespace")})]

        peer._take = without  # type: ignore[method-assign]
        error = await refused(asker, ask_for(peer, "Echo"))
        assert isinstance(error, ProtocolError)
        assert f"Welcome.{name} is missing" in error.message


# -- a scripted peer of the version after -----------------------------------------------------------------------------


@pytest.mark.parametrize("rid", [0, 5])
async def test_c80_a_handshake_that_holds_something_unknown_ends_at_once(rid: int) -> None:
    before = frame(0xBEEF, {"rid": rid, "secret": b"?"})
    async with scripted(version=NEW, before_welcome=before) as peer, node() as here, worker(here) as asker:
        error = await refused(asker, ask_for(peer, "Echo"))
        assert isinstance(error, UnknownMessage)
        assert (await peer.hears("Refuse"))["code"] == "unknown_message"
        assert not here.pool.links


async def test_c80_a_newer_peer_says_more_than_we_know() -> None:
    """Unknown messages beside known ones, unknown fields in all of them, and every request of it answered."""
    more: Fields = {"of_tomorrow": [1, {"x": b"y"}], "urgency": None}

    def grant(fields: Fields) -> list[tuple[int, Fields]]:
        [(number, granted)] = peer.grants(fields, **more)
        return [(0xC0DE, more), (number, granted), (0xC0DE, {"rid": 99, **more})]

    async with scripted(version=NEW, **more) as peer, node() as here, worker(here) as asker:
        peer.answers["Claim"] = grant
        peer.answers["Settle"] = lambda fields: [(m.Done.number, {"rid": fields["rid"], "value": b"", **more})]
        claimed: Any = await asker.ask(ask_for(peer, "Claim"))
        assert claimed.body == b"body"
        answer = await peer.hears("Error")
        assert (answer["rid"], answer["code"]) == (99, "unknown_message")
        await asker.ask(m.Settle(posting=claimed.posting, claim=claimed.claim, outcome="done"))
        assert peer.names().count("Error") == 1, "what asks for no answer gets none"
        assert here.registry.counts().routes == 0
        assert len(here.pool.links) == 1


async def test_c80_a_word_that_only_a_later_version_has_ends_the_connection_with_its_name() -> None:
    """New words in known fields need a new version: they are not guessed at."""
    async with scripted(version=NEW) as peer, node() as here, worker(here) as asker:
        peer.answers["Claim"] = peer.grants
        await asker.ask(ask_for(peer, "Claim"))
        number, event = said(m.PostingEvent(posting="ab" * 16, claim=1, what="lost"))
        peer.say(number, event | {"what": "paused"})
        told = await peer.hears("Error")
        assert told["code"] == "protocol"
        assert (told["fields"]["kind"], told["fields"]["field"]) == ("PostingEvent", "what")
        orphaned = await asker.inbox.take(m.PostingEvent, what="orphaned")
        assert orphaned.posting == "ab" * 16
        assert not here.pool.links

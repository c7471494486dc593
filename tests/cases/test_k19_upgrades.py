"""K19: nodes that lack something or say more, as during an upgrade: they go on, or say a clear word at once."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.errors import KvxferError, PeerError, ProtocolError, UnknownMessage, VersionMismatch
from kvxfer.wire import messages as m
from kvxfer.wire.session import VERSIONS
from tests.cases.facts import within
from tests.cases.scripted import Fields, Scripted, frame, said, scripted
from tests.nodes import Worker, node, worker

NEW = VERSIONS[1]
REQUESTS = ("Claim", "Land", "Mail", "Echo", "Settle")  # what a daemon asks of another
pytestmark = [pytest.mark.timeout(120)]


# -- a scripted peer that lacks something ----------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", REQUESTS)
async def test_c80_a_request_that_the_peer_does_not_know(name: str) -> None:
    async with scripted(version=NEW) as peer, node() as here, worker(here) as asker:
        error = await refused(asker, ask_for(peer, name))
        assert isinstance(error, UnknownMessage)
        assert {key: error.fields[key] for key in ("kind", "version", "newest")} == {
            "kind": name,
            "version": NEW,
            "newest": NEW,
        }
        assert error.hint
        assert "upgrade" in error.hint
        assert not error.retryable
        assert here.dispatcher.forwarding.running == 0  # type: ignore[attr-defined]
        assert len(here.pool.links) == 1, "what one side does not know does not end the connection"


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

    async with scripted(version=NEW) as peer, node() as here, worker(here) as asker:
        peer.answers["Claim"] = grant
        error = await refused(asker, ask_for(peer, "Claim"))
        assert isinstance(error, ProtocolError | PeerError)
        assert f"Claimed.{name} is missing" in str(error)
        assert (await asker.ask(m.Echo(data=b"well"))).data == b"well"
        assert here.registry.counts().routes == 0
        assert any(fields.get("code") == "protocol" for found, fields in peer.heard if found == "Error")


@pytest.mark.parametrize("name", [name for name, _ in m.Welcome.kinds if name not in m.Welcome.added])
async def test_c80_a_welcome_without_one_of_its_fields(name: str) -> None:
    async with scripted(version=NEW) as peer, node() as here, worker(here) as asker:
        take = peer._take

        def without(kind: str, number: int, fields: Fields) -> list[bytes]:
            if kind != "Hello":
                return take(kind, number, fields)
            full = said(m.Welcome(version=NEW, node_id="a" * 32, incarnation="b" * 32, nonce=bytes(32), auth="none"))
            return [frame(full[0], {key: value for key, value in full[1].items() if key != name})]

        peer._take = without  # type: ignore[method-assign]
        error = await refused(asker, ask_for(peer, "Echo"))
        assert isinstance(error, ProtocolError)
        assert f"Welcome.{name} is missing" in error.message


# -- a scripted peer that says more -----------------------------------------------------------------------------


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

"""Grants that were lost with their connection: the owner asks, and ends what the other node does not know."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvxfer.daemon.settling import SLICE
from kvxfer.errors import ProtocolError, TooManyPending
from kvxfer.net.link import Link
from kvxfer.server import Server
from kvxfer.wire import messages as m
from kvxfer.wire.codec import Message
from tests.conftest import slack
from tests.nodes import Worker, node, small, until, worker

OFFER = m.Post(kind="offer", key="r", body=b"body", lease_s=60.0)
TICKET = m.Post(kind="ticket", key="r", body=b"body", lease_s=60.0)


def cut_instead_of(kind: type[Message], there: Server) -> list[Link]:
    """The next such message to a peer is lost, and its connection with it."""
    cut: list[Link] = []
    send = Link.send

    def lose(link: Link, message: Message) -> None:
        if isinstance(message, kind) and not cut:
            cut.append(link)
            link.abort("cut by the test")
            return
        send(link, message)

    ready = there.peers._on_ready

    def watched(link: Link) -> None:
        link.send = lambda message: lose(link, message)  # type: ignore[method-assign]
        ready(link)

    there.peers._on_ready = watched
    return cut


async def give_up_when(asker: Worker, request: m.Claim, happened: Callable[[], object]) -> None:
    waiting = asyncio.ensure_future(asker.ask(request))
    await until(happened)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


@pytest.mark.parametrize("kind", ["offer", "ticket"])
async def test_a_grant_that_was_lost_is_ended_when_the_nodes_meet_again(kind: str) -> None:
    async with node() as here, node() as there, worker(here) as claimant, worker(there) as owner:
        posted = await owner.ask(OFFER if kind == "offer" else TICKET)
        cut = cut_instead_of(m.Claimed, there)
        by_id = {"posting": posted.posting, "secret": posted.secret} if kind == "ticket" else {"key": "r"}
        claim = m.Claim(kind=kind, node=there.addresses, **by_id)
        await give_up_when(claimant, claim, lambda: cut)
        await claimant.ask(m.Echo(node=there.addresses, data=b"x"))
        lost = await owner.inbox.take(m.PostingEvent, what="lost")
        assert (lost.posting, lost.claim) == (posted.posting, 1)
        assert "never" in lost.detail or "nothing" in lost.detail
        assert there.registry.counts().orphans == 0
        if kind == "ticket":  # it has as many readers as before
            again = await claimant.ask(claim)
            assert again.claim > 1
        for server in (here, there):
            server.registry.check()


async def test_a_claim_that_is_known_stays() -> None:
    async with node() as here, node() as there, worker(here) as claimant, worker(there) as owner:
        await owner.ask(OFFER)
        claimed = await claimant.ask(m.Claim(kind="offer", key="r", node=there.addresses))
        answered: list[m.Confirm] = []
        answer = here.forwarder._confirmations.answer
        here.forwarder._confirmations.answer = lambda link, message: (  # type: ignore[method-assign]
            answered.append(message),
            answer(link, message),
        )[1]
        here.pool.links[0].abort()
        await owner.inbox.take(m.PostingEvent, what="orphaned")
        await claimant.ask(m.Echo(node=there.addresses, data=b"x"))
        await until(lambda: answered)
        await claimant.ask(m.Settle(posting=claimed.posting, claim=1, outcome="done"))
        assert (await owner.inbox.take(m.PostingEvent, what="settled")).code == "done"
        assert not [event for event in owner.inbox.messages if getattr(event, "what", "") == "lost"]


async def test_what_will_be_settled_is_not_denied() -> None:
    """Its outcome is on the way: the owner hears that one, not that the grant was lost."""
    async with node() as here, node() as there, worker(here) as claimant, worker(there) as owner:
        await owner.ask(OFFER)
        claimed = await claimant.ask(m.Claim(kind="offer", key="r", node=there.addresses))
        tell, go_on = here.forwarder._tell, asyncio.Event()

        async def later(action: Any) -> None:
            await go_on.wait()
            await tell(action)

        here.forwarder._tell = later  # type: ignore[method-assign]
        claimant.link.notify(m.Settle(posting=claimed.posting, claim=1, outcome="done"))
        await until(lambda: here.forwarder.settling())
        here.pool.links[0].abort()
        await owner.inbox.take(m.PostingEvent, what="orphaned")
        await claimant.ask(m.Echo(node=there.addresses, data=b"x"))
        await until(lambda: not there.registry.counts().orphans)
        [link] = there.peers.links
        await until(lambda: not link.pending)  # it has been asked, and has answered
        assert there.registry.counts().claims == 1
        go_on.set()
        assert (await owner.inbox.take(m.PostingEvent, what="settled")).code == "done"


async def test_the_old_connection_ends_before_anything_is_denied() -> None:
    """One side has lost it, the other has not noticed: what may still be in it counts."""
    async with node(dead_s=0.2) as here, node() as there, worker(here) as claimant, worker(there):
        await claimant.ask(m.Echo(node=there.addresses, data=b"x"))
        [old] = here.pool.links
        here.forwarder._confirmations.asks(old)
        other = await here._dial(there.addresses, there.node_id)
        asked = asyncio.ensure_future(
            next(link for link in there.peers.links if link.session == other.session).request(
                m.Confirm(session=old.session, claims=m.pack_claims([("a" * 32, 1)])), timeout=5
            )
        )
        reply = await asked
        assert isinstance(reply, m.Done)
        assert m.unpack_claims(reply.value) == [("a" * 32, 1)]
        assert old.closed.done()
        assert not other.closed.done()


async def test_a_question_ends_no_connection_of_another_node() -> None:
    """Whoever has seen its name."""
    async with node() as here, node() as there, node() as third, worker(here) as claimant, worker(third) as other:
        await claimant.ask(m.Echo(node=there.addresses, data=b"x"))
        await other.ask(m.Echo(node=here.addresses, data=b"x"))
        [between], [asking] = here.pool.links, third.pool.links
        reply = await asking.request(m.Confirm(session=between.session, claims=b""), timeout=5)
        assert isinstance(reply, m.Done)
        assert not between.closed.done()


async def test_claims_that_were_never_asked_for_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that we want nothing of cannot keep us busy with what we might know, nor one with more than we wanted."""
    async with node() as here, node() as there, node() as third, worker(here) as claimant, worker(there) as owner:
        await owner.ask(OFFER)
        claimed = await claimant.ask(m.Claim(kind="offer", key="r", node=there.addresses))
        await claimant.ask(m.Echo(node=third.addresses, data=b"x"))
        old = next(link for link in here.pool.links if link.peer.node_id == there.node_id)
        links = {link.peer.node_id: link for link in (*there.peers.links, *third.peers.links)}
        other = await here._dial(there.addresses, there.node_id)
        asking = next(link for link in there.peers.links if link.session == other.session)
        monkeypatch.setattr(m, "unpack_claims", None)
        for link, session, wanted in (
            (asking, old.session, 2),
            (asking, "0" * 32, 1),
            (asking, other.session, 1),
            (next(iter(third.peers.links)), old.session, 1),
        ):
            many = m.pack_claims([(claimed.posting, 1)] * wanted)
            with pytest.raises(ProtocolError):
                await link.request(m.Confirm(session=session, claims=many), timeout=5)
        monkeypatch.undo()
        assert links
        assert not old.closed.done()
        reply = await asking.request(
            m.Confirm(session=old.session, claims=m.pack_claims([(claimed.posting, 1)])), timeout=5 * slack()
        )
        assert isinstance(reply, m.Done)
        assert reply.value == b"", "it is known"


async def test_a_long_question_is_answered_in_slices_and_questions_that_wait_are_bounded() -> None:
    async with node(dead_s=0.2) as here, node() as there, worker(here) as claimant:
        await claimant.ask(m.Echo(node=there.addresses, data=b"x"))
        [old] = here.pool.links
        confirmations, looked = here.forwarder._confirmations, list[int]()
        for _ in range(m.CLAIMS_MAX):
            confirmations.asks(old)
        known = here.registry.unknown_to_us

        def watched(node_id: str, some: Any) -> Any:
            looked.append(len(some))
            return known(node_id, some)

        here.registry.unknown_to_us = watched  # type: ignore[method-assign]
        other = await here._dial(there.addresses, there.node_id)
        asking = next(link for link in there.peers.links if link.session == other.session)
        every = [("a" * 32, number) for number in range(1, m.CLAIMS_MAX + 1)]
        question = m.Confirm(session=old.session, claims=m.pack_claims(every))
        reply = await asking.request(question, timeout=5 * slack())
        assert isinstance(reply, m.Done)
        assert m.unpack_claims(reply.value) == every
        assert max(looked) == SLICE
        assert confirmations._questions.total == 0
        confirmations._questions.limit = len(question.claims)
        first = asyncio.ensure_future(asking.request(question, timeout=5 * slack()))
        await asyncio.sleep(0)  # it is sent first
        with pytest.raises(TooManyPending):
            await asking.request(question, timeout=5 * slack())
        await first


async def test_questions_at_once_are_bounded() -> None:
    """Each may wait for the end of a connection: so many requests of one link, as of its forwarded ones."""
    async with node(requests_max=2, dead_s=5.0) as here, node() as there, worker(here) as claimant:
        await claimant.ask(m.Echo(node=there.addresses, data=b"x"))
        [old] = here.pool.links
        other = await here._dial(there.addresses, there.node_id)
        asking = next(link for link in there.peers.links if link.session == other.session)
        question = m.Confirm(session=old.session, claims=b"")
        waiting = [asyncio.ensure_future(asking.request(question, timeout=5)) for _ in range(2)]
        await until(lambda: here.forwarder.running == 2)
        with pytest.raises(TooManyPending):
            await asking.request(question, timeout=5)
        old.abort("cut by the test")
        for one in waiting:
            assert isinstance(await one, m.Done)
        await until(lambda: here.forwarder.running == 0)


@pytest.mark.parametrize("what", ["no list", "this very connection"])
async def test_questions_that_make_no_sense(what: str) -> None:
    async with node() as here, node() as there, worker(here) as claimant:
        await claimant.ask(m.Echo(node=there.addresses, data=b"x"))
        [link] = here.pool.links
        session = link.session if what == "this very connection" else "0" * 32
        message = m.Confirm(session=session, claims=b"x" if what == "no list" else b"")
        with pytest.raises(ProtocolError):
            await link.request(message, timeout=5)
        assert not link.closed.done()


async def test_a_claim_that_nobody_is_left_to_settle_ends_with_its_lease(tmp_path: Path) -> None:
    """Worker and daemon have ended without a word; the next daemon of the node knows nothing, and cannot deny it."""
    began = asyncio.get_running_loop().time()
    async with node() as there, worker(there) as owner:
        await owner.ask(m.Post(kind="offer", key="r", body=b"body", lease_s=1.5))
        async with Server(small(socket_dir=str(tmp_path))) as here, worker(here) as claimant:
            await claimant.ask(m.Claim(kind="offer", key="r", node=there.addresses))
            here.dispatcher.forwarding.settle = lambda action: None  # type: ignore[method-assign]
            here.pool.links[0].abort()
            await owner.inbox.take(m.PostingEvent, what="orphaned")
        async with Server(small(socket_dir=str(tmp_path))) as here, worker(here) as claimant:
            await claimant.ask(m.Echo(node=there.addresses, data=b"x"))
            assert there.registry.counts().orphans == 1
            await owner.inbox.take(m.PostingEvent, what="expired")
            assert asyncio.get_running_loop().time() - began < 1.5 + 3.0 * slack()
            assert there.registry.counts().orphans == there.registry.counts().claims == 0

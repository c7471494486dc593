"""Nodes and workers that share daemons and must not see each other: namespaces, and lists of who may connect."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvxfer.config import Config
from kvxfer.errors import AuthenticationError, KvxferError, LeaseExpired, NotAllowed, UnknownTransfer, WrongKey
from kvxfer.net.credentials import Credentials
from kvxfer.net.link import Link, LocalIdentity
from kvxfer.server import Server
from kvxfer.wire import messages as m
from tests.nodes import SECRET, Inbox, Worker, node, small, until, worker

A, B = "0a" * 16, "0b" * 16
MINE, YOURS = "mine", "yours"


def offer(key: str = "k", **changes: Any) -> m.Post:
    common: dict[str, Any] = {"kind": "offer", "key": key, "body": b"body", "lease_s": 30.0, "claims_max": 1}
    return m.Post(**(common | changes))


def claim(key: str = "k", **changes: Any) -> m.Claim:
    return m.Claim(**({"kind": "offer", "key": key} | changes))


@asynccontextmanager
async def shared(**changes: Any) -> AsyncIterator[tuple[Server, Worker, Worker]]:
    """A daemon of one namespace that serves another as well, and a worker of each."""
    async with (
        node(namespace=MINE, allow_namespaces=(YOURS,), **changes) as server,
        worker(server, "mine") as mine,
        worker(server, "yours", namespace=YOURS) as yours,
    ):
        yield server, mine, yours
        server.registry.check()


@asynccontextmanager
async def peer(server: Server, namespace: str, node_id: str = A) -> AsyncIterator[Worker]:
    inbox = Inbox()
    facts = LocalIdentity(role="peer", node_id=node_id, incarnation="1d" * 16, namespace=namespace)
    known = Credentials(server.config)
    link = await Link.dial(server.addresses, facts, small(), credentials=known, on_message=inbox.on_message)
    yield Worker(link, inbox)
    await link.aclose("test over")


async def fails(work: Any, kind: type[KvxferError]) -> KvxferError:
    with pytest.raises(kind) as caught:
        await work
    assert type(caught.value) is kind
    return caught.value


async def test_the_same_key_is_two_postings() -> None:
    async with shared() as (_, mine, yours):
        first = await mine.ask(offer(body=b"mine"))
        second = await yours.ask(offer(body=b"yours"))
        assert first.posting != second.posting
        assert (await yours.ask(claim())).body == b"yours"
        assert (await mine.ask(claim())).body == b"mine"


async def test_postings_of_another_namespace_do_not_exist() -> None:
    async with shared() as (server, mine, yours):
        await mine.ask(offer("by-key"))
        ticket = await mine.ask(offer("t", kind="ticket", claims_max=0))
        by_id = {"kind": "ticket", "key": "", "posting": ticket.posting}
        unknown = by_id | {"posting": "f" * 32}
        never = await fails(yours.ask(claim(**unknown, secret=ticket.secret)), UnknownTransfer)
        await fails(yours.ask(claim("by-key")), UnknownTransfer)
        # As if it had never been: not even the right secret tells that it is there.
        for secret in (ticket.secret, b"x" * 16):
            said = await fails(yours.ask(claim(**by_id, secret=secret)), UnknownTransfer)
            assert said.message == never.message
        await fails(mine.ask(claim(**by_id, secret=b"x" * 16)), WrongKey)
        claimed = await mine.ask(claim(**by_id, secret=ticket.secret))
        for message in (
            m.Settle(posting=ticket.posting, claim=claimed.claim, outcome="done"),
            m.Renew(posting=ticket.posting, lease_s=1.0),
            m.Withdraw(posting=ticket.posting),
        ):
            await fails(yours.ask(message), UnknownTransfer)
        assert server.registry.counts().claims == 1


async def test_who_waits_is_not_served_by_another_namespace() -> None:
    async with shared() as (server, mine, yours):
        waiting = fails(yours.ask(claim("late", wait_s=0.3)), UnknownTransfer)
        await mine.ask(offer("late"))
        await waiting
        assert server.registry.counts().claims == 0


async def test_what_has_ended_is_remembered_for_its_own_namespace_only() -> None:
    async with shared() as (_, mine, yours):
        posted = await mine.ask(offer("short", lease_s=0.1))
        await mine.inbox.take(m.PostingEvent, what="expired")
        await fails(mine.ask(claim("short")), LeaseExpired)
        await fails(yours.ask(claim("short")), UnknownTransfer)
        gone = claim("", posting=posted.posting, secret=posted.secret)
        await fails(mine.ask(gone), LeaseExpired)
        await fails(yours.ask(gone), UnknownTransfer)
        await fails(yours.ask(m.Withdraw(posting=posted.posting)), UnknownTransfer)


async def test_mail_stays_in_its_namespace() -> None:
    async with shared() as (server, mine, yours):
        await yours.ask(m.Mail(channel="c", data=b"for you"))
        await mine.ask(m.Listen(channel="c"))
        await mine.ask(m.Mail(channel="c", data=b"for me"))
        assert (await mine.inbox.take(m.Delivery)).data == b"for me"
        await yours.ask(m.Listen(channel="c"))
        told = await yours.inbox.take(m.Delivery)
        assert (told.channel, told.data) == ("c", b"for you")
        assert not mine.inbox.messages
        await yours.ask(m.Unlisten(channel="c"))
        await mine.ask(m.Mail(channel="c", data=b"again"))
        assert (await mine.inbox.take(m.Delivery)).data == b"again"
        assert server.registry.counts().channels == 1


async def test_landings_too() -> None:
    async with shared() as (server, mine, yours):
        land = m.Land(key="k", length=4096, lease_s=5.0)
        assert (await mine.ask(land)).posting != (await yours.ask(land)).posting
        assert server.landings.live == 2
        posted, rest = server.dispatcher.post_own(
            m.Post(kind="landing", key="adopt", body=b"x", lease_s=5.0, claims_max=1), namespace=YOURS
        )
        server.dispatcher.run(rest)
        await fails(mine.ask(claim("adopt", kind="landing")), UnknownTransfer)
        assert (await yours.ask(claim("adopt", kind="landing"))).posting == posted.posting


async def test_peers_see_what_is_theirs() -> None:
    async with shared() as (server, mine, yours), peer(server, MINE, A) as like_us, peer(server, YOURS, B) as other:
        for owner in (mine, yours):
            await owner.ask(offer("k", kind="region", claims_max=0, body=owner.link.name.encode()))
        first, second = await like_us.ask(claim(kind="region")), await other.ask(claim(kind="region"))
        assert first.posting != second.posting
        await fails(other.ask(claim("kvxfer.ping", kind="region")), UnknownTransfer)


async def test_a_guest_reaches_this_node_only() -> None:
    async with shared() as (_, mine, yours), node(namespace=MINE) as elsewhere, worker(elsewhere) as owner:
        await owner.ask(offer())
        for message in (
            claim(),
            m.Mail(channel="c", data=b""),
            m.Land(key="k", length=1, lease_s=1.0),
            m.Echo(data=b"x"),
        ):
            await fails(yours.ask(type(message)(**(fields(message) | {"node": elsewhere.addresses}))), NotAllowed)
        assert (await mine.ask(claim(node=elsewhere.addresses))).body == b"body"


def fields(message: Any) -> dict[str, Any]:
    return {name: getattr(message, name) for name, _ in message.kinds}


async def test_another_namespace_is_refused_from_either_side() -> None:
    async with node(namespace=MINE) as here, node(namespace=YOURS) as there, worker(here) as asker:
        await fails(asker.ask(m.Echo(node=there.addresses, data=b"x")), NotAllowed)
        for server in (here, there):
            assert server.registry.counts().peers == 0
            assert not server.peers.links
        await until(lambda: there.peers.refused == {"not_allowed": 1})
        assert 'kvxfer_links_refused_total{listener="tcp",reason="not_allowed"} 1.0' in there._scrape().body.decode()
        # Nor where it is the acceptor alone that minds.
        with pytest.raises(NotAllowed, match="refused the connection") as caught:
            async with peer(there, MINE):
                pass
        assert "allow_namespaces" in str(caught.value.hint)
        with pytest.raises(NotAllowed):
            async with worker(there, namespace=MINE):
                pass
        assert there.workers.refused == {"not_allowed": 1}


async def test_nodes_that_are_not_listed_are_refused() -> None:
    async with node(allow_nodes=(A,), secret=SECRET) as there:
        async with peer(there, "", A) as listed:
            assert (await listed.ask(m.Echo(data=b"x"))).data == b"x"
        with pytest.raises(NotAllowed, match="not among those"):
            async with peer(there, "", B):
                pass
        tool = LocalIdentity(role="tool")
        with pytest.raises(NotAllowed):
            await Link.dial(there.addresses, tool, small(), credentials=Credentials(there.config))
        assert there.peers.refused == {"not_allowed": 2}
        assert there.registry.counts().peers == 0


async def test_the_list_is_for_those_who_are_dialled_as_well() -> None:
    async with node() as there, node(allow_nodes=(A,)) as here, worker(here) as asker:
        await fails(asker.ask(m.Echo(node=there.addresses, data=b"x")), NotAllowed)
        assert not here.pool.links


async def test_the_list_is_read_after_the_proof() -> None:
    """Who has no secret does not learn who is on it."""
    async with node(allow_nodes=(A,), secret=SECRET) as there:
        for node_id in (A, B):
            facts = LocalIdentity(role="peer", node_id=node_id, incarnation="1d" * 16)
            wrong = Credentials(Config.embedded(secret="another one, as long"))
            with pytest.raises(KvxferError) as caught:
                await Link.dial(there.addresses, facts, small(), credentials=wrong)
            assert caught.value.code == "authentication"


@pytest.mark.parametrize(
    ("ours", "theirs", "fits"),
    [
        (("old",), ("old", "new"), True),
        (("old", "new"), ("new", "old"), True),
        (("new", "old"), ("new",), True),
        (("new",), ("new", "old"), True),
        (("old",), ("new",), False),
        (("old",), ("new", "old"), False),  # two steps at once: nobody proves what the other one knows
    ],
)
async def test_a_secret_is_changed_in_steps(
    ours: tuple[str, ...], theirs: tuple[str, ...], fits: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def written(words: tuple[str, ...]) -> str:
        path = tmp_path_factory.mktemp("s") / "secret"
        path.touch(mode=0o600)
        path.write_text("".join(f"the {word} secret of all nodes\n" for word in words))
        return str(path)

    here, there = node(secret_file=written(ours)), node(secret_file=written(theirs))
    async with here as dialling, there as accepting, worker(dialling) as asker:
        question = asker.ask(m.Echo(node=accepting.addresses, data=b"x"))
        if fits:
            assert (await question).data == b"x"
        else:
            await fails(question, AuthenticationError)

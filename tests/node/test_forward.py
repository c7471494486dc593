"""What goes to other nodes for this node's workers, when routes were lost, peers lie, or a worker asks too much."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvxfer.errors import PeerUnreachable, ProtocolError, TooManyPending
from kvxfer.net.link import Link
from kvxfer.node.server import Server
from kvxfer.wire import messages as m
from kvxfer.wire.codec import Message
from tests.nodes import fast, node, small, until, worker


async def restartable(stack: AsyncExitStack, directory: Path) -> Server:
    """A daemon whose node id stays the same when it starts again."""
    return await stack.enter_async_context(Server(small(socket_dir=str(directory))))


async def test_settlement_reaches_the_owner_after_the_claimants_daemon_restarted(tmp_path: Path) -> None:
    offer = m.Post(kind="offer", key="request", body=b"body", lease_s=30.0, claims_max=1)
    async with node() as there, worker(there) as owner:
        await owner.ask(offer)
        async with AsyncExitStack() as stack:
            here = await restartable(stack, tmp_path)
            async with worker(here) as claimant:
                claimed = await claimant.ask(m.Claim(kind="offer", key="request", node=there.addresses))
                here.pool.links[0].abort()  # a daemon that is killed says nothing
                await owner.inbox.take(m.PostingEvent, what="orphaned")
                here.dispatcher.forwarding.settle = lambda action: None  # type: ignore[method-assign]
        async with AsyncExitStack() as stack:
            here = await restartable(stack, tmp_path)
            async with worker(here) as claimant:
                settle = m.Settle(
                    node=there.addresses, posting=claimed.posting, claim=claimed.claim, outcome="failed", code="timeout"
                )
                await claimant.ask(settle)
                assert (await owner.inbox.take(m.PostingEvent, what="settled")).code == "timeout"
                await claimant.ask(settle)  # once more is harmless
        for server in (here, there):
            server.registry.check()


async def test_settlement_for_a_node_that_is_gone_is_an_error_and_leaves_nothing() -> None:
    async with node(**fast()) as here, worker(here) as claimant:
        lost = m.Settle(node=("127.0.0.1:1",), posting="a" * 32, claim=1, outcome="done")
        with pytest.raises(PeerUnreachable):
            await claimant.ask(lost)
        assert here.dispatcher.forwarding.running == 0  # type: ignore[attr-defined]


async def test_requests_to_other_nodes_are_bounded_per_worker() -> None:
    async with node(requests_max=4) as here, node() as there, worker(here, config=small()) as greedy:
        wait = m.Claim(kind="offer", key="never", node=there.addresses, wait_s=20.0)
        waiting = [asyncio.ensure_future(greedy.link.request(wait, timeout=30)) for _ in range(4)]
        await until(lambda: there.registry.counts().waiting == 4)
        with pytest.raises(TooManyPending):
            await greedy.ask(wait)
        settle = m.Settle(node=there.addresses, posting="a" * 32, claim=1, outcome="done")
        with pytest.raises(TooManyPending):
            await greedy.ask(settle)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_nothing_is_claimed_for_a_worker_that_ended_while_its_peer_was_dialled() -> None:
    """An offer has one place: a claim for a dead worker would use it up."""
    async with node() as here, node() as there, worker(there) as owner:
        await owner.ask(m.Post(kind="offer", key="request", lease_s=30.0, claims_max=1))
        dial, dialled, go_on = here.pool._dial, asyncio.Event(), asyncio.Event()

        async def slow(*arguments: Any) -> Link:
            dialled.set()
            await go_on.wait()
            return await dial(*arguments)

        here.pool._dial = slow
        async with worker(here) as claimant:
            claimant.link.notify(m.Claim(kind="offer", key="request", node=there.addresses))
            await dialled.wait()
        await until(lambda: not here.workers.links)
        go_on.set()
        await until(lambda: here.dispatcher.forwarding.running == 0)  # type: ignore[attr-defined]
        async with worker(here) as other:
            await other.ask(m.Claim(kind="offer", key="request", node=there.addresses))


async def liar(answer: Any) -> tuple[Any, tuple[str, ...]]:
    """A peer daemon that answers each claim with what ``answer`` makes of the true answer."""
    stack = AsyncExitStack()
    there = await stack.enter_async_context(node())
    owner = await stack.enter_async_context(worker(there))
    await owner.ask(m.Post(kind="region", key="r", body=b"body", lease_s=0.0, claims_max=0))
    send = Link.send

    def lie(link: Link, message: Message) -> None:
        send(link, answer(message) if isinstance(message, m.Claimed) and link in there.peers.links else message)

    ready = there.peers._on_ready

    def turned(link: Link) -> None:
        link.send = lambda message: lie(link, message)  # type: ignore[method-assign]
        ready(link)

    there.peers._on_ready = turned
    return stack, there.addresses


@pytest.mark.parametrize(
    "answer",
    [
        lambda claimed: replace(claimed, node_id="9" * 32),
        lambda claimed: m.Done(rid=claimed.rid),
        lambda claimed: m.EchoReply(rid=claimed.rid, data=b"x"),
    ],
    ids=["another node's", "done", "echo"],
)
async def test_peer_that_answers_a_claim_with_something_else_is_dropped(answer: Any) -> None:
    stack, addresses = await liar(answer)
    async with stack, node() as here, worker(here) as claimant:
        with pytest.raises(ProtocolError):
            await claimant.ask(m.Claim(kind="region", key="r", node=addresses))
        assert here.registry.counts().routes == 0
        assert not here.pool.links
        here.registry.check()

"""What goes to other nodes for this node's workers, when routes were lost, peers lie, or a worker asks too much."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvxfer.daemon.forward import _waiting_less
from kvxfer.daemon.pool import BREAKER_FAILURES, CLOSED
from kvxfer.errors import KvxferError, PeerUnreachable, ProtocolError, TooManyPending
from kvxfer.net.link import Link
from kvxfer.server import Server
from kvxfer.wire import messages as m
from kvxfer.wire.codec import Message
from tests.nodes import fast, node, small, until, worker
from tests.support.frames import CONTROL
from tests.support.proxy import proxy


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
        go_on = asyncio.Event()
        get = here.pool.get

        async def later(*args: Any, **more: Any) -> Link:
            await go_on.wait()
            return await get(*args, **more)

        here.pool.get = later  # type: ignore[method-assign]
        asking = [asyncio.ensure_future(greedy.ask(m.Echo(node=there.addresses, data=b"x"))) for _ in range(4)]
        await until(lambda: here.forwarder.running == 4)
        with pytest.raises(TooManyPending) as refused:
            await greedy.ask(m.Echo(node=there.addresses, data=b"x"))
        assert (refused.value.fields["option"], refused.value.fields["limit"]) == ("requests_max", 4)
        assert refused.value.retryable
        settle = m.Settle(node=there.addresses, posting="a" * 32, claim=1, outcome="done")
        with pytest.raises(TooManyPending):
            await greedy.ask(settle)
        go_on.set()
        await asyncio.gather(*asking)
        await until(lambda: here.forwarder.running == 0)


async def test_claims_that_wait_for_one_node_keep_nobody_from_asking_another() -> None:
    """More than there may be unanswered requests, over both links on the way, of one worker and of many."""
    limits = {"requests_max": 4, "waiting_max": 90}
    async with node(**limits) as here, node() as full, node() as free, worker(free) as owner, AsyncExitStack() as stack:
        many = [await stack.enter_async_context(worker(here, config=small(**limits))) for _ in range(4)]
        wait = m.Claim(kind="offer", key="never", node=full.addresses, wait_s=30.0)
        waiting = [asyncio.ensure_future(one.ask(wait, timeout=30)) for one in many for _ in range(16)]
        await until(lambda: full.registry.counts().waiting == 64)
        for number, one in enumerate(many):
            assert (await one.ask(m.Echo(node=free.addresses, data=b"x"))).data == b"x"
            assert (await one.ask(m.Echo(node=full.addresses, data=b"x"))).data == b"x"
            await owner.ask(m.Post(kind="offer", key=f"k{number}", lease_s=30.0, claims_max=1))
            claimed = await one.ask(m.Claim(kind="offer", key=f"k{number}", node=free.addresses, wait_s=5.0))
            await one.ask(m.Settle(node=free.addresses, posting=claimed.posting, claim=claimed.claim, outcome="done"))
        assert not any(one.done() for one in waiting), "who waits is not refused"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await until(lambda: here.forwarder.running == 0 and full.registry.counts().waiting == 0)


async def test_places_of_those_who_wait_elsewhere_are_shared_by_worker_and_node() -> None:
    async with node(waiting_max=20) as here, node() as one, node() as other, worker(here, config=small()) as first:
        wait = m.Claim(kind="offer", key="never", node=one.addresses, wait_s=30.0)
        waiting = [asyncio.ensure_future(first.ask(wait, timeout=30)) for _ in range(18)]
        await until(lambda: one.registry.counts().waiting == 18)
        waiting.append(asyncio.ensure_future(first.ask(wait, timeout=30)))
        with pytest.raises(TooManyPending, match="18 of 20") as refused:
            await waiting.pop()
        assert refused.value.fields["option"] == "waiting_max"
        async with worker(here, config=small()) as second:
            waiting.append(asyncio.ensure_future(first.ask(replace(wait, node=other.addresses), timeout=30)))
            await until(lambda: other.registry.counts().waiting == 1)
            waiting.append(asyncio.ensure_future(second.ask(wait, timeout=30)))
            await until(lambda: one.registry.counts().waiting == 19)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        await until(lambda: here.forwarder.running == 0)


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


async def test_a_claim_that_waits_is_not_refused_because_its_node_was_away_until_now() -> None:
    async with node(reconnect_min_s=0.5) as here, worker(here) as claimant:
        async with node() as before:
            address = before.addresses[0]
        wanted = m.Claim(kind="offer", key="request", node=(address,))
        for _ in range(BREAKER_FAILURES):
            with pytest.raises(PeerUnreachable):
                await claimant.ask(wanted)
        async with node(listen=address) as there, worker(there) as owner:
            await owner.ask(m.Post(kind="offer", key="request", lease_s=30.0, claims_max=1))
            with pytest.raises(PeerUnreachable, match="in a row"):  # without time: at once
                await claimant.ask(wanted)
            claimed = await claimant.ask(replace(wanted, wait_s=20.0), timeout=25)
            assert isinstance(claimed, m.Claimed)
            assert here.pool.states()[CLOSED] == 1


def test_what_reaching_a_node_took_is_a_part_of_the_wait() -> None:
    asked = m.Claim(kind="offer", key="r", wait_s=2.0)
    assert _waiting_less(asked, asked, 0.001) is asked
    assert _waiting_less(asked, asked, 0.5).wait_s == 1.5
    assert _waiting_less(asked, asked, 5.0).wait_s == 0.0
    assert _waiting_less(m.Echo(), m.Echo(), 5.0) == m.Echo()


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


async def waits_elsewhere(
    here: Server, there: Server, key: str = "request"
) -> tuple[AsyncExitStack, asyncio.Task[Any]]:
    """A worker of ``here`` that waits for an offer which ``there`` does not have yet."""
    stack = AsyncExitStack()
    asker = await stack.enter_async_context(worker(here))
    claim = m.Claim(kind="offer", key=key, node=there.addresses, wait_s=20.0)
    asked = asyncio.create_task(asker.link.request(claim, timeout=30))
    await until(lambda: there.registry.counts().waiting == 1)
    return stack, asked


@pytest.mark.parametrize("how", ["worker dies", "worker gives up"])
async def test_claim_that_waits_elsewhere_is_given_up_with_its_worker(how: str) -> None:
    """The offer that comes afterwards is for those who still want it."""
    async with node() as here, node() as there, worker(there) as owner, worker(here) as other:
        stack, asked = await waits_elsewhere(here, there)
        async with stack:
            if how == "worker gives up":
                asked.cancel()
            else:
                await stack.aclose()
            await asyncio.wait([asked])
            await until(lambda: there.registry.counts().waiting == 0)
            await until(lambda: here.forwarder.running == 0)
            await owner.ask(m.Post(kind="offer", key="request", lease_s=30.0, claims_max=1))
            claimed = await other.ask(m.Claim(kind="offer", key="request", node=there.addresses))
            assert claimed.claim == 1
        assert here.late_replies == 0


async def test_claim_that_waits_at_its_own_node_is_given_up() -> None:
    async with node() as there, worker(there) as owner:
        stack, asked = await waits_elsewhere(there, there)
        async with stack:
            asked.cancel()
            await until(lambda: there.registry.counts().waiting == 0)
            await owner.ask(m.Post(kind="offer", key="request", lease_s=30.0, claims_max=1))
            assert there.registry.counts().claims == 0


async def test_giving_up_what_does_not_wait_is_counted_and_harmless() -> None:
    async with node() as there, worker(there) as asker:
        asker.link.send(m.GiveUp(request=77))
        await asker.ask(m.Echo(data=b"alive"))
        assert there.registry.unexpected == {("give_up", "unknown_request"): 1}


async def test_settlement_that_a_partition_swallowed_is_repeated() -> None:
    """Its worker has gone on meanwhile; the owner would keep the claim until its lease ends."""
    quick = fast(handshake_s=0.3, connect_s=0.3, reconnect_min_s=0.05)
    async with node(**quick) as here, node(**quick) as there, worker(there) as owner:
        port = int(there.addresses[0].rpartition(":")[2])
        async with proxy(("127.0.0.1", port), CONTROL) as between, worker(here) as claimant:
            await owner.ask(m.Post(kind="offer", key="request", lease_s=600.0, claims_max=1))
            claimed = await claimant.ask(m.Claim(kind="offer", key="request", node=(between.endpoint,)))
            between.black_hole()
            between.refusing = True
            settle = m.Settle(posting=claimed.posting, claim=claimed.claim, outcome="failed", code="timeout")
            with pytest.raises(KvxferError):
                await claimant.ask(settle)
            await until(lambda: len(here.forwarder.unsettled) == 1)
            await owner.inbox.take(m.PostingEvent, what="orphaned")
            between.refusing = False
            between.heal()
            assert (await owner.inbox.take(m.PostingEvent, 10, what="settled")).code == "timeout"
            await until(lambda: len(here.forwarder.unsettled) == 0)
        assert there.registry.counts().claims == 0


async def test_what_still_runs_at_the_end_of_the_grace_is_cancelled_on_both_sides() -> None:
    """A daemon that drains tells its own workers and, for their claims elsewhere, the other node."""
    async with node() as there, worker(there) as owner:
        async with node(drain_s=0.05) as here, worker(here) as claimant, worker(here) as owner_here:
            for who, key in ((owner, "there"), (owner_here, "here")):
                await who.ask(m.Post(kind="offer", key=key, lease_s=30.0, claims_max=1))
            elsewhere = await claimant.ask(m.Claim(kind="offer", key="there", node=there.addresses))
            own = await claimant.ask(m.Claim(kind="offer", key="here"))
            assert not await here.drain()
            for claimed in (elsewhere, own):
                told = await claimant.inbox.take(m.PostingEvent, posting=claimed.posting)
                assert (told.what, told.code) == ("withdrawn", "peer_draining")
            for who, claimed in ((owner, elsewhere), (owner_here, own)):
                settled = await who.inbox.take(m.PostingEvent, what="settled", posting=claimed.posting)
                assert settled.code == "peer_draining"
            here.registry.check()
            assert not here.registry.counts().routes
        there.registry.check()

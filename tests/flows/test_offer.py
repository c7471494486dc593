"""`Landing` against peers that lie, daemons that go and clients that close."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvxfer.client import Client
from kvxfer.dataplane.plane import Part
from kvxfer.deadline import Deadline
from kvxfer.errors import (
    ClosedError,
    KvxferError,
    PeerLost,
    ProtocolError,
    TransferCancelled,
    TransferTimeout,
    UsageError,
)
from kvxfer.flows.control import ClaimHandle
from kvxfer.flows.exchange import Posting
from kvxfer.flows.offer import Landing
from kvxfer.native.engine import Event, EventKind, OpKind
from kvxfer.testing.nodes import make_cache, scattered, small_geometry, two_nodes
from kvxfer.wire import tags
from kvxfer.wire.messages import Claim, PostingEvent
from tests.conftest import slack
from tests.nodes import until

TABLE = scattered(1, 8, 40, 16)


class Liar:
    """A pusher that says what it likes."""

    def __init__(self, client: Client, claim: ClaimHandle, peer: Posting) -> None:
        self.client, self.claim, self.peer = client, claim, peer

    async def say(self, kind: int, claim: int, layer: int = 0, value: int = 0) -> None:
        tag = tags.pack(kind, claim, layer)
        part = Part(kind=OpKind.PUT, region=0, descriptor=self.peer.descriptors[0], notify=(tag, value))
        await self.client.plane.start([part], timeout=5, peer="liar")

    def settle(self, outcome: str) -> None:
        self.client.control.settle_in_background(self.claim, outcome, None)


async def liar(a: Client, b: Client) -> Liar:
    message = Claim(node=b.addresses, kind="offer", key="r", wait_s=1)
    claim, body = await a.control.claim(message, Deadline.after(5), lambda _: None)
    return Liar(a, claim, Posting.unpack(body))


async def offered(b: Client, **options: Any) -> Landing:
    return b.offer("r", await make_cache(b, small_geometry(), 8), TABLE, **options)


@pytest.mark.parametrize(("layers", "said"), [([], 0), ([], 3), ([0, 1], 2), ([0, 1, 2], 2), ([0, 1, 2], 2**64 - 1)])
async def test_a_commit_counts_only_with_every_layer(layers: list[int], said: int) -> None:
    async with two_nodes(["shm"]) as (a, b), await offered(b) as landing:
        peer = await liar(a, b)
        for layer in layers:
            await peer.say(tags.LAYER, 1, layer)
        await peer.say(tags.COMMIT, 1, value=said)
        with pytest.raises(ProtocolError):
            await asyncio.wait_for(landing.wait(), 5)
        assert not landing.committed


@pytest.mark.parametrize("what", ["expired", "withdrawn", "lost", "settled"])
async def test_a_commit_that_was_acknowledged_in_the_last_moment_counts(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_nodes(["shm"]) as (a, b), await offered(b) as landing:
        peer, engine = await liar(a, b), b.plane.engine
        for layer in range(3):
            await peer.say(tags.LAYER, 1, layer)
        drain, revoke = b.plane.drain, engine.revoke
        order: list[str] = []
        commit = tags.pack(tags.COMMIT, 1, 0)

        def late() -> None:
            drain()
            if "revoke" in order:  # it came between the look before and the revoke, which it was quicker than
                landing._on_data(Event(EventKind.NOTIFY, 0, 0, 1, commit, 3, 0, 0, -1))
            order.append("drain")

        def revoked(grant: int) -> Any:
            order.append("revoke")
            return revoke(grant)

        monkeypatch.setattr(b.plane, "drain", late)
        monkeypatch.setattr(engine, "revoke", revoked)
        landing._on_posting(PostingEvent(posting=landing._posting.posting, claim=1, what=what))  # type: ignore[union-attr]
        await asyncio.wait_for(landing.wait(), 5)
        assert landing.committed
        assert order[0] == "drain"
        assert order[-1] == "drain"
        assert set(order[1:-1]) == {"revoke"}


async def test_tags_that_make_no_sense_are_counted_and_change_nothing() -> None:
    async with two_nodes(["shm"]) as (a, b), await offered(b) as landing:
        peer = await liar(a, b)
        await peer.say(tags.LAYER, 1, 0)
        nonsense = [(tags.LAYER, 2, 1), (tags.LAYER, 0, 1), (tags.LAYER, tags.CLAIM_MAX, 2), (tags.LAYER, 1, 3)]
        nonsense += [(tags.LAYER, 1, tags.LAYER_MAX), (tags.LAYER, 1, 0), (tags.RELEASE, 1, 0), (255, 1, 0), (0, 1, 0)]
        nonsense += [(tags.COMMIT, 7, 0), (tags.ABORT, 7, 0)]
        for kind, claim, layer in nonsense:
            await peer.say(kind, claim, layer, 3)
        for layer in (1, 2):
            await peer.say(tags.LAYER, 1, layer)
        await peer.say(tags.COMMIT, 1, value=3)
        assert [layer async for layer in landing] == [0, 1, 2]
        assert b.plane.unexpected_notifications == len(nonsense)


async def test_a_push_that_says_done_without_a_commit_is_a_liar() -> None:
    async with two_nodes(["shm"]) as (a, b), await offered(b) as landing:
        peer = await liar(a, b)
        await peer.say(tags.LAYER, 1, 0)
        peer.settle("done")
        with pytest.raises(ProtocolError, match="committed"):
            await asyncio.wait_for(landing.wait(), 5)


async def test_an_abort_on_the_data_path_is_enough() -> None:
    async with two_nodes(["shm"]) as (a, b), await offered(b) as landing:
        await (await liar(a, b)).say(tags.ABORT, 1)
        with pytest.raises(TransferCancelled):
            await asyncio.wait_for(landing.wait(), 5)


async def test_a_commit_in_the_ring_beats_bad_news_and_the_deadline() -> None:
    async with two_nodes(["tcp"]) as (a, b), await offered(b) as landing:
        peer = await liar(a, b)
        for layer in range(3):
            await peer.say(tags.LAYER, 1, layer)
        # From here on the loop does not look: the commit waits in the ring while the news is told.
        engine, events = b.plane.engine, []
        drain, engine._drain_once = engine._drain_once, lambda *_: events.append(0) or 0
        await peer.say(tags.COMMIT, 1, value=3)
        engine._drain_once = drain
        landing._on_posting(PostingEvent(posting="0" * 32, claim=1, what="lost"))
        await landing.wait()
        assert landing.committed


@pytest.mark.parametrize("how", ["wait", "iterate"])
async def test_closing_the_client_ends_a_landing_that_is_waited_for(how: str) -> None:
    async with two_nodes(["shm"]) as (_, b):
        landing = await (await offered(b)).__aenter__()
        waiting = asyncio.ensure_future(landing.wait() if how == "wait" else anext(landing))
        await asyncio.sleep(0)
        await b.aclose()
        with pytest.raises(ClosedError):
            await asyncio.wait_for(waiting, 5)
        await landing.__aexit__(None, None, None)
        assert (b.reservations.pinned_blocks, b.reservations.quarantined_blocks) == (0, 0)


async def test_an_offer_is_entered_once() -> None:
    async with two_nodes(["shm"]) as (_, b):
        landing = await offered(b)
        async with landing:
            with pytest.raises(UsageError):
                await landing.__aenter__()
        with pytest.raises(UsageError):
            await landing.__aenter__()
        assert b.plane.engine.counters().grants == 0


async def test_the_deadline_counts_while_the_offer_is_being_made() -> None:
    async with two_nodes(["shm"]) as (_, b):
        landing = await offered(b, timeout=0.01)
        request = b.control._link.request

        async def slowly(*arguments: Any, **options: Any) -> Any:
            await asyncio.sleep(0.05)
            return await request(*arguments, **options)

        b.control._link.request = slowly
        async with landing:
            with pytest.raises(TransferTimeout):
                await landing.wait()
        await until(lambda: not b.control._postings)


async def test_a_vanished_peer_of_an_earlier_request_does_not_touch_the_next_one() -> None:
    async with two_nodes(["shm"]) as (a, b):
        cache = await make_cache(b, small_geometry(), 8)
        async with b.offer("r", cache, TABLE) as landing:
            await (await liar(a, b)).say(tags.LAYER, 1, 0)
            old = landing._grants[0][1]
        async with b.offer("r", cache, TABLE) as landing:
            b.plane._on_event(
                Event(kind=8, status=0, token=0, id=old, tag=0, value=0, bytes=0, sys_errno=0, segment=-1)
            )
            await asyncio.sleep(0.01)
            assert landing._error is None


async def test_cancelled_after_the_commit_but_before_the_daemon_s_answer_it_gives_everything_back() -> None:
    async with two_nodes(["shm"]) as (a, b):
        landing = await offered(b)
        entering = asyncio.ensure_future(landing.__aenter__())
        real = b.control.post

        async def slow(*arguments: Any, **options: Any) -> Any:
            handle = await real(*arguments, **options)
            await asyncio.Event().wait()
            return handle

        b.control.post = slow  # type: ignore[method-assign]
        peer = await liar(a, b)
        for layer in range(3):
            await peer.say(tags.LAYER, 1, layer)
        await peer.say(tags.COMMIT, 1, value=3)
        await until(lambda: landing.committed)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        await until(lambda: b.reservations.live == ())
        await until(lambda: b.plane.engine.counters().grants == 0)


def vanished(landing: Landing) -> None:
    landing._on_data(Event(EventKind.GRANT_LOST, 0, 0, 1, 0, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("outcome", "error", "wanted"),
    [
        ("cancelled", None, TransferCancelled),
        ("failed", ClosedError("its client was closed"), TransferCancelled),
        ("failed", UsageError("it was left early"), TransferCancelled),
        ("failed", PeerLost("it died"), PeerLost),
    ],
)
async def test_why_the_pusher_ended_is_told_although_its_connection_ended_first(
    outcome: str, error: KvxferError | None, wanted: type[KvxferError]
) -> None:
    async with two_nodes(["shm"]) as (a, b), await offered(b) as landing:
        peer = await liar(a, b)
        await until(lambda: landing._incoming.writers)
        vanished(landing)
        vanished(landing)
        a.control.settle_in_background(peer.claim, outcome, error)
        with pytest.raises(KvxferError) as found:
            await asyncio.wait_for(landing.wait(), 5)
        assert type(found.value) is wanted


async def test_a_pusher_that_vanished_without_a_word_is_lost_within_two_seconds() -> None:
    async with two_nodes(["shm"]) as (a, b), await offered(b) as landing:
        await liar(a, b)
        await until(lambda: landing._incoming.writers)
        vanished(landing)
        with pytest.raises(PeerLost, match="vanished"):
            await asyncio.wait_for(landing.wait(), 2 * slack())


async def test_a_pusher_that_comes_back_over_another_connection_goes_on() -> None:
    async with two_nodes(["shm"]) as (a, b), await offered(b) as landing:
        peer = await liar(a, b)
        await until(lambda: landing._incoming.writers)
        vanished(landing)
        for layer in range(3):
            await peer.say(tags.LAYER, 1, layer)
        assert landing._vanished is not None
        landing._vanished.cancel()
        landing._lost()
        await peer.say(tags.COMMIT, 1, value=3)
        await asyncio.wait_for(landing.wait(), 5)


async def test_a_pusher_of_whom_no_daemon_can_tell_is_lost_at_once() -> None:
    async with two_nodes(["shm"]) as (a, b), await offered(b) as landing:
        peer = await liar(a, b)
        await peer.say(tags.LAYER, 1, 0)
        landing._on_posting(PostingEvent(posting="0" * 32, claim=1, what="orphaned"))
        assert landing._error is None
        a.plane.forget(peer.peer.descriptors[0])
        await until(lambda: not landing._attached())
        vanished(landing)
        with pytest.raises(PeerLost):
            await landing.wait()

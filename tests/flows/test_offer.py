"""`Landing` against peers that lie, daemons that go and clients that close."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kvxfer.client import Client
from kvxfer.dataplane.plane import WorkRequest
from kvxfer.embedded import local
from kvxfer.errors import (
    ClosedError,
    GeometryMismatch,
    Incomplete,
    KvxferError,
    OverlapError,
    PeerLost,
    ProtocolError,
    TransferCancelled,
    TransferTimeout,
    UnknownTransfer,
    UsageError,
    WrongKey,
)
from kvxfer.flows.control import ClaimHandle
from kvxfer.flows.exchange import TransferOffer
from kvxfer.flows.offer import Landing
from kvxfer.flows.push import Push
from kvxfer.geometry import BlockTable
from kvxfer.memory.region import KVCache
from kvxfer.native.engine import Event, EventKind, OpKind
from kvxfer.tasks import Deadline
from kvxfer.wire import tags
from kvxfer.wire.messages import Claim, Claimed, PostingEvent
from tests.conftest import slack
from tests.nodes import until
from tests.support.nodes import make_cache, scattered, small_geometry, tokens_of, two_nodes

TABLE = scattered(1, 8, 40, 16)


class Liar:
    """A pusher that says what it likes."""

    def __init__(self, client: Client, claim: ClaimHandle, peer: TransferOffer) -> None:
        self.client, self.claim, self.peer = client, claim, peer

    async def say(self, kind: int, claim: int, layer: int = 0, value: int = 0) -> None:
        tag = tags.pack(kind, claim, layer)
        part = WorkRequest(kind=OpKind.PUT, region=0, descriptor=self.peer.descriptors[0], notify=(tag, value))
        await self.client.plane.start([part], timeout=5, peer="liar")

    def settle(self, outcome: str) -> None:
        self.client.control.report_in_background(self.claim, outcome, None)


async def liar(a: Client, b: Client) -> Liar:
    message = Claim(node=b.addresses, kind="offer", key="r", wait_s=1)
    claim, body = await a.control.claim(message, Deadline.after(5), lambda _: None)
    return Liar(a, claim, TransferOffer.unpack(body))


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
        nonsense += [(tags.COMMIT, 7, 0), (4, 7, 0)]
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
        a.control.report_in_background(peer.claim, outcome, error)
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
        a.plane.drop_import(peer.peer.descriptors[0])
        await until(lambda: not landing._attached())
        vanished(landing)
        with pytest.raises(PeerLost):
            await landing.wait()


# -- several pushes into one offer ------------------------------------------------------------------------------------

HEADS = 4
PARTS = scattered(3, 8, 40, 16)


async def rank(client: Client, heads: range, fill: int, **changes: Any) -> KVCache:
    """The cache of one rank, every byte of it ``fill``."""
    held = {"kv_heads": len(heads), "head_start": heads.start, "kv_heads_total": HEADS}
    made = await make_cache(client, small_geometry(**held, **changes), 8)
    made.regions[0].array[:] = fill
    return made


async def offered_by(client: Client) -> Landing:
    return client.offer("r", await rank(client, range(HEADS), 0), PARTS, timeout=20)


async def pushed(client: Client, to: Client, cache: KVCache, request: str = "r", **options: Any) -> Push:
    async with client.push(request, to=to.addresses, cache=cache, table=PARTS, timeout=10, **options) as push:
        await push.layers()
    return push


async def test_the_deadline_names_what_is_missing() -> None:
    async with two_nodes(["shm"]) as (a, b):
        sink, source = await rank(b, range(4), 0), await rank(a, range(1), 7)
        async with b.offer("r", sink, PARTS, timeout=0.7) as landing:
            push = await pushed(a, b, source)
            assert push.bytes_done == 3 * 2 * 40 * 8 * 4
            assert not landing.committed
            with pytest.raises(Incomplete, match="missing heads 1-3; 1 of 1 pushes committed") as found:
                await landing.wait()
            assert isinstance(found.value, TransferTimeout)
            assert found.value.fields["missing"] == "heads 1-3"
            assert found.value.fields["layers_arrived"] == 0
            with pytest.raises(Incomplete):
                await landing.layer(0)
            assert not landing.committed
        await until(lambda: b.reservations.live == ())


async def test_what_is_no_table_is_refused() -> None:
    async with two_nodes(["shm"]) as (_, b):
        cache = await rank(b, range(4), 0)
        with pytest.raises(UsageError, match="BlockTable"):
            b.offer("r", cache, [1, 2])  # type: ignore[arg-type]


async def test_a_landing_that_nobody_pushed_says_so() -> None:
    async with two_nodes(["shm"]) as (_, b):
        async with b.offer("r", await rank(b, range(4), 0), PARTS, timeout=0.2) as landing:
            with pytest.raises(TransferTimeout) as found:
                await landing.wait()
        assert type(found.value) is TransferTimeout
        assert found.value.fields["missing"] == "parts 0-1, heads 0-3, tokens 0-39 of layers 0-2"
        assert found.value.fields["pushes"] == 0


async def test_what_is_missing_after_the_last_expected_push_is_an_error_at_once() -> None:
    async with two_nodes(["shm"]) as (a, b):
        caches = [await rank(a, heads, 7) for heads in (range(2), range(2, 3))]
        async with b.offer("r", await rank(b, range(4), 0), PARTS, timeout=60, sources=2) as landing:
            for cache in caches:
                await pushed(a, b, cache)
            with pytest.raises(Incomplete, match="missing head 3"):
                await asyncio.wait_for(landing.wait(), 5)
        for sources in (0, True, "2"):
            with pytest.raises(UsageError, match="sources"):
                b.offer("r", caches[0], PARTS, sources=sources)  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_pusher_that_has_left_does_not_end_what_others_write(transport: str) -> None:
    async with two_nodes([transport]) as (a, b):
        sink, last = await rank(b, range(4), 0), await rank(a, range(2, 4), 2)
        async with b.offer("r", sink, PARTS, timeout=20) as landing:
            async with a.push("r", to=b.addresses, cache=last, table=PARTS) as push:
                async with local(transports=(transport,)) as other:
                    await pushed(other, b, await rank(other, range(2), 1))
                # Its client, its engine and its daemon are gone, and nothing else is attached but a push that waits.
                for layer in range(3):
                    await push.layer(layer)
                    if layer < 2:
                        await landing.layer(layer)
            assert [layer async for layer in landing] == [0, 1, 2]
        for layer in range(3):
            found = tokens_of(sink, PARTS, layer).view(np.uint8)
            assert (found[:, :, :2] == 1).all()
            assert (found[:, :, 2:] == 2).all()


async def test_a_pusher_that_dies_right_after_its_commit_has_done_its_part() -> None:
    """It could not even say that it was done: its landing has said so."""
    async with two_nodes(["shm"]) as (a, b), await offered_by(b) as landing:
        first, last = await rank(a, range(2), 1), await rank(a, range(2, 4), 2)
        push = a.push("r", to=b.addresses, cache=first, table=PARTS)
        await push.__aenter__()
        await push.layers()
        claim = push._claim
        assert claim is not None
        settle, said = a.control.report_in_background, []
        a.control.report_in_background = lambda *what: said.append(what)  # type: ignore[method-assign]
        await push.__aexit__(None, None, None)
        assert said
        await until(lambda: landing._incoming.committed)
        a.control.report_in_background = settle  # type: ignore[method-assign]
        settle(claim, "failed", PeerLost("it died"))
        await pushed(a, b, last)
        await landing.wait()


async def test_a_push_that_fails_ends_the_landing_whatever_others_wrote() -> None:
    async with two_nodes(["shm"]) as (a, b):
        first, second = await rank(a, range(2), 1), await rank(a, range(2, 4), 2)
        async with b.offer("r", await rank(b, range(4), 0), PARTS, timeout=20) as landing:
            await pushed(a, b, first)
            with pytest.raises(ZeroDivisionError):
                async with a.push("r", to=b.addresses, cache=second, table=PARTS) as push:
                    await push.layer(0)
                    raise ZeroDivisionError
            with pytest.raises(TransferCancelled):
                await asyncio.wait_for(landing.wait(), 5)
            with pytest.raises(KvxferError):
                await pushed(a, b, second, wait_s=0.1)


async def test_writers_that_overlap_are_refused_before_a_byte_moves() -> None:
    async with two_nodes(["shm"]) as (a, b):
        sink = await rank(b, range(4), 0)
        first, odd, last = [await rank(a, heads, heads.start + 1) for heads in (range(2), range(1, 3), range(2, 4))]
        async with b.offer("r", sink, PARTS, timeout=20) as landing:
            await pushed(a, b, first)
            with pytest.raises(OverlapError, match="head 1") as found:
                await pushed(a, b, odd)
            assert not found.value.retryable
            assert not tokens_of(sink, PARTS, 0)[:, :, 2:].any()
            await pushed(a, b, last)
            await landing.wait()
        assert (tokens_of(sink, PARTS, 2).view(np.uint8)[:, :, :2] == 1).all()


async def test_a_push_of_something_else_is_refused_and_named() -> None:
    async with two_nodes(["shm"]) as (a, b):
        sink, other, right = await rank(b, range(2), 0), await rank(a, range(2, 4), 9), await rank(a, range(2), 1)
        async with b.offer("r", sink, PARTS, timeout=20) as landing:
            with pytest.raises(GeometryMismatch, match="nothing in common") as found:
                await pushed(a, b, other)
            assert "heads 2-3" in str(found.value)
            assert "heads 0-1" in str(found.value)
            await pushed(a, b, right)
            await landing.wait()


async def test_a_copy_that_comes_late_has_nothing_to_do() -> None:
    async with two_nodes(["shm"]) as (a, b), local(transports=("shm",)) as other:
        caches = [await rank(client, range(4), 1) for client in (a, other)]
        async with b.offer("r", await rank(b, range(4), 0), PARTS) as landing:
            await asyncio.gather(landing.wait(), pushed(a, b, caches[0]))
        await until(lambda: b.reservations.live == ())
        push = await pushed(other, b, caches[1])
        assert push.covered
        assert not push.bytes_done


async def test_stages_push_the_layers_that_the_other_side_has() -> None:
    stage = {"layers": 4, "layers_total": 8}
    async with two_nodes(["shm"]) as (a, b):
        sink = await rank(b, range(4), 0, layers=3, first_layer=2, layers_total=8)
        first, last = await rank(a, range(4), 1, **stage), await rank(a, range(4), 2, first_layer=4, **stage)
        async with b.offer("r", sink, PARTS) as landing:
            async with a.push("r", to=b.addresses, cache=first, table=PARTS) as push:
                for layer in range(4):
                    await (await push.layer(layer))
                    assert push.bytes_done == max(0, layer - 1) * 2 * 40 * 4 * 8 * 4
                with pytest.raises(UsageError, match="already"):
                    await push.layer(0)
            await landing.layer(0)
            await landing.layer(1)
            await pushed(a, b, last)
            assert [layer async for layer in landing] == [0, 1, 2]
        for layer, fill in enumerate((1, 1, 2)):
            assert (tokens_of(sink, PARTS, layer).view(np.uint8) == fill).all()


async def test_stages_of_nothing_end() -> None:
    nothing = BlockTable.of([], 0)
    async with two_nodes(["shm"]) as (a, b):
        sink = await rank(b, range(4), 0, layers=2)
        caches = [await rank(a, range(4), 1, layers=1, first_layer=first, layers_total=2) for first in (0, 1)]
        async with b.offer("r", sink, nothing) as landing:
            for cache in caches:
                async with a.push("r", to=b.addresses, cache=cache, table=nothing) as push:
                    await push.layers()
            assert [layer async for layer in landing] == [0, 1]


async def test_an_offer_is_found_by_its_ticket() -> None:
    async with two_nodes(["shm"]) as (a, b):
        first, second, source = await rank(b, range(4), 0), await rank(b, range(4), 0), await rank(a, range(4), 5)
        with pytest.raises(UsageError, match="inside"):
            _ = b.offer("r", first, PARTS).ticket
        async with (
            b.offer("r", first, PARTS, private=True) as one,
            b.offer("r", second, PARTS, private=True) as two,
        ):
            with pytest.raises(UnknownTransfer):
                await pushed(a, b, source, wait_s=0)
            for landing, form in ((one, one.ticket.to_json()), (two, two.ticket.to_dict())):
                forged = {**landing.ticket.to_dict(), "secret": "00" * 16}
                with pytest.raises(WrongKey):
                    await a.push(forged, cache=source, table=PARTS).__aenter__()
                async with a.push(form, cache=source, table=PARTS) as push:
                    await push.layers()
                assert push.request_id == "r"
                await landing.wait()
            with pytest.raises(UsageError):
                a.push(one.ticket, cache=source, table=PARTS, land=True)
            with pytest.raises(UsageError, match="ticket"):
                a.push("r", cache=source, table=PARTS)
        assert (tokens_of(second, PARTS, 0).view(np.uint8) == 5).all()


async def test_a_simple_offer_has_a_ticket_too() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source = await rank(a, range(4), 5)
        async with b.offer("r", await rank(b, range(4), 0), PARTS) as landing:
            async with a.push(landing, cache=source, table=PARTS) as push:
                await push.layers()
            await landing.wait()
        async with a.publish("r", source, PARTS) as publication:
            with pytest.raises(UnknownTransfer, match="no offer"):
                await a.push(publication, cache=source, table=PARTS, wait_s=0).__aenter__()
            await a.release(publication)


@pytest.mark.parametrize("whole", [True, False])
async def test_a_daemon_that_does_not_know_of_parts_is_given_the_whole_only(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would count a part as all, and the landing would be told that it is committed."""
    for message in (Claim, Claimed, PostingEvent):
        monkeypatch.setattr(message, "packed", {"boxes": lambda _: b""})
    async with two_nodes(["shm"]) as (a, b):
        source = await rank(a, range(4) if whole else range(1), 5)
        async with b.offer("r", await rank(b, range(4), 0), PARTS, timeout=5) as landing:
            if whole:
                await pushed(a, b, source)
                await landing.wait()
                return
            with pytest.raises(GeometryMismatch, match="do not agree"):
                await pushed(a, b, source)
            with pytest.raises(GeometryMismatch):
                await landing.wait()

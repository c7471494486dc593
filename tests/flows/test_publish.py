"""`Publication` and `Pull`: consumers that die, lie or are cancelled, leases without a daemon, callbacks that raise."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import kvxfer
from kvxfer.client import Client
from kvxfer.dataplane.plane import WorkRequest
from kvxfer.errors import (
    ClosedError,
    GeometryMismatch,
    KvxferError,
    PeerLost,
    TransferCancelled,
    TransferTimeout,
    UnknownTransfer,
    UsageError,
)
from kvxfer.flows.control import ClaimHandle
from kvxfer.flows.exchange import TransferOffer
from kvxfer.flows.tickets import as_ticket
from kvxfer.native.engine import OpKind
from kvxfer.tasks import Deadline
from kvxfer.wire import tags
from kvxfer.wire.messages import Claim, PostingEvent
from tests.conftest import slack
from tests.nodes import until
from tests.support.nodes import make_cache, scattered, small_geometry, two_nodes

TABLE = scattered(1, 8, 40, 16)


async def claimed(client: Client, ticket: Any) -> tuple[ClaimHandle, TransferOffer]:
    found = as_ticket(ticket)
    message = Claim(node=found.addresses, kind="ticket", posting=found.posting, secret=found.secret)
    claim, body = await client.control.claim(message, Deadline.after(5), lambda _: None)
    return claim, TransferOffer.unpack(body)


async def release(client: Client, peer: TransferOffer, claim: int) -> None:
    tag = tags.pack(tags.RELEASE, claim, 0)
    part = WorkRequest(kind=OpKind.GET, region=0, descriptor=peer.descriptors[0], notify=(tag, 0))
    await client.plane.start([part], timeout=5, peer="liar")


async def test_a_consumer_speaks_for_itself_only() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, sink = await make_cache(a, small_geometry(), 8), await make_cache(b, small_geometry(), 8)
        async with a.publish("r", source, TABLE, consumers=3, lease_s=30) as ticket:
            claim, peer = await claimed(b, ticket)
            for number in (claim.claim, claim.claim, 2, 3, 4, 77, tags.CLAIM_MAX):
                await release(b, peer, number)
            await asyncio.sleep(0.01)
            assert ticket.outcome == "", "one consumer released it for all"
            b.control.report_in_background(claim, "done", None)
            for _ in range(2):
                await b.pull(ticket.to_dict(), sink, TABLE)
            assert await asyncio.wait_for(ticket.wait_released(), 5) == "released"


@pytest.mark.parametrize("end", ["failed", "cancelled"])
async def test_a_consumer_that_fails_leaves_its_place_to_another(end: str) -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, sink = await make_cache(a, small_geometry(), 8), await make_cache(b, small_geometry(), 8)
        async with a.publish("r", source, TABLE, consumers=2, lease_s=30, retryable=True) as ticket:
            claim, peer = await claimed(b, ticket)
            b.control.report_in_background(claim, end, None)
            await until(lambda: claim.claim not in ticket._claims)
            await release(b, peer, claim.claim)  # too late: its place is somebody else's
            await b.pull(ticket, sink, TABLE)
            await asyncio.sleep(0.01)
            assert ticket.outcome == ""
            await b.pull(ticket, sink, TABLE)
            assert await asyncio.wait_for(ticket.wait_released(), 5) == "released"


async def test_the_lease_ends_even_when_no_daemon_can_say_so() -> None:
    async with two_nodes(["shm"]) as (a, _):
        source = await make_cache(a, small_geometry(), 8)
        async with a.publish("r", source, TABLE, lease_s=0.1) as ticket:
            a.control._on_posting_event = lambda _: None  # type: ignore[method-assign]
            assert await asyncio.wait_for(ticket.wait_released(), 5) == "expired"


async def test_a_renewed_lease_is_longer() -> None:
    async with two_nodes(["shm"]) as (a, _):
        source = await make_cache(a, small_geometry(), 8)
        async with a.publish("r", source, TABLE, lease_s=0.1) as ticket:
            for bad in (0, -1, float("nan"), "1", None):
                with pytest.raises(UsageError):
                    await ticket.renew(bad)  # type: ignore[arg-type]
            await ticket.renew(30)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ticket.wait_released(), 0.5)
            ticket._end("withdrawn")


async def test_closing_the_client_ends_a_publication_that_is_waited_for() -> None:
    async with two_nodes(["shm"]) as (a, _):
        source = await make_cache(a, small_geometry(), 8)
        publication = await a.publish("r", source, TABLE).__aenter__()
        waiting = asyncio.ensure_future(publication.wait_released())
        await asyncio.sleep(0)
        await a.aclose()
        assert await asyncio.wait_for(waiting, 5) == "withdrawn"
        await publication.__aexit__(None, None, None)


async def test_closing_the_client_ends_a_pull() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, sink = await make_cache(a, small_geometry(), 8), await make_cache(b, small_geometry(), 8)
        async with a.publish("r", source, TABLE, consumers=2) as ticket:
            b.plane._connections._resolve_once = lambda *_: asyncio.Event().wait()  # type: ignore[assignment]
            pulling = asyncio.ensure_future(b.pull(ticket.to_dict(), sink, TABLE))
            await until(lambda: b.plane._connections._resolving)
            await b.aclose()
            with pytest.raises(ClosedError):
                await asyncio.wait_for(pulling, 5)
            assert (b.reservations.pinned_blocks, b.reservations.quarantined_blocks) == (0, 0)
            ticket._end("withdrawn")


async def test_a_callback_that_raises_ends_the_pull_and_frees_the_place() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, sink = await make_cache(a, small_geometry(), 8), await make_cache(b, small_geometry(), 8)
        source.regions[0].array[:] = 1

        def bad(layer: int) -> None:
            if layer == 1:
                raise ZeroDivisionError

        async with a.publish("r", source, TABLE, retryable=True) as ticket:
            with pytest.raises(ZeroDivisionError):
                await b.pull(ticket, sink, TABLE, on_layer=bad)
            assert (b.reservations.pinned_blocks, b.reservations.quarantined_blocks) == (0, 0)
            await b.pull(ticket, sink, TABLE)
        assert ticket.outcome == "released"
        assert np.count_nonzero(sink.regions[0].array) == 3 * 2 * 40 * 2 * 8 * 4


async def test_a_publisher_that_leaves_early_is_told_to_the_consumer() -> None:
    async with two_nodes(["tcp"]) as (a, b):
        source, sink = await make_cache(a, small_geometry(), 8), await make_cache(b, small_geometry(), 8)
        seen: list[int] = []
        with pytest.raises(ZeroDivisionError):
            async with a.publish("r", source, TABLE) as ticket:
                b.plane._connections._resolve_once = lambda *_: asyncio.Event().wait()  # type: ignore[assignment]
                pulling = asyncio.ensure_future(b.pull(ticket.to_dict(), sink, TABLE, on_layer=seen.append, timeout=20))
                await until(lambda: b.plane._connections._resolving)
                raise ZeroDivisionError
        with pytest.raises((TransferCancelled, kvxfer.TransferError)):
            await pulling
        assert seen == []


@pytest.mark.parametrize("bad", [0, -1, 1.5, "1", True, None, tags.CLAIM_MAX + 1])
async def test_consumers_are_a_positive_integer(bad: object) -> None:
    async with kvxfer.local() as client:
        cache = await make_cache(client, small_geometry(), 8)
        with pytest.raises(UsageError):
            client.publish("r", cache, TABLE, consumers=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", ["", "{}", "[]", b"", 5, None, {"v": 1}])
async def test_what_is_no_ticket_is_refused(bad: object) -> None:
    with pytest.raises(UsageError):
        as_ticket(bad)  # type: ignore[arg-type]


async def test_a_ticket_that_is_released_unread_counts_once() -> None:
    async with two_nodes(["shm"]) as (a, b):
        cache = await make_cache(a, small_geometry(), 4)
        table = scattered(1, 4, 40, 16)
        async with a.publish("r", cache, table, lease_s=5) as ticket:
            raw = ticket.to_dict()
            await b.release(raw)
            assert await asyncio.wait_for(ticket.wait_released(), 2 * slack()) == "released"
        await b.release(raw)
        async with a.publish("s", cache, table, lease_s=5, consumers=2) as ticket:
            for _ in range(3):
                await b.release(ticket)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ticket.wait_released(), 0.1)
            assert ticket.outcome == ""
            await a.release(ticket.to_json())
            assert await asyncio.wait_for(ticket.wait_released(), 2 * slack()) == "released"
        assert a.plane.engine.counters().grants == 0


async def test_releasing_what_is_over_does_nothing() -> None:
    async with two_nodes(["shm"]) as (a, b):
        cache = await make_cache(a, small_geometry(), 4)
        async with a.publish("r", cache, scattered(1, 4, 40, 16), lease_s=0.1) as ticket:
            raw = ticket.to_dict()
        assert ticket.outcome == "expired"
        await b.release(raw)


ENDS: dict[str, tuple[KvxferError | None, type[KvxferError]]] = {
    "failed": (GeometryMismatch("another shape"), GeometryMismatch),
    "cancelled": (None, TransferCancelled),
    "closed": (ClosedError("its client was closed"), TransferCancelled),
    "died": (PeerLost("its worker ended"), PeerLost),
}


@pytest.mark.parametrize("end", ENDS)
async def test_the_end_of_the_only_consumer_frees_the_blocks_at_once(end: str) -> None:
    async with two_nodes(["shm"]) as (a, b):
        source = await make_cache(a, small_geometry(), 8)
        async with a.publish("r", source, TABLE, lease_s=60) as ticket:
            claim, _ = await claimed(b, ticket)
            error, wanted = ENDS[end]
            b.control.report_in_background(claim, "cancelled" if error is None else "failed", error)
            assert await asyncio.wait_for(ticket.wait_released(), 2 * slack()) == "abandoned"
            assert isinstance(ticket.error, wanted)
        await until(lambda: a.plane.engine.counters().grants == 0)
        with pytest.raises(UnknownTransfer):
            await claimed(b, ticket)


async def test_of_several_consumers_one_that_ends_counts_and_a_later_one_is_waited_for() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, sink = await make_cache(a, small_geometry(), 8), await make_cache(b, small_geometry(), 8)
        async with a.publish("r", source, TABLE, consumers=2, lease_s=60) as ticket:
            first, _ = await claimed(b, ticket)
            b.control.report_in_background(first, "cancelled", None)
            await until(lambda: ticket.error is not None)
            held, peer = await claimed(b, ticket)
            late, _ = await claimed(b, ticket)  # the place that became free
            await release(b, peer, held.claim)
            await until(lambda: held.claim in ticket._released_by)
            assert ticket.outcome == "", "somebody still reads"
            b.control.report_in_background(late, "done", None)
            assert await asyncio.wait_for(ticket.wait_released(), 2 * slack()) == "released"
        async with a.publish("s", source, TABLE, consumers=2, lease_s=60) as ticket:
            await b.pull(ticket, sink, TABLE)
            claim, _ = await claimed(b, ticket)
            b.control.report_in_background(claim, "cancelled", None)
            assert await asyncio.wait_for(ticket.wait_released(), 2 * slack()) == "abandoned"


@pytest.mark.parametrize("step", ["claiming", "reading"])
async def test_a_cancelled_pull_releases_by_itself(step: str) -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, sink = await make_cache(a, small_geometry(), 8), await make_cache(b, small_geometry(), 8)
        async with a.publish("r", source, TABLE, lease_s=60) as ticket:
            if step == "reading":
                b.plane._connections._resolve_once = lambda *_: asyncio.Event().wait()  # type: ignore[assignment]
            pulling = asyncio.ensure_future(b.pull(ticket.to_dict(), sink, TABLE))
            if step == "reading":
                await until(lambda: b.plane._connections._resolving)
            else:
                await asyncio.sleep(0)
                await asyncio.sleep(0)  # the claim is on its way
            pulling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pulling
            assert await asyncio.wait_for(ticket.wait_released(), 2 * slack()) == "abandoned"
            assert isinstance(ticket.error, TransferCancelled)
        await until(lambda: (b.reservations.pinned_blocks, b.reservations.quarantined_blocks) == (0, 0))


async def test_a_claim_that_never_arrived_is_no_consumer() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, sink = await make_cache(a, small_geometry(), 8), await make_cache(b, small_geometry(), 8)
        async with a.publish("r", source, TABLE, lease_s=60) as ticket:
            posting = ticket.ticket.posting
            ticket._on_posting(PostingEvent(posting=posting, claim=9, what="claimed"))
            ticket._on_posting(PostingEvent(posting=posting, claim=9, what="lost", code="unknown_transfer"))
            assert (ticket.outcome, ticket.error) == ("", None)
            await b.pull(ticket, sink, TABLE)
            assert await asyncio.wait_for(ticket.wait_released(), 2 * slack()) == "released"


@pytest.mark.parametrize("claim", [1, 0], ids=["its daemon", "ours"])
async def test_a_consumer_that_no_daemon_can_tell_of_is_looked_for_on_the_data_path(claim: int) -> None:
    async with two_nodes(["shm"]) as (a, b):
        source = await make_cache(a, small_geometry(), 8)
        async with a.publish("r", source, TABLE, lease_s=60) as ticket:
            _, peer = await claimed(b, ticket)
            await b.plane.prepare(peer.descriptors[0])
            ticket._on_posting(PostingEvent(posting=ticket.ticket.posting, claim=claim, what="orphaned"))
            await asyncio.sleep(0.8)
            assert ticket.outcome == "", "it is connected, and may go on"
            b.plane.drop_import(peer.descriptors[0])
            assert await asyncio.wait_for(ticket.wait_released(), 2 * slack()) == "abandoned"
            assert isinstance(ticket.error, PeerLost)


async def test_waiting_for_the_release_has_a_deadline_of_its_own_when_asked() -> None:
    async with two_nodes(["shm"]) as (a, _):
        source = await make_cache(a, small_geometry(), 8)
        async with a.publish("r", source, TABLE, lease_s=60) as ticket:
            with pytest.raises(TransferTimeout) as found:
                await ticket.wait_released(timeout=0.05)
            assert found.value.fields["state"] == "waiting for the other side"
            assert ticket.outcome == ""
            ticket._end("withdrawn")

"""Events for a worker that does not read: merged, kept in order, bounded by what the claimants are refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvxfer.daemon.events import KEPT_DETAIL_CHARS, KEPT_MAX, Events
from kvxfer.errors import PeerBackpressure
from kvxfer.wire import messages as m
from tests.conftest import slack
from tests.nodes import fast, node, until, worker

P, Q = "a" * 32, "b" * 32


class Full:
    """A link that takes nothing, or all."""

    def __init__(self) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.queued_bytes = 1 << 20


def event(what: str, claim: int = 1, posting: str = P, **more: str) -> m.PostingEvent:
    return m.PostingEvent(posting=posting, claim=claim, what=what, **more)


def tell(events: Events, link: Any, what: str, *which: Any, kind: str = "region", **more: str) -> None:
    events.tell(link, event(what, *which, **more), kind)


def bench() -> tuple[Events, Any, list[m.PostingEvent]]:
    sent: list[m.PostingEvent] = []
    return Events(lambda _, one: sent.append(one), queue_bytes_max=1 << 20), Full(), sent


async def told(events: Events, link: Any) -> None:
    link.queued_bytes = 0
    await until(lambda: not events.kept(link))


async def test_a_claim_of_a_region_that_came_and_went_is_told_to_nobody() -> None:
    events, link, sent = bench()
    for number in range(1, 5000):
        tell(events, link, "claimed", number)
        tell(events, link, "settled", number, detail="x" * 1000)
    assert (events.kept(link), events.merged) == (0, 2 * 4999)
    tell(events, link, "claimed", 5000)
    await told(events, link)
    assert sent == [event("claimed", 5000)]
    tell(events, link, "settled", 5000)
    assert sent[-1] == event("settled", 5000), "and straight away when there is room"
    events.close()


async def test_what_matters_is_kept_in_order_and_of_one_claim_its_last_state() -> None:
    events, link, sent = bench()
    for what in ("claimed", "orphaned", "orphaned", "settled"):
        tell(events, link, what, 1, kind="ticket", code="c")
    tell(events, link, "claimed", 1, Q)
    tell(events, link, "expired", 0, Q, detail="y" * 1000)
    tell(events, link, "orphaned", 9, kind="")
    tell(events, link, "orphaned", 9, kind="")
    assert events.kept(link) == 4
    assert not sent
    await told(events, link)
    assert [(one.posting, one.claim, one.what) for one in sent] == [
        (P, 1, "claimed"),
        (P, 1, "settled"),
        (Q, 1, "claimed"),
        (Q, 0, "expired"),
        (P, 9, "orphaned"),
    ]
    assert max(len(one.detail) for one in sent) == KEPT_DETAIL_CHARS
    events.close()


async def test_a_link_that_ends_takes_its_events_with_it() -> None:
    events, link, sent = bench()
    for number in range(KEPT_MAX):
        assert not events.slow(link)
        tell(events, link, "claimed", number + 1)
    events.forget(link)
    events.forget(link)
    assert not events.kept(link)
    link.closed.set_result(None)
    tell(events, link, "claimed")
    assert not events.kept(link)
    assert not sent
    events.close()


@pytest.mark.parametrize("kind", ["region", "ticket"])
async def test_a_worker_that_computes_keeps_its_link_whatever_others_do_with_its_postings(kind: str) -> None:
    """For a region nothing adds up; for a ticket, whose readers it has to hear of, they wait for it."""
    long = fast(keepalive_s=30.0, keepalive_live_s=30.0, dead_s=30.0)
    async with node(**long) as here, node(**long) as there, worker(there) as owner, worker(here) as claimant:
        posted = await owner.ask(m.Post(kind=kind, key="r", lease_s=300.0))
        by = {"key": "r"} if kind == "region" else {"posting": posted.posting, "secret": posted.secret}
        claim = m.Claim(kind=kind, node=there.addresses, **by)
        events = there.dispatcher.events
        events._queue_bytes_max = 0
        transport: Any = owner.link._transport
        transport.pause_reading()  # it computes
        [server_side] = [link for link in there.workers.links if link.peer.role == "worker"]
        filler = m.PostingEvent(posting=Q, claim=1, what="orphaned", detail="z" * 1000)
        while not server_side.queued_bytes:  # the kernel takes some at first
            server_side.send(filler)
        refused = rounds = 0
        while rounds < KEPT_MAX + 200 and not refused:
            rounds += 1
            try:
                claimed = await claimant.ask(claim)
            except PeerBackpressure as error:
                refused += 1
                assert error.retryable
                continue
            await claimant.ask(
                m.Settle(node=there.addresses, posting=claimed.posting, claim=claimed.claim, outcome="done")
            )
        assert refused == (kind == "ticket")
        assert events.kept(server_side) == (KEPT_MAX if refused else 0)
        assert not owner.link.closed.done()
        transport.resume_reading()  # it goes on
        await until(lambda: not events.kept(server_side), 20.0 * slack())
        claimed = await claimant.ask(claim)
        found = await owner.inbox.take(m.PostingEvent, 20.0, what="claimed", claim=claimed.claim)
        assert found.posting == posted.posting
        if kind == "ticket":
            done = [one for one in owner.inbox.messages if getattr(one, "what", "") == "settled"]
            assert [one.claim for one in done] == list(range(1, rounds))  # type: ignore[attr-defined]

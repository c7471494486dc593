"""Each claim is counted once, under the reason it ended for, whoever ended it."""

from __future__ import annotations

import asyncio

import pytest

from kvxfer.rendezvous.postings import BUCKETS_S, ClaimStatistics
from kvxfer.wire import messages as m
from tests.daemon.test_metrics import parse, scrape, value
from tests.nodes import Worker, node, until, worker


def test_durations_fall_into_their_buckets_once() -> None:
    tally = ClaimStatistics()
    for seconds in (0.0, BUCKETS_S[0], 0.002, BUCKETS_S[-1], 1e9):
        tally.add("offer", "done", seconds)
    found = tally.durations["offer"]
    assert (found.counts[0], found.counts[1], found.counts[-2], found.counts[-1]) == (2, 1, 1, 1)
    assert sum(found.counts) == tally.ended["offer", "done"] == 5


@pytest.mark.parametrize(
    ("reason", "counted"),
    [
        ("released", "done"),
        ("committed", "done"),
        ("timeout", "timeout"),
        ("made up by a peer", "other"),
        ("", "other"),
    ],
)
def test_reasons_are_few(reason: str, counted: str) -> None:
    tally = ClaimStatistics()
    tally.add("ticket", reason, 1.0)
    assert dict(tally.ended) == {("ticket", counted): 1}


async def claimed(owner: Worker, claimant: Worker, key: str, lease_s: float = 30.0) -> m.Claimed:
    await owner.ask(m.Post(kind="offer", key=key, lease_s=lease_s, claims_max=1))
    reply: m.Claimed = await claimant.ask(m.Claim(kind="offer", key=key))
    return reply


async def test_every_end_of_a_transfer_is_counted_once_and_by_its_reason() -> None:
    async with node(http="127.0.0.1:0") as server, worker(server) as owner, worker(server) as claimant:
        endings = [
            ("done", ""),
            ("done", ""),
            ("failed", "timeout"),
            ("failed", "integrity"),
            ("failed", "my own words"),
        ]
        for number, (outcome, code) in enumerate(endings):
            held = await claimed(owner, claimant, f"settled-{number}")
            settle = m.Settle(posting=held.posting, claim=held.claim, outcome=outcome, code=code)
            for _ in range(2):
                await claimant.ask(settle)
            await owner.ask(m.Withdraw(posting=held.posting, reason="too late to matter"))
        for reason in ("committed", "abandoned"):
            held = await claimed(owner, claimant, reason)
            await owner.ask(m.Withdraw(posting=held.posting, reason=reason))
        await claimed(owner, claimant, "expires", lease_s=0.1)
        await owner.inbox.take(m.PostingEvent, what="expired")
        async with worker(server) as dying:
            await claimed(owner, dying, "claimant dies")
            dying.link.abort()
            await owner.inbox.take(m.PostingEvent, what="lost")
        async with worker(server) as dying:
            await claimed(dying, claimant, "owner dies")
            dying.link.abort()
            await claimant.inbox.take(m.PostingEvent, what="lost")
        await owner.ask(m.Post(kind="offer", key="nobody came", lease_s=30.0, claims_max=1))
        expected = {
            "done": 3,
            "timeout": 1,
            "integrity": 1,
            "other": 1,
            "withdrawn": 1,
            "lease_expired": 1,
            "peer_lost": 2,
        }
        tally = server.registry.tally
        await until(lambda: sum(tally.ended.values()) == sum(expected.values()))
        await asyncio.sleep(0)
        assert {reason: count for (_, reason), count in tally.ended.items()} == expected
        series = parse((await scrape(server))[1])
        assert value(series, "kvxfer_claims_ended_total", kind="offer", reason="peer_lost") == 2
        assert value(series, "kvxfer_claim_seconds_count", kind="offer") == sum(expected.values())
        server.registry.check()


async def test_region_that_is_held_is_no_transfer() -> None:
    async with node() as server, worker(server) as owner:
        await owner.ask(m.Post(kind="region", key="r", lease_s=0.0, claims_max=0))
        async with worker(server) as claimant:
            await claimant.ask(m.Claim(kind="region", key="r"))
        await until(lambda: server.registry.counts().claims == 0)
        assert not server.registry.tally.ended

"""The registry: who is answered what, who is told what, and that nothing is forgotten or counted twice."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.config import Config
from kvxfer.rendezvous.actions import Refused, SettleElsewhere
from kvxfer.rendezvous.registry import Registry
from kvxfer.wire import messages as m
from tests.rendezvous.bench import (
    FAR,
    HERE,
    THEIR_INCARNATION,
    THERE,
    Asked,
    Bench,
    is_a,
    refusal,
    said,
    told,
)

S1, S2, S3 = ("1" * 32, "2" * 32, "3" * 32)  # sessions

# -- settlements -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "code", "what", "said"),
    [
        ("done", "", "settled", "done"),
        ("failed", "timeout", "settled", "timeout"),
        ("failed", "", "settled", "failed"),
        ("failed", "done", "settled", "failed"),
        ("cancelled", "", "settled", "cancelled"),
        ("failed", "peer_lost", "lost", "peer_lost"),
    ],
)
def test_the_owner_hears_how_a_claim_ended_once(outcome: str, code: str, what: str, said: str) -> None:
    bench = Bench()
    bench.posted(kind="region")
    answer = bench.claimed(kind="region")
    assert told(bench.settle(answer, outcome, code=code)) == [("own", what, 1, said)]
    assert told(bench.settle(answer, outcome, code=code)) == []
    assert bench.registry.counts().claims == 0


def test_who_may_settle() -> None:
    bench = Bench()
    bench.posted()
    answer = bench.claimed()
    assert refusal(bench.settle(answer, link="other")).code == "access_denied"
    bench.registry.add_peer(0.0, "far", FAR, THEIR_INCARNATION)
    assert refusal(bench.settle(answer, link="far")).code == "access_denied"
    assert told(bench.settle(answer, link="own")) == [], "the owner knows already"
    assert bench.registry.counts().claims == 0


def test_a_claim_that_never_was() -> None:
    bench = Bench()
    posted = bench.posted()
    for posting, claim in ((posted.posting, 0), (posted.posting, 1), ("9" * 32, 1)):
        actions = bench.registry.settle(0.0, "peer", 1, posting=posting, claim=claim, outcome="done")
        assert refusal(actions).code == "unknown_transfer"
    assert refusal(bench.registry.settle(0.0, "peer", 1, posting="", claim=1, outcome="?")).code == "usage"


def test_a_worker_that_claims_from_itself_hears_both_sides() -> None:
    bench = Bench()
    bench.posted()
    answer = bench.claimed("own")
    assert told(bench.settle(answer, "failed", code="timeout")) == [("own", "settled", 1, "timeout")]
    posted = bench.posted(kind="ticket")
    bench.claimed("own", kind="ticket", posting=posted.posting, secret=posted.secret)
    assert told(bench.registry.withdraw(0.0, "own", 1, posting=posted.posting)) == [("own", "withdrawn", 1, "")]


# -- links -----------------------------------------------------------------------------------------------


def test_a_dead_worker_is_told_to_everybody_at_once() -> None:
    bench = Bench()
    bench.posted("own", key="1")
    bench.claimed("peer", key="1")
    bench.posted("other", key="2")
    bench.claimed("own", key="2")
    bench.claim("own", key="3", wait_s=9)
    bench.registry.listen(0.0, "own", 1, channel="c")
    claimed = said(
        m.Claimed,
        link="own",
        rid=9,
        posting="e" * 32,
        claim=4,
        body=b"",
        expires_in_s=1.0,
        node_id=THERE,
        incarnation=FAR,
    )
    assert bench.registry.claimed_elsewhere(0.0, claimed) == [claimed]
    actions = bench.remove("own")
    assert told(actions) == [("peer", "lost", 1, "peer_lost"), ("other", "lost", 1, "peer_lost")]
    (settlement,) = (item for item in actions if isinstance(item, SettleElsewhere))
    assert (settlement.node_id, settlement.message.posting, settlement.message.claim) == (THERE, "e" * 32, 4)
    assert (settlement.message.outcome, settlement.message.code, settlement.link) == ("failed", "peer_lost", None)
    counts = bench.registry.counts()
    assert (counts.claims, counts.waiting, counts.routes, counts.postings, counts.channels) == (0, 0, 0, 1, 0)
    assert bench.remove("own") == []
    assert refusal(bench.claim(key="1")).code == "unknown_transfer"


def test_a_ticket_of_a_dead_worker_says_so() -> None:
    bench = Bench()
    posted = bench.posted(kind="ticket")
    bench.remove("own")
    error = refusal(bench.claim(kind="ticket", posting=posted.posting, secret=posted.secret, wait_s=5))
    assert (error.code, error.retryable) == ("peer_lost", False)


def test_waiters_of_a_ticket_are_sent_away_at_its_end() -> None:
    bench = Bench()
    posted = bench.posted(kind="ticket", claims_max=1)
    ticket: dict[str, Any] = {"kind": "ticket", "posting": posted.posting, "secret": posted.secret}
    bench.claimed(**ticket)
    bench.claim("other", wait_s=9, **ticket)
    lost, refused = bench.remove("own")
    assert is_a(lost, m.PostingEvent)
    assert isinstance(refused, Refused)
    assert (refused.link, refused.error.code) == ("other", "peer_lost")


def test_a_lost_peer_orphans_and_a_returning_one_takes_its_claims_back() -> None:
    bench = Bench()
    bench.posted()
    answer = bench.claimed()
    assert bench.registry.live_claims("peer") == 1
    assert told(bench.remove("peer")) == [("own", "orphaned", 1, "peer_lost")]
    assert bench.registry.counts().orphans == 1
    bench.registry.add_peer(0.0, "again", THERE, THEIR_INCARNATION)
    bench.registry.check()
    assert bench.registry.live_claims("again") == 1
    assert bench.registry.counts().orphans == 0
    assert told(bench.settle(answer, link="again")) == [("own", "settled", 1, "done")]


def test_a_restarted_peer_may_settle_what_it_orphaned() -> None:
    bench = Bench()
    bench.posted()
    answer = bench.claimed()
    bench.remove("peer")
    bench.registry.add_peer(0.0, "again", THERE, FAR)
    assert bench.registry.counts().orphans == 1
    assert told(bench.settle(answer, "failed", link="again", code="timeout")) == [("own", "settled", 1, "timeout")]
    assert bench.registry.counts().orphans == 0


def test_after_a_lost_connection_the_claimants_node_is_asked_what_it_knows() -> None:
    bench = Bench()
    bench.registry.remove(0, "peer")
    assert bench.registry.add_peer(0.0, "first", THERE, THEIR_INCARNATION, session=S1) == []
    bench.posted()
    bench.posted(kind="region", key="name")
    offer, region = bench.claimed("first"), bench.claimed("first", kind="region", key="name")
    bench.remove("first")
    keys = ((offer.posting, offer.claim), (region.posting, region.claim))
    [asked] = bench.registry.add_peer(0.0, "again", THERE, THEIR_INCARNATION, session=S2)
    assert asked == said(m.Confirm, link="again", session=S1, claims=m.pack_claims(keys))
    # Once more, before there was an answer: it is still about the connection over which they were granted.
    bench.remove("again")
    [asked] = bench.registry.add_peer(0.0, "third", THERE, THEIR_INCARNATION, session=S3)
    assert asked == said(m.Confirm, link="third", session=S1, claims=m.pack_claims(keys))
    assert bench.registry.never_arrived(0, S2, keys) == [], "granted over another connection"
    ended = bench.checked(bench.registry.never_arrived(0, S1, [keys[0], ("0" * 32, 1), (offer.posting, 9)]))
    assert told(ended) == [("own", "lost", 1, "unknown_transfer")], "nobody ever held it"
    assert bench.registry.counts().claims == 1, "the other one is known there"
    assert bench.registry.never_arrived(0, S1, [keys[0]]) == []
    answer = bench.claim("third")  # nobody else gets the place: what the peer says is no proof that nothing was written
    assert [type(one) for one in answer] == [Refused]
    assert told(bench.registry.settle(0, "third", 1, posting=offer.posting, claim=1, outcome="done")) == []


def test_what_ran_out_is_not_handed_to_the_new_link() -> None:
    """A daemon that stood still meanwhile: the connection is what it hears of first."""
    bench = Bench()
    bench.registry.remove(0, "peer")
    bench.registry.add_peer(0.0, "first", THERE, THEIR_INCARNATION, session=S1)
    posted = bench.posted(lease_s=2.0)
    bench.claimed("first")
    bench.remove("first")
    actions = bench.checked(bench.registry.add_peer(2.5, "again", THERE, THEIR_INCARNATION, session=S2))
    assert not [one for one in actions if is_a(one, m.Confirm)]
    assert ("own", "expired") in [(link, what) for link, what, *_ in told(actions)], actions
    assert bench.registry.counts().postings == 0, posted


def test_who_is_not_asked() -> None:
    bench = Bench()
    bench.registry.remove(0, "peer")
    bench.registry.add_peer(0.0, "first", THERE, THEIR_INCARNATION, session=S1)
    bench.posted()
    bench.claimed("first")
    bench.remove("first")
    assert bench.registry.add_peer(0.0, "restarted", THERE, FAR, session=S2) == [], "another process"
    assert bench.registry.add_peer(0.0, "stranger", FAR, THEIR_INCARNATION, session=S3) == []
    assert bench.registry.counts().orphans == 1


def test_another_connection_is_asked_at_once() -> None:
    bench = Bench()
    bench.registry.remove(0, "peer")
    bench.registry.add_peer(0.0, "first", THERE, THEIR_INCARNATION, session=S1)
    bench.registry.add_peer(0.0, "second", THERE, THEIR_INCARNATION, session=S2)
    bench.posted()
    claim = bench.claimed("first")
    assert bench.remove("first") == [
        said(m.Confirm, link="second", session=S1, claims=m.pack_claims([(claim.posting, claim.claim)]))
    ]


def test_which_claims_are_unknown_here() -> None:
    bench = Bench()
    answer = said(
        m.Claimed,
        link="own",
        rid=1,
        posting="e" * 32,
        claim=3,
        body=b"",
        expires_in_s=1.0,
        node_id=THERE,
        incarnation=FAR,
    )
    bench.registry.claimed_elsewhere(0, answer)
    asked = [("e" * 32, 3), ("e" * 32, 4), ("f" * 32, 3)]
    assert bench.registry.unknown_to_us(THERE, asked) == asked[1:]
    assert bench.registry.unknown_to_us(FAR, asked) == asked, "not of that node"


def test_two_links_to_one_peer_back_each_other_up() -> None:
    bench = Bench()
    bench.registry.add_peer(0.0, "second", THERE, THEIR_INCARNATION)
    bench.posted()
    bench.claimed("peer")
    assert bench.remove("peer") == []
    assert bench.registry.live_claims("second") == 1
    assert told(bench.remove("second")) == [("own", "orphaned", 1, "peer_lost")]


def test_an_orphan_that_nothing_else_would_end_is_lost_after_a_lease() -> None:
    bench = Bench(lease_s=60)
    bench.posted(kind="region")
    bench.claimed(kind="region")
    bench.remove("peer")
    assert bench.registry.next_deadline() == 60.0
    assert told(bench.expire(60.0)) == [("own", "lost", 1, "peer_lost")]
    assert bench.registry.counts().claims == 0


def test_orphans_end_with_their_posting() -> None:
    bench = Bench()
    posted = bench.posted(lease_s=10)
    bench.claimed()
    bench.remove("peer")
    assert told(bench.registry.withdraw(0.0, "own", 1, posting=posted.posting)) == []
    bench.registry.check()
    assert bench.registry.counts().orphans == 0


# -- mail and shutdown -----------------------------------------------------------------------------------


def test_mail() -> None:
    bench = Bench()
    sent = bench.registry.mail(0.0, "peer", 5, channel="c", data=b"1", source=THERE)
    assert sent == [said(m.Done, link="peer", rid=5)]
    assert bench.registry.next_deadline() == 30.0
    assert bench.registry.listen(0.0, "own", 6, channel="c") == [
        said(m.Done, link="own", rid=6),
        said(m.Delivery, link="own", channel="c", data=b"1", source=THERE),
    ]
    assert refusal(bench.registry.listen(0.0, "peer", 7, channel="d")).code == "access_denied"
    assert refusal(bench.registry.listen(0.0, "other", 7, channel="c")).code == "busy"
    assert bench.registry.unlisten(0.0, "own", 8, channel="c") == [said(m.Done, link="own", rid=8)]
    bench.registry.mail(0.0, "peer", 9, channel="c", data=b"2", source=THERE)
    bench.expire(30.0)
    assert bench.registry.counts().held_messages == 0


def test_draining_keeps_what_is_claimed_and_nothing_else() -> None:
    bench = Bench()
    bench.posted(key="1")
    answer = bench.claimed(key="1")
    bench.posted(key="2")
    bench.claim("other", key="3", wait_s=9)
    actions = bench.checked(bench.registry.drain(0.0))
    assert told(actions) == [("own", "withdrawn", 0, "peer_draining")]
    (refused,) = (item for item in actions if isinstance(item, Refused))
    assert (refused.link, refused.error.code) == ("other", "peer_draining")
    assert refusal(bench.post(key="4")).code == "peer_draining"
    assert refusal(bench.claim(key="1")).code == "peer_draining"
    assert told(bench.settle(answer)) == [("own", "settled", 1, "done")]
    assert bench.registry.counts().claims == 0


def test_a_random_source_that_repeats_itself_is_noticed() -> None:
    registry = Asked(Registry(Config(), node_id=HERE, incarnation=HERE, random=bytes))
    registry.add_worker("w")
    assert is_a(registry.post(0.0, "w", 1, kind="offer", key="1")[0], m.Posted)
    assert refusal(registry.post(0.0, "w", 2, kind="offer", key="2")).code == "internal"


# -- requests that were given up ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["offer", "region", "ticket"])
def test_a_claim_whose_answer_is_not_wanted_any_more_ends_at_once(kind: str) -> None:
    """The asker gave it up when the grant was on its way; its own settlement comes later, and changes nothing."""
    bench = Bench()
    posted = bench.posted(kind=kind)
    more = {"posting": posted.posting, "secret": posted.secret} if kind == "ticket" else {}
    answer = bench.claimed(kind=kind, **more)
    given_up = bench.checked(bench.registry.give_up(0.0, "peer", request=answer.rid))
    assert told(given_up) == [("own", "settled", 1, "timeout")]
    assert bench.registry.counts().claims == 0
    assert told(bench.settle(answer, "cancelled", code="timeout")) == []
    assert bench.registry.give_up(0.0, "peer", request=answer.rid) == []
    assert bench.registry.unexpected == {("give_up", "unknown_request"): 1}
    again = bench.claim(kind=kind, **more)
    assert isinstance(again[-1], Refused) == (kind == "offer"), "who took an offer may have written into it"


def test_only_the_link_that_asked_gives_a_claim_up() -> None:
    bench = Bench()
    bench.posted(kind="region")
    answer = bench.claimed(kind="region")
    for link in ("own", "other", "nobody"):
        assert bench.registry.give_up(0.0, link, request=answer.rid) == []
    bench.registry.add_peer(0.0, "second", THERE, THEIR_INCARNATION)
    bench.remove("peer")  # the claim changes hands, and its number means nothing there
    assert bench.checked(bench.registry.give_up(0.0, "second", request=answer.rid)) == []
    assert bench.registry.counts().claims == 1


def test_a_claim_at_another_node_that_is_given_up_is_settled_there() -> None:
    bench = Bench()
    answer = said(
        m.Claimed,
        link="own",
        rid=9,
        posting="e" * 32,
        claim=4,
        body=b"",
        expires_in_s=1.0,
        node_id=THERE,
        incarnation=FAR,
    )
    bench.registry.claimed_elsewhere(0.0, answer)
    (there,) = bench.checked(bench.registry.give_up(0.0, "own", request=9))
    assert isinstance(there, SettleElsewhere)
    assert (there.node_id, there.message.posting, there.message.claim) == (THERE, "e" * 32, 4)
    assert (there.message.outcome, there.message.code) == ("cancelled", "timeout")
    assert bench.registry.counts().routes == 0


def test_numbers_that_a_link_uses_twice_confuse_nobody() -> None:
    bench = Bench()
    bench.posted(kind="region")
    for _ in range(2):
        bench.checked(bench.registry.claim(0.0, "peer", 7, kind="region", key="R"))
    bench.checked(bench.registry.claim(0.0, "peer", 7, kind="offer", key="none", wait_s=1.0))
    assert bench.checked(bench.registry.give_up(0.0, "peer", request=7)) == []
    assert (bench.registry.counts().claims, bench.registry.counts().waiting) == (2, 0)
    bench.remove("own")
    assert bench.registry.counts().claims == 0


# -- shares ------------------------------------------------------------------------------------------------


def test_a_node_has_one_share_however_many_links_it_opens() -> None:
    bench = Bench(waiting_max=90, claims_max=90)
    links = ["peer"]
    for number in range(20):
        links.append(f"more{number}")
        bench.registry.add_peer(0.0, links[-1], THERE, THEIR_INCARNATION)
    bench.registry.add_peer(0.0, "far", FAR, THEIR_INCARNATION)
    bench.posted(kind="region")
    answers = [bench.claim(links[number % 21], kind="region") for number in range(90)]
    assert sum(is_a(answer[-1], m.Claimed) for answer in answers) == 81
    assert refusal(answers[-1]).fields["option"] == "claims_max"
    assert is_a(bench.claim("far", kind="region")[-1], m.Claimed)
    answers = [bench.claim(links[number % 21], key="none", wait_s=9.0) for number in range(90)]
    assert sum(not answer for answer in answers) == 81
    refused = refusal(answers[-1])
    assert refused.retryable
    assert refused.fields["option"] == "waiting_max"
    assert "waiting_max" in str(refused.hint)
    assert bench.claim("far", key="none", wait_s=9.0) == []
    for link in links:
        bench.remove(link)  # orphaned claims count for their node, too
    bench.registry.add_peer(0.0, "again", THERE, THEIR_INCARNATION)
    assert refusal(bench.claim("again", kind="region")).code == "too_many_pending"

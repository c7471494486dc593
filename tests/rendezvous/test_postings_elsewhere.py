"""The claimant's side: events of other nodes find their worker, settlements find their node."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.rendezvous.actions import Link, Refused, SettleElsewhere
from kvxfer.wire import messages as m
from tests.rendezvous.bench import FAR, THEIR_INCARNATION, THERE, Bench, Seen, changed, refusal, said, told

# -- the claimant's side ---------------------------------------------------------------------------------


def routed(bench: Bench, link: Link = "own", posting: str = "e" * 32) -> Seen:
    answer = said(
        m.Claimed,
        link=link,
        rid=bench.rid(),
        posting=posting,
        claim=7,
        body=b"x",
        expires_in_s=5,
        node_id=THERE,
        incarnation=THEIR_INCARNATION,
    )
    assert bench.checked(bench.registry.claimed_elsewhere(bench.now, answer)) == [answer]
    return answer


def event(bench: Bench, what: str, link: Link = "peer", claim: int = 7) -> list[Any]:
    return bench.checked(
        bench.registry.event_from_peer(bench.now, link, posting="e" * 32, claim=claim, what=what, code="c", detail="d")
    )


@pytest.mark.parametrize("what", ["withdrawn", "expired", "lost"])
def test_an_event_finds_its_worker_once(what: str) -> None:
    bench = Bench()
    routed(bench)
    assert event(bench, what) == [
        said(m.PostingEvent, link="own", posting="e" * 32, claim=7, what=what, code="c", detail="d"),
    ]
    assert event(bench, what) == []
    assert bench.registry.unexpected == {("event", "unknown_claim"): 1}
    assert bench.registry.counts().routes == 0


def test_events_that_fit_nothing_are_counted() -> None:
    bench = Bench()
    routed(bench)
    bench.registry.add_peer(0.0, "far", FAR, THEIR_INCARNATION)
    for what, link, claim in (("lost", "far", 7), ("lost", "gone", 7), ("lost", "peer", 8), ("claimed", "peer", 7)):
        assert event(bench, what, link, claim) == []
    assert bench.registry.unexpected == {
        ("event", "wrong_node"): 2,
        ("event", "unknown_claim"): 1,
        ("event", "kind"): 1,
    }
    assert bench.registry.counts().routes == 1


def test_a_settlement_goes_where_the_claim_is() -> None:
    bench = Bench()
    answer = routed(bench)
    (action,) = bench.settle(answer, "failed", code="timeout", detail="d")
    message = m.Settle(rid=bench._rid, posting="e" * 32, claim=7, outcome="failed", code="timeout", detail="d")
    assert action == SettleElsewhere(node_id=THERE, message=message, link="own")
    assert refusal(bench.settle(answer)).code == "unknown_transfer"
    (again,) = bench.settle(answer, node=("127.0.0.1:1",))
    assert isinstance(again, SettleElsewhere)
    assert (again.node_id, again.message.node) == ("", ("127.0.0.1:1",))


def test_another_worker_cannot_settle_by_a_route_that_is_not_its_own() -> None:
    bench = Bench()
    answer = routed(bench)
    for node in ((), ("127.0.0.1:1",)):
        assert refusal(bench.settle(answer, link="other", node=node)).code == "access_denied"
    assert bench.registry.counts().routes == 1


def test_a_peer_out_of_reach_orphans_our_claims() -> None:
    bench = Bench()
    bench.registry.add_peer(0.0, "second", THERE, THEIR_INCARNATION)
    routed(bench)
    assert bench.registry.live_claims("peer") == 1
    assert bench.remove("second") == []
    assert told(bench.remove("peer")) == [("own", "orphaned", 7, "peer_lost")]
    assert bench.registry.counts().routes == 1, "the data path may still work"


def test_a_claim_that_is_granted_to_a_worker_that_is_gone_is_given_back() -> None:
    bench = Bench()
    answer = said(
        m.Claimed,
        link="gone",
        rid=1,
        posting="e" * 32,
        claim=7,
        body=b"",
        expires_in_s=5,
        node_id=THERE,
        incarnation=FAR,
    )
    (action,) = bench.registry.claimed_elsewhere(0.0, answer)
    assert isinstance(action, SettleElsewhere)
    assert (action.message.outcome, action.message.code, action.link) == ("failed", "peer_lost", None)


def test_routes_are_bounded() -> None:
    bench = Bench(claims_max=1)
    routed(bench)
    answer = said(
        m.Claimed,
        link="own",
        rid=9,
        posting="9" * 32,
        claim=1,
        body=b"",
        expires_in_s=5,
        node_id=THERE,
        incarnation=FAR,
    )
    back, refused = bench.registry.claimed_elsewhere(0.0, answer)
    assert isinstance(back, SettleElsewhere)
    assert back.message.outcome == "cancelled"
    assert isinstance(refused, Refused)
    assert refused.error.code == "too_many_pending"


def test_what_one_node_says_is_never_about_a_claim_at_another() -> None:
    """It knows the posting (a region that it may claim as well), and numbers count up from 1."""
    bench = Bench()
    bench.registry.add_peer(0.0, "far", FAR, THEIR_INCARNATION)
    answer = routed(bench, "own")
    theirs = changed(answer, link="other", node_id=FAR, rid=bench.rid())
    assert bench.checked(bench.registry.claimed_elsewhere(0.0, theirs)) == [theirs]
    key = ("e" * 32, 7)
    assert bench.registry.unknown_to_us(THERE, [key]) == bench.registry.unknown_to_us(FAR, [key]) == []
    assert bench.registry.unknown_to_us("9" * 32, [key]) == [key]
    assert told(event(bench, "withdrawn", "far")) == [("other", "withdrawn", 7, "c")]
    assert told(event(bench, "orphaned")) == [("own", "orphaned", 7, "c")]
    (settled,) = bench.settle(answer)
    assert isinstance(settled, SettleElsewhere)
    assert settled.node_id == THERE
    assert bench.registry.counts().routes == 0


def test_a_claim_that_somebody_has_is_granted_to_nobody_else() -> None:
    """By its own node to another worker, or by another node to the same one, which could not tell them apart."""
    bench = Bench()
    answer = routed(bench)
    for wrong in (changed(answer, link="other", rid=bench.rid()), changed(answer, node_id=FAR, rid=bench.rid())):
        assert refusal(bench.checked(bench.registry.claimed_elsewhere(0.0, wrong))).code == "protocol"
    assert bench.registry.unknown_to_us(THERE, [("e" * 32, 7)]) == []
    again = changed(answer, rid=bench.rid())
    assert bench.checked(bench.registry.claimed_elsewhere(0.0, again)) == [again]
    assert bench.registry.counts().routes == 1

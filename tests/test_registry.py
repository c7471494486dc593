"""The registry: who is answered what, who is told what, and that nothing is forgotten or counted twice."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kvxfer.actions import Action, Claimed, Deliver, Done, Link, Notify, Posted, Refused, SettleElsewhere
from kvxfer.config import CLAIM_NUMBER_MAX, KEY_CHARS_MAX, POSTING_BODY_BYTES_MAX, Config
from kvxfer.errors import KvxferError, TooManyPending, UsageError
from kvxfer.registry import Registry

HERE, THERE, FAR = "a" * 32, "c" * 32, "f" * 32
NOW_INCARNATION, THEIR_INCARNATION = "b" * 32, "d" * 32


class Bench:
    """A registry with a worker `own`, a worker `other`, a link `peer` to THERE, and a clock."""

    def __init__(self, **changes: Any) -> None:
        numbers = itertools.count(1)
        self.registry = Registry(
            Config(**changes),
            node_id=HERE,
            incarnation=NOW_INCARNATION,
            random=lambda size: next(numbers).to_bytes(size, "big"),
        )
        self.now = 0.0
        self._rid = 0
        self.registry.add_worker("own", "decode-0")
        self.registry.add_worker("other", "prefill-0")
        self.registry.add_peer("peer", THERE, THEIR_INCARNATION, "node-c")

    def rid(self) -> int:
        self._rid += 1
        return self._rid

    def checked(self, actions: list[Action]) -> list[Action]:
        self.registry.check()
        return actions

    def post(self, link: Link = "own", kind: str = "offer", key: str = "R", **more: Any) -> list[Action]:
        return self.checked(self.registry.post(self.now, link, self.rid(), kind=kind, key=key, **more))

    def posted(self, link: Link = "own", kind: str = "offer", key: str = "R", **more: Any) -> Posted:
        (answer,) = self.post(link, kind, key, **more)
        assert isinstance(answer, Posted)
        return answer

    def claim(self, link: Link = "peer", kind: str = "offer", key: str = "R", **more: Any) -> list[Action]:
        if "posting" in more:
            key = ""
        return self.checked(self.registry.claim(self.now, link, self.rid(), kind=kind, key=key, **more))

    def claimed(self, link: Link = "peer", kind: str = "offer", key: str = "R", **more: Any) -> Claimed:
        answer, notice = self.claim(link, kind, key, **more)
        assert isinstance(answer, Claimed)
        assert isinstance(notice, Notify)
        assert (notice.what, notice.claim) == ("claimed", answer.claim)
        return answer

    def settle(self, answer: Claimed, outcome: str = "done", link: Link | None = None, **more: Any) -> list[Action]:
        return self.checked(
            self.registry.settle(
                self.now,
                answer.link if link is None else link,
                self.rid(),
                posting=answer.posting,
                claim=answer.claim,
                outcome=outcome,
                **more,
            )
        )

    def remove(self, link: Link) -> list[Action]:
        return self.checked(self.registry.remove(self.now, link))

    def expire(self, now: float) -> list[Action]:
        self.now = now
        return self.checked(self.registry.expire(now))


def refusal(actions: list[Action]) -> KvxferError:
    (answer,) = actions
    assert isinstance(answer, Refused)
    return answer.error


def told(actions: list[Action]) -> list[tuple[Link, str, int, str]]:
    return [(item.link, item.what, item.claim, item.code) for item in actions if isinstance(item, Notify)]


# -- match -----------------------------------------------------------------------------------------------


def test_a_posting_is_claimed_and_its_owner_is_told() -> None:
    bench = Bench()
    posted = bench.posted(body=b"body", lease_s=10)
    assert posted.expires_in_s == 10
    bench.now = 4.0
    answer, notice = bench.claim(engine_id="e" * 32)
    assert answer == Claimed(
        link="peer",
        rid=2,
        posting=posted.posting,
        claim=1,
        body=b"body",
        expires_in_s=6.0,
        node_id=HERE,
        incarnation=NOW_INCARNATION,
    )
    assert notice == Notify(link="own", posting=posted.posting, claim=1, what="claimed", engine_id="e" * 32)


def test_an_early_claim_waits_and_is_served_first() -> None:
    bench = Bench()
    assert bench.claim("other", wait_s=5) == []
    assert bench.claim("peer", wait_s=5) == []
    bench.now = 1.0
    posted, claimed, notice = bench.post()
    assert isinstance(posted, Posted)
    assert isinstance(claimed, Claimed)
    assert (claimed.link, claimed.rid) == ("other", 1)
    assert told([notice]) == [("own", "claimed", 1, "")]
    # The second one goes on waiting, for another offer with this key.
    bench.registry.withdraw(bench.now, "own", 9, posting=posted.posting)
    _, second, _ = bench.post()
    assert isinstance(second, Claimed)
    assert second.link == "peer"


def test_who_waits_longest_is_first_however_it_asked() -> None:
    bench = Bench()
    posted = bench.posted(kind="region", claims_max=1)
    by_id: dict[str, Any] = {"posting": posted.posting, "secret": posted.secret}
    first = bench.claimed(kind="region")
    bench.claim("other", kind="region", wait_s=9, **by_id)
    bench.claim("own", kind="region", wait_s=9)
    order = []
    for _ in range(2):
        _, _, served, _ = bench.settle(first)
        assert isinstance(served, Claimed)
        order.append(served.link)
        first = served
    assert order == ["other", "own"]


def test_a_region_serves_all_who_wait() -> None:
    bench = Bench()
    for _ in range(3):
        bench.claim(kind="region", key="cache", wait_s=5)
    actions = bench.post(kind="region", key="cache")
    assert [item.claim for item in actions if isinstance(item, Claimed)] == [1, 2, 3]
    assert bench.registry.counts().waiting == 0


def test_a_wait_ends_in_time() -> None:
    bench = Bench()
    bench.claim(wait_s=5)
    assert bench.registry.next_deadline() == 5.0
    assert bench.expire(4.99) == []
    error = refusal(bench.expire(5.0))
    assert error.code == "unknown_transfer"
    assert "nothing is posted" in error.message
    assert bench.registry.next_deadline() is None
    assert refusal(bench.claim()).code == "unknown_transfer"


def test_a_waiter_whose_time_is_over_is_not_served() -> None:
    bench = Bench()
    bench.claim(wait_s=5)
    bench.now = 5.0
    refused, posted = bench.post()
    assert isinstance(refused, Refused)
    assert isinstance(posted, Posted)


def test_an_offer_is_used_once_even_when_the_claim_failed() -> None:
    bench = Bench()
    bench.posted()
    answer = bench.claimed()
    assert refusal(bench.claim()).code == "unknown_transfer"
    assert told(bench.settle(answer, "failed", code="timeout")) == [("own", "settled", 1, "timeout")]
    assert refusal(bench.claim()).code == "unknown_transfer"


def test_a_ticket_needs_its_secret() -> None:
    bench = Bench()
    posted = bench.posted(kind="ticket")
    assert refusal(bench.claim(kind="ticket")).code == "access_denied"
    assert refusal(bench.claim(kind="ticket", posting=posted.posting, secret=bytes(16))).code == "wrong_key"
    assert refusal(bench.claim(kind="ticket", posting=posted.posting)).code == "wrong_key"
    assert refusal(bench.claim(kind="ticket", posting="9" * 32, secret=posted.secret)).code == "unknown_transfer"
    assert refusal(bench.claim(kind="offer", posting=posted.posting, secret=posted.secret)).code == "unknown_transfer"
    bench.claimed(kind="ticket", posting=posted.posting, secret=posted.secret)
    assert repr(posted.secret) not in repr(posted)


def test_a_ticket_counts_successes() -> None:
    bench = Bench()
    posted = bench.posted(kind="ticket", claims_max=2)
    ticket: dict[str, Any] = {"kind": "ticket", "posting": posted.posting, "secret": posted.secret}
    first, second = bench.claimed(**ticket), bench.claimed(**ticket)
    assert refusal(bench.claim(**ticket)).code == "busy"
    bench.settle(first, "failed", code="peer_unreachable")
    third = bench.claimed(**ticket)
    assert third.claim == 3, "numbers are never used again"
    # Who waits for a place gets the one that a failure frees, and is sent away when there will be none.
    assert bench.claim("other", wait_s=5, **ticket) == []
    _, _, fourth, _ = bench.settle(third, "cancelled")
    assert isinstance(fourth, Claimed)
    assert fourth.link == "other"
    assert bench.claim(wait_s=5, **ticket) == []
    bench.settle(second)
    actions = bench.settle(fourth)
    assert isinstance(actions[-1], Refused)
    assert "used up" in actions[-1].error.message
    assert "used up" in refusal(bench.claim(wait_s=5, **ticket)).message


def test_another_node_or_incarnation_is_refused_at_once() -> None:
    bench = Bench()
    bench.posted()
    wrong_node = refusal(bench.claim(node_id=FAR, wait_s=9))
    assert (wrong_node.code, wrong_node.fields) == ("peer_identity", {"expected": FAR, "actual": HERE})
    restarted = refusal(bench.claim(incarnation=FAR, wait_s=9))
    assert restarted.code == "peer_incarnation"
    assert restarted.fields == {"expected": FAR, "actual": NOW_INCARNATION}
    bench.claimed(node_id=HERE, incarnation=NOW_INCARNATION)


# -- the end of a posting --------------------------------------------------------------------------------


def test_expiry_is_told_to_both_sides_and_remembered() -> None:
    bench = Bench()
    posted = bench.posted(lease_s=10)
    answer = bench.claimed()
    actions = bench.expire(10.0)
    assert told(actions) == [("own", "expired", 0, "lease_expired"), ("peer", "expired", 1, "lease_expired")]
    assert refusal(bench.claim(wait_s=5)).code == "lease_expired"
    assert refusal(bench.claim(posting=posted.posting, secret=posted.secret)).code == "lease_expired"
    for _ in range(3):
        assert bench.settle(answer) == [Done(link="peer", rid=bench._rid)]
    bench.posted()
    bench.claimed()


def test_a_claim_at_the_last_moment_and_one_later() -> None:
    for now, granted in ((9.999, True), (10.0, False)):
        bench = Bench()
        bench.posted(lease_s=10)
        bench.now = now
        actions = bench.claim()
        assert any(isinstance(action, Claimed) for action in actions) is granted


def test_memory_is_bounded() -> None:
    bench = Bench(expired_memory_max=2)
    for key in ("1", "2", "3"):
        bench.posted(key=key, lease_s=1)
    bench.expire(1.0)
    assert bench.registry.counts().remembered == 2
    assert [refusal(bench.claim(key=key)).code for key in ("1", "2", "3")] == [
        "unknown_transfer",
        "lease_expired",
        "lease_expired",
    ]
    none = Bench(expired_memory_max=0)
    none.posted(lease_s=1)
    none.expire(1.0)
    assert refusal(none.claim()).code == "unknown_transfer"


def test_renewal_moves_the_end() -> None:
    bench = Bench()
    posted = bench.posted(lease_s=10)
    bench.now = 9.0
    renewed = bench.registry.renew(9.0, "own", 5, posting=posted.posting, lease_s=10)
    assert renewed == [
        Posted(link="own", rid=5, posting=posted.posting, secret=posted.secret, expires_in_s=10),
    ]
    assert bench.expire(18.9) == []
    assert told(bench.expire(19.0)) == [("own", "expired", 0, "lease_expired")]
    assert refusal(bench.registry.renew(19.0, "own", 6, posting=posted.posting, lease_s=1)).code == "lease_expired"


def test_withdrawal() -> None:
    bench = Bench()
    posted = bench.posted()
    bench.claimed()

    def withdraw(link: Link, posting: str) -> list[Action]:
        return bench.checked(bench.registry.withdraw(0.0, link, 5, posting=posting, reason="aborted"))

    assert refusal(withdraw("other", posted.posting)).code == "access_denied"
    assert refusal(withdraw("own", "9" * 32)).code == "unknown_transfer"
    done, notice = withdraw("own", posted.posting)
    assert done == Done(link="own", rid=5)
    assert isinstance(notice, Notify)
    assert (notice.link, notice.what, notice.claim, notice.detail) == ("peer", "withdrawn", 1, "aborted")
    assert withdraw("own", posted.posting) == [Done(link="own", rid=5)], "twice is harmless"
    assert bench.registry.counts().claims == 0


def test_a_region_without_lease_lives_as_long_as_its_worker() -> None:
    bench = Bench()
    posted = bench.posted(kind="region", key="cache")
    assert posted.expires_in_s == 0
    assert bench.registry.next_deadline() is None
    bench.claimed(kind="region", key="cache")
    assert told(bench.remove("own")) == [("peer", "lost", 1, "peer_lost")]


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
    bench.registry.add_peer("far", FAR, THEIR_INCARNATION)
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
    claimed = Claimed(
        link="own", rid=9, posting="e" * 32, claim=4, body=b"", expires_in_s=1, node_id=THERE, incarnation=""
    )
    assert bench.registry.claimed_elsewhere(0.0, claimed) == [claimed]
    actions = bench.remove("own")
    assert told(actions) == [("peer", "lost", 1, "peer_lost"), ("other", "lost", 1, "peer_lost")]
    (settlement,) = (item for item in actions if isinstance(item, SettleElsewhere))
    assert (settlement.node_id, settlement.posting, settlement.claim) == (THERE, "e" * 32, 4)
    assert (settlement.outcome, settlement.code, settlement.link) == ("failed", "peer_lost", None)
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
    assert isinstance(lost, Notify)
    assert isinstance(refused, Refused)
    assert (refused.link, refused.error.code) == ("other", "peer_lost")


def test_a_lost_peer_orphans_and_a_returning_one_takes_its_claims_back() -> None:
    bench = Bench()
    bench.posted()
    answer = bench.claimed()
    assert bench.registry.live_claims("peer") == 1
    assert told(bench.remove("peer")) == [("own", "orphaned", 1, "peer_lost")]
    assert bench.registry.counts().orphans == 1
    bench.registry.add_peer("again", THERE, THEIR_INCARNATION)
    bench.registry.check()
    assert bench.registry.live_claims("again") == 1
    assert bench.registry.counts().orphans == 0
    assert told(bench.settle(answer, link="again")) == [("own", "settled", 1, "done")]


def test_a_restarted_peer_may_settle_what_it_orphaned() -> None:
    bench = Bench()
    bench.posted()
    answer = bench.claimed()
    bench.remove("peer")
    bench.registry.add_peer("again", THERE, FAR)
    assert bench.registry.counts().orphans == 1
    assert told(bench.settle(answer, "failed", link="again", code="timeout")) == [("own", "settled", 1, "timeout")]
    assert bench.registry.counts().orphans == 0


def test_two_links_to_one_peer_back_each_other_up() -> None:
    bench = Bench()
    bench.registry.add_peer("second", THERE, THEIR_INCARNATION)
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


# -- the claimant's side ---------------------------------------------------------------------------------


def routed(bench: Bench, link: Link = "own", posting: str = "e" * 32) -> Claimed:
    answer = Claimed(
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


def event(bench: Bench, what: str, link: Link = "peer", claim: int = 7) -> list[Action]:
    return bench.checked(
        bench.registry.event_from_peer(bench.now, link, posting="e" * 32, claim=claim, what=what, code="c", detail="d")
    )


@pytest.mark.parametrize("what", ["withdrawn", "expired", "lost"])
def test_an_event_finds_its_worker_once(what: str) -> None:
    bench = Bench()
    routed(bench)
    assert event(bench, what) == [
        Notify(link="own", posting="e" * 32, claim=7, what=what, code="c", detail="d"),
    ]
    assert event(bench, what) == []
    assert bench.registry.unexpected == {("event", "unknown_claim"): 1}
    assert bench.registry.counts().routes == 0


def test_events_that_fit_nothing_are_counted() -> None:
    bench = Bench()
    routed(bench)
    bench.registry.add_peer("far", FAR, THEIR_INCARNATION)
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
    assert action == SettleElsewhere(
        node_id=THERE,
        posting="e" * 32,
        claim=7,
        outcome="failed",
        code="timeout",
        detail="d",
        link="own",
        rid=bench._rid,
    )
    assert refusal(bench.settle(answer)).code == "unknown_transfer"
    (again,) = bench.settle(answer, elsewhere=True)
    assert isinstance(again, SettleElsewhere)
    assert again.node_id == ""


def test_another_worker_cannot_settle_by_a_route_that_is_not_its_own() -> None:
    bench = Bench()
    answer = routed(bench)
    assert refusal(bench.settle(answer, link="other")).code == "unknown_transfer"
    assert bench.registry.counts().routes == 1


def test_a_peer_out_of_reach_orphans_our_claims() -> None:
    bench = Bench()
    bench.registry.add_peer("second", THERE, THEIR_INCARNATION)
    routed(bench)
    assert bench.registry.live_claims("peer") == 1
    assert bench.remove("second") == []
    assert told(bench.remove("peer")) == [("own", "orphaned", 7, "peer_lost")]
    assert bench.registry.counts().routes == 1, "the data path may still work"


def test_a_claim_that_is_granted_to_a_worker_that_is_gone_is_given_back() -> None:
    bench = Bench()
    answer = Claimed(
        link="gone", rid=1, posting="e" * 32, claim=7, body=b"", expires_in_s=5, node_id=THERE, incarnation=""
    )
    (action,) = bench.registry.claimed_elsewhere(0.0, answer)
    assert isinstance(action, SettleElsewhere)
    assert (action.outcome, action.code, action.link) == ("failed", "peer_lost", None)


def test_routes_are_bounded() -> None:
    bench = Bench(claims_max=1)
    routed(bench)
    answer = Claimed(
        link="own", rid=9, posting="9" * 32, claim=1, body=b"", expires_in_s=5, node_id=THERE, incarnation=""
    )
    back, refused = bench.registry.claimed_elsewhere(0.0, answer)
    assert isinstance(back, SettleElsewhere)
    assert back.outcome == "cancelled"
    assert isinstance(refused, Refused)
    assert refused.error.code == "too_many_pending"


# -- limits ----------------------------------------------------------------------------------------------


def test_postings_at_the_limit_and_one_more() -> None:
    bench = Bench(postings_max=2)
    bench.posted(key="1")
    posted = bench.posted(key="2")
    assert refusal(bench.post(key="3")).code == "too_many_pending"
    bench.registry.withdraw(0.0, "own", 1, posting=posted.posting)
    bench.posted(key="3")


def test_bodies_at_the_limit_and_one_byte_more() -> None:
    bench = Bench(posting_bytes_max=POSTING_BODY_BYTES_MAX)
    assert refusal(bench.post(body=bytes(POSTING_BODY_BYTES_MAX + 1))).code == "too_large"
    bench.posted(body=bytes(POSTING_BODY_BYTES_MAX))
    assert refusal(bench.post(key="2", body=b"x")).code == "too_many_pending"


def test_claims_at_the_limit_and_one_more() -> None:
    bench = Bench(claims_max=2)
    bench.posted(kind="region")
    first = bench.claimed(kind="region")
    bench.claimed(kind="region")
    assert refusal(bench.claim(kind="region", wait_s=5)).code == "too_many_pending"
    assert bench.claim("other", key="late", wait_s=5) == []
    posted, refused = bench.post(key="late")
    assert isinstance(posted, Posted)
    assert isinstance(refused, Refused)
    assert refused.error.code == "too_many_pending"
    bench.settle(first)
    bench.claimed(kind="region")


def test_waiters_at_the_limit_and_one_more() -> None:
    bench = Bench(waiting_max=2)
    bench.claim(key="1", wait_s=5)
    bench.claim(key="2", wait_s=5)
    assert refusal(bench.claim(key="3", wait_s=5)).code == "too_many_pending"
    bench.expire(5.0)
    assert bench.claim(key="3", wait_s=5) == []


def test_workers_at_the_limit_and_one_more() -> None:
    bench = Bench(workers_max=3)
    bench.registry.add_worker("third")
    with pytest.raises(TooManyPending):
        bench.registry.add_worker("fourth")
    bench.remove("third")
    bench.registry.add_worker("fourth")
    with pytest.raises(UsageError):
        bench.registry.add_peer("fourth", FAR, FAR)
    with pytest.raises(UsageError):
        bench.registry.add_peer("nameless", "", FAR)
    bench.registry.check()


@pytest.mark.parametrize(
    "more",
    [
        {"kind": "other"},
        {"key": ""},
        {"key": "k" * (KEY_CHARS_MAX + 1)},
        {"lease_s": -1},
        {"lease_s": 3600.5},
        {"lease_s": float("nan")},
        {"lease_s": float("inf")},
        {"claims_max": -1},
        {"claims_max": 2},
        {"kind": "ticket", "claims_max": CLAIM_NUMBER_MAX + 1},
    ],
    ids=str,
)
def test_bad_postings(more: dict[str, Any]) -> None:
    bench = Bench()
    assert refusal(bench.post(**more)).code == "usage"
    assert bench.registry.counts().postings == 0


@pytest.mark.parametrize("wait_s", [-1, float("nan"), float("inf"), 1e9])
def test_bad_waits(wait_s: float) -> None:
    assert refusal(Bench().claim(wait_s=wait_s)).code == "usage"


def test_who_may_post() -> None:
    bench = Bench()
    assert refusal(bench.post("peer")).code == "access_denied"
    assert refusal(bench.post("stranger")).code == "closed"
    bench.posted()
    assert refusal(bench.post("other")).code == "usage", "one live offer per key"
    bench.posted(kind="region", key="R")
    bench.posted(kind="ticket", key="R")
    bench.posted(kind="ticket", key="R")


# -- mail and shutdown -----------------------------------------------------------------------------------


def test_mail() -> None:
    bench = Bench()
    sent = bench.registry.mail(0.0, "peer", 5, channel="c", data=b"1", source=THERE)
    assert sent == [Done(link="peer", rid=5)]
    assert bench.registry.next_deadline() == 30.0
    assert bench.registry.listen(0.0, "own", 6, channel="c") == [
        Done(link="own", rid=6),
        Deliver(link="own", channel="c", data=b"1", source=THERE),
    ]
    assert refusal(bench.registry.listen(0.0, "peer", 7, channel="d")).code == "access_denied"
    assert refusal(bench.registry.listen(0.0, "other", 7, channel="c")).code == "busy"
    assert bench.registry.unlisten(0.0, "own", 8, channel="c") == [Done(link="own", rid=8)]
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
    registry = Registry(Config(), node_id=HERE, incarnation=HERE, random=bytes)
    registry.add_worker("w")
    assert isinstance(registry.post(0.0, "w", 1, kind="offer", key="1")[0], Posted)
    assert refusal(registry.post(0.0, "w", 2, kind="offer", key="2")).code == "internal"

"""Postings: who is matched with whom, how they end, and the limits of everything that is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvxfer.config import CLAIM_NUMBER_MAX, KEY_CHARS_MAX, POSTING_BODY_BYTES_MAX
from kvxfer.coverage import Box
from kvxfer.errors import TooManyPending, UsageError
from kvxfer.rendezvous.actions import Link, Refused
from kvxfer.rendezvous.postings import AGAIN_WAIT_S, COPIES_S, WRITERS_MAX
from kvxfer.wire import messages as m
from tests.rendezvous.bench import FAR, HERE, NOW_INCARNATION, Bench, Seen, is_a, refusal, said, told

# -- match -----------------------------------------------------------------------------------------------


def test_a_posting_is_claimed_and_its_owner_is_told() -> None:
    bench = Bench()
    posted = bench.posted(body=b"body", lease_s=10)
    assert posted.expires_in_s == 10
    bench.now = 4.0
    notice, answer = bench.claim(engine_id="e" * 32)
    assert answer == said(
        m.Claimed,
        link="peer",
        rid=2,
        posting=posted.posting,
        claim=1,
        body=b"body",
        expires_in_s=6.0,
        node_id=HERE,
        incarnation=NOW_INCARNATION,
    )
    event = m.PostingEvent(posting=posted.posting, claim=1, what="claimed", engine_id="e" * 32)
    assert notice == Seen("own", event)


def test_an_early_claim_waits_and_is_served_first() -> None:
    bench = Bench()
    assert bench.claim("other", wait_s=5) == []
    assert bench.claim("peer", wait_s=5) == []
    bench.now = 1.0
    posted, notice, claimed = bench.post()
    assert is_a(posted, m.Posted)
    assert is_a(claimed, m.Claimed)
    assert (claimed.link, claimed.rid) == ("other", 1)
    assert told([notice]) == [("own", "claimed", 1, "")]
    # The second one goes on waiting, for another offer with this key.
    bench.registry.withdraw(bench.now, "own", 9, posting=posted.posting)
    _, _, second = bench.post()
    assert is_a(second, m.Claimed)
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
        _, _, _, served = bench.settle(first)
        assert is_a(served, m.Claimed)
        order.append(served.link)
        first = served
    assert order == ["other", "own"]


def test_a_region_serves_all_who_wait() -> None:
    bench = Bench()
    for _ in range(3):
        bench.claim(kind="region", key="cache", wait_s=5)
    actions = bench.post(kind="region", key="cache")
    assert [item.claim for item in actions if is_a(item, m.Claimed)] == [1, 2, 3]
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
    assert is_a(posted, m.Posted)


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
    _, _, _, fourth = bench.settle(third, "cancelled")
    assert is_a(fourth, m.Claimed)
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
        assert bench.settle(answer) == [said(m.Done, link="peer", rid=bench._rid)]
    bench.posted()
    bench.claimed()


def test_a_claim_at_the_last_moment_and_one_later() -> None:
    for now, granted in ((9.999, True), (10.0, False)):
        bench = Bench()
        bench.posted(lease_s=10)
        bench.now = now
        actions = bench.claim()
        assert any(is_a(action, m.Claimed) for action in actions) is granted


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
        said(m.Posted, link="own", rid=5, posting=posted.posting, secret=posted.secret, expires_in_s=10),
    ]
    assert bench.expire(18.9) == []
    assert told(bench.expire(19.0)) == [("own", "expired", 0, "lease_expired")]
    assert refusal(bench.registry.renew(19.0, "own", 6, posting=posted.posting, lease_s=1)).code == "lease_expired"


def test_withdrawal() -> None:
    bench = Bench()
    posted = bench.posted()
    bench.claimed()

    def withdraw(link: Link, posting: str) -> list[Any]:
        return bench.checked(bench.registry.withdraw(0.0, link, 5, posting=posting, reason="aborted"))

    assert refusal(withdraw("other", posted.posting)).code == "access_denied"
    assert refusal(withdraw("own", "9" * 32)).code == "unknown_transfer"
    done, notice = withdraw("own", posted.posting)
    assert done == said(m.Done, link="own", rid=5)
    assert is_a(notice, m.PostingEvent)
    assert (notice.link, notice.what, notice.claim, notice.detail) == ("peer", "withdrawn", 1, "aborted")
    assert withdraw("own", posted.posting) == [said(m.Done, link="own", rid=5)], "twice is harmless"
    assert bench.registry.counts().claims == 0


def test_a_region_without_lease_lives_as_long_as_its_worker() -> None:
    bench = Bench()
    posted = bench.posted(kind="region", key="cache")
    assert posted.expires_in_s == 0
    assert bench.registry.next_deadline() is None
    bench.claimed(kind="region", key="cache")
    assert told(bench.remove("own")) == [("peer", "lost", 1, "peer_lost")]


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
    assert is_a(posted, m.Posted)
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


def test_worker_that_takes_all_it_can_leaves_room_for_others() -> None:
    bench = Bench(postings_max=90, waiting_max=90, claims_max=90)
    counts = bench.registry.counts

    def take_all(what: Callable[[int], list[Any]]) -> None:
        for number in range(100):
            answers = what(number)
            if answers and isinstance(answers[0], Refused):
                assert refusal(answers).code == "too_many_pending"
                return
        raise AssertionError("nothing was refused")

    take_all(lambda number: bench.claim(key=f"never {number}", wait_s=5))
    assert 70 < counts().waiting < 90
    assert bench.claim("other", key="never", wait_s=5) == []
    take_all(lambda number: bench.post(kind="region", key=f"posted {number}"))
    assert 70 < counts().postings < 90
    bench.posted("other", kind="region", key="modest")
    take_all(lambda _: bench.claim(kind="region", key="modest"))
    assert 70 < counts().claims < 90
    bench.claimed("other", kind="region", key="modest")
    bench.registry.check()


def test_workers_at_the_limit_and_one_more() -> None:
    bench = Bench(workers_max=3)
    bench.registry.add_worker("third")
    with pytest.raises(TooManyPending):
        bench.registry.add_worker("fourth")
    bench.remove("third")
    bench.registry.add_worker("fourth")
    with pytest.raises(UsageError):
        bench.registry.add_peer(0.0, "fourth", FAR, FAR)
    with pytest.raises(UsageError):
        bench.registry.add_peer(0.0, "nameless", "", FAR)
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
    assert refusal(bench.post(**more)).code in ("usage", "too_large")
    assert bench.registry.counts().postings == 0


@pytest.mark.parametrize("wait_s", [-1, float("nan"), float("inf"), 1e9])
def test_bad_waits(wait_s: float) -> None:
    assert refusal(Bench().claim(wait_s=wait_s)).code in ("usage", "too_large")


def test_who_may_post() -> None:
    bench = Bench()
    assert refusal(bench.post("peer")).code == "access_denied"
    assert refusal(bench.post("stranger")).code == "closed"
    bench.posted()
    assert refusal(bench.post("other")).code == "usage", "one live offer per key"
    bench.posted(kind="region", key="R")
    bench.posted(kind="ticket", key="R")
    bench.posted(kind="ticket", key="R")


# -- offers that several write -----------------------------------------------------------------------------


WANT = Box(layers=range(8), parts=range(2), heads=range(8), tokens=range(64))


def part(**axes: range) -> dict[str, Any]:
    return {"boxes": (replace(WANT, **axes),)}


def granted(actions: list[Any]) -> Seen:
    (found,) = [action for action in actions if is_a(action, m.Claimed)]
    return found


def test_claims_of_different_parts_are_granted_and_the_owner_hears_of_each() -> None:
    bench = Bench()
    bench.posted(boxes=(WANT,), body=b"body")
    for number, heads in enumerate((range(2), range(2, 5), range(5, 9)), 1):
        notice, answer = bench.claim(**part(heads=heads, layers=range(9), tokens=range(100)))
        assert is_a(notice, m.PostingEvent)
        assert is_a(answer, m.Claimed)
        (clipped,) = notice.boxes
        assert notice.boxes == answer.boxes
        assert (answer.claim, answer.body) == (number, b"body")
        assert clipped == replace(WANT, heads=range(heads.start, min(heads.stop, 8)))


@pytest.mark.parametrize("ended", [False, True])
def test_what_others_write_is_nothing_to_do(ended: bool) -> None:
    bench = Bench()
    bench.posted(boxes=(WANT,))
    for heads in (range(3), range(3, 6)):
        answer = bench.claimed(**part(heads=heads))
        if ended:
            bench.settle(answer)
    (nothing,) = bench.claim("other", **part(heads=range(1, 5)))
    assert is_a(nothing, m.Claimed)
    assert (nothing.claim, nothing.link, nothing.body) == (0, "other", b"")
    assert bench.registry.counts().claims == (0 if ended else 2)
    bench.remove("other")


def test_a_part_that_others_write_in_part_is_refused_and_changes_nothing() -> None:
    bench = Bench()
    bench.posted(boxes=(WANT,))
    bench.claimed(**part(heads=range(3)))
    error = refusal(bench.claim("other", **part(heads=range(2, 4))))
    assert (error.code, error.retryable) == ("overlap", False)
    assert error.fields["overlap"] == "parts 0-1, head 2, tokens 0-63 of layers 0-7"
    assert bench.claimed("other", **part(heads=range(3, 8))).claim == 2


def test_nothing_in_common_is_refused_with_both_boxes() -> None:
    bench = Bench()
    bench.posted(boxes=(WANT,))
    error = refusal(bench.claim(**part(tokens=range(64, 80))))
    assert error.code == "geometry"
    assert "64-79" in str(error.fields["source"])
    assert "0-63" in str(error.fields["target"])
    assert not bench.registry.counts().claims


def test_a_claim_without_boxes_means_all() -> None:
    bench = Bench()
    bench.posted(boxes=(WANT,))
    assert granted(bench.claim()).boxes == (WANT,)
    assert granted(bench.claim("other")).claim == 0
    bench.posted(key="plain")
    bench.claimed(key="plain", **part(heads=range(1)))
    assert refusal(bench.claim("other", key="plain", **part(heads=range(1, 2)))).code == "unknown_transfer"


def test_nothing_more_is_written_once_a_push_has_failed() -> None:
    bench = Bench()
    posted = bench.posted(boxes=(WANT,))
    answer = bench.claimed(**part(heads=range(3)))
    bench.settle(answer, "failed", code="timeout")
    by_id: dict[str, Any] = {"posting": posted.posting, "secret": posted.secret}
    for boxes in (part(heads=range(3)), part(heads=range(3, 8))):
        assert "failed" in refusal(bench.claim("other", wait_s=5, **by_id, **boxes)).message
        assert refusal(bench.claim("other", **boxes)).code == "unknown_transfer"


def test_an_offer_of_nothing_is_written_once() -> None:
    bench = Bench()
    empty = replace(WANT, tokens=range(16, 16))
    bench.posted(boxes=(empty,))
    assert granted(bench.claim(**part(layers=range(4), tokens=range(0)))).claim == 1
    assert granted(bench.claim(**part(layers=range(4, 8), tokens=range(0)))).claim == 0


def test_boxes_that_make_no_sense_are_refused() -> None:
    bench = Bench()
    assert refusal(bench.post(boxes=(WANT, replace(WANT, heads=range(1))))).code == "usage"
    assert refusal(bench.post(kind="ticket", boxes=(WANT,))).code == "usage"
    assert refusal(bench.post(kind="region", private=True)).code == "usage"
    bench.posted(boxes=(WANT,))
    assert refusal(bench.claim(boxes=(WANT, WANT))).code == "usage"


def test_tiny_claims_have_a_maximum() -> None:
    bench = Bench()
    bench.posted(boxes=(replace(WANT, tokens=range(100_000)),))
    for token in range(WRITERS_MAX):
        bench.registry.claim(0.0, "peer", bench.rid(), kind="offer", key="R", **part(tokens=range(token, token + 1)))
    error = refusal(bench.claim(**part(tokens=range(99_999, 100_000))))
    assert (error.code, error.retryable) == ("too_many_pending", False)
    assert granted(bench.claim(**part(tokens=range(5, 6)))).claim == 0


def test_a_push_of_too_many_pieces_is_refused_and_changes_nothing() -> None:
    """Each piece that it has meets each piece that is wanted: more than an answer can name."""
    bench = Bench()
    stripes = range(0, 64, 4)
    wanted = tuple(replace(WANT, tokens=range(first, first + 2)) for first in stripes)
    bench.post(boxes=wanted)
    had = tuple(replace(WANT, layers=range(layer, layer + 1)) for layer in range(8))
    assert refusal(bench.claim(boxes=had)).code == "geometry"
    assert bench.registry.counts().claims == 0
    bench.claimed(boxes=wanted)


def test_those_who_wait_are_served_by_their_parts() -> None:
    bench = Bench()
    for link, heads in (("peer", range(4)), ("other", range(4)), ("peer", range(2, 8)), ("other", range(4, 8))):
        assert bench.claim(link, wait_s=5, **part(heads=heads)) == []
    actions = bench.post(boxes=(WANT,))
    assert [(action.link, action.claim) for action in actions if is_a(action, m.Claimed)] == [
        ("peer", 1),
        ("other", 0),
        ("other", 2),
    ]
    assert [action.error.code for action in actions if isinstance(action, Refused)] == ["overlap"]


def test_a_private_offer_is_found_by_its_ticket_only() -> None:
    bench = Bench()
    first, second = bench.posted(boxes=(WANT,), private=True), bench.posted(boxes=(WANT,), private=True)
    assert refusal(bench.claim()).code == "unknown_transfer"
    assert refusal(bench.claim(posting=first.posting, secret=second.secret)).code == "wrong_key"
    bench.claimed(posting=first.posting, secret=first.secret)
    bench.posted(boxes=(WANT,))
    bench.registry.withdraw(0.0, "own", 9, posting=second.posting, reason="committed")
    assert granted(bench.claim()).claim == 1
    bench.remove("own")


@pytest.mark.parametrize("by_ticket", [False, True])
def test_a_copy_that_comes_after_the_commit_has_nothing_to_do(by_ticket: bool) -> None:
    bench = Bench()
    posted = bench.posted(boxes=(WANT,))
    bench.settle(bench.claimed(engine_id="a" * 32, **part()))
    bench.registry.withdraw(0.0, "own", 9, posting=posted.posting, reason="committed")
    how: dict[str, Any] = {"engine_id": "b" * 32, **part(heads=range(2))}
    if by_ticket:
        assert granted(bench.claim(posting=posted.posting, secret=posted.secret, **how)).claim == 0
        return
    assert granted(bench.claim(**how)).claim == 0
    # With time, the next offer with this key is waited for, but not for long.
    assert bench.claim("other", wait_s=9, **how) == []
    bench.now = AGAIN_WAIT_S
    assert granted(bench.checked(bench.registry.expire(bench.now))).claim == 0
    assert bench.claim("other", wait_s=9, **how) == []
    assert granted(bench.post(boxes=(WANT,))).claim == 1


def test_a_copy_whose_wait_was_cut_is_one_to_its_end() -> None:
    """It comes just before the key means the next offer, and its short wait ends just after."""
    bench = Bench()
    posted = bench.posted(boxes=(WANT,))
    bench.settle(bench.claimed(engine_id="a" * 32, **part()))
    bench.registry.withdraw(0.0, "own", 9, posting=posted.posting, reason="committed")
    bench.now = COPIES_S - 0.5
    assert bench.claim(wait_s=9, engine_id="b" * 32, **part()) == []
    assert bench.registry.next_deadline() == bench.now + AGAIN_WAIT_S
    answer = granted(bench.expire(bench.now + AGAIN_WAIT_S))
    assert (answer.claim, answer.posting) == (0, posted.posting)


def test_long_after_the_commit_a_key_means_the_next_offer() -> None:
    bench = Bench()
    posted = bench.posted(boxes=(WANT,))
    bench.settle(bench.claimed(engine_id="a" * 32, **part()))
    bench.registry.withdraw(0.0, "own", 9, posting=posted.posting, reason="committed")
    bench.now = COPIES_S
    how: dict[str, Any] = {"engine_id": "b" * 32, **part()}
    assert refusal(bench.claim(**how)).code == "unknown_transfer"
    assert bench.claim(wait_s=9, **how) == []
    bench.now += 5
    assert granted(bench.post(boxes=(WANT,))).claim == 1


def test_who_wrote_it_begins_anew() -> None:
    """The second push of the same worker belongs to the next offer with this key."""
    bench = Bench()
    posted = bench.posted(boxes=(WANT,))
    bench.settle(bench.claimed(engine_id="a" * 32, **part()))
    bench.registry.withdraw(0.0, "own", 9, posting=posted.posting, reason="committed")
    assert refusal(bench.claim(engine_id="a" * 32, **part())).code == "unknown_transfer"
    assert bench.claim(engine_id="a" * 32, wait_s=9, **part()) == []
    bench.now = 5.0
    assert granted(bench.post(boxes=(WANT,))).claim == 1


def test_an_offer_that_was_not_committed_has_no_copies() -> None:
    bench = Bench()
    posted = bench.posted(boxes=(WANT,))
    bench.settle(bench.claimed(engine_id="a" * 32, **part(heads=range(2))))
    bench.registry.withdraw(0.0, "own", 9, posting=posted.posting, reason="abandoned")
    assert refusal(bench.claim(engine_id="b" * 32, **part(heads=range(2)))).code == "unknown_transfer"

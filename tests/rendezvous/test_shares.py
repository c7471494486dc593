"""Shares: one sum, and for each what leaves room for somebody else."""

from __future__ import annotations

import pytest

from kvxfer.rendezvous.shares import SHARE, FairShares, exceeds_fair_share


@pytest.mark.parametrize("limit", [1, 2, 9, 10, 100, 1000])
def test_one_alone_gets_nearly_everything_and_always_something(limit: int) -> None:
    shares = FairShares(limit)
    while shares.room("a"):
        shares.take("a")
    assert limit - limit // SHARE <= shares.total + 1 <= limit + 1
    assert shares.total >= 1
    if limit > SHARE + 1:
        assert shares.room("b")
    shares.check()


def test_many_share_what_there_is() -> None:
    shares = FairShares(900)
    for _ in range(900):
        for who in range(100):
            if shares.room(who):
                shares.take(who)
    assert shares.total == 900
    assert max(shares.held(who) for who in range(100)) <= 10


def test_large_amounts_leave_room_behind_them() -> None:
    shares = FairShares(256)
    shares.take("a", 128)
    assert not shares.room("a", 128), "nothing would be left for others"
    assert shares.room("a", 90)
    assert shares.room("b", 128)
    assert FairShares(256).room("a", 256), "whoever holds nothing is never greedy"
    assert not FairShares(256).room("a", 257)


def test_what_is_given_back_is_free() -> None:
    shares = FairShares(10)
    shares.take("a", 3)
    shares.take("b", 2)
    assert shares.others("a")
    assert shares.most() == "a"
    shares.give("a", 3)
    shares.give("c", 0)
    assert not shares.others("b")
    shares.set("b", 7)
    assert (shares.total, shares.held("b")) == (7, 7)
    shares.set("b", 0)
    assert (shares.total, shares.most()) == (0, None)
    shares.check()
    with pytest.raises(AssertionError):
        shares.give("a")


def test_greedy_is_who_holds_more_than_a_multiple_of_what_is_free() -> None:
    assert not exceeds_fair_share(0, 100, 100)
    assert exceeds_fair_share(9, 99, 100)
    assert not exceeds_fair_share(8, 99, 100)

"""What several pushes have written of one offer, without any of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvxfer import coverage
from kvxfer.coverage import Box
from kvxfer.errors import ProtocolError, TooLarge
from kvxfer.flows import incoming as incoming_module
from kvxfer.flows.incoming import Incoming
from kvxfer.wire.tags import COMMIT, LAYER

WANT = Box(layers=range(2, 5), parts=range(2), heads=range(4), tokens=range(40))
LOW, HIGH = replace(WANT, heads=range(2)), replace(WANT, heads=range(2, 4))
FIRST, LAST = replace(WANT, layers=range(2, 3)), replace(WANT, layers=range(3, 5))


def test_a_layer_is_there_when_all_have_written_it_and_all_is_committed_when_all_are() -> None:
    found = Incoming(WANT)
    assert found.claimed(1, [LOW]) is None
    assert found.claimed(2, [HIGH]) is None
    for layer in (2, 3, 4):
        assert found.on_notification(1, LAYER, layer, 0) == ""
    assert found.take_visible() == []
    assert found.on_notification(1, COMMIT, 0, 3) == ""
    assert not found.complete
    assert found.missing() == "heads 2-3"
    assert found.on_notification(2, LAYER, 3, 0) == ""
    assert found.take_visible() == [3]
    assert found.take_visible() == []
    for layer in (4, 2):
        found.on_notification(2, LAYER, layer, 0)
    assert found.take_visible() == [4, 2]
    assert not found.complete, "written is not committed"
    assert len(found.writing) == 1
    assert found.on_notification(2, COMMIT, 0, 3) == ""
    assert found.complete
    assert not found.writing


def test_stages_count_their_own_layers() -> None:
    found = Incoming(WANT)
    found.claimed(1, [FIRST])
    found.claimed(2, [LAST])
    assert found.on_notification(1, LAYER, 3, 0) == "no_such_layer"
    assert found.on_notification(1, LAYER, 2, 0) == ""
    assert found.take_visible() == [2]
    assert found.on_notification(1, COMMIT, 0, 1) == ""
    for layer in (3, 4):
        found.on_notification(2, LAYER, layer, 0)
    assert found.on_notification(2, COMMIT, 0, 2) == ""
    assert found.complete


@pytest.mark.parametrize(
    ("layers", "said"), [([2, 3], 2), ([2, 3], 3), ([2, 3, 4], 2), ([], 0), ([2, 3, 4], 2**64 - 1)]
)
def test_a_count_that_does_not_fit_the_box_ends_the_offer(layers: list[int], said: int) -> None:
    found = Incoming(WANT)
    found.claimed(1, [LOW])
    for layer in layers:
        found.on_notification(1, LAYER, layer, 0)
    assert isinstance(found.on_notification(1, COMMIT, 0, said), ProtocolError)
    assert not found.committed


def test_what_does_not_fit_is_not_believed() -> None:
    found = Incoming(WANT)
    found.claimed(1, [LOW])
    assert found.on_notification(1, LAYER, 1, 0) == "no_such_layer"
    assert found.on_notification(1, LAYER, 5, 0) == "no_such_layer"
    assert found.on_notification(1, LAYER, 2, 0) == ""
    assert found.on_notification(1, LAYER, 2, 0) == "repeated"
    found.on_notification(1, LAYER, 3, 0)
    found.on_notification(1, LAYER, 4, 0)
    found.on_notification(1, COMMIT, 0, 3)
    for kind in (COMMIT, LAYER):
        assert found.on_notification(1, kind, 3, 3) == "repeated", "what is committed stays so"
    found.claimed(1, [WANT])
    assert found.missing() == "heads 2-3", "a claim is announced once"


def test_what_comes_before_its_claim_counts_when_the_claim_comes() -> None:
    found = Incoming(WANT)
    for kind, layer in ((LAYER, 2), (LAYER, 3), (LAYER, 3), (LAYER, 4), (COMMIT, 0)):
        assert found.on_notification(1, kind, layer, 3 * (kind == COMMIT)) == ""
    assert found.take_visible() == []
    assert not found.committed
    assert found.claimed(1, []) is None, "without boxes it is all"
    assert found.take_visible() == [2, 3, 4]
    assert found.complete


def test_bad_news_before_its_claim_is_told_with_the_claim() -> None:
    found = Incoming(WANT)
    found.on_notification(1, COMMIT, 0, 3)
    assert isinstance(found.claimed(1, [WANT]), ProtocolError)


def test_notices_of_claims_that_nobody_announces_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming_module, "UNEXPECTED_NOTIFICATIONS_MAX", 3)
    found = Incoming(WANT)
    assert [found.on_notification(number, LAYER, 2, 0) for number in (7, 8, 9, 10)] == ["", "", "", "too_early"]
    assert found.take_unexpected() == [LAYER] * 3
    assert found.on_notification(10, COMMIT, 0, 2) == ""
    found.claimed(10, [FIRST])
    assert found.take_unexpected() == []


def test_of_nothing_the_first_commit_is_enough() -> None:
    found = Incoming(replace(WANT, tokens=range(0)))
    assert not found.complete
    found.claimed(1, [replace(FIRST, tokens=range(0))])
    found.on_notification(1, LAYER, 2, 0)
    assert found.take_visible() == [2]
    assert found.on_notification(1, COMMIT, 0, 1) == ""
    assert found.complete
    assert found.take_visible() == [3, 4]


def test_what_was_expected_is_over() -> None:
    found = Incoming(WANT, sources=2)
    for number, box in ((1, FIRST), (2, replace(LAST, heads=range(3)))):
        assert not found.over
        found.claimed(number, [box])
        for layer in box.layers:
            found.on_notification(number, LAYER, layer, 0)
        found.on_notification(number, COMMIT, 0, len(box.layers))
    assert found.over
    assert found.missing() == "head 3 of layers 3-4"


def test_too_many_pieces_end_the_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "FRAGMENTS_MAX", 1)
    found = Incoming(WANT)
    found.claimed(1, [replace(WANT, heads=range(1, 3), tokens=range(7, 9))])
    assert isinstance(found.on_notification(1, LAYER, 2, 0), TooLarge)


def test_a_part_that_is_not_the_announced_one_ends_the_offer() -> None:
    found = Incoming(WANT)
    found.claimed(1, [LOW])
    assert found.on_notification(1, LAYER, 2, 2 * 2 * 40) == ""
    error = found.on_notification(1, LAYER, 3, 2 * 4 * 40)
    assert isinstance(error, ProtocolError)
    assert error.fields == {"layer": 3, "said": 320, "expected": 160}

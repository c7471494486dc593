"""Kinds of fields: what they take, what they refuse, and what they make of it."""

from __future__ import annotations

import math

import pytest

from kvxfer.wire.codec import (
    Blob,
    Flag,
    Hex,
    Kind,
    OneOf,
    Oversize,
    Prose,
    Scalars,
    Seconds,
    Text,
    TextList,
    UInt,
    shown,
)
from tests.wire.samples import largest, ordinary, wrong

KINDS: tuple[Kind, ...] = (
    UInt(),
    UInt(9, min=1),
    Seconds(60.0),
    Flag(),
    Text(5),
    Text(5, min=1),
    Prose(10),
    OneOf(("one", "two")),
    Hex(32),
    Hex(32, empty=True),
    Blob(5),
    Blob(16, min=16),
    Blob(16, min=16, empty=True),
    TextList(3, 20),
    Scalars(5, 8, 9),
)
IDS = [str(kind) for kind in KINDS]


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_takes_the_largest_and_says_what_it_is(kind: Kind) -> None:
    assert kind.check(largest(kind)) == largest(kind)
    assert kind.describe()


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
def test_refuses_what_is_wrong(kind: Kind) -> None:
    refused = 0
    for value in wrong(kind):
        if isinstance(kind, Blob) and kind.empty and value == b"":
            continue
        with pytest.raises(ValueError, match="must "):
            kind.check(value)
        refused += 1
    assert refused > 3


def test_too_much_is_told_apart_from_wrong() -> None:
    for kind, value in ((UInt(5), 6), (Text(1), "xx"), (Blob(1), b"xx"), (TextList(1, 1), ("xx",)), (Seconds(1), 2.0)):
        with pytest.raises(Oversize):
            kind.check(value)
    for number in (2**64, -(2**63) - 1):
        with pytest.raises(Oversize):
            Scalars(1, 1, 1).check({"x": number})
    with pytest.raises(ValueError, match="must be an integer") as caught:
        UInt(5).check("6")
    assert not isinstance(caught.value, Oversize)


def test_true_is_no_number_and_1_is_not_true() -> None:
    for kind in (UInt(), Seconds(5)):
        with pytest.raises(ValueError, match="got bool"):
            kind.check(True)
    with pytest.raises(ValueError, match="got int"):
        Flag().check(1)


def test_normal_forms() -> None:
    assert type(Seconds(60).check(5)) is float
    assert type(Blob(5).check(bytearray(b"abc"))) is bytes
    assert Blob(5).check(memoryview(b"abc")) == b"abc"
    assert TextList(2, 5).check(["a", "b"]) == ("a", "b")
    data = b"abc"
    assert Blob(5).check(data) is data


def test_prose_is_cut_and_never_refused_for_its_length() -> None:
    assert Prose(10).check("0123456789") == "0123456789"
    assert Prose(10).check("0123456789a") == "0123456..."


def test_seconds_stay_finite() -> None:
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="finite"):
            Seconds(1e300).check(value)
    with pytest.raises(ValueError, match="must be"):
        Seconds(60).check(10**400)


def test_a_shown_value_is_short() -> None:
    assert shown("short") == "'short'"
    assert len(shown("x" * 1000)) <= 40


def test_samples_are_valid() -> None:
    for kind in KINDS:
        if not isinstance(kind, Text | Prose):
            kind.check(ordinary(kind, 1))

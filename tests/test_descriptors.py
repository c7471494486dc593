"""Descriptors and tickets: they survive JSON, show no key, and whatever is malformed is a UsageError."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.descriptors import ACCESS_BY_NAME, RemoteDescriptor, Ticket
from kvxfer.errors import UsageError

HEX = st.binary(min_size=16, max_size=16).map(bytes.hex)
U64 = st.integers(0, 2**64 - 1)
TEXT = st.text(min_size=1, max_size=20)
SECONDS = st.floats(0, 1e6)
DESCRIPTORS = st.builds(
    RemoteDescriptor,
    node_id=HEX,
    incarnation=HEX,
    engine_id=HEX,
    region=U64,
    grant=U64,
    generation=U64,
    length=st.integers(1, 2**64 - 1),
    access=st.sampled_from(sorted(ACCESS_BY_NAME.values())),
    key=st.binary(min_size=16, max_size=16),
    kind=st.sampled_from(["dram", "hbm"]),
    expires_in_s=st.one_of(st.none(), SECONDS),
    endpoints=st.dictionaries(TEXT, st.lists(TEXT, min_size=1, max_size=8).map(tuple), min_size=1, max_size=8),
)
TICKETS = st.builds(
    Ticket,
    node_id=HEX,
    incarnation=HEX,
    addresses=st.lists(TEXT, min_size=1, max_size=8).map(tuple),
    posting=HEX,
    secret=st.binary(min_size=16, max_size=16),
    request_id=st.text(min_size=1, max_size=256),
    expires_in_s=SECONDS,
)
JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=40)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


def descriptor_dict(**changes: Any) -> dict[str, Any]:
    return {
        "v": 1,
        "node_id": "a" * 32,
        "incarnation": "b" * 32,
        "engine_id": "c" * 32,
        "region": 1,
        "grant": 2,
        "generation": 3,
        "length": 4096,
        "access": "rw",
        "key": "00" * 16,
        "kind": "dram",
        "expires_in_s": None,
        "endpoints": {"tcp": ["127.0.0.1:1"]},
    } | changes


def ticket_dict(**changes: Any) -> dict[str, Any]:
    return {
        "v": 1,
        "node_id": "a" * 32,
        "incarnation": "b" * 32,
        "addresses": ["127.0.0.1:1"],
        "posting": "d" * 32,
        "secret": "00" * 16,
        "request_id": "R",
        "expires_in_s": 60.0,
    } | changes


@given(DESCRIPTORS)
def test_a_descriptor_survives_json(descriptor: RemoteDescriptor) -> None:
    assert RemoteDescriptor.from_dict(json.loads(json.dumps(descriptor.to_dict()))) == descriptor


@given(TICKETS)
def test_a_ticket_survives_json(ticket: Ticket) -> None:
    assert Ticket.from_json(ticket.to_json()) == ticket


def test_no_key_is_shown() -> None:
    key = "5ec7e7" + "11" * 13
    descriptor = RemoteDescriptor.from_dict(descriptor_dict(key=key))
    ticket = Ticket.from_dict(ticket_dict(secret=key))
    for shown in (repr(descriptor), str(descriptor), repr(ticket), str(ticket)):
        assert "5ec7e7" not in shown
        assert repr(bytes.fromhex(key))[2:10] not in shown


@pytest.mark.parametrize("name", sorted(descriptor_dict()))
@pytest.mark.parametrize(
    "value", ["", -1, 2**64, "zz", [], {}, b"", float("nan"), float("inf"), "a" * 33, {"tcp": "x"}]
)
def test_a_bad_field_of_a_descriptor_is_refused(name: str, value: object) -> None:
    RemoteDescriptor.from_dict(descriptor_dict())
    with pytest.raises(UsageError):
        RemoteDescriptor.from_dict(descriptor_dict(**{name: value}))


@pytest.mark.parametrize("name", sorted(ticket_dict()))
@pytest.mark.parametrize("value", ["", -1, [], {}, b"", float("nan"), float("inf"), "a" * 257, None])
def test_a_bad_field_of_a_ticket_is_refused(name: str, value: object) -> None:
    Ticket.from_dict(ticket_dict())
    with pytest.raises(UsageError):
        Ticket.from_dict(ticket_dict(**{name: value}))


@pytest.mark.parametrize("name", sorted(ticket_dict()))
def test_a_missing_field_is_named(name: str) -> None:
    raw = ticket_dict()
    del raw[name]
    with pytest.raises(UsageError, match="version" if name == "v" else name):
        Ticket.from_dict(raw)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"x"', "[" * 100_000, "NaN", "{}"], ids=lambda t: t[:5])
def test_a_text_that_is_no_ticket(text: str) -> None:
    with pytest.raises(UsageError):
        Ticket.from_json(text)


@given(st.sampled_from(sorted(descriptor_dict())), JUNK)
def test_junk_in_a_descriptor_is_a_usage_error(name: str, junk: object) -> None:
    try:
        RemoteDescriptor.from_dict(descriptor_dict(**{name: junk}))
    except UsageError as error:
        assert "bad descriptor" in error.message


@given(JUNK)
def test_junk_instead_of_a_ticket_is_a_usage_error(junk: Any) -> None:
    with pytest.raises(UsageError, match="bad ticket"):
        Ticket.from_dict(junk)

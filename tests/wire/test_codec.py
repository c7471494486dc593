"""Every message, by its declaration: round trips, bounds of each field, and bytes that must never change."""

from __future__ import annotations

import timeit
from dataclasses import FrozenInstanceError, dataclass, replace
from typing import Annotated, Any

import pytest
from hypothesis import given, settings

from kvxfer.errors import ProtocolError, TooLarge, UsageError
from kvxfer.wire.codec import (
    LENGTH_BYTES,
    MESSAGES,
    Blob,
    Flag,
    Hex,
    Message,
    Oversize,
    Prose,
    Since,
    UInt,
    Unknown,
    decode,
    encode,
    numbered,
)
from kvxfer.wire.messages import Claim, Error, Hello, Mail, Ping, Posted, Refuse, Settle
from tests.conftest import slack
from tests.wire import golden
from tests.wire.samples import full, largest, messages, payload, raw, wrong

ALL = sorted(MESSAGES.values(), key=lambda message: message.number)
NAMES = [message.__name__ for message in ALL]
every_message = pytest.mark.parametrize("declared", ALL, ids=NAMES)


def decoded(message: Message) -> Message | Unknown:
    return decode(encode(message)[LENGTH_BYTES:])


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_a_frame_by_hand() -> None:
    assert encode(Ping(rid=300)).hex(" ") == "00 00 00 0a 92 06 81 a3 72 69 64 cd 01 2c"


@every_message
def test_golden_bytes(declared: type[Message]) -> None:
    entry = golden.load(golden.MESSAGES_FILE).get(declared.__name__)
    assert entry is not None, f"no golden bytes for {declared.__name__}: run python -m tests.wire.golden"
    assert entry["number"] == declared.number
    since = {name: value for name, value in declared.optional.items() if name not in entry["fields"]}
    message = replace(full(declared), **since)  # type: ignore[type-var]
    assert encode(message).hex() == entry["frame"]
    received = decode(bytes.fromhex(entry["frame"])[LENGTH_BYTES:])
    assert received == message
    assert isinstance(received, Message)
    assert golden.described(received) == entry["fields"] | golden.described(message)


def test_every_golden_message_still_exists() -> None:
    assert {entry["number"]: name for name, entry in golden.load(golden.MESSAGES_FILE).items()} == {
        message.number: message.__name__ for message in ALL
    }


# -- round trips ------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(messages())
def test_any_message_survives(message: Message) -> None:
    assert decoded(message) == message


@every_message
def test_every_field_at_its_maximum(declared: type[Message]) -> None:
    message = declared(**{name: largest(kind) for name, kind in declared.kinds})
    assert decoded(message) == message


@every_message
def test_every_field_with_every_wrong_value(declared: type[Message]) -> None:
    fields = raw(full(declared))
    for name, kind in declared.kinds:
        for value in wrong(kind):
            if isinstance(kind, Blob | Hex) and kind.empty and not value and isinstance(value, bytes | str):
                continue
            with pytest.raises(ProtocolError) as caught:
                decode(payload(declared.number, {**fields, name: value}))
            assert caught.value.fields == {"kind": declared.__name__, "field": name}
            assert f"{declared.__name__}.{name} " in caught.value.message
            with pytest.raises(UsageError) as local:
                declared(**{**fields, name: value})
            assert local.value.fields == {"kind": declared.__name__, "field": name}


@every_message
def test_every_field_must_be_there(declared: type[Message]) -> None:
    fields = raw(full(declared))
    for name, _ in declared.kinds:
        rest = {other: value for other, value in fields.items() if other != name}
        if name in declared.optional:
            assert isinstance(decode(payload(declared.number, rest)), declared)
            continue
        with pytest.raises(ProtocolError, match=f"{declared.__name__}.{name} is missing") as caught:
            decode(payload(declared.number, rest))
        assert caught.value.fields == {"kind": declared.__name__, "field": name}


@every_message
def test_unknown_fields_are_ignored(declared: type[Message]) -> None:
    message = full(declared)
    more = {"from_the_future": [1, {"x": b"y"}], "zzz": None}
    assert decode(payload(declared.number, {**more, **raw(message)})) == message


@pytest.mark.parametrize(
    ("fields", "rid"),
    [
        ({}, 0),
        ({"rid": 7}, 7),
        ({"rid": 2**64 - 1, "x": 1}, 2**64 - 1),
        ({"rid": -1}, 0),
        ({"rid": "7"}, 0),
        ({"rid": True}, 0),
    ],
)
def test_unknown_numbers_are_told_with_their_request(fields: dict[str, Any], rid: int) -> None:
    for number in (0, 99, 2**64 - 1):
        assert decode(payload(number, fields)) == Unknown(number=number, rid=rid)


@pytest.mark.parametrize(
    "data",
    [
        b"\x92\x06\x81\xa3rid\xa1\xff",  # text that is not UTF-8
        b"\x92\x06\x81\xa3rid\x81\x01\x02",  # a map inside whose key is a number
        b"\x92\x06\x81\x01\x02",  # the same, of the fields
        b"\x92\x06\x81\x90\x02",  # a key that is a list
    ],
)
def test_what_msgpack_itself_refuses(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="not valid msgpack"):
        decode(data)


# -- on this side -----------------------------------------------------------------------------------------------------


def test_too_much_is_its_own_error() -> None:
    with pytest.raises(TooLarge, match=r"Mail.channel must have 1 to 256 characters, got 257"):
        Mail(channel="x" * 257)
    with pytest.raises(UsageError) as caught:
        Settle(posting="0" * 32, claim=1, outcome="maybe")
    assert not isinstance(caught.value, TooLarge)


def test_text_that_is_no_unicode() -> None:
    with pytest.raises(UsageError, match="no Unicode"):
        encode(Mail(channel="\ud800"))


def test_a_frame_at_its_maximum_and_beyond() -> None:
    mail = Mail(channel="c", data=b"x" * 100)
    size = len(encode(mail)) - LENGTH_BYTES
    assert encode(mail, size) == encode(mail)
    with pytest.raises(TooLarge) as caught:
        encode(mail, size - 1)
    assert caught.value.fields == {"kind": "Mail", "bytes": size, "limit": size - 1}


def test_messages_are_values() -> None:
    ping = Ping(rid=1)
    assert ping == Ping(rid=1)
    assert replace(ping, rid=2).rid == 2
    with pytest.raises(UsageError):
        replace(ping, rid=-1)
    with pytest.raises(FrozenInstanceError):
        ping.rid = 5  # type: ignore[misc]


def test_a_message_shows_no_bytes() -> None:
    posted = Posted(rid=0, posting="ab" * 16, secret=b"0123456789abcdef", expires_in_s=60)
    assert repr(posted) == f"Posted(rid=0, posting='{'ab' * 16}', secret=<16 bytes>, expires_in_s=60.0)"


def test_explanations_are_cut_on_both_sides() -> None:
    error = Error(code="busy", message="x" * 5000)
    assert len(error.message) == 1024
    received = decode(payload(Refuse.number, {"code": "busy", "message": "x" * 5000, "fields": {}}))
    assert isinstance(received, Refuse)
    assert len(received.message) == 1024


def test_numbers_are_given_once() -> None:
    with pytest.raises(AssertionError, match="two messages have the number 6"):
        numbered(6)(Ping)


def test_a_later_version_may_add_a_field() -> None:
    known = dict(MESSAGES)
    try:

        @numbered(99)
        @dataclass(frozen=True, slots=True, kw_only=True, repr=False)
        class Newer(Message):
            rid: Annotated[int, UInt()] = 0
            reason: Annotated[str, Prose(20), Since(2)] = "none given"
            firm: Annotated[bool, Flag()]

        assert decode(payload(99, {"rid": 5, "firm": True})) == Newer(rid=5, firm=True)
        assert decode(payload(99, {"rid": 5, "firm": True, "reason": "x"})) == Newer(rid=5, firm=True, reason="x")
        assert decode(payload(99, {"rid": 5}), registry=known) == Unknown(number=99, rid=5)
    finally:
        MESSAGES.clear()
        MESSAGES.update(known)


def test_oversize_is_a_value_error() -> None:
    assert issubclass(Oversize, ValueError)


def test_no_message_has_too_many_fields() -> None:
    assert max(len(message.kinds) for message in ALL) <= 12
    assert len(Hello.kinds) == 12


def test_a_claim_is_cheap() -> None:
    claim = Claim(
        node=("10.0.0.1:17800",), kind="offer", key="request-1", node_id="a" * 32, engine_id="b" * 32, wait_s=5
    )
    frame = encode(claim)[LENGTH_BYTES:]
    best = min(timeit.repeat(lambda: decode(frame) and encode(claim), number=500, repeat=5)) / 500
    assert best < 100e-6 * slack(), f"{best * 1e6:.1f} us"  # 12 us on an idle machine

"""The walk over a message's bytes refuses what the codec must not unpack."""

from __future__ import annotations

import time

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import ProtocolError
from kvxfer.wire.codec import DEPTH_MAX, VALUES_MAX, check_structure
from tests.conftest import slack

ACCEPTED = (
    [1, {}],
    [0xCC, {"a": 1}],
    [0xFFFF, {"a": -1, "b": -33, "c": -200, "d": -40000, "e": -(2**40)}],
    [2**32 - 1, {"a": 200, "b": 40000, "c": 2**31, "d": 2**63}],
    [2**64 - 1, {"a": None, "b": True, "c": False, "d": 1.5}],
    [1, {"s": "", "t": "x" * 31, "u": "x" * 32, "v": "x" * 256, "w": "x" * 65536}],
    [1, {"s": b"", "t": b"x" * 255, "u": b"x" * 256, "v": b"x" * 65536}],
    [1, {"list": list(range(16)), "map": {str(i): i for i in range(16)}, "deep": [[1], {"x": 1}]}],
)


@pytest.mark.parametrize("value", ACCEPTED, ids=range(len(ACCEPTED)))
def test_accepts_every_form_that_msgpack_gives_to_allowed_values(value: object) -> None:
    check_structure(msgpack.packb(value))


@pytest.mark.parametrize("value", ACCEPTED, ids=range(len(ACCEPTED)))
def test_refuses_it_when_cut_or_continued(value: object) -> None:
    whole = msgpack.packb(value)
    for end in {*range(min(len(whole), 60)), len(whole) - 1, len(whole) // 2}:
        with pytest.raises(ProtocolError):
            check_structure(whole[:end])
    with pytest.raises(ProtocolError, match="not as long as its frame"):
        check_structure(whole + b"\xc0")


REFUSED = {
    "nothing": (b"", "not an array"),
    "an array of one": (msgpack.packb([1]), "not an array"),
    "an array of three": (msgpack.packb([1, {}, 1]), "not an array"),
    "a long form of an array of two": (b"\xdc\x00\x02\x01\x80", "not an array"),
    "a map": (msgpack.packb({1: 2}), "not an array"),
    "a negative number": (msgpack.packb([-1, {}]), "begin with its number"),
    "a float as number": (msgpack.packb([1.0, {}]), "begin with its number"),
    "text as number": (msgpack.packb(["1", {}]), "begin with its number"),
    "true as number": (msgpack.packb([True, {}]), "begin with its number"),
    "fields that are a list": (msgpack.packb([1, []]), "no map of fields"),
    "fields that are nil": (msgpack.packb([1, None]), "no map of fields"),
    "no fields": (b"\x92\xcc\x81", "no map of fields"),
    "an extension": (msgpack.packb([1, {"a": msgpack.ExtType(5, b"abc")}]), "not allowed"),
    "a timestamp": (msgpack.packb([1, {"a": msgpack.Timestamp(1, 2)}]), "not allowed"),
    "a byte that msgpack never uses": (b"\x92\x01\x81\xa1a\xc1", "not allowed"),
    "a text longer than the frame": (b"\x92\x01\x81\xa1a\xdb\xff\xff\xff\xff", "not as long"),
    "bytes longer than the frame": (b"\x92\x01\x82\xa1a\xc6\xff\xff\xff\xff\xa1b\x01", "middle of a value"),
    "a list of four thousand million": (b"\x92\x01\x81\xa1a\xdd\xff\xff\xff\xff", "too many values"),
    "a map of four thousand million": (b"\x92\x01\xdf\xff\xff\xff\xff", "too many values"),
    "a length that is cut": (b"\x92\x01\x81\xa1a\xdd\xff", "middle of a value|too many"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    payload, why = REFUSED[name]
    with pytest.raises(ProtocolError, match=why):
        check_structure(payload)


def nested(levels: int) -> bytes:
    """A message with lists in a field, so that there are so many levels in all."""
    value: list[object] = []
    for _ in range(levels - 3):
        value = [value]
    packed: bytes = msgpack.packb([1, {"a": value}])
    return packed


def test_depth_at_its_limit_and_beyond() -> None:
    check_structure(nested(DEPTH_MAX))
    with pytest.raises(ProtocolError, match="too deep"):
        check_structure(nested(DEPTH_MAX + 1))


def test_number_of_values_at_its_limit_and_beyond() -> None:
    spent = 2  # the key and the list itself
    check_structure(msgpack.packb([1, {"a": [0] * (VALUES_MAX - spent)}]))
    with pytest.raises(ProtocolError, match="too many values"):
        check_structure(msgpack.packb([1, {"a": [0] * (VALUES_MAX - spent + 1)}]))


@pytest.mark.parametrize("filling", [b"\x90", b"\x91", b"\x80", b"\xc0", b"\xa0", b"\xdc\xff\xff"])
def test_a_long_hostile_frame_costs_little(filling: bytes) -> None:
    started = time.perf_counter()
    with pytest.raises(ProtocolError):
        check_structure(b"\x92\x01\x81\xa1a\xdd\x00\x10\x00\x00" + filling * (1 << 20))
    with pytest.raises(ProtocolError):
        check_structure(b"\x92\x01\x81\xa1a\xdc\x03\x00" + filling * (1 << 20))
    assert time.perf_counter() - started < 0.2 * slack()


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.binary(max_size=60))
def test_garbage_is_either_well_formed_or_refused(data: bytes) -> None:
    payload = b"\x92\x01\x81\xa1a" + data
    try:
        check_structure(payload)
    except ProtocolError:
        return
    # The unpacker agrees about the extent; what is in texts, and keys of inner maps, is its own affair.
    unpacker = msgpack.Unpacker()
    unpacker.feed(payload)
    unpacker.skip()
    assert unpacker.tell() == len(payload)

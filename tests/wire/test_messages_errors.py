"""Errors on their way through a message and back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import BY_CODE, BusyError, InternalError, KvxferError, ProtocolError, TransferTimeout, UsageError
from kvxfer.wire.codec import LENGTH_BYTES, decode, encode
from kvxfer.wire.messages import DETAIL_CHARS_MAX, DETAILS_MAX, Error, Refuse, error_reply, exception_of, refusal
from tests.wire.samples import SCALAR, TEXT


def across(error: BaseException, rid: int = 7) -> KvxferError:
    """What the other side raises."""
    message = decode(encode(error_reply(error, rid))[LENGTH_BYTES:])
    assert isinstance(message, Error)
    assert message.rid == rid
    return exception_of(message)


@pytest.mark.parametrize("code", BY_CODE)
def test_every_class_arrives_as_itself(code: str) -> None:
    sent = BY_CODE[code]("what happened", hint="what to do", transport="shm", limit=5, value=None, ratio=0.5)
    got = across(sent)
    assert type(got) is type(sent)
    assert (got.message, got.hint, got.transport, got.fields) == (sent.message, sent.hint, sent.transport, sent.fields)
    assert got.retryable == sent.retryable
    refused = exception_of(refusal(sent))
    assert type(refused) is type(sent)
    assert refused.message == "the other side refused the connection: what happened"
    assert refused.fields == sent.fields


def test_retryable_is_what_the_sender_said() -> None:
    assert across(UsageError("x", retryable=True)).retryable
    assert not across(BusyError("x", retryable=False)).retryable


def test_what_only_the_sender_knows_stays_there() -> None:
    got = across(TransferTimeout("x", peer="node-a", op_id=5, status=3))
    assert (got.peer, got.op_id, got.status, got.fields) == (None, None, None, {})


def test_foreign_exceptions_say_their_type_and_nothing_else() -> None:
    got = across(ValueError("a path, or worse"))
    assert type(got) is InternalError
    assert got.message == "internal error: ValueError"


def test_an_unknown_code_is_kept() -> None:
    got = exception_of(Error(rid=1, code="from_the_future", message="x", fields={"a": 1}, retryable=True))
    assert type(got) is KvxferError
    assert got.fields == {"unknown_code": "from_the_future", "a": 1}
    assert got.retryable


def test_a_message_without_text_says_its_code() -> None:
    assert exception_of(Error(rid=1, code="busy")).message == "busy"


def test_a_peer_cannot_choose_what_is_ours() -> None:
    ours = {"self": 1, "code": 1, "message": 1, "unknown_code": 1, "op_id": 1, "peer": "x", "status": 1, "retryable": 1}
    for code in ("busy", "from_the_future"):
        got = exception_of(Error(code=code, fields={**ours, "hint": 5, "transport": True}))
        assert got.message == code
        assert (got.peer, got.op_id, got.status, got.hint, got.transport) == (None,) * 5
        assert not set(got.fields) & {"self", "code", "message", "hint"}


def test_fields_are_bounded() -> None:
    many = {f"field-{place}": place for place in range(2 * DETAILS_MAX)}
    assert len(across(ProtocolError("x", **many)).fields) == DETAILS_MAX
    error = ProtocolError("x" * 5000, text="y" * 5000, huge=10**30, odd=float("nan"), **{"n" * 500: 1})
    error.fields["object"] = object()  # type: ignore[assignment]
    got = across(error).fields
    assert got["text"] == "y" * DETAIL_CHARS_MAX
    assert got["huge"] == str(10**30)
    assert got["odd"] == "nan"
    assert str(got["object"]).startswith("<object")
    assert got["n" * 64] == 1


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.sampled_from((Error, Refuse)), st.text("abc_", min_size=1), TEXT, st.dictionaries(TEXT, SCALAR, max_size=8))
def test_any_message_gives_an_error(
    kind: type[Error | Refuse], code: str, text: str, fields: dict[str, object]
) -> None:
    got = exception_of(kind(code=code, message=text, fields=fields))
    assert isinstance(got, KvxferError)
    assert str(got)

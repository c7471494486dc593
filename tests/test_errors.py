"""The error tree: stable codes, the answers that callers branch on, and errors that a peer chose."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer import errors
from kvxfer.errors import BY_CODE, KvxferError, from_code

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, KvxferError)]


def test_every_class_has_a_code_of_its_own() -> None:
    assert len(CLASSES) > 40
    assert {cls.code: cls for cls in CLASSES} == dict(BY_CODE)
    assert len(BY_CODE) == len(CLASSES), "two classes share a code"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_class_says_what_it_is_for_and_survives_pickling(cls: type[KvxferError]) -> None:
    assert cls.__doc__
    error = cls("what", op_id=7, peer="a:1", retryable=True, hint="do", limit=3)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == str(error) == "what [op=7, peer=a:1, limit=3] (do)"
    assert again.fields == {"limit": 3}
    assert again.retryable


def test_builtin_families() -> None:
    assert issubclass(errors.UsageError, ValueError)
    assert issubclass(errors.TransferTimeout, TimeoutError)


def test_who_may_retry() -> None:
    assert errors.BusyError("x").retryable
    assert errors.TooManyPending("x").retryable
    assert errors.PeerLost("x").retryable
    assert not errors.PeerLost("x", retryable=False).retryable
    assert not errors.AuthenticationError("x").retryable
    assert not errors.UsageError("x").retryable


def test_an_error_from_the_wire() -> None:
    error = from_code("peer_incarnation", "restarted", expected="a", actual="b", peer="n", status=-3)
    assert isinstance(error, errors.PeerIncarnationMismatch)
    assert (error.peer, error.status, error.fields) == ("n", -3, {"expected": "a", "actual": "b"})


def test_a_code_of_the_future() -> None:
    error = from_code("from_2031", "new", retryable=True)
    assert type(error) is KvxferError
    assert error.fields == {"unknown_code": "from_2031"}
    assert error.retryable


@given(
    st.one_of(st.sampled_from(sorted(BY_CODE)), st.text(max_size=10)),
    st.text(max_size=10),
    st.dictionaries(
        st.one_of(
            st.sampled_from(
                ["message", "self", "code", "fields", "op_id", "peer", "retryable", "hint", "status", "args"]
            ),
            st.text(max_size=5),
        ),
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    ),
)
def test_whatever_a_peer_sends_becomes_an_error(code: str, message: str, fields: dict[str, Any]) -> None:
    error = from_code(code, message, **fields)
    assert error.message == message
    assert isinstance(str(error), str)
    assert isinstance(error.retryable, bool)
    assert error.peer is None or isinstance(error.peer, str)

"""What came with which version of the protocol, and what a side says to another that is older or newer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvxfer.errors import KvxferError, UnknownMessage, VersionMismatch
from kvxfer.wire import messages as m
from kvxfer.wire.codec import LENGTH_BYTES, MESSAGES, Unknown, decode, encode, unread
from kvxfer.wire.session import HANDSHAKE, MAY_SEND, VERSIONS, Closed, Session, State, Step
from tests.wire.samples import full
from tests.wire.test_session import ACCEPTOR, DIALLER, SECRET, Pair, acceptor, dialler, in_state

# By version: messages by name, and fields of older messages. What a version that was released has never changes.
ADDED = {
    2: {
        *("GiveUp", "Confirm", "Report", "Hello.namespace", "Welcome.namespace", "Refuse.fields", "Land.wait_s"),
        *("Post.boxes", "Post.private", "Claim.boxes", "Claimed.boxes", "PostingEvent.boxes", "EchoReply.via"),
    },
}
NEWEST = VERSIONS[1]
LATER = [message for message in MESSAGES.values() if message.since > 1]


def met(mine: tuple[int, int], yours: tuple[int, int], role: str = "peer") -> Pair:
    return Pair(dialler(replace(DIALLER, role=role), versions=mine), acceptor(versions=yours)).shake()


def test_what_came_with_each_version() -> None:
    found: dict[int, set[str]] = {}
    for message in MESSAGES.values():
        if message.since > 1:
            found.setdefault(message.since, set()).add(message.__name__)
        for name, version in message.added.items():
            found.setdefault(version, set()).add(f"{message.__name__}.{name}")
    assert found == ADDED
    assert set(ADDED) == set(range(2, NEWEST + 1))
    assert VERSIONS[0] >= NEWEST - 1, "a version and the one before it work together, and no promise goes further"


@pytest.mark.parametrize("message", [one for one in MESSAGES.values() if one.added], ids=lambda one: one.__name__)
def test_a_later_field_that_says_nothing_is_not_sent(message: type[m.Message]) -> None:
    sample: Any = full(message)
    silent = replace(sample, **message.optional)
    assert all(name.encode() not in encode(silent) for name in message.added)
    assert unread(silent, 1) == ()
    assert set(unread(sample, 1)) == set(message.added)
    assert unread(sample, NEWEST) == ()
    older = {name: value for name, value in full_fields(silent).items() if name not in message.added}
    assert decode(encode(silent)[LENGTH_BYTES:]) == message(**older)


def full_fields(message: m.Message) -> dict[str, Any]:
    return {name: getattr(message, name) for name, _ in message.kinds}


@pytest.mark.parametrize("message", LATER, ids=lambda one: one.__name__)
def test_an_older_peer_is_not_sent_what_it_does_not_know(message: type[m.Message]) -> None:
    role, side = next(key for key, kinds in MAY_SEND.items() if message in kinds)
    for mine, yours in (((1, NEWEST), (1, 1)), ((1, 1), (1, NEWEST))):
        end = met(mine, yours, role).ends[side]
        assert end.state is State.OPEN
        assert not end.speaks(message)
        with pytest.raises(VersionMismatch) as caught:
            end.check_send(full(message))
        error = caught.value
        assert error.fields["version"] == 1
        assert error.fields["since"] == message.since
        assert "version 1" in error.message
        assert error.hint
        assert "upgrade" in error.hint
    end = met((1, NEWEST), (1, NEWEST), role).ends[side]
    assert end.speaks(message)
    end.check_send(full(message))


@pytest.mark.parametrize("side", ["dialler", "acceptor"])
@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_namespace_that_the_other_side_cannot_read(side: str, secret: bytes | None) -> None:
    """It would put us into the wrong one, or take our proof for a wrong secret."""
    mine = {"versions": VERSIONS, "secret": secret}
    older = {"versions": (1, 1), "secret": secret}
    if side == "dialler":
        pair = Pair(dialler(replace(DIALLER, namespace="a"), **mine), acceptor(**older)).shake()
    else:
        pair = Pair(dialler(**older), acceptor(replace(ACCEPTOR, namespace="a"), **mine)).shake()
    for error in pair.errors():
        assert type(error) is VersionMismatch
        assert error.fields["field"] == "namespace"
        assert (error.fields["version"], error.fields["since"]) == (1, 2)
        assert "version 1" in error.message
        assert error.hint
        assert "upgrade the " + ("acceptor" if side == "dialler" else "dialler") in error.hint


@pytest.mark.parametrize(("mine", "yours", "older"), [((1, 1), (2, 3), "dialler"), ((3, 4), (1, 2), "acceptor")])
def test_no_common_version_says_which_side_to_upgrade(mine: Any, yours: Any, older: str) -> None:
    for error in met(mine, yours).errors():
        assert type(error) is VersionMismatch
        assert error.hint == f"upgrade the {older}: versions that follow each other work together"


@pytest.mark.parametrize("number", [0, 200, 2**64 - 1])
@pytest.mark.parametrize("rid", [0, 7])
@pytest.mark.parametrize("state", State)
def test_a_message_of_tomorrow_in_every_state(state: State, number: int, rid: int) -> None:
    end = in_state(state)
    step = end.receive(Unknown(number=number, rid=rid), 1.0)
    if state is State.CLOSED or (state not in HANDSHAKE and not rid):
        assert step == Step()
    elif state in HANDSHAKE:
        assert isinstance(step.event, Closed)
        assert type(step.event.error) is UnknownMessage
        assert [type(message) for message in step.send] == [m.Refuse]
    else:
        [answer] = step.send
        assert isinstance(answer, m.Error)
        assert (answer.rid, answer.code, step.event) == (rid, "unknown_message", None)
        assert end.state is State.OPEN


def test_a_peer_that_does_not_know_a_request() -> None:
    end: Session = met((1, NEWEST), (1, 1)).ends["dialler"]
    told = UnknownMessage("a message type that this version does not know", number=40, peer="b")
    error: KvxferError = end.not_known("Land", told)
    assert isinstance(error, UnknownMessage)
    assert error.fields == {"kind": "Land", "version": 1, "newest": NEWEST}
    assert error.peer == "b"
    assert error.hint
    assert not error.retryable

"""What later versions of the protocol may add, by a made-up next one, and what sides of two versions say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import pytest

from kvxfer.errors import KvxferError, UnknownMessage, VersionMismatch
from kvxfer.wire import codec, session
from kvxfer.wire import messages as m
from kvxfer.wire.codec import (
    LENGTH_BYTES,
    MESSAGES,
    Message,
    Since,
    Text,
    UInt,
    Unknown,
    decode,
    encode,
    numbered,
    unread,
)
from kvxfer.wire.session import HANDSHAKE, VERSIONS, Closed, Session, State, Step
from tests.wire.samples import full, payload, raw
from tests.wire.test_session import DIALLER, Pair, acceptor, dialler, in_state

NEWEST = VERSIONS[1]
NEXT = NEWEST + 1


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> tuple[type[Any], type[Any]]:
    """A message that the next version brings, and one that is old and gets a field by it."""
    monkeypatch.setattr(codec, "MESSAGES", dict(MESSAGES))

    @numbered(0xC0DE, since=NEXT)
    @dataclass(frozen=True, slots=True, kw_only=True, repr=False)
    class Tomorrow(Message):
        rid: Annotated[int, UInt()] = 0

    @numbered(0xC0DF)
    @dataclass(frozen=True, slots=True, kw_only=True, repr=False)
    class Grown(Message):
        rid: Annotated[int, UInt()] = 0
        zone: Annotated[str, Text(16), Since(NEXT)] = ""

    may = {key: kinds | {Tomorrow, Grown} for key, kinds in session.MAY_SEND.items()}
    monkeypatch.setattr(session, "MAY_SEND", may)
    return Tomorrow, Grown


def met(mine: tuple[int, int], yours: tuple[int, int], role: str = "peer") -> Pair:
    return Pair(dialler(replace(DIALLER, role=role), versions=mine), acceptor(versions=yours)).shake()


def test_all_there_is_belongs_to_the_first_version() -> None:
    """Nothing was released before it. What a version that was released has never changes."""
    assert VERSIONS == (1, 1)
    assert not [kind for kind in MESSAGES.values() if kind.since > 1 or kind.added or kind.optional]


def test_a_later_field_that_says_nothing_is_not_sent(later: tuple[type[Any], type[Any]]) -> None:
    _, grown = later
    sample = full(grown)
    silent = replace(sample, zone="")  # type: ignore[type-var]
    assert b"zone" in encode(sample)
    assert b"zone" not in encode(silent)
    assert unread(silent, NEWEST) == ()
    assert unread(sample, NEWEST) == ("zone",)
    assert unread(sample, NEXT) == ()
    assert decode(encode(silent)[LENGTH_BYTES:], codec.MESSAGES) == silent
    assert decode(encode(sample)[LENGTH_BYTES:], codec.MESSAGES) == sample


def test_who_does_not_know_a_field_reads_the_rest() -> None:
    for kind in MESSAGES.values():
        message = full(kind)
        assert decode(payload(kind.number, {**raw(message), "of_tomorrow": {"a": [1]}})) == message


@pytest.mark.parametrize("mine", [(1, NEXT), (1, NEWEST)])
def test_an_older_peer_is_not_sent_what_it_does_not_know(
    mine: tuple[int, int], later: tuple[type[Any], type[Any]]
) -> None:
    tomorrow, grown = later
    end = met(mine, (1, NEWEST) if mine[1] == NEXT else (1, NEXT)).ends["dialler"]
    assert (end.state, end.version) == (State.OPEN, NEWEST)
    assert not end.speaks(tomorrow)
    with pytest.raises(VersionMismatch, match=f"speaks version {NEWEST}") as caught:
        end.check_send(tomorrow())
    assert caught.value.fields["version"] == NEWEST
    assert caught.value.fields["since"] == NEXT
    assert caught.value.hint
    assert "upgrade" in caught.value.hint
    end.check_send(grown(zone="a"))  # what it cannot read, it ignores
    both = met((1, NEXT), (1, NEXT)).ends["dialler"]
    assert both.speaks(tomorrow)
    both.check_send(tomorrow())


@pytest.mark.parametrize("side", ["dialler", "acceptor"])
def test_what_the_other_side_has_to_read_in_the_handshake(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take us for somebody else, so it is told why not."""
    first = m.Hello if side == "dialler" else m.Welcome
    monkeypatch.setattr(first, "added", {"features": NEXT})
    monkeypatch.setattr(first, "optional", {"features": ()})
    mine, older = {"versions": (1, NEXT), "features": ("zones",)}, {"versions": (1, NEWEST), "features": ("zones",)}
    pair = Pair(dialler(**(mine if side == "dialler" else older)), acceptor(**(older if side == "dialler" else mine)))
    for error in pair.shake().errors():
        assert type(error) is VersionMismatch
        assert error.fields["field"] == "features"
        assert (error.fields["version"], error.fields["since"]) == (NEWEST, NEXT)
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
    end: Session = met((1, NEXT), (1, NEWEST)).ends["dialler"]
    told = UnknownMessage("a message type that this version does not know", number=40, peer="b")
    error: KvxferError = end.not_known("Land", told)
    assert isinstance(error, UnknownMessage)
    assert error.fields == {"kind": "Land", "version": NEWEST, "newest": NEXT}
    assert error.peer == "b"
    assert error.hint
    assert not error.retryable

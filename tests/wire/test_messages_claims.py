"""Lists of claims as bytes."""

from __future__ import annotations

import pytest

from kvxfer.config import CLAIM_NUMBER_MAX
from kvxfer.errors import ProtocolError
from kvxfer.wire import messages
from kvxfer.wire.messages import CONFIRM_BYTES_MAX, Confirm, Done

KEYS = [("0" * 32, 1), ("ab" * 16, CLAIM_NUMBER_MAX), ("f" * 32, 0)]


def test_a_round_trip() -> None:
    assert messages.unpack_claims(messages.pack_claims(KEYS)) == KEYS
    assert messages.unpack_claims(b"") == []
    assert messages.pack_claims(KEYS[:1]).hex() == "0" * 32 + "00000001"


@pytest.mark.parametrize("data", [b"x", bytes(19), bytes(21), bytes(16) + b"\xff" * 4])
def test_what_is_no_list(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        messages.unpack_claims(data)


def test_many_are_cut_into_messages() -> None:
    many = [("ab" * 16, number) for number in range(2 * messages.CLAIMS_MAX + 1)]
    parts = list(messages.claims_in_messages(many))
    assert [claim for part in parts for claim in part] == many
    for part in parts:
        packed = messages.pack_claims(part)
        assert len(packed) <= CONFIRM_BYTES_MAX
        Confirm(session="0" * 32, claims=packed)
        Done(value=packed)
    assert list(messages.claims_in_messages([])) == []

"""Proofs: as the page says, bound to everything that was said, and different for the two sides."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace
from typing import Any

import pytest

from kvxfer.wire.auth import prove, transcript, verify
from kvxfer.wire.messages import Hello, Welcome

SECRET = b"a secret of 24 bytes ..."
HELLO = Hello(
    version_min=1,
    version_max=2,
    features=("a", "b"),
    role="peer",
    node_id="0d" * 16,
    incarnation="1d" * 16,
    nonce=bytes(32),
    name="näme",
    pid=41,
    engine_id="2d" * 16,
    counters_path="/x",
)
WELCOME = Welcome(
    version=1,
    features=("a",),
    node_id="0a" * 16,
    incarnation="1a" * 16,
    nonce=b"\1" * 32,
    auth="hmac",
    proof=b"\2" * 32,
)
CHANGED: dict[str, Any] = {
    "version_min": 2,
    "version_max": 3,
    "features": ("a",),
    "role": "worker",
    "node_id": "0e" * 16,
    "incarnation": "0e" * 16,
    "nonce": b"\7" * 32,
    "name": "name",
    "pid": 42,
    "engine_id": "",
    "counters_path": "",
    "version": 2,
    "auth": "none",
    "namespace": "other",
}


def test_by_hand() -> None:
    parts = [bytes(32), b"\1" * 32, b"1", b"2", b"41", b"2", b"a", b"b", b"peer", b"0d" * 16, b"1d" * 16]
    parts += ["näme".encode(), b"2d" * 16, b"/x", b"1", b"1", b"a", b"0a" * 16, b"1a" * 16, b"hmac", b"", b""]
    said = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    assert transcript(HELLO, WELCOME) == said
    text = b"kvxfer control handshake 1\0dialler\0" + said
    assert prove(SECRET, "dialler", said) == hmac.digest(SECRET, text, hashlib.sha256)


@pytest.mark.parametrize("name", [name for name, _ in HELLO.kinds])
def test_every_field_of_hello_counts(name: str) -> None:
    assert transcript(replace(HELLO, **{name: CHANGED[name]}), WELCOME) != transcript(HELLO, WELCOME)


@pytest.mark.parametrize("name", [name for name, _ in WELCOME.kinds if name != "proof"])
def test_every_field_of_welcome_counts(name: str) -> None:
    changed = {**CHANGED, "features": ()}[name]
    assert transcript(HELLO, replace(WELCOME, **{name: changed})) != transcript(HELLO, WELCOME)


def test_the_proof_is_not_part_of_what_it_proves() -> None:
    assert transcript(HELLO, replace(WELCOME, proof=b"")) == transcript(HELLO, WELCOME)


def test_features_cannot_be_moved_between_the_two_messages() -> None:
    one = transcript(replace(HELLO, features=("a", "b", "c")), replace(WELCOME, features=()))
    other = transcript(replace(HELLO, features=("a", "b")), replace(WELCOME, features=("c",)))
    assert one != other
    assert transcript(replace(HELLO, features=("ab",)), WELCOME) != transcript(
        replace(HELLO, features=("a", "b")), WELCOME
    )


def test_the_sides_have_different_proofs() -> None:
    said = transcript(HELLO, WELCOME)
    proof = prove(SECRET, "acceptor", said)
    assert verify(SECRET, "acceptor", said, proof)
    assert not verify(SECRET, "dialler", said, proof)
    assert not verify(SECRET + b"x", "acceptor", said, proof)
    assert not verify(SECRET, "acceptor", said + b"x", proof)
    assert not verify(SECRET, "acceptor", said, b"")
    assert not verify(SECRET, "acceptor", said, proof[:-1])

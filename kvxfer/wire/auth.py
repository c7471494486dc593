"""Proving to each other that both know the shared secret, without sending it.

Each side answers with HMAC-SHA256, keyed with the secret, over everything that both have said so far. Because both
nonces are in it, an old conversation cannot be replayed; because versions, features, roles and identities are in it,
nobody between the two can have changed one of them; because the two sides use different context strings, a proof
cannot be reflected. The parts are length-prefixed, so two different conversations never give the same bytes.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Literal

from kvxfer.wire.messages import Hello, Welcome

Side = Literal["dialler", "acceptor"]
_CONTEXT = b"kvxfer control handshake 1"


def transcript(hello: Hello, welcome: Welcome) -> bytes:
    """All that the two first messages said, apart from the proof, as bytes that cannot be read in two ways."""
    parts = [
        *(str(number) for number in (hello.version_min, hello.version_max, hello.pid, len(hello.features))),
        *hello.features,
        *(hello.role, hello.node_id, hello.incarnation, hello.name, hello.engine_id, hello.counters_path),
        *(str(number) for number in (welcome.version, len(welcome.features))),
        *welcome.features,
        *(welcome.node_id, welcome.incarnation, welcome.auth, hello.namespace, welcome.namespace),
    ]
    encoded = [hello.nonce, welcome.nonce, *(part.encode("utf-8", "surrogatepass") for part in parts)]
    return b"".join(len(part).to_bytes(4, "big") + part for part in encoded)


def prove(secret: bytes, side: Side, said: bytes) -> bytes:
    """The proof (32 bytes) of one side over a transcript."""
    return hmac.new(secret, b"\0".join((_CONTEXT, side.encode(), said)), hashlib.sha256).digest()


def verify(secret: bytes, side: Side, said: bytes, proof: bytes) -> bool:
    """Is it the other side's proof? In constant time."""
    return hmac.compare_digest(prove(secret, side, said), proof)


def find_secret(secrets: Sequence[bytes], side: Side, said: bytes, proof: bytes) -> bytes:
    """The secret with which the other side made its proof, empty when none of ours. All are tried, whichever fits."""
    found = b""
    for secret in secrets:
        if verify(secret, side, said, proof):
            found = secret
    return found

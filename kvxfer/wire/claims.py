"""Lists of claims as bytes: for each the posting (16 bytes) and the claim's number (4 bytes, big-endian)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvxfer.config import CLAIM_NUMBER_MAX
from kvxfer.errors import ProtocolError
from kvxfer.wire.messages import CONFIRM_BYTES_MAX

ClaimKey = tuple[str, int]
POSTING_BYTES = 16
CLAIM_BYTES = POSTING_BYTES + 4
CLAIMS_MAX = CONFIRM_BYTES_MAX // CLAIM_BYTES  # in one message


def pack(claims: Iterable[ClaimKey]) -> bytes:
    """One after the other."""
    return b"".join(bytes.fromhex(posting) + number.to_bytes(4, "big") for posting, number in claims)


def count(data: bytes) -> int:
    """How many there are, without looking at them. Raises `ProtocolError` for what is no such list."""
    if len(data) % CLAIM_BYTES:
        raise ProtocolError("a list of claims ends in the middle of one", bytes=len(data))
    return len(data) // CLAIM_BYTES


def in_slices(data: bytes, length: int) -> Iterator[bytes]:
    """The same list in parts of ``length`` claims."""
    for first in range(0, len(data), length * CLAIM_BYTES):
        yield data[first : first + length * CLAIM_BYTES]


def unpack(data: bytes) -> list[ClaimKey]:
    """Raises `ProtocolError` for what is no such list."""
    count(data)
    found = []
    for first in range(0, len(data), CLAIM_BYTES):
        middle = first + POSTING_BYTES
        found.append((data[first:middle].hex(), int.from_bytes(data[middle : first + CLAIM_BYTES], "big")))
    if any(number > CLAIM_NUMBER_MAX for _, number in found):
        raise ProtocolError("a claim has a number that no claim can have", limit=CLAIM_NUMBER_MAX)
    return found


def in_messages(claims: Sequence[ClaimKey]) -> Iterator[Sequence[ClaimKey]]:
    """In parts that fit into one message each."""
    for first in range(0, len(claims), CLAIMS_MAX):
        yield claims[first : first + CLAIMS_MAX]

"""The 64-bit tag of a notification on the data path: what happened, to which claim, on which layer.

Layout, from the top: kind (8 bits), claim number within its posting (24 bits), layer (32 bits). A tag arrives from a
peer's engine, so `unpack` accepts every 64-bit value; a kind that this version does not know is for the reader to
ignore.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.errors import UsageError

LAYER = 1  # what the claim writes of this layer has arrived
COMMIT = 2  # all layers of the claim have arrived
RELEASE = 3  # the claimant has read what it needs: the publisher may let go

NAMES = {LAYER: "layer", COMMIT: "commit", RELEASE: "release"}
KIND_MAX = (1 << 8) - 1
CLAIM_MAX = (1 << 24) - 1
LAYER_MAX = (1 << 32) - 1
TAG_MAX = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """A tag taken apart. `layer` is 0 for every kind but `LAYER`."""

    kind: int
    claim: int
    layer: int


def pack(kind: int, claim: int, layer: int = 0) -> int:
    """The tag as one unsigned 64-bit integer. Raises `UsageError` naming the part that does not fit."""
    for name, value, limit in (("kind", kind, KIND_MAX), ("claim", claim, CLAIM_MAX), ("layer", layer, LAYER_MAX)):
        if not 0 <= value <= limit:
            raise UsageError(f"a notification's {name} must be 0 to {limit}", field=name, value=value)
    return kind << 56 | claim << 32 | layer


def unpack(tag: int) -> Tag:
    """The parts of a tag. Raises `UsageError` when it is not an unsigned 64-bit integer."""
    if not 0 <= tag <= TAG_MAX:
        raise UsageError("a notification's tag must be an unsigned 64-bit integer", value=tag)
    return Tag(kind=tag >> 56, claim=tag >> 32 & CLAIM_MAX, layer=tag & LAYER_MAX)

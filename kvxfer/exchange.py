"""Moving a whole KV cache: what both sides agree on before a byte moves, shared by push (landing.py's way in) and pull.

A *posting* is the body that an offer or ticket carries from its owner to the claimant through the control plane: cache
layout, block table and remote descriptors. `Posting` packs and unpacks it; everything in it that came from the other
side is validated before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import GeometryMismatch, KvxferError, OutOfRange, ProtocolError
from kvxfer.geometry import BlockTable, CacheLayout
from kvxfer.native.engine import OpKind
from kvxfer.planner import Plan, plan
from kvxfer.region import KVCache

POSTING_VERSION = 1
DESCRIPTORS_MAX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Posting:
    """The other side's half of a transfer."""

    layout: CacheLayout
    table: BlockTable
    descriptors: tuple[RemoteDescriptor, ...]
    check: bool

    def pack(self) -> bytes:
        """msgpack bytes for the control plane."""
        packed: bytes = msgpack.packb(
            {
                "v": POSTING_VERSION,
                "layout": self.layout.to_dict(),
                "table": self.table.to_dict(),
                "descriptors": [descriptor.to_dict() for descriptor in self.descriptors],
                "check": self.check,
            }
        )
        return packed

    @classmethod
    def unpack(cls, body: bytes) -> Posting:
        """Rebuild and validate; anything malformed is a `ProtocolError` or the field's own typed error."""
        raw = unpack_map(body, "posting")
        if raw.get("v") != POSTING_VERSION:
            raise ProtocolError("the peer's posting has another version", value=repr(raw.get("v"))[:20])
        descriptors = raw.get("descriptors")
        if not isinstance(descriptors, list) or not 1 <= len(descriptors) <= DESCRIPTORS_MAX:
            raise ProtocolError("the peer's posting has no list of descriptors", limit=DESCRIPTORS_MAX)
        try:
            return cls(
                layout=CacheLayout.from_dict(raw["layout"]),
                table=BlockTable.from_dict(raw["table"]),
                descriptors=tuple(RemoteDescriptor.from_dict(item) for item in descriptors),
                check=bool(raw.get("check", False)),
            )
        except KeyError as missing:
            raise ProtocolError(f"the peer's posting lacks {missing}") from missing


def complete_plan(source: CacheLayout, source_table: BlockTable, target: CacheLayout, target_table: BlockTable) -> Plan:
    """The plan, refused unless it fills every position that the target expects: the rest would be somebody's old
    bytes.
    """
    made = plan(source, source_table, target, target_table)
    if not made.complete:
        raise GeometryMismatch(
            "the source does not hold every token that the target expects",
            field="tokens",
            source=f"{source_table.first_token}..{source_table.first_token + source_table.tokens}",
            target=f"{target_table.first_token}..{target_table.first_token + target_table.tokens}",
        )
    return made


def unpack_map(body: bytes, what: str) -> dict[str, Any]:
    """msgpack bytes that must hold a map with string keys."""
    try:
        raw = msgpack.unpackb(body, strict_map_key=True, max_ext_len=0)
    except KvxferError:
        raise
    except Exception as wrong:  # msgpack raises ValueError, its own classes and UnicodeDecodeError
        raise ProtocolError(f"the peer's {what} is not msgpack: {wrong}") from wrong
    if not isinstance(raw, dict):
        raise ProtocolError(f"the peer's {what} is not a map")
    return raw


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPart:
    """One submit of one layer: which local region, which of the peer's descriptors, and the segments."""

    region: int
    descriptor: int
    segments: np.ndarray[Any, np.dtype[np.uint64]]


def layer_parts(plan: Plan, layer: int, kind: OpKind, cache: KVCache, peer: Posting) -> list[LayerPart]:
    """The planner's batches of a layer as the engine wants them: local offset first, every span inside the peer's
    grant.
    """
    parts = []
    for batch in plan.layer(layer):
        put = kind is OpKind.PUT
        local, remote = (
            (batch.source_region, batch.target_region) if put else (batch.target_region, batch.source_region)
        )
        segments = batch.segments if put else np.ascontiguousarray(batch.segments[:, [1, 0, 2]])
        if remote >= len(peer.descriptors):
            raise GeometryMismatch("the peer's layout refers to a region that it did not describe", value=remote)
        _require_inside(segments, peer.descriptors[remote].length)
        parts.append(LayerPart(region=cache.regions[local].id, descriptor=remote, segments=segments))
    return parts


def _require_inside(segments: np.ndarray[Any, np.dtype[np.uint64]], limit: int) -> None:
    if not len(segments):
        return
    ends = segments[:, 1] + segments[:, 2]
    if int(ends.max()) > limit or bool((ends < segments[:, 1]).any()):
        raise OutOfRange("the plan leaves the memory that the peer described", end=int(ends.max()), limit=limit)


def layer_bytes(parts: Sequence[LayerPart]) -> int:
    """Bytes of a layer."""
    return sum(int(part.segments[:, 2].sum()) for part in parts)

"""Moving a whole KV cache: what both sides agree on before a byte moves, shared by push (landing.py's way in) and pull.

A *posting* is the body that an offer or ticket carries from its owner to the claimant through the control plane: cache
layout, block table and remote descriptors. `TransferOffer` packs and unpacks it; everything in it that came from the
other side is validated before it is used.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgpack
import numpy as np

from kvxfer.coverage import Box
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import GeometryMismatch, KvxferError, OutOfRange, ProtocolError, UsageError, VersionMismatch
from kvxfer.flows.caches import CACHES_MAX, is_name
from kvxfer.geometry import BlockTable, CacheLayout, check_compatible, fingerprint_conflict
from kvxfer.logs import logger
from kvxfer.memory.region import KVCache
from kvxfer.native.engine import MemoryKind, OpKind
from kvxfer.planner import Plan, plan
from kvxfer.tasks import CONNECTING, Deadline, in_thread

if TYPE_CHECKING:
    from kvxfer.dataplane.plane import DataPlane

POSTING_VERSION = 1
DESCRIPTORS_MAX = 4096
# What costs more than about this many blocks, segments or bytes of a body (some milliseconds) leaves the loop.
BLOCKS_INLINE_MAX = 8192
SEGMENTS_INLINE_MAX = 16384
BODY_BYTES_INLINE_MAX = 16 << 10
T = TypeVar("T")

log = logger("kvxfer.exchange")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferOffer:
    """The other side's half of a transfer."""

    layout: CacheLayout
    table: BlockTable
    descriptors: tuple[RemoteDescriptor, ...]
    check: bool
    name: str = ""
    more: tuple[TransferOffer, ...] = ()  # the other caches of a request that has several

    @property
    def named(self) -> dict[str, TransferOffer]:
        """All caches of the request by name."""
        return {each.name: each for each in (self, *self.more)}

    @property
    def all_descriptors(self) -> tuple[RemoteDescriptor, ...]:
        """Those of all caches, in order."""
        return self.descriptors + tuple(found for each in self.more for found in each.descriptors)

    def pack(self) -> bytes:
        """msgpack bytes for the control plane. A table of any legal size and order fits a posting's body."""
        more = {"more": [each._to_map() for each in self.more]} if self.more else {}
        packed: bytes = msgpack.packb({"v": POSTING_VERSION, **self._to_map(), "check": self.check, **more})
        return packed

    def _to_map(self) -> dict[str, Any]:
        found = {
            "layout": self.layout.to_dict(),
            "table": self.table.to_wire(),
            "descriptors": [descriptor.to_dict() for descriptor in self.descriptors],
        }
        return found | {"name": self.name} if self.name else found

    async def send(self) -> bytes:
        """`pack` that never holds the loop for long."""
        blocks = sum(len(each.table.blocks) for each in (self, *self.more))
        return await off_loop(blocks > BLOCKS_INLINE_MAX, self.pack)

    @classmethod
    def unpack(cls, body: bytes) -> TransferOffer:
        """Rebuild and validate; anything malformed is a `ProtocolError` or the field's own typed error."""
        return cls._from_map(unpack_map(body, "posting"))

    @classmethod
    async def receive(cls, body: bytes) -> TransferOffer:
        """`unpack` that never holds the loop for long, whatever the body says."""
        if len(body) > BODY_BYTES_INLINE_MAX:
            return await in_thread(cls.unpack, body)
        raw = unpack_map(body, "posting")
        if _blocks_named(raw) > BLOCKS_INLINE_MAX:
            return await in_thread(cls._from_map, raw)
        return cls._from_map(raw)

    def require_inside(self) -> TransferOffer:
        """The layout lies in the memory that the descriptors name, and the table in the layout. Returns itself."""
        for region, needed in self.layout.region_bytes().items():
            if region >= len(self.descriptors):
                raise GeometryMismatch("the peer's layout refers to a region that it did not describe", value=region)
            length = self.descriptors[region].length
            if length < needed:
                raise GeometryMismatch("the peer's layout leaves its memory", value=length, needed=needed)
        self.table.used(self.layout.geometry.block_tokens, self.layout.blocks)
        return self

    @classmethod
    def _from_map(cls, raw: dict[str, Any]) -> TransferOffer:
        if raw.get("v") != POSTING_VERSION:
            theirs = repr(raw.get("v"))[:20]
            hint = "upgrade the side that is older: what a posting says has changed between the two"
            raise VersionMismatch(
                f"the peer's posting is of format {theirs}, and this side reads {POSTING_VERSION}",
                value=theirs,
                expected=POSTING_VERSION,
                hint=hint,
            )
        more = raw.get("more", [])
        if not isinstance(more, list) or len(more) >= CACHES_MAX or not all(isinstance(each, dict) for each in more):
            raise ProtocolError("the peer's posting has no list of further caches", limit=CACHES_MAX)
        check = bool(raw.get("check", False))
        found = replace(cls._one(raw, check), more=tuple(cls._one(each, check) for each in more))
        if len(found.named) <= len(more):
            raise ProtocolError("the peer's posting has two caches of one name")
        if len(found.all_descriptors) > DESCRIPTORS_MAX:
            raise ProtocolError("the peer's posting has too many descriptors", limit=DESCRIPTORS_MAX)
        return found

    @classmethod
    def _one(cls, raw: dict[str, Any], check: bool) -> TransferOffer:
        descriptors, name = raw.get("descriptors"), raw.get("name", "")
        if not isinstance(descriptors, list) or not 1 <= len(descriptors) <= DESCRIPTORS_MAX:
            raise ProtocolError("the peer's posting has no list of descriptors", limit=DESCRIPTORS_MAX)
        if not is_name(name):
            raise ProtocolError("the peer's posting has a cache without a name", value=repr(name)[:40])
        with from_peer("posting"):
            return cls(
                layout=CacheLayout.from_dict(raw["layout"]),
                table=BlockTable.from_dict(raw["table"]),
                descriptors=tuple(RemoteDescriptor.from_dict(item) for item in descriptors),
                check=check,
                name=name,
            ).require_inside()


def complete_plan(
    source: CacheLayout,
    source_table: BlockTable,
    target: CacheLayout,
    target_table: BlockTable,
    ignore_fingerprint: bool = False,
    within: Box | None = None,
) -> Plan:
    """The plan, refused unless it fills every position that the target expects: the rest would be somebody's old
    bytes. With ``within`` it is about that box alone, and the caller knows who brings the rest.
    """
    check_compatible(source.geometry, target.geometry, ignore_fingerprint=ignore_fingerprint)
    if within is None:
        _require_all(source, source_table, target, target_table)
    try:
        return plan(source, source_table, target, target_table, ignore_fingerprint=ignore_fingerprint, within=within)
    except UsageError as wrong:
        # Our own half was checked before anything was claimed.
        raise GeometryMismatch(f"the two caches cannot be mapped: {wrong}") from wrong


def _require_all(source: CacheLayout, source_table: BlockTable, target: CacheLayout, target_table: BlockTable) -> None:
    if not _covers(source_table, target_table):
        raise GeometryMismatch(
            "the source does not hold every token that the target expects",
            field="tokens",
            source=f"{source_table.first_token}..{source_table.first_token + source_table.tokens}",
            target=f"{target_table.first_token}..{target_table.first_token + target_table.tokens}",
        )
    for number in (target.geometry.layer_numbers.start, target.geometry.layer_numbers.stop - 1):
        if number not in source.geometry.layer_numbers:
            raise GeometryMismatch("the source does not hold every layer of the target", field="layers", layer=number)


class PeerImports:
    """Connecting to the other side's memory, ended by the deadline or as soon as the flow has failed."""

    def __init__(self) -> None:
        self._limit: asyncio.Timeout | None = None

    async def reach(self, plane: DataPlane, cache: KVCache, peer: TransferOffer, deadline: Deadline) -> str:
        """Import all of the peer's memory; the names of the transports that will carry the bytes."""
        names: dict[str, None] = {}
        try:
            async with deadline.bound("the other side's memory was reached", CONNECTING) as self._limit:
                for theirs, kinds in _pairs(cache, peer).items():
                    for kind in kinds:
                        names[(await plane.prepare(peer.descriptors[theirs], kind, check=peer.check)).name] = None
                for theirs in range(len(peer.descriptors)):
                    await plane.prepare(peer.descriptors[theirs])  # may only be told something
        finally:
            self._limit = None
        return ",".join(names)

    def end(self) -> None:
        """The flow has failed: nobody needs to wait any longer."""
        if self._limit is not None and not self._limit.expired():  # its deadline may just have passed
            self._limit.reschedule(asyncio.get_running_loop().time())


def _pairs(cache: KVCache, peer: TransferOffer) -> dict[int, list[MemoryKind]]:
    """Which of the peer's descriptors meet which kinds of memory of ours: each part of a layer moves between its two
    places.
    """
    found: dict[int, list[MemoryKind]] = {}
    numbers, their_numbers = cache.layout.geometry.layer_numbers, peer.layout.geometry.layer_numbers
    for number in range(max(numbers.start, their_numbers.start), min(numbers.stop, their_numbers.stop)):
        ours = cache.layout.placed(number - numbers.start)
        for theirs in peer.layout.placed(number - their_numbers.start):
            kinds = found.setdefault(theirs.region, [])
            for one in ours:
                kind = cache.regions[one.region].kind
                if one.parts.start < theirs.parts.stop and theirs.parts.start < one.parts.stop and kind not in kinds:
                    kinds.append(kind)
    return found


@contextmanager
def from_peer(what: str) -> Iterator[None]:
    """What does not make sense in here came from the other side: it is not our caller's fault."""
    try:
        yield
    except KeyError as missing:
        raise ProtocolError(f"the peer's {what} lacks {missing}") from missing
    except (UsageError, TypeError, OverflowError) as wrong:
        raise ProtocolError(f"the peer's {what} makes no sense: {wrong}") from wrong


def _covers(source: BlockTable, target: BlockTable) -> bool:
    end = source.first_token + source.tokens
    return not target.tokens or source.first_token <= target.first_token <= target.first_token + target.tokens <= end


async def negotiate(
    source: CacheLayout,
    source_table: BlockTable,
    target: CacheLayout,
    target_table: BlockTable,
    *,
    ignore_fingerprint: bool = False,
    within: Box | None = None,
) -> Plan:
    """`complete_plan` that never holds the loop for long; an override of the operator is said aloud."""
    conflict = fingerprint_conflict(source.geometry, target.geometry) if ignore_fingerprint else ""
    if conflict:
        log.warning("a cache is moved although the models differ (ignore_fingerprint is set): %s", conflict)
    blocks = len(source_table.blocks) + len(target_table.blocks)
    pieces = sum(
        min(source_table.tokens, target_table.tokens) // layout.geometry.block_tokens for layout in (source, target)
    )
    heavy = blocks + pieces > BLOCKS_INLINE_MAX
    return await off_loop(heavy, complete_plan, source, source_table, target, target_table, ignore_fingerprint, within)


async def off_loop(heavy: bool, work: Callable[..., T], *arguments: Any) -> T:
    """The result of ``work``, which runs in a thread when it is heavy."""
    return await in_thread(work, *arguments) if heavy else work(*arguments)


def _blocks_named(raw: dict[str, Any]) -> int:
    """Blocks that a table claims to have, before anything is written out; nonsense counts as none and is refused
    later.
    """
    more = raw.get("more")
    tables = (
        [raw.get("table"), *(each.get("table") for each in more if isinstance(each, dict))]
        if isinstance(more, list)
        else [raw.get("table")]
    )
    lists = [table.get("runs") for table in tables if isinstance(table, dict)]
    runs = [run for found in lists if isinstance(found, list) for run in found]
    return sum(run[2] for run in runs if isinstance(run, list) and len(run) == 3 and isinstance(run[2], int))


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


@dataclass(slots=True, kw_only=True)
class LayerPart:
    """One submit of one layer: which local region, which of the peer's descriptors, and the segments."""

    region: int
    descriptor: int
    segments: np.ndarray[Any, np.dtype[np.uint64]]
    bytes: int


async def prepared_layer(
    plan: Plan, layer: int, kind: OpKind, cache: KVCache, peer: TransferOffer, segments_max: int
) -> list[LayerPart]:
    """`layer_parts` that never holds the loop for long."""
    heavy = plan.fragments(cache.layout.geometry.first_layer + layer) > SEGMENTS_INLINE_MAX
    return await off_loop(heavy, layer_parts, plan, layer, kind, cache, peer, segments_max)


def layer_parts(
    plan: Plan, layer: int, kind: OpKind, cache: KVCache, peer: TransferOffer, segments_max: int
) -> list[LayerPart]:
    """The planner's batches of a layer as the engine wants them: local offset first, every span inside the peer's
    grant. ``layer`` is an index of our own cache.
    """
    parts = []
    put, batches = kind is OpKind.PUT, plan.layer(cache.layout.geometry.first_layer + layer)
    for batch in batches:
        local, remote = (
            (batch.source_region, batch.target_region) if put else (batch.target_region, batch.source_region)
        )
        segments = batch.segments if put else np.ascontiguousarray(batch.segments[:, [1, 0, 2]])
        if remote >= len(peer.descriptors):
            raise GeometryMismatch("the peer's layout refers to a region that it did not describe", value=remote)
        limit, (least, end) = peer.descriptors[remote].length, batch.bounds[1 if put else 0]
        if least < 0 or end > limit:
            raise OutOfRange("the plan leaves the memory that the peer described", end=end, limit=limit)
        region = cache.regions[local].id
        for first in range(0, len(segments), segments_max):
            some = segments[first : first + segments_max]
            whole = len(batches) == 1 and len(some) == len(segments)
            size = plan.layer_bytes if whole else int(some[:, 2].sum())
            parts.append(LayerPart(region=region, descriptor=remote, segments=some, bytes=size))
    return parts


class Joined:
    """What several layers move, as few submits: one for each pair of a local region and a remote descriptor, while it
    stays within ``segments_max`` segments and ``bytes_max`` bytes (of more than one layer).
    """

    def __init__(self, segments_max: int, bytes_max: int) -> None:
        self._segments_max = segments_max
        self._bytes_max = bytes_max
        self._open: dict[tuple[int, int], _Run] = {}
        self._full: list[_Run] = []
        self.bytes = 0

    def add(self, layer: int, part: LayerPart) -> None:
        """One more part of a layer."""
        pair, count, size = (part.region, part.descriptor), len(part.segments), part.bytes
        run = self._open.get(pair)
        if run is not None and (run.count + count > self._segments_max or run.bytes + size > self._bytes_max):
            self._full.append(run)
            run = None
        if run is None:
            run = self._open[pair] = _Run()
        run.layers.append(layer)
        run.starts.append(run.count)
        run.parts.append(part)
        run.count += count
        run.bytes += size
        self.bytes += size

    def take(self) -> list[JoinedPart]:
        """All of it; what is added afterwards is joined anew."""
        runs, self._open, self._full, self.bytes = [*self._full, *self._open.values()], {}, [], 0
        return [run.join() for run in runs]


@dataclass(slots=True)
class _Run:
    layers: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    parts: list[LayerPart] = field(default_factory=list)
    count: int = 0
    bytes: int = 0

    def join(self) -> JoinedPart:
        part = self.parts[0]
        if len(self.parts) > 1:
            part = replace(part, segments=np.concatenate([each.segments for each in self.parts]), bytes=self.bytes)
        return JoinedPart(part=part, layers=tuple(self.layers), starts=tuple(self.starts))


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedPart:
    """One submit of several layers: ``starts`` has the number of each layer's first segment."""

    part: LayerPart
    layers: tuple[int, ...]
    starts: tuple[int, ...]

    def layer_of(self, segment: int) -> int:
        """The layer to which a segment (its index in `segments`) belongs."""
        return self.layers[max(0, bisect_right(self.starts, segment) - 1)]


def of_layer(error: KvxferError, layer: int) -> KvxferError:
    """The same error, which says now which layer it was; the other side gets to know it by its message."""
    if "layer" not in error.fields:
        error.fields["layer"] = layer
        error.message = f"layer {layer}: {error.message}"
    return error

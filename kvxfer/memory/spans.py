"""Which block ids of a region are in use: no block is promised twice, or reused while a peer can still write to it.

The idea: a span is taken before anything is offered and given back only when the engine says that nobody can reach it
any more. Between those two moments it is first held, then quarantined, and both refuse a second holder. One small
integer per block id (the slot of its span) makes taking and giving back a few numpy operations, whatever the number of
blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.errors import InvalidLength, RegionBusy, UsageError

BLOCK_ID_MAX = (1 << 32) - 1
PAGE_BLOCKS = 1 << 12
SPANS_MAX = 1 << 20
Blocks = npt.NDArray[np.int64]
_Owners = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpanHandle:
    """One acquired span. Compared by identity; a handle that was released is not valid again."""

    region: int
    slot: int
    holder: str
    blocks: Blocks = field(repr=False)


@dataclass(slots=True)
class _Span:
    handle: SpanHandle
    quarantine: str = ""


class SpanLedger:
    """Pins and quarantine of (region, block ids). For one event loop; no method waits."""

    def __init__(self) -> None:
        self._spans: dict[int, _Span] = {}
        self._free_slots: list[int] = []
        self._slots = 0
        # (region, page) -> slot + 1 of the span that owns each block of the page, 0 = free
        self._pages: dict[tuple[int, int], _Owners] = {}
        self._page_blocks: dict[tuple[int, int], int] = {}
        self._pinned_blocks = 0
        self._quarantined_blocks = 0

    @property
    def pinned_blocks(self) -> int:
        """Blocks that are held and not quarantined."""
        return self._pinned_blocks

    @property
    def quarantined_blocks(self) -> int:
        """Blocks that nobody uses any more but that a peer might still touch."""
        return self._quarantined_blocks

    @property
    def spans(self) -> tuple[SpanHandle, ...]:
        """All spans that are not released."""
        return tuple(span.handle for span in self._spans.values())

    def reason(self, handle: SpanHandle) -> str:
        """Why the span is quarantined; empty while it is held or after its release."""
        span = self._spans.get(handle.slot)
        return span.quarantine if span is not None and span.handle is handle else ""

    def acquire(self, region: int, blocks: Sequence[int] | npt.NDArray[Any], holder: str) -> SpanHandle:
        """Take blocks of a region, all or none. `holder` names the taker in other takers' errors.

        Raises `RegionBusy` naming block and holder, `UsageError` for ids that are not distinct integers from 0 to
        `BLOCK_ID_MAX`.
        """
        ids = _normalise(blocks)
        pages = self._split(region, ids)
        self._refuse_busy(region, pages)
        if not self._free_slots and self._slots >= SPANS_MAX:
            raise RegionBusy("too many spans are held", spans_max=SPANS_MAX)
        slot = self._free_slots.pop() if self._free_slots else self._slots
        self._slots = max(self._slots, slot + 1)
        for key, offsets in pages:
            page = self._pages.get(key)
            if page is None:
                page = self._pages[key] = np.zeros(PAGE_BLOCKS, dtype=np.int32)
            page[offsets] = slot + 1
            self._page_blocks[key] = self._page_blocks.get(key, 0) + len(offsets)
        handle = SpanHandle(region=region, slot=slot, holder=holder, blocks=ids)
        self._spans[slot] = _Span(handle)
        self._pinned_blocks += len(ids)
        return handle

    def quarantine(self, handle: SpanHandle, reason: str) -> None:
        """The holder is done with the span, its peers perhaps not. A second call only changes the reason."""
        span = self._require(handle)
        if not span.quarantine:
            self._pinned_blocks -= len(handle.blocks)
            self._quarantined_blocks += len(handle.blocks)
        span.quarantine = reason or "quarantined"

    def release(self, handle: SpanHandle) -> None:
        """The blocks are free. Raises `UsageError` for a handle that was already released."""
        span = self._require(handle)
        if span.quarantine:
            self._quarantined_blocks -= len(handle.blocks)
        else:
            self._pinned_blocks -= len(handle.blocks)
        for key, offsets in self._split(handle.region, handle.blocks):
            self._page_blocks[key] -= len(offsets)
            if self._page_blocks[key]:
                self._pages[key][offsets] = 0
            else:
                del self._pages[key], self._page_blocks[key]
        del self._spans[handle.slot]
        self._free_slots.append(handle.slot)

    def check(self) -> None:
        """Assert internal consistency."""
        counted: dict[tuple[int, int], int] = {}
        for slot, span in self._spans.items():
            assert span.handle.slot == slot
            for key, offsets in self._split(span.handle.region, span.handle.blocks):
                assert (self._pages[key][offsets] == slot + 1).all(), (
                    "a block belongs to another span than its holder's"
                )
                counted[key] = counted.get(key, 0) + len(offsets)
        assert counted == self._page_blocks
        assert all(np.count_nonzero(self._pages[key]) == count for key, count in counted.items())
        assert self._pages.keys() == counted.keys(), "a page without blocks was kept"
        sizes = [(len(span.handle.blocks), bool(span.quarantine)) for span in self._spans.values()]
        assert self._pinned_blocks == sum(size for size, quarantined in sizes if not quarantined)
        assert self._quarantined_blocks == sum(size for size, quarantined in sizes if quarantined)

    def _require(self, handle: SpanHandle) -> _Span:
        span = self._spans.get(handle.slot)
        if span is None or span.handle is not handle:
            raise UsageError("the span was already released", holder=handle.holder, region=handle.region)
        return span

    def _split(self, region: int, ids: Blocks) -> list[tuple[tuple[int, int], Blocks]]:
        """The sorted ids by page, as offsets within the page."""
        numbers, starts = np.unique(ids // PAGE_BLOCKS, return_index=True)
        bounds = [*starts.tolist(), len(ids)]
        return [
            ((region, number), ids[bounds[at] : bounds[at + 1]] - number * PAGE_BLOCKS)
            for at, number in enumerate(numbers.tolist())
        ]

    def _refuse_busy(self, region: int, pages: list[tuple[tuple[int, int], Blocks]]) -> None:
        for key, offsets in pages:
            page = self._pages.get(key)
            if page is None:
                continue
            taken = np.flatnonzero(page[offsets])
            if len(taken):
                offset = int(offsets[taken[0]])
                span = self._spans[int(page[offset]) - 1]
                raise RegionBusy(
                    "a block is quarantined" if span.quarantine else "a block is in use",
                    region=region,
                    block=key[1] * PAGE_BLOCKS + offset,
                    holder=span.handle.holder,
                    reason=span.quarantine or None,
                )


def _normalise(blocks: Sequence[int] | npt.NDArray[Any]) -> Blocks:
    """Sorted distinct ids, in memory of their own."""
    try:
        array = np.asarray(blocks)
    except (ValueError, TypeError, OverflowError) as wrong:
        raise UsageError(f"bad block ids: {wrong}") from wrong
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UsageError("block ids are a flat list of integers", dtype=str(array.dtype), dimensions=array.ndim)
    if int(array.min()) < 0 or int(array.max()) > BLOCK_ID_MAX:
        raise InvalidLength(
            f"a block id is from 0 to {BLOCK_ID_MAX}", smallest=int(array.min()), largest=int(array.max())
        )
    ids = np.sort(array.astype(np.int64))
    twice = np.flatnonzero(ids[1:] == ids[:-1])
    if len(twice):
        raise UsageError("a block id occurs twice", block=int(ids[twice[0]]))
    ids.setflags(write=False)
    return ids

"""Which bytes of the caches are in use: none is promised twice, or reused while a peer can still write to it.

The idea: what a block table covers is taken before anything is offered and given back only when the engine says that
nobody can reach it any more. Between those two moments it is first held, then quarantined, and both refuse a second
holder. What counts is bytes, whoever names them by whatever layout: requests of one cache are told apart by a number
for each block (the slots of a block that is used in part, by a short list), and caches in the same memory by what
`footprint.meeting` found out about their layouts, once. So taking and giving back stay a few numpy operations, whatever
the number of blocks, layers and heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvxfer.errors import RegionBusy, UsageError
from kvxfer.geometry import BlockTable
from kvxfer.memory.footprint import Footprint, Ints, Overlap, cells_meet, meeting

RESERVATIONS_MAX = 1 << 20
MEETINGS_KEPT_MAX = 4096
_SHARED = -1  # the owner of a block that is used in part: see `_Cache.parts`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Piece:
    """What one table covers: ``blocks`` are used as a whole; of those in ``edges`` only some slots are."""

    footprint: Footprint
    blocks: Ints
    edges: tuple[tuple[int, range], ...]

    @property
    def count(self) -> int:
        return len(self.blocks) + len(self.edges)

    @property
    def every(self) -> Ints:
        """All blocks, ascending."""
        if not self.edges:
            return self.blocks
        return np.sort(np.append(self.blocks, [block for block, _ in self.edges]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reservation:
    """Blocks that were taken. Compared by identity; one that was released is not valid again."""

    number: int
    holder: str
    pieces: tuple[_Piece, ...] = field(repr=False)

    @property
    def blocks(self) -> int:
        """How many blocks are covered, those in part included."""
        return sum(piece.count for piece in self.pieces)


@dataclass(slots=True)
class _Taken:
    reservation: Reservation
    quarantine: str = ""


class _Cache:
    """The blocks in use of one footprint. ``owners``: number + 1 of the reservation of each block, 0 = free."""

    def __init__(self, footprint: Footprint) -> None:
        self.footprint = footprint
        self.owners = np.zeros(footprint.blocks, np.int32)
        self.parts: dict[int, list[tuple[range, int]]] = {}
        self.pieces = 0

    def holder(self, block: int, slots: range) -> int | None:
        """The number of a reservation that has some of these slots."""
        owner = int(self.owners[block])
        if owner > 0:
            return owner - 1
        for theirs, number in self.parts.get(block, ()):
            if _meet(slots, theirs):
                return number
        return None

    def conflict(self, piece: _Piece) -> tuple[int, int] | None:
        """The first block that is in use, and by which reservation."""
        hit = np.flatnonzero(self.owners[piece.blocks])
        whole = range(self.footprint.block_tokens)
        edges = [(int(piece.blocks[hit[0]]), whole)] if len(hit) else []
        for block, slots in (*edges, *piece.edges):
            number = self.holder(block, slots)
            if number is not None:
                return block, number
        return None

    def add(self, piece: _Piece, number: int) -> None:
        self.owners[piece.blocks] = number + 1
        for block, slots in piece.edges:
            self.owners[block] = _SHARED
            self.parts.setdefault(block, []).append((slots, number))
        self.pieces += 1

    def remove(self, piece: _Piece, number: int) -> None:
        self.owners[piece.blocks] = 0
        for block, slots in piece.edges:
            left = self.parts[block]
            left.remove((slots, number))
            if not left:
                del self.parts[block]
                self.owners[block] = 0
        self.pieces -= 1


class BlockReservations:
    """Pins and quarantine of the bytes that block tables cover. For one event loop; no method waits."""

    def __init__(self) -> None:
        self._taken: dict[int, _Taken] = {}
        self._free_numbers: list[int] = []
        self._numbers = 0
        self._caches: dict[Footprint, _Cache] = {}
        self._meetings: dict[tuple[Footprint, Footprint], Overlap] = {}
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
    def live(self) -> tuple[Reservation, ...]:
        """All reservations that are not released."""
        return tuple(taken.reservation for taken in self._taken.values())

    def reason(self, reservation: Reservation) -> str:
        """Why it is quarantined; empty while it is held or after its release."""
        taken = self._taken.get(reservation.number)
        return taken.quarantine if taken is not None and taken.reservation is reservation else ""

    def acquire(self, covered: Iterable[tuple[Footprint, BlockTable]], holder: str) -> Reservation:
        """Take what some tables cover, each of its cache: every byte or none. `holder` names the taker in other
        takers' errors.

        Raises `RegionBusy` naming block and holder when somebody has one of these bytes, `UsageError` when the tables
        name a byte twice, `OutOfRange` for a block that the cache does not have.
        """
        found = [_piece(footprint, table) for footprint, table in covered]
        pieces = tuple(piece for piece in found if piece.count)
        if not self._free_numbers and self._numbers >= RESERVATIONS_MAX:
            raise RegionBusy("too many reservations are held", reservations_max=RESERVATIONS_MAX)
        number = self._free_numbers[-1] if self._free_numbers else self._numbers
        reservation = Reservation(number=number, holder=holder, pieces=pieces)
        self._taken[number] = _Taken(reservation)
        added: list[_Piece] = []
        try:
            for piece in pieces:
                self._refuse_busy(piece, number)
                self._add(piece, number)
                added.append(piece)
        except BaseException:
            for piece in added:
                self._remove(piece, number)
            del self._taken[number]
            raise
        if self._free_numbers:
            self._free_numbers.pop()
        else:
            self._numbers += 1
        self._pinned_blocks += reservation.blocks
        return reservation

    def quarantine(self, reservation: Reservation, reason: str) -> None:
        """The holder is done with it, its peers perhaps not. A second call only changes the reason."""
        taken = self._require(reservation)
        if not taken.quarantine:
            self._pinned_blocks -= reservation.blocks
            self._quarantined_blocks += reservation.blocks
        taken.quarantine = reason or "quarantined"

    def release(self, reservation: Reservation) -> None:
        """The bytes are free. Raises `UsageError` for what was already released."""
        taken = self._require(reservation)
        if taken.quarantine:
            self._quarantined_blocks -= reservation.blocks
        else:
            self._pinned_blocks -= reservation.blocks
        for piece in reservation.pieces:
            self._remove(piece, reservation.number)
        del self._taken[reservation.number]
        self._free_numbers.append(reservation.number)

    def holders(self, footprint: Footprint, block: int) -> set[str]:
        """Who has slots of a block by this very layout; empty when nobody has."""
        cache = self._caches.get(footprint)
        if cache is None or not cache.owners[block]:
            return set()
        parts = [number for _, number in cache.parts.get(block, ())]
        return {self._taken[number].reservation.holder for number in parts or [int(cache.owners[block]) - 1]}

    def check(self) -> None:
        """Assert internal consistency."""
        expected = {footprint: _Cache(footprint) for footprint in self._caches}
        for number, taken in self._taken.items():
            assert taken.reservation.number == number
            for piece in taken.reservation.pieces:
                cache = expected[piece.footprint]
                assert cache.conflict(piece) is None, "two reservations have the same slots"
                cache.add(piece, number)
        for footprint, cache in expected.items():
            found = self._caches[footprint]
            assert np.array_equal(cache.owners, found.owners), (
                "a block belongs to another reservation than its holder's"
            )
            assert cache.pieces == found.pieces > 0, "a cache without reservations was kept"
            assert {key: set(parts) for key, parts in cache.parts.items()} == {
                key: set(parts) for key, parts in found.parts.items()
            }
        sizes = [(taken.reservation.blocks, bool(taken.quarantine)) for taken in self._taken.values()]
        assert self._pinned_blocks == sum(size for size, quarantined in sizes if not quarantined)
        assert self._quarantined_blocks == sum(size for size, quarantined in sizes if quarantined)

    def _require(self, reservation: Reservation) -> _Taken:
        taken = self._taken.get(reservation.number)
        if taken is None or taken.reservation is not reservation:
            raise UsageError("the reservation was already released", holder=reservation.holder)
        return taken

    def _add(self, piece: _Piece, number: int) -> None:
        cache = self._caches.get(piece.footprint)
        if cache is None:
            cache = self._caches[piece.footprint] = _Cache(piece.footprint)
        cache.add(piece, number)

    def _remove(self, piece: _Piece, number: int) -> None:
        cache = self._caches[piece.footprint]
        cache.remove(piece, number)
        if not cache.pieces:
            del self._caches[piece.footprint]

    # -- conflicts ------------------------------------------------------------------------------------------------

    def _refuse_busy(self, piece: _Piece, ours: int) -> None:
        for cache in self._caches.values():
            if cache.footprint == piece.footprint:
                found = cache.conflict(piece)
            else:
                found = self._conflict_between(piece, cache)
            if found is not None:
                self._refuse(*found, ours)

    def _refuse(self, block: int, number: int, ours: int) -> None:
        if number == ours:
            raise UsageError("two tables of the request name the same bytes", field="table.blocks", block=block)
        taken = self._taken[number]
        raise RegionBusy(
            "a block is quarantined" if taken.quarantine else "a block is in use",
            block=block,
            holder=taken.reservation.holder,
            reason=taken.quarantine or None,
        )

    def _conflict_between(self, piece: _Piece, cache: _Cache) -> tuple[int, int] | None:
        """The same as `_Cache.conflict` where the other cache has another layout, but perhaps the same memory."""
        if piece.footprint.apart(cache.footprint):
            return None
        met = self._meeting(piece.footprint, cache.footprint)
        if met.never:
            return None
        ours, theirs = met.pairs(piece.every, cache.owners)
        if not len(ours):
            return None
        edges = dict(piece.edges)
        partial = cache.owners[theirs] < 0
        if edges:
            partial |= np.isin(ours, list(edges))
        for at in np.flatnonzero(~partial)[:1].tolist():
            return int(ours[at]), int(cache.owners[theirs[at]]) - 1
        return _conflict_in_part(piece, cache, ours[partial], theirs[partial])

    def _meeting(self, ours: Footprint, theirs: Footprint) -> Overlap:
        found = self._meetings.get((ours, theirs))
        if found is None:
            found = meeting(ours, theirs)
            if len(self._meetings) >= MEETINGS_KEPT_MAX:
                self._meetings.pop(next(iter(self._meetings)), None)
            self._meetings[ours, theirs] = found
        return found


def _conflict_in_part(piece: _Piece, cache: _Cache, ours: Ints, theirs: Ints) -> tuple[int, int] | None:
    """The same as `_Cache.conflict` for pairs of blocks that share bytes, of which at least one is used in part."""
    one, other, edges = piece.footprint, cache.footprint, dict(piece.edges)
    whole, their_whole = range(one.block_tokens), range(other.block_tokens)
    inner = ~np.isin(ours, list(edges))
    mine, others = ours[inner], theirs[inner]
    order = np.argsort(others, kind="stable")
    numbers, starts = np.unique(others[order], return_index=True)
    for block, start, stop in zip(numbers.tolist(), starts, [*starts[1:], len(order)], strict=False):
        for slots, number in cache.parts[block]:
            found = one.first_meeting(mine[order[start:stop]], whole, other.cells([block], slots))
            if found is not None:
                return found, number
    for block, slots in piece.edges:
        cells, blocks = one.cells([block], slots), theirs[ours == block]
        found = other.first_meeting(blocks[cache.owners[blocks] > 0], their_whole, cells)
        if found is not None:
            return block, int(cache.owners[found]) - 1
        for shared in blocks[cache.owners[blocks] < 0].tolist():
            for their_slots, number in cache.parts[shared]:
                if cells_meet(cells, other.cells([shared], their_slots)):
                    return block, number
    return None


def _meet(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop


def _piece(footprint: Footprint, table: BlockTable) -> _Piece:
    """What a table covers; blocks without tokens are not, nor are the slots before the first and behind the last."""
    used = table.used(footprint.block_tokens, footprint.blocks)
    distinct = table.distinct(len(used))
    if len(distinct) != len(used):
        raise UsageError("the table names a block twice", field="table.blocks")
    edges: tuple[tuple[int, range], ...] = ()
    if not footprint.whole:
        distinct, edges = table.divided(footprint.block_tokens, footprint.blocks)
    distinct.setflags(write=False)
    return _Piece(footprint=footprint, blocks=distinct, edges=edges)

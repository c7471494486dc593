"""Reservations of bytes: a byte has at most one holder, by whatever layout it is named, and quarantine holds it as
firmly as use does. Compared with a map that has an entry for every byte.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from kvxfer.errors import OutOfRange, RegionBusy, UsageError
from kvxfer.geometry import BlockTable, CacheLayout, Geometry, LayerPlacement
from kvxfer.memory.footprint import BaseAddress, Footprint
from kvxfer.memory.reservations import BlockReservations, Reservation
from kvxfer.planner import contiguous_layout

SLACK = float(os.environ.get("KVXFER_TEST_SLACK", "1"))
HOST: BaseAddress = (None, 1 << 20)


def geometry(**changes: object) -> Geometry:
    known: dict[str, object] = {"layers": 2, "kv_heads": 2, "head_size": 4, "block_tokens": 4, "dtype": "uint8"}
    return Geometry(**{**known, **changes})  # type: ignore[arg-type]


def dense(blocks: int = 16, place: BaseAddress = HOST, **changes: object) -> Footprint:
    return Footprint(contiguous_layout(geometry(**changes), blocks)[0], [place])


def full(blocks: list[int], size: int = 4) -> BlockTable:
    return BlockTable.of(blocks, len(blocks) * size)


# -- holding, quarantine, release -----------------------------------------------------------------------------------


def test_a_second_holder_is_refused_with_the_name_of_the_first() -> None:
    books, cache = BlockReservations(), dense()
    books.acquire([(cache, full([5, 6, 7]))], "offer A")
    with pytest.raises(RegionBusy, match="in use") as caught:
        books.acquire([(dense(), full([9, 7]))], "offer B")
    assert caught.value.fields["holder"] == "offer A"
    assert caught.value.fields["block"] == 7
    assert caught.value.retryable
    assert books.pinned_blocks == 3
    books.acquire([(cache, full([9]))], "offer B")
    books.acquire([(dense(place=(0, HOST[1])), full([5, 6, 7]))], "offer C")  # the same address on a device
    books.check()


def test_quarantine_refuses_until_it_is_released() -> None:
    books, cache = BlockReservations(), dense()
    taken = books.acquire([(cache, full(list(range(10))))], "offer A")
    books.quarantine(taken, "settling")
    books.quarantine(taken, "still settling")
    assert (books.pinned_blocks, books.quarantined_blocks) == (0, 10)
    with pytest.raises(RegionBusy, match="quarantined") as caught:
        books.acquire([(cache, full([3]))], "offer B")
    assert caught.value.fields["reason"] == "still settling" == books.reason(taken)
    books.release(taken)
    assert (books.pinned_blocks, books.quarantined_blocks) == (0, 0)
    assert books.acquire([(cache, full([3]))], "offer B").holder == "offer B"
    books.check()


def test_a_released_reservation_is_dead_even_when_its_number_is_used_again() -> None:
    books, cache = BlockReservations(), dense()
    old = books.acquire([(cache, full([1]))], "A")
    books.release(old)
    new = books.acquire([(cache, full([1]))], "B")
    assert new.number == old.number
    with pytest.raises(UsageError, match="already released"):
        books.release(old)
    with pytest.raises(UsageError, match="already released"):
        books.quarantine(old, "late")
    assert books.pinned_blocks == 1
    assert (books.reason(old), books.reason(new)) == ("", "")
    books.check()


def test_no_tokens_are_a_reservation_too() -> None:
    books = BlockReservations()
    for covered in ([], [(dense(), BlockTable.of([], 0))], [(dense(), BlockTable.of([3], 0))]):
        taken = books.acquire(covered, "zero")
        books.quarantine(taken, "")
        assert books.reason(taken)
        assert taken.blocks == 0
        books.release(taken)
        books.check()


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        (BlockTable.of([1, 2, 1], 12), UsageError),
        (BlockTable.of([16], 4), OutOfRange),
        (BlockTable.of([1], 5), OutOfRange),
        (BlockTable.of([], 1), OutOfRange),
    ],
)
def test_a_bad_table_is_refused_and_changes_nothing(table: BlockTable, kind: type[Exception]) -> None:
    books = BlockReservations()
    with pytest.raises(kind):
        books.acquire([(dense(), full([3])), (dense(), table)], "bad")
    assert (books.live, books.pinned_blocks) == ((), 0)
    books.acquire([(dense(), full([3]))], "good")
    books.check()


def test_a_request_of_several_caches_is_taken_as_a_whole_or_not_at_all() -> None:
    books, one, other = BlockReservations(), dense(), dense(place=(None, 1 << 24))
    books.acquire([(other, full([2]))], "offer A")
    with pytest.raises(RegionBusy, match="offer A"):
        books.acquire([(one, full([1])), (other, full([1, 2]))], "offer B")
    assert books.holders(one, 1) == set()
    with pytest.raises(UsageError, match="the same bytes"):
        books.acquire([(one, full([1])), (one, full([0, 1]))], "offer C")
    books.release(books.acquire([(one, full([1])), (other, full([1]))], "offer D"))
    assert len(books.live) == 1
    books.check()


# -- bytes, not ids ---------------------------------------------------------------------------------------------------


def placed(
    shape: Geometry, blocks: int, *offsets: int, region: int = 0, strides: tuple[int, ...] | None = None
) -> CacheLayout:
    steps: tuple[int, int, int, int] | None = strides  # type: ignore[assignment]
    places = tuple(LayerPlacement(region=region, offset=offset, strides=steps) for offset in offsets)
    return CacheLayout(geometry=shape, blocks=blocks, placements=places)


def refused(books: BlockReservations, footprint: Footprint, table: BlockTable) -> bool:
    try:
        books.release(books.acquire([(footprint, table)], "second"))
    except RegionBusy:
        return True
    return False


def test_the_same_bytes_in_another_order_are_refused() -> None:
    books, shape = BlockReservations(), geometry()
    layers = [LayerPlacement(region=0, offset=0), LayerPlacement(region=1, offset=0)]
    places: list[BaseAddress] = [(None, 1 << 20), (None, 1 << 21)]
    first = CacheLayout(geometry=shape, blocks=4, placements=tuple(layers))
    books.acquire([(Footprint(first, places), full([1]))], "offer A")
    assert refused(books, Footprint(first, places[::-1]), full([1]))
    assert not refused(books, Footprint(first, places[::-1]), full([2]))
    single = placed(geometry(layers=1), 4, 0)
    assert refused(books, Footprint(single, [places[1]]), full([1])), "one of the layers alone"
    assert refused(books, Footprint(single, [(None, places[1][1] + 32)]), full([0])), "the same memory registered again"


def test_stages_parts_and_heads_that_share_an_allocation_are_apart() -> None:
    size = geometry(layers=1).bytes_per_block
    books = BlockReservations()
    stages = [Footprint(placed(geometry(layers=1), 1, stage * size), [HOST]) for stage in range(2)]
    for index, stage in enumerate(stages):
        books.acquire([(stage, full([0]))], f"stage {index}")
    interleaved = geometry(layers=2, layout="BPNHD")
    part, block, token, head = interleaved.dense_strides(8)
    for stage in range(3):  # [blocks, 3 stages of 2 layers, ...]
        offsets = [(stage * 2 + layer) * block for layer in range(2)]
        layout = placed(interleaved, 8, *offsets, strides=(part, 6 * block, token, head))
        books.acquire([(Footprint(layout, [(None, 1 << 24)]), full(list(range(8))))], f"interleaved {stage}")
    for rank in range(4):  # a slice of 2 heads of 8, token-major
        shape = geometry(layers=1, kv_heads=2, kv_heads_total=8, head_start=rank * 2)
        layout = placed(shape, 8, rank * 8, strides=(8 * 4 * 32, 4 * 32, 32, 4))
        books.acquire([(Footprint(layout, [(None, 1 << 25)]), full(list(range(8))))], f"rank {rank}")
    books.check()
    whole = Footprint(placed(geometry(layers=1, kv_heads=8), 8, 0), [(None, 1 << 25)])
    assert refused(books, whole, BlockTable.of([7], 1))


def test_caches_of_unlike_blocks_in_one_memory_share_what_they_share() -> None:
    books = BlockReservations()
    wide = Footprint(placed(geometry(layers=1, kv_parts=1, block_tokens=16), 8, 0), [HOST])
    narrow = Footprint(placed(geometry(layers=1, kv_parts=1, block_tokens=4), 32, 0), [HOST])
    books.acquire([(narrow, full([4, 9]))], "offer A")
    assert [refused(books, wide, full([block], 16)) for block in range(4)] == [False, True, True, False]
    assert not refused(books, wide, BlockTable.of([2], 4)), "only its first four slots: block 8 of the narrow one"
    assert refused(books, wide, BlockTable.of([2], 5))


def test_slots_of_one_block_have_holders_of_their_own() -> None:
    """The last block of a request is covered as far as its tokens go."""
    books, cache, tiles = BlockReservations(), dense(), dense(packing="tiles", layout="PBHND")
    part = books.acquire([(cache, BlockTable.of([1, 2], 6))], "offer A")
    assert part.blocks == 2
    assert books.holders(cache, 2) == {"offer A"}
    assert refused(books, cache, BlockTable.of([2], 1))
    assert refused(books, cache, full([2]))
    assert refused(books, cache, BlockTable.of([2], 2, 1, first_slot=1))
    assert not refused(books, cache, BlockTable.of([2], 2, 2, first_slot=2)), "the next chunk, of another source"
    assert refused(books, tiles, BlockTable.of([2], 1))
    books.release(part)
    assert not refused(books, cache, full([2]))
    whole = books.acquire([(tiles, BlockTable.of([2], 1))], "offer B")  # tiles move whole
    assert refused(books, tiles, BlockTable.of([2], 3))
    assert refused(books, cache, full([2]))
    books.release(whole)
    books.check()


# -- against a map of every byte --------------------------------------------------------------------------------------


MEMORY_BYTES = 4096
ORDERS = ("PBNHD", "BPNHD", "BPHND", "PBHND", "BHPND", "NBHPD", "HPBND")


def draw_layout(rng: random.Random) -> CacheLayout:
    """Dense or padded, layers apart or interleaved, with whatever order of axes; about the same place for all."""
    parts, layers = rng.choice((1, 2)), rng.choice((1, 1, 2, 3))
    shape = geometry(
        layers=layers,
        kv_parts=parts,
        kv_heads=rng.choice((1, 1, 2, 3)),
        head_size=rng.choice((1, 2, 3)),
        block_tokens=rng.choice((1, 2, 4, 4, 8)),
        layout=rng.choice(ORDERS),
        packing="tiles" if rng.random() < 0.1 else "",
    )
    blocks = rng.choice((1, 2, 4, 8))
    extents = dict(zip("PBNH", shape.extents(blocks), strict=True))
    strides, reach = {}, shape.head_bytes
    for axis in reversed(shape.layout[:-1]):
        room = 0 if shape.packing and axis == "N" else rng.choice((0, 0, 0, 1, 5, reach, 3 * reach))
        strides[axis] = reach + room
        reach += (extents[axis] - 1) * strides[axis]
    if shape.packing and strides["N"] != shape.head_bytes:
        return draw_layout(rng)
    steps = tuple(strides.get(axis, 0) for axis in "PBNH")
    start, room = rng.randrange(0, 200, rng.choice((1, 8))), rng.choice((0, 3))
    offsets = [start + layer * (reach + room) for layer in range(layers)]
    if rng.random() < 0.3:
        rng.shuffle(offsets)
    layout = placed(shape, blocks, *offsets, strides=steps)
    if max(layout.layer_end(layer) for layer in range(layers)) > MEMORY_BYTES:
        return draw_layout(rng)
    return with_parts_apart(rng, layout) if shape.kv_parts > 1 and rng.random() < 0.3 else layout


def with_parts_apart(rng: random.Random, layout: CacheLayout) -> CacheLayout:
    """The same bytes with a placement for each part, which may have changed places with another one."""
    steps = layout.strides(0)
    offsets = [place.offset + part * steps[0] for place in layout.placements for part in range(2)]
    if rng.random() < 0.5:
        rng.shuffle(offsets)
    pairs = zip(offsets[::2], offsets[1::2], strict=True)
    places = tuple(tuple(LayerPlacement(offset=at, strides=(0, *steps[1:])) for at in pair) for pair in pairs)
    return CacheLayout(geometry=layout.geometry, blocks=layout.blocks, placements=places)


def draw_sibling(rng: random.Random, layout: CacheLayout) -> CacheLayout:
    """What another rank, stage or part would have in the same storage: the same strides, from elsewhere on."""
    by = rng.choice((1, *(step for step in layout.placed(0)[0].strides if step)))
    places = [
        tuple(LayerPlacement(offset=one.offset + by, strides=one.strides) for one in layout.placed(layer))
        for layer in range(layout.geometry.layers)
    ]
    rng.shuffle(places)
    placements = tuple(place[0] if len(place) == 1 else place for place in places)
    moved = CacheLayout(geometry=layout.geometry, blocks=layout.blocks, placements=placements)
    return moved if moved.region_bytes()[0] <= MEMORY_BYTES else layout


def draw_table(rng: random.Random, layout: CacheLayout) -> BlockTable:
    ids = rng.sample(range(layout.blocks), rng.randint(1, min(3, layout.blocks)))
    size = layout.geometry.block_tokens
    slot = rng.choice((0, 0, rng.randrange(size)))
    room = len(ids) * size - slot
    return BlockTable.of(ids, rng.choice((room, rng.randint(0, room))), rng.randrange(100), first_slot=slot)


def bytes_of(layout: CacheLayout, table: BlockTable) -> Iterator[int]:
    """Every byte that a table covers, one by one."""
    shape, size = layout.geometry, layout.geometry.block_tokens
    slot = table.first_slot or 0
    slots = range(slot, slot + table.tokens)
    if shape.packing and slots:
        slots = range(-(-slots.stop // size) * size)
    for place, part in product(layout.placements, range(shape.kv_parts)):
        own = place[part] if isinstance(place, tuple) else place
        part_step, block_step, token_step, head_step = own.strides or shape.dense_strides(layout.blocks)
        first = own.offset + (0 if isinstance(place, tuple) else part * part_step)
        for at, head in product(slots, range(shape.kv_heads)):
            begin = first + int(table.blocks[at // size]) * block_step + at % size * token_step + head * head_step
            yield from range(begin, begin + shape.head_bytes)


class Worlds:
    """The reservations and, for each byte of two address spaces, who has it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.books = BlockReservations()
        self.owners: dict[BaseAddress, list[Reservation | None]] = {
            place: [None] * MEMORY_BYTES for place in ((None, 4096), (3, 4096))
        }
        self.caches = [(draw_layout(rng), rng.choice(list(self.owners)))]
        while len(self.caches) < rng.choice((1, 2, 4)):
            layout, place = rng.choice(self.caches)
            new = draw_sibling(rng, layout) if rng.random() < 0.5 else draw_layout(rng)
            self.caches.append((new, place if rng.random() < 0.8 else rng.choice(list(self.owners))))
        self.live: list[Reservation] = []
        self.seen: dict[str, int] = {"taken": 0, "busy": 0, "twice": 0}

    def acquire(self) -> None:
        covered, wanted = [], []
        for layout, place in self.rng.choices(self.caches, k=self.rng.choice((1, 1, 1, 2))):
            table = draw_table(self.rng, layout)
            covered.append((Footprint(layout, [place]), table))
            wanted += [(place, byte) for byte in bytes_of(layout, table)]
        busy = {owner for place, byte in wanted if (owner := self.owners[place][byte]) is not None}
        twice = len(set(wanted)) < len(wanted)
        try:
            taken = self.books.acquire(covered, f"request {len(self.live)} {self.seen['taken']}")
        except RegionBusy as refusal:
            assert refusal.fields["holder"] in {owner.holder for owner in busy}
            self.seen["busy"] += 1
            return
        except UsageError:
            assert twice
            self.seen["twice"] += 1
            return
        assert not busy
        assert not twice
        for place, byte in wanted:
            self.owners[place][byte] = taken
        self.live.append(taken)
        self.seen["taken"] += 1

    def release(self) -> None:
        taken = self.live.pop(self.rng.randrange(len(self.live)))
        if self.rng.random() < 0.5:
            self.books.quarantine(taken, "why")
        self.books.release(taken)
        for owners in self.owners.values():
            owners[:] = [None if owner is taken else owner for owner in owners]


@pytest.mark.parametrize("seed", range(8))
def test_reservations_agree_with_a_map_of_every_byte(seed: int) -> None:
    seen = dict.fromkeys(("taken", "busy", "twice"), 0)
    for number in range(60):
        world = Worlds(random.Random(f"{seed}/{number}"))
        for _ in range(30):
            world.acquire()
            if len(world.live) > 3:
                world.release()
        world.books.check()
        seen = {name: seen[name] + world.seen[name] for name in seen}
        while world.live:
            world.release()
        world.books.check()
        assert (world.books.pinned_blocks, world.books.quarantined_blocks) == (0, 0)
    assert min(seen.values()) > 10, seen


# -- what it costs ----------------------------------------------------------------------------------------------------


def spent_taking(books: BlockReservations, footprint: Footprint, table: BlockTable) -> float:
    """CPU seconds of the best of five."""
    found = []
    for _ in range(5):
        begin = time.process_time()
        books.release(books.acquire([(footprint, table)], "B"))
        found.append(time.process_time() - begin)
    return min(found)


def test_a_hundred_thousand_blocks_take_milliseconds() -> None:
    """60 layers of keys and values, shuffled blocks; alone, beside another layout, and with token-major head slices."""
    shape = geometry(layers=60, kv_heads=8, head_size=128, block_tokens=16, dtype="bfloat16")
    layout = contiguous_layout(shape, 200_000)[0]
    cache = Footprint(layout, [HOST])
    part = geometry(layers=60, kv_heads=2, kv_heads_total=8, head_size=128, block_tokens=16, dtype="bfloat16")
    slices = [
        Footprint(
            placed(part, 200_000, *[p.offset + rank * 512 for p in layout.placements], strides=layout.strides(0)),
            [HOST],
        )
        for rank in range(2)
    ]
    blocks = np.random.default_rng(1).permutation(200_000)
    one, other = (BlockTable.of(half, 1_600_000) for half in (blocks[:100_000], blocks[100_000:]))
    for caches in ([cache, cache], [cache, slices[0]], [slices[0], slices[1]]):
        books = BlockReservations()
        held = books.acquire([(caches[0], one)], "A")
        spent = spent_taking(books, caches[1], other)
        print(f"{spent * 1e3:.2f} ms")
        assert spent < 0.1 * SLACK, spent
        books.release(held)

"""What a grant of blocks covers: the C function against a set of bytes."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.block_parts import PARTS_MAX, BlockParts
from kvxfer.errors import KvxferError
from kvxfer.native._shim import ffi, lib
from kvxfer.native.engine import Engine, EngineConfig
from kvxfer.native.status import StatusCode

LENGTH, MIB = 4096, 1 << 20
U64_MAX = 2**64 - 1


def make(parts: Any, blocks: Any, length: int = LENGTH) -> tuple[int, Any]:
    rows, ids = np.array(parts, np.uint64).reshape(-1, 3), np.array(blocks, np.uint64)
    made = ffi.new("kvx_blocks **")
    raw_rows, raw_ids = ffi.from_buffer("kvx_part[]", rows), ffi.from_buffer("uint64_t[]", ids)
    status = lib.kvx_blocks_new(raw_rows, len(rows), raw_ids, len(ids), length, made)
    return status, ffi.gc(made[0], lib.kvx_blocks_free) if status == 0 else None


@st.composite
def caches(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Parts one after the other, or interleaved, of a few blocks; every piece inside of LENGTH."""
    blocks = sorted(draw(st.sets(st.integers(0, 7), max_size=8)))
    size, count = draw(st.integers(1, 40)), draw(st.integers(1, 4))
    gap = draw(st.sampled_from((0, 0, 3)))
    alone = [(base, 0, draw(st.integers(1, 60))) for base in draw(st.lists(st.integers(0, 1500), max_size=2))]
    if draw(st.booleans()):
        stride = size + gap
        rows = [(part * 8 * stride + draw(st.sampled_from((0, 5))) * part, stride, size) for part in range(count)]
        return rows + alone, blocks
    stride = count * (size + gap)
    return alone + [(part * (size + gap), stride, size) for part in range(count)], blocks


@given(cache=caches(), ranges=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 300)), max_size=30))
@settings(max_examples=300, deadline=None)
def test_covers_just_the_pieces_whatever_was_asked_before(
    cache: tuple[list[tuple[int, int, int]], list[int]], ranges: list[tuple[int, int]]
) -> None:
    parts, blocks = cache
    status, made = make(parts, blocks)
    assert status == 0
    allowed = np.zeros(LENGTH, bool)
    for base, stride, size in parts:
        for block in blocks if stride else [0]:
            allowed[base + block * stride :][:size] = True
    cursor = ffi.new("kvx_blocks_cursor *")
    python = BlockParts(np.array(parts, np.uint64), np.array(blocks, np.uint64))
    pieces = [(base + block * stride, size) for base, stride, size in parts for block in blocks]
    for offset, length in [*pieces, *ranges, *((offset + 1, size) for offset, size in pieces)]:
        expected = bool(allowed[offset : offset + length].all())
        assert lib.kvx_blocks_cover(made, cursor, offset, length) == expected, (offset, length)
        assert python.covers(offset, length) == expected


@pytest.mark.parametrize(
    ("parts", "blocks", "expected"),
    [
        ([], [], StatusCode.OK),
        ([], [1], StatusCode.OK),
        ([(0, 16, 16)], [], StatusCode.OK),
        ([(0, 0, 16)], [0], StatusCode.OK),
        ([(0, 16, 0)], [1], StatusCode.INVALID),
        ([(0, 16, 16)], [1, 1], StatusCode.INVALID),
        ([(0, 16, 16)], [2, 1], StatusCode.INVALID),
        ([(0, 1, 1)] * (PARTS_MAX + 1), [0], StatusCode.INVALID),
        ([(LENGTH - 16, 16, 16)], [0], StatusCode.OK),
        ([(LENGTH - 15, 16, 16)], [0], StatusCode.LOCAL_RANGE),
        ([(0, 16, 16)], [LENGTH // 16], StatusCode.LOCAL_RANGE),
        ([(0, U64_MAX, 16)], [2], StatusCode.LOCAL_RANGE),
        ([(U64_MAX, 1, 1)], [0], StatusCode.LOCAL_RANGE),
        ([(1, 1, U64_MAX)], [0], StatusCode.LOCAL_RANGE),
        ([(0, 2**32, 1)], [2**32], StatusCode.LOCAL_RANGE),
    ],
)
def test_what_cannot_be_is_refused(parts: Any, blocks: Any, expected: int) -> None:
    assert make(parts, blocks)[0] == expected


def test_nothing_is_covered_by_nothing() -> None:
    for parts, blocks in (([], []), ([], [1]), ([(0, 16, 16)], [])):
        _, made = make(parts, blocks)
        cursor = ffi.new("kvx_blocks_cursor *")
        assert not lib.kvx_blocks_cover(made, cursor, 0, 1)
        assert not lib.kvx_blocks_cover(made, cursor, U64_MAX, 1)
        assert lib.kvx_blocks_cover(made, cursor, 5, 0)


def test_a_piece_of_its_own_needs_no_block() -> None:
    _, made = make([(0, 16, 16), (100, 0, 8)], [])
    cursor = ffi.new("kvx_blocks_cursor *")
    assert lib.kvx_blocks_cover(made, cursor, 100, 8)
    assert not lib.kvx_blocks_cover(made, cursor, 100, 9)
    assert not lib.kvx_blocks_cover(made, cursor, 99, 1)
    assert not lib.kvx_blocks_cover(made, cursor, 0, 1)


async def test_a_bad_grant_is_no_grant() -> None:
    """An error that names what is wrong, and nothing changed."""
    engine = Engine(EngineConfig(engine_id=os.urandom(16), transports=("loop",)))
    engine.attach(asyncio.get_running_loop(), lambda event: None)
    region = engine.alloc(MIB)
    rows = np.array([(0, 64, 64)], np.uint64)
    good, bad = (BlockParts(rows, np.array([block], np.uint64)) for block in (1, MIB))
    for length, access, blocks, status in (
        (MIB, 3, bad, StatusCode.LOCAL_RANGE),
        (MIB, 8, good, StatusCode.INVALID),
        (2 * MIB, 1, good, StatusCode.LOCAL_RANGE),
        (0, 1, good, StatusCode.LENGTH),
    ):
        with pytest.raises(KvxferError) as caught:
            engine.grant(region.id, 0, length, access, blocks)
        assert caught.value.status == status
    assert engine.counters().grants == 0
    assert engine.grant(region.id, 0, MIB, 3, good).length == MIB
    engine.close()

"""Layouts and checksums: the blocks of a request, and what a checksum notices."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.bench.work import FULL, MIB, SIZES, Layout, Sizes, checksum, fill
from kvxfer.errors import UsageError


def test_the_full_sizes_are_those_of_the_workloads() -> None:
    assert FULL.large_bytes == FULL.region_bytes == 256 * MIB
    assert (FULL.blocks, FULL.block_bytes) == (4096, 32768)
    assert (FULL.small_blocks, FULL.small_block_bytes) == (65536, 4096)
    assert (FULL.layers, FULL.layer_bytes) == (80, MIB)
    assert (FULL.streams, FULL.stream_bytes) == (32, 4 * MIB)


@pytest.mark.parametrize("sizes", SIZES.values())
def test_every_workload_fits_into_a_region(sizes: Sizes) -> None:
    assert sizes.region_bytes % 8 == 0
    Layout(sizes.blocks, sizes.block_bytes, sizes.region_bytes).segments()
    Layout(sizes.small_blocks, sizes.small_block_bytes, sizes.region_bytes).segments()


def test_scattered_blocks_differ_on_the_sides_and_do_not_overlap() -> None:
    rows = Layout(64, 4096, 128 * 4096).segments()
    assert rows.shape == (64, 3)
    assert rows.flags.c_contiguous
    assert not np.array_equal(rows[:, 0], rows[:, 1])
    for column in (0, 1):
        assert len(set(rows[:, column].tolist())) == 64
        assert int(rows[:, column].max()) <= 127 * 4096
    assert np.array_equal(rows, Layout(64, 4096, 128 * 4096).segments())
    with pytest.raises(UsageError):
        Layout(64, 4096, 63 * 4096).segments()


def test_a_checksum_sees_every_byte_and_every_place() -> None:
    layout = Layout(16, 4096, 32 * 4096)
    ours, theirs = np.zeros(32 * 4096, np.uint8), np.zeros(32 * 4096, np.uint8)
    fill(ours, 7)
    assert ours.any()
    rows = layout.segments().tolist()
    for local, remote, length in rows:
        theirs[remote : remote + length] = ours[local : local + length]
    expected = checksum(ours, layout, remote=False)
    assert checksum(theirs, layout, remote=True) == expected
    theirs[rows[5][1] + 17] ^= 1
    assert checksum(theirs, layout, remote=True) != expected
    theirs[rows[5][1] + 17] ^= 1
    first, second = (slice(row[1], row[1] + 4096) for row in rows[:2])
    theirs[first], theirs[second] = theirs[second].copy(), theirs[first].copy()
    assert checksum(theirs, layout, remote=True) != expected


def test_fills_differ_by_seed() -> None:
    one, two = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
    fill(one, 1)
    fill(two, 2)
    assert not np.array_equal(one, two)

"""`put_segments` and `get_segments`: many pieces between one region and one remote memory."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from kvxfer.errors import AccessDenied, InvalidLength, KvxferError, OutOfRange, TooLarge, UsageError
from kvxfer.flows.segments import check_segments
from tests.conftest import slack
from tests.support.nodes import two_nodes

TOP = 2**64 - 1


def rows(*found: tuple[int, int, int]) -> Any:
    return np.array(found, dtype=np.uint64)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_pieces_arrive_where_they_belong(transport: str) -> None:
    async with two_nodes([transport]) as (a, b):
        ours, theirs = await a.alloc(1 << 20), await b.alloc(1 << 20)
        ours.array[:] = np.arange(1 << 20, dtype=np.uint64).astype(np.uint8)
        starts = np.random.default_rng(2).permutation(1 << 10)[:500]
        pieces = np.stack([starts * 1024, starts[::-1] * 1024 + 24, np.full(500, 1000)], axis=1)
        expected = np.zeros(1 << 20, np.uint8)
        for local, remote, length in pieces:
            expected[remote : remote + length] = ours.array[local : local + length]
        async with b.notifications(grant := theirs.descriptor("rw")) as told:
            transfer = a.put_segments(ours, grant, pieces, visible=True, notify=5)
            pieces[:] = 0  # the array is the caller's again
            assert (await transfer).bytes_done == 500 * 1000
            assert await told.next(timeout=10 * slack()) == 5
        assert np.array_equal(theirs.array, expected)
        back = await a.alloc(1 << 20)
        await a.get_segments(back, theirs.descriptor("r"), rows((0, 1 << 19, 1 << 19)), priority="bulk")
        assert np.array_equal(back.array[: 1 << 19], expected[1 << 19 :])


async def test_what_makes_no_sense_changes_nothing() -> None:
    async with two_nodes(["shm"], segments_max=4) as (a, b):
        ours, theirs = await a.alloc(4096), await b.alloc(4096)
        theirs.array[:] = 7
        good, write, read = rows((0, 0, 16)), theirs.descriptor("w"), theirs.descriptor("r")
        wrong: tuple[tuple[type[KvxferError], Any], ...] = (
            (UsageError, lambda: a.put_segments(ours[0:8], write, good)),  # type: ignore[arg-type]
            (UsageError, lambda: a.put_segments(ours, "nobody", good)),  # type: ignore[arg-type]
            (AccessDenied, lambda: a.put_segments(ours, read, good)),
            (AccessDenied, lambda: a.get_segments(ours, write, good)),
            (UsageError, lambda: a.put_segments(ours, write, good, visible=True, notify=-1)),
            (UsageError, lambda: a.put_segments(ours, write, good, priority="soon")),
            (TooLarge, lambda: a.put_segments(ours, write, rows(*[(0, 0, 1)] * 5))),
            (OutOfRange, lambda: a.put_segments(ours, write, rows((0, 0, 16), (0, 4090, 7)))),
        )
        for kind, call in wrong:
            with pytest.raises(kind):
                call()
        await asyncio.sleep(0)
        assert (theirs.array == 7).all()


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (np.zeros((0, 3), np.uint64), UsageError),
        (np.zeros((2, 2), np.uint64), UsageError),
        (np.zeros(3, np.uint64), UsageError),
        (np.zeros((1, 3)), UsageError),
        ("segments", UsageError),
        ([[0, 0, 1], [0, -1, 1]], OutOfRange),
        (rows((0, 0, 0)), InvalidLength),
        (rows((0, 0, 101)), OutOfRange),
        (rows((100, 0, 1)), OutOfRange),
        (rows((TOP, 0, 1)), OutOfRange),
        (rows((1, 0, TOP)), OutOfRange),
        (rows((0, 199, 2)), OutOfRange),
        (rows((0, TOP, 2)), OutOfRange),
    ],
)
def test_segments_are_checked_without_wrapping_round(wrong: Any, kind: type[KvxferError]) -> None:
    with pytest.raises(kind):
        check_segments(wrong, 100, 200, 8)


def test_segments_at_the_very_end_are_fine() -> None:
    found = check_segments([[0, 100, 100], [99, 199, 1]], 100, 200, 2)
    assert (found.dtype, found.tolist()) == (np.uint64, [[0, 100, 100], [99, 199, 1]])

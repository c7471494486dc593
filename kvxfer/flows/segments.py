"""Scattered memory: many pieces between one region and one remote descriptor, as one transfer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.errors import InvalidLength, OutOfRange, TooLarge, UsageError

Segments = npt.NDArray[np.uint64]


def check_segments(segments: Any, local_bytes: int, remote_bytes: int, limit: int) -> Segments:
    """A copy of the caller's segments, uint64, shape (n, 3) [local offset, remote offset, bytes], inside both sides."""
    rows = np.asarray(segments)
    if rows.ndim != 2 or rows.shape[1] != 3 or rows.dtype.kind not in "iu":
        raise UsageError(
            "segments are integers of shape (n, 3): local offset, remote offset, bytes",
            field="segments",
            value=f"{rows.dtype} {rows.shape}",
        )
    if not 1 <= len(rows) <= limit:
        kind = TooLarge if len(rows) else UsageError
        raise kind("too many segments, or none", field="segments", value=len(rows), limit=limit, option="segments_max")
    if rows.dtype.kind == "i" and int(rows.min()) < 0:
        raise OutOfRange("a segment is negative", field="segments", segment=int(np.argwhere(rows < 0)[0][0]))
    found = rows.astype(np.uint64)
    empty = found[:, 2] == 0
    if empty.any():
        raise InvalidLength("a segment has no bytes", field="segments", segment=int(np.flatnonzero(empty)[0]))
    for column, length, side in ((0, local_bytes, "the region"), (1, remote_bytes, "the remote memory")):
        size = np.uint64(length)
        outside = (found[:, 2] > size) | (found[:, column] > size - np.minimum(found[:, 2], size))
        if outside.any():
            first = int(np.flatnonzero(outside)[0])
            raise OutOfRange(
                f"segment {first} leaves {side}",
                segment=first,
                offset=int(found[first, column]),
                length=int(found[first, 2]),
                limit=length,
            )
    return np.ascontiguousarray(found)

"""How much of a long case runs: a share of it in CI, all of it under `make cases-full`."""

from __future__ import annotations

import os

FULL = os.environ.get("KVXFER_TEST_FULL", "") == "1"


def scaled(quick: int, whole: int) -> int:
    """``whole`` is the number of the case book."""
    return whole if FULL else quick


def scaled_s(quick: float, whole: float) -> float:
    """The same for a time."""
    return whole if FULL else quick

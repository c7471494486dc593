"""Words of the case book that need no process: reproducible bytes, hashes, stretched limits."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from tests.conftest import slack

TERMINAL = ("done", "partial", "failed", "cancelled", "timed_out")


def pattern(seed: int, block: int, length: int) -> bytes:
    """The bytes of a block: the same for the same seed and number, and for no other."""
    return np.random.default_rng([seed, block]).bytes(length)


def sha(data: bytes | memoryview | np.ndarray) -> str:  # type: ignore[type-arg]
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def pattern_sha(seed: int, blocks: range, length: int) -> str:
    """Of `pattern` over some blocks."""
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(pattern(seed, block, length))
    return digest.hexdigest()


def limit(seconds: float) -> float:
    """A time limit of the case book, stretched on slow machines. Counts and bytes are never stretched."""
    return seconds * slack()


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """The block must not take longer."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took <= limit(seconds), f"{what} took {took:.3f} s, allowed are {limit(seconds):g} s"

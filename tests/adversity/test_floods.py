"""Floods by one authenticated node: another one is served beside them, and the daemon's memory stays bounded.

How quickly it is served is measured by hand (`python -m tests.adversity.floods`); that a turn of the loop is short is
tested by its bounds (`tests/net/test_link.py`, `tests/test_server.py`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adversity.floods import FLOODS, SECONDS, measure

pytestmark = [pytest.mark.once, pytest.mark.slow]

GROWTH_BYTES_MAX = 128 << 20


@pytest.mark.parametrize("kind", FLOODS)
async def test_one_node_takes_neither_the_memory_nor_the_loop(tmp_path: Path, kind: str) -> None:
    samples, grown = await measure(kind, tmp_path / "d")
    assert grown < GROWTH_BYTES_MAX
    assert len(samples) > 10
    assert samples[len(samples) // 2] < SECONDS / 10

"""A short fuzz run with fixed seeds, and the corpus as it stands."""

from __future__ import annotations

from random import Random

import pytest

from tests.fuzz import wire


def test_the_corpus_itself() -> None:
    streams = wire.corpus()
    assert len(streams) > 40
    for stream in streams:
        wire.check(stream, Random(1))


@pytest.mark.parametrize("seed", range(4))
def test_mutations(seed: int) -> None:
    done, messages = wire.run(seed, rounds=1000)
    assert done == 1000
    assert messages > 30  # deep enough: past a handshake, into the open state

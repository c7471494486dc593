"""Plans between unlike sets of ranks, byte by byte: all that the sources hold together fills every target, each byte
as often as a source holds it, and nothing else is touched. Every number of ranks from 1 to 8 in both directions, heads
that several ranks hold, uneven splits, pipeline stages and pieces of the context, all at once.
"""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest

from kvxfer.planner import Plan, plan
from tests.ranks import CASES, HEAD_SIZE, Bytes, Case, Rank, fill, places, ranks, split

LAYOUTS = ("PBNHD", "BPNHD", "PBHND", "BHPND", "NBHPD")
WHOLE = [range(2)], [range(21)]


def check(case: Case, seed: int = 0) -> int:
    """Returns how many bytes were moved."""
    values, moved = case.values(), 0
    sources = []
    for number, rank in enumerate(case.sources):
        layout, length, table = case.cache(rank, seed + number)
        memory = np.zeros(length, np.uint8)
        fill(memory, layout, table, values)
        sources.append((rank, layout, table, memory))
    for number, rank in enumerate(case.targets):
        layout, length, table = case.cache(rank, seed + 101 * (number + 1))
        found, written = np.zeros(length, np.uint8), np.zeros(length, np.int64)
        expected, wanted = np.zeros(length, np.uint8), np.zeros(length, np.int64)
        fill(expected, layout, table, values)
        for (layer, _, head, token), place in places(layout, table):
            wanted[place : place + HEAD_SIZE] = sum(holds(one, layer, head, token) for one in case.sources)
        for other, source, source_table, memory in sources:
            if not other.has_in_common(rank):
                continue
            made = plan(source, source_table, layout, table)
            moved += carry_out(made, memory, found, written)
        assert np.array_equal(found, expected), (case.name, rank)
        assert np.array_equal(written, wanted), (case.name, rank)
        assert int(written.max()) >= 1
    return moved


def holds(rank: Rank, layer: int, head: int, token: int) -> bool:
    return layer in rank.layers and head in rank.heads and token in rank.tokens


def carry_out(made: Plan, source: Bytes, target: Bytes, written: npt.NDArray[np.int64]) -> int:
    moved = 0
    for layer in made.box.layers:
        for batch in made.layer(layer):
            for begin, to, length in batch.segments.tolist():
                target[to : to + length] = source[begin : begin + length]
                written[to : to + length] += 1
                moved += length
    return moved


def held_by(heads: int, count: int) -> list[range]:
    """Heads of each of ``count`` ranks: a slice, or one head that several of them hold."""
    return (
        split(heads, count)
        if count <= heads
        else [range(at, at + 1) for at in (r * heads // count for r in range(count))]
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_of_the_table(case: Case) -> None:
    assert check(case) > 0


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 10])
@pytest.mark.parametrize("count", range(1, 9))
def test_any_number_of_ranks_to_any_other(heads: int, count: int) -> None:
    """Of 1, 2, 4, 8 or 10 kv heads, to 1 to 8 ranks: equal, uneven and replicated."""
    for others in range(1, 9):
        case = Case(
            name=f"{count} to {others} of {heads}",
            layers=2,
            heads=heads,
            sources=ranks(WHOLE[0], held_by(heads, count), WHOLE[1], block_tokens=8),
            targets=ranks(WHOLE[0], held_by(heads, others), WHOLE[1], block_tokens=5, layout="BPHND"),
        )
        check(case, seed=count)


def cut(rng: random.Random, length: int, pieces: int) -> list[range]:
    """Pieces of any length."""
    borders = sorted(rng.sample(range(1, length), min(pieces, length) - 1))
    return [range(start, stop) for start, stop in zip([0, *borders], [*borders, length], strict=True)]


def grid(rng: random.Random, layers: int, heads: int, tokens: int) -> tuple[Rank, ...]:
    """Stages x slices x pieces, each cut anywhere, and each rank with blocks and an order of axes of its own."""
    slices = held_by(heads, rng.randint(1, 8)) if rng.random() < 0.6 else cut(rng, heads, rng.randint(1, heads))
    found = product(cut(rng, layers, rng.randint(1, layers)), slices, cut(rng, tokens, rng.randint(1, 4)))
    return tuple(
        Rank(
            layers=layer,
            heads=head,
            tokens=token,
            block_tokens=rng.choice((1, 3, 8, 16)),
            layout=rng.choice(LAYOUTS),
        )
        for layer, head, token in found
    )


@pytest.mark.parametrize("seed", range(40))
def test_stages_slices_and_pieces_at_once(seed: int) -> None:
    rng = random.Random(seed)
    layers, heads, tokens = rng.randint(1, 4), rng.choice((1, 2, 4, 5, 8)), rng.randint(5, 40)
    case = Case(
        name=f"seed {seed}",
        layers=layers,
        heads=heads,
        parts=rng.choice((1, 2)),
        sources=grid(rng, layers, heads, tokens),
        targets=grid(rng, layers, heads, tokens),
    )
    check(case, seed)


def test_a_byte_that_goes_astray_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that forgets where in its first block a table begins does not get through."""
    monkeypatch.setattr("kvxfer.geometry.BlockTable.slot", lambda table, size, name="": 0)
    with pytest.raises(AssertionError):
        for case in CASES:
            check(case, seed=1)

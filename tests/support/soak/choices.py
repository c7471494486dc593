"""What a soak does next, from its seed alone: the same seed makes the same choices (not the same instants)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

KINDS: Mapping[str, int] = {  # how often each occurs, in parts of the sum
    "put": 30,
    "get": 30,
    "push": 16,
    "pull": 16,
    "land": 4,
    "churn": 4,
}
BLOCKS_MAX = 8
SPAN_BYTES = (1, 100, 4096, 65_536, 300_000, 1_000_000)
CANCELLED, HURRIED = 0.15, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One transfer, as both sides know it. ``cancel_s``: one side gives up so long after it began; ``limit_s``: its
    deadline. ``by``: which side does that.
    """

    name: str
    kind: str
    seed: int
    blocks: int
    length: int
    limit_s: float
    cancel_s: float | None
    by: str

    def to_dict(self) -> dict[str, Any]:
        """For the worker's command line."""
        return asdict(self)


def flows(seed: int, lane: str, number: int, count: int, *, maps: bool, patience: float) -> list[Flow]:
    """Those of one round of one lane. ``maps``: whether its receiver can map memory of its daemon;
    ``patience``: the deadline of an ordinary transfer, in seconds.
    """
    rng = Random(f"{seed}-{lane}-{number}")
    kinds = {kind: weight for kind, weight in KINDS.items() if maps or kind != "land"}
    return [_flow(rng, f"{lane}-{number}-{at}", list(kinds), list(kinds.values()), patience) for at in range(count)]


def _flow(rng: Random, name: str, kinds: list[str], weights: list[int], patience: float) -> Flow:
    dice = rng.random()
    cancelled, hurried = dice < CANCELLED, CANCELLED <= dice < CANCELLED + HURRIED
    return Flow(
        name=name,
        kind=rng.choices(kinds, weights)[0],
        seed=rng.getrandbits(32),
        blocks=rng.randint(1, BLOCKS_MAX),
        length=rng.choice(SPAN_BYTES),
        limit_s=rng.uniform(0.001, 0.02) if hurried else patience,
        cancel_s=rng.choice((0.0, rng.uniform(0, 0.002), rng.uniform(0, 0.02))) if cancelled else None,
        by=rng.choice("ab"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What befalls processes during one round: ``victim`` is "", "worker" or "daemon"; ``signal`` ends it."""

    victim: str
    signal: str
    after_s: float
    transport: str


def trouble(seed: int, number: int) -> Trouble:
    """For the lane whose far worker is mortal."""
    rng = Random(f"{seed}-trouble-{number}")
    victim = rng.choices(("", "worker", "daemon"), (2, 5, 1))[0]
    return Trouble(
        victim=victim,
        signal=rng.choice(("KILL", "KILL", "TERM")),
        after_s=rng.uniform(0.0, 0.8),
        transport=rng.choice(("shm", "tcp")),
    )

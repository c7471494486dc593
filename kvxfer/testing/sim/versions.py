"""Neighbouring versions in one cluster: some processes also speak the next version of the protocol.

The idea: what runs here is the code that there is, so a process of the next version is one that offers one version
(and feature) more. Both kinds restart into each other, as in an upgrade host by host; every pair has to meet at the
newest version that both know, and use no feature that one of them does not.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from kvxfer.testing.sim.loop import current
from kvxfer.wire.session import FEATURES, VERSIONS, Session

if TYPE_CHECKING:
    from kvxfer.testing.sim.world import World

Speech = tuple[tuple[int, int], tuple[str, ...]]
PRESENT: Speech = (VERSIONS, FEATURES)
NEXT: Speech = ((VERSIONS[0], VERSIONS[1] + 1), (*FEATURES, "what comes next"))
MIXED = 0.4  # of the seeds have both


class Versions:
    """What each process of a world speaks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = Random(f"versions {world.seed}")
        self._kinds = (PRESENT, NEXT) if self._rng.random() < MIXED else (PRESENT,)
        self._said: dict[str, Speech] = {}  # by incarnation

    def of_new_process(self) -> Speech:
        """For one more process."""
        return self._rng.choice(self._kinds)

    def replacements(self) -> tuple[tuple[Any, str, Any], ...]:
        """(owner, name, what stands there) for `World.replaced`."""
        make, establish = Session.__init__, Session._established

        def made(session: Any, side: Any, facts: Any, limits: Any, **options: Any) -> None:
            speech = self._said[facts.incarnation] = current().speech
            make(session, side, facts, limits, **{**options, "versions": speech[0], "features": speech[1]})

        def established(session: Any, number: str) -> Any:
            found = establish(session, number)
            self._check(self._said[session.facts.incarnation], self._said[found.peer.incarnation], found)
            return found

        return ((Session, "__init__", made), (Session, "_established", established))

    def _check(self, one: Speech, other: Speech, found: Any) -> None:
        version = min(one[0][1], other[0][1])
        features = set(one[1]) & set(other[1])
        if found.version != version or set(found.features) != features:
            text = f"{one} and {other} met at version {found.version} with {found.features}"
            self._world.oracle.wrong("version", text)

"""Neighbouring versions in one cluster: some processes speak the next version of the protocol, which is made up.

The idea: what runs here is the code that there is, so another version is made of what it would do differently on the
wire. It offers one version and feature more, says more in every message than we know, and sends messages that we have
never heard of, with and without waiting for an answer. Both kinds restart into each other, as in an upgrade host by
host; every pair has to meet at the newest version that both know, and use no feature that one of them does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

import msgpack

from kvxfer.net import link as link_module
from kvxfer.wire.codec import LENGTH_BYTES, Message, encode
from kvxfer.wire.session import FEATURES, VERSIONS, Session
from tests.support.sim.loop import current

if TYPE_CHECKING:
    from tests.support.sim.world import World

MIXED = 0.5  # of the seeds have two kinds
MORE = 0.05  # messages of the next version have one before them that we have never heard of
UNHEARD = 0xC0DE  # its number


@dataclass(frozen=True, slots=True)
class Speech:
    """What a process says and understands."""

    name: str
    versions: tuple[int, int] = VERSIONS
    features: tuple[str, ...] = FEATURES
    says_more: bool = False


PRESENT = Speech("present")
NEXT = Speech("next", (VERSIONS[0], VERSIONS[1] + 1), (*FEATURES, "what comes next"), says_more=True)


class Versions:
    """What each process of a world speaks. ``kinds``: among these, instead of what the seed says."""

    def __init__(self, world: World, kinds: tuple[Speech, ...] = ()) -> None:
        self._world = world
        self._rng = Random(f"versions {world.seed}")
        self.kinds = kinds or ((PRESENT, NEXT) if self._rng.random() < MIXED else (PRESENT,))
        self._said: dict[str, Speech] = {}  # by incarnation
        self._unheard = 0
        self.met: set[frozenset[str]] = set()  # which kinds have spoken to each other

    def of_new_process(self) -> Speech:
        """For one more process."""
        return self._rng.choice(self.kinds)

    def replacements(self) -> tuple[tuple[Any, str, Any], ...]:
        """(owner, name, what stands there) for `World.replaced`."""
        make, establish = Session.__init__, Session._established

        def made(session: Any, side: Any, facts: Any, limits: Any, **options: Any) -> None:
            speech = self._said[facts.incarnation] = current().speech
            make(session, side, facts, limits, **{**options, "versions": speech.versions, "features": speech.features})

        def established(session: Any, number: str) -> Any:
            found = establish(session, number)
            self._check(self._said[session.facts.incarnation], self._said[found.peer.incarnation], found)
            return found

        return (
            (Session, "__init__", made),
            (Session, "_established", established),
            (link_module, "encode", self._told),
        )

    def _told(self, message: Message, frame_bytes_max: int | None = None) -> bytes:
        """The bytes of a message, and of what comes with it from a process of the next version."""
        frame = encode(message, frame_bytes_max)
        if not current().speech.says_more:
            return frame
        number, fields = msgpack.unpackb(frame[LENGTH_BYTES:])
        frame = _frame(number, {"of_tomorrow": {"why": [1, None]}, **fields})
        shaking = type(message).__name__ in ("Hello", "Welcome", "Proof", "Ready", "Refuse")
        return frame if shaking or self._rng.random() >= MORE else self._more() + frame

    def _more(self) -> bytes:
        """A message that nobody knows; every second one asks for an answer, by a number of its own."""
        self._unheard += 1
        rid = (1 << 63) + self._unheard if self._unheard % 2 else 0
        return _frame(UNHEARD, {"rid": rid, "what": "may come"})

    def _check(self, one: Speech, other: Speech, found: Any) -> None:
        version = min(one.versions[1], other.versions[1])
        features = set(one.features) & set(other.features)
        self.met.add(frozenset((one.name, other.name)))
        if found.version != version or set(found.features) != features:
            text = f"{one} and {other} met at version {found.version} with {found.features}"
            self._world.oracle.wrong("version", text)


def _frame(number: int, fields: dict[str, Any]) -> bytes:
    payload: bytes = msgpack.packb((number, fields))
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload

"""How claims ended and how long they lived: the numbers behind alerts on failed transfers.

The idea: every push and every pull is one claim, and the owner's daemon sees each claim end exactly once, whatever
happens to workers, links and nodes. So it counts there, for the whole cluster, and the data path pays nothing. Reasons
are codes of our own errors and a few words, never what a peer made up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvxfer.errors import BY_CODE

BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # the last one is open
KINDS = frozenset({"offer", "ticket", "region", "landing"})
DONE, WITHDRAWN, OTHER = "done", "withdrawn", "other"
# Why an owner withdraws what has reached its aim, perhaps before it hears the same from the claimant.
COMMITTED = "committed"  # why an owner withdraws an offer that has reached its aim
AIMS = frozenset({COMMITTED, "released"})


@dataclass(slots=True)
class Durations:
    """Seconds in buckets; ``counts`` has one more than `BUCKETS_S`."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[sum(bound < seconds for bound in BUCKETS_S)] += 1
        self.sum_s += seconds


class Tally:
    """Ended claims by kind of posting and reason, and their durations by kind."""

    def __init__(self) -> None:
        self._ended: dict[tuple[str, str], int] = {}
        self._durations: dict[str, Durations] = {}
        self._refused: dict[tuple[str, str], int] = {}

    @property
    def ended(self) -> Mapping[tuple[str, str], int]:
        """(kind, reason) -> how many. Reasons: `done`, `withdrawn`, an error's code, `other`."""
        return self._ended

    @property
    def durations(self) -> Mapping[str, Durations]:
        """By kind, from the claim to its end."""
        return self._durations

    @property
    def refused(self) -> Mapping[tuple[str, str], int]:
        """(kind, error's code) -> claims that never began. A read after its lease is (ticket, lease_expired)."""
        return self._refused

    def refuse(self, kind: str, code: str) -> None:
        """A claim was refused at once."""
        key = (kind if kind in KINDS else OTHER, code if code in BY_CODE else OTHER)
        self._refused[key] = self._refused.get(key, 0) + 1

    def add(self, kind: str, reason: str, seconds: float) -> None:
        """One claim has ended."""
        word = DONE if reason in AIMS else reason
        known = word if word in BY_CODE or word in (DONE, WITHDRAWN) else OTHER
        self._ended[kind, known] = self._ended.get((kind, known), 0) + 1
        self._durations.setdefault(kind, Durations()).add(max(0.0, seconds))

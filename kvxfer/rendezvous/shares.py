"""Who holds how much of something that is limited: one sum for all, and a share for each.

The idea: whoever is counted (a node with all its connections, or a worker) may hold so many times what is still free.
Alone it gets nearly everything; when others come there is always room for somebody else, and nobody has to configure
how many nodes there will be.
"""

from __future__ import annotations

from collections.abc import Hashable

SHARE = 8  # one may hold so many times what is still free


def exceeds_fair_share(own: int, total: int, limit: int, more: int = 1) -> bool:
    """Whether one that holds ``own`` of ``total`` already, where ``limit`` is the most, has had its share when it wants
    ``more``. Whoever holds nothing never has.
    """
    return own > 0 and own + more - 1 > SHARE * (limit - total - more + 1)


class FairShares:
    """At most ``limit`` in all. The one who is counted is any hashable name."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._held: dict[Hashable, int] = {}

    def held(self, who: Hashable) -> int:
        """How many units this user holds."""
        return self._held.get(who, 0)

    def others(self, who: Hashable) -> bool:
        """True when another user holds some."""
        return self.total > self.held(who)

    def room(self, who: Hashable, amount: int = 1) -> bool:
        """True when this user may `take` ``amount`` more units now."""
        return self.total + amount <= self.limit and not exceeds_fair_share(
            self.held(who), self.total, self.limit, amount
        )

    def take(self, who: Hashable, amount: int = 1) -> None:
        """Count it, whether there was `room` or not: some things cannot be refused."""
        self._held[who] = self.held(who) + amount
        self.total += amount

    def give(self, who: Hashable, amount: int = 1) -> None:
        """``amount`` units of this user are free again."""
        left = self.held(who) - amount
        assert left >= 0, "more is given back than was taken"
        self.total -= amount
        if left:
            self._held[who] = left
        else:
            self._held.pop(who, None)

    def set(self, who: Hashable, amount: int) -> None:
        """This one holds so much now."""
        before = self._held.pop(who, 0)
        if amount:
            self._held[who] = amount
        self.total += amount - before

    def most(self) -> Hashable:
        """Who holds most; None: nobody holds anything."""
        return max(self._held, key=self._held.__getitem__, default=None)

    def check(self) -> None:
        """Assert internal consistency."""
        assert self.total == sum(self._held.values())
        assert all(amount > 0 for amount in self._held.values())

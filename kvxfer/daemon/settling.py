"""Settlements that another node could not be told yet: repeated until it answers.

The idea: the owner of a posting keeps an orphaned claim alive, because the data path may still work; only its claimant
knows that it has ended. So a settlement that found nobody is kept, and each node has one task that tries again with
growing pauses, and at once when the node is heard from. Whatever the node answers ends it, a refusal as well, and
``told`` is called: a worker remembers what it said until then, for this daemon may end before it has passed it on.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from kvxfer.errors import NOT_TOLD, KvxferError
from kvxfer.logs import logger
from kvxfer.rendezvous.actions import SettleElsewhere
from kvxfer.rendezvous.postings import ClaimKey
from kvxfer.tasks import TaskOwner

RETRY_S_MIN, RETRY_S_MAX = 0.1, 5.0

log = logger("kvxfer.settling")


@dataclass(slots=True, eq=False)
class _Node:
    waiting: OrderedDict[ClaimKey, tuple[SettleElsewhere, float]] = field(default_factory=OrderedDict)
    heard: asyncio.Event = field(default_factory=asyncio.Event)


class Settlements:
    """At most ``limit`` of them, each for ``keep_s`` seconds. ``tell`` raises `KvxferError` when it could not."""

    def __init__(
        self,
        tell: Callable[[SettleElsewhere], Awaitable[None]],
        owner: TaskOwner,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        limit: int,
        keep_s: float,
        told: Callable[[SettleElsewhere], None] = lambda _: None,
    ) -> None:
        self._tell = tell
        self._owner = owner
        self._clock = clock
        self._rng = rng
        self._limit = limit
        self._keep_s = keep_s
        self._told = told
        self._nodes: dict[str, _Node] = {}
        self._kept: Counter[ClaimKey] = Counter()
        self.given_up = 0

    def __len__(self) -> int:
        return sum(len(node.waiting) for node in self._nodes.values())

    @property
    def claims(self) -> set[ClaimKey]:
        """What they are about."""
        return {claim for node in self._nodes.values() for claim in node.waiting}

    def about(self, claim: ClaimKey) -> bool:
        """One of them is about this claim."""
        return claim in self._kept

    def keep(self, action: SettleElsewhere) -> None:
        """Tell it later."""
        if len(self) >= self._limit:
            self._give_up(action, "too many wait already")
            return
        name = action.node_id or ",".join(action.node)
        node = self._nodes.get(name)
        known = node or _Node()
        claim = (action.posting, action.claim)
        if claim not in known.waiting:
            self._kept[claim] += 1
        known.waiting[claim] = (action, self._clock() + self._keep_s)
        if node is None:
            self._nodes[name] = known
            self._owner.spawn(self._repeat(name, known), f"settle at {name}")

    def heard_from(self, node_id: str) -> None:
        """The node can be reached again, or so it seems."""
        node = self._nodes.get(node_id)
        if node is not None:
            node.heard.set()

    async def _repeat(self, name: str, node: _Node) -> None:
        pause_s = RETRY_S_MIN
        while node.waiting:
            try:
                async with asyncio.timeout(pause_s * self._rng.uniform(0.5, 1.0)):
                    await node.heard.wait()
                pause_s = RETRY_S_MIN
            except TimeoutError:
                pause_s = min(RETRY_S_MAX, 2 * pause_s)
            node.heard.clear()
            await self._tell_waiting(node)
        del self._nodes[name]

    async def _tell_waiting(self, node: _Node) -> None:
        """In order, until one fails: the next would as well."""
        while node.waiting:
            key, (action, until) = next(iter(node.waiting.items()))
            try:
                await self._tell(action)
            except NOT_TOLD as error:
                if self._clock() < until:
                    return
                self._give_up(action, str(error))
            except KvxferError as refused:  # it knows nothing of the claim: there is nothing left to end
                log.debug("claim %d of %s was settled late: %s", action.claim, action.posting, refused)
            if node.waiting.pop(key, None) is not None:
                self._kept[key] -= 1
                if not self._kept[key]:
                    del self._kept[key]
            self._told(action)

    def _give_up(self, action: SettleElsewhere, why: str) -> None:
        self.given_up += 1
        log.warning("node %s was never told that claim %d ended: %s", action.node_id, action.claim, why)

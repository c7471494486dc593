"""The nodes that are linked to this daemon: how many connections one may have, and whether two say that they are one.

The idea: a daemon needs one connection to another, and has a few while they change hands. So a node that opens more
than that is refused before it costs anything, whatever it wants, and there are connections left for all others. Two
daemons with one node id (a cloned machine, say) take requests from each other; nobody refuses them, since one may be
the successor of the other, but both stay, and that is told.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvxfer.config import Config
from kvxfer.errors import TooManyPending
from kvxfer.logs import logger
from kvxfer.rendezvous.shares import FairShares
from kvxfer.wire.session import Facts

if TYPE_CHECKING:
    from kvxfer.net.link import Link

NODE_LINKS_MAX = 16
TOOLS_PART = 8  # tools together have one of so many parts of all connections
TOOLS = ""

log = logger("kvxfer.nodes")


class Nodes:
    """All links of a daemon to other daemons, in either direction, and those of tools."""

    def __init__(self, config: Config, *, node_id: str, incarnation: str) -> None:
        self._own = (node_id, incarnation)
        self._tools_max = max(NODE_LINKS_MAX, config.links_max // TOOLS_PART)
        # Who is gone without a word is lost by then, and only those are left that answer.
        self._settled_s = config.keepalive_s + 2 * config.dead_s
        self._count = FairShares(config.links_max + config.peers_max)
        self._links: dict[str, dict[Link, None]] = {}
        self._twin_timers: dict[str, asyncio.TimerHandle] = {}
        self.twins: dict[str, frozenset[str]] = {}  # node ids that several processes have, by incarnation

    def admit(self, facts: Facts) -> None:
        """Whether a connection with these facts may be there as well. Raises `TooManyPending`."""
        who, limit = (TOOLS, self._tools_max) if facts.role == "tool" else (facts.node_id, NODE_LINKS_MAX)
        if self._count.held(who) >= limit:
            whose = "tools" if who == TOOLS else "this node"
            hint = "close some of them; if nobody opened so many, two daemons may have the same node id"
            raise TooManyPending(f"{whose} has too many connections here", limit=limit, node_id=who or None, hint=hint)

    def add(self, link: Link) -> None:
        """Count a connection that is ready, and look for several processes with one node id."""
        who = self._who(link)
        self._count.take(who)
        if who != TOOLS:
            self._links.setdefault(who, {})[link] = None
            if len(self._incarnations(who)) > 1 and who not in self._twin_timers:
                loop = asyncio.get_running_loop()
                self._twin_timers[who] = loop.call_later(self._settled_s, self._check_twins, who)

    def remove(self, link: Link) -> None:
        """A connection has ended: count it no more."""
        who = self._who(link)
        self._count.give(who)
        if who == TOOLS:
            return
        del self._links[who][link]
        if not self._links[who]:
            del self._links[who]
        if who in self.twins and len(self._incarnations(who)) < 2:
            del self.twins[who]

    def others_than(self, node_id: str) -> bool:
        """Nodes but this one are linked; empty stands for ourselves."""
        return any(who not in (node_id, self._own[0]) for who in self._links)

    def close(self) -> None:
        """Cancel the timers."""
        for timer in self._twin_timers.values():
            timer.cancel()
        self._twin_timers.clear()

    @staticmethod
    def _who(link: Link) -> str:
        return TOOLS if link.peer.role == "tool" else link.peer.node_id

    def _incarnations(self, node_id: str) -> frozenset[str]:
        found = {link.peer.incarnation for link in self._links.get(node_id, ())}
        return frozenset(found | ({self._own[1]} if node_id == self._own[0] else set()))

    def _check_twins(self, node_id: str) -> None:
        del self._twin_timers[node_id]
        found = self._incarnations(node_id)
        if len(found) > 1 and self.twins.get(node_id) != found:
            self.twins[node_id] = found
            named = ", ".join(sorted({link.name for link in self._links.get(node_id, ())}))
            whose = "another daemon has this node's id" if node_id == self._own[0] else "two daemons have one node id"
            hint = "copies of a machine have the same /etc/machine-id: give their daemons different node_name"
            log.error("%s, %s: %s; what is asked of one may reach the other. %s", whose, node_id, named, hint)

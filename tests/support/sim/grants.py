"""What the two sides of a claim believe: whoever is said not to know a grant never uses it, and none is left alone.

The idea: no process sees both sides, the simulator does. A claim that its owner ends because the other node does not
know it must not be known there, then or later; and when all is quiet every claim is known to the daemon that made it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvxfer.rendezvous.book import Book
from kvxfer.rendezvous.postings import RemoteClaims
from kvxfer.rendezvous.registry import Registry
from kvxfer.wire.messages import Claim, GiveUp
from tests.support.sim.loop import current

if TYPE_CHECKING:
    from kvxfer.rendezvous.postings import ClaimEntry
    from tests.support.sim.world import Daemon, World

UNKNOWN_S = 2.0  # with a connection: the old one is given `dead_s` before anybody denies what may be in it
SETTLED_S = 8.0  # a daemon that found nobody tries again after five seconds at most


class Grants:
    """Watches the claims between the daemons of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.revoked: dict[tuple[str, int], str] = {}  # by which daemon
        self._since: dict[tuple[Any, ...], tuple[Daemon, float]] = {}  # seen without a claimant

    def replacements(self) -> tuple[tuple[Any, str, Any], ...]:
        """(owner, name, what stands there) for `World.replaced`."""
        end, add = Book.never_arrived, RemoteClaims.add

        def never_arrived(book: Any, now: float, key: tuple[str, int], session: str) -> Any:
            before = book.claims
            actions = end(book, now, key, session)
            if book.claims < before:
                self._revoked(key)
            return actions

        def added(routes: Any, party: Any, node_id: str, key: tuple[str, int], rid: int = 0) -> Any:
            if key in self.revoked:
                text = f"{current().name} uses claim {key[1]} of {key[0][:8]}, which {self.revoked[key]} has ended"
                self._world.oracle.wrong("revoked_grant", text)
            return add(routes, party, node_id, key, rid)

        return ((Book, "never_arrived", never_arrived), (RemoteClaims, "add", added), *self._given_up())

    def _given_up(self) -> tuple[tuple[Any, str, Any], ...]:
        """A request that its asker has given up has no claim, from the moment on when its owner hears of it."""
        give_up, match = Registry.give_up, Book._match
        over: set[tuple[Any, int]] = set()
        granted: dict[tuple[str, int], tuple[Any, int]] = {}  # a number means nothing over another connection

        def wrong(key: str) -> None:
            self._world.oracle.wrong("given_up", f"{current().name} keeps a claim on {key} that its asker has given up")

        def given_up(registry: Any, now: float, link: Any, message: GiveUp) -> Any:
            actions = give_up(registry, now, link, message)
            over.add((link, message.request))
            party = registry._parties.get(link)
            for claim in () if party is None else party.claims.values():
                if granted.get(claim.key) == (link, message.request):
                    wrong(claim.posting.key)
            return actions

        def matched(book: Any, now: float, posting: Any, party: Any, message: Claim) -> Any:
            rid = message.rid
            if (party.link, rid) in over:
                wrong(posting.key)
            issued = posting.issued
            actions = match(book, now, posting, party, message)
            if posting.issued > issued:
                granted[posting.id, posting.issued] = (party.link, rid)
            return actions

        return ((Registry, "give_up", given_up), (Book, "_match", matched))

    def _revoked(self, key: tuple[str, int]) -> None:
        self.revoked[key] = current().name
        self._world.trace.note(f"claim {key[1]} of {key[0][:8]} never arrived")
        for daemon in self._daemons():
            routes: Any = daemon.server.registry._routes  # type: ignore[union-attr]
            if routes.known(key):
                text = f"{current().name} ended claim {key[1]} of {key[0][:8]}, which {daemon.process.name} knows"
                self._world.oracle.wrong("revoked_grant", text)

    def _daemons(self) -> list[Daemon]:
        return [daemon for daemon in self._world.daemons.values() if daemon.ready and daemon.server is not None]

    def look(self, owner: Daemon) -> None:
        """Claims that only their owner believes in are ended soon after news can travel again."""
        calm, now = self._world.calm_since(), self._world.loop.now
        if calm is None:
            self._since.clear()
            return
        alone = self._alone(owner) if any(self._claims(owner)) else {}
        for key in [key for key, (who, _) in self._since.items() if who is owner and key not in alone]:
            del self._since[key]
        for key, (limit_s, why) in alone.items():
            _, since = self._since.setdefault(key, (owner, now))
            if now - max(since, calm) > limit_s:
                self._since[key] = (owner, now + 1e9)  # once
                self._world.oracle.wrong("lost_claim", f"{why}, for {now - since:.1f} s")

    def check(self) -> None:
        """All is quiet: there are none."""
        for owner in self._daemons():
            for _, why in self._alone(owner).values():
                self._world.oracle.wrong("lost_claim", f"{why}, when all is quiet")

    @staticmethod
    def _claims(owner: Daemon) -> Iterator[ClaimEntry]:
        book: Any = owner.server.registry._book  # type: ignore[union-attr]
        return (claim for posting in book._postings.values() for claim in posting.claims.values() if claim.node_id)

    def _alone(self, owner: Daemon) -> dict[tuple[Any, ...], tuple[float, str]]:
        """Claims that their claimant does not know any more, or never knew: how soon they have to end, and why.

        What nobody knows is ended over a connection, so each connection has its own time for it.
        """
        found: dict[tuple[Any, ...], tuple[float, str]] = {}
        daemons = {daemon.server.incarnation: daemon for daemon in self._daemons() if daemon.server}
        working = {worker.process.name for worker in self._world.workers if worker.ready}
        for claim in self._claims(owner):
            text = f"{owner.process.name} keeps claim {claim.number} of {claim.posting.kind} {claim.posting.key}"
            claimant, who = daemons.get(claim.incarnation), self._world.settled.get(claim.key, "")
            if who in working:
                found[claim.key] = (SETTLED_S, f"{text}, although {who} has settled it")
            elif claimant is None or claimant.server is None or claim.party is None:
                continue
            else:
                routes: Any = claimant.server.registry._routes
                if not routes.known(claim.key) and claim.key not in claimant.server.forwarder.settling():
                    why = f"{text}, which {claimant.process.name} does not know"
                    found[*claim.key, claim.party.session] = (UNKNOWN_S, why)
        return found

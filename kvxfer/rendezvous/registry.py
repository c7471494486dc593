"""The daemon's rendezvous: who is linked, who posted what, who has claimed it, and what everybody must be told.

The idea: a pure state machine. Methods take the time and the facts of one message and return the actions to execute, in
order; nothing here waits, sends or reads a clock. Each request is answered by exactly one action with its `rid`, at
once or when its wait ends, and a refusal is an action like any other: no message makes a method raise. Whatever ends
(a posting, a claim, a link) is told to everybody who depends on it, once. `book.py` matches postings and claims,
`postings.py` and `mailbox.py` hold the rest; this file knows the links and keeps the parts together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvxfer.config import DEFAULT_NAMESPACE, Config
from kvxfer.errors import (
    AccessDenied,
    ClosedError,
    IdentityMismatch,
    KvxferError,
    PeerDraining,
    PeerIncarnationMismatch,
    PeerLost,
    ProtocolError,
    TooManyPending,
    TransferTimeout,
    UsageError,
)
from kvxfer.rendezvous.actions import Action, Link, Refused, Send, SettleElsewhere
from kvxfer.rendezvous.book import DRAINED, Book
from kvxfer.rendezvous.mailbox import MailboxStore
from kvxfer.rendezvous.postings import ClaimKey, ClaimStatistics, Party, RemoteClaim, RemoteClaims
from kvxfer.rendezvous.shares import exceeds_fair_share
from kvxfer.wire import messages as m

ROUTE_ENDS = ("withdrawn", "expired", "lost")
ROUTED_EVENTS = (*ROUTE_ENDS, "orphaned")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The registry's gauges."""

    workers: int
    peers: int
    postings: int
    posting_bytes: int
    claims: int
    orphans: int
    waiting: int
    routes: int
    remembered: int
    channels: int
    held_messages: int
    held_bytes: int


class Registry:
    """The state of one daemon. `random(n)` gives n unpredictable bytes; `now` is monotonic seconds."""

    def __init__(self, config: Config, *, node_id: str, incarnation: str, random: Callable[[int], bytes]) -> None:
        self._config = config
        self._node_id = node_id
        self._incarnation = incarnation
        self._parties: dict[Link, Party] = {}
        self._workers = 0
        self._peers: dict[str, dict[Link, Party]] = {}
        self._book = Book(config, node_id=node_id, incarnation=incarnation, random=random)
        self._routes = RemoteClaims()
        self._mailboxes = MailboxStore(config)
        # (message, reason) -> how often something came that fits no state; harmless, but worth a metric
        self.unexpected: dict[tuple[str, str], int] = {}

    # -- links ----------------------------------------------------------------------------------------------

    def add_worker(self, link: Link, name: str = "", namespace: str = "") -> None:
        """A worker is linked, by default in this daemon's namespace. Raises `TooManyPending`, `UsageError`."""
        if self._workers >= self._config.workers_max:
            raise TooManyPending("too many workers on this node", workers_max=self._config.workers_max)
        self._add(Party(link, name or "a worker", namespace=namespace or self._config.namespace))
        self._workers += 1

    def add_peer(
        self,
        now: float,
        link: Link,
        node_id: str,
        incarnation: str,
        name: str = "",
        namespace: str = "",
        session: str = "",
    ) -> list[Action]:
        """A peer daemon is linked, perhaps again, perhaps more than once; ``session`` is what both call the connection.

        Raises `UsageError`.
        """
        if not node_id:
            raise UsageError("a peer has a node id")
        party = Party(link, name or node_id, node_id, incarnation, namespace or DEFAULT_NAMESPACE, session)
        self._add(party)
        self._peers.setdefault(node_id, {})[link] = party
        # What ran out meanwhile is not handed to the new link.
        return self.expire(now) + self._book.reconcile_orphans(party)

    def remove(self, now: float, link: Link) -> list[Action]:
        """The link is gone: a worker's everything ends, a peer's claims are orphaned. Unknown links are ignored."""
        actions = self.expire(now)
        party = self._parties.get(link)
        if party is None:
            return actions
        del self._parties[link]
        self._book.stop_waiting(party)
        return actions + (self._worker_gone(now, party) if party.is_worker else self._peer_gone(now, party))

    def namespace_of(self, link: Link) -> str:
        """The namespace of a linked worker or peer; empty when there is none."""
        party = self._parties.get(link)
        return "" if party is None else party.namespace

    def live_claims(self, link: Link) -> int:
        """How many live claims depend on this link; while there are any it is probed more often."""
        party = self._parties.get(link)
        return 0 if party is None else len(party.claims) + self._routes.live_to(party.node_id)

    # -- postings ---------------------------------------------------------------------------------------------

    def post(self, now: float, link: Link, message: m.Post, *, namespace: str = "") -> list[Action]:
        """Post something. `lease_s` 0: the default; for a region, as long as its worker. Waiting claims are served.

        ``namespace`` is for the daemon's own postings; empty: that of the link.
        """
        return self._answer(now, link, message.rid, lambda party: self._book.post(now, party, message, namespace))

    def renew(self, now: float, link: Link, message: m.Renew) -> list[Action]:
        """Let a posting live for `lease_s` from now."""
        return self._answer(now, link, message.rid, lambda party: self._book.renew(now, party, message))

    def withdraw(self, now: float, link: Link, message: m.Withdraw) -> list[Action]:
        """End a posting; its claimants are told."""
        return self._answer(now, link, message.rid, lambda party: self._book.withdraw(now, party, message))

    # -- claims -----------------------------------------------------------------------------------------------

    def claim(self, now: float, link: Link, message: m.Claim) -> list[Action]:
        """Claim a posting of this node, by kind and key or by posting and secret; answered within `wait_s`."""
        node_id, incarnation = message.node_id, message.incarnation

        def decide(party: Party) -> list[Action]:
            if node_id and node_id != self._node_id:
                raise IdentityMismatch("another node answers here", expected=node_id, actual=self._node_id)
            if incarnation and incarnation != self._incarnation:
                raise PeerIncarnationMismatch(
                    "the node restarted since", expected=incarnation, actual=self._incarnation
                )
            return self._book.claim(now, party, message)

        answer = self._answer(now, link, message.rid, decide)
        if answer and isinstance(answer[-1], Refused):
            self.tally.refuse(message.kind, answer[-1].error.code)
        return answer

    def give_up(self, now: float, link: Link, message: m.GiveUp) -> list[Action]:
        """The claim with this `rid` is not wanted any more: it waits no longer, and what was granted already ends.

        The asker never takes an answer that crosses this. It would settle the claim when it comes, but until then the
        owner would believe in somebody who may be dead.
        """
        actions = self.expire(now)
        party = self._parties.get(link)
        found = None if party is None else party.requests.get(message.request)
        if found is None:
            self._count_unexpected("give_up", "unknown_request")
        elif isinstance(found, RemoteClaim):
            self._routes.drop(found)
            actions.append(_settle_elsewhere(found.node_id, found.key, "cancelled", TransferTimeout.code, ""))
        else:
            actions += self._book.give_up(now, found)
        return actions

    def refuse_waiting(self, now: float, *, kind: str, key: str, namespace: str, error: KvxferError) -> list[Action]:
        """What was to be posted under this key will not be: those who wait for it are refused with this error."""
        return self.expire(now) + self._book.refuse_waiting((namespace, kind, key), error)

    def claimed_elsewhere(self, now: float, link: Link, answer: m.Claimed) -> list[Action]:
        """Another node granted a claim of our worker `link` (``answer.rid``): keep the route and pass it on.

        When the worker is gone meanwhile, or there are too many routes, the other node is told at once.
        """
        actions = self.expire(now)
        party = self._parties.get(link)
        key = (answer.posting, answer.claim)
        passed_on = Send(link=link, message=answer)
        if not answer.claim:  # nothing to settle
            return [*actions, passed_on] if party is not None else actions
        if party is None or not party.is_worker:
            return [*actions, _settle_elsewhere(answer.node_id, key, "failed", PeerLost.code, "the claimant ended")]
        if self._routes.conflict(party, answer.node_id, key):
            wrong = ProtocolError("the peer granted a claim that somebody else has", peer=answer.node_id[:8])
            return [*actions, Refused(link=link, rid=answer.rid, error=wrong)]
        limit = self._config.claims_max
        if len(self._routes) >= limit or exceeds_fair_share(len(party.routes), len(self._routes), limit):
            error = TooManyPending("too many live claims from this node", claims_max=self._config.claims_max)
            notice = _settle_elsewhere(answer.node_id, key, "cancelled", error.code, error.message)
            return [*actions, notice, Refused(link=link, rid=answer.rid, error=error)]
        self._routes.add(party, answer.node_id, key, answer.rid)
        return [*actions, passed_on]

    def settle(self, now: float, link: Link, message: m.Settle) -> list[Action]:
        """A claim ended, here or (when it has a route) at another node. Repeating it is harmless.

        ``message.node``: the addresses of another node that the worker named. A claim that we do not know then belongs
        to that node, since the route may have been lost when this daemon restarted; the action has no `node_id`.
        """
        key = (message.posting, message.claim)

        def decide(party: Party) -> list[Action]:
            route = party.routes.get(key)
            if route is None and self._routes.known(key):
                raise AccessDenied("this claim is another worker's", posting=key[0], claim=key[1])
            if route is None and (not message.node or not party.is_worker or self._book.knows(key[0])):
                return self._book.settle(now, party, message)
            if route is not None:
                self._routes.drop(route)
            return [SettleElsewhere(node_id="" if route is None else route.node_id, message=message, link=link)]

        return self._answer(now, link, message.rid, decide)

    def unknown_to_us(self, node_id: str, claims: Iterable[ClaimKey]) -> list[ClaimKey]:
        """Which of these claims on postings of a node none of our workers holds."""
        return [key for key in claims if self._routes.get(node_id, key) is None]

    def never_arrived(self, now: float, session: str, claims: Iterable[ClaimKey]) -> list[Action]:
        """The daemon that was asked about claims of an ended connection does not know these."""
        actions = self.expire(now)
        for key in claims:
            actions += self._book.never_arrived(now, key, session)
        return actions

    def event_from_peer(self, now: float, link: Link, event: m.PostingEvent) -> list[Action]:
        """A peer says what happened to a claim of one of our workers. What fits nothing is counted and ignored."""
        actions = self.expire(now)
        party = self._parties.get(link)
        key = (event.posting, event.claim)
        route = None if party is None else self._routes.get(party.node_id, key)
        if event.what not in ROUTED_EVENTS:
            self._count_unexpected("event", "kind")
        elif route is None:
            self._count_unexpected("event", "wrong_node" if self._routes.known(key) else "unknown_claim")
        else:
            if event.what in ROUTE_ENDS:
                self._routes.drop(route)
            actions.append(route.event(event.what, event.code, event.detail))
        return actions

    # -- mail -------------------------------------------------------------------------------------------------

    def mail(self, now: float, link: Link, message: m.Mail, source: str) -> list[Action]:
        """Deliver a message to the worker that listens on the channel, or hold it for one."""

        def decide(party: Party) -> list[Action]:
            channel, data = message.channel, message.data
            delivered = self._mailboxes.mail(now, party.account, channel, data, source, party.namespace)
            return [*delivered, _done(party, message.rid)]

        return self._answer(now, link, message.rid, decide)

    def listen(self, now: float, link: Link, message: m.Listen) -> list[Action]:
        """Listen on a channel; what was held for it follows the answer."""

        def decide(party: Party) -> list[Action]:
            if not party.is_worker:
                raise AccessDenied("only a worker of this node may listen here")
            deliveries = self._mailboxes.listen(link, message.channel, party.namespace)
            return [_done(party, message.rid), *deliveries]

        return self._answer(now, link, message.rid, decide)

    def unlisten(self, now: float, link: Link, message: m.Unlisten) -> list[Action]:
        """Stop listening; harmless when the worker does not listen."""

        def decide(party: Party) -> list[Action]:
            self._mailboxes.unlisten(link, message.channel, party.namespace)
            return [_done(party, message.rid)]

        return self._answer(now, link, message.rid, decide)

    # -- time and state -----------------------------------------------------------------------------------------

    def expire(self, now: float) -> list[Action]:
        """End whatever has reached its deadline. Every other method does this first."""
        self._mailboxes.expire(now)
        return self._book.expire(now)

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next."""
        known = (self._book.next_deadline(), self._mailboxes.next_deadline())
        return min((at for at in known if at is not None), default=None)

    def drain(self, now: float) -> list[Action]:
        """Take nothing new, withdraw what nobody has claimed; live claims go on."""
        return self.expire(now) + self._book.drain(now)

    def abort_claimed(self, now: float) -> list[Action]:
        """The time to drain is over: end every claim, here and (for our workers) elsewhere."""
        actions = self.expire(now) + self._book.abort_claimed(now)
        for route in self._routes.all():
            key = route.key
            self._routes.drop(route)
            actions.append(route.event("withdrawn", PeerDraining.code, DRAINED))
            actions.append(_settle_elsewhere(route.node_id, key, "cancelled", PeerDraining.code, DRAINED))
        return actions

    def refuse_claims_on(self, slow: Callable[[Link], bool]) -> None:
        """Claims on what these workers have posted are refused: they do not take what is told them about others."""
        self._book.is_slow = slow

    @property
    def workers(self) -> int:
        """How many workers are connected."""
        return self._workers

    @property
    def tally(self) -> ClaimStatistics:
        """How the claims of this node's postings ended."""
        return self._book.tally

    def counts(self) -> Counts:
        """The gauges as they are now."""
        return Counts(
            workers=self._workers,
            peers=len(self._peers),
            postings=self._book.postings,
            posting_bytes=self._book.posting_bytes,
            claims=self._book.claims,
            orphans=self._book.orphans,
            waiting=self._book.waiting,
            routes=len(self._routes),
            remembered=self._book.remembered,
            channels=len(self._mailboxes),
            held_messages=self._mailboxes.held_messages,
            held_bytes=self._mailboxes.held_bytes,
        )

    def check(self) -> None:
        """Assert internal consistency."""
        parties = self._parties
        assert self._workers == sum(party.is_worker for party in parties.values()) <= self._config.workers_max
        by_node = {link: party for of_node in self._peers.values() for link, party in of_node.items()}
        assert by_node == {link: party for link, party in parties.items() if not party.is_worker}
        assert all(self._peers.values())
        assert len(self._routes) <= self._config.claims_max
        assert len(self._routes) == sum(len(party.routes) for party in parties.values())
        self._book.check(parties.values())
        self._routes.check()
        self._mailboxes.check()

    # -- the parts ------------------------------------------------------------------------------------------------

    def _answer(self, now: float, link: Link, rid: int, decide: Callable[[Party], list[Action]]) -> list[Action]:
        actions = self.expire(now)
        try:
            party = self._parties.get(link)
            if party is None:
                raise ClosedError("this connection is not registered")
            return actions + decide(party)
        except KvxferError as error:
            return [*actions, Refused(link=link, rid=rid, error=error)]

    def _add(self, party: Party) -> None:
        if party.link in self._parties:
            raise UsageError("the link is already registered")
        self._parties[party.link] = party

    def _worker_gone(self, now: float, party: Party) -> list[Action]:
        self._workers -= 1
        self._mailboxes.forget(party.link)
        actions: list[Action] = []
        # Postings first: the claims that the worker held on its own postings end with them, and nobody is told.
        for posting in list(party.postings.values()):
            actions += self._book.owner_lost(now, posting)
        for claim in list(party.claims.values()):
            actions += self._book.claimant_lost(now, claim)
        for route in list(party.routes.values()):
            self._routes.drop(route)
            detail = f"{party.name} ended"
            actions.append(_settle_elsewhere(route.node_id, route.key, "failed", PeerLost.code, detail))
        return actions

    def _peer_gone(self, now: float, party: Party) -> list[Action]:
        others = self._peers[party.node_id]
        del others[party.link]
        who = (party.incarnation, party.namespace)
        same = next((other for other in others.values() if (other.incarnation, other.namespace) == who), None)
        actions: list[Action] = []
        if same is not None:
            actions += self._book.reassign(list(party.claims.values()), same)
        for claim in list(party.claims.values()):
            actions += self._book.orphan(now, claim)
        if not others:
            del self._peers[party.node_id]
            actions += self._routes.orphan(party.node_id)
        return actions

    def _count_unexpected(self, message: str, reason: str) -> None:
        self.unexpected[message, reason] = self.unexpected.get((message, reason), 0) + 1


def _done(party: Party, rid: int) -> Send:
    return Send(link=party.link, message=m.Done(rid=rid))


def _settle_elsewhere(node_id: str, key: ClaimKey, outcome: str, code: str, detail: str) -> SettleElsewhere:
    message = m.Settle(posting=key[0], claim=key[1], outcome=outcome, code=code, detail=detail)
    return SettleElsewhere(node_id=node_id, message=message)

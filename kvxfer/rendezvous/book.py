"""The postings of this node, their claims, and the claims that wait: the half of the registry that matches.

The idea: a claim that cannot be served now waits in the line of what it asked for, and everything that may free a
place (a posting, a failed claim) serves that line in order. Methods raise `KvxferError` before they change anything,
and return the actions otherwise. Who may do what is decided here; who is linked at all, in `registry.py`.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Sequence

from kvxfer.config import CLAIM_NUMBER_MAX, Config
from kvxfer.coverage import Box, common_elements, overlap_itself
from kvxfer.errors import (
    BY_CODE,
    AccessDenied,
    InternalError,
    KvxferError,
    LeaseExpired,
    PeerBackpressure,
    PeerDraining,
    PeerLost,
    TooManyPending,
    TransferTimeout,
    UnknownTransfer,
    UsageError,
    WrongKey,
)
from kvxfer.rendezvous.actions import Action, Link, Refused, Send
from kvxfer.rendezvous.postings import (
    AGAIN_WAIT_S,
    AIMS,
    COMMITTED,
    COPIES_S,
    FOUND_BY_KEY,
    SINGLE_USE,
    WITHDRAWN,
    ClaimEntry,
    ClaimKey,
    ClaimQueues,
    ClaimStatistics,
    EndedPosting,
    EndedPostings,
    Party,
    Posting,
    QueueKey,
    Timeline,
    WaitingClaim,
    check_boxes,
    check_posting,
    gone,
    not_served,
    part_of,
    too_many,
    used_up,
)
from kvxfer.rendezvous.shares import FairShares, exceeds_fair_share
from kvxfer.wire import messages as m

DRAINED = "the daemon was told to stop, and its time to drain is over"
NEVER_ARRIVED = "the claimant's node knows nothing of the claim: the grant was lost with its connection"
_ID_ATTEMPTS = 8


class Book:
    """All postings of one daemon. `random(n)` gives n unpredictable bytes."""

    def __init__(self, config: Config, *, node_id: str, incarnation: str, random: Callable[[int], bytes]) -> None:
        self._config = config
        self._node_id = node_id
        self._incarnation = incarnation
        self._random = random
        self._postings: dict[str, Posting] = {}
        self._by_key: dict[QueueKey, Posting] = {}
        self._orphans: dict[str, dict[ClaimKey, ClaimEntry]] = {}  # by the claimant's node
        self._waiting = ClaimQueues(config.waiting_max)
        self._ended = EndedPostings(config.expired_memory_max)
        self._timeline: Timeline[tuple[str, str, int]] = Timeline()
        self.is_slow: Callable[[Link], bool] = lambda _: False
        self.tally = ClaimStatistics()
        self.posting_bytes = 0
        self._claims = FairShares(config.claims_max)
        self.draining = False

    @property
    def postings(self) -> int:
        return len(self._postings)

    @property
    def claims(self) -> int:
        return self._claims.total

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def orphans(self) -> int:
        return sum(map(len, self._orphans.values()))

    @property
    def remembered(self) -> int:
        return len(self._ended)

    def knows(self, posting_id: str) -> bool:
        """The posting is or was one of this node."""
        return posting_id in self._postings or self._ended.get(posting_id) is not None

    def next_deadline(self) -> float | None:
        return self._timeline.next()

    # -- the owner -------------------------------------------------------------------------------------------

    def post(
        self,
        now: float,
        party: Party,
        message: m.Post,
        namespace: str = "",
    ) -> list[Action]:
        """Post in the party's namespace; the daemon itself also in others."""
        if self.draining:
            raise PeerDraining("this node is shutting down and takes no new postings")
        if not party.is_worker:
            raise AccessDenied("only a worker of this node may post here")
        kind, key, body = message.kind, message.key, message.body
        check_posting(message)
        self._check_room(party, len(body))
        line: QueueKey = (namespace or party.namespace, kind, key)
        if kind in FOUND_BY_KEY and not message.private and line in self._by_key:
            raise UsageError(f"this {kind} is already posted", key=key)
        deadline = self._deadline(now, kind, message.lease_s)
        posting = Posting(
            id=self._new_id(),
            secret=self._random(m.POSTING_SECRET_BYTES),
            owner=party,
            kind=kind,
            key=key,
            body=body,
            places=0 if message.boxes else 1 if kind in SINGLE_USE else message.claims_max,
            deadline=deadline,
            namespace=line[0],
            boxes=message.boxes,
            private=message.private,
        )
        self._postings[posting.id] = party.postings[posting.id] = posting
        self.posting_bytes += len(body)
        party.posting_bytes += len(body)
        if posting.found_by_key:
            self._by_key[line] = posting
            self._ended.renewed(line)
        if deadline is not None:
            self._timeline.set(("posting", posting.id, 0), deadline)
        return [_posted(now, party, message.rid, posting), *self._serve(now, posting)]

    def renew(self, now: float, party: Party, message: m.Renew) -> list[Action]:
        posting = self._owned(party, message.posting)
        posting.deadline = self._deadline(now, posting.kind, message.lease_s)
        if posting.deadline is None:
            self._timeline.drop(("posting", posting.id, 0))
        else:
            self._timeline.set(("posting", posting.id, 0), posting.deadline)
        return [_posted(now, party, message.rid, posting)]

    def withdraw(self, now: float, party: Party, message: m.Withdraw) -> list[Action]:
        """Withdrawing what has already ended is harmless."""
        done = Send(link=party.link, message=m.Done(rid=message.rid))
        if message.posting not in self._postings and self._remembered(party, message.posting) is not None:
            return [done]
        posting = self._owned(party, message.posting)
        return [done, *self._end(now, posting, "withdrawn", "", message.reason)]

    def owner_lost(self, now: float, posting: Posting) -> list[Action]:
        """The owner is gone; the claimants are told at once."""
        return self._end(now, posting, "lost", PeerLost.code, f"{posting.owner.name} ended")

    def drain(self, now: float) -> list[Action]:
        """Withdraw what nobody has claimed, send waiters away, and take nothing new. What is claimed goes on."""
        self.draining = True
        actions: list[Action] = []
        for waiter in self._waiting.everybody():
            self._drop_waiter(waiter)
            actions.append(Refused(link=waiter.party.link, rid=waiter.rid, error=PeerDraining("the node shuts down")))
        for posting in [posting for posting in self._postings.values() if not posting.claims]:
            actions.append(_to_owner(posting, "withdrawn", PeerDraining.code))
            actions += self._end(now, posting, "withdrawn", PeerDraining.code, "")
        return actions

    def abort_claimed(self, now: float) -> list[Action]:
        """The time to drain is over: what still runs ends, and both sides are told why."""
        actions: list[Action] = []
        for posting in list(self._postings.values()):
            for claim in list(posting.claims.values()):
                if claim.party is not None:
                    actions.append(_notice(claim, "withdrawn", PeerDraining.code, DRAINED, to=claim.party))
                actions += self._settle(now, claim, "settled", PeerDraining.code, DRAINED, tell=True)
        return actions + self.drain(now)

    # -- the claimant ----------------------------------------------------------------------------------------

    def claim(self, now: float, party: Party, message: m.Claim) -> list[Action]:
        if self.draining:
            raise PeerDraining("this node is shutting down")
        wait_s, posting_id = message.wait_s, message.posting
        if wait_s > self._config.wait_s_max:
            raise UsageError("bad wait", wait_s=wait_s, wait_s_max=self._config.wait_s_max)
        check_boxes("offer", message.boxes, False)
        if posting_id and self._written(self._remembered(party, posting_id), message):
            return [self._nothing_to_do(party, message.rid, posting_id)]
        posting = self._find_by_id(party, message) if posting_id else self._find_by_key(party, message)
        if posting is not None and posting.free:
            return self._match(now, posting, party, message)
        line: QueueKey = ("", "", posting_id) if posting_id else (party.namespace, message.kind, message.key)
        why = "nothing is posted under this key" if posting is None else "all its places are taken"
        copy_of = self._copy_of(now, line, message)
        if copy_of:
            wait_s = min(wait_s, AGAIN_WAIT_S)
        if wait_s == 0:
            return [self._not_served(party, message, line, why, copy_of)]
        waiter = self._waiting.enter(party, message, line, why, copy_of)
        self._timeline.set(("waiter", "", waiter.number), now + wait_s)
        return []

    def give_up(self, now: float, what: WaitingClaim | ClaimEntry) -> list[Action]:
        """Nobody takes the answer to this request any more. What was granted meanwhile ends as it does when its asker
        finds the answer too late (it settles such a claim, a round trip from now): nobody uses it.
        """
        if isinstance(what, ClaimEntry):
            return self._settle(now, what, "settled", TransferTimeout.code, "", tell=True)
        self._drop_waiter(what)
        return []

    def settle(self, now: float, party: Party, message: m.Settle) -> list[Action]:
        """End a claim, by its claimant or by the posting's owner. Doing it again is harmless and counts once."""
        posting_id, number, code, detail = message.posting, message.claim, message.code, message.detail
        posting = self._visible(party, posting_id)
        known: Posting | EndedPosting | None = posting or self._remembered(party, posting_id)
        if known is None or not 1 <= number <= known.issued:
            raise UnknownTransfer("no such claim", posting=posting_id, claim=number)
        claim = posting.claims.get(number) if posting is not None else None
        done: list[Action] = [Send(link=party.link, message=m.Done(rid=message.rid))]
        if posting is None or claim is None:
            return done
        claimant = _is_claimant(party, claim)
        if not claimant and party is not posting.owner:
            raise AccessDenied("this claim is somebody else's", posting=posting_id, claim=number)
        if message.outcome == "done":
            return done + self._settle(now, claim, "settled", "done", detail, tell=claimant)
        # A daemon that lost its worker says so with this code.
        what = "lost" if message.outcome == "failed" and code == PeerLost.code else "settled"
        told = code if code not in ("", "done") else message.outcome
        return done + self._settle(now, claim, what, told, detail, tell=claimant)

    def claimant_lost(self, now: float, claim: ClaimEntry) -> list[Action]:
        """The claimant is gone for good."""
        name = claim.party.name if claim.party is not None else "the claimant's node"
        return self._settle(now, claim, "lost", PeerLost.code, f"{name} ended", tell=True)

    def orphan(self, now: float, claim: ClaimEntry) -> list[Action]:
        """The claimant's daemon is out of reach. The claim stays: the data path may still work."""
        assert claim.party is not None
        del claim.party.claims[claim.key]
        claim.party.forget_request(claim)
        claim.party = None
        self._orphans.setdefault(claim.node_id, {})[claim.key] = claim
        if claim.posting.deadline is None:
            # Nothing else would ever end it.
            self._timeline.set(("orphan", *claim.key), now + self._config.lease_s)
        return [_notice(claim, "orphaned", PeerLost.code, "the claimant's node is out of reach")]

    def reconcile_orphans(self, party: Party) -> list[Action]:
        """The claimant's daemon is back, and it is still the process that made the claims."""
        back = [
            claim
            for claim in self._orphans.get(party.node_id, {}).values()
            if claim.incarnation == party.incarnation and claim.posting.namespace == party.namespace
        ]
        for claim in back:
            self._forget_orphan(claim)
        return self.reassign(back, party)

    def reassign(self, claims: Sequence[ClaimEntry], party: Party) -> list[Action]:
        """From now on the claimants are reached over another link. Some grants may have been lost with the earlier one,
        so their node is asked which of them it knows: what it does not know, nobody would ever settle.
        """
        sessions: dict[str, list[ClaimKey]] = {}
        for claim in claims:
            if claim.party is not None:
                del claim.party.claims[claim.key]
                claim.party.forget_request(claim)
            claim.party = party
            party.claims[claim.key] = claim
            sessions.setdefault(claim.session, []).append(claim.key)
        return [
            Send(link=party.link, message=m.Confirm(session=name, claims=m.pack_claims(some)))
            for name, keys in sessions.items()
            for some in m.claims_in_messages(keys if name else ())
        ]

    def never_arrived(self, now: float, key: ClaimKey, session: str) -> list[Action]:
        """The claimant's node does not know this claim, and the connection over which it was granted has ended there
        too. So nobody uses it; its place is not given to a second one all the same (`SINGLE_USE`).
        """
        posting = self._postings.get(key[0])
        claim = posting.claims.get(key[1]) if posting is not None else None
        if claim is None or claim.session != session:
            return []
        return self._settle(now, claim, "lost", UnknownTransfer.code, NEVER_ARRIVED, tell=True)

    def stop_waiting(self, party: Party) -> None:
        """The link of these waiters is gone; nobody needs an answer."""
        for waiter in list(party.waiters.values()):
            self._drop_waiter(waiter)

    # -- time ------------------------------------------------------------------------------------------------

    def expire(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for what, posting_id, number in self._timeline.pop_due(now):
            # An earlier one of the same moment may have ended what a later one is about.
            posting = self._postings.get(posting_id)
            waiter = self._waiting.get(number) if what == "waiter" else None
            if waiter is not None:
                self._drop_waiter(waiter)
                # Who was a copy when it came is one still: its wait was cut because of that.
                copy_of = waiter.copy_of or self._copy_of(now, waiter.line, waiter.message)
                actions.append(self._not_served(waiter.party, waiter.message, waiter.line, waiter.why, copy_of))
            elif posting is not None and what == "orphan":
                actions += self.claimant_lost(now, posting.claims[number])
            elif posting is not None and what == "posting":
                actions.append(_to_owner(posting, "expired", LeaseExpired.code))
                actions += self._end(now, posting, "expired", LeaseExpired.code, "")
        return actions

    # -- the parts -------------------------------------------------------------------------------------------

    def _check_room(self, party: Party, size: int) -> None:
        config, live = self._config, len(self._postings)
        if live >= config.postings_max or exceeds_fair_share(len(party.postings), live, config.postings_max):
            raise TooManyPending("too many postings on this node", postings_max=config.postings_max)
        greedy = exceeds_fair_share(party.posting_bytes, self.posting_bytes, config.posting_bytes_max)
        if greedy or self.posting_bytes + size > config.posting_bytes_max:
            raise TooManyPending("the postings of this node are full", posting_bytes_max=config.posting_bytes_max)

    def _new_id(self) -> str:
        for _ in range(_ID_ATTEMPTS):
            found = self._random(16).hex()
            if found not in self._postings and self._ended.get(found) is None:
                return found
        raise InternalError("the random source repeats itself")

    def _deadline(self, now: float, kind: str, lease_s: float) -> float | None:
        if lease_s > self._config.lease_s_max:
            raise UsageError("bad lease", lease_s=lease_s, lease_s_max=self._config.lease_s_max)
        if lease_s == 0 and kind == "region":
            return None
        return now + (lease_s or self._config.lease_s)

    def _owned(self, party: Party, posting_id: str) -> Posting:
        posting = self._visible(party, posting_id)
        if posting is None:
            raise gone(posting_id, self._remembered(party, posting_id))
        if posting.owner is not party:
            raise AccessDenied("the posting belongs to another worker", posting=posting_id)
        return posting

    def _visible(self, party: Party, posting_id: str) -> Posting | None:
        """The posting, unless it is another namespace's: then there is none."""
        posting = self._postings.get(posting_id)
        return posting if posting is not None and posting.namespace == party.namespace else None

    def _remembered(self, party: Party, posting_id: str) -> EndedPosting | None:
        ended = self._ended.get(posting_id)
        return ended if ended is not None and ended.namespace == party.namespace else None

    def _find_by_id(self, party: Party, message: m.Claim) -> Posting:
        posting = self._visible(party, message.posting)
        if posting is None:
            raise gone(message.posting, self._remembered(party, message.posting))
        if not hmac.compare_digest(posting.secret, message.secret):
            raise WrongKey("the secret does not match the posting's", posting=posting.id)
        if message.kind != posting.kind:
            raise UnknownTransfer(f"the posting is no {message.kind}", posting=posting.id)
        if posting.used_up:
            raise used_up(posting)
        return posting

    def _find_by_key(self, party: Party, message: m.Claim) -> Posting | None:
        if message.kind not in FOUND_BY_KEY:
            raise AccessDenied("this kind is claimed with posting and secret, not by key", kind=message.kind)
        line: QueueKey = (party.namespace, message.kind, message.key)
        if self._ended.expired(line):
            raise LeaseExpired(f"the {message.kind} ran out", key=message.key)
        return self._by_key.get(line)

    def _not_served(self, party: Party, message: m.Claim, line: QueueKey, why: str, copy_of: str) -> Action:
        """The end of a claim that found nothing. If others wrote its part of the last offer, that is a success."""
        if copy_of:
            return self._nothing_to_do(party, message.rid, copy_of)
        return Refused(link=party.link, rid=message.rid, error=not_served(line, why))

    def _written(self, ended: EndedPosting | None, message: m.Claim) -> bool:
        return ended is not None and ended.covers(message.boxes, message.engine_id)

    def _copy_of(self, now: float, line: QueueKey, message: m.Claim) -> str:
        """The last offer with this key, if others wrote all of it that this claim has and it was committed just now."""
        last = self._ended.last(line)
        copied = last is not None and now - last.at < COPIES_S and self._written(last, message)
        return self._ended.last_id(line) if copied else ""

    def _nothing_to_do(self, party: Party, rid: int, posting_id: str) -> Action:
        """Others write, or have written, all that the claimant has: there is no claim."""
        return Send(
            link=party.link,
            message=m.Claimed(
                rid=rid,
                posting=posting_id,
                claim=0,
                expires_in_s=0.0,
                node_id=self._node_id,
                incarnation=self._incarnation,
            ),
        )

    def _match(self, now: float, posting: Posting, party: Party, message: m.Claim) -> list[Action]:
        rid = message.rid
        part = part_of(posting, message.boxes) if posting.boxes else ()
        if posting.boxes and not part:
            return [self._nothing_to_do(party, rid, posting.id)]
        if self.is_slow(posting.owner.link):
            hint = "it computes, or hangs: try again when it goes on"
            raise PeerBackpressure("the worker that posted it does not keep up with its claims", hint=hint)
        if not self._claims.room(party.account):
            raise too_many("live claims on this node", "claims_max", self._claims, party.account)
        if posting.issued >= CLAIM_NUMBER_MAX:
            raise TooManyPending("the posting's claim numbers are used up", claims=posting.issued)
        posting.issued += 1
        who = (party, party.node_id, party.incarnation, message.engine_id)
        claim = ClaimEntry(posting, posting.issued, *who, now, party.session, rid, party.account, part)
        if part:
            posting.taken += part
            posting.writers.add(message.engine_id)
        posting.claims[claim.number] = party.claims[claim.key] = claim
        party.asked(rid, claim)
        self._claims.take(claim.account)
        answer = m.Claimed(
            rid=rid,
            posting=posting.id,
            claim=claim.number,
            body=posting.body,
            expires_in_s=posting.expires_in_s(now),
            node_id=self._node_id,
            incarnation=self._incarnation,
            boxes=part,
        )
        # The owner first: it must know of whoever may write, even if this daemon ends now.
        return [_notice(claim, "claimed", "", "", boxes=part), Send(link=party.link, message=answer)]

    def _settle(self, now: float, claim: ClaimEntry, what: str, code: str, detail: str, *, tell: bool) -> list[Action]:
        posting = claim.posting
        self._forget_claim(now, claim, code)
        posting.broken |= bool(posting.boxes) and code != "done"
        if posting.kind in SINGLE_USE or (posting.kind == "ticket" and what == "settled" and code == "done"):
            posting.spent += 1
        told: list[Action] = [_notice(claim, what, code, detail)] if tell else []
        return [*told, *self._serve(now, posting)]

    def _serve(self, now: float, posting: Posting) -> list[Action]:
        """Give free places to those who wait for this posting, by its id or by its key, oldest first."""
        actions: list[Action] = []
        lines: list[QueueKey] = [("", "", posting.id)]
        if posting.found_by_key:
            lines.append(posting.line)
        while posting.free and (waiter := self._waiting.oldest(lines)) is not None:
            self._drop_waiter(waiter)
            try:
                actions += self._match(now, posting, waiter.party, waiter.message)
            except KvxferError as error:
                actions.append(Refused(link=waiter.party.link, rid=waiter.rid, error=error))
        return actions + (self.refuse_waiting(("", "", posting.id), used_up(posting)) if posting.used_up else [])

    def refuse_waiting(self, line: QueueKey, error: KvxferError) -> list[Action]:
        """Whoever waits for this hears that it will not come."""
        actions: list[Action] = []
        for waiter in self._waiting.line(line):
            self._drop_waiter(waiter)
            actions.append(Refused(link=waiter.party.link, rid=waiter.rid, error=error))
        return actions

    def _end(self, now: float, posting: Posting, how: str, code: str, detail: str) -> list[Action]:
        """The posting is gone: tell its claimants and those who wait for it."""
        reason = code or (detail if detail in AIMS or detail in BY_CODE else WITHDRAWN)
        actions: list[Action] = []
        for claim in list(posting.claims.values()):
            if claim.party is not None and (how != "lost" or claim.party is not posting.owner):
                actions.append(_notice(claim, how, code, detail, to=claim.party))
            self._forget_claim(now, claim, reason)
        del self._postings[posting.id], posting.owner.postings[posting.id]
        if posting.found_by_key:
            del self._by_key[posting.line]
        self.posting_bytes -= len(posting.body)
        posting.owner.posting_bytes -= len(posting.body)
        self._timeline.drop(("posting", posting.id, 0))
        self._ended.add(posting, how, committed=detail == COMMITTED, now=now)
        return actions + self.refuse_waiting(("", "", posting.id), gone(posting.id, self._ended.get(posting.id)))

    def _forget_claim(self, now: float, claim: ClaimEntry, reason: str) -> None:
        if claim.posting.kind != "region":  # that is no transfer: it is held for as long as peers are connected
            self.tally.add(claim.posting.kind, reason, now - claim.since)
        del claim.posting.claims[claim.number]
        self._claims.give(claim.account)
        if claim.party is None:
            self._forget_orphan(claim)
        else:
            del claim.party.claims[claim.key]
            claim.party.forget_request(claim)

    def _forget_orphan(self, claim: ClaimEntry) -> None:
        of_node = self._orphans[claim.node_id]
        del of_node[claim.key]
        if not of_node:
            del self._orphans[claim.node_id]
        self._timeline.drop(("orphan", *claim.key))

    def _drop_waiter(self, waiter: WaitingClaim) -> None:
        self._waiting.leave(waiter)
        self._timeline.drop(("waiter", "", waiter.number))

    def check(self, parties: Iterable[Party]) -> None:
        """Assert internal consistency; `parties` are all that are linked."""
        config = self._config
        linked = list(parties)
        postings = self._postings.values()
        claims = [claim for posting in postings for claim in posting.claims.values()]
        assert len(postings) <= config.postings_max
        assert self.posting_bytes == sum(len(posting.body) for posting in postings) <= config.posting_bytes_max
        assert self.posting_bytes == sum(party.posting_bytes for party in linked)
        assert self.claims == len(claims) <= config.claims_max
        self._claims.check()
        assert {posting.id for posting in postings} == {name for party in linked for name in party.postings}
        assert {key: self._postings[posting.id] for key, posting in self._by_key.items()} == {
            posting.line: posting for posting in postings if posting.found_by_key
        }
        assert all(claim.party.namespace == claim.posting.namespace for claim in claims if claim.party is not None)
        for posting in postings:
            assert posting.owner.postings[posting.id] is posting
            assert not posting.places or posting.spent + len(posting.claims) <= posting.places
            assert all(number == claim.number <= posting.issued for number, claim in posting.claims.items())
            assert self._ended.get(posting.id) is None
            assert sum(box.elements for box in posting.taken) == common_elements(posting.taken, posting.boxes)
            assert not overlap_itself(posting.taken), "two claims write the same"
            lines = [("", "", posting.id), posting.line][: 1 + posting.found_by_key]
            assert not (posting.free and self._waiting.oldest(lines)), "somebody waits for a free place"
        held = [claim for party in linked for claim in party.claims.values()]
        orphans = [claim for of_node in self._orphans.values() for claim in of_node.values()]
        assert len(held) + len(orphans) == len(claims)
        assert {claim.key for claim in [*held, *orphans]} == {claim.key for claim in claims}
        assert all(claim.party is None for claim in orphans)
        assert all(claim.party is party for party in linked for claim in party.claims.values())
        assert sum(len(party.waiters) for party in linked) == len(self._waiting)
        for party in linked:
            for rid, what in party.requests.items():
                assert what.rid == rid
                assert what.party is party, "a request of a link that is gone can be given up"
        timed = sum(posting.deadline is not None for posting in postings) + len(self._waiting)
        assert timed <= len(self._timeline) <= timed + len(orphans), "a deadline without anything that ends, or missing"
        self._waiting.check()
        self._ended.check()


def _posted(now: float, party: Party, rid: int, posting: Posting) -> Send:
    left_s = posting.expires_in_s(now)
    message = m.Posted(rid=rid, posting=posting.id, secret=posting.secret, expires_in_s=left_s)
    return Send(link=party.link, message=message)


def _to_owner(posting: Posting, what: str, code: str) -> Send:
    """What happened to the posting itself."""
    event = m.PostingEvent(posting=posting.id, claim=0, what=what, code=code)
    return Send(link=posting.owner.link, message=event, kind=posting.kind)


def _notice(
    claim: ClaimEntry, what: str, code: str, detail: str, *, to: Party | None = None, boxes: tuple[Box, ...] = ()
) -> Send:
    event = m.PostingEvent(
        posting=claim.posting.id,
        claim=claim.number,
        what=what,
        code=code,
        detail=detail,
        engine_id=claim.engine_id,
        boxes=boxes,
    )
    return Send(link=(to or claim.posting.owner).link, message=event, kind=claim.posting.kind)


def _is_claimant(party: Party, claim: ClaimEntry) -> bool:
    return claim.party is party or (not party.is_worker and party.node_id == claim.node_id)

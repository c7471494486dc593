"""The facts of the registry: who is linked, what is posted, who has claimed it, who waits for it, and what has ended.

The idea: every object here knows the objects beside it (a party its postings, claims and waiters; a posting its
claims), so the end of anything finds all that depends on it without a search. `registry.py` decides; this file only
says what there is.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvxfer.coverage import Box, clip, common_elements, overlap_itself
from kvxfer.errors import (
    BY_CODE,
    BusyError,
    GeometryMismatch,
    KvxferError,
    LeaseExpired,
    OverlapError,
    PeerLost,
    TooManyPending,
    UnknownTransfer,
    UsageError,
)
from kvxfer.rendezvous.actions import Link, Send
from kvxfer.rendezvous.shares import FairShares
from kvxfer.wire import messages as m

# Whoever took one of these may have written or read half of it: its place is not given to a second claimant.
SINGLE_USE = frozenset({"offer", "landing"})
# Found by their key; a ticket needs posting and secret, and so many may share a key.
FOUND_BY_KEY = frozenset({"offer", "region", "landing"})

WRITERS_MAX = 1024  # pushes into one offer
WRITERS_REMEMBERED_MAX = 64  # of an offer that has ended
COPIES_S = 10.0  # after an offer was committed: so long others with its id may be copies of who wrote it
AGAIN_WAIT_S = 1.0  # for another offer, by somebody whose part of the last one was written by others

ClaimKey = tuple[str, int]
QueueKey = tuple[str, str, str]  # what waiters wait for: (namespace, kind, key), or ("", "", posting)


@dataclass(slots=True, eq=False)
class Posting:
    """Something to be claimed. `places` 0: any number of claims; `deadline` None: as long as its owner.

    An offer with `boxes` is written by several claims: `taken` is what they write or have written, without overlap,
    `writers` are their engines. It is `broken` once one of them ended without success.
    """

    id: str
    secret: bytes = field(repr=False)
    owner: Party
    kind: str
    key: str
    body: bytes = field(repr=False)
    places: int
    deadline: float | None
    namespace: str = ""
    claims: dict[int, ClaimEntry] = field(default_factory=dict)
    issued: int = 0
    spent: int = 0
    boxes: tuple[Box, ...] = ()
    private: bool = False
    taken: list[Box] = field(default_factory=list)
    writers: set[str] = field(default_factory=set)
    broken: bool = False

    @property
    def free(self) -> bool:
        """One more may claim it now."""
        return not self.broken and (not self.places or self.spent + len(self.claims) < self.places)

    @property
    def used_up(self) -> bool:
        """Nobody can claim it any more, whatever becomes of the live claims."""
        return self.broken or (bool(self.places) and self.spent >= self.places)

    @property
    def found_by_key(self) -> bool:
        """Its key finds it; a private one needs posting and secret."""
        return self.kind in FOUND_BY_KEY and not self.private

    @property
    def line(self) -> QueueKey:
        """Where those wait who ask for it by its key."""
        return self.namespace, self.kind, self.key

    def expires_in_s(self, now: float) -> float:
        return 0.0 if self.deadline is None else max(0.0, self.deadline - now)


@dataclass(slots=True, eq=False)
class ClaimEntry:
    """One claimant's use of a posting. `party` is None while the claimant's daemon is out of reach; `session` names the
    connection over which it was granted, whoever carries the news later; ``rid`` is the request's number there."""

    posting: Posting
    number: int
    party: Party | None
    node_id: str
    incarnation: str
    engine_id: str
    since: float
    session: str = ""
    rid: int = 0
    account: Hashable = None
    boxes: tuple[Box, ...] = ()

    @property
    def key(self) -> ClaimKey:
        return self.posting.id, self.number


@dataclass(frozen=True, slots=True, eq=False)
class RemoteClaim:
    """A claim of one of our workers on a posting of another node; ``rid``: the worker's number for its request."""

    key: ClaimKey
    node_id: str
    party: Party
    rid: int = 0

    def event(self, what: str, code: str, detail: str = "") -> Send:
        """Tell the worker what happened to it."""
        event = m.PostingEvent(posting=self.key[0], claim=self.key[1], what=what, code=code, detail=detail)
        return Send(link=self.party.link, message=event)


@dataclass(frozen=True, slots=True, eq=False)
class WaitingClaim:
    """A claim that found nothing yet; `number` tells its place among all, `why` what it did not find. ``copy_of``: the
    offer for which others had written all that it has when it came.
    """

    number: int
    party: Party
    message: m.Claim
    line: QueueKey
    why: str
    copy_of: str = ""

    @property
    def rid(self) -> int:
        """The number of the request that waits."""
        return self.message.rid


@dataclass(slots=True, eq=False)
class Party:
    """One linked worker (`node_id` empty) or peer daemon, and everything that hangs on its link."""

    link: Link
    name: str
    node_id: str = ""
    incarnation: str = ""
    namespace: str = ""
    session: str = ""
    posting_bytes: int = 0
    postings: dict[str, Posting] = field(default_factory=dict)
    claims: dict[ClaimKey, ClaimEntry] = field(default_factory=dict)
    waiters: dict[int, WaitingClaim] = field(default_factory=dict)
    routes: dict[ClaimKey, RemoteClaim] = field(default_factory=dict)
    requests: dict[int, WaitingClaim | ClaimEntry | RemoteClaim] = field(
        default_factory=dict
    )  # what each request has come to, by rid

    @property
    def is_worker(self) -> bool:
        return not self.node_id

    @property
    def account(self) -> Hashable:
        """For whom its share is counted: a node with all its links, or this worker."""
        return self.node_id or self.link

    def asked(self, rid: int, what: WaitingClaim | ClaimEntry | RemoteClaim) -> None:
        """The request ``rid`` of this link waits, or was granted: it may still be given up."""
        if rid:
            self.requests[rid] = what

    def forget_request(self, what: WaitingClaim | ClaimEntry | RemoteClaim) -> None:
        """It has ended, or is no longer reached over this link, whose numbers then mean nothing."""
        if self.requests.get(what.rid) is what:
            del self.requests[what.rid]


@dataclass(frozen=True, slots=True)
class EndedPosting:
    """What is remembered of a posting that is gone: how (`expired`, `withdrawn`, `lost`), and its last claim. Of an
    offer that was committed also its boxes and who wrote them.
    """

    how: str
    kind: str
    key: str
    issued: int
    namespace: str = ""
    boxes: tuple[Box, ...] = ()
    writers: frozenset[str] = frozenset()
    at: float = 0.0

    def covers(self, boxes: tuple[Box, ...], engine_id: str) -> bool:
        """Others wrote all that these boxes have for it. Who wrote a part itself is not meant: it begins anew."""
        wanted = clip(boxes, self.boxes)
        return bool(wanted) and engine_id not in self.writers


class ClaimQueues:
    """Claims that wait, in one line per thing they wait for; at most `limit` in all."""

    def __init__(self, limit: int) -> None:
        self._shares = FairShares(limit)
        self._waiters: dict[int, WaitingClaim] = {}
        self._lines: dict[QueueKey, OrderedDict[int, None]] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._waiters)

    def get(self, number: int) -> WaitingClaim | None:
        return self._waiters.get(number)

    def enter(self, party: Party, message: m.Claim, line: QueueKey, why: str, copy_of: str = "") -> WaitingClaim:
        """Raises `TooManyPending`."""
        if not self._shares.room(party.account):
            raise too_many("claims wait on this node", "waiting_max", self._shares, party.account)
        self._shares.take(party.account)
        self._last += 1
        waiter = WaitingClaim(self._last, party, message, line, why, copy_of)
        self._waiters[waiter.number] = party.waiters[waiter.number] = waiter
        party.asked(message.rid, waiter)
        self._lines.setdefault(line, OrderedDict())[waiter.number] = None
        return waiter

    def leave(self, waiter: WaitingClaim) -> None:
        del self._waiters[waiter.number], waiter.party.waiters[waiter.number]
        waiter.party.forget_request(waiter)
        self._shares.give(waiter.party.account)
        line = self._lines[waiter.line]
        del line[waiter.number]
        if not line:
            del self._lines[waiter.line]

    def oldest(self, lines: Iterable[QueueKey]) -> WaitingClaim | None:
        """Who has waited longest in any of these lines."""
        heads = [next(iter(self._lines[line])) for line in lines if line in self._lines]
        return self._waiters[min(heads)] if heads else None

    def line(self, line: QueueKey) -> list[WaitingClaim]:
        return [self._waiters[number] for number in self._lines.get(line, ())]

    def everybody(self) -> list[WaitingClaim]:
        return list(self._waiters.values())

    def check(self) -> None:
        assert len(self._waiters) == self._shares.total <= self._shares.limit
        self._shares.check()
        assert sorted(self._waiters) == sorted(number for line in self._lines.values() for number in line)
        for line, numbers in self._lines.items():
            assert numbers
            assert list(numbers) == sorted(numbers), "a line is in the order of arrival"
            assert all(self._waiters[number].line == line for number in numbers)
        for number, waiter in self._waiters.items():
            assert waiter.party.waiters[number] is waiter


class EndedPostings:
    """The last postings that ended, at most `limit` of them. Keys are remembered for those that expired or were
    committed.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_id: OrderedDict[str, EndedPosting] = OrderedDict()
        self._by_line: dict[QueueKey, str] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, posting: Posting, how: str, *, committed: bool = False, now: float = 0.0) -> None:
        committed &= bool(posting.boxes) and len(posting.writers) <= WRITERS_REMEMBERED_MAX
        boxes, writers = (posting.boxes, frozenset(posting.writers)) if committed else ((), frozenset[str]())
        ended = EndedPosting(how, posting.kind, posting.key, posting.issued, posting.namespace, boxes, writers, now)
        self._by_id[posting.id] = ended
        if (how == "expired" or committed) and not posting.private:
            self._by_line[posting.line] = posting.id
        while len(self._by_id) > self._limit:
            old, ended = self._by_id.popitem(last=False)
            line = (ended.namespace, ended.kind, ended.key)
            if self._by_line.get(line) == old:
                del self._by_line[line]

    def get(self, posting: str) -> EndedPosting | None:
        return self._by_id.get(posting)

    def last_id(self, line: QueueKey) -> str:
        """The id of `last`, which must be there."""
        return self._by_line[line]

    def last(self, line: QueueKey) -> EndedPosting | None:
        """The last posting with this key, if it ran out or was committed and there has been none since."""
        found = self._by_line.get(line)
        return None if found is None else self._by_id[found]

    def expired(self, line: QueueKey) -> bool:
        """The last posting with this key ran out, and there has been none since."""
        last = self.last(line)
        return last is not None and last.how == "expired"

    def renewed(self, line: QueueKey) -> None:
        """The key is posted again: what happened before no longer matters for those who ask by key."""
        self._by_line.pop(line, None)

    def check(self) -> None:
        assert len(self._by_id) <= self._limit
        for (namespace, kind, key), posting in self._by_line.items():
            ended = self._by_id[posting]
            assert (ended.namespace, ended.kind, ended.key) == (namespace, kind, key)
            assert ended.how == "expired" or ended.boxes


def gone(posting_id: str, ended: EndedPosting | None) -> KvxferError:
    """Why a posting cannot be used any more."""
    shown = posting_id[:40]
    if ended is None:
        return UnknownTransfer("no such posting", posting=shown)
    if ended.how == "expired":
        return LeaseExpired(f"the {ended.kind} ran out", posting=shown, key=ended.key)
    if ended.how == "lost":
        return PeerLost(f"the worker that made the {ended.kind} ended", posting=shown, key=ended.key, retryable=False)
    return UnknownTransfer(f"the {ended.kind} was withdrawn", posting=shown, key=ended.key)


def used_up(posting: Posting) -> KvxferError:
    """Why nobody can claim a posting again that had its claims."""
    if posting.broken:
        return UnknownTransfer("a push into this offer has failed, and so has the offer", posting=posting.id)
    return UnknownTransfer(f"the {posting.kind} was used up", posting=posting.id, claims_max=posting.places)


def not_served(line: QueueKey, why: str) -> KvxferError:
    """Why a claim ends that did not wait, or waited to the end."""
    _, kind, name = line
    if kind:
        hint = "check the name and the node, or wait longer for it"
        return UnknownTransfer(f"no {kind} can be claimed: {why}", key=name, hint=hint)
    return BusyError(why, posting=name[:40])


def too_many(what: str, option: str, shares: FairShares, who: Hashable) -> TooManyPending:
    """A limit of this node is reached, by all together or by the share of one node."""
    whose = "" if shares.total >= shares.limit else f", {shares.held(who)} of them of the one who asks"
    hint = "try again when some have ended" + (f", or raise {option} there" if option else "")
    text = f"too many {what}: {shares.total} of {shares.limit}{whose}"
    return TooManyPending(text, option=option or None, limit=shares.limit, hint=hint)


def part_of(posting: Posting, boxes: tuple[Box, ...]) -> tuple[Box, ...]:
    """What a claimant that has these boxes (none: all) is to write of an offer; nothing: others write all of it.

    Raises `GeometryMismatch` when the offer wants nothing of them, `OverlapError` when others write a part of it, and
    `TooManyPending` when too many write it already.
    """
    wanted = clip(boxes, posting.boxes) if boxes else posting.boxes
    size = sum(box.elements for box in wanted)
    if not size and any(box.elements for box in posting.boxes):
        raise GeometryMismatch(
            "what the push has and what the offer wants have nothing in common; nothing was moved",
            source=_shown(boxes),
            target=_shown(posting.boxes),
        )
    taken = common_elements(wanted, posting.taken)
    if taken == size and posting.issued:
        return ()
    if taken:
        found = next(box for box in clip(wanted, posting.taken))
        raise OverlapError(
            f"another push writes a part of this one already ({found}); nothing was moved",
            overlap=str(found),
            source=_shown(boxes),
            hint="give each push what no other one has, or exactly what another one has",
        )
    if len(wanted) > m.BOXES_MAX:
        hint = "push what the offer wants in one piece, or all of it"
        raise GeometryMismatch("what the push would write is in too many pieces", limit=m.BOXES_MAX, hint=hint)
    if posting.issued >= WRITERS_MAX:
        raise TooManyPending("too many pushes write this offer", limit=WRITERS_MAX, retryable=False)
    return wanted or posting.boxes


def _shown(boxes: tuple[Box, ...]) -> str:
    return "; ".join(map(str, boxes))[:200]


def check_boxes(kind: str, boxes: tuple[Box, ...], private: bool) -> None:
    """Raises `UsageError` for boxes that overlap each other, or that are none of an offer."""
    if kind != "offer" and (boxes or private):
        raise UsageError("only an offer has boxes or is private", kind=kind)
    if overlap_itself(boxes):
        raise UsageError("these boxes overlap each other", boxes=_shown(boxes))


def check_posting(message: m.Post) -> None:
    """Raises `UsageError` for what can never be posted."""
    if message.kind in SINGLE_USE and message.claims_max > 1:
        raise UsageError(f"an {message.kind} has one claim", claims_max=message.claims_max)
    check_boxes(message.kind, message.boxes, message.private)


# -- claims of our workers at other nodes -----------------------------------------------------------------------------
# A claim is named by (node, posting, number), so that events about it find their worker. Posting ids are random, but
# whoever has seen one may answer with it; what one node says is never about a claim at another.


class RemoteClaims:
    """All routes of one daemon. Nothing here has a deadline: a route ends with its claim or with its worker."""

    def __init__(self) -> None:
        self._by_node: dict[str, dict[ClaimKey, RemoteClaim]] = {}
        self._nodes: Counter[ClaimKey] = Counter()  # at how many nodes there is a claim with this name
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def get(self, node_id: str, key: ClaimKey) -> RemoteClaim | None:
        """Our claim with this name at that node."""
        return self._by_node.get(node_id, {}).get(key)

    def known(self, key: ClaimKey) -> bool:
        """Some worker has a claim with this name, at some node."""
        return key in self._nodes

    def all(self) -> list[RemoteClaim]:
        return [route for of_node in self._by_node.values() for route in of_node.values()]

    def live_to(self, node_id: str) -> int:
        """Claims on postings of this node."""
        return len(self._by_node.get(node_id, ()))

    def conflict(self, party: Party, node_id: str, key: ClaimKey) -> bool:
        """Whether a node has granted what it cannot: another worker's claim, or one with the name that this worker's
        claim at another node has. A worker tells its claims apart by posting and number alone.
        """
        old, own = self.get(node_id, key), party.routes.get(key)
        return (old is not None and old.party is not party) or (own is not None and own.node_id != node_id)

    def add(self, party: Party, node_id: str, key: ClaimKey, rid: int = 0) -> RemoteClaim:
        """Remember a claim that is in no `conflict`; the same claim again replaces the earlier route."""
        old = self.get(node_id, key)
        if old is not None:
            self.drop(old)
        route = RemoteClaim(key, node_id, party, rid)
        party.routes[key] = route
        party.asked(rid, route)
        self._by_node.setdefault(node_id, {})[key] = route
        self._nodes[key] += 1
        self._count += 1
        return route

    def drop(self, route: RemoteClaim) -> None:
        del route.party.routes[route.key]
        route.party.forget_request(route)
        of_node = self._by_node[route.node_id]
        del of_node[route.key]
        if not of_node:
            del self._by_node[route.node_id]
        self._count -= 1
        self._nodes[route.key] -= 1
        if not self._nodes[route.key]:
            del self._nodes[route.key]

    def orphan(self, node_id: str) -> list[Send]:
        """The node is out of reach; its claims stay, since the data path may still work."""
        return [route.event("orphaned", PeerLost.code) for route in self._by_node.get(node_id, {}).values()]

    def check(self) -> None:
        """Assert internal consistency."""
        for node_id, of_node in self._by_node.items():
            assert of_node
            for key, route in of_node.items():
                assert (route.node_id, route.key) == (node_id, key)
                assert route.party.routes[key] is route
        assert sum(map(len, self._by_node.values())) == self._count == self._nodes.total()
        assert all(self._nodes.values())


# -- deadlines --------------------------------------------------------------------------------------------------------
# A heap that forgets lazily: setting a deadline only pushes; an entry in the heap counts when it is still the current
# one of its key. When stale entries outnumber live ones the heap is rebuilt, so its size stays proportional to the
# number of keys however often a lease is renewed.


K = TypeVar("K", bound=Hashable)
_STALE_MIN = 64


class Timeline(Generic[K]):
    """At most one deadline per key. Times are monotonic seconds, given by the caller."""

    def __init__(self) -> None:
        self._current: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._current)

    def set(self, key: K, at: float) -> None:
        """Give `key` the deadline `at`, instead of any earlier one."""
        self._sequence += 1
        self._current[key] = (at, self._sequence)
        heapq.heappush(self._heap, (at, self._sequence, key))
        if len(self._heap) > 2 * len(self._current) + _STALE_MIN:
            self._heap = [(at, sequence, key) for key, (at, sequence) in self._current.items()]
            heapq.heapify(self._heap)

    def drop(self, key: K) -> None:
        """Forget the deadline of `key`, if it has one."""
        self._current.pop(key, None)

    def next(self) -> float | None:
        """The earliest deadline; None when there is none."""
        self._skip_stale()
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> list[K]:
        """Remove and return the keys whose deadline has come, earliest first, equal ones in the order of setting."""
        due = []
        while (at := self.next()) is not None and at <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._current[key]
            due.append(key)
        return due

    def _skip_stale(self) -> None:
        while self._heap:
            at, sequence, key = self._heap[0]
            if self._current.get(key) == (at, sequence):
                return
            heapq.heappop(self._heap)


# -- how claims ended and how long they lived -------------------------------------------------------------------------
# The numbers behind alerts on failed transfers: every push and every pull is one claim, and the owner's daemon sees
# each claim end exactly once, whatever happens to workers, links and nodes. So it counts there, for the whole cluster,
# and the data path pays nothing. Reasons are codes of our own errors and a few words, never what a peer made up.


BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # the last one is open
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


class ClaimStatistics:
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
        key = (kind if kind in m.POSTING_KINDS else OTHER, code if code in BY_CODE else OTHER)
        self._refused[key] = self._refused.get(key, 0) + 1

    def add(self, kind: str, reason: str, seconds: float) -> None:
        """Count a claim that has ended."""
        word = DONE if reason in AIMS else reason
        known = word if word in BY_CODE or word in (DONE, WITHDRAWN) else OTHER
        self._ended[kind, known] = self._ended.get((kind, known), 0) + 1
        self._durations.setdefault(kind, Durations()).add(max(0.0, seconds))

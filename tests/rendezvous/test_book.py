"""Any order of posts, claims, settlements, deaths and waits: the registry agrees with what it has told everybody.

The model is made of nothing but the answers and notices that the parties received. So a claim that the registry forgot
to announce, announced twice, or kept after telling its owner that it ended, makes the two disagree.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvxfer.config import Config
from kvxfer.errors import UsageError
from kvxfer.rendezvous.actions import Link, Refused, SettleElsewhere
from kvxfer.rendezvous.registry import Registry
from kvxfer.wire import messages as m
from tests.rendezvous.bench import Asked, Seen, is_a, said

HERE, THERE = "a" * 32, "c" * 32
WORKERS = ("w0", "w1")
PEERS = ("p0", "p1")
LINKS = st.sampled_from([*WORKERS, *PEERS])
KEYS = st.sampled_from(["k0", "k1"])
KINDS = st.sampled_from(["offer", "ticket", "region", "landing"])


def make(**changes: Any) -> Asked:
    numbers = itertools.count(1)
    return Asked(
        Registry(
            Config(**changes),
            node_id=HERE,
            incarnation="b" * 32,
            random=lambda size: next(numbers).to_bytes(size, "big"),
        )
    )


class RegistryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.registry = make(
            postings_max=6,
            claims_max=8,
            waiting_max=4,
            expired_memory_max=3,
            mailbox_messages_max=2,
            mailboxes_max=2,
            lease_s=4,
            lease_s_max=8,
            mail_ttl_s=3,
        )
        self.now = 0.0
        self.rids = itertools.count(1)
        self.linked: set[Link] = set()
        self.pending: dict[int, Link] = {}
        self.postings: dict[str, tuple[Seen, str, int]] = {}
        self.live: dict[tuple[str, int], Link] = {}
        self.granted: dict[tuple[str, int], Link] = {}
        self.done: dict[str, int] = {}
        for link in (*WORKERS, *PEERS):
            self.add(link)

    def add(self, link: str) -> None:
        self.linked.add(link)
        if link in WORKERS:
            self.registry.add_worker(link)
        else:
            self.see(self.registry.add_peer(self.now, link, THERE, "d" * 32))

    # -- what the parties see ----------------------------------------------------------------------------

    def ask(self, link: Link, call: Callable[[int], list[Any]]) -> list[Any]:
        """Send a request; it is answered now or stays pending."""
        rid = next(self.rids)
        self.pending[rid] = link
        return self.see(call(rid))

    def see(self, actions: list[Any]) -> list[Any]:
        for action in actions:
            if isinstance(action, SettleElsewhere) or is_a(action, m.Confirm):
                continue
            assert action.link in self.linked, "nobody is told anything after its link has gone"
            if is_a(action, m.PostingEvent):
                self.notice(action)
            elif not is_a(action, m.Delivery):
                assert self.pending.pop(action.rid) == action.link, "one answer per request, to who asked"
            if is_a(action, m.Claimed):
                self.live[action.posting, action.claim] = action.link
                self.granted[action.posting, action.claim] = action.link
        return actions

    def notice(self, action: Seen) -> None:
        key = (action.posting, action.claim)
        posted = self.postings[action.posting][0] if action.posting in self.postings else None
        if posted is not None and action.link == posted.link and action.what in ("settled", "lost"):
            del self.live[key]  # KeyError: told twice
        elif action.what in ("expired", "withdrawn") and action.claim == 0:
            assert posted is not None
            assert action.link == posted.link
            self.forget(action.posting)
        elif action.what in ("expired", "withdrawn", "lost"):
            assert key in self.granted

    def forget(self, posting: str) -> None:
        self.postings.pop(posting, None)
        self.live = {key: link for key, link in self.live.items() if key[0] != posting}

    # -- what the parties do -------------------------------------------------------------------------------

    @rule(link=LINKS)
    def join(self, link: str) -> None:
        if link not in self.linked:
            self.add(link)

    @precondition(lambda self: self.linked)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        link = data.draw(st.sampled_from(sorted(map(str, self.linked))))
        self.see(self.registry.expire(self.now))
        self.linked.discard(link)
        self.pending = {rid: other for rid, other in self.pending.items() if other != link}
        mine = [posting for posting, (posted, _, _) in self.postings.items() if posted.link == link]
        actions = self.registry.remove(self.now, link)
        for posting in mine:
            told = {item.claim for item in actions if is_a(item, m.PostingEvent) and item.posting == posting}
            reachable = {key[1] for key, claimant in self.live.items() if key[0] == posting and claimant in self.linked}
            assert told <= {key[1] for key in self.live if key[0] == posting}
            assert reachable <= told | {key[1] for key in self.live if self.live[key] == link}
            self.forget(posting)
        self.see(actions)

    @rule(link=st.sampled_from(WORKERS), kind=KINDS, key=KEYS, lease_s=st.integers(0, 5), places=st.integers(0, 2))
    def post(self, link: str, kind: str, key: str, lease_s: int, places: int) -> None:
        if link not in self.linked:
            return
        actions = self.ask(
            link,
            lambda rid: self.note_post(
                kind,
                places,
                self.registry.post(
                    self.now, link, rid, kind=kind, key=key, body=b"b", lease_s=lease_s, claims_max=places
                ),
            ),
        )
        assert not self.pending.keys() & {action.rid for action in actions if is_a(action, m.Posted)}

    def note_post(self, kind: str, places: int, actions: list[Any]) -> list[Any]:
        for action in actions:
            if is_a(action, m.Posted):
                self.postings[action.posting] = (action, kind, 1 if kind in ("offer", "landing") else places)
        return actions

    @rule(link=LINKS, kind=KINDS, key=KEYS, wait_s=st.integers(0, 3))
    def claim_by_key(self, link: str, kind: str, key: str, wait_s: int) -> None:
        if link in self.linked:
            self.ask(
                link, lambda rid: self.registry.claim(self.now, link, rid, kind=kind, key=key, wait_s=float(wait_s))
            )

    @precondition(lambda self: self.postings)
    @rule(link=LINKS, data=st.data(), wait_s=st.integers(0, 3))
    def claim_by_secret(self, link: str, data: st.DataObject, wait_s: int) -> None:
        posted, kind, _ = self.postings[data.draw(st.sampled_from(sorted(self.postings)))]
        if link in self.linked:
            self.ask(
                link,
                lambda rid: self.registry.claim(
                    self.now,
                    link,
                    rid,
                    kind=kind,
                    posting=posted.posting,
                    secret=posted.secret,
                    wait_s=float(wait_s),
                ),
            )

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), link=LINKS, outcome=st.sampled_from(["done", "failed", "cancelled"]))
    def settle(self, data: st.DataObject, link: str, outcome: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.granted)))
        if link not in self.linked:
            return
        self.see(self.registry.expire(self.now))
        was_live, posting = key in self.live, self.postings.get(key[0])
        actions = self.ask(
            link,
            lambda rid: self.registry.settle(self.now, link, rid, posting=key[0], claim=key[1], outcome=outcome),
        )
        accepted = is_a(actions[0], m.Done)
        if was_live and accepted and posting is not None:
            told = [item for item in actions if is_a(item, m.PostingEvent) and item.what == "settled"]
            # Its owner settled it and needs no notice; whoever else did, the owner is told.
            assert told or link == posting[0].link
            self.live.pop(key, None)
            if outcome == "done" and posting[1] == "ticket":
                self.done[key[0]] = self.done.get(key[0], 0) + 1

    @precondition(lambda self: self.postings)
    @rule(data=st.data(), link=st.sampled_from(WORKERS), renew=st.booleans())
    def renew_or_withdraw(self, data: st.DataObject, link: str, renew: bool) -> None:
        posting = data.draw(st.sampled_from(sorted(self.postings)))
        if link not in self.linked:
            return
        self.see(self.registry.expire(self.now))
        if posting not in self.postings:
            return
        owner = self.postings[posting][0].link
        if renew:
            self.ask(link, lambda rid: self.registry.renew(self.now, link, rid, posting=posting, lease_s=3))
            return
        actions = self.ask(link, lambda rid: self.registry.withdraw(self.now, link, rid, posting=posting))
        assert is_a(actions[0], m.Done) == (link == owner)
        if link == owner:
            self.forget(posting)

    @rule(link=LINKS, what=st.sampled_from(["mail", "listen", "unlisten"]), channel=st.sampled_from("xyz"))
    def mail(self, link: str, what: str, channel: str) -> None:
        registry, now = self.registry, self.now
        if link not in self.linked:
            return
        if what == "mail":
            self.ask(link, lambda rid: registry.mail(now, link, rid, channel=channel, data=b"m", source=THERE))
        else:
            self.ask(link, lambda rid: getattr(registry, what)(now, link, rid, channel=channel))

    @rule(node=st.sampled_from([THERE, HERE]), link=st.sampled_from(WORKERS), number=st.integers(1, 3))
    def grant_elsewhere(self, node: str, link: str, number: int) -> None:
        rid = next(self.rids)
        answer = said(
            m.Claimed,
            link=link,
            rid=rid,
            posting="e" * 32,
            claim=number,
            body=b"",
            expires_in_s=1.0,
            node_id=node,
            incarnation=HERE,
        )
        actions = self.registry.claimed_elsewhere(self.now, answer)
        told = answer in actions or any(isinstance(action, SettleElsewhere) for action in actions)
        [*_, last] = actions
        assert told or (isinstance(last, Refused) and last.error.code == "protocol"), "another worker has it"
        self.see([action for action in actions if action != answer and not isinstance(action, Refused)])

    @rule(link=LINKS, number=st.integers(0, 3), what=st.sampled_from(["lost", "orphaned", "expired", "claimed"]))
    def event(self, link: str, number: int, what: str) -> None:
        actions = self.registry.event_from_peer(self.now, link, posting="e" * 32, claim=number, what=what)
        routed = [action for action in actions if is_a(action, m.PostingEvent) and action.posting == "e" * 32]
        assert all(action.link in self.linked for action in routed)
        self.see([action for action in actions if action not in routed])

    @rule(step=st.sampled_from([0.5, 1.0, 5.0]))
    def wait(self, step: float) -> None:
        self.now += step
        due = self.registry.next_deadline()
        actions = self.see(self.registry.expire(self.now))
        assert not actions or (due is not None and due <= self.now)
        after = self.registry.next_deadline()
        assert after is None or after > self.now, "nothing that is due stays"

    # -- what must hold --------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        self.registry.check()
        counts = self.registry.counts()
        assert counts.waiting == len(self.pending), "what is not answered waits, and nothing else does"
        assert counts.postings == len(self.postings)
        assert counts.claims == len(self.live)
        for posting, successes in self.done.items():
            if posting in self.postings and self.postings[posting][2]:
                assert successes <= self.postings[posting][2]

    def teardown(self) -> None:
        for link in sorted(map(str, self.linked)):
            self.registry.remove(self.now, link)
        self.registry.expire(self.now + 100)
        self.registry.check()
        counts = self.registry.counts()
        assert (counts.postings, counts.posting_bytes, counts.claims, counts.waiting) == (0, 0, 0, 0)
        assert (counts.routes, counts.channels, counts.workers, counts.peers, counts.orphans) == (0, 0, 0, 0, 0)
        assert self.registry.next_deadline() is None


TestRegistryMachine = RegistryMachine.TestCase
TestRegistryMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)

TEXT = st.one_of(st.sampled_from(["", "k", "offer", "region", "e" * 32, HERE]), st.text(max_size=300))
NUMBER = st.one_of(st.sampled_from([0.0, 1.0, -1.0, float("nan"), float("inf")]), st.floats())
INTEGER = st.one_of(st.integers(-2, 3), st.integers(-(2**64), 2**64))


CALL = st.tuples(st.integers(0, 8), LINKS, TEXT, TEXT, TEXT, st.binary(max_size=20), NUMBER, INTEGER)


def call(
    registry: Asked, which: int, link: str, a: str, b: str, c: str, data: bytes, seconds: float, number: int
) -> list[Any]:
    calls: list[Callable[[], list[Any]]] = [
        lambda: registry.post(0.0, link, 1, kind=a, key=b, body=data, lease_s=seconds, claims_max=number),
        lambda: registry.renew(0.0, link, 1, posting=a, lease_s=seconds),
        lambda: registry.withdraw(0.0, link, 1, posting=a, reason=b),
        lambda: registry.claim(0.0, link, 1, kind=a, key=b, posting=c, secret=data, wait_s=seconds),
        lambda: registry.settle(0.0, link, 1, posting=a, claim=number, outcome=b, code=c),
        lambda: registry.event_from_peer(0.0, link, posting=a, claim=number, what=b, code=c),
        lambda: registry.mail(0.0, link, 1, channel=a, data=data, source=THERE),
        lambda: registry.listen(0.0, link, 1, channel=a),
        lambda: registry.remove(0.0, link),
    ]
    return calls[which]()


@settings(max_examples=200, deadline=None)
@given(st.lists(CALL, max_size=8))
def test_no_message_makes_a_method_raise(calls: list[tuple[int, str, str, str, str, bytes, float, int]]) -> None:
    registry = make()
    registry.add_worker("w0")
    registry.add_peer(0.0, "p0", THERE, "d" * 32)
    for arguments in calls:
        with contextlib.suppress(UsageError):  # no message that there can be
            assert isinstance(call(registry, *arguments), list)
        registry.check()

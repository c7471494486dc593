"""Requests of this node's workers that are for other nodes: to the pool, over the link, and the answer back.

The idea: a forwarded request is one bounded task, and whatever happens to it (no link, a refusal, the peer's end, the
deadline) becomes the worker's answer. A claim on a connection that turns out to be dead is tried once more on a fresh
one: the owner has forgotten the first try together with the connection. A claim whose worker ends, or gives it up, is
given up at the other node as well: an offer has one place. A settlement that nobody heard is repeated (`settling.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from kvxfer.config import Config
from kvxfer.daemon.dispatch import Dispatcher
from kvxfer.daemon.pool import Pool
from kvxfer.daemon.settling import CompletionOutbox, Confirmations
from kvxfer.descriptors import ENDPOINT_CHARS_MAX
from kvxfer.errors import (
    NOT_TOLD,
    ClosedError,
    KvxferError,
    PeerError,
    PeerUnreachable,
    ProtocolError,
    TooManyPending,
)
from kvxfer.net.link import Link, waits
from kvxfer.rendezvous import actions as act
from kvxfer.rendezvous.postings import ClaimKey, too_many
from kvxfer.rendezvous.shares import FairShares
from kvxfer.tasks import ANSWER, Deadline, TaskOwner
from kvxfer.wire import messages as m
from kvxfer.wire.codec import Message

REPLY_MARGIN_S = 1.0  # beside connecting and waiting: what the peer may need to answer
ANSWERS: dict[type[Message], type[Message]] = {
    m.Claim: m.Claimed,
    m.Land: m.Claimed,
    m.Mail: m.Done,
    m.Echo: m.EchoReply,
    m.Settle: m.Done,
}
REACHED_S = 0.01  # less than this is not worth a word
SAFE_TO_REPEAT = (m.Claim, m.Echo)


class Forwarder:
    """At most `requests_max` requests of one worker are under way. Those that wait at another node are limited by
    `waiting_max` for all workers together, with a share for each worker and node: one that is full holds up no other.
    """

    def __init__(
        self,
        pool: Pool,
        dispatcher: Dispatcher,
        owner: TaskOwner,
        config: Config,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._pool = pool
        self._dispatcher = dispatcher
        self._owner = owner
        self._config = config
        self._clock = clock
        self._running: dict[Link, int] = {}
        self._waiting = FairShares(config.waiting_max)
        self._settling: dict[asyncio.Task[None], ClaimKey] = {}
        self._told_now: Counter[ClaimKey] = Counter()
        self._claims: dict[Link, dict[int, asyncio.Task[None]]] = {}
        self.unsettled = CompletionOutbox(
            self._tell,
            owner,
            clock=clock,
            rng=rng,
            limit=config.claims_max,
            keep_s=config.lease_s_max,
            told=self._told_late,
        )
        self._confirmations = Confirmations(dispatcher, owner, config, clock, self.is_settling)

    @property
    def running(self) -> int:
        """How many forwarded requests are under way or wait."""
        return sum(self._running.values()) + self._waiting.total

    def forward(self, link: Link, message: m.Claim | m.Land | m.Mail | m.Echo) -> None:
        """Ask another node; the worker hears of it in any case. Raises `TooManyPending`."""
        ended = self._begin_waiting(link, message.node) if waits(message) else self._begin(link)
        wait_s = message.wait_s if isinstance(message, m.Claim | m.Land) else 0.0
        deadline = Deadline.after(wait_s + self._config.connect_s + self._config.handshake_s + REPLY_MARGIN_S)
        task = self._owner.spawn(self._forward(link, message, deadline), f"forward {type(message).__name__}")
        task.add_done_callback(lambda _: ended())
        if isinstance(message, m.Claim | m.Land):
            self._claims.setdefault(link, {})[message.rid] = task
            task.add_done_callback(lambda done: self._claim_ended(link, message.rid, done))

    def give_up(self, link: Link, request: int) -> bool:
        """Whether this claim was under way; it ends, and the other node is told that nobody waits for it."""
        task = self._claims.get(link, {}).get(request)
        return task is not None and task.cancel()

    def forget(self, link: Link) -> None:
        """The link is gone: nobody waits for what it claims elsewhere."""
        for task in tuple(self._claims.get(link, {}).values()):
            task.cancel()

    def _claim_ended(self, link: Link, request: int, task: asyncio.Task[None]) -> None:
        claims = self._claims[link]
        if claims.get(request) is task:
            del claims[request]
        if not claims:
            del self._claims[link]

    def settle(self, action: act.SettleElsewhere) -> None:
        """Tell another node how a claim ended there; relay the answer when a worker waits for it."""
        worker = action.link if isinstance(action.link, Link) else None
        if worker is not None and not action.node_id:  # what has a route is bounded by the routes
            try:
                self._begin(worker)
            except TooManyPending as error:
                self._dispatcher.refuse(worker, action.message.rid, error)
                return
        with contextlib.suppress(ClosedError):  # this daemon ends, and the other node hears of that
            task = self._owner.spawn(self._settle(action, worker), "settle elsewhere")
            self._settling[task] = claim = (action.message.posting, action.message.claim)
            self._told_now[claim] += 1
            task.add_done_callback(self._settled)

    def confirm(self, link: Link, message: m.Confirm) -> None:
        """Ask another node which of these claims it knows."""
        self._confirmations.ask(link, message)

    def on_confirm(self, link: Link, message: m.Confirm) -> None:
        """Another node asks us. Raises `ProtocolError`, and `TooManyPending` for too many questions at once."""
        self._begin(link)
        try:
            answering = self._confirmations.answer(link, message)
        except KvxferError:
            self._end(link)
            raise
        answering.add_done_callback(lambda _: self._end(link))

    def settling(self) -> set[ClaimKey]:
        """Claims of which other nodes are being told, or will be, how they ended."""
        return self.unsettled.claims | set(self._settling.values())

    def is_settling(self, claim: ClaimKey) -> bool:
        """This is one of them."""
        return claim in self._told_now or self.unsettled.about(claim)

    def _settled(self, task: asyncio.Task[None]) -> None:
        claim = self._settling.pop(task)
        self._told_now[claim] -= 1
        if not self._told_now[claim]:
            del self._told_now[claim]

    async def wait_settled(self, timeout: float) -> None:
        """Wait until other nodes have answered what they are being told now."""
        if self._settling:
            await asyncio.wait(self._settling, timeout=timeout)

    def _begin(self, link: Link) -> Callable[[], None]:
        """Count one more request of this worker, until what is returned is called. Raises `TooManyPending`."""
        running, limit = self._running.get(link, 0), self._config.requests_max
        if running >= limit:
            hint = "try again when some of them are answered, or raise requests_max in the daemon's configuration"
            raise TooManyPending("too many requests to other nodes", limit=limit, option="requests_max", hint=hint)
        self._running[link] = running + 1
        return lambda: self._end(link)

    def _begin_waiting(self, link: Link, node: tuple[str, ...]) -> Callable[[], None]:
        """The same for one that may wait there."""
        who = (link, node)
        if not self._waiting.room(who):
            raise too_many("requests wait at other nodes", "waiting_max", self._waiting, who)
        self._waiting.take(who)
        return lambda: self._waiting.give(who)

    def _end(self, link: Link) -> None:
        left = self._running[link] - 1
        if left:
            self._running[link] = left
        else:
            del self._running[link]

    async def _forward(self, link: Link, message: Any, deadline: Deadline) -> None:
        try:
            reply = await self._ask(link, message, deadline)
            if isinstance(reply, m.Claimed):
                self._claimed(link, message.rid, reply)
            else:
                self._dispatcher.reply(link, replace(cast(Any, reply), rid=message.rid))
        except KvxferError as error:
            self._dispatcher.refuse(link, message.rid, error)

    async def _ask(self, link: Link, message: Any, deadline: Deadline) -> Message:
        request, began = replace(message, node=(), rid=0), self._clock()
        expected = message.node_id if isinstance(message, m.Claim) else ""
        repeats = 1 if isinstance(message, SAFE_TO_REPEAT) else 0
        while True:
            peer = await self._pool.get(message.node, expected, deadline, patience_s=getattr(request, "wait_s", 0.0))
            request = _waiting_less(request, message, self._clock() - began)
            if link.closed.done():  # what it would claim now, nobody could use, nor anybody else
                raise ClosedError("the worker that asked has ended", peer=link.name)
            if isinstance(message, m.Claim | m.Land):
                self._confirmations.asks(peer)
            try:
                reply = await peer.request(request, timeout=deadline.require("the peer answered", ANSWER))
            except PeerError:
                if not repeats or not peer.closed.done():
                    raise
                repeats -= 1
                continue
            wanted = ANSWERS[type(message)]
            if not isinstance(reply, wanted):
                peer.abort("it answered with something else")
                got = type(reply).__name__
                raise ProtocolError(f"the peer answered {type(message).__name__} with {got}", peer=peer.name)
            if isinstance(reply, m.Claimed) and reply.node_id != peer.peer.node_id:
                peer.abort("it granted what belongs to another node")
                raise ProtocolError("the peer granted what belongs to another node", peer=peer.name)
            if isinstance(reply, m.EchoReply):
                reply = replace(reply, via=peer.address[:ENDPOINT_CHARS_MAX])
            return reply

    def _claimed(self, link: Link, rid: int, reply: m.Claimed) -> None:
        answer = replace(reply, rid=rid)
        self._dispatcher.run(self._dispatcher.registry.claimed_elsewhere(self._clock(), link, answer))
        self._dispatcher.follow_node(reply.node_id)

    async def _settle(self, action: act.SettleElsewhere, worker: Link | None) -> None:
        try:
            await self._tell(action)
        except KvxferError as error:
            if isinstance(error, NOT_TOLD):
                self.unsettled.keep(action)
            if worker is not None:
                self._dispatcher.refuse(worker, action.message.rid, error)
        else:
            if worker is not None:
                self._dispatcher.reply(worker, m.Done(rid=action.message.rid))
        finally:
            if worker is not None and not action.node_id:
                self._end(worker)

    def _told_late(self, action: act.SettleElsewhere) -> None:
        """A second answer: its worker need not remember this settlement for another daemon any longer."""
        if isinstance(action.link, Link) and not action.link.closed.done():
            self._dispatcher.reply(action.link, m.Done(rid=action.message.rid))

    async def _tell(self, action: act.SettleElsewhere) -> None:
        """Settle at another node and wait until it has answered."""
        message = replace(action.message, node=(), rid=0)
        deadline = Deadline.after(self._config.connect_s + REPLY_MARGIN_S)
        try:
            peer = await self._link_to(action, deadline)
            await peer.request(message, timeout=deadline.require("the peer was told", ANSWER))
        finally:
            self._dispatcher.follow_node(action.node_id)

    async def _link_to(self, action: act.SettleElsewhere, deadline: Deadline) -> Link:
        """Ours, or when the node cannot be dialled (any more) the one that it made."""
        try:
            return await self._pool.get(action.message.node, action.node_id, deadline, newest=False)
        except PeerUnreachable:
            theirs = self._dispatcher.link_from(action.node_id)
            if theirs is None:
                raise
            return theirs


def _waiting_less(request: Any, asked: Any, took_s: float) -> Any:
    """What it took to reach the other node is a part of the time that the worker wants to wait."""
    if took_s < REACHED_S or not isinstance(asked, m.Claim | m.Land) or not asked.wait_s:
        return request
    return replace(request, wait_s=max(0.0, asked.wait_s - took_s))


def settle_late(link: Link, message: Message) -> None:
    """A claim was granted after its request had been given up: give it back."""
    if isinstance(message, m.Claimed) and message.claim and link.usable:
        late = m.Settle(posting=message.posting, claim=message.claim, outcome="cancelled", code="timeout")
        try:
            link.notify(late)
        except KvxferError:
            link.abort("it does not keep up")

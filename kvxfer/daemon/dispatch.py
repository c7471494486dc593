"""From messages to decisions and back: what a daemon does when a link says something.

The idea: nothing is decided here. Each kind of message has one entry in a table that calls the registry, the landing
pool or the forwarder; what they return is a list of actions, executed in order, each of them one message on one link.
The daemon itself takes part under the name `SELF`, so that its own postings follow the same rules as everybody's.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, Protocol

from kvxfer.config import Config
from kvxfer.daemon.events import Events
from kvxfer.daemon.nodes import Nodes
from kvxfer.errors import (
    AccessDenied,
    KvxferError,
    NotAllowed,
    PeerBackpressure,
    PeerDraining,
    UnknownMessage,
    UsageError,
)
from kvxfer.logs import logger
from kvxfer.net.link import Link, Queues
from kvxfer.rendezvous import actions as act
from kvxfer.rendezvous.registry import Registry
from kvxfer.wire import messages as m
from kvxfer.wire.codec import Message
from kvxfer.wire.messages import error_reply

SELF = "this daemon"

log = logger("kvxfer.server")


class Forwarding(Protocol):
    """What goes to other nodes."""

    def forward(self, link: Link, message: m.Claim | m.Land | m.Mail | m.Echo) -> None: ...
    def settle(self, action: act.SettleElsewhere) -> None: ...
    def give_up(self, link: Link, request: int) -> bool: ...
    def forget(self, link: Link) -> None: ...
    def confirm(self, link: Link, message: m.Confirm) -> None: ...
    def on_confirm(self, link: Link, message: m.Confirm) -> None: ...


class Landings(Protocol):
    """What the dispatcher asks of the staging pool."""

    def land(self, link: Link, message: m.Land) -> None: ...
    def give_up(self, link: Link, request: int) -> None: ...
    def drain(self) -> None: ...
    def on_event(self, event: m.PostingEvent) -> None: ...


# -- what the workers of this node say of themselves ------------------------------------------------------------------
# A worker's counts grow with its life, so those of workers that have ended are kept, and sums never fall. Words come
# from workers: what does not look like one of ours, or would be one too many, is counted as "other".


KINDS_MAX = 64  # different (type, reason) that are told apart
_NAME = re.compile(r"([a-z_]{1,32}) ([a-z_]{1,32})")
OTHER = ("other", "other")


class Reports:
    """The last report of each linked worker."""

    def __init__(self) -> None:
        self._live: dict[Link, m.Report] = {}
        self._ended: Counter[tuple[str, str]] = Counter()

    def take(self, link: Link, report: m.Report) -> None:
        """In the place of the one before."""
        self._live[link] = report

    def forget(self, link: Link) -> None:
        """The worker of this connection has ended: its last report is kept in the sums."""
        report = self._live.pop(link, None)
        if report is not None:
            self._ended = self._sum([report])

    @property
    def unready(self) -> list[str]:
        """Which workers cannot work, and why."""
        return sorted(f"{link.name}: {report.unready}" for link, report in self._live.items() if report.unready)

    @property
    def ignoring_fingerprints(self) -> int:
        """Workers that move caches of different models."""
        return sum(report.ignore_fingerprint for report in self._live.values())

    def unexpected(self) -> Iterator[tuple[str, str, int]]:
        """(type, reason, how often) of notices that fitted nothing, of all workers that there ever were."""
        for (kind, reason), number in self._sum(list(self._live.values())).items():
            yield kind, reason, number

    def _sum(self, reports: list[m.Report]) -> Counter[tuple[str, str]]:
        total = Counter(self._ended)
        for report in reports:
            for name, number in report.unexpected.items():
                found = _NAME.fullmatch(name)
                key = (found[1], found[2]) if found else OTHER
                known = key in total or len(total) < KINDS_MAX
                if isinstance(number, int) and number > 0:
                    total[key if known else OTHER] += number
        return total


class Dispatcher:
    """Messages of all links of one daemon. ``own_addresses`` are those under which peers dial this very daemon."""

    def __init__(
        self,
        config: Config,
        registry: Registry,
        *,
        node_id: str,
        incarnation: str,
        clock: Callable[[], float],
        status: Callable[[], bytes],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._config = config
        self._node_id = node_id
        self._clock = clock
        self._status = status
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._idle: asyncio.Event | None = None
        self.registry = registry
        self.reports = Reports()
        self.queues = Queues(config.link_queues_bytes_max, config.link_queue_bytes_max, config.frame_control_bytes_max)
        self.forwarding: Forwarding
        self.landings: Landings
        self.own_addresses: frozenset[str] = frozenset()
        self.links: set[Link] = set()  # peers
        self.nodes = Nodes(config, node_id=node_id, incarnation=incarnation)
        self.draining = False
        self.backpressured = 0
        registry.add_worker(SELF, SELF)
        self.events = Events(self._send, queue_bytes_max=config.link_queue_bytes_max)
        registry.refuse_claims_on(self.events.slow)

    # -- links -----------------------------------------------------------------------------------------------

    def add(self, link: Link) -> None:
        """A link is ready: a worker's, or a peer's in either direction. Tools may look, and own nothing."""
        role = link.peer.role
        try:
            if role == "worker":
                self.registry.add_worker(link, link.name, link.peer.namespace)
            elif role == "peer":
                about = link.peer
                back = self.registry.add_peer(
                    self._clock(), link, about.node_id, about.incarnation, link.name, about.namespace, link.session
                )
                self.links.add(link)
                self.run(back)
                self._follow(link)
        except KvxferError as refused:
            log.warning("refused %s: %s", link.name, refused)
            self._send(link, error_reply(refused))
            link.start_close(refused.message)
            return
        if role != "worker":
            self.nodes.add(link)
        link.closed.add_done_callback(lambda _: self._remove(link))

    def _remove(self, link: Link) -> None:
        self.links.discard(link)
        if link.peer.role != "worker":
            self.nodes.remove(link)
        self.forwarding.forget(link)
        self.events.forget(link)
        self.reports.forget(link)
        self.run(self.registry.remove(self._clock(), link))

    # -- messages --------------------------------------------------------------------------------------------

    def on_message(self, link: Link, message: Message) -> None:
        """Handle whatever is no reply."""
        handler = _HANDLERS.get(type(message))
        rid = getattr(message, "rid", 0)
        try:
            if handler is None:
                raise UnknownMessage(f"a daemon does not take {type(message).__name__}")
            if link.peer.role == "tool" and not isinstance(message, m.Status | m.Echo | m.Goodbye):
                raise AccessDenied("a tool may only look")
            handler(self, link, message)
        except KvxferError as error:
            if rid:
                self.refuse(link, rid, error)

    def _on_post(self, link: Link, message: m.Post) -> None:
        if message.kind == "landing":
            raise AccessDenied("a landing is posted by its daemon; ask for one with Land")
        self.run(self.registry.post(self._clock(), link, message))

    def _on_renew(self, link: Link, message: m.Renew) -> None:
        self.run(self.registry.renew(self._clock(), link, message))

    def _on_withdraw(self, link: Link, message: m.Withdraw) -> None:
        self.run(self.registry.withdraw(self._clock(), link, message))

    def _on_claim(self, link: Link, message: m.Claim) -> None:
        if self.draining:
            raise PeerDraining("this node is shutting down")
        if self._is_elsewhere(link, message.node):
            self.forwarding.forward(link, message)
        else:
            self.run(self.registry.claim(self._clock(), link, message))

    def _on_give_up(self, link: Link, message: m.GiveUp) -> None:
        if not self.forwarding.give_up(link, message.request):
            self.run(self.registry.give_up(self._clock(), link, message))
            self.landings.give_up(link, message.request)

    def _on_settle(self, link: Link, message: m.Settle) -> None:
        if not self._is_elsewhere(link, message.node):
            message = replace(message, node=())
        self.run(self.registry.settle(self._clock(), link, message))

    def _on_confirm(self, link: Link, message: m.Confirm) -> None:
        self.forwarding.on_confirm(link, message)

    def _on_event(self, link: Link, message: m.PostingEvent) -> None:
        self.run(self.registry.event_from_peer(self._clock(), link, message))

    def _on_land(self, link: Link, message: m.Land) -> None:
        if self.draining:
            raise PeerDraining("this node is shutting down")
        if self._is_elsewhere(link, message.node):
            self.forwarding.forward(link, message)
        else:
            self.landings.land(link, message)

    def _on_mail(self, link: Link, message: m.Mail) -> None:
        if self._is_elsewhere(link, message.node):
            self.forwarding.forward(link, message)
            return
        actions = self.registry.mail(self._clock(), link, message, source=link.peer.node_id or self._node_id)
        if any(isinstance(action, act.Send) and self._is_slow(action) for action in actions):
            # Nothing was held for a listener, so leaving its delivery out undoes the mail: the sender may try again.
            self.run(
                action
                for action in actions
                if not (isinstance(action, act.Send) and isinstance(action.message, m.Delivery | m.Done))
            )
            raise PeerBackpressure("the listener does not keep up", channel=message.channel)
        self.run(actions)

    def _is_slow(self, action: act.Send) -> bool:
        """Half of the queue stays free for what must not be refused."""
        if not isinstance(action.link, Link) or not isinstance(action.message, m.Delivery):
            return False
        limit, size = self._config.link_queue_bytes_max // 2, len(action.message.data)
        return action.link.queued_bytes + size > limit or self.queues.full(size, share=0.5)

    def _on_listen(self, link: Link, message: m.Listen) -> None:
        self.run(self.registry.listen(self._clock(), link, message))

    def _on_unlisten(self, link: Link, message: m.Unlisten) -> None:
        self.run(self.registry.unlisten(self._clock(), link, message))

    def _on_status(self, link: Link, message: m.Status) -> None:
        self._send(link, m.StatusReply(rid=message.rid, body=self._status()))

    def _on_report(self, link: Link, message: m.Report) -> None:
        self.reports.take(link, message)

    def _on_echo(self, link: Link, message: m.Echo) -> None:
        if self._is_elsewhere(link, message.node):
            self.forwarding.forward(link, message)
        else:
            self._send(link, m.EchoReply(rid=message.rid, data=message.data))

    def _on_goodbye(self, link: Link, message: m.Goodbye) -> None:
        log.debug("%s says goodbye: %s", link.name, message.reason)

    def _on_error(self, link: Link, message: m.Error) -> None:
        log.debug("%s reports an error: %s %s", link.name, message.code, message.message)

    def _is_elsewhere(self, link: Link, node: tuple[str, ...]) -> bool:
        if not node or not self.own_addresses.isdisjoint(node):
            return False
        if link.peer.role != "worker":
            raise UsageError("only a worker's request is forwarded, and only once")
        if self.registry.namespace_of(link) != self._config.namespace:
            hint = "run a daemon of that namespace for it"
            raise NotAllowed("a worker of another namespace than its daemon's reaches this node only", hint=hint)
        return True

    # -- actions ---------------------------------------------------------------------------------------------

    def run(self, actions: Iterable[act.Action]) -> None:
        """Execute what the registry decided, then follow its next deadline."""
        touched: set[act.Link] = set()
        for action in actions:
            if isinstance(action, act.SettleElsewhere):
                self.forwarding.settle(action)
                continue
            touched.add(action.link)
            if isinstance(action, act.Refused):
                if isinstance(action.link, Link):
                    self.refuse(action.link, action.rid, action.error)
            elif isinstance(action.message, m.PostingEvent):
                self._tell(action, action.message)
            elif isinstance(action.link, Link):
                if isinstance(action.message, m.Confirm):
                    self.forwarding.confirm(action.link, action.message)
                else:
                    self._send(action.link, action.message)
        for link in touched:
            if isinstance(link, Link):
                self._follow(link)
        self._arm()
        if self._idle is not None and not self._live():
            self._idle.set()

    def _tell(self, action: act.Send, event: m.PostingEvent) -> None:
        """Tell the owner of a posting, or a claimant, what happened."""
        link = action.link
        if not isinstance(link, Link):
            self.landings.on_event(event)
        elif link.peer.role == "worker":
            self.events.tell(link, event, action.kind)
        else:
            self._send(link, event)

    def post_own(self, message: m.Post, *, namespace: str = "") -> tuple[m.Posted, list[act.Action]]:
        """Post something of the daemon's own; returns the answer and what else is to be done (`run` it afterwards)."""
        rest = self.registry.post(self._clock(), SELF, message, namespace=namespace)
        while True:
            first, *rest = rest
            if isinstance(first, act.Send) and isinstance(first.message, m.Posted):
                return first.message, rest
            if isinstance(first, act.Refused) and first.link == SELF:
                self.run(rest)
                raise first.error
            self.run([first])

    def withdraw_own(self, posting: str, reason: str) -> None:
        """End one of the daemon's own postings; harmless when it has ended."""
        self.run(self.registry.withdraw(self._clock(), SELF, m.Withdraw(posting=posting, reason=reason)))

    def refuse_waiting(self, *, kind: str, key: str, namespace: str, error: KvxferError) -> None:
        """Tell those who wait for something of the daemon's own that it will not be posted."""
        self.run(self.registry.refuse_waiting(self._clock(), kind=kind, key=key, namespace=namespace, error=error))

    def refuse(self, link: Link, rid: int, error: KvxferError) -> None:
        """Answer a request with an error."""
        self._send(link, error_reply(error, rid))

    def reply(self, link: Link, message: Message) -> None:
        """Send an answer that was made elsewhere."""
        self._send(link, message)

    def drain(self) -> asyncio.Event:
        """Take nothing new, withdraw what nobody claimed. The event is set when no claim is live any more."""
        self.draining = True
        self._idle = asyncio.Event()
        self.landings.drain()
        self.run(self.registry.drain(self._clock()))
        return self._idle

    def abort_claimed(self) -> None:
        """The time to drain is over."""
        self.run(self.registry.abort_claimed(self._clock()))

    def close(self) -> None:
        """Stop the clock."""
        self.nodes.close()
        self.events.close()
        if self._timer is not None:
            self._timer.cancel()

    def _live(self) -> bool:
        counts = self.registry.counts()
        return counts.claims + counts.routes > 0

    def _send(self, link: Link, message: Message) -> None:
        try:
            while not link.closed.done() and not self._sent(link, message):
                pass  # each time another link has been dropped
        except KvxferError as error:
            log.error("cannot send %s to %s: %s", type(message).__name__, link.name, error)
            link.abort("a message could not be sent")

    def _sent(self, link: Link, message: Message) -> bool:
        """False when there is no room. Dropping one message would leave the other side waiting for ever; losing a link
        tells it: this one, or when all together are too full, the one that reads least.
        """
        try:
            link.send(message)
        except PeerBackpressure as full:
            longest = self.queues.longest() if full.fields.get("all_links") else link
            slow = longest if isinstance(longest, Link) else link
            self.backpressured += 1
            log.warning("%s: %s", slow.name, full)
            slow.abort("it does not read what it is sent")
            return False
        return True

    def _follow(self, link: Link) -> None:
        """A peer that live claims depend on is watched closely."""
        if link.peer.role == "peer" and not link.closed.done():
            link.set_urgent(self.registry.live_claims(link) > 0)

    def link_from(self, node_id: str) -> Link | None:
        """A usable link to a node, whoever made it."""
        return next((link for link in self.links if link.peer.node_id == node_id and link.usable), None)

    def follow_node(self, node_id: str) -> None:
        """The same for every link to a node, after a claim there began or ended."""
        for link in self.links:
            if link.peer.node_id == node_id:
                self._follow(link)

    def _arm(self) -> None:
        due = self.registry.next_deadline()
        if due is None or (self._timer is not None and self._due <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = self._loop.call_later(max(0.0, due - self._clock()), self._expire)

    def _expire(self) -> None:
        self._timer = None
        self.run(self.registry.expire(self._clock()))


_HANDLERS: dict[type[Message], Callable[[Dispatcher, Link, Any], None]] = {
    m.Post: Dispatcher._on_post,
    m.Renew: Dispatcher._on_renew,
    m.Withdraw: Dispatcher._on_withdraw,
    m.Claim: Dispatcher._on_claim,
    m.GiveUp: Dispatcher._on_give_up,
    m.Settle: Dispatcher._on_settle,
    m.PostingEvent: Dispatcher._on_event,
    m.Confirm: Dispatcher._on_confirm,
    m.Land: Dispatcher._on_land,
    m.Mail: Dispatcher._on_mail,
    m.Listen: Dispatcher._on_listen,
    m.Unlisten: Dispatcher._on_unlisten,
    m.Status: Dispatcher._on_status,
    m.Echo: Dispatcher._on_echo,
    m.Report: Dispatcher._on_report,
    m.Goodbye: Dispatcher._on_goodbye,
    m.Error: Dispatcher._on_error,
}

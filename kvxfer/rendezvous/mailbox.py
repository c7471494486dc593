"""Small messages between workers: delivered to whoever listens on a channel, held for a while when nobody does.

The idea: a message that came too early is kept, within limits of count, bytes and time, so that sender and receiver
need not agree on who is first; a sender that meets a full mailbox is told at once and nothing is dropped silently.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvxfer.config import Config
from kvxfer.errors import BusyError, TooLarge, TooManyPending
from kvxfer.rendezvous.actions import Link, Send
from kvxfer.rendezvous.postings import Timeline
from kvxfer.rendezvous.shares import exceeds_fair_share
from kvxfer.wire.messages import Delivery

MESSAGE_OVERHEAD_BYTES = 64
Place = tuple[str, str]  # (namespace, channel)


@dataclass(frozen=True, slots=True)
class _Held:
    sender: Link
    data: bytes
    source: str
    size: int
    deadline: float


@dataclass(slots=True)
class _Channel:
    sender: Link | None = None  # who opened it by a message; None: who listens
    listener: Link | None = None
    held: deque[_Held] = field(default_factory=deque)
    size: int = 0


class MailboxStore:
    """All channels of one daemon. Methods raise `KvxferError` and then have changed nothing."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._channels: dict[Place, _Channel] = {}
        self._by_link: dict[Link, set[Place]] = {}
        self._sent_bytes: dict[Link, int] = {}  # held, by sender; senders that are gone too
        self._opened: dict[Link, int] = {}
        self._timeline: Timeline[Place] = Timeline()
        self.held_messages = 0
        self.held_bytes = 0
        self.expired_messages = 0

    def __len__(self) -> int:
        return len(self._channels)

    def mail(self, now: float, sender: Link, channel: str, data: bytes, source: str, namespace: str = "") -> list[Send]:
        """Deliver a message, or hold it for `mail_ttl_s`.

        Raises `TooLarge`, `BusyError` (this mailbox is full), `TooManyPending` (all are).
        """
        config = self._config
        if len(data) > config.mail_bytes_max:
            raise TooLarge("the message is too large", bytes=len(data), mail_bytes_max=config.mail_bytes_max)
        place = (namespace, channel)
        box = self._channels.get(place)
        if box is not None and box.listener is not None:
            return [Send(link=box.listener, message=Delivery(channel=channel, data=data, source=source))]
        size = len(data) + len(channel) + len(source) + MESSAGE_OVERHEAD_BYTES
        count, held = (len(box.held), box.size) if box else (0, 0)
        if count >= config.mailbox_messages_max or held + size > config.mailbox_bytes_max:
            raise BusyError("nobody listens on this channel and its mailbox is full", channel=channel, messages=count)
        limit = config.mailboxes_bytes_max
        greedy = exceeds_fair_share(self._sent_bytes.get(sender, 0), self.held_bytes, limit)
        if greedy or self.held_bytes + size > limit:
            raise TooManyPending("the mailboxes of this node are full", mailboxes_bytes_max=limit)
        if box is None:
            box = self._open(place, self._opened.get(sender, 0))
            box.sender = sender
            _count(self._opened, sender, 1)
        deadline = now + config.mail_ttl_s
        box.held.append(_Held(sender, data, source, size, deadline))
        box.size += size
        _count(self._sent_bytes, sender, size)
        self.held_messages += 1
        self.held_bytes += size
        if len(box.held) == 1:
            self._timeline.set(place, deadline)
        return []

    def listen(self, link: Link, channel: str, namespace: str = "") -> list[Send]:
        """Make `link` the listener and hand over what was held, oldest first. Listening twice changes nothing."""
        place = (namespace, channel)
        box = self._channels.get(place) or self._open(place, len(self._by_link.get(link, ())))
        if box.listener is not None and box.listener != link:
            raise BusyError("another worker listens on this channel", channel=channel)
        box.listener = link
        self._by_link.setdefault(link, set()).add(place)
        deliveries = [
            Send(link=link, message=Delivery(channel=channel, data=item.data, source=item.source)) for item in box.held
        ]
        self._timeline.drop(place)
        while box.held:
            self._forget_oldest(box)
        if box.sender is not None:
            _count(self._opened, box.sender, -1)
            box.sender = None
        return deliveries

    def unlisten(self, link: Link, channel: str, namespace: str = "") -> None:
        """Stop listening; harmless when `link` does not listen."""
        place = (namespace, channel)
        box = self._channels.get(place)
        if box is None or box.listener != link:
            return
        del self._channels[place]  # a channel with a listener holds nothing
        names = self._by_link[link]
        names.discard(place)
        if not names:
            del self._by_link[link]

    def forget(self, link: Link) -> None:
        """The worker is gone: nobody listens on its channels."""
        for namespace, channel in list(self._by_link.get(link, ())):
            self.unlisten(link, channel, namespace)

    def expire(self, now: float) -> None:
        """Drop the messages whose time is over."""
        for place in self._timeline.pop_due(now):
            box = self._channels[place]
            while box.held and box.held[0].deadline <= now:
                self._forget_oldest(box)
                self.expired_messages += 1
            if box.held:
                self._timeline.set(place, box.held[0].deadline)
            else:
                del self._channels[place]
                assert box.sender is not None
                _count(self._opened, box.sender, -1)

    def next_deadline(self) -> float | None:
        return self._timeline.next()

    def check(self) -> None:
        """Assert internal consistency."""
        boxes = self._channels.values()
        assert self.held_messages == sum(len(box.held) for box in boxes)
        assert self.held_bytes == sum(box.size for box in boxes) <= self._config.mailboxes_bytes_max
        assert len(self._channels) <= self._config.mailboxes_max
        listened = {(box.listener, name) for name, box in self._channels.items() if box.listener is not None}
        assert listened == {(link, name) for link, names in self._by_link.items() for name in names}
        for box in boxes:
            assert box.size == sum(item.size for item in box.held) <= self._config.mailbox_bytes_max
            assert len(box.held) <= self._config.mailbox_messages_max
            assert (box.listener is None) == bool(box.held), (
                "a channel has a listener or messages, never both or neither"
            )
        assert len(self._timeline) == sum(bool(box.held) for box in boxes)
        assert sum(self._sent_bytes.values()) == self.held_bytes
        assert sum(self._opened.values()) == sum(box.sender is not None for box in boxes)
        assert all((box.sender is None) == (box.listener is not None) for box in boxes)

    def _forget_oldest(self, box: _Channel) -> None:
        item = box.held.popleft()
        box.size -= item.size
        self.held_messages -= 1
        self.held_bytes -= item.size
        _count(self._sent_bytes, item.sender, -item.size)

    def _open(self, place: Place, own: int) -> _Channel:
        limit = self._config.mailboxes_max
        if len(self._channels) >= limit or exceeds_fair_share(own, len(self._channels), limit):
            raise TooManyPending("too many channels", mailboxes_max=self._config.mailboxes_max)
        return self._channels.setdefault(place, _Channel())


def _count(counts: dict[Link, int], key: Link, change: int) -> None:
    """Add to a counter; one that is zero is forgotten."""
    left = counts.get(key, 0) + change
    if left:
        counts[key] = left
    else:
        counts.pop(key, None)

"""Small messages between workers: delivered to whoever listens on a channel, held for a while when nobody does.

The idea: a message that came too early is kept, within limits of count, bytes and time, so that sender and receiver
need not agree on who is first; a sender that meets a full mailbox is told at once and nothing is dropped silently.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvxfer.actions import Deliver, Link
from kvxfer.config import CHANNEL_CHARS_MAX, Config
from kvxfer.errors import BusyError, TooLarge, TooManyPending, UsageError
from kvxfer.timeline import Timeline

MESSAGE_OVERHEAD_BYTES = 64


@dataclass(frozen=True, slots=True)
class _Held:
    data: bytes
    source: str
    size: int
    deadline: float


@dataclass(slots=True)
class _Channel:
    listener: Link | None = None
    held: deque[_Held] = field(default_factory=deque)
    size: int = 0


class Mailboxes:
    """All channels of one daemon. Methods raise `KvxferError` and then have changed nothing."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._channels: dict[str, _Channel] = {}
        self._by_link: dict[Link, set[str]] = {}
        self._timeline: Timeline[str] = Timeline()
        self.held_messages = 0
        self.held_bytes = 0
        self.expired_messages = 0

    def __len__(self) -> int:
        return len(self._channels)

    def mail(self, now: float, channel: str, data: bytes, source: str) -> list[Deliver]:
        """Deliver a message, or hold it for `mail_ttl_s`.

        Raises `TooLarge`, `BusyError` (this mailbox is full), `TooManyPending` (all are), `UsageError` (bad name).
        """
        config = self._config
        _check_name(channel)
        if len(data) > config.mail_bytes_max:
            raise TooLarge("the message is too large", bytes=len(data), mail_bytes_max=config.mail_bytes_max)
        box = self._channels.get(channel)
        if box is not None and box.listener is not None:
            return [Deliver(link=box.listener, channel=channel, data=data, source=source)]
        size = len(data) + len(channel) + len(source) + MESSAGE_OVERHEAD_BYTES
        count, held = (len(box.held), box.size) if box else (0, 0)
        if count >= config.mailbox_messages_max or held + size > config.mailbox_bytes_max:
            raise BusyError("nobody listens on this channel and its mailbox is full", channel=channel, messages=count)
        if self.held_bytes + size > config.mailboxes_bytes_max:
            raise TooManyPending("the mailboxes of this node are full", mailboxes_bytes_max=config.mailboxes_bytes_max)
        if box is None:
            box = self._open(channel)
        deadline = now + config.mail_ttl_s
        box.held.append(_Held(data, source, size, deadline))
        box.size += size
        self.held_messages += 1
        self.held_bytes += size
        if len(box.held) == 1:
            self._timeline.set(channel, deadline)
        return []

    def listen(self, link: Link, channel: str) -> list[Deliver]:
        """Make `link` the listener and hand over what was held, oldest first. Listening twice changes nothing."""
        _check_name(channel)
        box = self._channels.get(channel) or self._open(channel)
        if box.listener is not None and box.listener != link:
            raise BusyError("another worker listens on this channel", channel=channel)
        box.listener = link
        self._by_link.setdefault(link, set()).add(channel)
        deliveries = [Deliver(link=link, channel=channel, data=item.data, source=item.source) for item in box.held]
        self._timeline.drop(channel)
        self.held_messages -= len(box.held)
        self.held_bytes -= box.size
        box.held.clear()
        box.size = 0
        return deliveries

    def unlisten(self, link: Link, channel: str) -> None:
        """Stop listening; harmless when `link` does not listen."""
        box = self._channels.get(channel)
        if box is None or box.listener != link:
            return
        del self._channels[channel]  # a channel with a listener holds nothing
        names = self._by_link[link]
        names.discard(channel)
        if not names:
            del self._by_link[link]

    def forget(self, link: Link) -> None:
        """The worker is gone: nobody listens on its channels."""
        for channel in list(self._by_link.get(link, ())):
            self.unlisten(link, channel)

    def expire(self, now: float) -> None:
        """Drop the messages whose time is over."""
        for channel in self._timeline.pop_due(now):
            box = self._channels[channel]
            while box.held and box.held[0].deadline <= now:
                item = box.held.popleft()
                box.size -= item.size
                self.held_messages -= 1
                self.held_bytes -= item.size
                self.expired_messages += 1
            if box.held:
                self._timeline.set(channel, box.held[0].deadline)
            else:
                del self._channels[channel]

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

    def _open(self, channel: str) -> _Channel:
        if len(self._channels) >= self._config.mailboxes_max:
            raise TooManyPending("too many channels", mailboxes_max=self._config.mailboxes_max)
        return self._channels.setdefault(channel, _Channel())


def _check_name(channel: str) -> None:
    if not 1 <= len(channel) <= CHANNEL_CHARS_MAX:
        raise UsageError(f"a channel's name has 1 to {CHANNEL_CHARS_MAX} characters", chars=len(channel))

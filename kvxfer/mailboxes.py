"""Small messages between nodes: `send` puts bytes into a channel of a node, `recv` takes the next one out.

The daemon keeps undelivered mail (bounded, with a time-to-live); here is the part of a worker that listens to channels.
"""

from __future__ import annotations

import asyncio
from collections import deque

from kvxfer.config import Config
from kvxfer.control import Control
from kvxfer.deadline import Deadline
from kvxfer.errors import TransferTimeout, UsageError
from kvxfer.wire import messages as m

CHANNEL_CHARS_MAX = 128


class Mailboxes:
    """The channels that one worker listens to."""

    def __init__(self, control: Control, config: Config) -> None:
        self._control = control
        self._config = config
        self._mail: dict[str, deque[bytes]] = {}
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self.dropped = 0

    async def send(self, node: tuple[str, ...], channel: str, data: bytes, deadline: Deadline) -> None:
        """Deliver to a node's channel; `BusyError` when its mailbox is full."""
        _check_channel(channel)
        if not isinstance(data, bytes | bytearray | memoryview):
            raise UsageError("data must be bytes", field="data", got=type(data).__name__)
        payload = bytes(data)
        if len(payload) > self._config.mail_bytes_max:
            raise UsageError(
                "the message is too long", field="data", length=len(payload), limit=self._config.mail_bytes_max
            )
        await self._control.request(m.Mail(node=node, channel=channel, data=payload), deadline)

    async def recv(self, channel: str, deadline: Deadline) -> bytes:
        """The next message; messages go to waiting receivers in the order in which they asked."""
        _check_channel(channel)
        if channel not in self._mail:
            self._mail[channel] = deque()
            try:
                await self._control.listen(channel, self._on_delivery, deadline)
            except BaseException:
                del self._mail[channel]
                raise
        mail = self._mail[channel]
        while not mail:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(channel, deque()).append(turn)
            try:
                await asyncio.wait_for(turn, deadline.remaining())
            except TimeoutError as late:
                raise TransferTimeout(f"no message in channel {channel!r}") from late
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._wake(channel)  # our turn goes to the next
                raise
        return mail.popleft()

    def _on_delivery(self, message: m.Delivery) -> None:
        mail = self._mail.get(message.channel)
        if mail is None or len(mail) >= self._config.mailbox_messages_max:
            self.dropped += 1
            return
        mail.append(message.data)
        self._wake(message.channel)

    def _wake(self, channel: str) -> None:
        waiting = self._waiting.get(channel)
        while waiting:
            turn = waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return


def _check_channel(channel: object) -> None:
    if not isinstance(channel, str) or not 0 < len(channel) <= CHANNEL_CHARS_MAX:
        raise UsageError(
            f"channel must be 1 to {CHANNEL_CHARS_MAX} characters", field="channel", value=repr(channel)[:40]
        )

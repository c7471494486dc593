"""What tests of links and daemons share: daemons on loopback, bare links as workers, waiting with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvxfer.config import Config
from kvxfer.net.link import Link, LocalIdentity
from kvxfer.server import Server, embedded_config
from kvxfer.wire.codec import Message
from tests.conftest import slack

SECRET = "correct horse battery staple"
M = TypeVar("M", bound=Message)


def fast(**changes: Any) -> dict[str, Any]:
    """Options with short times, for tests that wait for one of them."""
    return {"handshake_s": 0.5, "connect_s": 0.5, "keepalive_s": 0.2, "keepalive_live_s": 0.1, "dead_s": 0.2} | changes


def small(**changes: Any) -> Config:
    """The configuration of a daemon in a test: the lightest transport, few threads."""
    light = {"transports": ("loop",), "tcp_threads": 1, "tcp_streams": 1, "copy_threads": 1}
    return embedded_config(**(light | changes))


async def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    """Wait until something holds that nobody announces."""
    async with asyncio.timeout(within_s * slack()):
        while not condition():
            await asyncio.sleep(0.005)


@dataclass(slots=True)
class Inbox:
    """What a link delivered, in order; `take` waits for the first message of a kind that fits."""

    messages: list[Message] = field(default_factory=list)
    late: list[Message] = field(default_factory=list)

    def on_message(self, _: Link, message: Message) -> None:
        self.messages.append(message)

    def on_late(self, _: Link, message: Message) -> None:
        self.late.append(message)

    async def take(self, kind: type[M], within_s: float = 5.0, **wanted: object) -> M:
        def found() -> M | None:
            for message in self.messages:
                fits = isinstance(message, kind) and all(getattr(message, name) == wanted[name] for name in wanted)
                if fits:
                    return message  # type: ignore[return-value]
            return None

        await until(found, within_s)
        message = found()
        assert message is not None
        self.messages.remove(message)
        return message


@dataclass(slots=True)
class Worker:
    """A worker without an engine: a link to its daemon, and what came over it."""

    link: Link
    inbox: Inbox

    async def ask(self, message: Message, timeout: float = 5.0) -> Any:
        return await self.link.request(message, timeout=timeout * slack())


@asynccontextmanager
async def node(**changes: Any) -> AsyncIterator[Server]:
    """A daemon of its own."""
    async with Server(small(**changes), embedded=True) as server:
        yield server


@asynccontextmanager
async def worker(
    server: Server, name: str = "worker", role: str = "worker", config: Config | None = None, **facts: str
) -> AsyncIterator[Worker]:
    """A worker of a daemon."""
    inbox = Inbox()
    link = await Link.dial_unix(
        str(server.socket_path),
        LocalIdentity(role=role, name=name, **facts),
        config or server.config,
        on_message=inbox.on_message,
        on_late=inbox.on_late,
    )
    try:
        yield Worker(link, inbox)
    finally:
        await link.aclose("test over")

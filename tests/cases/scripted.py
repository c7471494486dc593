"""A peer daemon that follows a script: real sockets, bytes made by hand, a version of its own, and a memory.

It knows what the script says and the secret of the user, nothing else. Messages are (number, fields) as msgpack has
them, so it can say what no version of kvxfer would say, and sees what was really sent.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgpack

from kvxfer.config import Config
from kvxfer.net.credentials import Credentials
from kvxfer.wire import messages as m
from kvxfer.wire.auth import prove, transcript
from kvxfer.wire.codec import LENGTH_BYTES, MESSAGES, Message
from kvxfer.wire.framing import PREAMBLE
from tests.nodes import until

Fields = dict[str, Any]
Answer = Callable[[Fields], Iterable[tuple[int, Fields]]]
NAMES = {number: kind.__name__ for number, kind in MESSAGES.items()}


def frame(number: int, fields: Fields) -> bytes:
    payload: bytes = msgpack.packb((number, fields))
    return len(payload).to_bytes(LENGTH_BYTES, "big") + payload


def said(message: Message) -> tuple[int, Fields]:
    """A message as this peer says it: with every field."""
    fields = {name: getattr(message, name) for name, _ in message.kinds}
    return message.number, fields | {name: packed(fields[name]) for name, packed in message.packed.items()}


class Scripted:
    """Accepts connections. ``answers``: by the name of a message; what is not there it does not know."""

    def __init__(self, answers: dict[str, Answer], version: int, before_welcome: bytes = b"", **welcome: Any) -> None:
        self.node_id, self.incarnation = os.urandom(16).hex(), os.urandom(16).hex()
        self.answers = answers
        self.heard: list[tuple[str, Fields]] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.ended = 0
        self.address = ""
        self._version = version
        self._before_welcome = before_welcome
        self._welcome = welcome

    def names(self) -> list[str]:
        return [name for name, _ in self.heard]

    async def hears(self, name: str) -> Fields:
        """The fields of the first such message, which may still come."""
        await until(lambda: name in self.names())
        return next(fields for found, fields in self.heard if found == name)

    def say(self, number: int, fields: Fields) -> None:
        """On the latest connection."""
        self.writers[-1].write(frame(number, fields))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        try:
            assert await reader.readexactly(len(PREAMBLE)) == PREAMBLE
            while True:
                length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
                number, fields = msgpack.unpackb(await reader.readexactly(length))
                for answer in self._take(NAMES.get(number, str(number)), number, fields):
                    writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ended += 1
        finally:
            writer.close()

    def _take(self, name: str, number: int, fields: Fields) -> list[bytes]:
        self.heard.append((name, fields))
        if name == "Hello":
            welcome = m.Welcome(
                version=self._version,
                node_id=self.node_id,
                incarnation=self.incarnation,
                nonce=os.urandom(32),
                auth="hmac",
            )
            own = {name: self._welcome[name] for name, _ in welcome.kinds if name in self._welcome}
            welcome = replace(welcome, **own)
            hello = m.Hello(**{item: fields[item] for item, _ in m.Hello.kinds if item in fields})
            secret = Credentials(Config(), unconfigured="look").secret
            number, known = said(replace(welcome, proof=prove(secret, "acceptor", transcript(hello, welcome))))
            return [self._before_welcome, frame(number, known | self._welcome)]
        if name == "Proof":
            return [frame(*said(m.Ready(session=os.urandom(16).hex(), keepalive_s=60.0)))]
        if name == "Ping":
            return [frame(*said(m.Pong(rid=fields["rid"])))]
        if name in self.answers:
            return [frame(*answer) for answer in self.answers[name](fields)]
        if fields.get("rid"):
            error = m.Error(rid=fields["rid"], code="unknown_message", message="what is that?")
            return [frame(*said(error))]
        return []

    def grants(self, fields: Fields, **changes: Any) -> list[tuple[int, Fields]]:
        """The answer to a claim."""
        number, granted = said(
            m.Claimed(
                rid=fields["rid"],
                posting="ab" * 16,
                claim=1,
                body=b"body",
                expires_in_s=30.0,
                node_id=self.node_id,
                incarnation=self.incarnation,
            )
        )
        return [(number, granted | changes)]


@asynccontextmanager
async def scripted(
    answers: dict[str, Answer] | None = None, *, version: int, before_welcome: bytes = b"", **welcome: Any
) -> AsyncIterator[Scripted]:
    peer = Scripted(answers if answers is not None else {}, version, before_welcome, **welcome)
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    peer.address = f"{host}:{port}"
    try:
        yield peer
    finally:
        server.close()
        for writer in peer.writers:
            writer.transport.abort()
        await server.wait_closed()

"""A TCP proxy that knows frames: between two nodes it delays, swallows, cuts, resets, half-closes or goes silent.

The idea: each connection has two directions ("up" from the dialler, "down" back to it), each cut into frames
(`frames.py`) and passed on whole, so that a fault hits exactly the frame that a test names, at the first byte, in the
middle or instead of it. Stand it on another loopback address with the same port and have the node advertise that
address: nothing else has to know of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvxfer.errors import ProtocolError
from kvxfer.tasks import TaskOwner
from tests.support.frames import Frame, Protocol, Splitter

READ_BYTES = 256 << 10
DELAYED_BYTES_MAX = 64 << 20  # on their way in one direction of a connection
UP, DOWN = "up", "down"
SWALLOW, CUT, RESET, HALF_CLOSE, SILENCE = "swallow", "cut", "reset", "half_close", "silence"
ACTIONS = (SWALLOW, CUT, RESET, HALF_CLOSE, SILENCE)


@dataclass(slots=True, eq=False)
class Rule:
    """``action`` happens at the ``nth`` frame called ``name`` (``"*"``: any) in a direction, ``times`` times.

    swallow: the frame is lost; cut: half of it passes, then both sides are reset; reset: both sides are reset before
    it; half_close: this direction ends before it; silence: from it on nothing passes on this connection, both ways.
    """

    direction: str
    name: str
    action: str
    nth: int = 1
    times: int = 1
    seen: int = 0
    fired: asyncio.Event = field(default_factory=asyncio.Event)

    def hits(self, direction: str, frame: Frame) -> bool:
        """Whether it happens at this frame."""
        if direction != self.direction or self.name not in ("*", frame.name):
            return False
        self.seen += 1
        if not self.nth <= self.seen < self.nth + self.times:
            return False
        self.fired.set()
        return True


@dataclass(slots=True, eq=False)
class _Connection:
    dialler: asyncio.StreamWriter
    target: asyncio.StreamWriter
    silent: bool = False

    def reset(self) -> None:
        for writer in (self.dialler, self.target):
            _reset(writer)


class Proxy:
    """Passes connections on to ``target`` and misbehaves on request. ``delay_s`` holds back each direction so long."""

    def __init__(self, target: tuple[str, int], protocol: Protocol) -> None:
        self.target = target
        self.protocol = protocol
        self.address = ("", 0)
        self.delay_s = {UP: 0.0, DOWN: 0.0}
        self.frames: Counter[tuple[str, str]] = Counter()  # passed on or not, by direction and name
        self.passed_bytes = 0
        self.accepted = 0
        self.refusing = False
        self._rules: list[Rule] = []
        self._open = asyncio.Event()
        self._open.set()
        self._silent = False
        self._connections: set[_Connection] = set()
        self._tasks = TaskOwner("proxy")

    @property
    def endpoint(self) -> str:
        """``host:port`` where it listens."""
        return f"{self.address[0]}:{self.address[1]}"

    @property
    def live(self) -> int:
        """Connections that it passes on now."""
        return len(self._connections)

    # -- faults -------------------------------------------------------------------------------------

    def rule(self, direction: str, name: str, action: str, *, nth: int = 1, times: int = 1) -> Rule:
        """From now on: see `Rule`."""
        if direction not in (UP, DOWN) or action not in ACTIONS:
            raise ValueError(f"no such rule: {direction} {action}")
        made = Rule(direction, name, action, nth, times)
        self._rules.append(made)
        return made

    def clear(self) -> None:
        """Forget all rules."""
        self._rules.clear()

    def black_hole(self) -> None:
        """Every byte is lost from now on, on old connections and on new ones, which are still accepted."""
        self._silent = True

    def heal(self) -> None:
        """New connections work again; the old ones, which have lost bytes, are reset."""
        self._silent = False
        self.reset_all()

    def pause(self) -> None:
        """Nothing passes, nothing is lost, until `resume`."""
        self._open.clear()

    def resume(self) -> None:
        """The end of a pause."""
        self._open.set()

    def reset_all(self) -> int:
        """RST to both ends of every connection; how many there were."""
        found = tuple(self._connections)
        for connection in found:
            connection.reset()
        return len(found)

    def half_close_all(self, direction: str) -> None:
        """End one direction of every connection."""
        for connection in self._connections:
            _end(connection.target if direction == UP else connection.dialler)

    # -- passing on ---------------------------------------------------------------------------------

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A new connection of a dialler."""
        self._tasks.spawn(self._accept(reader, writer), "connection")

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self.refusing:
            _reset(writer)
            return
        try:
            target_reader, target_writer = await asyncio.open_connection(*self.target)
        except OSError:
            _reset(writer)
            return
        connection = _Connection(writer, target_writer)
        self._connections.add(connection)
        try:
            up = self._tasks.run(self._pass(connection, UP, reader, target_writer), "up")
            down = self._tasks.run(self._pass(connection, DOWN, target_reader, writer), "down")
            await asyncio.wait([up, down])
        finally:
            self._connections.discard(connection)
            for one in (writer, target_writer):
                one.close()
                with contextlib.suppress(OSError, asyncio.CancelledError):
                    await one.wait_closed()

    async def _pass(
        self, connection: _Connection, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        queue: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue()
        room = asyncio.Semaphore(max(1, DELAYED_BYTES_MAX // READ_BYTES))
        sender = self._tasks.run(self._send(connection, direction, queue, room, writer), f"send {direction}")
        splitter = Splitter(self.protocol, dialler=direction == UP)
        loop = asyncio.get_running_loop()
        try:
            while data := await reader.read(READ_BYTES):
                await room.acquire()
                kept = self._judged(connection, direction, splitter, data)
                queue.put_nowait((loop.time() + self.delay_s[direction], kept))
        except (OSError, ProtocolError, asyncio.IncompleteReadError):
            connection.reset()
        finally:
            queue.put_nowait(None)
            await asyncio.wait([sender])

    def _judged(self, connection: _Connection, direction: str, splitter: Splitter, data: bytes) -> bytes:
        """The frames that pass, of those that ``data`` completes."""
        kept = []
        for frame in splitter.feed(data):
            self.frames[direction, frame.name] += 1
            action = next((rule.action for rule in tuple(self._rules) if rule.hits(direction, frame)), None)
            if self._silent or connection.silent or action == SWALLOW:
                continue
            if action == SILENCE:
                connection.silent = True
            elif action == HALF_CLOSE:
                kept.append(b"")
                self._tasks.run(self._later_end(connection, direction), "half close")
            elif action == RESET:
                connection.reset()
            elif action == CUT:
                kept.append(frame.raw[: len(frame.raw) // 2])
                self._tasks.run(self._later_reset(connection), "cut")
                connection.silent = True
            else:
                kept.append(frame.raw)
        return b"".join(kept)

    async def _later_reset(self, connection: _Connection) -> None:
        await asyncio.sleep(0.01)  # the half that was to pass has passed
        connection.reset()

    async def _later_end(self, connection: _Connection, direction: str) -> None:
        await asyncio.sleep(0.01)
        _end(connection.target if direction == UP else connection.dialler)

    async def _send(
        self,
        connection: _Connection,
        direction: str,
        queue: asyncio.Queue[tuple[float, bytes] | None],
        room: asyncio.Semaphore,
        writer: asyncio.StreamWriter,
    ) -> None:
        loop = asyncio.get_running_loop()
        while (item := await queue.get()) is not None:
            due, data = item
            if due > loop.time():
                await asyncio.sleep(due - loop.time())
            await self._open.wait()
            if data and not self._silent:
                self.passed_bytes += len(data)
                with contextlib.suppress(OSError, RuntimeError):
                    writer.write(data)
                    await writer.drain()
            room.release()
        if not (self._silent or connection.silent):
            _end(writer)

    async def aclose(self) -> None:
        """End every connection."""
        self.resume()
        self.reset_all()
        await self._tasks.aclose()


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:  # uvloop keeps the object of a socket that it has closed
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _end(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, RuntimeError):
        if writer.can_write_eof():
            writer.write_eof()


@asynccontextmanager
async def proxy(
    target: tuple[str, int], protocol: Protocol, *, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[Proxy]:
    """A proxy on ``host`` in front of ``target``; port 0: any."""
    found = Proxy(target, protocol)
    server = await asyncio.start_server(found.accept, host, port)
    found.address = server.sockets[0].getsockname()[:2]
    try:
        yield found
    finally:
        server.close()
        await found.aclose()
        await server.wait_closed()

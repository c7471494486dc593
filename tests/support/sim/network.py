"""The network between simulated hosts: connections that behave as TCP and Unix sockets do, and nothing else.

The idea: a stream never loses, repeats or reorders a byte; what networks do to it is delay (a lost segment is a
retransmission that everything behind it waits for), pieces of any size, silence (a partition, a dead host) and an end:
in order (FIN), or at once and with loss of what was not read (RST). A connection is two pipes, each of them a queue
with arrival times that never go backwards. Unix sockets are the same without the network's troubles.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextvars import Context
from random import Random
from typing import Any

from tests.support.sim.loop import Process, SimLoop, current

WINDOW_BYTES = 64 << 10  # what the kernels of both sides take before a writer's own buffer fills
SYN_RETRY_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
EPHEMERAL = 40000
PORT = 17800
TICK_S = 1e-9  # timers of the same moment have no order, bytes have
EOF, RST = b"\0eof", b"\0rst"  # compared by identity
_credentials = struct.Struct("3i")

Place = tuple[str, int] | str  # where something listens: (address, port), or a path


class Host:
    """One machine. ``up`` False: it answers nothing, not even that it is gone. ``clock_s``: its clock's advance."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.up = True
        self.clock_s = 0.0
        self.port = PORT  # where its daemon listens
        self.retired = False  # it never comes back

    @property
    def place(self) -> str:
        """Where others find its daemon now."""
        return f"{self.address}:{self.port}"

    def __repr__(self) -> str:
        return f"<{self.name} {self.address}>"


class Weather:
    """How bad the network is: probabilities per message, times in seconds. The default is a good day."""

    def __init__(self) -> None:
        self.latency_s = (0.00005, 0.0003)
        self.loss = 0.0
        self.retransmit_s = (0.2, 0.9)
        self.split = 0.0


class Listener:
    """A bound socket; `serve` begins to accept for the process that calls it. It is its own asyncio server."""

    def __init__(self, network: Network, place: Place, owner: Process) -> None:
        self.network = network
        self.place = place
        self.owner = owner
        self.family = socket.AF_UNIX if isinstance(place, str) else socket.AF_INET
        self.factory: Callable[[], Any] | None = None
        self.context: Context = owner.context
        self.open = True
        owner.ends[self] = lambda _: self.close()

    def getsockname(self) -> Any:
        return self.place

    def serve(self, factory: Callable[[], Any]) -> None:
        """Accept from now on."""
        self.factory = factory
        self.context = current().context.copy()

    def close(self) -> None:
        """Refuse from now on."""
        self.open = False
        self.owner.ends.pop(self, None)
        if self.network.listeners.get(self.place) is self:
            del self.network.listeners[self.place]


class _Socket:
    """What a transport tells about its socket."""

    def __init__(self, family: int, pid: int) -> None:
        self.family = family
        self._pid = pid

    def fileno(self) -> int:
        return -1  # as of a socket that is closed: there is no descriptor

    def getsockopt(self, *_: Any) -> bytes:
        return _credentials.pack(self._pid, os.getuid(), os.getgid())


class SimTransport(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, network: Network, process: Process, context: Context, name: Any, family: int) -> None:
        super().__init__()
        self.network = network
        self.process = process
        self.context = context
        self.name = name
        self.family = family
        self.other: SimTransport
        self.protocol: Any = None
        self.inbox: deque[bytes] = deque()
        self.paused = False
        self.closing = False  # close() was called, or the other side has ended
        self.gone = False  # connection_lost was, or will be, called
        self.unread = 0  # bytes that were written and not yet handed to the other side
        self.last_arrival = 0.0
        self.stalled: list[bytes] = []  # sent into a partition
        self.tail: bytearray | None = None  # the newest piece, while more may be added to it
        self.tail_at = -1.0
        self.fin_sent = False
        self.silent = False  # what it sends disappears
        process.ends[self] = self._killed

    # -- for protocols -----------------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        if self.closing or self.gone or not data:
            return
        self.unread += len(data)
        now = self.network.loop.now
        if self.tail is not None and self.tail_at == now:
            self.tail += data
            return
        self.tail, self.tail_at = bytearray(data), now
        self.network.send(self, self.tail)  # type: ignore[arg-type]

    def get_write_buffer_size(self) -> int:
        return max(0, self.unread - WINDOW_BYTES)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "socket":
            return _Socket(self.family, self.other.process.pid)
        return self.other.name if name == "peername" else default

    def is_closing(self) -> bool:
        return self.closing

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        if self.paused:
            self.paused = False
            self.network.loop.call_soon(self._pump, context=self.context)

    def close(self) -> None:
        """In order: what was written is sent, then the end."""
        if self.closing or self.gone:
            return
        self.closing = True
        self._send_end(EOF)
        self._finish_when_flushed()

    def abort(self) -> None:
        """At once: the other side may lose what it has not read."""
        if self.gone:
            return
        self.closing = True
        self._send_end(RST if self.network.rng.random() < 0.5 else EOF)
        self._lose(None)

    # -- from the network ----------------------------------------------------------------------------------------

    def arrived(self, data: bytes) -> None:
        """Runs as the process that owns this end."""
        if data is RST:
            self.inbox.clear()
            self._lose(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))
            return
        if self.gone:
            if data is not EOF and not self.other.gone:
                self._send_end(RST, again=True)  # the answer of a kernel without this connection
            return
        self.inbox.append(data)
        if not self.paused and self.protocol is not None:
            self._pump()

    def accept(self, factory: Callable[[], Any]) -> None:
        """The listener's side begins."""
        self.protocol = factory()
        self.protocol.connection_made(self)
        self._pump()

    def _pump(self) -> None:
        while self.inbox and not self.paused and not self.gone:
            data = self.inbox.popleft()
            if data is EOF:
                self.closing = True
                self._send_end(EOF)
                self._lose(None)
                return
            self.other.unread -= len(data)
            if not self.closing:
                self.protocol.data_received(bytes(data))

    def _finish_when_flushed(self) -> None:
        if self.gone:
            return
        if self.get_write_buffer_size() == 0:
            self._lose(None)
        else:
            self.network.loop.call_later(0.01, self._finish_when_flushed)

    def _lose(self, error: Exception | None) -> None:
        if self.gone:
            return
        self.gone = self.closing = True
        self.process.ends.pop(self, None)
        self.network.forget(self)
        if self.protocol is not None:
            self.network.loop.call_soon(self.protocol.connection_lost, error, context=self.context)

    def _send_end(self, how: bytes, *, again: bool = False) -> None:
        if not self.fin_sent or again:
            self.fin_sent = True
            self.tail = None
            self.network.send(self, how)

    def _killed(self, silent: bool) -> None:
        self.gone = self.closing = True
        self.network.forget(self)
        if not silent:
            self._send_end(RST if self.inbox or self.network.rng.random() < 0.3 else EOF)


class Network:
    """All hosts, listeners and connections. ``partitions`` holds (from, to) pairs of host names that hear nothing."""

    def __init__(self, loop: SimLoop, rng: Random) -> None:
        self.loop = loop
        self.rng = rng
        self.weather = Weather()
        self.hosts: dict[str, Host] = {}
        self.listeners: dict[Place, Listener] = {}
        self.partitions: set[tuple[str, str]] = set()
        self.connections: dict[SimTransport, None] = {}
        self.stalled: dict[SimTransport, None] = {}
        self.silent: dict[SimTransport, None] = {}  # ends that still believe in a connection that carries nothing
        self.healed: dict[object, Callable[[], None]] = {}  # data connections that wait for the end of partitions
        self.messages = 0
        self._ports = itertools.count(EPHEMERAL)
        self._context = Context()

    def host(self, name: str, address: str) -> Host:
        """A new machine."""
        found = self.hosts[address] = Host(name, address)
        return found

    def listen(self, place: Place) -> Listener:
        """Bind, as the current process. Raises OSError as the system would."""
        if place in self.listeners:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        found = self.listeners[place] = Listener(self, place, current())
        return found

    # -- what the network does ------------------------------------------------------------------------------------

    def latency(self) -> float:
        low, high = self.weather.latency_s
        return low + (high - low) * self.rng.random()

    def delay(self, source: Host, target: Host) -> float:
        """Of one message; with its retransmissions."""
        if source is target:
            return self.latency() / 4
        delay_s = self.latency()
        weather = self.weather
        if weather.loss:
            wait = 1.0
            while self.rng.random() < weather.loss and wait < 16:
                delay_s += wait * self.rng.uniform(*weather.retransmit_s)
                wait *= 2
        return delay_s

    def cut(self, source: Host, target: Host) -> bool:
        """Nothing comes through from ``source`` to ``target`` at present."""
        return bool(self.partitions) and (source.name, target.name) in self.partitions

    def send(self, sender: SimTransport, data: bytes) -> None:
        """Put bytes (or an end) into the pipe to the other side."""
        receiver = sender.other
        source, target = sender.process.host, receiver.process.host
        self.messages += 1
        if sender.silent:
            return
        if self.cut(source, target) or sender.stalled:
            sender.stalled.append(data)
            sender.tail = None
            self.stalled[sender] = None
            return
        if not target.up:
            return
        if not receiver.process.alive:
            if data is not RST and not sender.gone:
                self.loop.call_later(self.delay(target, source), sender.arrived, RST, context=sender.context)
            return
        self._schedule(sender, receiver, data, self.delay(source, target))

    def _schedule(self, sender: SimTransport, receiver: SimTransport, data: bytes, delay_s: float) -> None:
        at = sender.last_arrival = max(sender.last_arrival + TICK_S, self.loop.now + delay_s)
        whole = not self.weather.split or len(data) < 2 or data is EOF or data is RST
        if not whole and self.rng.random() < self.weather.split:
            cut = self.rng.randrange(1, len(data))
            sender.tail = None
            self.loop.at(at, receiver.arrived, bytes(data[:cut]), context=receiver.context)
            at = sender.last_arrival = at + self.latency()
            self.loop.at(at, receiver.arrived, bytes(data[cut:]), context=receiver.context)
            return
        self.loop.at(at, self._take, sender, receiver, data, context=receiver.context)

    @staticmethod
    def _take(sender: SimTransport, receiver: SimTransport, data: Any) -> None:
        if sender.tail is data:
            sender.tail = None
        receiver.arrived(data)

    def heal(self) -> None:
        """Partitions may have ended: what was sent into them is retransmitted, after a while."""
        for sender in tuple(self.stalled):
            if self.cut(sender.process.host, sender.other.process.host):
                continue
            del self.stalled[sender]
            waiting, sender.stalled = sender.stalled, []
            sender.last_arrival = max(sender.last_arrival, self.loop.now + self.rng.uniform(0.0, 0.5))
            for data in waiting:
                self.send(sender, data)
        for again in tuple(self.healed.values()):
            again()

    def silence(self, end: SimTransport) -> None:
        """A middlebox drops what the connection carries from now on, and says so to nobody."""
        end.silent = end.other.silent = True
        self.silent.update({end: None, end.other: None})

    def forget(self, end: SimTransport) -> None:
        """One end is gone."""
        self.connections.pop(end, None)
        self.silent.pop(end, None)

    def reset(self, end: SimTransport) -> None:
        """A middlebox forgets the connection: both sides find it reset."""
        for side in (end, end.other):
            if not side.gone:
                self.loop.call_later(self.latency(), side.arrived, RST, context=side.context)

    # -- connecting ---------------------------------------------------------------------------------------------------

    async def connect(self, factory: Callable[[], Any], place: Place) -> tuple[SimTransport, Any]:
        """A connection of the current process, as `create_connection` gives one."""
        process = current()
        source = process.host
        target = source if isinstance(place, str) else self.hosts.get(place[0])
        if target is None:
            raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))
        for wait_s in SYN_RETRY_S:
            if target.up and not self.cut(source, target) and not self.cut(target, source):
                break
            await asyncio.sleep(wait_s)
        await asyncio.sleep(self.delay(source, target) + self.delay(target, source))
        listener = self.listeners.get(place)
        if listener is None or not listener.open or listener.factory is None:
            if isinstance(place, str) and listener is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        near_name = "" if isinstance(place, str) else (source.address, next(self._ports))
        family = listener.family
        near = SimTransport(self, process, current().context.copy(), near_name, family)
        far = SimTransport(self, listener.owner, listener.context, place, family)
        near.other, far.other = far, near
        self.connections[near] = None
        self.loop.call_soon(self._accept, listener, far, context=far.context)
        protocol = near.protocol = factory()
        protocol.connection_made(near)
        return near, protocol

    @staticmethod
    def _accept(listener: Listener, far: SimTransport) -> None:
        if not listener.open or listener.factory is None:
            far.gone = far.closing = True
            far._send_end(RST)
        elif not far.gone:
            far.accept(listener.factory)

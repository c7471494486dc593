"""asyncio and uvloop over tcp, one event loop per process; the wire format of `tcp_peer`.

``streams`` and ``uvloop-streams``: StreamReader and StreamWriter. ``sock``: sock_sendall and sock_recv_into, no copies.
``uvloop-protocol``: a BufferedProtocol that receives straight into the region.
"""

import asyncio
import socket
import struct
import threading

from common import KIB, Initiator, Target, main, now

HEADER, SEGMENT = struct.Struct("<I"), struct.Struct("<QQ")
CHUNK = 256 * KIB  # with larger reads StreamReader mostly moves its buffer


def new_loop(variant):
    """The loop that the variant is about."""
    if variant.startswith("uvloop"):
        import uvloop

        return uvloop.new_event_loop()
    return asyncio.new_event_loop()


def tuned(sock):
    """Options of both sides."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    return sock


class Receiver(asyncio.BufferedProtocol):
    """Header and table into scratch memory, payload into the region."""

    def __init__(self, memory):
        self.memory = memory

    def connection_made(self, transport):
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.expect(memoryview(bytearray(HEADER.size)), self.on_header)

    def expect(self, buffer, then):
        self.buffer, self.filled, self.then = buffer, 0, then

    def get_buffer(self, sizehint):
        return self.buffer[self.filled :]

    def buffer_updated(self, nbytes):
        self.filled += nbytes
        if self.filled == len(self.buffer):
            self.then()

    def on_header(self):
        self.expect(memoryview(bytearray(HEADER.unpack(self.buffer)[0] * SEGMENT.size)), self.on_table)

    def on_table(self):
        self.parts = SEGMENT.iter_unpack(bytes(self.buffer))
        self.on_block()

    def on_block(self):
        part = next(self.parts, None)
        if part is None:
            self.transport.write(b"k")
            self.expect(memoryview(bytearray(HEADER.size)), self.on_header)
        else:
            self.expect(self.memory[part[0] : part[0] + part[1]], self.on_block)


class AsyncioTarget(Target):
    """An event loop in a thread."""

    def start(self, initiator_meta):
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.listener.setblocking(False)
        threading.Thread(target=self.run, daemon=True).start()
        return {"port": self.listener.getsockname()[1]}

    def run(self):
        loop = new_loop(self.opts.variant)
        asyncio.set_event_loop(loop)
        loop.run_until_complete(self.serve())

    async def serve(self):
        loop, variant = asyncio.get_running_loop(), self.opts.variant
        if variant == "uvloop-protocol":
            self.server = await loop.create_server(lambda: Receiver(self.region.mv), sock=self.listener)
        elif variant == "sock":
            async with asyncio.TaskGroup() as group:
                while True:
                    sock, _ = await loop.sock_accept(self.listener)
                    group.create_task(self.serve_sock(loop, tuned(sock)))
        else:
            self.server = await asyncio.start_server(self.serve_stream, sock=self.listener, limit=CHUNK)
        await asyncio.Event().wait()

    async def serve_sock(self, loop, sock):
        async def fill(memory):
            while len(memory):
                count = await loop.sock_recv_into(sock, memory)
                if not count:
                    raise EOFError
                memory = memory[count:]

        try:
            while True:
                head = bytearray(HEADER.size)
                await fill(memoryview(head))
                table = bytearray(HEADER.unpack(head)[0] * SEGMENT.size)
                await fill(memoryview(table))
                for offset, length in SEGMENT.iter_unpack(table):
                    await fill(self.region.mv[offset : offset + length])
                await loop.sock_sendall(sock, b"k")
        except (EOFError, ConnectionError):
            sock.close()

    async def serve_stream(self, reader, writer):
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        memory = self.region.mv
        try:
            while True:
                table = await reader.readexactly(HEADER.unpack(await reader.readexactly(4))[0] * SEGMENT.size)
                for offset, length in SEGMENT.iter_unpack(table):
                    for begin in range(offset, offset + length, CHUNK):
                        end = min(begin + CHUNK, offset + length)
                        memory[begin:end] = await reader.readexactly(end - begin)
                writer.write(b"k")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


class AsyncioInitiator(Initiator):
    """One connection; one more per stream."""

    def setup(self, meta):
        self.port, self.sock, self.lanes = meta["port"], self.opts.variant == "sock", []
        self.loop = new_loop(self.opts.variant)
        asyncio.set_event_loop(self.loop)
        begun = now()
        self.lane = self.loop.run_until_complete(self.connect())
        return {"register_s": 0.0, "connect_s": now() - begun}

    async def connect(self):
        sock = tuned(socket.socket())
        await self.loop.sock_connect(sock, ("127.0.0.1", self.port))
        return sock if self.sock else await asyncio.open_connection(sock=sock, limit=CHUNK)

    async def send(self, lane, segs):
        memory = self.region.mv
        head = HEADER.pack(len(segs)) + b"".join(SEGMENT.pack(remote, length) for _, remote, length in segs)
        if self.sock:
            await self.loop.sock_sendall(lane, head)
            for local, _, length in segs:
                await self.loop.sock_sendall(lane, memory[local : local + length])
            return
        writer = lane[1]
        writer.write(head)
        for local, _, length in segs:
            for begin in range(local, local + length, CHUNK):
                writer.write(memory[begin : min(begin + CHUNK, local + length)])
                await writer.drain()

    async def answer(self, lane):
        if await (self.loop.sock_recv(lane, 1) if self.sock else lane[0].readexactly(1)) != b"k":
            raise EOFError

    async def move(self, lane, segs):
        await self.send(lane, segs)
        await self.answer(lane)

    def transfer(self, segs):
        self.loop.run_until_complete(self.move(self.lane, segs))

    def pipeline(self, reqs, window):
        async def run():
            for number, req in enumerate(reqs):
                if number >= window:
                    await self.answer(self.lane)
                await self.send(self.lane, req)
            for _ in range(min(window, len(reqs))):
                await self.answer(self.lane)

        self.loop.run_until_complete(run())

    def streams(self, reqs, repeats):
        taken = []

        async def stream(lane, req):
            for _ in range(repeats):
                begun = now()
                await self.move(lane, req)
                taken.append(now() - begun)

        async def run():
            self.lanes = self.lanes or [await self.connect() for _ in reqs]
            await asyncio.gather(*map(stream, self.lanes, reqs))

        self.loop.run_until_complete(run())
        return taken


if __name__ == "__main__":
    variants = ("streams", "uvloop-streams", "sock", "uvloop-protocol")
    main("asyncio", AsyncioInitiator, AsyncioTarget, variants=variants)

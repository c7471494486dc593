"""Plain blocking Python sockets, one sendmsg or recvmsg_into for up to 1000 blocks.

Wire: u32 count, count x (u64 offset, u64 length), payload; one byte back when the last byte is in the region. The
variant ``reno`` asks for that congestion control on each socket, as any program may.
"""

import socket
import struct
import threading

from common import Initiator, Target, main, now, thread_streams

HEADER, SEGMENT, VECTORS = struct.Struct("<I"), struct.Struct("<QQ"), 1000


def tune(sock, variant):
    """Options of both sides."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if variant != "host":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, variant.encode())


def move_all(buffers, call):
    """Every byte of the buffers through ``call(some of them) -> bytes moved``."""
    for begin in range(0, len(buffers), VECTORS):
        part = buffers[begin : begin + VECTORS]
        while part:
            moved = call(part)
            if not moved:
                raise EOFError
            whole = 0
            while whole < len(part) and moved >= len(part[whole]):
                moved -= len(part[whole])
                whole += 1
            del part[:whole]
            if moved:
                part[0] = part[0][moved:]


def receive_all(sock, buffers):
    """Fill the buffers."""
    move_all(buffers, lambda part: sock.recvmsg_into(part, 0, socket.MSG_WAITALL)[0])


class TcpTarget(Target):
    """A thread per connection."""

    def start(self, initiator_meta):
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        tune(self.listener, self.opts.variant)
        threading.Thread(target=self.accept, daemon=True).start()
        return {"port": self.listener.getsockname()[1]}

    def accept(self):
        while True:
            sock, _ = self.listener.accept()
            tune(sock, self.opts.variant)
            threading.Thread(target=self.serve, args=(sock,), daemon=True).start()

    def serve(self, sock):
        memory, head = self.region.mv, bytearray(HEADER.size)
        try:
            while True:
                receive_all(sock, [memoryview(head)])
                table = bytearray(HEADER.unpack(head)[0] * SEGMENT.size)
                receive_all(sock, [memoryview(table)])
                parts = SEGMENT.iter_unpack(table)
                receive_all(sock, [memory[offset : offset + length] for offset, length in parts])
                sock.sendall(b"k")
        except (EOFError, ConnectionError):
            sock.close()


class TcpInitiator(Initiator):
    """One connection; one more per stream."""

    def connect(self):
        sock = socket.socket()
        tune(sock, self.opts.variant)
        sock.connect(("127.0.0.1", self.port))
        return sock

    def setup(self, meta):
        self.port = meta["port"]
        begun = now()
        self.sock, self.lanes = self.connect(), []
        return {"register_s": 0.0, "connect_s": now() - begun}

    def send(self, sock, segs):
        memory = self.region.mv
        head = HEADER.pack(len(segs)) + b"".join(SEGMENT.pack(remote, length) for _, remote, length in segs)
        move_all([memoryview(head)] + [memory[local : local + length] for local, _, length in segs], sock.sendmsg)

    def answer(self, sock):
        if sock.recv(1) != b"k":
            raise EOFError

    def transfer(self, segs, sock=None):
        self.send(sock or self.sock, segs)
        self.answer(sock or self.sock)

    def pipeline(self, reqs, window):
        for number, req in enumerate(reqs):
            if number >= window:
                self.answer(self.sock)
            self.send(self.sock, req)
        for _ in range(min(window, len(reqs))):
            self.answer(self.sock)

    def streams(self, reqs, repeats):
        self.lanes = self.lanes or [self.connect() for _ in reqs]
        return thread_streams(reqs, repeats, lambda number, req: self.transfer(req, self.lanes[number]))


if __name__ == "__main__":
    main("tcp", TcpInitiator, TcpTarget, variants=("host", "reno"))

"""Memcached as the hop: the producer sets values and says so through a socket, the consumer gets them into its region
and answers through the same socket, since memcached has nothing to wait on.

Requests are cut into pieces of at most 512 KiB (items beyond half a page are chained by the server) whose gets overlap
later sets. The server is started here, on a free port of the loopback interface, and ends with this program.
"""

import socket
import struct
import subprocess
import threading
import time

from common import MIB, Initiator, Target, die_with_parent, main, now, thread_streams

SEGMENT = struct.Struct("<QQQ")
LENGTH = struct.Struct("<I")
LANES, SINGLE = 33, 32  # the last lane is for single requests
PIECE, START_S = MIB // 2, 10.0
LAST, MORE = b"!", b"."


def client(port):
    """A connection to the server."""
    from pymemcache.client.base import Client

    return Client(("127.0.0.1", port), no_delay=True)


def say(sock, data):
    """One message of the side channel."""
    sock.sendall(LENGTH.pack(len(data)) + data)


def hear(sock):
    """The next one; empty when the other side has gone."""
    head = sock.recv(LENGTH.size, socket.MSG_WAITALL)
    return sock.recv(LENGTH.unpack(head)[0], socket.MSG_WAITALL) if len(head) == LENGTH.size else b""


class MemcachedTarget(Target):
    """A consumer thread per lane."""

    def start(self, initiator_meta):
        for lane in range(LANES):
            side = socket.create_connection(("127.0.0.1", initiator_meta["side"]))
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            say(side, str(lane).encode())
            threading.Thread(target=self.run, args=(initiator_meta["port"], lane, side), daemon=True).start()
        return {}

    def run(self, port, lane, side):
        store, memory = client(port), self.region.mv
        while job := hear(side):
            segs = list(SEGMENT.iter_unpack(job[1:]))
            values = store.get_many([f"k{lane}:{local}" for local, _, _ in segs])
            for local, offset, length in segs:
                memory[offset : offset + length] = values[f"k{lane}:{local}"]
            if job[:1] == LAST:
                say(side, b"k")


class MemcachedInitiator(Initiator):
    """The producer, and owner of the server."""

    def local_meta(self):
        with socket.create_server(("127.0.0.1", 0)) as sock:
            self.port = sock.getsockname()[1]
        command = f"memcached -l 127.0.0.1 -p {self.port} -U 0 -u nobody -m 4096 -I 2m -c 256".split()
        self.server = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=die_with_parent)
        self.extra_pids.append(self.server.pid)
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=LANES)
        end = now() + START_S
        while now() < end and self.server.poll() is None:
            with socket.socket() as sock:
                if sock.connect_ex(("127.0.0.1", self.port)) == 0:
                    return {"port": self.port, "side": self.listener.getsockname()[1]}
            time.sleep(0.02)
        raise RuntimeError("memcached did not start")

    def setup(self, meta):
        begun = now()
        self.store, self.lanes, self.sides = client(self.port), [], {}
        for _ in range(LANES):
            side, _ = self.listener.accept()
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.sides[int(hear(side))] = side
        self.store.version()
        return {"register_s": 0.0, "connect_s": now() - begun}

    def put(self, store, lane, segs, mark):
        memory = self.region.mv
        values = {f"k{lane}:{local}": bytes(memory[local : local + length]) for local, _, length in segs}
        failed = store.set_many(values, noreply=False)  # sent at once, then all answers are read
        if failed:
            raise RuntimeError(f"memcached refused {len(failed)} items")
        say(self.sides[lane], mark + b"".join(SEGMENT.pack(*seg) for seg in segs))

    def send(self, store, lane, segs):
        small = [
            (local + at, remote + at, min(PIECE, length - at))
            for local, remote, length in segs
            for at in range(0, length, PIECE)
        ]
        count = max(1, MIB // small[0][2])
        parts = [small[begin : begin + count] for begin in range(0, len(small), count)]
        for number, part in enumerate(parts, 1):
            self.put(store, lane, part, LAST if number == len(parts) else MORE)

    def transfer(self, segs, lane=SINGLE, store=None):
        self.send(store or self.store, lane, segs)
        hear(self.sides[lane])

    def pipeline(self, reqs, window):
        for number, req in enumerate(reqs):
            if number >= window:
                hear(self.sides[SINGLE])
            self.send(self.store, SINGLE, req)
        for _ in range(min(window, len(reqs))):
            hear(self.sides[SINGLE])

    def streams(self, reqs, repeats):
        self.lanes = self.lanes or [client(self.port) for _ in reqs]
        return thread_streams(reqs, repeats, lambda number, req: self.transfer(req, number, self.lanes[number]))

    def close(self):
        self.server.terminate()
        self.server.wait()


if __name__ == "__main__":
    main("memcached", MemcachedInitiator, MemcachedTarget)

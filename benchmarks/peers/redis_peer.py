"""Redis as the hop: the producer SETs values and says so through a list, the consumer GETs them into its region and
answers through a list.

Requests are cut into pieces of 1 MiB whose GETs overlap later SETs, which is faster than one value. The server is
started here, on a free port of the loopback interface, stores nothing and ends with this program.
"""

import socket
import struct
import subprocess
import threading
import time

from common import MIB, Initiator, Target, die_with_parent, main, now, thread_streams

SEGMENT = struct.Struct("<QQQ")
LANES, SINGLE = 33, 32  # the last lane is for single requests
START_S, LAST, MORE = 10.0, b"!", b"."


def client(port):
    """A connection."""
    import redis

    return redis.Redis(host="127.0.0.1", port=port, socket_read_size=MIB)


class RedisTarget(Target):
    """A consumer thread per lane."""

    def start(self, initiator_meta):
        for lane in range(LANES):
            threading.Thread(target=self.run, args=(initiator_meta["port"], lane), daemon=True).start()
        return {}

    def run(self, port, lane):
        store, memory = client(port), self.region.mv
        while True:
            _, job = store.blpop(f"q{lane}")
            segs = list(SEGMENT.iter_unpack(job[1:]))
            names = [f"k{lane}:{local}" for local, _, _ in segs]
            values = [store.get(names[0])] if len(segs) == 1 else store.mget(names)
            for (_, offset, length), value in zip(segs, values, strict=True):
                memory[offset : offset + length] = value
            if job[:1] == LAST:
                store.rpush(f"a{lane}", b"k")


class RedisInitiator(Initiator):
    """The producer, and owner of the server."""

    def local_meta(self):
        with socket.create_server(("127.0.0.1", 0)) as sock:
            self.port = sock.getsockname()[1]
        command = f"redis-server --port {self.port} --bind 127.0.0.1 --appendonly no --proto-max-bulk-len 1gb"
        command = [*command.split(), "--save", "", "--client-query-buffer-limit", "2gb"]
        self.server = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=die_with_parent)
        self.extra_pids.append(self.server.pid)
        end = now() + START_S
        while now() < end and self.server.poll() is None:
            with socket.socket() as sock:
                if sock.connect_ex(("127.0.0.1", self.port)) == 0:
                    return {"port": self.port}
            time.sleep(0.02)
        raise RuntimeError("redis-server did not start")

    def setup(self, meta):
        begun = now()
        self.store, self.lanes = client(self.port), []
        self.store.ping()
        return {"register_s": 0.0, "connect_s": now() - begun}

    def put(self, store, lane, segs, mark):
        memory, pipe = self.region.mv, store.pipeline(transaction=False)
        if len(segs) == 1:
            local, _, length = segs[0]
            pipe.set(f"k{lane}:{local}", memory[local : local + length])
        else:
            pipe.mset({f"k{lane}:{local}": memory[local : local + length] for local, _, length in segs})
        pipe.rpush(f"q{lane}", mark + b"".join(SEGMENT.pack(*seg) for seg in segs))
        pipe.execute()

    def send(self, store, lane, segs):
        if len(segs) == 1:
            local, remote, length = segs[0]
            parts = [[(local + at, remote + at, min(MIB, length - at))] for at in range(0, length, MIB)]
        else:
            count = max(1, MIB // segs[0][2])
            parts = [segs[begin : begin + count] for begin in range(0, len(segs), count)]
        for number, part in enumerate(parts, 1):
            self.put(store, lane, part, LAST if number == len(parts) else MORE)

    def transfer(self, segs, lane=SINGLE, store=None):
        self.send(store or self.store, lane, segs)
        (store or self.store).blpop(f"a{lane}")

    def pipeline(self, reqs, window):
        for number, req in enumerate(reqs):
            if number >= window:
                self.store.blpop(f"a{SINGLE}")
            self.send(self.store, SINGLE, req)
        for _ in range(min(window, len(reqs))):
            self.store.blpop(f"a{SINGLE}")

    def streams(self, reqs, repeats):
        self.lanes = self.lanes or [client(self.port) for _ in reqs]
        return thread_streams(reqs, repeats, lambda number, req: self.transfer(req, number, self.lanes[number]))

    def close(self):
        self.server.terminate()
        self.server.wait()


if __name__ == "__main__":
    main("redis", RedisInitiator, RedisTarget)

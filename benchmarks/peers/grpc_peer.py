"""gRPC with raw bytes as messages (no protobuf), one long bidirectional stream per lane.

A request is cut into messages of up to 2 MiB, each a table and its payload joined into one bytes object, as gRPC needs;
the server copies into the region and answers once per request.
"""

import queue
import struct
import time
from concurrent.futures import ThreadPoolExecutor

from common import MIB, Initiator, Target, main, now, thread_streams

HEAD, SEGMENT = struct.Struct("<?I"), struct.Struct("<QQ")
CHUNK, WAITING_MAX = 2 * MIB, 8
OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.optimization_target", "throughput"),
    ("grpc.http2.max_frame_size", 16777215),
    ("grpc.http2.lookahead_bytes", 64 * MIB),
)


def packed(memory, segs, last):
    """One message."""
    table = [SEGMENT.pack(remote, length) for _, remote, length in segs]
    payload = [memory[local : local + length] for local, _, length in segs]
    return b"".join([HEAD.pack(last, len(segs)), *table, *payload])


def pieces(segs):
    """The segments of each message."""
    part, size = [], 0
    for local, remote, length in segs:
        for begin in range(0, length, CHUNK):
            count = min(CHUNK, length - begin)
            part.append((local + begin, remote + begin, count))
            size += count
            if size >= CHUNK:
                yield part
                part, size = [], 0
    if part:
        yield part


class GrpcTarget(Target):
    """A server whose streams store what arrives."""

    def start(self, initiator_meta):
        import grpc

        self.server = grpc.server(ThreadPoolExecutor(40), options=OPTIONS)
        methods = {"Move": grpc.stream_stream_rpc_method_handler(self.move)}
        self.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("kv", methods)])
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        return {"port": port}

    def move(self, messages, _):
        memory = self.region.mv
        for message in messages:
            view = memoryview(message)
            last, count = HEAD.unpack_from(view)
            at = HEAD.size + count * SEGMENT.size
            for offset, length in SEGMENT.iter_unpack(view[HEAD.size : at]):
                memory[offset : offset + length] = view[at : at + length]
                at += length
            if last:
                yield b"k"


class GrpcInitiator(Initiator):
    """One channel; a stream for single requests and one per stream of W6."""

    def setup(self, meta):
        import grpc

        begun = now()
        self.channel = grpc.insecure_channel(f"127.0.0.1:{meta['port']}", options=OPTIONS)
        grpc.channel_ready_future(self.channel).result(10)
        self.lane, self.lanes = self.connect(), []
        return {"register_s": 0.0, "connect_s": now() - begun}

    def connect(self):
        waiting = queue.SimpleQueue()
        return waiting, self.channel.stream_stream("/kv/Move")(iter(waiting.get, None))

    def send(self, lane, segs):
        parts = list(pieces(segs))
        for number, part in enumerate(parts, 1):
            while lane[0].qsize() > WAITING_MAX:  # bounds the copies that wait
                time.sleep(50e-6)
            lane[0].put(packed(self.region.mv, part, number == len(parts)))

    def transfer(self, segs, lane=None):
        self.send(lane or self.lane, segs)
        next((lane or self.lane)[1])

    def pipeline(self, reqs, window):
        for number, req in enumerate(reqs):
            if number >= window:
                next(self.lane[1])
            self.send(self.lane, req)
        for _ in range(min(window, len(reqs))):
            next(self.lane[1])

    def streams(self, reqs, repeats):
        self.lanes = self.lanes or [self.connect() for _ in reqs]
        return thread_streams(reqs, repeats, lambda number, req: self.transfer(req, self.lanes[number]))


if __name__ == "__main__":
    main("grpc", GrpcInitiator, GrpcTarget)

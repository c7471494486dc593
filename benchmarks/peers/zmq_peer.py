"""pyzmq, PUSH and PULL over tcp, copy=False on both sides; the target copies the frames into its region, because libzmq
owns what it receives into.

A message is a table and one frame per block. Requests over 1 MiB are cut into such messages: one frame of 256 MiB is
slower.
"""

import struct
import threading

from common import MIB, Initiator, Target, main, now

TAG, SEGMENT = struct.Struct("<I"), struct.Struct("<QQ")
MORE = 0xFFFFFFFF  # tag of all but the last message of a request


class ZmqTarget(Target):
    """One thread that stores and answers."""

    def start(self, initiator_meta):
        import zmq

        self.context = zmq.Context(io_threads=1)
        self.inlet = self.context.socket(zmq.PULL)
        self.inlet.set_hwm(0)
        self.inlet.bind("tcp://127.0.0.1:*")
        threading.Thread(target=self.run, args=(initiator_meta["answers"],), daemon=True).start()
        return {"endpoint": self.inlet.getsockopt_string(zmq.LAST_ENDPOINT)}

    def run(self, answers):
        import zmq

        outlet = self.context.socket(zmq.PUSH)
        outlet.connect(answers)
        memory = self.region.mv
        while True:
            head, *frames = self.inlet.recv_multipart(copy=False)
            table = bytes(head.buffer)
            for (offset, length), frame in zip(SEGMENT.iter_unpack(table[TAG.size :]), frames, strict=True):
                memory[offset : offset + length] = frame.buffer
            del frames, frame
            if TAG.unpack_from(table)[0] != MORE:
                outlet.send(table[: TAG.size])


class ZmqInitiator(Initiator):
    """One socket; one more per stream."""

    def local_meta(self):
        import zmq

        self.context = zmq.Context(io_threads=1)
        self.answers = self.context.socket(zmq.PULL)
        self.answers.bind("tcp://127.0.0.1:*")
        return {"answers": self.answers.getsockopt_string(zmq.LAST_ENDPOINT)}

    def connect(self):
        import zmq

        sock = self.context.socket(zmq.PUSH)
        sock.set_hwm(0)
        sock.connect(self.endpoint)
        return sock

    def setup(self, meta):
        self.endpoint = meta["endpoint"]
        begun = now()
        self.sock, self.lanes = self.connect(), []
        return {"register_s": 0.0, "connect_s": now() - begun}

    def send(self, sock, tag, segs):
        if len(segs) == 1:
            local, remote, length = segs[0]
            parts = [[(local + at, remote + at, min(MIB, length - at))] for at in range(0, length, MIB)]
        else:
            count = max(1, MIB // segs[0][2])
            parts = [segs[begin : begin + count] for begin in range(0, len(segs), count)]
        memory = self.region.mv
        for number, part in enumerate(parts, 1):
            table = [TAG.pack(tag if number == len(parts) else MORE)]
            table += [SEGMENT.pack(remote, length) for _, remote, length in part]
            payload = [memory[local : local + length] for local, _, length in part]
            sock.send_multipart([b"".join(table), *payload], copy=False)

    def answer(self):
        return TAG.unpack(self.answers.recv())[0]

    def transfer(self, segs):
        self.send(self.sock, 0, segs)
        self.answer()

    def pipeline(self, reqs, window):
        for number, req in enumerate(reqs):
            if number >= window:
                self.answer()
            self.send(self.sock, number, req)
        for _ in range(min(window, len(reqs))):
            self.answer()

    def streams(self, reqs, repeats):
        self.lanes = self.lanes or [self.connect() for _ in reqs]
        taken, left, begun = [], [repeats] * len(reqs), [0.0] * len(reqs)
        waiting = list(range(len(reqs)))
        while waiting or any(left):
            for number in waiting:
                begun[number] = now()
                self.send(self.lanes[number], number, reqs[number])
            number = self.answer()
            taken.append(now() - begun[number])
            left[number] -= 1
            waiting = [number] if left[number] else []
        return taken


if __name__ == "__main__":
    main("zmq", ZmqInitiator, ZmqTarget)

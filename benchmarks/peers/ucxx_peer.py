"""ucxx, UCX's own asyncio binding, with tagged messages.

It has no one-sided calls in Python, so a table goes first and the target posts receives that match; a segment is one
message. ``sm``: UCX picks shared memory and process_vm_readv; ``tcp``: only tcp. Endpoints are made from worker
addresses without error handling, else UCX leaves its shared memory lanes out and falls back to tcp in silence.
"""

import asyncio
import struct
import threading

import numpy as np
from common import Initiator, Target, main, now

SEGMENT = struct.Struct("<QQ")
HEAD, TABLE, DATA, ACK = range(4)
LANES, AT_ONCE = 33, 512


def load(variant):
    """The binding, initialised."""
    import libucx

    libucx.load_library()
    import ucxx

    ucxx.init(progress_mode=variant.partition("-")[2])
    return ucxx


async def endpoint(ucxx, address):
    """To the worker with this address."""
    where = ucxx.get_ucx_address_from_buffer(address)
    return await ucxx.create_endpoint_from_worker_address(where, endpoint_error_handling=False)


class Lane:
    """Messages that are kept apart from other lanes' by their tags."""

    def __init__(self, ucxx, end, number):
        self.ucxx, self.end, self.number = ucxx, end, number

    def tag(self, kind):
        return self.ucxx.types.Tag(self.number * 4 + kind)

    def send(self, kind, array):
        return self.end.send(array, tag=self.tag(kind), force_tag=True)

    def recv(self, kind, array):
        return self.end.recv(array, tag=self.tag(kind), force_tag=True)


async def bulk(call, arrays):
    """All segments of a request, some at once."""
    if len(arrays) == 1:
        await call(DATA, arrays[0])
        return
    for begin in range(0, len(arrays), AT_ONCE):
        await asyncio.gather(*(call(DATA, array) for array in arrays[begin : begin + AT_ONCE]))


class UcxxTarget(Target):
    """An event loop in a thread that serves every lane."""

    def start(self, initiator_meta):
        ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self.run(initiator_meta, ready)), daemon=True).start()
        ready.wait()
        return {"address": self.address}

    async def run(self, meta, ready):
        ucxx = load(self.opts.variant)
        self.address = bytes(ucxx.get_worker_address())
        ready.set()
        end = await endpoint(ucxx, meta["address"])
        await asyncio.gather(*(self.serve(Lane(ucxx, end, number)) for number in range(LANES)))

    async def serve(self, lane):
        memory, count, good = self.region.np, np.zeros(1, np.uint64), np.ones(1, np.uint8)
        while True:
            await lane.recv(HEAD, count)
            table = np.zeros(int(count[0]) * SEGMENT.size, np.uint8)
            await lane.recv(TABLE, table)
            parts = SEGMENT.iter_unpack(table.tobytes())
            await bulk(lane.recv, [memory[offset : offset + length] for offset, length in parts])
            await lane.send(ACK, good)


class UcxxInitiator(Initiator):
    """Lane 0 for single requests, the others for windows and streams."""

    def local_meta(self):
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        begun = now()
        self.loop.run_until_complete(self.load())
        self.init_s = now() - begun
        return {"address": bytes(self.ucxx.get_worker_address())}

    async def load(self):
        self.ucxx = load(self.opts.variant)

    def setup(self, meta):
        begun = now()
        end = self.loop.run_until_complete(endpoint(self.ucxx, meta["address"]))
        self.lanes = [Lane(self.ucxx, end, number) for number in range(LANES)]
        return {"init_s": self.init_s, "register_s": 0.0, "connect_s": now() - begun}

    async def move(self, lane, segs):
        memory = self.region.np
        table = b"".join(SEGMENT.pack(remote, length) for _, remote, length in segs)
        await lane.send(HEAD, np.array([len(segs)], np.uint64))
        await lane.send(TABLE, np.frombuffer(table, np.uint8))
        await bulk(lane.send, [memory[local : local + length] for local, _, length in segs])
        await lane.recv(ACK, np.zeros(1, np.uint8))

    def transfer(self, segs):
        self.loop.run_until_complete(self.move(self.lanes[0], segs))

    def pipeline(self, reqs, window):
        async def lane(number):
            for req in reqs[number::window]:
                await self.move(self.lanes[number], req)

        async def run():
            await asyncio.gather(*(lane(number) for number in range(window)))

        self.loop.run_until_complete(run())

    def streams(self, reqs, repeats):
        taken = []

        async def stream(lane, req):
            for _ in range(repeats):
                begun = now()
                await self.move(lane, req)
                taken.append(now() - begun)

        async def run():
            await asyncio.gather(*map(stream, self.lanes[1:], reqs))

        self.loop.run_until_complete(run())
        return taken


if __name__ == "__main__":
    host = {"UCX_RNDV_FRAG_MEM_TYPE": "host"}  # its own default is cuda
    env = {
        "sm-polling": {"UCX_TLS": "tcp,cma,posix,sysv,self", **host},
        "tcp-polling": {"UCX_TLS": "tcp,self", **host},
        "sm-blocking": {"UCX_TLS": "tcp,cma,posix,sysv,self", **host},
        "tcp-blocking": {"UCX_TLS": "tcp,self", **host},
    }
    main("ucxx", UcxxInitiator, UcxxTarget, variants=tuple(env), env=env)

"""Mooncake Transfer Engine over tcp with peer-to-peer metadata (no etcd, no redis).

One segment goes by transfer_sync_*, many by batch_transfer_sync_*. W4 and W6 use the calls that do not block: 32
threads in the spinning ones are many times slower on few cores. ``tcp`` raises the queue limit, whose default of 1024
rejects a request of 4096 blocks, and the slice size, which helps it; ``tcp-default`` leaves all as it is.
"""

import os

from common import Initiator, Target, main, now


def engine(region):
    """An engine with the region registered, and the seconds of both steps."""
    from mooncake.engine import TransferEngine

    made = TransferEngine()
    at = [now()]
    if made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("Mooncake: initialize failed")
    at.append(now())
    if made.register_memory(region.addr, region.size) != 0:
        raise RuntimeError("Mooncake: register_memory failed")
    at.append(now())
    return made, at[1] - at[0], at[2] - at[1]


class MooncakeTarget(Target):
    """Registers and says where."""

    def start(self, initiator_meta):
        self.engine, _, _ = engine(self.region)
        return {"segment": f"127.0.0.1:{self.engine.get_rpc_port()}", "addr": self.region.addr}


class MooncakeInitiator(Initiator):
    """One-sided reads and writes."""

    poll_sleep = 20e-6  # the engine's threads make progress: leave them the cores

    def setup(self, meta):
        self.engine, init, register = engine(self.region)
        self.segment, self.there = meta["segment"], meta["addr"]
        return {"init_s": init, "register_s": register, "connect_s": 0.0}  # it connects on first use

    def call(self, name):
        return getattr(self.engine, name + self.op)

    def transfer(self, segs):
        here, there = self.region.addr, self.there
        if len(segs) == 1:
            local, remote, length = segs[0]
            failed = self.call("transfer_sync_")(self.segment, here + local, there + remote, length)
        else:
            columns = ([here + seg[0] for seg in segs], [there + seg[1] for seg in segs], [seg[2] for seg in segs])
            failed = self.call("batch_transfer_sync_")(self.segment, *columns)
        if failed:
            raise RuntimeError(f"Mooncake: transfer returned {failed}")

    def post(self, segs, tell=None):
        local, remote, length = segs[0]
        start = self.call("batch_transfer_async_")
        batch = start(self.segment, [self.region.addr + local], [self.there + remote], [length])
        if batch == 0:
            raise RuntimeError("Mooncake: not accepted")
        return batch

    def done(self, handle):
        state = self.engine.transfer_check_status(handle)
        if state < 0:
            raise RuntimeError(f"Mooncake: transfer ended with {state}")
        return state == 1


if __name__ == "__main__":
    queue = {"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535"}  # the most that it accepts
    env = {"tcp": {**queue, "MC_TCP_SLICE_SIZE": str(1 << 20)}, "tcp-default": {}}
    for one in env.values():
        one["MC_LOG_LEVEL"] = os.environ.get("MC_LOG_LEVEL", "WARNING")
    main("mooncake", MooncakeInitiator, MooncakeTarget, variants=tuple(env), ops=("read", "write"), env=env)

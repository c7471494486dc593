"""NIXL with its UCX backend on host memory.

Descriptor lists over all blocks are prepared once when connecting (as vLLM's connector does); a request of such blocks
then costs make_prepped_xfer, transfer, polling and release, all timed. Other requests bring their own descriptors. In
W4 each layer carries a notification that the target counts; the variants with ``silent`` leave it out.
"""

import time

import numpy as np
from common import Initiator, Target, main, now

TOLD_S = 10.0


def agent(name, region):
    """An agent with the region registered, and the seconds of both steps. The target's progress thread makes reads and
    writes go on without it; the initiator polls.
    """
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    at = [now()]
    made = nixl_agent(name, nixl_agent_config(enable_prog_thread=name == "target", backends=["UCX"]))
    at.append(now())
    made.register_memory([(region.addr, region.size, 0, "")], "DRAM")
    at.append(now())
    return made, at[1] - at[0], at[2] - at[1]


class NixlTarget(Target):
    """Registers and shows its metadata."""

    def start(self, initiator_meta):
        self.agent, _, _ = agent("target", self.region)
        return {"metadata": self.agent.get_agent_metadata(), "addr": self.region.addr}

    def told(self, expected):
        count, end = 0, now() + TOLD_S
        while count < expected and now() < end:
            count += sum(len(messages) for messages in self.agent.get_new_notifs().values())
            time.sleep(0)
        return count


class NixlInitiator(Initiator):
    """One-sided reads and writes."""

    def setup(self, meta):
        self.agent, init, register = agent("initiator", self.region)
        self.tells = not self.opts.variant.endswith("silent")
        self.there = meta["addr"]
        at = [now()]
        self.peer = self.agent.add_remote_agent(meta["metadata"])
        self.agent.make_connection(self.peer)
        at.append(now())
        _, self.block = self.opts.sizes.scattered(self.opts.workload)
        count = self.region.size // self.block
        blocks = np.zeros((count, 3), np.uint64)
        blocks[:, 0], blocks[:, 1] = np.arange(count) * self.block, self.block
        local, remote = blocks.copy(), blocks.copy()
        local[:, 0] += np.uint64(self.region.addr)
        remote[:, 0] += np.uint64(self.there)
        self.local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, "DRAM")
        self.remote = self.agent.prep_xfer_dlist(self.peer, remote, "DRAM")
        at.append(now())
        return {"init_s": init, "register_s": register, "connect_s": at[1] - at[0], "prepare_s": at[2] - at[1]}

    def post(self, segs, tell=None):
        op, message = self.op.upper(), b"" if tell is None or self.op == "read" else b"%d" % tell
        if segs[0][2] == self.block and len(segs) > 1:
            local = np.fromiter((seg[0] // self.block for seg in segs), np.int32, len(segs))
            remote = np.fromiter((seg[1] // self.block for seg in segs), np.int32, len(segs))
            handle = self.agent.make_prepped_xfer(op, self.local, local, self.remote, remote, message)
        else:
            local = self.agent.get_xfer_descs([(self.region.addr + seg[0], seg[2], 0) for seg in segs], "DRAM")
            remote = self.agent.get_xfer_descs([(self.there + seg[1], seg[2], 0) for seg in segs], "DRAM")
            handle = self.agent.initialize_xfer(op, local, remote, self.peer, message)
        return [handle, self.is_done(self.agent.transfer(handle))]

    def is_done(self, state):
        if state == "ERR":
            raise RuntimeError("NIXL reports an error")
        return state == "DONE"

    def done(self, handle):
        if not handle[1]:
            handle[1] = self.is_done(self.agent.check_xfer_state(handle[0]))
        if handle[1] and handle[0]:
            self.agent.release_xfer_handle(handle[0])
            handle[0] = None
        return handle[1]


if __name__ == "__main__":
    tcp = {"UCX_TLS": "tcp,self"}
    env = {"default": {}, "tcp": tcp, "default-silent": {}, "tcp-silent": tcp}
    main("nixl", NixlInitiator, NixlTarget, variants=tuple(env), ops=("read", "write"), env=env)

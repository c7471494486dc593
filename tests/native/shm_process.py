"""An owner in a process of its own: grants memory, says how to reach it, and does what its input says.

    python shm_process.py '{"directory": ..., "how": "alloc" | "register", "length": ..., "settings": {...}}'

Commands, one per line, each answered with one: `sum`, `fill N`, `revoke`, `close`, `reach {...}` (import a grant of
another engine), `fork` (a child that does nothing; its process id).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

import numpy as np

from kvxfer.native.engine import Engine, EngineConfig


async def main(what: dict[str, Any]) -> None:
    settings = {"transports": ("shm",), "socket_dir": what["directory"], "copy_threads": 1} | what["settings"]
    engine = Engine(EngineConfig(engine_id=os.urandom(16), **settings))
    engine.attach(asyncio.get_running_loop(), lambda event: None)
    if what["how"] == "alloc":
        region = engine.alloc(what["length"])
        memory = np.frombuffer(engine.buffer(region), dtype=np.uint8)
    else:
        memory = np.zeros(what["length"], dtype=np.uint8)
        region = engine.register(memory.ctypes.data, memory.nbytes)
    memory[:] = 1
    grant = engine.grant(region.id, 0, region.length, 3)
    described = {"grant": grant.id, "generation": grant.generation, "length": grant.length, "key": grant.key.hex()}
    print(json.dumps(described | {"endpoint": engine.transports[1].endpoint}), flush=True)
    while line := await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
        command, _, argument = line.strip().partition(" ")
        answer = "done"
        if command == "sum":
            answer = str(int(memory.sum(dtype=np.uint64)))
        elif command == "fill":
            memory[:] = int(argument)
        elif command == "revoke":
            answer = str((await engine.revoke(grant.id)).status)
        elif command == "close":
            engine.close()
        elif command == "reach":
            answer = await reach(engine, json.loads(argument))
        elif command == "fork":
            answer = str(idle_child())
        print(answer, flush=True)


async def reach(engine: Engine, told: dict[str, Any]) -> str:
    key = bytes.fromhex(told.pop("key"))
    peer, connecting = engine.connect(1, told.pop("endpoint"))
    assert (await connecting).status == 0
    _, importing = engine.import_(peer, key=key, access=3, **told)
    return str((await importing).status)


def idle_child() -> int:
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    return pid


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))

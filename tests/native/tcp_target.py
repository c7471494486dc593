"""An owner in a process of its own, for tests that stop or kill it: grants its memory, says how to reach it, waits."""

from __future__ import annotations

import asyncio
import json
import os
import sys

from kvxfer.native.engine import Engine, EngineConfig

LENGTH = 64 << 20


async def main() -> None:
    engine = Engine(EngineConfig(engine_id=os.urandom(16), transports=("tcp",), tcp_threads=1, tcp_streams=2))
    engine.attach(asyncio.get_running_loop(), lambda event: None)
    region = engine.alloc(LENGTH)
    grant = engine.grant(region.id, 0, LENGTH, 3)
    endpoint = next(one.endpoint for one in engine.transports if one.name == "tcp")
    described = {"endpoint": endpoint, "grant": grant.id, "generation": grant.generation, "key": grant.key.hex()}
    print(json.dumps(described), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

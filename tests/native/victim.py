"""An initiator in a process of its own, for the test that kills it: connects, imports, notifies once, and waits."""

from __future__ import annotations

import asyncio
import json
import os
import sys

from kvxfer.native.engine import Engine, EngineConfig, OpKind


async def main(what: dict[str, str]) -> None:
    config = EngineConfig(
        engine_id=os.urandom(16),
        transports=(what["transport"],),
        socket_dir=what["directory"],
        copy_threads=1,
        tcp_threads=1,
        tcp_streams=2,
        tcp_encryption="on" if what["secret"] else "off",
    )
    engine = Engine(config)
    engine.attach(asyncio.get_running_loop(), lambda event: None)
    peer, connected = engine.connect(1, what["endpoint"], bytes.fromhex(what["secret"]) or None)
    assert (await connected).status == 0
    import_, imported = engine.import_(
        peer,
        grant=int(what["grant"]),
        generation=int(what["generation"]),
        length=int(what["length"]),
        access=3,
        key=bytes.fromhex(what["key"]),
    )
    assert (await imported).status == 0
    outcome = engine.submit(OpKind.PUT, 0, import_, None, notify=(77, 0))
    if not hasattr(outcome, "status"):
        await outcome[1]
    print("ready", flush=True)
    await asyncio.Event().wait()


asyncio.run(main(json.loads(sys.argv[1])))

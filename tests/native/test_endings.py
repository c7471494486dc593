"""Processes that end, and objects that are dropped, with transfers on their way: no crash, no hang, no word more."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

SLACK = float(os.environ.get("KVXFER_TEST_SLACK", "1"))
BEGIN = """
    import asyncio, gc, os, sys, tempfile, threading, warnings, weakref
    import numpy as np
    from kvxfer.errors import WrongThread
    from kvxfer.native.engine import Engine, EngineConfig, OpKind
    from kvxfer.native._shim import lib

    MIB = 1 << 20
    directory = tempfile.TemporaryDirectory(prefix="kvx")

    def engine():
        made = Engine(
            EngineConfig(engine_id=os.urandom(16), transports=("TRANSPORT",), socket_dir=directory.name, copy_threads=1)
        )
        made.attach(asyncio.get_running_loop(), lambda event: None)
        return made

    async def pair():
        there, here = engine(), engine()
        memory = np.full(64 * MIB, 7, dtype=np.uint8)
        source = here.alloc(64 * MIB)
        target = there.register(memory.ctypes.data, memory.nbytes)
        grant = there.grant(target.id, 0, target.length, 3)
        [way] = [one for one in there.transports if one.name == "TRANSPORT"]
        peer, connected = here.connect(way.index, way.endpoint)
        assert (await connected).status == 0
        handle, imported = here.import_(
            peer, grant=grant.id, generation=grant.generation, length=grant.length, access=3, key=grant.key
        )
        assert (await imported).status == 0
        return there, here, memory, source, handle

    def start(here, source, handle):
        futures = []
        for _ in range(8):
            outcome = here.submit_one(OpKind.PUT, source.id, handle, 0, 0, source.length)
            if isinstance(outcome[1], asyncio.Future):
                futures.append(outcome[1])
        assert futures
        return futures
"""
ENDS = {
    "the interpreter ends": """
        async def main():
            global kept
            kept = await pair()
            start(kept[1], kept[3], kept[4])
        warnings.simplefilter("ignore", ResourceWarning)
        asyncio.run(main())
    """,
    "sys.exit in a callback of the loop": """
        async def main():
            kept = await pair()
            start(kept[1], kept[3], kept[4])
            asyncio.get_running_loop().call_soon(sys.exit, 0)
            await asyncio.sleep(60)
        warnings.simplefilter("ignore", ResourceWarning)
        asyncio.run(main())
    """,
    "close on another thread is refused": """
        async def main():
            there, here, memory, source, handle = await pair()
            futures = start(here, source, handle)
            refused = []
            def other():
                for call in (here.close, lambda: here.cancel(1), here.counters, lambda: here.release(source.id)):
                    try:
                        call()
                    except WrongThread:
                        refused.append(call)
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            assert len(refused) == 4
            assert [event.status for event in await asyncio.gather(*futures)] == [0] * len(futures)
            here.close()
            there.close()
        asyncio.run(main())
    """,
    "the initiator is collected": """
        async def main():
            there, here, memory, source, handle = await pair()
            futures = start(here, source, handle)
            asyncio.get_running_loop().remove_reader(lib.kvx_engine_fd(here._engine))
            seen = weakref.ref(here)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                del here, futures
                for _ in range(3):
                    gc.collect()
            assert any(issubclass(one.category, ResourceWarning) for one in told)
            told.clear()  # a warning holds what it is about
            assert seen() is None
            canary = np.full(memory.shape, 0xA5, dtype=np.uint8)
            memory[:] = canary
            await asyncio.sleep(0.3)
            assert np.array_equal(memory, canary), "a byte came after the engine was gone"
            there.close()
        asyncio.run(main())
    """,
    "a child of fork ends": """
        async def main():
            there, here, memory, source, handle = await pair()
            futures = start(here, source, handle)
            child = os.fork()
            if child == 0:
                del here, there
                gc.collect()
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert [event.status for event in await asyncio.gather(*futures)] == [0] * len(futures)
            here.close()
            there.close()
        asyncio.run(main())
    """,
}


@pytest.mark.once
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("end", ENDS)
def test_ends_with_transfers_on_their_way(end: str, transport: str) -> None:
    program = textwrap.dedent(BEGIN.replace("TRANSPORT", transport)) + textwrap.dedent(ENDS[end])
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", program],
        capture_output=True,
        text=True,
        timeout=30 * SLACK,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr == ""

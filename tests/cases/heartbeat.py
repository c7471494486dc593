"""Whether anything held up the event loop, or the interpreter, and for how long."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Beat:
    """The longest time between two turns: of a task on the loop, and of another Python thread."""

    longest_s: float = 0.0
    thread_longest_s: float = 0.0


@asynccontextmanager
async def heartbeat(every_s: float = 0.001) -> AsyncIterator[Beat]:
    """Measures while the block runs."""
    beat, stop = Beat(), threading.Event()

    async def turn() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(every_s)
            now = time.perf_counter()
            beat.longest_s, last = max(beat.longest_s, now - last), now

    def thread_turn() -> None:
        last = time.perf_counter()
        while not stop.wait(every_s):
            now = time.perf_counter()
            beat.thread_longest_s, last = max(beat.thread_longest_s, now - last), now

    thread = threading.Thread(target=thread_turn)
    thread.start()
    turning = asyncio.ensure_future(turn())
    try:
        await asyncio.sleep(0)
        yield beat
        await asyncio.sleep(every_s)
    finally:
        stop.set()
        turning.cancel()
        thread.join()

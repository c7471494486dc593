"""The worker side: a thread with kvxfer's client, and the hooks that vLLM's model runner calls in each step.

The engine's thread never waits for a transfer, except where vLLM is about to write blocks anew that are still read. A
daemon that is not there yet does not keep the engine from starting: the worker goes on looking for it, and until then
what is asked of it fails at once, as the policy says.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import uvloop

from kvxfer import logs
from kvxfer.client import Client
from kvxfer.config import load
from kvxfer.errors import DaemonUnavailable, KvxferError
from kvxfer.integrations.vllm.caches import Caches
from kvxfer.integrations.vllm.orders import Orders
from kvxfer.integrations.vllm.params import Rank
from kvxfer.integrations.vllm.results import ResultBatch, Results
from kvxfer.integrations.vllm.settings import Settings
from kvxfer.integrations.vllm.transfers import Transfers
from kvxfer.memory.numa import threads_at

logger = logs.logger("vllm.kvxfer")  # below vllm's own, so that its handler prints it

START_S = 10.0  # how long the engine waits at its start for the daemon
MEMORY_S = 120.0  # and then for its memory to be known to it
RETRY_S = 0.5
STOP_S = 10.0
PROBE_AFTER_S = 30.0


class Worker:
    """One worker's part of the connector. Every method is called by the engine's thread."""

    def __init__(self, settings: Settings, *, channel: str, rank: int) -> None:
        self._settings = settings
        # Raises `ConfigError` here, so that the engine does not start with options that nobody knows.
        self._config = load(flags={"engine_cpus": "all", **settings.options}).config
        self._channel = channel
        self._rank = rank
        self._results = Results()
        self._caches: Caches | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()
        self._linked = threading.Event()  # the daemon is there
        self._known = threading.Event()  # the caches are reachable
        self._thread: threading.Thread | None = None
        self._transfers: Transfers | None = None
        self._reached: Rank | None = None
        self._news: Rank | None = None
        self._streaming = False
        self._streams: set[str] = set()  # of which the engine has not said that they are over
        self._sent_early: set[str] = set()  # streams that ended before that

    def start(self, caches: Caches) -> None:
        """Reach the daemon and make these caches known to it; without a daemon, go on looking for it."""
        self._caches = caches
        self._thread = threading.Thread(target=self._run, daemon=True, name="kvxfer")
        self._thread.start()
        ready = self._known.wait(START_S) or (self._linked.is_set() and self._known.wait(MEMORY_S))
        if not ready:
            logger.warning("no daemon of kvxfer serves this node yet; this engine goes on without one until it does")

    def _run(self) -> None:
        # The engine pins its threads to cores of its own; this one would run on the same core as the model.
        with threads_at(self._config.engine_cpus), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        told = ""
        while not self._ended.is_set():
            try:
                await self._serve()
            except KvxferError as error:
                if str(error) != told:
                    logger.warning("kvxfer cannot be used yet: %s", error)
                told = str(error)
            try:
                async with asyncio.timeout(RETRY_S):
                    await self._ended.wait()
            except TimeoutError:
                continue

    async def _serve(self) -> None:
        """From a daemon that is there to the end of this worker."""
        settings = self._settings
        async with Client(settings.socket or None, config=self._config, name=self._channel) as client:
            self._linked.set()
            assert self._caches is not None
            parts = await self._caches.open(client, own_memory=settings.own_memory)
            transfers = Transfers(
                client, settings, parts, channel=self._channel, rank=self._rank, results=self._results
            )
            await transfers.start()
            self._transfers = transfers
            self._news = self._reached = transfers.rank
            self._known.set()
            try:
                await self._ended.wait()
            finally:
                self._transfers = None
                await transfers.aclose()

    def stop(self) -> None:
        """End every transfer, then the client and its thread."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._ended.set)
        thread.join(STOP_S)
        if thread.is_alive():
            logger.error("kvxfer's thread did not end within %g s", STOP_S)

    # -- each step of the engine -----------------------------------------------------------------------------------

    @property
    def reached(self) -> Rank | None:
        """Where this worker is; None until it found its daemon."""
        return self._reached

    def news(self) -> Rank | None:
        """`reached`, once, when it was learned after the start."""
        taken, self._news = self._news, None
        return taken

    def follow(self, orders: Orders) -> None:
        """Begin what the scheduler side ordered."""
        self._streaming = bool(orders.stream)
        self._streams |= orders.stream.keys()
        if not (orders.send or orders.receive or orders.stream or orders.dropped or orders.cancelled):
            return
        if self._transfers is None:
            self._refuse(orders)
        else:
            self._call(self._transfers.follow, orders)

    def _refuse(self, orders: Orders) -> None:
        """Nobody can move a byte without the daemon; nothing is kept, and the engine goes on."""
        for request_id in (*orders.send, *orders.stream):
            self._results.sent(request_id)
        for request_id, receive in orders.receive.items():
            blocks = {block for table in receive.tables for block in table.blocks}
            self._results.failure(DaemonUnavailable.code)
            self._results.received(request_id, failed=True, blocks=blocks)

    def stop_streams(self, request_ids: set[str]) -> None:
        """Return when nobody reads the blocks of these requests any more."""
        self._streams -= request_ids
        self._sent_early -= request_ids
        if request_ids and self._transfers is not None:
            self._wait(self._transfers.stop_streams(request_ids))

    def layer_ready(self, name: str) -> None:
        """This layer of the step that runs is computed."""
        if self._streaming and self._transfers is not None:
            self._call(self._transfers.layer_ready, name)

    def finished(self, request_ids: set[str]) -> ResultBatch:
        """These requests are over in the engine; what has ended here since the last step."""
        if request_ids and self._transfers is not None:
            self._call(self._transfers.stop, set(request_ids))
        self._streams -= request_ids
        batch = self._results.take()
        batch.sent |= self._sent_early
        self._sent_early = batch.sent & self._streams  # the engine frees blocks of requests only that it has ended
        batch.sent -= self._sent_early
        return batch

    def record(self) -> dict[str, Any] | None:
        """Measurements since the last step; see `results`."""
        return self._results.take_record()

    def _call(self, work: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(work, *arguments)

    def _wait(self, work: Any) -> None:
        assert self._loop is not None
        waiting: Future[None] = asyncio.run_coroutine_threadsafe(work, self._loop)
        waiting.result(PROBE_AFTER_S)


def channel_of(engine_id: str, rank: int) -> str:
    """The mailbox of one worker."""
    return f"vllm/{engine_id}/{rank}"

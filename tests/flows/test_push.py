"""`Push`: layers at once and twice, commits and aborts that meet, and other sides that do not answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest

import kvxfer
from kvxfer.dataplane.transfer import Transfer
from kvxfer.errors import ClosedError, KvxferError, LeaseExpired, PeerLost, TransferTimeout, UsageError
from kvxfer.flows.push import LAYERS_IN_FLIGHT_MAX
from kvxfer.wire.messages import PostingEvent
from tests.nodes import until
from tests.support.nodes import make_cache, scattered, small_geometry, two_nodes

TABLE = scattered(1, 8, 40, 16)


async def both_caches(a: kvxfer.Client, b: kvxfer.Client, **changes: Any) -> tuple[kvxfer.KVCache, kvxfer.KVCache]:
    return await make_cache(a, small_geometry(**changes), 8), await make_cache(b, small_geometry(**changes), 8)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_many_layers_at_once_are_each_pushed_once(transport: str) -> None:
    layers = 4 * LAYERS_IN_FLIGHT_MAX
    async with two_nodes([transport]) as (a, b):
        source, sink = await both_caches(a, b, layers=layers)
        source.regions[0].array[:] = 3
        async with b.offer("r", sink, TABLE) as landing:
            async with a.push("r", to=b.addresses, cache=source, table=TABLE) as push:
                twice = [push.layer(index % layers) for index in range(2 * layers)]
                results = await asyncio.gather(*twice, return_exceptions=True)
                refused = [result for result in results if isinstance(result, BaseException)]
                assert len(refused) == layers
                assert all(isinstance(error, UsageError) for error in refused)
            await landing.wait()
        assert push.bytes_done == layers * 2 * 40 * 2 * 8 * 4


async def test_a_cancelled_layer_can_be_pushed_again() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, sink = await both_caches(a, b)
        async with b.offer("r", sink, TABLE) as landing:
            async with a.push("r", to=b.addresses, cache=source, table=TABLE) as push:
                for _ in range(LAYERS_IN_FLIGHT_MAX):
                    await push._room.acquire()
                waiting = asyncio.ensure_future(push.layer(0))
                await asyncio.sleep(0.01)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
                for _ in range(LAYERS_IN_FLIGHT_MAX):
                    push._room.release()
                await push.layers()
            await landing.wait()


async def test_a_push_that_lacks_layers_is_not_committed() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, sink = await both_caches(a, b)
        async with b.offer("r", sink, TABLE) as landing:
            with pytest.raises(UsageError, match="layers"):
                async with a.push("r", to=b.addresses, cache=source, table=TABLE) as push:
                    await push.layer(1)
            with pytest.raises(KvxferError):
                await asyncio.wait_for(landing.wait(), 5)
            assert not landing.committed


@pytest.mark.parametrize("way", ["push", "pull"])
async def test_an_owner_that_does_not_answer_is_waited_for_until_the_deadline(way: str) -> None:
    async with two_nodes(["tcp"]) as (a, b):
        source, sink = await both_caches(a, b)

        async def never(*_: Any) -> Any:
            await asyncio.Event().wait()

        if way == "push":
            a.plane._connections._resolve_once = never  # type: ignore[method-assign]
            async with b.offer("r", sink, TABLE):
                with pytest.raises(TransferTimeout):
                    await a.push("r", to=b.addresses, cache=source, table=TABLE, timeout=0.1).__aenter__()
        else:
            b.plane._connections._resolve_once = never  # type: ignore[method-assign]
            with pytest.raises(TransferTimeout):
                async with a.publish("r", source, TABLE) as ticket:
                    await b.pull(ticket, sink, TABLE, timeout=0.1)
        await until(lambda: (b.reservations.pinned_blocks, b.reservations.quarantined_blocks) == (0, 0))


async def test_layers_of_many_segments_are_moved_in_several_pieces() -> None:
    async with two_nodes(["shm"], segments_max=7) as (a, b):
        source, sink = await make_cache(a, small_geometry(), 8), await make_cache(b, small_geometry(layout="BNHPD"), 8)
        source.regions[0].array[:] = 3
        async with b.offer("r", sink, TABLE) as landing:
            async with a.push("r", to=b.addresses, cache=source, table=TABLE) as push:
                await push.layers()
            assert [layer async for layer in landing] == [0, 1, 2]
        sink.regions[0].array[:] = 0
        async with a.publish("p", source, TABLE) as ticket:
            pulled = await b.pull(ticket, sink, TABLE)
        assert pulled.bytes == push.bytes_done == int((sink.regions[0].array == 3).sum())


async def test_closing_the_client_ends_an_open_push() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, sink = await both_caches(a, b)
        async with b.offer("r", sink, TABLE) as landing:
            push = await a.push("r", to=b.addresses, cache=source, table=TABLE).__aenter__()
            await push.layer(0)
            await a.aclose()
            with pytest.raises(ClosedError):
                await push.layer(1)
            with pytest.raises(ClosedError):
                await push.__aexit__(None, None, None)
            with pytest.raises(KvxferError):
                await asyncio.wait_for(landing.wait(), 2)


async def test_a_second_push_of_the_same_moves_nothing_and_disturbs_nothing() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source, sink = await both_caches(a, b)
        async with b.offer("r", sink, TABLE) as landing:
            async with a.push("r", to=b.addresses, cache=source, table=TABLE) as push:
                await push.layer(0)
                async with a.push("r", to=b.addresses, cache=source, table=TABLE, wait_s=0.05) as second:
                    await (await second.layer(2))
                assert second.covered
                assert second.bytes_done == 0
                assert not push.covered
                for layer in (1, 2):
                    await push.layer(layer)
            await landing.wait()
        with pytest.raises(UsageError):
            await push.__aenter__()


@pytest.mark.parametrize(
    ("what", "detail", "raised"), [("withdrawn", "committed", None), ("expired", "", LeaseExpired), ("", "", PeerLost)]
)
@pytest.mark.parametrize("acknowledged", [True, False])
async def test_news_of_a_commit_may_overtake_its_acknowledgement(
    what: str, detail: str, raised: type[KvxferError] | None, acknowledged: bool
) -> None:
    """The other side leaves as soon as it has committed, and says so by way of the daemons."""
    async with two_nodes(["tcp"]) as (a, b):
        source, sink = await both_caches(a, b)
        async with b.offer("r", sink, TABLE) as landing:
            push = a.push("r", to=b.addresses, cache=source, table=TABLE)
            notify = push._notify

            def overtaken(tag: int, value: int, timeout: float) -> Transfer:
                commit = notify(tag, value, timeout)
                if detail == "committed":  # nobody says so before it is true
                    limit = time.monotonic() + 10
                    while not landing.committed and time.monotonic() < limit:
                        b.plane.drain()
                if what:
                    push._on_claim(PostingEvent(posting="0" * 32, claim=1, what=what, detail=detail))
                if not acknowledged:
                    commit._fail(PeerLost("the connection ended"))
                return commit

            push._notify = overtaken  # type: ignore[method-assign]
            expected = contextlib.nullcontext() if acknowledged or raised is None else pytest.raises(raised)
            with expected:
                async with push as tx:
                    await tx.layers()
            await landing.wait()

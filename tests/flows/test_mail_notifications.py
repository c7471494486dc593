"""Notifications: whose descriptor, how long one waits, and what ends it."""

from __future__ import annotations

import asyncio

import pytest

import kvxfer
from kvxfer.errors import ClosedError, TransferTimeout, UsageError
from tests.support.nodes import two_nodes


async def test_only_ones_own_descriptors_and_one_listener_each() -> None:
    async with two_nodes(["shm"]) as (a, b):
        ours, theirs = (await a.alloc(64)).descriptor(), (await b.alloc(64)).descriptor()
        with pytest.raises(UsageError):
            a.notifications(theirs)
        with pytest.raises(UsageError):
            a.notifications("name")  # type: ignore[arg-type]
        async with a.notifications(ours):
            with pytest.raises(UsageError):
                await a.notifications(ours).__aenter__()
        async with a.notifications(ours):
            pass


async def test_waiting_ends_by_timeout_by_leaving_and_by_closing() -> None:
    async with kvxfer.local() as client:
        region = await client.alloc(64)
        described = region.descriptor("w")
        told = client.notifications(described)
        with pytest.raises(ClosedError):
            await told.next(timeout=5)
        async with told:
            with pytest.raises(TransferTimeout):
                await told.next(timeout=0.01)
            cancelled = asyncio.ensure_future(told.next(timeout=5))
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            await client.put(region, described, visible=True, notify=2**64 - 1)
            assert await told.next(timeout=5) == 2**64 - 1
            waiting = asyncio.ensure_future(told.next(timeout=60))
            await asyncio.sleep(0)
            await client.aclose()
            with pytest.raises(ClosedError):
                await asyncio.wait_for(waiting, 5)
            with pytest.raises(ClosedError):
                await told.next(timeout=5)


@pytest.mark.parametrize("bad", [-1, 2**64, 1.0, "1", None, True])
async def test_values_that_do_not_fit_are_refused_before_anything_moves(bad: object) -> None:
    async with kvxfer.local() as client:
        region = await client.alloc(64)
        with pytest.raises(UsageError):
            client.put(region, region.descriptor("w"), visible=True, notify=bad)  # type: ignore[arg-type]
        assert client.plane.engine.counters().inflight == 0

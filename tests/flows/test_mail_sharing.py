"""Names: their end, their renewal, and what a lookup may believe."""

from __future__ import annotations

import msgpack
import pytest

import kvxfer
from kvxfer.errors import ProtocolError, UnknownTransfer, UsageError
from tests.nodes import until
from tests.steps import pair


async def test_a_name_ends_with_its_block_and_takes_its_grant_along() -> None:
    async with pair("shm") as both:
        region = await both.b.alloc(64)
        async with await both.b.share(region, "name") as share:
            assert (await both.a.lookup("name", node=both.b.addresses)).grant == share.descriptor.grant
            with pytest.raises(UsageError):
                await both.b.share(region, "name")
        await share.withdraw()
        with pytest.raises(UsageError):
            await share.renew(1)
        with pytest.raises(UnknownTransfer):
            await both.a.lookup("name", node=both.b.addresses)
        assert both.b.plane.engine.counters().grants == 0


async def test_a_name_whose_lease_ended_is_forgotten_here_too() -> None:
    async with kvxfer.local() as client:
        share = await client.share(await client.alloc(64), "name", lease_s=0.05)
        await until(lambda: share.ended == "expired")
        assert client.control._postings == {}
        await share.withdraw()
        assert client.plane.engine.counters().grants == 0


async def test_leaving_after_the_client_or_the_region_is_quiet() -> None:
    async with kvxfer.local() as client:
        region, other = await client.alloc(64), await client.alloc(64)
        async with await client.share(region, "one"):
            await region.release()
        async with await client.share(other, "two"):
            await client.aclose()


@pytest.mark.parametrize("bad", [b"\xc1", msgpack.packb([]), msgpack.packb({"v": 1}), msgpack.packb({"v": 2})])
async def test_a_name_that_holds_nonsense_is_its_owners_fault(bad: bytes) -> None:
    async with pair("shm") as both:
        await both.b.control.post("region", "bad", bad, lease_s=5, claims_max=0, on_event=lambda _: None)
        with pytest.raises(ProtocolError):
            await both.a.lookup("bad", node=both.b.addresses)
        await until(lambda: both.servers[1].registry.counts().claims == 0)


async def test_bad_names_and_times_are_refused_and_grant_nothing() -> None:
    async with kvxfer.local() as client:
        region = await client.alloc(64)
        for name in ("", "x" * 257, None):
            with pytest.raises(UsageError):
                await client.share(region, name)  # type: ignore[arg-type]
        for lease in (0, -1, float("nan"), "1", 1e9):
            with pytest.raises(UsageError):
                await client.share(region, "name", lease_s=lease)  # type: ignore[arg-type]
        for wait in (-1, float("nan"), float("inf"), "1", None):
            with pytest.raises(UsageError):
                await client.lookup("name", wait_s=wait)  # type: ignore[arg-type]
        with pytest.raises(UsageError):
            await client.share(region, "name", "x")
        assert client.plane.engine.counters().grants == 0

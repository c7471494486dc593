"""A card that is lost while bytes are under way: nobody can say that nothing moves, so nothing is said to be over."""

from __future__ import annotations

import asyncio

import pytest

from kvxfer.native.engine import OpKind
from kvxfer.native.status import StatusCode
from tests.native.hixl_process import MIB, Near, control, other, settle, within
from tests.native.simulated import simulated

pytestmark = pytest.mark.once


@simulated()
async def test_copies_of_a_lost_card_stay_in_quarantine() -> None:
    async with other(device_ipc=True) as owner, Near(device_ipc=True) as near:
        mine = near.alloc(MIB, fill=7)
        grant = await owner.call("offer", length=MIB, kind="HBM", device=1)
        import_ = await near.import_(await near.connect(owner.endpoint), grant)
        assert await near.move(OpKind.PUT, mine, import_) == 0
        control(STALL=1)
        await settle()
        under_way = await near.begin(OpKind.PUT, mine, import_)
        _, waiting = near.start(OpKind.PUT, mine, import_)
        control(STALL=1, DEVICE_LOST="0")
        assert (await within(waiting)).status == StatusCode.DEVICE, "what has not begun does not wait for the card"
        revoking = asyncio.ensure_future(owner.call("revoke", grant=grant["grant"]))
        ready, _ = await asyncio.wait([under_way, revoking], timeout=1.0)  # longer than cancel_ms and a few attempts
        assert not ready, "the card may still write"
        control()  # it can be asked again
        assert (await within(under_way)).status != 0
        assert await within(revoking) == 0

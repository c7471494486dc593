"""Owners of hixl that lie about where their grants lie: whoever believes them must not be turned against others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kvxfer.native.engine import EventKind, GrantInfo, OpKind
from kvxfer.native.status import StatusCode
from tests.native import frames, kvxd
from tests.native.hixl_process import MIB, Near, other, told, within
from tests.native.kvxd import Frame, Type
from tests.native.kvxl import Liar, Location, liar, located
from tests.native.simulated import simulated

pytestmark = pytest.mark.once
PUT, GET = OpKind.PUT, OpKind.GET


@simulated()
async def test_who_is_not_in_our_process_names_no_address_of_ours() -> None:
    """It was granted some memory of ours, so it has heard our boot id and process, and can guess addresses."""
    async with Near(device_ipc=True) as near:
        mine, secret, given = (near.alloc(MIB, fill=value) for value in (1, 2, 3))
        grant: GrantInfo = near.engine.grant(given.id, 0, MIB, 3)
        truth = await located(near.endpoint, told(grant, MIB))
        assert truth.process != 0
        for key in (b"", b"no such key"):
            lie = replace(truth, address=secret.address, key=key, arena_length=64 * MIB, epoch=7)
            async with liar(lie) as owner:
                import_ = await near.import_(await near.connect(owner.endpoint), owner.grant)
                for way in (PUT, GET):
                    assert await near.move(way, mine, import_) != 0
                assert (near.read(secret) == 2).all()
                assert (near.read(mine) == 1).all()


@simulated()
async def test_engines_of_one_process_are_believed() -> None:
    async with Near(device_ipc=True) as here, Near(device_ipc=True) as there:
        mine, far = here.alloc(MIB, fill=1), there.alloc(MIB, fill=2)
        grant = told(there.engine.grant(far.id, 0, MIB, 3), MIB)
        import_ = await here.import_(await here.connect(there.endpoint), grant)
        assert await here.move(PUT, mine, import_) == 0
        assert (there.read(far) == 1).all()


@simulated()
async def test_only_the_process_that_has_an_engines_name_is_written_to() -> None:
    """A later LOCATION with the same name and another epoch: that of a process in the place of one that is gone.

    Whoever still has a grant of the one that is gone would write into the memory of the new one.
    """
    async with other() as owner, Near() as near:
        grant = await owner.call("offer", length=MIB, kind="HBM", device=1)
        truth = replace(await located(owner.endpoint, grant), boot_id=bytes(16))
        mine = near.alloc(MIB, fill=1)
        async with liar(truth, epoch=100) as gone, liar(truth, epoch=200) as new:
            old = await near.import_(await near.connect(gone.endpoint), gone.grant)
            idle = await near.import_(await near.connect(gone.endpoint), gone.grant)
            assert await near.move(PUT, mine, old) == 0
            fresh = await near.import_(await near.connect(new.endpoint), new.grant)
            near.fill(mine, 2)
            assert await near.move(PUT, mine, fresh) == 0
            near.fill(mine, 3)
            for import_ in (old, idle):
                assert await near.move(PUT, mine, import_) == StatusCode.PEER_LOST
            assert (await owner.call("look", grant=grant["grant"]))[2] == MIB
            assert await near.move(GET, mine, fresh) == 0
            assert (near.read(mine) == 2).all()


@simulated()
async def test_an_owner_that_is_full_says_so() -> None:
    """And nothing else ends with that."""
    async with Near(device_ipc=True, grants_max=2) as there, Near(device_ipc=True) as here:
        mine, far = here.alloc(MIB, fill=1), there.alloc(MIB, fill=2)
        made: GrantInfo = there.engine.grant(far.id, 0, MIB, 3)
        grant = told(made, MIB)
        peer = await here.connect(there.endpoint)
        imports = [await here.import_(peer, grant) for _ in range(2)]
        _, done = here.engine.import_(peer, **(grant | {"key": made.key}))
        assert (await within(done)).status == StatusCode.REFUSED
        assert await here.move(PUT, mine, imports[0]) == 0


GOOD = Location(address=1 << 40, length=MIB)
LIES = {
    "a registration that is still to come": {"version": 2},
    "no engine": {"engine": b""},
    "a name": {"engine": b"localhost:1"},
    "another length": {"length": MIB - 1},
    "no length": {"length": 0},
    "beyond the end": {"address": 2**64 - MIB + 1},
    "plain memory": {"kind": 0},
    "a kind that is none": {"kind": 3},
    "a key without an end": {"key": b"k" * 80},
    "a name without an end": {"engine": b"1" * 64},
    "outside of what is mapped": {"key": b"k", "arena_length": MIB, "arena_offset": 1},
    "far outside": {"key": b"k", "arena_length": MIB, "arena_offset": 2**64 - 1},
}


@simulated()
async def test_locations_that_make_no_sense() -> None:
    async with Near() as near, liar(GOOD) as owner:
        grant = owner.grant
        peer = await near.connect(owner.endpoint)
        for what, changes in ({"the truth": {}} | LIES).items():
            owner.says = replace(GOOD, **changes)  # type: ignore[arg-type]
            _, done = near.engine.import_(peer, **(grant | {"key": owner.key}))
            event = await within(done)
            assert event.kind == EventKind.IMPORT
            assert event.status == (0 if what == "the truth" else StatusCode.VERSION), what


async def noted(near: Near, owner: Liar, says: Callable[[Frame], tuple[Frame, bytes]]) -> int:
    """The outcome of a notification that is answered so, and whether the connection outlives it."""
    owner.answer = says
    peer = await near.connect(owner.endpoint)
    import_ = await near.import_(peer, owner.grant)
    region = near.alloc(MIB)
    started = near.engine.submit(PUT, region.id, import_, np.zeros((0, 3), dtype=np.uint64), notify=(1, 2))
    status = int((await within(started[1])).status)
    if status == StatusCode.PEER_LOST:
        assert (await near.event(EventKind.PEER_DOWN)).id == peer
    await within(near.engine.close_peer(peer))
    return status


def ack(asked: Frame, **changes: int) -> Frame:
    return Frame(type=Type.ACK, **({"op": asked.op, "segment": kvxd.SEGMENT_UNKNOWN} | changes))


@simulated()
async def test_every_status_of_an_answer_to_a_notification() -> None:
    def saying(status: int, key: bytes, flags: int = 0) -> Callable[[Frame], tuple[Frame, bytes]]:
        return lambda asked: (ack(asked, status=status, flags=flags), key)

    async with Near() as near, liar(GOOD) as owner:
        for status in frames.STATUSES:
            good = status == 0 or status in frames.REFUSALS
            gone = status in frames.BARE_REFUSALS - {StatusCode.KEY}
            found = [
                await noted(near, owner, saying(status, owner.key)),
                await noted(near, owner, saying(status, bytes(16), kvxd.F_BARE)),
                await noted(near, owner, saying(status, bytes(16))),
            ]
            wanted = [status if good else StatusCode.PEER_LOST, StatusCode.UNKNOWN if gone else StatusCode.PEER_LOST]
            assert found == [*wanted, StatusCode.PEER_LOST], status


@simulated()
async def test_answers_to_numbers_that_were_never_given() -> None:
    async with Near() as near, liar(GOOD) as owner:
        for type_ in (Type.ACK, Type.LOCATION, Type.REVOKE):
            for op in (0, 99, 2**64 - 1):
                made = Frame(
                    type=type_,
                    op=op,
                    segment=kvxd.SEGMENT_UNKNOWN if type_ == Type.ACK else 0,
                    segments=GOOD.units() if type_ == Type.LOCATION else (),
                )
                assert await noted(near, owner, lambda asked, made=made: (made, owner.key)) == StatusCode.PEER_LOST
        assert await noted(near, owner, lambda asked: (Frame(type=Type.PONG, op=1), owner.key)) == StatusCode.PEER_LOST


@simulated()
async def test_only_with_the_key_a_device_is_said_to_be_lost() -> None:
    """Anybody in the path can say that it is not well: then the transfer fails, and nothing is said of the card."""

    def saying(key: bytes, *, proved: bool, status: int = StatusCode.DEVICE) -> Callable[[Frame], tuple[Frame, bytes]]:
        return lambda asked: (Frame(type=Type.PONG, op=asked.op, status=status, tag=asked.tag if proved else 0), key)

    async with Near() as near, liar(GOOD) as owner:
        mine = near.alloc(MIB, fill=1)
        for pong, wanted in (
            (saying(owner.key, proved=True), StatusCode.DEVICE),
            (saying(bytes(16), proved=False), StatusCode.LINK),
            (saying(bytes(16), proved=True), StatusCode.PEER_LOST),
            (saying(owner.key, proved=True, status=StatusCode.NOMEM), StatusCode.PEER_LOST),
        ):
            owner.pong = pong
            peer = await near.connect(owner.endpoint)
            assert await near.move(PUT, mine, await near.import_(peer, owner.grant)) == wanted
            await within(near.engine.close_peer(peer))

"""Connections and imports: who may share them, what a dead one leaves, and how an unwanted one goes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kvxfer.errors import KvxferError, PeerUnreachable, UnknownTransfer, WrongKey
from kvxfer.native.engine import Event
from tests.nodes import until
from tests.test_dataplane import sides

TRANSPORTS = ["shm", "tcp"]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_descriptor_that_only_resembles_another_does_not_get_its_import(tmp_path: Path, transport: str) -> None:
    async with sides(tmp_path, (transport,)) as (a, b):
        genuine = b.region.descriptor("w")
        await a.start(genuine, 4096)
        forged = replace(genuine, key=b"\0" * 16)
        with pytest.raises(WrongKey):
            await a.start(forged, 4096)
        elsewhere = replace(genuine, key=b"\1" * 16, endpoints={transport: ("127.0.0.1:1",)})
        with pytest.raises(KvxferError):
            await a.start(elsewhere, 4096)
        await a.start(genuine, 4096)


async def test_a_forged_descriptor_that_came_first_does_not_stand_for_the_genuine_one(tmp_path: Path) -> None:
    async with sides(tmp_path, ("tcp",)) as (a, b):
        genuine = b.region.descriptor("w")
        # An attacker's engine under the victim's id: the first import of that grant must not be the last.
        async with sides(tmp_path, ("tcp",)) as (_, mallory):
            bait = mallory.region.descriptor("w")
            forged = replace(bait, engine_id=genuine.engine_id, grant=bait.grant)
            await a.start(forged, 4096)
            a.region.array[:] = 5
            mallory.region.array[:] = 0
            await a.start(genuine, 4096)
            assert b.region.array[:4096].all()
            assert not mallory.region.array.any()


@pytest.mark.parametrize("text", ["", "nonsense", "127.0.0.1:0", "[::1", "\ud800:1", "1.2.3.4:99999", "x" * 255])
async def test_endpoints_that_make_no_sense_are_the_owners_fault(tmp_path: Path, text: str) -> None:
    async with sides(tmp_path, ("tcp",)) as (a, b):
        described = replace(b.region.descriptor("w"), endpoints={"tcp": (text or "?",)})
        with pytest.raises(PeerUnreachable):
            await a.start(described, 4096)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_dead_connection_is_replaced(tmp_path: Path, transport: str) -> None:
    async with sides(tmp_path, (transport,)) as (a, b):
        await a.start(b.region.descriptor("w"), 4096)
        reach = a.plane._reach
        [route] = reach._routes.values()
        # It ends behind our back: the engine knows, the news has not been looked at.
        await a.plane.engine.close_peer(route.peer)
        transfer = await a.start(b.region.descriptor("w"), 4096)
        assert transfer.state == "done"
        assert [old.peer for old in reach._routes.values()] != [route.peer]


async def test_the_end_of_a_connection_that_nobody_knew_yet_is_remembered(tmp_path: Path) -> None:
    async with sides(tmp_path, ("tcp",)) as (a, b):
        engine, reach = a.plane.engine, a.plane._reach
        connect = engine.connect
        ended: list[int] = []

        def connect_and_lose(transport: int, endpoint: str) -> tuple[int, asyncio.Future[Event]]:
            peer, completion = connect(transport, endpoint)
            if not ended and endpoint.startswith("127."):
                # Both events in one batch: the coroutine hears of the connection after its end.
                completion.add_done_callback(lambda _: reach.peer_down(peer))
                ended.append(peer)
            return peer, completion

        engine.connect = connect_and_lose  # type: ignore[method-assign]
        with pytest.raises(PeerUnreachable, match="ended"):
            await a.start(b.region.descriptor("w"), 4096)
        assert reach._routes == {}
        await a.start(b.region.descriptor("w"), 4096)


async def test_an_import_of_a_connection_that_went_meanwhile_is_not_kept(tmp_path: Path) -> None:
    async with sides(tmp_path, ("tcp",)) as (a, b):
        await a.start(b.region.descriptor("w"), 4096)
        reach, described = a.plane._reach, b.region.descriptor("w")
        import_ = a.plane.engine.import_

        def import_and_lose(peer: int, **grant: object) -> tuple[int, asyncio.Future[Event]]:
            handle, completion = import_(peer, **grant)  # type: ignore[arg-type]
            a.plane.engine.import_ = import_  # type: ignore[method-assign]
            completion.add_done_callback(lambda _: reach.peer_down(peer))
            return handle, completion

        a.plane.engine.import_ = import_and_lose  # type: ignore[method-assign]
        assert (await a.start(described, 4096)).state == "done"
        assert reach.ready(described) is not None
        assert (await a.start(described, 4096)).state == "done"


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_forgotten_imports_go_at_once_or_after_their_last_user(tmp_path: Path, transport: str) -> None:
    async with sides(tmp_path, (transport,), window_ops_max=1) as (a, b):
        described = b.region.descriptor("w")
        await a.start(described, 4096)
        assert a.plane.engine.counters().imports == 1
        a.plane.forget(described)
        assert a.plane.engine.counters().imports == 0
        await a.start(described, 4096)
        transfers = [a.start(described) for _ in range(5)]
        a.plane.forget(described)
        for transfer in transfers:
            assert (await transfer).state == "done"
        await until(lambda: a.plane.engine.counters().imports == 0)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_what_is_forgotten_while_it_is_being_made_is_not_kept(tmp_path: Path, transport: str) -> None:
    async with sides(tmp_path, (transport,)) as (a, b):
        described = b.region.descriptor("w")
        preparing = asyncio.ensure_future(a.plane.prepare(described))
        await asyncio.sleep(0)
        preparing.cancel()
        await asyncio.gather(preparing, return_exceptions=True)
        a.plane.forget(described)
        await until(lambda: not a.plane._reach._resolving)
        assert a.plane.engine.counters().imports == 0
        # Forgotten while somebody else still waits for it: he gets one all the same.
        other = b.region.descriptor("w")
        transfer = a.start(other, 4096)
        await asyncio.sleep(0)
        a.plane.forget(other)
        assert (await transfer).state == "done"


async def test_an_owner_that_revoked_is_asked_anew(tmp_path: Path) -> None:
    async with sides(tmp_path, ("tcp",)) as (a, b):
        described = b.region.descriptor("w")
        await a.start(described, 4096)
        await b.region.revoke(described)
        for _ in range(2):
            with pytest.raises(KvxferError) as refused:
                await a.start(described, 4096)
        assert isinstance(refused.value, UnknownTransfer)
        assert a.plane.engine.counters().imports == 0

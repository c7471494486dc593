"""Connections and imports: who may share them, what a dead one leaves, and how an unwanted one goes."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from kvxfer.dataplane.connections import RESET_DELAYS_S
from kvxfer.errors import KvxferError, PeerIncarnationMismatch, PeerUnreachable, UnknownTransfer, WrongKey
from kvxfer.native.engine import Engine, Event, MemoryKind, OpKind
from kvxfer.native.status import StatusCode, error_for
from tests.dataplane.test_plane import sides
from tests.nodes import until

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
            with pytest.raises(PeerIncarnationMismatch):  # her engine has said who it is
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
        reach = a.plane._connections
        [connection] = reach._connections.values()
        # It ends behind our back: the engine knows, the news has not been looked at.
        await a.plane.engine.close_peer(connection.peer)
        transfer = await a.start(b.region.descriptor("w"), 4096)
        assert transfer.state == "done"
        assert [old.peer for old in reach._connections.values()] != [connection.peer]


async def test_the_end_of_a_connection_that_nobody_knew_yet_is_remembered(tmp_path: Path) -> None:
    async with sides(tmp_path, ("tcp",)) as (a, b):
        engine, reach = a.plane.engine, a.plane._connections
        connect = engine.connect
        ended: list[int] = []
        losses = 100

        def connect_and_lose(transport: int, endpoint: str, secret: bytes | None) -> tuple[int, asyncio.Future[Event]]:
            peer, completion = connect(transport, endpoint, secret)
            if len(ended) < losses and endpoint.startswith("127."):
                # Both events in one batch: the coroutine hears of the connection after its end.
                completion.add_done_callback(lambda _: reach.peer_down(peer))
                ended.append(peer)
            return peer, completion

        engine.connect = connect_and_lose  # type: ignore[method-assign]
        with pytest.raises(PeerUnreachable, match="ended"):
            await a.start(b.region.descriptor("w"), 4096)
        assert reach._connections == {}
        assert len(ended) == len(RESET_DELAYS_S) + 1, "it is tried again a few times"
        ended, losses = [], 1
        assert (await a.start(b.region.descriptor("w"), 4096)).state == "done"
        assert len(ended) == 1


async def test_an_import_of_a_connection_that_went_meanwhile_is_not_kept(tmp_path: Path) -> None:
    async with sides(tmp_path, ("tcp",)) as (a, b):
        await a.start(b.region.descriptor("w"), 4096)
        reach, described = a.plane._connections, b.region.descriptor("w")
        import_ = a.plane.engine.import_

        def import_and_lose(peer: int, **grant: object) -> tuple[int, asyncio.Future[Event]]:
            handle, completion = import_(peer, **grant)  # type: ignore[arg-type]
            a.plane.engine.import_ = import_  # type: ignore[method-assign]
            completion.add_done_callback(lambda _: reach.peer_down(peer))
            return handle, completion

        a.plane.engine.import_ = import_and_lose  # type: ignore[method-assign]
        assert (await a.start(described, 4096)).state == "done"
        assert reach.ready(described, MemoryKind.DRAM) is not None
        assert (await a.start(described, 4096)).state == "done"


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_forgotten_imports_go_at_once_or_after_their_last_user(tmp_path: Path, transport: str) -> None:
    async with sides(tmp_path, (transport,), window_ops_max=1) as (a, b):
        described = b.region.descriptor("w")
        await a.start(described, 4096)
        assert a.plane.engine.counters().imports == 1
        a.plane.drop_import(described)
        assert a.plane.engine.counters().imports == 0
        await a.start(described, 4096)
        transfers = [a.start(described) for _ in range(5)]
        a.plane.drop_import(described)
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
        a.plane.drop_import(described)
        await until(lambda: not a.plane._connections._resolving)
        assert a.plane.engine.counters().imports == 0
        # Forgotten while somebody else still waits for it: he gets one all the same.
        other = b.region.descriptor("w")
        transfer = a.start(other, 4096)
        await asyncio.sleep(0)
        a.plane.drop_import(other)
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


# -- the choice -------------------------------------------------------------------------------------------------------


def counted(engine: Engine) -> dict[str, dict[str, int]]:
    """What the counters say of choices: transport -> what became of it -> how often."""
    names = ("chosen", "passed_memory", "passed_checksum", "passed_not_offered", "passed_unreachable", "passed_refused")
    return {
        row.name: {name: getattr(row, name) for name in names if getattr(row, name)}
        for row in engine.counters().transports
    }


async def test_a_choice_is_one_line_and_every_grant_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvxfer.reach")
    async with sides(tmp_path, ("shm", "tcp"), ("tcp",)) as (a, b):
        for _ in range(3):
            assert (await a.start(b.region.descriptor("w"), 4096)).transport == "tcp"
        lines = [record.getMessage() for record in caplog.records if record.name == "kvxfer.reach"]
        assert lines == [
            f"engine {b.plane.engine_id}, dram to dram: by tcp; passed over: shm: the owner does not offer it"
        ]
        assert counted(a.plane.engine) == {"loop": {}, "shm": {"passed_not_offered": 3}, "tcp": {"chosen": 3}}
        await a.start(a.region.descriptor("w"), 4096)
        assert counted(a.plane.engine)["loop"] == {"chosen": 1}


async def test_another_need_finds_the_import_that_there_is(tmp_path: Path) -> None:
    async with sides(tmp_path, ("shm", "tcp")) as (a, b):
        described, reach = b.region.descriptor("w"), a.plane._connections
        assert reach.ready(described, MemoryKind.DRAM) is None
        found = await reach.resolve(described, MemoryKind.DRAM)
        for local in (None, MemoryKind.DRAM, MemoryKind.PINNED):
            for check in (False, True):
                assert reach.ready(described, local, check) is found
                assert await reach.resolve(described, local, check) is found
        assert len(found.selection_keys) == 6
        assert counted(a.plane.engine)["shm"] == {"chosen": 4}  # a look for any memory chose nothing
        reach.drop(found)
        assert reach.ready(described, None) is None
        assert not reach._chosen


async def test_a_notification_goes_the_way_of_the_bytes(tmp_path: Path) -> None:
    async with sides(tmp_path, ("shm", "tcp")) as (a, b):
        described = replace(b.region.descriptor("w"), endpoints={"tcp": b.region.descriptor("w").endpoints["tcp"]})
        await a.start(described, 4096)
        assert (await a.plane.prepare(replace(described, endpoints=b.region.descriptor("w").endpoints))).name == "tcp"
        assert a.plane.engine.counters().imports == 1


async def test_what_a_transport_finds_out_at_the_transfer_leads_to_the_next_one(tmp_path: Path) -> None:
    async with sides(tmp_path, ("shm", "tcp")) as (a, b):
        submit_one, engine = a.plane.engine.submit_one, a.plane.engine

        def refuse_by_shm(kind: OpKind, region: int, import_: int, *span: int, **more: object) -> object:
            if engine.mapping(import_) is not None:
                raise error_for(StatusCode.UNSUPPORTED, what="submit")
            return submit_one(kind, region, import_, *span, **more)  # type: ignore[arg-type]

        engine.submit_one = refuse_by_shm  # type: ignore[method-assign,assignment]
        described = b.region.descriptor("w")
        for _ in range(2):
            assert (await a.start(described, 4096)).transport == "tcp"
        [choice] = a.plane.choices.values()
        assert choice.transport == "tcp"
        assert "cannot do it" in choice.passed_over[0]
        assert counted(engine)["shm"] == {"chosen": 1, "passed_refused": 1}
        assert engine.counters().imports == 1


async def test_when_the_only_transport_cannot_the_error_names_it(tmp_path: Path) -> None:
    async with sides(tmp_path, ("shm",)) as (a, b):

        def refuse(*_: object, **__: object) -> object:
            raise error_for(StatusCode.UNSUPPORTED, what="submit")

        a.plane.engine.submit_one = refuse  # type: ignore[method-assign,assignment]
        with pytest.raises(PeerUnreachable, match=r"dram to dram; shm .*cannot do it"):
            await a.start(b.region.descriptor("w"), 4096)


async def test_what_the_owner_offers_and_this_machine_lacks_is_a_reason(tmp_path: Path) -> None:
    async with sides(tmp_path, ("tcp",)) as (a, b):
        a.plane.engine.unavailable["hixl"] = "no card in this machine"
        described = b.region.descriptor("w")
        await a.start(replace(described, endpoints={**described.endpoints, "hixl": ("127.0.0.1:1",)}), 4096)
        [choice] = a.plane.choices.values()
        assert choice.passed_over == ("hixl: not available here: no card in this machine",)

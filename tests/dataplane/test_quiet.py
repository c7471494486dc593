"""The next transfer over a connection that is dying, or that something on the way has forgotten."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvxfer.dataplane import quiet
from kvxfer.dataplane.plane import WorkRequest
from kvxfer.descriptors import RemoteDescriptor
from kvxfer.errors import PeerLost
from kvxfer.native.engine import OpKind
from tests.conftest import slack
from tests.dataplane.test_plane import Side, sides
from tests.nodes import until
from tests.support.frames import DATA
from tests.support.proxy import CUT, DOWN, RESET, SILENCE, UP, Proxy, proxy

LENGTH = 4096


@asynccontextmanager
async def through_proxy(
    directory: Path, **options: object
) -> AsyncIterator[tuple[Side, Side, Proxy, RemoteDescriptor]]:
    """Two sides with a proxy between, and a descriptor of the second that leads through it."""
    async with sides(directory, ("tcp",), **{"tcp_streams": 1, **options}) as (a, b):
        described = b.region.descriptor("rw")
        host, _, port = described.endpoints["tcp"][0].rpartition(":")
        async with proxy((host, int(port)), DATA) as between:
            yield a, b, between, replace(described, endpoints={"tcp": (between.endpoint,)})


def age(side: Side) -> None:
    """Nothing was heard over its connections for a long time."""
    for connection in side.plane._connections._connections.values():
        connection.heard -= 2 * quiet.PROBE_AFTER_S


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of a quiet connection is not waited for long."""
    monkeypatch.setattr(quiet, "ANSWER_S", 0.2 * slack())


@pytest.mark.parametrize("kind", OpKind)
async def test_a_connection_whose_peer_has_closed_takes_no_new_work(tmp_path: Path, kind: OpKind) -> None:
    """The owner's half closes while the next small transfers are on their way: each of them succeeds."""
    async with through_proxy(tmp_path) as (a, _, between, target):
        for _ in range(40):
            await a.start(target, LENGTH, kind)
            between.half_close_all(DOWN)
            await asyncio.sleep(0)  # uvloop ends it in its next turn
            transfer = await a.start(target, LENGTH, kind)
            assert transfer.state == "done"
            await until(lambda: between.live <= 1)


async def test_a_put_that_had_not_begun_goes_over_a_new_connection(tmp_path: Path) -> None:
    async with through_proxy(tmp_path) as (a, b, between, target):
        await a.start(target, LENGTH)
        before = between.accepted
        between.reset_all()
        await asyncio.sleep(0)  # the reset is sent in this turn of the loop; the news of it comes at the next, at best
        await asyncio.sleep(0)
        await a.start(target, LENGTH)
        assert between.accepted > before
        assert bytes(b.region.array[:LENGTH]) == bytes(a.region.array[:LENGTH])


@pytest.mark.parametrize("times", [1, 2])
async def test_a_get_of_which_nothing_moved_is_tried_once_more(tmp_path: Path, times: int) -> None:
    async with through_proxy(tmp_path) as (a, _, between, target):
        await a.start(target, LENGTH, OpKind.GET)
        between.rule(UP, "GET", RESET, times=times)
        transfer = a.start(target, LENGTH, OpKind.GET)
        if times == 1:
            await transfer
            assert transfer.attempt == 2
        else:
            with pytest.raises(PeerLost) as lost:
                await transfer
            assert lost.value.fields["attempt"] == 2


async def test_a_put_that_has_begun_is_never_sent_twice(tmp_path: Path) -> None:
    """What has left may still be written there: after a second attempt, and after what came after that."""
    async with through_proxy(tmp_path) as (a, _, between, target):
        await a.start(target, LENGTH)
        cut = between.rule(UP, "PUT", CUT)
        with pytest.raises(PeerLost) as lost:
            await a.start(target, LENGTH)
        assert lost.value.fields["attempt"] == 1
        assert cut.seen == 1, "no second PUT came"


async def test_a_get_with_a_notice_is_not_repeated(tmp_path: Path) -> None:
    async with through_proxy(tmp_path) as (a, _, between, target):
        await a.start(target, LENGTH, OpKind.GET)
        between.rule(UP, "GET", RESET)
        span = (0, 0, LENGTH)
        part = WorkRequest(kind=OpKind.GET, region=a.region.id, descriptor=target, span=span, notify=(1, 2))
        with pytest.raises(PeerLost):
            await a.plane.start((part,), timeout=5, peer="test")


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("kind", OpKind)
async def test_a_forgotten_connection_is_replaced_before_a_byte_moves(tmp_path: Path, kind: OpKind) -> None:
    async with through_proxy(tmp_path) as (a, b, between, target):
        await a.start(target, LENGTH, kind)
        age(a)
        frames = dict(between.frames)
        between.rule(UP, "*", SILENCE)  # this connection, not those that come after it
        started = time.monotonic()
        transfers = [a.start(target, LENGTH, kind, timeout=5 * slack()) for _ in range(8)]
        for transfer in transfers:
            await transfer
        assert time.monotonic() - started < 2 * slack()
        assert between.accepted == 2, "one new connection for all of them"
        name = "PUT" if kind == OpKind.PUT else "GET"
        assert between.frames[UP, name] == frames[UP, name] + 8, "each was sent once"
        assert all(transfer.attempt == 1 for transfer in transfers)
        await until(lambda: b.plane.engine.attached(target.grant) == 1)


@pytest.mark.usefixtures("soon")
async def test_a_quiet_connection_that_answers_is_kept(tmp_path: Path) -> None:
    async with through_proxy(tmp_path) as (a, b, between, target):
        for _ in range(5):
            await a.start(target, LENGTH)
            age(a)
        assert between.accepted == 1
        await until(lambda: b.plane.engine.attached(target.grant) == 1)


@pytest.mark.usefixtures("soon")
async def test_a_new_grant_over_a_forgotten_connection(tmp_path: Path) -> None:
    async with through_proxy(tmp_path) as (a, b, between, target):
        await a.start(target, LENGTH)
        age(a)
        between.rule(UP, "*", SILENCE)
        other = replace(b.region.descriptor("w"), endpoints=target.endpoints)
        await a.start(other, LENGTH, timeout=5 * slack())
        assert between.accepted == 2


@pytest.mark.usefixtures("soon")
async def test_an_owner_that_only_stood_still_keeps_its_connection(tmp_path: Path) -> None:
    """Neither the old connection nor a new one gets an answer for a while: whichever comes first is used."""
    async with through_proxy(tmp_path) as (a, _, between, target):
        await a.start(target, LENGTH)
        age(a)
        between.pause()
        transfer = a.start(target, LENGTH, timeout=10 * slack())
        await until(lambda: between.accepted == 2)
        between.resume()
        await transfer
        await a.start(target, LENGTH)
        assert between.accepted == 2
        await until(lambda: between.live == 1)


@pytest.mark.usefixtures("soon")
async def test_when_nobody_answers_the_old_connection_is_used_as_it_is(tmp_path: Path) -> None:
    async with through_proxy(tmp_path) as (a, _, between, target):
        await a.start(target, LENGTH)
        age(a)
        between.refusing = True
        between.pause()
        transfer = a.start(target, LENGTH, timeout=10 * slack())
        await asyncio.sleep(0.5 * slack())
        assert not transfer.done
        between.resume()
        await transfer
        assert between.live == 1


@pytest.mark.usefixtures("soon")
async def test_cancelled_while_it_asks(tmp_path: Path) -> None:
    async with through_proxy(tmp_path) as (a, _, between, target):
        await a.start(target, LENGTH)
        age(a)
        between.pause()
        transfer = a.start(target, LENGTH)
        await asyncio.sleep(0)
        await transfer.cancel()
        assert transfer.state == "cancelled"
        between.resume()
        await a.start(target, LENGTH)

"""K17: notices may come early, late, twice or malformed; ids are opaque, and that nobody knows one is said at once."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from typing import Any

import pytest

import kvxfer
from kvxfer.dataplane.exports import UnexpectedQueue
from kvxfer.dataplane.plane import WorkRequest
from kvxfer.errors import KvxferError, UnknownTransfer
from kvxfer.geometry import BlockTable
from kvxfer.native.engine import OpKind
from kvxfer.wire import tags
from kvxfer.wire.messages import Report
from tests.cases.facts import limit, within
from tests.cases.harness import BOTH
from tests.nodes import node, until, worker
from tests.support.nodes import make_cache, small_geometry, two_nodes

pytestmark = [pytest.mark.once, pytest.mark.timeout(120)]
TABLE = BlockTable.of(range(4), tokens=64)


async def say(client: kvxfer.Client, descriptor: Any, tag: int, value: int = 0) -> None:
    part = WorkRequest(kind=OpKind.PUT, region=0, descriptor=descriptor, notify=(tag, value))
    await client.plane.start([part], timeout=5, peer="test")


@BOTH
async def test_c74_a_notice_before_anybody_listens_is_kept(transport: str) -> None:
    async with two_nodes([transport]) as (a, b):
        region, target = await a.alloc(4096), await b.alloc(4096)
        described = target.descriptor("w")
        for value in (1, 2, 3):
            await a.put(region, described, visible=True, notify=value)
        await asyncio.sleep(0.1)
        async with b.notifications(described) as told:
            with within(0.2, "what was kept"):
                assert [await told.next(timeout=1) for _ in range(3)] == [1, 2, 3]
            with pytest.raises(kvxfer.errors.TransferTimeout):
                await told.next(timeout=0.05)  # each once
        assert b.plane.unexpected_notifications == 0


@BOTH
async def test_c74_a_release_before_its_claim_was_announced(transport: str) -> None:
    async with two_nodes([transport]) as (a, b):
        source, target = await make_cache(a, small_geometry(), 4), await make_cache(b, small_geometry(), 4)
        async with a.publish("r", source, TABLE) as ticket:
            [handle] = a.control._postings.values()
            loop, tell, announced = asyncio.get_running_loop(), handle.on_event, []

            def late(event: Any) -> None:
                loop.call_later(0.1, lambda: (announced.append(loop.time()), tell(event)))

            handle.on_event = late
            released: list[float] = []
            ticket._ended.add_done_callback(lambda _: released.append(loop.time()))  # type: ignore[union-attr]
            await b.pull(ticket.to_json(), target, TABLE)
            assert await asyncio.wait_for(ticket.wait_released(), limit(2)) == "released"
            assert len(released) == 1, "exactly once"
            assert released[0] - announced[0] <= limit(0.2)
        assert not a.plane.engine.counters().grants


def test_c74_what_is_kept_is_bounded_in_number_and_age() -> None:
    given_up: Counter[str] = Counter()
    kept: UnexpectedQueue[int] = UnexpectedQueue(kept_max=10, per_key_max=4, kept_s=5)

    def lost(reason: str, _: int) -> None:
        given_up[reason] += 1

    for number in range(5):
        kept.keep(1, number, 0.0, lost)
    assert given_up == {"too_many": 1}
    for key in range(2, 9):
        kept.keep(key, key, 1.0, lost)
    assert len(kept) <= 10
    assert given_up == {"too_many": 5}, "the oldest key made room"
    assert kept.take(5, 2.0, lost) == [5]
    assert kept.take(5, 2.0, lost) == [], "handed over once"
    kept.expire(7.0, lost)
    assert len(kept) == 0
    assert given_up["nobody_listened"] == 6


# -- C75 --------------------------------------------------------------------------------------------------------


@BOTH
async def test_c75_notices_that_fit_nothing(transport: str) -> None:
    failures: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    async with two_nodes([transport]) as (a, b):
        source, target = await make_cache(a, small_geometry(), 4), await make_cache(b, small_geometry(), 4)
        plane, lent = a.plane, []
        export = plane.memory.export
        plane.memory.export = lambda *how: lent.append(export(*how)) or lent[-1]  # type: ignore[method-assign,func-returns-value]
        async with a.publish("r", source, TABLE, lease_s=30) as ticket:
            described = lent[0]
            kinds = (tags.RELEASE, tags.LAYER, tags.COMMIT, 4, 0, 255)
            for _ in range(3):  # each three times
                for kind in reversed(kinds):  # the end before the beginning
                    for claim in (0, 77, tags.CLAIM_MAX):  # ids that nobody knows
                        await say(b, described, tags.pack(kind, claim, 5), 2**64 - 1)
            await until(lambda: plane.unexpected_notifications == 3 * 6 * 3)
            wanted = {
                ("release", "unknown_claim"): 9,
                ("layer", "not_of_a_pull"): 9,
                ("commit", "not_of_a_pull"): 9,
                ("unknown", "not_of_a_pull"): 27,
            }
            assert plane.unexpected.counts == wanted
            assert ticket.outcome == ""
            source.regions[0].array[:] = 6
            await b.pull(ticket.to_json(), target, TABLE)
            assert await ticket.wait_released() == "released"
        assert (target.regions[0].array == 6).all(), "later transfers are exact"
        with pytest.raises(KvxferError):  # after its end
            await say(b, described, tags.pack(tags.RELEASE, 1))
    assert not failures


async def test_c75_the_counts_of_workers_are_in_the_metrics() -> None:
    """Of those that have ended as well; and no words but ours become labels."""
    async with node() as server:

        def shown(value: int) -> bool:
            line = 'kvxfer_unexpected_notifications_total{reason="unknown_claim",type="release"}'
            return f"{line} {value}.0" in server._scrape().body.decode()

        for total in (2, 4):
            async with kvxfer.Client(server.socket_path, config=server.config) as client:
                for _ in range(2):
                    client.plane.unexpected.add("release", "unknown_claim")
                await until(lambda total=total: shown(total))  # type: ignore[misc]
        async with worker(server) as liar:
            liar.link.send(Report(unexpected={f"word {n}": 1 for n in range(30)} | {"release unknown_claim": -9}))
            await until(lambda: 'total{reason="other",type="other"} 30.0' in server._scrape().body.decode())
        assert shown(4)


# -- C76 --------------------------------------------------------------------------------------------------------


async def test_c76_an_id_is_made_once_and_opaque() -> None:
    async with two_nodes(["shm"]) as (a, b):
        source = await make_cache(a, small_geometry(), 4)
        found = set()
        for _ in range(2):
            async with a.publish("the same request", source, TABLE) as ticket:
                found.add(ticket.ticket.posting)
                assert ticket.to_dict()["posting"] == ticket.ticket.posting, "it is carried in the ticket"
                assert "request" not in ticket.ticket.posting
                ticket._end("withdrawn")
        assert len(found) == 2, "not derived from the request"
        assert "request_id" not in inspect.signature(b.pull).parameters, "a pull takes the ticket, nothing else"


@BOTH
async def test_c76_an_unknown_id_is_said_at_once(transport: str) -> None:
    async with two_nodes([transport]) as (a, b):
        source, target = await make_cache(a, small_geometry(), 4), await make_cache(b, small_geometry(), 4)
        async with a.publish("r", source, TABLE) as ticket:
            raw = ticket.to_dict()
            ticket._end("withdrawn")
        with within(1, "the answer"), pytest.raises(KvxferError):
            await b.pull(raw | {"posting": "0" * 32}, target, TABLE, timeout=limit(10))
        with within(1, "the answer"), pytest.raises(UnknownTransfer):
            async with a.push("nobody offered this", to=b.addresses, cache=source, table=TABLE, wait_s=0):
                pass
        with within(1.5, "a bounded wait"), pytest.raises(UnknownTransfer):
            async with a.push("nor this", to=b.addresses, cache=source, table=TABLE, wait_s=0.3):
                pass

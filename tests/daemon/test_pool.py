"""The peer pool: one link per peer, one attempt at a time, a breaker that opens and closes, and hard limits."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.config import Config
from kvxfer.daemon.pool import BACKOFF_S_MAX, BREAKER_FAILURES, CLOSED, HALF_OPEN, OPEN, Breaker, Pool
from kvxfer.errors import (
    ClosedError,
    IdentityMismatch,
    InternalError,
    KvxferError,
    NotKvxfer,
    PeerUnreachable,
    ResourceExhausted,
    TransferTimeout,
    UsageError,
)
from kvxfer.net.credentials import Credentials
from kvxfer.net.link import Link, LocalIdentity
from kvxfer.tasks import Deadline, TaskOwner
from kvxfer.wire import messages as m
from tests.nodes import node, small, until


class Rig:
    """A pool whose dialling is counted, delayed and made to fail by the test."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.dialled: list[tuple[str, ...]] = []
        self.failure: KvxferError | None = None
        self.gate: asyncio.Event | None = None
        self.now = 0.0
        self.needed: set[Link] = set()
        self.owner = TaskOwner("test")
        self.pool = Pool(
            self.dial,
            self.owner,
            config,
            clock=lambda: self.now,
            rng=random.Random(1),
            needed=lambda link: link in self.needed,
        )

    async def dial(self, addresses: Sequence[str], node_id: str) -> Link:
        self.dialled.append(tuple(addresses))
        if self.gate is not None:
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        identity = LocalIdentity(role="peer", node_id="c" * 32, incarnation="d" * 32)
        known = Credentials(self.config)
        return await Link.dial(addresses, identity, self.config, credentials=known, expected_node_id=node_id)

    async def get(self, addresses: Sequence[str], node_id: str = "", timeout: float = 5.0) -> Link:
        return await self.pool.get(addresses, node_id, Deadline.after(timeout))


@asynccontextmanager
async def rig(**changes: object) -> AsyncIterator[Rig]:
    made = Rig(small(**changes))
    try:
        yield made
    finally:
        await made.pool.aclose("test over")
        await made.owner.aclose()


# -- the breaker --------------------------------------------------------------------------------------------------


def test_breaker_opens_at_the_third_failure_and_closes_on_one_success() -> None:
    breaker = Breaker()
    for failure in range(1, BREAKER_FAILURES):
        breaker.failed(0.0, 0.5)
        assert breaker.state(0.0) == CLOSED, failure
        assert breaker.wait_s(0.0) == 0.0
    breaker.failed(0.0, 0.5)
    assert breaker.state(0.0) == OPEN
    wait_s = breaker.wait_s(0.0)
    assert 0 < wait_s <= BACKOFF_S_MAX
    assert breaker.state(wait_s) == HALF_OPEN
    breaker.succeeded()
    assert breaker.state(0.0) == CLOSED


@given(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=40))
def test_back_off_grows_and_never_exceeds_its_maximum(jitters: list[float]) -> None:
    breaker = Breaker()
    for jitter in jitters:
        backoff_s = breaker.failed(100.0, jitter)
        assert 0 < backoff_s <= BACKOFF_S_MAX
        assert breaker.next_at == 100.0 + backoff_s
    if len(jitters) > 10:
        assert backoff_s >= BACKOFF_S_MAX / 2


# -- the pool -----------------------------------------------------------------------------------------------------


async def test_many_callers_cause_one_connection() -> None:
    async with node() as there, rig() as r:
        r.gate = asyncio.Event()
        callers = [asyncio.ensure_future(r.get(there.addresses)) for _ in range(20)]
        await until(lambda: r.dialled)
        r.gate.set()
        links = set(await asyncio.gather(*callers))
        assert len(links) == 1
        assert len(r.dialled) == 1
        assert await r.get(there.addresses) in links
        assert await r.get((), there.node_id) in links


async def test_two_names_of_one_node_end_on_one_link() -> None:
    async with node() as there, rig() as r:
        port = there.addresses[0].rpartition(":")[2]
        first = await r.get(there.addresses)
        assert await r.get([f"localhost:{port}"]) is first
        assert r.pool.links == (first,)
        await until(lambda: len(there.peers.links) == 1)


async def test_lost_link_is_made_again() -> None:
    async with node() as there, rig() as r:
        first = await r.get(there.addresses)
        first.abort()
        second = await r.get(there.addresses)
        assert second is not first
        assert r.pool.states() == {CLOSED: 1, OPEN: 0, HALF_OPEN: 0}


async def test_restarted_peer_replaces_the_old_link() -> None:
    async with rig() as r:
        async with node() as before:
            first = await r.get(before.addresses)
            address = before.addresses[0]
        await until(lambda: first.closed.done())
        async with node(listen=address) as after:
            second = await r.get([address])
            assert second.peer.incarnation == after.incarnation != first.peer.incarnation


async def test_open_breaker_answers_at_once_and_heals_after_its_pause() -> None:
    async with node() as there, rig() as r:
        r.failure = PeerUnreachable("refused")
        for _ in range(BREAKER_FAILURES):
            with pytest.raises(PeerUnreachable, match="refused"):
                await r.get(there.addresses)
        for _ in range(5):
            with pytest.raises(PeerUnreachable, match="3 times in a row") as caught:
                await r.get(there.addresses)
        assert len(r.dialled) == BREAKER_FAILURES
        assert caught.value.fields["breaker"] == OPEN
        assert r.pool.states()[OPEN] == 1
        r.failure = None
        r.now += float(caught.value.fields["retry_in_s"] or 0) + 0.01
        assert r.pool.states()[HALF_OPEN] == 1
        await r.get(there.addresses)
        assert r.pool.states()[CLOSED] == 1


async def refused(r: Rig, addresses: Sequence[str], node_id: str = "") -> None:
    """So often that the breaker opens; then the node is back."""
    r.failure = PeerUnreachable("refused")
    for _ in range(BREAKER_FAILURES):
        with pytest.raises(PeerUnreachable, match="refused"):
            await r.get(addresses, node_id)
    assert r.pool.states()[OPEN] == 1
    r.failure = None


async def test_whoever_has_time_waits_for_the_attempt_that_finds_out() -> None:
    async with node() as there, rig(reconnect_min_s=0.05) as r:
        r.pool._clock = asyncio.get_running_loop().time
        await refused(r, there.addresses)
        with pytest.raises(PeerUnreachable, match="in a row"):  # it has less time than that takes
            await r.pool.get(there.addresses, "", Deadline.after(5), patience_s=0.001)
        callers = [r.pool.get(there.addresses, "", Deadline.after(5), patience_s=5.0) for _ in range(8)]
        assert len(set(await asyncio.gather(*callers))) == 1
        assert len(r.dialled) == BREAKER_FAILURES + 1
        assert r.pool.states()[CLOSED] == 1


async def test_the_attempt_that_was_waited_for_may_fail_and_a_deadline_ends_the_wait() -> None:
    async with rig(reconnect_min_s=0.05) as r:
        r.pool._clock = asyncio.get_running_loop().time
        await refused(r, ["127.0.0.1:9"])
        r.failure = NotKvxfer("it looks like HTTP")
        with pytest.raises(NotKvxfer):
            await r.pool.get(["127.0.0.1:9"], "", Deadline.after(5), patience_s=5.0)
        assert r.pool.states()[OPEN] == 1
        with pytest.raises(TransferTimeout) as found:
            await r.pool.get(["127.0.0.1:9"], "", Deadline.after(0.01), patience_s=5.0)
        assert found.value.fields["state"] == "connecting"


async def test_a_tool_that_looks_at_us_says_nothing_of_other_nodes() -> None:
    async with node() as there, rig() as r:
        await refused(r, there.addresses)
        r.pool.heard_from("")
        assert r.pool.states()[OPEN] == 1


@pytest.mark.parametrize("end", ["heard", "closed"])
async def test_who_waits_for_the_breaker_hears_that_the_node_is_back_or_the_pool_is_closed(end: str) -> None:
    async with node() as there, rig() as r:
        await refused(r, there.addresses, there.node_id)
        waiting = asyncio.ensure_future(r.pool.get((), there.node_id, Deadline.after(60), patience_s=60.0))
        await asyncio.sleep(0)
        if end == "heard":
            r.pool.heard_from(there.node_id)
            assert r.pool.states()[CLOSED] == 1
            assert (await asyncio.wait_for(waiting, 5)).usable
        else:
            await r.pool.aclose("the end")
            with pytest.raises(ClosedError):
                await asyncio.wait_for(waiting, 5)


async def test_single_failure_does_not_blacklist() -> None:
    async with node() as there, rig() as r:
        r.failure = PeerUnreachable("reset")
        with pytest.raises(PeerUnreachable):
            await r.get(there.addresses)
        r.failure = None
        await r.get(there.addresses)


async def test_one_log_line_per_second_for_a_peer_that_keeps_failing(caplog: pytest.LogCaptureFixture) -> None:
    async with rig() as r:
        r.failure = NotKvxfer("it looks like HTTP")
        pauses = []
        for _ in range(200):
            with contextlib.suppress(NotKvxfer, PeerUnreachable):
                await r.get(["127.0.0.1:9"])
            pauses.append(r.pool._peers["127.0.0.1:9"].breaker.wait_s(r.now))
            r.now += 0.05
        assert 2 <= len(caplog.records) <= 11
        assert "suppressed" in caplog.text
        assert max(pauses) > 2 * pauses[BREAKER_FAILURES - 1] > 0  # the pause grows


async def test_peer_that_dials_us_may_be_dialled_at_once() -> None:
    async with node() as there, rig() as r:
        r.failure = PeerUnreachable("refused")
        for _ in range(BREAKER_FAILURES):
            with pytest.raises(PeerUnreachable):
                await r.get(there.addresses, there.node_id)
        assert r.pool.states()[OPEN] == 1
        r.failure = None
        r.pool.heard_from(there.node_id)
        await r.get(there.addresses, there.node_id)


async def test_least_recently_used_idle_link_makes_room() -> None:
    async with node() as one, node() as two, node() as three, rig(peers_max=2) as r:
        first, second = await r.get(one.addresses), None
        r.now += 1
        second = await r.get(two.addresses)
        r.now += 1
        await r.get(one.addresses)
        r.now += 1
        third = await r.get(three.addresses)
        assert set(r.pool.links) == {first, third}
        assert second.closed.done()
        assert r.pool.evicted == 1


async def test_links_in_use_are_not_evicted() -> None:
    async with node() as one, node() as two, node() as three, rig(peers_max=2) as r:
        for peer in (one, two):
            r.needed.add(await r.get(peer.addresses))
        with pytest.raises(ResourceExhausted) as caught:
            await r.get(three.addresses)
        assert caught.value.fields["limit"] == 2
        assert caught.value.retryable
        r.needed.clear()
        await r.get(three.addresses)


async def test_out_of_descriptors_gives_up_an_idle_link_and_blames_nobody() -> None:
    async with node() as one, node() as two, rig() as r:
        idle = await r.get(one.addresses)
        dial, refusals = r.dial, [ResourceExhausted("too many open files", retryable=True)]

        async def scarce(addresses: Sequence[str], node_id: str) -> Link:
            if refusals:
                raise refusals.pop()
            return await dial(addresses, node_id)

        r.pool._dial = scarce
        second = await r.get(two.addresses)
        assert idle.closed.done()
        r.needed.add(second)
        for _ in range(BREAKER_FAILURES + 1):
            refusals.append(ResourceExhausted("too many open files", retryable=True))
            with pytest.raises(ResourceExhausted):
                await r.get(one.addresses)
        assert await r.get(one.addresses)


async def test_address_that_became_another_node_is_learned() -> None:
    async with rig() as r:
        async with node() as before:
            await r.get(before.addresses)
            port = before.addresses[0].rpartition(":")[2]
            await r.get([f"localhost:{port}"], before.node_id)
            await r.get([f"localhost:{port}"])
        async with node(listen=f"127.0.0.1:{port}") as after:
            with contextlib.suppress(IdentityMismatch):
                await r.get([f"localhost:{port}"])
            assert (await r.get([f"localhost:{port}"])).peer.node_id == after.node_id


async def test_idle_links_are_closed_in_time() -> None:
    async with node() as one, node() as two, rig(peer_idle_s=1) as r:
        idle, busy = await r.get(one.addresses), await r.get(two.addresses)
        r.needed.add(busy)
        r.now += 1.1
        await until(lambda: idle.closed.done())
        assert r.pool.links == (busy,)


async def test_deadline_ends_the_waiting_not_the_attempt() -> None:
    async with node() as there, rig() as r:
        r.gate = asyncio.Event()
        with pytest.raises(TransferTimeout):
            await r.get(there.addresses, timeout=0.02)
        r.gate.set()
        await r.get(there.addresses)
        assert len(r.dialled) == 1


async def test_cancelled_caller_does_not_disturb_the_others() -> None:
    async with node() as there, rig() as r:
        r.gate = asyncio.Event()
        callers = [asyncio.ensure_future(r.get(there.addresses)) for _ in range(3)]
        await until(lambda: r.dialled)
        callers[0].cancel()
        r.gate.set()
        assert len(set(await asyncio.gather(*callers[1:]))) == 1
        assert callers[0].cancelled()


async def test_closing_fails_whoever_waits_and_leaves_nothing() -> None:
    r = Rig(small())
    r.gate = asyncio.Event()
    waiting = asyncio.ensure_future(r.get(["127.0.0.1:9"]))
    await until(lambda: r.dialled)
    await r.pool.aclose("done")
    with pytest.raises(ClosedError):
        await waiting
    await r.owner.aclose()
    with pytest.raises(ClosedError):
        await r.get(["127.0.0.1:9"])
    assert len(asyncio.all_tasks()) == 1


async def test_unknown_node_without_an_address_is_unreachable() -> None:
    async with rig() as r:
        with pytest.raises(PeerUnreachable, match="no address"):
            await r.get((), "a" * 32)


async def test_kept_link_works_as_any_other() -> None:
    async with node() as there, rig() as r:
        r.pool.preconnect(there.addresses)
        await until(lambda: r.pool.links)
        reply = await (await r.get(there.addresses)).request(m.Echo(data=b"x"), timeout=5)
        assert reply == m.EchoReply(rid=reply.rid, data=b"x")  # type: ignore[attr-defined]


async def test_remembered_peers_are_bounded() -> None:
    async with rig(peers_max=1) as r:
        r.failure = PeerUnreachable("refused")
        for port in range(1, 20):
            with pytest.raises(PeerUnreachable):
                await r.get([f"127.0.0.1:{port}"])
        assert sum(r.pool.states().values()) <= 4


async def test_what_cannot_be_dialled_is_refused_before_it_is_remembered() -> None:
    async with rig() as r:
        for addresses in (["not an address"], ["0.0.0.0:1"], ["127.0.0.1:0"]):
            with pytest.raises(UsageError):
                await r.get(addresses)
            with pytest.raises(UsageError):
                r.pool.preconnect(addresses)
        assert sum(r.pool.states().values()) == 0


async def test_two_attempts_that_meet_at_one_node_leave_one_entry() -> None:
    async with node() as there, rig() as r:
        r.gate = asyncio.Event()
        by_address = asyncio.ensure_future(r.get(there.addresses))
        by_id = asyncio.ensure_future(r.get(there.addresses, there.node_id))
        await until(lambda: len(r.dialled) == 2)
        r.gate.set()
        first, second = await asyncio.gather(by_address, by_id)
        assert first is second
        assert r.pool.links == (first,)
        assert await r.get(there.addresses) is first
        await until(lambda: len(there.peers.links) == 1)


async def test_bug_while_dialling_ends_the_waiting() -> None:
    async with rig() as r:

        async def broken(addresses: Sequence[str], node_id: str) -> Link:
            raise RuntimeError("a bug")

        r.pool._dial = broken
        reported: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
        with pytest.raises(InternalError):
            await r.get(["127.0.0.1:9"])
        await until(lambda: reported)


async def test_a_new_address_is_tried_whatever_happened_at_the_old_one() -> None:
    async with rig() as r:
        r.failure = PeerUnreachable("refused")
        for _ in range(BREAKER_FAILURES):
            with pytest.raises(PeerUnreachable, match="refused"):
                await r.get(["127.0.0.1:1"], "c" * 32)
        with pytest.raises(PeerUnreachable, match="in a row"):
            await r.get(["127.0.0.1:1"], "c" * 32)
        with pytest.raises(PeerUnreachable, match="refused"):
            await r.get(["127.0.0.1:2"], "c" * 32)
        assert r.dialled[-1] == ("127.0.0.1:2",)


async def test_an_attempt_at_the_old_address_fails_nobody_who_knows_the_new_one() -> None:
    async with node() as there, rig() as r:
        r.gate, r.failure = asyncio.Event(), PeerUnreachable("refused")
        old = asyncio.ensure_future(r.get(["127.0.0.1:1"], there.node_id))
        await until(lambda: r.dialled)
        new = asyncio.ensure_future(r.get(there.addresses, there.node_id))
        await asyncio.sleep(0)
        r.gate.set()
        with pytest.raises(PeerUnreachable, match="refused"):
            await old
        r.failure = None
        assert (await new).peer.node_id == there.node_id


async def test_addresses_learnt_long_ago_do_not_replace_newer_ones() -> None:
    async with rig() as r:
        r.failure = PeerUnreachable("refused")
        for addresses, newest in (("127.0.0.1:1", False), ("127.0.0.1:2", True), ("127.0.0.1:1", False)):
            with pytest.raises(PeerUnreachable):
                await r.pool.get([addresses], "c" * 32, Deadline.after(5), newest=newest)
        assert r.dialled == [("127.0.0.1:1",), ("127.0.0.1:2",), ("127.0.0.1:2",)]

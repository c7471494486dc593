"""Daemons with real sockets: rendezvous within a node and between nodes, and what everybody is told when something
ends.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import msgpack
import pytest

from kvxfer.addresses import parse_address
from kvxfer.config import SOCKET_DIR_CHARS_MAX
from kvxfer.errors import (
    AccessDenied,
    AuthenticationError,
    ConfigError,
    IdentityMismatch,
    LeaseExpired,
    PeerBackpressure,
    PeerDraining,
    PeerIncarnationMismatch,
    PeerUnreachable,
    TooManyPending,
    UnknownTransfer,
    UsageError,
)
from kvxfer.net import link as link_module
from kvxfer.net.link import FLUSH_S, MESSAGES_PER_TURN, Link, LocalIdentity
from kvxfer.server import PING_KEY, Server
from kvxfer.wire import messages as m
from kvxfer.wire.codec import encode
from kvxfer.wire.framing import PREAMBLE
from tests.conftest import slack
from tests.nodes import SECRET, Worker, fast, node, small, until, worker

ENGINE = "e" * 32


def offer(key: str = "request", **changes: object) -> m.Post:
    return m.Post(**({"kind": "offer", "key": key, "body": b"body", "lease_s": 30.0, "claims_max": 1} | changes))


def claim(key: str = "request", node: tuple[str, ...] = (), **changes: object) -> m.Claim:
    return m.Claim(**({"kind": "offer", "key": key, "node": node, "engine_id": ENGINE} | changes))


def settle(claimed: m.Claimed, node: tuple[str, ...] = (), outcome: str = "done") -> m.Settle:
    return m.Settle(node=node, posting=claimed.posting, claim=claimed.claim, outcome=outcome)


# -- one node ---------------------------------------------------------------------------------------------------


async def test_offer_is_claimed_and_settled() -> None:
    async with node() as server, worker(server, "owner") as owner, worker(server, "claimant") as claimant:
        posted = await owner.ask(offer())
        claimed = await claimant.ask(claim())
        assert (claimed.posting, claimed.claim, claimed.body) == (posted.posting, 1, b"body")
        assert (claimed.node_id, claimed.incarnation) == (server.node_id, server.incarnation)
        told = await owner.inbox.take(m.PostingEvent, what="claimed")
        assert (told.posting, told.claim, told.engine_id) == (posted.posting, 1, ENGINE)
        await claimant.ask(settle(claimed))
        assert (await owner.inbox.take(m.PostingEvent, what="settled")).code == "done"
        server.registry.check()


async def test_claim_waits_for_its_posting_and_gives_up_in_time() -> None:
    async with node() as server, worker(server) as owner, worker(server) as claimant:
        waiting = asyncio.ensure_future(claimant.ask(claim(wait_s=5.0)))
        await until(lambda: server.registry.counts().waiting == 1)
        await owner.ask(offer())
        assert (await waiting).body == b"body"
        started = time.monotonic()
        with pytest.raises(UnknownTransfer):
            await claimant.ask(claim("other", wait_s=0.1))
        assert 0.1 <= time.monotonic() - started < 1 * slack()


async def test_a_worker_posts_no_landing() -> None:
    async with node() as server, worker(server) as owner:
        with pytest.raises(AccessDenied, match="posted by its daemon"):
            await owner.ask(m.Post(kind="landing", key="r", lease_s=5.0))
        assert server.registry.counts().postings == 1  # the ping region
        await owner.ask(offer())


async def test_lease_runs_out() -> None:
    async with node() as server, worker(server) as owner, worker(server) as claimant:
        await owner.ask(offer(lease_s=0.1))
        await owner.inbox.take(m.PostingEvent, what="expired")
        with pytest.raises(LeaseExpired):
            await claimant.ask(claim())


async def test_dead_worker_is_told_within_a_second() -> None:
    async with node() as server, worker(server) as claimant, worker(server) as owner:
        await owner.ask(offer())
        await claimant.ask(claim())
        started = time.monotonic()
        owner.link.abort()
        told = await claimant.inbox.take(m.PostingEvent, what="lost")
        assert told.code == "peer_lost"
        assert time.monotonic() - started < 1 * slack()
        await until(lambda: server.registry.counts().workers == 2)
        assert server.links_ended["worker", "peer_lost"] == 1


async def test_worker_that_computes_for_long_keeps_its_postings() -> None:
    patient = small()  # its own clock does not run while it computes
    async with node(**fast()) as server, worker(server, config=patient) as busy, worker(server) as other:
        await busy.ask(offer())
        busy.link._transport.pause_reading()  # type: ignore[union-attr]
        await asyncio.sleep(1.0)  # several times keepalive_s + dead_s
        assert (await other.ask(claim())).body == b"body"
        busy.link._transport.resume_reading()  # type: ignore[union-attr]
        await busy.inbox.take(m.PostingEvent, what="claimed")


async def test_dead_claimant_is_told_to_the_owner() -> None:
    async with node() as server, worker(server) as owner, worker(server) as claimant:
        await owner.ask(offer(kind="ticket"))
        posted = await owner.ask(offer(key="t", kind="ticket", claims_max=1))
        claimed = await claimant.ask(claim("", kind="ticket", posting=posted.posting, secret=posted.secret))
        claimant.link.abort()
        told = await owner.inbox.take(m.PostingEvent, what="lost")
        assert (told.posting, told.claim) == (posted.posting, claimed.claim)


async def test_mail_is_held_and_delivered() -> None:
    async with node() as server, worker(server) as sender, worker(server) as listener:
        await sender.ask(m.Mail(channel="c", data=b"early"))
        await listener.ask(m.Listen(channel="c"))
        await sender.ask(m.Mail(channel="c", data=b"late"))
        assert [(await listener.inbox.take(m.Delivery)).data for _ in range(2)] == [b"early", b"late"]
        await listener.ask(m.Unlisten(channel="c"))


async def test_slow_listener_is_the_senders_business_and_keeps_its_link() -> None:
    async with node() as server, worker(server) as sender, worker(server) as listener:
        await listener.ask(m.Listen(channel="c"))
        listener.link._transport.pause_reading()  # type: ignore[union-attr]
        sent = 0
        with pytest.raises(PeerBackpressure, match="listener"):
            for _ in range(32):
                await sender.ask(m.Mail(channel="c", data=bytes(1 << 20)))
                sent += 1
        assert sent > 0
        listener.link._transport.resume_reading()  # type: ignore[union-attr]
        for _ in range(sent):
            await listener.inbox.take(m.Delivery)
        await sender.ask(m.Mail(channel="c", data=b"again"))
        assert (await listener.inbox.take(m.Delivery)).data == b"again"


async def test_status_and_the_ping_region() -> None:
    async with node() as server, worker(server) as asker:
        status = msgpack.unpackb((await asker.ask(m.Status())).body)
        assert status["node_id"] == server.node_id
        assert status["addresses"] == list(server.addresses)
        claimed = await asker.ask(claim(PING_KEY, kind="region"))
        descriptor = msgpack.unpackb(claimed.body)
        assert (descriptor["length"], descriptor["access"]) == (1 << 20, "rw")


async def test_tool_may_look_and_not_touch() -> None:
    async with node() as server, worker(server, role="tool") as tool:
        assert (await tool.ask(m.Echo(data=b"x"))).data == b"x"
        with pytest.raises(AccessDenied):
            await tool.ask(claim(PING_KEY, kind="region"))


async def test_workers_are_bounded_at_the_maximum() -> None:
    async with node(workers_max=1) as server, worker(server) as first:
        with pytest.raises(TooManyPending) as refused:
            await Link.dial_unix(str(server.socket_path), LocalIdentity(role="worker"), server.config)
        assert refused.value.retryable
        assert (refused.value.fields["option"], refused.value.fields["limit"]) == ("workers_max", 1)
        assert "raise workers_max" in str(refused.value)
        assert "kvxfer serve" not in str(refused.value)
        assert (await first.ask(m.Echo(data=b"still here"))).data == b"still here"
        first.link.abort()
        await until(lambda: server.registry.counts().workers == 1)
        async with worker(server) as second:
            assert (await second.ask(m.Echo(data=b"x"))).data == b"x"


# -- two nodes --------------------------------------------------------------------------------------------------


async def test_claim_at_another_node_and_its_whole_life() -> None:
    async with node() as here, node() as there, worker(there) as owner, worker(here) as claimant:
        posted = await owner.ask(offer())
        claimed = await claimant.ask(claim(node=there.addresses, node_id=there.node_id, incarnation=there.incarnation))
        assert (claimed.posting, claimed.node_id) == (posted.posting, there.node_id)
        await owner.inbox.take(m.PostingEvent, what="claimed")
        assert here.registry.counts().routes == 1
        await claimant.ask(settle(claimed, there.addresses))
        assert (await owner.inbox.take(m.PostingEvent, what="settled")).code == "done"
        assert here.registry.counts().routes == 0
        assert len(here.pool.links) == 1
        for server in (here, there):
            server.registry.check()


async def test_one_link_for_many_requests_at_once() -> None:
    async with node() as here, node() as there, worker(here) as asker:
        replies = await asyncio.gather(*(asker.ask(m.Echo(node=there.addresses, data=b"x")) for _ in range(50)))
        assert len(replies) == 50
        assert (here.pool.connects, len(there.peers.links)) == (1, 1)


async def test_mail_to_another_node_names_its_source() -> None:
    async with node() as here, node() as there, worker(here) as sender, worker(there) as listener:
        await listener.ask(m.Listen(channel="c"))
        await sender.ask(m.Mail(node=there.addresses, channel="c", data=b"hello"))
        delivery = await listener.inbox.take(m.Delivery)
        assert (delivery.data, delivery.source) == (b"hello", here.node_id)


async def test_own_address_needs_no_link() -> None:
    async with node() as server, worker(server) as owner, worker(server) as claimant:
        await owner.ask(offer())
        claimed = await claimant.ask(claim(node=server.addresses))
        await claimant.ask(settle(claimed, server.addresses))
        await owner.inbox.take(m.PostingEvent, what="settled")
        assert server.pool.connects == 0


async def test_node_reaches_itself_by_another_name() -> None:
    async with node() as server, worker(server) as owner, worker(server) as claimant:
        await owner.ask(offer())
        by_name = (f"localhost:{parse_address(server.addresses[0]).port}",)
        claimed = await claimant.ask(claim(node=by_name))
        await claimant.ask(settle(claimed, by_name))
        await owner.inbox.take(m.PostingEvent, what="settled")
        server.registry.check()


async def test_dead_owner_is_told_to_a_claimant_at_another_node() -> None:
    async with node() as here, node() as there, worker(here) as claimant, worker(there) as owner:
        await owner.ask(offer())
        await claimant.ask(claim(node=there.addresses))
        started = time.monotonic()
        owner.link.abort()
        await claimant.inbox.take(m.PostingEvent, what="lost")
        assert time.monotonic() - started < 1 * slack()


async def test_dead_claimant_is_told_to_an_owner_at_another_node() -> None:
    async with node() as here, node() as there, worker(there) as owner, worker(here) as claimant:
        await owner.ask(offer())
        await claimant.ask(claim(node=there.addresses))
        await owner.inbox.take(m.PostingEvent, what="claimed")
        claimant.link.abort()
        assert (await owner.inbox.take(m.PostingEvent, what="lost")).code == "peer_lost"
        assert here.registry.counts().routes == 0


async def test_lost_daemon_link_orphans_both_sides_and_heals() -> None:
    async with node() as here, node() as there, worker(there) as owner, worker(here) as claimant:
        await owner.ask(offer())
        claimed = await claimant.ask(claim(node=there.addresses))
        here.pool.links[0].abort()
        await claimant.inbox.take(m.PostingEvent, what="orphaned")
        await owner.inbox.take(m.PostingEvent, what="orphaned")
        # The data path may have gone on: the settlement makes the link anew.
        await claimant.ask(settle(claimed, there.addresses))
        await owner.inbox.take(m.PostingEvent, what="settled")
        for server in (here, there):
            server.registry.check()


async def test_restarted_node_has_another_incarnation() -> None:
    async with node() as here, worker(here) as asker:
        async with node() as before:
            await asker.ask(m.Echo(node=before.addresses, data=b"x"))
            old, address = before.incarnation, before.addresses
        async with node(listen=address[0]) as after, worker(after) as owner:
            await owner.ask(offer())
            with pytest.raises(PeerIncarnationMismatch) as caught:
                await asker.ask(claim(node=address, incarnation=old))
            assert caught.value.fields["expected"] == old
            assert caught.value.fields["actual"] == after.incarnation
            assert (await asker.ask(claim(node=address))).body == b"body"


async def test_wrong_node_is_told_apart() -> None:
    async with node() as here, node() as there, worker(here) as asker:
        with pytest.raises(IdentityMismatch):
            await asker.ask(claim(node=there.addresses, node_id="9" * 32))


async def test_unreachable_node_names_each_candidate() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    async with node(**fast()) as here, worker(here) as asker:
        with pytest.raises(PeerUnreachable) as caught:
            await asker.ask(m.Echo(node=(f"127.0.0.1:{port}",), data=b"x"))
        assert caught.value.fields[f"127.0.0.1:{port}"] == "Connection refused"
        with pytest.raises(UsageError, match="address"):
            await asker.ask(m.Echo(node=("not an address",), data=b"x"))


async def test_forwarding_happens_once() -> None:
    async with node() as here, node() as there, node() as third, worker(here) as asker:
        await asker.ask(m.Echo(node=there.addresses, data=b"x"))
        with pytest.raises(UsageError, match="only once"):
            await here.pool.links[0].request(m.Echo(node=third.addresses, data=b"x"), timeout=5)


@pytest.mark.parametrize(("ours", "theirs"), [(SECRET, ""), ("", SECRET), (SECRET, "another secret of some length")])
async def test_wrong_secret_is_refused_in_both_directions(ours: str, theirs: str) -> None:
    async with node(secret=ours) as here, node(secret=theirs) as there, worker(here) as asker:
        with pytest.raises(AuthenticationError):
            await asker.ask(m.Echo(node=there.addresses, data=b"x"))
        assert not there.peers.links


async def test_same_secret_works() -> None:
    async with node(secret=SECRET) as here, node(secret=SECRET) as there, worker(here) as asker:
        assert (await asker.ask(m.Echo(node=there.addresses, data=b"x"))).data == b"x"


async def test_claim_granted_after_its_deadline_is_given_back() -> None:
    async with node() as here, node() as there, worker(there) as owner, worker(here) as asker:
        await asker.ask(m.Echo(node=there.addresses, data=b"x"))
        link = here.pool.links[0]
        link._give_up = lambda number: None  # type: ignore[method-assign]  # as if its message came too late
        with pytest.raises(TimeoutError):
            await link.request(claim(wait_s=5.0), timeout=0.02)
        await owner.ask(offer())
        assert (await owner.inbox.take(m.PostingEvent, what="settled")).code == "timeout"
        assert link.late_replies == 1


async def test_the_queues_of_all_links_are_bounded_together() -> None:
    """Far below the bound of each one; those who read least go, and nobody else is refused anything."""
    mib = 1 << 20
    async with node(link_queues_bytes_max=mib, http="127.0.0.1:0") as here, worker(here) as good:
        async with AsyncExitStack() as stack:
            silent = [await stack.enter_async_context(worker(here)) for _ in range(4)]
            for one in silent:
                one.link._transport.pause_reading()  # type: ignore[union-attr]
            for number in range(40):
                for one in silent:
                    if not one.link.closed.done():
                        one.link.notify(m.Echo(data=bytes(32 << 10)))
                assert (await good.ask(m.Echo(data=b"x" * 1000))).data == b"x" * 1000, number
                assert here.dispatcher.queues.total <= mib
            assert here.dispatcher.backpressured >= 1
            await until(lambda: any(one.link.closed.done() for one in silent))
            assert "kvxfer_link_queued_bytes" in here._scrape().body.decode()
        await until(lambda: here.dispatcher.queues.total == 0)


async def test_preconnect_stays_connected() -> None:
    async with node() as here:
        async with node() as there:
            here.preconnect(there.addresses)
            await until(lambda: len(here.pool.links) == 1)
            address = there.addresses[0]
        await until(lambda: not here.pool.links)
        async with node(listen=address):
            await until(lambda: len(here.pool.links) == 1, 10.0)


# -- hostile input ----------------------------------------------------------------------------------------------


async def throw(address: str, data: bytes) -> bytes:
    """Send bytes to the control port and read until it hangs up."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    try:
        writer.write(data)
        async with asyncio.timeout(5 * slack()):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        bytes(range(256)) * 16,
        PREAMBLE + b"\xff\xff\xff\xff",
        PREAMBLE + b"\x00\x00\x00\x03\x92\x01\xc0",
        PREAMBLE[:4],
    ],
)
async def test_hostile_bytes_cost_their_connection_only(data: bytes) -> None:
    async with node(**fast()) as server, worker(server) as bystander:
        await throw(server.addresses[0], data)
        await until(lambda: server.peers.half_open == 0)
        assert sum(server.peers.refused.values()) == 1
        assert (await bystander.ask(m.Echo(data=b"x"))).data == b"x"


async def test_slow_handshakes_are_bounded_and_do_not_keep_a_peer_out() -> None:
    async with node(handshakes_max=4) as there, node() as here, worker(here) as asker:
        host, port = there.addresses[0].split(":")
        slow = [await asyncio.open_connection(host, port) for _ in range(12)]
        await until(lambda: there.peers.refused.get("handshakes_max") == 8)
        assert there.peers.half_open == 4
        assert (await asker.ask(m.Echo(node=there.addresses, data=b"x"))).data == b"x"
        for _, writer in slow:
            writer.close()


async def test_links_are_bounded_at_the_maximum() -> None:
    async with node(links_max=2, handshakes_max=2) as server:
        identity = LocalIdentity(role="tool")
        known = server.credentials
        links = [await Link.dial(server.addresses, identity, server.config, credentials=known) for _ in range(2)]
        with pytest.raises(PeerUnreachable):
            await Link.dial(server.addresses, identity, server.config, credentials=known)
        assert server.peers.refused["links_max"] == 1
        for link in links:
            await link.aclose("done")


# -- start and end ------------------------------------------------------------------------------------------------


async def test_drain_waits_for_live_claims_and_refuses_new_ones() -> None:
    async with node() as server, worker(server) as owner, worker(server) as claimant:
        await owner.ask(offer("live"))
        claimed = await claimant.ask(claim("live"))
        unclaimed = await owner.ask(offer("unclaimed"))
        draining = asyncio.ensure_future(server.drain())
        told = await owner.inbox.take(m.PostingEvent, what="withdrawn")
        assert (told.posting, told.code) == (unclaimed.posting, "peer_draining")
        assert not server.ready
        for refused in (claim("live"), claim(node=("127.0.0.1:9",)), offer("more")):
            with pytest.raises(PeerDraining):
                await claimant.ask(refused)
        assert not draining.done()
        await claimant.ask(settle(claimed))
        async with asyncio.timeout(1 * slack()):
            assert await draining


async def test_drain_ends_at_its_limit_and_peers_hear_goodbye() -> None:
    async with node() as here, worker(here) as claimant:
        async with node(drain_s=0.1) as there, worker(there) as owner:
            await owner.ask(offer())
            await claimant.ask(claim(node=there.addresses))
            assert not await there.drain()
            await there.aclose("maintenance")
            settled = await owner.inbox.take(m.PostingEvent, what="settled")
        told = await claimant.inbox.take(m.PostingEvent, what="withdrawn")
        assert settled.code == told.code == "peer_draining", "both sides of the claim hear why it ended"
        await until(lambda: here.links_ended.get(("peer", "peer_draining")) == 1)


async def test_nothing_is_left_behind() -> None:
    counts = []
    for _ in range(3):  # the first round opens what the event loop keeps for itself
        async with node() as here, node() as there, worker(here) as asker:
            await asker.ask(m.Echo(node=there.addresses, data=b"x"))
            directory = here.socket_path.parent
        assert not directory.exists()
        assert len(asyncio.all_tasks()) == 1
        await until(lambda: True)
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1] == counts[2], counts


@pytest.mark.parametrize("key", ["listen", "http"])
async def test_port_in_use_names_it_and_leaves_nothing(key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = Server(small(**{key: f"127.0.0.1:{port}"}), embedded=True)
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}, {key}: the port is in use"):
            await server.__aenter__()
    assert not server.socket_path.exists()


async def test_second_daemon_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o700)
    config = small(socket_dir=str(tmp_path))
    async with Server(config) as first:
        with pytest.raises(ConfigError, match=f"already running at {first.socket_path} .pid {os.getpid()}"):
            await Server(config).__aenter__()
        async with worker(first) as still:
            assert (await still.ask(m.Echo(data=b"x"))).data == b"x"
    async with Server(config) as again:
        assert (again.node_id, again.incarnation) != (first.node_id, first.incarnation)
        assert again.node_id == first.node_id


async def test_stale_socket_of_a_crashed_daemon_is_replaced(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o700)
    with socket.socket(socket.AF_UNIX) as crashed:
        crashed.bind(str(tmp_path / "kvxferd.sock"))
    async with Server(small(socket_dir=str(tmp_path))) as server, worker(server) as asker:
        assert (server.socket_path.stat().st_mode & 0o777) == 0o600
        assert (await asker.ask(m.Echo(data=b"x"))).data == b"x"
    assert not server.socket_path.exists()


async def test_other_hosts_need_a_secret_and_a_wildcard_an_advertised_address() -> None:
    with pytest.raises(ConfigError, match="secret"):
        await Server(small(listen="0.0.0.0:0"), embedded=True).__aenter__()
    with pytest.raises(ConfigError, match="advertise"):
        await Server(small(listen="0.0.0.0:0", secret=SECRET), embedded=True).__aenter__()
    options = {"listen": "0.0.0.0:0", "secret": SECRET, "advertise": ("127.0.0.1",)}
    async with node(**options) as server, node(secret=SECRET) as here, worker(here) as asker:
        assert server.addresses[0].startswith("127.0.0.1:")
        assert server.data_hosts in ((), ("127.0.0.1",))  # () when no transport listens beyond this host
        assert (await asker.ask(m.Echo(node=server.addresses, data=b"x"))).data == b"x"


async def test_ipv6_loopback() -> None:
    async with node(listen="[::1]:0") as there, node() as here, worker(here) as asker:
        assert there.addresses[0].startswith("[::1]:")
        assert (await asker.ask(m.Echo(node=there.addresses, data=b"x"))).data == b"x"


async def test_sixteen_daemons_at_once_have_distinct_addresses() -> None:
    servers = [Server(small(), embedded=True) for _ in range(16)]
    try:
        await asyncio.gather(*(server.__aenter__() for server in servers))
        assert len({server.addresses for server in servers}) == 16
    finally:
        for server in servers:
            await server.aclose()


def test_worker_helper_is_a_bare_link() -> None:
    assert {"link", "inbox"} == set(Worker.__slots__)


async def test_a_long_temporary_directory_is_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    async with Server(small(), embedded=True) as server:
        assert server.socket_path.is_socket()
        assert len(str(server.socket_path.parent)) <= SOCKET_DIR_CHARS_MAX
    assert list(long.iterdir()) == []
    assert not server.socket_path.parent.exists()


async def test_those_who_do_not_read_are_waited_for_all_at_once() -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(node())
        there = await stack.enter_async_context(node())
        asker = await stack.enter_async_context(worker(server))
        await asker.ask(m.Echo(node=there.addresses, data=b"x"))
        # Neither a worker, nor a peer that dialled us, nor one that we dialled takes what is sent to it.
        tool, known = LocalIdentity(role="tool"), server.credentials
        frozen = await Link.dial(server.addresses, tool, server.config, credentials=known)
        outgoing, incoming = server.pool.links[0], next(iter(server.workers.links))
        ends = {outgoing: next(iter(there.peers.links)), incoming: asker.link, next(iter(server.peers.links)): frozen}
        for link, far in ends.items():
            far._transport.pause_reading()  # type: ignore[union-attr]
            link._transport.write(bytes(8 << 20))  # type: ignore[union-attr]
        started = time.monotonic()
        await server.aclose()
        assert 0.9 * FLUSH_S < time.monotonic() - started < 1.7 * FLUSH_S
        for link, far in ends.items():
            assert link.gone.done()
            far.abort()
            await far.wait_closed()


async def test_a_node_has_one_turn_of_the_loop_however_many_connections_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that its links have received is handled, by one of them in each turn; others answer in between."""
    monkeypatch.setattr(link_module, "TURN_S", 60.0)
    async with node() as server:
        about = LocalIdentity(role="peer", node_id="e" * 32)
        known, somebody = server.credentials, LocalIdentity(role="peer", node_id="f" * 32)
        links = [await Link.dial(server.addresses, about, small(), credentials=known) for _ in range(8)]
        other = await Link.dial(server.addresses, somebody, small(), credentials=known)
        accepted = [link for link in server.peers.links if link.peer.node_id == "e" * 32]
        assert len(accepted) == 8
        turns: list[Link] = []
        take = Link._take

        def watched(link: Link) -> bool:
            turns.append(link)
            return take(link)

        monkeypatch.setattr(Link, "_take", watched)
        count = 5 * MESSAGES_PER_TURN
        frames = b"".join(encode(m.Echo(rid=number, data=b"x")) for number in range(1, count + 1))
        for link in accepted:
            link.data_received(frames)
        assert turns == accepted[:1], "the others wait for theirs"
        turns.clear()
        await asyncio.sleep(0)
        assert len([link for link in turns if link in accepted]) == 1
        assert isinstance(await other.request(m.Echo(data=b"x"), timeout=5), m.EchoReply)
        await until(lambda: all(link.late_replies == count for link in links))
        order = [link for link in turns if link in accepted]
        assert order[:8] == accepted, "one after the other"
        await asyncio.gather(*(link.aclose("done") for link in (*links, other)))

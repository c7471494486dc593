"""A worker's link to its daemon: across restarts of the daemon, late replies, bad listeners, and its own end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

import kvxfer
from kvxfer.client import Client
from kvxfer.config import Config
from kvxfer.errors import ClosedError, DaemonUnavailable, KvxferError, PeerLost, PeerUnreachable, TransferTimeout
from kvxfer.flows.control import UNSENT_MAX, Control
from kvxfer.server import Server
from kvxfer.tasks import ANSWER, Deadline
from kvxfer.wire import messages as m
from tests.nodes import until
from tests.support.nodes import make_cache, scattered, small_geometry


class Node:
    """A daemon in a fixed directory that can be restarted, and one client of it."""

    def __init__(self, directory: Path, **options: Any) -> None:
        values = {"transports": ("shm",), "socket_dir": str(directory)}
        self.config = Config.embedded(**{**values, **options})
        self.server = Server(self.config)
        self.client = Client(directory / "kvxferd.sock", config=self.config)

    async def restart(self) -> None:
        reconnects = self.client.control.reconnects
        await self.server.aclose()
        self.server = Server(self.config)
        await self.server.__aenter__()
        await until(lambda: self.client.control.reconnects > reconnects and not self.client.control._reconnecting)


@asynccontextmanager
async def node(directory: Path, **options: Any) -> AsyncIterator[Node]:
    made = Node(directory, **options)
    await made.server.__aenter__()
    try:
        async with made.client:
            yield made
    finally:
        await made.server.aclose()


def ignore(_: m.PostingEvent) -> None:
    """Nothing."""


async def test_after_a_restart_what_was_unclaimed_is_posted_again_and_found(tmp_path: Path) -> None:
    async with node(tmp_path / "a") as a, node(tmp_path / "b") as b:
        source, sink = [await make_cache(one.client, small_geometry(), 8) for one in (a, b)]
        table = scattered(1, 8, 40, 16)
        async with b.client.offer("r", sink, table) as landing:
            old = landing._posting.posting
            await b.restart()
            assert landing._posting.posting != old
            async with a.client.push("r", to=b.client.addresses, cache=source, table=table) as push:
                await push.layers()
            await landing.wait()


@pytest.mark.parametrize("wait_s", [0.0, 0.1])
async def test_a_call_waits_for_a_daemon_that_is_gone_as_long_as_configured(tmp_path: Path, wait_s: float) -> None:
    """Not for its whole timeout: an engine has no loop to lose on a daemon that is not there."""
    async with node(tmp_path, daemon_wait_s=wait_s, timeout_s=600.0) as one:
        source = await make_cache(one.client, small_geometry(), 8)
        table = scattered(1, 8, 40, 16)
        await one.server.aclose()
        await until(lambda: not one.client.control.connected)
        for call in (
            lambda: one.client.lookup("weights"),
            lambda: one.client.send((), "channel", b"data"),
            lambda: one.client.offer("r", source, table).__aenter__(),
            lambda: one.client.publish("r", source, table).__aenter__(),
            lambda: one.client.push("r", to=("127.0.0.1:1",), cache=source, table=table).__aenter__(),
        ):
            with pytest.raises(DaemonUnavailable, match="daemon_wait_s") as caught:
                await call()
            assert caught.value.retryable
        one.server = Server(one.config)
        await one.server.__aenter__()
        await until(lambda: one.client.control.connected)
        with pytest.raises(KvxferError, match="weights"):
            await one.client.lookup("weights")


async def test_names_are_posted_again_even_when_somebody_has_looked_them_up(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        region = await one.client.alloc(64)
        async with await one.client.share(region, "weights"):
            await one.client.lookup("weights")
            await one.restart()
            await one.client.lookup("weights")
            await one.restart()
            assert (await one.client.lookup("weights")).region == region.id
        with pytest.raises(KvxferError):
            await one.client.lookup("weights")


async def test_a_new_identity_is_in_new_descriptors(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        region = await one.client.alloc(64)
        before = region.descriptor()
        await one.restart()
        after = region.descriptor()
        assert before.node_id == after.node_id
        assert before.incarnation != after.incarnation == one.server.incarnation
        assert one.client.addresses == one.server.addresses


@pytest.mark.parametrize(("own", "host"), [("", "127.0.0.2"), ("127.0.0.3", "127.0.0.3")])
async def test_a_worker_listens_where_its_daemon_does(tmp_path: Path, own: str, host: str) -> None:
    """A worker that was told nothing can be reached from wherever its daemon can."""
    async with Server(Config.embedded(transports=("tcp",), socket_dir=str(tmp_path), listen="127.0.0.2:0")) as server:
        assert server.socket_path is not None
        config = Config(transports=("tcp",), data_bind=own)
        async with Client(server.socket_path, config=config) as client, kvxfer.local(transports=("tcp",)) as other:
            region, source = await client.alloc(64), await other.alloc(64)
            descriptor = region.descriptor("rw")
            assert [text.rpartition(":")[0] for text in descriptor.endpoints["tcp"]] == [host]
            source.array[:] = 7
            await other.put(source[:], descriptor)
            assert (region.array == 7).all()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_a_worker_has_a_data_port_and_addresses_of_its_own(tmp_path: Path) -> None:
    port, shared = free_port(), free_port()
    common = {"transports": ("tcp",), "socket_dir": str(tmp_path), "listen": "127.0.0.1:0"}
    async with Server(Config.embedded(**common, data_port=shared)) as server:
        assert server.socket_path is not None
        own = Config(transports=("tcp",), data_port=port, data_advertise=("127.0.0.1", "127.0.0.2:0"))
        async with Client(server.socket_path, config=own) as client:
            endpoints = (await client.alloc(64)).descriptor("rw").endpoints["tcp"]
            assert endpoints == (f"127.0.0.1:{port}", f"127.0.0.2:{port}")
            second = Client(server.socket_path, config=own)
            with pytest.raises(KvxferError, match="data_port"):
                await second.__aenter__()
        # A configuration that is the daemon's too: its port is taken, so any other will do.
        same = Config(transports=("tcp",), data_port=shared)
        async with Client(server.socket_path, config=same) as client:
            [endpoint] = (await client.alloc(64)).descriptor("rw").endpoints["tcp"]
            assert not endpoint.endswith(f":{shared}")


async def test_a_daemon_that_does_not_tell_where_it_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of an older version."""
    status = Server._status

    def older(server: Server) -> bytes:
        told = msgpack.unpackb(status(server))
        packed: bytes = msgpack.packb({name: value for name, value in told.items() if not name.endswith("_bind")})
        return packed

    monkeypatch.setattr(Server, "_status", older)
    async with node(tmp_path, transports=("tcp",), listen="127.0.0.2:0") as one:
        region = await one.client.alloc(64)
        assert region.descriptor().endpoints["tcp"][0].startswith("127.0.0.2:"), "by its own configuration"


async def test_a_restart_is_survived_many_times_with_one_link(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        for _ in range(3):
            await one.restart()
            assert len(one.server.workers.links) == 1
            await one.client.send((), "channel", b"x")


async def test_what_a_new_daemon_refuses_ends_alone_and_is_told(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        control, told = one.client.control, []
        await control.post("offer", "first", b"", lease_s=5, claims_max=1, on_event=told.append)
        kept = await control.post("offer", "second", b"", lease_s=5, claims_max=1, on_event=ignore)
        refused = next(iter(control._postings.values()))
        refused.message = replace(refused.message, lease_s=one.config.lease_s_max + 1)
        await one.restart()
        assert [(event.what, event.claim) for event in told] == [("withdrawn", 0)]
        assert list(control._postings) == [kept.posting]
        assert len(one.server.workers.links) == 1
        assert one.server.registry.counts().postings == 2  # the daemon's own, and `second`


async def test_a_channel_that_another_worker_took_does_not_stop_the_reconnect(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        with pytest.raises(TransferTimeout):
            await one.client.recv("mine", timeout=0.05)
        await one.server.aclose()
        one.server = Server(one.config)
        await one.server.__aenter__()
        async with Client(tmp_path / "kvxferd.sock", config=one.config) as other:
            with pytest.raises((TransferTimeout, kvxfer.BusyError)):
                await other.recv("mine", timeout=0.05)
            await until(lambda: one.client.control.connected and not one.client.control._reconnecting)
            assert len(one.server.workers.links) == 2
            await one.client.send((), "else", b"x")


async def test_a_drained_daemon_leaves_offers_for_the_next_one(tmp_path: Path) -> None:
    async with node(tmp_path, drain_s=0.1) as one:
        sink = await make_cache(one.client, small_geometry(), 8)
        async with one.client.offer("r", sink, scattered(1, 8, 40, 16)) as landing:
            await one.server.drain()
            await one.restart()
            assert one.server.registry.counts().postings == 2
            assert landing._error is None
        await until(lambda: one.server.registry.counts().postings == 1)


async def test_claims_hear_that_they_are_orphaned_and_settle_through_the_next_daemon(tmp_path: Path) -> None:
    async with node(tmp_path / "a") as a, node(tmp_path / "b") as b:
        owner: list[m.PostingEvent] = []
        heard: list[m.PostingEvent] = []
        control = b.client.control
        await control.post("offer", "r", b"body", lease_s=5, claims_max=1, on_event=owner.append)
        message = m.Claim(node=b.client.addresses, kind="offer", key="r", wait_s=1)
        claim, body = await a.client.control.claim(message, Deadline.after(5), heard.append)
        assert body == b"body"
        a.server.dispatcher.forwarding.settle = lambda _: None  # a daemon that is killed tells nobody
        await a.server.aclose()
        await until(lambda: not a.client.control.connected)
        assert [event.what for event in heard] == ["orphaned"]
        a.client.control.report_in_background(claim, "failed", PeerLost("our reason"))
        a.server = Server(a.config)
        await a.server.__aenter__()
        await until(lambda: any(event.what in ("settled", "lost") for event in owner))
        assert owner[0].what == "claimed"
        assert "our reason" in owner[-1].detail


async def test_replies_to_given_up_requests_are_undone(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        control, link = one.client.control, one.client.control._link
        assert link is not None
        send = one.server.dispatcher._send

        def slowly(to: Any, message: m.Message) -> None:
            loop = asyncio.get_running_loop()
            loop.call_later(0.05 if isinstance(message, m.Posted | m.Claimed) else 0, send, to, message)

        one.server.dispatcher._send = slowly
        with pytest.raises(TransferTimeout):
            await link.request(m.Post(kind="offer", key="late", lease_s=5, claims_max=1), timeout=0.01)
        await until(lambda: link.late_replies == 1)
        await until(lambda: one.server.registry.counts().postings == 1)
        one.server.dispatcher._send = send
        await control.post("ticket", "r", b"", lease_s=5, claims_max=2, on_event=ignore)
        await control.post("offer", "r", b"", lease_s=5, claims_max=1, on_event=ignore)
        one.server.dispatcher._send = slowly
        with pytest.raises(TransferTimeout):
            await link.request(m.Claim(kind="offer", key="r"), timeout=0.01)
        assert one.server.registry.counts().claims == 1
        await until(lambda: one.server.registry.counts().claims == 0)


async def test_a_renewal_whose_answer_came_late_withdraws_nothing(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        control, link = one.client.control, one.client.control._link
        assert link is not None
        handle = await control.post("ticket", "r", b"", lease_s=5, claims_max=2, on_event=ignore)
        posted, send = one.server.registry.counts().postings, one.server.dispatcher._send
        one.server.dispatcher._send = lambda *what: asyncio.get_running_loop().call_later(0.05, send, *what)  # type: ignore[method-assign,assignment]
        with pytest.raises(TransferTimeout) as found:
            await control.renew(handle, 50, Deadline.after(0.01))
        assert found.value.fields["state"] == ANSWER
        await until(lambda: link.late_replies == 1)
        one.server.dispatcher._send = send  # type: ignore[method-assign]
        await control.request(m.Echo(data=b"behind whatever was said"), Deadline.after(5))
        assert one.server.registry.counts().postings == posted


async def test_mail_that_comes_after_its_receiver_gave_up_is_kept_for_the_next(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        client, dispatcher = one.client, one.server.dispatcher
        await client.send((), "c", b"first")
        send = dispatcher._send
        dispatcher._send = lambda *what: asyncio.get_running_loop().call_later(0.1, send, *what)  # type: ignore[method-assign,assignment]
        received: list[m.Delivery] = []
        with pytest.raises(TransferTimeout):
            await client.control.listen("c", received.append, Deadline.after(0.02))
        await until(lambda: received)
        dispatcher._send = send  # type: ignore[method-assign]
        assert received[0].data == b"first"
        await until(lambda: not client.control._deliveries)
        await client.send((), "c", b"second")  # nobody listens any more: the daemon keeps it
        assert await client.recv("c", timeout=5) == b"second"


async def test_a_listener_that_raises_does_not_cost_the_link(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        complaints: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["exception"]))

        def bad(_: m.PostingEvent) -> None:
            raise ZeroDivisionError

        control, link = one.client.control, one.client.control._link
        await control.post("offer", "r", b"", lease_s=5, claims_max=1, on_event=bad)
        await control.claim(m.Claim(kind="offer", key="r"), Deadline.after(5), ignore)
        await until(lambda: complaints)
        assert [type(error) for error in complaints] == [ZeroDivisionError]
        await one.client.send((), "channel", b"x")
        assert control._link is link


async def test_a_status_that_makes_no_sense_is_a_typed_error(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        one.server.dispatcher._status = lambda: b"\xc1"
        with pytest.raises(kvxfer.KvxferError, match="status"):
            await Client(tmp_path / "kvxferd.sock", config=one.config).__aenter__()
        await until(lambda: len(one.server.workers.links) == 1)


async def test_without_a_daemon_requests_wait_and_then_say_so(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        await one.server.aclose()
        await until(lambda: not one.client.control.connected)
        with pytest.raises(DaemonUnavailable):
            await one.client.send((), "channel", b"x", timeout=0.1)
        waiting = asyncio.ensure_future(one.client.send((), "channel", b"x", timeout=5))
        await asyncio.sleep(0.01)
        await one.client.aclose()
        with pytest.raises(ClosedError):
            await waiting


async def test_what_cannot_be_said_now_is_bounded(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        control: Control = one.client.control
        await one.server.aclose()
        await until(lambda: not control.connected)
        message = m.Settle(node=("127.0.0.1:1",), posting="0" * 32, claim=1, outcome="failed")
        for _ in range(UNSENT_MAX + 10):
            control._send(message)
        control._send(m.Withdraw(posting="0" * 32))
        assert len(control._unsent) == UNSENT_MAX


async def settled_out_of_reach(here: Node, there: Node, told: list[m.PostingEvent]) -> Any:
    """A claim that ends while the two nodes cannot reach each other; returns what lets them reach each other again."""
    await there.client.control.post("offer", "r", b"", lease_s=60, claims_max=1, on_event=told.append)
    claim = m.Claim(kind="offer", key="r", node=there.client.addresses)
    handle, _ = await here.client.control.claim(claim, Deadline.after(5), ignore)
    dial = here.server.pool._dial

    async def cut(*_: Any) -> Any:
        raise PeerUnreachable("cut by the test")

    here.server.pool._dial = cut
    here.server.pool.links[0].abort()
    await until(lambda: [event.what for event in told] == ["claimed", "orphaned"])
    here.client.control.report_in_background(handle, "cancelled", None)
    await until(lambda: len(here.server.forwarder.unsettled) == 1)
    assert len(here.client.control._outbox) == 1

    def mend() -> None:
        here.server.pool._dial = dial

    return mend


async def test_a_settlement_is_remembered_until_the_owner_has_heard_it(tmp_path: Path) -> None:
    async with node(tmp_path / "a") as a, node(tmp_path / "b") as b:
        told: list[m.PostingEvent] = []
        mend = await settled_out_of_reach(a, b, told)
        mend()
        await until(lambda: told[-1].what == "settled", 10)
        await until(lambda: not len(a.client.control._outbox))
        assert told[-1].code == "cancelled"


async def test_a_settlement_outlives_the_daemon_that_was_told(tmp_path: Path) -> None:
    async with node(tmp_path / "a") as a, node(tmp_path / "b") as b:
        told: list[m.PostingEvent] = []
        await settled_out_of_reach(a, b, told)
        await a.restart()
        await until(lambda: told[-1].what == "settled")
        await until(lambda: not len(a.client.control._outbox))
        assert (told[-1].code, b.server.registry.counts().claims) == ("cancelled", 0)

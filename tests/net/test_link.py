"""Links over real sockets: requests end exactly once, both sides learn why a link ended, strangers are told apart."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from kvxfer.config import Config
from kvxfer.daemon.acceptor import Acceptor
from kvxfer.errors import (
    AuthenticationError,
    BusyError,
    ClosedError,
    DaemonUnavailable,
    IdentityMismatch,
    NotKvxfer,
    PeerBackpressure,
    PeerDraining,
    PeerLost,
    PeerUnreachable,
    TooManyPending,
    TransferTimeout,
    UsageError,
    VersionMismatch,
)
from kvxfer.net import link as link_module
from kvxfer.net.credentials import Credentials
from kvxfer.net.link import MESSAGES_PER_TURN, Link, LocalIdentity
from kvxfer.wire import messages as m
from kvxfer.wire.codec import Message, encode
from kvxfer.wire.framing import PREAMBLE, FrameDecoder
from kvxfer.wire.messages import error_reply
from tests.conftest import slack
from tests.nodes import Inbox, fast, small, until

NODE, INCARNATION = "a" * 32, "b" * 32
SECRET = b"correct horse battery staple"


@dataclass(slots=True)
class Side:
    """The accepting side under test: answers Echo, refuses Status, keeps everything else to itself."""

    acceptor: Acceptor
    address: str
    config: Config
    links: list[Link] = field(default_factory=list)
    inbox: Inbox = field(default_factory=Inbox)

    def on_message(self, link: Link, message: Message) -> None:
        if isinstance(message, m.Echo):
            link.send(m.EchoReply(rid=message.rid, data=message.data))
        elif isinstance(message, m.Status):
            link.send(error_reply(BusyError("not now", limit=7), message.rid))
        else:
            self.inbox.on_message(link, message)

    async def dial(self, config: Config | None = None, **options: object) -> Link:
        identity = LocalIdentity(role="peer", node_id="c" * 32, incarnation="d" * 32)
        return await Link.dial([self.address], identity, config or self.config, **options)  # type: ignore[arg-type]


def known(secret: bytes) -> Credentials:
    return Credentials(small(secret=secret.decode()), unconfigured="none")


async def start(config: Config, *, secret: bytes = b"", links_max: int = 8) -> Side:
    listener = socket.create_server(("127.0.0.1", 0))
    side: Side

    def on_message(link: Link, message: Message) -> None:
        side.on_message(link, message)

    def on_ready(link: Link) -> None:
        side.links.append(link)

    acceptor = Acceptor(
        config,
        LocalIdentity(role="peer", node_id=NODE, incarnation=INCARNATION),
        roles=("peer",),
        links_max=links_max,
        on_ready=on_ready,
        on_message=on_message,
        credentials=known(secret),
    )
    side = Side(acceptor, f"127.0.0.1:{listener.getsockname()[1]}", config)
    await acceptor.start(listener)
    return side


@pytest.fixture
async def side() -> AsyncIterator[Side]:
    made = await start(small(**fast(requests_max=4)))
    yield made
    await made.acceptor.aclose("test over")


async def claim(link: Link, timeout: float) -> Message:
    """A request that the other side never answers by itself."""
    return await link.request(m.Claim(kind="offer", key="nothing"), timeout=timeout)


async def test_request_and_reply(side: Side) -> None:
    link = await side.dial()
    assert link.peer.node_id == NODE
    assert link.peer.incarnation == INCARNATION
    replies = await asyncio.gather(*(link.request(m.Echo(data=bytes([i])), timeout=5) for i in range(4)))
    assert [reply.data for reply in replies] == [bytes([i]) for i in range(4)]
    assert link.pending == 0
    assert side.links[0].peer.node_id == "c" * 32
    await link.aclose("done")


@pytest.mark.parametrize(("bound", "value", "turn"), [("", 0.0, MESSAGES_PER_TURN), ("BYTES", 1, 1), ("TIME", 0.0, 1)])
async def test_talkative_link_leaves_turns_to_the_others_and_loses_nothing(
    side: Side, monkeypatch: pytest.MonkeyPatch, bound: str, value: float, turn: int
) -> None:
    """Of the three bounds of a turn the first that is reached counts; one message is always handled."""
    monkeypatch.setattr(link_module, "TURN_S", value if bound == "TIME" else 60.0)
    if bound == "BYTES":
        monkeypatch.setattr(link_module, "BYTES_PER_TURN", value)
    talkative, other = await side.dial(), await side.dial()
    accepted = side.links[0]
    count = 10 * MESSAGES_PER_TURN
    frames = b"".join(encode(m.Mail(rid=number, channel="c", data=b"")) for number in range(1, count + 1))
    accepted.data_received(frames)
    assert len(side.inbox.messages) == turn
    assert (await other.request(m.Echo(data=b"x"), timeout=5)).data == b"x"
    await until(lambda: len(side.inbox.messages) == count)
    assert [message.rid for message in side.inbox.messages] == list(range(1, count + 1))  # type: ignore[attr-defined]
    assert (await talkative.request(m.Echo(data=b"y"), timeout=5)).data == b"y"  # it reads again


async def test_what_a_link_said_before_its_end_counts(side: Side) -> None:
    talkative = await side.dial()
    count = 3 * MESSAGES_PER_TURN + 1
    for number in range(1, count + 1):
        talkative.send(m.Mail(rid=number, channel="c", data=bytes(100)))
    await talkative.aclose("done")
    await until(lambda: len(side.inbox.messages) == count + 1)  # the last one is the goodbye
    side.inbox.messages.clear()
    lost = await side.dial()
    accepted = side.links[1]
    accepted.data_received(b"".join(encode(m.Mail(rid=1, channel="c", data=b"")) for _ in range(count)))
    accepted._transport.abort()  # type: ignore[union-attr]
    assert isinstance(await accepted.wait_closed(), PeerLost)
    assert len(side.inbox.messages) == count
    await lost.wait_closed()


async def test_error_reply_is_the_typed_error(side: Side) -> None:
    link = await side.dial()
    with pytest.raises(BusyError, match="not now") as caught:
        await link.request(m.Status(), timeout=5)
    assert caught.value.fields["limit"] == 7
    assert caught.value.retryable
    assert caught.value.peer == link.name
    await link.aclose("done")


async def test_deadline_then_late_reply_is_counted_and_handed_over(side: Side) -> None:
    inbox = Inbox()
    link = await side.dial(on_late=inbox.on_late)
    with pytest.raises(TransferTimeout, match="Claim"):
        await claim(link, 0.02)
    assert link.pending == 0
    asked = await side.inbox.take(m.Claim)
    side.links[0].send(m.Done(rid=asked.rid))
    await until(lambda: inbox.late)
    assert link.late_replies == 1
    await link.aclose("done")


async def test_reply_in_time_is_not_late_when_the_loop_was_blocked(side: Side) -> None:
    link = await side.dial()
    waiting = asyncio.ensure_future(claim(link, 0.2))
    asked = await side.inbox.take(m.Claim)
    side.links[0].send(m.Done(rid=asked.rid))  # in the socket, well before the deadline
    time.sleep(0.4)  # noqa: ASYNC251 - the loop is busy until after the deadline
    assert isinstance(await waiting, m.Done)
    await link.aclose("done")


async def test_a_deadline_that_has_passed_is_one_like_any_other(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the loop was blocked. On uvloop the timer of such a deadline is no timer any more."""
    link = await side.dial()
    passed = asyncio.get_running_loop().time() - 1
    with monkeypatch.context() as patch:
        patch.setattr(type(link._session), "deadline", lambda self: passed)
        link._arm()
        link._arm()
    assert (await link.request(m.Echo(data=b"still here"), timeout=5)).data == b"still here"


async def test_cancelled_request_leaves_nothing(side: Side) -> None:
    link = await side.dial()
    waiting = asyncio.ensure_future(claim(link, 5))
    await side.inbox.take(m.Claim)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert link.pending == 0
    assert len(asyncio.all_tasks()) == 1
    await link.aclose("done")


async def test_requests_are_bounded_at_the_maximum(side: Side) -> None:
    link = await side.dial()
    waiting = [asyncio.ensure_future(claim(link, 5)) for _ in range(4)]
    await until(lambda: link.pending == 4)
    with pytest.raises(TooManyPending) as caught:
        await link.request(m.Echo(), timeout=5)
    assert caught.value.fields["limit"] == 4
    link.abort()
    for ended in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(ended, ClosedError)


async def test_notify_needs_no_reply_and_its_reply_is_not_late(side: Side) -> None:
    link = await side.dial()
    link.notify(m.Echo(data=b"x"))
    assert link.pending == 1
    await until(lambda: link.pending == 0)
    assert link.late_replies == 0
    await link.aclose("done")


async def test_message_that_is_not_for_this_link_is_refused_before_it_is_sent(side: Side) -> None:
    link = await side.dial()
    with pytest.raises(UsageError):
        link.send(m.Listen(channel="x"))
    assert isinstance(await link.request(m.Echo(), timeout=5), m.EchoReply)
    await link.aclose("done")


async def test_lost_connection_fails_every_request_on_both_sides(side: Side) -> None:
    link = await side.dial()
    waiting = [asyncio.ensure_future(claim(link, 5)) for _ in range(3)]
    await side.inbox.take(m.Claim)
    side.links[0].abort()
    for ended in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(ended, PeerLost)
        assert ended.peer == link.name
    assert isinstance(await link.wait_closed(), PeerLost)
    with pytest.raises(PeerLost):
        link.send(m.Echo())


async def test_goodbye_gives_a_reason(side: Side) -> None:
    link = await side.dial()
    waiting = asyncio.ensure_future(claim(link, 5))
    await side.inbox.take(m.Claim)
    await side.links[0].aclose("maintenance")
    with pytest.raises(PeerDraining, match="maintenance"):
        await waiting
    assert not link.usable


async def test_announced_goodbye_lets_what_runs_go_on(side: Side) -> None:
    link = await side.dial()
    waiting = asyncio.ensure_future(claim(link, 5))
    asked = await side.inbox.take(m.Claim)
    side.links[0].send(m.Goodbye(reason="soon"))
    await until(lambda: not link.usable)
    side.links[0].send(m.Done(rid=asked.rid))
    assert isinstance(await waiting, m.Done)
    await link.aclose("done")


async def test_backpressure_when_the_peer_does_not_read() -> None:
    config = small(link_queue_bytes_max=8 << 20)
    side = await start(config)
    link = await side.dial()
    side.links[0]._transport.pause_reading()  # type: ignore[union-attr]
    mail = m.Mail(rid=1, channel="c", data=bytes(1 << 20))
    with pytest.raises(PeerBackpressure) as caught:
        for _ in range(64):
            link.send(mail)
    assert caught.value.fields["limit"] == 8 << 20
    assert link.queued_bytes <= 8 << 20
    link.abort()
    side.links[0].abort()
    await side.acceptor.aclose("done")


async def test_frozen_peer_is_lost_after_a_probe() -> None:
    side = await start(small())
    link = await side.dial(small(**fast()))
    started = time.monotonic()
    side.links[0]._transport.pause_reading()  # type: ignore[union-attr]
    with pytest.raises(PeerLost, match="no sign of life"):
        await claim(link, 5)
    assert time.monotonic() - started < 1.5 * slack()
    side.links[0].abort()
    await side.acceptor.aclose("done")


async def test_urgent_link_is_probed_sooner() -> None:
    side = await start(small(keepalive_s=60))
    link = await side.dial(small(keepalive_s=60, keepalive_live_s=0.05, dead_s=0.1))
    side.links[0]._transport.pause_reading()  # type: ignore[union-attr]
    link.set_urgent(True)
    async with asyncio.timeout(2 * slack()):
        assert isinstance(await link.wait_closed(), PeerLost)
    side.links[0].abort()
    await side.acceptor.aclose("done")


async def test_idle_links_stay(side: Side) -> None:
    link = await side.dial()
    await asyncio.sleep(0.5)  # several keepalive periods
    assert link.usable
    assert side.links[0].usable
    await link.aclose("done")


# -- who answers -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def stranger(
    answer: bytes, *, close: bool = True, visits: list[asyncio.StreamWriter] | None = None
) -> AsyncIterator[str]:
    """Something else that listens: it answers the first bytes with ``answer``, then hangs up or keeps silent."""
    writers = [] if visits is None else visits

    async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.read(1)
        writer.write(answer)
        if close:
            writer.close()

    server = await asyncio.start_server(on_client, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def dial(address: str, **options: object) -> Link:
    return await Link.dial([address], LocalIdentity(role="tool"), small(**fast()), **options)  # type: ignore[arg-type]


async def test_http_server_is_not_kvxfer() -> None:
    async with stranger(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address:
        with pytest.raises(NotKvxfer, match="HTTP") as caught:
            await dial(address)
        assert caught.value.peer == address


@pytest.mark.parametrize("answer", [b"", b"\0\0\0\x05"])
async def test_listener_that_hangs_up_is_unreachable_with_the_reason(answer: bytes) -> None:
    async with stranger(answer) as address:
        with pytest.raises(PeerUnreachable, match="connection ended"):
            await dial(address)


async def test_silent_impostor_costs_the_handshake_limit_only() -> None:
    async with stranger(b"", close=False) as address:
        started = time.monotonic()
        with pytest.raises(PeerUnreachable, match="handshake"):
            await dial(address)
        assert time.monotonic() - started < 2 * slack()


async def test_good_candidate_behind_a_silent_one(side: Side) -> None:
    async with stranger(b"", close=False) as silent:
        identity = LocalIdentity(role="peer", node_id="c" * 32, incarnation="d" * 32)
        link = await Link.dial([silent, side.address], identity, side.config)
        assert link.peer.node_id == NODE
        await link.aclose("done")


@pytest.mark.parametrize(("ours", "theirs"), [(SECRET, b""), (b"", SECRET), (SECRET, b"another secret, as long")])
async def test_secrets_must_match_both_ways(ours: bytes, theirs: bytes) -> None:
    side = await start(small(), secret=theirs)
    with pytest.raises(AuthenticationError) as caught:
        await side.dial(credentials=known(ours))
    assert not caught.value.retryable
    assert side.links == []
    await side.acceptor.aclose("done")


async def test_same_secret_is_let_in() -> None:
    side = await start(small(), secret=SECRET)
    link = await side.dial(credentials=known(SECRET))
    assert isinstance(await link.request(m.Echo(), timeout=5), m.EchoReply)
    await link.aclose("done")
    await side.acceptor.aclose("done")


async def test_another_node_is_refused(side: Side) -> None:
    with pytest.raises(IdentityMismatch) as caught:
        await side.dial(expected_node_id="9" * 32)
    assert caught.value.fields["expected"] == "9" * 32
    assert caught.value.fields["actual"] == NODE


async def test_another_version_is_refused_at_once(side: Side) -> None:
    hello = m.Hello(version_min=77, version_max=78, role="peer", node_id=NODE, incarnation=INCARNATION, nonce=bytes(32))
    reader, writer = await asyncio.open_connection(*side.address.split(":"))
    writer.write(PREAMBLE + encode(hello))
    async with asyncio.timeout(2 * slack()):
        refusal = next(FrameDecoder().feed(await reader.read()))
    assert isinstance(refusal, m.Refuse)
    assert refusal.code == VersionMismatch.code
    writer.close()
    await writer.wait_closed()


async def test_dial_cancelled_in_the_handshake_leaves_nothing() -> None:
    tasks = len(asyncio.all_tasks())
    visits: list[asyncio.StreamWriter] = []
    async with stranger(b"", close=False, visits=visits) as address:
        dialling = asyncio.ensure_future(dial(address))
        await until(lambda: visits)
        dialling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dialling
    await until(lambda: len(asyncio.all_tasks()) == tasks)


# -- Unix sockets -------------------------------------------------------------------------------------------------


async def test_a_daemon_that_hangs_up_is_not_missing(tmp_path) -> None:
    """It is full, or refuses for another reason: to start another one would not help."""
    path = str(tmp_path / "s")

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_unix_server(hang_up, path):
        with pytest.raises(DaemonUnavailable) as caught:
            await Link.dial_unix(path, LocalIdentity(role="worker"), small())
    assert "kvxfer serve" not in str(caught.value)
    assert "its log says whom it refused" in str(caught.value)


async def test_missing_daemon_says_what_to_do(tmp_path) -> None:
    with pytest.raises(DaemonUnavailable, match="kvxfer serve") as caught:
        await Link.dial_unix(str(tmp_path / "none.sock"), LocalIdentity(role="worker"), small())
    assert "No such file" in str(caught.value)


async def test_kernel_says_who_is_at_the_other_end(tmp_path) -> None:
    path = str(tmp_path / "s.sock")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    ready: list[Link] = []
    acceptor = Acceptor(
        small(),
        LocalIdentity(role="peer", node_id=NODE, incarnation=INCARNATION),
        roles=("worker",),
        links_max=4,
        on_ready=ready.append,
        on_message=lambda *_: None,
        same_user=True,
    )
    await acceptor.start(listener)
    link = await Link.dial_unix(path, LocalIdentity(role="worker", name="w", engine_id="e" * 32), small())
    assert (ready[0].pid, ready[0].uid) == (os.getpid(), os.getuid())
    assert ready[0].peer.engine_id == "e" * 32
    assert ready[0].name == f"w (pid {os.getpid()})"
    await link.aclose("done")
    await acceptor.aclose("done")

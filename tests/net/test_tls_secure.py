"""Links with TLS on real sockets: what they carry, how they end, and what each side is told when it does not work."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvxfer.addresses import parse_address
from kvxfer.config import Config
from kvxfer.errors import AuthenticationError, ClosedError, KvxferError, PeerDraining, PeerLost, PeerUnreachable
from kvxfer.net.credentials import Credentials
from kvxfer.net.link import Link, LocalIdentity
from kvxfer.server import Server
from kvxfer.tasks import Deadline
from kvxfer.wire import messages as m
from tests.adversity.attacker import shout
from tests.certificates import Authority, Files
from tests.nodes import SECRET, fast, node, until, worker

A, B, C = "0a" * 16, "0b" * 16, "0c" * 16


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def files(authority: Authority) -> tuple[Files, Files]:
    return authority.issue("a", A), authority.issue("b", B)


@asynccontextmanager
async def pair(files: tuple[Files, Files], **changes: object) -> AsyncIterator[tuple[Server, Server]]:
    async with node(**files[0].options(), **changes) as one, node(**files[1].options(), **changes) as two:
        yield one, two


async def dial(server: Server, files: Files, node_id: str, **changes: str) -> Link:
    """As a node that says it is ``node_id``, with a certificate that may be another's."""
    known = Credentials(Config.embedded(**files.options(), **changes))
    identity = LocalIdentity(role="peer", node_id=node_id, incarnation="1d" * 16)
    return await Link.dial(server.addresses, identity, server.config, credentials=known)


async def test_requests_and_large_messages_pass(files: tuple[Files, Files]) -> None:
    async with pair(files) as (here, there), worker(here) as asker, worker(there) as owner:
        assert (here.node_id, there.node_id) == (A, B)
        assert (await asker.ask(m.Echo(node=there.addresses, data=b"x" * 60000))).data == b"x" * 60000
        await owner.ask(m.Post(kind="region", key="k", body=bytes(1 << 20), lease_s=0.0))
        claims = (asker.ask(m.Claim(node=there.addresses, kind="region", key="k")) for _ in range(8))
        assert all(claimed.body == bytes(1 << 20) for claimed in await asyncio.gather(*claims))
        [link] = there.peers.links
        assert link.peer.node_id == A
        assert there.peers.refused == {}


async def test_goodbye_and_loss_are_told_as_without_tls(files: tuple[Files, Files]) -> None:
    async with pair(files) as (_, there):
        first = await dial(there, files[0], A)
        await until(lambda: len(there.peers.links) == 1)
        [accepted] = there.peers.links
        await first.aclose("done")
        assert isinstance(await accepted.wait_closed(), PeerDraining)
        second = await dial(there, files[0], A)
        await until(lambda: len(there.peers.links) == 1)
        [accepted] = there.peers.links
        second.abort()
        assert isinstance(await accepted.wait_closed(), PeerLost)
        third = await dial(there, files[0], A)
        third._transport._wire.write(b"\x17\x03\x03\x00\x20" + bytes(32))  # type: ignore[union-attr]
        assert isinstance(await third.wait_closed(), KvxferError)
        await until(lambda: not there.peers.links)


async def test_a_node_cannot_call_itself_another(files: tuple[Files, Files]) -> None:
    async with pair(files) as (_, there):
        with pytest.raises(AuthenticationError, match="certificate is for another") as caught:
            await dial(there, files[0], C)
        assert caught.value.fields["certified"] == A
        assert there.peers.refused == {"authentication": 1}
        assert there.registry.counts().peers == 0


async def test_an_address_is_no_identity(files: tuple[Files, Files]) -> None:
    async with pair(files) as (_, there):
        there.peers._identity = LocalIdentity(role="peer", node_id=C, incarnation="1d" * 16)
        with pytest.raises(AuthenticationError, match="certificate is for another"):
            await dial(there, files[0], A)


async def test_secret_and_certificate_are_both_needed_when_both_are_set(files: tuple[Files, Files]) -> None:
    async with node(**files[1].options(), secret=SECRET) as there:
        with pytest.raises(AuthenticationError, match="secret"):
            await dial(there, files[0], A)
        await (await dial(there, files[0], A, secret=SECRET)).aclose("done")


async def test_other_hosts_may_be_served_with_a_certificate(files: tuple[Files, Files]) -> None:
    options = {"listen": "0.0.0.0:0", "advertise": ("127.0.0.1",), **files[1].options()}
    async with node(**options) as there:
        await (await dial(there, files[0], A)).aclose("done")


async def test_both_sides_are_told_when_only_one_has_tls(files: tuple[Files, Files]) -> None:
    async with node(**files[0].options()) as secure, node() as plain:
        identity = LocalIdentity(role="peer", node_id=C, incarnation="1d" * 16)
        with pytest.raises(AuthenticationError, match="takes TLS only") as caught:
            await Link.dial(secure.addresses, identity, plain.config)
        assert "tls_cert" in str(caught.value.hint)
        with pytest.raises(PeerUnreachable, match="has it a tls_cert"):
            await dial(plain, files[0], A)
        assert secure.peers.refused == {"authentication": 1}
        assert plain.peers.refused == {"not_kvxfer": 1}


async def test_scanners_are_counted_and_forgotten(files: tuple[Files, Files]) -> None:
    async with node(**files[0].options()) as there:
        address = parse_address(there.addresses[0])
        for data in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01\x00\x05hello",
            b"\x80" * 100000,
            b"KVXC\r\n\x01\n",
            b"\x16",
        ):
            await shout((address.host, address.port), data)
        await until(lambda: not there.peers.half_open and not there.peers._sockets)
        assert there.peers.refused == {"not_kvxfer": 3, "authentication": 1, "peer_lost": 1}
        await (await dial(there, files[1], B)).aclose("done")


async def test_a_web_client_is_told_apart(files: tuple[Files, Files], authority: Authority) -> None:
    async with node(**files[0].options()) as there:
        address = parse_address(there.addresses[0])
        context = ssl.create_default_context(cafile=str(authority.cert))
        context.check_hostname = False
        reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
        with pytest.raises(ssl.SSLError):
            await reader.read()
        writer.transport.abort()
        await until(lambda: there.peers.refused == {"authentication": 1})


async def test_a_handshake_that_does_not_go_on_is_ended_in_time(files: tuple[Files, Files]) -> None:
    async with node(**files[0].options(), **fast(handshakes_max=4)) as there:
        address = parse_address(there.addresses[0])
        held = [await asyncio.open_connection(address.host, address.port) for _ in range(8)]
        for _, writer in held:
            writer.write(b"\x16\x03\x01\x01\x00\x01")
        await until(lambda: there.peers.refused.get("handshakes_max") == 4)
        assert there.peers.half_open == 4
        await (await dial(there, files[1], B)).aclose("done")  # in spite of them
        await until(lambda: there.peers.half_open == 0)
        assert there.peers.refused["peer_lost"] == 3
        for _, writer in held:
            writer.close()


async def test_a_silent_acceptor_is_given_up(files: tuple[Files, Files]) -> None:
    known = Credentials(Config.embedded(**files[0].options()))
    identity = LocalIdentity(role="peer", node_id=A, incarnation="1d" * 16)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(PeerUnreachable, match="took too long"):
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        await Link.dial([address], identity, Config.embedded(**fast()), credentials=known, timeout=5)


async def test_new_links_use_the_new_certificate_and_old_ones_stay(authority: Authority, tmp_path: Path) -> None:
    ours, other = authority.issue("rotating", A, days=1), Authority(tmp_path / "next", "next")
    peer_files = authority.issue("peer", B)
    peer_files.ca.with_name("both.pem").write_bytes(authority.cert.read_bytes() + other.cert.read_bytes())
    both = Files(peer_files.cert, peer_files.key, peer_files.ca.with_name("both.pem"))
    own = Files(ours.cert, ours.key, tmp_path / "ca.pem")
    own.ca.write_bytes(both.ca.read_bytes())
    async with node(**own.options(), reload_s=0.05) as there:
        old = await dial(there, both, B)
        following = other.issue("rotating", A, days=20)
        own.take(Files(following.cert, following.key, both.ca))
        await until(lambda: (there.credentials.expires_in_s or 0) > 19 * 86400)
        new = await dial(there, both, B)
        assert old.usable
        with pytest.raises(AuthenticationError, match="certificate is refused"):
            await dial(there, peer_files, B)  # it does not know the new authority
        own.cert.write_text("broken")
        await until(lambda: there.credentials.failures["tls"] > 0)
        body = there._scrape().body.decode()
        assert "kvxfer_tls_reload_failures_total 1.0" in body
        assert "kvxfer_tls_certificate_expires_seconds 1.7" in body
        for link in (old, new, await dial(there, both, B)):
            assert isinstance(link, Link)
            await link.aclose("done")
            assert isinstance(link.closed.result(), ClosedError)


async def test_links_end_when_their_authority_was_taken_away(authority: Authority, tmp_path: Path) -> None:
    """After the grace, in both directions; who has a certificate of what is left connects again."""
    next_one = Authority(tmp_path / "next", "next")
    both = tmp_path / "both.pem"
    both.write_bytes(authority.cert.read_bytes() + next_one.cert.read_bytes())
    old_peer, new_peer = authority.issue("old", B), next_one.issue("new", C)
    own = Files(*[tmp_path / f"own.{part}" for part in ("pem", "key", "ca")])
    issued = next_one.issue("own", A)
    for mine, its in ((own.cert, issued.cert), (own.key, issued.key), (own.ca, both)):
        mine.write_bytes(its.read_bytes())
    own.key.chmod(0o600)
    async with node(**own.options(), reload_s=0.05, reload_grace_s=0.3) as there:
        old = await dial(there, Files(old_peer.cert, old_peer.key, both), B)
        new = await dial(there, Files(new_peer.cert, new_peer.key, both), C)
        own.ca.write_bytes(next_one.cert.read_bytes())
        await until(lambda: there.credentials.authorities == 1)
        assert old.usable, "not before the grace is over"
        for link in (old, new):
            assert isinstance(await link.wait_closed(), PeerDraining)
        with pytest.raises(KvxferError):
            await dial(there, Files(old_peer.cert, old_peer.key, both), B)
        again = await dial(there, Files(new_peer.cert, new_peer.key, both), C)
        await asyncio.sleep(0.5)
        assert again.usable
        await again.aclose("done")


def keep_secrets(path: Path, *secrets: str) -> str:
    fresh = path.with_suffix(".new")
    fresh.write_text("\n".join(secrets) + "\n")
    fresh.chmod(0o600)
    fresh.replace(path)
    return str(path)


async def test_links_end_when_their_secret_was_taken_away(tmp_path: Path) -> None:
    """After the grace; who knows what is left connects again, and stays."""
    old, new, path = "the old secret of all", "the new secret of all", tmp_path / "secret"
    ours = {"secret_file": keep_secrets(path, old, new), "reload_s": 0.05, "reload_grace_s": 0.3}
    theirs = {"secret_file": keep_secrets(tmp_path / "theirs", new, old)}
    async with node(**ours) as there, node(secret=old) as late, node(**theirs) as early:
        links = [await one.pool.get(there.addresses, "", Deadline.after(5)) for one in (late, early)]
        keep_secrets(path, new)
        await until(lambda: there.credentials.secrets == (new.encode(),))
        assert all(link.usable for link in links), "not before the grace is over"
        for link in links:
            assert isinstance(await link.wait_closed(), PeerDraining)
        with pytest.raises(AuthenticationError):
            await late.pool.get(there.addresses, "", Deadline.after(5))
        again = await early.pool.get(there.addresses, "", Deadline.after(5))
        await asyncio.sleep(0.5)
        assert again.usable

"""TLS in memory: who gets through, who does not and is told why, and what a stranger can make us keep."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.errors import AuthenticationError, ConfigError, KvxferError, NotKvxfer, ProtocolError
from kvxfer.net.tls import HANDSHAKE_BYTES_MAX, Channel, Contexts, identity_of, load_contexts
from tests.certificates import CLIENT_AND_SERVER, Authority, Files, openssl

pytestmark = pytest.mark.once

A, B = "0a" * 16, "0b" * 16


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def contexts(authority: Authority) -> Contexts:
    return loaded(authority.issue("a", A))


def loaded(files: Files) -> Contexts:
    return load_contexts(str(files.cert), str(files.key), str(files.ca))


def unchecked(files: Files, ca: Path, **changes: ssl.TLSVersion) -> Contexts:
    """As somebody would make them who does not look at their own certificate first."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made[1].check_hostname = False
    for context in made:
        context.load_cert_chain(files.cert, files.key)
        context.load_verify_locations(ca)
        context.verify_mode = ssl.CERT_REQUIRED
        context.set_alpn_protocols(["kvxfer/1"])
        for name, value in changes.items():
            setattr(context, name, value)
    return Contexts(
        acceptor=made[0], dialler=made[1], own=identity_of({"notAfter": "Jan  1 00:00:00 2030 GMT", **NAMED})
    )


NAMED = {"subjectAltName": (("URI", f"kvxfer://node/{A}"),)}


class Ends:
    """Two channels, what each of them heard, and the error that ended it."""

    def __init__(self, dialler: Contexts, acceptor: Contexts) -> None:
        self.channels = Channel(dialler.dialler, "dialler"), Channel(acceptor.acceptor, "acceptor")
        self.heard = [b"", b""]
        self.errors: list[KvxferError | None] = [None, None]

    def carry(self, change: Callable[[bytes], bytes] = bytes) -> Ends:
        """Bytes go to and fro until nobody has anything to say."""
        moved = True
        while moved:
            moved = False
            for me, other in ((0, 1), (1, 0)):
                data = self.channels[me].output()
                if data and self.errors[other] is None:
                    moved = True
                    self.hear(other, change(data))
        return self

    def hear(self, me: int, data: bytes) -> None:
        try:
            self.heard[me] += self.channels[me].receive(data)
        except KvxferError as error:
            self.errors[me] = error

    def shake(self) -> Ends:
        self.channels[0].start()
        return self.carry()


def test_both_sides_learn_who_the_other_is(authority: Authority, contexts: Contexts) -> None:
    ends = Ends(contexts, loaded(authority.issue("b", B))).shake()
    assert ends.errors == [None, None]
    assert [channel.peer.node_id for channel in ends.channels if channel.peer] == [B, A]
    ends.channels[0].send(b"hello")
    ends.channels[1].send(bytes(1 << 20))
    ends.carry()
    assert ends.heard == [bytes(1 << 20), b"hello"]
    assert ends.channels[0]._tls.version() == "TLSv1.3"


def test_any_cut_of_the_stream_gives_the_same(contexts: Contexts) -> None:
    ends = Ends(contexts, contexts)
    ends.channels[0].start()
    for _ in range(4):
        for me, other in ((0, 1), (1, 0)):
            for byte in ends.channels[me].output():
                ends.hear(other, bytes([byte]))
    assert ends.errors == [None, None]
    assert all(channel.peer is not None for channel in ends.channels)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 4000), st.integers(1, 255), st.booleans())
def test_any_damage_ends_it_typed_and_lets_nothing_through(
    contexts: Contexts, place: int, flip: int, early: bool
) -> None:
    ends = Ends(contexts, contexts)
    ends.channels[0].start()
    if not early:
        ends.carry()
    ends.channels[0].send(b"said" * 500)
    seen = 0

    def damaged(data: bytes) -> bytes:
        nonlocal seen
        at, seen = place - seen, seen + len(data)
        return data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :] if 0 <= at < len(data) else data

    ends.carry(damaged)
    assert all(error is None or isinstance(error, ProtocolError | AuthenticationError) for error in ends.errors)
    assert (b"said" * 500).startswith(ends.heard[1])
    if place < seen and not early:
        assert any(ends.errors)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.binary(max_size=200), max_size=10), st.booleans())
def test_any_bytes_give_typed_errors_only(contexts: Contexts, chunks: list[bytes], looks_right: bool) -> None:
    for side in ("dialler", "acceptor"):
        channel = Channel(contexts.of(side), side)  # type: ignore[arg-type]
        channel.start()
        try:
            for chunk in [b"\x16\x03\x01", *chunks] if looks_right else chunks:
                assert channel.receive(chunk) == b""
        except (ProtocolError, AuthenticationError):
            pass
        assert channel.peer is None


def test_strangers_are_told_apart(contexts: Contexts) -> None:
    for data, kind, plain in (
        (b"GET / HTTP/1.1\r\n\r\n", NotKvxfer, False),
        (b"\x00", NotKvxfer, False),
        (b"KVXC\r\n\x01\n", AuthenticationError, True),
        (b"K", AuthenticationError, True),
        (b"\x16\x03\x01\x00\x05hello", NotKvxfer, False),
    ):
        channel = Channel(contexts.acceptor, "acceptor")
        with pytest.raises(kind):
            channel.receive(data)
        assert channel.plain == plain
    channel = Channel(contexts.dialler, "dialler")
    channel.start()
    with pytest.raises(NotKvxfer):
        channel.receive(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_a_handshake_is_bounded(contexts: Contexts) -> None:
    channel = Channel(contexts.acceptor, "acceptor")
    with pytest.raises(ProtocolError):
        for _ in range(HANDSHAKE_BYTES_MAX):
            channel.receive(b"\x16\x03\x01\x40\x00" + b"\x01\x01\x00\x00" + bytes(1000))


def test_old_tls_is_refused(authority: Authority, contexts: Contexts) -> None:
    old = unchecked(authority.issue("a2", A), authority.cert, maximum_version=ssl.TLSVersion.TLSv1_2)
    assert isinstance(Ends(old, contexts).shake().errors[1], NotKvxfer)
    assert any(Ends(contexts, old).shake().errors)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("kind", ["expired", "another authority", "not for this use", "no certificate"])
def test_wrong_certificates_are_refused_on_both_sides(
    kind: str, side: int, authority: Authority, contexts: Contexts, tmp_path: Path
) -> None:
    usage = "clientAuth" if side == 1 else "serverAuth"  # the one that it is not used for
    files = {
        "expired": lambda: authority.issue("expired", A, days=-1),
        "another authority": lambda: Authority(tmp_path / "other", "other").issue("a", A),
        "not for this use": lambda: authority.issue("use", extensions=(f"extendedKeyUsage={usage}",)),
        "no certificate": lambda: authority.issue("none", A),
    }[kind]()
    wrong = unchecked(files, authority.cert)
    if kind == "no certificate":
        if side == 1:
            return  # an acceptor without one cannot even begin
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.check_hostname = False
        bare.load_verify_locations(authority.cert)
        bare.set_alpn_protocols(["kvxfer/1"])
        wrong = Contexts(acceptor=wrong.acceptor, dialler=bare, own=wrong.own)
    pair = (wrong, contexts) if side == 0 else (contexts, wrong)
    ends = Ends(*pair).shake()
    ends.channels[side].send(b"let me in")
    ends.carry()
    honest, told = ends.errors[1 - side], ends.errors[side]
    assert isinstance(honest, AuthenticationError)
    assert isinstance(told, AuthenticationError)
    assert "refused TLS with this one" in told.message
    assert ends.channels[1 - side].peer is None
    assert ends.heard[1 - side] == b""


def test_another_protocol_below_tls_is_no_peer(authority: Authority, contexts: Contexts) -> None:
    web = unchecked(authority.issue("web", A), authority.cert)
    for context in (web.acceptor, web.dialler):
        context.set_alpn_protocols(["http/1.1"])
    assert any(isinstance(error, NotKvxfer) for error in Ends(web, contexts).shake().errors)


def test_the_node_id_follows_from_the_certificate(authority: Authority) -> None:
    def own(name: str, **more: str) -> str:
        return loaded(authority.issue(name, **more)).own.node_id  # type: ignore[arg-type]

    assert own("by-uri", node_id=B) == B
    assert own("x1", subject="/CN=node-1") == own("x2", subject="/CN=node-1")  # another key, the same node
    assert own("x3", subject="/CN=node-1") != own("x4", subject="/CN=node-2")
    named = (CLIENT_AND_SERVER, "subjectAltName=DNS:node-1.example,IP:10.0.0.1")
    both = {loaded(authority.issue(name, subject="/", extensions=named)).own.node_id for name in ("y1", "y2")}
    assert len(both) == 1


@pytest.mark.parametrize(
    "names",
    [f"URI:kvxfer://node/{A},URI:kvxfer://node/{B}", "URI:kvxfer://node/xyz", f"URI:kvxfer://node/{A.upper()}"],
)
def test_a_certificate_that_does_not_say_for_whom_it_is(names: str, authority: Authority) -> None:
    with pytest.raises(ConfigError, match="does not say which node"):
        loaded(authority.issue("unclear", extensions=(CLIENT_AND_SERVER, f"subjectAltName={names}")))


def test_a_certificate_without_a_name_is_nobody_s(authority: Authority) -> None:
    with pytest.raises(ConfigError, match="no name at all"):
        loaded(authority.issue("nobody", subject="/", extensions=(CLIENT_AND_SERVER,)))


def test_files_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    good, other = authority.issue("good", A), authority.issue("other", B)
    text, loose, fifo = tmp_path / "text", tmp_path / "loose", tmp_path / "fifo"
    text.write_text("no PEM")
    text.chmod(0o600)
    loose.write_bytes(good.key.read_bytes())
    loose.chmod(0o640)
    os.mkfifo(fifo, 0o600)
    for cert, key, ca, words in (
        (tmp_path / "none", good.key, good.ca, "tls_cert.*No such file"),
        (good.cert, tmp_path / "none", good.ca, "tls_key.*No such file"),
        (good.cert, good.key, tmp_path, "tls_ca.*not a regular file"),
        (good.cert, fifo, good.ca, "tls_key.*not a regular file"),
        (fifo, good.key, good.ca, "tls_cert.*not a regular file"),
        (good.cert, loose, good.ca, "tls_key.*others may access it"),
        (good.cert, good.key, text, "tls_ca.*no certificate"),
        (text, good.key, good.ca, "not a certificate and its key"),
        (good.cert, other.key, good.ca, "is not that of the certificate"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            load_contexts(str(cert), str(key), str(ca))
        assert "PRIVATE" not in str(caught.value)


def test_a_key_with_a_passphrase_asks_nobody(authority: Authority) -> None:
    good = authority.issue("locked", A)
    openssl("ec", "-in", str(good.key), "-aes256", "-passout", "pass:x", "-out", "locked.enc", cwd=authority.directory)
    locked = authority.directory / "locked.enc"
    locked.chmod(0o600)
    with pytest.raises(ConfigError, match="passphrase"):
        load_contexts(str(good.cert), str(locked), str(good.ca))

"""Mutual TLS without a socket: bytes from the wire go in, bytes for the wire and the other side's identity come out.

The idea: because nothing here reads a socket, a connection in its TLS handshake is counted, timed and bounded like any
other that has not yet proved itself, in every event loop alike. TLS 1.3 only, and each side must show a certificate of
the configured authorities. Who a node is follows from its certificate alone: from the one URI
`kvxfer://node/<32 hex digits>` among its alternative names, or else from all of its names. So a node cannot call itself
another one, nothing has to be remembered, and a new certificate with the same names is still the same node.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kvxfer.config.sources import read_regular_file
from kvxfer.errors import AuthenticationError, ConfigError, KvxferError, NotKvxfer, ProtocolError

Side = Literal["dialler", "acceptor"]
APPLICATION = "kvxfer/1"  # what both sides say that they speak below TLS; an HTTPS server says something else
NODE_URI = re.compile(r"kvxfer://node/([0-9a-f]{32})")
NODE_PREFIX = "kvxfer://node/"
HANDSHAKE_BYTES_MAX = 32 << 10  # from a side that has not yet proved itself
READ_BYTES = 256 << 10
HANDSHAKE_RECORD = 0x16  # the first byte of any TLS client
PLAIN = b"KVXC"  # the first bytes of kvxfer without TLS
SHAKES_MAX = 8  # flights of a handshake between two ends in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a certificate is for, and until when (seconds of Unix time)."""

    node_id: str
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Contexts:
    """What TLS needs for either side, and who this side is to others."""

    acceptor: ssl.SSLContext
    dialler: ssl.SSLContext
    own: Identity

    def of(self, side: Side) -> ssl.SSLContext:
        return self.acceptor if side == "acceptor" else self.dialler


def identity_of(certificate: Mapping[str, Any]) -> Identity:
    """Whose certificate it is, from what `ssl` tells of one that has been verified. Raises `AuthenticationError`."""
    names = sorted((str(kind), str(value)) for kind, value in certificate.get("subjectAltName", ()))
    uris = [value for kind, value in names if kind == "URI" and value.startswith(NODE_PREFIX)]
    expires_at = float(ssl.cert_time_to_seconds(certificate["notAfter"]))
    if uris:
        found = NODE_URI.fullmatch(uris[0])
        if found is None or len(uris) > 1:
            hint = f"exactly one URI {NODE_PREFIX}<32 lower-case hex digits>"
            raise AuthenticationError("the certificate does not say which node it is for", hint=hint)
        return Identity(node_id=found[1], expires_at=expires_at)
    subject = [(str(kind), str(value)) for part in certificate.get("subject", ()) for kind, value in part]
    if not names and not subject:
        raise AuthenticationError("the certificate has no name at all", hint=f"give it a URI {NODE_PREFIX}<node id>")
    parts = [word.encode() for name in (*subject, ("", ""), *names) for word in name]
    digest = hashlib.sha256(b"kvxfer node" + b"".join(len(part).to_bytes(4, "big") + part for part in parts))
    return Identity(node_id=digest.hexdigest()[:32], expires_at=expires_at)


def load_contexts(cert: str, key: str, ca: str) -> Contexts:
    """Read the three files, and try them on each other. Raises `ConfigError` that says which is wrong, and why."""
    for name, path in (("tls_key", key), ("tls_cert", cert), ("tls_ca", ca)):
        read_regular_file(name, path, 1, private=name == "tls_key")
    acceptor, dialler = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    dialler.check_hostname = False  # an address is no identity here; the certificate's node id is
    acceptor.num_tickets = 0  # each connection shows its certificate anew
    for context in (acceptor, dialler):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.set_alpn_protocols([APPLICATION])
        try:
            context.load_verify_locations(cafile=ca)
        except (OSError, ValueError) as error:
            raise _wrong("tls_ca", ca, "holds no certificate in PEM") from error
        try:
            context.load_cert_chain(cert, key, password=_no_passphrase)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise _wrong("tls_cert,tls_key", cert, f"the key in {key} is not that of the certificate") from error
            why = "not a certificate and its key in PEM, or the key has a passphrase"
            raise _wrong("tls_cert,tls_key", cert, why) from error
        except (OSError, ValueError) as error:
            raise _wrong("tls_cert,tls_key", cert, "cannot be used") from error
    return Contexts(acceptor=acceptor, dialler=dialler, own=_own_identity(acceptor, dialler, cert))


def _wrong(key: str, path: str, why: str, hint: str | None = None) -> ConfigError:
    return ConfigError(f"bad value for {key}: {why}", key=key, value=path, hint=hint)


def _no_passphrase() -> str:
    """Nobody is there to be asked, and OpenSSL would ask at the terminal."""
    return ""


def _own_identity(acceptor: ssl.SSLContext, dialler: ssl.SSLContext, cert: str) -> Identity:
    """Shake hands with oneself: what peers would refuse (expired, another authority, wrong use) is found here."""
    ends = Channel(dialler, "dialler"), Channel(acceptor, "acceptor")
    try:
        ends[0].start()
        for _ in range(SHAKES_MAX):
            for one, other in (ends, ends[::-1]):
                if data := one.output():
                    other.receive(data)
    except KvxferError as refused:
        hint = "a certificate of an authority in tls_ca, in force, for use as client and as server, with a name"
        raise _wrong("tls_cert", cert, f"peers would refuse it: {refused.message}", hint) from refused
    own = ends[0].peer
    if own is None or ends[1].peer is None:
        raise _wrong("tls_cert", cert, "a handshake with itself did not end")
    return own


class Channel:
    """TLS on one connection. `start`, then `receive` what came and send whatever `output` has after each call.

    ``peer`` is who the other side has proved to be; nothing it said is delivered before. Methods raise typed errors,
    and then `output` may still hold the alert that tells the other side. ``plain`` says that it speaks kvxfer without
    TLS, so it would understand an answer without.
    """

    def __init__(self, context: ssl.SSLContext, side: Side, authorities: int = 0) -> None:
        self._side: Side = side
        self.authorities = authorities
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=side == "acceptor")
        self._received = 0
        self.established = False  # keys are agreed; whose they are is in `peer`
        self.peer: Identity | None = None
        self.plain = False
        self._failed = False

    def start(self) -> None:
        """A dialler speaks first."""
        if self._side == "dialler":
            self._shake()

    def output(self) -> bytes:
        """What is to be sent now."""
        return self._outgoing.read()

    def receive(self, data: bytes) -> bytes:
        """Take what came from the wire; returns what the other side said, once it has proved who it is.

        Raises `AuthenticationError`, `NotKvxfer` or another `ProtocolError`.
        """
        try:
            if self.peer is None:
                self._look_at(data)
                self._incoming.write(data)
                self._shake()
                return b"" if self.peer is None else self._read()
            self._incoming.write(data)
            return self._read()
        except ssl.SSLError as error:
            raise self._typed(error) from None

    def send(self, data: bytes) -> None:
        """Encrypt. Before the handshake is done, and after an error, nobody could read it: it is dropped."""
        if self.established and not self._failed:
            try:
                self._tls.write(data)
            except ssl.SSLError as error:
                raise self._typed(error) from None

    def end(self) -> None:
        """Say that nothing follows."""
        if self.established and not self._failed:
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()

    def _look_at(self, data: bytes) -> None:
        """Strangers are told apart by their first byte, and none of them may fill the memory."""
        if not self._received and data and self._side == "acceptor" and data[0] != HANDSHAKE_RECORD:
            if PLAIN.startswith(data[: len(PLAIN)]):
                self.plain = True
                hint = "set tls_cert, tls_key and tls_ca at the node that dials"
                raise AuthenticationError("this node takes TLS only, and the dialler uses none", hint=hint)
            raise NotKvxfer("whatever connected speaks neither TLS nor kvxfer")
        self._received += len(data)
        if self._received > HANDSHAKE_BYTES_MAX:
            raise ProtocolError("the TLS handshake is too long", limit=HANDSHAKE_BYTES_MAX)

    def _shake(self) -> None:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        self.established = True
        if self._tls.selected_alpn_protocol() != APPLICATION:
            raise NotKvxfer("the other side speaks TLS, and something else than kvxfer below it")
        self.peer = identity_of(self._tls.getpeercert() or {})

    def _read(self) -> bytes:
        said = bytearray()
        while True:
            try:
                part = self._tls.read(READ_BYTES)
            except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
                return bytes(said)
            if not part:
                return bytes(said)
            said += part

    def _typed(self, error: ssl.SSLError) -> KvxferError:
        """What OpenSSL says, in our words. Its reasons are fixed texts; nothing of what was sent is in them."""
        self._failed = True
        reason = error.reason or type(error).__name__
        words = reason.lower().replace("_", " ")
        if isinstance(error, ssl.SSLCertVerificationError):
            why = str(getattr(error, "verify_message", "")) or "not valid"
            hint = "look at its dates, and at tls_ca on both sides"
            return AuthenticationError(f"the other side's certificate is refused: {why}", hint=hint)
        if "PEER_DID_NOT_RETURN" in reason:
            return AuthenticationError("the other side showed no certificate")
        if "ALERT" in reason:
            hint = "look at the dates and the authority of tls_cert here, and at tls_ca there"
            return AuthenticationError(f"the other side refused TLS with this one: {words}", hint=hint)
        if self.peer is None:
            return NotKvxfer(f"the other side does not speak TLS as kvxfer does: {words}")
        return ProtocolError(f"the TLS connection is damaged: {words}")


# -- a transport with TLS on it, for links: what is written goes out encrypted, what came in is given back in the clear
# The idea: a link sees the same few methods as those of a plain transport, so it need not know which one it has; the
# decisions are those of `tls.Channel`, and this file only carries its output to the socket.


class Wire(Protocol):
    """What a link asks of its transport; an `asyncio.Transport` has it."""

    def write(self, data: bytes) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def get_write_buffer_size(self) -> int: ...
    def get_extra_info(self, name: str, default: Any = None) -> Any: ...


class SecureTransport:
    """One connection with TLS. Errors of `write` end the connection; those of `receive` are raised."""

    def __init__(self, wire: asyncio.Transport, channel: Channel) -> None:
        self._wire = wire
        self._channel = channel

    def start(self) -> None:
        """Begin the handshake."""
        self._channel.start()
        self._carry()

    def receive(self, data: bytes) -> bytes:
        """What the other side said. Raises as `Channel.receive` does, when its alert is on the way."""
        try:
            return self._channel.receive(data)
        finally:
            self._carry()

    def write(self, data: bytes) -> None:
        """Send; dropped while the other side has not yet proved itself."""
        try:
            self._channel.send(data)
        except KvxferError:
            self._wire.abort()
            return
        self._carry()

    def write_plain(self, data: bytes) -> None:
        """Send without TLS, to a side that speaks none: it shall know why it is refused."""
        self._wire.write(data)

    def close(self) -> None:
        """Say so, send what is queued, close."""
        self._channel.end()
        self._carry()
        self._wire.close()

    def abort(self) -> None:
        """Drop the connection."""
        self._wire.abort()

    def pause_reading(self) -> None:
        self._wire.pause_reading()

    def resume_reading(self) -> None:
        self._wire.resume_reading()

    def get_write_buffer_size(self) -> int:
        return self._wire.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._wire.get_extra_info(name, default)

    def _carry(self) -> None:
        if data := self._channel.output():
            self._wire.write(data)

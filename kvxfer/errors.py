"""Every error that kvxfer raises: one tree that answers two questions, whose fault it was and how much broke.

``KvxferError`` has one subclass per answer (see the class docstrings); below them stand the concrete errors, each with
a stable ``code`` that also travels on the wire and labels metrics. Callers branch on classes or on ``code``; nobody
parses the text. This module imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

NO_PORTS_HINT = "end what holds so many connections or listeners, or widen net.ipv4.ip_local_port_range"

Field = str | int | float | bool | None


class KvxferError(Exception):
    """Root of the tree.

    ``message`` says what happened and where, ``hint`` what to do. ``fields`` holds whatever else is known (limits,
    values, addresses); the named attributes below are the ones that every caller may rely on.
    """

    code: ClassVar[str] = "kvxfer"
    retryable_default: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        op_id: int | None = None,
        peer: str | None = None,
        transport: str | None = None,
        status: int | None = None,
        retryable: bool | None = None,
        hint: str | None = None,
        **fields: Field,
    ) -> None:
        self.message = message
        self.op_id = op_id
        self.peer = peer
        self.transport = transport
        self.status = status
        self.retryable = self.retryable_default if retryable is None else retryable
        self.hint = hint
        self.fields: dict[str, Field] = fields
        super().__init__(message)

    def __str__(self) -> str:
        known = {"op": self.op_id, "peer": self.peer, "transport": self.transport, **self.fields}
        details = ", ".join(f"{name}={value}" for name, value in known.items() if value is not None)
        text = self.message + (f" [{details}]" if details else "")
        return text + (f" ({self.hint})" if self.hint else "")


# -- the caller's fault: nothing happened ---------------------------------------------------------


class UsageError(KvxferError, ValueError):
    """The call was wrong; nothing was changed."""

    code = "usage"


class ConfigError(UsageError):
    """A configuration value is missing, unknown, of the wrong type or out of range."""

    code = "config"


class InvalidLength(UsageError):
    """A length or offset is zero, negative, not an integer, or overflows."""

    code = "invalid_length"


class OutOfRange(UsageError):
    """A span leaves the region or grant that it refers to."""

    code = "out_of_range"


class OverlapError(UsageError):
    """A registration overlaps another region in part, a layer another layer, or a push what another push writes."""

    code = "overlap"


class AlignmentError(UsageError):
    """An address or length is not aligned as the transport requires."""

    code = "alignment"


class RegionBusy(UsageError):
    """The region (or span) still has transfers in flight."""

    code = "region_busy"
    retryable_default = True


class UnknownRegion(UsageError):
    """No such region, grant, peer or import in this process (never made, or released)."""

    code = "unknown_region"


class ReadOnlyError(UsageError):
    """A write into memory that was registered or granted read-only."""

    code = "read_only"


class TooLarge(UsageError):
    """A request exceeds a named maximum and can never succeed."""

    code = "too_large"


class WrongThread(UsageError):
    """A client or engine was used from a thread that does not own it."""

    code = "wrong_thread"


class ForkedClientError(UsageError):
    """A client or engine was used in a forked child."""

    code = "forked"


class ClosedError(UsageError):
    """The client, engine or landing is closed."""

    code = "closed"


# -- the peer broke the protocol ------------------------------------------------------------------------


class ProtocolError(KvxferError):
    """The other side broke the protocol; its connection is closed."""

    code = "protocol"


class NotKvxfer(ProtocolError):
    """Whatever answers at this address does not speak kvxfer's protocol."""

    code = "not_kvxfer"


class VersionMismatch(ProtocolError):
    """Both speak kvxfer, but no common protocol version."""

    code = "version_mismatch"


class UnknownMessage(ProtocolError):
    """A message type that this version does not know."""

    code = "unknown_message"


class FrameTooLong(ProtocolError):
    """A frame announces more than the maximum."""

    code = "frame_too_long"


# -- retry later ------------------------------------------------------------------------------------


class BusyError(KvxferError):
    """A bounded resource is full right now."""

    code = "busy"
    retryable_default = True


class TooManyPending(BusyError):
    """Too many postings, claims or unclaimed messages."""

    code = "too_many_pending"


class PeerBackpressure(BusyError):
    """The queue to this peer is full: it does not keep up."""

    code = "peer_backpressure"


# -- this transfer ------------------------------------------------------------------------------------


class TransferError(KvxferError):
    """One transfer failed; the peer is fine."""

    code = "transfer"


class TransferTimeout(TransferError, TimeoutError):
    """The deadline passed. The span stays quarantined until the engine is quiet."""

    code = "timeout"
    retryable_default = True


class Stalled(TransferTimeout):
    """The deadline passed, and for the last while before it nothing had moved: the other side hangs or is cut off."""

    code = "stalled"


class Incomplete(TransferTimeout):
    """Of the pushes into an offer some were committed, and the rest did not come in time (or was not to come at all):
    ``fields['missing']`` names what is missing.
    """

    code = "incomplete"


class TransferCancelled(TransferError):
    """The transfer was cancelled, by this side or by the peer (``fields['by']``)."""

    code = "cancelled"


class AccessDenied(TransferError):
    """The descriptor does not allow this direction."""

    code = "access_denied"


class WrongKey(TransferError):
    """The descriptor's key does not match the owner's."""

    code = "wrong_key"


class UnknownTransfer(TransferError):
    """The other side knows no such offer, ticket, name or grant."""

    code = "unknown_transfer"


class StaleDescriptor(UnknownTransfer):
    """The descriptor is of an earlier generation of the region, or of one that is gone: get a new one."""

    code = "stale_descriptor"


class LeaseExpired(TransferError):
    """The offer or ticket ran out before the transfer."""

    code = "lease_expired"


class Revoked(TransferError):
    """The owner withdrew the memory while the transfer ran."""

    code = "revoked"


class IntegrityError(TransferError):
    """Checksums of source and target differ: the bytes must not be used."""

    code = "integrity"


class GeometryMismatch(TransferError):
    """The two caches cannot be mapped onto each other; no byte was moved."""

    code = "geometry"


class PartialTransfer(TransferError):
    """Some moves failed; ``fields['failed']`` lists their indexes, ``causes`` holds the error of each."""

    code = "partial"
    causes: Mapping[int, KvxferError] = MappingProxyType({})


class InjectedFault(TransferError):
    """The fault transport failed it on purpose."""

    code = "injected"


# -- this peer ----------------------------------------------------------------------------------------


class PeerError(KvxferError):
    """Everything to that peer is affected."""

    code = "peer"
    retryable_default = True


class PeerLost(PeerError):
    """The connection to the peer ended, or the peer's process died."""

    code = "peer_lost"


class PeerUnreachable(PeerError):
    """No candidate address could be reached; ``fields`` lists the reason of each."""

    code = "peer_unreachable"


class PeerIncarnationMismatch(PeerError):
    """The peer restarted: the descriptor or ticket belongs to an earlier process."""

    code = "peer_incarnation"


class IdentityMismatch(PeerError):
    """Another node answers at this address."""

    code = "peer_identity"


class AuthenticationError(PeerError):
    """The shared secret or the certificate is missing, or is not accepted."""

    code = "authentication"
    retryable_default = False


class EncryptionMismatch(PeerError):
    """One side encrypts its data path (`tcp_encryption`) and the other does not: nothing goes in clear instead."""

    code = "encryption_mismatch"
    retryable_default = False


class NotAllowed(PeerError):
    """The other side proved who it is, and that node or namespace may not connect here."""

    code = "not_allowed"
    retryable_default = False


class PeerDraining(PeerError):
    """The peer is shutting down and takes no new work."""

    code = "peer_draining"


# -- this node ----------------------------------------------------------------------------------------


class TransportError(KvxferError):
    """This node cannot: resources, permissions or support are missing."""

    code = "transport"


class TransportUnavailable(TransportError):
    """A transport that was asked for cannot be used here."""

    code = "transport_unavailable"


class RegistrationError(TransportError):
    """Memory could not be registered or allocated."""

    code = "registration"


class ShmTooSmall(RegistrationError):
    """Shared memory has not enough room."""

    code = "shm_too_small"


class ResourceExhausted(TransportError):
    """Out of file descriptors, memory, locked memory or another limit of this process."""

    code = "resource_exhausted"


class DaemonUnavailable(TransportError):
    """The node's daemon cannot be reached over its Unix socket."""

    code = "daemon_unavailable"
    retryable_default = True


class InternalError(KvxferError):
    """A bug of kvxfer's own."""

    code = "internal"


def _tree(root: type[KvxferError]) -> dict[str, type[KvxferError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


BY_CODE: Mapping[str, type[KvxferError]] = _tree(KvxferError)
NOT_TOLD = (PeerError, TransferTimeout, BusyError, ClosedError)  # the other side may not have heard what was said


_NAMED: Mapping[str, type] = {
    "op_id": int,
    "peer": str,
    "transport": str,
    "status": int,
    "retryable": bool,
    "hint": str,
}


def ended_by_other(code: str, message: str) -> KvxferError:
    """Why a flow ended that the other side ended, or the daemon of either when it was told to stop.

    What was a mistake of the other side's caller (its client was closed, its push was left early) is not one of ours:
    the flow was cancelled.
    """
    if code == PeerDraining.code:
        return TransferCancelled(message, by="draining")
    if issubclass(BY_CODE.get(code, TransferCancelled), UsageError):
        return TransferCancelled(message, by="peer", why=code)
    return from_code(code or TransferCancelled.code, message, by="peer")


def from_code(code: str, message: str, /, **known: Field) -> KvxferError:
    """Rebuild an error that came over the wire; an unknown code becomes the root class with the code in its fields.

    Any names and types are taken, since a peer chose them: what does not fit a named attribute stays in ``fields``.
    """
    error = BY_CODE.get(code, KvxferError)(message)
    if code not in BY_CODE:
        error.fields["unknown_code"] = code
    for name, value in known.items():
        if name in _NAMED and type(value) is _NAMED[name]:
            setattr(error, name, value)
        else:
            error.fields[name] = value
    return error

"""Native status codes and the typed error of each: the one place where the two vocabularies meet.

The codes mirror ``status.h`` (a test compares them); an unknown code becomes the base class of its range, so an engine
that is newer than this file still raises something that callers can handle.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import IntEnum

from kvxfer import errors
from kvxfer.errors import Field, KvxferError

ERRNO_MAX = 4095  # of the kernel's; what is larger was answered by an accelerator's library


class Status(IntEnum):
    """``enum kvx_status`` without its prefix."""

    OK = 0
    AGAIN = 1
    INVALID = 2
    LENGTH = 3
    OVERLAP = 4
    ALIGN = 5
    BUSY = 6
    NO_REGION = 7
    NO_PEER = 8
    NO_IMPORT = 9
    NO_GRANT = 10
    NO_TRANSPORT = 11
    LIMIT = 12
    CLOSED = 13
    LOCAL_RANGE = 14
    READ_ONLY = 15
    PENDING = 16
    CANCELLED = 100
    RANGE = 101
    ACCESS = 102
    KEY = 103
    STALE = 104
    UNKNOWN = 105
    REVOKED = 106
    INTEGRITY = 107
    INJECTED = 108
    PEER_LOST = 200
    UNREACHABLE = 201
    TIMEOUT = 202
    NOT_KVXFER = 203
    VERSION = 204
    OTHER_HOST = 205
    REFUSED = 206
    LINK = 207
    ENCRYPTION = 208
    SECRET = 209
    NOT_SENT = 210
    NOMEM = 300
    FDS = 301
    SHM_SPACE = 302
    MEMLOCK = 303
    UNSUPPORTED = 304
    SYSTEM = 305
    CMA_DENIED = 306
    NO_DEVICE = 307
    NO_CONTEXT = 308
    DEVICE = 309
    DEVICE_MEMORY = 310
    HOST_MEMORY = 311
    INTERNAL = 400


# class, what happened, what to do
_Entry = tuple[type[KvxferError], str, str | None]

BY_STATUS: Mapping[Status, _Entry] = {
    Status.AGAIN: (errors.BusyError, "the engine is full", "try again when a transfer has completed"),
    Status.INVALID: (errors.UsageError, "an argument makes no sense", None),
    Status.LENGTH: (errors.InvalidLength, "a length is zero, too large or overflows", None),
    Status.OVERLAP: (errors.OverlapError, "the memory overlaps a registered region in part", None),
    Status.ALIGN: (errors.AlignmentError, "address or length is not aligned as the transport requires", None),
    Status.BUSY: (errors.RegionBusy, "the region has transfers in flight", "wait for them"),
    Status.NO_REGION: (errors.UnknownRegion, "no such region", None),
    Status.NO_PEER: (errors.UnknownRegion, "no such peer", None),
    Status.NO_IMPORT: (errors.UnknownRegion, "no such import", None),
    Status.NO_GRANT: (errors.UnknownRegion, "no such grant", None),
    Status.NO_TRANSPORT: (errors.TransportUnavailable, "no such transport in this engine", None),
    Status.LIMIT: (errors.TooLarge, "a configured maximum is reached", None),
    Status.CLOSED: (errors.ClosedError, "the engine is closed", None),
    Status.LOCAL_RANGE: (errors.OutOfRange, "a segment leaves the local region", None),
    Status.READ_ONLY: (errors.ReadOnlyError, "the local memory was registered read-only", None),
    Status.PENDING: (errors.InternalError, "an internal status escaped the engine", None),
    Status.CANCELLED: (errors.TransferCancelled, "the transfer was cancelled", None),
    Status.RANGE: (errors.OutOfRange, "a segment leaves the remote memory", None),
    Status.ACCESS: (errors.AccessDenied, "the descriptor does not allow this direction", None),
    Status.KEY: (errors.WrongKey, "the descriptor's key does not match the owner's", None),
    Status.STALE: (errors.StaleDescriptor, "the descriptor is of another generation of the region", None),
    Status.UNKNOWN: (errors.UnknownTransfer, "the owner knows no such grant", "it expired or was released"),
    Status.REVOKED: (errors.Revoked, "the owner withdrew the memory", None),
    Status.INTEGRITY: (errors.IntegrityError, "checksums of source and target differ", "do not use the bytes"),
    Status.INJECTED: (errors.InjectedFault, "failed on purpose", None),
    Status.PEER_LOST: (errors.PeerLost, "the connection to the peer ended", None),
    Status.NOT_SENT: (errors.PeerLost, "the connection to the peer ended before anything was sent", None),
    Status.UNREACHABLE: (errors.PeerUnreachable, "the peer could not be reached", None),
    Status.TIMEOUT: (errors.PeerUnreachable, "the peer did not answer in time", None),
    Status.NOT_KVXFER: (errors.NotKvxfer, "whatever answered does not speak kvxfer", None),
    Status.VERSION: (errors.VersionMismatch, "the peer speaks another version of the data protocol", None),
    Status.OTHER_HOST: (errors.PeerUnreachable, "the peer is on another host than this transport reaches", None),
    Status.REFUSED: (errors.PeerError, "the peer is full or refuses us", None),
    Status.LINK: (
        errors.PeerLost,
        "the accelerator library's link to the peer failed",
        "it is made anew on next use; if it fails again, look at both cards' network with `kvxfer doctor`",
    ),
    Status.ENCRYPTION: (
        errors.EncryptionMismatch,
        "this side and the peer differ in tcp_encryption",
        "set tcp_encryption to the same value on both sides",
    ),
    Status.SECRET: (
        errors.AuthenticationError,
        "whoever answers does not know the secret of this endpoint (tcp_encryption)",
        "the owner has restarted, or somebody stands in between: get a new descriptor",
    ),
    Status.NOMEM: (errors.ResourceExhausted, "out of memory", None),
    Status.FDS: (errors.ResourceExhausted, "out of file descriptors", "raise the limit of open files (ulimit -n)"),
    Status.SHM_SPACE: (errors.ShmTooSmall, "there is not enough memory for the allocation", "ask for less"),
    Status.MEMLOCK: (errors.ResourceExhausted, "the limit of locked memory is too low", "raise it (ulimit -l)"),
    Status.UNSUPPORTED: (errors.TransportUnavailable, "this machine or transport cannot do it", None),
    Status.SYSTEM: (errors.TransportError, "a system call failed", None),
    Status.CMA_DENIED: (errors.TransportUnavailable, "cross-memory attach is not allowed between the processes", None),
    Status.NO_DEVICE: (errors.TransportUnavailable, "no such accelerator", "`kvxfer doctor` lists the devices"),
    Status.NO_CONTEXT: (
        errors.TransportUnavailable,
        "the accelerator has no context in this thread: no device was set",
        "set the device before the framework's memory is used or registered",
    ),
    Status.DEVICE: (
        errors.TransportError,
        "the accelerator or its driver failed",
        "`kvxfer doctor` tells its state; after a lost device only a restart of this process helps",
    ),
    Status.DEVICE_MEMORY: (
        errors.RegistrationError,
        "not enough contiguous memory on the accelerator",
        "ask for less, leave headroom beside the framework's pool, or allow spill='dram'",
    ),
    Status.HOST_MEMORY: (
        errors.RegistrationError,
        "the accelerator does not reach this host memory",
        "it must come from the driver: allocate it with memory='dram' and device=N",
    ),
    Status.INTERNAL: (errors.InternalError, "a bug in the native engine", None),
}

_RANGES: tuple[tuple[int, int, type[KvxferError]], ...] = (
    (1, 99, errors.UsageError),
    (100, 199, errors.TransferError),
    (200, 299, errors.PeerError),
    (300, 399, errors.TransportError),
)


def _entry(status: int) -> _Entry:
    try:
        return BY_STATUS[Status(status)]
    except (ValueError, KeyError):
        for low, high, base in _RANGES:
            if low <= status <= high:
                return base, f"native status {status}", None
        return errors.InternalError, f"native status {status}", None


def error_for(
    status: int,
    *,
    sys_errno: int = 0,
    what: str = "",
    op_id: int | None = None,
    peer: str | None = None,
    transport: str | None = None,
    retryable: bool | None = None,
    **fields: Field,
) -> KvxferError:
    """The typed error of a native status; ``what`` names the call that failed."""
    kind, message, hint = _entry(status)
    if sys_errno > ERRNO_MAX:
        fields["vendor_status"] = sys_errno
    elif sys_errno:
        fields["errno"] = sys_errno
        message = f"{message}: {os.strerror(sys_errno)}"
    if what:
        message = f"{what}: {message}"
    return kind(
        message, op_id=op_id, peer=peer, transport=transport, status=status, retryable=retryable, hint=hint, **fields
    )


def limit_reached(what: str, option: str, limit: int, ends: str) -> errors.TooManyPending:
    """A number of things that this engine may hold is reached: which option says so, its value, and what to do. It
    passes when some of them have ended; ``ends`` says what that is.
    """
    return errors.TooManyPending(
        f"{what}: this engine holds as many as {option} allows, {limit}",
        status=int(Status.LIMIT),
        option=option,
        limit=limit,
        hint=f"{ends}, or raise {option}",
    )


def raise_for(
    status: int,
    *,
    sys_errno: int = 0,
    what: str = "",
    op_id: int | None = None,
    peer: str | None = None,
    transport: str | None = None,
    **fields: Field,
) -> None:
    """Raise the typed error unless ``status`` is OK."""
    if status != 0:
        raise error_for(
            status,
            sys_errno=sys_errno,
            what=what,
            op_id=op_id,
            peer=peer,
            transport=transport,
            retryable=None,
            **fields,
        )

"""Native status codes and the typed error of each: the one place where the two vocabularies meet.

The codes mirror ``status.h`` (a test compares them); an unknown code becomes the base class of its range, so an engine
that is newer than this file still raises something that callers can handle.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from kvxfer import errors
from kvxfer.errors import Field, KvxferError, UsageError
from kvxfer.native.types import DeviceInfo, MemoryKind, RegionInfo

ERRNO_MAX = 4095  # of the kernel's; what is larger was answered by an accelerator's library


class StatusCode(IntEnum):
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

BY_STATUS: Mapping[StatusCode, _Entry] = {
    StatusCode.AGAIN: (errors.BusyError, "the engine is full", "try again when a transfer has completed"),
    StatusCode.INVALID: (errors.UsageError, "an argument makes no sense", None),
    StatusCode.LENGTH: (errors.InvalidLength, "a length is zero, too large or overflows", None),
    StatusCode.OVERLAP: (errors.OverlapError, "the memory overlaps a registered region in part", None),
    StatusCode.ALIGN: (errors.AlignmentError, "address or length is not aligned as the transport requires", None),
    StatusCode.BUSY: (errors.RegionBusy, "the region has transfers in flight", "wait for them"),
    StatusCode.NO_REGION: (errors.UnknownRegion, "no such region", None),
    StatusCode.NO_PEER: (errors.UnknownRegion, "no such peer", None),
    StatusCode.NO_IMPORT: (errors.UnknownRegion, "no such import", None),
    StatusCode.NO_GRANT: (errors.UnknownRegion, "no such grant", None),
    StatusCode.NO_TRANSPORT: (errors.TransportUnavailable, "no such transport in this engine", None),
    StatusCode.LIMIT: (errors.TooLarge, "a configured maximum is reached", None),
    StatusCode.CLOSED: (errors.ClosedError, "the engine is closed", None),
    StatusCode.LOCAL_RANGE: (errors.OutOfRange, "a segment leaves the local region", None),
    StatusCode.READ_ONLY: (errors.ReadOnlyError, "the local memory was registered read-only", None),
    StatusCode.PENDING: (errors.InternalError, "an internal status escaped the engine", None),
    StatusCode.CANCELLED: (errors.TransferCancelled, "the transfer was cancelled", None),
    StatusCode.RANGE: (errors.OutOfRange, "a segment leaves the remote memory", None),
    StatusCode.ACCESS: (errors.AccessDenied, "the descriptor does not allow this direction", None),
    StatusCode.KEY: (errors.WrongKey, "the descriptor's key does not match the owner's", None),
    StatusCode.STALE: (errors.StaleDescriptor, "the descriptor is of another generation of the region", None),
    StatusCode.UNKNOWN: (errors.UnknownTransfer, "the owner knows no such grant", "it expired or was released"),
    StatusCode.REVOKED: (errors.Revoked, "the owner withdrew the memory", None),
    StatusCode.INTEGRITY: (errors.IntegrityError, "checksums of source and target differ", "do not use the bytes"),
    StatusCode.INJECTED: (errors.InjectedFault, "failed on purpose", None),
    StatusCode.PEER_LOST: (errors.PeerLost, "the connection to the peer ended", None),
    StatusCode.NOT_SENT: (errors.PeerLost, "the connection to the peer ended before anything was sent", None),
    StatusCode.UNREACHABLE: (errors.PeerUnreachable, "the peer could not be reached", None),
    StatusCode.TIMEOUT: (errors.PeerUnreachable, "the peer did not answer in time", None),
    StatusCode.NOT_KVXFER: (errors.NotKvxfer, "whatever answered does not speak kvxfer", None),
    StatusCode.VERSION: (errors.VersionMismatch, "the peer speaks another version of the data protocol", None),
    StatusCode.OTHER_HOST: (errors.PeerUnreachable, "the peer is on another host than this transport reaches", None),
    StatusCode.REFUSED: (errors.PeerError, "the peer is full or refuses us", None),
    StatusCode.LINK: (
        errors.PeerLost,
        "the accelerator library's link to the peer failed",
        "it is made anew on next use; if it fails again, look at both cards' network with `kvxfer doctor`",
    ),
    StatusCode.ENCRYPTION: (
        errors.EncryptionMismatch,
        "this side and the peer differ in tcp_encryption",
        "set tcp_encryption to the same value on both sides",
    ),
    StatusCode.SECRET: (
        errors.AuthenticationError,
        "whoever answers does not know the secret of this endpoint (tcp_encryption)",
        "the owner has restarted, or somebody stands in between: get a new descriptor",
    ),
    StatusCode.NOMEM: (errors.ResourceExhausted, "out of memory", None),
    StatusCode.FDS: (errors.ResourceExhausted, "out of file descriptors", "raise the limit of open files (ulimit -n)"),
    StatusCode.SHM_SPACE: (errors.ShmTooSmall, "there is not enough memory for the allocation", "ask for less"),
    StatusCode.MEMLOCK: (errors.ResourceExhausted, "the limit of locked memory is too low", "raise it (ulimit -l)"),
    StatusCode.UNSUPPORTED: (errors.TransportUnavailable, "this machine or transport cannot do it", None),
    StatusCode.SYSTEM: (errors.TransportError, "a system call failed", None),
    StatusCode.CMA_DENIED: (
        errors.TransportUnavailable,
        "cross-memory attach is not allowed between the processes",
        None,
    ),
    StatusCode.NO_DEVICE: (errors.TransportUnavailable, "no such accelerator", "`kvxfer doctor` lists the devices"),
    StatusCode.NO_CONTEXT: (
        errors.TransportUnavailable,
        "the accelerator has no context in this thread: no device was set",
        "set the device before the framework's memory is used or registered",
    ),
    StatusCode.DEVICE: (
        errors.TransportError,
        "the accelerator or its driver failed",
        "`kvxfer doctor` tells its state; after a lost device only a restart of this process helps",
    ),
    StatusCode.DEVICE_MEMORY: (
        errors.RegistrationError,
        "not enough contiguous memory on the accelerator",
        "ask for less, leave headroom beside the framework's pool, or allow spill='dram'",
    ),
    StatusCode.HOST_MEMORY: (
        errors.RegistrationError,
        "the accelerator does not reach this host memory",
        "it must come from the driver: allocate it with memory='dram' and device=N",
    ),
    StatusCode.INTERNAL: (errors.InternalError, "a bug in the native engine", None),
}

_RANGES: tuple[tuple[int, int, type[KvxferError]], ...] = (
    (1, 99, errors.UsageError),
    (100, 199, errors.TransferError),
    (200, 299, errors.PeerError),
    (300, 399, errors.TransportError),
)


def _entry(status: int) -> _Entry:
    try:
        return BY_STATUS[StatusCode(status)]
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
    if sys_errno == errno.EADDRNOTAVAIL:  # of a dialler: every local port towards that address is in use
        hint = errors.NO_PORTS_HINT
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
        status=int(StatusCode.LIMIT),
        option=option,
        limit=limit,
        hint=f"{ends}, or raise {option}",
    )


# -- calls into the engine about memory: what goes down, what comes back, and the words for what went wrong ------------
# "Cannot be registered" has many causes, and each has another remedy; the native engine says which one it was and
# with what numbers, and here they become the text, the fields and the hint of a typed error. `Engine` hands in cffi's
# ``ffi`` and ``lib``, and sees to threads and to the engine's life.


SPILL = 1  # KVX_ALLOC_SPILL
BOUNDARY = 2 << 20  # of device memory that a card's library registers

_HINTS = {
    StatusCode.DEVICE_MEMORY: "it must be contiguous: free memory of the device, ask for less, or use spill='dram'",
    StatusCode.HOST_MEMORY: "memory of the driver's own allocator is needed: alloc(memory='dram', device=N)",
    StatusCode.NO_CONTEXT: "set a device first, e.g. torch.npu.set_device(N), and check that the driver answers",
    StatusCode.UNSUPPORTED: "`kvxfer doctor` says what this process lacks for accelerators, and what to do",
    StatusCode.LIMIT: "use few large regions instead of many small registrations",
}


def check_length(value: int) -> None:
    """Lengths and offsets fit 64 bits."""
    if not 0 <= value < 1 << 64:
        raise error_for(StatusCode.LENGTH, length=value if abs(value) < 1 << 80 else None)


def region_info(info: Any) -> RegionInfo:
    """``kvx_region_info`` as a value."""
    return RegionInfo(
        id=info.id,
        generation=info.generation,
        address=info.address,
        length=info.length,
        flags=info.flags,
        references=info.references,
        numa_node=info.numa_node,
        kind=MemoryKind(info.kind),
        device=info.device if info.device >= 0 else None,
    )


def not_addressable(region: RegionInfo) -> KvxferError:
    """Somebody wants to look at memory that only a device can touch."""
    return UsageError(
        f"region {region.id} is memory of device {region.device}, which the CPU cannot touch",
        region=region.id,
        device=region.device,
        hint="use `await region.write(offset, data)` and `await region.read(offset, length)`",
    )


def memory_error(ffi: Any, status: int, why: Any, what: str, **fields: Field) -> KvxferError:
    """The typed error of a failed call about memory."""
    text = _whole_sentences(ffi.string(why.text).decode("utf-8", "replace"), len(why.text))
    fields["vendor_status"] = why.raw or None
    if status == StatusCode.OVERLAP:
        fields["conflict"] = why.conflict or None
        if why.conflict and why.length:
            fields["conflict_address"], fields["conflict_length"] = hex(why.base), why.length
    if status == StatusCode.DEVICE_MEMORY and why.total_bytes:
        fields["free_bytes"], fields["total_bytes"] = why.free_bytes, why.total_bytes
    if isinstance(fields.get("address"), int) and status != StatusCode.ALIGN:
        fields["address"] = hex(int(fields["address"] or 0))
    hint = _HINTS.get(StatusCode(status)) if status in _HINTS and fields.get("device") is not None else None
    if hint and "`kvxfer doctor`" in text:
        hint = None  # it says so itself
    if status == StatusCode.ALIGN and why.required:
        fields["required"], fields["got"] = why.required, int(fields["address"] or 0) & -int(fields["address"] or 1)
        fields["address"] = hex(int(fields["address"] or 0))
        hint = "alloc() gives memory that suits every transport in use"
    elif status == StatusCode.ALIGN:
        boundary, hint = _alignment(why, fields)
        text = text or boundary
    if status == StatusCode.LIMIT and why.required:
        fields["limit"], hint = why.required, "register the memory in several pieces (register_many)"
    error = error_for(status, sys_errno=why.sys_errno, what=what)
    error.fields |= fields
    if status == StatusCode.READ_ONLY and what == "register":
        error.message = f"register: the memory is not writable: {text}"
        error.args = (error.message,)
        hint = "a peer's put would end this process: register memory that may be written, or register it read-only"
    elif text:
        error.message = f"{error.message}: {text}"
        error.args = (error.message,)
    error.hint = hint or error.hint
    return error


def _whole_sentences(text: str, room: int) -> str:
    """What did not fit into the engine's ``room`` ends in the middle of a word."""
    if len(text.encode()) < room - 1:
        return text
    whole, end, _ = text.rpartition(". ")
    return f"{whole}{end.rstrip()} ..." if whole else f"{text} ..."


def _alignment(why: Any, fields: dict[str, Field]) -> tuple[str, str]:
    """What is wrong with the address or the length, and what could be registered instead."""
    address, length = fields.get("address"), fields.get("length")
    assert isinstance(address, int)
    assert isinstance(length, int)
    over = address % BOUNDARY
    if over:
        text = f"address {address:#x} is {over} bytes past a boundary of 2 MiB"
    else:
        text = (
            f"length {length} is not a multiple of 2 MiB, and the rest of the last 2 MiB may belong to something else"
        )
    hint = "a card's library takes whole allocations, aligned to 2 MiB; allocate 2 MiB more and begin at a multiple"
    if why.length:
        fields["allocation_address"], fields["allocation_length"] = why.base, why.length
        if why.base % BOUNDARY == 0:
            hint = f"register the allocation that it lies in: address={why.base:#x}, length={why.length}"
    fields["address"], fields["boundary"] = hex(address), BOUNDARY
    return text, hint


def alloc(
    ffi: Any, lib: Any, engine: Any, length: int, kind: MemoryKind, device: int, numa_node: int, spill: bool
) -> RegionInfo:
    """``kvx_mem_alloc``."""
    info, why = ffi.new("kvx_region_info *"), ffi.new("kvx_mem_why *")
    args = ffi.new("kvx_alloc_args *", (length, kind, device, numa_node, SPILL if spill else 0))
    status = lib.kvx_mem_alloc(engine, args, info, why)
    if status != 0:
        fields: dict[str, Field] = {"length": length, "memory": kind.word, "device": device if device >= 0 else None}
        fields |= _MORE[status]() if status in _MORE else {}
        raise memory_error(ffi, status, why, "alloc", **fields)
    return region_info(info)


def room() -> dict[str, Field]:
    """What an allocation of host memory could have at most, and what says so."""
    size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    rows = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    available = next((int(row[1]) << 10 for row in rows if row[0] == "MemAvailable:"), 0)
    if size != resource.RLIM_INFINITY and size < available:
        return {"have": size, "limit": "file size (ulimit -f)"}
    return {"have": available, "limit": "MemAvailable"}


_MORE = {StatusCode.SHM_SPACE: room}


def register(
    ffi: Any, lib: Any, engine: Any, address: int, length: int, kind: MemoryKind, device: int, read_only: bool
) -> RegionInfo:
    """``kvx_mem_register``."""
    info, why = ffi.new("kvx_region_info *"), ffi.new("kvx_mem_why *")
    args = ffi.new("kvx_register_args *", (address, length, kind, device, read_only))
    status = lib.kvx_mem_register(engine, args, info, why)
    if status != 0:
        fields: dict[str, Field] = {"length": length}
        if device >= 0:
            fields |= {"address": address, "memory": kind.word, "device": device}
        elif status == StatusCode.ALIGN:
            fields["address"] = address
        raise memory_error(ffi, status, why, "register", **fields)
    return region_info(info)


def copy(ffi: Any, lib: Any, engine: Any, region: int, offset: int, buffer: Any, *, write: bool) -> None:
    """``kvx_mem_copy``: all of ``buffer``, into the region or out of it."""
    why = ffi.new("kvx_mem_why *")
    memory = ffi.from_buffer(buffer, require_writable=not write)
    status = lib.kvx_mem_copy(engine, region, offset, ffi.cast("void *", memory), len(memory), write, why)
    if status != 0:
        what = "write" if write else "read"
        raise memory_error(ffi, status, why, what, region=region, offset=offset, length=len(memory))


def device_count(ffi: Any, lib: Any) -> int:
    """How many accelerators this process sees; `TransportUnavailable` with the reason when their library is not there.

    The first call loads the library.
    """
    why = ffi.new("char[1024]")
    table = lib.kvx_ascend_get(why, 1024)
    if table == ffi.NULL:
        error = error_for(StatusCode.UNSUPPORTED, what="devices")
        error.message = f"{error.message}: {ffi.string(why).decode('utf-8', 'replace')}"
        error.args = (error.message,)
        raise error
    return int(table.facts.devices)


def device_info(ffi: Any, lib: Any, engine: Any, device: int) -> DeviceInfo:
    """``kvx_device_query``."""
    info, why = ffi.new("kvx_device_info *"), ffi.new("kvx_mem_why *")
    status = lib.kvx_device_query(engine, device, info, why)
    if status != 0:
        raise memory_error(ffi, status, why, "device", device=device)
    return DeviceInfo(
        device=device,
        physical=info.physical if info.physical >= 0 else None,
        free_bytes=info.free_bytes,
        total_bytes=info.total_bytes,
        arena_bytes=info.arena_bytes,
        region_bytes=info.region_bytes,
        foreign_bytes=info.foreign_bytes,
        registrations=info.registrations,
        live_tokens=info.live_tokens,
    )

"""Calls into the engine about memory: what goes down, what comes back, and the words for what went wrong.

"Cannot be registered" has many causes, and each has another remedy; the native engine says which one it was and with
what numbers, and here they become the text, the fields and the hint of a typed error. `Engine` hands in cffi's ``ffi``
and ``lib``, and sees to threads and to the engine's life.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

from kvxfer.errors import Field, KvxferError, UsageError
from kvxfer.native.facts import DeviceInfo, MemoryKind, RegionInfo
from kvxfer.native.status import Status, error_for

SPILL = 1  # KVX_ALLOC_SPILL
BOUNDARY = 2 << 20  # of device memory that a card's library registers

_HINTS = {
    Status.DEVICE_MEMORY: "it must be contiguous: free some memory of the device, ask for less, or use spill='dram'",
    Status.HOST_MEMORY: "memory of the driver's own allocator is needed: alloc(memory='dram', device=N)",
    Status.NO_CONTEXT: "set a device first, e.g. torch.npu.set_device(N), and check that the driver answers",
    Status.UNSUPPORTED: "`kvxfer doctor` says what this process lacks for accelerators, and what to do",
    Status.LIMIT: "use few large regions instead of many small registrations",
}


def check_length(value: int) -> None:
    """Lengths and offsets fit 64 bits."""
    if not 0 <= value < 1 << 64:
        raise error_for(Status.LENGTH, length=value if abs(value) < 1 << 80 else None)


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
    if status == Status.OVERLAP:
        fields["conflict"] = why.conflict or None
        if why.conflict and why.length:
            fields["conflict_address"], fields["conflict_length"] = hex(why.base), why.length
    if status == Status.DEVICE_MEMORY and why.total_bytes:
        fields["free_bytes"], fields["total_bytes"] = why.free_bytes, why.total_bytes
    if isinstance(fields.get("address"), int) and status != Status.ALIGN:
        fields["address"] = hex(int(fields["address"] or 0))
    hint = _HINTS.get(Status(status)) if status in _HINTS and fields.get("device") is not None else None
    if hint and "`kvxfer doctor`" in text:
        hint = None  # it says so itself
    if status == Status.ALIGN and why.required:
        fields["required"], fields["got"] = why.required, int(fields["address"] or 0) & -int(fields["address"] or 1)
        fields["address"] = hex(int(fields["address"] or 0))
        hint = "alloc() gives memory that suits every transport in use"
    elif status == Status.ALIGN:
        boundary, hint = _alignment(why, fields)
        text = text or boundary
    if status == Status.LIMIT and why.required:
        fields["limit"], hint = why.required, "register the memory in several pieces (register_many)"
    error = error_for(status, sys_errno=why.sys_errno, what=what)
    error.fields |= fields
    if status == Status.READ_ONLY and what == "register":
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


_MORE = {Status.SHM_SPACE: room}


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
        elif status == Status.ALIGN:
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
        error = error_for(Status.UNSUPPORTED, what="devices")
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

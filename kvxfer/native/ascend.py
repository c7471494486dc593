"""What this process finds of Huawei's libraries for Ascend cards, as values: for `doctor`, metrics and logs.

`probe` loads the libraries, once per process and for ever, so only call it where a card is wanted or asked about. A
simulator says so in its chip's name, and `AscendInfo.simulated` passes it on: no figure of it is a hardware figure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvxfer.errors import KvxferError, TransportUnavailable
from kvxfer.native._shim import ffi, lib
from kvxfer.native.status import StatusCode, error_for

WHY_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class AscendInfo:
    """The libraries of this process. Which toolkit it is was judged by symbols; ``reported`` is what it says itself."""

    simulated: bool
    toolkit: str
    reported: str
    soc: str
    devices: int
    acl_version: tuple[int, int, int]
    async_connect: bool
    bulk_status: bool
    capability: bool
    address_range: bool
    batch_copy: bool
    acl_path: str
    meta_path: str
    hixl_path: str

    def __str__(self) -> str:
        kind = f"{self.soc} (simulated)" if self.simulated else self.soc or "unknown chip"
        return f"{self.devices} x {kind}, toolkit {self.toolkit}" + (f" ({self.reported})" if self.reported else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class AscendMissing:
    """No card can be used from this process. ``reason`` names every place that was looked at, and what to do."""

    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class AscendDevice:
    """One card as the driver sees it. ``healthy`` and ``physical`` are None when the toolkit cannot tell."""

    device: int
    physical: int | None
    healthy: bool | None
    hbm_free_bytes: int
    hbm_total_bytes: int


def _text(raw: Any) -> str:
    return str(ffi.string(raw).decode("utf-8", "replace"))


def _table() -> Any:
    """The table of ascend.h, or the reason why there is none."""
    why = ffi.new("char[]", WHY_BYTES)
    table = lib.kvx_ascend_get(why, WHY_BYTES)
    return table if table != ffi.NULL else AscendMissing(reason=_text(why))


def probe() -> AscendInfo | AscendMissing:
    """Find and load the libraries. Blocks while they load (seconds on a cold disk): not on an event loop."""
    table = _table()
    if isinstance(table, AscendMissing):
        return table
    facts = table.facts
    return AscendInfo(
        simulated=facts.simulated,
        toolkit=_text(facts.toolkit),
        reported=_text(facts.reported),
        soc=_text(facts.soc),
        devices=facts.devices,
        acl_version=(facts.acl_version[0], facts.acl_version[1], facts.acl_version[2]),
        async_connect=bool(facts.optional & lib.KVX_ASCEND_HAS_ASYNC_CONNECT),
        bulk_status=bool(facts.optional & lib.KVX_ASCEND_HAS_BULK_STATUS),
        capability=bool(facts.optional & lib.KVX_ASCEND_HAS_CAPABILITY),
        address_range=bool(facts.optional & lib.KVX_ASCEND_HAS_ADDRESS_RANGE),
        batch_copy=bool(facts.optional & lib.KVX_ASCEND_HAS_BATCH_COPY),
        acl_path=_text(facts.acl_path),
        meta_path=_text(facts.meta_path),
        hixl_path=_text(facts.hixl_path),
    )


def device_info(device: int) -> AscendDevice:
    """Ask the driver about one card. Makes its context in this process; blocks: not on an event loop.

    Raises `TransportUnavailable` when there is no such card or no library, `TransportError` when the card fails.
    """
    table = _table()
    if isinstance(table, AscendMissing):
        raise TransportUnavailable(table.reason, status=StatusCode.UNSUPPORTED, device=device)
    raw = ffi.new("uint32_t *")
    free, total, physical = ffi.new("uint64_t *"), ffi.new("uint64_t *"), ffi.new("int32_t *")
    status = table.device_info(device, free, total, raw)
    if status != StatusCode.OK:
        said = _text(table.last_error()) if raw[0] else ""
        raise vendor_error(status, raw[0], what=f"device {device}", said=said, device=device)
    found = table.device_physical(device, physical, raw) == StatusCode.OK
    health = table.device_healthy(device, raw)
    return AscendDevice(
        device=device,
        physical=physical[0] if found else None,
        healthy=None if health == StatusCode.UNSUPPORTED else health == StatusCode.OK,
        hbm_free_bytes=free[0],
        hbm_total_bytes=total[0],
    )


def vendor_error(status: int, raw: int, *, what: str, said: str = "", device: int | None = None) -> KvxferError:
    """The typed error of a call into the libraries: ours for the class, the vendor's number and text as fields."""
    return error_for(status, what=what, device=device, vendor_status=raw or None, vendor_says=said or None)

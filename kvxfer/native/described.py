"""The transports of an engine as it describes them itself, and those that it was asked for and does not have."""

from __future__ import annotations

from typing import Any

from kvxfer.native.facts import Caps, TransportInfo


def transports(ffi: Any, lib: Any, engine: Any) -> tuple[TransportInfo, ...]:
    """In the order of their numbers."""
    found: list[TransportInfo] = []
    info = ffi.new("kvx_transport_info *")
    while lib.kvx_transport_query(engine, len(found), info) == 0:
        found.append(
            TransportInfo(
                index=len(found),
                name=ffi.string(info.name).decode(),
                endpoint=ffi.string(info.endpoint).decode(),
                caps=info.caps,
                rank=info.rank,
                alignment=info.alignment,
                region_bytes_max=info.region_bytes_max,
                copies_per_byte=info.copies_x100 / 100,
                memory=info.memory,
                local_memory=info.local_memory,
                secret=bytes(info.secret) if info.caps & Caps.ENCRYPTED else None,
            )
        )
    return tuple(found)


def unavailable(ffi: Any, lib: Any, engine: Any) -> dict[str, str]:
    """Of those asked for with "?": name and why."""
    found: dict[str, str] = {}
    name, why = ffi.new("char[32]"), ffi.new("char[512]")
    while lib.kvx_transport_unavailable(engine, len(found), name, why) == 0:
        found[ffi.string(name).decode()] = ffi.string(why).decode("utf-8", "replace")
    return found

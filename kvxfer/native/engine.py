"""The native engine in Python's clothes: one call into C per method; each token resolves exactly once.

`Engine` is put together from its parts: `Life` (opening to closing, events), `Memory` (regions and grants),
`Connections` (peers and imports) and `Notes`; the transfers themselves are here.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from kvxfer.errors import UsageError
from kvxfer.native import life
from kvxfer.native._shim import ffi, lib
from kvxfer.native.connections import Connections
from kvxfer.native.counters import Counters, parse_counters
from kvxfer.native.facts import (
    Caps,
    ChoiceKind,
    DeviceInfo,
    EngineConfig,
    Event,
    EventKind,
    GrantInfo,
    MemoryKind,
    OpKind,
    Priority,
    RegionInfo,
    TransportInfo,
)
from kvxfer.native.life import DRAIN_MAX, EVENT, forks
from kvxfer.native.memory import Memory
from kvxfer.native.notes import Notes
from kvxfer.native.status import Status, error_for

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "DRAIN_MAX",
    "Caps",
    "ChoiceKind",
    "Counters",
    "DeviceInfo",
    "Engine",
    "EngineConfig",
    "Event",
    "EventKind",
    "GrantInfo",
    "MemoryKind",
    "OpKind",
    "Priority",
    "RegionInfo",
    "TransportInfo",
    "forks",
]

NOTIFY, CHECK = 1, 2
PRIORITY_FLAGS = (4, 0, 8)  # by `Priority`


def encryption_missing() -> str:
    """Why tcp could not encrypt on this machine; empty when it could."""
    why = ffi.new("char[512]")
    return "" if lib.kvx_encryption_probe(why, 512) == 0 else ffi.string(why).decode("utf-8", "replace")


class Engine(Memory, Connections, Notes):
    """One native engine. Opens in the constructor; raises `TransportUnavailable` or `ConfigError` with the reason."""

    def submit(
        self,
        kind: int,
        region: int,
        import_: int,
        segments: npt.NDArray[np.uint64] | None,
        notify: tuple[int, int] | None = None,
        check: bool = False,
        priority: int = Priority.NORMAL,
    ) -> Event | tuple[int, asyncio.Future[Event]]:
        """Start one operation over all segments: uint64 (n, 3) in C order, rows [local offset, remote offset, length].

        Small ones complete at once: then the `Event` itself is returned. ``segments=None`` with ``notify`` moves
        nothing.
        Raises `BusyError` when full (nothing was taken) and typed errors for wrong arguments.
        """
        native, count = ffi.NULL, 0
        if segments is not None and len(segments):
            if segments.dtype != "uint64" or segments.ndim != 2 or segments.shape[1] != 3:
                raise UsageError("segments must be uint64 of shape (n, 3)", dtype=str(segments.dtype))
            if not segments.flags.c_contiguous:
                raise UsageError("segments must be in C order")
            native, count = ffi.from_buffer("kvx_segment[]", segments), len(segments)
        return self._submit(kind, region, import_, native, count, notify, check, priority)

    def submit_one(
        self,
        kind: int,
        region: int,
        import_: int,
        local_offset: int,
        remote_offset: int,
        length: int,
        notify: tuple[int, int] | None = None,
        check: bool = False,
        priority: int = Priority.NORMAL,
    ) -> Event | tuple[int, asyncio.Future[Event]]:
        """`submit` for a single span; offsets and length in bytes."""
        segment = self._segment
        try:
            segment.local_offset = local_offset
            segment.remote_offset = remote_offset
            segment.length = length
        except OverflowError:
            raise error_for(Status.LENGTH, what="submit", offset=local_offset, length=length) from None
        return self._submit(kind, region, import_, segment, 1, notify, check, priority)

    def _submit(
        self,
        kind: int,
        region: int,
        import_: int,
        segments: Any,
        count: int,
        notify: tuple[int, int] | None,
        check: bool,
        priority: int,
    ) -> Event | tuple[int, asyncio.Future[Event]]:
        if (
            self._engine is None
            or self._fork != life.forks_seen
            or threading.get_ident() != self._thread
            or self._loop is None
        ):
            self._require_loop()
        args = self._args
        args.kind = kind
        args.region = region
        setattr(args, "import", import_)
        args.count = count
        if notify is None:
            args.flags = PRIORITY_FLAGS[priority] | (CHECK if check else 0)
        else:
            args.flags = PRIORITY_FLAGS[priority] | (CHECK | NOTIFY if check else NOTIFY)
            args.tag, args.value = notify
        event = self._inline_event
        status = lib.kvx_submit(self._engine, args, segments, self._token_p, self._inline_p, event)
        if status == 0:
            if self._inline_p[0]:
                return Event._make(EVENT.unpack(self._inline_view))
            token = self._token_p[0]
            return token, self._future(token)
        segment = event.segment if status in _WITH_SEGMENT else None
        raise error_for(status, what="submit", region=region, segment=segment)

    def cancel(self, token: int) -> None:
        """Ask for an early end. The token still completes exactly once: done, or CANCELLED."""
        status = lib.kvx_cancel(self._mine(), token)
        if status != 0:
            raise error_for(status, what="cancel", op_id=token)

    # -- counters -----------------------------------------------------------------------------------------

    def counters(self) -> Counters:
        """A snapshot."""
        native = lib.kvx_engine_counters(self._mine())
        return parse_counters(bytes(ffi.buffer(native)))


_WITH_SEGMENT = frozenset((Status.LENGTH, Status.LOCAL_RANGE, Status.RANGE))

"""What the engine is told only to be counted, and what it tells of devices, operations that run, and what is mapped."""

from __future__ import annotations

from typing import Any

from kvxfer.native import regions
from kvxfer.native._shim import ffi, lib
from kvxfer.native.facts import ChoiceKind
from kvxfer.native.status import error_for


class Notes:
    """A part of `Engine`."""

    def _mine(self) -> Any:
        raise TypeError("a part of an engine is no engine")

    def count_choice(self, index: int, choice: ChoiceKind) -> None:
        """A transport was chosen for a grant, or passed over and why: for the counters."""
        lib.kvx_choice_count(self._mine(), index, choice)

    def note_stalled(self, count: int) -> None:
        """How many transfers and landings are stalled now: for the counters."""
        lib.kvx_note(self._mine(), lib.KVX_NOTE_STALLED, count)

    def note_late(self, count: int = 1) -> None:
        """So many more operations were done after their deadline: for the counters."""
        lib.kvx_note(self._mine(), lib.KVX_NOTE_LATE, count)

    def device_count(self) -> int:
        """How many accelerators this process sees. The first call loads their library; `TransportUnavailable` says
        why there is none. Callable from any thread.
        """
        return regions.device_count(ffi, lib)

    def progress(self, token: int) -> int:
        """Bytes that a live operation has moved, as far as its transport knows; 0 when there is none."""
        return int(lib.kvx_progress(self._mine(), token))

    def device_mapping(self, import_: int) -> tuple[int, int] | None:
        """Of memory on a device that was imported with ``mapped``: its address, and the number of the device here that
        may use it. None when the import is of host memory, or not mapped.
        """
        info = ffi.new("kvx_import_info *")
        status = lib.kvx_import_query(self._mine(), import_, info)
        if status != 0:
            raise error_for(status, what="device_mapping")
        return (int(info.address), int(info.device)) if info.address and info.device >= 0 else None

"""What the engine is told only to be counted, and what it tells of an operation before its end."""

from __future__ import annotations

from kvxfer.native._shim import lib
from kvxfer.native.facts import ChoiceKind
from kvxfer.native.life import Life


class Notes(Life):
    """A part of `Engine`."""

    def count_choice(self, index: int, choice: ChoiceKind) -> None:
        """A transport was chosen for a grant, or passed over and why: for the counters."""
        lib.kvx_choice_count(self._mine(), index, choice)

    def note_stalled(self, count: int) -> None:
        """How many transfers and landings are stalled now: for the counters."""
        lib.kvx_note(self._mine(), lib.KVX_NOTE_STALLED, count)

    def note_late(self, count: int = 1) -> None:
        """So many more operations were done after their deadline: for the counters."""
        lib.kvx_note(self._mine(), lib.KVX_NOTE_LATE, count)

    def progress(self, token: int) -> int:
        """Bytes that a live operation has moved, as far as its transport knows; 0 when there is none."""
        return int(lib.kvx_progress(self._mine(), token))

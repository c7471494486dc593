"""Progress on stderr: one bar that is redrawn on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 24
PLAIN_EVERY_S = 5.0


class Progress:
    """``step`` before each piece of work, ``close`` at the end."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._total = max(total, 1)
        self._done = 0
        self._drawn = 0
        self._said_at = -PLAIN_EVERY_S
        self._begun = time.monotonic()

    def step(self, what: str) -> None:
        """Show that the next piece of work begins, and what it is."""
        now = time.monotonic() - self._begun
        text = f"{bar(self._done, self._total)} {now:5.1f} s  {what}"
        if self._stream.isatty():
            self._stream.write("\r" + text[:110].ljust(self._drawn))
            self._drawn = min(len(text), 110)
        elif now - self._said_at >= PLAIN_EVERY_S:
            self._said_at = now
            self._stream.write(f"bench: {100 * self._done // self._total:3d} % {now:5.1f} s  {what}\n")
        self._stream.flush()
        self._done = min(self._done + 1, self._total)

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self._stream.isatty():
            self._stream.write("\r" + " " * self._drawn + "\r")
            self._stream.flush()


def bar(done: int, total: int) -> str:
    """A bar of text, filled by the share that is done."""
    full = WIDTH * done // total
    return "[" + "#" * full + "." * (WIDTH - full) + "]"

"""Log lines of the daemon: text for people, or one JSON object per line for collectors; to standard error.

However often the same thing happens, a few lines per second say so and the next one tells how many were left out, so
that nobody can fill a disk or slow the daemon down by connecting to it. Exact numbers are what metrics are for.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

SAME_LINES_PER_S = 3  # of one logger, with one text apart from its values
LINES_PER_S = 10  # in all
TEXTS_MAX = 256  # texts stand in source code; this is for those that do not
_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}


@dataclass(slots=True)
class _Window:
    """How many lines were written, and left out, in one second."""

    began: float
    lines: int = 0
    left_out: int = 0

    def full(self, now: float, limit: int) -> bool:
        if now - self.began >= 1:
            self.began, self.lines = now, 0
        return self.lines >= limit


class Throttle(logging.Filter):
    """Bounds lines per second: the same text `SAME_LINES_PER_S`, everything `LINES_PER_S`. Debugging is not bounded,
    and what is worse than a warning only by its own text."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._all = _Window(clock())
        self._by_text: dict[tuple[str, object], _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.INFO:
            return True
        now = self._clock()
        window = self._window((record.name, record.msg if isinstance(record.msg, str) else type(record.msg)), now)
        bounded = record.levelno <= logging.WARNING
        if window.full(now, SAME_LINES_PER_S) or (bounded and self._all.full(now, LINES_PER_S)):
            window.left_out += 1
            return False
        window.lines += 1
        self._all.lines += bounded
        if window.left_out:
            record.msg = f"{record.getMessage()} (and {window.left_out} more like it)"
            record.args = None
            window.left_out = 0
        return True

    def _window(self, key: tuple[str, object], now: float) -> _Window:
        window = self._by_text.get(key)
        if window is None:
            if len(self._by_text) >= TEXTS_MAX:
                self._by_text.clear()
            window = self._by_text[key] = _Window(now)
        return window


class TextFormatter(logging.Formatter):
    """One line per record, whatever a peer calls itself; tracebacks follow on lines of their own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).translate(_ESCAPED)


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        row = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return json.dumps(row)


def configure_logging(level: str, form: str) -> None:
    """Send kvxfer's log lines to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(Throttle())
    text = TextFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())

"""Loggers whose handlers cannot hurt: whatever a handler or a filter of the application raises ends here.

Log lines are written from the middle of transfers, links and registries. A handler that raises would end whatever
happened to write the line; so every module takes its logger from here, and what was raised is printed to standard error
as `logging` does it with the errors of its own handlers (not at all with ``logging.raiseExceptions = False``).
"""

from __future__ import annotations

import logging
import sys
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Adapter = logging.LoggerAdapter[logging.Logger]
else:
    Adapter = logging.LoggerAdapter


class Harmless(Adapter):
    """A logger that never raises."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """See `logging.Logger.log`."""
        try:
            kwargs.setdefault("stacklevel", 2)  # the line of the caller, not this one
            super().log(level, msg, *args, **kwargs)
        except Exception:  # of a handler or a filter that somebody else has installed
            if logging.raiseExceptions and sys.stderr is not None:
                traceback.print_exc()


def logger(name: str) -> Harmless:
    """The logger of a module."""
    return Harmless(logging.getLogger(name), {})

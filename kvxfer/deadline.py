"""One deadline per public call: `timeout=` becomes an absolute time at the edge, and only remaining time travels."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

from kvxfer.errors import TransferTimeout, UsageError

TIMEOUT_S_MAX = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Deadline:
    """An absolute time on the running loop's clock, in seconds."""

    at: float

    @classmethod
    def after(cls, timeout: float) -> Deadline:
        """The moment ``timeout`` seconds from now. There is no endless wait: the timeout must be finite and
        positive.
        """
        good = isinstance(timeout, int | float) and not isinstance(timeout, bool) and math.isfinite(timeout)
        if not good or not 0 < timeout <= TIMEOUT_S_MAX:
            raise UsageError("timeout must be a positive number of seconds", value=repr(timeout), limit_s=TIMEOUT_S_MAX)
        return cls(asyncio.get_running_loop().time() + timeout)

    def remaining(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - asyncio.get_running_loop().time())

    def require(self, what: str) -> float:
        """Seconds left; raises `TransferTimeout` naming ``what`` when there are none."""
        left = self.remaining()
        if left <= 0:
            raise TransferTimeout(f"the deadline passed before {what}")
        return left

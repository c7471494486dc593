"""Memory views of allocated regions that outlive their region without harm.

numpy arrays and memoryviews over a region cannot be called back when the region goes. So the engine is told which
regions are looked at: it gives their memory back at the release like any other, but keeps the addresses mapped, to
zeros. When the last view is gone, so are the addresses.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _Looked:
    """Addresses that some Python object can still reach."""

    region: int
    address: int
    mapped_length: int


class Views:
    """The views of one engine. `gone` runs in whichever thread drops the last reference, so it takes the lock.

    ``forget`` is a weak reference to the function that tells the engine about a region that nobody looks at any more;
    that is True when the region still existed, so that the engine unmaps it itself.
    """

    def __init__(
        self,
        forget: Callable[[], Callable[[int], bool] | None],
        unmap: Callable[[int, int], None],
        alive: Callable[[], bool],
    ) -> None:
        self._forget = forget
        self._unmap = unmap
        self._alive = alive  # False in a forked child
        self._lock = threading.RLock()  # a collection may run `gone` on a thread that is inside
        self._exporters: dict[int, weakref.ref[Any]] = {}
        self._closing = False
        self._closed = False
        self._late: list[_Looked] = []

    def find(self, region: int) -> Any:
        """The exporter that is in use for a region, or None."""
        found = self._exporters.get(region)
        return None if found is None else found()

    def add(self, region: int, exporter: Any, address: int, mapped_length: int) -> None:
        """Watch an exporter; the engine has been told already."""
        self._exporters[region] = weakref.ref(exporter)
        watch = weakref.finalize(exporter, self._gone, _Looked(region, address, mapped_length))
        watch.atexit = False

    def _gone(self, looked: _Looked) -> None:
        if not self._alive():
            return
        with self._lock:
            self._exporters.pop(looked.region, None)
            if self._closed:
                self._unmap(looked.address, looked.mapped_length)
            elif self._closing:
                self._late.append(looked)
            else:
                forget = self._forget()
                if forget is None or not forget(looked.region):
                    self._unmap(looked.address, looked.mapped_length)

    def begin_close(self) -> None:
        """The engine is about to close: it is not told any more, and what goes meanwhile is unmapped at the end."""
        with self._lock:
            self._closing = True

    def end_close(self) -> None:
        """The engine is closed: unmap what had to wait for its end."""
        with self._lock:
            self._closed = True
            for looked in self._late:
                self._unmap(looked.address, looked.mapped_length)
            self._late.clear()

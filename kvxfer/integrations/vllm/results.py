"""What the transfers of a worker came to, between the thread that moves bytes and the thread of the engine."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

RECEIVED, SENT = "received", "sent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """One request whose blocks were moved: which way, bytes, tokens, and seconds from the order to the end."""

    way: str
    bytes: int
    tokens: int
    seconds: float


@dataclass(slots=True, kw_only=True)
class ResultBatch:
    """Everything since it was last asked for. Failed requests are in ``received`` too."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)


class Results:
    """Filled by one thread, taken by another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batch = ResultBatch()
        self._record = empty()

    def moved(self, moved: Moved) -> None:
        with self._lock:
            for key in ("bytes", "tokens", "seconds"):
                self._record[moved.way][key].append(getattr(moved, key))

    def failure(self, reason: str) -> None:
        """A transfer that ended without having moved everything, by the code of its error."""
        with self._lock:
            self._record["failures"][reason] = self._record["failures"].get(reason, 0) + 1

    def expired(self) -> None:
        """Blocks that nobody fetched while they were kept."""
        with self._lock:
            self._record["expired"] += 1

    def received(self, request_id: str, *, failed: bool = False, blocks: set[int] | None = None) -> None:
        """Nothing writes into this request's blocks any more."""
        with self._lock:
            self._batch.received.add(request_id)
            if failed:
                self._batch.failed.add(request_id)
                self._batch.failed_blocks |= blocks or set()

    def sent(self, request_id: str) -> None:
        """Nobody reads this request's blocks any more."""
        with self._lock:
            self._batch.sent.add(request_id)

    def take(self) -> ResultBatch:
        with self._lock:
            taken, self._batch = self._batch, ResultBatch()
        return taken

    def take_record(self) -> dict[str, Any] | None:
        """The measurements since last time; None when there are none."""
        with self._lock:
            if is_empty(self._record):
                return None
            taken, self._record = self._record, empty()
        return taken


def empty() -> dict[str, Any]:
    """A record of nothing: plain values, since it travels from the worker to the process that logs."""
    ways: dict[str, Any] = {way: {"bytes": [], "tokens": [], "seconds": []} for way in (RECEIVED, SENT)}
    return {**ways, "failures": {}, "expired": 0}


def is_empty(record: dict[str, Any]) -> bool:
    return not (record["failures"] or record["expired"] or any(record[way]["bytes"] for way in (RECEIVED, SENT)))


def add(record: dict[str, Any], other: dict[str, Any]) -> None:
    """Merge the measurements of another worker, or of a later time, into ``record``."""
    for way in (RECEIVED, SENT):
        for key, values in other[way].items():
            record[way][key].extend(values)
    for reason, count in other["failures"].items():
        record["failures"][reason] = record["failures"].get(reason, 0) + count
    record["expired"] += other["expired"]


def summary(record: dict[str, Any]) -> dict[str, int | float]:
    """A line for the log: requests, MB, milliseconds and MB/s each way, failures, expired leases."""
    found: dict[str, int | float] = {}
    for way in (RECEIVED, SENT):
        sizes, times = record[way]["bytes"], record[way]["seconds"]
        if not sizes:
            continue
        found[f"requests {way}"] = len(sizes)
        found[f"MB {way}"] = round(sum(sizes) / 1e6, 3)
        found[f"mean ms {way}"] = round(sum(times) / len(times) * 1e3, 2)
        found[f"MB/s {way}"] = round(sum(sizes) / 1e6 / max(sum(times), 1e-9), 1)
    found["failures"] = sum(record["failures"].values())
    found["expired leases"] = record["expired"]
    return found

"""What a measurement is: `Row`, one number with its spread, and the names that make rows of different peers comparable.

A row says who (``peer``, ``transport``), on which work (``workload``), what (``metric``, ``unit``) and how much
(``median`` of ``n`` rounds, ``low`` and ``high`` the extreme rounds). A metric is
``[put_|get_][4k_|64k_][open_]quantity``: the direction seen from the initiator (a write is a put, a read is a get), for
W1 the size, ``open_`` for latencies counted from when a transfer was due (an open loop: a stall delays nobody's clock),
and one of `QUANTITIES`, which know their unit and which way is better. A workload with a parameter is
``name/number``, as ``blocks/65536``. Rows of several rounds are made into one by `combine`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from kvxfer.errors import UsageError

Better = Literal["lower", "higher"]
ROWS_MAX = 100_000
TEXT_CHARS_MAX = 200
OURS = "kvxfer"

WORKLOADS = {
    "W1": "one transfer of 4 KiB and of 64 KiB, awaited",
    "W2": "256 MiB in one piece",
    "W3": "4096 scattered blocks of 32 KiB, one request",
    "W3b": "65536 scattered blocks of 4 KiB, one request",
    "W4": "80 layers of 1 MiB, the receiver told of each",
    "W5": "CPU seconds of both processes per GiB, in W2",
    "W6": "32 concurrent streams of 4 MiB",
    "W2u": "W2 from and to memory of the user, not from our pool",
    "W3u": "W3 from and to memory of the user, not from our pool",
    "mixed": "1 MiB beside large transfers of the priority bulk",
    "setup": "registering 1 GiB, connecting, the first transfer",
    "idle": "CPU of both sides while connected and idle",
    "submit": "handing 65536 descriptors to the engine",
    "scale": "rate against size and block size, cost against descriptors and peers",
}
"""Names of workloads; the sizes are those of the full run."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A measured quantity: its unit and which way is better."""

    unit: str
    better: Better


QUANTITIES = {
    "p50_us": Quantity("us", "lower"),
    "p90_us": Quantity("us", "lower"),
    "p99_us": Quantity("us", "lower"),
    "max_us": Quantity("us", "lower"),
    "p50_ms": Quantity("ms", "lower"),
    "p99_ms": Quantity("ms", "lower"),
    "ms": Quantity("ms", "lower"),
    "GBps": Quantity("GB/s", "higher"),
    "p50_times": Quantity("x", "lower"),
    "p99_times": Quantity("x", "lower"),
    "cpu_s_per_GiB": Quantity("s/GiB", "lower"),
    "cores": Quantity("cores", "lower"),
    "init_ms": Quantity("ms", "lower"),
    "register_ms": Quantity("ms", "lower"),
    "alloc_ms": Quantity("ms", "lower"),
    "connect_ms": Quantity("ms", "lower"),
    "prepare_ms": Quantity("ms", "lower"),
    "first_ms": Quantity("ms", "lower"),
    "total_ms": Quantity("ms", "lower"),
    "block_ms": Quantity("ms", "lower"),
    "bytes": Quantity("bytes", "lower"),
}
"""GB/s is 1e9 bytes per second. ``cores`` is CPU seconds per second. ``total_ms`` is the sum of a set-up.
``times``: of the same latency with nothing beside it.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One number: the median of ``n`` rounds with the lowest and the highest."""

    peer: str
    transport: str
    workload: str
    metric: str
    unit: str
    median: float
    low: float
    high: float
    n: int

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What the number is about."""
        return self.peer, self.transport, self.workload, self.metric


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a rival is asked for one round: smaller work when ``quick``, and a limit for the round in seconds."""

    quick: bool = False
    timeout_s: float = 120.0
    transports: tuple[str, ...] = ("shm", "tcp")


def quantity_of(metric: str) -> str:
    """The quantity behind a metric: ``put_4k_p50_us`` is about ``p50_us``. Raises `UsageError` for an unknown one."""
    rest = metric
    for prefixes in (("put_", "get_"), ("4k_", "64k_"), ("open_",)):
        found = next((prefix for prefix in prefixes if rest.startswith(prefix)), "")
        rest = rest.removeprefix(found)
    if rest not in QUANTITIES:
        raise UsageError("unknown metric", value=metric[:80], hint="one of " + ", ".join(QUANTITIES))
    return rest


def better_of(metric: str) -> Better:
    """Whether a higher or a lower value of this metric is better."""
    return QUANTITIES[quantity_of(metric)].better


def single(peer: str, transport: str, workload: str, metric: str, value: float) -> Row:
    """The row of one round; its unit follows from the metric."""
    unit = QUANTITIES[quantity_of(metric)].unit
    return Row(peer, transport, workload, metric, unit, value, value, value, 1)


def combine(rounds: Iterable[Row]) -> list[Row]:
    """Rows of several rounds as one row each: median, lowest, highest and number of the rounds; first come order."""
    groups: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rounds:
        groups.setdefault(row.key, []).append(row)
    return [
        Row(
            *key,
            group[0].unit,
            statistics.median(row.median for row in group),
            min(row.low for row in group),
            max(row.high for row in group),
            sum(row.n for row in group),
        )
        for key, group in groups.items()
    ]


def dumps(rows: Sequence[Row]) -> str:
    """JSON: a list of objects, one per row."""
    return "[\n" + ",\n".join(json.dumps(asdict(row), allow_nan=False) for row in rows) + "\n]\n"


def loads(text: str, source: str = "rows") -> list[Row]:
    """The rows in ``text``; unknown fields are ignored. Raises `UsageError` that names ``source`` and what is wrong."""
    try:
        items = json.loads(text)
    except ValueError as wrong:
        raise UsageError(f"{source}: not JSON: {wrong}") from None
    if not isinstance(items, list) or len(items) > ROWS_MAX:
        raise UsageError(f"{source}: not a list of at most {ROWS_MAX} rows")
    return [_row(item, f"{source}: row {number}") for number, item in enumerate(items)]


def _row(item: Any, where: str) -> Row:
    if not isinstance(item, dict):
        raise UsageError(f"{where}: not an object")
    values: dict[str, Any] = {}
    for field in fields(Row):
        value = item.get(field.name)
        if field.type == "str":
            good = isinstance(value, str) and 0 < len(value) <= TEXT_CHARS_MAX
        elif field.type == "int":
            good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        else:
            good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not good:
            raise UsageError(f"{where}: bad {field.name}", field=field.name, value=repr(value)[:80])
        values[field.name] = value
    return Row(**values)

"""What the daemon exports: its own state, and the counters of every engine on this node, read when somebody scrapes.

The idea: native threads write their counters into files that the daemon maps at scrape time, so the data path pays
nothing for being watched. A worker that leaves takes its file along, but not its numbers: the last ones are added to a
base, and totals never go down. Labels are names of transports, outcomes, roles and error codes only, so the number of
series does not grow with peers, workers or requests.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvxfer.errors import BY_CODE
from kvxfer.logs import logger
from kvxfer.native.types import Counters, TransportCounters, read_counters

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
TOTALS = tuple(
    name for name in TransportCounters.__dataclass_fields__ if name not in ("name", "peers_connected", "peers_accepted")
)
TRANSPORT_LABELS_MAX = 16
GAUGES = (
    *("inflight", "regions", "grants", "imports", "peers", "threads", "registered_bytes", "quarantined_grants"),
    *("device_bytes", "arena_bytes", "spilled_bytes", "stalled"),
)

# Of the core, not of a transport.
CORE_COUNTS: Mapping[str, str] = {
    "spills": "Allocations for a full device that pinned host memory took (spill='dram').",
    "late": "Operations that were done after their deadline: their transfers stay timed out.",
}

COUNTED_MAX = 4096  # ended engines whose files may be named again

log = logger("kvxfer.metrics")

Totals = dict[str, dict[str, int]]


class EngineCounters:
    """The counters of this node's engines by any key; ``read`` gives a snapshot, or raises when there is none (yet).

    A file counts once, however many links name it, one after the other (a worker whose link is new) or at once. What it
    has counted for before is remembered by the file and the process that writes it.
    """

    def __init__(self) -> None:
        self._sources: dict[object, Callable[[], Counters]] = {}
        self._files: dict[object, Path] = {}  # by link
        self._last: dict[object, Counters] = {}
        self._base: Totals = {}
        self._counted: OrderedDict[tuple[object, int], Counters] = OrderedDict()  # what is in the base, by file and pid
        self._counts_base = dict.fromkeys(CORE_COUNTS, 0)
        self.unreadable = 0

    def add(self, key: object, read: Callable[[], Counters]) -> None:
        """Count an engine from now on."""
        self._sources[key] = read

    def add_file(self, key: object, path: str, directory: Path) -> None:
        """The same for another process's file, which must lie in the daemon's own directory."""
        file = Path(path)
        with contextlib.suppress(OSError):  # no such directory: nothing to read
            if path and "\0" not in path and file.parent.samefile(directory):
                file = directory / file.name
                self._files[key] = file
                if file not in self._sources:
                    self.add(file, lambda: read_counters(file))

    def remove(self, key: object) -> None:
        """The engine is gone, or nobody names its file any more; what it has counted stays."""
        source = self._files.pop(key, key)
        if source not in self._sources or source in self._files.values():
            return
        self.read(source)  # a killed process leaves its file, with its last numbers
        del self._sources[source]
        last = self._last.pop(source, None)
        if last is None:
            return
        before = self._counted_before(source, last)
        _accumulate(self._base, last, before)
        for name in CORE_COUNTS:
            self._counts_base[name] += _more(last, before, name)
        if isinstance(source, Path):
            self._counted[source, last.pid] = last
            while len(self._counted) > COUNTED_MAX:
                self._counted.popitem(last=False)

    def snapshot(self) -> tuple[Totals, dict[str, int]]:
        """(totals by transport and field, sums of gauges), over living engines and those that are gone."""
        totals = {name: dict(fields) for name, fields in self._base.items()}
        gauges = dict.fromkeys(GAUGES, 0)
        for key in self._sources:
            counters = self.read(key)
            if counters is None:
                continue
            _accumulate(totals, counters, self._counted_before(key, counters))
            for name in GAUGES:
                gauges[name] += getattr(counters, name)
        return totals, gauges

    def core_count(self, name: str) -> int:
        """One of `CORE_COUNTS` over all engines, living and gone: as of the last `snapshot`, never less."""
        live = (_more(counters, self._counted_before(key, counters), name) for key, counters in self._last.items())
        return self._counts_base[name] + sum(live)

    def read(self, key: object) -> Counters | None:
        """The newest snapshot of one engine; the last one when it cannot be read now."""
        try:
            self._last[key] = self._sources[key]()
        except Exception as failure:  # of one engine; the others are still to be counted
            self.unreadable += 1
            log.debug("cannot read the counters of %s: %s", key, failure)
        return self._last.get(key)

    def _counted_before(self, source: object, counters: Counters) -> Counters | None:
        return self._counted.get((source, counters.pid))


def _more(counters: Counters | TransportCounters, before: Counters | TransportCounters | None, name: str) -> int:
    """What has been counted since ``before``."""
    return max(0, int(getattr(counters, name)) - (0 if before is None else int(getattr(before, name))))


def _accumulate(totals: Totals, counters: Counters, before: Counters | None) -> None:
    earlier = {} if before is None else {row.name: row for row in before.transports}
    for row in counters.transports:
        # The names come from files of other processes, and each one stays for ever.
        name = row.name if row.name in totals or len(totals) < TRANSPORT_LABELS_MAX else "other"
        fields = totals.setdefault(name, dict.fromkeys(TOTALS, 0))
        for name in TOTALS:
            fields[name] += _more(row, earlier.get(row.name), name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One number of the daemon's own state. ``labels`` have few values, known beforehand."""

    name: str
    help: str
    value: float
    labels: Mapping[str, str] | None = None
    counter: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """How often a number of seconds fell into each bucket; ``counts`` has one more than ``bounds_s``."""

    name: str
    help: str
    bounds_s: Sequence[float]
    counts: Sequence[int]
    sum_s: float
    labels: Mapping[str, str]


Samples = Callable[[], Iterator[Sample | Distribution]]


class _Collector(Collector):
    def __init__(self, engines: EngineCounters, samples: Samples) -> None:
        self._engines = engines
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        totals, gauges = self._engines.snapshot()
        yield from _engine_totals(totals)
        for name, value in gauges.items():
            yield GaugeMetricFamily(f"kvxfer_{name}", f"Engines of this node: {name.replace('_', ' ')}.", value)
        for name, text in CORE_COUNTS.items():
            yield CounterMetricFamily(f"kvxfer_{name}", text, self._engines.core_count(name))
        yield from _families(self._samples())


def _engine_totals(totals: Totals) -> Iterator[Metric]:
    transfers = CounterMetricFamily(
        "kvxfer_transfers", "Operations that ended, by transport and outcome.", labels=("transport", "outcome")
    )
    moved = CounterMetricFamily(
        "kvxfer_transfer_bytes",
        "Confirmed bytes: of our puts and gets, and moved by peers in our memory where we can see it.",
        labels=("transport", "direction"),
    )
    for transport, row in totals.items():
        ended = row["put_ops"] + row["get_ops"]
        failed, cancelled = row["failed_ops"], row["cancelled_ops"]
        outcomes = {"done": max(0, ended - failed - cancelled), "failed": failed, "cancelled": cancelled}
        for outcome, value in outcomes.items():
            transfers.add_metric((transport, outcome), value)
        for direction in ("put", "get", "served_put", "served_get"):
            moved.add_metric((transport, direction), row[f"{direction}_bytes"])
    yield transfers
    yield moved
    yield from _choices(totals)
    for name, text in ENGINE_COUNTERS.items():
        family = CounterMetricFamily(f"kvxfer_{name}", text, labels=("transport",))
        for transport, row in totals.items():
            family.add_metric((transport,), row[name])
        yield family


PASSED_OVER = ("memory", "checksum", "not_offered", "unreachable", "refused")


def _choices(totals: Totals) -> Iterator[Metric]:
    chosen = CounterMetricFamily(
        "kvxfer_transport_chosen", "Grants of peers that are reached by this transport.", labels=("transport",)
    )
    passed = CounterMetricFamily(
        "kvxfer_transport_passed_over",
        "How often this transport was not taken for a grant although others were less preferred, and why.",
        labels=("transport", "reason"),
    )
    for transport, row in totals.items():
        chosen.add_metric((transport,), row["chosen"])
        for reason in PASSED_OVER:
            passed.add_metric((transport, reason), row[f"passed_{reason}"])
    yield chosen
    yield passed


ENGINE_COUNTERS: Mapping[str, str] = {
    "copied_bytes": "Bytes that this node's CPUs copied; per delivered byte this is the number of copies.",
    "mapped_bytes": "Bytes that were mapped instead of copied.",
    "staged_bytes": "Bytes that went through a block of host memory, on their way from or to an accelerator's memory.",
    "lent_bytes": "Bytes of puts that tcp sent from where they lie, without copying them into the kernel.",
    "segments": "Segments after merging.",
    "frames": "Data frames, or calls of a copy routine.",
    "inline_ops": "Operations that ended inside their submission.",
    "refused": "Accesses that the owner of the memory refused.",
    "protocol_errors": "Data connections that were dropped for breaking the protocol.",
    "notifies_sent": "Notifications sent on the data path.",
    "notifies_received": "Notifications received on the data path.",
    "peers_lost": "Data connections that were lost.",
}


def _families(samples: Iterator[Sample | Distribution]) -> Iterator[Metric]:
    families: dict[str, Metric] = {}
    for sample in samples:
        if isinstance(sample, Distribution):
            _add_distribution(families, sample)
            continue
        labels = sample.labels or {}
        family = families.get(sample.name)
        if family is None:
            kind = CounterMetricFamily if sample.counter else GaugeMetricFamily
            family = families[sample.name] = kind(sample.name, sample.help, labels=tuple(labels))
        assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
        family.add_metric(tuple(labels.values()), sample.value)
    yield from families.values()


def _add_distribution(families: dict[str, Metric], sample: Distribution) -> None:
    family = families.get(sample.name)
    if family is None:
        family = HistogramMetricFamily(sample.name, sample.help, labels=tuple(sample.labels))
        families[sample.name] = family
    assert isinstance(family, HistogramMetricFamily)
    bounds = [*map(str, sample.bounds_s), "+Inf"]
    buckets = list(zip(bounds, accumulate(sample.counts), strict=True))
    family.add_metric(tuple(sample.labels.values()), buckets, sample.sum_s)


class Metrics:
    """Everything under `/metrics`, in the text format of Prometheus."""

    def __init__(self, engines: EngineCounters, samples: Samples) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Collector(engines, samples))

    def render(self) -> bytes:
        """The metrics as the text of one scrape, in Prometheus' format."""
        return generate_latest(self._registry)


def known_code(code: str) -> str:
    """An error code as a label: one of ours, or `other`."""
    return code if code in BY_CODE else "other"

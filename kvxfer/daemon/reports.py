"""What the workers of this node say of themselves: the sum for the metrics, and who is not ready.

The idea: a worker's counts grow with its life, so those of workers that have ended are kept, and sums never fall. Words
come from workers: what does not look like one of ours, or would be one too many, is counted as "other".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from kvxfer.net.link import Link
from kvxfer.wire.messages import Report

KINDS_MAX = 64  # different (type, reason) that are told apart
_NAME = re.compile(r"([a-z_]{1,32}) ([a-z_]{1,32})")
OTHER = ("other", "other")


class Reports:
    """The last report of each linked worker."""

    def __init__(self) -> None:
        self._live: dict[Link, Report] = {}
        self._ended: Counter[tuple[str, str]] = Counter()

    def take(self, link: Link, report: Report) -> None:
        """In the place of the one before."""
        self._live[link] = report

    def forget(self, link: Link) -> None:
        """The worker has ended."""
        report = self._live.pop(link, None)
        if report is not None:
            self._ended = self._sum([report])

    @property
    def unready(self) -> list[str]:
        """Which workers cannot work, and why."""
        return sorted(f"{link.name}: {report.unready}" for link, report in self._live.items() if report.unready)

    @property
    def ignoring_fingerprints(self) -> int:
        """Workers that move caches of different models."""
        return sum(report.ignore_fingerprint for report in self._live.values())

    def unexpected(self) -> Iterator[tuple[str, str, int]]:
        """(type, reason, how often) of notices that fitted nothing, of all workers that there ever were."""
        for (kind, reason), number in self._sum(list(self._live.values())).items():
            yield kind, reason, number

    def _sum(self, reports: list[Report]) -> Counter[tuple[str, str]]:
        total = Counter(self._ended)
        for report in reports:
            for name, number in report.unexpected.items():
                found = _NAME.fullmatch(name)
                key = (found[1], found[2]) if found else OTHER
                known = key in total or len(total) < KINDS_MAX
                if isinstance(number, int) and number > 0:
                    total[key if known else OTHER] += number
        return total

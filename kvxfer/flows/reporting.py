"""What a worker says of itself to its daemon, for readiness and metrics: one message, sent when it has changed.

The idea: the daemon is what operators look at, and some things only a worker knows. A report is the whole state, so a
lost one does no harm, and many changes in a short time are one.
"""

from __future__ import annotations

import asyncio

from kvxfer.config import Config
from kvxfer.dataplane.early import Unexpected
from kvxfer.errors import KvxferError
from kvxfer.flows.control import Control
from kvxfer.wire.messages import DETAILS_MAX, Report

REPORT_S = 0.25  # changes that follow each other so quickly are told together


class Reporter:
    """The state, and when to tell it. ``registration_failed`` says why memory could not be registered."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._control: Control | None = None
        self._unexpected = Unexpected()
        self._told = Report()
        self._timer: asyncio.TimerHandle | None = None
        self.registration_failed = ""

    def start(self, control: Control, unexpected: Unexpected) -> None:
        """From now on everything is told to this daemon, and to the next one in its place."""
        self._control, self._unexpected = control, unexpected
        unexpected.on_add = self._changed
        control.on_restored = self._restored
        self._changed()

    def stop(self) -> None:
        """There is nobody to tell any more."""
        self._control = None
        self._unexpected.on_add = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def not_registered(self, why: KvxferError) -> None:
        """`Client.register_many` failed."""
        self.registration_failed = f"memory could not be registered: {why}"
        self._changed()

    def registered(self) -> None:
        """It went well."""
        self.registration_failed = ""
        self._changed()

    def _restored(self) -> None:
        self._told = Report()
        self._changed()

    def _changed(self) -> None:
        if self._timer is None and self._control is not None:
            self._timer = asyncio.get_running_loop().call_later(REPORT_S, self._tell)

    def _tell(self) -> None:
        self._timer = None
        report = self._now()
        if report != self._told and self._control is not None and self._control.say(report):
            self._told = report

    def _now(self) -> Report:
        counts = self._unexpected.counts.most_common(DETAILS_MAX)
        return Report(
            unready=self.registration_failed,
            ignore_fingerprint=self._config.ignore_fingerprint,
            unexpected={f"{kind} {reason}": number for (kind, reason), number in counts},
        )

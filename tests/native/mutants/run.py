"""Plays bodies of tests with the engine of `build.py`, and perhaps with one of its bugs."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.conftest import slack
from tests.native.mutants.build import ROOT, built

LIMIT_S = 40  # a bug that nothing sees plays its test to the end


@dataclass(frozen=True, slots=True)
class Outcome:
    """``status``: 0 all was well, 1 the test failed, else the process did; ``said``: with which words."""

    status: int
    said: str


class Player:
    """The process of `play.py`. The long form of tests: there is time for a bug that needs luck to show."""

    def __init__(self, *modules: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "KVXFER_TEST_FULL": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.native.mutants.play", str(built()), *modules],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def __enter__(self) -> Player:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def play(
        self,
        module: str,
        body: str,
        *arguments: str,
        folder: Path,
        bug: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> Outcome:
        said = folder / "said"
        settings = {**(environment or {}), "KVXFER_TEST_MUTATION": bug}
        wanted = {"module": module, "body": body, "arguments": arguments, "environment": settings, "said": str(said)}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(wanted).encode() + b"\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], LIMIT_S * slack())
        text = said.read_text() if said.exists() else ""
        assert ready, f"{bug}: no end within {LIMIT_S} s\n{text}"
        return Outcome(int(self.process.stdout.readline()), text or said.read_text())

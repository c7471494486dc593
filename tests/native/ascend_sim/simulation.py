"""A simulation from a test's side: its directory, its environment, faults that come and go, what the log says."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.native.ascend_sim.build import build


@dataclass(frozen=True, slots=True)
class Simulation:
    """Processes started with ``environment()`` share the cards of ``directory``; the last to end leaves none of them.

    ``settings``: names without the prefix, for example ``{"HBM": "64M", "STRICT": "abort"}``.
    """

    directory: Path
    variant: str = "9.1"
    abi: int = 1
    sanitize: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    def environment(self, **more: str) -> dict[str, str]:
        """A whole environment for a child: this process's, less exported settings, and the simulation's."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVXFER_SIM_")}
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        kept["KVXFER_CANN_LIBDIR"] = str(build(self.variant, self.abi, self.sanitize))
        kept["KVXFER_SIM_DIR"] = str(self.directory)
        return kept | {f"KVXFER_SIM_{name}": value for name, value in (dict(self.settings) | more).items()}

    def control(self, pid: int | None = None, **values: object) -> None:
        """Faults from now on, for all processes or for one: what was said before is gone. ``control()`` ends them."""
        path = self.directory / ("control" if pid is None else f"control.{pid}")
        fresh = path.with_suffix(path.suffix + ".new")
        fresh.write_text("".join(f"KVXFER_SIM_{name}={value}\n" for name, value in values.items()))
        fresh.rename(path)
        time.sleep(0.002)  # the libraries look again after a millisecond

    def log(self) -> list[str]:
        path = self.directory / "sim.log"
        return path.read_text().splitlines() if path.exists() else []

    def faults(self, text: str = "") -> list[str]:
        """What real hardware would have punished; a test that meant none asserts that this is empty."""
        return [line for line in self.log() if line.startswith("FAULT ") and re.search(text, line)]

"""The whole table of ascend.h over the simulated libraries, of each toolkit and both string ABIs.

The libraries load once per process, so each scenario of `ascend_table` is one; what it asserts stands there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.ascend_fakes import ROOT
from tests.native.ascend_sim.build import build

TOOLKITS = {"8.5": "8.5", "9.0": "9.0", "9.1": "9.1+"}
# Every toolkit with the string ABI that it is likely to have, and the newest with the other one too.
BUILDS = (("8.5", 0), ("9.0", 0), ("9.1", 0), ("9.1", 1))
EVERYWHERE = ("facts", "memory", "engines", "options")
ONCE = ("contexts", "streams", "ipc", "faults")


def run(scenario: str, variant: str, abi: int, folder: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVXFER_", "ASCEND_"))}
    environment = {
        "KVXFER_CANN_LIBDIR": str(build(variant, abi)),
        "KVXFER_SIM_DIR": str(folder),
        "KVXFER_SIM_HBM": "64M",
        "KVXFER_SIM_DEVICES": "2",
        "EXPECTED_TOOLKIT": TOOLKITS[variant],
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.native.ascend_table", scenario],
        cwd=ROOT,
        env=kept | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "well\n"), f"exit status {done.returncode}\n{done.stderr}"


@pytest.mark.parametrize(("variant", "abi"), BUILDS)
@pytest.mark.parametrize("scenario", EVERYWHERE)
def test_each_toolkit(scenario: str, variant: str, abi: int, tmp_path: Path) -> None:
    run(scenario, variant, abi, tmp_path)


@pytest.mark.parametrize("scenario", ONCE)
def test_the_newest(scenario: str, tmp_path: Path) -> None:
    run(scenario, "9.1", 1, tmp_path)


def test_faults_without_a_latch(tmp_path: Path) -> None:
    run("faults", "8.5", 0, tmp_path)

"""The conformance suite over hixl: memory of (simulated) cards and pinned memory on either side, by either way.

The whole suite runs with the owner in another process, as in service; its most telling cases also with other kinds of
memory, with faults, and with both engines in one process. Each run is a pytest of its own: a process loads the vendor's
libraries once. What is left out, and why: `hixl_suite.py`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native import conformance_ending, conformance_moving, conformance_refusing
from tests.native.simulated import ROOT, environment, faults

WHOLE = ("hixl:hbm-hbm:network@process", "hixl:hbm-hbm:copy@process")
TELLING = (
    *("hixl:pinned-hbm:network@process", "hixl:hbm-pinned:network@process", "hixl:pinned-pinned:network@process"),
    *("hixl:hbm-hbm:network", "hixl:hbm-hbm:copy", "fault+hixl:pinned-hbm:network"),
)
SLACK = float(os.environ.get("KVXFER_TEST_SLACK", "1"))
QUICK = "moves_exactly or revoke or cancel or notification or owner_checks or wrong_key or dies or closes or is_left"


def registered() -> int:
    """How many cases have a variant with plain memory, all other parameters multiplied."""
    found = 0
    for module in (conformance_ending, conformance_moving, conformance_refusing):
        for name, case in vars(module).items():
            marks = getattr(case, "pytestmark", []) if name.startswith("test_") else []
            choices = [list(mark.args[1]) for mark in marks if mark.name == "parametrize"]
            if any("register" in values for values in choices):
                size = 1
                for values in choices:
                    size *= 1 if "register" in values else len(values)
                found += size
    return found


@pytest.mark.once
@pytest.mark.timeout(300 * SLACK)
@pytest.mark.parametrize("ways", [WHOLE, TELLING], ids=["whole", "telling"])
def test_hixl_keeps_the_promises(ways: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "40"]
    chosen = "not register" if ways == WHOLE else f"not register and ({QUICK})"
    done = subprocess.run(
        [*command, "tests/native/hixl_suite.py", "-k", chosen],
        cwd=ROOT,
        env=environment(tmp_path, HBM="2G", GBPS=2) | {"KVXFER_CONFORMANCE": ",".join(ways)},
        capture_output=True,
        text=True,
        timeout=280 * SLACK,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    counts = re.search(r"(\d+) passed, (\d+) deselected", done.stdout)
    assert counts is not None, done.stdout[-1000:]
    assert int(counts[1]) > 40 * len(ways)
    assert ways == TELLING or int(counts[2]) == registered() * len(ways), "nothing else is left out"
    assert faults(tmp_path) == []

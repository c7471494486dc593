"""The conformance suite over hixl: memory of (simulated) cards and pinned memory on either side, by either way.

The whole suite runs with the owner in another process, as in service; its most telling cases also with other kinds of
memory, with faults, and with both engines in one process. Each run is a pytest of its own: a process loads the vendor's
libraries once.
"""

from __future__ import annotations

import math
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


# What is not run, and why; nothing else is missing, also not with the owner in another process.
LEFT_OUT = {
    "test_offsets_beyond_four_gib": "registers plain memory; with a card's: test_hixl.test_what_it_moves_and_what_not",
    "test_read_only_memory": "plain memory; a card's has no read-only pages",
    "test_read_only_memory_can_be_read_by_peers": "likewise",
}
PLAIN = "register"  # a parameter of cases: plain memory; a card's, of the application: test_hixl_edges.py


def left_out() -> int:
    """How many cases that is for one transport."""
    cases = {}
    for module in (conformance_ending, conformance_moving, conformance_refusing):
        cases |= {name: case for name, case in vars(module).items() if name.startswith("test_")}
    assert set(LEFT_OUT) <= set(cases)
    found = 0
    for name, case in cases.items():
        choices = [list(mark.args[1]) for mark in getattr(case, "pytestmark", []) if mark.name == "parametrize"]
        if name in LEFT_OUT:
            found += math.prod(map(len, choices))
        elif any(PLAIN in values for values in choices):
            found += math.prod(1 if PLAIN in values else len(values) for values in choices)
    return found


@pytest.mark.once
@pytest.mark.timeout(300 * SLACK)
@pytest.mark.parametrize("ways", [WHOLE, TELLING], ids=["whole", "telling"])
def test_hixl_keeps_the_promises(ways: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "40"]
    chosen = f"not {PLAIN} and not " + " and not ".join(LEFT_OUT)
    chosen += f" and ({QUICK})" if ways == TELLING else ""
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
    counts = re.search(r"(\d+) passed, (?:\d+ skipped, )?(\d+) deselected", done.stdout)
    assert counts is not None, done.stdout[-1000:]
    assert int(counts[1]) > 40 * len(ways)
    assert ways == TELLING or int(counts[2]) == left_out() * len(ways), "nothing else is left out"
    assert faults(tmp_path) == []

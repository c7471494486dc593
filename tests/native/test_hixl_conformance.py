"""The conformance suite over hixl, with memory of (simulated) cards on both sides, on one, by either way.

Each runs in a pytest of its own: a process loads the vendor's libraries once. What is left out needs memory that hixl
does not move (the application's plain memory); its counterparts for cards are in `test_hixl.py`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.simulated import ROOT, environment, faults

LEFT_OUT = (
    "register]",  # plain memory of the application
    "test_offsets_beyond_four_gib",  # likewise
    "test_read_only_memory",  # likewise, both tests
)
WHOLE = "hixl:hbm-hbm:network,hixl:hbm-hbm:copy"
PARTS = "fault+hixl:pinned-hbm:network,hixl:hbm-pinned:network"
QUICK = "moves_exactly or revoke or cancel or notification or owner_checks or wrong_key or dies or closes"


@pytest.mark.once
@pytest.mark.parametrize("ways", [WHOLE, PARTS])
def test_hixl_keeps_the_promises(ways: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "40"]
    command += ["tests/native/hixl_suite.py", "-k", " and ".join(f"not {name.strip(']')}" for name in LEFT_OUT)]
    if ways == PARTS:
        command[-1] = f"({command[-1]}) and ({QUICK})"
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(tmp_path, HBM="2G", GBPS=2) | {"KVXFER_CONFORMANCE": ways},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert faults(tmp_path) == []

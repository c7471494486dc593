"""The conformance suite over transports that move host memory, with memory of (simulated) cards on one side or both.

A look of the CPU at such memory ends the process, so whatever passes here went by the driver. Each runs in a pytest of
its own: a process loads the vendor's libraries once.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.simulated import ROOT, environment, faults

QUICK = "moves_exactly or revoke or cancel or corrupt or owner_checks"
# owner's memory - ours, and which cases: all, or those that differ between the ways.
WAYS = {
    "tcp:hbm-hbm": "",
    "tcp:dram-hbm": QUICK,
    "tcp:hbm-dram": QUICK,
    "fault+tcp:hbm-hbm": QUICK,
    "shm:dram-hbm": "",
    "shm:pinned-hbm": f"({QUICK}) and not mapping",
    "fault+shm:dram-hbm": QUICK,
}


@pytest.mark.parametrize("way", WAYS)
def test_host_transports_keep_their_promises_for_cards(way: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "40"]
    command += ["tests/native/hixl_suite.py"] + (["-k", WAYS[way]] if WAYS[way] else [])
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(tmp_path, HBM="2G") | {"KVXFER_CONFORMANCE": way},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert faults(tmp_path) == []

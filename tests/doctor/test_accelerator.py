"""The child that loads the libraries, over the simulated ones and over what is none. Nothing here is about hardware."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer import cli
from kvxfer.doctor.ascend import ask_libraries
from kvxfer.doctor.facts import Accelerator
from kvxfer.doctor.report import SIMULATED
from tests.native.ascend_sim.build import build


def asked(directory: Path | str, monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    monkeypatch.setenv("KVXFER_CANN_LIBDIR", str(directory))
    return ask_libraries()


@pytest.mark.parametrize(("variant", "toolkit"), [("8.5", "8.5"), ("9.1", "9.1+")])
def test_the_simulator_is_found_and_called_what_it_is(
    variant: str, toolkit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVXFER_SIM_DEVICES", "3")
    found = asked(build(variant, abi=1), monkeypatch)
    assert (found.found, found.simulated, found.soc, found.toolkit) == (True, True, "KVXSim910", toolkit)
    assert [card.device for card in found.cards] == [0, 1, 2]
    assert all(card.total >= card.free > 0 and not card.error for card in found.cards)
    assert ("bulk status" in found.lacks) == (variant == "8.5")


def test_a_directory_without_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(tmp_path, monkeypatch)
    assert not found.found
    assert str(tmp_path) in found.why


def test_libraries_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("libacl_rt.so", "libmetadef.so", "libcann_hixl.so", "libhcomm.so", "liberror_manager.so"):
        (tmp_path / name).write_bytes(b"\x7fELF, or so it says")
    found = asked(tmp_path, monkeypatch)
    assert not found.found
    assert "libacl_rt.so" in found.why


def test_doctor_over_the_simulator(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KVXFER_CANN_LIBDIR", str(build("9.1", abi=1)))
    monkeypatch.setenv("KVXFER_LISTEN", "127.0.0.1:0")
    monkeypatch.setenv("KVXFER_HTTP", "")
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert (shown[0], shown[-1]) == (SIMULATED, SIMULATED)
    assert any(line.startswith("  ok       card 0 (simulated)") for line in shown)
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["simulated"] is True


def test_the_child_prints_one_line_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_CANN_LIBDIR", str(build("9.1", abi=1)))
    command = [sys.executable, "-m", "kvxfer.doctor.accelerator"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert [line.partition(":")[0] for line in done.stdout.splitlines() if line.startswith("kvxfer-")] == [
        "kvxfer-accelerator"
    ]

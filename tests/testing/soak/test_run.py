"""A short soak, and what its judge says of a worker that leaks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvxfer.errors import BusyError
from kvxfer.testing.soak.__main__ import main
from kvxfer.testing.soak.ledger import Pieces, Wrongs
from kvxfer.testing.soak.report import as_text, passed
from kvxfer.testing.soak.run import Plan, Soak
from tests.conftest import slack

pytestmark = pytest.mark.once


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_twenty_seconds_of_everything(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "soak.json"
    status = main(["--minutes", str(0.25 * slack()), "--seed", "20", "--round", "120", "--json", str(report)])
    found = json.loads(report.read_text())
    text = capfd.readouterr().out
    assert status == 0, text
    assert found["passed"], text
    assert found["transfers"] >= 100, text
    done = {name.split()[0] for name in found["outcomes"] if name.endswith(" done")}
    assert done == {"put", "get", "push", "pull", "land", "churn"}, text
    assert any("mortal-a" in name for name in found["series"])


def test_a_byte_that_moves_in_free_memory_is_seen() -> None:
    memory, wrongs = np.zeros(64, dtype=np.uint8), Wrongs()
    pieces = Pieces([[memory[:32]], [memory[32:]]], wrongs, "piece")
    with pytest.raises(BusyError):
        pieces.take(3, "too many")
    assert pieces.take(2, "first") == [0, 1]
    memory[:] = 1
    pieces.give([0, 1])
    memory[40] = 1
    pieces.take(2, "second")
    assert wrongs.count == 1
    assert wrongs.first == ["second: a byte moved in piece 1 at 8 while it was free"]


def test_a_broken_promise_fails_the_run_and_is_shown() -> None:
    found = Soak(Plan(minutes=1, seed=5), Path())
    found.tally.transfers = 10
    assert passed(found, [])
    for number in range(100):
        found.tally.wrongs.add(f"wrong {number}")
    assert not passed(found, [])
    text = as_text(found, [], 1)
    assert "WRONG: wrong 0" in text
    assert "and 68 more" in text
    assert "--seed 5" in text

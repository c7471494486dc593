"""A short soak, and what its judge says of a worker that leaks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvxfer.errors import BusyError, DaemonUnavailable
from tests.conftest import slack
from tests.support.soak.__main__ import main
from tests.support.soak.choices import KINDS
from tests.support.soak.judge import Verdict
from tests.support.soak.ledger import Pieces, Wrongs
from tests.support.soak.report import REASONS_MAX, as_text, in_short, passed
from tests.support.soak.run import LONGER_S, STARTS, Plan, Soak, patiently
from tests.support.soak.side import TURN_S, within

pytestmark = pytest.mark.once


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_twenty_seconds_of_everything(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "soak.json"
    status = main(["--minutes", str(0.25 * slack()), "--seed", "20", "--round", "120", "--json", str(report)])
    found = json.loads(report.read_text())
    short, lines = found["in_short"], capfd.readouterr().out.splitlines()
    assert status == 0, "\n".join(short)
    assert found["passed"]
    assert lines[-1] == short[0], "the verdict comes last"
    done = {name.split()[0] for name in found["outcomes"] if name.endswith(" done")}
    assert done == set(KINDS), short
    for who in ("shm-a", "shm-b", "tcp-a", "tcp-b", "mortal-a"):
        assert found["series"][f"{who} tasks"]["closing"] == 1, f"{who}: {found['tasks_at_rest'][who]}"


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


def test_the_verdict_and_its_reasons_are_the_first_lines_and_the_last() -> None:
    found = Soak(Plan(minutes=1, seed=5), Path())
    found.tally.transfers = 10
    rose = Verdict(name="w fds", judged=True, first=1, last=9, slope=1, points=30, why="grew")
    for number in range(100):
        found.tally.wrongs.add(f"wrong {number}")
    short, lines = in_short(found, [rose]), as_text(found, [rose], 1).splitlines()
    assert short[:3] == [
        "FAILED: 10 transfers, 1 series judged, 0 too short to say, seed 5; play it again with --seed 5",
        "NOT FLAT: w fds: grew",
        "WRONG: wrong 0",
    ]
    assert len(short) == REASONS_MAX + 2
    assert lines[: len(short)] == lines[-len(short) :] == short


def test_a_run_goes_on_until_each_kind_was_done_but_not_for_ever() -> None:
    found = Soak(Plan(minutes=0, seed=5), Path())
    assert found.goes_on
    assert found.tally.never_done == sorted(KINDS)
    found.tally.outcomes.update(f"{kind} b done" for kind in KINDS if kind != "land")
    found.tally.outcomes["land b timeout"] += 1
    assert found.tally.never_done == ["land"]
    found.began -= LONGER_S
    assert not found.goes_on
    found.began += LONGER_S
    found.tally.outcomes["land b done"] += 1
    assert not found.goes_on


@pytest.mark.asyncio
async def test_a_process_that_does_not_come_up_is_started_again_a_few_times() -> None:
    tried: list[int] = []

    async def third_time() -> None:
        tried.append(1)
        if len(tried) < STARTS:
            raise DaemonUnavailable("not yet")

    await patiently(third_time)
    assert len(tried) == STARTS
    with pytest.raises(DaemonUnavailable):
        await patiently(never)


async def never() -> None:
    raise DaemonUnavailable("never")


@pytest.mark.asyncio
async def test_a_wait_is_counted_in_turns() -> None:
    turns = iter([False, False, True])
    assert await within(3 * TURN_S, lambda: next(turns))
    assert not await within(TURN_S, lambda: False)
    assert await within(0, lambda: True)

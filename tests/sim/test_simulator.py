"""The simulator: its seeds are the same everywhere, clusters keep their promises, and deliberate bugs are seen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.sim.mutations import MUTATIONS
from tests.support.sim.report import replay_command
from tests.support.sim.run import Plan, Simulation, simulate

pytestmark = pytest.mark.once

SEEDS_FILE = Path(__file__).with_name("seeds.txt")
FIXED_SEEDS = 200  # `.ci/run` and `make sim` play new ones
MUTATION_SEEDS_MAX = 120  # a deliberate bug is seen within so many seeds
NARROW = {"window_ops_max": 1, "inflight_max": 2, "inline_bytes_max": 0}  # whoever moves a byte waits for others
LONG = {"lease_s": 25.0}  # what nobody was told of is still there when all is quiet
OPTIONS: dict[str, dict[str, Any]] = {
    "running_permit_given_up": NARROW,
    "settlement_said_once": LONG,
    "settlement_forgotten": LONG,
}
PLANS = {  # what shows itself in one kind of trouble only
    "quarantine_skipped": Plan(hosts=2, workers=4, flows=60, faults=True, span_s=0.2, kinds=("weather",)),
    "settlement_said_once": Plan(
        hosts=3, workers=6, flows=60, faults=True, span_s=4.0, kinds=("partition",), work=("slow",)
    ),
    "settlement_forgotten": Plan(
        hosts=2, workers=4, flows=60, faults=True, span_s=4.0, kinds=("partition", "kill_daemon"), work=("slow",)
    ),
    "stale_incarnation": Plan(hosts=3, workers=4, flows=60, faults=True, span_s=4.0, kinds=("kill_daemon",)),
    "lost_grant_kept": Plan(hosts=3, workers=4, flows=60, faults=True, span_s=4.0, kinds=("reset",)),
    "grant_denied_too_early": Plan(hosts=3, workers=4, flows=60, faults=True, span_s=4.0, kinds=("reset",)),
}


def play(*arguments: str, hash_seed: str = "random") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.support.sim", *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.timeout(600)  # half a minute of computing; a busy machine may give it late
def test_the_same_seeds_each_time_and_all_that_ever_failed() -> None:
    jobs = str(min(2, os.cpu_count() or 1))
    done = play("--seeds", str(FIXED_SEEDS), "--start", "0", "--jobs", jobs, "--file", str(SEEDS_FILE))
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    past = [line for line in SEEDS_FILE.read_text().splitlines() if line and not line.startswith("#")]
    assert f"{FIXED_SEEDS + len(past)} seeds, 0 failed" in done.stdout


@pytest.mark.parametrize("seed", [10, 33])
def test_a_seed_is_the_same_in_every_process(seed: int) -> None:
    digests = set()
    for hash_seed in ("1", "2"):
        done = play("--seed", str(seed), hash_seed=hash_seed)
        found = re.search(r"trace ([0-9a-f]{32})", done.stdout)
        assert found, done.stdout + done.stderr
        digests.add(found[1])
    assert digests == {simulate(seed).digest}


def test_other_seeds_are_other_runs() -> None:
    assert simulate(1).digest != simulate(2).digest


def test_what_is_shown_does_not_change_what_happens() -> None:
    lines: list[str] = []
    assert Simulation(7, show=lines.append).run().digest == simulate(7).digest
    assert len(lines) > 100


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_deliberate_bug_is_seen(name: str) -> None:
    for seed in range(MUTATION_SEEDS_MAX):
        options = OPTIONS.get(name, {})
        if Simulation(seed, plan=PLANS.get(name), mutation=name, **options).run().violations:
            return
    raise AssertionError(f"{MUTATION_SEEDS_MAX} seeds do not see it")


def test_mutations_go_with_their_run() -> None:
    assert Simulation(0, mutation="visible_early").run().violations
    assert not simulate(0).violations


def test_a_failing_seed_says_how_to_see_it_again() -> None:
    done = play("--seeds", "1", "--start", "0", "--mutation", "visible_early")
    assert done.returncode == 1
    assert "seed 0 FAILED" in done.stdout
    assert "the events before the first of them:" in done.stdout
    command = re.search(r"replay it with: python -m tests.support.sim (.*)", done.stdout)
    assert command, done.stdout
    again = play(*command[1].split())
    assert again.returncode == 1
    assert " WRONG promise: " in again.stdout


def test_a_changed_plan_is_part_of_the_command() -> None:
    plan = Plan(hosts=2, workers=3, flows=4, faults=False, span_s=0.5)
    result = Simulation(1, plan=plan).run()
    assert not result.violations
    assert "--hosts 2 --workers 3 --flows 4 --span 0.5 --no-faults" in replay_command(result)
    result = Simulation(1, plan=replace(plan, work=("slow", "mail"))).run()
    assert " --work slow mail" in replay_command(result)


def test_without_faults_everything_is_done() -> None:
    plan = Plan(hosts=3, workers=6, flows=60, faults=False, span_s=0.2)
    result = Simulation(4, plan=plan).run()
    assert result.outcomes == {"done": result.parts}
    assert not result.violations


def test_small_limits_refuse_and_break_nothing() -> None:
    plan = Plan(hosts=3, workers=6, flows=60, faults=True, span_s=0.05)
    limits = {"postings_max": 6, "claims_max": 8, "waiting_max": 4, "requests_max": 6, "mailboxes_max": 2}
    limits |= {"peers_max": 1, "window_ops_max": 1, "inflight_max": 4, "handshakes_max": 2}
    for seed in range(6):
        result = Simulation(seed, plan=plan, **limits).run()
        assert not result.violations, result.violations
        assert "too_many_pending" in result.outcomes or "busy" in result.outcomes


def test_narrow_windows_leave_no_permit() -> None:
    plan, done = Plan(hosts=2, workers=4, flows=60, faults=True, span_s=0.3), 0
    for seed in range(8):
        result = Simulation(seed, plan=plan, **NARROW).run()
        assert not result.violations, result.violations
        done += result.outcomes["done"]
    assert done > 100


@pytest.mark.slow
def test_a_thousand_nodes() -> None:
    plan = Plan(hosts=1000, workers=1000, flows=500, faults=True, span_s=2.0)
    result = Simulation(3, plan=plan).run()
    assert not result.violations, result.violations
    assert result.outcomes["done"] > result.parts / 2

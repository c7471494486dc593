"""`python -m tests.support.sim`: play seeds, replay one, or measure."""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.sim.faults import KINDS
from tests.support.sim.mutations import MUTATIONS
from tests.support.sim.report import failure, one_line, summary
from tests.support.sim.run import Plan, Result, Simulation, play
from tests.support.sim.work import EVERY

FAILURES_SHOWN = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 when a promise was broken."""
    options = parser().parse_args(arguments)
    if options.seed is not None:
        return one(options)
    seeds = [*past_failures(options.file), *new_seeds(options)]
    return many(seeds, options)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="python -m tests.support.sim", description=__doc__)
    found.add_argument("--seed", type=int, help="play this one seed")
    found.add_argument("--trace", action="store_true", help="with --seed: show every event")
    found.add_argument("--seeds", type=int, default=200, help="play so many new seeds (default: %(default)s)")
    found.add_argument("--start", default="time", help="the first new seed; `time`: from commit and time (default)")
    found.add_argument("--file", type=Path, help="play the seeds of this file first, one per line")
    found.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    found.add_argument("--hosts", type=int, help="nodes, instead of what the seed says")
    found.add_argument("--workers", type=int, help="workers in all, instead of what the seed says")
    found.add_argument("--flows", type=int, help="transfers, instead of what the seed says")
    found.add_argument("--span", type=float, help="seconds over which they begin, instead of what the seed says")
    found.add_argument("--faults", action=argparse.BooleanOptionalAction, help="instead of what the seed says")
    found.add_argument("--kinds", nargs="+", choices=KINDS, type=str, help="only these faults")
    found.add_argument("--work", nargs="+", choices=EVERY, type=str, help="only these flows")
    found.add_argument("--mutation", default="", choices=("", *MUTATIONS), help="with a deliberate bug")
    return found


def plan_of(seed: int, options: argparse.Namespace) -> Plan:
    """The seed's own plan, with what the command line says otherwise."""
    changes: dict[str, Any] = {
        name: value
        for name, value in (
            ("hosts", options.hosts),
            ("workers", options.workers),
            ("flows", options.flows),
            ("span_s", options.span),
            ("faults", options.faults),
            ("kinds", options.kinds and tuple(options.kinds)),
            ("work", options.work and tuple(options.work)),
        )
        if value is not None
    }
    return replace(Plan.of(seed), **changes)


def one(options: argparse.Namespace) -> int:
    """One seed, perhaps with all its events."""
    show = print if options.trace else None
    result = Simulation(options.seed, plan=plan_of(options.seed, options), mutation=options.mutation, show=show).run()
    print(one_line(result))
    print(summary([result]))
    if result.violations:
        print(failure(result) if not options.trace else "\n".join(map(str, result.violations)))
    return 1 if result.violations else 0


def many(seeds: list[int], options: argparse.Namespace) -> int:
    """Seeds one after the other, or in several processes; a line for each that fails."""
    began = time.perf_counter()
    results = list(played([(seed, plan_of(seed, options), options.mutation) for seed in seeds], options.jobs))
    failed = [result for result in results if result.violations]
    for result in failed[:FAILURES_SHOWN]:
        print(failure(result), end="\n\n")
    for result in failed[FAILURES_SHOWN:]:
        print(one_line(result))
    print(summary(results))
    print(f"in {time.perf_counter() - began:.1f} s")
    return 1 if failed else 0


def played(jobs: list[tuple[int, Plan, str]], processes: int) -> Iterator[Result]:
    """Results in the order of the seeds."""
    if processes <= 1:
        yield from map(play, jobs)
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(play, jobs, chunksize=8)


def past_failures(path: Path | None) -> list[int]:
    """Seeds of a file: one per line, with whatever behind it says why."""
    if path is None:
        return []
    lines = (line.partition("#")[0].split() for line in path.read_text().splitlines())
    return [int(words[0]) for words in lines if words]


def new_seeds(options: argparse.Namespace) -> list[int]:
    """As many as wanted; printed, so that they can be played again."""
    first = fresh() if options.start == "time" else int(options.start)
    print(f"seeds {first} to {first + options.seeds - 1} (--start {first} plays them again)", flush=True)
    return list(range(first, first + options.seeds))


def fresh() -> int:
    """A first seed that nobody has played: out of the commit and the time."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return (int(commit[:8] or "0", 16) * 1_000_003 + time.time_ns() // 1_000_000) % 1_000_000_000_000


if __name__ == "__main__":
    sys.exit(main())

"""`make bench-compare`: kvxfer beside other data movers, judged by the project's goals.

The same run as `kvxfer bench`, with other data movers (NIXL, Mooncake, UCX, Redis, Memcached ...) taking their turn in
every round. `make bench-peers` makes their environments; one that cannot run here is named with the reason.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

import uvloop

from benchmarks import goals, rivals
from benchmarks.rivals import RIVALS
from kvxfer.bench.page import Judged
from kvxfer.bench.rows import Row, RunOptions
from kvxfer.bench.run import Run
from kvxfer.cli import bench
from kvxfer.errors import KvxferError, UsageError

COMPARE_DEFAULT = "nixl,ucx,mooncake,ucxx"
ROUNDS_DEFAULT = 5
EXIT_FAILED, EXIT_USAGE = 1, 2


class Compared:
    """The chosen rivals, as a run asks for them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    async def missing(self) -> dict[str, str]:
        """Those that cannot run here, with the reason."""
        known = await asyncio.to_thread(rivals.available)
        return {name: reason for name in self.names if (reason := known[name]) is not None}

    async def measure(self, name: str, workload: str, options: RunOptions) -> list[Row]:
        """One round of one of them."""
        return await rivals.measure(name, workload, options)


def parser() -> argparse.ArgumentParser:
    """The arguments: those of `kvxfer bench`, and whom to compare with."""
    found = argparse.ArgumentParser(prog="make bench-compare", description=__doc__.split("\n", maxsplit=1)[0])
    found.add_argument(
        "--compare",
        default=COMPARE_DEFAULT,
        metavar="A,B,...",
        help=f"of {', '.join(RIVALS)}; or all (default: %(default)s)",
    )
    bench.configure(found)
    found.set_defaults(rounds=ROUNDS_DEFAULT, peers=goals.GOALS_PEERS)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, judge, write; 1 when a ratio regressed or the run failed, 2 for wrong arguments."""
    args = parser().parse_args(arguments)
    try:
        return run(args)
    except KvxferError as error:
        print(f"bench-compare: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED


def run(args: argparse.Namespace) -> int:
    """The exit status."""
    names = tuple(RIVALS) if args.compare == "all" else bench.chosen(args.compare, tuple(RIVALS), "--compare")
    report = bench.RunReport(args, bench.plan_of(args))
    result = uvloop.run(Run(report.plan, Compared(names)).execute())
    verdicts = goals.judge(result.rows)
    table = Judged(title="Goals", headers=goals.HEADERS, lines=goals.lines(verdicts), text=3)
    status = report.made(result, table, goals.as_rows(verdicts))
    print("\n" + goals.text(verdicts))
    return status


if __name__ == "__main__":
    sys.exit(main())

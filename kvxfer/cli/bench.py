"""`kvxfer bench`: measure this machine's transports on the work of a KV cache, beside plain copies and sockets."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from kvxfer.errors import UsageError

WORKLOADS_DEFAULT = "W1,W2,W3,W3b,W4,W5,W6,W2u,W3u,setup,submit,idle,scale"
TRANSPORTS_DEFAULT = "shm,tcp"
ROUNDS_DEFAULT, ROUNDS_MAX = 5, 100
LIMIT_S = 55.0
PEERS_MAX = 256


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of this command."""
    parser.add_argument("--workloads", default=WORKLOADS_DEFAULT, metavar="A,B,...", help="default: %(default)s")
    parser.add_argument("--transports", default=TRANSPORTS_DEFAULT, metavar="A,B,...", help="default: %(default)s")
    parser.add_argument(
        "--rounds",
        type=int,
        help=f"interleaved rounds (default {ROUNDS_DEFAULT}, fewer when the machine is so slow that they would take a "
        "minute)",
    )
    parser.add_argument("--quick", action="store_true", help="smaller work, fewer samples: some seconds")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # for tests: means nothing as numbers
    parser.add_argument("--peers", type=int, metavar="N", help="connected peers of the idle measurement")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a configuration value for both sides, as in the configuration file (may be repeated)",
    )
    parser.add_argument("--json", metavar="FILE", help="write all rows as JSON")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page with plots")
    parser.add_argument("--save-baseline", metavar="FILE", help="keep this run for a later --check")
    parser.add_argument(
        "--check", metavar="FILE", help="compare ratios to the references with a stored run; 1 when one got worse"
    )
    parser.add_argument(
        "--tolerance", type=float, default=0.25, help="how much worse a ratio may be (default 0.25: a quarter)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print, write; 1 when a ratio regressed."""
    from kvxfer.bench.run import Run

    report = RunReport(args, plan_of(args))
    result = uvloop.run(Run(report.plan).execute())  # as the daemon and most engines of this field do
    return report.made(result)


class RunReport:
    """What becomes of a run: a table, files, a comparison with a stored run. Files are looked at before the run.

    Raises `UsageError` for a file that cannot be read or written.
    """

    def __init__(self, args: argparse.Namespace, plan: Any) -> None:
        from kvxfer.bench import rows

        self._args, self.plan = args, plan
        self._baseline = None if args.check is None else rows.loads(read(args.check), args.check)
        for name in (args.json, args.html, args.save_baseline):
            if name is not None:
                writable(Path(name))

    def made(self, result: Any, judged: Any = None, judged_rows: Sequence[Any] = ()) -> int:
        """Print and write; ``judged`` is a table more for the page, ``judged_rows`` are rows more for the JSON. Returns
        the exit status: 1 when a ratio got worse than the baseline's by more than the tolerance.
        """
        from kvxfer.bench import check, page, rows, table

        args = self._args
        print(table.text(result))
        for name in (args.json, args.save_baseline):
            if name is not None:
                write(Path(name), rows.dumps([*result.rows, *judged_rows]))
        if args.html is not None:
            write(Path(args.html), page.page(result, judged))
        if self._baseline is None:
            return 0
        compared = check.judge(result.rows, self._baseline, self.plan.transports, self.plan.workloads)
        print("\n" + check.report(compared, args.tolerance))
        worse = sum(one.is_regression(args.tolerance) for one in compared)
        print(f"\n{worse} of {len(compared)} ratios got worse by more than {args.tolerance:.0%}")
        return 1 if worse else 0


def plan_of(args: argparse.Namespace) -> Any:
    """The plan that the arguments ask for; `UsageError` names what is wrong with them."""
    from dataclasses import replace

    from kvxfer.bench.rows import WORKLOADS
    from kvxfer.bench.run import BenchPlan
    from kvxfer.bench.work import SIZES

    workloads = chosen(args.workloads, tuple(WORKLOADS), "--workloads")
    if "W5" in workloads and "W2" not in workloads:
        workloads = (*workloads, "W2")
    rounds = ROUNDS_DEFAULT if args.rounds is None else args.rounds
    if not 1 <= rounds <= ROUNDS_MAX:
        raise UsageError("--rounds is out of range", value=rounds, limit=ROUNDS_MAX)
    if not 0 < args.tolerance < 100:
        raise UsageError("--tolerance is out of range", value=args.tolerance)
    sizes = SIZES["tiny" if args.tiny else "quick" if args.quick else "full"]
    if args.peers is not None:
        if not 1 <= args.peers <= PEERS_MAX:
            raise UsageError("--peers is out of range", value=args.peers, limit=PEERS_MAX)
        sizes = replace(sizes, peers=args.peers)
    return BenchPlan(
        workloads=workloads,
        transports=chosen(args.transports, tuple(TRANSPORTS_DEFAULT.split(",")), "--transports"),
        rounds=rounds,
        sizes=sizes,
        limit_s=LIMIT_S if args.rounds is None else None,
        options=options_of(args.option),
        quick=args.quick or args.tiny,
    )


def chosen(text: str, known: Sequence[str], flag: str) -> tuple[str, ...]:
    """The names in a list, each once; case does not matter."""
    by_folded = {name.lower(): name for name in known}
    found = []
    for word in text.split(","):
        name = by_folded.get(word.strip().lower())
        if name is None:
            raise UsageError(f"{flag}: unknown name", value=word.strip()[:40], hint="one of " + ", ".join(known))
        found.append(name)
    return tuple(dict.fromkeys(found))


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """``NAME=VALUE`` words as typed configuration values."""
    from kvxfer.config import CONFIG_OPTIONS

    known = {option.name: option for option in CONFIG_OPTIONS if not option.secret}
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in known:
            raise UsageError("--option takes NAME=VALUE of a configuration option", value=word[:80])
        found[name] = known[name].parse(value, "--option")
    return found


def read(name: str) -> str:
    """The text of a file. Raises: `UsageError`."""
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as wrong:
        raise UsageError(f"cannot read {name}: {wrong}") from None


def writable(path: Path) -> None:
    """Find out before the measurement, not after it."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"cannot write {path}: no such directory, or it is one")


def write(path: Path, text: str) -> None:
    """Replace a file by this text. Raises: `UsageError`."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as wrong:
        raise UsageError(f"cannot write {path}: {wrong}") from None
    print(f"\nwritten: {path}")

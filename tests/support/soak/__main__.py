"""`python -m tests.support.soak --minutes 30`: exit status 1 when a promise was broken or something grows."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.soak.report import as_dict, as_text, passed
from tests.support.soak.run import ROUND, Plan, soak


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, help="make the choices of that run again; default: from the time")
    parser.add_argument("--json", type=Path, help="write the report there, for programs")
    parser.add_argument("--round", type=int, default=ROUND, help="transfers between two samples (default: %(default)s)")
    options = parser.parse_args(arguments)
    seed = int(time.time()) if options.seed is None else options.seed
    print(f"soak: {options.minutes:g} minutes, seed {seed}", flush=True)
    plan = Plan(minutes=options.minutes, seed=seed, round_flows=options.round)
    with tempfile.TemporaryDirectory(prefix="kvxsoak") as directory:
        found, verdicts = asyncio.run(soak(plan, Path(directory)))
    seconds = time.monotonic() - found.began
    print(as_text(found, verdicts, seconds))
    if options.json is not None:
        options.json.write_text(json.dumps(as_dict(found, verdicts, seconds), indent=2) + "\n")
    return 0 if passed(found, verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())

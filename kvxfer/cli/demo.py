"""`kvxfer demo`: the demonstration of `examples/demo.py`, from a checkout or from an installed package."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

import kvxfer
from kvxfer.errors import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    """Everything after the command goes to the demonstration itself."""
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see `kvxfer demo -- --help`")


def script() -> Path:
    """Where the demonstration lies: beside the package in a checkout, else among its installed data."""
    package = Path(kvxfer.__file__).parent
    for candidate in (package.parent / "examples" / "demo.py", Path(sys.prefix) / "share/kvxfer/examples/demo.py"):
        if candidate.is_file():
            return candidate
    raise UsageError(
        "the demonstration is not installed with this copy of kvxfer", hint="run it from a checkout: make demo"
    )


def run(args: argparse.Namespace) -> int:
    """Hand over to the script; its exit status is ours."""
    path = script()
    arguments = [word for word in args.arguments if word != "--"]
    sys.argv = [str(path), *arguments]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    return 0

"""`kvxfer config`: what every option is set to, and where each value comes from."""

from __future__ import annotations

import argparse
import json
import sys

from kvxfer.cli.options import add_config_flags, load_from
from kvxfer.config import CONFIG_OPTIONS, Loaded


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--changed", action="store_true", help="only values that are not defaults")
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Print the effective configuration; secrets are never shown."""
    loaded = load_from(args)
    for warning in loaded.warnings:
        print(f"kvxfer config: warning: {warning}", file=sys.stderr)
    rows = table(loaded, changed=args.changed)
    if args.json:
        print(json.dumps({name: {"value": value, "origin": origin} for name, value, origin in rows}, indent=2))
        return 0
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    for name, value, origin in rows:
        print(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}")
    return 0


def table(loaded: Loaded, *, changed: bool) -> list[tuple[str, str, str]]:
    """(name, shown value, origin) of every option, in the order of the reference page."""
    rows = [
        (option.name, option.show(getattr(loaded.config, option.name)), loaded.origins[option.name])
        for option in CONFIG_OPTIONS
    ]
    return [row for row in rows if not changed or row[2] != "default"]

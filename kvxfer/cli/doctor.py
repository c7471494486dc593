"""`kvxfer doctor`: what this host can do for kvxfer, what it cannot, and what to do about it."""

from __future__ import annotations

import argparse
import sys

from kvxfer.config import Loaded, load
from kvxfer.errors import UsageError

TIMEOUT_S_MAX = 600
PEERS_MAX = 32

EPILOG = """each line says ok, warning (works, but less well or not for long), PROBLEM (does not work) or not here (no
fault: this host lacks it). Changes nothing, needs no daemon; ports are bound for a moment to see whether they can be.

exit status: 0 no problem; 1 a problem; 2 the command line or the configuration is wrong.

examples:
  kvxfer doctor
  kvxfer doctor --config /etc/kvxfer/kvxfer.toml --peer 10.0.0.6:17800
  kvxfer doctor --json | jq '.findings[] | select(.state == "problem")'
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of this command."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="also look whether this node can be reached and fits to this one (may be repeated)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="for each node (default 5)")
    parser.add_argument("--config", metavar="FILE", help="TOML file to read (default: $KVXFER_CONFIG)")


def run(args: argparse.Namespace) -> int:
    """Examine and print; see `EPILOG` for the exit status."""
    from kvxfer.addresses import as_node

    if not 0 < args.timeout <= TIMEOUT_S_MAX:
        raise UsageError(f"--timeout must be a number of seconds up to {TIMEOUT_S_MAX}", value=args.timeout)
    if len(args.peer) > PEERS_MAX:
        raise UsageError(f"--peer: at most {PEERS_MAX}", value=len(args.peer))
    for text in args.peer:
        as_node(text.split(","))
    return examine(load(args.config), args)


def examine(loaded: Loaded, args: argparse.Namespace) -> int:
    """With a configuration that makes sense."""
    import asyncio

    from kvxfer.doctor.facts import FindingState, worst
    from kvxfer.doctor.report import as_json, as_text, gather, judge

    if sys.stderr.isatty():
        print("looking ...", end="\r", file=sys.stderr, flush=True)
    facts = asyncio.run(gather(loaded, args.peer, args.timeout))
    findings = list(judge(facts, loaded))
    show = as_json if args.json else as_text
    print(show(findings, simulated=facts.ascend.accelerator.simulated))
    return 1 if worst(findings) is FindingState.PROBLEM else 0

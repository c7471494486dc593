"""`python -m tests.support.older [--lacks=MESSAGE]... serve ...`: the command `kvxfer` of the version before.

The idea: this process forgets what came with the newest version of the protocol (all of it, or some messages alone)
before it begins. It offers the version before, takes those messages for unknown, and neither reads nor sends the fields
that came later. For tests of upgrades between real processes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from kvxfer.cli import main
from kvxfer.wire.codec import MESSAGES
from kvxfer.wire.session import VERSIONS, Session

LATER = tuple(kind.__name__ for kind in MESSAGES.values() if kind.since == VERSIONS[1])


def become_older(lacks: Sequence[str] = ()) -> None:
    """From now on this process is of the version before. There is no way back."""
    missing = lacks or LATER
    for number in [number for number, kind in MESSAGES.items() if kind.__name__ in missing]:
        del MESSAGES[number]
    for kind in MESSAGES.values():
        kind.kinds = tuple((name, of) for name, of in kind.kinds if kind.added.get(name, 1) < VERSIONS[1])
        kind.added = {name: version for name, version in kind.added.items() if version < VERSIONS[1]}
        kind.optional = {name: kind.optional[name] for name in kind.added}
    make: Any = Session.__init__
    make.__kwdefaults__["versions"] = (VERSIONS[0], VERSIONS[1] - 1)


def run(arguments: Sequence[str]) -> int:
    """The exit status of the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.older", description=__doc__)
    parser.add_argument("--lacks", action="append", choices=LATER, default=[], help="only this (may be repeated)")
    options, rest = parser.parse_known_args(arguments)
    become_older(options.lacks)
    return main(rest)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

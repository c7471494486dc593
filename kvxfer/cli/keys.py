"""`kvxfer keys`: from one root, a file for each node with which that node proves itself, and can prove nothing else."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from kvxfer.config.sources import read_secret_file
from kvxfer.errors import UsageError
from kvxfer.net.credentials import GENERATIONS_MAX, PEERS_MAX, NodeKeys, node_named

EPILOG = """The root is a file like that of `secret_file`: 16 random bytes or more in a line, best on no node. For
a new root, put it in as the first line above the old one and distribute what this writes; then take the old line out
and do it again. A new node: name it, and the others with --others; their files need no change."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = EPILOG
    parser.add_argument("nodes", nargs="+", metavar="NODE", help="a name, or an id of 32 hex digits: a file for each")
    parser.add_argument("--root", required=True, help="file with the root; a second line is the one before it")
    parser.add_argument("--directory", required=True, type=Path, help="where to write NODE.keys")
    parser.add_argument("--others", nargs="*", default=[], metavar="NODE", help="nodes that have their files already")


def run(args: argparse.Namespace) -> int:
    """Write the files; one line for each, without what is in it."""
    roots = read_secret_file(args.root, "--root")
    if len(roots) > GENERATIONS_MAX:
        raise UsageError("too many roots", field="root", value=len(roots), limit=GENERATIONS_MAX)
    astray = next((name for name in args.nodes if "/" in name), None)
    if astray is not None:
        raise UsageError("a node's name is also that of its file", field="nodes", value=astray, hint="no / in it")
    everybody = [node_named(name) for name in (*args.nodes, *args.others)]
    if len(set(everybody)) < len(everybody):
        raise UsageError("a node is named twice", field="nodes")
    if len(everybody) > PEERS_MAX:
        raise UsageError("too many nodes for one file", field="nodes", value=len(everybody), limit=PEERS_MAX)
    try:
        args.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, node_id in zip(args.nodes, everybody, strict=False):
            path = args.directory / f"{name}.keys"
            write(path, NodeKeys.derive(roots, node_id, everybody).render())
            print(f"{path}: node {node_id}", file=sys.stdout)
    except OSError as failure:
        why = f"{args.directory} cannot be written to: {failure.strerror}"
        raise UsageError(why, field="directory", hint="name a directory of yours") from failure
    return 0


def write(path: Path, text: str) -> None:
    """For its owner alone from the first byte on, and whole or not at all."""
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(text)
    fresh.replace(path)

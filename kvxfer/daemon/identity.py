"""Who this node is: an id that stays the same across restarts, and the version of the program."""

from __future__ import annotations

import hashlib
import socket
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

from kvxfer.config import Config

MACHINE_ID = Path("/etc/machine-id")


def stable_node_id(config: Config, directory: Path) -> str:
    """32 hex digits out of what tells this daemon from others: machine, name, socket directory and address.

    Two daemons on one host differ in their directory; a daemon that restarts with its old configuration keeps its id.
    """
    try:
        machine = MACHINE_ID.read_text().strip()
    except OSError:
        machine = ""
    parts = ("kvxfer node", machine, socket.gethostname(), config.node_name, str(directory), config.listen)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@cache
def package_version() -> str:
    """The installed version; `0+unknown` when run from a tree that was never installed."""
    try:
        return installed_version("kvxfer")
    except PackageNotFoundError:
        return "0+unknown"

"""A node's id stays the same across restarts and differs between daemons."""

from __future__ import annotations

from pathlib import Path

from kvxfer.config import Config
from kvxfer.server import package_version, stable_node_id


def test_id_is_stable_and_distinct() -> None:
    base = stable_node_id(Config(), Path("/run/a"))
    assert len(base) == 32
    assert int(base, 16) >= 0
    assert stable_node_id(Config(), Path("/run/a")) == base
    others = {
        stable_node_id(Config(), Path("/run/b")),
        stable_node_id(Config(listen="127.0.0.1:1"), Path("/run/a")),
        stable_node_id(Config(node_name="n"), Path("/run/a")),
    }
    assert len(others | {base}) == 4


def test_options_that_are_not_identity_do_not_change_it() -> None:
    assert stable_node_id(Config(lease_s=3), Path("/run/a")) == stable_node_id(Config(), Path("/run/a"))


def test_version_is_known_or_says_so() -> None:
    assert package_version()

"""The commands of docs/security.md make certificates that work, and the options that it names exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer.config import CONFIG_OPTIONS
from kvxfer.tasks import Deadline
from kvxfer.wire import messages as m
from tests.certificates import openssl
from tests.conftest import slack
from tests.nodes import node, worker

pytestmark = pytest.mark.once

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
[KEYS, SCRIPT] = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def run(script: str, directory: Path) -> None:
    openssl("version", cwd=directory)  # says what is missing
    ended = subprocess.run(
        ["sh", "-euc", script], cwd=directory, capture_output=True, text=True, timeout=30 * slack(), check=False
    )
    assert ended.returncode == 0, ended.stderr


async def test_the_commands_make_node_keys_that_work(tmp_path: Path) -> None:
    run(KEYS.replace("kvxfer keys", f"{sys.executable} -m kvxfer keys"), tmp_path)
    files = [str(tmp_path / "keys" / f"node-{name}.keys") for name in "ad"]
    async with node(node_keys_file=files[0]) as here, node(node_keys_file=files[1]) as there:
        link = await here.pool.get(there.addresses, there.node_id, Deadline.after(10 * slack()))
        assert link.peer.node_id == there.node_id


async def test_the_commands_make_certificates_that_work(tmp_path: Path) -> None:
    authority, per_node = SCRIPT.split("# a node:")
    options = []
    for name in ("a", "b"):
        if name == "a":
            run(authority, tmp_path)
        run("umask 077\n#" + per_node, tmp_path)
        for kind in ("key", "pem"):
            (tmp_path / f"node.{kind}").rename(tmp_path / f"{name}.{kind}")
        options.append(
            {
                "tls_cert": str(tmp_path / f"{name}.pem"),
                "tls_key": str(tmp_path / f"{name}.key"),
                "tls_ca": str(tmp_path / "ca.pem"),
            }
        )
    async with node(**options[0]) as here, node(**options[1]) as there, worker(here) as asker:
        assert here.node_id != there.node_id
        assert (await asker.ask(m.Echo(node=there.addresses, data=b"x"))).data == b"x"
        assert 29 * 86400 < (here.credentials.expires_in_s or 0) <= 30 * 86400


def test_what_the_page_names_exists() -> None:
    names = {option.name for option in CONFIG_OPTIONS}
    for word in ("secret_file", "tls_cert", "tls_key", "tls_ca", "reload_s", "allow_nodes", "namespace", "socket_uids"):
        assert word in names
        assert f"`{word}" in PAGE

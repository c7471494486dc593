"""`kvxfer doctor`: text, JSON, exit status."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer import cli
from tests.conftest import slack

pytestmark = pytest.mark.once


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No options of this machine, and ports that nobody has."""
    for name in [name for name in os.environ if name.startswith("KVXFER_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KVXFER_LISTEN", "127.0.0.1:0")
    monkeypatch.setenv("KVXFER_HTTP", "")
    monkeypatch.setenv("KVXFER_SOCKET_DIR", str(tmp_path / "run"))


@pytest.mark.usefixtures("quiet")
def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for word in ("native engine", "locked memory", "cross-memory attach", "monotonic clock", "port of listen"):
        assert word in shown
    assert "0 problem" in shown


@pytest.mark.usefixtures("quiet")
def test_json_and_a_problem(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv("KVXFER_LISTEN", f"127.0.0.1:{other.getsockname()[1]}")
        assert cli.main(["doctor", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    [taken] = [finding for finding in answer["findings"] if finding["check"] == "port of listen"]
    assert (answer["state"], taken["state"]) == ("problem", "problem")
    assert "ss -ltnp" in taken["advice"]


@pytest.mark.usefixtures("quiet")
def test_a_peer_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--peer", "127.0.0.1:1", "--timeout", "2"]) == 1
    assert "Connection refused" in capsys.readouterr().out


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--peer", "127.0.0.1"], "port is missing"),
        (["--peer", "127.0.0.1:0"], "nobody can dial"),
        (["--timeout", "0"], "--timeout must be"),
        (["--peer", "127.0.0.1:1"] * 33, "at most 32"),
        (["--config", "/nonexistent.toml"], "/nonexistent.toml"),
    ],
)
def test_wrong_usage(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *words]) == 2
    shown = capsys.readouterr().err
    assert expected in shown
    assert shown.count("\n") == 1


@pytest.mark.usefixtures("quiet")
def test_a_low_limit_of_locked_memory_is_told_before_anything_starts() -> None:
    """Limit, amount and remedy; as a process without capabilities sees it."""
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536));"
        "from kvxfer.doctor import host; host.CAPABILITIES.clear();"
        "from kvxfer import cli; sys.exit(cli.main(['doctor']))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60 * slack(), check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    [line] = [line for line in ended.stdout.splitlines() if "locked memory" in line]
    assert "warning" in line
    assert "ulimit -l is 64 KiB" in line
    assert "256 MiB" in line

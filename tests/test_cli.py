"""The command line as a whole: what help shows, and that every error is one line and the right status."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvxfer import cli
from kvxfer.errors import ConfigError, PeerUnreachable


def test_help_lists_every_command_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    for name, (_, summary) in cli.COMMANDS.items():
        assert name in shown
        assert summary.split()[0] in shown


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert len(capsys.readouterr().out) > 200


@pytest.mark.parametrize("words", [[], ["unknown"], ["config", "--no-such-flag"], ["config", "--lease-s", "long"]])
def test_wrong_usage_is_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = cli.main(words)
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["serve", "--listn", "127.0.0.1:0"], "--listen"),
        (["serve", "--listn=127.0.0.1:0"], "--listen"),
        (["ping", "127.0.0.1:1", "--timout", "1"], "--timeout"),
        (["doctor", "--jsn"], "--json"),
        (["--versoin"], "--version"),
    ],
)
def test_an_unknown_option_is_told_the_nearest(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    wrong = next(word for word in words if word.startswith("--"))
    shown = capsys.readouterr().err
    assert "unrecognized arguments: " in shown
    assert wrong in shown
    assert f"did you mean {meant}?" in shown


def test_an_option_like_no_other_gets_no_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["config", "--qqqqqqqqqqqqq"])
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize(("error", "status"), [(ConfigError("wrong\nvalue"), 2), (PeerUnreachable("gone"), 1)])
def test_errors_are_one_line(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing:
        @staticmethod
        def configure(_: object) -> None:
            """No arguments."""

        @staticmethod
        def run(_: object) -> int:
            raise error

    monkeypatch.setattr(cli, "load_command", lambda _: Failing)
    assert cli.main(["config"]) == status
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert shown.startswith("kvxfer config: ")


def test_module_and_version() -> None:
    command = [sys.executable, "-m", "kvxfer", "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    assert shown.startswith("kvxfer ")


def test_reader_that_goes_away_is_no_traceback() -> None:
    command = f"{sys.executable} -m kvxfer config | head -1"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30, check=True)
    assert ended.stdout.startswith("node_name")
    assert "Traceback" not in ended.stderr

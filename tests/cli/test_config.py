"""`kvxfer config`: effective values and where they come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvxfer import cli
from kvxfer.config import CONFIG_OPTIONS

SECRET = "a secret that is never shown"


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in CONFIG_OPTIONS:
        monkeypatch.delenv(option.env, raising=False)
    monkeypatch.delenv("KVXFER_CONFIG", raising=False)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["config", *words]) == 0
    return capsys.readouterr().out


def test_every_option_with_its_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kvxfer.toml"
    file.write_text("lease_s = 7\nkeepalive_s = 8\ndrain_s = 9\n")
    monkeypatch.setenv("KVXFER_KEEPALIVE_S", "18")
    monkeypatch.setenv("KVXFER_DRAIN_S", "19")
    rows = json.loads(run(capsys, "--json", "--config", str(file), "--drain-s", "29"))
    assert list(rows) == [option.name for option in CONFIG_OPTIONS]
    assert rows["lease_s"] == {"value": "7", "origin": f"file {file}"}
    assert rows["keepalive_s"] == {"value": "18", "origin": "environment KVXFER_KEEPALIVE_S"}
    assert rows["drain_s"] == {"value": "29", "origin": "flag --drain-s"}
    assert rows["dead_s"]["origin"] == "default"


def test_changed_shows_only_what_is_not_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--changed", "--lease-s", "3").split() == ["lease_s", "3", "flag", "--lease-s"]
    assert run(capsys, "--changed") == ""


def test_secret_is_hidden(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KVXFER_SECRET", SECRET)
    shown = run(capsys)
    assert SECRET not in shown
    assert "(hidden)" in shown


def test_unknown_variable_is_a_warning(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KVXFER_LEESE_S", "3")
    assert cli.main(["config"]) == 0
    assert "KVXFER_LEESE_S" in capsys.readouterr().err

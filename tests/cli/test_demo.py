"""`kvxfer demo`: finds its scripts in a checkout and in an installed package, and shows their own arguments."""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import Distribution
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvxfer
from kvxfer import cli
from kvxfer.cli import demo

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """A package that does not lie in a checkout; the list is what its metadata says was installed."""
    package = tmp_path / "lib" / "kvxfer"
    package.mkdir(parents=True)
    files: list[SimpleNamespace] = []
    monkeypatch.setattr(kvxfer, "__file__", str(package / "__init__.py"))
    monkeypatch.setattr(Distribution, "from_name", lambda name: SimpleNamespace(files=files))
    monkeypatch.delitem(sys.modules, demo.NAME, raising=False)
    return files


def test_checkout() -> None:
    assert demo.script() == ROOT / "examples" / "demo.py"


def test_installed_package(installed: list[SimpleNamespace], tmp_path: Path) -> None:
    script = tmp_path / "share" / "kvxfer" / "examples" / "demo.py"
    script.parent.mkdir(parents=True)
    script.write_text("")
    entry = SimpleNamespace(as_posix=lambda: f"../../{demo.INSTALLED}", locate=lambda: script)
    installed += [SimpleNamespace(as_posix=lambda: "kvxfer/cli/demo.py", locate=lambda: "/nowhere"), entry]
    assert demo.script() == script


def test_package_without_it(installed: list[SimpleNamespace], capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.script() is None
    assert cli.main(["demo"]) == 2
    assert "make demo" in capsys.readouterr().err


def test_every_script_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    data = project["tool"]["setuptools"]["data-files"]
    target = Path(demo.INSTALLED)
    shipped = {path.name for pattern in data[str(target.parent)] for path in ROOT.glob(pattern)}
    assert {"demo.py", "demo_worker.py", "tiny_model.py"} <= shipped
    assert data[str(target.parent.parent)] == ["README.md"]  # the default prompt


def test_help_is_the_script_s_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for word in ("--damage", "--prompt", "--ways", "Exit status"):
        assert word in shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--tokens", "0"], "--tokens"),
        (["--transports", "smh"], "shm, tcp"),
        (["--ways", "push,push"], "push, pull, adopt"),
        (["--prompt", "/nonexistent/text"], "/nonexistent/text: No such file"),
        (["--ways", "adopt", "--transports", "tcp"], "adopt does not go over tcp"),
    ],
)
def test_wrong_usage(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = cli.main(["demo", *words])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert expected in capsys.readouterr().err

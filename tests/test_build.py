"""The build's own promises: pins that are whole and agree with the package, targets that exist, scripts that parse."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import elf
from tests.native.aarch64 import run
from tools import preflight

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def pins(name: str) -> dict[str, str]:
    """Package to exact version, files that it includes included."""
    found: dict[str, str] = {}
    for line in (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("-r "):
            found |= pins(line.removeprefix("-r "))
        elif line and not line.startswith("#"):
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)", line)
            assert match, f"{name}: {line!r} is not an exact version"
            found[canonicalize_name(match[1])] = match[2]
    return found


def test_runtime_pins_satisfy_what_the_package_asks_for() -> None:
    exact = pins("runtime.txt")
    for text in PROJECT["project"]["dependencies"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(exact[canonicalize_name(requirement.name)]), text


def test_pins_are_what_runs_here() -> None:
    """Otherwise a green run says little about the pinned versions."""
    for name, exact in pins("dev.txt").items():
        try:
            assert version(name) == exact, name
        except PackageNotFoundError:
            pytest.fail(f"{name} is pinned and not installed: run make build")


def test_every_target_of_the_documentation_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {word for line in re.findall(r"^([a-z][a-z -]*):", makefile, re.MULTILINE) for word in line.split()}
    for page in ("README.md", "docs/contributing.md", "docs/operations.md"):
        named = set(re.findall(r"\bmake ([a-z-]+)\b(?=[`# ])", (ROOT / page).read_text(encoding="utf-8")))
        spoken = {name for name in named if f"`make {name}" in (ROOT / page).read_text(encoding="utf-8")}
        assert spoken <= targets, page


def test_help_lists_the_targets_that_people_use() -> None:
    run = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = {line.split()[0] for line in run.stdout.splitlines() if line.startswith("  ")}
    assert {
        "build",
        "demo",
        "demo-ascend-sim",
        "check",
        "test",
        "sanitize",
        "check-aarch64",
        "bench",
        "clean",
        "help",
    } <= listed


def test_ci_script_parses_and_may_be_executed() -> None:
    script = ROOT / ".ci" / "run"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert script.stat().st_mode & 0o111
    text = script.read_text(encoding="utf-8")
    assert "set -euo pipefail" in text
    assert "make check-aarch64" in text
    assert "tools/system-packages\n" in text.replace(" #", "\n")


def test_a_missing_cross_compiler_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "PACKAGES", {"no-such-compiler": "gcc-aarch64-linux-gnu", "sh": "dash"})
    monkeypatch.setattr("sys.argv", ["run"])
    assert run.main() == 2
    assert "apt-get install gcc-aarch64-linux-gnu\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "value", "sentence"),
    [
        ("PYTHON_MIN", (99, 0), "needs Python 99.0 or newer"),
        ("CC", "no-such-compiler", "No C compiler"),
        ("CXX", "no-such-compiler", "No C++ compiler"),
    ],
)
def test_preflight_says_what_is_missing(
    setting: str, value: object, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting in ("CC", "CXX"):
        monkeypatch.setenv(setting, str(value))
    else:
        monkeypatch.setattr(preflight, setting, value)
    [problem] = list(preflight.problems())
    assert sentence in problem


def test_the_engine_is_built_with_what_an_overflow_runs_into() -> None:
    """Canaries on the stack, bounds in libc calls, tables read-only after loading, no memory to run code in."""
    found = importlib.util.find_spec("kvxfer.native._shim")
    assert found is not None
    assert found.origin is not None
    made = elf.read(Path(found.origin))
    assert "__stack_chk_fail" in made.names
    assert "__memcpy_chk" in made.names
    assert "__snprintf_chk" in made.names
    assert made.binds_now
    assert not made.rewrites_code
    assert elf.PT_GNU_RELRO in [kind for kind, _ in made.segments]
    [stack] = [flags for kind, flags in made.segments if kind == elf.PT_GNU_STACK]
    assert not stack & elf.PF_X
    assert not [flags for kind, flags in made.segments if kind == elf.PT_LOAD and flags & elf.PF_W and flags & elf.PF_X]


def test_the_other_architecture_is_built_alike() -> None:
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert f"HARDENED = {run.HARDENED}".replace("'", '"') in text

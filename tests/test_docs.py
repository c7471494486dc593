"""What the documents show runs: the snippets of docs/api.md as one program, the quickstarts of the README, commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvxfer import cli, errors
from kvxfer.config import CONFIG_OPTIONS
from tests.conftest import slack

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")} | {"README.md": README}
OPTIONS = {option.name for option in CONFIG_OPTIONS}


def snippets(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def run(script: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVXFER_")}
    ended = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        timeout=30 * slack(),
        env=environment | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    return ended.stdout


def test_api_page_runs_from_top_to_bottom(tmp_path: Path) -> None:
    imports, *blocks = snippets(PAGES["api.md"], "python")
    assert len(blocks) >= 10
    body = textwrap.indent("\n".join(blocks), "        ")
    script = tmp_path / "page.py"
    script.write_text(
        f"{imports}\n\nasync def main():\n"
        f"    async with kvxfer.local() as prefill, kvxfer.local() as decode:\n{body}\n"
        "    print('the end')\n\nasyncio.run(main())\n"
    )
    assert run(script).endswith("the end\n")


def test_geometry_page_s_first_snippet_runs(tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(snippets(PAGES["geometry.md"], "python")[0] + "\nprint(layout.region_bytes())\n")
    assert run(script).startswith("{0: ")


@pytest.mark.parametrize(
    ("name", "last"), [("quickstart_push", "all layers are right"), ("quickstart_pull", "all bytes are right")]
)
def test_quickstarts_run_and_are_what_the_readme_shows(name: str, last: str) -> None:
    script = ROOT / "examples" / f"{name}.py"
    assert run(script).splitlines()[-1] == last
    text = re.sub(r"\s", "", script.read_text(encoding="utf-8"))
    shown = [block for block in snippets(README, "python") if f"# examples/{name}.py" in block]
    assert len(shown) == 1
    for function in re.split(r"\n\n+", shown[0].split("\n", 1)[1].strip()):
        head, _, body = function.partition(":\n")
        assert re.sub(r"\s", "", body) in text
        assert re.match(r"async def (prefill|decode)\(", head)


def test_module_docstring_runs() -> None:
    import doctest

    import kvxfer

    result = doctest.testmod(kvxfer)
    assert result.attempted >= 3
    assert result.failed == 0


@pytest.mark.parametrize("name", sorted(PAGES))
def test_commands_and_flags_exist(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command, rest in re.findall(r"\bkvxfer (serve|ping|demo|config|bench|[a-z]+)\b([^\n`|]*)", PAGES[name]):
        if command not in cli.COMMANDS:
            continue  # prose
        flags = re.findall(r"(?<!\S)(--[a-z-]+)", rest)
        if flags:
            with pytest.raises(SystemExit):
                cli.main([command, "--help"])
            shown = capsys.readouterr().out
            assert [flag for flag in flags if flag not in shown] == [], (name, command)


def test_command_table_is_complete() -> None:
    table = README[README.index("## Commands") :]
    for command in cli.COMMANDS:
        assert re.search(rf"^\| `kvxfer {command}\b", table, re.MULTILINE), command


@pytest.mark.parametrize("name", sorted(PAGES))
def test_error_classes_exist(name: str) -> None:
    named = set(re.findall(r"`([A-Z][A-Za-z]+(?:Error|Lost|Unreachable|Expired|Mismatch|Transfer))`", PAGES[name]))
    builtin = {"ValueError", "TimeoutError"}
    assert {word for word in named if not hasattr(errors, word)} <= builtin | {"Transfer"}


@pytest.mark.parametrize("name", ["README.md", "operations.md", "security.md", "api.md"])
def test_named_options_exist(name: str) -> None:
    """A word with a unit in backticks is an option, unless it says what it belongs to."""
    words = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", PAGES[name]))
    options = {word for word in words if word.rsplit("_", 1)[1] in ("s", "max", "bytes", "dir", "file", "port", "bind")}
    assert options - OPTIONS <= {"wait_s", "expires_in_s"}  # arguments of calls

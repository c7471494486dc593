"""The analyzer of `make analyze` reports what it should, and remembers only what was clean."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.system import needs
from tools import analyze


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(analyze, "CLEAN", tmp_path / "clean")
    return tmp_path


def outcome(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["analyze", *words])
    return analyze.main()


@needs("clang")
def test_a_finding_fails_every_time(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = place / "freed.c"
    source.write_text("#include <stdlib.h>\nint f(void) { int *p = malloc(4); free(p); return *p; }\n")
    for _ in range(2):
        assert outcome(monkeypatch, str(source)) == 1
        assert "freed.c:2" in capsys.readouterr().out
    source.write_text("int f(void) { return 1; }\n")
    assert outcome(monkeypatch, str(source)) == 0
    monkeypatch.setattr(analyze, "analyze", lambda clang, path: "asked again\n")
    assert outcome(monkeypatch, str(source)) == 0, "clean, and nothing changed"
    assert outcome(monkeypatch, "--fresh", str(source)) == 1


def test_every_native_file_is_looked_at() -> None:
    names = {path.name for path in analyze.sources()}
    assert {"core.c", "tcp_serve.c", "ascend_hixl.cc", "reference.c"} <= names
    assert "_shim.c" not in names


def test_without_clang_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr("sys.argv", ["analyze"])
    with pytest.raises(SystemExit, match="apt-get install clang"):
        analyze.main()

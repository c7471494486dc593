"""Short runs of the fuzzers of the native code, from the corpora in the tree; `make fuzz MINUTES=5` runs long ones."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.native.fuzz import build
from tests.system import needs

SECONDS = 2
SLACK = float(os.environ.get("KVXFER_TEST_SLACK", "1"))


@needs("libfuzzer")
@pytest.mark.parametrize("name", build.TARGETS)
def test_fuzzers_find_nothing(name: str, tmp_path: Path) -> None:
    target = build.TARGETS[name]
    assert build.unpack(target, tmp_path) >= 20, "the corpus is in the tree"
    seed = int(os.environ.get("KVXFER_FUZZ_SEED", "1"))
    done = subprocess.run(
        build.command(target, tmp_path, SECONDS, seed),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60 * SLACK,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    runs = re.search(r"number_of_executed_units:\s*(\d+)", done.stdout)
    edges = [int(found) for found in re.findall(r"cov: (\d+)", done.stdout)]
    assert runs is not None, done.stdout[-1000:]
    assert int(runs[1]) > 100, "it must have run"
    assert max(edges) >= target.edges_min, "and far enough to mean something"


def test_without_the_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLANG", "no-such-clang")
    with pytest.raises(build.ToolMissing, match="apt-get install clang libclang-rt"):
        build.compiler()


def test_a_compiler_without_the_run_time_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "clang"
    bare.write_text("#!/bin/sh\necho cannot find libclang_rt.fuzzer >&2\nexit 1\n")
    bare.chmod(0o755)
    monkeypatch.setenv("CLANG", str(bare))
    with pytest.raises(build.ToolMissing, match=r"(?s)apt-get install.*cannot find libclang_rt\.fuzzer"):
        build.compiler()

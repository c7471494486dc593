"""Short runs of the fuzzers of the tcp data path, under sanitizers; `fuzz/fuzz.h` says how to run long ones."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NATIVE = HERE.parent.parent / "kvxfer" / "native"
BUILD = HERE / "build" / "fuzz"
PURE = ["stream.c", "auth.c", "copy.c"]
TARGETS = {"fuzz_stream": PURE, "fuzz_serve": [*PURE, "transport_tcp.c", "tcp_*.c"]}
SECONDS = 1.5
COMPILER = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
FLAGS = ["-O1", "-g", "-std=gnu11", "-pthread", "-Wall", "-Wextra", "-Werror"]
FLAGS += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def built(name: str) -> Path:
    """Compile the target when a source is newer than it."""
    assert COMPILER is not None
    sources = [HERE / "fuzz" / f"{name}.c", *(path for one in TARGETS[name] for path in sorted(NATIVE.glob(one)))]
    newest = max(one.stat().st_mtime for one in [*sources, *NATIVE.glob("*.h"), HERE / "fuzz" / "fuzz.h"])
    binary = BUILD / name
    if not binary.exists() or binary.stat().st_mtime < newest:
        BUILD.mkdir(parents=True, exist_ok=True)
        made = BUILD / f"{name}.{os.getpid()}"
        includes = [f"-I{NATIVE}", f"-I{HERE / 'fuzz'}"]
        subprocess.run([COMPILER, *FLAGS, *includes, "-o", str(made), *map(str, sources)], check=True)
        made.rename(binary)
    return binary


@pytest.mark.skipif(COMPILER is None, reason="no C compiler on this machine")
@pytest.mark.parametrize("name", TARGETS)
def test_fuzzers_find_nothing(name: str) -> None:
    seed = os.environ.get("KVXFER_FUZZ_SEED", "1")
    done = subprocess.run(
        [str(built(name)), str(SECONDS), seed],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60 * float(os.environ.get("KVXFER_TEST_SLACK", "1")),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(done.stdout.split()[0]) > 100, "it must have run"

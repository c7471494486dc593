"""A pure C file of the engine by itself, as a library for ctypes: tests that need no engine round it."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from shutil import which

from tests.native.sources import NATIVE, named

FLAGS = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{NATIVE}")


def compiled(directory: Path, name: str, more: str = "") -> ctypes.CDLL:
    """The engine's ``<name>.c``, and ``more``: C text for what it calls elsewhere."""
    compiler = os.environ.get("CC") or which("gcc") or which("clang") or which("cc")
    assert compiler is not None, "a C compiler built the engine"
    sources = [named(f"{name}.c")]
    if more:
        sources.append(directory / "more.c")
        sources[-1].write_text(more)
    target = directory / f"{name}.so"
    subprocess.run([compiler, *FLAGS, "-o", str(target), *map(str, sources)], check=True)
    return ctypes.CDLL(str(target))

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
    sources = [named(f"{name}.c")]
    if more:
        sources.append(directory / "more.c")
        sources[-1].write_text(more)
    return library(directory / f"{name}.so", sources)


def compiled_text(directory: Path, text: str) -> ctypes.CDLL:
    """C text that uses a pure header of the engine."""
    source = directory / "text.c"
    source.write_text(text)
    return library(directory / "text.so", [source])


def library(target: Path, sources: list[Path]) -> ctypes.CDLL:
    compiler = os.environ.get("CC") or which("gcc") or which("clang") or which("cc")
    assert compiler is not None, "a C compiler built the engine"
    subprocess.run([compiler, *FLAGS, "-o", str(target), *map(str, sources)], check=True)
    return ctypes.CDLL(str(target))

"""System packages that tests need (`tools/system-packages` knows them): a test without its own is skipped by name."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def missing(tool: str) -> str:
    """Empty when the tool is here; else what is missing and how to get it."""
    words = [str(ROOT / "tools" / "system-packages"), "--has", tool]
    asked = subprocess.run(words, capture_output=True, text=True, check=False)
    assert asked.returncode in (0, 1), asked.stderr
    return asked.stdout.strip().removeprefix("SKIPPED ")


def needs(tool: str) -> pytest.MarkDecorator:
    """Skips a test where the tool is missing."""
    return pytest.mark.skipif(bool(missing(tool)), reason=missing(tool))

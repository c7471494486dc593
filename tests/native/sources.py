"""The C and C++ files of the engine, wherever they lie in its folders: for tests that compile some or all of them."""

from __future__ import annotations

from pathlib import Path

NATIVE = Path(__file__).resolve().parents[2] / "kvxfer" / "native"
GENERATOR_INPUT = "api.csrc.c"  # part of the generated binding, and no file to compile


def compiled(suffix: str) -> list[Path]:
    """All files of the engine with this suffix (".c" or ".cc"), without the generated binding."""
    return [path for path in sorted(NATIVE.rglob(f"*{suffix}")) if path.name != GENERATOR_INPUT]


def matching(pattern: str) -> list[Path]:
    """The files whose name fits, such as "tcp_*.c"; at least one."""
    found = sorted(NATIVE.rglob(pattern))
    assert found, f"no file of the engine is named {pattern}"
    return found


def named(name: str) -> Path:
    """The one file with this name, such as "ring.c"."""
    [found] = matching(name)
    return found


def headers() -> list[Path]:
    """All headers, whose change means that everything is compiled again."""
    return sorted(NATIVE.rglob("*.h"))
